"""Text of an explanation, as functions of the problem and of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import zip_longest
from math import prod
from typing import Any, TypeVar

from cupyconv.errors import ConvError
from cupyconv.explaining import (
    adjoints,
    crops,
    maps,
    receptive,
    shapes,
    terms,
    translate,
    transposed,
)
from cupyconv.explaining import values as numbers
from cupyconv.explaining.adjoints import AdjointAxis
from cupyconv.explaining.counts import MAPPED, visible
from cupyconv.explaining.terms import Element, counted_large
from cupyconv.explaining.values import OPERANDS, RESULTS, Values
from cupyconv.markup import Block, Paragraph, Section, Table, Verbatim
from cupyconv.problem import (
    PASSES,
    RESULT,
    ConvAxis,
    ConvProblem,
    counted,
    interval_text,
    shape_text,
)

_DRAWN_CHANNELS = terms.SHOWN_FIRST + terms.SHOWN_LAST
"""Largest number of rows and of columns in the grid of channel pairs, gaps included: as many as a
sum shows terms."""

_MOST_TRIED = 9
"""Largest number of inputs among which the example of the chain rule is chosen (hand-set)."""

MOST_PRINTED = 300
"""Largest number of elements of all six tensors together for which all are printed (hand-set)."""


_Text = TypeVar("_Text")


def sections(
    problem: ConvProblem, data: Mapping[str, Any], is_transposed: bool
) -> tuple[Section, ...]:
    """Return all sections of an explanation.

    Args:
        problem: the layer.
        data: values of the tensors by name, as far as they are known.
        is_transposed: whether the transposed layer is explained, too.
    """
    channels, sizes = channels_section(problem, data), sizes_section(problem)
    return (
        *([transposed.section(problem)] if is_transposed else []),
        _head(problem, is_transposed),
        *_numbers(problem, data),
        *((channels, sizes) if shapes.question(problem) == "dw" else (sizes, channels)),
        _tensors(problem),
        *_axes(problem),
        _size_options(problem),
        _chain_rule(problem),
        _input_gradient(problem),
        _filter_gradient(problem),
        _around(problem),
        _products(problem),
        _counts(problem),
        *_elsewhere(problem, is_transposed),
    )


def middle(problem: ConvProblem, data: Mapping[str, Any]) -> Element:
    """Return the element of dw whose indices are in the middle of every axis."""
    index = tuple(size // 2 for size in terms.extents(problem, "dw"))
    return Element(problem, "dw", index, data=data)


def _head(problem: ConvProblem, is_transposed: bool) -> Section:
    head = (
        f"x {shape_text(problem.input_shape)} * w {shape_text(problem.filter_shape)} -> "
        f"y {shape_text(problem.output_shape)}"
    )
    x, w, y = (terms.indexed(t, terms.names(problem, t)) for t in ("x", "w", "y"))
    h, r, p = (", ".join(terms.names(problem, t)[2:]) for t in ("x", "w", "y"))
    positions = f"{h} count positions in x, {p} in y; {r} count the taps, the elements of w[k,c]."
    return Section(
        "The convolution that the transposed layer reverses" if is_transposed else "",
        (
            Paragraph(head),
            Paragraph(shapes.settings(problem)),
            Paragraph(
                f"Indices are written {x}, {w} and {y}, whatever the memory order: n is the image, "
                "c the input channel (axis C of x, I of w), and k the filter or output channel "
                f"(axis O of w). {positions}{terms.INDEX_W}"
                f"{terms.grouped(problem)} "
                "dy, dx and dw are the gradients of the loss with respect to y, x and w (dE/dO, "
                "dE/dX and dE/dF)."
            ),
        ),
    )


def _numbers(problem: ConvProblem, data: Mapping[str, Any]) -> list[Section]:
    """Return a section with all values, plane by plane, if all results are known and small."""
    count = 2 * sum(prod(terms.extents(problem, tensor)) for tensor in RESULTS)
    if not 0 < count <= MOST_PRINTED or not all(name in data for name in RESULTS):
        return []
    blocks = [
        Verbatim("\n".join(numbers.planes(problem, tensor, data[tensor])))
        for tensor in (*OPERANDS, *RESULTS)
    ]
    drawn = f" ({data.source})" if isinstance(data, Values) else ""
    text = f"Values of x, w and dy{drawn}, and of the results that the library computes."
    return [Section("All values", (Paragraph(text), *blocks))]


def channels_section(problem: ConvProblem, data: Mapping[str, Any]) -> Section:
    """Return the section that explains how the channels of x and dy give dw."""
    C, K, G = problem.C, problem.K, problem.groups
    channels, filters = C // G, K // G
    pairs = K * channels
    title = (
        f"How can x with {counted(C, 'channel')} and dy with {counted(K, 'channel')} be convolved?"
        if C != K
        else f"How the {C} channels of x and the {K} channels of dy give dw"
        if C > 1
        else "How x and dy give dw"
    )
    source = "x[channel c of the group of k]" if G > 1 else "x[c]"
    source = f"conj({source})" if problem.is_complex else source
    rule = f"dw[k,c] = correlate({source}, dy[k])"
    if max(problem.stride) > 1:
        rule += f",\n  with dy dilated by the stride {shapes.one(problem.stride)}"
    if problem.N > 1:
        rule += ",\n  summed over the images"
    group = " of the same group" if G > 1 else ""
    within = f", each within one of the {G} groups" if G > 1 else ""
    blocks: tuple[Block, ...] = (
        Paragraph(
            "x and dy are not convolved as two stacks of channels. Each channel of x is correlated "
            f"with each channel of dy{group}, one pair at a time: slide without a flip, multiply, "
            "add. (Frameworks call this a convolution.) Each pair fills its own slice, the "
            "elements of dw with one k and one c:"
        ),
        Verbatim(f"{rule}\n{_correlated(problem)}"),
        Paragraph(
            f"There {'is' if pairs == 1 else 'are'} {K} x {channels} = "
            f"{counted_large(pairs, 'pair')}{within}. {_filled(problem, pairs)} Each "
            f"dy[k] meets each x[c]{' of its group' if G > 1 else ''}, an outer product:"
        ),
        Verbatim(_grid(problem)),
        Paragraph(
            "Nothing is tiled, broadcast or averaged over channels. The forward pass uses w[k,c] "
            "in one place only: it adds correlate(x[c], w[k,c]) to y[k]. There, a tap multiplies "
            "one element of x[c] for each output. By the chain rule (below), its gradient is the "
            "sum of these elements, each times dy[k] of its output: a correlation of x[c] with "
            "dy[k]."
        ),
        Paragraph(_sums(problem, channels, filters)),
        *_example(problem, data),
    )
    return Section(title, blocks)


def _correlated(problem: ConvProblem) -> str:
    """Return text on the correlation of x with dy: sizes after padding, cropping and dilation."""
    axes = adjoints.filter_gradient_axes(problem)
    x, dy = shape_text(problem.input_sizes), shape_text(problem.output_sizes)
    sides = [side for axis in axes for side in axis.padding]
    if any(sides):
        changes = {"padded": max(sides) > 0, "cropped": min(sides) < 0}
        done = " and ".join(word for word, happens in changes.items() if happens)
        x += f", {done} to {shape_text([axis.rule.padded_input for axis in axes])},"
    if max(problem.stride) > 1:
        dy += f", dilated to {shape_text([axis.rule.effective_filter for axis in axes])},"
    if max(problem.dilation) > 1:
        comma = "" if dy.endswith(",") else ","
        dy += f"{comma} moved in steps of the dilation {shapes.one(problem.dilation)},"
    break_ = "\n  " if len(x) + len(dy) > 30 else " "
    sizes = shape_text(problem.filter_sizes)
    return f"{x}{break_}correlated with {dy}{break_}gives {sizes}, one for each shift"


def _filled(problem: ConvProblem, pairs: int) -> str:
    """Return sentences that compare the values of all pairs with the shape of w."""
    sizes, shape = problem.filter_sizes, shape_text(problem.filter_shape)
    count = pairs * prod(sizes)
    values = shapes.sized(sizes, "value") if prod(sizes) > 1 else "1 value"
    fill = f"which {'fills' if count == 1 else 'fill'} the shape of w, {shape}, exactly"
    if pairs == 1:
        return f"It gives {values}, {fill}."
    return f"Each pair gives {values}. Together they give {count:,} values, {fill}."


def _sums(problem: ConvProblem, channels: int, filters: int) -> str:
    where = " of the group" if problem.groups > 1 else ""
    if channels == filters == 1:
        return (
            f"Nothing is summed over channels: the only channel{where} contributes to y[k], and "
            "the gradient of its contribution is dy[k]. The only filter"
            f"{where} contributes to dx[c]."
        )
    forward = (
        f"y[k] is a sum over the {channels} input channels{where}. In the backward pass, a sum "
        "passes its gradient unchanged to each of its terms, so each term receives the same dy[k]."
        if channels > 1
        else f"Neither does y[k]: it has one term, from the only channel{where}, and the gradient "
        "of this term is dy[k]."
    )
    backward = (
        f"dx[c] is a sum over the {filters} filters{where}, because all of them read x[c]."
        if filters > 1
        else f"dx[c] is not a sum over filters, because only one filter{where} reads x[c]."
    )
    return f"dw involves no sum over channels. {forward} {backward}"


def _grid(problem: ConvProblem) -> str:
    """Return the grid of channel pairs as text."""
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    across = visible(channels, _DRAWN_CHANNELS)
    rows = [["", *("..." if c is None else f"x[{c}]" for c in across)]]
    for k in visible(filters, _DRAWN_CHANNELS):
        cells = ["..." if c is None else f"dw[{k},{c}]" for c in across]
        rows.append(["..."] if k is None else [f"dy[{k}]", *cells])
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
    if problem.groups > 1:
        lines.append(f"(the first of {problem.groups} groups; every group has the same structure)")
    return "\n".join(lines)


def _example(problem: ConvProblem, data: Mapping[str, Any]) -> list[Block]:
    """Return the example element of dw with its terms; nothing for an empty batch."""
    if not problem.N:
        return []
    element = middle(problem, data)
    if not element.count:
        return [Paragraph(f"For example, {element.name}: {element.conclusion}")]
    channel = element.term(0).second[1]
    operands = f"x[{channel}] and dy[{element.index[0]}]"
    group = ""
    if problem.groups > 1:
        here, first = divmod(channel, problem.C // problem.groups)
        group = f" (channel {channel} of x is channel {first} of group {here})"
    uses = f"For example, {element.name} uses only {operands}{group}"
    return [
        Paragraph(f"{uses}. It sums {counted_large(element.count, 'product')}:"),
        Verbatim("\n".join(element.lines())),
        *element.beside(),
    ]


def sizes_section(problem: ConvProblem) -> Section:
    """Return the section that explains the size of dx."""
    dy, x = shape_text(problem.output_sizes), shape_text(problem.input_sizes)
    title = f"Why is dx {x} when dy is {dy}?" if dy != x else f"Why dx is {x}"
    forward = _clauses(problem, lambda axis: f"{axis.formula} {_because(axis)}")
    texts = [
        f"dx has one value for each element of x, so it has the shape of x, "
        f"{shape_text(problem.input_shape)}, for any stride, padding and dilation. "
        "(Likewise, dw has the shape of w.)",
        f"The forward pass turns {shapes.sized(problem.input_sizes, 'input')} into "
        f"{shapes.sized(problem.output_sizes, 'output')}: {forward}.",
    ]
    after: list[Block] = []
    if any(len(axis.valid_input_sizes) > 1 for axis in problem.axes):
        several = _clauses(
            problem, lambda axis: shapes.sizes_that_give(axis.valid_input_sizes, axis.output)
        )
        texts.append(
            f"dy and w do not determine the size of dx: {several}. A stride above 1 rounds "
            "several input sizes to the same output size. This is why TensorFlow's "
            f"Conv2DBackpropInput and similar functions take the size of dx, here {x}, as their "
            "argument input_sizes. They reject sizes that do not give this dy."
        )
        after += crops.blocks(problem)
        if moved := _clauses(problem, _moved):
            text = f"Under SAME, the input size also decides the padding: {moved}."
            after.append(Paragraph(text))
    else:
        is_strided = max(problem.stride) > 1
        only = (
            "With this padding, only one input size of at least 1 gives this output size"
            if is_strided
            else "With stride 1, each output size belongs to one input size only"
        )
        texts.append(
            f"{only}, so dy and w determine the size of dx: {x}. TensorFlow's "
            "Conv2DBackpropInput and similar functions take input_sizes nevertheless, because with "
            f"{'less padding' if is_strided else 'a larger stride'} several sizes of dx would fit "
            "the same dy."
        )
    if dead := [axis for axis in problem.axes if axis.unread_after]:
        rows = "; ".join(map(_trailing, dead))
        between = any(axis.unread_inputs > axis.unread_after for axis in problem.axes)
        more = "; inputs between windows or taps are not read either" if between else ""
        text = (
            f"Part of x is never read: {rows}{more}. These inputs do not affect y, so their "
            "gradient is exactly zero. dx contains these zeros."
        )
        after.append(Paragraph(text))
    return Section(title, (*map(Paragraph, texts), *after))


def _tensors(problem: ConvProblem) -> Section:
    rows = tuple(
        (entry.tensor, shape_text(entry.shape), entry.reason)
        for entry in shapes.reasons_with_addend(problem)
    )
    return Section("Each tensor", (Table(("tensor", "shape", "why"), rows),))


def _axes(problem: ConvProblem) -> list[Section]:
    sections = []
    for entry in shapes.axis_reasons(problem):
        axis = next(axis for axis in problem.axes if axis.name == entry.axes[0])
        rows = (
            ("padding", entry.padding),
            ("output size", entry.output),
            ("window", _window(axis)),
            ("input sizes", f"{entry.input_sizes}{_interval(axis)}"),
            ("unread inputs", entry.unread),
            ("receptive field", receptive.text(axis)),
        )
        title = f"{'Axis' if len(entry.axes) == 1 else 'Axes'} {shapes.listed(entry.axes)}"
        sections.append(Section(title, (Table(("", ""), rows),)))
    return sections


def _size_options(problem: ConvProblem) -> Section:
    rows = [("cupyconv", f"conv_backprop_input({problem.input_shape}, w, dy, ...)")]
    rows += [(entry.framework, entry.size) for entry in translate.translations(problem)]
    title = "How other frameworks specify the size of dx"
    return Section(title, (Table(("", ""), tuple(rows)),))


def _chain_rule(problem: ConvProblem) -> Section:
    """Return the section that derives dx and dw, and explains why only dx flips the filter."""
    examples = [(axis, _busiest_input(axis)) for axis in problem.axes]
    axis, (h_, found) = max(examples, key=lambda example: len(example[1][1].first))
    h, r, p = terms.letters(axis)
    conj = "conj({})".format if problem.is_complex else str
    lines = [
        f"y[{p}]  = sum over {r} of x[{h}] * w[{r}],",
        f"dx[{h}] = sum over {p} of dy[{p}] * {conj(f'w[{r}]')},",
        f"dw[{r}] = sum over {p} of dy[{p}] * {conj(f'x[{h}]')},",
        f"where {terms.position_text(axis)},",
        f"so    {terms.tap_text(axis)}",
    ]
    blocks: list[Block] = [
        Paragraph(
            f"y[{p}] is a sum of products x[{h}] * w[{r}]. So x[{h}] changes y[{p}] at the rate "
            f"w[{r}], and w[{r}] at the rate x[{h}]; y[{p}] changes the loss at the rate dy[{p}]. "
            "By the chain rule, these rates multiply, and add up over all outputs. Along "
            f"{axis.name}, for one channel and one filter:"
        ),
        Verbatim("\n".join(lines)),
    ]
    title = "The chain rule"
    if len(found.first) > 1:
        title = "The chain rule, and why dx flips the filter"
        most = terms.SHOWN_FIRST + terms.SHOWN_LAST
        step = 1 if found.first.step > 0 else -1
        shown = [numbers[::step][:most] for numbers in (found.first, found.second)]
        pairs = [*zip(*shown, strict=True)]
        width = max(len(str(number)) for pair in pairs for number in pair) + 2
        end = " ..." if len(found.first) > most else ""
        rows = [
            f"{label}{''.join(str(number).rjust(width) for number in numbers)}{end}"
            for label, numbers in zip(
                (f"output {p}", f"tap {r}   "), zip(*pairs, strict=True), strict=True
            )
        ]
        blocks += [
            Paragraph(f"For example, these outputs read x[{h_}], each through one tap:"),
            Verbatim("\n".join(rows)),
            Paragraph(
                f"As {p} grows, {r} falls: from the side of x, the taps run backwards. So the "
                f"filter is flipped in dx. In dw, {h} grows with {p}, so nothing is flipped."
            ),
        ]
    return Section(title, tuple(blocks))


def _busiest_input(axis: ConvAxis) -> tuple[int, terms.AxisTerms]:
    """Return the first of the first inputs with the most terms in dx, and these terms."""
    first = ((h, terms.input_terms(axis, h)) for h in range(min(axis.input, _MOST_TRIED)))
    return max(first, key=lambda found: len(found[1].first))


def _around(problem: ConvProblem) -> Section:
    """Return the section on the batch, a bias, an activation and a filter that is used twice."""
    over = f"the {problem.N} images" if problem.N > 1 else "the images of a batch"
    texts = (
        f"dw and db are sums over {over}, not means. If the loss is a mean over the batch, dy "
        "already contains the factor 1/N.",
        "A bias is added to y, so it changes neither dx nor dw; db sums dy. If an activation "
        "follows, dy is the gradient before it: multiply the gradient of the result by the "
        "derivative of the activation. For ReLU, dy is 0 where the result is 0.",
        "If two layers use the same filter, its gradient is the sum of both dw.",
    )
    return Section("Batch, bias, activation and shared filters", tuple(map(Paragraph, texts)))


def _input_gradient(problem: ConvProblem) -> Section:
    axes = adjoints.input_gradient_axes(problem)
    names = shapes.listed([axis.name for axis in problem.axes])
    spread = f"dy with {_zeros(problem)} between neighbours" if max(problem.stride) > 1 else "dy"
    filters = "conj(w)" if problem.is_complex else "w"
    within = " in each group" if problem.groups > 1 else ""
    dilation = f", dilation {shapes.one(problem.dilation)}" if max(problem.dilation) > 1 else ""
    formula = (
        f"dx = correlate(\n  {spread},\n"
        f"  {filters} flipped along {names}, with its channel axes swapped{within},\n"
        f"  stride 1{dilation}, padding {shapes.pairs([axis.padding for axis in axes])})"
    )
    text = (
        "The channel axes of w are swapped because dx sums over k, while y sums over c. A span is "
        "an extent after dilation."
    )
    table = _table_of_axes(problem, _dx_rows)
    return Section(
        "dx as a convolution", (Verbatim(formula), Paragraph(text), *_crops(axes), table)
    )


def _dx_rows(axis: ConvAxis) -> tuple[tuple[str, str], ...]:
    adjoint = adjoints.input_gradient_axis(axis)
    before, after = adjoint.formulas
    return (
        ("input", _dy_text(axis, adjoint.rule.input)),
        ("pad before", f"span of w - 1 - forward pad before = {before}"),
        ("pad after", f"size of x + span of w - 1 - span of dy - pad before = {after}"),
        ("output", f"{adjoint.rule.formula}, the size of x"),
    )


def _filter_gradient(problem: ConvProblem) -> Section:
    axes = adjoints.filter_gradient_axes(problem)
    stride, dilation = shapes.one(problem.stride), shapes.one(problem.dilation)
    first = "conj(x[c])" if problem.is_complex else "x[c]"
    second = f"dy[k], dilated by {stride}," if max(problem.stride) > 1 else "dy[k]"
    formula = (
        f"dw[k,c] = correlate(\n  {first},\n  {second} as the filter,\n"
        f"  stride {dilation}, padding {shapes.pairs([axis.padding for axis in axes])})"
    )
    text = (
        "Stride and dilation swap roles. For the next element of dw, the window on x moves by "
        f"{dilation} (the dilation). Within a window, neighbouring elements of dy multiply "
        f"elements of x that are {stride} apart (the stride)."
    )
    if problem.N > 1:
        text += f" Images play the role of channels: the sum is over the {problem.N} images."
    table = _table_of_axes(problem, _dw_rows)
    return Section(
        "dw as a convolution", (Verbatim(formula), Paragraph(text), *_crops(axes), table)
    )


def _dw_rows(axis: ConvAxis) -> tuple[tuple[str, str], ...]:
    adjoint = adjoints.filter_gradient_axis(axis)
    before, after = adjoint.formulas
    return (
        ("filter", _dy_text(axis, adjoint.rule.effective_filter)),
        ("pad before", before),
        ("pad after", f"span of w - 1 + span of dy - size of x - pad before = {after}"),
        ("output", f"{adjoint.rule.formula}, the size of w"),
    )


def _products(problem: ConvProblem) -> Section:
    h, r, p = (",".join(terms.names(problem, tensor)[2:]) for tensor in ("x", "w", "y"))
    meaning = {
        "forward": f"(n,{p}) x k x (c,{r})",
        "backprop_input": f"(n,{h}) x c x (k,{r})",
        "backprop_filter": f"k x (c,{r}) x (n,{p})",
    }
    rows = []
    for pass_ in PASSES:
        view = problem.gemm(pass_)
        times = f"{view.groups} products of " if view.groups > 1 else ""
        sizes = f"{times}{view.gemm_m} x {view.gemm_n} x {view.gemm_k}"
        rows.append((pass_, RESULT[pass_], sizes, meaning[pass_]))
    text = "Each pass is a product of two matrices; its depth is the number of terms of a sum."
    head = ("pass", "result", "rows x columns x depth", "axes")
    blocks: list[Block] = [Paragraph(text), Table(head, tuple(rows))]
    phases = prod(problem.stride)
    if 1 < phases <= 64:
        depths = _depths_text(sorted(view.gemm_k for view in problem.phase_gemms))
        text = (
            "In backprop_input, only some taps contribute to each row. Grouped by position modulo "
            f"the stride, the rows form {phases} smaller matrix products. {depths}, instead of "
            f"{problem.gemm('backprop_input').gemm_k}."
        )
        blocks.append(Paragraph(text))
    return Section("Each pass as a matrix product", tuple(blocks))


def _counts(problem: ConvProblem) -> Section:
    rows = []
    for tensor in MAPPED:
        try:
            verdict = maps.term_map(problem, tensor).verdict
        except ConvError:
            verdict = "too many positions to count one by one"
        rows.append((tensor, verdict))
    return Section("Number of terms of each element", (Table(("", ""), tuple(rows)),))


def _elsewhere(problem: ConvProblem, is_transposed: bool) -> list[Section]:
    """Return the section on other frameworks; nothing if none supports the layer."""
    rows = []
    for entry in translate.translations(problem, is_transposed):
        rows.append((entry.framework, entry.call))
        rows += [("", f"- {flag}") for flag in entry.flags]
    text = (
        "Each entry is the line of a program that computes the forward pass, with notes on limits "
        "of the framework. X and W are x and w in the axis order of the framework. "
        "For the whole program, pass --code pytorch on the command line, or read "
        "explanation.code('pytorch').program in Python."
    )
    title = f"The {'transposed' if is_transposed else 'same'} layer in other frameworks"
    return [Section(title, (Paragraph(text), Table(("", ""), tuple(rows))))] if rows else []


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


def _clauses(problem: ConvProblem, say: Callable[[ConvAxis], str]) -> str:
    """Join the clauses of all axes; equal clauses are merged, and empty clauses are omitted."""
    parts = _by_text(problem, say)
    if len(parts) == 1:
        return next(iter(parts))
    return "; ".join(
        f"along {shapes.listed(names)}, {text}" for text, names in parts.items() if text
    )


def _by_text(problem: ConvProblem, say: Callable[[ConvAxis], _Text]) -> dict[_Text, list[str]]:
    """Return the names of the axes with each text, keyed by the text."""
    parts: dict[_Text, list[str]] = {}
    for axis in problem.axes:
        parts.setdefault(say(axis), []).append(axis.name)
    return parts


def _moved(axis: ConvAxis) -> str:
    """Return a clause on an input size with the same output size but other padding, if any."""
    for size in (axis.valid_input_sizes[0], axis.valid_input_sizes[-1]):
        other = axis.of_input(size)
        if other.pad_before != axis.pad_before:
            own, others = (f"{a.pad_before} before and {a.pad_after} after" for a in (axis, other))
            return (
                f"an input of size {axis.input} is padded by {own}, an input of size {size} "
                f"by {others}"
            )
    return ""


def _window(axis: ConvAxis) -> str:
    _, r, p = terms.letters(axis)
    last = (axis.output - 1) * axis.stride
    first_, last_ = (
        interval_text(range(begin, begin + axis.effective_filter))
        for begin in (-axis.pad_before, last - axis.pad_before)
    )
    covers = (
        f"the only window covers {first_}"
        if axis.output == 1
        else f"the first window covers {first_}, the last window covers {last_}"
    )
    taps = f"tap{'s' if axis.filter > 1 else ''} {r} = {interval_text(range(axis.filter))}"
    return f"output {p} reads input {terms.position_text(axis)} for the {taps}: {covers}"


def _interval(axis: ConvAxis) -> str:
    if axis.stride == 1:
        return ""
    first = axis.first_input_size_for(axis.output)
    start = f"{axis.stride} sizes{{}}, starting at {shapes.smallest_input_text(axis)} = {first}"
    if first < 1:
        start = start.format(" to this output size")
        return f". Stride {axis.stride} rounds {start}, but sizes below 1 are impossible"
    more = f"{axis.input - first} more than " if axis.input > first else ""
    start = start.format("")
    return f". Stride {axis.stride} allows {start}; {axis.input} is {more}the smallest size"


def _trailing(axis: ConvAxis) -> str:
    last = axis.input - 1 - axis.unread_after
    rows = f"{axis.name} = {interval_text(range(last + 1, axis.input))}"
    beyond = "the input and its padding" if axis.pad_after else "the input"
    which = "the only window" if axis.output == 1 else f"the last of the {axis.output} windows"
    return (
        f"{which} ends at {axis.name} = {last}, and the next would end at {last + axis.stride}, "
        f"beyond {beyond}, so no window covers {rows}"
    )


def _table_of_axes(
    problem: ConvProblem, say: Callable[[ConvAxis], tuple[tuple[str, str], ...]]
) -> Table:
    """Return a table with the rows of each axis; axes with equal rows share them."""
    parts = _by_text(problem, say).items()
    rows = [row for texts, names in parts for row in shapes.rows(names, texts)]
    return Table(("", "", ""), tuple(rows))


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
    padded = "explicit padding" if axis.pad_before or axis.pad_after else "without padding"
    word = "VALID" if axis.padding_mode == "valid" else padded
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
    return f"Their depths are {shapes.listed(list(map(str, depths)))}"
