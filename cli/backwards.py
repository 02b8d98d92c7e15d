"""`cupyconv shapes --dy` and `--sweep`: input sizes of a given output, and sweeps of an option."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from cupyconv import ConvAxis, ConvError, ConvProblem, formats
from cupyconv.cli import configuration, output
from cupyconv.cli.configuration import Layer
from cupyconv.errors import Names, require_word
from cupyconv.explaining.shapes import interval_dict, listed
from cupyconv.markup import MOST_LINES, Table, in_line
from cupyconv.problem import MOST_LISTED, counted, interval_text, offering, shape_text

_SWEPT = {"input": "input_shape", "filter": "filter_shape", "stride": "stride"} | {
    word: word for word in ("padding", "dilation")
}
"""Argument of ConvProblem that a sweep sets, keyed by the name that --sweep accepts."""


# -- input sizes of an output ----------------------------------------------------------------------


def largest_input(layer: Layer, dy: tuple[int, ...]) -> ConvProblem:
    """Return the layer's problem with the largest input that gives an output of shape ``dy``.

    The problem's ``valid_input_sizes`` has, per spatial axis, all input sizes with this output.

    Raises:
        ConvError: no input gives this output.
    """
    words = {key: value for key, value in layer.arguments.items() if key != "input_shape"}
    configuration.require_filter(words)
    given = {"groups": 1, **words, "output_shape": dy}
    return offering(_largest_input, Names(), given)


def _largest_input(
    output_shape: tuple[int, ...], filter_shape: tuple[int, ...], **words: Any
) -> ConvProblem:
    dy = output_shape
    layout, filter_layout = _layouts(words, len(dy))
    k, o = dy[layout[1]] if len(dy) == len(filter_shape) else 0, filter_shape[filter_layout[0]]
    if len(dy) == len(filter_shape) and k != o:
        raise ConvError(
            "dy must have one channel for each filter",
            f"dy {shape_text(dy)} has {counted(k, 'channel')}, w {shape_text(filter_shape)} has "
            f"{counted(o, 'filter')}",
            f"Use dy with {counted(o, 'channel')}, or set the order of its axes with --data-format",
            candidates=(),
        )
    stride = words.get("stride", 1)
    above = [s - 1 for s in stride] if isinstance(stride, (tuple, list)) else stride - 1
    # An output_padding of stride - 1 gives the largest input; the smallest may have sizes below 1.
    try:
        return ConvProblem.from_output(dy, filter_shape, output_padding=above, **words)
    except ConvError as error:
        if min(dy, default=0) < 1 or "every size" not in error.rule:
            raise
        raise ConvError(
            "every size of the input must be at least 1",
            f"the largest input with output {shape_text(dy)} is too small: {error.values}",
            "Give a larger dy, or less padding",
        ) from None


def _layouts(words: Mapping[str, Any], axes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of N, C and space in x and y, and of O, I and space in w.

    Args:
        axes: number of axes of each tensor.
    """
    rank = min(max(axes - 2, 1), 3)
    layout = formats.resolve_data_format(words.get("data_format"), rank)
    filters = formats.resolve_filter_format(words.get("filter_format"), rank, layout)
    return formats.data_axes(layout), formats.filter_axes(filters)


