// Tensor-core gather: the three passes as implicit GEMMs on mma.sync, for 16-bit types, float32
// rounded to tf32, and float64.
//
// What it adds over the generic kernels: products on the tensor cores, a ring of STAGES
// shared-memory stages that cp.async fills ahead of use (8.0 and later; 7.5 copies through
// registers), stride phases in backprop-input, and a deterministic split of gemm_k.
//
//   pass             gemm_m          gemm_n            gemm_k          A          B
//   forward          output pixels   filters           taps            im2col(x)  w
//   backprop_input   input pixels    channels          taps * filters  dy         w
//   backprop_filter  filters         taps * channels   output pixels   dy         im2col(x)
//
// with taps numbered channel-fastest.  An operand comes in pieces of A_VECTOR or B_VECTOR elements
// that are neighbours in memory, along k (A_ALONG_K, B_ALONG_K) or along m and n.  A piece's
// address is the sum of two halves, one of its line and one of its place in the line; both are
// worked out once per block, or once per step of k, into small shared-memory tables.
//
// Pixels come in pieces too, in NCHW: those of the output as it is stored and as dy is summed, and
// those of the input under a 1 x 1 filter of stride 1 without padding, where they follow each other
// in memory.  That makes such a layer a plain matrix product, with 16-byte copies in either order of
// memory; the tables then cost an addition and a comparison for each piece, about an eighth of a
// step's instructions.
//
// A first layer of 3 channels is copied element by element: a row of the filter reads S * C
// neighbours, but from (q * stride - pad) * C on, which is odd as often as not, and cp.async can
// leave out the tail of a piece, not its head.  Forward and backprop_filter of such layers are better
// left to conv_patch.cu, which copies the input under a tile once.
//
// In backprop_input each stride phase (maps.cuh) is a dense problem with its own pixels and taps;
// all phases are tiles of one launch.  With SPLIT, gemm_k is shared out over blockIdx.y; each split
// writes its sums to a workspace and conv_gather_reduce adds them in order, so the bits never
// depend on scheduling.
//
// A variant is chosen with -D: PASS (0, 1, 2 as in the table), STORAGE, INDEX, BLOCK_M, BLOCK_N,
// BLOCK_K, WARPS_M, WARPS_N, STAGES, A_ALONG_K, A_VECTOR, B_ALONG_K, B_VECTOR, C_ALONG_N, C_VECTOR,
// SPLIT, ASYNC_COPY, ACTIVATION (epilogue.cuh; of the forward pass).
#include "epilogue.cuh"
#include "maps.cuh"
#include "numeric.cuh"
#include "ring.cuh"
#include "vector.cuh"

using Index = INDEX;
using Storage = STORAGE;
using Accumulator = typename Numeric<Storage>::Accumulator;

constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N;
constexpr int DEPTH = Fragments<Storage>::DEPTH;
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0 && BLOCK_K % DEPTH == 0, "whole fragments only");

// -- operands --------------------------------------------------------------------------------------

// Half an address of an operand that gathers pixels under taps.
using Gathered = Place<Index>;

// Half an address of an operand that just adds offsets.  Whether its line or place exists is said
// apart from the offset, which is any number: views have negative strides, and zeros.
struct alignas(2 * sizeof(Index)) Dense {
  Index offset;
  Index exists;  // 1 or 0; as wide as the offset, so that both are one load

  __device__ __forceinline__ Dense() {}
  __device__ __forceinline__ Dense(Index offset_) : offset(offset_), exists(1) {}
};

// The halves of a line or a place beyond the end of the matrix.  A coordinate that is BEYOND stays
// negative under any tap, since coordinates are less than half of what Index holds
// (cupyconv/gpu/parameters.py); two of them still add up without overflow.
constexpr Index BEYOND = -(Index(1) << (8 * sizeof(Index) - 2));
__device__ __forceinline__ void set_beyond(Gathered& half) { half = {0, BEYOND, 0, 0}; }
__device__ __forceinline__ void set_beyond(Dense& half) { half.offset = half.exists = 0; }

struct DenseOperand {
  __device__ __forceinline__ bool locate(const Dense& a, const Dense& b, Index& offset) const {
    offset = a.offset + b.offset;
    return a.exists & b.exists;
  }
};

__device__ __forceinline__ Index narrowed(long long value) { return static_cast<Index>(value); }

