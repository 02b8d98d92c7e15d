"""The emulator's builds, and the shipped assembly on every supported chip."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from cupyconv.gpu import compiler
from tests import ROOT
from tests.cubins import disassemble
from tests.emulator import EmulatedModule, build, memory
from tests.gpu import golden

pytestmark = pytest.mark.costly

PTX = build.INCLUDE_DIRECTORY / "ptx.cuh"
TWIN = build.HOST_DIRECTORY / "ptx_twin.cuh"


# --------------------------------------------------------------------------------------------------
# The twin and the shipped header
# --------------------------------------------------------------------------------------------------
def test_twin_declares_what_the_shipped_header_declares() -> None:
    build.check_twin()
    assert len(build.declared_wrappers(PTX.read_text())) > 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("ldmatrix_x4_trans(", "ldmatrix_x4_t("), "no twin for: void ld"),
        (lambda text: text.replace("int source_bytes", "unsigned source_bytes"), "cp_async_16"),
        (lambda text: text.replace("template <int GROUPS_LEFT>", "template <int N>"), "<int N>"),
    ],
)
def test_wrapper_without_a_twin_fails_the_build(tmp_path: Path, change, message: str) -> None:
    shipped = tmp_path / "ptx.cuh"
    shipped.write_text(change(PTX.read_text()))
    with pytest.raises(build.BuildError, match=re.escape(message)):
        build.check_twin(shipped, TWIN)


def test_assembly_is_only_in_the_header() -> None:
    for path in build.KERNEL_DIRECTORY.rglob("*.cu*"):
        if path != PTX:
            assert not re.search(r"\basm\b", path.read_text()), path


# --------------------------------------------------------------------------------------------------
# Builds
# --------------------------------------------------------------------------------------------------
KERNEL = """
#define THREADS (BLOCK * 2)
__device__ constexpr int kPair = 2;
extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(kPair, 1)
    first(float* y) {
  extern __shared__ __align__(256) unsigned char bytes[];
  bytes[threadIdx.x] = VALUE;
  y[blockIdx.x * blockDim.x + threadIdx.x] = bytes[threadIdx.x];
}
#define DECLARE(name) extern "C" __global__ void name(float* y) { y[threadIdx.x] = 1.0f; }
DECLARE(second)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.cu"
    path.write_text(KERNEL)
    return path


def test_bounds_and_clusters_come_from_source(kernel: Path) -> None:
    for value in ("3", "4"):
        module = EmulatedModule(kernel, {"BLOCK": "16", "VALUE": value})
        first = module.get_function("first")
        y = memory.empty((64,), np.float32)
        first((2,), (32,), (y,), shared_mem=32)
        assert (y == float(value)).all()
        with pytest.raises(ValueError, match="clusters of"):
            first((3,), (32,), (y,), shared_mem=32)
        with pytest.raises(ValueError, match="1 to 32 threads"):
            first((2,), (64,), (y,), shared_mem=32)
        module.get_function("second")((1,), (64,), (y,))
    with pytest.raises(ValueError, match="no kernel third"):
        module.get_function("third")


def test_edited_kernel_is_recompiled(kernel: Path) -> None:
    runtime = build.build_runtime()
    first = build.build_kernel(kernel, {"BLOCK": "16", "VALUE": "3"})
    kernel.write_text(KERNEL + f"// {uuid4()}\n")  # not in any cache
    assert build.build_kernel(kernel, {"BLOCK": "16", "VALUE": "3"}) != first
    assert build.build_runtime() == runtime


# --------------------------------------------------------------------------------------------------
# Arguments
# --------------------------------------------------------------------------------------------------
def test_arguments_must_match_parameters() -> None:
    source = ROOT / "tests" / "emulator" / "kernels" / "stores.cu"
    fill = EmulatedModule(source).get_function("fill")
    y = memory.empty((4,), np.float32)
    with pytest.raises(TypeError, match="takes 2 arguments: got 1"):
        fill((1,), (32,), (y,))
    with pytest.raises(TypeError, match=r"argument 1 of fill is an integer of 4 bytes: got .* 8"):
        fill((1,), (32,), (y, 4))
    with pytest.raises(TypeError, match=r"ordinary NumPy array: make it with memory\.array"):
        fill((1,), (32,), (np.zeros(4, np.float32), np.int32(4)))
    with pytest.raises(TypeError, match="argument 1 of fill is an integer of 4 bytes: got a float"):
        fill((1,), (32,), (y, np.float32(4)))
    fill((1,), (32,), (np.uint64(y.ctypes.data), np.int32(4)))
    assert y.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=r"a grid has 1 to .* not \(0, 1, 1\)"):
        fill((0,), (32,), (y, np.int32(4)))
    with pytest.raises(ValueError, match="are allowed"):
        fill((1,), (32,), (y, np.int32(4)), shared_mem=64 << 10)


def test_unchecked_build_computes_the_same() -> None:
    source = ROOT / "tests" / "emulator" / "kernels" / "stores.cu"
    module = EmulatedModule(source, checked=False)
    y = memory.empty((40,), np.float32)
    outcome = module.get_function("fill")((1,), (32,), (y, np.int32(40)))
    assert outcome.accesses == 0
    assert y.tolist() == list(range(40))


