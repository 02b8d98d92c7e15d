"""Names and values of other libraries: messages answer with the names and values of cupyconv."""

from __future__ import annotations

import shlex
from importlib import import_module

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, CupyconvError, cudnn, onnx, raw_ops
from cupyconv.bench import ceilings
from tests.command import refused, run, said
from tests.layer_functions import WAYS

pytestmark = pytest.mark.quick

X, W, V = np.ones((1, 3, 9, 9)), np.ones((4, 3, 5, 3)), np.ones((1, 4, 9, 9))
ONES = np.ones((1, 1, 2, 2))

PYTHON = {
    # padding modes
    "ConvProblem(X.shape, W.shape, padding='SAME_UPPER')": 'Use padding="same"',
    "ConvProblem(X.shape, W.shape, padding='causal')": "Use padding=((4, 0), (2, 0))",
    "ConvProblem(X.shape, W.shape, padding='full', dilation=2)": "Use padding=(8, 4)",
    "cupyconv.conv_transpose(V, W, padding='causal')": "Known: 'valid', 'same', 'same_lower'",
    "cupyconv.conv_transpose(V, W, padding='reflect')": "not values of the input: got 'reflect'",
    "cudnn.convolution_forward(X, W, None, V, 'full', 1, 1, 1, auto_tune=False, tensor_core='auto')"
    "": "Use pad=(4, 2)",
    "raw_ops.Conv2D(input=X, filter=W, strides=[1, 1, 1, 1], padding='SAME_LOWER')"
    "": "'SAME_LOWER'. Known: 'SAME', 'VALID', 'EXPLICIT'",
    "torch.conv2d(T(X), T(W), padding='same_lower')": "'same_lower'. Known: 'valid', 'same'",
    "torch.conv2d(T(X), T(W), padding='SAME')": "Did you mean 'same'?",
    "torch.conv2d(T(X), T(W), padding='reflect')": "torch.nn.functional.pad(input, ..., mode='refl",
    "torch.conv2d(T(X), T(W), padding='causal')": "Pad the input with ((4, 0), (2, 0)) zeros",
    "torch.conv_transpose2d(T(X), T(X), padding='same')": "call cupyconv.conv_transpose, which",
    # padding of a transposed convolution
    "cupyconv.conv_transpose(ONES, ONES, stride=2, padding=2)": "Pad by at most 3 in total",
    "torch.conv_transpose2d(T(ONES), T(ONES), stride=2, padding=2)": "Pad by at most 3 in total",
    "onnx.conv_transpose(ONES, ONES, strides=[2, 2], pads=[2] * 4)": "Pad by at most 3 in total",
    # numbers of padding entries
    "ConvProblem(X.shape, W.shape, padding=[1, 0, 1, 0])": "Use padding=((1, 0), (1, 0)), or use "
    "padding=((1, 1), (0, 0))",
    "ConvProblem(X.shape, W.shape, padding=[(1, 2)])": "Use padding=((1, 2), (1, 2))",
    "ConvProblem(X.shape, W.shape, padding=[(0, 0), (0, 0), (1, 2), (2, 1)])": "Use padding=((1, 2"
    "), (2, 1))",
    "ConvProblem((1, 3, 9), (4, 3, 3), padding=[2, 0])": "Use padding=((2, 0),)",
    # ONNX's two attributes for padding
    "onnx.conv(X, W, auto_pad='VALID', pads=[1, 1, 1, 1])": "pads must not be combined",
    "onnx.conv(X, W, auto_pad='SAME_UPPER', pads=[0, 0, 0, 0])": "Remove one of them",
    "onnx.conv_transpose(V, W, auto_pad='SAME_LOWER', pads=[1] * 4)": "auto_pad='SAME_LOWER' and",
    # names of arguments
    "ConvProblem(X.shape, W.shape, strides=2)": "ConvProblem must be called with its own arguments:"
    " got strides. Use stride instead of strides",
    "ConvProblem(X.shape, kernel_size=3)": "Use filter_shape instead of kernel_size",
    "ConvProblem.from_output(V.shape, W.shape, pads=1)": "from_output must be called with its own",
    "ConvProblem(X.shape, W.shape).replace(group=1)": "Use groups instead of group",
    "cupyconv.conv_forward(X, W, strides=2, pad=1)": "got strides, pad. Use stride instead of "
    "strides. Use padding instead of pad",
    "cupyconv.conv_forward(X, W, kernel_size=3)": "Leave out kernel_size, which follows from w",
    "cupyconv.conv_forward(X, W, zzz=3)": "got zzz. Known: x, w, bias, stride, padding, dilation",
    "cupyconv.conv_backprop_input(X.shape, W, V, rate=2)": "Use dilation instead of rate",
    "cupyconv.conv_backprop_filter(X, W.shape, V, kernel_shape=3)": "Use filter_shape instead",
    "cupyconv.conv_backprop_bias(V, format='NHWC')": "Use data_format instead of format",
    "cupyconv.conv_backward(X, W, V, pads=1)": "Use padding instead of pads",
    "cupyconv.conv_transpose(V, W, output_size=1)": "Use output_shape instead of output_size",
    "cupyconv.plan(ConvProblem(X.shape, W.shape), card='L4')": "Use device instead of card",
    "onnx.conv(X, W, stride=[2, 2])": "Use strides instead of stride",
    "onnx.conv_problem(X.shape, W.shape, padding=1)": "Use pads instead of padding",
    "raw_ops.Conv2D(input=X, filter=W, stride=1, padding='SAME')": "Use strides instead of stride",
    "cudnn.convolution_forward(X, W, None, V, padding=1)": "Use pad instead of padding",
    "torch.conv2d(T(X), T(W), strides=2)": "Use stride instead of strides",
    "dask.conv_forward(X, W, strides=2)": "Use stride instead of strides",
}
"""End of the message, or a part that is specific to it, keyed by the call."""

