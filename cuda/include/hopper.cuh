// What conv_hopper.cu is made of: tiles that blocks take in turn, positions in a ring of stages, the
// filter's part of an operand, products of warpgroups, and the way of C from registers to memory.
//
// The kernel says with macros what it computes (PASS, STORAGE, RESULT, BLOCK_M, BLOCK_N, CLUSTER,
// STAGES, PLANES, PHASES, MAPS, PLANAR, FILTERS_LAST, STORE, RUN, ACTIVATION, as conv_hopper.cu
// explains them), where rows of C lie in memory (Output), and what its producer loads.
#ifndef CUPYCONV_HOPPER_CUH
#define CUPYCONV_HOPPER_CUH

#include "epilogue.cuh"
#include "maps.cuh"
#include "numeric.cuh"
#include "vector.cuh"
#include "walk.cuh"

using Storage = STORAGE;
using Result = RESULT;

// How C is stored: 16-bit types through shared memory, by threads in pieces of its rows or of its
// columns or, where C is a plain matrix, in boxes by TMA; float from registers.  Pieces are runs of
// RUN elements that are neighbours in memory.
#define STORE_ROWS 0
#define STORE_BOXES 1
#define STORE_FLOAT 2
#define STORE_COLUMNS 3

constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
// Whether warpgroups take whole tiles in turn, so that one multiplies while the other one stores:
// where a tile's products are so few that storing is long beside them.
constexpr bool TURNS = BLOCK_N == 64 && PLANES == 1;
constexpr int CONSUMERS_OF_TILE = TURNS ? 1 : CONSUMERS;
constexpr int CONSUMER_ROWS = BLOCK_M / CONSUMERS_OF_TILE;
constexpr int PRODUCTS = CONSUMER_ROWS / 64;
constexpr int BAND = 8;

// Elements of one line of a tile in shared memory, 128 bytes: what the swizzle spans, and as many as
// a TMA box or a step along k takes at once.
constexpr int LINE = 128 / sizeof(Storage);
constexpr int BLOCK_K = LINE;
constexpr int BOX = LINE * LINE;
static_assert(CONSUMER_ROWS % 64 == 0 && BLOCK_N % 64 == 0, "whole products, and whole boxes");

// Whether an operand's lines run along m or n, not along k.
constexpr bool A_LINES_ALONG_M = (PASS == 2) != (PLANAR != 0);
constexpr bool B_LINES_ALONG_N = PASS == 2 ? !PLANAR : (PASS == 0) == (FILTERS_LAST != 0);
static_assert(CLUSTER == 1 || !B_LINES_ALONG_N || BLOCK_N % 128 == 0, "B is loaded in two halves");
static_assert(sizeof(Storage) == 2 || !B_LINES_ALONG_N, "TF32 operands have lines along k");
static_assert(sizeof(Result) == 2 ? LINE == 64 : STORE == STORE_FLOAT, "64 columns go out at once");

struct alignas(1024) Stage {
  Storage a[BLOCK_M * BLOCK_K];
  Storage b[BLOCK_N * BLOCK_K];
};

// Holds 64 x 64 elements of C on their way out.
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

// Tensor maps: what is gathered under taps (for each phase, or for each tap along a row), the other
// operand, and C.
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

// -- stages and blocks ------------------------------------------------------------------------------

// The calling thread's warpgroup; from one lane, so that the compiler knows it to be the warp's.
__device__ __forceinline__ int warpgroup_of_thread() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / WARPGROUP, 0);
}

__device__ __forceinline__ void wait_for(unsigned long long* barrier, unsigned parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// A position in a ring of stages, and the parity of the barriers' phase there.
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

// Tells the producer of this block that the calling warp has read a stage.
__device__ __forceinline__ void release(unsigned long long* empty) {
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty);
}

// A warpgroup's turn to multiply.  A parity tells a round only from the one before.  A warpgroup that
// skips a tile has not waited for its stages, so an older round would look full to it: it waits until
// the other one, which has, passes the turn on.
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

// Tells the producers of all blocks that share the stage.
__device__ __forceinline__ void release_in_cluster(unsigned long long* empty) {
#if CLUSTER > 1
  if (threadIdx.x % 32 != 0) return;
  const unsigned address = ptx::shared_address(empty);
#pragma unroll
  for (unsigned block = 0; block < CLUSTER; ++block)
    ptx::mbarrier_arrive_cluster(ptx::map_to_block(address, block));
#else
  release(empty);
#endif
}

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

