"""Witnesses on small problems: results must be exact, and only argued reports are allowed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cupyconv
from cupyconv import ConvProblem, arrays
from cupyconv.problem import PASSES

from .. import memory
from ..module import EmulatedKernel, Outcome
from ..reports import CheckerError
from ..runtime import settings
from . import cutlass, cutlass_sm90, gluon_kernels, triton_kernels

Finding = tuple[str, ...]
"""Kind of a report, file of the access, and file of the other access, if any."""

WAITS_OF_ONE_WARP: frozenset[Finding] = frozenset(
    {
        # One thread releases (and at the end reuses) a stage after waiting for its own warp's
        # products, without synchronizing with the other warps.  So the chip completes a wgmma for
        # all warps of the warpgroup at once.
        ("race", "copy_sm90_tma.hpp", "mma_sm90_gmma.hpp"),
        ("race", "copy_sm90.hpp", "mma_sm90_gmma.hpp"),
        ("race", "copy.hpp", "mma_sm90_gmma.hpp"),
        # All lanes of a warp store the same box: the same bytes to the same addresses.
        ("race", "copy_sm90_tma.hpp", "copy_sm90_tma.hpp"),
    }
)
LOADS_WHAT_IT_DOES_NOT_USE: frozenset[Finding] = frozenset(
    {
        # CUTLASS leaves shared memory unwritten where a tile exceeds the matrix.  It multiplies
        # rows and columns that are never stored, and finally loads fragments of a step that does
        # not exist.  The exact results prove these values unused: unwritten memory holds NaN.
        ("uninitialised-read", "memory_sm75.h"),  # ldmatrix
        ("uninitialised-read", "mma_tensor_op_tile_iterator_sm80.h"),
        ("uninitialised-read", "mma_tensor_op_tile_iterator.h"),
    }
)

BARRIERS_NOT_FENCED: frozenset[Finding] = frozenset(
    {
        # Triton initialises an mbarrier and passes it to TMA after a block barrier, without a proxy
        # fence: the chip's copies see the block's stores.
        ("missing-proxy-fence", "triton_source.py"),
        ("missing-proxy-fence", "gluon_source.py"),
    }
)
ALL_LANES_STORE_THE_SAME: frozenset[Finding] = frozenset(
    {
        # All lanes of a warp store the same value to the same address.
        ("race", "gluon_source.py", "gluon_source.py"),
        ("race", "standard.py", "standard.py"),
    }
)


@dataclass(frozen=True)
class Witness:
    """A kernel proven on hardware, on one problem.

    Attributes:
        run: computes the problem under the caller's settings; AssertionError for wrong results.
        kernel: returns the kernel that ``run`` launches.
        argued: reports that the checker may make.
    """

    run: Callable[[], Outcome]
    kernel: Callable[[], EmulatedKernel]
    argued: frozenset[Finding] = frozenset()

    def testify(self) -> None:
        """Raise AssertionError for wrong results, CheckerError for reports that are not argued."""
        with settings(raise_reports=False):
            outcome = self.run()
        unargued = [report for report in outcome.reports if _finding(report) not in self.argued]
        if unargued:
            raise CheckerError(unargued)


def _finding(report) -> Finding:
    other = re.search(r" at (\S+):\d+, with no order", report.text)
    return (report.kind, Path(report.file).name, *([other[1]] if other else []))


def whole_numbers(*shape: int, dtype: str) -> np.ndarray:
    """Return integers whose sums are exact in float32 but rounded in 16 bits."""
    values = np.random.default_rng(sum(shape)).integers(-15, 16, shape)
    return values.astype(arrays.numpy_dtype(dtype))


def _same(result: np.ndarray, expected: np.ndarray) -> None:
    """Raise AssertionError unless the arrays are equal and the first is completely written."""
    memory.check_written(result)
    np.testing.assert_array_equal(result, expected)


def _rounded_to_tf32(values: np.ndarray) -> np.ndarray:
    """Round to ten fraction bits, ties away from zero."""
    return ((values.view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def _gemm_of_sm80(name: str, size: tuple[int, int, int]) -> Outcome:
    dtype, (m, n, k) = cutlass.GEMMS[name].dtype, size
    a, b = whole_numbers(m, k, dtype=dtype), whole_numbers(n, k, dtype=dtype)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    if dtype == "float32":
        # More bits than TF32 has; half of the values are ties.
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
    """A channels-last convolution."""

    x: tuple[int, ...]
    filter: tuple[int, ...]
    padding: int = 1
    stride: int = 1
    dilation: int = 1

    @property
    def rules(self) -> dict[str, Any]:
        """Keyword arguments of the library, in CUTLASS's formats."""
        rank = len(self.x) - 2
        return {
            "padding": self.padding,
            "stride": self.stride,
            "dilation": self.dilation,
            "data_format": {1: "NWC", 2: "NHWC", 3: "NDHWC"}[rank],
            "filter_format": {1: "OWI", 2: "OHWI", 3: "ODHWI"}[rank],
        }

    def problem(self, dtype: str) -> ConvProblem:
        return ConvProblem(self.x, self.filter, dtype=dtype, **self.rules)

    def operands(self, pass_: str, dtype: str) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the operands of a pass in CUTLASS's order, and the exact result."""
        x, w = whole_numbers(*self.x, dtype=dtype), whole_numbers(*self.filter, dtype=dtype)
        dy = whole_numbers(*self.problem(dtype).output_shape, dtype=dtype)
        if pass_ == "forward":
            return [x, w], cupyconv.conv_forward(x, w, **self.rules)
        if pass_ == "backprop_input":
            return [dy, w], cupyconv.conv_backprop_input(x.shape, w, dy, **self.rules)
        return [dy, x], cupyconv.conv_backprop_filter(x, w.shape, dy, **self.rules)


