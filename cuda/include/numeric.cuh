// Element types: storage type, accumulator type, and conversions.  A complex product is four real
// products, added in an order that does not depend on the values.
#ifndef CUPYCONV_NUMERIC_CUH
#define CUPYCONV_NUMERIC_CUH

#include "ptx.cuh"

// 16-bit types of this library, so that kernels need no toolkit header; this halves the first compile
// time.
struct half_t {
  unsigned short bits;
};

struct bfloat16_t {
  unsigned short bits;
};

// Numeric<Storage>::Accumulator is the type of sums.  widen is exact; narrow rounds once, to nearest
// even.
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
  static __device__ __forceinline__ bfloat16_t narrow(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800  // no conversion instruction before 8.0
    const unsigned bits = __float_as_uint(value);
    const unsigned quiet_nan = (bits >> 16) | 0x40u;
    const unsigned round_up = 0x7fffu + ((bits >> 16) & 1u);
    const bool is_nan = value != value;
    return bfloat16_t{static_cast<unsigned short>(is_nan ? quiet_nan : (bits + round_up) >> 16)};
#else
    return bfloat16_t{static_cast<unsigned short>(ptx::bf16x2_from_f32(value, 0.f))};
#endif
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

// Complex numbers, in memory and as sums.  They have the alignment of their parts, since views of arrays
// guarantee no larger alignment.
template <class Real>
struct Complex {
  Real re, im;

  Complex() = default;
  __device__ __forceinline__ Complex(Real real, Real imaginary = 0) : re(real), im(imaginary) {}

  __device__ __forceinline__ Complex& operator+=(const Complex& other) {
    re += other.re;
    im += other.im;
    return *this;
  }
};

using complex64_t = Complex<float>;
using complex128_t = Complex<double>;

template <class Real>
struct Numeric<Complex<Real>> {
  using Accumulator = Complex<Real>;
  static __device__ __forceinline__ Complex<Real> widen(Complex<Real> value) { return value; }
  static __device__ __forceinline__ Complex<Real> narrow(Complex<Real> value) { return value; }
};

// sum += a * b.
template <class Accumulator>
__device__ __forceinline__ void multiply_add(Accumulator& sum, Accumulator a, Accumulator b) {
  sum += a * b;
}
template <class Real>
__device__ __forceinline__ void multiply_add(Complex<Real>& sum, Complex<Real> a, Complex<Real> b) {
  sum.re += a.re * b.re;
  sum.re -= a.im * b.im;
  sum.im += a.re * b.im;
  sum.im += a.im * b.re;
}

// Returns the complex conjugate, by which gradients multiply; real numbers are unchanged.
template <class Accumulator>
__device__ __forceinline__ Accumulator conjugated(Accumulator value) {
  return value;
}
template <class Real>
__device__ __forceinline__ Complex<Real> conjugated(Complex<Real> value) {
  return Complex<Real>(value.re, -value.im);
}

#endif
