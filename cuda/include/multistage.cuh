// Tiles of A and B in shared memory, for kernels with a pipeline of stages: the layout of a tile, copies
// from global memory, and loads of fragments or, without tensor cores, of 16-byte chunks.  Tiles are
// swizzled so that neither copies nor loads have bank conflicts; load_chunk states the one exception.
#ifndef CUPYCONV_MULTISTAGE_CUH
#define CUPYCONV_MULTISTAGE_CUH

#include "numeric.cuh"
#include "vector.cuh"

// A warp's product of fragments is 16 x 8 x DEPTH (m, n, k) for all types; a thread holds four registers
// of A, two of B, and four sums:
//
//   16 bits            m16n8k16, or two m16n8k8 on compute capability 7.5; a register holds two elements
//                      along k
//   float, as TF32     m16n8k8
//   double             four m8n8k4, two along m times two along k
//
// ldmatrix loads rows of 16 bytes along k, and can transpose only 16-bit elements.  Therefore elements
// are loaded one by one (BY_MATRIX is false) if they are doubles, or if they are floats that are
// contiguous along m or n.
template <class Storage>
struct Fragments {
  using Register = unsigned;
  static constexpr int DEPTH = 32 / sizeof(Storage);
  template <bool K_CONTIGUOUS>
  static constexpr bool BY_MATRIX = sizeof(Storage) == 2 || K_CONTIGUOUS;
};
template <>
struct Fragments<double> {
  using Register = double;
  static constexpr int DEPTH = 8;
  template <bool K_CONTIGUOUS>
  static constexpr bool BY_MATRIX = false;
};

// The tile of one operand: LINES lines of LINE contiguous elements.  Lines run along k (K_CONTIGUOUS) or
// else along m or n.
//
// Elements that a warp reads together are in different banks.  Lines consist of 16-byte chunks, and the
// order of the chunks depends on the line's number (the swizzle).  ldmatrix reads one chunk of eight
// successive lines; doubles along k are read from two chunks of four lines.  Floats and doubles in lines
// along m or n are read one by one from four lines.  These lines have no swizzle but 32 bytes of padding
// each; addresses then differ by constants, which saves registers.  Only lines of 64 bytes have a
// swizzle here, too: with padding, stores to two lines would have bank conflicts.
template <class Storage, int LINES_, int LINE_, bool K_CONTIGUOUS_>
struct StageTile {
  using Element = Storage;
  static constexpr int LINES = LINES_, LINE = LINE_;
  static constexpr bool K_CONTIGUOUS = K_CONTIGUOUS_;
  static constexpr bool BY_MATRIX = Fragments<Storage>::template BY_MATRIX<K_CONTIGUOUS>;
  static constexpr int CHUNK = 16 / sizeof(Storage);
  static constexpr int CHUNKS = LINE / CHUNK;
  static_assert((CHUNKS == 2 && BY_MATRIX) || CHUNKS == 4 || CHUNKS % 8 == 0, "32, 64 or 128 n bytes");

  static constexpr int PADDING = BY_MATRIX || K_CONTIGUOUS || CHUNKS == 4 ? 0 : 32 / sizeof(Storage);
  static constexpr int PITCH = LINE + PADDING;  // elements per line, including padding
  alignas(128) Storage element[LINES * PITCH];

  // Lines whose distance is a multiple of PERIOD have the same swizzle; their addresses differ by PITCH
  // per line.
  static constexpr int PERIOD = PADDING ? 1 : 8;

  // Unsigned byte offsets let the compiler see the common part of a warp's addresses.
  __device__ __forceinline__ Storage* at(unsigned line, unsigned position) {
    constexpr unsigned SIZE = sizeof(Storage);
    unsigned place = position * SIZE;
    if (!PADDING) {
      constexpr unsigned LINES_OF_ROW = CHUNKS < 8 ? 8 / CHUNKS : 1;
      const unsigned row = line / LINES_OF_ROW;  // row of 128 bytes, which spans all banks
      place ^= (BY_MATRIX ? row % (8 / LINES_OF_ROW) : row % (4 / LINES_OF_ROW) * 2) * 16;
    }
    return reinterpret_cast<Storage*>(reinterpret_cast<unsigned char*>(element) +
                                      line * (PITCH * SIZE) + place);
  }
};

// Whether cp.async can copy VECTOR elements; it cannot copy a single 16-bit element.
template <int VECTOR, class Storage>
constexpr bool COPIED_ASYNC = ASYNC_COPY && VECTOR * sizeof(Storage) >= 4;

// Begins to copy VECTOR contiguous elements, or zeros if the source is outside the tensor.  cp.async
// copies belong to the thread's current group.  Vectors that cp.async cannot copy are loaded and
// returned, and finish_copy stores them.  Begin all copies before the first finish_copy, so that their
// loads are in flight together.
template <int VECTOR, class Storage>
__device__ __forceinline__ Piece<Storage, VECTOR> begin_copy(Storage* destination,
                                                             const Storage* source, bool inside) {
  using Whole = Piece<Storage, VECTOR>;
  [[maybe_unused]] constexpr int BYTES = sizeof(Whole);
  Whole piece = {};
  if constexpr (!COPIED_ASYNC<VECTOR, Storage>) {
    if (inside) piece = *reinterpret_cast<const Whole*>(source);
  }
#if ASYNC_COPY
  if constexpr (BYTES == 16) {
    ptx::cp_async_16(destination, source, inside ? 16 : 0);
  } else if constexpr (BYTES == 8) {
    ptx::cp_async_8(destination, source, inside ? 8 : 0);
  } else if constexpr (BYTES == 4) {
    ptx::cp_async_4(destination, source, inside ? 4 : 0);
  }
#endif
  return piece;
}
template <int VECTOR, class Storage>
__device__ __forceinline__ void finish_copy(Storage* destination,
                                            const Piece<Storage, VECTOR>& piece) {
  if constexpr (!COPIED_ASYNC<VECTOR, Storage>)
    *reinterpret_cast<Piece<Storage, VECTOR>*>(destination) = piece;
}

