// Depthwise convolution on the tensor cores: 16-bit types, stride 1, 1-D and 2-D.
//
//   forward          y[n, c, p, q]  = sum over r, s of x[n, c, p - pad + r, q - pad + s] * w[c, r, s]
//   backprop-input   the forward pass of dy, with w rotated by 180 degrees and padding filter - 1 - pad
//   backprop-filter  dw[c, r, s]    = sum over n, p, q of dy[n, c, p, q] * x[n, c, p - pad + r, ...]
//
// conv_direct.cu executes one instruction per product, and more instructions to load sources and convert
// them to float32.  This kernel multiplies the rows of a channel by the filter's rows as matrices, with
// 2,048 products per warp instruction (1,024 on 7.5).  The rows (n, p) of all images are gemm_m.  For
// each row r of the filter, a strip of 8 outputs of a row is
//
//   Y[m, i] += sum over j of X[m + r, j] * T_r[j, i],   T_r[j, i] = w[r, j - i]
//
// where i numbers the columns of the strip, and j the source columns under the strip.  T_r is a Toeplitz
// matrix: for each i, FILTER_S of its FILTER_S + 7 elements along j are taps, and the others are zeros.
// The extent of j is rounded up to a multiple of 16: for 3 taps, 3 of 16 elements are taps; for 31 taps,
// 31 of 48.  The matrix is the same for all strips, so that its fragments are built once per row of the
// filter.  A fragment of X is loaded once for all strips whose windows contain it.  The filter gradient
// multiplies with the transpose of X, with m as gemm_k:
//
//   D_r[j, i] = sum over m and strips of X[m + r, j] * dY[m, i]
//   dw[r, s]  = sum over i of D_r[i + s, i]
//
// where D_r remains in registers for all strips and rows of a block.  Each block sums a chunk of the
// pixels into a workspace; conv_toeplitz_reduce adds the chunks in order.
//
// Zeros of T_r are multiplied with elements outside the window.  Therefore, if any source element of a
// block is NaN or infinite, the block falls back to plain sums from the same shared memory.
//
// A block computes CHANNELS channels, one per warp, 16 * ROW_TILES rows and 8 * STRIPS columns.  For any
// memory order, the source is stored in shared memory channel by channel, with zeros as padding.  Lines
// have an odd number of 16-byte chunks, so that ldmatrix has no bank conflicts.  Channels-last sources
// are transposed in registers, eight pixels of eight channels at a time.
//
// A variant is chosen with -D: PASS (0 forward, 1 backprop-input, 2 backprop-filter), STORAGE,
// INDEX, FILTER_R, FILTER_S, TAP_ROWS (filter rows per block; all rows, except in backprop-filter),
// ROW_TILES, ALIGNED (whether the rows of an image are rounded up to whole blocks), STRIPS,
// SOURCE_LINES (source lines per block), SOURCE_LAST, RESULT_LAST (whether channels are contiguous in
// the source, and in y, dx or dy), SOURCE_VECTOR, RESULT_VECTOR (elements per vector access, along
// channels or columns), SOURCE_SHIFT (columns from an aligned address to the first column of a strip),
// ASYNC_COPY (8.0 and later), ACTIVATION and ADD (forward and backprop-input only), SHARED_BYTES.
#include "chunks.cuh"
#include "epilogue.cuh"
#include "index.cuh"
#include "maps.cuh"
#include "multistage.cuh"
#include "vector.cuh"

using Storage = STORAGE;

constexpr int CHANNELS = 8;
constexpr int THREADS = CHANNELS * 32;
constexpr int ROWS = 16 * ROW_TILES;
constexpr int WINDOW = (FILTER_S + 14) / 8;      // blocks of 8 source columns under a strip
constexpr int PRODUCTS = (WINDOW + 1) / 2;       // products of 16 columns
constexpr int BLOCKS = STRIPS + WINDOW - 1;      // blocks of source columns
constexpr int WEIGHTS = 8 * WINDOW + 8;          // elements of a filter row with zeros around it

// -- geometry ---------------------------------------------------------------------------------------

// Sizes of the tiled tensor (y, dx or dy), which is divided among blocks, and of the source (x, or dy in
// backprop-input), which windows read.
struct Geometry {
  Index rows, height, width, source_height, source_width, pad_h, pad_w, channels;
  Index image_rows;  // rows per image, rounded up with ALIGNED; rows from `height` on do not exist

