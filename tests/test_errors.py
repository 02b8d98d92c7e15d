"""Bad input: the type, the axis, a message with rule, values and way out, and nothing changed.

Every way out that a message suggests is taken, and has to work.
"""

from __future__ import annotations

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

pytestmark = pytest.mark.quick

F32 = np.float32


def ones(*shape: int, dtype: object = F32) -> np.ndarray:
    return np.ones(shape, dtype)


@pytest.fixture(autouse=True)
def nothing_is_computed(request, monkeypatch):
    """No backend may allocate or run in these tests, but in those that ask for ``computes``."""
    if "computes" in request.fixturenames:
        return

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a result was allocated or computed before the input was refused")

    for name in ("empty", "run", "sum_bias"):
        monkeypatch.setattr(backends.CpuBackend, name, forbidden)


@pytest.fixture
def computes():
    """Asks for a backend that works."""


def refused(call, *, rule: str, values: str, remedy: str, axis: str | None = None) -> ConvError:
    """The ConvError of a call, after checking that it says all that it has to."""
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


def test_channels_that_do_not_match_the_filter():
    error = refused(
        lambda: cupyconv.conv_forward(ones(1, 6, 5, 5), ones(4, 4, 3, 3)),
        rule="input channels must be the input's channels divided by groups",
        values="C = 6, groups=1, so 6 for each filter; filter 4x4x3x3 (OIHW) has I = 4",
        remedy="Give the filter I = 6, or give the input C = 4",
    )
    assert "1x6x5x5 (NCHW)" in str(error)
    ConvProblem((1, 6, 5, 5), (4, 6, 3, 3))
    ConvProblem((1, 4, 5, 5), (4, 4, 3, 3))


def test_channels_that_another_number_of_groups_would_fit():
    refused(
        lambda: cupyconv.conv_forward(ones(1, 6, 5, 5), ones(4, 3, 3, 3)),
        rule="divided by groups",
        values="has I = 3",
        remedy="Use groups=2, give the filter I = 6, or give the input C = 3",
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
def test_channels_that_would_fit_last_are_said_to_where_no_order_was(shapes, rest):
    """TensorFlow's shapes, given as they are."""
    with pytest.raises(ConvError) as caught:
        ConvProblem(*shapes, **rest)
    (word,) = re.findall(r'; or use data_format="(\w+)"$', caught.value.remedy)
    assert ConvProblem(*shapes, **rest, data_format=word).input_shape == shapes[0]
    with pytest.raises(ConvError) as caught:
        ConvProblem(*shapes, **rest, data_format="channels_first")
    assert "data_format" not in caught.value.remedy


def test_swapped_memory_order_is_named():
    refused(
        lambda: cupyconv.conv_forward(ones(1, 32, 32, 3), ones(8, 3, 3, 3)),
        rule="divided by groups",
        values="input 1x32x32x3 (NCHW) has C = 32",
        remedy="Give the filter I = 32",
    )


def test_groups_that_do_not_divide_the_input():
    refused(
        lambda: ConvProblem((1, 6, 9), (8, 3, 3), groups=4),
        rule="groups must divide the input channels",
        values="the input has 6, groups=4",
        remedy="Use groups=2",
    )
    ConvProblem((1, 6, 9), (8, 3, 3), groups=2)


def test_groups_that_do_not_divide_the_output():
    refused(
        lambda: ConvProblem((1, 6, 9), (4, 2, 3), groups=3),
        rule="groups must divide the output channels",
        values="the output has 4, groups=3",
        remedy="Use groups=1 and give the filter I = 6, or give the filter O = 6",
    )
    ConvProblem((1, 6, 9), (4, 6, 3), groups=1)
    ConvProblem((1, 6, 9), (6, 2, 3), groups=3)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_every_way_out_of_bad_channels_works(channels, filters, depth, groups):
    shape, filter_shape = (1, channels, 4), (filters, depth, 2)
    try:
        ConvProblem(shape, filter_shape, groups=groups)
    except ConvError as error:
        repairs = re.split(r"[,;] or |, (?=give|use)", error.remedy)
        assert repairs
        for repair in repairs:
            numbers = dict(re.findall(r"(groups|I|C|O) ?= ?(\d+)", repair))
            order = re.findall(r'data_format="(\w+)"', repair)
            assert numbers or order, repair
            ConvProblem(
                (1, int(numbers.get("C", channels)), 4),
                (int(numbers.get("O", filters)), int(numbers.get("I", depth)), 2),
                groups=int(numbers.get("groups", groups)),
                data_format=order[0] if order else None,
            )
    else:
        assert channels == depth * groups
        assert filters % groups == 0


# -- gradients that do not belong ------------------------------------------------------------------


def test_dy_that_does_not_belong_to_the_input():
    error = refused(
        lambda: cupyconv.conv_backprop_filter(
            ones(1, 3, 9, 8), (4, 3, 3, 3), ones(1, 4, 4, 4), stride=2
        ),
        rule="dy must have the output size of the input it belongs to",
        values="an input of 8 gives floor((8 + 0 + 0 - 3)/2) + 1 = 3, dy has 4; "
        "input sizes 9 to 10 would give 4",
        remedy="Pass a dy of shape 1x4x4x3 (NCHW)",
        axis="W",
    )
    assert "(axis W)" in str(error)


def test_input_shape_outside_the_interval_that_fits_dy():
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
        remedy="Pass a dy of shape 1x19x19x4 (NHWC)",
        axis="H",
    )


