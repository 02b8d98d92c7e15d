"""``cupyconv.explain``: reasons for the shape and the values of every tensor of a layer."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyconv import arrays, files
from cupyconv.errors import ConvError, ConvTypeError, shown
from cupyconv.explaining import adjoints, maps, shapes, terms, translate
from cupyconv.explaining import transposed as transposed_layer
from cupyconv.explaining import values as numbers
from cupyconv.explaining.adjoints import AdjointAxis
from cupyconv.explaining.shapes import interval_dict
from cupyconv.explaining.terms import LETTERS, Element, counted_large
from cupyconv.explaining.translate import Translation
from cupyconv.explaining.values import OPERANDS, RESULTS, Kind, Values
from cupyconv.markup import Block, Document, Paragraph, Section, Table, Verbatim
from cupyconv.problem import (
    PASSES,
    ConvAxis,
    ConvProblem,
    counted,
    integer,
    require_problem,
    shape_text,
)

if TYPE_CHECKING:
    from cupyconv.explaining.page import Page

PASS_GIVES = {"forward": "y", "backprop_input": "dx", "backprop_filter": "dw"}

_DRAWN_CHANNELS = 6

MOST_PRINTED = 300
"""Largest number of elements of all tensors together for which all values are printed (chosen)."""


def explain(
    problem: ConvProblem,
    *,
    x: Any = None,
    w: Any = None,
    dy: Any = None,
    y: Any = None,
    dx: Any = None,
    dw: Any = None,
    title: str = "",
    values: Kind | None = "normal",
    seed: int = 0,
    large: bool = False,
    transposed: bool = False,
) -> Explanation:
    """Explain the shape and the values of every tensor of a layer.

    Args:
        problem: the layer.
        x, w, dy: NumPy or CuPy arrays in the problem's formats; random arrays by default.
        y, dx, dw: results to show next to the sums of their terms; computed by default.
        title: first line of the explanation.
        values: kind of random numbers, "normal" or "integers", for operands that are not passed;
            None for an explanation without values.
        seed: seed of the random numbers, an integer from 0 to 2^63 - 1.
        large: compute the values whatever the size of the layer; by default, the explanation
            omits values that take more than a few seconds, and says so.
        transposed: also explain the transposed layer that reverses the problem: the size of the
            layer's result, and the name of each of the layer's tensors in the problem.

    Returns:
        an Explanation: text with str() or print(), HTML in Jupyter, plain data with ``to_dict()``.
        ``element("dF[0,0,0,0]")`` lists the terms of one element of dw, ``map("dx")`` counts the
        terms of every element of dx, ``code("pytorch")`` returns the layer in another framework,
        and ``svg()`` and ``page()`` draw the layer.

    Raises:
        ConvTypeError: ``problem`` is not a ConvProblem, an array has an unsupported type, or the
            title is not a string.
        ConvError: the shape of an array differs from the problem's, ``values`` is unknown, or the
            seed is negative.

    >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 5, 100, 100), (10, 5, 5, 5)))
    >>> print(explanation.text().splitlines()[0])
    x 1x5x100x100 * w 10x5x5x5 -> y 1x10x96x96
    """
    require_problem("explain", problem)
    if not isinstance(title, str):
        raise ConvTypeError(f"title must be a string: got {shown(title)}. Omit it for no title")
    if values is not None:
        numbers.require_kind("values", values)
    seed = integer("seed", seed)
    if seed < 0:
        raise ConvError("seed must be at least 0", f"got {seed}", "Use 0")
    data = _checked_arrays(problem, {"x": x, "w": w, "dy": dy, "y": y, "dx": dx, "dw": dw})
    known = Values(problem, data, values, seed, bool(large))
    return Explanation(problem, title, known, bool(transposed))


def _checked_arrays(problem: ConvProblem, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the passed tensors as arrays, after checking that they have the problem's shapes.

    Raises:
        ConvError, ConvTypeError: an array is invalid, as in ``explain``.
    """
    expected = {
        "x": problem.input_shape,
        "dx": problem.input_gradient_shape,
        "w": problem.filter_shape,
        "dw": problem.filter_gradient_shape,
        "y": problem.output_shape,
        "dy": problem.output_shape,
    }
    passed = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    data = {name: arrays.take(name, tensor)[0] for name, tensor in passed.items()}
    for name, array in data.items():
        shape = tuple(array.shape)
        if shape != expected[name]:
            raise ConvError(
                f"{name} must have the shape of the problem's {name}",
                f"got {shape_text(shape)}, the problem has {shape_text(expected[name])}",
                f"Pass an array of {shape_text(expected[name])}, or make a problem for this array",
            )
        if array.dtype.kind == "c" and not problem.is_complex:
            raise ConvTypeError(
                f"{name} is complex ({array.dtype}), but the problem is {problem.dtype}. "
                f"Make the problem with dtype={str(array.dtype)!r}"
            )
    return data


