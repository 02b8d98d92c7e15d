"""Arrays that mean more than the numbers in their memory, in every interface of the library.

Each is converted to the values that it means, or rejected with a reason and a remedy that works.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem, ConvTypeError, arrays, cudnn, raw_ops
from tests.layer_functions import GROUPS, WAYS, Way

PROBLEM = ConvProblem((1, 2, 5, 4), (3, 2, 2, 2))
SHAPES = {
    "x": PROBLEM.input_shape,
    "w": PROBLEM.filter_shape,
    "dy": PROBLEM.output_shape,
    "bias": (3,),
}
DATA = {
    name: np.random.default_rng(number).integers(-3, 4, shape).astype("float32")
    for number, (name, shape) in enumerate(SHAPES.items())
}


# -- functions of the interfaces -------------------------------------------------------------------

LAYER = Way(cupyconv.conv_forward)
PREPARED = ConvProblem(LAYER.shape("x"), LAYER.shape("w"), stride=2, padding=1, groups=GROUPS)


def prepare(x: Any, w: Any) -> np.ndarray:
    return cupyconv.conv_forward(x, cupyconv.prepare(w, PREPARED), **PREPARED.keywords)


def explain(x: Any, w: Any) -> np.ndarray:
    return np.array(cupyconv.explain(PREPARED).element("y[0,0,1,1]", x=x, w=w).sum)


EACH_ARGUMENT = [
    pytest.param(way, name, id=f"{way}-{name}")
    for way in (*WAYS, Way(prepare), Way(explain))
    for name in way.parameters
    if way.is_array(name) and name not in way.outputs and "torch" not in way.name
]


def integers(way: Way, convert: Callable[[np.ndarray], Any] = np.asarray) -> dict[str, Any]:
    """Return valid arguments of a function, with integers as the values of its arrays."""
    rng = np.random.default_rng(0)
    return {
        name: convert(rng.integers(-3, 4, way.shape(way.tensor(name))).astype("float32"))
        if way.is_array(name)
        else value
        for name, value in way.valid().items()
    }


def computed(way: Way, given: dict[str, Any]) -> np.ndarray:
    """Return all results of a call, in one vector."""
    result = way.finish(way.call(**given))
    if result is None:  # the call writes its result to an argument
        (result,) = (given[name] for name in way.outputs)
    several = result if isinstance(result, tuple) else (result,)
    return np.concatenate([arrays.take("result", one)[0].ravel() for one in several])


# -- converted -------------------------------------------------------------------------------------


def negated(array: np.ndarray) -> Any:
    """Return a tensor that PyTorch negates lazily: the imaginary part of a conjugate."""
    import torch

    tensor = torch.from_numpy(array)
    lazy = torch.complex(tensor, -tensor).conj().imag
    assert lazy.is_neg()
    return lazy


def zero(array: np.ndarray) -> Any:
    """Return a zero tensor without memory, as forward-mode derivatives create it."""
    import torch

    return torch._efficientzerotensor(array.shape)


@pytest.mark.parametrize(("way", "name"), EACH_ARGUMENT)
def test_lazily_negated_tensors_count_with_their_sign(way, name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    expected = computed(way, integers(way, torch.from_numpy))
    tensors = integers(way, torch.from_numpy)
    tensors[name] = negated(tensors[name].numpy())
    np.testing.assert_array_equal(computed(way, tensors), expected)
    assert np.any(expected)


@pytest.mark.parametrize(("way", "name"), EACH_ARGUMENT)
def test_zero_tensors_count_as_zeros(way, name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensors = integers(way, torch.from_numpy)
    expected = computed(way, {**tensors, name: torch.zeros(tensors[name].shape)})
    result = computed(way, {**tensors, name: zero(tensors[name])})
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("operand", ["x", "w", "bias"])
@pytest.mark.parametrize("lazy", ["conj", "neg", "both"])
def test_lazy_complex_tensors_agree_with_pytorch(operand, lazy):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    change = {
        "conj": torch.conj,
        "neg": torch._neg_view,
        "both": lambda tensor: torch._neg_view(torch.conj(tensor)),
    }[lazy]
    given = [torch.complex(torch.from_numpy(DATA[n]), torch.ones(SHAPES[n])) for n in "xw"]
    given.append(torch.complex(torch.from_numpy(DATA["bias"]), torch.ones(3)))
    place = ["x", "w", "bias"].index(operand)
    given[place] = change(given[place])
    y = cupyconv.conv_forward(*given)
    np.testing.assert_array_equal(y, torch.nn.functional.conv2d(*given).numpy())


def test_lazily_negated_bfloat16_counts_with_its_sign():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    taken, _ = arrays.take("x", torch._neg_view(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)))
    assert taken.dtype == arrays.numpy_dtype("bfloat16")
    assert taken.tolist() == [-1.5, 2.0]


def test_plain_tensors_are_still_taken_without_a_copy():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    class Named(torch.Tensor):
        """A class that computes like its base class."""

    tensor = torch.ones(2, 3)
    kinds = [
        tensor,
        tensor.as_subclass(Named),
        torch.nn.Parameter(tensor, requires_grad=False),
        tensor.t(),
    ]
    for kind in kinds:
        taken, _ = arrays.take("x", kind)
        assert taken.ctypes.data == tensor.data_ptr()
        assert taken.shape == tuple(kind.shape)


def test_classes_that_compute_as_numpy_are_taken(tmp_path):
    class Named(np.ndarray):
        """An array with an attribute, as in NumPy's documentation."""

        def __array_finalize__(self, source):
            self.info = getattr(source, "info", None)

        def __array_wrap__(self, array, context=None, return_scalar=False):
            return array.view(Named)

    class Labelled(np.ndarray):
        def __getitem__(self, key):
            raise AssertionError("not a convolution's business")

    mapped = np.memmap(tmp_path / "x", "float32", "w+", shape=SHAPES["x"])
    mapped[...] = DATA["x"]
    for kind in (mapped, *(DATA["x"].view(base) for base in (Named, Labelled, np.recarray))):
        taken, _ = arrays.take("x", kind)
        assert type(taken) is np.ndarray
        assert np.shares_memory(taken, kind)
        assert np.array_equal(taken, DATA["x"])
        assert type(arrays.take_out("out", kind)[0]) is np.ndarray
    expected = cupyconv.conv_forward(DATA["x"], DATA["w"])
    out = np.memmap(tmp_path / "y", "float32", "w+", shape=expected.shape)
    assert cupyconv.conv_forward(mapped, DATA["w"], out=out) is out
    np.testing.assert_array_equal(out, expected)


