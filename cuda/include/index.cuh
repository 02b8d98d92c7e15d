// Index, the type of all indices and offsets.  The macro INDEX is int if 32 bits are enough, else
// long long.
#ifndef CUPYCONV_INDEX_CUH
#define CUPYCONV_INDEX_CUH

using Index = INDEX;

__device__ __forceinline__ Index narrowed(long long value) { return static_cast<Index>(value); }

__device__ __forceinline__ bool is_within(Index position, Index extent) {
  return static_cast<unsigned INDEX>(position) < static_cast<unsigned INDEX>(extent);
}

#endif