COMMANDS = {
    "shapes 1x3x9x9 4x3x3x3 --padding same-upper": "Use --padding same",
    "shapes 1x3x9x9 4x3x3x3 --padding causal": "Use --padding 2:0,2:0",
    "shapes 1x3x9x9 4x3x3x3 --padding 1,0,1,0": "Use --padding 1:0,1:0, or use --padding 1:1,0:0",
    "shapes 1x3x9x9 4x3x3x3 --strides 2": "No such option '--strides'. Use --stride (see",
    "grads 1x3x9x9 4x3x3x3 --dilation-rate 2": "Use --dilation",
    "shapes --kernel-size 3": "Use --filter",
    "shapes --kernel 3": "Use --filter",
    "shapes --layout NHWC": "Use --data-format",
    "plan 1x3x9x9 4x3x3x3 --device 'GTX 1080 Ti'": "GTX 1080 Ti has 6.1",
    # shapes
    "shapes Nx5xHx8 2x5x3x3": "every size of --input must be a number: got 'Nx5xHx8'. Write "
    "a number instead of N and H",
    "'(1, 5, None, 8)' 2x5x3x3": "Write a number instead of None",
    "shapes 1x5x8x8 Kx5x3x3": "every size of --filter must be a number",
    "shapes 1x5x8x8 2x5xx3": "the short form must have two shapes",
    "shapes --input '1 5,8,8' --filter 2x5x3": "--input must be a shape",
}
"""Part of the message, keyed by the command line."""


@pytest.mark.parametrize("call", PYTHON)
def test_calls_are_answered_in_the_words_of_cupyconv(call):
    known = {"ConvProblem": ConvProblem, "cupyconv": cupyconv, "cudnn": cudnn, "onnx": onnx}
    known |= {"raw_ops": raw_ops, "X": X, "W": W, "V": V, "ONES": ONES}
    library = call.partition(".")[0]
    if library in ("torch", "dask"):
        known["T"] = getattr(pytest.importorskip(library), "tensor", None)
        known[library] = import_module(f"cupyconv.{library}")
    with pytest.raises(CupyconvError) as caught:
        eval(call, known)
    assert PYTHON[call] in str(caught.value)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_function_lists_its_arguments(way):
    with pytest.raises(ConvTypeError, match=r"must be called with its own .*: got nonsense. Known"):
        way.call(**way.valid(), nonsense=1)


