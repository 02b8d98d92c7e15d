"""Scene: the drawn positions of a layer, their values, and the pairs that are multiplied.

The picture and the page draw the same Scene.  The picture shows one element of each result.  The
page begins with the same elements; when the user chooses another element, page.js chooses the drawn
positions by the same rules.

The results y, dx and dw are drawn in the same way: the products of a window of the first operand
with the second operand add up to an element of the result.  A long axis is drawn in part: both ends
and the surroundings of the chosen element, with None for each gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from cupyconv import arrays
from cupyconv.errors import ConvError
from cupyconv.explaining import adjoints, shapes, terms
from cupyconv.explaining.counts import visible
from cupyconv.explaining.shapes import the
from cupyconv.explaining.terms import LETTERS, Element
from cupyconv.explaining.values import OPERANDS
from cupyconv.problem import ConvAxis, ConvProblem

if TYPE_CHECKING:
    import numpy as np

PAD, ZERO = -1, -2
"""Contents of cells without an element of a tensor: padding, or a zero between dilated elements."""

MOST_DRAWN = 100_000
"""Largest size of an axis, with padding, of a layer that is drawn (chosen)."""

RESULTS = ("dw", "dx", "y")

Places = tuple[int | None, ...]
"""Cells along an axis: positions of the tensor, PAD, ZERO, or None for a gap."""


class Limits(NamedTuple):
    """Largest drawn part of a layer (chosen).

    Attributes:
        channels: channels of x, and filters.
        places: cells of a plane along an axis; with the default, a finger can touch each cell.
        taps: taps along an axis.
        span: span of a window that is drawn whole.
    """

    channels: int = 10
    places: int = 14
    taps: int = 11
    span: int = 24


DRAWN = Limits()
"""Limits of pictures, and of pages whose values are few enough."""


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
        operands: names of the two tensors that are multiplied.
        title: heading of the drawing.
        pair: sentence on the chosen pair of channels, with the placeholders k, c, and own for c
            within its group.
        first: sentence on the padding and zeros in the first operand's plane.
        flipped: whether the second operand is drawn in reverse order.
        planes: cells of the first operand, of the second operand and of the result, per axis.
        meetings: pairs of operand positions, per axis and position of the result.
        over: noun for the index, besides positions, that the sum runs over: "channel", "filter" or
            "image".
        terms: number of channels, filters or images that the sum runs over.
        function: name of the library function that computes the result.
        rule: formula of the sum.
        at: position that is shown first.
    """

    tensor: str
    operands: tuple[str, str]
    title: str
    pair: str
    first: str
    flipped: bool
    planes: tuple[tuple[Places, ...], ...]
    meetings: tuple[Mapping[int, Meeting], ...]
    over: str
    terms: int
    function: str
    rule: str
    at: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """Content of a layer's drawing.

    Attributes:
        problem: the layer.
        opened: result that is shown first.
        image, k, c: image, channel of dy and channel of x that are shown first; c counts over all
            groups.
        filters, channels: drawn channels of dy and of x, counted over all groups; None for a gap.
        directions: drawing of each result.
        values: drawn values of each tensor with known values, by channel and position.
        exact: float64 sums of results whose terms are not all drawn.
        missing: reason for missing values, for each tensor without values.
        source: origin of the values, in words.
        limits: largest drawn part.
    """

    problem: ConvProblem
    opened: str
    image: int
    k: int
    c: int
    filters: Places
    channels: Places
    directions: Mapping[str, Direction]
    values: Mapping[str, Mapping[str, Any]]
    exact: Mapping[str, Mapping[str, Any]]
    missing: Mapping[str, str]
    source: str
    limits: Limits

    @property
    def group_filters(self) -> int:
        return self.problem.K // self.problem.groups

    @property
    def group_channels(self) -> int:
        return self.problem.C // self.problem.groups

    def meet(self, k: int, c: int) -> bool:
        """Return whether channel k of dy and channel c of x belong to the same group."""
        return k // self.group_filters == c // self.group_channels

    def number(self, tensor: str, k: int, c: int, at: Sequence[int]) -> float | None:
        """Return the value of a tensor at a drawn position; None if the tensor has no values.

        Args:
            tensor: name of the tensor.
            k, c: channel of dy and channel of x, counted over all groups.
            at: spatial position.
        """
        values = self.values.get(tensor)
        if values is None:
            return None
        return values[key_of(tensor, k, c)][",".join(map(str, at))]

    def to_dict(self) -> dict[str, Any]:
        """Return the scene as plain data, ready for JSON."""
        problem = self.problem
        rank = problem.spatial_rank
        return {
            "opened": self.opened,
            "image": self.image,
            "k": self.k,
            "c": self.c,
            "images": problem.N,
            "filters": problem.K,
            "channels": problem.C,
            "groups": problem.groups,
            "groupFilters": self.group_filters,
            "groupChannels": self.group_channels,
            "mostPlaces": self.limits.places,
            "mostSpan": self.limits.span,
            "mostTaps": self.limits.taps,
            "mostChannels": self.limits.channels,
            "axes": [_rule(axis) for axis in problem.axes],
            "dtype": problem.dtype,
            "letters": [LETTERS[kind][rank] for kind in ("input", "filter", "output")],
            "source": self.source,
            "directions": {
                tensor: {
                    "operands": direction.operands,
                    "title": direction.title,
                    "pair": direction.pair,
                    "first": direction.first,
                    "flipped": direction.flipped,
                    "rules": [_rule(rule) for rule in _rules(problem, tensor)],
                    "over": direction.over,
                    "terms": direction.terms,
                    "function": direction.function,
                    "rule": direction.rule,
                    "at": direction.at,
                }
                for tensor, direction in self.directions.items()
            },
            "missing": self.missing,
            "values": {
                name: _packed(planes, 17 if name in OPERANDS else 10)
                for name, planes in self.values.items()
            },
            "exact": {name: _packed(planes, 17) for name, planes in self.exact.items()},
        }


