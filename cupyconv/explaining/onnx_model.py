"""The convolutions of an ONNX model as problems; needs the onnx package, and no weights."""

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
from typing import Any, cast

from cupyconv.errors import ConvError, ConvTypeError, CupyconvError, install_command
from cupyconv.explaining.onnx_graph import (
    MOST_NODES,
    OWN_DOMAINS,
    Scope,
    Shape,
    Stored,
    Visit,
    Walk,
    expanded_nodes,
    mark_stored_values,
    open_unusable_sizes,
    set_named_sizes,
)
from cupyconv.formats import SPATIAL_AXES
from cupyconv.onnx import conv_problem, conv_transpose_problem, require_attributes
from cupyconv.problem import ITEMSIZE, ConvProblem, DtypeName, shape_text

OPERATORS = ("Conv", "ConvTranspose")

_CONVOLUTION = re.compile(r"Conv(olution)?(?![a-z])")
"""Text in the names of all operators that convolve."""

_LIKELY_SIZES = {1: 16_000, 2: 224, 3: 32}
"""Size of an open spatial axis in an example, by the spatial rank: a second of sound, an image."""


@dataclass(frozen=True)
class ModelLayer:
    """A Conv or ConvTranspose of a model.

    Attributes:
        name: the node's name, or that of its output if it has none.
        operator: "Conv" or "ConvTranspose".
        problem: the convolution.  A ConvTranspose is the transpose of it, so that its forward pass
            is ``backprop_input``.
        has_bias: whether it adds a bias.
        filter: the stored values of the filter; None if the file does not store them.
        bias: the stored values of the bias; None without a bias, or if they are not stored.
        same_filter_as: the first layer that has the same filter, if it is another.
        same_values_as: the first layer whose filter is another form of the same stored values.
        inside: operators whose inner graphs the layer is in, such as ("Loop",).
    """

    name: str
    operator: str
    problem: ConvProblem
    has_bias: bool
    filter: Stored | None = None
    bias: Stored | None = None
    same_filter_as: str | None = None
    same_values_as: str | None = None
    inside: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Stored weights and biases, whether other layers share them or not."""
        return sum(stored.size for stored in (self.filter, self.bias) if stored)

    @property
    def is_transposed(self) -> bool:
        return self.operator == "ConvTranspose"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the node's input, and of its gradient."""
        return self.problem.output_shape if self.is_transposed else self.problem.input_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the node's output, and of the gradient that flows into it."""
        return self.problem.input_shape if self.is_transposed else self.problem.output_shape

    @property
    def activation_bytes(self) -> int:
        """Bytes of the node's output."""
        return ITEMSIZE[self.problem.dtype] * prod(self.output_shape)

    @property
    def passes(self) -> dict[str, str]:
        """The passes that compute y, dx and dw."""
        forward, backward = "forward", "backprop_input"
        if self.is_transposed:
            forward, backward = backward, forward
        return {"y": forward, "dx": backward, "dw": "backprop_filter"}

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on sharing, storage and enclosing operators."""
        notes = []
        if self.same_filter_as is not None:
            notes.append(f"same filter as {self.same_filter_as}")
        elif self.same_values_as is not None:
            notes.append(f"same stored values as {self.same_values_as}")
        if self.filter is None:
            notes.append("filter not stored in the file")
        if self.has_bias and self.bias is None:
            notes.append("bias not stored in the file")
        notes += [f"inside {operator}" for operator in self.inside]
        return tuple(notes)


@dataclass(frozen=True)
class UnreadLayer:
    """A convolution of a model that is not a problem, with everything that is known of it.

    Attributes:
        name: the node's name, or that of its output if it has none.
        operator: the node's operator, such as "Conv" or "ConvInteger".
        reason: why it is not read.
        is_open: whether only a size is unknown.
        input_shape, filter_shape, output_shape: sizes, with names or "?" for unknown sizes; () for
            an unknown shape.
        filter, bias: stored values, as in ``ModelLayer``.
        inside: operators whose inner graphs the layer is in, such as ("Loop",).
    """

    name: str
    operator: str
    reason: str
    is_open: bool = False
    input_shape: Shape = ()
    filter_shape: Shape = ()
    output_shape: Shape = ()
    filter: Stored | None = None
    bias: Stored | None = None
    inside: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Stored weights and biases, whether other layers share them or not."""
        return sum(stored.size for stored in (self.filter, self.bias) if stored)


