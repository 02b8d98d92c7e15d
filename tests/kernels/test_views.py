"""Passes that a kernel family computes as passes of other problems: results and plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, Plan
from cupyconv.kernels import views as kernel_views
from cupyconv.kernels.strides import Strides
from cupyconv.kernels.views import EXCHANGED, FOLDED, MERGED
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import ranked_candidates
from cupyconv.problem import PASSES
from tests import agreement, emulator, views
from tests.agreement import plan_of_view
from tests.configurations import Data, all_formats, in_formats, integer_data, random_data

pytestmark = pytest.mark.costly

FEW_FILTERS = ConvProblem(
    (2, 40, 9, 7), (3, 40, 3, 2), padding=((1, 2), (0, 1)), dilation=(1, 2), dtype="float16"
)
SIGNAL = ConvProblem((1, 130, 23), (1, 130, 5), padding=4, dtype="float64")
VOLUME = ConvProblem((1, 24, 3, 4, 6), (2, 24, 2, 3, 1), padding=(1, 0, 0), dtype="float32")

STEM = ConvProblem((2, 3, 8, 12), (24, 3, 7, 7), stride=2, padding=3, dtype="float16")
UNEVEN = ConvProblem((1, 2, 9, 12), (8, 2, 3, 5), stride=(2, 3), padding=((1, 2), (4, 0)))
PATCHES = ConvProblem((3, 3, 20, 15), (72, 3, 5, 5), stride=5, dtype="float16")
ONE_CHANNEL = ConvProblem((2, 1, 24), (8, 1, 3), stride=4, padding=1, dtype="float64")
CUBES = ConvProblem(
    (1, 2, 4, 6, 6), (40, 2, 3, 3, 4), stride=(2, 3, 1), padding=1, dilation=(1, 1, 2)
)
WIDE = ConvProblem((1, 24, 4, 8), (64, 24, 3, 3), stride=(2, 4), padding=1, dtype="float16")

GROUPS_OF_4 = ConvProblem(
    (2, 24, 7, 6), (24, 4, 3, 2), groups=6, padding=((1, 0), (0, 2)), stride=(1, 2), dtype="float16"
)
GROUPS_OF_8 = ConvProblem((1, 128, 5, 6), (128, 8, 3, 3), groups=16, padding=1, dtype="float16")
UNEVEN_GROUPS = ConvProblem((1, 20, 19), (12, 5, 4), groups=4, dilation=2, padding=3)
GROUPED_VOLUME = ConvProblem((1, 16, 3, 4, 6), (32, 2, 2, 3, 1), groups=8, padding=(1, 0, 0))
HOPPER_VOLUME = ConvProblem((2, 64, 3, 4, 6), (32, 16, 2, 3, 1), groups=4, stride=(1, 2, 1))

PASSES_OF = {
    EXCHANGED: ("backprop_filter",),
    FOLDED: ("backprop_input",),
    MERGED: PASSES,
}
"""Passes that are computed as each kind of view."""

GATHER, HOPPER = ("cuda-gather", "sm_80", "ieee"), ("cuda-hopper", "sm_90a", "tf32")
"""Family, chip and precision."""

EACH_FAMILY = pytest.mark.parametrize(("impl", "arch", "precision"), [GATHER, HOPPER])


def names_of(kind, problem, pass_, arch, impl, precision="ieee", **how):
    """Return the names of the candidates' views of a kind."""
    request = Request(problem, pass_, emulator.device(arch), precision, **how)
    ranked = ranked_candidates(request, impl)
    return sorted({one.view for one in ranked if one.view.endswith(kind)})


def largest_of(kind, *given, **how):
    """Return the name of a view that folds both strides, or merges many groups."""
    return names_of(kind, *given, **how)[0 if kind == FOLDED else -1]


# -- results ---------------------------------------------------------------------------------------

