"""On emulated devices, each test is given ones that work."""

from tests.device import is_running
from tests.gpu.fixtures import own_cache  # noqa: F401

if is_running():
    from tests.device.fixtures import working_devices  # noqa: F401
