"""The planner's estimates beside what kernels execute (tests/emulator/suite.py)."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from math import prod

import pytest

from cupyconv import ConvProblem
from cupyconv.bench import suites
from cupyconv.gpu import compiler, launches, sources
from cupyconv.planning import Device, Request, cost, plan_pass
from cupyconv.planning.families import FAMILIES, gather, streaming
from cupyconv.planning.plan import contenders
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES
from tests import cubins
from tests.agreement import planned
from tests.emulator import driver, suite
from tests.emulator.account import layer_problem
from tests.emulator.suite import Counts
from tests.emulator.work import Executions

ROWS = json.loads(suite.RESULTS.read_text())
GROUPS = defaultdict(list)
for _row in ROWS:
    GROUPS[_row["arch"], _row["numbers"], _row["order"]].append(_row)


@pytest.mark.parametrize("stride", [(1, 1), (1, 2), (3, 3), (4, 4)])
def test_blocks_that_are_run_are_spread_over_the_grid(stride):
    """One of each share, as many as there are; at no period that blocks of a row may have."""
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
def test_of_blocks_that_come_again_each_is_run_as_often(period):
    """Else the last of a row of tiles, which may hold little, passes for all of them."""
    problem = ConvProblem((1, 1, 8, 8), (1, 1, 1, 1))
    for rows in (1, 2, 7, 168, 10**6):
        found = suite._spread(problem, rows * period, period)
        assert found == sorted(set(found))
        assert 0 <= found[0] <= found[-1] < rows * period
        often = Counter(one % period for one in found)
        assert len(often) == period
        assert len(set(often.values())) == 1


def test_no_pass_asks_for_fewer_bytes_than_its_tensors_have():
    """Both operands are read whole by each of these, and the result is written."""
    for row in ROWS:
        problem = layer_problem(row["layer"], suite.NUMBERS[row["numbers"]][0], row["order"])
        if any(axis.unread_inputs for axis in problem.axes):
            continue
        for figures in (row["figures"], row.get("cutlass", row["figures"])):
            assert figures["bytes"] >= 1, row


def test_every_class_of_layers_is_counted():
    """On every chip; dilated layers, which take the kernels of dense ones, in the commonest dtypes.
    With channels first, where operands are copied or not, in every dtype."""
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


def test_nothing_is_counted_as_faster_than_the_chip_can_be():
    for row in ROWS:
        dtype, _ = suite.NUMBERS[row["numbers"]]
        problem = layer_problem(row["layer"], dtype, row["order"])
        least = suite.least(problem, Device.of(row["arch"]).chip, row["numbers"])
        assert min(row["ways"].values()) >= least, row


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_the_planner_orders_kernels_by_what_they_execute(group):
    """Of every layer that was counted: what is planned, and the order of all that might be."""
    correlation, worst = suite.verdict([suite.planned_and_counted(row) for row in GROUPS[group]])
    assert correlation >= 0.9
    assert worst <= 1.15


# Of ``suites.drawn``: what nobody chose, and too small to fill a chip; and layers of the suite that
# are not among those whose ways are all counted.
OTHERS = [
    ("drawn-1-36", "float32", "sm_89", "backprop_filter"),
    ("drawn-1-55", "float32", "sm_89", "backprop_input"),
    ("drawn-1-99", "float16", "sm_86", "backprop_filter"),
    ("drawn-1-153", "float32", "sm_86", "forward"),
    ("drawn-2-3", "tf32", "sm_86", "backprop_filter"),
    ("drawn-2-11", "float16", "sm_86", "backprop_filter"),
    ("drawn-2-99", "float16", "sm_80", "forward"),
    ("drawn-11-13", "float16", "sm_89", "forward"),
    ("convnext-dw4 channels-last", "float16", "sm_80", "forward"),
    ("convnext-dw4 channels-last", "float16", "sm_86", "backprop_input"),
    ("convnext-dw2 channels-first", "float16", "sm_86", "forward"),
    ("convnext-dw1 channels-last", "float32", "sm_80", "backprop_input"),
    ("efficientnetb0-dw4 channels-last", "float16", "sm_80", "backprop_filter"),
    ("mobilenetv2-dw7 channels-last", "bfloat16", "sm_80", "forward"),
    ("replk-dw31 channels-last", "float16", "sm_80", "forward"),
    ("resnet3d-stem channels-first", "float16", "sm_89", "forward"),
    ("seed-5x100x100 channels-last", "float16", "sm_86", "backprop_filter"),
    ("vgg16-1 channels-first", "float16", "sm_80", "backprop_filter"),
    ("vgg16-1 channels-last", "float16", "sm_80", "backprop_filter"),
]


@pytest.mark.parametrize(("name", "numbers", "arch", "pass_"), OTHERS)
def test_other_layers_are_planned_by_what_kernels_execute(name, numbers, arch, pass_):
    """Of each family that may be the fastest its best way: what is planned is."""
    dtype, precision = suite.NUMBERS[numbers]
    if name.startswith("drawn"):
        seed, number = map(int, name.split("-")[1:])
        problem = list(suites.drawn(seed, number + 1))[-1].problem.replace(dtype=dtype)
    else:
        layer, order = name.split()
        problem = layer_problem(layer, dtype, order)
    device = Device.of(arch)
    strides = Strides.contiguous(problem)
    request = Request(problem, pass_, device, precision, strides=strides)
    best = {one.implementation: one for one in contenders(request, "auto", count=1000)[::-1]}
    prices = {name: suite.price(one, request) for name, one in best.items()}
    least = min(prices.values())
    close = [suite.counted(best[name], request) for name in best if prices[name] <= 2.5 * least]
    chosen = min(close, key=lambda way: way.planned)
    assert chosen.counted <= 1.15 * min(way.counted for way in close)
    assert [way.planned / way.counted for way in close] == pytest.approx([1] * len(close), rel=0.5)


def test_counts_depend_on_no_other_kernel_of_a_module():
    def module(reduction):
        kernels = (
            f".visible .entry {name}(\n)\n{{\n\t{{\n\t{code}; .loc 1 2 3\n\t}}\n}}\n"
            for name, code in (("conv", "multiply"), ("conv_reduce", reduction))
        )
        return f"{''.join(kernels)}\t.section\t.debug_str\n\t{{\n{reduction}\t}}\n"

    found = {name: [suite._of_entry(module(one), name) for one in ("add", "load")]
             for name in ("conv", "conv_reduce")}  # fmt: skip
    assert found["conv"][0] == found["conv"][1]
    assert "multiply" in found["conv"][0]
    assert found["conv_reduce"][0] != found["conv_reduce"][1]


RECOUNTED = (("sm_80", "float16", "channels-last"), ("sm_86", "float32", "channels-first"))


@pytest.mark.parametrize("group", RECOUNTED, ids=" ".join)
def test_what_is_kept_is_what_kernels_execute(group):
    """Of a small layer, counted again."""
    arch, numbers, order = group
    (row,) = [
        one
        for one in GROUPS[group]
        if (one["layer"], one["pass"]) == ("mobilenetv2-pw2", "forward")
    ]
    dtype, precision = suite.NUMBERS[numbers]
    problem = layer_problem(row["layer"], dtype, order)
    (way,) = suite.ways(problem, "forward", Device.of(arch), precision, most=1)
    assert way.counted == pytest.approx(row["ways"][way.name], rel=0.02), (
        "kernels have changed; count again: python -m tests.emulator.suite --json ..."
    )


def test_ways_have_names_of_their_own():
    """Tiles of the same sizes too, which may multiply with the tensor cores and without."""
    problem = layer_problem("mobilenetv2-pw2", "float32", "channels-last")
    strides = Strides.contiguous(problem)
    for pass_ in PASSES:
        request = Request(problem, pass_, Device.of("sm_80"), "tf32", strides=strides)
        found = [suite.name_of(one) for one in contenders(request, "auto", 1000)]
        assert len(set(found)) == len(found) > 6


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_figures_are_of_what_is_planned_now(group):
    for row in GROUPS[group]:
        dtype, precision = suite.NUMBERS[row["numbers"]]
        problem = layer_problem(row["layer"], dtype, row["order"])
        strides = Strides.contiguous(problem)
        request = Request(problem, row["pass"], Device.of(row["arch"]), precision, strides=strides)
        (planned,) = contenders(request, "auto", count=1)
        assert suite.name_of(planned) == row["planned"], [row[name] for name in suite.WHICH]


def test_a_row_must_have_what_is_planned_now():
    row = next(one for one in ROWS if one["layer"] == "resnet50-17")
    planned = suite.planned_and_counted(row)
    chosen = min(planned, key=lambda name: planned[name][0])
    others = {name: time for name, time in row["ways"].items() if name != chosen}
    for ways in (others, {**row["ways"], "cuda-gather 8x8x8": 1.0}):
        with pytest.raises(KeyError, match="count again"):
            suite.planned_and_counted({**row, "ways": ways})


def test_rows_are_kept_beside_those_of_other_passes(tmp_path):
    def row(arch, time):
        return {**dict.fromkeys(suite.WHICH, "same"), "arch": arch, "ways": {"a": time}}

    path = tmp_path / "rows.json"
    suite.keep(path, [row("sm_80", 1.0), row("sm_86", 2.0)])
    suite.keep(path, [row("sm_86", 3.0), row("sm_89", 4.0)])
    assert json.loads(path.read_text()) == [row("sm_80", 1.0), row("sm_86", 3.0), row("sm_89", 4.0)]


@pytest.mark.parametrize("parts", [30, 64])
def test_adding_up_parts_is_priced_as_it_is_counted(parts):
    problem, device = (
        layer_problem("mobilenetv2-pw2", "float16", "channels-last"),
        Device.of("sm_80"),
    )
    strides, family = Strides.contiguous(problem), FAMILIES["cuda-gather"]
    request = Request(problem, "backprop_filter", device, strides=strides)
    with planned(family.name, family.fitting_tiles(request)[-1], parts):
        chosen = plan_pass(problem, "backprop_filter", device, family.name, strides=strides)
    *_, last = suite.counts(chosen, problem, device)
    assert last.kernel == "conv_gather_reduce"
    priced = family.adding(request, parts) + cost.LAUNCH_OVERHEAD
    assert priced == pytest.approx(last.microseconds(device.chip, "float16"), rel=0.1)


@pytest.mark.parametrize("numbers", suite.NUMBERS)
@pytest.mark.parametrize("architecture", suite.ARCHITECTURES)
def test_filter_gradients_fill_the_chip(architecture, numbers):
    """Of every layer of the suite that takes cuda-gather: with about as many blocks as the kernel
    is sure to have resident on all multiprocessors, where each keeps steps enough; but for those
    that are expected to take less without splits, which a launch of its own adds up.  Plain
    products, which take longest, have a block on every multiprocessor always."""
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
def test_chunks_of_filter_gradients_fill_the_chip(architecture, impl):
    """Each multiprocessor has a block, if there are as many; but where fewer, which there is less
    to add up of, are expected to take less."""
    device, family, seen = Device.of(architecture), FAMILIES[impl], 0
    for layer, dtype in product(suites.select(list(suites.suites())), ("float16", "float32")):
        problem = layer_problem(layer.name, dtype, "channels-last")
        strides = Strides.contiguous(problem)
        request = Request(problem, "backprop_filter", device, "tf32", strides=strides)
        if family.refuses(request):
            continue
        parts, others = family.shared_out(request)
        least = min(device.chip.multiprocessors, min(parts, streaming.MOST_CHUNKS) * others)
        found = family.candidates(request)
        filling = [one.microseconds for one in found if one.splits * others >= least]
        for one in found:
            fills = one.splits * others >= least
            assert fills or one.microseconds < streaming.IDLE * min(filling), layer.name
            seen += fills
    assert seen > 20


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("architecture", suite.ARCHITECTURES)
def test_another_number_of_splits_is_worth_little(architecture, pass_):
    """No split is without a step; and no number that leaves each steps enough is expected to take
    much less, but of a filter's gradient, which is to fill the chip."""
    device, family = Device.of(architecture), FAMILIES["cuda-gather"]
    for layer in suites.select(
        names=[*suites.QUICK, "resnet50-19", "resnet50-23", "mobilenetv2-pw2"]
    ):
        problem = layer_problem(layer.name, "float16", "channels-last")
        request = Request(problem, pass_, device, strides=Strides.contiguous(problem))
        if family.refuses(request):
            continue
        chosen = min(family.candidates(request), key=lambda one: one.microseconds)
        for tile in family.fitting_tiles(request):
            steps = -(-problem.gemm(pass_).gemm_k // tile.block_k)
            least = cost.LEAST_SPLIT_STEPS
            for splits in {-(-steps // share) for share in range(least, max(steps, least) + 1)}:
                other = family.candidate(request, tile, splits)
                if other and pass_ != "backprop_filter":
                    assert chosen.microseconds <= 1.1 * other.microseconds, (layer.name, splits)
        steps = -(-problem.gemm(pass_).gemm_k // chosen.tile.block_k)
        assert -(-steps // -(-steps // chosen.splits)) == chosen.splits


# -- on figures that are known on paper ------------------------------------------------------------

CHIP = replace(Device.of("sm_80").chip, multiprocessors=10, clock=1.0, bandwidth=100.0,
               tensor_rate=20.48, float_rate=1.28, double_tensor_rate=1.28,
               double_rate=0.64)  # fmt: skip
IDLE = Counts("kernel", 1, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0)


def test_a_launch_takes_what_takes_longest():
    # Of a multiprocessor and cycle: 2,048 operations of tensor cores, 64 multiply-adds; of float64
    # 64 of the tensor cores and 32 others.
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


# Two loads under way together in a loop around products; one beside it.
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


def test_waits_in_the_main_loop_and_beside_it():
    def loads(count):
        return {"load global": Executions(count, 32 * count), "integer": Executions(9, 9)}

    of_warps, of_loop = {0: loads(14), 1: loads(21)}, {0: loads(14), 1: loads(20)}
    assert suite.waits_of(of_warps, of_loop, LOOP) == 20 / 2 + 1
    assert suite.waits_of({0: loads(5)}, {}, LOOP) == 5
    assert suite.waits_of({0: {}}, {}, LOOP) == 0


def test_verdicts():
    right = [{"a": (1.0, 2.0), "b": (2.0, 3.0)}, {"a": (90.0, 80.0), "b": (100.0, 90.0)}]
    assert suite.verdict(right) == (pytest.approx(1), 1)
    wrong = [{"a": (1.0, 3.0), "b": (2.0, 2.0)}, {"a": (90.0, 90.0), "b": (100.0, 80.0)}]
    assert suite.verdict(wrong) == (pytest.approx(-1), 1.5)


def test_figures_of_a_way():
    """A matrix product of 16 x 8 x 16 in one block."""
    problem = ConvProblem((1, 16, 4, 4), (8, 16, 1, 1), dtype="float16")
    one = replace(IDLE, instructions=640, sectors=(256 + 128 + 128) * 2 / 32, resident=3)
    found = suite.figures([one], problem, CHIP, "float16", time=problem.bytes / 1e5 * 4)
    assert found == {
        "instructions": pytest.approx(10),
        "bytes": pytest.approx(1),
        "resident": 3,
        "share": pytest.approx(1 / 4),
    }


def test_table_compares_what_both_versions_have(tmp_path, capsys):
    """Geometric means over the layers that were counted of all that stand in a line."""

    def row(layer, share, **more):
        of = {"instructions": 2.0, "bytes": 3.0, "resident": 4.0, "share": share}
        place = {"arch": "sm_80", "numbers": "float16", "order": "channels-last"}
        return {**place, "layer": layer, "pass": "forward", "figures": of, **more}

    witness = {"instructions": 1.0, "bytes": 1.0, "resident": 1.0, "share": 0.25}
    now = [row("resnet50-03", 0.2), row("vgg16-3", 0.8), row("wav2vec-k3", 0.5, cutlass=witness)]
    for name, rows in (("now", now), ("then", [row("vgg16-3", 0.1)])):
        (tmp_path / name).write_text(json.dumps(rows))
    arguments = ["--table", str(tmp_path / "now")]
    assert suite.main(arguments) == 0
    assert suite.main([*arguments, "--before", str(tmp_path / "then")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    start = "| dense | forward | float16 channels-last | sm_80 |"
    assert lines[2] == f"{start} 2 | 2 | 3 | 4 | 0.4 |"
    assert lines[6] == f"{start} 1 | 2 → 2 | 3 → 3 | 4 → 4 | 0.1 → 0.8 |"
    assert lines[3] == lines[7]
    assert lines[3].endswith("| 1 | 2 (1) | 3 (1) | 4 (1) | 0.5 (0.25) |")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_as_many_blocks_are_resident_as_nvidias_calculator_says(dtype):
    """With the registers of the very variant; 8.0, where no tile is bounded by anything else."""
    pytest.importorskip("cupy", reason="compiling kernels needs CuPy: pip install 'cupyconv[test]'")
    family, device = FAMILIES["cuda-gather"], Device.of("sm_80")
    problem = layer_problem("resnet50-11", dtype, "channels-last")
    strides = Strides.contiguous(problem)
    request = Request(problem, "forward", device, strides=strides)
    for tile in family.fitting_tiles(request):
        with planned(family.name, tile):
            chosen = plan_pass(problem, "forward", device, family.name, strides=strides)
        one, *_ = launches.prepare(chosen, problem, strides, None, device)
        made = compiler.compile_cubin(sources.load(one.source), dict(one.defines), "sm_80")
        resident, _ = driver.resident_blocks(
            driver.chip_of("sm_80"),
            cubins.resources(*made)[one.entry],
            tile.threads,
            one.shared_bytes,
            one.shared_bytes,
        )
        found = gather.accesses("forward", problem, strides)
        assert gather.resident(request, tile, found) == resident, tile
