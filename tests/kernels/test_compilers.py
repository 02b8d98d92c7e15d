"""The kernels, compiled by the oldest compiler that they support."""

import locale
from functools import partial

import pytest

from cupyconv import cache_folder
from cupyconv.gpu import compiler
from cupyconv.gpu.sources import KernelSource
from cupyconv.planning import Device
from tests import compilers
from tests.compilers import Nvrtc
from tests.emulator import convolutions, test_emulator_ptx
from tests.emulator.ptx import nvrtc

pytestmark = pytest.mark.costly


@pytest.fixture(scope="module")
def oldest():
    found = compilers.oldest()
    if found is None:
        pytest.skip("no NVRTC of CUDA 12: pip install 'cupyconv[compilers]'")
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90a"])
def test_every_kernel_compiles_with_the_oldest_compiler(oldest, architecture):
    """One variant of each pass and family is compiled; python -m tests.compilers compiles all."""
    assert oldest(Nvrtc.version) == compilers.OLDEST
    of_pass = dict(reversed(list(compilers.compiled_variants(architecture))))
    assert len(of_pass) > 12
    assert compilers.faults(oldest, of_pass.items()) == []


OLD = [(5, 0), (7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0)]
"""Some compute capabilities that the oldest compiler knows, among them its newest ones."""


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 7), "sm_87"),
        ((9, 1), "sm_90"),
        ((10, 3), "compute_90"),
        ((12, 1), "compute_90"),
        ((13, 0), "compute_90"),
        ((15, 0), "compute_90"),
    ],
)
def test_oldest_compiler_has_a_target_for_any_chip(oldest, capability, target):
    known = oldest(Nvrtc.capabilities)
    assert set(OLD) <= set(known)
    assert max(known) == OLD[-1]
    chip = Device.of_capability("invented", capability)
    device = chip.compiled_by(known)
    assert device.target == target
    assert chip.architecture not in ("sm_90", "compute_90")


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [(9, 1), (10, 3)])
def test_every_kernel_compiles_for_a_fallback(oldest, capability):
    """One variant of each pass and family is compiled for an older chip, and to PTX."""
    device = Device.of_capability("invented", capability).compiled_by(oldest(Nvrtc.capabilities))
    assert device.fallback
    of_pass = dict(reversed(list(compilers.compiled_variants(device))))
    sources = {variant[0].name for variant in of_pass.values()}
    assert {"conv_forward.cu", "conv_gather.cu", "conv_direct.cu", "conv_toeplitz.cu"} <= sources
    assert {"conv_patch.cu", "conv_arrange.cu", "conv_backprop_bias.cu"} <= sources
    assert "conv_hopper.cu" not in sources, "it needs sm_90a"
    assert {variant[2] for variant in of_pass.values()} == {device.fallback}
    assert compilers.faults(oldest, of_pass.items()) == []


@pytest.fixture
def its_ptx(oldest, monkeypatch):
    """Make the emulator run the PTX of the oldest compiler."""
    monkeypatch.setattr(nvrtc, "compile_ptx", partial(oldest, Nvrtc.ptx))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: compilers.OLDEST)
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


def _encodings(nvrtc, folder):
    """Return the locale's text encoding before, during and after a compilation by the library."""
    source, during = KernelSource("kernel.cu", 'extern "C" __global__ void kernel() {}', ()), []

    def compiled(*variant):
        assert nvrtc.fault(variant) is None
        during.append(locale.getencoding())
        return b"cubin", ""

    before = locale.getencoding()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache_folder.CACHE_VARIABLE, str(folder))
        patch.setattr(compiler, "compile_cubin", compiled)
        compiler.cached_cubin(source, {}, "sm_80")
    return before, *during, locale.getencoding()


def test_compiling_leaves_the_callers_locale_alone(oldest, tmp_path):
    """The oldest compiler sets its thread's locale to one whose text encoding is ASCII."""
    before, during, after = compilers.oldest()(_encodings, tmp_path)  # a new process
    assert during != before == after == "UTF-8"
