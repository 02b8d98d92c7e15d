"""Kernel source to cubin, by NVRTC, with a disk cache.  Needs CuPy but no GPU.

CuPy's own cache is not used: its key leaves out the included headers, and its compiler always
flushes float32 subnormals to zero.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import struct
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cupyconv import arrays, files, records
from cupyconv.cpu.threads import cores
from cupyconv.errors import DeviceError, KernelCompileError, install_command, unknown_word
from cupyconv.gpu.sources import KernelSource

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""Architectures that every kernel is built for in the tests."""

OPTIONS = (
    "-std=c++17",
    "--ftz=false",  # subnormals are kept: float32 is float32
    "--prec-div=true",
    "--prec-sqrt=true",
    "--fmad=true",
    "--ptxas-options=-v",  # registers, spills and shared memory go into the log
)

CACHE_VARIABLE = "CUPYCONV_CACHE_DIR"
_FORMAT = 1  # of a cache entry


class Variant(NamedTuple):
    """What one cubin is compiled from: a kernel file with its headers, macros, and the chip."""

    source: KernelSource
    defines: tuple[tuple[str, str | int], ...]
    architecture: str


class Compiled(NamedTuple):
    """A variant's cubin.

    Attributes:
        cubin: its bytes.
        seconds: that the compiler took; None if the cache had it.
        cpu_seconds: of a processor, likewise.
    """

    cubin: bytes
    seconds: float | None = None
    cpu_seconds: float | None = None


def compile_cubin(
    source: KernelSource, defines: Mapping[str, str | int], architecture: str
) -> tuple[bytes, str]:
    """The cubin of one variant, and the compiler's log.

    Args:
        source: a kernel file with its headers.
        defines: macros of the variant.
        architecture: such as "sm_80" or "sm_90a".

    Raises:
        KernelCompileError: the source does not compile; the error carries the log.
        DeviceError: CuPy or NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    if not architecture.startswith("sm_"):
        raise unknown_word("architecture", architecture, ARCHITECTURES)
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = nvrtc.createProgram(source.text, source.name, texts, names)
    try:
        try:
            nvrtc.compileProgram(program, options(defines, architecture))
        except nvrtc.NVRTCError as error:
            macros = " ".join(f"-D{name}={value}" for name, value in defines.items())
            raise KernelCompileError(
                f"{source.name} does not compile for {architecture} with {macros}: {error}",
                nvrtc.getProgramLog(program),
            ) from error
        return _whole_elf(nvrtc.getCUBIN(program)), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def cached_cubin(
    source: KernelSource, defines: Mapping[str, str | int], architecture: str
) -> bytes:
    """The variant's cubin, compiled now if the cache does not have it.

    An entry is two files: the cubin, and a record with the cubin's digest, which is written last.
    Both are put in place atomically; an entry whose digest does not match is compiled again.  What
    is returned are the bytes that were checked, whatever is done to the files later.  Where the
    cache cannot be written, or others may write it, nothing is read or kept.
    """
    # In another thread: NVRTC up to 12.4 leaves the one that it works in with the C locale, where
    # Python takes what it reads for ASCII.
    (found,) = compile_missing([Variant(source, tuple(defines.items()), architecture)])
    return found.result().cubin


def compile_missing(
    variants: Sequence[Variant],
    threads: int | None = None,
    done: Callable[[], None] = lambda: None,
) -> list[Future[Compiled]]:
    """Cubins of variants, of which those that the cache does not have are compiled side by side.

    The compiler lets several threads work: it takes them one by one through its front end only,
    which is a tenth of its time.

    Args:
        variants: all different.
        threads: that compile; by default one on each core.
        done: called here after each of them.

    Returns:
        For each variant what became of it: no error keeps the others from being compiled.
    """
    found: dict[Variant, Future[Compiled]] = {}
    for variant in variants:
        kept = _kept(variant)
        if kept is not None:
            found[variant] = Future()
            found[variant].set_result(Compiled(kept))
            done()
    missing = [variant for variant in variants if variant not in found]
    if missing:
        pool = ThreadPoolExecutor(min(threads or cores(), len(missing)), "cupyconv-compiler")
        try:
            begun = {pool.submit(_made, variant): variant for variant in missing}
            for future in as_completed(begun):
                found[begun[future]] = future
                done()
        finally:
            pool.shutdown(cancel_futures=True)  # after an interrupt no more are begun
    return [found[variant] for variant in variants]


_under_way: dict[Variant, threading.Lock] = {}
"""Held by the thread that looks a variant up or compiles it; others wait for what it finds."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # a child has none of those threads


def _made(variant: Variant) -> Compiled:
    """The variant's cubin, from the cache, or compiled and put there."""
    with _under_way.setdefault(variant, threading.Lock()):
        kept = _kept(variant)
        if kept is not None:
            return Compiled(kept)
        source, defines, architecture = variant
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        cubin, log = compile_cubin(source, dict(defines), architecture)
        taken = time.perf_counter() - begun, time.thread_time() - cpu_begun
        paths = entry_paths(source, dict(defines), architecture)
        if paths is not None:
            record = {
                "format": _FORMAT,
                "digest": _digest(cubin),
                "source": source.name,
                "defines": dict(defines),
                "architecture": architecture,
                "log": log,
            }
            with suppress(OSError):
                for path, content in zip(
                    paths, (cubin, json.dumps(record, indent=1).encode()), strict=True
                ):
                    keep(path, content)
        return Compiled(cubin, *taken)


