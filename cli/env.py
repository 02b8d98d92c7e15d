"""`cupyconv env`: show what is installed and what is missing, with the commands to install it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import click

import cupyconv
from cupyconv import CupyconvError, arrays, cache_folder, log
from cupyconv.cli import output
from cupyconv.cpu.choice import has_numba
from cupyconv.errors import DeviceError, install_command, reinstall_command
from cupyconv.gpu import compiler, sources
from cupyconv.problem import bytes_text

INSTALL_DRIVER = (
    "sudo ubuntu-drivers install (Ubuntu), sudo apt install nvidia-driver (Debian), or "
    "https://www.nvidia.com/drivers"
)


def _install_cupy() -> str:
    return (
        f"{install_command('cuda13')}  (CUDA 13; for an older driver: {install_command('cuda12')})"
    )


OPTIONAL: dict[str, tuple[str, str, Callable[[], str]]] = {
    "numba": ("Numba", "compiles CPU loops", lambda: install_command("numba")),
    "torch": ("PyTorch", "is needed by cupyconv.torch", lambda: "pip install torch"),
    "onnx": ("ONNX", "reads ONNX models", lambda: install_command("onnx")),
    "dask": ("Dask", "is needed by cupyconv.dask", lambda: install_command("dask")),
}
"""Name of each optional package, its use, and the command that installs it, by module name."""


class Missing(NamedTuple):
    """A missing component, and the command that installs it."""

    what: str
    command: str


@click.command()
@click.option("--require-gpu", is_flag=True, help="Exit with 3 if there is no usable GPU.")
@output.json_option
def command(require_gpu: bool, as_json: bool) -> None:
    """Show installed packages and devices, and what is missing."""
    missing: list[Missing] = []
    found = partial(_found, missing)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report shows what CuPy warns of at import
        report = {
            "cupyconv": cupyconv.__version__,
            "python": {"version": platform.python_version(), "platform": platform.platform()},
            "numpy": _numpy(),
            "cupy": found(
                "CuPy, which provides GPU arrays",
                _install_cupy(),
                lambda: {"version": arrays.cupy().__version__},
            ),
            "nvrtc": found("NVRTC, which compiles the kernels", _install_cupy(), _nvrtc),
            "driver": _driver(missing),
            "gpus": _gpus(missing),
            **{
                name: found(f"{label}, which {use} (optional)", command(), partial(_package, name))
                for name, (label, use, command) in OPTIONAL.items()
            },
            "sources": found("the kernel sources", reinstall_command(), _sources),
            "cache": _cache(missing),
            "log": os.environ.get(log.VARIABLE, "off"),
        }
    if as_json:
        output.write_json({**report, "missing": [entry._asdict() for entry in missing]})
    else:
        output.draw(*_tables(report, missing))
    if require_gpu and not any(gpu["usable"] for gpu in report["gpus"]):
        raise DeviceError("--require-gpu needs a usable GPU, and there is none")


# -- collecting ------------------------------------------------------------------------------------


def _numpy() -> dict[str, Any]:
    import numpy as np

    from cupyconv.bench import environment

    return {"version": np.__version__, "blas": environment.blas()}


def _found(
    missing: list[Missing], what: str, command: str, look: Callable[[], dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the result of ``look``; None, with an entry in ``missing``, if it finds nothing."""
    try:
        return look()
    except (CupyconvError, FileNotFoundError, importlib.metadata.PackageNotFoundError):
        missing.append(Missing(what, command))
        return None


def _nvrtc() -> dict[str, Any]:
    return {"version": ".".join(map(str, compiler.nvrtc_version()))}


def _driver(missing: list[Missing]) -> dict[str, Any] | None:
    version = _try(lambda: int(arrays.cupy().cuda.runtime.driverGetVersion()))
    if version:  # 13010 is CUDA 13.1
        return {"cuda": f"{version // 1000}.{version % 1000 // 10}"}
    if shutil.which("nvidia-smi") is None:  # it comes with the driver
        missing.append(Missing("NVIDIA's driver", INSTALL_DRIVER))
    return None


def _gpus(missing: list[Missing]) -> list[dict[str, Any]]:
    gpus = [_gpu(number) for number in range(arrays.device_count())]
    if not gpus:
        missing.append(Missing("a GPU that CuPy can use", "no command; NumPy arrays need no GPU"))
    return gpus


