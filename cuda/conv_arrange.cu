// Copies one or two tensors with any strides to the workspace with channels last, for TMA and for the
// vector copies of conv_gather.cu.  The order of a copy is (n, d, h, w, channel), and each pixel begins
// at a multiple of 16 bytes.
//
// With BANDS, the last axis of a copy is (image, band), and the pixels are (row, column, channel), in any
// order.  The rows of an image are divided into bands, which begin band_rows rows apart and may overlap.
// A band's rows outside the image are zero.  Below, "channel" then means the number of an image and band.
//
// A filter is treated as a batch of images whose pixels are the taps.  A block moves PIXELS pixels by
// CHANNELS channels through shared memory.  Adjacent threads load adjacent pixels, which are contiguous in
// channels-first tensors, and store adjacent channels, 16 bytes per thread.
//
// A variant is chosen with -D: STORAGE, BANDS (may be missing, which means 0).
#include "numeric.cuh"
#include "ptx.cuh"
#include "vector.cuh"

#ifndef BANDS
#define BANDS 0
#endif

using Storage = STORAGE;

constexpr int THREADS = 256;
constexpr int TILE = 64;
constexpr int BAND_PIXELS = 128, BAND_CHANNELS = 32;
constexpr int PIXELS = BANDS ? BAND_PIXELS : TILE, CHANNELS = BANDS ? BAND_CHANNELS : TILE;
constexpr int VECTOR = 16 / sizeof(Storage);
constexpr int ELEMENTS = PIXELS * CHANNELS / THREADS;  // elements per thread

// A tensor; strides in elements.
struct ArrangeShape {
  long long extent[4];  // N, D, H, W; with BANDS, axes in the order of the tensor's memory
  long long stride[4];
  long long channels;
  long long channel_stride;  // with BANDS, stride of the images
  long long tiles;           // number of tiles of PIXELS pixels by CHANNELS channels
  // With BANDS only:
  long long copy_stride[4];
  long long row_axis;   // axis of the rows
  long long first_row;  // row of the image where the first band begins; may be negative
  long long rows;       // rows of the image
  long long bands;      // bands of each image
  long long band_rows;  // rows between the beginnings of adjacent bands
};

struct ArrangeShapes {
  ArrangeShape of[2];
};

// Offsets of a tile's pixels in the tensor; with BANDS, also in the copy, and the rows of the first band.
struct Offsets {
  long long tensor[PIXELS];
#if BANDS
  long long copy[PIXELS];
  int row[PIXELS];
#endif
};

struct Tile {
  long long first_pixel, first_channel, pixels;
  Offsets& offset;

  __device__ __forceinline__ Tile(long long number, const ArrangeShape& shape, Offsets& offset)
      : offset(offset) {
    const long long columns = (shape.channels + CHANNELS - 1) / CHANNELS;
    first_channel = number % columns * CHANNELS;
    first_pixel = number / columns * PIXELS;
    pixels = shape.extent[0] * shape.extent[1] * shape.extent[2] * shape.extent[3];
    if (threadIdx.x >= PIXELS) return;
    long long rest = first_pixel + threadIdx.x, place = 0;
#if BANDS
    long long copy = 0;
#endif
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) {
      const long long at = rest % shape.extent[axis];
      place += at * shape.stride[axis];
      rest /= shape.extent[axis];
#if BANDS
      copy += at * shape.copy_stride[axis];
      if (axis == shape.row_axis) offset.row[threadIdx.x] = static_cast<int>(shape.first_row + at);
#endif
    }
#if BANDS
    place += shape.first_row * shape.stride[shape.row_axis];
    offset.copy[threadIdx.x] = copy;
#endif
    offset.tensor[threadIdx.x] = place;
  }

  // Calls use(i, offset) for each existing element of this thread, with the element's offset in the
  // tensor.  All elements of a thread belong to one pixel.
  template <class Use>
  __device__ __forceinline__ void for_each_element(const ArrangeShape& shape, Use use) const {
    const bool inside = first_pixel + pixel() < pixels;
#if BANDS
    const int bands = static_cast<int>(shape.bands), rows = static_cast<int>(shape.band_rows);
    const int first = static_cast<int>(first_channel) + channel_of(0);
    const int channels = inside ? static_cast<int>(shape.channels) : 0;
    const long long band_stride = shape.band_rows * shape.stride[shape.row_axis];
    int band = first % bands, row = offset.row[pixel()] + band * rows;
    long long place = offset.tensor[pixel()] + first / bands * shape.channel_stride + band * band_stride;
    // Between two elements of a thread, the number of an image and band grows by STEP.
    constexpr int STEP = THREADS / PIXELS;
    const int more = STEP % bands;
    const long long further = STEP / bands * shape.channel_stride + more * band_stride;
    const long long to_next_image = shape.channel_stride - bands * band_stride;
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const bool is_row = static_cast<unsigned>(row) < static_cast<unsigned>(shape.rows);
      if (first + i * STEP < channels && is_row) use(i, place);
      band += more, row += more * rows, place += further;
      if (band < bands) continue;
      band -= bands, row -= bands * rows, place += to_next_image;
    }
#else
    const long long place = offset.tensor[pixel()];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
      const long long channel = first_channel + channel_of(i);
      if (inside && channel < shape.channels)
        use(i, place + channel * shape.channel_stride);
    }
#endif
  }
  __device__ __forceinline__ static int pixel() { return threadIdx.x % PIXELS; }
  __device__ __forceinline__ static int channel_of(int i) {
    return threadIdx.x / PIXELS + i * (THREADS / PIXELS);
  }

  // Calls use(pixel, channel, offset) for each vector that this thread stores, with the offset in the
  // copy.  The last vector of a pixel may extend past the last channel.
  template <class Use>
  __device__ __forceinline__ void for_each_piece(const ArrangeShape& shape, Use use) const {
#pragma unroll
    for (int i = 0; i < ELEMENTS / VECTOR; ++i) {
      const int number = threadIdx.x + i * THREADS;
      const int channel = number % (CHANNELS / VECTOR) * VECTOR;
      const int pixel = number / (CHANNELS / VECTOR);
      if (first_pixel + pixel >= pixels || first_channel + channel >= shape.channels) continue;
#if BANDS
      const long long line = offset.copy[pixel];
#else
      const long long pitch = (shape.channels + VECTOR - 1) / VECTOR * VECTOR;
      const long long line = (first_pixel + pixel) * pitch;
#endif
      use(pixel, channel, line + first_channel + channel);
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
  __shared__ Storage element[CHANNELS][PIXELS + 1];  // lines begin in different banks
  __shared__ Offsets offsets;
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
