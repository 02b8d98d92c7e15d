"""Checks of arrays whose values are not just the numbers in their memory.

A pass reads only the memory of an array.  It would ignore a unit, a mask, a derivative, or a
negation that PyTorch applies lazily.  Arrays with one of these are therefore converted to plain
arrays or rejected with an error.  Other libraries are used only if the program has imported them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from cupyconv.errors import ConvTypeError

_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "pow")

_ARITHMETIC = (
    "__array_ufunc__",
    "__array_function__",
    "__array__",
    "__array_interface__",
    "__cuda_array_interface__",
    "__dlpack__",
    "__neg__",
    *(f"__{side}{operator}__" for operator in _OPERATORS for side in ("", "r")),
)
"""Methods that a derived array class may replace to give its elements another meaning."""

_IN_A_TRANSFORMATION = (
    "Inside jax.jit and jax.grad, arrays have no values yet: call cupyconv outside of them"
)
_TORCH_OPERATORS = "cupyconv.torch.conv2d or another function of cupyconv.torch"


# -- arrays of NumPy and CuPy ----------------------------------------------------------------------


def require_plain(name: str, value: Any, base: type) -> None:
    """Check that the values of an array of a derived class are the numbers in its memory.

    The class may add attributes and wrap results (``__array_finalize__``, ``__array_wrap__``), as
    numpy.memmap does.  Its arrays must have no unit, and it must not replace arithmetic methods.

    Args:
        name: name of the argument, for messages.
        value: array of a class derived from ``base``.
        base: numpy.ndarray or cupy.ndarray.

    Raises:
        ConvTypeError: the array is masked, a matrix, or a quantity, or its class replaces
            arithmetic.
    """
    import numpy as np

    kind = type(value)
    if declares(value, "mask") and declares(value, "filled"):
        values = "data" if issubclass(kind, np.ma.MaskedArray) else "unmasked"  # astropy's name
        raise ConvTypeError(
            f"{name} is a masked array, and masks are not supported. "
            f"Pass {name}.filled(0), which has zeros at the masked elements, or {name}.{values}, "
            f"which ignores the mask; for Dask arrays, dask.array.ma.filled({name}, 0)"
        )
    if issubclass(kind, np.matrix):
        raise ConvTypeError(
            f"{name} is a numpy.matrix, which always has two axes. Pass numpy.asarray({name})"
        )
    library = base.__module__
    plain = f"numpy.asarray({name})" if library == "numpy" else f"{name}.view(cupy.ndarray)"
    if kind.__module__.startswith("cupyx.distributed"):
        plain = f"{name}.get()"  # a distributed array is on several devices
    _require_no_unit(name, value, plain)
    for method in _ARITHMETIC:
        if getattr(kind, method, None) is not getattr(base, method, None):
            raise ConvTypeError(
                f"the class of {name} must compute as {library}.ndarray does: "
                f"{type_name(value)} replaces {method}, so its values may not be the numbers in "
                f"its memory. To use those numbers, pass {plain}"
            )


def _require_no_unit(name: str, value: Any, plain: str = "") -> None:
    """Check that an object has no unit.

    Args:
        name: name of the argument, for messages.
        value: the object.
        plain: expression that the message suggests to get the values without the unit, if
            ``value`` has no attribute for this.

    Raises:
        ConvTypeError: the object has a unit.
    """
    unit = next((word for word in ("units", "unit") if declares(value, word)), None)
    if unit is None or getattr(value, unit) is None:
        return
    number = next((word for word in ("magnitude", "value") if declares(value, word)), None)
    plain = f"{name}.{number}" if number else plain
    remedy = f". Pass {plain}, and attach the unit to the result" if plain else ""
    raise ConvTypeError(
        f"{name} of type {type_name(value)} has a unit, which the result would lose{remedy}"
    )


def declares(value: Any, attribute: str) -> bool:
    """Return whether an object or its class defines an attribute itself.

    ``hasattr`` is not used, because it is also true for attributes that a proxy, such as pint's
    quantities, forwards from the array that it wraps.
    """
    return hasattr(type(value), attribute) or attribute in getattr(value, "__dict__", ())


# -- exporters of memory ---------------------------------------------------------------------------


def resolve(name: str, value: Any) -> Any:
    """Return an object whose exported memory has the values of ``value``.

    Returns:
        ``value`` itself, or a copy if it is a PyTorch tensor that is lazily negated, lazily
        conjugated or zero without memory.

    Raises:
        ConvTypeError: the memory lacks a part of the meaning of ``value``, such as a unit or a
            gradient.
    """
    torch = torch_of(value)
    if torch is not None:
        return _resolve_tensor(name, value, torch)
    jax, tensorflow = sys.modules.get("jax"), sys.modules.get("tensorflow")
    _require_no_unit(name, value)
    if getattr(value, "requires_grad", False):
        raise _requires_grad(name)
    if jax is not None and isinstance(value, jax.Array):
        if isinstance(value, jax.core.Tracer):
            raise ConvTypeError(f"{name} is a JAX tracer. {_IN_A_TRANSFORMATION}")
        _require_local(name, value)
    if tensorflow is not None and isinstance(value, tensorflow.Tensor):
        kind = value.dtype
        if not (kind.is_floating or kind.is_complex or kind.is_integer or kind.is_bool):
            # TensorFlow ends the process when it exports a tensor of strings.
            raise ConvTypeError(
                f"{name} must be a tensor of plain numbers: its dtype is {kind.name}. "
                "Pass a tensor with a dtype such as float32"
            )
    for protocol in ("__dlpack__", "__cuda_array_interface__"):
        if hasattr(value, protocol) and not declares(value, protocol):
            raise ConvTypeError(
                f"{name} of type {type_name(value)} forwards {protocol} to an object that it "
                "wraps, and may have another meaning than that object. Pass the wrapped object"
            )
    return value


def require_own_memory(name: str, value: Any) -> None:
    """Check that writing to the memory of an object changes the object's values.

    Args:
        name: name of the argument, for messages.
        value: an array for a result, which ``resolve`` accepted.

    Raises:
        ConvTypeError: ``value`` is a PyTorch tensor that is lazily negated, lazily conjugated or
            zero without memory, or an array of a library with immutable arrays.
    """
    if torch_of(value) is not None:
        lazily = {
            "a lazily conjugated tensor": value.is_conj(),
            "a lazily negated tensor": value.is_neg(),
            "a zero tensor without memory": value._is_zerotensor(),
        }
        for what, applies in lazily.items():
            if applies:
                raise ConvTypeError(
                    f"{name} must be a tensor whose values are in its memory: it is {what}. "
                    f"Pass torch.empty_like({name}), and copy the result from it"
                )
    for library, base in (("jax", "Array"), ("tensorflow", "Tensor")):
        module = sys.modules.get(library)
        if module is not None and isinstance(value, getattr(module, base)):
            raise ConvTypeError(
                f"{name} must be writeable: arrays of {type_name(value)} are immutable. "
                "Pass a NumPy or CuPy array"
            )


def record_write(value: Any) -> None:
    """Tell PyTorch that the memory of a tensor was written; do nothing for other arrays.

    PyTorch then raises an error if a gradient needs the overwritten values.
    """
    torch = torch_of(value)
    if torch is not None:
        torch.autograd.graph.increment_version(value)


def _requires_grad(name: str) -> ConvTypeError:
    return ConvTypeError(
        f"{name} requires grad, and this function records no gradient. "
        f"Call {_TORCH_OPERATORS}, which records gradients, or pass {name}.detach()"
    )


def _require_local(name: str, value: Any) -> None:
    """Check that a JAX array still has its values, and is on a single device."""
    if value.is_deleted():
        raise ConvTypeError(
            f"{name} is a deleted JAX array, or was donated to a call: its values are gone. Pass a "
            "copy that was made earlier"
        )
    if len(value.sharding.device_set) > 1:
        raise ConvTypeError(
            f"{name} must be on one device: it is a JAX array on "
            f"{len(value.sharding.device_set)} devices. "
            f"Pass jax.device_put({name}, jax.devices()[0])"
        )


# -- PyTorch's tensors -----------------------------------------------------------------------------


def torch_of(value: Any) -> Any:
    """Return the PyTorch package if the value is a PyTorch tensor, else None."""
    torch = sys.modules.get("torch")
    base = getattr(torch, "Tensor", None)  # None while PyTorch is being imported
    return torch if base is not None and issubclass(type(value), base) else None


def is_compiling() -> bool:
    """Return whether torch.compile is tracing the caller's code."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and compiler.is_compiling()