// The boxes of an operand that this block loads: of B in a cluster, half of them, for both blocks.
template <int BOXES, bool IS_B>
struct OwnBoxes {
  static constexpr bool TO_BOTH = IS_B && CLUSTER > 1;
  static constexpr int COUNT = TO_BOTH ? BOXES / CLUSTER : BOXES;
  int first;

  __device__ __forceinline__ explicit OwnBoxes(int rank) : first(TO_BOTH ? rank * COUNT : 0) {}
};

constexpr unsigned short BOTH_BLOCKS = 3;

// -- the filter -------------------------------------------------------------------------------------

// Loads B, which is the filter in the forward pass and in backprop_input.
struct FilterLoader {
  const ptx::TensorMap& map;
  const ConvParameters& p;
  const Walk<PHASES>& walk;
  int rank;

  // BLOCK_N by BLOCK_K of w under one tap of a phase.
  __device__ __forceinline__ void load(Storage* b, unsigned long long* full, const Tile& tile,
                                       int k, const Tap<int>& tap, int plane) const {
    const int first_filter = tile.group * static_cast<int>(p.filters);
    const int number = number_of(tap, walk.phase[tile.phase]);
    if constexpr (PASS == 1) k += first_filter;
    const int n = tile.column + (PASS == 0 ? first_filter : 0);
    if constexpr (B_LINES_ALONG_N) {
      const OwnBoxes<BLOCK_N / LINE, true> boxes(rank);
#pragma unroll
      for (int i = boxes.first; i < boxes.first + boxes.COUNT; ++i)
        load_box(b + i * BOX, full, n + i * LINE, k, number, plane, boxes.TO_BOTH);
    } else {
      constexpr int SHARE = BLOCK_N / CLUSTER;
      load_box(b + rank * SHARE * BLOCK_K, full, k, n + rank * SHARE, number, plane, CLUSTER > 1);
    }
  }

 private:
  // The number in the filter of a tap of the phase.
  __device__ __forceinline__ int number_of(const Tap<int>& tap, const WalkPhase& here) const {
    const int t = here.filter_first[0] + tap.t * walk.filter_step[0];
    const int r = here.filter_first[1] + tap.r * walk.filter_step[1];
    const int s = here.filter_first[2] + tap.s * walk.filter_step[2];
    return (t * static_cast<int>(p.filter[1]) + r) * static_cast<int>(p.filter[2]) + s;
  }
  // The map's dimensions are w's in memory order, (filter, channel, tap) or (channel, tap, filter),
  // and planes.
  __device__ __forceinline__ void load_box(Storage* to, unsigned long long* full, int inner,
                                           int outer, int tap, int plane, bool to_both) const {
    const int second = FILTERS_LAST ? outer : tap, third = FILTERS_LAST ? tap : outer;
    if (to_both)
      ptx::tma_load_4d_multicast(to, &map, full, inner, second, third, plane, BOTH_BLOCKS);
    else
      ptx::tma_load_4d(to, &map, full, inner, second, third, plane);
  }
};

// -- products ---------------------------------------------------------------------------------------

// An operand in shared memory as wgmma is told of it: a descriptor, whose lower half counts in 16
// bytes, so that one of what lies further on is a sum and not worked out anew.
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
  // From a position (a row of A, a column of B) and a k of the step on.  Lines along positions are
  // in boxes, in which they follow each other by k.
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

// One thread's sums of a tile: of each product, BLOCK_N columns of 64 rows in a warpgroup.
using Sums = float[PRODUCTS][BLOCK_N / 2];

