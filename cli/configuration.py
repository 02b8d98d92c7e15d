"""Layers of a command, read from options, a TOML file, a model or the presets.

Options and TOML keys have the same names; options override a file or preset.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from cupyconv import ConvError, ConvProblem
from cupyconv.cli import output, paths
from cupyconv.errors import shown, unknown_word
from cupyconv.explaining.shapes import counted
from cupyconv.explaining.values import KINDS, require_kind
from cupyconv.formats import SPATIAL_AXES, data_formats
from cupyconv.kernels.device import CARDS, DEVICES
from cupyconv.markup import in_line
from cupyconv.planning import PRECISIONS
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import ITEMSIZE, LARGEST, PADDING_WORDS, PASSES, shape_text

PRESETS = Path(__file__).with_name("presets.toml")

_DIGITS = 19
"""Decimal digits of LARGEST."""


@dataclass(frozen=True)
class Layer:
    """A requested configuration, before its rules are checked.

    Attributes:
        name, title: what it is called, and what it is about, where it says so.
        arguments: those arguments of ConvProblem that were given.
        values: what its data is drawn from.
        is_transposed: whether it stands for the transposed convolution, whose forward pass is the
            input gradient of this.
    """

    name: str | None
    title: str | None
    arguments: Mapping[str, Any]
    values: str = "normal"
    is_transposed: bool = False

    @property
    def heading(self) -> str:
        """Name and title, as far as there are any."""
        return in_line(": ".join(text for text in (self.name, self.title) if text))

    def problem(self, **more: Any) -> ConvProblem:
        """Return the configuration with ``more`` arguments.

        Raises:
            ConvError: a shape is missing, or no such convolution exists.
        """
        arguments = {**self.arguments, **more}
        missing = [word for word in ("input", "filter") if f"{word}_shape" not in arguments]
        if missing:
            raise ConvError(
                "a configuration needs the shapes of the input and the filter",
                f"{' and '.join(missing)} missing",
                "Give for example --input 1x3x32x32 --filter 8x3x5x5, a --config file, or "
                "--preset multi-channel",
            )
        _require_sides(arguments)
        return ConvProblem(**arguments)


# -- values ----------------------------------------------------------------------------------------


def _integers(
    what: str, value: Any, rule: str, example: str, separators: str = "[x,]"
) -> list[int]:
    """Return integers out of ``2x1``, ``2,1``, ``2`` or, in TOML, ``[2, 1]``."""
    error = ConvError(
        f"{what} must be {rule}", f"got {shown(value)}", f"Write for example {example}"
    )
    if isinstance(value, str):
        parts = re.split(separators, value.strip().lower())
        if not all(re.fullmatch(r"\s*[-+]?[0-9]+\s*", part) for part in parts):
            raise error
        too_large = any(len(part.strip().lstrip("+-0")) > _DIGITS for part in parts)
        numbers = [] if too_large else [int(part) for part in parts]
    else:
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(type(number) is int for number in numbers):
            raise error
        too_large = False
    if too_large or any(abs(number) > LARGEST for number in numbers):
        raise ConvError(
            f"{what} must be made of numbers that a 64-bit index can count",
            f"got {shown(value)}",
            f"Use at most {LARGEST}",
        )
    return numbers


def read_shape(what: str, value: Any) -> tuple[int, ...]:
    """Return a shape such as ``1x5x5x3``, ``1,5,5,3`` or, in TOML, a list."""
    rule = "a shape, sizes with x or commas between them"
    return tuple(_integers(what, value, rule, "1x5x5x3 or 1,5,5,3"))


def _size(what: str, value: Any) -> int | tuple[int, ...]:
    sizes = _integers(what, value, "one integer, or one for each spatial axis", "2 or 2x1")
    return _single(sizes)


def _integer(what: str, value: Any) -> int:
    rule, example = "one integer", "2"
    numbers = _integers(what, value, rule, example)
    if len(numbers) > 1:
        raise ConvError(
            f"{what} must be {rule}", f"got {shown(value)}", f"Write for example {example}"
        )
    return numbers[0]


def _padding(what: str, value: Any) -> Any:
    rule = "a word, an integer, or an integer or before:after for each spatial axis"
    example = "same, valid, same_lower, 1, 1,2 or 1:2,0:1"
    if isinstance(value, str) and re.fullmatch(r"\s*[A-Za-z][A-Za-z_-]*\s*", value):
        return value.strip().replace("-", "_")
    if isinstance(value, str) and ":" in value:
        sides = value.split(",")
        found = [_integers(what, side, rule, example, ":") for side in sides]
    elif isinstance(value, list) and any(isinstance(side, list) for side in value):
        example = "[[1, 2], [0, 1]]"
        found = [_integers(what, side, rule, example) for side in value]
    else:
        amounts = _integers(what, value, rule, example)
        return amounts if isinstance(value, list) else _single(amounts)
    if max(map(len, found)) > 2:
        raise ConvError(
            f"{what} must be {rule}", f"got {shown(value)}", f"Write for example {example}"
        )
    return [_single(numbers) for numbers in found]


def _require_sides(arguments: Mapping[str, Any]) -> None:
    """Check how many numbers a padding has, which ConvProblem does with an example in Python."""
    padding, rank = arguments.get("padding"), len(arguments["input_shape"]) - 2
    if not isinstance(padding, (list, tuple)) or rank not in SPATIAL_AXES:
        return
    if len(padding) != rank:
        raise ConvError(
            "padding must be one integer, or an integer or before:after for each spatial axis",
            f"got {len(padding)} entries for {rank} spatial axes",
            f"Write for example {','.join(['1:2'] * rank)}",
        )


def _single(numbers: list[int]) -> int | tuple[int, ...]:
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConvError(f"{what} must be a word", f"got {shown(value)}", "Write it between quotes")
    return value.strip()


def _dtype(what: str, value: Any) -> str:
    if not isinstance(value, str) or value not in ITEMSIZE:
        raise unknown_word(what, value, ITEMSIZE)
    return value


_READERS: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = {
    "input": ("input_shape", read_shape),
    "filter": ("filter_shape", read_shape),
    "stride": ("stride", _size),
    "padding": ("padding", _padding),
    "dilation": ("dilation", _size),
    "groups": ("groups", _integer),
    "data_format": ("data_format", _text),
    "filter_format": ("filter_format", _text),
    "dtype": ("dtype", _dtype),
}
"""Argument of ConvProblem, and parser of the value, for each key."""

_LABELS = ("name", "title", "values")
"""Keys that do not describe the convolution."""


class Words(click.ParamType):
    """An option value that a shell may complete; it is checked where it is used."""

    name = "word"

    def __init__(self, words: Callable[[], Iterable[str]]) -> None:
        self._words = words

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(word) for word in self._words() if word.startswith(incomplete)]


def words(what: str, known: Callable[[], Iterable[str]]) -> Callable:
    """Reads words with commas between them; suggests the nearest for one that is not known."""

    def read(context: click.Context, option: click.Parameter, value: str | None) -> Any:
        words = separated(context, option, value)
        for word in words:
            if word not in known():
                raise unknown_word(what, word, known())
        return tuple(dict.fromkeys(words))

    return read


def separated(
    _context: click.Context, option: click.Parameter, value: str | None
) -> tuple[str, ...]:
    """Return the words of an option, with commas between them; none where it was not given.

    Raises:
        ConvError: it was given without a word, which would mean the same.
    """
    words = tuple(word.strip() for word in (value or "").split(",") if word.strip())
    if value is not None and not words:
        raise ConvError(
            f"{option.opts[0]} must be words with commas between them",
            f"got {shown(value)}",
            "Leave it out, or give one",
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
    table = output.table("preset", "x * w", "what it shows")
    for layer, problem in presets:
        shapes = f"{shape_text(problem.input_shape)} * {shape_text(problem.filter_shape)}"
        table.add_row(str(layer.name), shapes, layer.title or "")
    output.draw(table)
    ctx.exit()


_OPTIONS = (
    click.option(
        "--input",
        metavar="SHAPE",
        help="Set the shape of x, such as 1x5x5x3; INPUT and FILTER set both shapes.",
    ),
    click.option("--filter", metavar="SHAPE", help="Set the shape of w, such as 3x3x3x4."),
    click.option(
        "--stride", metavar="N|NxN", help="Set the stride of all axes, or of each.  [default: 1]"
    ),
    click.option(
        "--padding",
        type=Words(lambda: PADDING_WORDS),
        metavar="PADDING",
        help="Pad by same, valid, same_lower, 1, 1,2 (each axis) or 1:2,0:1 (before:after).  "
        "[default: 0]",
    ),
    click.option(
        "--dilation",
        metavar="N|NxN",
        help="Set the dilation of all axes, or of each.  [default: 1]",
    ),
    click.option(
        "--groups",
        metavar="N",
        help="Set the number of groups; a depthwise layer has one per input channel.  [default: 1]",
    ),
    click.option(
        "--data-format",
        metavar="WORD",
        type=Words(lambda: (word for rank in SPATIAL_AXES for word in data_formats(rank))),
        help="Set the axis order of x and y, such as NHWC.  [default: NCHW]",
    ),
    click.option(
        "--filter-format",
        metavar="WORD",
        help="Set the axis order of w, such as HWIO.  [default: OIHW, or HWIO with NHWC]",
    ),
    click.option(
        "--config",
        type=paths.FILE,
        metavar="FILE",
        help="Read layers from a TOML file with these options as keys.",
    ),
    click.option(
        "--model",
        type=paths.FILE,
        metavar="FILE.onnx",
        help="Read the convolutions of an ONNX model; --input NAME=SHAPE sets its open sizes.",
    ),
    click.option("--layer", metavar="NAME", help="Use only the layer with this name."),
    click.option(
        "--preset",
        metavar="NAME",
        type=Words(lambda: (str(layer.name) for layer in read_file(PRESETS))),
        help="Use a built-in layer.",
    ),
    click.option(
        "--list-presets",
        is_flag=True,
        expose_value=False,
        callback=_list_presets,
        help="List the built-in layers, and exit.",
    ),
)

dtype_option = click.option(
    "--dtype",
    metavar="DTYPE",
    type=Words(lambda: ITEMSIZE),
    help=f"Set the dtype: {', '.join(list(ITEMSIZE)[:-1])} or {list(ITEMSIZE)[-1]}.  "
    "[default: float32]",
)


def devices_option(
    help: str, known: Iterable[str] = (*DEVICES, *CARDS), default: tuple[str, ...] = ()
) -> Callable[[Callable], Callable]:
    """Add the repeatable option ``--device``, whose values are passed as ``devices``."""
    shown_default = f"  [default: {' and '.join(default)}]" if default else ""
    return click.option(
        "--device",
        "devices",
        metavar="DEVICE",
        type=Words(lambda: known),
        multiple=True,
        default=default,
        help=help + shown_default,
    )


precision_option = click.option(
    "--precision",
    metavar="WORD",
    type=Words(lambda: PRECISIONS),
    default="ieee",
    show_default=True,
    help="Set the permitted precision: ieee, tf32 or bf16x6.",
)

impl_option = click.option(
    "--impl",
    metavar="NAME",
    type=Words(lambda: ("auto", *FAMILIES)),
    default="auto",
    show_default=True,
    help="Use this implementation; auto lets the planner choose.",
)

passes_option = click.option(
    "--pass",
    "passes",
    metavar="A,B",
    callback=words("pass", lambda: PASSES),
    help=f"Use only these passes: {', '.join(PASSES)}.  [default: all]",
)

SEED = click.IntRange(0, LARGEST)
"""Seeds of random data."""

values_option = click.option(
    "--values",
    metavar="WORD",
    type=Words(lambda: KINDS),
    help="Draw random data as normal numbers, or as small integers.  [default: normal]",
)


short_form = click.argument("shapes", nargs=-1, metavar="[INPUT FILTER]")
"""Argument of two shapes, which ``read_short_form`` reads."""


def read_short_form(shapes: Sequence[str]) -> dict[str, str]:
    """Read two shapes without options as the values of --input and --filter; none as no values.

    Raises:
        ConvError: there are not two arguments, or one is not a shape.
    """
    if shapes and (len(shapes) != 2 or not all(map(_SHAPE.fullmatch, shapes))):
        raise ConvError(
            "the short form is two shapes, of the input and of the filter",
            f"got {' '.join(shapes)}",
            f"Write for example cupyconv {click.get_current_context().info_name} "
            "1x5x100x100 10x5x5x5",
        )
    return dict(zip(("input", "filter"), shapes, strict=False))


_SHAPE = re.compile(r"[0-9]+([xX,][0-9]+)+")


def configuration_options(command: Callable) -> Callable:
    """Add the short form and the options that ``read_layers`` reads, all but --dtype."""

    @wraps(command)
    def configured(shapes: Sequence[str], **options: Any) -> Any:
        for key, value in read_short_form(shapes).items():
            if options[key] is not None:
                raise ConvError(
                    "the input and the filter are given once",
                    f"got {' '.join(shapes)} and --{key} {options[key]}",
                    f"Leave out --{key}, or the two shapes",
                )
            options[key] = value
        return command(**options)

    for option in (*reversed(_OPTIONS), short_form):
        configured = option(configured)
    return configured


def read_layers(options: Mapping[str, Any], notes: list[str] | None = None) -> list[Layer]:
    """Return the layers that a command's options select.

    Args:
        options: values by option name; None for missing options.
        notes: list to append a model's unreadable convolutions to, with the reason.

    Raises:
        ConvError: a value, key, preset or file is invalid.
        OSError: the file cannot be read.
    """
    config, preset = options.get("config"), options.get("preset")
    model, name = options.get("model"), options.get("layer")
    if name is not None and config is None and model is None:
        raise ConvError(
            "--layer chooses among the layers of a file",
            "there is no --config and no --model",
            "Give one",
        )
    if model is not None:
        if config is not None or preset is not None:
            raise ConvError(
                "--model chooses the layers", "got --config or --preset, too", "Give one"
            )
        options = dict(options)
        sizes = options.get("input") or ""
        if "=" in sizes:
            options["input"] = None
        layers = _of_model(model, sizes if "=" in sizes else None, [] if notes is None else notes)
        if name is not None:
            layers = [_named(layers, name, model)]
        return _with_options(layers, options)
    if config is not None and preset is not None:
        raise ConvError("--config and --preset both choose layers", "got both", "Give one of them")
    layers = [Layer(None, None, {})]
    if config is not None:
        layers = read_file(Path(config))
        if options.get("layer") is not None:
            layers = [_named(layers, options["layer"], config)]
    elif preset is not None:
        known = {str(layer.name): layer for layer in read_file(PRESETS)}
        if preset not in known:
            raise unknown_word("preset", preset, known)
        layers = [known[preset]]
    return _with_options(layers, options)


def left_out(notes: list[str]) -> list[Any]:
    """Return the list of a model's convolutions that ``read_layers`` could not read."""
    if not notes:
        return []
    head = f"{counted(len(notes), 'node')} of the model left out"
    return [output.heading(head, *map(in_line, notes))]


