"""cupyconv.checking: comparisons pass correct results and fail wrong results."""

from __future__ import annotations

import numpy as np
import pytest

from cupyconv import ConvProblem, arrays, checking, operations
from cupyconv.bench.data import in_layout
from cupyconv.checking import (
    EXACT_UP_TO,
    ROUNDOFF,
    Agreement,
    Excerpt,
    Operands,
    Results,
    Truth,
    _naive,
    compute,
    integer_operands,
    pass_function,
)
from cupyconv.cli import check, configuration
from cupyconv.cpu import naive
from cupyconv.explaining import values
from cupyconv.formats import CHANNELS_FIRST, CHANNELS_LAST
from cupyconv.problem import ITEMSIZE, PASSES, REAL_ITEMSIZE
from tests.agreement import to_tf32
from tests.configurations import cases, random_problems

LAYERS = configuration.read_file(check.BUILT_IN)


def _operands(problem: ConvProblem, seed: int = 0) -> Operands:
    return Operands(**values.draw(problem, seed))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_plain_summation_equals_the_reference_on_integers(layer):
    problem = layer.problem(dtype="float32")
    operands = integer_operands(problem, np.random.default_rng(0))
    expected = compute(problem, operands, "reference")
    for got, wanted in zip(_naive(problem, operands), expected, strict=True):
        assert np.array_equal(got, wanted)


@pytest.mark.parametrize("dtype", REAL_ITEMSIZE)
def test_integer_data_has_exact_sums(dtype):
    for layer in LAYERS:
        problem = layer.problem(dtype=dtype)
        operands = integer_operands(problem, np.random.default_rng(0))
        assert all(operand.dtype == arrays.numpy_dtype(dtype) for operand in operands)
        for sums in Truth(problem, operands).magnitudes:
            assert np.max(sums, initial=0) <= EXACT_UP_TO[dtype]
        if problem.N:
            assert all(np.count_nonzero(operand) for operand in operands)


def test_layer_names_are_unique_and_presets_are_valid():
    names = [layer.name for layer in LAYERS]
    assert len(set(names)) == len(names)
    for layer in (*LAYERS, *configuration.read_file(configuration.PRESETS)):
        assert isinstance(layer.problem(), ConvProblem)


@pytest.mark.parametrize("dtype", REAL_ITEMSIZE)
def test_error_just_above_the_bound_fails(dtype):
    problem = ConvProblem((1, 3, 8, 8), (4, 3, 3, 3), dtype=dtype)
    operands = _operands(problem)
    truth = Truth(problem, operands)
    results = compute(problem, operands, "numpy")
    for name in Results._fields:
        array = getattr(results, name).copy()
        assert truth.difference(name, array) <= truth.bounds[name]
        magnitude = getattr(truth.magnitudes, name).ravel()[1]
        array.ravel()[1] += array.dtype.type(2 * truth.bounds[name] * magnitude)
        assert truth.difference(name, array) > truth.bounds[name]


def test_nonzero_gradient_of_an_unread_input_fails():
    problem = ConvProblem((1, 1, 6), (1, 1, 3), stride=2)  # no window reads the last input
    operands = _operands(problem)
    truth = Truth(problem, operands)
    results = compute(problem, operands, "numpy")
    results.dx[0, 0, 5] = 1e-6
    assert truth.difference("dx", results.dx) > 1
    verdicts = {
        entry.tensor: entry.passed for entry in truth.against_finite_differences(results, 0)
    }
    assert verdicts == {"dx": False, "dw": True, "db": True}


def test_infinities_must_match():
    problem = ConvProblem((1, 1, 3), (1, 1, 1), dtype="float16")
    x = np.array([[[60000, 2, -60000]]], np.float16)
    operands = Operands(x, np.full((1, 1, 1), 2, np.float16), np.ones((1, 1, 3), np.float16))
    truth = Truth(problem, operands)
    right = np.array([[[np.inf, 4, -np.inf]]], np.float16)
    assert truth.difference("y", right) == 0
    assert truth.difference("y", -right) == np.inf
    assert truth.difference("y", np.full_like(right, np.nan)) == np.inf


@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        ("float16", (1e-5, 1e-7, 6e-8)),
        ("bfloat16", (1e-38, 9e-41)),
        *((dtype, (1e-38, 1e-44)) for dtype in ("float32", "complex64")),
        *((dtype, (1e-120, 1e100, 1e-307)) for dtype in ("float64", "complex128")),
    ],
)
def test_comparisons_do_not_depend_on_scale(dtype, scales, operand):
    problem = ConvProblem((1, 3, 8, 8), (4, 3, 3, 3), dtype=dtype)
    for scale in scales:
        operands = list(_operands(problem))
        operands[operand] = (operands[operand] * scale).astype(operands[operand].dtype)
        truth = Truth(problem, Operands(*operands))
        results = compute(problem, truth.operands, "numpy")
        agreements = [
            *truth.against_reference(results),
            *truth.against_finite_differences(results, 0),
            truth.against_adjoint(results),
        ]
        assert all(agreement.passed for agreement in agreements)
        assert max(truth.bounds.values()) < 100 * ROUNDOFF[dtype]


