// Hopper: the three passes as implicit GEMMs on wgmma, fed by TMA, on compute capability 9.0.  Operands
// have channels last (possibly as copies that conv_arrange.cu made) or are images with channels first;
// results have any memory order.
//
//   pass             gemm_m          gemm_n            gemm_k             A               B
//   forward          output pixels   filters           taps * channels    im2col(x)       w
//   backprop_input   input pixels    channels          taps * filters     im2col(dy)      w
//   backprop_filter  filters         taps * channels   output pixels      dy              im2col(x)
//
// backprop_filter swaps A and B (WINDOW_ROWS) if filters are the last axis of w, so that C is contiguous
// along n; with SPLIT, the order with fewer tiles is used.  The im2col matrix exists only in shared
// memory: a TMA load in im2col mode copies BLOCK_M pixels (LINE pixels in backprop_filter) of LINE
// channels (128 bytes) under one tap, with zeros where the window is outside the tensor.
//
// Images with channels first (PLANAR) are loaded as lines of LINE pixels of a row, for LINE channels;
// the lines remain lines of pixels in shared memory.  A tap shifts the whole line; pixels outside are
// zero.  The last line of a row is padded, so that the product computes more pixels than exist.  The
// results of the additional pixels are dropped.  In backprop_filter, the additional pixels of x are
// multiplied with zeros of dy.  A NaN of x must not meet these zeros.  Therefore each tap along the row
// has a tensor map in which x ends at the element that the last pixel reads (MAPS): all further elements
// are loaded as zeros.
//
// Compared with conv_gather.cu, this kernel has products of a whole warpgroup, with both operands in
// shared memory; loads issued by one thread, without address arithmetic in the consumers; and persistent
// blocks, so that the first loads of a tile and the stores of the previous tile overlap with products.
//
//   producer     one thread: waits for an empty stage, sets the expected bytes, and starts the loads of
//                both operands; the stage is full when all bytes have arrived
//   consumers    two warpgroups, or three for tiles of 192 rows: wait for a full stage, multiply, release
//                the stage.  Each computes an equal share of a tile's rows or, for narrow tiles (TURNS),
//                every other tile
//
// A warpgroup computes 64 rows, or a multiple of 64, with its sums in registers.  The producer's
// warpgroup gives up most of its registers for these sums (setmaxnreg).  With CLUSTER = 2, two blocks
// compute vertically adjacent tiles and share B: each block loads half of B for both blocks.  Tiles are
// computed in bands of BAND rows of tiles, so that concurrent blocks share operands in L2.
//
// The launches of this kernel and of conv_hopper_reduce may begin before the previous launch has ended.
// After conv_arrange, they begin as soon as all blocks of conv_arrange have started; after another kernel,
// as blocks of that kernel end.  Every thread waits for the previous launches before it accesses global
// memory.
// Pointers are not __restrict__, since the compiler may move accesses through __restrict__ pointers
// across the wait.
//
// If gemm_k is divided into few splits (CLUSTER_SPLITS > 1), the blocks of one tile's splits form a
// cluster.  Each leaves its float sums in its shared memory, and stores a part of the tile, whose sums it
// reads from all of these blocks.  With SPLIT, each split writes float sums to a workspace, and
// conv_hopper_reduce adds them.  Both add the splits in order.  The bits of a result do not depend on which
// block computes which tile.
//
// Operands are 16-bit types, or float as TF32.  wgmma supports TF32 only with lines along k: in the
// forward pass with channels last in w, and in backprop_input with filters last.  In backprop_filter, x and
// dy are copies that conv_arrange.cu made, with the axes (row, column, channel, (image, band)) in memory.
// The kernel reads a copy as one PLANAR image with three spatial axes (BANDS).  Its rows consist of images
// and bands, and the filter has one tap along them.  With PLANES = 3,
// operands are float32 tensors that conv_planes.cu has split into three bfloat16 planes, high to low.  A
// product then consists of six products of planes; the three others are too small to matter.  Every
// PROMOTION steps, the tensor cores' sums are added to float registers, since tensor cores drop low bits
// when they add.
//
// A variant is chosen with -D: PASS (0, 1, 2 as in the table), STORAGE (of operands), RESULT (of C and
// the bias), PLANES, BLOCK_M, BLOCK_N, STAGES, CLUSTER, SPATIAL (number of spatial axes), PHASES (number
// of traversals, traversal.cuh), MAPS (number of tensor maps of the im2col operand),
// POINTWISE (1 x 1, stride 1, no padding, not PLANAR: im2col(x or dy) is a plain matrix), PLANAR (x and
// dy have channels first), FILTERS_LAST (the last axis of w is filters, else channels), WINDOW_ROWS (in
// backprop_filter, A is x, not dy), STORE and RUN (how C is stored), SPLIT, CLUSTER_SPLITS
// (number of splits that a cluster adds, else 1), ACTIVATION and ADD (epilogue.cuh; forward and
// backprop_input only; not with STORE_BOXES), SHARED_BYTES; in backprop_input also FOLD_CHANNELS, FOLD_D,
// FOLD_H and FOLD_W (fold.cuh).
#include "epilogue.cuh"
#include "fold.cuh"
#include "maps.cuh"
#include "numeric.cuh"
#include "partial_sums.cuh"
#include "vector.cuh"
#include "traversal.cuh"

using Storage = STORAGE;
using Result = RESULT;

// How C is stored.  16-bit types pass through shared memory.  Threads store them as vectors along rows or
// columns; if C is a plain matrix, TMA stores them in boxes.  float is stored from registers.  Vectors
// have RUN contiguous elements.
#define STORE_ROWS 0
#define STORE_BOXES 1
#define STORE_FLOAT 2
#define STORE_COLUMNS 3

constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = BLOCK_M % 128 == 0 ? 2 : 3;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
// Whether warpgroups compute whole tiles in turn, so that one warpgroup multiplies while the other
// stores.  This pays if a tile has few products per stored element.  A block of a divided tile has no other
// tile.
constexpr bool TURNS = BLOCK_N == 64 && PLANES == 1 && CLUSTER_SPLITS == 1;
static_assert(!TURNS || CONSUMERS == 2, "turns alternate");
constexpr int CONSUMERS_OF_TILE = TURNS ? 1 : CONSUMERS;
constexpr int CONSUMER_ROWS = BLOCK_M / CONSUMERS_OF_TILE;
constexpr int PRODUCTS = CONSUMER_ROWS / 64;
constexpr int BAND = 8;
#define CLUSTER_BLOCKS (CLUSTER * CLUSTER_SPLITS)

// Whether x and dy are copies whose last axis is (image, band).
constexpr bool BANDS = PLANAR && SPATIAL == 3;

// Elements per line of a tile in shared memory.  A line has 128 bytes, the span of the swizzle.  LINE is
// also the extent of a TMA box, and the depth of a step along k.
constexpr int LINE = 128 / sizeof(Storage);
constexpr int BLOCK_K = LINE;
constexpr int BOX = LINE * LINE;
static_assert(CONSUMER_ROWS % 64 == 0 && BLOCK_N % 64 == 0, "whole products, and whole boxes");

// Whether an operand's lines run along m or n instead of k.
constexpr bool A_LINES_ALONG_M = (PASS == 2) != (PLANAR != 0);
constexpr bool B_LINES_ALONG_N = PASS == 2 ? !PLANAR : (PASS == 0) == (FILTERS_LAST != 0);
static_assert(CLUSTER == 1 || !B_LINES_ALONG_N || BLOCK_N % 128 == 0, "B is loaded in two halves");
static_assert(sizeof(Storage) == 2 || !B_LINES_ALONG_N, "TF32 operands have lines along k");
static_assert(sizeof(Result) == 2 ? LINE == 64 : STORE == STORE_FLOAT, "64 columns go out at once");