def _of_model(path: str, sizes: str | None, notes: list[str]) -> list[Layer]:
    """Return the convolutions of an ONNX model as layers; transposed ones as their inverse."""
    from cupyconv.explaining.onnx_model import read

    given = {}
    if sizes is not None:
        name, _, shape = sizes.rpartition("=")
        given[name.strip()] = read_shape("--input", shape)
    found = read(path, given, paths.read(Path(path)))
    if not found.layers:
        raise ConvError(
            "a model must have a convolution that can be read",
            f"{path} {found.without_layers}",
            "Use another, or --preset",
        )
    notes += [f"{one.name}: {one.reason}" for one in (*found.unknown, *found.left_out)]
    return [
        Layer(
            layer.name,
            f"{layer.operator} of {Path(path).name}"
            + (
                ", whose forward pass is the dx of this and whose db has "
                f"{counted(layer.problem.C, 'value')}"
                if layer.is_transposed
                else ""
            ),
            _arguments(layer.problem),
            is_transposed=layer.is_transposed,
        )
        for layer in found.layers
    ]


def _arguments(problem: ConvProblem) -> dict[str, Any]:
    explicit = problem.padding_mode == "explicit"
    return {
        "input_shape": problem.input_shape,
        "filter_shape": problem.filter_shape,
        "stride": problem.stride,
        "padding": problem.padding if explicit else problem.padding_mode,
        "dilation": problem.dilation,
        "groups": problem.groups,
        "data_format": problem.data_format,
        "filter_format": problem.filter_format,
        "dtype": problem.dtype,
    }


