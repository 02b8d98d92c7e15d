"""What the ways to compute the suite's layers come to, by counted work: the planner's judge.

``python -m tests.emulator.suite [SUITE OR LAYER ...] [--arch A ...] [--numbers N ...] [--json F]``
``python -m tests.emulator.suite --cutlass F``
``python -m tests.emulator.suite --table F [--before F]``

Nothing here is shared with what the planner prices kernels by.

- Counted on the CPU, of each launch: what some of its blocks execute of the PTX that NVRTC makes of
  the kernel (account.py), their wavefronts of shared memory and sectors of global memory.
- Of the main loop around products of the tensor cores, the instructions that ptxas makes: as many
  for each of PTX's as stand in the loop of the cubin for those in the loop of the PTX.  Likewise
  the waits for global memory, in the loop and beside it: as many for each load that is executed as
  stand in the cubin.
- Counted by NVRTC and NVIDIA's occupancy calculator: the blocks that a multiprocessor holds.
- Scaled by the grid: the other blocks do as much, on average, as those that were run, which are
  spread evenly over it.
- Modelled, by the nominal chips' data sheets (cupyconv/planning/device.py) and the constants below:

    busy   = of a block, whatever takes a multiprocessor longest: instructions / 4, float
             instructions / its lanes, products / its tensor cores' rate, wavefronts, sectors / 2
    alone  = of a block whose warps find nobody's work to fill their waits with: instructions of the
             most busy warp * PACE + (1 + waits of a warp for global memory) * LATENCY
    cycles = max(blocks of a multiprocessor * busy / FILLED,
                 rounds of as many blocks as it holds * alone)
    launch = max(cycles / clock, bytes of the arrays that it touches / bandwidth) + OVERHEAD

A pass takes the sum of its launches.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import ceil, log, prod
from pathlib import Path
from typing import Any

import numpy as np

from cupyconv import ConvError, ConvProblem
from cupyconv.bench import suites
from cupyconv.gpu import compiler, launches, sources
from cupyconv.gpu.launch import Launch, Part
from cupyconv.planning import Device, Request
from cupyconv.planning.device import Chip
from cupyconv.planning.plan import PassPlan, contenders
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES
from tests import cubins
from tests.cubins import Resources

from . import driver, memory
from .account import layer_problem, lazy_tensors
from .build import cache_directory, digest
from .module import EmulatedKernel, EmulatedModule
from .ptx.counting import PRODUCTS
from .ptx.nvrtc import ptx_of, put
from .runtime import settings
from .witnesses import MissingError, cutlass
from .work import FREE, Executions, Instructions

SCHEDULERS = 4
"""Of a multiprocessor; each begins an instruction of a warp in a cycle."""

FILLED = 0.85
"""Share of a multiprocessor's cycles that find work where there is enough of it."""

PACE = 2
"""Cycles from an instruction of a warp to its next, on average."""

LATENCY = 600
"""Cycles until a load from global memory is there."""

SECTORS = 2
"""That a multiprocessor is given in a cycle, of 32 bytes."""

OVERHEAD = 2.0
"""Microseconds of a launch, beside its work."""

JUDGED = ("cuda-gather", "cuda-patch", "cuda-direct", "cuda-toeplitz")
"""Families whose ways are counted: all of the chips before 9.0, but for cuda-generic."""

PROMISING = 2
"""Ways that the planner prices at more than so many times the best one's are not counted, but for
the best of each family; nor are other numbers of splits than the best one's of a tile, and one."""

PRODUCT = {"tf32": 16 * 8 * 8, "float64": 8 * 8 * 4}
"""Multiplications of an instruction of the tensor cores; of 16-bit operands 16 * 8 * 16."""

BLOCKS = 4
"""Of a launch, that are run at least."""

MOST_PERIOD = 8
"""Blocks of a row of tiles, of each of which as many are run."""

GOLDEN = (5**0.5 - 1) / 2
"""Whose multiples are spread most evenly, whatever their fractions are compared with."""

MOST_DEPTH = 1 << 17
"""Of a matrix product, that is counted of CUTLASS's kernels, which are not split."""

_PTX = "sm_80"  # serves all chips of its generation: they have the same instructions
_SCHEME = 5  # of what is kept


