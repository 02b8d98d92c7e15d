"""Backends that run planned passes, with NumPy on the CPU and with kernels on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from math import prod
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyconv import arrays
from cupyconv.gpu import capture
from cupyconv.kernels.device import CPU, Device
from cupyconv.kernels.request import PLAIN, Epilogue, Request
from cupyconv.kernels.strides import Strides
from cupyconv.launch import FilterForm, Launch
from cupyconv.planning.plan import PassPlan
from cupyconv.problem import ITEMSIZE, LARGEST, ConvProblem, bytes_text, shape_text

if TYPE_CHECKING:
    from cupyconv.gpu.runtime import Runtime

Arrays = tuple[Any, Any, Any, Any, Any]
"""First and second operand, bias, addend and result of a call; None for missing arrays."""

Roles = tuple[str, str, str]
"""Roles of first operand, second operand and result: "x", "w" or "y", or "bias" for db."""

Run = Callable[[Any], None]
"""Function that runs one pass on the arrays, or on a GPU on the addresses, of a call.

Addresses are in the order of first and second operand, result, bias and addend; 0 if missing.
"""

ALIGNMENT = 16
"""Largest alignment in bytes that kernels use."""


class Backend(ABC):
    """Device that computes the operations; methods that are not abstract suit NumPy arrays.

    Attributes:
        device: description of the device for the planner.
        home: kind of the arrays.
        ordinal: CuPy's index of the device that arrays must be on; None if arrays need not be on a
            GPU.
        address: function that returns the address of an array, which runs take; None if runs take
            arrays.
    """

    device: Device
    home: arrays.Home
    ordinal: int | None = None
    address: Any = None

    def is_capturing(self) -> bool:
        """Return whether the current stream is capturing a CUDA graph."""
        return False

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an uninitialised array of a NumPy dtype."""

    def conjugate(self, array: Any) -> Any | None:
        """Return a contiguous conjugated copy of a complex array.

        Return None if no copy is needed, since the backend's ``prepare`` supports
        ``conjugates=False``.
        """
        return None

    @abstractmethod
    def extended(self, array: Any, shape: tuple[int, ...]) -> Any:
        """Return a contiguous copy that has ``shape``, with zeros added at the end of each axis."""

    @abstractmethod
    def copy(self, target: Any, source: Any) -> None:
        """Copy the elements of ``source`` to ``target``, which has the same shape and dtype."""

    def like(self, layout: Any) -> Any:
        """Return an uninitialised array with the shape, strides and dtype of ``layout``."""
        raise NotImplementedError

    @abstractmethod
    def addend(self, add: Any, result: Any) -> Any:
        """Return ``add``, or a copy that a pass can read while it writes ``result``.

        Args:
            add: ``result`` itself, or an array of its shape that shares no memory with it.
            result: array that the pass will write; it is not changed.
        """

    @abstractmethod
    def prepare(
        self,
        request: Request,
        planned: PassPlan,
        roles: Roles,
        epilogue: Epilogue = PLAIN,
        copied_filter: tuple[FilterForm, Any] | None = None,
        conjugates: bool = True,
    ) -> Run:
        """Return a function that runs a planned pass on tensors with the request's strides.

        Args:
            request: the pass, its device and the strides of its tensors, ignored on the CPU.
            planned: plan of the pass.
            roles: roles of the operands and the result.
            epilogue: addition and activation that forward or backprop_input apply to their results.
            copied_filter: memory order from ``filter_form`` and the copy of w in this order, which
                the pass reads in place of w; None if the pass gets w.
            conjugates: whether backprop_input conjugates a complex w.  A backend whose
                ``conjugate`` returns a copy always conjugates.
        """

    def filter_form(self, request: Request, planned: PassPlan) -> FilterForm | None:
        """Return the memory order to which a pass copies w; None if the pass reads w itself."""
        return None

    def arrange(self, form: FilterForm, w: Any) -> Any:
        """Return a copy of w in the memory order ``form``, which ``filter_form`` returned."""
        raise NotImplementedError

    @abstractmethod
    def prepare_bias(
        self, problem: ConvProblem, strides: Strides | None, workspace_limit: int | None
    ) -> Run:
        """Return a function that sums dy, its first operand, over the batch and spatial axes.

        Args:
            strides: strides of dy and db; ignored on the CPU.
            workspace_limit: largest workspace in bytes, or None; ignored on the CPU.
        """

    @abstractmethod
    def load(self, runs: Iterable[Run]) -> None:
        """Load the kernels of all runs at once, before the runs are called.

        Raises:
            KernelCompileError: a kernel does not compile.
        """


