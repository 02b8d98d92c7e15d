"""Text from users and files in output: it must not control the terminal or break a figure."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import ConvProblem, arrays, markup, operations
from cupyconv.bench import plot
from cupyconv.cli import output
from cupyconv.cli.main import main
from tests import ROOT

SMALL = ("--input", "1x1x5x5", "--filter", "2x1x3x3")

STEERING = "".join(
    [
        *("\x1b[2J\x1b]0;title\x07\x1b[31m", "\x9b1m", "\r", "\b", "\x7f", "\x00"),
        *("\n", "\u202e", "\u2066", "\u2028", "\ufeff", "\x0b", "\x85", "\t"),
        *("\u200b", "\U000e0041", "\ufff9", "\u00ad", "\u2060", "\ue000", "\U000f0000"),
    ]
)
HOSTILE = f"be{STEERING}fore"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(arrays, "device_count", lambda: 0)


def require_harmless(text: str) -> None:
    found = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Co", "Zl", "Zp", "Cs")}
    assert found <= {"\n"}, found


def run(*args: str) -> str:
    """Run a command, require output without control characters, and return both streams."""
    result = CliRunner().invoke(main, list(args))
    assert result.exit_code in (0, 2), result.output
    require_harmless(result.stdout + result.stderr)
    assert "be" in result.stdout + result.stderr
    return result.stdout + result.stderr


# -- escaping --------------------------------------------------------------------------------------


UNSEEN = [0xAD, 0x34F, 0x3164, 0x180E, 0x200B, 0x202E, 0x2067, 0xDC80, 0xE000, 0xFFF9, 0xFFFF]
UNSEEN += [0x1D173, 0xE0041, 0xE0100, 0xF0000, 0x10FFFF]


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0), *UNSEEN])
def test_control_characters_are_escaped(code):
    if chr(code) in "\n\t":
        assert markup.visible(chr(code)) == chr(code)
    written = markup.in_line(f"a{chr(code)}b")
    assert written.isprintable()
    assert written.isascii()
    assert len(written) > 3


@pytest.mark.parametrize(
    "text", ["plain", "Ölçü 3 × 4 µs", "日本語", "e\u0301", "👩‍💻"[0], "\\x1b"]
)
def test_printable_text_is_unchanged(text):
    assert markup.in_line(text) == text


@pytest.mark.thorough
def test_visible_escapes_every_invisible_character():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    require_harmless(markup.visible(every).replace("\t", ""))
    assert markup.in_line("\U000e0041") == r"\U000e0041"


def test_documents_escape_their_texts():
    pieces = (
        markup.Paragraph(HOSTILE),
        markup.Verbatim(HOSTILE),
        markup.Table((HOSTILE, HOSTILE), ((HOSTILE, HOSTILE),), (HOSTILE,)),
    )
    document = markup.Document(HOSTILE, (markup.Section(HOSTILE, pieces),))
    require_harmless(document.text().replace("\t", ""))
    require_harmless(document.html().replace("\t", ""))
    ET.fromstring(document.html())


@pytest.mark.thorough
def test_html_module_is_imported_in_one_place():
    for path in [*(ROOT / "cupyconv").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        names += [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert ("html" in names) == (path.name == "markup.py"), path


# -- sources of text -------------------------------------------------------------------------------


def in_toml(text: str) -> str:
    """Escape every character of a text for a TOML string."""
    return "".join(f"\\U{ord(character):08x}" for character in text)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "layer.toml"
    quoted = f'"{in_toml(HOSTILE)}"'
    lines = [f"name = {quoted}", f"title = {quoted}", 'input = "1x1x5x5"', 'filter = "2x1x3x3"']
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize(
    "args",
    [
        ("shapes",),
        ("shapes", "--json"),
        ("grads",),
        ("grads", "--json"),
        ("explain",),
        ("explain", "--map", "dx"),
        ("explain", "--element", "dw[0,0,0,0]"),
        ("explain", "--json"),
        ("bench", "--list"),
        ("bench", "--list", "--json", "-"),
    ],
)
def test_names_and_titles_from_toml_are_escaped(config, args):
    text = run(*args, "--config", config)
    if "--json" in args:
        (layer,) = json.loads(text)["layers"]
        assert layer["name"] == HOSTILE, "JSON keeps the name"
    elif args[0] != "bench":
        assert r"be\x1b[2J\x1b]0;title\x07" in text
        assert r"\n\u202e" in text


def test_failures_of_checks_are_escaped(config, monkeypatch):
    right = operations.conv_forward
    monkeypatch.setattr(operations, "conv_forward", lambda *a, **k: right(*a, **k) * 2)
    result = CliRunner().invoke(main, ["check", "--config", config, "--impl", "numpy"])
    assert result.exit_code == 1
    assert "FAIL" in result.output.upper()
    require_harmless(result.output)


@pytest.mark.parametrize(
    "table",
    [
        'be = "{}"',
        'input = "be{}"',
        'dtype = "be{}"',
        'data_format = "be{}"',
        'padding = "be{}"',
        '"be{}" = 1',
        "be",
    ],
)
def test_toml_errors_are_escaped(tmp_path, table):
    path = tmp_path / "layer.toml"
    shapes = "" if "input" in table else 'input = "1x1x5x5"\nfilter = "2x1x3x3"\n'
    path.write_text(shapes + table.format(in_toml(STEERING)))
    assert run("shapes", "--config", str(path)).count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ("shapes", "--config", HOSTILE.replace("\0", "")),
        ("shapes", "--input", HOSTILE, "--filter", "1x1x1"),
        ("shapes", "--preset", HOSTILE),
        ("shapes", "--device", HOSTILE, *SMALL),
        ("shapes", f"--{HOSTILE}"),
        (HOSTILE,),
        ("grads", *SMALL, "--impl", HOSTILE),
        ("grads", *SMALL, "--x", HOSTILE.replace("\0", "")),
        ("grads", *SMALL, "--save", HOSTILE.replace("\0", "") + "/x.npz"),
        ("explain", *SMALL, "--element", HOSTILE),
        ("explain", *SMALL, "--code", HOSTILE),
        ("bench", "--layer", HOSTILE),
        ("bench", "--compare", HOSTILE.replace("\0", ""), "b"),
        ("model", HOSTILE.replace("\0", "")),
        ("shapes", "--config", "be\udc80"),
    ],
)
def test_options_in_errors_are_escaped(args):
    assert run(*args).count("\n") == 1


@pytest.mark.skipif(os.name != "posix", reason="file names with control characters need POSIX")
@pytest.mark.parametrize("name", [HOSTILE.replace("\0", ""), "be\udc80"])
def test_file_names_are_escaped(tmp_path, name):
    np.save(tmp_path / f"{name}.npy", np.ones((1, 1, 5, 5), np.float32))
    text = run("grads", "--filter", "2x1x3x3", "--x", str(tmp_path / f"{name}.npy"), "--no-check")
    assert f"xfrom{tmp_path}/be\\" in "".join(text.split())
    run("explain", "--filter", "2x1x3x3", "--x", str(tmp_path / f"{name}.npy"))
    run("explain", *SMALL, "--svg", str(tmp_path / f"{name}.svg"))
    run("grads", *SMALL, "--save", str(tmp_path / f"{name}.npz"))


@pytest.mark.parametrize("as_json", [False, True])
def test_onnx_names_are_escaped(tmp_path, as_json):
    onnx = pytest.importorskip("onnx")
    helper, name = onnx.helper, HOSTILE
    x = helper.make_tensor_value_info(name, 1, [1, 1, 5, 5])
    w = helper.make_tensor("w", 1, [2, 1, 3, 3], [0.0] * 18)
    y = helper.make_tensor_value_info("y", 1, None)
    nodes = [
        helper.make_node("Conv", [name, "w"], ["y"], name=name),
        helper.make_node(f"Conv{name}", [name], ["z"], name=name, domain="d"),
    ]
    path = tmp_path / "be\x1bfore.onnx"
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("d", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], [w]), opset_imports=imports)
    path.write_bytes(model.SerializeToString())
    text = run("model", str(path), *(("--json",) if as_json else ()))
    if as_json:
        assert json.loads(text)["layers"][0]["name"] == HOSTILE
    else:
        assert len([line for line in text.split("\n") if "Conv" in line or "fore" in line]) < 12
    nodes[0].attribute.append(helper.make_attribute("group", 7))
    broken = helper.make_model(helper.make_graph(nodes[:1], "g", [x], [y], [w]))
    path.write_bytes(broken.SerializeToString())
    assert run("model", str(path)).count("\n") == 1


def test_benchmark_files_are_escaped(tmp_path):
    from tests.bench.test_bench_results import suite

    results = suite()
    results.environment["gpu"] = HOSTILE
    results.save(tmp_path / "a.json")
    run("bench", "--compare", str(tmp_path / "a.json"), str(tmp_path / "a.json"))
    ET.fromstring(plot.svg(results))


# -- figures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 1, 5, 5), (1, 1, 5, 5, 5)])
def test_title_does_not_break_figures(shape, tmp_path):
    problem = ConvProblem(shape, (2, 1, *[3] * (len(shape) - 2)))
    explanation = cupyconv.explain(problem, title=HOSTILE + "<&\"'>")
    ET.fromstring(explanation.svg())
    element = explanation.element(explanation.middle)
    for shown in (problem, cupyconv.plan(problem, "sm_90a"), explanation, element):
        ET.fromstring(shown._repr_html_())
    for text in (
        explanation.svg(),
        explanation.page(),
        explanation._repr_html_(),
        str(explanation),
    ):
        require_harmless(text.replace("\t", ""))
        assert r"\x1b[2J" in text


# -- encodings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "cp437", "utf-8"])
@pytest.mark.parametrize(
    "args",
    [
        ("explain", *SMALL),
        ("explain", *SMALL, "--map", "dx"),
        ("explain", *SMALL, "--code", "pytorch"),
        ("shapes", *SMALL),
        ("bench", "--list"),
    ],
)
def test_output_works_in_any_encoding(encoding, args):
    plain = CliRunner(charset=encoding).invoke(main, list(args))
    whole = CliRunner().invoke(main, list(args))
    assert plain.exit_code == 0, plain.output
    lines = zip(plain.stdout.split("\n"), whole.stdout.split("\n"), strict=True)
    if args[0] == "explain":
        assert all(len(one) == len(other) for one, other in lines), "columns must stay aligned"
    assert "\\u" not in plain.stdout


def test_title_outside_the_encoding_is_escaped(tmp_path):
    path = tmp_path / "layer.toml"
    path.write_text('title = "日本"\ninput = "1x1x5x5"\nfilter = "2x1x3x3"\n', encoding="utf-8")
    for command in ("explain", "shapes", "grads"):
        result = CliRunner(charset="ascii").invoke(main, [command, "--config", str(path)])
        assert result.exit_code == 0
        assert r"\u65e5\u672c" in result.stdout


# -- streams ---------------------------------------------------------------------------------------

PROGRAM = f"{sys.executable} -c 'from cupyconv.cli.main import main; main(prog_name=\"cupyconv\")'"


def shell(line: str) -> subprocess.CompletedProcess:
    line = line.replace("cupyconv", PROGRAM, 1)
    return subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True, timeout=300)


posix = pytest.mark.skipif(os.name != "posix", reason="the test needs a POSIX shell")


@posix
@pytest.mark.parametrize("command", ["shapes", "explain", "shapes --json", "grads", "bench --list"])
def test_closed_standard_output_is_reported(command):
    small = "" if "bench" in command else " ".join(SMALL)
    result = shell(f"cupyconv {command} {small} >&-")
    assert result.returncode == 2
    assert result.stderr == "cupyconv: error: standard output: Bad file descriptor\n"


@pytest.mark.thorough
@posix
def test_closed_standard_error_keeps_exit_codes():
    assert shell(f"cupyconv shapes {' '.join(SMALL)} 2>&-").returncode == 0
    assert shell(f"cupyconv grads {' '.join(SMALL)} 2>&-").returncode == 0
    assert shell("cupyconv shapes 2>&-").returncode == 2


@posix
@pytest.mark.parametrize("command", ["shapes", "explain", "shapes --json"])
def test_broken_pipe_is_no_error(command):
    line = f"{{ cupyconv {command} {' '.join(SMALL)}; echo $? >&2; }} | head -n 0"
    assert shell(line).stderr == "0\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("command", ["shapes", "explain", "shapes --json"])
def test_full_standard_output_is_reported(command):
    result = shell(f"cupyconv {command} {' '.join(SMALL)} >/dev/full")
    assert result.returncode == 2
    assert result.stderr == "cupyconv: error: standard output: No space left on device\n"


def test_terminal_output_has_only_known_colours(monkeypatch):
    watched = io.StringIO()
    monkeypatch.setattr(watched, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", watched)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    output.draw(output.heading("head\x1b[31m"), output.verdict(True))
    text = watched.getvalue()
    assert r"\x1b[31m" in text
    assert set(re.findall(r"\x1b[^m]*m", text)) <= {"\x1b[1m", "\x1b[0m", "\x1b[32m"}
    assert "\x1b[1m" in text
