// Convolution with few input channels and one group, such as a network's first layer, on the tensor
// cores: 16-bit types, float32 rounded to TF32, and float64; 1-D to 3-D, any stride and dilation.
//
//   forward          y[n, z, p, q, k]  = sum over t, r, s, c of x[n, d, h, w, c] * w[k, t, r, s, c]
//   backprop-filter  dw[k, t, r, s, c] = sum over n, z, p, q of dy[n, z, p, q, k] * x[n, d, h, w, c]
//
// with h = p * stride - pad + r * dilation, and similarly for d and w.  The input gradient, which a first
// layer does not need, has too few columns for these tiles.
//
// A row of the filter reads contiguous elements: S * C with channels last, S per channel with channels
// first.  These may begin at any element.  Therefore conv_gather.cu copies the input of such a layer
// element by element, and copies each element once per overlapping window.  This kernel copies the input
// under a tile of TILE_P x TILE_Q outputs of an image, including padding, to shared memory once: the
// patch.  A line of the patch is an input row, with all channels or with one.  gemm_k runs over flattened
// filter rows, each rounded up to whole words (below) instead of vectors.  A 16-bit layer with 7 x 7 taps
// and 3 channels has a gemm_k of 7 * 22 = 154, which is 160 in whole steps of 16.
// If windows were padded to 4 channels and 8 columns, gemm_k would be 7 * 8 * 4 = 224.
//
//   pass             gemm_m          gemm_n            gemm_k          A          B
//   forward          output pixels   filters           flattened rows  patch      w
//   backprop_filter  filters         flattened rows    output pixels   dy         patch
//
// A word is one register of a fragment: two adjacent 16-bit elements of the patch, or one wider element.
// The address of a word is the sum of the pixel's offset and the word's offset within the window.  16-bit
// words begin only at even elements.  If adjacent windows are an odd number of elements apart
// (WINDOW_STEP), windows begin at even and at odd elements, and the pixels of a tile form two CLASSES,
// the even and the odd class.  The odd class has a separate filter, shifted by one element, and its
// pixels are numbered separately, so that fragments do not mix classes.  A word may contain elements
// outside the filter row, and there may be words beyond the last row.  All such elements are masked,
// since zeros of the filter must not meet NaN or infinity from outside the window.
//
// Fragments of the patch are loaded word by word.  Pixels of a fragment are adjacent in a row, and words
// of a step are adjacent in a filter row, so that most loads are in different banks.  LINE_PITCH, the
// elements per line, is chosen to separate the remaining loads.
//
// In backprop_filter, a 16-bit word contains two columns of gemm_n; the halves of two words of adjacent
// pixels are exchanged to form the fragments of both columns.
//
// Blocks are persistent: a block keeps the filter, or the sums of its gradient, and computes many tiles.
// While it multiplies one tile, the patch (and dy) of the next tile is copied.  In backprop_filter, a
// block sums a chunk of the tiles (blockIdx.x) for 16 * ROW_TILES filters (blockIdx.y) and SHARE_WORDS
// words (blockIdx.z).  WARPS_K warps divide the pixels and add their sums in order, just as
// conv_patch_reduce adds the chunks.
//
// A variant is chosen with -D: PASS (0 forward, 2 backprop-filter), STORAGE, INDEX, CHANNELS,
// X_LAST (whether a line of the patch has all channels; else one), FILTER_T, FILTER_R, FILTER_S,
// STRIDE_H, STRIDE_W, DILATION_H, DILATION_W, TILE_P, TILE_Q, LINE_PITCH, X_VECTOR (elements per
// vector of x), SHIFT (elements from an aligned address to the first window), Y_LAST (whether channels
// are contiguous in y or dy), Y_VECTOR (elements per vector of y or dy), ASYNC_COPY (8.0 and later),
// RESIDENT (resident blocks per SM), SHARED_BYTES; in the forward pass BLOCK_N (filters per block),
// ACTIVATION, ADD; in backprop-filter ROW_TILES, WARPS_N and WARPS_K (warps along words and pixels),
// WARP_WORDS (groups of 8 words per warp), SHARE_WORDS.
#include "chunks.cuh"
#include "epilogue.cuh"
#include "index.cuh"
#include "maps.cuh"
#include "numeric.cuh"
#include "multistage.cuh"
#include "vector.cuh"

