"""Fixtures of tests on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyconv import measuring, operations


@pytest.fixture(autouse=True, scope="session")
def nothing_imported_is_collected() -> None:
    """Exclude imported objects from the garbage collections after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected_between_tests() -> Iterator[None]:
    """Python's collector comes after the test, and in none.

    What it finds may be arrays of an earlier test.  Their memory would be given back whenever that
    is: the device waits for all of its work then, a capture fails, a pool has less in use.
    """
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def as_a_new_process() -> None:
    """Nothing is remembered of what was measured."""
    measuring.forget()
    operations._ready.cache_clear()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for compiled kernels and measurements."""
    monkeypatch.setenv("CUPYCONV_CACHE_DIR", str(tmp_path))
    as_a_new_process()
    yield tmp_path
    as_a_new_process()
