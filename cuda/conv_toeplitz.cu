// Depthwise convolution with large filters, on the tensor cores: 16-bit types, stride 1, 1-D and
// 2-D.
//
//   forward          y[n, c, p, q]  = sum over r, s of x[n, c, p - pad + r, q - pad + s] * w[c, r, s]
//   backprop-input   the same with dy for x, w turned by 180 degrees, and filter - 1 - pad for pad
//   backprop-filter  dw[c, r, s]    = sum over n, p, q of dy[n, c, p, q] * x[n, c, p - pad + r, ...]
//
// From about 7 x 7 on, what binds cuda-direct is the rate of plain float32.  What this adds: the
// rows of a channel are multiplied by the filter's rows as matrices.  With the rows (n, p) of all
// images as gemm_m, a strip of 8 outputs of a row is, for each row r of the filter,
//
//   Y[m, i] += sum over j of X[m + r, j] * T_r[j, i],   T_r[j, i] = w[r, j - i]
//
// a product with a Toeplitz matrix, of which FILTER_S in FILTER_S + 7 columns j are in the band
// (rounded up to products of 16: 7 of 16 for 7 taps, 31 of 48 for 31).  It is the same for every
// strip, so that its fragments are made once per row of the filter; those of X serve every strip
// that they are under.  The filter's gradient is the transpose: with m as gemm_k,
//
//   D_r[j, i] = sum over m and strips of X[m + r, j] * dY[m, i]
//   dw[r, s]  = sum over i of D_r[i + s, i]
//
// where D_r stays in registers for all strips and rows of a block.  Blocks take a chunk of the
// pixels and write their sums to a workspace; conv_toeplitz_reduce adds the chunks in order.
//
// Zeros of T_r meet numbers that are not under the window.  Where one of these is not finite, the
// block falls back to plain sums from the same shared memory, so that NaN and infinity stay where
// they belong.
//
// A block takes CHANNELS channels, a warp each, 16 * ROW_TILES rows and 8 * STRIPS columns.  The
// source lies in shared memory channel by channel, with zeros for the padding, whatever its order
// in memory: lines of an odd number of 16-byte chunks, from which ldmatrix reads without a bank
// conflict.
//
// A variant is chosen with -D: PASS (0 forward, 1 backprop-input, 2 backprop-filter), STORAGE,
// INDEX, FILTER_R, FILTER_S, TAP_ROWS (rows of the filter that a block takes: all, but in
// backprop-filter), ROW_TILES, ALIGNED (whether the rows of an image are rounded up to whole
// blocks), STRIPS, SOURCE_LINES (lines of the source in a block), SOURCE_LAST, RESULT_LAST (whether
// channels are contiguous in the source, and in y, dx or dy), SOURCE_VECTOR, RESULT_VECTOR
// (elements moved at once, along channels or columns), SOURCE_SHIFT (columns from an aligned one to
// a strip's first), ASYNC_COPY (8.0 and later), ACTIVATION (of the forward pass).
#include "chunks.cuh"
#include "epilogue.cuh"
#include "maps.cuh"
#include "ring.cuh"
#include "vector.cuh"

using Index = INDEX;
using Storage = STORAGE;

constexpr int CHANNELS = 8;
constexpr int THREADS = CHANNELS * 32;
constexpr int ROWS = 16 * ROW_TILES;
constexpr int WINDOW = (FILTER_S + 14) / 8;      // blocks of 8 columns under a strip
constexpr int PRODUCTS = (WINDOW + 1) / 2;       // of 16 columns
constexpr int BLOCKS = STRIPS + WINDOW - 1;      // blocks of columns of the source
constexpr int WEIGHTS = 8 * WINDOW + 8;          // a row of the filter with zeros around it

// -- geometry ---------------------------------------------------------------------------------------

// The tensor whose rows and columns are walked (y, dx, or dy) and the one under the windows.
struct Geometry {
  Index rows, height, width, source_height, source_width, pad_h, pad_w, channels;
  Index image_rows;  // of an image, as rows are numbered; those from height on do not exist