struct alignas(1024) Stage {
  Storage a[BLOCK_M * BLOCK_K];
  Storage b[BLOCK_N * BLOCK_K];
};

// Buffer of 64 x 64 elements of C before they are stored.
struct alignas(1024) OutputBuffer {
  Result element[64 * 64];
};

struct SharedMemory {
  Stage stages[STAGES];
#if STORE != STORE_FLOAT
  OutputBuffer output[CONSUMERS][2];
#endif
  float bias[CONSUMERS][BLOCK_N];
  unsigned long long full[STAGES], empty[STAGES], turn[CONSUMERS];
};
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "the launch asks for as much");

extern __shared__ __align__(1024) unsigned char shared_memory[];

// Tensor maps: of the gathered operand, im2col(x or dy) in the table above (one per phase, or one per tap
// along a row); of the other operand; and of C.
struct TensorMaps {
  ptx::TensorMap gathered[MAPS];
  ptx::TensorMap other;
  ptx::TensorMap c;

  __device__ __forceinline__ void prefetch() const {
    for (const auto& map : gathered) ptx::prefetch_tensor_map(&map);
    ptx::prefetch_tensor_map(&other);
    if (STORE == STORE_BOXES) ptx::prefetch_tensor_map(&c);
  }
};

__device__ __forceinline__ int lines(long long extent) {
  return static_cast<int>((extent + LINE - 1) / LINE);
}

// -- tiles ------------------------------------------------------------------------------------------

// The tiles of a block.  The clusters, or the blocks without clusters, compute tiles in rounds, one tile
// each.  With several phases, the longest tiles come first, and the cluster with the first tile of a round
// has the last tile of the next round, so that all have about the same number of steps.  All blocks of a
// cluster have the same numbers.  Of the blocks of a split, which share B, a block has the number `rank`.
struct Schedule {
  int rank, split, first, clusters;

  __device__ __forceinline__ Schedule() : rank(0), split(0) {
#if CLUSTER_BLOCKS > 1
    const int number = static_cast<int>(ptx::cluster_block_rank());
    rank = number % CLUSTER, split = number / CLUSTER;
#endif
    first = static_cast<int>(blockIdx.x) / CLUSTER_BLOCKS;
    clusters = static_cast<int>(gridDim.x) / CLUSTER_BLOCKS;
  }

  // Return the difference between the numbers of the block's first two tiles, and between those of the
  // next two.
  __device__ __forceinline__ int first_step() const {
    return PHASES == 1 ? clusters : 2 * (clusters - first) - 1;
  }
  __device__ __forceinline__ int step_after(int step) const {
    return PHASES == 1 ? clusters : 2 * clusters - step;
  }

  // Returns the set of the blocks that share B, as multicast loads take it.
  __device__ __forceinline__ unsigned short both_blocks() const {
    return static_cast<unsigned short>(3u << split * CLUSTER);
  }
};

// Tiles are numbered by phase, split, group and band of BAND tile rows; within a band by column and row,
// rows fastest.  With CLUSTER = 2, a tile row consists of two rows of tiles, one for each block that
// shares B.
struct Tile {
  int split, group, phase, row, column;  // row and column of the tile's first element in C

  __device__ __forceinline__ Tile(int number, const Schedule& schedule, const ConvParameters& p,
                                  const Traversal<PHASES>& traversal) {
    const int groups = static_cast<int>(p.groups);
    int tiles = traversal.tiles_of_group;
    phase = 0;
    if (PHASES > 1) {
      for (; phase < PHASES; ++phase) {
        tiles = traversal.phase[phase].tile_rows * traversal.tile_columns;
        if (phase + 1 == PHASES || number < groups * tiles) break;
        number -= groups * tiles;
      }
    }
    group = number / tiles;
    number -= group * tiles;
    split = group / groups;
    group -= split * groups;
    split += schedule.split;
    const int band = number / (BAND * traversal.tile_columns);
    number -= band * BAND * traversal.tile_columns;
    const int rest = traversal.phase[phase].tile_rows - band * BAND;
    const int height = rest < BAND ? rest : BAND;
    row = ((band * BAND + number % height) * CLUSTER + schedule.rank) * BLOCK_M;
    column = number / height * BLOCK_N;
  }
};

// -- stages and blocks ------------------------------------------------------------------------------

// Returns the number of the calling thread's warpgroup.  The value is read from lane 0, so that the
// compiler knows that it is warp-uniform.
__device__ __forceinline__ int warpgroup_of_thread() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / WARPGROUP, 0);
}

__device__ __forceinline__ void wait_for(unsigned long long* barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// A position in the pipeline of stages, with the parity of its barriers' phase.
template <int COUNT>
struct Cursor {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage < COUNT) return;
    stage = 0;
    parity ^= 1;
  }
  __device__ __forceinline__ void advance_by(int steps) {
    stage += steps;
    parity ^= stage / COUNT & 1;
    stage %= COUNT;
  }
};

// Signals the producer of this block that the calling warp has read a stage.
__device__ __forceinline__ void release(unsigned long long* empty) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

// The two warpgroups multiply in turns.  A barrier's parity distinguishes only two successive rounds of
// the pipeline.  A warpgroup that skips a tile does not wait for the tile's stages, and could mistake an
// older round for a full stage.  Therefore the skipping warpgroup waits until the other warpgroup, which
// waits for these stages, passes on the turn.
struct Turn {
  unsigned long long (&barriers)[CONSUMERS];
  int warpgroup;
  unsigned parity;

  __device__ __forceinline__ Turn(unsigned long long (&barriers)[CONSUMERS], int warpgroup)
      : barriers(barriers), warpgroup(warpgroup), parity(warpgroup == 0) {}

  __device__ __forceinline__ void wait() {
    wait_for(&barriers[warpgroup], parity);
    parity ^= 1;
  }
  __device__ __forceinline__ void pass_on() { release(&barriers[1 - warpgroup]); }
};

// Signals the producers of all blocks that share B that the calling warp has read a stage.
__device__ __forceinline__ void release_in_cluster(unsigned long long* empty) {
#if CLUSTER > 1
  if (threadIdx.x % 32 != 0) return;
  const unsigned address = ptx::shared_address(empty);
  const unsigned first = CLUSTER_SPLITS == 1 ? 0 : ptx::cluster_block_rank() / CLUSTER * CLUSTER;
#pragma unroll
  for (unsigned block = 0; block < CLUSTER; ++block)
    ptx::mbarrier_arrive_cluster(ptx::map_to_block(address, first + block));
#else
  release(empty);
#endif
}

#if CLUSTER_BLOCKS > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER_BLOCKS, 1, 1)
#else
#define CLUSTER_DIMS
#endif

__device__ __forceinline__ void synchronise_cluster() {
#if CLUSTER_BLOCKS > 1
  ptx::cluster_arrive();
  ptx::cluster_wait();
#else
  __syncthreads();
#endif
}

// The boxes of an operand that this block loads.  With CLUSTER = 2, a block loads half of B's boxes, for
// both blocks.
template <int BOXES, bool IS_B>
struct OwnBoxes {
  static constexpr bool TO_BOTH = IS_B && CLUSTER > 1;
  static constexpr int COUNT = TO_BOTH ? BOXES / CLUSTER : BOXES;
  int first;

  __device__ __forceinline__ explicit OwnBoxes(int rank) : first(TO_BOTH ? rank * COUNT : 0) {}
};

// -- the filter -------------------------------------------------------------------------------------

// Loads B, the filter, in the forward pass and in backprop_input.
struct FilterLoader {
  const ptx::TensorMap& map;
  const ConvParameters& p;
  const Traversal<PHASES>& traversal;
  const Schedule& schedule;