@dataclass(frozen=True)
class Counts:
    """One launch: what its blocks do, each on average, and how many there are.

    Attributes:
        kernel: its name.
        blocks: of the grid.
        resident: blocks that a multiprocessor holds at a time.
        warps: of a block.
        instructions: that its warps execute, without those that cost nothing.
        longest: those of its most busy warp.
        multiply_adds: of these, instructions on float32 or float64.
        products: of the tensor cores, PRODUCT multiplications each.
        wavefronts: of shared memory.
        sectors: of 32 bytes of global memory that are asked for, once by each request.
        waits: of its most waiting warp, for what it loads.
        touched: bytes of all arrays that the launch touches.
    """

    kernel: str
    blocks: int
    resident: int
    warps: int
    instructions: float
    longest: float
    multiply_adds: float
    products: float
    wavefronts: float
    sectors: float
    waits: float
    touched: int

    def busy(self, chip: Chip, operands: str) -> float:
        """Cycles of a multiprocessor for a block, where blocks enough keep it busy."""
        per_cycle = 1e3 / chip.clock / chip.multiprocessors / 2  # multiply-adds, of a TFLOP/s
        lanes = plain_rate(chip, operands) * per_cycle
        multiplications = self.products * PRODUCT.get(operands, 16 * 8 * 16)
        return max(
            self.instructions / SCHEDULERS,
            self.multiply_adds * 32 / lanes,
            multiplications / (tensor_rate(chip, operands) * per_cycle) if multiplications else 0,
            self.wavefronts,
            self.sectors / SECTORS,
        )

    def cycles(self, chip: Chip, operands: str) -> float:
        """Of the multiprocessor with the most blocks."""
        most = ceil(self.blocks / chip.multiprocessors)
        rounds = ceil(most / min(most, self.resident))
        alone = self.longest * PACE + (1 + self.waits) * LATENCY
        return max(most * self.busy(chip, operands) / FILLED, rounds * alone)

    def microseconds(self, chip: Chip, operands: str) -> float:
        """Of the launch."""
        moving = self.touched / (chip.bandwidth * 1e3)
        return max(self.cycles(chip, operands) / (chip.clock * 1e3), moving) + OVERHEAD


@dataclass(frozen=True)
class Way:
    """One way to compute a pass.

    Attributes:
        name: family, tile, splits and method.
        planned: microseconds that the planner expects.
        counted: microseconds by what is counted.
        launches: what was counted.
    """

    name: str
    planned: float
    counted: float
    launches: tuple[Counts, ...]

    def figures(self, problem: ConvProblem, chip: Chip, operands: str) -> dict[str, float]:
        """What a table says of it, beside its time."""
        return figures(self.launches, problem, chip, operands, self.counted)


def tensor_rate(chip: Chip, operands: str) -> float:
    """TFLOP/s of products of the tensor cores; 0 where they have none."""
    rates = {"tf32": chip.tensor_rate / 2, "float32": 0.0, "float64": chip.double_tensor_rate}
    return rates.get(operands, chip.tensor_rate)


def plain_rate(chip: Chip, operands: str) -> float:
    """TFLOP/s of multiply-adds outside them."""
    return chip.double_rate if operands == "float64" else chip.float_rate


def figures(
    launches: Sequence[Counts], problem: ConvProblem, chip: Chip, operands: str, time: float
) -> dict[str, float]:
    """Of launches that compute a pass in so many microseconds.

    Returns:
        ``instructions`` of a thread for each multiplication that the pass needs; ``bytes`` that
        its blocks ask for over those that it has to move; ``resident`` blocks of the longest
        launch on a multiprocessor; ``share`` of the roofline that the time is.
    """
    products = problem.useful_flops / problem.flops_of_product
    executed = sum(one.blocks * one.instructions * 32 for one in launches)
    asked = sum(one.blocks * one.sectors * 32 for one in launches)
    longest = max(launches, key=lambda one: one.blocks * one.instructions)
    return {
        "instructions": executed / products,
        "bytes": asked / problem.bytes,
        "resident": longest.resident,
        "share": least(problem, chip, operands) / time,
    }


def least(problem: ConvProblem, chip: Chip, operands: str) -> float:
    """The microseconds of a pass that does the chip's best at either end of the roofline."""
    rate = max(tensor_rate(chip, operands), plain_rate(chip, operands))
    return max(problem.useful_flops / (rate * 1e6), problem.bytes / (chip.bandwidth * 1e3))


