"""Builds what CuPy is run on, and the one extension module of CuPy that has to be built anew.

The wheel's own ``cupy_backends.cuda.api.runtime`` has NVIDIA's runtime linked into it, which runs
on NVIDIA's driver only.  So the module is compiled from CuPy's unedited source and linked with
native/runtime.cpp instead.  Products lie in the emulator's cache folder under a digest of all that
they are made from.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from functools import cache
from pathlib import Path

from tests.emulator.build import cache_directory, digest, exclusively, find_compiler

from . import api, header
from .release import CYTHON, RELEASE, SOURCE_DIGEST, DeviceBuildError, require_release

NATIVE = Path(__file__).resolve().parent / "native"
DRIVER = "libcuda.so.1"
NVRTC = "libnvrtc.so.13"
RUNTIME = f"runtime{sysconfig.get_config_var('EXT_SUFFIX')}"
RUNTIME_MODULE = "cupy_backends.cuda.api.runtime"

_FLAGS = ("-O1", "-g1", "-fPIC", "-std=c++17")


def nvidia_nvrtc() -> Path:
    """NVIDIA's own NVRTC."""
    found = header.folder().parent / "lib" / NVRTC
    if not found.is_file():
        raise DeviceBuildError(f"{NVRTC} is missing: pip install 'nvidia-cuda-nvrtc>=13,<14'")
    return found


@cache
def folder() -> Path:
    """The folder of the products, which are built if they are not there."""
    require_release()
    compiler = find_compiler()
    texts = [path.read_text() for path in sorted(NATIVE.rglob("*")) if path.is_file()]
    parts = (
        *texts,
        api.forwarders(),
        Path(__file__).read_text(),
        RELEASE,
        CYTHON,
        header.version(),
        sysconfig.get_config_var("EXT_SUFFIX"),
        compiler.version,
    )
    product = cache_directory() / f"device-{digest(*parts)}"
    with exclusively(product):
        if not product.exists():
            with tempfile.TemporaryDirectory(dir=product.parent) as scratch:
                made = Path(scratch) / "made"
                made.mkdir(mode=0o700)
                _build(made, Path(scratch))
                os.replace(made, product)
    return product


def _build(made: Path, scratch: Path) -> None:
    forwarders = scratch / "forwarders.cpp"
    forwarders.write_text(api.forwarders())
    _link(made / DRIVER, [forwarders])
    _link(made / NVRTC, [NATIVE / "nvrtc.cpp"], "-ldl")
    source = _source()
    (scratch / "names.h").write_text(_names())
    (scratch / "unsupported.cpp").write_text(_unsupported(source))
    pyx = source.joinpath(*RUNTIME_MODULE.split(".")).with_suffix(".pyx")
    generated = scratch / "module.cpp"
    _run(
        *(sys.executable, "-m", "cython", "--cplus", "-3", "-I", source),
        *("-E", ",".join(f"{name}={value}" for name, value in _settings().items())),
        *("--module-name", RUNTIME_MODULE, pyx, "-o", generated),
    )
    python = Path(sysconfig.get_paths()["include"])
    _link(
        made / RUNTIME,
        [generated, NATIVE / "runtime.cpp", scratch / "unsupported.cpp"],
        *("-w", f"-I{scratch}", f"-I{NATIVE}", f"-I{python}"),
        *("-idirafter", python.parent),  # where Debian's headers look for those of the machine
        *("-O0", "-I", pyx.parent),
        made / DRIVER,
        "-Wl,-rpath,$ORIGIN",
    )


def _settings() -> dict[str, object]:
    """Those of CuPy's own build."""
    return {
        "CUPY_CUDA_VERSION": header.version(),
        "CUPY_HIP_VERSION": 0,
        "CUPY_USE_CUDA_PYTHON": False,
        "CUPY_CUFFT_STATIC": False,
    }


def _source() -> Path:
    """CuPy's source, fetched with pip the first time."""
    kept = cache_directory() / f"cupy-{RELEASE}"
    with exclusively(kept):
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
                archive = _download(Path(scratch))
                with tarfile.open(archive) as opened:
                    wanted = [one for one in opened if "/cupy_backends/" in one.name]
                    # Python has it from 3.11.4 on.
                    opened.extraction_filter = getattr(tarfile, "data_filter", None)
                    opened.extractall(scratch, wanted)
                os.replace(Path(scratch) / f"cupy-{RELEASE}", kept)
    return kept


def _download(target: Path) -> Path:
    # With stubs, so that pip's look at the metadata does not ask for a CUDA toolkit.
    os.environ["CUPY_INSTALL_USE_STUB"] = "1"
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--no-binary", "cupy", f"cupy=={RELEASE}", "--dest", target),
    )
    archive = target / f"cupy-{RELEASE}.tar.gz"
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != SOURCE_DIGEST:
        raise DeviceBuildError(f"{archive.name} has the digest {found}, not {SOURCE_DIGEST}")
    return archive


def _names() -> str:
    """A header with the names of the runtime's statuses."""
    found = header.statuses("driver_types.h", r"cuda(?:Success|Error[A-Z])\w*")
    cases = "".join(f'    case {value}: return "{name}";\n' for value, name in found.items())
    return (
        "static const char* runtime_error_name(int error) {\n"
        f"  switch (error) {{\n{cases}  }}\n  return nullptr;\n}}\n"
    )


def _unsupported(source: Path) -> str:
    """What CuPy's module is linked to and native/runtime.cpp lacks: each says that it is not."""
    declarations = source.joinpath(*RUNTIME_MODULE.split(".")).with_name("_runtime_extern.pxi")
    wanted = set(re.findall(r"\b(cuda[A-Z]\w+)\(", declarations.read_text()))
    given = re.findall(r"^\S.*?\b(cuda[A-Z]\w+)\(", (NATIVE / "runtime.cpp").read_text(), re.M)
    lines = [
        f'extern "C" int {name}() {{ return 801; }}  // cudaErrorNotSupported'
        for name in sorted(wanted - set(given))
    ]
    return "\n".join(lines) + "\n"


def _link(product: Path, sources: list[Path], *more: object) -> None:
    soname = f"-Wl,-soname,{product.name}"
    command = [*find_compiler().command, *_FLAGS, f"-isystem{header.folder()}"]
    _run(*command, "-shared", soname, *sources, *more, "-o", product)


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise DeviceBuildError(f"{shutil.which(words[0])} failed: {words}\n{done.stderr[-6000:]}")