  // Loads a tile of w, BLOCK_N by BLOCK_K, for one tap of a phase.
  __device__ __forceinline__ void load(Storage* b, unsigned long long* full, const Tile& tile,
                                       int k, const Tap<int>& tap, int plane) const {
    const int first_filter = tile.group * static_cast<int>(p.filters);
    const int number = number_of(tap, traversal.phase[tile.phase]);
    if constexpr (PASS == 1) k += first_filter;
    const int n = tile.column + (PASS == 0 ? first_filter : 0);
    if constexpr (B_LINES_ALONG_N) {
      const OwnBoxes<BLOCK_N / LINE, true> boxes(schedule.rank);
#pragma unroll
      for (int i = boxes.first; i < boxes.first + boxes.COUNT; ++i)
        load_box(b + i * BOX, full, n + i * LINE, k, number, plane, boxes.TO_BOTH);
    } else {
      constexpr int SHARE = BLOCK_N / CLUSTER;
      const int first = schedule.rank * SHARE;
      load_box(b + first * BLOCK_K, full, k, n + first, number, plane, CLUSTER > 1);
    }
  }

 private:
  // Returns the index of a phase's tap in the whole filter.
  __device__ __forceinline__ int number_of(const Tap<int>& tap, const TraversalPhase& here) const {
    const int t = here.filter_first[0] + tap.t * traversal.filter_step[0];
    const int r = here.filter_first[1] + tap.r * traversal.filter_step[1];
    const int s = here.filter_first[2] + tap.s * traversal.filter_step[2];
    return (t * static_cast<int>(p.filter[1]) + r) * static_cast<int>(p.filter[2]) + s;
  }
  // The map has the dimensions of w in memory, innermost first: (filter, channel, tap) or
  // (channel, tap, filter).  The last dimension of the map is the plane.
  __device__ __forceinline__ void load_box(Storage* to, unsigned long long* full, int inner,
                                           int outer, int tap, int plane, bool to_both) const {
    const int second = FILTERS_LAST ? outer : tap, third = FILTERS_LAST ? tap : outer;
    if (to_both)
      ptx::tma_load_4d_multicast(to, &map, full, inner, second, third, plane,
                                 schedule.both_blocks());
    else
      ptx::tma_load_4d(to, &map, full, inner, second, third, plane);
  }
};

// -- products ---------------------------------------------------------------------------------------

// wgmma's descriptor of an operand in shared memory.  Its lower half contains the address in units of 16
// bytes, so that an addition yields the descriptor of another address.
template <bool LINES_ALONG_POSITIONS>
struct Operand {
  unsigned long long descriptor;

  __device__ __forceinline__ explicit Operand(const Storage* tile)
      : descriptor(ptx::wgmma_descriptor<128>(
            tile, LINES_ALONG_POSITIONS ? BOX * sizeof(Storage) : 16, 8 * LINE * sizeof(Storage))) {
  }
  __device__ __forceinline__ Operand further(unsigned bytes) const {
    Operand there = *this;
    there.descriptor = descriptor >> 32 << 32 | static_cast<unsigned>(descriptor) + bytes / 16;
    return there;
  }
  // Returns the descriptor of the operand from a position (a row of A, a column of B) and a k on.  If
  // lines run along positions, the lines of a box are ordered by k.
  __device__ __forceinline__ Operand from(int position, int k) const {
    const int elements =
        LINES_ALONG_POSITIONS ? position / LINE * BOX + k * LINE : position * LINE + k;
    return further(elements * sizeof(Storage));
  }
};
using OperandA = Operand<A_LINES_ALONG_M>;
using OperandB = Operand<B_LINES_ALONG_N>;

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

// A thread's sums of a tile: for each of PRODUCTS products, its part of 64 rows by BLOCK_N columns.
using Sums = float[PRODUCTS][BLOCK_N / 2];

// Starts the products of a step, BLOCK_K along k, for this warpgroup's rows of A.  If `keep` is false,
// the sums start from zero.
__device__ __forceinline__ void start_products(Sums& sums, OperandA a, OperandB b, bool keep) {
  ptx::wgmma_fence(sums);
#pragma unroll
  for (int k = 0; k < BLOCK_K; k += BLOCK_K / 4)
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i)
      multiply(sums[i], a.from(i * 64, k).descriptor, b.from(0, k).descriptor,
               keep || k > 0, Storage{});
  ptx::wgmma_commit();
}

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
    for (int j = 0; j < BLOCK_N / 2; ++j) sums[i][j] = 0;
}

// -- epilogue ----------------------------------------------------------------------------------------

__device__ __forceinline__ unsigned packed(float low, float high, half_t) {
  return ptx::f16x2_from_f32(low, high);
}
__device__ __forceinline__ unsigned packed(float low, float high, bfloat16_t) {
  return ptx::bf16x2_from_f32(low, high);
}
// Returns the value of the 16-bit element in the lower half of a word.
template <class Element>
__device__ __forceinline__ float unpacked(unsigned word, Element element) {
  element.bits = static_cast<unsigned short>(word);
  return Numeric<Element>::widen(element);
}

// Channels per group of y or dx.
__device__ __forceinline__ long long result_channels(const ConvParameters& p) {
  return PASS == 0 ? p.filters : p.channels;
}

// Returns the bias of a channel of y or dx; -0 without a bias, because adding -0 changes no sum.
__device__ __forceinline__ float bias_of(int channel, const ConvParameters& p, const Result* bias) {
  if (PASS == 2 || bias == nullptr || channel >= p.groups * result_channels(p)) return -0.0f;
  return Numeric<Result>::widen(bias[channel_of(channel) * p.bias_stride]);
}

// `count` columns of C, from `column` on.  `offset` is the offset of the first column.
struct Line {
  int column, count;
  long long offset;
};

// Stores COUNT sums of adjacent columns of a line, RUN elements at a time.
template <int COUNT, class Output>
__device__ __forceinline__ void store_in_line(Result* row, const Line& line, int column,
                                              const Output& output, const float (&sums)[COUNT]) {
  static_assert(COUNT % RUN == 0, "whole runs");
#pragma unroll
  for (int first = 0; first < COUNT; first += RUN) {
    if (column + first >= line.count) return;
    float run[RUN];
#pragma unroll
    for (int i = 0; i < RUN; ++i) run[i] = sums[first + i];
    store_piece(row + output.offset(line, column + first), run);
  }
}

// Adds COUNT elements of the addend to the sums of COUNT adjacent columns of a line.  `row` points to the
// beginning of the addend's row.
template <int COUNT, class Output>
__device__ __forceinline__ void add_in_line(const Result* row, const Line& line, int column,
                                            const Output& output, float (&sums)[COUNT]) {
#pragma unroll
  for (int first = 0; first < COUNT; first += RUN) {
    if (column + first >= line.count) return;
    float run[RUN];
    load_piece(run, row + output.offset(line, column + first), true);
#pragma unroll
    for (int i = 0; i < RUN; ++i) sums[first + i] += run[i];
  }
}

// Epilogue of one warpgroup for its rows of a tile.  Output computes the offsets of C's elements:
//
//   row_offset(row, phase)                          offset of a row; BEYOND for a row outside C
//   line(column)                                    up to LINE columns from this column on
//   columns()                                       columns of C per group
//   offset(line, column)                            offset of a column of a line
//   store_box(map, buffer, row, column)             starts the store of 64 x 64 elements
template <class Output>
struct Epilogue {
  SharedMemory& shared;
  const Result* bias;    // null without a bias
  const Result* addend;  // read with ADD only
  const ConvParameters& p;
  int number;     // number of the warpgroup
  int first_row;  // first row of the warpgroup in a tile
  int next_buffer = 0;

  static constexpr int BIASES = (BLOCK_N + WARPGROUP - 1) / WARPGROUP;  // biases per thread
  // Whether -0 is added if there is no bias.  With a branch instead, the compiler would duplicate the code
  // of a long activation.
  static constexpr bool ALWAYS_BIASED = ACTIVATION == ACTIVATION_SILU || ACTIVATION == ACTIVATION_GELU;

