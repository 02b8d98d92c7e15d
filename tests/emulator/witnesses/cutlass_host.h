// Builds the parameters of a CUTLASS kernel for compute capability 9.0 on the host.  The functions
// here replace the driver's encoders of tensor maps, which CUTLASS's host code calls.
#ifndef CUPYCONV_WITNESSES_CUTLASS_HOST_H
#define CUPYCONV_WITNESSES_CUTLASS_HOST_H

#include <cuda.h>
#include <cstring>

// The encoders, with the relevant arguments of the driver's.
using EncodeTiled = int (*)(void* map, int type, unsigned rank, void* address,
                            const cuuint64_t* extents, const cuuint64_t* strides,
                            const cuuint32_t* box, const cuuint32_t* steps, int swizzle);
using EncodeIm2col = int (*)(void* map, int type, unsigned rank, void* address,
                             const cuuint64_t* extents, const cuuint64_t* strides,
                             const int* lower, const int* upper, cuuint32_t channels,
                             cuuint32_t pixels, const cuuint32_t* steps, int swizzle);
static EncodeTiled encode_tiled;
static EncodeIm2col encode_im2col;

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* extents,
                                const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill fill) {
  if (interleave || fill) return CUDA_ERROR_INVALID_VALUE;
  return static_cast<CUresult>(
      encode_tiled(map, type, rank, address, extents, strides, box, steps, swizzle));
}
CUresult cuTensorMapEncodeIm2col(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                 void* address, const cuuint64_t* extents,
                                 const cuuint64_t* strides, const int* lower, const int* upper,
                                 cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* steps,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  if (interleave || fill) return CUDA_ERROR_INVALID_VALUE;
  return static_cast<CUresult>(encode_im2col(map, type, rank, address, extents, strides, lower,
                                             upper, channels, pixels, steps, swizzle));
}
// A version that needs no workaround for small maps.
extern "C" CUresult cuDriverGetVersion(int* version) {
  *version = 13020;
  return CUDA_SUCCESS;
}
extern "C" CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "no tensor map was made";
  return CUDA_SUCCESS;
}

constexpr int kMultiprocessors = 4;  // few, so persistent blocks process several tiles each

// launch: bytes of the parameters and of shared memory, grid, threads.
template <class Kernel>
void put_parameters(const typename Kernel::Arguments& arguments, void* parameters, int* launch) {
  const auto made = Kernel::to_underlying_arguments(arguments, nullptr);
  memcpy(parameters, &made, sizeof made);
  const dim3 grid = Kernel::get_grid_shape(made), block = Kernel::get_block_shape();
  launch[0] = sizeof made, launch[1] = Kernel::SharedStorageSize;
  launch[2] = static_cast<int>(grid.x), launch[3] = static_cast<int>(grid.y);
  launch[4] = static_cast<int>(grid.z), launch[5] = static_cast<int>(block.x);
}

#endif
