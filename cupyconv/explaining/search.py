"""Search for the convention of a layer whose operands and result are known.

The search first compares shapes.  For each order of axes whose shapes fit, and each stride and
dilation, it computes the sums of products at all positions of a window for a few images and
channels.  Every padding, crop and output size reads its values from this window, so the candidates
share the computation.  Candidates that agree on a sample are compared in float64 as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import nsmallest
from itertools import combinations, product
from math import inf, prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv import arrays
from cupyconv.cpu.activations import activate
from cupyconv.cpu.scratch import MOST_BYTES
from cupyconv.cpu.threads import with_one_blas_thread
from cupyconv.explaining import conventions
from cupyconv.explaining.conventions import MODES, PLAIN, Convention, Finish, Order, Rule
from cupyconv.explaining.values import MOST_FLOPS
from cupyconv.formats import SPATIAL_AXES
from cupyconv.markup import MOST_LINES

MOST_WORK = MOST_FLOPS / 2
"""Largest number of multiply-adds of the search for one result.  Like a comparison with a whole
result, it takes at most as long as a pass that an explanation computes."""

MOST_JOBS = 6_000
"""Largest number of orders of axes, strides and dilations that are tried (hand-set)."""

MOST_COMPARED = MOST_BYTES // 8
"""Largest number of elements of each tensor in one comparison, and of a matrix of windows: float64
numbers in the scratch memory of a pass."""

MOST_COMPARISONS = 400
"""Largest number of candidates that are compared as a whole (hand-set)."""

BLOCK = {1: 256, 2: 24, 3: 8}
"""Largest extent of the sampled block, keyed by the number of spatial axes (hand-set)."""

SAMPLES = 64
"""Number of sampled elements (hand-set)."""

LEAST_EVIDENCE = 32.0
"""Smallest number of bits of a result from which a convention is concluded (hand-set).