_AS_ON_A_GPU: Any = {"over": "ignore", "under": "ignore", "invalid": "ignore"}
"""NumPy error handling: overflow, underflow and invalid operations are silent, as on a GPU."""


class CpuBackend(Backend):
    """Backend of NumPy arrays; its modules are imported for the first call."""

    device = CPU
    home = arrays.Home.CPU

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        try:
            return np.empty(shape, dtype)
        except (MemoryError, ValueError):  # ValueError: the size overflows an integer
            raise MemoryError(memory_text(shape, np.dtype(dtype).name)) from None

    def extended(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        copied = self.empty(shape, array.dtype)
        copied.fill(0)
        copied[tuple(map(slice, array.shape))] = array
        return copied

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        target[...] = source

    def addend(self, add: np.ndarray, result: np.ndarray) -> np.ndarray:
        return add.copy() if arrays.are_same(add, result, self.home) else add

    def prepare(
        self,
        request: Request,
        planned: PassPlan,
        roles: Roles,
        epilogue: Epilogue = PLAIN,
        copied_filter: tuple[FilterForm, Any] | None = None,
        conjugates: bool = True,
    ) -> Run:
        name = "reference" if planned.implementation == "reference" else "blocked"
        module = import_module(f"cupyconv.cpu.{name}")
        how = planned.pass_, planned.method, epilogue.activation, conjugates
        compute = module.prepare(request.problem, *how)
        x, w, y = ((0, 1, 4)[roles.index(role)] for role in "xwy")
        in_order = itemgetter(x, w, y, 2, 3)
        return lambda operands: self.run(planned, compute, in_order(operands))

    def run(self, planned: PassPlan, compute: Callable[..., None], arrays: Arrays) -> None:
        """Run one planned pass: call ``compute`` with x, w, y, bias and addend."""
        from cupyconv.cpu.threads import with_one_blas_thread

        with np.errstate(**_AS_ON_A_GPU):
            with_one_blas_thread(partial(compute, *arrays))

    def prepare_bias(
        self, problem: ConvProblem, strides: Strides | None, workspace_limit: int | None
    ) -> Run:
        return lambda operands: self.sum_bias(problem, operands[0], operands[4])

    def load(self, runs: Iterable[Run]) -> None:
        """Do nothing: NumPy has no kernels to load."""

    def sum_bias(self, problem: ConvProblem, dy: np.ndarray, db: np.ndarray) -> None:
        """Compute db[k] = sum of dy over the batch and the spatial axes."""
        from cupyconv.cpu.views import data_view

        view = data_view(problem, dy)
        axes = (0, *range(3, view.ndim))
        with np.errstate(**_AS_ON_A_GPU):
            wide = np.complex128 if problem.is_complex else np.float64
            db[...] = view.sum(axis=axes, dtype=wide).reshape(problem.bias_shape)


class GpuBackend(Backend):
    """Backend that runs kernels through a runtime: on CuPy's current device or on an emulator."""

    home = arrays.Home.GPU

    def __init__(self, device: Device, runtime: Runtime, ordinal: int | None = None) -> None:
        self.device = device
        self.runtime = runtime
        self.ordinal = ordinal
        self._cupy = arrays.cupy()
        self.address = attrgetter("data.ptr")

    def is_capturing(self) -> bool:
        return capture.is_active()

    @property
    def empty(self) -> Any:
        """The class of CuPy arrays, which is called with shape and dtype."""
        return self._cupy.ndarray

    def scratch(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an uninitialised temporary array.

        If the call is captured in a CUDA graph, the array's memory lives as long as the graph.
        """
        memory = capture.allocate(prod(shape) * dtype.itemsize, self._cupy.cuda)
        return self._cupy.ndarray(shape, dtype, memory)

    def conjugate(self, array: Any) -> Any:
        copied = self.scratch(array.shape, array.dtype)
        with capture.relaxed():  # CuPy loads a kernel
            return arrays.cupy().conjugate(array, out=copied)

    def extended(self, array: Any, shape: tuple[int, ...]) -> Any:
        copied = self.scratch(shape, array.dtype)
        copied.data.memset_async(0, copied.nbytes)
        self.copy(copied[tuple(map(slice, array.shape))], array)
        return copied

    def copy(self, target: Any, source: Any) -> None:
        # Copying bits as integers avoids bfloat16, which CuPy supports only from NumPy 2.1.2 on.
        bits = f"u{source.itemsize}" if source.itemsize < 8 else source.dtype
        with capture.relaxed():  # CuPy loads a kernel
            target.view(bits)[...] = source.view(bits)

    def addend(self, add: Any, result: Any) -> Any:
        if arrays.have_same_steps(add, result) or not add.size:
            return add
        # Kernels read an addend with the strides and the alignment of the result.
        copied = self.like(result, self.address(result))
        self.copy(copied, add)
        return copied

    def like(self, layout: Any, address: int = 0) -> Any:
        """Return a temporary array with a layout, aligned like an address."""
        spans = [(n - 1) * step for n, step in zip(layout.shape, layout.strides, strict=True)]
        before = -sum(span for span in spans if span < 0)
        after = sum(span for span in spans if span > 0) + layout.itemsize
        lead = (address - before) % ALIGNMENT
        memory = capture.allocate(lead + before + after, self._cupy.cuda) + (lead + before)
        return self._cupy.ndarray(layout.shape, layout.dtype, memory, layout.strides)

    def prepare(
        self,
        request: Request,
        planned: PassPlan,
        roles: Roles,
        epilogue: Epilogue = PLAIN,
        copied_filter: tuple[FilterForm, Any] | None = None,
        conjugates: bool = True,
    ) -> Run:
        _require_memory(request.problem)
        workspace_bytes, fixed = planned.workspace_bytes, {}
        if copied_filter is not None:
            form, copied = copied_filter
            workspace_bytes -= form.bytes
            fixed["w"] = copied
        launches = planned.family.launches(request.reduced, planned, epilogue, bool(fixed))
        return self._series(launches, roles, workspace_bytes, fixed)

    def filter_form(self, request: Request, planned: PassPlan) -> FilterForm | None:
        return planned.family.filter_form(request.reduced, planned)

    def arrange(self, form: FilterForm, w: Any) -> Any:
        arranged = self.empty((form.bytes // 4,), np.dtype("float32"))
        run = self._series((form.launch,), ("w", "x", "workspace"), 0)
        run((self.address(w), 0, self.address(arranged), 0, 0))
        return arranged

    def prepare_bias(
        self, problem: ConvProblem, strides: Strides | None, workspace_limit: int | None
    ) -> Run:
        from cupyconv.kernels import bias

        assert strides is not None
        _require_memory(problem)
        launches, size = bias.prepare_bias(problem, strides, self.device, workspace_limit)
        return self._series(launches, ("y", "w", "bias"), size)

    def load(self, runs: Iterable[Run]) -> None:
        from cupyconv.gpu.runtime import Series

        new = [run for run in runs if isinstance(run, Series) and not run.is_loaded]
        if len(new) > 1:
            self.runtime.load([kernel for run in new for kernel in run.launches])
        for run in new:
            run.load()

    def _series(
        self,
        launches: Sequence[Launch],
        roles: Roles,
        workspace_bytes: int,
        fixed: Mapping[str, Any] | None = None,
    ) -> Run:
        from cupyconv.gpu.runtime import Series

        others = [role for role in ("bias", "add", "x", "w", "y") if role not in roles]
        return Series(launches, self.runtime, (*roles, *others[:2]), workspace_bytes, fixed)


class Described(NamedTuple):
    """Arrays of a call without their contents.

    Attributes:
        layouts: everything about the operands, the bias and the addend on which a plan depends:
            shapes, strides, dtypes, devices, the addresses' alignment and the current device.
        out: shape, strides and dtype of the array for the result; None if it is not passed.
        addresses: addresses of first and second operand, result, bias and addend; 0 for missing
            arrays.  Empty on the CPU, which needs no addresses.
    """

    layouts: tuple[Any, ...]
    out: tuple[Any, ...] | None
    addresses: tuple[int, ...]


Describe = Callable[[Any, Any, Any, Any, Any], "tuple[Any, ...] | None"]
"""Function that returns the fields of a Described for arrays of one type, as a plain tuple.

It takes first and second operand, bias, addend and ``out``; all but the first may be None.  It
returns None if an array has another type than the first.
"""


def _describe_numpy(first: Any, second: Any, bias: Any, add: Any, out: Any) -> Any:
    kind = np.ndarray
    layouts: tuple[Any, ...] = (first.shape, first.strides, first.dtype)
    if second is not None:
        if second.__class__ is not kind:
            return None
        layouts += second.shape, second.strides, second.dtype
    if bias is not None:
        if bias.__class__ is not kind:
            return None
        layouts += "bias", bias.shape, bias.strides, bias.dtype
    if add is not None:
        if add.__class__ is not kind:
            return None
        layouts += "add", add.shape, add.strides, add.dtype
    if out is None:
        return layouts, None, ()
    if out.__class__ is not kind:
        return None
    return layouts, (out.shape, out.strides, out.dtype), ()


def _describe_cupy(kind: Any, current_device: Callable[[], int]) -> Describe:
    """Return the function for CuPy arrays, ``kind``."""

    def describe(first: Any, second: Any, bias: Any, add: Any, out: Any) -> Any:
        data = first.data
        address = bits = data.ptr
        second_address = bias_address = add_address = out_address = 0
        layouts: tuple[Any, ...] = (first.shape, first.strides, first.dtype, data.device_id)
        if second is not None:
            if second.__class__ is not kind:
                return None
            data = second.data
            second_address = data.ptr
            bits |= second_address
            layouts += second.shape, second.strides, second.dtype, data.device_id
        if bias is not None:
            if bias.__class__ is not kind:
                return None
            data = bias.data
            bias_address = data.ptr
            layouts += "bias", bias.shape, bias.strides, bias.dtype, data.device_id
        if add is not None:
            if add.__class__ is not kind:
                return None
            data = add.data
            add_address = data.ptr
            bits |= add_address
            layouts += "add", add.shape, add.strides, add.dtype, data.device_id
        out_layout = None
        if out is not None:
            if out.__class__ is not kind:
                return None
            data = out.data
            out_address = data.ptr
            bits |= out_address
            out_layout = (out.shape, out.strides, out.dtype, data.device_id)
        bits |= ALIGNMENT
        layouts += bits & -bits, current_device()  # the lowest set bit is the alignment
        addresses = (address, second_address, out_address, bias_address, add_address)
        return layouts, out_layout, addresses

    return describe


def described(layouts: Sequence[Any], alignment: int, ordinal: int | None) -> tuple[Any, ...]:
    """Return the field ``layouts`` of Described for arrays of these layouts.

    Args:
        layouts: layouts of first and second operand, bias and addend; None for missing arrays.
        alignment: alignment of the addresses in bytes.
        ordinal: index of the GPU; None on the CPU.
    """
    device = () if ordinal is None else (ordinal,)
    found: tuple[Any, ...] = ()
    for layout, name in zip(layouts, ((), (), ("bias",), ("add",)), strict=True):
        if layout is not None:
            found += *name, layout.shape, layout.strides, layout.dtype, *device
    return found if ordinal is None else (*found, alignment, ordinal)


DESCRIBE: dict[type, Describe] = {np.ndarray: _describe_numpy}
"""Functions that describe the arrays of a call, keyed by array type.

Every call looks up its first operand's type.  The first backend of a GPU adds cupy.ndarray.
"""

_CPU = CpuBackend()


def of(home: arrays.Home) -> Backend:
    """Return the backend of the CPU or of the current GPU."""
    if home is arrays.Home.CPU:
        return _CPU
    cupy = arrays.require_gpu()
    return _gpu(cupy.cuda.runtime.getDevice())


def current_device() -> Device:
    """Return the current GPU, or the CPU if there is no GPU."""
    return of(arrays.Home.GPU).device if arrays.device_count() else CPU


@cache
def _gpu(ordinal: int) -> GpuBackend:
    from cupyconv.gpu import compiler  # imported for the first CuPy array
    from cupyconv.gpu.runtime import CupyRuntime

    cupy = arrays.cupy()
    DESCRIBE[cupy.ndarray] = _describe_cupy(cupy.ndarray, cupy.cuda.runtime.getDevice)
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    chip = Device.of_capability(
        properties["name"].decode(),
        (properties["major"], properties["minor"]),
        properties["multiProcessorCount"],
    )
    device = compiler.fitted(chip)
    assert device.target is not None
    return GpuBackend(device, CupyRuntime(device.target), ordinal)


def _require_memory(problem: ConvProblem) -> None:
    """Raise MemoryError if x, w or y has more than LARGEST bytes."""
    for shape in (problem.input_shape, problem.filter_shape, problem.output_shape):
        if prod(shape) * ITEMSIZE[problem.dtype] > LARGEST:
            raise MemoryError(memory_text(shape, problem.dtype))


def memory_text(shape: tuple[int, ...], dtype: str) -> str:
    """Return the message of a MemoryError: the array's shape, dtype and size in bytes."""
    size = bytes_text(prod(shape) * ITEMSIZE[dtype])
    return f"an array of {shape_text(shape)} {dtype} takes {size}, more than is available"