@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 5), st.integers(1, 9), st.data())
def test_the_interval_in_the_message_is_right(size, stride, taps, wrong, data):
    padding = data.draw(st.sampled_from(["same", "same_lower", 0, 1, 2]))
    try:
        problem = ConvProblem((1, 1, size), (1, 1, taps), stride=stride, padding=padding)
    except ConvError:
        return
    try:
        problem.require_output_gradient((1, 1, wrong))
    except ConvError as error:
        found = re.search(r"input sizes (\d+)(?: to (\d+))? would give", error.values)
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
        ((1, 5, 3, 3), "one channel for each filter", "dy has 5, the filter gives 4"),
        ((1, 4, 3), "as many axes as the input", "dy is 1x4x3, the input is 1x3x5x5"),
        ((1, 4, 3, 0), "the output size of the input", "dy has 0; no input size would give 0"),
    ],
    ids=["batch", "channels", "rank", "no_size"],
)
def test_dy_of_another_layer(shape, rule, values):
    for call in (
        lambda: cupyconv.conv_backprop_input((1, 3, 5, 5), ones(4, 3, 3, 3), ones(*shape)),
        lambda: cupyconv.conv_backprop_filter(ones(1, 3, 5, 5), (4, 3, 3, 3), ones(*shape)),
        lambda: cupyconv.conv_backward(ones(1, 3, 5, 5), ones(4, 3, 3, 3), ones(*shape)),
    ):
        axis = "W" if shape[-1] == 0 else None
        refused(call, rule=rule, values=values, remedy="Pass a dy of shape 1x4x3x3", axis=axis)


def test_bias_of_another_layer():
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


def test_filter_larger_than_the_padded_input():
    refused(
        lambda: cupyconv.conv_forward(
            ones(1, 1, 9, 6), ones(1, 1, 3, 4), padding=((0, 0), (1, 0)), dilation=(1, 3)
        ),
        rule="the filter must fit into the padded input",
        values="a filter of 4 with dilation 3 spans 10, the input of 6 with padding (1, 0) has 7",
        remedy="Pad by 3 more in total, use an input of at least 9, a filter of at most 3, "
        "or a dilation of at most 2",
        axis="W",
    )


@given(
    st.integers(1, 6), st.integers(1, 8), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2)
)
def test_every_way_out_of_a_filter_that_does_not_fit_works(size, taps, dilation, before, after):
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
        # and the values are the nearest that work
        for key, nearer in (("more", -1), ("size", -1), ("taps", +1), ("dilation", +1)):
            if key in by and by[key] + nearer >= 1:
                with pytest.raises(ConvError):
                    build(**{key: by[key] + nearer})


@pytest.mark.parametrize("word", ["stride", "dilation"])
@pytest.mark.parametrize(
    ("value", "axis"), [(0, None), (-1, None), ((1, 0), "W"), ((-2, 1), "H")], ids=str
)
def test_stride_and_dilation_below_1(word, value, axis):
    number = value if isinstance(value, int) else min(value)
    refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5, 5), ones(1, 1, 3, 3), **{word: value}),
        rule=f"{word} must be at least 1",
        values=f"got {number}",
        remedy="Use 1 or more",
        axis=axis,
    )


