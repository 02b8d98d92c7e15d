"""Arrays of NumPy, CuPy and other libraries; the only module that imports CuPy.

Convolutions of NumPy arrays run on the CPU, and convolutions of CuPy arrays run on the GPU.
Arrays of other libraries are read without a copy through DLPack or ``__cuda_array_interface__``.
``as_kind_of`` converts results to arrays of those libraries.
"""

from __future__ import annotations

import ctypes
import re
import sys
from contextlib import suppress
from enum import Enum
from functools import cache
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from cupyconv import foreign
from cupyconv.errors import ConvError, ConvTypeError, CupyconvError, DeviceError, install_command
from cupyconv.signals import uninterrupted

if TYPE_CHECKING:
    import numpy as np

    Scalar = TypeVar("Scalar", bound=np.generic)
    """Scalar type of a NumPy array."""

    class _CuPy(Protocol):
        """Protocol of CuPy arrays, for type checkers without CuPy's types."""

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
    """Array of another library, which exports its memory through one of the two protocols."""

_Kind = TypeVar("_Kind")

# Device types of the DLPack specification, dlpack.h.
_DLPACK_CPU = (1, 3)  # pageable, pinned
_DLPACK_CUDA = (2, 13)  # device, managed
# Type codes of the DLPack specification, dlpack.h.
_DLPACK_UINT = 1
_DLPACK_BFLOAT = 4
# Bit of DLManagedTensorVersioned.flags in dlpack.h.
_DLPACK_READ_ONLY = 1


class Home(Enum):
    """Kind of device that holds an array: the CPU for NumPy arrays, a GPU for CuPy arrays."""

    CPU = "NumPy"
    GPU = "CuPy"


HOMES: dict[type, Home] = {}
"""Kind of device, keyed by array type; ``take`` adds numpy.ndarray and cupy.ndarray.

Every call looks up its arrays' types here first, which is faster than ``take``.
"""

_cupy: ModuleType | None = None  # the CuPy package, once imported


def cupy() -> ModuleType:
    """Return the CuPy package.

    Raises:
        DeviceError: CuPy is not installed, or its import fails.
    """
    global _cupy
    if _cupy is not None and sys.modules.get("cupy") is _cupy:
        return _cupy  # an import statement takes several times as long
    try:
        module = _import() if "cupy" in sys.modules else uninterrupted(_import)
    except ImportError as error:
        raise DeviceError(
            f"CuPy could not be imported ({error}). "
            f"Install it with: {install_command('cuda13')} (or cuda12 for CUDA 12)"
        ) from error
    _cupy = module
    return module


def _import() -> ModuleType:
    import cupy

    return cupy


@cache
def device_count() -> int:
    """Return the number of GPUs that CuPy can use; 0 if CuPy or a usable driver is missing."""
    try:
        return int(cupy().cuda.runtime.getDeviceCount())
    except Exception:  # DeviceError; CUDARuntimeError: no driver, no device, or too old a driver
        return 0


def require_gpu() -> ModuleType:
    """Return the CuPy package, after checking that there is a GPU.

    Raises:
        DeviceError: CuPy is missing, or finds no GPU.
    """
    module = cupy()
    if device_count() == 0:
        raise DeviceError(
            "CuPy finds no usable GPU. `cupyconv env` shows what is missing; "
            "convolutions of NumPy arrays run on the CPU"
        )
    return module


def take(name: str, value: Any) -> tuple[Any, Home]:
    """Return ``value`` as a NumPy or CuPy array, and the kind of device that holds it.

    The array shares the memory of ``value``, unless ``foreign.resolve`` returns a copy.

    Args:
        name: name of the argument, for messages.
        value: a NumPy or CuPy array, or an object that exports DLPack or
            ``__cuda_array_interface__``.  An array of a derived class, such as numpy.memmap, is
            returned as a plain array.

    Raises:
        ConvTypeError: ``value`` has another type, or its memory alone does not determine its
            values; see ``foreign.require_plain`` and ``foreign.resolve``.
        DeviceError: the memory is on a GPU and CuPy is not installed.
    """
    import numpy as np

    kind = type(value)
    if kind is np.ndarray:
        HOMES[kind] = Home.CPU
        return value, Home.CPU
    if issubclass(kind, np.ndarray):
        foreign.require_plain(name, value, np.ndarray)
        return np.ndarray.view(value, np.ndarray), Home.CPU
    module = sys.modules.get("cupy")
    if module is not None and issubclass(kind, module.ndarray):
        if kind is module.ndarray:
            HOMES[kind] = Home.GPU
            return value, Home.GPU
        foreign.require_plain(name, value, module.ndarray)
        return module.ndarray.view(value, module.ndarray), Home.GPU
    if foreign.is_compiling():
        return sys.modules["torch"].compiler.disable(_take_exported)(name, value)
    return _take_exported(name, value)