  __device__ __forceinline__ explicit Geometry(const ConvParameters& p)
      : channels(narrowed(p.groups)) {
#if PASS == 1
    const long long(&tiled)[3] = p.input;
    const long long(&source)[3] = p.output;
    pad_h = FILTER_R - 1 - narrowed(p.pad[1]);
    pad_w = FILTER_S - 1 - narrowed(p.pad[2]);
#else
    const long long(&tiled)[3] = p.output;
    const long long(&source)[3] = p.input;
    pad_h = narrowed(p.pad[1]);
    pad_w = narrowed(p.pad[2]);
#endif
    height = narrowed(tiled[1]);
    width = narrowed(tiled[2]);
    image_rows = ALIGNED ? (height + ROWS - 1) / ROWS * ROWS : height;
    rows = narrowed(p.batch) * image_rows;
    source_height = narrowed(source[1]);
    source_width = narrowed(source[2]);
  }

  __device__ __forceinline__ Index row_blocks() const { return (rows + ROWS - 1) / ROWS; }
  __device__ __forceinline__ Index column_blocks() const {
    return (width + 8 * STRIPS - 1) / (8 * STRIPS);
  }
};

// The rows and columns of the tiled tensor that belong to a block, and the source lines that they read.
// Each image has TAP_ROWS - 1 more source lines than rows.
struct Patch {
  const Geometry& g;
  Index first_row, first_column;
  int first_tap;  // first filter row

  __device__ __forceinline__ int line_of(Index row) const {
    const Index images = row / g.image_rows - first_row / g.image_rows;
    return static_cast<int>(row - first_row + images * (TAP_ROWS - 1));
  }
  // Computes image n and row h of a source line; returns whether this source row exists.
  __device__ __forceinline__ bool source_row(int line, Index& n, Index& h) const {
    const Index lines_of_image = g.image_rows + TAP_ROWS - 1;
    const Index from_image = first_row % g.image_rows + line;
    n = first_row / g.image_rows + from_image / lines_of_image;
    h = from_image % lines_of_image + first_tap - g.pad_h;
    return n * g.image_rows < g.rows && h >= 0 && h < g.source_height;
  }
  __device__ __forceinline__ bool tiled_row(int line, Index& n, Index& h) const {
    const Index row = first_row + line;
    n = row / g.image_rows;
    h = row % g.image_rows;
    return row < g.rows && h < g.height;
  }
};

// -- shared memory ----------------------------------------------------------------------------------

// Lines of one channel, in blocks of 8 columns.
template <int LINES_, int BLOCKS_>
struct Plane {
  alignas(16) Storage element[LINES_][(BLOCKS_ | 1) * 8];
};

constexpr long long NOWHERE = 1ll << 62;  // in place of the offset of a line outside the tensor

using SourcePlane = Plane<SOURCE_LINES, BLOCKS>;
using TiledPlane = Plane<ROWS, STRIPS>;

// Offsets in memory of a block's lines, in the block's first channel.
struct Lines {
  long long source[SOURCE_LINES], tiled[ROWS];

  __device__ __forceinline__ void find(const Patch& patch, const long long (&source_stride)[5],
                                       const long long (&tiled_stride)[5]) {
    const long long first_channel = static_cast<long long>(blockIdx.y) * CHANNELS;
    for (int i = threadIdx.x; i < SOURCE_LINES + ROWS; i += THREADS) {
      const bool of_source = i < SOURCE_LINES;
      const long long(&stride)[5] = of_source ? source_stride : tiled_stride;
      Index n, h;
      const bool exists = of_source ? patch.source_row(i, n, h)
                                    : patch.tiled_row(i - SOURCE_LINES, n, h);
      const long long begin = n * stride[0] + h * stride[3] + first_channel * stride[1];
      (of_source ? source[i] : tiled[i - SOURCE_LINES]) = exists ? begin : NOWHERE;
    }
  }
};

#if PASS == 2
struct Diagonals {
  float element[16 * PRODUCTS][9];  // padded against bank conflicts
};
// The struct has a name, because NVRTC up to 12.6 omits anonymous structs from the size of a union.
struct Held {
  SourcePlane source[CHANNELS];
  TiledPlane tiled[CHANNELS];
  float plain_sums[CHANNELS][TAP_ROWS][FILTER_S];
  Lines lines;
};
union SharedMemory {
  Held held;
  Diagonals diagonals[CHANNELS];
};
#else
struct SharedMemory {
  union {
    SourcePlane source[CHANNELS];
    TiledPlane tiled[CHANNELS];
  };
  Storage weights[CHANNELS][FILTER_R][WEIGHTS];
  Lines lines;
};
#endif
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "the launch asks for as much");

