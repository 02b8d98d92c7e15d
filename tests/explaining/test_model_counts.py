"""Counts of `cupyconv model`: stored parameters, and convolutions that are read or left out.

The tests compare with PyTorch's parameter counts and with onnx's checks and evaluator.
"""

from __future__ import annotations

import csv
import itertools
import json
import random
import time
from importlib import import_module

import numpy as np
import pytest

import cupyconv.onnx as co
from cupyconv import ConvError
from cupyconv.explaining import onnx_graph
from cupyconv.explaining import onnx_model as models
from tests.command import run as run_command
from tests.explaining.test_model import (
    build,
    listed,
    node,
    onnx,
    refused,
    run,
    saved,
    value,
    weights,
)

__all__ = ["saved"]  # a fixture

X = value("x", (1, 4, 16, 16))
SHARED = [weights("w", (4, 4, 3, 3)), weights("b", (4,))]


def three_convs(filters=("w", "w", "w"), before=(), initializers=SHARED, inputs=(X,), bias="b"):
    """Return a model that applies a Conv(4, 4, 3) once for each of the named filters."""
    nodes = list(before)
    at = "x"
    for number, name in enumerate(filters):
        nodes.append(node("Conv", [at, name, bias], f"c{number}"))
        at = f"c{number}_out"
    return build(nodes, list(inputs), list(initializers))


def counts(path: str) -> tuple[int, int, int]:
    totals = json.loads(run(path, "--json").stdout)["totals"]
    return totals["layers"], totals["weights"], totals["parameters"]


# -- stored parameters -----------------------------------------------------------------------------


def test_layer_applied_three_times_counts_as_in_pytorch(saved):
    torch = pytest.importorskip("torch")
    path = saved(three_convs(initializers=[weights("w", (4, 4, 3)), weights("b", (4,))], inputs=[
        value("x", (1, 4, 16))
    ]))  # fmt: skip
    layer = torch.nn.Conv1d(4, 4, 3)
    module = torch.nn.Sequential(layer, layer, layer)
    parameters = sum(one.numel() for one in module.parameters())
    assert counts(path) == (3, layer.weight.numel(), parameters) == (3, 48, 52)
    text = run(path).stdout
    assert "3 convolutions, 48 weights, 52 parameters with biases" in text
    assert text.count("same filter as c0") == 2
    rows = json.loads(run(path, "--json").stdout)["layers"]
    assert [row["same_filter_as"] for row in rows] == [None, "c0", "c0"]
    assert [row["parameters"] for row in rows] == [52] * 3


STORED = [
    *SHARED,
    weights("v", (4, 4, 3, 3)),
    weights("m", (4, 1, 1, 1)),
    weights("both", (8, 4, 3, 3)),
    onnx.numpy_helper.from_array(np.ones((4, 4, 3, 3), np.int8), "q"),
    onnx.helper.make_tensor("scale", 1, [], [0.5]),
    onnx.helper.make_tensor("zero", 3, [], [0]),
]
COUNTED = {
    "identity": ("w t t", ["t = Identity(w)"], 144),
    "transpose": ("w t t", ["t = Transpose<perm = [1, 0, 3, 2]>(w)"], 144),
    "cast": ("w t t", ["t = Cast<to = 1>(w)"], 144),
    "quantized": (
        "w t t",
        ["i = QuantizeLinear(w, scale, zero)", "t = DequantizeLinear(i, scale, zero)"],
        144,
    ),
    "chain": ("w t t", ["i = Identity(w)", "t = Transpose<perm = [1, 0, 2, 3]>(i)"], 144),
    "integers": (
        "t u",
        ["t = DequantizeLinear(q, scale)", "u = DequantizeLinear(q, scale)"],
        144,
    ),
    "stored twice": ("w v w", [], 288),
    "parts of one tensor": ("t u i", ["t, u = Split<axis = 0>(both)", "i = Identity(t)"], 288),
    "computed twice": ("t u", ["t = Mul(w, m)", "u = Mul(w, m)"], 144),
}
"""Filters of the layers, nodes before them, and the counted weights of the filters."""


@pytest.mark.parametrize("case", COUNTED)
def test_equal_stored_filters_count_once(saved, case):
    filters, texts, expected = COUNTED[case]
    nodes = [onnx.parser.parse_node(text) for text in texts]
    path = saved(three_convs(filters.split(), nodes, STORED))
    assert counts(path) == (len(filters.split()), expected, expected + 4)


def test_expanded_filter_counts_its_stored_values(saved):
    kernel = [weights("k", (1, 1, 5, 5)), onnx.numpy_helper.from_array(np.array([4, 1, 5, 5]), "s")]
    nodes = [node("Expand", ["k", "s"], "wide"), node("Conv", ["x", "wide_out"], "c", group=4)]
    assert counts(saved(build(nodes, [X], kernel))) == (1, 25, 25)


@pytest.mark.parametrize("operator", ["none", "Abs"])
def test_filter_from_an_input_is_no_parameter(saved, operator):
    name = "f" if operator == "none" else "a_out"
    before = [] if operator == "none" else [node(operator, ["f"], "a")]
    inputs = [X, value("f", (4, 4, 3, 3))]
    path = saved(three_convs(("w", name), before, SHARED, inputs))
    assert counts(path) == (2, 144, 148)
    assert "filter not stored in the file" in run(path).stdout
    rows = json.loads(run(path, "--json").stdout)["layers"]
    assert [row["filter_is_stored"] for row in rows] == [True, False]
    assert [row["parameters"] for row in rows] == [148, 4]