using Storage = STORAGE;
using Accumulator = typename Numeric<Storage>::Accumulator;
using Word = typename Fragments<Storage>::Register;

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int PIXELS = TILE_P * TILE_Q;
constexpr int WORD = sizeof(Storage) == 2 ? 2 : 1;  // elements per word
constexpr int DEPTH = Fragments<Storage>::DEPTH;
static_assert(DEPTH == 8 * WORD, "eight words are a step of gemm_k");

// -- flattened rows ---------------------------------------------------------------------------------

constexpr int STEP = X_LAST ? CHANNELS : 1;           // elements per column of a line
constexpr int LINE_CHANNELS = X_LAST ? 1 : CHANNELS;  // lines per input row
constexpr int WINDOW_STEP = STRIDE_W * STEP;          // distance of windows in elements

// A run consists of contiguous elements of a line of the patch: all elements under the window or, with
// dilation, the elements of one column.  Runs are numbered by t, r, line and column.
constexpr bool HAS_GAPS = DILATION_W > 1;
constexpr int RUN = HAS_GAPS ? STEP : FILTER_S * STEP;
constexpr int RUNS_OF_LINE = HAS_GAPS ? FILTER_S : 1;
constexpr int RUNS = FILTER_T * FILTER_R * LINE_CHANNELS * RUNS_OF_LINE;

constexpr int CLASSES = WORD == 2 && WINDOW_STEP % 2 ? 2 : 1;

// Returns how many elements of a run's first word are before the run, for windows of the pixels of a
// class and a run that begins at column s of the filter.
__device__ constexpr int lead(int pixel_class, int s) {
  return (SHIFT + pixel_class * WINDOW_STEP + s * DILATION_W * STEP) % WORD;
}
// lead(0, s) may exceed lead(0, 0) only if RUN is odd.  The last word then has room for one more element.
constexpr int LARGEST_LEAD = CLASSES == 2 ? 1 : lead(0, 0);
constexpr int RUN_WORDS = (RUN + LARGEST_LEAD + WORD - 1) / WORD;
constexpr int WORDS = (RUNS * RUN_WORDS + 7) / 8 * 8;
constexpr int STEPS = WORDS / 8;
constexpr bool ALL_IN_WINDOW = RUN_WORDS * WORD == RUN && WORDS == RUNS * RUN_WORDS;

// -- the patch --------------------------------------------------------------------------------------

constexpr int ROWS = (TILE_P - 1) * STRIDE_H + (FILTER_R - 1) * DILATION_H + 1;
constexpr int COLUMNS = (TILE_Q - 1) * STRIDE_W + (FILTER_S - 1) * DILATION_W + 1;
constexpr int LINES = FILTER_T * ROWS * LINE_CHANNELS;
constexpr int UNIT = X_VECTOR > WORD ? X_VECTOR : WORD;
constexpr int LINE = (SHIFT + COLUMNS * STEP + UNIT - 1) / UNIT * UNIT;
constexpr int PATCH = LINES * LINE_PITCH;
static_assert(LINE_PITCH >= LINE && LINE_PITCH % UNIT == 0, "aligned lines that do not overlap");
static_assert(SHIFT < X_VECTOR && TILE_Q * WINDOW_STEP % X_VECTOR == 0, "tiles begin alike");

// Row and column of the pixel with a given number in the tile.  The second class is numbered after the
// first.  Row, column and offset in the patch are sums over the bits of the number: window_of(a + b) is
// window_of(a) + window_of(b) if a and b have no bit in common.
static_assert((TILE_P & (TILE_P - 1)) == 0 && (TILE_Q & (TILE_Q - 1)) == 0, "powers of two");
static_assert(TILE_Q >= 8 * CLASSES, "eight neighbours of a class");
constexpr int CLASS_PIXELS = PIXELS / CLASSES;
constexpr int CLASS_COLUMNS = TILE_Q / CLASSES;
__device__ constexpr int row_of(int number) { return number % CLASS_PIXELS / CLASS_COLUMNS; }
__device__ constexpr int column_of(int number) {
  return number % CLASS_COLUMNS * CLASSES + number / CLASS_PIXELS;
}
__device__ constexpr int window_of(int number) {  // elements from pixel 0's window to this pixel's window
  return row_of(number) * (STRIDE_H * LINE_CHANNELS * LINE_PITCH) + column_of(number) * WINDOW_STEP;
}

// A word of the flattened rows.
struct FlatWord {
  int t, r, s, c;  // first tap of the word's run
  int first;       // index, in the run, of the word's first element; -1 if the run begins at its second
  bool exists;

