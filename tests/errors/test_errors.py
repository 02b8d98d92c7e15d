"""Invalid input: the error's type, axis, rule, values and remedy; nothing is computed or written.

The tests apply the remedies that messages suggest.
"""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
import sys
import tomllib
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, DeviceError, arrays, backends
from cupyconv.errors import (
    KernelCompileError,
    install_command,
    reinstall_command,
)

pytestmark = pytest.mark.quick

F32 = np.float32


def ones(*shape: int, dtype: object = F32) -> np.ndarray:
    return np.ones(shape, dtype)


@pytest.fixture(autouse=True)
def nothing_is_computed(monkeypatch):
    """Forbid backends to allocate or run."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a result was allocated or computed before the input was rejected")

    for name in ("empty", "run", "sum_bias"):
        monkeypatch.setattr(backends.CpuBackend, name, forbidden)


# -- messages --------------------------------------------------------------------------------------

REFUSED = {
    # channels and groups
    "conv_forward(ones(1, 6, 5, 5), ones(4, 4, 3, 3))": "input channels must be the input's "
    "channels divided by groups: ...1x6x5x5 (NCHW) has C = 6, groups=1, so 6 per filter; filter "
    "4x4x3x3 (OIHW) has I = 4. Use I = 6 for the filter, or use C = 4 for the input",
    "conv_forward(ones(1, 6, 5, 5), ones(4, 3, 3, 3))": "divided by groups: ...has I = 3. Use "
    "groups=2, use I = 6 for the filter, or use C = 3 for the input",
    "ConvProblem((1, 6, 9), (8, 3, 3), groups=4)": "groups must divide the input channels: "
    "the input has 6, groups=4. Use groups=2",
    "ConvProblem((1, 6, 9), (4, 2, 3), groups=3)": "groups must divide the output channels: "
    "the output has 4, groups=3...Use groups=1 and use I = 6 for the filter; use O = 3 for the "
    "filter; use O = 6",
    "conv_forward(ones(1, 1, 5), ones(1, 1, 3), groups=0)": "groups must be at least 1: got 0. "
    "Use groups=1",
    "conv_forward(ones(1, 3, 5), ones(4, 3, 3), ones(4, 1))": "the bias must have one value for "
    "each output channel: ...the filter has 4 output channels. Pass a bias of shape (4,)",
    # gradients of other layers
    "conv_backprop_filter(ones(1, 3, 9, 8), (4, 3, 3, 3), ones(1, 4, 4, 4), stride=2)": "dy must "
    "have the output size that follows from the input...(axis W): an input of 8 gives floor((8 + "
    "0 + 0 - 3)/2) + 1 = 3, dy has 4; input sizes 9 to 10 would give 4. ...pass a dy of shape "
    "1x4x4x3 (NCHW)",
    "conv_backprop_input((1, 299, 299, 3), ones(11, 11, 3, 4), ones(1, 18, 18, 4), stride=16, "
    "padding='valid', data_format='NHWC')": "dy must have the output size...(axis H): ...input "
    "sizes 283 to 298 would give 18. Use an input of 283 to 298 by 283 to 298, or pass a dy of "
    "shape 1x19x19x4 (NHWC)",
    # sizes
    "conv_forward(ones(1, 1, 9, 6), ones(1, 1, 3, 4), padding=((0, 0), (1, 0)), dilation=(1, 3))"
    "": "the filter must fit into the padded input (axis W): a filter of 4 with dilation 3 spans "
    "10, the input of 6 with padding (1, 0) has 7. Pad by 3 more in total, use an input of at "
    "least 9, use a filter of at most 3, or use a dilation of at most 2",
    "ConvProblem((1, 0, 5), (1, 0, 3))": "every size but the batch must be at least 1: the input "
    "has C = 0. Use positive sizes: ...was read as NCW",
    "ConvProblem((1, 1, 0), (1, 1, 3))": "must be at least 1: the input has W = 0",
    "ConvProblem((1, 1, 5), (0, 1, 3))": "must be at least 1: the filter has O = 0",
    "ConvProblem((1, 1, 5), (1, 1, 0))": "must be at least 1: the filter has W = 0",
    "ConvProblem((1, 1, -5), (1, 1, 3))": "must be at least 1: the input has W = -5",
    "ConvProblem((1, 2, 4, 4), (1, 0, 2, 2))": "must be at least 1: the filter has I = 0",
    "ConvProblem((-1, 1, 5), (1, 1, 3))": "the batch must not be negative: the input has -1. Use "
    "0 or more",
    **{
        f"ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), {word}={value})": f"{word} must be at least "
        f"1{axis}: got {number}. Use 1 or more"
        for word in ("stride", "dilation")
        for value, number, axis in (
            *((0, 0, ""), (-1, -1, ""), ((1, 0), 0, " (axis W)"), ((-2, 1), -2, " (axis H)")),
        )
    },
    **{
        f"ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), padding={padding})": "padding must not be "
        f"negative (axis {axis}): got {pair}. Crop the input"
        for padding, pair, axis in (
            *((-1, (-1, -1), "H"), ((1, -2), (-2, -2), "W"), (((0, 0), (1, -1)), (1, -1), "W")),
        )
    },
    "ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), stride=(1, 1, 1))": "stride must be one integer"
    "...got 3 values for 2 spatial axes. Pass",
    "ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), dilation=[2])": "dilation must be one integer"
    "...got 1 value for 2 spatial axes. Pass",
    "ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), padding=(1, 1, 1))": "padding must be one integer"
    "...got 3 entries for 2 spatial axes. Pass",
    "ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), padding=((1, 2, 3), 0))": "the padding of an axis "
    "must be...got (1, 2, 3). Pass",
    # option values
    **{
        f"conv_forward(ones(1, 1, 5, 5), ones(1, 1, 3, 3), {what}={word!r})": f"unknown {what}: "
        f"{word!r}. Did you mean {suggestion!r}? Known: "
        for what, word, suggestion in (
            ("padding", "smae", "same"),
            ("padding", "VALDI", "valid"),
            ("data_format", "NCHV", "NCHW"),
            ("data_format", "channel_last", "channels_last"),
            ("filter_format", "OHIW", "OIHW"),
            ("activation", "rel", "relu"),
            ("precision", "tf23", "tf32"),
            ("impl", "numpi", "numpy"),
        )
    },
    "ConvProblem((1, 1, 5), (1, 1, 3), padding='zzz')": "unknown padding: 'zzz'. Known: 'valid', "
    "'same', 'same_lower'",
    "conv_backward(ones(1, 1, 5), ones(1, 1, 3), ones(1, 1, 3), needs=('input', 'filters'))": ""
    "unknown gradient in needs: 'filters'. Did you mean 'filter'?",
    **{
        f"ConvProblem((1, {size}, {size}), ({size}, {size}, 3), {what}={word!r})": f"{what} must "
        f'have as many spatial axes as the arrays: ...the input has 1. Use {what}="{suggestion}"'
        for what, word, suggestion, size in (
            ("data_format", "NHWC", "NWC", 3),
            ("data_format", "NCDHW", "NCW", 3),
            ("filter_format", "HWIO", "WIO", 3),
            ("filter_format", "ODHWI", "OWI", 3),
        )
    },
    "ConvProblem((1, 1, 5), (1, 1, 3), data_format='NHWC')": "'NHWC' has 2, the input has 1. Use "
    'data_format="NCW"',  # NWC contradicts the shapes
    "conv_forward(ones(1, 1, 5), ones(1, 1, 3), impl='cuda-generic')": "the implementation must "
    "run on the device: 'cuda-generic' does not run on cpu. Use one of 'auto', 'reference', "
    "'numpy', or a GPU, with CuPy arrays",
    "plan(ConvProblem((1, 1, 5), (1, 1, 3)), 'sm_80', impl='numpy')": "the implementation must "
    "run on the device: 'numpy' does not run on sm_80. ...or the CPU, with NumPy arrays",
    "plan(ConvProblem((1, 1, 5), (1, 1, 3)), 'gtx')": "a device must be 'cpu', an architecture or "
    "a card...got 'gtx'. Use, for example, 'sm_80'",
    "plan(ConvProblem((1, 1, 5), (1, 1, 3)), 'sm_61')": "compute capability 7.5 or later: sm_61 "
    "has 6.1. Use a newer GPU, or compute NumPy arrays on the CPU",
    # ranks
    **{
        f"conv_forward(ones{shape}, ones(1, 2, 3))": "a batch axis, a channel axis and 1 to 3 "
        f"spatial axes: ...has {axes}. Pass 3 axes for a 1-D"
        for shape, axes in (
            *(((), "0 axes"), ((3,), "1 axis"), ((3, 3), "2 axes")),
            ((1, 1, 2, 2, 2, 2), "6 axes"),
        )
    },
    "conv_forward(ones(1, 1, 5, 5), ones(1, 1, 3))": "the filter must have as many axes as the "
    "input: the input 1x1x5x5 has 4, the filter 1x1x3 has 3. Pass a filter with 4 axes, or an "
    "input with 3",
    "conv_backprop_bias(ones(3, 4))": "1 to 3 spatial axes: ...3x4 has 2 axes. Pass 3 axes",
    # transposed convolutions
    **{
        f"conv_transpose(ones(1, 1, 4, 4), ones(1, 1, 3, 3), stride={stride}, "
        f"output_padding={given})": "output_padding must be at least 0 and less than the stride"
        f"...(axis {axis}): got {number} with stride {stride} and dilation 1; {fits} would fit. "
        f"Use output_padding={remedy}"
        for given, stride, axis, number, fits, remedy in (
            (2, 2, "H", 2, "0 to 1", "1"),
            (-1, 2, "H", -1, "0 to 1", "0"),
            (1, 1, "H", 1, "0", "0, or use stride=2"),
            ((0, 3), 3, "W", 3, "0 to 2", "(0, 2)"),
        )
    },
    "conv_transpose(ones(1, 1, 4, 4), ones(1, 1, 3, 3), stride=(1, 2), dilation=3, "
    "output_padding=(2, 3))": "less than the stride or the dilation (axis W): got 3 with stride 2 "
    "and dilation 3; 0 to 2 would fit. Use output_padding=2",
    "conv_transpose(ones(1, 1, 4, 4), ones(1, 1, 3, 3), padding='same', dilation=3, "
    "output_padding=1)": "less than the stride (axis H): got 1 with stride 1; 0 would fit. Use "
    "output_padding=0, or use stride=2",
    "conv_transpose(ones(1, 1, 4, 4), ones(1, 1, 3, 3), stride=2, output_padding=(1,))": ""
    "output_padding must be one integer, or one for each spatial axis: got 1 value for 2 spatial "
    "axes. Pass one integer, or a sequence of 2",
    "conv_transpose(ones(1, 1, 4), ones(1, 1, 3), output_shape=(1, 1, 9), output_padding=0)": ""
    "output_shape and output_padding must not both be passed: got 1x1x9 and 0. Pass one of them",
    "conv_transpose(ones(1, 1, 4), ones(1, 1, 3), stride=2, output_shape=(1, 1, 11))": "the "
    "convolution of the result must have the size of x (axis W): a result of 11 has floor((11 + 0 "
    "+ 0 - 3)/2) + 1 = 5, x has 4. Use a result of 9 to 10",
    "conv_transpose(ones(1, 5, 4), ones(4, 2, 3))": "x must have one channel for each filter: x "
    "has 5 channels, and the filter has O = 4 (4x2x3, OIW). ...use O = 5 for the filter; or use "
    "C = 4 for x",
    "conv_transpose(ones(3, 4, 4), ones(4, 2, 3), output_shape=(2, 2, 6))": "a transposed "
    "convolution must keep the batch size: x has 3, the result has 2. Use N = 3 for the result",
    "conv_transpose(ones(1, 1, 3, 3), ones(1, 1, 3, 3), padding=4)": "at least 1 (axis H)..."
    "padding (4, 4)...Pad by at most 4 in total",
}
"""Parts of the ConvError's message in their order, separated by dots, keyed by the call."""

