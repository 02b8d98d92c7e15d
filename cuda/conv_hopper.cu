// Hopper: the three passes as implicit GEMMs on wgmma, fed by TMA, for channels-last tensors (or, by
// conv_arrange.cu, copies of others) on compute capability 9.0.
//
//   pass             gemm_m          gemm_n            gemm_k             A               B
//   forward          output pixels   filters           taps * channels    im2col(x)       w
//   backprop_input   input pixels    channels          taps * filters     im2col(dy)      w
//   backprop_filter  filters         taps * channels   output pixels      dy              im2col(x)
//
// backprop_filter changes A and B where filters are the last axis of w (FILTERS_LAST), so that C is
// always contiguous along n.  The im2col matrix exists only in shared memory: a TMA load in im2col
// mode brings BLOCK_M pixels of LINE channels under one tap, zeros where the window hangs over.
//
// What it adds over conv_gather.cu: products of a whole warpgroup that read both operands from
// shared memory; loads that one thread issues, with no address arithmetic in the threads that
// multiply; and blocks that stay and compute one tile after the other, so that the first loads of a
// tile and the stores of the one before run under products.
//
//   producer     one thread: waits until a stage is empty, says how many bytes it expects, and
//                starts the loads of both operands; the stage becomes full when the bytes have come
//   consumers    two warpgroups, each with half of the tile's rows: wait until a stage is full,
//                multiply, give the stage back
//
// A block needs BLOCK_M = 128 or 256 rows (one or two products of 64 rows for each warpgroup) and
// its sums stay in registers, which the producer's warpgroup gives up for them (setmaxnreg).  With
// CLUSTER = 2, two blocks have tiles below each other and share B: each loads half of it for both.
// Tiles are taken in bands of BAND rows, so that blocks that run together share operands in L2.
//
// With SPLIT, gemm_k is shared out; each split writes float sums to a workspace, which
// conv_hopper_reduce adds in order.  Which block computes which tile never changes any bit.
//
// Operands are 16-bit types, or float as TF32, which wgmma takes only with lines along k: the
// forward pass with channels last in w, and backprop_input with filters last.  With PLANES = 3,
// they are float32 tensors that conv_planes.cu has split into three bfloat16 planes each, high to
// low; a product is then the six of planes whose product reaches 24 bits, and sums leave the tensor
// core's accumulator, which drops bits, for float registers every PROMOTION steps.
//
// A variant is chosen with -D: PASS (0, 1, 2 as in the table), STORAGE (of operands), RESULT (of C
// and the bias), PLANES, BLOCK_M, BLOCK_N, STAGES, CLUSTER, SPATIAL (axes), PHASES (stride phases of
// backprop_input, else 1), POINTWISE (1 x 1 and stride 1: x is a plain matrix), FILTERS_LAST (of w),
// STORE (how C is stored, below), SPLIT, ACTIVATION (epilogue.cuh; of the forward pass).
#include "epilogue.cuh"
#include "maps.cuh"
#include "numeric.cuh"
#include "vector.cuh"
#include "walk.cuh"

using Storage = STORAGE;
using Result = RESULT;

// How C is stored: 16-bit types through shared memory, by threads in pieces of rows or, where C is a
// plain matrix, in boxes by TMA; float from registers.
#define STORE_ROWS 0
#define STORE_BOXES 1
#define STORE_FLOAT 2

constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int CONSUMER_ROWS = BLOCK_M / CONSUMERS;
constexpr int PRODUCTS = CONSUMER_ROWS / 64;
constexpr int BAND = 8;

// Elements of one line of a tile in shared memory, 128 bytes: what the swizzle spans, and as many as
// a TMA box or a step along k takes at once.
constexpr int LINE = 128 / sizeof(Storage);
constexpr int BLOCK_K = LINE;
constexpr int BOX = LINE * LINE;
static_assert(BLOCK_M % 128 == 0 && BLOCK_N % 64 == 0, "whole products, and whole boxes of them");

// Whether an operand's lines run along m or n, not along k.
constexpr bool A_LINES_ALONG_M = PASS == 2;
constexpr bool B_LINES_ALONG_N = PASS == 2 || (PASS == 0) == (FILTERS_LAST != 0);
static_assert(CLUSTER == 1 || !B_LINES_ALONG_N || BLOCK_N % 128 == 0, "B is loaded in two halves");
static_assert(sizeof(Storage) == 2 || !B_LINES_ALONG_N, "TF32 operands have lines along k");