  __device__ __forceinline__ explicit Geometry(const ConvParameters& p)
      : channels(static_cast<Index>(p.groups)) {
#if PASS == 1
    const long long(&walked)[3] = p.input;
    const long long(&source)[3] = p.output;
    pad_h = FILTER_R - 1 - static_cast<Index>(p.pad[1]);
    pad_w = FILTER_S - 1 - static_cast<Index>(p.pad[2]);
#else
    const long long(&walked)[3] = p.output;
    const long long(&source)[3] = p.input;
    pad_h = static_cast<Index>(p.pad[1]);
    pad_w = static_cast<Index>(p.pad[2]);
#endif
    height = static_cast<Index>(walked[1]);
    width = static_cast<Index>(walked[2]);
    image_rows = ALIGNED ? (height + ROWS - 1) / ROWS * ROWS : height;
    rows = static_cast<Index>(p.batch) * image_rows;
    source_height = static_cast<Index>(source[1]);
    source_width = static_cast<Index>(source[2]);
  }

  __device__ __forceinline__ Index row_blocks() const { return (rows + ROWS - 1) / ROWS; }
  __device__ __forceinline__ Index column_blocks() const {
    return (width + 8 * STRIPS - 1) / (8 * STRIPS);
  }
};

// The rows and columns of one block, and the lines of the source that they need: those of an image
// follow each other, TAP_ROWS - 1 more than it has rows.
struct Patch {
  const Geometry& g;
  Index first_row, first_column;
  int first_tap;  // row of the filter

  __device__ __forceinline__ int line_of(Index row) const {
    const Index images = row / g.image_rows - first_row / g.image_rows;
    return static_cast<int>(row - first_row + images * (TAP_ROWS - 1));
  }
  // The source's row that is in a line; whether it exists.
  __device__ __forceinline__ bool source_row(int line, Index& n, Index& h) const {
    const Index lines_of_image = g.image_rows + TAP_ROWS - 1;
    const Index from_image = first_row % g.image_rows + line;
    n = first_row / g.image_rows + from_image / lines_of_image;
    h = from_image % lines_of_image + first_tap - g.pad_h;
    return n * g.image_rows < g.rows && h >= 0 && h < g.source_height;
  }
  __device__ __forceinline__ bool walked_row(int line, Index& n, Index& h) const {
    const Index row = first_row + line;
    n = row / g.image_rows;
    h = row % g.image_rows;
    return row < g.rows && h < g.height;
  }
};

// -- shared memory ----------------------------------------------------------------------------------

// Lines of one channel, of blocks of 8 columns.
template <int LINES_, int BLOCKS_>
struct Plane {
  alignas(16) Storage element[LINES_][(BLOCKS_ | 1) * 8];
};

using SourcePlane = Plane<SOURCE_LINES, BLOCKS>;
using WalkedPlane = Plane<ROWS, STRIPS>;

#if PASS == 2
struct Diagonals {
  float element[16 * PRODUCTS][9];  // one more than 8, for the banks
};
union SharedMemory {
  struct {
    SourcePlane source[CHANNELS];
    WalkedPlane walked[CHANNELS];
    float plain_sums[CHANNELS][TAP_ROWS][FILTER_S];
  };
  Diagonals diagonals[CHANNELS];
};
#else
struct SharedMemory {
  union {
    SourcePlane source[CHANNELS];
    WalkedPlane walked[CHANNELS];
  };
  Storage weights[CHANNELS][FILTER_R][WEIGHTS];
};
#endif
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "the launch asks for as much");

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ __forceinline__ bool is_finite(half_t value) { return (value.bits & 0x7c00) != 0x7c00; }
__device__ __forceinline__ bool is_finite(bfloat16_t value) {
  return (value.bits & 0x7f80) != 0x7f80;
}

