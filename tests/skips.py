"""Tests that a CI run may skip."""

from __future__ import annotations

from collections.abc import Mapping

from tests.device import RUNNING

WITHOUT_A_GPU = ("no usable GPU", "no CUDA device", "golden-*.npz")
"""Words of the reasons that hold where there is no GPU, as on CI."""

ON_EMULATED_DEVICES = ("where the devices are emulated",)
"""The same for a run on emulated devices: it has GPUs, and fails where it does not find them."""


def may_be_skipped(reason: str, environment: Mapping[str, str]) -> bool:
    """Return whether CI accepts that a test was skipped for this reason.

    Args:
        reason: as pytest reports it.
        environment: of the run; CUPYCONV_CI_LACKS names what could not be installed.
    """
    words = ON_EMULATED_DEVICES if environment.get(RUNNING) else WITHOUT_A_GPU
    lacks = environment.get("CUPYCONV_CI_LACKS", "").split()
    return any(word.lower() in reason.lower() for word in (*words, *lacks))
