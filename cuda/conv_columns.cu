// Columns: a pass as one dense matrix product, followed by sums of the product's elements.
//
// conv_gather.cu first multiplies every pixel of the source (x in forward, dy in backprop_input) with all
// taps of all filters.  The results are the columns z, in the accumulator's type:
//
//   forward          z[n, h, w][k, r, s] = sum over c of x[n, c, h, w] * w[k, c, r, s]
//   backprop_input   z[n, p, q][c, r, s] = sum over k of dy[n, k, p, q] * w[k, c, r, s]
//
// Each group has its own matrix of pixels and columns.  If the sum over c or k is split, z has one matrix
// per split and group.
//
// This kernel then adds, for each element of the result, the elements of z that contribute to it:
//
//   forward          y[n, k, p, q] = act(bias[k] + sum over r, s of
//                                        z[n, p * stride - pad + r * dilation, ...][k, r, s])
//   backprop_input   dx[n, c, h, w] = act(bias[c] + sum over p, q of
//                                        z[n, p, q][c, (h + pad - p * stride) / dilation, ...])
//
// where the sums run over the pixels that exist and the taps for which the division is exact.  The
// number of columns is the number of taps times the channels of the result, so the product fills the tiles
// of conv_gather.cu even if the result has few channels.  No multiplication is wasted on zeros between the
// pixels of dy, however large the stride is.
//
// A variant is chosen with -D: PASS (0 forward, 1 backprop_input), STORAGE, INDEX, ACTIVATION, ADD
// (epilogue.cuh), TAPS_FASTEST (whether the columns are numbered with taps fastest, else with channels
// fastest), CHANNELS_LAST (whether adjacent threads compute adjacent channels, else adjacent pixels),
// AT_ONCE (terms along the last axis whose elements a thread loads together: more terms take more
// registers, so that fewer threads are resident).
#include "epilogue.cuh"
#include "index.cuh"
#include "maps.cuh"
#include "numeric.cuh"

using Storage = STORAGE;
using Accumulator = typename Numeric<Storage>::Accumulator;

constexpr int THREADS = 256;
constexpr int CHANNELS = 4;  // channels per thread

// Pairs of a source position and a tap that contribute to one position of the result, along one axis.
struct Terms {
  Index first, last;  // forward: taps; backprop_input: source positions
  Index start;        // forward: source position of tap 0; backprop_input: position plus padding
  Index stride, dilation;

  __device__ __forceinline__ Terms(Index position, int axis, const ConvParameters& p)
      : stride(narrowed(p.stride[axis])), dilation(narrowed(p.dilation[axis])) {
    const Index taps = narrowed(p.filter[axis]), pad = narrowed(p.pad[axis]);
    if (PASS == 0) {
      start = position * stride - pad;
      const Index end = narrowed(p.input[axis]) - 1 - start;  // distance from tap 0 to the last position
      first = start < 0 ? (dilation - 1 - start) / dilation : 0;
      last = end < 0 ? -1 : end / dilation;
      if (last >= taps) last = taps - 1;
    } else {
      start = position + pad;
      const Index beyond = start - (taps - 1) * dilation;  // stride * source position under last tap
      first = beyond > 0 ? (beyond + stride - 1) / stride : 0;
      last = start / stride;
      if (last >= narrowed(p.output[axis])) last = narrowed(p.output[axis]) - 1;
    }
  }

  // Computes the source position and the tap of term i; returns whether the term exists.
  __device__ __forceinline__ bool term(Index i, Index& source, Index& tap) const {
    if (PASS == 0) {
      source = start + i * dilation;
      tap = i;
      return true;
    }
    const Index distance = start - i * stride;
    source = i;
    tap = dilation == 1 ? distance : distance / dilation;
    return tap * dilation == distance;
  }
};

