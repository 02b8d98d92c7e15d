"""The library's kernels from NVRTC's PTX, and PTX that the emulator does not support."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, arrays
from cupyconv.gpu import sources
from cupyconv.planning import Device, Request
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import ITEMSIZE, PASSES
from tests import emulator
from tests.emulator import EmulatedModule, convolutions, memory, settings
from tests.emulator.golden_device import EmulatorDevice
from tests.emulator.ptx import PtxError, translate
from tests.emulator.ptx.nvrtc import compile_ptx, ptx_of
from tests.emulator.test_emulator_instructions import expected, same
from tests.gpu import golden

pytestmark = pytest.mark.costly

KERNELS = Path(emulator.__file__).with_name("kernels")

# --------------------------------------------------------------------------------------------------
# Kernels of the library
# --------------------------------------------------------------------------------------------------
# C, K, groups and R = S by family, and the chips for which its code differs.
FAMILY_LAYERS = {
    "cuda-generic": ((16, 24, 1, 3), ("sm_80",)),
    "cuda-gather": ((16, 24, 1, 3), ("sm_75", "sm_80")),
    "cuda-direct": ((64, 64, 64, 3), ("sm_80",)),
    "cuda-toeplitz": ((64, 64, 64, 7), ("sm_75", "sm_80")),
    "cuda-patch": ((3, 3, 1, 3), ("sm_75", "sm_80")),
    "cuda-columns": ((16, 24, 1, 3), ("sm_80",)),
    "cuda-hopper": ((64, 64, 1, 3), ("sm_90a",)),
    "cuda-hopper-bf16x6": ((64, 64, 1, 3), ("sm_90a",)),
}
Variant = tuple[str, str, str, str]
"""Family, dtype, chip, pass."""
# One pass of each family.
SAMPLE: list[Variant] = [
    ("cuda-generic", "float32", "sm_80", "forward"),
    ("cuda-gather", "float16", "sm_80", "backprop_input"),
    ("cuda-gather", "float64", "sm_80", "backprop_filter"),
    ("cuda-toeplitz", "float16", "sm_80", "forward"),
    ("cuda-direct", "bfloat16", "sm_80", "backprop_input"),
    ("cuda-patch", "float16", "sm_80", "backprop_filter"),
    ("cuda-columns", "float16", "sm_80", "backprop_input"),
    ("cuda-hopper", "float16", "sm_90a", "forward"),
]


def problem_of(impl: str, dtype: str) -> ConvProblem:
    (channels, filters, groups, side), _ = FAMILY_LAYERS[impl]
    return ConvProblem(
        (2, 7, 6, channels),
        (filters, side, side, channels // groups),
        padding=side // 2,
        groups=groups,
        data_format="NHWC",
        filter_format="OHWI",
        dtype=dtype,
    )


def precision_of(impl: str, dtype: str) -> str:
    if impl == "cuda-hopper-bf16x6":
        return "bf16x6"
    return "tf32" if dtype == "float32" and impl not in ("cuda-generic", "cuda-direct") else "ieee"


def is_taken(impl: str, dtype: str, chip: str, pass_: str) -> bool:
    precision = precision_of(impl, dtype)
    request = Request(problem_of(impl, dtype), pass_, Device.of(chip), precision)
    return FAMILIES[impl].refuses(request) is None


EVERY: list[Variant] = [
    (impl, dtype, chip, pass_)
    for impl, (_, chips) in FAMILY_LAYERS.items()
    for dtype in ITEMSIZE
    for chip in chips
    for pass_ in PASSES
    if is_taken(impl, dtype, chip, pass_)
]


Numbers = Callable[[tuple[int, ...]], np.ndarray]
"""Function that returns real numbers for a shape."""


def whole_numbers(shape: tuple[int, ...]) -> np.ndarray:
    """Return integers whose sums are exact."""
    return np.random.default_rng(shape).integers(-3, 4, shape)


def any_numbers(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape)


def numbers_of_few_bits(shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers whose products are exact but whose sums are rounded."""
    return any_numbers(shape).astype(np.float16)


def call_of(variant: Variant, numbers: Numbers) -> tuple[str, tuple, dict[str, Any]]:
    """Return function name, arguments and keywords of a pass."""
    impl, dtype, _, pass_ = variant
    problem = problem_of(impl, dtype)

    def operand(shape: tuple[int, ...]) -> np.ndarray:
        parts = numbers((2, *shape))
        if dtype.startswith("complex"):
            return (parts[0] + 1j * parts[1]).astype(dtype)
        return parts[0].astype(arrays.numpy_dtype(dtype))

    x, w = operand(problem.input_shape), operand(problem.filter_shape)
    dy = operand(problem.output_shape)
    arguments = {
        "forward": (x, w),
        "backprop_input": (x.shape, w, dy),
        "backprop_filter": (x, w.shape, dy),
    }[pass_]
    return (
        f"conv_{pass_}",
        arguments,
        {**problem.keywords, "precision": precision_of(impl, dtype)},
    )


