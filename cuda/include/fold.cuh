// Columns of dx whose stride phases are folded into channels (cupyconv/kernels/views.py).
//
// A cell is FOLD_D x FOLD_H x FOLD_W adjacent pixels of dx.  Column n is channel n % FOLD_CHANNELS of one
// pixel of each cell; the pixel's width varies fastest.  Without these macros, column n is channel n.
#ifndef CUPYCONV_FOLD_CUH
#define CUPYCONV_FOLD_CUH

#include "parameters.cuh"

#ifdef FOLD_CHANNELS
constexpr bool FOLDED = true;
#else
constexpr bool FOLDED = false;
#define FOLD_CHANNELS 1
#define FOLD_D 1
#define FOLD_H 1
#define FOLD_W 1
#endif

// Returns the channel of a column of dx.
template <class Index>
__device__ __forceinline__ Index channel_of(Index column) {
  return FOLDED ? column % FOLD_CHANNELS : column;
}

// Returns the offset of a column of dx from column 0.
template <class Index>
__device__ __forceinline__ Index column_offset(Index column, const ConvParameters& p) {
  const Index channel = channel_of(column) * static_cast<Index>(p.x_stride[1]);
  if (!FOLDED) return channel;
  const Index pixel = column / FOLD_CHANNELS, row = pixel / FOLD_W;
  return channel + pixel % FOLD_W * static_cast<Index>(p.fold_stride[2]) +
         row % FOLD_H * static_cast<Index>(p.fold_stride[1]) +
         row / FOLD_H * static_cast<Index>(p.fold_stride[0]);
}

#endif
