// Copies one or two tensors with any strides to the workspace with channels last, for TMA and for the
// vector copies of conv_gather.cu.  The order of a copy is (n, d, h, w, channel), and each pixel begins
// at a multiple of 16 bytes.
//
// A filter is treated as a batch of images whose pixels are the taps.  A block moves TILE pixels by TILE
// channels through shared memory.  Adjacent threads load adjacent pixels, which are contiguous in
// channels-first tensors, and store adjacent channels, 16 bytes per thread.
//
// A variant is chosen with -D: STORAGE.
#include "numeric.cuh"
#include "ptx.cuh"
#include "vector.cuh"

using Storage = STORAGE;

constexpr int THREADS = 256;
constexpr int TILE = 64;
constexpr int VECTOR = 16 / sizeof(Storage);
constexpr int ELEMENTS = TILE * TILE / THREADS;  // elements per thread

// A tensor; strides in elements.
struct ArrangeShape {
  long long extent[4];  // N, D, H, W
  long long stride[4];
  long long channels;
  long long channel_stride;
  long long tiles;  // number of tiles of TILE pixels by TILE channels
};

struct ArrangeShapes {
  ArrangeShape of[2];
};

struct Tile {
  long long first_pixel, first_channel, pixels;
  long long (&offset)[TILE];  // offsets of the pixels in the tensor

  __device__ __forceinline__ Tile(long long number, const ArrangeShape& shape,
                                  long long (&offsets)[TILE])
      : offset(offsets) {
    const long long columns = (shape.channels + TILE - 1) / TILE;
    first_channel = number % columns * TILE;
    first_pixel = number / columns * TILE;
    pixels = shape.extent[0] * shape.extent[1] * shape.extent[2] * shape.extent[3];
    if (threadIdx.x >= TILE) return;
    long long rest = first_pixel + threadIdx.x, place = 0;
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) {
      place += rest % shape.extent[axis] * shape.stride[axis];
      rest /= shape.extent[axis];
    }
    offset[threadIdx.x] = place;
  }

  // Calls use(i, offset) for each existing element of this thread, with the element's offset in the
  // tensor.  All elements of a thread belong to one pixel.
  template <class Use>
  __device__ __forceinline__ void for_each_element(const ArrangeShape& shape, Use use) const {
    const bool inside = first_pixel + pixel() < pixels;
    const long long place = offset[pixel()];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const long long channel = first_channel + channel_of(i);
      if (inside && channel < shape.channels)
        use(i, place + channel * shape.channel_stride);
    }
  }
  __device__ __forceinline__ static int pixel() { return threadIdx.x % TILE; }
  __device__ __forceinline__ static int channel_of(int i) {
    return threadIdx.x / TILE + i * (THREADS / TILE);
  }

  // Calls use(pixel, channel, offset) for each vector that this thread stores, with the offset in the
  // copy.  The last vector of a pixel may extend past the last channel.
  template <class Use>
  __device__ __forceinline__ void for_each_piece(const ArrangeShape& shape, Use use) const {
    const long long pitch = (shape.channels + VECTOR - 1) / VECTOR * VECTOR;
#pragma unroll
    for (int i = 0; i < ELEMENTS / VECTOR; ++i) {
      const int number = threadIdx.x + i * THREADS;
      const int channel = number % (TILE / VECTOR) * VECTOR, pixel = number / (TILE / VECTOR);
      if (first_pixel + pixel < pixels && first_channel + channel < shape.channels)
        use(pixel, channel, (first_pixel + pixel) * pitch + first_channel + channel);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    conv_arrange(const Storage* __restrict__ first, Storage* __restrict__ first_copy,
                 const Storage* __restrict__ second, Storage* __restrict__ second_copy,
                 const __grid_constant__ ArrangeShapes shapes) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  ptx::griddepcontrol_launch_dependents();
#endif
  __shared__ Storage element[TILE][TILE + 1];  // [channel][pixel]; lines begin in different banks
  __shared__ long long offsets[TILE];
  const bool is_first = blockIdx.x < shapes.of[0].tiles;
  const ArrangeShape& shape = shapes.of[is_first ? 0 : 1];
  const Storage* const tensor = is_first ? first : second;
  Storage* const copy = is_first ? first_copy : second_copy;
  const Tile tile(blockIdx.x - (is_first ? 0 : shapes.of[0].tiles), shape, offsets);
  __syncthreads();  // the offsets are written
  Storage loaded[ELEMENTS] = {};  // all loads are in flight together
  tile.for_each_element(shape, [&](int i, long long place) { loaded[i] = tensor[place]; });
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) element[tile.channel_of(i)][tile.pixel()] = loaded[i];
  __syncthreads();  // the elements are written
  tile.for_each_piece(shape, [&](int pixel, int channel, long long place) {
    union {
      Piece<Storage, VECTOR> piece;
      unsigned words[4];
    } one;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) one.piece.element[i] = element[channel + i][pixel];
    ptx::store_16_bytes(copy + place, one.words);
  });
}