// Fills the block's planes with lines of a tensor, zeros where it has nothing; whether what this
// thread brought is finite.  row_of(line, n, h) says which row a line is; from first_column on,
// SHIFT columns behind one that VECTOR neighbours may be loaded from.
template <int COUNT, int BLOCKS_, bool LAST, int VECTOR, int SHIFT, class RowOf>
__device__ __forceinline__ bool fill(Plane<COUNT, BLOCKS_>* planes, const Storage* tensor,
                                     const long long (&stride)[5], Index width, Index channels,
                                     Index first_column, RowOf row_of) {
  const Index first_channel = static_cast<Index>(blockIdx.y) * CHANNELS;
  bool finite = true;
  if constexpr (LAST) {
    constexpr int PIECES = CHANNELS / VECTOR;
    for (int i = threadIdx.x; i < COUNT * BLOCKS_ * 8 * PIECES; i += THREADS) {
      const int c = i % PIECES * VECTOR, column = i / PIECES % (BLOCKS_ * 8);
      const int line = i / PIECES / (BLOCKS_ * 8);
      Index n, h;
      const Index w = first_column + column;
      const bool inside =
          row_of(line, n, h) && first_channel + c < channels && w >= 0 && w < width;
      Piece<Storage, VECTOR> piece = {};
      if (inside)
        piece = *reinterpret_cast<const Piece<Storage, VECTOR>*>(
            tensor + pixel_offset(Pixel<Index>{n, 0, h, w}, stride) +
            (first_channel + c) * static_cast<Index>(stride[1]));
#pragma unroll
      for (int e = 0; e < VECTOR; ++e) {
        finite = finite && is_finite(piece.element[e]);
        planes[c + e].element[line][column] = piece.element[e];
      }
    }
  } else {
    for (int i = threadIdx.x; i < CHANNELS * COUNT * BLOCKS_; i += THREADS) {
      const int block = i % BLOCKS_, line = i / BLOCKS_ % COUNT, c = i / BLOCKS_ / COUNT;
      Index n, h;
      const bool exists = row_of(line, n, h) && first_channel + c < channels;
      const Index from = first_column - SHIFT + block * 8;
      constexpr int PIECES = 8 / VECTOR + (SHIFT ? 1 : 0);
      Storage element[PIECES * VECTOR];
#pragma unroll
      for (int j = 0; j < PIECES; ++j) {
        const Index w = from + j * VECTOR;
        Piece<Storage, VECTOR> piece = {};
        if (exists && w >= 0 && w < width)
          piece = *reinterpret_cast<const Piece<Storage, VECTOR>*>(
              tensor + pixel_offset(Pixel<Index>{n, 0, h, w}, stride) +
              (first_channel + c) * static_cast<Index>(stride[1]));
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) element[j * VECTOR + e] = piece.element[e];
      }
      Piece<Storage, 8> whole;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        finite = finite && is_finite(element[SHIFT + e]);
        whole.element[e] = element[SHIFT + e];
      }
      *reinterpret_cast<Piece<Storage, 8>*>(&planes[c].element[line][block * 8]) = whole;
    }
  }
  return finite;
}

// Blocks of 16 rows by 8 columns as fragments, from this lane's line (row lane % 16) on; zeros for
// blocks beyond the plane's.  Registers hold rows 0-7 and 8-15.
template <bool TRANSPOSED, int COUNT, int BLOCKS_, int WANTED>
__device__ __forceinline__ void load_blocks(unsigned (&block)[WANTED][2],
                                            const Plane<COUNT, BLOCKS_>& plane, int line) {
  const int right = threadIdx.x % 32 / 16;
#pragma unroll
  for (int b = 0; b < WANTED; b += 2) {
    unsigned four[4] = {};
    if (b + 1 < BLOCKS_) {
      const Storage* row = &plane.element[line][(b + right) * 8];
      if constexpr (TRANSPOSED)
        ptx::ldmatrix_x4_trans(four, row);
      else
        ptx::ldmatrix_x4(four, row);
    } else if (b < BLOCKS_) {
      unsigned two[2];
      const Storage* row = &plane.element[line][b * 8];
      if constexpr (TRANSPOSED)
        ptx::ldmatrix_x2_trans(two, row);
      else
        ptx::ldmatrix_x2(two, row);
      four[0] = two[0], four[1] = two[1];
    }
    block[b][0] = four[0], block[b][1] = four[1];
    if (b + 1 < WANTED) block[b + 1][0] = four[2], block[b + 1][1] = four[3];
  }
}

