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
    CupyconvError,
    KernelCompileError,
    install_command,
    one_of,
    reinstall_command,
    unknown_word,
)
from tests.ways_out import alternatives, applied

pytestmark = pytest.mark.quick

F32 = np.float32


def ones(*shape: int, dtype: object = F32) -> np.ndarray:
    return np.ones(shape, dtype)


@pytest.fixture(autouse=True)
def nothing_is_computed(request, monkeypatch):
    """Forbid backends to allocate or run, except in tests that request ``computes``."""
    if "computes" in request.fixturenames:
        return

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a result was allocated or computed before the input was rejected")

    for name in ("empty", "run", "sum_bias"):
        monkeypatch.setattr(backends.Backend, name, forbidden)


@pytest.fixture
def computes():
    """Let a test use a working backend."""


def refused(call, *, rule: str, values: str, remedy: str, axis: str | None = None) -> ConvError:
    """Return the ConvError of a call, after checking its parts."""
    with pytest.raises(ConvError) as caught:
        call()
    error = caught.value
    assert isinstance(error, ValueError)
    assert rule in error.rule
    assert values in error.values
    assert remedy in error.remedy
    assert error.axis == axis
    for part in (error.rule, error.values, error.remedy):
        assert part
        assert part in str(error)
    assert str(error).index(error.rule) < str(error).index(error.remedy)
    assert (f"axis {axis}" in str(error)) == (axis is not None)
    return error


# -- channels and groups ---------------------------------------------------------------------------


def test_input_channels_must_match_the_filter():
    error = refused(
        lambda: cupyconv.conv_forward(ones(1, 6, 5, 5), ones(4, 4, 3, 3)),
        rule="input channels must be the input's channels divided by groups",
        values="C = 6, groups=1, so 6 per filter; filter 4x4x3x3 (OIHW) has I = 4",
        remedy="Use I = 6 for the filter, or use C = 4 for the input",
    )
    assert "1x6x5x5 (NCHW)" in str(error)
    ConvProblem((1, 6, 5, 5), (4, 6, 3, 3))
    ConvProblem((1, 4, 5, 5), (4, 4, 3, 3))


def test_channels_that_fit_other_groups_suggest_them():
    refused(
        lambda: cupyconv.conv_forward(ones(1, 6, 5, 5), ones(4, 3, 3, 3)),
        rule="divided by groups",
        values="has I = 3",
        remedy="Use groups=2, use I = 6 for the filter, or use C = 3 for the input",
    )
    ConvProblem((1, 6, 5, 5), (4, 3, 3, 3), groups=2)


@pytest.mark.parametrize(
    ("shapes", "rest"),
    [
        (((1, 5, 5, 3), (3, 3, 3, 4)), {}),
        (((1, 5, 5, 3), (4, 3, 3, 3)), {"filter_format": "OIHW"}),
        (((1, 5, 5, 4), (3, 3, 1, 8)), {"groups": 4}),
        (((2, 9, 6), (3, 6, 4)), {}),
    ],
)
def test_channels_last_shapes_suggest_a_data_format(shapes, rest):
    """The shapes are in TensorFlow's order and lack a data_format."""
    with pytest.raises(ConvError) as caught:
        ConvProblem(*shapes, **rest)
    word = re.match(r'Use data_format="(\w+)"', caught.value.remedy)[1]
    assert ConvProblem(*shapes, **rest, data_format=word).input_shape == shapes[0]


def test_swapped_memory_order_suggests_formats():
    refused(
        lambda: cupyconv.conv_forward(ones(1, 32, 32, 3), ones(8, 3, 3, 3)),
        rule="divided by groups",
        values="input 1x32x32x3 (NCHW) has C = 32",
        remedy='Use data_format="NHWC" and filter_format="OIHW"',
    )
    problem = ConvProblem((1, 32, 32, 3), (8, 3, 3, 3), data_format="NHWC", filter_format="OIHW")
    assert problem.output_shape == (1, 30, 30, 8)


def test_groups_must_divide_the_input_channels():
    refused(
        lambda: ConvProblem((1, 6, 9), (8, 3, 3), groups=4),
        rule="groups must divide the input channels",
        values="the input has 6, groups=4",
        remedy="Use groups=2",
    )
    ConvProblem((1, 6, 9), (8, 3, 3), groups=2)


