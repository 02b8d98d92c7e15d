"""Number of terms of each element of dx, dw or y, computed from shapes alone.

A term is one of the products that add up to an element; products with padding do not count.
The spatial axes are independent: a map is the outer product of one list of counts per axis, times
the number of filters (dx), images (dw) or channels (y) that contribute to every position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

from cupyconv.errors import ConvError, unknown_word
from cupyconv.explaining import figure
from cupyconv.explaining.counts import MAPPED, input_counts, output_counts, tap_counts, visible
from cupyconv.explaining.shapes import listed
from cupyconv.explaining.terms import CONVOLUTION_NAMES, LETTERS, counted_large
from cupyconv.explaining.values import MOST_ELEMENTS
from cupyconv.problem import ConvProblem, counted

SHADES = " ░▒▓█"
"""Characters of a heat map, from no terms to the most terms."""

_NO_TERMS = {
    "dx": "which no tap reaches",
    "dw": "where the tap reads only padding",
    "y": "where the window covers only padding",
}
"""Clause on the positions without terms, keyed by tensor."""

_TOWARDS_PADDING = {
    "dx": "fewer towards the border",
    "dw": "fewer for taps that read padding for some outputs",
    "y": "fewer where the window reaches into the padding",
}
"""Usual reason why positions have different numbers of terms, keyed by tensor."""

Axes = tuple[tuple[str, tuple[int, ...]], ...]
"""Name of each spatial axis of a tensor, and the number of pairs of operand positions along it that
contribute to each of the tensor's positions."""


