"""Fixtures of tests on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyconv import calls, measuring


@pytest.fixture(autouse=True, scope="session")
def nothing_imported_is_collected() -> None:
    """Exclude imported objects from the garbage collections after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected_between_tests() -> Iterator[None]:
    """Run Python's garbage collection after each test, never during a test.

    A collection may free arrays of an earlier test.  During a test, this would make the device wait
    for all of its work, fail a capture, or reduce a pool's memory in use.
    """
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def as_a_new_process() -> None:
    """Forget all measurements, as in a new process."""
    measuring.forget()
    calls.forget()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for compiled kernels and measurements."""
    monkeypatch.setenv("CUPYCONV_CACHE_DIR", str(tmp_path))
    as_a_new_process()
    yield tmp_path
    as_a_new_process()
