"""Operators of ONNX Runtime in `cupyconv model`, compared with the standard operators of onnx."""

from __future__ import annotations

import json

import pytest

import cupyconv
from cupyconv.explaining import onnx_graph
from cupyconv.explaining import onnx_model as models
from cupyconv.problem import bytes_text, counted
from tests.command import run as run_command
from tests.explaining.test_model import build, listed, onnx, run, saved, value, weights

__all__ = ["saved"]  # a fixture

RUNTIME, NHWC = "com.microsoft", "com.ms.internal.nhwc"
SETTINGS = {"strides": [2, 1], "pads": [1, 0, 1, 2], "group": 2}


def runtime_net(operator, domain, inputs, stored=(), outputs=1, **attributes):
    """Return a model of one operator, whose outputs are y0, y1 and so on."""
    names = [f"y{number}" for number in range(outputs)]
    given = [one.name for one in (*inputs, *stored)]
    node = onnx.helper.make_node(operator, given, names, name="c", domain=domain, **attributes)
    net = build([node], list(inputs), list(stored))
    if domain:
        net.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    return net


def last(sizes):
    return (sizes[0], *sizes[2:], sizes[1])


@pytest.mark.parametrize(
    ("operator", "domain", "is_last", "w_last"),
    [
        ("FusedConv", RUNTIME, False, False),
        ("NhwcConv", RUNTIME, True, True),
        ("NhwcConv", RUNTIME, True, False),
        ("NhwcFusedConv", RUNTIME, True, True),
        ("NhwcFusedConv", RUNTIME, True, False),
        ("Conv", NHWC, True, False),
        ("ConvTranspose", NHWC, True, False),
    ],
)
@pytest.mark.parametrize("batch", [2, "N"])
def test_runtime_convolutions_match_the_standard_operator(
    saved, operator, domain, is_last, w_last, batch
):
    standard = "ConvTranspose" if operator == "ConvTranspose" else "Conv"
    x, w = (batch, 4, 9, 8), (4, 3, 3, 1) if standard == "ConvTranspose" else (6, 2, 3, 1)
    plain = models.read(
        saved(runtime_net(standard, "", [value("x", x)], [weights("w", w)], **SETTINGS)),
        open_sizes=True,
    ).nodes[0]
    stored = [weights("w", last(w) if w_last else w), weights("b", plain.output_shape[1:2])]
    inputs = [value("x", last(x) if is_last else x)]
    fused = {**SETTINGS, "activation": "Clip", "activation_params": [0.0, 6.0]}
    net = runtime_net(operator, domain, inputs, stored, **fused)
    net.graph.node[0].input.append("z")
    net.graph.input.append(value("z", last(plain.output_shape) if is_last else plain.output_shape))
    (found,) = models.read(saved(net), open_sizes=True).nodes
    assert found.operator == f"{operator} of {domain}"
    assert found.parameters == plain.parameters + plain.output_shape[1]
    order = last if is_last else tuple
    assert found.input_shape == order(plain.input_shape)
    assert found.output_shape == order(plain.output_shape)
    traversal = onnx_graph.Traversal(onnx, net, {})
    (visit,) = traversal.visits()
    assert visit.scope["y0"].shape[1:] == found.output_shape[1:]
    assert "stride 2x1" in found.settings
    assert "padding 1,0:2" in found.settings
    assert "groups 2" in found.settings
    if batch == "N":
        return
    assert found.problem.filter_shape == tuple(stored[0].dims)
    assert found.problem.flops == plain.problem.flops
    assert found.notes == ("adds z", "applies Clip")
    path = saved(net)
    (layer,) = json.loads(run(path, "--json").stdout)["layers"]
    assert (layer["adds"], layer["activation"]) == ("z", "Clip")
    assert layer["shapes"]["db"] == [plain.output_shape[1]]
    for command in ("explain", "shapes", "plan"):
        result = run_command(command, "--model", path, "--layer", "c")
        assert result.exit_code == 0, result.output


BYTES = [value("x", (1, 4, 9, 8), 2), *(value(n, (), k) for n, k in (("s", 1), ("z", 2)))]


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "shape"),
    [
        ("QLinearAdd", ["x", "s", "z", "x1", "s", "z", "s", "z"], {}, (1, 4, 9, 8)),
        ("QLinearMul", ["x1", "s", "z", "x", "s", "z", "s", "z"], {}, (1, 4, 9, 8)),
        ("QLinearConcat", ["s", "z", "x", "s", "z", "x", "s", "z"], {"axis": 1}, (1, 8, 9, 8)),
        ("QLinearSigmoid", ["x", "s", "z", "s", "z"], {}, (1, 4, 9, 8)),
        ("QLinearGlobalAveragePool", ["x", "s", "z", "s", "z"], {}, (1, 4, 1, 1)),
        (
            "QLinearGlobalAveragePool",
            ["x", "s", "z", "s", "z"],
            {"channels_last": 1},
            (1, 1, 1, 8),
        ),
        ("QLinearAveragePool", ["x", "s", "z", "s", "z"], {"kernel_shape": [2, 3]}, (1, 4, 8, 6)),
        ("NhwcMaxPool", ["x"], {"kernel_shape": [2, 3]}, (1, 3, 7, 8)),
        ("QLinearConv", ["x", "s", "z", "w", "s", "z", "s", "z"], {}, (1, 5, 7, 7)),
        (
            "QLinearConv",
            ["x", "s", "z", "v", "s", "z", "s", "z"],
            {"channels_last": 1},
            (1, 2, 8, 5),
        ),
        (
            "QLinearConvTranspose",
            ["x", "s", "z", "t", "s", "z", "s", "z"],
            {"strides": [2, 2]},
            (1, 5, 19, 16),
        ),
        ("DequantizeLinear", ["x", "s", "z"], {}, (1, 4, 9, 8)),
        ("Gelu", ["x"], {}, (1, 4, 9, 8)),
    ],
)
def test_shapes_are_known_after_runtime_operators(saved, operator, inputs, attributes, shape):
    """The shapes follow from the operators' definitions; a float convolution comes after each."""
    helper = onnx.helper
    nodes = [
        helper.make_node(operator, inputs, ["y"], domain=RUNTIME, **attributes),
        helper.make_node("Cast", ["y"], ["f"], to=1),
        helper.make_node("Conv", ["f", "one"], ["last"], name="next"),
    ]
    sizes = {"w": (5, 4, 3, 2), "v": (5, 8, 3, 2), "t": (4, 5, 3, 2)}
    stored = [weights(name, dims, "uint8") for name, dims in sizes.items()]
    stored.append(weights("one", (1, shape[1], 1, 1)))
    net = build(nodes, [*BYTES, value("x1", (4, 1, 1), 2)], stored)
    net.opset_import.append(helper.make_opsetid(RUNTIME, 1))
    read = models.read(saved(net))
    assert read.layers[-1].input_shape == shape
    if "Conv" in operator:
        (left,) = read.left_out
        assert left.output_shape == shape
        assert "quantized integers" in left.reason


