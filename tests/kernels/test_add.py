"""The argument ``add``: y = activation(conv + bias + add), on NumPy and in every kernel family."""

from __future__ import annotations

import tracemalloc
from itertools import product

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, Plan, arrays
from cupyconv.gpu import compiler, sources
from cupyconv.kernels.request import Epilogue
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import plan_of, ranked_candidates
from cupyconv.problem import PASSES
from tests import emulator, launches
from tests.activations import ACTIVATIONS
from tests.agreement import fits, require_equal
from tests.configurations import CASES, COLUMNS_CASES, in_formats, integer_data
from tests.cubins import no_spills
from tests.emulator import cases

KERNELS = list(cases.with_addend())


@pytest.mark.parametrize(("name", "run"), KERNELS, ids=[name for name, _ in KERNELS])
def test_kernels_are_exact_with_an_addend(name, run):
    run()


def numbers(problem: ConvProblem, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return small integers, or complex numbers with such parts."""
    drawn = np.random.default_rng(seed).integers(-3, 4, (2, *shape))
    values = drawn[0] + 1j * drawn[1] if problem.is_complex else drawn[0]
    return values.astype(arrays.numpy_dtype(problem.dtype))


def beside(array: np.ndarray) -> np.ndarray:
    """Return a copy whose address is one element beyond a multiple of 64 bytes."""
    memory = np.zeros(array.nbytes + 64 + array.itemsize, np.uint8)
    start = -memory.ctypes.data % 64 + array.itemsize
    moved = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    moved[...] = array
    return moved


MOVED = {
    "beside": beside,
    "transposed": lambda add: np.asfortranarray(add),
    "reversed": lambda add: np.ascontiguousarray(add[..., ::-1])[..., ::-1],
}


@pytest.mark.parametrize(("impl", "arch"), [("cuda-gather", "sm_80"), ("cuda-hopper", "sm_90")])
@pytest.mark.parametrize("kind", MOVED)
def test_kernels_take_an_addend_anywhere_in_memory(kind, impl, arch):
    layer = ConvProblem((1, 64, 5, 7), (72, 64, 3, 3), padding=1, dtype="float16")
    problem = in_formats(layer, "NHWC", "OHWI")
    x, w = numbers(problem, problem.input_shape, 0), numbers(problem, problem.filter_shape, 1)
    add = numbers(problem, problem.output_shape, 2)
    expected = cupyconv.conv_forward(x, w, add=add, impl="reference", **problem.keywords)
    for out in (None, np.zeros_like(add)[..., ::-1]):
        given = MOVED[kind](add)
        got = emulator.conv_forward(
            *(x, w), add=given, out=out, impl=impl, arch=arch, **problem.keywords
        )
        require_equal(got, expected, f"{impl} with a {kind} addend")


FORMATS = (("NCHW", "OIHW"), ("NHWC", "OHWI"))
REAL_LAYERS = [
    ConvProblem((8, 64, 28, 28), (64, 64, 3, 3), padding=1),
    ConvProblem((8, 3, 64, 64), (64, 3, 7, 7), stride=2, padding=3),
    ConvProblem((8, 32, 28, 28), (32, 1, 7, 7), groups=32, padding=3),
    ConvProblem((8, 64, 28, 28), (64, 64, 4, 4), stride=4),
]


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", compiler.ARCHITECTURES)
def test_kernels_with_an_addend_compile_without_spills(architecture):
    device, compiled = Device.of(architecture), set()
    for layer, formats, dtype in product(REAL_LAYERS, FORMATS, ("float16", "float32")):
        problem = in_formats(layer, *formats).replace(dtype=dtype)
        for pass_, impl in product(PASSES[:2], FAMILIES):
            if FAMILIES[impl].on_gpu and pass_ in fits(problem, impl, device, "tf32"):
                planned = plan_pass(Request(problem, pass_, device, "tf32"), impl)
                strides = Strides.contiguous(problem)
                epilogue = Epilogue("gelu", adds=True)
                for one in launches.prepare(planned, problem, strides, device, epilogue):
                    if dict(one.defines).get("ADD"):
                        _, log = compiler.compile_cubin(
                            sources.load(one.source), dict(one.defines), architecture
                        )
                        assert no_spills(log), f"{one.source} {one.defines}: {log}"
                        compiled.add(one.source)
    assert len(compiled) >= 7


# -- NumPy -----------------------------------------------------------------------------------------


ADDENDS = {
    "contiguous": lambda add: add,
    "transposed": lambda add: np.asarray(add, order="F"),
    "reversed": lambda add: np.ascontiguousarray(add[..., ::-1])[..., ::-1],
    "the_result": lambda add: add.copy(),
}
"""Memory layouts of an addend."""


def every_method(problem: ConvProblem, pass_: str) -> list[Plan]:
    """Return a plan of a pass for each method of NumPy's passes that computes it."""
    cpu = Device.of("cpu")
    others = [
        plan_pass(Request(problem, other, cpu), "numpy") for other in PASSES if other != pass_
    ]
    request = Request(problem, pass_, cpu)
    found = [plan_of(request, one) for one in ranked_candidates(request, "numpy")]
    return [Plan(problem, cpu, (one, *others)) for one in found]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("kind", ADDENDS)
def test_numpy_is_exact_with_bias_and_addend(kind, dtype):
    for number, layer in enumerate((*CASES, *COLUMNS_CASES)):
        problem = layer.problem.replace(dtype=dtype)
        if number % 2 and problem.spatial_rank == 2:
            problem = in_formats(problem, "NHWC", "HWIO")
        for pass_ in ("forward", "backprop_input"):
            activation = None if problem.is_complex or number % 3 == 0 else "relu"
            require_exact_on_numpy(problem, pass_, kind, activation)


def require_exact_on_numpy(problem, pass_, kind, activation):
    """Check every method of a pass; backprop_input is called as a transposed convolution."""
    options = dict(problem.keywords)
    call, given, shape = cupyconv.conv_forward, problem.input_shape, problem.output_shape
    if pass_ == "backprop_input":
        call, given, shape = cupyconv.conv_transpose, shape, given
        options["output_shape"] = shape
    x, w = numbers(problem, given, 0), numbers(problem, problem.filter_shape, 1)
    add = numbers(problem, shape, 2)
    bias = numbers(problem, (shape[problem.data_axes[1]],), 3)
    wide = np.complex128 if problem.is_complex else np.float64
    operands = (array.astype(wide) for array in (x, w, bias))
    expected = call(*operands, impl="reference", **options) + add.astype(wide)
    if activation:
        expected = np.maximum(expected, 0)
    for impl in ("reference", *every_method(problem, pass_)):
        addend = ADDENDS[kind](add)
        out = addend if kind == "the_result" else None
        got = call(x, w, bias, add=addend, activation=activation, impl=impl, out=out, **options)
        assert out is None or got is out
        require_equal(got, expected.astype(got.dtype), f"{pass_} of {problem} by {impl}")
        assert out is not None or (addend == add).all()


@pytest.mark.parametrize("impl", ["reference", "numpy"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_is_applied_after_bias_and_addend(impl, activation):
    generator = np.random.default_rng(0)
    x, w = generator.normal(size=(2, 3, 5, 4)), generator.normal(size=(4, 3, 2, 2))
    bias, add = generator.normal(size=4), generator.normal(size=(2, 4, 4, 3))
    plain = cupyconv.conv_forward(x, w, bias, impl="reference") + add
    one = np.ones((1, 1, 1))
    expected = cupyconv.conv_forward(
        plain.reshape(1, 1, -1), one, activation=activation, impl="reference"
    ).reshape(plain.shape)
    got = cupyconv.conv_forward(x, w, bias, add=add, activation=activation, impl=impl)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("impl", ["reference", "numpy"])
def test_sums_with_an_addend_are_rounded_once(impl):
    # float16 has steps of 2 from 2048 on; rounding 2049 before adding 1 would give 2048.
    x, w = np.array([[[2048, 1]]], np.float16), np.ones((1, 1, 2), np.float16)
    y = cupyconv.conv_forward(x, w, add=np.ones((1, 1, 1), np.float16), impl=impl)
    assert y.item() == 2050


def test_an_addend_may_be_broadcast():
    x, w = np.ones((1, 1, 3, 3)), np.ones((2, 1, 2, 2))
    add = np.broadcast_to(np.float64(5), (1, 2, 2, 2))
    assert (cupyconv.conv_forward(x, w, add=add) == 9).all()


def test_a_prepared_filter_takes_an_addend():
    problem = ConvProblem((1, 2, 4, 4), (3, 2, 3, 3))
    data = integer_data(problem)
    add = numbers(problem, problem.output_shape, 2)
    prepared = cupyconv.prepare(data.w, problem)
    got = cupyconv.conv_forward(data.x, prepared, add=add)
    assert (got == cupyconv.conv_forward(data.x, data.w) + add).all()


# -- errors ----------------------------------------------------------------------------------------

X, W = np.ones((1, 2, 6), np.float32), np.ones((3, 2, 3), np.float32)


@pytest.mark.parametrize("call", [cupyconv.conv_forward, cupyconv.conv_transpose])
def test_an_addend_of_another_shape_or_dtype_is_rejected(call):
    x = X if call is cupyconv.conv_forward else np.ones((1, 3, 6), np.float32)
    result = call(x, W)
    for add in (X, result[0].copy(), np.ones((), np.float32), result[:, :1].copy()):
        before = result.copy()
        with pytest.raises(
            ConvError, match=r"add must have the result's shape: add is .*the result is"
        ):
            call(x, W, add=add, out=result)
        assert (result == before).all()
    with pytest.raises(ConvTypeError, match="add"):
        call(x, W, add=result.astype(np.float64))
    with pytest.raises(ConvTypeError, match="add"):
        call(x, W, add=[1.0])


def test_an_addend_that_overlaps_the_result_in_part_is_rejected():
    memory = np.ones((1, 3, 5), np.float32)
    out, add = memory[..., :4], memory[..., 1:]
    with pytest.raises(ConvError, match="add must be out itself or share no memory with it"):
        cupyconv.conv_forward(X, W, add=add, out=out)
    with pytest.raises(ConvError, match="add must be out itself or share no memory with it"):
        cupyconv.conv_forward(X, W, add=out[..., ::-1], out=out)
    assert (memory == 1).all()
    expected = cupyconv.conv_forward(X, W) + 1
    assert (cupyconv.conv_forward(X, W, add=out[:], out=out) == expected).all()


def test_an_addend_may_share_memory_with_the_input():
    x, w = np.arange(6, dtype=np.float32).reshape(1, 1, 6), np.ones((1, 1, 1), np.float32)
    assert (cupyconv.conv_forward(x, w, add=x) == 2 * x).all()


def test_axes_of_size_1_may_have_any_stride():
    x, w = np.ones((2, 4, 1, 1), np.float32), np.ones((4, 4, 1, 1), np.float32)
    out = np.ones((2, 4, 1, 1), np.float32)
    cupyconv.conv_forward(x, w, add=out.reshape(2, 4)[:, :, None, None], out=out)
    assert (out == 5).all()


def test_only_w_may_be_a_prepared_filter():
    problem = ConvProblem((3, 3, 3, 3), (3, 3, 2, 2))
    x, w = (np.ones(shape, np.float32) for shape in (problem.input_shape, problem.filter_shape))
    prepared = cupyconv.prepare(w, problem)
    with pytest.raises(ConvTypeError, match="add must be a NumPy or CuPy array"):
        cupyconv.conv_forward(x, w, add=prepared)
    with pytest.raises(ConvTypeError, match="x must be a NumPy or CuPy array"):
        cupyconv.conv_forward(prepared, w)


@pytest.mark.parametrize("more", [{}, {"add": np.ones((2, 4, 4, 4), np.float32)}])
def test_remedies_are_offered_with_an_addend(more):
    x, w = np.ones((2, 3, 6, 6), np.float32), np.ones((4, 3, 7, 7), np.float32)
    with pytest.raises(ConvError, match="Pad by 1 more in total on each axis"):
        cupyconv.conv_forward(x, w, **more)


@pytest.mark.parametrize("aliased", [False, True])
def test_results_without_terms_take_little_memory(aliased):
    shape = (1, 32, 512, 512)
    x, w = np.ones((1, 4, 128, 128), np.float32), np.ones((4, 32, 1, 1), np.float32)
    out = np.ones(shape, np.float32)
    add = out if aliased else np.ones(shape, np.float32)
    options = {"stride": 4, "output_shape": shape, "add": add, "out": out}
    cupyconv.conv_transpose(x, w, **options)
    tracemalloc.start()
    try:
        cupyconv.conv_transpose(x, w, **options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < aliased * out.nbytes + 20e6


def test_gradients_take_no_addend():
    with pytest.raises(TypeError, match="add"):
        cupyconv.conv_backprop_input(X.shape, W, np.ones((1, 3, 4), np.float32), add=X)  # type: ignore
