// Instances of CUTLASS's GEMM on mma.sync: for compute capability 8.0 with cp.async, for 7.5 without.
//
//   c[m][n] = sum over k of a[m][k] * b[n][k]
//
// Chosen with -D: ELEMENT, SUM (of the products), ARCH (Sm75, Sm80), INSTRUCTION_M and _K of the
// mma.sync, TILE_K, STAGES, and VECTOR (elements per copy).
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/kernel/default_gemm.h"
#include "cutlass/gemm/threadblock/threadblock_swizzle.h"

using Element = ELEMENT;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Tile = cutlass::gemm::GemmShape<64, 64, TILE_K>;
using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>;
using Kernel = cutlass::gemm::kernel::DefaultGemm<
    Element, Row, VECTOR, Element, Column, VECTOR, Element, Row, SUM,
    cutlass::arch::OpClassTensorOp, cutlass::arch::ARCH, Tile,
    cutlass::gemm::GemmShape<32, 32, TILE_K>,
    cutlass::gemm::GemmShape<INSTRUCTION_M, 8, INSTRUCTION_K>,
    cutlass::epilogue::thread::LinearCombination<Element, 16 / sizeof(Element), SUM, SUM>, Swizzle,
    STAGES, false, cutlass::arch::OpMultiplyAdd>::GemmKernel;
static_assert(sizeof(Kernel::SharedStorage) <= 48 << 10, "what a launch may have unasked");

extern "C" __global__ void __launch_bounds__(128)
    gemm(Element* a, Element* b, Element* c, int m, int n, int k) {
  extern __shared__ __align__(128) char storage[];
  const cutlass::gemm::GemmCoord size(m, n, k);
  const typename Kernel::Params parameters(
      size, Swizzle().get_tiled_shape(size, {64, 64, TILE_K}, 1), {a, Row(k)}, {b, Column(k)},
      {c, Row(n)}, {c, Row(n)}, {SUM(1), SUM(0)});
  Kernel()(parameters, *reinterpret_cast<typename Kernel::SharedStorage*>(storage));
}
