"""Shapes of a transposed layer, and the reason for each.

A transposed layer computes the input gradient of a convolution as its forward pass.  The sentences
here use the transposed layer's names: its x has the shape of the convolution's y, and its y has the
shape of the convolution's x.  Indices: n image, k input channel (a filter of the convolution), c
output channel.  A ``problem`` or ``axis`` is that of the convolution.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cupyconv.explaining import crops, receptive, shapes
from cupyconv.explaining.shapes import Reason, every, over_images, sized, the
from cupyconv.explaining.terms import CONVOLUTION_NAMES
from cupyconv.markup import Paragraph, Section, Table
from cupyconv.problem import ConvAxis, ConvProblem, counted, interval_text, shape_text


class TransposedAxis(NamedTuple):
    """Rules of one spatial axis of a transposed layer, or of several axes with equal rules.

    Attributes:
        axes: names of the axes, such as ("H", "W").
        padding: what the padding crops from the full result, the result without padding.
        output: formula of the output size, with the layer's numbers.
        output_padding: the possible values of ``output_padding``, and why there are no others.
        frameworks: clause on the output size in JAX and Keras; "" if it is the same there.
        unreached: outputs that no input reaches.
        receptive: inputs that an output reads.
    """

    axes: tuple[str, ...]
    padding: str
    output: str
    output_padding: str
    frameworks: str
    unreached: str
    receptive: str

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Rows of a table with the columns axes, rule and text; rules without text are left out."""
        rules = ("padding", "output size", "output_padding", "elsewhere", "unreached")
        pairs = zip((*rules, "receptive field"), self[1:], strict=True)
        return shapes.rows(self.axes, [(rule, text) for rule, text in pairs if text])


def output_padding(axis: ConvAxis) -> int:
    """Return a transposed layer's output size minus the smallest size for the same input size."""
    return axis.input - axis.first_input_size_for(axis.output)


def reasons(problem: ConvProblem) -> tuple[Reason, ...]:
    """Return the shapes of a transposed layer's x, w, y, dy, dx, dw and db, with reasons."""
    outputs = problem.input_sizes
    filters, channels = problem.K // problem.groups, problem.C // problem.groups
    grouped = " of its group" if problem.groups > 1 else ""
    step = (
        f"{shapes.one(problem.stride)} apart" if max(problem.stride) > 1 else "next to each other"
    )
    copies = f"copies of w[k,c], {step}, each multiplied by one element of x[k]"
    correlated = "dy[c] correlated with w[k,c]"
    _, pixel = shapes.WORDS[problem.spatial_rank]
    return (
        Reason(
            "x", problem.output_shape, shapes.batch_text(problem, problem.K, problem.output_sizes)
        ),
        Reason(
            "w",
            problem.filter_shape,
            f"{counted(problem.K, 'filter')}, one for each input channel; "
            f"{'it' if problem.K == 1 else 'each'} has {sized(problem.filter_sizes, 'tap')} on "
            f"{every(channels, 'output channel')}{grouped}",
        ),
        Reason(
            "y",
            problem.input_shape,
            f"one channel of {sized(outputs, pixel)} for {every(problem.C, 'output channel')}: "
            f"y[c] = {copies}, summed over {the(filters, 'input channel')} k{grouped}",
        ),
        Reason(
            "dy",
            problem.input_shape,
            "gradient of the loss with respect to y: one value for each element of y",
        ),
        Reason(
            "dx",
            problem.output_shape,
            f"one value for each element of x; dx[k] = {correlated}, summed over "
            f"{the(channels, 'output channel')} c{grouped}: an ordinary convolution",
        ),
        Reason(
            "dw",
            problem.filter_gradient_shape,
            "one value for each element of w; dw[k,c] = dy[c] correlated with x[k]"
            f"{over_images(problem)}: x and dy swap the roles that they have in a convolution",
        ),
        Reason(
            "db",
            (problem.C,),
            f"one value for each output channel: dy[c]{shapes.over_batch(problem, outputs)}",
        ),
    )


def axis_reasons(problem: ConvProblem) -> tuple[TransposedAxis, ...]:
    """Return the rules of each spatial axis; adjacent axes with equal rules share an entry."""
    return tuple(TransposedAxis(names, *texts) for names, texts in shapes.merged(problem, _axis))


