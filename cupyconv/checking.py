"""Comparison of results with a reference, within a bound for rounding.

``Truth`` compares every element of every result.  Every difference is divided by the sum of the
absolute values of the result's terms.  Thus a wrong result is found and a right result is accepted,
even where the terms cancel.  The bound is twice the error of plain summation in the same precision
on the same data, plus one unit in the last place.

``Excerpt`` compares a part of one pass of a large layer on random data, by its norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from cupyconv import arrays, operations
from cupyconv.cpu import naive
from cupyconv.cpu.views import data_view, filter_view
from cupyconv.planning import Impl, Precision
from cupyconv.problem import PASSES, REAL_PART, RESULT, ConvProblem, DtypeName

LARGE = 1e9
"""FLOPs of a pass above which the planned implementation, not the slow reference, computes
magnitudes and the losses of finite differences (chosen)."""

ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
ROUNDOFF |= {name: ROUNDOFF[part] for name, part in REAL_PART.items()}
"""Largest relative error of rounding to nearest, by dtype: half a unit in the last place."""

EXACT_UP_TO = {dtype: round(1 / roundoff) for dtype, roundoff in ROUNDOFF.items()}
"""Largest integer up to which integers, and so their sums, are exact, keyed by dtype."""

SINGLE_ELEMENTS = 3
"""Elements per tensor that finite differences change one at a time (chosen)."""

# A sum with random signs exceeds 6 standard deviations once in 500 million draws.
_DEVIATIONS = 6


class Memory(Protocol):
    """Memory of a device, to and from which NumPy arrays are copied."""

    def put(self, array: np.ndarray) -> Any:
        """Return a NumPy array as an array on this device."""
        ...

    def get(self, array: Any) -> np.ndarray:
        """Return an array on this device as a NumPy array."""
        ...


class HostMemory:
    """Host memory, where NumPy's arrays are."""

    def put(self, array: np.ndarray) -> np.ndarray:
        return array

    def get(self, array: np.ndarray) -> np.ndarray:
        return array


HOST = HostMemory()


class Operands(NamedTuple):
    """Operands of the passes: arrays of NumPy or of CuPy."""

    x: Any
    w: Any
    dy: Any


class Results(NamedTuple):
    """Results of the passes."""

    y: np.ndarray
    dx: np.ndarray
    dw: np.ndarray
    db: np.ndarray


@dataclass(frozen=True)
class Agreement:
    """One comparison of a result with its expected value.

    Attributes:
        check: name of the method that gives the expected value.
        tensor: name of the result.
        compared: description of the elements that were compared.
        count: number of compared elements.
        difference: worst relative difference; None if the data does not permit a comparison.
        bound: largest difference that rounding explains.
    """

    check: str
    tensor: str
    compared: str
    count: int
    difference: float | None
    bound: float

    @property
    def passed(self) -> bool | None:
        return None if self.difference is None else self.difference <= self.bound


def pass_function(
    problem: ConvProblem, pass_: str, impl: Impl = "auto", precision: Precision = "ieee"
) -> Callable[[Operands], Any]:
    """Return a function that computes a pass of a problem with the public functions."""
    words: dict[str, Any] = {**problem.keywords, "impl": impl, "precision": precision}
    if pass_ == "forward":
        return lambda o: operations.conv_forward(o.x, o.w, **words)
    if pass_ == "backprop_input":
        shape = problem.input_shape
        return lambda o: operations.conv_backprop_input(shape, o.w, o.dy, **words)
    shape = problem.filter_shape
    return lambda o: operations.conv_backprop_filter(o.x, shape, o.dy, **words)


def compute(
    problem: ConvProblem,
    operands: Operands,
    memory: Memory,
    impl: Impl,
    passes: Sequence[str] = PASSES,
) -> Results:
    """Compute the three passes and the bias gradient with the public functions.

    Args:
        memory: device on which ``impl`` computes.
        impl: implementation that computes ``passes``; the planner chooses one for other passes.
    """
    there = Operands(*map(memory.put, operands))
    by: dict[str, Impl] = {pass_: impl if pass_ in passes else "auto" for pass_ in PASSES}
    results = (
        *(pass_function(problem, pass_, by[pass_])(there) for pass_ in PASSES),
        operations.conv_backprop_bias(there.dy, data_format=problem.data_format),
    )
    return Results(*map(memory.get, results))


