"""Edge cases of the command line: short forms, pipes and unknown names."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import ConvError
from cupyconv.cache_folder import CACHE_VARIABLE
from cupyconv.cli import output
from cupyconv.cli.configuration import PRESETS, read_file
from cupyconv.cli.main import COMMANDS, main
from tests.command import parsed, refused, run, said

SMALL = ("--input", "1x3x8x8", "--filter", "4x3x3x3")


# -- shapes ----------------------------------------------------------------------------------------


def test_remedies_use_command_line_options():
    assert "Use a newer GPU, or compute NumPy" in refused("shapes", *SMALL, "--device", "sm_70")
    assert "Use, for example, 8" in refused("bench", "--drawn", "0")
    assert "at most 100,000" in refused("bench", "--drawn", "100001", "--list")
    assert "Use, for example, 0.2" in refused("bench", "--seconds", "0")
    without_gpu = refused("warm", *SMALL, code=3)
    if importlib.util.find_spec("cupy"):
        assert "Give a device, for example --device sm_90a" in without_gpu


@pytest.mark.parametrize("command", ["explain", "grads", "check"])
def test_seeds_have_the_same_limits_in_every_command(command):
    rest = ("--device", "cpu") if command == "check" else ()
    said(command, *SMALL, "--seed", str(2**63 - 1), *rest)
    for seed in (str(2**63), "-1"):
        assert "--seed" in refused(command, *SMALL, "--seed", seed)
        assert "--seed" in refused("bench", "--drawn", "1", "--list", "--seed", seed)


def test_two_outputs_to_one_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = refused("bench", "--quick", "--json", "a.svg", "--plot", tmp_path / "a.svg")
    assert "different files" in text
    assert not list(tmp_path.iterdir())


def test_bench_lists_layers_in_a_json_file(tmp_path):
    path = tmp_path / "layers.json"
    said("bench", "--quick", "--list", "--json", path)
    assert path.read_text() == said("bench", "--quick", "--list", "--json", "-")


def test_many_devices_get_one_row_each():
    devices = ("cpu", "sm_75", "sm_80", "sm_90a", "sm_100a")
    text = said(
        "shapes", "--preset", "multi-channel", *(w for d in devices for w in ("--device", d))
    )
    rows = [line.split() for line in text.splitlines()]
    assert ["device", "forward", "backprop_input", "backprop_filter"] in rows
    assert [row[0] for row in rows if len(row) == 4 and row[0] in devices] == list(devices)


def test_one_dimensional_layers_have_samples():
    text = said("shapes", "--input", "1x6x9", "--filter", "4x6x3", "--device", "cpu")
    assert "one channel of 7 samples for each of the 4 filters" in text
    assert "one 6x6 channel for each" in said("shapes", *SMALL, "--device", "cpu")


def test_output_files_must_have_the_right_suffix(tmp_path):
    path = tmp_path / "x.png"
    text = refused("explain", *SMALL, "--svg", path)
    assert "--svg must be the path of a .svg file" in text
    assert f"Call it {tmp_path / 'x.svg'}" in text
    assert "--html must be the path of a .html or .htm file" in refused(
        "explain", *SMALL, "--html", path
    )
    bench = ("bench", "--layer", "seed-5x100x100", "--device", "cpu")
    assert "--plot must be the path of a .svg file" in refused(*bench, "--plot", path)
    assert not path.exists()
    said("explain", *SMALL, "--svg", tmp_path / "picture")


@pytest.mark.skipif(os.name == "nt", reason="Windows has other pipes")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_broken_standard_error_keeps_the_exit_code(unbuffered):
    """The exit code is kept even if the interpreter flushes the broken pipe again at exit."""
    command = [sys.executable, "-m", "cupyconv", "env", "--require-gpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": unbuffered}
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as broken:
        ended = subprocess.run(command, stdout=broken, stderr=broken, env=environment)
    assert ended.returncode == 3


COMPLETE = {
    **dict.fromkeys(("shapes", "explain", "grads", "plan"), SMALL),
    "check": (*SMALL, "--device", "cpu"),
    "bench": ("--layer", "seed-5x100x100"),
    "warm": (*SMALL, "--device", "sm_80"),
}


@pytest.mark.parametrize("command", COMPLETE)
def test_empty_option_values_are_rejected(command):
    found = main.get_command(click.Context(main), command)
    named = [option for option in found.params if isinstance(option, click.Option)]
    options = [option for option in named if not option.is_flag and option.nargs == 1]
    assert options
    for option in options:
        if option.opts[0] != "--json":
            refused(command, *COMPLETE[command], option.opts[0], "")


SHORT = {
    "explain": (),
    "shapes": ("--stride", "2"),
    "diagnose": ("--dy", "1x4x6x6"),
    "grads": ("--no-check", "--padding", "same"),
    "plan": ("--device", "cpu"),
    "check": ("--device", "cpu", "--dtype", "float32"),
    "warm": ("--device", "sm_80", "--pass", "forward"),
}
"""Commands that take a configuration, each with options to test beside two shapes."""


@pytest.mark.parametrize("command", [name for name in SHORT if name != "warm"])
def test_two_shapes_replace_input_and_filter_options(command):
    options = SHORT[command]
    expected = said(command, *SMALL, *options, "--json")
    assert said(command, "1x3x8x8", "4x3x3x3", *options, "--json") == expected
    assert said(command, *options, "1,3,8,8", "--json", "4,3,3,3") == expected
    assert said(command, "1X3X8X8", "4X3X3X3", *options, "--json") == expected


def test_commands_with_a_configuration_accept_two_shapes():
    for name in main.list_commands(click.Context(main)):
        found = main.get_command(click.Context(main), name)
        configured = any("--config" in option.opts for option in found.params)
        assert configured == ("[INPUT FILTER]" in run(name, "--help").stdout)
        assert configured == (name in {*SHORT, "bench"})


@pytest.mark.parametrize("command", [*SHORT, "bench"])
@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (("1x3x8x8",), "got 1x3x8x8"),
        (("1x3x8x8", "4x3x3x3", "1x4x6x6"), "got 1x3x8x8 4x3x3x3 1x4x6x6"),
        (("1x3x8x8", "filter"), "got 1x3x8x8 filter"),
        (("net.onnx",), "got net.onnx"),
    ],
    ids=["one", "three", "word", "file"],
)
def test_short_form_requires_exactly_two_shapes(command, arguments, values):
    text = refused(command, *arguments)
    assert "the short form must have two shapes, for the input and the filter" in text
    assert values in text
    assert f"Write, for example, cupyconv {command} 1x5x100x100 10x5x5x5" in text


@pytest.mark.parametrize("command", SHORT)
@pytest.mark.parametrize("option", ["--input", "--filter"])
def test_shapes_given_twice_are_rejected(command, option):
    text = refused(command, "1x3x8x8", "4x3x3x3", option, "1x3x8x8")
    assert f"got 1x3x8x8 4x3x3x3 and {option} 1x3x8x8" in text
    assert f"Leave out {option}, or the two shapes" in text


@pytest.mark.thorough
def test_bench_accepts_two_shapes():
    options = ("--device", "cpu", "--peers", "none", "--seconds", "0.01", "--pass", "forward")
    found = json.loads(said("bench", "1x3x8x8", "4x3x3x3", *options, "--json"))
    assert {row["layer"] for row in found["rows"]} == {"1x3x8x8 * 4x3x3x3"}
    assert "layers from one source" in refused("bench", "1x3x8x8", "4x3x3x3", "--suite", "resnet50")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("1x3x8x8", "4x3x3x3", "--stride", "2"), "--stride 2x2"),
        (("--preset", "by-hand"), "--filter 3x2x2x2"),
        (("--input", "1x3x8x8", "--filter", "4x3x3x3", "--padding", "same"), "--padding same"),
    ],
)
def test_bench_takes_layers_like_every_command(arguments, options):
    (layer,) = json.loads(said("bench", *arguments, "--list", "--json"))["layers"]
    assert options in layer["options"]


def test_two_shapes_without_a_command_are_explained():
    short = said("1x3x8x8", "4x3x3x3", "--stride", "2")
    assert short == said("explain", *SMALL, "--stride", "2")
    assert "Write, for example, cupyconv explain 1x5x100x100 10x5x5x5" in refused("1x3x8x8")
    assert "the short form must have" in refused("1x3x8x8", "--stride", "2")


@pytest.mark.parametrize("module", ["cupyconv", "cupyconv.cli"])
def test_package_runs_as_a_program(module):
    options = {"capture_output": True, "text": True, "check": False}
    run_ = subprocess.run([sys.executable, "-m", module, "--version"], **options)
    assert run_.stdout == f"cupyconv, version {cupyconv.__version__}\n"


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["layer", "layers"])
def test_layer_option_chooses_a_layer_of_a_file(tmp_path, word):
    path = tmp_path / "net.toml"
    table = '[[{}]]\nname = "{}"\ninput = "1x3x{}x8"\nfilter = "4x3x3x3"\n'
    path.write_text(table.format(word, "one", 8) + table.format(word, "two", 9))
    both = parsed("shapes", "--config", path)["layers"]
    assert [layer["name"] for layer in both] == ["one", "two"]
    (two,) = parsed("shapes", "--config", path, "--layer", "two")["layers"]
    assert two == both[1]
    assert "Did you mean 'two'?" in refused("shapes", "--config", path, "--layer", "tow")
    assert "there is no --config" in refused("shapes", *SMALL, "--layer", "two")
    said("explain", "--config", path, "--layer", "two", "--svg", tmp_path / "two.svg")
    assert "--layer NAME" in refused("explain", "--config", path, "--svg", "a.svg")
    path.write_text(table.format("layer", "a", 8) + table.format("layers", "b", 8))
    assert "one name for its tables" in refused("shapes", "--config", path)


def test_dash_is_standard_input_or_output(tmp_path):
    config = b'input = "1x3x8x8"\nfilter = "4x3x3x3"\n'
    assert said("shapes", "--config", "-", given=config) == said("shapes", *SMALL)
    assert said("explain", *SMALL, "--svg", "-").startswith("<svg")
    assert said("explain", *SMALL, "--html", "-").startswith("<!doctype html>")
    saved = run("grads", *SMALL, "--values", "integers", "--save", "-")
    with np.load(io.BytesIO(saved.stdout_bytes)) as tensors:
        x = tensors["x"]
        assert set(tensors.files) == {"x", "w", "dy", "y", "dx", "dw", "db"}
    held = io.BytesIO()
    np.save(held, x)
    rest = (*SMALL, "--values", "integers", "--element", "dw[0,0,0,0]", "--json")
    (piped,) = json.loads(said("explain", *rest, "--x", "-", given=held.getvalue()))["layers"]
    (drawn,) = json.loads(said("explain", *rest))["layers"]
    assert piped["elements"] == drawn["elements"]
    assert "only one result can go to standard output" in refused(
        "explain", *SMALL, "--svg", "-", "--html", "-"
    )
    assert "only one result can go to standard output" in refused(
        "explain", *SMALL, "--svg", "-", "--json"
    )
    assert "only one result can go to standard output" in refused(
        "grads", *SMALL, "--save", "-", "--json"
    )
    assert not list(Path.cwd().glob("-"))


def test_plot_goes_to_standard_output(tmp_path, monkeypatch):
    from cupyconv.bench import ceilings, places

    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 64})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 1 << 16})
    monkeypatch.setattr(places.Place, "sweep_bytes", 1 << 16)
    path = tmp_path / "one.toml"
    path.write_text('input = "1x1x4"\nfilter = "1x1x2"\n')
    words = ("bench", "--config", path, "--seconds", "0.001", "--device", "cpu")
    words += ("--pass", "forward", "--layout", "channels_last", "--peers", "none")
    assert said(*words, "--plot", "-").startswith("<svg")
    assert "only one result can go to standard output" in refused(
        *words, "--json", "-", "--plot", "-"
    )
    assert not list(Path.cwd().glob("-"))


def test_standard_input_is_read_once(tmp_path):
    held = io.BytesIO()
    np.save(held, np.ones((1, 3, 8, 8), np.float32))
    given = {"given": held.getvalue()}
    files = [
        ("grads", "--x", "-", "--w", "-"),
        ("explain", *SMALL, "--x", "-", "--dy", "-"),
        ("grads", "--x", "-", "--config", "-"),
    ]
    for words in files:
        result = run(*words, **given)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        if "--config" not in words:
            assert "standard input must be read only once: - is given twice" in result.stderr
    config = b'input = "1x3x8x8"\nfilter = "4x3x3x3"\n'
    result = run("explain", "--config", "-", "--x", "-", given=config)
    assert "standard input must be read only once" in result.stderr
    for _ in range(2):  # each command reads standard input anew
        assert said("shapes", "--config", "-", given=config)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("command", ["shapes", "grads", "explain", "check"])
def test_presets_are_listed_as_json(command, where):
    words = ["--json", "--list-presets"][:: 1 if where == "before" else -1]
    listed = json.loads(said(command, *words))["presets"]
    assert [one["name"] for one in listed] == [layer.name for layer in read_file(PRESETS)]
    by_hand = next(one for one in listed if one["name"] == "by-hand")
    assert by_hand["configuration"]["input"] == [1, 2, 4, 4]
    text = said(command, "--list-presets")
    for layer in read_file(PRESETS):
        assert layer.name in text
        assert str(layer.title).split()[0] in text


def test_layer_option_rejects_duplicate_and_missing_names(tmp_path):
    path = tmp_path / "net.toml"
    table = '[[layer]]\n{}input = "1x3x8x{}"\nfilter = "4x3x3x3"\n'
    path.write_text("".join(table.format('name = "one"\n', size) for size in (8, 9)))
    text = refused("shapes", "--config", path, "--layer", "one")
    assert "--layer must name one layer: 2 layers in" in text
    assert "are named 'one'. Rename all but one" in text
    path.write_text("".join(table.format("", size) for size in (8, 9)))
    text = refused("shapes", "--config", path, "--layer", "one")
    assert "must choose a layer by its name: the layers of" in text
    assert 'Give each layer a name, such as name = "first"' in text
    path.write_text(table.format('name = "two"\n', 8) + table.format("", 9))
    assert "1x3x8x8" in said("shapes", "--config", path, "--layer", "two")


HUGE = [
    ("--dtype", "float32"),
    ("--dtype", "float16"),
    ("--dtype", "float64"),
    ("--dask",),
    ("--dask", "--dtype", "float32"),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("words", HUGE, ids=" ".join)
def test_data_beyond_the_dtype_becomes_infinite_silently(tmp_path, words):
    if "--dask" in words:
        pytest.importorskip("dask", reason="Dask is not installed")
    x = np.full((1, 1, 4, 4), 1e300)
    x[0, 0, 0, 0] = 1
    np.save(tmp_path / "x.npy", x)
    given = ("--x", tmp_path / "x.npy", "--filter", "2x1x2x2", *words)
    assert run("grads", *given).stderr == ""
    if "--dask" not in words:
        for more in (("--element", "dF[0,0,0,0]"), ("--html", tmp_path / "page.html")):
            said("explain", *given, *more)
    problem = cupyconv.ConvProblem(x.shape, (2, 1, 2, 2))
    assert "conv_forward gives nan" in str(cupyconv.explain(problem, x=x).element("O[0,0,0,1]"))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_all_accept_json(command, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    given = {"bench": ("--list",), "env": (), "model": (_model(tmp_path),), "check": SMALL}
    given["warm"] = (*SMALL, "--device", "sm_80")
    given["diagnose"] = (*SMALL, "--dy", "1x4x6x6")
    if command in ("model", "warm"):
        pytest.importorskip({"model": "onnx", "warm": "cupy"}[command])
    content = json.loads(said(command, *given.get(command, SMALL), "--json"))
    assert isinstance(content, dict)


def _model(folder: Path) -> str:
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    value = helper.make_tensor_value_info
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv")
    x, y = value("x", kind, [1, 3, 8, 8]), value("y", kind, None)
    w = helper.make_tensor("w", kind, [4, 3, 3, 3], [0.0] * 108)
    graph = helper.make_graph([node], "net", [x], [y], [w])
    path = folder / "net.onnx"
    onnx.save(helper.make_model(graph), path)
    return str(path)


# -- presets and names -----------------------------------------------------------------------------


def test_changed_preset_has_no_title():
    title = "The input gradient under SAME with stride 2"
    assert title in said("shapes", "--preset", "same-stride")
    assert title in said("shapes", "--preset", "same-stride", "--stride", "2", "--dtype", "float64")
    changed = said("shapes", "--preset", "same-stride", "--stride", "1")
    assert title not in changed
    assert changed.startswith("same-stride\n")


@pytest.mark.parametrize("device", ["sm_99", "sm_900", "sm_76"])
def test_unknown_chips_are_rejected_with_the_known_ones(device):
    text = refused("shapes", *SMALL, "--device", device)
    assert "unknown device" in text
    assert "'sm_75', 'sm_80'" in text
    with pytest.raises(ConvError, match="unknown device"):
        cupyconv.plan(cupyconv.ConvProblem((1, 3, 8, 8), (4, 3, 3, 3)), device)


@pytest.mark.parametrize(
    ("element", "words"),
    [
        ("db[3]", "it is the sum of all dy[n,k,...]"),
        ("x[0,0,0,0]", "use dX[n,c,...]"),
        ("w[0,0,0,0]", "use dF[k,c,...]"),
        ("dy[0,0,0,0]", "is an operand"),
        ("foo[0]", "unknown tensor: 'foo'. Known:"),
        ("dff[0,0,0,0]", "Did you mean 'dF'?"),
    ],
)
def test_invalid_elements_get_a_suggestion(element, words):
    assert words in refused("explain", *SMALL, "--element", element)


def test_suggestions_are_only_for_similar_names():
    assert "Did you mean" not in refused("foo")
    assert "Did you mean 'grads'?" in refused("grad")


def test_maps_are_labelled_with_their_indices():
    assert "dw: rows are r, columns s" in said("explain", *SMALL, "--map", "dw")
    assert "y: rows are p, columns q" in said("explain", *SMALL, "--map", "y")
    assert "dx: rows are H, columns W" in said("explain", *SMALL, "--map", "dx")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("cupyconv sh", {"shapes"}),
        ("cupyconv grads --preset mul", {"multi-channel"}),
        ("cupyconv grads --padding same", {"same", "same_lower"}),
        ("cupyconv grads --dtype float", {"float16", "float32", "float64"}),
        ("cupyconv explain --values ", {"normal", "integers"}),
        ("cupyconv explain --code py", {"pytorch"}),
        ("cupyconv explain --map d", {"dx", "dw"}),
        ("cupyconv shapes --device sm_8", {"sm_80", "sm_86", "sm_87", "sm_88", "sm_89"}),
        ("cupyconv grads --impl cuda-g", {"cuda-generic", "cuda-gather"}),
    ],
)
def test_shell_completion_completes_values(line, words):
    count = len(line.split()) - (not line.endswith(" "))
    env = {"_CUPYCONV_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    result = CliRunner().invoke(main, [], env=env, prog_name="cupyconv")
    assert {entry.partition(",")[2] for entry in result.stdout.split()} == words


# -- sentences -------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", ["1", "2"])
def test_sentences_use_the_singular_for_one(groups):
    options = ("--input", f"1x{groups}x5x5", "--filter", f"{groups}x1x3x3", "--groups", groups)
    text = " ".join(said("explain", *options).split()) + " ".join(said("shapes", *options).split())
    for wrong in ("the 1 ", "of the 1", "1 filters", "1 input channels", "1 products", "1 pairs"):
        assert wrong not in text, text[text.index(wrong) - 60 :][:120]
    assert "because each of them reads" not in text


def test_model_with_one_convolution_uses_the_singular(tmp_path):
    assert "1 convolution, 108 weights" in said("model", _model(tmp_path))


# -- progress --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("patience", [0.0, 3600.0])
def test_long_tasks_show_their_progress(monkeypatch, patience):
    monkeypatch.setattr(output, "PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    watched, drawn = Terminal(), threading.Event()
    monkeypatch.setattr(sys, "stderr", watched)
    if not patience:
        monkeypatch.setattr(
            watched, "write", lambda text: (drawn.set(), io.StringIO.write(watched, text))[1]
        )
    with output.progress("checking", 4) as advance:
        advance()
        if not patience:
            assert drawn.wait(60)
        advance()
    text = watched.getvalue()
    assert ("checking" in text and "%" in text and ":" in text) == (not patience)


# -- the browser -----------------------------------------------------------------------------------


def test_open_option_opens_the_page_in_a_browser(monkeypatch, tmp_path):
    import webbrowser

    shown = []
    monkeypatch.setattr(webbrowser, "open", lambda address: shown.append(address) or True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said("explain", *SMALL, "--open")
    (left,) = tmp_path.glob("cupyconv-*.html")
    assert shown == [left.as_uri()]
    assert left.read_text().startswith("<!doctype html>")
    page = tmp_path / "page.html"
    said("explain", *SMALL, "--html", str(page), "--open", "--element", "dw[1,0,0,0]")
    assert shown[1:] == [page.as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda address: False)
    assert "showing a page requires a browser" in refused("explain", *SMALL, "--open")


@pytest.mark.skipif(os.name != "posix", reason="closing standard input needs a POSIX shell")
def test_closed_standard_input_is_reported():
    command = f"{sys.executable} -m cupyconv.cli shapes --config - <&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "it is closed" in done.stderr


@pytest.mark.parametrize("words", [("--save", "-"), ("--x", "-")])
def test_dask_gradients_reject_pipes(words):
    pytest.importorskip("dask", reason="Dask is not installed")
    result = run("grads", "--preset", "by-hand", "--dask", *words)
    assert result.exit_code == 2
    assert "--dask cannot use standard input or output" in result.stderr


# -- remedies that work as printed -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "w", "dtype"),
    [
        ("complex64", "float64", "complex128"),
        ("complex64", "float32", "complex64"),
        ("complex64", "int64", "complex128"),
        ("float32", "float64", "float32"),
    ],
)
def test_suggested_dtype_is_accepted(tmp_path, x, w, dtype):
    np.save(tmp_path / "x.npy", np.ones((1, 2, 5, 5), x))
    np.save(tmp_path / "w.npy", np.ones((3, 2, 3, 3), w))
    command = ["grads", "--x", tmp_path / "x.npy", "--w", tmp_path / "w.npy", "--no-check"]
    assert refused(*command).endswith(f"--dtype {dtype}\n")
    command += ["--dtype", dtype, "--device", "cpu"]
    said(*command)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 2, 6, 6), "the file has 1x2x6x6, the input is 1x2x5x5. Pass the input as 1x2x6x6, or"),
        ((), "the file has a scalar, the input is 1x2x5x5. Give another file"),
    ],
)
def test_array_of_another_shape_is_rejected(tmp_path, shape, said):
    np.save(tmp_path / "x.npy", np.ones(shape, "float32"))
    assert said in refused("grads", "1x2x5x5", "3x2x3x3", "--x", tmp_path / "x.npy")


def test_too_many_terms_name_the_option_to_omit(monkeypatch):
    import cupyconv.explaining.terms as terms

    monkeypatch.setattr(terms, "MOST_LISTED", 3)
    command = ["explain", "1x1x4x4", "1x1x2x2", "--element", "dw[0,0,0,0]", "--all"]
    assert "Omit --all" in refused(*command)
    monkeypatch.setattr(terms, "MOST_ELEMENTS", 3)
    assert "omit --large" in refused("explain", "1x1x4x4", "1x1x2x2", "--large", "--json")


def test_too_many_terms_are_rejected_before_computing(monkeypatch):
    import cupyconv.explaining.terms as terms

    monkeypatch.setattr(terms, "MOST_ELEMENTS", 3)
    described = []
    monkeypatch.setattr(cupyconv.Explanation, "to_dict", described.append)
    refused("explain", "1x1x4x4", "1x1x2x2", "--large", "--json")
    assert described == []


LISTS = {
    "a.toml": '[[layer]]\nname = "a"\ninput = "1x3x8x8"\nfilter = "4x3x3x3"\nstride = 2\n'
    '[[layer]]\nname = "b"\ninput = "1x4x3x3"\nfilter = "4x2x3x3"\ngroups = 1\n'
    "transposed = true\n",
    "a.json": '[{"name": "a", "input": "1x3x8x8", "filter": [4, 3, 3, 3], "stride": 2}, {"name": '
    '"b", "input": [1, 4, 3, 3], "filter": "4x2x3x3", "groups": 1, "transposed": true}]',
    "a.csv": "name,input,filter,stride,groups,transposed\na,1x3x8x8,4x3x3x3,2,,\n"
    'b,"1,4,3,3",4x2x3x3,,1,true\n',
}
LISTS["semicolons.csv"] = "name;input;filter;stride;groups;transposed\na;1,3,8,8;4x3x3x3;2;;\n"
LISTS["semicolons.csv"] += "b;N,4,3,3;4x2x3x3;;1;true\n"
LISTS["a.tsv"] = LISTS["semicolons.csv"].replace(";", "\t")
LISTS["unknown.json"] = LISTS["a.json"].replace("[1, 4", "[null, 4")
"""The same two layers as TOML, JSON and CSV, keyed by file name."""


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_layers_may_have_any_format(tmp_path, name):
    results = []
    for file in ("a.toml", name):
        (tmp_path / file).write_text(LISTS[file])
        results.append(json.loads(said("shapes", "--config", tmp_path / file, "--json")))
    assert results[0] == results[1]
    assert len(results[0]["layers"]) == 2


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", "[1]", "must have a list of layers"),
        ("a.json", "{", "must be JSON"),
        ("a.json", "[" * 10**6, "must be JSON: it is nested too deeply"),
        ("a.json", '[{"input": null, "filter": "1x1x3"}]', "got None"),
        ("a.csv", "", "must have a list of layers: got []"),
        ("a.csv", "input,filter\n1x1x9,1x1x3,5\n", "key in layer 1 of a.csv: 'a column without a"),
        ("a.csv", "input,strides\n1x1x9,2\n", "Use 'stride'"),
        ("a.csv", "input\n" + "1" * 200_000, "must be CSV: field larger than"),
        ("a.csv", "input,filter,transposed\n1x1x9,1x1x3,maybe\n", "must be true or false"),
    ],
)
def test_invalid_lists_of_layers_are_rejected(tmp_path, name, content, text):
    (tmp_path / name).write_text(content)
    assert text in refused("shapes", "--config", tmp_path / name)


def test_sizes_up_to_the_maximum_are_accepted():
    for size in (2**62, 2**63 - 1, f"0{2**62}"):
        said("shapes", f"1x1x{size}", "1x1x1")
    for size in (2**63, "9" * 5000):
        assert f"Use at most {2**63 - 1}" in refused("shapes", f"1x1x{size}", "1x1x1")


@pytest.mark.parametrize("digits", [3, 25, 5000])
def test_index_of_many_digits_is_out_of_range(digits):
    line = refused("explain", "1x1x4x4", "1x1x2x2", "--element", f"dw[{'9' * digits},0,0,0]")
    assert "the indices of an element must be inside its tensor" in line


def test_remedies_include_the_output_shape():
    command = ["shapes", "--input", "1x5x5x3", "--filter", "3x3x3x4"]
    line = refused(*command, "--dy", "1x3x3x4")
    assert "or use --input 1x3x5x5 and --dy 1x4x3x3 and --filter-format HWIO" in line
    words = ["shapes", "--input", "1x3x5x5", "--filter", "3x3x3x4", "--filter-format", "HWIO"]
    for accepted in (
        [*command, "--dy", "1x3x3x4", "--data-format", "NHWC"],
        [*words, "--dy", "1x4x3x3"],
    ):
        said(*accepted)
    line = refused(*command, "--dy", "1x4x3x3")
    assert line.endswith("Use --input 1x3x5x5 and --filter-format HWIO\n")