extern __shared__ __align__(128) unsigned char shared_memory[];

// Eight adjacent elements of a plane, two per word.
struct alignas(16) Eight {
  unsigned word[4];
};

// Transposes eight rows of eight elements.
__device__ __forceinline__ void transpose(Eight (&row)[8]) {
  Eight column[8];
#pragma unroll
  for (int c = 0; c < 8; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i)  // both lower halves of two words, or both upper halves
      column[c].word[i] = __byte_perm(row[2 * i].word[c / 2], row[2 * i + 1].word[c / 2],
                                      c % 2 == 0 ? 0x5410 : 0x7632);
#pragma unroll
  for (int c = 0; c < 8; ++c) row[c] = column[c];
}

// Returns a word whose two sign bits are set exactly for elements that are NaN or infinite: their exponent
// consists of ones, so that adding 1 to the exponent overflows into the sign bit.
__device__ __forceinline__ unsigned overrun(unsigned word, half_t) {
  return (word & 0x7fff7fffu) + 0x04000400u;
}
__device__ __forceinline__ unsigned overrun(unsigned word, bfloat16_t) {
  return (word & 0x7fff7fffu) + 0x00800080u;
}

// Loads VECTOR contiguous elements into an array of words, at element `first` of the array.  Stores
// zeros, without computing an address, if the elements are outside the tensor.
template <int VECTOR, int WORDS>
__device__ __forceinline__ void load_elements(unsigned (&word)[WORDS], int first,
                                              const Storage* tensor, long long offset,
                                              bool inside) {
  if constexpr (VECTOR == 1) {
    const unsigned bits = inside ? tensor[offset].bits : 0;
    word[first / 2] = first % 2 == 0 ? bits : word[first / 2] | bits << 16;
  } else {
    Piece<unsigned, VECTOR / 2> piece = {};
    if (inside) piece = *reinterpret_cast<const Piece<unsigned, VECTOR / 2>*>(tensor + offset);
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) word[first / 2 + i] = piece.element[i];
  }
}

template <int VECTOR>
__device__ __forceinline__ void store_elements(Storage* destination, const Eight& eight, int first) {
  if constexpr (VECTOR == 1) {
    destination->bits = static_cast<unsigned short>(eight.word[first / 2] >> first % 2 * 16);
  } else {
    Piece<unsigned, VECTOR / 2> piece;
#pragma unroll
    for (int i = 0; i < VECTOR / 2; ++i) piece.element[i] = eight.word[first / 2 + i];
    *reinterpret_cast<Piece<unsigned, VECTOR / 2>*>(destination) = piece;
  }
}

// The part of a tensor that a block's planes contain.
struct Window {
  const long long* rows;  // offset of each line in memory, or NOWHERE
  Index first_column, width;
  Index channels;  // remaining channels, from the block's first channel on
  Index channel_stride, column_stride;

  __device__ __forceinline__ Window(const long long* rows_, const long long (&stride)[5],
                                    Index first_column_, Index width_, Index channels_)
      : rows(rows_), first_column(first_column_), width(width_), channels(channels_),
        channel_stride(narrowed(stride[1])), column_stride(narrowed(stride[4])) {}

  // Computes the offset of a channel and a column of the block from the beginning of a line; returns
  // whether both exist.
  __device__ __forceinline__ bool locate(int channel, int column, Index& offset) const {
    const Index position = first_column + column;
    const bool inside = channel < channels && is_within(position, width);
    offset = inside ? position * column_stride + channel * channel_stride : 0;
    return inside;
  }
};

// The groups of eight elements that a thread copies: one block of columns, in every STEP-th line.
template <int BLOCKS_, bool LAST>
struct Share {
  static constexpr int AT_ONCE = 32 / BLOCKS_;  // lines per warp; some lanes may be idle
  static constexpr int STEP = LAST ? AT_ONCE * CHANNELS : AT_ONCE;
  int warp, column, first_line;

  __device__ __forceinline__ explicit Share(int lines) {
    const int lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    column = lane % BLOCKS_ * 8;
    // With channels last, a thread copies all channels; else it copies the channel of its warp.
    first_line = lane / BLOCKS_ + (LAST ? warp * AT_ONCE : 0);
    if (lane >= AT_ONCE * BLOCKS_) first_line = lines;
  }
};

