"""Fixtures of this folder's tests, which are collected only under ``python -m tests.device``."""

from tests.device import is_running

if is_running():
    from tests.device.fixtures import (  # noqa: F401
        allocator,
        empty_kernels,
        encoded,
        launched,
        nothing_loaded,
        working_devices,
    )
    from tests.gpu.fixtures import (  # noqa: F401
        collected_between_tests,
        nothing_imported_is_collected,
        own_cache,
    )
else:
    collect_ignore_glob = ["test_*.py"]
