// Gather: the three passes as implicit GEMMs.  16-bit types, float64 and float32 rounded to TF32 are
// multiplied with mma.sync.  Fused multiply-adds are used for float32 that is not rounded, and for
// float64 on chips whose tensor cores do not support it.
//
// Unlike the generic kernels, this kernel uses tensor cores; a pipeline of STAGES shared-memory stages that
// cp.async fills ahead of use (from compute capability 8.0 on; 7.5 copies through registers); stride
// phases in backprop_input (gather.cuh); and a deterministic split of gemm_k.
//
//   pass             gemm_m          gemm_n            gemm_k          A          B
//   forward          output pixels   filters           taps            im2col(x)  w
//   backprop_input   input pixels    channels          taps * filters  dy         w
//   backprop_filter  filters         taps * channels   output pixels   dy         im2col(x)
//
// Taps are numbered with channels fastest or, if taps have the smallest strides in w, with channels
// slowest (TAPS_FASTEST).  Operands are copied as vectors of A_VECTOR or B_VECTOR elements that are
// contiguous in memory, along k (A_ALONG_K, B_ALONG_K) or else along m or n.
//
// The address of a vector is the sum of two halves (gather.cuh): one half depends on the position (m or
// n), the other on k.  A block computes the halves of its positions once.  The warps take turns to compute
// the halves of the next TURN_K k, by incrementing digits instead of dividing.  Turns distribute this work
// over the schedulers of a multiprocessor.  For each operand, all vectors of a thread
// share one half in a step.  A vector thus costs one load from shared memory, an addition, and a bit test
// for whether it is inside the tensor.  In large 16-bit tiles, threads keep the halves of their positions
// in registers and save the load.
//
// In NCHW, vectors consist of contiguous pixels.  They are possible for results, for dy in
// backprop_filter, and for all operands of pointwise layers (1 x 1 filter, stride 1, no padding).  A
// pointwise layer is a plain matrix product with vectors of up to 16 bytes in both memory orders.  Other
// NCHW operands are copied element by element, or are first copied with channels last (conv_arrange.cu) if
// the layer is large enough.
//
// The input of a first layer with 3 channels is copied element by element in both memory orders.  With
// channels last, a row of the filter reads S * C contiguous elements.  But their start,
// (q * stride - pad) * C, is often odd, and cp.async can omit the end of a vector, not its beginning.
// conv_patch.cu is faster for such layers of 16-bit types.
//
// In backprop_input, each stride phase (gather.cuh) is a dense problem with its own pixels and taps; one
// launch computes the tiles of PHASES phases.  With SPLIT, gemm_k is divided among the blocks along
// blockIdx.y.  Each split writes its sums to a workspace, and conv_gather_reduce adds them in order, so
// that results do not depend on scheduling.
//
// A variant is chosen with -D: PASS (0, 1, 2 as in the table), STORAGE, INDEX, BLOCK_M, BLOCK_N,
// BLOCK_K, WARPS_M, WARPS_N, RESIDENT (resident blocks per SM), STAGES, TENSOR_CORES, A_ALONG_K,
// A_VECTOR, B_ALONG_K, B_VECTOR, C_ALONG_N, C_VECTOR, TAPS_FASTEST, TAP_WORDS and PHASES
// (gather.cuh), SPLIT, ASYNC_COPY, ACTIVATION and ADD (epilogue.cuh; forward and backprop_input
// only), SHARED_BYTES; in backprop_input also FOLD_CHANNELS, FOLD_D, FOLD_H and FOLD_W (fold.cuh);
// optionally VIEW (Nonfinite).
#include "epilogue.cuh"
#include "fold.cuh"
#include "gather.cuh"
#include "index.cuh"
#include "numeric.cuh"
#include "partial_sums.cuh"
#include "multistage.cuh"
#include "vector.cuh"

using Storage = STORAGE;
using Accumulator = typename Numeric<Storage>::Accumulator;
using AddressHalf = Half<Index>;

constexpr int THREADS = WARPS_M * WARPS_N * 32;
constexpr int WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N;
static_assert(WARP_M % 16 == 0 && WARP_N % 16 == 0, "whole fragments only");
// Number of k whose address halves a warp computes in its turn, one per lane.  Products of doubles take so
// long that few lanes suffice; their blocks have no memory for larger tables.
constexpr int TURN_K = sizeof(Storage) == 8 ? BLOCK_K : 32;
constexpr int STEP_HALVES = 2 * TURN_K, ROUND_K = THREADS / 32 * TURN_K;  // of two turns; of all warps
static_assert(TURN_K % BLOCK_K == 0 && ROUND_K % STEP_HALVES == 0, "whole steps, an even number of turns");

// -- passes: sizes, and the halves of every address in A, B and C -----------------------------------

// Returns the loops over taps and channels (in backprop_input, filters).
__device__ __forceinline__ Loops<Index> tap_loops(Index channels, Index t, Index r, Index s) {
  return TAPS_FASTEST ? Loops<Index>(s, r, t, channels) : Loops<Index>(channels, s, r, t);
}
__device__ __forceinline__ Tap<Index> tap_of(const Digits<Index>& at) {
  const Index(&digit)[4] = at.digit;
  if (TAPS_FASTEST) return {digit[3], digit[2], digit[1], digit[0]};
  return {digit[0], digit[3], digit[2], digit[1]};
}
__device__ __forceinline__ Pixel<Index> pixel_of(const Digits<Index>& at) {
  return {at.digit[3], at.digit[2], at.digit[1], at.digit[0]};
}

// Address halves of the tensor that windows read: x, or dy in backprop_input.
struct Windows {
  const TapAxis (&axis)[3];
  const long long (&size)[3], (&stride)[5];
  const int taps[3];

