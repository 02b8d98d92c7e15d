"""Views: passes that a family computes as the same pass of another problem on the same memory.

A kernel pads the matrix of a pass to whole tiles.  If a layer has few filters or few channels, most
of a tile is padding.  A view of the pass has more channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from typing import Any, ClassVar

from cupyconv.formats import filter_formats
from cupyconv.kernels import cost
from cupyconv.kernels.copies import LINE_BYTES, PIECE_BYTES, THREADS, copy_bytes, copy_strides
from cupyconv.kernels.family import Candidate, Choices, Family, spatial
from cupyconv.kernels.parameters import SPATIAL, pack
from cupyconv.kernels.request import PLAIN, Epilogue, Request
from cupyconv.kernels.strides import Strides
from cupyconv.launch import STORAGE, FilterForm, Launch, Part, TensorMap, TensorMaps
from cupyconv.problem import ITEMSIZE, ConvProblem, derived

EXCHANGED = "x and dy exchanged"
"""Name of the view that ``exchanged`` returns."""

FOLDED = "folded into channels"
"""End of the name of a view that ``folded`` returns, after the names of the axes."""

MERGED = "groups merged"
"""End of the name of a view that ``merged`` returns, after the number of groups."""

FEW = LINE_BYTES // min(ITEMSIZE.values()) // 2
"""Largest number of channels, or filters, that fill at most half of a line: most columns of a tile
are padding.  Then strides are folded into channels, and cuda-columns computes forward."""


@dataclass(frozen=True)
class View:
    """A pass as the same pass of another problem.

    Attributes:
        name: name that a plan prints.
        problem, strides: the other problem, and the strides of its tensors.
        arrays: arrays that contain the tensors of the other problem, keyed by role; other roles
            have the arrays of the pass.
        copied_bytes: size of the copy of w that the other problem has as its filter; 0 if there is
            no copy.
        form: function that returns this copy; None if there is no copy.  It is not compared, since
            equal views make equal copies.
        to_w: whether the product writes the copy, and the launch of ``form`` then copies it to w.
            All other views extend operands by zeros.
    """

    name: str
    problem: ConvProblem
    strides: Strides
    arrays: Mapping[str, str | Part]
    copied_bytes: int = 0
    form: Callable[[], FilterForm] | None = field(default=None, compare=False)
    to_w: bool = False

    def request(self, request: Request) -> Request:
        """Return the request for the view; ``request`` is the request for the pass."""
        limit = request.workspace_limit
        if limit is not None:
            limit = max(limit - self.copied_bytes, 0)
        return replace(
            request,
            problem=self.problem,
            strides=self.strides,
            workspace_limit=limit,
            adds_zeros=not self.to_w,
        )

    def own(self, choices: Choices) -> Choices:
        """Return the choices for the view's request; ``choices`` are those for the pass."""
        return replace(choices, view="", copies=self._roles(choices.copies))

    def candidate(self, request: Request, own: Candidate) -> Candidate:
        """Return a candidate for the pass; ``own`` is the candidate for the view's request."""
        if self.copied_bytes:
            own = own.with_demand(request, cost.further(request.chip, 2 * self.copied_bytes))
        return replace(
            own,
            view=self.name,
            copies=self._roles(own.copies),
            copied=self._roles(own.copied),
            workspace_bytes=own.workspace_bytes + self.copied_bytes,
        )

    def launch(self, own: Launch) -> Launch:
        """Return a launch for the pass; ``own`` is the launch for the view's request."""
        return replace(own, arguments=tuple(map(self._argument, own.arguments)))

    def _argument(self, own: Any) -> Any:
        """Return an argument of a launch with the arrays of the pass."""
        if isinstance(own, TensorMaps):
            return TensorMaps(tuple(map(self._map, own.maps)))
        if isinstance(own, str):
            return self.arrays.get(own, own)
        if isinstance(own, Part):
            role, offset = self._place(own.role)
            return Part(role, offset + own.offset)
        return own

    def _map(self, own: TensorMap) -> TensorMap:
        role, offset = self._place(own.role)
        return replace(own, role=role, offset=offset + own.offset)

    def _place(self, role: str) -> tuple[str, int]:
        """Return the array that contains a tensor, and the tensor's offset in bytes."""
        place = self.arrays.get(role, role)
        return (place, 0) if isinstance(place, str) else (place.role, place.offset)

    def _roles(self, own: Sequence[str]) -> tuple[str, ...]:
        """Return the roles in the pass of tensors of the view, or vice versa."""
        names = {"x": "y", "y": "x"} if self.name == EXCHANGED else {}
        return tuple(names.get(role, role) for role in own)


