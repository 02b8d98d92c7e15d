// Direct convolution for groups of few channels, depthwise above all; 1-D to 3-D, any stride.
//
//   forward          y[n, p, q, k]  = sum over j, r, s of x[n, h, w, j of k's group] * w[k, j, r, s]
//   backprop-input   dx[n, h, w, c] = sum over j, r, s of dy[n, p, q, j of c's group] * w[j, c, r, s]
//   backprop-filter  dw[k, j, r, s] = sum over n, p, q of dy[n, p, q, k] * x[n, h, w, j of k's group]
//
// A tile of a GEMM would be nearly empty here: a group has OUTS results and INS sources a pixel,
// both few, and nothing is shared between groups.  What counts is to move each byte once.  What this
// adds over the generic kernels: a thread computes a strip of TILE neighbouring pixels of a row for
// VECTOR neighbouring channels, so that a pixel it loads serves every output of the strip that it is
// under.  Along w everything about the window is a constant: which tap meets which column of the
// input is worked out by the compiler.  Rows and slices of the filter are loops, and neighbouring
// rows share the input through the L1 cache.
//
// In a depthwise layer (OUTS = INS = 1) the VECTOR channels of a thread are groups of their own and
// have a source each; otherwise they are of one group and share its INS sources.
//
// The gradient of the filter is summed in a fixed order: per thread, then per block in a tree, then
// over the chunks of pixels (gridDim.x) by conv_direct_reduce.
//
// A variant is chosen with -D: PASS (0 forward, 1 backprop-input, 2 backprop-filter), STORAGE, INDEX,
// OUTS, INS, VECTOR, SOURCE_VECTOR (sources loaded at once), LANES (threads along channels, where these
// are contiguous in memory), STRIPS (threads along pixels), TILE, RUN (pixels of a strip that are stored
// at once where VECTOR is 1), FILTER_S, STRIDE_W, DILATION_W, PHASE_W (padding before w modulo
// stride), STAGED_ROWS (rows of the filter held in shared memory at once), SHARE (sources that a block
// of backprop-filter takes), ACTIVATION (of the forward pass).
#include "chunks.cuh"
#include "epilogue.cuh"
#include "maps.cuh"
#include "vector.cuh"

using Index = INDEX;
using Storage = STORAGE;
using Accumulator = typename Numeric<Storage>::Accumulator;

constexpr int THREADS = LANES * STRIPS;

// -- columns: where a strip's outputs meet the filter's taps -----------------------------------------

