// Fold: copies a filter for views (cupyconv/kernels/views.py) that fold stride phases or merge groups.
//
// In backprop_input, stride phases are folded into channels.  With h = h' * stride + i and
// r = r' * stride + i - before, where before = -pad mod stride,
//
//   dx[n, c, h] = sum over p, r with p * stride = h + pad - r of dy[n, k, p] * w[k, c, r]
//               = sum over r' of dy[n, k, h' + ceil(pad / stride) - r'] * w'[k, (i, c), r'],
//
// which is the input gradient of a layer with stride 1, whose channels are the pairs (i, c).
//
// In all passes, adjacent groups are merged into one, whose channels are the pairs (g, c).
//
// The copy w'[r'][(i, g, c)][k] has filters innermost.  It has negative zeros where tap r does not exist
// or filter k is not in group g, and only there: negative zeros of w become positive, which changes no
// sum.  Each line of filters begins at a multiple of 16 bytes.  A thread stores VECTOR filters.
//
// In backprop_filter, the product writes the copy.  This kernel then copies the elements of w (TO_W).
//
// A variant is chosen with -D: STORAGE and TO_W.
#include "maps.cuh"
#include "numeric.cuh"
#include "ptx.cuh"
#include "vector.cuh"

using Storage = STORAGE;

constexpr int THREADS = 256;
constexpr int VECTOR = 16 / sizeof(Storage);

struct FoldShape {
  long long cell[3];    // adjacent pixels that are folded, per spatial axis: the stride, or 1
  long long before[3];  // zeros before the first tap
  long long taps[3];    // taps of the copy
  long long merged;     // groups that are merged into one
};

// p describes the layer whose filter is w.
extern "C" __global__ void __launch_bounds__(THREADS)
    conv_fold(Storage* __restrict__ w, Storage* __restrict__ copy,
              const __grid_constant__ ConvParameters p, const __grid_constant__ FoldShape fold) {
  const long long filters = p.groups * p.filters, channels = fold.merged * p.channels;
  const long long pieces = (filters + VECTOR - 1) / VECTOR;
  const long long thread = static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
  const long long column = thread / pieces, first = thread % pieces * VECTOR;
  const long long cell = fold.cell[0] * fold.cell[1] * fold.cell[2];
  if (column >= fold.taps[0] * fold.taps[1] * fold.taps[2] * cell * channels) return;

  const Pixel<long long> pixel = pixel_at(column / channels, fold.cell);  // pixel.n is the tap
  const Pixel<long long> at = pixel_at(pixel.n, fold.taps);
  const long long channel = column % channels, group = channel / p.channels;
  const Tap<long long> tap = {channel % p.channels, at.d * fold.cell[0] + pixel.d - fold.before[0],
                              at.h * fold.cell[1] + pixel.h - fold.before[1],
                              at.w * fold.cell[2] + pixel.w - fold.before[2]};
  const bool exists = tap.t >= 0 && tap.t < p.filter[0] && tap.r >= 0 && tap.r < p.filter[1] &&
                      tap.s >= 0 && tap.s < p.filter[2];
  Storage* const in_w = w + tap_offset(tap, p.w_stride);
  union {
    Piece<Storage, VECTOR> piece;
    unsigned words[4];
  } one = {};
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    const long long filter = first + i;
    const bool in_group = filter < filters && filter / p.filters % fold.merged == group;
    Storage* const element = in_w + filter * p.w_stride[0];
    if (!TO_W && filter < filters)
      one.piece.element[i] = Numeric<Storage>::narrow(
          exists && in_group ? Numeric<Storage>::widen(*element) + 0 : -0.f);
    if (TO_W && exists && in_group) *element = copy[thread * VECTOR + i];
  }
  if (!TO_W) ptx::store_16_bytes(copy + thread * VECTOR, one.words);
}
