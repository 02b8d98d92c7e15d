"""Statements of explanations, read from their words and compared with values.

Each form is a sentence, a line or a table row that a program can check.  It has a pattern, and a
function that compares what the words claim with a computation that shares no code with the
explanations: the definition of a convolution, tap by tap, and the library's results.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import product
from math import ceil, floor, prod

import numpy as np
from hypothesis import given

import cupyconv
from cupyconv import ConvProblem
from cupyconv.markup import Document
from tests.configurations import integer_data, problems, random_problems


class Layer:
    """A layer by its definition, with values.

    Attributes:
        triples: all (input, tap, output) along each axis in which the tap reads the input, not
            padding, keyed by the axis's name.
        x, w, dy, y, dx, dw: values, with their axes in the order of element indices.
    """

    def __init__(self, problem: ConvProblem) -> None:
        self.problem, self.data = problem, integer_data(problem)
        self.names = "DHW"[-problem.spatial_rank :]
        rules = problem.keywords
        data, filters = problem.data_axes, problem.filter_axes
        self.x, self.dy = self.data.x.transpose(data), self.data.dy.transpose(data)
        self.w = self.data.w.transpose(filters)
        self.y = cupyconv.conv_forward(self.data.x, self.data.w, **rules).transpose(data)
        self.dx = self.input_gradient(problem.input_sizes)
        dw = cupyconv.conv_backprop_filter(self.data.x, problem.filter_shape, self.data.dy, **rules)
        self.dw = dw.transpose(filters)
        self.triples = {name: self.triples_of(name) for name in self.names}

    def rule(self, name: str) -> tuple[int, int, int, int, int]:
        """Return the input size, taps, stride, dilation and outputs of an axis."""
        i, problem = self.names.index(name), self.problem
        sizes = problem.input_sizes[i], problem.filter_sizes[i]
        return *sizes, problem.stride[i], problem.dilation[i], problem.output_sizes[i]

    def outputs(self, name: str, size: int) -> int:
        """Return the output size of an input size along an axis."""
        _, taps, stride, dilation, _ = self.rule(name)
        if self.problem.padding_mode.startswith("same"):
            return ceil(size / stride)
        return floor((size + sum(self.pads(name)) - (taps - 1) * dilation - 1) / stride) + 1

    def pads(self, name: str, size: int | None = None) -> tuple[int, int]:
        """Return the padding of an axis, for its input or for another size."""
        own, taps, stride, dilation, _ = self.rule(name)
        size, mode = own if size is None else size, self.problem.padding_mode
        if not mode.startswith("same"):
            return self.problem.padding[self.names.index(name)]
        total = max((ceil(size / stride) - 1) * stride + (taps - 1) * dilation + 1 - size, 0)
        small, large = total // 2, total - total // 2
        return (small, large) if mode == "same" else (large, small)

    def triples_of(self, name: str) -> list[tuple[int, int, int]]:
        size, taps, stride, dilation, outputs = self.rule(name)
        before, _ = self.pads(name)
        pairs = product(range(outputs), range(taps))
        every = ((o * stride - before + r * dilation, r, o) for o, r in pairs)
        return [triple for triple in every if 0 <= triple[0] < size]

    def counts(self, tensor: str) -> np.ndarray:
        """Return the number of products of every spatial position of dx, dw or y."""
        problem = self.problem
        which = ("dx", "dw", "y").index(tensor)
        filters, channels = problem.K // problem.groups, problem.C // problem.groups
        result = np.array((filters, problem.N, channels)[which])
        for name in self.names:
            size = (self.rule(name)[0], self.rule(name)[1], self.rule(name)[4])[which]
            counted = Counter(triple[which] for triple in self.triples[name])
            result = np.multiply.outer(result, [counted[at] for at in range(size)])
        return result

    def input_gradient(self, sizes) -> np.ndarray:
        """Return the library's dx for other input sizes, with its axes in the order of indices."""
        problem = self.problem
        shape = dict(zip(problem.data_axes, (problem.N, problem.C, *sizes), strict=True))
        given = tuple(shape[axis] for axis in sorted(shape))
        dx = cupyconv.conv_backprop_input(given, self.data.w, self.data.dy, **problem.keywords)
        return dx.transpose(problem.data_axes)

    def full_result(self, name: str) -> np.ndarray:
        """Return the gradient of the input padded along an axis, up to the last window's end."""
        problem = self.problem
        i, (_, taps, stride, dilation, outputs) = self.names.index(name), self.rule(name)
        padding = [self.pads(each) for each in self.names]
        padding[i] = (0, 0)
        sizes = list(problem.input_sizes)
        sizes[i] = (outputs - 1) * stride + (taps - 1) * dilation + 1
        shape = dict(zip(problem.data_axes, (problem.N, problem.C, *sizes), strict=True))
        given = tuple(shape[axis] for axis in sorted(shape))
        rules = {**problem.keywords, "padding": padding}
        dx = cupyconv.conv_backprop_input(given, self.data.w, self.data.dy, **rules)
        return dx.transpose(problem.data_axes)


