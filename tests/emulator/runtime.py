"""The runtime library through ctypes, and the settings of launches."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .build import build_runtime

POLICIES = ("first-in", "reverse", "random")
TIMINGS = ("late", "early", "any")
KERNEL_SOURCES = ("cuda", "ptx")


@dataclass(frozen=True)
class Settings:
    """Settings of launches.

    Attributes:
        check: Check every access (a module built with ``checked=False`` has no checks).
        policy: Scheduling order of threads: ``first-in``, ``reverse`` or ``random``.
        timing: When asynchronous copies land: ``late``, ``early`` or at ``any`` time.
        preempt_period: Mean number of accesses after which a thread yields; 0 for never.
        seed: Seed of all random choices.
        bank_conflicts: Count the wavefronts of shared-memory accesses.
        blocks: Linear indices of the blocks (clusters, where declared) to run; None for all.
        raise_reports: Raise CheckerError after a launch with reports.
        compiled: Also compile variants with NVRTC, and check launches against the resources of
            their cubins (driver.py), including registers and static shared memory.
        source: What the library's kernels are built from: their ``cuda`` source, or the ``ptx``
            that NVRTC compiles from it.
        on_outcome: Called with the Outcome of each launch, before it raises.
    """

    check: bool = True
    policy: str = "first-in"
    timing: str = "late"
    preempt_period: int = 0
    seed: int = 1
    bank_conflicts: bool = False
    blocks: Sequence[int] | None = None
    raise_reports: bool = True
    compiled: bool = False
    source: str = "cuda"
    on_outcome: Callable[[Any], None] | None = None


# Three schedules that differ in every setting; tests run each case in all of them.
SCHEDULES = (
    Settings(),
    Settings(policy="reverse", timing="early"),
    Settings(policy="random", timing="any", preempt_period=64, seed=7),
)

_DEFAULT = SCHEDULES[0]
_current: contextvars.ContextVar[Settings] = contextvars.ContextVar(
    "emulator_settings", default=_DEFAULT
)


def current_settings() -> Settings:
    """Return the settings of the next launch."""
    return _current.get()


@contextlib.contextmanager
def settings(base: Settings | None = None, **changes) -> Iterator[Settings]:
    """Change the settings of launches inside the ``with`` block."""
    current = replace(base or _current.get(), **changes)
    token = _current.set(current)
    try:
        yield current
    finally:
        _current.reset(token)


# --------------------------------------------------------------------------------------------------
# Structs of host/emulator.h, host/runtime.h and host/checker.h
# --------------------------------------------------------------------------------------------------
class _SettingsRecord(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint32)
        for name in (
            "check",
            "policy",
            "async_timing",
            "preempt_period",
            "seed",
            "bank_conflicts",
        )
    ]


class StatisticsRecord(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("switches", "accesses", "blocks")]


class ReportRecord(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("pc", ctypes.c_uint32),
        ("other_pc", ctypes.c_uint32),
        ("line", ctypes.c_uint32),
        ("file", ctypes.c_char * 256),
        ("text", ctypes.c_char * 512),
    ]


class BankRecord(ctypes.Structure):
    _fields_ = [("pc", ctypes.c_uint32), ("is_matrix", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64) for name in ("requests", "ideal", "wavefronts")
    ]


class ParameterRecord(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("kind", ctypes.c_uint32)]


class EntryRecord(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("call", ctypes.c_void_p),
        ("parameter_count", ctypes.c_uint32),
        ("parameters", ctypes.POINTER(ParameterRecord)),
        ("launch_bounds", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32 * 3),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Load the runtime once per process; kernels bind to it."""
    runtime = ctypes.CDLL(str(build_runtime()))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    signatures = {
        "emulator_settings": (ctypes.POINTER(_SettingsRecord), []),
        "emulator_statistics": (ctypes.POINTER(StatisticsRecord), []),
        "emulator_clear_reports": (None, []),
        "emulator_report_count": (size, []),
        "emulator_report": (ctypes.POINTER(ReportRecord), [size]),
        "emulator_bank_count": (size, []),
        "emulator_bank_record": (ctypes.POINTER(BankRecord), [size]),
        "emulator_register": (
            pointer,
            [ctypes.c_char_p, pointer, size, ctypes.c_uint, ctypes.c_int, ctypes.c_int],
        ),
        "emulator_unregister": (None, [pointer]),
        "emulator_element_state": (pointer, [pointer]),
        "emulator_granule_shift": (ctypes.c_uint, [pointer]),
        "emulator_is_registered": (ctypes.c_int, [pointer]),
        "emulator_allocate": (pointer, [size]),
        "emulator_free": (None, [pointer, size]),
        "emulator_launch": (
            None,
            [pointer, pointer, pointer, size, pointer, pointer, size, ctypes.c_int],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(runtime, name)
        function.restype, function.argtypes = result, arguments
    return runtime


def apply_settings(options: Settings) -> None:
    """Write the settings to the runtime; ValueError for an unknown value."""
    choices = (("policy", POLICIES), ("timing", TIMINGS), ("source", KERNEL_SOURCES))
    for name, known in choices:
        if getattr(options, name) not in known:
            raise ValueError(f"{name} is one of {known}: got {getattr(options, name)!r}")
    record = library().emulator_settings().contents
    record.check = options.check
    record.policy = POLICIES.index(options.policy)
    record.async_timing = TIMINGS.index(options.timing)
    record.preempt_period = options.preempt_period
    record.seed = options.seed
    record.bank_conflicts = options.bank_conflicts