@pytest.mark.parametrize("form", ["constant", "sparse", "default", "external"])
def test_filters_in_every_storage_form_are_counted(saved, form):
    dense = weights("w", (4, 4, 3, 3))
    net = three_convs()
    if form == "default":
        net.graph.input.append(value("w", (4, 4, 3, 3)))
    elif form == "external":
        net.graph.initializer[0].ClearField("raw_data")
        net.graph.initializer[0].data_location = onnx.TensorProto.EXTERNAL
        net.graph.initializer[0].external_data.add(key="location", value="nowhere.bin")
    else:
        del net.graph.initializer[0]
        if form == "constant":
            constant = onnx.helper.make_node("Constant", [], ["w"], value=dense)
            net.graph.node.insert(0, constant)
        else:
            numbers = onnx.helper.make_tensor("w", 1, [1], [1.0])
            places = onnx.helper.make_tensor("", 7, [1], [0])
            sparse = onnx.helper.make_sparse_tensor(numbers, places, [4, 4, 3, 3])
            net.graph.sparse_initializer.append(sparse)
    path = saved(net)
    assert counts(path) == (3, 144, 148)
    found = json.loads(run(path, "--json").stdout)
    assert found["inputs"] == {"x": [1, 4, 16, 16]}


def function_model(calls: int):
    """Return a model that repeats a function, which has a Conv with a constant filter."""
    helper = onnx.helper
    opset, own = helper.make_opsetid("", 17), helper.make_opsetid("own", 1)
    body = [
        helper.make_node("Constant", [], ["k"], value=weights("", (4, 4, 3, 3))),
        helper.make_node("Conv", ["a", "k"], ["r"], name="inner"),
    ]
    block = helper.make_function("own", "Block", ["a"], ["r"], body, [opset])
    names = ["x", *(f"y{number}" for number in range(calls))]
    nodes = [
        helper.make_node("Block", [a], [b], domain="own") for a, b in itertools.pairwise(names)
    ]
    graph = helper.make_graph(nodes, "net", [X], [value(names[-1], None)])
    return helper.make_model(graph, opset_imports=[opset, own], functions=[block], ir_version=8)


def test_constant_of_a_function_counts_once_for_all_calls(saved):
    assert counts(saved(function_model(3))) == (3, 144, 144)


def test_bias_of_another_size_is_rejected(saved):
    line = refused(saved(three_convs(initializers=[SHARED[0], weights("b", (5,))])))
    assert "c0: the bias must have one value for each output channel: b is 5" in line


def test_transposed_bias_has_the_output_channels(saved):
    torch = pytest.importorskip("torch")
    module = torch.nn.ConvTranspose2d(4, 6, 3)
    up = node("ConvTranspose", ["x", "w", "b"], "up")
    stored = [weights("w", (4, 6, 3, 3)), weights("b", (6,))]
    path = saved(build([up], [X], stored))
    assert counts(path)[2] == sum(one.numel() for one in module.parameters())
    result = run_command("shapes", "--model", path, "--json")
    (layer,) = json.loads(result.stdout)["layers"]
    assert layer["shapes"]["db"] == list(module.bias.shape) == [6]
    assert "one value for each output channel: dy[c] summed" in layer["reasons"]["db"]


# -- attributes ------------------------------------------------------------------------------------


def test_attributes_match_all_opsets_of_onnx():
    schemas = onnx.defs.get_all_schemas_with_history()
    found = [one for one in schemas if one.name in co.ATTRIBUTES and not one.domain]
    assert len(found) >= 4
    for schema in found:
        assert set(schema.attributes) == set(co.ATTRIBUTES[schema.name])


@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
@pytest.mark.parametrize(
    ("wrong", "right"), [("stride", "strides"), ("padding", "pads"), ("dilation", "dilations")]
)
def test_unknown_attribute_is_rejected(saved, operator, wrong, right):
    one = node(operator, ["x", "w"], "c", **{wrong: [2, 2]})
    net = build([one], [X], [SHARED[0]])
    with pytest.raises(onnx.checker.ValidationError, match=f"Unrecognized attribute: {wrong}"):
        onnx.checker.check_node(one, _context())
    line = refused(saved(net))
    assert f"c: unknown attribute of {operator}: '{wrong}'" in line
    assert f"'{right}'" in line
    function = co.conv if operator == "Conv" else co.conv_transpose
    with pytest.raises(TypeError, match=wrong):
        function(np.ones((1, 4, 8, 8)), np.ones((4, 4, 3, 3)), **{wrong: [2, 2]})


def _context():
    context = onnx.checker.C.CheckerContext()
    context.ir_version, context.opset_imports = 8, {"": 17}
    return context


def test_attribute_given_twice_is_rejected(saved):
    net = three_convs()
    for size in (1, 2):
        net.graph.node[0].attribute.append(onnx.helper.make_attribute("strides", [size, size]))
    assert "strides is given 2 times" in refused(saved(net))


# -- constants -------------------------------------------------------------------------------------


