// Instances of CUTLASS's implicit-GEMM convolution for compute capability 8.0, one for each PASS:
// cp.async with zero fill; ldmatrix (transposing in two passes) and mma.sync, or fused multiply-adds
// with OPERATION OpClassSimt.
//
// Chosen with -D: PASS, STRIDED (backprop_input in stride phases), ELEMENT, SUM (of the products),
// OPERATION, TILE (along both axes of the result), TILE_K, WARPS_M and WARPS_N, INSTRUCTION_M, _N
// and _K, STAGES, and VECTOR (elements per copy).
#include "cutlass/conv/kernel/default_conv2d_dgrad.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/conv/kernel/default_conv2d_wgrad.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

using Element = ELEMENT;
using Layout = cutlass::layout::TensorNHWC;
using Tile = cutlass::gemm::GemmShape<TILE, TILE, TILE_K>;
using WarpTile = cutlass::gemm::GemmShape<TILE / WARPS_M, TILE / WARPS_N, TILE_K>;
#if STRIDED
using Swizzle = cutlass::conv::threadblock::StridedDgradIdentityThreadblockSwizzle<>;
#else
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
#endif
using Output = cutlass::epilogue::thread::LinearCombination<Element, VECTOR, SUM, SUM>;

// A macro, since the three templates differ only in their names.
#define INSTANCE(Template, strides)                                                            \
  cutlass::conv::kernel::Template<                                                             \
      Element, Layout, Element, Layout, Element, Layout, SUM, cutlass::arch::OPERATION,        \
      cutlass::arch::Sm80, Tile, WarpTile,                                                     \
      cutlass::gemm::GemmShape<INSTRUCTION_M, INSTRUCTION_N, INSTRUCTION_K>, Output, Swizzle,  \
      STAGES, cutlass::arch::OpMultiplyAdd, cutlass::conv::IteratorAlgorithm::kOptimized,      \
      cutlass::conv::StrideSupport::strides, VECTOR, VECTOR>::Kernel
#if PASS == 0
using Kernel = INSTANCE(DefaultConv2dFprop, kStrided);
#elif PASS == 1 && STRIDED
using Kernel = INSTANCE(DefaultConv2dDgrad, kStrided);
#elif PASS == 1
using Kernel = INSTANCE(DefaultConv2dDgrad, kUnity);
#else
using Kernel = INSTANCE(DefaultConv2dWgrad, kStrided);
#endif
static_assert(sizeof(Kernel::SharedStorage) <= SHARED_BYTES, "the launch asks for as much");

// Operands and result in the order of the pass, NHWC and KRSC.
extern "C" __global__ void __launch_bounds__(32 * WARPS_M * WARPS_N)
    conv(Element* a, Element* b, Element* result, int n, int h, int w, int c, int k, int r, int s,
         int padding, int stride, int dilation) {
  extern __shared__ __align__(128) char storage[];
  const int p = (h + 2 * padding - dilation * (r - 1) - 1) / stride + 1;
  const int q = (w + 2 * padding - dilation * (s - 1) - 1) / stride + 1;
  const cutlass::conv::Conv2dProblemSize problem(
      n, h, w, c, k, r, s, p, q, padding, padding, stride, stride, dilation, dilation,
      cutlass::conv::Mode::kCrossCorrelation);
  using Extent = cutlass::Tensor4DCoord;
  const Layout x = Layout::packed(Extent(n, h, w, c)), y = Layout::packed(Extent(n, p, q, k));
  const Layout filter = Layout::packed(Extent(k, r, s, c));
#if PASS == 0
  const Layout of_a = x, of_b = filter, of_result = y;
#elif PASS == 1
  const Layout of_a = y, of_b = filter, of_result = x;
#else
  const Layout of_a = y, of_b = x, of_result = filter;
#endif
  const typename Kernel::Params parameters(typename Kernel::Arguments(
      problem, {a, of_a}, {b, of_b}, {result, of_result}, {result, of_result}, {SUM(1), SUM(0)}));
  Kernel()(parameters, *reinterpret_cast<typename Kernel::SharedStorage*>(storage));
}
