"""The public functions: validate, plan, run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

from cupyconv import arrays, backends, formats
from cupyconv.backends import Backend, Tensors
from cupyconv.errors import ConvError, ConvTypeError, unknown_word
from cupyconv.gpu.parameters import ACTIVATIONS
from cupyconv.planning import Device, Plan, plan_pass
from cupyconv.planning import plan as _plan
from cupyconv.problem import ConvProblem, Padding, Size, dtype_name, shape_text

PRECISIONS = ("ieee", "tf32")
GRADIENTS = ("input", "filter", "bias")


class ConvGradients(NamedTuple):
    """The gradients of a layer; None for those that were not asked for."""

    dx: Any = None
    dw: Any = None
    db: Any = None


def conv_forward(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: str | None = None,
    filter_format: str | None = None,
    activation: str | None = None,
    precision: str = "ieee",
    impl: str = "auto",
    out: Any = None,
) -> Any:
    """y = activation(bias + x correlated with w).

    y[n, k, p, q] = sum over c, r, s of x[n, c, h, w] * w[k, c, r, s], where
    h = p * stride - pad + r * dilation, and likewise w from q and s.

    Args:
        x: input, (N, C, [[D,] H,] W) in ``data_format`` order; NumPy, CuPy, or exporting DLPack or
            ``__cuda_array_interface__``.
        w: filter, (K, C / groups, [[T,] R,] S) in ``filter_format`` order, of x's dtype and home.
        bias: (K,), of x's dtype and home.
        stride, padding, dilation, groups, data_format, filter_format: as for ConvProblem.
        activation: None, "relu", "silu" or "gelu" (the exact one, with erf).
        precision: "ieee" keeps float32 arithmetic float32; "tf32" permits tensor cores to round
            float32 operands to 10 bits of mantissa, where an implementation does.
        impl: "auto", or an implementation's name as ``cupyconv.plan`` prints it.
        out: array for the result, of its shape and dtype, sharing no memory with the inputs.

    Returns:
        y, (N, K, [[Z,] P,] Q) in ``data_format`` order, of x's dtype and home: ``out`` if given.
        16-bit types are summed in float32 and rounded once.  NaN and infinity propagate; one in
        w may also reach outputs where it lies over padding, since it is multiplied by a zero there.

    Raises:
        ConvError: no such convolution exists, or ``out`` does not fit it.
        ConvTypeError: arrays of different or unsupported dtypes or homes.
        DeviceError: CuPy or a GPU is needed and missing.
    """
    _require_words(activation, precision)
    taken, home = _take(x=x, w=w, bias=bias)
    problem = _problem(
        taken["x"].shape,
        taken["w"].shape,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        data_format=data_format,
        filter_format=filter_format,
        dtype=_common_dtype(taken),
    )
    _require_bias(problem, taken.get("bias"))
    return _run(
        "forward", problem, taken, home, impl, out, problem.output_shape, activation=activation
    )


def conv_backprop_input(
    input_shape: Iterable[int],
    w: Any,
    dy: Any,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: str | None = None,
    filter_format: str | None = None,
    precision: str = "ieee",
    impl: str = "auto",
    out: Any = None,
) -> Any:
    """dx, the gradient with respect to the input, from dy, that with respect to the output.

    dx[n, c, h, w] = sum over k, r, s of dy[n, k, p, q] * w[k, c, r, s], where
    p = (h + pad - r * dilation) / stride, over the taps for which this is a whole number and the
    output exists; likewise q from w and s.

    Args:
        input_shape: shape of x.  It has to be told: with stride s, s sizes per axis share one
            output size (``ConvProblem.valid_input_sizes``).
        w: filter, in ``filter_format`` order.
        dy: (N, K, [[Z,] P,] Q) in ``data_format`` order, of w's dtype and home.
        stride, padding, dilation, groups, data_format, filter_format: of the forward pass.
        precision, impl, out: as for ``conv_forward``.

    Returns:
        dx, of shape ``input_shape``.

    Raises:
        ConvError: ``dy`` does not belong to ``input_shape`` and ``w``; the message has the
            interval of input sizes that it would belong to.
        ConvTypeError, DeviceError: as for ``conv_forward``.
    """
    _require_words(None, precision)
    taken, home = _take(w=w, dy=dy)
    problem = _problem(
        input_shape,
        taken["w"].shape,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        data_format=data_format,
        filter_format=filter_format,
        dtype=_common_dtype(taken),
    )
    problem.require_output_gradient(taken["dy"].shape)
    return _run("backprop_input", problem, taken, home, impl, out, problem.input_gradient_shape)


def conv_backprop_filter(
    x: Any,
    filter_shape: Iterable[int],
    dy: Any,
    *,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: str | None = None,
    filter_format: str | None = None,
    precision: str = "ieee",
    impl: str = "auto",
    out: Any = None,
) -> Any:
    """dw, the gradient with respect to the filter, from dy, that with respect to the output.

    dw[k, c, r, s] = sum over n, p, q of dy[n, k, p, q] * x[n, c, h, w], where
    h = p * stride - pad + r * dilation, and likewise w from q and s.

    Args:
        x: input, in ``data_format`` order.
        filter_shape: shape of w, in ``filter_format`` order.
        dy: (N, K, [[Z,] P,] Q) in ``data_format`` order, of x's dtype and home.
        stride, padding, dilation, groups, data_format, filter_format: of the forward pass.
        precision, impl, out: as for ``conv_forward``.

    Returns:
        dw, of shape ``filter_shape``.

    Raises:
        ConvError: ``dy`` does not belong to ``x`` and ``filter_shape``.
        ConvTypeError, DeviceError: as for ``conv_forward``.
    """
    _require_words(None, precision)
    taken, home = _take(x=x, dy=dy)
    problem = _problem(
        taken["x"].shape,
        filter_shape,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        data_format=data_format,
        filter_format=filter_format,
        dtype=_common_dtype(taken),
    )
    problem.require_output_gradient(taken["dy"].shape)
    return _run("backprop_filter", problem, taken, home, impl, out, problem.filter_gradient_shape)


def conv_backprop_bias(dy: Any, *, data_format: str | None = None, out: Any = None) -> Any:
    """db, the gradient with respect to the bias: dy summed over all axes but the channels.

    Args:
        dy: (N, K, [[Z,] P,] Q) in ``data_format`` order.
        out: as for ``conv_forward``.

    Returns:
        db, (K,).

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv_forward``.
    """
    taken, home = _take(dy=dy)
    problem = _bias_problem(taken["dy"].shape, data_format, _common_dtype(taken))
    return _run_bias(problem, taken["dy"], home, out)


def conv_backward(
    x: Any,
    w: Any,
    dy: Any,
    *,
    needs: Iterable[str] = GRADIENTS,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: str | None = None,
    filter_format: str | None = None,
    precision: str = "ieee",
    impl: str = "auto",
) -> ConvGradients:
    """The gradients of a layer; only those in ``needs`` are computed.

    Args:
        x, w, dy: as for the other passes.
        needs: any of "input", "filter" and "bias".
        stride, padding, dilation, groups, data_format, filter_format, precision, impl: as for
            ``conv_forward``.

    Returns:
        ConvGradients with ``dx``, ``dw`` and ``db``; None for those that were not asked for.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for the single passes.
    """
    _require_words(None, precision)
    wanted = (needs,) if isinstance(needs, str) else tuple(needs)
    for word in wanted:
        if word not in GRADIENTS:
            raise unknown_word("gradient in needs", word, GRADIENTS)
    taken, home = _take(x=x, w=w, dy=dy)
    problem = _problem(
        taken["x"].shape,
        taken["w"].shape,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        data_format=data_format,
        filter_format=filter_format,
        dtype=_common_dtype(taken),
    )
    problem.require_output_gradient(taken["dy"].shape)
    dx = dw = db = None
    if "input" in wanted:
        dx = _run("backprop_input", problem, taken, home, impl, None, problem.input_gradient_shape)
    if "filter" in wanted:
        dw = _run(
            "backprop_filter", problem, taken, home, impl, None, problem.filter_gradient_shape
        )
    if "bias" in wanted:
        layer = _bias_problem(taken["dy"].shape, problem.data_format, problem.dtype)
        db = _run_bias(layer, taken["dy"], home, None)
    return ConvGradients(dx, dw, db)


def conv_transpose(
    x: Any,
    w: Any,
    *,
    output_shape: Iterable[int] | None = None,
    output_padding: Size | None = None,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: str | None = None,
    filter_format: str | None = None,
    precision: str = "ieee",
    impl: str = "auto",
    out: Any = None,
) -> Any:
    """The transposed convolution: ``conv_backprop_input`` under the name people search for.

    Args:
        x: (N, K, [[Z,] P,] Q), the output side of the convolution that is transposed.
        w: the filter of that convolution, so its O goes with x's channels and its I with the
            result's: PyTorch's (in_channels, out_channels / groups, ...) in "OIHW", Keras's
            (..., out_channels, in_channels) in "HWIO".
        output_shape: shape of the result.
        output_padding: instead, how far the result lies above the smallest of the ``stride`` sizes
            per axis that fit.  By default 0 as in PyTorch, and stride - 1 under "same", which
            makes the result stride times as large, as in Keras and JAX.
        stride, padding, dilation, groups, data_format, filter_format: of the convolution.
        precision, impl, out: as for ``conv_forward``.

    Returns:
        The result, (N, C, [[D,] H,] W) in ``data_format`` order.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for ``conv_backprop_input``.
    """
    _require_words(None, precision)
    taken, home = _take(x=x, w=w)
    problem = ConvProblem.from_output(
        taken["x"].shape,
        taken["w"].shape,
        input_shape=output_shape,
        output_padding=output_padding,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        data_format=data_format,
        filter_format=filter_format,
        dtype=_common_dtype(taken),
    )
    return _run("backprop_input", problem, taken, home, impl, out, problem.input_shape)


def plan(problem: ConvProblem, device: str | Device | None = None, impl: str = "auto") -> Plan:
    """Which implementation computes each pass of a problem, and why; needs no data and no GPU.

    Args:
        problem: the configuration.
        device: "cpu", an architecture such as "sm_80", or a Device; by default the current GPU,
            or the CPU where there is none.
        impl: "auto", or the name of the one implementation to plan with.

    Raises:
        ConvError: the device or implementation is unknown, or cannot take the problem.
    """
    return _plan(problem, backends.current_device() if device is None else device, impl)


# -- running ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _cached_problem(
    spelling: str, input_shape: Any, filter_shape: Any, **arguments: Any
) -> ConvProblem:
    """``spelling`` tells 2.0, which is refused, from 2, which it equals."""
    return ConvProblem(input_shape, filter_shape, **arguments)


def _problem(input_shape: Any, filter_shape: Any, **arguments: Any) -> ConvProblem:
    """The problem of a call; calls are mostly repeated, and a problem takes a while to validate."""
    try:
        spelling = repr((input_shape, filter_shape, arguments))
        return _cached_problem(spelling, input_shape, filter_shape, **arguments)
    except TypeError:  # a list among the arguments, or an error that is raised once more
        return ConvProblem(input_shape, filter_shape, **arguments)


def _run(
    pass_: str,
    problem: ConvProblem,
    taken: Mapping[str, Any],
    home: arrays.Home,
    impl: str,
    out: Any,
    shape: tuple[int, ...],
    activation: str | None = None,
) -> Any:
    backend = backends.of(home)
    _require_current_device(taken, home)
    pass_plan = plan_pass(problem, pass_, backend.device, impl)
    result = _result(out, shape, problem.dtype, taken, home, backend)
    dy = "dy" if "dy" in taken else "x"  # conv_transpose calls it x
    tensors = {
        "forward": lambda: Tensors(taken["x"], taken["w"], result, taken.get("bias")),
        "backprop_input": lambda: Tensors(result, taken["w"], taken[dy]),
        "backprop_filter": lambda: Tensors(taken["x"], result, taken[dy]),
    }[pass_]()
    backend.run(pass_plan, problem, tensors, activation)
    return result if out is None else out


def _run_bias(problem: ConvProblem, dy: Any, home: arrays.Home, out: Any) -> Any:
    backend = backends.of(home)
    _require_current_device({"dy": dy}, home)
    result = _result(out, problem.bias_shape, problem.dtype, {"dy": dy}, home, backend)
    backend.sum_bias(problem, dy, result)
    return result if out is None else out


def _bias_problem(dy_shape: tuple[int, ...], data_format: str | None, dtype: str) -> ConvProblem:
    """A 1x1 depthwise layer with this output: db depends on nothing else of the layer."""
    rank = len(dy_shape) - 2
    layout = data_format
    if rank in formats.SPATIAL_AXES:
        layout = formats.resolve_data_format(data_format, rank)
        channels = dy_shape[formats.data_axes(layout)[1]]
    else:
        channels = 1  # ConvProblem reports the rank
    return ConvProblem(
        dy_shape,
        (channels, 1, *[1] * rank),
        groups=max(channels, 1),
        data_format=layout,
        filter_format=formats.filter_formats(rank)[0] if rank in formats.SPATIAL_AXES else None,
        dtype=dtype,
    )


# -- checking --------------------------------------------------------------------------------------


def _require_words(activation: str | None, precision: str) -> None:
    if activation not in ACTIVATIONS:
        raise unknown_word("activation", activation, filter(None, ACTIVATIONS))
    if precision not in PRECISIONS:
        raise unknown_word("precision", precision, PRECISIONS)


def _take(**given: Any) -> tuple[dict[str, Any], arrays.Home]:
    """The arrays that are not None, and the one home that they share."""
    taken: dict[str, Any] = {}
    homes: dict[str, arrays.Home] = {}
    for name, value in given.items():
        if value is not None or name != "bias":
            taken[name], homes[name] = arrays.take(name, value)
    if len(set(homes.values())) > 1:
        where = ", ".join(f"{name} is a {home.value} array" for name, home in homes.items())
        raise ConvTypeError(
            f"all arrays must be in one memory: {where}. "
            "Move them with cupy.asarray(...) or cupy.asnumpy(...)"
        )
    return taken, next(iter(homes.values()))


def _common_dtype(taken: Mapping[str, Any]) -> str:
    names = {}
    for name, array in taken.items():
        try:
            names[name] = _dtype_name(array.dtype)
        except ConvTypeError as error:
            raise ConvTypeError(f"{name}: {error}") from None
    first_name, first = next(iter(names.items()))
    for name, dtype in names.items():
        if dtype != first:
            raise ConvTypeError(
                f"all arrays must have one dtype: {first_name} is {first}, {name} is {dtype}. "
                f"Convert one of them, for example {name}.astype('{first}')"
            )
    return first


_dtype_name = cache(dtype_name)


def _require_bias(problem: ConvProblem, bias: Any) -> None:
    if bias is not None and tuple(bias.shape) != problem.bias_shape:
        raise ConvError(
            "the bias must have one value for each output channel",
            f"bias is {shape_text(bias.shape) or 'a scalar'}, the filter has {problem.K} output "
            "channels",
            f"Pass a bias of shape ({problem.K},)",
        )


def _require_current_device(taken: Mapping[str, Any], home: arrays.Home) -> None:
    if home is not arrays.Home.GPU:
        return
    current = arrays.cupy().cuda.runtime.getDevice()
    for name, array in taken.items():
        if array.device.id != current:
            raise ConvTypeError(
                f"all arrays must be on the current device: {name} is on device "
                f"{array.device.id}, current is {current}. "
                f"Compute under `with cupy.cuda.Device({array.device.id}):`"
            )


def _result(
    out: Any,
    shape: tuple[int, ...],
    dtype: str,
    taken: Mapping[str, Any],
    home: arrays.Home,
    backend: Backend,
) -> Any:
    """The array that a pass writes: ``out`` over its own memory, or a new one."""
    if out is None:
        return backend.empty(shape, dtype)
    array, out_home = arrays.take("out", out)
    if out_home is not home:
        raise ConvTypeError(
            f"out must be where the inputs are: out is a {out_home.value} array, they are "
            f"{home.value} arrays. Pass a {home.value} array"
        )
    _require_current_device({"out": array}, home)
    if array.dtype != arrays.numpy_dtype(dtype):
        raise ConvTypeError(
            f"out must have the inputs' dtype: out is {array.dtype}, they are {dtype}. "
            f"Pass an out of dtype {dtype}"
        )
    if tuple(array.shape) != shape:
        raise ConvError(
            "out must have the result's shape",
            f"out is {shape_text(array.shape) or 'a scalar'}, the result is {shape_text(shape)}",
            f"Pass an out of shape {shape}",
        )
    if not getattr(array.flags, "writeable", True):
        raise ConvError("out must be writeable", "it is read-only", "Pass a writeable array")
    for name, other in taken.items():
        if arrays.overlap(array, other, home):
            raise ConvError(
                "out must not share memory with an input",
                f"it overlaps {name}",
                f"Pass a new array, or a copy of {name}",
            )
    return array
