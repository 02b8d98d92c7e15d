"""Links and summaries of public names, for the reference pages; needs no Sphinx.

Docstrings name other functions and classes as plain text, so that ``help`` shows no markup.  The
build turns these names into links.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from operator import attrgetter

import cupyconv

_FIELD = re.compile(r"\s*(?::\w[^:]*:|\.\. .*::)\s?")
_ARTICLE = r"(?:an?|as for) (?:Plan|Device|Explanation)"
"""Class names that are also English words; they become links only in these phrases."""


def modules() -> Iterator[str]:
    """Yield the names of the public modules that can be imported."""
    yield from (name for name, owner in cupyconv._MODULES.items() if not owner)
    yield from (name for name in cupyconv._OPTIONAL_MODULES if find_spec(name))


@cache
def targets() -> dict[str, str]:
    """Return the full name of everything that the reference describes, keyed by each short name."""
    names = [
        f"{module}.{name}"
        for module in modules()
        for name in import_module(f"cupyconv.{module}").__all__
    ]
    for name in (name for name, owner in cupyconv._MODULES.items() if owner):
        value = getattr(cupyconv, name)
        members = vars(value) if inspect.isclass(value) else ()
        names += [name, *(f"{name}.{member}" for member in members if not member.startswith("_"))]
    # Modules and settings have no short name, because their names are also plain words.
    full = [f"cupyconv.{name}" for name in (*names, *modules(), "benchmark", "workspace_limit")]
    return {name: f"cupyconv.{name}" for name in names} | {name: name for name in full}


def target(word: str, owner: str) -> str | None:
    """Return the full name that a word means in the docstring of ``owner``; None if there is none.

    Args:
        word: a name, possibly with its class or module, such as "Plan.to_json".
        owner: full name of the documented object.
    """
    prefixes = [owner]
    while "." in prefixes[-1]:
        prefixes.append(prefixes[-1].rpartition(".")[0])
    for name in (*(f"{prefix}.{word}" for prefix in prefixes), word):
        if name in targets():
            return targets()[name]
    return None


@cache
def _pattern() -> re.Pattern[str]:
    """Return a regular expression for literals, other markup, and class names in plain text."""
    classes = [name for name in targets() if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", name)]
    plain = rf"\b(?:{'|'.join(classes)})\b(?!\.\w)|\b{_ARTICLE}\b"
    return re.compile(rf"``(?P<code>[^`]+)``|:[\w:]+:`[^`]+`|`[^`]+`_*|(?P<plain>{plain})")


def linked(lines: list[str], owner: str) -> list[str]:
    """Return the lines of a docstring with roles for the public names in them.

    Args:
        lines: the docstring in reStructuredText; examples and literal blocks are not changed.
        owner: full name of the documented object, which is not linked.
    """

    def role(found: re.Match[str]) -> str:
        before, word = "", found["code"] or found["plain"]
        if word is None:
            return found[0]
        if found["plain"] and " " in word:
            before, _, word = word.rpartition(" ")
            before += " "
        full = target(word.removesuffix("()"), owner)
        if full is None or full == owner:
            return found[0]
        return f"{before}:py:obj:`{word} <{full}>`"

    out, literal, example = [], None, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        example = (example or line.lstrip().startswith(">>>")) and bool(line.strip())
        if literal is not None or example:
            out.append(line)
            continue
        field = _FIELD.match(line)
        start = field.end() if field else 0
        out.append(line[:start] + _pattern().sub(role, line[start:]))
        if line.rstrip().endswith("::"):
            literal = indent
    return out


# -- summaries -------------------------------------------------------------------------------------


def described(page: str) -> list[str]:
    """Return the full names that a page describes with autodoc's directives, in the page's order.

    Args:
        page: the Markdown text of the page.
    """
    names: list[str] = []
    pattern = (
        r"^```\{bridge\} (?P<bridge>\w+)$"
        r"|^\.\. automodule:: (?P<module>[\w.]+)\n +:members:"
        r"|^\.\. auto(?:function|class|exception):: (?P<name>[\w.]+)$"
    )
    for found in re.finditer(pattern, page, re.M):
        module = f"cupyconv.{found['bridge']}" if found["bridge"] else found["module"]
        if found["name"]:
            names.append(found["name"])
        elif not found["bridge"] or find_spec(found["bridge"]):
            names += [f"{module}.{name}" for name in import_module(module).__all__]
    return names


def summary(name: str) -> str:
    """Return the first sentence of the docstring of a public object or constant."""
    owner, _, last = name.rpartition(".")
    value = attrgetter(name.removeprefix("cupyconv."))(cupyconv)
    constant = isinstance(value, int | str)
    text = _constants(owner)[last] if constant else inspect.getdoc(value) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"\.(?: |$)", paragraph)[0]


def rows(names: list[str]) -> list[tuple[str, str]]:
    """Return the rows of a summary table: a link to each name, and its first sentence."""
    owners = {name.rpartition(".")[0] for name in names}
    common = owners.pop() if len(owners) == 1 else "cupyconv"
    return [
        (f":py:obj:`{name.removeprefix(f'{common}.')} <{name}>`", linked([summary(name)], name)[0])
        for name in names
    ]


@cache
def _constants(module: str) -> dict[str, str]:
    """Return the docstrings of a module's annotated constants, by name."""
    body = ast.parse(inspect.getsource(import_module(module))).body
    docs = {}
    for before, after in pairwise(body):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name):
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[before.target.id] = value.value
    return docs