@pytest.mark.parametrize(
    "shapes",
    [
        "Nx5x9x8 2x5x3x3",
        "'(None, 5, 9, 8)' 2x5x3x3",
        "?x5x9x8 2x5x3x3",
        "(1,5,9,8) (2,5,3,3)",
        "[1,5,9,8] [2,5,3,3,] --stride '(1, 1)' --padding [0,0]",
        "'TensorShape([1, 5, 9, 8])' '2 x 5 x 3 x 3'",
        "'torch.Size([1, 5, 9, 8])' '2, 5, 3, 3'",
    ],
)
def test_shapes_are_read_as_programs_print_them(shapes):
    assert run("shapes", *shlex.split(shapes)).stdout.startswith("1x5x9x8 * 2x5x3x3 -> 1x2x7x6")
    assert run(*shlex.split(shapes)).exit_code == 0


NOTES = {
    "Nx5x9x8 2x5x3x3": "note: the batch size is unknown, so it was read as 1",
    "1x3x32x32 3x3x3x16": "read as 3x16 with O = 3 (OIHW). If it is 3x3 with O = 16 (HWIO), use "
    "--filter-format HWIO",
    "1x3x9x9x20 3x3x3x3x16": "If it is 3x3x3 with O = 16 (DHWIO), use --filter-format DHWIO",
    "1x8x8x3 3x3x3x16 --data-format NHWC": "",
    "1x20x9x3 16x3x3x3 --data-format NHWC": "use --filter-format OIHW",
    "1x3x32x32 3x3x3x16 --filter-format OIHW": "",
    "1x1x9x9 1x1x1x5": "",
    "1x64x17x17 64x64x1x7": "",
}
"""Note on the axis order of a valid layer's filter, keyed by the layer; empty for no note."""


@pytest.mark.parametrize("layer", NOTES)
@pytest.mark.parametrize("command", ["shapes", "explain"])
def test_a_filter_that_is_likelier_in_another_order_is_noted(command, layer):
    text = " ".join(said(command, *layer.split()).split())
    assert ("note: " in text) == bool(NOTES[layer])
    assert NOTES[layer] in text


def test_bench_notes_how_it_reads_shapes(monkeypatch):
    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 64})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 1 << 16})
    words = ("Nx3x8x8", "3x3x3x6", "--pass", "forward", "--seconds", "0.001", "--peers", "none")
    text = " ".join(run("bench", "--device", "cpu", *words).stdout.split())
    assert "the batch size is unknown" in text
    assert "use --filter-format HWIO" in text


ORDERS = {
    ((1, 5, 100, 100), (10, 3, 5, 5)): set(),
    ((1, 3, 32, 32), (8, 1, 3, 3)): set(),
    ((8, 64, 56, 56), (3, 3, 64, 128)): {"HWIO"},
    ((8, 64, 56, 56), (128, 3, 3, 64)): {"OHWI"},
    ((1, 3, 32, 32), (64, 7, 1, 3)): {"OHWI"},
}
"""Filter formats that the error suggests, keyed by the shapes of the input and the filter."""


@pytest.mark.parametrize("shapes", ORDERS, ids=str)
def test_only_plausible_filter_formats_are_suggested(shapes):
    with pytest.raises(ConvError) as caught:
        ConvProblem(*shapes)
    phrases = [phrase for fix in caught.value.fixes for phrase in fix]
    formats = {phrase[1] for phrase in phrases if phrase[0] == "filter_format"}
    assert formats == ORDERS[shapes]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_answered_in_the_words_of_cupyconv(command):
    assert COMMANDS[command] in refused(*shlex.split(command))


def test_causal_and_full_padding_are_those_of_others():
    x, w = np.arange(1.0, 8.0), np.array([1.0, 10.0, 100.0])
    full = np.convolve(x, w[::-1], mode="full")
    for word, values in (("causal", full[: len(x)]), ("full", full)):
        with pytest.raises(ConvError) as caught:
            cupyconv.conv_forward(x[None, None], w[None, None], padding=word)
        ((_, padding),) = caught.value.fixes[0]
        y = cupyconv.conv_forward(x[None, None], w[None, None], padding=padding)
        assert y[0, 0].tolist() == values.tolist()