// The planes of A and B that are multiplied, the smallest products first.
constexpr int TERMS = PLANES == 1 ? 1 : 6;
struct Term {
  int a, b;
};
__device__ __forceinline__ Term term_at(int number) {
  constexpr unsigned A = 0x010120, B = 0x001102;  // a digit for each term, the last one leftmost
  return {static_cast<int>(A >> number * 4 & 3) * (TERMS > 1),
          static_cast<int>(B >> number * 4 & 3) * (TERMS > 1)};
}
constexpr int PROMOTION = 2;  // steps of all terms

struct alignas(1024) Stage {
  Storage a[BLOCK_M * BLOCK_K];
  Storage b[BLOCK_N * BLOCK_K];
};

struct SharedMemory {
  Stage stages[STAGES];
  alignas(1024) Result output[CONSUMERS][2][64 * 64 * 2 / sizeof(Result)];  // C on its way out
  unsigned long long full[STAGES], empty[STAGES];
};

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Tensor maps: what is gathered under taps (for each phase), the other operand, and C.
struct TensorMaps {
  ptx::TensorMap gathered[PHASES];
  ptx::TensorMap other;
  ptx::TensorMap c;
};

__device__ __forceinline__ int lines(long long extent) {
  return static_cast<int>((extent + LINE - 1) / LINE);
}

// -- the shape of C ---------------------------------------------------------------------------------

// In backprop_filter the taps * channels side of C is cut into windows: LINE channels under a tap.
struct Windows {
  int channel_blocks, count;

  __device__ __forceinline__ explicit Windows(const ConvParameters& p)
      : channel_blocks(lines(p.channels)),
        count(channel_blocks * static_cast<int>(p.filter[0] * p.filter[1] * p.filter[2])) {}

  // The tap and first channel of a window; beyond the last window, a channel that does not exist.
  __device__ __forceinline__ Tap<int> at(int window, const ConvParameters& p) const {
    if (window >= count) return {static_cast<int>(p.channels), 0, 0, 0};
    Tap<int> tap = tap_at(window, channel_blocks, p.filter);
    tap.c *= LINE;
    return tap;
  }
};

// Where the elements of C lie.  An element's offset is that of its row plus that of its column;
// columns are contiguous in runs of 16 bytes.  A negative offset: beyond the end.
struct Output {
  static constexpr long long BEYOND = -1;
  const ConvParameters& p;
  const Walk<PHASES>& walk;
  int group;

  __device__ __forceinline__ int rows(int phase) const {
    if constexpr (PASS == 2)
      return FILTERS_LAST ? Windows(p).count * LINE : static_cast<int>(p.filters);
    const int(&pixels)[3] = walk.phase[phase].pixels;
    return static_cast<int>(p.batch) * pixels[0] * pixels[1] * pixels[2];
  }
  __device__ __forceinline__ int columns() const {
    if constexpr (PASS == 1) return static_cast<int>(p.channels);
    if constexpr (PASS == 2 && !FILTERS_LAST) return Windows(p).count * LINE;
    return static_cast<int>(p.filters);
  }

  __device__ __forceinline__ long long row_offset(int row, int phase) const {
    if (row >= rows(phase)) return BEYOND;
    if constexpr (PASS == 2) return FILTERS_LAST ? window_offset(row) : filter_offset(row);
    const Pixel<int> at = place(row, phase);
    const Pixel<long long> pixel = {at.n, at.d, at.h, at.w};
    return PASS == 0 ? pixel_offset(pixel, p.y_stride) + group * p.filters
                     : pixel_offset(pixel, p.x_stride) + group * p.channels;
  }
  __device__ __forceinline__ long long column_offset(int column) const {
    if (column >= columns()) return BEYOND;
    if constexpr (PASS == 2) return FILTERS_LAST ? filter_offset(column) : window_offset(column);
    return column;
  }

 private:
  // The pixel of the tensor written that a row of C stands for.
  __device__ __forceinline__ Pixel<int> place(int row, int phase) const {
    const WalkPhase& here = walk.phase[phase];
    const long long sizes[3] = {here.pixels[0], here.pixels[1], here.pixels[2]};
    Pixel<int> pixel = pixel_at(row, sizes);
    pixel.d = here.place_first[0] + pixel.d * walk.place_step[0];
    pixel.h = here.place_first[1] + pixel.h * walk.place_step[1];
    pixel.w = here.place_first[2] + pixel.w * walk.place_step[2];
    return pixel;
  }
  __device__ __forceinline__ long long filter_offset(int filter) const {
    return (group * p.filters + filter) * p.w_stride[0];
  }
  __device__ __forceinline__ long long window_offset(int position) const {
    const Tap<int> window = Windows(p).at(position / LINE, p);
    const Tap<long long> tap = {window.c + position % LINE, window.t, window.r, window.s};
    return tap.c < p.channels ? tap_offset(tap, p.w_stride) : BEYOND;
  }
};