# -- rejected --------------------------------------------------------------------------------------

Kind = tuple[Callable[[np.ndarray], Any], str]
"""A function that converts an array to the kind, and the pattern of the error with its remedy."""

REMEDY = r"\b(?:[a-z_.]+\(x[^)]*\)|x\.\w+(?:\([^)]*\))?)"
"""Pattern of an expression that a message suggests for an argument x."""


class Metres(np.ndarray):
    """A quantity like those of astropy and unyt."""

    unit = "m"
    value = property(np.asarray)

    def __array_ufunc__(self, *given, **keywords):
        return NotImplemented


class Feet(np.ndarray):
    """A quantity that only its attribute ``units`` identifies."""

    units = "ft"


class Scaled(np.ndarray):
    """An array whose values are the numbers in its memory times a factor."""

    def __mul__(self, other):
        return np.asarray(self) * 2.0 * other


class Exported(np.ndarray):
    """An array that exports other numbers than those in its memory."""

    def __dlpack__(self, **keywords):
        return (np.asarray(self) * 2).__dlpack__(**keywords)


class Masked(np.ndarray):
    """A masked array like astropy's."""

    def __new__(cls, array):
        made = array.view(cls)
        made.mask = array > 1
        return made

    def filled(self, value):
        return np.where(self.mask, np.float32(value), np.asarray(self))

    @property
    def unmasked(self):
        return np.asarray(self)


class Proxy:
    """An object that passes on the attributes of the array that it holds."""

    def __init__(self, array):
        self._array = array

    def __getattr__(self, attribute):
        return getattr(self._array, attribute)


class Quantity(Proxy):
    """A quantity like those of pint."""

    units = "metre"

    @property
    def magnitude(self):
        return self._array