WRONG_TYPES = {
    **{
        f"ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), {word}={value!r})": f"{word} must be made of "
        f"integers: got {shown}...Pass an int"
        for word in ("stride", "dilation", "groups")
        for value, shown in (
            *((1.5, "1.5"), ("2", "'2'"), (None, "None")),
            ((1, 2.0), "(1, 2.0)" if word == "groups" else "2.0"),
        )
    },
    "ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), padding=0.5)": "padding must be made of integers: got "
    "0.5",
    **{
        f"conv_backprop_input({shape!r}, ones(1, 1, 3), ones(1, 1, 3))": "input_shape must be a "
        "tuple of integers...Pass"
        for shape in (5, "1x5", None)
    },
    "conv_backprop_filter(ones(1, 1, 5), (1, 1, 3.0), ones(1, 1, 3))": "filter_shape must be made "
    "of integers: got 3.0",
    "conv_forward(ones(1, 1, 5).astype('float16'), ones(1, 1, 3))": "all arrays must have one "
    "dtype: x is float16, w is float32...w.astype('float16')",
    "conv_forward(ones(1, 1, 5), ones(1, 1, 3), ones(1).astype('float64'))": "bias is float64",
    "conv_forward(ones(1, 1, 5), ones(1, 1, 3), out=[0, 0, 0])": "out must be a NumPy or CuPy "
    "array",
    "conv_forward(plan(ConvProblem((1, 1, 4, 4), (1, 1, 3, 3)), 'sm_80'), ones(1, 1, 3, 3))": ""
    "Pass a NumPy or CuPy array$",
    "raw_ops.Conv2DBackpropInput(input_sizes=None, filter=ones(3, 3, 1, 1), out_backprop=ones(1, "
    "3, 3, 1), strides=[1] * 4, padding='VALID')": "of type NoneType$",
}
"""Parts of the ConvTypeError's message, keyed by the call."""


