"""Count what the kernels of a layer execute, on the CPU.

``python -m tests.emulator.account LAYER --impl F --arch sm_80 [--pass P] [--blocks N] [--json]``

Some blocks of each launch run from the PTX that NVRTC compiles.  The table adds the resources of
the cubin and the number of resident blocks per SM.  Counts are PTX instructions; the GPU's compiler
turns each into zero or more machine instructions.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from math import prod
from typing import Any

import numpy as np

from cupyconv import ConvError, ConvProblem, arrays
from cupyconv.bench import suites
from cupyconv.formats import data_formats, filter_formats
from cupyconv.gpu.runtime import Series
from cupyconv.kernels.strides import Strides
from cupyconv.launch import Launch
from cupyconv.planning import Device, Request
from cupyconv.planning.plan import PassPlan, contenders
from cupyconv.problem import ITEMSIZE, PASSES
from tests import cubins, launches
from tests.configurations import in_formats

from . import driver, memory
from .convolutions import EmulatorRuntime
from .module import EmulatedKernel, Outcome
from .runtime import settings
from .witnesses import MissingError, cutlass, cutlass_sm90
from .work import LANES, Work

BLOCKS = 2
"""Default number of blocks to run per launch (hand-set)."""


@dataclass(frozen=True)
class Account:
    """Counts and resources of one launch, of which only some blocks ran.

    Attributes:
        kernel: name of the kernel.
        grid, threads: blocks of the launch along each axis, threads per block.
        blocks: blocks that ran; all counts are sums over them.
        registers, spilled: registers and spilled bytes per thread.
        static_shared, dynamic_shared: bytes of shared memory per block.
        resident: resident blocks per SM.
        limits: resources that limit the resident blocks.
        reports: number of checker reports.
        work: executed instructions, and sectors of global memory.
        wavefronts, ideal_wavefronts: wavefronts of shared-memory requests, matrix loads included.
        sass_main_loop: number of occurrences of each instruction in the cubin's innermost loops
            around products (tensor-core products if the kernel has any); occurrences in the
            listing, not executions.
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

    def table(self) -> Iterator[str]:
        """Yield the lines of a table."""
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
        for kind, total in executed.items():
            per_warp = [
                kinds[kind].by_warp if kind in kinds else 0
                for kinds in self.work.instructions.values()
            ]
            loop_count = in_loop[kind].by_warp if kind in in_loop else 0
            yield (
                f"  {kind:22}{total.by_warp / self.blocks:12.0f}{loop_count / self.blocks:14.0f}"
                f"{min(per_warp) / self.blocks:15.0f}{max(per_warp) / self.blocks:9.0f}"
                f"{total.by_lanes / (LANES * total.by_warp):9.1%}"
            )
        if (per_product := self.work.for_a_product()) is not None:
            loop_count = self.work.for_a_product(in_main_loop=True)
            yield (
                f"  {per_product:.2f} instructions that cost something for each product,"
                f" {loop_count:.2f} in the main loop"
            )
        if self.sass_main_loop:
            total_count = sum(self.sass_main_loop.values())
            products = sum(n for name, n in self.sass_main_loop.items() if name in cubins.PRODUCTS)
            products = products or sum(
                n for name, n in self.sass_main_loop.items() if name in cubins.PLAIN_PRODUCTS
            )
            by_count = sorted(self.sass_main_loop.items(), key=lambda item: -item[1])
            yield (
                f"  SASS of the main loop: {total_count} instructions, {products} products,"
                f" {total_count / products:.2f} for each: "
                + ", ".join(f"{number} {name}" for name, number in by_count)
            )
        yield f"  {'sectors of 32 bytes':22}{'requests':>12}{'asked for':>15}{'distinct':>9}"
        for traffic in self.work.sectors:
            name = f"{traffic.tensor}, {'written' if traffic.is_write else 'read'}"
            yield (f"  {name:22}{traffic.requests:12}{traffic.sectors:15}{traffic.distinct:9}")
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
    """Return the account of a launch that ran under ``settings(work=True)``.

    Args:
        kernel: the kernel, with its cubin and resources.
        outcome: outcome of the launch.
        grid, block: extents of the grid and of a block.
        dynamic_shared: bytes of dynamic shared memory per block.
    """
    resources, threads = kernel.resources, prod(block)
    resident, limits = driver.resident_blocks(
        kernel.chip, resources, threads, dynamic_shared, kernel.max_dynamic_shared_size_bytes
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
        resources.registers,
        resources.spilled,
        resources.static_shared,
        dynamic_shared,
        resident,
        limits,
        len(outcome.reports),
        outcome.work,
        sum(line.wavefronts for line in outcome.bank_conflicts),
        sum(line.ideal for line in outcome.bank_conflicts),
        dict(Counter(cubins.mnemonic(line) for line in loop)),
    )


