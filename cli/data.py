"""The numbers that a command works on: seeded or read from files, where they go, and what fits."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from cupyconv import (
    ConvError,
    ConvProblem,
    ConvTypeError,
    Device,
    Plan,
    arrays,
    backends,
    files,
    plan,
)
from cupyconv.cli import output, paths
from cupyconv.planning import plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES

DEVICES = ("auto", "cpu", "gpu")

_NPY, _ZIP = b"\x93NUMPY", b"PK"


class Processor:
    """Where a command computes: NumPy on the CPU, or the current GPU."""

    def __init__(self, *, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self._cupy = arrays.require_gpu() if on_gpu else None

    @staticmethod
    def of(device: str, impl: str = "auto") -> Processor:
        """The place that --device asks for; under "auto", one where the implementation runs.

        Raises:
            DeviceError: a GPU is needed and there is none.
        """
        if device == "auto" and impl in FAMILIES:
            return Processor(on_gpu=FAMILIES[impl].on_gpu)
        return Processor(on_gpu=device == "gpu" or (device == "auto" and arrays.device_count() > 0))

    def plan(self, problem: ConvProblem, impl: str = "auto") -> Plan:
        """What would compute a problem here."""
        return plan(problem, None if self.on_gpu else Device.of("cpu"), impl)

    def passes(self, problem: ConvProblem, impl: str) -> tuple[str, ...]:
        """The passes of a problem that an implementation computes here."""
        device = backends.current_device() if self.on_gpu else Device.of("cpu")
        return tuple(pass_ for pass_ in PASSES if _takes(problem, pass_, device, impl))

    def put(self, array: np.ndarray) -> Any:
        """A NumPy array in this place's memory."""
        return array if self._cupy is None else self._cupy.asarray(array)

    def get(self, array: Any) -> np.ndarray:
        """An array of this place as a NumPy array."""
        return array if self._cupy is None else self._cupy.asnumpy(array)

    def available_memory(self) -> int | None:
        """Bytes that can still be allocated on the GPU; None on the CPU."""
        return None if self._cupy is None else int(self._cupy.cuda.runtime.memGetInfo()[0])


def _takes(problem: ConvProblem, pass_: str, device: Device, impl: str) -> bool:
    try:
        plan_pass(problem, pass_, device, impl)
    except ConvError:
        return False
    return True


# -- files -----------------------------------------------------------------------------------------


def load(option: str, place: str) -> np.ndarray:
    """The array in a .npy file, or one of those in a .npz file.

    Args:
        option: the option that named the file, such as "--dy"; a .npz array of that name is taken.
        place: path of the file, for .npz with ``:name`` of the array after it if need be.

    Raises:
        ConvError: the file is truncated, pickled or ambiguous, or has no numbers.
        OSError: it cannot be opened.
    """
    path, name = Path(place), None
    if not path.exists() and ".npz:" in place:
        base, _, name = place.rpartition(":")
        path = Path(base)
    with _opened(path) as file:
        magic = file.read(len(_NPY))
        if not magic.startswith((_NPY, _ZIP)):
            raise ConvError(
                f"{option} must be a .npy or .npz file",
                f"{path} is neither" if magic else f"{path} is empty",
                "Write it with numpy.save or numpy.savez; pickled data is never read",
            )
        file.seek(0)
        try:
            content = np.load(file, allow_pickle=False)
            if isinstance(content, np.ndarray):
                array = content
            else:
                array = content[_member(option, path, content.files, name)]
                if not isinstance(array, np.ndarray):  # bytes of a file that is something else
                    raise ValueError("what is called .npy in it is something else")
        except (ConvError, MemoryError):
            raise
        except Exception as error:  # parsers of damaged files raise nearly anything
            pickled = "allow_pickle" in str(error)
            raise ConvError(
                f"{option} must be a whole file of plain numbers",
                f"{path} {'has pickled objects' if pickled else 'is damaged or truncated'} "
                f"({error})",
                "Write it again with numpy.save, with a dtype such as float32",
            ) from None
    array = _native(array)
    if array.dtype.kind not in "biufc" and array.dtype != arrays.numpy_dtype("bfloat16"):
        raise ConvError(
            f"{option} must be an array of numbers",
            f"{path} has dtype {array.dtype}",
            "Write it again with a dtype such as float32",
        )
    return array


def require_parts(problem: ConvProblem, loaded: Mapping[str, np.ndarray]) -> None:
    """Check that no imaginary part would be lost.

    Raises:
        ConvTypeError: an array is complex and the problem is not.
    """
    for name, array in loaded.items():
        if array.dtype.kind == "c" and not problem.is_complex:
            raise ConvTypeError(
                f"{name} is {array.dtype}, whose imaginary part {problem.dtype} does not have. Use "
                f"--dtype {array.dtype}"
            )


def _opened(path: Path) -> IO[bytes]:
    """A file, or standard input, in which one cannot go back."""
    return io.BytesIO(paths.read(path)) if str(path) == paths.STANDARD else path.open("rb")


def _member(option: str, path: Path, names: list[str], name: str | None) -> str:
    wanted = name or option.lstrip("-")
    if wanted in names:
        return wanted
    if name is None and len(names) == 1:
        return names[0]
    raise ConvError(
        f"{option} must be one array of the .npz file",
        f"{path} has {', '.join(names) or 'none'}, and none is called {wanted!r}",
        f"Choose one, for example {option} {path}:{names[0]}" if names else "Give another file",
    )


def _native(array: np.ndarray) -> np.ndarray:
    """The array in this machine's byte order; two opaque bytes are how NumPy saves bfloat16."""
    if array.dtype == np.dtype("V2"):
        return array.view(arrays.numpy_dtype("bfloat16"))
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def save(path: Path, content: Mapping[str, np.ndarray]) -> None:
    """Write a .npz file whole or not at all; bfloat16 as float32, which holds it exactly."""
    plain = {
        name: array.astype(np.float32) if array.dtype == arrays.numpy_dtype("bfloat16") else array
        for name, array in content.items()
    }
    if str(path) == paths.STANDARD:
        held = io.BytesIO()
        np.savez(held, **plain)  # type: ignore[arg-type]
        output.deliver(held.getvalue())
        return
    with files.replacing(path) as file:
        np.savez(file, **plain)  # type: ignore[arg-type]  # names are ours, none is allow_pickle


# -- memory ----------------------------------------------------------------------------------------


def available_memory() -> int | None:
    """Bytes of main memory that can still be allocated; None where the system does not say."""
    limits = [_meminfo(), _cgroup(), _address_space()]
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


def _meminfo() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup() -> int | None:
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _address_space() -> int | None:
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit
