"""The activations of the kernels' epilogues, compared with float64 value by value."""

from __future__ import annotations

import math
import tracemalloc
from functools import cache

import numpy as np
import pytest

from cupyconv.cpu.activations import activate
from cupyconv.gpu import sources
from cupyconv.kernels.request import ACTIVATIONS
from tests.emulator import EmulatedModule, build, memory
from tests.emulator.ptx.nvrtc import OPTIONS, compile_ptx

FILE = build.HOST_DIRECTORY.parent / "kernels" / "activations.cu"
BLOCK = 128

EXACT = {
    "relu": lambda v: v if v >= 0 else 0.0,
    "silu": lambda v: v / (1 + math.exp(-v)) if v > -700 else 0.0,
    "gelu": lambda v: v * math.erfc(-v / math.sqrt(2)) / 2,
}
"""Activations in double precision, without the cancellation of 1 + erf."""

PLAIN = {
    "silu": lambda v: v / (1 + np.exp(-v.astype(np.float64)).astype(np.float32)),
    "gelu": lambda v: v / 2 * (1 + _erf(v * np.float32(math.sqrt(0.5))).astype(np.float32)),
}
"""Literal formulas of the activations, in float32."""

_erf = np.vectorize(math.erf, otypes=[np.float64])

# Lower ends of ranges of values, each with three error bounds in units in the last place of the
# result.  The bounds apply if the chip's functions round to nearest, and if their errors are one
# unit and two units, which NVIDIA's manuals allow.
BOUNDS = {
    "silu": ((0, 1.5, 2.1, 2.7), (-88.72, 2.4, 4.3, 6.3)),
    "gelu": (
        *((0, 1.3, 2.1, 3.5), (-1, 2.3, 3.3, 4.4)),
        *((-3, 21.1, 21.8, 22.6), (-6, 135.1, 136.1, 138.1)),
    ),
}

WORST = (
    *(8.00055599, 0.691680372, 0.691900015, 0.693124354),
    *(-16.6781521, -16.6783352, -16.680687, -16.6811695, -88.72),
    *(0.211826444, 0.0596616045, 1.12054977e-07, -0.340774596, -0.671019971, -0.968791187),
    *(-0.997223198, -0.998111188),
    *(-2.88841534, -2.90484357, -2.90646267, -5.84796715, -5.99706268),
)
"""Inputs with the largest errors, found by trying all float32 numbers; -0.998111188 is the input
with the largest error of gelu's literal formula."""


@cache
def values() -> np.ndarray:
    """Return every finite number of both 16-bit types, and float32 numbers that fill the blocks."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    halves = bits.astype(np.uint16).view(np.float16).astype(np.float32)
    generator = np.random.default_rng(0)
    drawn = [generator.uniform(-reach, reach, 30000).astype(np.float32) for reach in (1, 6, 90)]
    worst = np.array(WORST, np.float32)
    every = np.concatenate([halves, (bits << 16).view(np.float32), *drawn, worst])
    kept = np.unique(every[np.isfinite(every)])
    return kept[: kept.size // BLOCK * BLOCK]  # without the largest few


@cache
def kernel(activation: str, off: int = 0, front: str = "ptx"):
    defines = {"ACTIVATION": str(ACTIVATIONS.index(activation)), "OFF": str(off)}
    if front == "source":
        folders = (build.INCLUDE_DIRECTORY,)
        return EmulatedModule(FILE, defines, folders, checked=False).get_function("activations")
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    flags = ["-arch=compute_90", *OPTIONS, *(f"-D{name}={one}" for name, one in defines.items())]
    headers = dict(sources.load("conv_forward.cu").headers)
    text = compile_ptx(FILE.read_text(), FILE.name, headers, flags)
    return EmulatedModule.from_ptx(text, "activations", checked=False).get_function("activations")


def activated(activation: str, given: np.ndarray, **how) -> np.ndarray:
    out = memory.empty(given.shape, np.float32, "out")
    kernel(activation, **how)((given.size // BLOCK,), (BLOCK,), (memory.array(given), out))
    return np.array(out)


@cache
def exact(activation: str) -> np.ndarray:
    return np.array([EXACT[activation](v) for v in values().tolist()])


def units_off(got: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    return np.abs(got - wanted) / np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)


def require_promised(activation: str, got: np.ndarray, every: int = 1) -> None:
    """Require a sample of results to have at most the promised error, and the literal formula's.

    With ``every`` = 1, the largest error must also be near the promised bound.
    """
    given, wanted = values()[::every], exact(activation)[::every]
    with np.errstate(over="ignore"):
        units, plain = units_off(got, wanted), units_off(PLAIN[activation](given), wanted)
    upper = np.inf
    for least, bound, *_ in BOUNDS[activation]:
        within = (given > least) & (given <= upper)
        assert units[within].max() <= min(bound, plain[within].max() + 0.01), least
        assert every > 1 or units[within].max() > bound - 0.1, "the promised bound is too large"
        upper = least
    # Results beyond this bound are nearly 0.
    beyond = given <= upper
    assert (got[beyond] <= 0).all()
    assert (np.abs(got - wanted)[beyond] <= 6e-9).all()


@pytest.mark.parametrize("front", ["source", "ptx"])
@pytest.mark.parametrize("activation", BOUNDS)
def test_errors_are_those_that_the_kernels_promise(activation, front):
    require_promised(activation, activated(activation, values(), front=front))


@pytest.mark.parametrize("off", [-2, -1, 1, 2])
@pytest.mark.parametrize("activation", BOUNDS)
def test_errors_where_the_chips_functions_are_off(activation, off):
    units, upper = units_off(activated(activation, values(), off=off), exact(activation)), np.inf
    for least, *bounds in BOUNDS[activation]:
        within = (values() > least) & (values() <= upper)
        assert units[within].max() <= bounds[abs(off)], least
        upper = least


@pytest.mark.parametrize(("activation", "bound"), [("silu", 3.1), ("gelu", 0.6)])
def test_numpys_errors(activation, bound):
    within = (values() > -88.72) | (activation == "gelu")  # in the range of float32's exp
    units = units_off(activate(values().copy(), activation), exact(activation))
    assert units[within].max() <= bound


def test_silu_is_rounded_as_the_formula_is():
    """silu's result has the same bits as its literal formula, for nearly all values."""
    with np.errstate(over="ignore"):
        plain = PLAIN["silu"](values())
    assert (activated("silu", values(), front="source") != plain).mean() < 2e-4


@pytest.mark.parametrize("front", ["source", "ptx"])
def test_what_is_not_finite_and_what_is_tiny(front):
    tiny = np.float32(1e-45)
    largest = np.finfo(np.float32).max
    given = np.zeros(BLOCK, np.float32)
    given[:10] = np.nan, -np.inf, np.inf, largest, -largest, -0.0, tiny * 4, -tiny * 4, -1000, -100
    for activation, at_minus_infinity in (("relu", 0), ("silu", np.nan), ("gelu", np.nan)):
        got = activated(activation, given, front=front)[:10]
        part = 1 if activation == "relu" else 0.5
        below = 0 if activation == "relu" else -tiny * 2
        wanted = [np.nan, at_minus_infinity, np.inf, largest, 0, 0, tiny * 4 * part, below, 0, 0]
        np.testing.assert_array_equal(got, np.float32(wanted))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
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