def test_groups_must_divide_the_output_channels():
    refused(
        lambda: ConvProblem((1, 6, 9), (4, 2, 3), groups=3),
        rule="groups must divide the output channels",
        values="the output has 4, groups=3",
        remedy="Use groups=1 and use I = 6 for the filter; use O = 3 for the filter; use O = 6",
    )
    ConvProblem((1, 6, 9), (4, 6, 3), groups=1)
    ConvProblem((1, 6, 9), (6, 2, 3), groups=3)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_remedies_of_wrong_channels_work(channels, filters, depth, groups):
    shape, filter_shape = (1, channels, 4), (filters, depth, 2)
    try:
        ConvProblem(shape, filter_shape, groups=groups)
    except ConvError as error:
        given = {"input_shape": shape, "filter_shape": filter_shape, "groups": groups}
        for repair in alternatives(error.remedy):  # an empty remedy has no alternatives
            ConvProblem(**applied(given, repair))
    else:
        assert channels == depth * groups
        assert filters % groups == 0


# -- gradients of other layers ---------------------------------------------------------------------


def test_dy_must_have_the_output_size():
    error = refused(
        lambda: cupyconv.conv_backprop_filter(
            ones(1, 3, 9, 8), (4, 3, 3, 3), ones(1, 4, 4, 4), stride=2
        ),
        rule="dy must have the output size that follows from the input",
        values="an input of 8 gives floor((8 + 0 + 0 - 3)/2) + 1 = 3, dy has 4; "
        "input sizes 9 to 10 would give 4",
        remedy="pass a dy of shape 1x4x4x3 (NCHW)",
        axis="W",
    )
    assert "(axis W)" in str(error)


def test_input_shape_must_fit_dy():
    refused(
        lambda: cupyconv.conv_backprop_input(
            (1, 299, 299, 3),
            ones(11, 11, 3, 4),
            ones(1, 18, 18, 4),
            stride=16,
            padding="valid",
            data_format="NHWC",
        ),
        rule="dy must have the output size",
        values="input sizes 283 to 298 would give 18",
        remedy="Use an input of 283 to 298 by 283 to 298, or pass a dy of shape 1x19x19x4 (NHWC)",
        axis="H",
    )


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
    for call in (
        lambda: cupyconv.conv_backprop_input((1, 3, 5, 5), ones(4, 3, 3, 3), ones(*shape)),
        lambda: cupyconv.conv_backprop_filter(ones(1, 3, 5, 5), (4, 3, 3, 3), ones(*shape)),
        lambda: cupyconv.conv_backward(ones(1, 3, 5, 5), ones(4, 3, 3, 3), ones(*shape)),
    ):
        axis = "W" if shape[-1] == 0 else None
        remedy = "ass a dy of shape 1x4x3x3 (NCHW)" if shape != (1, 5, 3, 3) else "O = 5"
        refused(call, rule=rule, values=values, remedy=remedy, axis=axis)


def test_bias_of_another_layer_is_rejected():
    for shape in ((3,), (4, 1), ()):
        refused(
            lambda shape=shape: cupyconv.conv_forward(
                ones(1, 3, 5), ones(4, 3, 3), np.ones(shape, F32)
            ),
            rule="the bias must have one value for each output channel",
            values="the filter has 4 output channels",
            remedy="Pass a bias of shape (4,)",
        )


# -- sizes -----------------------------------------------------------------------------------------


def test_filter_must_fit_into_the_padded_input():
    refused(
        lambda: cupyconv.conv_forward(
            ones(1, 1, 9, 6), ones(1, 1, 3, 4), padding=((0, 0), (1, 0)), dilation=(1, 3)
        ),
        rule="the filter must fit into the padded input",
        values="a filter of 4 with dilation 3 spans 10, the input of 6 with padding (1, 0) has 7",
        remedy="Pad by 3 more in total, use an input of at least 9, use a filter of at most 3, "
        "or use a dilation of at most 2",
        axis="W",
    )


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


@pytest.mark.parametrize("word", ["stride", "dilation"])
@pytest.mark.parametrize(
    ("value", "axis"), [(0, None), (-1, None), ((1, 0), "W"), ((-2, 1), "H")], ids=str
)
def test_stride_and_dilation_must_be_at_least_1(word, value, axis):
    number = value if isinstance(value, int) else min(value)
    refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5, 5), ones(1, 1, 3, 3), **{word: value}),
        rule=f"{word} must be at least 1",
        values=f"got {number}",
        remedy="Use 1 or more",
        axis=axis,
    )