def _take_exported(name: str, value: Any) -> tuple[Any, Home]:
    """Run ``take`` for an object of another library; torch.compile must not trace this function."""
    try:
        value = foreign.resolve(name, value)
        torch = foreign.torch_of(value)
        is_usual = torch is not None and type(value).__dlpack__ is torch.Tensor.__dlpack__
        if is_usual and value.device.type == "cpu":
            return tensor_memory(value), Home.CPU
        # DLPack comes first because it always orders the streams of the two libraries.  With
        # __cuda_array_interface__, CuPy waits only if the exporter names its stream.
        if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
            device_type = int(value.__dlpack_device__()[0])
            if device_type in _DLPACK_CPU:
                return _numpy_from_dlpack(value), Home.CPU
            if device_type in _DLPACK_CUDA:
                return cupy().from_dlpack(value), Home.GPU
        if hasattr(value, "__cuda_array_interface__"):
            if value.__cuda_array_interface__.get("mask") is not None:
                raise ConvTypeError(
                    f"{name} has a mask (__cuda_array_interface__), and masks are not supported. "
                    "Pass an array without a mask, such as a copy with zeros at the masked elements"
                )
            return cupy().asarray(value), Home.GPU
    except (CupyconvError, MemoryError):
        raise
    except Exception as error:  # each library raises its own types
        words = str(error)
        if not isinstance(error, _EXPLANATORY):
            words = f"{type(error).__name__}: {words}"
        narrow = re.search(_NARROW, str(getattr(value, "dtype", "")))
        remedy = "Pass a NumPy or CuPy array"
        if narrow is not None:
            wider = "complex64" if "complex" in narrow[0] else "float32"
            remedy = f"Convert it, for example {foreign.conversion(name, value, wider)}"
        raise ConvTypeError(
            f"{name} of type {foreign.type_name(value)} does not export its memory: "
            f"{words.rstrip('.')}. {remedy}"
        ) from error
    raise ConvTypeError(
        f"{name} must be a NumPy or CuPy array, or export DLPack: got "
        f"{foreign.type_name(value)}. {foreign.way_in(name, value)}"
    )


_NARROW = r"\b(u?int[124]|float[468]_\w+|complex32)\b"
"""Pattern of dtypes with few bits, which few libraries can exchange."""

_EXPLANATORY = (BufferError, RuntimeError, TypeError, ValueError)
"""Exceptions whose message explains the error; a KeyError's message is only the key."""


def take_out(name: str, value: Any) -> tuple[Any, Home]:
    """Run ``take`` for an array that will hold a result, and check that its memory is writable.

    Raises:
        ConvError: the memory is read-only.
        ConvTypeError: as for ``take``; or writing to the memory would not change the values of
            ``value``, for example because PyTorch negates the tensor lazily.
        DeviceError: as for ``take``.
    """
    if HOMES.get(type(value)) is Home.GPU:
        return value, Home.GPU  # CuPy has no read-only arrays
    array, home = take(name, value)
    if type(value) not in HOMES:
        foreign.require_own_memory(name, value)
    if _is_read_only(value, array, home):
        raise ConvError(f"{name} must be writeable", "it is read-only", "Pass a writeable array")
    return array, home


