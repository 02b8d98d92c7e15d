"""The rules and small convolutions in the page's own JavaScript, compared with the library."""

from __future__ import annotations

import itertools
import json
import random
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem
from cupyconv.explaining import adjoints, javascript, page, scene, translate, values
from cupyconv.formats import data_formats, filter_formats
from tests import browser

FOLDER = Path(cupyconv.__file__).parent / "explaining"


def random_layer(draw: random.Random) -> dict[str, Any]:
    """Return random arguments of ConvProblem; about half of them are invalid."""
    rank = draw.choice((1, 2, 2, 2, 3))
    most = (40, 12, 6)[rank - 1]

    def size(low: int, high: int, wrong: float = 0.01) -> int:
        return draw.randint(-1, 0) if draw.random() < wrong else draw.randint(low, high)

    def setting(high: int) -> int | list[int]:
        if draw.random() < 0.5:
            return size(1, high)
        return [size(1, high) for _ in range(rank)]

    groups = size(1, draw.choice((1, 1, 3)))
    depth = size(1, 4)
    channels, filters = max(groups, 1) * depth, max(groups, 1) * draw.randint(1, 4)
    if draw.random() < 0.2:
        channels = size(1, 8)
    if draw.random() < 0.1:
        filters = size(1, 8)
    layout = draw.choice((None, None, *data_formats(rank)))
    filter_layout = draw.choice((None, None, *filter_formats(rank)))
    padding: Any = draw.choice(("valid", "same", "same_lower", "SAME", 0, size(0, 3, 0.03)))
    if draw.random() < 0.4:
        padding = [draw.choice((size(0, 3), [size(0, 3), size(0, 3)])) for _ in range(rank)]
    axes = "DHW"[-rank:]
    sizes = {"N": size(1, 3), "C": channels, "O": filters, "I": depth}
    inputs = {letter: size(1, most) for letter in axes}
    taps = {letter: size(1, draw.choice((3, 5))) for letter in axes}
    order = layout or data_formats(rank)[0]
    filter_order = filter_layout or filter_formats(rank)[order.endswith("C")]
    return {
        "input_shape": [{**sizes, **inputs}[letter] for letter in order],
        "filter_shape": [{**sizes, **taps}[letter] for letter in filter_order],
        "stride": setting(3),
        "padding": padding,
        "dilation": setting(draw.choice((1, 1, 3))),
        "groups": groups,
        "data_format": layout,
        "filter_format": filter_layout,
    }


def in_library(layer: dict[str, Any]) -> dict[str, Any]:
    """Return what the library says about a layer, in the form of the page's script."""
    try:
        problem = ConvProblem(**layer)
    except ConvError as error:
        return {"error": [error.rule, error.values, error.axis]}
    return {
        "output": list(problem.output_shape),
        "axes": [
            {
                "formula": axis.formula,
                "padding": [axis.pad_before, axis.pad_after],
                "inputs": [axis.valid_input_sizes[0], axis.valid_input_sizes[-1]],
                "unread": axis.unread_inputs,
            }
            for axis in problem.axes
        ],
    }


def valid_layer(draw: random.Random) -> dict[str, Any]:
    """Return random arguments of a valid ConvProblem."""
    while True:
        layer = random_layer(draw)
        try:
            ConvProblem(**layer)
        except ConvError:
            continue
        return layer


FIRST = page._content(scene.scene(ConvProblem((1, 1, 3), (1, 1, 2)), {}), scene.DRAWN, "all")
"""Data of a page, whose limits and texts the scenes of turned knobs read."""