def test_groups_must_be_at_least_1():
    refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5), ones(1, 1, 3), groups=0),
        rule="groups must be at least 1",
        values="got 0",
        remedy="Use groups=1",
    )


@pytest.mark.parametrize(
    ("input_shape", "filter_shape", "values"),
    [
        ((1, 0, 5), (1, 0, 3), "the input has C = 0"),
        ((1, 1, 0), (1, 1, 3), "the input has W = 0"),
        ((1, 1, 5), (0, 1, 3), "the filter has O = 0"),
        ((1, 1, 5), (1, 1, 0), "the filter has W = 0"),
        ((1, 1, -5), (1, 1, 3), "the input has W = -5"),
        ((1, 2, 4, 4), (1, 0, 2, 2), "the filter has I = 0"),
    ],
)
def test_sizes_must_be_at_least_1(input_shape, filter_shape, values):
    error = refused(
        lambda: ConvProblem(input_shape, filter_shape),
        rule="every size but the batch must be at least 1",
        values=values,
        remedy="Use positive sizes",
    )
    assert "was read as NC" in error.remedy


def test_negative_batch_is_rejected():
    refused(
        lambda: ConvProblem((-1, 1, 5), (1, 1, 3)),
        rule="the batch must not be negative",
        values="the input has -1",
        remedy="Use 0 or more",
    )


@pytest.mark.parametrize(
    ("padding", "values", "axis"),
    [
        (-1, "got (-1, -1)", "H"),
        ((1, -2), "got (-2, -2)", "W"),
        (((0, 0), (1, -1)), "got (1, -1)", "W"),
    ],
    ids=str,
)
def test_negative_padding_is_rejected(padding, values, axis):
    refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5, 5), ones(1, 1, 3, 3), padding=padding),
        rule="padding must not be negative",
        values=values,
        remedy="Crop the input",
        axis=axis,
    )


@pytest.mark.parametrize(
    ("arguments", "rule", "values"),
    [
        ({"stride": (1, 1, 1)}, "stride must be one integer", "got 3 values for 2 spatial axes"),
        ({"dilation": [2]}, "dilation must be one integer", "got 1 value for 2 spatial axes"),
        ({"padding": (1, 1, 1)}, "padding must be one integer", "got 3 entries for 2 spatial"),
        ({"padding": ((1, 2, 3), 0)}, "the padding of an axis must be", "got (1, 2, 3)"),
    ],
)
def test_wrong_number_of_values_is_rejected(arguments, rule, values):
    refused(
        lambda: ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), **arguments),
        rule=rule,
        values=values,
        remedy="Pass",
    )


# -- option values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what", "given_word", "suggestion"),
    [
        ({"padding": "smae"}, "padding", "smae", "same"),
        ({"padding": "VALDI"}, "padding", "VALDI", "valid"),
        ({"data_format": "NCHV"}, "data_format", "NCHV", "NCHW"),
        ({"data_format": "channel_last"}, "data_format", "channel_last", "channels_last"),
        ({"filter_format": "OHIW"}, "filter_format", "OHIW", "OIHW"),
        ({"activation": "rel"}, "activation", "rel", "relu"),
        ({"precision": "tf23"}, "precision", "tf23", "tf32"),
        ({"impl": "numpi"}, "impl", "numpi", "numpy"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unknown_values_suggest_the_closest(arguments, what, given_word, suggestion):
    error = refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5, 5), ones(1, 1, 3, 3), **arguments),
        rule=f"unknown {what}",
        values=repr(given_word),
        remedy=f"Did you mean {suggestion!r}?",
    )
    assert "Known: " in error.remedy


def test_dissimilar_value_lists_all_known_values():
    refused(
        lambda: ConvProblem((1, 1, 5), (1, 1, 3), padding="zzz"),
        rule="unknown padding",
        values="'zzz'",
        remedy="Known: 'valid', 'same', 'same_lower'",
    )


