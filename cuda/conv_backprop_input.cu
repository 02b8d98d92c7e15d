// Gradient with respect to the input, generic: every legal configuration, dtype and chip.
//
//   dx[n, c, h, w] = act( bias[c] + addend[n, c, h, w] + sum over k, r, s of
//                         dy[n, k, (h + pad - r * dilation) / stride, ...] * w[k, c, r, s] )
//
// where the sum runs over the taps for which the division is exact and the output exists.  A gradient
// has no bias, addend or activation; a transposed convolution may have all of them.  The activation is
// -DACTIVATION, and an addend is read with -DADD=1 (epilogue.cuh).  Each group is one
// implicit GEMM, with the conjugate of a complex w:
//
//   gemm_m = N * D * H * W    input pixels                A = dy of the outputs that read a pixel
//   gemm_n = C / G            channels of the group       B = w
//   gemm_k = T * R * S * K/G  taps, filter fastest        C = dx
//
// Every element of dx is stored; an element that no window reaches has a sum of zero.  With strides
// above 1, many elements of A are zeros here.  The faster kernels (conv_gather.cu and others) avoid these
// zeros: they divide the pixels into stride phases (gather.cuh).
#include "epilogue.cuh"
#include "maps.cuh"
#include "tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_backprop_input(const Storage* __restrict__ dy, const Storage* __restrict__ w,
                        const Storage* __restrict__ bias, const Storage* addend, Storage* dx,
                        const ConvParameters p) {
  __shared__ SharedTile<BLOCK_M> a;
  __shared__ SharedTile<BLOCK_N> b;
  __shared__ Place<Index> pixels[BLOCK_M];  // address halves in dy of the input pixels, per row of A
  __shared__ Place<Index> taps[BLOCK_K];    // address halves in dy of taps and filters, per column of A
  __shared__ Index tap_weights[BLOCK_K];    // offsets in w of taps and filters, per column of A

  const Index filters = static_cast<Index>(p.filters);
  const Index gemm_m = static_cast<Index>(p.batch * p.input[0] * p.input[1] * p.input[2]);
  const Index gemm_n = static_cast<Index>(p.channels);
  const Index gemm_k = static_cast<Index>(p.filter[0] * p.filter[1] * p.filter[2]) * filters;
  const BlockTile tile(gemm_m, gemm_n);
  const ContributionGather<Index> gather{p};

  const Storage* group_dy = dy + tile.group * p.filters * p.y_stride[1];
  const Storage* group_w = w + tile.group * p.filters * p.w_stride[0];
  const bool channels_last = p.y_stride[1] < p.y_stride[4];
  const bool filters_last = p.w_stride[0] < p.w_stride[1];

  for (int row = threadIdx.x; row < BLOCK_M; row += THREADS) {
    const Index m = smaller(tile.row + row, gemm_m - 1);  // rows beyond the end are never stored
    pixels[row] = gather.of_pixel(pixel_at(m, p.input));
  }

  Fragment fragment(p.x_stride[4] <= p.x_stride[1]);
  for (Index k0 = 0; k0 < gemm_k; k0 += BLOCK_K) {
    if (threadIdx.x < BLOCK_K) {
      Tap<Index> tap =
          tap_at(smaller(k0 + static_cast<Index>(threadIdx.x), gemm_k - 1), filters, p.filter);
      taps[threadIdx.x] = gather.of_tap(tap);
      const Index filter = tap.c;
      tap.c = 0;
      tap_weights[threadIdx.x] =
          tap_offset(tap, p.w_stride) + filter * static_cast<Index>(p.w_stride[0]);
    }
    __syncthreads();  // taps are written; the previous step no longer reads a and b

    a.fill(channels_last, [&](int row, int k) {
      Index offset;
      const bool inside = gather.locate(pixels[row], taps[k], offset) && k0 + k < gemm_k;
      return inside ? Numeric<Storage>::widen(group_dy[offset]) : Accumulator(0);
    });
    b.fill(filters_last, [&](int column, int k) {
      const Index channel = tile.column + column;
      const bool inside = channel < gemm_n && k0 + k < gemm_k;
      return inside ? conjugated(Numeric<Storage>::widen(
                          group_w[channel * static_cast<Index>(p.w_stride[1]) + tap_weights[k]]))
                    : Accumulator(0);
    });
    __syncthreads();  // a and b are complete
    fragment.multiply(a, b);
  }

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const Index m = tile.row + fragment.row + i;
    if (m >= gemm_m) break;
    const auto pixel = pixel_offset(pixel_at(m, p.input), p.x_stride);
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const Index n = tile.column + fragment.column + j;
      if (n >= gemm_n) break;
      const Index channel = tile.group * gemm_n + n;
      const auto element = pixel + channel * static_cast<Index>(p.x_stride[1]);
      Accumulator sum = fragment.sum[i][j];
      if (bias != nullptr) sum += Numeric<Storage>::widen(bias[channel * p.bias_stride]);
      if (ADD) sum += Numeric<Storage>::widen(addend[element]);
      dx[element] = Numeric<Storage>::narrow(activate<ACTIVATION>(sum));
    }
  }
}
