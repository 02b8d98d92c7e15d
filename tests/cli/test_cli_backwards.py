"""`cupyconv shapes` with --dy, which lists the possible inputs, and with --sweep."""

from __future__ import annotations

from functools import partial

import pytest

from cupyconv import ConvError, ConvProblem
from cupyconv.cli import backwards
from cupyconv.cli.configuration import Layer
from cupyconv.problem import shape_text
from tests import command
from tests.configurations import random_problems

said, parsed, refused = (
    partial(function, "shapes") for function in (command.said, command.parsed, command.refused)
)


def test_several_layers_are_labelled_by_name(tmp_path):
    path = tmp_path / "net.toml"
    table = '[[layer]]\n{}filter = "{}x3x3x3"\n'
    labels = ('name = "one"\ntitle = "the first"\n', 'title = "the second"\n', 'name = "three"\n')
    path.write_text("".join(table.format(label, 4) for label in labels))
    text = said("--dy", "1x4x6x6", "--config", path)
    heads = [line for line in text.splitlines() if line in ("one", "the second", "three")]
    assert heads == ["one", "the second", "three"]


@pytest.mark.parametrize("problem", list(random_problems(40, seed=11)), ids=str)
def test_inputs_of_an_output_are_complete(problem):
    layer = Layer(None, None, {"filter_shape": problem.filter_shape, **problem.keywords})
    found = backwards.largest_input(layer, problem.output_shape)
    for place, (axis, sizes) in enumerate(zip(problem.axes, found.valid_input_sizes, strict=True)):
        assert axis.input in sizes
        for size in range(max(axis.input - axis.stride, 1), axis.input + axis.stride + 1):
            shape = list(problem.input_shape)
            shape[problem.data_axes[2 + place]] = size
            try:
                other = problem.replace(input_shape=tuple(shape)).axes[place]
            except ConvError:
                assert size not in sizes
                continue
            assert (size in sizes) == (other.output == axis.output)
            assert found.axes[place].of_input(size) == other


def test_dy_prints_sizes_paddings_and_the_reason():
    options = ("--filter", "3x3x3x4", "--stride", "2", "--data-format", "NHWC")
    text = said("--dy", "1x3x3x4", *options, "--padding", "same")
    assert "1 image of 3 channels, H 5 or 6, W 5 or 6; 4 different sizes" in text
    assert "ceil(6/2) = 3" in text
    assert "H and W: with SAME padding the smallest input is (3 - 1)*2 + 1 = 5" in text
    text = said("--dy", "1x3x3x4", *options, "--padding", "valid")
    assert "H 7 or 8, W 7 or 8" in text
    assert "the last input gets no gradient" in " ".join(text.split())
    one = said("--dy", "1x2x7", "--filter", "2x5x3", "--padding", "1")
    assert "1 image of 5 channels, W 7; no other size fits this dy" in one
    (layer,) = parsed("--dy", "1x3x3x4", *options)["layers"]
    assert layer["axes"][1]["input_sizes"] == {"first": 7, "last": 8}


def test_dy_is_compared_with_the_given_input():
    rest = ("--filter", "3x3x3x4", "--stride", "2", "--padding", "same", "--data-format", "NHWC")
    text = refused("--input", "1x7x7x3", "--dy", "1x3x3x4", *rest)
    assert "an input of 7 gives ceil(7/2) = 4, dy has 3; input sizes 5 to 6 would give 3" in text
    assert "pass a dy of shape 1x4x4x4 (NHWC)" in text
    text = said("--input", "1x5x6x3", "--dy", "1x3x3x4", *rest)
    assert "the given x 1x5x6x3 matches this dy" in text
    alone = said("--dy", "1x3x3x4", *rest)
    assert "matches" not in alone
    assert text.splitlines()[4:] == alone.splitlines()[3:]
    assert "has 2, the input has 1" in refused("--input", "1x5x5x3", "--dy", "2x3x3x4", *rest)


