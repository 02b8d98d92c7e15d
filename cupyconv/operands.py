"""Arrays that calls take: conversion to NumPy or CuPy arrays; checks of shapes and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cupyconv import arrays, backends, foreign
from cupyconv.backends import Backend
from cupyconv.errors import ConvError, ConvTypeError, Fix
from cupyconv.kernels.strides import contiguous_strides
from cupyconv.prepared import PreparedFilter
from cupyconv.problem import shape_text, shared_dtype


class Layout(NamedTuple):
    """Shape, strides in bytes and dtype of an array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """First byte and end of the elements, relative to the array's address."""
        if 0 in self.shape:
            return 0, 0
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)]
        low, high = (sum(limit(step, 0) for step in steps) for limit in (min, max))
        return low, high + self.itemsize

    def fits(self, array: Any) -> bool:
        """Return whether an array has this layout; strides of axes of one element do not count."""
        if (array.shape, array.dtype) != (self.shape, self.dtype):
            return False
        return 0 in self.shape or arrays.have_same_steps(array, self)

    @staticmethod
    def of(array: Any) -> Layout:
        """Return the layout of a NumPy or CuPy array."""
        return Layout(array.shape, array.strides, array.dtype)

    @staticmethod
    def contiguous(shape: tuple[int, ...], dtype: Any) -> Layout:
        """Return the layout of a C-contiguous array."""
        steps = contiguous_strides(shape)
        return Layout(shape, tuple(step * dtype.itemsize for step in steps), dtype)


def take(names: Sequence[str], given: tuple[Any, ...]) -> tuple[tuple[Any, ...], Backend]:
    """Return the arguments as arrays, and the backend of their device.

    Raises:
        ConvTypeError: an argument is not an array, or is on another device than the first argument
            or the current GPU.
    """
    kind = type(given[0])
    home = arrays.HOMES.get(kind)
    for value in given:
        if home is None or type(value) is not kind:
            given, home = _take_all(names, given)
            break
    assert home is not None
    backend = backends.of(home)
    if backend.ordinal is not None:
        require_current_device(names, given, backend.ordinal)
    return given, backend


def take_filter(w: Any) -> Any:
    """Return a filter as an array; a prepared filter, which also has shape and dtype, unchanged."""
    return w if isinstance(w, PreparedFilter) else arrays.take("w", w)[0]


def _take_all(names: Sequence[str], given: tuple[Any, ...]) -> tuple[tuple[Any, ...], arrays.Home]:
    """Return objects of any supported type as arrays, and their common kind of device."""
    converted = [arrays.take(name, value) for name, value in zip(names, given, strict=False)]
    homes = [home for _, home in converted]
    if homes.count(homes[0]) < len(homes):
        where = ", ".join(
            f"{name} is a {home.value} array" for name, home in zip(names, homes, strict=False)
        )
        raise ConvTypeError(
            f"all arrays must be on one device: {where}. "
            "Move them with cupy.asarray(...) or cupy.asnumpy(...)"
        )
    values = dict(zip(names, given, strict=False))
    dtypes = {name: array.dtype for name, (array, _) in zip(names, converted, strict=False)}
    # The conversion that an error suggests depends on the array's library, known only here.
    shared_dtype(dtypes, lambda name, dtype: foreign.conversion(name, values[name], dtype))
    return tuple([array for array, _ in converted]), homes[0]


def common_dtype(layouts: Mapping[str, Any]) -> str:
    """Return the dtype that all arrays share; their names in ``layouts`` are for errors."""
    return shared_dtype({name: layout.dtype for name, layout in layouts.items()})


