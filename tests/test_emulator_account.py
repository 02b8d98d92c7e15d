"""Counted work, on kernels whose counts are known on paper."""

from __future__ import annotations

import json
import re
from math import ceil

import numpy as np
import pytest

from cupyconv import ConvProblem, arrays, operations
from cupyconv.gpu import bias, launches
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import direct
from cupyconv.planning.plan import contenders
from cupyconv.planning.strides import Strides, contiguous_strides
from cupyconv.problem import PASSES
from tests import cubins
from tests.configurations import in_formats
from tests.emulator import EmulatedModule, Outcome, account, driver, memory, settings, suite
from tests.emulator.ptx.nvrtc import ptx_of
from tests.emulator.work import FREE, Executions

HEADER = ".version 8.8\n.target sm_80\n.address_size 64\n"
REGISTERS = ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;"
TRIPS, THREADS, BLOCKS = 5, 64, 3

COUNTED = f"""{HEADER}
.visible .entry kernel(.param .u64 in, .param .u64 out, .param .u32 trips)
{{
{REGISTERS}
mov.u32 %r1, %tid.x;
ld.param.u64 %rd1, [in];
ld.param.u64 %rd2, [out];
ld.param.u32 %r2, [trips];
mov.u32 %r3, 0;
$LOOP:
add.s32 %r3, %r3, 1;
setp.lt.u32 %p1, %r3, %r2;
@%p1 bra $LOOP;
setp.ge.u32 %p2, %r1, 8;
@%p2 bra $AFTER;
add.s32 %r3, %r3, 100;
$AFTER:
setp.eq.u32 %p3, %r1, 33;
@%p3 mul.lo.s32 %r3, %r3, 2;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r4, [%rd4];
add.s32 %r3, %r3, %r4;
add.s64 %rd5, %rd2, %rd3;
bar.sync 0;
st.global.u32 [%rd5], %r3;
ret;
}}
"""


def counted(text: str, arguments: tuple, **launch: int) -> Outcome:
    kernel = EmulatedModule.from_ptx(text, "counted", counted=True).get_function("kernel")
    with settings(work=True, raise_reports=False):
        return kernel((launch.get("blocks", 1),), (launch.get("threads", 32),), arguments)


def test_instructions_by_kind_and_warp() -> None:
    x = memory.array(np.arange(THREADS, dtype=np.uint32), "x")
    y = memory.empty((THREADS,), np.uint32, "y")
    outcome = counted(COUNTED, (x, y, np.uint32(TRIPS)), blocks=BLOCKS, threads=THREADS)
    expected = TRIPS + np.arange(THREADS)
    expected[:8] += 100
    expected[33] += TRIPS
    assert y.tolist() == expected.tolist()

    def of_all(count: int) -> Executions:
        return Executions(count * BLOCKS, count * BLOCKS * 32)

    alike = {
        "move": of_all(2),
        "load own": of_all(3),
        "compare": of_all(TRIPS + 2),
        "branch": of_all(TRIPS + 2),
        "load global": of_all(1),
        "store global": of_all(1),
        "barrier": of_all(1),
    }
    # Beside the loop and four that all do: eight lanes add a hundred, one doubles.
    integers = [
        Executions((TRIPS + 5) * BLOCKS, ((TRIPS + 4) * 32 + lanes) * BLOCKS) for lanes in (8, 1)
    ]
    assert outcome.work.instructions == {
        warp: {**alike, "integer": integers[warp]} for warp in (0, 1)
    }
    assert outcome.work.by_kind()["barrier"] == Executions(2 * BLOCKS, 64 * BLOCKS)
    assert outcome.work.by_kind(in_main_loop=True) == {}
    assert outcome.work.for_a_product() is None