// -- kernels ----------------------------------------------------------------------------------------

#if PASS != 2

// source is x or dy, result y or dx; bias may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_toeplitz(const Storage* __restrict__ source, const Storage* __restrict__ w,
                  const Storage* __restrict__ bias, Storage* __restrict__ result,
                  const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  const long long(&source_stride)[5] = PASS == 0 ? p.x_stride : p.y_stride;
  const long long(&result_stride)[5] = PASS == 0 ? p.y_stride : p.x_stride;
  const Geometry g(p);
  const Patch patch = {g, static_cast<Index>(blockIdx.x) / g.column_blocks() * ROWS,
                       static_cast<Index>(blockIdx.x) % g.column_blocks() * (8 * STRIPS), 0};
  const Index first_channel = static_cast<Index>(blockIdx.y) * CHANNELS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;

  for (int i = threadIdx.x; i < CHANNELS * FILTER_R * WEIGHTS; i += THREADS) {
    const int s = i % WEIGHTS - 8, r = i / WEIGHTS % FILTER_R, c = i / WEIGHTS / FILTER_R;
    const bool inside = s >= 0 && s < FILTER_S && first_channel + c < g.channels;
    const Index tap_r = PASS == 0 ? r : FILTER_R - 1 - r, tap_s = PASS == 0 ? s : FILTER_S - 1 - s;
    shared.weights[c][r][s + 8] =
        inside ? w[(first_channel + c) * static_cast<Index>(p.w_stride[0]) +
                   tap_offset(Tap<Index>{0, 0, tap_r, tap_s}, p.w_stride)]
               : Storage{};
  }
  const bool finite = fill<SOURCE_LINES, BLOCKS, SOURCE_LAST, SOURCE_VECTOR, SOURCE_SHIFT>(
      shared.source, source, source_stride, g.source_width, g.channels,
      patch.first_column - g.pad_w,
      [&](int line, Index& n, Index& h) { return patch.source_row(line, n, h); });
  const bool plain = __syncthreads_or(!finite);  // the filter and the source are complete

  float sum[ROW_TILES][STRIPS][4] = {};
  const SourcePlane& plane = shared.source[warp];
  if (!plain) {
    int line[ROW_TILES];
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
      line[tile] = patch.line_of(patch.first_row + tile * 16 + lane % 16);
#pragma unroll 1
    for (int r = 0; r < FILTER_R; ++r) {
      // T_r: this thread has rows 2 pair and 2 pair + 1 of each 8, column group.
      unsigned band[2 * PRODUCTS];
#pragma unroll
      for (int b = 0; b < 2 * PRODUCTS; ++b) {
        band[b] = 0;
        if (b >= WINDOW) continue;
        const int s = b * 8 + 2 * pair - group;
        band[b] = shared.weights[warp][r][8 + s].bits |
                  static_cast<unsigned>(shared.weights[warp][r][8 + s + 1].bits) << 16;
      }
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) {
        unsigned block[STRIPS + 2 * PRODUCTS - 1][2];
        load_blocks<false>(block, plane, line[tile] + r);
#pragma unroll
        for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
          for (int product = 0; product < PRODUCTS; ++product) {
            const unsigned(&left)[2] = block[strip + 2 * product];
            const unsigned(&right)[2] = block[strip + 2 * product + 1];
            const unsigned a[4] = {left[0], left[1], right[0], right[1]};
            multiply_fragments(sum[tile][strip], a, band[2 * product], band[2 * product + 1],
                               Storage{});
          }
      }
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int line = patch.line_of(patch.first_row + tile * 16 + e / 2 * 8 + group);
          const int column = strip * 8 + 2 * pair + e % 2;
#pragma unroll 1
          for (int tap = 0; tap < FILTER_R * FILTER_S; ++tap) {
            const int r = tap / FILTER_S, s = tap % FILTER_S;
            sum[tile][strip][e] += Numeric<Storage>::widen(plane.element[line + r][column + s]) *
                                   Numeric<Storage>::widen(shared.weights[warp][r][8 + s]);
          }
        }
  }
  if (bias != nullptr && first_channel + warp < g.channels) {
    const float added = Numeric<Storage>::widen(
        bias[(first_channel + warp) * static_cast<Index>(p.bias_stride)]);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[tile][strip][e] += added;
  }

  __syncthreads();  // the source is no longer read: the results take its place
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float two[2] = {sum[tile][strip][2 * half], sum[tile][strip][2 * half + 1]};
        two[0] = activate<ACTIVATION>(two[0]), two[1] = activate<ACTIVATION>(two[1]);
        store_piece<2>(
            &shared.walked[warp].element[tile * 16 + half * 8 + group][strip * 8 + 2 * pair], two);
      }
  __syncthreads();  // the results are complete

  constexpr int CHANNEL_PIECE = RESULT_LAST ? RESULT_VECTOR : 1;
  constexpr int COLUMN_PIECE = RESULT_LAST ? 1 : RESULT_VECTOR;
  constexpr int CHANNEL_PIECES = CHANNELS / CHANNEL_PIECE;
  constexpr int COLUMN_PIECES = 8 * STRIPS / COLUMN_PIECE;
  for (int i = threadIdx.x; i < CHANNEL_PIECES * COLUMN_PIECES * ROWS; i += THREADS) {
    // The axis that is contiguous in memory first.
    const int c = (RESULT_LAST ? i % CHANNEL_PIECES : i / COLUMN_PIECES / ROWS) * CHANNEL_PIECE;
    const int column =
        (RESULT_LAST ? i / CHANNEL_PIECES : i) % COLUMN_PIECES * COLUMN_PIECE;
    const int line = RESULT_LAST ? i / CHANNEL_PIECES / COLUMN_PIECES : i / COLUMN_PIECES % ROWS;
    Index n, h;
    const Index position = patch.first_column + column;
    if (!patch.walked_row(line, n, h) || position >= g.width || first_channel + c >= g.channels)
      continue;
    Piece<Storage, RESULT_VECTOR> piece;
#pragma unroll
    for (int e = 0; e < RESULT_VECTOR; ++e)
      piece.element[e] =
          shared.walked[c + (RESULT_LAST ? e : 0)].element[line][column + (RESULT_LAST ? 0 : e)];
    *reinterpret_cast<Piece<Storage, RESULT_VECTOR>*>(
        result + pixel_offset(Pixel<Index>{n, 0, h, position}, result_stride) +
        (first_channel + c) * static_cast<Index>(result_stride[1])) = piece;
  }
}

