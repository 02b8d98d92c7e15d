"""cuda-columns (cuda/conv_columns.cu): one product of all pixels with all taps, and then sums.

The source is x in forward and dy in backprop_input.  The columns are the result of the product: a
matrix with a row per pixel of the source, and a column per tap and channel of the pass's result.
The sum kernel then adds up, for each result, the elements of the columns that contribute to it: its
terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod
from typing import NamedTuple

from cupyconv.formats import CHANNELS_LAST, filter_formats
from cupyconv.kernels import cost, parameters
from cupyconv.kernels.copies import (
    ROLES_OF,
    arrange,
    arranged,
    copy_bytes,
    filter_by_channels,
    filter_by_channels_bytes,
    has_even_taps,
    pitch,
    shape_of,
)
from cupyconv.kernels.family import Candidate, Choices, Family, accumulator_bytes
from cupyconv.kernels.gather import CUDA_GATHER, aligned, product_launch
from cupyconv.kernels.limits import LARGEST_EXTENT, MOST_BLOCKS, Count, extent_counts
from cupyconv.kernels.request import PLAIN, Epilogue, Request
from cupyconv.kernels.strides import Strides
from cupyconv.kernels.views import FEW
from cupyconv.launch import STORAGE, FilterForm, Launch, Part
from cupyconv.problem import ITEMSIZE, ConvProblem, derived

THREADS, CHANNELS = 256, 4
"""Threads per block of the sum kernel, and number of channels that a thread computes per pixel."""

MOST_TIMES, SMALL_BYTES, LARGE_BYTES, MOST_BYTES = 8, 64 << 20, 512 << 20, 4 << 30
"""Limits on the bytes of the columns (hand-set).  The columns may take MOST_TIMES the bytes of x, w
and y, SMALL_BYTES if that is more, or LARGE_BYTES if cuda-gather cannot compute the layer.  They
must never take more than MOST_BYTES."""

_RESIDENT = {1: 4, 4: 2}
"""Resident blocks of the sum kernel per multiprocessor that registers allow, keyed by the number of
terms that a thread loads together (counted)."""

FEW_BLOCKS = 256
"""Number of blocks of the sum kernel up to which threads load four terms together (hand-set).  More
blocks hide the latency of single loads."""

_PIXEL_INSTRUCTIONS, _TERM_INSTRUCTIONS = 450, 80
"""Instructions of the sum kernel per thread: a constant, and the number per term in backprop_input
(counted in SASS for 8.0).  The model uses this number in forward too, where a term takes 51."""


_STEP_INSTRUCTIONS = 40
"""Instructions of the sum kernel per position between two taps of a dilated filter (fitted)."""


class Columns(NamedTuple):
    """The matrix product of a pass, as the forward pass of a pointwise convolution.

    Attributes:
        problem: the pointwise convolution.
        strides: strides of the source, w and the columns, which are x, w and y of ``problem``.
        taps_fastest: whether columns are numbered with taps fastest, else with channels fastest.
    """

    problem: ConvProblem
    strides: Strides
    taps_fastest: bool

    @property
    def bytes(self) -> int:
        """Workspace bytes of the columns, per split of the product."""
        return prod(self.problem.output_shape) * accumulator_bytes(self.problem)

    @property
    def is_copied(self) -> bool:
        """Whether the product reads a copy of w in the workspace."""
        return "w" in self.strides.copied

    def request(self, request: Request) -> Request:
        """Return the request for the product; ``request`` is the request for the pass."""
        return replace(
            request,
            problem=self.problem,
            pass_="forward",
            workspace_limit=None,
            strides=self.strides,
        )


@lru_cache(maxsize=4096)
def columns_of(problem: ConvProblem, strides: Strides, pass_: str) -> Columns | None:
    """Return the product of a pass, which reads w or, if it must, a rearranged copy of w.

    The result is None if the columns have no constant stride in w, nor in a copy of w.
    """
    columns = _even_columns(problem, strides, pass_)
    if columns is not None:
        return columns
    if pass_ == "forward":
        return _even_columns(*arranged(problem, strides, ("w",)), pass_)
    if not has_even_taps(problem, strides):
        return None
    count = problem.C // problem.groups * prod(problem.filter_sizes)
    step = pitch(problem.K // problem.groups, ITEMSIZE[problem.dtype])
    return _columns(problem, replace(strides, copied=("w",)), pass_, (step, 1), count, True)


def _even_columns(problem: ConvProblem, strides: Strides, pass_: str) -> Columns | None:
    """Return the product of a pass; None if its columns have no constant stride in w."""
    filter_, channel, *taps = problem.filter_axes
    shape, groups, forward = problem.filter_shape, problem.groups, pass_ == "forward"
    summed, kept = (channel, filter_) if forward else (filter_, channel)
    per_group = problem.K // groups
    sizes = [per_group if axis == filter_ else shape[axis] for axis in range(len(shape))]
    for taps_fastest in (True, False):
        order = (kept, *taps) if taps_fastest else (*taps, kept)
        step = _even_step(strides.w, sizes, order)
        if step is not None:
            break
    else:
        return None
    count = prod(sizes[axis] for axis in order)
    # The columns of a group must directly follow the columns of the previous group in w.
    if groups > 1 and per_group * strides.w[filter_] != count * step:
        return None
    return _columns(problem, strides, pass_, (step, strides.w[summed]), count, taps_fastest)


def _columns(
    problem: ConvProblem,
    strides: Strides,
    pass_: str,
    w_strides: tuple[int, int],
    count: int,
    taps_fastest: bool,
) -> Columns:
    """Return the product of a pass, given the strides of the columns in w.

    Args:
        problem, strides, pass_: the pass, as the caller requests it.
        w_strides: strides in w (or its copy) of successive columns, and of the summed elements.
        count: number of columns per group.
        taps_fastest: whether columns are numbered with taps fastest, else with channels fastest.
    """
    rank, groups = problem.spatial_rank, problem.groups
    role, _, _ = ROLES_OF[pass_]
    source = shape_of(problem, role)
    product = derived(
        problem,
        input_shape=source,
        filter_shape=(groups * count, source[problem.data_axes[1]] // groups, *(1,) * rank),
        stride=(1,) * rank,
        padding=((0, 0),) * rank,
        dilation=(1,) * rank,
        filter_format=filter_formats(rank)[0],
        padding_mode="explicit",
    )
    y = Strides.of(product, CHANNELS_LAST).y
    w = (*w_strides, *(1,) * rank)
    x, alignment = getattr(strides, role), strides.alignment
    product_strides = Strides(x, w, y, alignment=alignment, copied=strides.copied)
    return Columns(product, product_strides, taps_fastest)


def _even_step(strides: Sequence[int], shape: Sequence[int], order: Sequence[int]) -> int | None:
    """Return the constant stride between successive elements of several axes.

    Args:
        strides, shape: strides and shape of the array.
        order: axes in the order of the elements, the last axis fastest.

    Returns:
        The stride, which may be negative; None if successive elements have no constant stride.
    """
    step, expected = None, 0
    for axis in reversed(order):
        if shape[axis] == 1:
            continue
        if step is None:
            step = expected = strides[axis]
        if strides[axis] != expected:
            return None
        expected *= shape[axis]
    return 1 if step is None else step


class ColumnSums(Family):
    name = "cuda-columns"
    summary = "one dense product of all pixels and taps on cuda-gather, then a sum per result"
    tiles = CUDA_GATHER.tiles

    def refuses_layer(self, request: Request) -> str | None:
        problem = request.problem
        if request.pass_ == "backprop_filter":
            return "cuda-columns computes forward and backprop_input"
        if problem.is_complex:
            return "cuda-columns computes real numbers"
        filters = problem.K // problem.groups
        many = request.pass_ == "forward" and filters > FEW
        if many and not CUDA_GATHER.refuses(request):
            return f"cuda-columns takes up to {FEW} filters per group, not {filters}"
        _, _, channels = _result(request)
        count = problem.groups * channels * prod(problem.filter_sizes)
        if count > LARGEST_EXTENT:
            return f"cuda-columns counts up to {LARGEST_EXTENT:,} columns, not {count:,}"
        columns = columns_of(problem, request.memory, request.pass_)
        if columns is None:
            return "cuda-columns takes filters whose taps and channels are evenly spaced in memory"
        refusal = CUDA_GATHER.refuses(columns.request(request))
        return refusal or self._refuses_workspace(request, columns)

    def _refuses_workspace(self, request: Request, columns: Columns) -> str | None:
        """Return why the columns need too much workspace; None if they do not."""
        size = columns.bytes
        most = min(max(MOST_TIMES * request.problem.bytes, SMALL_BYTES), MOST_BYTES)
        if most < size <= LARGE_BYTES and CUDA_GATHER.refuses(request):
            most = size  # the alternative is cuda-generic
        if size > most:
            return f"cuda-columns takes up to {most} bytes of columns for this layer, not {size}"
        if columns.is_copied:
            size = aligned(size) + _copied_bytes(request)
        if not request.affords(size):
            limit = request.workspace_limit
            return f"the columns need a workspace of {size} bytes, the limit is {limit}"
        return None

    def counts(self, request: Request) -> Iterator[Count]:
        yield from extent_counts(request.problem)
        yield from CUDA_GATHER.counts(self._columns(request).request(request))
        yield Count("blocks", _sum_blocks(request), MOST_BLOCKS)

    def candidates(self, request: Request) -> list[Candidate]:
        products = CUDA_GATHER.products(self._columns(request).request(request))
        found = (self._with_sums(request, product) for product in products)
        return [candidate for candidate in found if request.affords(candidate.workspace_bytes)]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        columns = self._columns(request)
        copied = columns.strides.copied
        if not choices.has_only("tile", "splits", "copies") or choices.copies != copied:
            return None
        product = CUDA_GATHER.candidate(columns.request(request), replace(choices, copies=()))
        return product and self._with_sums(request, product)

    def launches(
        self, request: Request, choices: Choices, epilogue: Epilogue = PLAIN, copied_w: bool = False
    ) -> tuple[Launch, ...]:
        """Return the launches: the copy of w if any, the product, and the sum."""
        import numpy as np

        problem, strides, pass_ = request.problem, request.memory, request.pass_
        columns = self._columns(request)
        w: str | Part = "w"
        before: tuple[Launch, ...] = ()
        if columns.is_copied and not copied_w:
            offset = aligned(choices.splits * columns.bytes)
            w = Part("workspace", offset)
            before = (_copy_of_w(request, offset),)
        source, _, _ = ROLES_OF[pass_]
        result, shape, _ = _result(request)
        first = product_launch(columns.request(request), choices, (source, w), partial=True)
        defines: dict[str, str | int] = {
            "PASS": 0 if pass_ == "forward" else 1,
            "STORAGE": STORAGE[problem.dtype],
            "INDEX": parameters.index_type(problem, strides, prod(shape)),
            "TAPS_FASTEST": int(columns.taps_fastest),
            "CHANNELS_LAST": int(getattr(strides, result)[problem.data_axes[1]] == 1),
            "AT_ONCE": _at_once(request),
            **epilogue.defines,
        }
        second = Launch(
            source="conv_columns.cu",
            entry="conv_columns",
            defines=tuple(defines.items()),
            grid=(_sum_blocks(request),),
            block=(THREADS,),
            shared_bytes=0,
            arguments=(
                *("workspace", "bias", "add", result, np.int32(choices.splits)),
                parameters.pack(problem, strides),
            ),
        )
        return (*before, first, second)

    def filter_form(self, request: Request, choices: Choices) -> FilterForm | None:
        if not choices.copies:
            return None
        order: str = filter_formats(request.problem.spatial_rank)[2]
        if request.pass_ == "backprop_input":
            order = f"I{order[1:-1]}O"
        return FilterForm(order, _copied_bytes(request), _copy_of_w(request, 0))

    def _columns(self, request: Request) -> Columns:
        """Return the product of a supported pass."""
        columns = columns_of(request.problem, request.memory, request.pass_)
        assert columns is not None
        return columns

    def _with_sums(self, request: Request, product: Candidate) -> Candidate:
        """Return the candidate of a product, extended by the sum and by any copy of w."""
        chip, problem, columns = request.chip, request.problem, self._columns(request)
        itemsize = ITEMSIZE[problem.dtype]
        operands = (prod(columns.problem.input_shape) + prod(problem.filter_shape)) * itemsize
        result = prod(_result(request)[1]) * itemsize
        workspace = product.splits * columns.bytes
        adding = _sum_kernel(request, product.splits).demand(chip, 0)
        assert product.demand is not None
        demands = [
            product.demand._replace(
                further=0, copied=0, moved=cost.moving(chip, operands + workspace)
            ),
            adding._replace(launches=0, further=1, copied=cost.moving(chip, workspace + result)),
        ]
        if columns.is_copied:
            size = _copied_bytes(request)
            demands.append(cost.further(chip, 2 * size))
            workspace = aligned(workspace) + size
        return self.priced(
            request,
            cost.together(*demands),
            summary="copied for its columns",
            copied=columns.strides.copied,
            copies=columns.strides.copied,
            tile=product.tile,
            blocks=product.blocks,
            splits=product.splits,
            workspace_bytes=workspace,
        )


def _result(request: Request) -> tuple[str, tuple[int, ...], int]:
    """Return the role and the shape of the result, and its channels (or filters) per group."""
    problem, role = request.problem, ROLES_OF[request.pass_][-1]
    shape = shape_of(problem, role)
    return role, shape, shape[problem.data_axes[1]] // problem.groups


def _copy_of_w(request: Request, offset: int) -> Launch:
    """Return the launch that copies w to the workspace; ``offset`` is in bytes."""
    problem, strides = request.problem, request.memory
    if request.pass_ == "backprop_input":
        return filter_by_channels(problem, strides, offset)
    copied, _ = arranged(problem, strides, ("w",))
    return arrange(problem, copied, strides, [("w", offset)])


def _copied_bytes(request: Request) -> int:
    """Return the size of the copy of w, in bytes."""
    problem = request.problem
    if request.pass_ == "backprop_input":
        return filter_by_channels_bytes(problem)
    copied, _ = arranged(problem, request.memory, ("w",))
    return copy_bytes(copied.filter_shape, ITEMSIZE[problem.dtype])


def _sum_blocks(request: Request) -> int:
    """Return the number of blocks of the sum kernel."""
    groups, (_, shape, channels) = request.problem.groups, _result(request)
    pixels = prod(shape) // (groups * channels)
    return ceil(pixels * groups * ceil(channels / CHANNELS) / THREADS)


def _at_once(request: Request) -> int:
    """Return the number of terms along the last axis that a thread loads together."""
    return 4 if request.problem.axes[-1].filter > 1 and _sum_blocks(request) <= FEW_BLOCKS else 1


def _sum_kernel(request: Request, splits: int) -> cost.Kernel:
    """Return the work of the sum kernel, for the cost model."""
    forward, problem = request.pass_ == "forward", request.problem
    _, _, channels = _result(request)
    terms, steps, at_once = splits, 0.0, _at_once(request)
    for axis in reversed(problem.axes):
        here = axis.filter if forward else min(ceil(axis.filter / axis.stride), axis.output)
        terms *= here
        if not forward and axis.dilation > 1:  # the loop skips positions between the taps
            passed = min(ceil(axis.effective_filter / axis.stride), axis.output)
            steps = passed + here * steps
        else:
            steps *= here
    warps = THREADS // 32
    work = cost.Work(
        multiplying=0.0,
        wavefronts=warps
        * terms
        * min(channels, CHANNELS)
        * cost.wavefronts(accumulator_bytes(problem)),
        instructions=warps
        * (_PIXEL_INSTRUCTIONS + _TERM_INSTRUCTIONS * terms + _STEP_INSTRUCTIONS * steps),
        waits=ceil(terms / at_once),
    )
    return cost.Kernel(_sum_blocks(request), _RESIDENT[at_once], warps, work)


CUDA_COLUMNS = ColumnSums()
