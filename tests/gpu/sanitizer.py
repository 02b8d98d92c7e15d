"""Small layers on every kernel family, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.gpu.sanitizer
    compute-sanitizer --tool racecheck python -m tests.gpu.sanitizer

CuPy's memory pool is switched off, so that an access beyond an array is beyond an allocation.
Results are compared with the reference: a kernel that writes nothing is clean too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cupyconv import arrays
from cupyconv.backends import current_device
from cupyconv.bench.implementations import pass_call
from cupyconv.checking import Operands
from cupyconv.planning import Device
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import ConvProblem
from tests import configurations
from tests.agreement import fits

CASES = (
    "groups",
    "depthwise_multiplier",
    "channels_last",
    "channels_beyond_one_tile",
    "pixels_beyond_one_tile",
    "volume_everything_differs",
    "padding_on_one_side",
    "stride_and_dilation_coprime",
)
"""Curated cases whose tiles are cut off on every side."""

DTYPES = ("float16", "float32")

PRECISION = "bf16x6"
"""All families that integers are exact in, those that split float32 among them."""


def problems() -> Iterator[tuple[str, ConvProblem]]:
    """The cases by name, and a layer of whole 16-byte rows for families that insist on them."""
    for case in configurations.CASES:
        if case.name in CASES:
            yield case.name, case.problem
    aligned = {"data_format": "NHWC", "filter_format": "OHWI", "padding": 1}
    yield "aligned_channels", ConvProblem((1, 6, 5, 72), (40, 3, 3, 72), **aligned)
    depthwise = {**aligned, "groups": 64}
    yield "aligned_depthwise", ConvProblem((1, 6, 5, 64), (64, 3, 3, 1), **depthwise)


def run(
    device: Device, to_device: Callable[[np.ndarray], Any], to_host: Callable[[Any], np.ndarray]
) -> tuple[int, list[str]]:
    """Every pass of every problem by every family of a device that takes it.

    Returns:
        How many were run, and the names of those whose result is wrong.
    """
    count, wrong = 0, []
    families = [name for name, family in FAMILIES.items() if family.on_gpu == device.is_gpu]
    for name, any_problem in problems():
        for dtype in DTYPES:
            problem = any_problem.replace(dtype=dtype)
            made = configurations.integer_data(problem)
            host = Operands(made.x, made.w, made.dy)
            moved = Operands(*(to_device(array) for array in (made.x, made.w, made.dy)))
            for impl in families:
                for pass_ in fits(problem, impl, device, PRECISION):
                    expected = pass_call(problem, pass_, [host], "reference", "ieee")(0)
                    got = pass_call(problem, pass_, [moved], impl, PRECISION)(0)
                    count += 1
                    if not np.array_equal(to_host(got), expected):
                        wrong.append(f"{impl} {pass_} {dtype} {name}")
    return count, wrong


def main() -> int:
    """Run everything on the current GPU; 1 if a result is wrong."""
    cupy = arrays.require_gpu()
    cupy.cuda.set_allocator(None)
    count, wrong = run(current_device(), cupy.asarray, cupy.asnumpy)
    print(f"{count} passes, {len(wrong)} wrong")
    for name in wrong:
        print(f"wrong: {name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