def _is_read_only(value: Any, array: Any, home: Home) -> bool:
    """Return whether memory is read-only.

    Args:
        value: object that exports the memory.  On a GPU, the read-only flag is read from this
            object, because CuPy arrays have no such flag.
        array: NumPy or CuPy array over the same memory.
        home: kind of device of the array.
    """
    if home is Home.CPU:
        return not array.flags.writeable
    if isinstance(value, cupy().ndarray):
        return False
    if hasattr(value, "__dlpack__"):
        try:
            capsule = value.__dlpack__(max_version=(1, 0))
        except TypeError:  # the exporter uses a DLPack version without the flag
            return False
        address = _capsule_address(capsule, b"dltensor_versioned")
        # In DLManagedTensorVersioned, version, manager_ctx and deleter take 24 bytes before flags.
        flags = 0 if address is None else ctypes.c_uint64.from_address(address + 24).value
        return bool(flags & _DLPACK_READ_ONLY)
    return bool(value.__cuda_array_interface__["data"][1])


def as_kind_of(array: Any, like: _Kind) -> _Kind:
    """Return a result as an array of the library of ``like``, without a copy where possible.

    Args:
        array: a NumPy or CuPy array, such as the result of any function of cupyconv.
        like: an array of NumPy, CuPy, PyTorch, JAX, TensorFlow, or of another library with the
            array API standard's ``from_dlpack``.

    Returns:
        ``array`` itself if it is already an array of that library.  Otherwise the result shares the
        memory of ``array``, or is a copy if that memory is read-only or has negative strides.  JAX
        also copies memory that is not aligned to 64 bytes.

    Raises:
        ConvTypeError: the library does not support DLPack, rejects the array, or changes its dtype.
        DeviceError: ``array`` is on a GPU and CuPy is not installed.

    >>> y = cupyconv.conv_forward(np.ones((1, 1, 3)), np.ones((1, 1, 2)))
    >>> cupyconv.as_kind_of(y, like=np.empty(0)) is y
    True
    """
    source, home = take("array", array)
    if isinstance(like, type(source)):
        return source
    if _is_read_only(array, source, home) or any(stride < 0 for stride in source.strides):
        # PyTorch would write to read-only memory, and it aborts at negative strides.
        source = source.copy(order="C")
    exported: Any = source
    if home is Home.CPU and source.dtype == numpy_dtype("bfloat16"):
        exported = _Relabelled(source.view("uint16"), _DLPACK_BFLOAT)
    try:
        converted = _from_dlpack_of(like)(exported)
    except ConvTypeError:
        raise
    except Exception as error:  # each library raises its own types
        raise ConvTypeError(
            f"{foreign.type_name(like)} does not accept a {home.value} array of {source.dtype}: "
            f"{str(error).rstrip('.')}. Convert it with that library's own functions"
        ) from error
    dtype = str(source.dtype)
    if not re.search(rf"\b{dtype}\b", str(converted.dtype)):
        raise ConvTypeError(
            f"{foreign.type_name(like)} must keep the dtype: {dtype} became {converted.dtype}. "
            f"Convert first, for example y.astype({str(converted.dtype)!r}), or enable {dtype} in "
            "that library"
        )
    return converted


def on_host(array: Any) -> Any:
    """Return an array as a NumPy array.

    A CuPy array is copied after the work queued on the current stream.
    """
    return array.get() if hasattr(array, "get") else array


def _from_dlpack_of(like: Any) -> Any:
    """Return the ``from_dlpack`` function of the library of ``like``."""
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__().from_dlpack
    library = type(like).__module__.split(".")[0]
    module: Any = sys.modules.get(library)
    if library == "tensorflow":  # its from_dlpack takes a capsule, not the object that exports it
        take_capsule = module.experimental.dlpack.from_dlpack
        return lambda exported: take_capsule(exported.__dlpack__())
    if hasattr(module, "from_dlpack"):
        return module.from_dlpack
    raise ConvTypeError(
        "arrays can only be returned to libraries that support DLPack: got "
        f"{foreign.type_name(like)}. Pass an array of NumPy, CuPy, PyTorch, JAX or TensorFlow"
    )


def tensor_memory(tensor: Any) -> np.ndarray:
    """Return a NumPy array over the memory of a plain CPU tensor of PyTorch.

    The function uses ``Tensor.numpy``, which takes a tenth of the time of DLPack.
    """
    torch = sys.modules["torch"]
    if tensor.dtype is torch.bfloat16:  # NumPy has no bfloat16
        return tensor.view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def _numpy_from_dlpack(value: Any) -> np.ndarray:
    """Return a NumPy array over the memory of an object that exports DLPack."""
    import numpy as np

    if "bfloat16" not in str(getattr(value, "dtype", "")):
        return np.from_dlpack(value)
    # NumPy's from_dlpack rejects bfloat16, which is not a built-in dtype of NumPy.
    return np.from_dlpack(_Relabelled(value, _DLPACK_UINT)).view(numpy_dtype("bfloat16"))


