"""Scene: the drawn positions of a layer, and the pairs of positions that are multiplied.

The picture (figure.py) draws a Scene, which shows one element of each result.  The interactive page
(page.py) begins with the same elements and the values of a Scene; its script page.js chooses the
drawn positions by the same rules, also for other elements and other layers.

The results y, dx and dw are drawn in the same way: the products of a window of the first operand
with the second operand add up to an element of the result.  A plane is the part of a tensor that
belongs to one image and one channel, or to one filter and one channel.  A long axis is drawn in
part: both ends and the surroundings of the chosen element, with None for each gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cupyconv import arrays
from cupyconv.errors import ConvError
from cupyconv.explaining import adjoints, shapes, terms
from cupyconv.explaining.counts import visible, with_gaps
from cupyconv.explaining.terms import Element
from cupyconv.explaining.values import OPERANDS, Values
from cupyconv.problem import MOST_LISTED, ConvAxis, ConvProblem, shape_text

PAD, ZERO = -1, -2
"""Contents of cells without an element of a tensor: padding, or a zero between dilated elements."""

RESULTS = ("dw", "dx", "y")

Places = tuple[int | None, ...]
"""Cells along an axis: positions of the tensor, PAD, ZERO, or None for a gap."""


class Limits(NamedTuple):
    """Limits on the drawn part of a layer (hand-set).

    Attributes:
        channels: largest number of drawn channels of x, and of drawn filters.
        places: largest number of cells of a plane along each axis; with the default, the cells of
            the page are large enough for a finger.
        taps: largest number of drawn taps along each axis.
        span: largest span of a window for which all of its positions are drawn, not only both ends.
    """

    channels: int = 10
    places: int = 14
    taps: int = 11
    span: int = 24


DRAWN = Limits()
"""Limits of pictures, and of pages that do not become too large with them."""


class Pass(NamedTuple):
    """Properties of a result's computation that are the same for all layers.

    Attributes:
        operands: names of the two tensors that are multiplied.
        title: heading of the drawing.
        over: what the sum runs over besides positions: "channel", "filter" or "image".
        noun: name of one of them in sentences.
        function: name of the library function that computes the result.
        flipped: whether the second operand is drawn in reverse order.
        notes: two sentences on the padding and zeros in the first operand's plane: for layers
            without padding, and with padding; for dx, without a stride, and with a stride.
    """

    operands: tuple[str, str]
    title: str
    over: str
    noun: str
    function: str
    flipped: bool = False
    notes: tuple[str, str] = ("", "Padding is dashed.")


_SPREAD = (
    "Dashed padding around {0} lets the flipped filter reach all of {1}.",
    "{0} is dilated by the stride: its zeros are hatched, its padding is dashed. The flipped "
    "filter slides over it with stride 1.",
)
"""Notes on the planes of dx, with the names of its first operand and of the result."""

PASSES = {
    "dw": Pass(
        ("x", "dy"),
        "dw: one channel of x and one channel of dy give each slice",
        "image",
        "image",
        "conv_backprop_filter",
    ),
    "dx": Pass(
        ("dy", "w"),
        "dx: each channel of x sums over the filters that read it",
        "filter",
        "filter",
        "conv_backprop_input",
        flipped=True,
        notes=(_SPREAD[0].format("dy", "dx"), _SPREAD[1].format("dy")),
    ),
    "y": Pass(
        ("x", "w"),
        "y: each filter sums over the channels of x",
        "channel",
        "channel",
        "conv_forward",
    ),
}

TRANSPOSED_PASSES = {
    "dw": PASSES["dw"]._replace(title="dw: one channel of dy and one channel of x give each slice"),
    "dx": PASSES["dx"]._replace(
        title="y: each output channel sums over the input channels, each with its own filter",
        noun="input channel",
        function="conv_transpose",
        notes=(_SPREAD[0].format("x", "y"), _SPREAD[1].format("x")),
    ),
    "y": PASSES["y"]._replace(
        title="dx: each input channel sums over the channels of dy",
        noun="output channel",
        function="conv_forward(dy, w)",
    ),
}
"""Properties of the results of a transposed layer, keyed by their names in the convolution."""


@dataclass(frozen=True)
class Meeting:
    """Pairs of operand positions that contribute to one result position along an axis.

    Attributes:
        count: number of pairs.
        pairs: pairs whose positions are both drawn, as (first operand, second operand).
        under: indices of those cells of the first operand's plane that are under the window.
    """

    count: int
    pairs: tuple[tuple[int, int], ...]
    under: tuple[int, ...]


@dataclass(frozen=True)
class Direction:
    """Drawing that shows how y, dx or dw is computed.

    Attributes:
        tensor: the result.
        at: position of the result that is shown first.
        planes: for the first operand, the second operand and the result, the drawn positions along
            each axis.
        meetings: for each axis, the pairs of operand positions that are multiplied, keyed by the
            drawn position of the result.
        terms: number of channels, filters or images that the sum runs over.
        note: sentence on the padding and zeros in the first operand's plane.
        pass_: properties of the computation that are the same for all layers.
    """

    tensor: str
    at: tuple[int, ...]
    planes: tuple[tuple[Places, ...], ...]
    meetings: tuple[Mapping[int, Meeting], ...]
    terms: int
    note: str
    pass_: Pass

    @property
    def here(self) -> list[Meeting]:
        """Pairs that contribute to the position that is shown first, along each axis."""
        return [along[place] for along, place in zip(self.meetings, self.at, strict=True)]

    @property
    def tensors(self) -> tuple[str, str, str]:
        """Names of the tensors of ``planes``, in the same order."""
        return (*self.pass_.operands, self.tensor)


@dataclass(frozen=True)
class Scene:
    """Content of a layer's drawing.

    Attributes:
        problem: the layer.
        data: values of the tensors by name, as far as they are known.
        opened: result that is shown first.
        image, k, c: image, channel of dy and channel of x that are shown first; c counts over all
            groups.
        filters, channels: drawn channels of dy and of x, counted over all groups; None for a gap.
        directions: drawing of each result.
        missing: reason for missing values, for each tensor without values.
        source: origin of the values, in words.
        is_transposed: whether texts have the names of the transposed layer that reverses the
            problem.
    """

    problem: ConvProblem
    data: Mapping[str, Any]
    opened: str
    image: int
    k: int
    c: int
    filters: Places
    channels: Places
    directions: Mapping[str, Direction]
    missing: Mapping[str, str]
    source: str
    is_transposed: bool

    def called(self, tensor: str) -> str:
        """Return the layer's name of a tensor of the problem."""
        return terms.CONVOLUTION_NAMES[tensor] if self.is_transposed else tensor

    @property
    def group_filters(self) -> int:
        return self.problem.K // self.problem.groups

    @property
    def group_channels(self) -> int:
        return self.problem.C // self.problem.groups

    def meet(self, k: int, c: int) -> bool:
        """Return whether channel k of dy and channel c of x belong to the same group."""
        return k // self.group_filters == c // self.group_channels

    def index(self, tensor: str, k: int, c: int) -> tuple[int, int]:
        """Return the first two indices of a tensor's plane.

        Args:
            tensor: name of the tensor.
            k, c: channel of dy and channel of x, counted over all groups.
        """
        if tensor in ("w", "dw"):
            return k, c % self.group_channels
        return self.image, c if tensor in ("x", "dx") else k

    def key(self, tensor: str, k: int, c: int) -> str:
        """Return the index of a tensor's plane as text, without the image."""
        index = self.index(tensor, k, c)
        return ",".join(map(str, index if tensor in ("w", "dw") else index[1:]))

    def plane(self, tensor: str, k: int, c: int, array: Any = None) -> Any:
        """Return the values of a plane as a NumPy array; None if the tensor has no values.

        Args:
            tensor: name of the tensor.
            k, c: channel of dy and channel of x, counted over all groups.
            array: values of the whole tensor, to use instead of those in ``data``.
        """
        if tensor in self.missing:
            return None
        array = self.data[tensor] if array is None else array
        order = self.problem.filter_axes if tensor in ("w", "dw") else self.problem.data_axes
        return arrays.on_host(array.transpose(order)[self.index(tensor, k, c)])