  // `first` is the pixel that the window's first tap reads.
  __device__ __forceinline__ AddressHalf of_pixel(const Pixel<Index>& first) const {
    const int coordinate[3] = {static_cast<int>(first.d), static_cast<int>(first.h),
                               static_cast<int>(first.w)};
    AddressHalf half = AddressHalf::outside(pixel_offset(first, stride));
    int bit = 0;
#pragma unroll
    for (int i = 0; i < 3; bit += taps[i++])
      half.bits.clear(bit + axis[i].before_0(coordinate[i], taps[i]),
                      bit + axis[i].before_0(coordinate[i] - static_cast<int>(size[i]), taps[i]));
    return half;
  }
  __device__ __forceinline__ AddressHalf of_tap(const Tap<Index>& tap) const {
    const Pixel<Index> step = {0, tap.t * axis[0].spacing, tap.r * axis[1].spacing,
                               tap.s * axis[2].spacing};
    AddressHalf half =
        AddressHalf::of_tap(pixel_offset(step, stride) + tap.c * narrowed(stride[1]));
    half.bits.set(static_cast<int>(tap.t));
    half.bits.set(taps[0] + static_cast<int>(tap.r));
    half.bits.set(taps[0] + taps[1] + static_cast<int>(tap.s));
    return half;
  }
};

// x under the windows of output pixels.
struct OutputWindows : Windows {
  const ConvParameters& p;

  __device__ __forceinline__ OutputWindows(const ConvParameters& p, const TapAxis (&axis)[3])
      : Windows{axis, p.input, p.x_stride,
                {static_cast<int>(p.filter[0]), static_cast<int>(p.filter[1]),
                 static_cast<int>(p.filter[2])}},
        p(p) {}

  __device__ __forceinline__ Loops<Index> loops() const {
    return tap_loops(narrowed(p.channels), taps[0], taps[1], taps[2]);
  }
  __device__ __forceinline__ AddressHalf of_output(const Pixel<Index>& out) const {
    return of_pixel({out.n, out.d * narrowed(p.stride[0]) - narrowed(p.pad[0]),
                     out.h * narrowed(p.stride[1]) - narrowed(p.pad[1]),
                     out.w * narrowed(p.stride[2]) - narrowed(p.pad[2])});
  }
};

#if PASS == 0

struct Pass {
  const ConvParameters& p;
  OutputWindows windows;
  Index gemm_m, gemm_n, gemm_k;
  Index group_a, group_b, group_c;  // distance of adjacent groups, in elements

  __device__ __forceinline__ Pass(const ConvParameters& parameters,
                                  const StridePhases<PHASES>& phases, int)
      : p(parameters),
        windows(parameters, phases.axis),
        gemm_m(narrowed(p.batch * p.output[0] * p.output[1] * p.output[2])),
        gemm_n(narrowed(p.filters)),
        gemm_k(narrowed(p.filter[0] * p.filter[1] * p.filter[2] * p.channels)),
        group_a(narrowed(p.channels * p.x_stride[1])),
        group_b(narrowed(p.filters * p.w_stride[0])),
        group_c(narrowed(p.filters * p.y_stride[1])) {}

  __device__ __forceinline__ Loops<Index> loops() const { return windows.loops(); }
  __device__ __forceinline__ AddressHalf a_position(Index m) const {
    return windows.of_output(pixel_at(m, p.output));
  }
  __device__ __forceinline__ AddressHalf a_step(const Digits<Index>& k) const {
    return windows.of_tap(tap_of(k));
  }
  __device__ __forceinline__ AddressHalf b_position(Index n) const {
    return AddressHalf::of_pixel(n * narrowed(p.w_stride[0]));
  }
  __device__ __forceinline__ AddressHalf b_step(const Digits<Index>& k) const {
    return AddressHalf::of_only_tap(tap_offset(tap_of(k), p.w_stride));
  }
  __device__ __forceinline__ Index c_row(Index m) const {
    return pixel_offset(pixel_at(m, p.output), p.y_stride);
  }
  __device__ __forceinline__ Index c_column(Index n) const { return n * narrowed(p.y_stride[1]); }
};

#elif PASS == 1

struct Pass {
  const ConvParameters& p;
  const StridePhases<PHASES>& phases;
  const StridePhase& phase;
  Windows windows;
  Index gemm_m, gemm_n, gemm_k;
  Index group_a, group_b, group_c;

  __device__ __forceinline__ Pass(const ConvParameters& parameters,
                                  const StridePhases<PHASES>& phases_, int number)
      : p(parameters),
        phases(phases_),
        phase(phases_.phase[number]),
        windows{phases.axis, p.output, p.y_stride, {phase.taps[0], phase.taps[1], phase.taps[2]}},
        gemm_m(narrowed(p.batch * phase.pixels[0] * phase.pixels[1] * phase.pixels[2])),
        gemm_n(narrowed(p.channels)),
        gemm_k(narrowed(p.filters * phase.taps[0] * phase.taps[1] * phase.taps[2])),
        group_a(narrowed(p.filters * p.y_stride[1])),
        group_b(narrowed(p.filters * p.w_stride[0])),
        group_c(narrowed(p.channels * p.x_stride[1])) {}

