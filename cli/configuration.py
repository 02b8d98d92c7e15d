"""Layers of a command, read from options, a file, an ONNX model or the presets.

Options and TOML keys have the same names; an option overrides the value of a file or preset.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import chain, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupyconv import ConvError, ConvProblem
from cupyconv.cli import output, paths
from cupyconv.errors import Names, require_word, shown, similar_argument, unknown_word
from cupyconv.explaining import transposed
from cupyconv.explaining.shapes import one
from cupyconv.explaining.terms import CONVOLUTION_NAMES
from cupyconv.explaining.values import KINDS, require_kind
from cupyconv.formats import SPATIAL_AXES, data_formats, filter_formats
from cupyconv.kernels.device import CARDS, DEVICES
from cupyconv.markup import in_line
from cupyconv.planning import PRECISIONS
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import (
    ITEMSIZE,
    LARGEST,
    PADDING_WORDS,
    PASSES,
    ConvOptions,
    counted,
    named_problem,
    offering,
    require_output,
    shape_text,
    transposed_problem,
)

if TYPE_CHECKING:
    from cupyconv.explaining.onnx_model import ModelLayer

PRESETS = Path(__file__).with_name("presets.toml")


@dataclass(frozen=True)
class Layer:
    """A requested configuration, which is not checked yet.

    Attributes:
        name: name of the layer, or None.
        title: short description of the layer, or None.
        arguments: given arguments of ConvProblem, by name.  For a transposed layer, also
            "transposed", and "output_padding" or "output_shape" if given; "input_shape" is the
            shape of the layer's x.
        values: kind of random data, such as "normal".
    """

    name: str | None
    title: str | None
    arguments: Mapping[str, Any]
    values: str = "normal"

    @property
    def is_transposed(self) -> bool:
        """Whether the layer is transposed: its output is the input gradient of its problem."""
        return bool(self.arguments.get("transposed"))

    @property
    def heading(self) -> str:
        """``name: title``; empty if the layer has neither."""
        return in_line(": ".join(text for text in (self.name, self.title) if text))

    def problem(self, **more: Any) -> ConvProblem:
        """Return the layer's convolution; for a transposed layer, the convolution that it reverses.

        Args:
            more: arguments of ConvProblem that replace those of the layer.

        Raises:
            ConvError: a shape is missing, or the arguments are invalid.
        """
        arguments = {**self.arguments, **more}
        missing = [word for word in ("input", "filter") if f"{word}_shape" not in arguments]
        if missing:
            raise ConvError(
                "a configuration must have the shapes of the input and the filter",
                f"{' and '.join(missing)} missing",
                "Give, for example, --input 1x3x32x32 --filter 8x3x5x5, a --config file, or "
                "--preset multi-channel",
            )
        extra = {key: arguments.pop(key) for key in _TRANSPOSED_KEYS if key in arguments}
        if extra.pop("transposed", False):
            return _reversed_problem(arguments, **extra)
        if extra:
            word = next(iter(extra))
            raise ConvError(
                f"{word} must be used only for a transposed layer",
                "the layer is an ordinary convolution",
                f"Leave out {word}, or give --transposed",
            )
        return ConvProblem(**arguments)

    def shapes(self, problem: ConvProblem) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the layer's x, w, y and dy; ``problem`` is the layer's problem."""
        x, y = problem.input_shape, problem.output_shape
        if self.is_transposed:
            x, y = y, x
        return {"x": x, "w": problem.filter_shape, "y": y, "dy": y}

    @property
    def problem_names(self) -> Mapping[str, str]:
        """Names of the layer's tensors in the problem, keyed by their names in the layer."""
        names = CONVOLUTION_NAMES
        return names if self.is_transposed else {name: name for name in names}

    def require_output(self, dy: tuple[int, ...]) -> None:
        """Check that the layer's output has the shape of dy.

        Raises:
            ConvError: the output has another shape; the message suggests arguments that fit.
        """
        if not self.is_transposed:
            offering(self._require_output, Names(), {**self.arguments, "output_shape": dy})
            return
        y = self.shapes(self.problem())["y"]
        if dy == y:
            return
        without = {k: v for k, v in self.arguments.items() if k != "output_padding"}
        try:
            replace(self, arguments={**without, "output_shape": dy}).problem()
            remedy = f"Use --output-shape {shape_text(dy)}"
        except ConvError:
            remedy = ""
        raise ConvError(
            "dy must have the shape of the transposed layer's result",
            f"dy is {shape_text(dy)}, the result is {shape_text(y)}",
            remedy,
        )

    def _require_output(self, output_shape: tuple[int, ...], **arguments: Any) -> None:
        problem = replace(self, arguments=arguments).problem()
        require_output(Names(), problem, output_shape)

    def with_result(self, y: tuple[int, ...]) -> Layer:
        """Return this transposed layer with the only input whose result can have shape ``y``.

        Raises:
            ConvError: no input gives this result.
        """
        rules = {k: v for k, v in self.arguments.items() if k not in _TRANSPOSED_KEYS}
        given = {**ConvOptions()._asdict(), "dtype": "float32", **rules, "input_shape": y}
        require_filter(given)
        problem = offering(partial(named_problem, _TRANSPOSED_NAMES), _TRANSPOSED_NAMES, given)
        shapes = {"input_shape": problem.output_shape, "output_shape": y}
        if self.arguments.keys() & {"output_padding", "output_shape"}:
            given = {**self.arguments, "input_shape": problem.output_shape}
            replace(self, arguments=given).require_output(y)
        return replace(self, arguments={**rules, "transposed": True, **shapes})

    def output_padding(self, problem: ConvProblem) -> tuple[int, ...]:
        """Return the output_padding of a transposed layer; ``problem`` is the layer's problem."""
        return tuple(map(transposed.output_padding, problem.axes))