def verdict(found: Sequence[Mapping[str, tuple[float, float]]]) -> tuple[float, float]:
    """How well the planner orders the ways to compute passes.

    Args:
        found: of each pass, the planned and the counted microseconds of its ways.

    Returns:
        The rank correlation of the two, each over the mean of its pass, so that a large layer does
        not pass for a good order; and, of the passes, the most that the counted time of what is
        planned is over that of the best way.
    """
    planned, counted = [], []
    worst = 1.0
    for of_pass in found:
        both = np.log(np.array(list(of_pass.values())))
        planned += list(both[:, 0] - both[:, 0].mean())
        counted += list(both[:, 1] - both[:, 1].mean())
        chosen = of_pass[min(of_pass, key=lambda name: of_pass[name][0])]
        worst = max(worst, chosen[1] / min(one[1] for one in of_pass.values()))
    ranks = [_ranks(np.array(one)) for one in (planned, counted)]
    return float(np.corrcoef(*ranks)[0, 1]), worst


def _ranks(values: np.ndarray) -> np.ndarray:
    """The place of each in their order; those that are alike share theirs."""
    _, numbers, counts_ = np.unique(values.round(6), return_inverse=True, return_counts=True)
    ends: np.ndarray = np.cumsum(counts_)
    return (ends - (counts_ - 1) / 2)[numbers]


def ways(
    problem: ConvProblem, pass_: str, device: Device, precision: str = "ieee", most: int = 1000
) -> Iterator[Way]:
    """The promising ways of the judged families to compute a pass, what is planned first.

    Args:
        problem, pass_, device, precision: what is planned.
        most: ways that are counted.
    """
    request = _request(problem, pass_, device, precision)
    for one in _promising(request)[:most]:
        yield counted(one, request)


def planned_way(problem: ConvProblem, pass_: str, device: Device, precision: str = "ieee") -> Way:
    """What the planner takes of all families, counted."""
    request = _request(problem, pass_, device, precision)
    return counted(contenders(request, "auto", count=1)[0], request)


def counted(planned: PassPlan, request: Request) -> Way:
    """A way to compute a pass, counted."""
    found = tuple(counts(planned, request.problem, request.device))
    chip = request.device.chip
    counted = sum(each.microseconds(chip, request.operands) for each in found)
    return Way(name_of(planned), price(planned, request), counted, found)


def prices(
    problem: ConvProblem, pass_: str, device: Device, precision: str = "ieee"
) -> dict[str, float]:
    """The microseconds that the planner expects of all ways of the judged families, by name."""
    request = _request(problem, pass_, device, precision)
    return {name_of(one): price(one, request) for one in _ranked(request)}


def _request(problem: ConvProblem, pass_: str, device: Device, precision: str) -> Request:
    return Request(problem, pass_, device, precision, strides=Strides.contiguous(problem))


def _ranked(request: Request) -> list[PassPlan]:
    return [one for one in contenders(request, "auto", count=1000) if one.implementation in JUDGED]


def _promising(request: Request) -> list[PassPlan]:
    ranked = _ranked(request)
    most = PROMISING * min((price(one, request) for one in ranked), default=0)
    cheapest = {(one.implementation, one.tile, one.method): one for one in reversed(ranked)}
    best = {one.implementation: one for one in reversed(ranked)}.values()
    of_tiles = [one for one in ranked if one.splits == 1 or one in cheapest.values()]
    return [one for one in of_tiles if one in best or price(one, request) <= most]


def price(planned: PassPlan, request: Request) -> float:
    """The microseconds that the planner expects of it."""
    priced = planned.family.candidate(request, planned.tile, planned.splits, planned.method)
    assert priced is not None
    return priced.microseconds


def name_of(planned: PassPlan) -> str:
    """Such as "cuda-gather 128x64x32 / 4"; "plain" without the tensor cores that it might have."""
    tile, words = planned.tile, [planned.implementation]
    if tile:
        words.append(str(tile))
        if planned.precision == "tf32" and not tile.defines.get("TENSOR_CORES", 1):
            words.append("plain")
    if planned.splits > 1:
        words.append(f"/ {planned.splits}")
    if planned.method:
        words.append(f"({planned.method})")
    return " ".join(words)


