"""``python -m tests.measures``: print those measures of CONTRIBUTING that need no test run."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from tests import ROOT

T, R = TypeVar("T"), TypeVar("R")

CODE = {".py", ".cu", ".cuh", ".cpp", ".h", ".c", ".js", ".toml"}

FAMILY_PLACES = (
    "cupyconv/kernels/request.py",
    "tests/families.py",
    "notebooks/pictures.py",
    "notebooks/contributing/kernels.md",
)
"""Files that a new kernel family changes, besides its kernel, its module and its page."""


def tracked(*folders: str) -> list[Path]:
    """Return the tracked files of code in some folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    return [path for path in paths if path.suffix in CODE and path.is_file()]


def lines(*folders: str) -> int:
    """Return the number of lines of all code in some folders."""
    return sum(len(path.read_text().splitlines()) for path in tracked(*folders))


def code_lines(text: str) -> int:
    """Return the lines of Python code without docstrings, comments and blanks."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
              tokenize.ENDMARKER}  # fmt: skip
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            used.update(range(token.start[0], token.end[0] + 1))
    return len(used - docstrings)


def hand_set(text: str) -> Iterator[str]:
    """Yield the module-level constants whose docstring or comment calls them hand-set or rough."""
    listing, body = text.splitlines(), ast.parse(text).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            end = node.end_lineno or node.lineno
            if isinstance(after, ast.Expr):
                end = after.end_lineno or end
            if re.search(r"\((hand-set|rough)\b", "\n".join(listing[node.lineno - 1 : end])):
                yield ast.unparse(node)


def in_new_processes(function: Callable[[T], R], arguments: Iterable[T]) -> Iterator[R]:
    """Yield the results of a function, each of a new process, whose caches are empty."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        yield from pool.map(function, arguments)


def planned(pass_: str) -> tuple[int, int]:
    """Return the functions of cupyconv that a first ``plan_pass`` enters, and its ConvProblems."""
    from cupyconv import ConvProblem
    from cupyconv.planning import Device, Request, plan_pass
    from cupyconv.planning.families import FAMILIES

    dict(FAMILIES)  # import the families before the count
    problem = ConvProblem((32, 14, 14, 256), (256, 3, 3, 256), padding=1, dtype="float16",
                          data_format="NHWC", filter_format="OHWI")  # fmt: skip
    device, counts = Device.of("sm_90a"), [0, 0]

    def profile(frame: object, event: str, _: object) -> None:
        code = getattr(frame, "f_code")  # noqa: B009
        if event == "call" and str(ROOT / "cupyconv") in code.co_filename:
            counts[0] += not code.co_name.startswith("<")  # such as <listcomp>
            counts[1] += code is ConvProblem.__init__.__code__

    sys.setprofile(profile)
    plan_pass(Request(problem, pass_, device))
    sys.setprofile(None)
    return counts[0], counts[1]


def main() -> None:
    product = [path for path in tracked("cupyconv", "cli") if path.suffix == ".py"]
    texts = [path.read_text() for path in product]
    passes = ("forward", "backprop_input", "backprop_filter")
    counts = list(in_new_processes(planned, passes))
    for value, what in (
        (sum(map(code_lines, texts)), "lines of Python in cupyconv and cli, without docstrings"),
        (lines("tests"), "lines of tests and their tools"),
        (lines("tests/emulator"), "of them in tests/emulator"),
        (" ".join(f"{count:,}" for count, _ in counts), "functions that a cold plan_pass enters"),
        (" ".join(str(built) for _, built in counts), "ConvProblems that it builds"),
        (sum(1 for text in texts for _ in hand_set(text)), "constants that are hand-set or rough"),
        (len(FAMILY_PLACES), "files that a new kernel family changes"),
    ):
        print(f"{value:>21,}" if isinstance(value, int) else f"{value:>21}", what)


if __name__ == "__main__":
    main()