def number(text: str) -> int:
    return int(text.replace(",", ""))


def axes_of(layer: Layer, line: str, at: int, heading: str) -> str:
    """Return the axes that a claim is about: the last ones named before it, or all axes."""
    named = re.findall(r"along ([DHW](?:, [DHW])*(?: and [DHW])?)\b", line[:at])
    named = named or re.findall(r"^(?:Axis|Axes) (.*)", heading)
    return "".join(re.findall("[DHW]", named[-1])) if named else layer.names


# -- forms -----------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Layer, re.Match[str], str], None]] = {}
"""Functions that check a claim from the layer, the match of the pattern, and the axes of the
claim; keyed by the pattern."""


def form(pattern: str):
    def add(check):
        FORMS[pattern] = check
        return check

    return add


_TERM = r"(x|w|dy)\[([\d,]+)\] +\* (x|w|dy)\[([\d,]+)\] +=  *(-?\d+) \* +(-?\d+) = +(-?\d+)$"


@form(r"(?<![-+*/\w\]])(?<![-+*/\])] )(?<!x )((?:floor|ceil)?[(\d][-+*/() \d]*) = (-?\d+)(?!\.?\d)")
def _arithmetic(layer, match, axes):
    if not re.search(_TERM, match.string):
        assert eval(match[1], {"floor": floor, "ceil": ceil}) == int(match[2]), match.string


@form(r"input sizes? (\d+)(?: (?:and|to) (\d+))? (?:both |all )?gives? output size (\d+)")
def _input_sizes(layer, match, axes):
    first, last, output = int(match[1]), int(match[2] or match[1]), int(match[3])
    for name in axes:
        sizes = [n for n in range(1, last + 9) if layer.outputs(name, n) == output]
        assert sizes == list(range(first, last + 1))


@form(r"^padding +(?:(\d+) before, (\d+) after|none)")
def _padding(layer, match, axes):
    for name in axes:
        assert layer.pads(name) == (int(match[1] or 0), int(match[2] or 0))


@form(r"input of size (\d+)(?: is padded)? by (\d+) before and (\d+) after")
def _padding_of_a_size(layer, match, axes):
    for name in axes:
        assert layer.pads(name, int(match[1])) == (int(match[2]), int(match[3]))


@form(r"output (\w) reads input (\w) = (.*?) for the taps? (\w) = (\d+)(?: to (\d+))?: (.*)")
def _window(layer, match, axes):
    covered = re.findall(r"covers (-?\d+)(?: to (-?\d+))?", match[7])
    ends = [(int(first), int(last or first)) for first, last in covered]
    for name in axes:
        _, taps, stride, dilation, outputs = layer.rule(name)
        before = layer.pads(name)[0]
        assert (int(match[5]), int(match[6] or match[5])) == (0, taps - 1)
        for o, r in product(range(outputs), range(taps)):
            read = eval(match[3], {match[1]: o, match[4]: r})
            assert read == o * stride - before + r * dilation
        windows = [o * stride - before for o in range(outputs)]
        span = (taps - 1) * dilation
        assert ends == [(o, o + span) for o in dict.fromkeys((windows[0], windows[-1]))]