// -- passes: sizes, and the halves of every address in A, B and C -----------------------------------

#if PASS == 1
using PassPhase = Phase<Index>;
#else
struct PassPhase {  // one, with nothing to know
  __device__ __forceinline__ PassPhase() {}
  __device__ __forceinline__ PassPhase(const ConvParameters&, Index) {}
};
#endif

#if PASS == 0

struct Pass {
  using AHalf = Gathered;
  using BHalf = Dense;
  const ConvParameters& p;
  WindowGather<Index> a;
  DenseOperand b;
  Index gemm_m, gemm_n, gemm_k;
  Index group_a, group_b, group_c;  // elements from one group to the next

  __device__ __forceinline__ Pass(const ConvParameters& parameters, const PassPhase&)
      : p(parameters),
        a{parameters},
        gemm_m(narrowed(p.batch * p.output[0] * p.output[1] * p.output[2])),
        gemm_n(narrowed(p.filters)),
        gemm_k(narrowed(p.filter[0] * p.filter[1] * p.filter[2] * p.channels)),
        group_a(narrowed(p.channels * p.x_stride[1])),
        group_b(narrowed(p.filters * p.w_stride[0])),
        group_c(narrowed(p.filters * p.y_stride[1])) {}

  static __device__ __forceinline__ Index phases(const ConvParameters&) { return 1; }

  __device__ __forceinline__ Tap<Index> tap(Index k) const {
    return tap_at(k, narrowed(p.channels), p.filter);
  }
  __device__ __forceinline__ Gathered a_row(Index m) const {
    return a.of_pixel(pixel_at(m, p.output));
  }
  __device__ __forceinline__ Gathered a_step(Index k) const { return a.of_tap(tap(k)); }
  __device__ __forceinline__ Dense b_column(Index n) const { return {n * narrowed(p.w_stride[0])}; }
  __device__ __forceinline__ Dense b_step(Index k) const { return {tap_offset(tap(k), p.w_stride)}; }
  __device__ __forceinline__ Index c_row(Index m) const {
    return pixel_offset(pixel_at(m, p.output), p.y_stride);
  }
  __device__ __forceinline__ Index c_column(Index n) const { return n * narrowed(p.y_stride[1]); }
};

#elif PASS == 1

struct Pass {
  using AHalf = Gathered;
  using BHalf = Dense;
  const ConvParameters& p;
  PhaseGather<Index> a;
  DenseOperand b;
  Index gemm_m, gemm_n, gemm_k;
  Index group_a, group_b, group_c;

  __device__ __forceinline__ Pass(const ConvParameters& parameters, const PassPhase& phase)
      : p(parameters),
        a{parameters, phase},
        gemm_m(a.pixels()),
        gemm_n(narrowed(p.channels)),
        gemm_k(a.taps() * narrowed(p.filters)),
        group_a(narrowed(p.filters * p.y_stride[1])),
        group_b(narrowed(p.filters * p.w_stride[0])),
        group_c(narrowed(p.channels * p.x_stride[1])) {}

  static __device__ __forceinline__ Index phases(const ConvParameters& p) {
    return narrowed(p.stride[0] * p.stride[1] * p.stride[2]);
  }

  __device__ __forceinline__ Gathered a_row(Index m) const { return a.of_pixel(a.pixel(m)); }
  __device__ __forceinline__ Gathered a_step(Index k) const { return a.of_tap(a.tap(k)); }
  __device__ __forceinline__ Dense b_column(Index n) const { return {n * narrowed(p.w_stride[1])}; }
  __device__ __forceinline__ Dense b_step(Index k) const {
    Tap<Index> tap = a.in_filter(a.tap(k));
    const Index filter = tap.c;
    tap.c = 0;
    return {tap_offset(tap, p.w_stride) + filter * narrowed(p.w_stride[0])};
  }
  __device__ __forceinline__ Index c_row(Index m) const {
    return pixel_offset(a.in_input(a.pixel(m)), p.x_stride);
  }
  __device__ __forceinline__ Index c_column(Index n) const { return n * narrowed(p.x_stride[1]); }
};

#else

struct Pass {
  using AHalf = Dense;
  using BHalf = Gathered;
  const ConvParameters& p;
  DenseOperand a;
  WindowGather<Index> b;
  Index gemm_m, gemm_n, gemm_k;
  Index group_a, group_b, group_c;