def _launch_of_sm80(
    instance: cutlass.Convolution, pass_: str, layer: Layer
) -> cutlass.ConvolutionLaunch:
    return cutlass.convolution(layer.problem(instance.dtype), pass_, instance)


def _convolution_of_sm80(instance: cutlass.Convolution, pass_: str, layer: Layer) -> Outcome:
    operands, expected = layer.operands(pass_, instance.dtype)
    launch = _launch_of_sm80(instance, pass_, layer)
    result = memory.empty(expected.shape, expected.dtype, "result")
    inputs = [
        memory.array(operand, role) for operand, role in zip(operands, launch.roles, strict=False)
    ]
    outcome = launch.run(launch.kernel(), *inputs, result)
    _same(result, expected)
    return outcome


def _convolution_of_sm90(pass_: str, dtype: str, cluster: tuple[int, int], layer: Layer) -> Outcome:
    operands, expected = layer.operands(pass_, dtype)
    result = memory.empty(expected.shape, arrays.numpy_dtype(dtype), "result")
    inputs = [memory.array(operand, name) for operand, name in zip(operands, "ab", strict=True)]
    sizes = (*layer.x, *layer.filter, layer.padding, layer.stride, layer.dilation)
    kernel = cutlass_sm90.convolution(pass_, len(layer.x) - 2, dtype, cluster)
    outcome = kernel.run(sizes, *inputs, result)
    _same(result, expected)
    return outcome


def _gemm_of_sm90(dtype: str, layouts: str, instance: tuple, size: tuple[int, int, int]) -> Outcome:
    m, n, k = size
    a, b = whole_numbers(m, k, dtype=dtype), whole_numbers(k, n, dtype=dtype)
    # "N" is column-major.
    inputs = [
        memory.array(np.ascontiguousarray(operand if layout == "T" else operand.T), name)
        for operand, layout, name in zip((a, b), layouts, "ab", strict=False)
    ]
    is_row_major = layouts[2] == "T"
    c = memory.empty((m, n) if is_row_major else (n, m), a.dtype, "c")
    outcome = cutlass_sm90.gemm(dtype, layouts, *instance).run(size, *inputs, c)
    _same(c if is_row_major else c.T, (a.astype(np.float64) @ b.astype(np.float64)).astype(a.dtype))
    return outcome


def dependent_gemm() -> cutlass_sm90.Instance:
    """Return a GEMM that waits for the previous launch before reading, and releases the next."""
    return cutlass_sm90.gemm("float16", "TNT", (64, 128, 64), (2, 1), dependent=True)