A search tries up to a million conventions, or 20 bits; the others are a margin.
"""

ROUGH = 0.05
"""Largest relative difference of a sampled element that agrees (hand-set)."""

NEARBY = 1.5
"""Largest additional distance at which other conventions are sought after one fits, and at which
plain sums are sought before a scale or an unknown bias (hand-set)."""


class Level(NamedTuple):
    """Precision of an agreement.

    Attributes:
        name: the precision in words.
        roundoff: unit roundoff.
        grows: whether errors grow with the square root of the number of products, because every
            addition is rounded.
    """

    name: str
    roundoff: float
    grows: bool = True


LEVELS = (
    Level("exact", 0.0),
    Level("float64", 2.0**-53),
    Level("float32", 2.0**-24),
    Level("float16", 2.0**-11, False),
    Level("float16 sums", 2.0**-11),
    Level("bfloat16", 2.0**-8, False),
)
"""Precisions, from the finest to the coarsest; TF32 has the roundoff of float16."""

_LEVEL_OF = {
    "float64": 1,
    "complex128": 1,
    "float32": 2,
    "complex64": 2,
    "float16": 3,
    "bfloat16": 5,
}
"""Place in LEVELS of the precision that a result of a dtype has; integers are exact."""


@dataclass(frozen=True)
class Comparison:
    """Result of the comparison of a convention with the values of a program.

    Attributes:
        convention: the convention, with the values of a fitted bias and scale.
        compared, agreeing: numbers of elements that were compared, and that agree.
        level: precision at which all elements agree; None if some do not agree.
        largest: largest absolute difference, and ``worst`` the index where it is.
        first: index of the first element that differs; None if all agree.
        value, expected: the program's value and the convention's value at ``first``, or at
            ``worst`` if all agree.
        bias: fitted bias, one value per channel; None without it.
        error: root mean square of the differences, relative to that of the values.
        is_similar: whether many elements agree that are not zero.
    """

    convention: Convention
    compared: int
    agreeing: int
    level: Level | None
    largest: float
    worst: tuple[int, ...]
    first: tuple[int, ...] | None
    value: complex
    expected: complex
    bias: np.ndarray | None = None
    error: float = 0.0
    is_similar: bool = False

    @property
    def fits(self) -> bool:
        """Whether all compared elements agree."""
        return self.level is not None

    @property
    def place(self) -> int:
        """Place of ``level`` in LEVELS; larger than all places without a level."""
        return LEVELS.index(self.level) if self.level else len(LEVELS)

    @property
    def is_fitted(self) -> bool:
        """Whether the scale or the bias is chosen to fit the result."""
        return self.convention.finish.scale != 1 or self.convention.finish.bias == "fitted"

    @property
    def merit(self) -> tuple[float, float]:
        """Sort key that grows with the agreement, for comparisons that do not fit."""
        return self.agreeing / max(self.compared, 1), -self.error


class Options(NamedTuple):
    """Rules of an axis with one stride and one dilation."""

    stride: int
    dilation: int
    pads: Sequence[int]


class _Job(NamedTuple):
    """Orders and rules that share one computation: all paddings of a stride and a dilation."""

    is_transposed: bool
    order: Order
    options: tuple[Options, ...]
    mode: str = "zeros"


class _Near(NamedTuple):
    """A candidate, the share of the sample that agrees, and the negative relative error."""

    share: float
    closeness: float
    convention: Convention


_AGREEING = 0.9
"""Smallest share of a sample that agrees if a convention fits (hand-set)."""

_SIMILAR = 0.4
"""Smallest share of nonzero elements that agree only if a convention nearly fits (hand-set)."""


@dataclass
class Search:
    """Search for the conventions that give a result.

    Attributes:
        result: "y", "dx" or "dw".
        tensors: operands and result, keyed by the layer's names, as contiguous arrays.
        bias: bias, or None.
        dtypes: name of the dtype that each tensor had, keyed like ``tensors``.
        claim: convention that the caller's options describe; None if they do not fit the shapes.
        is_transposed, dilations, activation: whether the caller's layer is transposed, its
            dilations, and its activation.
        fits: comparisons of the conventions that fit, the nearest to the claim first.
        nearest: comparison of the best convention if none fits.
        claimed: comparison of the claim; None without a claim.
        tried: number of conventions that were compared with the sample.
        skipped: number of combinations of order, stride and dilation that were left out, because
            they take too long.
        too_many: whether more conventions fit than are listed.
        blocks: sampled elements, keyed by the layout of the result's view.
    """

    result: str
    tensors: Mapping[str, np.ndarray]
    bias: np.ndarray | None
    claim: Convention | None
    is_transposed: bool
    dtypes: Mapping[str, str]
    dilations: tuple[int, ...] = (1,)
    activation: str | None = None
    fits: list[Comparison] = field(default_factory=list)
    nearest: Comparison | None = None
    claimed: Comparison | None = None
    tried: int = 0
    skipped: int = 0
    too_many: bool = False
    _limit: float = inf
    blocks: dict[Any, _Block] = field(default_factory=dict)
    _seen: set[Any] = field(default_factory=set)
    _nearest: list[_Near] = field(default_factory=list)

    def evidence(self, level: Level) -> float:
        """Return the bits of the different values of the result that an agreement confirms."""
        values = self.tensors[self.result]
        sizes = np.unique(np.abs(values[np.isfinite(values) & (values != 0)]))[:64]
        bits = 20.0 if level.roundoff == 0 else -np.log2(8 * level.roundoff)
        if len(sizes) and (sizes % 1 == 0).all():
            bits = min(bits, float(np.log2(1 + sizes[-1])))
        return float(bits) * len(sizes)

    @cached_property
    def usual(self) -> int:
        """Place in LEVELS of the coarsest dtype of the tensors."""
        return max(_LEVEL_OF.get(dtype, 0) for dtype in self.dtypes.values())

    def run(self, advance: Callable[[float], None]) -> None:
        """Search; call ``advance`` with the share of the search that is done."""
        if self.claim is not None:
            self.claimed = self._weigh(0.0, self.claim)
        jobs = self._sorted_jobs()
        plain, other = self._finishes()
        later: list[tuple[float, _Near]] = []
        for distance, sample in self._samples(jobs, MODES[:1], advance):
            for near in sample.candidates(plain):
                self._consider(distance, near)
            if not self._is_found:
                found = sample.candidates(other)
                later += [(distance, near) for near in found if near.share >= _AGREEING]
            while later and distance > later[0][0] + NEARBY and not self._is_found:
                self._consider(*later.pop(0))
        for distance, near in [] if self._is_found else later:
            self._consider(distance, near)
        for distance, sample in [] if self.fits else self._samples(jobs, MODES[1:], advance):
            for near in sample.candidates(plain):
                self._consider(distance, near)
        for near in [] if self.fits else self._nearest:
            self._weigh(inf, near.convention)
        # Conventions that fit only roughly do not count beside those that fit to rounding.
        finest = min((fit.place for fit in self.fits), default=0)
        fits = [fit for fit in self.fits if fit.place <= max(finest, self.usual)]
        # Wherever plain sums fit roughly, fitted ones do, too: they count if they are much closer.
        errors = [fit.error for fit in fits if not fit.is_fitted]
        if finest > self.usual and errors:
            fits = [fit for fit in fits if not fit.is_fitted or 2 * fit.error < min(errors)]
        self.fits = sorted(fits, key=lambda fit: self.distance(fit.convention))

    @property
    def _is_found(self) -> bool:
        """Whether a convention fits at the precision of the arrays."""
        return any(fit.place <= self.usual for fit in self.fits)

    def _samples(
        self,
        jobs: list[tuple[float, _Job]],
        modes: tuple[str, ...],
        advance: Callable[[float], None],
    ) -> Iterator[tuple[float, _Sample]]:
        """Yield the samples of the jobs within the limits of distance and work."""
        work = 0.0
        for place, (distance, job) in enumerate(jobs):
            advance(place / len(jobs))
            if distance > self._limit or self.too_many:
                return
            role = Convention(self.result, job.is_transposed, job.order, ()).role
            for mode in modes:
                if mode != "zeros" and (distance > 2 or role == "x"):
                    continue
                sample = _Sample(self, job._replace(mode=mode))
                if work + sample.cost > MOST_WORK:
                    self.skipped += 1
                    continue
                work += sample.cost
                yield distance, sample
                self.tried += sample.tried

    def _consider(self, distance: float, near: _Near) -> None:
        """Compare a candidate with the whole result if it agrees on the sample."""
        if near.share >= _AGREEING:
            self._weigh(distance, near.convention)
        else:
            self._nearest = sorted([*self._nearest, near], reverse=True, key=lambda n: n[:2])[:4]

    def _weigh(self, distance: float, convention: Convention) -> Comparison | None:
        """Compare a convention with the whole result, once for all conventions that are equal."""
        same = convention.fingerprint(self.tensors)
        if same in self._seen or len(self._seen) >= MOST_COMPARISONS:
            return None
        if len(self.fits) >= MOST_LINES:
            self.too_many = True
            return None
        self._seen.add(same)
        found = self.compare(convention)
        if any(fit.convention == found.convention for fit in self.fits):
            return None  # a fitted scale of 1
        if found.level is None:
            if self.nearest is None or found.merit > self.nearest.merit:
                self.nearest = found
            if found.is_similar and convention == self.claim:
                self._limit = 2 * NEARBY
            return found
        if found.place > self.usual and self.evidence(found.level) < LEAST_EVIDENCE:
            return None  # chance explains that few values agree roughly
        self.fits.append(found)
        self._limit = min(self._limit, distance + NEARBY)
        return found

    def _finishes(self) -> tuple[list[Finish], list[Finish]]:
        """Return the common steps after the sum, and others."""
        result = self.tensors[self.result]
        # A scale of 0 stands for one that fits.  Zeros fit any layer with it, or with some bias.
        scaled = [Finish(scale=0.0)] if result.any() else []
        if self.result != "y":
            return [PLAIN], scaled
        is_real = result.dtype.kind != "c"
        biases = ["none"] if self.bias is None else ["given", "none"]
        relu = ["relu"] if is_real and not (result < 0).any() else []
        words = (self.activation, *relu, None)
        plain = list(dict.fromkeys(Finish(1.0, bias, word) for word in words for bias in biases))
        if not scaled:
            return plain, []
        curved = product(biases, ("silu", "gelu") if is_real else ())
        return plain, [
            *scaled,
            *(Finish(1.0, "fitted", word) for word in (None, *relu)),
            *(Finish(1.0, bias, word) for bias, word in curved),
        ]

    # -- candidates --------------------------------------------------------------------------------

    def _sorted_jobs(self) -> list[tuple[float, _Job]]:
        """Return the jobs with their distances from the claim, the nearest first."""
        jobs: list[tuple[float, _Job]] = []
        for is_transposed in (self.is_transposed, not self.is_transposed):
            names = conventions.ROLES[self.result, is_transposed]
            shapes = {role: self.tensors[name].shape for role, name in names.items()}
            seen = set()
            rules: dict[Any, Any] = {}
            for order in self._orders(shapes):
                probe = Convention(self.result, is_transposed, order, ())
                views = probe.views(self.tensors)
                key = tuple(map(_layout, views.values())), order.conjugated
                if key in seen:
                    continue
                seen.add(key)
                spatial = tuple(views[role].shape[3:] for role in "xwy")
                if spatial not in rules:
                    every = self._rules(spatial, order.rank)
                    rules[spatial] = nsmallest(MOST_JOBS, every, key=itemgetter(0))
                base = self._order_distance(order) + 1.5 * (is_transposed != self.is_transposed)
                for extra, options in rules[spatial]:
                    jobs.append((base + extra, _Job(is_transposed, order, options)))
        jobs.sort(key=itemgetter(0))
        self.skipped += len(jobs[MOST_JOBS:])
        return jobs[:MOST_JOBS]

    def _orders(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Order]:
        """Yield the orders of axes with which the shapes fit together."""
        is_complex = any(tensor.dtype.kind == "c" for tensor in self.tensors.values())
        truths = (False, True) if is_complex else (False,)
        conjugations = [(a, b) for a in truths for b in truths]
        for rank in SPATIAL_AXES:
            readings = (
                conventions.data_readings(len(shapes["x"]), rank),
                conventions.filter_readings(len(shapes["w"]), rank),
                conventions.data_readings(len(shapes["y"]), rank),
            )
            for x, w, y in product(*readings):
                groups = conventions.group_count(x, w, y, shapes)
                if not groups:
                    continue
                mixed = _splittable({"x": x, "y": y, "w": w}, groups, shapes)
                shuffles = [c for n in range(len(mixed) + 1) for c in combinations(mixed, n)]
                flips = product((False, True), repeat=rank)
                swaps = (w, *conventions.swaps(w, rank)), (y, *conventions.swaps(y, rank))
                for flipped, conjugated, shuffle, w_, y_ in product(
                    flips, conjugations, shuffles, *swaps
                ):
                    partly = len(set(flipped)) > 1
                    odd = (w_ != w) + (y_ != y) + partly + bool(shuffle)
                    if odd <= 1 or (odd == 2 and w_ != w and y_ != y):
                        yield Order(x, w_, y_, groups, flipped, shuffle, conjugated)

    def _rules(
        self, spatial: tuple[tuple[int, ...], ...], rank: int
    ) -> Iterator[tuple[float, tuple[Options, ...]]]:
        """Yield a distance, and the stride, dilation and paddings of each axis."""
        per_axis: list[dict[tuple[int, int], Sequence[int]]] = []
        for axis, (inputs, taps, outputs) in enumerate(zip(*spatial, strict=True)):
            every = conventions.axis_rules(inputs, taps, outputs, self.dilations)
            grouped: dict[tuple[int, int], Sequence[int]] = {(s, d): pads for s, d, pads in every}
            if self.claim is not None and axis < len(self.claim.rules):
                stride, dilation, pad = self.claim.rules[axis]
                known = grouped.get((stride, dilation), ())
                if pad not in known:
                    grouped[stride, dilation] = (*known, pad)
            per_axis.append(grouped)
        most = {1: 512, 2: 4, 3: 2}[rank]
        usual = {1, *self.dilations}
        for dilations in product(*(sorted({d for _, d in grouped}) for grouped in per_axis)):
            real = {d for d, taps in zip(dilations, spatial[1], strict=True) if taps > 1}
            if len(real) > 1 and not real <= usual and max(real) > most:
                continue
            pairs = list(zip(per_axis, dilations, strict=True))
            steps = (
                sorted({s for s, d in grouped if d == dilation}) for grouped, dilation in pairs
            )
            for strides in product(*steps):
                # One output leaves the stride open, and gives it as 1.
                moved = {s for s, p in zip(strides, spatial[2], strict=True) if p > 1}
                uneven = 3 if rank == 3 or not real <= usual else 16
                if len(moved) > 1 and max(*moved, *real) > uneven:
                    continue
                options = tuple(
                    Options(stride, dilation, grouped[stride, dilation])
                    for stride, (grouped, dilation) in zip(strides, pairs, strict=True)
                )
                yield self._rule_distance(strides, dilations, real), options

    # -- distances ---------------------------------------------------------------------------------

    def _order_distance(self, order: Order) -> float:
        space = SPATIAL_AXES[order.rank]
        claim = None if self.claim is None else self.claim.order
        last = [reading.endswith("C") for reading in (order.x, order.y)]
        if claim is not None:
            wanted = claim.conjugated
            distance = 1.0 * (order.x != claim.x) + 1.0 * (order.w != claim.w)
        else:
            wanted = conventions.usual_conjugation(self.result, self.is_transposed)
            usual = (f"{space}IO", f"{space}GM") if last[0] else (f"OI{space}",)
            distance = 0.5 * last[0] + 1.0 * (order.w not in usual)
        known = (f"OI{space}", f"{space}IO", f"O{space}I", f"{space}GM", space)
        return (
            distance
            + 1.0 * any(order.flipped)
            + 1.0 * (len(set(order.flipped)) > 1)
            + 1.5 * len(order.interleaved)
            + sum(a != b for a, b in zip(order.conjugated, wanted, strict=True))
            + 1.5 * ((space not in order.w) + (space not in order.y) + (last[0] != last[1]))
            + 1.0 * (order.w not in known)
        )

    def _rule_distance(
        self, strides: tuple[int, ...], dilations: tuple[int, ...], real: set[int]
    ) -> float:
        distance = 0.5 * (len(set(strides)) > 1)
        if real and not real <= set(self.dilations):
            distance += 1.0 + (len(real) > 1) + (max(dilations) > 4) + (max(dilations) > 8)
        is_other = self.claim and tuple(rule.stride for rule in self.claim.rules) != strides
        return distance + 0.5 * bool(is_other)

    def distance(self, convention: Convention) -> tuple[float, ...]:
        """Return how far a convention is from the claim and from common conventions."""
        strides, dilations, pads = zip(*convention.rules, strict=True)
        taps = (r for _, r, _ in convention.spatial(self.tensors))
        real = {dilation for dilation, r in zip(dilations, taps, strict=True) if r > 1}
        finish, named = convention.finish, convention.paddings(self.tensors)
        return (
            -float(convention == self.claim),
            self._order_distance(convention.order)
            + 1.5 * (convention.is_transposed != self.is_transposed)
            + self._rule_distance(strides, dilations, real)
            + 1.0 * (":" in next(iter(named)))
            + 0.5 * (finish.bias == "none" and self.bias is not None)
            + 0.5 * (finish.activation != self.activation),
            sum(map(abs, pads)),
        )

    # -- comparison of the whole result ------------------------------------------------------------

    def compare(self, convention: Convention) -> Comparison:
        """Compare a convention with the whole result, or with a part of a large one."""
        parts, places = _part(convention, convention.views(self.tensors))
        role = convention.role
        with np.errstate(all="ignore"):
            sums = convention.sums(parts)
            sizes = np.sqrt(np.abs(convention.sums(parts, squared=True)))
            values = parts[role].astype(np.result_type(parts[role], sums))
            convention, finished, sizes, bias = self._finished(
                convention, values, sums, sizes, places
            )
            level, agrees, error = _level(
                values, finished, sizes, _term_count(convention, parts), self.usual
            )
            distance = _rms(error) / (_rms(values) or 1.0)

        def stored(positions: Any) -> tuple[Any, ...]:
            index = enumerate(np.unravel_index(positions, values.shape))
            whole = tuple(places[a][i] if a in places else i for a, i in index)
            return self.stored(role, convention, whole)

        bad = np.flatnonzero(~agrees)
        at = largest = int(error.argmax())
        if len(bad):
            flat = np.ravel_multi_index(stored(bad), self.tensors[self.result].shape)
            at = int(bad[flat.argmin()])
        real = (values != 0) | (finished != 0)
        similar = bool((agrees & real).sum() > _SIMILAR * max(real.sum(), 8))
        return Comparison(
            convention,
            compared=values.size,
            agreeing=int(agrees.sum()),
            level=level,
            largest=float(error.flat[largest]),
            worst=stored(largest),
            first=stored(at) if len(bad) else None,
            value=values.flat[at].item(),
            expected=finished.flat[at].item(),
            bias=bias,
            error=distance,
            is_similar=level is not None or similar,
        )

    def stored(self, role: str, convention: Convention, index: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the index in the caller's array of an element, or of several, of a view."""
        base = self.tensors[convention.names[role]]
        view = convention.views(self.tensors)[role]
        start = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        offset = start + sum(i * step for i, step in zip(index, view.strides, strict=True))
        places = np.unravel_index(offset // base.itemsize, base.shape)
        return places if np.ndim(offset) else tuple(map(int, places))

    def viewed(self, convention: Convention, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index in the view of the result of an element of the caller's array."""
        shape = self.tensors[self.result].shape
        numbers = np.arange(prod(shape)).reshape(shape)
        view = convention.order.view(convention.role, numbers)
        return tuple(np.argwhere(view == numbers[index])[0].tolist())

    def rounding(self, comparison: Comparison) -> str:
        """Return the formats to which the operands may have been rounded.

        The result is for example "TF32" or "TF32 or float16"; it is empty if no rounding of the
        operands explains the differences.
        """
        convention = comparison.convention
        names = [convention.names[role] for role in convention.factors]
        found = []
        for word, rounded in ROUNDINGS.items():
            tensors = {**self.tensors, **{name: rounded(self.tensors[name]) for name in names}}
            closer = replace(self, tensors=tensors).compare(convention)
            if closer.place <= 2:
                found.append(word.partition(" ")[0])
        return " or ".join(dict.fromkeys(found))

    def _finished(
        self, convention: Convention, values: Any, sums: Any, sizes: Any, places: Any
    ) -> tuple[Convention, Any, Any, np.ndarray | None]:
        """Apply scale, bias and activation, and fit those that are not known."""
        finish, bias = convention.finish, None
        if finish.scale != 1:
            real = np.isfinite(values)
            power = np.vdot(sums[real], sums[real]).real
            fitted = float(np.vdot(sums[real], values[real]).real / (power or 1.0))
            near = (s for s in self.scales(convention) if abs(fitted - s) <= 1e-3 * abs(s))
            scale = next(near, fitted)
            convention = convention.with_finish(scale=scale)
            sums, sizes = sums * scale, sizes * abs(scale)
        if finish.bias == "given":
            add = self.bias_view(convention)
            add = add[:, :, places[2]] if 2 in places else add
        elif finish.bias == "fitted":
            bias = _fitted_bias(values, sums, finish.activation)
            add, bias = bias[:, None, :], bias.ravel()
        if finish.bias != "none":
            add = add.reshape(*add.shape, *(1,) * (sums.ndim - 3))
            sums, sizes = sums + add, sizes + abs(add)
        if finish.activation is not None:
            sums = activate(np.ascontiguousarray(sums), finish.activation)
        return convention, sums, sizes, bias

    def bias_view(self, convention: Convention) -> np.ndarray:
        """Return the given bias with the axes (group, 1, channel) of the result's view."""
        assert self.bias is not None
        bias = self.bias.astype(np.result_type(self.bias, "f8"))
        return convention.order._split(bias, 0, convention.role)[:, None, :]

    def scales(self, convention: Convention) -> dict[float, str]:
        """Return common scales of a result, with the reason for each."""
        views = convention.views(self.tensors)
        groups, images, filters, *outputs = views["y"].shape
        pixels = prod(outputs)
        return {
            0.5: "half the sum",
            2.0: "twice the sum",
            -1.0: "negative sum",
            float(images): "sum where the operands are means over the batch",
            1 / (images * pixels * groups * filters): "mean over all elements of y",
            1 / (images * pixels): "mean over the batch and the output positions",
            1 / pixels: "mean over the output positions",
            1 / images: "mean over the batch",
            1.0: "sum",
        }


def _to_tf32(array: np.ndarray, added: int) -> np.ndarray:
    """Round to the 10 bits of TF32's mantissa, by adding to the bits and clearing 13 of them."""
    parts = array.astype(np.complex64 if array.dtype.kind == "c" else np.float32)
    bits = np.ascontiguousarray(parts).view(np.int32)
    return ((bits + added) & ~0x1FFF).view(parts.dtype).reshape(array.shape)


def _through(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    def rounded(array: np.ndarray) -> np.ndarray:
        if array.dtype.kind == "c":
            return array
        return array.astype(arrays.numpy_dtype(dtype)).astype(np.float32)

    return rounded


ROUNDINGS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "TF32": lambda array: _to_tf32(array, 0x1000),
    "TF32 truncated": lambda array: _to_tf32(array, 0),
    "float16": _through("float16"),
    "bfloat16": _through("bfloat16"),
}
"""Functions that round operands, keyed by format."""


def _layout(view: np.ndarray) -> tuple[Any, ...]:
    steps = tuple(s if n > 1 else 0 for s, n in zip(view.strides, view.shape, strict=True))
    return view.shape, steps


def _splittable(
    readings: Mapping[str, str], groups: int, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return the roles whose channels could be interleaved between the groups."""
    sizes = {role: conventions.sizes(word, shapes[role]) for role, word in readings.items()}
    every = {role: size.get("O" if role == "w" else "C", 1) for role, size in sizes.items()}
    return [role for role, size in every.items() if size > groups > 1]


# -- a sample --------------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Sampled elements of a result: a group, an image (of dw a filter), and several channels.

    Attributes:
        group, first: place on the first two axes of the view.
        seconds: channels.
        begin, shape: start of the block of positions, and shape with the channels.
        places, values: indices in the block of the sampled elements, and their values.
    """

    group: int
    first: int
    seconds: np.ndarray
    begin: list[int]
    shape: tuple[int, ...]
    places: tuple[np.ndarray, ...]
    values: np.ndarray


def _block(view: np.ndarray) -> _Block:
    """Choose sampled elements among the largest of a result."""
    rank = view.ndim - 3
    most, spatial = BLOCK[rank], tuple(range(3, view.ndim))
    with np.errstate(all="ignore"):
        # Every step-th element of large results suffices to choose a part.
        step = max(int((view.size / 1e6) ** (1 / rank)), 1)
        every: Any = (..., *(slice(None, None, step),) * rank)
        some = np.abs(view[every])
        norms = np.nan_to_num(some).astype("f8").sum(spatial)
    group, first = map(int, np.unravel_index(norms.sum(2).argmax(), norms.shape[:2]))
    elements = prod(min(size, most) for size in view.shape[3:])
    wanted = min(max(-(-SAMPLES // elements), 3), 64)
    seconds = np.sort(np.argsort(-norms[group, first], kind="stable")[:wanted])
    values = view[group, first][seconds]
    begin = []
    for axis, size in enumerate(view.shape[3:], 1):
        sums = np.nan_to_num(np.abs(values)).astype("f8")
        sums = sums.sum(tuple(a for a in range(values.ndim) if a != axis))
        total = np.concatenate([[0.0], sums.cumsum()])
        begin.append(int((total[most:] - total[:-most]).argmax()) if size > most else 0)
        values = values.take(range(begin[-1], min(begin[-1] + most, size)), axis)
    flat = values.ravel()
    rng = np.random.default_rng(0)
    half = rng.permutation(np.flatnonzero(np.isfinite(flat) & (flat != 0)))[: SAMPLES // 2]
    rest = rng.permutation(np.flatnonzero(np.isfinite(flat)))
    picked = np.unique(np.concatenate([half, rest[: SAMPLES - len(half)]]))
    wide = np.complex128 if values.dtype.kind == "c" else np.float64
    index = np.unravel_index(picked, values.shape)
    return _Block(group, first, seconds, begin, values.shape, index, flat[picked].astype(wide))


class _Sample:
    """Sampled elements of a result, and their values for all paddings of a job."""

    def __init__(self, search: Search, job: _Job) -> None:
        self.search, self.job, self.tried = search, job, 0
        self.probe = Convention(search.result, job.is_transposed, job.order, (), mode=job.mode)
        self.views = self.probe.views(search.tensors)
        self.role = self.probe.role
        view = self.views[self.role]
        key = _layout(view), view.__array_interface__["data"][0]
        if key not in search.blocks:
            search.blocks[key] = _block(view)
        self.block = search.blocks[key]

    def _step(self, options: Options) -> int:
        """Return how far an element is from the next in the window."""
        return {"y": options.stride, "w": options.dilation, "x": 1}[self.role]

    @cached_property
    def _extents(self) -> list[tuple[int, int]]:
        """First position and extent of the window along each axis."""
        extents = []
        sizes = zip(self.job.options, self.block.begin, self.block.shape[1:], strict=True)
        for options, begin, size in sizes:
            step, pads = self._step(options), (min(options.pads), max(options.pads))
            low, high = pads if self.role == "x" else (-pads[1], -pads[0])
            extents.append((begin * step + low, (size - 1) * step + high - low + 1))
        return extents

    @cached_property
    def cost(self) -> float:
        """Number of multiply-adds of the window."""
        products = _term_count(self.probe, self.views)
        return float(products * prod(e for _, e in self._extents) * len(self.block.seconds))

    def _compute(self) -> None:
        """Compute the sums for each chosen channel at each position of the window."""
        _, first, kept, *_ = self.block
        views = self.probe.operands(self.views)
        x, w, y = (views[role][self.block.group] for role in "xwy")
        sizes = zip(x.shape[2:], w.shape[2:], y.shape[2:], strict=True)
        tapes, steps = [], []
        for (begin, extent), (stride, dilation, _), (h, r, p) in zip(
            self._extents, self.job.options, sizes, strict=True
        ):
            number, step = (p, stride) if self.role == "w" else (r, dilation)
            steps.append(step)
            reach = (number - 1) * step
            if self.role == "x":  # outputs, with stride - 1 zeros between two of them
                index = np.arange(begin - reach, begin + extent)
                index = np.where(index % stride == 0, index // stride, -1)
                tapes.append(conventions.tape(index, p, "zeros"))
            else:
                index = np.arange(begin, begin + extent + reach)
                tapes.append(conventions.tape(index, h, self.job.mode))
        # The axes are the contracted one, the chosen channels in one of the arrays, and space.
        if self.role == "y":
            source, weights = x[first][:, None], w[kept].swapaxes(0, 1)
        elif self.role == "x":
            source, weights = y[first][:, None], np.flip(w[:, kept], tuple(range(2, w.ndim)))
        else:
            source, weights = x[:, kept], y[:, first, None]
        source, rank = conventions.read(source, tapes), len(steps)
        extents = tuple(extent for _, extent in self._extents)
        strides = [step * size for step, size in zip(steps, source.strides[2:], strict=True)]
        windows = as_strided(
            source,
            (*source.shape[:2], *extents, *weights.shape[2:]),
            (*source.strides, *strides),
            writeable=False,
        )
        # Windows are copied to one matrix for a few positions of the first axis at once.
        rows = max(MOST_COMPARED // max(windows.size // extents[0], 1), 1)
        axes: Any = [0, *range(2 + rank, 2 + 2 * rank)], [0, *range(2, 2 + rank)]
        weights = weights.astype(np.result_type(weights, np.float64))
        parts = [
            np.tensordot(windows[:, :, begin : begin + rows], weights, axes)
            for begin in range(0, extents[0], rows)
        ]
        self.window = np.moveaxis(np.concatenate(parts, 1), -1, 0).reshape(len(kept), *extents)

    @cached_property
    def _sums(self) -> np.ndarray:
        """Sums of the sampled elements, one row per combination of paddings."""
        with_one_blas_thread(self._compute)
        index, begin = self.block.places, self.block.begin
        rank = len(begin)
        flat = index[0]
        for axis, options in enumerate(self.job.options):
            pads = np.array(options.pads)[:, None] * (1 if self.role == "x" else -1)
            positions = (begin[axis] + index[axis + 1]) * self._step(options)
            place = positions + pads - self._extents[axis][0]
            shape = [len(pads) if a == axis else 1 for a in range(rank)]
            flat = flat * self.window.shape[axis + 1] + place.reshape(*shape, -1)
        return self.window.ravel()[flat].reshape(-1, len(self.block.values))

    def candidates(self, finishes: list[Finish]) -> list[_Near]:
        """Return the best conventions of the job on the sample."""
        if not self.block.values.size:
            return []
        with np.errstate(all="ignore"):
            self.tried += len(self._sums) * len(finishes)
            return [near for finish in finishes for near in self._best(finish)]

    def _best(self, finish: Finish) -> list[_Near]:
        sums, values, channels = self._sums, self.block.values, self.block.places[0]
        if finish.scale != 1 and len(values) < 4:
            sums = sums / self.views["y"].shape[1]  # too few values to fit a scale: a mean
        elif finish.scale != 1:
            power = (np.abs(sums) ** 2).sum(1)
            fitted = (sums.conj() * values).sum(1) / np.where(power, power, 1)
            sums = sums * fitted[:, None]
        if finish.bias == "given":
            groups, _, seconds = self.views[self.role].shape[:3]
            if len(self.search.bias) != groups * seconds:  # type: ignore[arg-type]
                return []
            add = self.search.bias_view(self.probe)[self.block.group, 0]
            sums = sums + add[self.block.seconds][channels]
        elif finish.bias == "fitted":
            used = values > 0 if finish.activation else np.ones(len(values), bool)
            member = (channels[:, None] == np.arange(len(self.block.seconds))) & used[:, None]
            counts = member.sum(0)
            if counts.max(initial=0) < 4:
                return []
            means = (values - sums) @ member / np.maximum(counts, 1)
            sums = sums + means[:, channels]
        if finish.activation is not None:
            sums = activate(np.array(sums), finish.activation)
        scale = np.maximum(np.abs(values), _rms(values))
        error = np.abs(sums - values)
        share = (error <= ROUGH * scale).mean(1)
        places = np.flatnonzero(share >= min(_AGREEING, share.max()))
        rough = np.sqrt((error[places] ** 2).mean(1)) / (_rms(scale) or 1.0)
        order = np.lexsort((rough, -share[places]))[: MOST_LINES if share.max() >= _AGREEING else 1]
        found = []
        for place, distance in zip(places[order], rough[order], strict=True):
            chosen = np.unravel_index(place, [len(each.pads) for each in self.job.options])
            rules = tuple(
                Rule(each.stride, each.dilation, each.pads[int(i)])
                for each, i in zip(self.job.options, chosen, strict=True)
            )
            convention = replace(self.probe, rules=rules, finish=finish)
            found.append(_Near(float(share[place]), -float(distance), convention))
        return found


# -- precision -------------------------------------------------------------------------------------


def _part(
    convention: Convention, views: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Return the parts of the views to compare, and the kept positions of the result's axes."""
    w, y = (views[role].shape for role in "wy")
    role, parts = convention.role, dict(views)
    places: dict[int, Any] = {}
    limits = [MOST_COMPARED / max(view.size, 1) for view in views.values()]
    limit = min(MOST_FLOPS / max(2 * y[1] * prod(w) * prod(y[3:]), 1), 1.0, *limits)
    for axis in (1, 2):
        size = views[role].shape[axis]
        if limit >= 1 or size == 1:
            continue
        keep = max(int(size * limit), 1)
        limit *= size / keep
        places[axis] = np.unique(np.linspace(0, size - 1, keep).astype(int))
        tie = next(tie for tie in conventions.TIES if tie.get(role) == axis)
        for each, along in tie.items():
            parts[each] = parts[each].take(places[axis], along)
    return parts, places


def _term_count(convention: Convention, views: Mapping[str, Any]) -> int:
    """Return the largest number of products of an element."""
    w, y = views["w"].shape, views["y"].shape
    return {"y": prod(w[2:]), "x": w[1] * prod(w[3:]), "w": y[1] * prod(y[3:])}[convention.role]


def _level(
    values: Any, expected: Any, sizes: Any, terms: int, usual: int
) -> tuple[Level | None, Any, Any]:
    """Return the finest level at which all values agree, which values agree, and the errors.

    The bound of a level is its roundoff times a multiple of the root of the sum of squared
    products, plus a multiple of the value.

    Args:
        sizes: root of the sum of the squared products, per value.
        terms: number of products of a value.
        usual: place in LEVELS of the result's dtype.  If some values disagree, the others agree at
            this level.
    """
    error = np.abs(values - expected)
    error = np.where(values == expected, 0.0, error)
    error = np.where(np.isfinite(error), error, inf)
    magnitude = np.abs(expected)
    sizes = np.maximum(sizes, _rms(sizes))
    magnitude = np.maximum(magnitude, _rms(magnitude))

    def agreeing(level: Level) -> Any:
        # Sums of many 16-bit numbers are too rough to recognise a convention.
        counted = min(terms, 1 << 14) if level.roundoff > 2.0**-20 else terms
        more = counted**0.5 if level.grows else 0.0
        bound = level.roundoff * ((8 + 2 * more) * sizes + (4 + more) * magnitude)
        if level.name == "float16":
            bound = bound + 2.0**-24  # the smallest subnormal of float16
        return (error <= bound) & (error < inf)

    for level in LEVELS:
        agrees = agreeing(level)
        if agrees.all():
            return level, agrees, error
    return None, agreeing(LEVELS[max(usual, 2)]), error


def _rms(array: Any) -> float:
    finite = np.abs(array[np.isfinite(array)])
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _fitted_bias(values: Any, sums: Any, activation: str | None) -> np.ndarray:
    """Return the bias per group and channel that fits best."""
    used = values > 0 if activation else np.isfinite(values)
    axes = (1, *range(3, values.ndim))
    counts = used.sum(axes)
    means = np.where(used, values - sums, 0).sum(axes) / np.maximum(counts, 1)
    if activation:  # a channel without positive values: any bias that keeps it at zero
        means = np.where(counts > 0, means, np.minimum(-sums.max(axes), 0))
    return means