def test_suggested_values_are_accepted(computes):
    x, w = ones(1, 1, 5, 5), ones(1, 1, 3, 3)
    for arguments in (
        {"padding": "same"},
        {"padding": "valid"},
        {"padding": "same_lower"},
        {"data_format": "NCHW"},
        {"data_format": "channels_first"},
        {"filter_format": "OIHW"},
        {"activation": "relu"},
        {"precision": "tf32"},
        {"impl": "numpy"},
    ):
        cupyconv.conv_forward(x, w, **arguments)


def test_unknown_gradient_is_rejected():
    refused(
        lambda: cupyconv.conv_backward(
            ones(1, 1, 5), ones(1, 1, 3), ones(1, 1, 3), needs=("input", "filters")
        ),
        rule="unknown gradient in needs",
        values="'filters'",
        remedy="Did you mean 'filter'?",
    )


@pytest.mark.parametrize(
    ("arguments", "what", "suggestion"),
    [
        ({"data_format": "NHWC"}, "data_format", "NWC"),
        ({"data_format": "NCDHW"}, "data_format", "NCW"),
        ({"filter_format": "HWIO"}, "filter_format", "WIO"),
        ({"filter_format": "ODHWI"}, "filter_format", "OWI"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_format_of_another_rank_suggests_its_counterpart(arguments, what, suggestion):
    refused(
        lambda: ConvProblem((1, 3, 3), (3, 3, 3), **arguments),
        rule=f"{what} must have as many spatial axes as the arrays",
        values=", the input has 1",
        remedy=f'Use {what}="{suggestion}"',
    )


def test_formats_that_contradict_the_shapes_are_not_suggested():
    refused(
        lambda: ConvProblem((1, 1, 5), (1, 1, 3), data_format="NHWC"),
        rule="data_format must have as many spatial axes",
        values="'NHWC' has 2, the input has 1",
        remedy='Use data_format="NCW"',
    )
    with pytest.raises(ConvError):
        ConvProblem((1, 1, 5), (1, 1, 3), data_format="NWC")


def test_implementation_of_another_device_is_rejected():
    refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5), ones(1, 1, 3), impl="cuda-generic"),
        rule="the implementation must run on the device",
        values="'cuda-generic' does not run on cpu",
        remedy="Use one of 'auto', 'reference', 'numpy', or a GPU, with CuPy arrays",
    )
    refused(
        lambda: cupyconv.plan(ConvProblem((1, 1, 5), (1, 1, 3)), "sm_80", impl="numpy"),
        rule="the implementation must run on the device",
        values="'numpy' does not run on sm_80",
        remedy="or the CPU, with NumPy arrays",
    )


def test_unknown_and_old_devices_are_rejected():
    problem = ConvProblem((1, 1, 5), (1, 1, 3))
    refused(
        lambda: cupyconv.plan(problem, "gtx"),
        rule="a device must be 'cpu', an architecture or a card",
        values="got 'gtx'",
        remedy="Use, for example, 'sm_80'",
    )
    refused(
        lambda: cupyconv.plan(problem, "sm_61"),
        rule="compute capability 7.5 or later",
        values="sm_61 has 6.1",
        remedy="Use a newer GPU, or compute NumPy arrays on the CPU",
    )
    cupyconv.plan(problem, "sm_80")


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (3, 3), (1, 1, 2, 2, 2, 2)], ids=str)
def test_input_must_have_a_supported_rank(shape):
    refused(
        lambda: cupyconv.conv_forward(np.ones(shape, F32), ones(1, 2, 3)),
        rule="a batch axis, a channel axis and 1 to 3 spatial axes",
        values="has 1 axis" if len(shape) == 1 else f"has {len(shape)} axes",
        remedy="Pass 3 axes for a 1-D",
    )


def test_filter_must_have_the_inputs_rank():
    refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5, 5), ones(1, 1, 3)),
        rule="the filter must have as many axes as the input",
        values="the input 1x1x5x5 has 4, the filter 1x1x3 has 3",
        remedy="Pass a filter with 4 axes, or an input with 3",
    )


def test_bias_gradient_rejects_other_ranks():
    refused(
        lambda: cupyconv.conv_backprop_bias(ones(3, 4)),
        rule="1 to 3 spatial axes",
        values="3x4 has 2 axes",
        remedy="Pass 3 axes",
    )