PADS = {
    "stored": ([], {"pads": [0, 0, 8, 0, 0, 0]}),
    "constant": (["pads = Constant<value = int64[6] {0, 0, 8, 0, 0, 0}>()"], {}),
    "computed": (  # as PyTorch's exporter writes F.pad
        [
            "zeros = ConstantOfShape<value = int64[1] {0}>(more)",
            "flat = Concat<axis = 0>(given, zeros)",
            "pairs = Reshape(flat, shape)",
            "turned = Slice(pairs, starts, ends, axes, steps)",
            "sides = Transpose<perm = [1, 0]>(turned)",
            "whole = Reshape(sides, back)",
            "pads = Cast<to = 7>(whole)",
        ],
        {"given": [8, 0], "more": [4], "shape": [-1, 2], "back": [-1]}
        | {"starts": [-1], "ends": [-(2**62)], "axes": [0], "steps": [-1]},
    ),
    "from the shape": (  # pad to a multiple of 58: 232 = 4 * 58
        [
            "sizes = Shape(x)",
            "length = Gather(sizes, last)",
            "negative = Neg(length)",
            "missing = Mod(negative, by)",
            "pads = Concat<axis = 0>(no, missing, none)",
        ],
        {"last": 2, "by": [58], "no": [0, 0], "none": [0, 0, 0]},
    ),
    "input": ([], {}),
}
"""Nodes and constants that give the pads in a form that exporters write."""


def padded(form: str):
    """Return a causal Conv1d: 8 zeros before 1x2x224."""
    texts, constants = PADS[form]
    stored = [onnx.numpy_helper.from_array(np.array(v), name) for name, v in constants.items()]
    inputs = [value("x", (1, 2, 224)), *([value("pads", (6,), 7)] if form == "input" else [])]
    nodes = [onnx.parser.parse_node(text) for text in (*texts, "p = Pad(x, pads)")]
    nodes.append(node("Conv", ["p", "w"], "causal"))
    return build(nodes, inputs, [*stored, weights("w", (3, 2, 3))])


@pytest.mark.parametrize("form", ["stored", "constant", "computed", "from the shape"])
def test_constant_pads_match_onnxs_evaluator(saved, form):
    net = padded(form)
    (layer,) = json.loads(run(saved(net), "--json").stdout)["layers"]
    evaluator = import_module("onnx.reference").ReferenceEvaluator(net)
    (y,) = evaluator.run(None, {"x": np.zeros((1, 2, 224), np.float32)})
    assert layer["shapes"]["x"] == [1, 2, 232]
    assert layer["shapes"]["y"] == list(y.shape)


def test_pads_known_only_at_run_time_are_not_guessed(saved):
    line = listed(saved(padded("input")))
    assert "causal reads p of" in line
    assert "--input 'p=?x2x?' with a number for each ?" in line
    assert "224" not in line.partition("--input")[2]