  __device__ __forceinline__ FlatWord(int pixel_class, int number) {
    const int run = number / RUN_WORDS, line = run / RUNS_OF_LINE;
    s = run % RUNS_OF_LINE;
    c = line % LINE_CHANNELS;
    r = line / LINE_CHANNELS % FILTER_R;
    t = line / LINE_CHANNELS / FILTER_R;
    first = number % RUN_WORDS * WORD - lead(pixel_class, s);
    exists = run < RUNS;
  }

  __device__ __forceinline__ bool in_window(int element) const {
    return exists && first + element >= 0 && first + element < RUN;
  }

  // Returns the tap of an element of the word.  The element must be in the window.
  __device__ __forceinline__ Tap<Index> tap(int element) const {
    const int place = first + element;
    return {c + place % STEP, t, r, s + place / STEP};
  }

  // Offset of the word from the window's first element, in elements of the patch.
  __device__ __forceinline__ int offset() const {
    return ((t * ROWS + r * DILATION_H) * LINE_CHANNELS + c) * LINE_PITCH + s * DILATION_W * STEP +
           first;
  }
};

// Place of a word in a window: its offset from the window's first element, and a mask of the word's bits
// that are in the window.  A word with no bit in the window is replaced by the previous word, which other
// lanes load as well.
struct alignas(8) WordPlace {
  int offset;
  unsigned mask;

  __device__ __forceinline__ WordPlace(int pixel_class, int number) {
    constexpr int COUNT = RUNS * RUN_WORDS;
    const FlatWord word(pixel_class, number < COUNT ? number : COUNT - 1);
    mask = word.in_window(0) ? WORD == 2 ? 0x0000ffffu : 0xffffffffu : 0;
    if (WORD == 2 && word.in_window(1)) mask |= 0xffff0000u;
    offset = word.offset() - (mask == 0 ? WORD : 0);
    if (number >= COUNT) mask = 0;
  }
};

__device__ __forceinline__ unsigned masked(unsigned word, unsigned mask) { return word & mask; }
__device__ __forceinline__ double masked(double word, unsigned mask) { return mask ? word : 0.0; }

__device__ __forceinline__ unsigned load_word(const half_t* at) {
  return *reinterpret_cast<const unsigned*>(at);
}
#if ASYNC_COPY
__device__ __forceinline__ unsigned load_word(const bfloat16_t* at) {
  return *reinterpret_cast<const unsigned*>(at);
}
__device__ __forceinline__ unsigned load_word(const float* at) { return ptx::tf32_from_f32(*at); }
__device__ __forceinline__ double load_word(const double* at) { return *at; }
#endif

// -- tiles ------------------------------------------------------------------------------------------

// The tiles of all images, numbered along rows of tiles first.
struct Tiles {
  const ConvParameters& p;
  long long of_image[3];  // tiles along Z, P, Q
  Index count;

  __device__ __forceinline__ explicit Tiles(const ConvParameters& parameters) : p(parameters) {
    of_image[0] = p.output[0];
    of_image[1] = (p.output[1] + TILE_P - 1) / TILE_P;
    of_image[2] = (p.output[2] + TILE_Q - 1) / TILE_Q;
    count = narrowed(p.batch * of_image[0] * of_image[1] * of_image[2]);
  }

  // The first output of a tile.
  __device__ __forceinline__ Pixel<Index> first(Index number) const {
    Pixel<Index> tile = pixel_at(number, of_image);
    tile.h *= TILE_P;
    tile.w *= TILE_Q;
    return tile;
  }
};

// Starts to copy the input under a tile; the copy is complete after the next wait.
__device__ __forceinline__ void copy_patch(Storage* patch, const Storage* x, const ConvParameters& p,
                                           const Pixel<Index>& tile) {
  const Index first_d = tile.d * narrowed(p.stride[0]) - narrowed(p.pad[0]);
  const Index first_h = tile.h * STRIDE_H - narrowed(p.pad[1]);
  const Index first_w = tile.w * STRIDE_W - narrowed(p.pad[2]);
  const Index width = narrowed(p.input[2]);
  constexpr int PIECES = LINE / X_VECTOR;
#pragma unroll 4
  for (int i = threadIdx.x; i < LINES * PIECES; i += THREADS) {
    const int line = i / PIECES, element = i % PIECES * X_VECTOR;
    const Index d = first_d + line / LINE_CHANNELS / ROWS * narrowed(p.dilation[0]);
    const Index h = first_h + line / LINE_CHANNELS % ROWS;
    bool inside = d >= 0 && d < narrowed(p.input[0]) && h >= 0 && h < narrowed(p.input[1]);
    Index place;  // offset from the first pixel of the input row
    if constexpr (X_VECTOR > 1) {  // the input row is contiguous
      place = first_w * STEP - SHIFT + element;
      inside = inside && place >= 0 && place < width * STEP;
    } else {
      const Index w = first_w + element / STEP;
      inside = inside && w >= 0 && w < width;
      place = inside ? w * narrowed(p.x_stride[4]) + element % STEP * narrowed(p.x_stride[1]) : 0;
    }
    const Storage* source = x;
    if (inside)  // offsets outside the tensor may overflow an Index
      source += pixel_offset(Pixel<Index>{tile.n, d, h, 0}, p.x_stride) +
                line % LINE_CHANNELS * narrowed(p.x_stride[1]) + place;
    copy_piece<X_VECTOR>(patch + line * LINE_PITCH + element, source, inside);
  }
}

