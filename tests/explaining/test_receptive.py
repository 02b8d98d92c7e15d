"""Receptive fields of lists of layers, compared with the inputs that change an output."""

from __future__ import annotations

import random
from importlib import import_module

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.explaining import onnx_model, receptive
from tests.command import parsed, said


@pytest.mark.parametrize("seed", range(30))
def test_receptive_field_holds_all_inputs_that_change_an_output(seed):
    """Each input in turn is 1 and all taps are positive, so that every dependency is seen."""
    draw = random.Random(seed)
    size = 80
    data = np.eye(size)[:, None]
    layers = []
    for _ in range(draw.randint(1, 3)):
        taps, stride, dilation = draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 2)
        w, rules = np.ones((1, 1, taps)), {"stride": stride, "dilation": dilation, "padding": 1}
        is_transposed = draw.random() < 0.4 and data.shape[2] < 150
        shape, filter_shape = data.shape, w.shape
        if is_transposed:
            problem = ConvProblem.from_output(shape, filter_shape, **rules)
            data = cupyconv.conv_transpose(data, w, **rules)
        else:
            problem = ConvProblem(shape, filter_shape, **rules)
            data = cupyconv.conv_forward(data, w, **rules)
        layers.append((problem, is_transposed))
    (field,) = receptive.stacked(layers)
    fields = [np.flatnonzero(data[:, 0, output]) for output in range(data.shape[2])]
    whole = [one for one in fields if len(one) and one[0] > 0 and one[-1] < size - 1]
    assert max(one[-1] - one[0] + 1 for one in whole) == field.size


@pytest.mark.parametrize("seed", range(12))
def test_fields_of_a_branching_model_hold_all_inputs(seed, tmp_path):
    """The reference evaluator runs the model, whose two branches are added."""
    onnx = pytest.importorskip("onnx", reason="the onnx package is not installed")
    draw, size, nodes, stored = random.Random(seed), 60, [], []

    def layer(x: str, stride: int, operator: str) -> str:
        name, taps, gap = f"n{len(nodes)}", 1 + 2 * draw.randint(0, 1), draw.randint(1, 2)
        if operator == "ConvTranspose":
            taps, gap = draw.randint(1, 4), draw.randint(1, 3)
        w, keep = np.ones((1, 1, taps), np.float32), (taps - 1) * gap // 2
        rules = {"strides": [stride], "dilations": [gap], "pads": [keep, keep]}
        if operator == "AveragePool":
            rules |= {"kernel_shape": [taps], "dilations": [1], "pads": [taps // 2] * 2}
        else:
            stored.append(onnx.numpy_helper.from_array(w, f"w{name}"))
        inputs = [x] if operator == "AveragePool" else [x, f"w{name}"]
        nodes.append(onnx.helper.make_node(operator, inputs, [name], name=name, **rules))
        return name

    x, stride = "x", draw.randint(1, 2)
    for _ in range(2):
        left = layer(layer(x, stride, "Conv"), 1, draw.choice(("Conv", "AveragePool")))
        right = layer(x, stride, draw.choice(("Conv", "AveragePool")))
        nodes.append(onnx.helper.make_node("Add", [left, right], [f"{left}+"]))
        x = f"{left}+"
    is_transposed = draw.random() < 0.3
    last = layer(x, 2 if is_transposed else 1, "ConvTranspose" if is_transposed else "Conv")
    values = [
        onnx.helper.make_tensor_value_info(n, 1, s)
        for n, s in (("x", [size, 1, size]), (last, None))
    ]
    graph = onnx.helper.make_graph(nodes, "net", values[:1], values[1:], stored)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)])
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    (field,) = onnx_model.read(tmp_path / "net.onnx").layers[-1].fields
    data = np.eye(size, dtype=np.float32)[:, None]
    (y,) = import_module("onnx.reference").ReferenceEvaluator(model).run(None, {"x": data})
    fields = [np.flatnonzero(y[:, 0, output]) for output in range(y.shape[2])]
    whole = [one for one in fields if len(one) and one[0] > 0 and one[-1] < size - 1]
    most = max(one[-1] - one[0] + 1 for one in whole)
    assert field.size == most
    assert y.shape[2] == pytest.approx(size / field.step, abs=2)


def test_receptive_field_with_many_steps_is_not_computed():
    """A hundred thousand outputs would each visit as many taps."""
    (axis,) = ConvProblem((1, 1, 300_000), (1, 1, 100_000), stride=100_000).axes
    assert receptive.field([(axis, True)]) is None


def test_fields_end_behind_other_positions(tmp_path):
    """A product with a global mean depends on all inputs, so its field is unknown."""
    onnx = pytest.importorskip("onnx", reason="the onnx package is not installed")
    make = onnx.helper.make_node
    nodes = [
        make("Conv", ["x", "w"], ["a"], pads=[1, 1], strides=[2]),
        make("GlobalAveragePool", ["a"], ["mean"]),
        make("Mul", ["a", "mean"], ["b"]),
        make("Conv", ["b", "w"], ["c"], pads=[1, 1]),
    ]
    w = onnx.numpy_helper.from_array(np.ones((1, 1, 3), np.float32), "w")
    values = [
        onnx.helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [1, 1, 9]), ("c", None))
    ]
    graph = onnx.helper.make_graph(nodes, "net", values[:1], values[1:], [w])
    (tmp_path / "net.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    layers = parsed("model", tmp_path / "net.onnx")["layers"]
    fields = [layer["receptive_field"] for layer in layers]
    assert fields == [{"sizes": [3], "steps": [2.0]}, None]


def test_chained_layers_of_a_file_have_a_receptive_field(tmp_path):
    file = tmp_path / "layers.toml"
    first = '[[layer]]\ninput = "1x3x32x32"\nfilter = "8x3x3x3"\nstride = 2\npadding = 1\n'
    second = '[[layer]]\ninput = "1x8x16x16"\nfilter = "8x4x4x4"\nstride = 2\npadding = 1\n'
    file.write_text(f"{first}{second}transposed = true\n")
    words = ("shapes", "--config", file)
    text = " ".join(said(*words).split())
    assert "of an output of the 2 layers is at most 5 x 5 inputs; the fields of" in text
    assert "neighbouring outputs are 1 x 1 apart" in text
    assert parsed(*words)["receptive_field"] == {"sizes": [5, 5], "steps": [1, 1]}
    file.write_text(f"{first}{second.replace('1x8x16', '1x8x15')}transposed = true\n")
    assert "field of an output of the" not in said(*words)  # the layers are no chain
