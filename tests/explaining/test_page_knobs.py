"""The knobs of the page in a browser: turning them, errors, addresses and programs."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.explaining.values import first_number
from cupyconv.formats import data_formats, filter_formats
from tests.browser import acted, logged
from tests.command import parsed
from tests.explaining.test_page_rules import random_layer, valid_layer

pytestmark = pytest.mark.costly  # each case opens a page

SMALL = ConvProblem((1, 2, 5, 5), (3, 2, 3, 3))

LAST = {
    "input_shape": (1, 5, 5, 2),
    "filter_shape": (3, 3, 2, 3),
    "data_format": "NHWC",
    "filter_format": "HWIO",
}
"""Changes that give SMALL with channels last."""

HELPERS = """
  const change = (field, value) => {
      field.value = value; field.dispatchEvent(new Event('change'));
    },
    field = (label) => $$('#dials input').find((one) => one.ariaLabel === label),
    set = (label, value) => change(field(label), value),
    seed = (value) => change($$('#dials input').at(-1), value),
    image = (value) => change(document.getElementById('image'), value),
    pick = (label, word) =>
      change($$('.choice select').find((one) => one.ariaLabel === label), word),
    hand = (name, value) => {
      document.getElementById('hand-name').value = name;
      document.getElementById('hand-value').value = value; press('hand-set');
    },
    programs = () => $$('.program').map((one) =>
      one.querySelector('pre,p').textContent.replaceAll('\\n', '~')),
    title = () => $$('h1')[0].textContent, facts = () => text('facts'),
    numbers = () => $$('.panel.result .c').map((one) => one.ariaLabel.split(' = ')[1]).join();
"""


def turned(browse, script: str, problem: ConvProblem = SMALL, place: str = "", **kept) -> list[str]:
    return logged(browse(problem, place, acted(HELPERS + script), **kept))


def test_turned_knobs_show_shapes_and_values(browse):
    """Sizes, stride, padding and values take effect at once, with the library's numbers."""
    script = """
      pick('values', 'integers'); set('stride H', 2); set('filters', 4); pick('padding', 'same');
      log(title()); log(text('shapes')); log(facts()); log($$('.made').every((one) => one.hidden));
      for (const tensor of ['dw', 'dx', 'y']) {
        direct(tensor); log(numbers()); log(text('sum'));
      }
      log(text('bias')); log(location.hash);
      press('reset'); log(title(), facts().includes('stride'), $$('.made')[0].hidden);
    """
    log = turned(browse, script)
    problem = ConvProblem((1, 2, 5, 5), (4, 2, 3, 3), stride=(2, 1), padding="same")
    data = cupyconv.explain(problem, values="integers").data
    assert log[0] == "1x2x5x5 * 4x2x3x3 -> 1x4x3x5"
    assert log[1] == "y, dy 1x4x3x5 NCHWx, dx 1x2x5x5 NCHWw, dw 4x2x3x3 OIHWdb 4"
    assert "H: output ceil(5/2) = 3; SAME pads by 1 before and 1 after; input sizes 5 and" in log[2]
    assert "6 both give output size 3; PyTorch computes dx with output_padding=0." in log[2]
    assert log[3] == "true"
    for place, (tensor, index) in enumerate({"dw": (1, 1), "dx": (0, 1), "y": (0, 1)}.items()):
        expected = [f"{number:.0f}" for number in data[tensor][index].ravel()]
        assert log[4 + 2 * place].split(",") == expected
        assert f"The page computes {expected[0]}"[:17] in log[5 + 2 * place]
    assert log[10].endswith(f"is the sum of dy[1]: {data['dy'][0, 1].sum():.0f}.")
    assert log[11].startswith(
        "#input=1x2x5x5&filter=4x2x3x3&stride=2,1&padding=same&values=integers&y=0,1,"
    )
    assert log[12] == "1x2x5x5 * 3x2x3x3 -> 1x3x3x3 false false"


@pytest.mark.parametrize("seed", [2**53 + 1, 10**18 + 1, 2**63 - 1], ids=str)
def test_large_seeds_keep_all_digits(browse, seed):
    """A seed in the field, in the address and in the program gives the library's numbers."""
    script = f"""
      pick('values', 'integers'); seed('{seed}');
      direct('dx'); log(numbers()); log(location.hash); log(text('programs'));
      seed('9223372036854775808'); log(text('notice'));
    """
    log = turned(browse, script)
    data = cupyconv.explain(SMALL, values="integers", seed=seed).data
    expected = ",".join(f"{number:.0f}" for number in data["dx"][0, 1].ravel())
    assert log[0] == expected
    assert f"&seed={seed}&dx=" in log[1]
    assert f" --seed {seed} " in log[2]
    assert f"numbers({first_number(seed)}, (1, 2, 5, 5))" in log[2]
    assert log[3] == 'A seed is a whole number from 0 to 2^63 - 1, not "9223372036854775808".'
    assert turned(browse, "log(numbers()); log(location.hash);", place=log[1]) == [expected, log[1]]


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (ConvProblem((1, 1, 2000), (1, 1, 400)),
         "axis W has 400 taps and 1,601 outputs. The knobs support at most 200,000 pairs of a tap"),
        (ConvProblem((1, 1, 5), (1, 1, 3), stride=2**60),
         "axis W has stride 1152921504606846976 and dilation 1. A browser counts exactly up to"),
        (ConvProblem((1, 1, 5, 5), (1, 1, 3, 1), dilation=(1, 2**53 + 2)),
         "axis W has stride 1 and dilation 9007199254740994. A browser counts exactly up to"),
    ],
    ids=["many pairs", "stride", "dilation"],
)  # fmt: skip
def test_pages_without_knobs_say_why(browse, problem, said):
    script = """
      const known = document.getElementById('knobs');
      log(known.checkVisibility() && known.textContent); log($$('.panel').length);
      log(visible('front'));
    """
    log = turned(browse, script, problem, place="#y=0,0" + ",0" * problem.spatial_rank)
    assert log[0].startswith(f"This page has no knobs: {said}")
    assert log[1:] == ["3", "false"]


