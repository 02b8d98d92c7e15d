// The epilogue's activations, one value per thread.  OFF: error of the approximate functions in
// units in the last place (reciprocals: at most one).
#include "ptx.cuh"

namespace ptx {
__device__ __forceinline__ float off(float value, int units = OFF) {
  const unsigned bits = __float_as_uint(value);
  const bool moves = value != 1 && fabsf(value) > 1e-37f && fabsf(value) < 1e38f;
  return moves ? __uint_as_float(bits + units) : value;
}
}  // namespace ptx
using ptx::ex2_approx;
using ptx::rcp_approx;
#define expf(value) ptx::off(expf(value))
#define ex2_approx(value) off(ex2_approx(value))
#define rcp_approx(value) off(rcp_approx(value), (OFF > 0) - (OFF < 0))
#include "epilogue.cuh"

extern "C" __global__ void __launch_bounds__(128) activations(const float* in, float* out) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = activate<ACTIVATION>(in[i]);
}