NESTED = f"""{HEADER}
.visible .entry kernel(.param .u32 trips)
{{
{REGISTERS} .reg .b32 %f<9>;
ld.param.u32 %r1, [trips];
mov.u32 %r2, 0;
$OUTER:
mov.u32 %r3, 0;
$INNER:
setp.eq.u32 %p2, %r3, 1;
@%p2 bra $ASIDE;
$BACK:
@%p2 add.s32 %r4, %r4, 1;
{{
.reg .pred p;
$WAIT:
setp.ne.u32 p, %r3, %r3;
@p bra $WAIT;
}}
mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{%f1, %f2, %f3, %f4}}, {{%r4, %r4}}, {{%r4}},
  {{%f1, %f2, %f3, %f4}};
add.s32 %r3, %r3, 1;
setp.lt.u32 %p1, %r3, %r1;
@%p1 bra $INNER;
add.s32 %r2, %r2, 1;
setp.lt.u32 %p1, %r2, 2;
@%p1 bra $OUTER;
ret;
$ASIDE:
sub.s32 %r4, %r4, %r4;
bra $BACK;
}}
"""


def test_the_main_loop_is_the_innermost_around_products() -> None:
    """It has what is put aside for it, and the loops within it that have no products."""
    work = counted(NESTED, (np.uint32(TRIPS),)).work
    rounds = 2 * TRIPS
    # Twice, in the second of the rounds: the one aside, and the one with a guard.
    found = {kind: one.by_warp for kind, one in work.by_kind(in_main_loop=True).items()}
    assert found == {
        "compare": 3 * rounds,
        "branch": 3 * rounds + 2,
        "tensor core": rounds,
        "integer": rounds + 4,
    }
    assert work.for_a_product(in_main_loop=True) == (8 * rounds + 6) / rounds
    assert work.by_kind()["branch"].by_warp == 3 * rounds + 2 + 2 + 1


def test_nothing_is_counted_unasked() -> None:
    module = EmulatedModule.from_ptx(COUNTED, "counted")
    x = memory.array(np.arange(THREADS, dtype=np.uint32), "x")
    y = memory.empty((THREADS,), np.uint32, "y")
    assert module.get_function("kernel")((1,), (THREADS,), (x, y, np.uint32(1))).work is None


# Bytes between the lanes, bytes before the first: sectors that 32 loads of 4 bytes ask for.
PATTERNS = [(4, 0, 4), (4, 4, 5), (8, 0, 8), (16, 0, 16), (32, 0, 32), (128, 0, 32), (0, 0, 1)]


@pytest.mark.parametrize(("step", "start", "sectors"), PATTERNS)
def test_sectors_that_a_warp_asks_for(step: int, start: int, sectors: int) -> None:
    text = f"""{HEADER}
.visible .entry kernel(.param .u64 in, .param .u64 out)
{{
{REGISTERS}
mov.u32 %r1, %tid.x;
ld.param.u64 %rd1, [in];
ld.param.u64 %rd2, [out];
mul.wide.u32 %rd3, %r1, {step};
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r2, [%rd4+{start}];
ld.global.u32 %r3, [%rd4+{start}];
add.s32 %r4, %r2, %r3;
mul.wide.u32 %rd5, %r1, 4;
add.s64 %rd6, %rd2, %rd5;
st.global.u32 [%rd6], %r4;
ret;
}}
"""
    x = memory.array(np.ones(2048, np.uint32), "x")
    y = memory.empty((32,), np.uint32, "y")
    found = {(one.tensor, one.is_write): one for one in counted(text, (x, y)).work.sectors}
    read, written = found["x", False], found["y", True]
    assert (read.requests, read.sectors, read.distinct) == (2, 2 * sectors, sectors)
    assert (written.requests, written.sectors, written.distinct) == (1, 4, 4)


# Loads in a loop, of another sector in each pass: every lane in every other pass; as often as its
# number says in each pass of another loop; and in a loop that is entered at its test.
OF_PASS = """
@%p3 bra $NEXT;
mul.wide.u32 %rd3, %r5, 32;
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r6, [%rd4];
add.s32 %r8, %r8, %r6;
"""
IN_TURNS = f"""
mov.u32 %r5, 0;
$LOOP:
add.s32 %r3, %r5, %r1;
and.b32 %r3, %r3, 1;
setp.eq.u32 %p3, %r3, 1;
{OF_PASS}
$NEXT:
add.s32 %r5, %r5, 1;
setp.lt.u32 %p1, %r5, 4;
@%p1 bra $LOOP;
"""
OF_OTHERS = f"""
mov.u32 %r4, 0;
$OUTER:
mov.u32 %r5, %r4;
and.b32 %r7, %r1, 1;
add.s32 %r7, %r7, %r4;
$INNER:
setp.eq.u32 %p3, %r1, 99;
{OF_PASS}
$NEXT:
add.s32 %r5, %r5, 1;
setp.le.u32 %p1, %r5, %r7;
@%p1 bra $INNER;
add.s32 %r4, %r4, 4;
setp.lt.u32 %p1, %r4, 8;
@%p1 bra $OUTER;
"""