def equivalent(problem: ConvProblem) -> str:
    """Return a sentence on the convolution whose input gradient a transposed layer computes."""
    return f"The layer computes the input gradient of the convolution {heading(problem)}."


def heading(problem: ConvProblem, is_transposed: bool = False) -> str:
    """Return the shapes of a layer as one line, the heading of a picture or page without title."""
    x, w, y = map(shape_text, (problem.input_shape, problem.filter_shape, problem.output_shape))
    return f"transposed layer: {y} * {w} -> {x}" if is_transposed else f"{x} * {w} -> {y}"


def plain(number: Any) -> float:
    """Return a NumPy number as a float; for float32, the float with the shortest decimal form.

    The page rounds this float to float32, which gives the same number again.
    """
    return float(str(number) if number.dtype == "float32" else number)


def cut_text(letter: str, places: Sequence[int | None], size: int) -> str:
    """Return the drawn positions of an axis as ``h 0–4, 99 of 100 (94 hidden)``.

    The text is empty if all positions are drawn.
    """
    drawn = sorted({at for at in places if at is not None and at >= 0})
    if len(drawn) == size:
        return ""
    begins = [at for at in drawn if at - 1 not in drawn]
    ends = [at for at in drawn if at + 1 not in drawn]
    runs = [str(a) if a == b else f"{a}–{b}" for a, b in zip(begins, ends, strict=True)]
    return f"{letter} {', '.join(runs)} of {size:,} ({size - len(drawn):,} hidden)"


