"""The kernels through the oldest compiler that they are written for."""

import locale

import pytest

from cupyconv.gpu import compiler
from cupyconv.gpu.sources import KernelSource
from tests import compilers, test_emulator_ptx
from tests.emulator import convolutions
from tests.emulator.ptx import nvrtc


@pytest.fixture(scope="module")
def oldest():
    found = compilers.oldest()
    if found is None:
        pytest.skip("no NVRTC of CUDA 12: pip install 'cupyconv[compilers]'")
    return found


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a"])
def test_every_kernel_compiles_with_the_oldest_compiler(oldest, architecture):
    """One variant of each family's passes; all of them: python -m tests.compilers."""
    assert oldest.version == compilers.OLDEST
    of_pass = dict(reversed(list(compilers.compiled_variants(architecture))))
    assert len(of_pass) > 12
    assert compilers.faults(oldest, of_pass.items()) == []


@pytest.fixture
def its_ptx(oldest, monkeypatch):
    """The emulator runs what the oldest compiler makes."""
    monkeypatch.setattr(nvrtc, "compile_ptx", oldest.ptx)
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: oldest.version)
    caches = (nvrtc.ptx_of, convolutions._ptx_module)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.mark.parametrize("variant", test_emulator_ptx.SAMPLE, ids="-".join)
def test_pass_from_its_ptx(its_ptx, variant):
    test_emulator_ptx.compare(variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", test_emulator_ptx.EVERY, ids="-".join)
def test_any_pass_from_its_ptx(its_ptx, variant):
    test_emulator_ptx.compare(variant)


def test_compiling_leaves_the_callers_locale_alone(oldest, monkeypatch, tmp_path):
    """The oldest compiler sets that of its thread to one in which text is ASCII."""
    source, seen = KernelSource("kernel.cu", 'extern "C" __global__ void kernel() {}', ()), []

    def compiled(*variant):
        assert oldest.fault_here(variant) is None
        seen.append(locale.getencoding())
        return b"cubin", ""

    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(compiler, "compile_cubin", compiled)
    before = locale.getencoding()
    compiler.cached_cubin(source, {}, "sm_80")
    assert locale.getencoding() == before
    assert seen
    assert seen != ["UTF-8"]


# As conv_gather.cu once had one: compilers from 13.1 on take it.
GENERIC = """
template <class Use> __device__ void each(Use use) { use(1, 2.f); }
extern "C" __global__ void kernel(float* out) {
  each([&](int i, auto& value) { out[i] = value; });
}
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float* out, int n) {
  float held[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) held[i] = out[i * n];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) out[i * n + 1] = held[63 - i] * held[i];
}
"""


@pytest.mark.parametrize(
    ("text", "fault"), [(GENERIC, "is considered a host function"), (SPILLING, "spill")]
)
def test_what_is_wrong_is_told(oldest, text, fault):
    source = KernelSource("kernel.cu", text, ())
    (found,) = compilers.faults(oldest, [("wrong", (source, {}, "sm_80"))])
    assert found.startswith("wrong {}:")
    assert fault in found
