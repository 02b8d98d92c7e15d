// Gradient with respect to the bias: db[k] = sum over n, p, q of dy[n, k, p, q].
//
// One block per output channel.  Each thread sums every THREADS-th pixel in order, then the block
// folds its threads' sums in a fixed tree: the same bits on every run.
// Variants by -D: STORAGE, INDEX, THREADS (a power of two).
#include "maps.cuh"
#include "numeric.cuh"

using Index = INDEX;
using Storage = STORAGE;
using Accumulator = typename Numeric<Storage>::Accumulator;
static_assert((THREADS & (THREADS - 1)) == 0, "the tree halves the threads at each level");

extern "C" __global__ void __launch_bounds__(THREADS)
    conv_backprop_bias(const Storage* __restrict__ dy, Storage* __restrict__ db,
                       const ConvParameters p) {
  __shared__ Accumulator sums[THREADS];

  const long long filter = blockIdx.x;
  const Storage* channel = dy + filter * p.y_stride[1];
  const Index pixels = static_cast<Index>(p.batch * p.output[0] * p.output[1] * p.output[2]);

  Accumulator sum = 0;
  for (Index pixel = threadIdx.x; pixel < pixels; pixel += THREADS)
    sum += Numeric<Storage>::widen(channel[pixel_offset(pixel_at(pixel, p.output), p.y_stride)]);
  sums[threadIdx.x] = sum;

  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();  // the level above is complete
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) db[filter * p.bias_stride] = Numeric<Storage>::narrow(sums[0]);
}
