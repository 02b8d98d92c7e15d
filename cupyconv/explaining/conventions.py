"""Conventions of a layer: the order of axes, padding, stride and other choices of a program.

A convention relates three tensors x, w and y, as ``ConvProblem`` does: along a spatial axis, output
p reads input ``p * stride - pad + r * dilation`` with tap r.  The arrays of the caller are in one
of the three roles.  In a transposed layer, the layer's x has the role y, and its y has the role x.

A reading names the axes of an array, one letter per axis: N, C and the spatial axes for x and y; O,
I and the spatial axes for w.  G and M instead of O and I are the channels and the multiplier of
TensorFlow's depthwise filters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv import operations
from cupyconv.formats import SPATIAL_AXES
from cupyconv.problem import ConvAxis

ROLES = {
    ("y", False): {"x": "x", "w": "w", "y": "y"},
    ("y", True): {"x": "y", "w": "w", "y": "x"},
    ("dx", False): {"x": "dx", "w": "w", "y": "dy"},
    ("dx", True): {"x": "dy", "w": "w", "y": "dx"},
    ("dw", False): {"x": "x", "w": "dw", "y": "dy"},
    ("dw", True): {"x": "dy", "w": "dw", "y": "x"},
}
"""Tensor of the layer in each role, keyed by the result and by whether the layer is transposed."""

TIES: tuple[Mapping[str, int], ...] = (
    {"x": 0, "w": 0, "y": 0},
    {"x": 1, "y": 1},
    {"x": 2, "w": 2},
    {"w": 1, "y": 2},
)
"""Axes of the views of x, w and y that have the same groups, images, channels and filters."""

MODES = ("zeros", "reflect", "edge", "symmetric", "wrap")
"""Values of the padding: zeros, or values of x as in the modes of ``numpy.pad``."""

BEYOND = 3
"""Largest number of positions by which a convention exceeds the usual paddings on each side: inputs
that it leaves out, or zeros beyond the full padding, span - 1 (hand-set)."""

DILATIONS = (*range(1, 9), 10, 12, 16, 18, 24, 32, 36, 48, 64, 128, 256, 512)
"""Dilations that are tried (hand-set)."""


Pairs = tuple[tuple[int, int], ...]
"""Padding before and after each spatial axis."""


class Rule(NamedTuple):
    """Rule of one spatial axis: stride, dilation, and padding before the input.

    A negative padding leaves out inputs.
    """

    stride: int
    dilation: int
    pad: int


class Finish(NamedTuple):
    """Steps after the sum of products: scale, bias and activation.

    Attributes:
        scale: factor of every sum.
        bias: "none", "given" (the passed bias), or "fitted" (values that fit the result).
        activation: "relu", "silu", "gelu" or None.
    """

    scale: float = 1.0
    bias: str = "none"
    activation: str | None = None


PLAIN = Finish()
"""No step after the sum of products."""


def usual_conjugation(result: str, is_transposed: bool) -> tuple[bool, bool]:
    """Return which factors the gradient of a real loss conjugates: the operand that is not dy."""
    return (True, False) if is_transposed and result == "dw" else (False, result != "y")


@dataclass(frozen=True)
class Order:
    """Order of the axes of x, w and y, and of the channels in their groups.

    Attributes:
        x, w, y: readings of the arrays in these roles.
        groups: number of groups.
        flipped: whether the filter is flipped, per spatial axis.
        interleaved: roles whose channel c belongs to group c mod groups, instead of to group
            c // (channels per group).
        conjugated: whether the first and the second factor of the products are conjugated; the
            factors are (x, w) for y, (y, w) for x, and (y, x) for w.
    """

    x: str
    w: str
    y: str
    groups: int
    flipped: tuple[bool, ...]
    interleaved: tuple[str, ...] = ()
    conjugated: tuple[bool, bool] = (False, False)

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return len(self.flipped)

    def view(self, role: str, array: np.ndarray) -> np.ndarray:
        """Return a view of an array with separate axes for groups and channels of a group.

        The axes are (group, image, channel of the group, spatial axes) for x and y, and (group,
        filter of the group, channel of the group, spatial axes) for w.
        """
        if role == "w":
            return self._filter_view(array)
        reading: str = getattr(self, role)
        view = _ordered(array, reading, "NC" + SPATIAL_AXES[self.rank])
        return np.moveaxis(self._split(view, 1, role), 1, 0)

    def _filter_view(self, array: np.ndarray) -> np.ndarray:
        letters = SPATIAL_AXES[self.rank]
        if "G" in self.w:
            view = np.expand_dims(_ordered(array, self.w, "GM" + letters), 2)
        else:
            view = self._split(_ordered(array, self.w, "OI" + letters), 0, "w")
        steps = [slice(None, None, -1 if flip else 1) for flip in self.flipped]
        index: tuple[Any, ...] = (..., *steps)
        return view[index]

    def _split(self, view: np.ndarray, axis: int, role: str) -> np.ndarray:
        """Split a channel axis into the axes (group, channel of the group)."""
        shape, groups = view.shape, self.groups
        inner = shape[axis] // groups
        if role in self.interleaved:
            split = view.reshape(*shape[:axis], inner, groups, *shape[axis + 1 :])
            return split.swapaxes(axis, axis + 1)
        return view.reshape(*shape[:axis], groups, inner, *shape[axis + 1 :])


def _ordered(array: np.ndarray, reading: str, target: str) -> np.ndarray:
    """Return the array with its axes in the order ``target``; missing axes have size 1."""
    view = array.transpose([reading.index(letter) for letter in target if letter in reading])
    return view[tuple(slice(None) if letter in reading else None for letter in target)]


def sizes(reading: str, shape: tuple[int, ...]) -> dict[str, int]:
    """Return the size of each axis of a reading."""
    return dict(zip(reading, shape, strict=True))


def data_readings(axes: int, rank: int) -> list[str]:
    """Return the readings of x or y with this number of axes."""
    s = SPATIAL_AXES[rank]
    readings = {0: [s], 1: [f"C{s}", f"{s}C", f"N{s}"], 2: [f"NC{s}", f"N{s}C"]}
    return readings.get(axes - rank, [])


def filter_readings(axes: int, rank: int) -> list[str]:
    """Return the readings of w with this number of axes, the commonest first."""
    s = SPATIAL_AXES[rank]
    return {
        0: [s],
        1: [f"O{s}", f"{s}O", f"I{s}", f"{s}I"],
        2: [f"OI{s}", f"{s}IO", f"O{s}I", f"{s}GM", f"IO{s}", f"{s}OI", f"I{s}O", f"GM{s}"],
    }.get(axes - rank, [])


def swaps(reading: str, rank: int) -> list[str]:
    """Return the readings that differ from a reading by the exchange of two spatial axes."""
    letters = SPATIAL_AXES[rank]
    pairs = [(a, b) for a, b in product(letters, letters) if a < b]
    return [reading.translate(str.maketrans(a + b, b + a)) for a, b in pairs]


def group_count(x: str, w: str, y: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of groups with which three arrays fit together; 0 if they do not fit."""
    a, b, c = sizes(x, shapes["x"]), sizes(w, shapes["w"]), sizes(y, shapes["y"])
    if a.get("N", 1) != c.get("N", 1):
        return 0
    channels, filters = a.get("C", 1), c.get("C", 1)
    if "G" in b:
        return b["G"] if b["G"] == channels and b["G"] * b["M"] == filters else 0
    inner = b.get("I", 1)
    if channels % inner or b.get("O", 1) != filters or filters % (channels // inner):
        return 0
    return channels // inner


# -- the rules of an axis --------------------------------------------------------------------------


def axis_rules(
    inputs: int, taps: int, outputs: int, dilations: tuple[int, ...] = ()
) -> Iterator[tuple[int, int, range]]:
    """Yield each stride and dilation with which the sizes of an axis fit, and the paddings before.

    Args:
        dilations: dilations to try in addition to DILATIONS.
    """
    for dilation in dict.fromkeys((*DILATIONS, *dilations)):
        extent = (taps - 1) * dilation + 1
        if dilation > 1 and taps == 1:
            break
        unusual = dilation >= inputs or extent > 2 * inputs + BEYOND
        if dilation > 4 and unusual and dilation not in dilations:
            continue
        room = extent - 1 + BEYOND
        strides = range(1, 2)
        if outputs > 1:
            most = (inputs + 2 * room - extent) // (outputs - 1)
            strides = range(1, min(most, inputs + 1) + 1)
        for stride in strides:
            # The padding before and the padding after add up to ``total``.
            total = (outputs - 1) * stride + extent - inputs
            # A single output does not determine the stride, so any number of inputs may be unread.
            unread = max(stride, dilation) - 1 + BEYOND if outputs > 1 else inputs
            pads = range(max(-BEYOND, total - room), min(room, total + unread) + 1)
            if pads:
                yield stride, dilation, pads


def span(rule: Rule, taps: int) -> int:
    """Return the extent of a window."""
    return (taps - 1) * rule.dilation + 1


def missing_after(rule: Rule, inputs: int, taps: int, outputs: int) -> int:
    """Return how many positions after the input the last window reads; negative for unread ones."""
    return (outputs - 1) * rule.stride + span(rule, taps) - rule.pad - inputs


def tape(positions: np.ndarray, size: int, mode: str) -> np.ndarray:
    """Return the index of the input at each padded position; -1 for a zero."""
    if mode == "edge":
        return positions.clip(0, size - 1)
    if mode == "wrap":
        return positions % size
    if mode == "zeros":
        return np.where((positions >= 0) & (positions < size), positions, -1)
    period = 2 * size if mode == "symmetric" else max(2 * size - 2, 1)
    folded = positions % period
    return np.where(folded < size, folded, period - folded - (mode == "symmetric"))


def read(array: np.ndarray, tapes: list[np.ndarray]) -> np.ndarray:
    """Return the values that tapes read along the last axes, in float64 or complex128."""
    first = array.ndim - len(tapes)
    result = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    for axis, index in enumerate(tapes, first):
        result = result.take(np.maximum(index, 0), axis)
        if (index < 0).any():
            result[(slice(None),) * axis + (index < 0,)] = 0
    return result


# -- a convention ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Convention:
    """Complete rule by which a result follows from its operands.

    Attributes:
        result: name of the result: "y", "dx" or "dw".
        is_transposed: whether the layer is transposed.
        order: order of the axes and of the channels.
        rules: rule of each spatial axis.
        finish: steps after the sum.
        mode: values of the padding, one of MODES.
    """

    result: str
    is_transposed: bool
    order: Order
    rules: tuple[Rule, ...]
    finish: Finish = PLAIN
    mode: str = "zeros"

    @property
    def names(self) -> Mapping[str, str]:
        """Tensor of the layer in each role."""
        return ROLES[self.result, self.is_transposed]

    @property
    def role(self) -> str:
        """Role of the result."""
        return next(role for role, name in self.names.items() if name == self.result)

    @property
    def factors(self) -> tuple[str, str]:
        """Roles of the first and of the second factor of each product."""
        return {"y": ("x", "w"), "x": ("y", "w"), "w": ("y", "x")}[self.role]

    def views(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the arrays, keyed by the layer's names, as views keyed by role."""
        return {role: self.order.view(role, arrays[name]) for role, name in self.names.items()}

    def spatial(self, arrays: Mapping[str, np.ndarray]) -> list[tuple[int, int, int]]:
        """Return the numbers of inputs, taps and outputs of each spatial axis."""
        views = self.views(arrays)
        return list(zip(*(views[role].shape[3:] for role in "xwy"), strict=True))

    def paddings(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Pairs]:
        """Return the paddings with the same values here, keyed by name, the commonest first."""
        return paddings(self.rules, self.spatial(arrays), self.is_transposed)

    def with_finish(self, **changes: Any) -> Convention:
        """Return this convention with other steps after the sum."""
        return replace(self, finish=self.finish._replace(**changes))

    def tapes(
        self, inputs: tuple[int, ...], taps: tuple[int, ...], outputs: tuple[int, ...]
    ) -> Any:
        """Return, per axis, the inputs at the positions from the first window to the last."""
        return [
            tape(np.arange((p - 1) * rule.stride + span(rule, r)) - rule.pad, h, self.mode)
            for rule, h, r, p in zip(self.rules, inputs, taps, outputs, strict=True)
        ]

    def fingerprint(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Return a value that is equal for conventions with equal results for every input.

        The value has, per axis, the memory steps of the arrays, and for a spatial axis the
        positions in the three arrays that belong together.
        """
        views, names = self.views(arrays), self.names
        axes: list[Any] = []
        for tie in TIES:
            steps = ((names[role], _step(views[role], axis)) for role, axis in tie.items())
            axes.append(tuple(sorted((name, step) for name, step in steps if step)))
        for axis, (rule, (h_, r_, p_)) in enumerate(
            zip(self.rules, self.spatial(arrays), strict=True)
        ):
            p, r = np.indices((p_, r_))
            h = tape(p * rule.stride + r * rule.dilation - rule.pad, h_, self.mode)
            used = h >= 0
            if views["w"].strides[axis + 3] < 0:
                r = r_ - 1 - r
            columns = {
                names[role]: (abs(_step(views[role], axis + 3)), each[used])
                for role, each in {"x": h, "w": r, "y": p}.items()
            }
            order = sorted(columns)
            triples = np.array([columns[name][1] for name in order])
            triples = triples[:, np.lexsort(triples)]
            along = tuple((name, columns[name][0]) for name in order)
            if triples.shape[1] != 1 or any(step for _, step in along):  # not an axis of size 1
                axes.append((along, triples.shape, triples.tobytes()))
        pairs = zip(self.factors, self.order.conjugated, strict=True)
        conjugated = (
            names[role]
            for role, is_conjugated in pairs
            if is_conjugated and views[role].dtype.kind == "c"
        )
        return tuple(sorted(filter(None, axes), key=repr)), tuple(sorted(conjugated)), self.finish

    def operands(self, views: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the views, with the conjugated factors conjugated."""
        changed = dict(views)
        for role, conjugate in zip(self.factors, self.order.conjugated, strict=True):
            if conjugate:
                changed[role] = changed[role].conj()
        return changed

    def sums(self, views: Mapping[str, np.ndarray], squared: bool = False) -> np.ndarray:
        """Return the sums of products in float64, before ``finish``.

        Args:
            views: parts of the views that ``views`` returns; of the result's role only the shape is
                used.
            squared: whether to sum the squared absolute values of the products.
        """
        role, (inputs, taps, outputs) = self.role, (views[key].shape[3:] for key in "xwy")
        tapes = self.tapes(inputs, taps, outputs)
        parts = self.operands({key: views[key] for key in self.factors})
        if squared:
            parts = {key: np.abs(part).astype("f8") ** 2 for key, part in parts.items()}
        if "x" in parts:
            parts["x"] = read(parts["x"], tapes)
        kind = np.complex128 if any(part.dtype.kind == "c" for part in parts.values()) else "f8"
        for key, part in parts.items():
            groups, first, second, *space = part.shape
            if key == "w":
                part = part.reshape(groups * first, second, *space)
            else:
                part = np.moveaxis(part, 0, 1).reshape(first, groups * second, *space)
            parts[key] = np.ascontiguousarray(part, kind)
        words: dict[str, Any] = {
            "stride": tuple(rule.stride for rule in self.rules),
            "dilation": tuple(rule.dilation for rule in self.rules),
            "groups": self.order.groups,
        }
        shape: Any = views[role].shape
        groups, first, second, *space = shape
        if role != "y":  # the library conjugates the second factor of a gradient
            parts[self.factors[1]] = parts[self.factors[1]].conj()
        with np.errstate(all="ignore"):
            if role == "w":
                own = (groups * first, second, *taps)
                dw = operations.conv_backprop_filter(parts["x"], own, parts["y"], **words)
                return dw.reshape(shape)
            if role == "y":
                sums = operations.conv_forward(parts["x"], parts["w"], **words)
            else:
                padded = (first, groups * second, *map(len, tapes))
                sums = operations.conv_backprop_input(padded, parts["w"], parts["y"], **words)
                for axis, (index, size) in enumerate(zip(tapes, inputs, strict=True), 2):
                    sums = _written(sums, index, size, axis)
        return np.moveaxis(sums.reshape(first, groups, second, *space), 1, 0)

    def products(
        self, views: Mapping[str, np.ndarray], index: tuple[int, ...]
    ) -> tuple[int, Iterator[tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Return the number of products of an element, and the indices of their two factors.

        Args:
            index: index of the element in the view of the result's role.
        """
        group, a, b, *space = index
        inner = {"y": views["w"].shape[2], "x": views["w"].shape[1], "w": views["x"].shape[1]}
        along = [self._pairs(views, axis, place) for axis, place in enumerate(space)]

        def pairs() -> Iterator[Any]:
            every: Any = product(range(inner[self.role]), *along)
            for i, *places in every:
                first, second = zip(*places, strict=True)
                channels = {"y": (a, i, b, i), "x": (a, i, i, b), "w": (i, a, i, b)}[self.role]
                yield (group, *channels[:2], *first), (group, *channels[2:], *second)

        return inner[self.role] * prod(map(len, along)), pairs()

    def _pairs(
        self, views: Mapping[str, np.ndarray], axis: int, position: int
    ) -> list[tuple[int, int]]:
        """Return the positions of the two factors along an axis, for a position of the result."""
        rule = self.rules[axis]
        inputs, taps, outputs = (views[key].shape[3 + axis] for key in "xwy")
        p, r = np.arange(outputs)[:, None], np.arange(taps)
        if self.role == "y":
            p = p[position : position + 1]
        elif self.role == "w":
            r = r[position : position + 1]
        h = tape(p * rule.stride + r * rule.dilation - rule.pad, inputs, self.mode)
        used = h == position if self.role == "x" else h >= 0
        places = {"x": h, "w": np.broadcast_to(r, h.shape), "y": np.broadcast_to(p, h.shape)}
        first, second = (places[role][used].tolist() for role in self.factors)
        return list(zip(first, second, strict=True))


def _step(view: np.ndarray, axis: int) -> int:
    """Return the memory step of an axis; 0 for an axis of size 1."""
    return view.strides[axis] if view.shape[axis] > 1 else 0


def _written(full: np.ndarray, index: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Return the sums of the values that belong to each input along an axis."""
    moved = np.moveaxis(full, axis, 0)
    result = np.zeros((size, *moved.shape[1:]), full.dtype)
    inside = index >= 0
    if len(set(index[inside].tolist())) == inside.sum():
        result[index[inside]] = moved[inside]
    else:  # padding that copies values
        np.add.at(result, index[inside], moved[inside])
    return np.moveaxis(result, 0, axis)


# -- padding by name -------------------------------------------------------------------------------


def paddings(
    rules: tuple[Rule, ...], spatial: list[tuple[int, int, int]], is_transposed: bool
) -> dict[str, Pairs]:
    """Return the paddings with the same values here, keyed by name, the commonest first.

    The padding after an axis may have several values, because windows need not read it.

    Args:
        spatial: numbers of inputs, taps and outputs of each axis.
        is_transposed: whether inputs may be as many as output_padding permits.
    """
    axes = list(zip(rules, spatial, strict=True))
    before = [rule.pad for rule in rules]
    found = {}
    for word in dict.fromkeys((axes_text(before), "same", "same_lower", "causal", "full")):
        pairs = tuple(
            named_pair(word, rule, h, r) or (rule.pad, rule.pad) for rule, (h, r, _) in axes
        )
        if word in ("causal", "full") and not any(map(any, pairs)):
            continue
        for (b, a), (rule, size) in zip(pairs, axes, strict=True):
            is_same, least = word.startswith("same"), missing_after(rule, *size)
            most = max(rule.dilation * (is_transposed and not is_same), rule.stride) - 1
            is_determined = size[2] > 1 or is_same
            if b != rule.pad or b < 0 or a < least or (is_determined and a > least + most):
                break
        else:
            found[word] = pairs
    if not found:
        after = [missing_after(rule, *size) for rule, size in axes]
        ends = tuple(
            (rule.pad, a if size[2] > 1 and a < 1 - rule.stride else max(a, 0))
            for a, (rule, size) in zip(after, axes, strict=True)
        )
        found[axes_text(ends)] = ends
    return found


def named_pair(word: str, rule: Rule, inputs: int, taps: int) -> tuple[int, int] | None:
    """Return a padding of an axis by its name; None for numbers that differ between axes."""
    if word in ("same", "same_lower"):
        axis = ConvAxis("W", inputs, taps, rule.stride, rule.dilation, 0, 0, word)
        axis = axis.of_input(inputs)
        return axis.pad_before, axis.pad_after
    extent = span(rule, taps) - 1
    if word in ("causal", "full"):
        return extent, extent if word == "full" else 0
    return (int(word), int(word)) if word.isdigit() else None


def axes_text(value: Any) -> str:
    """Return an argument for all axes or per axis as text, such as "1", "1,2" or "0:1"."""
    if not isinstance(value, (tuple, list)):
        return str(value).lower()
    texts = [":".join(map(str, v)) if isinstance(v, (tuple, list)) else str(v) for v in value]
    return texts[0] if len(set(texts)) == 1 else ",".join(texts)
