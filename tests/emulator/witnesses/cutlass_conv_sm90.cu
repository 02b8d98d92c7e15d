// An instance of CUTLASS's convolution for compute capability 9.0: TMA in im2col mode and tiled,
// multicast over a cluster of two blocks, wgmma from shared memory, stmatrix, TMA stores.
//
// Compiled twice: for the chip, and with HOST defined as a library that makes the kernel's
// parameters, with whatever encodes its tensor maps.
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1
#include <cuda.h>

// In CUTLASS's own order, which its headers need.
#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass/device_kernel.h"
#include "cutlass/numeric_types.h"
#include "cutlass/conv/convolution.h"
#include "cutlass/conv/dispatch_policy.hpp"
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"
#include "cutlass/conv/device/conv_universal_adapter.hpp"

using Element = cutlass::half_t;
using Layout = cutlass::layout::TensorNHWC;
constexpr auto kPass = cutlass::conv::Operator::PASS;
using Tile = cute::Shape<cute::_128, cute::_128, cute::Shape<cute::_64>>;
using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Layout, 8, Element,
    Layout, 8, cutlass::epilogue::TmaWarpSpecialized>::CollectiveOp;
using MainLoop = typename cutlass::conv::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, kPass, Element, Layout, 8, Element, Layout,
    8, float, Tile, Cluster,
    cutlass::conv::collective::StageCountAutoCarveout<int(
        sizeof(typename Epilogue::SharedStorage))>,
    cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;
using Problem = cutlass::conv::ConvProblemShape<kPass, 2>;
using Kernel = cutlass::conv::kernel::ConvUniversal<Problem, MainLoop, Epilogue>;

#ifndef HOST
template __global__ void cutlass::device_kernel<Kernel>(
    __grid_constant__ typename Kernel::Params const);
#else
// The encoders, with the arguments of the driver's that matter.
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
// One that needs no mending of small maps.
extern "C" CUresult cuDriverGetVersion(int* version) {
  *version = 13020;
  return CUDA_SUCCESS;
}
extern "C" CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "no tensor map was made";
  return CUDA_SUCCESS;
}

// sizes: N, H, W, C, K, R, S, padding, stride, dilation.  launch: bytes of the parameters and of
// shared memory, grid, threads.
extern "C" void make_parameters(EncodeTiled tiled, EncodeIm2col im2col, void* parameters,
                                int* launch, const int* sizes, void* a, void* b, void* result) {
  encode_tiled = tiled, encode_im2col = im2col;
  const int n = sizes[0], h = sizes[1], w = sizes[2], c = sizes[3], k = sizes[4], r = sizes[5],
            s = sizes[6];
  const int padding = sizes[7], stride = sizes[8], dilation = sizes[9];
  const Problem problem(cutlass::conv::Mode::kCrossCorrelation, {n, h, w, c}, {k, r, s, c},
                        {padding, padding}, {padding, padding}, {stride, stride},
                        {dilation, dilation}, 1);
  typename Kernel::Arguments arguments{};
  arguments.problem_shape = problem;
  arguments.mainloop = {static_cast<Element*>(a), static_cast<Element*>(b)};
  arguments.epilogue.thread = {1.0f, 0.0f};
  arguments.epilogue.ptr_C = arguments.epilogue.ptr_D = static_cast<Element*>(result);
  using Stride = decltype(arguments.epilogue.dC);
  Stride strides{};
  cute::for_each(cute::make_seq<cute::rank<0>(Stride{})>{}, [&](auto i) {
    cute::get<0, i>(strides) = problem.stride_C[Problem::RankT - 2 - i];
  });
  arguments.epilogue.dC = arguments.epilogue.dD = strides;
  const auto made = Kernel::to_underlying_arguments(arguments, nullptr);
  memcpy(parameters, &made, sizeof made);
  const dim3 grid = Kernel::get_grid_shape(made), block = Kernel::get_block_shape();
  launch[0] = sizeof made, launch[1] = Kernel::SharedStorageSize;
  launch[2] = static_cast<int>(grid.x), launch[3] = static_cast<int>(grid.y);
  launch[4] = static_cast<int>(grid.z), launch[5] = static_cast<int>(block.x);
}
#endif
