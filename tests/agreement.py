"""Exact agreement of an implementation with the reference, on integer-valued data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

import cupyconv
from cupyconv import ConvProblem, Plan
from cupyconv.cpu import naive
from cupyconv.kernels import direct, gather, patch, toeplitz
from cupyconv.kernels.family import Candidate, Choices, Tile
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import plan_of, ranked_candidates
from cupyconv.problem import PASSES, ConvAxis
from tests.configurations import Data, integer_data


def fits(
    problem: ConvProblem,
    impl: str,
    device: str | Device,
    precision: str = "ieee",
    strides: Strides | None = None,
) -> tuple[str, ...]:
    """Return the passes of a problem that a kernel family supports on a device."""
    device = Device.of(device)
    requests = [
        Request(problem, pass_, device, precision, strides=strides).reduced for pass_ in PASSES
    ]
    return tuple(r.pass_ for r in requests if FAMILIES[impl].refuses(r) is None)


def candidate_with(
    request: Request, impl: str, tile: int | Tile = 0, splits: int = 1, copies: int = 0
) -> Candidate:
    """Return a kernel family's candidate with these choices.

    Args:
        request: a reduced request that the family supports.
        impl: the kernel family.
        tile: a block tile, or its index among the fitting tiles, modulo their number.  Families
            with tilings ignore it and use their best-ranked tiling.
        splits: number of splits; 1 is used if this number is illegal.
        copies: index of the operands that cuda-gather copies, in COPIES.
    """
    family = FAMILIES[impl]
    ranked = family.candidates(request)
    view = min((one.view for one in ranked), key=len)  # "" unless all candidates have a view
    ranked = [one for one in ranked if one.view == view]
    fitting = list(dict.fromkeys(one.tile for one in ranked))
    least = min((one.copies for one in ranked), key=len)  # () unless all candidates copy
    choices = Choices(
        tile=fitting[tile % len(fitting)] if isinstance(tile, int) else tile,
        tiling=ranked[0].tiling,
        splits=splits,
        copies=gather.COPIES[request.pass_][copies] if copies else least,
        view=view,
    )
    found = family.candidate(request, choices)
    found = found or family.candidate(request, replace(choices, splits=1))
    assert found is not None, f"{impl} does not compute {request} with {choices}"
    return found


def plan_with(
    problem: ConvProblem,
    impl: str,
    device: str | Device,
    *,
    tile: int | Tile = 0,
    splits: int = 1,
    copies: int = 0,
    **how: Any,
) -> Plan:
    """Return a plan whose passes a kernel family computes with these choices.

    Args:
        problem, device: as for ``cupyconv.plan``.
        impl, tile, splits, copies: as for ``candidate_with``.
        how: ``passes``, ``precision`` and ``strides``, as for ``plan_by``.
    """

    def choose(request: Request) -> Candidate:
        return candidate_with(request, impl, tile, splits, copies)

    return plan_by(choose, problem, impl, device, **how)


def plan_with_tiling(
    problem: ConvProblem, impl: str, number: int, device: str | Device, **how: Any
) -> Plan:
    """Return a plan with a tiling of a family in TILED, selected by its rank in size.

    Args:
        problem, impl, device, how: as for ``plan_with``.
        number: index of the tiling, largest tiles first, modulo the number of tilings.
    """
    family: Any = FAMILIES[impl]

    def choose(request: Request) -> Candidate:
        made = sorted(TILED[impl](request), key=pixels_of, reverse=True)
        candidates = family.candidates_of(request, made[number % len(made)])
        return min(candidates, key=lambda one: one.microseconds)

    return plan_by(choose, problem, impl, device, **how)


TILED: dict[str, Callable[[Request], list[Any]]] = {
    "cuda-direct": lambda request: [tiling for tiling, _ in direct.geometries(request)],
    "cuda-toeplitz": lambda request: list(toeplitz.ranked_tilings(request)),
    "cuda-patch": lambda request: list(patch.ranked_tilings(request)),
}
"""All tilings of a request, keyed by kernel family."""


def pixels_of(tiling: direct.Tiling | patch.Tiling | toeplitz.Tiling) -> int:
    """Return the number of pixels of a tile."""
    match tiling:
        case direct.Tiling():
            return tiling.rows * tiling.columns
        case patch.Tiling():
            return tiling.tile_p * tiling.tile_q
        case toeplitz.Tiling():
            return 16 * tiling.row_tiles * 8 * tiling.strips


def plan_of_view(
    problem: ConvProblem,
    view: str,
    pass_: str,
    device: str | Device,
    impl: str = "cuda-gather",
    number: int = 0,
    splits: int = 0,
    **how: Any,
) -> Plan:
    """Return a plan whose pass a kernel family computes as a view.

    Args:
        problem, device, impl, how: as for ``plan_with``.
        view: name of the view.
        pass_: the pass; other passes are planned with "auto".
        number: rank of the candidate, modulo their number.
        splits: number of splits to change the candidate to; 0 keeps its number.
    """

    def choose(request: Request) -> Candidate:
        found = [one for one in ranked_candidates(request, impl) if one.view == view]
        chosen = found[number % len(found)]
        if not splits:
            return chosen
        changed = FAMILIES[impl].candidate(request, replace(chosen, splits=splits, blocks=0))
        assert changed is not None
        return changed

    return plan_by(choose, problem, impl, device, passes=[pass_], **how)


def plan_without_copies(problem: ConvProblem, impl: str, device: str | Device, **how: Any) -> Plan:
    """Return a plan without copies of operands, unless the family cannot do without them.

    Args:
        problem, device, how: as for ``plan_with``.
        impl: a kernel family, or "auto".
    """

    def choose(request: Request) -> Candidate:
        ranked = ranked_candidates(request, impl)
        return next((one for one in ranked if one.has_only("tile", "tiling", "splits")), ranked[0])

    return plan_by(choose, problem, impl, device, **how)


def plan_by(
    choose: Callable[[Request], Candidate],
    problem: ConvProblem,
    impl: str,
    device: str | Device,
    *,
    passes: Sequence[str] | None = None,
    precision: str = "ieee",
    strides: Strides | None = None,
) -> Plan:
    """Return a plan with the chosen candidates.

    Args:
        choose: function that chooses a pass's candidate.
        problem, impl, device, precision: as for ``cupyconv.plan``.
        passes: passes to plan with these candidates, which the family must support; None for all
            supported passes.  The other passes are planned with "auto".
        strides: strides of the tensors; None for contiguous tensors.
    """
    device = Device.of(device)
    taken = PASSES if impl == "auto" else fits(problem, impl, device, precision, strides)
    chosen = taken if passes is None else passes
    assert set(chosen) <= set(taken), f"{impl} takes {taken} of {problem}, not {passes}"
    planned = []
    for pass_ in PASSES:
        request = Request(problem, pass_, device, precision, strides=strides)
        if pass_ in chosen:
            planned.append(plan_of(request, choose(request.reduced)))
        else:
            planned.append(plan_pass(Request(problem, pass_, device, precision, strides=strides)))
    return Plan(problem, device, tuple(planned))


def compute(api: Any, pass_: str, problem: ConvProblem, data: Data, **more: Any) -> Any:
    """Compute one pass of a problem with a module or object that has the library's functions."""
    arguments = {**problem.keywords, **more}
    if pass_ == "forward":
        return api.conv_forward(data.x, data.w, data.bias, **arguments)
    if pass_ == "backprop_input":
        return api.conv_backprop_input(problem.input_shape, data.w, data.dy, **arguments)
    return api.conv_backprop_filter(data.x, problem.filter_shape, data.dy, **arguments)


