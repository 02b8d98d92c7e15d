"""Complex numbers: exact on Gaussian integers, and compared with PyTorch and JAX."""

import itertools
import tracemalloc

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError
from cupyconv.planning import Device
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES, REAL_PART
from tests import agreement, emulator
from tests.agreement import fits, wide_definition
from tests.configurations import (
    CASES,
    FAMILY_CASES,
    Data,
    all_formats,
    integer_data,
    random_problems,
)
from tests.cpu import test_cpu

DTYPES = tuple(REAL_PART)
IMPLEMENTATIONS = ("reference", "numpy")


def require_exact(api, problem, impl="auto", passes=PASSES, **more):
    data = integer_data(problem)
    for pass_ in passes:
        got = agreement.compute(api, pass_, problem, data, impl=impl, **more)
        expected = wide_definition(problem, pass_, data)
        assert got.dtype == problem.dtype
        np.testing.assert_array_equal(got, expected, f"{pass_} of {problem} by {impl}")


@pytest.mark.costly
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_passes_are_exact_on_gaussian_integers(impl, dtype):
    for case in (*CASES, *FAMILY_CASES[::3]):
        require_exact(cupyconv, case.problem.replace(dtype=dtype), impl)
    for problem in random_problems(80, seed=3):
        require_exact(cupyconv, problem.replace(dtype=dtype), impl)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_may_be_odd_multiples_of_half_a_number(dtype):
    """Complex numbers need only the alignment of their parts, for example in records."""
    for problem in (test_cpu.DEPTHWISE, test_cpu.DENSE):
        small = problem.replace(input_shape=(2, 40, 7, 6), dtype=dtype)
        for problem in (small, *test_cpu.channels_last(small)):
            data = integer_data(problem)
            in_records = Data(*map(among_others, vars(data).values()))
            for pass_, method in test_cpu.methods(problem):
                expected = wide_definition(problem, pass_, data)
                out = among_others(np.full(expected.shape, 3, dtype))
                impl = test_cpu.by_method(problem, pass_, method)
                agreement.compute(cupyconv, pass_, problem, in_records, impl=impl, out=out)
                np.testing.assert_array_equal(out, expected, f"{pass_} by {method}")
            layout = problem.data_format
            db = among_others(np.full(problem.bias_shape, 3, dtype))
            cupyconv.conv_backprop_bias(in_records.dy, data_format=layout, out=db)
            expected = cupyconv.conv_backprop_bias(data.dy, data_format=layout)
            np.testing.assert_array_equal(db, expected)


def among_others(numbers):
    """Return the same numbers, with each row in a record that has one more real number."""
    row = ("row", numbers.dtype, numbers.shape[-1:])
    records = np.zeros(numbers.shape[:-1], [row, ("other", numbers.real.dtype)])
    records["row"] = numbers
    return records["row"]


# -- other libraries -------------------------------------------------------------------------------

LAYERS = [
    ((2, 4, 9), (6, 2, 3), {"stride": 2, "padding": 1, "groups": 2}),
    ((2, 4, 7, 6), (6, 4, 3, 2), {"dilation": 2, "padding": ((2, 2), (1, 1))}),
    ((3, 5, 8, 8), (5, 1, 3, 3), {"groups": 5, "stride": (2, 1)}),
    ((1, 2, 4, 5, 4), (3, 2, 2, 3, 2), {"stride": (1, 2, 2)}),
]


def random_operands(x, w, rules, dtype):
    numbers = np.random.default_rng(5)
    problem = ConvProblem(x, w, dtype=dtype, **rules)
    return problem, [
        (numbers.standard_normal(shape) + 1j * numbers.standard_normal(shape)).astype(dtype)
        for shape in (x, w, problem.output_shape, problem.bias_shape)
    ]


BOUNDS = {"complex64": 3e-6, "complex128": 5e-15}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("x", "w", "rules"), LAYERS)
def test_passes_match_pytorch(x, w, rules, dtype):
    torch = pytest.importorskip("torch")
    problem, (x, w, dy, b) = random_operands(x, w, rules, dtype)
    leaves = [torch.from_numpy(a).to(torch.complex128).requires_grad_() for a in (x, w, b)]
    rules = {**rules, "padding": tuple(before for before, _ in problem.padding)}
    conv = getattr(torch.nn.functional, f"conv{problem.spatial_rank}d")
    y = conv(*leaves, **rules)
    expected = [y, *torch.autograd.grad(y, leaves, torch.from_numpy(dy).to(y.dtype))]
    arguments = problem.keywords
    got = [
        cupyconv.conv_forward(x, w, b, **arguments),
        *cupyconv.conv_backward(x, w, dy, **arguments),
    ]
    for mine, their in zip(got, expected, strict=True):
        theirs = their.detach().numpy()
        assert mine.dtype == dtype
        assert np.abs(mine - theirs).max() < BOUNDS[dtype] * np.abs(theirs).max()