@form(r"^receptive field +(?:at most )?(\d+) inputs? for each output; .* are (\S+) apart")
def _receptive_field(layer, match, axes):
    for name in axes:
        _, taps, stride, dilation, _ = layer.rule(name)
        if "/" not in match[2]:
            assert (int(match[1]), int(match[2])) == ((taps - 1) * dilation + 1, stride)
            continue
        assert match[2] == f"1/{stride}"  # transposed layer
        reads = [
            [-r * dilation // stride for r in range(taps) if (o - r * dilation) % stride == 0]
            for o in range(stride)
        ]
        assert int(match[1]) == max(max(each) - min(each) + 1 for each in reads if each)


@form(r"no window covers ((?:[DHW]) = (\d+)(?: to (\d+))?)")
def _not_covered(layer, match, axes):
    name = match[1][0]
    size, taps, stride, dilation, outputs = layer.rule(name)
    end = (outputs - 1) * stride - layer.pads(name)[0] + (taps - 1) * dilation + 1
    assert (int(match[2]), int(match[3] or match[2])) == (max(end, 0), size - 1)
    at = 2 + layer.names.index(name)
    assert not layer.dx.take(range(int(match[2]), size), at).any()


@form(
    r"^unread inputs +(?:(none)|the (only) input|(?:the last (\d+)?|(\d+))(?: ?of)? "
    r"the (\d+) inputs(?:: the last ?(\d+)?)?)"
)
def _unread(layer, match, axes):
    for name in axes:
        size = layer.rule(name)[0]
        read = {triple[0] for triple in layer.triples[name]}
        unread = [h for h in range(size) if h not in read]
        if match[1]:
            assert not unread
        elif match[2]:
            assert unread == [0]
            assert size == 1
        else:
            count = int(match[4] or match[3] or 1)
            assert (len(unread), size) == (count, int(match[5]))
            last = 0 if match[4] else count
            if "the last" in match[0]:
                last = last or int(match[6] or 1)
            assert unread[len(unread) - last :] == list(range(size - last, size))
        assert not layer.dx.take(unread, 2 + layer.names.index(name)).any()


@form(r"^(dx|dw|y) +every position has ([\d,]+) terms?")
def _even(layer, match, axes):
    assert (layer.counts(match[1]) == number(match[2])).all()


@form(r"^(dx|dw|y) +from ([\d,]+) to ([\d,]+) terms")
def _from_to(layer, match, axes):
    counts = layer.counts(match[1])
    assert (counts.min(), counts.max()) == (number(match[2]), number(match[3]))


@form(
    r"^(dx|dw|y) +([\d,]+) of ([\d,]+) positions (?:has|have) ([\d,]+) terms?; "
    r"the other(?: ([\d,]+))?, "
)
def _some_terms(layer, match, axes):
    counts = layer.counts(match[1])
    assert counts.size == number(match[3])
    assert (counts == 0).sum() == number(match[5] or "1") == counts.size - number(match[2])
    assert (counts[counts > 0] == number(match[4])).all()


@form(
    r"^(dx|dw|y) +([\d,]+) of ([\d,]+) positions, .*?no terms; "
    r"the others have ([\d,]+) to ([\d,]+) terms"
)
def _no_terms(layer, match, axes):
    counts = layer.counts(match[1])
    assert (counts.size, (counts == 0).sum()) == (number(match[3]), number(match[2]))
    some = counts[counts > 0]
    assert (some.min(), some.max()) == (number(match[4]), number(match[5]))


@form(r"There (?:is|are) (\d+) x (\d+) = ([\d,]+) pairs?.*?gives? ([\dx]+) values?")
def _pairs(layer, match, axes):
    problem = layer.problem
    pairs = number(match[3])
    assert int(match[1]) * int(match[2]) == pairs
    assert pairs * prod(map(int, match[4].split("x"))) == layer.w.size
    assert pairs == problem.K * (problem.C // problem.groups)


@form(r"Together they give ([\d,]+) values")
def _together(layer, match, axes):
    assert number(match[1]) == layer.dw.size


@form(r"(dw\[[\d,]+\]) uses only x\[(\d+)\] and dy\[(\d+)\]")
def _uses_only(layer, match, axes):
    problem = layer.problem
    others = {"x": layer.data.x.copy(), "dy": layer.data.dy.copy()}
    for tensor, kept in (("x", int(match[2])), ("dy", int(match[3]))):
        ordered = others[tensor].transpose(problem.data_axes)
        ordered[:, [c for c in range(ordered.shape[1]) if c != kept]] = 0
    dw = cupyconv.conv_backprop_filter(
        others["x"], problem.filter_shape, others["dy"], **problem.keywords
    ).transpose(problem.filter_axes)
    index = tuple(map(int, re.findall(r"\d+", match[1])))
    assert dw[index] == layer.dw[index]


@form(_TERM)
def _term(layer, match, axes):
    for tensor, index, value in (match.group(1, 2, 5), match.group(3, 4, 6)):
        assert getattr(layer, tensor)[tuple(map(int, index.split(",")))] == int(value)
    assert int(match[5]) * int(match[6]) == int(match[7])


@form(r"^([\d,]+) products of (.*) is (-?\d+)")
def _sum(layer, match, axes):
    """A line that ``lines_of`` writes from an element's text."""
    tensor, index = re.fullmatch(r"(y|dx|dw)\[(.*)\]", match[2]).groups()
    place = tuple(map(int, index.split(",")))
    assert number(match[1]) == layer.counts(tensor)[place[2:]]
    assert getattr(layer, tensor)[place] == int(match[3])


@form(r"(?:y\[k\] is a sum over the|adds? over the) (\d+) input channels")
def _sum_over_channels(layer, match, axes):
    assert int(match[1]) == layer.problem.C // layer.problem.groups


@form(r"dx\[c\] is a sum over the (\d+) filters")
def _sum_over_filters(layer, match, axes):
    assert int(match[1]) == layer.problem.K // layer.problem.groups


@form(
    r"^(forward|backprop_input|backprop_filter) +\w+ +(?:(\d+) products of )?(\d+) x (\d+) x (\d+)"
)
def _matrix_product(layer, match, axes):
    problem = layer.problem
    sizes = [int(size) for size in match.groups()[2:]]
    groups = int(match[2] or 1)
    result = {"forward": layer.y, "backprop_input": layer.dx, "backprop_filter": layer.dw}[match[1]]
    assert groups * sizes[0] * sizes[1] == result.size
    taps = prod(problem.filter_sizes)
    depth = {
        "forward": problem.C // problem.groups * taps,
        "backprop_input": problem.K // problem.groups * taps,
        "backprop_filter": problem.N * prod(problem.output_sizes),
    }[match[1]]
    assert sizes[2] == depth


@form(
    r"the rows form (\d+) smaller matrix products\. "
    r"(?:Each has depth (\d+)|Their depths are (.*?)), instead of (\d+)"
)
def _phases(layer, match, axes):
    problem = layer.problem
    filters = problem.K // problem.groups
    depths = [filters]
    for name in layer.names:
        _, taps, stride, dilation, _ = layer.rule(name)
        fitting = Counter(r * dilation % stride for r in range(taps))
        depths = [depth * fitting[phase] for depth in depths for phase in range(stride)]
    assert len(depths) == int(match[1])
    told = [int(text) for text in re.findall(r"\d+", match[2] or match[3])]
    if match[2] or " to " in match[3]:
        assert (min(depths), max(depths)) == (told[0], told[-1])
    else:
        assert sorted(depths) == told
    assert filters * prod(problem.filter_sizes) == int(match[4])


@form(r"so +(?:(\d+)\*)?([rst]) = (.*)")
def _tap(layer, match, axes):
    name = {"t": "D", "r": "H", "s": "W"}[match[2]] if len(layer.names) > 1 else "W"
    h, p = {"t": "dz", "r": "hp", "s": "wq"}[match[2]]
    for i, r, o in layer.triples[name]:
        assert int(match[1] or 1) * r == eval(match[3], {h: i, p: o})


@form(r"^outputs of x\[(\d+)\] along ([DHW]): (.*)")
def _reads(layer, match, axes):
    """A line that ``lines_of`` writes from the example of the chain rule."""
    told = [tuple(map(int, pair.split())) for pair in match[3].split(",")]
    every = sorted((o, r) for i, r, o in layer.triples[match[2]] if i == int(match[1]))
    assert told == every[: len(told)]
    assert [r for _, r in told] == sorted((r for _, r in told), reverse=True)


@form(
    r"turns (?:sizes (\d+) and (\d+)|each size from (\d+) to (\d+)|only size (\d+)) into (\d+)"
    r"(?:, but size (\d+) into (\d+))?"
)
def _output_padding(layer, match, axes):
    """The sizes that the convolution of a transposed layer turns into its input."""
    told = [int(text) for text in match.groups()[:5] if text]
    for name in axes:
        sizes = [n for n in range(1, told[-1] + 9) if layer.outputs(name, n) == int(match[6])]
        assert (sizes[0], sizes[-1]) == (told[0], told[-1])
        if match[7]:
            assert layer.outputs(name, int(match[7])) == int(match[8])
            assert int(match[7]) == sizes[-1] + 1


@form(r"^unreached +(\d+) (?:of the (\d+) outputs|output, the only one)")
def _unreached(layer, match, axes):
    """The outputs of a transposed layer that no input reaches."""
    for name in axes:
        reached = {triple[0] for triple in layer.triples[name]}
        assert layer.rule(name)[0] == int(match[2] or 1) == len(reached) + int(match[1])


@form(r"^dx of size (\d+) along ([DHW]): (.*)")
def _crop(layer, match, axes):
    """A line that ``lines_of`` writes from the picture of the full result."""
    size, name, at = int(match[1]), match[2], 2 + layer.names.index(match[2])
    sizes = list(layer.problem.input_sizes)
    sizes[at - 2] = size
    dx, full = layer.input_gradient(sizes), layer.full_result(name)
    assert dx.shape[at] == size
    assert layer.outputs(name, size) == layer.rule(name)[4]
    for pair in match[3].split(","):
        index, place = pair.split()
        assert np.all(dx.take(int(index), at) == (0 if place == "-" else full.take(int(place), at)))


@form(r"^dx = correlate\((.*)\)")
def _input_gradient(layer, match, axes):
    problem, text = layer.problem, match[1]
    zeros = _numbers_of_axes(layer, r"(\d+) zeros? between|zeros \((.*?)\)", text, 0)
    dilation = _numbers_of_axes(layer, r"dilation ([\dx]+)", text, 1)
    dy = _spread(layer.dy, [zero + 1 for zero in zeros])
    flipped = re.search(r"flipped along (.*?), with its channel axes swapped", text)[1]
    assert "".join(re.findall("[DHW]", flipped)) == layer.names
    w = np.flip(layer.w, range(2, layer.w.ndim))
    parts = zip(np.split(dy, problem.groups, 1), np.split(w, problem.groups), strict=True)
    made = [_correlate(a, b.swapaxes(0, 1), _pads_of(layer, text), dilation) for a, b in parts]
    assert np.array_equal(np.concatenate(made, 1), layer.dx)


@form(r"^dw\[k,c\] = correlate\( ?x\[c\],(.*) as the filter,(.*)\)")
def _filter_gradient(layer, match, axes):
    problem = layer.problem
    dilation = _numbers_of_axes(layer, r"dilated by ([\dx]+)", match[1], 1)
    stride = _numbers_of_axes(layer, r"stride ([\dx]+)", match[2], 1)
    parts = zip(
        np.split(layer.x, problem.groups, 1), np.split(layer.dy, problem.groups, 1), strict=True
    )
    made = [
        _correlate(a.swapaxes(0, 1), b.swapaxes(0, 1), _pads_of(layer, match[2]), dilation, stride)
        for a, b in parts
    ]
    dw = np.concatenate([part.swapaxes(0, 1) for part in made])
    assert np.array_equal(dw, layer.dw)


def _numbers_of_axes(layer: Layer, pattern: str, text: str, usual: int) -> list[int]:
    """Return a number per axis from a text such as ``2x1`` or ``6 along H, 0 along W``."""
    match = re.search(pattern, text)
    if not match:
        return [usual] * len(layer.names)
    numbers = [int(each) for each in re.findall(r"\d+", next(filter(None, match.groups())))]
    return numbers * len(layer.names) if len(numbers) == 1 else numbers


def _pads_of(layer: Layer, text: str) -> list[tuple[int, int]]:
    """Return the padding of each axis from a text such as ``padding (0, 1) by 2``."""
    pads = []
    for part in re.search(r"padding (.*)", text)[1].split(" by "):
        numbers = [int(each) for each in re.findall(r"-?\d+", part)]
        pads.append((numbers[0], numbers[-1]))
    return pads * len(layer.names) if len(pads) == 1 else pads


def _spread(array: np.ndarray, steps: list[int]) -> np.ndarray:
    sizes = [(size - 1) * step + 1 for size, step in zip(array.shape[2:], steps, strict=True)]
    result = np.zeros((*array.shape[:2], *sizes), array.dtype)
    result[(..., *(slice(None, None, step) for step in steps))] = array
    return result


def _correlate(x, w, pads, dilation, stride=None):
    """Correlate by the definition; negative padding crops."""
    rank = x.ndim - 2
    stride = stride or [1] * rank
    x = np.pad(x, [(0, 0), (0, 0), *((max(a, 0), max(b, 0)) for a, b in pads)])
    sides = zip(pads, x.shape[2:], strict=True)
    x = x[(..., *(slice(max(-a, 0), size - max(-b, 0)) for (a, b), size in sides))]
    w = _spread(w, dilation)
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], tuple(range(2, 2 + rank)))
    windows = windows[(slice(None), slice(None), *(slice(None, None, step) for step in stride))]
    letters = "defghi"[: 2 * rank]
    return np.einsum(f"nc{letters},kc{letters[rank:]}->nk{letters[:rank]}", windows, w)


