// Direct convolution for groups of few channels, especially depthwise layers; 1-D to 3-D, any stride.
//
//   forward          y[n, p, q, k]  = sum over j, r, s of x[n, h, w, j of k's group] * w[k, j, r, s]
//   backprop-input   dx[n, h, w, c] = sum over j, r, s of dy[n, p, q, j of c's group] * w[j, c, r, s]
//   backprop-filter  dw[k, j, r, s] = sum over n, p, q of dy[n, p, q, k] * x[n, h, w, j of k's group]
//
// where h = p * stride - pad + r * dilation, similarly for w, and j numbers the channels of a group.
//
// The source is the tensor that is read under the taps: x or, in backprop-input, dy.  Each group has OUTS
// channels of y, dx or dy and INS source channels.  A GEMM tile would be nearly empty here, since OUTS
// and INS are small and groups share no data.  This kernel instead loads each source row under a tile
// once, with few instructions besides the products.  A thread computes TILE_ROWS x TILE_COLUMNS adjacent
// pixels for VECTOR channels.  It loads the source rows under the tile from top to bottom, and uses each
// row for all rows of the tile.  Which taps meet which columns is known at compile time.  Blocks are
// persistent: they stage the filter of their channels in shared memory once and then compute many tiles.
//
// In a depthwise layer (OUTS = INS = 1), each of a thread's VECTOR channels is a group with its own
// source channel.  In other layers, all channels of a thread belong to one group and share its INS source
// channels.
//
// The filter gradient is summed in a fixed order: per thread, then per block in a tree, then over the
// chunks of pixels (gridDim.x) by conv_direct_reduce.  A thread sums all taps or, if its registers do not
// hold all these sums, TAP_ROWS rows of the filter and SHARE of the INS source channels.
//
// A variant is chosen with -D: PASS (0 forward, 1 backprop-input, 2 backprop-filter), STORAGE, INDEX,
// OUTS, INS, VECTOR, TILE_ROWS, TILE_COLUMNS, LANES (threads along channels), STRIPS (threads along
// tiles), RESIDENT (resident blocks per SM), RESULT_CHANNELS and RESULT_COLUMNS (extents of a vector of
// y, dx or dy), SOURCE_CHANNELS and SOURCE_COLUMNS (extents of a source vector), SHIFT (columns from the
// start of a source vector to the first column under a tile), INSIDE_FROM and INSIDE_TO (columns, counted
// from that start, between which all columns are inside the source for every tile), FILTER_T, FILTER_R,
// FILTER_S, STRIDE_D, STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, PHASE_H, PHASE_W (padding above and
// left of the image, modulo stride), TAP_ROWS and SHARE (less than all filter rows and source channels in
// backprop-filter only), RAGGED (whether tiles extend past the last row or column), ACTIVATION and ADD
// (epilogue.cuh; forward and backprop-input only).
#include "chunks.cuh"
#include "epilogue.cuh"
#include "index.cuh"
#include "maps.cuh"
#include "vector.cuh"

// Type of offsets.  It is unsigned, because offsets of elements that are never read may overflow.
using Offset = unsigned INDEX;
using Storage = STORAGE;
using Accumulator = typename Numeric<Storage>::Accumulator;

constexpr int THREADS = LANES * STRIPS;

constexpr bool DEPTHWISE = OUTS == 1 && INS == 1;
static_assert(DEPTHWISE || OUTS % VECTOR == 0, "a thread's channels are of one group");
static_assert(VECTOR % RESULT_CHANNELS == 0 && TILE_COLUMNS % RESULT_COLUMNS == 0, "whole pieces");
static_assert(RESULT_CHANNELS == 1 || RESULT_COLUMNS == 1, "pieces along one axis");
static_assert(SOURCE_CHANNELS == 1 || SOURCE_COLUMNS == 1, "pieces along one axis");
static_assert(INS % SHARE == 0, "whole shares of sources");

// -- source positions that a tile's pixels read, along one axis ---------------------------------------

