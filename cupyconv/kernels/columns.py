"""cuda-columns (cuda/conv_columns.cu): one dense product of pixels and taps, then a sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from cupyconv.formats import CHANNELS_LAST, filter_formats
from cupyconv.kernels import cost, parameters
from cupyconv.kernels.copies import arrange, arranged, arranging, copy_bytes
from cupyconv.kernels.family import Candidate, Choices, Family, Tile, accumulator_bytes
from cupyconv.kernels.gather import CUDA_GATHER, aligned, product_launch
from cupyconv.kernels.reach import MOST_BLOCKS, Count, reach_counts
from cupyconv.kernels.request import Request
from cupyconv.kernels.strides import Strides
from cupyconv.launch import STORAGE, FilterForm, Launch, Part
from cupyconv.problem import ITEMSIZE, ConvProblem

THREADS, CHANNELS = 256, 4
"""Threads per block of the sum, and channels of a pixel that a thread computes."""

MOST_FILTERS = 32
"""Largest number of filters in forward; with more filters, cuda-gather has full tiles (chosen)."""

COPIED = "w arranged"
"""Method that first copies w with channels last."""

_RESIDENT = 3
"""Resident blocks of the sum per multiprocessor, as registers allow (launch bounds)."""

_PIXEL_INSTRUCTIONS, _TERM_INSTRUCTIONS = 450, 80
"""Instructions of a thread of the sum, without terms and per term of backprop_input (counted in
SASS for 8.0; a term of forward takes 51)."""


@dataclass(frozen=True)
class Columns:
    """The product of a pass: source pixels by columns, which are taps and channels of the result.

    Attributes:
        problem: the product as the forward pass of a pointwise convolution.
        strides: strides of source, w and columns in this convolution.
        taps_fastest: whether columns are numbered with taps fastest, else with channels fastest.
    """

    problem: ConvProblem
    strides: Strides
    taps_fastest: bool

    @property
    def bytes(self) -> int:
        """Bytes of the columns in the workspace."""
        return prod(self.problem.output_shape) * accumulator_bytes(self.problem)

    def request(self, request: Request) -> Request:
        """Return the request for the product."""
        return Request(
            self.problem,
            "forward",
            request.device,
            request.precision,
            None,
            self.strides,
            request.figures,
        )


@lru_cache(maxsize=4096)
def columns_of(problem: ConvProblem, strides: Strides, pass_: str) -> Columns | None:
    """Return the product of a pass; None if the columns are not evenly spaced in w."""
    filter_, channel, *taps = problem.filter_axes
    summed, kept = (channel, filter_) if pass_ == "forward" else (filter_, channel)
    for taps_fastest in (True, False):
        order = (kept, *taps) if taps_fastest else (*taps, kept)
        step = _even_step(strides.w, problem.filter_shape, order)
        if step is not None:
            break
    else:
        return None
    source, apart = problem.input_shape, strides.x
    if pass_ == "backprop_input":
        source, apart = problem.output_shape, strides.y
    rank, shape = problem.spatial_rank, problem.filter_shape
    count = prod(shape[axis] for axis in order)
    product = ConvProblem(
        source,
        (count, shape[summed], *(1,) * rank),
        data_format=problem.data_format,
        filter_format=filter_formats(rank)[0],
        dtype=problem.dtype,
    )
    w = (step, strides.w[summed], *(1,) * rank)
    y = Strides.of(product, CHANNELS_LAST).y
    copied = ("w",) if "w" in strides.copied else ()
    seen = Strides(apart, w, y, alignment=strides.alignment, copied=copied)
    return Columns(product, seen, taps_fastest)


def _even_step(strides: Sequence[int], shape: Sequence[int], order: Sequence[int]) -> int | None:
    """Return the distance of elements that are numbered along several axes, the last one fastest.

    Returns:
        The distance, which may be negative; None if it varies.
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
        if request.pass_ == "forward" and problem.K > MOST_FILTERS:
            return f"cuda-columns takes up to {MOST_FILTERS} filters in forward, not {problem.K}"
        if problem.groups > 1:
            return f"cuda-columns takes a single group, not {problem.groups}"
        product = self._product(request)
        if product is None:
            return "cuda-columns takes filters whose taps and channels are evenly spaced in memory"
        return CUDA_GATHER.refuses(product[0].request(request))

    def counts(self, request: Request) -> Iterator[Count]:
        yield from reach_counts(request.problem)
        product = self._product(request)
        assert product is not None
        yield from CUDA_GATHER.counts(product[0].request(request))
        yield Count("blocks", _sum_blocks(request), MOST_BLOCKS)

    def fitting_tiles(self, request: Request) -> list[Tile]:
        product = self._product(request)
        return [] if product is None else CUDA_GATHER.fitting_tiles(product[0].request(request))

    def candidates(self, request: Request) -> list[Candidate]:
        every = (self._costed(request, tile) for tile in self.fitting_tiles(request))
        return [one for one in every if request.affords(one.workspace_bytes)]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        if choices.tiling or choices.splits != 1 or choices.tile not in self.fitting_tiles(request):
            return None
        assert choices.tile is not None
        found = self._costed(request, choices.tile)
        return found if choices.method == found.method else None

    def launches(
        self, request: Request, choices: Choices, activation: str | None = None
    ) -> tuple[Launch, ...]:
        """Return the launches: the copy of w if any, the product, and the sum."""
        problem, strides, pass_ = request.problem, request.memory, request.pass_
        product = self._product(request)
        assert product is not None
        columns, is_copied = product
        w: str | Part = "w"
        before: tuple[Launch, ...] = ()
        if is_copied and not strides.w_arranged:
            seen, _ = arranged(problem, strides, ("w",))
            offset = aligned(columns.bytes)
            w = Part("workspace", offset)
            before = (arrange(problem, seen, strides, [("w", offset)]),)
        source = "x" if pass_ == "forward" else "y"
        first = product_launch(
            request.device,
            "forward",
            columns.problem,
            columns.strides,
            choices,
            (source, w),
            partial=True,
        )
        result = "y" if pass_ == "forward" else "x"
        layout = strides.y if pass_ == "forward" else strides.x
        numbered = prod(problem.output_shape if pass_ == "forward" else problem.input_shape)
        defines: dict[str, str | int] = {
            "PASS": 0 if pass_ == "forward" else 1,
            "STORAGE": STORAGE[problem.dtype],
            "INDEX": parameters.index_type(problem, strides, numbered),
            "TAPS_FASTEST": int(columns.taps_fastest),
            "CHANNELS_LAST": int(layout[problem.data_axes[1]] == 1),
            "ACTIVATION": parameters.ACTIVATION[activation],
        }
        second = Launch(
            source="conv_columns.cu",
            entry="conv_columns",
            defines=tuple(defines.items()),
            grid=(_sum_blocks(request),),
            block=(THREADS,),
            shared_bytes=0,
            arguments=("workspace", "bias", result, parameters.pack(problem, strides)),
        )
        return (*before, first, second)

    def filter_form(self, request: Request, choices: Choices) -> FilterForm | None:
        """Return the copy of w that the launches begin with; None if they read w itself."""
        if choices.method != COPIED:
            return None
        seen, _ = arranged(request.problem, request.memory, ("w",))
        size = copy_bytes(seen.filter_shape, ITEMSIZE[seen.dtype])
        launch = arrange(request.problem, seen, request.memory, [("w", 0)])
        return FilterForm(seen.filter_format, size, launch)

    def _product(self, request: Request) -> tuple[Columns, bool] | None:
        """Return the product, and whether it reads a copy of w; None if neither w nor copy fits."""
        problem, strides = request.problem, request.memory
        if not strides.w_arranged:
            columns = columns_of(problem, strides, request.pass_)
            if columns is not None:
                return columns, False
        copied = columns_of(*arranged(problem, strides, ("w",)), request.pass_)
        return None if copied is None else (copied, True)

    def _costed(self, request: Request, tile: Tile) -> Candidate:
        chip, problem = request.chip, request.problem
        product = self._product(request)
        assert product is not None
        columns, is_copied = product
        seen = columns.request(request)
        gemm = columns.problem.gemm("forward")
        blocks = tile.blocks(gemm.gemm_m, gemm.gemm_n)
        depth = blocks * -(-gemm.gemm_k // tile.block_k) * tile.block_k
        kernel = CUDA_GATHER.kernel(seen, tile, depth, blocks)
        itemsize = ITEMSIZE[problem.dtype]
        operands = (prod(columns.problem.input_shape) + prod(problem.filter_shape)) * itemsize
        forward = request.pass_ == "forward"
        result = prod(problem.output_shape if forward else problem.input_shape) * itemsize
        adding = _sum_kernel(request)
        microseconds = kernel.microseconds(chip, operands + columns.bytes)
        microseconds += adding.microseconds(chip, columns.bytes + result)
        workspace, summary, method = columns.bytes, "", ""
        if is_copied:
            copied, _ = arranged(problem, request.memory, ("w",))
            shape = copied.filter_shape
            microseconds += arranging(chip, [shape], itemsize)
            workspace = aligned(workspace) + copy_bytes(shape, itemsize)
            summary, method = "w copied with channels last", COPIED
        return Candidate(
            self,
            microseconds,
            summary,
            kernel.computing(chip) + adding.computing(chip),
            tile=tile,
            blocks=blocks,
            workspace_bytes=workspace,
            method=method,
        )


def _sum_blocks(request: Request) -> int:
    """Return the blocks of the sum."""
    problem = request.problem
    sizes, channels = problem.input_sizes, problem.C
    if request.pass_ == "forward":
        sizes, channels = problem.output_sizes, problem.K
    return ceil(problem.N * prod(sizes) * ceil(channels / CHANNELS) / THREADS)


def _sum_kernel(request: Request) -> cost.Kernel:
    """Return the blocks of the sum with their work."""
    forward, problem = request.pass_ == "forward", request.problem
    terms = prod(
        axis.filter if forward else ceil(axis.effective_filter / axis.stride)
        for axis in problem.axes
    )
    warps, channels = THREADS // 32, min(problem.K if forward else problem.C, CHANNELS)
    work = cost.Work(
        multiplying=0.0,
        wavefronts=warps * terms * channels * cost.wavefronts(accumulator_bytes(problem)),
        instructions=warps * (_PIXEL_INSTRUCTIONS + _TERM_INSTRUCTIONS * terms),
        waits=terms,
    )
    return cost.Kernel(_sum_blocks(request), _RESIDENT, warps, work)


CUDA_COLUMNS = ColumnSums()