@pytest.mark.parametrize(("x", "w", "rules"), LAYERS)
def test_gradients_are_the_conjugates_of_jaxs(x, w, rules):
    jax = pytest.importorskip("jax")
    problem, (x, w, dy, _) = random_operands(x, w, rules, "complex64")
    names = "DHW"[3 - problem.spatial_rank :]

    def convolution(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            window_strides=problem.stride,
            padding=problem.padding,
            rhs_dilation=problem.dilation,
            feature_group_count=problem.groups,
            dimension_numbers=(f"NC{names}", f"OI{names}", f"NC{names}"),
        )

    y, backward = jax.vjp(convolution, x, w)
    ours = cupyconv.conv_forward(x, w, **problem.keywords)
    assert np.abs(ours - y).max() < 1e-5 * np.abs(y).max()
    dx, dw = backward(dy.conj())
    grads = cupyconv.conv_backward(x, w, dy, needs=("input", "filter"), **problem.keywords)
    for mine, theirs in ((grads.dx, dx), (grads.dw, dw)):
        assert np.abs(mine - np.conj(theirs)).max() < 1e-5 * np.abs(mine).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposed_convolution_does_not_conjugate(dtype):
    torch = pytest.importorskip("torch")
    for groups, stride, out in itertools.product((1, 2), (1, 2), (False, True)):
        problem = ConvProblem(
            (2, 4, 6, 7), (6, 4 // groups, 3, 2), groups=groups, stride=stride, dtype=dtype
        )
        data = integer_data(problem)
        bias = data.x[0, :, 0, 0]
        x, w, b = (torch.from_numpy(np.ascontiguousarray(a)) for a in (data.dy, data.w, bias))
        conv = torch.nn.functional.conv_transpose2d
        expected = conv(x, w, b, stride=stride, groups=groups).numpy()
        result = np.empty_like(expected) if out else None
        got = cupyconv.conv_transpose(
            data.dy, data.w, bias, stride=stride, groups=groups, out=result
        )
        np.testing.assert_array_equal(got, expected)


def test_transposed_convolution_does_not_copy_the_filter():
    w, x = np.ones((1024, 1024, 3, 3), np.complex64), np.ones((1, 1024, 2, 2), np.complex64)
    out = np.empty_like(x)
    tracemalloc.start()
    cupyconv.conv_transpose(x, w, padding=1, out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert w.nbytes > 64_000_000 >= peak


def test_adjoint_identity_holds():
    """<conv(x, w), dy> = <x, dx> = <w, dw>, with an inner product that conjugates one side."""
    for problem in random_problems(40, seed=8):
        problem = problem.replace(dtype="complex128")
        data = integer_data(problem)
        arguments = problem.keywords
        y = cupyconv.conv_forward(data.x, data.w, **arguments)
        grads = cupyconv.conv_backward(data.x, data.w, data.dy, **arguments)
        inner = np.vdot(y, data.dy)
        assert inner == np.vdot(data.x, grads.dx) == np.vdot(data.w, grads.dw)
        axes = tuple(axis for axis in range(y.ndim) if axis != problem.data_axes[1])
        np.testing.assert_array_equal(grads.db, data.dy.sum(axis=axes))


# -- accuracy --------------------------------------------------------------------------------------


def test_huge_imaginary_part_keeps_the_real_part_exact():
    """The filter is real, so that imaginary parts do not contribute to real parts."""
    x = np.array([[[3 + 1e30j, 2]]], "complex64")
    w = np.array([[[1 + 0j]]], "complex64")
    for impl in IMPLEMENTATIONS:
        y = cupyconv.conv_forward(x, w, impl=impl)
        np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_nan_and_infinity_reach_only_windows_that_read_them(impl):
    problem = ConvProblem((1, 2, 7, 7), (3, 2, 3, 3), stride=2, padding=1, dtype="complex64")
    data = integer_data(problem)
    clean = cupyconv.conv_forward(data.x, data.w, impl=impl, **problem.keywords)
    for special in (complex(np.nan, 0), complex(0, np.inf), complex(np.inf, np.nan)):
        data.x[0, 1, 4, 4] = special
        y = cupyconv.conv_forward(data.x, data.w, impl=impl, **problem.keywords)
        reads = np.zeros((4, 4), bool)
        reads[2, 2] = True
        assert (~np.isfinite(y[..., reads])).all()
        np.testing.assert_array_equal(y[..., ~reads], clean[..., ~reads])


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_transpose_kernels_accept_complex_numbers(dtype):
    problem = ConvProblem((2, 4, 5, 6), (6, 2, 3, 2), groups=2, stride=2, dtype=dtype)
    data = integer_data(problem)
    np.testing.assert_array_equal(
        emulator.conv_backprop_bias(data.dy), cupyconv.conv_backprop_bias(data.dy)
    )
    bias = np.ascontiguousarray(data.x[0, :, 0, 0])
    given = {"output_shape": problem.input_shape, **problem.keywords}
    np.testing.assert_array_equal(
        emulator.conv_transpose(data.dy, data.w, bias, **given),
        cupyconv.conv_transpose(data.dy, data.w, bias, **given),
    )


def test_kernels_accept_views_and_reversed_filters():
    numbers = np.random.default_rng(2)
    whole = (numbers.integers(-3, 4, (4, 8, 9, 9, 2)) * 1.0).astype("float32")
    x = whole.view("complex64")[::2, 1::2, ::-1, 1:, 0]
    w = (numbers.integers(-3, 4, (3, 4, 3, 3)) * (1 - 2j)).astype("complex64")[..., ::-1]
    y = cupyconv.conv_forward(x, w)
    np.testing.assert_array_equal(emulator.conv_forward(x, w), y)
    np.testing.assert_array_equal(emulator.conv_transpose(y, w), cupyconv.conv_transpose(y, w))


@pytest.mark.costly
@pytest.mark.parametrize("source", ["cuda", "ptx"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_accept_numbers_aligned_to_half_their_size(dtype, source):
    for problem in all_formats(ConvProblem((2, 4, 5, 6), (6, 2, 3, 2), groups=2, dtype=dtype))[::3]:
        data = Data(*map(between_two, vars(integer_data(problem)).values()))
        with emulator.settings(source=source):
            for pass_ in PASSES:
                expected = wide_definition(problem, pass_, data)
                out = between_two(np.full(expected.shape, 3, dtype))
                agreement.compute(emulator, pass_, problem, data, out=out)
                np.testing.assert_array_equal(out, expected, pass_)
            layout = problem.data_format
            db = between_two(np.full(problem.bias_shape, 3, dtype))
            emulator.conv_backprop_bias(data.dy, data_format=layout, out=db)
        np.testing.assert_array_equal(db, cupyconv.conv_backprop_bias(data.dy, data_format=layout))


def between_two(numbers):
    """Return the same numbers at an address that is aligned to half their size only."""
    parts = np.zeros(2 * numbers.size + 4, numbers.real.dtype)
    start = next(at for at in range(4) if parts[at:].ctypes.data % 16 == parts.itemsize)
    there = parts[start:][: 2 * numbers.size].view(numbers.dtype).reshape(numbers.shape)
    there[...] = numbers
    return there


def test_complex_layers_are_planned_for_cuda_generic_only():
    problem = ConvProblem((8, 64, 28, 28), (64, 64, 3, 3), padding=1)
    depthwise = ConvProblem((8, 64, 28, 28), (64, 1, 3, 3), padding=1, groups=64)
    for layer, dtype, device in itertools.product(
        (problem, depthwise), DTYPES, ("sm_75", "sm_80", "sm_90a")
    ):
        planned = cupyconv.plan(layer.replace(dtype=dtype), device)
        assert {one.implementation for one in planned} == {"cuda-generic"}
        assert type(planned).from_json(planned.to_json()) == planned
        taking = [
            name
            for name in FAMILIES
            if fits(layer.replace(dtype=dtype), name, Device.of(device), "tf32")
        ]
        assert [name for name in taking if name.startswith("cuda")] == ["cuda-generic"]


# -- counts and errors -----------------------------------------------------------------------------


def test_complex_multiply_add_counts_as_eight_operations():
    real, imaginary = (
        ConvProblem((1, 2, 5), (3, 2, 2), dtype=dtype) for dtype in ("float32", "complex64")
    )
    assert imaginary.flops == 4 * real.flops
    assert imaginary.useful_flops == 4 * real.useful_flops
    assert imaginary.bytes == 2 * real.bytes


def test_activations_and_mixed_dtypes_are_rejected():
    x, w = np.ones((1, 1, 4), "complex64"), np.ones((1, 1, 2), "complex64")
    for call in (cupyconv.conv_forward, cupyconv.conv_transpose):
        with pytest.raises(ConvError, match=r"must be applied to real numbers.*numpy\.abs"):
            call(x, w, activation="relu")
    with pytest.raises(ConvTypeError, match="x is complex64, w is float32"):
        cupyconv.conv_forward(x, w.real.copy())
