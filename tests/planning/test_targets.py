"""Compilation targets for chips that the compiler knows or does not know."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, Plan, arrays, backends, cache_folder
from cupyconv.errors import DeviceError
from cupyconv.gpu import capture, compiler, sources
from cupyconv.gpu.runtime import variant_of
from cupyconv.kernels.device import CAPABILITIES
from cupyconv.launch import Launch
from cupyconv.planning import Device, Request
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES
from tests import command
from tests.configurations import in_formats

LAYER = ConvProblem((8, 64, 28, 28), (64, 64, 3, 3), padding=1, dtype="float16")
SMALL = ConvProblem((1, 2, 5, 5), (3, 2, 3, 3), dtype="float64")

CUDA_12_0 = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 89, 90)
CUDA_12_8 = (*CUDA_12_0, 100, 101, 120)
CUDA_13_0 = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
"""Architectures that nvrtcGetSupportedArchs returns in these releases."""


def chip(major, minor):
    return Device.of_capability("a card", (major, minor))


def known_to(release):
    return [divmod(number, 10) for number in release]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("release", "capability", "target"),
    [
        (CUDA_12_0, (7, 5), "sm_75"),
        (CUDA_12_0, (9, 0), "sm_90a"),
        (CUDA_12_0, (8, 8), "compute_87"),
        (CUDA_12_0, (9, 1), "sm_90"),
        (CUDA_12_0, (12, 0), "compute_90"),
        (CUDA_12_8, (10, 0), "sm_100a"),
        (CUDA_12_8, (10, 3), "sm_100"),
        (CUDA_12_8, (12, 1), "sm_120"),
        (CUDA_12_8, (11, 0), "compute_101"),
        (CUDA_12_8, (13, 0), "compute_120"),
        (CUDA_13_0, (10, 1), "compute_100"),
        (CUDA_13_0, (10, 7), "sm_103"),
        (CUDA_13_0, (11, 1), "compute_110"),
        (CUDA_13_0, (12, 1), "sm_121"),
        (CUDA_13_0, (15, 0), "compute_121"),
    ],
)
def test_target_is_the_closest_that_the_chip_runs(release, capability, target):
    device = chip(*capability).compiled_by(known_to(release))
    assert device.target == target
    assert device.architecture == chip(*capability).architecture
    assert device.fallback == (None if target == device.architecture else target)


@pytest.mark.quick
@pytest.mark.parametrize("known", [[], [(8, 0), (9, 0)], [(5, 0), (7, 2)]])
def test_chip_older_than_every_target_has_no_target(known):
    assert chip(7, 5).compiled_by(known) is None


@pytest.mark.quick
def test_installed_compiler_knows_only_known_chips():
    known = {divmod(one, 10) for one in arrays.cupy().cuda.nvrtc.getSupportedArchs()}
    assert {one for one in known if one >= (7, 5)} <= set(CAPABILITIES)


def test_families_are_limited_by_the_target():
    """wgmma requires the target sm_90a; the target sm_90 and PTX fallbacks do not have it."""
    own = chip(9, 0)
    for device in (replace(own, fallback="sm_90"), replace(own, fallback="compute_90"), chip(9, 1)):
        for name in ("cuda-hopper", "cuda-hopper-bf16x6"):
            layer = in_formats(LAYER, "NHWC", "OHWI")
            if name == "cuda-hopper-bf16x6":
                layer = layer.replace(dtype="float32")
            for pass_ in PASSES:
                asked = Request(layer, pass_, device, "bf16x6")
                assert FAMILIES[name].refuses(replace(asked, device=own)) is None
                assert FAMILIES[name].refuses(asked) == "wgmma needs compute capability 9.0"
    old = replace(chip(8, 0), fallback="compute_75")
    bfloat16 = Request(LAYER.replace(dtype="bfloat16"), "forward", old)
    assert "8.0" in FAMILIES["cuda-gather"].refuses(bfloat16)


# -- installed compiler ----------------------------------------------------------------------------


@pytest.fixture
def release(monkeypatch):
    """Return a function that makes NVRTC report the architectures of another release."""

    def choose(known):
        binding = arrays.cupy().cuda.nvrtc
        monkeypatch.setattr(binding, "getSupportedArchs", lambda: known)
        backends._gpu.cache_clear()

    yield choose
    backends._gpu.cache_clear()


def test_device_without_a_target_is_rejected(release):
    release((80, 90))
    with pytest.raises(DeviceError, match=r"compute capability 8.0 and later: a card has 7.5") as e:
        compiler.fitted(chip(7, 5))
    assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
    with pytest.raises(ConvError, match=r"7.5 or later: a card has 7.0"):
        chip(7, 0)


def test_device_is_unchanged_without_a_compiler(monkeypatch):
    def missing():
        raise DeviceError("CuPy is missing")

    monkeypatch.setattr(arrays, "cupy", missing)
    assert compiler.fitted(chip(13, 0)) == chip(13, 0)


def test_current_device_loads_code_for_its_target(release, monkeypatch, tmp_path):
    """The driver loads the fallback's code on a card that the compiler does not know."""
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path))
    release(CUDA_12_0)
    properties = {"name": b"a card", "major": 10, "minor": 3, "multiProcessorCount": 100}
    runtime = SimpleNamespace(getDeviceProperties=lambda ordinal: properties, getDevice=None)
    loaded = []

    def load(path):
        loaded.append(Path(path).read_bytes())
        return SimpleNamespace(get_function=lambda name: SimpleNamespace(kernel=name))

    cuda = SimpleNamespace(runtime=runtime, get_current_stream=None, nvrtc=arrays.cupy().cuda.nvrtc)
    monkeypatch.setattr(
        arrays, "cupy", lambda: SimpleNamespace(cuda=cuda, RawModule=load, ndarray=None)
    )
    exchanged = SimpleNamespace(function=lambda *_: lambda _: 0, RELAXED=2)
    monkeypatch.setattr(capture, "driver", exchanged)  # the driver's library is missing here
    backend = backends._gpu(0)
    assert (backend.device.architecture, backend.device.target) == ("sm_103", "compute_90")
    one = Launch("conv_arrange.cu", "conv_arrange", (("STORAGE", "float"),), (1,), (1,), 0, ())
    backend.runtime.load([one])
    (code,) = loaded
    assert b".target sm_90\n" in code
    assert b".entry conv_arrange(" in code
    assert code.endswith(b"\0")
    (kept,) = tmp_path.glob("*.ptx")
    assert kept.read_bytes() == code
    assert kept.name.startswith("conv_arrange-compute_90-")
    variant = variant_of(one, backend.runtime.target)
    assert variant == (sources.load("conv_arrange.cu"), one.defines, "compute_90")