def cuts(problem: ConvProblem, tensor: str, plane: Sequence[Places]) -> list[str]:
    """Return ``cut_text`` for each axis of a plane that is drawn only in part."""
    letters, sizes = terms.names(problem, tensor)[2:], terms.extents(problem, tensor)[2:]
    texts = map(cut_text, letters, plane, sizes)
    return [text for text in texts if text]


def scene(
    problem: ConvProblem,
    data: Mapping[str, Any],
    element: Element | None = None,
    limits: Limits = DRAWN,
    is_transposed: bool = False,
) -> Scene:
    """Return the drawing of a layer.

    Args:
        problem: the layer.
        data: values of the tensors by name, as far as they are known.
        element: element to mark and to show first.
        limits: largest part to draw.
        is_transposed: whether the layer is the transposed layer that reverses the problem.

    Raises:
        ConvError: the layer is too large to draw.
    """
    for axis in problem.axes:
        size = max(axis.padded_input, axis.effective_filter, axis.output)
        if size > MOST_LISTED:
            raise ConvError(
                f"a layer must have at most {MOST_LISTED:,} positions on an axis to be drawn, "
                "padding included",
                f"it has {size:,}",
                "Draw a smaller layer with the same stride and taps",
                axis=axis.name,
            )
    image, k, c = _channels_of(problem, element)
    chosen = _chosen(problem, element)
    reasons = {tensor: _reason(problem, data, tensor) for tensor in (*OPERANDS, *RESULTS)}
    missing = {tensor: reason for tensor, reason in reasons.items() if reason}
    opened = "dx" if is_transposed else shapes.question(problem)
    passes = TRANSPOSED_PASSES if is_transposed else PASSES
    drawn = Scene(
        problem,
        data,
        element.tensor if element else opened,
        image,
        k,
        c,
        _drawn(problem.K, limits.channels, k),
        _drawn(problem.C, limits.channels, c),
        {name: _direction(problem, name, chosen, limits, passes[name]) for name in RESULTS},
        missing,
        "",
        is_transposed,
    )
    if isinstance(data, Values) and len(missing) < len(reasons):
        return replace(drawn, source=data.source_of(drawn.called))
    return drawn


def _reason(problem: ConvProblem, data: Mapping[str, Any], tensor: str) -> str:
    """Return why the cells of a tensor show no numbers; empty if they show numbers."""
    if not problem.N:
        return "The batch is empty, so there is nothing to compute."
    if problem.is_complex:
        return (
            "Cells show real numbers only. Print explain(problem).element(NAME), or pass --element "
            "NAME on the command line, for a complex number and its terms."
        )
    if tensor in data:
        return ""
    reason = getattr(data, "missing", lambda name: "No values were passed. Use explain().")
    return str(reason(tensor))