extern __shared__ __align__(128) unsigned char shared_memory[];

#if PASS == 0

// -- forward ----------------------------------------------------------------------------------------

constexpr int WARP_M = PIXELS / WARPS;
static_assert(WARP_M % 16 == 0 && BLOCK_N % 16 == 0, "whole fragments only");
static_assert(CLASS_PIXELS % WARP_M == 0, "a warp's pixels are of one class");

// The tile of y before the tile is stored, with lines along the contiguous axis.
struct OutputTile {
  static constexpr int LINES = Y_LAST ? PIXELS : BLOCK_N;
  static constexpr int LINE = Y_LAST ? BLOCK_N : PIXELS;
  // Padded, so that lines start in different banks.
  static constexpr int PADDING = sizeof(Storage) == 2 ? 8 : 4;
  static constexpr int PITCH = LINE + PADDING;
  alignas(16) Storage element[LINES][PITCH];
};

// The filter in the order of B fragments: the four registers of a lane for 16 filters and one step are 16
// contiguous bytes (for float64, twice 16 bytes).
struct FilterTile {
  static constexpr int VECTOR = 16 / sizeof(Word);
  alignas(16) Word word[CLASSES][STEPS][BLOCK_N / 16][4 / VECTOR][32][VECTOR];

  __device__ __forceinline__ Word* at(int pixel_class, int number, int filter) {
    const int lane = filter % 8 * 4 + number % 4;
    const int place = filter / 8 % 2 * 2 + number / 4 % 2;  // as in load_fragments
    return &word[pixel_class][number / 8][filter / 16][place / VECTOR][lane][place % VECTOR];
  }
};

struct SharedMemory {
  FilterTile filter;
  alignas(16) Storage patch[2][PATCH];  // patches of this tile and of the next
  OutputTile output;
  WordPlace place[CLASSES][WORDS];
  Accumulator bias[BLOCK_N];
};
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "the launch asks for as much");

// Fills the filter, with zeros for missing taps and filters.  A thread fills one word of eight filters at
// a time.
__device__ __forceinline__ void load_filter(FilterTile& tile, const Storage* w,
                                            const ConvParameters& p, Index first_filter) {
  for (int i = threadIdx.x; i < CLASSES * WORDS * (BLOCK_N / 8); i += THREADS) {
    const int number = i % WORDS, pixel_class = i / WORDS % CLASSES;
    const int filter = i / WORDS / CLASSES * 8;
    const FlatWord word(pixel_class, number);
    Index offset[WORD] = {};
    bool inside[WORD];
#pragma unroll
    for (int e = 0; e < WORD; ++e) {
      inside[e] = word.in_window(e);
      if (inside[e]) offset[e] = tap_offset(word.tap(e), p.w_stride);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const Index k = first_filter + filter + j;
      alignas(8) Storage element[WORD];
#pragma unroll
      for (int e = 0; e < WORD; ++e)
        element[e] = inside[e] && k < narrowed(p.filters)
                         ? w[k * narrowed(p.w_stride[0]) + offset[e]]
                         : Storage{};
      *tile.at(pixel_class, number, filter + j) = load_word(element);
    }
  }
}

struct Sums {
  Accumulator value[WARP_M / 16][BLOCK_N / 8][4] = {};

