"""Promises of precision="ieee", for every implementation that supports this precision.

A value changes only the results that read it.  Results that read only zeros are zero.  Subnormals
are kept.  Errors are at most twice those of plain sums, for all magnitudes.  The properties take a
Subject, so that they apply to any implementation.  They compare results with the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.arrays import numpy_dtype
from cupyconv.cpu import choice, loops
from cupyconv.planning import Request
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import ranked_candidates
from cupyconv.problem import PASSES
from tests import agreement, emulator
from tests.agreement import RESULT, definition, fits, plain_sums
from tests.configurations import Data, integer_data, random_data
from tests.cpu import test_cpu
from tests.families import FAMILY_LAYERS

pytestmark = pytest.mark.costly

OPERANDS = {"forward": ("x", "w"), "backprop_input": ("dy", "w"), "backprop_filter": ("x", "dy")}
"""Operands of a pass; the padded operand is first."""

OUTLIERS = {
    "float16": (2.0**12,),
    "bfloat16": (2.0**30, 1e30),
    "float32": (2.0**30, 1e30),
    "float64": (2.0**60, 1e300),
}
"""Large values that keep the results finite.  The dtype's largest value, which does not, is also
tested."""

COMPLEX = ("complex64", "complex128")

DECADES = {
    "float16": (-6, 2),
    **dict.fromkeys(("bfloat16", "float32", "float64", *COMPLEX), (-4, 4)),
}
"""Smallest and largest power of ten of magnitudes; products of float16 must not overflow."""


@dataclass(frozen=True)
class Subject:
    """One pass of a problem by an implementation.

    Attributes:
        name: name of the implementation.
        problem, pass_: the problem and its pass.
        compute: function that returns the result for data of the problem.
        spread: whether backprop_input also multiplies by zeros between the elements of dy.
    """

    name: str
    problem: ConvProblem
    pass_: str
    compute: Callable[[Data], np.ndarray]
    spread: bool = False

    def __str__(self) -> str:
        return f"{self.pass_} of {self.problem} by {self.name}"


# -- the definition --------------------------------------------------------------------------------


def readers(problem: ConvProblem, pass_: str, role: str, place: tuple[int, ...]) -> np.ndarray:
    """Return the results that read an operand's value at a position."""
    ones = Data(*(np.ones(shape) for shape in _shapes(problem)), None)
    marked = np.zeros(vars(ones)[role].shape)
    marked[place] = 1
    return definition(problem, pass_, replace(ones, **{role: marked})) > 0


def over_padding(subject: Subject, place: tuple[int, ...]) -> np.ndarray:
    """Return the results that multiply a value of the second operand by padding, or read it.

    In the same problem with padding as part of the first operand, these results read the value.
    """
    problem, pass_ = subject.problem, subject.pass_
    if pass_ == "backprop_input":
        # Add outputs that do not exist, on either side as far as the filter reaches.
        reach = [axis.filter * axis.dilation * axis.stride for axis in problem.axes]
        around = [
            (before + more, after + more)
            for (before, after), more in zip(problem.padding, reach, strict=True)
        ]
        wider = problem.replace(padding=around, **({"stride": 1} if subject.spread else {}))
    else:
        shape = list(problem.input_shape)
        for axis, pair in zip(problem.data_axes[2:], problem.padding, strict=True):
            shape[axis] += sum(pair)
        wider = problem.replace(input_shape=shape, padding=0)
    return readers(wider, pass_, OPERANDS[pass_][1], place)


def _shapes(problem: ConvProblem) -> tuple[tuple[int, ...], ...]:
    return problem.input_shape, problem.filter_shape, problem.output_shape


def exact(subject: Subject, data: Data) -> np.ndarray:
    """Return the definition's result in more precision than the dtype's.

    For 64-bit dtypes, this is the platform's longest float, which may be float64 itself.
    """
    long: type = np.longdouble if subject.problem.dtype in ("float64", "complex128") else np.float64
    if data.x.dtype.kind == "c":
        long = np.clongdouble if long is np.longdouble else np.complex128
    return definition(subject.problem, subject.pass_, _changed(data, lambda a: a.astype(long)))