def _with_options(layers: list[Layer], options: Mapping[str, Any]) -> list[Layer]:
    """Return the layers with the options applied."""
    given = {
        argument: read(f"--{key.replace('_', '-')}", options[key])
        for key, (argument, read) in _READERS.items()
        if isinstance(options.get(key), str)
    }
    values = options.get("values")
    if values is not None:
        require_kind("--values", values)
    return [_changed(layer, given, values) for layer in layers]


def _named(layers: list[Layer], name: str, where: str) -> Layer:
    known = [layer.name for layer in layers if layer.name is not None]
    if not known:
        raise ConvError(
            "--layer chooses a layer by its name",
            f"those of {where} have none",
            'Give each one, such as name = "first"',
        )
    if name not in known:
        raise unknown_word(f"layer in {where}", name, known)
    if known.count(name) > 1:
        raise ConvError(
            "--layer must name one layer",
            f"{known.count(name)} in {where} are called {shown(name)}",
            "Rename all but one of them",
        )
    return next(layer for layer in layers if layer.name == name)


def _changed(layer: Layer, given: Mapping[str, Any], values: str | None) -> Layer:
    """Return the layer with the options applied, without a title that describes the old layer."""
    other = any(layer.arguments.get(key, value) != value for key, value in given.items())
    new = any(key not in layer.arguments and key != "dtype" for key in given)
    title = None if layer.arguments and (other or new) else layer.title
    arguments = {**layer.arguments, **given}
    return replace(layer, title=title, arguments=arguments, values=values or layer.values)