_TRANSPOSED_KEYS = ("transposed", "output_padding", "output_shape")
"""Arguments of a transposed layer that a convolution does not have."""

_TRANSPOSED_NAMES = Names(
    x="the result", y="the input", x_shape="output-shape", y_shape="input_shape"
)


def _reversed_problem(
    arguments: Mapping[str, Any], output_padding: Any = None, output_shape: Any = None
) -> ConvProblem:
    """Return the convolution whose input gradient a transposed layer computes.

    Raises:
        ConvError: no convolution corresponds to the layer.
    """
    if output_padding is not None and output_shape is not None:
        raise ConvError(
            "the size of a transposed layer's result must be given only once",
            "got --output-padding and --output-shape",
            "Leave out one of them",
        )
    if str(arguments.get("dtype", "")).startswith("complex"):
        raise ConvError(
            "transposed layers on the command line must have a real dtype",
            f"got --dtype {arguments['dtype']}",
            "Use a real dtype; cupyconv.conv_transpose also takes complex arrays",
        )
    rules = (arguments.get(key, 1) for key in ("stride", "dilation"))
    _require_below_stride(output_padding, *rules)
    given = {
        **ConvOptions()._asdict(),
        "dtype": "float32",
        **arguments,
        "input_shape": output_shape,
        "output_shape": arguments["input_shape"],
        "output_padding": output_padding,
    }
    make = partial(transposed_problem, _TRANSPOSED_NAMES)
    return offering(make, _TRANSPOSED_NAMES, given)


