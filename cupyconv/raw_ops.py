"""TensorFlow's ``tf.raw_ops`` for convolutions, on NumPy and CuPy arrays.

Names, keywords and defaults are TensorFlow's, so existing code needs only one changed import::

    from cupyconv import raw_ops
    dx = raw_ops.Conv2DBackpropInput(input_sizes=[1, 5, 5, 3], filter=w, out_backprop=dy,
                                     strides=[1, 2, 2, 1], padding="SAME")

Details that TensorFlow's documentation leaves out:

* ``filter`` is (spatial sizes..., in_channels / groups, out_channels) in every ``data_format``; a
  depthwise filter is (height, width, channels, multiplier), and its output channel
  ``c * multiplier + m`` reads input channel c.
* ``strides`` and ``dilations`` follow ``data_format``; their batch and channel entries must be 1.
* ``padding`` is "SAME", "VALID", or in two dimensions "EXPLICIT".  With "EXPLICIT",
  ``explicit_paddings`` is a flat list with the padding before and after each axis of
  ``data_format``.
* The number of groups is the number of input channels divided by the size of the filter's
  second-last axis.
* ``input_sizes`` is the whole shape of the input, or only its spatial sizes.  With spatial sizes
  alone, the input has the batch size of ``out_backprop`` and as many channels as the size of the
  filter's second-last axis.
* Sizes may be lists, tuples or integer arrays.  To read an array in GPU memory, the host waits for
  the GPU; a list avoids this wait.
* ``data_format=None`` and ``dilations=None`` select the defaults.  Strings such as ``padding`` may
  be bytes.
* ``use_cudnn_on_gpu`` and ``name`` have no effect.

Differences from TensorFlow:

* Invalid arguments raise ConvError, not InvalidArgumentError.
* complex64 and complex128 are supported; integers are not.
* Conv3D and its gradients support groups, and ``input_sizes`` may be three spatial sizes.
* BiasAddGrad supports arrays with 3 to 5 axes.

Examples assume the import above and ``import numpy as np``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Never, TypeVar, overload

from cupyconv import arrays, formats
from cupyconv.binding import OPERATIONS, ArgumentNames
from cupyconv.calls import compute
from cupyconv.errors import (
    ConvError,
    ConvTypeError,
    Fix,
    Names,
    naming_arguments,
    shown,
    unknown_word,
)
from cupyconv.generated import describe, require_arguments
from cupyconv.problem import (
    PADDING_WORDS,
    ConvOptions,
    counted,
    integers,
    named_problem,
    offering,
    require_output,
    shape_text,
)

__all__ = [
    "BiasAddGrad",
    "Conv2D",
    "Conv2DBackpropFilter",
    "Conv2DBackpropFilterV2",
    "Conv2DBackpropInput",
    "Conv2DBackpropInputV2",
    "Conv3D",
    "Conv3DBackpropFilterV2",
    "Conv3DBackpropInputV2",
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
]


def __dir__() -> list[str]:
    return sorted(__all__)


Padding2D = Literal["SAME", "VALID", "EXPLICIT"]
Padding3D = Literal["SAME", "VALID"]
Format2D = Literal["NHWC", "NCHW"]
Format3D = Literal["NDHWC", "NCDHW"]

# Types of an op's arguments padding, data_format, explicit_paddings and use_cudnn_on_gpu, in this
# order.  Never is the type of an argument that the op does not have.
_P = TypeVar("_P", contravariant=True)
_F = TypeVar("_F", contravariant=True)
_S = TypeVar("_S", contravariant=True)
_C = TypeVar("_C", contravariant=True)

if TYPE_CHECKING:
    from typing import NotRequired, Protocol, TypedDict, Unpack

    from numpy.typing import NDArray

    from cupyconv.arrays import CuPyArray, Exporter, Scalar

    _A = TypeVar("_A")

    class _Layer(TypedDict, Generic[_P, _F, _S, _C]):
        strides: Sequence[int]
        padding: _P
        use_cudnn_on_gpu: NotRequired[_C]
        explicit_paddings: NotRequired[_S]
        data_format: NotRequired[_F | None]
        dilations: NotRequired[Sequence[int] | None]
        name: NotRequired[str | None]

    class _Tensors(_Layer[_P, _F, _S, _C], Generic[_A, _P, _F, _S, _C]):
        input: _A
        filter: _A

    class _InputTensors(_Layer[_P, _F, _S, _C], Generic[_A, _P, _F, _S, _C]):
        input_sizes: Any
        filter: _A
        out_backprop: _A

    class _FilterTensors(_Layer[_P, _F, _S, _C], Generic[_A, _P, _F, _S, _C]):
        input: _A
        filter_sizes: Any
        out_backprop: _A

    class _TensorsV2(_Tensors[_A, _P, _F, _S, _C]):
        out_backprop: _A

    class _Forward(Protocol[_P, _F, _S, _C]):
        @overload
        def __call__(
            self, **given: Unpack[_Tensors[NDArray[Scalar], _P, _F, _S, _C]]
        ) -> NDArray[Scalar]: ...
        @overload
        def __call__(self, **given: Unpack[_Tensors[CuPyArray, _P, _F, _S, _C]]) -> CuPyArray: ...
        @overload
        def __call__(self, **given: Unpack[_Tensors[Exporter, _P, _F, _S, _C]]) -> Any: ...

    class _BackpropInput(Protocol[_P, _F, _S, _C]):
        @overload
        def __call__(
            self, **given: Unpack[_InputTensors[NDArray[Scalar], _P, _F, _S, _C]]
        ) -> NDArray[Scalar]: ...
        @overload
        def __call__(
            self, **given: Unpack[_InputTensors[CuPyArray, _P, _F, _S, _C]]
        ) -> CuPyArray: ...
        @overload
        def __call__(self, **given: Unpack[_InputTensors[Exporter, _P, _F, _S, _C]]) -> Any: ...

    class _BackpropFilter(Protocol[_P, _F, _S, _C]):
        @overload
        def __call__(
            self, **given: Unpack[_FilterTensors[NDArray[Scalar], _P, _F, _S, _C]]
        ) -> NDArray[Scalar]: ...
        @overload
        def __call__(
            self, **given: Unpack[_FilterTensors[CuPyArray, _P, _F, _S, _C]]
        ) -> CuPyArray: ...
        @overload
        def __call__(self, **given: Unpack[_FilterTensors[Exporter, _P, _F, _S, _C]]) -> Any: ...

    class _BackpropV2(Protocol[_P, _F, _S, _C]):
        @overload
        def __call__(
            self, **given: Unpack[_TensorsV2[NDArray[Scalar], _P, _F, _S, _C]]
        ) -> NDArray[Scalar]: ...
        @overload
        def __call__(self, **given: Unpack[_TensorsV2[CuPyArray, _P, _F, _S, _C]]) -> CuPyArray: ...
        @overload
        def __call__(self, **given: Unpack[_TensorsV2[Exporter, _P, _F, _S, _C]]) -> Any: ...


_ONES_4 = (1, 1, 1, 1)
_ONES_5 = (1, 1, 1, 1, 1)

_NAMES = Names(
    y="out_backprop",
    x_shape="input_sizes",
    w_shape="filter_sizes",
    stride="strides",
    padding="explicit_paddings",
    dilation="dilations",
    absent=frozenset(("groups", "filter_format", "padding")),
    entries="all",
    pad=lambda value: ("padding", value.upper()) if isinstance(value, str) else None,
)
_ARGUMENT_NAMES = {
    "forward": ArgumentNames(("input", "filter"), tensors=_NAMES._replace(y="the output")),
    "backprop_input": ArgumentNames(("filter", "out_backprop"), tensors=_NAMES),
    "backprop_filter": ArgumentNames(("input", "out_backprop"), tensors=_NAMES),
    "backprop_bias": ArgumentNames(("out_backprop",)),
}

# -- gradients -------------------------------------------------------------------------------------


def _backprop_input(
    window: _Window, depthwise: bool, *, input_sizes: Any, filter: Any, out_backprop: Any
) -> Any:
    """Compute the gradient of ``{forward}`` with respect to its input.

    A complex filter is conjugated, as in ``cupyconv.conv_backprop_input``.

    Args:
        input_sizes: shape of the input in ``data_format`` order, {axes} integers; or its
            {spatial_axes} spatial sizes, for an input with the batch size of ``out_backprop`` and
            as many channels as the size of the filter's {depth_axis} axis.
        filter: {filter}; float16, bfloat16, float32, float64, complex64 or complex128.
        out_backprop: gradient with respect to the output, {output} in ``data_format`` order, with
            the dtype and device of filter.
        {keywords}: as for ``{forward}``.

    Returns:
        Array with the shape of the input, with the dtype and device of filter.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``Conv2D``.

    >>> w, dy = np.ones({w}), np.ones({y})
    >>> layer = dict(strides={strides}, padding="SAME")
    >>> raw_ops.{name}(
    ...     input_sizes={x}, filter=w, out_backprop=dy, **layer
    ... ).shape
    {x}
    """
    w, dy = _array(window, "filter", filter), arrays.take("out_backprop", out_backprop)[0]
    shape = _input_shape(input_sizes, w, dy, window)
    options = _checked("backprop_input", (shape, w.shape, dy.shape), window, depthwise)
    w = w.reshape(_grouped_shape(w.shape)) if depthwise else w
    return _compute("backprop_input", w, dy, shape, options)


def _backprop_filter(
    window: _Window, depthwise: bool, *, input: Any, filter_sizes: Any, out_backprop: Any
) -> Any:
    """Compute the gradient of ``{forward}`` with respect to its filter.

    A complex input is conjugated, as in ``cupyconv.conv_backprop_filter``.

    Args:
        input: {input}; float16, bfloat16, float32, float64, complex64 or complex128.
        filter_sizes: shape of the filter, {filter}: {axes} integers.
        out_backprop: gradient with respect to the output, {output} in ``data_format`` order, with
            the dtype and device of input.
        {keywords}: as for ``{forward}``.

    Returns:
        Array of shape ``filter_sizes``, with the dtype and device of input.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``Conv2D``.

    >>> x, dy = np.ones({x}), np.ones({y})
    >>> layer = dict(strides={strides}, padding="SAME")
    >>> raw_ops.{name}(
    ...     input=x, filter_sizes={w}, out_backprop=dy, **layer
    ... ).shape
    {w}
    """
    x, dy = arrays.take("input", input)[0], arrays.take("out_backprop", out_backprop)[0]
    shape = _filter_shape(filter_sizes, window, depthwise)
    options = _checked("backprop_filter", (x.shape, shape, dy.shape), window, depthwise)
    grouped = _grouped_shape(shape) if depthwise else shape
    return _compute("backprop_filter", x, dy, grouped, options).reshape(shape)


def _backprop_input_v2(
    window: _Window, depthwise: bool, *, input: Any, filter: Any, out_backprop: Any
) -> Any:
    """Compute the gradient of ``{forward}`` with respect to its input, whose shape ``input`` has.

    A complex filter is conjugated, as in ``cupyconv.conv_backprop_input``.

    Args:
        input: array with the shape of the convolution's input, {input}; only the shape is read.
        filter: {filter}; float16, bfloat16, float32, float64, complex64 or complex128.
        out_backprop: gradient with respect to the output, {output} in ``data_format`` order, with
            the dtype and device of filter.
        {keywords}: as for ``{forward}``.

    Returns:
        Array with the shape of input, with the dtype and device of filter.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``Conv2D``.

    >>> x, w, dy = np.empty({x}), np.ones({w}), np.ones({y})
    >>> raw_ops.{name}(
    ...     input=x, filter=w, out_backprop=dy, strides={strides}, padding="SAME"
    ... ).shape
    {x}
    """
    sizes = _array(window, "input", input).shape
    return _backprop_input(
        window, depthwise, input_sizes=sizes, filter=filter, out_backprop=out_backprop
    )


def _backprop_filter_v2(
    window: _Window, depthwise: bool, *, input: Any, filter: Any, out_backprop: Any
) -> Any:
    """Compute the gradient of ``{forward}`` with respect to its filter, whose shape ``filter`` has.

    A complex input is conjugated, as in ``cupyconv.conv_backprop_filter``.

    Args:
        input: {input}; float16, bfloat16, float32, float64, complex64 or complex128.
        filter: array with the shape of the filter, {filter}; only the shape is read.
        out_backprop: gradient with respect to the output, {output} in ``data_format`` order, with
            the dtype and device of input.
        {keywords}: as for ``{forward}``.

    Returns:
        Array with the shape of filter, with the dtype and device of input.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``Conv2D``.

    >>> x, w, dy = np.ones({x}), np.empty({w}), np.ones({y})
    >>> raw_ops.{name}(
    ...     input=x, filter=w, out_backprop=dy, strides={strides}, padding="SAME"
    ... ).shape
    {w}
    """
    sizes = _array(window, "filter", filter).shape
    return _backprop_filter(
        window, depthwise, input=input, filter_sizes=sizes, out_backprop=out_backprop
    )


class _Layers(Generic[_P, _F, _S, _C]):
    """Layers that an op computes, whose gradients take the same keywords.

    Args:
        rank: number of spatial axes.
        depthwise: whether the filter is depthwise, (height, width, channels, multiplier).
    """

    def __init__(self, rank: int, depthwise: bool = False) -> None:
        self.rank, self.depthwise = rank, depthwise

    def forward(self, function: Callable[..., Any]) -> _Forward[_P, _F, _S, _C]:
        """Take the keywords of the gradients from the function that computes the output."""
        self.name = function.__name__
        _, _, *self.keywords = inspect.signature(function).parameters.values()
        self.defaults = {p.name: p.default for p in self.keywords if p.default is not p.empty}
        return naming_arguments(function)

    def backprop_input(self, name: str) -> _BackpropInput[_P, _F, _S, _C]:
        return self._gradient(name, _backprop_input)

    def backprop_filter(self, name: str) -> _BackpropFilter[_P, _F, _S, _C]:
        return self._gradient(name, _backprop_filter)

    def backprop_input_v2(self, name: str) -> _BackpropV2[_P, _F, _S, _C]:
        return self._gradient(name, _backprop_input_v2)

    def backprop_filter_v2(self, name: str) -> _BackpropV2[_P, _F, _S, _C]:
        return self._gradient(name, _backprop_filter_v2)

    def _gradient(self, name: str, compute: Callable[..., Any]) -> Any:
        """Return the op that computes a gradient.

        Args:
            name: name of the op.
            compute: function of the window and the tensors, whose docstring has the fields of
                ``_words``.
        """

        def op(*args: Any, **given: Any) -> Any:
            if args or not required <= given.keys() <= known:
                require_arguments(op, args, given)
            operands = {p.name: given.pop(p.name) for p in tensors}
            window = _window(self.rank, **{**self.defaults, **given})
            return compute(window, self.depthwise, **operands)

        _, _, *tensors = inspect.signature(compute).parameters.values()
        describe(op, name, [*tensors, *self.keywords], compute, **self._words())
        known = {p.name for p in (*tensors, *self.keywords)}
        required = known - self.defaults.keys()
        return op

    def _words(self) -> dict[str, Any]:
        """Return the texts of the fields in the docstrings of gradients."""
        axes = ("depth", "height", "width")[-self.rank :]
        first, last = formats.data_formats(self.rank)
        spatial = ", ".join(axes)
        depth, filters, channels = "in_channels / groups", "out_channels", "out_channels"
        if self.depthwise:
            depth, filters, channels = "in_channels", "multiplier", "in_channels * multiplier"
        return {
            "forward": self.name,
            "keywords": ", ".join(p.name for p in self.keywords),
            "input": f'(batch, {spatial}, in_channels) with "{last}", '
            f'(batch, in_channels, {spatial}) with "{first}"',
            "filter": f"({', '.join(f'filter_{axis}' for axis in axes)}, {depth}, {filters})",
            "output": f"(batch, {', '.join(f'out_{axis}' for axis in axes)}, {channels})",
            "axes": ("four", "five")[self.rank - 2],
            "spatial_axes": ("two", "three")[self.rank - 2],
            "depth_axis": ("third", "fourth")[self.rank - 2],
            "x": (1, *[4] * self.rank, 2),
            "w": (*[3] * self.rank, 2, 5),
            "y": (1, *[2] * self.rank, 10 if self.depthwise else 5),
            "strides": [1, *[2] * self.rank, 1],
        }


# -- the functions ---------------------------------------------------------------------------------

_CONV_2D = _Layers[Padding2D, Format2D, Sequence[int], bool](2)


@_CONV_2D.forward
def Conv2D(
    *,
    input: Any,
    filter: Any,
    strides: Sequence[int],
    padding: Padding2D,
    use_cudnn_on_gpu: bool = True,
    explicit_paddings: Sequence[int] = (),
    data_format: Format2D | None = "NHWC",
    dilations: Sequence[int] | None = _ONES_4,
    name: str | None = None,
) -> Any:
    """Compute the output of a 2-D convolution, as ``cupyconv.conv_forward`` does.

    The number of groups is the number of input channels divided by the size of the filter's third
    axis.

    Args:
        input: (batch, height, width, in_channels) with "NHWC", (batch, in_channels, height, width)
            with "NCHW"; float16, bfloat16, float32, float64, complex64 or complex128.
        filter: (filter_height, filter_width, in_channels / groups, out_channels), with input's
            dtype and device.
        strides: four integers in ``data_format`` order; 1 for the batch and the channels.
        padding: "SAME", "VALID" or "EXPLICIT".
        use_cudnn_on_gpu: ignored.
        explicit_paddings: with "EXPLICIT", eight integers: the padding before and after each axis
            of ``data_format``; otherwise empty.
        data_format: "NHWC" or "NCHW"; None is "NHWC".
        dilations: four integers in ``data_format`` order; 1 for the batch and the channels; None is
            1 for all axes.
        name: ignored.

    Returns:
        (batch, out_height, out_width, out_channels) in ``data_format`` order, with the dtype and
        device of input.

    Raises:
        ConvError: the arguments describe no valid convolution.
        ConvTypeError: an argument has the wrong type, a dtype is unsupported, or the arrays differ
            in dtype or device.
        DeviceError: CuPy or a GPU is required and missing.

    >>> x, w = np.ones((1, 4, 4, 2), "float32"), np.ones((3, 3, 2, 5), "float32")
    >>> raw_ops.Conv2D(input=x, filter=w, strides=[1, 2, 2, 1], padding="SAME").shape
    (1, 2, 2, 5)
    """
    window = _window(2, data_format, strides, dilations, padding, explicit_paddings)
    return _forward(input, filter, window)


Conv2DBackpropInput = _CONV_2D.backprop_input("Conv2DBackpropInput")
Conv2DBackpropFilter = _CONV_2D.backprop_filter("Conv2DBackpropFilter")
Conv2DBackpropInputV2 = _CONV_2D.backprop_input_v2("Conv2DBackpropInputV2")
Conv2DBackpropFilterV2 = _CONV_2D.backprop_filter_v2("Conv2DBackpropFilterV2")

_CONV_3D = _Layers[Padding3D, Format3D, Never, Never](3)


@_CONV_3D.forward
def Conv3D(
    *,
    input: Any,
    filter: Any,
    strides: Sequence[int],
    padding: Padding3D,
    data_format: Format3D | None = "NDHWC",
    dilations: Sequence[int] | None = _ONES_5,
    name: str | None = None,
) -> Any:
    """Compute the output of a 3-D convolution, as ``cupyconv.conv_forward`` does.

    The number of groups is the number of input channels divided by the size of the filter's fourth
    axis.

    Args:
        input: (batch, depth, height, width, in_channels) with "NDHWC", (batch, in_channels, depth,
            height, width) with "NCDHW"; float16, bfloat16, float32, float64, complex64 or
            complex128.
        filter: (filter_depth, filter_height, filter_width, in_channels / groups, out_channels),
            with input's dtype and device.
        strides: five integers in ``data_format`` order; 1 for the batch and the channels.
        padding: "SAME" or "VALID".
        data_format: "NDHWC" or "NCDHW"; None is "NDHWC".
        dilations: five integers in ``data_format`` order; 1 for the batch and the channels; None is
            1 for all axes.
        name: ignored.

    Returns:
        (batch, out_depth, out_height, out_width, out_channels) in ``data_format`` order, with the
        dtype and device of input.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``Conv2D``.

    >>> x, w = np.ones((1, 3, 4, 4, 2), "float32"), np.ones((2, 2, 2, 2, 5), "float32")
    >>> raw_ops.Conv3D(input=x, filter=w, strides=[1, 1, 2, 2, 1], padding="SAME").shape
    (1, 3, 2, 2, 5)
    """
    return _forward(input, filter, _window(3, data_format, strides, dilations, padding))


Conv3DBackpropInputV2 = _CONV_3D.backprop_input("Conv3DBackpropInputV2")
Conv3DBackpropFilterV2 = _CONV_3D.backprop_filter("Conv3DBackpropFilterV2")

_DEPTHWISE = _Layers[Padding2D, Format2D, Sequence[int], Never](2, depthwise=True)


@_DEPTHWISE.forward
def DepthwiseConv2dNative(
    *,
    input: Any,
    filter: Any,
    strides: Sequence[int],
    padding: Padding2D,
    explicit_paddings: Sequence[int] = (),
    data_format: Format2D | None = "NHWC",
    dilations: Sequence[int] | None = _ONES_4,
    name: str | None = None,
) -> Any:
    """Compute the output of a depthwise 2-D convolution: each input channel has its own filters.

    Output channel ``c * multiplier + m`` is input channel c correlated with filter[..., c, m].

    Args:
        input: (batch, height, width, in_channels) with "NHWC", (batch, in_channels, height, width)
            with "NCHW"; float16, bfloat16, float32, float64, complex64 or complex128.
        filter: (filter_height, filter_width, in_channels, multiplier), with input's dtype and
            device.
        strides, padding, explicit_paddings, data_format, dilations, name: as for ``Conv2D``.

    Returns:
        (batch, out_height, out_width, in_channels * multiplier) in ``data_format`` order, with the
        dtype and device of input.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``Conv2D``.

    >>> x, w = np.ones((1, 4, 4, 3), "float32"), np.ones((3, 3, 3, 2), "float32")
    >>> layer = {"strides": [1, 1, 1, 1], "padding": "VALID"}
    >>> raw_ops.DepthwiseConv2dNative(input=x, filter=w, **layer).shape
    (1, 2, 2, 6)
    """
    window = _window(2, data_format, strides, dilations, padding, explicit_paddings)
    return _forward(input, filter, window, depthwise=True)


DepthwiseConv2dNativeBackpropInput = _DEPTHWISE.backprop_input("DepthwiseConv2dNativeBackpropInput")
DepthwiseConv2dNativeBackpropFilter = _DEPTHWISE.backprop_filter(
    "DepthwiseConv2dNativeBackpropFilter"
)


@overload
def BiasAddGrad(
    *, out_backprop: NDArray[Scalar], data_format: Format2D | None = "NHWC", name: str | None = None
) -> NDArray[Scalar]: ...
@overload
def BiasAddGrad(
    *, out_backprop: CuPyArray, data_format: Format2D | None = "NHWC", name: str | None = None
) -> CuPyArray: ...
@overload
def BiasAddGrad(
    *, out_backprop: Exporter, data_format: Format2D | None = "NHWC", name: str | None = None
) -> Any: ...
@naming_arguments
def BiasAddGrad(
    *, out_backprop: Any, data_format: Format2D | None = "NHWC", name: str | None = None
) -> Any:
    """Compute the gradient of a bias: the sum of out_backprop over all axes except the channels.

    The result is that of ``cupyconv.conv_backprop_bias``.

    Args:
        out_backprop: gradient with respect to the output, with 3 to 5 axes; float16, bfloat16,
            float32, float64, complex64 or complex128.
        data_format: channel axis, for any number of axes: "NHWC" selects the last axis, and "NCHW"
            selects the second; None is "NHWC".
        name: ignored.

    Returns:
        Array of shape (channels,), with the dtype and device of out_backprop.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``Conv2D``.

    >>> raw_ops.BiasAddGrad(out_backprop=np.ones((1, 2, 2, 3), "float32")).tolist()
    [4.0, 4.0, 4.0]
    >>> raw_ops.BiasAddGrad(out_backprop=np.ones((1, 2, 2, 3)), data_format="NCHW").tolist()
    [6.0, 6.0]
    """
    words = {"NHWC": formats.CHANNELS_LAST, "NCHW": formats.CHANNELS_FIRST}
    word = "NHWC" if data_format is None else _word(data_format)
    if word not in words:
        raise unknown_word("data_format", data_format, words)
    options = ConvOptions(data_format=words[word])
    return _compute("backprop_bias", out_backprop, None, None, options)


# -- the passes, from TensorFlow's arguments -------------------------------------------------------


def _forward(input: Any, filter: Any, window: _Window, *, depthwise: bool = False) -> Any:
    x, w = arrays.take("input", input)[0], _array(window, "filter", filter)
    options = _checked("forward", (x.shape, w.shape, None), window, depthwise)
    w = w.reshape(_grouped_shape(w.shape)) if depthwise else w
    return _compute("forward", x, w, None, options)


def _compute(operation: str, first: Any, second: Any, shape: Any, layer: ConvOptions) -> Any:
    options = (shape, *layer, None, "ieee", "auto")
    return compute(operation, first, second, None, None, None, options, _ARGUMENT_NAMES[operation])


@lru_cache(maxsize=4096)
def _checked(
    operation: str, shapes: tuple[tuple[int, ...] | None, ...], window: _Window, depthwise: bool
) -> ConvOptions:
    """Check the arguments of a call, and return its options in cupyconv's form.

    Args:
        operation: "forward", "backprop_input" or "backprop_filter".
        shapes: shapes of the input, of the filter in TensorFlow's format and of out_backprop, which
            is None in the forward pass.
        window: arguments that describe the windows.
        depthwise: whether the filter is depthwise, (height, width, channels, multiplier).
    """
    names = _ARGUMENT_NAMES[operation].tensors

    def require(
        input_shape: Any, filter_shape: Any, output_shape: Any, **changed: Any
    ) -> ConvOptions:
        window = _Window(**changed)
        if output_shape is not None:
            _require_axes(window, "out_backprop", output_shape)
        if operation == "backprop_input":
            _require_input_sizes(input_shape, window)
        else:
            _require_axes(window, "input", input_shape)
        options = _options(window)
        channels = input_shape[formats.data_axes(window.data_format)[1]]
        if depthwise:
            _require_depth(channels, filter_shape)
            filter_shape = _grouped_shape(filter_shape)
            groups = max(channels, 1)  # ConvProblem rejects an input without channels
        else:
            groups = _groups(channels, filter_shape)
        options = options._replace(groups=groups)
        layer = {**options._asdict(), "dtype": "float32"}
        problem = named_problem(names, input_shape, filter_shape, **layer)
        if output_shape is not None:
            require_output(names, problem, output_shape)
        return options

    keys = ("input_shape", "filter_shape", "output_shape")
    given = dict(zip(keys, shapes, strict=True)) | window._asdict()
    return offering(require, names, given, OPERATIONS[operation].sizes)


# -- reading the arguments -------------------------------------------------------------------------


class _Window(NamedTuple):
    """Arguments that describe the windows, in TensorFlow's form.

    The field names are the keys that ``remedies.offering`` uses for these arguments.  ``sides`` is
    the argument explicit_paddings.
    """

    data_format: str
    filter_format: str
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: str
    sides: tuple[int, ...]


def _window(
    rank: int,
    data_format: str | None,
    strides: Sequence[int],
    dilations: Sequence[int] | None,
    padding: str,
    explicit_paddings: Sequence[int] | None = None,
    **ignored: Any,
) -> _Window:
    """Check the types and the values of the arguments that describe the windows, and return them.

    Args:
        rank: number of spatial axes.
        explicit_paddings: None if the op has no such argument.
        ignored: arguments that have no effect.

    The other arguments are those of the op.
    """
    first, last = formats.data_formats(rank)
    word = last if data_format is None else _word(data_format)
    if word not in (first, last):
        if any(word in formats.data_formats(other) for other in formats.SPATIAL_AXES):
            formats.resolve_data_format(word, rank)  # raises an error that names the other rank
        raise unknown_word("data_format", data_format, (last, first))
    word_of_padding = _word(padding)
    known = ("SAME", "VALID") if explicit_paddings is None else ("SAME", "VALID", "EXPLICIT")
    if word_of_padding not in known:
        raise unknown_word("padding", padding, known, PADDING_WORDS)
    steps = _integers("strides", strides)
    gaps = _integers("dilations", (1,) * (rank + 2) if dilations is None else dilations)
    sides = _integers("explicit_paddings", () if explicit_paddings is None else explicit_paddings)
    filter_format = formats.filter_formats(rank)[1]
    return _Window(word, filter_format, steps, gaps, word_of_padding, sides)


def _options(window: _Window) -> ConvOptions:
    """Return the options in cupyconv's form, with groups=1."""
    layout = window.data_format
    stride = _of_spatial_axes("strides", window.stride, layout)
    dilation = _of_spatial_axes("dilations", window.dilation, layout)
    padding = _padding(window.padding, window.sides, layout)
    return ConvOptions(stride, padding, dilation, 1, layout, window.filter_format)