// Fills the block's planes from a tensor whose channels (LAST) or columns are contiguous.  Positions
// outside the tensor become zero.  Returns whether the elements of this thread are finite.  Loads VECTOR
// elements at a time; the first column is SHIFT elements after an aligned column.  In each iteration, a
// thread starts all its loads before it stores any element.
template <int COUNT, int BLOCKS_, bool LAST, int VECTOR, int SHIFT>
__device__ __forceinline__ bool fill(Plane<COUNT, BLOCKS_>* planes, const Storage* tensor,
                                     const Window& window) {
  using Mine = Share<BLOCKS_, LAST>;
  const Mine mine(COUNT);
  unsigned beyond = 0;
  if constexpr (LAST) {
    // An iteration copies eight pixels of eight channels.
    bool inside[8];
    Index offset[8];
#pragma unroll
    for (int pixel = 0; pixel < 8; ++pixel)
      inside[pixel] = window.locate(0, mine.column + pixel, offset[pixel]);
    for (int line = mine.first_line; line < COUNT; line += Mine::STEP) {
      const long long row = window.rows[line];
      Eight eight[8];
#pragma unroll
      for (int pixel = 0; pixel < 8; ++pixel)
#pragma unroll
        for (int c = 0; c < CHANNELS; c += VECTOR)
          load_elements<VECTOR>(eight[pixel].word, c, tensor, row + offset[pixel] + c,
                                inside[pixel] && row != NOWHERE && c < window.channels);
      transpose(eight);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) beyond |= overrun(eight[c].word[j], Storage{});
        *reinterpret_cast<Eight*>(&planes[c].element[line][mine.column]) = eight[c];
      }
    }
  } else {
    // An iteration copies eight elements of each of TURN lines, in the order of memory.
    constexpr int TURN = 4, PIECES = 8 / VECTOR + (SHIFT ? 1 : 0);
    bool inside[PIECES];
    Index offset[PIECES];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
      inside[piece] =
          window.locate(mine.warp, mine.column - SHIFT + piece * VECTOR, offset[piece]);
    for (int first = mine.first_line; first < COUNT; first += TURN * Mine::STEP) {
      unsigned loaded[TURN][PIECES * VECTOR / 2];
#pragma unroll
      for (int turn = 0; turn < TURN; ++turn) {
        const int line = first + turn * Mine::STEP;
        const long long row = line < COUNT ? window.rows[line] : NOWHERE;
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece)
          load_elements<VECTOR>(loaded[turn], piece * VECTOR, tensor, row + offset[piece],
                                inside[piece] && row != NOWHERE);
      }
#pragma unroll
      for (int turn = 0; turn < TURN; ++turn) {
        const int line = first + turn * Mine::STEP;
        if (line >= COUNT) break;
        Eight eight;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const unsigned word = loaded[turn][j + SHIFT / 2];
          eight.word[j] = SHIFT % 2 == 0 ? word
                                         : __byte_perm(word, loaded[turn][j + (SHIFT + 1) / 2], 0x5432);
          beyond |= overrun(eight.word[j], Storage{});
        }
        *reinterpret_cast<Eight*>(&planes[mine.warp].element[line][mine.column]) = eight;
      }
    }
  }
  return (beyond & 0x80008000u) == 0;
}

// Stores the block's planes in the tensor: the reverse of fill().
template <int COUNT, int BLOCKS_, bool LAST, int VECTOR>
__device__ __forceinline__ void empty(const Plane<COUNT, BLOCKS_>* planes, Storage* tensor,
                                      const Window& window) {
  using Mine = Share<BLOCKS_, LAST>;
  const Mine mine(COUNT);
  constexpr int STEP = LAST ? 1 : VECTOR;  // columns per vector
  bool inside[8];
  Index offset[8];
#pragma unroll
  for (int i = 0; i < 8; i += STEP)
    inside[i] = window.locate(LAST ? 0 : mine.warp, mine.column + i, offset[i]);
  for (int line = mine.first_line; line < COUNT; line += Mine::STEP) {
    const long long row = window.rows[line];
    if (row == NOWHERE) continue;
    if constexpr (LAST) {
      Eight eight[8];
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c)
        eight[c] = *reinterpret_cast<const Eight*>(&planes[c].element[line][mine.column]);
      transpose(eight);
#pragma unroll
      for (int pixel = 0; pixel < 8; ++pixel)
#pragma unroll
        for (int c = 0; c < CHANNELS; c += VECTOR)
          if (inside[pixel] && c < window.channels)
            store_elements<VECTOR>(tensor + row + offset[pixel] + c, eight[pixel], c);
    } else {
      const Eight eight =
          *reinterpret_cast<const Eight*>(&planes[mine.warp].element[line][mine.column]);
#pragma unroll
      for (int i = 0; i < 8; i += STEP)
        if (inside[i]) store_elements<VECTOR>(tensor + row + offset[i], eight, i);
    }
  }
}

