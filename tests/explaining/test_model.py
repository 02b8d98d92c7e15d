"""`cupyconv model`: the convolutions of ONNX files, compared with onnx's reference evaluator."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sys
import time
import zipfile
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvTypeError
from cupyconv.explaining import onnx_file
from cupyconv.explaining import onnx_model as models
from cupyconv.problem import shape_text
from tests import command

onnx = pytest.importorskip("onnx", reason="the onnx package is not installed")


run, refused = (partial(function, "model") for function in (command.run, command.refused))


def listed(*args: str) -> str:
    """Return the output of ``cupyconv model`` without line breaks."""
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return " ".join(result.stdout.split())


def value(name: str, shape, kind: int = 1):
    return onnx.helper.make_tensor_value_info(name, kind, shape)


def weights(name: str, shape, dtype: str = "float32"):
    array = np.random.default_rng(0).integers(-2, 3, shape).astype(dtype)
    return onnx.numpy_helper.from_array(array, name)


def build(nodes, inputs, initializers=(), outputs=None):
    """Return a model; its default output is that of the last node."""
    outputs = outputs or [value(nodes[-1].output[0], None)]
    graph = onnx.helper.make_graph(nodes, "net", inputs, outputs, initializers)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])


def node(operator: str, inputs, name: str, **attributes):
    return onnx.helper.make_node(operator, inputs, [f"{name}_out"], name=name, **attributes)


def small_net(shape=(1, 3, 32, 32)):
    """Return a model of four layers: strided with bias, depthwise, dilated and transposed."""
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
    return build(nodes, [value("data", shape)], initializers)


@pytest.fixture
def saved(tmp_path):
    def save(model) -> str:
        path = tmp_path / "net.onnx"
        path.write_bytes(model.SerializeToString())
        return str(path)

    return save


def test_layer_shapes_match_onnxs_evaluator(saved):
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


def test_text_and_json_report_layers_and_totals(saved):
    path = saved(small_net())
    result = run(path)
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "inputs: data 1x3x32x32" in text
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
def test_lines_fit_the_terminal(saved, width):
    result = run(saved(small_net()), COLUMNS=width)
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
def test_transposed_layers_match_onnxs_evaluator(saved, attributes):
    up = node("ConvTranspose", ["x", "w"], "up", **attributes)
    w = weights("w", (3, 2, 3, 3))
    net = build([up], [value("x", (2, 3, 5, 5))], [w])
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


def test_output_shape_without_auto_pad_crops_more_at_the_start(saved):
    # ONNX specifies this, but its reference evaluator does not support it.
    up = node("ConvTranspose", ["x", "w"], "up", strides=[2, 2], output_shape=[9, 10])
    net = build([up], [value("x", (2, 3, 5, 5))], [weights("w", (3, 2, 3, 3))])
    (layer,) = models.read(saved(net)).layers
    assert layer.output_shape == (2, 2, 9, 10)
    assert layer.problem.padding == ((1, 1), (1, 0))


def test_negative_sizes_of_inputs_and_outputs_are_unknown(saved):
    """PaddlePaddle exports unknown sizes as -1."""
    named, negative = small_net(("N", 3, "H", "W")), small_net((-1, 3, -1, -1))
    negative.graph.output[0].CopyFrom(value("up_out", (-1, 4, -1, -1)))
    hints = [listed(saved(net)).partition("for example")[2] for net in (named, negative)]
    assert hints[0] == hints[1]
    given = ("--input", "data=2x3x64x48", "--json")
    assert run(saved(named), *given).stdout == run(saved(negative), *given).stdout


def test_missing_input_sizes_are_requested_and_accepted(saved):
    path = saved(small_net(("N", 3, "H", "W")))
    line = listed(path)
    assert "N x 3 x H x W * 8x3x3x3" in line
    assert "-> N x 8 x ? x ?" in line
    assert "4 layers of unknown size; the first: stem reads data of N x 3 x H x W" in line
    assert "for example --input data=1x3x224x224" in line
    refusal = command.run("shapes", "--model", path)
    assert refusal.exit_code == 2
    assert "for example --input data=1x3x224x224" in refusal.stderr
    result = run(path, "--input", "data=2x3x64x48", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["layers"][0]["shapes"]["y"] == [2, 8, 32, 24]


def net_with_a_shape_of_data():
    """Return a model whose second layer has an input shape that is known only at run time."""
    nodes = [
        node("Conv", ["x", "w1"], "first", pads=[1, 1, 1, 1]),
        node("Reshape", ["first_out", "sizes"], "turn"),
        node("Conv", ["turn_out", "w2"], "second"),
    ]
    inputs = [value("x", (1, 3, 8, 8)), value("sizes", (4,), 7)]
    initializers = [weights("w1", (4, 3, 3, 3)), weights("w2", (5, 2, 3, 3))]
    return build(nodes, inputs, initializers)


def test_layer_of_unknown_size_does_not_hide_others(saved):
    path = saved(net_with_a_shape_of_data())
    result = run(path)
    assert result.exit_code == 0, result.output
    assert "1x3x8x8 * 4x3x3x3" in result.stdout
    assert "1 of 2 convolutions (1 of unknown size), 198 weights" in result.stdout
    words = " ".join(result.stdout.split())
    assert "1 layer of unknown size: second reads turn_out of ?x?x?x?." in words
    assert "--input 'turn_out=?x2x?x?' with a number for each ?" in words
    found = json.loads(run(path, "--json").stdout)
    assert [layer["name"] for layer in found["unknown"]] == ["second"]
    whole = json.loads(run(path, "--input", "turn_out=1x2x8x16", "--json").stdout)
    assert whole["unknown"] == []
    assert whole["layers"][1]["shapes"]["y"] == [1, 5, 6, 14]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("image=1x3x8x8", "model's inputs are data"),
        ("data=1x3x8", "Give 4 sizes"),
        ("data=1x4x8x8", "Keep 3"),
        ("data", "a name and a shape"),
        ("data=1x3xHxW", "a name and a shape"),
    ],
)
def test_wrong_input_sizes_are_rejected(saved, given, said):
    assert said in refused(saved(small_net(("N", 3, "H", "W"))), "--input", given)


def test_open_sizes_are_set_by_name(saved):
    path = saved(small_net(("N", 3, "H", "W")))
    found = json.loads(run(path, "--input", "N=2", "--json").stdout)
    assert found["layers"] == []
    assert found["unknown"][0]["shapes"]["x"] == [2, 3, "H", "W"]
    sizes = ("--input", "N=2", "--input", "H=64", "--input", "W=48")
    whole = json.loads(run(path, *sizes, "--json").stdout)
    assert whole == json.loads(run(path, "--input", "data=2x3x64x48", "--json").stdout)
    assert "its unknown sizes are N, H, W" in refused(path, "--input", "M=2")
    words = ("--model", saved(small_net(("N", 3, 64, 48))), "--layer", "stem", "--input", "N=2")
    assert "x 2x3x64x48" in command.run("explain", *words).stdout


def test_known_sizes_of_open_layers_equal_those_of_closed_ones(saved):
    """Every size of y that is shown is the size that the layer has once all sizes are given."""
    opened = models.read(saved(small_net(("N", 3, 64, "W"))), open_sizes=True)
    closed = models.read(saved(small_net((2, 3, 64, 48))))
    assert len(opened.unknown) == len(closed.layers) == 4
    for one, other in zip(opened.unknown, closed.layers, strict=True):
        assert one.filter_shape == other.problem.filter_shape
        inputs, outputs = (
            (one.input_shape, other.input_shape),
            (one.output_shape, other.output_shape),
        )
        for shown, known in (inputs, outputs):
            assert [isinstance(size, int) for size in shown] == [False, True, True, False]
            assert shown[1:3] == known[1:3]
    assert opened.parameters == closed.parameters


def test_page_explains_every_layer(saved, tmp_path):
    page = tmp_path / "net.html"
    result = run(saved(small_net()), "--html", str(page))
    assert "saved to" in result.stdout
    text = page.read_text()
    for layer in models.read(saved(small_net())).layers:
        assert f"<b>{layer.name}</b>" in text
        assert (
            f"-&gt; {shape_text(layer.output_shape)}" in text
            or f"-> {shape_text(layer.output_shape)}" in text
        )
    assert text.count("<details>") == 4
    assert "Why dx is" in text
    assert text.count("The transposed layer<") == 1
    assert "http" not in text.replace("http-equiv", "")
    assert "--html must be the path of a .html" in refused(
        saved(small_net()), "--html", str(tmp_path / "net.txt")
    )


@pytest.mark.parametrize("word", ["plan", "shapes"])
def test_layers_of_unknown_size_are_reported_as_left_out(saved, word):
    given = (word, "--model", saved(net_with_a_shape_of_data()))
    text = command.run(*given).stdout
    assert "1 node of the model left out" in text
    assert "second: " in text
    found = json.loads(command.run(*given, "--json").stdout)
    assert len(found["layers"]) == len(found["left_out"]) == 1


def test_layers_can_be_sorted_truncated_and_written(saved, tmp_path):
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


def test_explain_accepts_a_layer_of_a_model(saved):
    def explained(*args: str):
        return command.run("explain", *args)

    path = saved(small_net())
    result = explained("--model", path, "--layer", "dilated")
    assert result.stdout.startswith("dilated: Conv of net.onnx\n")
    assert "x 1x8x16x16 * w 6x8x3x3 -> y 1x6x15x13" in result.stdout
    up = explained("--model", path, "--layer", "up", "--json")
    (layer,) = json.loads(up.stdout)["layers"]
    assert layer["shapes"]["y"] == [1, 4, 31, 26]
    assert "Did you mean 'dilated'?" in explained("--model", path, "--layer", "dilate").stderr
    opened = saved(small_net(("N", 3, "H", "W")))
    result = explained("--model", opened, "--layer", "stem", "--input", "data=1x3x32x32")
    assert "x 1x3x32x32" in result.stdout
    assert "--input data=1x3x224x224" in explained("--model", opened, "--layer", "stem").stderr
    assert "cannot be combined" in explained("--model", path, "--preset", "same-stride").stderr


def test_damaged_files_are_rejected(tmp_path, saved):
    whole = Path(saved(small_net())).read_bytes()
    broken = tmp_path / "broken.onnx"
    for content in (whole[: len(whole) // 2], whole[:40], whole[4:]):
        broken.write_bytes(content)
        assert "a model must be a complete ONNX file" in refused(str(broken))
    assert "No such file" in refused(str(tmp_path / "none.onnx"))


def zipped(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        packed.writestr(name, content)
    return buffer.getvalue()


def pytorch_file(**options) -> bytes:
    torch = pytest.importorskip("torch")
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(3)}, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Run git lfs pull"),
        (pytorch_file, "is a PyTorch file. Export the model from PyTorch with torch.onnx.export"),
        (partial(pytorch_file, _use_new_zipfile_serialization=False), "is a Python pickle"),
        (partial(zipped, "net.onnx", b"\x08\x08"), "is a ZIP archive. Unpack it first"),
        (gzip.compress(b"\x08\x08"), "is compressed with gzip"),
        (bz2.compress(b"\x08\x08"), "is compressed with bzip2"),
        (lzma.compress(b"\x08\x08"), "is compressed with xz"),
        (json.dumps({"modelTopology": {}}).encode(), "is JSON text"),
        (b"\xef\xbb\xbf[1, 2]", "is JSON text"),
        (b"\n<!DOCTYPE html><html></html>", "is an HTML page. Download the file itself"),
        (b'<?xml version="1.0"?><net name="a"/>', "is XML text"),
        (b"\x20\0\0\0TFL3\x14\0\x20\0", "is a TensorFlow Lite model"),
        (b"\x20\0\0\0ORTM\x14\0\x20\0", "is in the ORT format"),
        (b"\x40\0\0\0\0\0\0\0" + b'{"w":{"dtype":"F32"}}' + bytes(40), "is a safetensors file"),
        (b"\x08\1\x12\x12\n\x10\x12\7\n\5\n\3Add\x22\5serve", "is a TensorFlow SavedModel"),
        (b"\n\x13\n\1x\x12\x0bPlaceholder*\1a", "is a TensorFlow graph"),
        (b"\x89HDF\r\n\x1a\n\0", "is an HDF5 file"),
        (b"GGUF\3\0\0\0", "is a GGUF file"),
        (b"not a model at all", "is a text file"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_files_of_other_kinds_are_named(tmp_path, content, said):
    path = tmp_path / "model.onnx"
    path.write_bytes(content if isinstance(content, bytes) else content())
    for line in (refused(str(path)), command.refused("shapes", "--model", path)):
        assert said in line
        assert "a model must be a complete ONNX file" in line
        assert "Wire format" not in line


@pytest.mark.parametrize("head", [b"\x08\x08", b"\x20\0\0\0TFL3"])
def test_file_larger_than_protobuf_allows_is_not_read(tmp_path, monkeypatch, head):
    path = tmp_path / "large.onnx"
    path.write_bytes(head)
    os.truncate(path, 1 << 31)  # takes no space on the disk
    begin = time.perf_counter()
    line = refused(str(path))
    assert time.perf_counter() - begin < 2
    limit = "must have at most 2.0 GiB, the limit of protobuf"
    assert ("is a TensorFlow Lite model" if b"TFL3" in head else limit) in line
    monkeypatch.setattr(onnx_file, "MOST_BYTES", 1000)
    result = command.run("model", "-", given=bytes(1001))
    assert (result.exit_code, "- has more" in result.stderr) == (2, True)
    whole = small_net().SerializeToString()
    monkeypatch.setattr(onnx_file, "MOST_BYTES", len(whole))
    assert "4 convolutions" in command.said("model", "-", given=whole)


@pytest.mark.parametrize("version", [11, 17, 22])
def test_convolutions_inside_functions_are_listed(saved, version):
    """The model defines a function that passes its attribute on to a Conv."""
    helper = onnx.helper
    opset, own = helper.make_opsetid("", 17), helper.make_opsetid("", version)
    inner = helper.make_node("Conv", ["a", "b"], ["c"], name="inner")
    strides = onnx.AttributeProto(name="strides", ref_attr_name="s", type=onnx.AttributeProto.INTS)
    inner.attribute.append(strides)
    block = helper.make_function("own", "Block", ["a", "b"], ["c"], [inner], [own], ["s"])
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


def test_function_with_an_older_form_of_an_operator_is_refused(saved):
    """Squeeze takes its axes as an input since version 13."""
    helper = onnx.helper
    squeeze = helper.make_node("Squeeze", ["a"], ["b"], axes=[0])
    old = helper.make_function("own", "Old", ["a"], ["b"], [squeeze], [helper.make_opsetid("", 11)])
    call = helper.make_node("Old", ["x"], ["h"], domain="own")
    layer = node("Conv", ["h", "w"], "c")
    net = build([call, layer], [value("x", (1, 4, 9, 9))], [weights("w", (4, 4, 3, 3))])
    net.functions.append(old)
    net.opset_import.append(helper.make_opsetid("own", 1))
    text = command.refused("model", saved(net))
    assert "uses ai.onnx 17, own 1, and its function 'Old' uses ai.onnx 11" in text


def test_branches_have_separate_weights(saved):
    """Both branches name their weights w; the shapes differ, and one tensor is sparse."""
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
    net = build([either], [value("x", (1, 2, 9, 9)), value("which", (), 9)], [])
    shapes = {layer.name: layer.output_shape for layer in models.read(saved(net)).layers}
    assert shapes == {"dense": (1, 4, 7, 7), "sparse": (1, 6, 5, 5)}


def test_model_without_convolutions_is_reported(saved):
    net = build([node("Relu", ["x"], "relu")], [value("x", (1, 2))], [])
    result = run(saved(net))
    assert result.exit_code == 0
    assert "has no Conv" in result.stdout
    assert json.loads(run(saved(net), "--json").stdout)["totals"]["layers"] == 0


def test_external_weights_are_not_read(tmp_path):
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


def test_missing_onnx_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConvTypeError, match=r"pip install 'onnx>="):
        models.read(tmp_path / "net.onnx")


@pytest.mark.parametrize(("opset", "domain"), [(11, ""), (13, ""), (13, "ai.onnx")])
def test_sizes_are_computed_with_the_operators_of_the_model(saved, opset, domain):
    """Unsqueeze took its axes as an attribute before opset 13."""
    helper = onnx.helper
    numbers = {"first": [0], "rest": [2, 2, 6, 6], "axes": [0], "back": [0, -1, 6, 6]}
    stored = [helper.make_tensor(name, 7, [len(v)], v) for name, v in numbers.items()]
    made = {"domain": domain} if domain else {}
    unsqueeze = (
        helper.make_node("Unsqueeze", ["size"], ["batch"], axes=[0], **made)
        if opset < 13
        else helper.make_node("Unsqueeze", ["size", "axes"], ["batch"], **made)
    )
    steps = [
        helper.make_node("Shape", ["x"], ["shape"], **made),
        helper.make_node("Gather", ["shape", "index"], ["size"], axis=0, **made),
        unsqueeze,
        helper.make_node("Concat", ["batch", "rest"], ["split"], axis=0, **made),
        helper.make_node("Reshape", ["x", "split"], ["r"], **made),
        helper.make_node("Transpose", ["r"], ["t"], perm=[0, 2, 1, 3, 4], **made),
        helper.make_node("Reshape", ["t", "back"], ["q"], **made),
        helper.make_node("Conv", ["q", "w"], ["y"], pads=[1, 1, 1, 1], **made),
    ]
    stored += [helper.make_tensor("index", 7, [], [0]), weights("w", (8, 4, 3, 3))]
    net = build(steps, [value("x", (1, 4, 6, 6))], stored)
    net.opset_import[0].version, net.opset_import[0].domain = opset, domain
    (layer,) = models.read(saved(net)).layers
    assert (layer.input_shape, layer.output_shape) == ((1, 4, 6, 6), (1, 8, 6, 6))


def test_example_is_a_size_that_the_whole_model_accepts(saved):
    """The model makes channels of 48 rows."""
    steps = [
        node("Conv", ["x", "w"], "first", pads=[1, 1, 1, 1]),
        node("Reshape", ["first_out", "lines"], "lines"),
        node("Conv", ["lines_out", "v"], "second"),
    ]
    stored = [weights("w", (4, 3, 3, 3)), weights("v", (2, 192, 1, 1))]
    stored.append(onnx.helper.make_tensor("lines", 7, [4], [1, 192, 1, -1]))
    path = saved(build(steps, [value("x", (1, 3, -1, -1))], stored))
    text = listed(path)
    assert "for example --input x=1x3x48x320" in text
    assert "2 convolutions" in listed(path, "--input", "x=1x3x48x320")


def test_one_named_size_is_suggested_by_its_name(saved):
    net = small_net(("batch", 3, 32, 32))
    assert "for example --input batch=1" in listed(saved(net))
    assert "inputs: data batch x 3 x 32 x 32" in listed(saved(net))


def test_size_named_inside_the_model_can_be_set(saved):
    steps = [node("Custom", ["x"], "odd", domain="other"), node("Conv", ["odd_out", "w"], "conv")]
    net = build(steps, [value("x", (1, 3, 8, 8))], [weights("w", (4, 3, 3, 3))])
    net.opset_import.append(onnx.helper.make_opsetid("other", 1))
    net.graph.value_info.append(value("odd_out", (1, 3, "rows", 8)))
    assert "1 x 3 x rows x 8" in listed(saved(net))
    assert "-> 1x4x4x6" in listed(saved(net), "--input", "rows=6")
