"""The planner's estimates compared with counts of what kernels execute.

The counts are made by tests/emulator/suite.py.
"""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from math import prod
from statistics import geometric_mean

import pytest

from cupyconv import ConvProblem
from cupyconv.bench import suites
from cupyconv.gpu import compiler, sources
from cupyconv.kernels import cost, gather, streaming
from cupyconv.kernels.family import Choices
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import contenders
from cupyconv.problem import PASSES
from tests import cubins
from tests.emulator import driver, suite
from tests.emulator.account import layer_problem
from tests.emulator.suite import Counts
from tests.emulator.work import Executions

ROWS = json.loads(suite.RESULTS.read_text())
GROUPS = defaultdict(list)
for _row in ROWS:
    GROUPS[_row["arch"], _row["numbers"], _row["order"]].append(_row)


@pytest.mark.parametrize("stride", [(1, 1), (1, 2), (3, 3), (4, 4)])
def test_sampled_blocks_are_spread_over_the_grid(stride):
    """One block per share of the grid is run, and the blocks follow no period."""
    problem = ConvProblem((1, 1, 8, 8), (1, 1, 1, 1), stride=stride)
    number = max(prod(stride), suite.BLOCKS)
    for total in (1, 2, 5, 6, 10, 100, 4096, 2**31 - 1):
        found = suite._spread(problem, total)
        assert found == sorted(set(found))
        assert 0 <= found[0] <= found[-1] < total
        if total >= 2 * number:
            assert [one * number // total for one in found] == pytest.approx(range(number), abs=1)
            assert len(found) == number
    for period in range(2, 100):
        assert len({one % period for one in suite._spread(problem, 4096)}) > 1


@pytest.mark.parametrize("period", [2, 3, 5, 8])
def test_sampled_blocks_cover_every_column_equally(period):
    """The last tile of a row may hold little work, so another share of it distorts the average."""
    problem = ConvProblem((1, 1, 8, 8), (1, 1, 1, 1))
    for rows in (1, 2, 7, 168, 10**6):
        found = suite._spread(problem, rows * period, period)
        assert found == sorted(set(found))
        assert 0 <= found[0] <= found[-1] < rows * period
        often = Counter(one % period for one in found)
        assert len(often) == period
        assert len(set(often.values())) == 1


def test_counted_bytes_are_at_least_the_tensors_bytes():
    """Each of these passes reads both operands completely and writes the result."""
    for row in ROWS:
        problem = layer_problem(row["layer"], suite.NUMBERS[row["numbers"]][0], row["order"])
        if any(axis.unread_inputs for axis in problem.axes):
            continue
        for figures in (row["figures"], row.get("cutlass", row["figures"])):
            assert figures["bytes"] >= 1, row


def test_counts_cover_every_class_of_layers():
    """The results cover every class on every chip.

    Dilated layers use the kernels of dense layers, so they are counted in the most common dtypes
    only.  Channels-first layers, whose operands may be copied, are counted in every dtype.
    """
    found = defaultdict(set)
    for of_class, pass_, numbers, order, arch in suite.classed(ROWS):
        found[arch, numbers].add((of_class, pass_))
        found[arch, numbers, order].add((of_class, pass_))
    every = set(product(suite.CLASSES, PASSES))
    for arch, numbers in product(suite.ARCHITECTURES, suite.NUMBERS):
        rare = () if numbers in ("float16", "float32") else product(["dilated"], PASSES)
        assert found[arch, numbers] >= every - set(rare)
        commonest = product(("dense", "strided", "pointwise"), PASSES)
        assert found[arch, numbers, "channels-first"] >= set(commonest)


def test_no_pass_is_counted_twice():
    passes = [tuple(row[name] for name in suite.WHICH) for row in ROWS]
    assert len(passes) == len(set(passes))


def test_counted_times_are_at_least_the_chips_minimum():
    for row in ROWS:
        dtype, _ = suite.NUMBERS[row["numbers"]]
        problem = layer_problem(row["layer"], dtype, row["order"])
        least = suite.least(problem, Device.of(row["arch"]).chip, row["numbers"])
        assert min(row["ways"].values()) >= least, row


@pytest.mark.thorough
def test_first_choices_are_near_the_fastest_counted_candidates():
    """The bounds hold on average and in the worst case, and for the best of the first five."""
    first, best_of_five = [], []
    for row in ROWS:
        if len(row["ways"]) == 1:
            continue
        dtype, precision = suite.NUMBERS[row["numbers"]]
        problem = layer_problem(row["layer"], dtype, row["order"])
        strides = Strides.contiguous(problem)
        request = Request(problem, row["pass"], Device.of(row["arch"]), precision, strides=strides)
        ranked = [suite.name_of(one) for one in contenders(request, "auto", 1000)]
        assert {ranked[0]} <= row["ways"].keys() <= set(ranked), f"count again: {row}"
        times = [row["ways"][name] for name in ranked if name in row["ways"]]
        first.append(times[0] / min(times))
        best_of_five.append(min(times[:5]) / min(times))
    assert len(first) > 300
    assert geometric_mean(first) <= 1.05
    assert max(first) <= 2.0
    assert geometric_mean(best_of_five) <= 1.01


def test_counts_depend_on_no_other_kernel_of_a_module():
    def module(reduction):
        kernels = (
            f".visible .entry {name}(\n)\n{{\n\t{{\n\t{code}; .loc 1 2 3\n\t}}\n}}\n"
            for name, code in (("conv", "multiply"), ("conv_reduce", reduction))
        )
        return f"{''.join(kernels)}\t.section\t.debug_str\n\t{{\n{reduction}\t}}\n"

    found = {name: [suite._entry_text(module(one), name) for one in ("add", "load")]
             for name in ("conv", "conv_reduce")}  # fmt: skip
    assert found["conv"][0] == found["conv"][1]
    assert "multiply" in found["conv"][0]
    assert found["conv_reduce"][0] != found["conv_reduce"][1]


RECOUNTED = (("sm_80", "float16", "channels-last"), ("sm_86", "float32", "channels-first"))


@pytest.mark.costly
@pytest.mark.parametrize("group", RECOUNTED, ids=" ".join)
def test_stored_counts_match_a_new_count(group):
    """Counting a small layer again gives the stored counts."""
    arch, numbers, order = group
    (row,) = [
        one
        for one in GROUPS[group]
        if (one["layer"], one["pass"]) == ("mobilenetv2-pw2", "forward")
    ]
    dtype, precision = suite.NUMBERS[numbers]
    problem = layer_problem(row["layer"], dtype, order)
    (way,) = suite.counted_ways(problem, "forward", Device.of(arch), precision)
    assert way.counted == pytest.approx(row["ways"][way.name], rel=0.02), (
        "kernels have changed; count again: python -m tests.emulator.suite --json ..."
    )


def test_candidates_have_distinct_names():
    """Tiles of equal sizes differ by name too: only one of them may use tensor cores."""
    problem = layer_problem("mobilenetv2-pw2", "float32", "channels-last")
    strides = Strides.contiguous(problem)
    for pass_ in PASSES:
        request = Request(problem, pass_, Device.of("sm_80"), "tf32", strides=strides)
        found = [suite.name_of(one) for one in contenders(request, "auto", 1000)]
        assert len(set(found)) == len(found) > 6


def test_new_rows_replace_only_rows_of_the_same_pass(tmp_path):
    def row(arch, time):
        return {**dict.fromkeys(suite.WHICH, "same"), "arch": arch, "ways": {"a": time}}

    path = tmp_path / "rows.json"
    suite.keep(path, [row("sm_80", 1.0), row("sm_86", 2.0)])
    suite.keep(path, [row("sm_86", 3.0), row("sm_89", 4.0)])
    assert json.loads(path.read_text()) == [row("sm_80", 1.0), row("sm_86", 3.0), row("sm_89", 4.0)]


@pytest.mark.parametrize("numbers", suite.NUMBERS)
@pytest.mark.parametrize("architecture", suite.ARCHITECTURES)
def test_cuda_gather_splits_fill_the_chip(architecture, numbers):
    """Splits of cuda-gather give about as many blocks as are resident on the whole chip.

    Exceptions are layers with too few steps, and layers whose estimate is lower without the
    reduction of splits.  Without tensor cores, which takes longest, every multiprocessor has a
    block.
    """
    (dtype, precision), device = suite.NUMBERS[numbers], Device.of(architecture)
    family, seen = FAMILIES["cuda-gather"], 0
    for layer, order in product(suites.select(list(suites.suites())), suite.ORDERS):
        problem = layer_problem(layer.name, dtype, order)
        strides = Strides.contiguous(problem)
        request = Request(problem, "backprop_filter", device, precision, strides=strides)
        if family.refuses(request):
            continue

        def fills(one, problem=problem):
            steps = -(-problem.gemm("backprop_filter").gemm_k // one.tile.block_k)
            places = device.chip.multiprocessors * one.tile.defines["RESIDENT"]
            is_all = steps < (cost.LEAST_SPLIT_STEPS + 1) * max(one.splits, 2)
            return is_all or one.blocks * one.splits >= gather.FILLED * places

        ways = sorted(family.candidates(request), key=lambda one: one.microseconds)
        assert fills(ways[0]) or ways[0].splits == 1, layer.name
        if not ways[0].tile.defines["TENSOR_CORES"]:
            blocks = ways[0].blocks * ways[0].splits
            assert blocks >= device.chip.multiprocessors, layer.name
        assert any(map(fills, ways)), layer.name
        seen += fills(ways[0])
    assert seen > 100


@pytest.mark.parametrize("impl", ["cuda-direct", "cuda-toeplitz", "cuda-patch"])
@pytest.mark.parametrize("architecture", suite.ARCHITECTURES)
def test_filter_gradient_chunks_fill_the_chip(architecture, impl):
    """Plans use a block per multiprocessor, or fewer blocks only where that is faster."""
    device, family, seen = Device.of(architecture), FAMILIES[impl], 0
    for layer, dtype in product(suites.select(list(suites.suites())), ("float16", "float32")):
        problem = layer_problem(layer.name, dtype, "channels-last")
        strides = Strides.contiguous(problem)
        request = Request(problem, "backprop_filter", device, "tf32", strides=strides)
        if family.refuses(request):
            continue
        geom = family.geometry(request, family.choose(request))
        others = prod(geom.others)
        least = min(device.chip.multiprocessors, min(geom.parts, streaming.MOST_CHUNKS) * others)
        found = family.candidates(request)
        filling = [one.microseconds for one in found if one.splits * others >= least]
        for one in found:
            fills = one.splits * others >= least
            assert fills or one.microseconds < streaming.IDLE * min(filling), layer.name
            seen += fills
    assert seen > 20


# -- calculations checked by hand ------------------------------------------------------------------

CHIP = replace(Device.of("sm_80").chip, multiprocessors=10, clock=1.0, bandwidth=100.0,
               tensor_rate=20.48, float_rate=1.28, double_tensor_rate=1.28,
               double_rate=0.64)  # fmt: skip
IDLE = Counts("kernel", 1, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0)


def test_slowest_unit_determines_the_time_of_a_launch():
    # Per SM cycle: 2,048 operations of the tensor cores and 64 multiply-adds; for float64, 64
    # multiply-adds of the tensor cores and 32 others.
    for field, amount, cycles in (
        ("instructions", 4_000, 1_000),
        ("multiply_adds", 2_000, 1_000),
        ("products", 500, 1_000),
        ("wavefronts", 1_000, 1_000),
        ("sectors", 2_000, 1_000),
    ):
        busy = replace(IDLE, **{field: amount})
        assert busy.busy(CHIP, "float16") == pytest.approx(cycles)
        for blocks, most in ((1, 1), (10, 1), (11, 2), (95, 10)):
            held = replace(busy, blocks=blocks, resident=16)
            assert held.cycles(CHIP, "float16") == pytest.approx(most * cycles / suite.FILLED)
    assert replace(IDLE, products=500).busy(CHIP, "tf32") == pytest.approx(1_000)
    for one in (replace(IDLE, products=250), replace(IDLE, multiply_adds=1_000)):
        assert one.busy(CHIP, "float64") == pytest.approx(1_000)
    without = replace(CHIP, double_tensor_rate=0)
    assert replace(IDLE, multiply_adds=1_000).busy(without, "float64") == pytest.approx(1_000)
    waiting = replace(IDLE, longest=500, waits=2, blocks=35)
    alone = 500 * suite.PACE + 3 * suite.LATENCY
    for resident, rounds in ((1, 4), (2, 2), (3, 2), (4, 1)):
        held = replace(waiting, resident=resident)
        assert held.cycles(CHIP, "float16") == rounds * alone
    assert held.microseconds(CHIP, "float16") == pytest.approx(alone / 1e3 + suite.OVERHEAD)
    moving = replace(held, touched=10**6)
    assert moving.microseconds(CHIP, "float16") == pytest.approx(10 + suite.OVERHEAD)


# SASS with two concurrent loads in the loop of products, and one load before the loop.
LOOP = """
        /*0000*/                   LDG.E R0, [R2.64] ;
        /*0010*/                   FADD R1, R0, R0 ;
.L_x_1:
        /*0020*/                   LDG.E R4, [R2.64] ;
        /*0030*/                   LDG.E R5, [R2.64] ;
        /*0040*/                   STS [R8], R4 ;
        /*0050*/                   STS [R8], R5 ;
        /*0060*/                   HMMA.16816.F32 R12, R16, R20, R12 ;
        /*0070*/              @P0  BRA `(.L_x_1) ;
        /*0080*/                   EXIT ;
"""


def test_waits_count_concurrent_loads_of_the_main_loop_once():
    def loads(count):
        return {"load global": Executions(count, 32 * count), "integer": Executions(9, 9)}

    of_warps, of_loop = {0: loads(14), 1: loads(21)}, {0: loads(14), 1: loads(20)}
    assert suite.waits_of(of_warps, of_loop, LOOP) == 20 / 2 + 1
    assert suite.waits_of({0: loads(5)}, {}, LOOP) == 5
    assert suite.waits_of({0: {}}, {}, LOOP) == 0


def test_figures_of_one_block():
    """The layer is a matrix product of 16 x 8 x 16 in one block."""
    problem = ConvProblem((1, 16, 4, 4), (8, 16, 1, 1), dtype="float16")
    one = replace(IDLE, instructions=640, sectors=(256 + 128 + 128) * 2 / 32, resident=3)
    found = suite.figures([one], problem, CHIP, "float16", time=problem.bytes / 1e5 * 4)
    assert found == {
        "instructions": pytest.approx(10),
        "bytes": pytest.approx(1),
        "resident": 3,
        "share": pytest.approx(1 / 4),
    }


@pytest.mark.costly
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_resident_blocks_match_nvidias_occupancy_calculator(dtype):
    """The model agrees with the registers of each variant compiled for sm_80."""
    pytest.importorskip("cupy", reason="compiling kernels needs CuPy: pip install 'cupyconv[test]'")
    family, device = FAMILIES["cuda-gather"], Device.of("sm_80")
    problem = layer_problem("resnet50-11", dtype, "channels-last")
    strides = Strides.contiguous(problem)
    request = Request(problem, "forward", device, strides=strides)
    for tile in family.fitting_tiles(request):
        one, *_ = family.launches(request, Choices(tile=tile, blocks=1))
        made = compiler.compile_cubin(sources.load(one.source), dict(one.defines), "sm_80")
        resident, _ = driver.resident_blocks(
            driver.chip_of("sm_80"),
            cubins.resources(*made)[one.entry],
            tile.threads,
            one.shared_bytes,
            one.shared_bytes,
        )
        assert gather.resident(request, tile) == resident, f"{tile}: correct gather.BY_REGISTERS"
