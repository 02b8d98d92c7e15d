"""The public functions on NumPy arrays: exact on integers, bounded on random data."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings

import cupyconv
from cupyconv import ConvProblem, arrays
from cupyconv.arrays import numpy_dtype
from cupyconv.kernels.device import CPU
from cupyconv.problem import PASSES
from tests import agreement
from tests.activations import ACTIVATIONS, activated
from tests.configurations import (
    CASES,
    DTYPES,
    Data,
    all_formats,
    cases,
    integer_data,
    problems,
    random_data,
    three_passes,
)

IMPLS = ("reference", "numpy")

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_small_case = pytest.mark.parametrize("case", cases(2000), ids=lambda case: case.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_impl = pytest.mark.parametrize("impl", IMPLS)


def as_integers(array: np.ndarray) -> np.ndarray:
    """Return the values as Python integers, so that sums are not rounded."""
    exact = array.astype(np.float64)
    assert np.array_equal(exact, np.round(exact))
    return exact.astype(object)


def by_definition(problem: ConvProblem, data: Data) -> dict[str, np.ndarray]:
    results = (agreement.wide_definition(problem, pass_, data) for pass_ in PASSES)
    return dict(zip(("y", "dx", "dw"), results, strict=True))


def assert_same(results: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, value in results.items():
        assert value.shape == expected[name].shape, name
        exact, other = value.astype(np.float64), expected[name].astype(np.float64)
        np.testing.assert_array_equal(exact, other, err_msg=name)


# -- exact on integers -----------------------------------------------------------------------------


@each_case
@each_dtype
def test_implementations_agree_exactly(case, dtype):
    problem = case.problem.replace(dtype=dtype)
    data = integer_data(problem)
    reference = three_passes(problem, data, "reference")
    assert_same(three_passes(problem, data, "numpy"), reference)
    assert {a.dtype for a in reference.values()} == {numpy_dtype(dtype)}
    shapes = [reference[name].shape for name in ("y", "dx", "dw")]
    assert shapes == [problem.output_shape, problem.input_shape, problem.filter_shape]


@each_small_case
@each_impl
def test_passes_match_their_definition(case, impl):
    problem = case.problem.replace(dtype="float64")
    data = integer_data(problem, seed=1)
    assert_same(three_passes(problem, data, impl), by_definition(problem, data))


@settings(max_examples=60)
@given(problems(max_macs=300, dtypes=DTYPES))
def test_random_layers_match_their_definition(problem):
    data = integer_data(problem)
    expected = by_definition(problem, data)
    for impl in IMPLS:
        assert_same(three_passes(problem, data, impl), expected)


@pytest.mark.parametrize("case", cases(60_000), ids=lambda case: case.name)
@each_impl
def test_memory_order_does_not_change_values(case, impl):
    problem = case.problem
    data = integer_data(problem)
    expected = three_passes(problem, data, impl)
    for variant in all_formats(problem):
        to_data = [problem.data_format.index(letter) for letter in variant.data_format]
        to_filter = [problem.filter_format.index(letter) for letter in variant.filter_format]
        moved = Data(
            data.x.transpose(to_data),
            data.w.transpose(to_filter),
            data.dy.transpose(to_data),
            data.bias,
        )
        results = three_passes(variant, moved, impl)
        assert_same(
            results,
            {
                "y": expected["y"].transpose(to_data),
                "dx": expected["dx"].transpose(to_data),
                "dw": expected["dw"].transpose(to_filter),
            },
        )


@settings(max_examples=150)
@given(problems(dtypes=DTYPES))
def test_adjoint_identity_is_exact(problem):
    data = integer_data(problem)
    for impl in IMPLS:
        arguments = {**problem.keywords, "impl": impl}
        y = cupyconv.conv_forward(data.x, data.w, **arguments)
        dx = cupyconv.conv_backprop_input(problem.input_shape, data.w, data.dy, **arguments)
        dw = cupyconv.conv_backprop_filter(data.x, problem.filter_shape, data.dy, **arguments)
        inner = [
            (as_integers(a) * as_integers(b)).sum()
            for a, b in ((y, data.dy), (data.x, dx), (data.w, dw))
        ]
        assert inner[0] == inner[1] == inner[2]


@each_case
@each_dtype
def test_bias_gradient_sums_all_axes_except_channels(case, dtype):
    problem = case.problem.replace(dtype=dtype)
    data = integer_data(problem)
    db = cupyconv.conv_backprop_bias(data.dy, data_format=problem.data_format)
    axes = tuple(a for a, letter in enumerate(problem.data_format) if letter != "C")
    assert db.dtype == data.dy.dtype
    np.testing.assert_array_equal(db.astype(np.float64), data.dy.astype(np.float64).sum(axis=axes))


# -- activations and the bias ----------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
@each_impl
def test_activations_of_extreme_values(activation, impl):
    x = np.array([-np.inf, -1000, -100, -0.0, 0, 100, 1000, np.inf, np.nan], np.float32)
    one = np.ones((1, 1, 1), np.float32)
    y = cupyconv.conv_forward(x.reshape(1, 1, -1), one, activation=activation, impl=impl).ravel()
    expected = activated(x, activation)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-41)  # silu(-100) is -3.7e-42


# -- floating-point edge cases ---------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["numpy", "reference"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_error_states_do_not_change_results(dtype, impl):
    """Overflow and underflow raise no error, as on a GPU, even if the user's errstate raises."""
    x = np.array([[[np.finfo(dtype).max, np.finfo(dtype).tiny, -300, 300]]], dtype)
    w = np.array([[[np.finfo(dtype).tiny * 2, 2]], [[0.01, 1]]], dtype)

    def passes():
        for activation in (None, *ACTIVATIONS):
            yield cupyconv.conv_forward(x, w, padding=1, activation=activation, impl=impl)
        yield from cupyconv.conv_backward(x, w, np.repeat(x, 2, 1)[..., :3], impl=impl)

    expected = list(passes())
    with np.errstate(all="raise"):
        for got, known in zip(passes(), expected, strict=True):
            np.testing.assert_array_equal(got, known)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@each_impl
