"""Hardware, software versions, date and commit of a run, as far as they can be determined."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import cupyconv
from cupyconv.bench.places import GpuPlace, Place
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
"""Labels of versions, keyed by their name in a description."""


def describe(
    place: Place, arguments: Iterable[str] = (), program: str = "cupyconv bench"
) -> dict[str, Any]:
    """Describe processor, versions, date and commit as a JSON object.

    Args:
        program, arguments: command line; files are recorded without their folder.
    """
    return {
        "device": place.name,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command_text(program, arguments),
        "cupyconv": cupyconv.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": threads(),
        "load": load(),
        "numpy": np.__version__,
        "blas": blas(),
        "numba": version("numba"),
        "torch": version("torch"),
        **(gpu(place) if isinstance(place, GpuPlace) else {}),
    }


def versions(about: dict[str, Any], *omitted: str) -> list[str]:
    """Return the known versions of a description, each with its label."""
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


def gpu(place: GpuPlace) -> dict[str, Any]:
    """Describe the current GPU: clocks and library versions."""
    runtime = place.xp.cuda.runtime
    number = runtime.runtimeGetVersion()
    torch = sys.modules.get("torch")
    return {
        "gpu": runtime.getDeviceProperties(runtime.getDevice())["name"].decode(),
        "architecture": place.device.architecture,
        "cupy": place.xp.__version__,
        "cuda_runtime": f"{number // 1000}.{number % 1000 // 10}",
        "cudnn": torch and torch.backends.cudnn.version(),
        "smi": smi(),
    }


def smi() -> dict[str, str]:
    """Return clocks, driver and power limit from nvidia-smi; empty if it is unavailable."""
    text = _output("nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader")
    values = [value.strip() for value in text.partition("\n")[0].split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=False)) if text else {}


def threads() -> int:
    """Return the thread count of NumPy's BLAS, or the available cores if it is unknown."""
    return blas_threads() or cores()


def load() -> float | None:
    """Return the load average of the last minute; None if the system does not report it."""
    with suppress(AttributeError, OSError):
        return round(os.getloadavg()[0], 2)
    return None


def blas() -> str:
    """Return name and version of the BLAS that NumPy was built with."""
    with suppress(KeyError, TypeError, AttributeError):
        config: Any = np.show_config(mode="dicts")
        entry = config["Build Dependencies"]["blas"]
        return f"{entry['name']} {entry['version']}"
    return "unknown"


def cpu_name() -> str:
    """Return the model name of the CPU."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the measured commit, with "+" if tracked files changed; None outside a checkout."""
    folder = Path(cupyconv.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    git = ("git", "-C", str(folder))
    head = _output(*git, "rev-parse", "--short=12", "HEAD").strip()
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return head + ("+" if changed else "") if head else None


def version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def command_text(program: str, arguments: Iterable[str]) -> str:
    """Return a command line with the folders of file arguments removed."""
    names = shlex.join(argument.rpartition(os.sep)[2] for argument in arguments)
    return f"{program} {names}".rstrip()


def _output(*command: str) -> str:
    """Return the output of a command; empty if it fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout
