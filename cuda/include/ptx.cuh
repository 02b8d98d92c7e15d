// Every assembly instruction of the kernels, one instruction per wrapper.
#ifndef CUPYCONV_PTX_CUH
#define CUPYCONV_PTX_CUH

namespace ptx {

// cvt.f32.f16: the value of a binary16 given by its bits; exact.
__device__ __forceinline__ float f32_from_f16(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// cvt.rn.f16.f32: the bits of the nearest binary16, ties to even.
__device__ __forceinline__ unsigned short f16_from_f32(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

}  // namespace ptx

#endif  // CUPYCONV_PTX_CUH