def test_shapes_match_onnxs_inference(saved):
    """The model has a skip connection and computes its sizes."""
    helper = onnx.helper
    ints = {"start": [2], "end": [4], "axes": [0], "head": [1, 4]}
    nodes = [
        node("Conv", ["x", "w"], "down", strides=[2, 2], pads=[1, 1, 1, 1]),
        node("Shape", ["x"], "sizes"),
        node("Slice", ["sizes_out", "start", "end", "axes"], "part"),
        node("Concat", ["head", "part_out"], "target", axis=0),
        helper.make_node("Resize", ["down_out", "", "", "target_out"], ["up"]),
        node("Concat", ["up", "x"], "both", axis=1),
        node("Conv", ["both_out", "v"], "last", pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", ["last_out"], "pool"),
        node("Flatten", ["pool_out"], "flat"),
    ]
    stored = [weights("w", (4, 4, 3, 3)), weights("v", (5, 8, 3, 3))]
    stored += [onnx.numpy_helper.from_array(np.array(v), name) for name, v in ints.items()]
    net = build(nodes, [value("x", (1, 4, 15, 18))], stored)
    traversal = onnx_graph.Traversal(onnx, net, {})
    for visit in traversal.visits():
        scope = visit.scope
    inferred = onnx.shape_inference.infer_shapes(net, data_prop=True, strict_mode=True)
    known = {one.name: one.type for one in (*inferred.graph.value_info, *inferred.graph.output)}
    assert len(known) == len(nodes)
    for name, kind in known.items():
        assert scope[name].shape == onnx_graph.Kind.of(kind).shape, name
    assert [one.output_shape for one in models.read(saved(net)).layers][-1] == (1, 5, 15, 18)


def random_net(seed: int):
    """Return a chain of random convolutions, pools, pads and resizes, and its input shape."""
    helper, rng = onnx.helper, random.Random(seed)
    nodes, stored, at, names = [], [], "x", (f"t{n}" for n in itertools.count())

    def constant(content) -> str:
        name, array = next(names), np.array(content)
        if rng.random() < 0.5:
            stored.append(onnx.numpy_helper.from_array(array, name))
        else:
            tensor = onnx.numpy_helper.from_array(array, "")
            nodes.append(helper.make_node("Constant", [], [name], value=tensor))
        return name

    def add(operator: str, *inputs: str, **attributes) -> str:
        name = next(names)
        nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def resized(factor: list[int]) -> str:
        sizes = add("Slice", add("Shape", at), constant([2]), constant([4]))
        wanted = add("Mul", sizes, constant(factor))
        return add("Resize", at, "", "", add("Concat", constant([1, 4]), wanted, axis=0))

    kernel = np.ones((4, 4, 3, 3), np.float32)
    steps = [
        lambda: add("Conv", at, constant(kernel), pads=[1, rng.randrange(2), 1, 1]),
        lambda: add("ConvTranspose", at, constant(kernel), strides=[2, 1]),
        lambda: add("MaxPool", at, kernel_shape=[2, 2], strides=[2, 2], pads=[1, 0, 0, 1]),
        lambda: add("Pad", at, constant([0, 0, *rng.choices(range(3), k=2)] * 2)),
        lambda: add("Resize", at, "", constant(np.array([1, 1, 0.5, 2], np.float32))),
        lambda: resized(rng.choices([1, 2], k=2)),
        lambda: add("Transpose", at, perm=[0, 1, 3, 2]),
        lambda: add("Slice", at, constant([rng.randrange(3)]), constant([2**62]), constant([2])),
        lambda: add("Reshape", at, constant([1, 4, -1, 1])),
    ]
    for _ in range(rng.randrange(2, 7)):
        at = rng.choice(steps)()
    shape = (1, 4, rng.randrange(9, 20), rng.randrange(9, 20))
    return build(nodes, [value("x", shape)], stored), shape


@pytest.mark.parametrize("seed", range(60))
def test_random_models_match_onnxs_evaluator(seed):
    net, shape = random_net(seed)
    traversal = onnx_graph.Traversal(onnx, net, {})
    for visit in traversal.visits():
        scope = visit.scope
    names = [name for one in net.graph.node for name in one.output]
    del net.graph.output[:]
    net.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    evaluator = import_module("onnx.reference").ReferenceEvaluator(net)
    with np.errstate(all="ignore"):
        results = evaluator.run(None, {"x": np.zeros(shape, np.float32)})
    for name, array in zip(names, results, strict=True):
        assert scope[name].kind.has_rank
        assert scope[name].shape == array.shape, name
        if (known := scope[name].values) is not None:
            np.testing.assert_array_equal(known, array)


# -- convolutions that are left out ----------------------------------------------------------------


def mixed():
    """Return a model of five Conv nodes: plain, of unknown size, quantised, 4-d and unused."""
    nodes = [
        node("Conv", ["x", "w"], "good"),
        node("Reshape", ["good_out", "sizes"], "turn"),
        node("Conv", ["turn_out", "w"], "open"),
        node("ConvInteger", ["q", "wq"], "quantised"),
        node("Conv", ["x6", "w6"], "wide"),
        node("Conv", ["x", "w"], "idle"),
    ]
    inputs = [X, value("sizes", (4,), 7), value("q", (1, 2, 9, 9), 2), value("wq", (4, 2, 3, 3), 2)]
    inputs += [value("x6", (1, 2, 5, 5, 5, 5))]
    outputs = [value(f"{name}_out", None) for name in ("open", "quantised", "wide")]
    return build(nodes, inputs, [SHARED[0], weights("w6", (2, 2, 3, 3, 3, 3))], outputs=outputs)


def test_summary_counts_layers_left_out_with_reasons(saved):
    path = saved(mixed())
    text = " ".join(run(path).stdout.split())
    assert "1 of 5 convolutions (1 of unknown size, 3 left out), 144 weights" in text
    assert "left out: quantised, because ConvInteger computes with quantized integers" in text
    assert "left out: wide, because 4 spatial axes are unsupported, 1 to 3 are supported" in text
    assert "left out: idle, because no output of the model depends on it" in text
    assert json.loads(run(path, "--json").stdout)["totals"]["convolutions"] == 5
    good, *others = csv.DictReader(run(path, "--csv", "-").stdout.splitlines())
    assert (good["layer"], good["notes"]) == ("good", "receptive field 3x3, step 1x1")
    assert [row["layer"] for row in others] == ["open", "quantised", "wide", "idle"]
    for row in others:
        assert row["notes"]
        assert row["flops"] == row["y on sm_80"] == ""


@pytest.mark.parametrize(
    ("operator", "domain"),
    [
        ("ConvInteger", ""),
        ("QLinearConv", ""),
        ("DeformConv", ""),
        ("QLinearConvTranspose", "com.microsoft"),
        ("ConvTransposeWithDynamicPads", "com.microsoft"),
        ("Conv", "com.microsoft.nchwc"),
        ("FusedConv", "com.example"),
    ],
)
def test_model_with_only_unsupported_convolutions_names_them(saved, operator, domain):
    one = onnx.helper.make_node(operator, ["x", "w"], ["y"], name="other", domain=domain)
    net = build([one], [X], [SHARED[0]])
    net.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    path = saved(net)
    named = f"{operator} of {domain}" if domain else operator
    text = " ".join(run(path).stdout.split())
    assert f"that can be read; it has 1 {named}" in text
    assert "left out: other, because" in text
    assert ("FusedConv of com.example is not a known operator" in text) == ("example" in domain)
    result = run_command("shapes", "--model", path)
    assert f"1 {named}" in result.stderr


def test_operator_named_converter_is_no_convolution(saved):
    one = onnx.helper.make_node("Converter", ["x"], ["z"], domain="own")
    net = three_convs(before=[one])
    net.opset_import.append(onnx.helper.make_opsetid("own", 1))
    assert models.read(saved(net)).left_out == ()


# -- hints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "filter_shape", "example"),
    [
        (None, (4, 3, 5), "x=1x3x16000"),
        (("N", 3, "T"), (4, 3, 5), "x=1x3x16000"),
        (None, (4, 3, 5, 5), "x=1x3x224x224"),
        (("N", 3, 8, "W"), (4, 3, 5, 5), "x=1x3x8x224"),
        (None, (4, 3, 2, 2, 2), "x=1x3x32x32x32"),
    ],
)
def test_suggested_input_has_the_filters_rank_and_is_accepted(saved, shape, filter_shape, example):
    one = node("Conv", ["x", "w"], "c")
    net = build([one], [value("x", shape)], [weights("w", filter_shape)])
    path = saved(net)
    hint = listed(path).partition("for example ")[2].split()[:2]
    assert hint == ["--input", example]
    assert counts_with(path, *hint) == 1


