"""Each gradient said as a convolution: what is spread, flipped and padded, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

from cupyconv.problem import ConvAxis, ConvProblem


@dataclass(frozen=True)
class AdjointAxis:
    """A spatial axis of the convolution that computes a gradient.

    Attributes:
        rule: sizes of that convolution as a ConvAxis: its input is the spread first operand, its
            filter the second operand, its output the gradient.  A negative padding crops.
        spread: distance of the first operand's numbers, with zeros between them.
        size: size of the first operand before it is spread.
        formulas: formulas of the two paddings, with the numbers.
    """

    rule: ConvAxis
    spread: int
    size: int
    formulas: tuple[str, str]

    @property
    def padding(self) -> tuple[int, int]:
        return self.rule.pad_before, self.rule.pad_after


def input_gradient_axis(axis: ConvAxis) -> AdjointAxis:
    """Return dx along an axis: dilated dy, correlated with the flipped, dilated filter."""
    spread = (axis.output - 1) * axis.stride + 1
    span = axis.effective_filter
    before = span - 1 - axis.pad_before
    after = axis.input + span - 1 - spread - before
    formulas = (
        f"{span} - 1 - {axis.pad_before} = {before}",
        f"{axis.input} + {span} - 1 - {spread} - {_bracket(before)} = {after}",
    )
    rule = ConvAxis(axis.name, spread, axis.filter, 1, axis.dilation, before, after, "explicit")
    return AdjointAxis(rule, axis.stride, axis.output, formulas)


def filter_gradient_axis(axis: ConvAxis) -> AdjointAxis:
    """Return dw along an axis: x correlated with dilated dy, with the dilation as stride.

    The padding after is forward's padding minus the inputs after the last window. If negative, it
    crops inputs that no window reads.
    """
    span = (axis.output - 1) * axis.stride + 1
    reach = axis.effective_filter - 1 + span
    before, after = axis.pad_before, reach - axis.input - axis.pad_before
    formulas = (
        f"forward's padding before, {before}",
        f"{axis.effective_filter} - 1 + {span} - {axis.input} - {before} = {after}",
    )
    rule = ConvAxis(
        axis.name, axis.input, axis.output, axis.dilation, axis.stride, before, after, "explicit"
    )
    return AdjointAxis(rule, 1, axis.input, formulas)


def input_gradient_axes(problem: ConvProblem) -> tuple[AdjointAxis, ...]:
    """``input_gradient_axis`` of every axis."""
    return tuple(map(input_gradient_axis, problem.axes))


def filter_gradient_axes(problem: ConvProblem) -> tuple[AdjointAxis, ...]:
    """``filter_gradient_axis`` of every axis."""
    return tuple(map(filter_gradient_axis, problem.axes))


def _bracket(number: int) -> str:
    return f"({number})" if number < 0 else str(number)