class Truth:
    """Expected results of a problem on given data, and the permitted differences."""

    def __init__(
        self, problem: ConvProblem, operands: Operands, forward: Impl | None = None
    ) -> None:
        self.problem = problem
        self.operands = operands
        self._given = forward

    @cached_property
    def operands64(self) -> Operands:
        return Operands(*(array.astype(self._wide) for array in self.operands))

    @property
    def _wide(self) -> type[np.inexact]:
        """Return float64, or complex128 for complex problems."""
        return np.complex128 if self.problem.is_complex else np.float64

    @cached_property
    def results(self) -> Results:
        """Results of the reference implementation, in float64."""
        return compute(self.problem, self.operands64, HOST, "reference")

    @cached_property
    def magnitudes(self) -> Results:
        """Sums of the absolute values of each result's terms.

        The sums have no cancellation, so every float64 implementation is accurate enough for them.
        """
        impl: Impl = "auto" if self._is_large else "reference"
        return compute(self.problem, Operands(*map(np.abs, self.operands64)), HOST, impl)

    @property
    def _is_large(self) -> bool:
        return self.problem.flops > LARGE

    @cached_property
    def _forward(self) -> Impl:
        """Implementation that computes the losses of finite differences.

        Small layers use the reference.  Large layers use the planned float64 implementation,
        provided that its y agrees with the reference up to float64 rounding.
        """
        if self._given or not self._is_large:
            return self._given or "reference"
        x, w, _ = self.operands64
        y = operations.conv_forward(x, w, **self.problem.keywords)
        with np.errstate(all="ignore"):
            apart = np.abs(y - self.results.y)
            same = apart <= 1e-12 * self.magnitudes.y
        return "auto" if bool(same.all()) else "reference"

    @cached_property
    def bounds(self) -> Mapping[str, float]:
        """Largest relative difference that rounding can cause, keyed by the result's name."""
        if self.problem.dtype in _NARROWER:
            return self._bounds64
        # Plain summation of a few terms may be exact by chance.
        roundoff = ROUNDOFF[self.problem.dtype]
        return {
            name: 2 * max(self.difference(name, getattr(self._plain, name)), roundoff)
            + 2 * roundoff
            for name in Results._fields
        }

    @cached_property
    def _plain(self) -> Results:
        """Results of plain summation in the problem's own dtype."""
        return _naive(self.problem, self.operands)

    @property
    def _bounds64(self) -> Mapping[str, float]:
        """Bounds for float64: as many units in the last place as for float32 (assumed).

        Measured bounds would need a reference that is more precise than float64.  The bounds for
        complex128 come from complex64 in the same way.
        """
        narrower = _NARROWER[self.problem.dtype]
        with np.errstate(all="ignore"):
            rounded = Operands(*(_to_unit(a).astype(narrower) for a in self.operands))
        less = Truth(self.problem.replace(dtype=narrower), rounded)
        scale = ROUNDOFF["float64"] / ROUNDOFF["float32"]
        return {name: scale * bound for name, bound in less.bounds.items()}

    def prepared(self) -> Iterator[None]:
        """Compute the values that comparisons need; yield after each part, to show progress."""
        with ThreadPoolExecutor(1) as beside:
            if self._is_large and self.problem.dtype != "float64":
                beside.submit(lambda: self._plain)  # on another core; the property caches it
            for part in ("results", "magnitudes", "bounds"):
                getattr(self, part)
                yield

    def difference(self, name: str, actual: np.ndarray) -> float:
        """Return the worst relative difference of a result.

        The difference is infinite if a value is not finite and differs from the expected value.
        """
        expected, magnitude = getattr(self.results, name), getattr(self.magnitudes, name)
        with np.errstate(all="ignore"):
            rounded = expected.astype(arrays.numpy_dtype(self.problem.dtype)).astype(self._wide)
            values = actual.astype(self._wide)
            same = (values == rounded) | (np.isnan(values) & np.isnan(rounded))
            finite = np.isfinite(values) & np.isfinite(rounded)
            differences = np.where(finite, np.abs(values - expected), np.where(same, 0.0, np.inf))
            # Near zero, numbers are rounded to multiples of the dtype's smallest positive number.
            smallest = _smallest(self.problem.dtype)
            differences = np.where(differences <= smallest, 0.0, differences)
            ratios = np.where(differences == 0, 0.0, differences / magnitude)
        return float(np.max(ratios, initial=0.0))

    def against_reference(self, results: Results) -> list[Agreement]:
        """Return each result compared with the reference, element by element."""
        return [
            Agreement(
                "float64 reference",
                name,
                f"all {array.size} elements",
                array.size,
                self.difference(name, array),
                self.bounds[name],
            )
            for name, array in results._asdict().items()
        ]

    # -- finite differences ---------------------------------------------------------------------

    def against_finite_differences(self, results: Results, seed: int) -> Iterator[Agreement]:
        """Yield dx, dw and db compared with central differences of the loss, in float64.

        The loss <y, dy> is linear in each of x, w and the bias, so central differences are exact
        up to rounding for any step.  One step changes all elements together, with random signs.
        Further steps change a few elements one at a time.
        """
        generator = np.random.default_rng(seed)
        # Rounding error of the loss, a float64 sum of all terms.
        floor = 8 * ROUNDOFF["float64"] * math.sqrt(max(self.problem.flops, 1))
        for name in _MOVED:
            yield self._finite_difference(name, getattr(results, name), generator, floor)

    def _finite_difference(
        self, name: str, gradient: np.ndarray, generator: np.random.Generator, floor: float
    ) -> Agreement:
        singles = min(SINGLE_ELEMENTS, gradient.size) if name != "db" else 0
        at_once = f"all {gradient.size} changed at once"
        return Agreement(
            "finite differences",
            name,
            f"{at_once}, {singles} singly" if singles else at_once,
            1 + singles,
            self._worst_slope(name, gradient.astype(self._wide), singles, generator),
            _DEVIATIONS * self.bounds[name] + floor,
        )

    def _worst_slope(
        self, name: str, gradient: np.ndarray, singles: int, generator: np.random.Generator
    ) -> float | None:
        """Return the worst difference between the slopes of the gradient and of finite differences.

        Return None if a value is not finite.
        """
        magnitude = getattr(self.magnitudes, name)
        signs = generator.choice((-1.0, 1.0), size=gradient.shape)
        if self.problem.is_complex:
            signs = signs * generator.choice((1, 1j), size=gradient.shape)
        numbers = generator.choice(max(gradient.size, 1), singles, replace=False)
        if not self._finite or not np.isfinite(gradient).all():
            return None
        size = float(np.linalg.norm(magnitude))
        slopes = [(_inner(gradient, signs), self._slope(name, signs, self._step(name, size)), size)]
        for number in numbers:
            index = np.unravel_index(number, gradient.shape)
            part, place = self._around(name, tuple(map(int, index)))
            direction = np.zeros(getattr(part.operands, name[1:]).shape, gradient.dtype)
            direction[place] = sign = signs[index]
            expected = _inner(gradient[index], sign)
            size = float(magnitude[index])
            slopes.append((expected, part._slope(name, direction, self._step(name, size)), size))
        if not all(math.isfinite(slope) for _, slope, _ in slopes):
            return None  # a step or a loss overflowed float64
        return max(_ratio(expected - slope, scale) for expected, slope, scale in slopes)

    def _around(self, name: str, index: tuple[int, ...]) -> tuple[Truth, tuple[int, ...]]:
        """Return the part of a large layer that an element affects, and its index in that part.

        An element of x affects only the outputs of its image, and an element of w only the outputs
        of its filter.
        """
        problem, (x, w, dy) = self.problem, self.operands64
        n, k = problem.data_axes[:2]
        o = problem.filter_axes[0]
        axis = n if name == "dx" else o
        if not self._is_large or (name == "dw" and problem.groups > 1):
            return self, index
        only = slice(index[axis], index[axis] + 1)
        if name == "dx":
            parts = Operands(_part_of_axis(x, n, only), w, _part_of_axis(dy, n, only))
        else:
            parts = Operands(x, _part_of_axis(w, o, only), _part_of_axis(dy, k, only))
        shapes = {"input_shape": parts.x.shape, "filter_shape": parts.w.shape}
        part = Truth(problem.replace(**shapes), parts, self._forward)
        return part, (*index[:axis], 0, *index[axis + 1 :])

    def _step(self, name: str, size: float) -> float:
        """Return the step of a finite difference, a power of two.

        The loss is linear, so a larger step only reduces the effect of rounding.  Dividing by a
        power of two is exact.

        Args:
            name: name of the gradient.
            size: sum of the absolute values of the slope's terms.
        """
        # The bias is zero, so its step takes the scale of y, to which the bias is added.
        operand = {"dx": self.operands64.x, "dw": self.operands64.w, "db": self.results.y}[name]
        largest = float(np.max(np.abs(operand), initial=0.0))
        if size > 0:  # one huge number may make the loss's rounding larger than the slope
            largest = max(largest, self._loss_magnitude / size / 2**_STEP)
        if not 0 < largest < math.inf:
            return 1.0
        return 2.0 ** min(round(math.log2(largest)) + _STEP, 1023)

    @cached_property
    def _loss_magnitude(self) -> float:
        """The sum of the absolute values of all terms of the loss."""
        with np.errstate(all="ignore"):
            return float(np.sum(self.magnitudes.y * np.abs(self.operands64.dy)))

    def _slope(self, name: str, direction: np.ndarray, step: float) -> float:
        """Return (loss(t + h * d) - loss(t - h * d)) / 2h, where h is ``step`` and d ``direction``.

        t is x, w or a zero bias, for ``name`` "dx", "dw" or "db".
        """
        x, w, dy = self.operands64
        bias = np.zeros(self.problem.bias_shape, self._wide)
        operand = {"dx": x, "dw": w, "db": bias}[name]
        outputs = []
        for signed in (step, -step):
            operands = {"dx": x, "dw": w, "db": bias, name: operand + signed * direction}
            y = operations.conv_forward(
                *operands.values(), impl=self._forward, **self.problem.keywords
            )
            outputs.append(y)
        with np.errstate(all="ignore"):
            return _inner(dy, outputs[0] - outputs[1]) / (2 * step)

    # -- the adjoint identity -------------------------------------------------------------------

    def inner_products(self, results: Results) -> dict[str, float]:
        """Return <y, dy>, <x, dx> and <w, dw>, each of which is the sum of all terms of the loss.

        For complex dtypes, each is the real part of a sum of products with conjugates.
        """
        x, w, dy = self.operands64
        pairs = {"y,dy": (results.y, dy), "x,dx": (x, results.dx), "w,dw": (w, results.dw)}
        with np.errstate(all="ignore"):
            return {
                f"<{name}>": _inner(a.astype(self._wide), b.astype(self._wide))
                for name, (a, b) in pairs.items()
            }

    def against_adjoint(self, results: Results) -> Agreement:
        """Compare <conv(x, w), dy>, <x, dx> and <w, dw>, computed from the results alone."""
        products = list(self.inner_products(results).values())
        difference = None
        if self._finite and all(map(math.isfinite, products)):
            difference = _ratio(max(products) - min(products), self._loss_magnitude)
        bounds = sorted(self.bounds[name] for name in ("y", "dx", "dw"))
        return Agreement(
            "adjoint identity", "y, dx, dw", "3 inner products", 3, difference, sum(bounds[1:])
        )

    @cached_property
    def _finite(self) -> bool:
        """Whether all operands and results are finite, so that sums over them are meaningful."""
        tensors = (*self.operands64, *self.results)
        return all(bool(np.isfinite(array).all()) for array in tensors)


