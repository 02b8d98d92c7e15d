"""Suggested fixes of an invalid configuration: changes of arguments that make it valid.

A fix consists of the changed arguments with their new values, and of phrases that describe the
change.  ``offer`` tries each fix together with the unchanged arguments of the call, and adds
only fixes that work to an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any

from cupyconv import formats
from cupyconv.errors import OWNERS, ConvError, ConvTypeError, Fix, Names
from cupyconv.formats import SPATIAL_AXES

MOST_ALIKE = 2
"""Largest number of changes of one kind that an error offers (hand-set).  The kinds are the memory
order; padding and stride; and pairs of changes."""

MOST_OTHERS = 2 * MOST_ALIKE
"""Largest number of changes other than of the memory order that an error offers."""

MOST_STRIDE = 64
"""Largest stride that a message suggests (hand-set)."""

_Axis = tuple[str, int, int, int, int | None]
"""Name, input size, filter span (first to last tap), stride and total padding of a spatial axis.

The total padding is None for SAME.
"""
_Fixes = Iterator[Fix | None]
"""Possible fixes; None stands for a fix that the function cannot take."""

_DATA_SHAPES = {"input_shape", "output_shape"}
"""Shape arguments of tensors in the data format."""


class Call:
    """A call with an invalid configuration, and the possible fixes.

    "The input gives the output" below means that the sizes of ``input_shape`` have the output sizes
    in ``output_shape``.

    Args:
        names: names that messages use.
        given: arguments of the call, keyed by their names in ConvProblem; ``output_shape`` is the
            shape of dy, or of a transposed convolution's x.
        sizes: keys of the shapes that the function takes as arguments, instead of arrays.
        axis: spatial axis that the error names; None if it names none.
    """

    def __init__(
        self,
        names: Names,
        given: Mapping[str, Any],
        sizes: frozenset[str],
        axis: str | None = None,
    ) -> None:
        self.names, self.given, self.sizes, self.axis = names, given, sizes, axis
        shapes = {key: _integers(given.get(key)) for key in OWNERS}
        self.x, self.w, self.y = shapes.values()
        self.shapes = {key: shape for key, shape in shapes.items() if shape is not None}
        ranks = {len(shape) - 2 for shape in self.shapes.values()}
        self.rank = ranks.pop() if len(ranks) == 1 else 0
        self.layout = self.filter_layout = ""
        if self.rank in SPATIAL_AXES and self.w is not None:
            try:
                layout = formats.resolve_data_format(given.get("data_format"), self.rank)
                word = given.get("filter_format")
                self.filter_layout = formats.resolve_filter_format(word, self.rank, layout)
                self.layout = layout
            except (ConvError, ConvTypeError):
                pass

    def after(self, fix: Fix) -> Call:
        """Return the call with the changes of a fix."""
        return Call(self.names, {**self.given, **fix.changes}, self.sizes)

    def others(self) -> _Fixes:
        """Yield fixes that do not change the memory order."""
        if not self.layout:
            yield from self._axes_of_w()
            yield from self._formats()
            return
        if "input_shape" in self.sizes:  # a shape argument is more likely wrong than an array
            yield from self._inputs()
        yield from self._lists()
        yield from self._channels()
        yield from self._inputs()
        yield from self._outputs()
        yield from self._windows()

    # -- edits -------------------------------------------------------------------------------

    def _order_of(self, key: str) -> str:
        return self.filter_layout if key == "filter_shape" else self.layout

    def _size(self, key: str, letter: str) -> int:
        return self.shapes[key][self._order_of(key).index(letter)]

    def _owner(self, key: str) -> str:
        return getattr(self.names, OWNERS[key])

    def _assigned(self, key: str, value: Any) -> Fix | None:
        """Return the fix that sets an argument; None if the function cannot take the value."""
        if key in self.names.absent or value is None:
            return None
        spelled = value if self.names.spell is None else self.names.spell(key, value)
        if spelled is None:
            return None
        return Fix({key: value}, ((self.names.argument(key), spelled),))

    def _resized(self, key: str, sizes: Mapping[str, int], phrase: str = "") -> Fix:
        """Return the fix that changes sizes of a tensor, keyed by the letters of the axes."""
        order, shape = self._order_of(key), list(self.shapes[key])
        for letter, size in sizes.items():
            shape[order.index(letter)] = size
        text = " and ".join(f"{letter} = {size}" for letter, size in sizes.items())
        return Fix({key: tuple(shape)}, (phrase or f"use {text} for {self._owner(key)}",))

    def _reordered(self, key: str, source: str) -> Fix:
        """Return the fix that transposes a tensor from the order ``source`` to the call's order."""
        target, shape = self._order_of(key), self.shapes[key]
        changed = tuple(shape[source.index(letter)] for letter in target)
        what = f"transpose {self._owner(key)} from {source} to {target}"
        return self._reshaped(key, changed, what)

    def _sizes_text(self, sizes: Mapping[str, Any]) -> str:
        """Return sizes, keyed by axis, as text.

        The text is "5 by 6" for all spatial axes, "5" for the axis that the error names, and
        otherwise "H = 5 and W = 6".
        """
        if len(sizes) == self.rank:
            return " by ".join(map(str, sizes.values()))
        if self.axis is not None and list(sizes) == [self.axis]:
            return str(sizes[self.axis])
        return " and ".join(f"{axis} = {size}" for axis, size in sizes.items())

    def _padding_phrase(self, missing: Mapping[str, int]) -> str:
        if list(missing) == [self.axis] or len(missing) == self.rank == 1:
            return f"pad by {next(iter(missing.values()))} more in total"
        if len(missing) == self.rank and len(set(missing.values())) == 1:
            return f"pad by {next(iter(missing.values()))} more in total on each axis"
        amounts = " and ".join(f"{axis} by {more}" for axis, more in missing.items())
        return f"pad {amounts} more in total"

    # -- candidates --------------------------------------------------------------------------

    def _axes_of_w(self) -> _Fixes:
        """Yield fixes that give x and y the number of axes of w.

        They add a batch or channel axis, or remove an axis of size 1.
        """
        if self.w is None:
            return
        axes = len(self.w)
        others = {key: shape for key, shape in self.shapes.items() if key != "filter_shape"}
        batch = next((shape[0] for shape in others.values() if len(shape) == axes), 1)
        short = {key: shape for key, shape in others.items() if len(shape) + 1 == axes}
        given = {key: (batch, *shape) for key, shape in short.items() if key in self.sizes}
        lacking = {key: (1, *shape) for key, shape in short.items() if key not in self.sizes}
        if short:
            text = [f"add the batch axis: {_shape_text(shape)}" for shape in lacking.values()][:1]
            named = [(self.names.argument(key), shape) for key, shape in given.items()]
            yield Fix({**given, **lacking}, (*named, *text))
        try:
            layout = formats.resolve_data_format(self.given.get("data_format"), axes - 2)
        except (ConvError, ConvTypeError, KeyError):
            return
        for key, shape in others.items():
            missing = "channel axis" if len(shape) + 1 == axes else "batch and channel axes"
            if axes - 2 <= len(shape) < axes:
                batches = shape[: len(shape) - axes + 2] or (1,)
                sizes = shape[len(shape) - axes + 2 :]
                changed = (*batches, 1, *sizes) if layout[1] == "C" else (*batches, *sizes, 1)
                yield self._reshaped(key, changed, f"add the {missing}: {_shape_text(changed)}")
            for axis, size in enumerate(shape if len(shape) == axes + 1 else ()):
                if size == 1:
                    changed = (*shape[:axis], *shape[axis + 1 :])
                    yield self._reshaped(
                        key, changed, f"remove the axis of size 1: {_shape_text(changed)}"
                    )

    def _reshaped(self, key: str, shape: tuple[int, ...], what: str) -> Fix:
        """Return the fix that gives a tensor a shape, by other axes of size 1 or another order.

        Args:
            key: the tensor's shape argument.
            shape: the new shape.
            what: phrase that describes the change of an array.
        """
        is_size = key in self.sizes
        return Fix({key: shape}, ((self.names.argument(key), shape) if is_size else what,))

    def _formats(self) -> _Fixes:
        """Yield fixes that replace a format by one for the tensors' number of axes."""
        known: dict[str, Callable[[int], tuple[str, ...]]] = {
            "data_format": formats.data_formats,
            "filter_format": formats.filter_formats,
        }
        for key, words in known.items() if self.rank in SPATIAL_AXES else ():
            if (given := self.given.get(key)) is not None:
                # The likeliest format differs from the passed one only in its number of axes.
                order = sorted(words(self.rank), key=lambda name: _ends(name) != _ends(given))
                yield from (self._assigned(key, name) for name in order)

    def orders(self) -> Iterator[Fix]:
        """Yield fixes that change the memory order and keep all sizes, the likeliest first."""
        if not self.layout:
            return
        others = [order for order in formats.data_formats(self.rank) if order != self.layout]
        arrays = [
            self._reordered(key, order)
            for order in others
            for key in ("input_shape", "output_shape")
            if key in self.shapes
        ]
        if len(arrays) > 1:
            arrays.append(_combined(*arrays))
        changes = [*_known(self._assigned("data_format", order) for order in others), *arrays]
        fixes = [*changes, *self._filters()]
        for fix in changes:
            changed = self.after(fix)
            more = _known((*changed._filters(), *changed._lists()))
            fixes += [_combined(fix, other) for other in more]
        yield from sorted(fixes, key=self._unlikeliness)

    def _filters(self) -> Iterator[Fix]:
        """Yield fixes that change the memory order of the filter."""
        for order in formats.filter_formats(self.rank):
            if order != self.filter_layout:
                yield self._assigned("filter_format", order) or self._reordered(
                    "filter_shape", order
                )
        exchanged = self.filter_layout.translate(str.maketrans("OI", "IO"))
        fix = self._reordered("filter_shape", exchanged)
        phrase = f"exchange O and I of {self.names.w}"
        yield fix if "filter_shape" in self.sizes else Fix(fix.changes, (phrase,))

    def _unlikeliness(self, fix: Fix) -> tuple[bool, float, int, int]:
        """Return a sort key, by which the likeliest fixes of the memory order come first."""
        is_data = bool(_DATA_SHAPES & fix.changes.keys())
        return is_data, *self.after(fix).filter_score(), len(fix.changes)

    def filter_sizes(self) -> dict[str, int]:
        """Return the sizes of the filter, keyed by the letters of its axes."""
        return dict(zip(self.filter_layout, self.w or (), strict=False))

    def filter_score(self) -> tuple[float, int]:
        """Return a score that grows with the unlikeliness of the filter's shape.

        The score compares memory orders.  It consists of the ratio of the longest to the shortest
        spatial size, and of the longest size.
        """
        if not self.layout:
            return 1.0, 1
        sizes = self._taps()
        return max(sizes) / max(min(sizes), 1), max(sizes)

    def _lists(self) -> _Fixes:
        """Yield fixes that pass stride or dilation with as many entries as the function takes."""
        for key in ("stride", "dilation"):
            value = self.given.get(key)
            values = _integers(value if _is_list(value) else [value])
            for spatial in self._spatial_entries(values or ()):
                changed = self._entries(tuple(max(entry, 1) for entry in spatial))
                if _integers(changed if _is_list(changed) else [changed]) != values:
                    yield self._assigned(key, changed)

    def _spatial_entries(self, values: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the entries of the spatial axes, for each interpretation of a list of entries.

        A list may have one entry, an entry per spatial axis, or an entry per axis of the tensor.
        """
        if len(values) == 1:
            yield values * self.rank
        elif len(values) == self.rank:
            yield values
        elif len(values) == self.rank + 2:
            orders = sorted(formats.data_formats(self.rank), key=lambda order: order != self.layout)
            exact = [order for order in orders if _entries(values, order, "NC") == (1, 1)]
            for order in exact or orders[:1]:
                yield _entries(values, order, SPATIAL_AXES[self.rank])

    def _entries(self, spatial: tuple[int, ...]) -> Any:
        """Return a stride or dilation in the form that the function takes."""
        if self.names.entries == "any":
            return spatial if len(set(spatial)) > 1 else spatial[0]
        if self.names.entries == "spatial":
            return list(spatial)
        sizes = dict(zip(SPATIAL_AXES[self.rank], spatial, strict=True))
        return [sizes.get(letter, 1) for letter in self.layout]

    def _channels(self) -> _Fixes:
        """Yield fixes that make groups and channels consistent."""
        filters, given = self._size("filter_shape", "O"), self.given.get("groups", 1)
        groups = _integers([given])
        if self.x is None:  # groups determine the channels of a transposed convolution's result
            if "groups" in self.given and groups and groups[0] > 0:
                yield self._assigned("groups", gcd(groups[0], filters))
            return
        channels, depth = self._size("input_shape", "C"), self._size("filter_shape", "I")
        if min(channels, depth, filters) < 1:
            return
        if "groups" not in self.given:  # the number of groups follows from the channels
            multiple = channels // depth * depth
            multiples = sorted({multiple, multiple + depth} - {0}, key=lambda c: abs(c - channels))
            depths = dict.fromkeys((channels, gcd(channels, depth)))
            yield self._resized("input_shape", {"C": multiples[0]})
            yield from (self._resized("filter_shape", {"I": size}) for size in depths)
            yield from (self._resized("input_shape", {"C": size}) for size in multiples[1:])
            if channels % depth == 0:
                count = channels // depth
                yield self._resized("filter_shape", {"O": -(-filters // count) * count})
            return
        count = max(groups[0], 1) if groups else 1
        if channels % depth == 0:
            yield self._assigned("groups", channels // depth)
        if channels % count == 0:
            yield self._resized("filter_shape", {"I": channels // count})
        yield self._resized("input_shape", {"C": depth * count})
        common = gcd(count, channels, filters)
        if common != count and (fix := self._assigned("groups", common)):
            yield _combined(fix, self._resized("filter_shape", {"I": channels // common}))
        for multiple in (filters // count * count, -(-filters // count) * count):
            if multiple > 0:
                yield self._resized("filter_shape", {"O": multiple})

    def _inputs(self) -> _Fixes:
        """Yield fixes that change the input's sizes or batch size to those that fit the output."""
        if self.x is None or self.y is None:
            return
        if fitting := self._fitting_inputs():
            intervals = {axis: _interval(sizes) for axis, (_, sizes) in fitting.items()}
            phrase = f"use {self.names.any(self.names.x)} of {self._sizes_text(intervals)}"
            nearest = {axis: size for axis, (size, _) in fitting.items()}
            yield self._resized("input_shape", nearest, phrase)
        if (batch := self._size("output_shape", "N")) >= 0:
            yield self._resized("input_shape", {"N": batch})

    def rules(self) -> _Fixes:
        """Yield fixes that change padding or stride so that the input gives the output."""
        axes = self._axes_with_outputs()
        if not axes:
            return
        is_same = axes[0][-1] is None
        yield self._padded("valid" if is_same else "same")
        if not is_same and any(total for *_, total in axes):
            yield self._padded("valid")
        yield self._padded(self._pads_for(axes))
        if any(step > 1 for *_, step, _ in axes):
            return  # the caller passed a stride, so a forgotten stride is not the cause
        yield self._assigned("stride", self._strides_for(axes))
        halves = tuple((span - 1) // 2 for _, _, span, *_ in axes)
        for value in (halves, "same"):
            if max(self._taps()) > 1 and (padding := self._padded(value)):
                changed = list(self.after(padding)._axes())
                if changed and (stride := self._assigned("stride", self._strides_for(changed))):
                    yield _combined(stride, padding)

    def steps(self) -> _Fixes:
        """Yield the fix that replaces a stride above 1 so that the input gives the output."""
        axes = self._axes_with_outputs()
        if any(step > 1 for *_, step, _ in axes):
            yield self._assigned("stride", self._strides_for(axes))

    def depthwise(self) -> _Fixes:
        """Yield the fix that sets groups to the input channels, for a depthwise filter (I = 1)."""
        if not self.layout or self.x is None or self.given.get("groups") != 1:
            return
        channels, filters = self._size("input_shape", "C"), self._size("filter_shape", "O")
        if self._size("filter_shape", "I") == 1 < channels and filters % channels == 0:
            yield self._assigned("groups", channels)

    def _padded(self, value: str | tuple[int, ...] | None) -> Fix | None:
        """Return the fix that sets a padding; None if the function does not support the padding.

        Args:
            value: "same", "valid", or the padding on both sides of each spatial axis; None if no
                padding gives the output.
        """
        phrase = None if value is None else self.names.pad(value)
        pairs = value if isinstance(value, str) or value is None else tuple((p, p) for p in value)
        return phrase and Fix({"padding": pairs}, (phrase,))

    def _pads_for(self, axes: list[_Axis]) -> tuple[int, ...] | None:
        """Return the least padding, equal on both sides, with which the input gives the output.

        Return None if the padding would be zero on all axes, or not less than the filter's span.
        """
        pads = []
        for axis, size, span, stride, _ in axes:
            missing = (self._size("output_shape", axis) - 1) * stride + span - size
            pads.append(max(-(-missing // 2), 0))
        fits = all(pad < span for pad, (_, _, span, *_) in zip(pads, axes, strict=True))
        return tuple(pads) if fits and any(pads) else None  # another fix offers zeros, as "valid"

    def _strides_for(self, axes: list[_Axis]) -> Any:
        """Return the least stride with which the input gives the output; None if there is none.

        The stride is equal on all axes if possible, and has the form that the function takes.
        """
        ranges, steps = [], [step for *_, step, _ in axes]
        for axis, size, span, _, total in axes:
            output = self._size("output_shape", axis)
            room = size - 1 if total is None else size + total - span
            if output == 1 and room == 0:
                ranges.append(range(1, MOST_STRIDE))
            elif output > 1 and room > 0:
                ranges.append(range(room // output + 1, min(room // (output - 1), MOST_STRIDE) + 1))
        if len(ranges) != len(axes) or not all(ranges):
            return None
        least = max(strides.start for strides in ranges)
        if all(least in strides for strides in ranges):
            return self._entries((least,) * len(ranges))
        pairs = zip(ranges, steps, strict=True)
        return self._entries(
            tuple(step if step in strides else strides.start for strides, step in pairs)
        )

    def _taps(self) -> list[int]:
        return [self._size("filter_shape", axis) for axis in SPATIAL_AXES[self.rank]]

    def _outputs(self) -> _Fixes:
        """Yield fixes that fit the filter to the output or bias, or the output to the filter."""
        filters = self._size("filter_shape", "O")
        bias = _integers(self.given.get("bias_shape") or ())
        if bias and len(bias) == 1 and bias[0] > 0:
            yield self._resized("filter_shape", {"O": bias[0]})
        if self.y is not None:
            channels = self._size("output_shape", "C")
            if channels != filters and min(channels, filters) > 0:
                yield self._resized("filter_shape", {"O": channels})
                yield self._resized("output_shape", {"C": filters})

    def _fitting_inputs(self) -> dict[str, tuple[int, range]]:
        """Return the input sizes that give the output, for axes whose input size does not.

        The result has the nearest such size and the range of all such sizes, keyed by axis.
        """
        fitting = {}
        for axis, size, span, stride, pads in self._axes():
            output, is_same = self._size("output_shape", axis), pads is None
            first = (output - 1) * stride + (1 if is_same else span - (pads or 0))
            sizes = range(max(first, 1), max(first + stride, 1))
            if output > 0 and sizes and size not in sizes:
                fitting[axis] = min(max(size, sizes[0]), sizes[-1]), sizes
        return fitting

    def _axes(self) -> Iterator[_Axis]:
        """Yield an _Axis per spatial axis; yield nothing if an argument is not valid."""
        strides, dilations, pads = self._spatial("stride"), self._spatial("dilation"), self._pads()
        if strides is None or dilations is None or self.x is None:
            return
        for place, axis in enumerate(SPATIAL_AXES[self.rank]):
            span = (self._size("filter_shape", axis) - 1) * dilations[place] + 1
            total = None if pads is None else sum(pads[place])
            yield axis, self._size("input_shape", axis), span, strides[place], total

    def _axes_with_outputs(self) -> list[_Axis]:
        """Return the spatial axes; an empty list unless x and y are known and not empty."""
        if not self.layout or self.x is None or self.y is None or min(*self.x, *self.y) < 1:
            return []
        return list(self._axes())

    def _spatial(self, key: str) -> tuple[int, ...] | None:
        """Return stride or dilation per spatial axis; None if it is not valid."""
        value = self.given.get(key)
        values = _integers(value if _is_list(value) else [1 if value is None else value])
        if values is None or min(values, default=0) < 1:
            return None
        if self.names.entries == "all":
            fits = len(values) == len(self.layout)
            return _entries(values, self.layout, SPATIAL_AXES[self.rank]) if fits else None
        values = values * self.rank if len(values) == 1 else values
        return values if len(values) == self.rank else None

    def _pads(self) -> list[tuple[int, int]] | None:
        """Return the padding per spatial axis; None for SAME, or if it is not valid."""
        value = self.given.get("padding", 0)
        if isinstance(value, str):
            sides = _integers(self.given.get("sides") or ())  # explicit_paddings of raw_ops
            if value == "EXPLICIT" and sides and len(sides) == 2 * len(self.layout):
                pairs = zip(sides[::2], sides[1::2], strict=True)
                axes = dict(zip(self.layout, pairs, strict=True))
                return [axes[axis] for axis in SPATIAL_AXES[self.rank]]
            return [(0, 0)] * self.rank if value.lower() == "valid" else None
        entries = list(value) if _is_list(value) else [value] * self.rank
        values = [_integers(entry if _is_list(entry) else [entry, entry]) for entry in entries]
        if len(values) != self.rank or not all(pair and len(pair) == 2 for pair in values):
            return None
        return [(pair[0], pair[1]) for pair in values if pair]

    def _windows(self) -> _Fixes:
        """Yield fixes that make the filter fit into the padded input."""
        pads, dilations = self._pads(), self._spatial("dilation")
        if pads is None or dilations is None:
            return
        axes = {
            axis: (size + total, span - size - total)
            for axis, size, span, _, total in self._axes()
            if total is not None and span > size + total
        }
        if not axes:
            return
        order = SPATIAL_AXES[self.rank]
        taps = {axis: self._size("filter_shape", axis) for axis in axes}
        every = list(self._axes())
        is_plain = all(step == 1 and span % 2 for _, _, span, step, _ in every)
        if not any(map(any, pads)) and max(dilations) > 1 and is_plain:
            yield self._padded(tuple((span - 1) // 2 for _, _, span, *_ in every))  # keeps the size
        if "padding" not in self.names.absent:
            missing = {axis: more for axis, (_, more) in axes.items()}
            padded = tuple(
                (before, after + missing.get(axis, 0))
                for axis, (before, after) in zip(order, pads, strict=True)
            )
            yield Fix({"padding": padded}, (self._padding_phrase(missing),))
        elif all(before == after for before, after in pads):
            more = {axis: -(-entry[1] // 2) for axis, entry in axes.items()}
            sides = tuple(
                pair[0] + more.get(axis, 0) for axis, pair in zip(order, pads, strict=True)
            )
            yield self._padded(sides)
        inputs = {axis: self._size("input_shape", axis) + axes[axis][1] for axis in axes}
        phrase = f"use {self.names.any(self.names.x)} of at least {self._sizes_text(inputs)}"
        yield self._resized("input_shape", inputs, phrase)
        steps = dict(zip(order, dilations, strict=True))
        largest = {axis: (axes[axis][0] - 1) // steps[axis] + 1 for axis in axes}
        phrase = f"use {self.names.any(self.names.w)} of at most {self._sizes_text(largest)}"
        yield self._resized("filter_shape", largest, phrase)
        if min(taps.values()) > 1:
            fitting = {axis: (axes[axis][0] - 1) // (taps[axis] - 1) for axis in axes}
            changed = tuple(fitting.get(axis, step) for axis, step in steps.items())
            yield Fix(
                {"dilation": self._entries(changed)},
                (f"use a dilation of at most {self._sizes_text(fitting)}",),
            )


def offer(error: ConvError, call: Call, check: Callable[[Fix], None]) -> None:
    """Add suggested fixes that ``check`` accepts to the error of a call."""
    fixes = _working(check, call, error.candidates or ())
    if fixes or error.fixes:  # replaces fixes from a nested call, which has fewer arguments
        error.offer([fix.phrases for fix in fixes])


def _working(check: Callable[[Fix], None], call: Call, candidates: Sequence[Fix]) -> list[Fix]:
    """Return the fixes that ``check`` accepts, or pairs of fixes if no single fix works.

    Args:
        check: function that raises ConvError or ConvTypeError for a fix that does not work.
        call: the invalid call.
        candidates: further fixes to try, from the error.
    """

    def works(fix: Fix) -> bool:
        try:
            check(fix)
        except (ConvError, ConvTypeError):
            return False
        return True

    orders, others = list(call.orders()), _known(call.others())
    others = [*others, *candidates] if "input_shape" in call.sizes else [*candidates, *others]
    limit = call.filter_score()
    # A filter with as many taps on each axis is hardly one of another shape in another order.
    plausible = (fix for fix in orders if limit[0] > 1 or call.after(fix).filter_score()[0] == 1)
    swaps = _distinct(filter(works, plausible), MOST_ALIKE)
    rules = _distinct(filter(works, _known(call.rules())), MOST_ALIKE)
    changes = _distinct([*rules, *filter(works, [*others, *_known(call.steps())])], MOST_OTHERS)
    if swaps or changes:
        likely = [
            fix
            for fix in swaps
            if call.after(fix).filter_score() <= limit
            and not ("filter_shape" in fix.changes and fix.changes.keys() & _DATA_SHAPES)
        ]
        unlikely = [fix for fix in swaps if fix not in likely]
        data = [fix for fix in likely if fix.changes.keys() - {"filter_shape", "filter_format"}]
        groups = filter(works, _known(call.depthwise()))
        ordered = [*data, *groups, *likely, *changes, *unlikely]
        return _distinct(ordered, MOST_ALIKE + MOST_OTHERS)
    pairs = (
        both
        for first in (*orders, *others)
        for second in _second_fixes(call, first)
        if not (call.layout and first.changes.keys() & second.changes.keys())
        and works(both := _combined(first, second))
    )
    return _distinct(pairs, MOST_ALIKE)


def _second_fixes(call: Call, first: Fix) -> Iterator[Fix]:
    """Yield fixes to try together with ``first``: the fixes of the call as changed by ``first``."""
    after = call.after(first)
    limit = call.filter_score()
    if call.layout:
        if after.filter_score() <= limit:
            yield from _known(after.others())
    elif after.layout:  # an axis was added or removed, and the axes of x may be in another order
        for fix in after.orders():
            if after.after(fix).filter_sizes() == after.filter_sizes():
                yield fix


def _known(fixes: Iterable[Fix | None]) -> list[Fix]:
    return [fix for fix in fixes if fix is not None]


def _distinct(fixes: Iterable[Fix], most: int) -> list[Fix]:
    """Return the first ``most`` fixes; skip fixes that include all changes of an earlier fix."""
    distinct: list[Fix] = []
    for fix in fixes:
        entries = fix.changes.items()
        if not any(other.changes.items() <= entries for other in distinct):
            distinct.append(fix)
        if len(distinct) == most:
            break
    return distinct


def _combined(first: Fix, second: Fix) -> Fix:
    """Return the fix with the changes of two fixes; ``second`` wins where both set an argument."""
    again = {phrase[0] for phrase in second.phrases if not isinstance(phrase, str)}
    phrases = (
        phrase for phrase in first.phrases if isinstance(phrase, str) or phrase[0] not in again
    )
    return Fix({**first.changes, **second.changes}, (*phrases, *second.phrases))


def _is_list(value: Any) -> bool:
    return hasattr(value, "__iter__") and not isinstance(value, (str, bytes))


def _integers(values: Any) -> tuple[int, ...] | None:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError:
        return None


def _entries(values: Sequence[int], order: str, letters: str) -> tuple[int, ...]:
    return tuple(values[order.index(letter)] for letter in letters)


def _ends(word: Any) -> tuple[bool, str]:
    """Return whether a format begins with O, and its last letter.

    Together they identify its axis order for any number of spatial axes.
    """
    text = word.upper() if isinstance(word, str) else ""
    return text.startswith("O"), text[-1:]


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _interval(sizes: range) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
