"""Errors of cupyconv.

A message states the rule that was broken, the values that broke it, and a fix if one is known.
Errors about arguments are raised before anything is computed.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast


class CupyconvError(Exception):
    """Base class of all errors that cupyconv raises on purpose.

    Copies and pickles keep the class, ``args`` and all attributes.  Copying does not call
    ``__init__``, so the ``__init__`` of a subclass may have any parameters.

    >>> try:
    ...     cupyconv.ConvProblem((1, 3, 4), (8, 3, 5))
    ... except cupyconv.CupyconvError as error:
    ...     print(type(error).__name__)
    ConvError
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


Phrase = str | tuple[str, Any]
"""Part of a suggested fix: a text, or a pair of an argument's name and its new value."""


class ConvError(CupyconvError, ValueError):
    """An invalid configuration or option value.

    Attributes:
        rule: the rule that was broken.
        values: the values that broke it, with the arithmetic that shows the conflict.
        remedy: suggested fixes as text; empty if no fix is known.
        axis: spatial axis on which the rule was broken, ``"D"``, ``"H"`` or ``"W"``; None if the
            rule is not about one axis.
        fixes: suggested fixes that change arguments, each as a tuple of phrases.
        candidates: fixes that ``cupyconv.remedies.offering`` tries in addition to the fixes that it
            derives from the call; None if it should try no fixes at all.

    >>> try:
    ...     cupyconv.ConvProblem((1, 3, 4), (8, 3, 5))
    ... except cupyconv.ConvError as error:
    ...     print(error.axis, error.values, sep=": ")
    W: a filter of 5 with dilation 1 spans 5, the input of 4 with padding (0, 0) has 4
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
        """Set ``fixes``, and describe them in ``remedy`` and the message in Python's notation.

        >>> error = cupyconv.ConvError("the sizes must fit", "9 and 10")
        >>> error.offer([(("stride", 2),), (("padding", "same"),)])
        >>> error.remedy
        'Use stride=2, or use padding="same"'
        """
        self.fixes = tuple(fixes)
        self.remedy = self._alternatives(python_argument) if self.fixes else ""
        self.args = (self._text(self.remedy),)

    def told(self, argument: Callable[[str, Any], str]) -> str:
        """Return the message, with the arguments in its suggested fixes in another notation.

        Args:
            argument: function that takes an argument's name and its new value, and returns the
                text for both.

        >>> error = cupyconv.ConvError("the sizes must fit", "9 and 10")
        >>> error.offer([(("stride", 2),)])
        >>> error.told(lambda name, value: f"--{name} {value}")
        'the sizes must fit: 9 and 10. Use --stride 2'
        """
        return self._text(self._alternatives(argument) if self.fixes else self.remedy)

    def _alternatives(self, argument: Callable[[str, Any], str]) -> str:
        # "and" joins the phrases of a fix.  If a fix has several, semicolons separate the fixes,
        # unless there are only two.
        comma = ";" if len(self.fixes) > 2 and max(map(len, self.fixes)) > 1 else ","
        return one_of([_way_out(phrases, argument) for phrases in self.fixes], comma)

    def _text(self, remedy: str) -> str:
        where = f" (axis {self.axis})" if self.axis else ""
        text = f"{self.rule}{where}: {self.values}"
        return f"{text}. {remedy}" if remedy else text


def python_argument(name: str, value: Any) -> str:
    """Return a keyword argument in Python's notation, such as ``data_format="NHWC"``."""
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value!r}"


def _way_out(phrases: Sequence[Phrase], argument: Callable[[str, Any], str]) -> str:
    """Return a suggested fix as text: "use" with all changed arguments, then the other phrases.

    Args:
        phrases: the phrases of the fix.
        argument: as for ``ConvError.told``.
    """
    used = [argument(*phrase) for phrase in phrases if not isinstance(phrase, str)]
    texts = [phrase for phrase in phrases if isinstance(phrase, str)]
    return " and ".join([f"use {' and '.join(used)}", *texts] if used else texts)