  // Computes the products of this warp's pixels.
  __device__ __forceinline__ void multiply(const SharedMemory& shared, const Storage* patch) {
    const int first = threadIdx.x / 32 * WARP_M, lane = threadIdx.x % 32;
    const int pixel_class = first / CLASS_PIXELS;
    const Storage* windows = patch + SHIFT + window_of(first) + window_of(lane / 4);
#pragma unroll 2
    for (int step = 0; step < STEPS; ++step) {
      Word a[WARP_M / 16][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const WordPlace place = shared.place[pixel_class][step * 8 + half * 4 + lane % 4];
#pragma unroll
        for (int i = 0; i < WARP_M / 8; ++i) {
          const Word word = load_word(windows + place.offset + window_of(i * 8));
          a[i / 2][half * 2 + i % 2] = ALL_IN_WINDOW ? word : masked(word, place.mask);
        }
      }
#pragma unroll
      for (int j = 0; j < BLOCK_N / 16; ++j) {
        constexpr int VECTOR = FilterTile::VECTOR;
        Word b[4];
#pragma unroll
        for (int piece = 0; piece < 4; piece += VECTOR) {
          const auto loaded = *reinterpret_cast<const Piece<Word, VECTOR>*>(
              shared.filter.word[pixel_class][step][j][piece / VECTOR][lane]);
#pragma unroll
          for (int e = 0; e < VECTOR; ++e) b[piece + e] = loaded.element[e];
        }
#pragma unroll
        for (int i = 0; i < WARP_M / 16; ++i) {
          multiply_fragments(value[i][j * 2], a[i], b[0], b[1], Storage{});
          multiply_fragments(value[i][j * 2 + 1], a[i], b[2], b[3], Storage{});
        }
      }
    }
  }

  // Writes the results to the tile of y: sum plus bias, with ADD plus the addend that the tile contains,
  // then the activation.
  __device__ __forceinline__ void finish(SharedMemory& shared) const {
    const int first = threadIdx.x / 32 * WARP_M, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < WARP_M / 8; ++i) {
      const int number = first + i * 8 + lane / 4;
      const int pixel = row_of(number) * TILE_Q + column_of(number);
#pragma unroll
      for (int j = 0; j < BLOCK_N / 8; ++j) {
        const int filter = j * 8 + lane % 4 * 2;
        Storage* const element =
            Y_LAST ? &shared.output.element[pixel][filter] : &shared.output.element[filter][pixel];
        constexpr int NEXT = Y_LAST ? 1 : OutputTile::PITCH;  // distance of the next filter
        Accumulator two[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          two[e] = value[i / 2][j][i % 2 * 2 + e] + shared.bias[filter + e];
          if (ADD) two[e] += Numeric<Storage>::widen(element[e * NEXT]);
          two[e] = activate<ACTIVATION>(two[e]);
        }
        if constexpr (Y_LAST) {
          store_piece<2>(element, two);
        } else {
          element[0] = Numeric<Storage>::narrow(two[0]);
          element[NEXT] = Numeric<Storage>::narrow(two[1]);
        }
      }
    }
  }
};

// Calls use(element, offset, exists) for each vector of a tile of y, for BLOCK_N filters: element is its
// first element in shared memory, offset its place in y, and exists whether it is inside y.
using OutputPiece = Piece<Storage, Y_VECTOR>;
template <class Use>
__device__ __forceinline__ void for_each_piece(OutputTile& output, const ConvParameters& p,
                                               const Pixel<Index>& tile, Index first_filter,
                                               Use use) {
  constexpr int PIECES = OutputTile::LINE / Y_VECTOR;
  const Index rows = narrowed(p.output[1]) - tile.h, columns = narrowed(p.output[2]) - tile.w;
  const Index filters = narrowed(p.filters) - first_filter;
  const Index first = pixel_offset(tile, p.y_stride) + first_filter * narrowed(p.y_stride[1]);
  for (int i = threadIdx.x; i < OutputTile::LINES * PIECES; i += THREADS) {
    const int line = i / PIECES, place = i % PIECES * Y_VECTOR;
    const int pixel = Y_LAST ? line : place, filter = Y_LAST ? place : line;
    const int row = pixel / TILE_Q, column = pixel % TILE_Q;
    const bool exists = filter < filters && row < rows && column < columns;
    // Offsets outside y could overflow.
    const Index offset = exists ? first + row * narrowed(p.y_stride[3]) +
                                      column * narrowed(p.y_stride[4]) +
                                      filter * narrowed(p.y_stride[1])
                                : 0;
    use(reinterpret_cast<OutputPiece*>(&output.element[line][place]), offset, exists);
  }
}