def _rule(axis: ConvAxis) -> dict[str, int]:
    """Return the sizes of a convolution along an axis, in the form that page.js reads."""
    return {
        "input": axis.input,
        "filter": axis.filter,
        "output": axis.output,
        "stride": axis.stride,
        "dilation": axis.dilation,
        "before": axis.pad_before,
        "after": axis.pad_after,
    }


def _rules(problem: ConvProblem, tensor: str) -> Sequence[ConvAxis]:
    """Return the convolution that computes a result, as one ConvAxis per axis."""
    if tensor == "y":
        return problem.axes
    if tensor == "dx":
        return [adjoint.rule for adjoint in adjoints.input_gradient_axes(problem)]
    return [adjoint.rule for adjoint in adjoints.filter_gradient_axes(problem)]


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


def key_of(tensor: str, k: int, c: int) -> str:
    """Return the key of a tensor's plane for channel k of dy and channel c of x.

    In the keys of a Scene, both channels count over all groups, for w and dw too.
    """
    if tensor in ("w", "dw"):
        return f"{k},{c}"
    return str(c if tensor in ("x", "dx") else k)


def scene(
    problem: ConvProblem,
    data: Mapping[str, Any],
    element: Element | None = None,
    limits: Limits = DRAWN,
) -> Scene:
    """Return the drawing of a layer.

    Args:
        problem: the layer.
        data: values of the tensors by name, as far as they are known.
        element: element to mark and to show first.
        limits: largest part to draw.

    Raises:
        ConvError: the layer is too large to draw.
    """
    for axis in problem.axes:
        size = max(axis.padded_input, axis.effective_filter, axis.output)
        if size > MOST_DRAWN:
            raise ConvError(
                f"a layer must have at most {MOST_DRAWN:,} positions on an axis to be drawn, "
                "padding included",
                f"it has {size:,}",
                "Draw a smaller layer with the same stride and taps",
                axis=axis.name,
            )
    image, k, c = _channels_of(problem, element)
    chosen = _chosen(problem, element)
    directions = _directions(problem, chosen, limits)
    filters = _drawn(problem.K, limits.channels, _around(k))
    channels = _drawn(problem.C, limits.channels, _around(c))
    part = _DrawnPart(problem, image, filters, channels, directions)
    missing = {tensor: _reason(problem, data, tensor) for tensor in ("x", "w", "dy", *RESULTS)}
    known = [tensor for tensor, reason in missing.items() if not reason]
    exact = {}
    compute = getattr(data, "compute", None)
    for tensor in RESULTS:
        if tensor in known and compute and part.leaves_out(directions[tensor]):
            exact[tensor] = part.planes(tensor, compute(tensor, "float64"))
    return Scene(
        problem,
        element.tensor if element else shapes.question(problem),
        image,
        k,
        c,
        filters,
        channels,
        directions,
        {tensor: part.planes(tensor, data[tensor]) for tensor in known},
        exact,
        {tensor: reason for tensor, reason in missing.items() if reason},
        getattr(data, "source", "") if known else "",
        limits,
    )


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
        return 0, min(2, filters - 1), min(1, channels - 1)
    a, b = element.index[:2]
    if element.tensor == "dw":
        return 0, a, a // filters * channels + b
    if element.tensor == "dx":
        return a, b // channels * filters, b
    return a, b, b // filters * channels


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