ENTERED_AT_ITS_TEST = f"""
mov.u32 %r5, 0;
setp.eq.u32 %p3, %r1, 99;
bra $TEST;
$BODY:
{OF_PASS}
$NEXT:
add.s32 %r5, %r5, 1;
$TEST:
setp.lt.u32 %p1, %r5, 4;
@%p1 bra $BODY;
"""
LOADS_OF_LANES = {IN_TURNS: 64, OF_OTHERS: 96, ENTERED_AT_ITS_TEST: 128}


@pytest.mark.parametrize("loops", LOADS_OF_LANES)
def test_lanes_that_part_meet_at_the_same_pass_of_a_loop(loops: str) -> None:
    """Each pass asks for the sector of its own, whoever of the warp takes part."""
    text = f"""{HEADER}
.visible .entry kernel(.param .u64 in, .param .u64 out)
{{
{REGISTERS}
mov.u32 %r1, %tid.x;
mov.u32 %r8, 0;
ld.param.u64 %rd1, [in];
ld.param.u64 %rd2, [out];
{loops}
mul.wide.u32 %rd5, %r1, 4;
add.s64 %rd6, %rd2, %rd5;
st.global.u32 [%rd6], %r8;
ret;
}}
"""
    x = memory.array(np.ones(128, np.uint32), "x")
    y = memory.empty((32,), np.uint32, "y")
    work = counted(text, (x, y)).work
    (read,) = [one for one in work.sectors if one.tensor == "x"]
    assert (read.requests, read.sectors, read.distinct) == (4, 4, 4)
    loads = work.by_kind()["load global"]
    assert (loads.by_warp, loads.by_lanes) == (4, LOADS_OF_LANES[loops])


def test_a_loop_that_is_entered_in_several_places_is_refused() -> None:
    """Nothing tells its passes apart."""
    text = f"""{HEADER}
.visible .entry kernel()
{{
{REGISTERS}
mov.u32 %r1, %tid.x;
setp.lt.u32 %p1, %r1, 16;
@%p1 bra $INSIDE;
$LOOP:
add.s32 %r1, %r1, 1;
$INSIDE:
add.s32 %r1, %r1, 2;
setp.lt.u32 %p1, %r1, 99;
@%p1 bra $LOOP;
ret;
}}
"""
    with pytest.raises(ValueError, match="kernel has a loop that is entered in several places"):
        counted(text, ())


@pytest.mark.parametrize(("words", "wavefronts"), [(1, 1), (2, 2), (8, 8), (32, 32), (33, 1)])
def test_wavefronts_of_shared_memory(words: int, wavefronts: int) -> None:
    text = f"""{HEADER}
.visible .entry kernel()
{{
{REGISTERS}
.shared .align 16 .b8 tile[8192];
mov.u32 %r1, %tid.x;
mov.u32 %r2, tile;
mad.lo.s32 %r3, %r1, {4 * words}, %r2;
st.shared.u32 [%r3], %r1;
ret;
}}
"""
    (one,) = counted(text, ()).bank_conflicts
    assert (one.requests, one.ideal, one.wavefronts) == (1, 1, wavefronts)


