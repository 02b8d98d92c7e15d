"""Random cases, drawn with hypothesis; the first option of a draw is the simplest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cupyconv.cpu import choice
from cupyconv.planning import families
from tests import agreement
from tests.activations import ACTIVATIONS
from tests.families import FAMILY_LAYERS, SIZES

from .cases import (
    ADDENDS,
    DATA_FORMATS,
    FILTER_FORMATS,
    OPERATIONS,
    PART,
    Case,
    KernelRun,
    NumpyRun,
    View,
)
from .checking import problem_of
from .oracle import DTYPES, Geometry, IllegalError, can_overlap, geometry, result_shape

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
FAMILIES = tuple(name for name, family in families.FAMILIES.items() if family.on_gpu)
PASSES = ("forward", "backprop_input", "backprop_filter")

MOST_ELEMENTS = 1 << 16
"""Largest number of elements of a tensor (hand-set)."""

MOST_PHASES = 64
"""Largest number of stride phases of the input gradient (hand-set)."""

HOSTILE_PADDED = 8
"""Factor by which layers with large paddings may exceed the limit of products."""

SUMS = {"float16": 2**24, "bfloat16": 2**24, "float32": 2**24, "float64": 2**53}
"""Largest n such that all integers up to n are exact in the precision of the sums, by dtype."""

LARGEST = {"float16": 1000, "bfloat16": 100, "float32": 1000, "float64": 10**6}
"""Largest integer value, by dtype; integers up to it are exact in the dtype and in TF32."""

DECADE = {"float16": 2, "bfloat16": 4, "float32": 4, "float64": 4}
"""Largest decade of values, by dtype."""

ROUNDS = 4
"""Sets of data and views per layer on the kernels."""

ILLEGAL = 0.1
"""Fraction of layers that are changed to be illegal."""


class Draw:
    """Draws of one layer; hypothesis shrinks them to zeros and first options.

    hypothesis draws integers of at most 128 values uniformly, and others mostly small.
    """

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def randint(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))

    def one(self, options: Sequence[Any]) -> Any:
        return options[self.randint(0, len(options) - 1)]

    def random(self) -> float:
        return (self.randint(0, 99) + self.randint(0, 99) / 100) / 100

    def permutation(self, count: int) -> Sequence[int]:
        return self._draw(st.permutations(range(count)))

    def chance(self, share: float) -> bool:
        return self.randint(0, 99) >= 100 - round(100 * share)


def numpy_cases(draw: Draw) -> Iterator[Case]:
    """Yield all runs of one layer on NumPy: every operation, by every method that supports it."""
    layer = draw_layer(draw, draw.one((500, 500, 4000, 4000, 4000, 30_000, 100_000)))
    base, found = draw_case(draw, layer, draw.one(DTYPES))
    if draw.chance(ILLEGAL):
        yield spoiled(draw, base)
        return
    problem = problem_of(base, found)
    # Blocks of a few bytes are fast enough only for few products.
    small = [size for size, most in ((1, 500), (3000, 5000)) if found.macs <= most]
    block = draw.one((None, None, 30_000, *small))
    for operation in OPERATIONS:
        case = replace(base, operation=operation)
        case = replace(case, **_of_operation(draw, case, found))
        for method in _methods(problem, operation):
            yield replace(case, run=NumpyRun(method, block))


def _methods(problem: Any, operation: str) -> list[str]:
    if operation == "conv_backprop_bias":
        return ["auto"]
    pass_ = operation.removeprefix("conv_").replace("transpose", "backprop_input")
    named = [method.name for method in choice.methods(problem, pass_)]
    return ["auto", *(named if operation != "conv_transpose" else ()), "reference"]


def kernel_cases(draw: Draw) -> Iterator[Case]:
    """Yield runs of one layer on the kernels: every operation by "auto" or one family.

    The layer runs several times with other data and views; most runs then find their kernels built.
    """
    impl, arch = draw.one((*FAMILIES, "auto", "auto")), draw.one(ARCHITECTURES)
    if "hopper" in impl:
        arch = "sm_90a"
    for _ in range(30):
        dtype = draw.one(("float16", "float16", *DTYPES))
        precision = draw.one(("ieee", "ieee", "tf32"))
        layer = draw_layer(draw, draw.one((2000, 8000, 8000, 40_000)), impl)
        if impl in ("auto", "cuda-generic"):
            break
        problem = problem_of(replace(layer, dtype=dtype), geometry(layer))
        if agreement.fits(problem, impl, arch, precision):
            break
    tile = draw.randint(0, 7) if draw.chance(0.15) else None
    for _ in range(ROUNDS):
        base, found = draw_case(draw, layer, dtype, on_gpu=True)
        settings = {
            "policy": draw.one(("first-in", "reverse", "random")),
            "timing": draw.one(("late", "early", "any")),
            "seed": draw.randint(1, 1000),
            "preempt_period": draw.one((0, 0, 64)),
        }
        base = replace(base, run=KernelRun(impl, arch, precision, settings, tile))
        if draw.chance(ILLEGAL):
            case = spoiled(draw, base)
            if case.bad_out != "shared":  # the emulator computes on copies, which share no memory
                yield case
            continue
        for operation in OPERATIONS:
            case = replace(base, operation=operation)
            yield replace(case, **_of_operation(draw, case, found))


# -- layers ----------------------------------------------------------------------------------------


def draw_layer(draw: Draw, most_macs: int, family: str = "") -> Case:
    """Draw a legal layer that ``family`` mostly supports; ``most_macs`` limits its products."""
    style = draw.one((*["any"] * 6, "common", "large", *["hostile"] * (0 if family else 2)))
    most = most_macs if style == "any" else max(most_macs, 30_000)
    for _ in range(20):
        case = _layer(draw, family, style)
        try:
            found = geometry(case)
        except IllegalError:
            continue
        elements = max(prod(shape) for shape in found.shapes.values())
        phases = prod(found.stride) if family else 1  # NumPy omits empty phases
        macs = found.macs // HOSTILE_PADDED if style == "hostile" else found.macs
        if macs <= most and elements <= MOST_ELEMENTS and phases <= MOST_PHASES:
            return case
    return Case("conv_forward", 1, 1, 1, 1, (3,), (2,))


def _layer(draw: Draw, family: str, style: str) -> Case:
    """Draw a layer, which may be illegal.

    Args:
        family: kernel family that should support the layer, or "".
        style: "any"; "common" for layers as in networks, which methods and families compute fast;
            "large" for many elements and few terms; or "hostile" for large strides, dilations and
            paddings.
    """
    rank = draw.one((1, 1, 2, 2, 2, 3) if style != "common" else (1, 2, 2, 2, 2, 3))
    if style == "common":
        taps, stride, dilation = (3,) * rank, draw.one((1, 1, 1, 2)), 1
    elif style == "large":
        taps = tuple(draw.one((1, 1, 2, 3)) for _ in range(rank))
        stride = _sizes(draw, rank, (1, 2, 2, 3, 4))
        dilation = _sizes(draw, rank, (1, 1, 2, 10))
    elif style == "hostile":
        taps = tuple(draw.one((1, 2, 3, 3, draw.randint(1, 30))) for _ in range(rank))
        stride = _sizes(draw, rank, (1, 1, 2, 8, 63, 320, draw.randint(8, 320)))
        dilation = _sizes(draw, rank, (1, 8, 18, 63, 320, draw.randint(8, 320)))
    else:
        most = {1: 12, 2: 7, 3: 4}[rank]
        taps = tuple(draw.one((1, draw.randint(1, most))) for _ in range(rank))
        if draw.chance(0.3):
            taps = taps[:1] * rank
        stride = _sizes(draw, rank, (1, 1, 1, 1, 2, 2, 3, 4, 5, 7, 16))
        dilation = _sizes(draw, rank, (1, 1, 1, 1, 1, 2, 3, 4, 10))
    reach = [(t - 1) * d + 1 for t, d in zip(taps, _tuple(dilation, rank), strict=True)]
    common_paddings = (1, "same", "valid", 0, 2)
    padding = draw.one(common_paddings) if style == "common" else _padding(draw, reach)
    if style == "hostile":
        padding = tuple(
            draw.one((0, one // 2, one - 1, draw.randint(0, one + 99))) for one in reach
        )
    extra = {1: 40, 2: 12, 3: 6}[rank]
    sizes = []
    for axis in range(rank):
        missing = max(reach[axis] - _both_sides(padding, axis), 1)
        if isinstance(padding, str) and padding.lower() != "valid":
            missing = 1
        sizes.append(missing + int(extra * draw.random() ** draw.one((1, 2, 4))))
    if draw.chance(0.05):
        sizes[draw.randint(0, rank - 1)] += draw.randint(0, 60 * (4 - rank))
    groups, channels, filters = _channels(draw, family)
    if style == "common" and not family and draw.chance(0.7):
        groups, channels, filters = 1, draw.one((8, 9, 16, 24)), draw.one((8, 12, 16))
    if style == "large" and not family:
        groups, many, few = 1, draw.randint(16, 300), draw.one((1, 1, 2, 4))
        channels, filters = draw.one(((many, few), (few, many)))
    data_format = draw.one(DATA_FORMATS[rank])
    filter_format = draw.one(FILTER_FORMATS[rank])
    spelled = 1 - draw.random()
    if spelled < 0.1:
        last = data_format.endswith("C")
        data_format = "channels_last" if last else draw.one((None, "channels_first"))
        filter_format = draw.one((None, filter_format))
    elif spelled < 0.15:
        data_format, filter_format = data_format.lower(), filter_format.lower()
    batch = 0 if draw.chance(0.02) else draw.one((1, 1, 1, 2, 2, 3, 5, 9))
    return Case(
        "conv_forward",
        batch,
        groups * channels,
        groups * filters,
        channels,
        tuple(sizes),
        taps,
        stride,
        dilation,
        padding,
        groups,
        data_format,
        filter_format,
    )


def _sizes(draw: Draw, rank: int, options: Sequence[int]) -> Any:
    """Draw one size for all axes, or one per axis."""
    if draw.chance(0.4):
        return draw.one(options)
    return tuple(draw.one(options) for _ in range(rank))


def _tuple(value: Any, rank: int) -> tuple[int, ...]:
    return (value,) * rank if isinstance(value, int) else tuple(value)


def _padding(draw: Draw, reach: Sequence[int]) -> Any:
    """Draw a padding in any form; some exceed the filter."""
    form = 1 - draw.random()
    if form < 0.3:
        return draw.one(("valid", "same", "same", "same_lower", "same_lower", "SAME"))
    beyond = draw.one((0, 0, 0, 1, 4))

    def side(reach: int) -> int:
        return draw.randint(0, min(reach - 1 + beyond, 12))

    if form < 0.45:
        return side(min(reach))
    if form < 0.6:
        return tuple(side(one) for one in reach)
    if form < 0.65:
        return tuple(draw.one((side(one), (side(one), side(one)))) for one in reach)
    return tuple((side(one), side(one)) for one in reach)


def _both_sides(padding: Any, axis: int) -> int:
    if isinstance(padding, str):
        return 0
    side = padding if isinstance(padding, int) else padding[axis]
    return 2 * side if isinstance(side, int) else sum(side)


def _channels(draw: Draw, family: str) -> tuple[int, int, int]:
    """Draw the number of groups, and the channels and filters per group."""
    few = (1, 2, 3, 4, 5, 7, 8)
    layers = FAMILY_LAYERS.get(family)
    if layers and (channels := layers.draw_channels(draw)):
        return channels
    form = 1 - draw.random()
    if form < 0.2:  # depthwise
        return draw.one((*few, 16, 24, 40)), 1, draw.one((1, 1, 1, 2, 3))
    if form < 0.4:
        return draw.one(few), draw.one(few), draw.one(few)
    if form < 0.5:
        wide = draw.randint(100, 1024)
        return 1, *draw.one(((wide, draw.one(few)), (draw.one(few), wide)))
    return 1, draw.one(SIZES), draw.one(SIZES)


# -- data and views --------------------------------------------------------------------------------


def draw_case(draw: Draw, layer: Case, dtype: str, on_gpu: bool = False) -> tuple[Case, Geometry]:
    """Draw data, views, bias, addend and activation for a layer.

    Returns:
        the case and its geometry.
    """
    found = geometry(layer)
    kind = draw.random()
    values, poke = "integers", None
    is_complex, whole = dtype in PART, dtype
    dtype = PART.get(dtype, dtype)  # each part of a complex sum has two products per term
    most_terms = found.most_terms * (2 if is_complex else 1)
    size = _largest_integer(draw, dtype, most_terms)
    if kind > 0.65:
        values = "normal" if kind < 0.75 else "decades"
        size = DECADE[dtype]
    if 0.5 < kind < 0.65:
        room = (SUMS[dtype] - most_terms * size**2) // size
        top = min(max(room, 1).bit_length() - 1, 14 if dtype == "float16" else 60)
        poke = (draw.one(("x", "w", "dy")), draw.random(), 2.0 ** draw.randint(0, top))
    elif draw.chance(0.08) and not is_complex:  # complex products spread infinity and NaN further
        poke = (draw.one(("x", "w", "dy")), draw.random(), draw.one((np.nan, np.inf, -np.inf)))
    activation = None
    dtype = whole
    if poke is None and draw.chance(0.1 if on_gpu else 0.25) and not is_complex:
        activation = draw.one(("relu", *ACTIVATIONS))
    axes = len(found.data)
    views = {}
    for name in ("x", "w", "dy", *ADDENDS.values()):
        if draw.chance(0.6):
            views[name] = draw_view(draw, axes, on_gpu, is_input=True, dtype=dtype)
    for name in ("bias", "shift"):
        if draw.chance(0.3):
            views[name] = draw_view(draw, 1, on_gpu, is_input=True, dtype=dtype)
    if draw.chance(0.35):
        views["out"] = draw_view(draw, axes, on_gpu, is_input=False, dtype=dtype)
    if poke is not None and poke[0] in views:  # must occur once, or sums would not be exact
        views[poke[0]] = replace(views[poke[0]], repeated=(), overlap=None)
    case = replace(
        layer,
        dtype=dtype,
        dy=found.shapes["dy"],
        bias=layer.filters if draw.chance(0.4) else None,
        shift=layer.channels if draw.chance(0.4) else None,
        adds=draw.chance(0.2),
        activation=activation,
        views=views,
        values=values,
        size=size,
        seed=draw.randint(0, 10**6 - 1),
        poke=poke,
    )
    return case, found


def _largest_integer(draw: Draw, dtype: str, terms: int) -> int:
    """Draw a bound on integers for which sums of this many products are exact."""
    room = int((SUMS[dtype] // (2 * terms)) ** 0.5)
    fitting = [size for size in (1, 2, 3, 3, 8, 100, 1000, 10**6) if size <= LARGEST[dtype]]
    return draw.one([size for size in fitting if size <= room] or [1])


def draw_view(draw: Draw, axes: int, on_gpu: bool, is_input: bool, dtype: str) -> View:
    """Draw any view; for the emulator, one whose elements are aligned."""

    def some(share: float) -> tuple[int, ...]:
        return tuple(axis for axis in range(axes) if draw.chance(share))

    made: dict[str, Any] = {}
    if draw.chance(0.35):
        made["order"] = tuple(draw.permutation(axes))
    if draw.chance(0.3):
        made["steps"] = tuple(draw.one((1, 1, 2, 3)) for _ in range(axes))
    if draw.chance(0.4):
        made["reversed"] = some(0.4)
    if draw.chance(0.3):
        made["lead"] = draw.randint(0, 9)
    if not on_gpu and draw.chance(0.1):
        made["shift"] = draw.one((1, 2, 3, 4))
    if is_input:
        if draw.chance(0.15):
            made["repeated"] = some(0.3)
        if draw.chance(0.15):
            made["overlap"] = (draw.randint(0, axes - 1), draw.randint(1, 9))
        made["swapped"] = not on_gpu and dtype != "bfloat16" and draw.chance(0.08)
        made["read_only"] = draw.chance(0.1)
        if not on_gpu and draw.chance(0.15):
            # PyTorch's tensors have no negative strides, shifts, or other byte order.
            for name in ("reversed", "shift", "swapped", "read_only"):
                made.pop(name, None)
            made["lazy"] = draw.one(("negated", "conjugated") if dtype in PART else ("negated",))
    return View(**made)


def _of_operation(draw: Draw, case: Case, found: Geometry) -> dict[str, Any]:
    """Draw the arguments that only the case's operation has."""
    if case.operation == "conv_forward":
        return {}
    if case.operation != "conv_transpose":
        return {"activation": None, "bias": None, "shift": None, "adds": False}
    changes: dict[str, Any] = {"bias": None}
    if draw.chance(0.6):
        changes["output_padding"] = _output_padding(draw, case, found)
    return changes