def _changed(data: Data, change: Callable[[np.ndarray], np.ndarray]) -> Data:
    return Data(change(data.x), change(data.w), change(data.dy), None)


def _random(problem: ConvProblem) -> Data:
    return replace(random_data(problem), bias=None)


def _with(data: Data, role: str, place: tuple[int, ...], value: float) -> Data:
    array = vars(data)[role].copy()
    array[place] = value
    return replace(data, **{role: array})


def _places(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the positions of a corner, next to padding, and of the middle."""
    yield tuple(0 for _ in shape)
    yield tuple(extent // 2 for extent in shape)


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.itemsize}")


# -- the properties --------------------------------------------------------------------------------


def outliers_stay(subject: Subject) -> None:
    """Check that a large value changes the results that read it, and no bit of other results."""
    data, dtype = _random(subject.problem), subject.problem.dtype
    without = _bits(subject.compute(data))
    largest = float(ml_dtypes.finfo(numpy_dtype(dtype)).max)
    for role in OPERANDS[subject.pass_]:
        for place in _places(vars(data)[role].shape):
            reads = readers(subject.problem, subject.pass_, role, place)
            for outlier in (*OUTLIERS[dtype], largest):
                with np.errstate(over="ignore"):
                    got = subject.compute(_with(data, role, place, outlier))
                changed = _bits(got) != without
                stray = np.count_nonzero(changed & ~reads)
                assert not stray, f"{role}{place} = {outlier}: {stray} others changed, {subject}"
                assert changed[reads].all(), f"{role}{place} = {outlier} is lost, {subject}"


def what_is_not_finite_stays(subject: Subject) -> None:
    """Check that NaN and infinity reach the results that read them, and other results are exact.

    In the second operand, they may also make results NaN that multiply them by padding.
    """
    problem, pass_ = subject.problem, subject.pass_
    for number, role in enumerate(OPERANDS[pass_]):
        data = replace(integer_data(problem), bias=None)
        permitted = np.zeros(vars(data)[RESULT[pass_]].shape, bool)
        for place, value in zip(_places(vars(data)[role].shape), (np.nan, -np.inf), strict=True):
            data = _with(data, role, place, value)
            if number == 1:
                permitted |= over_padding(subject, place)
        with np.errstate(invalid="ignore"):
            expected = exact(subject, data)
            got = subject.compute(data).astype(np.float64)
        right = (got == expected) | (np.isnan(got) & (np.isnan(expected) | permitted))
        assert right.all(), f"{np.count_nonzero(~right)} wrong with some of {role}, {subject}"
        assert not np.isfinite(expected).all()


def bits_beside_what_is_not_finite_stay(subject: Subject) -> None:
    """Check that NaN and infinity change no bit of results that do not multiply them.

    Results that multiply them by padding may change.
    """
    data = _random(subject.problem)
    without = _bits(subject.compute(data))
    for number, role in enumerate(OPERANDS[subject.pass_]):
        for place, value in zip(_places(vars(data)[role].shape), (np.nan, np.inf), strict=True):
            may_change = readers(subject.problem, subject.pass_, role, place)
            if number == 1:
                may_change |= over_padding(subject, place)
            with np.errstate(invalid="ignore"):
                got = subject.compute(_with(data, role, place, value))
            stray = np.count_nonzero((_bits(got) != without) & ~may_change)
            assert not stray, f"{role}{place} = {value}: {stray} others changed, {subject}"


def errors_are_those_of_plain_sums(subject: Subject) -> None:
    """Check that errors, relative to the sum of magnitudes, are at most twice a plain sum's."""
    problem, pass_ = subject.problem, subject.pass_
    numbers = np.random.default_rng(1)

    def over_decades(shape: tuple[int, ...]) -> np.ndarray:
        values = 10.0 ** numbers.uniform(*DECADES[problem.dtype], shape)
        if problem.is_complex:
            values = values * np.exp(1j * numbers.uniform(0, 2 * np.pi, shape))
        return (values * numbers.choice((-1, 1), shape)).astype(numpy_dtype(problem.dtype))

    data = Data(*map(over_decades, _shapes(problem)), None)
    expected = exact(subject, data)
    sizes = exact(subject, _changed(data, np.abs))
    worst = [
        float(np.max(np.abs(got.astype(expected.dtype) - expected) / np.where(sizes, sizes, 1)))
        for got in (subject.compute(data), plain_sums(problem, pass_, data))
    ]
    assert worst[0] <= 2 * worst[1], f"{worst[0]:.3g}, plain sums {worst[1]:.3g}, {subject}"


def subnormals_stay(subject: Subject) -> None:
    """Check that multiples of the smallest subnormal, in either operand, are added exactly."""
    dtype = numpy_dtype(subject.problem.dtype)
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    numbers = np.random.default_rng(2)
    for tiny in OPERANDS[subject.pass_]:
        tensors = {role: np.ones(shape, dtype) for role, shape in _roles(subject.problem)}
        multiples = numbers.integers(-3, 6, tensors[tiny].shape)
        tensors[tiny] = (multiples * smallest).astype(dtype)
        data = Data(**tensors, bias=None)
        got, expected = subject.compute(data), exact(subject, data).astype(dtype)
        wrong = np.count_nonzero(got != expected)
        assert not wrong, f"{wrong} of {got.size} wrong with tiny {tiny}, {subject}"


def _roles(problem: ConvProblem) -> Iterator[tuple[str, tuple[int, ...]]]:
    return zip(("x", "w", "dy"), _shapes(problem), strict=True)


def zeros_stay(subject: Subject) -> None:
    """Check that sums of zero products are zero, and results without terms are positive zero."""
    problem, pass_ = subject.problem, subject.pass_
    data = _random(problem)
    ones = Data(*map(np.ones, _shapes(problem)), None)
    reads_nothing = definition(problem, pass_, ones) == 0
    assert not _bits(subject.compute(data))[reads_nothing].any(), str(subject)
    for role in OPERANDS[pass_]:
        zeros = vars(data)[role].copy()
        zeros[..., : -(-zeros.shape[-1] // 2)] = 0
        half = replace(data, **{role: zeros})
        with_terms = exact(subject, _changed(half, np.abs)) != 0
        got = subject.compute(half)
        assert not got[~with_terms].any(), f"zeros of {role}, {subject}"


PROPERTIES = (
    outliers_stay,
    what_is_not_finite_stays,
    bits_beside_what_is_not_finite_stay,
    errors_are_those_of_plain_sums,
    subnormals_stay,
    zeros_stay,
)

each_property = pytest.mark.parametrize("holds", PROPERTIES, ids=lambda holds: holds.__name__)


# -- NumPy -----------------------------------------------------------------------------------------

LAYERS = {
    "dense": ConvProblem((2, 16, 9, 40), (12, 16, 3, 3), padding=3),
    "unpadded": ConvProblem((2, 3, 11, 9), (6, 3, 3, 3)),
    "unpadded_signal": ConvProblem((1, 6, 30), (3, 6, 3)),
    "pointwise": ConvProblem((2, 16, 6, 7), (8, 16, 1, 1)),
    "everything_differs": ConvProblem(
        (2, 8, 14, 15),
        (6, 4, 2, 3),
        stride=(4, 3),
        dilation=(1, 2),
        padding=((1, 3), (2, 5)),
        groups=2,
    ),
    "depthwise": ConvProblem((2, 5, 9, 8), (5, 1, 3, 3), padding=3, groups=5),
    "depthwise_strided": ConvProblem(
        (2, 5, 13, 12), (5, 1, 3, 2), stride=(2, 3), padding=(3, 2), dilation=(1, 2), groups=5
    ),
    "grouped": ConvProblem((2, 24, 17, 18), (24, 4, 3, 3), padding=1, groups=6),
    "volume": ConvProblem((1, 9, 4, 6, 7), (5, 9, 2, 3, 3), padding=(1, 2, 3)),
    "signal": ConvProblem((2, 6, 50), (4, 6, 5), padding=6),
    "outer_taps_in_the_padding": ConvProblem((2, 4, 5), (3, 4, 3), dilation=7, padding=7),
}
OTHER_TYPES = ("float64", "float16", "bfloat16")


@each_property
@pytest.mark.parametrize("layer", LAYERS)
def test_numpy(layer, holds):
    for problem in (LAYERS[layer], *test_cpu.channels_last(LAYERS[layer])):
        for subject in numpy_subjects(problem):
            holds(subject)


@each_property
@pytest.mark.parametrize("layer", ["depthwise", "depthwise_strided"])
def test_numpy_without_numba(layer, holds, monkeypatch):
    for module in (choice, loops):
        monkeypatch.setattr(module, "has_numba", lambda: False)
    for problem in (LAYERS[layer], *test_cpu.channels_last(LAYERS[layer])):
        for subject in numpy_subjects(problem, ("loops",)):
            holds(subject)


@each_property
@pytest.mark.parametrize("dtype", OTHER_TYPES)
@pytest.mark.parametrize("layer", ["dense", "depthwise"])
def test_numpy_in_other_types(layer, dtype, holds):
    for subject in numpy_subjects(LAYERS[layer].replace(dtype=dtype)):
        holds(subject)


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("layer", ["dense", "depthwise", "everything_differs"])
def test_numpy_errors_of_complex_numbers(layer, dtype):
    for subject in numpy_subjects(LAYERS[layer].replace(dtype=dtype)):
        errors_are_those_of_plain_sums(subject)


def numpy_subjects(problem: ConvProblem, only: Collection[str] = ()) -> Iterator[Subject]:
    """Yield a Subject for every pass, with every NumPy method and the reference.

    Args:
        problem: the problem to compute.
        only: NumPy methods to use; empty for all methods and the reference.
    """

    def by(pass_: str, **how: object) -> Callable[[Data], np.ndarray]:
        return lambda data: agreement.compute(cupyconv, pass_, problem, data, **how)

    for pass_, method in test_cpu.methods(problem):
        if not only or method in only:
            impl = test_cpu.by_method(problem, pass_, method)
            yield Subject(method, problem, pass_, by(pass_, impl=impl))
    for pass_ in () if only else PASSES:
        yield Subject("reference", problem, pass_, by(pass_, impl="reference"))


# -- the kernels, on the CPU -----------------------------------------------------------------------

KERNELS = {name: layers for name, layers in FAMILY_LAYERS.items() if layers.ieee}
"""Layers of the kernel families that support "ieee"."""


@each_property
@pytest.mark.parametrize("impl", KERNELS)
def test_kernels(impl, holds):
    for subject in kernel_subjects(impl, KERNELS[impl].ieee_dtypes[0]):
        holds(subject)


@pytest.mark.slow
@each_property
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [(impl, dtype) for impl in KERNELS for dtype in KERNELS[impl].ieee_dtypes[1:]],
)
def test_kernels_in_other_types(impl, dtype, holds):
    for subject in kernel_subjects(impl, dtype):
        holds(subject)


def kernel_subjects(impl: str, dtype: str) -> Iterator[Subject]:
    """Yield a Subject for every supported pass of a kernel family's layers, run on the CPU.

    Passes that have views are also computed as a view.
    """
    arch, layers = KERNELS[impl].arch, KERNELS[impl].ieee

    def by(problem: ConvProblem, pass_: str, how: Any) -> Callable[[Data], np.ndarray]:
        return lambda data: agreement.compute(emulator, pass_, problem, data, impl=how, arch=arch)

    for problem in (layer.replace(dtype=dtype) for layer in layers):
        for pass_ in fits(problem, impl, arch):
            # The generic kernel has no stride phases.
            spread = impl == "cuda-generic"
            ranked = ranked_candidates(Request(problem, pass_, emulator.device(arch)), impl)
            for is_view in (False, True):
                of_kind = (one for one in ranked if bool(one.view) == is_view)
                if (best := next(of_kind, None)) is not None:
                    made = agreement.plan_by(
                        lambda _, best=best: best, problem, impl, arch, passes=[pass_]
                    )
                    yield Subject(impl, problem, pass_, by(problem, pass_, made), spread)


def test_every_family_that_may_be_chosen_is_among_them():
    """Kernel families that are not tested support no layer with precision="ieee"."""
    problems = [
        layer.replace(dtype=dtype)
        for layers in KERNELS.values()
        for layer in layers.ieee
        for dtype in DECADES
    ]
    for family in FAMILIES.values():
        if family.on_gpu and family.name not in KERNELS:
            assert not any(fits(problem, family.name, "sm_90a") for problem in problems)