  __device__ __forceinline__ Pass(const ConvParameters& parameters, const PassPhase&)
      : p(parameters),
        b{parameters},
        gemm_m(narrowed(p.filters)),
        gemm_n(narrowed(p.filter[0] * p.filter[1] * p.filter[2] * p.channels)),
        gemm_k(narrowed(p.batch * p.output[0] * p.output[1] * p.output[2])),
        group_a(narrowed(p.filters * p.y_stride[1])),
        group_b(narrowed(p.channels * p.x_stride[1])),
        group_c(narrowed(p.filters * p.w_stride[0])) {}

  static __device__ __forceinline__ Index phases(const ConvParameters&) { return 1; }

  __device__ __forceinline__ Tap<Index> tap(Index n) const {
    return tap_at(n, narrowed(p.channels), p.filter);
  }
  __device__ __forceinline__ Dense a_row(Index m) const { return {m * narrowed(p.y_stride[1])}; }
  __device__ __forceinline__ Dense a_step(Index k) const {
    return {pixel_offset(pixel_at(k, p.output), p.y_stride)};
  }
  __device__ __forceinline__ Gathered b_column(Index n) const { return b.of_tap(tap(n)); }
  __device__ __forceinline__ Gathered b_step(Index k) const {
    return b.of_pixel(pixel_at(k, p.output));
  }
  __device__ __forceinline__ Index c_row(Index m) const { return m * narrowed(p.w_stride[0]); }
  __device__ __forceinline__ Index c_column(Index n) const {
    return tap_offset(tap(n), p.w_stride);
  }
};

#endif

// -- which tile -------------------------------------------------------------------------------------

// Blocks are numbered by group, stride phase, row and column of tiles, with columns fastest.
struct BlockTile {
  Index group, phase, row, column;  // row and column of the tile's first element

  __device__ __forceinline__ explicit BlockTile(const ConvParameters& p) {
    const Index phases = Pass::phases(p);
    Index blocks_of_group = 0;
    for (phase = 0; phase < phases; ++phase) blocks_of_group += blocks(p, phase);
    Index block = static_cast<Index>(blockIdx.x);
    group = block / blocks_of_group;
    block %= blocks_of_group;
    for (phase = 0; phase + 1 < phases; ++phase) {
      const Index here = blocks(p, phase);
      if (block < here) break;
      block -= here;
    }
    const PassPhase chosen(p, phase);
    const Index columns = (Pass(p, chosen).gemm_n + BLOCK_N - 1) / BLOCK_N;
    row = block / columns * BLOCK_M;
    column = block % columns * BLOCK_N;
  }

  static __device__ __forceinline__ Index blocks(const ConvParameters& p, Index number) {
    const PassPhase phase(p, number);
    const Pass pass(p, phase);
    return (pass.gemm_m + BLOCK_M - 1) / BLOCK_M * ((pass.gemm_n + BLOCK_N - 1) / BLOCK_N);
  }
};

// -- tiles in shared memory -------------------------------------------------------------------------

// The tile of one operand, EXTENT positions by BLOCK_K, with the tables of its two halves.  Lines
// run along k or along positions, and are filled in pieces of VECTOR elements.
//
// The entries of a step are made by the block's first threads, or, for the other operand, by its
// last, which are of another warp.
template <class Half, int EXTENT, bool ALONG_K, int VECTOR, bool BY_LAST_THREADS>
struct Operand {
  using Tile =
      RingTile<Storage, ALONG_K ? EXTENT : BLOCK_K, ALONG_K ? BLOCK_K : EXTENT, ALONG_K>;
  static constexpr int PIECES = Tile::LINE / VECTOR;
  static constexpr int POSITIONS = ALONG_K ? EXTENT : EXTENT / VECTOR;  // entries of the tables
  static constexpr int STEPS = ALONG_K ? BLOCK_K / VECTOR : BLOCK_K;
  static_assert(THREADS % PIECES == 0 && Tile::LINES % (THREADS / PIECES) == 0, "equal shares");
  static_assert(THREADS >= STEPS, "one thread makes one entry");

  Half positions[POSITIONS];
  Half steps[2][STEPS];  // of the step being copied, and of the one after it

