"""Compile the cubins of a GPU run ahead of time, on a machine without a GPU, into one archive.

The steps run on emulated devices with empty kernels, and every kernel variant that they request is
recorded.  The NVRTC release of the GPU's machine then compiles the variants.  On that machine
``unpack`` copies the archive into the cache, and the step "compile" compiles missing variants.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cupyconv import cache_folder, files
from cupyconv.gpu import compiler, sources
from cupyconv.gpu.compiler import Compiled, Variant
from cupyconv.kernels.device import CHIPS, Device
from tests.device import RUNNING
from tests.gpu.running import ROOT, Options, Results, Run, Step

ARCHIVE = Path(__file__).with_name("cubins.tar.xz")
"""Path of the archive; git must not ignore it, since ignored files may not reach the GPU."""

CACHE = ROOT / "build" / "cubins"  # compiled kernels, kept for the next archive
MOST_BYTES = 16 << 20  # largest archive (hand-set)
NEEDED = "needed.json"  # list of the variants, in the archive and in the cache
LINES = "-lineinfo"  # compiler option for line numbers; part of the cache's key
NVRTC_VARIABLE = "CUPYCONV_GPU_NVRTC"  # folder of the compiler to use
RECORD_VARIABLE = "CUPYCONV_GPU_RECORD"  # file to which a dry run appends its variants
DRY_MINUTES = 120  # limit per step of the dry run (hand-set)

Entry = dict[str, Any]


# -- recording the variants ------------------------------------------------------------------------
def record(path: Path) -> None:
    """Replace this process's kernels by empty ones, and append the requested variants to a file."""
    from tests import agreement
    from tests.device.fixtures import empty_cubin

    lines = LINES in compiler.OPTIONS
    compiler.OPTIONS = tuple(option for option in compiler.OPTIONS if option != LINES)

    def compile_missing(
        variants: Sequence[Variant], _threads: int | None = None, done: Callable[[], None] = list
    ) -> list[Future[Compiled]]:
        made = []
        for source, defines, architecture in variants:
            entry = {"source": source.name, "defines": defines, "architecture": architecture}
            with path.open("a") as file:
                file.write(json.dumps({**entry, "lines": lines}) + "\n")
            made.append(Future[Compiled]())
            made[-1].set_result(Compiled(empty_cubin(source, architecture)[0]))
            done()
        return made

    compiler.compile_missing = compile_missing
    # Tests continue to their next kernel after the wrong result of an empty one.
    agreement.require_equal = np.testing.assert_allclose = lambda *_, **__: None


def is_recording() -> bool:
    """Return whether this process records variants: a GPU's cases on an emulated device."""
    return bool(os.environ.get(RECORD_VARIABLE))


def recorded(options: Options, chip: str) -> list[Entry]:
    """Return the variants that the steps request on a chip, in the order of the steps."""
    from tests.device.machine import CHIP_VARIABLE
    from tests.gpu.__main__ import steps

    capability = Device.of(chip).nominal
    words = f"{capability[0]}.{capability[1]} {CHIPS[capability].multiprocessors}"
    with tempfile.TemporaryDirectory() as folder:
        file, results = Path(folder, "variants"), Results(Path(folder))
        environ = {**options.environ, CHIP_VARIABLE: words, RECORD_VARIABLE: str(file)}
        # Tests of empty kernels fail.
        options = replace(options, environ=environ, most_failures=sys.maxsize)
        for step in steps():
            if step.module != __name__:
                step = replace(step, workers=2, seconds=DRY_MINUTES * 60, tool=(), fresh=False,
                               missing="")  # fmt: skip
                Run(step, options, results, DRY_MINUTES * 60).everything()
        lines = dict.fromkeys(file.read_text().splitlines())
    entries = (json.loads(line) for line in lines)
    return [one for one in entries if one["architecture"] == Device.of(chip).architecture]


# -- compiling -------------------------------------------------------------------------------------
def variant_of(entry: Entry) -> Variant:
    """Return the variant of a recorded entry."""
    name, defines = entry["source"], tuple(map(tuple, entry["defines"]))
    return Variant(_source(name), defines, entry["architecture"])


