"""Programs written for CuPy 13's cudnn module: sigpy's functions with one changed import."""

import itertools
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

LOST, REPLACED = "from cupy import cudnn", "from cupyconv import cudnn"


@pytest.fixture(scope="module")
def conv():
    """Load sigpy.conv as with cuDNN, but with the import from cupyconv."""
    sigpy = pytest.importorskip("sigpy")
    text = Path(sigpy.conv.__file__).read_text(encoding="utf-8")
    assert text.count(LOST) == 1
    module = ModuleType("conv_of_cupyconv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sigpy.config, "cudnn_enabled", True)
        exec(compile(text.replace(LOST, REPLACED), sigpy.conv.__file__, "exec"), vars(module))
    return module


GRID = list(
    itertools.product(
        (1, 2, 3),  # axes
        ("full", "valid"),
        (1, 2, 3),  # stride
        (False, True),  # several channels
        ((), (2,), (3, 2)),  # batch
    )
)
DTYPES = ("float32", "float64", "complex64", "complex128")


def case(axes, mode, stride, multi_channel, batch, dtype):
    """Return data and filters of Gaussian integers, keywords, and a function for more tensors."""
    numbers = np.random.default_rng(3)

    def integers(shape):
        values = numbers.integers(-4, 5, shape).astype(dtype)
        if values.dtype.kind == "c":
            values.imag = numbers.integers(-4, 5, shape)
        return values

    data = integers((*batch, *[3] * multi_channel, *(7, 6, 5)[:axes]))
    filters = integers((*[2, 3] * multi_channel, *(3, 2, 4)[:axes]))
    keywords = {
        "mode": mode,
        "strides": None if stride == 1 else (stride,) * axes,
        "multi_channel": multi_channel,
    }
    return data, filters, keywords, integers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_sigpys_gpu_functions_match_its_cpu_functions(conv, axes, dtype):
    tried = 0
    for one in GRID:
        if one[0] != axes:
            continue
        data, filters, keywords, integers = case(*one, dtype)
        expected = conv._convolve(data, filters, **keywords)
        output = integers(expected.shape)
        compared = {
            "convolve": ((data, filters), expected),
            "data_adjoint": (
                (output, filters, data.shape),
                conv._convolve_data_adjoint(output, filters, data.shape, **keywords),
            ),
            "filter_adjoint": (
                (output, data, filters.shape),
                conv._convolve_filter_adjoint(output, data, filters.shape, **keywords),
            ),
        }
        for name, (given, expected) in compared.items():
            ours = on_the_gpu(conv, name, given, keywords)
            assert ours.dtype == data.dtype
            # sigpy uses an FFT if that is faster; cupyconv's results are exact.
            np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-3)
            whole = np.round(ours.real) + 1j * np.round(ours.imag)
            np.testing.assert_array_equal(ours, whole)
            tried += 1
    assert tried == 3 * 36


def on_the_gpu(conv, name, given, keywords):
    """Call sigpy's function for GPU arrays as its public functions do."""
    function = getattr(conv, {"convolve": "_convolve_cuda"}.get(name, f"_convolve_{name}_cuda"))
    first, second, *rest = given
    if first.dtype.kind == "f":
        return function(first, second, *rest, **keywords)
    # sigpy's public adjoint functions conjugate this argument.
    second = second if name == "convolve" else second.conj()
    return conv._complex(function, first, second, *rest, **keywords)