def test_sums_of_16_bit_types_may_exceed_their_range(dtype, impl):
    x = np.array([1, 1, -1, -1], dtype=numpy_dtype(dtype)).reshape(1, 4, 1)
    w = np.full((1, 4, 1), 40000, dtype=numpy_dtype(dtype))
    assert cupyconv.conv_forward(x, w, impl=impl).astype(float).item() == 0


# -- arrays of every kind --------------------------------------------------------------------------


def unaligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 1, np.uint8)
    view = raw[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@each_impl
@pytest.mark.parametrize("name", ["volume_everything_differs", "channels_last", "groups"])
def test_inputs_and_outputs_may_be_unaligned(name, impl):
    """Addresses are no multiples of the elements' size; tests/cpu tests other views."""
    problem = next(case.problem for case in CASES if case.name == name)
    data = integer_data(problem)
    moved = Data(*map(unaligned, vars(data).values()))
    for pass_ in PASSES:
        expected = agreement.compute(cupyconv, pass_, problem, data, impl=impl)
        out = unaligned(np.zeros_like(expected))
        assert agreement.compute(cupyconv, pass_, problem, moved, impl=impl, out=out) is out
        np.testing.assert_array_equal(out, expected)
    rules = {"data_format": problem.data_format}
    db = np.zeros(2 * problem.K, np.float32)[::-2]
    assert cupyconv.conv_backprop_bias(moved.dy, out=db, **rules) is db
    np.testing.assert_array_equal(db, cupyconv.conv_backprop_bias(data.dy, **rules))


def test_out_with_gaps_does_not_write_the_gaps():
    problem = ConvProblem((1, 2, 6), (3, 2, 3))
    data = integer_data(problem)
    memory = np.full((1, 3, 8), 99.0, np.float32)
    cupyconv.conv_forward(data.x, data.w, out=memory[:, :, ::2])
    assert np.all(memory[:, :, 1::2] == 99)
    np.testing.assert_array_equal(memory[:, :, ::2], cupyconv.conv_forward(data.x, data.w))


def test_out_may_interleave_with_an_input():
    memory = np.arange(20, dtype=np.float32).reshape(1, 1, 20)
    x, out = memory[..., ::2], memory[..., 1::2]
    expected = 3 * x
    result = cupyconv.conv_forward(x, np.full((1, 1, 1), 3, np.float32), out=out)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(x.ravel(), np.arange(0, 20, 2))


@each_case
@each_impl
def test_inputs_may_be_read_only_and_are_never_changed(case, impl):
    data = integer_data(case.problem)
    before = [a.tobytes() for a in (data.x, data.w, data.dy, data.bias)]
    for array in (data.x, data.w, data.dy, data.bias):
        array.flags.writeable = False
    three_passes(case.problem, data, impl)
    cupyconv.conv_backward(data.x, data.w, data.dy, **case.problem.keywords)
    assert [a.tobytes() for a in (data.x, data.w, data.dy, data.bias)] == before


def test_results_are_new_contiguous_arrays():
    problem = next(case.problem for case in CASES if case.name == "channels_last")
    data = integer_data(problem)
    for result in three_passes(problem, data, "numpy").values():
        assert result.flags.c_contiguous
        assert result.flags.owndata
        assert result.flags.writeable


@pytest.mark.parametrize("channels", [2**19, 2**29])
def test_result_larger_than_memory_raises_memory_error(channels):
    """The error is the same if the number of bytes does not fit a 64-bit integer."""
    one, shape = np.ones((1, 1, 1), "float16"), (2**40, channels, 1)
    x, w = np.broadcast_to(one, (2**40, 1, 1)), np.broadcast_to(one, (channels, 1, 1))
    size = {2**19: "1,024.0 PiB", 2**29: "1,048,576.0 PiB"}[channels]
    words = f"an array of {'x'.join(map(str, shape))} float16 takes {size}, more than is available"
    with pytest.raises(MemoryError, match=f"^{words}$"):
        cupyconv.conv_forward(x, w)


def test_plan_without_a_gpu_is_for_the_cpu(monkeypatch):
    monkeypatch.setattr(arrays, "device_count", lambda: 0)
    assert cupyconv.plan(CASES[0].problem).device == CPU


@pytest.mark.parametrize("rank", [1, 2, 3])
@each_impl
def test_empty_batch_gives_empty_or_zero_results(rank, impl):
    problem = ConvProblem((0, 3, *[5] * rank), (4, 3, *[3] * rank), padding=1)
    data = integer_data(problem)
    results = three_passes(problem, data, impl)
    assert results["y"].shape == (0, 4, *[5] * rank)
    assert results["dx"].shape == problem.input_shape
    assert not results["dw"].any()  # an empty sum is 0
    assert not cupyconv.conv_backprop_bias(data.dy).any()


def test_results_do_not_depend_on_alignment():
    problem = ConvProblem((2, 5, 19, 13), (7, 5, 3, 3), padding=1)
    data = random_data(problem)
    moved = Data(*(unaligned(a) for a in (data.x, data.w, data.dy, data.bias)))
    first, second = (three_passes(problem, d, "numpy") for d in (data, moved))
    assert {n: a.tobytes() for n, a in first.items()} == {n: a.tobytes() for n, a in second.items()}


# -- conv_backward ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "needs",
    [s for n in range(4) for s in itertools.combinations(("input", "filter", "bias"), n)],
    ids="+".join,
)
def test_backward_computes_only_the_needed_gradients(needs, monkeypatch):
    from cupyconv import backends

    computed = []
    cpu = backends.CpuBackend
    run, sum_bias = cpu.run, cpu.sum_bias
    monkeypatch.setattr(
        cpu, "run", lambda self, plan, *a: (computed.append(plan.pass_), run(self, plan, *a))
    )
    monkeypatch.setattr(
        cpu, "sum_bias", lambda self, *a: (computed.append("bias"), sum_bias(self, *a))
    )
    problem = next(case.problem for case in CASES if case.name == "channels_last_output_first")
    data = integer_data(problem)
    grads = cupyconv.conv_backward(data.x, data.w, data.dy, needs=needs, **problem.keywords)
    names = {"input": "backprop_input", "filter": "backprop_filter", "bias": "bias"}
    assert computed == [names[need] for need in needs]
    expected = three_passes(problem, data, "numpy")
    for need, name in (("input", "dx"), ("filter", "dw"), ("bias", "db")):
        value = getattr(grads, name)
        assert (value is not None) == (need in needs)
        if value is not None and name != "db":
            np.testing.assert_array_equal(value, expected[name])
    if grads.db is not None:
        np.testing.assert_array_equal(grads.db, data.dy.sum(axis=(0, 1, 2)))