def require_dense(name: str, tensor: Any, torch: Any) -> None:
    """Check that a tensor of PyTorch stores one value for each element, in strided memory.

    Raises:
        ConvTypeError: the tensor is nested, masked, sparse or quantised.
    """
    if tensor.is_nested:
        raise ConvTypeError(
            f"{name} is a nested tensor, whose component tensors differ in size. Pass each tensor "
            f"of {name}.unbind() separately, or pad them all to the same size"
        )
    if hasattr(type(tensor), "get_mask"):
        raise ConvTypeError(
            f"{name} is a masked tensor, and masks are not supported. Pass {name}.to_tensor(0), "
            f"which has zeros at the masked elements, or {name}.get_data(), which ignores the mask"
        )
    if tensor.is_quantized:
        raise ConvTypeError(
            f"{name} must be a tensor of plain numbers: it is quantised. Pass {name}.dequantize()"
        )
    if tensor.layout is not torch.strided:
        raise ConvTypeError(
            f"{name} must be a dense tensor: its layout is {tensor.layout}. Pass {name}.to_dense()"
        )


def require_no_tangent(name: str, tensor: Any, torch: Any) -> None:
    """Check that a tensor of PyTorch carries no forward-mode derivative.

    Raises:
        ConvTypeError: the tensor is dual.
    """
    if _tangent(tensor, torch) is not None:
        raise ConvTypeError(
            f"{name} is a dual tensor of torch.autograd.forward_ad, whose tangent would be lost. "
            f"Call {_TORCH_OPERATORS}, which keeps the tangent, or pass "
            f"torch.autograd.forward_ad.unpack_dual({name}).primal"
        )