# -- plans -----------------------------------------------------------------------------------------

FITTED = chip(10, 3).compiled_by(known_to(CUDA_12_8))
SAID = "Kernels are compiled for sm_100, as the installed NVRTC has no target sm_103."


def test_plan_names_the_target():
    planned = cupyconv.plan(LAYER, FITTED)
    assert f"{LAYER}\non a card sm_103 (kernels for sm_100)\n" in str(planned)
    assert str(planned).endswith(SAID)
    assert SAID in planned._repr_html_()
    own = str(cupyconv.plan(LAYER, chip(10, 3)))
    assert "sm_100" not in own
    assert "NVRTC" not in own


@pytest.mark.parametrize("device", [FITTED, chip(9, 1), chip(13, 0), chip(15, 0)])
def test_plan_for_an_unknown_chip_survives_json(device):
    planned = cupyconv.plan(LAYER, device)
    assert Plan.from_json(planned.to_json()) == planned


@pytest.mark.parametrize(
    "fallback", ["sm_103", "sm_100a", "sm_90", "compute_100", "sm_110", "compute_120", "gfx9", ""]
)
def test_plan_with_an_impossible_target_is_rejected(fallback):
    found = json.loads(cupyconv.plan(LAYER, FITTED).to_json())
    found["device"]["fallback"] = fallback
    with pytest.raises(ConvError, match="Plan again"):
        Plan.from_json(json.dumps(found))


def test_plan_command_prints_the_target(monkeypatch):
    monkeypatch.setattr(backends, "current_device", lambda: FITTED)
    words = ("plan", "--input", "8x64x28x28", "--filter", "64x64x3x3", "--dtype", "float16")
    text = command.said(*words)
    assert SAID in " ".join(text.split())
    assert "on a card sm_103 (kernels for sm_100)" in text
    (layer,) = command.parsed(*words)["layers"]
    assert layer["plans"][0]["device"]["fallback"] == "sm_100"
    assert SAID in layer["plans"][0]["times"]


