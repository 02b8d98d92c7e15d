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
from itertools import combinations, count, product
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cupyconv import arrays
from cupyconv.cpu.activations import activate
from cupyconv.cpu.threads import with_one_blas_thread
from cupyconv.explaining import conventions
from cupyconv.explaining.conventions import MODES, PLAIN, Convention, Finish, Order, Rule
from cupyconv.formats import SPATIAL_AXES

MOST_WORK = 2e9
"""Largest number of multiply-adds of the search for one result (hand-set)."""

MOST_JOBS = 6_000
"""Largest number of orders of axes, strides and dilations that are tried (hand-set)."""

MOST_RULES = 300
"""Largest number of strides and dilations that are tried with an order of axes (hand-set)."""

MOST_FLOPS = 4e9
"""Largest number of floating-point operations of one comparison of a whole result (hand-set)."""

MOST_COMPARED = 8_000_000
"""Largest number of elements of each tensor in one comparison (hand-set)."""

MOST_FITS = 24
"""Largest number of conventions that fit and are listed (hand-set)."""

MOST_COMPARISONS = 400
"""Largest number of candidates that are compared as a whole (hand-set)."""

BLOCK = {1: 256, 2: 24, 3: 8}
"""Largest extent of the sampled block, keyed by the number of spatial axes (hand-set)."""

SAMPLES = 64
"""Number of sampled elements (hand-set)."""

MOST_COPIED = 1 << 22
"""Largest number of elements of a matrix of windows (hand-set)."""

LEAST_EVIDENCE = 32.0
"""Smallest number of bits of a result from which a convention is concluded (hand-set).

A search tries up to a million conventions, or 20 bits; the others are a margin.
"""

ROUGH = 0.05
"""Largest relative difference of a sampled element that agrees (hand-set)."""