@dataclass(frozen=True)
class Explanation:
    """Explanation of a layer, returned by ``explain``.

    Attributes:
        problem: the layer.
        title: line above the explanation.
        data: values of x, w, dy, y, dx and dw by name, as far as they are known; random operands
            and results are computed when they are first read.
        is_transposed: whether the transposed layer is explained, too.

    >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 2, 7), (4, 2, 3), stride=2))
    >>> explanation.question, explanation.middle
    ('dx', 'dw[2,1,1]')
    >>> [translation.framework for translation in explanation.translations]
    ['TensorFlow', 'PyTorch', 'JAX', 'ONNX']
    """

    problem: ConvProblem
    title: str = ""
    data: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    is_transposed: bool = False

    # -- parts -------------------------------------------------------------------------------------

    def element(self, name: str, *, x: Any = None, w: Any = None, dy: Any = None) -> Element:
        """Explain one element of y, dx or dw as the sum of its terms.

        Args:
            name: tensor and indices, such as "dF[3,1,0,2]" (or dw), "dX[0,0,5,5]" or
                "O[0,0,1,1]" (or y).
            x, w, dy: arrays to use instead of those passed to ``explain``.

        Raises:
            ConvError: the element does not exist; the message lists the valid indices.
            ConvError, ConvTypeError: an array is invalid, as in ``explain``.

        >>> x, w, dy = np.arange(4.0).reshape(1, 1, 4), np.ones((1, 1, 3)), np.ones((1, 1, 2))
        >>> explanation = cupyconv.explain(cupyconv.ConvProblem(x.shape, w.shape), x=x, w=w, dy=dy)
        >>> for line in str(explanation.element("dw[0,0,1]")).splitlines()[11:14]:
        ...     print(line.strip())
        dy[0,0,0] * x[0,0,1]  =  1 *  1 =   1
        dy[0,0,1] * x[0,0,2]  =  1 *  2 =   2
        sum of 2 products = 3
        """
        changed = _checked_arrays(self.problem, {"x": x, "w": w, "dy": dy})
        element = terms.parse(self.problem, name)
        data = self.data
        if changed:
            # Drop the results, which belong to the previous operands.
            data = {**{key: data[key] for key in OPERANDS if key in data}, **changed}
        return Element(self.problem, element.tensor, element.index, element.asked, data)

    def map(self, tensor: str = "dx") -> maps.TermMap:
        """Return the number of terms of each element of dx, dw or y.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.map("dx").array().tolist()
        [1, 2, 3, 2, 1]
        """
        return maps.term_map(self.problem, tensor)

    def code(self, framework: str) -> Translation:
        """Return the layer as a complete program in "tensorflow", "pytorch", "jax" or "onnx".

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.code("pytorch").call
        'F.conv1d(X, W, padding=0, stride=1, dilation=1, groups=1)'
        """
        return translate.translation(self.problem, framework)

    def svg(self, element: str = "") -> str:
        """Return a picture of the layer and its gradients.

        Args:
            element: element to mark, such as "dF[3,1,0,2]"; by default, one element of each result.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.svg()[:4], "dw[0,0,1]" in explanation.svg("dF[0,0,1]")
        ('<svg', True)
        """
        from cupyconv.explaining import figure

        return figure.svg(self, self._marked(element))

    def page(self, element: str = "") -> str:
        """Return an interactive HTML page, which works offline.

        Args:
            element: element to show first, such as "dF[3,1,0,2]".

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.page("dw[0,0,1]")[:15]
        '<!doctype html>'
        """
        from cupyconv.explaining import page

        return page.html(self, self._marked(element))

    def _marked(self, element: str) -> Element | None:
        unmarked = element is None or (isinstance(element, str) and not element)
        return None if unmarked else self.element(element)

    def show(self, element: str = "") -> Page:
        """Show the page: below the cell in Jupyter, otherwise in a browser.

        Args:
            element: element to show first, such as "dF[3,1,0,2]".

        Raises:
            ConvError: no browser was found.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> page = explanation.show("dw[0,0,1]")  # opens a browser
        """
        from cupyconv.explaining import page

        content = self.page(element)
        if not page.in_notebook():
            page.open_in_browser(content)
        return page.Page(content)

    def save(self, path: str | Path, element: str = "") -> None:
        """Write ``svg()`` or ``page()`` to a .svg or .html file.

        Raises:
            ConvError: the suffix is not .svg, .html or .htm.
            OSError: the file cannot be written.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.save("layer.svg")
        >>> from pathlib import Path
        >>> Path("layer.svg").read_text()[:4]
        '<svg'
        """
        path = Path(path)
        if path.suffix.lower() not in (".svg", ".html", ".htm"):
            raise ConvError(
                "the file of an explanation must end in .svg or .html",
                f"got {path}",
                "Use one of these suffixes",
            )
        content = (self.svg if path.suffix.lower() == ".svg" else self.page)(element)
        files.put(path, content.encode())

    # -- text --------------------------------------------------------------------------------------

    @cached_property
    def middle(self) -> str:
        """Name of the example element of dw, whose indices are in the middle of every axis."""
        sizes = terms.extents(self.problem, "dw")
        return f"dw[{','.join(str(size // 2) for size in sizes)}]"

    @property
    def question(self) -> str:
        """Name of the gradient that is explained first: "dw" or "dx".

        For a layer without stride, dilation and padding, the channels of dw are harder to
        understand than the size of dx. For other layers, the size of dx is harder.
        """
        plain = all(
            axis.stride == axis.dilation == 1 and not axis.pad_before and not axis.pad_after
            for axis in self.problem.axes
        )
        return "dw" if plain else "dx"

    @cached_property
    def document(self) -> Document:
        """All sections of the explanation, as a document."""
        channels, sizes = self._channels(), self._sizes()
        sections = [
            *((channels, sizes) if self.question == "dw" else (sizes, channels)),
            self._tensors(),
            *self._axes(),
            self._size_options(),
            self._input_gradient(),
            self._filter_gradient(),
            self._products(),
            self._counts(),
            self._elsewhere(),
        ]
        if self._is_small:
            sections.insert(0, self._numbers())
        sections.insert(0, self._head())
        if self.is_transposed:
            sections.insert(0, transposed_layer.section(self.problem))
        return Document(self.title, tuple(sections))

    def text(self, width: int = 100) -> str:
        """Return the explanation in lines of at most ``width`` characters.

        Programs and formulas are not wrapped.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> print(explanation.text(width=60).splitlines()[0])
        x 1x1x5 * w 1x1x3 -> y 1x1x3
        """
        return self.document.text(width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """Return a figure and the text for Jupyter; an untrusted notebook shows only the text."""
        try:
            figure = self.svg()
        except ConvError:  # the layer is too large to draw
            return self.document.html()
        # Use an image: in untrusted notebooks, the sanitizer removes an <svg> but keeps its text.
        encoded = base64.b64encode(figure.encode()).decode()
        image = (
            f'<img src="data:image/svg+xml;base64,{encoded}" style="max-width:100%" '
            f'alt="Figure of the layer; the text below describes it."/>'
        )
        return f"<div>{image}{self.document.html()}</div>"

    def _head(self) -> Section:
        problem = self.problem
        head = (
            f"x {shape_text(problem.input_shape)} * w {shape_text(problem.filter_shape)} -> "
            f"y {shape_text(problem.output_shape)}"
        )
        x, w, y = (f"{t}[{','.join(terms.names(problem, t))}]" for t in ("x", "w", "y"))
        indices = f"{x}, {w} and {y}"
        grouped = terms.GROUPED if problem.groups > 1 else ""
        return Section(
            "The convolution that the transposed layer reverses" if self.is_transposed else "",
            (
                Paragraph(head),
                Paragraph(shapes.settings(problem)),
                Paragraph(
                    f"Indices are written {indices}, whatever the memory order.{grouped} dy, dx "
                    "and dw are the gradients of the loss with respect to y, x and w (dE/dO, dE/dX "
                    "and dE/dF)."
                ),
            ),
        )

    @property
    def _is_small(self) -> bool:
        """Whether all tensors are small enough to print, and to check the sums by hand."""
        shapes = (terms.extents(self.problem, tensor) for tensor in RESULTS)
        count = 2 * sum(map(prod, shapes))
        return 0 < count <= MOST_PRINTED and all(name in self.data for name in RESULTS)

    def _numbers(self) -> Section:
        """Return all values of all tensors, plane by plane."""
        blocks = [
            Verbatim("\n".join(numbers.planes(self.problem, tensor, self.data[tensor])))
            for tensor in (*OPERANDS, *RESULTS)
        ]
        drawn = f" ({self.data.source})" if isinstance(self.data, Values) else ""
        text = f"Values of x, w and dy{drawn}, and of the results that the library computes."
        return Section("All values", (Paragraph(text), *blocks))

    def _channels(self) -> Section:
        """Return the section that explains how the channels of x and dy give dw."""
        problem = self.problem
        C, K, G = problem.C, problem.K, problem.groups
        channels, filters = C // G, K // G
        x, dy, taps = (
            shape_text(sizes)
            for sizes in (problem.input_sizes, problem.output_sizes, problem.filter_sizes)
        )
        pairs = K * channels
        title = (
            f"How can x with {counted(C, 'channel')} and dy with {counted(K, 'channel')} be "
            "convolved?"
            if C != K
            else f"How the {C} channels of x and the {K} channels of dy give dw"
            if C > 1
            else "How x and dy give dw"
        )
        notes = []
        if G > 1:
            notes.append("where c is the channel's number within the group of k")
        if max(problem.stride) > 1:
            notes.append(f"with dy dilated by the stride {shapes.one(problem.stride)}")
        if problem.N > 1:
            notes.append("summed over the images")
        source = "conj(x[c])" if problem.is_complex else "x[c]"
        rule = f"dw[k,c] = correlate({source}, dy[k])" + "".join(f",\n  {n}" for n in notes)
        first = (
            "x and dy are not convolved as two stacks of channels. Each channel of x is correlated "
            "with each channel of dy, one pair at a time: slide without a flip, multiply, add. "
            "(Frameworks call this a convolution.) Each pair fills its own slice of dw:"
        )
        within = f", each within one of the {G} groups" if G > 1 else ""
        grid: list[Block] = [
            Verbatim(f"{rule}\n{x} correlated with {dy} gives {taps}"),
            Paragraph(
                f"There {'is' if pairs == 1 else 'are'} {K} x {channels} = "
                f"{counted_large(pairs, 'pair')}{within}. {self._filled(pairs)} Across channels, "
                "dw is an outer product:"
            ),
            Verbatim(self._grid()),
            Paragraph(
                "Nothing is tiled, broadcast or averaged over channels, and no information is "
                "lost. The forward pass uses w[k,c] in one place only: it adds correlate(x[c], "
                "w[k,c]) to y[k]. Therefore the gradient of w[k,c] depends on no other channel of "
                "x and on no other channel of dy."
            ),
            Paragraph(self._sums(channels, filters)),
        ]
        if problem.N:
            grid += self._example()
        return Section(title, (Paragraph(first), *grid))

    def _filled(self, pairs: int) -> str:
        """Return sentences that compare the values of all pairs with the shape of w."""
        sizes, shape = self.problem.filter_sizes, shape_text(self.problem.filter_shape)
        values, count = shapes.sized(sizes, "value"), pairs * prod(sizes)
        fill = f"which {'fills' if count == 1 else 'fill'} the shape of w, {shape}, exactly"
        if pairs == 1:
            return f"It gives {values}, {fill}."
        return f"Each pair gives {values}. Together they give {count:,} values, {fill}."

    def _sums(self, channels: int, filters: int) -> str:
        where = " of the group" if self.problem.groups > 1 else ""
        if channels == filters == 1:
            return (
                f"No tensor sums over channels: y[k] reads only one input channel{where}, "
                f"and only one filter{where} reads x[c]. That channel receives dy[k] unchanged."
            )
        forward = (
            f"y[k] is a sum over the {channels} input channels{where}. A sum passes its gradient "
            "unchanged to each of its terms, so all these channels receive the same dy[k]."
            if channels > 1
            else f"Neither does y[k]: it reads only one input channel{where}, which receives dy[k] "
            "unchanged."
        )
        backward = (
            f"dx[c] is a sum over the {filters} filters{where}, because all of them read x[c]."
            if filters > 1
            else f"dx[c] involves no such sum, because only one filter{where} reads x[c]."
        )
        return f"dw involves no sum over channels. {forward} {backward}"

    def _grid(self) -> str:
        """Return the grid of channel pairs as text."""
        problem = self.problem
        channels, filters = problem.C // problem.groups, problem.K // problem.groups
        across = maps.visible(channels, _DRAWN_CHANNELS)
        down = maps.visible(filters, _DRAWN_CHANNELS)
        rows = [["", *("..." if c is None else f"x[{c}]" for c in across)]]
        for k in down:
            if k is None:
                rows.append(["...", *("" for _ in across)])
                continue
            cells = ["..." if c is None else f"dw[{k},{c}]" for c in across]
            rows.append([f"dy[{k}]", *cells])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if problem.groups > 1:
            lines.append(
                f"(the first of {problem.groups} groups; every group has the same structure)"
            )
        return "\n".join(lines)

    def _example(self) -> list[Block]:
        """Return the example element of dw with its terms."""
        element = self.element(self.middle)
        _, own = element.term(0) if element.count else (None, (0, 0))
        channel = own[1]
        if not element.count:
            return [Paragraph(f"For example, {element.name}: {element.conclusion}")]
        operands = f"x[{channel}] and dy[{element.index[0]}]"
        terms_ = counted_large(element.count, "product")
        return [
            Paragraph(f"For example, {element.name} uses {operands} only. It sums {terms_}:"),
            Verbatim("\n".join(element.lines())),
            *element.beside(),
        ]

    def _sizes(self) -> Section:
        """Return the section that explains the size of dx."""
        problem = self.problem
        dy, x = shape_text(problem.output_sizes), shape_text(problem.input_sizes)
        title = f"Why is dx {x} when dy is {dy}?" if dy != x else f"Why dx is {x}"
        paragraphs = [
            Paragraph(
                f"dx has one value for each element of x, so it has the shape of x, "
                f"{shape_text(problem.input_shape)}, for any stride, padding and dilation. "
                "(Likewise, dw has the shape of w.)"
            )
        ]
        forward = _clauses(problem, lambda axis: f"{axis.formula} {_because(axis)}")
        paragraphs.append(
            Paragraph(
                f"The forward pass turns {shapes.sized(problem.input_sizes, 'input')} into "
                f"{shapes.sized(problem.output_sizes, 'output')}: {forward}."
            )
        )
        wide = [axis for axis in problem.axes if len(axis.valid_input_sizes) > 1]
        if wide:
            several = _clauses(
                problem, lambda axis: shapes.sizes_that_give(axis.valid_input_sizes, axis.output)
            )
            paragraphs.append(
                Paragraph(
                    f"dy and w do not determine the size of dx: {several}. A stride above 1 rounds "
                    "several input sizes to the same output size. This is why Conv2DBackpropInput "
                    f"and similar functions take input_sizes. They return dx of that size, here "
                    f"{x}, and reject sizes that do not give this dy."
                )
            )
            if moved := _clauses(problem, _moved):
                paragraphs.append(
                    Paragraph(
                        "Under SAME, the input size also decides the padding, and so where the "
                        f"windows start: {moved}. Therefore dx for another input size is not this "
                        "dx padded or cropped: its values differ."
                    )
                )
        else:
            strided = [axis for axis in problem.axes if axis.stride > 1]
            only = (
                "With this padding, only one input size of at least 1 gives this output size"
                if strided
                else "With stride 1, each output size belongs to one input size only"
            )
            paragraphs.append(
                Paragraph(
                    f"{only}, so dy and w determine the size of dx: {x}. Conv2DBackpropInput and "
                    "similar functions take input_sizes nevertheless, because with "
                    f"{'less padding' if strided else 'a larger stride'} several sizes would fit."
                )
            )
        dead = [axis for axis in problem.axes if axis.unread_after]
        if dead:
            rows = "; ".join(_trailing(axis) for axis in dead)
            paragraphs.append(
                Paragraph(
                    f"Part of x is never read: {rows}. These inputs do not affect y, so their "
                    "gradient is exactly zero. dx contains these zeros."
                )
            )
        return Section(title, tuple(paragraphs))

    def _tensors(self) -> Section:
        rows = tuple(
            (entry.tensor, shape_text(entry.shape), entry.reason)
            for entry in shapes.reasons(self.problem)
        )
        return Section("Each tensor", (Table(("tensor", "shape", "why"), rows),))

    def _axes(self) -> list[Section]:
        sections = []
        for entry, axis in zip(
            shapes.axis_reasons(self.problem), _representative_axes(self.problem), strict=True
        ):
            rows = (
                ("padding", entry.padding),
                ("output size", entry.output),
                ("window", _window(self.problem, axis)),
                ("input sizes", f"{entry.input_sizes}{_interval(axis)}"),
                ("unread inputs", entry.unread),
            )
            title = f"{'Axis' if len(entry.axes) == 1 else 'Axes'} {shapes.listed(entry.axes)}"
            sections.append(Section(title, (Table(("", ""), rows),)))
        return sections

    def _size_options(self) -> Section:
        rows = [
            (
                "cupyconv",
                f"conv_backprop_input({self.problem.input_shape}, w, dy, ...)",
            ),
            *((entry.framework, entry.size) for entry in self.translations),
        ]
        title = "How other frameworks specify the size of dx"
        return Section(title, (Table(("", ""), tuple(rows)),))

    def _input_gradient(self) -> Section:
        problem = self.problem
        axes = adjoints.input_gradient_axes(problem)
        names = "".join(axis.name for axis in problem.axes)
        spread = (
            f"dy with {_zeros(problem)} between neighbours" if max(problem.stride) > 1 else "dy"
        )
        filters = "conj(w)" if problem.is_complex else "w"
        flip = f"{filters} flipped along {shapes.listed(names)}, with its channel axes swapped"
        dilation = f", dilation {shapes.one(problem.dilation)}" if max(problem.dilation) > 1 else ""
        lines = [
            "dx = correlate(",
            f"  {spread},",
            f"  {flip},",
            f"  stride 1{dilation}, padding {shapes.pairs([axis.padding for axis in axes])})",
        ]
        table = Table(("", "", ""), tuple(_adjoint_rows(problem, axes, self._dx_rows)))
        return Section("dx as a convolution", (Verbatim("\n".join(lines)), *_crops(axes), table))

    def _dx_rows(self, axis: ConvAxis, adjoint: AdjointAxis) -> tuple[tuple[str, str], ...]:
        rule = adjoint.rule
        before, after = adjoint.formulas
        return (
            ("input", _dy_text(axis, rule.input)),
            ("pad before", f"span of w - 1 - forward pad before = {before}"),
            ("pad after", f"size of x + span of w - 1 - span of dy - pad before = {after}"),
            ("output", f"{rule.formula}, the size of x"),
        )

    def _filter_gradient(self) -> Section:
        problem = self.problem
        axes = adjoints.filter_gradient_axes(problem)
        second = (
            f"dy[k], dilated by {shapes.one(problem.stride)},"
            if max(problem.stride) > 1
            else "dy[k]"
        )
        lines = [
            "dw[k,c] = correlate(",
            "  conj(x[c])," if problem.is_complex else "  x[c],",
            f"  {second} as the filter,",
            f"  stride {shapes.one(problem.dilation)}, "
            f"padding {shapes.pairs([axis.padding for axis in axes])})",
        ]
        roles = (
            "Stride and dilation swap roles. From one element of dw to the next, the window on x "
            f"moves by the dilation, {shapes.one(problem.dilation)}. From one element of dy to the "
            f"next, the element of x that it multiplies moves by the stride, "
            f"{shapes.one(problem.stride)}."
        )
        if problem.N > 1:
            roles += f" Images play the role of channels: the sum is over the {problem.N} images."
        table = Table(("", "", ""), tuple(_adjoint_rows(problem, axes, self._dw_rows)))
        return Section(
            "dw as a convolution",
            (Verbatim("\n".join(lines)), Paragraph(roles), *_crops(axes), table),
        )

    def _dw_rows(self, axis: ConvAxis, adjoint: AdjointAxis) -> tuple[tuple[str, str], ...]:
        span = adjoint.rule.effective_filter
        before, after = adjoint.formulas
        return (
            ("filter", _dy_text(axis, span)),
            ("pad before", before),
            ("pad after", f"span of w - 1 + span of dy - size of x - pad before = {after}"),
            ("output", f"{adjoint.rule.formula}, the size of w"),
        )

    def _products(self) -> Section:
        problem = self.problem
        rank = problem.spatial_rank
        h, r, p = (",".join(LETTERS[kind][rank]) for kind in ("input", "filter", "output"))
        meaning = {
            "forward": f"({'n,' + p}) x k x ({'c,' + r})",
            "backprop_input": f"({'n,' + h}) x c x ({'k,' + r})",
            "backprop_filter": f"k x ({'c,' + r}) x ({'n,' + p})",
        }
        rows = []
        for pass_ in PASSES:
            view = problem.gemm(pass_)
            times = f"{view.groups} products of " if view.groups > 1 else ""
            sizes = f"{times}{view.gemm_m} x {view.gemm_n} x {view.gemm_k}"
            rows.append((pass_, PASS_GIVES[pass_], sizes, meaning[pass_]))
        blocks: list[Block] = [
            Table(("pass", "result", "rows x columns x depth", "axes"), tuple(rows))
        ]
        phases = prod(problem.stride)
        if 1 < phases <= 64:
            depths = sorted(view.gemm_k for view in problem.phase_gemms)
            listed = _depths_text(depths)
            blocks.append(
                Paragraph(
                    "In backprop_input, only some taps contribute to each row. Grouped by position "
                    f"modulo the stride, the rows form {phases} smaller products. {listed}, "
                    f"instead of {problem.gemm('backprop_input').gemm_k}."
                )
            )
        return Section("Each pass as a matrix product", tuple(blocks))

    def _counts(self) -> Section:
        rows = []
        for tensor in maps.MAPPED:
            try:
                verdict = self.map(tensor).verdict
            except ConvError:
                verdict = "too many positions to count one by one"
            rows.append((tensor, verdict))
        return Section("Number of terms of each element", (Table(("", ""), tuple(rows)),))

    @cached_property
    def translations(self) -> tuple[Translation, ...]:
        """The layer in every supported framework."""
        return translate.translations(self.problem)

    def _elsewhere(self) -> Section:
        rows = []
        for entry in self.translations:
            rows.append((entry.framework, entry.call))
            rows += [("", f"- {flag}") for flag in entry.flags]
        option = "" if self.is_transposed else "pass --code pytorch on the command line, or "
        text = (
            "Each entry is the forward pass of a program, with notes on limits of the framework. "
            f"For the whole program, {option}read explanation.code('pytorch').program in Python."
        )
        return Section(
            "The same layer in other frameworks", (Paragraph(text), Table(("", ""), tuple(rows)))
        )

    # -- data --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data, ready for JSON.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.to_dict()["shapes"]["dw"]
        [1, 1, 3]
        """
        problem = self.problem
        explained = shapes.reasons(problem)
        backward = adjoints.input_gradient_axes(problem)
        weights = adjoints.filter_gradient_axes(problem)
        return {
            "title": self.title,
            "shapes": {entry.tensor: list(entry.shape) for entry in explained},
            "reasons": {entry.tensor: entry.reason for entry in explained},
            "answers": {
                "channels": _plain(self._channels()),
                "sizes": _plain(self._sizes()),
            },
            "axes": [
                {
                    "name": axis.name,
                    "input": axis.input,
                    "filter": axis.filter,
                    "effective_filter": axis.effective_filter,
                    "stride": axis.stride,
                    "dilation": axis.dilation,
                    "padding": [axis.pad_before, axis.pad_after],
                    "output": axis.output,
                    "formula": axis.formula,
                    "valid_input_sizes": interval_dict(axis.valid_input_sizes),
                    "above_smallest": axis.input - axis.first_input_size_for(axis.output),
                    "unread_inputs": axis.unread_inputs,
                    "unread_after": axis.unread_after,
                    "input_gradient": _adjoint_dict(dx),
                    "filter_gradient": _adjoint_dict(dw),
                }
                for axis, dx, dw in zip(problem.axes, backward, weights, strict=True)
            ],
            "passes": [
                {"pass": pass_, "gives": PASS_GIVES[pass_], **problem.gemm(pass_)._asdict()}
                for pass_ in PASSES
            ],
            "frameworks": [entry.to_dict() for entry in self.translations],
            "transposed": transposed_layer.to_dict(problem) if self.is_transposed else None,
        }


# -- parts of sentences ----------------------------------------------------------------------------


def _dy_text(axis: ConvAxis, span: int) -> str:
    """Return the number of elements of dy along an axis, and their span after dilation."""
    elements = counted(axis.output, "element")
    if axis.stride == 1:
        return f"{elements} of dy"
    return f"{elements} of dy, dilated to a span of ({axis.output} - 1)*{axis.stride} + 1 = {span}"


def _zeros(problem: ConvProblem) -> str:
    counts = [axis.stride - 1 for axis in problem.axes]
    if len(set(counts)) == 1:
        return counted(counts[0], "zero")
    parts = [f"{count} along {axis.name}" for axis, count in zip(problem.axes, counts, strict=True)]
    return f"zeros ({', '.join(parts)})"


def _representative_axes(problem: ConvProblem) -> list[ConvAxis]:
    """Return the first axis of each entry of ``axis_reasons``, to represent the entry."""
    firsts = [entry.axes[0] for entry in shapes.axis_reasons(problem)]
    by_name = {axis.name: axis for axis in problem.axes}
    return [by_name[name] for name in firsts]


def _clauses(problem: ConvProblem, say: Callable[[ConvAxis], str]) -> str:
    """Join the clauses of all axes; equal clauses are merged, and empty clauses are omitted."""
    parts: dict[str, list[str]] = {}
    for axis in problem.axes:
        parts.setdefault(say(axis), []).append(axis.name)
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(
        f"along {shapes.listed(names)}, {text}" for text, names in parts.items() if text
    )


def _moved(axis: ConvAxis) -> str:
    """Return a clause on an input size with the same output size but other padding, if any."""
    for size in (axis.valid_input_sizes[0], axis.valid_input_sizes[-1]):
        other = axis.of_input(size)
        if other.pad_before != axis.pad_before:
            pads, other_pads = ((each.pad_before, each.pad_after) for each in (axis, other))
            return (
                f"an input of size {axis.input} is padded by {pads}, an input of size {size} by "
                f"{other_pads}"
            )
    return ""


def _window(problem: ConvProblem, axis: ConvAxis) -> str:
    rank = problem.spatial_rank
    place = [a.name for a in problem.axes].index(axis.name)
    h, r, p = (LETTERS[kind][rank][place] for kind in ("input", "filter", "output"))
    last = (axis.output - 1) * axis.stride - axis.pad_before
    taps = "the tap" if axis.filter == 1 else "the taps"
    first_, last_ = (
        _ends(begin, begin + axis.effective_filter - 1) for begin in (-axis.pad_before, last)
    )
    covers = (
        f"the only window covers {first_}"
        if axis.output == 1
        else f"the first window covers {first_}, the last window covers {last_}"
    )
    return (
        f"output {p} reads input {terms.position_text(axis, h, r, p)} for {taps} "
        f"{r} = {_ends(0, axis.filter - 1)}: {covers}"
    )


def _ends(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _interval(axis: ConvAxis) -> str:
    if axis.stride == 1:
        return ""
    first = axis.first_input_size_for(axis.output)
    terms_ = f"({axis.output} - 1)*{axis.stride}"
    if axis.padding_mode.startswith("same"):
        lowest = f"{terms_} + 1"
    else:
        total = axis.pad_before + axis.pad_after
        lowest = f"{terms_} + {axis.effective_filter}" + (f" - {total}" if total else "")
    if first < 1:
        return (
            f". Stride {axis.stride} rounds {axis.stride} sizes to this output size, starting at "
            f"{lowest} = {first}, but sizes below 1 are impossible"
        )
    return (
        f". Stride {axis.stride} allows {axis.stride} sizes, starting at {lowest} = {first}; "
        + (
            f"{axis.input} is {axis.input - first} more than the smallest size"
            if axis.input > first
            else f"{axis.input} is the smallest size"
        )
    )


def _trailing(axis: ConvAxis) -> str:
    last = axis.input - 1 - axis.unread_after
    rows = f"{axis.name} = {last + 1}" + (f" to {axis.input - 1}" if axis.unread_after > 1 else "")
    beyond = "the input and its padding" if axis.pad_after else "the input"
    which = "the only window" if axis.output == 1 else f"the last of the {axis.output} windows"
    return (
        f"{which} ends at {axis.name} = {last}, and the next would end at {last + axis.stride}, "
        f"beyond {beyond}, so no window covers {rows}"
    )


def _adjoint_rows(
    problem: ConvProblem, axes: tuple[AdjointAxis, ...], say: Any
) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a table; axes with equal rows share them."""
    parts: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for axis, adjoint in zip(problem.axes, axes, strict=True):
        parts.setdefault(say(axis, adjoint), []).append(axis.name)
    for rows, names in parts.items():
        for number, (label, text) in enumerate(rows):
            yield shapes.listed(names) if number == 0 else "", label, text


def _crops(axes: tuple[AdjointAxis, ...]) -> list[Paragraph]:
    if min(min(axis.padding) for axis in axes) >= 0:
        return []
    return [Paragraph("Negative padding crops. The cropped elements do not affect the result.")]


def _because(axis: ConvAxis) -> str:
    """Return the reason for an output size, in brackets."""
    if axis.padding_mode.startswith("same"):
        word = axis.padding_mode.upper()
        every = f"{axis.stride} inputs" if axis.stride > 1 else "input"
        return f"({word}: one output for every {every})"
    word = "VALID" if axis.padding_mode == "valid" else "explicit padding"
    size = axis.effective_filter
    taps = ""
    if axis.dilation > 1:
        spans = "spans" if axis.filter == 1 else "span"
        taps = f"; {counted(axis.filter, 'tap')} with dilation {axis.dilation} {spans} {size}"
    return (
        f"({word}: the number of windows of size {size} that fit when they start "
        f"{counted(axis.stride, 'input')} apart{taps})"
    )


def _depths_text(depths: list[int]) -> str:
    """Return a sentence on the sorted depths of several products; many depths are summarised."""
    if depths[0] == depths[-1]:
        return f"Each has depth {depths[0]}"
    if len(depths) > 8:
        return f"Their depths are {depths[0]} to {depths[-1]}"
    return f"Their depths are {', '.join(map(str, depths[:-1]))} and {depths[-1]}"


def _adjoint_dict(adjoint: AdjointAxis) -> dict[str, Any]:
    rule = adjoint.rule
    return {
        "first_operand": adjoint.size,
        "spread": adjoint.spread,
        "spread_size": rule.input,
        "second_operand": rule.filter,
        "stride": rule.stride,
        "dilation": rule.dilation,
        "padding": list(adjoint.padding),
        "formulas": list(adjoint.formulas),
        "size": rule.output,
    }


def _plain(section: Section) -> list[str]:
    return [section.title, *(b.text for b in section.blocks if not isinstance(b, Table))]