// Positions are source coordinates relative to the tile, which has EXTENT pixels along the axis.  Pixel i
// of the tile reads at most one position under each tap t.  The first pixel of the tile reads position 0
// under tap 0.  In backprop-input, tap 0 may skip that pixel; then position 0 belongs to the last earlier
// pixel that tap 0 meets.
template <int EXTENT, int TAPS, int STRIDE, int DILATION, int PHASE>
struct Axis {
#if PASS == 1
  static_assert(EXTENT % STRIDE == 0, "tiles begin at whole strides");
  static __device__ constexpr int scaled(int i, int t) { return i + PHASE - t * DILATION; }
  static __device__ constexpr bool meets(int i, int t) { return scaled(i, t) % STRIDE == 0; }
  static __device__ constexpr int position(int i, int t) { return scaled(i, t) / STRIDE; }
  static __device__ constexpr int distance(int i, int at) { return i + PHASE - at * STRIDE; }
#else
  static __device__ constexpr bool meets(int, int) { return true; }
  static __device__ constexpr int position(int i, int t) { return i * STRIDE + t * DILATION; }
  static __device__ constexpr int distance(int i, int at) { return at - i * STRIDE; }
#endif

  // Returns the tap under which pixel i reads position `at`; valid only if is_tap(i, at) is true.
  static __device__ __forceinline__ constexpr int tap(int i, int at) {
    return distance(i, at) / DILATION;
  }
  static __device__ __forceinline__ constexpr bool is_tap(int i, int at) {
    const bool whole = DILATION == 1 || tap(i, at) * DILATION == distance(i, at);
    return whole && static_cast<unsigned>(tap(i, at)) < TAPS;
  }

  // The first and last position that the tile reads.  The distances of all positions that it reads from
  // the first position are multiples of `step`.
  struct Span {
    int first, last, step;
  };
  static __device__ constexpr Span span() {
    Span met = {0, 0, 0};
    bool any = false;
    for (int pair = 0; pair < EXTENT * TAPS; ++pair)
      if (meets(pair / TAPS, pair % TAPS)) {
        const int at = position(pair / TAPS, pair % TAPS);
        if (!any) met = {at, at, 0};
        any = true;
        int a = met.step, b = at < met.first ? met.first - at : at - met.first;
        while (b != 0) {  // greatest common divisor
          const int rest = a % b;
          a = b, b = rest;
        }
        met = {at < met.first ? at : met.first, at > met.last ? at : met.last, a};
      }
    if (met.step == 0) met.step = 1;
    return met;
  }
  static constexpr int FIRST = span().first, LAST = span().last, STEP = span().step;
  static constexpr int COUNT = (LAST - FIRST) / STEP + 1;

  // Returns the source coordinate of position 0 of a tile.
  static __device__ __forceinline__ Index origin(Index pixel, long long pad) {
#if PASS == 1
    return pixel / STRIDE + narrowed(pad) / STRIDE;
#else
    return pixel * STRIDE - narrowed(pad);
#endif
  }
};

using Rows = Axis<TILE_ROWS, TAP_ROWS, STRIDE_H, DILATION_H, PHASE_H>;
using Columns = Axis<TILE_COLUMNS, FILTER_S, STRIDE_W, DILATION_W, PHASE_W>;

// -- work of a thread -------------------------------------------------------------------------------

// The lane and the strip of a thread.  A lane has VECTOR adjacent channels; the STRIPS threads of a lane
// compute different tiles.
struct Thread {
  Index channel;  // first of VECTOR channels
  int lane, strip;
  bool exists;

  __device__ __forceinline__ explicit Thread(Index channels)
      : lane(threadIdx.x % LANES), strip(threadIdx.x / LANES) {
    channel = (static_cast<Index>(blockIdx.y) * LANES + lane) * VECTOR;
    exists = channel < channels;
  }
};

// The tiles of y (dx in backprop-input, dy in backprop-filter), and the order in which the threads of a
// strip visit them.  In each round, a block visits one tile per strip.  cupyconv/kernels/direct.py
// computes the fields.
struct TileSchedule {
  long long tiles[4];  // tiles per row, tiles per column, slices per image (along depth), images
  long long step[4];   // distance of a strip's tiles in successive rounds, along each axis
  long long rounds;    // rounds per block
};

// Iterates over a strip's tiles by adding steps along each axis, without divisions.
struct Strip {
  Loops<Index> loops;
  Digits<Index> at;
  Index left;  // remaining rounds

