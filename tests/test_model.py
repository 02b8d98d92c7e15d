"""`cupyconv model`: the convolutions of ONNX files, as onnx's own evaluator sees them."""

from __future__ import annotations

import csv
import json
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import ConvError, ConvTypeError
from cupyconv.cli.main import main
from cupyconv.explaining import onnx_model as models

onnx = pytest.importorskip("onnx", reason="the onnx package is not installed")


def run(*args: str):
    return CliRunner().invoke(main, ["model", *args], env={"COLUMNS": None})


def refused(*args: str) -> str:
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("cupyconv: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def value(name: str, shape, kind: int = 1):
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def weights(name: str, shape, dtype: str = "float32"):
    array = np.random.default_rng(0).integers(-2, 3, shape).astype(dtype)
    return onnx.numpy_helper.from_array(array, name)


def build(nodes, inputs, outputs, initializers):
    graph = onnx.helper.make_graph(nodes, "net", inputs, outputs, initializers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])


def node(operator: str, inputs, name: str, **attributes):
    return onnx.helper.make_node(operator, inputs, [f"{name}_out"], name=name, **attributes)


def small_net(shape=(1, 3, 32, 32)):
    """A strided layer with a bias, a depthwise one, a dilated one, and one back up."""
    nodes = [
        node("Conv", ["data", "w1", "b1"], "stem", strides=[2, 2], auto_pad="SAME_UPPER"),
        node("Relu", ["stem_out"], "relu"),
        node("Conv", ["relu_out", "w2"], "depthwise", group=8, pads=[1, 1, 1, 1]),
        node("Conv", ["depthwise_out", "w3"], "dilated", dilations=[2, 2], pads=[1, 0, 2, 1]),
        node("ConvTranspose", ["dilated_out", "w4"], "up", strides=[2, 2], output_padding=[1, 0]),
    ]
    initializers = [
        weights("w1", (8, 3, 3, 3)),
        weights("b1", (8,)),
        weights("w2", (8, 1, 3, 3)),
        weights("w3", (6, 8, 3, 3)),
        weights("w4", (6, 4, 2, 2)),
    ]
    return build(nodes, [value("data", shape)], [value("up_out", None)], initializers)


@pytest.fixture
def saved(tmp_path):
    def save(model) -> str:
        path = tmp_path / "net.onnx"
        path.write_bytes(model.SerializeToString())
        return str(path)

    return save


def test_layers_have_the_shapes_that_onnx_computes(saved):
    net = small_net()
    read = models.read(saved(net))
    names = [layer.name for layer in read.layers]
    assert names == ["stem", "depthwise", "dilated", "up"]
    for name in names:
        net.graph.output.append(value(f"{name}_out", None))
    del net.graph.output[0]
    evaluator = import_module("onnx.reference").ReferenceEvaluator(net)
    outputs = evaluator.run(None, {"data": np.zeros((1, 3, 32, 32), np.float32)})
    for layer, output in zip(read.layers, outputs, strict=True):
        assert layer.output_shape == output.shape
    assert [layer.has_bias for layer in read.layers] == [True, False, False, False]
    assert read.layers[1].problem.groups == 8
    assert read.layers[2].problem.padding == ((1, 2), (0, 1))


def test_text_and_totals(saved):
    path = saved(small_net())
    result = run(path)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "inputs data 1x3x32x32" in text
    assert "1x3x32x32 * 8x3x3x3" in text
    assert "ConvTranspose, stride 2x2" in text
    assert "4 convolutions" in text
    layers = models.read(path).layers
    flops = sum(layer.problem.flops for layer in layers)
    (found,) = [json.loads(run(path, "--json").stdout)]
    assert found["totals"]["flops"] == flops
    assert found["totals"]["flops_of_three_passes"] == 3 * flops
    assert found["totals"]["weights"] == 216 + 72 + 432 + 96
    first, *_, last = found["layers"]
    assert first["shapes"]["dx"] == [1, 3, 32, 32]
    assert first["shapes"]["db"] == [8]
    assert first["configuration"]["padding_mode"] == "same"
    assert [kernel["pass"] for kernel in last["kernels"]] == [
        "backprop_input",
        "forward",
        "backprop_filter",
    ]
    assert all(kernel["implementation"].startswith("cuda-") for kernel in first["kernels"])
    on_cpu = json.loads(run(path, "--device", "cpu", "--json").stdout)
    assert on_cpu["layers"][0]["kernels"][0]["implementation"] == "numpy"


@pytest.mark.parametrize("width", ["80", "100"])
def test_no_line_is_wider_than_the_terminal(saved, width):
    result = CliRunner().invoke(main, ["model", saved(small_net())], env={"COLUMNS": width})
    _, *lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= int(width)


@pytest.mark.parametrize(
    "attributes",
    [
        {"strides": [3, 2], "pads": [1, 0, 0, 1]},
        {"strides": [2, 2], "output_padding": [1, 1], "dilations": [2, 1]},
        {"strides": [2, 2], "output_shape": [9, 10], "auto_pad": "SAME_UPPER"},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [2, 2], "auto_pad": "VALID"},
    ],
)
def test_transposed_layers_compute_what_onnx_computes(saved, attributes):
    up = node("ConvTranspose", ["x", "w"], "up", **attributes)
    w = weights("w", (3, 2, 3, 3))
    net = build([up], [value("x", (2, 3, 5, 5))], [value("up_out", None)], [w])
    (layer,) = models.read(saved(net)).layers
    x = np.random.default_rng(1).integers(-2, 3, (2, 3, 5, 5)).astype(np.float32)
    theirs = import_module("onnx.reference").ReferenceEvaluator(net).run(None, {"x": x})[0]
    problem = layer.problem
    assert layer.output_shape == theirs.shape
    ours = cupyconv.conv_backprop_input(
        problem.input_shape,
        onnx.numpy_helper.to_array(w),
        x,
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
    )
    np.testing.assert_array_equal(ours, theirs)


def test_an_output_shape_without_auto_pad_crops_more_at_the_beginning(saved):
    # As ONNX's text says; its own evaluator refuses this.
    up = node("ConvTranspose", ["x", "w"], "up", strides=[2, 2], output_shape=[9, 10])
    net = build(
        [up], [value("x", (2, 3, 5, 5))], [value("up_out", None)], [weights("w", (3, 2, 3, 3))]
    )
    (layer,) = models.read(saved(net)).layers
    assert layer.output_shape == (2, 2, 9, 10)
    assert layer.problem.padding == ((1, 1), (1, 0))


def test_open_sizes_are_asked_for_and_taken(saved):
    path = saved(small_net(("N", 3, "H", "W")))
    line = refused(path)
    assert "stem reads data of Nx3xHxW" in line
    assert "for example --input data=1x3x224x224" in line
    result = run(path, "--input", "data=2x3x64x48", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["layers"][0]["shapes"]["y"] == [2, 8, 32, 24]


def test_sizes_of_minus_one_are_open(saved):
    """As PaddlePaddle's exports have them, in outputs too."""
    net = small_net((-1, 3, -1, -1))
    net.graph.output[0].CopyFrom(value("up_out", (-1, 4, -1, -1)))
    path = saved(net)
    assert "for example --input data=1x3x224x224" in refused(path)
    result = run(path, "--input", "data=2x3x64x48", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["layers"][0]["shapes"]["y"] == [2, 8, 32, 24]


def net_with_a_shape_of_data():
    """The sizes of the second layer's input are numbers that only a run has."""
    nodes = [
        node("Conv", ["x", "w1"], "first", pads=[1, 1, 1, 1]),
        node("Reshape", ["first_out", "sizes"], "turn"),
        node("Conv", ["turn_out", "w2"], "second"),
    ]
    inputs = [value("x", (1, 3, 8, 8)), value("sizes", (4,), 7)]
    initializers = [weights("w1", (4, 3, 3, 3)), weights("w2", (5, 2, 3, 3))]
    return build(nodes, inputs, [value("second_out", None)], initializers)


def test_a_layer_of_unknown_size_does_not_hide_the_others(saved):
    path = saved(net_with_a_shape_of_data())
    result = run(path)
    assert result.exit_code == 0, result.output
    assert "1x3x8x8 * 4x3x3x3" in result.stdout
    assert "1 convolution, 108 weights" in result.stdout
    words = " ".join(result.stdout.split())
    assert "unknown: second: second reads turn_out of" in words
    assert "--input turn_out=1x2x224x224" in words
    found = json.loads(run(path, "--json").stdout)
    assert [layer["name"] for layer in found["unknown"]] == ["second"]
    whole = json.loads(run(path, "--input", "turn_out=1x2x8x16", "--json").stdout)
    assert whole["unknown"] == []
    assert whole["layers"][1]["shapes"]["y"] == [1, 5, 6, 14]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("image=1x3x8x8", "Its inputs are data"),
        ("data=1x3x8", "Give 4 sizes"),
        ("data=1x4x8x8", "Keep 3"),
        ("data", "a name and its shape"),
        ("data=1x3xHxW", "a name and its shape"),
    ],
)
def test_wrong_sizes_are_told(saved, given, said):
    assert said in refused(saved(small_net(("N", 3, "H", "W"))), "--input", given)