def counts(planned: PassPlan, problem: ConvProblem, device: Device) -> Iterator[Counts]:
    """The counts of each launch of a planned pass."""
    found = launches.prepare(planned, problem, Strides.contiguous(problem), None, device)
    operands = {**lazy_tensors(problem), **_workspace(planned, found)}
    for launch in found:
        if 0 not in launch.grid:
            chosen = _spread(problem, prod(launch.grid), _period(planned, problem, launch))
            yield _counts(launch, operands, device, chosen)


def _period(planned: PassPlan, problem: ConvProblem, launch: Launch) -> int:
    """Blocks after which a product's ragged edge comes again; 1 where it has none."""
    if planned.tile is None or launch.block != (planned.tile.threads,):
        return 1
    tile, gemm = planned.tile, problem.gemm(planned.pass_)
    if planned.splits > 1:
        ragged = gemm.gemm_m % tile.block_m or gemm.gemm_n % tile.block_n
        return launch.grid[0] if ragged else 1
    return -(-gemm.gemm_n // tile.block_n) if gemm.gemm_n % tile.block_n else 1


def _workspace(planned: PassPlan, found: Sequence[Launch]) -> dict[str | Part, np.ndarray]:
    """An array for the splits' sums, and one for each copy behind them."""
    parts = {one for launch in found for one in launch.arguments if isinstance(one, Part)}
    copies = sorted(parts, key=lambda part: part.offset)
    starts = [0, *(part.offset for part in copies), planned.workspace_bytes]
    names = ["workspace", *(f"copy {number + 1}" for number in range(len(copies)))]
    return {
        key: memory.lazy(((end - start) // 4,), np.float32, name)
        for key, name, (start, end) in zip(
            ("workspace", *copies), names, pairwise(starts), strict=True
        )
    }


def counts_of_witness(problem: ConvProblem, pass_: str, device: Device, operands: str) -> Counts:
    """Those of CUTLASS's implicit GEMM for 8.0, of tiles of 128 x 128.

    Raises:
        ConvError: its instances do not take the problem, or use what the chip does not have.
        MissingError: the packages that it is compiled from are not installed.
    """
    if operands == "float64" and not device.chip.double_tensor_rate:
        raise ConvError(
            "CUTLASS's instance for float64 needs tensor cores for it",
            str(device.architecture),
            "Take sm_80",
        )
    if problem.gemm(pass_).gemm_k > MOST_DEPTH:
        raise ConvError(
            "CUTLASS's instances sum each result in one block, which must not take too long here",
            f"gemm_k is {problem.gemm(pass_).gemm_k:,}",
            f"Take a layer of at most {MOST_DEPTH:,}",
        )
    launch = cutlass.convolution(problem, pass_, cutlass.instance_of(operands))
    instance, operand = launch.instance, lazy_tensors(problem)
    kernel, total = launch.kernel(counted=True), prod(launch.grid)
    arguments = [*(operand[role] for role in launch.roles), *launch.numbers]
    # A filter's gradient is not split: each block goes through all pixels, like any other.
    chosen = _spread(problem, total)[: 1 if pass_ == "backprop_filter" else None]
    shape = launch.grid, (instance.threads,), instance.shared_bytes
    work = _kept(
        ("witness", kernel.ptx, shape, chosen, [one.shape for one in operand.values()],
         list(map(int, launch.numbers))),
        lambda: _work(kernel, *shape, arguments, chosen),
    )  # fmt: skip
    resident, _ = driver.resident_blocks(
        driver.chip_of(str(device.architecture)), kernel.resources, instance.threads,
        instance.shared_bytes, instance.shared_bytes,
    )  # fmt: skip
    touched = sum(operand[name].nbytes for name in work.pop("tensors"))
    return Counts("cutlass", total, resident, instance.threads // 32, touched=touched, **work)


def _spread(problem: ConvProblem, total: int, period: int = 1) -> list[int]:
    """The blocks that are run: one of each equal share of the grid, at a place of its own in it; in
    order.  There are as many shares as an input gradient has stride phases, or more.

    Args:
        problem: what is computed.
        total: blocks of the grid.
        period: after which blocks are alike, each of which has as many then, if it is short: the
            last of a row of tiles may hold little, and would pass for all of them or for none.
    """
    number = min(max(prod(problem.stride), BLOCKS), total)
    if period > MOST_PERIOD:
        period = 1
    rows = total // period
    each = min(-(-number // period), rows)
    return sorted(
        {
            int((j + (j * period + column + 1) * GOLDEN % 1) * rows / each) * period + column
            for j in range(each)
            for column in range(period)
        }
    )


def _counts(
    launch: Launch, operands: Mapping[str | Part, np.ndarray], device: Device, chosen: list[int]
) -> Counts:
    total, threads = prod(launch.grid), prod(launch.block)
    arguments = [
        operands.get(one, np.uint64(0)) if isinstance(one, (str, Part)) else one
        for one in launch.arguments
    ]
    text = _of_entry(ptx_of(launch.source, launch.defines, _PTX), launch.entry)
    values = [
        (one.shape, one.dtype) if id(one) in map(id, operands.values()) else one.tobytes()
        for one in arguments
    ]
    work = _kept(
        ("work", text, launch.entry, launch.grid, launch.block, chosen, values),
        lambda: _work(
            _module(launch.source, launch.defines).get_function(launch.entry),
            launch.grid,
            launch.block,
            launch.shared_bytes,
            arguments,
            chosen,
        ),
    )
    takes = _resources(launch, device)
    resident, _ = driver.resident_blocks(
        driver.chip_of(device.architecture), takes, threads, launch.shared_bytes,
        launch.shared_bytes,
    )  # fmt: skip
    names = work.pop("tensors")
    touched = sum(one.nbytes for one in operands.values() if memory.name_of(one) in names)
    return Counts(launch.entry, total, resident, -(-threads // 32), touched=touched, **work)


def _of_entry(ptx: str, name: str) -> str:
    """What a kernel's counts depend on: not the lines of its source, nor the module's others."""
    others = rf"(?ms)^\.visible \.entry (?!{name}\().*?^}}$|^\t\.section.*"
    return re.sub(others, "", re.sub(r"\s*\.(loc|file)\b.*", "", ptx))


def _work(
    kernel: EmulatedKernel,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    arguments: list[Any],
    chosen: list[int],
) -> dict[str, Any]:
    """What blocks of a launch do, each on average, and the arrays that they touch."""
    kernel.allow(shared_bytes)
    with settings(work=True, raise_reports=False, blocks=chosen):
        outcome = kernel(grid, block, arguments, shared_mem=shared_bytes)
    assert outcome.work is not None
    assert outcome.work.instructions is not None
    kinds = outcome.work.by_kind()
    executed = _executed(outcome.work.instructions)
    of_loop = _executed(outcome.work.main_loop)
    assert kernel.cubin is not None
    code = cubins.kernels(cubins.disassemble(kernel.cubin))[kernel.name]
    saved = 1 - _made_of_ptx(kernel, code) if PRODUCTS in kinds else 0
    loop = (outcome.work.main_loop or {}) if PRODUCTS in kinds else {}
    of_warps = [all_ - saved * of_loop.get(warp, 0) for warp, all_ in executed.items()]
    sums = {
        "instructions": sum(of_warps),
        "longest": max(of_warps),
        "multiply_adds": kinds["float"].by_warp if "float" in kinds else 0,
        "products": kinds[PRODUCTS].by_warp if PRODUCTS in kinds else 0,
        "wavefronts": sum(one.wavefronts for one in outcome.bank_conflicts),
        "sectors": sum(one.sectors for one in outcome.work.sectors),
        "waits": waits_of(outcome.work.instructions, loop, code),
    }
    averages = {name: value / len(chosen) for name, value in sums.items()}
    return {**averages, "tensors": sorted({one.tensor for one in outcome.work.sectors})}


def _executed(of_warps: Instructions | None) -> dict[int, int]:
    """Instructions that cost something, by warp."""
    return {
        warp: sum(one.by_warp for kind, one in of.items() if kind not in FREE)
        for warp, of in (of_warps or {}).items()
    }


def waits_of(of_warps: Instructions, of_loop: Instructions, code: str) -> float:
    """How often the warp waits that waits most, as its loads stand in the cubin.

    Args:
        of_warps: what they execute.
        of_loop: of that, what is in the loop around products of the tensor cores.
        code: SASS of the kernel.
    """

    def of_load(lines: list[str]) -> float:
        loads, waits = cubins.loads_and_waits(lines)
        return waits / max(loads, 1)

    def loads(kinds: Mapping[str, Executions]) -> int:
        return kinds["load global"].by_warp if "load global" in kinds else 0

    inside, beside = map(of_load, cubins.main_loop_and_rest(code, cubins.any_of(cubins.PRODUCTS)))
    return max(
        (inside - beside) * loads(of_loop.get(warp, {})) + beside * loads(kinds)
        for warp, kinds in of_warps.items()
    )


def _made_of_ptx(kernel: EmulatedKernel, code: str) -> float:
    """Instructions of the cubin for each of the PTX, in the loop around its products."""
    counted = [one for one in kernel.counters if one.in_main_loop]
    written = sum(n for one in counted for kind, n in one.kinds.items() if kind not in FREE)
    return len(cubins.main_loop(code, cubins.any_of(cubins.PRODUCTS))) / written


@cache
def _module(source: str, defines: tuple[tuple[str, str | int], ...]) -> EmulatedModule:
    text, folder = ptx_of(source, defines, _PTX), sources.directory()
    return EmulatedModule.from_ptx(
        text,
        Path(source).stem,
        [folder, folder / "include"],
        counted=True,
        cubin=driver.cubin(source, defines, _PTX)[0],
    )


def _resources(launch: Launch, device: Device) -> Resources:
    """What a launch's kernel takes, by the cubin of the chip."""
    assert device.architecture is not None
    loaded = sources.load(launch.source)
    takes = _kept(
        ("resources", compiler.nvrtc_version(), loaded.text, *loaded.headers, launch.defines,
         device.architecture),
        lambda: {
            name: {"registers": one.registers, "static_shared": one.static_shared,
                   "launch_bounds": one.launch_bounds, "cluster": None, "parameters": ()}
            for name, one in driver.compiled(
                launch.source, launch.defines, device.architecture
            ).items()
        },
    )  # fmt: skip
    return Resources(**takes[launch.entry])


def _kept(key: tuple[Any, ...], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What was made for a key, now or before: a file of the emulator's cache."""
    path = cache_directory() / f"counts-{digest(_SCHEME, *key)}.json"
    if not path.exists():
        put(path, json.dumps(make()))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


NUMBERS = {
    "float16": ("float16", "ieee"),
    "bfloat16": ("bfloat16", "ieee"),
    "float32": ("float32", "ieee"),
    "tf32": ("float32", "tf32"),
    "float64": ("float64", "ieee"),
}
"""Dtype and precision, by the word for the products."""

ARCHITECTURES = ("sm_80", "sm_86", "sm_89")
ORDERS = ("channels-last", "channels-first")
RESULTS = Path(__file__).with_name("results") / "suite.json"

WHICH = ("arch", "numbers", "order", "layer", "pass")

Row = dict[str, Any]
"""Of a pass of a layer: WHICH it is; ``ways``, which are the counted microseconds by name;
``planned``, the way of any family that the planner took, and its ``figures``; and those of
``cutlass``."""


def rows(
    layers: Sequence[suites.SuiteLayer],
    architectures: Sequence[str] = ARCHITECTURES,
    numbers: Sequence[str] = ("float16", "float32"),
    orders: Sequence[str] = ORDERS,
    passes: Sequence[str] = PASSES,
    most: int = 1000,
) -> Iterator[Row]:
    """Counts passes of layers; ``most`` ways of each, what the planner chooses first."""
    for layer, word, order, pass_, arch in product(layers, numbers, orders, passes, architectures):
        dtype, precision = NUMBERS[word]
        problem, device = layer_problem(layer.name, dtype, order), Device.of(arch)
        found = list(ways(problem, pass_, device, precision, most))
        planned = planned_way(problem, pass_, device, precision)
        yield {
            "arch": arch,
            "numbers": word,
            "order": order,
            "layer": layer.name,
            "pass": pass_,
            "ways": {way.name: float(f"{way.counted:.4g}") for way in found},
            "planned": planned.name,
            "figures": _rounded(planned.figures(problem, device.chip, word)),
            **_of_witness(problem, pass_, device, word),
        }


def witnessed(kept: Sequence[Row]) -> Iterator[Row]:
    """The rows with CUTLASS's figures beside theirs, where it has the kernel and is installed."""
    for row in kept:
        dtype, _ = NUMBERS[row["numbers"]]
        problem = layer_problem(row["layer"], dtype, row["order"])
        found = _of_witness(problem, row["pass"], Device.of(row["arch"]), row["numbers"])
        if found:
            yield {**row, **found}


def keep(path: Path, found: Sequence[Row]) -> None:
    """Writes rows into a file, in the place of those of the same passes and beside the others."""
    kept = json.loads(path.read_text()) if path.exists() else []
    rows_of = {tuple(row[name] for name in WHICH): row for row in (*kept, *found)}
    put(path, "[\n" + ",\n".join(map(json.dumps, rows_of.values())) + "\n]\n")


def _of_witness(
    problem: ConvProblem, pass_: str, device: Device, operands: str
) -> dict[str, dict[str, float]]:
    """CUTLASS's figures, where it has the kernel and is installed."""
    try:
        one = counts_of_witness(problem, pass_, device, operands)
    except (ConvError, MissingError):
        return {}
    time = one.microseconds(device.chip, operands)
    return {"cutlass": _rounded(figures([one], problem, device.chip, operands, time))}


def _rounded(found: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def planned_and_counted(row: Row) -> dict[str, tuple[float, float]]:
    """Of the ways of a row, what the planner now expects and what was counted.

    Raises:
        KeyError: it has other ways now, or prefers one that was not counted.
    """
    dtype, precision = NUMBERS[row["numbers"]]
    problem = layer_problem(row["layer"], dtype, row["order"])
    expected = prices(problem, row["pass"], Device.of(row["arch"]), precision)
    wanted = min(expected, key=lambda name: expected[name])
    if not {wanted} <= row["ways"].keys() <= expected.keys():
        raise KeyError(f"{row}: the ways are now {sorted(expected)}; count again")
    return {name: (expected[name], counted) for name, counted in row["ways"].items()}


_NAMES = {"conv1d": "1-D", "conv3d": "3-D"}
CLASSES = ("dense", "strided", *(_NAMES.get(kind, kind) for kind in suites.KINDS[1:]))
"""Kinds of layers, dense and pointwise ones with a stride apart."""

FIGURES = ("instructions", "bytes", "resident", "share")


def class_of(layer: suites.SuiteLayer) -> str:
    """One of CLASSES."""
    if layer.kind in ("dense", "pointwise") and max(layer.problem.stride) > 1:
        return "strided"
    return _NAMES.get(layer.kind, layer.kind)


Key = tuple[str, ...]
"""Of a line of the table: class, pass, numbers, order and chip."""


def classed(found: Sequence[Row]) -> dict[Key, dict[str, Row]]:
    """The rows of each line of the table, by layer."""
    classes: dict[Key, dict[str, Row]] = {}
    for row in found:
        (layer,) = suites.select(names=[row["layer"]])
        key = (class_of(layer), row["pass"], row["numbers"], row["order"], row["arch"])
        if "figures" in row:
            classes.setdefault(key, {})[row["layer"]] = row
    return classes


def table(found: Sequence[Row], before: Sequence[Row] = ()) -> Iterator[str]:
    """Lines of Markdown: geometric means of figures, before → now, and CUTLASS's in brackets.

    Where another version was counted too, or CUTLASS's kernel, each line is of the layers that have
    been counted of all.
    """
    then = classed(before)
    yield (
        "| class | pass | numbers | chip | layers | instructions a product | bytes over the least |"
        " blocks a multiprocessor | share of the roofline |"
    )
    yield "|" + " --- |" * 9
    lines = classed(found).items()
    for key, now in sorted(lines, key=lambda one: (CLASSES.index(one[0][0]), *one[0][1:])):
        of_class, pass_, numbers, order, arch = key
        layers, cells = _cells(now, then.get(key, {}))
        start = [of_class, pass_, f"{numbers} {order}", arch, str(layers)]
        yield "| " + " | ".join([*start, *cells]) + " |"


def summary(found: Sequence[Row], before: Sequence[Row], numbers: str, order: str) -> Iterator[str]:
    """The same of one kind of numbers in one memory order, in lines of all chips: all figures of
    the first, and the shares of the others."""
    lines, then = classed(found), classed(before)
    first, *others = ARCHITECTURES
    chips = " | ".join(f"share, {arch}" for arch in ARCHITECTURES)
    yield (
        "| layers | pass | instructions a product | bytes over the least | blocks a multiprocessor"
        f" | {chips} |"
    )
    yield "| --- | --- |" + " ---: |" * (3 + len(ARCHITECTURES))
    for of_class, pass_ in product(CLASSES, PASSES):
        keys = [(of_class, pass_, numbers, order, arch) for arch in (first, *others)]
        if not all(key in lines for key in keys):
            continue
        (layers, cells), *rest = (_cells(lines[key], then.get(key, {})) for key in keys)
        cells += [of_other[-1] for _, of_other in rest]
        yield "| " + " | ".join([f"{of_class} ({layers})", pass_, *cells]) + " |"


def _cells(now: Mapping[str, Row], before: Mapping[str, Row]) -> tuple[int, list[str]]:
    """Of how many layers a line is, and a cell for each figure."""
    names = [name for name in now if name in before] or list(now)
    witness = [now[name]["cutlass"] for name in names if "cutlass" in now[name]]
    versions = [[now[name]["figures"] for name in names]]
    versions[:0] = [[before[name]["figures"] for name in names]] if names[0] in before else []
    cells = []
    for figure in FIGURES:
        means = [f"{_mean(version, figure):.3g}" for version in versions]
        is_whole = len(witness) == len(names)
        of_witness = f" ({_mean(witness, figure):.3g})" if is_whole else ""
        cells.append(" → ".join(means) + of_witness)
    return len(names), cells


def _mean(found: Sequence[Mapping[str, float]], figure: str) -> float:
    return float(np.exp(np.mean([log(one[figure]) for one in found])))


def judged(found: Sequence[Row]) -> Iterator[tuple[str, int, float, float]]:
    """For each chip, numbers and order of the rows: how many there are, and their ``verdict``."""
    groups: dict[str, list[Row]] = {}
    for row in found:
        groups.setdefault(f"{row['arch']} {row['numbers']} {row['order']}", []).append(row)
    for name, of_group in groups.items():
        yield name, len(of_group), *verdict([planned_and_counted(row) for row in of_group])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.emulator.suite",
        None,
        __doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("layers", nargs="*", help="suites or layers; else those of bench --quick")
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--numbers", nargs="+", choices=NUMBERS, default=("float16", "float32"))
    parser.add_argument("--order", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--planned", action="store_true", help="count only what is planned")
    parser.add_argument("--json", type=Path, help="to keep what was counted, beside other passes")
    parser.add_argument("--cutlass", type=Path, help="what is kept, to count CUTLASS's beside it")
    parser.add_argument("--table", type=Path, help="of what is kept, instead of counting")
    parser.add_argument("--before", type=Path, help="what was kept of another version, beside it")
    chosen = parser.parse_args(arguments)
    if chosen.table:
        before = json.loads(chosen.before.read_text()) if chosen.before else []
        print("\n".join(table(json.loads(chosen.table.read_text()), before)))
        return 0
    if chosen.cutlass:
        for row in witnessed(json.loads(chosen.cutlass.read_text())):
            keep(chosen.cutlass, [row])
            print(*(row[name] for name in WHICH), row["cutlass"], flush=True)
        return 0
    known = suites.suites()
    layers = suites.select(
        [word for word in chosen.layers if word in known],
        [word for word in chosen.layers or suites.QUICK if word not in known],
    )
    most = 1 if chosen.planned else 1000
    found = []
    for row in rows(layers, chosen.arch, chosen.numbers, chosen.order, chosen.passes, most):
        found.append(row)
        print(" ".join(row[name] for name in ("layer", "pass", "numbers", "order", "arch")),
              " ".join(f"{name}: {time:.4g} us;" for name, time in row["ways"].items()),
              flush=True)  # fmt: skip
    if chosen.json:
        keep(chosen.json, found)
    if not chosen.planned:
        for name, count, correlation, worst in judged(found):
            print(f"{name}: {count} passes, rank correlation {correlation:.3f}, at worst"
                  f" {worst:.2f} times the best way")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
