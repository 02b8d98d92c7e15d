"""Each gradient said as a convolution: what is spread, flipped and padded, and by how much."""

from __future__ import annotations

from dataclasses import dataclass

from cupyconv.problem import ConvAxis, ConvProblem


@dataclass(frozen=True)
class AdjointAxis:
    """One spatial axis of the convolution that a gradient is.

    Attributes:
        rule: the sizes of that convolution, as a ConvAxis of its own: its input is the spread first
            operand, its filter the second operand, its output the gradient.  A negative padding
            crops.
        spread: the first operand's numbers are this far apart, with zeros between them.
        size: how many numbers the first operand has before it is spread.
        formulas: how the two paddings come about, with the numbers.
    """

    rule: ConvAxis
    spread: int
    size: int
    formulas: tuple[str, str]

    @property
    def padding(self) -> tuple[int, int]:
        return self.rule.pad_before, self.rule.pad_after


def input_gradient_axis(axis: ConvAxis) -> AdjointAxis:
    """dx along an axis: dy spread by the stride, correlated with the flipped, dilated filter."""
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
    """dw along an axis: x correlated with dy, which is dilated by the stride, in steps of dilation.

    Beyond the last window nothing is needed, so the padding after is forward's less the rest that
    the stride leaves over; below zero it crops the inputs that no window reaches.
    """
    span = (axis.output - 1) * axis.stride + 1
    reach = axis.effective_filter - 1 + span
    before, after = axis.pad_before, reach - axis.input - axis.pad_before
    formulas = (
        f"forward's {before}",
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
