"""The activations of the kernels' epilogues, compared with float64 value by value."""

from __future__ import annotations

import tracemalloc
from functools import cache
from typing import get_args

import numpy as np
import pytest

from cupyconv.cpu.activations import activate
from cupyconv.gpu import sources
from cupyconv.kernels.request import Activation, Epilogue
from tests.activations import ACTIVATIONS, activated
from tests.emulator import EmulatedModule, build, memory
from tests.emulator.ptx.nvrtc import OPTIONS, compile_ptx

FILE = build.HOST_DIRECTORY.parent / "kernels" / "activations.cu"
BLOCK = 128

ROUNDED = [name for name, one in ACTIVATIONS.items() if not one.is_exact]


def test_table_has_every_activation():
    assert tuple(ACTIVATIONS) == get_args(Activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_steepest_slope_is_the_largest(activation):
    at = np.linspace(-10, 10, 20001)
    slopes = np.abs(np.diff(activated(at, activation)) / np.diff(at))
    steepest = ACTIVATIONS[activation].steepest
    assert steepest - 0.01 < slopes.max() < steepest * (1 + 1e-9)


@cache
def values() -> np.ndarray:
    """Return every finite number of both 16-bit types, and float32 numbers that fill the blocks."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    halves = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    generator = np.random.default_rng(0)
    drawn = [generator.uniform(-reach, reach, 30000).astype(np.float32) for reach in (1, 6, 90)]
    worst = np.array([v for one in ACTIVATIONS.values() for v in one.worst], np.float32)
    every = np.concatenate([halves, (bits << 16).view(np.float32), *drawn, worst])
    kept = np.unique(every[np.isfinite(every)])
    return kept[: kept.size // BLOCK * BLOCK]  # without the largest few


@cache
def kernel(activation: str, off: int = 0, front: str = "ptx"):
    defines = {**Epilogue(activation).defines, "OFF": off}
    defines = {name: str(value) for name, value in defines.items()}
    if front == "source":
        folders = (build.INCLUDE_DIRECTORY,)
        return EmulatedModule(FILE, defines, folders, checked=False).get_function("activations")
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    flags = ["-arch=compute_90", *OPTIONS, *(f"-D{name}={one}" for name, one in defines.items())]
    headers = dict(sources.load("conv_forward.cu").headers)
    text = compile_ptx(FILE.read_text(), FILE.name, headers, flags)
    return EmulatedModule.from_ptx(text, "activations", checked=False).get_function("activations")


def run(activation: str, given: np.ndarray, **how) -> np.ndarray:
    out = memory.empty(given.shape, np.float32, "out")
    kernel(activation, **how)((given.size // BLOCK,), (BLOCK,), (memory.array(given), out))
    return np.array(out)


@cache
def exact(activation: str) -> np.ndarray:
    return activated(values(), activation)


def units_off(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.abs(got - wanted) / np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)


def require_promised(activation: str, got: np.ndarray, every: int = 1) -> None:
    """Require a sample of results to have at most the promised error, and the literal formula's.

    With ``every`` = 1, the largest error must also be near the promised bound.
    """
    given, wanted = values()[::every], exact(activation)[::every]
    with np.errstate(over="ignore"):
        literal = ACTIVATIONS[activation].plain(given)
        units, plain = units_off(got, wanted), units_off(literal, wanted)
    upper = np.inf
    for least, bound, *_ in ACTIVATIONS[activation].bounds:
        within = (given > least) & (given <= upper)
        assert units[within].max() <= min(bound, plain[within].max() + 0.01), least
        assert every > 1 or units[within].max() > bound - 0.1, "the promised bound is too large"
        upper = least
    # Results beyond this bound are nearly 0.
    beyond = given <= upper
    assert (got[beyond] <= 0).all()
    assert (np.abs(got - wanted)[beyond] <= 6e-9).all()


@pytest.mark.costly
@pytest.mark.parametrize("front", ["source", "ptx"])
@pytest.mark.parametrize("activation", ROUNDED)
def test_kernel_errors_keep_their_bounds(activation, front):
    require_promised(activation, run(activation, values(), front=front))


@pytest.mark.costly
@pytest.mark.parametrize("off", [-2, -1, 1, 2])
@pytest.mark.parametrize("activation", ROUNDED)
def test_errors_with_inexact_chip_functions(activation, off):
    units, upper = units_off(run(activation, values(), off=off), exact(activation)), np.inf
    for least, *bounds in ACTIVATIONS[activation].bounds:
        within = (values() > least) & (values() <= upper)
        assert units[within].max() <= bounds[abs(off)], least
        upper = least


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_numpys_errors(activation):
    within = (values() > -88.72) | (activation != "silu")  # in the range of float32's exp
    units = units_off(activate(values().copy(), activation), exact(activation))
    assert units[within].max() <= ACTIVATIONS[activation].numpy_bound


def test_silu_rounds_like_its_formula():
    """silu's result has the same bits as its literal formula, for nearly all values."""
    with np.errstate(over="ignore"):
        plain = ACTIVATIONS["silu"].plain(values())
    assert (run("silu", values(), front="source") != plain).mean() < 2e-4


@pytest.mark.parametrize("front", ["source", "ptx"])
def test_non_finite_and_tiny_values(front):
    tiny = np.float32(1e-45)
    largest = np.finfo(np.float32).max
    given = np.zeros(BLOCK, np.float32)
    given[:10] = np.nan, -np.inf, np.inf, largest, -largest, -0.0, tiny * 4, -tiny * 4, -1000, -100
    for activation in ACTIVATIONS:
        got = run(activation, given, front=front)[:10]
        wanted = activated(given[:10], activation)
        np.testing.assert_allclose(got[:9], np.float32(wanted[:9]), rtol=1e-6, atol=0)
        np.testing.assert_allclose(got[9], wanted[9], rtol=1e-6, atol=1e-41)  # silu is -3.7e-42


@pytest.mark.parametrize("activation", ROUNDED)
def test_numpys_steps_take_little_memory(activation):
    """Eight threads may need this memory at once, in addition to the blocks of a pass."""
    values = np.linspace(-3, 3, 1 << 16, dtype=np.float32)
    tracemalloc.start()
    activate(values, activation)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


@pytest.mark.parametrize(("dtype", "least"), [("float32", -88.8), ("float64", -710)])
def test_silu_of_numpy_ends_as_documented(dtype, least):
    torch = pytest.importorskip("torch")
    values = np.array([least + 0.2, least, 2 * least, -np.inf, np.inf, np.nan], dtype)
    expected = torch.nn.functional.silu(torch.from_numpy(values)).numpy()
    got = activate(values.copy(), "silu")
    np.testing.assert_array_equal(np.signbit(got)[:3], np.signbit(expected)[:3])
    np.testing.assert_array_equal(got == 0, expected == 0)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