def test_changed_values_are_announced_until_the_next_action(browse):
    """A knob that takes another value than the written one says so, and only then."""
    script = """
      const seen_ = () => visible('notice') && text('notice');
      set('stride H', 2.5); log(seen_(), field('stride H').value);
      set('stride H', 1); log(seen_());
      set('padding before H', -2000); log(seen_(), field('padding before H').value);
      set('padding before H', 0); set('filters', 4000); log(seen_(), field('filters').value);
      set('groups', 0); log(seen_()); set('groups', 1); set('filters', ''); log(seen_());
      press('play'); log(seen_()); set('images', 3); image(7); log(seen_()); image(2); log(seen_());
      hand('x[2,1,4,4]', 5); log(seen_());
      set('input H', 4); log(seen_()); set('input H', 5); log(seen_(), text('source'));
      const [value, button] = [document.getElementById('hand-value'), $$('#dials button')[0]];
      document.getElementById('hand-name').value = 'y[0]';
      value.focus(); key('Enter'); value.dispatchEvent(new Event('change'));
      log(seen_().slice(0, 14)); set('filters', 4000);
      button.dispatchEvent(new MouseEvent('click', { bubbles: true, detail: 1 })); log(seen_());
      button.dispatchEvent(new PointerEvent('pointerdown', { bubbles: true })); log(seen_());
    """
    whole = 'The knob "{}" needs a whole number.'
    assert turned(browse, script) == [
        whole.format("stride H") + " 1", "false",
        'The knob "padding before H" goes down to -64. -64',
        'The knob "filters" goes up to 512. 512', "false", whole.format("filters"), "false",
        "The images are 0 to 2.", "false", "false",
        "Not set: x[2,1,4,4]. The layer does not have this element.",
        "false Values: random data of seed 0. Image 2 of 3.", "Set an element",
        'The knob "filters" goes up to 512.', "false",
    ]  # fmt: skip


def test_all_kinds_of_layers_can_be_dialled(browse):
    script = """
      pick('axes', '1'); log(title()); pick('axes', '3'); log(title());
      pick('data format', 'last'); log(title()); set('channels of x', 4); set('groups', 2);
      set('filters', 6); set('dilation D', 2); set('input D', 9); log(title()); log(facts());
      log($$('[role=gridcell]').some((one) => one.textContent === 'NaN'));
      set('dilation D', 1); set('input D', 5); log(facts());
    """
    log = turned(browse, script)
    assert log[:4] == [
        "1x2x5 * 3x2x3 -> 1x3x3",
        "1x2x5x5x5 * 3x2x3x3x3 -> 1x3x3x3x3",
        "1x5x5x5x2 * 3x3x3x2x3 -> 1x3x3x3x3",
        "1x9x5x5x4 * 3x3x3x2x6 -> 1x5x3x3x6",
    ]
    assert "floor((9 + 0 + 0 - 5)/1) + 1 = 5" in log[4]
    assert log[6].startswith("D, H and W: output ")
    assert log[5] == "false"


def test_output_padding_is_that_of_pytorch(browse):
    """The stated padding, output_padding and crop give a dx of the size of x."""
    script = """
      set('stride H', 2); set('input H', 6);
      for (const word of ['same', 'same_lower', 'valid', 'numbers']) {
        pick('padding', word); log(facts());
      }
      set('padding after H', 2); log(facts());
      set('padding before H', 2); set('padding after W', 1); log(facts());
      pick('padding', 'same'); set('filter H', 4); log(facts());
    """
    words = ("same", "same_lower", "valid", 0)
    numbers = (((0, 2), 0), ((2, 2), (0, 1)))
    layers = [*((word, 3) for word in (*words, *numbers)), ("same", 4)]
    for (padding, taps), text in zip(layers, turned(browse, script), strict=True):
        problem = ConvProblem((1, 2, 6, 5), (3, 2, taps, 3), stride=(2, 1), padding=padding)
        axis = problem.axes[0]  # the only axis with a stride
        extra, crop = re.search(r"output_padding=(\d+)(.*?)\.", text).groups()
        cut = re.fullmatch(r", and remove (\d+) before and (\d+) after", crop)
        assert bool(cut) == any(before != after for before, after in problem.padding)
        crops = map(int, cut.groups()) if cut else (axis.pad_before, axis.pad_after)
        size = (axis.output - 1) * 2 + axis.effective_filter + int(extra) - sum(crops)
        assert size == 6, text


def test_invalid_layer_shows_the_rule_and_its_ways_out(browse):
    script = """
      set('groups', 2); log(text('wrong')); log(document.getElementById('drawing').hidden);
      const ways = $$('.way'); log(ways.map((one) => one.textContent).join(';')); ways[0].click();
      log(title()); log(document.getElementById('wrong').hidden); log(document.activeElement.type);
      set('stride W', 0); log(text('wrong')); set('stride W', 2); set('filter H', 9);
      log(text('wrong')); log(location.hash);
    """
    log = turned(browse, script)
    with pytest.raises(cupyconv.ConvError) as caught:
        SMALL.replace(groups=2, filter_shape=(3, 1, 3, 3))
    assert log[0].startswith(f"Groups{str(caught.value)[6:].split('. ')[0]}.")
    assert log[1] == "true"
    assert log[2] == "Use groups = 1;Use filters = 2"
    assert log[4] == "true"
    assert log[5] == "number"
    assert log[6].startswith("Stride must be at least 1 (axis W): got 0.Use 1 or more.")
    assert log[7].startswith("The filter must fit into the padded input (axis H): a filter of 9")
    assert "filter=3x2x9x3" in log[8]