  __device__ __forceinline__ Loops<Index> loops() const {
    return tap_loops(narrowed(p.filters), phase.taps[0], phase.taps[1], phase.taps[2]);
  }
  __device__ __forceinline__ Pixel<Index> pixel(Index m) const {
    const long long sizes[3] = {phase.pixels[0], phase.pixels[1], phase.pixels[2]};
    return pixel_at(m, sizes);
  }
  __device__ __forceinline__ AddressHalf a_position(Index m) const {
    const Pixel<Index> in = pixel(m);
    return windows.of_pixel(
        {in.n, in.d + phase.base[0], in.h + phase.base[1], in.w + phase.base[2]});
  }
  __device__ __forceinline__ AddressHalf a_step(const Digits<Index>& k) const {
    const Tap<Index> tap = tap_of(k);  // the last tap reads the first pixel
    return windows.of_tap({tap.c, phase.taps[0] - 1 - tap.t, phase.taps[1] - 1 - tap.r,
                           phase.taps[2] - 1 - tap.s});
  }
  __device__ __forceinline__ AddressHalf b_position(Index n) const {
    return AddressHalf::of_pixel(n * narrowed(p.w_stride[1]));
  }
  __device__ __forceinline__ AddressHalf b_step(const Digits<Index>& k) const {
    const Tap<Index> tap = tap_of(k);
    const Tap<Index> in_filter = {0, phase.first_tap[0] + tap.t * phases.step[0],
                                  phase.first_tap[1] + tap.r * phases.step[1],
                                  phase.first_tap[2] + tap.s * phases.step[2]};
    return AddressHalf::of_only_tap(tap_offset(in_filter, p.w_stride) +
                                    tap.c * narrowed(p.w_stride[0]));
  }
  __device__ __forceinline__ Index c_row(Index m) const {
    const Pixel<Index> in = pixel(m);
    const Pixel<Index> whole = {in.n, phase.first_pixel[0] + in.d * narrowed(p.stride[0]),
                                phase.first_pixel[1] + in.h * narrowed(p.stride[1]),
                                phase.first_pixel[2] + in.w * narrowed(p.stride[2])};
    return pixel_offset(whole, p.x_stride);
  }
  __device__ __forceinline__ Index c_column(Index n) const { return column_offset(n, p); }
};

#else

struct Pass {
  const ConvParameters& p;
  OutputWindows windows;
  Index gemm_m, gemm_n, gemm_k;
  Index group_a, group_b, group_c;

  __device__ __forceinline__ Pass(const ConvParameters& parameters,
                                  const StridePhases<PHASES>& phases, int)
      : p(parameters),
        windows(parameters, phases.axis),
        gemm_m(narrowed(p.filters)),
        gemm_n(narrowed(p.filter[0] * p.filter[1] * p.filter[2] * p.channels)),
        gemm_k(narrowed(p.batch * p.output[0] * p.output[1] * p.output[2])),
        group_a(narrowed(p.filters * p.y_stride[1])),
        group_b(narrowed(p.channels * p.x_stride[1])),
        group_c(narrowed(p.filters * p.w_stride[0])) {}

  __device__ __forceinline__ Loops<Index> loops() const {
    return {narrowed(p.output[2]), narrowed(p.output[1]), narrowed(p.output[0]), narrowed(p.batch)};
  }
  __device__ __forceinline__ Tap<Index> tap(Index n) const {
    return tap_of(windows.loops().digits(n));
  }
  __device__ __forceinline__ AddressHalf a_position(Index m) const {
    return AddressHalf::of_pixel(m * narrowed(p.y_stride[1]));
  }
  __device__ __forceinline__ AddressHalf a_step(const Digits<Index>& k) const {
    return AddressHalf::of_only_tap(pixel_offset(pixel_of(k), p.y_stride));
  }
  __device__ __forceinline__ AddressHalf b_position(Index n) const {
    return windows.of_tap(tap(n));
  }
  __device__ __forceinline__ AddressHalf b_step(const Digits<Index>& k) const {
    return windows.of_output(pixel_of(k));
  }
  __device__ __forceinline__ Index c_row(Index m) const { return m * narrowed(p.w_stride[0]); }
  __device__ __forceinline__ Index c_column(Index n) const {
    return tap_offset(tap(n), p.w_stride);
  }
};

#endif

// -- block tile -------------------------------------------------------------------------------------

// The tile of this block.  Blocks are numbered by group, stride phase, row and column; columns vary
// fastest.
struct BlockTile {
  Index group, row, column;  // row and column of the tile's first element
  int phase;

  __device__ __forceinline__ BlockTile() {}
  __device__ __forceinline__ BlockTile(const StridePhases<PHASES>& phases, Index gemm_n) {
    const Index of_group = phases.phase[PHASES - 1].end;
    Index block = static_cast<Index>(blockIdx.x);
    group = block / of_group;
    block -= group * of_group;
    for (phase = 0; phase + 1 < PHASES && block >= phases.phase[phase].end;) ++phase;
    if (phase > 0) block -= phases.phase[phase - 1].end;
    const Index columns = (gemm_n + BLOCK_N - 1) / BLOCK_N;
    row = block / columns * BLOCK_M;
    column = block % columns * BLOCK_N;
  }
};

// -- tiles in shared memory -------------------------------------------------------------------------

// Number of vectors that a thread loads before it stores the first, for vectors that cp.async cannot
// copy.
template <int VECTOR>
constexpr int COPIES_AT_ONCE = VECTOR * sizeof(Storage) < 4 ? 16 : 8;

// Whether threads keep the halves of their positions in registers, for 16-byte vectors.  This pays in
// large 16-bit tiles, where loads from shared memory take nearly as long as the products.
constexpr bool KEEPS_POSITIONS = TENSOR_CORES && sizeof(Storage) == 2 &&
                                 BLOCK_M * BLOCK_N >= 128 * 128 && sizeof(AddressHalf) == 8;

// The layout of one operand's tile, EXTENT positions (along m or n) by BLOCK_K, and the tables of its
// address halves.  Lines run along k or along positions and are filled with vectors of VECTOR elements.
template <int EXTENT, bool ALONG_K, int VECTOR>
struct Operand {
  using Tile =
      StageTile<Storage, ALONG_K ? EXTENT : BLOCK_K, ALONG_K ? BLOCK_K : EXTENT, ALONG_K>;
  static constexpr int PIECES = Tile::LINE / VECTOR;
  // A thread copies one vector in each of COUNT lines, which are APART lines apart.
  static constexpr int APART = THREADS / PIECES, COUNT = Tile::LINES / APART;
  static constexpr int POSITIONS = ALONG_K ? EXTENT : EXTENT / VECTOR;  // table entries
  static_assert(THREADS % PIECES == 0 && Tile::LINES % (THREADS / PIECES) == 0, "equal shares");

  AddressHalf positions[POSITIONS];
  AddressHalf steps[STEP_HALVES];  // halves of k, at k % STEP_HALVES

  // Writes the table entries of all positions.  half_of(position) returns the address half of a position
  // in the first group.
  template <class HalfOf>
  __device__ __forceinline__ void set_positions(Index first, Index end, Index group_offset,
                                                HalfOf half_of) {
    for (int i = threadIdx.x; i < POSITIONS; i += THREADS) {
      const Index position = first + i * (ALONG_K ? 1 : VECTOR);
      positions[i] = position < end ? half_of(position) : AddressHalf::outside(0);
      positions[i].offset += group_offset;
    }
  }

  // Address halves for the positions of a thread's vectors; they are the same in every step.
  struct Own {
    AddressHalf position[ALONG_K ? COUNT : 1];
  };
  __device__ __forceinline__ Own own() const {
    Own found;
#pragma unroll
    for (int i = 0; i < (ALONG_K ? COUNT : 1); ++i)
      found.position[i] =
          positions[ALONG_K ? threadIdx.x / PIECES + i * APART : threadIdx.x % PIECES];
    return found;
  }

  // Returns whether an element of a step is inside the tensor; the step's halves begin at steps[first].
  __device__ __forceinline__ bool contains(int position, int k, unsigned first) const {
    return !positions[ALONG_K ? position : position / VECTOR].bits.meets(
        steps[first + (ALONG_K ? k / VECTOR * VECTOR : k)].bits);
  }
  static __device__ __forceinline__ Storage* at(Tile& tile, int position, int k) {
    return ALONG_K ? tile.at(position, k) : tile.at(k, position);
  }

  // Copies the vectors of one step into a stage, TURN vectors at a time; the step's halves begin at
  // steps[k].  The halves of these vectors are loaded before their first copy: the compiler does not move
  // a load above a copy, and loads between copies would wait one by one.
  __device__ __forceinline__ void copy(Tile& tile, unsigned k, const Storage* memory,
                                       const Own& own) const {
    constexpr bool KEPT = KEEPS_POSITIONS && ASYNC_COPY && VECTOR * sizeof(Storage) == 16;
    const int first = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    // The half that all vectors of this thread have in common.
    const AddressHalf same = ALONG_K ? steps[k + piece * VECTOR]
                             : KEPT  ? own.position[0]
                                     : positions[piece];
    auto other_of = [&](int i) {
      if constexpr (ALONG_K && KEPT) return own.position[i];
      return ALONG_K ? positions[first + i * APART] : steps[k + first + i * APART];
    };
    constexpr bool AT_ONCE = COPIED_ASYNC<VECTOR, Storage> || COUNT < COPIES_AT_ONCE<VECTOR>;
    constexpr int TURN = AT_ONCE ? COUNT : COPIES_AT_ONCE<VECTOR>;
    constexpr int PLACES = Tile::PERIOD > APART ? Tile::PERIOD / APART : 1;
    static_assert(COUNT % TURN == 0 && (TURN == COUNT || TURN % PLACES == 0), "whole turns only");
    Storage* place[PLACES];  // destinations in the first lines; all others are constant distances away
#pragma unroll
    for (int i = 0; i < PLACES; ++i) place[i] = tile.at(first + i * APART, piece * VECTOR);
    auto destination = [&](int turn, int i) {
      return place[i % PLACES] + (turn + i) / PLACES * (PLACES * APART * Tile::PITCH);
    };
#pragma unroll 1
    for (int turn = 0; turn < COUNT; turn += TURN) {
      AddressHalf other[TURN];
#pragma unroll
      for (int i = 0; i < TURN; ++i) other[i] = other_of(turn + i);
      Piece<Storage, VECTOR> begun[TURN];
#pragma unroll
      for (int i = 0; i < TURN; ++i) {
        const bool inside = !same.bits.meets(other[i].bits);
        const Storage* source = memory + (same.offset + other[i].offset);
        begun[i] = begin_copy<VECTOR>(destination(turn, i), source, inside);
      }
#pragma unroll
      for (int i = 0; i < TURN; ++i) finish_copy<VECTOR>(destination(turn, i), begun[i]);
    }
  }
};

using OperandA = Operand<BLOCK_M, A_ALONG_K, A_VECTOR>;
using OperandB = Operand<BLOCK_N, B_ALONG_K, B_VECTOR>;

struct Stage {
  OperandA::Tile a;
  OperandB::Tile b;
};

using OutputPiece = Piece<Storage, C_VECTOR>;

// The block's tile of C: the offsets of its lines, which run along the contiguous axis of C, and of the
// places in a line.  16-bit results are staged in shared memory, since the contiguous results of a thread
// are shorter than a sector of 32 bytes.
struct OutputTile {
  static constexpr int LINES = C_ALONG_N ? BLOCK_M : BLOCK_N;
  static constexpr int LINE = C_ALONG_N ? BLOCK_N : BLOCK_M;
  static constexpr bool STAGED = sizeof(Storage) == 2;
  // Padded, so that lines start in different banks.
  alignas(16) Storage element[STAGED ? LINES : 1][STAGED ? LINE + 8 : 1];
  Index lines[LINES], places[LINE];

  // Calls use(element, offset) for each vector in the first `rows` rows and `columns` columns.
  template <class Use>
  __device__ __forceinline__ void for_each_piece(int rows, int columns, Use use) {
    constexpr int PIECES = LINE / C_VECTOR;
    for (int i = threadIdx.x; i < LINES * PIECES; i += THREADS) {
      const int line = i / PIECES, place = i % PIECES * C_VECTOR;
      if (line >= (C_ALONG_N ? rows : columns) || place >= (C_ALONG_N ? columns : rows)) continue;
      use(reinterpret_cast<OutputPiece*>(&element[line][place]), lines[line] + places[place]);
    }
  }
};

