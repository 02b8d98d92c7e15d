"""Counted work and modelled times of planned kernels on the suite's layers, and of CUTLASS's.

``python -m tests.emulator.suite [SUITE OR LAYER ...] [--arch A ...] [--numbers N ...] [--json F]``

The model shares no code with the planner's cost model.

- Counted on the CPU, per launch: PTX instructions of some of its blocks (account.py), their
  wavefronts of shared memory and sectors of global memory.
- SASS instructions of the main loop around tensor-core products: the PTX count times the ratio of
  the loop's SASS length to its PTX length.  Waits for global memory, in the loop and outside:
  executed loads times the cubin's waits per load.
- Computed by NVRTC and NVIDIA's occupancy calculator: resident blocks per SM.
- Scaled by the grid: the blocks that ran are spread evenly over it, and the other blocks are
  assumed to do the same work on average.
- Modelled, from the data sheets of the nominal chips (cupyconv/kernels/device.py) and the
  constants below:

    busy   = per block, the busiest unit of an SM: instructions / 4, float instructions / lanes,
             products / tensor-core rate, wavefronts, sectors / 2
    alone  = per block without other work to hide its waits: instructions of the busiest warp
             * PACE + (1 + its waits for global memory) * LATENCY
    cycles = max(blocks of an SM * busy / FILLED, ceil(blocks of an SM / resident) * alone)
    launch = max(cycles / clock, bytes of its arrays / bandwidth) + OVERHEAD

The time of a pass is the sum over its launches.
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
from cupyconv.gpu import compiler, sources
from cupyconv.kernels.device import Chip
from cupyconv.kernels.strides import Strides
from cupyconv.launch import Launch, Part
from cupyconv.planning import Device, Request
from cupyconv.planning.plan import PassPlan, contenders
from cupyconv.problem import PASSES
from tests import cubins, launches
from tests.cubins import Resources

from . import driver, memory
from .account import layer_problem, lazy_tensors, tiling_text
from .build import cache_directory, digest
from .module import EmulatedKernel, EmulatedModule
from .ptx.counting import PRODUCTS
from .ptx.nvrtc import ptx_of, put
from .runtime import settings
from .witnesses import MissingError, cutlass
from .work import FREE, Executions, Instructions

SCHEDULERS = 4
"""Warp schedulers per SM; each issues one instruction per cycle (hardware rule)."""

FILLED = 0.85
"""Share of an SM's cycles that issue work under full load (modelled)."""

PACE = 2
"""Mean cycles between two instructions of a warp (modelled)."""

LATENCY = 600
"""Cycles of a load from global memory (modelled)."""

SECTORS = 2
"""32-byte sectors per SM cycle (modelled)."""

OVERHEAD = 2.0
"""Microseconds of launch overhead (modelled)."""

PRODUCT = {"tf32": 16 * 8 * 8, "float64": 8 * 8 * 4}
"""Multiplications per tensor-core instruction; 16 * 8 * 16 for 16-bit operands."""

BLOCKS = 4
"""Minimum number of blocks to run per launch (hand-set)."""

MOST_PERIOD = 8
"""Maximum blocks per row of tiles for which every column is sampled equally (hand-set)."""

GOLDEN = (5**0.5 - 1) / 2
"""Inverse golden ratio, whose multiples modulo 1 are spread most evenly."""

MOST_DEPTH = 1 << 17
"""Maximum gemm_k of a counted CUTLASS kernel, which is not split (hand-set)."""

_PTX = "sm_80"  # valid for all counted chips, which have the same instructions
_SCHEME = 5  # version of the cached counts