_MOVED = ("dx", "dw", "db")

_STEP = 16
"""Log2 of the ratio of a finite difference's step to the largest changed value (chosen)."""

_NARROWER: dict[str, DtypeName] = {"float64": "float32", "complex128": "complex64"}
"""Dtype whose bounds are scaled to the dtype's, keyed by the dtypes with the most precision."""


class Excerpt:
    """The last images, groups and channels of a pass's result, compared by their norm.

    An index that overflows corrupts these elements first.

    Attributes:
        share: fraction of the pass's multiply-adds that compute this part; 1 is the whole result.
    """

    def __init__(
        self,
        problem: ConvProblem,
        pass_: str,
        operands: Operands,
        get: Callable[[Any], np.ndarray],
        impl: Impl,
        most_flops: float,
    ) -> None:
        """Compute the expected values.

        Args:
            operands: random operands on a device.
            get: function that returns an array on this device as a NumPy array.
            impl: CPU implementation that computes the expected values in float64.
            most_flops: number of FLOPs to spend. The excerpt is made smaller until they suffice,
                but each of its elements sums all terms, so that a single element may need more.
        """
        self._problem, self._pass, self._get = problem, pass_, get
        extents = {
            "images": max(problem.N, 1),
            "groups": problem.groups,
            "filters": problem.K // problem.groups,
            "channels": problem.C // problem.groups,
        }
        sizes = dict(extents)
        self.share = 1.0
        for axis in _NOT_SUMMED[pass_]:
            if self.share * problem.flops <= most_flops:
                break
            sizes[axis] = max(int(extents[axis] * most_flops / problem.flops / self.share), 1)
            self.share = math.prod(sizes.values()) / math.prod(extents.values())
        images, groups, filters, channels = (
            slice(extents[axis] - size, extents[axis]) for axis, size in sizes.items()
        )
        self._slices = {
            "y": (images, groups, filters),
            "dx": (images, groups, channels),
            "dw": (groups, filters, channels),
        }
        # Row-major copies with the groups and channels in one axis.
        x, w, dy = (
            self._part(name, array) for name, array in zip(("dx", "dw", "y"), operands, strict=True)
        )
        part = ConvProblem(
            (len(x), x.shape[1] * x.shape[2], *x.shape[3:]),
            (w.shape[0] * w.shape[1], *w.shape[2:]),
            stride=problem.stride,
            padding=problem.padding,
            dilation=problem.dilation,
            groups=len(w),
            dtype=x.dtype.type,
        )
        shapes = (part.input_shape, part.filter_shape, part.output_shape)
        there = Operands(*(a.reshape(s) for a, s in zip((x, w, dy), shapes, strict=True)))
        compute = pass_function(part, pass_, impl)
        self._expected = expected = compute(there).ravel()
        count = max(expected.size, 1)
        squares = np.vdot(expected, expected).real
        if expected.size < _FEW:  # their terms may cancel by chance; compare with the terms' norm
            squares = max(squares, compute(Operands(*(np.abs(a) ** 2 for a in there))).real.sum())
        self._scale = math.sqrt(squares / count) or 1.0

    def _part(self, name: str, array: Any) -> np.ndarray:
        """Return this part of a tensor, in float64 or complex128 on the host."""
        view = filter_view if name == "dw" else data_view
        part = self._get(view(self._problem, array)[self._slices[name]])
        return part.astype(np.complex128 if self._problem.is_complex else np.float64, order="C")

    def judge(self, result: Any, precision: Precision = "ieee") -> Agreement:
        """Compare a result on the device with the expected values.

        The relative difference is the norm of the error divided by the norm of the expected values,
        or 1/_PEAK of the largest error divided by the root mean square, if that is larger.  If the
        part has few elements, the norm of all their terms replaces that of the expected values.
        """
        name, expected = RESULT[self._pass], self._expected
        count = max(expected.size, 1)
        with np.errstate(all="ignore"):
            error = np.abs(self._part(name, result).ravel() - expected)
            spread = math.sqrt(np.vdot(error, error) / count)
            largest = float(np.max(error, initial=0.0))
        return Agreement(
            "float64 reference",
            name,
            f"{self.share:.0%} of the multiply-adds",
            expected.size,
            float(np.maximum(spread, largest / _PEAK)) / self._scale,  # NaN if either is NaN
            self._bound(precision),
        )

    def _bound(self, precision: Precision) -> float:
        """Return the largest allowed difference: twice the expected error.

        The operands are exact, and the result is rounded once.  A sum rounds at every addition, in
        float32 for 16-bit dtypes; on random data this error grows as the square root of the number
        of terms.  Tensor cores truncate every 16 terms instead of rounding; this error grows with
        the number of terms.  It is allowed, up to 1 %, if tensor cores may be used.  The real and
        the imaginary part of a complex sum each have two real products per complex product.
        """
        problem = self._problem
        terms = problem.gemm(self._pass).gemm_k * (2 if problem.is_complex else 1)
        dtype = REAL_PART.get(problem.dtype, problem.dtype)
        sum_roundoff = ROUNDOFF["float64" if dtype == "float64" else "float32"]
        expected = ROUNDOFF[dtype] + sum_roundoff * math.sqrt(terms)
        tf32 = problem.dtype == "float32" and precision == "tf32"
        if tf32:
            expected += math.sqrt(2) * _TF32_ROUNDOFF
        if tf32 or dtype in ("float16", "bfloat16"):
            expected += min(sum_roundoff * terms / 16, 5e-3)
        return 2 * expected


