"""Errors of cupyconv.

A message states the rule that was broken, the values that broke it, and a way out if one is known.
Errors are raised before anything is allocated or changed.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class CupyconvError(Exception):
    """Base of every error that cupyconv raises on purpose.

    Copies and pickles keep the class, ``args`` and all attributes, whatever a subclass's
    ``__init__`` takes: it is not called again.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


Phrase = str | tuple[str, Any]
"""A part of a way out: a text, or the name of an argument and its new value."""


class ConvError(CupyconvError, ValueError):
    """An invalid configuration.

    Attributes:
        rule: what must hold.
        values: what was given, with the arithmetic that shows the conflict.
        remedy: valid alternatives; empty where none is known.
        axis: the spatial axis (``"D"``, ``"H"`` or ``"W"``) the rule was broken on, if one.
        fixes: the phrases of each way out, where these are known as changes of arguments.
        candidates: where other arguments decide what is valid, ways out to try beside the usual
            ones (``cupyconv.remedies.offering``); else None.
    """

    def __init__(
        self,
        rule: str,
        values: str,
        remedy: str = "",
        *,
        axis: str | None = None,
        candidates: Sequence[Any] | None = None,
    ) -> None:
        self.rule, self.values, self.axis, self.candidates = rule, values, axis, candidates
        self.fixes: tuple[tuple[Phrase, ...], ...] = ()
        self.remedy = remedy
        super().__init__(self._text(remedy))

    def offer(self, fixes: Iterable[tuple[Phrase, ...]]) -> None:
        """Set the ways out, in the words of Python."""
        self.fixes = tuple(fixes)
        self.remedy = self._alternatives(python_argument) if self.fixes else ""
        self.args = (self._text(self.remedy),)

    def told(self, argument: Callable[[str, Any], str]) -> str:
        """Write the message with other words for arguments.

        Args:
            argument: writes the name of an argument and its value.
        """
        return self._text(self._alternatives(argument) if self.fixes else self.remedy)

    def _alternatives(self, argument: Callable[[str, Any], str]) -> str:
        return one_of([_way_out(phrases, argument) for phrases in self.fixes])

    def _text(self, remedy: str) -> str:
        where = f" (axis {self.axis})" if self.axis else ""
        text = f"{self.rule}{where}: {self.values}"
        return f"{text}. {remedy}" if remedy else text


def python_argument(name: str, value: Any) -> str:
    """Write an argument as Python reads it: ``data_format="NHWC"``."""
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}"


def _way_out(phrases: Sequence[Phrase], argument: Callable[[str, Any], str]) -> str:
    """Write one way out; its arguments come first, after one verb."""
    used = [argument(*phrase) for phrase in phrases if not isinstance(phrase, str)]
    texts = [phrase for phrase in phrases if isinstance(phrase, str)]
    return " and ".join([f"use {' and '.join(used)}", *texts] if used else texts)


class ConvTypeError(CupyconvError, TypeError):
    """An array or argument of a kind that no pass takes: dtype, home, or not an array at all."""


class DeviceError(CupyconvError, RuntimeError):
    """A GPU, or a package for it, was requested but is not available."""


class WorkerError(CupyconvError, RuntimeError):
    """Workers of a Dask cluster died while they computed, more often than it tries again."""


class KernelCompileError(CupyconvError, RuntimeError):
    """A kernel did not compile; ``log`` is the compiler's own output."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


def shown(value: object) -> str:
    """Return a value in a message: its repr, or the beginning of a long one."""
    try:
        text = repr(value)
    except Exception:  # huge integers, deep lists, or an error of the object's __repr__
        return f"one of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


_LONGEST = 120


def unknown_word(what: str, given: object, known: Iterable[str]) -> ConvError:
    """Return the error for a word that is not one of ``known``, with the nearest one suggested."""
    words, text = list(known), shown(given)
    word = given if isinstance(given, str) and len(given) <= _LONGEST else text
    near = get_close_matches(word.lower(), [word.lower() for word in words], n=1, cutoff=0.55)
    suggestion = next((word for word in words if near and word.lower() == near[0]), None)
    remedy = f"Did you mean {suggestion!r}? " if suggestion else ""
    return ConvError(f"unknown {what}", text, f"{remedy}Known: {', '.join(map(repr, words))}")


def require_word(what: str, given: object, known: Iterable[str | None]) -> None:
    """Check that a word is one of ``known``, of which None may be one.

    Raises:
        ConvError: it is not, or no word at all.
    """
    words = tuple(known)
    # Others are not compared: an array answers for each of its elements.
    if not isinstance(given, str | None) or given not in words:
        raise unknown_word(what, given, filter(None, words))


def words_of(argument: str, what: str, given: object, known: Sequence[str]) -> tuple[str, ...]:
    """Return the words of an argument that takes one or several, each once.

    Raises:
        ConvError: one of them is not known.
        ConvTypeError: it is neither.
    """
    try:
        words = (given,) if isinstance(given, str) else tuple(given)  # type: ignore[arg-type]
    except TypeError:
        raise ConvTypeError(
            f"{argument} must be a word, or several: got {shown(given)}. "
            f"Known: {', '.join(map(repr, known))}"
        ) from None
    for word in words:
        require_word(what, word, known)
    return tuple(dict.fromkeys(words))


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of cupyconv.

    It names the packages of the installed metadata, since a checkout is on no index.
    """
    import re
    import shlex
    from importlib import metadata

    try:
        required = metadata.requires("cupyconv") or []
    except metadata.PackageNotFoundError:  # a folder on the path
        required = []
    found = [
        entry.partition(";")[0].strip()
        for entry in required
        if re.search(rf"extra\s*==\s*[\"']{re.escape(extra)}[\"']", entry)
    ]
    return f"pip install {shlex.join(found or [f'cupyconv[{extra}]'])}"


def reinstall_command() -> str:
    """Return the command that reinstalls cupyconv from its origin."""
    import json
    import shlex
    from importlib import metadata

    source = "cupyconv"
    try:
        # In a checkout its own record is found as well, which does not say where it is.
        for found in metadata.distributions(name="cupyconv"):
            if origin := found.read_text("direct_url.json"):
                source = json.loads(origin)["url"].removeprefix("file://")
    except (ValueError, KeyError):
        pass
    return f"pip install --force-reinstall {shlex.quote(source)}"


def one_of(repairs: Sequence[str]) -> str:
    """Return alternative ways out as one sentence: ``Pad by 1, or use an input of 5``."""
    *others, last = repairs
    text = f"{', '.join(others)}, or {last}" if others else last
    return text[0].upper() + text[1:]
