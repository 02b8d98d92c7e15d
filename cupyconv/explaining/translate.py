"""Translate a layer into programs of other frameworks, and note what a framework does not support.

Every program makes random NumPy arrays ``x``, ``w`` and ``dy`` in the problem's formats, and
computes ``y``, ``dx`` and ``dw`` as arrays in the same formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cupyconv import formats
from cupyconv.errors import ConvError, unknown_word
from cupyconv.explaining.adjoints import filter_gradient_axes, input_gradient_axes, output_padding
from cupyconv.explaining.crops import full_size
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
    return FRAMEWORKS[word](problem, is_transposed)


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


def _own_orders(framework: str, problem: ConvProblem) -> str:
    """Return the beginning of a note on the memory orders of a channels-first framework."""
    rank = problem.spatial_rank
    data, filters = formats.data_formats(rank)[0], formats.filter_formats(rank)[0]
    return f"{framework}'s axes are {data} and {filters}"


# -- frameworks ------------------------------------------------------------------------------------
# The problem of a transposed layer is the convolution that the layer reverses: the layer's x has
# the shape of the convolution's output, and its y the shape of the convolution's input.


def _pytorch(problem: ConvProblem, is_transposed: bool) -> Translation:
    def per_axis(values: Iterable[int]) -> str:
        entries = tuple(values)
        return str(entries[0] if len(set(entries)) == 1 else entries)

    rank = problem.spatial_rank
    data, filters, data_back, filters_back = _permutations(problem, False, "permute")
    stride, dilation = per_axis(problem.stride), per_axis(problem.dilation)
    extra = f"output_padding={per_axis(map(output_padding, problem.axes))}"
    is_uneven = any(before != after for before, after in problem.padding)
    padding = f"padding={0 if is_uneven else per_axis(before for before, _ in problem.padding)}"
    crop = f"[:, :, {_inside(problem)}]" if is_uneven else ""
    rest = f"stride={stride}, dilation={dilation}, groups={problem.groups}"
    flags, direct = [], []
    if data or filters:
        flags.append(f"{_own_orders('PyTorch', problem)}: the program permutes the arrays")
    if is_transposed:
        call, size = f"F.conv_transpose{rank}d(X, W, {padding}, {extra}, {rest}){crop}", extra
        if is_uneven:
            flags.append(
                "PyTorch's transposed convolution crops both sides of an axis equally: the program "
                "crops the full result"
            )
    else:
        source, own_padding, mode = "X", padding, problem.padding_mode
        if is_uneven:
            source = f"F.pad(X, {tuple(side for pair in problem.padding[::-1] for side in pair)})"
            flags.append(
                "PyTorch's convolution pads both sides of an axis equally: F.pad pads instead"
            )
        if mode.startswith("same") and max(problem.stride) > 1:
            flags.append(
                "PyTorch supports padding='same' only for stride 1: the program passes numbers"
            )
        elif mode == "same_lower" and is_uneven:
            flags.append("PyTorch has no SAME_LOWER: the program pads explicitly")
        elif mode.startswith("same") and not is_uneven:
            own_padding = "padding='same'"
        call = f"F.conv{rank}d({source}, W, {own_padding}, {rest})"
        size = f"conv_transpose{rank}d(..., {padding}, {extra})"
        if problem.is_complex:
            size += " applied to conj(w)"
        else:
            whose = "the size of the padded x" if is_uneven else "the size of x"
            size += f", or torch.nn.grad.conv{rank}d_input(input_size, ...) with {whose}"
        direct = [
            "# dx without autograd; output_padding selects one of the possible sizes.",
            f"DX_direct = F.conv_transpose{rank}d(",
            f"    DY, W.detach(){'.conj()' if problem.is_complex else ''}, stride={stride}, "
            f"{padding},",
            f"    {extra}, groups={problem.groups}, dilation={dilation},",
            ")",
        ]
        if is_uneven:
            direct.append(f"DX_direct = DX_direct{crop}")
            size += f"; the result is cropped to [{_inside(problem)}]"
    rounded, numpy = "", ".numpy()"
    if problem.dtype == "bfloat16":
        rounded, numpy = ".bfloat16()", ".float().numpy()"
        flags.append(_THROUGH_FLOAT32)
    # PyTorch raises an error for the gradient of some permuted filters.
    contiguous = ".contiguous()" if filters else ""
    lines = [
        f"X = torch.from_numpy(x){rounded}{data}.requires_grad_()",
        f"W = torch.from_numpy(w){rounded}{filters}{contiguous}.requires_grad_()",
        f"DY = torch.from_numpy(dy){rounded}{data}",
        f"Y = {call}",
        "DX, DW = torch.autograd.grad(Y, (X, W), DY)",
        *direct,
        f"y = Y.detach(){data_back}{numpy}",
        f"dx = DX{data_back}{numpy}",
        f"dw = DW{filters_back}{numpy}",
        *([f"dx_direct = DX_direct{data_back}{numpy}"] if direct else []),
    ]
    imports = "import numpy as np\nimport torch\nimport torch.nn.functional as F"
    setup = _setup(problem, is_transposed)
    return Translation("PyTorch", call, imports, setup, "\n".join(lines), size, tuple(flags))


def _tensorflow(problem: ConvProblem, is_transposed: bool) -> Translation:
    data, filters, data_back, filters_back = _permutations(problem, channels_last=True)
    forward = _tensorflow_transposed if is_transposed else _tensorflow_forward
    call, size, direct, flags = forward(problem, data, filters)
    rounded = "tf.cast({}, tf.float32)" if problem.dtype == "bfloat16" else "{}"
    if problem.dtype == "bfloat16":
        flags.append(_THROUGH_FLOAT32)
    lines = [
        f"X = tf.constant(x{data}, tf.{problem.dtype})",
        f"W = tf.constant(w{filters}, tf.{problem.dtype})",
        f"DY = tf.constant(dy{data}, tf.{problem.dtype})",
        "with tf.GradientTape() as tape:",
        "    tape.watch([X, W])",
        f"    Y = {call}",
        "DX, DW = tape.gradient(Y, [X, W], DY)",
        f"y = {rounded.format('Y')}.numpy(){data_back}",
        f"dx = {rounded.format('DX')}.numpy(){data_back}",
        f"dw = {rounded.format('DW')}.numpy(){filters_back}",
    ]
    if direct:
        lines += [*direct, f"dx_direct = {rounded.format('DX_direct')}.numpy(){data_back}"]
    imports = "import numpy as np\nimport tensorflow as tf"
    setup = _setup(problem, is_transposed)
    return Translation("TensorFlow", call, imports, setup, "\n".join(lines), size, tuple(flags))


def _tensorflow_values(values: Sequence[int]) -> Any:
    """Return strides or dilations in the form of the function for this number of axes."""
    return {1: values[0], 2: list(values), 3: [1, *values, 1]}[len(values)]


def _tensorflow_groups(groups: int, source: str, call: Callable[[str, str], str]) -> str:
    """Return the call for all groups; ``call`` returns the call for one x and one w."""
    if groups == 1:
        return call(source, "W")
    pairs = f"zip(tf.split({source}, {groups}, -1), tf.split(W, {groups}, -1))"
    return f"tf.concat([{call('a', 'b')} for a, b in {pairs}], -1)"


_Forward = tuple[str, str, list[str], list[str]]
"""Call of the forward pass, how the size of dx is passed, lines of dx without autodiff, flags."""


def _tensorflow_forward(problem: ConvProblem, data: str, filters: str) -> _Forward:
    rank, groups = problem.spatial_rank, problem.groups
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
    mode, is_dilated = problem.padding_mode, max(problem.dilation) > 1
    in_numbers = mode in ("same_lower", "explicit") and any(map(any, problem.padding))
    pairs = [[0, 0], *map(list, problem.padding), [0, 0]]
    source, padding = "X", '"SAME"' if mode == "same" else '"VALID"'
    if mode == "same_lower":
        flags.append("TensorFlow has no SAME_LOWER: the program pads explicitly")
    is_explicit = in_numbers and rank == 2 and not is_dilated
    if in_numbers and not is_explicit:
        source = f"tf.pad(X, {pairs})"
        only = "With dilation, " if rank == 2 else ""
        flags.append(f"{only}conv{rank}d supports only SAME and VALID: tf.pad adds the padding")
    unread = [output_padding(axis) for axis in problem.axes]
    is_cropped = max(problem.filter_sizes) == 1 and any(unread)
    if is_cropped:
        left = zip(problem.axes, unread, strict=True)
        ends = ", ".join(f":{axis.padded_input - rest}" for axis, rest in left)
        source = f"tf.pad(X, {pairs})" if is_explicit else source
        source, padding, is_explicit = f"{source}[:, {ends}]", '"VALID"', False
        flags.append(
            "With oneDNN, TensorFlow 2.21 may crash on gradients of strided layers with one-tap "
            "filters if no window reads the last inputs: the program crops these inputs"
        )
    if is_dilated:
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
    if groups > 1:
        flags.append(
            "Many CPU builds of TensorFlow cannot compute gradients of grouped layers: the program "
            f"computes the {groups} groups one by one"
        )
    strides, dilations = map(_tensorflow_values, (problem.stride, problem.dilation))
    rules = (
        f"stride{'s' if rank > 1 else ''}={strides}, padding={pairs if is_explicit else padding}, "
        f"dilations={dilations}"
    )
    call = _tensorflow_groups(groups, source, lambda x, w: f"tf.nn.conv{rank}d({x}, {w}, {rules})")
    sizes, direct = [problem.N, *problem.input_sizes, problem.C], []
    if rank == 2 and groups == 1 and not is_dilated and not is_cropped:
        word = '"EXPLICIT"' if is_explicit else padding
        direct = [
            "# dx without autodiff; input_sizes selects one of the possible sizes.",
            "DX_direct = tf.raw_ops.Conv2DBackpropInput(",
            f"    input_sizes={sizes}, filter=W, out_backprop=DY,",
            f"    strides={[1, *problem.stride, 1]}, padding={word},",
            *(
                [f"    explicit_paddings={[side for pair in pairs for side in pair]},"]
                if is_explicit
                else []
            ),
            ")",
        ]
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
    return call, size, direct, flags


def _tensorflow_transposed(problem: ConvProblem, data: str, filters: str) -> _Forward:
    rank, groups, mode = problem.spatial_rank, problem.groups, problem.padding_mode
    is_padded, is_dilated = any(map(any, problem.padding)), max(problem.dilation) > 1
    flags = []
    if data or filters:
        flags.append(
            f"The program transposes the arrays to {formats.data_formats(rank)[1]} and "
            f"{formats.filter_formats(rank)[1]}, the orders that TensorFlow supports on a CPU"
        )
    extra = [output_padding(axis) for axis in problem.axes]
    is_one_tap = max(problem.filter_sizes) == 1 and any(extra)
    if is_one_tap:
        flags.append(
            "With oneDNN, TensorFlow 2.21 may crash on strided layers with one-tap filters if no "
            "input reaches the last outputs: the program adds these zeros"
        )
    takes_numbers = rank == 2 and not is_dilated
    sizes, padding, crop = problem.input_sizes, f'"{mode.upper()}"', ""
    if is_one_tap or (mode not in ("same", "valid") and not (is_padded and takes_numbers)):
        sizes, padding = tuple(axis.padded_input for axis in problem.axes), '"VALID"'
        crop = f"[:, {_inside(problem)}]" if is_padded else ""
        if is_padded and not takes_numbers:
            only = "With dilation, " if rank == 2 else ""
            flags.append(
                f"{only}conv{rank}d_transpose supports only SAME and VALID: the program crops the "
                "result"
            )
    elif mode not in ("same", "valid"):
        padding = str([[0, 0], *map(list, problem.padding), [0, 0]])
    if is_one_tap:
        sizes = tuple(size - each for size, each in zip(sizes, extra, strict=True))
    dilations = ""
    if is_dilated:
        dilations = f", dilations={_tensorflow_values(problem.dilation)}"
        flags.append(
            "On a CPU, TensorFlow computes dilated transposed layers only with oneDNN, in float32 "
            "and bfloat16"
        )
    if groups > 1:
        flags.append(f"The program computes the {groups} groups one by one")
    shape = [problem.N, *sizes, problem.C // groups]
    rules = f"{shape}, strides={_tensorflow_values(problem.stride)}, padding={padding}{dilations}"
    call = _tensorflow_groups(
        groups, "X", lambda x, w: f"tf.nn.conv{rank}d_transpose({x}, {w}, {rules})"
    )
    if is_one_tap:
        call = f"tf.pad({call}, {[[0, 0], *([0, each] for each in extra), [0, 0]]})"
    return f"{call}{crop}", f"output_shape={shape}", [], flags


def _jax(problem: ConvProblem, is_transposed: bool) -> Translation:
    flags = []
    mode = problem.padding_mode
    padding = f'"{mode.upper()}"' if mode != "explicit" else str(list(problem.padding))
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
    orders = (problem.data_format, problem.filter_format, problem.data_format)
    arguments = [
        f"{'y' if is_transposed else 'x'}, w, {problem.stride}, {padding}, "
        f"rhs_dilation={problem.dilation},",
        f"dimension_numbers={orders},",
        f"feature_group_count={problem.groups}, precision='highest',",
    ]
    call = f"lax.conv_general_dilated({' '.join(arguments).rstrip(',')})"
    if is_transposed:
        struct = f"jax.ShapeDtypeStruct({problem.input_shape}, x.dtype)"
        size, remark = f"y = {struct}", ""
        body = [
            f"    {size}",
            "    # The transposed layer is the transpose of this function, which is linear in y.",
            "    convolution = lambda y: (",
            f"        {call}",
            "    )",
            "    return jax.linear_transpose(convolution, y)(x)[0]",
        ]
        call = f"jax.linear_transpose(lambda y: {call}, {struct})(x)[0]"
    else:
        paddings = [axis.padding for axis in input_gradient_axes(problem)]
        within = " in each group" if problem.groups > 1 else ""
        size = (
            "jax.vjp takes the size from x; without vjp, lax.conv_general_dilated takes "
            f"lhs_dilation={problem.stride}, padding={paddings} and w flipped, with its channel "
            f"axes swapped{within}"
        )
        body = [
            "    return lax.conv_general_dilated(",
            *(f"        {a}" for a in arguments),
            "    )",
        ]
        remark = "  # keeps the sizes of x and w"
    lines = [
        "",
        "def layer(x, w):",
        *body,
        "",
        "",
        f"Y, backward = jax.vjp(layer, {operands}){remark}",
        f"DX, DW = backward({cotangent})",
        f"y, dx, dw = {results}",
    ]
    setup = _setup(problem, is_transposed)
    return Translation("JAX", call, imports, setup, "\n".join(lines), size, tuple(flags))


def _onnx(problem: ConvProblem, is_transposed: bool) -> Translation:
    """Return the program of the convolution; for a transposed layer, with the layer's names."""
    rank, groups = problem.spatial_rank, problem.groups
    data, filters, data_back, filters_back = _permutations(problem, channels_last=False)
    befores, afters = zip(*problem.padding, strict=True)
    pads, extra = [*befores, *afters], list(map(output_padding, problem.axes))
    modes = {"same": "SAME_UPPER", "same_lower": "SAME_LOWER", "valid": "VALID"}
    word = modes.get(problem.padding_mode)
    padding = f'auto_pad="{word}"' if word else f"pads={pads}"
    strides, dilations = list(problem.stride), list(problem.dilation)
    rules = f"strides={strides}, dilations={dilations}, group={groups}"
    weights = filter_gradient_axes(problem)
    grad_pads = [a.padding[0] for a in weights] + [max(a.padding[1], 0) for a in weights]
    used = ", ".join(f":{a.rule.input + min(a.padding[1], 0)}" for a in weights)
    kind = {"float16": "FLOAT16", "float64": "DOUBLE"}.get(problem.dtype, "FLOAT")
    swap = str((1, 0, *range(2, rank + 2)))

    def run(operator: str, a: str, b: str, rest: str, axis: str = "") -> str:
        """Return the lines that run one node, or a node per group."""
        if groups == 1:
            return f"run('{operator}', {a}, {b}, {rest})"
        return (
            f"np.concatenate([\n    run('{operator}', a, b, {rest})\n"
            f"    for a, b in zip(np.split({a}, {groups}{axis}), np.split({b}, {groups}))\n], 1)"
        )

    dx = run("ConvTranspose", "DY", "W", f"pads={pads}, output_padding={extra}, **same", ", 1")
    dw_rules = f"pads={grad_pads}, strides={dilations}, dilations={strides}"
    dw = run("Conv", "X_read", f"DY.transpose{swap}", dw_rules)
    code = "\n".join(
        [
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
            f"DX = {dx}",
            "# dw: images and channels swap roles, and so do stride and dilation. Inputs at the "
            "end,",
            "# which no window reads, are cropped.",
            f"X_read = X[:, :, {used}].transpose{swap}",
            f"DW = {dw}.transpose{swap}",
            f"y = Y{data_back}",
            f"dx = DX{data_back}",
            f"dw = DW{filters_back}",
        ]
    )
    flags = []
    if data or filters:
        flags.append(f"{_own_orders('ONNX', problem)}: the program transposes the arrays")
    flags.append(
        "ONNX has no gradients of ConvTranspose: the program computes dx and dw with Conv"
        if is_transposed
        else "ONNX has no gradients of Conv: the program computes dx with ConvTranspose, and dw "
        "with a Conv whose input is x and whose filter is dy"
    )
    if groups > 1:
        flags.append(
            f"dw of {groups} groups needs one Conv node per group. One ConvTranspose node can "
            f"compute {'y' if is_transposed else 'dx'}, but onnx's reference evaluator supports "
            "ConvTranspose only with one group: the program uses one node per group"
        )
    if problem.dtype == "bfloat16":
        flags.append("NumPy has no bfloat16: the program runs in float32")
    call = f"Conv(x, w, {padding}, {rules})"
    size = f"ConvTranspose(pads={pads}, output_padding={extra})" + _onnx_output_shape(problem)
    if is_transposed:
        names = {**CONVOLUTION_NAMES, "X_read": "DY_read"}
        names |= {name.upper(): other.upper() for name, other in CONVOLUTION_NAMES.items()}
        code = re.sub(r"\b(?:X_read|d?[xyw]|D?[XYW])\b", lambda name: names[name[0]], code)
        size = f"output_padding={extra}"
        call = f"ConvTranspose(x, w, pads={pads}, {size}, {rules})"
    imports = (
        "import numpy as np\nfrom onnx import TensorProto, helper\n"
        "from onnx.reference import ReferenceEvaluator"
    )
    setup = _setup(problem, is_transposed)
    return Translation("ONNX", call, imports, setup, code, size, tuple(flags))


def _onnx_output_shape(problem: ConvProblem) -> str:
    """Return a clause on ConvTranspose's output_shape if it implies this padding; else empty."""
    totals = [full_size(axis) - axis.input for axis in problem.axes]
    halves = {
        "SAME_UPPER": [total // 2 for total in totals],
        "SAME_LOWER": [total - total // 2 for total in totals],
    }
    for word, half in halves.items():
        if min(totals) >= 0 and half == [before for before, _ in problem.padding]:
            return (
                f', or output_shape={list(problem.input_sizes)} with auto_pad="{word}", which pads '
                "in the same way here"
            )
    return ""


FRAMEWORKS: dict[str, Callable[[ConvProblem, bool], Translation]] = {
    "tensorflow": _tensorflow,
    "pytorch": _pytorch,
    "jax": _jax,
    "onnx": _onnx,
}

_SUPPORT_COMPLEX = ("pytorch", "jax")
"""Frameworks that convolve complex numbers."""