def test_groups_below_1():
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
def test_sizes_below_1(input_shape, filter_shape, values):
    error = refused(
        lambda: ConvProblem(input_shape, filter_shape),
        rule="every size but the batch must be at least 1",
        values=values,
        remedy="Give positive sizes",
    )
    assert "was read as NC" in error.remedy


def test_negative_batch():
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
def test_negative_padding(padding, values, axis):
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
        ({"dilation": [2]}, "dilation must be one integer", "got 1 values for 2 spatial axes"),
        ({"padding": (1, 1, 1)}, "padding must be one integer", "got 3 entries for 2 spatial"),
        ({"padding": ((1, 2, 3), 0)}, "the padding of an axis must be", "got (1, 2, 3)"),
    ],
)
def test_wrong_number_of_values(arguments, rule, values):
    refused(
        lambda: ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), **arguments),
        rule=rule,
        values=values,
        remedy="Pass",
    )


def test_the_padding_that_the_message_suggests_is_one():
    with pytest.raises(ConvError) as caught:
        ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), padding=(1, 1, 1))
    example = re.search(r"example (\(.*\))", caught.value.remedy)[1]
    assert example == "((1, 2), (1, 2))"
    ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), padding=((1, 2), (1, 2)))


# -- words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what", "given_word", "suggestion"),
    [
        ({"padding": "smae"}, "padding", "smae", "same"),
        ({"padding": "VALDI"}, "padding", "VALDI", "valid"),
        ({"padding": "same_upper"}, "padding", "same_upper", "same_lower"),
        ({"data_format": "NCHV"}, "data_format", "NCHV", "NCHW"),
        ({"data_format": "channel_last"}, "data_format", "channel_last", "channels_last"),
        ({"filter_format": "OHIW"}, "filter_format", "OHIW", "OIHW"),
        ({"activation": "rel"}, "activation", "rel", "relu"),
        ({"precision": "tf23"}, "precision", "tf23", "tf32"),
        ({"impl": "numpi"}, "impl", "numpi", "numpy"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_unknown_words_suggest_the_nearest(arguments, what, given_word, suggestion):
    error = refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5, 5), ones(1, 1, 3, 3), **arguments),
        rule=f"unknown {what}",
        values=repr(given_word),
        remedy=f"Did you mean {suggestion!r}?",
    )
    assert "Known: " in error.remedy


def test_a_word_near_to_none_lists_them_all():
    refused(
        lambda: ConvProblem((1, 1, 5), (1, 1, 3), padding="zzz"),
        rule="unknown padding",
        values="'zzz'",
        remedy="Known: 'valid', 'same', 'same_lower'",
    )


def test_words_that_a_suggestion_names_are_accepted(computes):
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


def test_unknown_gradient():
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
        lambda: ConvProblem((1, 1, 5), (1, 1, 3), **arguments),
        rule=f"{what} must name as many axes as the arrays have",
        values="spatial, the input has 1",
        remedy=f"Use {suggestion!r}",
    )
    ConvProblem((1, 5, 1), (3, 1, 1), data_format="NWC")


def test_implementation_of_another_home():
    refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5), ones(1, 1, 3), impl="cuda-generic"),
        rule="the implementation must run on the device that is computed on",
        values="'cuda-generic' does not run on cpu",
        remedy="Use one of 'auto', 'reference', 'numpy', or a GPU, with CuPy arrays",
    )
    refused(
        lambda: cupyconv.plan(ConvProblem((1, 1, 5), (1, 1, 3)), "sm_80", impl="numpy"),
        rule="the implementation must run on the device that is computed on",
        values="'numpy' does not run on sm_80",
        remedy="or the CPU, with NumPy arrays",
    )


def test_devices():
    problem = ConvProblem((1, 1, 5), (1, 1, 3))
    refused(
        lambda: cupyconv.plan(problem, "gtx"),
        rule="a device is 'cpu' or an architecture",
        values="got 'gtx'",
        remedy="Use for example 'sm_80'",
    )
    refused(
        lambda: cupyconv.plan(problem, "sm_61"),
        rule="compute capability 7.5 or later",
        values="sm_61 has 6.1",
        remedy="Use a newer one, or the CPU, where NumPy arrays are computed",
    )
    cupyconv.plan(problem, "sm_80")


