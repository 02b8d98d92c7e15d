"""CuPy 13's cudnn module: the configurations of its tests, and some that cuDNN rejected."""

import itertools

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvTypeError, cudnn, measuring
from cupyconv.arrays import numpy_dtype
from cupyconv.binding import Options
from tests import emulator
from tests.emulator.convolutions import backend, installed

LAYOUTS = (cudnn.CUDNN_TENSOR_NCHW, cudnn.CUDNN_TENSOR_NHWC)
DTYPES = ("float16", "float32", "float64")

# The parameters of CuPy 13's tests of the three functions.
SHARED = {
    "tensor_core": ("always", "auto", "never"),
    "dilate": (1, 2),
    "groups": (1, 2),
    "workspace": (0, 2**22),
    "auto_tune": (True, False),
}
GRIDS = {
    "forward": {**SHARED, "ndim": (2,), "bias": (True, False), "layout": LAYOUTS},
    "backward_filter": {**SHARED, "ndim": (2, 3), "deterministic": (True, False)},
    "backward_data": {
        **SHARED,
        "ndim": (2, 3),
        "deterministic": (True, False),
        "bias": (True, False),
    },
}


def configurations(function):
    """Yield the configurations of CuPy's test of a function: 192, 192 or 384 for each dtype."""
    grid = GRIDS[function]
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


@pytest.fixture(autouse=True)
def _workspace_as_before():
    before = cupyconv.workspace_limit
    yield
    cupyconv.workspace_limit = before


