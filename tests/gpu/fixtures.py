"""What tests that measure on a GPU begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyconv import measuring, operations


def as_a_new_process() -> None:
    """Nothing is remembered of what was measured."""
    measuring.forget()
    operations._ready.cache_clear()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own for compiled kernels and measurements, of which there are none yet."""
    monkeypatch.setenv("CUPYCONV_CACHE_DIR", str(tmp_path))
    as_a_new_process()
    yield tmp_path
    as_a_new_process()
