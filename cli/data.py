"""Data of a command: array files, the device for computations, and checks of shapes and memory."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np

from cupyconv import ConvError, ConvProblem, ConvTypeError, arrays, files
from cupyconv.arrays import available_memory
from cupyconv.bench import places
from cupyconv.bench.places import Place
from cupyconv.cli import configuration, output, paths
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import ITEMSIZE, bytes_text, shape_text

_NPY, _ZIP = b"\x93NUMPY", b"PK"


def place_of(device: str, impl: str) -> Place:
    """Return the CPU or the current GPU, for a value of --device and of --impl.

    "auto" is the device of the implementation.  If both values are "auto", it is the GPU if there
    is one.

    Raises:
        DeviceError: a GPU is needed and there is none.
    """
    if device == "auto" and impl in FAMILIES:
        device = "gpu" if FAMILIES[impl].on_gpu else "cpu"
    return places.of(None if device == "auto" else device)


# -- files -----------------------------------------------------------------------------------------


class ArrayFile:
    """An array in a .npy file, or one of the arrays in a .npz file.

    Only its header is read until ``read`` is called.

    Args:
        option: the option that names the file, such as "--dy".
        place: path of the file.  For a .npz file, a colon and the name of an array may follow.
            Without them, the array named like the option is read, or else the only array.

    Attributes:
        shape: the shape of the array.
        dtype: the dtype of the array, in native byte order.

    Raises:
        ConvError: the file is damaged, pickled or not numeric, or ``place`` selects no array.
        OSError: the file cannot be opened.
    """

    def __init__(self, option: str, place: str) -> None:
        self._option, self._path, name = option, Path(place), None
        if not self._path.exists() and ".npz:" in place:
            base, _, name = place.rpartition(":")
            self._path = Path(base)
        is_standard = str(self._path) == paths.STANDARD
        largest = available_memory() or sys.maxsize - 1
        self._content = paths.read(self._path, largest) if is_standard else None
        with self._opened() as file:
            magic = file.read(len(_NPY))
            if not magic.startswith((_NPY, _ZIP)):
                raise ConvError(
                    f"{option} must be a .npy or .npz file",
                    f"{self._path} is neither" if magic else f"{self._path} is empty",
                    "Write it with numpy.save or numpy.savez; pickled data is never read",
                )
            self._member: str | None = None
            size = file.seek(0, io.SEEK_END)
            file.seek(0)
            with self._whole():
                if magic == _NPY:
                    self._read_header(file, size)
                else:
                    with zipfile.ZipFile(file) as packed:
                        self._member = _member(option, self._path, packed.namelist(), name)
                        size = packed.getinfo(self._member).file_size
                        with packed.open(self._member) as unpacked:
                            self._read_header(unpacked, size)
        if self.dtype != arrays.numpy_dtype("bfloat16"):
            require_numbers(option, self._path, self.dtype)

    def read(self) -> np.ndarray:
        """Return the array, in native byte order.

        Raises:
            ConvError: the file is damaged, or the array does not fit into main memory.
            OSError: the file cannot be read.
        """
        needed, rule = prod(self.shape) * self.dtype.itemsize, "must fit into main memory"
        what = f"the array in {self._path} has"
        require_memory(needed, f"{self._option} {rule}", what, "Use a smaller array")
        with self._opened() as file, self._whole():
            if self._member is None:
                return _native(np.load(file, allow_pickle=False))
            with zipfile.ZipFile(file) as packed, packed.open(self._member) as unpacked:
                return _native(np.lib.format.read_array(unpacked, allow_pickle=False))

    def _opened(self) -> IO[bytes]:
        return self._path.open("rb") if self._content is None else io.BytesIO(self._content)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Convert the exceptions that parsers raise for damaged files to ConvError."""
        try:
            yield
        except (ConvError, MemoryError):
            raise
        except Exception as error:  # parsers of damaged files raise nearly anything
            pickled = "allow_pickle" in str(error)
            raise ConvError(
                f"{self._option} must be a complete, undamaged file of plain numbers",
                f"{self._path} {'has pickled objects' if pickled else 'is damaged or truncated'} "
                f"({error})",
                "Write it again with numpy.save, with a dtype such as float32",
            ) from None

    def _read_header(self, file: IO[bytes], size: int) -> None:
        """Set ``shape`` and ``dtype`` from the header of a .npy file of ``size`` bytes."""
        version = np.lib.format.read_magic(file)  # type: ignore[arg-type]  # NumPy only reads
        # A version 3 header is a version 2 header in UTF-8, which only field names need.
        read = np.lib.format.read_array_header_2_0
        if version == (1, 0):
            read = np.lib.format.read_array_header_1_0
        elif version not in ((2, 0), (3, 0)):
            raise ValueError(f"its format has version {version}")
        self.shape, _, dtype = read(file)  # type: ignore[arg-type]
        if min(self.shape, default=0) < 0:
            raise ValueError(f"its header has the shape {self.shape}")
        if dtype.hasobject:
            raise ValueError("objects need allow_pickle, which is never used")
        self.dtype = _native(np.empty(0, dtype)).dtype
        needed = prod(self.shape) * dtype.itemsize
        if needed > size - file.tell():
            raise ValueError(f"its header promises {needed} bytes, {size - file.tell()} follow")


def require_numbers(option: str, path: Path, dtype: np.dtype) -> None:
    """Check that a file has a dtype of numbers that NumPy defines."""
    if dtype.kind not in "biufc":
        raise ConvError(
            f"{option} must be an array of numbers",
            f"{path} has dtype {dtype}",
            "Write it again with a dtype such as float32",
        )