def _gpu(number: int) -> dict[str, Any]:
    properties = arrays.cupy().cuda.runtime.getDeviceProperties(number)
    capability = properties["major"], properties["minor"]
    architecture = target = wrong = None
    try:
        device = cupyconv.Device.of_capability("GPU", capability)
        architecture = device.architecture
        target = compiler.fitted(device).target
    except CupyconvError as error:
        wrong = str(error)
    return {
        "number": number,
        "name": properties["name"].decode(),
        "capability": f"{capability[0]}.{capability[1]}",
        "architecture": architecture,
        "target": target,
        "memory_bytes": int(properties["totalGlobalMem"]),
        "usable": target is not None,
        "reason": wrong,
    }


def _package(name: str) -> dict[str, Any]:
    """Return the version of an installed package, without a slow import."""
    found = {"version": importlib.metadata.version(name)}
    return {**found, "used": has_numba()} if name == "numba" else found


def _sources() -> dict[str, Any]:
    folder = sources.directory()
    return {"folder": str(folder), "kernels": sorted(path.stem for path in folder.glob("*.cu"))}


def _cache(missing: list[Missing]) -> dict[str, Any]:
    folder, name = cache_folder.cache_directory(), cache_folder.CACHE_VARIABLE
    files = folder.iterdir() if folder is not None and folder.is_dir() else ()
    entries = [path for path in files if path.suffix in compiler.SUFFIXES]
    writable = folder is not None and cache_folder.unwritable(folder) is None
    wrong = None if folder is None else cache_folder.distrust(folder)
    if not writable:
        missing.append(Missing("a writable kernel cache", f"export {name}=/a/writable/folder"))
    elif wrong is not None:
        missing.append(Missing(f"a kernel cache that only you can write: {wrong[0]}", wrong[1]))
    return {
        "folder": None if folder is None else str(folder),
        "entries": len(entries),
        "bytes": sum(_try(lambda path=path: path.stat().st_size) or 0 for path in entries),
        "writable": writable,
        "trusted": wrong is None,
    }


def _target_text(gpu: dict[str, Any]) -> str:
    """Return the compiler's target for a GPU, or the reason why the GPU is unusable."""
    architecture, target = gpu["architecture"], gpu["target"]
    if architecture is None:
        return "too old: capability 7.5 or later is needed"
    if target is None:
        return f"{architecture}: {gpu['reason']}"
    if target == architecture:
        return str(target)
    return f"{architecture}, which NVRTC does not know: kernels are compiled for {target}"


def _try(look: Callable[[], Any]) -> Any:
    """Return the result of ``look``, or None if it raises an exception."""
    try:
        return look()
    except Exception:  # a broken driver or CuPy must not stop the report
        return None


# -- printing --------------------------------------------------------------------------------------


def _tables(report: dict[str, Any], missing: list[Missing]) -> list[Any]:
    cache, optional = report["cache"], {key: name for key, (name, _, _) in OPTIONAL.items()}
    packages = {"cupy": "CuPy", "nvrtc": "NVRTC", "driver": "driver", **optional}
    gpus = [
        f"{gpu['name']}, capability {gpu['capability']} ({_target_text(gpu)}), "
        f"{bytes_text(gpu['memory_bytes'])}"
        for gpu in report["gpus"]
    ]
    state = "writable" if cache["writable"] else "not writable"
    if not cache["trusted"]:
        state += ", not used"
    rows = [
        ("cupyconv", report["cupyconv"]),
        ("Python", f"{report['python']['version']}, {report['python']['platform']}"),
        ("NumPy", f"{report['numpy']['version']}, BLAS {report['numpy']['blas']}"),
        *((name, _version_text(report[key])) for key, name in packages.items()),
        *((f"GPU {number}", text) for number, text in enumerate(gpus)),
        *([] if gpus else [("GPU", "none")]),
        ("kernel sources", report["sources"]["folder"] if report["sources"] else "missing"),
        (
            "kernel cache",
            f"{cache['folder'] or 'none'}, {cache['entries']} kernels, "
            f"{bytes_text(cache['bytes'])}, {state}",
        ),
        ("log", f"{report['log']} ({log.VARIABLE}: info or debug)"),
    ]
    table = output.table(("what", "found"), rows)
    if not missing:
        return [table, "nothing is missing"]
    by_command: dict[str, list[str]] = {}
    for entry in missing:
        by_command.setdefault(entry.command, []).append(entry.what)
    lacking = [("\n".join(names), command) for command, names in by_command.items()]
    return [table, output.table(("missing", "get it with"), lacking)]


def _version_text(found: dict[str, Any] | None) -> str:
    if found is None:
        return "missing"
    text = found["version"] if "version" in found else f"CUDA {found['cuda']}"
    return text if found.get("used", True) else f"{text}, not used"
