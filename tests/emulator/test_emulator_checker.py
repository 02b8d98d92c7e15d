"""Every kind of report, each with a small faulty kernel (tests/emulator/faults)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.lib.array_utils import byte_bounds

from tests import ROOT, emulator
from tests.emulator import SCHEDULES, CheckerError, EmulatedModule, Report, memory, settings
from tests.emulator.build import INCLUDE_DIRECTORY, find_compiler
from tests.emulator.ptx.nvrtc import OPTIONS, compile_ptx
from tests.emulator.reports import KINDS, UNWRITTEN_OUTPUT
from tests.emulator.tensormap import encode_tiled

pytestmark = pytest.mark.costly

FAULTS = ROOT / "tests" / "emulator" / "faults"
_KERNEL = re.compile(
    r"^// launch: (?P<launch>[^\n]*)\n(?P<head>extern \"C\" __global__ [^{]*\{)(?P<body>.*?)^\}",
    re.M | re.S,
)
_MARK = re.compile(r"// FAULT (?P<kinds>[\w-]+(?: or [\w-]+)*)(?P<sometimes> in \w.*)?")


@dataclass(frozen=True)
class Mark:
    """A marked line: permitted report kinds; ``sometimes`` if not in every schedule."""

    line: int
    kinds: tuple[str, ...]
    sometimes: bool


@dataclass(frozen=True)
class Fault:
    """A kernel of the faults folder, as its comments describe it."""

    file: Path
    kernel: str
    grid: int
    block: int
    shared: int
    clang: int
    zeroed: bool
    after: str
    takes_map: bool
    marks: tuple[Mark, ...]


def read_faults() -> list[Fault]:
    faults = []
    for file in sorted(FAULTS.glob("*.cu")):
        text = file.read_text()
        for match in _KERNEL.finditer(text):
            words = dict(re.findall(r"(grid|block|shared|clang) (\d+)", match["launch"]))
            first_line = text[: match.start("head")].count("\n") + 1
            marks = []
            for number, line in enumerate(match.group(0).split("\n")[1:], first_line):
                if mark := _MARK.search(line):
                    kinds = tuple(mark["kinds"].split(" or "))
                    marks.append(Mark(number, kinds, bool(mark["sometimes"])))
            name = re.search(r"(\w+)\s*\((?:const float\* in|\s*const __grid)", match["head"])[1]
            faults.append(
                Fault(
                    file,
                    name,
                    int(words.get("grid", 1)),
                    int(words["block"]),
                    int(words.get("shared", 0)),
                    int(words.get("clang", 0)),
                    "zeroed" in match["launch"],
                    "".join(re.findall(r"after (\w+)", match["launch"])),
                    "TensorMap" in match["head"],
                    tuple(marks),
                )
            )
    return faults


FAULT_KERNELS = read_faults()


@cache
def module(file: Path) -> EmulatedModule:
    return EmulatedModule(file)


def launch(fault: Fault) -> list[Report]:
    values = np.arange(1, 4097, dtype=np.float32)
    writes_input = "store" in fault.kernel and fault.takes_map
    source = memory.array(values, "in", read_only=not writes_input)
    make = memory.zeros if fault.zeroed else memory.empty
    output = make((4096,), np.float32, "out")
    first = source
    if fault.takes_map:
        first = encode_tiled(source.ctypes.data, 4, (64, 64), (256,), (32, 32))
    if fault.after:
        before = next(other for other in FAULT_KERNELS if other.kernel == fault.after)
        first_of_two = module(before.file).get_function(before.kernel)
        assert not first_of_two((before.grid,), (before.block,), (source, output)).reports
    kernel = module(fault.file).get_function(fault.kernel)
    kernel.may_overlap = bool(fault.after)
    return kernel((fault.grid,), (fault.block,), (first, output), shared_mem=fault.shared).reports


@pytest.mark.parametrize("fault", FAULT_KERNELS, ids=lambda fault: fault.kernel)
def test_fault_is_reported_at_its_line(fault: Fault) -> None:
    if (clang := find_compiler().clang) < fault.clang:
        pytest.skip(f"clang {fault.clang} or later has this check: this is {clang}")
    for schedule in SCHEDULES:
        with settings(schedule, raise_reports=False):
            reports = launch(fault)
        findings = {(report.line, report.kind) for report in reports}
        allowed = {(mark.line, kind) for mark in fault.marks for kind in mark.kinds}
        assert findings <= allowed, "\n".join(map(str, reports))
        assert bool(findings) == bool(fault.marks), schedule
        if schedule is SCHEDULES[0]:
            lines = {line for line, _ in findings}
            assert lines >= {mark.line for mark in fault.marks if not mark.sometimes}
        for report in reports:
            assert report.kernel == fault.kernel
            assert report.file == f"tests/emulator/faults/{fault.file.name}"
            assert 0 <= report.block[0] < fault.grid
            assert 0 <= report.thread[0] < fault.block


def test_every_kind_of_report_has_a_faulty_kernel() -> None:
    shown = {kind for fault in FAULT_KERNELS for mark in fault.marks for kind in mark.kinds}
    assert shown == set(KINDS)


def test_report_describes_the_fault() -> None:
    fault = next(other for other in FAULT_KERNELS if other.kernel == "shared_read_past_the_end")
    with pytest.raises(CheckerError) as caught:
        launch(fault)
    (report,) = caught.value.reports
    assert report.thread == (31, 0, 0)
    assert report.block == (0, 0, 0)
    assert "shared tile of 128 bytes" in report.text
    assert str(report).startswith("out-of-bounds: shared_read_past_the_end block(0,0,0) thread(31")


@pytest.mark.parametrize(
    ("kernel", "text"),
    [
        (
            "read_past_the_last_array_of_a_struct",
            "index 2 is outside of the array's declared bound",
        ),
        ("row_of_a_local_array_past_its_bound", "index 8 is outside of the array's declared bound"),
    ],
)
def test_report_names_thread_of_local_overflow(kernel: str, text: str) -> None:
    fault = next(other for other in FAULT_KERNELS if other.kernel == kernel)
    with settings(raise_reports=False):
        (report,) = launch(fault)
    assert (report.block, report.thread) == ((0, 0, 0), (40, 0, 0))
    assert report.text == text


# --------------------------------------------------------------------------------------------------
# Launches that overlap
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", ["cuda", "ptx"])
def test_grid_wait_is_transitive_if_each_launch_waits(source: str) -> None:
    kernels = overlapping(source)
    values = memory.array(np.arange(1, 65, dtype=np.float32), "in")
    out, *others = (memory.zeros((256,), np.float32, name) for name in ("out", "y", "z"))

    def reports(name: str, target: np.ndarray, may_overlap: bool = True) -> list[Report]:
        with settings(raise_reports=False):
            kernel = kernels.get_function(name)
            kernel.may_overlap = may_overlap
            return kernel((1,), (64,), (values, target)).reports

    waiting = "result_read_after_a_wait"
    assert not reports("stores", out, may_overlap=False)
    assert not reports(waiting, out)
    assert not reports(waiting, others[0])  # waits, although it reads no results of others
    assert not reports(waiting, out)  # the launch before it ends after all earlier launches
    assert not reports("stores", others[1])  # does not wait, so it may end before the others
    (report,) = reports(waiting, out)
    assert report.kind == "launch-race"
    expected = (
        "written by the launch of stores before, for which a launch between them did not wait"
    )
    assert report.text.partition(", ")[2] == expected
    assert not reports(
        waiting, out, may_overlap=False
    )  # a normal launch begins when all have ended
    assert not reports("result_read_without_a_wait", out, may_overlap=False)


def overlapping(source: str) -> EmulatedModule:
    """Return the kernels of launches.cu, from the source or from NVRTC's PTX."""
    path = FAULTS / "launches.cu"
    if source == "cuda":
        return module(path)
    headers = {"ptx.cuh": (INCLUDE_DIRECTORY / "ptx.cuh").read_text()}
    text = compile_ptx(path.read_text(), path.name, headers, ["-arch=compute_90", *OPTIONS])
    return EmulatedModule.from_ptx(text, "launches", [path.parent, INCLUDE_DIRECTORY])


