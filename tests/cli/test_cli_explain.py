"""The reasons for shapes that `cupyconv explain` prints, with their numbers."""

from __future__ import annotations

import pytest

from cupyconv import ConvProblem
from cupyconv.explaining.shapes import axis_reasons, reasons


def _reasons(*shapes, **rest):
    return {entry.tensor: entry for entry in reasons(ConvProblem(*shapes, **rest))}


def test_reasons_list_every_tensor_with_its_shape():
    problem = ConvProblem((2, 6, 9, 8), (9, 2, 3, 3), groups=3, stride=2)
    entries = {entry.tensor: entry for entry in reasons(problem)}
    assert list(entries) == ["x", "w", "y", "dy", "dx", "dw", "db"]
    assert entries["dx"].shape == entries["x"].shape == problem.input_shape
    assert entries["dw"].shape == entries["w"].shape == problem.filter_shape
    assert entries["dy"].shape == entries["y"].shape == problem.output_shape
    assert entries["db"].shape == (9,)


def test_filter_gradient_reason_is_an_outer_product():
    text = _reasons((1, 5, 100, 100), (10, 5, 5, 5))["dw"].reason
    assert "the 10 channels of dy and the 5 channels of x form an outer product" in text
    assert "nothing is broadcast or averaged" in text
    assert "images" not in text
    assert "summed over the 3 images" in _reasons((3, 5, 9, 9), (10, 5, 5, 5))["dw"].reason
    assert (
        "dilated by stride 2x3" in _reasons((1, 5, 9, 9), (1, 5, 3, 3), stride=(2, 3))["dw"].reason
    )


def test_reasons_describe_groups_and_depthwise_layers():
    grouped = _reasons((1, 6, 9, 9), (9, 2, 3, 3), groups=3)
    assert "9 filters in 3 groups" in grouped["w"].reason
    assert "the 2 input channels c of k's group" in grouped["y"].reason
    assert "the 3 channels of dy and the 2 channels of x" in grouped["dw"].reason
    depthwise = _reasons((1, 4, 9, 9), (8, 1, 3, 3), groups=4)
    assert "2 filters of 3x3 taps for each of the 4 input channels" in depthwise["w"].reason


@pytest.mark.parametrize(("rank", "word"), [(1, "samples"), (2, "pixels"), (3, "voxels")])
def test_reasons_use_the_word_for_the_rank(rank, word):
    assert word in _reasons((1, 1, *[4] * rank), (1, 1, *[2] * rank))["x"].reason


def _axes(size, taps, **rest):
    return axis_reasons(ConvProblem((1, 1, *size), (1, 1, *taps), **rest))


def test_equal_axes_are_described_together():
    (both,) = _axes((5, 5), (3, 3), stride=2)
    assert both.axes == ("H", "W")
    first, second = _axes((5, 6), (3, 3), stride=2)
    assert (first.axes, second.axes) == (("H",), ("W",))


def test_padding_reason_gives_numbers():
    (same,) = _axes((6,), (3,), stride=2, padding="same")
    assert same.padding.startswith("0 before, 1 after: for SAME, 3 windows span (3 - 1)*2 + 3 = 7")
    assert "SAME puts the extra position after" in same.padding
    (lower,) = _axes((6,), (3,), stride=2, padding="same_lower")
    assert lower.padding.startswith("1 before, 0 after: for SAME_LOWER")
    (none,) = _axes((4,), (1,), stride=2, padding="same")
    assert none.padding.startswith("none: for SAME")
    (valid,) = _axes((4,), (3,), padding="valid")
    assert valid.padding == "none (VALID)"
    (given,) = _axes((4,), (3,), padding=[(1, 2)])
    assert given.padding == "1 before, 2 after (explicit)"
