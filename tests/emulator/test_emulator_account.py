"""Counted work of kernels whose counts can be derived by hand."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from math import ceil

import numpy as np
import pytest

from cupyconv import ConvProblem, arrays, operations
from cupyconv.kernels import bias, direct
from cupyconv.kernels.strides import Strides, contiguous_strides
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.plan import contenders
from cupyconv.problem import PASSES
from tests import cubins, launches
from tests.configurations import in_formats
from tests.emulator import EmulatedModule, Outcome, account, driver, memory, settings, suite
from tests.emulator.ptx.nvrtc import ptx_of
from tests.emulator.work import Executions

pytestmark = pytest.mark.costly

HEADER = ".version 8.8\n.target sm_80\n.address_size 64\n"
REGISTERS = ".reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;"
TRIPS, THREADS, BLOCKS = 5, 64, 3


def kernel_text(body: str, parameters: str = ".param .u64 in, .param .u64 out") -> str:
    """Return the PTX of a kernel with these instructions."""
    return f"{HEADER}.visible .entry kernel({parameters})\n{{\n{REGISTERS}\n{body}\nret;\n}}\n"


OPERANDS = """
mov.u32 %r1, %tid.x;
ld.param.u64 %rd1, [in];
ld.param.u64 %rd2, [out];
"""
"""Instructions that load a thread's number and the addresses of both arrays."""

STORE = """
mul.wide.u32 %rd5, %r1, 4;
add.s64 %rd6, %rd2, %rd5;
st.global.u32 [%rd6], %r8;
"""
"""Instructions that store each thread's result."""

COUNTED = kernel_text(
    f"""{OPERANDS}
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
""",
    ".param .u64 in, .param .u64 out, .param .u32 trips",
)


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

    def all_warps(count: int) -> Executions:
        return Executions(count * BLOCKS, count * BLOCKS * 32)

    common = {
        "move": all_warps(2),
        "load own": all_warps(3),
        "compare": all_warps(TRIPS + 2),
        "branch": all_warps(TRIPS + 2),
        "load global": all_warps(1),
        "store global": all_warps(1),
        "barrier": all_warps(1),
    }
    # The loop and four common instructions; then eight lanes add 100, or one lane doubles.
    integers = [
        Executions((TRIPS + 5) * BLOCKS, ((TRIPS + 4) * 32 + lanes) * BLOCKS) for lanes in (8, 1)
    ]
    assert outcome.work.instructions == {
        warp: {**common, "integer": integers[warp]} for warp in (0, 1)
    }
    assert outcome.work.by_kind()["barrier"] == Executions(2 * BLOCKS, 64 * BLOCKS)
    assert outcome.work.by_kind(in_main_loop=True) == {}
    assert outcome.work.for_a_product() is None


NESTED = kernel_text(
    """
.reg .b32 %f<9>;
ld.param.u32 %r1, [trips];
mov.u32 %r2, 0;
$OUTER:
mov.u32 %r3, 0;
$INNER:
setp.eq.u32 %p2, %r3, 1;
@%p2 bra $ASIDE;
$BACK:
@%p2 add.s32 %r4, %r4, 1;
{
.reg .pred p;
$WAIT:
setp.ne.u32 p, %r3, %r3;
@p bra $WAIT;
}
mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r4, %r4}, {%r4},
  {%f1, %f2, %f3, %f4};
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
""",
    ".param .u32 trips",
)


def test_main_loop_is_innermost_around_products() -> None:
    """The main loop includes code moved out of line, and inner loops without products."""
    work = counted(NESTED, (np.uint32(TRIPS),)).work
    rounds = 2 * TRIPS
    # Executed twice each, in the second iteration: the out-of-line block and the guarded add.
    counts = {kind: count.by_warp for kind, count in work.by_kind(in_main_loop=True).items()}
    assert counts == {
        "compare": 3 * rounds,
        "branch": 3 * rounds + 2,
        "tensor core": rounds,
        "integer": rounds + 4,
    }
    assert work.for_a_product(in_main_loop=True) == (8 * rounds + 6) / rounds
    assert work.by_kind()["branch"].by_warp == 3 * rounds + 2 + 2 + 1


