"""``cupyconv.diagnose``: the convention of values that other programs compute."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import ndimage, signal

import cupyconv
from cupyconv import ConvError
from cupyconv.explaining import conventions, search
from cupyconv.explaining.diagnosis import Finding

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)


@cache
def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Return random float32 numbers."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype("float32")


X, W, DY = numbers(2, 3, 9, 10), numbers(4, 3, 3, 3), numbers(2, 4, 9, 10)
LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
Y = cupyconv.conv_forward(X, W, padding=1)
PLANE, TAPS = X[0, 0], W[0, 0][:, :2]
BIAS = numbers(4)


def only(**tensors: Any) -> Finding:
    """Return the finding of a diagnosis of one result."""
    (finding,) = cupyconv.diagnose(**tensors).findings
    assert isinstance(finding, Finding)
    return finding


def changes(finding: Finding) -> dict[str, str]:
    """Return the properties that differ from the options, with the values found."""
    return {key: new for key, (_, new) in finding.differences.items()}


def depthwise(multiplier_first: bool) -> dict[str, np.ndarray]:
    """Return a depthwise layer with TensorFlow's filter, and either order of the outputs."""
    w = numbers(3, 3, 3, 2)
    y = cupyconv.conv_forward(X, w.reshape(3, 3, 1, 6), groups=3, filter_format="HWIO")
    if multiplier_first:
        y = y.reshape(2, 3, 2, 7, 8).swapaxes(1, 2).reshape(y.shape)
    return {"x": X.transpose(LAST), "w": w, "y": y.transpose(LAST)}


FLIPPED = W[:, :, ::-1, ::-1]
DW = cupyconv.conv_backprop_filter(X, W.shape, DY, padding=1)
DX = cupyconv.conv_backprop_input(X.shape, W, DY, padding=1)
SQUARE = numbers(4, 4, 4, 4)

CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "padding": ({"x": X, "w": W, "y": Y}, {"padding": "1"}),
    "stride and SAME": (
        {"x": X, "w": W, "y": cupyconv.conv_forward(X, W, stride=2, padding="same")},
        {"stride": "2", "padding": "same"},
    ),
    "SAME_LOWER instead of SAME": (
        {
            "x": X,
            "w": W[..., :2],
            "y": cupyconv.conv_forward(X, W[..., :2], padding="same_lower"),
            "padding": "same",
        },
        {"padding": "same_lower"},
    ),
    "causal": (
        {
            "x": X[:, :, 0],
            "w": W[..., 0],
            "y": cupyconv.conv_forward(X[:, :, 0], W[..., 0], dilation=2, padding=[(4, 0)]),
            "dilation": 2,
        },
        {"padding": "causal"},
    ),
    "dilation": (
        {"x": X, "w": W, "y": cupyconv.conv_forward(X, W, dilation=(2, 1))},
        {"dilation": "2,1"},
    ),
    "flipped filter": (
        {"x": X, "w": W, "y": cupyconv.conv_forward(X, FLIPPED)},
        {"filter": "flipped on H and W"},
    ),
    "channels last": (
        {"x": X.transpose(LAST), "w": W.transpose(2, 3, 1, 0), "y": Y.transpose(LAST)},
        {"order of x": "NHWC", "order of w": "HWIO", "order of y": "NHWC", "padding": "1"},
    ),
    "only x with channels last": (
        {"x": X.transpose(LAST), "w": W, "y": Y, "padding": 1},
        {"order of x": "NHWC"},
    ),
    "all sizes equal": (
        {
            "x": SQUARE,
            "w": SQUARE,
            "y": cupyconv.conv_forward(
                SQUARE, SQUARE, padding="same", data_format="NHWC", filter_format="OHWI"
            ),
            "padding": "same",
        },
        {"order of x": "NHWC", "order of w": "OHWI", "order of y": "NHWC"},
    ),
    "exchanged axes of w": (
        {"x": X, "w": W, "y": cupyconv.conv_forward(X, W.swapaxes(2, 3))},
        {"order of w": "OIWH"},
    ),
    "exchanged axes of y": (
        {"x": X, "w": W, "y": Y.swapaxes(2, 3)},
        {"order of y": "NCWH", "padding": "1"},
    ),
    "groups": (
        {"x": X, "w": W[:3, :1], "y": cupyconv.conv_forward(X, W[:3, :1], groups=3)},
        {"groups": "3"},
    ),
    "TensorFlow's depthwise filter": (
        {**depthwise(False), "data_format": "NHWC"},
        {"order of w": "HWGM", "groups": "3"},
    ),
    "depthwise outputs by multiplier": (
        {**depthwise(True), "data_format": "NHWC"},
        {
            "order of w": "HWGM",
            "groups": "3",
            "channels of y": "interleaved between the groups",
        },
    ),
    "transposed": (
        {"x": DY, "w": W, "y": cupyconv.conv_transpose(DY, W, stride=2), "stride": 2},
        {"layer": "transposed"},
    ),
    "output padding": (
        {
            "x": X,
            "w": numbers(3, 4, 3, 3),
            "y": cupyconv.conv_transpose(X, numbers(3, 4, 3, 3), stride=2, output_padding=1),
            "stride": 2,
            "transposed": True,
            "output_padding": 0,
        },
        {"output_padding": "1"},
    ),
    "bias missing": (
        {"x": X, "w": W, "bias": BIAS, "y": Y, "padding": 1},
        {"bias": "none"},
    ),
    "bias unknown": (
        {"x": X, "w": W, "y": Y + BIAS[:, None, None], "padding": 1},
        {"bias": "an unknown bias added"},
    ),
    "small unknown bias": (
        {"x": X, "w": W[:1], "y": Y[:, :1] + np.float32(0.05), "padding": 1},
        {"bias": "an unknown bias added"},
    ),
    "relu": ({"x": X, "w": W, "y": Y.clip(0), "padding": 1}, {"activation": "relu"}),
    "crop": (
        {"x": X, "w": W, "y": Y[:, :, 1:-1, :-1]},
        {"padding": "0:0,1:0"},
    ),
    "reflection": (
        {
            "x": X,
            "w": W,
            "y": cupyconv.conv_forward(np.pad(X, [(0, 0)] * 2 + [(1, 1)] * 2, "reflect"), W),
        },
        {"padding": "1", "padding values": "reflect"},
    ),
    "input gradient": ({"w": W, "dy": DY, "dx": DX}, {"padding": "1"}),
    "input gradient without the flip": (
        {
            "w": W,
            "dy": DY,
            "dx": cupyconv.conv_backprop_input(X.shape, FLIPPED, DY, padding=1),
            "padding": 1,
        },
        {"filter": "flipped on H and W"},
    ),
    "mean over the batch": (
        {"x": X, "dy": DY, "dw": DW / 2, "padding": 1},
        {"scale": "0.5 (mean over the batch)"},
    ),
    "order of dw": (
        {"x": X, "dy": DY, "dw": DW.transpose(2, 3, 1, 0), "padding": 1},
        {"order of dw": "HWIO"},
    ),
    "scipy.signal.convolve": (
        {"x": PLANE, "w": TAPS, "y": signal.convolve(PLANE, TAPS, mode="same")},
        {"filter": "flipped on H and W", "padding": "same_lower"},
    ),
    "scipy.signal.correlate, full": (
        {"x": PLANE, "w": TAPS, "y": signal.correlate(PLANE, TAPS)},
        {"padding": "2,1"},
    ),
    "scipy.ndimage": (
        {"x": PLANE, "w": W[0, 0], "y": ndimage.convolve(PLANE, W[0, 0], mode="mirror")},
        {"filter": "flipped on H and W", "padding": "1", "padding values": "reflect"},
    ),
    "numpy.convolve": (
        {"x": PLANE[0], "w": TAPS[0], "y": np.convolve(PLANE[0], TAPS[0])},
        {"filter": "flipped on W", "padding": "1"},
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", CASES)
def test_convention_is_named(name):
    tensors, expected = CASES[name]
    finding = only(**tensors)
    assert changes(finding) == expected
    assert finding.verdict == "other"
    assert len(finding.fits) == 1


@needs_torch
@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"stride": 2, "padding": 1}, {"stride": "2", "padding": "1"}),
        ({"dilation": 3, "padding": 2}, {"dilation": "3", "padding": "2"}),
        ({"stride": 3, "groups": 3}, {"stride": "3", "groups": "3"}),
    ],
)
@pytest.mark.parametrize("result", ["y", "dx", "dw"])
def test_convention_of_pytorch_is_named(options, found, result):
    import torch

    x = torch.tensor(X, requires_grad=True)
    w = torch.tensor(W[:3, : 3 // options.get("groups", 1)], requires_grad=True)
    y = torch.nn.functional.conv2d(x, w, **options)
    dy = torch.tensor(numbers(*y.shape))
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    every = {"x": x.detach(), "w": w.detach(), "dy": dy, "y": y.detach(), "dx": dx, "dw": dw}
    operands = {"y": ("x", "w"), "dx": ("w", "dy"), "dw": ("x", "dy")}[result]
    finding = only(**{name: every[name] for name in (*operands, result)})
    assert changes(finding) == found


def test_convention_of_jax_is_named():
    lax = pytest.importorskip("jax").lax
    x, w = X.transpose(LAST), numbers(3, 3, 3, 5)
    names = ("NHWC", "HWIO", "NHWC")
    y = np.asarray(lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=names))
    assert changes(only(x=x, w=w, y=y, data_format="NHWC", transposed=True, stride=2)) == {
        "filter": "flipped on H and W",
        "order of w": "HWOI",
        "padding": "same",
    }


# -- random layers ---------------------------------------------------------------------------------


def random_layer(seed: int) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the tensors of a random layer with one result, its options, and whether it flips."""
    rng = np.random.default_rng(seed)

    def some(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    while True:
        rank, groups = some(1, 2, 2, 3), some(1, 1, 2, 3)
        inner, outer = rng.integers(1, 4, 2).tolist()
        taps = rng.integers(1, 5 - (rank == 3), rank).tolist()
        sizes = rng.integers(2, 12 - 2 * rank, rank).tolist()
        options: dict[str, Any] = {
            "stride": rng.integers(1, 4, rank).tolist() if some(0, 1) else some(1, 2),
            "dilation": some(1, 1, 2),
            "padding": some(0, 1, "same", "same_lower", [some((0, 1), (2, 0))] * rank),
            "groups": groups,
        }
        x = rng.standard_normal((some(1, 2), groups * inner, *sizes))
        w = rng.standard_normal((groups * outer, inner, *taps))
        if some(0, 0, 1):  # a complex layer
            x, w = x + 1j * rng.permuted(x), w + 1j * rng.permuted(w)
        try:
            y = cupyconv.conv_forward(x, w, **options)
        except ConvError:
            continue
        if min(y.size, x.size, w.size) < 8:
            continue
        dy = rng.standard_normal(y.shape).astype(y.dtype)
        flips = some(False, False, True)
        used = w[(..., *(slice(None, None, -1),) * rank)] if flips else w
        kind = some("y", "dx", "dw", "transposed")
        if kind == "y":
            return {"x": x, "w": w, "y": cupyconv.conv_forward(x, used, **options)}, options, flips
        if kind == "dx":
            dx = cupyconv.conv_backprop_input(x.shape, used, dy, **options)
            return {"w": w, "dy": dy, "dx": dx}, options, flips
        if kind == "dw":
            dw = cupyconv.conv_backprop_filter(x, w.shape, dy, **options)
            dw = dw[(..., *(slice(None, None, -1),) * rank)] if flips else dw
            return {"x": x, "dy": dy, "dw": dw}, options, flips
        y = cupyconv.conv_transpose(dy, used, output_shape=x.shape, **options)
        return {"x": dy, "w": w, "y": y}, {**options, "transposed": True}, flips


@pytest.mark.parametrize("seed", range(40))
def test_convention_of_a_random_layer_is_among_those_found(seed):
    tensors, options, flips = random_layer(seed)
    exact = only(**tensors, **options)
    if not flips:
        assert exact.verdict == "agrees"
    claim = exact.search.claim
    claim = replace(claim, order=replace(claim.order, flipped=(flips,) * claim.order.rank))
    blind = only(**tensors)
    expected = claim.fingerprint(blind.search.tensors)
    assert expected in [fit.convention.fingerprint(blind.search.tensors) for fit in blind.fits]


@pytest.mark.parametrize("seed", range(20))
def test_first_different_element_is_right(seed):
    tensors, options, flips = random_layer(seed)
    result = next(name for name in ("y", "dx", "dw") if name in tensors)
    values = tensors[result].copy()
    place = np.random.default_rng(seed).integers(values.size, size=3)
    values.flat[place] += 5
    finding = only(**{**tensors, result: values}, **options)
    claimed = finding.search.claimed
    if not flips:
        assert claimed.first == np.unravel_index(place.min(), values.shape)
        assert claimed.agreeing == values.size - len(set(place.tolist()))
        assert claimed.value == values[claimed.first]
        assert claimed.expected == pytest.approx(tensors[result][claimed.first])
        assert finding.verdict == "none"
        assert f"differs: {result}[{','.join(map(str, claimed.first))}]" in str(finding.sections)


@pytest.mark.parametrize("seed", range(20))
def test_products_add_up_to_the_element(seed):
    tensors, options, _ = random_layer(seed)
    finding = only(**tensors, **options)
    convention = finding.search.claim
    views = convention.operands(convention.views(finding.search.tensors))
    sums = convention.sums(convention.views(finding.search.tensors))
    index = tuple(np.random.default_rng(seed).integers(sums.shape).tolist())
    first, second = (views[role] for role in convention.factors)
    number, products = convention.products(views, index)
    pairs = list(products)
    assert len(pairs) == number
    total = sum(first[a] * second[b] for a, b in pairs)
    assert total == pytest.approx(sums[index])
    stored = finding.search.stored(convention.role, convention, index)
    assert finding.search.viewed(convention, stored) == index


@pytest.mark.parametrize("mode", conventions.MODES)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_padding_values_are_those_of_numpy(mode, size):
    positions = np.arange(-4, size + 4)
    index = conventions.tape(positions, size, mode)
    words = {"zeros": {"mode": "constant", "constant_values": -1}}.get(mode, {"mode": mode})
    assert (index == np.pad(np.arange(size), 4, **words)).all()


# -- what the data cannot tell ---------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"x": X * 0, "w": W, "y": Y * 0, "padding": 1}, "x is zero everywhere"),
        ({"x": X, "w": W * 0, "y": Y * 0}, "w is zero everywhere"),
        (
            {"x": X * 0 + 2, "w": W, "y": cupyconv.conv_forward(X * 0 + 2, W)},
            "all elements of x are equal",
        ),
        ({"x": X, "w": W * 0 + 1, "y": cupyconv.conv_forward(X, W * 0 + 1)}, "elements of w"),
        ({"x": W[:1], "w": W[:1], "y": cupyconv.conv_forward(W[:1], W[:1])}, "too few different"),
    ],
)
def test_degenerate_data_is_undecided(tensors, why):
    finding = only(**tensors)
    assert finding.verdict == "undecided"
    assert why in finding.degenerate
    assert not cupyconv.diagnose(**tensors).agrees


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tensors", "other", "cure"),
    [
        ({"w": W + FLIPPED}, "filter flipped on H and W", "filter"),
        ({"bias": BIAS * 0}, "bias none", "bias without zeros"),
        ({"x": abs(X), "w": abs(W)}, "activation relu", "negative"),
    ],
)
def test_other_conventions_with_the_same_values_are_listed(tensors, other, cure):
    x, w = (tensors.get(name, value) for name, value in {"x": X, "w": W}.items())
    y = cupyconv.conv_forward(x, w, padding=1)
    finding = only(**{"x": x, "w": w, **tensors}, y=y, padding=1)
    assert finding.verdict == "agrees"
    (row,) = finding._alternatives().blocks[-1].rows
    assert row[0] == other
    assert cure in row[1]


def test_names_of_one_padding_are_listed_and_told_apart():
    y = cupyconv.conv_forward(X[..., :9], W, stride=2, padding="same")
    finding = only(x=X[..., :9], w=W, y=y, stride=2)
    text = str(finding._alternatives().blocks[0].text)
    assert "Padding 1, same and same_lower" in text
    assert "for an input of H = 10" in text


# -- precision -------------------------------------------------------------------------------------


def to_tf32(array: np.ndarray) -> np.ndarray:
    return ((array.view("int32") + 0x1000) & ~0x1FFF).view("float32")


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return array.astype(ml_dtypes.bfloat16).astype("float32")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("rounded", "word"), [(to_tf32, "TF32"), (to_bfloat16, "bfloat16")], ids=["tf32", "bfloat16"]
)
def test_rounded_operands_are_recognised(rounded, word):
    y = cupyconv.conv_forward(rounded(X), rounded(W), padding=1)
    finding = only(x=X, w=W, y=y, padding=1)
    assert finding.verdict == "other"
    assert word in finding.rounding
    assert not finding.differences


def test_result_of_bfloat16_numbers_is_recognised():
    y = to_bfloat16(cupyconv.conv_forward(to_bfloat16(X), to_bfloat16(W), padding=1))
    finding = only(x=X, w=W, y=y, padding=1)
    assert "precision bfloat16" in finding.headline
    assert "are bfloat16 numbers" in finding.precision
    assert len(finding.fits) == 1


def test_precision_is_that_of_the_values():
    exact = {"x": X.astype("float64"), "w": W.astype("float64")}
    parts = [{"x": exact["x"][:, c], "w": exact["w"][:, c]} for c in (slice(1), slice(1, None))]
    fine = sum(cupyconv.conv_forward(**part, padding=1) for part in parts)
    levels = {
        "float64": only(**exact, y=fine, padding=1),
        "float32": only(**exact, y=Y.astype("float64"), padding=1),
        "float16": only(x=X, w=W, y=Y.astype("float16"), padding=1),
    }
    for word, finding in levels.items():
        assert finding.fits[0].level.name == word
    assert [finding.verdict for finding in levels.values()] == ["agrees", "other", "agrees"]
    integers = {name: np.rint(array * 3) for name, array in exact.items()}
    whole = only(**integers, y=cupyconv.conv_forward(**integers, padding=1), padding=1)
    assert "exactly equal" in whole.precision


def test_sums_in_float16_are_recognised():
    x, w = numbers(1, 64, 9, 9).astype("float16"), numbers(4, 64, 3, 3).astype("float16")
    y = np.zeros((1, 4, 7, 7), "float16")
    for c, r, s in product(range(64), range(3), range(3)):
        y += x[:, None, c, r : r + 7, s : s + 7] * w[None, :, c, r, s, None, None]
    assert only(x=x, w=w, y=y.astype("float32")).fits[0].level.name == "float16 sums"


# -- limits and errors -----------------------------------------------------------------------------


def test_large_results_are_compared_in_part(monkeypatch):
    monkeypatch.setattr(search, "MOST_FLOPS", 20_000.0)
    for tensors in (
        {"x": X, "w": W, "y": Y},
        {"w": W, "dy": DY, "dx": DX},
        {"x": X, "dy": DY, "dw": DW},
    ):
        finding = only(**tensors)
        assert changes(finding) == {"padding": "1"}
        assert finding.fits[0].compared < finding.search.tensors[finding.result].size
        assert "%" in finding.precision


def test_search_of_large_arrays_is_limited(monkeypatch):
    monkeypatch.setattr(search, "MOST_WORK", 1e5)
    finding = only(x=X, w=W, y=DY)
    assert finding.verdict == "none"
    assert finding.search.skipped > 0
    assert "left out" in str(finding.sections)


def test_bias_gradient():
    total = DY.sum((0, 2, 3))
    found = {
        "agrees": cupyconv.diagnose(dy=DY, db=total),
        "other": cupyconv.diagnose(dy=DY, db=total / 2),
        "none": cupyconv.diagnose(dy=DY, db=total + 1),
        "undecided": cupyconv.diagnose(dy=DY * 0, db=total * 0),
    }
    assert {key: one.findings[0].verdict for key, one in found.items()} == {
        key: key for key in found
    }
    last = cupyconv.diagnose(dy=DY.transpose(LAST), db=total)
    assert last.findings[0].differences == {"channel axis of dy": ("1", "3")}


def test_several_results_are_diagnosed_together():
    every = {"x": X, "w": W, "dy": DY, "y": Y, "dx": DX, "dw": DW, "db": DY.sum((0, 2, 3))}
    diagnosis = cupyconv.diagnose(**every, padding=1)
    assert diagnosis.agrees
    assert [one.result for one in diagnosis.findings] == ["y", "dx", "dw", "db"]
    assert diagnosis.to_dict()["agrees"]
    assert "<table>" in cupyconv.diagnose(X, W, y=Y)._repr_html_()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": X, "w": W}, "must have a result"),
        ({"x": X, "y": Y}, "w is missing"),
        ({"x": X + np.inf, "w": W, "y": Y}, "x must be finite"),
        ({"x": X[:0], "w": W, "y": Y[:0]}, "must have elements"),
        ({"x": X, "w": W, "y": Y, "bias": X}, "one value per channel"),
        ({"x": X, "w": W, "y": Y, "activation": "tanh"}, "unknown activation"),
        ({"w": W, "dy": DY, "dx": DX, "activation": "relu"}, "Multiply dy by the derivative"),
    ],
)
def test_wrong_arguments_are_rejected(tensors, message):
    with pytest.raises(ConvError, match=message):
        cupyconv.diagnose(**tensors)


@pytest.mark.parametrize(
    ("x", "w", "shape"),
    [
        *((X, W, shape) for shape in [(), (3,), (2, 4, 9), (1, 4, 9, 10)]),
        (X[..., 0], W[..., 0], (2, 4, 9, 10)),  # with 2 axes, there are many more conventions
    ],
)
def test_shapes_that_fit_nothing_are_no_convention(x, w, shape):
    finding = only(x=x, w=w, y=np.asarray(numbers(*shape)))
    assert finding.verdict == "none"
    assert finding.mismatch


@pytest.mark.parametrize("name", CASES)
def test_library_line_gives_the_values(name):
    tensors = dict(CASES[name][0])
    finding = only(**tensors)
    entry = finding.to_dict()
    space: dict[str, Any] = {**finding.search.tensors, "np": np, "cupyconv": cupyconv}
    line = entry["lines"]["cupyconv"]
    space["bias"] = tensors.get("bias")
    if finding.fits[0].bias is not None:
        space["bias"] = finding.fits[0].bias.astype("float32")
    exec("\n".join([*entry["before"], line, *entry["after"]]), space)
    expected = tensors[finding.result]
    assert space[finding.result].shape == expected.shape
    np.testing.assert_allclose(space[finding.result], expected, atol=1e-4)


# -- lines of frameworks ---------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize("result", ["y", "dx", "dw"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_line_of_pytorch_gives_the_values(result, is_transposed):
    import torch

    layer = torch.nn.functional.conv_transpose2d if is_transposed else torch.nn.functional.conv2d
    x = torch.tensor(DY if is_transposed else X, requires_grad=True)
    w = torch.tensor(W, requires_grad=True)
    y = layer(x, w, stride=2, padding=1)
    dy = torch.tensor(numbers(*y.shape))
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    values = {"y": y.detach(), "dx": dx, "dw": dw}[result]
    every = {"x": x.detach(), "w": w.detach(), "dy": dy, result: values}
    names = {"y": ("x", "w"), "dx": ("w", "dy"), "dw": ("x", "dy")}[result]
    finding = only(**{name: every[name] for name in (*names, result)}, transposed=is_transposed)
    line = finding.to_dict()["lines"]["PyTorch"]
    call = line.removeprefix("the gradient of ").partition(" with respect to ")[0]
    Y = eval(call, {"F": torch.nn.functional, "X": x, "W": w})
    if result != "y":
        assert line.endswith(f" with respect to {result[1:]}")
        (Y,) = torch.autograd.grad(Y, x if result == "dx" else w, dy)
    np.testing.assert_allclose(Y.detach(), values, atol=1e-4)


def test_reflected_padding_of_the_size_of_same_has_a_line():
    padded = np.pad(X, [(0, 0), (0, 0), (1, 1), (0, 1)], "reflect")
    finding = only(x=X, w=W[..., :2], y=cupyconv.conv_forward(padded, W[..., :2]), padding="same")
    assert changes(finding) == {"padding values": "reflect"}
    assert finding.to_dict()["lines"]["cupyconv"] == "y = cupyconv.conv_forward(x, w)"


# -- extreme values --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "w", "y"])
@pytest.mark.parametrize("factor", [1e300, 1e-300])
def test_values_whose_squares_overflow_are_rejected(name, factor):
    arrays = {"x": X, "w": W, "y": Y}
    with pytest.raises(ConvError, match=f"largest value of {name} must be between"):
        cupyconv.diagnose(**{**arrays, name: arrays[name].astype("float64") * factor}, padding=1)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_result_that_is_not_finite_does_not_agree(value):
    y = Y.copy()
    y[0, 1, 2, 3] = value
    finding = only(x=X, w=W, y=y, padding=1)
    assert finding.verdict == "none"
    assert finding.search.nearest.agreeing == y.size - 1
    assert finding.search.nearest.first == (0, 1, 2, 3)


def test_stride_of_a_single_output_is_that_of_the_options():
    x, w = numbers(3, 4, 9), numbers(5, 4, 3)
    y = cupyconv.conv_forward(x[..., :4], w[..., ::-1], stride=9)
    assert changes(only(x=x[..., :4], w=w, y=y, stride=9)) == {"filter": "flipped on W"}
