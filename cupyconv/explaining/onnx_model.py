"""The convolutions of an ONNX model as problems; needs the onnx package, and no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from cupyconv.errors import ConvError, ConvTypeError, install_command
from cupyconv.onnx import conv_problem, conv_transpose_problem
from cupyconv.problem import ConvProblem, dtype_name, shape_text

OPERATORS = ("Conv", "ConvTranspose")

_COMMON = {"auto_pad", "dilations", "group", "kernel_shape", "pads", "strides"}
_ATTRIBUTES = {"Conv": _COMMON, "ConvTranspose": _COMMON | {"output_padding", "output_shape"}}

_OWN_DOMAINS = ("", "ai.onnx")

Shape = tuple[int | str, ...]
"""Sizes; a name for one that the model leaves open."""

_Known = dict[str, tuple[Shape, int]]
"""Shapes and ONNX's numbers of the types, by the tensors' names."""


@dataclass(frozen=True)
class ModelLayer:
    """A Conv or ConvTranspose of a model.

    Attributes:
        name: the node's, or what it gives if it has none.
        operator: "Conv" or "ConvTranspose".
        problem: the convolution; of a ConvTranspose the one that it is the transpose of, so that
            its forward pass is ``backprop_input``.
        has_bias: whether it adds a bias.
    """

    name: str
    operator: str
    problem: ConvProblem
    has_bias: bool

    @property
    def parameters(self) -> int:
        """Weights, and biases if it has them."""
        return prod(self.problem.filter_shape) + self.has_bias * self.output_shape[1]

    @property
    def is_transposed(self) -> bool:
        return self.operator == "ConvTranspose"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of what the node takes, and of its gradient."""
        return self.problem.output_shape if self.is_transposed else self.problem.input_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of what the node gives, and of the gradient that flows into it."""
        return self.problem.input_shape if self.is_transposed else self.problem.output_shape

    @property
    def passes(self) -> dict[str, str]:
        """Which of our passes gives y, dx and dw."""
        forward, backward = "forward", "backprop_input"
        if self.is_transposed:
            forward, backward = backward, forward
        return {"y": forward, "dx": backward, "dw": "backprop_filter"}


@dataclass(frozen=True)
class Model:
    """The convolutions of a model, in its order.

    Attributes:
        inputs: the model's inputs with their shapes.
        layers: its Conv and ConvTranspose nodes.
        left_out: nodes that convolve in another way, with the reason.
        unknown: nodes of which a size is not known, with what would have to be given.
    """

    inputs: Mapping[str, Shape]
    layers: tuple[ModelLayer, ...]
    left_out: tuple[tuple[str, str], ...]
    unknown: tuple[tuple[str, str], ...] = ()


def read(
    path: str | Path,
    inputs: Mapping[str, tuple[int, ...]] | None = None,
    content: bytes | None = None,
) -> Model:
    """The convolutions of a .onnx file.

    Args:
        path: the file; weights that it keeps in other files are not needed.
        inputs: shapes of the model's inputs, in place of those that it has or leaves open; and of
            tensors inside it that shape inference does not find.
        content: what is in the file, if it was read already.

    Raises:
        ConvError: the file is damaged, or no convolution has sizes that are known.
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
    weights = set(_weights(model.graph))
    free = [entry for entry in model.graph.input if entry.name not in weights]
    _open_negative(model.graph)
    _fill_in(model.graph, free, dict(inputs or {}))
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:
        raise _damaged(
            path, f"its shapes contradict each other ({' '.join(str(error).split())[:160]})"
        ) from None
    named = {value.name: _shape(value) for value in free}
    layers, left_out, unknown = [], [], []
    first: _Unknown | None = None
    for node, known in _nodes(inferred.graph, {}):
        name = node.name or next(iter(node.output), node.op_type)
        if node.op_type in OPERATORS and node.domain in _OWN_DOMAINS:
            try:
                layers.append(_layer(onnx, node, name, known, named))
            except _Unknown as error:
                unknown.append((name, f"{error.values}. {error.remedy}"))
                first = first or error
        elif "Conv" in node.op_type:
            where = "" if node.domain in _OWN_DOMAINS else f" of {node.domain}"
            left_out.append((name, f"{node.op_type}{where} is not ONNX's Conv or ConvTranspose"))
    if first and not layers:
        raise first
    return Model(named, tuple(layers), tuple(left_out), tuple(unknown))