def require_bias(name: str, shape: tuple[int, ...], channels: int, owner: str) -> None:
    """Check the shape of a bias.

    Args:
        name: name of the bias in errors.
        shape: shape of the bias.
        channels: number of output channels, which the bias must have.
        owner: name of the tensor that determines ``channels``, in errors.

    Raises:
        ConvError: the bias has another shape.
    """
    if shape != (channels,):
        raise ConvError(
            "the bias must have one value for each output channel",
            f"{name} has shape {shape}, {owner} has {channels} output channels",
            f"Pass a bias of shape ({channels},)",
            candidates=[Fix({"bias_shape": (channels,)}, (f"pass a bias of shape ({channels},)",))],
        )


def require_add(name: str, shape: tuple[int, ...], result: tuple[int, ...]) -> None:
    """Check that an addend, called ``name`` in errors, has the shape of the result.

    Raises:
        ConvError: the addend has another shape.
    """
    if shape != result:
        raise ConvError(
            f"{name} must have the result's shape",
            f"{name} is {shape_text(shape) or 'a scalar'}, the result is {shape_text(result)}",
            f"Pass {name} with shape {result}",
        )


def require_add_apart(name: str, add: Any, out_name: str, out: Any, home: arrays.Home) -> None:
    """Check that an addend is ``out`` itself or shares no memory with it.

    Raises:
        ConvError: the addend is another array, but shares memory with ``out``.
    """
    if not arrays.are_same(add, out, home) and arrays.overlap(add, out, home):
        raise ConvError(
            f"{name} must be {out_name} itself or share no memory with it",
            f"{name} shares memory with {out_name}, but has another address, shape or strides",
            f"Pass a copy of {name}",
        )


def require_current_device(names: Sequence[str], given: Sequence[Any], current: int) -> None:
    for position, array in enumerate(given):
        device = array.data.device_id
        if device != current:
            raise ConvTypeError(
                f"all arrays must be on the current device: {names[position]} is on device "
                f"{device}, the current device is {current}. "
                f"Compute under `with cupy.cuda.Device({device}):`"
            )


def take_out(out_name: str, out: Any, backend: Backend) -> Any:
    """Return ``out`` as a NumPy or CuPy array, after checking that a backend may write to it.

    Args:
        out_name: name of ``out`` in errors.
    """
    array, out_home = arrays.take_out(out_name, out)
    if out_home is not backend.home:
        raise ConvTypeError(
            f"{out_name} must be on the inputs' device: {out_name} is a {out_home.value} array, "
            f"the inputs are {backend.home.value} arrays. Pass a {backend.home.value} array"
        )
    if backend.ordinal is not None:
        require_current_device((out_name,), (array,), backend.ordinal)
    return array


def require_apart(out_name: str, out: Any, inputs: Mapping[str, Any], home: arrays.Home) -> None:
    """Check that ``out`` shares no memory with ``inputs``, keyed by their names in errors."""
    for name, other in inputs.items():
        if arrays.overlap(out, other, home):
            raise ConvError(
                f"{out_name} must not share memory with an input",
                f"{out_name} overlaps {name}",
                f"Pass a new array as {out_name}, or a copy of {name}",
            )


def written_to(out: Any) -> Any:
    """Report to PyTorch that ``out`` was written, if it is a tensor, and return ``out``."""
    foreign.record_write(out)
    return out


def require_out(name: str, out: Layout, shape: tuple[int, ...], dtype: str) -> None:
    if out.dtype != arrays.numpy_dtype(dtype):
        raise ConvTypeError(
            f"{name} must have the inputs' dtype: {name} is {out.dtype}, the inputs are {dtype}. "
            f"Pass an array of dtype {dtype}"
        )
    if out.shape != shape:
        raise ConvError(
            f"{name} must have the result's shape",
            f"{name} is {shape_text(out.shape) or 'a scalar'}, the result is {shape_text(shape)}",
            f"Pass an array of shape {shape}",
        )
    if arrays.overlaps_itself(out.shape, out.strides, out.itemsize):
        raise ConvError(
            f"the elements of {name} must not overlap in memory",
            f"{name} has shape {out.shape} and strides of {out.strides} bytes",
            "Pass a new array, and copy the result from it",
        )