NUMPY_KINDS: dict[str, Kind] = {
    "unit of a class": (lambda a: a.view(Metres), r"unit, which the result would.*Pass x\.value"),
    "unit alone": (lambda a: a.view(Feet), r"has a unit.*Pass numpy\.asarray\(x\)"),
    "scaled": (lambda a: a.view(Scaled), r"Scaled replaces __mul__.*pass numpy\.asarray\(x\)"),
    "exported": (lambda a: a.view(Exported), r"Exported replaces __dlpack__.*numpy\.asarray\(x\)"),
    "mask": (
        np.ma.masked_array,
        r"is a masked array.*x\.filled\(0\).*x\.data, which ignores the mask",
    ),
    "mask of a class": (Masked, r"masked array.*x\.unmasked"),
    "matrix": (lambda a: np.matrix(a.reshape(-1, 1)), r"numpy\.matrix.*numpy\.asarray\(x\)"),
    "proxy": (Proxy, r"forwards __dlpack__.*Pass the wrapped object"),
    "proxy with a unit": (Quantity, r"unit.*Pass x\.magnitude"),
    "interface only": (
        lambda a: SimpleNamespace(__array_interface__=a.__array_interface__, kept=a),
        r"SimpleNamespace\. Convert it first, for example numpy\.asarray\(x, dtype='float32'\)",
    ),
    "list": (lambda a: a.tolist(), r"numpy\.asarray\(x"),
    "word": (lambda a: "x.npy", r"got str\. Pass a NumPy or CuPy array$"),
    "number": (lambda a: 3.0, r"got float\. Pass a NumPy or CuPy array$"),
    "nothing": (
        lambda a: None,
        r"^x must be a NumPy or CuPy array, or export DLPack: got NoneType\. Pass a NumPy or CuPy ",
    ),
}