def require_shapes(
    layer: configuration.Layer, problem: ConvProblem, files_: Mapping[str, ArrayFile]
) -> None:
    """Check that the arrays of files have the shapes of a layer.

    Raises:
        ConvError: an array has another shape.
    """
    shapes = layer.shapes(problem)
    for name, file in files_.items():
        if file.shape == shapes[name]:
            continue
        if name == "dy":
            layer.require_output(file.shape)
        raise ConvError(
            f"--{name} must have the shape of the layer's {name}",
            f"the file has {array_text(file.shape)}, {name} is {shape_text(shapes[name])}",
            "Give another file, or another layer",
        )


def require_given_shapes(
    layer: configuration.Layer,
    opened: Mapping[str, Any],
    options: Mapping[str, Any],
    remedy: Callable[[str, tuple[int, ...]], str],
) -> None:
    """Check that the files of --x and --w have the shapes that options give.

    Args:
        remedy: function that takes the option of a shape, such as "input", and the file's shape,
            and returns the last part of the error.

    Raises:
        ConvError: a file has another shape.
    """
    for name, key in (("x", "input"), ("w", "filter")):
        if name not in opened or options[key] is None:
            continue
        shape = opened[name].shape
        if layer.arguments[f"{key}_shape"] != shape:
            raise ConvError(
                f"--{name} must have the shape of the layer's {key}",
                f"the file has {array_text(shape)}, the {key} is {options[key]}",
                remedy(key, shape),
            )


def array_text(shape: tuple[int, ...]) -> str:
    """Return the shape of an array as text; "a scalar" for an array without axes."""
    return shape_text(shape) or "a scalar"


def dtype_for(names: Iterable[str]) -> str:
    """Return the dtype to suggest for arrays of these dtypes: float32, complex64 or complex128."""
    names = set(names)
    if not any(name.startswith("complex") for name in names):
        return "float32"
    return "complex64" if names <= {"complex64", "float32", "float16", "bfloat16"} else "complex128"


def require_parts(problem: ConvProblem, loaded: Mapping[str, ArrayFile | np.ndarray]) -> None:
    """Check that no array would lose its imaginary part.

    Raises:
        ConvTypeError: an array is complex, but the problem is real.
    """
    for name, array in loaded.items():
        if array.dtype.kind == "c" and not problem.is_complex:
            raise ConvTypeError(
                f"{name} is {array.dtype}, and {problem.dtype} has no imaginary part. Use --dtype "
                f"{dtype_for([array.dtype.name])}"
            )


def _member(option: str, path: Path, members: list[str], name: str | None) -> str:
    """Return the member of a .npz file that an option names, or the only member."""
    arrays_ = {member.removesuffix(".npy"): member for member in members}
    wanted = name or option.lstrip("-")
    if wanted in arrays_:
        return arrays_[wanted]
    if name is None and len(arrays_) == 1:
        return members[0]
    first = next(iter(arrays_), None)
    raise ConvError(
        f"{option} must be one array of the .npz file",
        f"{path} has {', '.join(arrays_) or 'no arrays'}, and no {wanted!r}",
        f"Choose one, for example {option} {path}:{first}" if arrays_ else "Give another file",
    )


def _native(array: np.ndarray) -> np.ndarray:
    """Return the array in native byte order; V2 becomes bfloat16, because NumPy saves it as V2."""
    if array.dtype == np.dtype("V2"):
        return array.view(arrays.numpy_dtype("bfloat16"))
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def save(path: Path, content: Mapping[str, np.ndarray]) -> None:
    """Write a .npz file atomically; bfloat16 arrays become float32, without loss."""
    plain = {
        name: array.astype(np.float32) if array.dtype == arrays.numpy_dtype("bfloat16") else array
        for name, array in content.items()
    }
    if str(path) == paths.STANDARD:
        buffer = io.BytesIO()
        np.savez(buffer, **plain)  # type: ignore[arg-type]
        output.deliver(buffer.getvalue())
        return
    with files.replacing(path) as file:
        np.savez(file, **plain)  # type: ignore[arg-type]  # no array is called allow_pickle


# -- memory ----------------------------------------------------------------------------------------


def require_memory(
    needed: int, rule: str, what: str, remedy: str, available: int | None = None
) -> None:
    """Check that some bytes are available, before anything is allocated.

    Args:
        needed: number of bytes.
        rule, remedy: first and last part of the error.
        what: text before the number, such as "they need about".
        available: number of available bytes; None for that of main memory.

    Raises:
        ConvError: less memory is available.
    """
    if available is None:
        available = available_memory()
    if available is not None and needed > available:
        values = f"{what} {bytes_text(needed)}, {bytes_text(available)} is available"
        raise ConvError(rule, values, remedy)


def require_room_for_all(problem: ConvProblem) -> None:
    """Check that all values of a layer fit into main memory, for --large.

    Raises:
        ConvError: the tensors do not fit.
    """
    # Needed: x, w, dy and 3 results, float64 copies of these 6 tensors, and 3 float64 references.
    elements = problem.bytes // ITEMSIZE[problem.dtype]
    itemsize = 16 if problem.is_complex else 8  # copies of complex numbers are complex128
    needed = 2 * problem.bytes + 3 * itemsize * elements
    rule = "all values of the layer must fit into main memory for --large"
    require_memory(needed, rule, "they need about", "Leave out --large")