# -- ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (3, 3), (1, 1, 2, 2, 2, 2)], ids=str)
def test_rank_of_the_input(shape):
    refused(
        lambda: cupyconv.conv_forward(np.ones(shape, F32), ones(1, 1, 3)),
        rule="a batch axis, a channel axis and 1 to 3 spatial axes",
        values=f"has {len(shape)} axes",
        remedy="Pass 3 axes for a 1-D",
    )


def test_rank_of_the_filter():
    refused(
        lambda: cupyconv.conv_forward(ones(1, 1, 5, 5), ones(1, 1, 3)),
        rule="the filter must have as many axes as the input",
        values="the input 1x1x5x5 has 4, the filter 1x1x3 has 3",
        remedy="Pass a filter with 4 axes, or an input with 3",
    )


def test_rank_of_a_bias_gradient():
    refused(
        lambda: cupyconv.conv_backprop_bias(ones(3, 4)),
        rule="1 to 3 spatial axes",
        values="3x4 has 2 axes",
        remedy="Pass 3 axes",
    )


# -- kinds of arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"), [(1.5, "1.5"), ("2", "'2'"), (None, "None"), ((1, 2.0), "2.0")], ids=str
)
@pytest.mark.parametrize("word", ["stride", "dilation", "groups"])
def test_sizes_that_are_no_integers(word, value, shown):
    if word == "groups" and isinstance(value, tuple):
        shown = "(1, 2.0)"
    with pytest.raises(ConvTypeError, match=f"{word} must be made of integers") as caught:
        ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), **{word: value})
    assert isinstance(caught.value, TypeError)
    assert f"got {shown}" in str(caught.value)
    assert "Pass an int" in str(caught.value)


def test_padding_that_is_no_integer():
    with pytest.raises(ConvTypeError, match=r"padding must be made of integers: got 0\.5"):
        ConvProblem((1, 1, 5, 5), (1, 1, 3, 3), padding=0.5)


@pytest.mark.parametrize("shape", [5, "1x5", None], ids=str)
def test_shapes_that_are_none(shape):
    with pytest.raises(ConvTypeError, match=r"input_shape must be a tuple of integers.*Pass"):
        cupyconv.conv_backprop_input(shape, ones(1, 1, 3), ones(1, 1, 3))


def test_shape_with_a_float_in_it():
    with pytest.raises(ConvTypeError, match=r"filter_shape must be made of integers: got 3\.0"):
        cupyconv.conv_backprop_filter(ones(1, 1, 5), (1, 1, 3.0), ones(1, 1, 3))


@pytest.mark.parametrize(
    "dtype", ["int32", "uint8", "bool", "object", "clongdouble", "longdouble", "datetime64[s]"]
)
@pytest.mark.parametrize("name", ["x", "w", "dy"])
def test_dtypes_that_no_pass_takes(name, dtype):
    given_arrays = {"x": ones(1, 1, 5), "w": ones(1, 1, 3), "dy": ones(1, 1, 3)}
    given_arrays[name] = given_arrays[name].astype(dtype)
    kind = given_arrays[name].dtype.name
    with pytest.raises(ConvTypeError) as caught:
        cupyconv.conv_backward(**given_arrays)
    message = str(caught.value)
    assert message.startswith(f"{name}: dtype must be one of float16, bfloat16, float32, float64")
    assert f"got {kind}" in message
    assert f"{name}.astype('float32')" in message


def test_dtypes_that_differ():
    with pytest.raises(ConvTypeError) as caught:
        cupyconv.conv_forward(ones(1, 1, 5, dtype=np.float16), ones(1, 1, 3))
    assert "all arrays must have one dtype: x is float16, w is float32" in str(caught.value)
    assert "w.astype('float16')" in str(caught.value)
    with pytest.raises(ConvTypeError, match="bias is float64"):
        cupyconv.conv_forward(ones(1, 1, 5), ones(1, 1, 3), np.ones(1))


@pytest.mark.parametrize(
    ("value", "kind"), [([[[1.0]]], "list"), (3.0, "float"), (None, "NoneType"), ("x", "str")]
)
def test_objects_that_are_no_arrays(value, kind):
    with pytest.raises(ConvTypeError) as caught:
        cupyconv.conv_forward(value, ones(1, 1, 3))
    assert f"x must be a NumPy or CuPy array, or export DLPack: got {kind}" in str(caught.value)
    assert "numpy.asarray" in str(caught.value)


class Unexportable:
    """Says that it exports DLPack, and then refuses, as a tensor that needs gradients does."""

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **_):
        raise BufferError("it requires gradients")