EXACT = (
    (EXCHANGED, FEW_FILTERS, "float16", "ieee", "sm_80", "cuda-gather"),
    (EXCHANGED, FEW_FILTERS, "bfloat16", "ieee", "sm_80", "cuda-gather"),
    (EXCHANGED, FEW_FILTERS, "float32", "tf32", "sm_80", "cuda-gather"),
    (EXCHANGED, FEW_FILTERS, "float16", "ieee", "sm_75", "cuda-gather"),
    (EXCHANGED, SIGNAL, "float64", "ieee", "sm_80", "cuda-gather"),
    (EXCHANGED, VOLUME, "float32", "ieee", "sm_89", "cuda-gather"),
    (FOLDED, STEM, "float16", "ieee", "sm_80", "cuda-gather"),
    (FOLDED, STEM, "bfloat16", "tf32", "sm_90a", "cuda-hopper"),
    (FOLDED, STEM, "float32", "tf32", "sm_90a", "cuda-hopper"),
    (FOLDED, UNEVEN, "float32", "ieee", "sm_80", "cuda-gather"),
    (FOLDED, PATCHES, "float16", "ieee", "sm_75", "cuda-gather"),
    (FOLDED, PATCHES, "float16", "tf32", "sm_90a", "cuda-hopper"),
    (FOLDED, ONE_CHANNEL, "float64", "ieee", "sm_80", "cuda-gather"),
    (FOLDED, ONE_CHANNEL, "float16", "tf32", "sm_90a", "cuda-hopper"),
    (FOLDED, CUBES, "float32", "ieee", "sm_86", "cuda-gather"),
    (FOLDED, CUBES, "float16", "tf32", "sm_90a", "cuda-hopper"),
    (FOLDED, WIDE, "float16", "tf32", "sm_90a", "cuda-hopper"),
    (FOLDED, WIDE, "float32", "tf32", "sm_90a", "cuda-hopper"),
    (MERGED, GROUPS_OF_4, "bfloat16", "ieee", "sm_80", "cuda-gather"),
    (MERGED, GROUPS_OF_4, "float16", "ieee", "sm_75", "cuda-gather"),
    (MERGED, UNEVEN_GROUPS, "float32", "tf32", "sm_80", "cuda-gather"),
    (MERGED, UNEVEN_GROUPS, "float16", "ieee", "sm_80", "cuda-gather"),
    (MERGED, GROUPED_VOLUME, "float32", "ieee", "sm_86", "cuda-gather"),
    (MERGED, GROUPS_OF_8, "float16", "tf32", "sm_90a", "cuda-hopper"),
    (MERGED, GROUPS_OF_8, "float32", "tf32", "sm_90a", "cuda-hopper"),
    (MERGED, HOPPER_VOLUME, "bfloat16", "tf32", "sm_90a", "cuda-hopper"),
)


@pytest.mark.parametrize(
    ("kind", "problem", "dtype", "precision", "arch", "impl", "pass_"),
    [(*one, pass_) for one in EXACT for pass_ in PASSES_OF[one[0]]],
)
def test_views_give_exact_results(kind, problem, dtype, precision, arch, impl, pass_):
    """Each memory order uses another view, tile, number of splits, or copy."""
    for number, one in enumerate(
        all_formats(problem.replace(dtype=dtype))[:: 1 + (kind == MERGED)]
    ):
        names = names_of(kind, one, pass_, arch, impl, precision)
        how = {"precision": precision, "impl": impl, "number": (2 + (kind == EXCHANGED)) * number}
        made = plan_of_view(one, names[number % len(names)], pass_, arch, **how)
        how = {"impl": made, "precision": precision, "arch": arch}
        agreement.require_exact(emulator, one, passes=(pass_,), **how)