// -- which tile -------------------------------------------------------------------------------------

// Tiles are numbered by split, group, phase and band of BAND tile rows; within a band, downwards
// first.  With clusters, a tile row is one of pairs, of which this block has its own half.
struct Tile {
  int split, group, phase, row, column;  // row and column of the tile's first element in C

  __device__ __forceinline__ Tile(int number, int rank, const ConvParameters& p,
                                  const Walk<PHASES>& walk) {
    group = number / walk.tiles_of_group;
    number -= group * walk.tiles_of_group;
    split = group / static_cast<int>(p.groups);
    group -= split * static_cast<int>(p.groups);
    for (phase = 0; phase + 1 < PHASES; ++phase) {
      const int here = walk.phase[phase].tile_rows * walk.tile_columns;
      if (number < here) break;
      number -= here;
    }
    const int band = number / (BAND * walk.tile_columns);
    number -= band * BAND * walk.tile_columns;
    const int rest = walk.phase[phase].tile_rows - band * BAND;
    const int height = rest < BAND ? rest : BAND;
    row = ((band * BAND + number % height) * CLUSTER + rank) * BLOCK_M;
    column = number / height * BLOCK_N;
  }
};

// A block's place in the grid: clusters take tiles in turn.
struct Schedule {
  int rank, first, step;

  __device__ __forceinline__ Schedule() : rank(0) {
#if CLUSTER > 1
    rank = static_cast<int>(ptx::cluster_block_rank());
#endif
    first = static_cast<int>(blockIdx.x) / CLUSTER;
    step = static_cast<int>(gridDim.x) / CLUSTER;
  }
};

// The steps of BLOCK_K of a tile.
struct Steps {
  int first, count;

  __device__ __forceinline__ Steps(const Tile& tile, const ConvParameters& p,
                                   const Walk<PHASES>& walk) {
    const WalkPhase& here = walk.phase[tile.phase];
    const int pixels = here.pixels[0] * here.pixels[1] * here.pixels[2];
    const int taps = here.taps[0] * here.taps[1] * here.taps[2];
    const int all = PASS == 2 ? lines(p.batch * pixels)
                              : taps * lines(PASS == 0 ? p.channels : p.filters);
    first = tile.split * walk.steps_of_split;
    const int rest = all - first;
    count = rest < 0 ? 0 : rest < walk.steps_of_split ? rest : walk.steps_of_split;
  }
};

// -- the ring of stages -----------------------------------------------------------------------------

__device__ __forceinline__ void wait_for(unsigned long long* barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// A position in the ring, and the parity of the barriers' phase there.
struct Cursor {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < STAGES) return;
    stage = 0;
    parity ^= 1;
  }
};

// -- producer ---------------------------------------------------------------------------------------

// Starts all loads.  Used by one thread.
struct Producer {
  static constexpr unsigned short BOTH_BLOCKS = 3;
  SharedMemory& shared;
  const TensorMaps& maps;
  const ConvParameters& p;
  const Walk<PHASES>& walk;
  int rank;
  Cursor cursor;
  unsigned long long* full;  // of the stage being loaded

  __device__ __forceinline__ Stage& acquire() {
    wait_for(&shared.empty[cursor.stage], cursor.parity ^ 1);
    full = &shared.full[cursor.stage];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(Stage));
    return shared.stages[cursor.stage];
  }

