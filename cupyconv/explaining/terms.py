"""Terms of one element of y, dx or dw: the products that add up to the element.

The spatial axes are independent: each combination of one pair of positions per axis, and of one
channel, filter or image, gives a term.

Indices have the same order for every memory order: (n, c, h, w) for x and dx, (n, k, p, q) for y
and dy, (k, c, r, s) for w and dw. In w and dw, c counts channels within the group of filter k.

Tensors have the names of the problem. Texts on a transposed layer have the layer's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum, prod
from typing import Any, NamedTuple

from cupyconv import arrays
from cupyconv.errors import ConvError, shown, unknown_word
from cupyconv.explaining.values import MOST_ELEMENTS
from cupyconv.markup import MOST_LINES, Block, Document, Paragraph, Section, Verbatim
from cupyconv.problem import MOST_LISTED, ConvAxis, ConvProblem, counted, shape_text

LETTERS = {
    "input": {1: "w", 2: "hw", 3: "dhw"},
    "filter": {1: "s", 2: "rs", 3: "trs"},
    "output": {1: "q", 2: "pq", 3: "zpq"},
}
"""Letters of the spatial indices of x, w and y, by the number of spatial axes."""

CONVOLUTION_NAMES = {"x": "dy", "w": "w", "y": "dx", "dy": "x", "dx": "y", "dw": "dw"}
"""Names of a transposed layer's tensors in the convolution that it reverses, and vice versa."""

ALIASES = {"y": "y", "o": "y", "dx": "dx", "dw": "dw", "df": "dw"}
"""Tensor of each name that ``parse`` accepts, keyed by the name in lower case."""

_NO_PRODUCTS = {
    "db": "db[{y}] has no products: it is the sum of all dy[n,{y},...]",
    "dadd": "dadd has no products: it is equal to dy",
    "x": "x is an operand; use dX[n,{x},...] for its gradient",
    "w": "w is an operand; use dF[k,c,...] for its gradient",
    "f": "w is an operand; use dF[k,c,...] for its gradient",
    "dy": "dy is an operand; use O[n,{y},...], dX[n,{x},...] or dF[k,c,...]",
    "do": "dy is an operand; use O[n,{y},...], dX[n,{x},...] or dF[k,c,...]",
}
"""Advice for tensors whose elements are not explained, keyed by the name in lower case; {x} and {y}
are the letters of the channels of x and y."""

INDEX_W = " The index w is a position on axis W, not the filter w."
"""Sentence on the letter w, which names the filter and the last spatial index of x."""

SHOWN_FIRST, SHOWN_LAST = 4, 2
"""Number of terms printed at the beginning and at the end of a long list (hand-set)."""

_DIGITS = {
    "float16": 3,
    "bfloat16": 2,
    "float32": 7,
    "float64": 16,
    "complex64": 7,
    "complex128": 16,
}
"""Number of significant decimal digits, keyed by dtype."""

_LISTED_TAPS = 12
"""Largest number of taps of an axis for which the text of dx has a line per tap (hand-set)."""


class Term(NamedTuple):
    """One product of a sum: the indices of the two elements that are multiplied."""

    first: tuple[int, ...]
    second: tuple[int, ...]


class AxisTerms(NamedTuple):
    """Pairs of positions along one axis, at which an element's terms read the two factors.

    Attributes:
        first, second: positions in the first and in the second factor, pair by pair.
        why: lines of text on these pairs and on the pairs that are left out.
    """

    first: range
    second: range
    why: str


def names(problem: ConvProblem, tensor: str) -> tuple[str, ...]:
    """Return the names of a tensor's indices, such as ("k", "c", "r", "s")."""
    rank = problem.spatial_rank
    return {
        "x": ("n", "c", *LETTERS["input"][rank]),
        "y": ("n", "k", *LETTERS["output"][rank]),
        "w": ("k", "c", *LETTERS["filter"][rank]),
    }[tensor[-1]]


def grouped(problem: ConvProblem, is_transposed: bool = False) -> str:
    """Return sentences on the indices of a layer with groups; "" for other layers."""
    if problem.groups == 1:
        return ""
    tensors = "y[c] and dy[c]" if is_transposed else "x[c] and dx[c]"
    return (
        " In w and dw, c counts only the channels of the group of filter k. In a formula with w or "
        f"dw, {tensors} are channel c of this group."
    )