def test_counting_is_off_by_default() -> None:
    module = EmulatedModule.from_ptx(COUNTED, "counted")
    x = memory.array(np.arange(THREADS, dtype=np.uint32), "x")
    y = memory.empty((THREADS,), np.uint32, "y")
    assert module.get_function("kernel")((1,), (THREADS,), (x, y, np.uint32(1))).work is None


# Bytes between lanes, offset of the first lane, sectors of 32 loads of 4 bytes.
PATTERNS = [(4, 0, 4), (4, 4, 5), (8, 0, 8), (16, 0, 16), (32, 0, 32), (128, 0, 32), (0, 0, 1)]


@pytest.mark.parametrize(("step", "start", "sectors"), PATTERNS)
def test_sectors_of_a_warp(step: int, start: int, sectors: int) -> None:
    text = kernel_text(f"""{OPERANDS}
mul.wide.u32 %rd3, %r1, {step};
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r2, [%rd4+{start}];
ld.global.u32 %r3, [%rd4+{start}];
add.s32 %r8, %r2, %r3;
{STORE}""")
    x = memory.array(np.ones(2048, np.uint32), "x")
    y = memory.empty((32,), np.uint32, "y")
    traffic = {(row.tensor, row.is_write): row for row in counted(text, (x, y)).work.sectors}
    read, written = traffic["x", False], traffic["y", True]
    assert (read.requests, read.sectors, read.distinct) == (2, 2 * sectors, sectors)
    assert (written.requests, written.sectors, written.distinct) == (1, 4, 4)


# Loads of a new sector in each iteration: each lane in every other iteration; a lane-dependent
# number of iterations inside another loop; and a loop entered at its test.
ITERATION = """
@%p3 bra $NEXT;
mul.wide.u32 %rd3, %r5, 32;
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r6, [%rd4];
add.s32 %r8, %r8, %r6;
"""
ALTERNATING = f"""
mov.u32 %r5, 0;
$LOOP:
add.s32 %r3, %r5, %r1;
and.b32 %r3, %r3, 1;
setp.eq.u32 %p3, %r3, 1;
{ITERATION}
$NEXT:
add.s32 %r5, %r5, 1;
setp.lt.u32 %p1, %r5, 4;
@%p1 bra $LOOP;
"""
NESTED_LOOPS = f"""
mov.u32 %r4, 0;
$OUTER:
mov.u32 %r5, %r4;
and.b32 %r7, %r1, 1;
add.s32 %r7, %r7, %r4;
$INNER:
setp.eq.u32 %p3, %r1, 99;
{ITERATION}
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
{ITERATION}
$NEXT:
add.s32 %r5, %r5, 1;
$TEST:
setp.lt.u32 %p1, %r5, 4;
@%p1 bra $BODY;
"""
LOADS_OF_LANES = {ALTERNATING: 64, NESTED_LOOPS: 96, ENTERED_AT_ITS_TEST: 128}


@pytest.mark.parametrize("loops", LOADS_OF_LANES)
def test_divergent_lanes_share_loop_iterations(loops: str) -> None:
    """Each iteration requests one sector, whichever lanes take part."""
    text = kernel_text(f"{OPERANDS} mov.u32 %r8, 0; {loops} {STORE}")
    x = memory.array(np.ones(128, np.uint32), "x")
    y = memory.empty((32,), np.uint32, "y")
    work = counted(text, (x, y)).work
    (read,) = [row for row in work.sectors if row.tensor == "x"]
    assert (read.requests, read.sectors, read.distinct) == (4, 4, 4)
    loads = work.by_kind()["load global"]
    assert (loads.by_warp, loads.by_lanes) == (4, LOADS_OF_LANES[loops])