def _of_spatial_axes(what: str, values: tuple[int, ...], layout: str) -> tuple[int, ...]:
    if len(values) != len(layout):
        raise ConvError(
            f"{what} must have an entry for each axis of {layout}",
            _values_text(values),
            f"Pass {len(layout)} integers",
            candidates=(),
        )
    batch, channels, *spatial = formats.data_axes(layout)
    if values[batch] != 1 or values[channels] != 1:
        raise ConvError(
            f"{what} must be 1 on the batch and channel axes of {layout}",
            f"got {shown(list(values))}",
            candidates=(),
        )
    return tuple(values[axis] for axis in spatial)


def _padding(word: str, sides: tuple[int, ...], layout: str) -> str | tuple[tuple[int, int], ...]:
    if word != "EXPLICIT":
        if sides:
            raise ConvError(
                "explicit_paddings must be empty unless padding is 'EXPLICIT'",
                f"got {shown(list(sides))} with padding={word!r}",
                "Use padding='EXPLICIT', or leave out explicit_paddings",
            )
        return word.lower()
    batch, channels, *spatial = formats.data_axes(layout)
    pairs = list(zip(sides[::2], sides[1::2], strict=False))
    if len(sides) != 2 * len(layout):
        few = len(sides) == 2 * len(spatial)
        raise ConvError(
            f"explicit_paddings must have two values for each axis of {layout}",
            f"got {counted(len(sides), 'value')}",
            f"Pass {2 * len(layout)} integers: the padding before and after each axis",
            candidates=[_paddings(pairs, layout)] if few else (),
        )
    if pairs[batch] != (0, 0) or pairs[channels] != (0, 0):
        other = formats.data_formats(len(spatial))[layout[1] == "C"]
        batch, channels, *other_spatial = formats.data_axes(other)
        is_other_order = pairs[batch] == pairs[channels] == (0, 0)
        spatial_pairs = [pairs[axis] for axis in (other_spatial if is_other_order else spatial)]
        raise ConvError(
            f"explicit_paddings must be 0 on the batch and channel axes of {layout}",
            f"got {shown(list(sides))}",
            candidates=[_paddings(spatial_pairs, layout)],
        )
    return tuple(pairs[axis] for axis in spatial)


