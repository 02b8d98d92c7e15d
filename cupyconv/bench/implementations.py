"""Calls of cupyconv's public functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cupyconv import operations
from cupyconv.checking import Operands
from cupyconv.problem import ConvProblem


def pass_call(
    problem: ConvProblem, pass_: str, sets: Sequence[Operands], impl: str, precision: str
) -> Callable[[int], Any]:
    """Return a function that runs a pass on the operand set of the given index."""
    arguments = {**problem.keywords, "precision": precision, "impl": impl}
    if pass_ == "forward":
        return lambda i: operations.conv_forward(sets[i].x, sets[i].w, **arguments)
    if pass_ == "backprop_input":
        return lambda i: operations.conv_backprop_input(
            problem.input_shape, sets[i].w, sets[i].dy, **arguments
        )
    return lambda i: operations.conv_backprop_filter(
        sets[i].x, problem.filter_shape, sets[i].dy, **arguments
    )