def in_scene(layer: dict[str, Any], values: str, seed: int) -> dict[str, Any]:
    """Return the library's scene, values and calls of a layer."""
    problem = ConvProblem(**layer)
    explanation = cupyconv.explain(problem, values=values, seed=seed)
    made = scene.scene(explanation.problem, explanation.data)
    content = page._content(made, scene.DRAWN, "pair")
    drawn = {name: content[name] for name in ("opened", "image", "k", "c", "directions")}
    rules = {"y": problem.axes}
    rules["dx"] = [axis.rule for axis in adjoints.input_gradient_axes(problem)]
    rules["dw"] = [axis.rule for axis in adjoints.filter_gradient_axes(problem)]
    sizes = ("input", "filter", "output", "stride", "dilation", "pad_before", "pad_after")
    for tensor, direction in made.directions.items():
        drawn["directions"][tensor] |= {
            "terms": direction.terms,
            "note": direction.note,
            "rules": [[getattr(rule, size) for size in sizes] for rule in rules[tensor]],
        }
    tensors = {
        name: np.asarray(explanation.data[name], "float64")
        .transpose(problem.filter_axes if name[-1] == "w" else problem.data_axes)
        .ravel()
        .tolist()
        for name in ("x", "w", "dy", "y", "dx", "dw")
        if problem.N
    }
    calls = {
        f"{entry.framework}{'Transposed' if reverses else ''}": entry.call
        for reverses in (False, True)
        for entry in translate.translations(problem, reverses)
    }
    return {"scene": drawn, "tensors": tensors, "calls": calls}


def in_browser(folder: Path, cases: list[Any], script: str, *options: str) -> list[Any]:
    """Return the results of a JavaScript function ``result(one)`` for each case.

    Args:
        options: more options of the browser.
    """
    sources = javascript.rules() + "".join(
        (FOLDER / name).read_text(encoding="utf-8")
        for name in ("rules.js", "tensors.js", "scenes.js")
    )
    data = json.dumps(cases).replace("<", "\\u003c")
    target = folder / "cases.html"
    target.write_text(
        f"<body><script>'use strict';{sources}</script><script>const cases = {data};{script}"
        "document.body.dataset.results = JSON.stringify(cases.map(result));</script>",
        encoding="utf-8",
    )
    shown = browser.document(target.as_uri(), *options)
    found = re.search(r'data-results="([^"]*)"', shown)
    assert found, f"the script failed: {shown[-500:]}"
    return json.loads(unescape(found[1]))


RULES = """
function result(layer) {
  try {
    const { output_shape, axes } = rules.problem(layer);
    return { output: output_shape, axes: axes.map((axis) => ({
      formula: axis.formula, padding: [axis.pad_before, axis.pad_after],
      inputs: [0, -1].map((end) => axis.valid_input_sizes.at(end)),
      unread: rules.unread(axis).length })) };
  } catch (error) {
    return { error: error.rule ? [error.rule, error.values, error.axis] : error.stack };
  }
}
"""


def test_page_rules_equal_the_library(tmp_path):
    """Sizes, padding, intervals and errors are the same for 1,000 layers."""
    draw = random.Random(0)
    layers = [random_layer(draw) for _ in range(1000)]
    expected = [in_library(layer) for layer in layers]
    kinds = {one["error"][0] for one in expected if "error" in one}
    assert len(kinds) >= 6, "too few kinds of errors to compare"
    results = in_browser(tmp_path, layers, RULES)
    for layer, one, found in zip(layers, expected, results, strict=True):
        assert found == one, layer


SCENES = """
function result([layer, values, seed]) {
  const { problem, data, directions: all, opened, image, k, c } =
    scenes.of({ layer, values, seed }, FIRST);
  const sizes = ["input", "filter", "output", "stride", "dilation", "pad_before", "pad_after"];
  const directions = Object.fromEntries(Object.entries(all).map(
    ([tensor, { at, terms, note, rule, rules }]) => [tensor, { at, terms, note, rule,
      rules: rules.map((one) => sizes.map((size) => one[size])) }]));
  const tensors = Object.fromEntries(["x", "w", "dy", "y", "dx", "dw"].filter(() => data)
    .map((name) => [name, Array.from(data[name])]));
  const calls = Object.fromEntries(["PyTorch", "TensorFlow", "JAX"].flatMap((name) =>
    ["", "Transposed"].map((kind) => [name + kind, scenes[name.toLowerCase() + kind](problem)])));
  return { scene: { opened, image, k, c, directions }, tensors, calls };
}
"""