class _Relabelled:
    """DLPack exporter of another object's memory, with another type code (DLDataType.code)."""

    def __init__(self, owner: Any, code: int) -> None:
        self._owner, self._code = owner, code

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._owner.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        capsule = self._owner.__dlpack__(**keywords)
        # Offsets of DLDataType.code in bytes (dlpack.h).  In a DLTensor, the code follows data,
        # device and ndim.  DLManagedTensor begins with its DLTensor; DLManagedTensorVersioned has
        # 32 bytes before its DLTensor.
        for capsule_name, offset in ((b"dltensor", 20), (b"dltensor_versioned", 52)):
            address = _capsule_address(capsule, capsule_name)
            if address is not None:
                ctypes.c_uint8.from_address(address + offset).value = self._code
                return capsule
        raise BufferError("its __dlpack__ returns no DLPack capsule")


def _capsule_address(capsule: Any, name: bytes) -> int | None:
    """Return the address that a capsule holds; None if the capsule's name is not ``name``."""
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    if not api.PyCapsule_IsValid(capsule, name):
        return None
    return api.PyCapsule_GetPointer(capsule, name)


@cache
def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype with this name; "bfloat16" is the dtype of ml_dtypes."""
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


_MOST_WORK: Any = 10_000
"""Most steps of NumPy's overlap solver (hand-set); typed Any, as NumPy's type stub rejects int."""


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether two elements of an array with this layout share a byte.

    Args:
        shape, strides: sizes of the axes, and their strides in bytes.
        itemsize: bytes per element.
    """
    axes = sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True))
    reach = itemsize  # bytes that the axes with smaller strides span
    nested = True  # whether every stride exceeds the span of the axes with smaller strides
    for stride, size in axes if 0 not in shape else ():
        nested = nested and (size == 1 or stride >= reach)
        reach += (size - 1) * stride
    if nested or prod(shape) * itemsize > reach:
        return not nested
    import numpy as np

    offsets = sum(np.ix_(*(np.arange(size) * stride for stride, size in axes)))
    return bool((np.diff(np.sort(offsets, axis=None)) < itemsize).any())


def overlap(a: Any, b: Any, home: Home) -> bool:
    """Return whether two arrays on one device share a byte of memory.

    For NumPy arrays, the result is exact unless the check takes too long.  In that case, and on a
    GPU, arrays count as overlapping if their address ranges overlap.
    """
    import numpy as np

    if home is Home.GPU:
        return bool(cupy().may_share_memory(a, b))
    try:
        return np.shares_memory(a, b, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def have_same_steps(a: Any, b: Any) -> bool:
    """Return whether two arrays of one shape have the same strides, except on axes of size 1."""
    axes = zip(a.shape, a.strides, b.strides, strict=True)
    return all(size <= 1 or step == other for size, step, other in axes)


def are_same(a: Any, b: Any, home: Home) -> bool:
    """Return whether two arrays of one dtype on one device have the same address and layout."""
    if a.shape != b.shape or not have_same_steps(a, b):
        return False
    if home is Home.GPU:
        return bool(a.data.ptr == b.data.ptr)
    return bool(a.ctypes.data == b.ctypes.data)


def available_memory() -> int | None:
    """Return the bytes of main memory that can be allocated; None if no limit is known.

    The result is the smallest of the available memory, the cgroup's limit and the process's limit.
    """
    limits = []
    with suppress(OSError):
        text = Path("/proc/meminfo").read_text()
        limits += [int(size) * 1024 for size in re.findall(r"^MemAvailable: +(\d+)", text, re.M)]
    with suppress(OSError, ValueError):  # the file is missing, or says "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    with suppress(ImportError):  # Windows has no such module
        import resource

        limits += {resource.getrlimit(resource.RLIMIT_AS)[0]} - {resource.RLIM_INFINITY}
    return min(limits, default=None)
