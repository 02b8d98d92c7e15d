"""Layers of real networks: no pass may be far slower than the layer's other passes."""

from __future__ import annotations

import pytest

from cupyconv import ConvError, ConvProblem
from cupyconv.planning import Device, Request, plan_pass
from tests.fuzz import cliffs

FIRST_LAYERS = {"resnet-stem", "alexnet-stem"}
"""Layers whose columns take 50 times the bytes of dx in float16."""


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", cliffs.LAYERS)
def test_no_pass_is_far_slower_than_the_others(name, dtype, device):
    far = 12 if name in FIRST_LAYERS and dtype == "float16" else cliffs.FAR
    assert list(cliffs.cliffs(cliffs.LAYERS[name].replace(dtype=dtype), device, far)) == []


@pytest.mark.parametrize("device", ["sm_80", "sm_89"])
@pytest.mark.parametrize(
    ("layer", "pass_"),
    [
        (
            ConvProblem((1, 1, 64, 64), (512, 1, 16, 16), dtype="float16"),
            "backprop_input",
        ),
        (ConvProblem((16, 256, 112, 112), (3, 256, 4, 4)), "backprop_filter"),
    ],
    ids=["one channel", "few filters"],
)
def test_gradients_are_not_far_slower_than_forward(layer, pass_, device):
    """The modelled times were up to 26 and 13 times that of the forward pass."""
    slow, forward = (
        plan_pass(Request(layer, one, Device.of(device))) for one in (pass_, "forward")
    )
    assert slow.microseconds < cliffs.FAR * forward.microseconds


@pytest.mark.parametrize(
    ("layer", "pass_"),
    [
        (
            ConvProblem((24, 7, 2172), (52, 7, 357), stride=2, dilation=3, dtype="float16"),
            "backprop_input",
        ),
        (ConvProblem((3, 396, 4659), (21, 396, 303), stride=64, dtype="bfloat16"), "forward"),
        (
            ConvProblem((1, 360, 1), (763, 360, 274), padding=273, dilation=2, dtype="bfloat16"),
            "forward",
        ),
    ],
    ids=["backprop_input", "few filters", "many filters"],
)
def test_filters_too_long_for_cuda_gather_use_columns(layer, pass_):
    """cuda-generic took 12 to 24 times as long."""
    planned = plan_pass(Request(layer, pass_, Device.of("sm_89")))
    assert planned.implementation == "cuda-columns"
    assert planned.microseconds < 2000


def test_slow_passes_are_found():
    """The tool reports a layer whose input gradient has no fast kernel."""
    layer = ConvProblem((4, 64, 96, 96), (64, 64, 6, 6), stride=6, dtype="complex64")
    (found,) = cliffs.cliffs(layer, "sm_80")
    assert (found.pass_, found.implementation) == ("backprop_input", "cuda-generic")


def test_columns_respect_the_workspace_limit():
    layer, device = ConvProblem((1, 3, 64, 64), (8, 3, 4, 4), stride=4), Device.of("sm_80")
    with pytest.raises(ConvError, match="need a workspace of 2099200 bytes, the limit is 0"):
        plan_pass(Request(layer, "forward", device, workspace_limit=0), "cuda-columns")
    assert plan_pass(Request(layer, "forward", device, workspace_limit=0)).workspace_bytes == 0


def test_columns_are_at_most_a_few_times_the_tensors():
    """A large filter with stride 1 would have hundreds of columns per pixel."""
    layer = ConvProblem((1, 16, 316, 56), (32, 16, 14, 16), dtype="float64")
    for device in ("sm_75", "sm_89"):
        planned = plan_pass(Request(layer, "backprop_input", Device.of(device)))
        assert planned.workspace_bytes <= 8 * layer.bytes


def test_huge_layers_are_planned():
    """The columns of these filters would not fit into 64 bits."""
    layer = ConvProblem((1, 1, 2**40, 2**40), (16, 1, 2**31, 2**31))
    assert plan_pass(Request(layer, "forward", Device.of("sm_80"))).implementation == "cuda-generic"
