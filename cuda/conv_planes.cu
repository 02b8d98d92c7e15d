// Splits float32 elements of one or two tensors into three bfloat16 planes, the operands of
// conv_hopper.cu with PLANES = 3.
//
//   x = high + middle + low,   high = bf16(x),  middle = bf16(x - high),  low = bf16(x - high - middle)
//
// A float32 has 24 significant bits and a bfloat16 has eight.  With rounding to nearest, the sum is exact
// as long as the parts are normal numbers (|x| above about 2^-110).  The product of two such sums has
// nine products.  conv_hopper.cu omits the three smallest, which are below 2^-24 of the whole product.
//
// Values at the ends of the range are exceptions.  If rounding up would overflow, high is truncated.
// Tiny elements lose bits below 2^-133.  An infinity has zero middle and low planes, but its product with
// the other operand's middle and low planes can be NaN where IEEE arithmetic returns infinity.  NaN
// remains NaN.  Because of these exceptions, products of planes are used only if the caller of cupyconv
// passes precision="bf16x6".
//
// The last axis of a tensor is contiguous.  The planes of a tensor are stored consecutively, with the
// tensor's order of axes, and rows begin at multiples of 16 bytes.  A thread splits VECTOR adjacent
// elements.
#include "numeric.cuh"
#include "vector.cuh"

constexpr int THREADS = 256;
constexpr int VECTOR = 8, HALF = 4;
constexpr int PLANES = 3;

// A tensor whose rows have `inner` contiguous elements, and its four outer axes, outermost first.
struct PlaneShape {
  long long extent[4];
  long long stride[4];  // strides in elements
  long long inner;
  long long blocks;  // thread blocks for this tensor
};

struct PlaneShapes {
  PlaneShape of[2];
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

extern "C" __global__ void __launch_bounds__(THREADS)
    conv_planes(const float* __restrict__ first, bfloat16_t* __restrict__ first_planes,
                const float* __restrict__ second, bfloat16_t* __restrict__ second_planes,
                const __grid_constant__ PlaneShapes shapes) {
  const bool is_first = blockIdx.x < shapes.of[0].blocks;
  const PlaneShape& shape = shapes.of[is_first ? 0 : 1];
  const float* const x = is_first ? first : second;
  bfloat16_t* const planes = is_first ? first_planes : second_planes;
  const long long block = blockIdx.x - (is_first ? 0 : shapes.of[0].blocks);
  const long long rows = shape.extent[0] * shape.extent[1] * shape.extent[2] * shape.extent[3];
  const long long pieces = (shape.inner + VECTOR - 1) / VECTOR;  // vectors per row
  const long long elements = rows * pieces * VECTOR;
  const long long thread = block * blockDim.x + threadIdx.x;
  if (thread * VECTOR >= elements) return;

  long long row = thread / pieces;
  long long place = thread % pieces * VECTOR;
  const long long left = shape.inner - place;
#pragma unroll
  for (int axis = 3; axis >= 0; --axis) {
    place += row % shape.extent[axis] * shape.stride[axis];
    row /= shape.extent[axis];
  }
  float values[VECTOR] = {};
#pragma unroll
  for (int half = 0; half < VECTOR; half += HALF) {
    const bool is_aligned = reinterpret_cast<unsigned long long>(x + place + half) % 16 == 0;
    if (is_aligned && half + HALF <= left)
      load_piece(*reinterpret_cast<float(*)[HALF]>(values + half), x + place + half, true);
    else
#pragma unroll
      for (int i = half; i < half + HALF; ++i)
        if (i < left) values[i] = x[place + i];
  }

  Piece<bfloat16_t, VECTOR> piece[PLANES];
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    bfloat16_t parts[PLANES];
    split(values[i], parts);
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane) piece[plane].element[i] = parts[plane];
  }
#pragma unroll
  for (int plane = 0; plane < PLANES; ++plane)
    *reinterpret_cast<Piece<bfloat16_t, VECTOR>*>(planes + plane * elements + thread * VECTOR) =
        piece[plane];
}