#if PASS == 2
  // A product over pixels: LINE of them in a step, of LINE channels or filters in each box.
  __device__ __forceinline__ void load(const Tile& tile, const Steps& steps) {
    constexpr int A_BOXES = BLOCK_M / LINE, B_BOXES = BLOCK_N / LINE;
    constexpr int WINDOWS = FILTERS_LAST ? A_BOXES : B_BOXES;
    constexpr int FILTER_BOXES = FILTERS_LAST ? B_BOXES : A_BOXES;
    const int first_window = (FILTERS_LAST ? tile.row : tile.column) / LINE;
    const int first_filter = (FILTERS_LAST ? tile.column : tile.row) +
                             tile.group * static_cast<int>(p.filters);
    Tap<int> window[WINDOWS];
#pragma unroll
    for (int i = 0; i < WINDOWS; ++i) {
      window[i] = Windows(p).at(first_window + i, p);
      const bool exists = window[i].c < static_cast<int>(p.channels);
      window[i].c = exists ? tile.group * static_cast<int>(p.channels) + window[i].c
                           : static_cast<int>(p.groups * p.channels);
    }
#pragma unroll 1
    for (int step = steps.first; step < steps.first + steps.count; ++step) {
      const int pixel = step * BLOCK_K;
      const Pixel<int> base = base_pixel(pixel, 0);
#pragma unroll 1
      for (int number = 0; number < TERMS; ++number) {
        const Term term = term_at(number);
        Stage& stage = acquire();
        for_boxes<WINDOWS, !FILTERS_LAST>([&](int i, bool to_both) {
          load_gathered((FILTERS_LAST ? stage.a : stage.b) + i * BOX, 0, window[i], base, pixel,
                        FILTERS_LAST ? term.a : term.b, to_both);
        });
        for_boxes<FILTER_BOXES, FILTERS_LAST>([&](int i, bool to_both) {
          load_matrix((FILTERS_LAST ? stage.b : stage.a) + i * BOX, maps.other,
                      first_filter + i * LINE, pixel, FILTERS_LAST ? term.b : term.a, to_both);
        });
        cursor.advance();
      }
    }
  }
#else
  // A product over taps and, fastest, the channels (or filters) under each.
  __device__ __forceinline__ void load(const Tile& tile, const Steps& steps) {
    const WalkPhase& here = walk.phase[tile.phase];
    const int depth = static_cast<int>(PASS == 0 ? p.channels : p.filters);
    const Pixel<int> base = base_pixel(tile.row, tile.phase);
    const long long taps[3] = {here.taps[0], here.taps[1], here.taps[2]};
    if (steps.count == 0) return;  // a phase without taps
    Tap<int> tap = tap_at(steps.first, lines(depth), taps);
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      const int k = tap.c * BLOCK_K;
      const Tap<int> channels = {tile.group * depth + k, tap.t, tap.r, tap.s};
#pragma unroll 1
      for (int number = 0; number < TERMS; ++number) {
        const Term term = term_at(number);
        Stage& stage = acquire();
        load_gathered(stage.a, tile.phase, channels, base, tile.row, term.a, false);
        load_filter(stage.b, tile, k, filter_tap(here, tap), term.b);
        cursor.advance();
      }
      next(tap, here, lines(depth));
    }
  }

  __device__ __forceinline__ static void next(Tap<int>& tap, const WalkPhase& here, int blocks) {
    if (++tap.c < blocks) return;
    tap.c = 0;
    if (++tap.s < here.taps[2]) return;
    tap.s = 0;
    if (++tap.r < here.taps[1]) return;
    tap.r = 0;
    ++tap.t;
  }

  // The number in the filter of a tap of the phase.
  __device__ __forceinline__ int filter_tap(const WalkPhase& here, const Tap<int>& tap) const {
    const int t = here.filter_first[0] + tap.t * walk.filter_step[0];
    const int r = here.filter_first[1] + tap.r * walk.filter_step[1];
    const int s = here.filter_first[2] + tap.s * walk.filter_step[2];
    return (t * static_cast<int>(p.filter[1]) + r) * static_cast<int>(p.filter[2]) + s;
  }

  // BLOCK_N by BLOCK_K of w under one tap.
  __device__ __forceinline__ void load_filter(Storage* b, const Tile& tile, int k, int tap,
                                              int plane) {
    const int first_filter = tile.group * static_cast<int>(p.filters);
    if constexpr (PASS == 1) k += first_filter;
    const int n = tile.column + (PASS == 0 ? first_filter : 0);
    if constexpr (B_LINES_ALONG_N) {
      for_boxes<BLOCK_N / LINE, true>([&](int i, bool to_both) {
        load_box_of_filter(b + i * BOX, n + i * LINE, k, tap, plane, to_both);
      });
    } else {
      constexpr int SHARE = BLOCK_N / CLUSTER;
      load_box_of_filter(b + rank * SHARE * BLOCK_K, k, n + rank * SHARE, tap, plane, CLUSTER > 1);
    }
  }
  // The map's dimensions are w's in memory order, (filter, channel, tap) or (channel, tap, filter),
  // and planes.
  __device__ __forceinline__ void load_box_of_filter(Storage* to, int inner, int outer, int tap,
                                                     int plane, bool to_both) {
    const int second = FILTERS_LAST ? outer : tap, third = FILTERS_LAST ? tap : outer;
    if (to_both)
      ptx::tma_load_4d_multicast(to, &maps.other, full, inner, second, third, plane, BOTH_BLOCKS);
    else
      ptx::tma_load_4d(to, &maps.other, full, inner, second, third, plane);
  }
