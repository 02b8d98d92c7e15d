"""Read the convolutions of an ONNX model as ConvProblems; needs the onnx package, not the weights.

A filter or bias is called stored if the file contains it, or if the model computes it only from
tensors that the file contains.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

from cupyconv.errors import (
    ConvError,
    ConvTypeError,
    CupyconvError,
    install_command,
    shortened,
    shown,
)
from cupyconv.explaining import onnx_graph
from cupyconv.explaining.onnx_fields import Fields
from cupyconv.explaining.onnx_file import damaged, other_kind, read_content
from cupyconv.explaining.onnx_graph import Scope, Shape, Stored, Traversal, Visit
from cupyconv.explaining.onnx_operators import (
    FUSED_ATTRIBUTES,
    OWN_DOMAINS,
    Form,
    channels_first,
    channels_last,
    decoded,
    form_of,
    operator_text,
    plain_attributes,
    unsupported,
)
from cupyconv.explaining.receptive import Field
from cupyconv.explaining.transposed import output_padding
from cupyconv.formats import SPATIAL_AXES, data_formats, filter_formats
from cupyconv.onnx import (
    conv_problem,
    conv_transpose_problem,
    require_attributes,
    require_padding,
)
from cupyconv.problem import ITEMSIZE, ConvProblem, DtypeName, counted, shape_text

_CONVOLUTION = re.compile(r"Conv(olution)?(?![a-z])")
"""Pattern that matches a part of the name of every operator that convolves."""

_LIKELY_SIZES: Mapping[int, tuple[tuple[int, ...], ...]] = {
    1: ((16_000,),),
    2: ((224, 224), (48, 320), (32, 320)),
    3: ((32, 32, 32),),
}
"""Example sizes for unknown spatial sizes, keyed by the number of spatial axes.

The examples are a second of sound, an image or a text line, and a volume.
"""


@dataclass(frozen=True)
class _Node:
    """A node of a model that convolves.

    Attributes:
        name: name of the node; the name of its output if the node has no name.
        operator: operator of the node, such as "Conv" or "ConvInteger".
        filter: Stored object of the filter; None if the filter is not stored.
        bias: Stored object of the bias; None without a bias, or if the bias is not stored.
        inside: operators and branches that contain the node, as for ``Visit``.
    """

    name: str
    operator: str
    filter: Stored | None
    bias: Stored | None
    inside: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Number of stored weights and biases, shared ones included."""
        return sum(stored.size for stored in (self.filter, self.bias) if stored)


