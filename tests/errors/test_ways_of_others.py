"""Names and values of other libraries: messages answer with the names and values of cupyconv."""

from __future__ import annotations

import shlex
from importlib import import_module

import numpy as np
import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import ConvProblem, CupyconvError, cudnn, onnx, raw_ops
from cupyconv.cli.main import main

pytestmark = pytest.mark.quick

X, W, V = np.ones((1, 3, 9, 9)), np.ones((4, 3, 5, 3)), np.ones((1, 4, 9, 9))

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
    # numbers of padding entries
    "ConvProblem(X.shape, W.shape, padding=[1, 0, 1, 0])": "Use padding=((1, 0), (1, 0)), or use "
    "padding=((1, 1), (0, 0))",
    "ConvProblem(X.shape, W.shape, padding=[(1, 2)])": "Use padding=((1, 2), (1, 2))",
    "ConvProblem(X.shape, W.shape, padding=[(0, 0), (0, 0), (1, 2), (2, 1)])": "Use padding=((1, 2"
    "), (2, 1))",
    "ConvProblem((1, 3, 9), (4, 3, 3), padding=[2, 0])": "Use padding=((2, 0),)",
}
"""End of the message, or a part that is specific to it, keyed by the call."""

COMMANDS = {
    "shapes 1x3x9x9 4x3x3x3 --padding same-upper": "Use --padding same",
    "shapes 1x3x9x9 4x3x3x3 --padding causal": "Use --padding 2:0,2:0",
    "shapes 1x3x9x9 4x3x3x3 --padding 1,0,1,0": "Use --padding 1:0,1:0, or use --padding 1:1,0:0",
}
"""Part of the message, keyed by the command line."""


@pytest.mark.parametrize("call", PYTHON)
def test_calls_are_answered_in_the_words_of_cupyconv(call):
    known = {"ConvProblem": ConvProblem, "cupyconv": cupyconv, "cudnn": cudnn, "onnx": onnx}
    known |= {"raw_ops": raw_ops, "X": X, "W": W, "V": V}
    if call.startswith("torch."):
        known["T"] = pytest.importorskip("torch").tensor
        known["torch"] = import_module("cupyconv.torch")
    with pytest.raises(CupyconvError) as caught:
        eval(call, known)
    assert PYTHON[call] in str(caught.value)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_answered_in_the_words_of_cupyconv(command):
    result = CliRunner().invoke(main, shlex.split(command))
    assert result.exit_code == 2
    assert COMMANDS[command] in result.stderr


def test_causal_and_full_padding_are_those_of_others():
    x, w = np.arange(1.0, 8.0), np.array([1.0, 10.0, 100.0])
    full = np.convolve(x, w[::-1], mode="full")
    for word, values in (("causal", full[: len(x)]), ("full", full)):
        with pytest.raises(cupyconv.ConvError) as caught:
            cupyconv.conv_forward(x[None, None], w[None, None], padding=word)
        ((_, padding),) = caught.value.fixes[0]
        y = cupyconv.conv_forward(x[None, None], w[None, None], padding=padding)
        assert y[0, 0].tolist() == values.tolist()