// Loads blocks of 16 rows by 8 columns as fragments.  `line` is the line of the plane that this lane
// addresses, which is row (lane % 16) of the block.  Blocks beyond the plane are zeros.  The two registers
// of a block contain rows 0-7 and rows 8-15.
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

// A warp copies the filter of its channel, if the channel exists, with zeros around each row.  All loads
// of an iteration are in flight before the warp stores an element.
__device__ __forceinline__ void bring_filter(Storage (&weights)[FILTER_R][WEIGHTS],
                                             const Storage* taps, const long long (&stride)[5],
                                             bool exists) {
  constexpr int PLACES = (WEIGHTS + 31) / 32;  // elements per row and lane, at most 3
  constexpr int TURN = 8 / PLACES;             // rows per iteration
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int first = 0; first < FILTER_R; first += TURN) {
    Storage loaded[TURN][PLACES];
#pragma unroll
    for (int turn = 0; turn < TURN; ++turn)
#pragma unroll
      for (int i = 0; i < PLACES; ++i) {
        const int r = first + turn, s = lane + i * 32 - 8;
        const Tap<Index> tap = PASS == 0 ? Tap<Index>{0, 0, r, s}
                                         : Tap<Index>{0, 0, FILTER_R - 1 - r, FILTER_S - 1 - s};
        const bool inside = exists && r < FILTER_R && is_within(s, FILTER_S);
        loaded[turn][i] = inside ? taps[tap_offset(tap, stride)] : Storage{};
      }
#pragma unroll
    for (int turn = 0; turn < TURN; ++turn)
#pragma unroll
      for (int i = 0; i < PLACES; ++i)
        if (first + turn < FILTER_R && lane + i * 32 < WEIGHTS)
          weights[first + turn][lane + i * 32] = loaded[turn][i];
  }
}

// source is x or dy, and result is y or dx.  bias may be null; the addend is read with ADD only.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_toeplitz(const Storage* __restrict__ source, const Storage* __restrict__ w,
                  const Storage* __restrict__ bias, const Storage* addend, Storage* result,
                  const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  const long long(&source_stride)[5] = PASS == 0 ? p.x_stride : p.y_stride;
  const long long(&result_stride)[5] = PASS == 0 ? p.y_stride : p.x_stride;
  const Geometry g(p);
  const Patch patch = {g, static_cast<Index>(blockIdx.x) / g.column_blocks() * ROWS,
                       static_cast<Index>(blockIdx.x) % g.column_blocks() * (8 * STRIPS), 0};
  const Index first_channel = static_cast<Index>(blockIdx.y) * CHANNELS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;

  shared.lines.find(patch, source_stride, result_stride);
  const Index channels = g.channels - first_channel;
  bring_filter(shared.weights[warp], w + (first_channel + warp) * narrowed(p.w_stride[0]),
               p.w_stride, warp < channels);
  __syncthreads();  // the offsets of the lines are written
  const bool finite = fill<SOURCE_LINES, BLOCKS, SOURCE_LAST, SOURCE_VECTOR, SOURCE_SHIFT>(
      shared.source, source,
      Window(shared.lines.source, source_stride, patch.first_column - g.pad_w, g.source_width,
             channels));
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
      // Fragments of T_r: a thread has rows 2 pair and 2 pair + 1 of every 8 rows, in column `group`
      // (pair and group as in ptx.cuh).
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
        bias[(first_channel + warp) * narrowed(p.bias_stride)]);
#pragma unroll
    for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
      for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[tile][strip][e] += added;
  }

  __syncthreads();  // the source is no longer read; results replace it
  const Window results(shared.lines.tiled, result_stride, patch.first_column, g.width, channels);
  if (ADD) {
    fill<ROWS, STRIPS, RESULT_LAST, RESULT_VECTOR, 0>(shared.tiled, addend, results);
    __syncthreads();  // the planes contain the addend
  }