# --------------------------------------------------------------------------------------------------
# The shipped assembly
# --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("architecture", compiler.ARCHITECTURES)
def test_every_wrapper_assembles(architecture: str) -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    assert golden.compile_cubin(architecture, wgmma=architecture == "sm_90a")


# SASS pattern of each wrapper, in a kernel of golden.cu.
SASS = {
    "f32_from_f16": r"HADD2\.F32|F2F\.F32\.F16",
    "f16_from_f32": r"F2FP\.F16",
    "rcp_approx": r"MUFU\.RCP ",
    "ex2_approx": r"MUFU\.EX2 ",
    "f16x2_from_f32": r"F2FP\.F16",
    "bf16x2_from_f32": r"F2FP\.BF16",
    "tf32_from_f32": r"LOP3\.LUT|F2FP?\.TF32",
    "store_16_bytes": r"STG\.E\.128 ",
    "ldmatrix_x2": r"LDSM\.16\.M88\.2 ",
    "ldmatrix_x4": r"LDSM\.16\.M88\.4 ",
    "ldmatrix_x2_trans": r"LDSM\.16\.MT88\.2 ",
    "ldmatrix_x4_trans": r"LDSM\.16\.MT88\.4 ",
    "stmatrix_x4": r"STSM\.16\.M88\.4 ",
    "stmatrix_x4_trans": r"STSM\.16\.MT88\.4 ",
    "mma_m16n8k8_f16": r"HMMA\.1688\.F32 ",
    "mma_m16n8k16_f16": r"HMMA\.16816\.F32 ",
    "mma_m16n8k16_bf16": r"HMMA\.16816\.F32\.BF16 ",
    "mma_m16n8k8_tf32": r"HMMA\.1688\.F32\.TF32 ",
    "mma_m8n8k4_f64": r"DMMA",
    "cp_async_4": r"LDGSTS\.E\.ZFILL (?s:.*)LDGDEPBAR(?s:.*)DEPBAR\.LE",
    "cp_async_8": r"LDGSTS\.E\.64\.ZFILL ",
    "cp_async_16": r"LDGSTS\.E\.BYPASS\.128",
    "named_barriers": r"BAR\.SYNC",
    "mbarrier_phases": r"SYNCS\.EXCH\.64(?s:.*)SYNCS\.ARRIVE(?s:.*)"
    r"SYNCS\.PHASECHK\.TRANS64\.TRYWAIT",
    "elect_one": r"ELECT",
    "cluster_exchange": r"UCGABAR_ARV(?s:.*)UCGABAR_WAIT(?s:.*)SYNCS\.ARRIVE\.TRANS64\.RED",
    "griddepcontrol": r"PREEXIT(?s:.*)ACQBULK",
    "setmaxnreg": r"USETMAXREG",
    **{f"tma_load_{n}d": rf"UTMALDG\.{n}D " for n in (2, 3, 4)},
    **{f"tma_load_im2col_{n}d": rf"UTMALDG\.{n}D\.IM2COL " for n in range(3, 6)},
    **{f"tma_load_{n}d_multicast": rf"UTMALDG\.{n}D\.MULTICAST " for n in (2, 3, 4)},
    **{f"tma_load_im2col_{n}d_multicast": rf"UTMALDG\.{n}D\.IM2COL\.MULTICAST " for n in (3, 4, 5)},
    "tma_store_2d": r"UTMASTG\.2D (?s:.*)UTMACMDFLUSH",
    **{
        f"wgmma_{element}_n{n}_a0_b0": rf"HGMMA\.64x{n}x16\.F32" + suffix
        for n in golden.WGMMA_N
        for element, suffix in (("f16", " "), ("bf16", r"\.BF16 "))
    },
    **{f"wgmma_tf32_n{n}": rf"HGMMA\.64x{n}x8\.F32\.TF32 " for n in golden.WGMMA_N},
}


def test_sass_patterns_cover_golden_kernels() -> None:
    # wgmma's operand majors are in its descriptors, not in the SASS.
    kernels = {re.sub(r"_a[01]_b[01]$", "_a0_b0", case.kernel) for case in golden.cases()}
    assert kernels == set(SASS)


@pytest.mark.thorough
def test_wrappers_compile_to_named_instructions() -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    listing = disassemble(golden.compile_cubin("sm_90a", wgmma=True))
    sections = re.split(r"^\s*\.section\s+\.text\.(\w+),.*$", listing, flags=re.M)
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    mismatches = [name for name, pattern in SASS.items() if not re.search(pattern, bodies[name])]
    assert not mismatches


def test_shared_variables_ignore_global_libgcc() -> None:
    # TensorFlow loads libgcc, with its __emutls_get_address, into the global namespace.
    program = (
        "import ctypes; ctypes.CDLL('libgcc_s.so.1', ctypes.RTLD_GLOBAL)\n"
        "import numpy as np; from tests import emulator\n"
        "x = np.ones((1, 4, 6, 6), np.float32); w = np.ones((8, 4, 3, 3), np.float32)\n"
        "print(emulator.conv_forward(x, w, impl='cuda-generic')[0, 0, 0, 0])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=build.REPOSITORY, capture_output=True, text=True
    )
    assert (result.stdout, result.returncode) == ("36.0\n", 0), result.stderr
