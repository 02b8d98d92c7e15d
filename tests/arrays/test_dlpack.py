"""Arrays of other libraries are read without a copy, and results are returned as their kind."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvTypeError, arrays

DTYPES = ("float16", "bfloat16", "float32", "float64")
X = np.random.default_rng(0).integers(-3, 4, (2, 3, 7, 6))
W = np.random.default_rng(1).integers(-3, 4, (4, 3, 3, 2))


def torch_array(array: np.ndarray, dtype: str) -> Any:
    import torch

    return torch.from_numpy(array).to(getattr(torch, dtype))


def jax_array(array: np.ndarray, dtype: str) -> Any:
    import jax

    with jax.enable_x64(True):
        return jax.numpy.asarray(array, dtype)


def tensorflow_array(array: np.ndarray, dtype: str) -> Any:
    import tensorflow

    return tensorflow.cast(tensorflow.constant(array), dtype)


def numpy_array(array: np.ndarray, dtype: str) -> Any:
    return array.astype(arrays.numpy_dtype(dtype))


LIBRARIES = {
    "numpy": numpy_array,
    "torch": torch_array,
    "jax": jax_array,
    "tensorflow": tensorflow_array,
}


@pytest.fixture(params=LIBRARIES)
def library(request):
    """Return a function that makes arrays of a library; skip if it is not installed."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    if request.param == "jax":
        import jax

        with jax.enable_x64(True):  # else float64 becomes float32
            yield LIBRARIES[request.param]
    else:
        yield LIBRARIES[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_library_gets_its_own_kind_back(library, dtype):
    x, w = library(X, dtype), library(W, dtype)
    y = cupyconv.conv_forward(x, w, padding=1)
    expected = cupyconv.conv_forward(
        X.astype("float64"), W.astype("float64"), padding=1, impl="reference"
    )
    assert type(y) is np.ndarray
    assert y.dtype == arrays.numpy_dtype(dtype)
    back = cupyconv.as_kind_of(y, x)
    assert type(back) is type(x)
    assert back.dtype == x.dtype
    assert tuple(back.shape) == y.shape
    taken, _ = arrays.take("back", back)  # and in again
    np.testing.assert_array_equal(taken.astype("float64"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_memory_is_shared_in_both_directions(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch_array(X, dtype)
    taken, home = arrays.take("x", tensor)
    assert home is arrays.Home.CPU
    assert taken.ctypes.data == tensor.data_ptr()
    assert taken.dtype == arrays.numpy_dtype(dtype)
    y = cupyconv.conv_forward(tensor, torch_array(W, dtype))
    back = cupyconv.as_kind_of(y, tensor)
    assert back.data_ptr() == y.ctypes.data
    back.fill_(7)
    assert (y.astype("float32") == 7).all()
    out = torch.zeros(y.shape, dtype=tensor.dtype)
    assert cupyconv.conv_forward(tensor, torch_array(W, dtype), out=out) is out
    assert torch.count_nonzero(out) > 0


def test_strided_arrays_and_sizes_of_zero_keep_their_shape():
    torch = pytest.importorskip("torch")
    y = numpy_array(X, "bfloat16")[:, ::2, ::-1, 1:]
    back = cupyconv.as_kind_of(y, torch.zeros(1))  # a copy: PyTorch has no negative strides
    np.testing.assert_array_equal(back.float().numpy(), y.astype("float32"))
    part = y[:, :, ::-1]
    back = cupyconv.as_kind_of(part, torch.zeros(1))
    assert back.data_ptr() == part.ctypes.data
    np.testing.assert_array_equal(back.float().numpy(), part.astype("float32"))
    empty = cupyconv.as_kind_of(numpy_array(X, "bfloat16")[:0], torch.zeros(1))
    assert tuple(empty.shape) == (0, 3, 7, 6)


def test_any_library_of_the_array_api_standard_will_do():
    class Namespace:
        @staticmethod
        def from_dlpack(exporter):
            return Other(np.from_dlpack(exporter))

    class Other:
        def __init__(self, array):
            self.array, self.dtype = array, array.dtype

        def __array_namespace__(self):
            return Namespace

        def __dlpack__(self, **keywords):
            return self.array.__dlpack__(**keywords)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    x = Other(numpy_array(X, "float32"))
    y = cupyconv.conv_forward(x, numpy_array(W, "float32"))
    assert type(cupyconv.as_kind_of(y, x)) is Other


# -- what is not supported says so -----------------------------------------------------------------


def test_a_library_without_dlpack_is_named():
    with pytest.raises(ConvTypeError, match=r"support DLPack: got list.*Pass an array of"):
        cupyconv.as_kind_of(numpy_array(X, "float32"), [1.0])


def test_a_dtype_that_would_change_is_an_error():
    pytest.importorskip("jax")
    like = jax_array(X, "float32")
    with pytest.raises(ConvTypeError, match=r"float64 became float32.*enable float64"):
        cupyconv.as_kind_of(numpy_array(X, "float64"), like)


def test_arrays_without_numbers_yet_are_told_where_to_go():
    jax = pytest.importorskip("jax")
    w = numpy_array(W, "float32")
    with pytest.raises(ConvTypeError, match=r"Inside jax\.jit.*call cupyconv outside"):
        jax.jit(lambda x: cupyconv.conv_forward(x, w))(jax_array(X, "float32"))
    with pytest.raises(ConvTypeError, match=r"Inside jax\.jit.*call cupyconv outside"):
        jax.grad(lambda x: cupyconv.conv_forward(x, w).sum())(jax_array(X, "float32"))


def test_a_dask_array_is_told_of_its_own_functions():
    da = pytest.importorskip("dask.array")
    with pytest.raises(ConvTypeError, match=r"Call the functions of cupyconv\.dask"):
        cupyconv.conv_forward(da.ones((1, 3, 8, 8)), W)


class Exporter:
    """Object whose capsule a function returns."""

    def __init__(self, export: Callable[..., Any], device: int = 1, dtype: str = "float32") -> None:
        self.export, self.device, self.dtype = export, device, dtype

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, **keywords):
        return self.export(**keywords)


def test_a_broken_exporter_is_told():
    said = rf"^x of type {__name__}\.Exporter does not export its memory: .*no DLPack capsule"
    with pytest.raises(ConvTypeError, match=said):
        arrays.take("x", Exporter(lambda **_: object(), dtype="bfloat16"))


@pytest.mark.parametrize("kind", [1, 3], ids=["pageable", "pinned"])
def test_the_hosts_memory_is_taken_by_dlpack(kind):
    x = numpy_array(X, "float32")
    taken, home = arrays.take("x", Exporter(lambda **_: x.__dlpack__(), kind))
    assert home is arrays.Home.CPU
    assert np.shares_memory(taken, x)


def test_results_are_written_to_exported_memory():
    x, w = numpy_array(X, "float32"), numpy_array(W, "float32")
    expected = cupyconv.conv_forward(x, w)
    target = np.zeros_like(expected)
    out = Exporter(target.__dlpack__)
    assert cupyconv.conv_forward(Exporter(x.__dlpack__), Exporter(w.__dlpack__), out=out) is out
    np.testing.assert_array_equal(target, expected)


def test_memory_of_other_processors_is_refused_unread():
    def unreadable(**_):
        raise AssertionError("no device here can read this memory")

    with pytest.raises(ConvTypeError, match=r"^x must be a NumPy or CuPy array, or export DLPack"):
        arrays.take("x", Exporter(unreadable, 10))  # ROCm


@pytest.mark.parametrize("asked", [{}, {"max_version": (1, 0)}], ids=["old", "versioned"])
def test_bfloat16_comes_in_by_both_versions_of_dlpack(asked):
    """NumPy can only exchange bfloat16 memory as integers, so the capsule's dtype is changed."""
    given = numpy_array(X, "bfloat16")
    relabelled = arrays._Relabelled(given.view("uint16"), 4)
    taken, _ = arrays.take("x", Exporter(lambda **_: relabelled.__dlpack__(**asked), 1, "bfloat16"))
    assert taken.dtype == given.dtype
    assert np.shares_memory(taken, given)
    assert (taken == given).all()


def test_broadcast_arrays_are_returned_unchanged():
    """Only arrays with negative strides are copied."""
    y = np.lib.stride_tricks.as_strided(np.ones(1, "float32"), (2, 3), (0, 0))

    class Like:
        def __array_namespace__(self):
            return np

    given = cupyconv.as_kind_of(y, Like())
    assert given.strides == (0, 0)
    assert np.shares_memory(given, y)


def test_bfloat16_is_found_before_numpy_knows_it(monkeypatch):
    """NumPy does not know bfloat16 until ml_dtypes is imported."""
    find = np.dtype

    def dtype(name):
        if name == "bfloat16":
            raise TypeError(f"data type {name!r} not understood")
        return find(name)

    monkeypatch.setattr(np, "dtype", dtype)
    assert arrays.numpy_dtype.__wrapped__("bfloat16").itemsize == 2


def test_read_only_memory_is_copied_for_libraries_that_write():
    torch = pytest.importorskip("torch")
    source = np.arange(3, dtype="float32")
    source.flags.writeable = False
    given = cupyconv.as_kind_of(source, torch.zeros(1))
    given[0] = 5
    np.testing.assert_array_equal(source, np.arange(3))
