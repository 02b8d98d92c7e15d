// Element types: how each is stored, what it accumulates in, and the one rounding back.
#ifndef CUPYCONV_NUMERIC_CUH
#define CUPYCONV_NUMERIC_CUH

#include "ptx.cuh"

// Our own 16-bit types: a kernel then needs no toolkit header, which also halves the time of a
// first compile.
struct half_t {
  unsigned short bits;
};

struct bfloat16_t {
  unsigned short bits;
};

// Numeric<Storage>::Accumulator is the type sums are kept in; widen is exact, narrow rounds to
// nearest even, once.
template <class Storage>
struct Numeric;

template <>
struct Numeric<half_t> {
  using Accumulator = float;
  static __device__ __forceinline__ float widen(half_t value) {
    return ptx::f32_from_f16(value.bits);
  }
  static __device__ __forceinline__ half_t narrow(float value) {
    return half_t{ptx::f16_from_f32(value)};
  }
};

template <>
struct Numeric<bfloat16_t> {
  using Accumulator = float;
  static __device__ __forceinline__ float widen(bfloat16_t value) {
    return __uint_as_float(static_cast<unsigned>(value.bits) << 16);
  }
  // In integers, because chips before 8.0 have no instruction for it.
  static __device__ __forceinline__ bfloat16_t narrow(float value) {
    const unsigned bits = __float_as_uint(value);
    const unsigned quiet_nan = (bits >> 16) | 0x40u;
    const unsigned round_up = 0x7fffu + ((bits >> 16) & 1u);
    const bool is_nan = value != value;
    return bfloat16_t{static_cast<unsigned short>(is_nan ? quiet_nan : (bits + round_up) >> 16)};
  }
};

template <>
struct Numeric<float> {
  using Accumulator = float;
  static __device__ __forceinline__ float widen(float value) { return value; }
  static __device__ __forceinline__ float narrow(float value) { return value; }
};

template <>
struct Numeric<double> {
  using Accumulator = double;
  static __device__ __forceinline__ double widen(double value) { return value; }
  static __device__ __forceinline__ double narrow(double value) { return value; }
};

#endif