def unknown_inside():
    """A layer behind a shape that only the run knows, and one before it."""
    nodes = [
        node("Conv", ["x", "w"], "first"),
        onnx.helper.make_node("Reshape", ["first_out", "s"], ["r"], name="reshape"),
        node("Conv", ["r", "w2"], "second"),
    ]
    inputs = [value("x", (1, 3, 8, 8)), value("s", (4,), 7)]
    initializers = [weights("w", (4, 3, 3, 3)), weights("w2", (2, 4, 3, 3))]
    return build(nodes, inputs, [value("second_out", None)], initializers)


@pytest.mark.parametrize("command", ["plan", "shapes"])
def test_layers_that_cannot_be_told_are_said_to_be_left_out(saved, command):
    given = (command, "--model", saved(unknown_inside()))
    text = CliRunner().invoke(main, given).stdout
    assert "1 node of the model left out" in text
    assert "second: " in text
    found = json.loads(CliRunner().invoke(main, (*given, "--json")).stdout)
    assert len(found["layers"]) == len(found["left_out"]) == 1


def test_a_size_that_is_not_known_hides_no_other_layer(saved):
    path = saved(unknown_inside())
    text = " ".join(run(path).stdout.split())
    assert "1x3x8x8 * 4x3x3x3" in text
    assert "unknown: second: second reads r of ?x?x?x?." in text
    hint = text.partition("for example ")[2].split()[:2]
    assert hint == ["--input", "r=1x4x224x224"]
    assert [e["name"] for e in json.loads(run(path, "--json").stdout)["unknown"]] == ["second"]
    found = json.loads(run(path, *hint, "--json").stdout)
    assert [layer["shapes"]["x"] for layer in found["layers"]] == [[1, 3, 8, 8], [1, 4, 224, 224]]
    assert found["unknown"] == []


def test_a_size_of_minus_one_is_an_open_one(saved):
    net = build(
        [node("Conv", ["x", "w"], "first")],
        [value("x", (-1, 3, 48, -1))],
        [value("first_out", (-1, 4, 46, -1))],
        [weights("w", (4, 3, 3, 3))],
    )
    line = refused(saved(net))
    assert "x of ?x3x48x?" in line
    hint = line.partition("for example ")[2].split()
    assert hint == ["--input", "x=1x3x48x224"]
    found = json.loads(run(saved(net), *hint, "--json").stdout)
    assert found["layers"][0]["shapes"]["y"] == [1, 4, 46, 222]