#endif

 private:
  // Calls use(box, to_both) for the boxes this block loads: of B in a cluster, half, for both.
  template <int BOXES, bool IS_B, class Use>
  __device__ __forceinline__ void for_boxes(Use use) {
    constexpr bool SHARED = IS_B && CLUSTER > 1;
    constexpr int SHARE = SHARED ? BOXES / CLUSTER : BOXES;
#pragma unroll
    for (int i = 0; i < BOXES; ++i)
      if (!SHARED || i / SHARE == rank) use(i, SHARED);
  }

  // The base pixel of a row of the im2col matrix.
  __device__ __forceinline__ Pixel<int> base_pixel(int number, int phase) const {
    const WalkPhase& here = walk.phase[phase];
    const long long sizes[3] = {here.pixels[0], here.pixels[1], here.pixels[2]};
    Pixel<int> pixel = pixel_at(number, sizes);
    pixel.d = here.base[0] + pixel.d * walk.stride[0];
    pixel.h = here.base[1] + pixel.h * walk.stride[1];
    pixel.w = here.base[2] + pixel.w * walk.stride[2];
    return pixel;
  }

  // Pixels from a number on, LINE channels of each, of a tensor that is a plain matrix.
  __device__ __forceinline__ void load_matrix(Storage* to, const ptx::TensorMap& map, int channel,
                                              int pixel, int plane, bool to_both) {
    if (to_both)
      ptx::tma_load_3d_multicast(to, &map, full, channel, pixel, plane, BOTH_BLOCKS);
    else
      ptx::tma_load_3d(to, &map, full, channel, pixel, plane);
  }

  // A column of pixels, LINE channels of each from tap.c on, under a tap of the walk.  In im2col
  // mode, planes are further images.
  __device__ __forceinline__ void load_gathered(Storage* to, int phase, const Tap<int>& tap,
                                                const Pixel<int>& base, int number, int plane,
                                                bool to_both) {
    const ptx::TensorMap* map = &maps.gathered[phase];
#if POINTWISE
    load_matrix(to, *map, tap.c, number, plane, to_both);
#else
    const int image = base.n + plane * static_cast<int>(p.batch);
    const auto off_w = static_cast<unsigned short>(tap.s * walk.spacing[2]);
#if SPATIAL == 1
    if (to_both)
      ptx::tma_load_im2col_3d_multicast(to, map, full, tap.c, base.w, image, off_w, BOTH_BLOCKS);
    else
      ptx::tma_load_im2col_3d(to, map, full, tap.c, base.w, image, off_w);
#else
    const auto off_h = static_cast<unsigned short>(tap.r * walk.spacing[1]);
#if SPATIAL == 2
    if (to_both)
      ptx::tma_load_im2col_4d_multicast(to, map, full, tap.c, base.w, base.h, image, off_w, off_h,
                                        BOTH_BLOCKS);
    else
      ptx::tma_load_im2col_4d(to, map, full, tap.c, base.w, base.h, image, off_w, off_h);
#else
    const auto off_d = static_cast<unsigned short>(tap.t * walk.spacing[0]);
    if (to_both)
      ptx::tma_load_im2col_5d_multicast(to, map, full, tap.c, base.w, base.h, base.d, image, off_w,
                                        off_h, off_d, BOTH_BLOCKS);
    else
      ptx::tma_load_im2col_5d(to, map, full, tap.c, base.w, base.h, base.d, image, off_w, off_h,
                              off_d);
#endif
#endif
#endif
  }
};

// -- consumers --------------------------------------------------------------------------------------

// Describes 64 (or, of B, BLOCK_N) positions of an operand to wgmma, and a quarter of a step along k.
template <bool LINES_ALONG_POSITIONS>
__device__ __forceinline__ unsigned long long describe(const Storage* tile, int position, int k) {
  constexpr unsigned EIGHT_LINES = 8 * LINE * sizeof(Storage);
  if constexpr (LINES_ALONG_POSITIONS)  // boxes, in which lines follow each other by k
    return ptx::wgmma_descriptor<128>(tile + position / LINE * BOX + k * LINE,
                                      BOX * sizeof(Storage), EIGHT_LINES);
  return ptx::wgmma_descriptor<128>(tile + position * LINE + k, 16, EIGHT_LINES);
}

