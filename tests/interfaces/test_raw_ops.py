"""``cupyconv.raw_ops`` compared with ``tf.raw_ops``: signatures, values, shapes and errors.

Only these tests import TensorFlow; tests that need it are skipped if it is not installed.
All data are small integers, so that results are equal in every dtype.
"""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvTypeError, raw_ops
from cupyconv.arrays import numpy_dtype

DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(scope="module")
def tf():
    """Import TensorFlow with few messages and with oneDNN, which supports more layers on a CPU."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    return importlib.import_module("tensorflow")


def integers(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(numpy_dtype(dtype))


@dataclass(frozen=True)
class Family:
    """Names of the three operations of one kind of convolution."""

    forward: str
    backprop_input: str
    backprop_filter: str

    def calls(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray) -> dict[str, dict[str, Any]]:
        return {
            self.forward: {"input": x, "filter": w},
            self.backprop_input: {"input_sizes": x.shape, "filter": w, "out_backprop": dy},
            self.backprop_filter: {"input": x, "filter_sizes": w.shape, "out_backprop": dy},
        }


CONV2D = Family("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")
CONV3D = Family("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2")
DEPTHWISE = Family(
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropInput",
    "DepthwiseConv2dNativeBackpropFilter",
)


@dataclass(frozen=True)
class OpCase:
    """Configuration in TensorFlow's terms.

    Attributes:
        only_onednn: why TensorFlow's plain CPU kernels do not support it, or None.  TensorFlow
            then computes it in float32 with oneDNN, for comparison in every dtype.
    """

    name: str
    family: Family
    x: tuple[int, ...]
    w: tuple[int, ...]
    arguments: dict[str, Any] = field(hash=False)
    only_onednn: str | None = None


def window(*strides: int, padding: str = "SAME", **more: Any) -> dict[str, Any]:
    """Return the arguments of a window; strides and dilations are those of the spatial axes."""
    first = more.get("data_format", "").startswith("NC")

    def whole(values: tuple[int, ...]) -> list[int]:
        return [1, 1, *values] if first else [1, *values, 1]

    if "dilations" in more:
        more["dilations"] = whole(more["dilations"])
    return {"strides": whole(strides), "padding": padding, **more}


ONES = [1, 1, 1, 1]
EXPLICIT = window(1, 1, padding="EXPLICIT", explicit_paddings=[0, 0, 1, 2, 0, 1, 0, 0])
NO_DILATED_GRADIENT = "the plain CPU kernels have no gradient of a dilated convolution"
NO_CHANNELS_FIRST = "the plain CPU kernels take channels last only"
NO_GROUPED_GRADIENT = "the plain CPU kernels have no gradient of a grouped convolution"
NO_DILATION = "the plain CPU kernels take no dilation"
NO_UNEQUAL_STRIDES = "the plain CPU kernels take equal strides only"

X, X_FIRST, W, DEPTH_W = (2, 7, 8, 4), (2, 4, 7, 8), (3, 2, 4, 6), (3, 3, 4, 2)
X_3D, X_3D_FIRST, W_3D = (2, 4, 5, 6, 2), (2, 2, 4, 5, 6), (2, 3, 2, 2, 3)
CASES = [
    OpCase("same", CONV2D, X, W, window(2, 3)),
    OpCase("valid", CONV2D, X, W, window(2, 3, padding="VALID")),
    OpCase("stride_1", CONV2D, X, W, window(1, 1)),
    OpCase("one_pixel", CONV2D, X, (1, 1, 4, 5), window(2, 2, padding="VALID")),
    OpCase("explicit", CONV2D, X, W, EXPLICIT | {"strides": [1, 2, 3, 1]}),
    OpCase("dilated_same", CONV2D, X, W, window(1, 1, dilations=(2, 3)), NO_DILATED_GRADIENT),
    OpCase(
        "dilated_strided",
        CONV2D,
        X,
        W,
        window(2, 2, padding="VALID", dilations=(2, 3)),
        NO_DILATED_GRADIENT,
    ),
    OpCase(
        "channels_first", CONV2D, X_FIRST, W, window(2, 3, data_format="NCHW"), NO_CHANNELS_FIRST
    ),
    OpCase("groups_from_the_depth", CONV2D, X, (3, 2, 2, 6), window(1, 1), NO_GROUPED_GRADIENT),
    OpCase("depthwise", DEPTHWISE, X, DEPTH_W, window(2, 2)),
    OpCase("depthwise_valid", DEPTHWISE, X, (3, 2, 4, 1), window(2, 2, padding="VALID")),
    OpCase("depthwise_explicit", DEPTHWISE, X, DEPTH_W, EXPLICIT),
    OpCase(
        "depthwise_strides_differ",
        DEPTHWISE,
        X,
        DEPTH_W,
        window(2, 3, padding="VALID"),
        NO_UNEQUAL_STRIDES,
    ),
    OpCase(
        "depthwise_channels_first",
        DEPTHWISE,
        X_FIRST,
        DEPTH_W,
        window(2, 2, data_format="NCHW"),
        NO_CHANNELS_FIRST,
    ),
    OpCase("volume_same", CONV3D, X_3D, W_3D, window(1, 2, 3)),
    OpCase("volume_valid", CONV3D, X_3D, W_3D, window(1, 2, 3, padding="VALID")),
    OpCase("volume_dilated", CONV3D, X_3D, W_3D, window(1, 1, 1, dilations=(1, 2, 2)), NO_DILATION),
    OpCase(
        "volume_channels_first",
        CONV3D,
        X_3D_FIRST,
        W_3D,
        window(1, 2, 3, data_format="NCDHW"),
        NO_CHANNELS_FIRST,
    ),
]


@pytest.fixture(scope="module")
def onednn(tf) -> bool:
    """Return whether this TensorFlow uses oneDNN, by its support for channels first."""
    try:
        tf.raw_ops.Conv2D(
            input=integers(1, 1, 1, 1),
            filter=integers(1, 1, 1, 1),
            strides=ONES,
            padding="VALID",
            data_format="NCHW",
        )
    except tf.errors.UnimplementedError:
        return False
    return True


def assert_same(ours: np.ndarray, theirs: np.ndarray, dtype: str) -> None:
    assert type(ours) is np.ndarray
    assert ours.dtype == numpy_dtype(dtype)
    assert ours.shape == theirs.shape
    np.testing.assert_array_equal(ours.astype(np.float64), theirs.astype(np.float64))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_shapes_match_tensorflow(tf, onednn, case, dtype):
    if case.only_onednn and not onednn:
        pytest.skip(f"this TensorFlow has no oneDNN, and {case.only_onednn}")
    x, w = integers(*case.x, dtype=dtype), integers(*case.w, dtype=dtype, seed=1)
    y = getattr(raw_ops, case.family.forward)(input=x, filter=w, **case.arguments)
    dy = integers(*y.shape, dtype=dtype, seed=2)
    theirs_in = [a.astype(np.float32) for a in (x, w, dy)] if case.only_onednn else (x, w, dy)
    their_calls = case.family.calls(*theirs_in)
    for name, tensors in case.family.calls(x, w, dy).items():
        theirs = getattr(tf.raw_ops, name)(**their_calls[name], **case.arguments).numpy()
        assert_same(getattr(raw_ops, name)(**tensors, **case.arguments), theirs, dtype)


@pytest.mark.parametrize("family", [CONV2D, DEPTHWISE], ids=["conv2d", "depthwise"])
def test_explicit_channels_first_padding_equals_channels_last(tf, family):
    # TensorFlow has no CPU kernel for explicit padding with channels first.
    x, w = integers(2, 7, 8, 4), integers(3, 2, 4, 3, seed=1)
    last = {**EXPLICIT, "explicit_paddings": [0, 0, 2, 1, 0, 3, 0, 0]}
    first = {**last, "explicit_paddings": [0, 0, 0, 0, 2, 1, 0, 3], "data_format": "NCHW"}
    y = getattr(raw_ops, family.forward)(input=x, filter=w, **last)
    dy = integers(*y.shape, seed=2)
    their_calls = family.calls(x, w, dy)
    our_calls = family.calls(x.transpose(0, 3, 1, 2), w, dy.transpose(0, 3, 1, 2))
    for name, tensors in our_calls.items():
        theirs = getattr(tf.raw_ops, name)(**their_calls[name], **last).numpy()
        ours = getattr(raw_ops, name)(**tensors, **first)
        if name != family.backprop_filter:
            ours = ours.transpose(0, 2, 3, 1)
        assert_same(ours, theirs, "float32")


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_dilated_depthwise_gradients_equal_tensorflows_tape(tf, padding):
    # On a CPU, the raw gradient operations silently ignore dilations.  tf.nn.depthwise_conv2d moves
    # the dilation into the batch, so its tape has the right gradients.
    x, w = integers(2, 7, 8, 4), integers(3, 3, 4, 2, seed=1)
    arguments = window(1, 1, padding=padding, dilations=(2, 2))
    y = raw_ops.DepthwiseConv2dNative(input=x, filter=w, **arguments)
    dy = integers(*y.shape, seed=2)
    tensors = [tf.constant(x), tf.constant(w)]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        theirs = tf.nn.depthwise_conv2d(*tensors, ONES, padding, dilations=[2, 2])
    dx, dw = tape.gradient(theirs, tensors, tf.constant(dy))
    assert_same(y, theirs.numpy(), "float32")
    calls = DEPTHWISE.calls(x, w, dy)
    for name, gradient in ((DEPTHWISE.backprop_input, dx), (DEPTHWISE.backprop_filter, dw)):
        assert_same(getattr(raw_ops, name)(**calls[name], **arguments), gradient.numpy(), "float32")


@pytest.mark.parametrize(
    ("x", "dy", "padding"),
    [
        ((1, 5, 5, 3), (1, 3, 3, 4), "SAME"),
        ((1, 5, 5, 3), (1, 2, 2, 4), "VALID"),
        ((1, 6, 6, 3), (1, 2, 2, 4), "VALID"),
    ],
    ids=["same_of_5", "valid_of_5", "valid_of_6"],
)
def test_input_sizes_determine_the_input_gradient(tf, x, dy, padding):
    tensors = {"filter": integers(3, 3, 3, 4), "out_backprop": integers(*dy, seed=1)}
    rest = window(2, 2, padding=padding)
    theirs = tf.raw_ops.Conv2DBackpropInput(input_sizes=x, **tensors, **rest).numpy()
    for sizes in (x, list(x), np.array(x), np.array(x, np.int32), x[1:3], np.array(x[1:3])):
        ours = raw_ops.Conv2DBackpropInput(input_sizes=sizes, **tensors, **rest)
        assert_same(ours, theirs, "float32")
    spatial_only = tf.raw_ops.Conv2DBackpropInput(input_sizes=x[1:3], **tensors, **rest)
    assert_same(theirs, spatial_only.numpy(), "float32")


@pytest.mark.parametrize("family", [CONV2D, DEPTHWISE], ids=["conv2d", "depthwise"])
def test_spatial_input_sizes_take_other_sizes_from_tensors(tf, family):
    w = integers(3, 3, 3, 2, seed=1)
    dy = integers(2, 3, 3, 6 if family is DEPTHWISE else 2)
    arguments = {"filter": w, "out_backprop": dy, **window(2, 2)}
    theirs = getattr(tf.raw_ops, family.backprop_input)(input_sizes=[6, 5], **arguments).numpy()
    ours = getattr(raw_ops, family.backprop_input)(input_sizes=[6, 5], **arguments)
    assert ours.shape == (2, 6, 5, 3)
    assert_same(ours, theirs, "float32")


def test_spatial_input_sizes_work_in_three_dimensions():
    # TensorFlow crashes on spatial sizes here, so the result for the whole shape is the reference.
    w, dy = integers(2, 3, 3, 3, 4), integers(1, 2, 3, 3, 4, seed=1)
    rest = {"filter": w, "out_backprop": dy, **window(2, 2, 2)}
    whole = raw_ops.Conv3DBackpropInputV2(input_sizes=[1, 4, 5, 5, 3], **rest)
    np.testing.assert_array_equal(
        raw_ops.Conv3DBackpropInputV2(input_sizes=[4, 5, 5], **rest), whole
    )


@pytest.mark.parametrize(
    ("shape", "data_format"),
    [
        ((2, 3, 4, 5), "NHWC"),
        ((2, 3, 4, 5), "NCHW"),
        ((2, 2, 3, 4, 5), "NHWC"),
        ((2, 2, 3, 4, 5), "NCHW"),
        ((2, 3, 4), "NHWC"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_gradient_matches_tensorflow(tf, shape, data_format, dtype):
    dy = integers(*shape, dtype=dtype)
    theirs = tf.raw_ops.BiasAddGrad(out_backprop=dy, data_format=data_format).numpy()
    assert_same(raw_ops.BiasAddGrad(out_backprop=dy, data_format=data_format), theirs, dtype)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_transpose_matches_tensorflow(tf, padding, stride):
    x, w = integers(2, 5, 4, 6), integers(3, 2, 4, 6, seed=1)
    problem = cupyconv.ConvProblem.from_output(
        x.shape, w.shape, stride=stride, padding=padding, data_format="NHWC"
    )
    ours = cupyconv.conv_transpose(x, w, stride=stride, padding=padding, data_format="NHWC")
    theirs = tf.nn.conv2d_transpose(x, w, problem.input_shape, stride, padding)
    assert_same(ours, theirs.numpy(), "float32")


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_transpose_with_same_padding_matches_keras(tf, stride):
    layer = tf.keras.layers.Conv2DTranspose(4, (3, 2), strides=stride, padding="same")
    x = integers(2, 5, 4, 6)
    y = layer(x).numpy()
    w = layer.get_weights()[0]
    ours = cupyconv.conv_transpose(x, w, stride=stride, padding="same", data_format="NHWC")
    assert ours.shape == y.shape
    np.testing.assert_allclose(ours, y, atol=1e-5)


# -- signatures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", raw_ops.__all__)
def test_keywords_and_defaults_match_tensorflow(tf, name):
    ours = inspect.signature(getattr(raw_ops, name)).parameters
    theirs = inspect.signature(getattr(tf.raw_ops, name)).parameters
    assert list(ours) == list(theirs)
    for keyword, parameter in ours.items():
        default, expected = parameter.default, theirs[keyword].default
        assert (list(default) if isinstance(default, tuple) else default) == expected, keyword


@pytest.mark.parametrize("name", raw_ops.__all__)
def test_arguments_are_keyword_only(name):
    operation = getattr(raw_ops, name)
    kinds = {p.kind for p in inspect.signature(operation).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError, match="positional"):
        operation(np.ones((1, 1, 1, 1), np.float32))
    assert operation.__doc__


def test_operations_are_listed_and_exported():
    assert cupyconv.raw_ops is raw_ops
    functions = {n: v for n, v in vars(raw_ops).items() if inspect.isfunction(v)}
    public = [
        n for n, v in functions.items() if n[0].isupper() and v.__module__ == raw_ops.__name__
    ]
    assert sorted(public) == raw_ops.__all__


@pytest.mark.parametrize("use_cudnn_on_gpu", [True, False])
def test_ignored_arguments_change_nothing(use_cudnn_on_gpu):
    call = {"input": integers(1, 5, 5, 3), "filter": integers(3, 3, 3, 4), **window(1, 1)}
    named = raw_ops.Conv2D(**call, use_cudnn_on_gpu=use_cudnn_on_gpu, name="layer")
    np.testing.assert_array_equal(named, raw_ops.Conv2D(**call))


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_v2_gradients_take_tensors_instead_of_shapes(data_format):
    # TensorFlow has no CPU kernel for these two operations.
    x = integers(*((2, 6, 5, 3) if data_format == "NHWC" else (2, 3, 6, 5)))
    w = integers(3, 3, 3, 4)
    rest = window(2, 2, data_format=data_format)
    dy = integers(*raw_ops.Conv2D(input=x, filter=w, **rest).shape)
    for name in (CONV2D.backprop_input, CONV2D.backprop_filter):
        expected = getattr(raw_ops, name)(**CONV2D.calls(x, w, dy)[name], **rest)
        ours = getattr(raw_ops, f"{name}V2")(input=x, filter=w, out_backprop=dy, **rest)
        np.testing.assert_array_equal(ours, expected)


# -- differences that the docstrings state ---------------------------------------------------------


SAME, SAME_3D = window(1, 1), window(1, 1, 1)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Conv2D", {"input": np.ones(X, "int32"), "filter": np.ones(W, "int32"), **SAME}),
        ("BiasAddGrad", {"out_backprop": np.ones(X, "int32")}),
        ("BiasAddGrad", {"out_backprop": integers(3, 2)}),
        ("BiasAddGrad", {"out_backprop": integers(1, 1, 1, 1, 3, 2)}),
    ],
    ids=["conv2d_int32", "bias_int32", "bias_2_axes", "bias_6_axes"],
)
def test_unsupported_calls_of_tensorflow_are_rejected(tf, name, arguments):
    assert getattr(tf.raw_ops, name)(**arguments) is not None
    with pytest.raises((ConvError, ConvTypeError)):
        getattr(raw_ops, name)(**arguments)


@pytest.mark.parametrize(
    ("family", "x", "w", "arguments", "dtype"),
    [
        (CONV2D, X, W, SAME, "complex64"),
        (DEPTHWISE, X, (3, 3, 4, 2), SAME, "complex64"),
        (CONV3D, (1, 3, 4, 4, 2), (2, 2, 2, 2, 3), SAME_3D, "complex128"),
        (CONV3D, (1, 3, 4, 4, 4), (2, 2, 2, 2, 6), SAME_3D, "float32"),
    ],
    ids=["conv2d_complex", "depthwise_complex", "conv3d_complex", "conv3d_groups"],
)
def test_calls_beyond_tensorflow_are_supported(tf, family, x, w, arguments, dtype):
    x, w = integers(*x, dtype=dtype), integers(*w, dtype=dtype, seed=1)
    with pytest.raises(tf.errors.OpError):
        getattr(tf.raw_ops, family.forward)(input=x, filter=w, **arguments)
    y = getattr(raw_ops, family.forward)(input=x, filter=w, **arguments)
    assert y.dtype == dtype
    for name in (family.backprop_input, family.backprop_filter):
        gradient = getattr(raw_ops, name)(**family.calls(x, w, y)[name], **arguments)
        assert gradient.shape == (x if name == family.backprop_input else w).shape


# -- adjoint identity, for layers that TensorFlow cannot compute on a CPU --------------------------


@pytest.mark.parametrize(
    ("family", "x", "w", "arguments"),
    [
        (CONV3D, (2, 4, 5, 6, 6), (2, 3, 2, 2, 9), SAME_3D),
        (
            DEPTHWISE,
            (1, 9, 8, 3),
            (3, 2, 3, 2),
            window(2, 1, padding="VALID", dilations=(1, 3)),
        ),
        (
            DEPTHWISE,
            (1, 3, 9, 8),
            (3, 2, 3, 2),
            window(
                2,
                2,
                padding="EXPLICIT",
                explicit_paddings=[0, 0, 0, 0, 1, 0, 2, 1],
                data_format="NCHW",
            ),
        ),
        (CONV2D, (0, 5, 5, 3), (3, 3, 3, 4), SAME),
    ],
    ids=["grouped_volume", "strides_and_dilations_differ", "explicit_channels_first", "empty"],
)
def test_layers_beyond_tensorflow_are_adjoint(family, x, w, arguments):
    x, w = integers(*x), integers(*w, seed=1)
    y = getattr(raw_ops, family.forward)(input=x, filter=w, **arguments)
    dy = integers(*y.shape, seed=2)
    calls = family.calls(x, w, dy)
    dx, dw = (
        getattr(raw_ops, name)(**calls[name], **arguments)
        for name in (family.backprop_input, family.backprop_filter)
    )
    assert (dx.shape, dw.shape) == (x.shape, w.shape)
    assert (y * dy).sum() == (x * dx).sum() == (w * dw).sum()


def test_depthwise_filter_may_have_any_strides():
    x, w = integers(1, 6, 6, 3), integers(2, 4, 3, 3, seed=1)
    view = w.transpose(3, 2, 0, 1)[:, ::-1, :, ::-1]  # shape (3, 3, 2, 4), not contiguous
    x = x[..., [0, 1]]
    arguments = window(1, 1, padding="VALID")
    np.testing.assert_array_equal(
        raw_ops.DepthwiseConv2dNative(input=x, filter=view, **arguments),
        raw_ops.DepthwiseConv2dNative(input=x, filter=view.copy(), **arguments),
    )


# -- errors ----------------------------------------------------------------------------------------


def conv2d(**changes: Any) -> np.ndarray:
    call = {"input": integers(1, 5, 5, 4), "filter": integers(3, 3, 4, 6), **SAME}
    return raw_ops.Conv2D(**{**call, **changes})


PADDED = {"padding": "EXPLICIT"}


@pytest.mark.parametrize(
    ("changes", "message", "repaired"),
    [
        (
            {"strides": [2, 1, 1, 1]},
            "strides must be 1 on the batch and channel axes of NHWC: got [2, 1, 1, 1]. Use "
            "strides=[1, 1, 1, 1]",
            {"strides": [1, 1, 1, 1]},
        ),
        ({"dilations": [1, 2, 1, 3]}, ". Use dilations=[1, 2, 1, 1]", {"dilations": [1, 2, 1, 1]}),
        ({"strides": [2, 2]}, ". Use strides=[1, 2, 2, 1]", {"strides": [1, 2, 2, 1]}),
        ({"strides": [1, 0, 1, 1]}, "at least 1 (axis H): got 0. Use 1", {"strides": [1, 1, 1, 1]}),
        ({"padding": "SMAE"}, "'SMAE'. Did you mean 'SAME'? Known: 'SAME', ", {"padding": "SAME"}),
        (
            {"explicit_paddings": [0, 0, 1, 1, 1, 1, 0, 0]},
            "with padding='SAME'. Use padding='EXPLICIT', or leave out explicit_paddings",
            PADDED,
        ),
        (
            {**PADDED, "explicit_paddings": [1, 1]},
            "two values for each axis of NHWC: got 2 values. Pass 8 integers: the padding before",
            {"explicit_paddings": [0] * 8},
        ),
        (
            {**PADDED, "explicit_paddings": [0, 1, 1, 1, 1, 1, 2, 0]},
            "1, 1, 2, 0]. Use explicit_paddings=[0, 0, 1, 1, 1, 1, 0, 0]",
            {"explicit_paddings": [0, 0, 1, 1, 1, 1, 0, 0]},
        ),
        ({"data_format": "NHCW"}, "Known: 'NHWC', 'NCHW'", {"data_format": "NHWC"}),
        ({"data_format": "NDHWC"}, "the input has 2. Use 'NHWC', or", {"data_format": "NHWC"}),
        (
            {"input": integers(2, 1, 5, 5, 4)},
            "input must have 4 axes: got shape 2x1x5x5x4. Remove the axis of size 1: 2x5x5x4",
            {"input": integers(2, 5, 5, 4)},
        ),
        (
            {"filter": integers(0, 3, 4, 6)},
            "H = 0. Use positive sizes: input 1x5x5x4 was read as NHWC, filter 0x3x4x6 as HWIO",
            {"filter": integers(1, 3, 4, 6)},
        ),
    ],
    ids=lambda value: None,
)
def test_error_remedies_work(changes, message, repaired):
    with pytest.raises(ConvError) as caught:
        conv2d(**changes)
    assert message in str(caught.value)
    conv2d(**{**changes, **repaired})


def test_conv3d_rejects_explicit_padding():
    with pytest.raises(ConvError, match="unknown padding: 'EXPLICIT'"):
        raw_ops.Conv3D(
            input=integers(1, 3, 3, 3, 2),
            filter=integers(2, 2, 2, 2, 2),
            **window(1, 1, 1, padding="EXPLICIT"),
        )


@pytest.mark.parametrize("sizes", [[5], [5, 5, 5], [1, 5, 5, 4, 1]], ids=str)
def test_input_sizes_of_wrong_length_are_rejected(sizes):
    with pytest.raises(ConvError) as caught:
        raw_ops.Conv2DBackpropInput(
            input_sizes=sizes,
            filter=integers(3, 3, 4, 6),
            out_backprop=integers(1, 5, 5, 6),
            **SAME,
        )
    assert "input_sizes must be the input's shape of 4 values, or its 2 spatial" in str(
        caught.value
    )
    number = "1 value" if len(sizes) == 1 else f"{len(sizes)} values"
    assert f"got {number}, " in caught.value.values
    remedy = "Use input_sizes=(1, 5, 5, 4)" if len(sizes) == 5 else "Pass 4 values in NHWC order"
    assert caught.value.remedy == remedy


class DeviceSizes:
    """Integers in device memory, which can only be read with tolist()."""

    def __init__(self, *values: int) -> None:
        self.values, self.read = values, 0

    def tolist(self) -> list[int]:
        self.read += 1
        return list(self.values)


def test_sizes_in_device_memory_are_read_once():
    sizes = DeviceSizes(1, 5, 5, 3)
    dx = raw_ops.Conv2DBackpropInput(
        input_sizes=sizes,
        filter=integers(3, 3, 3, 4),
        out_backprop=integers(1, 3, 3, 4),
        **window(2, 2),
    )
    assert dx.shape == (1, 5, 5, 3)
    assert sizes.read == 1


# -- spellings that TensorFlow accepts or rejects --------------------------------------------------

PLAIN = {"input": np.ones((1, 4, 4, 2), "float32"), "filter": np.ones((3, 3, 2, 1), "float32")}


@pytest.mark.parametrize(
    "spelled",
    [
        {"data_format": None},
        {"data_format": b"NHWC"},
        {"dilations": None},
        {"padding": b"SAME"},
    ],
    ids=str,
)
def test_spellings_of_defaults_are_accepted(spelled):
    given = {**PLAIN, **SAME}
    expected = raw_ops.Conv2D(**given)
    np.testing.assert_array_equal(raw_ops.Conv2D(**{**given, **spelled}), expected)
    tf = pytest.importorskip("tensorflow")
    np.testing.assert_array_equal(tf.raw_ops.Conv2D(**{**given, **spelled}), expected)


@pytest.mark.parametrize(
    ("spelled", "said"), [({"padding": "same"}, "'SAME'"), ({"data_format": "nhwc"}, "'NHWC'")]
)
def test_lower_case_values_are_rejected(spelled, said):
    given = {**PLAIN, **SAME, **spelled}
    with pytest.raises(ConvError, match=f"Did you mean {said}"):
        raw_ops.Conv2D(**given)


def test_bias_gradient_accepts_spellings_of_the_format():
    dy = np.arange(8, dtype="float32").reshape(1, 2, 2, 2)
    expected = raw_ops.BiasAddGrad(out_backprop=dy)
    for spelled in (None, b"NHWC"):
        got = raw_ops.BiasAddGrad(out_backprop=dy, data_format=spelled)
        np.testing.assert_array_equal(got, expected)