  __device__ __forceinline__ Strip(const TileSchedule& schedule, int number)
      : left(narrowed(schedule.rounds)) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      loops.size[i] = narrowed(schedule.tiles[i]);
      loops.step.digit[i] = narrowed(schedule.step[i]);
    }
    at = loops.digits(static_cast<Index>(blockIdx.x) * left * STRIPS + number);
  }

  __device__ __forceinline__ bool has_tile() const { return left > 0 && loops.contain(at); }
  __device__ __forceinline__ void next() {
    --left;
    at = loops.next(at);
  }
  // Returns the first pixel of the tile.
  __device__ __forceinline__ Pixel<Index> pixel() const {
    return {at.digit[3], at.digit[2], at.digit[1] * TILE_ROWS, at.digit[0] * TILE_COLUMNS};
  }
};

template <class Element>
__device__ __forceinline__ Element* element_at(Element* first, Offset offset) {
  return first + static_cast<Index>(offset);
}

// Returns the offset of a pixel and a channel from the first element of the thread's tile.
__device__ __forceinline__ Offset place_in_tile(int row, int column, int channel,
                                                const long long (&stride)[5]) {
  return row * static_cast<Offset>(stride[3]) + column * static_cast<Offset>(stride[4]) +
         channel * static_cast<Offset>(stride[1]);
}

// Computes d, the depth of the source slice under tap t of a slice of y, dx or dy; returns whether this
// source slice exists.
__device__ __forceinline__ bool slice_under(const ConvParameters& p, Index slice, int t, Index& d) {
  const Index pad = narrowed(p.pad[0]);
  const Index step = t * narrowed(p.dilation[0]);
#if PASS == 1
  const Index scaled = slice + pad - step;
  d = scaled / STRIDE_D;
  return scaled >= 0 && d * STRIDE_D == scaled && d < narrowed(p.output[0]);
#else
  d = slice * STRIDE_D - pad + step;
  return is_within(d, narrowed(p.input[0]));
#endif
}

// -- sources ----------------------------------------------------------------------------------------

// Returns the first source channel of a result channel's group.
__device__ __forceinline__ Index first_source(Index result) { return result / OUTS * INS; }

// One source row of a thread.  In a depthwise layer, each position has one value per channel of the
// thread; else, it has the values of SHARE source channels, which the thread's channels have in common.
struct SourceRow {
  static constexpr int COUNT = DEPTHWISE ? VECTOR : SHARE;
  static_assert(COUNT % SOURCE_CHANNELS == 0, "whole pieces");
  Accumulator value[Columns::COUNT][COUNT];

  // Loads the row.  `row` is the offset of its first pixel and channel; `origin` is the source column
  // of position 0.
  __device__ __forceinline__ void load(const Storage* source, Offset row, Index origin, Index width,
                                       const long long (&stride)[5]) {
    constexpr int SPAN = SHIFT + Columns::LAST - Columns::FIRST + 1;
    const Index begin = origin + (Columns::FIRST - SHIFT);
#pragma unroll
    for (int first = 0; first < SPAN; first += SOURCE_COLUMNS) {
      if (SOURCE_COLUMNS == 1 && first % Columns::STEP != 0) continue;
      const bool surely = first >= INSIDE_FROM && first + SOURCE_COLUMNS <= INSIDE_TO;
      const bool inside = surely || is_within(begin + first, width);
      const Offset offset = row + (begin + first) * static_cast<Offset>(stride[4]);
#pragma unroll
      for (int channel = 0; channel < COUNT; channel += SOURCE_CHANNELS) {
        Accumulator piece[SOURCE_COLUMNS * SOURCE_CHANNELS];
        load_piece(piece, element_at(source, offset + channel * static_cast<Offset>(stride[1])), inside);
#pragma unroll
        for (int i = 0; i < SOURCE_COLUMNS * SOURCE_CHANNELS; ++i) {
          const int column = first - SHIFT + i / SOURCE_CHANNELS;
          if (column >= 0 && column % Columns::STEP == 0 && column / Columns::STEP < Columns::COUNT)
            value[column / Columns::STEP][channel + i % SOURCE_CHANNELS] = piece[i];
        }
      }
    }
  }
};

// -- kernels ----------------------------------------------------------------------------------------

#if PASS != 2

// The filter of a block's channels, indexed by filter row (t, r), lane, tap s, source channel and channel
// of the lane.  Each lane has an odd number of 16-byte chunks per row, so that lanes read without bank
// conflicts.
struct Filter {
  static constexpr int CHUNK = 16 / sizeof(Accumulator);
  static constexpr int USED = FILTER_S * INS * VECTOR;
  static constexpr int PART = ((USED + CHUNK - 1) / CHUNK | 1) * CHUNK;
  alignas(16) Accumulator part[FILTER_T * FILTER_R][LANES][PART];

