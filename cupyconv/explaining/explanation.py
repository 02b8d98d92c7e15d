"""``cupyconv.explain``: why every tensor of a layer has the shape and the values it has."""

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
from cupyconv.explaining import values as numbers
from cupyconv.explaining.adjoints import AdjointAxis
from cupyconv.explaining.shapes import counted, interval_dict
from cupyconv.explaining.terms import LETTERS, Element, counted_large
from cupyconv.explaining.translate import Translation
from cupyconv.explaining.values import OPERANDS, RESULTS, Kind, Values
from cupyconv.markup import Block, Document, Paragraph, Section, Table, Verbatim
from cupyconv.problem import PASSES, ConvAxis, ConvProblem, integer, require_problem, shape_text

if TYPE_CHECKING:
    from cupyconv.explaining.page import Page

PASS_GIVES = {"forward": "y", "backprop_input": "dx", "backprop_filter": "dw"}

_DRAWN_CHANNELS = 6

MOST_PRINTED = 300
"""Numbers of all tensors together that are still printed."""


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
) -> Explanation:
    """Why every tensor of a layer has the shape and the values it has.

    Args:
        problem: the layer.
        x, w, dy: its tensors, NumPy or CuPy arrays in the problem's formats; those that are not
            given are random.
        y, dx, dw: results to be shown beside the sums of the terms; else the library's.
        title: a line above the explanation.
        values: "normal" or "integers", what is drawn for the tensors that are not given; None
            leaves them out.
        seed: of what is drawn, an integer from 0 to 2^63 - 1.

    Returns:
        an Explanation: text with str() or print(), HTML in Jupyter, plain data with ``to_dict()``;
        ``element("dF[0,0,0,0]")`` lists the terms of one number, ``map("dx")`` counts them for all,
        ``code("pytorch")`` is the layer in another framework, ``svg()`` and ``page()`` draw it.

    Raises:
        ConvTypeError: ``problem`` is not a ConvProblem, an array not one that a pass takes, or the
            title no text.
        ConvError: an array does not have the shape that the problem says, ``values`` is no such
            word, or the seed is negative.
    """
    require_problem("explain", problem)
    if not isinstance(title, str):
        raise ConvTypeError(f"title must be a text: got {shown(title)}. Leave it out for none")
    if values is not None:
        numbers.require_kind("values", values)
    seed = integer("seed", seed)
    if seed < 0:
        raise ConvError("seed must be an integer from 0 on", f"got {seed}", "Use 0")
    data = _taken(problem, {"x": x, "w": w, "dy": dy, "y": y, "dx": dx, "dw": dw})
    return Explanation(problem, title, Values(problem, data, values, seed))


