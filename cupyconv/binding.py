"""Validation and planning: from the arguments of a call to a problem, a request and its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

from cupyconv import formats, log
from cupyconv.errors import ConvError, ConvTypeError, Names, require_word, unknown_word
from cupyconv.formats import DataFormat
from cupyconv.kernels.request import PLAIN, Epilogue
from cupyconv.kernels.strides import Strides, contiguous_strides, element_strides
from cupyconv.operands import Layout, common_dtype, require_add, require_bias, require_out
from cupyconv.planning import (
    ACTIVATIONS,
    PRECISIONS,
    Device,
    Impl,
    PassPlan,
    Plan,
    Request,
    implementations,
    plan_pass,
    require_limit,
)
from cupyconv.problem import (
    TRANSPOSED,
    ConvOptions,
    ConvProblem,
    named_problem,
    offering,
    require_output,
    shape_text,
    transposed_problem,
)


class Options(NamedTuple):
    """Arguments of a call besides its arrays, in the form in which the user passed them.

    Attributes:
        shape: shape of the tensor that is not passed as an array, such as ``input_shape`` of
            ``conv_backprop_input``; in transposed convolutions, the pair of output_shape and
            output_padding.
        stride, padding, dilation, groups, data_format, filter_format: as for ConvProblem.
        activation, precision, impl: as for ``conv_forward``.
    """

    shape: Any = None
    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: Any = 1
    data_format: Any = None
    filter_format: Any = None
    activation: Any = None
    precision: Any = "ieee"
    impl: Any = "auto"

    @property
    def layer(self) -> ConvOptions:
        """Stride, padding, dilation, groups and formats."""
        return ConvOptions._make(self[1:7])


class Operation(NamedTuple):
    """An operation of the library: its pass, and what its arrays are to the pass.

    Attributes:
        pass_: name of the pass; "backprop_bias" for the bias gradient.
        arrays: names of the arrays in the order of calls; "bias" and "add" are optional.
        roles: roles of the first and second array and of the result in the pass.
        sizes: tensors that the operation takes as shapes, by their names in ConvProblem.
        conjugates: whether the pass conjugates a complex filter or input, as gradients do.
    """

    pass_: str
    arrays: tuple[str, ...]
    roles: tuple[str, str, str]
    sizes: tuple[str, ...] = ()
    conjugates: bool = True

    @property
    def is_transposed(self) -> bool:
        """Whether the operation is a transposed convolution: its "x" has the role of y."""
        return "x" in self.arrays and self.pass_ == "backprop_input"


_TRANSPOSED = Operation(
    "backprop_input", ("w", "x", "bias", "add"), ("w", "y", "x"), ("input_shape",)
)

OPERATIONS = {
    "forward": Operation("forward", ("x", "w", "bias", "add"), ("x", "w", "y")),
    "backprop_input": Operation("backprop_input", ("w", "dy"), ("w", "y", "x"), ("input_shape",)),
    "backprop_filter": Operation(
        "backprop_filter", ("x", "dy"), ("x", "y", "w"), ("filter_shape",)
    ),
    "transpose": _TRANSPOSED._replace(conjugates=False),
    "conjugate_transpose": _TRANSPOSED,
    "backprop_bias": Operation("backprop_bias", ("dy",), ("y", "w", "bias")),
}


class ArgumentNames(NamedTuple):
    """Names that errors use for an operation's arrays.

    Attributes:
        given: names of the arrays, in the order of ``Operation.arrays``.
        out: name of the array for the result.
        tensors: names of the problem's tensors and arguments.
        sizes: tensors that the caller passes as shapes instead of arrays; None for the operation's.
    """

    given: tuple[str, ...]
    out: str = "out"
    tensors: Names = Names()
    sizes: tuple[str, ...] | None = None


ARGUMENT_NAMES = {name: ArgumentNames(operation.arrays) for name, operation in OPERATIONS.items()}
"""Names of the arrays of the public functions, keyed by operation."""

for _name in ("transpose", "conjugate_transpose"):
    ARGUMENT_NAMES[_name] = ARGUMENT_NAMES[_name]._replace(tensors=TRANSPOSED)


def error_names(operation: str, argument_names: ArgumentNames) -> dict[str, str]:
    """Return the names of the arrays in errors, keyed by their names in ``Operation.arrays``."""
    names = dict(zip(OPERATIONS[operation].arrays, argument_names.given, strict=False))
    return {**names, "out": argument_names.out}


def problem_of(
    operation: str,
    layouts: Mapping[str, Any],
    shape: Any,
    options: ConvOptions,
    argument_names: ArgumentNames | None = None,
) -> ConvProblem:
    """Return the problem of a call, after checking that the arrays fit it.

    Args:
        operation, shape, options, argument_names: as for ``calls.compute``.
        layouts: arrays, or other objects with shape and dtype, keyed by their names in
            ``Operation.arrays``; and the array for the result as ``out``.
    """
    argument_names = argument_names or ARGUMENT_NAMES[operation]
    array_names, names = error_names(operation, argument_names), argument_names.tensors
    dtype = common_dtype(
        {array_names.get(name, name): array for name, array in layouts.items() if name != "out"}
    )
    transposed = OPERATIONS[operation].is_transposed
    shapes = {name: array.shape for name, array in layouts.items()}
    call = {
        "input_shape": shapes.get("x", shape),
        "filter_shape": shapes.get("w", shape),
        "output_shape": shapes.get("dy"),
        "bias_shape": shapes.get("bias"),
        **options._asdict(),
        "dtype": dtype,
    }
    if transposed:
        call |= {"output_shape": shapes["x"], "input_shape": shape[0], "output_padding": shape[1]}

    def require(bias_shape: tuple[int, ...] | None, output_shape: Any, **layer: Any) -> ConvProblem:
        if transposed:
            problem = transposed_problem(names, output_shape, **layer)
        else:
            problem = named_problem(names, **layer)
            if output_shape is not None:
                require_output(names, problem, output_shape)
        if bias_shape is not None:
            channels, owner = (problem.C, names.x) if transposed else (problem.K, names.w)
            require_bias(array_names["bias"], bias_shape, channels, owner)
        return problem

    def require_results(problem: ConvProblem) -> None:
        expected = result_shape(operation, problem)
        if "add" in layouts:
            require_add(array_names["add"], layouts["add"].shape, expected)
        if "out" in layouts:
            require_out(argument_names.out, layouts["out"], expected, problem.dtype)

    sizes = OPERATIONS[operation].sizes if argument_names.sizes is None else argument_names.sizes
    try:
        problem = offering(require, names, call, sizes, require_results)
    except ConvError as error:
        if error.fixes or argument_names.out != "out" or not {"add", "out"} & layouts.keys():
            raise
        problem = None
    if problem is None:  # no fix fits add and out, so offer fixes that require another add or out
        problem = offering(require, names, call, sizes)
    require_results(problem)
    return problem


def result_shape(operation: str, problem: ConvProblem) -> tuple[int, ...]:
    """Return the shape of an operation's result."""
    shapes = {"x": problem.input_shape, "w": problem.filter_shape, "y": problem.output_shape}
    return shapes[OPERATIONS[operation].roles[2]]