def extents(problem: ConvProblem, tensor: str) -> tuple[int, ...]:
    """Return the sizes of a tensor in the order of ``names``."""
    shape, axes = {
        "x": (problem.input_shape, problem.data_axes),
        "y": (problem.output_shape, problem.data_axes),
        "w": (problem.filter_shape, problem.filter_axes),
    }[tensor[-1]]
    return tuple(shape[axis] for axis in axes)


def indexed(tensor: str, index: Iterable[object]) -> str:
    """Return a tensor with its indices: ``dw[5,2,0,0]``."""
    return f"{tensor}[{','.join(map(str, index))}]"


# -- along one axis ------------------------------------------------------------------------------


def letters(axis: ConvAxis) -> tuple[str, str, str]:
    """Return the letters of the input, the tap and the output along an axis, such as h, r and p."""
    place = "DHW".index(axis.name)
    h, r, p = (LETTERS[kind][3][place] for kind in ("input", "filter", "output"))
    return h, r, p


def _products(axis: ConvAxis) -> tuple[str, str]:
    """Return an output times the stride and a tap times the dilation, such as ``2*p`` and ``r``."""
    _, r, p = letters(axis)
    output = f"{axis.stride}*{p}" if axis.stride > 1 else p
    return output, f"{axis.dilation}*{r}" if axis.dilation > 1 else r


def position_text(axis: ConvAxis) -> str:
    """Return the formula of the input that an output reads with a tap: ``h = 2*p - 1 + r``."""
    output, tap = _products(axis)
    pad = f" - {axis.pad_before}" if axis.pad_before else ""
    return f"{letters(axis)[0]} = {output}{pad} + {tap}"


def output_text(axis: ConvAxis, position: int | None = None, tap: int | None = None) -> str:
    """Return the formula of the output that reads an input with a tap: ``p = (h + 1 - r)/2``.

    A given position replaces h. A given tap replaces r, and its product with the dilation is
    printed.
    """
    h, _, p = letters(axis)
    read = h if position is None else str(position)
    pad = f" + {axis.pad_before}" if axis.pad_before else ""
    moved = _products(axis)[1] if tap is None else str(tap * axis.dilation)
    sum_ = f"{read}{pad} - {moved}"
    return f"{p} = ({sum_})/{axis.stride}" if axis.stride > 1 else f"{p} = {sum_}"


def tap_text(axis: ConvAxis) -> str:
    """Return the formula of the tap through which an output reads an input: ``r = h - 2*p + 1``.

    With a dilation d, d*r replaces r.
    """
    output, tap = _products(axis)
    pad = f" + {axis.pad_before}" if axis.pad_before else ""
    return f"{tap} = {letters(axis)[0]} - {output}{pad}"


def tap_terms(axis: ConvAxis, tap: int) -> AxisTerms:
    """Return the pairs of an output and the input that a tap reads for this output, for dw."""
    h, _, p = letters(axis)
    outputs, inputs = axis.outputs_of_tap(tap), axis.inputs_of_tap(tap)
    shift = tap * axis.dilation - axis.pad_before
    moved = _products(axis)[0]
    moved += f" + {shift}" if shift > 0 else f" - {-shift}" if shift < 0 else ""
    if not outputs:
        return AxisTerms(outputs, inputs, f"{h} = {moved} is padding for every {p}")
    where = f"{p} = {_span(outputs)}"
    if len(outputs) < axis.output:
        where += f" ({len(outputs)} of {axis.output}); for the other {p}, {h} is padding"
    elif axis.output > 1:
        where += f" (all {axis.output})"
    return AxisTerms(outputs, inputs, f"{h} = {moved}, for {where}")


