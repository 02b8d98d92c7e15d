"""The command line: output, exit codes, and one line for every error."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupyconv import ConvProblem, DeviceError, KernelCompileError, arrays, calls
from cupyconv.cli import data
from cupyconv.cli.main import BUG, COMMANDS, main
from cupyconv.cpu import blocked
from cupyconv.planning import plan_pass
from cupyconv.planning.families import FAMILIES
from tests.command import parsed, refused, run

SMALL = ("--input", "1x3x8x8", "--filter", "4x3x3x3")

# -- help ------------------------------------------------------------------------------------------


def test_program_without_arguments_prints_help():
    result = run()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in COMMANDS)


# -- configurations --------------------------------------------------------------------------------


def test_options_override_a_preset():
    (layer,) = parsed("shapes", "--preset", "same-stride", "--stride", "1", "--dtype", "float16")[
        "layers"
    ]
    assert layer["configuration"]["stride"] == [1, 1]
    assert layer["configuration"]["dtype"] == "float16"
    assert layer["shapes"]["y"] == [1, 5, 5, 4]


@pytest.mark.parametrize("shape", ["1x3x8x8", "1,3,8,8", " 1X3x8x8 "])
def test_shapes_accept_x_and_commas(shape):
    (layer,) = parsed("shapes", "--input", shape, "--filter", "4x3x3x3")["layers"]
    assert layer["shapes"]["x"] == [1, 3, 8, 8]


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("same", [[1, 1], [1, 1]]),
        ("VALID", [[0, 0], [0, 0]]),
        ("same-lower", [[1, 1], [1, 1]]),
        ("1", [[1, 1], [1, 1]]),
        ("1,2", [[1, 1], [2, 2]]),
        ("1x2", [[1, 1], [2, 2]]),
        ("1:2,0:1", [[1, 2], [0, 1]]),
        ("1:2,3", [[1, 2], [3, 3]]),
    ],
)
def test_padding_accepts_every_form(text, pairs):
    (layer,) = parsed("shapes", *SMALL, "--padding", text)["layers"]
    assert layer["configuration"]["padding"] == pairs


def test_config_with_one_layer(tmp_path):
    path = tmp_path / "layer.toml"
    path.write_text(
        'name = "mine"\ninput = [2, 9, 9, 4]\nfilter = "3x3x2x6"\nstride = "2x1"\n'
        'padding = [[0, 1], 2]\ndilation = 1\ngroups = 2\ndata_format = "NHWC"\ndtype = "float64"\n'
    )
    (layer,) = parsed("shapes", "--config", path)["layers"]
    assert layer["name"] == "mine"
    assert layer["configuration"] == {
        "input": [2, 9, 9, 4],
        "filter": [3, 3, 2, 6],
        "stride": [2, 1],
        "padding": [[0, 1], [2, 2]],
        "padding_mode": "explicit",
        "dilation": [1, 1],
        "groups": 2,
        "data_format": "NHWC",
        "filter_format": "HWIO",
        "dtype": "float64",
        "transposed": False,
    }


def test_config_with_several_layers_and_a_common_option(tmp_path):
    path = tmp_path / "layers.toml"
    path.write_text(
        '[[layer]]\ninput = "1x3x8x8"\nfilter = "4x3x3x3"\n[[layer]]\ninput = "1x1x9"\n'
        'filter = "2x1x3"\n'
    )
    layers = parsed("shapes", "--config", path, "--padding", "same")["layers"]
    assert [layer["shapes"]["y"] for layer in layers] == [[1, 4, 8, 8], [1, 2, 9]]
    assert len(parsed("grads", "--config", path)["layers"]) == 2
    assert "a single layer" in refused("grads", "--config", path, "--save", "x.npz")


# -- invalid input ---------------------------------------------------------------------------------

MISTAKES = {
    "shape-word": (("--input", "1xax3", "--filter", "4x3x3x3"), ("1xax3", "a number instead of a")),
    "shape-empty": (("--input", "", "--filter", "4x3x3x3"), ("''", "1x5x5x3")),
    "shape-negative": (("--input", "1x3x-8x8", "--filter", "4x3x3x3"), ("at least 1", "-8")),
    "shape-rank": (("--input", "1x3", "--filter", "4x3"), ("1 to 3 spatial axes",)),
    "nothing": ((), ("input and filter missing", "--preset")),
    "no-filter": (("--input", "1x3x8x8"), ("filter missing",)),
    "groups": ((*SMALL, "--groups", "2"), ("groups must divide", "--groups 1")),
    "groups-word": ((*SMALL, "--groups", "two"), ("--groups", "'two'")),
    "padding-word": ((*SMALL, "--padding", "sme"), ("'sme'", "Did you mean 'same'")),
    "padding-nonsense": ((*SMALL, "--padding", "1:b,2"), ("'1:b'", "1:2,0:1")),
    "padding-three": ((*SMALL, "--padding", "1:2:3,1"), ("before:after", "1:2,0:1")),
    "data-format-rank": ((*SMALL, "--data-format", "NCW"), ("Use --data-format NCHW",)),
    "dtype": ((*SMALL, "--dtype", "int8"), ("--dtype", "bfloat16")),
    "preset": (("--preset", "multichannel"), ("Did you mean 'multi-channel'",)),
    "option": ((*SMALL, "--bogus"), ("--bogus", "--help")),
    "config-and-preset": (("--config", "a.toml", "--preset", "same-stride"), ("got both",)),
    "config-missing": (("--config", "nowhere.toml"), ("nowhere.toml", "No such file")),
}


@pytest.mark.parametrize("command", ["shapes", "grads"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_configurations_get_one_line(command, mistake):
    args, words = MISTAKES[mistake]
    line = refused(command, *args)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'input = "1x5\n', ("must be TOML", "at line 1")),
        (b"a = 1\nb = = 2", ("must be TOML", "at line 2")),
        (b"\xff\xfe\x00", ("must be TOML",)),
        (b"", ("it is empty",)),
        (b"layer = []", ("[[layer]]",)),
        (b'[layer]\ninput = "1x3x8x8"', ("[[layer]]",)),
        (b'input = "1x3x8x8"\nstrides = 2', ("'strides'", "Use 'stride'")),
        (b"input_shape = [1, 3, 8, 8]", ("'input_shape'", "Use 'input'")),
        (b"weight = [1, 3, 3, 3]", ("'weight'", "Use 'filter'")),
        (b'[conv1]\ninput = "1x3x8x8"', ("'conv1'", "[[layer]]")),
        (b'dtype = "f4"\n[[layer]]\ninput = "1x3x8x8"', ("'dtype'", "outside the tables")),
        (b"input = [1, 3, 8, true]", ("input in", "True")),
        (b"input = 1.5", ("input in", "1.5")),
        (b"input = [1, 3, 8, 99999999999999999999]", (f"at most {2**63 - 1}",)),
        (b"padding = [[1, 'a'], 0]", ("padding in",)),
        (b"padding = {a = 1}", ("padding in",)),
        (b"data_format = 3", ("data_format in",)),
        (b"dtype = 3", ("dtype in",)),
        (b'name = ""\ninput = [1, 3, 8, 8]', ("name in",)),
        (b'[[layer]]\nfilter = "1x1x1x1"\n[[layer]]\nfliter = 2', ("layer 2 of", "'filter'")),
    ],
)
def test_invalid_config_files_get_one_line(tmp_path, content, words):
    path = tmp_path / "layer.toml"
    path.write_bytes(content)
    line = refused("shapes", "--config", path)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("shapes", *SMALL, "--device", "sm_60"), ("7.5",)),
        (("shapes", *SMALL, "--device", "sm_70, 80 SMs"), ("7.5",)),
        (("shapes", *SMALL, "--device", "tpu"), ("'tpu'", "sm_80")),
        (("grads", *SMALL, "--device", "tpu"), ("--device", "'cpu'")),
        (("grads", *SMALL, "--impl", "nump"), ("Did you mean 'numpy'",)),
        (("grads", *SMALL, "--seed", "-1"), ("--seed",)),
        (("grads", *SMALL, "--save", "/nowhere/x.npz"), ("no folder /nowhere",)),
        (("check", "--impl", "nump"), ("Did you mean 'numpy'",)),
        (("check", "--impl", "numpy", "--device", "gpu"), ("numpy", "gpu")),
        (("check", "--dtype", "float8"), ("float16",)),
        (("check", "--random", "many"), ("--random",)),
    ],
)
def test_invalid_options_get_one_line(args, words):
    line = refused(*args)
    assert all(word in line for word in words), line


# -- exit codes and errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("grads", *SMALL, "--device", "gpu"),
        ("grads", *SMALL, "--impl", "cuda-generic"),
        ("check", "--device", "gpu"),
        ("check", "--impl", "cuda-generic"),
    ],
)
def test_missing_gpu_exits_with_3(args):
    assert "cupyconv env" in refused(*args, code=3)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns(command):
    done = run(*filter(None, [command]), "--help", COLUMNS="80")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert command or "...\n" not in done.stdout.partition("Commands:")[2], "the help is truncated"


def test_env_prints_each_install_command_once(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", _no_package)
    monkeypatch.setattr(arrays, "cupy", _no_cupy)
    monkeypatch.setattr("cupyconv.gpu.compiler.nvrtc_version", _no_cupy)
    lines = run("env", COLUMNS="200").stdout.partition("get it with")[2]
    assert "CuPy, which provides GPU arrays" in lines
    assert "NVRTC, which compiles" in lines
    assert lines.count("(CUDA 13; for an older driver") == 1


def _no_package(name):
    raise importlib.metadata.PackageNotFoundError(name)


def _no_cupy():
    raise DeviceError("CuPy is not installed")


def test_env_exits_with_3_only_if_a_gpu_is_required():
    assert run("env").exit_code == 0
    result = run("env", "--require-gpu")
    assert result.exit_code == 3
    assert "NumPy" in result.stdout
    assert result.stderr.count("\n") == 1


def test_env_lists_optional_packages(monkeypatch):
    """The packages of the extras are listed with their version, or with an install command."""
    real = importlib.metadata.version

    def without(name):
        if name in ("numba", "torch", "onnx", "dask"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    found = json.loads(run("env", "--json").stdout)
    assert {"numba", "torch", "onnx", "dask"} <= set(found)
    if importlib.util.find_spec("numba"):
        assert found["numba"]["version"] == real("numba")
    monkeypatch.setattr(importlib.metadata, "version", without)
    found = json.loads(run("env", "--json").stdout)
    assert found["numba"] is None
    commands = {one["what"]: one["command"] for one in found["missing"]}
    assert "numba" in commands["Numba, which compiles CPU loops (optional)"]
    assert "Numba" in run("env").stdout


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no POSIX file owners")
def test_env_warns_of_a_cache_that_others_may_write(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    result = run("env", "--json", CUPYCONV_CACHE_DIR=str(tmp_path / "cache"))
    found = json.loads(result.stdout)
    assert found["cache"]["trusted"] is False
    assert f"chmod go-w {tmp_path / 'cache'}" in found["missing"][-1]["command"]
    assert "not used" in run("env", CUPYCONV_CACHE_DIR=str(tmp_path / "cache")).stdout


def test_compile_errors_exit_with_4_and_show_the_log(monkeypatch):
    def fail(*_args):
        raise KernelCompileError("conv_forward.cu does not compile", "line 3: error: no\nline 4: x")

    monkeypatch.setattr("cupyconv.cli.shapes.plan", fail)
    result = run("shapes", *SMALL)
    assert result.exit_code == 4
    first, *log = result.stderr.splitlines()
    assert first == "cupyconv: error: conv_forward.cu does not compile"
    assert log == ["line 3: error: no", "line 4: x"]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError("an array takes 3 GiB"), 2, "not enough memory: an array takes 3 GiB"),
        (OSError(28, "No space left on device", "out.npz"), 2, "out.npz: No space left"),
        (ValueError("two\nlines"), BUG, "a bug in cupyconv, ValueError: two lines"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exceptions_never_print_a_traceback(monkeypatch, error, code, words):
    def fail(*_args):
        raise error

    monkeypatch.setattr("cupyconv.cli.shapes.plan", fail)
    result = run("shapes", *SMALL)
    assert result.exit_code == code
    assert words in result.stderr
    assert "Traceback" not in result.output


# -- results ---------------------------------------------------------------------------------------


def test_shapes_computes_beyond_64_bits():
    side = "99999999999"
    (layer,) = parsed("shapes", "--input", f"1x1x{side}x{side}", "--filter", "1x1x3x99999999")[
        "layers"
    ]
    assert layer["needs_64bit_indexing"] is True
    assert layer["passes"][0]["flops"] > 2**64
    assert run("shapes", "--input", f"1x1x{side}x{side}", "--filter", "1x1x3x3").exit_code == 0


def test_shapes_plans_every_pass_for_every_given_device():
    (layer,) = parsed("shapes", *SMALL, "--device", "cpu", "--device", "sm_90")["layers"]
    assert [plan["architecture"] for plan in layer["plans"]] == [None, "sm_90a"]
    assert all(len(plan["passes"]) == 3 for plan in layer["plans"])


def test_grads_rejects_layers_larger_than_memory(monkeypatch):
    line = refused("grads", "--input", "1x1x9999999x9999999", "--filter", "1x1x3x3")
    assert "PiB" in line
    monkeypatch.setattr(data, "available_memory", lambda: 9 << 20)
    line = refused("grads", "--input", "1x3x200x200", "--filter", "8x3x3x3")
    assert "9.0 MiB is available" in line
    monkeypatch.setattr(data, "available_memory", lambda: 20 << 20)
    assert "--no-check" in refused("grads", "--input", "1x3x200x200", "--filter", "8x3x3x3")


def test_grads_reports_that_nothing_was_checked():
    report = parsed("grads", *SMALL, "--no-check")
    assert report["layers"][0]["agreements"] is None
    assert "not checked" in run("grads", *SMALL, "--no-check").stdout


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("impl", ["reference", "numpy"])
def test_grads_agree_in_every_dtype(dtype, impl):
    for preset in ("same-stride", "valid-dilation"):
        report = parsed("grads", "--preset", preset, "--dtype", dtype, "--impl", impl)
        (layer,) = report["layers"]
        assert layer["passed"] is True
        assert set(layer["implementations"].values()) == {impl}
        assert {entry["compared_with"] for entry in layer["agreements"]} == {
            "float64 reference",
            "finite differences",
            "adjoint identity",
        }


def test_grads_accepts_an_empty_batch():
    (layer,) = parsed("grads", "--input", "0x3x8x8", "--filter", "4x3x3x3")["layers"]
    assert layer["norms"]["dw"] == 0
    assert layer["passed"] is True


RESULTS = ("backprop_input", "backprop_filter", "forward")
"""Passes that compute x, w and y (or their gradients), in the order of the arrays of a pass."""


def _off_by_one_element(monkeypatch, pass_, result):
    right = blocked.prepare

    def prepare(problem, prepared, *options):
        compute = right(problem, prepared, *options)

        def wrong(*arrays):
            compute(*arrays)
            if prepared == pass_:
                arrays[RESULTS.index(pass_)].flat[result] += 0.25

        return wrong

    monkeypatch.setattr(blocked, "prepare", prepare)
    monkeypatch.setattr(calls, "_calls", {})


@pytest.mark.parametrize("pass_", ["forward", "backprop_input", "backprop_filter"])
def test_wrong_element_fails_grads_and_check(monkeypatch, pass_):
    _off_by_one_element(monkeypatch, pass_, 1)
    result = run("grads", *SMALL)
    assert result.exit_code == 1
    assert "FAIL" in result.stdout
    result = run("check", *SMALL)
    assert result.exit_code == 1
    assert "failures" in result.stdout.splitlines()[-1]
    assert "to reproduce a failure" in result.stdout
    report = json.loads(run("check", *SMALL, "--json").stdout)
    assert report["passed"] is False
    assert {failure["implementation"] for failure in report["failures"]} == {"numpy"}


def test_finite_differences_fail_only_for_the_wrong_tensor(monkeypatch):
    _off_by_one_element(monkeypatch, "backprop_filter", 1)
    (layer,) = json.loads(run("grads", *SMALL, "--json").stdout)["layers"]
    failed = {entry["compared_with"]: entry["passed"] for entry in layer["agreements"]}
    by_tensor = {
        entry["tensor"]: entry["passed"]
        for entry in layer["agreements"]
        if entry["compared_with"] == "finite differences"
    }
    assert by_tensor == {"dx": True, "dw": False, "db": True}
    assert failed["adjoint identity"] is False


def test_check_skips_passes_that_an_implementation_refuses(monkeypatch):
    def refuses(request):
        return "not this pass" if request.pass_ == "backprop_input" else None

    monkeypatch.setattr(FAMILIES["numpy"], "refuses", refuses)
    plan_pass.cache_clear()
    try:
        options = ("--impl", "numpy", "--dtype", "float32", "--json")
        report = json.loads(run("check", *SMALL, *options).stdout)
    finally:
        plan_pass.cache_clear()
    assert report["passed"] is True
    assert report["refused"] == {"numpy": 0}
    (one,) = report["implementations"]
    assert one["comparisons"] == 2 * 3 + 1  # y, dw, db for two kinds of data; adjoint identity


def test_check_reports_exceptions_as_failures(monkeypatch):
    def fail(*_args):
        raise IndexError("out of bounds")

    monkeypatch.setattr(blocked, "prepare", lambda *_: fail)
    monkeypatch.setattr(calls, "_calls", {})
    result = run("check", *SMALL, "--dtype", "float32")
    assert result.exit_code == 1
    assert "IndexError: out of bounds" in result.stdout


def test_check_prints_a_command_that_repeats_the_failure(monkeypatch):
    _off_by_one_element(monkeypatch, "forward", 0)
    report = json.loads(run("check", *SMALL, "--padding", "1:0,0:2", "--json").stdout)
    program, *args = report["failures"][0]["command"].split()
    assert program == "cupyconv"
    assert run(*args).exit_code == 1
    # The text output has the same command on one line, even in a narrow terminal.
    text = run("check", *SMALL, "--padding", "1:0,0:2", COLUMNS="80").stdout
    assert report["failures"][0]["command"] in text.splitlines()


# -- check -----------------------------------------------------------------------------------------


def test_check_counts_configurations_and_comparisons():
    result = run("check", "--dtype", "float32", "--dtype", "bfloat16", "--random", "5")
    assert result.exit_code == 0
    assert "GPU implementations were not checked" in result.stdout
    last = result.stdout.splitlines()[-1]
    configurations, comparisons, failures = (int(part.split()[0]) for part in last.split(", "))
    assert configurations >= 30 + 5
    # 2 implementations and 2 dtypes; 4 results for 2 kinds of data, and the adjoint identity.
    assert comparisons == configurations * 2 * 2 * (2 * 4 + 1)
    assert failures == 0


def test_check_on_the_cpu_does_not_mention_the_gpu():
    assert parsed("check", *SMALL, "--device", "cpu")["not_checked"] == {}


def test_random_configurations_depend_only_on_the_seed():
    from cupyconv.cli.check import _random_layers

    first, again = (list(_random_layers(20, 1)) for _ in range(2))
    assert first == again
    assert first != list(_random_layers(20, 2))
    for layer in _random_layers(300, 3):
        assert isinstance(layer.problem(), ConvProblem)


# -- files -----------------------------------------------------------------------------------------


def test_save_round_trip(tmp_path):
    path = tmp_path / "out.npz"
    report = parsed("grads", *SMALL, "--save", path)
    assert report["saved"] == str(path)
    with np.load(path) as saved:
        first = {name: saved[name] for name in saved.files}
    assert set(first) == {"x", "w", "dy", "y", "dx", "dw", "db"}
    assert os.listdir(tmp_path) == ["out.npz"]
    again = tmp_path / "again.npz"
    files = [part for name in ("x", "w", "dy") for part in (f"--{name}", path)]
    (layer,) = parsed("grads", *files, "--save", str(again))["layers"]
    assert layer["data"] == {"x": str(path), "w": str(path), "dy": str(path)}
    with np.load(again) as saved:
        assert all(np.array_equal(first[name], saved[name]) for name in first)


def test_save_round_trip_of_bfloat16(tmp_path):
    path = tmp_path / "out.npz"
    parsed("grads", *SMALL, "--dtype", "bfloat16", "--save", path)
    with np.load(path) as saved:
        assert saved["dw"].dtype == np.float32
    files = ("--x", path, "--w", path, "--dy", path, "--dtype", "bfloat16")
    parsed("grads", *files, "--save", tmp_path / "again.npz")
    with np.load(path) as one, np.load(tmp_path / "again.npz") as two:
        assert all(np.array_equal(one[name], two[name]) for name in one.files)


def test_failed_save_keeps_the_existing_file(tmp_path, monkeypatch):
    path = tmp_path / "out.npz"
    path.write_text("precious")

    def full(file, **_arrays):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert "No space left" in refused("grads", *SMALL, "--save", path)
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["out.npz"]


def _write(folder: Path, name: str, array: np.ndarray) -> str:
    path = folder / name
    np.save(path, array)
    return str(path)


def test_npy_data_determines_shape_and_dtype(tmp_path):
    x = _write(tmp_path, "x.npy", np.ones((1, 3, 9, 9), ">f8"))
    (layer,) = parsed("grads", "--preset", "multi-channel", "--x", x, "--filter", "2x3x3x3")[
        "layers"
    ]
    assert layer["configuration"]["input"] == [1, 3, 9, 9]
    assert layer["configuration"]["dtype"] == "float64"
    assert layer["norms"]["x"] == pytest.approx(243**0.5)


def test_dtype_option_converts_data(tmp_path):
    x = _write(tmp_path, "x.npy", np.ones((1, 3, 8, 8), np.int64))
    args = ("grads", "--x", x, "--filter", "4x3x3x3")
    assert "int64" in refused(*args)
    (layer,) = parsed(*args, "--dtype", "float16")["layers"]
    assert layer["configuration"]["dtype"] == "float16"


def test_nan_in_the_data_is_not_a_failure(tmp_path):
    x = np.ones((1, 3, 8, 8), np.float32)
    x[0, 1, 4, 4] = np.nan
    path = _write(tmp_path, "x.npy", x)
    (layer,) = parsed("grads", "--x", path, "--filter", "4x3x3x3")["layers"]
    verdicts = {entry["compared_with"]: entry["passed"] for entry in layer["agreements"]}
    assert verdicts["float64 reference"] is True
    assert verdicts["adjoint identity"] is None
    assert layer["norms"]["x"] is None


def test_constant_data_passes_the_checks(tmp_path):
    # All rounding errors of a sum of equal numbers have the same sign.
    x = _write(tmp_path, "x.npy", np.full((1, 2, 60, 60), 0.1, np.float32))
    w = _write(tmp_path, "w.npy", np.full((3, 2, 3, 3), 0.1, np.float32))
    dy = _write(tmp_path, "dy.npy", np.full((1, 3, 58, 58), 0.1, np.float32))
    for impl in ("numpy", "reference"):
        parsed("grads", "--x", x, "--w", w, "--dy", dy, "--impl", impl)


def test_npz_array_is_chosen_by_name(tmp_path):
    path = tmp_path / "many.npz"
    np.savez(path, a=np.ones((1, 3, 8, 8), np.float32), b=np.ones(2))
    assert "has a, b" in refused("grads", "--x", path, "--filter", "4x3x3x3")
    assert "'c'" in refused("grads", "--x", f"{path}:c", "--filter", "4x3x3x3")
    parsed("grads", "--x", f"{path}:a", "--filter", "4x3x3x3")


def _bad_files(folder: Path) -> dict[str, tuple[str, str]]:
    good = (folder / "good.npy", folder / "good.npz")
    np.save(good[0], np.ones((1, 3, 8, 8), np.float32))
    np.savez(good[1], x=np.ones((1, 3, 8, 8), np.float32))
    np.save(folder / "object.npy", np.array([{}, 1], object))
    np.savez(folder / "object.npz", x=np.array([{}, 1], object))
    np.save(folder / "dates.npy", np.ones((1, 3, 8, 8), "datetime64[s]"))
    np.save(folder / "text.npy", np.array(["a"]))
    (folder / "body.npy").write_bytes(good[0].read_bytes()[:-5])
    (folder / "header.npy").write_bytes(good[0].read_bytes()[:20])
    (folder / "half.npz").write_bytes(good[1].read_bytes()[:300])
    (folder / "empty.npy").write_bytes(b"")
    (folder / "pickle.npy").write_bytes(b"\x80\x04K\x03.")
    return {
        "object.npy": ("pickled", "numpy.save"),
        "object.npz": ("pickled", "numpy.save"),
        "dates.npy": ("array of numbers", "datetime64"),
        "text.npy": ("array of numbers", "float32"),
        "body.npy": ("truncated", "numpy.save"),
        "header.npy": ("truncated", "numpy.save"),
        "half.npz": ("truncated", "numpy.save"),
        "empty.npy": ("is empty", "numpy.save"),
        "pickle.npy": ("neither", "never read"),
        "nowhere.npy": ("nowhere.npy", "No such file"),
    }


def test_invalid_data_files_get_one_line(tmp_path):
    for name, words in _bad_files(tmp_path).items():
        line = refused("grads", "--x", tmp_path / name, "--filter", "4x3x3x3")
        assert all(word in line for word in words), line


def test_inconsistent_data_is_rejected(tmp_path):
    x = _write(tmp_path, "x.npy", np.ones((1, 3, 8, 8), np.float32))
    w = _write(tmp_path, "w.npy", np.ones((4, 3, 3, 3), np.float16))
    dy = _write(tmp_path, "dy.npy", np.ones((1, 4, 5, 6), np.float32))
    assert "w is float16" in refused("grads", "--x", x, "--w", w)
    line = refused("grads", "--x", x, "--filter", "4x3x3x3", "--dy", dy)
    assert "input size 7 would give 5" in line
    line = refused("grads", "--x", x, "--input", "1x3x8x9", "--filter", "4x3x3x3")
    assert "Pass the input as 1x3x8x8" in line


# -- as a process ----------------------------------------------------------------------------------


def test_shapes_imports_few_modules_and_no_numpy():
    """Imports take most of the command's time, so the test counts them."""
    program = (
        "import sys\nbefore = set(sys.modules)\nfrom cupyconv.cli.main import main\n"
        "try: main(['shapes', '--preset', 'multi-channel'])\n"
        "finally: print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "10x5x5x5" in done.stdout
    imported = done.stdout.splitlines()[-1].split()
    assert "cupyconv.problem" in imported
    assert {"numpy", "cupy", "ml_dtypes", "asyncio"}.isdisjoint(imported)
    assert len(imported) < 300  # Python, click and rich import 160 to 250, depending on versions


def test_interrupt_during_an_import_exits_with_130(monkeypatch, capsys):
    def interrupted(_name):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("numpy._core.multiarray failed to import") from None

    monkeypatch.setattr("cupyconv.cli.main.import_module", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as ended:
            main(["check"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


def test_interrupt_exits_with_130_silently():
    # Background jobs of a shell, and their children, ignore SIGINT unless a handler is set.
    program = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from cupyconv.cli import check
compare = check._compare
def told(*given, **more):
    print("comparing", flush=True)
    return compare(*given, **more)
check._compare = told
from cupyconv.cli.main import main
main(["check", "--random", "500"])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"comparing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.strip() == b""