  __device__ __forceinline__ bool is_biased() const {
    return PASS != 2 && (ALWAYS_BIASED || bias != nullptr);
  }

  __device__ __forceinline__ int thread() const { return threadIdx.x % WARPGROUP; }

  // Loads this thread's part of the tile's biases.  Call it before the products, which hide the latency.
  __device__ __forceinline__ void load_biases(float (&own)[BIASES], const Tile& tile) const {
    const int first = tile.group * static_cast<int>(result_channels(p)) + tile.column + thread();
#pragma unroll
    for (int i = 0; i < BIASES; ++i) own[i] = bias_of(first + i * WARPGROUP, p, bias);
  }
  // Shares the biases with the warpgroup.
  __device__ __forceinline__ void share_biases(const float (&own)[BIASES]) {
    if (!is_biased()) return;
    ptx::named_barrier_sync(1 + number, WARPGROUP);  // the previous tile's biases have been read
#pragma unroll
    for (int i = 0; i < BIASES; ++i)
      if (thread() + i * WARPGROUP < BLOCK_N)
        shared.bias[number][thread() + i * WARPGROUP] = own[i];
    ptx::named_barrier_sync(1 + number, WARPGROUP);
  }
  // Adds the bias to a sum in a column of the tile.
  __device__ __forceinline__ float biased(float sum, int column) const {
    return is_biased() ? sum + shared.bias[number][column] : sum;
  }

#if STORE != STORE_FLOAT
  // Adds the bias, applies the activation, rounds 64 x 64 sums and writes them to a buffer of 64 lines
  // (rows or columns of C), with the swizzle of C's tensor map.  With ADD, the buffer contains the addend,
  // which is added before the activation.
  __device__ __forceinline__ void stage_out(Result* buffer, const float (&sums)[BLOCK_N / 2],
                                            int chunk) {
    const int lane = threadIdx.x % 32, warp = thread() / 32;
#pragma unroll
    for (int column = 0; column < 64; column += 16) {
#if STORE == STORE_COLUMNS
      const int line = column + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
#else
      const int line = warp * 16 + lane % 16, piece = column / 8 + lane / 16;
#endif
      Result* const matrices = buffer + line * 64 + (piece ^ line % 8) * 8;
      unsigned registers[4];
#if ADD && STORE == STORE_COLUMNS
      ptx::ldmatrix_x4_trans(registers, matrices);
#elif ADD
      ptx::ldmatrix_x4(registers, matrices);
#endif
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int right = i / 2 * 8 + lane % 4 * 2;  // columns right of `column`
        const int place = chunk * 64 + column + right;
        const float* pair = &sums[chunk * 32 + column / 2 + i / 2 * 4 + i % 2 * 2];
        float low = biased(pair[0], place), high = biased(pair[1], place + 1);
#if ADD
        low += unpacked(registers[i], Result{}), high += unpacked(registers[i] >> 16, Result{});
#endif
        registers[i] = packed(activate<ACTIVATION>(low), activate<ACTIVATION>(high), Result{});
      }
#if STORE == STORE_COLUMNS
      ptx::stmatrix_x4_trans(matrices, registers);
#else
      ptx::stmatrix_x4(matrices, registers);
#endif
    }
  }

  // Threads that store a line of a buffer, lines per thread, and runs (vectors of RUN elements) per thread
  // and line.  Adjacent threads store adjacent runs.  If runs are short, a warp stores a single line at a
  // time, because the address of each line takes divisions.
  static constexpr int THREADS_OF_LINE = STORE == STORE_ROWS || RUN == 8 ? 8 : RUN == 4 ? 16 : 32;
  static constexpr int LINES_OF_THREAD = 64 * THREADS_OF_LINE / WARPGROUP;
  static constexpr int RUNS_OF_THREAD = 64 / (THREADS_OF_LINE * RUN);
  using Run = Piece<Result, RUN>;
  // Number of runs of a line that the loop unrolls.  The addresses of many short runs would need more
  // registers than there are.
  static constexpr int RUNS_AT_ONCE = ADD && STORE == STORE_ROWS && RUN < 4 ? 2 : RUNS_OF_THREAD;

  __device__ __forceinline__ int line_of(int number) const {
    return thread() / THREADS_OF_LINE + number * (WARPGROUP / THREADS_OF_LINE);
  }
  // The first element of a run in its line.
  __device__ __forceinline__ int run_of(int number) const {
    return (number * THREADS_OF_LINE + thread() % THREADS_OF_LINE) * RUN;
  }

#if STORE != STORE_BOXES
  // Calls use(element, offset, exists) for each run (RUN adjacent elements) of this thread in a buffer.
  // element is the run's first element in the buffer, offset is its offset in C, and exists tells whether
  // it is inside C.  row_offsets are the offsets of this thread's rows; first is the buffer's first column.
  template <int ROWS, class Use>
  __device__ __forceinline__ void for_each_run(Result* buffer, const Output& output,
                                               const long long (&row_offsets)[ROWS],
                                               int first, Use use) const {
    const Line line = output.line(first);
#pragma unroll 4
    for (int j = 0; j < LINES_OF_THREAD; ++j)
#pragma unroll RUNS_AT_ONCE
      for (int k = 0; k < RUNS_OF_THREAD; ++k) {
        const long long row_offset = row_offsets[STORE == STORE_ROWS ? j : k];
        const int column = STORE == STORE_ROWS ? run_of(k) : line_of(j);
        const bool exists = row_offset != Output::BEYOND && column < line.count;
        const long long offset = exists ? row_offset + output.offset(line, column) : 0;
        const int piece = run_of(k) / 8 ^ line_of(j) % 8;
        use(reinterpret_cast<Run*>(buffer + line_of(j) * 64 + piece * 8 + run_of(k) % 8), offset,
            exists);
      }
  }
#endif

  // Stores this warpgroup's rows of C, 64 x 64 elements at a time through two alternating buffers.
  __device__ __forceinline__ void store(const Sums& sums, const Tile& tile, const Output& output,
                                        const ptx::TensorMap& map, Result* c) {
    const int columns = output.columns() - tile.column;
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      const int row = tile.row + first_row + i * 64;
#if STORE != STORE_BOXES
      long long offsets[STORE == STORE_ROWS ? LINES_OF_THREAD : RUNS_OF_THREAD];  // offsets of rows
#pragma unroll
      for (int j = 0; j < sizeof(offsets) / sizeof(offsets[0]); ++j)
        offsets[j] = output.row_offset(row + (STORE == STORE_ROWS ? line_of(j) : run_of(j)),
                                       tile.phase);
#endif
#pragma unroll
      for (int chunk = 0; chunk < BLOCK_N / 64; ++chunk) {
        if (chunk * 64 >= columns) continue;
        Result* const buffer = shared.output[number][next_buffer].element;
        next_buffer ^= 1;
#if ADD
        for_each_run(buffer, output, offsets, tile.column + chunk * 64,
                     [&](Run* element, long long offset, bool exists) {
                       *element = Run{};
                       if (exists) *element = *reinterpret_cast<const Run*>(addend + offset);
                     });
        ptx::named_barrier_sync(1 + number, WARPGROUP);  // the buffer contains the addend
#endif
        stage_out(buffer, sums[i], chunk);
#if STORE == STORE_BOXES
        ptx::fence_proxy_async();
        if (thread() == 0) ptx::tma_store_wait_read<0>();  // the other buffer is free again
        ptx::named_barrier_sync(1 + number, WARPGROUP);    // this buffer is complete
        if (thread() == 0) {
          output.store_box(map, buffer, row, tile.column + chunk * 64);
          ptx::tma_store_commit();
        }
#else
        ptx::named_barrier_sync(1 + number, WARPGROUP);  // buffer complete; the other has been read
        for_each_run(buffer, output, offsets, tile.column + chunk * 64,
                     [&](const Run* element, long long offset, bool exists) {
                       if (exists) *reinterpret_cast<Run*>(c + offset) = *element;
                     });
#endif
      }
    }
  }