def test_objects_that_refuse_to_export():
    with pytest.raises(ConvTypeError) as caught:
        cupyconv.conv_forward(Unexportable(), ones(1, 1, 3))
    message = str(caught.value)
    assert "x of type" in message
    assert "Unexportable does not export its memory: it requires gradients" in message
    assert "Pass a NumPy or CuPy array" in message


class Exporter:
    """Gives what it is told to as its device, or raises it."""

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
        ({"memory": KeyError("queue")}, "KeyError: 'queue'"),
        ({"memory": AttributeError("no context")}, "AttributeError: no context"),
        ({"memory": OSError("unplugged")}, "OSError: unplugged"),
        ({"memory": RuntimeError("on strike")}, "on strike"),
        ({"memory": 7}, "does not export its memory"),
    ],
)
def test_exporters_that_fail_are_quoted(given, words):
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
def test_errors_that_are_not_the_exporters_fault_pass(error):
    with pytest.raises(type(error)):
        cupyconv.conv_forward(Exporter(memory=error), ones(1, 1, 3))


def test_attributes_that_fail_are_quoted():
    class Strange:
        @property
        def requires_grad(self):
            raise KeyError("graph")

    with pytest.raises(ConvTypeError, match="does not export its memory: KeyError: 'graph'"):
        cupyconv.conv_forward(Strange(), ones(1, 1, 3))


# -- classes derived from NumPy's ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "w", "bias", "dy", "out"])
def test_masks_are_not_lost_without_a_word(name, computes):
    def layer(**changed):
        given = {"x": ones(1, 1, 5), "w": ones(1, 1, 3), "bias": ones(1), "dy": ones(1, 1, 3)}
        return {**given, **changed}

    shape = layer().get(name, ones(1, 1, 3)).shape
    masked = np.ma.masked_array(np.ones(shape, F32), mask=np.ones(shape, bool))
    calls = [
        lambda g: cupyconv.conv_forward(g["x"], g["w"], g["bias"], out=g.get("out")),
        lambda g: cupyconv.conv_backward(g["x"], g["w"], g["dy"]),
        lambda g: cupyconv.conv_backprop_bias(g["dy"]),
        lambda g: cupyconv.onnx.conv(g["x"], g["w"], g["bias"]),
    ]
    uses = {"x": (0, 1, 3), "w": (0, 1, 3), "bias": (0, 3), "dy": (1, 2), "out": (0,)}
    for number in uses[name]:
        with pytest.raises(ConvTypeError, match="is a masked array") as caught:
            calls[number](layer(**{name: masked}))
        called = "b" if (name, number) == ("bias", 3) else name
        assert f"{called}.filled(0)" in str(caught.value)
        assert f"{called}.data" in str(caught.value)
        calls[number](layer(**{name: masked.filled(0)}))
    assert masked.mask.all()


def test_explanations_take_no_masks_either():
    problem = cupyconv.ConvProblem((1, 1, 5), (1, 1, 3))
    with pytest.raises(ConvTypeError, match="x is a masked array"):
        cupyconv.explain(problem, x=np.ma.ones((1, 1, 5), F32))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_is_refused_in_its_own_words():
    with pytest.raises(ConvTypeError, match=r"bias is a numpy\.matrix.*numpy\.asarray\(bias\)"):
        cupyconv.conv_forward(ones(1, 1, 5), ones(1, 1, 3), np.matrix([[1.0]], dtype=F32))


def test_of_other_classes_the_plain_array_is_taken(tmp_path, computes):
    class Labelled(np.ndarray):
        def __getitem__(self, key):
            raise AssertionError("not a convolution's business")

    x, w = ones(1, 2, 5), ones(3, 2, 3)
    expected = cupyconv.conv_forward(x, w)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for derived in (x.view(Labelled), mapped, x.view(np.recarray)):
        for _ in range(2):
            y = cupyconv.conv_forward(derived, w)
            assert type(y) is np.ndarray
            np.testing.assert_array_equal(y, expected)
    out = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", F32, expected.shape)
    assert cupyconv.conv_forward(x, w, out=out) is out
    np.testing.assert_array_equal(np.asarray(out), expected)


