"""Hardware, software versions, date and commit of a run, as far as they can be determined."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import cupyconv
from cupyconv.bench.places import Place
from cupyconv.cpu.threads import blas_threads, cores

_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit")

VERSIONS = {
    "cupyconv": "cupyconv",
    "commit": "commit",
    "torch": "PyTorch",
    "cudnn": "cuDNN",
    "cupy": "CuPy",
    "cuda_runtime": "CUDA",
    "numpy": "NumPy",
    "numba": "Numba",
    "blas": "BLAS",
    "python": "Python",
}
"""Label of each version in a report, keyed by its name in the result of ``describe``."""


def describe(
    place: Place, arguments: Iterable[str] = (), program: str = "cupyconv bench"
) -> dict[str, Any]:
    """Describe processor, versions, date and commit as a JSON object.

    Args:
        program, arguments: command line; files are recorded without their folder.
    """
    names = shlex.join(argument.rpartition(os.sep)[2] for argument in arguments)
    found = {
        "device": place.name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"{program} {names}".rstrip(),
        "cupyconv": cupyconv.__version__,
        "commit": _known(_commit),
        "python": platform.python_version(),
        "cpu": _known(_cpu_name) or platform.processor() or platform.machine(),
        "threads": threads(),
        "load": _known(lambda: round(os.getloadavg()[0], 2)),
        "numpy": np.__version__,
        "blas": _known(blas),
        "numba": _known(lambda: metadata.version("numba")),
        "torch": _known(lambda: metadata.version("torch")),
    }
    if place.name == "cpu":
        return found
    runtime, torch = place.xp.cuda.runtime, sys.modules.get("torch")
    cuda = runtime.runtimeGetVersion()
    return found | {
        "gpu": runtime.getDeviceProperties(runtime.getDevice())["name"].decode(),
        "architecture": place.device.architecture,
        "cupy": place.xp.__version__,
        "cuda_runtime": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "cudnn": torch and torch.backends.cudnn.version(),
        "smi": smi(),
    }


def versions(about: dict[str, Any], *omitted: str) -> list[str]:
    """Return "label version" for each version in ``about``, except those with ``omitted`` keys."""
    return [
        f"{label} {about[key]}"
        for key, label in VERSIONS.items()
        if about.get(key) and key not in omitted
    ]


def title(about: dict[str, Any]) -> str:
    """Return the processor and the date of a description as a short title."""
    processor = about.get("gpu") or about.get("cpu") or "an unknown processor"
    if about.get("device") == "cpu":
        processor = f"{processor}, {about.get('threads')} threads"
    return f"{processor}, {str(about.get('date', '')).partition(' ')[0]}"


def smi() -> dict[str, str]:
    """Return clocks, driver and power limit from nvidia-smi; empty if it is unavailable."""
    query = f"--query-gpu={','.join(_SMI_FIELDS)}"
    text = _known(lambda: _output("nvidia-smi", query, "--format=csv,noheader")) or ""
    values = [value.strip() for value in text.partition("\n")[0].split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=False)) if text else {}


def threads() -> int:
    """Return the thread count of NumPy's BLAS, or the available cores if it is unknown."""
    return blas_threads() or cores()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its type if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _known(look: Callable[[], Any]) -> Any:
    """Return the result of a function; None if it raises, for example if a tool is missing."""
    with suppress(Exception):
        return look()
    return None


def blas() -> str:
    """Return name and version of the BLAS that NumPy was built with."""
    config: Any = np.show_config(mode="dicts")
    library = config["Build Dependencies"]["blas"]
    return f"{library['name']} {library['version']}"


def _cpu_name() -> str:
    _, _, text = Path("/proc/cpuinfo").read_text().partition("model name\t: ")
    return text.splitlines()[0]


def _commit() -> str | None:
    """Return the commit of cupyconv, with "+" if tracked files changed; None outside a checkout."""
    folder = Path(cupyconv.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    git = ("git", "-C", str(folder))
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return _output(*git, "rev-parse", "--short=12", "HEAD").strip() + ("+" if changed else "")


def _output(*command: str) -> str:
    return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=20)