// Begins and finishes a copy.
template <int VECTOR, class Storage>
__device__ __forceinline__ void copy_piece(Storage* destination, const Storage* source,
                                           bool inside) {
  finish_copy<VECTOR>(destination, begin_copy<VECTOR>(destination, source, inside));
}

__device__ __forceinline__ void commit_copies() {
#if ASYNC_COPY
  ptx::cp_async_commit();
#endif
}

// Waits until at most the newest LEFT groups of this thread's copies are in flight.
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
#if ASYNC_COPY
  ptx::cp_async_wait<LEFT>();
#endif
}

// Loads fragments of an operand: 16 positions (rows of A or columns of B) from `position` on, and DEPTH
// elements along k from `k` on.  Registers hold the quarters of these 16 x DEPTH elements in the order of
// an A operand (positions 0-7 and 8-15, then the second half of k), or of two B operands (both halves of
// k for positions 0-7, then for positions 8-15).
template <bool IS_A, class Register, class Tile>
__device__ __forceinline__ void load_fragments(Register (&registers)[4], Tile& tile, int position,
                                               int k) {
  using Storage = typename Tile::Element;
  constexpr bool K_CONTIGUOUS = Tile::K_CONTIGUOUS;
  constexpr int HALF = Fragments<Storage>::DEPTH / 2;
  const int lane = threadIdx.x % 32;
  if constexpr (Tile::BY_MATRIX) {
    const int second = lane / 8 % 2, third = lane / 16;
    position += (IS_A ? second : third) * 8;
    k += (IS_A ? third : second) * HALF;
    if constexpr (K_CONTIGUOUS)
      ptx::ldmatrix_x4(registers, tile.at(position + lane % 8, k));
    else
      ptx::ldmatrix_x4_trans(registers, tile.at(k + lane % 8, position));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = position + (IS_A ? i % 2 : i / 2) * 8 + lane / 4;
      const int depth = k + (IS_A ? i / 2 : i % 2) * HALF + lane % 4;
      const Storage element = *(K_CONTIGUOUS ? tile.at(at, depth) : tile.at(depth, at));
      if constexpr (sizeof(Storage) == 4)
        registers[i] = __float_as_uint(element);
      else
        registers[i] = element;
    }
  }
#if ASYNC_COPY
  if constexpr (sizeof(Storage) == 4)
#pragma unroll
    for (int i = 0; i < 4; ++i) registers[i] = ptx::tf32_from_f32(__uint_as_float(registers[i]));
#endif
}

// Returns the chunk that is `positions` positions and `k` elements along k after `place`, for products
// without tensor cores; tile.at() returned `place`.  The function ignores the swizzle, so both chunks
// must have the same swizzle.  If lines run along k, callers pass k = 0 and one of two distances: a
// multiple of PERIOD, or the distance to the other line of a pair that shares 128 bytes.  (Loads of B
// have bank conflicts for doubles along k, but the products of doubles take much longer than these
// loads.)
template <class Tile>
__device__ __forceinline__ Piece<typename Tile::Element, Tile::CHUNK> load_chunk(
    const typename Tile::Element* place, int positions, int k) {
  return *reinterpret_cast<const Piece<typename Tile::Element, Tile::CHUNK>*>(
      place + (Tile::K_CONTIGUOUS ? positions * Tile::PITCH + k : k * Tile::PITCH + positions));
}

// d += a * b on the tensor cores, with DEPTH elements of k.
__device__ __forceinline__ void multiply_fragments(float (&d)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1, half_t) {
#if ASYNC_COPY
  ptx::mma_m16n8k16_f16(d, a, b0, b1);
#else  // 7.5 has only the instruction for 8 elements of k
  const unsigned low[2] = {a[0], a[1]}, high[2] = {a[2], a[3]};
  ptx::mma_m16n8k8_f16(d, low, b0);
  ptx::mma_m16n8k8_f16(d, high, b1);
#endif
}
#if ASYNC_COPY
__device__ __forceinline__ void multiply_fragments(float (&d)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1, bfloat16_t) {
  ptx::mma_m16n8k16_bf16(d, a, b0, b1);
}
__device__ __forceinline__ void multiply_fragments(float (&d)[4], const unsigned (&a)[4],
                                                   unsigned b0, unsigned b1, float) {
  ptx::mma_m16n8k8_tf32(d, a, b0, b1);
}
__device__ __forceinline__ void multiply_fragments(double (&d)[4], const double (&a)[4], double b0,
                                                   double b1, double) {
  double upper[2] = {d[0], d[1]}, lower[2] = {d[2], d[3]};
  ptx::mma_m8n8k4_f64(upper, a[0], b0);
  ptx::mma_m8n8k4_f64(lower, a[1], b0);
  ptx::mma_m8n8k4_f64(upper, a[2], b1);
  ptx::mma_m8n8k4_f64(lower, a[3], b1);
  d[0] = upper[0], d[1] = upper[1], d[2] = lower[0], d[3] = lower[1];
}
#endif

#endif
