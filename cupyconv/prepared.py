"""Filters that are copied once, instead of at every call, to the memory order that kernels read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from cupyconv.errors import ConvError
from cupyconv.planning import Device, Request
from cupyconv.problem import ConvProblem, bytes_text, shape_text

_Array_co = TypeVar("_Array_co", covariant=True)


@dataclass(eq=False, repr=False)
class PreparedFilter(Generic[_Array_co]):
    """A filter w, with copies of w in the memory orders that kernels read.

    ``cupyconv.prepare`` creates it, and functions such as ``cupyconv.conv_forward`` accept it as w.

    Attributes:
        array: w itself.
        forms: copies of w, keyed by name, such as "OHWI" for a copy with the channels last; empty
            if kernels read w itself, and for NumPy arrays.
        problem, passes, precision: arguments of ``prepare``.
        device: device of the filter.

    >>> problem = cupyconv.ConvProblem((1, 2, 4, 4), (3, 2, 3, 3))
    >>> prepared = cupyconv.prepare(np.ones(problem.filter_shape, "float32"), problem)
    >>> prepared
    PreparedFilter(3x2x3x3 OIHW float32 on NumPy arrays, for forward and backprop_input: not copied)
    >>> prepared.shape, prepared.ndim, prepared.dtype.name, prepared.nbytes
    ((3, 2, 3, 3), 4, 'float32', 0)
    """

    array: _Array_co
    forms: Mapping[str, Any]
    problem: ConvProblem
    device: Device
    passes: tuple[str, ...]
    precision: str
    calls: dict[Any, Any] = field(default_factory=dict, init=False)  # as in calls.py

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of w."""
        return self.problem.filter_shape

    @property
    def dtype(self) -> Any:
        """Dtype of w."""
        return self.array.dtype  # type: ignore[attr-defined]  # arrays have a dtype

    @property
    def ndim(self) -> int:
        """Number of axes of w."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of all copies of w in bytes, without w itself."""
        return sum(form.nbytes for form in self.forms.values())

    def read_as(self, form: str | None) -> Any:
        """Return the copy of w that has this name; w itself for None, or if there is no such copy.

        >>> problem = cupyconv.ConvProblem((1, 2, 4, 4), (3, 2, 3, 3))
        >>> w = np.ones(problem.filter_shape, "float32")
        >>> cupyconv.prepare(w, problem).read_as("OHWI") is w  # NumPy arrays are not copied
        True
        """
        return self.forms.get(form or "", self.array)

    def __repr__(self) -> str:
        problem = self.problem
        copies = "not copied"
        if self.forms:
            copies = f"copied as {' and '.join(self.forms)}, {bytes_text(self.nbytes)}"
        return (
            f"PreparedFilter({shape_text(self.shape)} {problem.filter_format} {problem.dtype} "
            f"on {_place(self.device)}, for {' and '.join(self.passes)}: {copies})"
        )


def require_use(prepared: PreparedFilter[Any], request: Request) -> None:
    """Check that a prepared filter supports a call.

    Raises:
        ConvError: the call has another layer, device, pass or precision.
    """
    place, differing = _place(prepared.device), _differences(prepared.problem, request.problem)
    if prepared.device != request.device:
        wrong = f"on {place}, the call is on {_place(request.device)}"
    elif differing:
        wrong = f"with {differing[0]}, the call has {differing[1]}"
    elif request.pass_ not in prepared.passes:
        wrong = f"for {' and '.join(prepared.passes)}, the call is {request.pass_}"
    elif request.precision != prepared.precision:
        wrong = f"with precision {prepared.precision!r}, the call has {request.precision!r}"
    else:
        return
    raise ConvError(
        "a prepared filter must be used as it was prepared",
        f"the filter was prepared {wrong}",
        "Prepare w for this call too, with cupyconv.prepare(w, problem, ...), or pass w itself",
    )


def _place(device: Device) -> str:
    from cupyconv import markup  # imported when a filter is shown

    name = markup.in_line(device.name)
    return f"{name} ({device.architecture})" if device.is_gpu else "NumPy arrays"


def _differences(prepared: ConvProblem, called: ConvProblem) -> tuple[str, str] | None:
    """Return the arguments that differ between two layers, as a text for each layer.

    Return None if all arguments except the input's shape are equal.
    """
    mine, theirs = (
        {**layer.keywords, "dtype": layer.dtype, "filter_shape": layer.filter_shape}
        for layer in (prepared, called)
    )
    words = [word for word in mine if mine[word] != theirs[word]]
    if prepared.padding == called.padding:
        # The arguments may differ, such as "same" and 1, but mean the same padding.
        words = [word for word in words if word != "padding"]
    if not words:
        return None
    texts = (", ".join(f"{word} {rules[word]}" for word in words) for rules in (mine, theirs))
    first, second = texts
    return first, second