@cache
def _source(name: str) -> sources.KernelSource:
    from tests.gpu import golden

    return golden.source() if name == golden.SOURCE.name else sources.load(name)


@contextmanager
def _options(lines: bool) -> Iterator[None]:
    before = compiler.OPTIONS
    compiler.OPTIONS = (*before, LINES) if lines else before
    yield
    compiler.OPTIONS = before


def use_nvrtc(folder: Path) -> None:
    """Load a release of NVRTC; CuPy then uses the loaded library."""
    (builtins,) = folder.rglob("libnvrtc-builtins.so.*.*")
    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    (library,) = folder.rglob("libnvrtc.so.[0-9]*")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def write(folder: Path, names: Iterable[str], archive: Path) -> None:
    """Pack files of a cache folder into an archive."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for name in sorted(names):
            packed.add(folder / name, name)


def main(options: Options, chips: Sequence[str], nvrtc: Path | None) -> int:
    """Record, compile and pack; return 1 if a compilation fails or the archive is too large."""
    entries = [one for chip in chips for one in recorded(options, chip)]
    print(f"{len(entries)} variants", flush=True)
    files.make_private(CACHE)
    (CACHE / NEEDED).write_text(json.dumps(entries))
    environ = {cache_folder.CACHE_VARIABLE: str(CACHE), NVRTC_VARIABLE: str(nvrtc or "")}
    environ |= {RUNNING: "", "PYTHONPATH": str(ROOT)}  # not the emulated devices' compiler
    step = Step("compile", __name__, DRY_MINUTES, os.cpu_count() or 1, 600)
    options = replace(options, environ=environ, only="", sample=0)
    with tempfile.TemporaryDirectory() as folder:
        results = Results(Path(folder))
        results.described = True  # there may be no GPU to describe
        states = Run(step, options, results, DRY_MINUTES * 60).everything()
        records = map(json.loads, results.path.read_text().splitlines())
        names = {name for one in records for name in one.get("files", ())}
    write(CACHE, names | {NEEDED}, ARCHIVE)
    size = ARCHIVE.stat().st_size
    print(f"{len(names) // 2} cubins, {size / 2**20:.1f} MiB in {ARCHIVE.relative_to(ROOT)}")
    whole = states == {"passed": len(entries)} and size <= MOST_BYTES
    return int(not whole)


# -- on the machine with the GPU -------------------------------------------------------------------
def unpack(archive: Path = ARCHIVE) -> None:
    """Copy the archive's files into the cache, once."""
    folder = cache_folder.trusted_directory()
    if folder is None or not archive.exists():
        return
    mark = folder / f"unpacked-{hashlib.sha256(archive.read_bytes()).hexdigest()[:16]}"
    if mark.exists():
        return
    files.make_private(folder)
    with tarfile.open(archive) as packed:
        for member in packed:
            content = packed.extractfile(member) or io.BytesIO()
            path = folder / Path(member.name).name
            path.write_bytes(content.read())
            path.chmod(0o600)
    mark.touch()


def cases(words: str = "") -> list[dict[str, Any]]:
    """Return the listed variants that the cache lacks; while packing, all listed variants."""
    folder = cache_folder.trusted_directory()
    listed = folder / NEEDED if folder else None
    entries = json.loads(listed.read_text()) if listed and listed.exists() else []
    found = []
    for number, entry in enumerate(entries):
        with _options(entry["lines"]):
            if NVRTC_VARIABLE in os.environ or not compiler.is_kept(variant_of(entry)):
                found.append({"name": f"{entry['source']} {number}", "entry": entry})
    return found


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Compile a variant if the cache lacks it; return the names of its files in the cache."""
    with _options(case["entry"]["lines"]):
        source, defines, architecture = variant_of(case["entry"])
        compiler.cached_cubin(source, dict(defines), architecture)
        paths = compiler.entry_paths(source, dict(defines), architecture)
    return {"files": [path.name for path in paths or ()]}