NAMES = {name: getattr(cupyconv, name) for name in ("ConvProblem", "plan", "raw_ops")}
NAMES |= {name: getattr(cupyconv, name) for name in cupyconv.__all__ if name.startswith("conv_")}


def require_refused(call: Callable[[], object], expected: str, kind: type = ConvError) -> None:
    """Require an error whose message has these parts, in their order and separated by dots."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert isinstance(error, ValueError if kind is ConvError else TypeError)
    assert re.search(".*".join(map(re.escape, expected.split("..."))), f"{error}$"), error
    if kind is ConvError:
        axis = f" (axis {error.axis})" if error.axis else ""
        assert str(error) == f"{error.rule}{axis}: {error.values}. {error.remedy}"


@pytest.mark.parametrize("call", REFUSED)
def test_invalid_calls_state_rule_values_and_way_out(call):
    require_refused(lambda: eval(call, {"ones": ones, **NAMES}), REFUSED[call])


@pytest.mark.parametrize("call", WRONG_TYPES)
def test_arguments_of_wrong_types_are_rejected(call):
    require_refused(lambda: eval(call, {"ones": ones, **NAMES}), WRONG_TYPES[call], ConvTypeError)


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 5), st.integers(1, 9), st.data())
def test_input_sizes_in_the_message_are_correct(size, stride, taps, wrong, data):
    padding = data.draw(st.sampled_from(["same", "same_lower", 0, 1, 2]))
    try:
        problem = ConvProblem((1, 1, size), (1, 1, taps), stride=stride, padding=padding)
    except ConvError:
        return
    try:
        problem.require_output_gradient((1, 1, wrong))
    except ConvError as error:
        found = re.search(r"input sizes? (\d+)(?: to (\d+))? would give", error.values)
        fits = [
            s
            for s in range(1, 80)
            if s + 2 * (padding if isinstance(padding, int) else taps) >= taps
            and problem.replace(input_shape=(1, 1, s)).output_sizes == (wrong,)
        ]
        said = range(int(found[1]), int(found[2] or found[1]) + 1) if found else []
        assert fits == list(said)
        assert ("no input size would give" in error.values) == (not fits)  # noqa: PT017
    else:
        assert problem.output_sizes == (wrong,)


@pytest.mark.parametrize(
    ("shape", "rule", "values"),
    [
        ((2, 4, 3, 3), "the same batch size", "dy has 2, the input has 1"),
        ((1, 5, 3, 3), "one channel for each filter", "dy has 5 channels, the filter has O = 4"),
        ((1, 4, 3), "as many axes as the input", "dy is 1x4x3, the input is 1x3x5x5"),
        ((1, 4, 3, 0), "the output size that follows", "dy has 0; no input size would give 0"),
    ],
    ids=["batch", "channels", "rank", "no_size"],
)
def test_dy_of_another_layer_is_rejected(shape, rule, values):
    axis = " (axis W)" if shape[-1] == 0 else ""
    remedy = "ass a dy of shape 1x4x3x3 (NCHW)" if shape != (1, 5, 3, 3) else "O = 5"
    for call in (
        lambda: cupyconv.conv_backprop_input((1, 3, 5, 5), ones(4, 3, 3, 3), ones(*shape)),
        lambda: cupyconv.conv_backprop_filter(ones(1, 3, 5, 5), (4, 3, 3, 3), ones(*shape)),
        lambda: cupyconv.conv_backward(ones(1, 3, 5, 5), ones(4, 3, 3, 3), ones(*shape)),
    ):
        require_refused(call, f"{rule}...{axis}: ...{values}...{remedy}")


@given(
    st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2)
)
def test_remedies_of_a_too_large_filter_work(size, taps, dilation, before, after):
    def build(size=size, taps=taps, dilation=dilation, more=0):
        pads = ((before, after + more),)
        return ConvProblem((1, 1, size), (1, 1, taps), dilation=dilation, padding=pads)

    try:
        build()
    except ConvError as error:
        text = error.remedy.lower()
        by = {
            key: int(found[1])
            for key, pattern in {
                "more": r"pad by (\d+) more",
                "size": r"input of at least (\d+)",
                "taps": r"filter of at most (\d+)",
                "dilation": r"dilation of at most (\d+)",
            }.items()
            if (found := re.search(pattern, text))
        }
        assert {"more", "size", "taps"} <= set(by)
        for key, value in by.items():
            assert build(**{key: value}).output_sizes[0] >= 1
        # The suggested values are the closest that work.
        for key, nearer in (("more", -1), ("size", -1), ("taps", +1), ("dilation", +1)):
            if key in by and by[key] + nearer >= 1:
                with pytest.raises(ConvError):
                    build(**{key: by[key] + nearer})


@pytest.mark.parametrize(
    "dtype", ["int32", "uint8", "bool", "object", "clongdouble", "longdouble", "datetime64[s]"]
)
@pytest.mark.parametrize("name", ["x", "w", "dy"])
def test_unsupported_dtypes_are_rejected(name, dtype):
    given_arrays = {"x": ones(1, 1, 5), "w": ones(1, 1, 3), "dy": ones(1, 1, 3)}
    given_arrays[name] = given_arrays[name].astype(dtype)
    kind = given_arrays[name].dtype.name
    with pytest.raises(ConvTypeError) as caught:
        cupyconv.conv_backward(**given_arrays)
    message = str(caught.value)
    assert message.startswith(f"{name}: dtype must be one of float16, bfloat16, float32, float64")
    assert f"got {kind}" in message
    target = "complex128" if kind.startswith("complex") else "float32"
    assert f"{name}.astype({target!r})" in message


class Exporter:
    """Object whose DLPack device and capsule are given values, or exceptions to raise."""

    def __init__(self, device=(1, 0), memory=None):
        self.device, self.memory = device, memory

    def __dlpack_device__(self):
        if isinstance(self.device, BaseException):
            raise self.device
        return self.device

    def __dlpack__(self, **_):
        if isinstance(self.memory, BaseException):
            raise self.memory
        return self.memory


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": KeyError("queue")}, "KeyError: 'queue'"),
        ({"device": AttributeError("no context")}, "AttributeError: no context"),
        ({"device": ZeroDivisionError("by zero")}, "ZeroDivisionError: by zero"),
        ({"device": ()}, "IndexError"),
        ({"device": None}, "subscriptable"),
        ({"device": ("one", 0)}, "one"),
        ({"memory": BufferError("it needs grad")}, "memory: it needs grad. Pass a NumPy or CuPy"),
        ({"memory": KeyError("queue")}, "KeyError: 'queue'"),
        ({"memory": AttributeError("no context")}, "AttributeError: no context"),
        ({"memory": OSError("unplugged")}, "OSError: unplugged"),
        ({"memory": RuntimeError("on strike")}, "on strike"),
        ({"memory": 7}, "does not export its memory"),
    ],
)
def test_exceptions_of_exporters_are_quoted(given, words):
    for call in (
        lambda: cupyconv.conv_forward(Exporter(**given), ones(1, 1, 3)),
        lambda: cupyconv.conv_backprop_bias(Exporter(**given)),
        lambda: cupyconv.conv_forward(ones(1, 1, 5), ones(1, 1, 3), out=Exporter(**given)),
    ):
        with pytest.raises(ConvTypeError, match="does not export its memory") as caught:
            call()
        assert words in str(caught.value)
        assert caught.value.__cause__ is not None


@pytest.mark.parametrize("error", [MemoryError("full"), KeyboardInterrupt(), DeviceError("gone")])
def test_errors_outside_the_exporter_propagate(error):
    with pytest.raises(type(error)):
        cupyconv.conv_forward(Exporter(memory=error), ones(1, 1, 3))


def test_exceptions_of_attributes_are_quoted():
    class Strange:
        @property
        def requires_grad(self):
            raise KeyError("graph")

    with pytest.raises(ConvTypeError, match="does not export its memory: KeyError: 'graph'"):
        cupyconv.conv_forward(Strange(), ones(1, 1, 3))


# -- missing packages ------------------------------------------------------------------------------


def test_missing_cupy_suggests_an_install_command(monkeypatch):
    """The error appears even if CuPy was imported before."""
    with suppress(DeviceError):
        arrays.cupy()
    monkeypatch.setitem(sys.modules, "cupy", None)
    exporter = SimpleNamespace(__cuda_array_interface__={})
    with pytest.raises(DeviceError) as caught:
        cupyconv.conv_forward(exporter, exporter)
    assert "pip install 'cupy-cuda13x[ctk]>=14.2'" in str(caught.value)


def test_device_count_is_0_without_cupy_or_a_driver(monkeypatch):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    found = 0
    with suppress(cupy.cuda.runtime.CUDARuntimeError):  # no driver
        found = cupy.cuda.runtime.getDeviceCount()
    assert arrays.device_count.__wrapped__() == found
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert arrays.device_count.__wrapped__() == 0


def test_missing_gpu_is_reported(monkeypatch):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    monkeypatch.setattr(arrays, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="no usable GPU"):
        arrays.require_gpu()


# -- out -------------------------------------------------------------------------------------------


def calls_with_out(out):
    """Return a call of each function that takes ``out``, with a result of shape 1x1x3."""
    x, w, dy = ones(1, 1, 5), ones(1, 1, 3), ones(1, 1, 3)
    return {
        "y": lambda: cupyconv.conv_forward(x, w, out=out),
        "dx": lambda: cupyconv.conv_backprop_input((1, 1, 3), w, dy[..., :1], out=out),
        "dw": lambda: cupyconv.conv_backprop_filter(x, (1, 1, 3), dy, out=out),
        "transposed": lambda: cupyconv.conv_transpose(dy[..., :1], w, out=out),
    }


@pytest.mark.parametrize("which", ["y", "dx", "dw", "transposed"])
@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.full((1, 1, 4), 7, F32), "out must have the result's shape: out is 1x1x4, the result "
         "is 1x1x3. Pass an array of shape (1, 1, 3)"),
        (np.full((1, 1, 3), 7.0), "out must have the inputs' dtype: out is float64, the inputs "
         "are float32. Pass"),
        (np.broadcast_to(F32(7), (1, 1, 3)), "out must be writeable: ...read-only. Pass a "
         "writeable array"),
    ],
    ids=["shape", "dtype", "read-only"],
)  # fmt: skip
def test_out_must_fit_the_result(which, out, message):
    kind = ConvTypeError if out.dtype == float else ConvError
    require_refused(calls_with_out(out)[which], message, kind)
    assert np.all(out == 7)


OVERLAPS = {
    "x, y": lambda x, y: cupyconv.conv_forward(x, ones(1, 1, 1), out=y),
    "w, y": lambda w, y: cupyconv.conv_forward(ones(1, 1, 5), w, out=y[..., :3]),
    "bias, y": lambda b, y: cupyconv.conv_forward(ones(1, 1, 3), ones(1, 1, 1), b[0, 0, :1], out=y),
    "dy, dx": lambda dy, dx: cupyconv.conv_backprop_input((1, 1, 3), ones(1, 1, 1), dy, out=dx),
    "dy, db": lambda dy, db: cupyconv.conv_backprop_bias(dy, out=db[0, 0, 2:]),
    "x, transposed": lambda x, y: cupyconv.conv_transpose(x, ones(1, 1, 1), out=y),
}
"""Calls whose input, the first name, overlaps their result, by names."""


@pytest.mark.parametrize("names", OVERLAPS)
def test_out_must_not_overlap_an_input(names):
    memory, name = np.arange(12, dtype=F32), names.partition(",")[0]
    given, out = memory[2:5].reshape(1, 1, 3), memory[:3].reshape(1, 1, 3)
    require_refused(
        lambda: OVERLAPS[names](given, out),
        f"out must not share memory with an input: out overlaps {name}. Pass a new array as out, "
        f"or a copy of {name}",
    )
    np.testing.assert_array_equal(memory, np.arange(12))


def views(rng, memory):
    """Yield ordinary views of one memory, and views with random shapes and strides."""
    size = memory.itemsize
    block = memory[: 6 * 5 * 4 * 3].reshape(6, 5, 4, 3)
    for _ in range(4):
        steps = tuple(slice(None, None, rng.choice((1, 1, 2, -1, -2))) for _ in range(4))
        yield block.transpose(rng.permutation(4))[steps]
    yield np.einsum("nnhw->nhw", block[:5])
    yield block[:, :, 1:2, ::2]
    for _ in range(12):
        shape = tuple(int(n) for n in rng.integers(1, 5, 4))
        strides = tuple(int(s) for s in rng.integers(-13, 14, 4) * rng.choice((1, size)))
        yield np.lib.stride_tricks.as_strided(memory[1000:], shape, strides)


def test_overlaps_itself_is_exact():
    rng = np.random.default_rng(0)
    memory = np.zeros(4000, F32)
    answers = {True: 0, False: 0}
    for _ in range(60):
        for view in views(rng, memory):
            offsets = sum(
                np.arange(n).reshape(-1, *[1] * (view.ndim - 1 - axis)) * stride
                for axis, (n, stride) in enumerate(zip(view.shape, view.strides, strict=True))
            )
            each = (np.ravel(offsets)[:, None] + np.arange(view.itemsize)).ravel()
            expected = len(np.unique(each)) < each.size
            got = arrays.overlaps_itself(view.shape, view.strides, view.itemsize)
            assert got == expected, (view.shape, view.strides)
            answers[got] += 1
    assert min(answers.values()) > 200


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1), (2**40, 2**20)])
def test_overlaps_itself_handles_extreme_shapes(shape):
    strides = np.lib.stride_tricks.as_strided(np.zeros(1), (1,) * len(shape)).strides
    contiguous, step = [], 8
    for size in reversed(shape):
        contiguous.insert(0, step)
        step *= size
    assert not arrays.overlaps_itself(shape, tuple(contiguous), 8)
    assert len(strides) == len(shape)
    assert arrays.overlaps_itself(shape, (0,) * len(shape), 8) == (np.prod(shape, dtype=float) > 1)


def overlapping(shape, how):
    """Return memory filled with 7, and a writeable view of it whose elements share memory."""
    memory = np.full(100, 7, F32)
    strides = (40, 20, 2) if how == "half an element" else (0,) * len(shape)
    return memory, np.lib.stride_tricks.as_strided(memory, shape, strides, writeable=True)


@pytest.mark.parametrize("which", ["y", "dx", "dw", "transposed"])
@pytest.mark.parametrize("how", ["broadcast", "half an element"])
def test_out_with_overlapping_elements_is_rejected(which, how):
    memory, out = overlapping((1, 1, 3), how)
    assert out.flags.writeable
    for _ in range(2):
        require_refused(
            calls_with_out(out)[which],
            "the elements of out must not overlap in memory: out has shape (1, 1, 3) and strides "
            "of...Pass a new array, and copy the result from it",
        )
    assert np.all(memory == 7)


def test_out_of_a_bias_gradient_must_not_overlap_itself():
    memory, out = overlapping((3,), "broadcast")
    with pytest.raises(ConvError, match="elements of out must not overlap in memory"):
        cupyconv.conv_backprop_bias(ones(1, 3, 4), out=out)
    assert np.all(memory == 7)


# -- memory ----------------------------------------------------------------------------------------


def test_rejecting_input_allocates_no_memory():
    x = np.broadcast_to(F32(1), (2**10, 6, 2**10, 2**10))
    w = np.broadcast_to(F32(1), (2**10, 6, 3, 3))
    dy = np.broadcast_to(F32(1), (2**10, 2**10, 2**9, 2**9))
    refusals = [
        lambda: cupyconv.conv_forward(x, w, groups=4),
        lambda: cupyconv.conv_forward(x, w, out=np.broadcast_to(F32(1), (1,))),
        lambda: cupyconv.conv_forward(x, w, np.ones(7, F32)),
        lambda: cupyconv.conv_forward(x, w, impl="cuda-generic"),
        lambda: cupyconv.conv_backprop_input(x.shape, w, dy),
        lambda: cupyconv.conv_backprop_filter(x, w.shape, dy),
        lambda: cupyconv.conv_backward(x, w, dy),
        lambda: cupyconv.conv_transpose(dy, w, stride=2, output_padding=2),
    ]
    tracemalloc.start()
    try:
        for refusal in refusals:
            with pytest.raises(ConvError):
                refusal()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


# -- error classes ---------------------------------------------------------------------------------


def test_compile_error_includes_the_log():
    error = KernelCompileError("conv_forward.cu did not compile", "line 3: no")
    assert error.log == "line 3: no"
    assert str(error) == "conv_forward.cu did not compile\nline 3: no"
    assert str(KernelCompileError("it did not compile", "")) == "it did not compile"


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "onnx", "dask"])
def test_install_commands_match_the_projects_extras(extra):
    command = install_command(extra)
    assert command.startswith("pip install ")
    given = {Requirement(text) for text in shlex.split(command)[2:]}
    project = Path(cupyconv.__file__).parents[1] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert given == {Requirement(text) for text in extras[extra]}


def test_reinstall_command_uses_the_original_source():
    *_, source = shlex.split(reinstall_command())
    assert Path(source).resolve() == Path(cupyconv.__file__).resolve().parents[1]


def test_unknown_impl_lists_those_of_the_device():
    dask_array = pytest.importorskip("dask.array")
    x, w = ones(1, 1, 5), ones(1, 1, 3)
    calls = [lambda impl: cupyconv.conv_forward(x, w, impl=impl)]
    module = importlib.import_module("cupyconv.dask")
    calls.append(lambda impl: module.conv_forward(dask_array.from_array(x), w, impl=impl))
    for call, impl in itertools.product(calls, ("fastest", None)):
        with pytest.raises(ConvError, match=r"Known: 'auto', 'reference', 'numpy'$"):
            call(impl)