def dependent_gemms(gemm: cutlass_sm90.Instance) -> Outcome:
    """Run two overlapping GEMMs: the second reads the first one's result.

    The second stores its result over the first one's operand.
    """
    m, n, k = 192, 256, 192
    a, b, v = (whole_numbers(*item, dtype="float16") // 8 for item in ((m, k), (k, n), (n, k)))
    left_operand, c = memory.array(a, "a", read_only=False), memory.empty((m, n), a.dtype, "c")
    left, right = (memory.array(np.ascontiguousarray(item.T), "b") for item in (b, v))
    first = gemm.run((m, n, k), left_operand, left, c)
    second = gemm.run((m, k, n), c, right, left_operand, may_overlap=True)
    expected = (a.astype(np.float64) @ b).astype(a.dtype)
    _same(c, expected)
    np.testing.assert_array_equal(left_operand, (expected.astype(np.float64) @ v).astype(a.dtype))
    return replace(second, reports=[*first.reports, *second.reports])


def _chain(name: str) -> Outcome:
    m, k, middle, n, is_transposed = triton_kernels.CHAINS[name]
    # Small values, so rounding between the two products is exact.
    extents = ((m, k), (k, middle), (middle, n), (m, n))
    a, b, v, d = (whole_numbers(*item, dtype="float16") // 4 for item in extents)
    exact = a.astype(np.float64) @ b @ v + d
    c = memory.empty((m, n), a.dtype, "c")
    stored = np.ascontiguousarray(v.T) if is_transposed else v
    inputs = (
        memory.array(item, role) for item, role in zip((a, b, stored, d), "abvd", strict=True)
    )
    outcome = triton_kernels.chain(name)(*inputs, c)
    _same(c, exact.astype(a.dtype))
    return outcome


def _threefold_product() -> Outcome:
    m, n, k = triton_kernels.THREEFOLD_SIZE
    generator = np.random.default_rng(m)
    # 23-bit values: the remainder after rounding to TF32 is itself a TF32 value, so two parts are
    # exact.  With truncation they would not be.
    a = (2 * generator.integers(-(2**23), 2**23, (m, k)) // 2 * 2).astype(np.float32)
    b = np.eye(k, n, dtype=np.float32)[generator.permutation(k)] * generator.choice([-1, 1], n)
    c = memory.empty((m, n), np.float32, "c")
    inputs = memory.array(a, "a"), memory.array(b.astype(np.float32), "b")
    outcome = triton_kernels.threefold()(*inputs, c)
    _same(c, a @ b)
    return outcome


def _loaded_box_of_float32() -> Outcome:
    box = gluon_kernels.BOX_OF_FLOAT32
    # A third of the values are ties, of both kinds.
    bits = np.random.default_rng(1).integers(0, 1 << 18, box.shape, np.uint32) << np.uint32(12)
    bits |= np.random.default_rng(2).integers(0, 3, box.shape).astype(np.uint32) % 2
    x, expected = bits.view(np.float32), np.zeros(box.box, np.float32)
    for index, position in _inside(box):
        expected[index] = x[position]
    source, result = memory.array(x, "x"), memory.empty(box.box, x.dtype, "result")
    launch = gluon_kernels.loaded_box_of_float32()
    outcome = launch(*launch.described(source, to_tf32=True), result)
    _same(result, gluon_kernels.rounded_to_tf32(expected))
    return outcome


def _inside(box: gluon_kernels.Box) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the indices of the box's elements inside the tensor, with their tensor indices."""
    for index in np.ndindex(*box.box):
        position = tuple(map(sum, zip(index, box.corner, strict=True)))
        if all(
            0 <= coordinate < extent for coordinate, extent in zip(position, box.shape, strict=True)
        ):
            yield index, position


def _loaded_box(axes: int, blocks: int) -> Outcome:
    box = gluon_kernels.BOXES[axes]
    x, expected = whole_numbers(*box.shape, dtype="float16"), np.zeros(box.box, np.float16)
    for index, position in _inside(box):
        expected[index] = x[position]
    source, result = memory.array(x, "x"), memory.empty(box.box, x.dtype, "result")
    launch = gluon_kernels.loaded_box(axes, blocks)
    outcome = launch(*launch.described(source), result)
    _same(result, expected)
    return outcome


def _stored_box(axes: int) -> Outcome:
    box = gluon_kernels.BOXES[axes]
    values, expected = whole_numbers(*box.box, dtype="float16"), np.full(box.shape, np.nan)
    for index, position in _inside(box):
        expected[position] = values[index]
    target = memory.empty(box.shape, values.dtype, "target")
    launch = gluon_kernels.stored_box(axes)
    outcome = launch(memory.array(values, "values"), *launch.described(target))
    np.testing.assert_array_equal(target, expected)
    return outcome


def _loaded_column(blocks: int) -> Outcome:
    column = gluon_kernels.COLUMN
    images, pixels, channels = column.shape
    x = whole_numbers(*column.shape, dtype="float16")
    first, last = column.corners[0], pixels - 1 + column.corners[1]
    bases = [(n, w) for n in range(images) for w in range(first, last + 1, column.step)]
    begin = bases.index(column.base)
    expected = np.zeros((column.pixels, channels), np.float16)
    for row, (n, w) in zip(expected, bases[begin:], strict=False):
        if 0 <= w + column.tap < pixels:
            row[:] = x[n, w + column.tap]
    result = memory.empty(expected.shape, x.dtype, "result")
    outcome = gluon_kernels.run_column(blocks, memory.array(x, "x"), result)
    _same(result, expected)
    return outcome


def _product_without_swizzle(a_along_k: bool, b_along_k: bool) -> Outcome:
    m, n, k = gluon_kernels.TILE
    a, b = whole_numbers(m, k, dtype="float16"), whole_numbers(k, n, dtype="float16")
    c = memory.empty((m, n), a.dtype, "c")
    launch = gluon_kernels.product(a_along_k, b_along_k)
    outcome = launch(memory.array(a, "a"), memory.array(b, "b"), c)
    _same(c, (a.astype(np.float64) @ b).astype(a.dtype))
    return outcome


def _sums_by_parties() -> Outcome:
    rows = sum(gluon_kernels.ROWS)
    x = whole_numbers(rows, gluon_kernels.LENGTH, dtype="float32")
    sums = memory.empty((rows,), x.dtype, "sums")
    outcome = gluon_kernels.sums_by_parties()(memory.array(x, "x"), sums)
    _same(sums, x.sum(1))
    return outcome


def _transposed_between_blocks() -> Outcome:
    x = whole_numbers(gluon_kernels.EXCHANGED, gluon_kernels.EXCHANGED, dtype="float32")
    y = memory.empty(x.shape, x.dtype, "y")
    outcome = gluon_kernels.transposed_between_blocks()(memory.array(x, "x"), y)
    _same(y, x.T)
    return outcome


def _triton_product(name: str) -> Outcome:
    product = triton_kernels.PRODUCTS[name]
    m, n, k = product.size
    a, b = whole_numbers(m, k, dtype=product.dtype), whole_numbers(k, n, dtype=product.dtype)
    if product.is_transposed:
        b = np.ascontiguousarray(b.T).T
    c = memory.empty((m, n), a.dtype, "c")
    inputs = memory.array(a, "a"), memory.array(b.T if product.is_transposed else b, "b")
    outcome = triton_kernels.run_product(name, *inputs, c)
    _same(c, (a.astype(np.float64) @ b.astype(np.float64)).astype(a.dtype))
    return outcome


# --------------------------------------------------------------------------------------------------
# All witnesses
# --------------------------------------------------------------------------------------------------
_LAYERS_OF_SM80 = {
    "3x3": Layer((1, 9, 8, 32), (64, 3, 3, 32)),
    "1x1": Layer((2, 8, 8, 64), (64, 1, 1, 64), padding=0),
    "stride-2": Layer((1, 11, 10, 32), (64, 3, 3, 32), stride=2),
    "dilation-2": Layer((1, 10, 9, 32), (64, 3, 3, 32), padding=2, dilation=2),
    "ragged": Layer((1, 7, 9, 40), (72, 3, 3, 40)),
    "no-padding": Layer((1, 9, 9, 32), (64, 3, 3, 32), padding=0),
}
# All layers run in float16.  Other dtypes and the larger tile run only layers smaller than a tile.
_CONVOLUTIONS_OF_SM80 = {
    **{
        f"{pass_} {name}": (cutlass.instance_of("float16", 64), pass_, layer)
        for pass_ in PASSES
        for name, layer in _LAYERS_OF_SM80.items()
    },
    **{
        f"{pass_} {numbers} {tile}x{tile} {name}": (instance, pass_, _LAYERS_OF_SM80[name])
        for pass_ in PASSES
        for (numbers, tile), instance in cutlass.CONVOLUTIONS.items()
        for name in ("ragged", "stride-2")
        if tile == 128
    },
}
# Pass, dtype, cluster, layer; together they multicast both operands and use one to three axes.
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
# Dtype; layouts of a, b and c; (tile, cluster, cooperative warpgroups); m, n and k.
_GEMMS_OF_SM90 = {
    "f16-TNT": ("float16", "TNT", ((64, 128, 64), (2, 1), False), (192, 256, 192)),
    "f16-NTN": ("float16", "NTN", ((128, 64, 64), (1, 2), True), (200, 192, 136)),
    "bf16-NNT": ("bfloat16", "NNT", ((128, 256, 64), (2, 1), True), (256, 256, 128)),
    "tf32-TNT": ("float32", "TNT", ((128, 128, 32), (2, 2), True), (256, 256, 96)),
}

WITNESSES: dict[str, Witness] = {
    **{
        f"Triton {name}": Witness(
            partial(_triton_product, name),
            lambda name=name: triton_kernels.product(name).kernel,
            BARRIERS_NOT_FENCED if product.by_descriptor else frozenset(),
        )
        for name, product in triton_kernels.PRODUCTS.items()
    },
    **{
        f"Triton {name}": Witness(
            partial(_chain, name), lambda name=name: triton_kernels.chain(name).kernel
        )
        for name in triton_kernels.CHAINS
    },
    "Triton 8.0 float32 by three": Witness(
        _threefold_product, lambda: triton_kernels.threefold().kernel
    ),
    **{
        f"Gluon 9.0 box of {axes} axes{' in a cluster' * (blocks - 1)}": Witness(
            partial(_loaded_box, axes, blocks),
            lambda axes=axes, blocks=blocks: gluon_kernels.loaded_box(axes, blocks).kernel,
            BARRIERS_NOT_FENCED,
        )
        for axes in gluon_kernels.BOXES
        for blocks in (1, 2)
    },
    "Gluon 9.0 box of float32": Witness(
        _loaded_box_of_float32,
        lambda: gluon_kernels.loaded_box_of_float32().kernel,
        BARRIERS_NOT_FENCED,
    ),
    "Gluon 9.0 stored box": Witness(
        partial(_stored_box, 4), lambda: gluon_kernels.stored_box(4).kernel
    ),
    **{
        f"Gluon 9.0 column{' in a cluster' * (blocks - 1)}": Witness(
            partial(_loaded_column, blocks),
            lambda blocks=blocks: gluon_kernels.loaded_column(blocks).kernel,
            BARRIERS_NOT_FENCED,
        )
        for blocks in (1, 2)
    },
    **{
        f"Gluon 9.0 product without swizzle {'TN'[not a]}{'NT'[not b]}": Witness(
            partial(_product_without_swizzle, a, b),
            lambda a=a, b=b: gluon_kernels.product(a, b).kernel,
        )
        for a, b in ((True, False), (False, True))
    },
    "Gluon 9.0 sums by parties": Witness(
        _sums_by_parties, lambda: gluon_kernels.sums_by_parties().kernel, ALL_LANES_STORE_THE_SAME
    ),
    "Gluon 9.0 transposed between blocks": Witness(
        _transposed_between_blocks, lambda: gluon_kernels.transposed_between_blocks().kernel
    ),
    **{
        f"CUTLASS 8.0 GEMM {name}": Witness(
            partial(_gemm_of_sm80, name, (128, 64, 96)), partial(cutlass.gemm_kernel, name)
        )
        for name in cutlass.GEMMS
    },
    # Sizes for which copies of 16, 4 and 8 bytes are partly masked.
    **{
        f"CUTLASS 8.0 GEMM {name} {'x'.join(map(str, size))}": Witness(
            partial(_gemm_of_sm80, name, size),
            partial(cutlass.gemm_kernel, name),
            LOADS_WHAT_IT_DOES_NOT_USE,
        )
        for name, size in (
            ("f16", (64, 192, 40)),
            ("f16", (136, 72, 160)),
            ("f16-copies-of-4", (64, 64, 42)),
            ("f64", (64, 64, 21)),
        )
    },
    **{
        f"CUTLASS 8.0 {name}": Witness(
            partial(_convolution_of_sm80, *case), lambda case=case: _launch_of_sm80(*case).kernel()
        )
        for name, case in _CONVOLUTIONS_OF_SM80.items()
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
    "CUTLASS 9.0 dependent GEMMs": Witness(
        lambda: dependent_gemms(dependent_gemm()),
        lambda: dependent_gemm().kernel,
        WAITS_OF_ONE_WARP,
    ),
}
"""All witnesses by name."""