def torch_kinds() -> dict[str, Kind]:
    """Return kinds of PyTorch tensors whose values are not all in one memory."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

    class Wrapper(torch.Tensor):
        """A tensor that keeps its values in another tensor."""

        @staticmethod
        def __new__(cls, tensor):
            made = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)
            made.tensor = tensor
            return made

        @classmethod
        def __torch_dispatch__(cls, function, types, given=(), keywords=None):
            raise NotImplementedError(function)

    class Doubled(torch.Tensor):
        """A tensor whose values are twice the numbers in its memory."""

        @classmethod
        def __torch_function__(cls, function, types, given=(), keywords=None):
            result = super().__torch_function__(function, types, given, keywords or {})
            return result * 2 if function is torch.mul else result

    def fake(tensor):
        with FakeTensorMode():
            return torch.ones(tensor.shape)

    def functional(tensor):
        with FunctionalTensorMode():
            return FunctionalTensor.to_functional(tensor)

    def masked(tensor):
        from torch.masked import masked_tensor

        return masked_tensor(tensor, tensor > 0)

    ours = r"Call cupyconv\.torch\.conv2d"
    kinds: dict[str, tuple[Callable[[Any], Any], str]] = {
        "fake": (fake, rf"FakeTensor has its own __torch_dispatch__.*{ours}"),
        "functional": (torch._to_functional_tensor, r"functionalize.*Call cupyconv outside"),
        "functional wrapper": (functional, rf"__torch_dispatch__.*{ours}"),
        "wrapper": (Wrapper, rf"Wrapper has its own __torch_dispatch__.*{ours}"),
        "meta": (lambda t: t.to("meta"), rf"'meta': it has a shape but no values.*{ours}"),
        "doubled": (
            lambda t: t.as_subclass(Doubled),
            r"Doubled replaces __torch_function__.*pass x\.as_subclass\(torch\.Tensor\)",
        ),
        "masked": (masked, r"masked tensor.*x\.to_tensor\(0\)"),
        "quantised": (
            lambda t: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8),
            r"quantised\. Pass x\.dequantize\(\)",
        ),
        "sparse": (torch.Tensor.to_sparse, r"layout is torch\.sparse_coo\. Pass x\.to_dense\(\)"),
        "nested": (
            lambda t: torch.nested.nested_tensor([t[0], t[0]]),
            r"nested tensor.*x\.unbind\(\)",
        ),
        "jagged": (
            lambda t: torch.nested.nested_tensor([t[0], t[0]], layout=torch.jagged),
            r"nested tensor.*x\.unbind\(\)",
        ),
        "parameter": (torch.nn.Parameter, r"x requires grad.*x\.detach\(\)"),
        "parameter without numbers": (
            lambda t: torch.nn.UninitializedParameter(requires_grad=False),
            r"PyTorch parameter that has no values yet",
        ),
    }
    return {
        f"torch, {name}": (lambda a, make=make: make(torch.from_numpy(a)), said)
        for name, (make, said) in kinds.items()
    }


def jax_kinds() -> dict[str, Kind]:
    """Return kinds of JAX arrays that have no values, or values in several memories."""
    if importlib.util.find_spec("jax") is None:
        return {}
    import jax

    def deleted(array):
        made = jax.numpy.array(array)
        made.delete()
        return made

    def sparse(array):
        from jax.experimental import sparse

        return sparse.BCOO.fromdense(array)

    return {
        "jax, deleted": (deleted, r"deleted JAX array.*donated"),
        "jax, shape": (
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype),
            r"It has a shape but no values: cupyconv\.ConvProblem",
        ),
        "jax, random key": (lambda a: jax.random.key(0), r"Pass a NumPy or CuPy array$"),
        "jax, sparse": (sparse, r"Pass x\.todense\(\)"),
    }


def tensorflow_kinds() -> dict[str, Kind]:
    """Return kinds of TensorFlow and Keras objects that export no memory."""
    if importlib.util.find_spec("tensorflow") is None:
        return {}

    def symbolic(tensorflow, array):
        found = []
        tensorflow.function(found.append)(tensorflow.constant(array))
        return found[0]

    kinds: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
        "variable": (lambda tf, a: tf.Variable(a), r"ResourceVariable\. Pass x\.numpy\(\)"),
        "ragged": (lambda tf, a: tf.RaggedTensor.from_tensor(a), r"Pass x\.to_tensor\(\)"),
        "sparse": (
            lambda tf, a: tf.sparse.from_dense(a),
            r"Pass tensorflow\.sparse\.to_dense\(x\)",
        ),
        "text": (
            lambda tf, a: tf.constant("a"),  # TensorFlow's own export ends the process
            r"plain numbers: its dtype is string",
        ),
        "symbolic": (symbolic, r"Inside tf\.function.*tf\.numpy_function"),
        "Keras variable": (lambda tf, a: tf.keras.Variable(a), r"Pass x\.numpy\(\)"),
        "Keras tensor": (
            lambda tf, a: tf.keras.Input(a.shape[1:]),
            r"A KerasTensor has no values yet",
        ),
    }
    return {
        f"tensorflow, {name}": (
            lambda a, make=make: make(importlib.import_module("tensorflow"), a), said
        )
        for name, (make, said) in kinds.items()
    }  # fmt: skip


PACKAGES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "pandas": (lambda pandas, a: pandas.DataFrame(a.reshape(2, -1)), "to_numpy"),
    "scipy.sparse": (lambda sparse, a: sparse.csr_array(a.reshape(2, -1)), "toarray"),
    "sparse": (lambda sparse, a: sparse.COO.from_numpy(a), "todense"),
}
"""Functions that make arrays of packages that no extra contains, and their methods that convert."""


def package_kinds() -> dict[str, Kind]:
    """Return array kinds of the installed packages in PACKAGES."""
    return {
        package: (
            lambda a, make=make, package=package: make(importlib.import_module(package), a),
            rf"Pass x\.{method}\(\)",
        )
        for package, (make, method) in PACKAGES.items()
        if importlib.util.find_spec(package.split(".")[0]) is not None
    }


KINDS = NUMPY_KINDS | torch_kinds() | jax_kinds() | tensorflow_kinds() | package_kinds()


@pytest.mark.filterwarnings("ignore")  # many of these kinds are prototypes or deprecated
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_refused_with_a_way_out(kind):
    make, said = KINDS[kind]
    x = make(DATA["x"])
    with pytest.raises(ConvTypeError, match=said) as caught:
        arrays.take("x", x)
    message = str(caught.value)
    assert "\n" not in message
    remedy = re.search(REMEDY, message)
    assert bool(remedy) == bool(re.search(r"x\\\.|\(x", said)), message
    if remedy is None:
        return
    modules = {name: sys.modules.get(name) for name in ("numpy", "torch", "tensorflow")}
    taken, _ = arrays.take("x", eval(f"{remedy[0]}{'[0]' * ('unbind' in said)}", modules, {"x": x}))
    assert taken.dtype == np.float32
    whole = DATA["x"][0] if "unbind" in said else DATA["x"].reshape(taken.shape)
    if kind == "torch, masked":  # masked where x is not positive
        whole = np.maximum(whole, 0)
    elif kind == "mask of a class":  # masked above 1
        whole = np.where(whole > 1, 0, whole)
    np.testing.assert_array_equal(taken, whole)


@pytest.mark.parametrize(("way", "name"), EACH_ARGUMENT)
def test_no_way_in_loses_a_unit(way, name):
    given = integers(way)
    with pytest.raises(ConvTypeError, match="has a unit, which the result would lose"):
        computed(way, {**given, name: given[name].view(Metres)})


def test_blocks_of_dask_do_not_lose_a_unit():
    da = pytest.importorskip("dask.array", reason="dask is not installed")
    import cupyconv.dask as cd

    x = da.from_array(DATA["x"], chunks=-1).map_blocks(
        lambda block: block.view(Metres), meta=np.empty((0,) * 4, "float32")
    )
    for call in (lambda: cd.conv_forward(x, DATA["w"]), lambda: cd.conv_backprop_bias(x)):
        with pytest.raises(ConvTypeError, match="has a unit, which the result would lose"):
            call().compute(scheduler="synchronous")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch warns of TorchScript
def test_dual_tensors_are_refused_and_have_a_way_out():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch.autograd import forward_ad

    tensor = torch.from_numpy(DATA["x"])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
        with pytest.raises(ConvTypeError, match=r"tangent would be lost.*unpack_dual\(x\)\.primal"):
            arrays.take("x", dual)
        arrays.take("x", tensor)
        taken, _ = arrays.take("x", forward_ad.unpack_dual(dual).primal)
        np.testing.assert_array_equal(taken, DATA["x"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch warns of TorchScript
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "vmap of grad"])
def test_function_transforms_are_refused_and_have_a_way_out(transform):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import cupyconv.torch as ct

    func, w = torch.func, torch.from_numpy(DATA["w"])
    x = torch.from_numpy(DATA["x"])[None]
    transforms = {
        "vmap": lambda f: func.vmap(f)(x),
        "grad": lambda f: func.grad(lambda x: f(x).sum())(x[0]),
        "jvp": lambda f: func.jvp(f, (x[0],), (x[0],)),
        "vmap of grad": lambda f: func.vmap(func.grad(lambda x: f(x).sum()))(x),
    }
    with pytest.raises(ConvTypeError, match=r"function transform.*cupyconv\.torch\.conv2d"):
        transforms[transform](lambda x: cupyconv.conv_forward(x, w))
    ours = transforms[transform](lambda x: ct.conv2d(x, w))
    theirs = transforms[transform](lambda x: torch.nn.functional.conv2d(x, w))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's, of torch.jit.trace
@pytest.mark.parametrize("mode", ["real", "fake", "jit", "mode"])
def test_pytorch_tracing_is_refused(mode):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w = (torch.from_numpy(DATA[name]) for name in "xw")

    def convolved(x):
        return torch.from_numpy(cupyconv.conv_forward(x, w)) + 0

    def inside():
        with FakeTensorMode():
            convolved(x)

    traces = {
        "real": lambda: make_fx(convolved)(x),
        "fake": lambda: make_fx(convolved, tracing_mode="fake")(x),
        "jit": lambda: torch.jit.trace(convolved, x),
        "mode": inside,
    }
    with pytest.raises(ConvTypeError, match=r"cupyconv\.torch\.conv2d"):
        traces[mode]()


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_compiled_functions_of_pytorch_are_left_to_run():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x, w = (torch.from_numpy(DATA[name]) for name in "xw")

    @torch.compile(backend="eager")
    def convolved(x):
        lazy = torch.complex(x, x).conj().imag
        return torch.from_numpy(cupyconv.conv_forward(lazy, w)) + 1

    torch.testing.assert_close(convolved(x), 1 - torch.nn.functional.conv2d(x, w))


def test_jax_arrays_of_several_devices_are_refused():
    pytest.importorskip("jax", reason="jax is not installed")
    code = """