def _channels_of(problem: ConvProblem, element: Element | None) -> tuple[int, int, int]:
    """Return the image, filter and channel to show first."""
    filters, channels = problem.K // problem.groups, problem.C // problem.groups
    if element is None:
        k = problem.K // 2  # the middle, as in the text
        return 0, k, k // filters * channels + channels // 2
    a, b = element.index[:2]
    return {
        "dw": (0, a, a // filters * channels + b),
        "dx": (a, b // channels * filters, b),
        "y": (a, b, b // filters * channels),
    }[element.tensor]


def _chosen(problem: ConvProblem, element: Element | None) -> dict[str, tuple[int, ...]]:
    """Return the position to show first in each result: the element's position, or a default.

    The default is the middle tap of dw, and a position near the border of dx and of y.
    """
    chosen = {
        "dw": tuple(axis.filter // 2 for axis in problem.axes),
        "dx": tuple(map(_busiest, problem.axes)),
        "y": tuple(min(1, axis.output - 1) for axis in problem.axes),
    }
    if element is not None:
        chosen[element.tensor] = element.index[2:]
    return chosen


def _busiest(axis: ConvAxis) -> int:
    """Return the position with the most terms among the first positions of dx along an axis."""
    first = range(min(axis.input, DRAWN.places // 2))
    return max(first, key=lambda at: len(terms.input_terms(axis, at).first))


# -- positions -------------------------------------------------------------------------------------


def _drawn(size: int, room: int, needed: int) -> Places:
    """Return the positions of an axis to draw: both ends, and ``needed`` with its neighbours."""
    if size <= room:
        return tuple(range(size))
    ends = [at for at in visible(size, room) if at is not None]
    near = range(max(needed - 1, 0), min(needed + 2, size))
    if set(near) <= set(ends):
        return with_gaps(ends)
    side = max((room - len(near) - 2) // 2, 1)
    return with_gaps([*range(side), *near, *range(size - side, size)])


def window(rule: ConvAxis, at: int) -> range:
    """Return the positions that the taps of a window read, padding included."""
    corner = at * rule.stride - rule.pad_before
    return range(corner, corner + rule.effective_filter, rule.dilation)


def _linked(rule: ConvAxis, chosen: int, limits: Limits) -> tuple[Places, Places]:
    """Return the outputs of an axis to draw, and the input positions to draw with their windows.

    The limits may be exceeded, since the positions always include both ends of the outputs, the
    input and its padding.  Inputs that a negative padding crops are drawn too.
    """
    first, end = min(-rule.pad_before, 0), max(rule.input + rule.pad_after, rule.input)
    if end - first <= limits.places and rule.output <= limits.places:
        return tuple(range(rule.output)), tuple(range(first, end))
    whole = rule.effective_filter <= limits.span
    for head, tail in ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2), (2, 1), (1, 1), (1, 0)):
        last = range(max(rule.output - tail, 0), rule.output)
        outputs = {*range(min(head, rule.output)), *last, chosen}
        places = {first, 0, rule.input - 1, end - 1}
        for output in outputs:
            under = window(rule, output)
            places |= {*range(under[0], under[-1] + 1)} if whole else {under[0], under[-1]}
        inputs = with_gaps(place for place in places if first <= place < end)
        if len(inputs) <= limits.places:
            break
    outputs.add(rule.output - 1)  # draw the last output even without its window
    drawn = {place for place in inputs if place is not None}
    for place in drawn if whole else ():  # add the outputs whose windows are already drawn
        output, rest = divmod(place + rule.pad_before, rule.stride)
        if rest == 0 and 0 <= output < rule.output and drawn.issuperset(window(rule, output)):
            outputs.add(output)
    return with_gaps(outputs), inputs


def _content(tensor: str, axis: ConvAxis, place: int | None) -> int | None:
    """Return the content of a cell of the first operand: a position, PAD, ZERO or None."""
    if place is None:
        return None
    if tensor != "dx":
        return place if 0 <= place < axis.input else PAD
    if not 0 <= place <= (axis.output - 1) * axis.stride:
        return PAD
    output, rest = divmod(place, axis.stride)
    return ZERO if rest else output


# -- directions ------------------------------------------------------------------------------------


def _direction(
    problem: ConvProblem,
    tensor: str,
    chosen: Mapping[str, tuple[int, ...]],
    limits: Limits,
    pass_: Pass,
) -> Direction:
    """Return the drawing of a result."""
    adjoint = {"dw": adjoints.filter_gradient_axis, "dx": adjoints.input_gradient_axis}.get(tensor)
    # Windows of this result slide over the first operand; for dw, windows of y slide over x.
    slid = "dx" if tensor == "dx" else "y"
    planes, meetings = [], []
    for i, axis in enumerate(problem.axes):
        rule = adjoint(axis).rule if adjoint else axis
        outputs, places = _linked(rule if tensor == "dx" else axis, chosen[slid][i], limits)
        taps = _drawn(axis.filter, limits.taps, chosen["dw"][i])
        first = tuple(_content(tensor, axis, place) for place in places)
        second, result = (outputs, taps) if tensor == "dw" else (taps, outputs)
        if tensor == "dx":
            second = second[::-1]
        planes.append((first, second, result))
        known = {}
        for at in result:
            if at is not None:
                read = window(rule, at)
                under = tuple(cell for cell, place in enumerate(places) if place in read)
                known[at] = Meeting(*_pairs(tensor, axis, at, first, second), under)
        meetings.append(known)
    condition = max(problem.stride) > 1 if tensor == "dx" else any(map(any, problem.padding))
    counts = {"dw": problem.N, "dx": problem.K // problem.groups, "y": problem.C // problem.groups}
    return Direction(
        tensor,
        chosen[tensor],
        tuple(zip(*planes, strict=True)),
        tuple(meetings),
        counts[tensor],
        pass_.notes[condition],
        pass_,
    )


def _pairs(
    tensor: str, axis: ConvAxis, at: int, first: Places, second: Places
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the number of pairs that contribute to a position of a result, and the drawn pairs."""
    a, b, _ = terms.ALONG[tensor](axis, at)
    if tensor == "dw":  # the drawing has x before dy
        a, b = b, a
    drawn = sorted({*_indices(a, first)} & {*_indices(b, second)})
    return len(a), tuple((a[i], b[i]) for i in drawn)


def _indices(positions: range, drawn: Places) -> list[int]:
    """Return the indices, within ``positions``, of the positions that are drawn."""
    return [positions.index(at) for at in drawn if at is not None and at in positions]
