"""Which layers a command is about: read from options, a TOML file, or the presets.

The three say the same things in the same words; options override what a file or preset says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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
from cupyconv.markup import in_line
from cupyconv.planning import PRECISIONS
from cupyconv.planning.device import DEVICES
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import ITEMSIZE, LARGEST, PADDING_WORDS, PASSES, shape_text

PRESETS = Path(__file__).with_name("presets.toml")

_DIGITS = 18  # of the largest size: what a 64-bit index can count


@dataclass(frozen=True)
class Layer:
    """A configuration that was asked for, before its rules are checked.

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
        """The configuration with ``more`` arguments.

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
    """Integers out of ``2x1``, ``2,1``, ``2`` or, in TOML, ``[2, 1]``."""
    error = ConvError(
        f"{what} must be {rule}", f"got {shown(value)}", f"Write for example {example}"
    )
    if isinstance(value, str):
        parts = re.split(separators, value.strip().lower())
        if not all(re.fullmatch(r"\s*[-+]?[0-9]+\s*", part) for part in parts):
            raise error
        too_large = any(len(part.strip()) > _DIGITS for part in parts)
        numbers = [] if too_large else [int(part) for part in parts]
    else:
        numbers = value if isinstance(value, list) else [value]
        if not numbers or not all(type(number) is int for number in numbers):
            raise error
        too_large = any(abs(number) >= 10**_DIGITS for number in numbers)
    if too_large:
        raise ConvError(
            f"{what} must be made of numbers that a 64-bit index can count",
            f"got {shown(value)}",
            f"Use at most {_DIGITS} digits",
        )
    return numbers


def read_shape(what: str, value: Any) -> tuple[int, ...]:
    """A shape such as ``1x5x5x3``, ``1,5,5,3`` or, in TOML, a list."""
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
"""Of each key: the argument of ConvProblem that it gives, and how its value is read."""

_LABELS = ("name", "title", "values")
"""Keys that say nothing about the convolution."""


class Words(click.ParamType):
    """A word that a shell may complete; what it means is checked where it is used."""

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
    """The words of an option, with commas between them; none where it was not given.

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
    click.option("--input", metavar="SHAPE", help="Shape of x, such as 1x5x5x3."),
    click.option("--filter", metavar="SHAPE", help="Shape of w, such as 3x3x3x4."),
    click.option("--stride", metavar="N|NxN", help="For all axes, or one per axis.  [default: 1]"),
    click.option(
        "--padding",
        type=Words(lambda: PADDING_WORDS),
        metavar="PADDING",
        help="same, valid, same_lower, 1, 1,2 (per axis) or 1:2,0:1 (before:after per axis).  "
        "[default: 0]",
    ),
    click.option(
        "--dilation", metavar="N|NxN", help="For all axes, or one per axis.  [default: 1]"
    ),
    click.option("--groups", metavar="N", help="The input's channels for depthwise.  [default: 1]"),
    click.option(
        "--data-format",
        metavar="WORD",
        type=Words(lambda: (word for rank in SPATIAL_AXES for word in data_formats(rank))),
        help="Order of x and y, such as NHWC.  [default: NCHW]",
    ),
    click.option(
        "--filter-format",
        metavar="WORD",
        help="Order of w, such as HWIO.  [default: OIHW, with NHWC: HWIO]",
    ),
    click.option(
        "--config",
        type=paths.FILE,
        metavar="FILE",
        help="Read layers from a TOML file with these words.",
    ),
    click.option(
        "--model",
        type=paths.FILE,
        metavar="FILE.onnx",
        help="Take the convolutions of a model; --input NAME=SHAPE gives sizes it leaves open.",
    ),
    click.option(
        "--layer", metavar="NAME", help="Of several layers in the file the one of this name."
    ),
    click.option(
        "--preset",
        metavar="NAME",
        type=Words(lambda: (str(layer.name) for layer in read_file(PRESETS))),
        help="One of the layers that come with cupyconv.",
    ),
    click.option(
        "--list-presets",
        is_flag=True,
        expose_value=False,
        callback=_list_presets,
        help="List them, and do nothing else.",
    ),
)

