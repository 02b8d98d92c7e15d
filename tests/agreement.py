"""Exact agreement of an implementation with the reference, on integer-valued data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

import cupyconv
from cupyconv import ConvProblem, operations
from cupyconv.cpu import naive
from cupyconv.planning import Device, Request, cost, plan_pass
from cupyconv.planning.families import FAMILIES, Candidate, Tile, direct, gather
from cupyconv.problem import PASSES
from tests.configurations import Data, integer_data


def fits(
    problem: ConvProblem, impl: str, device: str | Device, precision: str = "ieee"
) -> tuple[str, ...]:
    """The passes of a problem that a kernel family takes on a device."""
    device = Device.of(device)
    requests = [Request(problem, pass_, device, precision).reduced for pass_ in PASSES]
    return tuple(r.pass_ for r in requests if FAMILIES[impl].refuses(r) is None)


@contextmanager
def planned(impl: str, tile: int | Tile, splits: int = 1, method: int = 0) -> Iterator[None]:
    """Plans of a family take a tile, by number among those that fit, and splits if they can.

    Those of cuda-gather also one of its methods, by number.

    Nothing that was worked out with other plans is remembered, and nothing of these afterwards.
    """

    def only(request: Request) -> list[Candidate]:
        fitting = list(dict.fromkeys(c.tile for c in ranked(request)))
        chosen = fitting[tile % len(fitting)] if isinstance(tile, int) else tile
        word = list(gather.METHODS[request.pass_])[method] if method else ""
        found = family.candidate(request, chosen, splits, word)
        found = found or family.candidate(request, chosen, 1, word)
        assert found is not None
        return [found]

    family = FAMILIES[impl]
    ranked = family.candidates
    with (
        _planned_anew(),
        mock.patch.object(family, "candidates", only),
        mock.patch.object(cost, "LEAST_SPLIT_STEPS", 1),
    ):
        yield


@contextmanager
def where_they_lie() -> Iterator[None]:
    """cuda-gather reads its operands where they lie, also where the planner would copy them."""
    with _planned_anew(), mock.patch.object(gather, "worthwhile", return_value=[""]):
        yield


@contextmanager
def _planned_anew() -> Iterator[None]:
    remembered = plan_pass, operations._ready
    try:
        for one in remembered:
            one.cache_clear()
        yield
    finally:
        for one in remembered:
            one.cache_clear()


@contextmanager
def cut_directly(number: int) -> Iterator[None]:
    """Blocks of cuda-direct are cut in any way that they may be, by number; large tiles first."""

    def chosen(request: Request) -> direct.Cut | None:
        found = sorted(
            direct.cuts(request), key=lambda made: -made.down.extent * made.across.extent
        )
        return found[number % len(found)] if found else None

    with mock.patch.object(direct, "cut", chosen):
        yield


def compute(api: Any, pass_: str, problem: ConvProblem, data: Data, **more: Any) -> Any:
    """One pass of a problem by a module or object that has the library's functions."""
    arguments = {**problem.keywords, **more}
    if pass_ == "forward":
        return api.conv_forward(data.x, data.w, data.bias, **arguments)
    if pass_ == "backprop_input":
        return api.conv_backprop_input(problem.input_shape, data.w, data.dy, **arguments)
    return api.conv_backprop_filter(data.x, problem.filter_shape, data.dy, **arguments)


def plain_sums(problem: ConvProblem, pass_: str, data: Data) -> np.ndarray:
    """A pass, one term after another."""
    if pass_ == "forward":
        naive.forward(problem, data.x, data.w, data.bias, None, y := np.empty_like(data.dy))
        return y
    if pass_ == "backprop_input":
        naive.backprop_input(problem, data.w, data.dy, None, None, dx := np.empty_like(data.x))
        return dx
    naive.backprop_filter(problem, data.x, data.dy, dw := np.empty_like(data.w))
    return dw


def require_exact(
    api: Any,
    problem: ConvProblem,
    *,
    seed: int = 0,
    to_device: Callable[[np.ndarray], Any] = lambda array: array,
    to_host: Callable[[Any], np.ndarray] = lambda array: array,
    passes: tuple[str, ...] = PASSES,
    **more: Any,
) -> None:
    """Every pass of ``api`` gives the reference's integers.

    Args:
        api: a module or object with the library's functions.
        problem: what to compute.
        seed: of the data.
        to_device, to_host: move arrays to where ``api`` works, and back.
        passes: which to compute.
        more: further arguments of every call, such as ``impl``.
    """
    host = integer_data(problem, seed)
    data = Data(*(to_device(array) for array in (host.x, host.w, host.dy, host.bias)))
    for pass_ in passes:
        got = to_host(compute(api, pass_, problem, data, **more))
        expected = compute(cupyconv, pass_, problem, host, impl="reference")
        require_equal(got, expected, f"{pass_} of {problem}")


def require_equal(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """No element differs; the message has ``what`` and the first that does."""
    assert got.dtype == expected.dtype
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    difference = got.astype(wide) - expected.astype(wide)
    wrong = np.argwhere(difference != 0)
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {got.size} elements are wrong, the first at "
        f"{tuple(map(int, wrong[0]))}: {got[tuple(wrong[0])]}, not {expected[tuple(wrong[0])]}"
    )


def require_close(got: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> None:
    """NaN and Inf are where they are expected, and all else is within the bounds."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    assert (np.isnan(got) == np.isnan(expected)).all()
    assert (np.isinf(got) == np.isinf(expected)).all()
    finite = np.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=rtol, atol=atol)