def _paddings(pairs: Sequence[tuple[int, int]], layout: str) -> Fix:
    """Return the fix that passes the padding of the spatial axes as explicit_paddings.

    Args:
        pairs: (before, after) per spatial axis.
        layout: data format.
    """
    axes = dict(zip(formats.data_axes(layout)[2:], pairs, strict=True))
    sides = [side for axis in range(len(layout)) for side in axes.get(axis, (0, 0))]
    return Fix({"sides": sides}, (("explicit_paddings", sides),))


def _word(given: Any) -> str:
    """Return an option value as a str, without a change of case; TensorFlow also accepts bytes.

    A value of another type is returned as the text that error messages show.
    """
    if isinstance(given, bytes):
        return given.decode(errors="replace")
    # str.__str__ converts subclasses of str, whose methods may be replaced.
    return str.__str__(given) if isinstance(given, str) else shown(given)


def _integers(what: str, given: Any) -> tuple[int, ...]:
    """Return a sequence or array as a tuple of integers; GPU arrays are copied to the host."""
    try:
        return integers(what, given.tolist() if hasattr(given, "tolist") else given)
    except (ConvTypeError, NotImplementedError):  # the latter for PyTorch's device "meta"
        raise ConvTypeError(
            f"{what} must be a list of integers: got {shown(given)} of type {type(given).__name__}"
        ) from None