# -- reading ---------------------------------------------------------------------------------------


def lines_of(text: str) -> list[tuple[str, str]]:
    """Return the lines of an explanation, each with its heading.

    A picture or a program in several lines becomes one line per claim.
    """
    lines, heading, element, along, read, full = [], "", "", "", "", []
    raw = text.splitlines()
    for i, line in enumerate(raw):
        bare = line.strip().replace("+ output_padding ", "+ ")
        if i and not raw[i - 1].strip() and line[:1].strip():
            heading = bare
        if match := re.match(r"([DHW](?:(?:, | and )[DHW])*) +padding ", bare):
            heading = f"Axes {match[1]}"  # transposed layer
        if bare in ("dx = correlate(", "dw[k,c] = correlate("):
            bare = " ".join(part.strip() for part in raw[i : i + 4])
        if match := re.search(r"(?:^|example, )((?:dw|dx|y)\[[\d,]+\])(?: uses only|$)", bare):
            element = match[1]
        if match := re.match(r"sum of ([\d,]+) products? = (-?\d+)$", bare):
            bare = f"{match[1]} products of {element} is {match[2]}"
        if match := re.match(r"along (.*)$", bare):
            along = match[1]
        if match := re.match(r"Along ([DHW]),|.*Along ([DHW]), for one channel", bare):
            read = match[1] or match[2]
        if match := re.match(r".*these outputs read x\[(\d+)\]", bare):
            at = match[1]
        if bare.startswith("output ") and raw[i + 1].strip().startswith("tap "):
            outputs, taps = (re.findall(r"\d+", each) for each in (bare, raw[i + 1]))
            pairs = ", ".join(map(" ".join, zip(outputs, taps, strict=True)))
            bare = f"outputs of x[{at}] along {read}: {pairs}"
        if bare.startswith("full result "):
            full = [(match.end(), match[0]) for match in re.finditer(r"\d+", line)]
        if match := re.match(r" *(?:dx|y) of size (\d+) (.*)", line):
            places = dict(full)
            pairs = []
            for cell in re.finditer(r"\(?(\d+)\)?", line[match.start(2) :]):
                end = match.start(2) + cell.end()
                pairs.append(f"{cell[1]} {'-' if cell[0][0] == '(' else places[end]}")
            for name in re.findall("[DHW]", along) or ["W"]:
                lines.append((f"dx of size {match[1]} along {name}: {','.join(pairs)}", heading))
            continue
        lines.append((bare, heading))
    return lines


