"""Visit the nodes of an ONNX model in order, and collect facts about each tensor.

The facts are the type of a tensor, its values if it is a small constant, and whether constants are
equal or have the same values in another form.  The onnx package infers the types node by node and
evaluates small constants.  The limits below bound time and memory for every file.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import chain
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyconv.errors import LONGEST, ConvError
from cupyconv.explaining.onnx_file import MOST_BYTES, too_large
from cupyconv.explaining.onnx_operators import (
    CONVOLUTIONS,
    OWN_DOMAINS,
    Form,
    channels_first,
    channels_last,
    form_of,
    plain_attributes,
)
from cupyconv.files import LARGEST_TEXT
from cupyconv.problem import bytes_text, shape_text

if TYPE_CHECKING:
    import numpy as np

MOST_NODES = 50_000
"""Largest number of nodes and calls of a model with all function calls expanded (hand-set)."""

_ENTRY_BYTES = 64
"""Bytes of memory of a protobuf message or string, besides its content (rounded)."""

MOST_CALLS = 100
"""Largest depth of nested function calls (the limit of onnx 1.23)."""

MOST_AXES = 64
"""Largest rank of a tensor (NumPy's limit)."""

MOST_VALUES = 4096
"""Largest number of elements of a constant that is evaluated (hand-set)."""

_MOST_INDEXED = 1 << 62
"""NumPy indexes only tensors with fewer elements than this (NumPy's limit, rounded down)."""

EVALUATED = frozenset(
    {
        *("Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal"),
        *("Expand", "Flatten", "Floor", "Gather", "Greater", "GreaterOrEqual", "Identity"),
        *("Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow"),
        *("Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Round"),
        *("Shape", "Size", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile", "Transpose"),
        *("Unsqueeze", "Where"),
    }
)
"""Operators that are evaluated on constants: models compute sizes and paddings with them."""

SAME_VALUES = frozenset(
    {
        *("Cast", "CastLike", "DequantizeLinear", "Expand", "Flatten", "Identity"),
        *("QuantizeLinear", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"),
    }
)
"""Operators whose result has the values of the first input, converted, repeated or rearranged."""

_CONSTANTS = {
    "value_int": ("i", "int64"),
    "value_ints": ("ints", "int64"),
    "value_float": ("f", "float32"),
    "value_floats": ("floats", "float32"),
}
"""Field and dtype of the values of a Constant, keyed by the name of its attribute."""

_RANDOM = ("Bernoulli", "Dropout", "Multinomial", "Random")
"""Prefixes of the names of operators with random results."""

_SHAPED_BY_LAST_INPUT = ("ConstantOfShape", "Expand", "Reshape")
"""Operators whose last input contains the shape of the result."""

Shape = tuple[int | str, ...]
"""Sizes of a tensor; an unknown size is represented by its name, or by "?" if it has no name."""


def open_shape_text(shape: Shape) -> str:
    """Return sizes as text: ``1x3x?``, or ``batch x 3 x width`` if a size has a name."""
    if any(isinstance(size, str) and size != "?" for size in shape):
        return " x ".join(map(str, shape))
    return shape_text(shape)  # type: ignore[arg-type]  # shape_text accepts "?"


class Stored:
    """Identity of a constant tensor: stored in the file, or computed only from stored tensors.

    Two tensors are equal if they share a Stored object.  They have the same values, possibly in
    different forms, if their Stored objects have the same origin.  The operators in SAME_VALUES
    change the form.

    Attributes:
        size: number of elements of the origin; 0 if unknown.
        origin: the Stored object before the form was changed; the object itself if it was not.
    """

    def __init__(self, size: int, origin: Stored | None = None) -> None:
        self.size = size
        self.origin: Stored = self if origin is None else origin


@dataclass(frozen=True)
class Kind:
    """Type of a tensor; unknown parts are left open.

    Attributes:
        element: ONNX's number for the element type; 0 if it is unknown.
        sizes: size of each axis; an unknown size is represented by its name or by "".  None if the
            number of axes is unknown.
        other: TypeProto of a value that is not a tensor, such as a sequence; None for a tensor.
    """

    element: int = 0
    sizes: Shape | None = None
    other: Any = None

    @classmethod
    def of(cls, proto: Any) -> Kind:
        """Return the content of a TypeProto."""
        if not proto.HasField("tensor_type"):
            return cls(other=proto if proto.WhichOneof("value") else None)
        tensor = proto.tensor_type
        if not tensor.HasField("shape"):
            return cls(tensor.elem_type)
        dims = tensor.shape.dim
        sizes = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims)
        return cls(tensor.elem_type, tuple(sizes))

    def proto(self, onnx: Any) -> Any:
        """Return the type as a TypeProto of the onnx package."""
        if self == Kind() or self.other:
            return self.other or onnx.TypeProto()
        sizes = self.sizes and [None if size == "" else size for size in self.sizes]
        return onnx.helper.make_tensor_type_proto(self.element, sizes)

    @property
    def shape(self) -> Shape:
        """Sizes, with "?" for no name and for names from shape inference; () if unknown."""
        return tuple(
            "?" if isinstance(size, str) and (not size or size.startswith("unk__")) else size
            for size in self.sizes or ()
        )

    @property
    def count(self) -> int:
        """Number of elements; 0 if a size is unknown."""
        return prod(size for size in self.shape if isinstance(size, int)) if self.is_known else 0

    @property
    def has_rank(self) -> bool:
        """Whether the number of axes is known."""
        return self.sizes is not None

    @property
    def is_known(self) -> bool:
        """Whether all sizes are known."""
        return self.sizes is not None and all(isinstance(size, int) for size in self.sizes)

    def reordered(self, order: Callable[[Shape], Shape]) -> Kind:
        """Return the type with its sizes in another order, if they are known."""
        return self if self.sizes is None else replace(self, sizes=order(self.sizes))


@dataclass
class Fact:
    """Facts about a tensor.

    Attributes:
        kind: its type.
        values: its values, if it is a small constant.
        stored: its Stored object, if it is a constant.
    """

    kind: Kind = Kind()
    values: np.ndarray | None = None
    stored: Stored | None = None

    @property
    def shape(self) -> Shape:
        """Sizes of the tensor; () for a scalar or an unknown shape."""
        return self.kind.shape


class Scope(ChainMap[str, Fact]):
    """Facts about the tensors that a node can read, keyed by their names."""

    def __missing__(self, name: str) -> Fact:
        return Fact()


@dataclass(frozen=True)
class Visit:
    """A node, with the facts about the tensors of the nodes before it.

    Attributes:
        node: ONNX's NodeProto.
        scope: facts about the tensors that the node can read.
        inside: operators whose inner graphs contain the node, outermost first, such as
            ("Loop", "then_branch of If_0").
        used: whether an output of the model depends on the node.
    """

    node: Any
    scope: Scope
    inside: tuple[str, ...]
    used: bool


# -- before the traversal --------------------------------------------------------------------------


def require_expandable(path: str | Path, model: Any) -> None:
    """Check that a model stays within the limits when each function call becomes a copy.

    Raises:
        ConvError: the model would have too many nodes, or the copies would take too many bytes.
        ValueError: functions call each other in a circle, or too deeply.
    """
    functions = {_function_key(f.domain, f.name, f): (f, _memory(f)) for f in model.functions}
    count = size = 0

    def visit(nodes: Any, given: Mapping[str, Any], longest: int, depth: int) -> None:
        nonlocal count, size
        if depth > MOST_CALLS:
            raise ValueError(f"their calls are nested more than {MOST_CALLS} deep")
        for node in nodes:
            names, bound = (*node.input, *node.output), []
            count, size = count + 1, size + longest * len(names)
            for attribute in node.attribute:
                reference = attribute.ref_attr_name
                source = (reference and given.get(reference)) or (attribute, given)
                size += _memory(source[0]) if reference else 0
                bound.append((attribute.name, source))
            key = _function_key(node.domain, node.op_type, node)
            callee, copied = functions.get(key, (None, 0))
            size += copied
            if count > MOST_NODES:
                raise ConvError(
                    f"a model must have at most {MOST_NODES:,} nodes and calls with its functions "
                    "expanded",
                    f"{path} has more",
                    "Use a part of the model",
                )
            if size > LARGEST_TEXT:
                raise ConvError(
                    f"the copies of a model's functions, one for each call, must take at most "
                    f"{bytes_text(LARGEST_TEXT)} of memory",
                    f"those of {path} take more",
                    "Store large tensors in the graph, and pass them to the functions",
                )
            for _, (attribute, scope) in bound:
                for graph in _graphs_of(attribute):
                    visit(graph.node, scope, longest, depth)
            if callee:
                passed: dict[str, Any] = {e.name: (e, {}) for e in callee.attribute_proto}
                lengths = [longest, *(len(name.encode()) for name in names)]
                visit(callee.node, passed | dict(bound), max(lengths), depth + 1)

    visit(model.graph.node, {}, 0, 0)
    if model.ByteSize() + size > MOST_BYTES:
        raise too_large(path, "more with its functions expanded")


def _memory(message: Any) -> int:
    """Return about how many bytes a message takes in memory, never less than its size in a file."""
    size = message.ByteSize() + _ENTRY_BYTES
    for field, values in fields(message):
        is_number = field.cpp_type not in (field.CPPTYPE_MESSAGE, field.CPPTYPE_STRING)
        size += (8 if is_number else _ENTRY_BYTES) * len(values)
    return size


def fields(message: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the fields of a message and of the messages inside it, each with its values."""
    for field, value in message.ListFields():
        is_single = isinstance(value, (str, bytes, int, float)) or hasattr(value, "ListFields")
        values = [value] if is_single else value
        yield field, values
        if field.type == field.TYPE_MESSAGE:
            for inner in values:
                yield from fields(inner)


def _function_key(domain: str, name: str, proto: Any) -> str:
    """Return the name of a function, as onnx joins it; other parts may join to the same name."""
    parts = _domain(domain), name, getattr(proto, "overload", "")
    return "::".join(parts if parts[2] else parts[:2])


def _domain(name: str) -> str:
    return "" if name in OWN_DOMAINS else name


@lru_cache(maxsize=1024)
def _schema(operator: str, domain: str, version: int | None) -> Any:
    """Return onnx's definition of an operator in a version of its domain; None if it has none."""
    try:
        return import_module("onnx").defs.get_schema(operator, version, domain)
    except Exception:  # onnx's SchemaError, or an invalid version number
        return None


def adopt_versions(model: Any) -> None:
    """Let functions import the model's versions of operators that compute the same in both.

    onnx expands only calls of functions that import the model's versions.
    """
    versions = {_domain(entry.domain): entry.version for entry in model.opset_import}
    for function in model.functions:
        for entry in function.opset_import:
            domain, old = _domain(entry.domain), entry.version
            new = versions.get(domain, old)
            nodes = (node for node in _all_nodes(function) if _domain(node.domain) == domain)
            if new != old and all(_is_same(node, domain, old, new) for node in nodes):
                entry.version = new


def _is_same(node: Any, domain: str, *versions: int) -> bool:
    """Return whether a node computes the same in both versions, as far as definitions tell."""
    old, new = (_schema(node.op_type, domain, version) for version in versions)
    if old is None or new is None:
        return old is new
    given = {attribute.name for attribute in node.attribute}
    words = [
        {name: (a.type, name in given or str(a.default_value)) for name, a in s.attributes.items()}
        for s in (old, new)
    ]
    added = (new.attributes[name].required for name in words[1].keys() - words[0].keys())
    inputs = [[each.name for each in schema.inputs[: len(node.input)]] for schema in (old, new)]
    return (
        all(words[0][name] == word for name, word in words[1].items() if name in words[0])
        and given <= words[1].keys()
        and not any(added)
        and inputs[0] == inputs[1]
        and new.min_input <= len(node.input) <= new.max_input
    )


def called_function(model: Any) -> Any:
    """Return a function that a node of the graph calls; None if there is none."""
    functions = {_function_key(f.domain, f.name, f): f for f in model.functions}
    keys = (_function_key(node.domain, node.op_type, node) for node in _all_nodes(model.graph))
    return next((functions[key] for key in keys if key in functions), None)


def _all_nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph or function, those of inner graphs included."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from _all_nodes(inner)


def inner_graphs(node: Any) -> Iterator[Any]:
    """Yield the graphs inside a node: the branches of an If, the body of a Loop or Scan."""
    return chain.from_iterable(map(_graphs_of, node.attribute))


def _graphs_of(attribute: Any) -> list[Any]:
    return [*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs]


_MARK = "stored value of a function: "


def mark_stored_values(model: Any) -> None:
    """Mark each constant of a function in its doc_string, which copies in expanded calls share."""
    for constant in _constants(model.graph.node, model.graph.initializer):
        constant.doc_string = ""
    functions = (_constants(function.node, ()) for function in model.functions)
    for number, constant in enumerate(chain.from_iterable(functions)):
        constant.doc_string = f"{_MARK}{number}"


def _constants(nodes: Any, stored: Any) -> Iterator[Any]:
    """Yield the Constant nodes and the stored tensors of a graph, inner graphs included."""
    yield from stored
    for node in nodes:
        if node.op_type == "Constant" and node.domain in OWN_DOMAINS:
            yield node
        for graph in inner_graphs(node):
            yield from _constants(graph.node, graph.initializer)


def open_unusable_sizes(graph: Any) -> None:
    """Make negative sizes unknown, which some exporters write, and remove very long size names."""
    for dim in _dims_with_inner(graph):
        if dim.HasField("dim_value") and dim.dim_value < 0:
            dim.ClearField("dim_value")
        if len(dim.dim_param) > LONGEST:
            dim.ClearField("dim_param")


def _dims(graph: Any) -> Iterator[Any]:
    """Yield the sizes of a graph's inputs, outputs and tensors in ``value_info``."""
    for entry in (*graph.input, *graph.output, *graph.value_info):
        yield from entry.type.tensor_type.shape.dim


def _dims_with_inner(graph: Any) -> Iterator[Any]:
    """Yield the sizes that ``_dims`` yields, of the inner graphs too."""
    yield from _dims(graph)
    for node in graph.node:
        for inner in inner_graphs(node):
            yield from _dims_with_inner(inner)


def set_named_sizes(graph: Any, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Set the named unknown sizes of a graph to the values in ``sizes``.

    A name that is both an input and an unknown size means the input.

    Args:
        graph: graph whose sizes are changed.
        sizes: shapes by name; a shape with one size sets the unknown size of this name, if there
            is one.

    Returns:
        the other shapes, which are meant for tensors.
    """
    named = set(_size_names(graph)) - {entry.name for entry in graph.input}
    numbers = {name: shape[0] for name, shape in sizes.items() if name in named and len(shape) == 1}
    for dim in _dims_with_inner(graph):
        if dim.dim_param in numbers:
            dim.dim_value = numbers[dim.dim_param]
    return {name: shape for name, shape in sizes.items() if name not in numbers}


def _size_names(graph: Any) -> list[str]:
    """Return the names of the unknown sizes of a graph, without those of its inner graphs."""
    return list(dict.fromkeys(dim.dim_param for dim in _dims(graph) if dim.dim_param))


# -- the traversal ---------------------------------------------------------------------------------


class Traversal:
    """A traversal of all nodes of a model, inner graphs included.

    Args:
        onnx: the onnx package.
        model: the model, with all function calls expanded.
        sizes: shapes of inputs and of tensors inside the model, by name.

    Attributes:
        inputs: shapes of the model's inputs, by name.
        open_inputs: shapes of the inputs with an unknown size or an unknown shape, by name.
    """

    def __init__(self, onnx: Any, model: Any, sizes: Mapping[str, tuple[int, ...]]) -> None:
        self._onnx, self._model, self._sizes = onnx, model, dict(sizes)
        self._opsets = list(model.opset_import) or [onnx.helper.make_opsetid("", 1)]
        if all(opset.domain not in OWN_DOMAINS for opset in self._opsets):
            newest = onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version())
            self._opsets.append(newest)  # the forms of other operators need a version
        self._versions = {_domain(opset.domain): opset.version for opset in self._opsets}
        self._marked: dict[str, Stored] = {}
        self._computed: dict[tuple[Any, ...], Stored] = {}
        self._bytes_left = LARGEST_TEXT  # All values that are kept or read share these bytes.
        stored = {entry.name for entry in model.graph.initializer}
        stored |= {entry.values.name for entry in model.graph.sparse_initializer}
        self._used_sizes: set[str] = set()
        self._inputs = {
            entry.name: self._with_given_sizes(entry.name, Kind.of(entry.type))
            for entry in model.graph.input
            if entry.name not in stored
        }
        kinds = self._inputs.items()
        self.inputs = {name: kind.shape for name, kind in kinds}
        self.open_inputs = {name: kind.shape for name, kind in kinds if not kind.is_known}

    def visits(self) -> Iterator[Visit]:
        """Yield every node in the model's order.

        Raises:
            ConvError: a given shape contradicts the model, or the model has no such tensor.
        """
        yield from self._graph(self._model.graph, Scope(), self._inputs, (), True)
        for name in self._sizes:
            if name not in self._used_sizes:
                names = ", ".join(_size_names(self._model.graph))
                more = f", and its unknown sizes are {names}" if names else ""
                raise ConvError(
                    "each given shape must name an input of the model, or a tensor inside it",
                    f"the model has no {name!r}",
                    f"The model's inputs are {', '.join(self.inputs) or 'none'}{more}",
                )

    def _graph(
        self,
        graph: Any,
        outer: Scope,
        kinds: Mapping[str, Kind],
        inside: tuple[str, ...],
        used: bool,
    ) -> Generator[Visit, None, list[Kind]]:
        """Visit the nodes of a graph with these input types; return the types of its outputs."""
        scope = outer.new_child()
        for entry in graph.input:
            kind = _merged(kinds.get(entry.name, Kind()), Kind.of(entry.type))
            scope[entry.name] = Fact(self._with_given_sizes(entry.name, kind))
        self._add_stored(graph, scope)
        declared = {e.name: Kind.of(e.type) for e in (*graph.value_info, *graph.output)}
        live = _live_nodes(graph)
        for number, node in enumerate(graph.node):
            is_used = used and number in live
            yield Visit(node, scope, inside, is_used)
            returned: dict[str, list[Kind]] = {}
            for attribute in node.attribute:
                for inner in _graphs_of(attribute):
                    known = self._inner_kinds(node, inner, scope)
                    branch = f"{attribute.name} of {node.name or node.op_type}"
                    where = (*inside, branch if node.op_type == "If" else node.op_type)
                    outputs = yield from self._graph(inner, scope, known, where, is_used)
                    returned[attribute.name] = outputs
            inferred, values = self._outputs(node, scope, returned)
            for name in filter(None, node.output):
                kind = _merged(inferred.get(name, Kind()), declared.get(name, Kind()))
                scope[name] = Fact(self._with_given_sizes(name, kind), values.get(name))
            self._trace(node, scope)
        return [scope[entry.name].kind for entry in graph.output]

    def _with_given_sizes(self, name: str, kind: Kind) -> Kind:
        """Return the type of a tensor with the sizes that are given for it, if there are any.

        An unknown type becomes float32.
        """
        sizes = self._sizes.get(name)
        if sizes is None:
            return kind
        self._used_sizes.add(name)
        own = kind.shape
        values = f"{name} is {_text(own)}, got {shape_text(sizes)}"
        if kind.has_rank and len(own) != len(sizes):
            raise ConvError(
                "a given shape must have as many axes as the tensor",
                values,
                f"Give {len(own)} sizes",
            )
        for old, new in zip(own, sizes, strict=False):
            if isinstance(old, int) and old != new:
                raise ConvError(
                    "a given shape must keep the sizes that the model fixes", values, f"Keep {old}"
                )
        return Kind(kind.element if kind.element or own else self._onnx.TensorProto.FLOAT, sizes)

    def _inner_kinds(self, node: Any, graph: Any, scope: Scope) -> dict[str, Kind]:
        """Return the types of an inner graph's inputs, as far as the outer node determines them.

        The shapes of tensors that a Loop carries may change between iterations, so they are left
        unknown.
        """
        if node.op_type != "Loop" or node.domain not in OWN_DOMAINS:
            return {}
        scalars = (self._onnx.TensorProto.INT64, self._onnx.TensorProto.BOOL)
        carried = (replace(scope[name].kind, sizes=None) for name in node.input[2:])
        kinds = (*(Kind(number, ()) for number in scalars), *carried)
        return {entry.name: kind for entry, kind in zip(graph.input, kinds, strict=False)}

    def _outputs(
        self, node: Any, scope: Scope, returned: Mapping[str, list[Kind]]
    ) -> tuple[dict[str, Kind], dict[str, np.ndarray]]:
        """Return the types of a node's outputs, and the values of small constants."""
        own = node.domain in OWN_DOMAINS
        if own and node.op_type == "Constant":
            return self._constant(node)
        if returned:
            kinds: list[Kind] = []
            if own and node.op_type == "If":
                kinds = _branch_kinds(node, scope, returned)
            elif own and node.op_type == "Loop":
                kinds = _loop_kinds(node, scope, returned.get("body", []))
            return dict(zip(node.output, kinds, strict=False)), {}
        known = self.infer(node, scope)
        values = self._evaluate(node, scope, known) if own else {}
        return {**known, **{name: self._kind(array) for name, array in values.items()}}, values

    def _kind(self, array: np.ndarray) -> Kind:
        return Kind(self._onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    # -- types

    def _schema(self, node: Any) -> Any:
        domain = _domain(node.domain)
        return _schema(node.op_type, domain, self._versions.get(domain))

    def infer(self, node: Any, scope: Scope) -> dict[str, Kind]:
        """Return the types of a node's outputs, as far as they are known."""
        form = None if node.domain in OWN_DOMAINS else form_of(node)
        return self._infer(node, scope) if form is None else self._infer_form(node, form, scope)

    def _infer_form(self, node: Any, form: Form, scope: Scope) -> dict[str, Kind]:
        """Return the output types of an operator with the shapes of a standard operator.

        Except to quantize, the output has the element type of the first input; shapes are inferred
        for float32, because many standard operators reject integers.
        """
        standard = self._onnx.helper.make_node(form.operator, [], node.output)
        standard.attribute.extend(node.attribute)
        schema, keeps_type = self._schema(standard), "Linear" not in form.operator
        names = list(node.input)[form.inputs][: schema.max_input if schema else 0]
        facts = [scope[name] for name in names]
        channels_are_last = [form.is_channels_last, *[False] * len(names)]
        if form.operator in CONVOLUTIONS and len(names) > 1:
            x, w = facts[0].shape, facts[1].shape
            channels_are_last[1] = form.has_filter_channels_last(x, w, plain_attributes(node))
        inner = Scope()
        for number, (name, fact, is_last) in enumerate(
            zip(names, facts, channels_are_last, strict=False)
        ):
            kind = fact.kind.reordered(channels_first) if is_last else fact.kind
            if keeps_type and kind != Kind():
                kind = Kind(self._onnx.TensorProto.FLOAT, kind.sizes)
            standard.input.append(f"input {number}" if name else "")
            inner[standard.input[-1]] = Fact(kind, fact.values)
        kinds = self._infer(standard, inner)
        if form.is_channels_last and node.output and node.output[0] in kinds:
            kinds[node.output[0]] = kinds[node.output[0]].reordered(channels_last)
        if keeps_type:
            return {
                name: replace(kind, element=facts[0].kind.element) for name, kind in kinds.items()
            }
        return kinds

    def _infer(self, node: Any, scope: Scope) -> dict[str, Kind]:
        """Return the types of a node's outputs that the onnx package infers."""
        onnx, schema = self._onnx, self._schema(node)
        facts = {name: scope[name] for name in node.input if name}
        if schema is None:
            return {}
        if node.op_type in _SHAPED_BY_LAST_INPUT and facts:
            sizes = scope[next(filter(None, reversed(node.input)))].shape
            if sizes and isinstance(sizes[0], int) and sizes[0] > MOST_AXES:
                return {}
        if any(attribute.name not in schema.attributes for attribute in node.attribute):
            known = [entry for entry in node.attribute if entry.name in schema.attributes]
            node = _copied(node)
            del node.attribute[:]
            node.attribute.extend(known)
        values = self._read(facts)
        try:
            types = onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {name: fact.kind.proto(onnx) for name, fact in facts.items()},
                {name: onnx.numpy_helper.from_array(array) for name, array in values.items()},
                opset_imports=self._opsets,
            )
        except Exception:  # onnx raises many error types for inconsistent nodes
            return {}
        kinds = {name: Kind.of(proto) for name, proto in types.items()}
        return {name: kind for name, kind in kinds.items() if len(kind.shape) <= MOST_AXES}

    # -- values

    def _constant(self, node: Any) -> tuple[dict[str, Kind], dict[str, np.ndarray]]:
        """Return the type of a Constant, and the values of a small Constant."""
        import numpy as np

        name = node.output[0] if node.output else ""
        for attribute in node.attribute:
            if attribute.name == "value":
                tensor = attribute.t
                kind = Kind(tensor.data_type, tuple(tensor.dims))
                return {name: kind}, self._values_of({name: tensor})
            if attribute.name == "sparse_value":
                tensor = attribute.sparse_tensor
                return {name: Kind(tensor.values.data_type, tuple(tensor.dims))}, {}
            if attribute.name in _CONSTANTS:
                field, dtype = _CONSTANTS[attribute.name]
                array = np.array(getattr(attribute, field), dtype)
                return {name: self._kind(array)}, self._kept({name: array})
        return {}, {}

    def _values_of(self, tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the values of small numeric tensors that the file itself contains."""
        arrays = {}
        for name, tensor in tensors.items():
            external = tensor.data_location == self._onnx.TensorProto.EXTERNAL
            if external or min(tensor.dims, default=0) < 0 or prod(tensor.dims) > MOST_VALUES:
                continue
            try:
                arrays[name] = self._onnx.numpy_helper.to_array(tensor)
            except Exception:  # damaged data raises many error types: skip its values
                continue
        return self._kept(arrays)

    def _kept(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the numeric arrays within the limits, and count them against the model's limit."""
        kept = {}
        for name, array in arrays.items():
            few = array.size <= MOST_VALUES and array.nbytes <= self._bytes_left
            if few and array.dtype.kind in "biuf":
                kept[name] = array
                self._bytes_left -= array.nbytes
        return kept

    def _read(self, facts: Mapping[str, Fact]) -> dict[str, np.ndarray]:
        """Return the known values of tensors, and count them against the model's limit."""
        values = {name: fact.values for name, fact in facts.items() if fact.values is not None}
        self._bytes_left -= sum(array.nbytes for array in values.values())
        return values if self._bytes_left >= 0 else {}

    def _evaluate(
        self, node: Any, scope: Scope, kinds: Mapping[str, Kind]
    ) -> dict[str, np.ndarray]:
        """Evaluate a node with constant inputs, using onnx's reference evaluator."""
        import numpy as np

        is_small = (kind.is_known and kind.count <= MOST_VALUES for kind in kinds.values())
        facts = {name: scope[name] for name in node.input if name}
        if node.op_type not in EVALUATED or not kinds or not facts or not all(is_small):
            return {}
        if node.op_type in ("Shape", "Size"):
            ((name, fact), *others) = facts.items()
            sizes = [size for size in fact.shape if isinstance(size, int)]
            if (
                others
                or not fact.kind.is_known
                or prod(max(size, 1) for size in sizes) >= _MOST_INDEXED
            ):
                return {}
            # The evaluator reads only the shape: pass a view of one element, which takes no memory.
            inputs = {name: np.broadcast_to(np.zeros((), "bool"), sizes)}
        else:
            inputs = self._read(facts)
        if len(inputs) < len(facts):
            return {}
        reference = import_module("onnx.reference")
        try:
            with np.errstate(all="ignore"):
                graph = self._graph_of(node, inputs)
                evaluator = reference.ReferenceEvaluator(graph, opsets=dict(self._versions))
                results = evaluator.run(None, inputs)
        except Exception:  # unknown operators, and values that an operator rejects
            return {}
        arrays = {
            name: np.asarray(result)
            for name, result in zip(node.output, results, strict=False)
            if name and isinstance(result, (np.ndarray, np.generic))
        }
        return self._kept(arrays)

    def _graph_of(self, node: Any, inputs: Iterable[str]) -> Any:
        """Return a graph of one node, since onnx ignores the operator versions of a bare node."""
        helper, copy = self._onnx.helper, _copied(node)
        copy.domain = ""  # the evaluator does not know the other name of the standard domain
        named = [
            [helper.make_tensor_value_info(name, 0, None) for name in names if name]
            for names in (inputs, node.output)
        ]
        return helper.make_graph([copy], "one node", *named)

    # -- stored values

    def _add_stored(self, graph: Any, scope: Scope) -> None:
        """Add the facts about the tensors that a graph stores to the scope."""
        for entry in graph.initializer:
            scope[entry.name] = Fact(
                Kind(entry.data_type, tuple(entry.dims)),
                self._values_of({entry.name: entry}).get(entry.name),
                self._stored(entry.doc_string, prod(entry.dims)),
            )
        for entry in graph.sparse_initializer:
            kind = Kind(entry.values.data_type, tuple(entry.dims))
            scope[entry.values.name] = Fact(kind, stored=Stored(prod(entry.dims)))

    def _stored(self, mark: str, size: int) -> Stored:
        """Return a new Stored object; a marked constant of a function shares it in all calls."""
        if not mark.startswith(_MARK):
            return Stored(size)
        return self._marked.setdefault(mark, Stored(size))

    def _trace(self, node: Any, scope: Scope) -> None:
        """Record the Stored objects of a node's constant outputs."""
        names = list(node.input)  # "" is an omitted optional input
        if node.op_type == "Constant" and node.domain in OWN_DOMAINS:
            for name in filter(None, node.output):
                scope[name].stored = self._stored(node.doc_string, scope[name].kind.count)
            return
        if not any(names) or any(inner_graphs(node)):
            return
        sources = [scope[name].stored if name else "" for name in names]
        attributes = tuple(sorted(entry.SerializeToString() for entry in node.attribute))
        key = node.op_type, node.domain, attributes, *sources
        if node.op_type in SAME_VALUES:
            first = scope[names[0]].stored
            if first is not None and node.op_type != "Identity":
                first = Stored(first.size, first.origin)
                first = first if None in sources else self._computed.setdefault(key, first)
            for name in filter(None, node.output[:1]):
                scope[name].stored = first
        elif None not in sources and not node.op_type.startswith(_RANDOM):
            for number, name in enumerate(node.output):
                if name:
                    result = Stored(scope[name].kind.count)
                    scope[name].stored = self._computed.setdefault((*key, number), result)


def _live_nodes(graph: Any) -> set[int]:
    """Return the indices of the nodes that the graph's outputs need; all if it has no outputs."""
    needed = {entry.name for entry in graph.output}
    if not needed:
        return set(range(len(graph.node)))
    live = set()
    for number in reversed(range(len(graph.node))):
        node = graph.node[number]
        if needed.intersection(filter(None, node.output)):
            live.add(number)
            needed.update(filter(None, node.input))
            for inner in inner_graphs(node):
                needed.update(_names_read(inner))
    return live


def _names_read(graph: Any) -> set[str]:
    """Return every name that the nodes and outputs of a graph read."""
    names = {entry.name for entry in graph.output}
    for node in graph.node:
        names.update(node.input, *map(_names_read, inner_graphs(node)))
    return names


def _copied(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _text(shape: Shape) -> str:
    return shape_text(shape)  # type: ignore[arg-type]  # shape_text accepts names


def _merged(inferred: Kind, declared: Kind) -> Kind:
    """Return the inferred type of a tensor, completed with the type that the file declares."""
    if inferred == Kind() or inferred.other or declared.other:
        return declared if inferred == Kind() else inferred
    sizes = declared.sizes if inferred.sizes is None else inferred.sizes
    if inferred.sizes and declared.sizes and len(inferred.sizes) == len(declared.sizes):
        sizes = tuple(map(_known_size, inferred.sizes, inferred.shape, declared.sizes))
    return Kind(inferred.element or declared.element, sizes)


def _known_size(inferred: int | str, shown: int | str, declared: int | str) -> int | str:
    """Return a declared size if it says more than an inferred size, which texts show as shown."""
    says_more = isinstance(declared, int) or (shown == "?" and declared)
    return declared if isinstance(inferred, str) and says_more else inferred


def _common(first: Kind, second: Kind) -> Kind:
    """Return the part of a tensor's type that is the same in two branches."""
    if first.other or second.other:
        return first if first == second else Kind()
    element = first.element if first.element == second.element else 0
    if first.sizes is None or second.sizes is None or len(first.sizes) != len(second.sizes):
        return Kind(element)
    pairs = zip(first.sizes, second.sizes, strict=True)
    return Kind(element, tuple(a if a == b else "" for a, b in pairs))


def _branch_kinds(node: Any, scope: Scope, returned: Mapping[str, list[Kind]]) -> list[Kind]:
    """Return the output types of the branch that an If takes.

    If the branch is unknown, the types contain only what both branches have in common.
    """
    branches = [returned.get(name, []) for name in ("then_branch", "else_branch")]
    condition = scope[node.input[0]].values if node.input else None
    if condition is not None and condition.size == 1:
        return branches[0 if condition.reshape(()) else 1]
    return [_common(*pair) for pair in zip(*branches, strict=False)]


def _loop_kinds(node: Any, scope: Scope, body: list[Kind]) -> list[Kind]:
    """Return the types of a Loop's outputs: carried tensors, then tensors stacked on a new axis."""
    carried = list(node.input[2:])
    pairs = zip(carried, body[1:], strict=False)
    stacked = (kind.reordered(lambda sizes: ("", *sizes)) for kind in body[1 + len(carried) :])
    return [*(_common(scope[name].kind, kind) if name else kind for name, kind in pairs), *stacked]