// bias may be null; the addend is read with ADD only.  blockIdx.y selects the block of filters.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    conv_patch(const Storage* __restrict__ x, const Storage* __restrict__ w,
               const Storage* __restrict__ bias, const Storage* addend, Storage* y,
               const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  const Tiles tiles(p);
  const Index first_filter = static_cast<Index>(blockIdx.y) * BLOCK_N;

  Index number = static_cast<Index>(blockIdx.x);
  Pixel<Index> tile = tiles.first(number);
  copy_patch(shared.patch[0], x, p, tile);
  commit_copies();
  load_filter(shared.filter, w, p, first_filter);
  for (int i = threadIdx.x; i < CLASSES * WORDS; i += THREADS)
    shared.place[i / WORDS][i % WORDS] = WordPlace(i / WORDS, i % WORDS);
  for (int i = threadIdx.x; i < BLOCK_N; i += THREADS) {
    const Index k = first_filter + i;
    shared.bias[i] = bias != nullptr && k < narrowed(p.filters)
                         ? Numeric<Storage>::widen(bias[k * narrowed(p.bias_stride)])
                         : Accumulator(0);
  }

#pragma unroll 1
  for (int parity = 0; number < tiles.count; parity ^= 1) {
    number += static_cast<Index>(gridDim.x);
    const Pixel<Index> next = tiles.first(number);
    wait_for_copies<0>();
    __syncthreads();  // patch and filter are complete; the previous patch and tile are no longer read
    if (number < tiles.count) copy_patch(shared.patch[parity ^ 1], x, p, next);
    commit_copies();
    if (ADD)
      for_each_piece(shared.output, p, tile, first_filter,
                     [&](OutputPiece* element, Index offset, bool exists) {
                       *element = OutputPiece{};
                       if (exists) *element = *reinterpret_cast<const OutputPiece*>(addend + offset);
                     });
    Sums sums;
    sums.multiply(shared, shared.patch[parity]);
    if (ADD) __syncthreads();  // the tile contains the addend
    sums.finish(shared);
    __syncthreads();  // the tile of y is complete
    for_each_piece(shared.output, p, tile, first_filter,
                   [&](const OutputPiece* element, Index offset, bool exists) {
                     if (exists) *reinterpret_cast<OutputPiece*>(y + offset) = *element;
                   });
    tile = next;
  }
}

#else

// -- backprop-filter --------------------------------------------------------------------------------

constexpr int BLOCK_M = 16 * ROW_TILES;
constexpr int WARP_PIXELS = PIXELS / WARPS_K;
static_assert(WARPS_N * WARPS_K == WARPS, "a warp for each part");
// The odd class may have a tap in the word after the tap's word in the even class.
static_assert(CLASSES == 1 || SHARE_WORDS % RUN_WORDS == 0, "whole runs: taps are of one share");
static_assert(SHARE_WORDS <= WARPS_N * WARP_WORDS * 8, "a share fits a block");
static_assert(WARP_PIXELS % DEPTH == 0, "whole fragments only");
static_assert(CLASS_PIXELS % WARP_PIXELS == 0, "a warp's pixels are of one class");

// dy of a tile.  Pixels are indexed by their position in the tile; lines run along the contiguous axis.
using GradientTile = StageTile<Storage, Y_LAST ? PIXELS : BLOCK_M, Y_LAST ? BLOCK_M : PIXELS, !Y_LAST>;

struct Stage {
  GradientTile dy;
  alignas(16) Storage patch[PATCH];
};

// After the last tile, the warps that divide the pixels add their sums here: one sum per filter and per
// element of the words that the block reads of a patch.  A tap may be in different words for pixels of
// the two classes.
struct Exchange {
  static constexpr int PLACES = SHARE_WORDS * WORD + WORD - 1;
  // Padded, so that four words of eight filters are in different banks.
  static constexpr int PITCH = BLOCK_M + 4 / WORD;
  Accumulator sum[WARPS_K > 1 ? PLACES : 1][PITCH];

  // Returns the index in `sum` of an element of a word; s is the filter column at which the word's run
  // begins.
  static __device__ __forceinline__ int place(int pixel_class, int number, int s, int element) {
    return number * WORD + element + WORD - 1 - lead(pixel_class, s);
  }
};

union SharedMemory {
  Stage stages[2];  // stages of this tile and of the next
  Exchange exchange;
};
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "the launch asks for as much");

