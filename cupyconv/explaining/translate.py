"""Translate a layer into programs of other frameworks, and note what a framework does not support.

Every program makes random NumPy arrays ``x``, ``w`` and ``dy`` in the problem's formats, and
computes ``y``, ``dx`` and ``dw`` as arrays in the same formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cupyconv import formats
from cupyconv.errors import ConvError, unknown_word
from cupyconv.explaining.adjoints import filter_gradient_axes, input_gradient_axes, output_padding
from cupyconv.explaining.terms import CONVOLUTION_NAMES
from cupyconv.explaining.values import PERIOD, first_number
from cupyconv.problem import REAL_PART, ConvProblem

_PRINT = """\
for name, array in {"y": y, "dx": dx, "dw": dw}.items():
    norm = np.sqrt((abs(array).astype("float64") ** 2).sum())
    print(f"{name}: shape {array.shape}, norm {norm:.5g}")  # as in `cupyconv grads`"""
"""Last lines of every program."""

_DRAWN = {
    "normal": "(2 * (h % 100 + h // 100 % 100 + h // 10000) - 297) / 100",
    "integers": "h % 7 - 3",
}

NUMBERS = {
    kind: f"""\
def numbers(first, shape):  # as in `cupyconv grads`
    h = first
    for size in shape:
        h = np.add.outer(h, np.arange(size)) % {PERIOD}
        h = h * h % {PERIOD} * h % {PERIOD}
    return {drawn}
"""
    for kind, drawn in _DRAWN.items()
}
"""Lines that define the function ``numbers`` of explaining.values in a program, keyed by kind."""

_THROUGH_FLOAT32 = "NumPy has no bfloat16: the program converts through float32"


@dataclass(frozen=True)
class Translation:
    """A layer in another framework.

    Attributes:
        framework: name of the framework.
        call: line of the forward pass.
        imports: import lines.
        setup: lines that create x, w and dy.
        code: lines that compute y, dx and dw.
        size: how the size of dx is passed to this framework.
        flags: features that the framework lacks, and what the program does instead.
    """

    framework: str
    call: str
    imports: str
    setup: str
    code: str
    size: str
    flags: tuple[str, ...]

    @property
    def program(self) -> str:
        """Complete program, with the flags as comments."""
        head = "".join(f"# {flag}\n" for flag in self.flags)
        return f"{head}{self.imports}\n\n{self.setup}\n\n{self.code}\n\n{_PRINT}\n"

    def to_dict(self) -> dict[str, Any]:
        return {
            "framework": self.framework,
            "call": self.call,
            "size_of_dx": self.size,
            "cannot_express": list(self.flags),
            "program": self.program,
        }


def translations(problem: ConvProblem, is_transposed: bool = False) -> tuple[Translation, ...]:
    """Return the layer in every framework that supports its dtype.

    Args:
        problem: the layer.
        is_transposed: whether the layer is the transposed layer that reverses the problem.
    """
    words = tuple(FRAMEWORKS)
    if problem.is_complex:
        words = () if is_transposed else _SUPPORT_COMPLEX
    return tuple(translation(problem, word, is_transposed) for word in words)


def translation(problem: ConvProblem, framework: str, is_transposed: bool = False) -> Translation:
    """Return the layer in one framework.

    Args:
        problem: the layer.
        framework: name of the framework.
        is_transposed: whether the layer is the transposed layer that reverses the problem.

    Raises:
        ConvError: the framework is unknown, or it has no convolution of complex numbers.
    """
    name = framework.lower() if isinstance(framework, str) else ""
    word = {"torch": "pytorch", "tf": "tensorflow"}.get(name, name)
    if word not in FRAMEWORKS:
        raise unknown_word("framework", framework, FRAMEWORKS)
    if problem.is_complex and is_transposed:
        raise ConvError(
            "the program of a transposed layer must have a real dtype", f"got {problem.dtype}"
        )
    if problem.is_complex and word not in _SUPPORT_COMPLEX:
        raise ConvError(
            "the framework must support convolutions of the problem's dtype",
            f"{word} does not support {problem.dtype}",
            f"Use {' or '.join(_SUPPORT_COMPLEX)}",
        )
    return (TRANSPOSED if is_transposed else FRAMEWORKS)[word](problem)