  // Writes the entries of all positions; half_of(i) is the half of the i-th position.
  template <class HalfOf>
  __device__ __forceinline__ void set_positions(Index first, Index end, HalfOf half_of) {
    for (int i = threadIdx.x; i < POSITIONS; i += THREADS) {
      const Index position = first + i * (ALONG_K ? 1 : VECTOR);
      if (position < end)
        positions[i] = half_of(position);
      else
        set_beyond(positions[i]);
    }
  }

  // Writes the entries of one step of k.
  template <class HalfOf>
  __device__ __forceinline__ void set_step(int parity, Index first, Index end, HalfOf half_of) {
    const int step = BY_LAST_THREADS ? THREADS - 1 - threadIdx.x : threadIdx.x;
    if (step >= STEPS) return;
    const Index k = first + static_cast<Index>(step) * (ALONG_K ? VECTOR : 1);
    if (k < end)
      steps[parity][step] = half_of(k);
    else
      set_beyond(steps[parity][step]);
  }

  // Copies the pieces of one step into a stage.
  template <class Source>
  __device__ __forceinline__ void copy(Tile& tile, int parity, const Source& source,
                                       const Storage* memory) const {
    const int piece = threadIdx.x % PIECES;
#pragma unroll
    for (int i = 0; i < Tile::LINES / (THREADS / PIECES); ++i) {
      const int line = threadIdx.x / PIECES + i * (THREADS / PIECES);
      Index offset;
      const bool inside = source.locate(positions[ALONG_K ? line : piece],
                                        steps[parity][ALONG_K ? piece : line], offset);
      copy_piece<VECTOR>(tile.at(line, piece * VECTOR), memory + (inside ? offset : 0), inside);
    }
  }
};

using OperandA = Operand<Pass::AHalf, BLOCK_M, A_ALONG_K, A_VECTOR, false>;
using OperandB = Operand<Pass::BHalf, BLOCK_N, B_ALONG_K, B_VECTOR, true>;

struct Stage {
  OperandA::Tile a;
  OperandB::Tile b;
};

// The tile of C on its way out, with lines along the axis that is contiguous in memory.
struct OutputTile {
  static constexpr int LINES = C_ALONG_N ? BLOCK_M : BLOCK_N;
  static constexpr int LINE = C_ALONG_N ? BLOCK_N : BLOCK_M;
  // Longer than LINE, so that lines start in other banks.
  static constexpr int PADDING = sizeof(Storage) == 2 ? 8 : 4;
  alignas(16) Storage element[LINES][LINE + PADDING];
  Index lines[LINES], places[LINE];  // offsets in C of those that exist
};

union SharedMemory {
  Stage stages[STAGES];
  OutputTile output;
};
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "the launch asks for as much");

extern __shared__ __align__(128) unsigned char shared_memory[];

// -- the product ------------------------------------------------------------------------------------

struct Sums {
  Accumulator value[WARP_M / 16][WARP_N / 8][4];
  int row, column;  // of this thread's first element within the block's tile

  __device__ __forceinline__ Sums() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    row = warp / WARPS_N * WARP_M + lane / 4;
    column = warp % WARPS_N * WARP_N + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < WARP_M / 16; ++i)
#pragma unroll
      for (int j = 0; j < WARP_N / 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) value[i][j][e] = 0;
  }

  __device__ __forceinline__ void multiply(Stage& stage) {
    const int warp = threadIdx.x / 32;
    const int first_row = warp / WARPS_N * WARP_M, first_column = warp % WARPS_N * WARP_N;
#pragma unroll
    for (int k = 0; k < BLOCK_K; k += DEPTH) {
      typename Fragments<Storage>::Register a[4], b[WARP_N / 16][4];
#pragma unroll
      for (int j = 0; j < WARP_N / 16; ++j)
        load_fragments<false>(b[j], stage.b, first_column + j * 16, k);
#pragma unroll
      for (int i = 0; i < WARP_M / 16; ++i) {
        load_fragments<true>(a, stage.a, first_row + i * 16, k);
#pragma unroll
        for (int j = 0; j < WARP_N / 8; ++j)
          multiply_fragments(value[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1],
                             Storage{});
      }
    }
  }

  // Calls use(row, column, sums) for each two neighbours in a row of the block's tile that this
  // thread has.
  template <class Use>
  __device__ __forceinline__ void for_each_pair(Use use) const {
#pragma unroll
    for (int i = 0; i < WARP_M / 16; ++i)
#pragma unroll
      for (int j = 0; j < WARP_N / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Accumulator pair[2] = {value[i][j][half * 2], value[i][j][half * 2 + 1]};
          use(row + i * 16 + half * 8, column + j * 8, pair);
        }
  }
};

