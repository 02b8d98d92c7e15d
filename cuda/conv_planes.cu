// Splits float32 elements into three bfloat16, the operands of conv_hopper.cu with PLANES = 3.
//
//   x = high + middle + low,   high = bf16(x),  middle = bf16(x - high),  low = bf16(rest)
//
// A float32 has 24 significant bits and a bfloat16 eight, rounded to nearest, so that the sum is
// exact as long as the parts stay normal numbers (|x| above about 2^-110).  Of the nine products of
// two such sums, conv_hopper takes the six of at least 2^-24 of the whole.
//
// What that means at the ends of the range: where rounding up would overflow, high is truncated;
// tiny elements lose bits below 2^-133; an infinity has no middle and low, yet its product with the
// middle and low of the other operand can be NaN where plain arithmetic gives an infinity; NaN stays
// NaN.  So these are no IEEE products: they are taken only where precision="bf16x6" permits them.
//
// Layout: x is any tensor with a contiguous last axis; the planes follow each other, each of them
// contiguous in x's order of axes.  A thread takes VECTOR neighbours.
#include "numeric.cuh"
#include "vector.cuh"

constexpr int VECTOR = 8;
constexpr int PLANES = 3;

// x as four axes, outermost first, of rows of `inner` neighbours.
struct PlaneShape {
  long long extent[4];
  long long stride[4];  // in elements
  long long inner;
};

__device__ __forceinline__ void split(float value, bfloat16_t (&parts)[PLANES]) {
  const float largest = __uint_as_float(0x7f7fffffu);
  const bool finite = fabsf(value) <= largest;
  parts[0] = Numeric<bfloat16_t>::narrow(value);
  if (finite && fabsf(Numeric<bfloat16_t>::widen(parts[0])) > largest)
    parts[0] = {static_cast<unsigned short>(__float_as_uint(value) >> 16)};
  float rest = finite ? value - Numeric<bfloat16_t>::widen(parts[0]) : 0.f;
#pragma unroll
  for (int plane = 1; plane < PLANES; ++plane) {
    parts[plane] = Numeric<bfloat16_t>::narrow(rest);
    rest -= Numeric<bfloat16_t>::widen(parts[plane]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    conv_planes(const float* __restrict__ x, bfloat16_t* __restrict__ planes,
                const __grid_constant__ PlaneShape shape) {
  const long long rows = shape.extent[0] * shape.extent[1] * shape.extent[2] * shape.extent[3];
  const long long elements = rows * shape.inner;
  const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread * VECTOR >= elements) return;

  long long row = thread * VECTOR / shape.inner;
  long long place = thread * VECTOR % shape.inner;
#pragma unroll
  for (int axis = 3; axis >= 0; --axis) {
    place += row % shape.extent[axis] * shape.stride[axis];
    row /= shape.extent[axis];
  }
  float values[VECTOR];
  float(&half)[VECTOR / 2] = *reinterpret_cast<float(*)[VECTOR / 2]>(values);
  float(&other_half)[VECTOR / 2] = *reinterpret_cast<float(*)[VECTOR / 2]>(values + VECTOR / 2);
  load_piece(half, x + place, true);
  load_piece(other_half, x + place + VECTOR / 2, true);

  Piece<bfloat16_t, VECTOR> pieces[PLANES];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    bfloat16_t parts[PLANES];
    split(values[i], parts);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) pieces[plane].element[i] = parts[plane];
  }
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane)
    *reinterpret_cast<Piece<bfloat16_t, VECTOR>*>(planes + plane * elements + thread * VECTOR) =
        pieces[plane];
}