# -- shared parts ----------------------------------------------------------------------------------


def _setup(problem: ConvProblem, is_transposed: bool = False) -> str:
    x, dy = ("dy", "x") if is_transposed else ("x", "dy")
    shapes = {x: problem.input_shape, "w": problem.filter_shape, dy: problem.output_shape}
    dtype = "float32" if problem.dtype == "bfloat16" else problem.dtype
    lines = [NUMBERS["normal"]]
    for place, (name, shape) in enumerate(shapes.items()):
        call = f"numbers({first_number(0, place)}, {shape})"
        if problem.is_complex:
            call = f"({call} + 1j * numbers({first_number(0, place + 3)}, {shape}))"
        lines.append(f'{name} = {call}.astype("{dtype}")')
    return "\n".join(lines)


def _permutations(
    problem: ConvProblem, channels_last: bool, method: str = "transpose"
) -> tuple[str, str, str, str]:
    """Return calls such as ``.transpose(0, 2, 3, 1)``, empty where the memory orders are the same.

    The first two calls permute data and filters to a framework's memory order.  The last two calls
    permute them back to the problem's memory order.
    """

    def call(source: str, target: str) -> str:
        order = tuple(source.index(letter) for letter in target)
        return f".{method}{order}" if source != target else ""

    rank = problem.spatial_rank
    data = formats.data_formats(rank)[channels_last]
    filters = formats.filter_formats(rank)[channels_last]
    there = call(problem.data_format, data), call(problem.filter_format, filters)
    back = call(data, problem.data_format), call(filters, problem.filter_format)
    return *there, *back


def _inside(problem: ConvProblem) -> str:
    """Return the slices that cut the input out of the padded input."""
    return ", ".join(f"{axis.pad_before}:{axis.pad_before + axis.input}" for axis in problem.axes)


