"""Splits of filter gradients: sums are divided over enough thread blocks to fill a chip."""

from itertools import product
from math import prod

import pytest

from cupyconv.bench import suites
from cupyconv.kernels import cost, gather, streaming
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request
from cupyconv.planning.families import FAMILIES
from tests.configurations import in_formats


def requests(family, architecture, types, precision="tf32", orders=(("NHWC", "OHWI"),)):
    """Yield a request of each layer's filter gradient that the family supports."""
    device = Device.of(architecture)
    for layer, dtype, order in product(suites.listed(), types, orders):
        if layer.problem.spatial_rank == 2:
            problem = in_formats(layer.problem.replace(dtype=dtype), *order)
            strides = Strides.contiguous(problem)
            request = Request(problem, "backprop_filter", device, precision, strides=strides)
            if not family.refuses(request):
                yield request


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float16", "ieee"), ("float32", "ieee"), ("float32", "tf32")]
)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89"])
def test_cuda_gather_splits_fill_the_chip(architecture, dtype, precision):
    """The exceptions are layers with too few steps, and layers that are faster without splits."""
    family, seen = FAMILIES["cuda-gather"], 0
    orders = (("NHWC", "OHWI"), ("NCHW", "OIHW"))
    for request in requests(family, architecture, [dtype], precision, orders):
        steps = request.problem.gemm("backprop_filter").gemm_k
        multiprocessors = request.device.chip.multiprocessors
        ranked = sorted(family.candidates(request), key=lambda one: one.microseconds)
        fills = [
            -(-steps // one.tile.block_k) < (cost.LEAST_SPLIT_STEPS + 1) * max(one.splits, 2)
            or one.blocks * one.splits
            >= gather.FILLED * multiprocessors * one.tile.defines["RESIDENT"]
            for one in ranked
        ]
        first = ranked[0]
        assert any(fills), request
        assert fills[0] or first.splits == 1, request
        if not first.tile.defines["TENSOR_CORES"]:
            assert first.blocks * first.splits >= multiprocessors, request
        seen += fills[0]
    assert seen > 60


@pytest.mark.parametrize("impl", ["cuda-direct", "cuda-toeplitz", "cuda-patch"])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89"])
def test_filter_gradient_chunks_fill_the_chip(architecture, impl):
    """Plans use a block per multiprocessor, or fewer blocks only where that is faster."""
    family, seen = FAMILIES[impl], 0
    for request in requests(family, architecture, ("float16", "float32")):
        geom = family.geometry(request, family.choose(request))
        others, found = prod(geom.others), family.candidates(request)
        least = min(
            request.device.chip.multiprocessors, min(geom.parts, streaming.MOST_CHUNKS) * others
        )
        filling = [one.microseconds for one in found if one.splits * others >= least]
        for one in found:
            fills = one.splits * others >= least
            assert fills or one.microseconds < streaming.IDLE * min(filling), request
            seen += fills
    assert seen > 20