class Bound(NamedTuple):
    """A validated and planned call.

    Attributes:
        problem: the configuration.
        request: the pass with its strides, device and limits; None for the bias gradient.
        planned: plan of the pass; None for the bias gradient.
        epilogue: activation and addition.
        shape: shape of the result.
        extends: whether the pass reads a copy of x, extended by zeros for the windows that
            output_padding adds.
    """

    problem: ConvProblem
    request: Request | None
    planned: PassPlan | None
    epilogue: Epilogue
    shape: tuple[int, ...]
    extends: bool


def bound(
    operation: str,
    layouts: dict[str, Layout],
    options: Options,
    alignment: int,
    device: Device,
    workspace_limit: int | None,
    argument_names: ArgumentNames,
    require: Callable[[Request], None] | None = None,
) -> Bound:
    """Validate and plan a call.

    Args:
        operation: key of OPERATIONS, except the bias gradient.
        layouts: layouts of the arrays, keyed by their names in ``Operation.arrays``, and of the
            array for the result as ``out``.
        options: the other arguments.
        alignment: largest power of two, up to 16, that divides the arrays' addresses in bytes.
        device: device of the arrays.
        workspace_limit: largest workspace in bytes; None for no limit.
        argument_names: names of the arrays in errors.
        require: function that checks the request before it is planned.

    Raises:
        ConvError, ConvTypeError: the call is invalid.
    """
    require_words(options.activation, options.precision, options.impl, device)
    problem = problem_of(operation, layouts, options.shape, options.layer, argument_names)
    require_activation(options.activation, problem)
    shape, of = result_shape(operation, problem), OPERATIONS[operation]
    extends = of.is_transposed and layouts["x"].shape != problem.output_shape
    if extends:
        x = Layout.contiguous(problem.output_shape, layouts["x"].dtype)
        layouts = {**layouts, "x": x}
    strides = None
    if device.is_gpu:
        if problem.is_complex and not of.conjugates:  # the pass gets the conjugate of w
            w = Layout.contiguous(layouts["w"].shape, layouts["w"].dtype)
            layouts = {**layouts, "w": w}
        strides = _strides(of, problem, layouts, alignment, error_names(operation, argument_names))
    request = Request(problem, of.pass_, device, options.precision, workspace_limit, strides)
    if require is not None:
        require(request)
    epilogue = Epilogue(options.activation, "add" in layouts)
    planned = chosen(request, options.impl)
    log.info("plan of %s of %s: %s, %s", of.pass_, problem, planned.kernel, planned.reason)
    return Bound(problem, request, planned, epilogue, shape, extends)