@dataclass(frozen=True)
class TermMap:
    """Number of terms of a tensor's elements, by spatial position.

    Attributes:
        tensor: "dx", "dw" or "y".
        axes: for each spatial axis, its name, and the number of pairs of operand positions along it
            that contribute to each of the tensor's positions.
        factor: number of filters (dx), images (dw) or channels (y) that contribute to a position.
        factor_name: the factor in words, such as "8 filters".
        why: reason why positions have different numbers of terms; printed only if the
            numbers differ.
        name: the layer's name of the tensor, if the layer is transposed.
    """

    tensor: str
    axes: Axes
    factor: int
    factor_name: str
    why: str = ""
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(len(counts) for _, counts in self.axes)

    def at(self, position: Sequence[int]) -> int:
        """Return the number of terms at a spatial position, which is the same for every channel."""
        pairs = zip(self.axes, position, strict=True)
        return self.factor * prod(counts[place] for (_, counts), place in pairs)

    def array(self) -> Any:
        """Return the whole map as a NumPy array of the spatial shape."""
        import numpy as np

        result: Any = np.int64(self.factor)
        for _, counts in self.axes:
            result = np.multiply.outer(result, np.asarray(counts, np.int64))
        return result

    @property
    def drawn_slice(self) -> tuple[Sequence[int], Sequence[int], int]:
        """Counts of the rows and of the columns of the drawn slice, and the count of the slice.

        A cell shows the product of the counts of its row, its column and the slice.  Of a 3-D map,
        the middle slice along the first axis is drawn.  Other maps are one slice, whose count is 1;
        a 1-D map has one row.
        """
        *outer, last = [counts for _, counts in self.axes]
        above = outer[-1] if outer else (1,)
        return above, last, prod(counts[len(counts) // 2] for counts in outer[:-1])

    @property
    def smallest(self) -> int:
        return self.factor * prod(min(counts) for _, counts in self.axes)

    @property
    def largest(self) -> int:
        return self.factor * prod(max(counts) for _, counts in self.axes)

    @property
    def zeros(self) -> int:
        """Number of positions without terms."""
        return prod(self.shape) - prod(sum(map(bool, counts)) for _, counts in self.axes)

    @property
    def verdict(self) -> str:
        """Summary of the map in one clause, without a full stop."""
        total = prod(self.shape)
        if self.smallest == self.largest:
            return f"every position has {counted_large(self.largest, 'term')}"
        if not self.zeros:
            return f"from {self.smallest:,} to {counted_large(self.largest, 'term')}: {self.why}"
        least = self.factor * prod(min(filter(None, counts)) for _, counts in self.axes)
        rest = total - self.zeros
        have = "has" if self.zeros == 1 else "have"
        if least == self.largest:
            reason = "" if self.why in _TOWARDS_PADDING.values() else f": {self.why}"
            other = "the other" if self.zeros == 1 else f"the other {self.zeros:,}"
            return (
                f"{rest:,} of {total:,} positions {'has' if rest == 1 else 'have'} "
                f"{counted_large(least, 'term')}; {other}, {_NO_TERMS[self.tensor]}, {have} "
                f"none{reason}"
            )
        return (
            f"{self.zeros:,} of {total:,} positions, {_NO_TERMS[self.tensor]}, {have} no terms; "
            f"the others have {least:,} to {counted_large(self.largest, 'term')}: {self.why}"
        )

    # -- as text -----------------------------------------------------------------------------------

    def lines(self, columns: int = 100, rows: int = 24, colour: bool = False) -> Iterator[str]:
        """Yield a heat map as text: a count for each position, with a matching shade.

        A count is the number of terms for one filter (dx), image (dw) or channel (y), as
        ``legend`` says. Of a 3-D map, only the middle slice is drawn. Of a long axis, only both
        ends are drawn; they show the border and the pattern.

        Args:
            columns, rows: largest width in characters and largest height in lines.
            colour: use a terminal's background colours instead of shade characters.
        """
        above, last, share = self.drawn_slice
        most = max(above) * max(last) * share
        width = max(len(str(most)), len(str(len(last) - 1))) + 2
        across = visible(len(last), max((columns - 6) // width, 4))
        # A shade follows each count, so a space follows each column number.
        header = ["".rjust(width) if c is None else f"{c:>{width - 1}} " for c in across]
        yield f"     {''.join(header)}".rstrip()
        for row in visible(len(above), max(rows - 1, 4)):
            if row is None:
                yield "   ..."
                continue
            cells = (
                "..".rjust(width)
                if column is None
                else _cell(above[row] * last[column] * share, most, width, colour)
                for column in across
            )
            yield f"{row if len(self.axes) > 1 else '':>4} {''.join(cells)}".rstrip()

    def svg(self) -> str:
        """Return the map as an SVG picture; only both ends of a long axis are drawn."""
        return figure.map_svg(self)

    def _repr_svg_(self) -> str:
        return self.svg()

    @property
    def legend(self) -> str:
        """Caption of ``lines``: the axes of the grid and the meaning of its numbers."""
        names = [name for name, _ in self.axes]
        if self.tensor != "dx":  # the axis names are those of x, and dx has the axes of x
            names = list(LETTERS["filter" if self.tensor == "dw" else "output"][len(names)])
        grid = f"along {names[0]}"
        if len(names) > 1:
            grid = f"rows are {names[-2]}, columns {names[-1]}"
        slice_ = f" of the slice {names[0]} = {len(self.axes[0][1]) // 2}"
        each = f" for each of the {self.factor_name}" if self.factor != 1 else ""
        return (
            f"{self.name or self.tensor}{slice_ if len(names) == 3 else ''}: "
            f"{grid}; number of terms{each}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the map as plain data, with one list of counts per axis."""
        return {
            "tensor": self.name or self.tensor,
            "axes": {name: list(counts) for name, counts in self.axes},
            "factor": self.factor,
            "factor_is": self.factor_name,
            "smallest": self.smallest,
            "largest": self.largest,
            "positions_without_terms": self.zeros,
            "verdict": self.verdict,
        }


def term_map(problem: ConvProblem, tensor: str = "dx", is_transposed: bool = False) -> TermMap:
    """Return the number of terms of each element of dx, dw or y.

    Args:
        problem: the layer.
        tensor: "dx", "dw" or "y"; "x" stands for dx, "w" and "dF" for dw, "O" for y.
        is_transposed: whether the tensor is that of the transposed layer that reverses the problem.

    Raises:
        ConvError: the tensor is unknown, or an axis is too long to count.
    """
    word = tensor.lower() if isinstance(tensor, str) else ""
    mapped = {"x": "dx", "w": "dw", "df": "dw", "o": "y"}.get(word, word)
    if mapped not in MAPPED:
        raise unknown_word("map", tensor, MAPPED)
    for axis in problem.axes:
        size = max(axis.input, axis.output, axis.filter)
        if size > MOST_ELEMENTS:
            raise ConvError(
                f"an axis must have at most {MOST_ELEMENTS:,} positions to be counted one by one",
                f"it has {size:,}",
                "Omit the map, or use a smaller layer with the same stride and taps",
                axis=axis.name,
            )
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    name, side = (mapped, "output") if is_transposed else ("", "input")
    mapped = CONVOLUTION_NAMES[mapped] if is_transposed else mapped
    count, factor, factors = {
        "dx": (input_counts, filters, counted(filters, "filter")),
        "dw": (tap_counts, problem.N, counted(problem.N, "image")),
        "y": (output_counts, channels, counted(channels, f"{side} channel")),
    }[mapped]
    axes = tuple((axis.name, tuple(count(axis))) for axis in problem.axes)
    return TermMap(mapped, axes, factor, factors, _why(mapped, problem, axes), name)


def _why(tensor: str, problem: ConvProblem, axes: Axes) -> str:
    """Return the reason why positions of a tensor have different numbers of terms."""
    if tensor != "dx":
        return _TOWARDS_PADDING[tensor]
    strided, dilated = [], []
    for axis, (name, counts) in zip(problem.axes, axes, strict=True):
        # Away from the border, an input has one term for each tap of its stride phase, which is
        # the input's position in the padded input modulo the stride.
        uneven = gcd(axis.stride, axis.dilation) > 1 or axis.filter % axis.stride > 0
        if uneven and min(axis.stride, axis.output) > 1 and min(counts) < max(counts):
            strided.append((name, axis))
        elif not _rises_then_falls(counts):
            dilated.append((name, axis))
    reasons = []
    if strided:
        names = listed([name for name, _ in strided])
        reasons.append(
            f"uneven along {names}, because the stride does not divide the taps evenly among the "
            "positions (the checkerboard pattern of strided layers)"
        )
    if dilated:
        names = listed([name for name, _ in dilated])
        axis = dilated[0][1]
        reasons.append(
            f"uneven along {names}, because the taps of a window are {axis.dilation} apart, and "
            f"{'one window leaves' if axis.output == 1 else f'{axis.output:,} windows leave'} gaps"
        )
    return "; ".join(reasons) or _TOWARDS_PADDING[tensor]


def _rises_then_falls(counts: Sequence[int]) -> bool:
    """Return whether the counts of an axis never rise again after they have fallen."""
    top = counts.index(max(counts))
    rising, falling = counts[: top + 1], counts[top:]
    return list(rising) == sorted(rising) and list(falling) == sorted(falling, reverse=True)


def _cell(value: int, most: int, width: int, colour: bool) -> str:
    share = value / most if most else 0.0
    text = str(value) if value else "·"
    if colour:
        # Terminal colours of background and text: the background is deeper blue for more terms.
        steps = ((255, 16), (195, 16), (153, 16), (111, 16), (69, 231), (26, 231))
        back, front = steps[min(int(share * 5.999), 5)]
        return f"\x1b[48;5;{back}m\x1b[38;5;{front}m{text:>{width - 1}} \x1b[0m"
    shade = SHADES[-(-int(share * 1000) * (len(SHADES) - 1) // 1000)] if value else " "
    return f"{text:>{width - 1}}{shade}"