# -- chips by name ---------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "architecture"),
    [("sm_103", "sm_103"), ("sm_107", "sm_107"), ("sm_122", "sm_122"), ("sm_130", "sm_130"),
     ("sm_150a", "sm_150"), ("sm_90", "sm_90a")],
)  # fmt: skip
def test_chips_newer_than_all_known_chips_have_names(name, architecture):
    device = Device.of(name)
    assert device.architecture == device.target == architecture
    planned = cupyconv.plan(LAYER, name)
    assert Plan.from_json(planned.to_json()) == planned


@pytest.mark.quick
@pytest.mark.parametrize(
    "name", ["sm_91", "sm_81", "sm_104", "sm_111", "sm_800", "sm_1000", "sm_9990", "sm_760"]
)
def test_invalid_chip_names_are_rejected(name):
    with pytest.raises(ConvError, match="unknown device"):
        Device.of(name)


def test_plan_command_accepts_chip_names():
    words = ("plan", "--input", "8x64x28x28", "--filter", "64x64x3x3", "--device")
    for name, nominal in (("sm_103", "10.0"), ("sm_130", "12.0")):
        text = command.said(*words, name)
        assert f"on {name}\n" in text
        assert f"for the chip of compute capability {nominal}" in " ".join(text.split())
    command.refused(*words, "sm_800")


# -- the commands warm and env ---------------------------------------------------------------------


def test_warming_compiles_for_the_target(release, monkeypatch, tmp_path):
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path))
    release(CUDA_12_0)
    how = {"passes": "forward", "impl": "cuda-generic"}
    ptx = cupyconv.warm(SMALL, "sm_130", **how)
    cubin = cupyconv.warm(SMALL, Device.of_capability("sm_91", (9, 1)), **how)
    assert (ptx.device.target, cubin.device.target) == ("compute_90", "sm_90")
    assert "1 kernel for sm_130, compiled as compute_90: 1 compiled" in ptx.summary
    assert len(list(tmp_path.glob("*.ptx"))) == len(list(tmp_path.glob("*.cubin"))) == 1
    again = cupyconv.warm(SMALL, "sm_130", **how)
    assert again.compiled == ()
    assert "all cached" in again.summary
    words = ("warm", "--input", "1x2x5x5", "--filter", "3x2x3x3", "--dtype", "float64")
    more = ("--device", "sm_130", "--pass", "forward", "--impl", "cuda-generic")
    (found,) = command.parsed(*words, *more)["devices"]
    assert (found["architecture"], found["target"]) == ("sm_130", "compute_90")
    assert found["compiled"] == 0


@pytest.mark.parametrize(
    ("capability", "known", "target", "said"),
    [
        ((9, 0), CUDA_12_0, "sm_90a", "(sm_90a)"),
        ((10, 3), CUDA_12_8, "sm_100", "(sm_103, which NVRTC does not know: kernels are compiled "
         "for sm_100)"),
        ((13, 0), CUDA_12_8, "compute_120", "kernels are compiled for compute_120"),
        ((7, 0), CUDA_12_8, None, "(too old: capability 7.5 or later is needed)"),
        ((7, 5), (80, 90), None, "compiles for compute capability 8.0 and later"),
    ],
)  # fmt: skip
def test_env_names_the_target(release, monkeypatch, capability, known, target, said):
    release(known)
    properties = dict(zip(("major", "minor"), capability, strict=True))
    properties |= {"name": b"a card", "totalGlobalMem": 1 << 30}
    monkeypatch.setattr(arrays, "device_count", lambda: 1)
    runtime = arrays.cupy().cuda.runtime
    monkeypatch.setattr(runtime, "getDeviceProperties", lambda number: properties)
    (gpu,) = command.parsed("env")["gpus"]
    assert (gpu["target"], gpu["usable"]) == (target, target is not None)
    assert (gpu["reason"] is None) == gpu["usable"]
    assert said in " ".join(command.said("env", COLUMNS="300").split())