@dataclass(frozen=True)
class Model:
    """The convolutions of a model, in its order.

    Attributes:
        inputs: the model's inputs with their shapes.
        nodes: all nodes that convolve.
        hint: the option that makes the sizes known; "" if all are known.
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
        """Nodes that convolve and are not supported."""
        return tuple(n for n in self.nodes if isinstance(n, UnreadLayer) and not n.is_open)

    @property
    def convolutions(self) -> int:
        """Number of nodes that convolve, read or not."""
        return len(self.nodes)

    @property
    def weights(self) -> int:
        """Stored weights of all supported layers; what several layers share counts once."""
        return _stored_size(layer.filter for layer in self._supported)

    @property
    def parameters(self) -> int:
        """Stored weights and biases of all supported layers; shared values count once."""
        pairs = ((layer.filter, layer.bias) for layer in self._supported)
        return _stored_size(stored for pair in pairs for stored in pair)

    @property
    def _supported(self) -> tuple[ModelLayer | UnreadLayer, ...]:
        """Conv and ConvTranspose nodes, whether their sizes are known or not."""
        return (*self.layers, *self.unknown)

    @property
    def without_layers(self) -> str:
        """Why there are no layers: "has no Conv", or the operators that are not read."""
        if not self.left_out:
            return "has no Conv and no ConvTranspose"
        counts = Counter(node.operator for node in self.left_out)
        named = ", ".join(f"{count} {operator}" for operator, count in counts.items())
        return f"has no Conv and no ConvTranspose that can be read, but {named}"


def _stored_size(every: Iterable[Stored | None]) -> int:
    """Return the number of stored values; those that several tensors hold count once."""
    return sum(origin.size for origin in {stored.origin for stored in every if stored})


def read(
    path: str | Path,
    inputs: Mapping[str, tuple[int, ...]] | None = None,
    content: bytes | None = None,
    *,
    open_sizes: bool = False,
) -> Model:
    """Read the convolutions of a .onnx file.

    Args:
        path: the file; weights that it keeps in other files are not needed.
        inputs: shapes of the model's inputs, in place of those that it has or leaves open; and of
            tensors inside it that shape inference does not find.  A shape of one number may also
            be for a size that the model names, such as "batch".
        content: the content of the file, if it was read already.
        open_sizes: accept a model without any convolution of known sizes.

    Raises:
        ConvError: the file is damaged or too large, or no convolution has known sizes.
        ConvTypeError: the onnx package is not installed.
        OSError: the file cannot be read.
    """
    onnx = _onnx()
    if content is None:
        content = Path(path).read_bytes()
    try:
        model = onnx.load_model_from_string(content)
    except Exception as error:  # protobuf's errors have no class that is known here
        raise _damaged(
            path, f"it cannot be parsed ({' '.join(str(error).split())[:120]})"
        ) from None
    if not model.graph.node:
        raise _damaged(path, "it has no graph")
    _require_texts(path, model)
    model = _inlined(path, model)
    open_unusable_sizes(model.graph)
    sizes = set_named_sizes(model.graph, dict(inputs or {}))
    found, unknown = _convolutions(onnx, path, model, sizes)
    if not unknown:
        return found
    first = unknown[0]
    example = _example(onnx, path, model, sizes, first)
    hint = f"{first.remedy}, for example {example}" if example else first.remedy_by_hand
    if not found.layers and not open_sizes:
        raise ConvError("the sizes of every convolution must be known", f"{first}", hint)
    return replace(found, hint=hint)


def _convolutions(
    onnx: Any, path: str | Path, model: Any, sizes: Mapping[str, tuple[int, ...]]
) -> tuple[Model, list[_UnknownSize]]:
    """Read the convolutions of a model, and which of their sizes are unknown."""
    walk = Walk(onnx, model, sizes)
    nodes: list[ModelLayer | UnreadLayer] = []
    unknown: list[_UnknownSize] = []
    filters: dict[tuple[Stored, Stored | None], str] = {}
    for visit in walk.visits():
        node = visit.node
        if not _CONVOLUTION.search(node.op_type):
            continue
        name = node.name or next(iter(node.output), node.op_type)
        if node.op_type not in OPERATORS or node.domain not in OWN_DOMAINS:
            where = "" if node.domain in OWN_DOMAINS else f" of {node.domain}"
            operator = f"{node.op_type}{where}"
            why = f"{operator} is not ONNX's Conv or ConvTranspose"
            nodes.append(_unread(visit, name, why, operator=operator))
            continue
        if not node.input or not node.output:
            raise _damaged(path, f"{name} has no inputs or no outputs")
        if not visit.used:
            nodes.append(_unread(visit, name, "no output of the model depends on it"))
            continue
        try:
            nodes.append(_layer(onnx, visit, name, walk.open_inputs, filters))
        except _UnknownSize as error:
            unknown.append(error)
            nodes.append(_unread(visit, name, f"{error}. {error.remedy_by_hand}", is_open=True))
        except _Unsupported as error:
            nodes.append(_unread(visit, name, str(error)))
    return Model(walk.inputs, tuple(nodes)), unknown


_FILTER_INPUTS = {"QLinearConv": 3}
"""Index of the filter among an operator's inputs, if it is not 1."""