@dataclass(frozen=True)
class ModelLayer(_Node):
    """A Conv or ConvTranspose node of a model, or a node of ONNX Runtime that contains one.

    Attributes:
        problem: the convolution.  A ConvTranspose is the transpose of this convolution: its forward
            pass is ``backprop_input``.
        is_transposed: whether the node is a ConvTranspose.
        has_bias: whether the node adds a bias.
        added: name of another tensor that the node adds to the result; "" without one.
        activation: name of the activation that the node applies at the end; "" without one.
        same_filter_as: first layer of the model with the same filter; None for the first layer
            itself, and for a filter that is not stored in the file.
        same_values_as: first layer whose filter has the same values, possibly transposed or
            converted; None as for ``same_filter_as``.
        fields: receptive field along each axis, in the model's input; () if it is unknown.
    """

    problem: ConvProblem
    is_transposed: bool
    has_bias: bool
    added: str
    activation: str
    same_filter_as: str | None
    same_values_as: str | None
    fields: tuple[Field, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the node's input, and of the gradient with respect to it."""
        return self.problem.output_shape if self.is_transposed else self.problem.input_shape

    @property
    def filter_shape(self) -> tuple[int, ...]:
        """Shape of the filter, and of the gradient with respect to it."""
        return self.problem.filter_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the node's output, and of the gradient with respect to it."""
        return self.problem.input_shape if self.is_transposed else self.problem.output_shape

    @property
    def output_channels(self) -> int:
        """Number of channels of the node's output, and of its bias."""
        return self.problem.C if self.is_transposed else self.problem.K

    @property
    def activation_bytes(self) -> int:
        """Bytes of the node's output."""
        return ITEMSIZE[self.problem.dtype] * prod(self.output_shape)

    @property
    def passes(self) -> dict[str, str]:
        """Names of the passes that compute y, dx and dw."""
        passes = (
            ("backprop_input", "forward") if self.is_transposed else ("forward", "backprop_input")
        )
        return dict(zip(("y", "dx", "dw"), (*passes, "backprop_filter"), strict=True))

    @property
    def settings(self) -> str:
        """Operator and settings that differ from the defaults, memory order and dtype, as text."""
        problem = self.problem
        extra = tuple(map(output_padding, problem.axes)) if self.is_transposed else ()
        words = _settings(
            self.operator, problem.stride, extra, problem.padding, problem.dilation, problem.groups
        )
        if problem.data_format.endswith("C"):
            words.append(f"{problem.data_format} with {problem.filter_format}")
        return ", ".join([*words, problem.dtype])

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on fusion, sharing, storage, enclosing operators and the receptive field."""
        notes = [
            (self.added, f"adds {self.added}"),
            (self.activation, f"applies {self.activation}"),
            (self.same_filter_as, f"same filter as {self.same_filter_as}"),
            (
                self.same_values_as and not self.same_filter_as,
                f"same stored values as {self.same_values_as}",
            ),
            (self.filter is None, "filter not stored in the file"),
            (self.has_bias and self.bias is None, "bias not stored in the file"),
            *((True, f"inside {operator}") for operator in self.inside),
        ]
        texts = [note for applies, note in notes if applies]
        if self.fields:
            sizes, steps = ("x".join(map(str, each)) for each in zip(*self.fields, strict=True))
            texts.append(f"receptive field {sizes}, step {steps}")
        return tuple(texts)


@dataclass(frozen=True)
class UnreadLayer(_Node):
    """A convolution of a model that cannot be read as a problem, with the known facts about it.

    Attributes:
        reason: why the node is not read.
        is_open: whether an unknown size is the only reason.
        attributes: the node's attributes that are numbers, strings or lists of these, by name.
        input_shape, filter_shape, output_shape: sizes, with names or "?" for unknown sizes; () for
            an unknown shape.
    """

    reason: str
    is_open: bool
    attributes: Mapping[str, Any]
    input_shape: Shape
    filter_shape: Shape
    output_shape: Shape

    @property
    def settings(self) -> str:
        """Operator and settings that differ from the defaults, as text."""
        sizes = {
            name: tuple(values)
            for name, values in self.attributes.items()
            if isinstance(values, list) and all(isinstance(size, int) for size in values)
        }
        pads, groups = sizes.get("pads", ()), self.attributes.get("group", 1)
        half = len(pads) // 2
        words = _settings(
            self.operator,
            sizes.get("strides", ()),
            sizes.get("output_padding", ()),
            tuple(zip(pads[:half], pads[half:], strict=False)),
            sizes.get("dilations", ()),
            groups if isinstance(groups, int) else 1,
        )
        auto_pad = self.attributes.get("auto_pad")
        if auto_pad not in (None, "", "NOTSET"):
            words.append(f"auto_pad {auto_pad}")
        if not self.filter_shape and sizes.get("kernel_shape"):
            words.append(f"kernel_shape {shape_text(sizes['kernel_shape'])}")
        if sizes.get("output_shape"):
            words.append(f"output_shape {shape_text(sizes['output_shape'])}")
        return ", ".join(words)

    @property
    def notes(self) -> tuple[str, ...]:
        """Enclosing operators, and the reason why the node is not read."""
        return (*(f"inside {operator}" for operator in self.inside), self.reason)


def _settings(
    operator: str,
    stride: tuple[int, ...],
    extra: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    groups: int,
) -> list[str]:
    """Return the operator, if it is not Conv, and the settings that differ from the defaults.

    Args:
        extra: output_padding of each axis.
    """
    sides = [str(b) if b == a else f"{b}:{a}" for b, a in padding]
    words = {
        operator: operator != "Conv",
        f"stride {shape_text(stride)}": set(stride) - {1},
        f"output_padding {shape_text(extra)}": any(extra),
        f"padding {sides[0] if len(set(sides)) == 1 else ','.join(sides)}": any(map(any, padding)),
        f"dilation {shape_text(dilation)}": set(dilation) - {1},
        f"groups {groups}": groups != 1,
    }
    return [word for word, is_changed in words.items() if is_changed]


@dataclass(frozen=True)
class Model:
    """The convolutions of a model, in the order of its nodes.

    Attributes:
        inputs: shapes of the model's inputs, by name.
        nodes: all nodes that convolve.
        hint: advice with the option that sets the unknown sizes; "" if all sizes are known.
    """

    inputs: Mapping[str, Shape]
    nodes: tuple[ModelLayer | UnreadLayer, ...]
    hint: str = ""

    @cached_property
    def layers(self) -> tuple[ModelLayer, ...]:
        """Conv and ConvTranspose nodes with known sizes."""
        return tuple(node for node in self.nodes if isinstance(node, ModelLayer))

    @cached_property
    def unknown(self) -> tuple[UnreadLayer, ...]:
        """Conv and ConvTranspose nodes with an unknown size."""
        return tuple(n for n in self.nodes if isinstance(n, UnreadLayer) and n.is_open)

    @cached_property
    def left_out(self) -> tuple[UnreadLayer, ...]:
        """Nodes that convolve but are unsupported."""
        return tuple(n for n in self.nodes if isinstance(n, UnreadLayer) and not n.is_open)

    @cached_property
    def flops(self) -> int:
        """FLOP of the forward passes of all layers."""
        return sum(layer.problem.flops for layer in self.layers)

    def share(self, layer: ModelLayer) -> float:
        """Return the share of a layer in the model's FLOP."""
        return layer.problem.flops / max(self.flops, 1)

    @property
    def weights(self) -> int:
        """Number of stored weights of all supported layers; shared values count once."""
        return _stored_size(layer.filter for layer in self._supported)

    @property
    def parameters(self) -> int:
        """Number of stored weights and biases of all supported layers; shared values count once."""
        pairs = ((layer.filter, layer.bias) for layer in self._supported)
        return _stored_size(stored for pair in pairs for stored in pair)

    @property
    def _supported(self) -> tuple[ModelLayer | UnreadLayer, ...]:
        """Supported Conv and ConvTranspose nodes, with known or unknown sizes."""
        return (*self.layers, *self.unknown)

    @property
    def without_layers(self) -> str:
        """Reason why the model has no layers, with the operators that are not read."""
        if not self.left_out:
            return "has no Conv and no ConvTranspose"
        counts = Counter(node.operator for node in self.left_out)
        named = ", ".join(f"{count} {operator}" for operator, count in counts.items())
        return f"has no Conv and no ConvTranspose that can be read; it has {named}"


def _stored_size(every: Iterable[Stored | None]) -> int:
    """Return the number of stored values; values that several tensors share count once."""
    return sum(origin.size for origin in {stored.origin for stored in every if stored})


def read(
    path: str | Path,
    inputs: Mapping[str, tuple[int, ...]] | None = None,
    file: BinaryIO | None = None,
    *,
    open_sizes: bool = False,
) -> Model:
    """Read the convolutions of a .onnx file.

    Args:
        path: the file; weights in external files are not needed.
        inputs: shapes by name.  A name is an input of the model with unknown sizes, a tensor inside
            the model whose shape cannot be inferred, or a named unknown size such as "batch", for
            which the shape has one size.
        file: the file, if it is open already.
        open_sizes: accept a model in which no convolution has known sizes.

    Raises:
        ConvError: the file is of another kind, damaged or too large, or no convolution has known
            sizes.
        ConvTypeError: the onnx package is not installed.
        OSError: the file cannot be read.
    """
    onnx = _onnx()
    content = read_content(path, file)
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's error class is unknown here
        raise other_kind(path, content) or damaged(
            path, f"it cannot be parsed ({' '.join(str(error).split())[:120]})"
        ) from None
    if not model.graph.node:
        raise other_kind(path, content) or damaged(path, "it has no graph")
    _require_texts(path, model)
    model = _inlined(path, model)
    onnx_graph.open_unusable_sizes(model.graph)
    sizes = onnx_graph.set_named_sizes(model.graph, dict(inputs or {}))
    result, unknown = _convolutions(onnx, path, model, sizes)
    if not unknown:
        return result
    first = unknown[0]
    example = _example(onnx, path, model, sizes, first)
    hint = f"{first.remedy}, for example {example}" if example else first.remedy_by_hand
    if not result.layers and not open_sizes:
        raise ConvError("the sizes of every convolution must be known", f"{first}", hint)
    return replace(result, hint=hint)


def _convolutions(
    onnx: Any, path: str | Path, model: Any, sizes: Mapping[str, tuple[int, ...]]
) -> tuple[Model, list[_UnknownSize]]:
    """Return the convolutions of a model, and an error for each layer with an unknown size."""
    traversal = Traversal(onnx, model, sizes)
    fields = Fields(traversal.inputs)
    nodes: list[ModelLayer | UnreadLayer] = []
    unknown: list[_UnknownSize] = []
    filters: dict[tuple[Stored, Stored | None], str] = {}
    for visit in traversal.visits():
        node = visit.node
        if not _CONVOLUTION.search(node.op_type):
            fields.add(visit)
            continue
        name, form, opened = node.name or next(iter(node.output), node.op_type), form_of(node), None
        why = unsupported(node)
        if not why and not (node.input and node.output):
            raise damaged(path, f"{name} has no inputs or no outputs")
        if not why and not visit.used:
            why = "no output of the model depends on it"
        try:
            if form is not None and not why:
                layer = _layer(onnx, visit, form, name, traversal.open_inputs, filters)
                field = fields.add(visit, layer.problem.axes, layer.is_transposed)
                nodes.append(replace(layer, fields=field))
                continue
        except _UnknownSize as error:
            unknown.append(error)
            why, opened = f"{error}. {error.remedy_by_hand}", form
        except _Unsupported as error:
            why = str(error)
        except (ConvError, ConvTypeError) as error:
            if not visit.inside:
                raise
            fault = f"{error.rule}: {error.values}" if isinstance(error, ConvError) else f"{error}"
            why = f"{fault.removeprefix(f'{name}: ')} (a branch that does not run may be invalid)"
        nodes.append(_unread(traversal, visit, name, why, opened))
    return Model(traversal.inputs, tuple(nodes)), unknown


_FILTER_INPUTS = {"QLinearConv": 3, "QLinearConvTranspose": 3}
"""Index of the filter among an operator's inputs, for operators where the index is not 1."""

_BIAS_INPUTS = {"QLinearConv": 8, "QLinearConvTranspose": 8, "ConvInteger": 4, "DeformConv": 3}
"""Index of the bias among an operator's inputs, for operators where the index is not 2.

ConvInteger has four inputs, so its index 4 means that there is no bias.
"""


def _unread(
    traversal: Traversal, visit: Visit, name: str, reason: str, open_form: Form | None = None
) -> UnreadLayer:
    """Return the entry of a node that is not read, with the known shapes.

    Args:
        open_form: form of the node, if an unknown size is the only reason.
    """
    node, scope = visit.node, visit.scope
    filter_ = _FILTER_INPUTS.get(node.op_type, 1)
    bias = _BIAS_INPUTS.get(node.op_type, 2)
    names = dict(enumerate(node.input))
    x_name, w_name, bias_name = (names.get(i, "") for i in (0, filter_, bias))
    x, w = scope[x_name].shape, scope[w_name].shape
    if open_form:
        x, y = _open_shapes(node, name, open_form, x, w)
    else:
        kinds = traversal.infer(node, scope)
        y = kinds[node.output[0]].shape if node.output and node.output[0] in kinds else ()
    return UnreadLayer(
        name=name,
        operator=operator_text(node),
        filter=scope[w_name].stored,
        bias=scope[bias_name].stored,
        inside=visit.inside,
        reason=reason,
        is_open=open_form is not None,
        attributes=plain_attributes(node),
        input_shape=x,
        filter_shape=w,
        output_shape=y,
    )


def _open_shapes(node: Any, name: str, form: Form, x: Shape, w: Shape) -> tuple[Shape, Shape]:
    """Return the shapes of x and y of a Conv or ConvTranspose, as far as they are known.

    Axes are independent of each other, so the known sizes of y are computed with an arbitrary size
    in place of each unknown size.
    """
    if not _is_numbers(w) or len(w) - 2 not in SPATIAL_AXES:
        return x, ()
    attributes = _attributes(name, node)
    _, w = _in_standard_order(form, x, w, attributes)
    batch, known, *sizes = form.in_standard_order(x or ("?",) * len(w))
    channels = _input_channels(form, w, attributes)
    if isinstance(channels, int) and not isinstance(known, int):
        known = channels
    x = (batch, known, *sizes)
    filled = tuple(size if isinstance(size, int) else _ANY_SIZE for size in x)
    try:
        problem = _standard_problem(form, filled, w, "float32", attributes)
    except CupyconvError:
        return form.in_own_order(x), ()
    y = problem.input_shape if form.operator == "ConvTranspose" else problem.output_shape
    pairs = zip(sizes, y[2:], strict=True)
    outputs = ("?" if not isinstance(size, int) else out for size, out in pairs)
    named = batch if not isinstance(batch, int) else y[0]
    return form.in_own_order(x), form.in_own_order((named, y[1], *outputs))


def _standard_problem(
    form: Form, x: Shape, w: Shape, dtype: str, attributes: Mapping[str, Any]
) -> ConvProblem:
    """Return the problem of a node whose shapes are in the order of the standard operator."""
    meaning = conv_transpose_problem if form.operator == "ConvTranspose" else conv_problem
    return meaning(
        cast("tuple[int, ...]", x),
        cast("tuple[int, ...]", w),
        dtype=cast("DtypeName", dtype),
        **attributes,
    )


def _in_standard_order(
    form: Form, x: Shape, w: Shape, attributes: Mapping[str, Any]
) -> tuple[Shape, Shape]:
    """Return the shapes of x and w in the order of the standard operator."""
    last = form.has_filter_channels_last(x, w, attributes)
    return form.in_standard_order(x), channels_first(w) if last else w


_ANY_SIZE = 1 << 12
"""Size in place of an unknown size; larger than the span of an ordinary filter (hand-set)."""


def _input_channels(form: Form, w: Shape, attributes: Mapping[str, Any]) -> int | str:
    """Return the number of input channels by a node's filter; if unknown, its name or "?"."""
    groups = attributes.get("group", 1)
    if form.operator == "ConvTranspose":
        return w[0]
    if isinstance(w[1], int) and isinstance(groups, int) and groups > 0:
        return w[1] * groups
    return "?"


class _Unsupported(CupyconvError):
    """A valid convolution that the library does not support."""


class _UnknownSize(CupyconvError):
    """A size that a layer needs and the model does not determine.

    Args:
        layer: name of the layer.
        tensor: name of the tensor with the unknown size.
        shape: sizes of the tensor, as far as they are known; () if the number of axes is unknown.
        known: text on the shape for the message.
        inputs: shapes of the model's inputs with unknown sizes, by name.
    """

    def __init__(
        self, layer: str, tensor: str, shape: Shape, known: str, inputs: Mapping[str, Shape]
    ) -> None:
        super().__init__(f"{layer} reads {tensor} of {known}")
        self.tensor, self.shape, self.inputs = tensor, shape, inputs

    @property
    def remedy(self) -> str:
        listed = ", ".join(f"{key} {_text(value)}" for key, value in self.inputs.items())
        return f"Give the sizes of the model's inputs ({listed})"

    @property
    def remedy_by_hand(self) -> str:
        """Advice with the option to pass; the reader replaces each ? by a size."""
        name, shape, head = self.tensor, self.shape, "Give the sizes of the tensor itself"
        if self.inputs:
            head = self.remedy
        if self.inputs and name not in self.inputs:
            name, shape = next(iter(self.inputs.items()))
        if not shape:
            return f"{head}: --input {shlex.quote(name)}=SHAPE"
        sizes = shape_text(size if isinstance(size, int) else "?" for size in shape)  # type: ignore[misc]
        return f"{head}: --input {shlex.quote(f'{name}={sizes}')} with a number for each ?"


def _example(
    onnx: Any,
    path: str | Path,
    model: Any,
    sizes: Mapping[str, tuple[int, ...]],
    unknown: _UnknownSize,
) -> str:
    """Return an example of an option that gives the sizes; "" if no likely shape works.

    A likely shape exists only for an input of the model that a convolution reads.
    """
    rank = len(unknown.shape) - 2
    if unknown.tensor not in unknown.inputs or rank not in SPATIAL_AXES:
        return ""
    partial = ""
    for likely in _LIKELY_SIZES[rank]:
        pairs = zip(unknown.shape, (1, "?", *likely), strict=True)
        guesses = (size if isinstance(size, int) else guess for size, guess in pairs)
        shape = tuple(size for size in guesses if isinstance(size, int))
        if len(shape) < len(unknown.shape):
            return ""
        try:
            result, others = _convolutions(onnx, path, model, {**sizes, unknown.tensor: shape})
        except (ConvError, ConvTypeError):
            continue
        example = _option(unknown, shape)
        if not others:
            return example
        partial = partial or (example if result.layers else "")
    return partial


def _option(unknown: _UnknownSize, shape: tuple[int, ...]) -> str:
    """Return the command-line option that sets the sizes that the model leaves unknown.

    If only one size of the tensor is unknown and it has a name, the option sets this name.
    """
    pairs = zip(unknown.shape, shape, strict=True)
    names = [(size, number) for size, number in pairs if isinstance(size, str)]
    if len(names) == 1 and names[0][0] not in ("?", *unknown.inputs):
        return f"--input {shlex.quote(f'{names[0][0]}={names[0][1]}')}"
    return f"--input {shlex.quote(f'{unknown.tensor}={shape_text(shape)}')}"


def _onnx() -> Any:
    try:
        onnx = import_module("onnx")
        import_module("onnx.shape_inference")
    except ImportError:
        raise ConvTypeError(
            "models are read with the onnx package, which is not installed. "
            f"Install it with: {install_command('onnx')}"
        ) from None
    return onnx


def _inlined(path: str | Path, model: Any) -> Any:
    """Return the model with each function call replaced by the body of the function."""
    if not model.functions:
        return model
    try:
        onnx_graph.mark_stored_values(model)
        onnx_graph.require_expandable(path, model)
        onnx_graph.adopt_versions(model)
        expanded = import_module("onnx.inliner").inline_local_functions(model)
        if (function := onnx_graph.called_function(expanded)) is not None:
            raise ConvError(
                "the functions of a model must use its versions of the operators",
                f"{path} uses {_versions(model)}, and its function {shown(function.name)} "
                f"uses {_versions(function)}",
            )
        return expanded
    except ConvError:
        raise
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        raise damaged(path, f"its functions cannot be expanded ({why})") from None


def _versions(message: Any) -> str:
    """Return the versions of operators that a model or a function imports."""
    imports = (f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in message.opset_import)
    return shortened(", ".join(imports))


def _require_texts(path: str | Path, model: Any) -> None:
    """Check that every string of a model is UTF-8; protobuf returns bytes for other strings."""
    for field, values in onnx_graph.fields(model):
        if field.type == field.TYPE_STRING and any(isinstance(text, bytes) for text in values):
            raise damaged(path, f"its {field.name} is not UTF-8")


def _layer(
    onnx: Any,
    visit: Visit,
    form: Form,
    name: str,
    inputs: Mapping[str, Shape],
    filters: dict[tuple[Stored, Stored | None], str],
) -> ModelLayer:
    """Return the layer of a node that has the form of a Conv or ConvTranspose.

    Args:
        onnx: the package.
        visit: the node, with the facts about its tensors.
        form: the form of the node.
        name: the layer's name.
        inputs: shapes, by name, of the inputs of the model that have unknown sizes.
        filters: names of layers, keyed by the Stored objects of their filters; this function adds
            the new layer.  The key (origin, stored) leads to the first layer with exactly this
            filter.  The key (origin, None) leads to the first layer with the same values in any
            form.

    Raises:
        ConvError: the convolution is invalid.
        _UnknownSize: a size is unknown.
        _Unsupported: the library does not support the convolution.
    """
    node, scope = visit.node, visit.scope
    count = len(list(filter(None, node.input[:2])))
    if count < 2:
        raise ConvError(
            f"{name}: a {form.operator} must have the inputs x and w",
            f"it has {count} of these inputs",
            "Export the model again",
        )
    attributes = _attributes(name, node)
    try:
        require_attributes(form.operator, [one.name for one in _own_attributes(node)])
        require_padding(attributes.get("auto_pad", "NOTSET"), attributes.get("pads"))
        x, w = _operand_shapes(node, name, form, scope, attributes, inputs)
        dtype = _dtype(onnx, scope[node.input[0]].kind.element)
        if dtype not in ITEMSIZE:
            raise _Unsupported(f"elements of type {dtype} are unsupported")
        problem = _standard_problem(form, x, w, dtype, attributes)
    except ConvError as error:
        rule = f"{name}: {error.rule}"
        raise ConvError(rule, error.values, error.remedy, axis=error.axis) from None
    except ConvTypeError as error:
        raise ConvTypeError(f"{name}: {error}") from None
    if form.operator == "ConvTranspose" and problem.output_shape != x:
        # The convolution has more windows than the node has inputs, so its cost would differ.
        raise _Unsupported("an output_padding that is not less than the stride is unsupported here")
    stored = scope[node.input[1]].stored
    same_filter = same_values = name
    if stored is not None:
        same_filter = filters.setdefault((stored.origin, stored), name)
        same_values = filters.setdefault((stored.origin, None), name)
    bias, added = (node.input[i] if i < len(node.input) else "" for i in (2, 3))
    is_fused = node.domain not in OWN_DOMAINS
    activation = plain_attributes(node).get("activation") if is_fused else None
    layer = ModelLayer(
        name=name,
        operator=operator_text(node),
        filter=stored,
        bias=scope[bias].stored,
        inside=visit.inside,
        problem=_in_own_order(form, problem, scope[node.input[1]].shape),
        is_transposed=form.operator == "ConvTranspose",
        has_bias=bool(bias),
        added=added if is_fused else "",
        activation=activation if isinstance(activation, str) else "",
        same_filter_as=None if same_filter == name else same_filter,
        same_values_as=None if same_values == name else same_values,
    )
    _require_bias(layer, scope, bias)
    return layer


def _in_own_order(form: Form, problem: ConvProblem, w: Shape) -> ConvProblem:
    """Return a problem with x, y and w in the order of the node; w is the shape in this order."""
    if not form.is_channels_last:
        return problem
    output_first, _, last = filter_formats(len(w) - 2)
    return problem.replace(
        input_shape=channels_last(problem.input_shape),
        filter_shape=cast("tuple[int, ...]", w),
        data_format=data_formats(len(w) - 2)[1],
        filter_format=output_first if w == problem.filter_shape else last,
    )


def _operand_shapes(
    node: Any,
    name: str,
    form: Form,
    scope: Scope,
    attributes: Mapping[str, Any],
    inputs: Mapping[str, Shape],
) -> tuple[Shape, Shape]:
    """Return the shapes of x and w, after checking that all their sizes are known.

    The shapes are in the order of the standard operator.
    """
    x_name, w_name = node.input[:2]
    x, w = scope[x_name].shape, scope[w_name].shape
    rank = (len(w) if scope[w_name].kind.has_rank else len(x)) - 2
    for kind in (scope[w_name].kind, scope[x_name].kind):
        axes = len(kind.shape) - 2
        if kind.has_rank and axes not in SPATIAL_AXES:
            raise _Unsupported(
                f"{max(axes, 0)} spatial axes are unsupported, "
                f"{min(SPATIAL_AXES)} to {max(SPATIAL_AXES)} are supported"
            )
    if not _is_numbers(w):
        taps = attributes.get("kernel_shape")
        if not isinstance(taps, list) or len(taps) != rank:
            taps = ["?"] * rank
        raise _UnknownSize(name, w_name, w or (("?", "?", *taps) if taps else ()), _text(w), inputs)
    standard_x, standard_w = _in_standard_order(form, x, w, attributes)
    if not _is_numbers(x):
        likely = ("?", _input_channels(form, standard_w, attributes), *["?"] * rank)
        pairs = zip(standard_x or likely, likely, strict=False)
        shape = tuple(guess if size == "?" else size for size, guess in pairs)
        raise _UnknownSize(name, x_name, form.in_own_order(shape), _text(x), inputs)
    return standard_x, standard_w


def _require_bias(layer: ModelLayer, scope: Scope, bias: str) -> None:
    kind, channels = scope[bias].kind, layer.output_channels
    shape = kind.shape
    if kind.is_known and shape != (channels,):
        got = _text(shape) if shape else "a scalar"
        raise ConvError(
            f"{layer.name}: the bias must have one value for each output channel",
            f"{bias} is {got}, the result has {counted(channels, 'channel')}",
            "Export the model again",
        )


def _own_attributes(node: Any) -> list[Any]:
    """Return the attributes of a node that its standard operator has, too."""
    added = () if node.domain in OWN_DOMAINS else FUSED_ATTRIBUTES
    return [attribute for attribute in node.attribute if attribute.name not in added]


def _attributes(name: str, node: Any) -> dict[str, Any]:
    """Return the attributes of a node for ``cupyconv.onnx``, with bytes decoded to strings."""
    values = {}
    for attribute in _own_attributes(node):
        try:
            value = import_module("onnx.helper").get_attribute_value(attribute)
        except ValueError:
            raise ConvError(
                f"{name}: an attribute must have a valid ONNX type",
                f"{attribute.name!r} has type {attribute.type}",
                "Export the model again",
            ) from None
        values[attribute.name] = decoded(value)
    return values


def _dtype(onnx: Any, number: int) -> str:
    """Return the library's name of an element type; ONNX's name if the library has none."""
    types = onnx.TensorProto.DataType
    name = types.Name(number).lower() if number in types.values() else f"type {number}"
    return {"float": "float32", "double": "float64"}.get(name, name)


def _text(shape: Shape) -> str:
    """Return a shape for a message."""
    return onnx_graph.open_shape_text(shape) or "unknown shape"


def _is_numbers(shape: Shape) -> bool:
    """Return whether a shape is known and has no unknown sizes."""
    return bool(shape) and all(isinstance(size, int) for size in shape)
