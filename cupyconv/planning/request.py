"""What a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from cupyconv.errors import ConvError, require_word, shown
from cupyconv.planning.device import Device
from cupyconv.planning.strides import Strides
from cupyconv.problem import LARGEST, PASSES, ConvProblem

Precision = Literal["ieee", "tf32", "bf16x6"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

Activation = Literal["relu", "silu", "gelu"]

ACTIVATIONS: tuple[Activation | None, ...] = (None, *get_args(Activation))
"""What the forward pass, or a transposed convolution, may apply to its results."""

Implementation = Literal[
    "reference",
    "numpy",
    "cuda-generic",
    "cuda-gather",
    "cuda-direct",
    "cuda-toeplitz",
    "cuda-patch",
    "cuda-hopper",
    "cuda-hopper-bf16x6",
]
"""The names of the families, for type checkers; when a program runs, the families say them."""

Impl = Literal["auto", Implementation]
"""What ``impl`` takes beside a plan."""


def require_limit(limit: int | None) -> None:
    """Check that it is a number of bytes, or none.

    Raises:
        ConvError: it is neither.
    """
    if limit is not None and (type(limit) is not int or not 0 <= limit <= LARGEST):
        raise ConvError(
            "workspace_limit must be a number of bytes",
            f"got {shown(limit)}",
            "Use 0 for none at all, or None for no limit",
        )


@dataclass(frozen=True)
class Request:
    """One pass of a problem on a device, and what may be done for it.

    Attributes:
        problem: the configuration.
        pass_: "forward", "backprop_input" or "backprop_filter".
        device: where it runs.
        precision: "tf32" permits that float32 operands are rounded to TF32, "bf16x6" that they are
            multiplied as planes of bfloat16; "ieee" permits neither.
        workspace_limit: bytes of device memory that may be used beside the tensors; None is any
            number.
        strides: how the tensors lie in memory; None where they are contiguous.

    Raises:
        ConvError: no such pass or precision, or the limit is not a number of bytes.
    """

    problem: ConvProblem
    pass_: str
    device: Device
    precision: str = "ieee"
    workspace_limit: int | None = None
    strides: Strides | None = None

    def __post_init__(self) -> None:
        require_word("pass", self.pass_, PASSES)
        require_word("precision", self.precision, PRECISIONS)
        require_limit(self.workspace_limit)

    @property
    def operands(self) -> str:
        """What operands are multiplied as: "tf32" for float32 where permitted, else the dtype."""
        permitted = self.problem.dtype == "float32" and self.precision == "tf32"
        return "tf32" if permitted else self.problem.dtype

    @property
    def memory(self) -> Strides:
        """How the tensors lie in memory."""
        return self.strides or Strides.contiguous(self.problem)

    @property
    def reduced(self) -> Request:
        """What the families on a GPU are asked: ``ConvProblem.reduced``; NumPy takes any rules."""
        found = self.problem.reduced if self.device.is_gpu else self.problem
        return self if found is self.problem else replace(self, problem=found)

    def affords(self, workspace_bytes: int) -> bool:
        """Whether a workspace keeps within the limit."""
        return self.workspace_limit is None or workspace_bytes <= self.workspace_limit

    def most_within_limit(self, wanted: int, bytes_each: int) -> int:
        """How many of the wanted parts of a workspace keep within the limit."""
        if self.workspace_limit is None or not bytes_each:
            return wanted
        return min(wanted, self.workspace_limit // bytes_each)
