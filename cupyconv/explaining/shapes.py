"""Sentences on the shape of every tensor of a layer, and on the sizes along each spatial axis.

Indices in the sentences: n image, k filter (output channel), c input channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from cupyconv.problem import ConvAxis, ConvProblem, counted, interval_text, shape_text

WORDS = {1: ("signal", "sample"), 2: ("image", "pixel"), 3: ("volume", "voxel")}
"""Noun for an item of the batch and noun for its elements, keyed by the number of spatial axes."""


class Reason(NamedTuple):
    """A tensor's shape, in the order of its format, and the reason for the shape."""

    tensor: str
    shape: tuple[int, ...]
    reason: str


class AxisReasons(NamedTuple):
    """Rules of one spatial axis, or of several axes with the same rules.

    Attributes:
        axes: names of the axes, such as ("H", "W").
        padding: meaning of the padding mode, with the layer's numbers.
        output: formula of the output size, with the layer's numbers.
        input_sizes: input sizes that give this output size.
        unread: inputs that no window reads, whose gradient is zero.
    """

    axes: tuple[str, ...]
    padding: str
    output: str
    input_sizes: str
    unread: str

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of a table with the columns axes, rule and text."""
        rules = ("padding", "output size", "input sizes", "unread inputs")
        return rows(self.axes, list(zip(rules, self[1:], strict=True)))


def reasons(problem: ConvProblem) -> tuple[Reason, ...]:
    """Return the shape of x, w, y, dy, dx, dw and db, and the reason for each."""
    return (
        Reason("x", problem.input_shape, batch_text(problem, problem.C, problem.input_sizes)),
        Reason("w", problem.filter_shape, _filter(problem)),
        Reason("y", problem.output_shape, _output(problem)),
        Reason(
            "dy",
            problem.output_shape,
            "gradient of the loss with respect to y: one value for each element of y",
        ),
        Reason("dx", problem.input_gradient_shape, _input_gradient(problem)),
        Reason("dw", problem.filter_gradient_shape, _filter_gradient(problem)),
        Reason(
            "db",
            problem.bias_shape,
            f"one value for each filter: dy[k]{over_batch(problem, problem.output_sizes)}",
        ),
    )


def reasons_with_addend(problem: ConvProblem) -> tuple[Reason, ...]:
    """Return ``reasons``, and the reason for dadd, the gradient of conv_forward's ``add``."""
    dadd = (
        "for y = conv(x, w) + add, as in a residual block, the gradient of add is dy: a sum passes "
        "its gradient unchanged to each of its terms"
    )
    return (*reasons(problem), Reason("dadd", problem.output_shape, dadd))


def axis_reasons(problem: ConvProblem) -> tuple[AxisReasons, ...]:
    """Return the rules of each spatial axis; adjacent axes with the same rules share an entry."""
    return tuple(AxisReasons(names, *texts) for names, texts in merged(problem, _axis))


def axis_dict(axis: ConvAxis) -> dict[str, Any]:
    """Return the sizes and rules of a spatial axis, as plain data for JSON."""
    names = ("name", "input", "filter", "effective_filter", "stride", "dilation")
    return {
        **{name: getattr(axis, name) for name in names},
        "padding": [axis.pad_before, axis.pad_after],
        "output": axis.output,
        "formula": axis.formula,
        "valid_input_sizes": interval_dict(axis.valid_input_sizes),
        "unread_inputs": axis.unread_inputs,
    }


