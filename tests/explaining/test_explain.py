"""Explanations: correct for every configuration, with numbers that the tests compute again."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError
from cupyconv.explaining import maps, shapes, terms
from cupyconv.explaining.terms import Element, parse
from cupyconv.problem import ConvAxis
from tests.configurations import integer_data, problems, random_problems, three_passes

MULTI_CHANNEL = ConvProblem((1, 5, 100, 100), (10, 5, 5, 5))
SAME = ConvProblem((1, 5, 5, 3), (3, 3, 3, 4), stride=2, padding="same", data_format="NHWC")
VALID = ConvProblem((1, 5, 5, 3), (3, 3, 3, 4), stride=2, padding="valid", data_format="NHWC")
DILATED = ConvProblem((1, 5, 5, 3), (3, 3, 3, 4), dilation=2, padding="valid", data_format="NHWC")

RANDOM = list(random_problems(40, seed=7, max_macs=2000, dtypes=("float64",)))


def results(problem: ConvProblem, data) -> dict[str, np.ndarray]:
    """Return y without bias, dx and dw."""
    return three_passes(problem, replace(data, bias=None))


def in_order(problem: ConvProblem, tensor: str, array: np.ndarray) -> np.ndarray:
    """Return a tensor with its axes in the order of element indices."""
    return array.transpose(problem.filter_axes if "w" in tensor else problem.data_axes)


# -- importing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [
        "import cupyconv.explaining.shapes",
        "import cupyconv.explaining.explanation, cupyconv.explaining.page",
        "from cupyconv.explaining import terms",
        "from cupyconv import explain; explain",
        "import cupyconv.cli.explain",
    ],
)
def test_explain_is_a_function_after_any_imports(first):
    program = (
        f"{first}\nimport cupyconv\n"
        "e = cupyconv.explain(cupyconv.ConvProblem((1, 1, 4), (1, 1, 2)))\n"
        "assert isinstance(e, cupyconv.Explanation)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_text_does_not_import_numpy():
    program = (
        "import sys, cupyconv\n"
        "p = cupyconv.ConvProblem((1, 5, 100, 100), (10, 5, 5, 5))\n"
        "e = cupyconv.explain(p, values=None)\n"
        "str(e), e.to_dict(), e.svg(), e.page(), str(e.element('dF[0,0,0,0]')), e.map().verdict\n"
        "assert 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# -- the two questions -----------------------------------------------------------------------------


@pytest.mark.parametrize("problem", RANDOM, ids=str)
def test_text_reports_padding_that_depends_on_the_size(problem):
    moved = False
    for place, axis in enumerate(problem.axes):
        for size in axis.valid_input_sizes:
            shape = list(problem.input_shape)
            shape[problem.data_axes[2 + place]] = size
            other = problem.replace(input_shape=tuple(shape)).axes[place]
            assert axis.of_input(size) == other
            moved |= other.pad_before != axis.pad_before
    assert ("decides the padding" in str(cupyconv.explain(problem, values=None))) == moved


REASONS: dict[tuple[str, str], str] = {
    ("dw", "(1, 5, 9, 9), (10, 5, 5, 5)"): "the 10 channels of dy and the 5 channels of x form an "
    "outer product",
    ("dw", "(3, 5, 9, 9), (10, 5, 5, 5)"): "summed over the 3 images",
    ("dw", "(1, 5, 9, 9), (1, 5, 3, 3), stride=(2, 3)"): "dilated by stride 2x3",
    ("w", "(1, 6, 9, 9), (9, 2, 3, 3), groups=3"): "9 filters in 3 groups",
    ("y", "(1, 6, 9, 9), (9, 2, 3, 3), groups=3"): "the 2 input channels c of k's group",
    ("dw", "(1, 6, 9, 9), (9, 2, 3, 3), groups=3"): "the 3 channels of dy and the 2 channels of x",
    ("w", "(1, 4, 9, 9), (8, 1, 3, 3), groups=4"): "2 filters of 3x3 taps for each of the 4 input",
    ("x", "(1, 1, 4), (1, 1, 2)"): "samples",
    ("x", "(1, 1, 4, 4), (1, 1, 2, 2)"): "pixels",
    ("x", "(1, 1, 4, 4, 4), (1, 1, 2, 2, 2)"): "voxels",
    ("H", "(1, 1, 5, 5), (1, 1, 3, 3), stride=2"): "",
    ("H W", "(1, 1, 5, 6), (1, 1, 3, 3), stride=2"): "",
    (
        "W",
        "(1, 1, 6), (1, 1, 3), stride=2, padding='same'",
    ): "0 before, 1 after: for SAME, 3 windows span (3 - 1)*2 + 3 = 7",
    (
        "W",
        "(1, 1, 6), (1, 1, 3), stride=2, padding='same_lower'",
    ): "1 before, 0 after: for SAME_LOWER",
    ("W", "(1, 1, 4), (1, 1, 1), stride=2, padding='same'"): "none: for SAME",
    ("W", "(1, 1, 4), (1, 1, 3), padding='valid'"): "none (VALID)$",
    ("W", "(1, 1, 4), (1, 1, 3), padding=[(1, 2)]"): "1 before, 2 after (explicit)$",
}
"""Words of the reason for a tensor's shape or an axis's padding, keyed by name and layer."""


@pytest.mark.parametrize(("name", "layer"), REASONS)
def test_reasons_have_the_numbers_of_the_layer(name, layer):
    problem = eval(f"ConvProblem({layer})")
    entries = {entry.tensor: entry for entry in shapes.reasons(problem)}
    assert list(entries) == ["x", "w", "y", "dy", "dx", "dw", "db"]
    assert entries["dx"].shape == entries["x"].shape == problem.input_shape
    assert entries["dw"].shape == entries["w"].shape == problem.filter_shape
    assert entries["dy"].shape == entries["y"].shape == problem.output_shape
    assert entries["db"].shape == (problem.K,)
    if name in entries:
        assert REASONS[name, layer] in entries[name].reason
        assert ("images" in entries["dw"].reason) == (problem.N > 1)
        return
    axes = shapes.axis_reasons(problem)  # equal axes are described together
    assert [entry.axes[0] for entry in axes] == name.split()
    assert f"{axes[0].padding}$".startswith(REASONS[name, layer])


def test_single_possible_input_size_is_explained():
    """Inputs of 0 and 1 would both give one output, but an input of 0 is impossible."""
    problem = ConvProblem((1, 1, 1), (1, 1, 3), stride=2, padding=[(1, 2)])
    text = " ".join(str(cupyconv.explain(problem)).split())
    assert "only input size 1 gives output size 1" in text
    assert "With this padding, only one input size of at least 1 gives this output size" in text
    assert "starting at (1 - 1)*2 + 3 - 3 = 0, but sizes below 1 are impossible" in text
    assert "With stride 1" not in text
    assert "allows 2 sizes" not in text


def test_text_gives_the_size_of_dx_for_other_frameworks():
    problem = VALID.replace(input_shape=(1, 6, 5, 3))
    text = " ".join(str(cupyconv.explain(problem)).split())
    assert "Conv2DBackpropInput(input_sizes=[1, 6, 5, 3])" in text
    assert "conv_transpose2d(..., padding=0, output_padding=(1, 0))" in text
    assert "ConvTranspose(pads=[0, 0, 0, 0], output_padding=[1, 0])" in text
    assert "lax.conv_general_dilated takes lhs_dilation=(2, 2), padding=[(2, 3), (2, 2)]" in text


@pytest.mark.parametrize("problem", RANDOM[:12], ids=str)
def test_random_layers_have_text_html_and_json(problem):
    explanation = cupyconv.explain(problem)
    for width in (60, 100):
        prose = [
            line
            for line in explanation.text(width).splitlines()
            if not line.startswith("    ") and len(line.split()) > 1
        ]
        assert max(map(len, prose)) <= max(width, 75)
    assert explanation._repr_html_().count("<table>") > 5
    assert explanation.to_dict()["shapes"]["dx"] == list(problem.input_shape)


def test_explain_rejects_other_types_and_shapes():
    with pytest.raises(ConvTypeError, match="takes a ConvProblem: got tuple"):
        cupyconv.explain((1, 2, 3))
    with pytest.raises(ConvError, match="x must have the shape of the problem's x"):
        cupyconv.explain(VALID, x=np.zeros((1, 5, 5, 4)))


AXES = st.builds(
    ConvAxis,
    name=st.just("H"),
    input=st.integers(1, 20),
    filter=st.integers(1, 6),
    stride=st.integers(1, 6),
    dilation=st.integers(1, 5),
    pad_before=st.integers(0, 6),
    pad_after=st.integers(0, 6),
    padding_mode=st.just("explicit"),
).filter(lambda axis: axis.output >= 1)


# -- elements --------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", RANDOM, ids=str)
def test_terms_of_an_element_sum_to_it(problem):
    data = integer_data(problem)
    operands = {"x": data.x, "w": data.w, "dy": data.dy}
    ordered = {name: in_order(problem, name, array) for name, array in operands.items()}
    for tensor, array in results(problem, data).items():
        values = in_order(problem, tensor, array)
        every = list(np.ndindex(values.shape))
        for index in every[:: max(len(every) // 40, 1)]:
            element = Element(problem, tensor, index, data=operands)
            assert element.sum == values[index]
            first, second = (ordered[name] for name in element.factors)
            products = [first[term.first] * second[term.second] for term in element.terms()]
            assert len(set(element.terms())) == element.count
            np.testing.assert_array_equal(products, np.multiply(*element.values))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("dF[3,1,0,2]", "dw[3,1,0,2]"),
        ("dE/dF[3,1,0,2]", "dw[3,1,0,2]"),
        (" dw( 3, 1,0 ,2 ) ", "dw[3,1,0,2]"),
        ("dX[0,4,99,99]", "dx[0,4,99,99]"),
        ("dL/dx[0,4,99,99]", "dx[0,4,99,99]"),
        ("O[0,9,95,95]", "y[0,9,95,95]"),
        ("y[0,9,0,0]", "y[0,9,0,0]"),
    ],
)
def test_element_names_are_parsed(text, name):
    assert parse(MULTI_CHANNEL, text).name == name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dF[10,0,0,0]", "has k = 10. Use k from 0 to 9, c from 0 to 4, r from 0 to 4, s from 0"),
        ("dX[0,0,0,-1]", "has w = -1. Use n from 0 to 0, c from 0 to 4, h from 0 to 99"),
        ("O[0,0,96,0]", "has p = 96"),
        ("dF[0,0,0]", "must have the 4 indices k, c, r, s"),
        ("dF[0,0,0,a]", "must have the 4 indices k, c, r, s"),
        ("dF", "an element must be a tensor's name and its indices"),
        ("dG[0,0,0,0]", "unknown tensor: 'dG'"),
    ],
)
def test_elements_out_of_range_are_rejected(text, said):
    with pytest.raises(ConvError) as caught:
        parse(MULTI_CHANNEL, text)
    assert said in str(caught.value)


def test_empty_batch_has_only_elements_of_dw():
    problem = MULTI_CHANNEL.replace(input_shape=(0, 5, 100, 100))
    element = parse(problem, "dF[0,0,0,0]")
    assert element.count == 0
    assert "zero" in element.conclusion
    assert "zero" in str(element)
    with pytest.raises(ConvError, match="no n, because the batch is empty"):
        parse(problem, "dX[0,0,0,0]")
    assert "convolved?" in str(cupyconv.explain(problem))


def test_index_order_does_not_depend_on_memory_order():
    element = parse(SAME, "dX[0,2,4,3]")
    assert "(n, c, h, w), with sizes 1x3x5x5, whatever the memory order (here NHWC)" in " ".join(
        str(element).split()
    )
    with pytest.raises(ConvError, match="has h = 5"):
        parse(SAME, "dX[0,2,5,0]")


def test_taps_skipped_by_the_stride_are_named():
    text = str(parse(SAME, "dX[0,0,0,3]"))
    assert "r = 0: p = (0 + 1 - 0)/2 is not an integer: the stride skips this tap" in text
    assert "s = 0: q = (3 + 1 - 0)/2 = 2" in text
    assert "so   p = (h + 1 - r)/2, q = (w + 1 - s)/2" in text
    plain = str(parse(MULTI_CHANNEL, "dX[0,0,0,7]"))
    assert "so   p = h - r, q = w - s" in plain
    assert "s = 3: q = 7 - 3 = 4" in plain


def test_channel_indices_count_within_groups():
    grouped = ConvProblem((1, 4, 9), (6, 2, 3), groups=2)
    element = " ".join(str(parse(grouped, "dX[0,3,4]")).split())
    assert "In w and dw, c counts only the channels of the group of filter k." in element
    assert "Each of the 3 filters of its group reads this input" in element
    assert "correlate(x[channel c of the group of k], dy[k])" in str(cupyconv.explain(grouped))
    assert "counts within" not in str(parse(SAME, "dX[0,0,0,0]"))


def test_unread_input_elements_are_explained():
    element = parse(VALID.replace(input_shape=(1, 6, 6, 3)), "dX[0,0,5,5]")
    assert element.count == 0
    assert "No window reads this input" in str(element)


def test_long_term_lists_are_truncated_unless_requested():
    element = parse(MULTI_CHANNEL, "dF[0,0,0,0]")
    assert "... 9,210 more" in str(element)
    assert len(element.to_dict()["terms"]) == 6
    assert element.to_dict()["terms_left_out"] == 9210
    whole = "\n".join(element.section(True).lines(100))
    assert whole.count("dy[0,0,") == 9216


def test_elements_show_given_values_and_results():
    data = integer_data(SAME)
    operands = {"x": data.x, "w": data.w, "dy": data.dy}
    dw = results(SAME, data)["dw"]
    explanation = cupyconv.explain(SAME, **operands, dw=dw)
    element = explanation.element("dF[1,2,0,0]")
    assert element.sum == dw[0, 0, 2, 1] == element.computed
    assert f"= {element.sum:.9g}" in str(element)
    assert "cupyconv.conv_backprop_filter gives" in str(element)
    assert element.to_dict()["sum"] == element.sum
    plain = cupyconv.explain(SAME, values=None).element("dF[1,2,0,0]")
    assert plain.to_dict()["sum"] is None
    assert plain.to_dict()["terms"][0].keys() == {"number", "dy", "x"}
    given = cupyconv.explain(SAME).element("dF[1,2,0,0]", x=data.x, dy=data.dy)
    assert given.sum == element.sum


def test_missing_operands_get_random_values():
    first, again = cupyconv.explain(SAME), cupyconv.explain(SAME)
    element = first.element("dX[0,1,2,2]")
    assert element.computed == pytest.approx(element.sum, rel=1e-5)
    assert element.sum == again.element("dX[0,1,2,2]").sum
    assert element.sum != cupyconv.explain(SAME, seed=1).element("dX[0,1,2,2]").sum
    dy = np.zeros(SAME.output_shape, np.float32)
    given = cupyconv.explain(SAME, dy=dy)
    assert given.element("dX[0,1,2,2]").computed == 0
    np.testing.assert_array_equal(given.data["x"], first.data["x"])
    # Computed results are dropped if an operand is replaced.
    changed = first.element("dX[0,1,2,2]", dy=dy)
    assert (changed.sum, changed.computed) == (0, None)
    with pytest.raises(ConvError, match="unknown values"):
        cupyconv.explain(SAME, values="integer")


@pytest.mark.parametrize("tensor", ["y", "dx", "dw"])
def test_integer_sums_are_printed_as_integers(tensor):
    problem = ConvProblem((1, 2, 4, 4), (3, 2, 2, 2), padding=1, stride=2)
    explanation = cupyconv.explain(problem, values="integers")
    for index in np.ndindex(*terms.extents(problem, tensor)):
        element = explanation.element(f"{tensor}[{','.join(map(str, index))}]")
        lines = list(element.lines())
        assert len(lines) == element.count + 1
        assert not any("." in line or "-0" in line for line in lines)
        products = [int(line.rpartition("=")[2]) for line in lines]
        assert products[-1] == sum(products[:-1]) == element.computed


@pytest.mark.parametrize(("values", "total"), [((np.inf, 1), np.inf), ((np.inf, -np.inf), np.nan)])
def test_nan_and_infinite_sums_are_printed(values, total):
    problem = ConvProblem((1, 1, 2), (1, 1, 1))
    element = cupyconv.explain(problem, x=np.array([[values]]), dy=np.ones((1, 1, 2))).element(
        "dF[0,0,0]"
    )
    np.testing.assert_equal(element.sum, total)
    assert f"sum of 2 products = {total}" in str(element)


def test_too_many_values_are_counted_but_not_computed():
    element = parse(ConvProblem((1, 1, 10**9), (1, 1, 3)), "dF[0,0,1]")
    assert element.count == 10**9 - 2
    assert str(element)
    with pytest.raises(ConvError, match="must have at most 20,000,000 terms"):
        _ = Element(element.problem, "dw", (0, 0, 1), data={"x": 1, "dy": 1}).values


# -- maps ------------------------------------------------------------------------------------------


@given(problems(max_macs=300))
def test_map_counts_the_terms_of_every_position(problem):
    for tensor in maps.MAPPED if problem.N else ("dw",):
        counted = maps.term_map(problem, tensor)
        array = counted.array()
        assert array.shape == counted.shape
        for position in np.ndindex(array.shape):
            expected = Element(problem, tensor, (0, 0, *position)).count
            assert array[position] == expected == counted.at(position)
        assert counted.smallest == array.min()
        assert counted.largest == array.max()
        assert counted.zeros == (array == 0).sum() or problem.N == 0


def test_checkerboards_and_unread_borders_are_named():
    checkered = maps.term_map(SAME, "dx")
    assert "checkerboard" in checkered.verdict
    assert "checkerboard" in maps.term_map(VALID, "dx").verdict
    tiled = maps.term_map(ConvProblem((1, 1, 12), (1, 1, 3), stride=3), "dx")
    assert tiled.verdict == "every position has 1 term"
    overlapping = maps.term_map(ConvProblem((1, 1, 12), (1, 1, 4), stride=2), "dx")
    assert "fewer towards the border" in overlapping.verdict
    dead = maps.term_map(VALID.replace(input_shape=(1, 6, 6, 3)), "dx")
    assert "11 of 36 positions, which no tap reaches, have no terms" in dead.verdict
    assert maps.term_map(MULTI_CHANNEL, "dw").verdict == "every position has 9,216 terms"
    assert "fewer towards the border" in maps.term_map(MULTI_CHANNEL, "dx").verdict


def test_gaps_of_a_dilated_filter_are_not_called_a_border():
    holes = maps.term_map(DILATED, "dx")
    assert holes.array()[0].tolist() == [4, 0, 4, 0, 4]
    assert holes.verdict == (
        "9 of 25 positions have 4 terms; the other 16, which no tap reaches, have none: uneven "
        "along H and W, because the taps of a window are 2 apart, and one window leaves gaps"
    )
    enough = maps.term_map(ConvProblem((1, 1, 9), (1, 1, 3), dilation=2), "dx")
    assert "fewer towards the border" in enough.verdict


@given(AXES)
def test_fewer_terms_at_the_border_are_named_correctly(axis):
    problem = ConvProblem(
        (1, 1, axis.input),
        (1, 1, axis.filter),
        stride=axis.stride,
        dilation=axis.dilation,
        padding=[(axis.pad_before, axis.pad_after)],
    )
    counted = maps.term_map(problem, "dx")
    turns = [b - a for a, b in pairwise(counted.array().tolist()) if a != b]
    if "fewer towards the border" in counted.why:
        assert not any(a < 0 < b for a, b in pairwise(turns))
    elif turns and axis.stride == 1:
        assert any(a < 0 < b for a, b in pairwise(turns))


def test_map_is_drawn_in_characters():
    lines = list(maps.term_map(SAME, "dx").lines(80, 20))
    assert lines[0].split() == ["0", "1", "2", "3", "4"]
    assert lines[2].split() == ["1", "2▒", "4█", "2▒", "4█", "2▒"]
    long = list(maps.term_map(MULTI_CHANNEL, "dx").lines(60, 9))
    assert len(long) == 9
    assert max(map(len, long)) <= 60
    assert long[0].split()[-1] == "99"
    assert ".." in long[1]
    assert long[5].strip() == "..."
    assert "\x1b[48;5;" in list(maps.term_map(SAME, "dx").lines(colour=True))[1]
    volume = maps.term_map(ConvProblem((1, 1, 4, 5, 6), (2, 1, 2, 2, 2)), "dx")
    assert len(list(volume.lines())) == 1 + 5
    assert "slice D = 2" in volume.legend
    assert len(list(maps.term_map(ConvProblem((1, 1, 9), (1, 1, 3)), "dx").lines())) == 1 + 1


def test_impossible_maps_are_rejected():
    with pytest.raises(ConvError, match="unknown map"):
        maps.term_map(SAME, "dz")
    with pytest.raises(ConvError, match="axis W"):
        maps.term_map(ConvProblem((1, 1, 10**9), (1, 1, 3)), "dx")