__device__ __forceinline__ void multiply(float (&sums)[BLOCK_N / 2], unsigned long long a,
                                         unsigned long long b, int keep, half_t) {
  ptx::wgmma_m64_f16<BLOCK_N, A_LINES_ALONG_M, B_LINES_ALONG_N>(sums, a, b, keep);
}
__device__ __forceinline__ void multiply(float (&sums)[BLOCK_N / 2], unsigned long long a,
                                         unsigned long long b, int keep, bfloat16_t) {
  ptx::wgmma_m64_bf16<BLOCK_N, A_LINES_ALONG_M, B_LINES_ALONG_N>(sums, a, b, keep);
}

__device__ __forceinline__ void multiply(float (&sums)[BLOCK_N / 2], unsigned long long a,
                                         unsigned long long b, int keep, float) {
  ptx::wgmma_m64_tf32<BLOCK_N>(sums, a, b, keep);
}

__device__ __forceinline__ unsigned packed(float low, float high, half_t) {
  return ptx::f16x2_from_f32(low, high);
}
__device__ __forceinline__ unsigned packed(float low, float high, bfloat16_t) {
  return ptx::bf16x2_from_f32(low, high);
}

// What the forward pass does to a sum; the gradients store it as it is.
__device__ __forceinline__ float finished(float sum, int filter, const ConvParameters& p,
                                          const Result* bias) {
#if PASS == 0
  if (bias != nullptr && filter < p.groups * p.filters)
    sum += Numeric<Result>::widen(bias[filter * p.bias_stride]);
  return activate<ACTIVATION>(sum);
#else
  return sum;
#endif
}

// One thread's sums of a tile: of each product, BLOCK_N columns of 64 rows in a warpgroup.
using Sums = float[PRODUCTS][BLOCK_N / 2];

// One warpgroup's half of a tile.
struct Consumer {
  SharedMemory& shared;
  const ConvParameters& p;
  const Walk<PHASES>& walk;
  int number;  // of the warpgroup
  Cursor cursor;
  int next_buffer = 0;

  __device__ __forceinline__ int thread() const { return threadIdx.x % WARPGROUP; }

  // Tells the producers of all blocks that share the stage that this warp has read it.
  __device__ __forceinline__ void release(int stage) {
    if (threadIdx.x % 32 != 0) return;
#if CLUSTER > 1
    const unsigned address = ptx::shared_address(&shared.empty[stage]);
#pragma unroll
    for (unsigned block = 0; block < CLUSTER; ++block)
      ptx::mbarrier_arrive_cluster(ptx::map_to_block(address, block));
#else
    ptx::mbarrier_arrive(&shared.empty[stage]);
#endif
  }

  // Sets the sums to the products of some steps.  One step's products run while the next stage is
  // waited for.
  __device__ __forceinline__ void multiply_steps(Sums& sums, int steps) {
    const int first_row = number * CONSUMER_ROWS;
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for(&shared.full[cursor.stage], cursor.parity);
      const Stage& stage = shared.stages[cursor.stage];
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < BLOCK_K; k += BLOCK_K / 4) {
        const auto b = describe<B_LINES_ALONG_N>(stage.b, 0, k);
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i)
          multiply(sums[i], describe<A_LINES_ALONG_M>(stage.a, first_row + i * 64, k), b,
                   step > 0 || k > 0, Storage{});
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      if (step > 0) release(previous);
      previous = cursor.stage;
      cursor.advance();
    }
    ptx::wgmma_wait<0>();
    if (steps > 0) release(previous);
  }

  // The products of all steps of a tile.
  __device__ __forceinline__ void multiply_tile(Sums& sums, int steps) {
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
      for (int j = 0; j < BLOCK_N / 2; ++j) sums[i][j] = 0;
#if PLANES == 1
    multiply_steps(sums, steps);
#else
#pragma unroll 1
    for (int step = 0; step < steps; step += PROMOTION) {
      Sums part;
      multiply_steps(part, (steps - step < PROMOTION ? steps - step : PROMOTION) * TERMS);
#pragma unroll
      for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
        for (int j = 0; j < BLOCK_N / 2; ++j) sums[i][j] += part[i][j];
    }
#endif
  }