  // Number of taps of a row that are loaded together; each of their values occupies a register.
  static constexpr int AT_ONCE = USED * sizeof(Accumulator) <= 256 ? FILTER_S : 1;
  static constexpr int TURNS = FILTER_S / AT_ONCE;  // turns per row; each turn loads AT_ONCE taps

  // Stages the filter.  The threads of the same lane, one per strip, divide the lane's taps.
  __device__ __forceinline__ void stage(const Storage* w, const Thread& thread,
                                        const ConvParameters& p) {
    if (!thread.exists) return;
    // w is indexed by the filter and by the channel within its group.
    const Index of_filter = narrowed(p.w_stride[0]);
    const Index of_channel = narrowed(p.w_stride[1]);
    const Index of_source = PASS == 0 ? of_channel : of_filter;
    Index offset[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
      const Index result = thread.channel + v;
      offset[v] = PASS == 0 ? result * of_filter
                            : first_source(result) * of_filter + result % OUTS * of_channel;
    }
    for (int turn = thread.strip; turn < FILTER_T * FILTER_R * TURNS; turn += STRIPS) {
      const int row = turn / TURNS, first_s = turn % TURNS * AT_ONCE;
      const Tap<Index> first = {0, row / FILTER_R, row % FILTER_R, first_s};
      const Storage* taps = w + tap_offset(first, p.w_stride);
      Accumulator(&own)[PART] = part[row][thread.lane];
#pragma unroll
      for (int s = 0; s < AT_ONCE; ++s)
#pragma unroll
        for (int j = 0; j < INS; ++j)
#pragma unroll
          for (int v = 0; v < VECTOR; ++v)
            own[((first_s + s) * INS + j) * VECTOR + v] = Numeric<Storage>::widen(
                taps[offset[v] + s * narrowed(p.w_stride[4]) + j * of_source]);
      if (first_s > 0) continue;
#pragma unroll
      for (int e = USED; e < PART; ++e) own[e] = 0;  // loads read whole chunks
    }
  }
};

// source is x or dy, result is y or dx; bias may be null.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    conv_direct(const Storage* __restrict__ source, const Storage* __restrict__ w,
                const Storage* __restrict__ bias, const Storage* addend, Storage* result,
                const __grid_constant__ TileSchedule schedule, const __grid_constant__ ConvParameters p) {
  __shared__ Filter filter;
#if PASS == 0
  const long long(&source_stride)[5] = p.x_stride, (&result_stride)[5] = p.y_stride;
  const long long(&source_size)[3] = p.input, (&result_size)[3] = p.output;
#else
  const long long(&source_stride)[5] = p.y_stride, (&result_stride)[5] = p.x_stride;
  const long long(&source_size)[3] = p.output, (&result_size)[3] = p.input;
#endif
  const Thread thread(narrowed(p.groups) * OUTS);
  filter.stage(w, thread, p);
  __syncthreads();  // the filter is staged
  if (!thread.exists) return;

  Accumulator biases[VECTOR] = {};
  if (bias != nullptr)
#pragma unroll
    for (int v = 0; v < VECTOR; ++v)
      biases[v] =
          Numeric<Storage>::widen(bias[(thread.channel + v) * narrowed(p.bias_stride)]);

  for (Strip strip(schedule, thread.strip); strip.has_tile(); strip.next()) {
    const Pixel<Index> tile = strip.pixel();
    const Index first_row = Rows::origin(tile.h, p.pad[1]);
    const Index first_column = Columns::origin(tile.w, p.pad[2]);

    Accumulator sum[TILE_ROWS][TILE_COLUMNS][VECTOR] = {};
    for (int t = 0; t < FILTER_T; ++t) {
      Index d;
      if (!slice_under(p, tile.d, t, d)) continue;
      const Offset slice = pixel_offset(Pixel<Index>{tile.n, d, 0, 0}, source_stride) +
                           first_source(thread.channel) * narrowed(source_stride[1]);
#pragma unroll 1
      for (int at = Rows::FIRST; at <= Rows::LAST; at += Rows::STEP) {
        const Index h = first_row + at;
        if (!is_within(h, narrowed(source_size[1]))) continue;
        SourceRow row;
        row.load(source, slice + h * static_cast<Offset>(source_stride[3]), first_column,
                 narrowed(source_size[2]), source_stride);
#pragma unroll
        for (int i = 0; i < TILE_ROWS; ++i) {
          if (!Rows::is_tap(i, at)) continue;
          const Accumulator* weight = filter.part[t * FILTER_R + Rows::tap(i, at)][thread.lane];
#pragma unroll
          for (int k = 0; k < TILE_COLUMNS; ++k)
#pragma unroll
            for (int s = 0; s < FILTER_S; ++s)
              if (Columns::meets(k, s))
#pragma unroll
                for (int j = 0; j < INS; ++j)
#pragma unroll
                  for (int v = 0; v < VECTOR; ++v)
                    sum[i][k][v] +=
                        row.value[(Columns::position(k, s) - Columns::FIRST) / Columns::STEP]
                                 [DEPTHWISE ? v : j] *
                        weight[(s * INS + j) * VECTOR + v];
        }
      }
    }

    const Offset first = pixel_offset(tile, result_stride) +
                         thread.channel * narrowed(result_stride[1]);
    const Index rows = narrowed(result_size[1]) - tile.h;  // existing rows of the tile
    const Index columns = narrowed(result_size[2]) - tile.w;
#pragma unroll
    for (int i = 0; i < TILE_ROWS; ++i) {
      if (RAGGED && i >= rows) break;
#pragma unroll
      for (int k = 0; k < TILE_COLUMNS; k += RESULT_COLUMNS) {
        if (RAGGED && k >= columns) break;
#pragma unroll
        for (int v = 0; v < VECTOR; v += RESULT_CHANNELS) {
          Accumulator piece[RESULT_COLUMNS * RESULT_CHANNELS];
#pragma unroll
          for (int e = 0; e < RESULT_COLUMNS * RESULT_CHANNELS; ++e) {
            const int channel = v + e % RESULT_CHANNELS;
            piece[e] = sum[i][k + e / RESULT_CHANNELS][channel] + biases[channel];
          }
          const Offset place = first + place_in_tile(i, k, v, result_stride);
          add_addend(piece, element_at(addend, place));
#pragma unroll
          for (Accumulator& element : piece) element = activate<ACTIVATION>(element);
          store_piece(element_at(result, place), piece);
        }
      }
    }
  }
}

