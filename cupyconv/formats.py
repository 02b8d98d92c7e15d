"""Names of memory orders: data formats of x and y, and filter formats of w.

A data format has the letters N (batch), C (channels) and the spatial axes D, H and W.  A filter
format has the letters O (output channels), I (input channels of one group) and the same spatial
axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar, cast

from cupyconv.errors import ConvError, unknown_word

SPATIAL_AXES = {1: "W", 2: "HW", 3: "DHW"}
"""Letters of the spatial axes, keyed by the number of spatial axes."""

CHANNELS_FIRST: Literal["channels_first"] = "channels_first"
CHANNELS_LAST: Literal["channels_last"] = "channels_last"

DataFormat = Literal[
    "NCW", "NWC", "NCHW", "NHWC", "NCDHW", "NDHWC", "channels_first", "channels_last"
]
"""Names of data formats, for type checkers; at run time, case does not matter."""

FilterFormat = Literal["OIW", "WIO", "OWI", "OIHW", "HWIO", "OHWI", "OIDHW", "DHWIO", "ODHWI"]
"""Names of filter formats, for type checkers; at run time, case does not matter."""


def data_formats(spatial_rank: int) -> tuple[DataFormat, DataFormat]:
    """Return the channels-first and channels-last data format, such as ``("NCHW", "NHWC")``."""
    axes = SPATIAL_AXES[spatial_rank]
    return cast(tuple[DataFormat, DataFormat], (f"NC{axes}", f"N{axes}C"))


def filter_formats(spatial_rank: int) -> tuple[FilterFormat, FilterFormat, FilterFormat]:
    """Return the filter formats for a number of spatial axes: for 2, OIHW, HWIO and OHWI."""
    axes = SPATIAL_AXES[spatial_rank]
    words = f"OI{axes}", f"{axes}IO", f"O{axes}I"
    return cast(tuple[FilterFormat, FilterFormat, FilterFormat], words)


def resolve_data_format(word: str | None, spatial_rank: int) -> DataFormat:
    """Return the data format with this name or alias; channels first for None.

    Raises:
        ConvError: the name is unknown, or is for another number of spatial axes.
    """
    first, last = data_formats(spatial_rank)
    if word is None:
        return first
    aliases: dict[str, str] = {CHANNELS_FIRST: first, CHANNELS_LAST: last}
    text = word if isinstance(word, str) else ""
    normalized = aliases.get(text.lower(), text.upper())
    return _resolve("data_format", word, normalized, spatial_rank, data_formats, tuple(aliases))


def resolve_filter_format(word: str | None, spatial_rank: int, data_format: str) -> FilterFormat:
    """Return the filter format with this name; for None, the default that ``data_format`` implies.

    Raises:
        ConvError: the name is unknown, or is for another number of spatial axes.
    """
    output_first, output_last, _ = filter_formats(spatial_rank)
    if word is None:
        return output_last if data_format.endswith("C") else output_first
    normalized = word.upper() if isinstance(word, str) else ""
    return _resolve("filter_format", word, normalized, spatial_rank, filter_formats, ())


_Word = TypeVar("_Word", DataFormat, FilterFormat)
_Value = TypeVar("_Value")


def _resolve(
    what: str,
    word: object,
    normalized: str,
    spatial_rank: int,
    formats: Callable[[int], tuple[_Word, ...]],
    aliases: Iterable[str],
) -> _Word:
    """Return the format with a name, after checking its number of spatial axes.

    Args:
        what: name of the argument, for messages.
        word: the argument itself, for messages.
        normalized: name of the format in upper case, with aliases replaced.
        formats: function that returns the formats for a number of spatial axes.
        aliases: other valid names, for messages.
    """
    known: tuple[_Word, ...] = formats(spatial_rank)
    for name in known:
        if name == normalized:
            return name
    for rank in SPATIAL_AXES:
        words: tuple[str, ...] = formats(rank)
        if normalized in words:
            counterpart = known[words.index(normalized)]
            raise ConvError(
                f"{what} must have as many spatial axes as the arrays",
                f"{word!r} has {rank}, the input has {spatial_rank}",
                f"Use {counterpart!r}, or arrays with {rank} spatial axes"
                if rank > 1
                else f"Use {counterpart!r}, or arrays with one spatial axis",
                candidates=(),
            )
    raise unknown_word(what, word, (*known, *aliases))


def ordered(axes: Sequence[int], values: Iterable[_Value]) -> tuple[_Value, ...]:
    """Return values in another order: value number i is at index ``axes[i]``."""
    placed = dict(zip(axes, values, strict=True))
    return tuple(placed[axis] for axis in range(len(axes)))


def data_axes(data_format: str) -> tuple[int, ...]:
    """Return the positions of N, C and the spatial axes D, H, W in an array of this format."""
    return tuple(data_format.index(letter) for letter in "NC" + _spatial(data_format))


def filter_axes(filter_format: str) -> tuple[int, ...]:
    """Return the positions of O, I and the spatial axes D, H, W in a filter of this format."""
    return tuple(filter_format.index(letter) for letter in "OI" + _spatial(filter_format))


def _spatial(word: str) -> str:
    return "".join(letter for letter in word if letter in "DHW")