def test_loop_with_several_entries_is_refused() -> None:
    """The iterations of such a loop cannot be identified."""
    text = """
mov.u32 %r1, %tid.x;
setp.lt.u32 %p1, %r1, 16;
@%p1 bra $INSIDE;
$LOOP:
add.s32 %r1, %r1, 1;
$INSIDE:
add.s32 %r1, %r1, 2;
setp.lt.u32 %p1, %r1, 99;
@%p1 bra $LOOP;
"""
    with pytest.raises(ValueError, match="kernel has a loop with several entries"):
        counted(kernel_text(text, ""), ())


@pytest.mark.parametrize(("words", "wavefronts"), [(1, 1), (2, 2), (8, 8), (32, 32), (33, 1)])
def test_wavefronts_of_shared_memory(words: int, wavefronts: int) -> None:
    text = f"""
.shared .align 16 .b8 tile[8192];
mov.u32 %r1, %tid.x;
mov.u32 %r2, tile;
mad.lo.s32 %r3, %r1, {4 * words}, %r2;
st.shared.u32 [%r3], %r1;
"""
    (record,) = counted(kernel_text(text, ""), ()).bank_conflicts
    assert (record.requests, record.ideal, record.wavefronts) == (1, 1, wavefronts)


# Byte offset in shared memory that each lane accesses; None for inactive lanes.
EACH, PAIRS, SECONDS = (lambda lane: lane, lambda lane: lane // 2,
                        lambda lane: lane // 4 * 2 + lane % 2)  # fmt: skip
WIDE_ACCESSES = {
    # Measured by Nsight Compute on an A10 and an H100 (forums.developer.nvidia.com/t/373160).
    "32 apart, halves alike": ("ld", 4, lambda lane: 32 * (lane % 16), 8),
    "one for each half": ("ld", 4, lambda lane: 32 * (lane // 16), 2),
    # Measured on an A100 (zhuanlan.zhihu.com/p/690052715).
    "shared with the next lane": ("ld", 4, lambda lane: 16 * PAIRS(lane), 2),
    "shared with the next but one": ("ld", 4, lambda lane: 16 * SECONDS(lane), 2),
    "every other lane": ("ld", 4, lambda lane: None if lane % 2 else 16 * lane // 2, 2),
    "shared with the one or the other": (
        "ld", 4, lambda lane: 16 * (PAIRS if lane < 16 else SECONDS)(lane), 4
    ),
    "8 bytes, shared": ("ld", 2, lambda lane: 8 * PAIRS(lane), 1),
    # Described by NVIDIA for 7.0 and 7.5 (forums.developer.nvidia.com/t/77228).
    "neighbours": ("ld", 4, lambda lane: 16 * EACH(lane), 4),
    "the same for all": ("ld", 4, lambda lane: 0, 2),
    "shared but by one lane": ("ld", 4, lambda lane: 16 * (lane // 2 if lane else 31), 4),
    "shared, 128 apart": ("ld", 4, lambda lane: 128 * PAIRS(lane), 16),
    "8 bytes": ("ld", 2, lambda lane: 8 * EACH(lane), 2),
    "4 bytes, shared": ("ld", 1, lambda lane: 4 * PAIRS(lane), 1),
    # Only loads benefit from sharing.
    "stored": ("st", 4, lambda lane: 16 * EACH(lane), 4),
    "stored, shared": ("st", 4, lambda lane: 16 * PAIRS(lane), 4),
}  # fmt: skip


@pytest.mark.parametrize("case", WIDE_ACCESSES)
def test_wavefronts_of_wide_loads(case: str) -> None:
    access, words, offset_of, wavefronts = WIDE_ACCESSES[case]
    registers = ", ".join(f"%r{4 + number}" for number in range(words))
    kind = {1: "u32", 2: "v2.u32", 4: "v4.u32"}[words]
    operands = ["{" + registers + "}" if words > 1 else registers, "[%r3]"]
    text = f"""
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
"""
    offsets = [offset_of(lane) for lane in range(32)]
    values = np.array([-1 if offset is None else offset for offset in offsets], np.int32)
    arguments = (memory.array(values, "x"),)
    (record,) = counted(kernel_text(text, ".param .u64 in"), arguments).bank_conflicts
    assert record.wavefronts == wavefronts


@pytest.fixture(scope="module")
def gather() -> tuple[ConvProblem, list[account.Account]]:
    """Return accounts of all blocks of a small cuda-gather layer with split sums."""
    rules = {"data_format": "NHWC", "filter_format": "OHWI", "dtype": "float16"}
    problem = ConvProblem((1, 8, 8, 64), (64, 3, 3, 64), padding=1, **rules)
    return problem, account.accounts_of_pass(
        problem, "forward", "cuda-gather", "sm_80", blocks=None
    )


def test_account_of_a_layer(gather: tuple[ConvProblem, list[account.Account]]) -> None:
    problem, accounts = gather
    first, last = accounts[0], accounts[-1]
    planned = plan_pass(problem, "forward", Device.of("sm_80"), "cuda-gather")
    tile = planned.tile
    tiles = ceil(64 / tile.block_m) * ceil(64 / tile.block_n)
    assert (first.blocks, first.reports) == (tiles * planned.splits, 0)
    # m16n8k16 products.
    products = tiles * tile.block_m * tile.block_n * 9 * 64 // (16 * 8 * 16)
    executed, in_loop = first.work.by_kind(), first.work.by_kind(in_main_loop=True)
    assert executed["tensor core"] == Executions(products, 32 * products)
    assert in_loop["tensor core"] == executed["tensor core"]
    assert first.work.for_a_product(in_main_loop=True) < first.work.for_a_product()
    # Products of one warp per k step.
    step = tile.block_m * tile.block_n * tile.block_k // (tile.threads // 32) // (16 * 8 * 16)
    assert first.sass_main_loop["HMMA"] == step
    rows = [*first.work.sectors, *last.work.sectors]
    by_tensor = {(row.tensor, row.is_write): row for row in rows}
    for tensor, elements, is_write in (
        ("x", 64 * 64, False),
        ("w", 64 * 9 * 64, False),
        ("y", 64 * 64, True),
    ):
        assert by_tensor[tensor, is_write].distinct == 2 * elements // 32
    assert first.registers > 32
    assert first.resident >= 1
    assert first.spilled == 0


def test_account_prints_and_is_json(gather: tuple[ConvProblem, list[account.Account]]) -> None:
    _, (first, *_) = gather
    text = "\n".join(first.table())
    assert "tensor core" in text
    assert "x, read" in text
    plain = json.loads(json.dumps(asdict(first)))
    assert plain["work"]["instructions"]["0"]["tensor core"]["by_warp"] > 0


def test_command_rejects_unplanned_layers(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["no-such-layer"], "no-such-layer"),
        (["resnet50-03", "--impl", "cuda-hopper"], "must support the problem"),
    ):
        with pytest.raises(SystemExit):
            account.main(words)
        assert message in capsys.readouterr().err


# Layers with at least 64 channels and filters: dense, strided, pointwise, dilated, 1-D.
WIDE = ("resnet50-03", "resnet50-05", "resnet50-07", "resnet50-11", "deeplab-d12", "wav2vec-k3")


@pytest.mark.parametrize("layer", WIDE)
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("order", suite.ORDERS)
def test_gather_executes_mostly_plain_products(order: str, pass_: str, layer: str) -> None:
    """Check the planned tile."""
    problem = account.layer_problem(layer, "float32", order)
    accounts = account.accounts_of_pass(problem, pass_, "cuda-gather", "sm_80", blocks=1)
    gather_account = next(entry for entry in accounts if entry.kernel == "conv_gather")
    kinds, in_loop = gather_account.work.by_kind(), gather_account.work.by_kind(in_main_loop=True)
    executed, loop_count = (
        sum(kind.by_warp for kind in counts.values()) for counts in (kinds, in_loop)
    )
    assert gather_account.resident * gather_account.threads // 32 >= 12
    assert executed <= 1.65 * kinds["float"].by_warp
    assert loop_count <= 1.25 * in_loop["float"].by_warp
    # 16-byte loads that pairs of lanes share take two wavefronts each; stores add to that.
    assert gather_account.wavefronts <= 2.3 * kinds["load shared"].by_warp


@pytest.mark.thorough
# A layer with 128 channels and 3 x 3 filters.  CUTLASS's kernel for 8.0 with this tile executes 4.4
# instructions per product, 3.5 in its main loop (counted).
def test_gather_instructions_per_product_are_bounded() -> None:
    problem = account.layer_problem("resnet50-11", "float16", "channels-last")
    (first, *_) = account.accounts_of_pass(
        problem, "forward", "cuda-gather", "sm_80", blocks=1, tile="128x128"
    )
    total, in_loop = first.work.for_a_product(), first.work.for_a_product(in_main_loop=True)
    assert total is not None
    assert in_loop is not None
    assert total <= 4
    assert in_loop <= 3.4
    assert first.resident == 2


@pytest.mark.parametrize("pass_", PASSES)
def test_gather_is_not_bound_by_shared_memory(pass_: str) -> None:
    """An SM of 8.0 takes two cycles per product and one per wavefront."""
    problem, device = account.layer_problem("resnet50-11", "float16", "channels-last"), "sm_80"
    request = Request(problem, pass_, Device.of(device), strides=Strides.contiguous(problem))
    planned = next(
        candidate
        for candidate in contenders(request, "cuda-gather", 1000)
        if candidate.tile is not None
        and (candidate.tile.block_m, candidate.tile.block_n) == (128, 128)
    )
    counts = next(iter(suite.counts(planned, problem, request.device)))
    assert counts.kernel == "conv_gather"
    assert counts.wavefronts < 2 * counts.products


# Two loads in flight together, a single load, and a load whose result is unused.
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
    loop, remainder = cubins.main_loop_and_rest(cubins.kernels(LOADS)["kernel"], "FADD")
    assert loop == []
    assert cubins.loads_and_waits(remainder) == (4, 2)


# For a block: maximum of instructions / products, and maximum of instructions outside the main loop
# (filter loads, tile addresses, stores) / instructions in the loop.
DIRECT = [
    ("resnext50-g32-1", "float16", "channels-last", "forward", 2.2, 0.3),
    ("convnext-dw1", "float32", "channels-last", "backprop_input", 1.8, 0.15),
    ("mobilenetv2-dw3", "float32", "channels-last", "forward", 1.9, 0.25),
    ("mobilenetv2-dw3", "float16", "channels-last", "backprop_filter", 2.4, 0.05),
    ("mobilenetv2-dw3", "float32", "channels-first", "forward", 2.6, 0.2),
    ("mobilenetv2-dw2", "float32", "channels-last", "backprop_input", 2.5, 1.0),
    ("resnet50-01", "float32", "channels-last", "forward", 1.5, 0.1),
    ("vgg16-1", "float32", "channels-last", "backprop_filter", 1.7, 0.05),
]

# Tilings that keep the bounds of two layers; the planned ones have the same modelled time or less.
DIRECT_TILINGS = {
    ("convnext-dw1", "channels-last"): "2,16,2,8,7,1",
    ("mobilenetv2-dw3", "channels-first"): "1,1,8,8,3,1",
}


@pytest.mark.parametrize(("layer", "dtype", "order", "pass_", "most", "beside"), DIRECT)
def test_direct_instructions_per_product_are_bounded(layer, dtype, order, pass_, most, beside):
    problem = account.layer_problem(layer, dtype, order)
    tiling = DIRECT_TILINGS.get((layer, order))
    (first, *_) = account.accounts_of_pass(
        problem, pass_, "cuda-direct", "sm_80", blocks=1, tile=tiling
    )
    kinds, in_loop = first.work.by_kind(), first.work.by_kind(in_main_loop=True)
    executed, loop_count = (
        sum(kind.by_warp for kind in counts.values()) for counts in (kinds, in_loop)
    )
    by_lanes = sum(kind.by_lanes for kind in kinds.values())
    assert (first.reports, first.spilled) == (0, 0)
    assert first.resident * first.threads // 32 >= 12
    assert executed <= most * kinds["float"].by_warp
    assert executed - loop_count <= beside * loop_count
    assert by_lanes >= 0.9 * 32 * executed


@pytest.mark.thorough
@pytest.mark.parametrize(("layer", "order"), DIRECT_TILINGS)
def test_planned_direct_tilings_count_as_fast_as_others(layer, order):
    """A count that shares no code with the planner's model prefers no tiling by more than 1 %."""
    (pass_,) = {
        row[3] for row in DIRECT if (row[0], row[2]) == (layer, order) and row[1] == "float32"
    }
    problem, device = account.layer_problem(layer, "float32", order), Device.of("sm_80")
    request = Request(problem, pass_, device, strides=Strides.contiguous(problem))
    ranked = contenders(request, "cuda-direct", 1000)
    (other,) = (one for one in ranked if account.tiling_text(one) == DIRECT_TILINGS[layer, order])
    first, fewest = (
        sum(
            part.microseconds(device.chip, "float32") for part in suite.counts(one, problem, device)
        )
        for one in (ranked[0], other)
    )
    assert first <= 1.01 * fewest


# Layers whose threads hold an even or odd number of sums, for one lane or several.
ADDED_UP = [
    ((2, 24, 43, 43), (88, 12, 3, 3), 2, "float32"),
    ((1, 4, 10, 10), (128, 4, 5, 5), 1, "float16"),
    ((4, 64, 14, 14), (64, 1, 3, 3), 64, "float32"),
    ((4, 32, 14, 14), (32, 1, 5, 5), 32, "float64"),
]


@pytest.mark.parametrize("order", ["channels-first", "channels-last"])
@pytest.mark.parametrize(("shape", "filters", "groups", "dtype"), ADDED_UP)
def test_direct_sums_have_no_bank_conflicts(shape, filters, groups, dtype, order):
    last = order == "channels-last"
    problem = in_formats(
        ConvProblem(shape, filters, groups=groups, dtype=dtype),
        "NHWC" if last else "NCHW",
        "OHWI" if last else "OIHW",
    )
    (first, _) = account.accounts_of_pass(problem, "backprop_filter", "cuda-direct", "sm_80")
    assert (first.reports, first.spilled) == (0, 0)
    assert first.wavefronts == first.ideal_wavefronts > 0


# Layers with few tiles per block, so staging the filter costs most.
STAGED = [
    ("resnext50-g32-2", "float16", "channels-last", "forward"),
    ("convnext-dw1", "float32", "channels-last", "forward"),
    ("mobilenetv2-dw6", "float32", "channels-last", "forward"),
    ("convnext-dw4", "float32", "channels-last", "backprop_input"),
    ("mobilenetv2-dw7", "float16", "channels-last", "forward"),
    ("vgg16-1", "float32", "channels-last", "forward"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("layer", "dtype", "order", "pass_"), STAGED)
def test_direct_stages_filter_within_quarter_of_loop(layer, dtype, order, pass_):
    """The shortened kernel returns at the first barrier, so its instructions stage the filter."""
    problem = account.layer_problem(layer, dtype, order)
    device, strides = Device.of("sm_80"), Strides.contiguous(problem)
    planned = plan_pass(problem, pass_, device, "cuda-direct", strides=strides)
    (launch,) = launches.prepare(planned, problem, strides, device)
    whole = ptx_of(launch.source, launch.defines, "sm_80")
    shortened = re.sub(r"bar\.sync\s+0;", "bar.sync 0; ret;", whole, count=1)
    assert shortened != whole
    tensors = account.lazy_tensors(problem)
    arguments = [
        tensors.get(argument, np.uint64(0)) if isinstance(argument, str) else argument
        for argument in launch.arguments
    ]
    executed, in_loop = [], []
    for text in (shortened, whole):
        kernel = EmulatedModule.from_ptx(text, "conv_direct", counted=True).get_function(
            launch.entry
        )
        with settings(work=True, raise_reports=False, blocks=[0]):
            work = kernel(launch.grid, launch.block, arguments, launch.shared_bytes).work
        for totals, kinds in (
            (executed, work.by_kind()),
            (in_loop, work.by_kind(in_main_loop=True)),
        ):
            totals.append(sum(kind.by_warp for kind in kinds.values()))
    assert in_loop[0] == 0 < executed[0]
    assert executed[0] <= in_loop[1] / 4


@pytest.mark.parametrize("architecture", ["sm_80", "sm_86"])
def test_direct_resident_blocks_match_occupancy(architecture):
    """The planner assumes at most the resident blocks that NVIDIA's calculator computes."""
    device, equal = Device.of(architecture), 0
    layers = [case[:4] for case in (*DIRECT, *STAGED) if case[3] != "backprop_filter"]
    for layer, dtype, order, pass_ in layers:
        problem = account.layer_problem(layer, dtype, order)
        strides = Strides.contiguous(problem)
        planned = plan_pass(problem, pass_, device, "cuda-direct", strides=strides)
        (launch,) = launches.prepare(planned, problem, strides, device)
        resources = driver.compiled(launch.source, launch.defines, architecture)[launch.entry]
        chip, (threads,) = driver.chip_of(architecture), launch.block
        resident, _ = driver.resident_blocks(chip, resources, threads, 0, None)
        geometry = direct.geometry(Request(problem, pass_, device, strides=strides), planned.tiling)
        assert geometry.resident <= resident, layer
        equal += geometry.resident == resident
    assert equal >= 0.5 * len(layers)


# Shape and format of dy, and maximum requested bytes / bytes of dy.  The ratio is higher for
# misaligned 16-byte vectors and for single elements.
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
def test_bias_gradient_reads_dy_once(shape, layout, most, dtype):
    """The requested bytes of all launches count, including the sums of chunks."""
    problem = operations.bias_problem("dy", shape, layout, dtype)
    strides = Strides.of_sum(contiguous_strides(shape), 1, 16)
    prepared, workspace_bytes = bias.prepare_bias(problem, strides, Device.of("sm_80"))
    element = arrays.numpy_dtype(dtype)
    operands = {"y": memory.lazy(shape, element, "dy"),
                "bias": memory.lazy((problem.K,), element, "db")}  # fmt: skip
    if workspace_bytes:
        operands["workspace"] = memory.lazy((workspace_bytes // 4,), np.float32, "workspace")
    requested = distinct = 0
    for launch in prepared:
        text = ptx_of(launch.source, launch.defines, "sm_80")
        kernel = EmulatedModule.from_ptx(text, "bias").get_function(launch.entry)
        arguments = [
            operands.get(argument, np.uint64(0)) if isinstance(argument, str) else argument
            for argument in launch.arguments
        ]
        with settings(work=True, raise_reports=False):
            outcome = kernel(launch.grid, launch.block, arguments)
        requested += sum(32 * row.sectors for row in outcome.work.sectors)
        distinct += sum(32 * row.distinct for row in outcome.work.sectors)
    assert distinct <= 1.05 * operands["y"].nbytes
    assert requested <= most * operands["y"].nbytes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "order", "pass_", "most"),
    [
        ("convnext-dw1", "channels-last", "forward", 14),
        ("convnext-dw1", "channels-first", "backprop_input", 15),
        ("convnext-dw1", "channels-last", "backprop_filter", 15),
        ("replk-dw31", "channels-last", "forward", 8.5),
    ],
)
def test_toeplitz_instructions_per_product_are_bounded(layer, order, pass_, most):
    problem = account.layer_problem(layer, "float16", order)
    (first, *_) = account.accounts_of_pass(problem, pass_, "cuda-toeplitz", "sm_80", blocks=1)
    assert (first.reports, first.spilled) == (0, 0)
    assert first.resident * first.threads // 32 >= 12
    assert first.work.for_a_product() <= most