def chosen(request: Request, impl: str | Plan) -> PassPlan:
    """Return the plan of a pass, from the planner or from a Plan that is passed as ``impl``."""
    if isinstance(impl, Plan):
        return impl.replay(request)
    return plan_pass(request, impl)


def _strides(
    operation: Operation,
    problem: ConvProblem,
    layouts: Mapping[str, Layout],
    alignment: int,
    names: Mapping[str, str],
) -> Strides:
    """Return the element strides of a pass's tensors; a result without ``out`` is contiguous."""
    array_of = dict(zip(operation.roles, (*operation.arrays[:2], "out"), strict=True))
    shapes = {"x": problem.input_shape, "w": problem.filter_shape, "y": problem.output_shape}
    x, w, y = (
        _elements(names[array_of[role]], layouts[array_of[role]])
        if array_of[role] in layouts
        else contiguous_strides(shape)
        for role, shape in shapes.items()
    )
    bias = _elements(names["bias"], layouts["bias"])[0] if "bias" in layouts else 1
    return Strides(x, w, y, bias, alignment)


def bound_sum(
    layouts: Mapping[str, Layout],
    data_format: DataFormat | None,
    alignment: int,
    device: Device,
    workspace_limit: int | None,
    argument_names: ArgumentNames,
) -> tuple[Bound, Strides | None]:
    """Validate a bias gradient; return it, and the strides of dy and db on a GPU.

    The arguments are as for ``bound``.  The problem is a layer whose output has the shape of dy.
    """
    require_limit(workspace_limit)
    (name,), dy, out = argument_names.given, layouts["dy"], layouts.get("out")
    problem = bias_problem(name, dy.shape, data_format, common_dtype({name: dy}))
    if out is not None:
        require_out(argument_names.out, out, problem.bias_shape, problem.dtype)
    strides = None
    if device.is_gpu:  # NumPy supports any strides
        step = 1 if out is None else _elements(argument_names.out, out)[0]
        strides = Strides.of_sum(_elements(name, dy), step, alignment)
    return Bound(problem, None, None, PLAIN, problem.bias_shape, False), strides


def _elements(name: str, layout: Layout) -> tuple[int, ...]:
    try:
        return element_strides(layout)
    except ValueError as error:
        raise ConvTypeError(f"{name}: {error}. Pass a contiguous copy of it") from None


def bias_problem(
    dy_name: str, dy_shape: tuple[int, ...], data_format: DataFormat | None, dtype: Any
) -> ConvProblem:
    """Return a 1x1 depthwise layer whose output has the shape of dy.

    Every layer with this output has the same db.
    """
    rank = len(dy_shape) - 2
    options = ConvOptions(data_format=data_format)
    if rank in formats.SPATIAL_AXES:  # else, named_problem raises an error
        layout = formats.resolve_data_format(data_format, rank)
        for letter, size in zip(layout, dy_shape, strict=True):
            if letter != "N" and size < 1:
                raise ConvError(
                    "every size but the batch must be at least 1",
                    f"{dy_name} has {letter} = {size}",
                    f"Use positive sizes: {dy_name} {shape_text(dy_shape)} was read as {layout}",
                )
        channels = dy_shape[formats.data_axes(layout)[1]]
        options = ConvOptions(1, 0, 1, channels, layout, formats.filter_formats(rank)[0])
    w_shape = (options.groups, 1, *[1] * rank)
    return named_problem(Names(x=dy_name), dy_shape, w_shape, dtype=dtype, **options._asdict())


def require_words(
    activation: str | None, precision: str, impl: str | Plan, device: Device | None = None
) -> None:
    """Check that activation and precision are valid, and that ``impl`` is a string or a Plan.

    Args:
        activation, precision, impl: as for ``conv_forward``.
        device: device whose implementations the error lists; None if it is not known yet.
    """
    require_word("activation", activation, ACTIVATIONS)
    require_word("precision", precision, PRECISIONS)
    if not isinstance(impl, (str, Plan)):
        known = get_args(Impl) if device is None else implementations(device.is_gpu)
        raise unknown_word("impl", impl, known)


def require_activation(activation: str | None, problem: ConvProblem) -> None:
    """Check that a problem with a complex dtype has no activation."""
    if problem.is_complex and activation is not None:
        raise ConvError(
            "an activation must be applied to real numbers",
            f"got {activation!r} with {problem.dtype}",
            "Apply it to a real array, such as the magnitude: numpy.abs(y)",
        )
