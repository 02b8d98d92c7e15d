"""CuPy's own kernels on the emulator: supported kinds, compared with NumPy, and unsupported ones.

A program may use the listed kinds beside this library; unsupported functions raise.
"""

import cupy
import numpy as np
import pytest

from cupyconv import arrays

DTYPES = ("bool", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
DTYPES += ("complex64", "complex128")

X = np.arange(24).reshape(2, 3, 4) % 7 - 3


def put(array):
    """Return a copy with one corner assigned from another."""
    array = array.copy()
    array[1, ::2, ::-1] = array[0, ::2]
    return array


def scattered(xp, x):
    x = x.copy()
    xp.add.at(x, (xp.asarray([0, 0, 1]),), 1)
    return x


KINDS = {
    "copies": lambda xp, x: x.copy(),
    "strided copies": lambda xp, x: xp.ascontiguousarray(x[::-1, :, ::2].transpose(2, 0, 1)),
    "assignments": lambda xp, x: put(x),
    "fills": lambda xp, x: xp.full((3, 5), 2, x.dtype),
    "ranges": lambda xp, x: xp.arange(3, 17, 2, dtype=x.dtype),
    "arithmetic": lambda xp, x: x * 2 - x / 4 + (x + 1) ** 2,
    "comparisons": lambda xp, x: (x > 0) | (x == -3) & ~(x <= 1),
    "choices": lambda xp, x: xp.where(x > 0, x, -x),
    "bounds": lambda xp, x: xp.maximum(xp.clip(x, -1, 2), xp.sign(x)),
    "functions": lambda xp, x: xp.floor(xp.sqrt(abs(x)) * 4 + xp.exp2(x)),
    "sums": lambda xp, x: x.sum(axis=(0, 2)),
    "products": lambda xp, x: (x + 4).prod(axis=1),
    "extremes": lambda xp, x: xp.stack([x.max(axis=0), x.min(axis=0)]),
    "places of extremes": lambda xp, x: x.argmax(axis=2),
    "tests": lambda xp, x: xp.stack([(x > 2).any(axis=0), (x < 9).all(axis=0)]),
    "means": lambda xp, x: x.mean(axis=1),
    "running sums": lambda xp, x: xp.cumsum(x),
    "indices": lambda xp, x: x[:, xp.asarray([2, 0])],
    "masks": lambda xp, x: x[x > 0],
    "places": lambda xp, x: xp.stack(xp.nonzero(x)),
    "scatters": scattered,
    "joined": lambda xp, x: xp.concatenate([x, x[:1]]),
    "padded": lambda xp, x: xp.pad(x, 1),
    "rolled": lambda xp, x: xp.roll(x, 2, axis=2),
    "counts": lambda xp, x: xp.bincount((x + 3).astype(int).ravel()),
    "norms": lambda xp, x: xp.round(xp.linalg.norm(x) ** 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_kind_matches_numpy(kind):
    expected = KINDS[kind](np, X.astype("float32"))
    result = KINDS[kind](cupy, cupy.asarray(X, "float32"))
    assert isinstance(result, cupy.ndarray)
    assert result.shape == expected.shape
    np.testing.assert_allclose(cupy.asnumpy(result), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_copies_and_sums_match_numpy(dtype):
    x = X.astype(arrays.numpy_dtype(dtype))
    on_device = cupy.asarray(x)
    np.testing.assert_array_equal(cupy.asnumpy(on_device[::-1, :, ::-2]), x[::-1, :, ::-2])
    np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(X).astype(x.dtype)), x)
    np.testing.assert_array_equal(
        cupy.asnumpy(on_device.astype("complex128")), x.astype("complex128")
    )
    np.testing.assert_array_equal(cupy.asnumpy(on_device == on_device[0]), x == x[0])
    if dtype != "bfloat16":  # CuPy cannot sum bfloat16
        np.testing.assert_array_equal(cupy.asnumpy(on_device.sum(axis=1)), x.sum(axis=1))
    if x.dtype.kind == "c":
        np.testing.assert_array_equal(cupy.asnumpy((on_device * 1j).conj()), (x * 1j).conj())


def test_user_kernels_run():
    x = cupy.asarray(X, "float32")
    double = cupy.ElementwiseKernel("T a", "T b", "b = 2 * a", "double_")
    total = cupy.ReductionKernel("T a", "T b", "a * a", "a + b", "b = a", "0", "squares")
    source = 'extern "C" __global__ void up(float* x) { x[threadIdx.x] += 1; }'
    assert (double(x) == x * 2).all()
    assert float(total(x)) == (X**2).sum()
    cupy.RawKernel(source, "up")((1,), (X.size,), (x,))
    np.testing.assert_array_equal(cupy.asnumpy(x), X + 1)


REFUSED = {
    "random numbers of the Generator": lambda x: cupy.random.default_rng(0).random(4),
    "integers of the Generator": lambda x: cupy.random.default_rng(0).integers(0, 9, 4),
    "random numbers of cuRAND": lambda x: cupy.random.rand(4),
    "normal numbers of cuRAND": lambda x: cupy.random.RandomState(1).standard_normal(4),
    "permutations": lambda x: cupy.random.permutation(5),
    "sorting by Thrust": cupy.sort,
    "sorted places by Thrust": cupy.argsort,
    "different values by Thrust": cupy.unique,
    "products of cuBLAS": lambda x: x @ x.T,
    "transforms of cuFFT": cupy.fft.fft,
    "decompositions of cuSOLVER": cupy.linalg.svd,
}


@pytest.mark.parametrize("what", REFUSED)
def test_unsupported_functions_raise(what):
    """Each needs an NVIDIA library, or a kernel that CuPy's wheel has as machine code."""
    before = np.arange(12.0, dtype="float32").reshape(3, 4)
    x = cupy.asarray(before)
    with pytest.raises((NotImplementedError, RuntimeError, ImportError)):
        REFUSED[what](x)
    np.testing.assert_array_equal(cupy.asnumpy(x), before)
