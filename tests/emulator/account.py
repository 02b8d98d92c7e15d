"""What the kernels of a layer execute, counted on the CPU.

``python -m tests.emulator.account LAYER --impl F --arch sm_80 [--pass P] [--blocks N] [--json]``

The kernels run from the PTX that NVRTC makes of them, some blocks of each launch.  Beside the
counts stand what the cubin takes and how many blocks of it a multiprocessor holds.  The counts are
of PTX instructions: the GPU's compiler makes one, none or several of each.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
import pytest

from cupyconv import ConvError, ConvProblem, arrays
from cupyconv.bench import suites
from cupyconv.formats import data_formats, filter_formats
from cupyconv.gpu import launches
from cupyconv.gpu.launch import Launch, Series
from cupyconv.planning import Device, Request
from cupyconv.planning.plan import PassPlan, contenders
from cupyconv.planning.strides import Strides
from cupyconv.problem import ITEMSIZE, PASSES
from tests import cubins
from tests.configurations import in_formats

from . import driver, memory
from .convolutions import EmulatorRuntime
from .module import EmulatedKernel, Outcome
from .runtime import settings
from .witnesses import MissingError, cutlass, cutlass_sm90
from .work import LANES, Work

BLOCKS = 2
"""Of each launch, that are run unless told otherwise."""


@dataclass(frozen=True)
class Account:
    """What one launch did, as far as it was run.

    Attributes:
        kernel: its name.
        grid, threads: blocks of the launch along each axis, threads of a block.
        blocks: that were run; all counts are of these together.
        registers, spilled, static_shared, dynamic_shared: of a thread, and bytes.
        resident: blocks that a multiprocessor holds at a time.
        limits: what keeps it from holding more.
        reports: that the checker made.
        work: executed instructions, and sectors of global memory.
        wavefronts, ideal_wavefronts: of shared-memory requests, matrix loads included.
        sass_main_loop: how often each instruction stands in the cubin's innermost loops around
            products, those of the tensor cores if there are any; not executed, but counted where
            they stand.
    """

    kernel: str
    grid: tuple[int, ...]
    threads: int
    blocks: int
    registers: int
    spilled: int
    static_shared: int
    dynamic_shared: int
    resident: int
    limits: list[str]
    reports: int
    work: Work
    wavefronts: int
    ideal_wavefronts: int
    sass_main_loop: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """All figures, as plain values."""
        return asdict(self)

    def table(self) -> Iterator[str]:
        """The lines of a table."""
        yield (
            f"{self.kernel[:40]}: grid {self.grid}, {self.threads} threads a block,"
            f" {self.blocks} blocks run, {self.reports} reports"
        )
        yield (
            f"  {self.registers} registers, {self.spilled} bytes spilled, shared memory"
            f" {self.static_shared} + {self.dynamic_shared} bytes, {self.resident} blocks a"
            f" multiprocessor (limit: {', '.join(self.limits) or 'none'})"
        )
        executed, in_loop = self.work.by_kind(), self.work.by_kind(in_main_loop=True)
        if executed:
            yield "  {:22}{:>12}{:>14}{:>15}{:>9}{:>9}".format(
                "instructions", "a block", "in main loop", "a warp: least", "most", "lanes"
            )
        for kind, of_kind in executed.items():
            of_warps = [
                one[kind].by_warp if kind in one else 0 for one in self.work.instructions.values()
            ]
            of_loop = in_loop[kind].by_warp if kind in in_loop else 0
            yield (
                f"  {kind:22}{of_kind.by_warp / self.blocks:12.0f}{of_loop / self.blocks:14.0f}"
                f"{min(of_warps) / self.blocks:15.0f}{max(of_warps) / self.blocks:9.0f}"
                f"{of_kind.by_lanes / (LANES * of_kind.by_warp):9.1%}"
            )
        if (of_all := self.work.for_a_product()) is not None:
            of_loop = self.work.for_a_product(in_main_loop=True)
            yield (
                f"  {of_all:.2f} instructions that cost something for each product,"
                f" {of_loop:.2f} in the main loop"
            )
        if self.sass_main_loop:
            every = sum(self.sass_main_loop.values())
            products = sum(n for name, n in self.sass_main_loop.items() if name in cubins.PRODUCTS)
            products = products or sum(
                n for name, n in self.sass_main_loop.items() if name in cubins.PLAIN_PRODUCTS
            )
            most = sorted(self.sass_main_loop.items(), key=lambda item: -item[1])
            yield (
                f"  SASS of the main loop: {every} instructions, {products} products,"
                f" {every / products:.2f} for each: "
                + ", ".join(f"{number} {name}" for name, number in most)
            )
        yield f"  {'sectors of 32 bytes':22}{'requests':>12}{'asked for':>15}{'distinct':>9}"
        for one in self.work.sectors:
            name = f"{one.tensor}, {'written' if one.is_write else 'read'}"
            yield f"  {name:22}{one.requests:12}{one.sectors:15}{one.distinct:9}"
        yield (
            f"  shared memory: {self.wavefronts} wavefronts, ideally {self.ideal_wavefronts}"
            f" ({self.wavefronts / max(self.ideal_wavefronts, 1):.2f} times as many)"
        )


def account_of(
    kernel: EmulatedKernel,
    outcome: Outcome,
    grid: Sequence[int],
    block: Sequence[int],
    dynamic_shared: int,
) -> Account:
    """The account of a launch that was run under ``settings(work=True)``.

    Args:
        kernel: with its cubin, and what that takes.
        outcome: of the launch.
        grid, block: extents.
        dynamic_shared: bytes.
    """
    takes, threads = kernel.resources, prod(block)
    resident, limits = driver.resident_blocks(
        kernel.chip, takes, threads, dynamic_shared, kernel.max_dynamic_shared_size_bytes
    )
    assert outcome.work is not None, "the launch was not counted"
    assert kernel.cubin is not None
    listing = cubins.disassemble(kernel.cubin)
    code = cubins.kernels(listing)[kernel.name]
    loop = cubins.main_loop(code, cubins.any_of(cubins.PRODUCTS))
    loop = loop or cubins.main_loop(code, cubins.any_of(cubins.PLAIN_PRODUCTS))
    return Account(
        outcome.kernel,
        tuple(grid),
        threads,
        outcome.blocks,
        takes.registers,
        takes.spilled,
        takes.static_shared,
        dynamic_shared,
        resident,
        limits,
        len(outcome.reports),
        outcome.work,
        sum(one.wavefronts for one in outcome.bank_conflicts),
        sum(one.ideal for one in outcome.bank_conflicts),
        dict(Counter(cubins.mnemonic(one) for one in loop)),
    )


class _Counted:
    """A kernel whose launches are accounted for."""

    def __init__(self, kernel: EmulatedKernel, accounts: list[Account]) -> None:
        self._kernel, self._accounts = kernel, accounts

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], arguments: Any, shared_mem: int
    ) -> None:
        outcome = self._kernel(grid, block, arguments, shared_mem=shared_mem)
        self._accounts.append(account_of(self._kernel, outcome, grid, block, shared_mem))

    def allow(self, shared_bytes: int) -> None:
        self._kernel.allow(shared_bytes)


class _CountingRuntime(EmulatorRuntime):
    """Loads kernels whose launches are accounted for."""

    def __init__(self, architecture: str) -> None:
        super().__init__(architecture)
        self.accounts: list[Account] = []

    def kernel(self, launch: Launch) -> Any:
        return _Counted(super().kernel(launch), self.accounts)


def accounts_of_pass(
    problem: ConvProblem,
    pass_: str,
    impl: str,
    arch: str,
    blocks: int | None = BLOCKS,
    tile: str | None = None,
    precision: str = "ieee",
) -> list[Account]:
    """An account of each launch of a pass, of which some blocks are run on zeros.

    Args:
        problem: with its dtype and memory order.
        pass_: one of PASSES.
        impl: the kernel family, or "auto".
        arch: the chip that is planned for, such as "sm_80".
        blocks: to run of each launch, clusters where it has them; None for all.
        tile: along both axes of the result, such as "128x128"; None for the planned one.
        precision: "ieee" or "tf32".

    Raises:
        ConvError: the family does not take the problem, or has no such tile for it.
    """
    device = Device.of(arch)
    strides = Strides.contiguous(problem)
    planned = _planned(Request(problem, pass_, device, precision, strides=strides), impl, tile)
    operands = [*lazy_tensors(problem).values(), None]  # no bias
    if planned.workspace_bytes:
        operands.append(memory.lazy((planned.workspace_bytes // 4,), np.float32, "workspace"))
    assert device.architecture is not None
    runtime = _CountingRuntime(device.architecture)
    for launch in launches.prepare(planned, problem, strides, None, device):
        chosen = None if blocks is None else range(min(blocks, _clusters(launch, runtime)))
        with settings(source="ptx", work=True, compiled=True, raise_reports=False, blocks=chosen):
            Series([launch], runtime)(operands)
    return runtime.accounts


def _planned(request: Request, impl: str, tile: str | None) -> PassPlan:
    """The best way to compute a pass with a tile."""
    for one in contenders(request, impl, count=1000):
        if tile is None or str(one.tile).startswith(f"{tile}x"):
            return one
    raise ConvError(
        "the tile must be one that the family has for the problem",
        f"{tile} for {impl}: {request.problem}",
        "Leave the tile to the planner",
    )


def account_of_witness(
    problem: ConvProblem,
    pass_: str,
    arch: str = "sm_80",
    blocks: int | None = BLOCKS,
    tile: str | None = None,
    precision: str = "ieee",
) -> Account:
    """The account of the same pass by CUTLASS's implicit GEMM for compute capability 8.0 or 9.0.

    Args:
        problem, pass_, blocks, precision: as for ``accounts_of_pass``.
        arch: "sm_90a", or another for the kernel of 8.0.
        tile: "64x64" for that of the kernel of 8.0 in float16; else it is 128x128, as that of 9.0.

    Raises:
        ConvError: its instances do not take the problem.
        MissingError: the packages that it is compiled from are not installed.
    """
    numbers = "tf32" if precision == "tf32" else problem.dtype
    instance = cutlass.instance_of(numbers, 64 if tile == "64x64" else 128)
    launch = cutlass.convolution(problem, pass_, instance)
    operands = lazy_tensors(problem)
    tensors = [operands[role] for role in launch.roles]
    arguments: list[Any]
    if arch == "sm_90a":
        if launch.is_strided or ITEMSIZE[problem.dtype] != 2:
            raise ConvError(
                "CUTLASS's instances for 9.0 must fit the pass",
                f"{pass_} of {problem.dtype}, stride {problem.stride}",
                "Take 16 bits, and stride 1 for the input's gradient",
            )
        of_90 = cutlass_sm90.convolution(pass_, problem.spatial_rank, problem.dtype, counted=True)
        rules = (problem.padding[0][0], problem.stride[0], problem.dilation[0])
        sizes = (*problem.input_shape, *problem.filter_shape, *rules)
        grid, threads, shared, value = of_90.launch(sizes, *tensors)
        kernel, arguments = of_90.kernel, [value]
    else:
        grid, threads, shared = launch.grid, instance.threads, instance.shared_bytes
        kernel = launch.kernel(counted=True)
        arguments = [*tensors, *launch.numbers]
    clusters = prod(grid) // prod(kernel.resources.cluster or (1,))
    chosen = None if blocks is None else range(min(blocks, clusters))
    with settings(work=True, raise_reports=False, blocks=chosen):
        outcome = kernel(grid, (threads,), arguments, shared)
    return account_of(kernel, outcome, grid, (threads,), shared)


def lazy_tensors(problem: ConvProblem) -> dict[str, np.ndarray]:
    """x, w and y, which take memory only where they are touched."""
    dtype = arrays.numpy_dtype(problem.dtype)
    shapes = {"x": problem.input_shape, "w": problem.filter_shape, "y": problem.output_shape}
    return {name: memory.lazy(shape, dtype, name) for name, shape in shapes.items()}


def _clusters(launch: Launch, runtime: EmulatorRuntime) -> int:
    """Groups of blocks that a launch has: clusters, or single blocks."""
    of_cubin = driver.compiled(launch.source, launch.defines, runtime.architecture)[launch.entry]
    return prod(launch.grid) // prod(of_cubin.cluster or (1,))


def layer_problem(name: str, dtype: str, data_format: str) -> ConvProblem:
    """A listed layer in a dtype and memory order; ConvError if there is none of that name."""
    (layer,) = suites.select(names=[name])
    problem = layer.problem.replace(dtype=dtype)
    rank = problem.spatial_rank
    last = data_format == "channels-last"
    return in_formats(problem, data_formats(rank)[last], filter_formats(rank)[2 if last else 0])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.account", description=__doc__)
    parser.add_argument("layer", help="of the listing, such as resnet50-03")
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--pass", dest="pass_", choices=PASSES, default="forward")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--precision", choices=("ieee", "tf32"), default="ieee")
    parser.add_argument("--order", choices=("channels-first", "channels-last"),
                        default="channels-last")  # fmt: skip
    parser.add_argument("--tile", help="such as 128x128; else as planned, and 128x128 of CUTLASS's")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of each launch, to run")
    parser.add_argument("--cutlass", action="store_true",
                        help="beside it CUTLASS's convolution for the chip")  # fmt: skip
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    try:
        problem = layer_problem(chosen.layer, chosen.dtype, chosen.order)
        more = (chosen.blocks, chosen.tile, chosen.precision)
        found = accounts_of_pass(problem, chosen.pass_, chosen.impl, chosen.arch, *more)
        if chosen.cutlass:
            found.append(account_of_witness(problem, chosen.pass_, chosen.arch, *more))
    except (ConvError, MissingError, pytest.skip.Exception) as error:  # a tool that is missing
        parser.error(str(error))
    if chosen.json:
        print(json.dumps([one.as_json() for one in found], indent=1))
    else:
        print("\n".join(line for one in found for line in one.table()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
