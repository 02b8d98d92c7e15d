"""Transposed layers on the command line and in explanations, compared with PyTorch and JAX."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, checking
from cupyconv.explaining import transposed
from cupyconv.problem import shape_text
from tests.browser import acted, logged
from tests.command import parsed, refused, said
from tests.explaining.test_page_knobs import HELPERS

LAYER = ("1x8x4x4", "8x3x2x2", "--stride", "4", "--transposed")


def random_layer(rng: random.Random) -> tuple[ConvProblem, dict]:
    """Return a problem, and the arguments of PyTorch's conv_transpose2d for the reversed layer."""
    stride, dilation, groups = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 2)
    taps, size = rng.randint(1, 4), rng.randint(1, 5)
    span = (taps - 1) * dilation + 1
    extra = rng.randrange(stride)
    padding = rng.randint(0, max(((size - 1) * stride + span + extra - 1) // 2, 0))
    x, w = (2, 2 * groups, size, size), (2 * groups, 3, taps, taps)
    layer = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    problem = ConvProblem.from_output(x, w, output_padding=extra, **layer)
    return problem, {**layer, "output_padding": extra}


def test_sizes_match_pytorch():
    torch = pytest.importorskip("torch")
    rng = random.Random(4)
    for _ in range(200):
        problem, layer = random_layer(rng)
        shapes = {entry.tensor: entry.shape for entry in transposed.reasons(problem)}
        y = torch.nn.functional.conv_transpose2d(
            torch.zeros(shapes["x"]), torch.zeros(shapes["w"]), **layer
        )
        assert shapes["y"] == shapes["dy"] == tuple(y.shape)
        assert shapes["db"] == (y.shape[1],)
        for axis, extra in zip(problem.axes, [layer["output_padding"]] * 2, strict=True):
            assert transposed.output_padding(axis) == extra


@pytest.mark.parametrize("padding", ["valid", "same"])
def test_other_frameworks_size_matches_jax(padding):
    jax = pytest.importorskip("jax")
    rng, told = random.Random(5), 0
    for _ in range(100):
        size, taps, stride = rng.randint(1, 6), rng.randint(1, 5), rng.randint(1, 6)
        x, w = (1, 2, size, size), (2, 3, taps, taps)
        extra = rng.randrange(stride)
        problem = ConvProblem.from_output(
            x, w, stride=stride, padding=padding, output_padding=extra
        )
        theirs = jax.eval_shape(
            lambda a, b, s=stride: jax.lax.conv_transpose(
                a, b, (s, s), padding.upper(), dimension_numbers=("NCHW", "IOHW", "NCHW")
            ),
            np.zeros(x, "float32"),
            np.zeros(w, "float32"),
        ).shape
        entry = transposed.axis_reasons(problem)[0]
        if theirs[2] == problem.input_sizes[0]:
            assert entry.frameworks == ""
            continue
        told += 1
        assert f"give {theirs[2]} for" in entry.frameworks
        more = int(entry.frameworks.split("output_padding ")[1].split()[0])
        assert 0 <= more < stride
        again = ConvProblem.from_output(x, w, stride=stride, padding=padding, output_padding=more)
        assert again.input_sizes == theirs[2:]
    assert told > 20


def test_outputs_without_a_tap_are_the_bias():
    rng = random.Random(6)
    for _ in range(50):
        problem, layer = random_layer(rng)
        w = np.ones(problem.filter_shape, "float32")
        x = np.ones(problem.output_shape, "float32")
        y = cupyconv.conv_transpose(x, w, **layer)
        rows = np.count_nonzero(y[0, 0].any(axis=1))
        text = transposed.axis_reasons(problem)[0].unreached
        told = int(text.split()[0]) if text else 0
        # Rows of zeros show unreached outputs only if the other axis has reached outputs.
        if y.any():
            assert problem.input_sizes[0] - rows == told


def test_grads_match_autograd(tmp_path):
    torch = pytest.importorskip("torch")
    saved = tmp_path / "all.npz"
    words = ("2x4x5x4", "4x3x3x2", "--stride", "2x3", "--padding", "1x0", "--groups", "2")
    words = (*words, "--output-padding", "1x2", "--dtype", "float64", "--transposed")
    text = said("grads", *words, "--save", saved)
    assert "0 failed" in text
    data = loaded(saved)
    x, w, dy = (torch.tensor(data[name], requires_grad=True) for name in ("x", "w", "dy"))
    b = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.conv_transpose2d(x, w, b, (2, 3), (1, 0), (1, 2), 2)
    y.backward(dy)
    expected = {"y": y.detach(), "dx": x.grad, "dw": w.grad, "db": b.grad}
    for name, value in expected.items():
        np.testing.assert_allclose(data[name], value, rtol=1e-12, atol=1e-12, err_msg=name)
    again = tmp_path / "again.npz"
    files = [word for name in ("x", "w", "dy") for word in (f"--{name}", f"{saved}:{name}")]
    rules = words[words.index("--stride") : words.index("--dtype")]
    said("grads", *files, *rules, "--transposed", "--save", again, "--no-check")
    repeated = loaded(again)
    for name in data:
        np.testing.assert_array_equal(repeated[name], data[name])


def test_all_gradients_of_the_layer_are_checked():
    words = ("2x4x4x4", "4x3x3x3", "--transposed", "--stride", "2", "--groups", "2")
    (layer,) = parsed("grads", *words)["layers"]
    checked: dict[str, list[str]] = {}
    for one in layer["agreements"]:
        assert one["passed"]
        checked.setdefault(one["compared_with"], []).append(one["tensor"])
    assert checked["finite differences"] == ["dx", "dw", "db"]
    assert checked["float64 reference"] == ["y", "dx", "dw", "db"]


@pytest.mark.parametrize("most_flops", [checking.LARGE, 1])
@pytest.mark.parametrize("groups", [1, 2])
def test_finite_differences_find_a_wrong_gradient(monkeypatch, most_flops, groups):
    monkeypatch.setattr(checking, "LARGE", most_flops)
    problem = ConvProblem((2, 6, 7, 8), (4, 6 // groups, 3, 2), stride=2, groups=groups)
    generator = np.random.default_rng(0)
    shapes = (problem.output_shape, problem.filter_shape, problem.input_shape)
    operands = checking.Operands(*map(generator.standard_normal, shapes))
    problem = problem.replace(dtype="float64")
    results = checking.compute(problem, operands, "auto", is_transposed=True)
    truth = checking.Truth(problem, operands, is_transposed=True)
    assert all(one.passed for one in truth.against_finite_differences(results, 0))
    for name in ("dx", "dw", "db"):
        wrong = results._replace(**{name: getattr(results, name) * 1.001})
        found = [one.tensor for one in truth.against_finite_differences(wrong, 0) if not one.passed]
        assert found == [name]


def loaded(path):
    """Return the arrays of an npz file, which is closed."""
    with np.load(path) as file:
        return dict(file)


def test_json_has_the_layers_own_shapes():
    layer = parsed("shapes", *LAYER, "--output-padding", "2")["layers"][0]
    assert layer["configuration"]["transposed"] is True
    assert layer["configuration"]["input"] == [1, 8, 4, 4]
    assert layer["configuration"]["output_shape"] == [1, 3, 16, 16]
    assert layer["configuration"]["output_padding"] == [2, 2]
    assert layer["shapes"]["y"] == layer["shapes"]["dy"] == [1, 3, 16, 16]
    assert layer["shapes"]["x"] == layer["shapes"]["dx"] == [1, 8, 4, 4]
    gives = {entry["pass"]: entry["gives"] for entry in layer["passes"]}
    assert gives == {"forward": "dx", "backprop_input": "y", "backprop_filter": "dw"}


@pytest.mark.parametrize("option", ["--output-padding=0", "--output-shape=1x3x7x7"])
def test_shape_of_dy_that_contradicts_an_option_is_rejected(option):
    words = ("--filter", "4x3x3x3", "--stride", "2", "--transposed", "--dy", "1x3x8x8")
    assert "the result is 1x3x7x7" in refused("shapes", *words, option)


def test_toml_describes_transposed_layers(tmp_path):
    file = tmp_path / "up.toml"
    file.write_text(
        'input = "1x8x4x4"\nfilter = "8x3x2x2"\nstride = 4\ntransposed = true\n'
        'output_shape = "1x3x16x16"\n'
    )
    assert "1x8x4x4 * 8x3x2x2 -> 1x3x16x16" in said("shapes", "--config", file)
    # The option replaces the size of the file.
    words = ("shapes", "--config", file, "--output-padding", "1")
    assert "1x8x4x4 * 8x3x2x2 -> 1x3x15x15" in said(*words)
    file.write_text('input = "1x8x4x4"\nfilter = "8x3x2x2"\ntransposed = "yes"\n')
    assert "must be true or false" in refused("shapes", "--config", file)


def test_explanation_names_each_tensor_twice():
    text = " ".join(said("explain", *LAYER).split())
    assert "output_padding 2 gives this size here" in text
    assert "The convolution that the transposed layer reverses" in text
    told = parsed("explain", *LAYER)["layers"][0]["transposed"]
    assert told["names_in_convolution"]["y"] == "dx"
    assert told["shapes"]["y"] == [1, 3, 14, 14]
    problem = ConvProblem((1, 3, 14, 14), (8, 3, 2, 2), stride=4)
    assert cupyconv.explain(problem).to_dict()["transposed"] is None
    explanation = cupyconv.explain(problem, transposed=True)
    assert explanation.to_dict()["transposed"] == told
    assert explanation.to_dict()["shapes"] == told["shapes"]
    for drawn in (explanation.svg("y[0,0,13,13]"), explanation.page("y[0,0,13,13]")):
        assert "transposed layer: 1x8x4x4 * 8x3x2x2 -&gt; 1x3x14x14<" in drawn
        assert "input gradient of the convolution 1x3x14x14 * 8x3x2x2 -&gt; 1x8x4x4." in drawn
    assert "y[0,0,13,13] (inverted colours) is the sum of" in explanation.svg("y[0,0,13,13]")


SMALL = ConvProblem.from_output((2, 4, 3), (4, 2, 3), stride=2, padding=1, output_padding=1)


def on_page(browse, script: str, problem: ConvProblem = SMALL, place: str = "") -> list[str]:
    return logged(browse(problem, place, acted(HELPERS + script), transposed=True))


@pytest.mark.costly  # opens a page
def test_page_of_a_transposed_layer_has_its_own_names(browse):
    script = """
      log(text('shapes')); log(text('bias')); log($$('#directions span').map((s) => s.textContent));
      for (const tensor of ['dw', 'dx', 'y']) {
        direct(tensor); log(text('told').split(' ')[0], numbers()); log(text('rule').split('.')[0]);
      }
      log(location.hash);
    """
    log = on_page(browse, script)
    explanation = cupyconv.explain(SMALL, transposed=True)
    data = explanation.data
    assert log[0] == "y, dy 2x2x6 NCWx, dx 2x4x3 NCWw, dw 4x2x3 OIWdb 2"
    db = float(data["x"][:, 1].sum())  # dy of the layer is x of the convolution
    assert log[1].startswith("db[1], the gradient of the bias, is the sum of dy[1] over all images")
    assert float(log[1].split(": ")[1].rstrip(".")) == pytest.approx(db, rel=1e-5)
    assert log[2] == "dy, x → dw,x, w → y,dy, w → dx"
    for place, (own, name) in enumerate({"dw": "dw", "y": "dx", "dx": "y"}.items()):
        element, shown = log[3 + 2 * place].split(" ")
        assert element.startswith(f"{own}[")
        index = tuple(map(int, element[len(own) + 1 : -1].split(",")))[:2]
        expected = data[name][index].ravel()
        assert list(map(float, shown.split(","))) == pytest.approx(expected.tolist(), rel=1e-5)
        assert log[4 + 2 * place].split(", where")[0] == explanation.element(element).rule
    assert log[9].startswith("#dx=0,")


@pytest.mark.costly  # opens a page
def test_knobs_of_a_transposed_layer_are_its_own(browse):
    """Sizes follow PyTorch's formula, and the address alone opens the same layer."""
    script = """
      const own = ['input', 'filter', 'stride', 'dilation', 'padding before', 'output_padding'];
      log(own.map((label) => field(`${label} W`).value));
      log($$('.counts > div > span:first-child').map((s) => s.textContent));
      set('stride W', 3); set('output_padding W', 2); set('input W', 5); set('channels of y', 3);
      log(title()); log(facts()); pick('padding', 'same'); log(title()); log(location.hash);
      set('output_padding W', 3); log(text('wrong')); $$('.way')[0].click(); log(title());
      pick('padding', 'numbers'); set('input W', 1); set('padding before W', 9); log(text('wrong'));
    """
    log = on_page(browse, script)
    assert log[0] == "3,3,2,1,1,1"
    assert log[1] == "images,channels of x,channels of y,groups"
    title = "transposed layer: 2x4x5 * 4x3x3 -> 2x3x15"
    assert log[2] == log[4] == log[7] == title
    assert "output (5 - 1)*3 + 3 - 2 + output_padding 2 = 15; the padding crops 1 before" in log[3]
    assert "output_padding 0 to 2 gives sizes 13 to 15." in log[3]
    assert log[5].startswith("#input=2x4x5&filter=4x3x3&stride=3&padding=same&output_padding=2&y=0")
    assert log[6].startswith("Output_padding must be at least 0 and less than the stride (axis W)")
    assert "the result of a transposed convolution must have a size of at least 1" in log[8].lower()
    script = "log(title()); log(location.hash);"
    assert on_page(browse, script, place=log[5]) == [title, log[5]]


@pytest.mark.costly  # opens a page
@pytest.mark.parametrize("loss", ["dot", "sum", "squares"])
def test_programs_and_checks_of_a_transposed_page_hold(browse, loss):
    """The programs compute the numbers of the page, which the change of the loss confirms."""
    pytest.importorskip("torch")
    script = """
      pick('values', 'integers'); hand('x[0,1,2]', 5); pick('loss', 'LOSS'); set('stride W', 3);
      log(JSON.stringify($$('.program pre').map((one) => one.textContent)));
      for (const tensor of ['dw', 'dx', 'y']) {
        direct(tensor);
        log($$('.panel.result h3')[0].textContent, numbers());
        for (const button of $$('.panel.result .c').slice(0, 4)) {
          button.click();
          const [, difference] = text('check').match(/difference, (.*), is d/) ?? [];
          log(button.ariaLabel.split(' = ')[1], difference);
        }
      }
    """
    log = on_page(browse, script.replace("LOSS", loss))
    python, torch_, *_, jax_ = json.loads(log[0])
    checks = [line.split(" ") for line in log[1:] if "]" not in line]
    assert [pair for pair in checks if pair[1] and pair[0] != pair[1]] == []
    assert sum(bool(pair[1]) for pair in checks) == 3 + 3  # elements of dw and dx
    planes = [line.rsplit(" ", 1) for line in log[1:] if "]" in line]
    for program in (python.replace("explanation.show", "str"), torch_, jax_):
        names: dict = {}
        exec(program, names)
        if "explanation" in names:
            data = names["explanation"].data
            results = {"y": data["dx"], "dx": data["y"], "dw": data["dw"]}
        else:
            results = {name: names[name.upper()] for name in ("y", "dx", "dw")}
        for plane, shown in planes:
            tensor, index = re.fullmatch(r"(\w+)\[(.*)\].*", plane).groups()
            place = tuple(map(int, index.split(",")))
            array = results[tensor]
            array = np.asarray(array.detach() if hasattr(array, "detach") else array)
            expected = array[place if tensor == "dw" else (0, *place)].ravel()
            assert list(map(float, shown.split(","))) == expected.tolist()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--output-padding", "4"), "0 to 3 would fit. Use --output-padding 3"),
        (("--output-padding", "1", "--output-shape", "1x3x14x14"), "must be given only once"),
        (("--output-shape", "1x3x19x19"), "Use a result of 14 to 17 by 14 to 17"),
        (("--dy", "1x3x15x15"), "Use --output-shape 1x3x15x15"),
        (("--sweep", "stride=1:3"), "Leave it out"),
    ],
)
def test_errors_name_the_way_out(words, text):
    assert text in refused("shapes", *LAYER, *words)


def test_dy_gives_the_input_and_the_output_padding():
    rng = random.Random(7)
    for _ in range(20):
        problem, layer = random_layer(rng)
        words = [f"--{key.replace('_', '-')}={value}" for key, value in layer.items()]
        given = ("--dy", shape_text(problem.input_shape), "--filter")
        own = shape_text(problem.output_shape), shape_text(problem.filter_shape)
        told = said("shapes", *given, own[1], *words[:-1], "--transposed")
        assert told == said("shapes", *own, *words, "--transposed")


def test_dy_needs_layers_of_one_kind(tmp_path):
    file = tmp_path / "two.toml"
    layer = '[[layer]]\ninput = "1x8x4x4"\nfilter = "8x8x2x2"\n'
    file.write_text(f"{layer}{layer}transposed = true\n")
    text = refused("shapes", "--config", file, "--dy", "1x8x3x3")
    assert "1 of 2 layers are transposed" in text


def test_output_padding_needs_a_transposed_layer():
    text = refused("shapes", *LAYER[:-1], "--output-padding", "1")
    assert "give --transposed" in text


def test_dy_shape_is_checked():
    for command in ("explain", "grads"):
        text = refused(command, *LAYER, "--dy", "1x3x15x15")
        assert text.rstrip().endswith("Use --output-shape 1x3x15x15")
        said(command, *LAYER, "--dy", "1x3x14x14")
        text = refused(command, "1x3x7x7", "4x3x3x3", "--dy", "1x4x7x7")
        assert "Use --padding same, use --padding 1, " in text


def test_explanation_of_a_complex_layer_has_no_frameworks():
    problem = cupyconv.ConvProblem((1, 1, 5), (1, 1, 3), dtype="complex64")
    text = str(cupyconv.explain(problem, transposed=True, values=None))
    assert "Number of terms" in text
    assert "in other frameworks" not in text


def test_complex_layers_are_rejected():
    assert "must have a real dtype" in refused("explain", *LAYER, "--dtype", "complex64")


def test_printed_program_draws_the_numbers_of_grads(capsys):
    pytest.importorskip("torch")
    exec(said("explain", *LAYER, "--code", "pytorch"), {})
    printed = re.findall(r"(\w+): shape \((.*)\), norm (\S+)", capsys.readouterr().out)
    (layer,) = parsed("grads", *LAYER)["layers"]
    for name, shape, norm in printed:
        assert list(map(int, shape.split(", "))) == layer["shapes"][name]
        assert float(norm) == pytest.approx(layer["norms"][name], rel=1e-4)
    assert [name for name, _, _ in printed] == ["y", "dx", "dw"]


@pytest.mark.parametrize("groups", [1, 2])
def test_elements_and_maps_use_the_names_of_the_layer(groups):
    """Elements, values and numbers of terms are those of the layer's own y, dx and dw."""
    rules = {"stride": (2, 3), "dilation": (2, 1), "groups": groups}
    generator = np.random.default_rng(0)
    x, w = (generator.standard_normal(shape) for shape in ((2, 4, 3, 4), (4, 3, 3, 2)))
    y = cupyconv.conv_transpose(x, w, **rules)
    dy = generator.standard_normal(y.shape)
    problem = ConvProblem.from_output(x.shape, w.shape, dtype="float64", **rules)
    operands = {"x": x, "w": w, "dy": dy}
    explanation = cupyconv.explain(problem, transposed=True, **operands)
    words = {"y": "y", "dx": "dX", "dw": "dF"}
    results = {
        "y": y,
        "dx": cupyconv.conv_forward(dy, w, **rules),
        "dw": cupyconv.conv_backprop_filter(dy, w.shape, x, **rules),
    }
    for tensor, result in results.items():
        counts = explanation.map(tensor)
        assert counts.legend.startswith(f"{tensor}: ")
        assert counts.to_dict()["tensor"] == tensor
        for _ in range(20):
            index = tuple(map(int, generator.integers(result.shape)))
            element = explanation.element(f"{words[tensor]}[{','.join(map(str, index))}]")
            assert element.name == f"{tensor}[{','.join(map(str, index))}]"
            assert element.sum == pytest.approx(result[index], abs=1e-12)
            assert element.computed == result[index]
            assert element.count == counts.at(index[2:])
            factors = [
                [operands[name][tuple(term[name])] for name in term if name in operands]
                for term in element.to_dict(everything=True)["terms"]
            ]
            assert sum(first * second for first, second in factors) == pytest.approx(element.sum)


def test_element_outside_a_transposed_layer_states_its_shape():
    words = ("--input", "1x1x4x4", "--filter", "1x1x3x3", "--stride", "2", "--transposed")
    assert "y[0,0,8,8]" in said("explain", *words, "--element", "y[0,0,8,8]")
    error = refused("explain", *words, "--element", "y[0,0,9,8]")
    assert "y of 1x1x9x9" in error
    assert "h from 0 to 8" in error
    assert "x is an operand; use dX[n,k,...]" in refused(
        "explain", *words, "--element", "x[0,0,0,0]"
    )
