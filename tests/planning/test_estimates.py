"""cupyconv.planning.estimates: roofline, runner-up, and times with other settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyconv
from cupyconv import ConvProblem
from cupyconv.bench import suites
from cupyconv.kernels.hopper import busiest
from cupyconv.planning import Device, Request
from cupyconv.planning.estimates import estimate, instead, roofline
from cupyconv.problem import PASSES

DENSE = ConvProblem((32, 256, 16, 16), (256, 256, 3, 3))


def least(problem, device, precision="ieee"):
    return roofline(Request(problem, "forward", Device.of(device), precision))


@pytest.mark.parametrize(
    ("dtype", "precision", "device", "teraflops", "bound"),
    [
        ("float16", "ieee", "H100", 989, "tensor cores"),
        ("bfloat16", "ieee", "A100", 312, "tensor cores"),
        ("bfloat16", "ieee", "sm_75", 8.1, "float32 units"),
        ("float32", "ieee", "A100", 19.5, "float32 units"),
        ("float32", "tf32", "A100", 156, "tensor cores"),
        ("float32", "bf16x6", "H100", 989 / 6, "tensor cores"),
        ("float64", "ieee", "A100", 19.5, "tensor cores"),
        ("float64", "ieee", "RTX 3090", 0.57, "float64 units"),
    ],
)
def test_roofline_uses_the_rates_of_data_sheets(dtype, precision, device, teraflops, bound):
    found = least(DENSE.replace(dtype=dtype), device, precision)
    assert found.bound == bound
    assert DENSE.flops / found.microseconds / 1e6 == pytest.approx(teraflops, rel=0.03)


def test_pointwise_layers_of_few_channels_are_bound_by_memory():
    problem = ConvProblem((8, 16, 256, 256), (16, 16, 1, 1))
    found = least(problem, "RTX 4090")
    assert found.bound == "memory"
    assert found.microseconds == pytest.approx(problem.bytes / 1008e3)
    tiny = cupyconv.plan(ConvProblem((1, 2, 8, 8), (2, 2, 3, 3)), "RTX 4090")
    assert estimate(tiny, "forward").bound == "launches"


@pytest.mark.parametrize("device", ["sm_75", "RTX 4090", "H200", "RTX 5090"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_no_plan_is_faster_than_its_roofline(device, dtype):
    for layer in suites.listed()[::5]:
        planned = cupyconv.plan(layer.problem.replace(dtype=dtype), device)
        for pass_ in PASSES:
            found = estimate(planned, pass_)
            assert 0 < found.share <= 1.001, layer.name


@pytest.mark.parametrize("device", ["sm_80", "RTX 4090", "cpu"])
def test_runner_up_is_another_kernel_and_not_faster(device):
    planned = cupyconv.plan(DENSE, device)
    for pass_ in PASSES:
        found = estimate(planned, pass_)
        if device == "cpu" and found.runner_up is None:
            continue  # NumPy has one method for this pass
        assert found.runner_up.kernel != planned[pass_].kernel
        is_slower = found.runner_up.microseconds >= planned[pass_].microseconds
        assert is_slower or found.runner_up.workspace_bytes > DENSE.bytes


def test_other_settings_are_plans_of_the_changed_problem():
    device = Device.of("RTX 4090")
    settings = instead(DENSE, "forward", device)
    assert list(settings) == ["tf32", "bf16x6", "channels last", "float16"]
    assert settings["tf32"] == cupyconv.plan(DENSE, device, precision="tf32")["forward"]
    half = cupyconv.plan(DENSE.replace(dtype="float16"), device)
    assert settings["float16"] == half["forward"]
    last = ConvProblem(
        (32, 16, 16, 256), (256, 3, 3, 256), data_format="NHWC", filter_format="OHWI"
    )
    assert settings["channels last"] == cupyconv.plan(last, device)["forward"]
    assert list(instead(last, "forward", device)) == ["tf32", "bf16x6", "float16"]
    assert list(instead(last.replace(dtype="float16"), "forward", device)) == []
    assert list(instead(DENSE, "forward", Device.of("cpu"))) == ["channels last"]


@given(st.lists(st.tuples(st.integers(0, 25), st.integers(0, 9)), min_size=1), st.integers(1, 9))
def test_the_busiest_multiprocessor_has_the_most_steps(tiles, places):
    steps = sorted((each for count, each in tiles for _ in range(count)), reverse=True)
    totals = [0] * places
    for number, each in enumerate(steps):
        turn, place = divmod(number, places)
        totals[place if turn % 2 == 0 else places - 1 - place] += each
    assert busiest(tiles, places) == max(totals)
