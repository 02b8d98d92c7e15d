"""Steps "smoke", "memcheck" and "racecheck": small layers on every kernel family.

Results are compared with the reference, so that a kernel that writes nothing fails too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from cupyconv import arrays, backends
from cupyconv.checking import Operands, pass_function
from cupyconv.formats import data_formats, filter_formats
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES, ConvProblem
from tests import configurations
from tests.agreement import fits, require_equal
from tests.configurations import Case, in_formats
from tests.families import FAMILY_LAYERS

NUMBERS = (
    ("float16", "ieee"),
    ("bfloat16", "ieee"),
    ("float32", "ieee"),
    ("float32", "tf32"),
    ("float32", "bf16x6"),
    ("float64", "ieee"),
    ("complex64", "ieee"),
    ("complex128", "ieee"),
)
"""Dtypes and precisions of the smoke test."""

EDGE_NUMBERS = (("float16", "ieee"), ("float32", "bf16x6"))
"""Dtypes and precisions under compute-sanitizer; each family supports at least one."""

EDGES = (
    "groups",
    "depthwise_multiplier",
    "channels_last",
    "channels_beyond_one_tile",
    "pixels_beyond_one_tile",
    "volume_everything_differs",
    "padding_on_one_side",
    "stride_and_dilation_coprime",
)
"""Curated cases with partial tiles on every side."""

_ALIGNED: dict[str, Any] = {"data_format": "NHWC", "filter_format": "OHWI", "padding": 1}
ALIGNED = (
    Case("aligned_channels", ConvProblem((1, 6, 5, 72), (40, 3, 3, 72), **_ALIGNED)),
    Case("aligned_depthwise", ConvProblem((1, 6, 5, 64), (64, 3, 3, 1), groups=64, **_ALIGNED)),
)
"""Layers with whole 16-byte rows, which some families need."""

_REGISTER_MOVERS = "cuda-hopper"  # families whose kernels use setmaxnreg

_edges = False


def cases(words: str = "") -> list[dict[str, Any]]:
    """Return a case per family, pass and dtype; for "edges", all edge cases for the sanitizer."""
    global _edges
    _edges = words == "edges"
    device = backends.current_device()
    families = [name for name, one in FAMILIES.items() if one.on_gpu == device.is_gpu]
    if _edges:
        families.sort(key=lambda name: name.startswith(_REGISTER_MOVERS))
    found = []
    for impl in families:
        for dtype, precision in EDGE_NUMBERS if _edges else NUMBERS:
            left = set(PASSES)  # passes without a layer yet
            for case in _edge_cases() if _edges else _candidates(impl):
                problem = case.problem.replace(dtype=dtype)
                for pass_ in fits(problem, impl, device, precision) if _edges or left else ():
                    if _edges or pass_ in left:
                        left -= {pass_}
                        name = f"{impl} {pass_} {dtype} {precision} {case.name}"
                        found.append(
                            {"name": name, "impl": impl, "pass": pass_, "precision": precision,
                             "problem": described(problem)}
                        )  # fmt: skip
    return found


def _edge_cases() -> Iterator[Case]:
    yield from ALIGNED
    yield from (case for case in configurations.CASES if case.name in EDGES)


def _candidates(impl: str) -> Iterator[Case]:
    """Yield layers that an implementation may support, first its own, in both memory orders."""
    own = FAMILY_LAYERS[impl].edge_cases if impl in FAMILY_LAYERS else ()
    listed = (own, ALIGNED, configurations.FAMILY_CASES, configurations.CASES)
    for case in chain.from_iterable(listed):
        rank = case.problem.spatial_rank
        last = in_formats(case.problem, data_formats(rank)[1], filter_formats(rank)[2])
        for problem in (last, case.problem):
            if problem.N and problem.C > 1:
                yield replace(case, problem=problem)


def described(problem: ConvProblem) -> dict[str, Any]:
    """Return the arguments of a problem in a form that JSON can store."""
    shapes = {"input_shape": problem.input_shape, "filter_shape": problem.filter_shape}
    return {**shapes, **problem.keywords, "dtype": problem.dtype}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Compute a case on the current device and compare every element with the reference.

    Raises:
        AssertionError: an element is wrong.
    """
    on_gpu = bool(arrays.device_count())
    if _edges and on_gpu:
        arrays.cupy().cuda.set_allocator(None)  # a pool would hide accesses beyond an array
    problem = ConvProblem(**case["problem"])
    data = configurations.integer_data(problem)
    host = Operands(data.x, data.w, data.dy)
    there = host
    if on_gpu:
        there = Operands(*map(arrays.cupy().asarray, (host.x, host.w, host.dy)))
    pass_ = case["pass"]
    got = pass_function(problem, pass_, case["impl"], case["precision"])(there)
    expected = pass_function(problem, pass_, "reference")(host)
    require_equal(arrays.cupy().asnumpy(got) if on_gpu else np.asarray(got), expected, str(problem))
    return {}
