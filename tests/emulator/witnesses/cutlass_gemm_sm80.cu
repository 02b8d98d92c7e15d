// An instance of CUTLASS's GEMM for compute capability 8.0: cp.async, ldmatrix, mma.sync.
//
//   c[m][n] = sum over k of a[m][k] * b[n][k]
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

using Element = cutlass::half_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Tile = cutlass::gemm::GemmShape<64, 64, 32>;
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
using Kernel = cutlass::gemm::kernel::DefaultGemm<
    Element, Row, 8, Element, Column, 8, Element, Row, float, cutlass::arch::OpClassTensorOp,
    cutlass::arch::Sm80, Tile, cutlass::gemm::GemmShape<32, 32, 32>,
    cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<Element, 8, float, float>, Swizzle, 3, false,
    cutlass::arch::OpMultiplyAdd>::GemmKernel;
static_assert(sizeof(Kernel::SharedStorage) <= 48 << 10, "what a launch may have unasked");

extern "C" __global__ void __launch_bounds__(128)
    gemm(Element* a, Element* b, Element* c, int m, int n, int k) {
  extern __shared__ __align__(128) char storage[];
  const cutlass::gemm::GemmCoord size(m, n, k);
  const typename Kernel::Params parameters(size, Swizzle().get_tiled_shape(size, {64, 64, 32}, 1),
                                           {a, Row(k)}, {b, Column(k)}, {c, Row(n)}, {c, Row(n)},
                                           {1.0f, 0.0f});
  Kernel()(parameters, *reinterpret_cast<typename Kernel::SharedStorage*>(storage));
}
