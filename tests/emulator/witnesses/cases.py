"""What the witnesses compute: small problems, right to the last bit, no report but argued ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import cupyconv
from cupyconv import ConvProblem, arrays
from cupyconv.problem import PASSES

from .. import memory
from ..module import EmulatedKernel, Outcome
from ..reports import CheckerError
from ..runtime import settings
from . import cutlass, cutlass_sm90, triton_kernels

Finding = tuple[str, ...]
"""The kind of a report, and the files of its access and of the other one, if there is one."""

WAITS_OF_ONE_WARP: frozenset[Finding] = frozenset(
    {
        # A stage is handed back, and at the end reused, by one thread that has waited for its own
        # warp's products; of the other warps' nothing tells it.  So the chip ends a product of the
        # warpgroup for all of its warps at once.
        ("race", "copy_sm90_tma.hpp", "mma_sm90_gmma.hpp"),
        ("race", "copy_sm90.hpp", "mma_sm90_gmma.hpp"),
        ("race", "copy.hpp", "mma_sm90_gmma.hpp"),
        # All lanes of a warp store the same box: the same bytes to the same place.
        ("race", "copy_sm90_tma.hpp", "copy_sm90_tma.hpp"),
    }
)
LOADS_WHAT_IT_DOES_NOT_USE: frozenset[Finding] = frozenset(
    {
        # CUTLASS leaves shared memory as it is where a tile is past the matrix.  It multiplies rows
        # and columns that are never stored, and at the end loads the fragments of a step that does
        # not come.  That nothing of them gets elsewhere, the numbers show: shared memory that
        # nothing has written holds NaN here.
        ("uninitialised-read", "memory_sm75.h"),  # ldmatrix
        ("uninitialised-read", "mma_tensor_op_tile_iterator_sm80.h"),
        ("uninitialised-read", "mma_tensor_op_tile_iterator.h"),
    }
)

BARRIERS_NOT_FENCED: frozenset[Finding] = frozenset(
    {
        # Triton initialises an mbarrier and hands it to TMA after a barrier of the block alone: the
        # chip's copies see what the block has stored there.
        ("missing-proxy-fence", "triton_source.py"),
    }
)


@dataclass(frozen=True)
class Witness:
    """A kernel that hardware has proved, on one problem.

    Attributes:
        run: computes it under the settings of the caller.  AssertionError: the numbers are wrong.
        kernel: what is launched.
        argued: what the checker may report.
    """

    run: Callable[[], Outcome]
    kernel: Callable[[], EmulatedKernel]
    argued: frozenset[Finding] = frozenset()

    def testify(self) -> None:
        """Raises AssertionError for wrong numbers, CheckerError for what is not argued."""
        with settings(raise_reports=False):
            outcome = self.run()
        unargued = [one for one in outcome.reports if _finding(one) not in self.argued]
        if unargued:
            raise CheckerError(unargued)


def _finding(report) -> Finding:
    other = re.search(r" at (\S+):\d+, with no order", report.text)
    return (report.kind, Path(report.file).name, *([other[1]] if other else []))


def whole_numbers(*shape: int, dtype: str) -> np.ndarray:
    """Whose sums are exact in float32, and are rounded in 16 bits."""
    values = np.random.default_rng(sum(shape)).integers(-15, 16, shape)
    return values.astype(arrays.numpy_dtype(dtype))


def _same(got: np.ndarray, wanted: np.ndarray) -> None:
    """AssertionError unless they are, and every element of the first has been written."""
    memory.check_written(got)
    np.testing.assert_array_equal(got, wanted)


def _rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """To ten bits of fraction, ties away from zero."""
    return ((values.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def _gemm_of_sm80(name: str, size: tuple[int, int, int]) -> Outcome:
    dtype, (m, n, k) = cutlass.GEMMS[name].dtype, size
    a, b = whole_numbers(m, k, dtype=dtype), whole_numbers(n, k, dtype=dtype)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    if dtype == "float32":
        # Of more bits than TF32 has: half of them are ties.
        a = np.random.default_rng(m + k).integers(-(2**12), 2**12, (m, k)).astype(np.float32)
        b = np.sign(b)
        exact = _rounded_to_tf32(a).astype(np.float64) @ b.astype(np.float64).T
    c = memory.empty((m, n), a.dtype, "c")
    arguments = (memory.array(a, "a"), memory.array(b, "b"), c, *map(np.int32, size))
    kernel = cutlass.gemm_kernel(name)
    outcome = kernel(cutlass.gemm_grid(m, n), (cutlass.THREADS,), arguments, cutlass.SHARED_BYTES)
    _same(c, exact.astype(a.dtype))
    return outcome


@dataclass(frozen=True)
class Layer:
    """A convolution, channels last."""

    x: tuple[int, ...]
    filter: tuple[int, ...]
    padding: int = 1
    stride: int = 1
    dilation: int = 1

    def operands(self, pass_: str, dtype: str) -> tuple[ConvProblem, list[np.ndarray], np.ndarray]:
        """The problem, the operands of a pass in the order of CUTLASS, and the right result."""
        rank = len(self.x) - 2
        rules = {
            "padding": self.padding,
            "stride": self.stride,
            "dilation": self.dilation,
            "data_format": {1: "NWC", 2: "NHWC", 3: "NDHWC"}[rank],
            "filter_format": {1: "OWI", 2: "OHWI", 3: "ODHWI"}[rank],
        }
        problem = ConvProblem(self.x, self.filter, dtype=dtype, **rules)
        x, w = whole_numbers(*self.x, dtype=dtype), whole_numbers(*self.filter, dtype=dtype)
        dy = whole_numbers(*problem.output_shape, dtype=dtype)
        if pass_ == "forward":
            return problem, [x, w], cupyconv.conv_forward(x, w, **rules)
        if pass_ == "backprop_input":
            return problem, [dy, w], cupyconv.conv_backprop_input(x.shape, w, dy, **rules)
        return problem, [dy, x], cupyconv.conv_backprop_filter(x, w.shape, dy, **rules)


def _convolution_of_sm80(pass_: str, layer: Layer) -> Outcome:
    problem, operands, wanted = layer.operands(pass_, "float16")
    launch = cutlass.convolution(problem, pass_)
    result = memory.empty(wanted.shape, np.float16, "result")
    held = [memory.array(one, role) for one, role in zip(operands, launch.roles, strict=False)]
    kernel = cutlass.convolution_kernel(pass_)
    arguments = (*held, result, *launch.numbers)
    outcome = kernel(launch.grid, (cutlass.THREADS,), arguments, launch.shared_bytes)
    _same(result, wanted)
    return outcome


def _convolution_of_sm90(pass_: str, dtype: str, cluster: tuple[int, int], layer: Layer) -> Outcome:
    _, operands, wanted = layer.operands(pass_, dtype)
    result = memory.empty(wanted.shape, arrays.numpy_dtype(dtype), "result")
    held = [memory.array(one, name) for one, name in zip(operands, "ab", strict=True)]
    sizes = (*layer.x, *layer.filter, layer.padding, layer.stride, layer.dilation)
    kernel = cutlass_sm90.convolution(pass_, len(layer.x) - 2, dtype, cluster)
    outcome = kernel.run(sizes, *held, result)
    _same(result, wanted)
    return outcome


def _gemm_of_sm90(dtype: str, layouts: str, instance: tuple, size: tuple[int, int, int]) -> Outcome:
    m, n, k = size
    a, b = whole_numbers(m, k, dtype=dtype), whole_numbers(k, n, dtype=dtype)
    # "N" is column by column.
    held = [
        memory.array(np.ascontiguousarray(one if way == "T" else one.T), name)
        for one, way, name in zip((a, b), layouts, "ab", strict=True)
    ]
    c = memory.empty((m, n), a.dtype, "c")
    outcome = cutlass_sm90.gemm(dtype, layouts, *instance).run(size, *held, c)
    _same(c, (a.astype(np.float64) @ b.astype(np.float64)).astype(a.dtype))
    return outcome


def _triton_product(name: str) -> Outcome:
    product = triton_kernels.PRODUCTS[name]
    m, n, k = product.size
    a, b = whole_numbers(m, k, dtype=product.dtype), whole_numbers(k, n, dtype=product.dtype)
    if product.is_transposed:
        b = np.ascontiguousarray(b.T).T
    c = memory.empty((m, n), a.dtype, "c")
    held = memory.array(a, "a"), memory.array(b.T if product.is_transposed else b, "b")
    outcome = triton_kernels.run(product, *held, c)
    _same(c, (a.astype(np.float64) @ b.astype(np.float64)).astype(a.dtype))
    return outcome


# --------------------------------------------------------------------------------------------------
# All of them
# --------------------------------------------------------------------------------------------------
_LAYERS_OF_SM80 = {
    "3x3": Layer((1, 9, 8, 32), (64, 3, 3, 32)),
    "1x1": Layer((2, 8, 8, 64), (64, 1, 1, 64), padding=0),
    "stride-2": Layer((1, 11, 10, 32), (64, 3, 3, 32), stride=2),
    "dilation-2": Layer((1, 10, 9, 32), (64, 3, 3, 32), padding=2, dilation=2),
    "ragged": Layer((1, 7, 9, 40), (72, 3, 3, 40)),
    "no-padding": Layer((1, 9, 9, 32), (64, 3, 3, 32), padding=0),
}
# Pass, dtype, blocks of a cluster: between them, both operands are multicast, one to three axes.
_CONVOLUTIONS_OF_SM90 = {
    "3x3": ("forward", "float16", (2, 1), Layer((1, 8, 8, 64), (128, 3, 3, 64))),
    "two-images": ("forward", "float16", (2, 1), Layer((2, 9, 10, 64), (64, 3, 1, 64))),
    "stride-2": ("forward", "float16", (2, 1), Layer((1, 11, 12, 128), (128, 3, 3, 128), stride=2)),
    "dilation-2": (
        "forward", "float16", (2, 1), Layer((1, 10, 10, 64), (128, 3, 3, 64), 2, dilation=2)
    ),
    "bf16-2x2": ("forward", "bfloat16", (2, 2), Layer((2, 9, 11, 64), (256, 3, 2, 64))),
    "1-axis": ("forward", "float16", (1, 2), Layer((3, 50, 64), (256, 5, 64), 2)),
    "3-axes": (
        "forward", "float16", (1, 2), Layer((2, 4, 5, 6, 64), (256, 3, 1, 2, 64), stride=2)
    ),
    "input": ("backprop_input", "float16", (2, 1), Layer((1, 8, 8, 64), (128, 3, 3, 64))),
    "input-2": ("backprop_input", "float16", (2, 1), Layer((2, 9, 10, 64), (64, 3, 1, 64))),
    "filter": ("backprop_filter", "float16", (2, 1), Layer((2, 9, 10, 64), (128, 3, 3, 64))),
    "filter-2": (
        "backprop_filter", "float16", (2, 1), Layer((1, 11, 12, 64), (256, 3, 3, 64), stride=2)
    ),
}  # fmt: skip
# Dtype, layouts of a and b; tile, cluster, whether two warpgroups share a tile; m, n and k.
_GEMMS_OF_SM90 = {
    "f16-TN": ("float16", "TN", ((64, 128, 64), (2, 1), False), (192, 256, 192)),
    "f16-NT": ("float16", "NT", ((128, 64, 64), (1, 2), True), (200, 192, 136)),
    "bf16-NN": ("bfloat16", "NN", ((128, 256, 64), (2, 1), True), (256, 256, 128)),
    "tf32-TN": ("float32", "TN", ((128, 128, 32), (2, 2), True), (256, 256, 96)),
}

WITNESSES: dict[str, Witness] = {
    **{
        f"Triton {name}": Witness(
            partial(_triton_product, name),
            partial(triton_kernels.kernel, product),
            BARRIERS_NOT_FENCED if product.by_descriptor else frozenset(),
        )
        for name, product in triton_kernels.PRODUCTS.items()
    },
    **{
        f"CUTLASS 8.0 GEMM {name}": Witness(
            partial(_gemm_of_sm80, name, (128, 64, 96)), partial(cutlass.gemm_kernel, name)
        )
        for name in cutlass.GEMMS
    },
    **{
        f"CUTLASS 8.0 GEMM f16 {'x'.join(map(str, size))}": Witness(
            partial(_gemm_of_sm80, "f16", size), cutlass.gemm_kernel, LOADS_WHAT_IT_DOES_NOT_USE
        )
        for size in ((64, 192, 40), (136, 72, 160))
    },
    **{
        f"CUTLASS 8.0 {pass_} {name}": Witness(
            partial(_convolution_of_sm80, pass_, layer),
            partial(cutlass.convolution_kernel, pass_),
        )
        for pass_ in PASSES
        for name, layer in _LAYERS_OF_SM80.items()
        if layer.stride == 1 or pass_ != "backprop_input"  # which is an instance of its own
    },
    **{
        f"CUTLASS 9.0 {case[0]} {name}": Witness(
            partial(_convolution_of_sm90, *case),
            lambda case=case: (
                cutlass_sm90.convolution(case[0], len(case[3].x) - 2, case[1], case[2]).kernel
            ),
            WAITS_OF_ONE_WARP,
        )
        for name, case in _CONVOLUTIONS_OF_SM90.items()
    },
    **{
        f"CUTLASS 9.0 GEMM {name}": Witness(
            partial(_gemm_of_sm90, *case),
            lambda case=case: cutlass_sm90.gemm(case[0], case[1], *case[2]).kernel,
            WAITS_OF_ONE_WARP,
        )
        for name, case in _GEMMS_OF_SM90.items()
    },
}
"""By name."""