def is_kept(variant: Variant) -> bool:
    """Whether the cache has a variant whole."""
    return _kept(variant) is not None


def _kept(variant: Variant) -> bytes | None:
    """The variant's cubin, if the cache has it whole."""
    paths = entry_paths(variant.source, dict(variant.defines), variant.architecture)
    return None if paths is None else _intact(*paths)


def entry_paths(
    source: KernelSource, defines: Mapping[str, str | int], architecture: str
) -> tuple[Path, Path] | None:
    """Where the cache has a variant's cubin and its record; None where it is not to be trusted."""
    folder = trusted_directory()
    if folder is None:
        return None
    key = _key(source, defines, architecture)
    return folder / f"{key}.cubin", folder / f"{key}.json"


def cache_directory() -> Path | None:
    """The folder of compiled kernels: $CUPYCONV_CACHE_DIR, else cupyconv in the user's cache.

    None where the user has no home folder, or it is that of a user who has none.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return files.expanded(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("~") and not os.path.isabs(base):
        base = "~/.cache"  # a relative one is to be ignored, by the XDG specification
    home = files.expanded(base)
    return None if home is None else home / "cupyconv"


def trusted_directory(name: str = "") -> Path | None:
    """The cache's folder, or the one of this name in it, where nobody else can put anything.

    None, with a warning that says how to mend it, where somebody could.
    """
    found = cache_directory()
    folder = found and found / name
    wrong = folder and distrust(folder)
    if wrong:
        _warn("compiled kernels are kept for this process only: {}. Mend it: {}".format(*wrong))
        return None
    return folder


def distrust(folder: Path) -> tuple[str, str] | None:
    """Who else decides what is in a cache folder, and the command that mends it; None if nobody."""
    found = files.distrusted(folder)
    if found is None:
        return None
    place, wrong = found
    mending = f"set {CACHE_VARIABLE} to a folder that is yours"
    name = shlex.quote(str(place))
    if place.lstat().st_uid == os.geteuid():
        mending = f"chmod go-w {name}, or {mending}"
    elif str(place) == os.path.realpath(folder):  # what it is in may be somebody else's by right
        mending = f"sudo chown -R {os.geteuid()} {name}, or {mending}"
    return f"{place}, which leads to the cache {folder}, {wrong}", mending


def unwritable(folder: Path) -> str | None:
    """Why nothing can be put into a cache folder, which need not be there yet; else None."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written"


@cache
def _warn(text: str) -> None:
    """Warn once in a process."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def keep(path: Path, content: bytes) -> None:
    """Put a file into a cache folder, which is made if need be.

    Raises:
        OSError: it cannot be written, or somebody else could too.
    """
    files.make_private(path.parent)
    if wrong := distrust(path.parent):
        raise PermissionError(wrong[0])  # somebody was quicker to make it
    if path.is_symlink():
        path.unlink()  # it is not read, so it is not written through either
    files.put(path, content, mode=0o600)


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's version, (major, minor).

    Raises:
        DeviceError: CuPy or NVRTC is not installed.
    """
    return _nvrtc().getVersion()


def _nvrtc():
    nvrtc = arrays.cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()
    except Exception as error:  # the binding loads the library on first use, and raises its own
        raise DeviceError(
            f"NVRTC, CUDA's run-time compiler, could not be loaded ({error}). "
            f"Install it with: {install_command('cuda13')} (or likewise for CUDA 12)"
        ) from error
    return nvrtc


def _whole_elf(cubin: bytes) -> bytes:
    """The cubin with the last byte that CuPy's binding takes for a string's terminator.

    An ELF file ends in a header table, and its last field is a small little-endian number, so the
    byte is zero; tools that read files, unlike the driver, insist on it.
    """
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 0x20)
    sizes = struct.unpack_from("<4H", cubin, 0x36)
    end = max(program_headers + sizes[0] * sizes[1], section_headers + sizes[2] * sizes[3])
    return cubin + bytes(end - len(cubin)) if len(cubin) == end - 1 else cubin


def options(defines: Mapping[str, str | int], architecture: str) -> list[str]:
    """What NVRTC is told to make of a source: for which chip, by which rules, with which macros."""
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    return [f"-arch={architecture}", *OPTIONS, *macros]


def _key(source: KernelSource, defines: Mapping[str, str | int], architecture: str) -> str:
    """Digest of every byte that the compiler is given, its options and its version."""
    digest = hashlib.sha256()
    parts = [source.name, source.text, *options(defines, architecture)]
    for name, text in source.headers:
        parts += [name, text]
    parts.append(str((_FORMAT, nvrtc_version())))
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return f"{Path(source.name).stem}-{architecture}-{digest.hexdigest()[:32]}"


def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


def _intact(cubin_path: Path, record_path: Path) -> bytes | None:
    """The cubin, if it is the one that its record was written for."""
    try:
        record = records.parse_json(files.read_private(record_path))
        cubin = files.read_private(cubin_path)
        return cubin if record["digest"] == _digest(cubin) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