def test_cupy_that_is_not_installed(monkeypatch):
    """Any more: what was imported before does not count."""
    with suppress(DeviceError):
        arrays.cupy()
    monkeypatch.setitem(sys.modules, "cupy", None)
    exporter = SimpleNamespace(__cuda_array_interface__={})
    with pytest.raises(DeviceError) as caught:
        cupyconv.conv_forward(exporter, exporter)
    assert "pip install 'cupy-cuda13x[ctk]>=14' 'cuda-bindings" in str(caught.value)


def test_gpus_are_counted_as_none_where_they_cannot_be_counted(monkeypatch):
    cupy = pytest.importorskip("cupy", reason="without CuPy, that is what is missing")
    found = 0
    with suppress(cupy.cuda.runtime.CUDARuntimeError):  # that of a machine without a driver
        found = cupy.cuda.runtime.getDeviceCount()
    assert arrays.device_count.__wrapped__() == found
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert arrays.device_count.__wrapped__() == 0


def test_gpu_that_is_not_there(monkeypatch):
    pytest.importorskip("cupy", reason="without CuPy, that is what is missing")
    monkeypatch.setattr(arrays, "device_count", lambda: 0)
    with pytest.raises(DeviceError, match="no usable GPU"):
        arrays.require_gpu()


# -- out -------------------------------------------------------------------------------------------


def calls_with_out(out):
    """Every function that takes ``out``, on one layer; the shape of each result is 1x1x3."""
    x, w, dy = ones(1, 1, 5), ones(1, 1, 3), ones(1, 1, 3)
    return {
        "y": lambda: cupyconv.conv_forward(x, w, out=out),
        "dx": lambda: cupyconv.conv_backprop_input((1, 1, 3), w, dy[..., :1], out=out),
        "dw": lambda: cupyconv.conv_backprop_filter(x, (1, 1, 3), dy, out=out),
        "transposed": lambda: cupyconv.conv_transpose(dy[..., :1], w, out=out),
    }


@pytest.mark.parametrize("which", ["y", "dx", "dw", "transposed"])
def test_out_of_wrong_shape(which):
    out = np.full((1, 1, 4), 7, F32)
    refused(
        calls_with_out(out)[which],
        rule="out must have the result's shape",
        values="out is 1x1x4, the result is 1x1x3",
        remedy="Pass an out of shape (1, 1, 3)",
    )
    assert np.all(out == 7)


@pytest.mark.parametrize("which", ["y", "dx", "dw", "transposed"])
def test_out_of_wrong_dtype(which):
    out = np.full((1, 1, 3), 7, np.float64)
    with pytest.raises(ConvTypeError, match=r"out is float64, they are float32\. Pass"):
        calls_with_out(out)[which]()
    assert np.all(out == 7)


@pytest.mark.parametrize("which", ["y", "dx", "dw", "transposed"])
def test_out_that_is_read_only(which):
    out = np.full((1, 1, 3), 7, F32)
    out.flags.writeable = False
    refused(
        calls_with_out(out)[which],
        rule="out must be writeable",
        values="read-only",
        remedy="Pass a writeable array",
    )
    assert np.all(out == 7)


def test_out_that_is_no_array():
    with pytest.raises(ConvTypeError, match="out must be a NumPy or CuPy array"):
        cupyconv.conv_forward(ones(1, 1, 5), ones(1, 1, 3), out=[0, 0, 0])


@pytest.mark.parametrize("name", ["x", "w", "bias"])
def test_out_that_overlaps_an_input(name):
    memory = np.arange(12, dtype=F32)
    before = memory.copy()
    given_arrays = {"x": ones(1, 1, 5), "w": ones(1, 1, 3), "bias": ones(1)}
    size = given_arrays[name].size
    given_arrays[name] = memory[2 : 2 + size].reshape(given_arrays[name].shape)
    refused(
        lambda: cupyconv.conv_forward(**given_arrays, out=memory[:3].reshape(1, 1, 3)),
        rule="out must not share memory with an input",
        values=f"it overlaps {name}",
        remedy=f"Pass a new array, or a copy of {name}",
    )
    np.testing.assert_array_equal(memory, before)


def views(rng, memory):
    """Legal views of one memory, and layouts made up, each with its shape and strides."""
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


def test_whether_a_layout_overlaps_itself_is_exact():
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
def test_layouts_at_the_ends(shape):
    strides = np.lib.stride_tricks.as_strided(np.zeros(1), (1,) * len(shape)).strides
    contiguous, step = [], 8
    for size in reversed(shape):
        contiguous.insert(0, step)
        step *= size
    assert not arrays.overlaps_itself(shape, tuple(contiguous), 8)
    assert len(strides) == len(shape)
    assert arrays.overlaps_itself(shape, (0,) * len(shape), 8) == (np.prod(shape, dtype=float) > 1)


