// Adds partial sums from a workspace in order, so that results do not depend on scheduling.
//
// Few threads add many partial sums.  Small blocks distribute these threads over the chip.  Each
// thread hides latency by many loads in flight; launch bounds of one resident block per SM allow it the
// registers for these loads.
#ifndef CUPYCONV_PARTIAL_SUMS_CUH
#define CUPYCONV_PARTIAL_SUMS_CUH

#include "vector.cuh"

constexpr int ADDING_THREADS = 64;  // threads per block
constexpr int LOADS_IN_FLIGHT = 16;  // loads in flight per thread

// Adds up the partial sums of LENGTH adjacent sums.  `source` points to the first; the partial sums of one
// sum are `apart` elements apart.
template <int LENGTH, class Accumulator>
__device__ __forceinline__ void add_partial_sums(Accumulator (&sum)[LENGTH], const Accumulator* source,
                                                 int count, long long apart) {
#pragma unroll
  for (int j = 0; j < LENGTH; ++j) sum[j] = 0;
#pragma unroll 1
  for (int left = count; left > 0; left -= LOADS_IN_FLIGHT) {
    Accumulator partial[LOADS_IN_FLIGHT][LENGTH];
#pragma unroll
    for (int i = 0; i < LOADS_IN_FLIGHT; ++i) {
      load_piece(partial[i], source, i < left);  // zeros after the last one
      source += apart;
    }
#pragma unroll
    for (int i = 0; i < LOADS_IN_FLIGHT; ++i)
#pragma unroll
      for (int j = 0; j < LENGTH; ++j) sum[j] += partial[i][j];
  }
}

#endif