def computed(variant: Variant, numbers: Numbers, source: str) -> np.ndarray:
    """Compute a pass on the emulator, from the source ("cuda") or the PTX ("ptx")."""
    name, arguments, rules = call_of(variant, numbers)
    with settings(source=source):
        return getattr(emulator, name)(*arguments, impl=variant[0], arch=variant[2], **rules)


def compare(variant: Variant) -> None:
    """Check a pass: integers against NumPy, other numbers bit by bit against the source build."""
    name, arguments, rules = call_of(variant, whole_numbers)
    expected = getattr(cupyconv, name)(*arguments, **rules)
    assert np.any(expected)
    np.testing.assert_array_equal(computed(variant, whole_numbers, "ptx"), expected)
    # NVRTC contracts a * b + c; the source build does not.
    plain = variant[0] == "cuda-gather" and variant[1] in ("float32", "float64")
    contracts = plain or variant[0] in ("cuda-generic", "cuda-direct")
    numbers = numbers_of_few_bits if contracts else any_numbers
    ptx, source = (computed(variant, numbers, kind) for kind in ("ptx", "cuda"))
    assert np.all(np.isfinite(ptx.astype(np.complex128)))
    assert ptx.tobytes() == source.tobytes()


@pytest.mark.parametrize("variant", SAMPLE, ids="-".join)
def test_pass_from_ptx(variant: Variant) -> None:
    compare(variant)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", emulator.SCHEDULES[::2], ids=("first-in", "random"))
@pytest.mark.parametrize("variant", EVERY, ids="-".join)
def test_every_variant_from_ptx(variant: Variant, schedule: emulator.Settings) -> None:
    with settings(schedule):
        compare(variant)


# --------------------------------------------------------------------------------------------------
# Built-ins: from the source and from the PTX
# --------------------------------------------------------------------------------------------------
def test_builtins_of_source_and_ptx_agree() -> None:
    path = KERNELS / "builtins.cu"
    text = compile_ptx(path.read_text(), path.name, {}, ["-arch=compute_80", "-std=c++17"])
    modules = [EmulatedModule(path, {}, []), EmulatedModule.from_ptx(text, "builtins")]
    random = np.random.default_rng(3)
    ints = random.integers(-(2**31), 2**31, 192).astype(np.int32)
    floats = (random.normal(size=128) * 3).astype(np.float32)
    floats[64:128:5] = floats[0:64:5]
    floats[:64:7] = np.nan  # one NaN: which of two is returned is undefined
    inputs = [memory.array(values) for values in (ints, floats, random.normal(size=64))]
    results = []
    for module in modules:
        out = memory.empty((64, 48), np.uint32)
        counters = memory.array(np.zeros(4, np.uint32), read_only=False)
        module.get_function("builtins")((1,), (64,), (*inputs, out, counters))
        results.append((np.array(out), np.array(counters)))
    (source, source_counters), (ptx, ptx_counters) = results
    assert np.flatnonzero((source != ptx).any(axis=0)).tolist() == []
    assert source_counters.tolist() == ptx_counters.tolist()


ROUNDED = """
#include "numeric.cuh"
extern "C" __global__ void rounded(const float* in, unsigned short* out) {
  out[threadIdx.x] = Numeric<bfloat16_t>::narrow(in[threadIdx.x]).bits;
}
"""


@pytest.mark.parametrize("architecture", ["compute_75", "compute_80"])
def test_bfloat16_rounding_without_instruction_agrees(architecture: str) -> None:
    """Before 8.0 integer code rounds, which a source build for the CPU does not show."""
    headers = dict(sources.load("conv_forward.cu").headers)
    text = compile_ptx(ROUNDED, "rounded.cu", headers, [f"-arch={architecture}", "-std=c++17"])
    assert ("cvt.rn.bf16x2.f32" in text) == (architecture == "compute_80")
    bits = np.random.default_rng(5).integers(0, 2**32, 1024, np.uint32)
    bits[::3] &= 0xFFFF8000  # ties
    bits[1::16] |= 0x7FC00000  # not a number
    bits[2::16] &= 0x807FFFFF  # subnormal
    bits[:4] = 0x7F7FFFFF, 0xFF7F7FFF, 0xFF800000, 0x80000000
    bits[(bits & 0x7FFFFFFF) > 0x7F800000] |= 0x400000  # only quiet NaNs
    out = memory.empty(bits.shape, np.uint16, "out")
    source = memory.array(bits.view(np.float32), "in")
    EmulatedModule.from_ptx(text, "rounded").get_function("rounded")((1,), (1024,), (source, out))
    expected_bits = bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    is_nan = np.isnan(bits.view(np.float32))
    assert (np.array(out)[~is_nan] == expected_bits[~is_nan]).all()
    assert (np.array(out)[is_nan] & 0x7FFF > 0x7F80).all()