def test_dy_overrides_a_preset():
    text = said("--preset", "valid-stride", "--dy", "1x2x2x4")
    assert "H 5 or 6, W 5 or 6" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--dy", "1x3x3x5", "--filter", "3x3x3x4", "--data-format", "NHWC"), "has 5"),
        (("--dy", "1x1x1", "--filter", "1x1x3", "--padding", "2"), "Pad by at most 2 in total"),
        (("--dy", "1x1x1"), "no filter is given"),
        (("--dy", "1x1x1", "--filter", "1x1x3", "--input", "1x1x9"), "3 would give 1"),
        (("--dy", "1x1x1", "--sweep", "input=1:2"), "--dy and --sweep cannot be combined"),
        (("--dy", "1x1", "--filter", "1x1x3"), "axes"),
        (("--dy", "1xa", "--filter", "1x1x3"), "every size of --dy must be a number"),
        (("--filter", "1x1x3", "--sweep", "inputs=1:4"), "Did you mean 'input'?"),
        (("--filter", "1x1x3", "--sweep", "input=4:1"), "must count up"),
        (("--filter", "1x1x3", "--sweep", "input=1:9999999"), "at most 100,000 values"),
        (("--filter", "1x1x3", "--sweep", "input=1:2"), "the filter must fit"),
        (("--sweep", "input=1:2"), "must have the shapes"),
    ],
)
def test_invalid_questions_are_rejected(args, message):
    assert message in refused(*args)


@pytest.mark.parametrize("word", ["same", "valid"])
def test_sweep_prints_a_table_of_outputs(word):
    options = ("--filter", "1x1x3", "--stride", "2", "--padding", word, "--sweep", "input=3:10")
    lines = said(*options).splitlines()[4:]
    outputs = [
        ConvProblem((1, 1, size), (1, 1, 3), stride=2, padding=word).output_shape[-1]
        for size in range(3, 11)
    ]
    assert [list(map(int, line.split()[:2])) for line in lines] == [
        [size, output] for size, output in zip(range(3, 11), outputs, strict=True)
    ]
    (layer,) = parsed(*options)["layers"]
    assert [value["output"][-1] for value in layer["values"]] == outputs


def test_sweep_heading_names_the_swept_option():
    """The preset's title is left out, since the sweep changes the layer."""
    lines = said("--preset", "same-stride", "--sweep", "stride=1:7:3").splitlines()
    assert lines[0] == "same-stride"
    assert lines[1].startswith("stride 1 to 7 by 3, padding same, dilation 1,")
    text = said("--preset", "valid-stride", "--sweep", "padding=1:2")
    assert "stride 2, padding 1 to 2, dilation 1," in text


@pytest.mark.parametrize(
    ("sweep", "key"),
    [("input=5:9:2", "input_shape"), ("stride=1:3", "stride"), ("filter=2:4", "filter_shape")],
)
def test_swept_values_apply_to_every_spatial_axis(sweep, key):
    options = ("--input", "2x9x8x3", "--filter", "3x3x3x4", "--data-format", "NHWC")
    (layer,) = parsed(*options, "--sweep", sweep)["layers"]
    for value in layer["values"]:
        changed = value["value"]
        arguments = {"input_shape": (2, 9, 8, 3), "filter_shape": (3, 3, 3, 4)}
        arguments[key] = {
            "input_shape": (2, changed, changed, 3),
            "filter_shape": (changed, changed, 3, 4),
        }.get(key, changed)
        expected = ConvProblem(**arguments, data_format="NHWC").output_shape
        assert shape_text(value["output"]) == shape_text(expected)


def test_sweep_table_includes_invalid_values():
    text = " ".join(said("--preset", "valid-stride", "--sweep", "input=2:3").split())
    assert "2 - - - - the filter must fit into the padded input" in text
    assert "3 1x1 0, 0 3 to 4" in text