class ConvTypeError(CupyconvError, TypeError):
    """An array or argument with an unsupported dtype, device or type.

    >>> x, w = np.ones((1, 1, 3), "int32"), np.ones((1, 1, 2), "int32")
    >>> try:
    ...     cupyconv.conv_forward(x, w)
    ... except TypeError as error:
    ...     print(type(error).__name__)
    ConvTypeError
    """


class DeviceError(CupyconvError, RuntimeError):
    """A GPU, or a package for it, was requested but is not available.

    >>> error = cupyconv.DeviceError("CuPy is not installed")
    >>> isinstance(error, RuntimeError), str(error)
    (True, 'CuPy is not installed')
    """


class WorkerError(CupyconvError, RuntimeError):
    """Workers of a Dask cluster died repeatedly, and the cluster gave up the computation.

    >>> error = cupyconv.WorkerError("a worker died 4 times")
    >>> isinstance(error, RuntimeError), str(error)
    (True, 'a worker died 4 times')
    """


class KernelCompileError(CupyconvError, RuntimeError):
    """A kernel did not compile; the attribute ``log`` is the compiler's output.

    >>> error = cupyconv.KernelCompileError("conv.cu did not compile", "line 3: ; expected")
    >>> print(error)
    conv.cu did not compile
    line 3: ; expected
    >>> error.log
    'line 3: ; expected'
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


def shown(value: object) -> str:
    """Return the repr of a value for a message, shortened to LONGEST characters."""
    try:
        text = repr(value)
    except Exception:  # repr fails for huge integers, deep lists, and faulty classes
        return f"a value of type {type(value).__name__} that cannot be shown"
    return shortened(text)


LONGEST = 120
"""Largest number of characters of a value, such as a name or a shape, in a message (hand-set)."""


def shortened(text: str) -> str:
    """Return a text, with "..." in place of the characters after the first LONGEST."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def unknown_word(
    what: str, given: object, known: Iterable[str], others: Iterable[str] = ()
) -> ConvError:
    """Return the error for an unknown option value; it suggests the most similar known value.

    Args:
        what: name of the option.
        given: the unknown value.
        known: valid values.
        others: values with a meaning of their own, for which no similar value is suggested.
    """
    words, text = list(known), shown(given)
    word = given if isinstance(given, str) and len(given) <= LONGEST else text
    lower = [word.lower() for word in words]
    from difflib import get_close_matches  # imported only for errors

    matches = get_close_matches(word.lower(), lower, n=1, cutoff=0.55)
    if word.lower() in set(others).difference(lower):
        matches = []
    suggestion = next((word for word in words if matches and word.lower() == matches[0]), None)
    remedy = f"Did you mean {suggestion!r}? " if suggestion else ""
    return ConvError(f"unknown {what}", text, f"{remedy}Known: {', '.join(map(repr, words))}")


def require_word(what: str, given: object, known: Iterable[str | None]) -> None:
    """Check that an option value is one of ``known``, which may include None.

    Args:
        what: name of the option, for messages.
        given: the value.
        known: valid values.

    Raises:
        ConvError: the value is not one of them.
    """
    words = tuple(known)
    # Other types are not compared, because arrays compare element by element.
    if not isinstance(given, str | None) or given not in words:
        raise unknown_word(what, given, filter(None, words))