_BIAS_INPUTS = {"QLinearConv": 8, "ConvInteger": 4, "DeformConv": 3}
"""Index of the bias among an operator's inputs, if it is not 2; ConvInteger has none."""


def _unread(
    visit: Visit, name: str, reason: str, *, operator: str = "", is_open: bool = False
) -> UnreadLayer:
    """Return a node that is not read, with the shapes that are known."""
    node, scope = visit.node, visit.scope
    filter_ = _FILTER_INPUTS.get(node.op_type, 1)
    bias = _BIAS_INPUTS.get(node.op_type, 2)
    x_name, w_name, bias_name = (
        node.input[i] if i < len(node.input) else "" for i in (0, filter_, bias)
    )
    x, w = scope.shape(x_name), scope.shape(w_name)
    x, y = _open_shapes(node, x, w) if is_open else (x, ())
    return UnreadLayer(
        name,
        operator or node.op_type,
        reason,
        is_open,
        x,
        w,
        y,
        scope.stored.get(w_name),
        scope.stored.get(bias_name),
        visit.inside,
    )


def _open_shapes(node: Any, x: Shape, w: Shape) -> tuple[Shape, Shape]:
    """Return the shapes of x and y of a Conv or ConvTranspose as far as they are known.

    Axes are independent of each other: the sizes of y are computed with any size in place of the
    unknown ones.
    """
    if not _is_numbers(w) or len(w) - 2 not in SPATIAL_AXES:
        return x, ()
    attributes = {one.name: _plain(_attribute_value(one)) for one in node.attribute}
    is_transposed, groups = node.op_type == "ConvTranspose", attributes.get("group", 1)
    x = x or ("?",) * len(w)
    if not isinstance(x[1], int) and isinstance(groups, int):
        x = (x[0], w[0] if is_transposed else _times(w[1], groups), *x[2:])
    filled = tuple(size if isinstance(size, int) else _ANY_SIZE for size in x)
    sizes = tuple(size for size in w if isinstance(size, int))
    meaning = conv_transpose_problem if is_transposed else conv_problem
    try:
        problem = meaning(filled, sizes, dtype="float32", **attributes)
    except CupyconvError:
        return x, ()
    y = problem.input_shape if is_transposed else problem.output_shape
    named = (x[0] if not isinstance(x[0], int) else y[0], y[1])
    pairs = zip(x[2:], y[2:], strict=True)
    return x, (*named, *("?" if not isinstance(size, int) else out for size, out in pairs))


_ANY_SIZE = 1 << 12
"""Size in place of an unknown one; larger than the span of an ordinary filter."""


def _times(size: int | str, groups: int) -> int | str:
    return size * groups if isinstance(size, int) else size


class _Unsupported(CupyconvError):
    """A convolution that is right, and that the library does not have."""


