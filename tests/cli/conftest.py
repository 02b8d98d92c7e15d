"""Fixture of all tests of the command line."""

import pytest

from cupyconv import arrays


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide GPUs, so that results are the same on every machine."""
    monkeypatch.setattr(arrays, "device_count", lambda: 0)