@lru_cache(maxsize=4096)
def exchanged(problem: ConvProblem, strides: Strides) -> View | None:
    """Return the filter gradient with x and dy exchanged; None if it is impossible or not faster.

    With stride 1, dw[f, c, r] is the sum over p of dy[f, p] * x[c, p - pad + r * dilation].  With
    q = p - pad + r * dilation, it is the sum over q of x[c, q] * dy[f, q + pad - r * dilation]: the
    filter gradient of a layer with input dy and output x, whose taps have the reverse order.
    """
    filter_, channel, *taps = problem.filter_axes
    is_possible = problem.groups == 1 and set(problem.stride) == {1}
    if not is_possible or 2 * problem.K > problem.C or set(problem.filter_sizes) == {1}:
        return None
    reach = [axis.effective_filter - 1 for axis in problem.axes]
    padding = tuple(
        (most - before, most - after)
        for most, (before, after) in zip(reach, problem.padding, strict=True)
    )
    if min(map(min, padding)) < 0:
        return None
    shape, w = list(problem.filter_shape), list(strides.w)
    shape[filter_], shape[channel] = shape[channel], shape[filter_]
    w[filter_], w[channel] = w[channel], w[filter_]
    last_tap = sum((shape[tap] - 1) * w[tap] for tap in taps)
    for tap in taps:
        w[tap] = -w[tap]
    other = derived(
        problem,
        input_shape=problem.output_shape,
        filter_shape=tuple(shape),
        padding=padding,
        padding_mode="explicit",
    )
    arrays: dict[str, str | Part] = {"x": "y", "y": "x"}
    arrays["w"] = Part("w", last_tap * ITEMSIZE[problem.dtype])
    return View(EXCHANGED, other, replace(strides, x=strides.y, w=tuple(w), y=strides.x), arrays)


