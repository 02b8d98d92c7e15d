"""Complex numbers in the other interfaces: raw_ops, ONNX, Dask and the command line."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, operations, raw_ops
from cupyconv import onnx as co
from tests.command import refused, run, said

DTYPES = ("complex64", "complex128")
LAYER = ["--input=2x4x8x9", "--filter=6x2x3x3", "--groups=2", "--stride=2", "--padding=same"]
RULES = {"groups": 2, "stride": 2, "padding": "same"}


@pytest.fixture(autouse=True)
def _no_warnings():
    """Turn warnings into errors, such as NumPy's about a discarded imaginary part."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def gaussian(*shape, seed=0, dtype="complex64"):
    numbers = np.random.default_rng(seed)
    return (numbers.integers(-3, 4, shape) + 1j * numbers.integers(-3, 4, shape)).astype(dtype)


def test_raw_ops_accept_complex_numbers():
    x, w = gaussian(2, 7, 8, 4), gaussian(3, 2, 4, 6, seed=1)
    rules = {"stride": (2, 1), "padding": "same", "data_format": "NHWC"}
    words = {"strides": [1, 2, 1, 1], "padding": "SAME"}
    y = cupyconv.conv_forward(x, w, **rules)
    dy = gaussian(*y.shape, seed=2)
    np.testing.assert_array_equal(raw_ops.Conv2D(input=x, filter=w, **words), y)
    np.testing.assert_array_equal(
        raw_ops.Conv2DBackpropInput(input_sizes=x.shape, filter=w, out_backprop=dy, **words),
        cupyconv.conv_backprop_input(x.shape, w, dy, **rules),
    )
    depthwise = gaussian(3, 3, 4, 2, seed=3)
    y = raw_ops.DepthwiseConv2dNative(input=x, filter=depthwise, **words)
    parts = [
        raw_ops.DepthwiseConv2dNative(input=a.copy(), filter=b.copy(), **words)
        for a in (x.real, x.imag)
        for b in (depthwise.real, depthwise.imag)
    ]
    np.testing.assert_array_equal(y, parts[0] - parts[3] + 1j * (parts[1] + parts[2]))


def test_onnx_functions_accept_complex_numbers():
    x, w, b = gaussian(2, 4, 7), gaussian(4, 3, 3, seed=1), gaussian(3, seed=2)
    y = co.conv_transpose(x, w, b, strides=[2], output_padding=[1], pads=[1, 1])
    expected = cupyconv.conv_transpose(x, w, b, stride=2, output_padding=1, padding=1)
    np.testing.assert_array_equal(y, expected)
    v = gaussian(5, 4, 3, seed=3)
    np.testing.assert_array_equal(co.conv(x, v, strides=[2]), cupyconv.conv_forward(x, v, stride=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dask_functions_accept_complex_numbers(dtype):
    da = pytest.importorskip("dask.array")
    import cupyconv.dask as cd

    x, w = gaussian(3, 4, 12, 11, dtype=dtype), gaussian(6, 2, 3, 3, seed=1, dtype=dtype)
    b = gaussian(6, seed=2, dtype=dtype)
    y = cupyconv.conv_forward(x, w, b, **RULES)
    dy = gaussian(*y.shape, seed=3, dtype=dtype)
    lazy = [da.from_array(a, chunks=tuple(max(n // 2, 1) for n in a.shape)) for a in (x, dy)]
    results = cd.compute(
        cd.conv_forward(lazy[0], w, b, **RULES),
        cd.conv_backprop_input(x.shape, w, lazy[1], **RULES),
        cd.conv_backprop_filter(lazy[0], w.shape, lazy[1], **RULES),
        cd.conv_backprop_bias(lazy[1]),
    )
    expected = (y, *cupyconv.conv_backward(x, w, dy, **RULES))
    for got, whole in zip(results, expected, strict=True):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grads_command_checks_complex_gradients(dtype, tmp_path):
    target = tmp_path / "results.npz"
    assert dtype in said("grads", *LAYER, "--dtype", dtype, "--save", target, "--json")
    with np.load(target) as file:
        saved = dict(file)
    assert {array.dtype.name for array in saved.values()} == {dtype}
    dx = cupyconv.conv_backprop_input(saved["x"].shape, saved["w"], saved["dy"], **RULES)
    np.testing.assert_array_equal(saved["dx"], dx)
    files = [word for name in ("x", "w", "dy") for word in (f"--{name}", f"{target}:{name}")]
    again = said("grads", *files, *LAYER[2:])
    assert dtype in again
    assert "8 checks, 0 failed" in again
    assert "the real part of the inner product <y,dy>" in " ".join(again.split())
    error = refused("grads", *files, *LAYER[2:], "--dtype", "float32")
    assert "and float32 has no imaginary part" in error
    words = ["--element", "dF[0,0,0,0]", *files[:2]]
    error = refused("explain", *LAYER, *words)
    assert f"x is {dtype}, and float32 has no imaginary part" in error
    said("explain", *LAYER, *words, "--dtype", dtype)


def test_wrong_complex_gradient_fails_its_checks(monkeypatch):
    right = operations.conv_backprop_filter

    def unconjugated(x, filter_shape, dy, **rules):
        spoiled = x if rules.get("impl") == "reference" else x.conj()
        return right(spoiled, filter_shape, dy, **rules)

    monkeypatch.setattr(operations, "conv_backprop_filter", unconjugated)
    result = run("grads", *LAYER, "--dtype", "complex64")
    assert result.exit_code == 1
    failed = [line for line in result.stdout.splitlines() if "FAIL" in line.upper()]
    assert any("dw" in line for line in failed)


def test_shapes_and_plans_accept_complex_dtypes():
    words = ("--dtype", "complex64", "--device", "sm_90a", "--json")
    assert "cuda-generic" in said("shapes", *LAYER, *words)
    problem = ConvProblem((2, 4, 8, 9), (6, 2, 3, 3), dtype="complex64", **RULES)
    assert "complex64" in str(problem)
    assert "complex64" in cupyconv.plan(problem, "cpu").to_json()


@pytest.mark.parametrize("tensor", ["y", "dx", "dw"])
def test_terms_of_an_element_sum_to_it(tensor):
    x, w = gaussian(2, 4, 8, 9), gaussian(6, 2, 3, 3, seed=1)
    y = cupyconv.conv_forward(x, w, **RULES)
    dy = gaussian(*y.shape, seed=2)
    results = dict(zip(("dx", "dw"), cupyconv.conv_backward(x, w, dy, **RULES), strict=False))
    problem = ConvProblem(x.shape, w.shape, dtype="complex64", **RULES)
    explanation = cupyconv.explain(problem, x=x, w=w, dy=dy, y=y, **results)
    element = explanation.element(f"{tensor}[1,1,2,2]")
    expected = {"y": y, **results}[tensor][1, 1, 2, 2]
    assert element.sum == element.computed == expected
    told = json.loads(json.dumps(element.to_dict(everything=True)))
    assert told["sum"] == [expected.real, expected.imag]
    products = np.array([term["product"] for term in told["terms"]])
    np.testing.assert_array_equal(products.sum(axis=0), told["sum"])
    assert ("conj(" in str(element)) == (tensor != "y")


def test_terms_of_integers_are_printed_as_integers():
    x, w = gaussian(1, 1, 2, 2), gaussian(1, 1, 2, 2, seed=1)
    x[0, 0, 0, 0], w[0, 0, 0, 0] = 1 - 2j, 3
    problem = ConvProblem(x.shape, w.shape, dtype="complex64")
    explanation = cupyconv.explain(problem, x=x, w=w, dy=np.array([[[[2 + 0j]]]], np.complex64))
    for name, first in (("O[0,0,0,0]", "x[0,0,0,0]"), ("dF[0,0,0,0]", "dy[0,0,0,0]")):
        lines = str(explanation.element(name)).splitlines()
        (line,) = [line for line in lines if first in line and " = " in line][:1]
        assert "." not in line
        assert "-0j" not in line
    assert "= (1-2j) * (3+0j) = 3-6j" in str(explanation.element("O[0,0,0,0]"))
    assert "= (2+0j) * (1+2j) = 2+4j" in str(explanation.element("dF[0,0,0,0]"))
    halves = cupyconv.explain(problem, x=x, w=w * np.complex64(0.5j), values="integers")
    assert "1.500000" in str(halves.element("O[0,0,0,0]"))


@pytest.mark.thorough
@pytest.mark.costly
@pytest.mark.parametrize("framework", ["pytorch", "jax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_generated_framework_code_computes_the_same(framework, dtype, tmp_path):
    pytest.importorskip("torch" if framework == "pytorch" else "jax")
    code = said("explain", *LAYER, "--dtype", dtype, "--code", framework)
    target = tmp_path / "ours.npz"
    said("grads", *LAYER, "--dtype", dtype, "--save", target)
    program = f"{code}\nnp.savez({str(tmp_path / 'theirs.npz')!r}, y=y, dx=dx, dw=dw)\n"
    subprocess.run([sys.executable, "-c", program], check=True)
    bound = {"complex64": 2e-6, "complex128": 4e-15}[dtype]
    with np.load(target) as ours, np.load(tmp_path / "theirs.npz") as theirs:
        for name in ("y", "dx", "dw"):
            assert theirs[name].dtype == dtype
            assert np.abs(ours[name] - theirs[name]).max() < bound * np.abs(ours[name]).max()


@pytest.mark.parametrize("framework", ["tensorflow", "onnx"])
def test_frameworks_without_complex_numbers_are_rejected(framework):
    error = refused("explain", *LAYER, "--dtype", "complex64", "--code", framework)
    assert f"{framework} does not support complex64. Use pytorch or jax" in error
    problem = ConvProblem((1, 1, 4), (1, 1, 2), dtype="complex64")
    with pytest.raises(ConvError, match="does not support complex64"):
        cupyconv.explain(problem).code(framework)


def test_pages_and_pictures_accept_complex_numbers(tmp_path):
    paths = [str(tmp_path / name) for name in ("page.html", "picture.svg")]
    words = ["--html", paths[0], "--svg", paths[1], "--element", "dF[0,0,0,0]"]
    said("explain", *LAYER, "--dtype", "complex64", *words)


def test_check_finds_a_wrong_imaginary_part(monkeypatch):
    right = operations.conv_forward

    def off(*given, **rules):
        y = right(*given, **rules)
        return y if rules.get("impl") == "reference" else y + np.complex64(1j)

    said("check", *LAYER, "--dtype", "complex64")
    monkeypatch.setattr(operations, "conv_forward", off)
    result = run("check", *LAYER, "--dtype", "complex64", "--impl", "numpy", "--json")
    assert result.exit_code == 1
    failed = {(one["tensor"], one["data"]) for one in json.loads(result.stdout)["failures"]}
    assert ("y", "integer") in failed


def test_gradient_recipes_show_conjugates():
    text = " ".join(
        str(cupyconv.explain(ConvProblem((1, 2, 4, 4), (3, 2, 2, 2), dtype="complex64"))).split()
    )
    assert "dw[k,c] = correlate(conj(x[c]), dy[k])" in text
    assert "conj(w) flipped along H and W" in text
    assert "applied to conj(w)" in text
    assert "torch.nn.grad" not in text


def test_explanation_rejects_data_with_an_imaginary_part():
    problem = ConvProblem((1, 1, 4), (1, 1, 2))
    with pytest.raises(
        ConvTypeError, match=r"the problem is float32\. Make the problem with dtype='complex64'"
    ):
        cupyconv.explain(problem, x=np.ones((1, 1, 4), np.complex64))
