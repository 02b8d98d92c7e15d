"""Launches of the gather kernels (cuda/conv_gather.cu)."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from cupyconv.gpu import parameters
from cupyconv.gpu.copies import arrange
from cupyconv.gpu.launch import STORAGE, FilterForm, Launch, Part
from cupyconv.planning.copies import ROLES_OF, copy_bytes, shape_of
from cupyconv.planning.cost import ADDING_THREADS
from cupyconv.planning.device import Device
from cupyconv.planning.families.family import accumulator_bytes, copies_async
from cupyconv.planning.families.gather import (
    OPERANDS,
    accesses,
    aligned,
    product_of,
    ring,
    tap_words,
)
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.strides import Strides
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launches of a planned pass: operands arranged, the product, splits added up."""
    tile = pass_plan.tile
    assert tile is not None
    before, operands = _arranged(pass_plan, problem, strides)
    problem, strides = product_of(pass_plan.pass_, pass_plan.method, problem, strides)
    found = accesses(pass_plan.pass_, problem, strides)
    a, b, c = found.a, found.b, found.c
    # So that all sums of them are multiples of a piece, those beyond the tensor too.
    strides = strides.taken(problem)
    index = parameters.index_type(problem, strides)
    phases = _phases(problem, pass_plan)
    split = pass_plan.splits > 1
    defines: dict[str, str | int] = {
        "PASS": PASSES.index(pass_plan.pass_),
        "STORAGE": STORAGE[problem.dtype],
        "INDEX": index,
        **tile.defines,
        "A_ALONG_K": int(a.along_first),
        "A_VECTOR": a.vector,
        "B_ALONG_K": int(b.along_first),
        "B_VECTOR": b.vector,
        "C_ALONG_N": int(c.along_first),
        "C_VECTOR": c.vector,
        "TAPS_FASTEST": int(found.taps_fastest),
        "TAP_WORDS": tap_words(problem),
        "PHASES": len(phases["phase"][0]),
        "SPLIT": int(split),
        "ASYNC_COPY": int(copies_async(device)),
        "ACTIVATION": parameters.ACTIVATION[activation],
    }
    made = ring(tile, found, ITEMSIZE[problem.dtype], device, tap_words(problem), index)
    defines["STAGES"], defines["SHARED_BYTES"] = made.stages, made.shared_bytes
    packed = parameters.pack(problem, strides)
    result = ROLES_OF[pass_plan.pass_][-1]
    product = Launch(
        source="conv_gather.cu",
        entry="conv_gather",
        defines=tuple(defines.items()),
        grid=(pass_plan.blocks, pass_plan.splits),
        block=(tile.threads,),
        shared_bytes=made.shared_bytes,
        arguments=(*operands, "bias", result, "workspace", packed, phases),
    )
    if not split:
        return (*before, product)
    elements = _sums(problem, pass_plan)
    reduction = Launch(
        source="conv_gather.cu",
        entry="conv_gather_reduce",
        defines=product.defines,
        grid=(-(-elements // (ADDING_THREADS * c.vector)),),
        block=(ADDING_THREADS,),
        shared_bytes=0,
        arguments=("workspace", "bias", result, np.int32(pass_plan.splits), packed, phases),
    )
    return (*before, product, reduction)


def filter_form(pass_plan: PassPlan, problem: ConvProblem, strides: Strides) -> FilterForm | None:
    """The copy of w that a planned pass begins with; None where it has none."""
    seen, steps = product_of(pass_plan.pass_, pass_plan.method, problem, strides)
    if "w" not in steps.copied:
        return None
    size = copy_bytes(seen.filter_shape, ITEMSIZE[seen.dtype])
    return FilterForm(seen.filter_format, size, arrange(problem, seen, strides, [("w", 0)]))


def _arranged(
    pass_plan: PassPlan, problem: ConvProblem, strides: Strides
) -> tuple[tuple[Launch, ...], list[str | Part]]:
    """The launch that copies operands behind the splits' sums, if any is; and where A and B are."""
    seen, steps = product_of(pass_plan.pass_, pass_plan.method, problem, strides)
    offset = 0
    if pass_plan.splits > 1:
        size = _sums(problem, pass_plan) * accumulator_bytes(problem)
        offset = aligned(pass_plan.splits * size)
    operands: list[str | Part] = []
    made: list[tuple[str, int]] = []
    for role in OPERANDS[pass_plan.pass_]:
        is_there = (role == "w" and strides.w_arranged) or 0 in shape_of(seen, role)
        if role not in steps.copied or is_there:
            operands.append(role)
            continue
        operands.append(Part("workspace", offset))
        made.append((role, offset))
        offset += copy_bytes(shape_of(seen, role), ITEMSIZE[problem.dtype])
    return ((arrange(problem, seen, strides, made),) if made else ()), operands


def _sums(problem: ConvProblem, pass_plan: PassPlan) -> int:
    """Of a split."""
    gemm = problem.gemm(pass_plan.pass_)
    return gemm.gemm_m * gemm.gemm_n * gemm.groups


# -- stride phases ---------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def phases_type(count: int) -> np.dtype:
    """``StridePhases`` of cuda/include/gather.cuh for NumPy."""
    axes = (np.int32, parameters.SPATIAL)
    names = ("first_pixel", "pixels", "first_tap", "taps", "shift")
    phase = np.dtype([*((name, *axes) for name in names), ("end", np.int32)])
    return np.dtype([("step", *axes), ("spacing", *axes), ("phase", phase, count)])


def _phases(problem: ConvProblem, pass_plan: PassPlan) -> np.ndarray:
    """The stride phases of backprop-input, those of most taps first, and where their tiles end.

    There is room for a power of two of them; a pass without phases is one.
    """
    tile = pass_plan.tile
    assert tile is not None
    if pass_plan.pass_ != "backprop_input":
        record = np.zeros(1, phases_type(1))
        record["phase"]["end"] = pass_plan.blocks // problem.groups
        return record
    listed = list(product(*(axis.stride_phases for axis in problem.axes)))
    listed.sort(key=lambda phase: -prod(len(taps) for _, taps in phase))
    record = np.zeros(1, phases_type(1 << (len(listed) - 1).bit_length()))
    fields, missing, end = record[0], parameters.SPATIAL - len(problem.axes), 0
    fields["step"] = fields["spacing"] = 1
    for phase, axes in zip(fields["phase"], listed, strict=False):
        phase["pixels"] = phase["taps"] = 1
        for number, (axis, (inputs, taps)) in enumerate(zip(problem.axes, axes, strict=True)):
            at = missing + number
            phase["first_pixel"][at], phase["pixels"][at] = inputs.start, len(inputs)
            phase["first_tap"][at], phase["taps"][at] = taps.start, len(taps)
            first, spacing = axis.outputs_of_phase(inputs, taps)
            phase["shift"][at] = first + (len(taps) - 1) * spacing  # is not read without taps
            fields["step"][at], fields["spacing"][at] = taps.step, spacing
        pixels = problem.N * int(prod(phase["pixels"].tolist()))
        end += tile.blocks(pixels, problem.C // problem.groups)
        phase["end"] = end
    fields["phase"]["end"][len(listed) :] = end
    return record
