// What happens to a sum before it is stored: bias, activation, one rounding.
#ifndef CUPYCONV_EPILOGUE_CUH
#define CUPYCONV_EPILOGUE_CUH

#include "numeric.cuh"

// What -DACTIVATION names; the numbers are those of cupyconv/gpu/parameters.py.
enum Activation { ACTIVATION_NONE = 0, ACTIVATION_RELU = 1, ACTIVATION_SILU = 2, ACTIVATION_GELU = 3 };

__device__ __forceinline__ float exponential(float value) { return expf(value); }
__device__ __forceinline__ double exponential(double value) { return exp(value); }
__device__ __forceinline__ float error_function(float value) { return erff(value); }
__device__ __forceinline__ double error_function(double value) { return erf(value); }

// relu max(v, 0), silu v / (1 + exp(-v)), gelu v (1 + erf(v / sqrt 2)) / 2; all pass NaN on.
template <int ACTIVATION_, class Accumulator>
__device__ __forceinline__ Accumulator activate(Accumulator value) {
  const Accumulator one = 1, half = 0.5, inverse_sqrt2 = 0.70710678118654752440;
  if constexpr (ACTIVATION_ == ACTIVATION_RELU) return value < 0 ? Accumulator(0) : value;
  if constexpr (ACTIVATION_ == ACTIVATION_SILU) return value / (one + exponential(-value));
  if constexpr (ACTIVATION_ == ACTIVATION_GELU)
    return half * value * (one + error_function(value * inverse_sqrt2));
  return value;
}

#endif
