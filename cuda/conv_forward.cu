// Forward pass, generic: every legal configuration, every dtype, every chip.
//
//   y[n, k, p, q] = act( bias[k] + addend[n, k, p, q] + sum over c, r, s of
//                        x[n, c, p * stride - pad + r * dilation, ...] * w[k, c, r, s] )
//
// as one implicit GEMM per group (3-D, with 1-D and 2-D as special cases):
//
//   gemm_m = N * Z * P * Q    output pixels             A = x gathered under the windows
//   gemm_n = K / G            filters of the group      B = w
//   gemm_k = T * R * S * C/G  taps, channel fastest     C = y
//
// The im2col matrix A exists only as BLOCK_M x BLOCK_K tiles in shared memory.  Tensors are accessed
// by their strides, so that no memory order and no view needs a copy.  Sums have the accumulator type
// and the order of gemm_k, and are rounded once, so that every run returns the same bits.  The
// activation is -DACTIVATION, and an addend is read with -DADD=1 (epilogue.cuh).
#include "epilogue.cuh"
#include "maps.cuh"
#include "tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_forward(const Storage* __restrict__ x, const Storage* __restrict__ w,
                 const Storage* __restrict__ bias, const Storage* addend, Storage* y,
                 const ConvParameters p) {
  __shared__ SharedTile<BLOCK_M> a;
  __shared__ SharedTile<BLOCK_N> b;
  __shared__ Place<Index> pixels[BLOCK_M];  // address halves in x of the windows, per row of A
  __shared__ Place<Index> taps[BLOCK_K];    // address halves in x of the taps, per column of A
  __shared__ Index tap_weights[BLOCK_K];    // offsets in w of the taps, per column of A

  const Index channels = static_cast<Index>(p.channels);
  const Index gemm_m = static_cast<Index>(p.batch * p.output[0] * p.output[1] * p.output[2]);
  const Index gemm_n = static_cast<Index>(p.filters);
  const Index gemm_k = static_cast<Index>(p.filter[0] * p.filter[1] * p.filter[2]) * channels;
  const BlockTile tile(gemm_m, gemm_n);
  const WindowGather<Index> gather{p};

  const Storage* group_x = x + tile.group * p.channels * p.x_stride[1];
  const Storage* group_w = w + tile.group * p.filters * p.w_stride[0];
  const bool channels_last = p.x_stride[1] < p.x_stride[4];
  const bool filters_last = p.w_stride[0] < p.w_stride[1];

  for (int row = threadIdx.x; row < BLOCK_M; row += THREADS) {
    const Index m = smaller(tile.row + row, gemm_m - 1);  // rows beyond the end are never stored
    pixels[row] = gather.of_pixel(pixel_at(m, p.output));
  }

  Fragment fragment(p.y_stride[4] <= p.y_stride[1]);
  for (Index k0 = 0; k0 < gemm_k; k0 += BLOCK_K) {
    if (threadIdx.x < BLOCK_K) {
      const Tap<Index> tap =
          tap_at(smaller(k0 + static_cast<Index>(threadIdx.x), gemm_k - 1), channels, p.filter);
      taps[threadIdx.x] = gather.of_tap(tap);
      tap_weights[threadIdx.x] = tap_offset(tap, p.w_stride);
    }
    __syncthreads();  // taps are written; the previous step no longer reads a and b

    a.fill(channels_last, [&](int row, int k) {
      Index offset;
      const bool inside = gather.locate(pixels[row], taps[k], offset) && k0 + k < gemm_k;
      return inside ? Numeric<Storage>::widen(group_x[offset]) : Accumulator(0);
    });
    b.fill(!filters_last, [&](int column, int k) {
      const Index filter = tile.column + column;
      const bool inside = filter < gemm_n && k0 + k < gemm_k;
      return inside ? Numeric<Storage>::widen(
                          group_w[filter * static_cast<Index>(p.w_stride[0]) + tap_weights[k]])
                    : Accumulator(0);
    });
    __syncthreads();  // a and b are complete
    fragment.multiply(a, b);
  }

#pragma unroll
  for (int i = 0; i < THREAD_M; ++i) {
    const Index m = tile.row + fragment.row + i;
    if (m >= gemm_m) break;
    const auto pixel = pixel_offset(pixel_at(m, p.output), p.y_stride);
#pragma unroll
    for (int j = 0; j < THREAD_N; ++j) {
      const Index n = tile.column + fragment.column + j;
      if (n >= gemm_n) break;
      const Index filter = tile.group * gemm_n + n;
      const auto element = pixel + filter * static_cast<Index>(p.y_stride[1]);
      Accumulator sum = fragment.sum[i][j];
      if (bias != nullptr) sum += Numeric<Storage>::widen(bias[filter * p.bias_stride]);
      if (ADD) sum += Numeric<Storage>::widen(addend[element]);
      y[element] = Numeric<Storage>::narrow(activate<ACTIVATION>(sum));
    }
  }
}