def merged(
    problem: ConvProblem, say: Callable[[ConvAxis], tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yield axis names with what ``say`` returns; adjacent axes with equal texts share an entry."""
    described = [(axis.name, say(axis)) for axis in problem.axes]
    for texts, group in groupby(described, key=lambda entry: entry[1]):
        yield tuple(name for name, _ in group), texts


def rows(axes: Sequence[str], texts: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return rows of labels and texts, with the names of the axes at the beginning of the first."""
    return [
        ("" if number else listed(axes), label, text) for number, (label, text) in enumerate(texts)
    ]


def the(number: int, noun: str) -> str:
    """Return a definite noun with its count: ``the only filter``, ``the 3 filters``."""
    return f"the only {noun}" if number == 1 else f"the {number} {noun}s"


def every(number: int, noun: str) -> str:
    """Return a noun for each item: ``the only filter``, ``each of the 3 filters``."""
    return the(number, noun) if number == 1 else f"each of {the(number, noun)}"


def listed(items: Sequence[str]) -> str:
    """Return items as an enumeration: ``H``, ``H and W`` or ``D, H and W``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def sized(sizes: Sequence[int], noun: str) -> str:
    """Return a spatial shape with its noun: ``1 tap``, ``3 taps`` or ``3x3 taps``."""
    return counted(sizes[0], noun) if len(sizes) == 1 else f"{shape_text(sizes)} {noun}s"


def batch_text(problem: ConvProblem, channels: int, sizes: Sequence[int]) -> str:
    """Return the contents of x: ``8 images of 3 channels, 32x32 pixels each``."""
    image, pixel = WORDS[problem.spatial_rank]
    return (
        f"{counted(problem.N, image)} of {counted(channels, 'channel')}, "
        f"{sized(sizes, pixel)}{'' if channels == 1 else ' each'}"
    )


def over_batch(problem: ConvProblem, sizes: Sequence[int]) -> str:
    """Return the part of a sentence on db that names the summed elements of a channel of dy."""
    image, pixel = WORDS[problem.spatial_rank]
    if not problem.N:
        return over_images(problem)
    return f" summed over {counted(problem.N, image)} of {sized(sizes, pixel)}"


def over_images(problem: ConvProblem) -> str:
    """Return the part of a sentence that names the images of a sum; "" for one image."""
    image, _ = WORDS[problem.spatial_rank]
    if problem.N == 0:
        return f", summed over no {image}s because the batch is empty"
    return f", summed over the {counted(problem.N, image)}" if problem.N > 1 else ""


def sizes_that_give(sizes: range, output: int) -> str:
    """Return a clause on the input sizes that give an output size."""
    given = interval_text(sizes)
    if len(sizes) == 1:
        return f"only input size {given} gives output size {output}"
    if len(sizes) == 2:
        return f"input sizes {sizes[0]} and {sizes[1]} both give output size {output}"
    return f"input sizes {given} all give output size {output}"


def span_text(axis: ConvAxis) -> str:
    """Return the formula of the number of inputs that all windows together span."""
    return f"({axis.output} - 1)*{axis.stride} + {axis.effective_filter}"


def smallest_input_text(axis: ConvAxis) -> str:
    """Return the formula of the smallest input size that gives an axis's output size."""
    if axis.padding_mode.startswith("same"):
        return f"({axis.output} - 1)*{axis.stride} + 1"
    padding = axis.pad_before + axis.pad_after
    return span_text(axis) + (f" - {padding}" if padding else "")


def interval_dict(sizes: range) -> dict[str, int] | None:
    """Return the first and last of consecutive sizes for JSON; None for an empty range."""
    return {"first": sizes[0], "last": sizes[-1]} if sizes else None


# -- tensors ---------------------------------------------------------------------------------------


def _filter(problem: ConvProblem) -> str:
    taps, channels = sized(problem.filter_sizes, "tap"), _group_channels(problem)
    if _is_depthwise(problem):
        own = counted(problem.K // problem.C, "filter")
        return f"depthwise: {own} of {taps} for each of the {problem.C} input channels"
    on = f"{taps} on {every(channels, 'input channel')}"
    if problem.groups > 1:
        filters = f"{counted(problem.K, 'filter')} in {problem.groups} groups"
        return f"{filters}; each has {on} of its group"
    return f"1 filter with {on}" if problem.K == 1 else f"{problem.K} filters; each has {on}"


def _output(problem: ConvProblem) -> str:
    size, (_, pixel) = shape_text(problem.output_sizes), WORDS[problem.spatial_rank]
    channel = f"{size} channel"
    if problem.spatial_rank == 1:
        channel = f"channel of {sized(problem.output_sizes, pixel)}"
    channels, rule = _group_channels(problem), "y[k] = x[c] correlated with w[k,c]"
    if _is_depthwise(problem):
        rule = "y[k] = the input channel of filter k, correlated with w[k]"
    elif channels == 1:
        rule += ", where c is the only input channel"
    else:
        where = " of k's group" if problem.groups > 1 else ""
        rule += f", summed over {the(channels, 'input channel')} c{where}"
    return f"one {channel} for {every(problem.K, 'filter')}: {rule}"


def _input_gradient(problem: ConvProblem) -> str:
    filters = problem.K // problem.groups
    where = " of c's group" if problem.groups > 1 else ""
    summed = f"summed over {the(filters, 'filter')} k{where}"
    if filters == 1:
        summed = f"where k is the only filter{where}"
    return (
        "one value for each element of x, for any stride and padding; dx[c] = "
        f"dy[k]{_spread(problem)} correlated with the flipped w[k,c], {summed}"
    )


def _filter_gradient(problem: ConvProblem) -> str:
    filters, channels = problem.K // problem.groups, _group_channels(problem)
    operands = f"{the(filters, 'channel')} of dy and {the(channels, 'channel')} of x"
    if problem.groups == 1:
        pairs = f"{operands} form an outer product: nothing is broadcast or averaged over channels"
    elif filters == channels == 1:
        pairs = f"{operands} in each of the {problem.groups} groups form one pair"
    else:
        pairs = f"within each of the {problem.groups} groups, {operands} form an outer product"
    return (
        f"one value for each element of w; dw[k,c] = x[c] correlated with dy[k]{_spread(problem)}"
        f"{over_images(problem)}: {sized(problem.filter_sizes, 'value')} for each pair of k and "
        f"c; {pairs}"
    )


def _spread(problem: ConvProblem) -> str:
    return f" (dilated by stride {one(problem.stride)})" if max(problem.stride) > 1 else ""


def _is_depthwise(problem: ConvProblem) -> bool:
    return problem.groups == problem.C > 1


def _group_channels(problem: ConvProblem) -> int:
    return problem.C // problem.groups


# -- axes ------------------------------------------------------------------------------------------


def _axis(axis: ConvAxis) -> tuple[str, str, str, str]:
    return _padding(axis), _output_size(axis), _input_sizes(axis), _unread(axis)


def _padding(axis: ConvAxis) -> str:
    before, after, word = axis.pad_before, axis.pad_after, axis.padding_mode.upper()
    if word == "VALID":
        return "none (VALID)"
    if word == "EXPLICIT":
        return f"{before} before, {after} after (explicit)" if before + after else "none"
    span = (axis.output - 1) * axis.stride + axis.effective_filter
    windows = (
        f"for {word}, {counted(axis.output, 'window')} {'spans' if axis.output == 1 else 'span'} "
        f"{span_text(axis)} = {counted(span, 'input')}"
    )
    if before + after == 0:
        return f"none: {windows}, and x has {axis.input}"
    side = "before" if before > after else "after"
    odd = f"; the total is odd, and {word} puts the extra position {side}"
    return (
        f"{before} before, {after} after: {windows}, {span - axis.input} more than x has"
        f"{odd if before != after else ''}"
    )


def _output_size(axis: ConvAxis) -> str:
    if axis.dilation == 1:
        return axis.formula
    spans = "spans" if axis.filter == 1 else "span"
    return (
        f"{axis.formula}; {counted(axis.filter, 'tap')} with dilation {axis.dilation} {spans} "
        f"({axis.filter} - 1)*{axis.dilation} + 1 = {axis.effective_filter}"
    )


def _input_sizes(axis: ConvAxis) -> str:
    text = sizes_that_give(axis.valid_input_sizes, axis.output)
    if len(axis.valid_input_sizes) == 1:
        return text
    return f"{text}, so dy does not determine the size of dx; dx has the size of x, {axis.input}"


def _unread(axis: ConvAxis) -> str:
    unread, last = axis.unread_inputs, axis.unread_after
    if unread == 0:
        return "none: every input is in at least one window"
    at_end = "the last" if last == 1 else f"the last {last}"
    which = f"{unread} of the {axis.input} inputs"
    if axis.input == 1:
        which = "the only input"
    elif unread == last:
        which = f"{at_end} of the {axis.input} inputs"
    elif last == 0:
        which += ", between windows or taps"
    else:
        which += f": {at_end}, and some between windows or taps"
    return f"{which}; the gradient there is zero"


def one(values: tuple[int, ...]) -> str:
    """Return per-axis values in short form: ``2`` if all axes have the same value, else ``2x1``."""
    return str(values[0]) if len(set(values)) == 1 else shape_text(values)


def settings(problem: ConvProblem) -> str:
    """Return a layer's settings without its sizes: ``stride 2, padding same, dilation 1, ...``."""
    padding = problem.padding_mode
    if padding == "explicit":
        padding = pairs(problem.padding)
    return (
        f"stride {one(problem.stride)}, padding {padding}, dilation {one(problem.dilation)}, "
        f"groups {problem.groups}, {problem.data_format} with {problem.filter_format}, "
        f"{problem.dtype}"
    )


def pairs(paddings: Sequence[tuple[int, int]]) -> str:
    """Return the paddings of the axes as text: ``1``, ``(0, 1)`` or ``(0, 1) by 1``."""
    texts = [
        str(before) if before == after else f"({before}, {after})" for before, after in paddings
    ]
    return texts[0] if len(set(texts)) == 1 else " by ".join(texts)


def question(problem: ConvProblem) -> str:
    """Return the name of the gradient that is explained first, as in ``Explanation.question``."""
    paddings = (side for pair in problem.padding for side in pair)
    is_plain = max(*problem.stride, *problem.dilation) == 1 and not any(paddings)
    return "dw" if is_plain else "dx"