def section(problem: ConvProblem) -> Section:
    """Return the part of an explanation that describes the transposed layer."""
    explained = reasons(problem)
    texts = {entry.tensor: shape_text(entry.shape) for entry in explained}
    tensors = [
        (entry.tensor, texts[entry.tensor], CONVOLUTION_NAMES.get(entry.tensor, ""), entry.reason)
        for entry in explained
    ]
    return Section(
        "The transposed layer",
        (
            Paragraph(
                f"x {texts['x']}, w {texts['w']} -> y {texts['y']}, with a bias of "
                f"{texts['db']}. The forward pass of this layer computes the input gradient of "
                "the convolution that is explained below. So most of the layer's tensors have "
                "another name in that convolution:"
            ),
            Table(("tensor", "shape", "name below", "why"), tuple(tensors)),
            Table(
                ("axis", "", ""),
                tuple(row for entry in axis_reasons(problem) for row in entry.rows),
            ),
            *crops.blocks(problem, is_transposed=True),
        ),
    )


def to_dict(problem: ConvProblem) -> dict[str, Any]:
    """Return what the transposed layer adds to an explanation, as plain data for JSON."""
    explained = reasons(problem)
    return {
        "shapes": {entry.tensor: list(entry.shape) for entry in explained},
        "reasons": {entry.tensor: entry.reason for entry in explained},
        "names_in_convolution": CONVOLUTION_NAMES,
        "axes": [{**entry._asdict(), "axes": list(entry.axes)} for entry in axis_reasons(problem)],
    }


# -- one axis --------------------------------------------------------------------------------------


def _axis(axis: ConvAxis) -> tuple[str, ...]:
    return (
        _padding(axis),
        _output_size(axis),
        _output_padding(axis),
        _frameworks(axis),
        _unreached(axis),
        receptive.text(axis, is_transposed=True),
    )


def _padding(axis: ConvAxis) -> str:
    before, after = axis.pad_before, axis.pad_after
    if not before + after:
        return "none: nothing is cropped"
    return (
        f"{before} before, {after} after: cropped from the full result, whose size is "
        f"{shapes.span_text(axis)} = {crops.full_size(axis)}"
    )


def _output_size(axis: ConvAxis) -> str:
    return (
        f"{shapes.smallest_input_text(axis)} + output_padding {output_padding(axis)} = {axis.input}"
    )


def _output_padding(axis: ConvAxis) -> str:
    sizes = axis.valid_input_sizes
    if len(sizes) == 1:
        return (
            f"only {output_padding(axis)}: the convolution that the layer reverses turns only size "
            f"{sizes[0]} into {axis.output}"
        )
    first = axis.first_input_size_for(axis.output)
    possible = range(sizes[0] - first, sizes[-1] - first + 1)
    choices, each = interval_text(possible), f"each size from {interval_text(sizes)}"
    if len(sizes) == 2:
        choices = f"{possible[0]} or {possible[1]}"
        each = f"sizes {sizes[0]} and {sizes[1]}"
    beyond = axis.of_input(sizes[-1] + 1).output
    return (
        f"{choices}: the convolution that the layer reverses, of stride {axis.stride}, turns "
        f"{each} into {axis.output}, but size {sizes[-1] + 1} into {beyond}"
    )


def _frameworks(axis: ConvAxis) -> str:
    """Return a clause on the default output size of JAX and Keras, if this layer's size differs."""
    is_same = axis.padding_mode.startswith("same")
    if axis.padding_mode == "explicit" and axis.pad_before + axis.pad_after:
        return ""
    word = axis.padding_mode.upper() if is_same else "VALID"
    size = axis.output * axis.stride
    size += 0 if is_same else max(axis.effective_filter - axis.stride, 0)
    if size == axis.input:
        return ""
    theirs = size - axis.first_input_size_for(axis.output)
    return f"JAX and Keras give {size} for {word}; output_padding {theirs} gives this size here"


def _unreached(axis: ConvAxis) -> str:
    unread, last = axis.unread_inputs, axis.unread_after
    if not unread:
        return ""
    where = "between the filter's copies or taps"
    at_end = "the last one" if last == 1 else f"the last {last}"
    if last:
        where = at_end if unread == last else f"{at_end} and those {where}"
    which = f"of the {axis.input} outputs, {where}" if axis.input > 1 else "output, the only one"
    return f"{unread} {which}; y is the bias there"