def overlapping(shape, how):
    """A writeable array whose elements share memory, over memory that is full of sevens."""
    memory = np.full(100, 7, F32)
    strides = (40, 20, 2) if how == "half an element" else (0,) * len(shape)
    return memory, np.lib.stride_tricks.as_strided(memory, shape, strides, writeable=True)


@pytest.mark.parametrize("which", ["y", "dx", "dw", "transposed"])
@pytest.mark.parametrize("how", ["broadcast", "half an element"])
def test_out_whose_elements_overlap(which, how):
    memory, out = overlapping((1, 1, 3), how)
    assert out.flags.writeable
    for _ in range(2):
        refused(
            calls_with_out(out)[which],
            rule="out must have memory of its own for each element",
            values="elements of a 1x1x3 with strides of",
            remedy="Pass a new array, and copy from it",
        )
    assert np.all(memory == 7)


def test_out_of_a_bias_gradient_whose_elements_overlap():
    memory, out = overlapping((3,), "broadcast")
    with pytest.raises(ConvError, match="memory of its own for each element"):
        cupyconv.conv_backprop_bias(ones(1, 3, 4), out=out)
    assert np.all(memory == 7)


def test_out_of_every_ordinary_view_is_written(computes):
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


def test_out_of_a_gradient_that_overlaps_an_input():
    memory = ones(8)
    dy, dx = memory[:3].reshape(1, 1, 3), memory[:5].reshape(1, 1, 5)
    refused(
        lambda: cupyconv.conv_backprop_input((1, 1, 5), ones(1, 1, 3), dy, out=dx),
        rule="out must not share memory",
        values="it overlaps dy",
        remedy="a copy of dy",
    )
    refused(
        lambda: cupyconv.conv_backprop_bias(dy, out=memory[:1]),
        rule="out must not share memory",
        values="it overlaps dy",
        remedy="a copy of dy",
    )
    refused(
        lambda: cupyconv.conv_transpose(dy, ones(1, 1, 3), out=dx),
        rule="out must not share memory",
        values="it overlaps x",
        remedy="a copy of x",
    )


# -- transposed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output_padding", "stride", "axis"),
    [(2, 2, "H"), (-1, 2, "H"), (1, 1, "H"), ((0, 3), 3, "W")],
    ids=str,
)
def test_output_padding_outside_the_interval(output_padding, stride, axis):
    number = output_padding if isinstance(output_padding, int) else output_padding[1]
    refused(
        lambda: cupyconv.conv_transpose(
            ones(1, 1, 4, 4), ones(1, 1, 3, 3), stride=stride, output_padding=output_padding
        ),
        rule="output_padding must be at least 0 and less than the stride",
        values=f"got {number} with stride {stride}",
        remedy=f"Use 0 to {stride - 1}",
        axis=axis,
    )


def test_output_padding_outside_the_interval_of_a_dilation():
    given = ones(1, 1, 4, 4), ones(1, 1, 3, 3)
    refused(
        lambda: cupyconv.conv_transpose(*given, stride=(1, 2), dilation=3, output_padding=(2, 3)),
        rule="output_padding must be at least 0 and less than the stride or the dilation",
        values="got 3 with stride 2 and dilation 3",
        remedy="Use 0 to 2",
        axis="W",
    )
    refused(
        lambda: cupyconv.conv_transpose(*given, padding="same", dilation=3, output_padding=1),
        rule="output_padding must be at least 0 and less than the stride",
        values="got 1 with stride 1",
        remedy="Use 0 to 0",
        axis="H",
    )


def test_output_padding_of_wrong_length():
    refused(
        lambda: cupyconv.conv_transpose(
            ones(1, 1, 4, 4), ones(1, 1, 3, 3), stride=2, output_padding=(1,)
        ),
        rule="output_padding must be one integer, or one for each spatial axis",
        values="got 1 values for 2 spatial axes",
        remedy="Pass one integer, or 2",
    )


def test_output_shape_and_output_padding_together():
    refused(
        lambda: cupyconv.conv_transpose(
            ones(1, 1, 4), ones(1, 1, 3), stride=2, output_shape=(1, 1, 9), output_padding=0
        ),
        rule="say the same thing",
        values="1x1x9 and 0",
        remedy="Pass one of them",
    )


