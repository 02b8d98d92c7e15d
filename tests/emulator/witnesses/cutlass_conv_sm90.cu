// Instances of CUTLASS's convolution for compute capability 9.0: TMA in im2col mode and tiled,
// multicast over a cluster, wgmma from shared memory, stmatrix, TMA stores.
//
// Chosen with -D: PASS (kFprop, kDgrad, kWgrad), RANK (spatial axes), ELEMENT, CLUSTER_M and
// CLUSTER_N (cute::_1, ...).  Compiled twice: for the chip, and with HOST defined as a library that
// makes the kernel's parameters.
#define CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL 1
#include <cuda.h>

// In the order that CUTLASS's headers require.
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

using Element = ELEMENT;
constexpr int kVector = 16 / sizeof(Element);
constexpr auto kPass = cutlass::conv::Operator::PASS;
#if RANK == 1
using Layout = cutlass::layout::TensorNWC;
using FilterGradient = cutlass::layout::TensorKCS;
#elif RANK == 2
using Layout = cutlass::layout::TensorNHWC;
using FilterGradient = cutlass::layout::TensorKCSR;
#else
using Layout = cutlass::layout::TensorNDHWC;
using FilterGradient = cutlass::layout::TensorKCSRT;
#endif
using Depth = cute::Shape<cute::Int<128 / sizeof(Element)>>;
constexpr bool kOfFilter = kPass == cutlass::conv::Operator::kWgrad;
using Columns = std::conditional_t<kOfFilter, cute::Shape<cute::_128>, cute::_128>;
using Tile = cute::Shape<cute::_128, Columns, Depth>;
using Result = std::conditional_t<kOfFilter, FilterGradient, Layout>;
using Cluster = cute::Shape<CLUSTER_M, CLUSTER_N, cute::_1>;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, Element, Result, kVector,
    Element, Result, kVector, cutlass::epilogue::TmaWarpSpecialized>::CollectiveOp;
using MainLoop = typename cutlass::conv::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, kPass, Element, Layout, kVector, Element,
    Layout, kVector, float, Tile, Cluster,
    cutlass::conv::collective::StageCountAutoCarveout<int(
        sizeof(typename Epilogue::SharedStorage))>,
    cutlass::conv::KernelImplicitTmaWarpSpecializedSm90>::CollectiveOp;
using Problem = cutlass::conv::ConvProblemShape<kPass, RANK>;
using Kernel = cutlass::conv::kernel::ConvUniversal<Problem, MainLoop, Epilogue>;

#ifndef HOST
template __global__ void cutlass::device_kernel<Kernel>(
    __grid_constant__ typename Kernel::Params const);
#else
#include "cutlass_host.h"

// Strides of the result: ((pixels), C) or (K, (C, window)), last axis first.
template <class Strides>
void set_strides(Strides& strides, const Problem& problem) {
  if constexpr (kOfFilter) {
    cute::get<0>(strides) = problem.stride_C[0];
    cute::for_each(cute::make_seq<RANK>{}, [&](auto i) {
      cute::get<1, 1 + i>(strides) = problem.stride_C[RANK - i];
    });
  } else {
    cute::for_each(cute::make_seq<RANK + 1>{}, [&](auto i) {
      cute::get<0, i>(strides) = problem.stride_C[RANK - i];
    });
  }
}

// sizes: N, spatial axes, C; K, window, C; padding, stride, dilation.
extern "C" void make_parameters(EncodeTiled tiled, EncodeIm2col im2col, void* parameters,
                                int* launch, const int* sizes, void* a, void* b, void* result) {
  encode_tiled = tiled, encode_im2col = im2col;
  typename Problem::TensorExtent x, filter;
  for (int i = 0; i < RANK + 2; i++) x[i] = sizes[i], filter[i] = sizes[RANK + 2 + i];
  cute::array<int, RANK> rules[3];
  for (int i = 0; i < 3; i++) rules[i].fill(sizes[2 * (RANK + 2) + i]);
  const Problem problem(cutlass::conv::Mode::kCrossCorrelation, x, filter, rules[0], rules[0],
                        rules[1], rules[2], 1);
  typename Kernel::Arguments arguments{};
  arguments.problem_shape = problem;
  arguments.mainloop = {static_cast<Element*>(a), static_cast<Element*>(b)};
  arguments.epilogue.thread = {1.0f, 0.0f};
  arguments.epilogue.ptr_C = arguments.epilogue.ptr_D = static_cast<Element*>(result);
  decltype(arguments.epilogue.dC) strides{};
  set_strides(strides, problem);
  arguments.epilogue.dC = arguments.epilogue.dD = strides;
  put_parameters<Kernel>(arguments, parameters, launch);
}
#endif