# --------------------------------------------------------------------------------------------------
# Outputs
# --------------------------------------------------------------------------------------------------
SOURCES = ROOT / "tests" / "emulator" / "kernels"


def run(name: str, kernel: str, grid: int, block: int, *args, **options):
    function = module(SOURCES / name).get_function(kernel)
    return function((grid,), (block,), args, **options)


def test_unwritten_output_is_reported() -> None:
    out = memory.empty((5, 7), np.float32, "y")
    run("stores.cu", "fill", 1, 32, out, np.int32(33))
    with pytest.raises(CheckerError) as caught:
        memory.check_written(out)
    (report,) = caught.value.reports
    assert report.kind == UNWRITTEN_OUTPUT
    assert (report.kernel, report.file) == ("fill", "tests/emulator/kernels/stores.cu")
    assert "2 of 35 elements of y" in report.text
    assert "first at (4, 5)" in report.text
    assert memory.unwritten_elements(out).tolist() == [[4, 5], [4, 6]]
    run("stores.cu", "fill", 1, 32, out, np.int32(35))
    memory.check_written(out)


@pytest.mark.parametrize(
    "pieces", ["halves2", "halves8", "floats2", "floats4", "floats8", "doubles2"]
)
@pytest.mark.parametrize("access", ["load", "store", "load_shared", "store_shared"])
def test_misaligned_vector_is_reported(access: str, pieces: str) -> None:
    dtype = {"h": np.float16, "f": np.float32, "d": np.float64}[pieces[0]]
    length = int(pieces[-1])
    values = memory.array(np.arange(1, 33), "in").astype(dtype)
    source = memory.array(values, "in")
    for first in (0, 1, length // 2):
        out = memory.empty((32,), dtype, "out")
        with settings(raise_reports=False):
            reports = run(
                "pieces.cu", f"{access}_{pieces}", 1, 1, source, out, np.int32(first)
            ).reports
        if first:
            (report,) = reports
            assert (report.kind, report.file) == ("misaligned", "cuda/include/vector.cuh")
            line = (INCLUDE_DIRECTORY / "vector.cuh").read_text().split("\n")[report.line - 1]
            assert "reinterpret_cast" in line
            assert f"not a multiple of {length * values.itemsize}" in report.text
        else:
            assert not reports
            start = {"load": first, "store": 0}.get(access, 0)
            assert out[:length].tolist() == values[start:][:length].tolist()


def _between_multiples_of_16(dtype: str, *shape: int) -> np.ndarray:
    flat = np.zeros(np.prod(shape) + 16, dtype)
    first = -flat.ctypes.data % 16 // flat.itemsize + 1
    return flat[first:][: np.prod(shape)].reshape(shape)


_LAST = {"data_format": "NHWC", "filter_format": "OHWI"}
# Input shape, filter shape and options by family.
LAYERS = {
    "cuda-gather": ((1, 8, 8, 32), (32, 3, 3, 32), {**_LAST, "arch": "sm_75"}),
    "cuda-direct": ((4, 32, 32, 64), (64, 3, 3, 1), {**_LAST, "groups": 64}),
    "cuda-toeplitz": ((1, 8, 16, 16), (8, 1, 3, 3), {"groups": 8}),
    "cuda-patch": ((1, 3, 16, 64), (32, 3, 3, 3), {}),
}


def overstate_alignment(patch: pytest.MonkeyPatch) -> None:
    """Let calls count all addresses as multiples of 16."""
    backend = emulator.convolutions.EmulatorBackend
    describe = backend.describe

    def overstated(self, *given):
        layouts, *others = describe(self, *given)
        return (*layouts[:-2], 16, layouts[-1]), *others

    patch.setattr(backend, "describe", overstated)


@pytest.mark.parametrize("lies_of", ["x", "out"])
@pytest.mark.parametrize("impl", LAYERS)
def test_overstated_alignment_is_reported(impl: str, lies_of: str, monkeypatch) -> None:
    x_shape, w_shape, options = LAYERS[impl]
    shapes = {"x": x_shape, "w": w_shape, "out": (*x_shape[:-1], w_shape[0])}
    if "data_format" not in options:
        shapes["out"] = (x_shape[0], w_shape[0], *x_shape[2:])
    arrays = {name: np.zeros(shape, "f2") for name, shape in shapes.items()}
    arrays[lies_of] = _between_multiples_of_16("f2", *shapes[lies_of])
    emulator.conv_forward(**arrays, padding=1, impl=impl, **options)  # with smaller vectors
    overstate_alignment(monkeypatch)
    with pytest.raises(CheckerError, match=rf"misaligned: .* (global {lies_of} |cp\.async)"):
        emulator.conv_forward(**arrays, padding=1, impl=impl, **options)


def test_overstated_bias_alignment_is_reported(
    monkeypatch,
) -> None:
    dy = _between_multiples_of_16("f4", 2, 3, 8, 8)
    emulator.conv_backprop_bias(dy)
    overstate_alignment(monkeypatch)
    with pytest.raises(CheckerError, match=r"misaligned: .* global dy "):
        emulator.conv_backprop_bias(dy)


def test_write_between_the_elements_of_a_view_is_reported() -> None:
    out = memory.empty_like(np.zeros((4, 8), np.float32)[:, ::2], "y")
    with pytest.raises(CheckerError, match="between the elements"):
        run("stores.cu", "fill", 1, 32, out, np.int32(4))


@pytest.mark.parametrize("copy", [memory.like, memory.empty_like])
def test_views_keep_strides_and_alignment(copy) -> None:
    flat = np.arange(200, dtype=np.float16)
    start = -flat.__array_interface__["data"][0] % 16 // 2
    shape = (3, 4, 5)
    for first in range(8):
        forward = flat[start + first :][: 2 * 60 : 2].reshape(shape)
        for view in (forward, forward[::-1], forward[:, :, ::-1], forward[::-1, ::-1, ::-1]):
            copied = copy(view)
            assert (copied.shape, copied.strides) == (view.shape, view.strides)
            address, original = (a.__array_interface__["data"][0] for a in (copied, view))
            assert address % 16 == original % 16
            assert byte_bounds(copied)[0] % 32 >= 16  # no larger alignment by chance
            assert copy is memory.empty_like or (copied == view).all()


def test_read_before_misaligned_view_is_reported() -> None:
    values = memory.like(np.zeros(64, np.float32)[3:], "x")
    with pytest.raises(CheckerError, match="out-of-bounds"):
        run("pieces.cu", "load_floats2", 1, 1, values, memory.empty((2,), np.float32), np.int32(-1))


def test_strided_view_is_written_through() -> None:
    out = memory.empty_like(np.zeros(32, np.float32)[::2], "y")
    run("stores.cu", "fill_strided", 1, 32, out, np.int32(16), np.int32(2))
    memory.check_written(out)
    assert out.tolist() == list(range(16))


# --------------------------------------------------------------------------------------------------
# Canaries: the instrumentation must detect every kind of store
# --------------------------------------------------------------------------------------------------
STORES = (
    "store_scalar",
    "store_returned_struct",
    "store_vector",
    "store_memcpy",
    "store_memset",
    "store_struct_copy",
    "store_through_volatile",
    "store_in_a_loop",
    "store_conditionally",
    "store_bitfield",
    "store_from_template",
    "store_compound",
    "store_atomic",
    "store_double",
    "store_byte",
)


@pytest.mark.parametrize("kernel", STORES)
def test_instrumentation_detects_every_store(kernel: str) -> None:
    read_only = memory.array(np.zeros(64, np.uint8), "out", read_only=True)
    with settings(raise_reports=False):
        (report,) = run("stores.cu", kernel, 1, 1, read_only).reports
    assert report.kind == "read-only-write"
    text = (SOURCES / "stores.cu").read_text().split("\n")
    assert f"// STORE {kernel}" in text[report.line - 1]


def test_canaries_cover_every_store_kernel() -> None:
    declared = re.findall(r"void (store_\w+)\(unsigned", (SOURCES / "stores.cu").read_text())
    assert sorted(declared) == sorted(STORES)


# --------------------------------------------------------------------------------------------------
# Figures
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kernel", "is_matrix", "ratio"),
    [
        ("column_of_32", False, 32.0),
        ("column_of_33", False, 1.0),
        ("row_of_float4", False, 1.0),
        ("stride_2", False, 2.0),
        ("broadcast", False, 1.0),
        ("matrix_pitch_64", True, 4.0),
        ("matrix_pitch_80", True, 1.0),
    ],
)
def test_bank_conflicts_are_counted(kernel: str, is_matrix: bool, ratio: float) -> None:
    out = memory.empty((32,), np.float32, "out")
    with settings(bank_conflicts=True):
        outcome = run("banks.cu", kernel, 1, 32, out)
    text = (SOURCES / "banks.cu").read_text().split("\n")
    (line,) = [
        record
        for record in outcome.bank_conflicts
        if f"// COUNTED {kernel}" in text[record.line - 1] and record.is_matrix == is_matrix
    ]
    assert line.wavefronts / line.ideal == ratio
    assert line.requests == (4 if kernel.startswith("matrix") else 1)