#pragma unroll
  for (int tile = 0; tile < ROW_TILES; ++tile)
#pragma unroll
    for (int strip = 0; strip < STRIPS; ++strip)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Storage* const element =
            &shared.tiled[warp].element[tile * 16 + half * 8 + group][strip * 8 + 2 * pair];
        float two[2] = {sum[tile][strip][2 * half], sum[tile][strip][2 * half + 1]};
        add_addend(two, element);
        two[0] = activate<ACTIVATION>(two[0]), two[1] = activate<ACTIVATION>(two[1]);
        store_piece<2>(element, two);
      }
  __syncthreads();  // the results are complete

  empty<ROWS, STRIPS, RESULT_LAST, RESULT_VECTOR>(shared.tiled, result, results);
}

#else

// A block sums a chunk of the pixels (blockIdx.x) for CHANNELS channels (blockIdx.y) and TAP_ROWS filter
// rows (blockIdx.z) into the workspace `partial`, which is indexed (chunk, channel, r, s).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_toeplitz(const Storage* __restrict__ x, const Storage* __restrict__ dy,
                  float* __restrict__ partial, const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  Held& held = shared.held;
  const Geometry g(p);
  const int first_tap = static_cast<int>(blockIdx.z) * TAP_ROWS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4;
  const Index channel = static_cast<Index>(blockIdx.y) * CHANNELS + warp;

  for (int r = 0; r < TAP_ROWS; ++r)
    for (int s = lane; s < FILTER_S; s += 32) held.plain_sums[warp][r][s] = 0;

  // The patches of this chunk.
  const Index patches = g.row_blocks() * g.column_blocks();
  const Index share = (patches + gridDim.x - 1) / static_cast<Index>(gridDim.x);
  const Index first_patch = static_cast<Index>(blockIdx.x) * share;

  float sum[TAP_ROWS][PRODUCTS][4] = {};
  for (Index number = first_patch; number < first_patch + share && number < patches; ++number) {
    const Patch patch = {g, number / g.column_blocks() * ROWS,
                         number % g.column_blocks() * (8 * STRIPS), first_tap};
    held.lines.find(patch, p.x_stride, p.y_stride);
    __syncthreads();  // the lines' offsets are written; the previous patch is no longer read
    const Index channels = g.channels - static_cast<Index>(blockIdx.y) * CHANNELS;
    const bool finite = fill<SOURCE_LINES, BLOCKS, SOURCE_LAST, SOURCE_VECTOR, SOURCE_SHIFT>(
        held.source, x,
        Window(held.lines.source, p.x_stride, patch.first_column - g.pad_w, g.source_width,
               channels));
    fill<ROWS, STRIPS, RESULT_LAST, RESULT_VECTOR, 0>(
        held.tiled, dy,
        Window(held.lines.tiled, p.y_stride, patch.first_column, g.width, channels));
    const SourcePlane& plane = held.source[warp];
    const TiledPlane& gradient = held.tiled[warp];
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
            if (!patch.tiled_row(row, n, h)) continue;
            const int line = patch.line_of(patch.first_row + row) + tap;
            for (int q = 0; q < 8 * STRIPS && patch.first_column + q < g.width; ++q)
              plain += Numeric<Storage>::widen(gradient.element[row][q]) *
                       Numeric<Storage>::widen(plane.element[line][q + s]);
          }
          held.plain_sums[warp][tap][s] += plain;
        }
    }
  }

  // dw[r, s] is the sum of a diagonal of D_r.
  float plain[TAP_ROWS][(FILTER_S + 31) / 32];
#pragma unroll
  for (int r = 0; r < TAP_ROWS; ++r)
#pragma unroll
    for (int i = 0; i < (FILTER_S + 31) / 32; ++i)
      plain[r][i] = lane + 32 * i < FILTER_S ? held.plain_sums[warp][r][lane + 32 * i] : 0.f;
  __syncthreads();  // the patches are no longer read; the diagonals replace them
  Diagonals& diagonals = shared.diagonals[warp];
#pragma unroll
  for (int r = 0; r < TAP_ROWS; ++r) {
    __syncwarp();  // the diagonals of the previous row have been read
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

extern "C" __global__ void __launch_bounds__(ADDING_THREADS, 1)
    conv_toeplitz_reduce(const float* __restrict__ partial, Storage* __restrict__ dw,
                         const int chunks, const __grid_constant__ ConvParameters p) {
  add_chunks<false, Index>(partial, dw, chunks, p);
}

#endif