def backwards_parts(layer: Layer, problem: ConvProblem, checked: bool = False) -> list[Any]:
    """Return the input sizes as headings and a table to print.

    Args:
        problem: result of ``largest_input`` for the layer.
        checked: whether the layer has an input shape that gives this output.
    """
    head = f"dy {shape_text(problem.output_shape)}, w {shape_text(problem.filter_shape)}"
    count = prod(map(len, problem.valid_input_sizes))
    every = ", ".join(f"{axis.name} {_choice(axis.valid_input_sizes)}" for axis in problem.axes)
    images = f"{counted(problem.N, 'image')} of {counted(problem.C, 'channel')}"
    fitting = "no other size fits" if count == 1 else f"{count:,} different sizes fit"
    answer = f"x and dx: {images}, {every}; {fitting} this dy and w"
    lines = [head, configuration.summary(problem), answer]
    if checked:
        lines.append(f"the given x {shape_text(layer.arguments['input_shape'])} matches this dy")
    # The title may state an input size that is not printed here, so prefer the name.
    name = in_line(layer.name or layer.title or "")
    rows = []
    for axis in problem.axes:
        sizes, first = axis.valid_input_sizes, axis.first_input_size_for(axis.output)
        for number, of_size in enumerate(map(axis.of_input, sizes[:MOST_LINES])):
            name_once = axis.name if number == 0 else ""
            pads, why = f"{of_size.pad_before}, {of_size.pad_after}", of_size.formula
            size = of_size.input
            rows.append((name_once, str(size), pads, str(size - first), why + _unread(of_size)))
        if len(sizes) > MOST_LINES:
            rows.append(("", "...", "", "", f"and so on, to {sizes[-1]}"))
    columns = ("axis", "input", "padding", "output_padding", "because")
    reasons: dict[str, list[str]] = {}
    for axis in problem.axes:
        reasons.setdefault(_why(axis), []).append(axis.name)
    return [
        output.heading(*filter(None, [name, *lines])),
        Table(columns, tuple(rows), ("input", "output_padding")),
        output.heading("why", *(f"{listed(names)}: {text}" for text, names in reasons.items())),
    ]


def _choice(sizes: range) -> str:
    """Return alternative sizes as text: ``9``, ``9 or 10``, or ``9 to 11``."""
    return f"{sizes[0]} or {sizes[1]}" if len(sizes) == 2 else interval_text(sizes)


def _unread(axis: ConvAxis) -> str:
    last = axis.unread_after
    if not last:
        return ""
    return f"; the last {'input gets' if last == 1 else f'{last} inputs get'} no gradient"


def _why(axis: ConvAxis) -> str:
    first = axis.first_input_size_for(axis.output)
    steps = f"({axis.output} - 1)*{axis.stride}"
    if axis.padding_mode.startswith("same"):
        rule = f"with SAME padding the smallest input is {steps} + 1 = {first}"
    else:
        pads = axis.pad_before + axis.pad_after
        less = f" - {pads}" if pads else ""
        rule = f"the smallest input is {steps} + {axis.effective_filter}{less} = {first}"
    if axis.stride == 1:
        return f"{rule}; with stride 1, no other input size gives this output size"
    return (
        f"{rule}; with stride {axis.stride}, {axis.stride} consecutive input sizes give the same "
        f"output size{', but sizes below 1 do not exist' if first < 1 else ''}"
    )


def backwards_json(layer: Layer, problem: ConvProblem) -> dict[str, Any]:
    """Return the input sizes for --json; the arguments are those of ``backwards_parts``."""
    return {
        "name": layer.name,
        "output": list(problem.output_shape),
        "filter": list(problem.filter_shape),
        "largest_input": list(problem.input_shape),
        "axes": [
            {
                "name": axis.name,
                "output": axis.output,
                "input_sizes": interval_dict(axis.valid_input_sizes),
                "why": _why(axis),
            }
            for axis in problem.axes
        ],
    }


# -- a sweep ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """An option, named by ``word``, and its values; a value applies to all spatial axes."""

    word: str
    values: tuple[int, ...]

    @property
    def text(self) -> str:
        """The values as text: ``1 to 9``, or ``1 to 9 by 2``."""
        first, last = self.values[0], self.values[-1]
        step = self.values[1] - first if last > first else 1
        return interval_text(range(first, last + 1)) + (f" by {step}" if step > 1 else "")


def read_sweep(text: str) -> Sweep:
    """Parse a sweep such as ``input=3:12`` or ``stride=1:4``.

    Raises:
        ConvError: the text is not a sweep, or has too many values.
    """
    match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d{1,9})\s*:\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?", text)
    example = "Write, for example, input=3:12, stride=1:4 or input=32:256:32"
    if match is None:
        raise ConvError(
            "--sweep must be an option with its first and last value", f"got {text!r}", example
        )
    word, first, last, step = match[1].lower(), int(match[2]), int(match[3]), int(match[4] or 1)
    require_word("--sweep", word, _SWEPT)
    if step < 1 or last < first or (last - first) // step >= MOST_LISTED:
        raise ConvError(
            f"--sweep must count up, over at most {MOST_LISTED:,} values", f"got {text!r}", example
        )
    return Sweep(word, tuple(range(first, last + 1, step)))


