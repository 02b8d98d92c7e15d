"""Complete output of the commands, compared with stored files.

After an intended change, write the files again and review the difference:

    CUPYCONV_GOLDEN=write python -m pytest tests/cli/test_cli_golden.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from cupyconv.cli.main import main
from tests.command import require_stored

FOLDER = Path(__file__).with_name("golden")

CASES = {
    "shapes-multi-channel.txt": ("shapes", "--preset", "multi-channel", "--device", "cpu"),
    "shapes-same-stride.txt": ("shapes", "--preset", "same-stride", "--device", "cpu"),
    "shapes-same-stride.json": ("shapes", "--preset", "same-stride", "--device", "cpu", "--json"),
    "shapes-unread-rows.txt": (
        *("shapes", "--input", "2x6x11x12", "--filter", "12x1x2x3", "--groups", "6"),
        *("--stride", "4x3", "--padding", "0:1,1:0", "--dilation", "2x1", "--device", "cpu"),
    ),
    "grads-multi-channel.txt": ("grads", "--preset", "multi-channel"),
    "grads-multi-channel.json": ("grads", "--preset", "multi-channel", "--json"),
    "grads-same-stride.txt": ("grads", "--preset", "same-stride"),
    "grads-valid-stride.txt": ("grads", "--preset", "valid-stride"),
    "grads-valid-dilation.txt": ("grads", "--preset", "valid-dilation"),
    **{
        f"explain-{name}.txt": ("explain", "--preset", name)
        for name in ("multi-channel", "same-stride", "valid-stride", "valid-dilation", "by-hand")
    },
    "explain-element.txt": (*("explain", "--preset", "multi-channel", "--element", "dF[7,2,1,3]"),),
    "explain-map.txt": (
        *("explain", "--preset", "same-stride", "--map", "dx", "--element", "dX[0,0,3,3]"),
    ),
    "explain-code.txt": ("explain", "--preset", "same-stride", "--code", "pytorch"),
    "check-preset.txt": ("check", "--preset", "valid-stride", "--device", "cpu"),
}

TERMINAL = {"COLUMNS": None, "FORCE_COLOR": None, "TTY_COMPATIBLE": None}


def _stable(text: str) -> str:
    """Replace the digits that depend on the BLAS and the processor: rounding errors and norms."""
    text = re.sub(r"\d\.\de[+-]\d\d", "#.#e-##", text)
    text = re.sub(r"(> = )-?\d+\.\d+", r"\1#", text)
    text = re.sub(r"(cupyconv\.conv_\w+ gives ).*", r"\1#", text)
    return re.sub(r" *\d+%$", " #%", text, flags=re.MULTILINE)


def _stable_json(text: str) -> str:
    content = json.loads(text)
    for layer in content["layers"]:
        for agreement in layer.get("agreements", ()):
            agreement["difference"] = agreement["bound"] = "#"
        for group in ("norms", "inner_products"):
            values = layer.get(group) or {}
            for name, value in values.items():
                values[name] = float(f"{value:.4g}")
    return json.dumps(content, indent=2) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_output_matches_the_stored_file(name):
    result = CliRunner().invoke(main, list(CASES[name]), env=TERMINAL)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    text = (_stable_json if name.endswith(".json") else _stable)(result.stdout)
    require_stored(text, FOLDER / name)


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize(
    "args",
    [
        ("shapes", "--preset", "multi-channel"),
        ("shapes", "--input", "2x16x20x30x40", "--filter", "32x8x3x5x7", "--groups", "2"),
        ("grads", "--preset", "multi-channel"),
        ("grads", "--input", "2x16x20x30x40", "--filter", "4x16x1x2x3", "--no-check"),
        ("check", "--preset", "same-stride"),
        ("explain", "--preset", "multi-channel", "--map", "dx", "--element", "O[0,0,0,0]"),
        (
            *("explain", "--input", "2x16x20x30x40", "--filter", "32x8x3x5x7"),
            *("--groups", "2", "--stride", "2"),
        ),
        ("env",),
    ],
)
def test_lines_fit_the_terminal(args, width):
    result = CliRunner().invoke(main, list(args), env={**TERMINAL, "COLUMNS": str(width)})
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert "\x1b" not in result.stdout  # colours appear only on a terminal
    assert all(line == line.rstrip() for line in lines)
    if args[0] == "grads" and "--no-check" not in args:
        # The labels of the rows are never wrapped.
        assert all(f"\n{word} " in result.stdout for word in ("finite differences", "dx", "dw"))