# -- types of arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"), [(1.5, "1.5"), ("2", "'2'"), (None, "None"), ((1, 2.0), "2.0")], ids=str
)
@pytest.mark.parametrize("word", ["stride", "dilation", "groups"])
def test_sizes_must_be_integers(word, value, shown):
    if word == "groups" and isinstance(value, tuple):
        shown = "(1, 2.0)"
    with pytest.raises(ConvTypeError, match=f"{word} must be made of integers") as caught:
        ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), **{word: value})
    assert isinstance(caught.value, TypeError)
    assert f"got {shown}" in str(caught.value)
    assert "Pass an int" in str(caught.value)


def test_padding_must_be_integers():
    with pytest.raises(ConvTypeError, match=r"padding must be made of integers: got 0\.5"):
        ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), padding=0.5)


@pytest.mark.parametrize("shape", [5, "1x5", None], ids=str)
def test_shapes_must_be_tuples(shape):
    with pytest.raises(ConvTypeError, match=r"input_shape must be a tuple of integers.*Pass"):
        cupyconv.conv_backprop_input(shape, ones(1, 1, 3), ones(1, 1, 3))


def test_shape_with_a_float_is_rejected():
    with pytest.raises(ConvTypeError, match=r"filter_shape must be made of integers: got 3\.0"):
        cupyconv.conv_backprop_filter(ones(1, 1, 5), (1, 1, 3.0), ones(1, 1, 3))


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


def test_mixed_dtypes_are_rejected():
    with pytest.raises(ConvTypeError) as caught:
        cupyconv.conv_forward(ones(1, 1, 5, dtype=np.float16), ones(1, 1, 3))
    assert "all arrays must have one dtype: x is float16, w is float32" in str(caught.value)
    assert "w.astype('float16')" in str(caught.value)
    with pytest.raises(ConvTypeError, match="bias is float64"):
        cupyconv.conv_forward(ones(1, 1, 5), ones(1, 1, 3), np.ones(1))


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
def test_out_must_have_the_results_shape(which):
    out = np.full((1, 1, 4), 7, F32)
    refused(
        calls_with_out(out)[which],
        rule="out must have the result's shape",
        values="out is 1x1x4, the result is 1x1x3",
        remedy="Pass an array of shape (1, 1, 3)",
    )
    assert np.all(out == 7)


@pytest.mark.parametrize("which", ["y", "dx", "dw", "transposed"])
def test_out_must_have_the_results_dtype(which):
    out = np.full((1, 1, 3), 7, np.float64)
    with pytest.raises(ConvTypeError, match=r"out is float64, the inputs are float32\. Pass"):
        calls_with_out(out)[which]()
    assert np.all(out == 7)


@pytest.mark.parametrize("which", ["y", "dx", "dw", "transposed"])
def test_out_must_be_writeable(which):
    out = np.full((1, 1, 3), 7, F32)
    out.flags.writeable = False
    refused(
        calls_with_out(out)[which],
        rule="out must be writeable",
        values="read-only",
        remedy="Pass a writeable array",
    )
    assert np.all(out == 7)


def test_out_must_be_an_array():
    with pytest.raises(ConvTypeError, match="out must be a NumPy or CuPy array"):
        cupyconv.conv_forward(ones(1, 1, 5), ones(1, 1, 3), out=[0, 0, 0])


@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_out_must_not_overlap_an_input(name):
    memory = np.arange(12, dtype=F32)
    before = memory.copy()
    given_arrays = {"x": ones(1, 1, 5), "w": ones(1, 1, 3), "bias": ones(1)}
    size = given_arrays[name].size
    given_arrays[name] = memory[2 : 2 + size].reshape(given_arrays[name].shape)
    refused(
        lambda: cupyconv.conv_forward(**given_arrays, out=memory[:3].reshape(1, 1, 3)),
        rule="out must not share memory with an input",
        values=f"out overlaps {name}",
        remedy=f"Pass a new array as out, or a copy of {name}",
    )
    np.testing.assert_array_equal(memory, before)


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
        refused(
            calls_with_out(out)[which],
            rule="the elements of out must not overlap in memory",
            values="out has shape (1, 1, 3) and strides of",
            remedy="Pass a new array, and copy the result from it",
        )
    assert np.all(memory == 7)


def test_out_of_a_bias_gradient_must_not_overlap_itself():
    memory, out = overlapping((3,), "broadcast")
    with pytest.raises(ConvError, match="elements of out must not overlap in memory"):
        cupyconv.conv_backprop_bias(ones(1, 3, 4), out=out)
    assert np.all(memory == 7)