#if !SPLIT && STORE != STORE_FLOAT
  // Rounds 64 x 64 sums and writes them to a buffer, swizzled as the tensor map of C says.
  __device__ __forceinline__ void stage_out(Result* buffer, const float (&sums)[BLOCK_N / 2],
                                            int chunk, int first_filter, const Result* bias) {
    const int lane = threadIdx.x % 32, warp = thread() / 32;
    const int line = warp * 16 + lane % 16;
#pragma unroll
    for (int column = 0; column < 64; column += 16) {
      unsigned registers[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int right = i / 2 * 8 + lane % 4 * 2;  // of the first column
        const int filter = first_filter + chunk * 64 + column + right;
        const float* pair = &sums[chunk * 32 + column / 2 + i / 2 * 4 + i % 2 * 2];
        registers[i] = packed(finished(pair[0], filter, p, bias),
                              finished(pair[1], filter + 1, p, bias), Result{});
      }
      const int piece = (column / 8 + lane / 16) ^ line % 8;
      ptx::stmatrix_x4(buffer + line * 64 + piece * 8, registers);
    }
  }

  // The tile's half of C, 64 x 64 at a time through two buffers in turn.
  __device__ __forceinline__ void store(const Sums& sums, const Tile& tile,
                                        const ptx::TensorMap& map, Result* c,
                                        const Result* bias) {
    const Output output = {p, walk, tile.group};
    const int first_filter = tile.group * static_cast<int>(p.filters) + tile.column;
    const int columns = output.columns() - tile.column;
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      const int first_row = tile.row + number * CONSUMER_ROWS + i * 64;
#if STORE == STORE_ROWS
      const int piece = thread() % 8;
      long long offsets[4];  // of the rows that this thread stores a piece of
#pragma unroll
      for (int j = 0; j < 4; ++j)
        offsets[j] = output.row_offset(first_row + thread() / 8 + j * 16, tile.phase);
#endif
#pragma unroll
      for (int chunk = 0; chunk < BLOCK_N / 64; ++chunk) {
        if (chunk * 64 >= columns) continue;
        Result* const buffer = shared.output[number][next_buffer];
        next_buffer ^= 1;
        stage_out(buffer, sums[i], chunk, first_filter, bias);
#if STORE == STORE_BOXES
        ptx::fence_proxy_async();
        if (thread() == 0) ptx::tma_store_wait_read<0>();  // the other buffer is free again
        ptx::named_barrier_sync(1 + number, WARPGROUP);    // this one is complete
        if (thread() == 0) {
          const int extent = static_cast<int>(PASS == 0 ? p.filters : p.channels);
          ptx::tma_store_2d(&map, buffer, tile.group * extent + tile.column + chunk * 64,
                            first_row);
          ptx::tma_store_commit();
        }
#else
        ptx::named_barrier_sync(1 + number, WARPGROUP);  // complete, and the other is read
        const long long column = output.column_offset(tile.column + chunk * 64 + piece * 8);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int line = thread() / 8 + j * 16;
          if (offsets[j] == Output::BEYOND || column == Output::BEYOND) continue;
          using Eight = Piece<Result, 8>;
          *reinterpret_cast<Eight*>(c + offsets[j] + column) =
              *reinterpret_cast<const Eight*>(buffer + line * 64 + (piece ^ line % 8) * 8);
        }
#endif
      }
    }
  }
#endif

  // Calls use(row, column, pair) for this thread's sums, in pairs of neighbouring columns of C.
  template <class Use>
  __device__ __forceinline__ void for_each_pair(const Sums& sums, const Tile& tile, Use use) const {
    const int lane = threadIdx.x % 32, warp = thread() / 32;
    const int first_row = tile.row + number * CONSUMER_ROWS + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < BLOCK_N / 8; ++j) {
          const float pair[2] = {sums[i][j * 4 + half * 2], sums[i][j * 4 + half * 2 + 1]};
          use(first_row + i * 64 + half * 8, tile.column + j * 8 + lane % 4 * 2, pair);
        }
  }

#if STORE == STORE_FLOAT
  // The tile's half of C in float, straight from registers: four lanes fill a sector of memory.
  __device__ __forceinline__ void store(const Sums& sums, const Tile& tile, const ptx::TensorMap&,
                                        float* c, const float* bias) const {
    const Output output = {p, walk, tile.group};
    const int first_filter = tile.group * static_cast<int>(p.filters);
    for_each_pair(sums, tile, [&](int row, int column, const float(&pair)[2]) {
      const long long row_offset = output.row_offset(row, tile.phase);
      const long long column_offset = output.column_offset(column);
      if (row_offset == Output::BEYOND || column_offset == Output::BEYOND) return;
      const float done[2] = {finished(pair[0], first_filter + column, p, bias),
                             finished(pair[1], first_filter + column + 1, p, bias)};
      store_piece(c + row_offset + column_offset, done);
    });
  }
