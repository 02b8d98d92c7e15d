"""Compilation of kernels to cubin or PTX with NVRTC, and a disk cache; needs CuPy but no GPU.

CuPy's own compilation and cache are not used: the cache's key omits the included headers, and
CuPy always passes the option -ftz=true, which flushes float32 subnormals to zero.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cupyconv import arrays, cache_folder, files, log, records
from cupyconv.errors import DeviceError, KernelCompileError, install_command, unknown_word
from cupyconv.gpu.sources import KernelSource
from cupyconv.kernels.device import Device

if TYPE_CHECKING:
    from concurrent.futures import Future

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""Architectures for which the tests build every kernel."""

OPTIONS = (
    "-std=c++17",
    "--ftz=false",  # keep float32 subnormals
    "--prec-div=true",
    "--prec-sqrt=true",
    "--fmad=true",
    "--ptxas-options=-v",  # registers, spills and shared memory go into the log
)

_FORMAT = 1
"""Version of the cache's file format."""


SUFFIXES = (".cubin", ".ptx")
"""File name suffixes of cubins and of PTX in the cache."""

_PTX_PREFIX = "compute_"


class Variant(NamedTuple):
    """Input of the compiler for one cubin or PTX: kernel source with headers, macros, target."""

    source: KernelSource
    defines: tuple[tuple[str, str | int], ...]
    target: str


class Compiled(NamedTuple):
    """The compiled code of a variant.

    Attributes:
        cubin: bytes of the cubin; PTX for a target such as "compute_90".
        seconds: wall time of the compiler; None if the code came from the cache.
        cpu_seconds: processor time of the compiler; None if the code came from the cache.
    """

    cubin: bytes
    seconds: float | None = None
    cpu_seconds: float | None = None


def compile_cubin(
    source: KernelSource, defines: Mapping[str, str | int], target: str
) -> tuple[bytes, str]:
    """Compile one variant; return its cubin or PTX and the compiler's log.

    Args:
        source: kernel file with its headers.
        defines: macros of the variant.
        target: target such as "sm_80" or "sm_90a" for a cubin, or "compute_90" for PTX.  PTX is
            returned with the final null byte that the driver expects.

    Raises:
        KernelCompileError: the source does not compile; the error has the log.
        DeviceError: CuPy or NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    if not target.startswith(("sm_", _PTX_PREFIX)):
        raise unknown_word("architecture", target, ARCHITECTURES)
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = nvrtc.createProgram(source.text, source.name, texts, names)
    try:
        try:
            nvrtc.compileProgram(program, options(defines, target))
        except nvrtc.NVRTCError as error:
            macros = " ".join(_macros(defines))
            raise KernelCompileError(
                f"{source.name} does not compile for {target} with {macros}: {error}",
                nvrtc.getProgramLog(program),
            ) from error
        if is_ptx(target):
            code = nvrtc.getPTX(program) + b"\0"  # CuPy's binding removes the final null byte
        else:
            code = _whole_elf(nvrtc.getCUBIN(program))
        return code, nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def cached_cubin(source: KernelSource, defines: Mapping[str, str | int], target: str) -> bytes:
    """Return the variant's cubin from the cache; compile the variant if the cache lacks it.

    An entry consists of two files: the cubin, and a record with the cubin's digest.  The record is
    written last, and each file is replaced atomically.  An entry whose digest does not match is
    compiled again.  The digest is checked on the returned bytes themselves, so later changes of the
    files have no effect.

    If the cache is not writable, or other users may write to it, nothing is read or stored.
    """
    # Compile in another thread: NVRTC up to 12.4 leaves its thread with the C locale, in which
    # Python decodes files as ASCII.
    (compiled,) = compile_missing([Variant(source, tuple(defines.items()), target)])
    return compiled.result().cubin


def compile_missing(
    variants: Sequence[Variant], threads: int | None = None, done: Callable[[], None] = lambda: None
) -> list[Future[Compiled]]:
    """Return the cubins of variants; compile in parallel the variants that the cache lacks.

    Compilations run in parallel except in NVRTC's front end, which takes a tenth of their time.

    Args:
        variants: variants without duplicates.
        threads: number of threads that compile; by default one per core.
        done: function that is called in the calling thread after each variant.

    Returns:
        Finished futures in the order of ``variants``, each with a result or an error.  After an
        error, the remaining variants are still compiled.
    """
    from concurrent.futures import Future, ThreadPoolExecutor, as_completed

    found: dict[Variant, Future[Compiled]] = {}
    for variant in variants:
        cached = _cached(variant)
        if cached is not None:
            found[variant] = Future()
            found[variant].set_result(Compiled(cached))
            done()
    missing = [variant for variant in variants if variant not in found]
    if missing:
        from cupyconv.cpu.threads import cores

        pool = ThreadPoolExecutor(min(threads or cores(), len(missing)), "cupyconv-compiler")
        try:
            begun = {pool.submit(_cached_or_compiled, variant): variant for variant in missing}
            for future in as_completed(begun):
                found[begun[future]] = future
                done()
        finally:
            pool.shutdown(cancel_futures=True)  # start no further compilation after an interrupt
    return [found[variant] for variant in variants]


_under_way: dict[Variant, threading.Lock] = {}
"""Locks by variant.  A thread holds the lock while it looks up or compiles the variant; other
threads that need the variant wait for the lock, and then read the cache entry."""

if hasattr(os, "register_at_fork"):
    # Threads that hold locks do not exist in a forked child, and would never release the locks.
    os.register_at_fork(after_in_child=_under_way.clear)


def _cached_or_compiled(variant: Variant) -> Compiled:
    """Return the variant's code from the cache; compile and store it if the cache lacks it."""
    with _under_way.setdefault(variant, threading.Lock()):
        cached = _cached(variant)
        if cached is not None:
            return Compiled(cached)
        source, defines, target = variant
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        cubin, messages = compile_cubin(source, dict(defines), target)
        durations = time.perf_counter() - begun, time.thread_time() - cpu_begun
        event, macros = "compiled %s for %s in %.2f s: %s", dict(defines)
        log.info(event, source.name, target, durations[0], " ".join(_macros(macros)))
        record = {
            "format": _FORMAT,
            "digest": _digest(cubin),
            "source": source.name,
            "defines": macros,
            "architecture": target,
            "log": messages,
        }
        if paths := entry_paths(source, macros, target):
            with suppress(OSError):
                cache_folder.keep(paths[0], cubin)
                cache_folder.keep(paths[1], json.dumps(record, indent=1).encode())
        return Compiled(cubin, *durations)