def check(problem: ConvProblem) -> Counter[str]:
    """Check every claim of a layer's explanation; return how often each form occurs."""
    layer = Layer(problem)
    data = layer.data
    explanation = cupyconv.explain(problem, x=data.x, w=data.w, dy=data.dy)
    reverse = cupyconv.explain(problem, values=None, transposed=True).document.sections[:1]
    texts = [explanation.text(10**6), "", Document("", reverse).text(10**6)]
    draw = np.random.default_rng(problem.flops)
    for tensor in ("y", "dx", "dw") if problem.N else ():
        index = ",".join(str(draw.integers(size)) for size in getattr(layer, tensor).shape)
        texts.append(f"\n\n{explanation.element(f'{tensor}[{index}]')}")
    found: Counter[str] = Counter()
    for line, heading in lines_of("\n".join(texts)):
        for pattern, claim in FORMS.items():
            for match in re.finditer(pattern, line):
                claim(layer, match, axes_of(layer, line, match.start(), heading))
                found[claim.__name__] += 1
    return found


def test_all_forms_occur_and_hold():
    found: Counter[str] = Counter()
    for problem in random_problems(40, seed=3, max_macs=600, dtypes=("float64",)):
        found += check(problem)
    assert set(found) == {claim.__name__ for claim in FORMS.values()}


@given(problems(max_macs=300, dtypes=("float64",)))
def test_statements_hold_on_random_layers(problem):
    check(problem)