class _UnknownSize(CupyconvError):
    """A size that would have to be given.

    Args:
        layer: the layer that needs it.
        tensor: the tensor whose size is unknown.
        shape: its sizes as far as they are known; () if not even their number is.
        known: what is said of its shape.
        inputs: the model's inputs with open sizes, and their shapes.
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
        """The option to give, with the open sizes in it."""
        name, shape, head = self.tensor, self.shape, "Give the sizes of the tensor itself"
        if self.inputs:
            head = self.remedy
        if self.inputs and name not in self.inputs:
            name, shape = next(iter(self.inputs.items()))
        if not shape:
            return f"{head}: --input {shlex.quote(name)}=SHAPE"
        option = f"--input {shlex.quote(f'{name}={_text(shape)}')}"
        return f"{head}: {option} with a number for each open size"


def _example(
    onnx: Any,
    path: str | Path,
    model: Any,
    sizes: Mapping[str, tuple[int, ...]],
    unknown: _UnknownSize,
) -> str:
    """Return an option that makes the sizes known; "" if a likely shape does not, or is no guess.

    Only a model's input that a convolution reads has a likely shape.
    """
    rank = len(unknown.shape) - 2
    if unknown.tensor not in unknown.inputs or rank not in SPATIAL_AXES:
        return ""
    likely: Shape = (1, "?", *[_LIKELY_SIZES[rank]] * rank)
    pairs = zip(unknown.shape, likely, strict=True)
    guesses = [size if isinstance(size, int) else guess for size, guess in pairs]
    shape = tuple(size for size in guesses if isinstance(size, int))
    if len(shape) < len(guesses):
        return ""
    try:
        found, _ = _convolutions(onnx, path, model, {**sizes, unknown.tensor: shape})
    except (ConvError, ConvTypeError):
        return ""
    if not found.layers:
        return ""
    return f"--input {shlex.quote(f'{unknown.tensor}={_text(shape)}')}"


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


def _damaged(path: str | Path, what: str) -> ConvError:
    return ConvError(
        "a model must be a whole ONNX file", f"{path}: {what}", "Export it again, or check the path"
    )


def _inlined(path: str | Path, model: Any) -> Any:
    """Return the model with the bodies of its functions in the place of their calls."""
    if not model.functions:
        return model
    try:
        count = expanded_nodes(model)
    except ValueError as error:
        raise _damaged(path, f"its functions cannot be expanded ({error})") from None
    if count > MOST_NODES:
        raise ConvError(
            f"a model must have at most {MOST_NODES:,} nodes once its functions are expanded",
            f"{path} has {count:,}" if count < 10**18 else f"{path} has more than 10^18",
            "Use a part of the model",
        )
    mark_stored_values(model)
    try:
        return import_module("onnx.inliner").inline_local_functions(model)
    except Exception as error:
        raise _damaged(
            path, f"its functions cannot be expanded ({' '.join(str(error).split())[:160]})"
        ) from None


def _require_texts(path: str | Path, message: Any) -> None:
    """Check that every text is one: protobuf gives bytes for what is not UTF-8."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            texts = [value] if isinstance(value, (str, bytes)) else value
            if any(isinstance(text, bytes) for text in texts):
                raise _damaged(path, f"its {field.name} is not UTF-8")
        elif field.type == field.TYPE_MESSAGE:
            for inner in [value] if hasattr(value, "ListFields") else value:
                _require_texts(path, inner)


def _layer(
    onnx: Any,
    visit: Visit,
    name: str,
    inputs: Mapping[str, Shape],
    filters: dict[tuple[Stored, Stored | None], str],
) -> ModelLayer:
    """Return the layer of a Conv or ConvTranspose node.

    Args:
        onnx: the package.
        visit: the node, with what is known of its tensors.
        name: the layer's name.
        inputs: the model's inputs with open sizes, and their shapes.
        filters: the first layer of each origin and form of a stored filter, and of each origin in
            any form (None); the layer is added.

    Raises:
        ConvError: no such convolution exists.
        _UnknownSize: a size is not known.
        _Unsupported: the library does not have it.
    """
    node, scope = visit.node, visit.scope
    given = list(filter(None, node.input[:2]))
    if len(given) < 2:
        raise ConvError(
            f"{name}: a {node.op_type} takes x and w",
            f"it has {len(given)} of them",
            "Export the model again",
        )
    attributes = {one.name: _plain(_value(name, one)) for one in node.attribute}
    try:
        require_attributes(node.op_type, [one.name for one in node.attribute])
        x, w = _operand_shapes(node, name, scope, attributes, inputs)
        dtype = _dtype(onnx, scope.element_type(node.input[0]))
        if dtype not in ITEMSIZE:
            raise _Unsupported(f"elements of type {dtype} are unsupported")
        meaning = conv_problem if node.op_type == "Conv" else conv_transpose_problem
        problem = meaning(x, w, dtype=cast("DtypeName", dtype), **attributes)
    except ConvError as error:
        raise ConvError(
            f"{name}: {error.rule}", error.values, error.remedy, axis=error.axis
        ) from None
    except ConvTypeError as error:
        raise ConvTypeError(f"{name}: {error}") from None
    if node.op_type == "ConvTranspose" and problem.output_shape != x:
        # Its convolution has more windows than the node has inputs, and so other shapes and costs.
        raise _Unsupported("an output_padding that is not less than the stride is unsupported here")
    stored = scope.stored.get(node.input[1])
    first = alike = name
    if stored is not None:
        first = filters.setdefault((stored.origin, stored), name)
        alike = filters.setdefault((stored.origin, None), name)
    bias = node.input[2] if len(node.input) > 2 else ""
    layer = ModelLayer(
        name,
        node.op_type,
        problem,
        bool(bias),
        stored,
        scope.stored.get(bias) if bias else None,
        None if first == name else first,
        None if alike == name else alike,
        visit.inside,
    )
    _require_bias(layer, scope, bias)
    return layer


