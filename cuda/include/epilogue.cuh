// Epilogue of a sum before its store: add the bias and the addend, apply the activation, round once.
#ifndef CUPYCONV_EPILOGUE_CUH
#define CUPYCONV_EPILOGUE_CUH

#include "numeric.cuh"
#include "vector.cuh"

// With -DADD=1, the addend, a tensor with the result's shape and strides, is added before the activation.
// The addend may be the result's own array; therefore kernels do not declare the pointers to the addend
// and to the result __restrict__.
#ifndef ADD
#define ADD 0
#endif

// With ADD, adds LENGTH contiguous elements of the addend, the first at `addend`, to the sums.
template <int LENGTH, class Storage, class Accumulator>
__device__ __forceinline__ void add_addend(Accumulator (&sum)[LENGTH], const Storage* addend) {
  if constexpr (ADD != 0) {
    Accumulator piece[LENGTH];
    load_piece(piece, addend, true);
#pragma unroll
    for (int i = 0; i < LENGTH; ++i) sum[i] += piece[i];
  }
}

// Values of the macro ACTIVATION, in the order of ACTIVATIONS in cupyconv/kernels/request.py.
enum Activation { ACTIVATION_NONE = 0, ACTIVATION_RELU = 1, ACTIVATION_SILU = 2, ACTIVATION_GELU = 3 };

// v / d for d >= 1, rounded to nearest except in one of about 200,000 cases.  This is the compiler's
// division without the branch for rare operands.  The factor 0.25 keeps the reciprocal of a large d from
// underflowing.  If the approximation `close` is infinite, its correction is NaN, and `close` is returned.
__device__ __forceinline__ float quotient(float v, float d) {
  const float inverse = 0.25f * ptx::rcp_approx(0.25f * d);
  const float close = v * inverse;
  const float closest = fmaf(fmaf(-d, close, v), inverse, close);
  return closest == closest ? closest : close;
}

// Error bounds are in units in the last place (ulp).  The first bound holds if the GPU's exponential and
// reciprocal round to nearest.  The bound in brackets holds for the errors that NVIDIA's manuals permit:
// 2 ulp for exponentials, 1 ulp for reciprocals.

// v / (1 + exp(-v)).  In float, errors are at most 1.5 (2.7) ulp if v is positive, and 2.4 (6.3) ulp
// if v is negative; below -88.72, where the exponential is infinite, the result is -0.
__device__ __forceinline__ float silu(float v) { return quotient(v, 1.f + expf(-v)); }
__device__ __forceinline__ double silu(double v) { return v / (1. + exp(-v)); }

// v (1 + erf(v / sqrt 2)) / 2, as max(v, 0) - |v| erfc(|v| / sqrt 2) / 2.  In float, errors are at most
// 1.3 (3.5) ulp if v is positive, 2.3 (4.4) ulp if v >= -1, 22 (23) ulp if v >= -3, and 136 (139) ulp if
// v >= -6.  At -6, 1 + erf(v / sqrt 2) in float would have no correct bit.  erfc(a / sqrt 2) is 2 to the
// power of a polynomial in a, which is fitted on [0, 6] and decreases beyond 6.
__device__ __forceinline__ float gelu(float v) {
  const float a = fabsf(v);
  float power = -2.8190115e-08f;
  power = fmaf(power, a, 8.458872e-07f);
  power = fmaf(power, a, -1.08565275e-05f);
  power = fmaf(power, a, 7.5899145e-05f);
  power = fmaf(power, a, -2.777396e-04f);
  power = fmaf(power, a, -4.623626e-06f);
  power = fmaf(power, a, 6.9538932e-03f);
  power = fmaf(power, a, -5.24471e-02f);
  power = fmaf(power, a, -4.592186e-01f);
  power = fmaf(power, a, -1.1511045f);
  // For v = infinity, the clamp avoids infinity * 0 = NaN.  For v = -infinity, the result is NaN.
  const float largest = 3.4028235e38f;
  return fmaf(-fabsf(0.5f * fminf(v, largest)), ptx::ex2_approx(a * power), v < 0 ? 0.f : v);
}
__device__ __forceinline__ double gelu(double v) {
  return 0.5 * v * (1. + erf(0.70710678118654752440 * v));
}

// Applies the activation: none, relu (max(v, 0)), silu or gelu.  All return NaN for NaN.
template <int ACTIVATION_, class Accumulator>
__device__ __forceinline__ Accumulator activate(Accumulator value) {
  if constexpr (ACTIVATION_ == ACTIVATION_RELU) return value < 0 ? Accumulator(0) : value;
  if constexpr (ACTIVATION_ == ACTIVATION_SILU) return silu(value);
  if constexpr (ACTIVATION_ == ACTIVATION_GELU) return gelu(value);
  return value;
}

#endif