def swept(layer: Layer, sweep: Sweep) -> list[tuple[int, ConvProblem | ConvError]]:
    """Return each value with its problem, or with the error if the value is invalid.

    Raises:
        ConvError: every value is invalid.
    """
    arguments = dict(layer.arguments)
    if sweep.word == "input" and "filter_shape" in arguments and "input_shape" not in arguments:
        arguments["input_shape"] = _any_input(arguments)
    base = Layer(layer.name, layer.title, arguments)
    results: list[tuple[int, ConvProblem | ConvError]] = []
    for value in sweep.values:
        try:
            results.append((value, base.problem(**_with(arguments, sweep.word, value))))
        except ConvError as error:
            results.append((value, error))
    if all(isinstance(result, ConvError) for _, result in results):
        raise results[0][1]  # type: ignore[misc]  # all entries are errors
    return results


def _any_input(arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """Return an input shape with one image, the channels that w needs, and spatial sizes of 1."""
    filters = arguments["filter_shape"]
    layout, filter_layout = _layouts(arguments, len(filters))
    if len(filters) != len(layout):
        return filters  # ConvProblem raises an error that gives the reason
    shape = [1] * len(filters)
    shape[layout[1]] = filters[filter_layout[1]] * arguments.get("groups", 1)
    return tuple(shape)


def _with(arguments: Mapping[str, Any], word: str, value: int) -> dict[str, Any]:
    """Return the argument that the sweep sets, with this value on every spatial axis."""
    key = _SWEPT[word]
    if not key.endswith("shape"):
        return {key: value}
    shape = arguments.get(key, ())
    data, filters = _layouts(arguments, len(shape))
    spatial = (data if word == "input" else filters)[2:]
    return {key: tuple(value if axis in spatial else size for axis, size in enumerate(shape))}


def sweep_table(sweep: Sweep, results: list[tuple[int, ConvProblem | ConvError]]) -> Table:
    """Return a table with a row per value of the swept option.

    The column "unread" has the number of inputs that no window reads.
    """
    rows = []
    for value, result in results:
        if isinstance(result, ConvError):
            rows.append((str(value), "-", "-", "-", "-", f"{result.rule}: {result.values}"))
            continue
        axes = result.axes
        cells = (
            _of_axes(f"{axis.pad_before}, {axis.pad_after}" for axis in axes),
            _of_axes(interval_text(axis.valid_input_sizes) for axis in axes),
            _of_axes(str(axis.unread_inputs) for axis in axes),
            _of_axes(axis.formula for axis in axes),
        )
        rows.append((str(value), shape_text(result.output_sizes), *cells))
    columns = (sweep.word, "output", "padding", "inputs with this output", "unread", "because")
    return Table(columns, tuple(rows), (sweep.word,))


def _of_axes(texts: Iterable[str]) -> str:
    """Join the texts of all axes, without duplicates."""
    return "; ".join(dict.fromkeys(texts))


def sweep_json(sweep: Sweep, results: list[tuple[int, ConvProblem | ConvError]]) -> dict[str, Any]:
    """Return a sweep for --json."""
    return {
        "word": sweep.word,
        "values": [
            {"value": value, "error": str(result)}
            if isinstance(result, ConvError)
            else {
                "value": value,
                "input": list(result.input_shape),
                "filter": list(result.filter_shape),
                "output": list(result.output_shape),
                "padding": [list(pair) for pair in result.padding],
                "input_sizes": [interval_dict(sizes) for sizes in result.valid_input_sizes],
                "unread_inputs": [axis.unread_inputs for axis in result.axes],
            }
            for value, result in results
        ],
    }