def test_backward_computes_all_gradients_by_default():
    problem = CASES[1].problem
    data = integer_data(problem)
    everything = cupyconv.conv_backward(data.x, data.w, data.dy)
    assert all(gradient is not None for gradient in everything)
    one = cupyconv.conv_backward(data.x, data.w, data.dy, needs="filter")
    assert (one.dx, one.db) == (None, None)
    np.testing.assert_array_equal(one.dw, everything.dw)


# -- conv_transpose --------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["same", "same_lower"])
@pytest.mark.parametrize(
    ("stride", "taps", "dilation"), list(itertools.product((1, 2, 3), (1, 2, 3, 5), (1, 2)))
)
def test_transpose_with_same_padding_scales_by_the_stride(word, stride, taps, dilation):
    x = np.ones((1, 2, 5), np.float32)
    w = np.ones((2, 3, taps), np.float32)
    y = cupyconv.conv_transpose(x, w, stride=stride, padding=word, dilation=dilation)
    assert y.shape == (1, 3, 5 * stride)


# -- importing -------------------------------------------------------------------------------------


def test_import_loads_no_other_library():
    """Other modules are imported on first use."""
    code = (
        "import sys; before = set(sys.modules); import cupyconv; print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots = {name.partition(".")[0] for name in done.stdout.split()}
    assert roots - sys.stdlib_module_names == {"cupyconv"}


def test_calls_on_numpy_arrays_import_no_framework():
    code = """
import sys, numpy, cupyconv
x, w = numpy.ones((1, 1, 5), "f"), numpy.ones((1, 1, 3), "f")
cupyconv.conv_backward(x, w, cupyconv.conv_forward(x, w))
print([m for m in ("cupy", "torch", "jax", "tensorflow") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist_and_are_listed():
    assert all(getattr(cupyconv, name) is not None for name in cupyconv.__all__)
    assert set(cupyconv.__all__) <= set(dir(cupyconv))
    with pytest.raises(AttributeError, match="no attribute 'convolve'"):
        _ = cupyconv.convolve


@pytest.mark.parametrize(("limit", "like_it"), [(1, True), (0, False), (5, 5.0), (7, np.int64(7))])
def test_workspace_limit_is_checked_after_an_equal_valid_one(limit, like_it, monkeypatch):
    x, w = np.ones((1, 2, 5), np.float32), np.ones((2, 2, 3), np.float32)
    for call in (lambda: cupyconv.conv_forward(x, w), lambda: cupyconv.conv_backprop_bias(x)):
        monkeypatch.setattr(cupyconv, "workspace_limit", limit)
        call()
        monkeypatch.setattr(cupyconv, "workspace_limit", like_it)
        with pytest.raises(cupyconv.ConvError, match="workspace"):
            call()


X, DY = (np.ones((2, 4, 7, 7), "float32") for _ in range(2))
W = np.ones((4, 4, 3, 3), "float32")
TF_W = np.ones((3, 3, 4, 4), "float32")
TF = {"strides": [1, 2, 2, 1], "padding": "SAME"}
TF_X, TF_DY = np.ones((2, 7, 7, 4), "float32"), np.ones((2, 4, 4, 4), "float32")
REPEATED = {
    "conv_forward": lambda: cupyconv.conv_forward(X, W, padding=[1, (1, 1)], stride=[1, 2]),
    "conv_backward": lambda: cupyconv.conv_backward(X, W, DY, padding=1),
    "conv_transpose": lambda: cupyconv.conv_transpose(X, W, stride=2, output_padding=1),
    "cudnn": lambda: cupyconv.cudnn.convolution_forward(
        X, W, None, DY, (1, 1), (1, 1), None, 1, auto_tune=False, tensor_core="auto"
    ),
    "onnx.conv": lambda: cupyconv.onnx.conv(X, W, np.ones(4, "float32"), strides=[2, 1]),
    "onnx.conv_transpose": lambda: cupyconv.onnx.conv_transpose(
        X, W, strides=[2, 2], output_shape=[14, 15], auto_pad="SAME_LOWER"
    ),
    "Conv2D": lambda: cupyconv.raw_ops.Conv2D(input=TF_X, filter=TF_W, **TF),
    "Conv2DBackpropInput": lambda: cupyconv.raw_ops.Conv2DBackpropInput(
        input_sizes=[2, 7, 7, 4], filter=TF_W, out_backprop=TF_DY, **TF
    ),
    "Conv2DBackpropFilter": lambda: cupyconv.raw_ops.Conv2DBackpropFilter(
        input=TF_X, filter_sizes=[3, 3, 4, 4], out_backprop=TF_DY, **TF
    ),
    "DepthwiseConv2dNative": lambda: cupyconv.raw_ops.DepthwiseConv2dNative(
        input=TF_X, filter=TF_W, **TF
    ),
}
"""Calls that must build their problem only once."""


@pytest.mark.parametrize("name", REPEATED)
def test_repeated_calls_build_no_problem(name, monkeypatch):
    REPEATED[name]()
    built = []
    monkeypatch.setattr("cupyconv.problem._require_sizes", lambda *_: built.append(name))
    REPEATED[name]()
    assert built == []


@pytest.mark.parametrize(
    ("valid", "invalid"),
    [({"strides": [1, 1]}, {"strides": [1, True]}), ({"group": 1}, {"group": True})],
)
def test_onnx_refuses_booleans_after_equal_integers(valid, invalid):
    cupyconv.onnx.conv(X, W, **valid)
    with pytest.raises(cupyconv.ConvTypeError):
        cupyconv.onnx.conv(X, W, **invalid)
    with pytest.raises(cupyconv.ConvTypeError):
        cupyconv.onnx.conv(X, W, **{name: tuple(v) if isinstance(v, list) else v
                                    for name, v in invalid.items()})  # fmt: skip


def test_errors_show_lists_as_the_user_passed_them():
    with pytest.raises(cupyconv.ConvTypeError, match=r"got \[1, 1\] of type list"):
        cupyconv.conv_forward(X, W, stride=([1, 1], 1))


class Plain(str):
    __hash__ = None


@pytest.mark.parametrize(
    ("valid", "limit", "invalid", "wrong"),
    [
        (lambda: cupyconv.conv_forward(X, W, stride=np.int64(1)), np.int64(0),
         lambda: cupyconv.conv_forward(X, W, stride=1), "workspace_limit must be a non-negative"),
        (lambda: None, [0],
         lambda: cupyconv.conv_forward(X, W, stride=[1, 1]), "workspace_limit must be a non-neg"),
        (lambda: cupyconv.onnx.conv(X, W, group=1), 0,
         lambda: cupyconv.onnx.conv(X, W, group=[1]), r"got \[1\] of type list"),
        (lambda: None, 0,
         lambda: cupyconv.conv_backprop_input(iter(X.shape), W, DY, stride=3), "dy must have"),
        (lambda: None, 0,
         lambda: cupyconv.conv_forward(X, W, stride=[[[[1]]], 1]), r"\[\[\[1\]\]\]"),
    ],
)  # fmt: skip
def test_calls_are_refused_whatever_preceded(monkeypatch, valid, limit, invalid, wrong):
    monkeypatch.setattr(cupyconv, "workspace_limit", 0)
    valid()
    monkeypatch.setattr(cupyconv, "workspace_limit", limit)
    with pytest.raises((cupyconv.ConvError, cupyconv.ConvTypeError), match=wrong):
        invalid()


def test_subclasses_of_str_do_not_end_caching(monkeypatch):
    options = {**TF, "padding": Plain("SAME"), "data_format": np.str_("NHWC")}
    cupyconv.raw_ops.Conv2D(input=TF_X, filter=TF_W, **options)
    plain = {**TF, "data_format": "NHWC"}
    cupyconv.raw_ops.Conv2D(input=TF_X, filter=TF_W, **plain)
    built = []
    monkeypatch.setattr("cupyconv.problem._require_sizes", lambda *_: built.append(0))
    cupyconv.raw_ops.Conv2D(input=TF_X, filter=TF_W, **plain)
    assert built == []


def test_lists_that_contain_themselves_are_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(cupyconv.ConvError, match="got 1 value for 2 spatial axes"):
        cupyconv.conv_forward(X, W, stride=endless)


def test_remedies_fit_the_result_if_they_can():
    x, w = np.ones((1, 15, 10), "float32"), np.ones((6, 5, 2), "float32")
    with pytest.raises(cupyconv.ConvError) as caught:
        cupyconv.cudnn.convolution_forward(
            x, w, None, np.empty((1, 6, 12), "float32"), (0,), (1,), (1,), 2,
            auto_tune=False, tensor_core="auto",
        )  # fmt: skip
    assert "d_layout" not in str(caught.value)
    with pytest.raises(cupyconv.ConvError, match="use groups=3"):
        cupyconv.conv_forward(x, w, groups=2, out=np.empty((1, 7, 9), "float32"))
