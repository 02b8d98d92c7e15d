// What happens to a sum before it is stored: bias, activation, one rounding.
#ifndef CUPYCONV_EPILOGUE_CUH
#define CUPYCONV_EPILOGUE_CUH

#include "numeric.cuh"

// What -DACTIVATION names; the numbers are those of cupyconv/gpu/parameters.py.
enum Activation { ACTIVATION_NONE = 0, ACTIVATION_RELU = 1, ACTIVATION_SILU = 2, ACTIVATION_GELU = 3 };

// v / d, d at least 1, rounded to nearest but for one in some 200,000.  It has the compiler's way for
// most operands without the branch for the others: what underflows is kept from it by a factor, and
// infinite quotients, of which a remainder is NaN, are right at once.
__device__ __forceinline__ float quotient(float v, float d) {
  const float inverse = 0.25f * ptx::rcp_approx(0.25f * d);
  const float close = v * inverse;
  const float closest = fmaf(fmaf(-d, close, v), inverse, close);
  return closest == closest ? closest : close;
}

// Errors are told for functions of the chip that round to nearest, and in brackets for what NVIDIA's
// manuals allow them: two units in the last place, of a reciprocal one.

// v / (1 + exp(-v)), with errors of up to 1.5 (2.7) units in the last place of positive v, 2.4 (6.3) of
// negative; -0 below -88.72, where the exponential is infinite.
__device__ __forceinline__ float silu(float v) { return quotient(v, 1.f + expf(-v)); }
__device__ __forceinline__ double silu(double v) { return v / (1. + exp(-v)); }

// v (1 + erf(v / sqrt 2)) / 2, as max(v, 0) - |v| erfc(|v| / sqrt 2) / 2: with errors of up to 1.3 (3.5)
// units in the last place of positive v, 2.3 (4.4) from -1 on, 22 (23) from -3 on, and 136 (139) from -6
// on, where of 1 + erf(v / sqrt 2) no bits are left.  erfc(a / sqrt 2) is 2 to the power of a polynomial
// in a, fitted on [0, 6]; it falls on beyond.
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
  const float largest = 3.4028235e38f;  // infinity times 0 is NaN: as it should of -infinity only
  return fmaf(-fabsf(0.5f * fminf(v, largest)), ptx::ex2_approx(a * power), v < 0 ? 0.f : v);
}
__device__ __forceinline__ double gelu(double v) {
  return 0.5 * v * (1. + erf(0.70710678118654752440 * v));
}

// relu max(v, 0), silu or gelu; all pass NaN on.
template <int ACTIVATION_, class Accumulator>
__device__ __forceinline__ Accumulator activate(Accumulator value) {
  if constexpr (ACTIVATION_ == ACTIVATION_RELU) return value < 0 ? Accumulator(0) : value;
  if constexpr (ACTIVATION_ == ACTIVATION_SILU) return silu(value);
  if constexpr (ACTIVATION_ == ACTIVATION_GELU) return gelu(value);
  return value;
}

#endif
