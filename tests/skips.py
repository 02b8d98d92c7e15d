"""Tests that a CI run may skip."""

from __future__ import annotations

from collections.abc import Mapping

from tests.device import RUNNING

WITHOUT_A_GPU = ("no usable GPU", "no CUDA device")
"""Words in the accepted skip reasons of a machine without a GPU, such as CI's."""

ON_EMULATED_DEVICES = ("where the devices are emulated",)
"""Words in the accepted skip reasons of a run on emulated devices, which must find its GPUs."""


def may_be_skipped(reason: str, environment: Mapping[str, str]) -> bool:
    """Return whether CI accepts that a test was skipped for this reason.

    Args:
        reason: skip reason as pytest reports it.
        environment: environment variables of the run; CUPYCONV_CI_LACKS lists the packages that
            could not be installed.
    """
    words = ON_EMULATED_DEVICES if environment.get(RUNNING) else WITHOUT_A_GPU
    lacks = environment.get("CUPYCONV_CI_LACKS", "").split()
    return any(word.lower() in reason.lower() for word in (*words, *lacks))