def _tangent(tensor: Any, torch: Any) -> Any:
    """Return a tensor's derivative at the current level of forward mode, or None.

    PyTorch unpacks a dual tensor through the dispatch key ADInplaceOrView.  While an operator's
    kernel runs under a mode that dispatches in Python, PyTorch excludes this key; this function
    therefore includes the key again.
    """
    forward_ad, core = torch.autograd.forward_ad, torch._C
    if forward_ad._current_level < 0:
        return None
    key = core.DispatchKeySet(core.DispatchKey.ADInplaceOrView)
    excluded = core._dispatch_tls_local_exclude_set() - key
    with core._ForceDispatchKeyGuard(core._dispatch_tls_local_include_set(), excluded):
        return forward_ad.unpack_dual(tensor).tangent


def _resolve_tensor(name: str, tensor: Any, torch: Any) -> Any:
    """Run ``resolve`` for a PyTorch tensor."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ConvTypeError(
            f"{name} is a PyTorch parameter that has no values yet. Run its module once first"
        )
    require_dense(name, tensor, torch)
    if tensor.device.type == "meta":
        raise ConvTypeError(
            f"{name} is on PyTorch's device 'meta': it has a shape but no values. "
            f"Call {_TORCH_OPERATORS}, which returns a tensor on 'meta'"
        )
    _require_untransformed(name, tensor, torch)
    if tensor.requires_grad:
        raise _requires_grad(name)
    require_no_tangent(name, tensor, torch)
    function = type(tensor).__torch_function__
    if getattr(function, "__func__", function) not in _usual_functions(torch):
        raise ConvTypeError(
            f"the class of {name} must compute as torch.Tensor does: {type_name(tensor)} replaces "
            "__torch_function__, so its values may not be the numbers in its memory. To use those "
            f"numbers, pass {name}.as_subclass(torch.Tensor)"
        )
    if tensor._is_zerotensor():
        return tensor.clone()
    return tensor.resolve_conj().resolve_neg()


def _require_untransformed(name: str, tensor: Any, torch: Any) -> None:
    """Check that PyTorch computes directly on a tensor's memory and is not tracing.

    Raises:
        ConvTypeError: a function transform wraps the tensor, the tensor's class has its own
            dispatch, or PyTorch is tracing.
    """
    beyond = torch._C._dispatch_keys(tensor) - _plain_keys(torch)
    key = beyond.highestPriorityTypeId()
    if beyond.has(torch._C.DispatchKey.Python):
        raise ConvTypeError(
            f"{name} of type {type_name(tensor)} has its own __torch_dispatch__, and may have no "
            f"memory. Call {_TORCH_OPERATORS}, which PyTorch dispatches to the class"
        )
    if key.name in ("FuncTorchBatched", "FuncTorchGradWrapper"):
        raise ConvTypeError(
            f"{name} is a wrapper tensor of a function transform, such as torch.func.vmap, grad or "
            f"jvp. Call {_TORCH_OPERATORS}, which supports these transforms"
        )
    if key.name == "Functionalize":
        raise ConvTypeError(
            f"{name} is a wrapper tensor of torch.func.functionalize and has no memory. "
            "Call cupyconv outside of functionalize"
        )
    if key != torch._C.DispatchKey.Undefined:
        raise ConvTypeError(
            f"{name} must be a plain tensor: it has PyTorch's dispatch key {key.name}"
        )
    modes = torch._C._TorchDispatchModeKey.__members__.values()
    if torch.jit.is_tracing() or any(map(torch._C._get_dispatch_mode, modes)):
        raise ConvTypeError(
            f"{name} is a tensor, and PyTorch is tracing: the result would become a constant of "
            f"the graph. Call {_TORCH_OPERATORS}, which torch.export records"
        )


@cache
def _plain_keys(torch: Any) -> Any:
    """Return the dispatch keys of the PyTorch tensors that ``resolve`` accepts."""
    keys = torch._C.DispatchKey
    plain = torch._C.DispatchKeySet(keys.ADInplaceOrView)
    for device in ("CPU", "CUDA"):
        for word in ("", "Autograd", "Autocast"):
            plain |= torch._C.DispatchKeySet(getattr(keys, word + device))
    for key in (keys.Conjugate, keys.Negative, keys.ZeroTensor):
        plain |= torch._C.DispatchKeySet(key)
    return plain


@cache
def _usual_functions(torch: Any) -> tuple[Any, ...]:
    """Return ``__torch_function__`` of torch.Tensor and of torch.nn.Parameter."""
    return torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl


# -- objects without memory ------------------------------------------------------------------------

_CONVERSIONS = {
    "cupyx": ("toarray",),
    "jax": ("todense",),
    "keras": ("numpy",),
    "pandas": ("to_numpy",),
    "polars": ("to_numpy",),
    "scipy": ("toarray",),
    "sparse": ("todense",),
    "tensorflow": ("to_tensor", "numpy"),
}
"""Methods that convert objects that export no memory to arrays, keyed by the objects' library."""


