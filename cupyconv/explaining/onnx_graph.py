"""Visit the nodes of an ONNX model in order, and collect facts about each tensor.

The facts are the type of a tensor, its values if it is a small constant, and whether constants are
equal or have the same values in another form.  The onnx package infers the types node by node and
evaluates small constants.  The limits below bound time and memory for every file.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from cupyconv.errors import ConvError
from cupyconv.explaining.onnx_operators import (
    CONVOLUTIONS,
    OWN_DOMAINS,
    Form,
    channels_first,
    channels_last,
    form_of,
    plain_attributes,
)
from cupyconv.problem import shape_text

if TYPE_CHECKING:
    import numpy as np

MOST_NODES = 50_000
"""Largest number of nodes of a model with all function calls expanded (hand-set)."""

MOST_CALLS = 100
"""Largest depth of nested function calls (the limit of onnx 1.23)."""

MOST_AXES = 64
"""Largest rank of a tensor (NumPy's limit)."""

MOST_VALUES = 4096
"""Largest number of elements of a constant that is evaluated (hand-set)."""

MOST_VALUES_OF_A_MODEL = 4_000_000
"""Largest number of elements of all evaluated constants of a model (hand-set)."""

_MOST_INDEXED = 1 << 62
"""NumPy indexes only tensors with fewer elements than this (NumPy's limit, rounded down)."""

LONGEST_SIZE_NAME = 100
"""Largest number of characters in the name of an unknown size (hand-set).

An unknown size has no value; it may have a name, such as "batch".
"""

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


@dataclass
class Scope:
    """Facts about the tensors that a node can read, keyed by their names.

    Attributes:
        types: ONNX's TypeProto of each tensor.
        values: NumPy arrays of small constants.
        stored: the Stored object of each constant tensor.
    """

    types: ChainMap[str, Any] = field(default_factory=ChainMap)
    values: ChainMap[str, np.ndarray | None] = field(default_factory=ChainMap)
    stored: ChainMap[str, Stored | None] = field(default_factory=ChainMap)

    def child(self) -> Scope:
        """Return a scope for the nodes of an inner graph."""
        return Scope(self.types.new_child(), self.values.new_child(), self.stored.new_child())

    def hide(self, name: str) -> None:
        """Forget the facts about an outer tensor, because an inner tensor has the same name."""
        known: ChainMap[str, Any]
        for known in (self.types, self.values, self.stored):
            if name in known:
                known[name] = None

    def shape(self, name: str) -> Shape:
        """Return the sizes of a tensor; () for a scalar or an unknown shape."""
        kind = self.types.get(name)
        return () if kind is None else sizes_of(kind)

    def element_type(self, name: str) -> int:
        """Return ONNX's number for the element type of a tensor; 0 if the type is unknown."""
        kind = self.types.get(name)
        return 0 if kind is None else int(kind.tensor_type.elem_type)

    def has_rank(self, name: str) -> bool:
        """Return whether the number of axes of a tensor is known."""
        kind = self.types.get(name)
        return kind is not None and _has_rank(kind)


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


def sizes_of(kind: Any) -> Shape:
    """Return the sizes in a TypeProto; () if it has no shape."""
    if not _has_rank(kind):
        return ()
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else _named(dim.dim_param)
        for dim in kind.tensor_type.shape.dim
    )


def _has_rank(kind: Any) -> bool:
    return kind.HasField("tensor_type") and kind.tensor_type.HasField("shape")


def _named(size: str) -> str:
    """Return the name of an unknown size; "?" for no name and for names from shape inference."""
    return "?" if not size or size.startswith("unk__") else size


# -- before the traversal --------------------------------------------------------------------------


