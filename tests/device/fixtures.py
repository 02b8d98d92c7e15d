"""What every test on the emulated devices begins and ends with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.device import machine


@pytest.fixture(autouse=True)
def working_devices() -> Iterator[None]:
    """Devices that work, whatever the test before did; one that fails in a test fails it.

    A test that means a device to fail calls ``machine.revive`` itself.
    """
    machine.revive()
    yield
    found = machine.revive()
    assert not found, "\n".join(found)