def counts_with(path: str, *given: str) -> int:
    result = run(path, *given, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)["totals"]["layers"]


@pytest.mark.parametrize("form", ["turned", "too small"])
def test_unreliable_input_suggestions_are_omitted(saved, form):
    if form == "turned":  # TensorFlow's exporters transpose a channels-last input
        nodes = [
            node("Transpose", ["x"], "t", perm=[0, 3, 1, 2]),
            node("Conv", ["t_out", "w"], "c"),
        ]
        net = build(nodes, [value("x", ("N", "H", "W", 3))], [weights("w", (4, 3, 3, 3))])
        option = "'x=?x?x?x3'"
    else:
        nodes = [node("Conv", ["x", "w"], "c")]
        net = build(nodes, [value("x", ("N", 3, "H", 5))], [weights("w", (4, 3, 3, 7))])
        option = "'x=?x3x?x5'"
    line = listed(saved(net))
    assert "for example" not in line
    assert f"--input {option} with a number for each ?" in line


def rates():
    """Return a model that chooses a branch by its input rate, as Silero's voice detector does.

    Each branch has its own filters and captures x.  Inside, an If squeezes a tensor if its last
    size is 1, and the rank of the result depends on this branch.
    """
    helper = onnx.helper

    def graph(name, nodes, stored=()):
        outputs = [value(one, None) for one in nodes[-1].output]
        return helper.make_graph(nodes, name, [], outputs, stored)

    def branch(name, stride):
        squeezed = graph("s", [node("Squeeze", [f"{name}_a_out", "two"], f"{name}_squeezed")])
        same = graph("i", [node("Identity", [f"{name}_a_out"], f"{name}_same")])
        nodes = [
            node("Conv", ["x", f"{name}_w"], f"{name}_a", strides=[stride]),
            node("Shape", [f"{name}_a_out"], f"{name}_s"),
            node("Gather", [f"{name}_s_out", "two"], f"{name}_n"),
            node("Equal", [f"{name}_n_out", "one"], f"{name}_e"),
            node("If", [f"{name}_e_out"], f"{name}_if", then_branch=squeezed, else_branch=same),
            node("Unsqueeze", [f"{name}_if_out", "two"], f"{name}_u"),
            node("If", ["fast"], f"{name}_inner",
                 then_branch=graph("c", [node("Conv", [f"{name}_a_out", "v"], f"{name}_b")]),
                 else_branch=graph("d", [node("Conv", [f"{name}_u_out", "v"], f"{name}_c")])),
        ]  # fmt: skip
        return graph(name, nodes, [weights(f"{name}_w", (6, 1, stride))])

    which = node("Equal", ["rate", "high"], "which")
    either = node("If", ["which_out"], "rate", then_branch=branch("high", 8),
                  else_branch=branch("low", 4))  # fmt: skip
    numbers = {"two": [2], "one": [1], "high": [16000]}
    stored = [onnx.numpy_helper.from_array(np.array(v), name) for name, v in numbers.items()]
    inputs = [value("x", (1, 1, "T")), value("rate", (1,), 7), value("fast", (), 9)]
    return build([which, either], inputs, [*stored, weights("v", (2, 6, 1))])


@pytest.mark.parametrize(
    ("length", "missing"), [(8, ["low_c"]), (4, ["high_a"]), (16, ["low_c", "high_c"])]
)
def test_layers_of_all_branches_are_listed_with_their_branch(saved, length, missing):
    """A layer is left out if its branch cannot run with the given sizes."""
    path = saved(rates())
    found = models.read(path, {"T": (length,)}, open_sizes=True)
    names = [layer.name for layer in found.nodes]
    assert sorted(names) == [f"{rate}_{one}" for rate in ("high", "low") for one in "abc"]
    assert [layer.name for layer in found.left_out] == missing
    inside = {layer.name: layer.inside for layer in found.nodes}
    assert inside["high_a"] == ("then_branch of rate",)
    assert inside["low_b"] == ("else_branch of rate", "then_branch of low_inner")
    assert inside["low_c"] == ("else_branch of rate", "else_branch of low_inner")
    assert "inside then_branch of rate" in listed(path)