def _array(window: _Window, what: str, given: Any) -> Any:
    array, _ = arrays.take(what, given)
    _require_axes(window, what, array.shape)
    return array


def _require_axes(window: _Window, what: str, shape: tuple[int, ...]) -> None:
    axes = len(window.data_format)
    if len(shape) != axes:
        raise ConvError(
            f"{what} must have {axes} axes",
            f"got shape {shape_text(shape) or '()'}",
            f"Reshape it to {axes} axes",
            candidates=(),
        )


def _input_shape(input_sizes: Any, w: Any, dy: Any, window: _Window) -> tuple[int, ...]:
    sizes = _integers("input_sizes", input_sizes)
    axes = formats.data_axes(window.data_format)
    if len(sizes) != len(axes) - 2 or dy.ndim != len(axes):
        return sizes
    return formats.ordered(axes, (dy.shape[axes[0]], w.shape[-2], *sizes))


def _values_text(values: Sequence[int]) -> str:
    return f"got {counted(len(values), 'value')}, {shown(list(values))}"


def _require_input_sizes(sizes: tuple[int, ...], window: _Window) -> None:
    axes = len(window.data_format)
    if len(sizes) != axes:
        raise ConvError(
            f"input_sizes must be the input's shape of {axes} values, or its {axes - 2} spatial "
            "sizes",
            _values_text(sizes),
            f"Pass {axes} values in {window.data_format} order",
            candidates=(),
        )