// A thread computes CHANNELS adjacent channels of one pixel, whose terms have the same taps and windows.
// result is y or dx; bias may be null.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    conv_columns(const Accumulator* __restrict__ z, const Storage* __restrict__ bias,
                 const Storage* addend, Storage* result, const int splits,
                 const __grid_constant__ ConvParameters p) {
  const long long(&sizes)[3] = PASS == 0 ? p.output : p.input;
  const long long(&sources)[3] = PASS == 0 ? p.input : p.output;
  const long long(&strides)[5] = PASS == 0 ? p.y_stride : p.x_stride;
  const Index channels = narrowed(PASS == 0 ? p.filters : p.channels);  // channels per group
  const Index runs = (channels + CHANNELS - 1) / CHANNELS;              // threads per pixel and group
  const Index all_runs = runs * narrowed(p.groups);
  const long long threads = p.batch * all_runs * sizes[0] * sizes[1] * sizes[2];
  const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  if (thread >= threads) return;

  // Threads are numbered (n, d, h, w, run) with CHANNELS_LAST, else (n, run, d, h, w); the last is
  // fastest.
  Index rest = static_cast<Index>(thread), run = 0;
  if (CHANNELS_LAST) {
    run = rest % all_runs;
    rest /= all_runs;
  }
  const Index w = rest % narrowed(sizes[2]);
  rest /= narrowed(sizes[2]);
  const Index h = rest % narrowed(sizes[1]);
  rest /= narrowed(sizes[1]);
  const Index d = rest % narrowed(sizes[0]);
  rest /= narrowed(sizes[0]);
  if (!CHANNELS_LAST) {
    run = rest % all_runs;
    rest /= all_runs;
  }
  const Index n = rest, group = run / runs, first = (run - group * runs) * CHANNELS;

  const Index t_taps = narrowed(p.filter[0]), r_taps = narrowed(p.filter[1]);
  const Index s_taps = narrowed(p.filter[2]), taps = t_taps * r_taps * s_taps;
  const Index channel_step = TAPS_FASTEST ? taps : 1, tap_step = TAPS_FASTEST ? 1 : channels;
  const long long pixels = p.batch * sources[0] * sources[1] * sources[2];
  const long long split = p.groups * pixels * taps * channels;  // elements of z per split
  const Accumulator* columns = z + group * pixels * taps * channels + first * channel_step;
  const Terms depth(d, 0, p), height(h, 1, p), width(w, 2, p);
  Accumulator sum[CHANNELS] = {};
#pragma unroll 1
  for (Index i = depth.first; i <= depth.last; ++i) {
    Index z_d, t;
    if (!depth.term(i, z_d, t)) continue;
#pragma unroll 1
    for (Index j = height.first; j <= height.last; ++j) {
      Index z_h, r;
      if (!height.term(j, z_h, r)) continue;
      const long long line = ((n * sources[0] + z_d) * sources[1] + z_h) * sources[2];
#pragma unroll 1
      for (Index k = width.first; k <= width.last; k += AT_ONCE) {
        const Accumulator* column[AT_ONCE];
        bool exists[AT_ONCE];
#pragma unroll
        for (int e = 0; e < AT_ONCE; ++e) {
          Index z_w, s;
          exists[e] = width.term(k + e, z_w, s) && k + e <= width.last;
          column[e] =
              columns + (line + z_w) * taps * channels + ((t * r_taps + r) * s_taps + s) * tap_step;
        }
        if (AT_ONCE == 1 && !exists[0]) continue;
#pragma unroll 1
        for (int part = 0; part < splits; ++part) {
          Accumulator value[AT_ONCE][CHANNELS];
#pragma unroll
          for (int e = 0; e < AT_ONCE; ++e) {
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
              const bool reads = exists[e] && first + c < channels;
              value[e][c] = reads ? column[e][c * channel_step] : Accumulator(0);
            }
            column[e] += split;
          }
#pragma unroll
          for (int e = 0; e < AT_ONCE; ++e)
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) sum[c] += value[e][c];
        }
      }
    }
  }

  const Index pixel = n * narrowed(strides[0]) + d * narrowed(strides[2]) +
                      h * narrowed(strides[3]) + w * narrowed(strides[4]);
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    if (first + c >= channels) break;
    const Index channel = group * channels + first + c;
    if (bias != nullptr) sum[c] += Numeric<Storage>::widen(bias[channel * narrowed(p.bias_stride)]);
    const Index element = pixel + channel * narrowed(strides[1]);
    if (ADD) sum[c] += Numeric<Storage>::widen(addend[element]);
    result[element] = Numeric<Storage>::narrow(activate<ACTIVATION>(sum[c]));
  }
}