def test_out_may_be_any_ordinary_view(computes):
    x, w = ones(2, 2, 6, 6), ones(3, 2, 3, 3)
    expected = cupyconv.conv_forward(x, w)
    room = np.zeros((4, 6, 8, 8), F32)
    for out in (
        room[:2, ::2, 4:, 4:],
        room[::-1, ::-1, ::-1, ::-1][:2, :3, :4, :4],
        room[::2, 1:4, ::2, ::2],
        room.transpose(1, 0, 3, 2)[:2, 1:4, :4, ::2],
        np.moveaxis(np.zeros((2, 4, 4, 3), F32), -1, 1),
        np.asfortranarray(np.zeros((2, 3, 4, 4), F32)),
    ):
        assert cupyconv.conv_forward(x, w, out=out) is out
        np.testing.assert_array_equal(out, expected)


def test_out_of_a_gradient_must_not_overlap_an_input():
    memory = ones(8)
    dy, dx = memory[:3].reshape(1, 1, 3), memory[:5].reshape(1, 1, 5)
    refused(
        lambda: cupyconv.conv_backprop_input((1, 1, 5), ones(1, 1, 3), dy, out=dx),
        rule="out must not share memory",
        values="out overlaps dy",
        remedy="a copy of dy",
    )
    refused(
        lambda: cupyconv.conv_backprop_bias(dy, out=memory[:1]),
        rule="out must not share memory",
        values="out overlaps dy",
        remedy="a copy of dy",
    )
    refused(
        lambda: cupyconv.conv_transpose(dy, ones(1, 1, 3), out=dx),
        rule="out must not share memory",
        values="out overlaps x",
        remedy="a copy of x",
    )


# -- transposed convolutions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_padding", "stride", "axis"),
    [(2, 2, "H"), (-1, 2, "H"), (1, 1, "H"), ((0, 3), 3, "W")],
    ids=str,
)
def test_output_padding_must_be_less_than_the_stride(output_padding, stride, axis):
    number = output_padding if isinstance(output_padding, int) else output_padding[1]
    refused(
        lambda: cupyconv.conv_transpose(
            ones(1, 1, 4, 4), ones(1, 1, 3, 3), stride=stride, output_padding=output_padding
        ),
        rule="output_padding must be at least 0 and less than the stride",
        values=f"got {number} with stride {stride} and dilation 1; "
        + (f"0 to {stride - 1} would fit" if stride > 1 else "0 would fit"),
        remedy={
            (2, 2): "Use output_padding=1",
            (-1, 2): "Use output_padding=0",
            (1, 1): "Use output_padding=0, or use stride=2",
            ((0, 3), 3): "Use output_padding=(0, 2)",
        }[output_padding, stride],
        axis=axis,
    )


def test_output_padding_is_limited_by_stride_or_dilation():
    given = ones(1, 1, 4, 4), ones(1, 1, 3, 3)
    refused(
        lambda: cupyconv.conv_transpose(*given, stride=(1, 2), dilation=3, output_padding=(2, 3)),
        rule="output_padding must be at least 0 and less than the stride or the dilation",
        values="got 3 with stride 2 and dilation 3; 0 to 2 would fit",
        remedy="Use output_padding=2",
        axis="W",
    )
    refused(
        lambda: cupyconv.conv_transpose(*given, padding="same", dilation=3, output_padding=1),
        rule="output_padding must be at least 0 and less than the stride",
        values="got 1 with stride 1; 0 would fit",
        remedy="Use output_padding=0, or use stride=2",
        axis="H",
    )


def test_output_padding_of_wrong_length_is_rejected():
    refused(
        lambda: cupyconv.conv_transpose(
            ones(1, 1, 4, 4), ones(1, 1, 3, 3), stride=2, output_padding=(1,)
        ),
        rule="output_padding must be one integer, or one for each spatial axis",
        values="got 1 value for 2 spatial axes",
        remedy="Pass one integer, or a sequence of 2",
    )


def test_output_shape_and_output_padding_exclude_each_other():
    refused(
        lambda: cupyconv.conv_transpose(
            ones(1, 1, 4), ones(1, 1, 3), stride=2, output_shape=(1, 1, 9), output_padding=0
        ),
        rule="output_shape and output_padding must not both be passed",
        values="1x1x9 and 0",
        remedy="Pass one of them",
    )