#else

// A block sums a chunk of the tiles (blockIdx.x) for its filters (blockIdx.y), TAP_ROWS rows of a filter
// slice and SHARE source channels (blockIdx.z), into the workspace `partial`: (chunk, t, r, s, j, k).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    conv_direct(const Storage* __restrict__ x, const Storage* __restrict__ dy,
                Accumulator* __restrict__ partial, const __grid_constant__ TileSchedule schedule,
                const __grid_constant__ ConvParameters p) {
  constexpr int SUMS = DEPTHWISE ? 1 : SHARE;  // sums per tap and channel of the thread
  // The last level of one row's reduction reads memory that the first level of the next row does not
  // write.
  static_assert(STRIPS > 2, "levels of a row do not overlap with those of the next");
  // Sums of adjacent threads are adjacent, so that the sums of a warp are in different banks.
  __shared__ Accumulator level[FILTER_S * SUMS * VECTOR][THREADS];
  const Index channels = narrowed(p.groups) * OUTS;
  const Thread thread(channels);
  constexpr int SHARES = INS / SHARE, TAP_SHARES = (FILTER_R + TAP_ROWS - 1) / TAP_ROWS;
  const int first_j = static_cast<int>(blockIdx.z) % SHARES * SHARE;
  const int first_r = static_cast<int>(blockIdx.z) / SHARES % TAP_SHARES * TAP_ROWS;
  const int t = static_cast<int>(blockIdx.z) / SHARES / TAP_SHARES;

  Accumulator sum[TAP_ROWS][FILTER_S][SUMS][VECTOR] = {};
  for (Strip strip(schedule, thread.strip); strip.has_tile() && thread.exists; strip.next()) {
    const Pixel<Index> tile = strip.pixel();
    Index d;
    if (!slice_under(p, tile.d, t, d)) continue;
    const Index rows = narrowed(p.output[1]) - tile.h;  // existing rows of the tile
    const Index columns = narrowed(p.output[2]) - tile.w;

    const Offset first =
        pixel_offset(tile, p.y_stride) + thread.channel * narrowed(p.y_stride[1]);
    Accumulator gradient[TILE_ROWS][TILE_COLUMNS][VECTOR];
#pragma unroll
    for (int i = 0; i < TILE_ROWS; ++i)
#pragma unroll
      for (int k = 0; k < TILE_COLUMNS; k += RESULT_COLUMNS) {
        const bool inside = !RAGGED || (i < rows && k < columns);
#pragma unroll
        for (int v = 0; v < VECTOR; v += RESULT_CHANNELS) {
          Accumulator piece[RESULT_COLUMNS * RESULT_CHANNELS];
          load_piece(piece, element_at(dy, first + place_in_tile(i, k, v, p.y_stride)), inside);
#pragma unroll
          for (int e = 0; e < RESULT_COLUMNS * RESULT_CHANNELS; ++e)
            gradient[i][k + e / RESULT_CHANNELS][v + e % RESULT_CHANNELS] = piece[e];
        }
      }

    const Index first_row = Rows::origin(tile.h, p.pad[1]) + first_r * DILATION_H;
    const Index first_column = Columns::origin(tile.w, p.pad[2]);
    const Offset slice =
        pixel_offset(Pixel<Index>{tile.n, d, 0, 0}, p.x_stride) +
        (first_source(thread.channel) + first_j) * narrowed(p.x_stride[1]);
#pragma unroll
    for (int at = Rows::FIRST; at <= Rows::LAST; at += Rows::STEP) {
      const Index h = first_row + at;
      if (!is_within(h, narrowed(p.input[1]))) continue;
      SourceRow row;
      row.load(x, slice + h * static_cast<Offset>(p.x_stride[3]), first_column,
               narrowed(p.input[2]), p.x_stride);
#pragma unroll
      for (int i = 0; i < TILE_ROWS; ++i) {
        if (!Rows::is_tap(i, at)) continue;
        const int r = Rows::tap(i, at);
#pragma unroll
        for (int k = 0; k < TILE_COLUMNS; ++k) {
          // Missing pixels of dy are zero, but must not be multiplied with NaN or infinity.
          if (RAGGED && (i >= rows || k >= columns)) break;
#pragma unroll
          for (int s = 0; s < FILTER_S; ++s)
#pragma unroll
            for (int j = 0; j < SUMS; ++j)
#pragma unroll
              for (int v = 0; v < VECTOR; ++v)
                sum[r][s][j][v] +=
                    gradient[i][k][v] *
                    row.value[(Columns::position(k, s) - Columns::FIRST) / Columns::STEP]
                             [DEPTHWISE ? v : j];
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < TAP_ROWS; ++r) {
    Accumulator(&own)[FILTER_S][SUMS][VECTOR] = sum[r];
#pragma unroll
    for (int strips = STRIPS; strips > 1; strips = (strips + 1) / 2) {
      // The upper half of the strips passes its sums to the lower half.
      const int half = (strips + 1) / 2;
      if (thread.strip >= half && thread.strip < strips)
#pragma unroll
        for (int i = 0; i < FILTER_S * SUMS * VECTOR; ++i)
          level[i][threadIdx.x] = own[i / VECTOR / SUMS][i / VECTOR % SUMS][i % VECTOR];
      __syncthreads();  // the sums of the upper half are written
      if (thread.strip + half < strips)
#pragma unroll
        for (int i = 0; i < FILTER_S * SUMS * VECTOR; ++i)
          own[i / VECTOR / SUMS][i / VECTOR % SUMS][i % VECTOR] +=
              level[i][threadIdx.x + half * LANES];
    }
    if (thread.strip != 0 || !thread.exists || first_r + r >= FILTER_R) continue;
    const long long row = (static_cast<long long>(blockIdx.x) * FILTER_T + t) * FILTER_R + first_r + r;
#pragma unroll
    for (int s = 0; s < FILTER_S; ++s)
#pragma unroll
      for (int j = 0; j < SUMS; ++j)
#pragma unroll
        for (int v = 0; v < VECTOR; ++v)
          partial[((row * FILTER_S + s) * INS + first_j + j) * channels + thread.channel + v] =
              own[s][j][v];
  }
}

extern "C" __global__ void __launch_bounds__(ADDING_THREADS, 1)
    conv_direct_reduce(const Accumulator* __restrict__ partial, Storage* __restrict__ dw,
                       const int chunks, const __grid_constant__ ConvParameters p) {
  add_chunks<true, Index>(partial, dw, chunks, p);
}

#endif