def branches(shape=("N", 4, "H", "W")):
    """Return an If with a Conv in both branches, one after a shape known only at run time."""
    helper = onnx.helper
    then = [node("Conv", ["x", "w"], "then")]
    other = [node("Reshape", ["x", "sizes"], "turn"), node("Conv", ["turn_out", "w"], "other")]
    graphs = {
        "then_branch": helper.make_graph(then, "a", [], [value("then_out", None)]),
        "else_branch": helper.make_graph(other, "b", [], [value("other_out", None)]),
    }
    either = helper.make_node("If", ["which"], ["y"], **graphs)
    inputs = [value("x", shape), value("which", (), 9), value("sizes", (4,), 7)]
    return build([either], inputs, [SHARED[0]])


def test_layer_in_a_branch_is_listed_and_its_size_accepted(saved):
    path = saved(branches((1, 4, 9, 9)))
    text = " ".join(run(path).stdout.split())
    assert "1 of 2 convolutions (1 of unknown size)" in text
    assert "inside then_branch of If" in text
    assert "--input 'turn_out=?x4x?x?'" in text
    whole = run(path, "--input", "turn_out=1x4x5x7", "--json")
    layers = json.loads(whole.stdout)["layers"]
    shapes = {layer["name"]: layer["shapes"]["y"] for layer in layers}
    assert shapes == {"then": [1, 4, 7, 7], "other": [1, 4, 3, 5]}
    assert json.loads(whole.stdout)["totals"]["weights"] == 144


def test_layer_in_a_loop_is_listed_and_its_size_accepted(saved):
    helper = onnx.helper
    body = helper.make_graph(
        [node("Conv", ["state", "w"], "step", pads=[1, 1, 1, 1]),
         helper.make_node("Identity", ["go"], ["on"])],
        "body",
        [value("i", (), 7), value("go", (), 9), value("state", None)],
        [value("on", (), 9), value("step_out", None)],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)
    net = build([loop], [X, value("count", (), 7)], [SHARED[0]])
    path = saved(net)
    line = listed(path)
    assert "step reads state of unknown" in line
    found = json.loads(run(path, "--input", "state=1x4x16x16", "--json").stdout)
    assert found["layers"][0]["shapes"]["y"] == [1, 4, 16, 16]
    assert found["layers"][0]["inside"] == ["Loop"]
    assert "counts once, although" in " ".join(
        run(path, "--input", "state=1x4x16x16").stdout.split()
    )


def test_branch_chosen_by_a_constant_gives_its_shape(saved):
    helper = onnx.helper
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Equal", ["n", "one"], ["which"]),
    ]
    graphs = {
        "then_branch": helper.make_graph(
            [helper.make_node("Identity", ["x"], ["same"])], "a", [], [value("same", None)]
        ),
        "else_branch": helper.make_graph(
            [helper.make_node("Flatten", ["x"], ["flat"])], "b", [], [value("flat", None)]
        ),
    }
    nodes.append(helper.make_node("If", ["which"], ["y"], **graphs))
    nodes.append(node("Conv", ["y", "w"], "c"))
    stored = [onnx.numpy_helper.from_array(np.array(v), k) for k, v in (("zero", 0), ("one", 1))]
    net = build(nodes, [X], [SHARED[0], *stored])
    (layer,) = models.read(saved(net)).layers
    evaluator = import_module("onnx.reference").ReferenceEvaluator(net)
    (y,) = evaluator.run(None, {"x": np.zeros((1, 4, 16, 16), np.float32)})
    assert layer.output_shape == y.shape


# -- hostile files ---------------------------------------------------------------------------------


def test_doubled_concatenations_use_little_memory(saved):
    resource = pytest.importorskip("resource")
    nodes, at = [], "s"
    for number in range(48):
        nodes.append(node("Concat", [at, at], f"d{number}", axis=0))
        at = f"d{number}_out"
    nodes += [node("Reshape", ["x", at], "r"), node("Conv", ["r_out", "w"], "c")]
    stored = [SHARED[0], onnx.numpy_helper.from_array(np.array([1, 4, 8, 8]), "s")]
    path = saved(build(nodes, [X], stored))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    assert "c reads r_out of unknown" in listed(path)
    assert time.perf_counter() - begin < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def nested(depth: int, calls: int):
    """Return a model of functions that each call the next function several times."""
    helper = onnx.helper
    opset, own = helper.make_opsetid("", 17), helper.make_opsetid("own", 1)
    functions = []
    for number in range(depth):
        inner = f"F{number + 1}" if number < depth - 1 else "Relu"
        domain = "own" if number < depth - 1 else ""
        names = ["a", *(f"t{call}" for call in range(calls - 1)), "b"]
        nodes = [
            helper.make_node(inner, [x], [y], domain=domain) for x, y in itertools.pairwise(names)
        ]
        functions.append(
            helper.make_function("own", f"F{number}", ["a"], ["b"], nodes, [opset, own])
        )
    nodes = [helper.make_node("F0", ["x"], ["h"], domain="own"), node("Conv", ["h", "w"], "c")]
    graph = helper.make_graph(nodes, "net", [X], [value("c_out", None)], [SHARED[0]])
    return helper.make_model(graph, opset_imports=[opset, own], functions=functions, ir_version=8)