union SharedMemory {
  Stage stages[STAGES];
  OutputTile output;
};
static_assert(sizeof(SharedMemory) == SHARED_BYTES, "the launch asks for as much");

extern __shared__ __align__(128) unsigned char shared_memory[];

// -- the product ------------------------------------------------------------------------------------

// A thread's sums: ROWS x COLUMNS of its warp's tile.  A run consists of ROW_RUN adjacent rows or of
// COLUMN_RUN adjacent columns.  Without tensor cores, a run has CHUNK rows if the lines of A run along m,
// or CHUNK columns if the lines of B run along n.  In all other cases, a run has 1 row or 2 columns, as
// in tensor-core fragments (multistage.cuh).
struct Sums {
  static constexpr int ROWS = WARP_M / 8, COLUMNS = WARP_N / 4;
  static constexpr int CHUNK = 16 / sizeof(Storage);
  static constexpr int ROW_RUN = TENSOR_CORES || A_ALONG_K ? 1 : CHUNK;
  static constexpr int COLUMN_RUN = TENSOR_CORES || B_ALONG_K ? 2 : CHUNK;
  static constexpr int RUN = C_ALONG_N ? COLUMN_RUN : ROW_RUN;  // along C's contiguous axis

  Accumulator value[ROWS / 2][COLUMNS / 2][4];  // in the order of fragments

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int i = 0; i < ROWS / 2; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS / 2; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) value[i][j][e] = 0;
  }

  __device__ __forceinline__ Accumulator& at(int row, int column) {
    return value[row / 2][column / 2][row % 2 * 2 + column % 2];
  }
  __device__ __forceinline__ Accumulator at(int row, int column) const {
    return value[row / 2][column / 2][row % 2 * 2 + column % 2];
  }

  __device__ __forceinline__ bool contain_nan() const {
    bool found = false;
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; ++i) {
      const Accumulator sum = at(i / COLUMNS, i % COLUMNS);
      found |= sum != sum;
    }
    return found;
  }

  // The first row and column of this warp in the block's tile.
  static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 / WARPS_N * WARP_M; }
  static __device__ __forceinline__ int first_column() {
    return threadIdx.x / 32 % WARPS_N * WARP_N;
  }
  // Return the i-th row and column of this thread.  There are 8 lanes along rows and 4 along columns.
  // With tensor cores, lanes have the order of fragments.  Otherwise, lanes 2 i and 2 i + 1 have the same
  // columns.  Of each 8 lanes, the even lanes have the same rows, and so have the odd lanes.  Lanes with a
  // common address halve the wavefronts of 16-byte loads.
  static __device__ __forceinline__ int row_of(int i) {
    const int number = threadIdx.x % 32;
    const int lane = TENSOR_CORES ? number / 4 : number / 8 * 2 + number % 2;
    return first_row() + lane * ROW_RUN + rows_apart(i);
  }
  static __device__ __forceinline__ int column_of(int i) {
    const int lane = TENSOR_CORES ? threadIdx.x % 4 : threadIdx.x / 2 % 4;
    return first_column() + lane * COLUMN_RUN + columns_apart(i);
  }
  // Distance of a thread's i-th row or column from its first row or column.
  static __device__ __forceinline__ constexpr int rows_apart(int i) {
    return i % ROW_RUN + i / ROW_RUN * (8 * ROW_RUN);
  }
  static __device__ __forceinline__ constexpr int columns_apart(int i) {
    return i % COLUMN_RUN + i / COLUMN_RUN * (4 * COLUMN_RUN);
  }

#if TENSOR_CORES
  __device__ __forceinline__ void multiply(Stage& stage) {
    constexpr int DEPTH = Fragments<Storage>::DEPTH;
    static_assert(BLOCK_K % DEPTH == 0, "whole fragments only");
#pragma unroll
    for (int k = 0; k < BLOCK_K; k += DEPTH) {
      typename Fragments<Storage>::Register a[4], b[WARP_N / 16][4];
#pragma unroll
      for (int j = 0; j < WARP_N / 16; ++j)
        load_fragments<false>(b[j], stage.b, first_column() + j * 16, k);
#pragma unroll
      for (int i = 0; i < WARP_M / 16; ++i) {
        load_fragments<true>(a, stage.a, first_row() + i * 16, k);
#pragma unroll
        for (int j = 0; j < WARP_N / 8; ++j)
          multiply_fragments(value[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1],
                             Storage{});
      }
    }
  }
#else
  // A thread loads 16 bytes at a time along the lines: first all of its rows of A for a chunk of k, then
  // its columns of B one by one.
  __device__ __forceinline__ void multiply(Stage& stage) {
    using TileA = OperandA::Tile;
    using TileB = OperandB::Tile;
    static_assert(BLOCK_K % CHUNK == 0, "whole chunks only");
    static_assert((!A_ALONG_K || rows_apart(1) % TileA::PERIOD == 0) &&
                      (!B_ALONG_K || columns_apart(2) % TileB::PERIOD == 0),
                  "lines of a thread along k have the same swizzle");
    static_assert(!B_ALONG_K || TileB::CHUNKS == 4, "and so have two adjacent lines");
    static_assert((A_ALONG_K || TileA::PERIOD == 1) && (B_ALONG_K || TileB::PERIOD == 1),
                  "other lines have no swizzle");
#pragma unroll 2
    for (int k0 = 0; k0 < BLOCK_K; k0 += CHUNK) {
      const Storage* place_a = A_ALONG_K ? stage.a.at(row_of(0), k0) : stage.a.at(k0, row_of(0));
      const Storage* place_b =
          B_ALONG_K ? stage.b.at(column_of(0), k0) : stage.b.at(k0, column_of(0));
      Storage a[CHUNK][ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const int k = A_ALONG_K ? 0 : i % CHUNK, row = A_ALONG_K ? i : i / CHUNK * CHUNK;
        const auto chunk = load_chunk<TileA>(place_a, rows_apart(row), k);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
          (A_ALONG_K ? a[e][row] : a[k][row + e]) = chunk.element[e];
      }
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        const int k = B_ALONG_K ? 0 : j % CHUNK, column = B_ALONG_K ? j : j / CHUNK * CHUNK;
        const auto b = load_chunk<TileB>(place_b, columns_apart(column), k);
#pragma unroll
        for (int e = 0; e < CHUNK; ++e)
#pragma unroll
          for (int i = 0; i < ROWS; ++i)
            multiply_add(at(i, B_ALONG_K ? column : column + e), a[B_ALONG_K ? e : k][i],
                         b.element[e]);
      }
    }
  }