@pytest.mark.parametrize("scales", [(0, 1e-30, 1e-8), (1e-77, 1e307, 1e-77), (1e154, 1e152, 1e77)])
def test_float64_near_its_limits_passes(scales):
    problem = ConvProblem((1, 2, 6), (3, 2, 3), dtype="float64")
    operands = Operands(*map(np.multiply, _operands(problem), scales))
    truth, results = Truth(problem, operands), compute(problem, operands, "numpy")
    slopes = [one.passed for one in truth.against_finite_differences(results, 0)]
    assert False not in slopes  # None if the loss overflows
    assert all(one.passed for one in truth.against_reference(results))


def test_overflow_that_depends_on_the_order_passes():
    problem = ConvProblem((1, 2, 3), (1, 2, 1), dtype="complex64")
    x = np.array([[[1e30, 1e30j, 1], [-1e30, 1, 1]]], np.complex64)
    operands = Operands(x, np.full((1, 2, 1), 1e30 + 1e30j, np.complex64), x[:, :1])
    truth = Truth(problem, operands)
    with np.errstate(over="ignore"):
        right = truth.results.y.astype(np.complex64)
    nan = np.where(np.isfinite(right), right, np.nan)
    assert truth.difference("y", nan) <= truth.bounds["y"] < 1e-5
    assert truth.difference("y", np.full_like(nan, np.nan)) == np.inf  # y[2] cannot overflow


@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_infinite_operands_times_padding_pass(dtype, value, operand):
    problem = ConvProblem((1, 2, 6), (3, 2, 3), padding=1, dtype=dtype)
    operands = _operands(problem)
    operands[operand].flat[0] = value
    truth = Truth(problem, operands)
    for impl in ("numpy", "reference"):
        results = compute(problem, operands, impl)
        assert all(one.passed for one in truth.against_reference(results))
    assert max(truth.bounds.values()) < 100 * ROUNDOFF[dtype]
    results.y[0, 2, 5] += 1
    results.dx[0, 1, 5] = np.inf
    failed = [one.tensor for one in truth.against_reference(results) if not one.passed]
    assert failed == ["y", "dx"]


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("factor", [0, 1.01])
def test_finite_differences_find_errors_that_signs_cancel(factor, dtype):
    problem = ConvProblem((1, 1, 8), (1, 1, 1), stride=7, dtype=dtype)
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
    operands = Operands(*(np.ones(shape, dtype) for shape in shapes))
    truth = Truth(problem, operands)
    results = compute(problem, operands, "numpy")
    wrong = results._replace(dx=results.dx * np.float32(factor))
    for seed in range(8):
        entries = truth.against_finite_differences(wrong, seed)
        assert [entry.tensor for entry in entries if not entry.passed] == ["dx"]


