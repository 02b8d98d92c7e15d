"""The tests of the emulated devices need a process of their own, which sees them."""

from tests.device import is_running

if is_running():
    from tests.device.fixtures import working_devices  # noqa: F401
    from tests.gpu.fixtures import own_cache  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]