def is_kept(variant: Variant) -> bool:
    """Return whether the cache has a complete entry for a variant."""
    return _cached(variant) is not None


def _cached(variant: Variant) -> bytes | None:
    """Return the variant's cubin; None if the cache has no complete entry."""
    paths = entry_paths(variant.source, dict(variant.defines), variant.target)
    return None if paths is None else _read_entry(*paths)


def entry_paths(
    source: KernelSource, defines: Mapping[str, str | int], target: str
) -> tuple[Path, Path] | None:
    """Return the paths of a variant's code and record; None if the cache is not trusted."""
    folder = cache_folder.trusted_directory()
    if folder is None:
        return None
    key = _key(source, defines, target)
    suffix = SUFFIXES[is_ptx(target)]
    return folder / f"{key}{suffix}", folder / f"{key}.json"


def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version as (major, minor).

    Raises:
        DeviceError: CuPy or NVRTC is not installed.
    """
    return _nvrtc().getVersion()


def fitted(device: Device) -> Device:
    """Return the device with a target that NVRTC supports; unchanged if NVRTC is not installed.

    Raises:
        DeviceError: NVRTC has no target whose code the chip can run.
    """
    try:
        nvrtc = _nvrtc()
    except DeviceError:
        return device  # the first compilation raises the error
    known = sorted(divmod(number, 10) for number in nvrtc.getSupportedArchs())
    found = device.compiled_by(known)
    if found is None:
        version, oldest, own = (
            "{}.{}".format(*pair) for pair in (nvrtc.getVersion(), known[0], device.capability)
        )
        raise DeviceError(
            f"NVRTC {version} compiles for compute capability {oldest} and later: "
            f"{device.name} has {own}. Install an older NVRTC"
        )
    return found


def is_ptx(target: str) -> bool:
    """Return whether the target is PTX, which the driver compiles."""
    return target.startswith(_PTX_PREFIX)


def _nvrtc():
    nvrtc = arrays.cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()
    except Exception as error:  # the binding loads the library on first use; errors vary
        raise DeviceError(
            f"NVRTC, CUDA's run-time compiler, could not be loaded ({error}). "
            f"Install it with: {install_command('cuda13')} (or cuda12 for CUDA 12)"
        ) from error
    return nvrtc


def _whole_elf(cubin: bytes) -> bytes:
    """Return the cubin with its last byte, which CuPy's binding removes.

    An ELF file ends in a header table whose last byte is zero, and CuPy's binding mistakes this
    byte for a string's terminator.  The driver ignores the byte, but tools that read files need it.
    """
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 0x20)
    sizes = struct.unpack_from("<4H", cubin, 0x36)
    end = max(program_headers + sizes[0] * sizes[1], section_headers + sizes[2] * sizes[3])
    return cubin + bytes(end - len(cubin)) if len(cubin) == end - 1 else cubin


def options(defines: Mapping[str, str | int], target: str) -> list[str]:
    """Return NVRTC's options for a variant: target, common options and macros."""
    return [f"-arch={target}", *OPTIONS, *_macros(defines)]


def _macros(defines: Mapping[str, str | int]) -> list[str]:
    return [f"-D{name}={value}" for name, value in defines.items()]


def _key(source: KernelSource, defines: Mapping[str, str | int], target: str) -> str:
    """Return a file name with a digest of the compiler's inputs, options and version."""
    digest = hashlib.sha256()
    parts = [source.name, source.text, *options(defines, target)]
    for name, text in source.headers:
        parts += [name, text]
    parts.append(str((_FORMAT, nvrtc_version())))
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return f"{Path(source.name).stem}-{target}-{digest.hexdigest()[:32]}"


def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


def _read_entry(cubin_path: Path, record_path: Path) -> bytes | None:
    """Return the cubin of a cache entry; None if its digest does not match the record."""
    try:
        record = records.parse_json(files.read_private(record_path))
        cubin = files.read_private(cubin_path)
        return cubin if record["digest"] == _digest(cubin) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