def expanded_nodes(model: Any) -> int:
    """Return the number of nodes of a model with all function calls expanded.

    Raises:
        ValueError: functions call each other in a circle, or too deeply.
    """
    functions = {_function_key(f.domain, f.name, f): f for f in model.functions}
    counts: dict[tuple[str, str, str], int] = {}

    def of_function(key: tuple[str, str, str], depth: int) -> int:
        if key not in counts:
            if depth > MOST_CALLS:
                raise ValueError(f"their calls are nested more than {MOST_CALLS} deep")
            counts[key] = of_nodes(functions[key].node, depth + 1)
        return counts[key]

    def of_nodes(nodes: Any, depth: int) -> int:
        total = 0
        for node in nodes:
            key = _function_key(node.domain, node.op_type, node)
            total += of_function(key, depth) if key in functions else 1
            total += sum(of_nodes(graph.node, depth) for graph in inner_graphs(node))
        return total

    return of_nodes(model.graph.node, 0)


def _function_key(domain: str, name: str, proto: Any) -> tuple[str, str, str]:
    return "" if domain in OWN_DOMAINS else domain, name, getattr(proto, "overload", "")


def inner_graphs(node: Any) -> Iterator[Any]:
    """Yield the graphs inside a node: the branches of an If, the body of a Loop or Scan."""
    for attribute in node.attribute:
        yield from _graphs_of(attribute)


