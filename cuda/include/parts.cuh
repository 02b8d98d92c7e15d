// Sums that lie in a workspace in parts, added in order: the bits never depend on the schedule.
//
// Few threads add many parts: small blocks spread them over the chip, and nothing hides their waits
// but loads that are under way together.  Launch bounds of one resident block leave them registers.
#ifndef CUPYCONV_PARTS_CUH
#define CUPYCONV_PARTS_CUH

#include "vector.cuh"

constexpr int ADDING_THREADS = 64;
constexpr int PARTS_AT_ONCE = 16;

// LENGTH neighbouring sums, of which source has the first part and those after it lie `apart`.
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
      load_piece(part[i], source, i < left);  // beyond the last zeros, which change no sum
      source += apart;
    }
#pragma unroll
    for (int i = 0; i < PARTS_AT_ONCE; ++i)
#pragma unroll
      for (int j = 0; j < LENGTH; ++j) sum[j] += part[i][j];
  }
}

#endif
