"""Parse the repairs that error messages suggest, and apply them to the arguments of a call."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cupyconv import formats

VERBS = "use|transpose|exchange|pad|pass|add|remove"

ARGUMENT = r'(\w+)=("[^"]*"|\[[^\]]*\]|\((?:[^()]|\([^()]*\))*\)|-?\d+)'


class Layout(NamedTuple):
    """Names and memory orders of a call's tensors.

    Attributes:
        owners: argument of each tensor, keyed by the tensor's name in messages, without article.
        data, filter: letters of the axes of x and y, and of w.
        padding, dilation: names of these arguments.
        entries: as for ``remedies.Names``.
        filters: name of the filter's argument.
    """

    owners: Mapping[str, str]
    data: str
    filter: str
    filters: str
    padding: str = "padding"
    dilation: str = "dilation"
    entries: str = "any"

    def order(self, argument: str) -> str:
        return self.filter if argument == self.filters else self.data


def alternatives(remedy: str) -> list[str]:
    """Split a remedy into alternative repairs, each beginning in lower case."""
    text = remedy[:1].lower() + remedy[1:]
    return re.split(rf"[,;] (?:or )?(?=(?:{VERBS})\b(?!=))", text)


def default_layout(given: Mapping[str, Any]) -> Layout:
    """Return the layout of ConvProblem's own arguments."""
    rank = len(given["filter_shape"]) - 2
    data = formats.resolve_data_format(given.get("data_format"), rank)
    filters = formats.resolve_filter_format(given.get("filter_format"), rank, data)
    owners = {"input": "input_shape", "filter": "filter_shape", "dy": "output_shape"}
    return Layout(owners, data, filters, "filter_shape")


def applied(
    given: Mapping[str, Any],
    way_out: str,
    axis: str | None = None,
    layout: Callable[[Mapping[str, Any]], Layout] = default_layout,
) -> dict[str, Any]:
    """Return the arguments with a repair applied; tensors are passed as shapes.

    Args:
        axis: the axis that the error names, if any.
        layout: function that returns the layout of the arguments.

    Raises:
        ValueError: the text of the repair has no known form.
    """
    after = dict(given)
    for part in re.split(rf" and (?=(?:{VERBS})\b(?!=))", way_out):
        if arguments := re.findall(ARGUMENT, part):
            assert re.fullmatch(rf"use {ARGUMENT}(?: and {ARGUMENT})*", part), part
            after |= {name: ast.literal_eval(value) for name, value in arguments}
        else:
            _apply(after, part, axis, layout)
    return after