def test_filter_order_of_a_runtime_layer_fits_its_attributes(saved):
    """Both orders fit the channels of x; kernel_shape decides."""
    stored = [weights("w", (6, 2, 3, 2))]
    for kernel, rows in (([3, 2], 3), ([2, 3], 2)):
        net = runtime_net(
            "NhwcConv", RUNTIME, [value("x", (1, 9, 8, 2))], stored, kernel_shape=kernel
        )
        (layer,) = models.read(saved(net)).layers
        assert layer.problem.filter_sizes == tuple(kernel)
        assert layer.output_shape == (1, 10 - rows, 9 - kernel[1], 6)


def test_attributes_of_layers_of_unknown_size_are_listed(saved):
    x, w = value("x", ("N", 4, "H", "W")), weights("w", (6, 2, 3, 3))
    settings = {"dilations": [2, 3], "auto_pad": "SAME_UPPER", "strides": [2, 1], "group": 2}
    path = saved(runtime_net("Conv", "", [x], [w], **settings))
    text = "stride 2x1, dilation 2x3, groups 2, auto_pad SAME_UPPER"
    (layer,) = models.read(path, open_sizes=True).unknown
    assert layer.settings == text
    assert "stride 2x1," in listed(path)
    (found,) = json.loads(run(path, "--json").stdout)["unknown"]
    assert found["attributes"] == settings
    settings = {"kernel_shape": [3, 2], "output_padding": [1, 0], "output_shape": [9, 9]}
    path = saved(runtime_net("ConvTranspose", "", [x, value("f", None)], **settings))
    text = "ConvTranspose, output_padding 1x0, kernel_shape 3x2, output_shape 9x9"
    assert models.read(path, open_sizes=True).unknown[0].settings == text


@pytest.mark.parametrize("batch", [1, "N"])
def test_pads_beside_auto_pad_are_rejected(saved, batch):
    settings = {"auto_pad": "VALID", "pads": [1, 1, 1, 1]}
    x = value("x", (batch, 4, 9, 9))
    path = saved(runtime_net("Conv", "", [x], [weights("w", (6, 4, 3, 3))], **settings))
    result = run(path)
    assert result.exit_code == 2
    assert "c: pads must not be combined with an auto_pad other than NOTSET" in result.stderr


def test_workspace_larger_than_the_tensors_is_named(saved, tmp_path):
    """cuda-columns stores one product per pixel of y and element of a filter for dx."""
    stored = [weights("w", (64, 16, 5, 5, 5)), weights("v", (1, 64, 1, 1, 1))]
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["h"], name="wide", pads=[2] * 6),
        onnx.helper.make_node("Conv", ["h", "v"], ["y"], name="thin"),
    ]
    path = saved(build(nodes, [value("x", (2, 16, 16, 16, 16))], stored))
    layers = models.read(path).layers
    plans = [(layer.problem, cupyconv.plan(layer.problem, "sm_80")) for layer in layers]
    large = [one for problem, p in plans for one in p if one.workspace_bytes > problem.bytes]
    most = max(large, key=lambda planned: planned.workspace_bytes)
    page = tmp_path / "net.html"
    assert run(path, "--html", str(page), "--device", "sm_80").exit_code == 0
    texts = [
        listed(path, "--device", "sm_80"),
        run_command("plan", "--model", path, "--layer", "wide", "--device", "sm_80").stdout,
        run_command("plan", "--model", path, "--device", "sm_80").stdout,
        page.read_text(),
    ]
    size = bytes_text(most.workspace_bytes)
    for text in texts:
        said = f"{most.pass_} needs {size} of workspace on sm_80, more than x, w and y together"
        assert said in " ".join(text.split())
        assert "cupyconv.workspace_limit" in text
    assert f"{counted(len(large) - 1, 'other pass', 'other passes')} " in " ".join(texts[2].split())
    limited = cupyconv.plan(layers[0].problem, "sm_80", workspace_limit=layers[0].problem.bytes)
    assert all(one.workspace_bytes <= layers[0].problem.bytes for one in limited)
    assert "cupyconv.workspace_limit" not in listed(path, "--device", "cpu")