def test_nested_functions_have_a_limit(saved):
    begin = time.perf_counter()
    assert "at most 50,000 nodes and calls" in refused(saved(nested(90, 2)))
    assert "functions cannot be expanded" in refused(saved(nested(300, 1)))
    assert time.perf_counter() - begin < 20
    assert len(models.read(saved(nested(6, 2))).layers) == 1


def test_calls_of_empty_functions_have_a_limit(saved):
    net = nested(24, 2)
    del net.functions[-1].node[:]
    assert "at most 50,000 nodes and calls" in refused(saved(net))


def referring(operator: str, attribute: str, kind: str):
    """Return a node whose attribute is the attribute "t" of the function that contains it."""
    number = getattr(onnx.AttributeProto, kind)
    reference = onnx.AttributeProto(name=attribute, ref_attr_name="t", type=number)
    return onnx.NodeProto(op_type=operator, output=["unused"], attribute=[reference])


def test_calls_in_passed_graphs_have_a_limit(saved):
    net = nested(2, 20)
    net.functions[0].node.extend([referring("If", "then_branch", "GRAPH")] * 2500)
    calls = [onnx.NodeProto(op_type="F1", domain="own", input=["x"], output=["y"])]
    graph = onnx.helper.make_attribute("t", onnx.GraphProto(node=calls))
    net.graph.node[0].attribute.append(graph)
    assert "at most 50,000 nodes and calls" in refused(saved(net))


def pass_tensor(net):
    net.graph.node[0].attribute.append(onnx.helper.make_attribute("t", weights("", (1 << 18,))))
    net.functions[0].node.extend([referring("Constant", "value", "TENSOR")] * 100)


def pass_long_name(net):
    net.graph.node[0].output[0] = "h" * (1 << 20)
    net.functions[0].node.extend([onnx.NodeProto(op_type="Relu", input=["b"])] * 100)


def add_constant(net):
    constant = onnx.helper.make_node("Constant", [], ["unused"], value=weights("", (1 << 17,)))
    net.functions[1].node.append(constant)


def add_constant_to_overload(net):
    add_constant(net)
    net.functions[1].name = "F::1"  # onnx joins the parts of both names to "own::F::1"
    for call in net.functions[0].node:
        call.op_type, call.overload = "F", "1"


COPIED = {
    "node": add_constant,
    "node of an overload": add_constant_to_overload,
    "passed tensor": pass_tensor,
    "passed name": pass_long_name,
    "type": lambda net: net.functions[1].value_info.add(name="v" * (1 << 19)),
    "text": lambda net: setattr(net.functions[1], "doc_string", "d" * (1 << 19)),
    "empty strings": lambda net: net.functions[1].node[0].attribute.add(strings=[b""] * 8_000),
}
"""Changes that make the 160 copies of a function, or the copies of an argument, large."""


@pytest.mark.parametrize("change", COPIED.values(), ids=COPIED)
def test_copies_of_functions_have_a_limit(saved, change):
    net = nested(2, 160)
    del net.functions[1].node[1:]
    net.functions[1].node[0].output[0] = "b"
    assert len(models.read(saved(net)).layers) == 1
    change(net)
    assert "at most 64.0 MiB" in refused(saved(net))


def test_expanded_model_has_the_limit_of_protobuf(saved, monkeypatch):
    monkeypatch.setattr(onnx_graph, "MOST_BYTES", 10_000)
    assert len(models.read(saved(function_model(1))).layers) == 1
    with pytest.raises(ConvError, match="more with its functions expanded"):
        models.read(saved(function_model(30)))


def test_values_that_nodes_read_have_a_limit(saved, monkeypatch):
    monkeypatch.setattr(onnx_graph, "LARGEST_TEXT", 1 << 20)
    infer, values = onnx.shape_inference.infer_node_outputs, []

    def counting(schema, node, types, data, **others):
        values.extend(data.values())
        return infer(schema, node, types, data, **others)

    monkeypatch.setattr(onnx.shape_inference, "infer_node_outputs", counting)
    nodes = [node("Unsqueeze", ["x", "axes"], f"u{number}") for number in range(50)]
    axes = onnx.numpy_helper.from_array(np.arange(4096), "axes")
    net = build([*nodes, node("Conv", ["x", "w"], "c")], [X], [axes, SHARED[0]])
    assert len(models.read(saved(net)).layers) == 1
    assert 0 < sum(tensor.ByteSize() for tensor in values) < 1 << 20


def test_recursive_functions_are_rejected(saved):
    net = nested(2, 1)
    net.functions[1].node[0].op_type, net.functions[1].node[0].domain = "F0", "own"
    assert "functions cannot be expanded" in refused(saved(net))


def test_long_names_of_unknown_sizes_are_dropped(saved):
    nodes, at = [], "x"
    for number in range(200):
        nodes.append(node("Relu", [at], f"r{number}"))
        at = f"r{number}_out"
    nodes.append(node("Conv", [at, "w"], "c"))
    shape = ("N" * 100_000, 4, 8, 8)
    net = build(nodes, [value("x", shape)], [SHARED[0]])
    assert len(listed(saved(net))) < 900


