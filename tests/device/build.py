"""Build the driver and runtime libraries, and the extension module of CuPy that links the runtime.

The wheel's ``cupy_backends.cuda.api.runtime`` contains NVIDIA's runtime, which runs only on
NVIDIA's driver.  The module is compiled from CuPy's unedited source and linked with
native/runtime.cpp instead.  Products are stored in the emulator's cache folder, keyed by a digest
of their inputs.
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

from tests.emulator.build import (
    HOST_DIRECTORY,
    RUNTIME_FLAGS,
    cache_directory,
    digest,
    exclusively,
    find_compiler,
)

from . import api, header
from .release import CYTHON, RELEASE, SOURCE_DIGEST, DeviceBuildError, require_release

NATIVE = Path(__file__).resolve().parent / "native"
ALLOCATION = HOST_DIRECTORY / "allocation.cpp"
DRIVER = "libcuda.so.1"
NVRTC = "libnvrtc.so.13"
RUNTIME = f"runtime{sysconfig.get_config_var('EXT_SUFFIX')}"
RUNTIME_MODULE = "cupy_backends.cuda.api.runtime"

_FLAGS = ("-O1", "-g1", "-fPIC", "-std=c++17")


def nvidia_nvrtc() -> Path:
    """Return the path of NVIDIA's own NVRTC."""
    library = header.folder().parent / "lib" / NVRTC
    if not library.is_file():
        raise DeviceBuildError(f"{NVRTC} is missing: pip install 'nvidia-cuda-nvrtc>=13,<14'")
    return library


@cache
def folder() -> Path:
    """Return the folder of the products; build them if it does not exist."""
    require_release()
    compiler = find_compiler()
    texts = [path.read_text() for path in sorted(NATIVE.rglob("*")) if path.is_file()]
    parts = (
        *texts,
        ALLOCATION.read_text(),
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
                products = Path(scratch) / "products"
                products.mkdir(mode=0o700)
                _build(products, Path(scratch))
                os.replace(products, product)
    return product


def _build(products: Path, scratch: Path) -> None:
    forwarders = scratch / "forwarders.cpp"
    forwarders.write_text(api.forwarders())
    _link(products / DRIVER, [forwarders])
    nvrtc = [NATIVE / "nvrtc.cpp", ALLOCATION]
    _link(products / NVRTC, nvrtc, *RUNTIME_FLAGS, libraries=("-ldl",))
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
        products / RUNTIME,
        [generated, NATIVE / "runtime.cpp", scratch / "unsupported.cpp"],
        *("-w", f"-I{scratch}", f"-I{NATIVE}", f"-I{python}"),
        *("-idirafter", python.parent),  # Debian keeps machine-specific headers there
        *("-O0", "-I", pyx.parent),
        libraries=(products / DRIVER, "-Wl,-rpath,$ORIGIN"),
    )


def _settings() -> dict[str, object]:
    """Return the compile-time settings of CuPy's own build."""
    return {
        "CUPY_CUDA_VERSION": header.version(),
        "CUPY_HIP_VERSION": 0,
        "CUPY_USE_CUDA_PYTHON": False,
        "CUPY_CUFFT_STATIC": False,
    }


def _source() -> Path:
    """Return CuPy's source folder; pip downloads it the first time."""
    source = cache_directory() / f"cupy-{RELEASE}"
    with exclusively(source):
        if not source.exists():
            with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
                archive = _download(Path(scratch))
                with tarfile.open(archive) as contents:
                    members = [member for member in contents if "/cupy_backends/" in member.name]
                    # Python 3.11.4 and later have this filter.
                    contents.extraction_filter = getattr(tarfile, "data_filter", None)
                    contents.extractall(scratch, members)
                os.replace(Path(scratch) / f"cupy-{RELEASE}", source)
    return source


def _download(target: Path) -> Path:
    # Stubs let pip read the metadata without a CUDA toolkit.
    os.environ["CUPY_INSTALL_USE_STUB"] = "1"
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--no-binary", "cupy", f"cupy=={RELEASE}", "--dest", target),
    )
    archive = target / f"cupy-{RELEASE}.tar.gz"
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    if checksum != SOURCE_DIGEST:
        raise DeviceBuildError(f"{archive.name} has the digest {checksum}, not {SOURCE_DIGEST}")
    return archive


def _names() -> str:
    """Return a C++ header with the names of the runtime's statuses."""
    statuses = header.statuses("driver_types.h", r"cuda(?:Success|Error[A-Z])\w*")
    cases = "".join(f'    case {value}: return "{name}";\n' for value, name in statuses.items())
    return (
        "static const char* runtime_error_name(int error) {\n"
        f"  switch (error) {{\n{cases}  }}\n  return nullptr;\n}}\n"
    )


def _unsupported(source: Path) -> str:
    """Return C++ stubs, not supported, for runtime functions that native/runtime.cpp lacks."""
    declarations = source.joinpath(*RUNTIME_MODULE.split(".")).with_name("_runtime_extern.pxi")
    declared = set(re.findall(r"\b(cuda[A-Z]\w+)\(", declarations.read_text()))
    defined = re.findall(r"^\S.*?\b(cuda[A-Z]\w+)\(", (NATIVE / "runtime.cpp").read_text(), re.M)
    lines = [
        f'extern "C" int {name}() {{ return 801; }}  // cudaErrorNotSupported'
        for name in sorted(declared - set(defined))
    ]
    return "\n".join(lines) + "\n"


def _link(product: Path, sources: list[Path], *flags: object, libraries: tuple = ()) -> None:
    """Compile files, and link a shared library without a C++ library that zig would first build."""
    compiler = find_compiler()
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        for source, compiled in zip(sources, objects, strict=True):
            options = *_FLAGS, f"-isystem{header.folder()}", *flags
            _run(*compiler.command, *options, "-c", source, "-o", compiled)
        options = "-shared", *compiler.link_flags, f"-Wl,-soname,{product.name}"
        _run(*compiler.command, *options, *objects, *libraries, "-o", product)


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        raise DeviceBuildError(f"{shutil.which(words[0])} failed: {words}\n{result.stderr[-6000:]}")