@pytest.mark.parametrize(
    ("kind", "problem", "pass_", "view", "family"),
    [
        *product([EXCHANGED], [FEW_FILTERS], PASSES[2:], views.KINDS, [GATHER]),
        *product(
            [FOLDED], [in_formats(STEM, "NHWC", "HWIO")], PASSES[1:2], views.KINDS, [GATHER, HOPPER]
        ),
        *(
            (MERGED, in_formats(GROUPS_OF_8, "NHWC", "OHWI"), *one)
            for one in zip(cycle(PASSES), views.KINDS, cycle([GATHER, HOPPER]))
        ),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_tensors_of_views_may_have_any_strides(kind, problem, pass_, view, family):
    impl, arch, precision = family
    operands = views.OPERANDS[pass_]
    kinds = {name: view for name in operands if views.suits(problem, pass_, name, view)}
    how = {"precision": precision, "strides": views.strides_of(problem, pass_, kinds)}
    name = largest_of(kind, problem, pass_, arch, impl, **how)
    made = plan_of_view(problem, name, pass_, arch, impl, **how)
    views.require_exact(emulator, problem, pass_, kinds, impl=made, arch=arch, precision=precision)


@pytest.mark.parametrize(
    ("kind", "problem", "pass_", "family"),
    [
        (FOLDED, STEM, "backprop_input", GATHER),
        (FOLDED, STEM, "backprop_input", HOPPER),
        (FOLDED, STEM.replace(dtype="float32"), "backprop_input", HOPPER),
        *product([MERGED], [GROUPS_OF_8], PASSES[:2], [GATHER, HOPPER]),
    ],
)
@pytest.mark.parametrize("data_format", ["NCHW", "NHWC"])
def test_views_keep_bias_addend_and_activation(kind, problem, pass_, family, data_format):
    """A bias has an element per channel of the result, not per folded channel; also with splits."""
    filters = {"NCHW": "OIHW", "NHWC": "HWIO" if kind == MERGED else "OHWI"}[data_format]
    problem, (impl, arch, precision) = in_formats(problem, data_format, filters), family
    data, rules = integer_data(problem), {"activation": "relu", **problem.keywords}
    function, source, addend = "conv_forward", data.x, data.dy
    if pass_ == "backprop_input":
        function, source, addend = "conv_transpose", data.dy, data.x
        rules["output_shape"] = problem.input_shape
    channels = addend.shape[problem.data_axes[1]]
    bias = (np.arange(channels) - channels // 2).astype(source.dtype)
    arguments, rules = (source, data.w, bias), {"add": addend, **rules}
    expected = getattr(cupyconv, function)(*arguments, impl="reference", **rules)
    name = largest_of(kind, problem, pass_, arch, impl, precision)
    can_split = kind == FOLDED or pass_ == "forward" or impl == "cuda-hopper"
    for splits in (1, 2)[: 1 + can_split]:
        how = {"precision": precision, "splits": splits}
        made = plan_of_view(problem, name, pass_, emulator.device(arch), impl, **how)
        how = {"impl": made, "precision": precision, "arch": arch}
        got = getattr(emulator, function)(*arguments, **rules, **how)
        agreement.require_equal(got, expected, f"{problem} by {made}")


@EACH_FAMILY
@pytest.mark.parametrize(
    ("kind", "problem", "pass_"),
    [(FOLDED, STEM, "backprop_input"), *((MERGED, GROUPS_OF_8, pass_) for pass_ in PASSES)],
)
def test_prepared_filter_of_views_gives_the_same_bits(kind, problem, pass_, impl, arch, precision):
    backend = emulator.convolutions.backend(arch)
    strides = Strides.contiguous(problem)
    request = Request(problem, pass_, backend.device, precision, strides=strides)
    name = largest_of(kind, problem, pass_, arch, impl, precision)
    how = {"precision": precision}
    chosen = plan_of_view(problem, name, pass_, backend.device, impl, **how)[pass_]
    form = backend.filter_form(request, chosen)
    assert (form is None) == (pass_ == "backprop_filter")
    if form:
        data = random_data(problem)
        emulator.convolutions.require_same_bits_if_prepared(backend, request, chosen, data)
        assert chosen.workspace_bytes >= form.bytes


# -- plans -----------------------------------------------------------------------------------------


def test_hopper_offers_no_views_with_ieee():
    """The kernels of cuda-hopper multiply infinite and NaN elements by zeros that a view adds."""
    request, family = Request(STEM, "backprop_input", Device.of("sm_90a")), FAMILIES["cuda-hopper"]
    assert not any(one.view for one in ranked_candidates(request, family.name))
    others = ranked_candidates(replace(request, precision="tf32"), family.name)
    view = next(one for one in others if one.view)
    assert family.candidate(request.reduced, view) is None


def test_hopper_views_that_add_no_zeros_are_offered_with_ieee():
    for pass_ in PASSES:
        request = Request(GROUPS_OF_8, pass_, Device.of("sm_90a"))
        is_offered = FAMILIES["cuda-hopper"].refuses(request) is None
        assert is_offered == (pass_ == "backprop_filter")


def test_operands_are_exchanged_if_that_is_faster():
    last = ConvProblem((1, 128, 256, 256), (3, 128, 3, 3), padding=1, dtype="float16")
    for problem, device in product((last, in_formats(last, "NHWC", "OHWI")), ("sm_80", "sm_90a")):
        planned = plan_pass(Request(problem, "backprop_filter", Device.of(device)))
        assert planned.view == EXCHANGED
        assert f", with {EXCHANGED}: implicit GEMM" in planned.reason
    for change in (
        {"stride": 2},
        {"padding": 3},
        {"groups": 4, "filter_shape": (4, 32, 3, 3)},
        {"filter_shape": (128, 128, 3, 3)},
        {"filter_shape": (3, 128, 1, 1), "padding": 0},
    ):
        request = Request(last.replace(**change), "backprop_filter", Device.of("sm_80"))
        assert EXCHANGED not in {one.view for one in ranked_candidates(request, "auto")}


def test_reasons_name_the_copied_tensor_of_the_caller():
    """The view reads the caller's x as its dy."""
    pass_ = "backprop_filter"
    made = plan_of_view(FEW_FILTERS, EXCHANGED, pass_, "sm_80").with_choices(pass_, copies=("x",))
    planned = made[pass_]
    assert planned.reason.endswith("before it, x copied with channels last")
    assert Plan.from_json(made.to_json()) == made


def test_choices_of_a_view_do_not_depend_on_caches(monkeypatch):
    """Two threads that need the same view at the same time may each make it."""
    monkeypatch.setattr(kernel_views, "folded", kernel_views.folded.__wrapped__)
    request = Request(STEM, "backprop_input", Device.of("sm_80"), "tf32")
    ranked = ranked_candidates(request, "cuda-gather")
    assert all(FAMILIES["cuda-gather"].candidate(request.reduced, one) == one for one in ranked)


def test_strides_are_folded_if_that_is_faster():
    first = ConvProblem((32, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3, dtype="float16")
    for problem, device in product((first, in_formats(first, "NHWC", "OHWI")), ("sm_80", "sm_90a")):
        request = Request(problem, "backprop_input", Device.of(device))
        planned = plan_pass(request)
        assert planned.view == f"H and W {FOLDED}"
        assert f", with H and W {FOLDED}: implicit GEMM" in planned.reason
        small = plan_pass(replace(request, workspace_limit=0))
        assert small.workspace_bytes == 0
    for change, expected in (
        ({"stride": (1, 2)}, ["W"]),
        ({"input_shape": (32, 3, 223, 224)}, ["W"]),
        ({"input_shape": (32, 3, 224, 223)}, []),
        ({"dilation": 2}, []),
        ({"stride": 1}, []),
        ({"groups": 3, "filter_shape": (63, 1, 7, 7)}, []),
    ):
        request = Request(first.replace(**change), "backprop_input", Device.of("sm_80"))
        ranked = ranked_candidates(request, "cuda-gather")
        found = {one.view.removesuffix(f" {FOLDED}") for one in ranked if one.view}
        assert sorted(found) == expected


def test_groups_are_merged_if_that_is_faster():
    layer = ConvProblem((32, 512, 14, 14), (512, 16, 3, 3), groups=32, padding=1, dtype="float16")
    layer = in_formats(layer, "NHWC", "OHWI")
    for arch, name in (("sm_80", "2"), ("sm_90a", "4")):
        planned = plan_pass(Request(layer, "backprop_filter", Device.of(arch)))
        assert planned.view == f"{name} {MERGED}"
        assert f", with {name} {MERGED}: implicit GEMM" in planned.reason
    for change, expected in (
        ({}, ["2", "4"]),
        ({"groups": 1, "filter_shape": (512, 3, 3, 512)}, []),
        ({"groups": 512, "filter_shape": (512, 3, 3, 1)}, []),  # depthwise
        ({"groups": 16, "filter_shape": (512, 3, 3, 32)}, ["2"]),
        ({"groups": 8, "filter_shape": (512, 3, 3, 64)}, []),
        ({"input_shape": (32, 14, 14, 35), "groups": 7, "filter_shape": (35, 3, 3, 5)}, ["7"]),
        ({"filter_shape": (1024, 3, 3, 16)}, ["2"]),
        ({"dtype": "float64"}, []),
    ):
        for pass_ in PASSES:
            names = names_of(MERGED, layer.replace(**change), pass_, "sm_80", "cuda-gather")
            assert names == [f"{count} {MERGED}" for count in expected]


# -- infinite and NaN elements ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "dtype", "arch"),
    [
        (FEW_FILTERS, "float16", "sm_80"),
        (FEW_FILTERS, "float32", "sm_80"),
        (SIGNAL, "bfloat16", "sm_80"),
        (SIGNAL, "float64", "sm_80"),
        (VOLUME, "float64", "sm_86"),
        (STEM, "float16", "sm_75"),
        (STEM, "float32", "sm_80"),
        (UNEVEN, "bfloat16", "sm_80"),
        (PATCHES, "float32", "sm_75"),
        (ONE_CHANNEL, "float64", "sm_80"),
        (CUBES, "float16", "sm_80"),
        (CUBES, "float64", "sm_86"),
        (GROUPS_OF_4, "float16", "sm_75"),
        (GROUPS_OF_4, "bfloat16", "sm_80"),
        (UNEVEN_GROUPS, "float32", "sm_80"),
        (GROUPED_VOLUME, "float32", "sm_86"),
    ],
)
def test_views_keep_infinity_and_nan_to_their_readers(problem, dtype, arch):
    """Each memory order has another view, candidate, number of splits, and other elements."""
    numbers = np.random.default_rng(4)
    for number, one in enumerate([*all_formats(problem.replace(dtype=dtype))][1::3]):
        pass_ = "backprop_input" if max(problem.stride) > 1 else "backprop_filter"
        if problem.groups > 1:
            pass_ = PASSES[number % 2]
        ranked = ranked_candidates(Request(one, pass_, emulator.device(arch)), "cuda-gather")
        names = [candidate.view for candidate in ranked if candidate.view]
        how = {"number": 5 * number, "splits": 2 * number * (pass_ == "backprop_filter")}
        made = plan_of_view(one, names[5 * number % len(names)], pass_, arch, **how)
        for count in (1, 3, 10**9):
            data = replace(integer_data(one), bias=None)
            for operand in (data.x, data.w, data.dy):
                places = numbers.permutation(operand.size)[:count]
                operand.flat[places] = numbers.choice((np.inf, -np.inf, np.nan), places.size)
            wide = Data(*(array.astype(float) for array in (data.x, data.w, data.dy)), None)
            with np.errstate(invalid="ignore"):
                got = agreement.compute(emulator, pass_, one, data, impl=made, arch=arch)
                expected = agreement.plain_sums(one.replace(dtype="float64"), pass_, wide)
            np.testing.assert_array_equal(got.astype(float), expected, f"{count} in {made}")


LARGEST = np.finfo(np.float32).max


@pytest.mark.parametrize(
    ("problem", "pass_", "operand", "index", "expected"),
    [
        (
            ConvProblem((1, 1, 4), (1, 1, 1), stride=2),
            *("backprop_input", "dy", (0, 0, 0), [np.inf, 0, 1, 0]),
        ),
        (
            ConvProblem((1, 1, 8), (4, 1, 3), stride=4, padding=1),
            *("backprop_input", "w", (0, 0, 0), [4, 4, 0, np.inf, 4, 4, 0, 0]),
        ),
        (
            ConvProblem((1, 2, 2), (1, 2, 2), padding=((1, 0),)),
            *("backprop_filter", "x", (0, 0, 1), [1, np.inf, 1, 2]),
        ),
        (
            ConvProblem((1, 16, 4), (16, 4, 1), groups=4),
            *("forward", "x", (0, 0, 0), [np.inf, 5, 5, 5] * 4 + [5] * 48),
        ),
    ],
)
def test_tf32_infinities_reach_only_their_readers(problem, pass_, operand, index, expected):
    data = Data(*(np.ones_like(array) for array in vars(integer_data(problem)).values()))
    getattr(data, operand)[index] = LARGEST

    def view_on_tensor_cores(request):
        ranked = ranked_candidates(request, "cuda-gather")
        return next(one for one in ranked if one.view and one.tile.defines["TENSOR_CORES"])

    how = {"precision": "tf32"}
    made = agreement.plan_by(
        view_on_tensor_cores, problem, "cuda-gather", emulator.device(), passes=[pass_], **how
    )
    got = agreement.compute(emulator, pass_, problem, data, impl=made, **how)
    np.testing.assert_array_equal(got.ravel(), expected)


def test_choices_keep_the_view_that_a_layer_needs():
    """TMA cannot begin a copy at the second group's first channel."""
    problem = ConvProblem(
        (3, 4, 11, 7, 14), (1, 3, 3, 7, 2), stride=(1, 4, 1), dilation=(1, 2, 1), groups=2,
        data_format="NDHWC", filter_format="DHWIO",
    )  # fmt: skip
    plan = cupyconv.plan(problem, "sm_90a", impl="cuda-hopper-bf16x6", precision="bf16x6")
    assert plan.with_choices("backprop_filter", splits=2)["backprop_filter"].view
    with pytest.raises(cupyconv.ConvError, match="must support the choices"):
        plan.with_choices("backprop_filter", view="")
