"""Launches of the Hopper kernels: tensor maps, traversals and stores."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from cupyconv import ConvProblem
from cupyconv.gpu import runtime, tensormaps
from cupyconv.kernels import hopper
from cupyconv.kernels.strides import Strides
from cupyconv.launch import TensorMaps, TiledMap
from cupyconv.planning import Device, Request, plan_pass
from tests import emulator
from tests.agreement import fits
from tests.configurations import in_formats
from tests.hopper import ARCH
from tests.launches import prepare


def test_encoded_maps_are_cached_by_address_and_shape():
    made = []

    def encoder(one):
        return lambda address, destination: made.append((one, address))

    one = TiledMap("x", 2, (64, 100), (128,), (64, 64))
    other = replace(one, extents=(64, 50))
    first, second = (
        runtime._Maps(TensorMaps((each, each)), {"x": 0}, SimpleNamespace(encoder=encoder))
        for each in (one, other)
    )
    for maps, address in (
        (first, 4096), (first, 4096), (second, 4096), (first, 8192), (second, 4096),
    ):  # fmt: skip
        assert maps.at((address,)).address % tensormaps.MAP_ALIGNMENT == 0
    assert made == [(one, 4096)] * 2 + [(other, 4096)] * 2 + [(one, 8192)] * 2


LAYER = ConvProblem((2, 64, 16, 32), (72, 64, 3, 3), padding=1, dtype="float16")


@pytest.mark.parametrize(
    ("pass_", "changes", "alignment", "last", "first"),
    [
        ("forward", {}, 16, (hopper.STORE_BOXES, 8), (hopper.STORE_COLUMNS, 8)),
        ("forward", {}, 8, (hopper.STORE_ROWS, 4), (hopper.STORE_COLUMNS, 4)),
        ("forward", {}, 2, (hopper.STORE_ROWS, 1), (hopper.STORE_COLUMNS, 1)),
        ("forward", {"filter_shape": (71, 64, 3, 3)}, 16,
         (hopper.STORE_ROWS, 1), (hopper.STORE_COLUMNS, 8)),
        ("backprop_input", {"stride": 2}, 16, (hopper.STORE_ROWS, 8), (hopper.STORE_COLUMNS, 1)),
        ("backprop_filter", {}, 16, (hopper.STORE_ROWS, 8), (hopper.STORE_ROWS, 1)),
        ("forward", {"dtype": "float32"}, 16, (hopper.STORE_FLOAT, 2), (hopper.STORE_FLOAT, 1)),
    ],
)  # fmt: skip
def test_results_are_stored_in_the_widest_vectors(pass_, changes, alignment, last, first):
    """Store and vector with channels last and with channels first."""
    device = Device.of(ARCH)
    for formats, expected in ((("NHWC", "OHWI"), last), (("NCHW", "OIHW"), first)):
        problem = in_formats(LAYER.replace(**changes), *formats)
        strides = replace(Strides.contiguous(problem), alignment=alignment)
        request = Request(problem, pass_, device, "tf32", strides=strides)
        launches = prepare(plan_pass(request, "cuda-hopper"), problem, strides, device)
        (defines,) = (dict(one.defines) for one in launches if one.entry == "conv_hopper")
        assert (defines["STORE"], defines["RUN"]) == expected, formats


def test_maps_of_phases_without_taps_are_valid():
    """Such a phase has a corner outside the limits of a map; the emulator's encoder checks it."""
    problem, device = ConvProblem(
        (1, 4, 1, 8), (200, 1, 8, 8), stride=(2, 1), dilation=(2, 1), padding=((267, 250), (0, 0)),
        data_format="NHWC", filter_format="HWIO", dtype="float16",
    ), Device.of(ARCH)  # fmt: skip
    passes = fits(problem, "cuda-hopper", device)
    assert "backprop_input" in passes
    for pass_ in passes:
        planned = plan_pass(Request(problem, pass_, device), "cuda-hopper")
        launches = prepare(planned, problem, Strides.contiguous(problem), device)
        (maps,) = (
            argument.maps
            for one in launches
            for argument in one.arguments
            if isinstance(argument, TensorMaps)
        )
        assert all(len(emulator.tensormap.encode(one, 4096)) for one in maps)
