"""Host time of a launch in CuPy, the part of a call that is not cupyconv's."""

from __future__ import annotations

import numpy as np

from cupyconv.bench.places import GpuPlace
from cupyconv.bench.timing import host_seconds
from cupyconv.kernels.parameters import parameters_type

_SECONDS = 0.1  # s to spend on measuring
_IDLE_KERNEL = """
struct Parameters { long long fields[%d]; };
extern "C" __global__ void idle(const void*, const void*, void*, const void*, Parameters) {}
"""


def launch_seconds(place: GpuPlace) -> float:
    """Measure the host time for creating an array and launching a kernel, as in every call.

    The launched kernel has the parameters of a convolution kernel and does nothing.
    """
    struct = np.zeros(1, parameters_type())
    kernel = place.xp.RawModule(code=_IDLE_KERNEL % (struct.nbytes // 8)).get_function("idle")
    operand, null = place.xp.empty((1,), "float16"), np.uint64(0)

    def call(_: int) -> None:
        result = place.xp.ndarray((1,), operand.dtype)
        kernel((1,), (1,), (operand, operand, result, null, struct), shared_mem=0)

    return host_seconds(call, 1, place, _SECONDS)