def _output_padding(draw: Draw, case: Case, found: Geometry) -> Any:
    """Draw the argument that selects the result's size: output_padding in any form, or a shape."""
    added = []
    rules = zip(
        found.sizes,
        found.taps,
        found.outputs,
        found.stride,
        found.dilation,
        found.pads,
        strict=True,
    )
    same = isinstance(case.padding, str) and case.padding.lower().startswith("same")
    for size, taps, outputs, stride, dilation, pads in rules:
        smallest = (outputs - 1) * stride + 1
        if not same:
            smallest += (taps - 1) * dilation - sum(pads)
        added.append(size - smallest)
    usual = [stride - 1 if same else 0 for stride in found.stride]
    if added == usual and draw.chance(0.5):
        return None
    return added[0] if len(set(added)) == 1 and draw.chance(0.5) else tuple(added)


# -- illegal cases ---------------------------------------------------------------------------------


def spoiled(draw: Draw, base: Case) -> Case:
    """Return a case with a change that usually makes it illegal; the oracle decides if it is."""
    case = replace(base, operation=draw.one(OPERATIONS))
    if case.operation not in ADDENDS:
        case = replace(case, activation=None, adds=False)
    has_bias = draw.chance(0.5)
    forward, transposed = (
        has_bias and case.operation == name for name in ("conv_forward", "conv_transpose")
    )
    case = replace(
        case,
        bias=case.filters if forward else None,
        shift=case.channels if transposed else None,
    )
    for _ in range(20):
        change = draw.one((_spoil_number, _spoil_number, _spoil_number, _spoil_word, _spoil_array))
        changed = change(draw, case)
        shapes = changed.operands.values()
        if all(min(shape, default=0) >= 0 for shape in shapes):  # no array has a negative size
            return changed
    return replace(case, groups=case.groups + 1)