def _taken(problem: ConvProblem, given: Mapping[str, Any]) -> dict[str, Any]:
    """Those tensors of a layer that were given, as arrays.

    Raises:
        ConvError, ConvTypeError: as for ``explain``.
    """
    wanted = {
        "x": problem.input_shape,
        "dx": problem.input_gradient_shape,
        "w": problem.filter_shape,
        "dw": problem.filter_gradient_shape,
        "y": problem.output_shape,
        "dy": problem.output_shape,
    }
    data = {name: arrays.take(name, one)[0] for name, one in given.items() if one is not None}
    for name, array in data.items():
        shape = tuple(array.shape)
        if shape != wanted[name]:
            raise ConvError(
                f"{name} must have the shape that the problem says",
                f"it has {shape_text(shape)}, the problem {shape_text(wanted[name])}",
                f"Pass an array of {shape_text(wanted[name])}, or make the problem from it",
            )
        if array.dtype.kind == "c" and not problem.is_complex:
            raise ConvTypeError(
                f"{name} is {array.dtype}, whose imaginary part {problem.dtype} does not have. "
                f"Make the problem with dtype={str(array.dtype)!r}"
            )
    return data


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` returns.

    Attributes:
        problem: the layer.
        title: a line above the explanation.
        data: those of x, w, dy, y, dx and dw that are known, drawn and computed when read.
    """

    problem: ConvProblem
    title: str = ""
    data: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    # -- parts -------------------------------------------------------------------------------------

    def element(self, name: str, *, x: Any = None, w: Any = None, dy: Any = None) -> Element:
        """One number of y, dx or dw as the sum of its terms.

        Args:
            name: such as "dF[3,1,0,2]" (or dw), "dX[0,0,5,5]", "O[0,0,1,1]" (or y).
            x, w, dy: arrays to take values from, instead of those given to ``explain``.

        Raises:
            ConvError: there is no such element; the message has the ranges.
            ConvError, ConvTypeError: of the arrays, as for ``explain``.
        """
        changed = _taken(self.problem, {"x": x, "w": w, "dy": dy})
        found = terms.parse(self.problem, name)
        data = self.data
        if changed:
            # Beside other operands the results that are known would be wrong.
            data = {**{key: data[key] for key in OPERANDS if key in data}, **changed}
        return Element(self.problem, found.tensor, found.index, found.asked, data)

    def map(self, tensor: str = "dx") -> maps.TermMap:
        """How many terms each number of dx, dw or y is summed from."""
        return maps.term_map(self.problem, tensor)

    def code(self, framework: str) -> Translation:
        """The layer in "tensorflow", "pytorch", "jax" or "onnx"; its ``program`` runs."""
        return translate.translation(self.problem, framework)

    def svg(self, element: str = "") -> str:
        """A picture of the layer and of what flows back.

        Args:
            element: the one that is marked, such as "dF[3,1,0,2]"; else one of each result.
        """
        from cupyconv.explaining import figure

        return figure.svg(self, self._marked(element))

    def page(self, element: str = "") -> str:
        """One HTML page, interactive, that needs nothing from the network.

        Args:
            element: the one that is shown first, such as "dF[3,1,0,2]".
        """
        from cupyconv.explaining import page

        return page.html(self, self._marked(element))

    def _marked(self, element: str) -> Element | None:
        unmarked = element is None or (isinstance(element, str) and not element)
        return None if unmarked else self.element(element)

    def show(self, element: str = "") -> Page:
        """The page: below the cell in Jupyter, elsewhere in the browser.

        Args:
            element: the one that is shown first, such as "dF[3,1,0,2]".

        Raises:
            ConvError: there is no browser.
        """
        from cupyconv.explaining import page

        content = self.page(element)
        if not page.in_notebook():
            page.open_in_browser(content)
        return page.Page(content)

    def save(self, path: str | Path, element: str = "") -> None:
        """Write ``svg()`` or ``page()`` to a .svg or .html file.

        Raises:
            ConvError: the name says neither.
            OSError: it cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() not in (".svg", ".html", ".htm"):
            raise ConvError(
                "a picture is saved as .svg, a page as .html", f"got {path}", "Use one of these"
            )
        content = (self.svg if path.suffix.lower() == ".svg" else self.page)(element)
        files.put(path, content.encode())

    # -- telling -----------------------------------------------------------------------------------

    @cached_property
    def middle(self) -> str:
        """The element of dw in the middle of every axis: an example with a channel of its own."""
        sizes = terms.extents(self.problem, "dw")
        return f"dw[{','.join(str(size // 2) for size in sizes)}]"

    @cached_property
    def document(self) -> Document:
        """The whole explanation."""
        problem = self.problem
        plain = all(
            axis.stride == axis.dilation == 1 and not axis.pad_before and not axis.pad_after
            for axis in problem.axes
        )
        questions = [self._channels(), self._sizes()]
        sections = [
            *(questions if plain else reversed(questions)),
            self._tensors(),
            *self._axes(),
            self._told(),
            self._input_gradient(),
            self._filter_gradient(),
            self._products(),
            self._counts(),
            self._elsewhere(),
        ]
        if self._is_small:
            sections.insert(0, self._numbers())
        return Document(self.title, (self._head(), *sections))

    def text(self, width: int = 100) -> str:
        """The explanation as lines of at most ``width`` characters, programs and formulas aside."""
        return self.document.text(width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """The figure and the text; a notebook that is not trusted shows the text."""
        try:
            figure = self.svg()
        except ConvError:  # too large to be drawn
            return self.document.html()
        # As an image, because what cleans untrusted pages would leave its loose words.
        held = base64.b64encode(figure.encode()).decode()
        image = (
            f'<img src="data:image/svg+xml;base64,{held}" style="max-width:100%" '
            f'alt="Figure of the layer; all of it is told below."/>'
        )
        return f"<div>{image}{self.document.html()}</div>"

    def _head(self) -> Section:
        problem = self.problem
        head = (
            f"x {shape_text(problem.input_shape)} * w {shape_text(problem.filter_shape)} -> "
            f"y {shape_text(problem.output_shape)}"
        )
        indices = ", ".join(f"{t}[{','.join(terms.names(problem, t))}]" for t in ("x", "w", "y"))
        grouped = terms.GROUPED if problem.groups > 1 else ""
        return Section(
            "",
            (
                Paragraph(head),
                Paragraph(shapes.settings(problem)),
                Paragraph(
                    f"Indices: {indices}, whatever the memory order.{grouped} dy, dx and dw are "
                    "the loss differentiated by y, x and w: dE/dO, dE/dX and dE/dF."
                ),
            ),
        )

    @property
    def _is_small(self) -> bool:
        """Whether all tensors can be printed, so that every sum can be checked on paper."""
        shapes = (terms.extents(self.problem, tensor) for tensor in RESULTS)
        count = 2 * sum(map(prod, shapes))
        return 0 < count <= MOST_PRINTED and all(name in self.data for name in RESULTS)

    def _numbers(self) -> Section:
        """Every number of every tensor, plane by plane."""
        blocks = [
            Verbatim("\n".join(numbers.planes(self.problem, tensor, self.data[tensor])))
            for tensor in (*OPERANDS, *RESULTS)
        ]
        drawn = f" ({self.data.source})" if isinstance(self.data, Values) else ""
        text = f"x, w and dy{drawn}, and what the library makes of them."
        return Section("All numbers", (Paragraph(text), *blocks))

    def _channels(self) -> Section:
        """The first question: how x's channels and dy's give dw."""
        problem = self.problem
        C, K, G = problem.C, problem.K, problem.groups
        channels, filters = C // G, K // G
        x, dy, taps = (
            shape_text(sizes)
            for sizes in (problem.input_sizes, problem.output_sizes, problem.filter_sizes)
        )
        pairs = K * channels
        title = (
            f"How can x, {counted(C, 'channel')} deep, and dy, {K} deep, be convolved?"
            if C != K
            else f"How x's {counted(C, 'channel')} and dy's {K} give dw"
        )
        notes = []
        if G > 1:
            notes.append("c counted within the group of k")
        if max(problem.stride) > 1:
            notes.append(f"dy dilated by the stride {shapes.one(problem.stride)}")
        if problem.N > 1:
            notes.append("summed over the images")
        source = "conj(x[c])" if problem.is_complex else "x[c]"
        rule = f"dw[k,c] = correlate({source}, dy[k])" + "".join(f",\n  {n}" for n in notes)
        first = (
            "They are not convolved as two stacks. One channel of x and one channel of dy are "
            "correlated at a time (slid over each other without a flip, multiplied and added: what "
            "every framework calls a convolution), and each such pair fills its own part of dw:"
        )
        within = f"within each of the {G} groups " if G > 1 else ""
        grid: list[Block] = [
            Verbatim(f"{rule}\n{x} by {dy} gives {taps}"),
            Paragraph(
                f"Every pair is taken {within}once: {K} x {channels} = "
                f"{counted_large(pairs, 'pair')} of {taps} numbers, "
                f"{pairs * prod(problem.filter_sizes):,} in all, which is exactly w's shape, "
                f"{shape_text(problem.filter_shape)}. Over channels this is an outer product:"
            ),
            Verbatim(self._grid()),
            Paragraph(
                "Nothing is tiled, broadcast or averaged over channels, and no information is "
                "lost: w[k,c] is used once, where forward adds correlate(x[c], w[k,c]) to y[k]. So "
                "no other channel of x meets it, no other channel of y contains it, and its "
                "gradient is made of these two alone."
            ),
            Paragraph(self._sums(channels, filters)),
        ]
        if problem.N:
            grid += self._example()
        return Section(title, (Paragraph(first), *grid))

    def _sums(self, channels: int, filters: int) -> str:
        where = " of the group" if self.problem.groups > 1 else ""
        forward = (
            f"y[k] is a sum over the {channels} input channels{where}; a sum passes its gradient "
            "to each of its terms whole, so all of them receive the same dy[k], undivided."
            if channels > 1
            else f"y[k] has one input channel{where}, which receives dy[k] whole."
        )
        backward = (
            f"dx[c] is a sum over the {filters} filters{where}, because each of them reads x[c]."
            if filters > 1
            else f"dx[c] comes from the one filter{where} that reads x[c]."
        )
        return f"The sums over channels are elsewhere. {forward} {backward}"

    def _grid(self) -> str:
        """The pairs of channels as a table of characters."""
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
            lines.append(f"and so on for each of the {problem.groups} groups; this is the first")
        return "\n".join(lines)

    def _example(self) -> list[Block]:
        """One number of dw in full."""
        element = self.element(self.middle)
        _, own = element.term(0) if element.count else (None, (0, 0))
        channel = own[1]
        whose = f"x[{channel}] and dy[{element.index[0]}] alone"
        what = f"For example {element.name}, from {whose}, is a sum of"
        if not element.count:
            return [Paragraph(f"For example {element.name}: {element.conclusion}")]
        return [
            Paragraph(f"{what} {counted_large(element.count, 'product')}:"),
            Verbatim("\n".join(element.lines())),
            *element.beside(),
        ]

    def _sizes(self) -> Section:
        """The second question: why dx has the size it has."""
        problem = self.problem
        dy, x = shape_text(problem.output_sizes), shape_text(problem.input_sizes)
        title = f"Why is dx {x} when dy is {dy}?" if dy != x else f"Why dx is {x}"
        paragraphs = [
            Paragraph(
                f"dx has one number for each number of x, so its shape is x's, "
                f"{shape_text(problem.input_shape)}, whatever stride, padding and dilation made of "
                "it on the way to y. (Likewise dw has w's.)"
            )
        ]
        forward = _alike(problem, lambda axis: f"{axis.formula} {_because(axis)}")
        paragraphs.append(Paragraph(f"Forward made {dy} of {x}: {forward}."))
        wide = [axis for axis in problem.axes if len(axis.valid_input_sizes) > 1]
        if wide:
            several = _alike(
                problem,
                lambda axis: (
                    f"an input of any size from {axis.valid_input_sizes[0]} to "
                    f"{axis.valid_input_sizes[-1]} gives {counted(axis.output, 'output')}"
                    if len(axis.valid_input_sizes) > 1
                    else f"only an input of {axis.valid_input_sizes[0]} gives "
                    f"{counted(axis.output, 'output')}"
                ),
            )
            paragraphs.append(
                Paragraph(
                    f"dy and w cannot tell that size: {several}. The stride rounds them all to the "
                    "same output. Therefore Conv2DBackpropInput and its like are told it "
                    f"(input_sizes), and return what they are told, {x} here; any size but these "
                    "they refuse."
                )
            )
            if moved := _alike(problem, _moved):
                paragraphs.append(
                    Paragraph(
                        f"Under SAME that size also says where the windows lie: {moved}. So dx for "
                        "another size is not this one with numbers more or less at its end: its "
                        "numbers are others."
                    )
                )
        else:
            strided = [axis for axis in problem.axes if axis.stride > 1]
            only = (
                "Here the padding leaves only one input size of at least 1 that has this output"
                if strided
                else "With stride 1 an output size belongs to one input size only"
            )
            paragraphs.append(
                Paragraph(
                    f"{only}, so dy and w would be enough to tell it: {x}. Conv2DBackpropInput and "
                    "its like are told it all the same (input_sizes), because with "
                    f"{'less padding' if strided else 'a larger stride'} they would not be."
                )
            )
        dead = [axis for axis in problem.axes if axis.unread_after]
        if dead:
            rows = "; ".join(_trailing(axis) for axis in dead)
            paragraphs.append(
                Paragraph(
                    f"Not all of dx is reached: {rows}. These numbers of x change nothing in y, so "
                    "their gradient is exactly zero; they are not left out of dx."
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
            shapes.axis_reasons(self.problem), _first_of_alike(self.problem), strict=True
        ):
            rows = (
                ("padding", entry.padding),
                ("output size", entry.output),
                ("window", _window(self.problem, axis)),
                ("input sizes", f"{entry.input_sizes}{_interval(axis)}"),
                ("unread inputs", entry.unread),
            )
            title = f"{'Axis' if len(entry.axes) == 1 else 'Axes'} {' and '.join(entry.axes)}"
            sections.append(Section(title, (Table(("", ""), rows),)))
        return sections

    def _told(self) -> Section:
        rows = [
            (
                "cupyconv",
                f"conv_backprop_input(input_shape={self.problem.input_shape}, w, dy, ...)",
            ),
            *((entry.framework, entry.size) for entry in self.translations),
        ]
        return Section("The size of dx, as others are told it", (Table(("", ""), tuple(rows)),))

    def _input_gradient(self) -> Section:
        problem = self.problem
        axes = adjoints.input_gradient_axes(problem)
        names = "".join(axis.name for axis in problem.axes)
        spread = (
            f"dy with {_zeros(problem)} between its numbers" if max(problem.stride) > 1 else "dy"
        )
        filters = "conj(w)" if problem.is_complex else "w"
        flip = f"{filters} flipped along {' and '.join(names)}, its channel axes swapped"
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
        size = counted(axis.output, "number")
        if axis.stride > 1:
            size += f" of dy, spread to ({axis.output} - 1)*{axis.stride} + 1 = {rule.input}"
        before, after = adjoint.formulas
        return (
            ("first", size),
            ("before", f"span of the filter - 1 - padding before = {before}"),
            ("after", f"x + span of the filter - 1 - first - before = {after}"),
            ("gives", f"{rule.formula}, x's size"),
        )

    def _filter_gradient(self) -> Section:
        problem = self.problem
        axes = adjoints.filter_gradient_axes(problem)
        second = f"dy dilated by {shapes.one(problem.stride)}" if max(problem.stride) > 1 else "dy"
        lines = [
            "dw[k,c] = correlate(",
            "  conj(x[c])," if problem.is_complex else "  x[c],",
            f"  {second} as the filter,",
            f"  stride {shapes.one(problem.dilation)}, "
            f"padding {shapes.pairs([axis.padding for axis in axes])})",
        ]
        roles = (
            "Stride and dilation change places: taps lie a dilation apart in x, outputs a stride "
            "apart."
        )
        if problem.N != 1:
            roles += f" Images take the part of channels: the {problem.N} are what is summed over."
        table = Table(("", "", ""), tuple(_adjoint_rows(problem, axes, self._dw_rows)))
        return Section(
            "dw as a convolution",
            (Verbatim("\n".join(lines)), Paragraph(roles), *_crops(axes), table),
        )

    def _dw_rows(self, axis: ConvAxis, adjoint: AdjointAxis) -> tuple[tuple[str, str], ...]:
        span = adjoint.rule.effective_filter
        filter_ = counted(axis.output, "number")
        if axis.stride > 1:
            filter_ += f" of dy, dilated to ({axis.output} - 1)*{axis.stride} + 1 = {span}"
        before, after = adjoint.formulas
        return (
            ("filter", filter_),
            ("before", before),
            ("after", f"span of the filter - 1 + span of dy - x - before = {after}"),
            ("gives", f"{adjoint.rule.formula}, w's size"),
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
            times = f"{view.groups} times " if view.groups > 1 else ""
            sizes = f"{times}{view.gemm_m} x {view.gemm_n} x {view.gemm_k}"
            rows.append((pass_, PASS_GIVES[pass_], sizes, meaning[pass_]))
        blocks: list[Block] = [
            Table(("pass", "gives", "rows x columns x depth", "which are"), tuple(rows))
        ]
        phases = prod(problem.stride)
        if 1 < phases <= 64:
            depths = sorted({view.gemm_k for view in problem.phase_gemms})
            blocks.append(
                Paragraph(
                    f"Only some taps reach each row of backprop_input. Sorted by what the stride "
                    f"leaves over, its rows are {phases} products of depth "
                    f"{', '.join(map(str, depths))} instead of "
                    f"{problem.gemm('backprop_input').gemm_k}."
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
        return Section("How many terms a number is summed from", (Table(("", ""), tuple(rows)),))

    @cached_property
    def translations(self) -> tuple[Translation, ...]:
        return translate.translations(self.problem)

    def _elsewhere(self) -> Section:
        rows = []
        for entry in self.translations:
            rows.append((entry.framework, entry.call))
            rows += [("", f"- {flag}") for flag in entry.flags]
        return Section("The same layer in other frameworks", (Table(("", ""), tuple(rows)),))

    # -- data --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data, ready for JSON."""
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
        }


# -- pieces of sentences ---------------------------------------------------------------------------


def _zeros(problem: ConvProblem) -> str:
    counts = [axis.stride - 1 for axis in problem.axes]
    if len(set(counts)) == 1:
        return counted(counts[0], "zero")
    parts = [f"{count} along {axis.name}" for axis, count in zip(problem.axes, counts, strict=True)]
    return f"zeros ({', '.join(parts)})"


def _first_of_alike(problem: ConvProblem) -> list[ConvAxis]:
    """The first axis of each entry of ``axis_reasons``."""
    firsts = [entry.axes[0] for entry in shapes.axis_reasons(problem)]
    by_name = {axis.name: axis for axis in problem.axes}
    return [by_name[name] for name in firsts]


def _alike(problem: ConvProblem, say: Callable[[ConvAxis], str]) -> str:
    """A clause for each axis of which there is one, told once where axes are alike."""
    parts: dict[str, list[str]] = {}
    for axis in problem.axes:
        parts.setdefault(say(axis), []).append(axis.name)
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(f"along {' and '.join(names)} {text}" for text, names in parts.items() if text)


def _moved(axis: ConvAxis) -> str:
    """The padding of another input size with this output, if its windows begin elsewhere."""
    for size in (axis.valid_input_sizes[0], axis.valid_input_sizes[-1]):
        other = axis.of_input(size)
        if other.pad_before != axis.pad_before:
            pads, others = ((one.pad_before, one.pad_after) for one in (axis, other))
            return f"an input of {axis.input} has the padding {pads}, one of {size} has {others}"
    return ""


def _window(problem: ConvProblem, axis: ConvAxis) -> str:
    rank = problem.spatial_rank
    place = [a.name for a in problem.axes].index(axis.name)
    h, r, p = (LETTERS[kind][rank][place] for kind in ("input", "filter", "output"))
    last = (axis.output - 1) * axis.stride - axis.pad_before
    return (
        f"output {p} reads input {terms.position_text(axis, h, r, p)} for the taps {r} = 0 to "
        f"{axis.filter - 1}: the first window covers {-axis.pad_before} to "
        f"{axis.effective_filter - 1 - axis.pad_before}, the last {last} to "
        f"{last + axis.effective_filter - 1}"
    )


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
            f". The stride rounds {axis.stride} sizes to it, from {lowest} = {first} on, of which "
            "those below 1 are none"
        )
    return (
        f". They are {axis.stride} sizes, as many as the stride, from {lowest} = {first} on; "
        + (
            f"{axis.input} is {axis.input - first} above the smallest"
            if axis.input > first
            else f"{axis.input} is the smallest"
        )
    )


def _trailing(axis: ConvAxis) -> str:
    last = axis.input - 1 - axis.unread_after
    rows = f"{axis.name} = {last + 1}" + (f" to {axis.input - 1}" if axis.unread_after > 1 else "")
    beyond = "the input and its padding" if axis.pad_after else "the input"
    return (
        f"the last of the {counted(axis.output, 'window')} ends at {axis.name} = {last}, and the "
        f"next would end at {last + axis.stride}, beyond {beyond}, so no window covers {rows}"
    )


def _adjoint_rows(
    problem: ConvProblem, axes: tuple[AdjointAxis, ...], say: Any
) -> Iterator[tuple[str, str, str]]:
    """Rows of a table, told once for axes on which the same happens."""
    parts: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for axis, adjoint in zip(problem.axes, axes, strict=True):
        parts.setdefault(say(axis, adjoint), []).append(axis.name)
    for rows, names in parts.items():
        for number, (label, text) in enumerate(rows):
            yield " and ".join(names) if number == 0 else "", label, text


def _crops(axes: tuple[AdjointAxis, ...]) -> list[Paragraph]:
    if min(min(axis.padding) for axis in axes) >= 0:
        return []
    return [Paragraph("A padding below zero crops: these numbers have no part in the result.")]


def _because(axis: ConvAxis) -> str:
    """How an output size comes about, after its formula."""
    if axis.padding_mode.startswith("same"):
        word = axis.padding_mode.upper()
        every = f"{axis.stride} inputs" if axis.stride > 1 else "input"
        return f"({word}: one output for every {every})"
    word = "VALID" if axis.padding_mode == "valid" else "padding as given"
    windows = f"windows of {axis.effective_filter}"
    if axis.dilation > 1:
        windows = f"windows of {counted(axis.filter, 'tap')} that span {axis.effective_filter}"
    return f"({word}: {windows}, {axis.stride} apart, that fit)"


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