def test_address_with_a_layer_opens_it(browse):
    rules = "stride=2&padding=1:0&groups=2&values=integers&seed=3"
    place = f"#input=1x4x8&filter=6x2x3&{rules}&dx=0,3,5"
    log = turned(browse, "log(title()); log(text('told')); log(location.hash);", place=place)
    problem = ConvProblem((1, 4, 8), (6, 2, 3), stride=2, padding=[(1, 0)], groups=2)
    value = cupyconv.explain(problem, values="integers", seed=3).element("dx[0,3,5]").computed
    assert log[0] == "1x4x8 * 6x2x3 -> 1x6x4"
    assert log[1].startswith("dx[0,3,5] is the sum of")
    assert log[1].endswith(f": {value:.0f}.")
    assert log[2] == place


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (
            "#input=1x4x8&filter=6x2",
            '"filter=6x2" in the address is not valid. Write, for example,',
        ),
        ("#filter=6x2x3", 'The address has no part "input". Write, for example, input=1x5x8x8'),
        ("#input=1x4x8&filter=6x4x3&strid=2", 'The page does not use "strid=2" in the address.'),
        (
            "#input=1x4x8&filter=6x4x3&dx=0,1,2&stride=1&stride=2&y=0,1,2&groups=1",
            'The page does not use "stride=2", "y=0,1,2" in the address.',
        ),
        ("#input=1x4x8&filter=6x3x3", "The filter's input channels must be the input's channels"),
        ("#input=1x4x8&filter=6x4x3&dx=0,4,0", "dx[0,4,0] is not an element: dx is 1x4x8"),
    ],
    ids=str,
)
def test_address_with_an_invalid_layer_is_reported(browse, place, said):
    script = "log([text('notice'), text('wrong')].join('').slice(0, 200)); log(location.hash);"
    log = turned(browse, script, place=place)
    assert log[0].startswith(said)
    assert log[1].startswith("#input=1x4x8&filter=6x") == ("Write, for example," not in log[0])


def test_invalid_parts_of_an_address_are_named(browse):
    """Each part is refused; the page then shows its first layer."""
    parts = (
        *("stride=", "stride=1,1", "stride=1.5", "dilation=1e1", "groups=1,1", "padding="),
        *("padding=full", "padding=1:2:3", "padding=constructor", "padding=1001"),
        *(
            "data_format=NHWC",
            "filter_format=",
            "values=constructor",
            "seed=-1",
            "seed=9223372036854775808",
            "loss=max",
        ),
        *("set=", "set=x:0,1,2", "set=x:0,,2:1", "set=x:0,1,2:", "set=x:0,1,2:2abc"),
        *("set=x:0,1,2:1e39", "set=x:0,1,2:0x10", "set=x:0,1,2:1:1", "set=y:0,1,2:1"),
    )
    script = f"""
      for (const part of {json.dumps(parts)}) {{
        location.hash = `#input=1x4x8&filter=6x4x3&${{part}}&dx=0,1,2`; await wait(30);
        log(text('notice').split('. ')[0], title());
      }}
    """
    for part, said in zip(parts, turned(browse, script), strict=True):
        title = "1x2x5x5 * 3x2x3x3 -> 1x3x3x3"
        assert said == f'"{part.split("&")[-1]}" in the address is not valid {title}'


@pytest.mark.parametrize("number", ["1e+21", "-1e-9", "3e+38", "0.5"])
def test_address_keeps_numbers_set_by_hand(browse, number):
    place = f"#input=1x4x8&filter=6x4x3&padding=same&set=x:0,1,2:{number}&y=0,1,2"
    log = turned(
        browse, "log(location.hash); log(text('source')); log(text('notice'));",
        place=place.replace("same", "SAME"),
    )  # fmt: skip
    assert log[0] == place
    assert float(re.search(r"x\[0,1,2\] = (\S+)\.", log[1])[1]) == float(number)
    assert log[2] == ""


@pytest.mark.thorough
def test_empty_batch_shows_no_elements(browse):
    """A page of no images shows shapes and programs, but no drawing of elements."""
    parts = "['empty', 'drawing', 'answer', 'turn', 'copies']"
    script = f"""
      const seen_ = () => {parts}.filter((id) => visible(id));
      log(seen_()); log(location.hash); log(text('shapes')); log(text('programs').slice(0, 99));
      set('images', 1); log(seen_()); set('images', 0); log(seen_()); log(location.hash);
      log(text('programs').slice(0, 99)); set('stride H', 0); log(seen_());
    """
    empty = SMALL.replace(input_shape=(0, 2, 5, 5))
    first = turned(browse, script, empty)
    assert first[0] == first[5] == "empty,answer,turn,copies"
    assert first[1:3] == ["", "y, dy 0x3x3x3 NCHWx, dx 0x2x5x5 NCHWw, dw 3x2x3x3 OIHWdb 3"]
    assert first[4] == "drawing,answer,turn,copies"
    assert first[8] == "turn"
    assert turned(browse, "set('images', 0);" + script)[3] == first[3] == first[7]
    assert first[3].startswith("Command lineCopycupyconv explain 0x2x5x5 3x2x3x3Python")
    (notice,) = turned(browse, "log(text('notice'));", empty, "#dx=0,1,2,3")
    assert notice == "dx[0,1,2,3] is not an element: dx is 0x2x5x5, indices count from 0."
    data = cupyconv.conv_backprop_filter(np.ones((0, 2, 5, 5)), (3, 2, 3, 3), np.ones((0, 3, 3, 3)))
    assert not data.any()