def input_terms(axis: ConvAxis, position: int) -> AxisTerms:
    """Return the pairs of an output and a tap that read an input, for dx."""
    _, r, p = letters(axis)
    shifted = position + axis.pad_before
    # Only taps of the input's stride phase (its padded position modulo the stride) read the input.
    # These taps are a fixed step apart.
    fitting = axis.taps_of_phase(shifted % axis.stride)
    step = fitting.step
    first = -(-(shifted - (axis.output - 1) * axis.stride) // axis.dilation)
    last = min(shifted // axis.dilation, axis.filter - 1)
    start = max(first + (fitting.start - first) % step, fitting.start)
    taps = range(start, last + 1, step)
    output = (shifted - start * axis.dilation) // axis.stride
    distance = step * axis.dilation // axis.stride
    outputs = range(output, output - len(taps) * distance, -distance)
    if axis.filter > _LISTED_TAPS:
        where = f"{r} = {_span(taps)}, where {p} = {_span(outputs)}" if taps else "no tap"
        rule = output_text(axis, position)
        return AxisTerms(outputs, taps, f"{rule} is a valid index for {where}")
    why = []
    for tap in range(axis.filter):
        output, rest = divmod(shifted - tap * axis.dilation, axis.stride)
        if rest:
            verdict = "is not an integer: the stride skips this tap"
        elif output < 0:
            verdict = f"= {output}: the smallest {p} is 0"
        elif output >= axis.output:
            verdict = f"= {output}: the largest {p} is {axis.output - 1}"
        else:
            verdict = f"= {output}"
        why.append(f"{r} = {tap}: {output_text(axis, position, tap)} {verdict}")
    return AxisTerms(outputs, taps, "\n".join(why))


def output_terms(axis: ConvAxis, position: int) -> AxisTerms:
    """Return the pairs of an input and a tap in the window of an output, for y."""
    h, _, _ = letters(axis)
    corner = position * axis.stride - axis.pad_before
    first = max(-(corner // axis.dilation), 0)
    last = min((axis.input - 1 - corner) // axis.dilation, axis.filter - 1)
    taps = range(first, last + 1)
    start = corner + first * axis.dilation
    inputs = range(start, start + len(taps) * axis.dilation, axis.dilation)
    end = corner + axis.effective_filter - 1
    step = f" in steps of {axis.dilation}" if axis.dilation > 1 and axis.filter > 1 else ""
    window = f"the window covers {h} = {corner}" + (f" to {end}{step}" if end > corner else "")
    outside = axis.filter - len(taps)
    if outside:
        read = "reads" if outside == 1 else "read"
        window += f"; {outside} of {counted(axis.filter, 'tap')} {read} padding, which is zero"
    return AxisTerms(inputs, taps, window)


ALONG = {"y": output_terms, "dx": input_terms, "dw": tap_terms}
"""Functions that return the pairs along an axis, keyed by result."""


# -- one element -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Element:
    """One element of y, dx or dw as a sum of products.

    Attributes:
        problem: the layer.
        tensor: "y", "dx" or "dw".
        index: indices of the element, in the order of ``names``.
        asked: name of the element as the caller wrote it, such as "dF[0,0,0,0]".
        data: values of x, w, dy, y, dx and dw by name, as far as they are known, in the problem's
            formats.
        is_transposed: whether texts have the names of the transposed layer that reverses the
            problem.
    """

    problem: ConvProblem
    tensor: str
    index: tuple[int, ...]
    asked: str = ""
    data: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    is_transposed: bool = False

    def called(self, tensor: str) -> str:
        """Return the layer's name of a tensor of the problem."""
        return CONVOLUTION_NAMES[tensor] if self.is_transposed else tensor

    @property
    def name(self) -> str:
        """Name of the element, such as ``dw[5,2,0,0]``."""
        return indexed(self.called(self.tensor), self.index)

    @property
    def factors(self) -> tuple[str, str]:
        """Names of the two tensors whose products are summed."""
        return {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("dy", "x")}[self.tensor]

    @cached_property
    def contracted(self) -> range:
        """Images (dw), filters (dx) or channels of a group (y) that the sum runs over."""
        problem = self.problem
        channels, filters = problem.C // problem.groups, problem.K // problem.groups
        if self.tensor != "dx":
            return range(problem.N if self.tensor == "dw" else channels)
        first = self.index[1] // channels * filters
        return range(first, first + filters)

    @cached_property
    def axes(self) -> tuple[AxisTerms, ...]:
        """Pairs of positions along each axis."""
        return tuple(map(ALONG[self.tensor], self.problem.axes, self.index[2:]))

    @cached_property
    def count(self) -> int:
        """Number of terms, without the products with padding."""
        return len(self.contracted) * prod(len(axis.first) for axis in self.axes)

    def term(self, number: int) -> Term:
        """Return a term by its place in the sum; the last axis varies fastest."""
        positions = []
        for axis in reversed(self.axes):
            number, here = divmod(number, len(axis.first))
            positions.append((axis.first[here], axis.second[here]))
        first, second = zip(*reversed(positions), strict=True)
        over, (a, b) = self.contracted[number], self.index[:2]
        channels, filters = (n // self.problem.groups for n in (self.problem.C, self.problem.K))
        if self.tensor == "dw":
            return Term((over, a, *first), (over, a // filters * channels + b, *second))
        if self.tensor == "dx":
            return Term((a, over, *first), (over, b % channels, *second))
        return Term((a, b // filters * channels + over, *first), (b, over, *second))

    def terms(self) -> Iterator[Term]:
        """Yield all terms in order."""
        return map(self.term, range(self.count))

    # -- values ------------------------------------------------------------------------------------

    @property
    def has_values(self) -> bool:
        """Whether the values of both factors are known."""
        return all(self.data.get(name) is not None for name in self.factors)

    @cached_property
    def values(self) -> tuple[Any, Any]:
        """Values of the first and of the second factor of every term, in the terms' order.

        They are float64 or complex128 arrays. In gradients of complex layers, the second factors
        are conjugated.

        Raises:
            ConvError: the element has more than MOST_ELEMENTS terms.
        """
        if self.count > MOST_ELEMENTS:
            raise ConvError(
                f"an element must have at most {MOST_ELEMENTS:,} terms to be shown with values",
                f"{self.name} has {self.count:,} terms",
                "To list the terms without values, omit --large on the command line, or call "
                "explain() without large=True and without arrays",
            )
        return self._values(0), self._values(1)

    def _values(self, which: int) -> Any:
        """Return the first (0) or second (1) factor of every term, as one slice of its tensor."""
        import numpy as np

        if not self.count:
            return np.zeros(0)
        tensor = self.factors[which]
        order = self.problem.filter_axes if tensor == "w" else self.problem.data_axes
        begin, end = self.term(0)[which], self.term(self.count - 1)[which]
        # One of the first two indices runs over ``contracted``; the other is constant.
        parts = [slice(begin[i], end[i] + 1) for i in range(2)]
        parts += [_slice((axis.first, axis.second)[which]) for axis in self.axes]
        host = np.asarray(arrays.on_host(self.data[tensor].transpose(order)[tuple(parts)]))
        kind = np.complex128 if self.problem.is_complex else np.float64
        values = host.astype(kind).ravel()
        return values.conj() if self.conjugates and which == 1 else values

    @property
    def conjugates(self) -> bool:
        """Whether the second factors are conjugated."""
        return self.problem.is_complex and self.tensor != "y"

    @cached_property
    def sum(self) -> float | complex:
        """Sum of the float64 products, rounded once to float64 (each part of a complex sum)."""
        first, second = self.values
        products = first * second
        if not self.problem.is_complex:
            return _exact_sum(products.tolist())
        return complex(_exact_sum(products.real.tolist()), _exact_sum(products.imag.tolist()))

    @property
    def _is_rounded(self) -> bool:
        """Whether ``computed`` differs from ``sum`` by no more than rounding errors."""
        size = float(abs(self.values[0] * self.values[1]).sum())
        error = abs((self.computed or 0) - self.sum)
        return error <= size * 10.0 ** (1 - _DIGITS[self.problem.dtype])

    @property
    def computed(self) -> float | complex | None:
        """Value of the element in ``data``; None if ``data`` does not have the tensor."""
        if self.data.get(self.tensor) is None:
            return None
        order = self.problem.filter_axes if self.tensor == "dw" else self.problem.data_axes
        number = complex if self.problem.is_complex else float
        return number(self.data[self.tensor].transpose(order)[self.index])

    # -- text --------------------------------------------------------------------------------------

    @property
    def rule(self) -> str:
        """Formula of the sum, with letters for the indices."""
        problem = self.problem
        result, first, second = (
            indexed(self.called(tensor), names(problem, tensor))
            for tensor in (self.tensor, *self.factors)
        )
        if self.conjugates:
            second = f"conj({second})"
        over = {"y": "c", "dx": "k", "dw": "n"}[self.tensor]
        places = names(problem, "dy" if self.tensor == "dw" else "w")[2:]
        return f"{result} = sum over {', '.join((over, *places))} of {first} * {second}"

    @property
    def places(self) -> str:
        """Formulas that connect the positions of x, w and y along each axis."""
        return ", ".join(map(position_text, self.problem.axes))

    @property
    def conclusion(self) -> str:
        """Sentences on the channels, filters and images that the terms come from."""
        problem, (a, b) = self.problem, self.index[:2]
        channels, filters = problem.C // problem.groups, problem.K // problem.groups
        where = " of its group" if problem.groups > 1 else ""
        if self.count == 0 and self.tensor != "dx":
            return "This element has no terms, so it is zero."
        if self.count == 0 and self.is_transposed:
            return "No input reaches this output, so it has no terms: y is the bias here."
        if self.count == 0:
            return "No window reads this input, so it has no terms and its gradient is zero."
        if self.tensor == "dw":
            images = f", over {counted(problem.N, 'image')}" if problem.N > 1 else ""
            return (
                f"The sum uses only channel {a // filters * channels + b} of {self.called('x')} "
                f"and channel {a} of {self.called('dy')}. The products are added, not "
                f"averaged{images}."
            )
        if self.tensor == "dx" and self.is_transposed:
            inputs = counted(filters, "input channel")
            read = f"The sum runs over {inputs}{where}, each with its own filter"
        elif self.tensor == "dx":
            many = filters > 1
            read = (
                f"{f'Each of the {filters} filters' if many else 'One filter'}{where} reads this "
                "input, so each window with a tap on it gives one term"
                f"{' per filter' if many else ''}"
            )
        if self.tensor == "dx":
            return f"{read}. The sum uses only image {a}: images do not mix."
        side = "output" if self.is_transposed else "input"
        if channels == 1:
            return f"The sum runs over one {side} channel{where}, with the taps of filter {b}."
        return (
            f"The sum runs over the {channels} {side} channels{where}, each with its own taps of "
            f"filter {b}."
        )

    def shown(self, everything: bool = False) -> tuple[list[int], list[int]]:
        """Return the places of the terms to print: at the beginning and at the end of the sum."""
        if everything and self.count > MOST_LISTED:
            raise ConvError(
                f"an element must have at most {MOST_LISTED:,} terms to be listed in full",
                f"{self.name} has {self.count:,} terms",
                "Omit --all on the command line, or everything=True in Python, to list only the "
                "first and the last terms",
            )
        most = SHOWN_FIRST + SHOWN_LAST + 1
        if self.count <= MOST_LINES and self.has_values and self._integral:
            most = MOST_LINES  # print all terms, so that they can be added by hand
        if everything or self.count <= most:
            return list(range(self.count)), []
        return list(range(SHOWN_FIRST)), list(range(self.count - SHOWN_LAST, self.count))

    def section(self, everything: bool = False) -> Section:
        """Return the text of the element; ``everything`` lists all terms."""
        problem = self.problem
        order = problem.filter_format if self.tensor == "dw" else problem.data_format
        title = self.asked or self.name
        if title != self.name:
            title += f", here called {self.name}"
        sizes = extents(problem, self.tensor)
        place = f"One of the {prod(sizes):,} elements" if prod(sizes) > 1 else "The only element"
        formula = f"{self.rule}\nwith {self.places}"
        if self.tensor == "dx":
            formula += f"\nso   {', '.join(map(output_text, problem.axes))}"
        blocks: tuple[Block, ...] = (
            Paragraph(
                f"{place} of {self.called(self.tensor)}. Its indices are "
                f"({', '.join(names(problem, self.tensor))}), with sizes {shape_text(sizes)}, "
                f"whatever the memory order (here {order}).{INDEX_W}"
                f"{grouped(problem, self.is_transposed)}"
            ),
            Verbatim(formula),
            Verbatim("\n".join(axis.why for axis in self.axes)),
            Paragraph(self._counted()),
            *([Verbatim("\n".join(self.lines(everything)))] if self.count else []),
            *self.beside(),
            Paragraph(self.conclusion),
        )
        return Section(title, blocks)

    def beside(self) -> list[Paragraph]:
        """Return a line with the value that the library computes, or why it is missing."""
        if self.computed is None:
            reason = getattr(self.data, "missing", lambda name: "")(self.tensor)
            is_needed = reason and self.count
            return [Paragraph(f"Not computed by the library: {reason}")] if is_needed else []
        name = {"y": "conv_forward", "dx": "conv_backprop_input", "dw": "conv_backprop_filter"}
        if self.is_transposed:
            name |= {"y": "conv_forward(dy, w)", "dx": "conv_transpose"}
        dtype, gives = self.problem.dtype, f"{self.computed:.9g}"
        text = f"cupyconv.{name[self.tensor]} gives {gives} in {dtype}"
        if self.has_values and gives != f"{self.sum:.9g}" and self._is_rounded:
            text += (
                f", which has about {_DIGITS[dtype]} digits and rounds while it adds; the sum "
                "above is rounded at the end"
            )
        return [Paragraph(f"{text}.")]

    def _counted(self) -> str:
        over = {"dw": "image", "dx": "filter", "y": "channel"}[self.tensor]
        what = "tap" if self.tensor != "dw" else "position"
        sizes = [counted(len(self.contracted), over)]
        along = zip(self.problem.axes, self.axes, strict=True)
        sizes += [f"{counted(len(terms.first), what)} along {axis.name}" for axis, terms in along]
        end = ":" if self.count else "."
        return f"{counted_large(self.count, 'term')} = {' * '.join(sizes)}{end}"

    def lines(self, everything: bool = False) -> Iterator[str]:
        """Yield one line per term, and a line with the sum if the values are known."""
        head, tail = self.shown(everything)
        products = [self._product(number) for number in (*head, *tail)]
        widths = [max((len(row[c]) for row in products), default=0) for c in range(2)]
        for place, (first, second, rest) in enumerate(products):
            if tail and place == len(head):
                yield f"... {self.count - len(head) - len(tail):,} more terms"
            yield f"{first.ljust(widths[0])} * {second.ljust(widths[1])}{rest}".rstrip()
        if self.has_values:
            yield f"sum of {counted_large(self.count, 'product')} = {self.sum:.9g}"

    def _product(self, number: int) -> tuple[str, str, str]:
        term = self.term(number)
        first, second = map(self.called, self.factors)
        second = indexed(second, term.second)
        texts = indexed(first, term.first), f"conj({second})" if self.conjugates else second
        if not self.has_values:
            return (*texts, "")
        a, b = (values[number].item() for values in self.values)
        if self.problem.is_complex:
            written = _whole if self._integral else "{:.6f}".format
            numbers = f"({written(a)}) * ({written(b)}) = {written(a * b)}"
        elif self._integral:
            numbers = f"{a:2.0f} * {b:2.0f} = {a * b + 0:3.0f}"
        else:
            numbers = f"{a: .6f} * {b: .6f} = {a * b: .6f}"
        return (*texts, f"  = {numbers}")

    @cached_property
    def _integral(self) -> bool:
        """Whether all factors are integers from -99 to 99 (both parts of complex factors)."""
        parts = [part for each in self.values for part in (each.real, each.imag)]
        return all(bool((abs(each) < 100).all() and (each % 1 == 0).all()) for each in parts)

    def to_dict(self, everything: bool = False) -> dict[str, Any]:
        """Return the element as plain data; a long list of terms is shortened as in the text."""
        head, tail = self.shown(everything)
        terms = []
        for number in (*head, *tail):
            pairs = zip(map(self.called, self.factors), self.term(number), strict=True)
            entry: dict[str, Any] = {"number": number} | {name: list(at) for name, at in pairs}
            if self.has_values:
                a, b = (each[number].item() for each in self.values)
                entry |= {"values": [plain(a), plain(b)], "product": plain(a * b)}
            terms.append(entry)
        return {
            "element": self.name,
            "asked": self.asked or self.name,
            "index_names": list(names(self.problem, self.tensor)),
            "rule": self.rule,
            "positions": self.places,
            "count": self.count,
            "terms": terms,
            "terms_left_out": self.count - len(terms),
            "sum": plain(self.sum) if self.has_values else None,
            "computed": plain(self.computed),
            "conclusion": self.conclusion,
        }

    def __str__(self) -> str:
        return "\n".join(self.section().lines(100))

    def _repr_html_(self) -> str:
        return Document("", (self.section(),)).html()


def parse(problem: ConvProblem, text: str, is_transposed: bool = False) -> Element:
    """Return the element with a name such as ``dF[3,1,0,2]`` or ``dE/dF[3,1,0,2]``.

    Args:
        problem: the layer.
        text: name of the element.
        is_transposed: whether the name is that of the transposed layer that reverses the problem.

    Raises:
        ConvError: the text is not the name of an element, or an index is out of range; the message
            lists the valid indices.
    """
    pattern = r"\s*(?:d\w/)?(\w+)\s*[\[(]([^\])]*)[\])]\s*"
    match = re.fullmatch(pattern, text) if isinstance(text, str) else None
    if match is None:
        raise ConvError(
            "an element must be a tensor's name and its indices",
            f"got {shown(text)}",
            "Write, for example, 'dF[0,0,0,0]', 'dX[0,0,0,0]' or 'O[0,0,0,0]', between quotes",
        )
    word, asked = match[1].lower(), text.strip()
    if word in _NO_PRODUCTS:
        x, y = ("k", "c") if is_transposed else ("c", "k")
        advice = _NO_PRODUCTS[word].format(x=x, y=y)
        raise ConvError("an element must belong to y, dx or dw", f"got {asked!r}", advice)
    if word not in ALIASES:
        raise unknown_word("tensor", match[1], ("dF", "dw", "dX", "dx", "O", "y"))
    tensor = ALIASES[word]
    called = CONVOLUTION_NAMES[tensor] if is_transposed else tensor  # in the problem
    labels, sizes = names(problem, called), extents(problem, called)
    ranges = ", ".join(
        f"{label} from 0 to {size - 1}" if size else f"no {label}, because the batch is empty"
        for label, size in zip(labels, sizes, strict=True)
    )
    example = indexed(match[1], (max(size - 1, 0) // 2 for size in sizes))
    parts = [part.strip() for part in match[2].split(",")]
    if len(parts) != len(sizes) or not all(re.fullmatch(r"[-+]?[0-9]+", p) for p in parts):
        raise ConvError(
            f"an element of {tensor} must have the {len(sizes)} indices {', '.join(labels)}",
            f"got {asked!r}",
            f"Write, for example, '{example}', with {ranges}",
        )
    # An index of 30 digits is outside every tensor; int() rejects more than 4300 digits.
    index = tuple(int(part) if len(part) < 30 else -1 for part in parts)
    for label, part, value, size in zip(labels, parts, index, sizes, strict=True):
        if not 0 <= value < size:
            raise ConvError(
                f"the indices of an element must be inside its tensor, {tensor} of "
                f"{shape_text(sizes)}",
                f"{asked} has {label} = {part}",
                f"Use {ranges}",
            )
    return Element(problem, called, index, asked, is_transposed=is_transposed)


def _exact_sum(numbers: list[float]) -> float:
    try:
        return fsum(numbers)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond float64
        return float(sum(numbers))


def _whole(value: complex) -> str:
    """Return the text of a complex integer, without the negative zeros of conjugation."""
    return f"{value.real + 0:.0f}{value.imag + 0:+.0f}j"


def plain(value: float | complex | None) -> Any:
    """Return a number for JSON; a complex number becomes [real, imaginary]."""
    return [value.real, value.imag] if isinstance(value, complex) else value


def counted_large(number: int, noun: str) -> str:
    """Return a count with thousands separators and its noun: ``9,216 terms``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _slice(positions: range) -> slice:
    """Return the slice for a range of positions, also for a range that runs down to 0."""
    stop = None if positions.step < 0 and positions.stop < 0 else positions.stop
    return slice(positions.start, stop, positions.step)


def _span(positions: range) -> str:
    """Return equally spaced positions as text: ``3``, ``0 to 5`` or ``0 to 6 in steps of 2``."""
    if len(positions) == 1:
        return str(positions[0])
    step = abs(positions.step)
    every = f" in steps of {step}" if step > 1 else ""
    return f"{positions[0]} to {positions[-1]}{every}"
