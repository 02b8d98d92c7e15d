"""Where arrays live, and the only module that imports CuPy.

NumPy arrays are computed on the CPU, CuPy arrays on the GPU.  Objects of other libraries come in
without a copy through DLPack or ``__cuda_array_interface__``; ``as_kind_of`` gives results back to
such a library.
"""

from __future__ import annotations

import ctypes
import re
import sys
from enum import Enum
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cupyconv.errors import ConvTypeError, CupyconvError, DeviceError, install_command

if TYPE_CHECKING:
    import numpy as np

    Scalar = TypeVar("Scalar", bound=np.generic)
    """What the numbers of a NumPy array are."""

    class _CuPy(Protocol):
        """CuPy's arrays, by what only they have: a type checker need not find CuPy's types."""

        @property
        def nbytes(self) -> int: ...
        def get(self, *arguments: Any, **keywords: Any) -> Any: ...

    CuPyArray = TypeVar("CuPyArray", bound=_CuPy)

    class _DLPack(Protocol):
        def __dlpack__(self, *arguments: Any, **keywords: Any) -> Any: ...

    class _CudaArray(Protocol):
        @property
        def __cuda_array_interface__(self) -> Any: ...

    Exporter = _DLPack | _CudaArray
    """An object whose memory comes in without a copy."""

_Kind = TypeVar("_Kind")

# Device types of the DLPack specification, dlpack.h.
_DLPACK_CPU = (1, 3)  # pageable, pinned
_DLPACK_CUDA = (2, 13)  # device, managed
# Its codes of the kinds of numbers.
_DLPACK_UINT = 1
_DLPACK_BFLOAT = 4


class Home(Enum):
    """Which memory an array is in."""

    CPU = "NumPy"
    GPU = "CuPy"


HOMES: dict[type, Home] = {}
"""Where arrays of the types that have come in so far are; looked up by every call."""

_cupy: ModuleType | None = None  # once it is imported


def cupy() -> ModuleType:
    """The CuPy package.

    Raises:
        DeviceError: it is not installed, or its own import fails.
    """
    global _cupy
    if _cupy is not None and sys.modules.get("cupy") is _cupy:
        return _cupy  # an import statement takes several times as long
    try:
        import cupy as module
    except ImportError as error:
        raise DeviceError(
            f"CuPy could not be imported ({error}). "
            f"Install it with: {install_command('cuda13')} (or likewise for CUDA 12)"
        ) from error
    _cupy = module
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
            ``__cuda_array_interface__``.  Of a class derived from NumPy's, such as memmap, the
            plain array is taken.

    Raises:
        ConvTypeError: it is none of these, a masked array or a matrix, or it does not export its
            memory.
        DeviceError: it is on a GPU and CuPy is not installed.
    """
    import numpy as np

    if type(value) is np.ndarray:
        HOMES[np.ndarray] = Home.CPU
        return value, Home.CPU
    if isinstance(value, np.ndarray):
        require_plain(name, value)
        return value.view(np.ndarray), Home.CPU
    module = sys.modules.get("cupy")
    if module is not None and isinstance(value, module.ndarray):
        HOMES[type(value)] = Home.GPU
        return value, Home.GPU
    try:
        if getattr(value, "requires_grad", False):
            raise ConvTypeError(
                f"{name} requires grad, and what is computed on its memory is not recorded. "
                "Call cupyconv.torch.conv2d or its like, which are differentiated, or pass "
                f"{name}.detach()"
            )
        # DLPack first: it orders the streams of the two libraries, the other does not.
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            device_type = int(value.__dlpack_device__()[0])
            if device_type in _DLPACK_CPU:
                return _numpy_from_dlpack(value), Home.CPU
            if device_type in _DLPACK_CUDA:
                return cupy().from_dlpack(value), Home.GPU
        if hasattr(value, "__cuda_array_interface__"):
            return cupy().asarray(value), Home.GPU
    except (CupyconvError, MemoryError):
        raise
    except Exception as error:  # each library has its own
        words = str(error) if isinstance(error, _SAYING) else f"{type(error).__name__}: {error}"
        raise ConvTypeError(
            f"{name} of type {_type_name(value)} does not export its memory: {words}. "
            "Pass a NumPy or CuPy array"
        ) from error
    raise ConvTypeError(
        f"{name} must be a NumPy or CuPy array, or export DLPack: got {_type_name(value)}. "
        f"{_way_in(name, value)}"
    )


_SAYING = (BufferError, RuntimeError, TypeError, ValueError)
"""Errors whose text alone says what is wrong; that of a KeyError is only the key."""


def require_plain(name: str, value: Any) -> None:
    """Check that an array's class does not say what no pass would heed.

    Raises:
        ConvTypeError: it has a mask, or is a matrix, which cannot have more than two axes.
    """
    import numpy as np

    if isinstance(value, np.ma.MaskedArray):
        raise ConvTypeError(
            f"{name} is a masked array, and a convolution knows no masks. "
            f"Pass {name}.filled(0), which has zeros there, or {name}.data, which has all values; "
            f"of Dask's arrays, dask.array.ma.filled({name}, 0)"
        )
    if isinstance(value, np.matrix):
        raise ConvTypeError(
            f"{name} is a numpy.matrix, which has two axes, always. Pass numpy.asarray({name})"
        )


def _way_in(name: str, value: Any) -> str:
    """What to do with an object that has no memory to compute on."""
    library = type(value).__module__.split(".")[0]
    if library == "dask":
        return "Call cupyconv.dask, which has the same functions for Dask's arrays"
    if library == "cupyconv":
        return f"It is read by the functions of cupyconv itself; pass {name}.array here"
    if library == "jax":
        return "Inside jax.jit and jax.grad there are no numbers yet: call it outside of them"
    return f"Convert it first, for example numpy.asarray({name}, dtype='float32')"


def as_kind_of(array: Any, like: _Kind) -> _Kind:
    """A result as an array of the library that ``like`` is of, over the same memory.

    Args:
        array: a NumPy or CuPy array, such as every function here gives.
        like: an array of NumPy, CuPy, PyTorch, JAX, TensorFlow, or of another library with the
            array API standard's ``from_dlpack``.

    Returns:
        ``array`` itself where that is its kind already.  Copied is what a library does not take as
        it is: negative strides, and by JAX memory that is not aligned to 64 bytes.

    Raises:
        ConvTypeError: the library takes no arrays by DLPack, not this one, or changes its dtype.
        DeviceError: CuPy is needed and missing.
    """
    source, home = take("array", array)
    if isinstance(like, type(source)):
        return source
    if any(stride < 0 for stride in source.strides):
        source = source.copy(order="C")  # PyTorch does not refuse them, it aborts
    exported: Any = source
    if home is Home.CPU and source.dtype == numpy_dtype("bfloat16"):
        exported = _Relabelled(source.view("uint16"), _DLPACK_BFLOAT)
    try:
        given = _from_dlpack_of(like)(exported)
    except ConvTypeError:
        raise
    except Exception as error:  # each library has its own
        raise ConvTypeError(
            f"{_type_name(like)} does not take an array of {source.dtype} in {home.value}'s "
            f"memory: {error}. Convert it with that library's own functions"
        ) from error
    kept = str(source.dtype)
    if not re.search(rf"\b{kept}\b", str(given.dtype)):
        raise ConvTypeError(
            f"{_type_name(like)} must keep the dtype: {kept} became {given.dtype}. "
            f"Convert first, for example y.astype({str(given.dtype)!r}), or permit {kept} there"
        )
    return given


def on_host(array: Any) -> Any:
    """A NumPy or CuPy array as NumPy's; of CuPy's, a copy that waits for the current stream."""
    return array.get() if hasattr(array, "get") else array


def _from_dlpack_of(like: Any) -> Any:
    """The function of a library that takes an object exporting DLPack."""
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack
    library = type(like).__module__.split(".")[0]
    module: Any = sys.modules.get(library)
    if library == "tensorflow":  # takes the capsule, where the others take its exporter
        take_capsule = module.experimental.dlpack.from_dlpack
        return lambda exported: take_capsule(exported.__dlpack__())
    if hasattr(module, "from_dlpack"):
        return module.from_dlpack
    raise ConvTypeError(
        f"arrays are given back to libraries that take DLPack: {_type_name(like)} is of none. "
        "Pass an array of NumPy, CuPy, PyTorch, JAX or TensorFlow"
    )


def _numpy_from_dlpack(value: Any) -> np.ndarray:
    """A NumPy array over the memory of an object that exports DLPack."""
    import numpy as np

    if "bfloat16" not in str(getattr(value, "dtype", "")):
        return np.from_dlpack(value)
    # NumPy exchanges the dtypes of its own only, which bfloat16 is not.
    return np.from_dlpack(_Relabelled(value, _DLPACK_UINT)).view(numpy_dtype("bfloat16"))


class _Relabelled:
    """Exports another object's memory as another kind of numbers of the same size."""

    def __init__(self, owner: Any, code: int) -> None:
        self._owner, self._code = owner, code

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._owner.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        capsule = self._owner.__dlpack__(**keywords)
        api = ctypes.pythonapi
        api.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
        api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        # Offsets of DLDataType.code in dlpack.h: DLTensor has it after data, device and ndim;
        # DLManagedTensor begins with the tensor, DLManagedTensorVersioned has 32 bytes before it.
        for capsule_name, offset in ((b"dltensor", 20), (b"dltensor_versioned", 52)):
            if api.PyCapsule_IsValid(capsule, capsule_name):
                address = api.PyCapsule_GetPointer(capsule, capsule_name)
                ctypes.c_uint8.from_address(address + offset).value = self._code
                return capsule
        raise BufferError("its __dlpack__ gives no DLPack capsule")


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


