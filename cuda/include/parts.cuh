// Adds partial sums from a workspace in order, so that results do not depend on scheduling.
//
// Few threads add many partial sums (parts).  Small blocks distribute these threads over the chip.  Each
// thread hides latency by many loads in flight; launch bounds of one resident block per SM allow it the
// registers for these loads.
#ifndef CUPYCONV_PARTS_CUH
#define CUPYCONV_PARTS_CUH

#include "vector.cuh"

constexpr int ADDING_THREADS = 64;  // threads per block
constexpr int PARTS_AT_ONCE = 16;   // loads in flight per thread

// Adds up the parts of LENGTH adjacent sums.  `source` points to the first part; the parts of a sum are
// `apart` elements apart.
template <int LENGTH, class Accumulator>
__device__ __forceinline__ void add_parts(Accumulator (&sum)[LENGTH], const Accumulator* source,
                                          int parts, long long apart) {
#pragma unroll
  for (int j = 0; j < LENGTH; ++j) sum[j] = 0;
#pragma unroll 1
  for (int left = parts; left > 0; left -= PARTS_AT_ONCE) {
    Accumulator part[PARTS_AT_ONCE][LENGTH];
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; ++i) {
      load_piece(part[i], source, i < left);  // zeros after the last part
      source += apart;
    }
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; ++i)
#pragma unroll
      for (int j = 0; j < LENGTH; ++j) sum[j] += part[i][j];
  }
}

#endif