#else
  // Stores this warpgroup's rows of C in float from registers.  The pairs of four lanes fill a sector of
  // 32 bytes.
  __device__ __forceinline__ void store(const Sums& sums, const Tile& tile, const Output& output,
                                        const ptx::TensorMap&, float* c) const {
    const auto offset_of = [&](int row) { return output.row_offset(row, tile.phase); };
    const auto line_at = [&](int column) { return output.line(column); };
    for_each_pair(sums, tile, offset_of, line_at,
                  [&](long long row, const Line& line, int place, const float(&pair)[2]) {
                    if (row == Output::BEYOND) return;
                    const int column = line.column - tile.column + place;
                    float done[2] = {biased(pair[0], column), biased(pair[1], column + 1)};
                    if (ADD) add_in_line(addend + row, line, place, output, done);
                    for (float& sum : done) sum = activate<ACTIVATION>(sum);
                    store_in_line(c + row, line, place, output, done);
                  });
  }
#endif

  // Calls use(of_row(row), of_line(column), place, pair) for each pair of this thread's sums.  The sums
  // of a pair are in adjacent columns of C: column + place and the next.  Here, column is a multiple of
  // LINE, and place is less than LINE.  Calls for the same pair of columns are consecutive; of_row and
  // of_line are called once per row and line.
  template <class OfRow, class OfLine, class Use>
  __device__ __forceinline__ void for_each_pair(const Sums& sums, const Tile& tile, OfRow of_row,
                                                OfLine of_line, Use use) const {
    const int lane = threadIdx.x % 32, warp = thread() / 32;
    const int own_row = tile.row + first_row + warp * 16 + lane / 4;
    decltype(of_row(0)) rows[PRODUCTS][2];
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) rows[i][half] = of_row(own_row + i * 64 + half * 8);
#pragma unroll
    for (int first = 0; first < BLOCK_N; first += LINE) {
      const auto line = of_line(tile.column + first);
#pragma unroll
      for (int j = first / 8; j < (first + LINE) / 8; ++j)
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float pair[2] = {sums[i][j * 4 + half * 2], sums[i][j * 4 + half * 2 + 1]};
            use(rows[i][half], line, j * 8 - first + lane % 4 * 2, pair);
          }
    }
  }

  // Waits until TMA has stored C.  Call it before the kernel ends.
  __device__ __forceinline__ void finish() const {
#if STORE == STORE_BOXES
    if (thread() == 0) ptx::tma_store_wait<0>();
#endif
  }
};

// Pairs of planes of A and B that are multiplied, smallest products first.
constexpr int TERMS = PLANES == 1 ? 1 : 6;
struct Term {
  int a, b;
};
__device__ __forceinline__ Term term_at(int number) {
  constexpr unsigned A = 0x010120, B = 0x001102;  // one digit per term, the last term leftmost
  return {static_cast<int>(A >> number * 4 & 3) * (TERMS > 1),
          static_cast<int>(B >> number * 4 & 3) * (TERMS > 1)};
}
constexpr int PROMOTION = 2;  // steps (of all terms) per addition to the float sums

// -- the shape of C ---------------------------------------------------------------------------------

// The side of C that runs over taps * channels in backprop_filter.  It is divided into windows; a window is
// a tap with LINE channels.
struct FilterWindows {
  int channel_blocks, count;

  __device__ __forceinline__ explicit FilterWindows(const ConvParameters& p)
      : channel_blocks(lines(p.channels)),
        count(channel_blocks * static_cast<int>(p.filter[0] * p.filter[1] * p.filter[2])) {}

  // Returns the tap and the first channel of a window.  For a window beyond the last window, the channel
  // is outside the tensor.
  __device__ __forceinline__ Tap<int> at(int window, const ConvParameters& p) const {
    if (window >= count) return {static_cast<int>(p.channels), 0, 0, 0};
    Tap<int> tap = tap_at(window, channel_blocks, p.filter);
    tap.c *= LINE;
    return tap;
  }
};

// The pixels of an image in the product; with PLANAR, rows are padded to whole lines.
struct Image {
  long long sizes[3];

  __device__ __forceinline__ explicit Image(const TraversalPhase& here)
      : sizes{here.pixels[0], here.pixels[1],
              PLANAR ? lines(here.pixels[2]) * LINE : here.pixels[2]} {}
  __device__ __forceinline__ int pixels() const {
    return static_cast<int>(sizes[0] * sizes[1] * sizes[2]);
  }
  __device__ __forceinline__ Pixel<int> at(int number) const { return pixel_at(number, sizes); }
};

// Offsets of the elements of C, as sums of an offset of the row and an offset of the column.  Up to LINE
// adjacent columns have a constant stride, unless stride phases are folded into them (fold.cuh).
struct Output {
  static constexpr long long BEYOND = 1ll << 63;
  const ConvParameters& p;
  const Traversal<PHASES>& traversal;
  int group;

  __device__ __forceinline__ int rows(int phase) const {
    if constexpr (PASS == 2)
      return FILTERS_LAST ? FilterWindows(p).count * LINE : static_cast<int>(p.filters);
    return static_cast<int>(p.batch) * Image(traversal.phase[phase]).pixels();
  }
  __device__ __forceinline__ int columns() const {
    if constexpr (PASS == 1) return static_cast<int>(p.channels);
    if constexpr (PASS == 2 && !FILTERS_LAST) return FilterWindows(p).count * LINE;
    return static_cast<int>(p.filters);
  }

  __device__ __forceinline__ long long row_offset(int row, int phase) const {
    if (row >= rows(phase)) return BEYOND;
    if constexpr (PASS == 2) {
      if (!FILTERS_LAST) return filter_offset(row);
      const Line line = window(row - row % LINE);
      return row % LINE < line.count ? line.offset + row % LINE * p.w_stride[1] : BEYOND;
    }
    const TraversalPhase& here = traversal.phase[phase];
    const Pixel<int> at = Image(here).at(row);
    if (PLANAR && at.w >= here.pixels[2]) return BEYOND;
    const Pixel<long long> pixel = {at.n, here.place_first[0] + at.d * traversal.place_step[0],
                                    here.place_first[1] + at.h * traversal.place_step[1],
                                    here.place_first[2] + at.w * traversal.place_step[2]};
    return PASS == 0 ? pixel_offset(pixel, p.y_stride) + group * p.filters * column_step()
                     : pixel_offset(pixel, p.x_stride) + group * p.channels * column_step();
  }
  __device__ __forceinline__ Line line(int column) const {
    const int left = columns() - column;
    if constexpr (PASS != 2) return {column, left, column * column_step()};
    if constexpr (FILTERS_LAST) return {column, left, filter_offset(column)};
    return window(column);
  }
  __device__ __forceinline__ long long offset(const Line& line, int column) const {
    if constexpr (FOLDED) return column_offset<long long>(line.column + column, p);
    return line.offset + column * column_step();
  }
  __device__ __forceinline__ long long column_step() const {
    if constexpr (RUN > 1 && STORE != STORE_COLUMNS) return 1;
    if constexpr (PASS == 2) return p.w_stride[FILTERS_LAST ? 0 : 1];
    return (PASS == 0 ? p.y_stride : p.x_stride)[1];
  }
  // Columns of a split's sums in the workspace, padded so that each row is aligned for vectors.
  __device__ __forceinline__ int pitch() const { return (columns() + 7) / 8 * 8; }
  // Starts the store of 64 x 64 elements of C, which must be a plain matrix.
  __device__ __forceinline__ void store_box(const ptx::TensorMap& map, const Result* buffer, int row,
                                            int column) const {
    ptx::tma_store_2d(&map, buffer, group * columns() + column, row);
  }