@pytest.mark.parametrize("operand", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("size", [1e10, 1e16, 1e22])
def test_finite_differences_tolerate_one_huge_number(size, dtype, operand):
    problem = ConvProblem((1, 2, 5, 5), (3, 2, 3, 3), dtype=dtype)
    operands = _operands(problem)
    operands[operand].flat[-1] = size
    results = compute(problem, operands, "auto")
    truth = Truth(problem, operands)
    assert all(one.passed for one in truth.against_finite_differences(results, 0))
    wrong = results._replace(dw=results.dw + (1e-4 * truth.magnitudes.dw).astype(dtype))
    assert not all(one.passed for one in truth.against_finite_differences(wrong, 0))


@pytest.mark.parametrize("problem", list(random_problems(12, seed=5)), ids=str)
def test_large_layers_are_compared_like_small_layers(problem, monkeypatch):
    operands = _operands(problem)
    results = compute(problem, operands, "numpy")
    small = list(Truth(problem, operands).against_finite_differences(results, 0))
    monkeypatch.setattr(checking, "LARGE", -1)
    truth = Truth(problem, operands)
    large = list(truth.against_finite_differences(results, 0))
    assert truth._forward == "auto"
    for one, other in zip(small, large, strict=True):
        assert one.passed
        assert other.passed
        assert (one.tensor, one.count) == (other.tensor, other.count)
        assert other.difference == pytest.approx(one.difference, rel=0.2, abs=1e-9)
    for name in ("dx", "dw"):
        wrong = getattr(results, name).copy()
        wrong.ravel()[0] += 1
        failed = truth.against_finite_differences(results._replace(**{name: wrong}), 0)
        assert [entry.tensor for entry in failed if not entry.passed] == [name]


def test_wrong_fast_forward_pass_is_not_used(monkeypatch):
    problem = ConvProblem((2, 3, 8, 8), (4, 3, 3, 3))
    operands = _operands(problem)
    results = compute(problem, operands, "numpy")
    monkeypatch.setattr(checking, "LARGE", -1)
    forward = operations.conv_forward

    def off(*args, impl="auto", **rest):
        y = forward(*args, impl=impl, **rest)
        if impl == "auto":
            y.ravel()[-1] *= 1 + 1e-9
        return y

    monkeypatch.setattr(operations, "conv_forward", off)
    truth = Truth(problem, operands)
    assert truth._forward == "reference"
    assert all(entry.passed for entry in truth.against_finite_differences(results, 0))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("channels", [1, 2, 7, 19])
def test_running_sums_do_not_depend_on_the_layout(channels, dtype):
    terms = np.random.default_rng(0).standard_normal((2, 1000, channels)).astype(dtype)
    expected = np.zeros((2, channels), dtype)
    for term in range(terms.shape[1]):
        expected += terms[:, term]
    np.testing.assert_array_equal(naive._running_sum(terms), expected)


def test_nan_difference_never_passes():
    assert Agreement("", "y", "", 1, float("nan"), 1.0).passed is False
    assert Agreement("", "y", "", 1, None, 1.0).passed is None


# -- excerpts --------------------------------------------------------------------------------------

LAYER = ConvProblem((3, 6, 9, 8), (8, 3, 3, 2), groups=2, stride=(2, 1), padding=1)
LONG = ConvProblem((2, 64, 12, 12), (32, 64, 3, 3), padding=1)


def excerpt(problem, pass_, operands, most_flops=1e9):
    return Excerpt(problem, pass_, operands, "reference", most_flops)


@pytest.mark.parametrize("layout", [CHANNELS_FIRST, CHANNELS_LAST])
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("share", [1.0, 0.4, 0.05, 1e-9])
def test_excerpt_accepts_right_and_rejects_wrong_results(pass_, share, layout):
    problem = in_layout(LAYER, layout, "float32")
    operands = _operands(problem)
    part = excerpt(problem, pass_, operands, problem.flops * share)
    assert part.share <= max(share, 1 / 18)  # the smallest excerpt has one index per axis
    result = pass_function(problem, pass_)(operands)
    assert part.judge(result).passed
    result[(-1,) * result.ndim] += 1  # every excerpt contains the last number
    assert not part.judge(result).passed


@pytest.mark.parametrize(
    "case", [case for case in cases(20_000) if case.problem.N], ids=lambda case: case.name
)
def test_excerpts_of_awkward_layers_are_correct(case):
    operands = _operands(case.problem)
    for pass_ in PASSES:
        part = excerpt(case.problem, pass_, operands, case.problem.flops / 3)
        assert part.judge(pass_function(case.problem, pass_, "numpy")(operands)).passed


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_excerpt_bounds_are_tight_for_every_dtype(dtype):
    problem = LONG.replace(dtype=dtype)
    operands = _operands(problem)
    for pass_ in PASSES:
        agreement = excerpt(problem, pass_, operands).judge(pass_function(problem, pass_)(operands))
        assert agreement.passed
        # In float64 the reference and the implementation may agree exactly.
        is_tight = agreement.difference > agreement.bound / 100
        assert is_tight or dtype in ("float64", "complex128")


def test_excerpt_rejects_one_wrong_number_and_nan():
    operands = _operands(LONG)
    part = excerpt(LONG, "forward", operands)
    right = pass_function(LONG, "forward")(operands)
    for wrong in (right[0, 0, 0, 0] + 0.01, np.nan, np.inf):
        result = right.copy()
        result[0, 0, 0, 0] = wrong
        assert part.judge(result).passed is False
    nothing = LONG.replace(input_shape=(0, 64, 12, 12))
    operands = _operands(nothing)
    assert excerpt(nothing, "forward", operands).judge(np.empty(nothing.output_shape)).passed


def test_roundingto_tf32_passes_only_with_precision_tf32():
    operands = _operands(LONG)
    part = excerpt(LONG, "forward", operands)
    result = pass_function(LONG, "forward")(Operands(*map(to_tf32, operands)))
    assert [part.judge(result, precision).passed for precision in ("ieee", "tf32")] == [False, True]
