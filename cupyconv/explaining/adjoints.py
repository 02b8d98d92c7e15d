"""The gradients dx and dw as convolutions: sizes, dilation of the operands, and padding."""

from __future__ import annotations

from dataclasses import dataclass

from cupyconv.problem import ConvAxis, ConvProblem


@dataclass(frozen=True)
class AdjointAxis:
    """A spatial axis of the convolution that computes a gradient.

    Attributes:
        rule: sizes of this convolution as a ConvAxis.  For dx, its input is dy dilated with zeros,
            and its filter is w.  For dw, its input is x, and its filter is dy.  Negative padding
            crops the input.
        formulas: formulas of the padding before and of the padding after, as text with the layer's
            sizes.
    """

    rule: ConvAxis
    formulas: tuple[str, str]

    @property
    def padding(self) -> tuple[int, int]:
        """Padding before and after the input of ``rule``."""
        return self.rule.pad_before, self.rule.pad_after


def input_gradient_axis(axis: ConvAxis) -> AdjointAxis:
    """Return the convolution along an axis that computes dx: dilated dy with the flipped filter."""
    spread = (axis.output - 1) * axis.stride + 1
    span = axis.effective_filter
    before = span - 1 - axis.pad_before
    after = axis.input + span - 1 - spread - before
    formulas = (
        f"{span} - 1 - {axis.pad_before} = {before}",
        f"{axis.input} + {span} - 1 - {spread} - {_bracket(before)} = {after}",
    )
    rule = ConvAxis(axis.name, spread, axis.filter, 1, axis.dilation, before, after, "explicit")
    return AdjointAxis(rule, formulas)


def filter_gradient_axis(axis: ConvAxis) -> AdjointAxis:
    """Return the convolution along an axis that computes dw: x with dy as the filter.

    Its stride is the layer's dilation, and its dilation is the layer's stride. The padding after x
    is smaller than in the forward pass by the number of positions after the last window. Negative
    padding crops inputs that no window reads.
    """
    span = (axis.output - 1) * axis.stride + 1
    reach = axis.effective_filter - 1 + span
    before, after = axis.pad_before, reach - axis.input - axis.pad_before
    formulas = (
        f"pad before of the forward pass, {before}",
        f"{axis.effective_filter} - 1 + {span} - {axis.input} - {before} = {after}",
    )
    rule = ConvAxis(
        axis.name, axis.input, axis.output, axis.dilation, axis.stride, before, after, "explicit"
    )
    return AdjointAxis(rule, formulas)


def output_padding(axis: ConvAxis) -> int:
    """Return the input size minus the smallest one with the same output size and padding."""
    return axis.padded_input - axis.effective_filter - (axis.output - 1) * axis.stride


def input_gradient_axes(problem: ConvProblem) -> tuple[AdjointAxis, ...]:
    """Return ``input_gradient_axis`` of every axis."""
    return tuple(map(input_gradient_axis, problem.axes))


def filter_gradient_axes(problem: ConvProblem) -> tuple[AdjointAxis, ...]:
    """Return ``filter_gradient_axis`` of every axis."""
    return tuple(map(filter_gradient_axis, problem.axes))


def _bracket(number: int) -> str:
    return f"({number})" if number < 0 else str(number)