def test_output_shape_must_fit_the_input():
    refused(
        lambda: cupyconv.conv_transpose(
            ones(1, 1, 4), ones(1, 1, 3), stride=2, output_shape=(1, 1, 11)
        ),
        rule="the convolution of the result must have the size of x",
        values="a result of 11 has floor((11 + 0 + 0 - 3)/2) + 1 = 5, x has 4",
        remedy="Use a result of 9 to 10",
        axis="W",
    )


def test_transpose_needs_one_channel_per_filter():
    refused(
        lambda: cupyconv.conv_transpose(ones(1, 5, 4), ones(4, 2, 3)),
        rule="x must have one channel for each filter",
        values="x has 5 channels, and the filter has O = 4 (4x2x3, OIW)",
        remedy="use O = 5 for the filter; or use C = 4 for x",
    )


def test_transpose_keeps_the_batch_size():
    refused(
        lambda: cupyconv.conv_transpose(ones(3, 4, 4), ones(4, 2, 3), output_shape=(2, 2, 6)),
        rule="a transposed convolution must keep the batch size",
        values="x has 3, the result has 2",
        remedy="Use N = 3 for the result",
    )


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


def test_error_classes_have_standard_bases():
    assert issubclass(ConvError, ValueError)
    assert issubclass(ConvTypeError, TypeError)
    assert issubclass(DeviceError, RuntimeError)
    for kind in (ConvError, ConvTypeError, DeviceError, KernelCompileError):
        assert issubclass(kind, CupyconvError)
        assert getattr(cupyconv, kind.__name__) is kind


def test_message_orders_rule_axis_values_and_remedy():
    error = ConvError("a rule", "some values", "Do this", axis="H")
    assert str(error) == "a rule (axis H): some values. Do this"
    assert (error.rule, error.values, error.remedy, error.axis) == (
        "a rule",
        "some values",
        "Do this",
        "H",
    )
    assert str(ConvError("a rule", "some values", "Do this")) == "a rule: some values. Do this"


def test_compile_error_includes_the_log():
    error = KernelCompileError("conv_forward.cu did not compile", "line 3: no")
    assert error.log == "line 3: no"
    assert str(error) == "conv_forward.cu did not compile\nline 3: no"
    assert str(KernelCompileError("it did not compile", "")) == "it did not compile"


def test_remedies_are_joined_into_a_sentence():
    assert one_of(["pad by 1"]) == "Pad by 1"
    assert one_of(["pad by 1", "use 5", "use 6"]) == "Pad by 1, use 5, or use 6"


def test_unknown_word_lists_known_values_unchanged():
    error = unknown_word("thing", "nchv", ["NCHW", "NHWC"])
    assert "Did you mean 'NCHW'? Known: 'NCHW', 'NHWC'" in str(error)


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


def test_empty_transposed_result_has_a_remedy():
    x, w = ones(1, 1, 3, 3), ones(1, 1, 3, 3)
    with pytest.raises(ConvError, match=r"at least 1 \(axis H\).*by at most 4 in total") as caught:
        cupyconv.conv_transpose(x, w, padding=4)
    assert "padding (4, 4)" in str(caught.value)
    assert ConvProblem.from_output(x.shape, w.shape, padding=2).input_shape == (1, 1, 1, 1)
    with pytest.raises(ConvError, match=r"; 0 would fit\. Use output_padding=0"):
        cupyconv.conv_transpose(x, w, output_padding=1)


def test_sizes_of_wrong_type_get_no_example():
    raw_ops = importlib.import_module("cupyconv.raw_ops")
    with pytest.raises(ConvTypeError, match=r"of type NoneType$"):
        raw_ops.Conv2DBackpropInput(
            input_sizes=None,
            filter=ones(3, 3, 1, 1),
            out_backprop=ones(1, 3, 3, 1),
            strides=[1] * 4,
            padding="VALID",
        )


def test_plan_as_an_array_is_not_taken_for_a_prepared_filter():
    plan = cupyconv.plan(cupyconv.ConvProblem((1, 1, 4, 4), (1, 1, 3, 3)), "sm_80")
    with pytest.raises(ConvTypeError, match=r"Pass a NumPy or CuPy array$"):
        cupyconv.conv_forward(plan, np.ones((1, 1, 3, 3), "float32"))