dtype_option = click.option(
    "--dtype",
    metavar="DTYPE",
    type=Words(lambda: ITEMSIZE),
    help=f"{', '.join(list(ITEMSIZE)[:-1])} or {list(ITEMSIZE)[-1]}.  [default: float32]",
)


def devices_option(
    help: str, known: Iterable[str] = DEVICES, default: tuple[str, ...] = ()
) -> Callable[[Callable], Callable]:
    """``--device``, repeatable, of which the command takes all words as ``devices``."""
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
    help="What calls permit: ieee, tf32 or bf16x6.",
)

impl_option = click.option(
    "--impl",
    metavar="NAME",
    type=Words(lambda: ("auto", *FAMILIES)),
    default="auto",
    show_default=True,
    help="The implementation of this name; auto is the one that is planned.",
)

passes_option = click.option(
    "--pass",
    "passes",
    metavar="A,B",
    callback=words("pass", lambda: PASSES),
    help=f"{', '.join(PASSES)}.  [default: all]",
)

SEED = click.IntRange(0, LARGEST)
"""Of random data: what the library's functions take."""

values_option = click.option(
    "--values",
    metavar="WORD",
    type=Words(lambda: KINDS),
    help="Draw random data as normal numbers, or as small integers.  [default: normal]",
)


def configuration_options(command: Callable) -> Callable:
    """The options that ``read_layers`` reads, all but --dtype."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_layers(options: Mapping[str, Any], notes: list[str] | None = None) -> list[Layer]:
    """The layers that a command's options ask for.

    Args:
        options: values by option name; None for those that were not given.
        notes: here go convolutions of a model that cannot be told, with the reason.

    Raises:
        ConvError: a value, key, preset or file is not what it should be.
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
    """What tells of the convolutions of a model that ``read_layers`` could not."""
    if not notes:
        return []
    head = f"{counted(len(notes), 'node')} of the model left out"
    return [output.heading(head, *map(in_line, notes))]


def _of_model(path: str, sizes: str | None, notes: list[str]) -> list[Layer]:
    """The convolutions of an ONNX model as layers; a transposed one is that which it undoes."""
    from cupyconv.explaining.onnx_model import read

    given = {}
    if sizes is not None:
        name, _, shape = sizes.rpartition("=")
        given[name.strip()] = read_shape("--input", shape)
    found = read(path, given, paths.read(Path(path)))
    if not found.layers:
        raise ConvError(
            "a model must have a convolution", f"{path} has none", "Use another, or --preset"
        )
    notes += [f"{name}: {why}" for name, why in (*found.unknown, *found.left_out)]
    return [
        Layer(
            layer.name,
            f"{layer.operator} of {Path(path).name}"
            + (", whose forward pass is the dx of this" if layer.is_transposed else ""),
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
    """The layers with what the options change."""
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
    """The layer with what the options say; a title tells of the layer without them."""
    other = any(layer.arguments.get(key, value) != value for key, value in given.items())
    new = any(key not in layer.arguments and key != "dtype" for key in given)
    title = None if layer.arguments and (other or new) else layer.title
    arguments = {**layer.arguments, **given}
    return replace(layer, title=title, arguments=arguments, values=values or layer.values)


def read_file(path: Path) -> list[Layer]:
    """The layers of a TOML file: one at its top level, or several [[layer]] tables.

    Raises:
        ConvError: it is not TOML, or says something that a layer does not have.
        OSError: it cannot be read.
    """
    import tomllib

    try:
        content = tomllib.loads(paths.read(path).decode())
    except (ValueError, RecursionError) as error:  # of its own, of UTF-8, and of huge integers
        raise ConvError(
            f"{path} must be TOML",
            "it is nested too deeply" if isinstance(error, RecursionError) else str(error),
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
    """What was configured, for ``--json``."""
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
    """The options that give this problem, all but --dtype."""
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
    """What was configured beside the shapes, in a line; what is said otherwise is in ``other``."""
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
