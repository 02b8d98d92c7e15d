// Gradient with respect to the bias: db[k] = sum over n, p, q of dy[n, k, p, q].
//
// dy is read once, in vectors of VECTOR contiguous channels (CHANNELS_LAST) or pixels.  A block sums a
// chunk of the pixels: with CHANNELS_LAST for CHANNEL_LANES vectors of channels, else for one channel.  In
// each step, every thread loads one vector; PIXEL_LANES threads share a channel or vector of channels.
// Threads advance the digits of pixel numbers without divisions (maps.cuh), and reduce their sums in a
// fixed tree.  If there are several chunks, conv_backprop_bias_reduce adds their sums in order, so that
// every run returns the same bits.
//
// A variant is chosen with -D: STORAGE, INDEX, VECTOR, CHANNELS_LAST, CHANNEL_LANES (a power of two,
// 1 without CHANNELS_LAST).
#include "index.cuh"
#include "maps.cuh"
#include "numeric.cuh"
#include "partial_sums.cuh"
#include "vector.cuh"

using Storage = STORAGE;
using Accumulator = typename Numeric<Storage>::Accumulator;

constexpr int THREADS = 256;
constexpr int PIXEL_LANES = THREADS / CHANNEL_LANES;
constexpr int CHANNELS = CHANNELS_LAST ? CHANNEL_LANES * VECTOR : 1;  // channels per block
constexpr int STEP = PIXEL_LANES * (CHANNELS_LAST ? 1 : VECTOR);     // pixels per step
static_assert((PIXEL_LANES & (PIXEL_LANES - 1)) == 0, "the tree halves the lanes at each level");
static_assert(PIXEL_LANES * CHANNEL_LANES == THREADS, "no thread is left over");
static_assert(CHANNELS_LAST || CHANNEL_LANES == 1, "lanes along pixels only");

// partial is indexed (chunk, channel), or null if there is only one chunk.  chunk_pixels is a multiple
// of STEP.
extern "C" __global__ void __launch_bounds__(THREADS)
    conv_backprop_bias(const Storage* __restrict__ dy, Storage* __restrict__ db,
                       Accumulator* __restrict__ partial, const long long chunk_pixels,
                       const __grid_constant__ ConvParameters p) {
  __shared__ Accumulator sums[THREADS][VECTOR];

  const int channel_lane = CHANNELS_LAST ? threadIdx.x % CHANNEL_LANES : 0;
  const int pixel_lane = CHANNELS_LAST ? threadIdx.x / CHANNEL_LANES : threadIdx.x;
  const Index channel = static_cast<Index>(blockIdx.x) * CHANNELS + channel_lane * VECTOR;
  const Index pixels = narrowed(p.batch * p.output[0] * p.output[1] * p.output[2]);
  const Index chunk = static_cast<Index>(blockIdx.y * chunk_pixels);
  const Index rest = pixels - chunk;
  const Index end = chunk + (rest < chunk_pixels ? rest : static_cast<Index>(chunk_pixels));

  Loops<Index> loops(narrowed(p.output[2]), narrowed(p.output[1]),
                     narrowed(p.output[0]), narrowed(p.batch));
  loops.step = loops.digits(STEP);
  Index pixel = chunk + pixel_lane * (CHANNELS_LAST ? 1 : VECTOR);
  Digits<Index> at = loops.digits(pixel);

  Accumulator sum[VECTOR] = {};
  if (channel < p.filters) {
    const Storage* source = dy + channel * p.y_stride[1];
#pragma unroll 4
    for (; pixel < end; pixel += STEP) {
      const Pixel<Index> place = {at.digit[3], at.digit[2], at.digit[1], at.digit[0]};
      Accumulator piece[VECTOR];
      load_piece<VECTOR>(piece, source + pixel_offset(place, p.y_stride), true);
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sum[i] += piece[i];
      at = loops.next(at);
    }
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) sums[threadIdx.x][i] = sum[i];

  for (int half = PIXEL_LANES / 2; half > 0; half /= 2) {
    __syncthreads();  // the previous level is complete
    if (pixel_lane < half)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        sums[threadIdx.x][i] += sums[threadIdx.x + half * CHANNEL_LANES][i];
  }
  if (pixel_lane > 0 || channel >= p.filters) return;
  constexpr int RESULTS = CHANNELS_LAST ? VECTOR : 1;
#pragma unroll
  for (int i = 0; i < RESULTS; ++i) {
    Accumulator result = sums[threadIdx.x][i];
#pragma unroll
    for (int j = 1; j < VECTOR / RESULTS; ++j) result += sums[threadIdx.x][j];
    if (partial == nullptr)
      db[(channel + i) * p.bias_stride] = Numeric<Storage>::narrow(result);
    else
      partial[blockIdx.y * p.filters + channel + i] = result;
  }
}

// Adds the chunks' sums in order, one thread per channel.
extern "C" __global__ void __launch_bounds__(ADDING_THREADS, 1)
    conv_backprop_bias_reduce(const Accumulator* __restrict__ partial, Storage* __restrict__ db,
                              const int chunks, const __grid_constant__ ConvParameters p) {
  const long long channel = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (channel >= p.filters) return;
  Accumulator sum[1];
  add_partial_sums(sum, partial + channel, chunks, p.filters);
  db[channel * p.bias_stride] = Numeric<Storage>::narrow(sum[0]);
}
