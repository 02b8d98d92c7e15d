// Gradient with respect to the filter, generic: every legal configuration, dtype and chip.
//
//   dw[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, p * stride - pad + r * dilation, ...]
//
// Each pair of an output channel k and an input channel c has a separate sum over all output pixels.
// Each group is one implicit GEMM, with the conjugate of a complex x:
//
//   gemm_m = K / G            filters of the group        A = dy
//   gemm_n = T * R * S * C/G  taps, channel fastest       B = x gathered under the windows
//   gemm_k = N * Z * P * Q    output pixels               C = dw
//
// A block sums over all output pixels in order, so that every run returns the same bits.  The faster
// kernels (conv_gather.cu and others) divide gemm_k among blocks.
#include "maps.cuh"
#include "tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_backprop_filter(const Storage* __restrict__ x, const Storage* __restrict__ dy,
                         Storage* __restrict__ dw, const ConvParameters p) {
  __shared__ SharedTile<BLOCK_M> a;
  __shared__ SharedTile<BLOCK_N> b;
  __shared__ Place<Index> taps[BLOCK_N];     // address halves in x of the taps, per column of B
  __shared__ Place<Index> pixels[BLOCK_K];   // address halves in x of the windows, per row of B
  __shared__ Index pixel_outputs[BLOCK_K];   // offsets in dy of the pixels of this step

  const Index channels = static_cast<Index>(p.channels);
  const Index gemm_m = static_cast<Index>(p.filters);
  const Index gemm_n = static_cast<Index>(p.filter[0] * p.filter[1] * p.filter[2]) * channels;
  const Index gemm_k = static_cast<Index>(p.batch * p.output[0] * p.output[1] * p.output[2]);
  const BlockTile tile(gemm_m, gemm_n);
  const WindowGather<Index> gather{p};

  const Storage* group_x = x + tile.group * p.channels * p.x_stride[1];
  const Storage* group_dy = dy + tile.group * p.filters * p.y_stride[1];
  const bool x_channels_last = p.x_stride[1] < p.x_stride[4];
  const bool dy_channels_last = p.y_stride[1] < p.y_stride[4];

  for (int column = threadIdx.x; column < BLOCK_N; column += THREADS) {
    const Index n = smaller(tile.column + column, gemm_n - 1);  // columns beyond the end are never stored
    taps[column] = gather.of_tap(tap_at(n, channels, p.filter));
  }

  Fragment fragment(p.w_stride[0] < p.w_stride[1]);
  for (Index k0 = 0; k0 < gemm_k; k0 += BLOCK_K) {
    if (threadIdx.x < BLOCK_K) {
      const Index k = smaller(k0 + static_cast<Index>(threadIdx.x), gemm_k - 1);
      const Pixel<Index> pixel = pixel_at(k, p.output);
      pixels[threadIdx.x] = gather.of_pixel(pixel);
      pixel_outputs[threadIdx.x] = pixel_offset(pixel, p.y_stride);
    }
    __syncthreads();  // pixels are written; the previous step no longer reads a and b

    a.fill(!dy_channels_last, [&](int row, int k) {
      const Index filter = tile.row + row;
      const bool inside = filter < gemm_m && k0 + k < gemm_k;
      return inside ? Numeric<Storage>::widen(
                          group_dy[filter * static_cast<Index>(p.y_stride[1]) + pixel_outputs[k]])
                    : Accumulator(0);
    });
    b.fill(!x_channels_last, [&](int column, int k) {
      Index offset;
      const bool inside = gather.locate(pixels[k], taps[column], offset) && k0 + k < gemm_k;
      return inside ? conjugated(Numeric<Storage>::widen(group_x[offset])) : Accumulator(0);
    });
    __syncthreads();  // a and b are complete
    fragment.multiply(a, b);
  }

#pragma unroll
  for (int j = 0; j < THREAD_N; ++j) {
    const Index n = tile.column + fragment.column + j;
    if (n >= gemm_n) break;
    const Index offset = tap_offset(tap_at(n, channels, p.filter), p.w_stride);
#pragma unroll
    for (int i = 0; i < THREAD_M; ++i) {
      const Index m = tile.row + fragment.row + i;
      if (m >= gemm_m) break;
      const Index filter = tile.group * gemm_m + m;
      dw[filter * static_cast<Index>(p.w_stride[0]) + offset] =
          Numeric<Storage>::narrow(fragment.sum[i][j]);
    }
  }
}
