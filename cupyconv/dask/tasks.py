"""Functions that the tasks of a graph run on chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyconv import arrays, operations
from cupyconv.dask.ranges import Range, lengths_of
from cupyconv.errors import ConvError
from cupyconv.problem import shape_text


@dataclass(frozen=True)
class Declared:
    """Shape that an operand's Dask array declares for a chunk; the graph relies on it.

    Attributes:
        name: name of the operand.
        number: index of the chunk on each axis.
        shape: the shape that the chunk must have.
    """

    name: str
    number: tuple[int, ...]
    shape: tuple[int, ...]

    def require(self, chunk: Any) -> Any:
        """Return the chunk as a NumPy or CuPy array.

        Raises:
            ConvError: the chunk has another shape.
            ConvTypeError: the chunk's memory does not define its values, as for a masked array.
        """
        chunk, _ = arrays.take(self.name, chunk)
        if tuple(chunk.shape) != self.shape:
            raise ConvError(
                f"a block of {self.name} must have the shape that its Dask array declares",
                f"block {self.number} is {shape_text(chunk.shape) or 'a scalar'}, the declared "
                f"shape is {shape_text(self.shape)}",
                "Correct the chunks where the array is created, for example those passed to "
                "map_blocks, or call compute_chunk_sizes()",
            )
        return chunk


def require_dy(chunk: Any, block_info: Any = None) -> Any:
    """Return a block of dy after checking its shape; Dask passes the block's location."""
    about = block_info[0]
    shape = tuple(stop - start for start, stop in about["array-location"])
    return Declared("dy", tuple(about["chunk-location"]), shape).require(chunk)


def cut(chunk: Any, declared: Declared, where: tuple[slice, ...]) -> Any:
    """Return a copy of a part of a chunk; a view would keep the whole chunk in memory."""
    return declared.require(chunk)[where].copy()


def join(shape: tuple[int, ...], places: Sequence[tuple[slice, ...]], pieces: Sequence[Any]) -> Any:
    """Return a new array with each piece copied to its place."""
    joined = np.empty_like(pieces[0], shape=shape)
    for place, piece in zip(places, pieces, strict=True):
        joined[place] = piece
    return joined


def add(parts: Sequence[Any]) -> Any:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _operands(wide: bool, *operands: Any) -> list[Any]:
    return [array.astype(np.float32) if wide else array for array in operands]


def _forward(
    shape: tuple[int, ...], layer: dict[str, Any], x: Any, w: Any, *bias: Any, wide: bool
) -> Any:
    x, w, *shift = _operands(wide, x, w, *bias)
    if 0 not in x.shape:
        return operations.conv_forward(x, w, *shift, **layer)
    y = np.zeros_like(x, shape=shape)  # all windows are padding
    if shift:
        y += shift[0].reshape([-1 if letter == "C" else 1 for letter in layer["data_format"]])
    return y


def _backprop_input(
    shape: tuple[int, ...],
    layer: dict[str, Any],
    w: Any,
    dy: Any,
    *,
    wide: bool,
    into: tuple[Range, ...],
) -> Any:
    w, dy = _operands(wide, w, dy)
    computed = lengths_of(into)
    if 0 in dy.shape or 0 in computed:  # no window reads this chunk
        return np.zeros_like(dy, shape=shape)
    dx = operations.conv_backprop_input(computed, w, dy, **layer)
    if computed == shape:
        return dx
    whole = np.zeros_like(dy, shape=shape)
    whole[tuple(slice(*span) for span in into)] = dx
    return whole


def _backprop_filter(
    shape: tuple[int, ...], layer: dict[str, Any], x: Any, dy: Any, *, wide: bool
) -> Any:
    x, dy = _operands(wide, x, dy)
    if 0 in x.shape:
        return np.zeros_like(dy, shape=shape)
    return operations.conv_backprop_filter(x, shape, dy, **layer)


COMPUTE: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "backprop_input": _backprop_input,
    "backprop_filter": _backprop_filter,
}
