"""Receptive fields of lists of layers, compared with the inputs that change an output."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import ConvProblem
from cupyconv.cli.main import main
from cupyconv.explaining import receptive


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


def test_chained_layers_of_a_file_have_a_receptive_field(tmp_path):
    file = tmp_path / "layers.toml"
    first = '[[layer]]\ninput = "1x3x32x32"\nfilter = "8x3x3x3"\nstride = 2\npadding = 1\n'
    second = '[[layer]]\ninput = "1x8x16x16"\nfilter = "8x4x4x4"\nstride = 2\npadding = 1\n'
    file.write_text(f"{first}{second}transposed = true\n")
    words = ["shapes", "--config", str(file)]
    text = " ".join(CliRunner().invoke(main, words).output.split())
    assert "of an output of the 2 layers is at most 5 x 5 inputs; the fields of" in text
    assert "neighbouring outputs are 1 x 1 apart" in text
    told = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)["receptive_field"]
    assert told == {"sizes": [5, 5], "steps": [1, 1]}
    file.write_text(f"{first}{second.replace('1x8x16', '1x8x15')}transposed = true\n")
    output = CliRunner().invoke(main, words).output
    assert "field of an output of the" not in output  # the layers are no chain