def _filter_shape(filter_sizes: Any, window: _Window, depthwise: bool) -> tuple[int, ...]:
    sizes, axes = _integers("filter_sizes", filter_sizes), len(window.data_format)
    if len(sizes) != axes:
        needed = "spatial sizes, input channels and output channels"
        if depthwise:
            needed = "height, width, channels and filters per channel"
        rule = f"filter_sizes must be the filter's shape, which has {axes} values"
        raise ConvError(rule, _values_text(sizes), f"Pass its {needed}")
    return sizes


def _grouped_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    height, width, channels, multiplier = shape
    return height, width, 1, channels * multiplier


def _channels_text(channels: int, filter_shape: tuple[int, ...]) -> str:
    """Return the first part of an error text; the caller appends the filter's channels."""
    return (
        f"the input has {counted(channels, 'channel')}, the filter {shape_text(filter_shape)} has "
    )


def _groups(channels: int, filter_shape: tuple[int, ...]) -> int:
    """Return the number of groups, which TensorFlow infers from the filter's second-last axis."""
    depth = filter_shape[-2]
    if channels < 1 or depth < 1:
        return 1  # ConvProblem reports the size
    has = _channels_text(channels, filter_shape)
    if channels % depth:
        raise ConvError(
            "the input's channels must be a multiple of the filter's input channels",
            f"{has}{counted(depth, 'input channel')}",
            candidates=(),
        )
    groups, out_depth = channels // depth, filter_shape[-1]
    if out_depth % groups:
        raise ConvError(
            "the filter's output channels must be a multiple of the number of groups",
            f"{has}{counted(depth, 'input channel')} and {counted(out_depth, 'output channel')}, "
            f"so there are {channels} / {depth} = {groups} groups",
            candidates=(),
        )
    return groups


def _require_depth(channels: int, filter_shape: tuple[int, ...]) -> None:
    if filter_shape[2] != channels:
        raise ConvError(
            "a depthwise filter, (height, width, channels, multiplier), needs the input's channels",
            f"{_channels_text(channels, filter_shape)}{filter_shape[2]}",
            candidates=(),
        )