def test_layers_are_sorted_cut_and_written(saved, tmp_path):
    path = saved(small_net())
    every = json.loads(run(path, "--json").stdout)["layers"]
    assert sum(layer["share_of_flops"] for layer in every) == pytest.approx(1)
    assert [layer["parameters"] for layer in every] == [216 + 8, 72, 432, 96]
    for word, key in (("flops", "flops"), ("parameters", "parameters"), ("bytes", "bytes")):
        found = json.loads(run(path, "--sort", word, "--top", "2", "--json").stdout)["layers"]
        assert [one[key] for one in found] == sorted((e[key] for e in every), reverse=True)[:2]
    assert "2 more are not shown" in run(path, "--top", "2").stdout
    assert "unknown --sort" in refused(path, "--sort", "flop")
    target = tmp_path / "net.csv"
    devices = ("--device", "cpu", "--device", "sm_90a")
    assert run(path, "--csv", str(target), *devices).exit_code == 0
    assert run(path, "--csv", "-", *devices).stdout == target.read_text()
    with target.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["stem", "depthwise", "dilated", "up"]
    assert [int(row["flops"]) for row in rows] == [layer["flops"] for layer in every]
    assert {row["y on cpu"] for row in rows} == {"numpy"}
    assert all(row["dw on sm_90a"].startswith("cuda-") for row in rows)


def test_a_layer_of_a_model_is_explained(saved):
    def explained(*args: str):
        return CliRunner().invoke(main, ["explain", *args], env={"COLUMNS": None})

    path = saved(small_net())
    result = explained("--model", path, "--layer", "dilated")
    assert result.stdout.startswith("dilated: Conv of net.onnx\n")
    assert "x 1x8x16x16 * w 6x8x3x3 -> y 1x6x15x13" in result.stdout
    up = explained("--model", path, "--layer", "up", "--json")
    (layer,) = json.loads(up.stdout)["layers"]
    assert layer["shapes"]["dx"] == [1, 4, 31, 26]
    assert "Did you mean 'dilated'?" in explained("--model", path, "--layer", "dilate").stderr
    opened = saved(small_net(("N", 3, "H", "W")))
    result = explained("--model", opened, "--layer", "stem", "--input", "data=1x3x32x32")
    assert "x 1x3x32x32" in result.stdout
    assert "--input data=1x3x224x224" in explained("--model", opened, "--layer", "stem").stderr
    assert "too" in explained("--model", path, "--preset", "same-stride").stderr


