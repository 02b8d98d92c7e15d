// Last step of a filter gradient whose output pixels are divided into chunks.  Earlier blocks have
// written the sums of each chunk to a workspace.  add_chunks adds the chunks in order, so that results do
// not depend on scheduling.
#ifndef CUPYCONV_CHUNKS_CUH
#define CUPYCONV_CHUNKS_CUH

#include "maps.cuh"
#include "numeric.cuh"
#include "partial_sums.cuh"

// Computes dw, one element per thread.  The workspace `partial` is indexed [chunk][tap][filter] with
// FILTERS_LAST, else [chunk][filter][tap].  Here, a tap is (t, r, s, c), with c fastest.
template <bool FILTERS_LAST, class Index, class Accumulator, class Storage>
__device__ __forceinline__ void add_chunks(const Accumulator* __restrict__ partial,
                                           Storage* __restrict__ dw, int chunks,
                                           const ConvParameters& p) {
  const Index filters = static_cast<Index>(p.groups * p.filters);
  const Index taps = static_cast<Index>(p.channels * p.filter[0] * p.filter[1] * p.filter[2]);
  const long long elements = static_cast<long long>(filters) * taps;
  const long long number = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (number >= elements) return;

  Accumulator sum[1];
  add_partial_sums(sum, partial + number, chunks, elements);
  const Index element = static_cast<Index>(number);
  const Index filter = FILTERS_LAST ? element % filters : element / taps;
  const Index number_of_tap = FILTERS_LAST ? element / filters : element % taps;
  const Tap<Index> tap = tap_at(number_of_tap, static_cast<Index>(p.channels), p.filter);
  dw[filter * static_cast<Index>(p.w_stride[0]) + tap_offset(tap, p.w_stride)] =
      Numeric<Storage>::narrow(sum[0]);
}

#endif