def accounts_of_pass(
    problem: ConvProblem,
    pass_: str,
    impl: str,
    arch: str,
    blocks: int | None = BLOCKS,
    tile: str | None = None,
    precision: str = "ieee",
) -> list[Account]:
    """Return an account of each launch of a pass; some blocks of each run on zeros.

    Args:
        problem: the layer, with its dtype and memory order.
        pass_: one of PASSES.
        impl: the kernel family, or "auto".
        arch: the chip to plan for, such as "sm_80".
        blocks: number of blocks (or clusters) to run per launch; None for all.
        tile: extents along both axes of the result, such as "128x128", or the numbers of a tiling,
            such as "2,16,2,8,7,1"; None for the planned tile.
        precision: "ieee" or "tf32".

    Raises:
        ConvError: the family does not support the problem, or has no such tile for it.
    """
    device = Device.of(arch)
    strides = Strides.contiguous(problem)
    planned = _planned(Request(problem, pass_, device, precision, strides=strides), impl, tile)
    operands = [*lazy_tensors(problem).values(), None, None]  # no bias and no addend
    if planned.workspace_bytes:
        operands.append(memory.lazy((planned.workspace_bytes // 4,), np.float32, "workspace"))
    assert device.architecture is not None
    runtime = EmulatorRuntime(device.architecture)
    accounts: list[Account] = []
    for launch in launches.prepare(planned, problem, strides, device):
        chosen = None if blocks is None else range(min(blocks, _clusters(launch, runtime)))
        outcomes: list[Outcome] = []
        rules = {"source": "ptx", "compiled": True, "work": True, "raise_reports": False}
        with settings(**rules, blocks=chosen, on_outcome=outcomes.append):
            kernel = runtime.kernel(launch)
            Series([launch], runtime)(operands)
        shape = (launch.grid, launch.block, launch.shared_bytes)
        accounts += [account_of(kernel, outcome, *shape) for outcome in outcomes]
    return accounts


def tiling_text(planned: PassPlan) -> str:
    """Return the numbers of a plan's tiling, such as "2,16,2,8,7,1"; "" without a tiling."""
    return ",".join(map(str, astuple(planned.tiling))) if planned.tiling else ""


def _planned(request: Request, impl: str, tile: str | None) -> PassPlan:
    """Return the best candidate of a pass with this tile."""
    for candidate in contenders(request, impl, count=1000):
        if tile in (None, tiling_text(candidate)) or str(candidate.tile).startswith(f"{tile}x"):
            return candidate
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
    """Return the account of CUTLASS's implicit GEMM for 8.0 or 9.0 on the same pass.

    Args:
        problem, pass_, blocks, precision: as for ``accounts_of_pass``.
        arch: "sm_90a" for the kernel of 9.0; any other architecture for the kernel of 8.0.
        tile: "64x64" for the small float16 tile of the 8.0 kernel; otherwise 128x128.

    Raises:
        ConvError: CUTLASS's instances do not support the problem.
        MissingError: the packages that CUTLASS is compiled from are not installed.
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
                "Use a 16-bit dtype, and stride 1 for the input's gradient",
            )
        hopper = cutlass_sm90.convolution(pass_, problem.spatial_rank, problem.dtype, counted=True)
        rules = (problem.padding[0][0], problem.stride[0], problem.dilation[0])
        sizes = (*problem.input_shape, *problem.filter_shape, *rules)
        grid, threads, shared, value = hopper.launch(sizes, *tensors)
        kernel, arguments = hopper.kernel, [value]
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
    """Return x, w and y, whose pages are allocated only when touched."""
    dtype = arrays.numpy_dtype(problem.dtype)
    shapes = {"x": problem.input_shape, "w": problem.filter_shape, "y": problem.output_shape}
    return {name: memory.lazy(shape, dtype, name) for name, shape in shapes.items()}


def _clusters(launch: Launch, runtime: EmulatorRuntime) -> int:
    """Return the number of clusters of a launch, or of blocks without clusters."""
    resources = driver.compiled(launch.source, launch.defines, runtime.architecture)[launch.entry]
    return prod(launch.grid) // prod(resources.cluster or (1,))


def layer_problem(name: str, dtype: str, data_format: str) -> ConvProblem:
    """Return a listed layer in a dtype and memory order; ConvError for an unknown name."""
    (layer,) = suites.select(names=[name])
    problem = layer.problem.replace(dtype=dtype)
    rank = problem.spatial_rank
    last = data_format == "channels-last"
    return in_formats(problem, data_formats(rank)[last], filter_formats(rank)[2 if last else 0])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.account", description=__doc__)
    parser.add_argument("layer", help="Layer name, such as resnet50-03.")
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--arch", default="sm_80")
    parser.add_argument("--pass", dest="pass_", choices=PASSES, default="forward")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--precision", choices=("ieee", "tf32"), default="ieee")
    parser.add_argument("--order", choices=("channels-first", "channels-last"),
                        default="channels-last")  # fmt: skip
    parser.add_argument("--tile", help="Tile or tiling, such as 128x128; default: the planned one.")
    parser.add_argument(
        "--blocks", type=int, default=BLOCKS, help="Number of blocks to run per launch."
    )
    parser.add_argument("--cutlass", action="store_true",
                        help="Add CUTLASS's convolution for the chip.")  # fmt: skip
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        problem = layer_problem(options.layer, options.dtype, options.order)
        rules = (options.blocks, options.tile, options.precision)
        accounts = accounts_of_pass(problem, options.pass_, options.impl, options.arch, *rules)
        if options.cutlass:
            accounts.append(account_of_witness(problem, options.pass_, options.arch, *rules))
    except (ConvError, MissingError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps([asdict(account) for account in accounts], indent=1))
    else:
        print("\n".join(line for account in accounts for line in account.table()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
