"""Filters that are arranged once: what a call launches, and what it refuses.

On a GPU whose kernels do nothing; tests/device runs them.
"""

# ruff: noqa: F811 (fixtures of another module)
from __future__ import annotations

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, PreparedFilter, backends
from cupyconv.arrays import Home
from tests.configurations import in_formats, integer_data
from tests.test_host_cost import entered, gpu, memory  # noqa: F401

LAYER = ConvProblem((32, 256, 28, 28), (256, 256, 3, 3), padding=1, dtype="float16")
"""For which "auto" takes cuda-hopper."""
LAST = in_formats(LAYER, "NHWC", "OHWI")

HELD = {
    "channels first": (LAYER, "ieee", "auto", ["OHWI"]),
    "only the filter": (in_formats(LAYER, "NHWC", "OIHW"), "ieee", "auto", ["OHWI"]),
    "tf32": (LAYER.replace(dtype="float32"), "tf32", "auto", ["OHWI", "HWIO"]),
    "planes": (
        LAST.replace(dtype="float32"),
        "bf16x6",
        "cuda-hopper-bf16x6",
        ["OHWI in 3 planes of bfloat16"],
    ),
}
"""A layer with its precision and implementation, and the forms that its filter is held in."""


@pytest.fixture
def hopper(gpu, memory):
    """The current device; each array has memory of its own.  Gives its runtime."""
    runtime = gpu("sm_90a")
    backends.of(Home.GPU).empty = memory.array
    return runtime


class Calls:
    """The passes of a layer that read its filter, on arrays that nothing reads."""

    def __init__(self, memory, problem, precision="ieee", impl="auto"):
        shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
        self.x, self.w, self.y = (memory.array(shape, problem.dtype) for shape in shapes)
        self.problem, self.words = problem, {"precision": precision, "impl": impl}
        self.how = {**problem.keywords, **self.words}

    def prepare(self, **more):
        return cupyconv.prepare(self.w, self.problem, **self.words, **more)

    def forward(self, w):
        return cupyconv.conv_forward(self.x, w, **self.how)

    def backprop_input(self, w):
        return cupyconv.conv_backprop_input(self.x.shape, w, self.y, **self.how)


COPYING = ("conv_arrange.cu", "conv_planes.cu")


def reads(arguments, array):
    """Whether an array itself is among a launch's arguments."""
    return any(one is array for one in arguments)


@pytest.mark.parametrize("pass_", ["forward", "backprop_input"])
@pytest.mark.parametrize("case", HELD)
def test_a_call_arranges_no_prepared_filter(hopper, memory, case, pass_):
    problem, precision, impl, forms = HELD[case]
    calls = Calls(memory, problem, precision, impl)
    call = getattr(calls, pass_)

    def launched(w):
        hopper.launched.clear()
        hopper.encoded.clear()
        call(w)
        return list(hopper.launched)

    before = launched(calls.w)
    (arranging,) = (source for source, given in before if reads(given, calls.w))
    assert arranging in COPYING
    hopper.launched.clear()
    prepared = calls.prepare()
    assert [source for source, _ in hopper.launched] == [arranging] * len(forms)
    assert list(prepared.forms) == forms
    after = launched(prepared)
    products = [[source for source, _ in run if source not in COPYING] for run in (before, after)]
    assert products[0] == products[1]
    assert not any(reads(given, calls.w) for _, given in after)
    read_now = {address for role, address in hopper.encoded if role == "w"}
    (form,) = (one for one in prepared.forms.values() if one.data.ptr in read_now)
    assert read_now == {form.data.ptr}
    assert prepared.nbytes == sum(one.nbytes for one in prepared.forms.values())
    planes = 3 if case == "planes" else 1
    size = 2 if case == "planes" else calls.w.itemsize
    assert form.nbytes == planes * calls.w.size * size


