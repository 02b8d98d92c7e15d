"""Plans: deterministic, printable and replayable choices that the family and the chip support."""

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, Plan
from cupyconv.bench import suites
from cupyconv.gpu.compiler import ARCHITECTURES
from cupyconv.kernels import calibration, cost, direct, gather, parameters, patch, toeplitz
from cupyconv.kernels.family import Tile
from cupyconv.kernels.streaming import MOST_CHUNKS, chunk_counts
from cupyconv.kernels.strides import Strides
from cupyconv.planning import PRECISIONS, Device, Request, plan, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import ranked_candidates
from cupyconv.problem import ITEMSIZE, PASSES
from tests import agreement, emulator, launches, measures
from tests.configurations import DIRECT_CASES, PATCH_CASES, in_formats, integer_data
from tests.launches import prepare

CHIPS = tuple(map(Device.of, ARCHITECTURES))


def shared_bytes_allowed(device):
    """Return the shared memory per block in bytes, without the driver's kilobyte."""
    return {"sm_75": 64, "sm_80": 163, "sm_90a": 227, "sm_100a": 227}.get(device, 99) << 10


def channels_of_a_group(rng):
    """Return odd counts, and counts that fill whole vectors, cache lines or tiles."""
    return rng.choice([rng.randint(1, 65), rng.randint(1, 4), 8 * rng.randint(1, 24), 64, 256])


