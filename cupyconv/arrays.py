"""Where arrays live, and the only module that imports CuPy.

NumPy arrays are computed on the CPU, CuPy arrays on the GPU.  Objects of other libraries come in
without a copy through DLPack or ``__cuda_array_interface__``.
"""

from __future__ import annotations

import sys
from enum import Enum
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cupyconv.errors import ConvTypeError, DeviceError

if TYPE_CHECKING:
    import numpy as np

# Device types of the DLPack specification, dlpack.h.
_DLPACK_CPU = (1,)
_DLPACK_CUDA = (2, 3, 13)  # device, pinned host, managed


class Home(Enum):
    """Which memory an array is in."""

    CPU = "NumPy"
    GPU = "CuPy"


def cupy() -> ModuleType:
    """The CuPy package.

    Raises:
        DeviceError: it is not installed, or its own import fails.
    """
    try:
        import cupy as module
    except ImportError as error:
        raise DeviceError(
            f"CuPy could not be imported ({error}). "
            "Install it with: pip install 'cupyconv[cuda13]' (or cuda12)"
        ) from error
    return module


@cache
def device_count() -> int:
    """Number of GPUs that CuPy can use; 0 without CuPy or without a driver."""
    try:
        return int(cupy().cuda.runtime.getDeviceCount())
    except DeviceError:
        return 0
    except Exception:  # CUDARuntimeError: no driver, no device, or a driver that is too old
        return 0


def require_gpu() -> ModuleType:
    """The CuPy package, where it has a GPU to run on.

    Raises:
        DeviceError: CuPy is missing, or finds no GPU.
    """
    module = cupy()
    if device_count() == 0:
        raise DeviceError(
            "CuPy finds no usable GPU. `cupyconv env` shows what is missing; "
            "NumPy arrays are computed on the CPU"
        )
    return module


def take(name: str, value: Any) -> tuple[Any, Home]:
    """A NumPy or CuPy array over the memory of ``value``, and where that memory is.

    Args:
        name: what the argument is called, for messages.
        value: a NumPy or CuPy array, or an object that exports DLPack or
            ``__cuda_array_interface__``.

    Raises:
        ConvTypeError: it is none of these, or refuses to export its memory.
        DeviceError: it is on a GPU and CuPy is not installed.
    """
    import numpy as np

    if isinstance(value, np.ndarray):
        return value, Home.CPU
    module = sys.modules.get("cupy")
    if module is not None and isinstance(value, module.ndarray):
        return value, Home.GPU
    try:
        if hasattr(value, "__cuda_array_interface__"):
            return cupy().asarray(value), Home.GPU
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            device_type = int(value.__dlpack_device__()[0])
            if device_type in _DLPACK_CPU:
                return np.from_dlpack(value), Home.CPU
            if device_type in _DLPACK_CUDA:
                return cupy().from_dlpack(value), Home.GPU
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, DeviceError):
            raise
        raise ConvTypeError(
            f"{name} of type {_type_name(value)} does not export its memory: {error}. "
            "Pass a NumPy or CuPy array"
        ) from error
    raise ConvTypeError(
        f"{name} must be a NumPy or CuPy array, or export DLPack: got {_type_name(value)}. "
        "Convert it first, for example numpy.asarray(x, dtype='float32')"
    )


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


@cache
def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of one of the library's dtype names."""
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def overlap(a: Any, b: Any, home: Home) -> bool:
    """Whether two arrays of one home share an element of memory.

    Exact for NumPy unless that takes too long; otherwise, and on the GPU, two arrays whose address
    ranges meet count as overlapping.
    """
    import numpy as np

    if home is Home.GPU:
        return bool(cupy().may_share_memory(a, b))
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]  # stub is too narrow
    except np.exceptions.TooHardError:
        return True