#else

// One block sums a chunk of the pixels (blockIdx.x) for CHANNELS channels (blockIdx.y) and TAP_ROWS
// rows of the filter (blockIdx.z) into partial: (chunk, channel, r, s).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_toeplitz(const Storage* __restrict__ x, const Storage* __restrict__ dy,
                  float* __restrict__ partial, const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  const Geometry g(p);
  const int first_tap = static_cast<int>(blockIdx.z) * TAP_ROWS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const Index channel = static_cast<Index>(blockIdx.y) * CHANNELS + warp;

  for (int r = 0; r < TAP_ROWS; ++r)
    for (int s = lane; s < FILTER_S; s += 32) shared.plain_sums[warp][r][s] = 0;

  // This chunk's share of the patches.
  const Index patches = g.row_blocks() * g.column_blocks();
  const Index share = (patches + gridDim.x - 1) / static_cast<Index>(gridDim.x);
  const Index first_patch = static_cast<Index>(blockIdx.x) * share;

  float sum[TAP_ROWS][PRODUCTS][4] = {};
  for (Index number = first_patch; number < first_patch + share && number < patches; ++number) {
    const Patch patch = {g, number / g.column_blocks() * ROWS,
                         number % g.column_blocks() * (8 * STRIPS), first_tap};
    __syncthreads();  // the patch before is used up
    const bool finite = fill<SOURCE_LINES, BLOCKS, SOURCE_LAST, SOURCE_VECTOR, SOURCE_SHIFT>(
        shared.source, x, p.x_stride, g.source_width, g.channels, patch.first_column - g.pad_w,
        [&](int line, Index& n, Index& h) { return patch.source_row(line, n, h); });
    fill<ROWS, STRIPS, RESULT_LAST, RESULT_VECTOR, 0>(
        shared.walked, dy, p.y_stride, g.width, g.channels, patch.first_column,
        [&](int line, Index& n, Index& h) { return patch.walked_row(line, n, h); });
    const SourcePlane& plane = shared.source[warp];
    const WalkedPlane& gradient = shared.walked[warp];
    if (!__syncthreads_or(!finite)) {  // the patch is complete
#pragma unroll
      for (int tile = 0; tile < ROW_TILES; ++tile) {
        unsigned dy_block[STRIPS][2];
        load_blocks<true>(dy_block, gradient, tile * 16 + lane % 16);
        const int line = patch.line_of(patch.first_row + tile * 16 + lane % 16);
#pragma unroll
        for (int r = 0; r < TAP_ROWS; ++r) {
          unsigned block[STRIPS + 2 * PRODUCTS - 1][2];
          load_blocks<true>(block, plane, line + r);
#pragma unroll
          for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
            for (int product = 0; product < PRODUCTS; ++product) {
              const unsigned(&upper)[2] = block[strip + 2 * product];
              const unsigned(&lower)[2] = block[strip + 2 * product + 1];
              const unsigned a[4] = {upper[0], lower[0], upper[1], lower[1]};
              multiply_fragments(sum[r][product], a, dy_block[strip][0], dy_block[strip][1],
                                 Storage{});
            }
        }
      }
    } else {
      for (int tap = 0; tap < TAP_ROWS; ++tap)
        for (int s = lane; s < FILTER_S; s += 32) {
          float plain = 0;
          for (int row = 0; row < ROWS; ++row) {
            Index n, h;
            if (!patch.walked_row(row, n, h)) continue;
            const int line = patch.line_of(patch.first_row + row) + tap;
            for (int q = 0; q < 8 * STRIPS && patch.first_column + q < g.width; ++q)
              plain += Numeric<Storage>::widen(gradient.element[row][q]) *
                       Numeric<Storage>::widen(plane.element[line][q + s]);
          }
          shared.plain_sums[warp][tap][s] += plain;
        }
    }
  }

  // dw[r, s] is the sum of a diagonal of D_r.
  float plain[TAP_ROWS][(FILTER_S + 31) / 32];
