// Instances of CUTLASS's implicit-GEMM convolution for compute capability 8.0, one for each PASS:
// cp.async with zero fill, ldmatrix (transposing for two of them), mma.sync.  TILE is 64 or 128, of
// which each of four warps has a quarter.
#include "cutlass/conv/kernel/default_conv2d_dgrad.h"
#include "cutlass/conv/kernel/default_conv2d_fprop.h"
#include "cutlass/conv/kernel/default_conv2d_wgrad.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

using Element = cutlass::half_t;
using Layout = cutlass::layout::TensorNHWC;
using Tile = cutlass::gemm::GemmShape<TILE, TILE, 32>;
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
using Output = cutlass::epilogue::thread::LinearCombination<Element, 8, float, float>;

// A macro: the three templates differ in their names alone.
#define INSTANCE(Template, algorithm, strides)                                                  \
  cutlass::conv::kernel::Template<                                                            \
      Element, Layout, Element, Layout, Element, Layout, float,                               \
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Tile,                              \
      cutlass::gemm::GemmShape<TILE / 2, TILE / 2, 32>, cutlass::gemm::GemmShape<16, 8, 16>,  \
      Output, Swizzle, STAGES, cutlass::arch::OpMultiplyAdd,                                  \
      cutlass::conv::IteratorAlgorithm::algorithm,                                            \
      cutlass::conv::StrideSupport::strides>::Kernel
#if PASS == 0
using Kernel = INSTANCE(DefaultConv2dFprop, kOptimized, kStrided);
#elif PASS == 1
using Kernel = INSTANCE(DefaultConv2dDgrad, kOptimized, kUnity);
#else
using Kernel = INSTANCE(DefaultConv2dWgrad, kOptimized, kStrided);
#endif
static_assert(sizeof(Kernel::SharedStorage) <= SHARED_BYTES, "the launch asks for as much");

// Operands and result as the pass orders them, NHWC and KRSC.
extern "C" __global__ void __launch_bounds__(128)
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
      problem, {a, of_a}, {b, of_b}, {result, of_result}, {result, of_result}, {1.0f, 0.0f}));
  Kernel()(parameters, *reinterpret_cast<typename Kernel::SharedStorage*>(storage));
}