@pytest.mark.parametrize(
    "before", ["#story=size,4", "#input=1x4x8&filter=6x3x3", "#input=1x4x8&filter=6x4x3&y=0,1,2"]
)
@pytest.mark.parametrize("after", ["#dx=0,1,2,3", "#", "#db=1", "#input=1x4&filter=2"])
def test_address_alone_says_what_is_shown(browse, before, after):
    """A new address shows the same after a story or another layer as in a fresh page."""
    script = """
      const seen_ = () => [title(), text('notice'), document.getElementById('notice').hidden,
        location.hash, $$('[data-story]').length, $$('input:checked')[0].value,
        ...['story', 'wrong', 'drawing', 'answer', 'turn', 'front'].filter((id) =>
          visible(id))].join('; ');
      location.hash = 'AFTER'; await wait(50); log(seen_()); log(text('told'));
    """.replace("AFTER", after)
    fresh = turned(browse, script, place=after)
    assert "drawing; answer; turn; front" in fresh[0]
    assert turned(browse, script, place=before) == fresh


@pytest.mark.parametrize(
    ("values", "loss"),
    [("normal", "dot"), ("integers", "dot"), ("x", "dot"), ("dy", "dot"), ("integers", "sum"),
     ("normal", "squares"), ("w", "squares")],
)  # fmt: skip
def test_copied_programs_show_the_same_layer(browse, monkeypatch, values, loss):
    """The command and the Python program have the layer and the number that the page shows."""
    script = """
      set('stride H', 2); set('padding before W', 1); set('groups', 2); set('channels of x', 4);
      set('filters', 4); pick('values', 'WORD'); pick('loss', 'LOSS');
      pick('data format', 'last'); direct('dx'); programs().forEach((one) => log(one));
      log(text('told')); log(title());
    """
    shell, python, torch, tensorflow, jax, told, title = turned(
        browse, script.replace("WORD", values).replace("LOSS", loss)
    )
    problem = ConvProblem(
        (1, 5, 5, 4), (3, 3, 2, 4), stride=(2, 1), padding=((0, 0), (1, 0)), groups=2,
        data_format="NHWC",
    )  # fmt: skip
    total = float(re.search(r": (\S+)\.$", told)[1])
    shown = []
    monkeypatch.setattr(cupyconv.Explanation, "show", lambda self, name: shown.append((self, name)))
    exec(python.replace("~", "\n"), {})
    ((explanation, name),) = shown
    assert explanation.problem == problem
    assert explanation.element(name).sum == pytest.approx(total, rel=1e-5)
    assert title.split(" -> ")[1] == "x".join(map(str, problem.output_shape))
    if loss == "sum":
        assert np.all(explanation.data["dy"] == 1)
    if loss == "squares":
        np.testing.assert_array_equal(explanation.data["dy"], explanation.data["y"])
    if values in ("x", "w", "dy"):
        assert np.count_nonzero(explanation.data[values]) == 1
    if loss != "dot" or values in ("x", "w", "dy"):
        assert shell == "The command line has no option for these values."
    else:
        words = [word.strip("'") for word in shell.split()[1:]]
        told = parsed(*words)["layers"][0]
        assert told["elements"][0]["sum"] == pytest.approx(total, rel=1e-5)
    code = {entry.framework: entry.call for entry in explanation.translations}
    assert code["PyTorch"] in torch
    assert code["TensorFlow"] in tensorflow
    assert code["JAX"] in jax
    check_programs(explanation, torch, tensorflow, jax)


def test_programs_of_one_image_and_filter_run(browse):
    """PyTorch raises an error for the filter gradient of such a layer if W is not contiguous."""
    problem = ConvProblem((1, 5, 5, 2), (3, 3, 2, 1), data_format="NHWC")
    script = "programs().slice(2).forEach((one) => log(one));"
    check_programs(cupyconv.explain(problem), *turned(browse, script, problem))


def executed(program: str) -> dict[str, Any]:
    """Run a program and return its names; none if its framework is not installed."""
    names: dict[str, Any] = {}
    if importlib.util.find_spec(re.search(r"~import (torch|tensorflow|jax)", program)[1]):
        exec(program.replace("~", "\n"), names)
    return names