def _require_below_stride(output_padding: Any, stride: Any, dilation: Any) -> None:
    """Reject an output padding that is at least the stride but less than the dilation.

    ``cupyconv.conv_transpose`` accepts such a value and appends zeros to x.  ConvProblem rejects
    larger values.
    """
    values = [v if isinstance(v, tuple) else (v or 0,) for v in (output_padding, stride, dilation)]
    count = max(map(len, values))
    for extra, step, gap in zip(*(v * (count // len(v)) for v in values), strict=False):
        if 1 <= step <= extra < gap:
            raise ConvError(
                "on the command line, output_padding must be less than the stride",
                f"got {extra} with stride {step}",
                f"Use --output-padding {step - 1}; cupyconv.conv_transpose also takes values below "
                "the dilation",
            )


# -- values ----------------------------------------------------------------------------------------


def _wrong(what: str, value: Any, rule: str, example: str) -> ConvError:
    return ConvError(
        f"{what} must be {rule}", f"got {shown(value)}", f"Write, for example, {example}"
    )


def _integers(
    what: str, value: Any, rule: str, example: str, separators: str = "[x,]"
) -> list[int]:
    """Parse integers such as ``2x1``, ``2,1``, ``2`` or, in TOML, ``[2, 1]``."""
    if isinstance(value, str):
        parts = re.split(separators, _bare(value).lower())
        if not all(re.fullmatch(r"\s*[-+]?[0-9]+\s*", part) for part in parts):
            raise _wrong(what, value, rule, example)
        try:
            numbers = [int(part) for part in parts]
        except ValueError:  # Python converts at most 4,300 digits
            numbers = [LARGEST + 1]
    else:
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(type(number) is int for number in numbers):
            raise _wrong(what, value, rule, example)
    if any(abs(number) > LARGEST for number in numbers):
        raise ConvError(
            f"{what} must be integers that fit a 64-bit index",
            f"got {shown(value)}",
            f"Use at most {LARGEST}",
        )
    return numbers


class UnknownBatch(tuple[int, ...]):
    """A shape that was written with a name or ? as its batch size, which is read as 1."""


def read_shape(what: str, value: Any, *, has_batch: bool = True) -> tuple[int, ...]:
    """Parse a shape such as ``1x5x5x3``, ``1,5,5,3`` or, in TOML, a list.

    Args:
        what: name of the value in messages.
        value: the text or list.
        has_batch: whether the first size is a batch size, for which a name may be given.
    """
    rule, example = "a shape, written as sizes separated by x or commas", "1x5x5x3 or 1,5,5,3"
    if not isinstance(value, str):
        is_unknown = has_batch and isinstance(value, list) and value[:1] == [None]
        sizes = _integers(what, [1, *value[1:]] if is_unknown else value, rule, example)
        return UnknownBatch(sizes) if is_unknown else tuple(sizes)
    text = _bare(value)
    names = [word for word in _sizes(text) if word.isalpha() or word == "?"]
    if has_batch and len(names) == 1 and text.startswith(names[0]):
        return UnknownBatch(_integers(what, text.replace(names[0], "1", 1), rule, example))
    if names:
        raise ConvError(
            f"every size of {what} must be a number",
            f"got {shown(value)}",
            f"Write a number instead of {' and '.join(dict.fromkeys(names))}",
        )
    return tuple(_integers(what, text, rule, example))


def is_shape(text: str) -> bool:
    """Return whether a text has the form of a shape; a name may stand for an unknown size."""
    return bool(_sizes(text))


def _sizes(text: str) -> list[str]:
    """Return the sizes in a shape, as text; none if the text does not have the form of a shape."""
    sizes = re.split("[xX,]", _bare(text))
    known = [size for size in sizes if size.isdecimal()]
    is_shape = len(sizes) > 1 and known and all(size.isalnum() or size == "?" for size in sizes)
    return sizes if is_shape else []


def _bare(text: str) -> str:
    """Return sizes without brackets and the spaces between, as in ``torch.Size([1, 5])``."""
    bare = re.sub(r"\s*([xX,()\[\]])\s*", r"\1", text.strip())
    inside = re.fullmatch(r"(?:torch\.Size|TensorShape)?[(\[]+([^()\[\]]+?),?[)\]]+", bare)
    return inside[1] if inside else bare


def _size(what: str, value: Any) -> int | tuple[int, ...]:
    sizes = _integers(what, value, "one integer, or one for each spatial axis", "2 or 2x1")
    return _single(sizes)


def _integer(what: str, value: Any) -> int:
    rule, example = "one integer", "2"
    numbers = _integers(what, value, rule, example)
    if len(numbers) > 1:
        raise _wrong(what, value, rule, example)
    return numbers[0]


def _padding(what: str, value: Any) -> Any:
    rule = "a padding mode, one integer, or one entry per spatial axis (an integer or before:after)"
    example = "same, valid, same_lower, 1, 1,2 or 1:2,0:1"
    if isinstance(value, str) and re.fullmatch(r"\s*[A-Za-z][A-Za-z_-]*\s*", value):
        return value.strip().replace("-", "_")
    if isinstance(value, str) and ":" in value:
        sides = value.split(",")
        entries = [_integers(what, side, rule, example, ":") for side in sides]
    elif isinstance(value, list) and any(isinstance(side, list) for side in value):
        example = "[[1, 2], [0, 1]]"
        entries = [_integers(what, side, rule, example) for side in value]
    else:
        amounts = _integers(what, value, rule, example)
        return amounts if isinstance(value, list) else _single(amounts)
    if max(map(len, entries)) > 2:
        raise _wrong(what, value, rule, example)
    return [_single(numbers) for numbers in entries]


def _single(numbers: list[int]) -> int | tuple[int, ...]:
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConvError(f"{what} must be a string", f"got {shown(value)}", "Write it in quotes")
    return value.strip()


def _dtype(what: str, value: Any) -> str:
    require_word(what, value, ITEMSIZE)
    return value


def _flag(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConvError(
            f"{what} must be true or false", f"got {shown(value)}", "Write true, without quotes"
        )
    return value


_READERS: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = {
    "input": ("input_shape", read_shape),
    "filter": ("filter_shape", partial(read_shape, has_batch=False)),
    "stride": ("stride", _size),
    "padding": ("padding", _padding),
    "dilation": ("dilation", _size),
    "groups": ("groups", _integer),
    "data_format": ("data_format", _text),
    "filter_format": ("filter_format", _text),
    "dtype": ("dtype", _dtype),
    "transposed": ("transposed", _flag),
    "output_padding": ("output_padding", _size),
    "output_shape": ("output_shape", read_shape),
}
"""Key in ``Layer.arguments`` and parser of the value, keyed by the option and TOML key."""

_LABELS = ("name", "title", "values")
"""TOML keys of a layer besides the keys of ``_READERS``."""


def completing(words: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """Return a shell completion of an option's values; the command itself checks the values."""
    return lambda _context, _option, start: [word for word in words() if word.startswith(start)]


def text_option(
    name: str,
    metavar: str,
    help: str,
    words: Callable[[], Iterable[str]] | None = None,
    **settings: Any,
) -> Callable:
    """Return an option whose value is a text.

    Args:
        words: function that returns the values that the shell completes.
        settings: other arguments of ``click.option``.
    """
    complete = None if words is None else completing(words)
    return click.option(name, metavar=metavar, help=help, shell_complete=complete, **settings)


def list_option(
    name: str,
    parameter: str,
    help: str,
    known: Callable[[], Iterable[str]] | None = None,
    **settings: Any,
) -> Callable:
    """Return an option of comma-separated values, which are passed as ``parameter``.

    Args:
        known: function that returns the valid values; None if the command checks the values.
        settings: other arguments of ``click.option``.
    """

    def read(_context: click.Context, _option: click.Parameter, value: str | None) -> Any:
        words = _separated(name, value)
        for word in words if known else ():
            require_word(name.lstrip("-"), word, known())
        return words

    settings = {"metavar": "A,B", "callback": read, "help": help, **settings}
    return click.option(name, parameter, **settings)


def _separated(name: str, value: str | None) -> tuple[str, ...]:
    """Return the comma-separated values of an option; empty if the option is absent.

    Raises:
        ConvError: the option is present but has no values.
    """
    # Remove duplicates, and keep the order.
    words = tuple(dict.fromkeys(filter(None, map(str.strip, (value or "").split(",")))))
    if value is not None and not words:
        raise ConvError(
            f"{name} must have one or more values, separated by commas",
            f"got {shown(value)}",
            "Give a value, or leave the option out",
        )
    return words


# -- options ---------------------------------------------------------------------------------------


def _list_presets(ctx: click.Context, _param: click.Parameter, asked: bool) -> None:
    if not asked or ctx.resilient_parsing:
        return
    presets = [(layer, layer.problem()) for layer in read_file(PRESETS)]
    if ctx.params.get("as_json"):
        output.write_json({"presets": [as_json(*entry) for entry in presets]})
        ctx.exit()
    rows = [
        (str(layer.name), operands_text(problem), layer.title or "") for layer, problem in presets
    ]
    output.draw(output.table(("preset", "x * w", "what it shows"), rows))
    ctx.exit()


_PER_AXIS = "one number for all spatial axes, or one per axis, such as 2x1.  [default: 1]"

_layer_option = text_option(
    "--layer", "NAME", "Use only the layer of this name from --config or --model."
)

_VALUES: tuple[tuple[Any, ...], ...] = (
    ("--input", "SHAPE", "Set the shape of x, such as 1x5x5x3; the same as the argument INPUT."),
    ("--filter", "SHAPE", "Set the shape of w, such as 3x3x3x4; the same as the argument FILTER."),
    ("--stride", "N|NxN", f"Set the stride: {_PER_AXIS}"),
    (
        *("--padding", "PADDING"),
        "Set the padding: same, valid, same_lower, 1, 1,2 (per axis) or 1:2,0:1 (before:after).  "
        "[default: 0]",
        lambda: PADDING_WORDS,
    ),
    ("--dilation", "N|NxN", f"Set the dilation: {_PER_AXIS}"),
    (
        *("--groups", "N"),
        "Set the number of groups; a depthwise layer has one per input channel.  [default: 1]",
    ),
    (
        *("--data-format", "WORD"),
        "Set the axis order of x and y, such as NHWC.  [default: NCHW]",
        lambda: chain.from_iterable(map(data_formats, SPATIAL_AXES)),
    ),
    (
        *("--filter-format", "WORD"),
        "Set the axis order of w, such as HWIO.  [default: OIHW, or HWIO with NHWC]",
    ),
)
"""Name, metavar, help and completed values of the options of an ordinary layer."""

_OPTIONS = (
    *starmap(text_option, _VALUES),
    click.option(
        "--transposed",
        is_flag=True,
        default=None,
        help="Use a transposed convolution (deconvolution), whose input has the shape INPUT.",
    ),
    text_option(
        *("--output-padding", "N|NxN"),
        "Set the size of a transposed layer's result minus the smallest possible size, per axis; "
        "less than the stride.  [default: 0, or stride - 1 with SAME padding]",
    ),
    text_option(
        *("--output-shape", "SHAPE"),
        "Set the shape of a transposed layer's result, instead of --output-padding.",
    ),
    paths.file_option(
        "--config", "Read layers from a TOML, JSON or CSV file, whose keys are these options."
    ),
    paths.file_option(
        "--model",
        "Read the convolutions of an ONNX model; --input NAME=SHAPE sets its unknown sizes.",
        metavar="FILE.onnx",
    ),
    _layer_option,
    text_option(
        *("--preset", "NAME", "Use the built-in layer with this name."),
        lambda: (str(layer.name) for layer in read_file(PRESETS)),
    ),
    click.option(
        "--list-presets",
        is_flag=True,
        expose_value=False,
        callback=_list_presets,
        help="List the built-in layers, and exit.",
    ),
)

dtype_option = text_option(
    *("--dtype", "DTYPE"),
    f"Set the dtype: {', '.join(list(ITEMSIZE)[:-1])} or {list(ITEMSIZE)[-1]}.  [default: float32]",
    lambda: ITEMSIZE,
)


def devices_option(
    help: str, known: Iterable[str] = (*DEVICES, *CARDS), default: tuple[str, ...] = ()
) -> Callable[[Callable], Callable]:
    """Add the repeatable option ``--device``, whose values are passed as ``devices``."""
    if default:
        help += f"  [default: {' and '.join(default)}]"
    return click.option(
        "--device",
        "devices",
        metavar="DEVICE",
        shell_complete=completing(lambda: known),
        multiple=True,
        default=default,
        help=help,
    )


def place_option(help: str) -> Callable[[Callable], Callable]:
    """Add the option ``--device`` of commands that compute, whose default is auto."""
    kind = click.Choice(["auto", "cpu", "gpu"])
    return click.option("--device", type=kind, default="auto", show_default=True, help=help)


def precision_option(metavar: str = "WORD") -> Callable[[Callable], Callable]:
    """Add the option ``--precision``."""
    help = "Permit rounding float32 operands (tf32), or splitting them into bfloat16 (bf16x6)."
    words = {"words": lambda: PRECISIONS, "default": "ieee", "show_default": True}
    return text_option("--precision", metavar, help, **words)


impl_option = text_option(
    *("--impl", "NAME", "Use this implementation; auto lets the planner choose."),
    lambda: ("auto", *FAMILIES),
    default="auto",
    show_default=True,
)

passes_option = list_option(
    *("--pass", "passes", f"Use only these passes: {', '.join(PASSES)}.  [default: all]"),
    lambda: PASSES,
)


def seed_option(help: str, default: int | None = 0) -> Callable[[Callable], Callable]:
    """Add the option ``--seed``; without a default value, ``help`` states the default."""
    how = {"default": default, "show_default": default is not None}
    return click.option("--seed", type=click.IntRange(0, LARGEST), help=help, **how)


values_option = text_option(
    *("--values", "WORD"),
    "Draw random data of this kind: normal, or integers (from -3 to 3).  [default: normal]",
    lambda: KINDS,
)


def data_options(command: Callable) -> Callable:
    """Add --x, --w, --dy, --seed and --values, which say where a layer's tensors come from."""
    file = "Read {} from .npy or .npz (FILE.npz:NAME){}.  [default: random]"
    options = (
        paths.file_option("--x", file.format("x", "")),
        paths.file_option("--w", file.format("w", "")),
        paths.file_option(
            "--dy", file.format("dy", ", or check that it has this shape"), metavar="FILE|SHAPE"
        ),
        seed_option("Draw random data from this seed."),
        values_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


short_form = click.argument("shapes", nargs=-1, metavar="[INPUT FILTER]")
"""Positional argument for the shapes of input and filter, parsed by ``read_short_form``."""


def read_short_form(shapes: Sequence[str]) -> dict[str, str]:
    """Return two positional shapes as values of --input and --filter; empty without shapes.

    Raises:
        ConvError: the number of arguments is not two, or an argument is not a shape.
    """
    if shapes and (len(shapes) != 2 or not all(map(is_shape, shapes))):
        raise ConvError(
            "the short form must have two shapes, for the input and the filter",
            f"got {' '.join(shapes)}",
            f"Write, for example, cupyconv {click.get_current_context().info_name} "
            "1x5x100x100 10x5x5x5",
        )
    return dict(zip(("input", "filter"), shapes, strict=False))


def shape_or_file(option: str, value: str | None) -> tuple[tuple[int, ...] | None, str | None]:
    """Return (shape, None) for an option that gives a shape, (None, file) for a file name."""
    if value is None or Path(value).exists() or not is_shape(value):
        return None, value
    return read_shape(option, value), None


def layer_options(*, named: bool = True) -> Callable[[Callable], Callable]:
    """Add the positional shapes and the options of ``read_layers``, except --dtype and --values.

    Args:
        named: whether to add --layer.
    """
    added = [option for option in _OPTIONS if named or option is not _layer_option]

    def add(command: Callable) -> Callable:
        @wraps(command)
        def configured(shapes: Sequence[str], **options: Any) -> Any:
            for key, value in read_short_form(shapes).items():
                if options[key] is not None:
                    raise ConvError(
                        "a shape must be given only once",
                        f"got {' '.join(shapes)} and --{key} {options[key]}",
                        f"Leave out --{key}, or the two shapes",
                    )
                options[key] = value
            return command(**options)

        for option in (*reversed(added), short_form):
            configured = option(configured)
        return configured

    return add


configuration_options = layer_options()

LAYER_OPTIONS = (*_READERS, "config", "model", "preset")
"""Names of the options that ``layer_options`` adds, except --layer; --dtype is one of them."""


def require_single(layers: Sequence[Layer], rule: str) -> None:
    """Check that the options select one layer; ``rule`` is the first part of the error."""
    if len(layers) > 1:
        raise ConvError(
            rule, f"the configuration has {len(layers)} layers", "Choose one with --layer NAME"
        )


def require_filter(arguments: Mapping[str, Any]) -> None:
    """Check that the arguments of a layer have the shape of w, which --dy needs."""
    if "filter_shape" not in arguments:
        raise ConvError(
            "--dy must be accompanied by the shape of the filter",
            "no filter is given",
            "Give, for example, --filter 3x3x3x4",
        )


def read_layers(options: Mapping[str, Any], notes: list[str] | None = None) -> list[Layer]:
    """Return the layers that a command's options select.

    Args:
        options: values by option name; None for absent options.
        notes: list to which a line is added for each convolution that cannot be read from a model.

    Raises:
        ConvError: a value, key, preset or file is invalid.
        OSError: the file cannot be read.
    """
    config, preset, model, name = map(options.get, ("config", "preset", "model", "layer"))
    if name is not None and config is None and model is None:
        raise ConvError(
            "--layer must be given with a file of layers",
            "there is no --config and no --model",
            "Give --config or --model",
        )
    if model is not None and (config is not None or preset is not None):
        raise ConvError(
            "--model cannot be combined with --config or --preset",
            "got more than one",
            "Give one of them",
        )
    if config is not None and preset is not None:
        raise ConvError("--config and --preset cannot be combined", "got both", "Give one of them")
    layers = [Layer(None, None, {})]
    if model is not None:
        input_shapes = {}
        if "=" in (options.get("input") or ""):
            input_name, _, shape = options["input"].rpartition("=")
            input_shapes[input_name.strip()] = read_shape("--input", shape)
            options = {**options, "input": None}
        layers = _of_model(model, input_shapes, [] if notes is None else notes)
    elif config is not None:
        layers = read_file(Path(config))
    elif preset is not None:
        known = {str(layer.name): layer for layer in read_file(PRESETS)}
        require_word("preset", preset, known)
        layers = [known[preset]]
    if name is not None:
        layers = [_named(layers, name, model or config)]
    arguments = {
        argument: read(f"--{key.replace('_', '-')}", options[key])
        for key, (argument, read) in _READERS.items()
        if options.get(key) is not None
    }
    values = options.get("values")
    if values is not None:
        require_kind("--values", values)
    return [_changed(layer, arguments, values) for layer in layers]


def left_out(notes: list[str]) -> list[Any]:
    """Return a printable list of the convolutions of a model that ``read_layers`` left out."""
    if not notes:
        return []
    head = f"{counted(len(notes), 'node')} of the model left out"
    return [output.heading(head, *map(in_line, notes))]


def _of_model(path: str, input_shapes: dict[str, tuple[int, ...]], notes: list[str]) -> list[Layer]:
    """Return the convolutions of an ONNX model as layers, and extend ``notes`` by the others."""
    from cupyconv.explaining.onnx_model import read

    with paths.opened(Path(path)) as file:
        model = read(path, input_shapes, file)
    if not model.layers:
        raise ConvError(
            "a model must have a convolution that can be read",
            f"{path} {model.without_layers}",
            "Use another model, or --preset",
        )
    notes += [f"{node.name}: {node.reason}" for node in (*model.unknown, *model.left_out)]
    return [
        Layer(layer.name, f"{layer.operator} of {Path(path).name}", _model_arguments(layer))
        for layer in model.layers
    ]


def _model_arguments(layer: ModelLayer) -> dict[str, Any]:
    problem = layer.problem
    arguments = {
        "input_shape": layer.input_shape,
        "filter_shape": problem.filter_shape,
        **problem.keywords,
        "dtype": problem.dtype,
    }
    if layer.is_transposed:
        arguments |= {"output_shape": layer.output_shape, "transposed": True}
    return arguments


def _named(layers: list[Layer], name: str, where: str) -> Layer:
    known = [layer.name for layer in layers if layer.name is not None]
    if not known:
        raise ConvError(
            "--layer must choose a layer by its name",
            f"the layers of {where} have no names",
            'Give each layer a name, such as name = "first"',
        )
    if name not in known:
        raise unknown_word(f"layer in {where}", name, known)
    if known.count(name) > 1:
        raise ConvError(
            "--layer must name one layer",
            f"{known.count(name)} layers in {where} are named {shown(name)}",
            "Rename all but one of them",
        )
    return next(layer for layer in layers if layer.name == name)


def _changed(layer: Layer, given: Mapping[str, Any], values: str | None) -> Layer:
    """Return the layer with the options applied, without its title if they change the layer."""
    other = any(layer.arguments.get(key, value) != value for key, value in given.items())
    new = any(key not in layer.arguments and key != "dtype" for key in given)
    title = None if layer.arguments and (other or new) else layer.title
    arguments = {**layer.arguments, **given}
    sizes = {"output_padding": "output_shape", "output_shape": "output_padding"}
    for key, replaced in sizes.items():
        if key in given and replaced not in given:
            arguments.pop(replaced, None)
    return replace(layer, title=title, arguments=arguments, values=values or layer.values)


def _fault(error: Exception) -> str:
    """Return the reason why a file does not have its format."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if type(error) is ValueError:  # Python's message names sys.set_int_max_str_digits
        return f"it has an integer of more than {sys.get_int_max_str_digits():,} digits"
    return str(error)


def _toml(text: str) -> dict[str, Any]:
    import tomllib

    return tomllib.loads(text)


def _json(text: str) -> dict[str, Any]:
    import json

    content = json.loads(text)
    return content if isinstance(content, dict) else {"layers": content}


def _csv(text: str) -> dict[str, Any]:
    """Return the rows below the header as layers; an empty cell leaves its key out.

    Cells are divided by commas, semicolons or tabs, whichever the header has.
    """
    import csv
    import io

    flags = {"true": True, "false": False}
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    lines = io.StringIO(text, newline="")
    rows = csv.DictReader(lines, restkey="a column without a heading", delimiter=delimiter)
    layers = [{key: cell for key, cell in row.items() if cell} for row in rows]
    for layer in layers:
        if "transposed" in layer:
            layer["transposed"] = flags.get(layer["transposed"].lower(), layer["transposed"])
    return {"layers": layers}


_FORMATS: Mapping[str, tuple[str, Callable[[str], dict[str, Any]], str]] = {
    ".json": ("JSON", _json, '[{"input": "1x5x5x3", "filter": "3x3x3x4"}]'),
    **dict.fromkeys(
        (".csv", ".tsv"), ("CSV", _csv, 'a line "input,filter", and below it "1x5x5x3,3x3x3x4"')
    ),
    "": ("TOML", _toml, 'lines such as input = "1x5x5x3"'),
}
"""Name, parser and example of the format of a file of layers, keyed by suffix; else TOML."""


def read_file(path: Path) -> list[Layer]:
    """Return the layers of a file: one at the top level of TOML or JSON, or several.

    Several layers are [[layer]] tables in TOML, a list in JSON, and rows in CSV.

    Raises:
        ConvError: the file does not have the format of its suffix, or a key or value is invalid.
        OSError: the file cannot be read.
    """
    from csv import Error

    name, parse, example = _FORMATS.get(path.suffix.lower(), _FORMATS[""])
    try:
        content = parse(paths.read(path).decode())
    except (ValueError, RecursionError, Error) as error:  # syntax, UTF-8 and huge integers
        raise ConvError(f"{path} must be {name}", _fault(error), f"Write {example}") from None
    words = [word for word in ("layer", "layers") if word in content]
    if len(words) > 1:
        raise ConvError(
            f"{path} must use one name for its tables of layers",
            "it has [[layer]] and [[layers]]",
            "Use one of them",
        )
    tables = content.pop(words[0]) if words else None
    if tables is None:
        return [_layer(path.name, content)]
    if content:
        raise ConvError(
            f"{path} must have one layer at its top level, or [[layer]] tables",
            f"it has both, and {next(iter(content))!r} is outside the tables",
            "Move it into a [[layer]] table",
        )
    listed = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if not listed or not tables:
        rule, remedy = f"{path} must have a list of layers", f"Write {example}"
        if name == "TOML":
            rule = f"the layers of {path} must be [[layer]] tables"
            remedy = "Write [[layer]], with two brackets, above each layer"
        raise ConvError(rule, f"got {shown(tables)}", remedy)
    return [_layer(f"layer {number} of {path.name}", t) for number, t in enumerate(tables, 1)]


def _layer(where: str, table: Mapping[str, Any]) -> Layer:
    if not table:
        raise ConvError(
            f"{where} must have keys",
            "it is empty",
            'Write lines such as input = "1x5x5x3" and filter = "3x3x3x4"',
        )
    meant = {"x": "input", "w": "filter", **{each: key for key, (each, _) in _READERS.items()}}
    for key in table:
        if key in _READERS or key in _LABELS:
            continue
        if isinstance(table[key], dict) and not _READERS.keys() & table.keys():
            raise ConvError(
                f"several layers in {where} must be a list of tables",
                f"got a table {shown(key)}",
                f"Write [[layer]] and name = {key!r} in TOML, or a list in JSON",
            )
        if similar := similar_argument(key, meant):
            raise ConvError(f"unknown key in {where}", shown(key), f"Use {meant[similar]!r}")
        require_word(f"key in {where}", key, (*_READERS, *_LABELS))
    labels = {key: _text(f"{key} in {where}", table[key]) for key in _LABELS if key in table}
    arguments = {
        argument: read(f"{key} in {where}", table[key])
        for key, (argument, read) in _READERS.items()
        if key in table
    }
    values = require_kind(f"values in {where}", labels.get("values", KINDS[0]))
    return Layer(labels.get("name"), labels.get("title"), arguments, values)


TRANSPOSED_PASSES = "forward computes dx of the layer, backprop_input computes y"
"""Meaning of the passes of a transposed layer's convolution."""


# -- printing a configuration ----------------------------------------------------------------------


def as_json(layer: Layer, problem: ConvProblem) -> dict[str, Any]:
    """Return the configuration for ``--json``."""
    entries = {
        "input": list(layer.shapes(problem)["x"]),
        "filter": list(problem.filter_shape),
        "stride": list(problem.stride),
        "padding": [list(pair) for pair in problem.padding],
        "padding_mode": problem.padding_mode,
        "dilation": list(problem.dilation),
        "groups": problem.groups,
        "data_format": problem.data_format,
        "filter_format": problem.filter_format,
        "dtype": problem.dtype,
        "transposed": layer.is_transposed,
    }
    if layer.is_transposed:
        entries["output_shape"] = list(problem.input_shape)
        entries["output_padding"] = list(layer.output_padding(problem))
    return {"name": layer.name, "title": layer.title, "configuration": entries}


def operands_text(problem: ConvProblem) -> str:
    """Return the shapes of x and w, such as ``1x5x5x3 * 3x3x3x4``."""
    return f"{shape_text(problem.input_shape)} * {shape_text(problem.filter_shape)}"


def as_options(problem: ConvProblem) -> str:
    """Return the command-line options of a problem, except --dtype."""
    shapes = {"input_shape": problem.input_shape, "filter_shape": problem.filter_shape}
    return " ".join(starmap(output.option, {**shapes, **problem.keywords}.items()))


def notes_on_shapes(layer: Layer, problem: ConvProblem) -> list[str]:
    """Return notes on how the shapes of a layer were read."""
    unknown = isinstance(layer.arguments.get("input_shape"), UnknownBatch)
    notes = ["note: the batch size is unknown, so it was read as 1"] if unknown else []
    return [*notes, *filter(None, [_order_note(layer, problem)])]


def _order_note(layer: Layer, problem: ConvProblem) -> str:
    """Return a note if another axis order makes the filter likelier; else an empty string.

    A filter is likelier if the ratio of its longest to its shortest spatial size is smaller.
    """
    if "filter_format" in layer.arguments:
        return ""
    ratio, likelier = _ratio(problem), None
    for word in filter_formats(problem.spatial_rank):
        with suppress(ConvError):
            other = problem.replace(filter_format=word)
            if _ratio(other) < ratio and max(other.filter_sizes) > 1:
                ratio, likelier = _ratio(other), other
    if likelier is None:
        return ""
    readings = [
        f"{shape_text(other.filter_sizes)} with O = {other.K} ({other.filter_format})"
        for other in (problem, likelier)
    ]
    word = output.option("filter_format", likelier.filter_format)
    return (
        f"note: the filter {shape_text(problem.filter_shape)} was read as {readings[0]}. If it is "
        f"{readings[1]}, use {word}"
    )


def _ratio(problem: ConvProblem) -> float:
    return max(problem.filter_sizes) / min(problem.filter_sizes)


def summary(problem: ConvProblem, other: Mapping[str, str] | None = None) -> str:
    """Return the configuration without its shapes, in one line.

    Args:
        other: texts by option name.  They replace the texts of stride, padding and dilation, or
            are added after them.
    """
    padding = problem.padding_mode
    if padding == "explicit":
        sides = [str(b) if b == a else f"{b}:{a}" for b, a in problem.padding]
        padding = sides[0] if len(set(sides)) == 1 else ",".join(sides)
    words = {"stride": one(problem.stride), "padding": padding, "dilation": one(problem.dilation)}
    words |= other or {}
    texts = [f"{word} {text}" for word, text in words.items()]
    formats = f"{problem.data_format} with {problem.filter_format}"
    return ", ".join([*texts, f"groups {problem.groups}", formats, problem.dtype])