def _torch_tuple(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else str(tuple(values))


# -- PyTorch ---------------------------------------------------------------------------------------


def _pytorch(problem: ConvProblem) -> Translation:
    rank = problem.spatial_rank
    data, filters, data_back, filters_back = _permutations(problem, False, "permute")
    flags = _order_flags("PyTorch", problem, data or filters)
    stride, dilation = _torch_tuple(problem.stride), _torch_tuple(problem.dilation)
    rest = f"stride={stride}, dilation={dilation}, groups={problem.groups}"
    cropped = any(before != after for before, after in problem.padding)
    source, padding = "X", f"padding={_torch_tuple([before for before, _ in problem.padding])}"
    if cropped:
        sides = [side for pair in reversed(problem.padding) for side in pair]
        source, padding = f"F.pad(X, {tuple(sides)})", "padding=0"
        flags.append("PyTorch's convolution pads both sides of an axis equally: F.pad pads instead")
    explicit = padding
    if problem.padding_mode.startswith("same"):
        if max(problem.stride) > 1:
            flags.append(
                "PyTorch supports padding='same' only for stride 1: the program passes numbers"
            )
        elif problem.padding_mode == "same_lower" and cropped:
            flags.append("PyTorch has no SAME_LOWER: the program pads explicitly")
        elif not cropped:
            padding = "padding='same'"
    call = f"F.conv{rank}d({source}, W, {padding}, {rest})"
    rounded, numpy = "", ".numpy()"
    if problem.dtype == "bfloat16":
        rounded, numpy = ".bfloat16()", ".float().numpy()"
        flags.append(_THROUGH_FLOAT32)
    # PyTorch raises an error for the gradient of some permuted filters.
    contiguous = ".contiguous()" if filters else ""
    option = f"output_padding={_torch_tuple(tuple(map(output_padding, problem.axes)))}"
    weights = "W.detach().conj()" if problem.is_complex else "W.detach()"
    lines = [
        f"X = torch.from_numpy(x){rounded}{data}.requires_grad_()",
        f"W = torch.from_numpy(w){rounded}{filters}{contiguous}.requires_grad_()",
        f"DY = torch.from_numpy(dy){rounded}{data}",
        f"Y = {call}",
        "DX, DW = torch.autograd.grad(Y, (X, W), DY)",
        "# dx without autograd; output_padding selects one of the possible sizes.",
        f"DX_direct = F.conv_transpose{rank}d(",
        f"    DY, {weights}, stride={stride}, {explicit},",
        f"    {option}, groups={problem.groups}, dilation={dilation},",
        ")",
    ]
    size = f"conv_transpose{rank}d(..., {explicit}, {option})"
    if problem.is_complex:
        size += " applied to conj(w)"
    else:
        whose = "the size of the padded x" if cropped else "the size of x"
        size += f", or torch.nn.grad.conv{rank}d_input(input_size, ...) with {whose}"
    if cropped:
        lines.append(f"DX_direct = DX_direct[:, :, {_inside(problem)}]")
        size += f"; the result is cropped to [{_inside(problem)}]"
    lines += [
        f"y = Y.detach(){data_back}{numpy}",
        f"dx = DX{data_back}{numpy}",
        f"dw = DW{filters_back}{numpy}",
        f"dx_direct = DX_direct{data_back}{numpy}",
    ]
    imports = "import numpy as np\nimport torch\nimport torch.nn.functional as F"
    return Translation(
        "PyTorch", call, imports, _setup(problem), "\n".join(lines), size, tuple(flags)
    )


# -- TensorFlow ------------------------------------------------------------------------------------


def _tensorflow(problem: ConvProblem) -> Translation:
    rank, groups = problem.spatial_rank, problem.groups
    data, filters, data_back, filters_back = _permutations(problem, channels_last=True)
    flags = []
    if data:
        flags.append(
            "On a CPU, TensorFlow supports channels-first layers only in builds with oneDNN: the "
            "program transposes the arrays"
        )
    if filters:
        flags.append(
            f"TensorFlow's filters are {formats.filter_formats(rank)[1]}: the program transposes "
            "them"
        )
    mode = problem.padding_mode
    dilated = max(problem.dilation) > 1
    in_numbers = mode in ("same_lower", "explicit") and any(map(any, problem.padding))
    pairs = [[0, 0], *map(list, problem.padding), [0, 0]]
    source, padding = "X", '"SAME"' if mode == "same" else '"VALID"'
    if mode == "same_lower":
        flags.append("TensorFlow has no SAME_LOWER: the program pads explicitly")
    if in_numbers and rank == 2 and not dilated:
        padding = str(pairs)
    elif in_numbers:
        source = f"tf.pad(X, {pairs})"
        only = "With dilation, " if rank == 2 else ""
        flags.append(f"{only}conv{rank}d supports only SAME and VALID: tf.pad adds the padding")
    single = max(problem.filter_sizes) == 1 and any(tuple(map(output_padding, problem.axes)))
    if single:
        left = zip(problem.axes, tuple(map(output_padding, problem.axes)), strict=True)
        ends = ", ".join(f":{axis.padded_input - rest}" for axis, rest in left)
        if padding.startswith("["):
            source = f"tf.pad(X, {padding})"
        source, padding = f"{source}[:, {ends}]", '"VALID"'
        flags.append(
            "With oneDNN, TensorFlow 2.21 may crash on gradients of strided layers with one-tap "
            "filters if no window reads the last inputs: the program crops these inputs"
        )
    if dilated:
        what = "dilated layers" if rank == 3 else "gradients of dilated layers"
        flags.append(
            f"On a CPU, TensorFlow computes {what} only with oneDNN, in float32 and bfloat16"
        )
        if max(problem.stride) > 1:
            flags.append(
                "Keras layers and tf.nn.convolution reject stride together with dilation; "
                f"tf.nn.conv{rank}d supports both"
            )
    if in_numbers:
        flags.append(
            "Keras layers support only 'same' and 'valid': put a ZeroPadding layer before them"
        )

    strides, dilations = list(problem.stride), list(problem.dilation)
    numbers = {
        1: f"stride={strides[0]}, padding={padding}, dilations={dilations[0]}",
        2: f"strides={strides}, padding={padding}, dilations={dilations}",
        3: f"strides={[1, *strides, 1]}, padding={padding}, dilations={[1, *dilations, 1]}",
    }[rank]
    if groups == 1:
        forward = f"tf.nn.conv{rank}d({source}, W, {numbers})"
    else:
        flags.append(
            "Many CPU builds of TensorFlow cannot compute gradients of grouped layers: the program "
            f"computes the {groups} groups one by one"
        )
        forward = (
            f"tf.concat([tf.nn.conv{rank}d(a, b, {numbers}) for a, b in "
            f"zip(tf.split({source}, {groups}, -1), tf.split(W, {groups}, -1))], -1)"
        )
    results = ["Y", "DX", "DW", "DX_direct"]
    if problem.dtype == "bfloat16":
        results = [f"tf.cast({name}, tf.float32)" for name in results]
        flags.append(_THROUGH_FLOAT32)
    y, dx, dw, dx_direct = results
    lines = [
        f"X = tf.constant(x{data}, tf.{problem.dtype})",
        f"W = tf.constant(w{filters}, tf.{problem.dtype})",
        f"DY = tf.constant(dy{data}, tf.{problem.dtype})",
        "with tf.GradientTape() as tape:",
        "    tape.watch([X, W])",
        f"    Y = {forward}",
        "DX, DW = tape.gradient(Y, [X, W], DY)",
        f"y = {y}.numpy(){data_back}",
        f"dx = {dx}.numpy(){data_back}",
        f"dw = {dw}.numpy(){filters_back}",
    ]
    sizes = [problem.N, *problem.input_sizes, problem.C]
    if rank == 2 and groups == 1 and not dilated and not single:
        explicit = padding.startswith("[")
        word = '"EXPLICIT"' if explicit else padding
        lines += [
            "# dx without autodiff; input_sizes selects one of the possible sizes.",
            "DX_direct = tf.raw_ops.Conv2DBackpropInput(",
            f"    input_sizes={sizes}, filter=W, out_backprop=DY,",
            f"    strides={[1, *problem.stride, 1]}, padding={word},",
        ]
        if explicit:
            flat = [side for pair in ((0, 0), *problem.padding, (0, 0)) for side in pair]
            lines.append(f"    explicit_paddings={flat},")
        lines += [")", f"dx_direct = {dx_direct}.numpy(){data_back}"]
    if rank == 2:
        size = f"Conv2DBackpropInput(input_sizes={sizes}) or conv2d_transpose(output_shape={sizes})"
        size += ", each with explicit padding" if in_numbers else ""
    elif in_numbers:
        padded = [problem.N, *(axis.padded_input for axis in problem.axes), problem.C]
        size = (
            f'conv{rank}d_transpose(output_shape={padded}, padding="VALID"); the result is '
            f"cropped to [{_inside(problem)}]"
        )
    else:
        size = f"conv{rank}d_transpose(output_shape={sizes})"
    imports = "import numpy as np\nimport tensorflow as tf"
    return Translation(
        "TensorFlow", forward, imports, _setup(problem), "\n".join(lines), size, tuple(flags)
    )


# -- JAX -------------------------------------------------------------------------------------------


def _jax(problem: ConvProblem) -> Translation:
    flags = []
    mode = problem.padding_mode
    padding = f'"{mode.upper()}"' if mode != "explicit" else str(list(problem.padding))
    numbers = (problem.data_format, problem.filter_format, problem.data_format)
    backwards = input_gradient_axes(problem)
    within = " in each group" if problem.groups > 1 else ""
    imports = "import numpy as np\nimport jax\nfrom jax import lax"
    if REAL_PART.get(problem.dtype, problem.dtype) == "float64":
        imports += '\n\njax.config.update("jax_enable_x64", True)'
        flags.append("JAX rounds to float32 unless jax_enable_x64 is set before the first array")
    if problem.dtype == "float32":
        flags.append(
            "On a GPU or TPU, JAX may round float32 operands; precision='highest' prevents this"
        )
    operands, cotangent = "x, w", "jax.numpy.asarray(dy, Y.dtype)"
    results = "np.asarray(Y), np.asarray(DX), np.asarray(DW)"
    if problem.dtype == "bfloat16":
        operands = "x.astype(jax.numpy.bfloat16), w.astype(jax.numpy.bfloat16)"
        results = '(np.asarray(a.astype("float32")) for a in (Y, DX, DW))'
    if problem.is_complex:
        flags.append(
            "JAX's gradients are the complex conjugates of cupyconv's and PyTorch's: the program "
            "conjugates dy, dx and dw"
        )
        cotangent += ".conj()"
        results = "np.asarray(Y), np.conj(DX), np.conj(DW)"
    arguments = [
        f"x, w, {problem.stride}, {padding}, rhs_dilation={problem.dilation},",
        f"dimension_numbers={numbers},",
        f"feature_group_count={problem.groups}, precision='highest',",
    ]
    call = f"lax.conv_general_dilated({' '.join(arguments).rstrip(',')})"
    lines = [
        "",
        "def layer(x, w):",
        "    return lax.conv_general_dilated(",
        *(f"        {line}" for line in arguments),
        "    )",
        "",
        "",
        f"Y, backward = jax.vjp(layer, {operands})  # keeps the sizes of x and w",
        f"DX, DW = backward({cotangent})",
        f"y, dx, dw = {results}",
    ]
    size = (
        f"jax.vjp takes the size from x; without vjp, lax.conv_general_dilated takes lhs_dilation="
        f"{problem.stride}, padding={[axis.padding for axis in backwards]} and w flipped, with its "
        f"channel axes swapped{within}"
    )
    return Translation("JAX", call, imports, _setup(problem), "\n".join(lines), size, tuple(flags))


# -- ONNX ------------------------------------------------------------------------------------------


def _onnx(problem: ConvProblem) -> Translation:
    rank, groups = problem.spatial_rank, problem.groups
    data, filters, data_back, filters_back = _permutations(problem, channels_last=False)
    flags = []
    if data or filters:
        flags.append(
            f"ONNX's axes are {formats.data_formats(rank)[0]} and "
            f"{formats.filter_formats(rank)[0]}: the program transposes the arrays"
        )
    flags.append(
        "ONNX has no gradients of Conv: the program computes dx with ConvTranspose, and dw with a "
        "Conv whose input is x and whose filter is dy"
    )
    if groups > 1:
        flags.append(
            f"dw of {groups} groups needs one Conv node per group. One ConvTranspose node can "
            "compute dx, but onnx's reference evaluator supports ConvTranspose only with one "
            "group: the program uses one node per group"
        )
    befores, afters = zip(*problem.padding, strict=True)
    pads = [*befores, *afters]
    modes = {"same": "SAME_UPPER", "same_lower": "SAME_LOWER", "valid": "VALID"}
    word = modes.get(problem.padding_mode)
    padding = f'auto_pad="{word}"' if word else f"pads={pads}"
    strides, dilations = list(problem.stride), list(problem.dilation)
    call = f"Conv(x, w, {padding}, strides={strides}, dilations={dilations}, group={groups})"
    extra = list(map(output_padding, problem.axes))
    weights = filter_gradient_axes(problem)
    grad_pads = [a.padding[0] for a in weights] + [max(a.padding[1], 0) for a in weights]
    used = ", ".join(f":{a.rule.input + min(a.padding[1], 0)}" for a in weights)
    kind = {"float16": "FLOAT16", "float64": "DOUBLE"}.get(problem.dtype, "FLOAT")
    if problem.dtype == "bfloat16":
        flags.append("NumPy has no bfloat16: the program runs in float32")
    swap = str((1, 0, *range(2, rank + 2)))
    lines = [
        "",
        "def run(operator, a, b, **attributes):",
        f"    kind = TensorProto.{kind}",
        "    node = helper.make_node(operator, ['a', 'b'], ['c'], **attributes)",
        "    describe = helper.make_tensor_value_info",
        "    tensors = [describe('a', kind, a.shape), describe('b', kind, b.shape)]",
        "    result = describe('c', kind, None)",
        "    graph = helper.make_graph([node], 'layer', tensors, [result])",
        "    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 17)])",
        "    return ReferenceEvaluator(model).run(None, {'a': a, 'b': b})[0]",
        "",
        "",
        f"X = x{data}",
        f"W = w{filters}",
        f"DY = dy{data}",
        f"same = dict(strides={strides}, dilations={dilations})",
        f"Y = run('Conv', X, W, {padding}, group={groups}, **same)",
        *_onnx_dx(groups, f"pads={pads}, output_padding={extra}, **same"),
        "# dw: images and channels swap roles, and so do stride and dilation. Inputs at the end,",
        "# which no window reads, are cropped.",
        f"X_read = X[:, :, {used}].transpose{swap}",
        *_onnx_dw(groups, f"pads={grad_pads}, strides={dilations}, dilations={strides}", swap),
        f"y = Y{data_back}",
        f"dx = DX{data_back}",
        f"dw = DW{filters_back}",
    ]
    size = f"ConvTranspose(pads={pads}, output_padding={extra})" + _onnx_output_shape(problem)
    imports = (
        "import numpy as np\nfrom onnx import TensorProto, helper\n"
        "from onnx.reference import ReferenceEvaluator"
    )
    return Translation("ONNX", call, imports, _setup(problem), "\n".join(lines), size, tuple(flags))


def _onnx_output_shape(problem: ConvProblem) -> str:
    """Return a clause on ConvTranspose's output_shape if it implies this padding; else empty."""
    befores = [before for before, _ in problem.padding]
    totals = [
        (axis.output - 1) * axis.stride + axis.effective_filter - axis.input
        for axis in problem.axes
    ]
    halves = {
        "SAME_UPPER": [total // 2 for total in totals],
        "SAME_LOWER": [total - total // 2 for total in totals],
    }
    for word, half in halves.items():
        if min(totals) >= 0 and half == befores:
            return (
                f', or output_shape={list(problem.input_sizes)} with auto_pad="{word}", which pads '
                "in the same way here"
            )
    return ""


def _onnx_dx(groups: int, rest: str) -> list[str]:
    if groups == 1:
        return [f"DX = run('ConvTranspose', DY, W, {rest})"]
    return [
        "DX = np.concatenate([",
        f"    run('ConvTranspose', a, b, {rest})",
        f"    for a, b in zip(np.split(DY, {groups}, 1), np.split(W, {groups}))",
        "], 1)",
    ]


def _onnx_dw(groups: int, rest: str, swap: str) -> list[str]:
    if groups == 1:
        return [f"DW = run('Conv', X_read, DY.transpose{swap}, {rest}).transpose{swap}"]
    return [
        "DW = np.concatenate([",
        f"    run('Conv', a, b, {rest})",
        f"    for a, b in zip(np.split(X_read, {groups}), np.split(DY.transpose{swap}, {groups}))",
        f"], 1).transpose{swap}",
    ]


# -- transposed layers -----------------------------------------------------------------------------
# The problem is the convolution that the layer reverses: the layer's x has the shape of the
# convolution's output, and its y the shape of the convolution's input.


def _pytorch_transposed(problem: ConvProblem) -> Translation:
    rank = problem.spatial_rank
    data, filters, data_back, filters_back = _permutations(problem, False, "permute")
    flags = _order_flags("PyTorch", problem, data or filters)
    padding, crop = _torch_tuple([before for before, _ in problem.padding]), ""
    if any(before != after for before, after in problem.padding):
        padding, crop = "0", f"[:, :, {_inside(problem)}]"
        flags.append(
            "PyTorch's transposed convolution crops both sides of an axis equally: the program "
            "crops the full result"
        )
    extra = f"output_padding={_torch_tuple(tuple(map(output_padding, problem.axes)))}"
    stride, dilation = _torch_tuple(problem.stride), _torch_tuple(problem.dilation)
    call = (
        f"F.conv_transpose{rank}d(X, W, padding={padding}, {extra}, stride={stride}, "
        f"dilation={dilation}, groups={problem.groups}){crop}"
    )
    rounded, numpy = "", ".numpy()"
    if problem.dtype == "bfloat16":
        rounded, numpy = ".bfloat16()", ".float().numpy()"
        flags.append(_THROUGH_FLOAT32)
    contiguous = ".contiguous()" if filters else ""
    lines = [
        f"X = torch.from_numpy(x){rounded}{data}.requires_grad_()",
        f"W = torch.from_numpy(w){rounded}{filters}{contiguous}.requires_grad_()",
        f"DY = torch.from_numpy(dy){rounded}{data}",
        f"Y = {call}",
        "DX, DW = torch.autograd.grad(Y, (X, W), DY)",
        f"y = Y.detach(){data_back}{numpy}",
        f"dx = DX{data_back}{numpy}",
        f"dw = DW{filters_back}{numpy}",
    ]
    imports = "import numpy as np\nimport torch\nimport torch.nn.functional as F"
    setup = _setup(problem, is_transposed=True)
    return Translation("PyTorch", call, imports, setup, "\n".join(lines), extra, tuple(flags))


def _tensorflow_transposed(problem: ConvProblem) -> Translation:
    rank, groups = problem.spatial_rank, problem.groups
    data, filters, data_back, filters_back = _permutations(problem, channels_last=True)
    flags = []
    if data or filters:
        flags.append(
            f"The program transposes the arrays to {formats.data_formats(rank)[1]} and "
            f"{formats.filter_formats(rank)[1]}, the orders that TensorFlow supports on a CPU"
        )
    sizes, padding, crop = problem.input_sizes, f'"{problem.padding_mode.upper()}"', ""
    extra, zeros = tuple(map(output_padding, problem.axes)), ""
    if max(problem.filter_sizes) == 1 and any(extra):
        zeros = f", {[[0, 0], *([0, each] for each in extra), [0, 0]]})"
        flags.append(
            "With oneDNN, TensorFlow 2.21 may crash on strided layers with one-tap filters if no "
            "input reaches the last outputs: the program adds these zeros"
        )
    in_numbers = problem.padding_mode not in ("same", "valid") and any(map(any, problem.padding))
    takes_numbers = rank == 2 and max(problem.dilation) == 1
    if in_numbers and takes_numbers and not zeros:
        padding = str([[0, 0], *map(list, problem.padding), [0, 0]])
    elif zeros or problem.padding_mode not in ("same", "valid"):
        padding = '"VALID"'
        if any(map(any, problem.padding)):
            crop = f"[:, {_inside(problem)}]"
            if not takes_numbers:
                only = "With dilation, " if rank == 2 else ""
                flags.append(
                    f"{only}conv{rank}d_transpose supports only SAME and VALID: the program crops "
                    "the result"
                )
        sizes = tuple(axis.padded_input for axis in problem.axes)
    if zeros:
        sizes = tuple(size - each for size, each in zip(sizes, extra, strict=True))
    if max(problem.dilation) > 1:
        flags.append(
            "On a CPU, TensorFlow computes dilated transposed layers only with oneDNN, in float32 "
            "and bfloat16"
        )
    shape = [problem.N, *sizes, problem.C // groups]
    strides = {1: str(problem.stride[0]), 2: str(list(problem.stride))}.get(
        rank, str([1, *problem.stride, 1])
    )
    dilations = ""
    if max(problem.dilation) > 1:
        values = {1: str(problem.dilation[0]), 2: str(list(problem.dilation))}
        dilations = f", dilations={values.get(rank, str([1, *problem.dilation, 1]))}"

    def one(x: str, w: str) -> str:
        return (
            f"tf.nn.conv{rank}d_transpose({x}, {w}, {shape}, strides={strides}, "
            f"padding={padding}{dilations})"
        )

    call = one("X", "W")
    if groups > 1:
        flags.append(f"The program computes the {groups} groups one by one")
        call = (
            f"tf.concat([{one('a', 'b')} for a, b in "
            f"zip(tf.split(X, {groups}, -1), tf.split(W, {groups}, -1))], -1)"
        )
    call = f"{'tf.pad(' if zeros else ''}{call}{zeros}{crop}"
    results = ["Y", "DX", "DW"]
    if problem.dtype == "bfloat16":
        results = [f"tf.cast({name}, tf.float32)" for name in results]
        flags.append(_THROUGH_FLOAT32)
    y, dx, dw = results
    lines = [
        f"X = tf.constant(x{data}, tf.{problem.dtype})",
        f"W = tf.constant(w{filters}, tf.{problem.dtype})",
        f"DY = tf.constant(dy{data}, tf.{problem.dtype})",
        "with tf.GradientTape() as tape:",
        "    tape.watch([X, W])",
        f"    Y = {call}",
        "DX, DW = tape.gradient(Y, [X, W], DY)",
        f"y = {y}.numpy(){data_back}",
        f"dx = {dx}.numpy(){data_back}",
        f"dw = {dw}.numpy(){filters_back}",
    ]
    imports = "import numpy as np\nimport tensorflow as tf"
    setup = _setup(problem, is_transposed=True)
    return Translation(
        "TensorFlow", call, imports, setup, "\n".join(lines), f"output_shape={shape}", tuple(flags)
    )


def _jax_transposed(problem: ConvProblem) -> Translation:
    forward = _jax(problem)
    call = forward.call.replace("(x, w,", "(y, w,")
    operands = "x, w"
    results = "np.asarray(Y), np.asarray(DX), np.asarray(DW)"
    size = f"y = jax.ShapeDtypeStruct({problem.input_shape}, x.dtype)"
    if problem.dtype == "bfloat16":
        operands = "x.astype(jax.numpy.bfloat16), w.astype(jax.numpy.bfloat16)"
        results = '(np.asarray(a.astype("float32")) for a in (Y, DX, DW))'
    lines = [
        "",
        "def layer(x, w):",
        f"    {size}",
        "    # The transposed layer is the transpose of this function, which is linear in y.",
        "    convolution = lambda y: (",
        f"        {call}",
        "    )",
        "    return jax.linear_transpose(convolution, y)(x)[0]",
        "",
        "",
        f"Y, backward = jax.vjp(layer, {operands})",
        "DX, DW = backward(jax.numpy.asarray(dy, Y.dtype))",
        f"y, dx, dw = {results}",
    ]
    struct = size.removeprefix("y = ")
    call = f"jax.linear_transpose(lambda y: {call}, {struct})(x)[0]"
    setup = _setup(problem, is_transposed=True)
    return Translation("JAX", call, forward.imports, setup, "\n".join(lines), size, forward.flags)


def _onnx_transposed(problem: ConvProblem) -> Translation:
    """Return the program of the convolution, with its tensors under the layer's names."""
    forward = _onnx(problem)
    names = {**CONVOLUTION_NAMES, "X_read": "DY_read"}
    names |= {name.upper(): other.upper() for name, other in CONVOLUTION_NAMES.items()}

    def renamed(text: str) -> str:
        return re.sub(r"\b(?:X_read|d?[xyw]|D?[XYW])\b", lambda name: names[name[0]], text)

    befores, afters = zip(*problem.padding, strict=True)
    extra = list(map(output_padding, problem.axes))
    call = (
        f"ConvTranspose(x, w, pads={[*befores, *afters]}, output_padding={extra}, "
        f"strides={list(problem.stride)}, dilations={list(problem.dilation)}, "
        f"group={problem.groups})"
    )
    flags = [
        "ONNX has no gradients of ConvTranspose: the program computes dx and dw with Conv"
        if flag.startswith("ONNX has no gradients")
        else renamed(flag)
        for flag in forward.flags
    ]
    setup = _setup(problem, is_transposed=True)
    size = f"output_padding={extra}"
    code = renamed(forward.code)
    return Translation("ONNX", call, forward.imports, setup, code, size, tuple(flags))


def _order_flags(framework: str, problem: ConvProblem, is_permuted: object) -> list[str]:
    rank = problem.spatial_rank
    if not is_permuted:
        return []
    return [
        f"{framework}'s axes are {formats.data_formats(rank)[0]} and "
        f"{formats.filter_formats(rank)[0]}: the program permutes the arrays"
    ]


FRAMEWORKS: dict[str, Callable[[ConvProblem], Translation]] = {
    "tensorflow": _tensorflow,
    "pytorch": _pytorch,
    "jax": _jax,
    "onnx": _onnx,
}

TRANSPOSED: dict[str, Callable[[ConvProblem], Translation]] = {
    "tensorflow": _tensorflow_transposed,
    "pytorch": _pytorch_transposed,
    "jax": _jax_transposed,
    "onnx": _onnx_transposed,
}

_SUPPORT_COMPLEX = ("pytorch", "jax")
"""Frameworks that convolve complex numbers."""