__device__ constexpr int floor_divide(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

#if PASS == 1
// Output i of the strip is an input pixel; it got a contribution under tap s if this is exact.
static_assert(TILE % STRIDE_W == 0, "strips begin at whole strides");
__device__ constexpr int distance(int i, int s) { return i + PHASE_W - s * DILATION_W; }
__device__ constexpr bool meets(int i, int s) {
  return floor_divide(distance(i, s), STRIDE_W) * STRIDE_W == distance(i, s);
}
constexpr int FIRST_COLUMN = floor_divide(distance(0, FILTER_S - 1), STRIDE_W);
constexpr int LAST_COLUMN = floor_divide(distance(TILE - 1, 0), STRIDE_W);
__device__ constexpr int column_of(int i, int s) {
  return floor_divide(distance(i, s), STRIDE_W) - FIRST_COLUMN;
}
#else
__device__ constexpr bool meets(int, int) { return true; }
constexpr int FIRST_COLUMN = 0;
constexpr int LAST_COLUMN = (TILE - 1) * STRIDE_W + (FILTER_S - 1) * DILATION_W;
__device__ constexpr int column_of(int i, int s) { return i * STRIDE_W + s * DILATION_W; }
#endif
constexpr int COLUMNS = LAST_COLUMN - FIRST_COLUMN + 1;

__device__ constexpr bool is_met(int column) {
  for (int i = 0; i < TILE; ++i)
    for (int s = 0; s < FILTER_S; ++s)
      if (meets(i, s) && column_of(i, s) == column) return true;
  return false;
}

// -- strips -----------------------------------------------------------------------------------------

// The strip that a thread computes, in the tensor that a pass walks: y, dx, or dy.
struct Strip {
  Pixel<Index> first;  // pixel; w is a multiple of TILE
  bool exists;

  __device__ __forceinline__ Strip(Index number, Index batch, const long long (&sizes)[3])
      : exists(number < batch * static_cast<Index>(sizes[0] * sizes[1]) * per_row(sizes)) {
    const long long strips[3] = {sizes[0], sizes[1], per_row(sizes)};
    first = pixel_at(exists ? number : 0, strips);
    first.w *= TILE;
  }

  static __device__ __forceinline__ Index per_row(const long long (&sizes)[3]) {
    return (static_cast<Index>(sizes[2]) + TILE - 1) / TILE;
  }
};

// The row (d, h) that tap (t, r) of the filter pairs with row (d, h) of the walked tensor.
struct Row {
  Index d, h;
  bool exists;

  __device__ __forceinline__ Row(const ConvParameters& p, const Pixel<Index>& pixel, int t, int r)
      : exists(true) {
#if PASS == 1
    d = divided(pixel.d + static_cast<Index>(p.pad[0] - t * p.dilation[0]), p.stride[0]);
    h = divided(pixel.h + static_cast<Index>(p.pad[1] - r * p.dilation[1]), p.stride[1]);
    exists = exists && d < static_cast<Index>(p.output[0]) && h < static_cast<Index>(p.output[1]);
#else
    d = pixel.d * static_cast<Index>(p.stride[0]) + static_cast<Index>(t * p.dilation[0] - p.pad[0]);
    h = pixel.h * static_cast<Index>(p.stride[1]) + static_cast<Index>(r * p.dilation[1] - p.pad[1]);
    exists = d >= 0 && d < static_cast<Index>(p.input[0]) && h >= 0 &&
             h < static_cast<Index>(p.input[1]);
#endif
  }

 private:
  __device__ __forceinline__ Index divided(Index position, long long stride) {
    const Index quotient = position / static_cast<Index>(stride);
    exists = exists && position >= 0 && quotient * static_cast<Index>(stride) == position;
    return quotient;
  }
};

// The thread's place in the block: its channels, and its number among the strips.
struct Thread {
  Index channel;  // the first of VECTOR
  int lane, strip;
  bool exists;

  __device__ __forceinline__ explicit Thread(long long channels)
      : lane(threadIdx.x % LANES), strip(threadIdx.x / LANES) {
    channel = (static_cast<Index>(blockIdx.y) * LANES + lane) * VECTOR;
    exists = channel < static_cast<Index>(channels);
  }
};

// -- sources ----------------------------------------------------------------------------------------

constexpr bool DEPTHWISE = OUTS == 1 && INS == 1;
static_assert(DEPTHWISE || OUTS % VECTOR == 0, "a thread's channels are of one group");
static_assert(TILE % RUN == 0 && (RUN == 1 || VECTOR == 1), "pieces along one axis");
static_assert(INS % SHARE == 0 && SHARE % SOURCE_VECTOR == 0, "whole pieces of sources");

// The first source of a result's group.
__device__ __forceinline__ Index first_source(Index result) { return result / OUTS * INS; }

// What a thread needs of one pixel of the source: a value for each of its channels in a depthwise
// layer, else the SHARE sources from the first-th on that its channels share.
struct Sources {
  static constexpr int COUNT = DEPTHWISE ? VECTOR : SHARE;
  static constexpr int PIECE = DEPTHWISE ? VECTOR : SOURCE_VECTOR;
  Accumulator value[COUNT];

  __device__ __forceinline__ void load(const Storage* pixel, Index channel_stride, bool inside) {
#pragma unroll
    for (int first = 0; first < COUNT; first += PIECE) {
      Accumulator piece[PIECE];
      load_piece<PIECE>(piece, pixel + first * channel_stride, inside);
#pragma unroll
      for (int i = 0; i < PIECE; ++i) value[first + i] = piece[i];
    }
  }
};

// -- kernels ----------------------------------------------------------------------------------------

#if PASS != 2

// source is x or dy, result y or dx; bias may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_direct(const Storage* __restrict__ source, const Storage* __restrict__ w,
                const Storage* __restrict__ bias, Storage* __restrict__ result,
                const __grid_constant__ ConvParameters p) {
  __shared__ Accumulator weights[STAGED_ROWS][FILTER_S][INS][LANES * VECTOR];
#if PASS == 0
  const long long(&source_stride)[5] = p.x_stride;
  const long long(&result_stride)[5] = p.y_stride;
  const Strip strip(static_cast<Index>(blockIdx.x) * STRIPS + threadIdx.x / LANES,
                    static_cast<Index>(p.batch), p.output);
  const Index source_width = static_cast<Index>(p.input[2]);
  const Index result_width = static_cast<Index>(p.output[2]);
  const Index first_column = strip.first.w * STRIDE_W - static_cast<Index>(p.pad[2]);
#else
  const long long(&source_stride)[5] = p.y_stride;
  const long long(&result_stride)[5] = p.x_stride;
  const Strip strip(static_cast<Index>(blockIdx.x) * STRIPS + threadIdx.x / LANES,
                    static_cast<Index>(p.batch), p.input);
  const Index source_width = static_cast<Index>(p.output[2]);
  const Index result_width = static_cast<Index>(p.input[2]);
  const Index first_column =
      strip.first.w / STRIDE_W + static_cast<Index>(p.pad[2]) / STRIDE_W + FIRST_COLUMN;
#endif
  const Index channels = static_cast<Index>(p.groups) * OUTS;
  const Thread thread(channels);
  const bool works = thread.exists && strip.exists;
  const int filter_rows = static_cast<int>(p.filter[0] * p.filter[1]);
  const int filter_height = static_cast<int>(p.filter[1]);

  Accumulator sum[TILE][VECTOR] = {};
  for (int first_row = 0; first_row < filter_rows; first_row += STAGED_ROWS) {
    __syncthreads();  // the rows staged before are used up
    for (int i = threadIdx.x; i < STAGED_ROWS * FILTER_S * INS * LANES * VECTOR; i += THREADS) {
      const int lane = i % (LANES * VECTOR), j = i / (LANES * VECTOR) % INS;
      const int s = i / (LANES * VECTOR) / INS % FILTER_S;
      const int row = i / (LANES * VECTOR) / INS / FILTER_S;
      const Index channel = static_cast<Index>(blockIdx.y) * LANES * VECTOR + lane;
      const Index in_group = channel % OUTS, source_channel = first_source(channel) + j;
      // w is indexed by the filter, and by the channel within its group.
      const Index filter = PASS == 0 ? channel : source_channel;
      const Tap<Index> tap = {PASS == 0 ? Index(j) : in_group, (first_row + row) / filter_height,
                              (first_row + row) % filter_height, s};
      const bool inside = first_row + row < filter_rows && channel < channels;
      weights[row][s][j][lane] =
          inside ? Numeric<Storage>::widen(
                       w[filter * static_cast<Index>(p.w_stride[0]) + tap_offset(tap, p.w_stride)])
                 : Accumulator(0);
    }
    __syncthreads();  // the rows are staged
    if (!works) continue;

    for (int staged = 0; staged < STAGED_ROWS && first_row + staged < filter_rows; ++staged) {
      const Row row(p, strip.first, (first_row + staged) / filter_height,
                    (first_row + staged) % filter_height);
      if (!row.exists) continue;
      const Pixel<Index> start = {strip.first.n, row.d, row.h, 0};
      const Storage* pixels = source + pixel_offset(start, source_stride) +
                              first_source(thread.channel) * static_cast<Index>(source_stride[1]);
#pragma unroll
      for (int column = 0; column < COLUMNS; ++column) {
        if (!is_met(column)) continue;
        const Index position = first_column + column;
        const bool inside = position >= 0 && position < source_width;
        const Storage* pixel =
            pixels + (inside ? position : 0) * static_cast<Index>(source_stride[4]);
        Sources sources;
        sources.load(pixel, static_cast<Index>(source_stride[1]), inside);
#pragma unroll
        for (int i = 0; i < TILE; ++i)
#pragma unroll
          for (int s = 0; s < FILTER_S; ++s)
            if (meets(i, s) && column_of(i, s) == column)
#pragma unroll
              for (int j = 0; j < INS; ++j)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v)
                  sum[i][v] += sources.value[DEPTHWISE ? v : j] *
                               weights[staged][s][j][thread.lane * VECTOR + v];
      }
    }
  }
  if (!works) return;

