// A ring of shared-memory stages for tensor-core kernels: tiles of 16-bit elements, swizzled so that
// neither copies nor ldmatrix meet a bank conflict, and filled piece by piece.
#ifndef CUPYCONV_RING_CUH
#define CUPYCONV_RING_CUH

#include "numeric.cuh"

// One operand's tile: LINES lines of LINE elements that are neighbours in memory.
//
// Lines are cut into chunks of 16 bytes, and a chunk's place in its line is exchanged according to
// the line's number: eight chunks of the same column in eight successive lines, which is what
// ldmatrix reads at once, then lie in eight different groups of banks.
template <class Storage, int LINES_, int LINE_>
struct RingTile {
  static constexpr int LINES = LINES_, LINE = LINE_;
  static constexpr int CHUNK = 8;
  static constexpr int CHUNKS = LINE / CHUNK;
  static_assert(sizeof(Storage) == 2 && (CHUNKS == 4 || CHUNKS % 8 == 0), "64 or 128 n bytes");

  alignas(128) Storage element[LINES * LINE];

  __device__ __forceinline__ Storage* at(int line, int position) {
    const int turn = CHUNKS == 4 ? line / 2 % 4 : line % 8;
    return &element[line * LINE + (position / CHUNK ^ turn) * CHUNK + position % CHUNK];
  }
};

// Copies VECTOR neighbouring elements, or zeros where the source lies outside the tensor.  With
// ASYNC_COPY the copy belongs to the thread's current cp.async group; without, or for single
// 16-bit elements, which cp.async does not take, it is done on return.
template <int VECTOR, class Storage>
__device__ __forceinline__ void copy_piece(Storage* destination, const Storage* source,
                                           bool inside) {
  constexpr int BYTES = VECTOR * sizeof(Storage);
#if ASYNC_COPY
  if constexpr (BYTES == 16) {
    ptx::cp_async_16(destination, source, inside ? 16 : 0);
    return;
  } else if constexpr (BYTES == 8) {
    ptx::cp_async_8(destination, source, inside ? 8 : 0);
    return;
  } else if constexpr (BYTES == 4) {
    ptx::cp_async_4(destination, source, inside ? 4 : 0);
    return;
  }
#endif
  struct alignas(BYTES) Piece {
    Storage element[VECTOR];
  };
  Piece piece = {};
  if (inside) piece = *reinterpret_cast<const Piece*>(source);
  *reinterpret_cast<Piece*>(destination) = piece;
}

__device__ __forceinline__ void commit_copies() {
#if ASYNC_COPY
  ptx::cp_async_commit();
#endif
}

// Waits for all of this thread's groups but the newest LEFT.
template <int LEFT>
__device__ __forceinline__ void wait_for_copies() {
#if ASYNC_COPY
  ptx::cp_async_wait<LEFT>();
#endif
}

// The 16 x 16 piece of an operand at (position, k) as mma fragments.  Registers hold the four 8 x 8
// matrices in the order of an A operand (positions 0-7 and 8-15, then the next eight k), or of two B
// operands (k 0-7 and 8-15 of positions 0-7, then of positions 8-15).
template <bool K_CONTIGUOUS, bool IS_A, class Tile>
__device__ __forceinline__ void load_fragments(unsigned (&registers)[4], Tile& tile, int position,
                                               int k) {
  const int lane = threadIdx.x % 32;
  const int second = lane / 8 % 2, third = lane / 16;
  position += (IS_A ? second : third) * 8;
  k += (IS_A ? third : second) * 8;
  if constexpr (K_CONTIGUOUS)
    ptx::ldmatrix_x4(registers, tile.at(position + lane % 8, k));
  else
    ptx::ldmatrix_x4_trans(registers, tile.at(k + lane % 8, position));
}

// d += a * b over 16 k on the tensor cores.
__device__ __forceinline__ void multiply_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1, half_t) {
#if ASYNC_COPY
  ptx::mma_m16n8k16_f16(d, a, b0, b1);
#else  // 7.5 has the instruction for 8 k only
  const unsigned low[2] = {a[0], a[1]}, high[2] = {a[2], a[3]};
  ptx::mma_m16n8k8_f16(d, low, b0);
  ptx::mma_m16n8k8_f16(d, high, b1);
#endif
}
#if ASYNC_COPY
__device__ __forceinline__ void multiply_16816(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                               unsigned b1, bfloat16_t) {
  ptx::mma_m16n8k16_bf16(d, a, b0, b1);
}
#endif

#endif