// Copies dy of a tile, with zeros for missing pixels and filters.
__device__ __forceinline__ void copy_gradient(GradientTile& gradient, const Storage* dy,
                                              const ConvParameters& p, const Pixel<Index>& tile,
                                              Index first_filter) {
  constexpr int PIECES = GradientTile::LINE / Y_VECTOR;
  const Index rows = narrowed(p.output[1]) - tile.h, columns = narrowed(p.output[2]) - tile.w;
  const Index filters = narrowed(p.filters) - first_filter;
  dy += pixel_offset(tile, p.y_stride) + first_filter * narrowed(p.y_stride[1]);
#pragma unroll 4
  for (int i = threadIdx.x; i < GradientTile::LINES * PIECES; i += THREADS) {
    const int line = i / PIECES, place = i % PIECES * Y_VECTOR;
    // Contiguous elements are loaded together, for pixels of both classes.
    const int row = Y_LAST ? row_of(line) : place / TILE_Q;
    const int column = Y_LAST ? column_of(line) : place % TILE_Q;
    const int filter = Y_LAST ? place : line;
    const bool inside = filter < filters && row < rows && column < columns;
    const Storage* source = dy;
    if (inside)
      source += row * narrowed(p.y_stride[3]) + column * narrowed(p.y_stride[4]) +
                filter * narrowed(p.y_stride[1]);
    if constexpr (Y_LAST || CLASSES == 1) {
      copy_piece<Y_VECTOR>(gradient.at(line, place), source, inside);
    } else {
      Piece<Storage, Y_VECTOR> piece = {};
      if (inside) piece = *reinterpret_cast<const Piece<Storage, Y_VECTOR>*>(source);
#pragma unroll
      for (int e = 0; e < Y_VECTOR; ++e) {
        const int number =
            (column + e) % 2 * CLASS_PIXELS + row * CLASS_COLUMNS + (column + e) / 2;
        *gradient.at(line, number) = piece.element[e];
      }
    }
  }
}

// Computes the registers of B for the columns of a word, with pixels in the order of the fragment.
__device__ __forceinline__ void exchange(unsigned (&b)[2][2], const unsigned (&word)[4],
                                         const unsigned (&mask)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    b[0][half] = __byte_perm(word[2 * half], word[2 * half + 1], 0x5410) & mask[half];
    b[1][half] = __byte_perm(word[2 * half], word[2 * half + 1], 0x7632) & mask[half];
  }
}
template <class Wide>
__device__ __forceinline__ void exchange(Wide (&b)[1][2], const Wide (&word)[2],
                                         const unsigned (&mask)[2]) {
  b[0][0] = masked(word[0], mask[0]);
  b[0][1] = masked(word[1], mask[1]);
}

struct Sums {
  Accumulator value[ROW_TILES][WARP_WORDS][WORD][4] = {};
  int share, first_word, first_pixel, pixel_class;  // of this warp; first_word is relative to the share
  int offset[WARP_WORDS];                           // offsets of this lane's words, for its first pixel

  __device__ __forceinline__ explicit Sums(int first_word_of_share) : share(first_word_of_share) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    first_word = warp % WARPS_N * WARP_WORDS * 8;
    first_pixel = warp / WARPS_N * WARP_PIXELS;
    pixel_class = first_pixel / CLASS_PIXELS;
#pragma unroll
    for (int j = 0; j < WARP_WORDS; ++j)
      offset[j] = SHIFT + window_of(first_pixel) + window_of(lane % 4 * WORD) +
                  WordPlace(pixel_class, share + first_word + j * 8 + lane / 4).offset;
  }

  // Adds the products of this warp's pixels.  `rows` and `columns` are the extents of the existing part of
  // the tile.
  __device__ __forceinline__ void multiply(Stage& stage, Index rows, Index columns) {
    // Existing rows and columns, counted from this lane's first pixel.
    const int own = first_pixel + threadIdx.x % 4 * WORD;
    rows -= row_of(own);
    columns -= column_of(own);
#pragma unroll
    for (int step = 0; step < WARP_PIXELS; step += DEPTH) {
      // A lane's pixels of a fragment: WORD adjacent pixels, and WORD pixels half a step further.
      constexpr int COUNT = 2 * WORD;
      unsigned mask[2] = {};
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const int further = step + i / WORD * (DEPTH / 2) + i % WORD;
        if (row_of(further) < rows && column_of(further) < columns)
          mask[i / WORD] |= WORD == 1 ? 0xffffffffu : 0xffffu << 16 * (i % WORD);
      }
      Word a[ROW_TILES][4];
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i)
        load_fragments<true>(a[i], stage.dy, i * 16, first_pixel + step);