NEARBY = 1.5
"""Largest additional distance at which other conventions are sought after one fits (hand-set)."""


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
            they take too long for arrays of this size.
        too_many: whether more conventions fit than are listed.
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
    _seen: set[Any] = field(default_factory=set)
    _nearest: list[_Near] = field(default_factory=list)

    def evidence(self, level: Level) -> float:
        """Return the bits of the different values of the result that an agreement confirms."""
        values = self.tensors[self.result]
        sizes = np.unique(np.abs(values[np.isfinite(values) & (values != 0)]))[:64]
        if not len(sizes):
            return 0.0
        bits = 20.0 if level.roundoff == 0 else -np.log2(8 * level.roundoff)
        if (sizes % 1 == 0).all():
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
        plain, other = self._plain_finishes(), self._other_finishes()
        later: list[tuple[float, _Near]] = []
        for distance, sample in self._samples(jobs, MODES[:1], advance):
            for near in sample.candidates(plain):
                self._consider(distance, near)
            if not self._is_found:
                found = sample.candidates(other)
                later += [(distance, near) for near in found if near.share >= _AGREEING]
        if not self._is_found:
            for distance, near in sorted(later, key=lambda entry: entry[0]):
                self._consider(distance, near)
        if not self.fits:
            for distance, sample in self._samples(jobs, MODES[1:], advance):
                for near in sample.candidates(plain):
                    self._consider(distance, near)
        if not self.fits:
            for near in self._nearest:
                self._weigh(inf, near.convention)
        # Conventions that fit only roughly do not count beside those that fit to rounding.
        finest = min((LEVELS.index(fit.level) for fit in self.fits if fit.level), default=0)
        self.fits = [
            fit
            for fit in self.fits
            if fit.level and LEVELS.index(fit.level) <= max(finest, self.usual)
        ]
        self.fits.sort(key=lambda fit: self.distance(fit.convention))

    @property
    def _is_found(self) -> bool:
        """Whether a convention fits at the precision of the arrays."""
        return any(fit.level and LEVELS.index(fit.level) <= self.usual for fit in self.fits)

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
            for mode in modes:
                if mode != "zeros" and (distance > 2 or self._role(job) == "x"):
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
        if len(self.fits) >= MOST_FITS:
            self.too_many = True
            return None
        self._seen.add(same)
        comparison = self.compare(convention)
        level = comparison.level
        is_rough = level is not None and LEVELS.index(level) > self.usual
        if level is not None and is_rough and self.evidence(level) < LEAST_EVIDENCE:
            return None  # chance explains that few values agree roughly
        if comparison.fits:
            self.fits.append(comparison)
        elif self.nearest is None or _merit(comparison) > _merit(self.nearest):
            self.nearest = comparison
        if comparison.fits:
            self._limit = min(self._limit, distance + NEARBY)
        elif comparison.is_similar and convention == self.claim:
            self._limit = 2 * NEARBY
        return comparison

    def _role(self, job: _Job) -> str:
        return Convention(self.result, job.is_transposed, job.order, ()).role

    def _plain_finishes(self) -> list[Finish]:
        finishes = [Finish(activation=self.activation)]
        if self.result != "y":
            return [PLAIN]
        if self.bias is not None:
            finishes = [Finish(bias="given", activation=self.activation), *finishes]
        result = self.tensors["y"]
        if result.dtype.kind != "c" and not (result < 0).any():
            finishes += [finish._replace(activation="relu") for finish in finishes]
        if self.activation is not None:
            finishes += [finish._replace(activation=None) for finish in finishes]
        return list(dict.fromkeys(finishes))

    def _other_finishes(self) -> list[Finish]:
        scaled = [Finish(scale=0.0)]  # 0 stands for a scale that fits
        if self.result != "y":
            return scaled
        result = self.tensors["y"]
        finishes = [*scaled, Finish(bias="fitted")]
        if result.dtype.kind != "c":
            if not (result < 0).any():
                finishes.append(Finish(bias="fitted", activation="relu"))
            biases = ("none",) if self.bias is None else ("given", "none")
            finishes += [Finish(1.0, bias, word) for bias in biases for word in ("silu", "gelu")]
        return finishes

    # -- candidates --------------------------------------------------------------------------------

    def _sorted_jobs(self) -> list[tuple[float, _Job]]:
        """Return the jobs with their distances from the claim, the nearest first."""
        jobs: list[tuple[float, int, _Job]] = []
        number = count()
        for is_transposed in (self.is_transposed, not self.is_transposed):
            names = conventions.ROLES[self.result, is_transposed]
            shapes = {role: self.tensors[name].shape for role, name in names.items()}
            seen = set()
            rules: dict[Any, Any] = {}
            for order in self._orders(shapes):
                base = self._order_distance(order) + 1.5 * (is_transposed != self.is_transposed)
                probe = Convention(self.result, is_transposed, order, ())
                views = probe.views(self.tensors)
                key = tuple(_layout(view) for view in views.values()), order.conjugated
                if key in seen:
                    continue
                seen.add(key)
                spatial = tuple(views[role].shape[3:] for role in "xwy")
                if spatial not in rules:
                    every = sorted(self._rules(spatial, order.rank), key=lambda entry: entry[0])
                    rules[spatial] = every[:MOST_RULES]
                for extra, options in rules[spatial]:
                    job = _Job(is_transposed, order, options)
                    jobs.append((base + extra, next(number), job))
        jobs.sort(key=lambda entry: entry[:2])
        return [(distance, job) for distance, _, job in jobs[:MOST_JOBS]]

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
                mixed = _splittable(x, w, y, groups, shapes)
                shuffles = [c for n in range(len(mixed) + 1) for c in combinations(mixed, n)]
                flips = product((False, True), repeat=rank)
                for flipped, conjugated, shuffle in product(flips, conjugations, shuffles):
                    partly = len(set(flipped)) > 1
                    for w_, y_ in product(
                        (w, *conventions.swaps(w, rank)), (y, *conventions.swaps(y, rank))
                    ):
                        odd = (w_ != w) + (y_ != y) + partly + bool(shuffle)
                        if odd <= 1 or (odd == 2 and w_ != w and y_ != y):
                            yield Order(x, w_, y_, groups, flipped, shuffle, conjugated)

    def _rules(
        self, spatial: tuple[tuple[int, ...], ...], rank: int
    ) -> Iterator[tuple[float, tuple[Options, ...]]]:
        """Yield a distance, and the stride, dilation and paddings of each axis."""
        per_axis: list[dict[tuple[int, int], Sequence[int]]] = []
        for axis in range(rank):
            inputs, taps, outputs = (shape[axis] for shape in spatial)
            every = conventions.axis_rules(inputs, taps, outputs, self.dilations)
            grouped: dict[tuple[int, int], Sequence[int]] = {(s, d): pads for s, d, pads in every}
            if self.claim is not None and axis < len(self.claim.rules):
                *key, pad = self.claim.rules[axis]
                known = grouped.get((key[0], key[1]), ())
                if pad not in known:
                    grouped[key[0], key[1]] = (*known, pad)
            per_axis.append(grouped)
        most = {1: 512, 2: 4, 3: 2}[rank]
        usual = {1, *self.dilations}
        dilations = [sorted({d for _, d in grouped}) for grouped in per_axis]
        for chosen in product(*dilations):
            real = {d for d, taps in zip(chosen, spatial[1], strict=True) if taps > 1}
            if len(real) > 1 and not real <= usual and max(real) > most:
                continue
            for strides in product(
                *(
                    sorted({s for s, d in grouped if d == dilation})
                    for grouped, dilation in zip(per_axis, chosen, strict=True)
                )
            ):
                # One output leaves the stride open, and gives it as 1.
                steps = {s for s, p in zip(strides, spatial[2], strict=True) if p > 1}
                uneven = 3 if rank == 3 or not real <= usual else 16
                if len(steps) > 1 and max(*steps, *real) > uneven:
                    continue
                options = tuple(
                    Options(stride, dilation, grouped[stride, dilation])
                    for grouped, stride, dilation in zip(per_axis, strides, chosen, strict=True)
                )
                yield self._rule_distance(strides, chosen, real), options

    # -- distances ---------------------------------------------------------------------------------

    def _order_distance(self, order: Order) -> float:
        space = SPATIAL_AXES[order.rank]
        claim = None if self.claim is None else self.claim.order
        last = [reading.endswith("C") for reading in (order.x, order.y)]
        distance = 1.0 * any(order.flipped) + 1.0 * (len(set(order.flipped)) > 1)
        distance += 1.5 * len(order.interleaved)
        wanted = (
            claim.conjugated
            if claim is not None
            else conventions.usual_conjugation(self.result, self.is_transposed)
        )
        distance += sum(a != b for a, b in zip(order.conjugated, wanted, strict=True))
        distance += 1.5 * (space not in order.w) + 1.5 * (space not in order.y)
        distance += 1.5 * (last[0] != last[1])
        if claim is not None:
            distance += 1.0 * (order.x != claim.x) + 1.0 * (order.w != claim.w)
        else:
            usual = (f"{space}IO", f"{space}GM") if last[0] else (f"OI{space}",)
            distance += 0.5 * last[0] + 1.0 * (order.w not in usual)
        known = (f"OI{space}", f"{space}IO", f"O{space}I", f"{space}GM", space)
        return distance + 1.0 * (order.w not in known)

    def _rule_distance(
        self, strides: tuple[int, ...], dilations: tuple[int, ...], real: set[int]
    ) -> float:
        claim = None if self.claim is None else self.claim.rules
        wanted = set(self.dilations)
        distance = 0.0
        if real and not real <= wanted:
            distance += 1.0 + (len(real) > 1) + (max(dilations) > 4) + (max(dilations) > 8)
        if claim is not None and tuple(rule.stride for rule in claim) != strides:
            distance += 0.5
        return distance + 0.5 * (len(set(strides)) > 1)

    def distance(self, convention: Convention) -> tuple[float, ...]:
        """Return how far a convention is from the claim and from common conventions."""
        views = convention.views(self.tensors)
        spatial = list(zip(*(views[role].shape[3:] for role in "xwy"), strict=True))
        real = {
            rule.dilation
            for rule, (_, r, _) in zip(convention.rules, spatial, strict=True)
            if r > 1
        }
        strides = tuple(rule.stride for rule in convention.rules)
        dilations = tuple(rule.dilation for rule in convention.rules)
        named = conventions.paddings(convention.rules, spatial, convention.is_transposed)
        finish = convention.finish
        same = self.claim is not None and convention == self.claim
        return (
            -float(same),
            self._order_distance(convention.order)
            + 1.5 * (convention.is_transposed != self.is_transposed)
            + self._rule_distance(strides, dilations, real)
            + 1.0 * (":" in next(iter(named)))
            + 0.5 * (finish.bias == "none" and self.bias is not None)
            + 0.5 * (finish.activation != self.activation),
            sum(abs(rule.pad) for rule in convention.rules),
        )

    # -- comparison of the whole result ------------------------------------------------------------

    def compare(self, convention: Convention) -> Comparison:
        """Compare a convention with the whole result, or with a part of a large one."""
        views = convention.views(self.tensors)
        parts, places = _part(convention, views)
        result = parts[convention.role]
        wide: Any = np.complex128 if result.dtype.kind == "c" else np.float64
        with np.errstate(all="ignore"):
            sums = convention.sums(parts)
            sizes = np.sqrt(np.abs(convention.sums(parts, squared=True)))
            wide = np.result_type(wide, sums.dtype)
            values = result.astype(wide)
            terms = _term_count(convention, parts)
            finished, sizes, convention, bias = self._finished(
                convention, values, sums, sizes, places
            )
            level, agrees, error = _level(values, finished, sizes, terms, self.usual)
        flat = self._flat(convention, views, places, values.shape)
        largest = int(error.argmax()) if error.size else 0
        bad = np.flatnonzero(~agrees)
        first = bad[flat(bad).argmin()] if len(bad) else None
        at = largest if first is None else int(first)
        shape = self.tensors[self.result].shape

        def stored(position: int) -> tuple[int, ...]:
            return tuple(map(int, np.unravel_index(flat(np.array([position]))[0], shape)))

        with np.errstate(all="ignore"):
            spread = _rms(np.abs(values)) or 1.0
            distance = _rms(error) / spread
        real = (values != 0) | (finished != 0)
        similar = (agrees & real).sum() > _SIMILAR * max(real.sum(), 8)
        return Comparison(
            convention,
            values.size,
            int(agrees.sum()),
            level,
            float(error.ravel()[largest]),
            stored(largest),
            None if first is None else stored(int(first)),
            values.ravel()[at].item(),
            finished.ravel()[at].item(),
            bias,
            distance,
            level is not None or bool(similar),
        )

    def _flat(self, convention: Convention, views: Any, places: Any, shape: tuple[int, ...]) -> Any:
        """Return a function from positions in the compared part to positions in the array."""
        view, base = views[convention.role], self.tensors[self.result]
        start = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]

        def flat(positions: np.ndarray) -> np.ndarray:
            offset = np.full(positions.shape, start)
            for axis, index in enumerate(np.unravel_index(positions, shape)):
                place = places.get(axis)
                offset = offset + (index if place is None else place[index]) * view.strides[axis]
            return offset // base.itemsize

        return flat

    def stored(self, role: str, convention: Convention, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index in the caller's array of an element of a view."""
        name = convention.names[role]
        base, view = self.tensors[name], convention.views(self.tensors)[role]
        offset = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        offset += sum(i * step for i, step in zip(index, view.strides, strict=True))
        return tuple(map(int, np.unravel_index(offset // base.itemsize, base.shape)))

    def viewed(self, convention: Convention, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index in the view of the result of an element of the caller's array."""
        numbers = np.arange(self.tensors[self.result].size).reshape(self.tensors[self.result].shape)
        view = convention.order.view(convention.role, numbers)
        place = np.argwhere(view == numbers[index])[0]
        return tuple(map(int, place))

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
            if closer.level is not None and LEVELS.index(closer.level) <= 2:
                found.append(word.partition(" ")[0])
        return " or ".join(dict.fromkeys(found))

    def _finished(
        self, convention: Convention, values: Any, sums: Any, sizes: Any, places: Any
    ) -> tuple[Any, Any, Convention, np.ndarray | None]:
        """Apply scale, bias and activation, and fit those that are not known."""
        finish, bias = convention.finish, None
        if finish.scale != 1:
            power = np.vdot(sums, sums).real
            fitted = np.vdot(sums, values) / power if power else 1.0
            convention = convention.with_finish(scale=self.snapped(convention, fitted))
            sums, sizes = sums * convention.finish.scale, sizes * abs(convention.finish.scale)
        if finish.bias != "none":
            add = self._bias(convention, places) if finish.bias == "given" else None
            if add is None:
                bias = _fitted_bias(values, sums, finish.activation)
                add = bias[:, None, :]
                bias = bias.ravel()
            add = add.reshape(*add.shape, *(1,) * (sums.ndim - 3))
            sums, sizes = sums + add, sizes + abs(add)
        if finish.activation is not None:
            sums = activate(np.ascontiguousarray(sums), finish.activation)
        return sums, sizes, convention, bias

    def _bias(self, convention: Convention, places: Any) -> np.ndarray:
        """Return the given bias with the axes (group, 1, channel) of the result's view."""
        assert self.bias is not None
        order, role = convention.order, convention.role
        split = order._split(self.bias.astype(np.result_type(self.bias, "f8")), 0, role)
        part = split[:, None, :]
        return part if places.get(2) is None else part[:, :, places[2]]

    def snapped(self, convention: Convention, scale: complex) -> float:
        """Return the common scale near a fitted one, such as 1 / N; or the fitted one."""
        real = float(np.real(scale))
        for value in self.scales(convention):
            if abs(real - value) <= 1e-3 * abs(value):
                return value
        return real

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


def _merit(comparison: Comparison) -> tuple[float, float]:
    return comparison.agreeing / max(comparison.compared, 1), -comparison.error


def _layout(view: np.ndarray) -> tuple[Any, ...]:
    steps = tuple(s if n > 1 else 0 for s, n in zip(view.strides, view.shape, strict=True))
    return view.shape, steps


def _splittable(
    x: str, w: str, y: str, groups: int, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return the roles whose channels could be interleaved between the groups."""
    if groups == 1:
        return []
    found: list[str] = []
    for role, reading in (("x", x), ("y", y)):
        if conventions.sizes(reading, shapes[role]).get("C", 1) > groups:
            found.append(role)
    if conventions.sizes(w, shapes["w"]).get("O", 1) > groups:
        found.append("w")
    return found


# -- a sample --------------------------------------------------------------------------------------


class _Sample:
    """Sampled elements of a result, and their values for all paddings of a job."""

    def __init__(self, search: Search, job: _Job) -> None:
        self.search, self.job = search, job
        self.probe = Convention(search.result, job.is_transposed, job.order, (), mode=job.mode)
        self.views = self.probe.views(search.tensors)
        self.role = self.probe.role
        self.tried = 0
        self.window: np.ndarray | None = None
        self._choose()

    def _choose(self) -> None:
        """Choose a group, an image, some channels, and a block of positions."""
        view = self.views[self.role]
        _, _, seconds, *space = view.shape
        rank = len(space)
        norms = self._norms(view)
        group, first = np.unravel_index(norms.sum(2).argmax(), norms.shape[:2])
        self.group, self.first = int(group), int(first)
        block = prod(min(size, BLOCK[rank]) for size in space)
        wanted = min(max(-(-SAMPLES // block), 3), 64, seconds)
        order = np.argsort(-norms[group, first], kind="stable")[:wanted]
        self.seconds = np.sort(order)
        values = view[group, first][self.seconds]
        self.begin = []
        for axis, size in enumerate(space, 1):
            most = BLOCK[rank]
            start = 0
            if size > most:
                with np.errstate(all="ignore"):
                    others = tuple(a for a in range(values.ndim) if a != axis)
                    sums = np.nan_to_num(np.abs(values)).astype("f8").sum(others)
                total = np.concatenate([[0.0], sums.cumsum()])
                start = int((total[most:] - total[:-most]).argmax())
            values = values.take(range(start, min(start + most, size)), axis)
            self.begin.append(start)
        wide = np.complex128 if values.dtype.kind == "c" else np.float64
        values = values.astype(wide)
        picked = np.arange(values.size)
        if values.size > SAMPLES:
            rng = np.random.default_rng(0)
            real = np.flatnonzero(values.ravel())
            half = rng.permutation(real)[: SAMPLES // 2]
            picked = np.unique(
                np.concatenate([half, rng.permutation(picked)[: SAMPLES - len(half)]])
            )
        self.shape = values.shape
        self.index = np.unravel_index(picked, values.shape)
        self.values = values.ravel()[picked]

    def _norms(self, view: np.ndarray) -> np.ndarray:
        """Return the sums of absolute values per group, image and channel; cached per layout."""
        cache = vars(self.search).setdefault("_norm_cache", {})
        key = _layout(view), view.__array_interface__["data"][0]
        if key not in cache:
            with np.errstate(all="ignore"):
                # Every step-th element of large results suffices to choose a part.
                step = max(int((view.size / 1e6) ** (1 / max(view.ndim - 3, 1))), 1)
                some = view[(slice(None),) * 3 + (slice(None, None, step),) * (view.ndim - 3)]
                total = np.nan_to_num(np.abs(some)).astype("f8")
                cache[key] = total.sum(tuple(range(3, view.ndim)))
        return cache[key]

    # -- the window --------------------------------------------------------------------------------

    @cached_property
    def _extents(self) -> list[tuple[int, int]]:
        """First position and extent of the window along each axis."""
        extents = []
        for axis, options in enumerate(self.job.options):
            stride, dilation, pads = options
            begin, end = self.begin[axis], self.begin[axis] + self.shape[axis + 1] - 1
            step = {"y": stride, "w": dilation, "x": 1}[self.role]
            low, high = begin * step, end * step
            if self.role == "x":
                low, high = low + min(pads), high + max(pads)
            else:
                low, high = low - max(pads), high - min(pads)
            extents.append((low, high - low + 1))
        return extents

    @cached_property
    def cost(self) -> float:
        """Number of multiply-adds of the window."""
        window = prod(extent for _, extent in self._extents)
        w, y = (self.views[role].shape for role in "wy")
        kept = len(self.seconds)
        if self.role == "y":
            return float(prod(w[2:]) * window * kept)
        if self.role == "x":
            return float(w[1] * prod(w[3:]) * min(window, prod(y[3:])) * kept)
        return float(window * y[1] * prod(y[3:]) * kept)

    def _compute(self) -> None:
        """Compute ``window``: the sums for each chosen channel at each position."""
        lows = [low for low, _ in self._extents]
        extents = [extent for _, extent in self._extents]
        strides = [options.stride for options in self.job.options]
        dilations = [options.dilation for options in self.job.options]
        views = self.probe.operands(self.views)
        is_complex = any(views[role].dtype.kind == "c" for role in self.probe.factors)
        kind: Any = np.complex128 if is_complex else np.float64
        x, w, y = (views[role][self.group] for role in "xwy")
        taps, outputs = w.shape[2:], y.shape[2:]
        mode, kept = self.job.mode, self.seconds
        window = np.zeros((len(kept), *extents), kind)

        def padded(part: np.ndarray, more: list[int]) -> np.ndarray:
            tapes = [
                conventions.tape(np.arange(low, low + extent + extra), size, mode)
                for low, extent, extra, size in zip(lows, extents, more, x.shape[2:], strict=True)
            ]
            return conventions.read(part, tapes)

        if self.role == "y":
            more = [(r - 1) * d for r, d in zip(taps, dilations, strict=True)]
            source, weights = padded(x[self.first], more), w[kept].astype(kind)
            for tap in np.ndindex(taps):
                part = source[
                    (
                        slice(None),
                        *(
                            slice(r * d, r * d + e)
                            for r, d, e in zip(tap, dilations, extents, strict=True)
                        ),
                    )
                ]
                window += np.tensordot(weights[(..., *tap)], part, 1)
        elif self.role == "x":
            source, weights = y[self.first].astype(kind), w[:, kept].astype(kind)
            for tap in np.ndindex(taps):
                reads, writes = [slice(None)], [slice(None)]
                for r, d, s, low, e, size in zip(
                    tap, dilations, strides, lows, extents, outputs, strict=True
                ):
                    first = max(-((r * d - low) // s), 0)
                    last = min((low + e - 1 - r * d) // s, size - 1)
                    reads.append(slice(first, max(last + 1, first)))
                    begin = first * s + r * d - low
                    writes.append(
                        slice(begin, begin + max(last - first, 0) * s + (last >= first), s)
                    )
                    if last < first:
                        writes[-1] = slice(0, 0)
                part = source[tuple(reads)]
                if part.size:
                    window[tuple(writes)] += np.tensordot(weights[(..., *tap)].T, part, 1)
        else:
            # The first index of w's view is the filter, the second the channel.
            more = [(p - 1) * s for p, s in zip(outputs, strides, strict=True)]
            source = padded(x[:, kept], more)
            weights = y[:, self.first].astype(kind)
            steps = source.strides[2:]
            view = as_strided(
                source,
                (*source.shape[:2], *extents, *outputs),
                (
                    *source.strides[:2],
                    *steps,
                    *(step * s for step, s in zip(steps, strides, strict=True)),
                ),
                writeable=False,
            )
            # Windows are copied to one matrix for a few positions of the first axis at once.
            each = max(view.size // extents[0], 1)
            rows = max(MOST_COPIED // each, 1)
            for begin in range(0, extents[0], rows):
                part = view[:, :, begin : begin + rows]
                spatial = range(2 + len(extents), part.ndim)
                window[:, begin : begin + rows] = np.tensordot(
                    part, weights, ([0, *spatial], list(range(weights.ndim)))
                )
        self.window = window

    def candidates(self, finishes: list[Finish]) -> list[_Near]:
        """Return the best conventions of the job on the sample."""
        if not self.values.size:
            return []
        with np.errstate(all="ignore"):
            if self.window is None:
                with_one_blas_thread(self._compute)
            window = self.window
            assert window is not None
            places = []
            for axis, options in enumerate(self.job.options):
                step = {"y": options.stride, "w": options.dilation, "x": 1}[self.role]
                pads = np.array(options.pads)[:, None]
                pads = pads if self.role == "x" else -pads
                positions = (self.begin[axis] + self.index[axis + 1]) * step
                places.append(positions + pads - self._extents[axis][0])
            flat = self.index[0]
            for axis, place in enumerate(places):
                shape = [1] * len(places) + [place.shape[1]]
                shape[axis] = len(place)
                flat = flat * window.shape[axis + 1] + place.reshape(shape)
            sums = window.ravel()[flat].reshape(-1, len(self.values))
            self.tried += len(sums) * len(finishes)
            return [near for finish in finishes for near in self._best(sums, finish)]

    def _best(self, sums: np.ndarray, finish: Finish) -> list[_Near]:
        values = self.values
        if finish.bias == "fitted" and len(values) < 4:
            return []
        if finish.scale != 1 and len(values) < 4:
            sums = sums / self.views["y"].shape[1]  # too few values to fit a scale: a mean
        elif finish.scale != 1:
            power = (np.abs(sums) ** 2).sum(1)
            fitted = (sums.conj() * values).sum(1) / np.where(power, power, 1)
            sums = sums * fitted[:, None]
        channels = self.index[0]
        if finish.bias == "given":
            groups, _, seconds = self.views[self.role].shape[:3]
            if len(self.search.bias) != groups * seconds:  # type: ignore[arg-type]
                return []
            add = self.search._bias(self.probe, {})[self.group, 0]
            sums = sums + add[self.seconds][channels]
        elif finish.bias == "fitted":
            used = values > 0 if finish.activation else np.ones(len(values), bool)
            member = (channels[:, None] == np.arange(len(self.seconds))) & used[:, None]
            counts = member.sum(0)
            if counts.max(initial=0) < 4:
                return []
            means = (values - sums) @ member / np.maximum(counts, 1)
            sums = sums + means[:, channels]
        if finish.activation is not None:
            sums = activate(np.array(sums), finish.activation)
        scale = np.maximum(np.abs(values), np.sqrt((np.abs(values) ** 2).mean()))
        error = np.abs(sums - values)
        share = (error <= ROUGH * scale).mean(1)
        rough = np.sqrt((error**2).mean(1)) / (np.sqrt((scale**2).mean()) or 1.0)
        order = np.lexsort((rough, -share))[:MOST_FITS]
        sizes = [len(options.pads) for options in self.job.options]
        found: list[_Near] = []
        for place in order:
            if found and found[-1].share < _AGREEING:
                break
            chosen = np.unravel_index(place, sizes)
            rules = tuple(
                Rule(options.stride, options.dilation, options.pads[int(i)])
                for options, i in zip(self.job.options, chosen, strict=True)
            )
            convention = replace(self.probe, rules=rules, finish=finish)
            found.append(_Near(float(share[place]), -float(rough[place]), convention))
        return found


# -- precision -------------------------------------------------------------------------------------


def _part(
    convention: Convention, views: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[int, Any]]:
    """Return the parts of the views to compare, and the kept positions of the result's axes."""
    w, y = (views[role].shape for role in "wy")
    work = 2 * y[1] * prod(w) * prod(y[3:])
    role, places = convention.role, {}
    limit = min(MOST_FLOPS / max(work, 1), 1.0)
    for key in views:
        limit = min(limit, MOST_COMPARED / max(views[key].size, 1))
    parts = dict(views)
    for axis in (1, 2):
        size = views[role].shape[axis]
        keep = max(int(size * limit), 1)
        if limit >= 1 or size == 1:
            continue
        limit *= size / keep
        places[axis] = np.unique(np.linspace(0, size - 1, keep).astype(int))
        parts[role] = parts[role].take(places[axis], axis)
        other, along = {
            ("y", 1): ("x", 1),
            ("y", 2): ("w", 1),
            ("x", 1): ("y", 1),
            ("x", 2): ("w", 2),
            ("w", 1): ("y", 2),
            ("w", 2): ("x", 2),
        }[role, axis]
        parts[other] = parts[other].take(places[axis], along)
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
        return error <= bound

    for level in LEVELS:
        agrees = agreeing(level)
        if agrees.all():
            return level, agrees, error
    return None, agreeing(LEVELS[max(usual, 2)]), error


def _rms(array: Any) -> float:
    finite = array[np.isfinite(array)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0


def _fitted_bias(values: Any, sums: Any, activation: str | None) -> np.ndarray:
    """Return the bias per group and channel that fits best."""
    difference = values - sums
    used = values > 0 if activation else np.ones(values.shape, bool)
    axes = (1, *range(3, values.ndim))
    counts = used.sum(axes)
    total = np.where(used, difference, 0).sum(axes)
    means = total / np.maximum(counts, 1)
    if activation:  # a channel without positive values: any bias that keeps it at zero
        highest = sums.max(axes)
        means = np.where(counts > 0, means, np.minimum(-highest, 0))
    return means