class Layer:
    """A layer of CuPy's tests, with small integers instead of zeros as values."""

    def __init__(self, dtype, ndim, dilate, groups, layout=LAYOUTS[0]):
        per_group = (4, 4) if layout == LAYOUTS[1] else (3, 2)
        channels, filters = (count * groups for count in per_group)
        numbers = np.random.default_rng(7)

        def integers(*shape):
            return numbers.integers(-4, 5, shape).astype(dtype)

        self.x = integers(2, channels, *[3] * ndim)
        self.w = integers(filters, per_group[0], *[3] * ndim)
        self.y = integers(2, filters, *[2] * ndim)
        self.b = integers(filters)
        self.b_of_x = integers(channels)
        self.rule = {"stride": 2, "padding": 3 // 2 * dilate, "dilation": dilate, "groups": groups}
        self.arguments = tuple((self.rule[w],) * ndim for w in ("padding", "stride", "dilation"))
        self.arguments += (groups,)

    def convert(self, function):
        """Replace each array by ``function(array, name)``."""
        for name in ("x", "w", "y", "b", "b_of_x"):
            setattr(self, name, function(getattr(self, name), name))

    def expected(self, torch, function, bias):
        """Compute the expected result with PyTorch, in float64."""
        x, w, y, b, b_of_x = (
            torch.from_numpy(a.astype(np.float64))
            for a in (self.x, self.w, self.y, self.b, self.b_of_x)
        )
        rank = x.dim() - 2
        if function == "forward":
            convolution = getattr(torch.nn.functional, f"conv{rank}d")
            return convolution(x, w, b if bias else None, **self.rule).numpy()
        if function == "backward_filter":
            gradient = getattr(torch.nn.grad, f"conv{rank}d_weight")
            return gradient(x, w.shape, y, **self.rule).numpy()
        gradient = getattr(torch.nn.grad, f"conv{rank}d_input")
        added = b_of_x.reshape(-1, *[1] * rank) if bias else 0
        return (gradient(x.shape, w, y, **self.rule) + added).numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", GRIDS)
def test_every_configuration_of_cupys_own_tests(function, dtype):
    torch = pytest.importorskip("torch")
    layers, tried = {}, 0
    for one in configurations(function):
        layout, bias = one.get("layout", LAYOUTS[0]), one.get("bias", False)
        key = (one["ndim"], one["dilate"], one["groups"], layout, bias)
        if key not in layers:
            layer = Layer(dtype, *key[:4])
            layers[key] = layer, layer.expected(torch, function, bias)
        layer, expected = layers[key]
        options = {"auto_tune": one["auto_tune"], "tensor_core": one["tensor_core"]}
        if "deterministic" in one:
            options["deterministic"] = one["deterministic"]
        cudnn.set_max_workspace_size(one["workspace"])
        assert cudnn.get_max_workspace_size() == one["workspace"]
        got = call(function, layer, bias, layout, options)
        np.testing.assert_array_equal(got, expected, strict=False)
        tried += 1
    assert tried == {"forward": 192, "backward_filter": 192, "backward_data": 384}[function]


def call(function, layer, bias, layout, options):
    """Return the result of a function, with channels first."""
    last = layout == LAYOUTS[1]

    def given(array):
        return np.ascontiguousarray(np.moveaxis(array, 1, -1)) if last else array

    if "d_layout" not in options and function == "forward":
        options = {**options, "d_layout": layout, "w_layout": layout}
    x, w, y = map(given, (layer.x, layer.w, layer.y))
    operands = {
        "forward": (x, w, layer.b if bias else None, np.full_like(y, np.nan)),
        "backward_filter": (x, y, np.full_like(w, np.nan)),
        "backward_data": (w, y, layer.b_of_x if bias else None, np.full_like(x, np.nan)),
    }[function]
    assert getattr(cudnn, f"convolution_{function}")(*operands, *layer.arguments, **options) is None
    return np.moveaxis(operands[-1], -1, 1) if last else operands[-1]


FEWEST = {"auto_tune": False, "tensor_core": "never"}


@pytest.mark.parametrize("function", GRIDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_cudnn_did_not_take(function, layout):
    """cuDNN rejected one axis, three axes with channels last, bfloat16, lists and integers."""
    torch = pytest.importorskip("torch")
    options = {**FEWEST, "d_layout": layout, "w_layout": layout}
    if function != "forward":
        options["deterministic"] = True
    for rank, dtype in itertools.product((1, 2, 3), ("float32", "bfloat16")):
        layer = Layer("float32", rank, 2, 2, layout)
        kind = numpy_dtype(dtype)
        expected = layer.expected(torch, function, function != "backward_filter").astype(kind)
        layer.convert(lambda array, _, kind=kind: array.astype(kind))
        as_lists = (*map(list, layer.arguments[:3]), 2)
        for arguments in (layer.arguments, as_lists, (2, 2, 2, 2)):
            layer.arguments = arguments
            np.testing.assert_array_equal(call(function, layer, True, layout, options), expected)


def test_layouts_of_arrays_and_filters_may_differ():
    layer = Layer("float32", 2, 1, 1)
    expected = np.empty_like(layer.y)
    cudnn.convolution_forward(layer.x, layer.w, None, expected, *layer.arguments, **FEWEST)
    for d_layout, w_layout in itertools.product(LAYOUTS, LAYOUTS):
        x, y = (np.moveaxis(a, 1, -1) if d_layout else a for a in (layer.x, layer.y.copy()))
        w = np.moveaxis(layer.w, 1, -1) if w_layout else layer.w
        layouts = {"d_layout": d_layout, "w_layout": w_layout}
        cudnn.convolution_forward(x, w, None, y, *layer.arguments, **FEWEST, **layouts)
        np.testing.assert_array_equal(np.moveaxis(y, -1, 1) if d_layout else y, expected)


def test_arguments_by_name_a_bias_of_any_shape_and_no_dilation():
    layer = Layer("float32", 2, 1, 1)
    expected, y = np.empty_like(layer.y), np.empty_like(layer.y)
    cudnn.convolution_forward(layer.x, layer.w, layer.b, expected, *layer.arguments, **FEWEST)
    cudnn.convolution_forward(
        x=layer.x,
        W=layer.w,
        b=layer.b.reshape(1, -1, 1, 1),
        y=y,
        pad=(1, 1),
        stride=(2, 2),
        dilation=None,
        groups=1,
        **FEWEST,
    )
    np.testing.assert_array_equal(y, expected)


def test_complex_gradients_are_the_librarys():
    numbers = np.random.default_rng(1)
    shapes = ((2, 4, 5, 5), (6, 2, 3, 3), (2, 6, 3, 3), (4,))
    x, w, dy, b = (
        (numbers.integers(-3, 4, s) + 1j * numbers.integers(-3, 4, s)).astype("complex64")
        for s in shapes
    )
    rules, rule = (1, 2, 1, 2), {"padding": 1, "stride": 2, "groups": 2}
    y, dx, dw = np.empty_like(dy), np.empty_like(x), np.empty_like(w)
    cudnn.convolution_forward(x, w, None, y, *rules, **FEWEST)
    np.testing.assert_array_equal(y, cupyconv.conv_forward(x, w, **rule))
    options = {**FEWEST, "deterministic": True}
    cudnn.convolution_backward_filter(x, dy, dw, *rules, **options)
    np.testing.assert_array_equal(dw, cupyconv.conv_backprop_filter(x, w.shape, dy, **rule))
    expected = cupyconv.conv_backprop_input(x.shape, w, dy, **rule)
    for bias in (None, b):
        cudnn.convolution_backward_data(w, dy, bias, dx, *rules, **options)
        added = 0 if bias is None else bias.reshape(-1, 1, 1)
        np.testing.assert_array_equal(dx, expected + added)


# -- options ---------------------------------------------------------------------------------------


def test_the_workspace_is_that_of_the_library():
    cupyconv.workspace_limit = None
    unlimited = cudnn.get_max_workspace_size()
    assert unlimited > 2**60
    cudnn.set_max_workspace_size(np.int64(4096))
    assert cupyconv.workspace_limit == cudnn.get_max_workspace_size() == 4096
    assert type(cupyconv.workspace_limit) is int
    cudnn.set_max_workspace_size(unlimited)  # programs restore the old limit in this way
    assert cudnn.get_max_workspace_size() == unlimited
    for wrong in (-1, 1.5, None, "8", True):
        with pytest.raises(ConvError, match="must be a non-negative integer, in bytes"):
            cudnn.set_max_workspace_size(wrong)


@pytest.mark.parametrize(
    ("function", "deterministic", "auto_tune", "expected"),
    [
        ("forward", None, True, True),
        ("forward", None, False, False),
        ("backward_filter", False, True, True),
        ("backward_filter", True, True, False),
        ("backward_data", False, True, True),
        ("backward_data", True, True, False),
        ("backward_data", False, False, False),
    ],
)
def test_auto_tune_measures_unless_deterministic_is_asked_for(
    monkeypatch, function, deterministic, auto_tune, expected
):
    layer, tried = Layer("float32", 2, 1, 1), []

    def fastest(request, impl, run, load):
        tried.append(request.pass_)
        return measuring.contenders(request, impl, 1)[0]

    chosen = backend("sm_80", checked=False)
    monkeypatch.setattr(measuring, "fastest", fastest)
    layer.convert(emulator.memory.like)
    options = {"auto_tune": auto_tune, "tensor_core": "never"}
    if deterministic is not None:
        options["deterministic"] = deterministic
    with installed(chosen):
        run(function, layer, options)
    assert bool(tried) == expected


def run(function, layer, options):
    """Return the result of a function that runs on the emulator."""
    like = {"forward": layer.y, "backward_filter": layer.w, "backward_data": layer.x}[function]
    result = emulator.memory.empty_like(like, "out")
    operands = {
        "forward": (layer.x, layer.w, layer.b),
        "backward_filter": (layer.x, layer.y),
        "backward_data": (layer.w, layer.y, layer.b_of_x),
    }[function]
    getattr(cudnn, f"convolution_{function}")(*operands, result, *layer.arguments, **options)
    return np.array(result)


@pytest.mark.costly
@pytest.mark.parametrize("function", GRIDS)
def test_kernels_compute_it(function):
    """Emulated kernels with a bias give the results of the CPU."""
    for dtype, tensor_core in (("float16", "auto"), ("float32", "always"), ("float64", "never")):
        layer = Layer(dtype, 2, 2, 2)
        options = {"auto_tune": False, "tensor_core": tensor_core}
        if function != "forward":
            options["deterministic"] = False
        expected = call(function, layer, True, LAYOUTS[0], options)
        with installed(backend("sm_80")):
            layer.convert(emulator.memory.like)
            np.testing.assert_array_equal(run(function, layer, options), expected)


@pytest.mark.parametrize(
    ("tensor_core", "precision"), [("always", "tf32"), ("auto", "ieee"), ("never", "ieee")]
)
def test_tensor_core_decides_tf32(monkeypatch, tensor_core, precision):
    asked = []
    monkeypatch.setattr(
        cudnn, "compute", lambda *given: asked.append(Options._make(given[6]).precision)
    )
    layer = Layer("float32", 2, 1, 1)
    options = {"auto_tune": False, "tensor_core": tensor_core}
    cudnn.convolution_forward(layer.x, layer.w, None, layer.y, *layer.arguments, **options)
    options["deterministic"] = True
    for function in ("backward_filter", "backward_data"):
        call(function, layer, True, LAYOUTS[0], options)
    assert asked == [precision] * 3


# -- what is wrong ---------------------------------------------------------------------------------


def test_wrong_arguments_are_told_and_nothing_is_written():
    layer = Layer("float32", 2, 1, 1)
    y = np.full_like(layer.y, 7)
    given = (layer.x, layer.w, layer.b)
    rules = layer.arguments

    def forward(*operands, rules=rules, **options):
        cudnn.convolution_forward(*operands, *rules, **{**FEWEST, **options})

    for wrong, error, words in (
        (lambda: forward(*given, y[:, :1]), ConvError, "^y must have the result's shape"),
        (lambda: forward(*given, y.astype("float64")), ConvTypeError, "^y must have the inputs'"),
        (lambda: forward(*given, None), ConvTypeError, "y must be the array for the result"),
        (lambda: forward(*given[:2], layer.b[:1], y), ConvError, r"b has shape \(1,\), W has 2"),
        (lambda: forward(*given, y, tensor_core="on"), ConvError, "unknown tensor_core.*'always'"),
        (lambda: forward(*given, y, d_layout=2), ConvError, "d_layout must be CUDNN_TENSOR_NCHW"),
        (lambda: forward(*given, y, w_layout="NHWC"), ConvError, "w_layout must be CUDNN_TENSOR"),
        (lambda: forward(*given, y, rules=((1,), (2, 2), (1, 1), 1)), ConvError, "pad must be"),
        (lambda: forward(*given, y, rules=((1, 1), (2, 0), (1, 1), 1)), ConvError, "stride must"),
        (lambda: forward(*given, y, rules=((1, 1), (2, 2), (1, 1), 2)), ConvError, "groups"),
        (lambda: forward([1, 2], *given[1:], y), ConvTypeError, "x must be a NumPy or CuPy array"),
    ):
        with pytest.raises(error, match=words):
            wrong()
    assert (y == 7).all()


def test_result_sizes_select_among_inputs_with_one_output_size():
    w, gy = np.ones((1, 1, 3), "float32"), np.ones((1, 1, 4), "float32")
    rules = ((0,), (2,), (1,), 1)

    def gradient(size):
        gx = np.empty((1, 1, size), "float32")
        cudnn.convolution_backward_data(w, gy, None, gx, *rules, deterministic=True, **FEWEST)
        return gx

    for size in (9, 10):
        assert gradient(size).sum() == 12
    with pytest.raises(ConvError, match="9 to 10"):
        gradient(11)


def test_a_complex_result_may_not_share_the_filters_memory():
    W = np.ones((3, 2, 2), np.complex64)
    y, kept = W[:1], W.copy()
    with pytest.raises(ConvError, match=r"^y must not share.* overlaps W"):
        cudnn.convolution_backward_data(
            W, np.ones((1, 3, 1), np.complex64), np.ones(2, np.complex64), y, (0,), (1,), (1,), 1,
            deterministic=True, **FEWEST,
        )  # fmt: skip
    np.testing.assert_array_equal(W, kept)


class Exported:
    """An array that has a shape and exports DLPack, but has no attribute ``ndim``."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_layouts_hold_for_whatever_has_a_shape():
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-3, 4, (2, 4, 4, 4)).astype(np.float32) for _ in range(2))
    how = {"auto_tune": False, "tensor_core": "auto", "d_layout": cudnn.CUDNN_TENSOR_NHWC}
    found = []
    for given in (x, Exported(x)):
        y = np.empty((2, 2, 2, 2), np.float32)
        cudnn.convolution_forward(given, w[:, :, :3, :3], None, y, (0, 0), (1, 1), (1, 1), 1, **how)
        found.append(y)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("activation_forward", "cupy.maximum"),
        ("create_tensor_descriptor", "needs no descriptors"),
        ("get_handle", "needs no handles"),
        ("nothing", "no attribute 'nothing'$"),
    ],
)
def test_other_names_of_cupys_module_say_what_replaces_them(name, replacement):
    with pytest.raises(AttributeError, match=replacement):
        getattr(cudnn, name)
