"""The language of the product: docstrings that stand alone, and help that begins with a verb."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cupyconv.cli.main import main
from tests import ROOT

PRODUCT = sorted([*ROOT.glob("cupyconv/**/*.py"), *ROOT.glob("cli/*.py")])

OPENERS = {
    *("of", "that", "those", "which", "whose", "what", "where", "when", "how", "for", "by"),
    *("with", "in", "as", "from", "on", "under", "beside"),
}
"""First words of a docstring that needs the name above it, or is no sentence."""

VERBS = {
    *("apply", "benchmark", "check", "compare", "compile", "compute", "draw", "exit", "explain"),
    *(
        "find",
        "list",
        "measure",
        "open",
        "pad",
        "permit",
        "plan",
        "print",
        "read",
        "run",
        "set",
        "show",
    ),
    *("assume", "skip", "sort", "stop", "sweep", "time", "use", "write"),
}
"""First words of the help of commands and options."""


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, those of constants and attributes included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        body = getattr(node, "body", None)
        for item in body if isinstance(body, list) else ():
            value = item.value if isinstance(item, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield item.lineno, value.value.strip()


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_stand_alone(path):
    found = [
        f"{path.name}:{line}: {text.splitlines()[0]}"
        for line, text in docstrings(path)
        if text and text.split()[0].lower().rstrip(",") in OPENERS
    ]
    assert found == []


def commands() -> list[click.Command]:
    """Return all commands of the program."""
    context = click.Context(main)
    found = [main.get_command(context, name) for name in main.list_commands(context)]
    return [command for command in found if command is not None]


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_help_begins_with_a_verb(command):
    texts = [str(command.help)]
    texts += [option.help or "" for option in command.params if isinstance(option, click.Option)]
    assert [text for text in texts if text.split()[0].lower().rstrip(",") not in VERBS] == []