_WAYS_IN = {
    "dask": "Call the functions of cupyconv.dask, which take Dask arrays",
    "xarray": "Pass NAME.data",
    "ConvProblem": "A ConvProblem has no values: pass an array of its shape",
    "PreparedFilter": "Only functions that read w accept a prepared filter, as w; pass NAME.array "
    "here",
    "ShapeDtypeStruct": "It has a shape but no values: cupyconv.ConvProblem takes shapes",
    "SymbolicTensor": "Inside tf.function, tensors have no values yet: call cupyconv outside, or "
    "through tf.numpy_function",
    "KerasTensor": "A KerasTensor has no values yet: pass arrays, such as inputs of the model",
    "SparseTensor": "Pass tensorflow.sparse.to_dense(NAME)",
}
"""Suggested fixes, keyed by library or type; NAME is the argument's name."""


def way_in(name: str, value: Any) -> str:
    """Return the suggested fix for an object that exports no memory: the error's last sentence."""
    library = type(value).__module__.split(".")[0]
    for key in (library, type(value).__name__):
        if key in _WAYS_IN:
            return _WAYS_IN[key].replace("NAME", name)
    for method in _CONVERSIONS.get(library, ()):
        if hasattr(type(value), method):
            return f"Pass {name}.{method}()"
    if getattr(value, "shape", None) == ():
        return "Pass a NumPy or CuPy array"
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    converted = hasattr(value, "__array__") or hasattr(value, "__array_interface__")
    if listed or (converted and library != "jax"):  # JAX's random keys are not numbers
        return f"Convert it first, for example numpy.asarray({name}, dtype='float32')"
    return "Pass a NumPy or CuPy array"


def conversion(name: str, value: Any, dtype: str) -> str:
    """Return an expression that converts an array of any library to a dtype."""
    if torch_of(value) is not None:
        return f"{name}.to(torch.{dtype})"
    if type(value).__module__.split(".")[0] == "tensorflow":
        return f"tensorflow.cast({name}, {dtype!r})"
    if hasattr(value, "astype"):
        return f"{name}.astype({dtype!r})"
    return f"numpy.asarray({name}, dtype={dtype!r})"


def type_name(value: Any) -> str:
    """Return the full name of an object's type, for messages."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