 private:
  __device__ __forceinline__ long long filter_offset(int filter) const {
    return (group * p.filters + filter) * p.w_stride[0];
  }
  // Returns the columns of a window: the channels under its tap.
  __device__ __forceinline__ Line window(int position) const {
    const Tap<int> at = FilterWindows(p).at(position / LINE, p);
    const Tap<long long> tap = {at.c, at.t, at.r, at.s};
    return {position, static_cast<int>(p.channels) - at.c, tap_offset(tap, p.w_stride)};
  }
};

// The steps along k of a tile and its split, in units of BLOCK_K: the first step and the number of steps.
struct Steps {
  int first, count;

  __device__ __forceinline__ Steps(const Tile& tile, const ConvParameters& p,
                                   const Traversal<PHASES>& traversal) {
    const TraversalPhase& here = traversal.phase[tile.phase];
    const int taps = here.taps[0] * here.taps[1] * here.taps[2];
    const int all = PASS == 2 ? lines(p.batch * Image(here).pixels())
                              : taps * lines(PASS == 0 ? p.channels : p.filters);
    first = tile.split * traversal.steps_of_split;
    const int rest = all - first;
    count = rest < 0 ? 0 : rest < traversal.steps_of_split ? rest : traversal.steps_of_split;
  }
};

// -- producer ---------------------------------------------------------------------------------------

// A tap in the registers of the producer.
template <bool PACKED>
struct KeptTap {
  Tap<int> kept;

  __device__ __forceinline__ void keep(const Tap<int>& tap) { kept = tap; }
  __device__ __forceinline__ Tap<int> tap() const { return kept; }
};

// With BANDS, a tile has twice as many windows, and s is 0.  The limits of taps in hopper.py keep t below
// 2^16 and r below 2^8.
template <>
struct KeptTap<true> {
  int channel, t_and_r;

  __device__ __forceinline__ void keep(const Tap<int>& tap) {
    channel = tap.c, t_and_r = tap.t << 8 | tap.r;
  }
  __device__ __forceinline__ Tap<int> tap() const {
    return {channel, t_and_r >> 8, t_and_r & 255, 0};
  }
};

// Starts all loads.  One thread with few registers runs this code.  To save registers, the thread keeps
// only the boxes that this block loads, and counts steps down in backprop_filter, which needs the most
// registers.
struct Producer {
  SharedMemory& shared;
  const TensorMaps& maps;
  const ConvParameters& p;
  const Traversal<PHASES>& traversal;
  const Schedule& schedule;
  FilterLoader filter;
  Cursor<STAGES> cursor;
  unsigned long long* full;  // barrier of the stage that is being loaded

  __device__ __forceinline__ Stage& acquire() {
    wait_for(&shared.empty[cursor.stage], cursor.parity ^ 1);
    full = &shared.full[cursor.stage];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(Stage));
    return shared.stages[cursor.stage];
  }

#if PASS == 2
  // Loads operands of a product over pixels: LINE pixels per step, LINE channels or filters per box.
  __device__ __forceinline__ void load(const Tile& tile, const Steps& steps) {
    constexpr int A_BOXES = BLOCK_M / LINE, B_BOXES = BLOCK_N / LINE;
    const OwnBoxes<WINDOW_ROWS ? A_BOXES : B_BOXES, !WINDOW_ROWS> windows(schedule.rank);
    const OwnBoxes<WINDOW_ROWS ? B_BOXES : A_BOXES, WINDOW_ROWS> filters(schedule.rank);
    const int first_window = (WINDOW_ROWS ? tile.row : tile.column) / LINE + windows.first;
    const int first_filter = (WINDOW_ROWS ? tile.column : tile.row) + filters.first * LINE +
                             tile.group * static_cast<int>(p.filters);
    KeptTap<BANDS> window[windows.COUNT];
#pragma unroll
    for (int i = 0; i < windows.COUNT; ++i) {
      Tap<int> tap = FilterWindows(p).at(first_window + i, p);
      const bool exists = tap.c < static_cast<int>(p.channels);
      // A window beyond the last window reads zeros.  It begins at a multiple of LINE, since TMA requires
      // innermost coordinates that are multiples of 16 bytes.
      tap.c = exists ? tile.group * static_cast<int>(p.channels) + tap.c
                     : lines(p.groups * p.channels) * LINE;
      window[i].keep(tap);
    }
    const Image image(traversal.phase[0]);
    int number = steps.first * BLOCK_K;
    Pixel<int> pixel = image.at(number);
#pragma unroll 1
    for (int left = steps.count; left > 0; --left) {
#pragma unroll 1
      for (int product = 0; product < TERMS; ++product) {
        const Term term = term_at(product);
        Stage& stage = acquire();
        Storage* const under_taps = (WINDOW_ROWS ? stage.a : stage.b) + windows.first * BOX;
#pragma unroll
        for (int i = 0; i < windows.COUNT; ++i)
          load_gathered<LINE>(under_taps + i * BOX, 0, window[i].tap(), pixel, number,
                              WINDOW_ROWS ? term.a : term.b, windows.TO_BOTH);
        Storage* const other = (WINDOW_ROWS ? stage.b : stage.a) + filters.first * BOX;
        constexpr int AT_ONCE = BANDS ? filters.COUNT : 1;  // boxes of filters per load
#pragma unroll
        for (int i = 0; i < filters.COUNT; i += AT_ONCE) {
          const int filter = first_filter + i * LINE;
          if (PLANAR)
            load_line(other + i * BOX, maps.other, filter, pixel, filters.TO_BOTH);
          else
            load_box(other + i * BOX, maps.other, filter, number, WINDOW_ROWS ? term.b : term.a,
                     filters.TO_BOTH);
        }
        cursor.advance();
      }
      number += BLOCK_K;
      if (PLANAR)
        to_next_line(pixel, traversal.phase[0]);
      else
        pixel = image.at(number);
    }
  }
#else
  // Loads operands of a product over taps and channels (or filters), with channels fastest.
  __device__ __forceinline__ void load(const Tile& tile, const Steps& steps) {
    const TraversalPhase& here = traversal.phase[tile.phase];
    const int depth = static_cast<int>(PASS == 0 ? p.channels : p.filters);
    const Pixel<int> pixel = Image(here).at(tile.row);
    const long long taps[3] = {here.taps[0], here.taps[1], here.taps[2]};
    if (steps.count == 0) return;  // the phase has no taps
    Tap<int> tap = tap_at(steps.first, lines(depth), taps);
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      const int k = tap.c * BLOCK_K;
      const Tap<int> channels = {tile.group * depth + k, tap.t, tap.r, tap.s};
#pragma unroll 1
      for (int number = 0; number < TERMS; ++number) {
        const Term term = term_at(number);
        Stage& stage = acquire();
        load_gathered<BLOCK_M>(stage.a, tile.phase, channels, pixel, tile.row, term.a, false);
        filter.load(stage.b, full, tile, k, tap, term.b);
        cursor.advance();
      }
      next(tap, here, lines(depth));
    }
  }

  __device__ __forceinline__ static void next(Tap<int>& tap, const TraversalPhase& here, int blocks) {
    if (++tap.c < blocks) return;
    tap.c = 0;
    if (++tap.s < here.taps[2]) return;
    tap.s = 0;
    if (++tap.r < here.taps[1]) return;
    tap.r = 0;
    ++tap.t;
  }
