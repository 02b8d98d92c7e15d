"""Names, signatures and docstrings of functions that are generated for several numbers of axes."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cupyconv.errors import unknown_arguments

_WIDTH = 100 - 4
"""Width of a docstring in characters: that of a source line, less the docstring's indentation."""

_ENTRY = re.compile(r" *\w+(, \w+)*:( |$)")
"""Pattern of the first line of an argument or error, and of the title of a section."""


def describe(
    function: Callable[..., Any],
    name: str,
    parameters: Iterable[inspect.Parameter],
    template: Callable[..., Any],
    **words: Any,
) -> None:
    """Give a generated function the name, the signature and the docstring of a written function.

    Args:
        function: the generated function.
        name: its name in the module of the template.
        parameters: its parameters.
        template: function whose docstring has fields such as {name}.
        words: texts of the other fields.
    """
    function.__name__ = function.__qualname__ = name
    function.__module__ = template.__module__
    signature = inspect.signature(template).replace(parameters=list(parameters))
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    function.__annotations__["return"] = signature.return_annotation
    if template.__doc__ is not None:  # python -OO removes docstrings
        function.__doc__ = _filled(inspect.cleandoc(template.__doc__).format(name=name, **words))


def require_arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise an error if a call's arguments do not fit the signature of a function."""
    signature = inspect.signature(function)
    if not kwargs.keys() <= signature.parameters.keys():
        raise unknown_arguments(function, kwargs)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None


def _filled(text: str) -> str:
    """Return a docstring whose lines, except those of its example, are filled again."""
    text, mark, example = text.partition(">>>")
    lines: list[str] = []
    for line in text.splitlines():
        starts = not line or _ENTRY.match(line) or not lines or not lines[-1]
        if starts or lines[-1].endswith(":"):
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
    return "\n".join(map(_wrapped, lines)) + f"\n{mark}{example}"


def _wrapped(line: str) -> str:
    """Return a paragraph in lines of the width of a docstring."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line.strip(),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " " * 4 * bool(_ENTRY.match(line)),
        break_long_words=False,
        break_on_hyphens=False,
    )