#pragma unroll
      for (int j = 0; j < WARP_WORDS; ++j) {
        Word word[COUNT], b[WORD][2];
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
          word[i] = load_word(stage.patch + offset[j] +
                              window_of(step + i / WORD * (DEPTH / 2) + i % WORD));
        exchange(b, word, mask);
#pragma unroll
        for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
          for (int e = 0; e < WORD; ++e)
            multiply_fragments(value[i][j][e], a[i], b[e][0], b[e][1], Storage{});
      }
    }
  }

  // Adds the sums of this warp, whose turn it is, to the sums of the previous turns; the last turn writes
  // the totals to the chunk's workspace.
  __device__ __forceinline__ void add(Exchange& exchange, int turn, Accumulator* partial,
                                      const ConvParameters& p, Index first_filter) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < WARP_WORDS; ++j)
#pragma unroll
      for (int e = 0; e < WORD; ++e)
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int number = first_word + j * 8 + lane % 4 * 2 + side;
          const FlatWord word(pixel_class, share + number);
          if (number >= SHARE_WORDS || !word.in_window(e)) continue;
          Accumulator sum[2 * ROW_TILES];
#pragma unroll
          for (int i = 0; i < 2 * ROW_TILES; ++i) sum[i] = value[i / 2][j][e][i % 2 * 2 + side];
          if constexpr (WARPS_K > 1) {
            auto& given = exchange.sum[Exchange::place(pixel_class, number, word.s, e)];
            if (turn > 0)
#pragma unroll
              for (int i = 0; i < 2 * ROW_TILES; ++i) sum[i] = given[i * 8 + lane / 4] + sum[i];
            if (turn + 1 < WARPS_K) {
#pragma unroll
              for (int i = 0; i < 2 * ROW_TILES; ++i) given[i * 8 + lane / 4] = sum[i];
              continue;
            }
          }
          const Tap<Index> tap = word.tap(e);
          Accumulator* filters =
              partial + (((tap.t * FILTER_R + tap.r) * FILTER_S + tap.s) * CHANNELS + tap.c) *
                            static_cast<long long>(p.filters);
#pragma unroll
          for (int i = 0; i < 2 * ROW_TILES; ++i) {
            const Index filter = first_filter + i * 8 + lane / 4;
            if (filter < narrowed(p.filters)) filters[filter] = sum[i];
          }
        }
  }
};

// A block sums a chunk of the tiles (blockIdx.x) for its filters (blockIdx.y) and words (blockIdx.z) into
// the workspace `partial`, which is indexed (chunk, t, r, s, c, k).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    conv_patch(const Storage* __restrict__ x, const Storage* __restrict__ dy,
               Accumulator* __restrict__ partial, const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  const Tiles tiles(p);
  const Index first_filter = static_cast<Index>(blockIdx.y) * BLOCK_M;

  // The tiles of this chunk.
  const Index share = (tiles.count + gridDim.x - 1) / static_cast<Index>(gridDim.x);
  const Index begin = static_cast<Index>(blockIdx.x) * share;
  const Index rest = tiles.count - begin;
  const Index count = rest < 0 ? 0 : rest < share ? rest : share;
  auto copy = [&](Index number, const Pixel<Index>& tile) {
    Stage& stage = shared.stages[number % 2];
    copy_patch(stage.patch, x, p, tile);
    copy_gradient(stage.dy, dy, p, tile, first_filter);
  };

  Sums sums(static_cast<int>(blockIdx.z) * SHARE_WORDS);
  Pixel<Index> tile = tiles.first(begin);
  if (count > 0) copy(0, tile);
  commit_copies();
#pragma unroll 1
  for (Index number = 0; number < count; ++number) {
    wait_for_copies<0>();
    __syncthreads();  // this stage is complete; the other stage is no longer read
    const Pixel<Index> next = tiles.first(begin + number + 1);
    if (number + 1 < count) copy(number + 1, next);
    commit_copies();
    sums.multiply(shared.stages[number % 2], narrowed(p.output[1]) - tile.h,
                  narrowed(p.output[2]) - tile.w);
    tile = next;
  }

  partial += static_cast<long long>(blockIdx.x) * (FILTER_T * FILTER_R * FILTER_S * CHANNELS) *
             p.filters;
#pragma unroll 1
  for (int turn = 0; turn < WARPS_K; ++turn) {
    __syncthreads();  // the stages are no longer read; the sums of the previous turn are written
    if (static_cast<int>(threadIdx.x) / 32 / WARPS_N == turn)
      sums.add(shared.exchange, turn, partial, p, first_filter);
  }
}

extern "C" __global__ void __launch_bounds__(ADDING_THREADS, 1)
    conv_patch_reduce(const Accumulator* __restrict__ partial, Storage* __restrict__ dw,
                      const int chunks, const __grid_constant__ ConvParameters p) {
  add_chunks<true, Index>(partial, dw, chunks, p);
}

#endif