def _toml_fault(error: Exception) -> str:
    """Return why a file is not TOML."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if type(error) is ValueError:  # Python's limit, whose advice is for programs
        return f"it has an integer of more than {sys.get_int_max_str_digits():,} digits"
    return str(error)


def read_file(path: Path) -> list[Layer]:
    """Return the layers of a TOML file: one at its top level, or several [[layer]] tables.

    Raises:
        ConvError: it is not TOML, or says something that a layer does not have.
        OSError: it cannot be read.
    """
    import tomllib

    try:
        content = tomllib.loads(paths.read(path).decode())
    except (ValueError, RecursionError) as error:  # syntax, UTF-8 and huge integers
        raise ConvError(
            f"{path} must be TOML",
            _toml_fault(error),
            'Write lines such as input = "1x5x5x3"',
        ) from None
    words = [word for word in ("layer", "layers") if word in content]
    if len(words) > 1:
        raise ConvError(
            f"{path} must call its layers by one word",
            "it has [[layer]] and [[layers]]",
            "Use one of them",
        )
    tables = content.pop(words[0]) if words else None
    if tables is None:
        return [_layer(path.name, content)]
    if content:
        raise ConvError(
            f"{path} must have one layer at its top level, or [[layer]] tables",
            f"it has both, {next(iter(content))!r} being outside a table",
            "Move it into a [[layer]] table",
        )
    listed = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if not listed or not tables:
        raise ConvError(
            f"the layers of {path} must be [[layer]] tables",
            f"got {shown(tables)}",
            "Write [[layer]], with two brackets, above each",
        )
    return [_layer(f"layer {number} of {path.name}", t) for number, t in enumerate(tables, 1)]


def _layer(where: str, table: Mapping[str, Any]) -> Layer:
    if not table:
        raise ConvError(
            f"{where} must say something",
            "it is empty",
            'Write lines such as input = "1x5x5x3" and filter = "3x3x3x4"',
        )
    for key in table:
        if key not in _READERS and key not in _LABELS:
            raise unknown_word(f"key in {where}", key, (*_READERS, *_LABELS))
    labels = {key: _text(f"{key} in {where}", table[key]) for key in _LABELS if key in table}
    arguments = {
        argument: read(f"{key} in {where}", table[key])
        for key, (argument, read) in _READERS.items()
        if key in table
    }
    values = require_kind(f"values in {where}", labels.get("values", KINDS[0]))
    return Layer(labels.get("name"), labels.get("title"), arguments, values)


# -- saying a configuration ------------------------------------------------------------------------


def as_json(layer: Layer, problem: ConvProblem) -> dict[str, Any]:
    """Return the configuration for ``--json``."""
    return {
        "name": layer.name,
        "title": layer.title,
        "configuration": {
            "input": list(problem.input_shape),
            "filter": list(problem.filter_shape),
            "stride": list(problem.stride),
            "padding": [list(pair) for pair in problem.padding],
            "padding_mode": problem.padding_mode,
            "dilation": list(problem.dilation),
            "groups": problem.groups,
            "data_format": problem.data_format,
            "filter_format": problem.filter_format,
            "dtype": problem.dtype,
        },
    }


def as_options(problem: ConvProblem) -> str:
    """Return the options that give this problem, all but --dtype."""
    padding = problem.padding_mode
    if padding == "explicit":
        padding = ",".join(f"{before}:{after}" for before, after in problem.padding)
    return (
        f"--input {shape_text(problem.input_shape)} --filter {shape_text(problem.filter_shape)} "
        f"--stride {shape_text(problem.stride)} --padding {padding} "
        f"--dilation {shape_text(problem.dilation)} --groups {problem.groups} "
        f"--data-format {problem.data_format} --filter-format {problem.filter_format}"
    )


def summary(problem: ConvProblem, other: Mapping[str, str] | None = None) -> str:
    """Return the configuration apart from the shapes, in one line; ``other`` replaces entries."""
    padding = problem.padding_mode
    if padding == "explicit":
        sides = [str(b) if b == a else f"{b}:{a}" for b, a in problem.padding]
        padding = sides[0] if len(set(sides)) == 1 else ",".join(sides)
    words = {
        "stride": _short(problem.stride),
        "padding": padding,
        "dilation": _short(problem.dilation),
        **(other or {}),
    }
    return ", ".join(
        [
            *(f"{word} {words[word]}" for word in ("stride", "padding", "dilation")),
            f"groups {problem.groups}",
            f"{problem.data_format} with {problem.filter_format}",
            problem.dtype,
        ]
    )


def _short(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else shape_text(values)