def _apply(
    after: dict[str, Any],
    part: str,
    axis: str | None,
    layout_of: Callable[[Mapping[str, Any]], Layout],
) -> None:
    layout = layout_of(after)
    axes = [letter for letter in layout.data if letter in "DHW"]
    named = axes if len(axes) == 1 else [axis] if axis else []

    def argument(owner: str) -> str:
        return layout.owners[re.sub(r"^(the|a|an) ", "", owner)]

    def resize(name: str, sizes: Mapping[str, int]) -> None:
        order, shape = layout.order(name), list(after[name])
        for letter, size in sizes.items():
            shape[order.index(letter)] = size
        after[name] = tuple(shape)

    if match := re.fullmatch(r"use ((?:[A-Z] = \d+(?: and )?)+) for (.+)", part):
        resize(argument(match[2]), _letters(match[1]))
    elif match := re.fullmatch(r"transpose (.+) from (\w+) to (\w+)", part):
        name, source, target = argument(match[1]), match[2], match[3]
        assert target == layout.order(name), part
        after[name] = tuple(after[name][source.index(letter)] for letter in target)
    elif match := re.fullmatch(r"exchange O and I of (.+)", part):
        name = argument(match[1])
        order, shape = layout.order(name), list(after[name])
        o, i = order.index("O"), order.index("I")
        shape[o], shape[i] = shape[i], shape[o]
        after[name] = tuple(shape)
    elif match := re.fullmatch(r"use (.+?) of (at least |at most )?(.+)", part):
        sizes = _axes(match[3], axes, named)
        if match[1] == "a dilation":
            _set_dilation(after, layout, axes, sizes)
        else:
            resize(argument(match[1]), sizes)
    elif match := re.fullmatch(r"pass (.+) of shape ([\dx]+|\([\d, ]*\))(?: \(\w+\))?", part):
        text = match[2]
        shape = ast.literal_eval(text) if "(" in text else tuple(map(int, text.split("x")))
        after[argument(match[1])] = shape
    elif match := re.fullmatch(r"(add|remove) the (.+): ([\dx]+)", part):
        shape, what = tuple(map(int, match[3].split("x"))), match[2]
        more = {"batch axis": 1, "channel axis": 1, "batch and channel axes": 2}.get(what, -1)
        names = [
            name
            for owner, name in layout.owners.items()
            if owner not in ("filter", "W", "weight", "bias")
            and isinstance(after.get(name), (tuple, list))
            and len(after[name]) == len(shape) - more
        ]
        if what == "batch axis":
            assert shape in [(1, *after[name]) for name in names]
            after |= {name: (1, *after[name]) for name in names}
        else:
            sizes = sorted(size for size in shape if size != 1)
            after[next(n for n in names if sorted(set(after[n]) - {1}) == sorted(set(sizes)))] = (
                shape
            )
    elif part.startswith("pad "):
        _pad(after, layout, part, axes, named)
    else:
        raise ValueError(part)


def _letters(text: str) -> dict[str, int]:
    return {letter: int(size) for letter, size in re.findall(r"\b([A-Z]) = (\d+)", text)}


def _axes(text: str, axes: list[str], named: list[str]) -> dict[str, int]:
    """Return sizes by axis: the axes that the text names, else all axes or the error's axis."""
    if "=" in text:
        return _letters(text)
    sizes = [int(size) for size in re.findall(r"(\d+)(?: to \d+)?(?: by |$)", text)]
    return dict(zip(axes if len(sizes) == len(axes) else named, sizes, strict=True))


def _set_dilation(
    after: dict[str, Any], layout: Layout, axes: list[str], sizes: Mapping[str, int]
) -> None:
    value = after.get(layout.dilation)
    values = [1] * len(axes) if value is None else value
    values = [values] * len(axes) if isinstance(values, int) else list(values)
    if layout.entries == "all":
        after[layout.dilation] = [
            sizes.get(letter, entry) for letter, entry in zip(layout.data, values, strict=True)
        ]
    else:
        changed = [sizes.get(axis, entry) for axis, entry in zip(axes, values, strict=True)]
        after[layout.dilation] = changed


def _pad(
    after: dict[str, Any], layout: Layout, part: str, axes: list[str], named: list[str]
) -> None:
    amounts = {letter: int(more) for letter, more in re.findall(r"([DHW]) by (\d+)", part)}
    if not amounts:
        more = int(re.search(r"by (\d+) more in total", part)[1])
        amounts = dict.fromkeys(axes if "each axis" in part else named, more)
    padding = after.get(layout.padding)
    if padding is None or padding == "valid":
        padding = 0
    if layout.padding == "pads":
        flat = list(padding or [0] * (2 * len(axes)))
        after["pads"] = [
            *flat[: len(axes)],
            *(flat[len(axes) + n] + amounts.get(axis, 0) for n, axis in enumerate(axes)),
        ]
        return
    sides = [padding] * len(axes) if isinstance(padding, int) else list(padding)
    pairs = [(side, side) if isinstance(side, int) else tuple(side) for side in sides]
    after[layout.padding] = tuple(
        (before, end + amounts.get(axis, 0))
        for (before, end), axis in zip(pairs, axes, strict=True)
    )