// What becomes of a sum; that of a filter is stored as it is.
__device__ __forceinline__ Accumulator finished(Accumulator sum, const Pass& pass, Index group,
                                                Index n, const Storage* bias) {
#if PASS != 2
  if (bias != nullptr)
    sum += Numeric<Storage>::widen(bias[(group * pass.gemm_n + n) * narrowed(pass.p.bias_stride)]);
  return activate<ACTIVATION>(sum);
#else
  return sum;
#endif
}

// Where an element's sum is in the workspace of a split: in C's order, so that both are walked
// along.
__device__ __forceinline__ Index place_in_partial(const Pass& pass, Index m, Index n) {
  return C_ALONG_N ? m * pass.gemm_n + n : n * pass.gemm_m + m;
}

// -- kernels ----------------------------------------------------------------------------------------

// a, b, c are x, w, y or their gradients in the order of the table above; bias is of y or
// dx and may be null; partial is the workspace of SPLIT: (split, group, gemm_m, gemm_n), the
// last two exchanged where C is contiguous along m.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_gather(const Storage* __restrict__ a, const Storage* __restrict__ b,
                const Storage* __restrict__ bias, Storage* __restrict__ c,
                Accumulator* __restrict__ partial, const __grid_constant__ ConvParameters p) {
  __shared__ OperandA table_a;
  __shared__ OperandB table_b;
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);

  __shared__ PassPhase phase;  // not in registers, of which there are none to spare
  const BlockTile tile(p);
  if (threadIdx.x == 0) phase = PassPhase(p, tile.phase);
  __syncthreads();  // the phase is written
  const Pass pass(p, phase);
  a += tile.group * static_cast<long long>(pass.group_a);
  b += tile.group * static_cast<long long>(pass.group_b);
  c += tile.group * static_cast<long long>(pass.group_c);

  table_a.set_positions(tile.row, pass.gemm_m, [&](Index m) { return pass.a_row(m); });
  table_b.set_positions(tile.column, pass.gemm_n, [&](Index n) { return pass.b_column(n); });

  // This split's share of gemm_k, in steps of BLOCK_K.
  const Index all_steps = (pass.gemm_k + BLOCK_K - 1) / BLOCK_K;
  const Index splits = static_cast<Index>(gridDim.y);
  const Index share = (all_steps + splits - 1) / splits;
  const Index first_step = static_cast<Index>(blockIdx.y) * share;
  const Index rest = all_steps - first_step;
  const Index steps = rest < 0 ? 0 : rest < share ? rest : share;

  auto set_tables = [&](Index step) {
    const Index k = (first_step + step) * BLOCK_K;
    const int parity = static_cast<int>(step % 2);
    table_a.set_step(parity, k, pass.gemm_k, [&](Index at) { return pass.a_step(at); });
    table_b.set_step(parity, k, pass.gemm_k, [&](Index at) { return pass.b_step(at); });
  };
  auto copy_step = [&](Index step) {
    Stage& stage = shared.stages[step % STAGES];
    const int parity = static_cast<int>(step % 2);
    table_a.copy(stage.a, parity, pass.a, a);
    table_b.copy(stage.b, parity, pass.b, b);
  };

#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) {
    if (step < steps) set_tables(step);
    __syncthreads();  // the tables of this step are written
    if (step < steps) copy_step(step);
    commit_copies();
  }

  Sums sums;
#pragma unroll 1
  for (Index step = 0; step < steps; ++step) {
    const Index ahead = step + STAGES - 1;
    if (ahead < steps) set_tables(ahead);
    wait_for_copies<STAGES - 2>();
    __syncthreads();  // this step's tiles are complete, the last step's are free, tables are written
    if (ahead < steps) copy_step(ahead);
    commit_copies();
    sums.multiply(shared.stages[step % STAGES]);
  }

