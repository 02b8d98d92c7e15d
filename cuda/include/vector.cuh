// Vectors of contiguous elements.
#ifndef CUPYCONV_VECTOR_CUH
#define CUPYCONV_VECTOR_CUH

#include "numeric.cuh"

// LENGTH elements, aligned to their total size.  A single element has the alignment of its type; a
// complex number has the alignment of its parts.
template <class Storage, int LENGTH>
struct alignas(LENGTH == 1 ? alignof(Storage) : LENGTH * sizeof(Storage)) Piece {
  Storage element[LENGTH];
};

// Loads LENGTH elements, aligned as a Piece, into `value`.  If `inside` is false, sets zeros and reads
// nothing.
template <int LENGTH, class Storage, class Accumulator>
__device__ __forceinline__ void load_piece(Accumulator (&value)[LENGTH], const Storage* source,
                                           bool inside) {
  Piece<Storage, LENGTH> piece = {};
  if (inside) piece = *reinterpret_cast<const Piece<Storage, LENGTH>*>(source);
#pragma unroll
  for (int i = 0; i < LENGTH; ++i) value[i] = Numeric<Storage>::widen(piece.element[i]);
}

// Rounds LENGTH sums and stores them.
template <int LENGTH, class Storage, class Accumulator>
__device__ __forceinline__ void store_piece(Storage* destination,
                                            const Accumulator (&value)[LENGTH]) {
  Piece<Storage, LENGTH> piece;
#pragma unroll
  for (int i = 0; i < LENGTH; ++i) piece.element[i] = Numeric<Storage>::narrow(value[i]);
  *reinterpret_cast<Piece<Storage, LENGTH>*>(destination) = piece;
}

#endif