RESULT = {"forward": "dy", "backprop_input": "x", "backprop_filter": "w"}
"""Tensor with the shape of a pass's result."""


def definition(problem: ConvProblem, pass_: str, data: Data) -> np.ndarray:
    """Compute a pass by its definition, on numbers of float64 or more precision."""
    result = np.zeros_like(vars(data)[RESULT[pass_]])
    tensors = replace(data, **{RESULT[pass_]: result})
    x, dy = (array.transpose(problem.data_axes) for array in (tensors.x, tensors.dy))
    w = tensors.w.transpose(problem.filter_axes)
    if pass_ == "forward" and data.bias is not None:
        dy += data.bias.reshape(-1, *[1] * problem.spatial_rank)
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    for group, tap in product(range(problem.groups), np.ndindex(*problem.filter_sizes)):
        read = [
            [(p, h) for p in range(axis.output) if 0 <= (h := _place(axis, p, t)) < axis.input]
            for axis, t in zip(problem.axes, tap, strict=True)
        ]
        if not all(read):
            continue
        at_p, at_h = (
            (..., *np.ix_(*places))
            for places in zip(*(zip(*pairs, strict=True) for pairs in read), strict=True)
        )
        x_group = x[:, group * channels : (group + 1) * channels]
        dy_group = dy[:, group * filters : (group + 1) * filters]
        w_tap = w[(slice(group * filters, (group + 1) * filters), slice(None), *tap)]
        if pass_ == "forward":
            dy_group[at_p] += np.einsum("nc...,kc->nk...", x_group[at_h], w_tap)
        elif pass_ == "backprop_input":
            x_group[at_h] += np.einsum("nk...,kc->nc...", dy_group[at_p], w_tap.conj())
        else:
            w_tap[...] = np.einsum("nk...,nc...->kc...", dy_group[at_p], x_group[at_h].conj()).sum(
                axis=tuple(range(2, w.ndim))
            )
    return result


