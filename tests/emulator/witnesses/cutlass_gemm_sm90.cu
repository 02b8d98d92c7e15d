// Instances of CUTLASS's GEMM for compute capability 9.0: tiled TMA and multicast, wgmma from shared
// memory in both majors, persistent blocks whose registers move between warpgroups.
//
//   c[m][n] = sum over k of a[m][k] * b[k][n], summed in float, rounded to ELEMENT (TF32: float)
//
// Chosen with -D: ELEMENT, A_LAYOUT, B_LAYOUT and C_LAYOUT (RowMajor, ColumnMajor), TILE_M, TILE_N,
// TILE_K, CLUSTER_M, CLUSTER_N, and COOPERATIVE (1: two warpgroups share a tile).
// Compiled twice, like cutlass_conv_sm90.cu.
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1
#include <cuda.h>

#include "cutlass/cutlass.h"
#include "cute/tensor.hpp"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass/device_kernel.h"
#include "cutlass/numeric_types.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

using Element = ELEMENT;
constexpr int kVector = 16 / sizeof(Element);
using Result = cutlass::layout::C_LAYOUT;
using Tile = cute::Shape<cute::Int<TILE_M>, cute::Int<TILE_N>, cute::Int<TILE_K>>;
using Cluster = cute::Shape<cute::Int<CLUSTER_M>, cute::Int<CLUSTER_N>, cute::_1>;
#if COOPERATIVE
using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using Finish = cutlass::epilogue::TmaWarpSpecializedCooperative;
#else
using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using Finish = cutlass::epilogue::TmaWarpSpecialized;
#endif
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Result, kVector, Element,
    Result, kVector, Finish>::CollectiveOp;
using MainLoop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::A_LAYOUT,
    kVector, Element, cutlass::layout::B_LAYOUT, kVector, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<int(
        sizeof(typename Epilogue::SharedStorage))>,
    Schedule>::CollectiveOp;
using Kernel =
    cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, MainLoop, Epilogue>;

#ifndef HOST
template __global__ void cutlass::device_kernel<Kernel>(
    __grid_constant__ typename Kernel::Params const);
#else
#include "cutlass_host.h"

// sizes: m, n, k.
extern "C" void make_parameters(EncodeTiled tiled, EncodeIm2col im2col, void* parameters,
                                int* launch, const int* sizes, void* a, void* b, void* result) {
  encode_tiled = tiled, encode_im2col = im2col;
  const int m = sizes[0], n = sizes[1], k = sizes[2];
  typename Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = {m, n, k, 1};
  arguments.mainloop.ptr_A = static_cast<Element*>(a);
  arguments.mainloop.ptr_B = static_cast<Element*>(b);
  arguments.mainloop.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1});
  arguments.mainloop.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
  arguments.epilogue.thread = {1.0f, 0.0f};
  arguments.epilogue.ptr_C = arguments.epilogue.ptr_D = static_cast<Element*>(result);
  arguments.epilogue.dC = arguments.epilogue.dD =
      cutlass::make_cute_packed_stride(typename Kernel::StrideC{}, {m, n, 1});
  arguments.hw_info.sm_count = kMultiprocessors;
  arguments.hw_info.max_active_clusters = kMultiprocessors / (CLUSTER_M * CLUSTER_N);
  put_parameters<Kernel>(arguments, parameters, launch);
}
#endif