def problems(count, seed=0):
    """Yield random valid problems, some with huge sizes."""
    rng = random.Random(seed)
    while count:
        rank = rng.randint(1, 3)
        groups = rng.choice([1, 1, 2, 3, 32])
        channels, filters = groups * channels_of_a_group(rng), groups * channels_of_a_group(rng)
        depthwise = rng.random() < 0.1
        if depthwise:
            groups, filters = channels, channels * rng.randint(1, 2)
        sizes = [rng.choice([1, 7, 14, 33, 224, 100_000]) for _ in range(rank)]
        last = rng.random() < 0.5
        taps = [rng.choice([1, 1, 2, 3, 7]) for _ in range(rank)]
        shape = (*sizes, channels) if last else (channels, *sizes)
        w_shape = (*taps, channels // groups) if last else (channels // groups, *taps)
        try:
            yield ConvProblem(
                (rng.choice([0, 1, 32, 1000]), *shape),
                (filters, *w_shape),
                stride=[rng.choice([1, 1, 2, 3]) for _ in range(rank)],
                padding=rng.choice(["same", "valid", 1, 3]),
                dilation=[rng.choice([1, 1, 2, 3]) for _ in range(rank)],
                groups=groups,
                data_format="channels_last" if last else None,
                filter_format={1: "OWI", 2: "OHWI", 3: "ODHWI"}[rank] if last else None,
                dtype=rng.choice(["float16", "bfloat16", "float32", "float64"]),
            )
            count -= 1
        except ConvError:
            continue


@pytest.mark.parametrize("multiprocessors", [1, 40, 132, 170])
def test_chunks_are_nearly_equal_and_not_empty(multiprocessors):
    for parts, others in product((0, 1, 2, 7, 64, 131, 257, 300, 10**6), (1, 2, 9, 400)):
        found = chunk_counts(parts, others, multiprocessors)
        assert found == sorted(set(found))
        for chunks in found:
            assert 1 <= chunks <= max(min(parts, MOST_CHUNKS), 1)
            each = -(-parts // chunks)
            assert chunks == (-(-parts // each) if parts else 1)
        enough = min(-(-multiprocessors // others), MOST_CHUNKS)
        if parts >= enough and parts // -(-parts // enough) >= enough:
            assert found[-1] >= enough


@pytest.mark.parametrize("arch", ["sm_75", "sm_89"])
@pytest.mark.parametrize("impl", ["cuda-direct", "cuda-toeplitz", "cuda-patch"])
def test_workspace_limit_makes_no_filter_gradient_cheaper(impl, arch):
    """A lower workspace limit never lowers the estimate, since the unlimited choice is optimal."""
    family, seen = FAMILIES[impl], 0
    for channels, size, batch, stride in product((16, 256), (7, 56), (1, 32), (1, 2)):
        for groups, few in ((channels, channels), (channels // 4, channels), (1, 3)):
            problem = ConvProblem(
                (batch, few, size, size), (channels, few // groups, 3, 3), stride=stride,
                padding=1, groups=groups, dtype="float16",
            )  # fmt: skip
            request = Request(problem, "backprop_filter", Device.of(arch))
            if family.refuses(request):
                continue
            free = min(family.candidates(request), key=lambda one: one.microseconds)
            for share in (0.75, 0.5, 0.25):
                limited = replace(request, workspace_limit=int(free.workspace_bytes * share))
                if family.refuses(limited) is None:
                    found = min(one.microseconds for one in family.candidates(limited))
                    assert found >= 0.9 * free.microseconds, problem
                    seen += 1
    assert seen


@pytest.mark.parametrize(("arch", "stages"), [("sm_80", 4), ("sm_86", 3), ("sm_89", 3)])
def test_largest_tile_has_as_many_stages_as_fit(arch, stages):
    problem = ConvProblem(
        (32, 28, 28, 256), (256, 3, 3, 256), data_format="NHWC", filter_format="OHWI",
        padding="same", dtype="float16",
    )  # fmt: skip
    request, family = Request(problem, "forward", Device.of(arch)), FAMILIES["cuda-gather"]
    largest = max(family.fitting_tiles(request), key=lambda tile: tile.block_m * tile.block_n)
    assert (largest.block_m, largest.block_n) == (128, 256)
    found = gather.accesses("forward", problem, request.memory)
    assert gather.pipeline(largest, found, request.device, 1).stages == stages


def require_fits_the_chip(planned, problem, device, strides):
    """Require every launch of a planned pass to be within the chip's limits."""
    limit = shared_bytes_allowed(device.architecture)
    for launched in launches.prepare(planned, problem, strides, device):
        assert launched.shared_bytes <= limit
        assert launched.grid[0] < 2**31
        assert all(extent < 2**16 for extent in launched.grid[1:])
        assert 0 < prod(launched.block) <= 1024


@pytest.mark.thorough
@pytest.mark.parametrize("chips", [2, pytest.param(len(CHIPS), marks=pytest.mark.slow)])
def test_plans_fit_the_problem_and_the_chip(chips):
    """10,000 problems are planned, with every precision and several workspace limits.

    Each problem is planned for two of the chips in turn; in the slow case, for all chips.
    """
    picked = {device: Counter() for device in CHIPS}
    for number, problem in enumerate(problems(10_000)):
        precision = PRECISIONS[number // 3 % 3]
        limit = (None, None, 0, 1 << 20)[number % 4]
        alignment = (16, 16, ITEMSIZE[problem.dtype])[number % 3]
        strides = replace(Strides.contiguous(problem), alignment=alignment)
        for turn in range(chips):
            device = CHIPS[(number + turn * 3) % len(CHIPS)]
            for pass_ in PASSES:
                request = Request(problem, pass_, device, precision, limit, strides)
                planned = plan_pass(Request(problem, pass_, device, precision, limit, strides))
                assert planned.family.on_gpu
                assert planned.family.refuses(request.reduced) is None
                assert request.affords(planned.workspace_bytes)
                picked[device][planned.implementation, pass_] += 1
                if number % 25 == 0 and problem.bytes < 300e9:  # fits a GPU's memory
                    require_fits_the_chip(planned, problem, device, strides)
    for device in CHIPS:
        expected = {"cuda-generic", "cuda-gather", "cuda-direct"}
        if device.capability == (9, 0):
            expected.add("cuda-hopper")
        for pass_ in PASSES:
            for name in expected:
                assert picked[device][name, pass_] >= 20, (name, pass_, device)
            has_patch = picked[device]["cuda-patch", pass_] > 0  # few problems suit cuda-patch
            assert has_patch == (pass_ != "backprop_input")


def test_plan_survives_json():
    copied = 0
    for number, problem in enumerate(problems(100)):
        for device in ("cpu", "sm_80", "sm_90a"):
            original = plan(problem, device, precision=PRECISIONS[number // 3 % 3])
            assert Plan.from_json(original.to_json()) == original
            copied += any(one.copies for one in original)
    assert copied


SPLIT = ConvProblem(
    (32, 56, 56, 64), (64, 3, 3, 64), data_format="NHWC", filter_format="OHWI", dtype="float16"
)
"""Layer whose filter gradient has several splits on every chip."""


def changed(**changes):
    """Return a plan's JSON with changes to its filter gradient, its problem or its other fields."""
    fields = json.loads(plan(SPLIT, "sm_80", "cuda-gather").to_json())
    for name, value in changes.items():
        place = fields if name in fields else fields["passes"][2]
        place = fields["problem"] if name in fields["problem"] else place
        place[name] = value
    return json.dumps(fields)


@pytest.mark.quick
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"problem": 3}',
        changed(problem={}),
        changed(device={"name": "sm_80", "architecture": "sm_8x"}),
        changed(device={"name": "sm_80", "architecture": 80}),
        changed(device={"name": "cpu", "architecture": None}),
        changed(passes=[]),
        changed(passes=[{}, {}, {}]),
        changed(pass_="forward"),
        changed(implementation="cuda-gathers"),
        changed(implementation="numpy"),
        changed(implementation="cuda-direct"),
        changed(dtype="float32"),
        changed(dtype="float12"),
        changed(stride=0),
        changed(blocks=1),
        changed(blocks="9"),
        changed(splits=0),
        changed(splits=3),
        changed(splits=2.5),
        changed(splits="3"),
        changed(splits=1000),
        changed(copies=("x",)),
        changed(copies=("y", "y")),
        changed(copies=("w",)),
        changed(copies=3),
        changed(copies=None),
        changed(workspace_bytes=0),
        changed(tile=None),
        changed(tile=[64, 64, 32]),
        changed(precision="tf23"),
        changed(colour="red"),
    ],
)
def test_from_json_rejects_invalid_plans(text):
    with pytest.raises(ConvError):
        Plan.from_json(text)


def test_from_json_rejects_tiles_that_the_family_lacks():
    fields = json.loads(changed())
    fields["passes"][2]["tile"]["block_m"] *= 2
    with pytest.raises(ConvError, match="does not compute backprop_filter with these choices"):
        Plan.from_json(json.dumps(fields))


def test_from_json_accepts_another_number_of_splits():
    """Plans of older versions still run, although the planner now chooses other splits."""
    entry = plan(SPLIT, "sm_80", "cuda-gather")["backprop_filter"]
    of_one = entry.workspace_bytes // entry.splits
    assert entry.splits > 5
    again = Plan.from_json(changed(splits=5, workspace_bytes=5 * of_one))
    assert again["backprop_filter"].splits == 5


def test_plan_is_replayed_only_for_its_problem_and_device():
    planned = plan(SPLIT, "sm_80", "cuda-gather")
    request = Request(SPLIT, "backprop_filter", Device("A card", "sm_80"))
    assert planned.replay(request) is planned["backprop_filter"]
    same = SPLIT.replace(padding="valid")
    assert planned.replay(replace(request, problem=same)) is planned["backprop_filter"]
    for change, message in (
        ({"problem": SPLIT.replace(stride=2)}, "stride=2"),
        ({"device": Device("Other card", "sm_86")}, r"Other card \(sm_86\)"),
        ({"device": Device.of("cpu")}, r"on cpu \(NumPy arrays\)"),
        ({"workspace_limit": 1000}, "the limit is 1000"),
    ):
        with pytest.raises(ConvError, match=message):
            planned.replay(replace(request, **change))


@pytest.mark.parametrize(
    ("precision", "impl", "device"),
    [("tf32", "auto", "sm_80"), ("bf16x6", "cuda-hopper-bf16x6", "sm_90a")],
)
def test_plan_is_replayed_only_if_its_precision_is_permitted(precision, impl, device):
    problem = SPLIT.replace(dtype="float32")
    planned = Plan.from_json(plan(problem, device, impl, precision).to_json())
    request = Request(problem, "forward", Device.of(device))
    assert planned.replay(replace(request, precision=precision))
    for other in {"ieee", "tf32"} - {precision}:
        with pytest.raises(ConvError, match=f"Pass precision='{precision}'"):
            planned.replay(replace(request, precision=other))
    assert plan(problem, device).replay(replace(request, precision=precision))
    unsaid = planned.to_json().replace(f'"precision": "{precision}"', '"precision": "ieee"')
    with pytest.raises(ConvError, match=f"only precision='{precision}' permits|these choices"):
        Plan.from_json(unsaid)


def test_plan_is_not_replayed_on_other_strides():
    problem = ConvProblem(
        (8, 28, 28, 64), (64, 3, 3, 64), data_format="NHWC", filter_format="OHWI", dtype="float16"
    )
    planned = plan(problem, "sm_90a", "cuda-hopper")
    strides = replace(Strides.contiguous(problem), alignment=2)
    request = Request(problem, "forward", Device.of("sm_90a"), strides=strides)
    with pytest.raises(ConvError, match="other strides or another alignment"):
        planned.replay(request)


# -- workspace -------------------------------------------------------------------------------------


def test_workspace_limit_reduces_splits():
    free = plan(SPLIT, "sm_80")["backprop_filter"]
    of_one = free.workspace_bytes // free.splits
    for limit in (0, of_one - 1, 2 * of_one, 5 * of_one + 1, free.workspace_bytes):
        limited = plan(SPLIT, "sm_80", workspace_limit=limit)["backprop_filter"]
        affordable = limit // of_one
        assert limited.splits == (affordable if affordable > 1 else 1)
        assert limited.workspace_bytes == (limited.splits * of_one if limited.splits > 1 else 0)
    assert limited == free


def test_plan_reports_the_effect_of_a_workspace_limit():
    limited = plan(SPLIT, "sm_80", workspace_limit=0)
    reason = limited["backprop_filter"].reason
    assert "bytes of workspace, but the limit is 0" in reason
    assert reason in str(limited)
    assert "limit" not in limited["forward"].reason


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_workspace_is_larger_than_the_tensors_only_to_save_time(dtype, arch):
    seen = Counter()
    for layer, pass_ in product(suites.listed()[::3], PASSES):
        problem = layer.problem.replace(dtype=dtype)
        first, *others = ranked_candidates(Request(problem, pass_, Device.of(arch)), "auto")
        fastest = min((first, *others), key=lambda one: one.microseconds)
        small = [one for one in others if one.workspace_bytes <= problem.bytes]
        if first.workspace_bytes > problem.bytes:
            assert all(one.microseconds > 1.3 * first.microseconds for one in small)
        if first is not fastest:
            assert first.workspace_bytes <= problem.bytes < fastest.workspace_bytes
            assert first.microseconds <= 1.3 * fastest.microseconds
            reason = plan_pass(Request(problem, pass_, Device.of(arch))).reason
            assert f"{fastest.workspace_bytes} bytes of workspace, more than the tensors" in reason
        seen[first is fastest] += 1
    assert min(seen[True], seen[False]) > 0


def test_direct_filter_gradient_needs_workspace_for_one_chunk():
    depthwise = ConvProblem((8, 64, 56, 56), (64, 1, 3, 3), groups=64)
    chunk = 64 * 9 * 4
    limited = plan(depthwise, "sm_80", workspace_limit=2 * chunk)["backprop_filter"]
    assert (limited.implementation, limited.splits) == ("cuda-direct", 2)
    none = plan(depthwise, "sm_80", workspace_limit=0)
    assert none["forward"].implementation == "cuda-direct"
    assert none["backprop_filter"].implementation == "cuda-gather"
    with pytest.raises(ConvError, match=f"at least {chunk} bytes, the limit is {chunk - 1}"):
        plan(depthwise, "sm_80", "cuda-direct", workspace_limit=chunk - 1)


def test_public_plan_respects_the_workspace_limit(monkeypatch):
    monkeypatch.setattr(cupyconv, "workspace_limit", 0)
    assert cupyconv.plan(SPLIT, "sm_80")["backprop_filter"].workspace_bytes == 0
    assert cupyconv.plan(SPLIT, "sm_80", workspace_limit=1 << 30) == plan(
        SPLIT, "sm_80", workspace_limit=1 << 30
    )


# -- execution -------------------------------------------------------------------------------------

SMALL = ConvProblem((2, 8, 9, 7), (8, 8, 3, 3), padding=1, dtype="float16")


def test_functions_take_a_plan_as_impl():
    data = integer_data(SMALL)
    planned = Plan.from_json(plan(SMALL, "cpu", "reference").to_json())
    for pass_ in PASSES:
        got = agreement.compute(cupyconv, pass_, SMALL, data, impl=planned)
        assert (got == agreement.compute(cupyconv, pass_, SMALL, data, impl="numpy")).all()
    grads = cupyconv.conv_backward(data.x, data.w, data.dy, impl=planned, **SMALL.keywords)
    assert (grads.dw == got).all()
    transposed = cupyconv.conv_transpose(
        data.dy, data.w, output_shape=SMALL.input_shape, impl=planned, **SMALL.keywords
    )
    assert (transposed == grads.dx).all()


def test_plans_of_other_layers_are_rejected_before_writing():
    data = integer_data(SMALL)
    out = np.full(SMALL.output_shape, 7, SMALL.dtype)
    for planned, message in (
        (plan(SMALL.replace(stride=2), "cpu"), "stride=2"),
        (plan(SMALL, "sm_80"), "the plan is for sm_80, the arrays are on cpu"),
    ):
        with pytest.raises(ConvError, match=message):
            cupyconv.conv_forward(data.x, data.w, impl=planned, out=out, **SMALL.keywords)
    assert (out == 7).all()


@pytest.mark.costly
@pytest.mark.parametrize("splits", [1, 3, 9])
def test_kernels_follow_a_plan_from_json(splits):
    """Every pass of the plan has a number of splits that the planner would not choose."""
    fields = json.loads(plan(SMALL, "sm_80", "cuda-gather").to_json())
    for entry in fields["passes"]:
        gemm = SMALL.gemm(entry["pass_"])
        entry["splits"], entry["copies"] = splits, ()
        entry["workspace_bytes"] = 4 * splits * gemm.gemm_m * gemm.gemm_n if splits > 1 else 0
    planned = Plan.from_json(json.dumps(fields))
    launched = []
    with emulator.settings(on_outcome=launched.append):
        agreement.require_exact(emulator, SMALL, arch="sm_80", impl=planned)
    assert len(launched) == len(PASSES) * (2 if splits > 1 else 1)  # the kernel and its reduction


def test_kernels_respect_the_workspace_limit(monkeypatch):
    asked = []
    for owner, name in (("EmulatorBackend", "empty"), ("EmulatorRuntime", "scratch")):
        kind = getattr(emulator.convolutions, owner)
        made = getattr(kind, name)

        def watched(self, size, *dtype, make=made):
            asked.append(size)
            return make(self, size, *dtype)

        monkeypatch.setattr(kind, name, watched)
    depthwise = ConvProblem((2, 8, 9, 7), (8, 1, 3, 3), groups=8, padding=1)
    agreement.require_exact(emulator, depthwise, arch="sm_80", passes=("backprop_filter",))
    assert asked == [depthwise.filter_shape, 4 * 8 * 9]
    asked.clear()
    monkeypatch.setattr(cupyconv, "workspace_limit", 0)
    agreement.require_exact(emulator, depthwise, arch="sm_80", passes=("backprop_filter",))
    assert asked == [depthwise.filter_shape]


# -- texts -----------------------------------------------------------------------------------------


def test_plan_prints_its_choices_and_reasons():
    problem = ConvProblem((1, 50, 100, 100), (100, 50, 5, 5))
    text = str(plan(problem, "sm_90a"))
    assert "1x50x100x100 NCHW * 100x50x5x5 OIHW -> 1x100x96x96" in text
    assert "sm_90a" in text
    for pass_ in PASSES:
        assert pass_ in text
    assert "cuda-gather" in text
    assert "implicit GEMM" in text


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (2, "Times are measured if the reason says so, else modelled."),
        (3, "Times are measured, on a GPU like this one."),
    ],
)
def test_plan_reports_which_times_are_measured(measured, says):
    planned = plan(ConvProblem((8, 64, 14, 14), (64, 64, 3, 3)), "sm_80")
    first = [replace(one, reason="measured 9 us") for one in planned.passes[:measured]]
    planned = replace(planned, passes=(*first, *planned.passes[measured:]))
    assert str(planned).endswith(f"\n\n{says}")
    assert f"<p>{says}</p>" in planned._repr_html_()


@pytest.mark.parametrize(
    ("device", "stands_in"), [("sm_86", None), ("sm_87", "8.6"), ("sm_110", "10.0"), ("cpu", None)]
)
def test_plan_reports_the_chip_that_its_times_are_modelled_on(device, stands_in):
    planned = plan(ConvProblem((8, 64, 14, 14), (64, 64, 3, 3)), device)
    told = f", for the chip of compute capability {stands_in}" if stands_in else ""
    assert f"\n\nEstimates are modelled{told}; " in str(planned)


def test_plans_index_by_pass():
    planned = plan(ConvProblem((1, 1, 4), (1, 1, 3)), "cpu")
    assert [p.pass_ for p in planned] == list(PASSES)
    assert planned["backprop_filter"].pass_ == "backprop_filter"
    with pytest.raises(ConvError, match="backprop_filter"):
        planned["backprop_filtre"]


def test_public_plan_needs_no_device():
    planned = cupyconv.plan(ConvProblem((1, 1, 4), (1, 1, 3)))
    assert planned["forward"].implementation in FAMILIES


def test_compute_capabilities_have_architectures():
    found = [
        Device.of_capability("chip", c).architecture for c in [(7, 5), (8, 9), (9, 0), (12, 1)]
    ]
    assert found == ["sm_75", "sm_89", "sm_90a", "sm_121"]


def test_padding_alone_can_need_64_bits():
    problem = ConvProblem(
        (1, 1, 4, 1000), (1, 1, 3, 3), padding=((3_000_000, 0), (0, 0)), stride=999
    )
    assert not problem.needs_64bit_indexing
    assert parameters.index_type(problem, Strides.contiguous(problem)) == "long long"


NO_STEPS = Strides((0,) * 4, (0,) * 4, (0,) * 4, 0)
"""Strides of tensors that broadcast a single element."""


@pytest.mark.quick
@pytest.mark.parametrize(("role", "small"), [("x", 1 << 26), ("w", 1 << 28), ("y", 1 << 26)])
@pytest.mark.parametrize("formats", [("NCHW", "OIHW"), ("NHWC", "HWIO")], ids="-".join)
@pytest.mark.parametrize(
    ("filter_sizes", "rules"),
    [((2, 3), {"padding": 1}), ((3, 5), {}), ((1, 2), {"stride": 19})],
    ids=["padded", "as large as the input", "strided"],
)
def test_indices_take_64_bits_for_large_offsets(filter_sizes, rules, formats, role, small):
    """The offset of the last element along each axis decides, for strides of either sign."""
    problem = ConvProblem((2, 4, 3, 5), (6, 2, *filter_sizes), groups=2, **rules)
    problem = in_formats(problem, *formats)
    shapes = {"x": problem.input_shape, "w": problem.filter_shape, "y": problem.output_shape}
    for axis, extent in enumerate(shapes[role]):
        large = 2**31 // max(extent - 1, 1) + 1
        for step, wanted in ((small, "int"), (large, "long long")):
            for sign in (1, -1):
                steps = [0] * 4
                steps[axis] = sign * step
                strides = replace(NO_STEPS, **{role: tuple(steps)})
                assert parameters.index_type(problem, strides) == wanted


@pytest.mark.quick
@pytest.mark.parametrize(
    ("x_shape", "w_shape", "rules"),
    [
        ((2**31, 1, 1, 1), (1, 1, 1, 1), {}),
        ((2**16, 1, 2**9, 2**7), (1, 1, 1, 1), {}),
        ((1, 2**31, 1, 1), (1, 2**31, 1, 1), {}),
        ((1, 2**23, 16, 16), (1, 2**23, 16, 16), {}),
        ((1, 1, 1, 1), (2**31, 1, 1, 1), {}),
        ((1, 1, 3, 1), (1, 1, 2, 1), {"padding": ((2**31, 0), (0, 0)), "stride": (2**30, 1)}),
        ((1, 1, 3, 1), (1, 1, 2, 1), {"padding": (2**31, 0), "dilation": (2**31, 1)}),
        ((1, 1, 1, 3), (1, 1, 1, 2), {"padding": (0, 2**31), "dilation": (1, 2**31)}),
    ],
)
def test_indices_take_64_bits_for_many_pixels_or_taps(x_shape, w_shape, rules):
    """Counts and coordinates above 2^31 need 64 bits, even if all elements share one address."""
    problem = ConvProblem(x_shape, w_shape, **rules)
    assert parameters.index_type(problem, NO_STEPS) == "long long"


def test_index_type_considers_the_bias():
    problem = ConvProblem((1, 4, 1, 1), (6, 4, 1, 1))
    for step, wanted in ((1 << 28, "int"), (2**31 // 5 + 1, "long long"), (-(2**31), "long long")):
        assert parameters.index_type(problem, replace(NO_STEPS, bias=step)) == wanted


@pytest.mark.parametrize("filter_format", ["OHWI", "HWIO"])
def test_gather_vectors_of_filters_ignore_other_strides(filter_format):
    problem = ConvProblem(
        (1, 8, 8, 16),
        {"OHWI": (24, 3, 3, 16), "HWIO": (3, 3, 16, 24)}[filter_format],
        data_format="NHWC",
        filter_format=filter_format,
        dtype="float16",
    )
    contiguous = Strides.contiguous(problem)
    for factors in product((1, -1, 0), repeat=3):
        w = (*(s * factor for s, factor in zip(contiguous.w, factors, strict=False)), 1)
        for pass_ in PASSES[:2]:
            expected = gather.accesses(pass_, problem, contiguous)
            assert gather.accesses(pass_, problem, replace(contiguous, w=w)) == expected
            assert expected.b.vector == 8


def test_gather_vectors_of_one_tap_filters_in_every_order():
    """Axes of one element have a stride of 1 in NCHW, but they do not limit the vectors."""
    problem = ConvProblem((2, 16, 7, 5), (24, 16, 1, 1), dtype="float16")
    for pass_ in PASSES[:2]:
        assert gather.accesses(pass_, problem, Strides.contiguous(problem)).b.vector == 8
    pixel = problem.replace(input_shape=(2, 16, 1, 1))
    for pass_ in PASSES:
        found = gather.accesses(pass_, pixel, Strides.contiguous(pixel))
        assert (found.a.vector, found.b.vector, found.c.vector) == (8, 8, 8)


def test_empty_batch_launches_only_a_zero_filter_gradient():
    problem = ConvProblem((0, 3, 4, 4), (5, 3, 3, 3))
    strides = Strides((48, 16, 4, 1), (27, 9, 3, 1), (20, 4, 2, 1))
    grids = {
        p.pass_: prepare(p, problem, strides, Device.of("sm_80"))[0].grid
        for p in plan(problem, "sm_80", "cuda-generic")
    }
    assert grids["forward"] == (0,)
    assert grids["backprop_input"] == (0,)
    assert grids["backprop_filter"][0] > 0


def test_stride_phases_partition_all_pixels_and_taps():
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


def test_plan_does_not_depend_on_the_card():
    problem = ConvProblem((8, 64, 28, 28), (128, 64, 3, 3), dtype="float16")
    one = plan(problem, Device("small card", "sm_80"))
    other = plan(problem, Device("large card", "sm_80"))
    assert one.passes == other.passes


@pytest.mark.quick
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("dilation", [1, 6, 16, 128, 512, 2**20])
def test_cuda_direct_tiles_need_most_rows_of_their_loop(pass_, dilation):
    """A tile needs at least half of the rows that its loop steps through."""
    problem = ConvProblem(
        (16, 64, 4096, 1), (64, 1, 3, 1), groups=64, dilation=(dilation, 1),
        padding=((dilation, dilation), (0, 0)),
    )  # fmt: skip
    request = Request(problem, pass_, Device.of("sm_80"))
    rows = direct.geometry(request, direct.ranked_tilings(request)[0]).down
    assert rows.met <= rows.passed <= 2 * rows.met


DENSE = ConvProblem(
    (32, 56, 56, 64), (64, 3, 3, 64), data_format="NHWC", filter_format="OHWI", padding=1,
    dtype="float16",
)  # fmt: skip


def test_cold_plan_enters_few_functions_and_checks_no_problem():
    """A new process has empty caches.  The passes entered 5,200 to 7,000 functions."""
    for functions, problems in measures.in_new_processes(measures.planned, PASSES):
        assert functions < 2500
        assert problems == 0


# -- plans determine their launches ----------------------------------------------------------------

TILED_PROBLEMS = (
    *(case.problem for case in DIRECT_CASES[::3]),
    *(case.problem.replace(dtype="float16") for case in PATCH_CASES[::3]),
    ConvProblem((8, 96, 56, 56), (96, 1, 7, 7), groups=96, padding=3, dtype="float16"),
    ConvProblem((4, 32, 30, 30), (32, 1, 31, 31), groups=32, padding=15, dtype="bfloat16"),
    ConvProblem((32, 3, 112, 112), (64, 3, 7, 7), stride=2, padding=3),
)
"""Layers for the kernel families with tilings."""

PRICES = {
    "waits": cost.Demand(launches=1, waits=5, multiplying=1),
    "instructions": cost.Demand(launches=1, waves=1, multiplying=1, instructions=9),
    "launches": cost.Demand(launches=50, further=50, wavefronts=2, moved=1),
}
"""Other prices than the measured ones."""


def forget_choices():
    """Clear the caches of chosen tilings and plans."""
    for family in (direct, patch, toeplitz):
        family.ranked_tilings.cache_clear()
    plan_pass.cache_clear()


def launched(planned, device):
    """Return the launches of each pass of a plan."""
    strides = Strides.contiguous(planned.problem)
    return [
        [
            (one.source, one.entry, one.defines, one.grid, one.block, one.shared_bytes)
            for one in prepare(pass_plan, planned.problem, strides, device)
        ]
        for pass_plan in planned
    ]


@pytest.fixture
def other_prices(monkeypatch):
    """Return a function that changes all prices and clears cached choices."""

    def change(prices):
        monkeypatch.setattr(calibration, "_prices", lambda *_: prices)
        forget_choices()

    yield change
    monkeypatch.undo()
    forget_choices()


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a"])
def test_saved_plan_launches_the_same_at_other_prices(architecture, prices, other_prices):
    device = Device.of(architecture)
    plans = [plan(problem, device, precision="tf32") for problem in TILED_PROBLEMS]
    before = [launched(one, device) for one in plans]
    kept = [one.to_json() for one in plans]
    other_prices(PRICES[prices])
    assert [launched(Plan.from_json(text), device) for text in kept] == before
    anew = [plan(problem, device, precision="tf32") for problem in TILED_PROBLEMS]
    assert [launched(one, device) for one in anew] != before


def test_plan_of_another_card_launches_the_same():
    seen, problem = set(), TILED_PROBLEMS[-3].replace(input_shape=(128, 96, 56, 56))
    for count in (3, 40, 300):
        card = Device(f"card of {count}", "sm_80", multiprocessors=count)
        planned = plan(problem, card, "cuda-direct")
        kept = Plan.from_json(planned.to_json())
        assert launched(kept, Device.of("sm_80")) == launched(planned, card)
        seen.add(planned["forward"].blocks)
    assert len(seen) == 3


def test_plan_prints_and_accepts_other_tilings():
    problem, device = TILED_PROBLEMS[-3], Device.of("sm_80")
    planned = plan(problem, device, "cuda-direct")
    tiling = planned["forward"].tiling
    assert f"vector {tiling.vector}, lanes {tiling.lanes}" in str(planned)
    request = Request(problem, "forward", device)
    for other, _ in direct.geometries(request):
        again = planned.with_choices("forward", tiling=other)
        assert again["forward"].tiling == other
        assert again["backprop_filter"] == planned["backprop_filter"]
        assert Plan.from_json(again.to_json()) == again
    with pytest.raises(ConvError, match=r"does not compute forward of .* with tiling = "):
        planned.with_choices("forward", tiling=replace(tiling, vector=7))


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"splits": "2"}, "Choices.splits must be int, got '2'"),
        ({"splits": 2.0}, "Choices.splits must be int, got 2.0"),
        ({"splits": True}, "Choices.splits must be int, got True"),
        ({"tile": Tile(64.0, 64, 16, 128, ())}, "Tile.block_m must be int, got 64.0"),
        ({"tiling": 3}, "'cuda-gather' has no tilings"),
        ({"precision": "tf32"}, "a Choices has no field 'precision'"),
        ({"blocks": 3}, "does not compute forward of .* with blocks = 3"),
        ({"workspace_bytes": 1}, "does not compute forward of .* with workspace_bytes = 1"),
    ],
    ids=str,
)
def test_choices_that_a_plan_does_not_have_are_refused(choices, said):
    problem = ConvProblem((8, 32, 56, 56), (64, 32, 3, 3))
    with pytest.raises(ConvError, match=said):
        plan(problem, "sm_80", "cuda-gather").with_choices("forward", **choices)


@pytest.mark.parametrize("version", [None, 2])
def test_plan_of_an_older_version_is_rejected(version):
    entries = json.loads(changed()) | {"format": version}
    with pytest.raises(ConvError, match=f"its format is {version}, not 3"):
        Plan.from_json(json.dumps(entries))


@pytest.mark.parametrize("field", ["tiling", "blocks"])
def test_plan_without_its_tiling_is_rejected(field):
    entries = json.loads(plan(TILED_PROBLEMS[-3], "sm_80", "cuda-direct").to_json())
    entries["passes"][0][field] = None if field == "tiling" else 0
    with pytest.raises(ConvError, match="cuda-direct does not compute forward with these choices"):
        Plan.from_json(json.dumps(entries))