# -- spreadsheets ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["=HYPERLINK(1)", "+1", "-1", "@SUM(1)", "\t=1", "\r=1", "＝1", " =1", "\xa0=1"]
)
def test_csv_cells_are_never_formulas(saved, name):
    net = three_convs()
    net.graph.node[0].name = name
    rows = list(csv.DictReader(run(saved(net), "--csv", "-").stdout.splitlines()))
    assert len(rows) == 3
    for row in rows:
        for cell in row.values():
            assert not cell.lstrip().startswith(("=", "+", "-", "@", "＝")), cell
    assert rows[0]["layer"].endswith(name[-2:])
    assert rows[1]["notes"].startswith("same filter as")


def test_errors_name_the_layer(saved):
    net = three_convs()
    net.graph.node[1].attribute.append(onnx.helper.make_attribute("group", 3))
    with pytest.raises(ConvError, match="c1: group must divide"):
        models.read(saved(net))


# -- layers left out, and equal filters ------------------------------------------------------------


@pytest.mark.parametrize("command", ["shapes", "explain"])
def test_layer_with_large_output_padding_is_left_out(saved, command):
    """If output_padding reaches the stride, the convolution has another size than the node."""
    nodes = [
        node("ConvTranspose", ["x", "w"], "up", dilations=[3, 3], output_padding=[2, 2]),
        node("Conv", ["x", "w"], "plain"),
    ]
    outputs = [value("up_out", None), value("plain_out", None)]
    path = saved(build(nodes, [X], [SHARED[0]], outputs=outputs))
    content = json.loads(run(path, "--json").stdout)
    assert [layer["name"] for layer in content["layers"]] == ["plain"]
    assert [entry["name"] for entry in content["left_out"]] == ["up"]
    assert "output_padding" in content["left_out"][0]["reason"]
    result = run_command(command, "--model", path, "--json")
    assert [layer["name"] for layer in json.loads(result.stdout)["layers"]] == ["plain"]


@pytest.mark.parametrize("kind", ["INT32", "FLOAT8E4M3FN"])
def test_layer_of_another_dtype_hides_no_other_layer(saved, kind):
    number = getattr(onnx.TensorProto, kind)
    nodes = [node("Conv", ["x", "w"], "plain"), node("Conv", ["q", "v"], "other")]
    nodes.append(node("Conv", ["h", "u"], "half"))
    inputs = [X, value("q", (1, 4, 8, 8), number), value("v", (4, 4, 3, 3), number)]
    inputs += [value("h", (1, 4, 8), 10), value("u", (4, 4, 3), 10)]
    outputs = [value(f"{one.name}_out", None, 10) for one in nodes]
    read = models.read(saved(build(nodes, inputs, [SHARED[0]], outputs=outputs)))
    assert [layer.problem.dtype for layer in read.layers] == ["float32", "float16"]
    (other,) = read.left_out
    assert (other.name, other.operator) == ("other", "Conv")
    assert other.reason == f"elements of type {kind.lower()} are unsupported"


def test_shape_of_an_untyped_tensor_is_accepted(saved):
    nodes = [
        onnx.helper.make_node("Odd", ["x"], ["r"], domain="own"),
        node("Conv", ["r", "w"], "c"),
    ]
    path = saved(build(nodes, [X], [SHARED[0]]))
    assert "--input" in listed(path)
    (layer,) = models.read(path, {"r": (1, 4, 9, 9)}).layers
    assert (layer.input_shape, layer.output_shape) == ((1, 4, 9, 9), (1, 4, 7, 7))


def test_skipped_inputs_distinguish_filters(saved):
    bound = onnx.helper.make_tensor("m", 1, [], [0.5])
    nodes = [node("Clip", ["w", "", "m"], "high"), node("Clip", ["w", "m", ""], "low")]
    path = saved(three_convs(("high_out", "low_out"), nodes, [*SHARED, bound]))
    assert counts(path) == (2, 288, 292)
    assert "same filter" not in run(path).stdout


@pytest.mark.parametrize("form", ["transpose", "scales", "first"])
def test_other_forms_of_a_filter_are_not_the_same_filter(saved, form):
    nodes = [node("Transpose", ["w"], "t", perm=[1, 0, 2, 3])]
    filters, stored = ("w", "t_out", "t_out"), list(SHARED)
    if form == "first":
        filters = ("t_out", "w", "w")
    if form == "scales":
        stored[0] = onnx.numpy_helper.from_array(np.ones((4, 4, 3, 3), np.int8), "w")
        stored += [onnx.helper.make_tensor(f"s{n}", 1, [], [0.5 + n]) for n in range(2)]
        nodes = [node("DequantizeLinear", ["w", f"s{n}"], f"d{n}") for n in range(2)]
        filters = ("d0_out", "d1_out", "d1_out")
    path = saved(three_convs(filters, nodes, stored))
    assert counts(path) == (3, 144, 148)
    notes = [layer.notes[:-1] for layer in models.read(path).layers]  # without receptive fields
    assert notes == [(), ("same stored values as c0",), ("same filter as c1",)]


def test_scalar_bias_is_rejected(saved):
    stored = [weights("w", (1, 4, 3, 3)), onnx.helper.make_tensor("b", 1, [], [0.5])]
    assert "is a scalar" in refused(saved(three_convs(("w",), (), stored)))
