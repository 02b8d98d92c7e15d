"""Requests to the planner: one pass of a problem on a device, with its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from cupyconv.errors import ConvError, require_word, shown
from cupyconv.kernels.device import Chip, Device
from cupyconv.kernels.strides import Strides
from cupyconv.problem import LARGEST, PASSES, ConvProblem

Precision = Literal["ieee", "tf32", "bf16x6"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

Activation = Literal["relu", "silu", "gelu"]

ACTIVATIONS: tuple[Activation | None, ...] = (None, *get_args(Activation))
"""Activations that a forward pass or a transposed convolution can apply to its results."""


@dataclass(frozen=True)
class Epilogue:
    """Operations on the sums of a forward pass or a transposed convolution, after the bias.

    Attributes:
        activation: name of the function applied to the sums; None for no activation.
        adds: whether an array with the result's shape and strides is added before the activation.
    """

    activation: str | None = None
    adds: bool = False

    @property
    def defines(self) -> dict[str, str | int]:
        """Macros of cuda/include/epilogue.cuh."""
        defines: dict[str, str | int] = {"ACTIVATION": ACTIVATIONS.index(self.activation)}
        return {**defines, "ADD": 1} if self.adds else defines


PLAIN = Epilogue()
"""Epilogue without an addition and without an activation."""


Implementation = Literal[
    "reference",
    "numpy",
    "cuda-generic",
    "cuda-gather",
    "cuda-direct",
    "cuda-toeplitz",
    "cuda-patch",
    "cuda-columns",
    "cuda-hopper",
    "cuda-hopper-bf16x6",
]
"""Names of the implementations, for type checkers."""

Impl = Literal["auto", Implementation]
"""Names that the argument ``impl`` takes."""


def dtype_class(dtype: str, precision: str) -> str:
    """Return the name of a dtype's class; dtypes of one class have the same prices.

    >>> dtype_class("bfloat16", "ieee"), dtype_class("float32", "tf32")
    ('16-bit', 'tf32')
    """
    if dtype in ("float16", "bfloat16"):
        return "16-bit"
    return dtype if precision == "ieee" else precision


def require_limit(limit: int | None) -> None:
    """Require a workspace limit to be a number of bytes or None.

    Raises:
        ConvError: the limit is neither a non-negative integer nor None.
    """
    if limit is not None and (type(limit) is not int or not 0 <= limit <= LARGEST):
        raise ConvError(
            "workspace_limit must be a non-negative integer, in bytes",
            f"got {shown(limit)}",
            "Use 0 to allow no workspace, or None for no limit",
        )


@dataclass(frozen=True)
class Request:
    """One pass of a problem on a device, with the permitted precision and workspace.

    Attributes:
        problem: the configuration.
        pass_: "forward", "backprop_input" or "backprop_filter".
        device: device of the tensors.
        precision: "tf32" permits rounding float32 operands to TF32, "bf16x6" permits multiplying
            them as sums of three bfloat16 values; "ieee" permits neither.
        workspace_limit: largest number of bytes of device memory in addition to the tensors; None
            for no limit.
        strides: strides of the tensors; None for contiguous tensors.
        figures: data-sheet values of the card to estimate times for; None for the values of the
            architecture's nominal chip (device.py), from which all plans are chosen.
        adds_zeros: whether the problem is a view that extends operands by zeros (views.py).

    Raises:
        ConvError: the pass or the precision is unknown, or the limit is not a number of bytes.
    """

    problem: ConvProblem
    pass_: str
    device: Device
    precision: str = "ieee"
    workspace_limit: int | None = None
    strides: Strides | None = None
    figures: Chip | None = None
    adds_zeros: bool = False

    def __post_init__(self) -> None:
        require_word("pass", self.pass_, PASSES)
        require_word("precision", self.precision, PRECISIONS)
        require_limit(self.workspace_limit)

    @cached_property
    def dtype_class(self) -> str:
        """Name of the class of dtypes that have the same prices (calibration.py)."""
        return dtype_class(self.problem.dtype, self.precision)

    @cached_property
    def operands(self) -> str:
        """Type of the multiplied operands: "tf32" for float32 if permitted, else the dtype."""
        permitted = self.problem.dtype == "float32" and self.precision == "tf32"
        return "tf32" if permitted else self.problem.dtype

    @cached_property
    def chip(self) -> Chip:
        """Data-sheet values of the chip or card, for estimates."""
        return self.figures or self.device.chip

    @cached_property
    def memory(self) -> Strides:
        """Strides of the tensors; strides of contiguous tensors if ``strides`` is None."""
        return self.strides or Strides.contiguous(self.problem)

    @cached_property
    def reduced(self) -> Request:
        """Request for the simpler problem ``ConvProblem.reduced``; unchanged on the CPU."""
        problem = self.problem.reduced if self.device.is_gpu else self.problem
        return self if problem is self.problem else replace(self, problem=problem)

    def affords(self, workspace_bytes: int) -> bool:
        """Return whether a workspace of this size is within the limit."""
        return self.workspace_limit is None or workspace_bytes <= self.workspace_limit

    def most_within_limit(self, most: int, bytes_each: int) -> int:
        """Return the largest number of parts, at most ``most``, that fit the workspace limit.

        Args:
            most: largest number of parts without a limit.
            bytes_each: workspace bytes per part.
        """
        if self.workspace_limit is None or not bytes_each:
            return most
        return min(most, self.workspace_limit // bytes_each)
