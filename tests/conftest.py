"""Settings of every suite."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "cupyconv",
    deadline=None,  # the first example pays for imports and BLAS start-up
    derandomize=True,  # a run on CI says the same as a run at home
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("cupyconv")