def words_of(argument: str, what: str, given: object, known: Sequence[str]) -> tuple[str, ...]:
    """Return the values of an argument that is a string or several strings, without duplicates.

    Args:
        argument: name of the argument.
        what: name of a single value, for messages.
        given: a string, or several strings.
        known: valid values.

    Raises:
        ConvError: a value is unknown.
        ConvTypeError: the argument is neither a string nor iterable.
    """
    try:
        words = (given,) if isinstance(given, str) else tuple(given)  # type: ignore[arg-type]
    except TypeError:
        raise ConvTypeError(
            f"{argument} must be a string or several strings: got {shown(given)}. "
            f"Known: {', '.join(map(repr, known))}"
        ) from None
    for word in words:
        require_word(what, word, known)
    return tuple(dict.fromkeys(words))


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of cupyconv, such as "cuda13".

    The command names the packages instead of the extra, because cupyconv itself may come from a
    checkout instead of a package index.
    """
    import re
    import shlex
    from importlib import metadata

    try:
        required = metadata.requires("cupyconv") or []
    except metadata.PackageNotFoundError:  # cupyconv is on sys.path, but not installed
        required = []
    requirements = [
        entry.partition(";")[0].strip()
        for entry in required
        if re.search(rf"extra\s*==\s*[\"']{re.escape(extra)}[\"']", entry)
    ]
    return f"pip install {shlex.join(requirements or [f'cupyconv[{extra}]'])}"


def reinstall_command() -> str:
    """Return the command that reinstalls cupyconv from the folder or URL that pip recorded.

    Without such a record, the command reinstalls it from the package index.
    """
    import json
    import shlex
    from importlib import metadata

    source = "cupyconv"
    try:
        # In a checkout, this loop also visits the checkout itself, which has no direct_url.json.
        for distribution in metadata.distributions(name="cupyconv"):
            if origin := distribution.read_text("direct_url.json"):
                source = json.loads(origin)["url"].removeprefix("file://")
    except (ValueError, KeyError):
        pass
    return f"pip install --force-reinstall {shlex.quote(source)}"


def one_of(repairs: Sequence[str], comma: str = ",") -> str:
    """Return alternative fixes as one sentence, such as ``Pad by 1, or use an input of 5``."""
    *others, last = repairs
    text = f"{comma} ".join([*others, f"or {last}"]) if others else last
    return text[0].upper() + text[1:]


# -- names of arguments ----------------------------------------------------------------------------

_SPELLINGS = (
    ("stride", "strides", "subsample", "step", "steps", "window_strides"),
    ("padding", "pad", "pads", "auto_pad", "paddings", "pad_width", "border_mode"),
    ("dilation", "dilations", "dilation_rate", "rate", "dilate", "rhs_dilation"),
    ("groups", "group", "feature_group_count", "num_groups", "num_group", "n_groups"),
    ("data_format", "d_layout", "data_layout", "layout", "format", "input_format"),
    ("filter_format", "w_layout", "kernel_format", "kernel_layout", "weight_format"),
    ("x", "input", "inputs", "data", "image", "lhs"),
    ("w", "W", "filter", "filters", "weight", "weights", "kernel", "kernels", "rhs"),
    ("bias", "b", "biases"),
    ("dy", "gy", "grad_output", "out_backprop", "grad"),
    ("input_shape", "x_shape", "input_size", "input_sizes", "image_shape"),
    ("filter_shape", "w_shape", "weight_size", "filter_sizes", "kernel_shape", "kernel_size"),
    ("output_shape", "output_size", "output_sizes"),
    ("impl", "implementation", "algorithm", "algo", "backend"),
    ("device", "card", "arch", "architecture"),
)
"""Names that libraries have for one argument, cupyconv's own first."""


def similar_argument(name: str, known: Iterable[str]) -> str | None:
    """Return the known argument that a name most likely means; None if there is none.

    >>> from cupyconv.errors import similar_argument
    >>> similar_argument("strides", ["x", "stride"]), similar_argument("pads", ["x", "padding"])
    ('stride', 'padding')
    """
    names = list(known)
    for spellings in _SPELLINGS:
        if name in spellings:
            return next((word for word in spellings if word in names), None)
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, names, n=1, cutoff=0.7)), None)


def unknown_arguments(function: Callable[..., Any], given: Iterable[str]) -> ConvTypeError:
    """Return the error for keyword arguments that a function does not have.

    Args:
        function: the function.
        given: names of the passed keyword arguments, known and unknown.
    """
    from inspect import Parameter, signature

    kinds = signature(function).parameters
    known = [key for key, entry in kinds.items() if entry.kind is not Parameter.VAR_KEYWORD]
    known = [key for key in known if key != "self"]
    unknown = [name for name in given if name not in known]
    remedies = [answer for name in unknown if (answer := _name_instead(name, known))]
    owner = function.__qualname__.removesuffix(".__init__")
    return ConvTypeError(
        f"{owner} must be called with its own arguments: got {', '.join(unknown)}. "
        + (". ".join(remedies) or f"Known: {', '.join(known)}")
    )