# Access, words per lane, byte offset in shared memory by lane (None: the lane is inactive), and
# wavefronts.  The sources are measurements or NVIDIA's descriptions.
EACH, PAIRS, SECONDS = (lambda lane: lane, lambda lane: lane // 2,
                        lambda lane: lane // 4 * 2 + lane % 2)  # fmt: skip
WIDE_ACCESSES = {
    # Measured by Nsight Compute on an A10 and an H100 (forums.developer.nvidia.com/t/373160).
    "32 apart, equal halves": ("ld", 4, lambda lane: 32 * (lane % 16), 8),
    "one per half": ("ld", 4, lambda lane: 32 * (lane // 16), 2),
    # Measured on an A100 (zhuanlan.zhihu.com/p/690052715).
    "shared by neighbours": ("ld", 4, lambda lane: 16 * PAIRS(lane), 2),
    "shared by every second": ("ld", 4, lambda lane: 16 * SECONDS(lane), 2),
    "every other lane": ("ld", 4, lambda lane: None if lane % 2 else 16 * lane // 2, 2),
    "both ways": ("ld", 4, lambda lane: 16 * (PAIRS if lane < 16 else SECONDS)(lane), 4),
    "8 bytes, shared": ("ld", 2, lambda lane: 8 * PAIRS(lane), 1),
    # Described by NVIDIA for 7.0 and 7.5 (forums.developer.nvidia.com/t/77228).
    "neighbours": ("ld", 4, lambda lane: 16 * EACH(lane), 4),
    "one address": ("ld", 4, lambda lane: 0, 2),
    "shared except by one lane": ("ld", 4, lambda lane: 16 * (lane // 2 if lane else 31), 4),
    "shared, 128 apart": ("ld", 4, lambda lane: 128 * PAIRS(lane), 16),
    "8 bytes": ("ld", 2, lambda lane: 8 * EACH(lane), 2),
    "4 bytes, shared": ("ld", 1, lambda lane: 4 * PAIRS(lane), 1),
    # Only loads benefit from sharing.
    "stored": ("st", 4, lambda lane: 16 * EACH(lane), 4),
    "stored, shared": ("st", 4, lambda lane: 16 * PAIRS(lane), 4),
}


@pytest.mark.parametrize("case", WIDE_ACCESSES)
def test_wavefronts_of_wide_loads(case: str) -> None:
    access, words, offset_of, wavefronts = WIDE_ACCESSES[case]
    registers = ", ".join(f"%r{4 + number}" for number in range(words))
    operands = ["{" + registers + "}" if words > 1 else registers, "[%r3]"]
    kind = {1: "u32", 2: "v2.u32", 4: "v4.u32"}[words]
    text = f"""
.version 8.8
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 in)
{{
.reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %rd<9>;
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
    offsets = [offset_of(lane) for lane in range(32)]
    values = np.array([-1 if offset is None else offset for offset in offsets], np.int32)
    kernel = EmulatedModule.from_ptx(text, "wavefronts").get_function("kernel")
    with settings(bank_conflicts=True, raise_reports=False):
        outcome = kernel((1,), (32,), (memory.array(values, "x"),))
    (record,) = outcome.bank_conflicts
    assert record.wavefronts == wavefronts


# --------------------------------------------------------------------------------------------------
# More than 2**31 elements
# --------------------------------------------------------------------------------------------------
HUGE = (3, 1 << 30)


@pytest.mark.parametrize("shared", [0, 1])
def test_adjacent_halves_in_large_array_are_distinct(shared: int) -> None:
    """Pools may reuse memory of larger elements for 16-bit results."""
    y = memory.lazy((1 << 25,), np.float32, "y")
    with settings(raise_reports=False):
        outcome = run("huge.cu", "halves", 1, 64, y, np.int32(shared))
    assert {report.kind for report in outcome.reports} == ({"race"} if shared else set())


@pytest.mark.parametrize("kernel", ["copy_far_with_int", "copy_far_with_long"])
def test_huge_tensor_with_chosen_blocks(kernel: str) -> None:
    x = memory.lazy(HUGE, np.float32, "x")
    x[2, -1] = 5
    y = memory.lazy(HUGE, np.float32, "y")
    blocks = HUGE[0] * HUGE[1] // 256
    with settings(raise_reports=False, blocks=[0, blocks - 1]):
        outcome = run("huge.cu", kernel, blocks, 256, x, y)
    assert outcome.blocks == 2 or outcome.reports
    if kernel == "copy_far_with_long":
        assert not outcome.reports
        assert y[2, -1] == 5
    else:
        assert {report.kind for report in outcome.reports} <= {"integer-overflow", "out-of-bounds"}
        assert any(report.kind == "integer-overflow" for report in outcome.reports)
