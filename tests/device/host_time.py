"""Host time of repeated calls: python -m tests.device -m tests.device.host_time [ROUNDS].

The emulated driver answers the functions of a repeated call in C, and the kernels do not exist, so
that only the time of CuPy and of this library is measured: CPU time of the thread in us per call.
``minimum`` allocates the result and launches a kernel with prepared arguments.  All calls are timed
in turns in one process.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import cupy

import cupyconv
from cupyconv.gpu import compiler
from tests.device import build, programs

CALLS = 200
"""Calls per sample (hand-set)."""

NHWC = {"data_format": "NHWC", "filter_format": "OHWI"}


class _Kernel:
    parameter_sizes = ()
    max_dynamic_shared_size_bytes = 49152
    resources = SimpleNamespace(launch_bounds=1024, registers=32, static_shared=0)


def without_kernels() -> None:
    """Replace compiled kernels, so that nothing is compiled and nothing runs."""
    compiler.compile_cubin = lambda source, *_: (b"cubin" + source.name.encode(), "")
    module = SimpleNamespace(get_function=lambda name: _Kernel())
    programs.read, programs.emulated = (lambda address: b""), (lambda *_: module)


def cases() -> dict[str, Callable[[], object]]:
    """Return the timed calls by name."""
    x, w = cupy.empty((32, 56, 56, 64), "float16"), cupy.empty((64, 3, 3, 64), "float16")
    bias, out = cupy.empty(64, "float16"), cupy.empty((32, 56, 56, 64), "float16")
    x2, dy2 = (cupy.empty((32, 28, 28, 128), "float16") for _ in range(2))
    planar, filters = cupy.empty((8, 64, 56, 56), "float32"), cupy.empty((128, 64, 3, 3), "float32")
    narrow, depthwise = (
        cupy.empty((32, 28, 28, 192), "float16"),
        cupy.empty((192, 3, 3, 1), "float16"),
    )
    layer = {"padding": 1, **NHWC}
    bound = cupyconv.bind("forward", x, w, **layer)
    own = bound.with_filter(w)
    launch = cupy.cuda.driver.launchKernel
    pointers = ctypes.addressof((ctypes.c_void_p * 8)())
    stream, ndarray, shape, dtype = cupy.cuda.get_current_stream, cupy.ndarray, out.shape, out.dtype
    handle = bound._run._free[0].launches[0][0].args[0] if bound.load() else 0

    def minimum() -> None:
        ndarray(shape, dtype)
        launch(handle, 1, 1, 1, 128, 1, 1, 0, stream().ptr, pointers, 0)

    forward, gradient = cupyconv.conv_forward, cupyconv.conv_backprop_filter
    return {
        "minimum": minimum,
        "bound, out": lambda: bound(x, w, out=out),
        "bound": lambda: bound(x, w),
        "bound to its filter": lambda: own(x),
        "forward, cuda-hopper": lambda: forward(x, w, **layer),
        "with bias and relu": lambda: forward(x, w, bias, activation="relu", **layer),
        "with tuples and out": lambda: forward(x, w, out=out, stride=(1, 1), **layer),
        "float32, stride 2": lambda: forward(planar, filters, stride=2),
        "depthwise": lambda: forward(narrow, depthwise, groups=192, **layer),
        "backprop_filter, splits": lambda: gradient(x2, (128, 3, 3, 128), dy2, **layer),
    }


def main(rounds: int) -> None:
    without_kernels()
    cupy.empty(1)  # creates the context
    ctypes.CDLL(str(build.folder() / build.DRIVER)).device_in_c(1)
    timed = cases()
    for call in timed.values():
        for _ in range(3):
            call()
    gc.disable()
    samples: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(rounds):
        for name in (timed, reversed(timed))[turn % 2]:
            call, begun = timed[name], time.thread_time()
            for _ in range(CALLS):
                call()
            samples[name].append((time.thread_time() - begun) / CALLS * 1e6)
    print(f"{'us per call':28} {'best':>6} {'median':>7}")
    for name, values in samples.items():
        print(f"{name:28} {min(values):6.1f} {median(values):7.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
