"""Parameters of a launch, read back from the array of pointers that the driver gets."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cupyconv.gpu.tensormaps import MAP_BYTES
from cupyconv.launch import Launch, Part, TensorMaps


def decoded(launch: Launch, parameters: int) -> tuple[Any, ...]:
    """Return the arguments of a launch, with addresses as np.uint64.

    Args:
        launch: the launch, whose arguments determine the sizes of the parameters.
        parameters: address of the array of pointers.
    """
    pointers = (ctypes.c_void_p * len(launch.arguments)).from_address(parameters)
    return tuple(map(_decoded, launch.arguments, pointers))


def _decoded(argument: Any, pointer: int) -> Any:
    if isinstance(argument, str | Part):
        return np.uint64(ctypes.c_uint64.from_address(pointer).value)
    if isinstance(argument, TensorMaps):
        words = len(argument.maps) * MAP_BYTES // 8
        kind, shape = np.dtype([("maps", "u8", words)]), (1,)
    else:
        kind, shape = np.asarray(argument).dtype, np.shape(argument)
    size = kind.itemsize * int(np.prod(shape))
    values = np.frombuffer(ctypes.string_at(pointer, size), kind).reshape(shape)
    return values if shape else values[()]