#endif

  // Calls use(i, j, run) for each run along the contiguous axis of C; a run begins at this thread's i-th
  // row and j-th column.
  template <class Use>
  __device__ __forceinline__ void for_each_run(Use use) const {
    constexpr int LINES = C_ALONG_N ? ROWS : COLUMNS, LINE = C_ALONG_N ? COLUMNS : ROWS;
#pragma unroll
    for (int line = 0; line < LINES; ++line)
#pragma unroll
      for (int place = 0; place < LINE; place += RUN) {
        const int i = C_ALONG_N ? line : place, j = C_ALONG_N ? place : line;
        Accumulator run[RUN];
#pragma unroll
        for (int e = 0; e < RUN; ++e) run[e] = C_ALONG_N ? at(i, j + e) : at(i + e, j);
        use(i, j, run);
      }
  }
};

#if VIEW
// Returns the value of an element that is multiplied: TF32 rounds the largest elements to infinity.
__device__ __forceinline__ Accumulator factor(Storage element) {
  const Accumulator value = Numeric<Storage>::widen(element);
#if TENSOR_CORES && ASYNC_COPY
  if constexpr (sizeof(Storage) == 4) return __uint_as_float(ptx::tf32_from_f32(value));
#endif
  return value;
}

__device__ __forceinline__ bool is_finite(Accumulator value) { return value - value == 0; }

// Replaces infinite and NaN elements of a tile by zeros.
template <class Operand>
__device__ __forceinline__ void clear_nonfinite(typename Operand::Tile& tile) {
  constexpr int LINE = Operand::Tile::LINE;
  for (int i = threadIdx.x; i < Operand::Tile::LINES * LINE; i += THREADS) {
    Storage* element = tile.at(i / LINE, i % LINE);
    if (!is_finite(factor(*element))) *element = Storage{};
  }
}

// The infinite and NaN products of a thread's sums.  A view (cupyconv/kernels/views.py) extends both
// operands by zeros: by pixels around the tensor that windows read, and by the negative zeros that
// conv_fold.cu writes to a copy of w.  Products with these zeros are excluded.
struct Nonfinite {
  static constexpr int WORDS = (Sums::ROWS * Sums::COLUMNS + 31) / 32;

  // A bit per sum: whether it has a product that is infinity or NaN, and -infinity or NaN.
  unsigned positive[WORDS], negative[WORDS];

  __device__ __forceinline__ Nonfinite() {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) positive[i] = negative[i] = 0;
  }

  // Adds the products of a step, whose halves begin at steps[first] of the tables.
  __device__ __forceinline__ void add(Stage& stage, const OperandA& table_a, const OperandB& table_b,
                                      unsigned first) {
#pragma unroll 1
    for (int k = 0; k < BLOCK_K; ++k) {
      auto a = [&](int i) { return factor(*OperandA::at(stage.a, Sums::row_of(i), k)); };
      unsigned inside = 0, infinite = 0;  // a bit per row; NaN counts as infinite
#pragma unroll
      for (int i = 0; i < Sums::ROWS; ++i) {
        inside |= static_cast<unsigned>(table_a.contains(Sums::row_of(i), k, first)) << i;
        infinite |= static_cast<unsigned>(!is_finite(a(i))) << i;
      }
#pragma unroll
      for (int j = 0; j < Sums::COLUMNS; ++j) {
        const int column = Sums::column_of(j);
        const Storage* place = OperandB::at(stage.b, column, k);
        const Accumulator b = factor(*place);
        const unsigned rows = is_finite(b) ? inside & infinite : inside;
        if (rows == 0 || !table_b.contains(column, k, first)) continue;
        const unsigned char last = reinterpret_cast<const unsigned char*>(place)[sizeof(Storage) - 1];
        const bool is_zero = Numeric<Storage>::widen(*place) == 0;
        if (PASS != 2 && is_zero && last != 0) continue;  // a negative zero; B is the copy of w
#pragma unroll
        for (int i = 0; i < Sums::ROWS; ++i) {
          if (!(rows >> i & 1)) continue;
          const Accumulator product = a(i) * b;
          const int sum = i * Sums::COLUMNS + j;
          if (!(product < 0)) positive[sum / 32] |= 1u << sum % 32;
          if (!(product > 0)) negative[sum / 32] |= 1u << sum % 32;
        }
      }
    }
  }

  // Replaces the sums that have such products.
  __device__ __forceinline__ void replace(Sums& sums) const {
    const Accumulator infinity = __uint_as_float(0x7f800000u);
#pragma unroll
    for (int sum = 0; sum < Sums::ROWS * Sums::COLUMNS; ++sum) {
      const bool above = positive[sum / 32] >> sum % 32 & 1, below = negative[sum / 32] >> sum % 32 & 1;
      if (above || below)
        sums.at(sum / Sums::COLUMNS, sum % Sums::COLUMNS) =
            above && below ? infinity - infinity : above ? infinity : -infinity;
    }
  }
};
#endif