class _Unknown(ConvError):
    """A size that would have to be given."""


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
    """The model with its functions in the place of their calls, as shape inference needs them."""
    if not model.functions:
        return model
    try:
        return import_module("onnx.inliner").inline_local_functions(model)
    except Exception as error:
        raise _damaged(
            path, f"its functions cannot be told ({' '.join(str(error).split())[:160]})"
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


def _shape(value: Any) -> Shape:
    """The sizes of a value as the model has them; "?" for one without even a name."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return ()
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else _named(dim.dim_param)
        for dim in tensor.shape.dim
    )


def _named(size: str) -> str:
    """The name of an open size; shape inference's own names say nothing."""
    return "?" if not size or size.startswith("unk__") else size


def _open_negative(graph: Any) -> None:
    """Sizes of -1, as some exporters write what they leave open, are open ones."""
    values = [*graph.input, *graph.output, *graph.value_info]
    for value in values:
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and dim.dim_value < 0:
                dim.ClearField("dim_value")
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                _open_negative(inner)


def _fill_in(graph: Any, free: list[Any], given: dict[str, tuple[int, ...]]) -> None:
    """Write the given shapes into the model's inputs, and beside tensors inside it."""
    inside = {value.name: value for value in (*graph.value_info, *graph.output)}
    computed = {name for node in graph.node for name in node.output if name}
    for name, sizes in given.items():
        found = {**inside, **{value.name: value for value in free}}
        if name not in found and name in computed:
            found[name] = graph.value_info.add(name=name)
            found[name].type.tensor_type.elem_type = 1  # float, until it is inferred
        if name not in found:
            raise ConvError(
                "a shape must be given for an input of the model, or a tensor inside it",
                f"it has no {name!r}",
                f"Its inputs are {', '.join(value.name for value in free) or 'none'}",
            )
        value = found[name]
        own = _shape(value)
        if own and len(own) != len(sizes):
            raise ConvError(
                "a given shape must have as many axes as the model's input",
                f"{name} is {shape_text(own)}, got {shape_text(sizes)}",  # type: ignore[arg-type]
                f"Give {len(own)} sizes",
            )
        for old, new in zip(own, sizes, strict=False):
            if isinstance(old, int) and old != new:
                raise ConvError(
                    "a given shape must keep the sizes that the model fixes",
                    f"{name} is {shape_text(own)}, got {shape_text(sizes)}",  # type: ignore[arg-type]
                    f"Keep {old}",
                )
        dims = value.type.tensor_type.shape.dim
        del dims[:]
        for size in sizes:
            dims.add().dim_value = size


def _weights(graph: Any) -> _Known:
    """What a graph brings, with its shape and type."""
    found = {entry.name: (tuple(entry.dims), entry.data_type) for entry in graph.initializer}
    for entry in graph.sparse_initializer:
        found[entry.values.name] = tuple(entry.dims), entry.values.data_type
    return found


def _nodes(graph: Any, outside: _Known) -> Iterator[tuple[Any, _Known]]:
    """All nodes, those inside branches and loops too, with the tensors that are known there."""
    known = dict(outside)
    for value in (*graph.value_info, *graph.input, *graph.output):
        known[value.name] = _shape(value), value.type.tensor_type.elem_type
    known |= _weights(graph)
    for node in graph.node:
        yield node, known
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    yield from _nodes(inner, known)


def _layer(
    onnx: Any,
    node: Any,
    name: str,
    known: _Known,
    inputs: Mapping[str, Shape],
) -> ModelLayer:
    given = list(filter(None, node.input[:2]))
    if len(given) < 2:
        raise ConvError(
            f"{name}: a {node.op_type} takes x and w",
            f"it has {len(given)} of them",
            "Export the model again",
        )
    w = _sizes(name, node.input[1], known, inputs)
    group = next((a.i for a in node.attribute if a.name == "group"), 1)
    channels = w[1] * max(group, 1) if node.op_type == "Conv" and len(w) > 1 else w[0]
    x = _sizes(name, node.input[0], known, inputs, channels)
    dtype = _dtype(onnx, known[node.input[0]][1])
    attributes = {a.name: _value(onnx, name, a) for a in node.attribute}
    rules = {key: _plain(attributes[key]) for key in _ATTRIBUTES[node.op_type] & set(attributes)}
    meaning = conv_problem if node.op_type == "Conv" else conv_transpose_problem
    try:
        problem = meaning(x, w, dtype=dtype_name(dtype), **rules)
    except ConvError as error:
        raise ConvError(
            f"{name}: {error.rule}", error.values, error.remedy, axis=error.axis
        ) from None
    except ConvTypeError as error:
        raise ConvTypeError(f"{name}: {error}") from None
    return ModelLayer(name, node.op_type, problem, len(node.input) > 2 and bool(node.input[2]))


def _plain(value: Any) -> Any:
    """An attribute as ``cupyconv.onnx`` takes it: words are kept as bytes."""
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _value(onnx: Any, name: str, attribute: Any) -> Any:
    try:
        return onnx.helper.get_attribute_value(attribute)
    except ValueError:
        raise ConvError(
            f"{name}: an attribute must have a type that ONNX knows",
            f"that of {attribute.name!r} is {attribute.type}",
            "Export the model again",
        ) from None


def _dtype(onnx: Any, number: int) -> str:
    """The library's name of a type of elements; ONNX's own where it has none."""
    types = onnx.TensorProto.DataType
    name = types.Name(number).lower() if number in types.values() else f"type {number}"
    return {"float": "float32", "double": "float64"}.get(name, name)


def _sizes(
    name: str,
    tensor: str,
    known: _Known,
    inputs: Mapping[str, Shape],
    channels: int = 3,
) -> tuple[int, ...]:
    """The shape of a tensor, all of it numbers."""
    shape = known.get(tensor, ((), 0))[0]
    sizes = [size for size in shape if isinstance(size, int)]
    if shape and len(sizes) == len(shape):
        return tuple(sizes)
    has = shape_text(shape) if shape else "unknown"  # type: ignore[arg-type]
    listed = ", ".join(f"{key} {shape_text(value) or 'unknown'}" for key, value in inputs.items())  # type: ignore[arg-type]
    example = next(
        (f"--input {key}={_guess(value)}" for key, value in inputs.items() if _open(value)), ""
    )
    if not example and tensor in inputs and not shape:
        example = f"--input {tensor}={_guess(('?',) * 4, channels)}"
    remedy = f"Give the sizes of the model's inputs ({listed})"
    if example:
        remedy += f", for example {example}"
    elif tensor not in inputs:
        sizes_ = _guess(shape or ("?",) * 4, channels)
        remedy = f"Give that of the tensor itself, for example --input {tensor}={sizes_}"
    raise _Unknown(
        "the sizes of every convolution must be known", f"{name} reads {tensor} of {has}", remedy
    )


def _open(shape: Shape) -> bool:
    return any(isinstance(size, str) for size in shape)


def _guess(shape: Shape, channels: int = 3) -> str:
    """A shape with likely numbers in its open places: one image of 224 pixels a side."""
    likely = (1, channels, *[224] * len(shape))
    pairs = zip(shape, likely, strict=False)
    return shape_text(size if isinstance(size, int) else number for size, number in pairs)
