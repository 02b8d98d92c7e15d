"""GPU run step with a hang, an illegal address, a driver error and a killed process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

from cupyconv import arrays
from tests.device import machine
from tests.device.api import CU

NAMES = ("add 1", "hang", "add 2", "illegal address", "add 3", "driver error", "add 4", "killed",
         "add 5")  # fmt: skip

_SOURCE = """
extern "C" __global__ void write(float* values) { values[threadIdx.x] = 1; }
"""


def cases(words: str = "") -> list[dict[str, Any]]:
    """Return the cases: faults between correct cases."""
    return [{"name": name} for name in NAMES]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case, or cause the fault that its name states."""
    name = case["name"]
    if name == "hang":
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a call of the driver
        time.sleep(3600)
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    cupy = arrays.cupy()
    values = cupy.zeros(32, np.float32)
    if name == "illegal address":  # the state after a faulty kernel
        fault = machine.DeviceFault("a kernel wrote outside its memory", CU.ERROR_ILLEGAL_ADDRESS)
        machine.DEVICES[0].fail(fault)
    threads = 2048 if name == "driver error" else 32
    cupy.RawKernel(_SOURCE, "write")((1,), (threads,), (values,))
    assert cupy.asnumpy(values).sum() == 32
    return {"process": os.getpid()}