#if SPLIT
  partial += (static_cast<long long>(blockIdx.y) * p.groups + tile.group) *
             static_cast<long long>(pass.gemm_m) * pass.gemm_n;
  sums.for_each_pair([&](int row, int column, const Accumulator(&pair)[2]) {
    const Index m = tile.row + row, n = tile.column + column;
    if (m >= pass.gemm_m || n >= pass.gemm_n) return;
    if constexpr (C_ALONG_N && C_VECTOR > 1) {  // gemm_n is even
      store_piece<2>(partial + place_in_partial(pass, m, n), pair);
    } else {
      partial[place_in_partial(pass, m, n)] = pair[0];
      if (n + 1 < pass.gemm_n) partial[place_in_partial(pass, m, n + 1)] = pair[1];
    }
  });
#else
  wait_for_copies<0>();
  __syncthreads();  // the ring is no longer read or written: the tile of C takes its place

  OutputTile& output = shared.output;
  sums.for_each_pair([&](int row, int column, const Accumulator(&pair)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Index n = tile.column + column + i;
      const Accumulator value =
          n < pass.gemm_n ? finished(pair[i], pass, tile.group, n, bias) : Accumulator(0);
      (C_ALONG_N ? output.element[row][column + i] : output.element[column + i][row]) =
          Numeric<Storage>::narrow(value);
    }
  });
  const Index rows = pass.gemm_m - tile.row, columns = pass.gemm_n - tile.column;
  for (int row = threadIdx.x; row < BLOCK_M && row < rows; row += THREADS)
    (C_ALONG_N ? output.lines : output.places)[row] = pass.c_row(tile.row + row);
  for (int column = threadIdx.x; column < BLOCK_N && column < columns; column += THREADS)
    (C_ALONG_N ? output.places : output.lines)[column] = pass.c_column(tile.column + column);
  __syncthreads();  // the tile of C and its offsets are complete

  using OutputPiece = Piece<Storage, C_VECTOR>;
  constexpr int PIECES = OutputTile::LINE / C_VECTOR;
  for (int i = threadIdx.x; i < OutputTile::LINES * PIECES; i += THREADS) {
    const int line = i / PIECES, place = i % PIECES * C_VECTOR;
    if (line >= (C_ALONG_N ? rows : columns) || place >= (C_ALONG_N ? columns : rows)) continue;
    *reinterpret_cast<OutputPiece*>(c + output.lines[line] + output.places[place]) =
        *reinterpret_cast<const OutputPiece*>(&output.element[line][place]);
  }
#endif
}

#if SPLIT
// Adds the splits' sums in order, one thread for each piece of C_VECTOR elements of C.
extern "C" __global__ void __launch_bounds__(256)
    conv_gather_reduce(const Accumulator* __restrict__ partial, const Storage* __restrict__ bias,
                       Storage* __restrict__ c, const int splits,
                       const __grid_constant__ ConvParameters p) {
  __shared__ PassPhase phase;
  if (threadIdx.x == 0) phase = PassPhase(p, 0);
  __syncthreads();  // the phase is written
  const Pass pass(p, phase);
  const long long matrix = static_cast<long long>(pass.gemm_m) * pass.gemm_n;
  const long long elements = p.groups * matrix;
  const long long element =
      (static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x) * C_VECTOR;
  if (element >= elements) return;

  const Index group = static_cast<Index>(element / matrix);
  const Index rest = static_cast<Index>(element - group * matrix);
  const Index line_length = C_ALONG_N ? pass.gemm_n : pass.gemm_m;
  const Index line = rest / line_length, place = rest % line_length;
  const Index m = C_ALONG_N ? line : place, n = C_ALONG_N ? place : line;

  Accumulator sum[C_VECTOR] = {};
#pragma unroll 4
  for (int split = 0; split < splits; ++split) {
    Accumulator piece[C_VECTOR];
    load_piece<C_VECTOR>(piece, partial + split * elements + element, true);
#pragma unroll
    for (int i = 0; i < C_VECTOR; ++i) sum[i] += piece[i];
  }
#pragma unroll
  for (int i = 0; i < C_VECTOR; ++i)
    sum[i] = finished(sum[i], pass, group, C_ALONG_N ? n + i : n, bias);
  store_piece<C_VECTOR>(
      c + group * static_cast<long long>(pass.group_c) + pass.c_row(m) + pass.c_column(n), sum);
}
#endif