def _operand_shapes(
    node: Any,
    name: str,
    scope: Scope,
    attributes: Mapping[str, Any],
    inputs: Mapping[str, Shape],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of x and w, all of it numbers."""
    x_name, w_name = node.input[:2]
    x, w = scope.shape(x_name), scope.shape(w_name)
    rank = (len(w) if scope.has_rank(w_name) else len(x)) - 2
    for tensor in (w_name, x_name):
        if scope.has_rank(tensor) and len(scope.shape(tensor)) - 2 not in SPATIAL_AXES:
            axes = len(scope.shape(tensor)) - 2
            raise _Unsupported(
                f"{max(axes, 0)} spatial axes are unsupported, "
                f"{min(SPATIAL_AXES)} to {max(SPATIAL_AXES)} are supported"
            )
    if not _is_numbers(w):
        taps = attributes.get("kernel_shape")
        likely: Shape = ("?",) * (2 + rank) if rank > 0 else ()
        if likely and isinstance(taps, list) and len(taps) == rank:
            likely = ("?", "?", *taps)
        raise _UnknownSize(name, w_name, w or likely, _text(w), inputs)
    if not _is_numbers(x):
        group = attributes.get("group", 1)
        whole = isinstance(group, int) and group > 0
        channels: int | str = "?"
        if node.op_type == "ConvTranspose":
            channels = w[0]
        elif whole and isinstance(w[1], int):
            channels = w[1] * group
        likely = ("?", channels, *["?"] * rank)
        shape = tuple(
            size if isinstance(size, int) or size != "?" else guess
            for size, guess in zip(x or likely, likely, strict=False)
        )
        raise _UnknownSize(name, x_name, shape, _text(x), inputs)
    return x, w  # type: ignore[return-value]  # as _is_numbers says


def _require_bias(layer: ModelLayer, scope: Scope, bias: str) -> None:
    shape, channels = scope.shape(bias), layer.output_shape[1]
    known = bool(bias) and scope.has_rank(bias) and all(isinstance(size, int) for size in shape)
    if known and shape != (channels,):
        got = _text(shape) if shape else "a scalar"
        raise ConvError(
            f"{layer.name}: the bias must have one value for each output channel",
            f"{bias} is {got}, the result has {channels} channels",
            "Export the model again",
        )


def _plain(value: Any) -> Any:
    """Return an attribute as ``cupyconv.onnx`` takes it: words are kept as bytes."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _attribute_value(attribute: Any) -> Any:
    return import_module("onnx.helper").get_attribute_value(attribute)


def _value(name: str, attribute: Any) -> Any:
    try:
        return _attribute_value(attribute)
    except ValueError:
        raise ConvError(
            f"{name}: an attribute must have a type that ONNX knows",
            f"that of {attribute.name!r} is {attribute.type}",
            "Export the model again",
        ) from None


def _dtype(onnx: Any, number: int) -> str:
    """Return the library's name of a type of elements; ONNX's own where it has none."""
    types = onnx.TensorProto.DataType
    name = types.Name(number).lower() if number in types.values() else f"type {number}"
    return {"float": "float32", "double": "float64"}.get(name, name)


def _text(shape: Shape) -> str:
    return shape_text(shape) or "unknown"  # type: ignore[arg-type]  # names are written as they are


def _is_numbers(shape: Shape) -> bool:
    """Return whether a shape is known, all of it as numbers."""
    return bool(shape) and all(isinstance(size, int) for size in shape)