import jax, numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from cupyconv import ConvTypeError, arrays
x = numpy.arange(8, dtype="float32")
mesh = Mesh(numpy.array(jax.devices()), "a")
for axis in ("a", None):
    array = jax.device_put(x, NamedSharding(mesh, PartitionSpec(axis)))
    try:
        arrays.take("x", array)
    except ConvTypeError as error:
        print(error)
    taken, _ = arrays.take("x", jax.device_put(array, jax.devices()[0]))
    assert (taken == x).all()
"""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    said = "x must be on one device: it is a JAX array on 2 devices. "
    assert done.stdout.splitlines() == [f"{said}Pass jax.device_put(x, jax.devices()[0])"] * 2


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "said", "way_out"),
    [
        ([("re", "f4")], r"Pass one of its fields, for example x\['re'\]", lambda x: x["re"]),
        ("O", r"got object.*x\.astype\('float32'\)", lambda x: x.astype("float32")),
        ("V4", r"got void32.*x\.view\('float32'\)", lambda x: x.view("float32")),
        ("m8[s]", r"got timedelta64.*x\.astype", lambda x: x.astype("float32")),
    ],
    ids=["structured", "object", "void", "timedelta"],
)
def test_dtypes_without_arithmetic_are_refused_with_a_way_out(dtype, said, way_out):
    x = DATA["x"].view(dtype) if dtype not in ("O", "m8[s]") else DATA["x"].astype(dtype)
    with pytest.raises(ConvTypeError, match=rf"x: dtype must be one of.*{said}"):
        cupyconv.conv_forward(x, DATA["w"])
    y = cupyconv.conv_forward(way_out(x), DATA["w"])
    np.testing.assert_array_equal(y, cupyconv.conv_forward(DATA["x"], DATA["w"]))


def test_bfloat16_from_a_file_has_a_way_out():
    import ml_dtypes

    saved = DATA["x"].astype(ml_dtypes.bfloat16).view("V2")
    with pytest.raises(ConvTypeError, match=r"pass x\.view\(ml_dtypes\.bfloat16\)"):
        cupyconv.conv_forward(saved, DATA["w"])
    w = DATA["w"].astype(ml_dtypes.bfloat16)
    assert cupyconv.conv_forward(saved.view(ml_dtypes.bfloat16), w).shape == SHAPES["dy"]


def convert(kind: str, array: Any, dtype: str) -> Any:
    """Return an array of a library with a dtype, which NumPy may lack."""
    if kind == "numpy":
        return array.astype(dtype)
    module = pytest.importorskip(kind)
    if kind == "torch":
        return module.from_numpy(array.copy()).to(getattr(module, dtype))
    return module.cast(array, dtype) if kind == "tensorflow" else module.numpy.asarray(array, dtype)


OTHER_DTYPES = {
    "torch": ["int32", "float16", "float8_e4m3fn"],
    "jax": ["int32", "float16", "float8_e4m3fn"],
    "tensorflow": ["int32", "float16"],  # TensorFlow exports no float8 with this name
    "numpy": ["int32", "float16"],
}


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind in OTHER_DTYPES for dtype in OTHER_DTYPES[kind]]
)
def test_dtype_errors_convert_in_the_arrays_library(kind, dtype):
    arrays_of = {name: convert(kind, DATA[name], "float32") for name in ("x", "w")}
    arrays_of["w"] = convert(kind, DATA["w"], dtype)
    with pytest.raises(ConvTypeError, match="for example") as caught:
        cupyconv.conv_forward(**arrays_of)
    way_out = str(caught.value).split("for example ")[1]
    scope = {**arrays_of, **{name: sys.modules.get(name) for name in ("torch", "tensorflow")}}
    y = cupyconv.conv_forward(arrays_of["x"], eval(way_out, scope))
    expected = cupyconv.conv_forward(DATA["x"], DATA["w"])
    np.testing.assert_allclose(y, expected, rtol=0.1, atol=1)


def test_a_scalar_bias_is_not_told_to_become_an_array():
    with pytest.raises(ConvTypeError) as caught:
        cupyconv.conv_forward(DATA["x"], DATA["w"], np.float32(1))
    assert "numpy.asarray" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["torch", None])
def test_a_problem_says_how_its_dtype_is_written(dtype):
    given = pytest.importorskip("torch").float32 if dtype else None
    with pytest.raises(ConvTypeError, match=r"Pass, for example, dtype='float32'$"):
        cupyconv.ConvProblem((1, 1, 3), (1, 1, 1), dtype=given)


# -- results ---------------------------------------------------------------------------------------

OUT = np.zeros(SHAPES["dy"], "float32")


def require_unchanged(out: Any, said: str, error: type[Exception] = ConvTypeError) -> None:
    """Check that a result is refused before anything is written."""
    before = np.array(out)
    for call in (
        lambda: cupyconv.conv_forward(DATA["x"], DATA["w"], out=out),
        lambda: cudnn.convolution_forward(
            *(DATA["x"], DATA["w"], None, out, 0, 1, 1, 1), auto_tune=False, tensor_core="auto"
        ),
    ):
        with pytest.raises(error, match=said):
            call()
    np.testing.assert_array_equal(np.array(out), before)


@pytest.mark.parametrize("lazy", ["negated", "conjugated", "zero"])
def test_lazy_tensors_are_refused_as_results(lazy):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    make = {
        "negated": lambda: torch._neg_view(torch.zeros(OUT.shape)),
        "conjugated": lambda: torch.zeros(OUT.shape, dtype=torch.complex64).conj(),
        "zero": lambda: torch._efficientzerotensor(OUT.shape),
    }
    out = make[lazy]()
    x, w = (torch.from_numpy(DATA[name]).to(out.dtype) for name in "xw")
    with pytest.raises(
        ConvTypeError, match=r"(out|y) must be a tensor whose values are in its memory.*Pass"
    ):
        cupyconv.conv_forward(x, w, out=out)
    assert not torch.count_nonzero(out.clone())
    own = torch.empty_like(out)
    assert cupyconv.conv_forward(x, w, out=own) is own
    np.testing.assert_array_equal(own.numpy(), cupyconv.conv_forward(x, w))


@pytest.mark.parametrize(
    "kind", [name for name in NUMPY_KINDS if name not in ("matrix", "nothing", "word")]
)
def test_other_kinds_are_refused_as_results(kind):
    out = NUMPY_KINDS[kind][0](OUT.copy())
    before = np.array(OUT)
    with pytest.raises(ConvTypeError):
        cupyconv.conv_forward(DATA["x"], DATA["w"], out=out)
    assert isinstance(out, SimpleNamespace) or np.array_equal(np.array(OUT), before)


def test_arrays_that_never_change_are_refused_as_results():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    require_unchanged(jax.numpy.zeros(OUT.shape), r"(out|y) must be writeable.*are immutable")


@pytest.mark.thorough
def test_tensorflow_tensors_are_refused_as_results():
    tensorflow = pytest.importorskip("tensorflow", reason="tensorflow is not installed")
    require_unchanged(tensorflow.zeros(OUT.shape), r"(out|y) must be writeable.*are immutable")


def test_results_in_another_byte_order_are_refused():
    require_unchanged(OUT.astype(">f4"), r"(out|y) must have the inputs' dtype: (out|y) is >f4")


def test_inputs_in_another_byte_order_are_taken():
    y = cupyconv.conv_forward(DATA["x"].astype(">f4"), DATA["w"].astype(">f4"))
    np.testing.assert_array_equal(y, cupyconv.conv_forward(DATA["x"], DATA["w"]))


def test_sizes_without_numbers_are_refused():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ConvTypeError, match="input_sizes must be a list of integers"):
        raw_ops.Conv2DBackpropInput(
            input_sizes=torch.zeros(4, dtype=torch.int32, device="meta"),
            filter=DATA["w"],
            out_backprop=DATA["dy"],
            strides=[1] * 4,
            padding="SAME",
        )