#pragma unroll
  for (int v = 0; v < VECTOR; ++v) {
    Accumulator added = 0;
    if (bias != nullptr)
      added =
          Numeric<Storage>::widen(bias[(thread.channel + v) * static_cast<Index>(p.bias_stride)]);
#pragma unroll
    for (int i = 0; i < TILE; ++i) sum[i][v] = activate<ACTIVATION>(sum[i][v] + added);
  }
#pragma unroll
  for (int first = 0; first < TILE; first += RUN) {
    if (strip.first.w + first >= result_width) break;
    Pixel<Index> pixel = strip.first;
    pixel.w += first;
    Accumulator piece[RUN * VECTOR];
#pragma unroll
    for (int i = 0; i < RUN * VECTOR; ++i) piece[i] = sum[first + i / VECTOR][i % VECTOR];
    store_piece<RUN * VECTOR>(result + pixel_offset(pixel, result_stride) +
                                  thread.channel * static_cast<Index>(result_stride[1]),
                              piece);
  }
}

#else

// One block sums a chunk of strips (blockIdx.x) for its filters (blockIdx.y), and for one row (t, r)
// of the filter and SHARE of the sources (blockIdx.z), into partial: (chunk, t, r, s, j, k).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_direct(const Storage* __restrict__ x, const Storage* __restrict__ dy,
                Accumulator* __restrict__ partial, const __grid_constant__ ConvParameters p) {
  __shared__ Accumulator sums[STRIPS][LANES * VECTOR];
  const Index channels = static_cast<Index>(p.groups) * OUTS;
  const Thread thread(channels);
  const int shares = INS / SHARE;
  const int filter_row = static_cast<int>(blockIdx.z) / shares;
  const int first_j = static_cast<int>(blockIdx.z) % shares * SHARE;
  const int t = filter_row / static_cast<int>(p.filter[1]);
  const int r = filter_row % static_cast<int>(p.filter[1]);

  // This chunk's share of the strips, in whole rounds of the block.
  const Index strips = static_cast<Index>(p.batch * p.output[0] * p.output[1]) *
                       Strip::per_row(p.output);
  const Index all_rounds = (strips + STRIPS - 1) / STRIPS;
  const Index rounds = (all_rounds + gridDim.x - 1) / static_cast<Index>(gridDim.x);
  const Index first_round = static_cast<Index>(blockIdx.x) * rounds;

  constexpr int SUMS = DEPTHWISE ? 1 : SHARE;  // a tap's sums for each channel of the thread
  Accumulator sum[FILTER_S][SUMS][VECTOR] = {};
  for (Index round = first_round; round < first_round + rounds && round < all_rounds; ++round) {
    const Strip strip(round * STRIPS + thread.strip, static_cast<Index>(p.batch), p.output);
    const Row row(p, strip.first, t, r);
    if (!thread.exists || !strip.exists || !row.exists) continue;

    Accumulator gradient[TILE][VECTOR];
#pragma unroll
    for (int i = 0; i < TILE; ++i) {
      Pixel<Index> pixel = strip.first;
      const bool inside = pixel.w + i < static_cast<Index>(p.output[2]);
      pixel.w += inside ? i : 0;
      load_piece<VECTOR>(gradient[i],
                         dy + pixel_offset(pixel, p.y_stride) +
                             thread.channel * static_cast<Index>(p.y_stride[1]),
                         inside);
    }
    const Pixel<Index> start = {strip.first.n, row.d, row.h, 0};
    const Storage* pixels =
        x + pixel_offset(start, p.x_stride) +
        (first_source(thread.channel) + first_j) * static_cast<Index>(p.x_stride[1]);
    const Index first_column = strip.first.w * STRIDE_W - static_cast<Index>(p.pad[2]);
#pragma unroll
    for (int column = 0; column < COLUMNS; ++column) {
      if (!is_met(column)) continue;
      const Index position = first_column + column;
      const bool inside = position >= 0 && position < static_cast<Index>(p.input[2]);
      const Storage* pixel = pixels + (inside ? position : 0) * static_cast<Index>(p.x_stride[4]);
      Sources sources;
      sources.load(pixel, static_cast<Index>(p.x_stride[1]), inside);
#pragma unroll
      for (int i = 0; i < TILE; ++i)
#pragma unroll
        for (int s = 0; s < FILTER_S; ++s)
          if (column_of(i, s) == column)
#pragma unroll
            for (int j = 0; j < SUMS; ++j)
#pragma unroll
              for (int v = 0; v < VECTOR; ++v)
                sum[s][j][v] += gradient[i][v] * sources.value[DEPTHWISE ? v : j];
    }
  }

  Accumulator* row_of_filter =
      partial + (static_cast<long long>(blockIdx.x) * p.filter[0] * p.filter[1] + filter_row) *
                    FILTER_S * INS * channels;
#pragma unroll
  for (int s = 0; s < FILTER_S; ++s)
#pragma unroll
    for (int j = 0; j < SUMS; ++j) {
      __syncthreads();  // the sums of the tap before are read
#pragma unroll
      for (int v = 0; v < VECTOR; ++v) sums[thread.strip][thread.lane * VECTOR + v] = sum[s][j][v];
      for (int half = STRIPS / 2; half > 0; half /= 2) {
        __syncthreads();  // the level above is complete
        if (thread.strip < half)
#pragma unroll
          for (int v = 0; v < VECTOR; ++v)
            sums[thread.strip][thread.lane * VECTOR + v] +=
                sums[thread.strip + half][thread.lane * VECTOR + v];
      }
      if (thread.strip == 0 && thread.exists)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v)
          row_of_filter[(s * INS + first_j + j) * static_cast<long long>(channels) +
                        thread.channel + v] = sums[0][thread.lane * VECTOR + v];
    }
}

extern "C" __global__ void __launch_bounds__(256)
    conv_direct_reduce(const Accumulator* __restrict__ partial, Storage* __restrict__ dw,
                       const int chunks, const __grid_constant__ ConvParameters p) {
  add_chunks<true, Index>(partial, dw, chunks, p);
}

#endif
