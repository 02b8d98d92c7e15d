"""Tools of the tests of the Hopper kernels."""

from __future__ import annotations

from cupyconv import ConvProblem, formats
from cupyconv.kernels.family import Tile
from cupyconv.planning import Plan
from cupyconv.planning.families import FAMILIES
from tests import agreement, emulator
from tests.agreement import fits, plan_with
from tests.configurations import in_formats, random_problems

ARCH = "sm_90"
FAMILY = FAMILIES["cuda-hopper"]
WIDE, PLANAR, SINGLE, BANDS = (
    [tile for tile in FAMILY.tiles if (tile.itemsize, tile.defines["PLANAR"]) == kind]
    for kind in ((2, 0), (2, 1), (4, 0), (4, 1))
)
PLANES = FAMILIES["cuda-hopper-bf16x6"]
BY_PLANES = {"impl": PLANES.name, "arch": ARCH, "precision": "bf16x6"}


def last_axes(problem: ConvProblem) -> list[ConvProblem]:
    """Return the problem in channels-last formats, once per filter format with C or K last."""
    rank = problem.spatial_rank
    data = formats.data_formats(rank)[1]
    return [in_formats(problem, data, filters) for filters in formats.filter_formats(rank)[1:]]


def require_exact(
    problem: ConvProblem,
    impl: str = "cuda-hopper",
    precision: str = "ieee",
    passes: tuple[str, ...] | None = None,
    **choices: int | Tile,
) -> tuple[str, ...]:
    """Require exact results of passes, by default all that a family supports, and return them."""
    passes = passes or fits(problem, impl, ARCH, precision)
    how: str | Plan = impl
    if choices:
        how = plan_with(
            problem, impl, emulator.device(ARCH), passes=passes, precision=precision, **choices
        )
    agreement.require_exact(
        emulator, problem, impl=how, arch=ARCH, passes=passes, precision=precision
    )
    return passes


def random_lines(count: int, seed: int) -> list[ConvProblem]:
    """Return random channels-last problems with channels multiplied by 8, 5 or 1."""
    found: list[ConvProblem] = []
    for problem in random_problems(count, seed=seed):
        if problem.groups == 1 and 0 not in problem.input_shape:
            rank = problem.spatial_rank
            first = in_formats(
                problem, formats.data_formats(rank)[0], formats.filter_formats(rank)[0]
            )
            x, w = list(first.input_shape), list(first.filter_shape)
            more = (8, 5, 1)[len(found) % 3]
            x[1], w[0], w[1] = x[1] * more, w[0] * more, w[1] * more
            wide = first.replace(input_shape=x, filter_shape=w, dtype="float16")
            found.append(last_axes(wide)[len(found) % 2])
    return found