#endif

  // The sums of one split, as they are: (split, group, row, column) of the workspace.
  __device__ __forceinline__ void store_partial(const Sums& sums, const Tile& tile,
                                                float* partial) const {
    const Output output = {p, walk, tile.group};
    const int rows = output.rows(tile.phase), columns = output.columns();
    partial += (tile.split * p.groups + tile.group) * static_cast<long long>(rows) * columns;
    for_each_pair(sums, tile, [&](int row, int column, const float(&pair)[2]) {
      if (row < rows && column < columns)
        store_piece(partial + static_cast<long long>(row) * columns + column, pair);
    });
  }
};

// -- kernels ----------------------------------------------------------------------------------------

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

__device__ __forceinline__ void synchronise_cluster() {
#if CLUSTER > 1
  ptx::cluster_arrive();
  ptx::cluster_wait();
#else
  __syncthreads();
#endif
}

// c is y, dx or dw; bias is of the forward pass and may be null; partial is the workspace of SPLIT.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    conv_hopper(const Result* __restrict__ bias, Result* __restrict__ c,
                float* __restrict__ partial, const __grid_constant__ TensorMaps maps,
                const __grid_constant__ Walk<PHASES> walk,
                const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], CLUSTER * CONSUMERS * WARPGROUP / 32);
    }
    ptx::fence_mbarrier_init();
  }
  synchronise_cluster();  // no block loads into another whose barriers are not ready

  const Schedule schedule;
  const int warpgroup = threadIdx.x / WARPGROUP;
  if (warpgroup == CONSUMERS) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x < CONSUMERS * WARPGROUP + 32 && ptx::elect_one()) {
      Producer producer = {shared, maps, p, walk, schedule.rank};
      for (int number = schedule.first; number < walk.tiles; number += schedule.step) {
        const Tile tile(number, schedule.rank, p, walk);
        producer.load(tile, Steps(tile, p, walk));
      }
    }
  } else {
    ptx::setmaxnreg_inc<232>();
    Consumer consumer = {shared, p, walk, warpgroup};
#pragma unroll 1
    for (int number = schedule.first; number < walk.tiles; number += schedule.step) {
      const Tile tile(number, schedule.rank, p, walk);
      Sums sums;
      consumer.multiply_tile(sums, Steps(tile, p, walk).count);
#if SPLIT
      consumer.store_partial(sums, tile, partial);
#else
      consumer.store(sums, tile, maps.c, c, bias);
#endif
    }
#if STORE == STORE_BOXES
    if (consumer.thread() == 0) ptx::tma_store_wait<0>();
#endif
  }
#if CLUSTER > 1
  synchronise_cluster();  // no block leaves while another may still reach its shared memory
#endif
}

#if SPLIT
// Adds the splits' sums in order, one thread for 16 bytes of C.
extern "C" __global__ void __launch_bounds__(256)
    conv_hopper_reduce(const float* __restrict__ partial, const Result* __restrict__ bias,
                       Result* __restrict__ c, const int splits,
                       const __grid_constant__ Walk<PHASES> walk,
                       const __grid_constant__ ConvParameters p) {
  constexpr int VECTOR = 16 / sizeof(Result);
  const Output all = {p, walk, 0};
  const int columns = all.columns();
  const long long matrix = static_cast<long long>(all.rows(0)) * columns;
  const long long elements = p.groups * matrix;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long element = thread * VECTOR;
  if (element >= elements) return;

  float sums[VECTOR] = {};
  for (int split = 0; split < splits; ++split) {
    float more[VECTOR];
    load_piece(more, partial + split * elements + element, true);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sums[i] += more[i];
  }
  const Output output = {p, walk, static_cast<int>(element / matrix)};
  const int row = static_cast<int>(element % matrix / columns);
  const int column = static_cast<int>(element % columns);
  const long long row_offset = output.row_offset(row, 0);
  const long long column_offset = output.column_offset(column);
  if (row_offset == Output::BEYOND || column_offset == Output::BEYOND) return;
  const int first_filter = output.group * static_cast<int>(p.filters) + column;
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) sums[i] = finished(sums[i], first_filter + i, p, bias);
  store_piece(c + row_offset + column_offset, sums);
}
#endif