def _name_instead(name: str, known: Sequence[str]) -> str | None:
    """Return the remedy for an unknown argument; None if it means no known argument."""
    if other := similar_argument(name, known):
        return f"Use {other} instead of {name}"
    shapes = {"filter_shape": "w", "input_shape": "x"}
    tensor = similar_argument(shapes.get(similar_argument(name, shapes) or "", ""), known)
    return tensor and f"Leave out {name}, which follows from {tensor}"


_F = TypeVar("_F", bound=Callable[..., Any])


def naming_arguments(function: _F) -> _F:
    """Let a function answer an unknown keyword argument with the name of the argument it means.

    A call of the decorated function has one more Python frame.  Functions whose calls must be fast
    have a parameter ``**others: Never`` instead, and raise ``unknown_arguments``.
    """
    code = function.__code__
    names = frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])

    @wraps(function)
    def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            if kwargs.keys() <= names:
                raise
        raise unknown_arguments(function, kwargs)

    return cast(_F, answering)


# -- names and fixes in messages -------------------------------------------------------------------

OWNERS = {"input_shape": "x", "filter_shape": "w", "output_shape": "y"}
"""Tensors, keyed by their shape arguments."""


def any_padding(value: str | tuple[int, ...]) -> tuple[str, Any]:
    """Return the name and value of the padding argument of cupyconv's own functions.

    Args:
        value: "same", "valid", or the padding on both sides of each spatial axis.
    """
    return "padding", value if isinstance(value, str) or len(set(value)) > 1 else value[0]


class Names(NamedTuple):
    """Names that messages use for the tensors x, w and y of a problem and for its arguments.

    Attributes:
        x, w, y: names of the tensors.
        x_shape, w_shape, y_shape: names of the shape arguments.
        stride, padding, dilation, groups, data_format, filter_format: names of the layer's
            arguments.
        absent: layer arguments that the function does not have.
        entries: form of stride and dilation: "any" for an integer or an integer per spatial axis,
            "spatial" for a list with an entry per spatial axis, "all" for a list with an entry per
            axis of the data format.
        spell: function that takes an argument's name and value, and returns the value as messages
            show it; None if the caller's function has no such value.
        pad: function that takes "same", "valid" or the padding on both sides of each spatial axis,
            and returns the name and value of the padding argument; None if the caller's function
            does not support this padding.
    """

    x: str = "the input"
    w: str = "the filter"
    y: str = "dy"
    x_shape: str = "input_shape"
    w_shape: str = "filter_shape"
    y_shape: str = "output_shape"
    stride: str = "stride"
    padding: str = "padding"
    dilation: str = "dilation"
    groups: str = "groups"
    data_format: str = "data_format"
    filter_format: str = "filter_format"
    absent: frozenset[str] = frozenset()
    entries: Literal["any", "spatial", "all"] = "any"
    spell: Callable[[str, Any], Any] | None = None
    pad: Callable[[str | tuple[int, ...]], tuple[str, Any] | None] = any_padding

    @staticmethod
    def of(name: str) -> str:
        """Return a name's form before "channels": "the input" is unchanged, "x" becomes "x's"."""
        return name if name.startswith("the ") else f"{name}'s"

    @staticmethod
    def bare(name: str) -> str:
        """Return a name without its article."""
        return name.removeprefix("the ")

    @staticmethod
    def any(name: str) -> str:
        """Return "an input" for "the input"; return a name without an article unchanged."""
        return Names.one(name) if name.startswith("the ") else name

    @staticmethod
    def one(name: str) -> str:
        """Return a name with an indefinite article, such as "an input" or "a dy"."""
        bare = Names.bare(name)
        return f"{'an' if bare[0] in 'aeio' else 'a'} {bare}"

    def argument(self, key: str) -> str:
        """Return the name that an argument of ConvProblem has in the caller's function."""
        return getattr(self, f"{OWNERS[key]}_shape" if key in OWNERS else key)


class Fix(NamedTuple):
    """A suggested fix.

    Attributes:
        changes: new values of the changed arguments, keyed by their names in ConvProblem.
        phrases: phrases of the error message that describe the change.
    """

    changes: Mapping[str, Any]
    phrases: tuple[Phrase, ...]