def _place(axis: ConvAxis, output: int, tap: int) -> int:
    return output * axis.stride - axis.pad_before + tap * axis.dilation


def wide_definition(problem: ConvProblem, pass_: str, data: Data) -> np.ndarray:
    """Compute a pass by its definition in float64 or complex128."""
    wide = np.complex128 if problem.is_complex else np.float64
    return definition(problem, pass_, Data(*(array.astype(wide) for array in vars(data).values())))


def plain_sums(problem: ConvProblem, pass_: str, data: Data) -> np.ndarray:
    """Compute a pass by adding one term at a time."""
    if pass_ == "forward":
        naive.forward(problem, data.x, data.w, data.bias, None, None, y := np.empty_like(data.dy))
        return y
    if pass_ == "backprop_input":
        naive.backprop_input(
            problem, data.w, data.dy, None, None, None, dx := np.empty_like(data.x)
        )
        return dx
    naive.backprop_filter(problem, data.x, data.dy, dw := np.empty_like(data.w))
    return dw


def to_tf32(array: np.ndarray) -> np.ndarray:
    """Round float32 to the 10 fraction bits of TF32, ties away from zero."""
    bits = array.view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


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
    """Check that every pass of ``api`` gives the same integers as the reference.

    Args:
        api: a module or object with the library's functions.
        problem: the problem to compute.
        seed: seed of the data.
        to_device, to_host: functions that move arrays to the device of ``api``, and back.
        passes: the passes to compute.
        more: further arguments of every call, such as ``impl``.
    """
    host = integer_data(problem, seed)
    data = Data(*(to_device(array) for array in (host.x, host.w, host.dy, host.bias)))
    for pass_ in passes:
        got = to_host(compute(api, pass_, problem, data, **more))
        expected = compute(cupyconv, pass_, problem, host, impl="reference")
        require_equal(got, expected, f"{pass_} of {problem}")


def require_equal(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Check that no element differs; the message gives ``what`` and the first wrong element."""
    assert got.dtype == expected.dtype
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    difference = got.astype(wide) - expected.astype(wide)
    wrong = np.argwhere(difference != 0)
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {got.size} elements are wrong, the first at "
        f"{tuple(map(int, wrong[0]))}: {got[tuple(wrong[0])]}, not {expected[tuple(wrong[0])]}"
    )


def require_close(got: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> None:
    """Check that NaN and Inf are where expected, and all other values within the bounds."""
    got, expected = got.astype(np.float64), expected.astype(np.float64)
    assert (np.isnan(got) == np.isnan(expected)).all()
    assert (np.isinf(got) == np.isinf(expected)).all()
    finite = np.isfinite(expected)
    np.testing.assert_allclose(got[finite], expected[finite], rtol=rtol, atol=atol)