@dataclass(frozen=True)
class Counts:
    """Counts of one launch, averaged over the blocks that ran.

    Attributes:
        kernel: name of the kernel.
        blocks: blocks of the grid.
        resident: resident blocks per SM.
        warps: warps per block.
        instructions: instructions per block, without those that cost nothing.
        longest: instructions of the busiest warp.
        multiply_adds: instructions per block on float32 or float64.
        products: tensor-core instructions per block, PRODUCT multiplications each.
        wavefronts: wavefronts of shared memory per block.
        sectors: 32-byte sectors of global memory that a block requests.
        waits: waits for loads of the warp that waits most.
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
        """Return the SM cycles per block under full load."""
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
        """Return the cycles of the SM with the most blocks."""
        most = ceil(self.blocks / chip.multiprocessors)
        rounds = ceil(most / min(most, self.resident))
        alone = self.longest * PACE + (1 + self.waits) * LATENCY
        return max(most * self.busy(chip, operands) / FILLED, rounds * alone)

    def microseconds(self, chip: Chip, operands: str) -> float:
        """Return the time of the launch."""
        moving = self.touched / (chip.bandwidth * 1e3)
        return max(self.cycles(chip, operands) / (chip.clock * 1e3), moving) + OVERHEAD


@dataclass(frozen=True)
class Way:
    """A candidate: one way to compute a pass.

    Attributes:
        name: family, tile or tiling, splits and method.
        counted: microseconds from the counts.
        launches: counts of its launches.
    """

    name: str
    counted: float
    launches: tuple[Counts, ...]

    def figures(self, problem: ConvProblem, chip: Chip, operands: str) -> dict[str, float]:
        """Return the candidate's figures for a table."""
        return figures(self.launches, problem, chip, operands, self.counted)


def tensor_rate(chip: Chip, operands: str) -> float:
    """Return the TFLOP/s of the tensor cores; 0 if they do not support the operands."""
    rates = {"tf32": chip.tensor_rate / 2, "float32": 0.0, "float64": chip.double_tensor_rate}
    return rates.get(operands, chip.tensor_rate)


def plain_rate(chip: Chip, operands: str) -> float:
    """Return the TFLOP/s of multiply-adds outside the tensor cores."""
    return chip.double_rate if operands == "float64" else chip.float_rate


def figures(
    launches: Sequence[Counts], problem: ConvProblem, chip: Chip, operands: str, time: float
) -> dict[str, float]:
    """Return the figures of launches that compute a pass in ``time`` microseconds.

    Returns:
        ``instructions``: thread instructions per multiplication of the pass; ``bytes``: requested
        memory traffic / minimum; ``resident``: resident blocks per SM of the longest launch;
        ``share``: share of the roofline.
    """
    products = problem.useful_flops / problem.flops_of_product
    executed = sum(launch.blocks * launch.instructions * 32 for launch in launches)
    requested = sum(launch.blocks * launch.sectors * 32 for launch in launches)
    longest = max(launches, key=lambda launch: launch.blocks * launch.instructions)
    return {
        "instructions": executed / products,
        "bytes": requested / problem.bytes,
        "resident": longest.resident,
        "share": least(problem, chip, operands) / time,
    }


def least(problem: ConvProblem, chip: Chip, operands: str) -> float:
    """Return the roofline time of a pass in microseconds."""
    rate = max(tensor_rate(chip, operands), plain_rate(chip, operands))
    return max(problem.useful_flops / (rate * 1e6), problem.bytes / (chip.bandwidth * 1e3))


def counted_ways(
    problem: ConvProblem, pass_: str, device: Device, precision: str = "ieee", most: int = 1
) -> Iterator[Way]:
    """Yield a pass's first ``most`` candidates, the planned one first."""
    strides = Strides.contiguous(problem)
    request = Request(problem, pass_, device, precision, strides=strides)
    for planned in contenders(request, "auto", most):
        found = tuple(counts(planned, problem, device))
        time = sum(launch.microseconds(device.chip, request.operands) for launch in found)
        yield Way(name_of(planned), time, found)


