"""All kernel launches that plans contain for the suite's layers, dtypes and memory orders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

import cupyconv
from cupyconv.backends import GpuBackend
from cupyconv.bench import suites
from cupyconv.formats import data_formats, filter_formats
from cupyconv.gpu.runtime import Series
from cupyconv.kernels.family import Choices
from cupyconv.kernels.request import PLAIN, Epilogue
from cupyconv.kernels.strides import Strides
from cupyconv.launch import ROLES, FilterForm, Launch
from cupyconv.planning import Device, PassPlan, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import contenders, plan_of
from cupyconv.problem import PASSES, ConvProblem
from tests import emulator
from tests.configurations import in_formats, integer_data
from tests.emulator.driver import DriverRuntime

NUMBERS = (
    ("float16", "ieee"),
    ("bfloat16", "ieee"),
    ("float32", "ieee"),
    ("float32", "tf32"),
    ("float64", "ieee"),
)
"""Dtypes, with the precisions for which plans differ."""

CONTENDERS = 5
"""Best-ranked candidates per pass; autotuning may select any of them."""

_ADDRESSES = tuple(1 + role << 40 for role in range(len(ROLES)))


def prepare(
    planned: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    device: Device,
    epilogue: Epilogue = PLAIN,
) -> tuple[Launch, ...]:
    """Return the launches of a planned pass."""
    request = Request(problem, planned.pass_, device, strides=strides).reduced
    return planned.family.launches(request, planned, epilogue)


def filter_form(
    planned: PassPlan, problem: ConvProblem, strides: Strides, device: Device
) -> FilterForm | None:
    """Return the copy of w that a planned pass writes first; None if the pass reads w itself."""
    request = Request(problem, planned.pass_, device, strides=strides).reduced
    return planned.family.filter_form(request, planned)


def run(backend: GpuBackend, problem: ConvProblem, planned: PassPlan, *arrays: Any) -> None:
    """Run a planned pass on contiguous arrays x, w and y."""
    strides = Strides.contiguous(problem)
    request = Request(problem, planned.pass_, backend.device, strides=strides)
    addresses = map(backend.address, arrays)
    backend.prepare(request, planned, ROLES[:3])((*addresses, 0, 0))


def require_last_block(problem: ConvProblem, impl: str, arch: str = "sm_80") -> None:
    """Require that the last block, or cluster, of a forward pass is right.

    The grid has a block for each tile, and only the pages that the last block touches are
    allocated.
    """
    backend = emulator.convolutions.backend(arch)
    backend.device = replace(backend.device, multiprocessors=2**29)
    planned = plan_pass(Request(problem, "forward", backend.device), impl)
    near = problem.replace(input_shape=[min(size, 40) for size in problem.input_shape])
    data = integer_data(near)
    expected = cupyconv.conv_forward(data.x, data.w, impl="reference", **near.keywords)
    x = emulator.memory.lazy(problem.input_shape, np.float16, "x")
    y = emulator.memory.lazy(problem.output_shape, np.float16, "y")
    x[tuple(slice(-size, None) for size in near.input_shape)] = data.x
    blocks = planned.blocks // (planned.tile.defines.get("CLUSTER", 1) if planned.tile else 1)
    with emulator.settings(blocks=[blocks - 1]):
        run(backend, problem, planned, x, emulator.memory.array(data.w, "w"), y)
    last = (..., -1, slice(-4, None), *[slice(None)] * problem.data_format.endswith("C"))
    assert expected[last].any()
    assert (y[last] == expected[last]).all()
    assert not y.reshape(-1)[: 1 << 10].any()


@dataclass(frozen=True)
class Planned:
    """A launch, with its problem and pass."""

    problem: ConvProblem
    pass_: str
    launch: Launch

    @property
    def variant(self) -> tuple[str, tuple[tuple[str, str | int], ...], str]:
        """Source, macros and entry of the kernel."""
        return self.launch.source, self.launch.defines, self.launch.entry


def problems() -> Iterator[tuple[ConvProblem, str]]:
    """Yield the suite's layers, channels first and last, in all dtypes, each with a precision."""
    for layer, (dtype, precision) in product(suites.listed(), NUMBERS):
        problem = layer.problem.replace(dtype=dtype)
        rank = problem.spatial_rank
        yield problem, precision
        last = in_formats(problem, data_formats(rank)[1], filter_formats(rank)[2])
        yield last, precision


def with_every_tile(request: Request, impl: str) -> Iterator[PassPlan]:
    """Yield plans with each tile, also with those that the planner leaves out for the problem."""
    family, reduced = FAMILIES[impl], request.reduced
    for tile, splits in product(family.fitting_tiles(reduced), (1, 2)):
        found = family.candidate(reduced, Choices(tile=tile, splits=splits))
        if found is not None:
            yield plan_of(request, found)


def planned(architecture: str, count: int = CONTENDERS) -> dict[tuple, Planned]:
    """Return a launch of each kernel variant, from ``count`` candidates for every pass."""
    device, found = Device.of(architecture), {}
    for (problem, precision), pass_ in product(problems(), PASSES):
        strides = Strides.contiguous(problem)
        request = Request(problem, pass_, device, precision, None, strides)
        for one in contenders(request, "auto", count):
            for launch in prepare(one, problem, strides, device):
                made = found.setdefault(
                    (launch.source, launch.defines, launch.entry), Planned(problem, pass_, launch)
                )
                # All launches of a variant share one function, and so its shared memory.
                assert made.launch.shared_bytes == launch.shared_bytes
    return found


def most_demanding(launches: dict[tuple, Planned]) -> list[Planned]:
    """Return, for each kernel file, the variants with the most shared memory and most threads."""
    of_source: dict[str, list[Planned]] = {}
    for made in launches.values():
        of_source.setdefault(made.launch.source, []).append(made)
    chosen = {}
    for made in of_source.values():
        for size in (lambda one: one.launch.shared_bytes, lambda one: one.launch.block):
            most = max(made, key=size)
            chosen[most.variant] = most
    return list(chosen.values())


def launch(made: Planned, architecture: str) -> None:
    """Check a launch by the driver's rules.

    Raises:
        Refusal: a GPU would refuse it.
    """
    Series([made.launch], DriverRuntime(architecture), ROLES)(_ADDRESSES)
