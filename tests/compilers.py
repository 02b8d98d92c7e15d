"""Compile the kernels with other CUDA releases than the release that the tests use.

``python -m tests.compilers [RELEASE ...] [--arch A ...] [--every N]``

Downloads NVRTC of each release, such as 12.4 or 13.0.88, and compiles every N-th variant of every
family's kernels with it; exits with 1 if a variant does not compile, or spills registers.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar
from zipfile import ZipFile

from cupyconv.gpu import compiler, sources
from cupyconv.gpu.sources import KernelSource
from cupyconv.planning import Device
from tests.cubins import no_spills
from tests.kernels.test_kernel_compile import bias_defines
from tests.kernels.test_sass import FORMS, variants

OLDEST = "12.0"
"""CUDA release that the kernels are written for; ``pip install '.[compilers]'`` installs it."""

RELEASES = ("12.0", "12.1", "12.2", "12.3", "12.4", "12.5", "12.6", "12.8", "12.9",
            "13.0", "13.1", "13.2", "13.3", "13.4", "13.5")  # fmt: skip
"""CUDA releases with a downloadable NVRTC."""

Result = TypeVar("Result")

Variant = tuple[KernelSource, dict[str, str | int], str]
"""A kernel file, its macros, and the compiler's target."""


class Nvrtc:
    """NVRTC of a CUDA release, loaded into this process; it may change the process's locale.

    Args:
        folder: folder of the release's libraries.
    """

    def __init__(self, folder: Path) -> None:
        # NVRTC looks for its builtins library by name, and finds it if it is already loaded.
        (builtins,) = folder.glob("libnvrtc-builtins.so.*.*")
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        (library,) = folder.glob("libnvrtc.so.[0-9]*")
        self._nvrtc = ctypes.CDLL(str(library))

    def version(self) -> str:
        """Return a version such as "12.0"."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def capabilities(self) -> list[tuple[int, int]]:
        """Return the compute capabilities that the compiler has targets for."""
        count = ctypes.c_int()
        self._nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self._nvrtc.nvrtcGetSupportedArchs(known)
        return [divmod(number, 10) for number in known]

    def knows(self, architecture: str) -> bool:
        """Return whether the compiler supports an architecture, such as "sm_90a"."""
        return divmod(int(architecture[len("sm_") :].rstrip("a")), 10) in self.capabilities()

    def fault(self, variant: Variant) -> str | None:
        """Return the compiler's log if a variant does not compile or spills registers, else None.

        A PTX target has no registers to spill.
        """
        source, defines, target = variant
        options = compiler.options(defines, target)
        compiled = self._compiled(source.text, source.name, dict(source.headers), options)
        with compiled as (program, failed):
            log = self._text("ProgramLog", program)
        spills = not compiler.is_ptx(target) and not no_spills(log)
        return log if failed or spills else None

    def ptx(self, text: str, name: str, headers: Mapping[str, str], flags: list[str]) -> str:
        """Compile to PTX, like ``tests.emulator.ptx.nvrtc.compile_ptx``."""
        with self._compiled(text, name, headers, flags) as (program, failed):
            if failed:
                raise ValueError(self._text("ProgramLog", program))
            return self._text("PTX", program)

    @contextmanager
    def _compiled(
        self, text: str, name: str, headers: Mapping[str, str], options: list[str]
    ) -> Iterator[tuple[ctypes.c_void_p, bool]]:
        program = ctypes.c_void_p()
        self._nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), text.encode(), name.encode(), len(headers),
            _strings(headers.values()), _strings(headers),
        )  # fmt: skip
        try:
            failed = self._nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
            yield program, bool(failed)
        finally:
            self._nvrtc.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, what: str, program: ctypes.c_void_p) -> str:
        size = ctypes.c_size_t()
        getattr(self._nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self._nvrtc, f"nvrtcGet{what}")(program, text)
        return text.value.decode()


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


class Release:
    """Compiler of a CUDA release in a separate process, since CuPy uses any NVRTC that is loaded.

    ``release(Nvrtc.fault, variant)`` calls a function in that process.

    Args:
        folder: folder of the release's libraries.
    """

    def __init__(self, folder: Path) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _load, (folder,))

    def __call__(self, function: Callable[..., Result], *arguments: object) -> Result:
        return self._process.submit(_called, function, *arguments).result()


def _load(folder: Path) -> None:
    global _nvrtc
    _nvrtc = Nvrtc(folder)


def _called(function: Callable[..., Result], *arguments: object) -> Result:
    return function(_nvrtc, *arguments)


def oldest() -> Release | None:
    """Return the NVRTC of OLDEST; None if it is not installed."""
    folder = Path(sysconfig.get_path("purelib")) / "nvidia" / "cuda_nvrtc" / "lib"
    return Release(folder) if folder.is_dir() else None


def download(release: str, folder: Path) -> Release:
    """Download NVRTC of a release into a folder, and return it.

    Raises:
        CalledProcessError: pip finds no such release.
    """
    package = "nvidia-cuda-nvrtc" + ("-cu12" if release.startswith("12.") else "")
    exact = f"{package}=={release}" + (".*" if release.count(".") == 1 else "")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, exact], check=True)
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    (library,) = folder.glob("nvidia/*/lib/libnvrtc.so.[0-9]*")
    return Release(library.parent)


def compiled_variants(device: str | Device) -> Iterator[tuple[str, Variant]]:
    """Yield each kernel variant that a family's layers need, after the name of its pass."""
    target = str(Device.of(device).target)
    for form in FORMS:
        for one in variants(form, device):
            defines = dict(one.defines)
            pass_ = defines.get("PASS", "")
            yield f"{form} {one.source} {pass_}", (sources.load(one.source), defines, target)
    bias = sources.load("conv_backprop_bias.cu")
    for last in (0, 1):
        yield f"bias {last}", (bias, bias_defines("float16", "int", last), target)
    yield "arrange", (sources.load("conv_arrange.cu"), {"STORAGE": "half_t"}, target)


def faults(release: Release, chosen: Iterable[tuple[str, Variant]]) -> list[str]:
    """Return name, macros and compiler log of each variant with a fault."""
    found = ((name, variant[1], release(Nvrtc.fault, variant)) for name, variant in chosen)
    return [f"{name} {defines}:\n{fault}" for name, defines, fault in found if fault is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.compilers", None, __doc__)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--arch", nargs="+", default=compiler.ARCHITECTURES)
    parser.add_argument("--every", type=int, default=1)
    chosen = parser.parse_args(arguments)
    failed = False
    for release in chosen.releases:
        with tempfile.TemporaryDirectory() as folder:
            nvrtc = download(release, Path(folder))
            version = nvrtc(Nvrtc.version)
            for architecture in chosen.arch:
                if not nvrtc(Nvrtc.knows, architecture):
                    continue
                made = list(compiled_variants(architecture))[:: chosen.every]
                wrong = faults(nvrtc, made)
                print(f"NVRTC {version}, {architecture}: {len(made)} variants, "
                      f"{len(wrong)} with a fault", flush=True)  # fmt: skip
                print(*wrong, sep="\n", end="\n" if wrong else "")
                failed |= bool(wrong)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