#endif

 private:
  // Returns the coordinates of a base pixel, to which a load adds the offset of a tap.
  __device__ __forceinline__ Pixel<int> base_of(const Pixel<int>& pixel,
                                                const TraversalPhase& here) const {
    return {pixel.n, here.base[0] + pixel.d * traversal.stride[0],
            here.base[1] + pixel.h * traversal.stride[1], here.base[2] + pixel.w * traversal.stride[2]};
  }

  __device__ __forceinline__ void load_box(Storage* to, const ptx::TensorMap& map, int inner,
                                           int second, int third, bool to_both) {
    if (to_both)
      ptx::tma_load_3d_multicast(to, &map, full, inner, second, third, schedule.both_blocks());
    else
      ptx::tma_load_3d(to, &map, full, inner, second, third);
  }
  // Advances to the next line of pixels of PLANAR images.
  __device__ __forceinline__ static void to_next_line(Pixel<int>& line, const TraversalPhase& here) {
    if ((line.w += LINE) < here.pixels[2]) return;
    line.w = 0;
    if (++line.h < here.pixels[1]) return;
    line.h = 0;
    if (BANDS && ++line.d < here.pixels[0]) return;
    line.d = 0;
    ++line.n;
  }
  // Loads LINE pixels of a row, of LINE channels.
  __device__ __forceinline__ void load_line(Storage* to, const ptx::TensorMap& map, int channel,
                                            const Pixel<int>& at, bool to_both) {
#if SPATIAL == 1
    load_box(to, map, at.w, channel, at.n, to_both);
#else
    const int second = BANDS ? channel : at.h, third = BANDS ? at.h : channel;
    const int fourth = BANDS ? at.d : at.n;
    if (to_both)
      ptx::tma_load_4d_multicast(to, &map, full, at.w, second, third, fourth,
                                 schedule.both_blocks());
    else
      ptx::tma_load_4d(to, &map, full, at.w, second, third, fourth);
#endif
  }

  // Loads PIXELS pixels of a traversal (traversal.cuh) under a tap, with LINE channels from tap.c on.  The
  // first is `pixel`, and `number` is its index in the traversal.  In im2col mode, planes count as
  // additional images.
  template <int PIXELS>
  __device__ __forceinline__ void load_gathered(Storage* to, int phase, const Tap<int>& tap,
                                                const Pixel<int>& pixel, int number, int plane,
                                                bool to_both) {
    const TraversalPhase& here = traversal.phase[phase];
#if PLANAR
    const ptx::TensorMap& map = maps.gathered[MAPS > 1 ? tap.s : 0];
    Pixel<int> line = pixel;
#pragma unroll
    for (int first = 0; first < PIXELS; first += LINE) {
      Pixel<int> at = base_of(line, here);
      at.d += tap.t * traversal.spacing[0];
      at.h += tap.r * traversal.spacing[1];
      at.w += tap.s * traversal.spacing[2];
      load_line(to + first * LINE, map, tap.c, at, to_both);
      to_next_line(line, here);
    }
#elif POINTWISE
    load_box(to, maps.gathered[0], tap.c, number, plane, to_both);
#else
    const ptx::TensorMap* map = &maps.gathered[phase];
    const Pixel<int> base = base_of(pixel, here);
    const int image = base.n + plane * static_cast<int>(p.batch);
    const auto off_w = static_cast<unsigned short>(tap.s * traversal.spacing[2]);
#if SPATIAL == 1
    if (to_both)
      ptx::tma_load_im2col_3d_multicast(to, map, full, tap.c, base.w, image, off_w,
                                        schedule.both_blocks());
    else
      ptx::tma_load_im2col_3d(to, map, full, tap.c, base.w, image, off_w);
#else
    const auto off_h = static_cast<unsigned short>(tap.r * traversal.spacing[1]);
#if SPATIAL == 2
    if (to_both)
      ptx::tma_load_im2col_4d_multicast(to, map, full, tap.c, base.w, base.h, image, off_w, off_h,
                                        schedule.both_blocks());
    else
      ptx::tma_load_im2col_4d(to, map, full, tap.c, base.w, base.h, image, off_w, off_h);
#else
    const auto off_d = static_cast<unsigned short>(tap.t * traversal.spacing[0]);
    if (to_both)
      ptx::tma_load_im2col_5d_multicast(to, map, full, tap.c, base.w, base.h, base.d, image, off_w,
                                        off_h, off_d, schedule.both_blocks());
    else
      ptx::tma_load_im2col_5d(to, map, full, tap.c, base.w, base.h, base.d, image, off_w, off_h,
                              off_d);
#endif
#endif
#endif
  }
};

// -- consumers --------------------------------------------------------------------------------------

// Multiplies one warpgroup's rows of a tile.
struct Consumer {
  SharedMemory& shared;
  OperandA a;  // rows of this warpgroup in the first stage
  OperandB b;
  Cursor<STAGES> cursor;

  __device__ __forceinline__ Consumer(SharedMemory& shared, int first_row)
      : shared(shared),
        a(OperandA(shared.stages[0].a).from(first_row, 0)),
        b(shared.stages[0].b) {}

  // Skips the steps of a tile that the other warpgroup computes.
  __device__ __forceinline__ void pass_over(int steps) { cursor.advance_by(steps * TERMS); }

  // Computes the sums of the products of the next `steps` stages.  The products of a stage run while the
  // warpgroup waits for the next stage.
  __device__ __forceinline__ void multiply_steps(Sums& sums, int steps) {
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      wait_for(&shared.full[cursor.stage], cursor.parity);
      const unsigned stage = cursor.stage * sizeof(Stage);
      start_products(sums, a.further(stage), b.further(stage), step > 0);
      ptx::wgmma_wait<1>(sums);
      if (step > 0) release_in_cluster(&shared.empty[previous]);
      previous = cursor.stage;
      cursor.advance();
    }
    ptx::wgmma_wait<0>(sums);
    if (steps > 0) release_in_cluster(&shared.empty[previous]);
  }

  // Computes the products of all steps of a tile.
  __device__ __forceinline__ void multiply_tile(Sums& sums, int steps) {
    clear(sums);
#if PLANES == 1
    ptx::wgmma_keep(sums);  // a move after the loop would make the assembler wait for each product
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
};

#if SPLIT || CLUSTER_SPLITS > 1
static_assert(PHASES == 1, "an element of C is found in the only phase");

// Whether the product is the transpose of C.
constexpr bool TRANSPOSED = PASS == 2 && WINDOW_ROWS != FILTERS_LAST;

// Stores this warpgroup's sums of a tile to a matrix with the rows and columns of C.  Rows of the matrix are
// `pitch` elements apart.
__device__ __forceinline__ void store_partial(const Sums& sums, const Tile& tile,
                                              const Epilogue<Output>& epilogue, float* partial,
                                              int rows, int pitch) {
  const auto row_at = [&](int row) {
    if constexpr (TRANSPOSED) return row < pitch ? partial + row : nullptr;
    return row < rows ? partial + static_cast<long long>(row) * pitch : nullptr;
  };
  const auto same = [](int column) { return column; };
  epilogue.for_each_pair(sums, tile, row_at, same,
                         [&](float* row, int line, int place, const float(&pair)[2]) {
                           const int column = line + place;
                           if (row == nullptr) return;
                           if constexpr (!TRANSPOSED) {
                             if (column < pitch) store_piece(row + column, pair);
                             return;
                           }
#pragma unroll
                           for (int i = 0; i < 2; ++i)
                             if (column + i < rows)
                               row[static_cast<long long>(column + i) * pitch] = pair[i];
                         });
}

constexpr int COLUMNS = 8;  // adjacent columns of C whose splits a thread adds

// Adds the bias and the addend to sums of COLUMNS adjacent columns of C, applies the activation, and stores
// them.
__device__ __forceinline__ void store_added(float (&sums)[COLUMNS], const Output& output, int row,
                                            int column, const Result* bias, const Result* addend,
                                            Result* c) {
  const long long row_offset = output.row_offset(row, 0);
  if (row_offset == Output::BEYOND) return;
  const ConvParameters& p = output.p;
  const int first_channel = output.group * static_cast<int>(result_channels(p)) + column;
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) sums[i] += bias_of(first_channel + i, p, bias);
  const int place = column % LINE;
  const Line line = output.line(column - place);
  if (ADD) add_in_line(addend + row_offset, line, place, output, sums);
#pragma unroll
  for (float& sum : sums) sum = activate<ACTIVATION>(sum);
  store_in_line(c + row_offset, line, place, output, sums);
}
#endif

#if CLUSTER_SPLITS > 1
// Rows and columns of C in a tile, and elements from row to row of its sums in shared memory.  The padding
// avoids bank conflicts.
constexpr int TILE_ROWS = TRANSPOSED ? BLOCK_N : BLOCK_M;
constexpr int TILE_COLUMNS = TRANSPOSED ? BLOCK_M : BLOCK_N;
constexpr int TILE_PITCH = TILE_COLUMNS + (TRANSPOSED ? 4 : 8);
static_assert(TILE_ROWS * TILE_PITCH * sizeof(float) <= STAGES * sizeof(Stage), "stages hold the sums");

// Adds the sums of the cluster's splits in order.  Each block stores a part of the tile.
__device__ __forceinline__ void add_in_cluster(const Sums& sums, const Tile& tile,
                                               const Schedule& schedule, const Output& output,
                                               const Epilogue<Output>& epilogue, Result* c) {
  float* const partial = reinterpret_cast<float*>(epilogue.shared.stages);
  ptx::named_barrier_sync(1 + CONSUMERS, CONSUMERS * WARPGROUP);  // all products have read the stages
  Tile origin = tile;
  origin.row = origin.column = 0;
  store_partial(sums, origin, epilogue, partial, TILE_ROWS, TILE_PITCH);
  synchronise_cluster();  // the sums of all splits are in shared memory

  const int first_row = TRANSPOSED ? tile.column : tile.row;
  const int first_column = TRANSPOSED ? tile.row : tile.column;
  constexpr int PIECES = TILE_COLUMNS / COLUMNS;  // per row
  constexpr int THREADS_OF_CLUSTER = CONSUMERS * WARPGROUP * CLUSTER_SPLITS;
#pragma unroll 1
  for (int piece = schedule.split * CONSUMERS * WARPGROUP + static_cast<int>(threadIdx.x);
       piece < TILE_ROWS * PIECES; piece += THREADS_OF_CLUSTER) {
    const int row = piece / PIECES, column = piece % PIECES * COLUMNS;
    const unsigned own = ptx::shared_address(partial + row * TILE_PITCH + column);
    float parts[CLUSTER_SPLITS][COLUMNS / 4][4], added[COLUMNS] = {};
#pragma unroll
    for (int split = 0; split < CLUSTER_SPLITS; ++split)
#pragma unroll
      for (int i = 0; i < COLUMNS / 4; ++i)
        ptx::load_cluster_f32x4(
            parts[split][i],
            ptx::map_to_block(own, split * CLUSTER + schedule.rank) + i * sizeof(parts[0][0]));
#pragma unroll
    for (const auto& part : parts)
#pragma unroll
      for (int i = 0; i < COLUMNS; ++i) added[i] += part[i / 4][i % 4];
    store_added(added, output, first_row + row, first_column + column, epilogue.bias, epilogue.addend,
                c);
  }
}
#endif

// -- kernels ----------------------------------------------------------------------------------------

// c is y, dx or dw.  bias is added to y or dx, and may be null; the addend is read with ADD only.  partial
// is the workspace of SPLIT.
extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(THREADS, 1)
    conv_hopper(const Result* bias, const Result* addend, Result* c, float* partial,
                const __grid_constant__ TensorMaps maps,
                const __grid_constant__ Traversal<PHASES> traversal,
                const __grid_constant__ ConvParameters p) {
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);
  if (threadIdx.x == CONSUMERS * WARPGROUP) maps.prefetch();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      ptx::mbarrier_init(&shared.full[stage], 1);
      ptx::mbarrier_init(&shared.empty[stage], CLUSTER * CONSUMERS_OF_TILE * WARPGROUP / 32);
    }
    for (auto& barrier : shared.turn) ptx::mbarrier_init(&barrier, WARPGROUP / 32);
    ptx::fence_mbarrier_init();
  }
  synchronise_cluster();  // no block loads into another block whose barriers are not ready
  ptx::griddepcontrol_wait();  // no thread reads or writes global memory before this wait

  const Schedule schedule;
  const int warpgroup = warpgroup_of_thread();
  if (warpgroup == CONSUMERS) {
    ptx::setmaxnreg_dec<40>();
    if (threadIdx.x < CONSUMERS * WARPGROUP + 32 && ptx::elect_one()) {
      const FilterLoader filter = {maps.other, p, traversal, schedule};
      Producer producer = {shared, maps, p, traversal, schedule, filter};
      for (int number = schedule.first, step = schedule.first_step(); number < traversal.tiles;
           number += step, step = schedule.step_after(step)) {
        const Tile tile(number, schedule, p, traversal);
        producer.load(tile, Steps(tile, p, traversal));
        if (CLUSTER_SPLITS > 1) break;  // these blocks compute one tile
      }
    }
#if CLUSTER_SPLITS > 1
    synchronise_cluster();  // as add_in_cluster
#endif
  } else {
    ptx::setmaxnreg_inc<CONSUMERS == 2 ? 232 : 152>();
    const int first_row = TURNS ? 0 : warpgroup * CONSUMER_ROWS;
    Consumer consumer(shared, first_row);
    Epilogue<Output> epilogue = {shared, bias, addend, p, warpgroup, first_row};
    Turn turn(shared.turn, warpgroup);
    int next = 0;  // warpgroup whose turn it is
#pragma unroll 1
    for (int number = schedule.first, step = schedule.first_step(); number < traversal.tiles;
         number += step, step = schedule.step_after(step)) {
      const Tile tile(number, schedule, p, traversal);
      const int steps = Steps(tile, p, traversal).count;
      if (TURNS && warpgroup != next++ % CONSUMERS) {
        consumer.pass_over(steps);
        continue;
      }
      Sums sums;
      float biases[Epilogue<Output>::BIASES];
      epilogue.load_biases(biases, tile);
      if (TURNS) turn.wait();
      consumer.multiply_tile(sums, steps);
      if (TURNS) turn.pass_on();
      const Output output = {p, traversal, tile.group};
#if CLUSTER_SPLITS > 1
      add_in_cluster(sums, tile, schedule, output, epilogue, c);
      break;  // these blocks compute one tile
#elif SPLIT
      const int rows = output.rows(tile.phase), pitch = output.pitch();
      const long long matrix = tile.split * p.groups + tile.group;
      store_partial(sums, tile, epilogue, partial + matrix * rows * pitch, rows, pitch);
#else
      epilogue.share_biases(biases);
      epilogue.store(sums, tile, output, maps.c, c);
#endif
    }
    epilogue.finish();
  }
#if CLUSTER_BLOCKS > 1
  synchronise_cluster();  // no block ends while another block may still access its shared memory
#endif
}

#if SPLIT
// Adds the splits' sums in order, one thread per eight columns of C.
extern "C" __global__ void __launch_bounds__(ADDING_THREADS, 1)
    conv_hopper_reduce(const float* partial, const Result* bias, const Result* addend, Result* c,
                       const int splits,
                       const __grid_constant__ Traversal<PHASES> traversal,
                       const __grid_constant__ ConvParameters p) {
  const Output all = {p, traversal, 0};
  const int pitch = all.pitch();
  const long long matrix = static_cast<long long>(all.rows(0)) * pitch;
  const long long elements = p.groups * matrix;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const long long element = thread * COLUMNS;
  if (element >= elements) return;

  ptx::griddepcontrol_wait();  // no thread reads or writes global memory before this wait
  float sums[COLUMNS];
  add_partial_sums(sums, partial + element, splits, elements);
  const Output output = {p, traversal, static_cast<int>(element / matrix)};
  const int row = static_cast<int>(element % matrix / pitch);
  const int column = static_cast<int>(element % pitch);
  store_added(sums, output, row, column, bias, addend, c);
}
#endif