// Starts a step's products, BLOCK_K along k, of this thread's rows of A from the operand's first.
__device__ __forceinline__ void start_products(Sums& sums, OperandA a, OperandB b, bool keep) {
  ptx::wgmma_fence();
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

// -- the way of C to memory -------------------------------------------------------------------------

__device__ __forceinline__ unsigned packed(float low, float high, half_t) {
  return ptx::f16x2_from_f32(low, high);
}
__device__ __forceinline__ unsigned packed(float low, float high, bfloat16_t) {
  return ptx::bf16x2_from_f32(low, high);
}

// Channels of a group of y or dx.
__device__ __forceinline__ long long result_channels(const ConvParameters& p) {
  return PASS == 0 ? p.filters : p.channels;
}

// The bias of a channel of y or dx.  Where there is none: minus zero, which changes no sum.
__device__ __forceinline__ float bias_of(int channel, const ConvParameters& p, const Result* bias) {
  if (PASS == 2 || bias == nullptr || channel >= p.groups * result_channels(p)) return -0.0f;
  return Numeric<Result>::widen(bias[channel * p.bias_stride]);
}

// Columns of C from one on, a constant step apart: how many of them there are, and their offset.
struct Line {
  int column, count;
  long long offset;
};

// Stores COUNT sums, the first of which is in a column of a line, a run at a time.
template <int COUNT>
__device__ __forceinline__ void store_in_line(Result* row, const Line& line, int column,
                                              long long column_step, const float (&sums)[COUNT]) {
  static_assert(COUNT % RUN == 0, "whole runs");
#pragma unroll
  for (int first = 0; first < COUNT; first += RUN) {
    if (column + first >= line.count) return;
    float run[RUN];
#pragma unroll
    for (int i = 0; i < RUN; ++i) run[i] = sums[first + i];
    store_piece(row + line.offset + (column + first) * column_step, run);
  }
}

// One warpgroup's way out for its rows of a tile.  Output says where elements of C lie:
//
//   row_offset(row, phase)                          BEYOND: none
//   line(column)                                    up to LINE columns from there on
//   columns()                                       of C, in a group
//   column_step()                                   from one column to the next in a line
//   store_box(map, buffer, row, column)             starts the store of 64 x 64
template <class Output>
struct Epilogue {
  SharedMemory& shared;
  const Result* bias;  // null: none
  const ConvParameters& p;
  int number;     // of the warpgroup
  int first_row;  // of its rows in a tile
  int next_buffer = 0;

  static constexpr int BIASES = (BLOCK_N + WARPGROUP - 1) / WARPGROUP;  // of a thread
  // Where an activation is long, biases are added even where there are none: for a branch the
  // compiler would write it down twice.
  static constexpr bool ALWAYS_BIASED = ACTIVATION == ACTIVATION_SILU || ACTIVATION == ACTIVATION_GELU;

  __device__ __forceinline__ bool is_biased() const {
    return PASS != 2 && (ALWAYS_BIASED || bias != nullptr);
  }

  __device__ __forceinline__ int thread() const { return threadIdx.x % WARPGROUP; }

  // Loads this thread's part of the tile's biases: before the products, which hide how long it takes.
  __device__ __forceinline__ void load_biases(float (&own)[BIASES], const Tile& tile) const {
    const int first = tile.group * static_cast<int>(result_channels(p)) + tile.column + thread();
#pragma unroll
    for (int i = 0; i < BIASES; ++i) own[i] = bias_of(first + i * WARPGROUP, p, bias);
  }
  // Gives them to the warpgroup.
  __device__ __forceinline__ void share_biases(const float (&own)[BIASES]) {
    if (!is_biased()) return;
    ptx::named_barrier_sync(1 + number, WARPGROUP);  // those of the tile before are read
#pragma unroll
    for (int i = 0; i < BIASES; ++i)
      if (thread() + i * WARPGROUP < BLOCK_N)
        shared.bias[number][thread() + i * WARPGROUP] = own[i];
    ptx::named_barrier_sync(1 + number, WARPGROUP);
  }
  // What becomes of a sum in a column of the tile.
  __device__ __forceinline__ float finished(float sum, int column) const {
    if (is_biased()) sum += shared.bias[number][column];
    return activate<ACTIVATION>(sum);
  }

#if STORE != STORE_FLOAT
  // Rounds 64 x 64 sums and writes them to a buffer of 64 lines, rows of C or its columns, swizzled
  // as the tensor map of C says.
  __device__ __forceinline__ void stage_out(Result* buffer, const float (&sums)[BLOCK_N / 2],
                                            int chunk) {
    const int lane = threadIdx.x % 32, warp = thread() / 32;
#pragma unroll
    for (int column = 0; column < 64; column += 16) {
      unsigned registers[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int right = i / 2 * 8 + lane % 4 * 2;  // of the first column
        const int place = chunk * 64 + column + right;
        const float* pair = &sums[chunk * 32 + column / 2 + i / 2 * 4 + i % 2 * 2];
        registers[i] = packed(finished(pair[0], place), finished(pair[1], place + 1), Result{});
      }
#if STORE == STORE_COLUMNS
      const int line = column + lane / 16 * 8 + lane % 8, piece = warp * 2 + lane / 8 % 2;
      ptx::stmatrix_x4_trans(buffer + line * 64 + (piece ^ line % 8) * 8, registers);
#else
      const int line = warp * 16 + lane % 16, piece = column / 8 + lane / 16;
      ptx::stmatrix_x4(buffer + line * 64 + (piece ^ line % 8) * 8, registers);
#endif
    }
  }

  // Which lines of a buffer this thread stores, and which runs of each.  Neighbouring threads take
  // neighbouring runs; where runs are short, rather those of one line, since rows cost divisions.
  static constexpr int THREADS_OF_LINE = STORE == STORE_ROWS || RUN == 8 ? 8 : RUN == 4 ? 16 : 32;
  static constexpr int LINES_OF_THREAD = 64 * THREADS_OF_LINE / WARPGROUP;
  static constexpr int RUNS_OF_THREAD = 64 / (THREADS_OF_LINE * RUN);

  __device__ __forceinline__ int line_of(int number) const {
    return thread() / THREADS_OF_LINE + number * (WARPGROUP / THREADS_OF_LINE);
  }
  // The run's first element in its line.
  __device__ __forceinline__ int run_of(int number) const {
    return (number * THREADS_OF_LINE + thread() % THREADS_OF_LINE) * RUN;
  }

  // The rows of C, 64 x 64 at a time through two buffers in turn.
  __device__ __forceinline__ void store(const Sums& sums, const Tile& tile, const Output& output,
                                        const ptx::TensorMap& map, Result* c) {
    const int columns = output.columns() - tile.column;
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i) {
      const int row = tile.row + first_row + i * 64;
#if STORE != STORE_BOXES
      long long offsets[STORE == STORE_ROWS ? LINES_OF_THREAD : RUNS_OF_THREAD];  // of rows
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
        stage_out(buffer, sums[i], chunk);
#if STORE == STORE_BOXES
        ptx::fence_proxy_async();
        if (thread() == 0) ptx::tma_store_wait_read<0>();  // the other buffer is free again
        ptx::named_barrier_sync(1 + number, WARPGROUP);    // this one is complete
        if (thread() == 0) {
          output.store_box(map, buffer, row, tile.column + chunk * 64);
          ptx::tma_store_commit();
        }
#else
        ptx::named_barrier_sync(1 + number, WARPGROUP);  // complete, and the other is read
        const Line line = output.line(tile.column + chunk * 64);
#pragma unroll 4
        for (int j = 0; j < LINES_OF_THREAD; ++j)
#pragma unroll
          for (int k = 0; k < RUNS_OF_THREAD; ++k) {
            const long long row_offset = offsets[STORE == STORE_ROWS ? j : k];
            const int column = STORE == STORE_ROWS ? run_of(k) : line_of(j);
            if (row_offset == Output::BEYOND || column >= line.count) continue;
            using Run = Piece<Result, RUN>;
            const int piece = run_of(k) / 8 ^ line_of(j) % 8;
            Result* const place = c + row_offset + line.offset + column * output.column_step();
            *reinterpret_cast<Run*>(place) = *reinterpret_cast<const Run*>(
                buffer + line_of(j) * 64 + piece * 8 + run_of(k) % 8);
          }
#endif
      }
    }
  }
#else
  // The rows of C in float, straight from registers: four lanes fill a sector of memory.
  __device__ __forceinline__ void store(const Sums& sums, const Tile& tile, const Output& output,
                                        const ptx::TensorMap&, float* c) const {
    const auto offset_of = [&](int row) { return output.row_offset(row, tile.phase); };
    const auto line_at = [&](int column) { return output.line(column); };
    for_each_pair(sums, tile, offset_of, line_at,
                  [&](long long row, const Line& line, int place, const float(&pair)[2]) {
                    if (row == Output::BEYOND) return;
                    const int column = line.column - tile.column + place;
                    const float done[2] = {finished(pair[0], column), finished(pair[1], column + 1)};
                    store_in_line(c + row, line, place, output.column_step(), done);
                  });
  }
#endif

  // Calls use(of_row(row), of_line(column), place, pair) for this thread's sums, in pairs of
  // neighbouring columns of C: those at a place in the LINE columns from one on.  Those of a column
  // follow each other; of_row and of_line are called once for each row and line.
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

  // To be called before the kernel ends.
  __device__ __forceinline__ void finish() const {
#if STORE == STORE_BOXES
    if (thread() == 0) ptx::tma_store_wait<0>();
#endif
  }
};

#endif