// Stores the first `existing` elements of a run, in the widest vectors that the strides of C allow;
// place_of(i) is the address of the i-th element.
template <class Element, int RUN, class PlaceOf>
__device__ __forceinline__ void store_run(const Accumulator (&run)[RUN], int existing,
                                          PlaceOf place_of) {
  constexpr int MOST = 16 / sizeof(Element) < RUN ? 16 / sizeof(Element) : RUN;
  constexpr int VECTOR = C_VECTOR < MOST ? C_VECTOR : MOST;
#pragma unroll
  for (int first = 0; first < RUN; first += VECTOR) {
    Accumulator part[VECTOR];
#pragma unroll
    for (int e = 0; e < VECTOR; ++e) part[e] = run[first + e];
    if (first < existing) store_piece<VECTOR>(place_of(first), part);
  }
}

// Returns the bias of a column of C, or 0 without a bias.
__device__ __forceinline__ Accumulator bias_of(const Pass& pass, Index group, Index n,
                                               const Storage* bias) {
  if (PASS == 2 || bias == nullptr || n >= pass.gemm_n) return 0;
  return Numeric<Storage>::widen(
      bias[channel_of(group * pass.gemm_n + n) * narrowed(pass.p.bias_stride)]);
}

// -- kernels ----------------------------------------------------------------------------------------

// a, b and c are x, w, y or their gradients, as in the table above.  bias is added to y or dx, and may be
// null; the addend is read with ADD only.  partial is the workspace of SPLIT: (split, group, gemm_m,
// gemm_n), with the last two axes swapped if C is contiguous along m.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    conv_gather(const Storage* __restrict__ a, const Storage* __restrict__ b,
                const Storage* __restrict__ bias, const Storage* addend, Storage* c,
                Accumulator* __restrict__ partial, const __grid_constant__ ConvParameters p,
                const __grid_constant__ StridePhases<PHASES> phases) {
  __shared__ OperandA table_a;
  __shared__ OperandB table_b;
  __shared__ Loops<Index> loops;            // over k
  __shared__ Digits<Index> counts[TURN_K];  // loop counters of each lane of the next turn
  SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory);

  __shared__ BlockTile shared_tile;  // in shared memory to save registers
  if (threadIdx.x == 0) shared_tile = BlockTile(phases, Pass(p, phases, 0).gemm_n);
  __syncthreads();  // the tile is written
  BlockTile tile = shared_tile;
  const Pass pass(p, phases, tile.phase);

  // This split's part of gemm_k, in steps of BLOCK_K.
  const Index all_steps = (pass.gemm_k + BLOCK_K - 1) / BLOCK_K;
  const Index splits = static_cast<Index>(gridDim.y);
  const Index share = (all_steps + splits - 1) / splits;
  const Index first_step = static_cast<Index>(blockIdx.y) * share;
  const Index rest = all_steps - first_step;
  const Index steps = rest < 0 ? 0 : rest < share ? rest : share;

  if (threadIdx.x == 0) {
    loops = pass.loops();
    loops.step = loops.digits(TURN_K);
  }
  auto set_counts = [&] {
    if (threadIdx.x < TURN_K)
      counts[threadIdx.x] =
          pass.loops().digits(first_step * BLOCK_K + static_cast<Index>(threadIdx.x));
  };
  set_counts();
  table_a.set_positions(tile.row, pass.gemm_m, tile.group * pass.group_a,
                        [&](Index m) { return pass.a_position(m); });
  table_b.set_positions(tile.column, pass.gemm_n, tile.group * pass.group_b,
                        [&](Index n) { return pass.b_position(n); });
  __syncthreads();  // loops and halves of positions are written

  // Writes the halves of the TURN_K k from k on, if it is this warp's turn; k is modulo ROUND_K.
  auto set_steps = [&](unsigned k) {
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (k != warp * TURN_K || lane >= TURN_K) return;
    const unsigned place = warp % 2 * TURN_K + lane;
    const Digits<Index> digits = counts[lane];
    const bool exists = loops.contain(digits);
    table_a.steps[place] = exists ? pass.a_step(digits) : AddressHalf::outside(0);
    table_b.steps[place] = exists ? pass.b_step(digits) : AddressHalf::outside(0);
    counts[lane] = loops.next(digits);
  };
  const OperandA::Own own_a = table_a.own();
  const OperandB::Own own_b = table_b.own();
  auto copy_step = [&](int stage, unsigned k) {
    table_a.copy(shared.stages[stage].a, k % STEP_HALVES, a, own_a);
    table_b.copy(shared.stages[stage].b, k % STEP_HALVES, b, own_b);
  };

  unsigned k = 0;  // first k of the next copy in this split, modulo ROUND_K
  set_steps(k);
#pragma unroll 1
  for (int step = 0; step < STAGES - 1; ++step) {
    __syncthreads();  // the halves of this step are written
    if (step < steps) copy_step(step, k);
    commit_copies();
    set_steps(k = (k + BLOCK_K) % ROUND_K);
  }

  Sums sums;
  int stage = 0, free_stage = STAGES - 1;
#pragma unroll 1
  for (Index step = 0; step < steps; ++step) {
    wait_for_copies<STAGES - 2>();
    // The stage of this step is complete, and the stage of the previous step is free.  The halves for
    // the next copy are written, and the halves that the next turn overwrites are free.
    __syncthreads();
    if (step + STAGES - 1 < steps) copy_step(free_stage, k);
    commit_copies();
    set_steps(k = (k + BLOCK_K) % ROUND_K);
    sums.multiply(shared.stages[stage]);
    free_stage = stage;
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }

#if VIEW
  // Sum again without infinite and NaN elements, then add these: no bit of other results changes.
  if (__syncthreads_or(sums.contain_nan())) {
    sums = Sums();
    Nonfinite nonfinite;
    Stage& only = shared.stages[0];
    set_counts();
    k = 0;
#pragma unroll 1
    for (Index step = 0; step < steps; ++step) {
      __syncthreads();  // the loop counters are written, and the stage is free
      set_steps(k);
      __syncthreads();  // the halves of this step are written
      copy_step(0, k);
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();  // the stage is complete
      nonfinite.add(only, table_a, table_b, k % STEP_HALVES);
      __syncthreads();  // its elements are no longer needed
      clear_nonfinite<OperandA>(only.a);
      clear_nonfinite<OperandB>(only.b);
      __syncthreads();  // the stage is finite
      sums.multiply(only);
      k = (k + BLOCK_K) % ROUND_K;
    }
    nonfinite.replace(sums);
  }
#endif

  tile = shared_tile;
  // Rows and columns of the tile that are inside C.
  const int rows = static_cast<int>(min(pass.gemm_m - tile.row, static_cast<Index>(BLOCK_M)));
  const int columns = static_cast<int>(min(pass.gemm_n - tile.column, static_cast<Index>(BLOCK_N)));
  auto existing = [&](int row, int column) {  // elements of a run that are inside C
    return row < rows && column < columns ? C_ALONG_N ? columns - column : rows - row : 0;
  };
#if SPLIT
  const Index line = C_ALONG_N ? pass.gemm_n : pass.gemm_m;
  partial += (static_cast<long long>(blockIdx.y) * p.groups + tile.group) *
             static_cast<long long>(pass.gemm_m) * pass.gemm_n;
  const Index first_m = tile.row + Sums::row_of(0), first_n = tile.column + Sums::column_of(0);
  partial += C_ALONG_N ? first_m * line + first_n : first_n * line + first_m;
  sums.for_each_run([&](int i, int j, Accumulator(&run)[Sums::RUN]) {
    const int row = Sums::row_of(i), column = Sums::column_of(j);
    const int m = Sums::rows_apart(i), n = Sums::columns_apart(j);
    Accumulator* first = partial + (C_ALONG_N ? m * line + n : n * line + m);
    store_run<Accumulator>(run, existing(row, column), [&](int e) { return first + e; });
  });
#else
  wait_for_copies<0>();
  __syncthreads();  // the stages are no longer used; the offsets and the tile of C replace it

  OutputTile& output = shared.output;
  for (int row = threadIdx.x; row < rows; row += THREADS)
    (C_ALONG_N ? output.lines : output.places)[row] =
        tile.group * pass.group_c + pass.c_row(tile.row + row);
  for (int column = threadIdx.x; column < columns; column += THREADS)
    (C_ALONG_N ? output.places : output.lines)[column] = pass.c_column(tile.column + column);
  if (ADD || !OutputTile::STAGED) __syncthreads();  // the offsets are written

  if constexpr (ADD && OutputTile::STAGED) {
    output.for_each_piece(rows, columns, [&](OutputPiece* element, Index offset) {
      *element = *reinterpret_cast<const OutputPiece*>(addend + offset);
    });
    __syncthreads();  // the tile contains the addend; results replace it
  }

  Accumulator biases[Sums::COLUMNS];
#pragma unroll
  for (int j = 0; j < Sums::COLUMNS; ++j)
    biases[j] = bias_of(pass, tile.group, tile.column + Sums::column_of(j), bias);
  sums.for_each_run([&](int i, int j, Accumulator(&run)[Sums::RUN]) {
#pragma unroll
    for (int e = 0; e < Sums::RUN; ++e) run[e] += biases[C_ALONG_N ? j + e : j];
    const int row = Sums::row_of(i), column = Sums::column_of(j);
    const int line = C_ALONG_N ? row : column, place = C_ALONG_N ? column : row;
    if constexpr (ADD) {
#pragma unroll
      for (int e = 0; e < Sums::RUN; ++e)
        if (e < existing(row, column)) {
          Storage added;
          if constexpr (OutputTile::STAGED)
            added = output.element[line][place + e];
          else
            added = addend[output.lines[line] + output.places[place + e]];
          run[e] += Numeric<Storage>::widen(added);
        }
    }
#pragma unroll
    for (int e = 0; e < Sums::RUN; ++e) run[e] = activate<ACTIVATION>(run[e]);
    if constexpr (OutputTile::STAGED) {
#pragma unroll
      for (int e = 0; e < Sums::RUN; ++e)
        output.element[line][place + e] = Numeric<Storage>::narrow(run[e]);
    } else {
      store_run<Storage>(run, existing(row, column), [&](int e) {
        return c + output.lines[line] + output.places[place + e];
      });
    }
  });
  if constexpr (OutputTile::STAGED) {
    __syncthreads();  // the tile of C and its offsets are complete
    output.for_each_piece(rows, columns, [&](const OutputPiece* element, Index offset) {
      *reinterpret_cast<OutputPiece*>(c + offset) = *element;
    });
  }
#endif
}

#if SPLIT
static_assert(PHASES == 1, "splits have a single phase");

// Adds the splits' sums in order, one thread per vector of C_VECTOR elements of C.
extern "C" __global__ void __launch_bounds__(ADDING_THREADS, 1)
    conv_gather_reduce(const Accumulator* __restrict__ partial, const Storage* __restrict__ bias,
                       const Storage* addend, Storage* c, const int splits,
                       const __grid_constant__ ConvParameters p,
                       const __grid_constant__ StridePhases<PHASES> phases) {
  const Pass pass(p, phases, 0);
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

  Accumulator sum[C_VECTOR];
  add_partial_sums(sum, partial + element, splits, elements);
#pragma unroll
  for (int i = 0; i < C_VECTOR; ++i)
    sum[i] += bias_of(pass, group, C_ALONG_N ? n + i : n, bias);
  const auto offset = group * pass.group_c + pass.c_row(m) + pass.c_column(n);
  add_addend(sum, addend + offset);
#pragma unroll
  for (int i = 0; i < C_VECTOR; ++i) sum[i] = activate<ACTIVATION>(sum[i]);
  store_piece<C_VECTOR>(c + offset, sum);
}
#endif