#pragma unroll
  for (int r = 0; r < TAP_ROWS; ++r)
#pragma unroll
    for (int i = 0; i < (FILTER_S + 31) / 32; ++i)
      plain[r][i] = lane + 32 * i < FILTER_S ? shared.plain_sums[warp][r][lane + 32 * i] : 0.f;
  __syncthreads();  // the patches are used up: the diagonals take their place
  Diagonals& diagonals = shared.diagonals[warp];
#pragma unroll
  for (int r = 0; r < TAP_ROWS; ++r) {
    __syncwarp();  // the diagonals of the row before are read
#pragma unroll
    for (int product = 0; product < PRODUCTS; ++product)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        diagonals.element[product * 16 + e / 2 * 8 + group][2 * pair + e % 2] =
            sum[r][product][e];
    __syncwarp();  // the diagonals are complete
    if (first_tap + r >= FILTER_R || channel >= g.channels) continue;
#pragma unroll
    for (int i = 0; i < (FILTER_S + 31) / 32; ++i) {
      const int s = lane + 32 * i;
      if (s >= FILTER_S) continue;
      float total = plain[r][i];
#pragma unroll
      for (int column = 0; column < 8; ++column)
        total += diagonals.element[column + s][column];
      partial[((static_cast<long long>(blockIdx.x) * g.channels + channel) * FILTER_R + first_tap +
               r) * FILTER_S + s] = total;
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    conv_toeplitz_reduce(const float* __restrict__ partial, Storage* __restrict__ dw,
                         const int chunks, const __grid_constant__ ConvParameters p) {
  add_chunks<false, Index>(partial, dw, chunks, p);
}

#endif
