"""Every shape rule of ConvProblem, compared with an enumeration by definition."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from cupyconv import ConvError, ConvProblem
from cupyconv.problem import PASSES, ConvAxis, count_pairs, dtype_name
from tests.configurations import CASES, all_formats, problems, random_problems

pytestmark = pytest.mark.quick

MODES = ("explicit", "valid", "same", "same_lower")


def windows(size: int, taps: int, stride: int, dilation: int, before: int, after: int) -> int:
    """Return the number of windows, by sliding a window over the padded axis in strides."""
    padded = [None] * before + list(range(size)) + [None] * after
    reach = (taps - 1) * dilation
    return sum(1 for start in range(0, len(padded), stride) if start + reach < len(padded))


def same_sides(mode: str, size: int, taps: int, stride: int, dilation: int) -> tuple[int, int]:
    """Return the least padding for a window at every stride-th input, split evenly if possible."""
    wanted = len(range(0, size, stride))
    total = 0
    while windows(size, taps, stride, dilation, 0, total) < wanted:
        total += 1
    sides = (total // 2, total - total // 2)
    return sides if mode == "same" else sides[::-1]


def one_axis(size: int, taps: int, stride: int, dilation: int, padding: object) -> ConvProblem:
    return ConvProblem(
        (1, 1, size), (1, 1, taps), stride=stride, dilation=dilation, padding=padding
    )


GRID = list(itertools.product(range(1, 12), range(1, 5), range(1, 5), range(1, 4)))


@pytest.mark.parametrize("padding", ["valid", 0, (1,), ((0, 2),), ((3, 1),)], ids=str)
def test_output_size_is_the_number_of_windows(padding):
    checked = 0
    before, after = {"valid": (0, 0), 0: (0, 0), (1,): (1, 1)}.get(padding) or padding[0]
    for size, taps, stride, dilation in GRID:
        expected = windows(size, taps, stride, dilation, before, after)
        if expected:
            problem = one_axis(size, taps, stride, dilation, padding)
            assert problem.output_sizes == (expected,), problem
            assert problem.padding == ((before, after),)
            assert problem.padding_mode == ("valid" if padding == "valid" else "explicit")
            checked += 1
        else:
            with pytest.raises(ConvError, match="must fit into the padded input"):
                one_axis(size, taps, stride, dilation, padding)
    assert checked > 100


@pytest.mark.parametrize("mode", ["same", "same_lower"])
def test_same_pads_the_least_and_splits_it_evenly(mode):
    for size, taps, stride, dilation in GRID:
        problem = one_axis(size, taps, stride, dilation, mode)
        sides = same_sides(mode, size, taps, stride, dilation)
        assert problem.padding == (sides,), problem
        assert problem.output_sizes == (len(range(0, size, stride)),), problem
        assert problem.padding_mode == mode


@pytest.mark.parametrize("word", ["SAME", "Same", "same"])
def test_case_of_the_padding_word_does_not_matter(word):
    assert one_axis(6, 3, 2, 1, word) == one_axis(6, 3, 2, 1, "same")


@pytest.mark.parametrize(
    "padding", [0, ((1, 0),), ((0, 3),), "valid", "same", "same_lower"], ids=str
)
def test_interval_of_input_sizes_by_trying_them_all(padding):
    for taps, stride, dilation in itertools.product(range(1, 5), range(1, 5), range(1, 4)):
        by_output: dict[int, list[int]] = {}
        for size in range(1, 30):
            try:
                problem = one_axis(size, taps, stride, dilation, padding)
            except ConvError:
                continue
            by_output.setdefault(problem.output_sizes[0], []).append(size)
        complete = sorted(by_output)[:-1]  # the last interval may have more sizes than were tried
        assert complete
        for output in complete:
            for size in by_output[output]:
                sizes = one_axis(size, taps, stride, dilation, padding).valid_input_sizes[0]
                assert list(sizes) == by_output[output]


def test_interval_starts_at_one_if_padding_alone_gives_outputs():
    axis = ConvAxis("W", 1, 1, 3, 1, 1, 1, "explicit")
    assert axis.output == 1
    assert axis.first_input_size_for(1) == -1
    assert axis.valid_input_sizes == range(1, 2)


def test_no_input_has_an_output_of_0():
    axis = ConvAxis("W", 9, 4, 3, 1, 0, 0, "explicit")
    assert list(axis.input_sizes_for(1)) == [4, 5, 6]
    assert list(axis.input_sizes_for(0)) == []
    assert list(axis.input_sizes_for(-1)) == []


def check_taps(axis: ConvAxis) -> None:
    for tap in range(axis.filter):
        reads = [
            o * axis.stride - axis.pad_before + tap * axis.dilation for o in range(axis.output)
        ]
        inside = [(o, i) for o, i in enumerate(reads) if 0 <= i < axis.input]
        assert list(axis.outputs_of_tap(tap)) == [o for o, _ in inside], (axis, tap)
        assert list(axis.inputs_of_tap(tap)) == [i for _, i in inside], (axis, tap)


@pytest.mark.parametrize("padding", [0, ((7, 2),), ((0, 3),), "same", "same_lower"], ids=str)
def test_taps_over_the_whole_grid(padding):
    for size, taps, stride, dilation in GRID:
        try:
            problem = one_axis(size, taps, stride, dilation, padding)
        except ConvError:
            continue
        check_taps(problem.axes[0])


@pytest.mark.parametrize("padding", [0, ((7, 2),), ((0, 3),), "same"], ids=str)
def test_stride_phases_by_asking_every_input_for_its_taps(padding):
    for size, taps, stride, dilation in GRID:
        try:
            axis = one_axis(size, taps, stride, dilation, padding).axes[0]
        except ConvError:
            continue
        assert len(axis.stride_phases) == stride
        seen = []
        for inputs, reached_by in axis.stride_phases:
            for h in inputs:
                under = [
                    r
                    for r in range(taps)
                    if (h + axis.pad_before - r * dilation) % stride == 0  # a window starts there
                ]
                assert list(reached_by) == under, (axis, h)
            seen += inputs
        assert sorted(seen) == list(range(size))


def random_axes(count: int, seed: int) -> Iterator[ConvAxis]:
    """Yield small axes of any proportions; some have no window that fits."""
    rng = random.Random(seed)
    for _ in range(count):
        most = rng.choice((3, 8, 20))
        sizes = [rng.randint(1, most) for _ in range(4)]
        padding = [rng.choice((0, rng.randint(0, 2 * most))) for _ in range(2)]
        yield ConvAxis("W", *sizes, *padding, "explicit")


def test_pairs_and_unread_inputs_are_those_of_every_window():
    met = 0
    for axis in random_axes(8000, seed=5):
        reads = [
            o * axis.stride - axis.pad_before + r * axis.dilation
            for o in range(axis.output)
            for r in range(axis.filter)
        ]
        inside = [h for h in reads if 0 <= h < axis.input]
        assert axis.pairs == len(inside), axis
        assert axis.unread_inputs == axis.input - len(set(inside)), axis
        met += 0 < axis.unread_inputs < axis.input and axis.pairs > len(set(inside))
    assert met > 150  # axes with inputs that several windows read, and inputs that none reads


def test_pairs_are_counted_in_any_interval():
    for axis in random_axes(2000, seed=6):
        low, high = axis.pad_before - 9, axis.pad_before + axis.input // 2
        sizes = axis.output, axis.filter, axis.stride, axis.dilation
        values = [
            o * axis.stride + r * axis.dilation
            for o in range(axis.output)
            for r in range(axis.filter)
        ]
        assert count_pairs(*sizes, low, high) == sum(low <= value < high for value in values)


def test_pairs_of_huge_axes():
    """Each of these huge axes has a simpler formula for its pairs or unread inputs."""
    within = ConvAxis("W", 10**15, 10**6, 7, 10**6, 0, 0, "explicit")  # no window in the padding
    assert within.pairs == within.output * within.filter
    apart = ConvAxis("W", 2**50, 1, 2**20, 1, 0, 0, "explicit")
    assert (apart.pairs, apart.unread_inputs) == (2**30, 2**50 - 2**30)
    one = ConvAxis("W", 10**6, 10**6, 1, 1, 10**6 - 1, 10**6 - 1, "explicit")
    assert (one.pairs, one.unread_inputs) == (10**12, 0)  # each tap meets each input
    last = ConvAxis("W", 10**17, 10**15, 7, 1, 0, 0, "valid")
    assert last.unread_inputs == last.unread_after == (10**17 - 10**15) % 7
    steps = ConvAxis("W", 10**9, 10**9, 3, 2, 10**9, 2 * 10**9, "explicit")
    assert steps.pairs == sum(  # both halves of the taps
        count_pairs(steps.output, 5 * 10**8, 3, 2, low, low + steps.input)
        for low in (10**9, 10**9 - 2 * 5 * 10**8)
    )


def test_phases_too_many_to_list_are_still_told_one_by_one():
    problem = one_axis(100, 3, 2**40, 2**20, ((2**21, 2**21),))
    (axis,) = problem.axes
    assert [list(axis.taps_of_phase(f)) for f in (0, 2**20, 2**21, 7)] == [[0], [1], [2], []]
    for listed in (lambda: axis.stride_phases, lambda: problem.phase_gemms):
        with pytest.raises(ConvError, match=r"there are 1,099,511,627,776\. Use ConvAxis"):
            listed()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"input_shape": (1, 1, 2**63)},
            "input_shape must be made of 64-bit integers: got a",
        ),
        ({"input_shape": (10**5000, 1, 9)}, "got a larger integer"),
        ({"filter_shape": (1, 1, -(10**5000))}, "filter_shape must be made of 64-bit integers"),
        ({"stride": 2**63}, "stride must be"),
        ({"dilation": 2**70}, "dilation must be"),
        ({"groups": 2**63}, "groups must be"),
        ({"padding": 2**63}, "padding must be"),
        (
            {"padding": 2**62},
            r"at most 2\^63 - 1 positions \(axis W\): the input of 9 with padding",
        ),
        ({"padding": "same", "dilation": 2**62}, "Use fewer taps, or a smaller dilation"),
    ],
)
def test_numbers_beyond_64_bits_are_refused(changes, words):
    given = {"input_shape": (1, 1, 9), "filter_shape": (1, 1, 3), **changes}
    with pytest.raises(ConvError, match=words):
        ConvProblem(**given)


@given(problems())
def test_phases_of_the_input_gradient_make_up_the_whole(problem):
    whole = problem.gemm("backprop_input")
    phases = problem.phase_gemms
    assert len(phases) == np.prod(problem.stride)
    assert sum(phase.gemm_m for phase in phases) == whole.gemm_m
    assert {(phase.gemm_n, phase.groups) for phase in phases} == {(whole.gemm_n, whole.groups)}
    orders = itertools.product(*(axis.stride_phases for axis in problem.axes))
    for phase, axes in zip(phases, orders, strict=True):
        assert phase.gemm_m == problem.N * np.prod([len(inputs) for inputs, _ in axes])
        assert phase.gemm_k == problem.K // problem.G * np.prod([len(taps) for _, taps in axes])


@given(problems())
def test_unread_inputs_are_those_after_the_last_window(problem):
    for axis in problem.axes:
        last = (axis.output - 1) * axis.stride - axis.pad_before + axis.effective_filter - 1
        assert axis.unread_after == len(range(max(last + 1, 0), axis.input))
        assert axis.effective_filter == len(range((axis.filter - 1) * axis.dilation + 1))


@given(problems())
def test_the_formula_ends_in_the_output_size(problem):
    for axis in problem.axes:
        arithmetic, _, result = axis.formula.rpartition(" = ")
        assert int(result) == axis.output
        python = arithmetic.replace("floor(", "int(").replace("ceil(", "ceil(")
        assert eval(python, {"int": int, "ceil": lambda v: -int(-v // 1)}) == axis.output


def counted_macs(problem: ConvProblem) -> tuple[int, int]:
    """Return the products of a pass with and without padding, counted singly along each axis."""
    all_, useful = 1, 1
    for axis in problem.axes:
        reads = [
            o * axis.stride - axis.pad_before + r * axis.dilation
            for o in range(axis.output)
            for r in range(axis.filter)
        ]
        all_ *= len(reads)
        useful *= sum(0 <= i < axis.input for i in reads)
    channel_pairs = sum(
        k // (problem.K // problem.G) == c // (problem.C // problem.G)
        for k in range(problem.K)
        for c in range(problem.C)
    )
    return problem.N * channel_pairs * all_, problem.N * channel_pairs * useful


@given(problems())
def test_flops_by_counting(problem):
    macs, useful = counted_macs(problem)
    assert (problem.flops, problem.useful_flops) == (2 * macs, 2 * useful)


@given(problems(dtypes=("float16", "bfloat16", "float32", "float64")))
def test_bytes_are_those_of_x_w_and_y(problem):
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
    elements = sum(np.empty(shape, np.int8).size for shape in shapes)
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[problem.dtype]
    assert problem.bytes == size * elements
    assert problem.arithmetic_intensity == problem.flops / problem.bytes


def test_bytes_exceed_traffic_if_a_stride_skips_inputs():
    """A 1x1 filter with stride 2 reads one input in four."""
    problem = ConvProblem((1, 4, 9, 9), (4, 4, 1, 1), stride=2)
    (axis, _) = problem.axes
    assert axis.unread_inputs
    shown = problem._repr_html_()
    assert "at least" not in shown
    assert f"{problem.bytes:,} bytes in x, w and y together" in shown


@given(problems())
def test_gemm_views_have_extra_products_only_for_dx(problem):
    for pass_ in PASSES:
        m, n, k, groups = problem.gemm(pass_)
        if pass_ != "backprop_input":
            assert m * n * k * groups == problem.flops // 2
    m, n, k, groups = problem.gemm("backprop_input")
    inputs = problem.N * int(np.prod(problem.input_sizes))
    taps = int(np.prod(problem.filter_sizes))
    assert (m, n * groups, k * groups) == (inputs, problem.C, problem.K * taps)


def test_gemm_of_an_unknown_pass():
    with pytest.raises(ConvError, match=r"unknown pass: 'forwards'\. Did you mean 'forward'"):
        CASES[0].problem.gemm("forwards")


@given(problems())
def test_shapes_of_the_gradients_and_where_the_letters_stand(problem):
    assert problem.input_gradient_shape == problem.input_shape
    assert problem.filter_gradient_shape == problem.filter_shape
    assert problem.bias_shape == (problem.K,)
    letters = dict(zip(problem.data_format, problem.input_shape, strict=True))
    outputs = dict(zip(problem.data_format, problem.output_shape, strict=True))
    taps = dict(zip(problem.filter_format, problem.filter_shape, strict=True))
    assert (letters["N"], letters["C"]) == (problem.N, problem.C)
    assert (outputs["N"], outputs["C"]) == (problem.N, problem.K)
    assert (taps["O"], taps["I"] * problem.G) == (problem.K, problem.C)
    for axis in problem.axes:
        assert letters[axis.name] == axis.input
        assert taps[axis.name] == axis.filter
        assert outputs[axis.name] == axis.output


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_memory_order_changes_no_size(case):
    variants = all_formats(case.problem)
    assert len({(p.data_format, p.filter_format) for p in variants}) == 6
    for variant in variants:
        assert variant.axes == case.problem.axes
        assert (variant.N, variant.C, variant.K) == (
            case.problem.N,
            case.problem.C,
            case.problem.K,
        )
        assert (variant.flops, variant.bytes) == (case.problem.flops, case.problem.bytes)


# -- from the output -------------------------------------------------------------------------------


@given(problems())
def test_from_output_restores_the_problem(problem):
    found = ConvProblem.from_output(
        problem.output_shape,
        problem.filter_shape,
        input_shape=problem.input_shape,
        **problem.keywords,
        dtype=problem.dtype,
    )
    assert found == problem


@given(problems())
def test_output_padding_counts_from_the_smallest_input_that_fits(problem):
    extra = tuple(axis.input - axis.first_input_size_for(axis.output) for axis in problem.axes)
    found = ConvProblem.from_output(
        problem.output_shape,
        problem.filter_shape,
        output_padding=extra,
        **problem.keywords,
        dtype=problem.dtype,
    )
    assert found == problem


@given(problems())
def test_from_output_defaults_to_smallest_or_for_same_largest(problem):
    takes_last = problem.padding_mode.startswith("same")
    sizes = [
        axis.first_input_size_for(axis.output) + (axis.stride - 1 if takes_last else 0)
        for axis in problem.axes
    ]
    try:
        found = ConvProblem.from_output(
            problem.output_shape, problem.filter_shape, **problem.keywords, dtype=problem.dtype
        )
    except ConvError:
        assert min(sizes) < 1  # the smallest size would be an empty input
        return
    assert list(found.input_sizes) == sizes
    if takes_last:
        assert [a.input for a in found.axes] == [a.output * a.stride for a in found.axes]


# -- the object ------------------------------------------------------------------------------------


def test_equal_problems_are_one_dictionary_key():
    spelled = ConvProblem([1, 3, 8, 8], np.array([4, 3, 3, 3]), stride=2, padding=1)
    other = ConvProblem(
        (1, 3, 8, 8),
        (4, 3, 3, 3),
        stride=[2, 2],
        padding=((1, 1), 1),
        dilation=np.int64(1),
        data_format="channels_first",
        filter_format="oihw",
        dtype=np.float32,
    )
    assert spelled == other
    assert len({spelled: 1, other: 2}) == 1
    assert spelled != other.replace(dilation=2)
    assert spelled != "a problem"


def test_a_problem_cannot_be_changed():
    problem = CASES[0].problem
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.groups = 2
    assert problem.groups == 1


@given(problems())
def test_replace_nothing_is_the_same_and_pickling_keeps_it(problem):
    assert problem.replace() == problem
    assert pickle.loads(pickle.dumps(problem)) == problem


def test_replace_keeps_the_padding_rule_not_its_pairs():
    problem = ConvProblem((1, 1, 8), (1, 1, 3), padding="same")
    assert problem.padding == ((1, 1),)
    assert problem.replace(filter_shape=(1, 1, 5)).padding == ((2, 2),)
    with pytest.raises(ConvError, match="groups"):
        problem.replace(groups=2)


GOLDEN = {
    "volume_everything_differs": "ConvProblem(2x4x5x7x6 NCDHW * 6x2x2x3x1 OIDHW -> 2x6x3x5x3, "
    "stride=(2,1,3), padding=((1,0),(0,2),(1,1)), dilation=(1,2,1), groups=2, dtype=float32)",
    "same_stride_2_of_5": "ConvProblem(1x5x5x3 NHWC * 3x3x3x4 HWIO -> 1x3x3x4, stride=2, "
    "padding=same (1, 1), dilation=1, groups=1, dtype=float32)",
    "paddings_differ": "ConvProblem(2x3x8 NCW * 2x3x5 OIW -> 2x2x5, stride=2, padding=(1, 4), "
    "dilation=1, groups=1, dtype=float32)",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_repr_says_everything_in_a_line(name):
    case = next(case for case in CASES if case.name == name)
    assert repr(case.problem) == GOLDEN[name]


@pytest.mark.parametrize(
    ("given_dtype", "name"),
    [
        ("float16", "float16"),
        (np.dtype("float32"), "float32"),
        (np.float64, "float64"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    ],
    ids=str,
)
def test_dtypes_by_any_spelling(given_dtype, name):
    assert dtype_name(given_dtype) == name
    assert ConvProblem((1, 1, 1), (1, 1, 1), dtype=given_dtype).dtype == name


@pytest.mark.parametrize(
    ("input_shape", "filter_shape", "needed"),
    [
        ((1, 1, 2**31 - 1), (1, 1, 2**31 - 1), False),
        ((1, 1, 2**31), (1, 1, 1), True),
        ((1, 1, 2**31), (1, 1, 2**31), True),
        ((1, 1, 2), (2**30, 1, 2), True),
        ((1, 1, 2), (2**30 - 1, 1, 2), False),
        ((2, 1, 1), (2**30, 1, 1), True),
        ((2, 1, 1), (2**30 - 1, 1, 1), False),
    ],
    ids=["x_last", "x_first", "x_and_w", "w_first", "w_last", "y_first", "y_last"],
)
def test_64bit_indexing_from_2_to_the_31_elements(input_shape, filter_shape, needed):
    assert ConvProblem(input_shape, filter_shape).needs_64bit_indexing is needed


def test_products_beyond_64_bits_are_exact():
    huge = ConvProblem(
        (2**20, 2**20, 2**20, 2**20), (2**20, 2**20, 3, 3), padding=1, dtype="float64"
    )
    assert huge.output_shape == huge.input_shape
    assert huge.flops == 2 * 9 * 2**100
    assert huge.bytes == 8 * (2 * 2**80 + 9 * 2**40)
    assert huge.useful_flops < huge.flops
    assert huge.needs_64bit_indexing
    assert "1048576x1048576x1048576x1048576" in repr(huge)


@pytest.mark.parametrize("max_macs", [1, 64, 4096])
def test_random_configurations_keep_to_their_limit(max_macs):
    series = list(random_problems(200, seed=3, max_macs=max_macs))
    assert all(problem.flops // 2 <= max_macs for problem in series)
    assert len(set(series)) > 60
    if max_macs == 4096:
        assert {p.padding_mode for p in series} == set(MODES)
        assert {p.spatial_rank for p in series} == {1, 2, 3}
        assert any(p.N == 0 for p in series)
        assert any(p.G == p.C > 1 and p.K > p.C for p in series)
        assert len({(p.data_format, p.filter_format) for p in series}) == 18
