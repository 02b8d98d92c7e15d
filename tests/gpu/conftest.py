"""Fixtures of all tests in this folder; emulated devices are revived when they fail."""

from tests.device import is_running
from tests.gpu.fixtures import (  # noqa: F401
    collected_between_tests,
    nothing_imported_is_collected,
    own_cache,
)

if is_running():
    from tests.device.fixtures import working_devices  # noqa: F401