def with_gaps(positions: Iterable[int]) -> Places:
    """Return positions in ascending order, with None in each gap of more than one position."""
    ordered = sorted(set(positions))
    if not ordered:
        return ()
    places: list[int | None] = [ordered[0]]
    for before, after in pairwise(ordered):
        if after - before == 2:  # the position takes no more room than the sign for a gap
            places.append(before + 1)
        elif after - before > 2:
            places.append(None)
        places.append(after)
    return tuple(places)


def _drawn(size: int, room: int, needed: range) -> Places:
    """Return the positions of an axis to draw: both ends, and the ``needed`` positions."""
    if size <= room:
        return tuple(range(size))
    ends = [at for at in visible(size, room) if at is not None]
    near = [at for at in needed if 0 <= at < size]
    if set(near) <= set(ends):
        return with_gaps(ends)
    side = max((room - len(near) - 2) // 2, 1)
    return with_gaps([*range(side), *near, *range(size - side, size)])


def _around(position: int) -> range:
    """Return a position and its two neighbours."""
    return range(position - 1, position + 2)


def _window(rule: ConvAxis, at: int) -> range:
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
            window = _window(rule, output)
            places |= set(range(window[0], window[-1] + 1)) if whole else {window[0], window[-1]}
        inputs = with_gaps(place for place in places if first <= place < end)
        if len(inputs) <= limits.places:
            break
    outputs.add(rule.output - 1)  # draw the last output even without its window
    if whole:  # add the outputs whose windows are already drawn
        drawn = {place for place in inputs if place is not None}
        for place in drawn:
            output, rest = divmod(place + rule.pad_before, rule.stride)
            if rest == 0 and 0 <= output < rule.output and drawn.issuperset(_window(rule, output)):
                outputs.add(output)
    return with_gaps(outputs), inputs


# -- directions ------------------------------------------------------------------------------------


def _directions(
    problem: ConvProblem, chosen: Mapping[str, tuple[int, ...]], limits: Limits
) -> dict[str, Direction]:
    """Return the drawings of dw, dx and y."""
    rules = {tensor: _rules(problem, tensor) for tensor in RESULTS}
    forward = [
        _linked(axis, at, limits) for axis, at in zip(problem.axes, chosen["y"], strict=True)
    ]
    spread = [_linked(rule, at, limits) for rule, at in zip(rules["dx"], chosen["dx"], strict=True)]
    taps = [
        _drawn(axis.filter, limits.taps, _around(at))
        for axis, at in zip(problem.axes, chosen["dw"], strict=True)
    ]
    outputs = [places for places, _ in forward]
    inputs = [places for _, places in forward]
    filters, channels = problem.K // problem.groups, problem.C // problem.groups
    where = " of its group" if problem.groups > 1 else ""
    steps = max(problem.stride) > 1
    parts = {
        "dw": (
            inputs,
            outputs,
            taps,
            "image",
            problem.N,
            "dw: one channel of x and one channel of dy give each slice",
            "dw[{k},{own}] depends on channel {c} of x and channel {k} of dy only. Each pair fills "
            "its own cell: nothing is tiled, broadcast or averaged.",
            "Padding is dashed." if any(map(any, problem.padding)) else "",
        ),
        "dx": (
            [places for _, places in spread],
            taps,
            [places for places, _ in spread],
            "filter",
            filters,
            "dx: each channel of x sums over the filters that read it",
            f"dx[{{c}}] is the sum of its column, over {the(filters, 'channel')} of dy{where}: "
            "dy[{k}] enters the sum through w[{k},{own}].",
            "dy is dilated by the stride: its zeros are hatched, its padding is dashed. The "
            "flipped filter slides over it with stride 1."
            if steps
            else "Dashed padding around dy lets the flipped filter reach all of dx.",
        ),
        "y": (
            inputs,
            taps,
            outputs,
            "channel",
            channels,
            "y: each filter sums over the channels of x",
            f"y[{{k}}] is the sum of its row, over {the(channels, 'channel')} of x{where}: "
            "x[{c}] enters the sum through w[{k},{own}].",
            "Padding is dashed." if any(map(any, problem.padding)) else "",
        ),
    }
    functions = {"dw": "conv_backprop_filter", "dx": "conv_backprop_input", "y": "conv_forward"}
    operands = {"dw": ("x", "dy"), "dx": ("dy", "w"), "y": ("x", "w")}
    directions = {}
    for tensor, (*planes, over, count, title, pair, note) in parts.items():
        first, second, result = planes
        meetings = tuple(
            _meetings(tensor, axis, rule, first[i], second[i], result[i])
            for i, (axis, rule) in enumerate(zip(problem.axes, rules[tensor], strict=True))
        )
        shown = [_contents(tensor, axis, f) for axis, f in zip(problem.axes, first, strict=True)]
        if tensor == "dx":
            second = [tuple(reversed(places)) for places in second]
        else:
            second = [tuple(places) for places in second]
        rule = Element(problem, tensor, (0,) * (2 + problem.spatial_rank)).rule
        directions[tensor] = Direction(
            tensor,
            operands[tensor],
            title,
            pair,
            note,
            tensor == "dx",
            (tuple(shown), tuple(second), tuple(result)),
            meetings,
            over,
            count,
            functions[tensor],
            rule,
            chosen[tensor],
        )
    return directions


def _contents(tensor: str, axis: ConvAxis, places: Places) -> Places:
    """Return the contents of the first operand's cells: positions, PAD, ZERO or None."""
    return tuple(None if at is None else _position(tensor, axis, at) for at in places)


def _position(tensor: str, axis: ConvAxis, place: int) -> int:
    if tensor != "dx":
        return place if 0 <= place < axis.input else PAD
    output, rest = divmod(place, axis.stride)
    if not 0 <= place <= (axis.output - 1) * axis.stride:
        return PAD
    return ZERO if rest else output


def _meetings(
    tensor: str,
    axis: ConvAxis,
    rule: ConvAxis,
    first: Places,
    second: Places,
    result: Places,
) -> dict[int, Meeting]:
    """Return the pairs of operand positions for each drawn position of a result along an axis."""
    along = {"y": terms.output_terms, "dx": terms.input_terms, "dw": terms.tap_terms}[tensor]
    cell = {place: number for number, place in enumerate(first) if place is not None}
    firsts, seconds = set(_contents(tensor, axis, first)), set(second)
    meetings = {}
    for at in result:
        if at is None:
            continue
        a, b, _ = along(axis, at)
        if tensor == "dw":  # the drawing has x before dy
            a, b = b, a
        if len(a) <= DRAWN.span:
            candidates = zip(a, b, strict=True)
        else:
            near = sorted(i for i in ({*_within(a, firsts)} & {*_within(b, seconds)}))
            candidates = zip([a[i] for i in near], [b[i] for i in near], strict=True)
        pairs = tuple((i, j) for i, j in candidates if i in firsts and j in seconds)
        window = _window(rule, at)
        under = tuple(number for place, number in cell.items() if place in window)
        meetings[at] = Meeting(len(a), pairs, under)
    return meetings


def _within(positions: range, drawn: set[int | None]) -> list[int]:
    """Return the indices, within ``positions``, of the positions that are drawn."""
    return [positions.index(at) for at in drawn if at is not None and at in positions]


# -- numbers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _DrawnPart:
    """Selection of the drawn part of each tensor."""

    problem: ConvProblem
    image: int
    filters: Places
    channels: Places
    directions: Mapping[str, Direction]

    def leaves_out(self, direction: Direction) -> bool:
        """Return whether some terms of a drawn result are not drawn."""
        if direction.tensor == "dw":
            whole = self.problem.N == 1
        else:
            whole = None not in (self.channels if direction.tensor == "y" else self.filters)
        return not whole or any(
            len(meeting.pairs) < meeting.count
            for along in direction.meetings
            for meeting in along.values()
        )

    def _positions(self, tensor: str) -> list[list[int]]:
        """Return the drawn positions of a tensor along each axis."""
        positions: list[set[int]] = [set() for _ in self.problem.axes]
        for direction in self.directions.values():
            tensors = (*direction.operands, direction.tensor)
            for name, plane in zip(tensors, direction.planes, strict=True):
                if name == tensor:
                    for numbers, places in zip(positions, plane, strict=True):
                        numbers |= {at for at in places if at is not None and at >= 0}
        return [sorted(numbers) for numbers in positions]

    def planes(self, tensor: str, array: Any) -> dict[str, dict[str, float]]:
        """Return the drawn values of a tensor, by channels and by position."""
        import numpy as np

        problem = self.problem
        order = problem.filter_axes if tensor in ("w", "dw") else problem.data_axes
        logical = array.transpose(order)
        where = self._positions(tensor)
        names = [",".join(map(str, at)) for at in product(*where)]
        filters = [k for k in self.filters if k is not None]
        channels = [c for c in self.channels if c is not None]
        if tensor in ("w", "dw"):
            own, of = problem.C // problem.groups, problem.K // problem.groups
            keys = [(k, c, (k, c % own)) for k in filters for c in channels if k // of == c // own]
        elif tensor in ("x", "dx"):
            keys = [(0, c, (self.image, c)) for c in channels]
        else:
            keys = [(k, 0, (self.image, k)) for k in filters]
        planes = {}
        for k, c, index in keys:
            numbers = arrays.on_host(logical[index])[np.ix_(*where)].ravel()
            planes[key_of(tensor, k, c)] = dict(zip(names, _plain(numbers), strict=True))
        return planes


def _plain(numbers: np.ndarray) -> list[float]:
    """Return an array's numbers as float64; for float32, those with the shortest decimal forms.

    Rounding to float32, as the page does, returns the numbers of the array.
    """
    if numbers.dtype == "float32":
        return [float(str(number)) for number in numbers]
    return numbers.astype("float64").tolist()


def _packed(planes: Mapping[str, Mapping[str, float]], digits: int) -> dict[str, Any]:
    """Return values for JSON: the positions of each axis once, and a list of numbers per plane."""
    names = next(iter(planes.values()), {})
    axes = zip(*(map(int, name.split(",")) for name in names), strict=True)
    return {
        "at": [sorted(set(positions)) for positions in axes],
        "planes": {
            key: [_number(value, digits) for value in p.values()] for key, p in planes.items()
        },
    }


def _number(value: float, digits: int) -> float | int | str:
    """Return a number for JSON with some significant digits; NaN and infinities become strings."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    whole = value == int(value) and abs(value) < 2**53
    return int(value) if whole else float(f"{value:.{digits}g}")
