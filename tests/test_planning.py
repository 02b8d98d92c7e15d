"""Plans: pure, printable, replayable, and always within what a family and a chip can do."""

import random
from math import prod

import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, Plan, backends
from cupyconv.gpu import generic, parameters
from cupyconv.gpu.compiler import ARCHITECTURES
from cupyconv.gpu.parameters import Strides, contiguous_strides
from cupyconv.planning import Device, plan
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES

DEVICES = ("cpu", *ARCHITECTURES)


def shared_bytes_allowed(device):
    return {"sm_75": 64, "sm_80": 163, "sm_90a": 227, "sm_100a": 227}.get(device, 99) << 10


def problems(count, seed=0):
    """Random legal problems, some with huge sizes."""
    rng = random.Random(seed)
    while count:
        rank = rng.randint(1, 3)
        groups = rng.choice([1, 1, 2, 3, 32])
        channels, filters = groups * rng.randint(1, 65), groups * rng.randint(1, 65)
        sizes = [rng.choice([1, 7, 14, 33, 224, 100_000]) for _ in range(rank)]
        try:
            yield ConvProblem(
                (rng.choice([0, 1, 32, 1000]), channels, *sizes),
                (filters, channels // groups, *(rng.choice([1, 2, 3, 7]) for _ in range(rank))),
                stride=[rng.randint(1, 3) for _ in range(rank)],
                padding=rng.choice(["same", "valid", 1, 3]),
                dilation=[rng.randint(1, 3) for _ in range(rank)],
                groups=groups,
                dtype=rng.choice(["float16", "bfloat16", "float32", "float64"]),
            )
            count -= 1
        except ConvError:
            continue


def test_every_plan_fits_the_problem_and_the_chip():
    for problem in problems(1500):
        for device in DEVICES:
            planned = plan(problem, device)
            for pass_plan in planned:
                family = pass_plan.family
                assert family.refuses(problem, pass_plan.pass_, planned.device) is None
                assert family.on_gpu == (device != "cpu")
                if pass_plan.tile:
                    gemm = problem.gemm(pass_plan.pass_)
                    tile = pass_plan.tile
                    covered = pass_plan.blocks * tile.block_m * tile.block_n
                    assert covered >= gemm.gemm_m * gemm.gemm_n * gemm.groups
                    assert pass_plan.splits * tile.block_k <= max(gemm.gemm_k, tile.block_k)
                    assert tile.threads <= 1024


def test_a_plan_survives_json():
    for problem in problems(50):
        for device in ("cpu", "sm_80"):
            original = plan(problem, device)
            assert Plan.from_json(original.to_json()) == original


def test_a_plan_prints_its_choices_and_reasons():
    problem = ConvProblem((1, 50, 100, 100), (100, 50, 5, 5))
    text = str(plan(problem, "sm_90a"))
    assert "1x50x100x100 NCHW * 100x50x5x5 OIHW -> 1x100x96x96" in text
    assert "sm_90a" in text
    for pass_ in PASSES:
        assert pass_ in text
    assert "cuda-generic" in text
    assert "implicit GEMM" in text


def test_plans_index_by_pass():
    planned = plan(ConvProblem((1, 1, 4), (1, 1, 3)), "cpu")
    assert [p.pass_ for p in planned] == list(PASSES)
    assert planned["backprop_filter"].pass_ == "backprop_filter"
    with pytest.raises(ConvError, match="backprop_filter"):
        planned["backprop_filtre"]


@pytest.mark.parametrize(
    ("device", "impl", "message"),
    [
        ("sm_70", "auto", "compute capability 7.5"),
        ("tpu", "auto", "'cpu' or an architecture"),
        ("cpu", "cuda-generic", "does not run on cpu"),
        ("sm_80", "numpy", "does not run on sm_80"),
        ("cpu", "nunpy", "Did you mean 'numpy'"),
    ],
)
def test_impossible_plans(device, impl, message):
    with pytest.raises(ConvError, match=message):
        plan(ConvProblem((1, 1, 4), (1, 1, 3)), device, impl)


def test_the_public_plan_needs_no_device():
    planned = cupyconv.plan(ConvProblem((1, 1, 4), (1, 1, 3)))
    assert planned["forward"].implementation in FAMILIES


def test_architectures_of_capabilities():
    found = [
        Device.of_capability("chip", c).architecture for c in [(7, 5), (8, 9), (9, 0), (12, 1)]
    ]
    assert found == ["sm_75", "sm_89", "sm_90a", "sm_121"]


def offsets_reached(problem, strides):
    """The largest offset, in absolute value, that any map of the kernels can form."""
    reach = [axis.padded_input + axis.effective_filter for axis in problem.axes]
    x = [problem.N, problem.C, *reach]
    ordered = [strides.x[axis] for axis in problem.data_axes]
    return sum(n * abs(s) for n, s in zip(x, ordered, strict=True))


def test_32_bit_indices_are_used_only_where_they_hold():
    for problem in problems(500, seed=1):
        shapes = problem.input_shape, problem.filter_shape, problem.output_shape
        strides = Strides(*map(contiguous_strides, shapes))
        index = parameters.index_type(problem, strides)
        if problem.needs_64bit_indexing:
            assert index == "long long"
        if index == "int":
            assert offsets_reached(problem, strides) < 2**31
            assert max(map(prod, shapes)) < 2**31
            for pass_ in PASSES:
                assert max(problem.gemm(pass_)) < 2**31 - 2**15


def test_padding_alone_can_need_64_bits():
    problem = ConvProblem(
        (1, 1, 4, 1000), (1, 1, 3, 3), padding=((3_000_000, 0), (0, 0)), stride=999
    )
    shapes = problem.input_shape, problem.filter_shape, problem.output_shape
    assert not problem.needs_64bit_indexing
    assert parameters.index_type(problem, Strides(*map(contiguous_strides, shapes))) == "long long"


def test_a_small_view_of_a_huge_array_needs_64_bits():
    problem = ConvProblem((2, 3, 4, 4), (1, 3, 3, 3))
    strides = Strides((2**31, 16, 4, 1), (27, 9, 3, 1), (4, 4, 2, 1))
    assert parameters.index_type(problem, strides) == "long long"


def test_an_empty_batch_launches_nothing_but_a_zero_filter_gradient():
    problem = ConvProblem((0, 3, 4, 4), (5, 3, 3, 3))
    strides = Strides((48, 16, 4, 1), (27, 9, 3, 1), (20, 4, 2, 1))
    grids = {
        p.pass_: generic.prepare(p, problem, strides, None, Device.of("sm_80"))[0].grid
        for p in plan(problem, "sm_80", "cuda-generic")
    }
    assert grids["forward"] == (0,)
    assert grids["backprop_input"] == (0,)
    assert grids["backprop_filter"][0] > 0


@pytest.mark.parametrize("device", ARCHITECTURES)
def test_launches_fit_the_chip(device):
    chip = Device.of(device)
    for problem in problems(150, seed=2):
        if problem.bytes > 300e9:
            continue  # no card holds it
        shapes = problem.input_shape, problem.filter_shape, problem.output_shape
        strides = Strides(*map(contiguous_strides, shapes))
        for pass_plan in plan(problem, device):
            prepare = backends.PREPARE[pass_plan.implementation]
            for launched in prepare(pass_plan, problem, strides, None, chip):
                assert launched.shared_bytes <= shared_bytes_allowed(device)
                assert launched.grid[0] < 2**31
                assert all(extent < 2**16 for extent in launched.grid[1:])
                assert launched.block[0] <= 1024


def test_phases_share_out_all_pixels_and_taps():
    for problem in problems(300, seed=3):
        gemm = problem.gemm("backprop_input")
        phases = problem.phase_gemms
        assert len(phases) == prod(problem.stride)
        assert sum(phase.gemm_m for phase in phases) == gemm.gemm_m
        for axis in problem.axes:
            inputs = [h for among, _ in axis.stride_phases for h in among]
            taps = [r for _, among in axis.stride_phases for r in among]
            assert sorted(inputs) == list(range(axis.input))
            assert sorted(taps) == list(range(axis.filter))


def test_a_phase_has_the_taps_that_reach_its_pixels():
    for problem in problems(60, seed=4):
        for axis in problem.axes:
            if axis.input > 300:
                continue
            for inputs, taps in axis.stride_phases:
                for h in inputs:
                    reached = {r for r in range(axis.filter) if h in axis.inputs_of_tap(r)}
                    assert reached <= set(taps)


def test_small_grids_are_split_and_large_ones_are_not():
    small = ConvProblem((32, 64, 56, 56), (64, 64, 3, 3), dtype="float16")
    planned = plan(small, "sm_90a")
    assert planned["backprop_filter"].splits > 1
    assert planned["backprop_filter"].workspace_bytes == planned["backprop_filter"].splits * (
        64 * 64 * 9 * 4
    )
    assert planned["forward"].splits == 1


def test_a_plan_does_not_depend_on_the_card():
    problem = ConvProblem((8, 64, 28, 28), (128, 64, 3, 3), dtype="float16")
    one = plan(problem, Device("small card", "sm_80"))
    other = plan(problem, Device("large card", "sm_80"))
    assert one.passes == other.passes