_NOT_SUMMED = {
    "forward": ("images", "groups", "filters"),
    "backprop_input": ("images", "groups", "channels"),
    "backprop_filter": ("groups", "filters", "channels"),
}
"""Axes along which a result can be computed in part, keyed by pass."""

_TF32_ROUNDOFF = 2.0**-11

_FEW = 32
"""Number of elements below which a norm of random values may be small by chance (chosen)."""

_PEAK = 16
"""Allowed ratio of the largest error to the RMS error (chosen; normal errors reach 6)."""


def integer_operands(problem: ConvProblem, generator: np.random.Generator) -> Operands:
    """Return integer-valued operands for which every partial sum is exact in the dtype."""
    dtype = arrays.numpy_dtype(problem.dtype)
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape)
    largest, density = 8, 1.0
    while True:
        tensors = []
        for shape in shapes:
            parts = [
                generator.integers(-largest, largest, size=shape, endpoint=True)
                * (generator.random(shape) < density)
                for _ in range(2 if problem.is_complex else 1)
            ]
            tensors.append((parts[0] + 1j * parts[1] if parts[1:] else parts[0]).astype(dtype))
        operands = Operands(*tensors)
        sums = [np.max(m, initial=0.0) for m in Truth(problem, operands).magnitudes]
        if max(sums) <= EXACT_UP_TO[problem.dtype]:
            return operands
        # First use smaller numbers.  If numbers up to 1 still have too large a sum, use more zeros.
        largest, density = (largest // 2, density) if largest > 1 else (1, density / 2)


def _part_of_axis(array: np.ndarray, axis: int, part: slice) -> np.ndarray:
    return array[(slice(None),) * axis + (part,)]


def _naive(problem: ConvProblem, operands: Operands) -> Results:
    x, w, dy = operands
    shapes = (problem.output_shape, x.shape, w.shape, problem.bias_shape)
    results = Results(*(np.empty(shape, x.dtype) for shape in shapes))
    with np.errstate(all="ignore"):
        naive.forward(problem, x, w, None, None, None, results.y)
        naive.backprop_input(problem, w, dy, None, None, None, results.dx)
        naive.backprop_filter(problem, x, dy, results.dw)
        naive.backprop_bias(problem, dy, results.db)
    return results


def _to_unit(array: np.ndarray) -> np.ndarray:
    """Return the array times the power of two that brings its largest element near 1."""
    largest = float(np.max(np.abs(array), initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return array
    power = -math.frexp(largest)[1]
    if array.dtype.kind == "c":
        return np.ldexp(array.real, power) + 1j * np.ldexp(array.imag, power)
    return np.ldexp(array, power)


def _inner(a: np.ndarray, b: np.ndarray) -> float:
    """Return <a, b>; for complex numbers its real part."""
    return float(np.sum(a.conj() * b).real)


def _ratio(difference: Any, scale: Any) -> float:
    """Return |difference| / scale, where 0 / 0 is 0."""
    size = abs(float(difference))
    if size == 0 or math.isnan(size):
        return size
    return size / float(scale) if scale else math.inf


def _smallest(dtype: str) -> float:
    part = REAL_PART.get(dtype, dtype)
    return float(ml_dtypes.finfo(arrays.numpy_dtype(part)).smallest_subnormal)
