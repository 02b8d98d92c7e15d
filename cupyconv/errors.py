"""What cupyconv raises.

Every message states the rule that was broken, the values that broke it, and a way out.  All of
them are raised before anything is allocated or changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class CupyconvError(Exception):
    """Base of everything raised on purpose."""


class ConvError(CupyconvError, ValueError):
    """A configuration that cannot be.

    Attributes:
        rule: what must hold.
        values: what was given, with the arithmetic that shows the conflict.
        remedy: the nearest thing that would be valid.
        axis: the spatial axis (``"D"``, ``"H"`` or ``"W"``) the rule was broken on, if one.
    """

    def __init__(self, rule: str, values: str, remedy: str, *, axis: str | None = None) -> None:
        where = f" (axis {axis})" if axis else ""
        super().__init__(f"{rule}{where}: {values}. {remedy}")
        self.rule, self.values, self.remedy, self.axis = rule, values, remedy, axis


class ConvTypeError(CupyconvError, TypeError):
    """An array or argument of a kind that no pass takes: dtype, home, or not an array at all."""


class DeviceError(CupyconvError, RuntimeError):
    """A GPU, or the package that reaches it, was asked for and is not there."""


class WorkerError(CupyconvError, RuntimeError):
    """Workers of a Dask cluster died while they computed, more often than it tries again."""


class KernelCompileError(CupyconvError, RuntimeError):
    """A kernel did not compile; ``log`` is the compiler's own output."""

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


def shown(value: object) -> str:
    """A value in a message: its repr, or the beginning of a long one."""
    try:
        text = repr(value)
    except Exception:  # of huge integers and deep lists, or of its own making
        return f"one of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


_LONGEST = 120


def unknown_word(what: str, given: object, known: Iterable[str]) -> ConvError:
    """The error for a word that is not one of ``known``, with the nearest one suggested."""
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
    """The words of an argument that takes one or several, each once.

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
    """What installs the packages of one of cupyconv's extras, wherever cupyconv came from.

    It names the packages, as the installed metadata has them: a checkout is not on any index.
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
    """What installs cupyconv again from where it was installed from."""
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
    """Alternative ways out as one sentence: ``Pad by 1, or use an input of 5``."""
    *others, last = repairs
    text = f"{', '.join(others)}, or {last}" if others else last
    return text[0].upper() + text[1:]