# What lanes want of shared memory, in bytes from its start; None of those that take no part.
EACH, PAIRS, SECONDS = (lambda lane: lane, lambda lane: lane // 2,
                        lambda lane: lane // 4 * 2 + lane % 2)  # fmt: skip
WIDE_ACCESSES = {
    # Measured by Nsight Compute on an A10 and an H100 (forums.developer.nvidia.com/t/373160).
    "32 apart, halves alike": ("ld", 4, lambda lane: 32 * (lane % 16), 8),
    "one for each half": ("ld", 4, lambda lane: 32 * (lane // 16), 2),
    # Likewise on an A100 (zhuanlan.zhihu.com/p/690052715).
    "shared with the next lane": ("ld", 4, lambda lane: 16 * PAIRS(lane), 2),
    "shared with the next but one": ("ld", 4, lambda lane: 16 * SECONDS(lane), 2),
    "every other lane": ("ld", 4, lambda lane: None if lane % 2 else 16 * lane // 2, 2),
    "shared with the one or the other": (
        "ld", 4, lambda lane: 16 * (PAIRS if lane < 16 else SECONDS)(lane), 4
    ),
    "8 bytes, shared": ("ld", 2, lambda lane: 8 * PAIRS(lane), 1),
    # As NVIDIA describes chips of 7.0 and 7.5 (forums.developer.nvidia.com/t/77228).
    "neighbours": ("ld", 4, lambda lane: 16 * EACH(lane), 4),
    "the same for all": ("ld", 4, lambda lane: 0, 2),
    "shared but by one lane": ("ld", 4, lambda lane: 16 * (lane // 2 if lane else 31), 4),
    "shared, 128 apart": ("ld", 4, lambda lane: 128 * PAIRS(lane), 16),
    "8 bytes": ("ld", 2, lambda lane: 8 * EACH(lane), 2),
    "4 bytes, shared": ("ld", 1, lambda lane: 4 * PAIRS(lane), 1),
    # What is shared is what is returned.
    "stored": ("st", 4, lambda lane: 16 * EACH(lane), 4),
    "stored, shared": ("st", 4, lambda lane: 16 * PAIRS(lane), 4),
}  # fmt: skip


@pytest.mark.parametrize("case", WIDE_ACCESSES)
def test_wavefronts_of_wide_loads(case: str) -> None:
    access, words, place, wavefronts = WIDE_ACCESSES[case]
    registers = ", ".join(f"%r{4 + number}" for number in range(words))
    kind = {1: "u32", 2: "v2.u32", 4: "v4.u32"}[words]
    operands = ["{" + registers + "}" if words > 1 else registers, "[%r3]"]
    text = f"""{HEADER}
.visible .entry kernel(.param .u64 in)
{{
{REGISTERS}
.shared .align 128 .b8 tile[8192];
mov.u32 %r1, %tid.x;
mov.u32 %r2, tile;
ld.param.u64 %rd1, [in];
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
ld.global.u32 %r3, [%rd3];
setp.lt.s32 %p1, %r3, 0;
add.s32 %r3, %r2, %r3;
@!%p1 {access}.shared.{kind} {", ".join(operands if access == "ld" else operands[::-1])};
ret;
}}
"""
    places = [place(lane) for lane in range(32)]
    wanted = np.array([-1 if one is None else one for one in places], np.int32)
    (one,) = counted(text, (memory.array(wanted, "x"),)).bank_conflicts
    assert one.wavefronts == wavefronts


@pytest.fixture(scope="module")
def gather() -> tuple[ConvProblem, list[account.Account]]:
    """A small layer of cuda-gather, all of its blocks: a sum in parts, and that of the parts."""
    rules = {"data_format": "NHWC", "filter_format": "OHWI", "dtype": "float16"}
    problem = ConvProblem((1, 8, 8, 64), (64, 3, 3, 64), padding=1, **rules)
    return problem, account.accounts_of_pass(
        problem, "forward", "cuda-gather", "sm_80", blocks=None
    )


def test_account_of_a_layer(gather: tuple[ConvProblem, list[account.Account]]) -> None:
    problem, accounts = gather
    one, last = accounts[0], accounts[-1]
    planned = plan_pass(problem, "forward", Device.of("sm_80"), "cuda-gather")
    tile = planned.tile
    tiles = ceil(64 / tile.block_m) * ceil(64 / tile.block_n)
    assert (one.blocks, one.reports) == (tiles * planned.splits, 0)
    # A product of m16n8k16 each.
    products = tiles * tile.block_m * tile.block_n * 9 * 64 // (16 * 8 * 16)
    executed, in_loop = one.work.by_kind(), one.work.by_kind(in_main_loop=True)
    assert executed["tensor core"] == Executions(products, 32 * products)
    assert in_loop["tensor core"] == executed["tensor core"]
    assert one.work.for_a_product(in_main_loop=True) < one.work.for_a_product()
    # Of the SASS: those of one warp's step.
    step = tile.block_m * tile.block_n * tile.block_k // (tile.threads // 32) // (16 * 8 * 16)
    assert one.sass_main_loop["HMMA"] == step
    rows = [*one.work.sectors, *last.work.sectors]
    by_tensor = {(row.tensor, row.is_write): row for row in rows}
    for tensor, elements, is_write in (
        ("x", 64 * 64, False),
        ("w", 64 * 9 * 64, False),
        ("y", 64 * 64, True),
    ):
        assert by_tensor[tensor, is_write].distinct == 2 * elements // 32
    assert one.registers > 32
    assert one.resident >= 1
    assert one.spilled == 0


def test_account_prints_and_is_json(gather: tuple[ConvProblem, list[account.Account]]) -> None:
    _, (one, *_) = gather
    text = "\n".join(one.table())
    assert "tensor core" in text
    assert "x, read" in text
    plain = json.loads(json.dumps(one.as_json()))
    assert plain["work"]["instructions"]["0"]["tensor core"]["by_warp"] > 0


def test_command_refuses_what_is_not_planned(capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in (
        (["no-such-layer"], "no-such-layer"),
        (["resnet50-03", "--impl", "cuda-hopper"], "must fit the problem"),
    ):
        with pytest.raises(SystemExit):
            account.main(words)
        assert named in capsys.readouterr().err


def test_command_says_which_tool_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(tool: str, *rest: object) -> str:
        pytest.skip(f"reading a cubin needs {tool}")

    monkeypatch.setattr(cubins, "_run", missing)
    driver.compiled.cache_clear()
    with pytest.raises(SystemExit):
        account.main(["resnet50-03", "--impl", "cuda-gather"])
    assert "reading a cubin needs cuobjdump" in capsys.readouterr().err


# Of at least 64 channels and filters: dense, strided, pointwise, dilated, and of one dimension.
WIDE = ("resnet50-03", "resnet50-05", "resnet50-07", "resnet50-11", "deeplab-d12", "wav2vec-k3")


@pytest.mark.parametrize("layer", WIDE)
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("order", suite.ORDERS)
def test_plain_products_of_gather_are_most_of_what_it_executes(
    order: str, pass_: str, layer: str
) -> None:
    """By the tile that is planned."""
    problem = account.layer_problem(layer, "float32", order)
    accounts = account.accounts_of_pass(problem, pass_, "cuda-gather", "sm_80", blocks=1)
    one = next(each for each in accounts if each.kernel == "conv_gather")
    kinds, in_loop = one.work.by_kind(), one.work.by_kind(in_main_loop=True)
    executed, of_loop = (sum(kind.by_warp for kind in of.values()) for of in (kinds, in_loop))
    assert one.resident * one.threads // 32 >= 12
    assert executed <= 1.6 * kinds["float"].by_warp
    assert of_loop <= 1.25 * in_loop["float"].by_warp
    # Of 16 bytes, which take two wavefronts where pairs of lanes share them; and what is stored.
    assert one.wavefronts <= 2.3 * kinds["load shared"].by_warp


# Of a layer of 128 channels and filters of 3 x 3.  CUTLASS's kernel for 8.0 with this tile executes
# 4.4 instructions for each product in all, and 3.5 in its main loop.
def test_gather_executes_no_more_beside_its_products_than_others_do() -> None:
    problem = account.layer_problem("resnet50-11", "float16", "channels-last")
    (one, *_) = account.accounts_of_pass(
        problem, "forward", "cuda-gather", "sm_80", blocks=1, tile="128x128"
    )
    of_all, of_loop = one.work.for_a_product(), one.work.for_a_product(in_main_loop=True)
    assert of_all is not None
    assert of_loop is not None
    assert of_all <= 4
    assert of_loop <= 3.4
    assert one.resident == 2


@pytest.mark.parametrize("pass_", PASSES)
def test_shared_memory_serves_gather_faster_than_its_products_are_made(pass_: str) -> None:
    """A multiprocessor of 8.0 takes two cycles for a product, and one for a wavefront."""
    problem, device = account.layer_problem("resnet50-11", "float16", "channels-last"), "sm_80"
    request = Request(problem, pass_, Device.of(device), strides=Strides.contiguous(problem))
    chosen = next(
        one
        for one in contenders(request, "cuda-gather", 1000)
        if one.tile is not None and (one.tile.block_m, one.tile.block_n) == (128, 128)
    )
    one = next(iter(suite.counts(chosen, problem, request.device)))
    assert one.kernel == "conv_gather"
    assert one.wavefronts < 2 * one.products


# Kernels of cuda-direct in which lanes stand for tiles or for channels, in either order.
OF_DIRECT = [
    ((64, 56, 56, 4), (4, 3, 3, 1), 4, "channels-last"),
    ((64, 56, 56, 8), (8, 3, 3, 4), 2, "channels-last"),
    ((16, 7, 7, 512), (512, 3, 3, 1), 512, "channels-last"),
    ((64, 128, 7, 7), (128, 1, 3, 3), 128, "channels-first"),
    ((64, 128, 14, 14), (128, 1, 5, 5), 128, "channels-first"),
]


@pytest.mark.parametrize(("shape", "filters", "groups", "order"), OF_DIRECT)
def test_cuda_direct_is_priced_by_what_it_executes(
    shape: tuple[int, ...], filters: tuple[int, ...], groups: int, order: str
) -> None:
    """Of a warp and tile: instructions, wavefronts of the filter, and sectors, within a third."""
    formats = ("NHWC", "OHWI") if order == "channels-last" else ("NCHW", "OIHW")
    rules = dict(zip(("data_format", "filter_format"), formats, strict=True))
    problem = ConvProblem(shape, filters, padding=filters[2] // 2, groups=groups, **rules)
    (one,) = account.accounts_of_pass(problem, "forward", "cuda-direct", "sm_80", blocks=4)
    strides = Strides.contiguous(problem)
    made = direct.cut(Request(problem, "forward", Device.of("sm_80"), strides=strides))
    assert made is not None
    warps = made.block.lanes * made.block.strips / 32
    tiles = one.blocks * warps * made.rounds / one.grid[0]
    executed = one.work.by_kind().items()
    counted = (
        sum(kind.by_warp for name, kind in executed if name not in FREE),
        one.wavefronts,
        sum(row.sectors for row in one.work.sectors if row.tensor != "w"),
    )
    priced = made.instructions, made.wavefronts, 32 * made.sectors
    assert [round(a / b / tiles, 2) for a, b in zip(counted, priced, strict=True)] == pytest.approx(
        [1, 1, 1], rel=1 / 3
    )


# Of two loads that are under way together, one that is alone, and one that nobody waits for.
LOADS = """
	.section .text.kernel,"ax",@progbits
        /*0000*/                   LDG.E.CONSTANT R0, [R2.64] ;
        /*0010*/                   LDG.E.128.CONSTANT R4, [R2.64+0x10] ;
        /*0020*/                   FADD R1, R0, R0 ;
        /*0030*/                   FADD R1, R1, R7 ;
        /*0040*/              @!P0 LDG.E.U16.CONSTANT R0, [R2.64] ;
        /*0050*/                   STS.U16 [R8], R0 ;
        /*0060*/                   LDG.E.64.CONSTANT R10, [R2.64] ;
        /*0070*/                   STG.E [R8.64], R12 ;
        /*0080*/                   EXIT ;
"""


def test_waits_for_loads() -> None:
    loop, rest = cubins.main_loop_and_rest(cubins.kernels(LOADS)["kernel"], "FADD")
    assert loop == []
    assert cubins.loads_and_waits(rest) == (4, 2)


# The most instructions that a block executes for each of its products, and beside its main loop for
# each one in it: what brings the filter, finds tiles, and stores results.
DIRECT = [
    ("resnext50-g32-1", "float16", "channels-last", "forward", 1.5, 0.2),
    ("convnext-dw1", "float32", "channels-last", "backprop_input", 1.8, 0.15),
    ("mobilenetv2-dw3", "float32", "channels-last", "forward", 1.9, 0.25),
    ("mobilenetv2-dw3", "float16", "channels-last", "backprop_filter", 2.4, 0.05),
    ("mobilenetv2-dw3", "float32", "channels-first", "forward", 2.6, 0.2),
    ("mobilenetv2-dw2", "float32", "channels-last", "backprop_input", 2.5, 1.0),
    ("resnet50-01", "float32", "channels-last", "forward", 1.5, 0.1),
    ("vgg16-1", "float32", "channels-last", "backprop_filter", 1.7, 0.05),
]


@pytest.mark.parametrize(("layer", "dtype", "order", "pass_", "most", "beside"), DIRECT)
def test_direct_executes_little_beside_its_products(layer, dtype, order, pass_, most, beside):
    problem = account.layer_problem(layer, dtype, order)
    (one, *_) = account.accounts_of_pass(problem, pass_, "cuda-direct", "sm_80", blocks=1)
    kinds, in_loop = one.work.by_kind(), one.work.by_kind(in_main_loop=True)
    executed, of_loop = (sum(kind.by_warp for kind in of.values()) for of in (kinds, in_loop))
    by_lanes = sum(kind.by_lanes for kind in kinds.values())
    assert (one.reports, one.spilled) == (0, 0)
    assert one.resident * one.threads // 32 >= 12
    assert executed <= most * kinds["float"].by_warp
    assert executed - of_loop <= beside * of_loop
    assert by_lanes >= 0.9 * 32 * executed


# Sums of a thread that are even in number, or odd, of one lane or several.
ADDED_UP = [
    ((2, 24, 43, 43), (88, 12, 3, 3), 2, "float32"),
    ((1, 4, 10, 10), (128, 4, 5, 5), 1, "float16"),
    ((4, 64, 14, 14), (64, 1, 3, 3), 64, "float32"),
    ((4, 32, 14, 14), (32, 1, 5, 5), 32, "float64"),
]


@pytest.mark.parametrize("order", ["channels-first", "channels-last"])
@pytest.mark.parametrize(("shape", "filters", "groups", "dtype"), ADDED_UP)
def test_sums_of_direct_meet_in_different_banks(shape, filters, groups, dtype, order):
    last = order == "channels-last"
    problem = in_formats(
        ConvProblem(shape, filters, groups=groups, dtype=dtype),
        "NHWC" if last else "NCHW",
        "OHWI" if last else "OIHW",
    )
    (one, _) = account.accounts_of_pass(problem, "backprop_filter", "cuda-direct", "sm_80")
    assert (one.reports, one.spilled) == (0, 0)
    assert one.wavefronts == one.ideal_wavefronts > 0


# Layers with few tiles for a block, of whose filters most is to be staged.
STAGED = [
    ("resnext50-g32-2", "float16", "channels-last", "forward"),
    ("convnext-dw1", "float32", "channels-last", "forward"),
    ("mobilenetv2-dw6", "float32", "channels-last", "forward"),
    ("convnext-dw4", "float32", "channels-last", "backprop_input"),
    ("mobilenetv2-dw7", "float16", "channels-last", "forward"),
    ("vgg16-1", "float32", "channels-last", "forward"),
]


@pytest.mark.parametrize(("layer", "dtype", "order", "pass_"), STAGED)
def test_direct_stages_the_filter_in_a_quarter_of_its_main_loop(layer, dtype, order, pass_):
    """By what a block executes until its first barrier, after which it ends here."""
    problem = account.layer_problem(layer, dtype, order)
    device, strides = Device.of("sm_80"), Strides.contiguous(problem)
    planned = plan_pass(problem, pass_, device, "cuda-direct", strides=strides)
    (launch,) = launches.prepare(planned, problem, strides, None, device)
    whole = ptx_of(launch.source, launch.defines, "sm_80")
    until = re.sub(r"bar\.sync\s+0;", "bar.sync 0; ret;", whole, count=1)
    assert until != whole
    tensors = account.lazy_tensors(problem)
    arguments = [
        tensors.get(one, np.uint64(0)) if isinstance(one, str) else one for one in launch.arguments
    ]
    executed, of_loop = [], []
    for text in (until, whole):
        kernel = EmulatedModule.from_ptx(text, "conv_direct", counted=True).get_function(
            launch.entry
        )
        with settings(work=True, raise_reports=False, blocks=[0]):
            work = kernel(launch.grid, launch.block, arguments, launch.shared_bytes).work
        for found, kinds in (
            (executed, work.by_kind()),
            (of_loop, work.by_kind(in_main_loop=True)),
        ):
            found.append(sum(kind.by_warp for kind in kinds.values()))
    assert of_loop[0] == 0 < executed[0]
    assert executed[0] <= of_loop[1] / 4


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86"])
def test_compilers_leave_room_for_as_many_blocks_of_direct_as_stay(architecture):
    """NVRTC's registers, and NVIDIA's calculator."""
    device, same, layers = Device.of(architecture), 0, [one[:4] for one in (*DIRECT, *STAGED)]
    layers = [one for one in layers if one[-1] != "backprop_filter"]
    for layer, dtype, order, pass_ in layers:
        problem = account.layer_problem(layer, dtype, order)
        strides = Strides.contiguous(problem)
        planned = plan_pass(problem, pass_, device, "cuda-direct", strides=strides)
        (launch,) = launches.prepare(planned, problem, strides, None, device)
        takes = driver.compiled(launch.source, launch.defines, architecture)[launch.entry]
        chip, (threads,) = driver.chip_of(architecture), launch.block
        resident, _ = driver.resident_blocks(chip, takes, threads, 0, None)
        made = direct.cut(Request(problem, pass_, device, strides=strides))
        assert made.held(device.chip) <= resident, layer
        same += made.held(device.chip) == resident
    assert same >= 0.8 * len(layers)


# dy, and the most that is asked of the caches over its bytes: more where pieces of 16 bytes begin
# between those of memory, or single numbers do.
SUMMED = [
    ((4, 256, 14, 14), "NCHW", 1.2),
    ((4, 14, 14, 256), "NHWC", 1.2),
    ((2, 64, 56, 56), "NCHW", 1.05),
    ((2, 56, 56, 64), "NHWC", 1.05),
    ((2, 112, 112, 3), "NHWC", 1.4),
    ((2, 28, 28, 67), "NHWC", 1.8),
    ((8, 512, 7, 7), "NCHW", 1.9),
]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("shape", "layout", "most"), SUMMED)
def test_a_bias_gradient_reads_dy_once(shape, layout, most, dtype):
    """All launches, with the sums of chunks that they write and read."""
    problem = operations.bias_problem("dy", shape, layout, dtype)
    strides = Strides.of_sum(contiguous_strides(shape), 1, 16)
    launched, workspace_bytes = bias.prepare_bias(problem, strides, Device.of("sm_80"))
    element = arrays.numpy_dtype(dtype)
    operands = {"y": memory.lazy(shape, element, "dy"),
                "bias": memory.lazy((problem.K,), element, "db")}  # fmt: skip
    if workspace_bytes:
        operands["workspace"] = memory.lazy((workspace_bytes // 4,), np.float32, "workspace")
    asked = distinct = 0
    for launch in launched:
        text = ptx_of(launch.source, launch.defines, "sm_80")
        kernel = EmulatedModule.from_ptx(text, "bias").get_function(launch.entry)
        arguments = [
            operands.get(one, np.uint64(0)) if isinstance(one, str) else one
            for one in launch.arguments
        ]
        with settings(work=True, raise_reports=False):
            outcome = kernel(launch.grid, launch.block, arguments)
        asked += sum(32 * one.sectors for one in outcome.work.sectors)
        distinct += sum(32 * one.distinct for one in outcome.work.sectors)
    assert distinct <= 1.05 * operands["y"].nbytes
    assert asked <= most * operands["y"].nbytes


@pytest.mark.parametrize(
    ("layer", "order", "pass_", "most"),
    [
        ("convnext-dw1", "channels-last", "forward", 14),
        ("convnext-dw1", "channels-first", "backprop_input", 15),
        ("convnext-dw1", "channels-last", "backprop_filter", 15),
        ("replk-dw31", "channels-last", "forward", 8.5),
    ],
)
def test_toeplitz_executes_little_beside_its_products(layer, order, pass_, most):
    problem = account.layer_problem(layer, "float16", order)
    (one, *_) = account.accounts_of_pass(problem, pass_, "cuda-toeplitz", "sm_80", blocks=1)
    assert (one.reports, one.spilled) == (0, 0)
    assert one.resident * one.threads // 32 >= 12
    assert one.work.for_a_product() <= most