@lru_cache(maxsize=4096)
def folded(problem: ConvProblem, strides: Strides, axes: tuple[int, ...]) -> View | None:
    """Return the input gradient with strides of some spatial axes folded into channels, or None.

    Adjacent pixels of x, as many as the stride, become channels of one pixel of another problem
    with stride 1.  conv_fold.cu describes its filter, whose taps are padded with zeros.

    Args:
        problem, strides: the problem and the strides of its tensors.
        axes: indices of the spatial axes.
    """
    old = problem.axes
    is_possible = problem.groups == 1 and not problem.is_complex
    for axis in (old[at] for at in axes):
        is_possible &= axis.stride > 1 and axis.input % axis.stride == 0 and axis.dilation == 1
    if not is_possible:
        return None
    cells = tuple(axis.stride if at in axes else 1 for at, axis in enumerate(old))
    before = [-axis.pad_before % cell for axis, cell in zip(old, cells, strict=True)]
    taps = [-(-(axis.filter + n) // c) for axis, n, c in zip(old, before, cells, strict=True)]
    _, channel, *pixels = problem.data_axes
    shape, x, fold = list(problem.input_shape), list(strides.x), []
    padding = []
    for at, axis, cell, filter_ in zip(pixels, old, cells, taps, strict=True):
        shape[at] //= cell
        first = -(-axis.pad_before // cell)
        last = axis.output - 1 + filter_ - shape[at] - first if cell > 1 else axis.pad_after
        padding.append((first, last))
        fold.append((cell, x[at]))
        x[at] *= cell
    shape[channel] *= prod(cells)
    if problem.C == 1:
        x[channel] = 1  # the only channel has no stride; the folded pixels have those of ``fold``
    other = derived(
        problem,
        input_shape=tuple(shape),
        filter_shape=(*taps, shape[channel], problem.K),
        filter_format=filter_formats(problem.spatial_rank)[1],
        stride=tuple(axis.stride // cell for axis, cell in zip(old, cells, strict=True)),
        padding=tuple(padding),
        padding_mode="explicit",
    )
    name = f"{' and '.join(old[at].name for at in axes)} {FOLDED}"
    steps = replace(strides, x=tuple(x), fold=tuple(fold))
    return _with_form(name, problem, strides, other, steps, cells, before)


@lru_cache(maxsize=4096)
def merged(problem: ConvProblem, strides: Strides, pass_: str, count: int) -> View:
    """Return a pass with adjacent groups merged into one.

    The filter is block-diagonal: it has zeros where the channel and the filter are in different
    groups.  In backprop_filter, these elements are computed, but not copied to w.

    Args:
        problem, strides: the problem and the strides of its tensors.
        pass_: the pass.
        count: number of groups that are merged.
    """
    other = derived(
        problem,
        filter_shape=(*problem.filter_sizes, problem.C // problem.groups * count, problem.K),
        filter_format=filter_formats(problem.spatial_rank)[1],
        groups=problem.groups // count,
    )
    rank, to_w = problem.spatial_rank, pass_ == "backprop_filter"
    cells, before = (1,) * rank, (0,) * rank
    return _with_form(f"{count} {MERGED}", problem, strides, other, strides, cells, before, to_w)


def _with_form(
    name: str,
    problem: ConvProblem,
    strides: Strides,
    other: ConvProblem,
    steps: Strides,
    cells: Sequence[int],
    before: Sequence[int],
    to_w: bool = False,
) -> View:
    """Return a view whose filter is a copy of w.

    Args:
        name: name of the view.
        problem, strides: the problem and the strides of its tensors.
        other: problem of the view.
        steps: strides of the view's x and y.
        cells: adjacent pixels that become channels, per spatial axis.
        before: zeros before the first tap, per spatial axis.
        to_w: as in ``View``.
    """
    itemsize = ITEMSIZE[problem.dtype]
    size = copy_bytes(other.filter_shape, itemsize)
    steps = replace(steps, w=copy_strides(other.filter_shape, itemsize))
    form = partial(_fold, name, problem, strides, other, cells, before, to_w)
    arrays = {"w": Part("workspace", 0), "workspace": Part("workspace", size)}
    return View(name, other, steps, arrays, size, form, to_w)


FOLD_SHAPE = (
    *((name, "i8", SPATIAL) for name in ("cell", "before", "taps")),
    ("merged", "i8"),
)
"""Fields of the struct ``FoldShape`` in cuda/conv_fold.cu, in NumPy's notation."""


def _fold(
    name: str,
    problem: ConvProblem,
    strides: Strides,
    other: ConvProblem,
    cells: Sequence[int],
    before: Sequence[int],
    to_w: bool,
) -> FilterForm:
    """Return the copy of w of a view; the arguments are those of ``_with_form``."""
    import numpy as np

    shape = np.zeros(1, np.dtype(list(FOLD_SHAPE)))
    shape["cell"], shape["before"] = spatial(cells), spatial(before, 0)
    shape["taps"] = spatial(other.filter_sizes)
    shape["merged"] = problem.groups // other.groups
    size = copy_bytes(other.filter_shape, ITEMSIZE[problem.dtype])
    launch = Launch(
        source="conv_fold.cu",
        entry="conv_fold",
        defines=(("STORAGE", STORAGE[problem.dtype]), ("TO_W", int(to_w))),
        grid=(-(-size // (PIECE_BYTES * THREADS)),),
        block=(THREADS,),
        shared_bytes=0,
        arguments=("w", Part("workspace", 0), pack(problem, strides), shape),
    )
    return FilterForm(name, size, launch)


def views(request: Request) -> list[View]:
    """Return the views of a request; most requests have no view."""
    problem, pass_, memory = request.problem, request.pass_, request.memory
    found: list[View | None] = [merged(problem, memory, pass_, n) for n in _mergeable(problem)]
    if pass_ == "backprop_filter":
        found.append(exchanged(problem, memory))
    elif pass_ == "backprop_input" and problem.C <= FEW:
        strided = [at for at, stride in enumerate(problem.stride) if stride > 1]
        ends = [tuple(strided[at:]) for at in range(len(strided))]
        found += [folded(problem, memory, axes) for axes in ends]
    return [view for view in found if view is not None and request.affords(view.copied_bytes)]


def _mergeable(problem: ConvProblem) -> list[int]:
    """Return the numbers of groups that fill a tile of few columns, or a line of cuda-hopper.

    Depthwise layers and large elements are not merged, since most products would be with zeros.
    """
    groups = problem.groups
    if ITEMSIZE[problem.dtype] > 4 or not 1 < groups < problem.C:
        return []
    most = max(problem.C, problem.K) // groups
    counts = (range(2, size // most + 1) for size in (FEW // 2, FEW, 2 * FEW))
    return sorted({max((n for n in few if groups % n == 0), default=0) for few in counts} - {0})


class Viewed(Family):
    """A family that also computes views.

    Most views extend operands by zeros.  An infinite or NaN element times such a zero is NaN, in a
    result that does not read the element.

    Attributes:
        excludes_zeros: whether the kernels exclude these products, as "ieee" requires.
    """

    excludes_zeros: ClassVar[bool] = False

    def refuses(self, request: Request) -> str | None:
        refusal = super().refuses(request)
        return refusal if refusal is None or not self._supported(request) else None

    def candidates(self, request: Request) -> list[Candidate]:
        supported = self._supported(request)
        found: list[Candidate] = []
        if not supported or super().refuses(request) is None:
            found += super().candidates(request)  # type: ignore[safe-super]
        for view in supported:
            of_view = view.request(request)
            own = super().candidates(of_view)  # type: ignore[safe-super]
            found += [view.candidate(of_view, one) for one in own]
        return found

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        view = _chosen(request, choices)
        if view is None:
            if self._supported(request) and super().refuses(request) is not None:
                return None  # the family computes the layer only through a view
            return super().candidate(request, choices)  # type: ignore[safe-super]
        of_view = view.request(request)
        if view not in self._supported(request):
            return None
        own = super().candidate(of_view, view.own(choices))  # type: ignore[safe-super]
        return own and view.candidate(of_view, own)

    def launches(
        self,
        request: Request,
        choices: Choices,
        epilogue: Epilogue = PLAIN,
        copied_w: bool = False,
    ) -> tuple[Launch, ...]:
        view = _chosen(request, choices)
        if view is None:
            return super().launches(request, choices, epilogue, copied_w)
        launches = super().launches(view.request(request), view.own(choices), epilogue)
        if view.form is None:
            return tuple(map(view.launch, launches))
        if copied_w:
            return launches
        copy = view.form().launch
        product = tuple(map(view.launch, launches))
        return (*product, copy) if view.to_w else (copy, *product)

    def filter_form(self, request: Request, choices: Choices) -> FilterForm | None:
        view = _chosen(request, choices)
        if view is None:
            return super().filter_form(request, choices)
        return view.form() if view.form is not None and not view.to_w else None

    def _supported(self, request: Request) -> list[View]:
        """Return the views of a request that the family may compute."""
        may_add_zeros = request.precision != "ieee" or self.excludes_zeros
        refuses = super().refuses
        return [
            view
            for view in views(request)
            if (may_add_zeros or view.to_w) and refuses(view.request(request)) is None
        ]


def _chosen(request: Request, choices: Choices) -> View | None:
    """Return the view with the chosen name; None for the pass itself."""
    if not choices.view:
        return None
    return next((view for view in views(request) if view.name == choices.view), None)