@pytest.mark.parametrize("batch", range(8))
def test_scenes_of_knobs_equal_the_library(tmp_path, batch):
    """Drawings, calls of other frameworks, random numbers and all results are the library's."""
    draw = random.Random(batch)
    cases = [(valid_layer(draw), draw.choice(("integers", "normal")), batch) for _ in range(50)]
    expected = [in_scene(*case) for case in cases]
    script = f"const FIRST = {json.dumps(FIRST)};{SCENES}"
    for case, one, found in zip(cases, expected, in_browser(tmp_path, cases, script), strict=True):
        assert found["scene"] == json.loads(json.dumps(one["scene"])), case
        del one["calls"]["ONNX"], one["calls"]["ONNXTransposed"]
        assert found["calls"] == one["calls"], case
        exactly = case[1] == "integers"
        for name, numbers in one["tensors"].items():
            same = pytest.approx(numbers, rel=0 if exactly else 1e-4, abs=0 if exactly else 1e-4)
            assert found["tensors"][name] == same, (name, case)


@pytest.mark.thorough
def test_largest_layers_are_computed_in_little_memory(tmp_path):
    """A pass of 32 million products fits into a heap of 64 MB: no list holds the products."""
    layers = [
        {"input_shape": (1, 1, 300, 300), "filter_shape": (1, 1, 20, 20)},
        {"input_shape": (1, 1, 200, 400, 1), "filter_shape": (1, 1, 20, 20, 1)},
        {"input_shape": (16, 380, 1, 1), "filter_shape": (400, 380, 1, 1), "stride": 2},
    ]
    script = f"""
    function result(layer) {{
      const knobs = {{ layer, values: "integers", seed: "0" }};
      const {{ data }} = scenes.of(knobs, {json.dumps(FIRST)});
      return ["y", "dx", "dw"].map((name) =>
        data[name].reduce((sum, value, i) => sum + value * (i % 97), 0));
    }}
    """
    heap = "--js-flags=--max-old-space-size=64"
    for layer, found in zip(layers, in_browser(tmp_path, layers, script, heap), strict=True):
        data = cupyconv.explain(ConvProblem(**layer), values="integers").data
        arrays = [np.asarray(data[name], "float64").ravel() for name in ("y", "dx", "dw")]
        assert found == [float(array @ (np.arange(array.size) % 97)) for array in arrays]


def test_random_numbers_of_the_page_equal_the_library(tmp_path):
    seeds = [0, 1, 123_456_789, 2**40 + 3, 2**63 - 1]
    script = """
    const result = ([seed, kind, place, sizes]) =>
      Array.from(tensors.numbers(tensors.firstNumber(seed, place), sizes, kind));
    """
    cases = [(str(seed), kind, place, sizes) for seed in seeds for kind in values.KINDS
             for place, sizes in ((0, (5000,)), (2, (3, 1, 20, 30)))]  # fmt: skip
    for case, found in zip(cases, in_browser(tmp_path, cases, script), strict=True):
        seed, kind, place, sizes = case
        first = values.first_number(int(seed), place)
        expected = values.numbers(first, sizes, kind, "float32")
        np.testing.assert_array_equal(found, expected.ravel())


def test_larger_array_keeps_the_numbers_of_a_smaller_one():
    """Turning a size knob only adds elements; the last shape has more than PERIOD elements."""
    for shape in ((2, 3, 4, 6), (3, 4, 1, 7), (2, 7, 400, 400), (1000, 1001, 1, 2)):
        larger = values.numbers(7, shape, "integers", "int8")
        smaller = values.numbers(7, (2, 3, 1, 2), "integers", "int8")
        np.testing.assert_array_equal(larger[:2, :3, :1, :2], smaller)


def test_random_numbers_are_spread(tmp_path):
    """Means and deviations are those of normal numbers; neighbours are not correlated."""
    for seed, shape in itertools.product(range(20), [(20_000,), (50, 20, 20), (20_000, 1)]):
        numbers = values.numbers(values.first_number(seed), shape, "normal", "float64").ravel()
        assert abs(numbers.mean()) < 0.03
        assert abs(numbers.std() - 1) < 0.02
        lags = [np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1] for lag in range(1, 40)]
        assert max(map(abs, lags)) < 0.05
        integers = values.numbers(values.first_number(seed), (20_000,), "integers", "int64")
        assert min(np.bincount(integers + 3, minlength=7)) > 2_600
