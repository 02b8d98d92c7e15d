// Copies a tensor between the user's memory order and channels last, which TMA walks over.
//
//   in    from any strides to a contiguous (n, d, h, w, channel) in the workspace
//   out   from there to any strides
//
// A filter counts as a batch of filters whose pixels are its taps.  A block moves TILE pixels of TILE
// channels through shared memory: on the user's side neighbouring threads take neighbouring pixels,
// which is what channels-first tensors have contiguous, on ours neighbouring channels, 16 bytes a
// thread.
//
// A variant is chosen with -D: STORAGE.
#include "numeric.cuh"
#include "ptx.cuh"
#include "vector.cuh"

using Storage = STORAGE;

constexpr int THREADS = 256;
constexpr int TILE = 64;
constexpr int VECTOR = 16 / sizeof(Storage);
constexpr int ELEMENTS = TILE * TILE / THREADS;  // of a thread

// The user's tensor; strides in elements.
struct ArrangeShape {
  long long extent[4];  // N, D, H, W
  long long stride[4];
  long long channels;  // a multiple of VECTOR
  long long channel_stride;
};

struct Tile {
  long long first_pixel, first_channel, pixels;
  long long (&offset)[TILE];  // of the pixels, in the user's tensor

  __device__ __forceinline__ Tile(const ArrangeShape& shape, long long (&offsets)[TILE])
      : offset(offsets) {
    const long long columns = (shape.channels + TILE - 1) / TILE;
    first_channel = blockIdx.x % columns * TILE;
    first_pixel = blockIdx.x / columns * TILE;
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

  // Calls use(i, channel, offset) for this thread's elements that exist, in the user's order: the
  // i-th is of its pixel, and of a channel further on.
  template <class Use>
  __device__ __forceinline__ void for_each_element(const ArrangeShape& shape, Use use) const {
    const bool inside = first_pixel + pixel() < pixels;
    const long long place = offset[pixel()];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const long long channel = first_channel + channel_of(i);
      if (inside && channel < shape.channels)
        use(i, channel_of(i), place + channel * shape.channel_stride);
    }
  }
  __device__ __forceinline__ static int pixel() { return threadIdx.x % TILE; }
  __device__ __forceinline__ static int channel_of(int i) {
    return threadIdx.x / TILE + i * (THREADS / TILE);
  }

  // Calls use(i, pixel, channel, offset) for this thread's pieces that exist, channels last.
  template <class Use>
  __device__ __forceinline__ void for_each_piece(const ArrangeShape& shape, Use use) const {
#pragma unroll
    for (int i = 0; i < ELEMENTS / VECTOR; ++i) {
      const int number = threadIdx.x + i * THREADS;
      const int channel = number % (TILE / VECTOR) * VECTOR, pixel = number / (TILE / VECTOR);
      if (first_pixel + pixel < pixels && first_channel + channel < shape.channels)
        use(i, pixel, channel, (first_pixel + pixel) * shape.channels + first_channel + channel);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    conv_arrange_in(const Storage* __restrict__ tensor, Storage* __restrict__ copy,
                    const __grid_constant__ ArrangeShape shape) {
  __shared__ Storage element[TILE][TILE + 1];  // by channel; lines begin in different banks
  __shared__ long long offsets[TILE];
  const Tile tile(shape, offsets);
  __syncthreads();  // the offsets are written
  Storage loaded[ELEMENTS] = {};  // all of them are under way before the first is waited for
  tile.for_each_element(shape, [&](int i, int, long long place) { loaded[i] = tensor[place]; });
#pragma unroll
  for (int i = 0; i < ELEMENTS; ++i) element[tile.channel_of(i)][tile.pixel()] = loaded[i];
  __syncthreads();  // the elements are
  tile.for_each_piece(shape, [&](int, int pixel, int channel, long long place) {
    union {
      Piece<Storage, VECTOR> piece;
      unsigned words[4];
    } one;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) one.piece.element[i] = element[channel + i][pixel];
    ptx::store_16_bytes(copy + place, one.words);
  });
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv_arrange_out(Storage* __restrict__ tensor, const Storage* __restrict__ copy,
                     const __grid_constant__ ArrangeShape shape) {
  __shared__ Storage element[TILE][TILE + 1];
  __shared__ long long offsets[TILE];
  const Tile tile(shape, offsets);
  using Vector = Piece<Storage, VECTOR>;
  Vector loaded[ELEMENTS / VECTOR] = {};
  tile.for_each_piece(shape, [&](int i, int, int, long long place) {
    loaded[i] = *reinterpret_cast<const Vector*>(copy + place);
  });
  tile.for_each_piece(shape, [&](int i, int pixel, int channel, long long) {
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) element[channel + j][pixel] = loaded[i].element[j];
  });
  __syncthreads();  // the elements and the offsets are written
  tile.for_each_element(shape, [&](int, int channel, long long place) {
    tensor[place] = element[channel][tile.pixel()];
  });
}