def _spoil_number(draw: Draw, case: Case) -> Case:
    """Change one number of a case."""
    names = ("batch", "channels", "filters", "slice", "groups", "bias", "shift", "dy")
    name = draw.one((*names, "sizes", "taps", "stride", "dilation", "padding", "output_padding"))
    value = getattr(case, name)
    if name == "output_padding":
        case = replace(case, operation="conv_transpose", activation=None, bias=None, shift=None)
        case = replace(case, adds=False)
        value = 0
    if value is None or isinstance(value, str):
        return replace(case, groups=case.groups + 1)
    new = draw.one((-1, 0, 0, 1, 2, 7))
    if name in ("dy", "sizes", "taps", "padding") and not isinstance(value, int):
        at = draw.randint(0, len(value) - 1)
        old = value[at]
        changed = draw.one((new, old + 1, old - 1)) if isinstance(old, int) else (old[0], new)
        if draw.chance(0.1):
            return replace(case, **{name: value[:-1]})
        return replace(case, **{name: (*value[:at], changed, *value[at + 1 :])})
    if not isinstance(value, int):
        return replace(case, **{name: draw.one((value[:-1], (*value, 1), (new, *value[1:])))})
    return replace(case, **{name: draw.one((new, value + 1, value - 1))})


def _spoil_word(draw: Draw, case: Case) -> Case:
    """Set the padding or a format to a value that is mostly unknown, or of another rank."""
    name = draw.one(("padding", "data_format", "filter_format"))
    words = {
        "padding": ("sane", "full", "", "samelower"),
        "data_format": ("NCHW", "NHWC", "NCW", "NDHWC", "CHWN", "NHCW", ""),
        "filter_format": ("OIHW", "HWIO", "OWI", "IOHW", "channels_last", "DHWIO"),
    }[name]
    return replace(case, **{name: draw.one(words)})


def _spoil_array(draw: Draw, case: Case) -> Case:
    """Give an array another dtype, or make ``out`` invalid."""
    if draw.chance(0.3):
        names = sorted(case.operands)
        return replace(case, stranger=draw.one(names)) if len(names) > 1 else case
    views = {**case.views, "out": case.views.get("out", View())}
    shape = result_shape(geometry(case), case.operation)
    overlapping = ("overlapping", "shared") if can_overlap(shape) else ()
    bad = draw.one(("shape", "read-only", *overlapping))
    return replace(case, views=views, bad_out=bad)