def _graphs_of(attribute: Any) -> Iterator[Any]:
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


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
        if len(dim.dim_param) > LONGEST_SIZE_NAME:
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
        self._versions = {
            "" if opset.domain in OWN_DOMAINS else opset.domain: opset.version
            for opset in self._opsets
        }
        self._schemas: dict[tuple[str, str], Any] = {}
        self._marked: dict[str, Stored] = {}
        self._computed: dict[tuple[Any, ...], Stored] = {}
        self._values_left = MOST_VALUES_OF_A_MODEL
        stored = {entry.name for entry in model.graph.initializer}
        stored |= {entry.values.name for entry in model.graph.sparse_initializer}
        free = [entry for entry in model.graph.input if entry.name not in stored]
        self._used_sizes: set[str] = set()
        self._inputs = {
            entry.name: self._with_given_sizes(entry.name, _copied(entry.type)) for entry in free
        }
        self.inputs: dict[str, Shape] = {n: sizes_of(kind) for n, kind in self._inputs.items()}
        self.open_inputs = {n: s for n, s in self.inputs.items() if not _is_known(self._inputs[n])}

    def visits(self) -> Iterator[Visit]:
        """Yield every node in the model's order.

        Raises:
            ConvError: a given shape contradicts the model, or the model has no such tensor.
        """
        yield from self._graph(self._model.graph, Scope(), self._inputs, (), True)
        for name in self._sizes:
            if name not in self._used_sizes:
                raise ConvError(
                    "each given shape must name an input of the model, or a tensor inside it",
                    f"the model has no {name!r}",
                    f"The model's inputs are {', '.join(self.inputs) or 'none'}"
                    f"{self._named_sizes()}",
                )

    def _named_sizes(self) -> str:
        names = _size_names(self._model.graph)
        return f", and its unknown sizes are {', '.join(names)}" if names else ""

    def _graph(
        self,
        graph: Any,
        outer: Scope,
        types: Mapping[str, Any],
        inside: tuple[str, ...],
        used: bool,
    ) -> Generator[Visit, None, list[Any]]:
        """Visit the nodes of a graph with these input types; return the types of its outputs."""
        scope = outer.child()
        for entry in graph.input:
            scope.hide(entry.name)
            inferred = types.get(entry.name)
            kind = _merged(inferred, entry.type)
            scope.types[entry.name] = self._with_given_sizes(entry.name, kind)
        self._add_stored(graph, scope)
        declared = {entry.name: entry.type for entry in (*graph.value_info, *graph.output)}
        live = _live_nodes(graph)
        for number, node in enumerate(graph.node):
            is_used = used and number in live
            yield Visit(node, scope, inside, is_used)
            returned: dict[str, list[Any]] = {}
            for attribute in node.attribute:
                for inner in _graphs_of(attribute):
                    known = self._inner_types(node, inner, scope)
                    branch = f"{attribute.name} of {node.name or node.op_type}"
                    where = (*inside, branch if node.op_type == "If" else node.op_type)
                    types_out = yield from self._graph(inner, scope, known, where, is_used)
                    returned[attribute.name] = types_out
            inferred_types, values = self._outputs(node, scope, returned)
            for name in filter(None, node.output):
                scope.hide(name)
                kind = _merged(inferred_types.get(name), declared.get(name))
                scope.types[name] = self._with_given_sizes(name, kind)
                if name in values:
                    scope.values[name] = values[name]
            self._trace(node, scope)
        return [scope.types.get(entry.name) for entry in graph.output]

    def _with_given_sizes(self, name: str, kind: Any) -> Any:
        """Write the sizes given for a tensor into its type, and return the type.

        An unknown type becomes float32.
        """
        sizes = self._sizes.get(name)
        if sizes is None:
            return kind
        if kind is None:
            kind = self._onnx.TypeProto()
        self._used_sizes.add(name)
        own = sizes_of(kind)
        if _has_rank(kind) and len(own) != len(sizes):
            raise ConvError(
                "a given shape must have as many axes as the tensor",
                f"{name} is {_text(own)}, got {shape_text(sizes)}",
                f"Give {len(own)} sizes",
            )
        for old, new in zip(own, sizes, strict=False):
            if isinstance(old, int) and old != new:
                raise ConvError(
                    "a given shape must keep the sizes that the model fixes",
                    f"{name} is {_text(own)}, got {shape_text(sizes)}",
                    f"Keep {old}",
                )
        dims = kind.tensor_type.shape.dim
        del dims[:]
        for size in sizes:
            dims.add().dim_value = size
        if not kind.tensor_type.elem_type and not own:
            kind.tensor_type.elem_type = self._onnx.TensorProto.FLOAT
        return kind

    def _inner_types(self, node: Any, graph: Any, scope: Scope) -> dict[str, Any]:
        """Return the types of an inner graph's inputs, as far as the outer node determines them.

        The shapes of tensors that a Loop carries may change between iterations, so they are left
        unknown.
        """
        if node.op_type != "Loop" or node.domain not in OWN_DOMAINS:
            return {}
        int64, boolean = self._onnx.TensorProto.INT64, self._onnx.TensorProto.BOOL
        make = self._onnx.helper.make_tensor_type_proto
        types = [make(int64, []), make(boolean, [])]
        for name in node.input[2:]:
            kind = _copied(scope.types.get(name))
            if kind is not None and kind.HasField("tensor_type"):
                kind.tensor_type.ClearField("shape")
            types.append(kind)
        return {entry.name: kind for entry, kind in zip(graph.input, types, strict=False)}

    def _outputs(
        self, node: Any, scope: Scope, returned: Mapping[str, list[Any]]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the types of a node's outputs, and the values of small constants."""
        own = node.domain in OWN_DOMAINS
        if own and node.op_type == "Constant":
            return self._constant(node)
        if returned:
            kinds: list[Any] = []
            if own and node.op_type == "If":
                kinds = self._branch_types(node, scope, returned)
            elif own and node.op_type == "Loop":
                kinds = _loop_types(node, scope, returned.get("body", []))
            return dict(zip(node.output, kinds, strict=False)), {}
        types = self.infer(node, scope)
        values = self._evaluate(node, scope, types) if own else {}
        for name, array in values.items():
            kind = self._onnx.helper.make_tensor_type_proto(
                self._onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
            types[name] = kind
        return types, values

    def _branch_types(
        self, node: Any, scope: Scope, returned: Mapping[str, list[Any]]
    ) -> list[Any]:
        """Return the output types of the branch that an If takes.

        If the branch is unknown, the types contain only what both branches have in common.
        """
        branches = [returned.get(name, []) for name in ("then_branch", "else_branch")]
        condition = scope.values.get(node.input[0]) if node.input else None
        if condition is not None and condition.size == 1:
            return branches[0 if condition.reshape(()) else 1]
        return [_common(*pair) for pair in zip(*branches, strict=False)]

    # -- types

    def _schema(self, node: Any) -> Any:
        domain = "" if node.domain in OWN_DOMAINS else node.domain
        key = node.op_type, domain
        if key not in self._schemas:
            try:
                version = self._versions[domain]
                self._schemas[key] = self._onnx.defs.get_schema(node.op_type, version, domain)
            except Exception:  # onnx's SchemaError, or an invalid version number
                self._schemas[key] = None
        return self._schemas[key]

    def infer(self, node: Any, scope: Scope) -> dict[str, Any]:
        """Return the types of a node's outputs, as far as they are known."""
        form = None if node.domain in OWN_DOMAINS else form_of(node)
        return self._infer(node, scope) if form is None else self._infer_form(node, form, scope)

    def _infer_form(self, node: Any, form: Form, scope: Scope) -> dict[str, Any]:
        """Return the output types of an operator with the shapes of a standard operator.

        Except to quantize, the output has the element type of the first input; shapes are inferred
        for float32, because many standard operators reject integers.
        """
        helper, float32 = self._onnx.helper, self._onnx.TensorProto.FLOAT
        standard = helper.make_node(form.operator, [], node.output)
        standard.attribute.extend(node.attribute)
        schema, keeps_type = self._schema(standard), "Linear" not in form.operator
        names = list(node.input)[form.inputs][: schema.max_input if schema else 0]
        kinds = [_copied(scope.types.get(name)) for name in names]
        if form.operator in CONVOLUTIONS and len(names) > 1:
            x, w = map(scope.shape, names[:2])
            if form.has_filter_channels_last(x, w, plain_attributes(node)):
                _reorder(kinds[1], channels_first)
        if form.is_channels_last and names:
            _reorder(kinds[0], channels_first)
        inner = Scope()
        for number, (name, kind) in enumerate(zip(names, kinds, strict=True)):
            standard.input.append(f"input {number}" if name else "")
            if kind is not None and keeps_type:
                kind.tensor_type.elem_type = float32
            inner.types[standard.input[-1]] = kind
            inner.values[standard.input[-1]] = scope.values.get(name)
        types = self._infer(standard, inner)
        if form.is_channels_last and node.output:
            _reorder(types.get(node.output[0]), channels_last)
        for kind in types.values() if keeps_type else ():
            kind.tensor_type.elem_type = scope.element_type(names[0])
        return types

    def _infer(self, node: Any, scope: Scope) -> dict[str, Any]:
        """Return the types of a node's outputs that the onnx package infers."""
        schema = self._schema(node)
        names = list(filter(None, node.input))
        if schema is None:
            return {}
        if node.op_type in _SHAPED_BY_LAST_INPUT and names:
            sizes = scope.shape(names[-1])
            if sizes and isinstance(sizes[0], int) and sizes[0] > MOST_AXES:
                return {}
        if any(attribute.name not in schema.attributes for attribute in node.attribute):
            known = [entry for entry in node.attribute if entry.name in schema.attributes]
            node = _copied(node)
            del node.attribute[:]
            node.attribute.extend(known)
        values = {name: scope.values[name] for name in names if scope.values.get(name) is not None}
        data = {name: self._onnx.numpy_helper.from_array(v) for name, v in values.items()}
        try:
            types = self._onnx.shape_inference.infer_node_outputs(
                schema,
                node,
                {name: scope.types.get(name) or self._onnx.TypeProto() for name in names},
                data,
                opset_imports=self._opsets,
            )
        except Exception:  # onnx raises many error types for inconsistent nodes
            return {}
        return {name: kind for name, kind in types.items() if len(sizes_of(kind)) <= MOST_AXES}

    # -- values

    def _constant(self, node: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return the type of a Constant, and the values of a small Constant."""
        import numpy as np

        name = node.output[0] if node.output else ""
        make = self._onnx.helper.make_tensor_type_proto
        for attribute in node.attribute:
            if attribute.name == "value":
                tensor = attribute.t
                types = {name: make(tensor.data_type, tuple(tensor.dims))}
                return types, self._values_of({name: tensor})
            if attribute.name == "sparse_value":
                tensor = attribute.sparse_tensor
                return {name: make(tensor.values.data_type, tuple(tensor.dims))}, {}
            plain = {
                "value_int": ("int64", attribute.i),
                "value_ints": ("int64", attribute.ints),
                "value_float": ("float32", attribute.f),
                "value_floats": ("float32", attribute.floats),
            }.get(attribute.name)
            if plain:
                array = np.array(plain[1], dtype=plain[0])
                kind = self._onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
                return {name: make(kind, array.shape)}, self._kept({name: array})
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
            few = array.size <= MOST_VALUES and array.size <= self._values_left
            if few and array.dtype.kind in "biuf":
                kept[name] = array
                self._values_left -= array.size
        return kept

    def _evaluate(self, node: Any, scope: Scope, types: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Evaluate a node with constant inputs, using onnx's reference evaluator."""
        import numpy as np

        if node.op_type not in EVALUATED or not all(map(_is_small, types.values())) or not types:
            return {}
        names = list(filter(None, node.input))
        if node.op_type in ("Shape", "Size"):
            if len(names) != 1 or not _is_known(scope.types.get(names[0])):
                return {}
            sizes = [n for n in sizes_of(scope.types[names[0]]) if isinstance(n, int)]
            if prod(max(size, 1) for size in sizes) >= _MOST_INDEXED:
                return {}
            # The evaluator reads only the shape: pass a view of one element, which takes no memory.
            inputs = {names[0]: np.broadcast_to(np.zeros((), "bool"), sizes)}
        else:
            constants = {name: scope.values.get(name) for name in names}
            inputs = {name: array for name, array in constants.items() if array is not None}
            if not names or len(inputs) < len(constants):
                return {}
        reference = import_module("onnx.reference")
        try:
            with np.errstate(all="ignore"):
                graph = self._graph_of(node, names)
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
        helper, copy = self._onnx.helper, self._onnx.NodeProto()
        copy.CopyFrom(node)
        copy.domain = ""  # the evaluator does not know the other name of the standard domain
        named = [
            [helper.make_tensor_value_info(name, 0, None) for name in names if name]
            for names in (dict.fromkeys(inputs), node.output)
        ]
        return helper.make_graph([copy], "one node", *named)

    # -- stored values

    def _add_stored(self, graph: Any, scope: Scope) -> None:
        """Add the facts about the tensors that a graph stores to the scope."""
        make = self._onnx.helper.make_tensor_type_proto
        for entry in graph.initializer:
            scope.hide(entry.name)
            scope.types[entry.name] = make(entry.data_type, tuple(entry.dims))
            scope.stored[entry.name] = self._stored(entry.doc_string, prod(entry.dims))
            scope.values.update(self._values_of({entry.name: entry}))
        for entry in graph.sparse_initializer:
            name = entry.values.name
            scope.hide(name)
            scope.types[name] = make(entry.values.data_type, tuple(entry.dims))
            scope.stored[name] = self._stored("", prod(entry.dims))

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
                size = _count(scope.types.get(name))
                scope.stored[name] = self._stored(node.doc_string, size)
            return
        if not any(names) or any(inner_graphs(node)):
            return
        sources = [scope.stored.get(name) if name else "" for name in names]
        attributes = tuple(sorted(entry.SerializeToString() for entry in node.attribute))
        if node.op_type in SAME_VALUES:
            first = scope.stored.get(names[0])
            if first is not None:
                result = Stored(first.size, first.origin)
                if node.op_type == "Identity":
                    result = first
                elif None not in sources:
                    key = node.op_type, node.domain, attributes, *sources
                    result = self._computed.setdefault(key, result)
                for name in filter(None, node.output[:1]):
                    scope.stored[name] = result
            return
        if None in sources or node.op_type.startswith(_RANDOM):
            return
        for number, name in enumerate(node.output):
            if name:
                key = node.op_type, node.domain, attributes, *sources, number
                size = _count(scope.types.get(name))
                scope.stored[name] = self._computed.setdefault(key, Stored(size))


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


def _names_read(graph: Any) -> Iterator[str]:
    """Yield every name that the nodes and outputs of a graph read."""
    yield from (entry.name for entry in graph.output)
    for node in graph.node:
        yield from filter(None, node.input)
        for inner in inner_graphs(node):
            yield from _names_read(inner)


def _copied(message: Any) -> Any:
    if message is None:
        return None
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def _reorder(kind: Any, order: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
    """Change the order of the sizes in a TypeProto, if it has a shape."""
    if kind is not None and _has_rank(kind):
        dims = order(tuple(map(_copied, kind.tensor_type.shape.dim)))
        del kind.tensor_type.shape.dim[:]
        kind.tensor_type.shape.dim.extend(dims)


def _text(shape: Shape) -> str:
    return shape_text(shape)  # type: ignore[arg-type]  # shape_text accepts names


def _is_known(kind: Any) -> bool:
    """Return whether all sizes of a tensor are known."""
    return kind is not None and _has_rank(kind) and all(isinstance(n, int) for n in sizes_of(kind))


def _is_small(kind: Any) -> bool:
    return _is_known(kind) and _count(kind) <= MOST_VALUES


def _count(kind: Any) -> int:
    """Return the number of elements of a tensor; 0 if a size is unknown."""
    sizes = sizes_of(kind) if _is_known(kind) else (0,)
    return prod(size for size in sizes if isinstance(size, int))


def _merged(inferred: Any, declared: Any) -> Any:
    """Return the inferred type of a tensor, completed with the type that the file declares."""
    first, second = _copied(inferred), declared
    if first is None or not first.WhichOneof("value"):
        copy = _copied(second)
        return copy if copy is not None else first
    if second is None or not (first.HasField("tensor_type") and second.HasField("tensor_type")):
        return first
    if not first.tensor_type.elem_type:
        first.tensor_type.elem_type = second.tensor_type.elem_type
    if not second.tensor_type.HasField("shape"):
        return first
    if not first.tensor_type.HasField("shape"):
        first.tensor_type.shape.CopyFrom(second.tensor_type.shape)
        return first
    dims, others = first.tensor_type.shape.dim, second.tensor_type.shape.dim
    if len(dims) == len(others):
        for dim, other in zip(dims, others, strict=True):
            unnamed = not dim.HasField("dim_value") and _named(dim.dim_param) == "?"
            if other.HasField("dim_value") and not dim.HasField("dim_value"):
                dim.dim_value = other.dim_value
            elif unnamed and other.dim_param:
                dim.dim_param = other.dim_param
    return first


def _common(first: Any, second: Any) -> Any:
    """Return the part of a tensor's type that is the same in two branches."""
    if first is None or second is None:
        return None
    if not (first.HasField("tensor_type") and second.HasField("tensor_type")):
        return first if first == second else None
    common = _copied(first)
    if first.tensor_type.elem_type != second.tensor_type.elem_type:
        common.tensor_type.elem_type = 0
    dims, others = first.tensor_type.shape.dim, second.tensor_type.shape.dim
    if not (_has_rank(first) and _has_rank(second)) or len(dims) != len(others):
        common.tensor_type.ClearField("shape")
        return common
    for dim, size, other in zip(common.tensor_type.shape.dim, dims, others, strict=True):
        if size != other:
            dim.Clear()
    return common


def _loop_types(node: Any, scope: Scope, body: list[Any]) -> list[Any]:
    """Return the types of a Loop's outputs: carried tensors, then tensors stacked on a new axis."""
    carried = list(node.input[2:])
    kinds: list[Any] = []
    for name, kind in zip(carried, body[1:], strict=False):
        kinds.append(_common(scope.types.get(name), kind) if name else kind)
    for kind in body[1 + len(carried) :]:
        collected = _copied(kind)
        if collected is not None and _has_rank(collected):
            dims = list(collected.tensor_type.shape.dim)
            collected.tensor_type.ClearField("shape")
            collected.tensor_type.shape.dim.add()
            collected.tensor_type.shape.dim.extend(dims)
        kinds.append(collected)
    return kinds