@pytest.mark.parametrize("pass_", ["forward", "backprop_input"])
def test_cuda_gather_reads_a_prepared_filter_in_the_place_of_its_copy(gpu, memory, pass_):
    """One form serves both passes; images are copied as ever."""
    runtime = gpu("sm_80")
    backends.of(Home.GPU).empty = memory.array
    calls = Calls(memory, LAYER)
    call = getattr(calls, pass_)
    call(calls.w)
    (first, arranged), (second, multiplied) = runtime.launched
    assert (first, second) == ("conv_arrange.cu", "conv_gather.cu")
    assert reads(arranged, calls.w)
    assert not reads(multiplied, calls.w)
    prepared = calls.prepare()
    assert list(prepared.forms) == ["OHWI"]
    runtime.launched.clear()
    call(prepared)
    (first, arranged), (second, multiplied) = runtime.launched
    assert (first, second) == ("conv_arrange.cu", "conv_gather.cu")
    assert not reads(arranged, calls.w)
    assert reads(multiplied, prepared.forms["OHWI"])
    assert prepared.nbytes == calls.w.nbytes


def test_a_workspace_has_no_room_for_what_is_prepared(hopper, memory):
    backend = backends.of(Home.GPU)
    calls = Calls(memory, in_formats(LAYER, "NHWC", "OIHW"))
    sizes = []
    empty = backend.empty
    backend.empty = lambda shape, dtype: (sizes.append(shape), empty(shape, dtype))[1]
    calls.forward(calls.w)
    assert sizes == [LAST.output_shape, (calls.w.nbytes // 4,)]
    prepared = calls.prepare()
    sizes.clear()
    calls.forward(prepared)
    assert sizes == [LAST.output_shape]


def test_a_repeated_call_enters_few_functions(hopper, memory):
    calls = Calls(memory, LAYER)
    prepared = calls.prepare()
    calls.forward(prepared)
    calls.forward(calls.w)
    plain = len(entered(lambda: calls.forward(calls.w)))
    assert len(entered(lambda: calls.forward(prepared))) <= plain + 3


def test_where_nothing_is_arranged_nothing_is_held(hopper, memory):
    for problem in (LAST, LAYER.replace(dtype="float64"), LAYER.replace(dtype="complex64")):
        calls = Calls(memory, problem, impl="auto")
        prepared = calls.prepare()
        assert prepared.forms == {}
        assert prepared.nbytes == 0
        assert prepared.array is calls.w
        assert repr(prepared).endswith("for forward and backprop_input: as it is)")
        calls.forward(prepared)
        calls.backprop_input(prepared)


def test_every_function_that_reads_a_filter_takes_it(hopper, memory):
    calls = Calls(memory, LAYER)
    prepared = calls.prepare()
    x, y, rules = calls.x, calls.y, LAYER.keywords
    hopper.launched.clear()
    cupyconv.conv_transpose(y, prepared, output_shape=x.shape, activation="relu", **rules)
    grads = cupyconv.conv_backward(x, prepared, y, **rules)
    assert grads.dw.shape == LAYER.filter_shape
    cupyconv.onnx.conv(x, prepared, pads=[1, 1, 1, 1])
    cupyconv.onnx.conv_transpose(y, prepared, pads=[1, 1, 1, 1])
    layout = {"auto_tune": False, "tensor_core": "auto"}
    cupyconv.cudnn.convolution_forward(x, prepared, None, y, (1, 1), (1, 1), (1, 1), 1, **layout)
    plan = cupyconv.plan(LAYER)
    cupyconv.conv_forward(x, prepared, impl=plan, **rules)
    cupyconv.conv_forward(x, cupyconv.prepare(calls.w, LAYER, impl=plan), **rules)
    arranging = [given for _, given in hopper.launched if reads(given, calls.w)]
    assert len(arranging) == 1, "by the second prepare"


def test_other_batches_and_sizes_are_taken(hopper, memory):
    """Where their kernels want another form, they make it as they do without."""
    prepared = Calls(memory, LAYER).prepare()
    for shape in ((1, 256, 28, 28), (3, 256, 9, 20)):
        for padding in (((1, 1), (1, 1)), "same"):  # the same in other words
            hopper.launched.clear()
            cupyconv.conv_forward(memory.array(shape), prepared, padding=padding)
            assert hopper.launched
    planes, precision, impl, _ = HELD["planes"]
    calls = Calls(memory, planes, precision, impl)
    held = calls.prepare(passes="forward")
    assert list(held.forms)
    misaligned = memory.array(planes.input_shape, "float32", offset=4)
    hopper.launched.clear()
    cupyconv.conv_forward(misaligned, held, **calls.how)
    assert [source for source, _ in hopper.launched] == ["conv_planes.cu", "conv_hopper.cu"]


def test_measuring_takes_it(hopper, memory, monkeypatch, tmp_path):
    from cupyconv import measuring
    from cupyconv.gpu import compiler

    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(measuring, "seconds", lambda call, count: (call(), 1e-3)[1])
    monkeypatch.setattr(measuring, "capturing", lambda: False)
    monkeypatch.setattr(measuring, "lost", lambda: False)
    monkeypatch.setattr(measuring, "driver_version", lambda: 13010)
    monkeypatch.setattr(cupyconv, "benchmark", True)
    calls = Calls(memory, LAYER, impl="auto")
    prepared = cupyconv.prepare(calls.w, LAYER, impl="cuda-hopper")
    hopper.launched.clear()
    calls.forward(prepared)
    launched = [(source, reads(given, calls.w)) for source, given in hopper.launched]
    assert {"conv_hopper.cu", "conv_arrange.cu"} <= {source for source, _ in launched}
    assert ("conv_arrange.cu", True) not in launched
    measuring.forget()


# -- what it says ----------------------------------------------------------------------------------


def test_it_says_what_it_holds(hopper, memory):
    calls = Calls(memory, LAYER)
    assert repr(calls.prepare(passes=["forward"])) == (
        "PreparedFilter(256x256x3x3 OIHW float16 on Imaginary (sm_90a), for forward: "
        "held as OHWI, 1.1 MiB)"
    )
    prepared = calls.prepare()
    assert (prepared.shape, prepared.dtype, prepared.ndim) == ((256, 256, 3, 3), "float16", 4)


REFUSED = {
    "stride": ({"stride": 2}, "it was prepared with stride (1, 1), the call has stride (2, 2)"),
    "padding": (
        {"padding": "valid"},
        "it was prepared with padding ((1, 1), (1, 1)), the call has padding valid",
    ),
    "precision": (
        {"precision": "tf32"},
        "it was prepared with precision 'ieee', the call has 'tf32'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_another_layer(hopper, memory, case):
    calls = Calls(memory, LAYER)
    prepared = calls.prepare()
    hopper.launched.clear()
    words, said = REFUSED[case]
    with pytest.raises(ConvError) as error:
        cupyconv.conv_forward(calls.x, prepared, **{"padding": 1, **words})
    assert error.value.rule.startswith("a prepared filter must be used in the layer")
    assert error.value.values == said
    assert "cupyconv.prepare(w, problem, ...)" in error.value.remedy
    assert hopper.launched == []


def test_it_is_refused_where_w_has_changed_its_shape(hopper, memory):
    """An array may be given another one in its place, and the forms are of the first."""
    calls = Calls(memory, LAYER)
    prepared = calls.prepare()
    calls.w.shape = (256, 256, 9, 1)
    hopper.launched.clear()
    with pytest.raises(ConvError, match=r"filter_shape \(256, 256, 3, 3\), the call has filter_sh"):
        cupyconv.conv_forward(calls.x, prepared, padding=1)
    assert hopper.launched == []


def test_it_is_refused_in_another_pass(hopper, memory):
    calls = Calls(memory, LAYER)
    prepared = calls.prepare(passes="forward")
    said = "it was prepared for forward, the call is backprop_input"
    with pytest.raises(ConvError, match=said):
        calls.backprop_input(prepared)
    with pytest.raises(ConvError, match=said):
        cupyconv.conv_transpose(calls.y, prepared, output_shape=calls.x.shape, **calls.how)


def test_it_is_refused_with_another_dtype(hopper, memory):
    prepared = Calls(memory, LAYER).prepare()
    with pytest.raises(ConvTypeError, match="x is float32, w is float16"):
        cupyconv.conv_forward(memory.array(LAYER.input_shape, "float32"), prepared, padding=1)


def test_it_is_refused_on_another_chip(gpu, memory):
    gpu("sm_90a")
    calls = Calls(memory, LAYER)
    prepared = calls.prepare()
    gpu("sm_80")
    said = r"prepared on Imaginary \(sm_90a\), the call is on Imaginary \(sm_80\)"
    with pytest.raises(ConvError, match=said):
        calls.forward(prepared)


def test_it_is_refused_with_arrays_of_another_home(hopper, memory):
    prepared = Calls(memory, LAYER).prepare()
    with pytest.raises(ConvTypeError, match="x is a NumPy array, w is a CuPy array"):
        cupyconv.conv_forward(np.ones(LAYER.input_shape, "float16"), prepared, padding=1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"passes": "backprop_filter"}, "unknown pass that reads a filter: 'backprop_filter'"),
        ({"precision": "fp8"}, "unknown precision: 'fp8'"),
        ({"impl": "cuda-patch"}, "the implementation must fit the problem"),
        ({"problem": LAYER.replace(dtype="bfloat16")}, "the problem's is 256x256x3x3 bfloat16"),
        ({"problem": in_formats(LAYER, "NHWC", "OHWI")}, "w is 256x256x3x3 float16, the problem's"),
    ],
    ids=["pass", "precision", "implementation", "dtype", "formats"],
)
def test_what_cannot_be_prepared(hopper, memory, words, said):
    w = memory.array(LAYER.filter_shape)
    with pytest.raises(ConvError) as error:
        cupyconv.prepare(w, **{"problem": LAYER, **words})
    assert said in str(error.value)
    assert hopper.launched == []


def test_objects_that_no_function_here_reads_say_so(hopper, memory):
    prepared = Calls(memory, LAYER).prepare()
    with pytest.raises(ConvTypeError, match=r"pass filter\.array here"):
        cupyconv.raw_ops.Conv2D(
            input=memory.array((1, 8, 8, 256)), filter=prepared, strides=[1] * 4, padding="SAME"
        )


# -- NumPy -----------------------------------------------------------------------------------------


def test_with_numpy_it_is_the_filter_itself():
    problem = LAYER.replace(input_shape=(2, 256, 5, 5), dtype="float32")
    data = integer_data(problem)
    prepared = cupyconv.prepare(data.w, problem)
    assert isinstance(prepared, PreparedFilter)
    assert prepared.array is data.w
    assert repr(prepared).endswith("on NumPy arrays, for forward and backprop_input: as it is)")
    rules = problem.keywords
    y = cupyconv.conv_forward(data.x, data.w, data.bias, **rules)
    assert (cupyconv.conv_forward(data.x, prepared, data.bias, **rules) == y).all()
    dx = cupyconv.conv_backprop_input(data.x.shape, data.w, data.dy, **rules)
    assert (cupyconv.conv_backprop_input(data.x.shape, prepared, data.dy, **rules) == dx).all()
    grads = cupyconv.conv_backward(data.x, prepared, data.dy, **rules)
    expected = cupyconv.conv_backward(data.x, data.w, data.dy, **rules)
    assert all((one == other).all() for one, other in zip(grads, expected, strict=True))
    with pytest.raises(ConvError, match="it was prepared with padding"):
        cupyconv.conv_forward(data.x, prepared)


def test_a_prepared_filter_is_not_kept_by_calls(hopper, memory):
    """What calls come to is remembered, and holds no memory."""
    import gc
    import weakref

    calls = Calls(memory, LAYER)
    prepared = calls.prepare()
    calls.forward(prepared)
    gone = weakref.ref(prepared)
    del prepared
    gc.collect()
    assert gone() is None