def check_programs(explanation: cupyconv.Explanation, *programs: str) -> None:
    """Run each program and require its dx and dw to be those of the explanation."""
    problem = explanation.problem
    rank = problem.spatial_rank
    for program, is_last in zip(programs, (False, True, None), strict=True):
        names = executed(program)
        if not names:
            continue
        orders = (problem.data_format, problem.filter_format)
        if is_last is not None:
            orders = (data_formats(rank)[is_last], filter_formats(rank)[is_last])
        sources = (problem.data_format, problem.filter_format)
        for name, source, target in zip(("dx", "dw"), sources, orders, strict=True):
            expected = np.asarray(explanation.data[name], "float64")
            expected = expected.transpose([source.index(letter) for letter in target])
            found = np.asarray(names[name.upper()])
            np.testing.assert_allclose(found.astype("float64"), expected, 1e-3, 1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_copied_programs_have_the_dtype(browse, dtype):
    problem = SMALL.replace(dtype=dtype)
    *_, torch, tensorflow, jax = programs(browse, problem)
    for names in filter(None, map(executed, (torch, tensorflow, jax))):
        assert str(names["DW"].dtype).endswith(dtype) or dtype in repr(names["DW"].dtype)


@pytest.mark.parametrize("dtype", ["float64", "complex64", "float32"])
def test_turned_layers_say_their_dtype(browse, dtype):
    """A turn gives a float32 layer: the page says so if its first layer has another dtype."""
    script = """
      const stale = () => visible('stale') && text('stale');
      log(stale()); set('filters', 4); log(stale());
      log(text('programs').includes('dtype="float64"'));
      set('groups', 4); log(stale()); press('reset'); log(stale());
    """
    first, said, copied, wrong, reset = turned(browse, script, SMALL.replace(dtype=dtype))
    assert first == copied == reset == "false"
    assert said == wrong
    expected = f" The first layer has {dtype}; the knobs use float32."
    assert said.endswith("turned." + ("" if dtype == "float32" else expected))


def test_programs_of_huge_layers_compute_their_values(browse):
    """The command and the program have the option that the size needs, and one hot arrays too."""
    script = """
      turn(knobsOf({ layer: { input_shape: [16, 64, 200, 200], filter_shape: [64, 64, 3, 3] },
        values: 'normal', seed: '0' }));
      log(text('missing')); log(programs()[0]); log(programs()[1]);
      pick('values', 'x'); log(programs()[1]);
    """
    missing, shell, python, hot = turned(browse, script)
    assert missing.endswith(
        "Turn the sizes down, or run the Python program that you can copy above."
    )
    assert " --large " in shell
    assert "explain(problem, large=True)" in python
    assert "~x[:] = 0~x[0, 32, 100, 100] = 1~" in hot
    assert "explain(problem, x=x, w=w, dy=dy, large=True)" in hot


@pytest.mark.parametrize(
    ("word", "title"),
    [
        ("channels", "Which channels"),
        ("size", "Why is dx"),
        ("flip", "Why does dx flip"),
        ("number", "Where does this number"),
    ],
)
def test_stories_end_on_the_knobs(browse, word, title):
    """Each step has sentences and a visible picture; the last step leads to the layer's knobs.

    No sum and no explained product is 0, which would prove nothing; only an unread element has no
    products.
    """
    script = """
      $$('#stories button').find((one) => one.textContent.startsWith('NAME')).click();
      const seen = () => ['answer', 'view-channels', 'view-planes', 'turn', 'front', 'copies']
        .filter((id) => visible(id));
      for (let i = 0; i < 20 && !document.getElementById('story').hidden; i++) {
        log(text('story-place'), seen(), document.activeElement.id, location.hash);
        log(text('tale'));
        const isExplained = visible('view-planes') && chosen.step < 5;
        const added = products.slice(0, isExplained ? chosen.step : 0);
        log(products.length, products.at(-1)?.sum, added.map((one) => one.product));
        press('story-next');
      }
      log(title()); log(seen()); log(document.activeElement.type); press('reset'); log(title());
    """.replace("NAME", title)
    *steps, last, parts, focus, first = turned(browse, script)
    places, tales, sums = steps[::3], steps[1::3], [text.split() for text in steps[2::3]]
    for _, *numbers in sums:
        assert "0" not in ",".join(numbers).split(",")
    assert [count for count, *_ in sums].count("0") == (word == "size")
    assert 5 <= len(tales) <= 9
    for number, place in enumerate(places, 1):
        text, address = place.split(" #")
        assert text.startswith(f"Step {number} of {len(tales)} ")
        assert text.split()[4] in ("answer", "view-channels", "view-planes")
        assert text.endswith(" story-next")
        assert address == f"story={word},{number}"
    assert all(len(tale) > 50 for tale in tales)
    assert "urn the knobs" in tales[-1]
    assert last in ("1x5x6x6 * 10x5x3x3 -> 1x10x4x4", "1x3x5x5 * 4x3x3x3 -> 1x4x5x5",
                    "1x1x7 * 1x1x3 -> 1x1x5", "1x2x4x4 * 3x2x2x2 -> 1x3x3x3")  # fmt: skip
    assert parts == "answer,view-channels,view-planes,turn,front,copies"
    assert focus == "number"
    assert first == "1x2x5x5 * 3x2x3x3 -> 1x3x3x3"
    if word == "number":
        problem = ConvProblem((1, 2, 4, 4), (3, 2, 2, 2))
        explanation = cupyconv.explain(problem, values="integers", seed=3097)
        for place, element in ((5, "dw[2,1,1,1]"), (6, "dx[0,1,2,1]")):
            data = {key: np.asarray(explanation.data[key]).copy() for key in ("x", "w", "dy")}
            index = tuple(map(int, element[3:-1].split(",")))
            loss = [float((cupyconv.conv_forward(data["x"], data["w"]) * data["dy"]).sum())]
            data[element[1]][index] += 1
            loss.append(float((cupyconv.conv_forward(data["x"], data["w"]) * data["dy"]).sum()))
            value = explanation.element(element).computed
            assert loss[1] - loss[0] == value
            assert f"goes from {loss[0]:.0f} to {loss[1]:.0f}. The" in tales[place]
            assert tales[place].endswith(f"The difference, {value:.0f}, is {element}.")
        x, dy = explanation.data["x"][0, 1, 1, 1], explanation.data["dy"][0, 2, 0, 0]
        assert x * dy != 0
        assert f"grows by {x:.0f}. dy says" in tales[2]
        assert tales[2].endswith(f"[0,2,0,0] = {dy:.0f}. So the loss grows by {x * dy:.0f}.")


def test_story_of_the_flip_names_the_products(browse):
    """dx[4] sums the products that the story names; with a stride, fewer."""
    script = "log($$('#ledger tbody td:first-child').map((one) => one.textContent).join('; '));"
    products = "dy[0,0,4] · w[0,0,0]; dy[0,0,3] · w[0,0,1]; dy[0,0,2] · w[0,0,2]"
    assert turned(browse, script, place="#story=flip,2") == [products]
    products = "dy[0,0,2] · w[0,0,0]; dy[0,0,1] · w[0,0,2]"
    assert turned(browse, script, place="#story=flip,5") == [products]


def test_repairs_make_random_layers_valid(browse):
    """Each offered state is valid in the library; most errors of a single knob have one."""
    draw = random.Random(7)
    layers = [random_layer(draw) for _ in range(300)]
    script = f"""
      for (const layer of {json.dumps(layers)}) {{
        turn(knobsOf({{ layer, values: 'integers', seed: '1' }}));
        log(JSON.stringify(wrong ? repairs().map(([, state]) => layerOf(state)) : null));
      }}
    """
    found = [json.loads(line) for line in turned(browse, script)]
    for layer in (layer for repairs in found for layer in repairs or ()):
        ConvProblem(**layer)
    wrong = [repairs for repairs in found if repairs is not None]
    assert len(wrong) > 90
    assert sum(map(bool, wrong)) > 0.8 * len(wrong)


@pytest.mark.parametrize(
    ("problem", "bars"),
    [
        (ConvProblem((1, 1, 5), (1, 1, 3), stride=2, padding="same"), [(1, 5), (0, 6)]),
        (ConvProblem((1, 1, 5), (1, 1, 3), stride=2), [(0, 5), (0, 5), (5, 1)]),
        (ConvProblem((1, 1, 5), (1, 1, 3)), []),
    ],
    ids=["same", "zeros after the last window", "one size"],
)
def test_strip_draws_dx_of_every_size(browse, problem, bars):
    """A bar has the place of dx in the gradient of the padded input, as in cupyconv.explain."""
    script = """
      for (const bar of $$('.strip .crop')) {
        const [x, width] = ['x', 'width'].map((key) => Number(bar.getAttribute(key)));
        log((x - 3) / 22, (width + 5) / 22);
      }
      log($$('.strip .padded + text').length);
    """
    *seen, _ = turned(browse, script, problem)
    assert [tuple(map(float, line.split())) for line in seen] == bars


def test_controls_have_names_and_tab_stops(browse):
    """A screen reader has a name for each control, and the keyboard reaches each of them."""
    script = """
      pick('axes', '3'); pick('values', 'integers'); set('groups', 3);
      document.getElementById('copies').open = true;
      const named = (one) => (one.ariaLabel ?? '') + one.textContent + [...(one.labels ?? [])]
        .map((label) => label.textContent).join('');
      const parts = () => $$('button,input,select,summary,[role=grid],[role=img],[role=region]');
      log(parts().filter((one) => !named(one).trim()).length, parts().length > 60);
      press('reset');
      log(parts().filter((one) => !named(one).trim()).length, $$('.program button').length);
      log($$('#knobs :is(button,input,select)').filter((one) => one.tabIndex < 0).length);
      const labels = $$('#dials input').map(named);
      log(new Set(labels).size === labels.length, labels.slice(0, 2));
      for (const label of ['padding', 'axes']) {
        $$('#dials select').find((one) => one.ariaLabel === label).focus();
        pick(label, label === 'axes' ? '1' : 'same'); log(document.activeElement.ariaLabel);
      }
    """
    assert turned(browse, script) == [
        "0 true", "0 5", "0", "true input H,input W", "padding", "axes",
    ]  # fmt: skip


@pytest.mark.parametrize("loss", ["dot", "sum", "squares"])
def test_differences_check_the_chosen_gradient(browse, loss):
    """A finite difference of the loss confirms every number of the gradients that is chosen."""
    script = """
      pick('values', 'integers'); pick('loss', 'LOSS');
      for (const tensor of ['dw', 'dx']) {
        direct(tensor);
        for (const button of $$('.panel.result .c').slice()) {
          button.click();
          log(button.ariaLabel.split(' = ')[1], text('check').match(/difference, (.*), is d/)[1]);
        }
      }
      direct('y'); log(text('check'));
    """
    *pairs, of_y = turned(browse, script.replace("LOSS", loss))
    assert len(pairs) == 9 + 25
    assert all(len(set(pair.split())) == 1 for pair in pairs)
    assert of_y == ""


def test_difference_that_loses_its_digits_is_no_gradient(browse):
    script = """
      pick('loss', 'sum'); hand('x[0,0,0,0]', 1e25);
      direct('dw'); log(text('check')); log(text('told'));
    """
    check, told = turned(browse, script, place="#dw=0,0,1,1")
    assert "The difference, 0, is not dw[0,0,1,1], which is " in check
    assert re.search(r"which is (\S+): the loss", check)[1] == re.search(r": (\S+)\.$", told)[1]


def test_loss_and_values_that_change_each_other_are_announced(browse):
    script = """
      pick('values', 'dy'); log(text('notice')); pick('loss', 'sum'); log(text('notice'));
      pick('values', 'dy'); log(text('notice'));
      location.hash = '#input=1x4x8&filter=6x4x3&values=dy&loss=sum'; await wait(30);
      log(text('notice'));
      pick('values', 'x'); pick('loss', 'sum'); log(text('source'));
    """
    log = turned(browse, script)
    assert log[0] == ""
    assert log[1] == "The values are integers, because the loss determines dy."
    assert log[2] == "The loss is sum(dy · y) again, because the other losses determine dy."
    assert log[3].startswith('"values=dy" and "loss=sum" in the address exclude each other')
    assert "0 elsewhere, w is random integers of seed 0; dy is 1 everywhere" in log[4]


def test_passed_arrays_belong_to_the_first_layer(browse):
    x = np.ones(SMALL.input_shape, "float32")
    log = turned(browse, "log(text('notice')); pick('loss', 'sum'); log(text('notice'));", x=x)
    assert log[0] == ""
    assert log[1].startswith("The values of x that were passed belong to the first layer.")


def test_turned_knobs_keep_the_chosen_image(browse):
    script = """
      image(2); pick('loss', 'sum'); log(location.hash); pick('loss', 'dot'); log(location.hash);
      log(text('missing')); set('images', 2); log(location.hash);
    """
    problem = ConvProblem((3, 2, 4, 4), (3, 2, 2, 2), dtype="float16")
    turned_, back, missing, fewer = turned(browse, script, problem, "#dx=0,1,2,2")
    for hash_, image in ((turned_, 2), (back, 2), (fewer, 1)):
        assert f"dx={image},1,2,2" in hash_
    assert missing.startswith("? marks an omitted value.")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_terms_of_other_dtypes_are_exact(browse, dtype):
    """Sums that cancel have the digits of the library's sums of the same terms."""
    problem = ConvProblem((1, 4, 6, 6), (3, 4, 3, 3), dtype=dtype)
    script = "for (const b of $$('.panel.result .c').slice()) { b.click(); log(text('told')); }"
    told = turned(browse, script, problem, "#y=0,2,1,3")
    assert len(told) == 16
    explanation = cupyconv.explain(problem)
    for text in told:
        name, total = re.match(r"(\S+) is the sum of .*: (\S+)\.$", text).groups()
        assert total == f"{explanation.element(name).sum:.6g}", text


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_passed_arrays_have_the_digits_of_the_dtype(browse, dtype):
    """Arrays are converted to the dtype, and the page's sums have all digits of their numbers."""
    x = 1e6 + np.random.default_rng(3).normal(size=(1, 1, 12))
    problem = ConvProblem((1, 1, 12), (1, 1, 2), dtype=dtype)
    w = np.array([[[1.0, -1.0]]])
    log = turned(browse, "log(text('told'))", problem, "#y=0,0,3", x=x, w=w)
    first, second = x[0, 0, 3:5].astype(dtype)
    assert cupyconv.explain(problem, x=x, w=w).element("y[0,0,3]").sum == first - second
    assert log == [f"y[0,0,3] is the sum of 2 products: {first - second:.6g}."]


def test_float16_operands_are_exact(browse):
    """4128 and 4130 are the same float16, and NumPy writes it as 4130."""
    x = np.array([[[4128, -4152, 4128, 1]]], "float16")
    w, dy = np.array([[[1, -1]]], "float16"), np.ones((1, 1, 3), "float16")
    problem = ConvProblem((1, 1, 4), (1, 1, 2), dtype="float16")
    script = "log(text('told')); log($$('.panel')[0].querySelector('.c').ariaLabel);"
    told, first = turned(browse, script, problem, "#y=0,0,2", x=x, w=w, dy=dy)
    assert told == "y[0,0,2] is the sum of 2 products: 4127."
    assert first == "x[0,0,0] = 4128"


def test_difference_is_compared_with_the_exact_gradient(browse):
    """The float32 result of the library differs from the exact sum in the fourth digit."""
    problem = ConvProblem((1, 16, 14, 14), (8, 16, 3, 3))
    (check,) = turned(browse, "log(text('check'));", problem, "#dx=0,14,8,7")
    assert check.endswith("The difference, -0.000400244, is dx[0,14,8,7].")


def test_hidden_products_are_exact_where_sums_cancel(browse):
    x = np.random.default_rng(0).standard_normal((1, 40, 4, 4))
    x[:, :2] *= 1e9
    problem = ConvProblem((1, 40, 4, 4), (3, 40, 2, 2), dtype="float64")
    script = "log($$('#ledger tr').at(-1).children[2].textContent); log($$('#ledger tr').length);"
    hidden, count = turned(browse, script, problem, "#y=0,1,1,1", x=x)
    element = cupyconv.explain(problem, x=x).element("y[0,1,1,1]")
    drawn = {0, 1, 19, 20, 21, 38, 39}
    assert int(count) == 2 + 4 * len(drawn)
    w, window = np.asarray(element.data["w"])[1], x[0, :, 1:3, 1:3]
    others = [c for c in range(40) if c not in drawn]
    assert float(hidden) == pytest.approx((w[others] * window[others]).sum(), rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"], ids=["computed", "in part"])
def test_every_image_can_be_chosen(browse, dtype):
    """Each image shows its own numbers, or says that the page has no numbers of it."""
    problem = ConvProblem((3, 2, 4, 4), (3, 2, 2, 2), dtype=dtype)
    script = """
      direct('dx'); image(2); log(text('told')); log(numbers()); log(text('missing'));
      log(location.hash);
      direct('dw'); log(text('told')); log(text('image-count'));
      image(0); log(text('told'));
    """
    log = turned(browse, script, problem, values="integers")
    data = cupyconv.explain(problem, values="integers").data
    if dtype == "float32":
        assert log[1].split(",") == [f"{number:.0f}" for number in data["dx"][2, 1].ravel()]
        assert log[2] == ""
    else:
        assert "--element 'dx[2,1," in log[2]
    assert log[0].startswith("dx[2,1,")
    assert log[3].startswith("#dx=2,1,")
    total = f"{data['dw'][1, 1, 1, 1]:.0f}"
    said = f"dw[1,1,1,1] is the sum of 27 products over 3 images: {total}."
    assert log[4] == log[6] == said
    assert log[5].startswith("of 3: dw sums over all images")


def test_another_image_is_shown_without_computing_again(browse):
    script = """
      let runs = 0;
      const all_ = tensors.all;
      tensors.all = (...given) => { runs++; return all_(...given); };
      set('filters', 2); log(runs); image(1); log(runs, text('told')); set('filters', 3); log(runs);
    """
    problem = ConvProblem((2, 2, 5, 5), (3, 2, 3, 3))
    log = turned(browse, script, problem, place="#dx=0,1,2,2")
    value = cupyconv.explain(problem.replace(filter_shape=(2, 2, 3, 3))).element("dx[1,1,2,2]")
    assert log[0] == "1"
    assert re.match(r"1 dx\[1,1,2,2\] is .*: (.*)\.$", log[1])[1] == f"{value.sum:.6g}"
    assert log[2] == "2"


def test_numbers_can_be_set_by_hand(browse, monkeypatch):
    """Set numbers change all results; the address, the program and a smaller layer keep them."""
    script = """
      pick('values', 'integers'); pick('data format', 'last'); cell('x[0,1,2,2]').click();
      log(document.getElementById('hand-name').value, document.getElementById('hand-value').value);
      hand('x[0, 1, 2, 2]', 7); hand('w[1,1,0,0]', -2); hand('dy[0,2,9,0]', 1);
      log(text('notice'));
      direct('y'); log(numbers()); log(location.hash); log(text('source'));
      log(programs()[1]);
      set('input H', 4); set('input W', 4); log(text('source')); press('hand-undo');
      log(text('source'), visible('hand-undo'));
    """
    log = turned(browse, script)
    data = cupyconv.explain(SMALL.replace(**LAST), values="integers").data
    x, w = data["x"].copy(), data["w"].copy()
    assert log[0] == f"x[0,1,2,2] {x[0, 2, 2, 1]:.0f}"
    assert log[1].startswith("Set an element to a number, for example x[0,0,0,0] to 2. Indices")
    x[0, 2, 2, 1], w[0, 0, 1, 1] = 7, -2
    y = cupyconv.conv_forward(x, w, data_format="NHWC")
    assert log[2].split(",") == [f"{number:.0f}" for number in y[0, ..., 1].ravel()]
    assert "&values=integers&set=x:0,1,2,2:7;w:1,1,0,0:-2&y=0,1," in log[3]
    assert "random integers of seed 0, x[0,1,2,2] = 7, w[1,1,0,0] = -2." in log[4]
    shown = []
    monkeypatch.setattr(cupyconv.Explanation, "show", lambda self, name: shown.append(self))
    exec(log[5].replace("~", "\n"), {})
    np.testing.assert_array_equal(shown[0].data["y"], y)
    assert "x[0,1,2,2] = 7" in log[6]
    assert log[7].split() == ["Values:", "random", "integers", "of", "seed", "0.", "false"]
    place = log[3]
    assert turned(browse, "log(numbers()); log(location.hash);", place=place) == [log[2], place]


def test_layers_too_large_to_compute_say_so(browse):
    script = """
      set('input H', 1000); set('input W', 1000); log(text('missing')); log(facts().slice(0, 40));
      log($$('.panel.result .c')[0].textContent); set('input H', 4000); log(field('input H').value);
      log(text('notice'));
    """
    log = turned(browse, script)
    assert "elements and 40,000,000 products. Turn the sizes down" in log[0]
    assert log[1].startswith("H and W: output floor((1000")
    assert log[3:] == ["1000", 'The knob "input H" goes up to 1,000.']


@pytest.mark.parametrize("batch", range(3))
def test_random_turned_layers_are_drawn_correctly(browse, batch):
    """The drawn results of random layers are the library's, for all passes and formats."""
    draw = random.Random(batch)
    layers = []
    while len(layers) < 20:
        layer = valid_layer(draw)
        if ConvProblem(**layer).N:
            layers.append(layer)
    script = f"""
      for (const layer of {json.dumps(layers)}) {{
        turn(knobsOf({{ layer, values: 'integers', seed: '1' }}));
        const seen = {{ wrong: text('wrong'), shapes: text('shapes') }};
        for (const tensor of ['dw', 'dx', 'y']) {{
          direct(tensor);
          seen[tensor] = $$('.panel.result .c').map((one) => one.ariaLabel);
          seen[`sum ${{tensor}}`] = text('told');
        }}
        log(JSON.stringify(seen));
      }}
    """
    for layer, line in zip(layers, turned(browse, script), strict=True):
        problem, seen = ConvProblem(**layer), json.loads(line)
        data = cupyconv.explain(problem, values="integers", seed=1).data
        assert "x".join(map(str, problem.output_shape)) in seen["shapes"]
        for tensor in ("dw", "dx", "y"):
            order = problem.filter_axes if tensor == "dw" else problem.data_axes
            numbers = data[tensor].transpose(order)
            assert seen[tensor], (layer, tensor)
            for label in seen[tensor]:
                index = tuple(map(int, re.search(r"\[(.*)\]", label)[1].split(",")))
                assert label == f"{tensor}[{','.join(map(str, index))}] = {numbers[index]:.0f}"
            total = re.search(r": (-?\d+)\.$", seen[f"sum {tensor}"])
            index = tuple(map(int, re.search(r"\[(.*?)\]", seen[f"sum {tensor}"])[1].split(",")))
            assert int(total[1] if total else 0) == numbers[index], (layer, tensor)


def programs(browse, problem: ConvProblem, **kept) -> list[str]:
    """Return the texts of the programs, after a turn of a knob and a reset."""
    script = """
      const before = title(); set('filters', 5); press('reset'); log(title() === before);
      programs().forEach((one) => log(one));
    """
    same, *found = turned(browse, script, problem, **kept)
    assert same == "true"
    return found


def test_programs_have_the_dtype_of_the_first_layer(browse):
    shell, python, *_ = programs(browse, SMALL.replace(dtype="float64"))
    assert " --dtype float64 --element" in shell
    assert '(3, 2, 3, 3), dtype="float64")' in python
    _, _, torch, tensorflow, _ = programs(browse, SMALL.replace(dtype="complex64"))
    assert torch == "The programs below convert complex gradients."
    assert tensorflow == "TensorFlow has no complex convolution."


def test_programs_name_the_passed_arrays(browse):
    shell, python, *_ = programs(browse, SMALL, x=np.ones((1, 2, 5, 5), "float32"))
    assert shell.startswith("The values are arrays that were passed.")
    assert "~x = numbers(123457, (1, 2, 5, 5)).astype(" in python
    assert "# replace it by the array that you passed~explanation" in python
    assert "explain(problem, x=x)" in python