def test_damaged_files(tmp_path, saved):
    whole = Path(saved(small_net())).read_bytes()
    broken = tmp_path / "broken.onnx"
    for content in (b"", b"not a model at all", whole[: len(whole) // 2], whole[:40]):
        broken.write_bytes(content)
        assert "a model must be a whole ONNX file" in refused(str(broken))
    assert "No such file" in refused(str(tmp_path / "none.onnx"))


def test_contradictions_are_told_with_the_node(saved):
    net = build(
        [node("Conv", ["x", "w"], "bad")],
        [value("x", (1, 3, 8, 8))],
        [value("bad_out", None)],
        [weights("w", (4, 2, 3, 3))],
    )
    line = refused(saved(net))
    assert "bad" in line


def test_other_dtypes_ranks_and_operators(saved):
    nodes = [
        node("Conv", ["x", "w"], "signal"),
        node("ConvInteger", ["q", "wq"], "quantised"),
    ]
    net = build(
        nodes,
        [value("x", (1, 2, 9), 10), value("q", (1, 2, 9, 9), 2), value("wq", (4, 2, 3, 3), 2)],
        [value("signal_out", None, 10), value("quantised_out", None, 6)],
        [weights("w", (3, 2, 4), "float16")],
    )
    read = models.read(saved(net))
    (layer,) = read.layers
    assert layer.problem.dtype == "float16"
    assert layer.output_shape == (1, 3, 6)
    assert read.left_out[0][0] == "quantised"
    assert "left out: quantised" in run(saved(net)).stdout


def test_convolutions_inside_functions_are_told(saved):
    """Functions of the model's own, one of which passes its attribute on."""
    helper = onnx.helper
    opset = helper.make_opsetid("", 17)
    inner = helper.make_node("Conv", ["a", "b"], ["c"], name="inner")
    strides = onnx.AttributeProto(name="strides", ref_attr_name="s", type=onnx.AttributeProto.INTS)
    inner.attribute.append(strides)
    block = helper.make_function("own", "Block", ["a", "b"], ["c"], [inner], [opset], ["s"])
    calls = [
        helper.make_node("Block", ["x", "w"], ["h"], domain="own", s=[2, 2]),
        helper.make_node("Block", ["h", "v"], ["y"], domain="own", s=[1, 1]),
        node("Conv", ["y", "v"], "last"),
    ]
    filters = [weights("w", (4, 3, 3, 3)), weights("v", (4, 4, 2, 2))]
    graph = helper.make_graph(
        calls, "net", [value("x", (1, 3, 9, 9))], [value("last_out", None)], filters
    )
    opsets = [opset, helper.make_opsetid("own", 1)]
    net = helper.make_model(graph, opset_imports=opsets, functions=[block], ir_version=8)
    found = models.read(saved(net)).layers
    assert [layer.output_shape for layer in found] == [
        (1, 4, 4, 4),
        (1, 4, 3, 3),
        (1, 4, 2, 2),
    ]
    assert found[0].problem.stride == (2, 2)


def test_branches_have_weights_of_their_own(saved):
    """Under the same names, of other shapes; one of them sparse."""
    helper = onnx.helper

    def branch(name, *brought, **more):
        conv = node("Conv", ["x", "w"], name)
        return helper.make_graph([conv], name, [], [value(f"{name}_out", None)], *brought, **more)

    numbers = helper.make_tensor("w", 1, [1], [1.0]), helper.make_tensor("", 7, [1], [0])
    sparse = [helper.make_sparse_tensor(*numbers, [6, 2, 5, 5])]
    graphs = {
        "then_branch": branch("dense", [weights("w", (4, 2, 3, 3))]),
        "else_branch": branch("sparse", [], sparse_initializer=sparse),
    }
    either = helper.make_node("If", ["which"], ["y"], **graphs)
    net = build([either], [value("x", (1, 2, 9, 9)), value("which", (), 9)], [value("y", None)], [])
    shapes = {layer.name: layer.output_shape for layer in models.read(saved(net)).layers}
    assert shapes == {"dense": (1, 4, 7, 7), "sparse": (1, 6, 5, 5)}


def test_operators_of_other_domains_are_not_mistaken(saved):
    helper = onnx.helper
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["b"], name="blocked", domain="com.example"),
        helper.make_node("FusedConv", ["x", "w"], ["f"], name="fused", domain="com.example"),
        node("Conv", ["x", "w"], "own"),
    ]
    outputs = [value(name, None) for name in ("b", "f", "own_out")]
    net = build(nodes, [value("x", (1, 2, 9, 9))], outputs, [weights("w", (4, 2, 3, 3))])
    net.opset_import.append(helper.make_opsetid("com.example", 1))
    found = models.read(saved(net))
    assert [layer.name for layer in found.layers] == ["own"]
    assert found.left_out == (
        ("blocked", "Conv of com.example is not ONNX's Conv or ConvTranspose"),
        ("fused", "FusedConv of com.example is not ONNX's Conv or ConvTranspose"),
    )


def test_an_input_of_no_shape_is_asked_for(saved):
    filters = [weights("w", (4, 5, 3, 3))]
    net = build(
        [node("Conv", ["x", "w"], "c")], [value("x", None)], [value("c_out", None)], filters
    )
    assert "(x unknown), for example --input x=1x5x224x224" in refused(saved(net))


def test_a_model_without_convolutions(saved):
    net = build([node("Relu", ["x"], "relu")], [value("x", (1, 2))], [value("relu_out", None)], [])
    result = run(saved(net))
    assert result.exit_code == 0
    assert "has no Conv" in result.stdout
    assert json.loads(run(saved(net), "--json").stdout)["totals"]["layers"] == 0


def test_weights_in_other_files_are_not_needed(tmp_path):
    net = small_net()
    onnx.save_model(
        net,
        str(tmp_path / "net.onnx"),
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    (tmp_path / "weights.bin").unlink()
    assert len(models.read(tmp_path / "net.onnx").layers) == 4


def test_without_the_package_its_name_is_told(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConvTypeError, match=r"pip install 'onnx>="):
        models.read(tmp_path / "net.onnx")


def test_errors_are_the_librarys():
    assert issubclass(ConvError, ValueError)