def name_of(planned: PassPlan) -> str:
    """Return a name such as "cuda-gather 128x64x32 / 4"; "plain" means without tensor cores."""
    tile, words = planned.tile, [planned.implementation]
    if planned.tiling:
        words.append(tiling_text(planned))
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
    """Yield the counts of each launch of a planned pass."""
    prepared = launches.prepare(planned, problem, Strides.contiguous(problem), device)
    operands = {**lazy_tensors(problem), **_workspace(planned, prepared)}
    for launch in prepared:
        if 0 not in launch.grid:
            blocks = _spread(problem, prod(launch.grid), _period(planned, problem, launch))
            yield _counts(launch, operands, device, blocks)


def _period(planned: PassPlan, problem: ConvProblem, launch: Launch) -> int:
    """Return the blocks after which a product's ragged edge recurs; 1 without a ragged edge."""
    if planned.tile is None or launch.block != (planned.tile.threads,):
        return 1
    tile, gemm = planned.tile, problem.gemm(planned.pass_)
    if planned.splits > 1:
        ragged = gemm.gemm_m % tile.block_m or gemm.gemm_n % tile.block_n
        return launch.grid[0] if ragged else 1
    return -(-gemm.gemm_n // tile.block_n) if gemm.gemm_n % tile.block_n else 1


def _workspace(planned: PassPlan, prepared: Sequence[Launch]) -> dict[str | Part, np.ndarray]:
    """Return an array for the partial sums, and one for each copied tensor after them."""
    parts = {
        argument
        for launch in prepared
        for argument in launch.arguments
        if isinstance(argument, Part)
    }
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
    """Return the counts of CUTLASS's implicit GEMM for 8.0, with tiles of 128 x 128.

    Raises:
        ConvError: CUTLASS's instances do not support the problem or the chip.
        MissingError: the packages that CUTLASS is compiled from are not installed.
    """
    if operands == "float64" and not device.chip.double_tensor_rate:
        raise ConvError(
            "CUTLASS's instance for float64 needs tensor cores with float64",
            str(device.architecture),
            "Use sm_80",
        )
    if problem.gemm(pass_).gemm_k > MOST_DEPTH:
        raise ConvError(
            f"CUTLASS's instances do not split sums, so gemm_k must be at most {MOST_DEPTH:,}",
            f"gemm_k is {problem.gemm(pass_).gemm_k:,}",
            "Use a smaller layer",
        )
    launch = cutlass.convolution(problem, pass_, cutlass.instance_of(operands))
    instance, tensors = launch.instance, lazy_tensors(problem)
    kernel, total = launch.kernel(counted=True), prod(launch.grid)
    arguments = [*(tensors[role] for role in launch.roles), *launch.numbers]
    # A filter gradient is not split: every block sums over all pixels, so one block is enough.
    blocks = _spread(problem, total)[: 1 if pass_ == "backprop_filter" else None]
    shape = launch.grid, (instance.threads,), instance.shared_bytes
    work = _cached(
        ("witness", kernel.ptx, shape, blocks, [array.shape for array in tensors.values()],
         list(map(int, launch.numbers))),
        lambda: _work(kernel, *shape, arguments, blocks),
    )  # fmt: skip
    resident, _ = driver.resident_blocks(
        driver.chip_of(str(device.architecture)), kernel.resources, instance.threads,
        instance.shared_bytes, instance.shared_bytes,
    )  # fmt: skip
    touched = sum(tensors[name].nbytes for name in work.pop("tensors"))
    return Counts("cutlass", total, resident, instance.threads // 32, touched=touched, **work)


def _spread(problem: ConvProblem, total: int, period: int = 1) -> list[int]:
    """Return the blocks to run, in order: one per equal share of the grid, at varying offsets.

    There are at least as many shares as an input gradient has stride phases.

    Args:
        problem: the layer.
        total: blocks of the grid.
        period: length of a row of tiles.  If it is short, every column is sampled equally often:
            the last column may hold little work and would distort the average.
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
    launch: Launch, operands: Mapping[str | Part, np.ndarray], device: Device, selection: list[int]
) -> Counts:
    total, threads = prod(launch.grid), prod(launch.block)
    arguments = [
        operands.get(argument, np.uint64(0)) if isinstance(argument, (str, Part)) else argument
        for argument in launch.arguments
    ]
    text = _entry_text(ptx_of(launch.source, launch.defines, _PTX), launch.entry)
    values = [
        (argument.shape, argument.dtype)
        if id(argument) in map(id, operands.values())
        else argument.tobytes()
        for argument in arguments
    ]
    work = _cached(
        ("work", text, launch.entry, launch.grid, launch.block, selection, values),
        lambda: _work(
            _module(launch.source, launch.defines).get_function(launch.entry),
            launch.grid,
            launch.block,
            launch.shared_bytes,
            arguments,
            selection,
        ),
    )
    resources = _resources(launch, device)
    resident, _ = driver.resident_blocks(
        driver.chip_of(device.architecture), resources, threads, launch.shared_bytes,
        launch.shared_bytes,
    )  # fmt: skip
    names = work.pop("tensors")
    touched = sum(array.nbytes for array in operands.values() if memory.name_of(array) in names)
    return Counts(launch.entry, total, resident, -(-threads // 32), touched=touched, **work)


def _entry_text(ptx: str, name: str) -> str:
    """Return the PTX that a kernel's counts depend on, without source lines and other kernels."""
    excluded = rf"(?ms)^\.visible \.entry (?!{name}\().*?^}}$|^\t\.section.*"
    return re.sub(excluded, "", re.sub(r"\s*\.(loc|file)\b.*", "", ptx))


def _work(
    kernel: EmulatedKernel,
    grid: Sequence[int],
    block: Sequence[int],
    shared_bytes: int,
    arguments: list[Any],
    selection: list[int],
) -> dict[str, Any]:
    """Return the work of blocks of a launch, averaged, and the arrays that they touch."""
    kernel.allow(shared_bytes)
    with settings(work=True, raise_reports=False, blocks=selection):
        outcome = kernel(grid, block, arguments, shared_mem=shared_bytes)
    assert outcome.work is not None
    assert outcome.work.instructions is not None
    kinds = outcome.work.by_kind()
    executed = _executed(outcome.work.instructions)
    loop_executed = _executed(outcome.work.main_loop)
    assert kernel.cubin is not None
    code = cubins.kernels(cubins.disassemble(kernel.cubin))[kernel.name]
    saving = 1 - _sass_per_ptx(kernel, code) if PRODUCTS in kinds else 0
    loop = (outcome.work.main_loop or {}) if PRODUCTS in kinds else {}
    per_warp = [all_ - saving * loop_executed.get(warp, 0) for warp, all_ in executed.items()]
    sums = {
        "instructions": sum(per_warp),
        "longest": max(per_warp),
        "multiply_adds": kinds["float"].by_warp if "float" in kinds else 0,
        "products": kinds[PRODUCTS].by_warp if PRODUCTS in kinds else 0,
        "wavefronts": sum(line.wavefronts for line in outcome.bank_conflicts),
        "sectors": sum(traffic.sectors for traffic in outcome.work.sectors),
        "waits": waits_of(outcome.work.instructions, loop, code),
    }
    averages = {name: value / len(selection) for name, value in sums.items()}
    return {**averages, "tensors": sorted({traffic.tensor for traffic in outcome.work.sectors})}


def _executed(by_warp: Instructions | None) -> dict[int, int]:
    """Return the instructions that cost something, by warp."""
    return {
        warp: sum(count.by_warp for kind, count in kinds.items() if kind not in FREE)
        for warp, kinds in (by_warp or {}).items()
    }


def waits_of(of_warps: Instructions, of_loop: Instructions, code: str) -> float:
    """Return the waits of the warp that waits most, from the cubin's waits per load.

    Args:
        of_warps: executed instructions.
        of_loop: the subset in the loop around tensor-core products.
        code: SASS of the kernel.
    """

    def waits_per_load(lines: list[str]) -> float:
        loads, waits = cubins.loads_and_waits(lines)
        return waits / max(loads, 1)

    def loads(kinds: Mapping[str, Executions]) -> int:
        return kinds["load global"].by_warp if "load global" in kinds else 0

    inside, beside = map(
        waits_per_load, cubins.main_loop_and_rest(code, cubins.any_of(cubins.PRODUCTS))
    )
    return max(
        (inside - beside) * loads(of_loop.get(warp, {})) + beside * loads(kinds)
        for warp, kinds in of_warps.items()
    )


def _sass_per_ptx(kernel: EmulatedKernel, code: str) -> float:
    """Return SASS instructions per PTX instruction in the loop around the products."""
    counters = [counter for counter in kernel.counters if counter.in_main_loop]
    ptx_count = sum(
        n for counter in counters for kind, n in counter.kinds.items() if kind not in FREE
    )
    return len(cubins.main_loop(code, cubins.any_of(cubins.PRODUCTS))) / ptx_count


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
    """Return the resources of a launch's kernel from the chip's cubin."""
    assert device.architecture is not None
    source = sources.load(launch.source)
    resources = _cached(
        ("resources", compiler.nvrtc_version(), source.text, *source.headers, launch.defines,
         device.architecture),
        lambda: {
            name: {"registers": kernel.registers, "static_shared": kernel.static_shared,
                   "launch_bounds": kernel.launch_bounds, "cluster": None, "parameters": ()}
            for name, kernel in driver.compiled(
                launch.source, launch.defines, device.architecture
            ).items()
        },
    )  # fmt: skip
    return Resources(**resources[launch.entry])


def _cached(key: tuple[Any, ...], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the value of a key, from the emulator's cache or newly made."""
    path = cache_directory() / f"counts-{digest(_SCHEME, *key)}.json"
    if not path.exists():
        put(path, json.dumps(make()))
    value: dict[str, Any] = json.loads(path.read_text())
    return value


NUMBERS = {
    "float16": ("float16", "ieee"),
    "bfloat16": ("bfloat16", "ieee"),
    "float32": ("float32", "ieee"),
    "tf32": ("float32", "tf32"),
    "float64": ("float64", "ieee"),
}
"""Dtype and precision by operand type."""

ARCHITECTURES = ("sm_80", "sm_86", "sm_89")
ORDERS = ("channels-last", "channels-first")
RESULTS = Path(__file__).with_name("results") / "suite.json"

WHICH = ("arch", "numbers", "order", "layer", "pass")

Row = dict[str, Any]
"""Counts of a pass of a layer: the keys of WHICH; ``ways``, the counted microseconds by candidate,
the planned one first; ``figures`` of the planned candidate; ``cutlass``, CUTLASS's figures."""


def rows(
    layers: Sequence[suites.SuiteLayer],
    architectures: Sequence[str] = ARCHITECTURES,
    numbers: Sequence[str] = ("float16", "float32"),
    orders: Sequence[str] = ORDERS,
    passes: Sequence[str] = PASSES,
    most: int = 1,
) -> Iterator[Row]:
    """Count the first ``most`` candidates of passes of layers."""
    for layer, operands, order, pass_, arch in product(
        layers, numbers, orders, passes, architectures
    ):
        dtype, precision = NUMBERS[operands]
        problem, device = layer_problem(layer.name, dtype, order), Device.of(arch)
        ways = list(counted_ways(problem, pass_, device, precision, most))
        yield {
            "arch": arch,
            "numbers": operands,
            "order": order,
            "layer": layer.name,
            "pass": pass_,
            "ways": {way.name: float(f"{way.counted:.4g}") for way in ways},
            "figures": _rounded(ways[0].figures(problem, device.chip, operands)),
            **_witness_figures(problem, pass_, device, operands),
        }


def keep(path: Path, found: Sequence[Row]) -> None:
    """Write rows to a file; they replace rows of the same passes."""
    previous = json.loads(path.read_text()) if path.exists() else []
    rows_of = {tuple(row[name] for name in WHICH): row for row in (*previous, *found)}
    put(path, "[\n" + ",\n".join(map(json.dumps, rows_of.values())) + "\n]\n")


def _witness_figures(
    problem: ConvProblem, pass_: str, device: Device, operands: str
) -> dict[str, dict[str, float]]:
    """Return CUTLASS's figures, if it has a kernel and is installed."""
    try:
        launch = counts_of_witness(problem, pass_, device, operands)
    except (ConvError, MissingError):
        return {}
    time = launch.microseconds(device.chip, operands)
    return {"cutlass": _rounded(figures([launch], problem, device.chip, operands, time))}


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in values.items()}


_NAMES = {"conv1d": "1-D", "conv3d": "3-D"}
CLASSES = ("dense", "strided", *(_NAMES.get(kind, kind) for kind in suites.KINDS[1:]))
"""Classes of layers: the suite's kinds, with strided dense and pointwise layers separate."""


def class_of(layer: suites.SuiteLayer) -> str:
    """Return the layer's class, one of CLASSES."""
    if layer.kind in ("dense", "pointwise") and max(layer.problem.stride) > 1:
        return "strided"
    return _NAMES.get(layer.kind, layer.kind)


Key = tuple[str, ...]
"""Key of a table row: class, pass, numbers, order and chip."""


def classed(found: Sequence[Row]) -> dict[Key, list[Row]]:
    """Group rows by table row."""
    classes: dict[Key, list[Row]] = {}
    for row in found:
        (layer,) = suites.select(names=[row["layer"]])
        key = (class_of(layer), row["pass"], row["numbers"], row["order"], row["arch"])
        classes.setdefault(key, []).append(row)
    return classes


def summary(found: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown table with one row for each kind of numbers and memory order.

    The shares of the roofline are geometric means over all layers and passes.
    """
    first = ARCHITECTURES[0]
    chips = " | ".join(f"share, {arch}" for arch in ARCHITECTURES)
    yield f"| numbers | memory order | layers | {chips} | lowest share, {first} |"
    yield "| --- | --- | ---: |" + " ---: |" * len(ARCHITECTURES) + " --- |"
    for numbers, order in sorted({(row["numbers"], row["order"]) for row in found}):
        rows = [row for row in found if (row["numbers"], row["order"]) == (numbers, order)]
        shares = [
            _mean([row["figures"] for row in rows if row["arch"] == arch], "share")
            for arch in ARCHITECTURES
        ]
        lowest = min(
            (row for row in rows if row["arch"] == first), key=lambda row: row["figures"]["share"]
        )
        of_lowest = f"{lowest['figures']['share']:.2f}: {lowest['layer']}, {lowest['pass']}"
        cells = [len({row["layer"] for row in rows}), *(f"{share:.2f}" for share in shares)]
        yield f"| {numbers} | {order} | {' | '.join(map(str, cells))} | {of_lowest} |"


def _mean(found: Sequence[Mapping[str, float]], figure: str) -> float:
    return float(np.exp(np.mean([log(row[figure]) for row in found])))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.emulator.suite",
        None,
        __doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "layers", nargs="*", help="Suites or layers; default: those of bench --quick."
    )
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--numbers", nargs="+", choices=NUMBERS, default=("float16", "float32"))
    parser.add_argument("--order", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--most", type=int, default=1, help="Candidates per pass; default: 1.")
    parser.add_argument("--json", type=Path, help="Store the counts in this file.")
    options = parser.parse_args(arguments)
    known_suites = suites.suites()
    layers = suites.select(
        [word for word in options.layers if word in known_suites],
        [word for word in options.layers or suites.QUICK if word not in known_suites],
    )
    for row in rows(
        layers, options.arch, options.numbers, options.order, options.passes, options.most
    ):
        if options.json:
            keep(options.json, [row])
        times = "; ".join(f"{name}: {time:.4g} us" for name, time in row["ways"].items())
        print(*(row[name] for name in WHICH), times, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