def test_output_shape_outside_the_interval():
    refused(
        lambda: cupyconv.conv_transpose(
            ones(1, 1, 4), ones(1, 1, 3), stride=2, output_shape=(1, 1, 11)
        ),
        rule="the result of a transposed convolution must have the size it is made from",
        values="a result of 11 has floor((11 + 0 + 0 - 3)/2) + 1 = 5, x is 4",
        remedy="Use a result of 9 to 10",
        axis="W",
    )


def test_channels_of_what_is_transposed():
    refused(
        lambda: cupyconv.conv_transpose(ones(1, 5, 4), ones(4, 2, 3)),
        rule="must be made from one channel for each filter",
        values="x has 5, the filter 4x2x3 (OIW) has O = 4",
        remedy="Give x 4 channels, or the filter O = 5",
    )


def test_batch_of_what_is_transposed():
    refused(
        lambda: cupyconv.conv_transpose(ones(3, 4, 4), ones(4, 2, 3), output_shape=(2, 2, 6)),
        rule="a transposed convolution keeps the batch size",
        values="x has 3, the result has 2",
        remedy="Use a batch of 3",
    )


# -- too large -------------------------------------------------------------------------------------


def test_a_result_that_does_not_fit_memory_says_how_large_it_is(computes):
    x = np.broadcast_to(F32(1), (2**16, 1, 2**16, 2**16))
    w = np.broadcast_to(F32(1), (2**10, 1, 1, 1))
    with pytest.raises(MemoryError) as caught:
        cupyconv.conv_forward(x, w)
    assert "65536x1024x65536x65536 float32 takes 1,024.0 PiB" in str(caught.value)


def test_a_result_beyond_64_bits_says_how_large_it_is(computes):
    x = np.broadcast_to(F32(1), (2**20, 1, 2**20))
    w = np.broadcast_to(F32(1), (2**24, 1, 1))
    with pytest.raises(MemoryError, match="1048576x16777216x1048576 float32 takes"):
        cupyconv.conv_forward(x, w)


def test_refusing_needs_no_memory():
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


# -- the error classes -----------------------------------------------------------------------------


def test_classes_are_what_callers_catch():
    assert issubclass(ConvError, ValueError)
    assert issubclass(ConvTypeError, TypeError)
    assert issubclass(DeviceError, RuntimeError)
    for kind in (ConvError, ConvTypeError, DeviceError, KernelCompileError):
        assert issubclass(kind, CupyconvError)
        assert getattr(cupyconv, kind.__name__) is kind


def test_message_has_rule_axis_values_and_way_out_in_this_order():
    error = ConvError("a rule", "some values", "Do this", axis="H")
    assert str(error) == "a rule (axis H): some values. Do this"
    assert (error.rule, error.values, error.remedy, error.axis) == (
        "a rule",
        "some values",
        "Do this",
        "H",
    )
    assert str(ConvError("a rule", "some values", "Do this")) == "a rule: some values. Do this"


def test_compile_error_carries_the_log():
    error = KernelCompileError("conv_forward.cu did not compile", "line 3: no")
    assert error.log == "line 3: no"
    assert str(error) == "conv_forward.cu did not compile\nline 3: no"
    assert str(KernelCompileError("it did not compile", "")) == "it did not compile"


def test_ways_out_as_a_sentence():
    assert one_of(["pad by 1"]) == "Pad by 1"
    assert one_of(["pad by 1", "use 5", "use 6"]) == "Pad by 1, use 5, or use 6"


def test_unknown_word_keeps_the_known_ones_as_they_are_spelled():
    error = unknown_word("thing", "nchv", ["NCHW", "NHWC"])
    assert "Did you mean 'NCHW'? Known: 'NCHW', 'NHWC'" in str(error)


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "onnx", "dask"])
def test_install_hints_name_packages_that_an_index_has(extra):
    command = install_command(extra)
    assert command.startswith("pip install ")
    given = {Requirement(text) for text in shlex.split(command)[2:]}
    project = Path(cupyconv.__file__).parents[1] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert given == {Requirement(text) for text in extras[extra]}


def test_cupyconv_is_installed_again_from_where_it_came():
    *_, source = shlex.split(reinstall_command())
    assert Path(source).resolve() == Path(cupyconv.__file__).resolve().parents[1]