_MOST_WORK: Any = 10_000  # of NumPy's solver; its stub is too narrow


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements of an array that lies in memory like this share a byte.

    Exact unless that takes too long; then they count as sharing one.
    """
    axes = sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True))
    reach = itemsize  # of the axes with smaller strides
    for stride, size in axes if 0 not in shape else ():
        if size > 1 and stride < reach:
            break
        reach += (size - 1) * stride
    else:
        return False  # every array whose axes lie inside one another, sliced or reversed ones too
    return _some_meet(shape, strides, itemsize)


def _some_meet(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether elements share a byte, by NumPy's solver.

    Of two that do, each may be moved as far as the other; so if there are any that differ in their
    index of an axis, there are some of which one has the index 0 there.
    """
    import numpy as np

    interface = {"typestr": f"|V{itemsize}", "version": 3}

    def at(shape: list[int], offset: int) -> np.ndarray:
        """The layout at some address, where nothing is ever read."""
        where = {"data": ((1 << 46) + offset, True), "shape": tuple(shape), "strides": strides}
        return np.asarray(SimpleNamespace(__array_interface__=interface | where))

    for axis, size in enumerate(shape):
        if size == 1:
            continue
        first, others = list(shape), list(shape)
        first[axis], others[axis] = 1, size - 1
        try:
            if np.shares_memory(at(first, 0), at(others, strides[axis]), max_work=_MOST_WORK):
                return True
        except np.exceptions.TooHardError:
            return True
    return False


def overlap(a: Any, b: Any, home: Home) -> bool:
    """Whether two arrays of one home share an element of memory.

    Exact for NumPy unless that takes too long; otherwise, and on the GPU, two arrays whose address
    ranges meet count as overlapping.
    """
    import numpy as np

    if home is Home.GPU:
        return bool(cupy().may_share_memory(a, b))
    try:
        return np.shares_memory(a, b, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True