# --------------------------------------------------------------------------------------------------
# Each instruction of the library's kernels, with the cases of tests/gpu/golden.py
# --------------------------------------------------------------------------------------------------
# wgmma cases take half a minute to build (measured).
INSTRUCTIONS = [
    pytest.param(case, marks=[pytest.mark.slow] if case.wgmma else [], id=case.name)
    for case in golden.cases()
]


@pytest.mark.parametrize("case", INSTRUCTIONS)
def test_ptx_instruction_agrees_with_the_gpu(case: golden.Case) -> None:
    with settings(source="ptx"):
        assert same(case, golden.run(case, EmulatorDevice()), expected(case))


# --------------------------------------------------------------------------------------------------
# Unsupported PTX, and the lines of reports
# --------------------------------------------------------------------------------------------------
HEADER = ".version 8.8\n.target sm_80\n.address_size 64\n"


@pytest.mark.parametrize(
    "instruction",
    [
        "frobnicate.f32 %f1, %f1;",
        "add.sat.s32 %r1, %r1, %r1;",
        "fma.rn.relu.f16 %h1, %h1, %h1, %h1;",
        "ld.acquire.gpu.global.u32 %r1, [%rd1];",
        "st.release.gpu.global.u32 [%rd1], %r1;",
        "min.NaN.f32 %f1, %f1, %f1;",
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r1}, {%f1};",
        "call.uni (%r1), other, (%r1);",
        "cp.async.ca.shared.global [%r1], [%rd1], 12;",
        "mov.u32 %r1, %nothing;",
        "add.s32 %r1, %r1;",
    ],
)
def test_unsupported_ptx_error_names_the_line(instruction: str) -> None:
    text = (
        f"{HEADER}.visible .entry kernel()\n{{\n"
        ".reg .b32 %r<9>; .reg .b32 %f<9>; .reg .b64 %rd<9>; .reg .b16 %h<9>;\n"
        f"{instruction}\nret;\n}}\n"
    )
    with pytest.raises(PtxError, match=r"^line 7: ") as caught:
        translate(text, "kernel.ptx")
    assert instruction.rstrip(";") in str(caught.value)


def test_parameter_addresses_fit_into_32_bits() -> None:
    text = f"""{HEADER}
.visible .entry kernel(.param .align 8 .b8 numbers[16], .param .u64 out)
{{
.reg .b32 %r<9>; .reg .b64 %rd<9>;
mov.b32 %r1, numbers;
cvt.u64.u32 %rd1, %r1;
cvta.param.u64 %rd2, %rd1;
ld.u32 %r2, [%rd2+4];
cvta.to.param.u64 %rd3, %rd2;
ld.param.u32 %r3, [%rd3+8];
ld.param.u32 %r4, [%r1+12];
ld.param.u64 %rd4, [out];
st.global.v4.u32 [%rd4], {{%r1, %r2, %r3, %r4}};
ret;
}}
"""
    kernel = EmulatedModule.from_ptx(text, "parameters").get_function("kernel")
    numbers = np.array([(1, 2, 3, 4)], np.dtype([(name, np.uint32) for name in "abcd"]))
    out = memory.empty((4,), np.uint32, "out")
    kernel((1,), (1,), (numbers, out))
    assert out[1:].tolist() == [2, 3, 4]


X, W = np.ones((1, 16, 7, 6), np.float32), np.ones((24, 16, 3, 3), np.float32)


def faulty(text: str) -> list[emulator.Report]:
    """Return the reports of cuda-generic's forward kernel without its second barrier."""
    barriers = list(re.finditer(r"bar\.sync\s+0;", text))
    assert len(barriers) > 1
    start, end = barriers[1].span()
    text = text[:start] + " " * (end - start) + text[end:]
    directory = sources.directory()
    module = EmulatedModule.from_ptx(text, "faulty", [directory, directory / "include"])
    reports: list[emulator.Report] = []
    with (
        mock.patch.object(convolutions, "_ptx_module", return_value=module),
        settings(
            source="ptx",
            raise_reports=False,
            on_outcome=lambda outcome: reports.extend(outcome.reports),
        ),
    ):
        emulator.conv_forward(X, W, padding=1, impl="cuda-generic")
    return reports


@pytest.fixture(scope="module")
def generic_variant() -> tuple[str, tuple, str]:
    """Return source, macros and chip of cuda-generic's forward kernel."""
    convolutions._ptx_module.cache_clear()
    with mock.patch.object(convolutions, "ptx_of", wraps=ptx_of) as spy, settings(source="ptx"):
        emulator.conv_forward(X, W, padding=1, impl="cuda-generic")
    return spy.call_args.args


@pytest.fixture(scope="module")
def generic_ptx(generic_variant: tuple[str, tuple, str]) -> str:
    return ptx_of(*generic_variant)


def test_reports_name_source_line(generic_ptx: str) -> None:
    places = {(report.file, report.kind) for report in faulty(generic_ptx)}
    assert ("cuda/include/tile.cuh", "race") in places or ("cuda/conv_forward.cu", "race") in places
    for file, _ in places:
        assert file.startswith("cuda/")
