"""Backends that run planned passes, with NumPy on the CPU and with kernels on a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from cupyconv import arrays
from cupyconv.cpu import blocked, reference
from cupyconv.cpu.threads import with_one_blas_thread
from cupyconv.cpu.views import data_view
from cupyconv.gpu import bindings, capture, compiler
from cupyconv.gpu.runtime import CupyRuntime, Runtime, Series
from cupyconv.kernels import bias
from cupyconv.kernels.device import CPU, Device
from cupyconv.kernels.request import PLAIN, Epilogue
from cupyconv.kernels.strides import Strides
from cupyconv.launch import FilterForm, Launch
from cupyconv.planning import launches
from cupyconv.planning.plan import PassPlan
from cupyconv.problem import ITEMSIZE, LARGEST, ConvProblem, bytes_text, shape_text


class Tensors(NamedTuple):
    """Arrays of a pass by role; None for roles that the pass does not use.

    The forward pass reads x and w and writes y.  In backprop_input, ``x`` is dx and ``y`` is dy; in
    backprop_filter, ``w`` is dw and ``y`` is dy.  The sum for the bias gradient reads dy as ``y``
    and writes db as ``bias``.
    """

    x: Any
    w: Any
    y: Any
    bias: Any = None
    add: Any = None


Run = Callable[[Tensors], None]
"""Function that runs one pass."""

ALIGNMENT = 16
"""Largest alignment in bytes that kernels use."""


class Backend(ABC):
    """Device that computes the operations; methods that are not abstract suit NumPy arrays.

    Attributes:
        device: description of the device for the planner.
        ordinal: CuPy's index of the device that arrays must be on; None if arrays need not be on a
            GPU.
    """

    device: Device
    ordinal: int | None = None

    def is_capturing(self) -> bool:
        """Return whether the current stream is capturing a CUDA graph."""
        return False

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an uninitialised array."""

    @abstractmethod
    def alignment(self, tensors: Iterable[Any]) -> int:
        """Return the largest power of two, up to 16, that divides the addresses of all arrays."""

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
        pass_plan: PassPlan,
        problem: ConvProblem,
        strides: Strides | None,
        epilogue: Epilogue = PLAIN,
        form: FilterForm | None = None,
        conjugates: bool = True,
    ) -> Run:
        """Return a function that runs a planned pass on tensors with these strides.

        Args:
            strides: strides of the tensors; ignored on the CPU.
            epilogue: addition and activation that forward or backprop_input apply to their results.
            form: memory order of the w that the function will get, from ``filter_form``; None for
                w in the problem's format.
            conjugates: whether backprop_input conjugates a complex w.  A backend whose
                ``conjugate`` returns a copy always conjugates.
        """

    def filter_form(
        self, pass_plan: PassPlan, problem: ConvProblem, strides: Strides | None
    ) -> FilterForm | None:
        """Return the memory order to which a pass copies w; None if the pass reads w itself."""
        return None

    def arrange(self, form: FilterForm, w: Any) -> Any:
        """Return a copy of w in the memory order ``form``, which ``filter_form`` returned."""
        raise NotImplementedError

    @abstractmethod
    def prepare_bias(
        self, problem: ConvProblem, strides: Strides | None, workspace_limit: int | None
    ) -> Run:
        """Return a function that sums dy over the batch and the spatial axes.

        The function reads ``y`` of its tensors, which is dy, and writes ``bias``, which is db.

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


_CPU_MODULES: dict[str, Any] = {"reference": reference, "numpy": blocked}

_CPU_OPERANDS: dict[str, Callable[[Tensors, str | None], tuple[Any, ...]]] = {
    "forward": lambda t, activation: (t.x, t.w, t.bias, t.add, activation, t.y),
    "backprop_input": lambda t, activation: (t.w, t.y, t.bias, t.add, activation, t.x),
    "backprop_filter": lambda t, activation: (t.x, t.y, t.w),
}
"""Arguments of the functions in _CPU_MODULES, keyed by pass.

The problem and, if the plan has one, the method precede these arguments.
"""

_AS_ON_A_GPU: Any = {"over": "ignore", "under": "ignore", "invalid": "ignore"}
"""NumPy error handling: overflow, underflow and invalid operations are silent, as on a GPU."""


class CpuBackend(Backend):
    """Backend of NumPy arrays."""

    device = CPU

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        try:
            return np.empty(shape, arrays.numpy_dtype(dtype))
        except (MemoryError, ValueError):  # ValueError: the size overflows an integer
            raise MemoryError(memory_text(shape, dtype)) from None

    def alignment(self, tensors: Iterable[Any]) -> int:
        return ALIGNMENT  # constant, because NumPy accepts any alignment

    def extended(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        copied = self.empty(shape, array.dtype.name)
        copied.fill(0)
        copied[tuple(map(slice, array.shape))] = array
        return copied

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        target[...] = source

    def addend(self, add: np.ndarray, result: np.ndarray) -> np.ndarray:
        return add.copy() if add is result else add

    def prepare(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        strides: Strides | None,
        epilogue: Epilogue = PLAIN,
        form: FilterForm | None = None,
        conjugates: bool = True,
    ) -> Run:
        return lambda tensors: self.run(pass_plan, problem, tensors, epilogue, conjugates)

    def run(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        tensors: Tensors,
        epilogue: Epilogue = PLAIN,
        conjugates: bool = True,
    ) -> None:
        """Run one pass."""
        compute = getattr(_CPU_MODULES[pass_plan.implementation], pass_plan.pass_)
        layer = (problem, pass_plan.method) if pass_plan.method else (problem,)
        operands = _CPU_OPERANDS[pass_plan.pass_](tensors, epilogue.activation)
        if pass_plan.pass_ == "backprop_input":
            compute = partial(compute, conjugates=conjugates)
        with np.errstate(**_AS_ON_A_GPU):
            with_one_blas_thread(partial(compute, *layer, *operands))

    def prepare_bias(
        self, problem: ConvProblem, strides: Strides | None, workspace_limit: int | None
    ) -> Run:
        return lambda tensors: self.sum_bias(problem, tensors.y, tensors.bias)

    def load(self, runs: Iterable[Run]) -> None:
        """Do nothing: NumPy has no kernels to load."""

    def sum_bias(self, problem: ConvProblem, dy: np.ndarray, db: np.ndarray) -> None:
        """Compute db[k] = sum of dy over the batch and the spatial axes."""
        view = data_view(problem, dy)
        axes = (0, *range(3, view.ndim))
        with np.errstate(**_AS_ON_A_GPU):
            wide = np.complex128 if problem.is_complex else np.float64
            db[...] = view.sum(axis=axes, dtype=wide).reshape(problem.bias_shape)


class GpuBackend(Backend):
    """Backend that runs kernels through a runtime: on CuPy's current device or on an emulator."""

    def __init__(self, device: Device, runtime: Runtime, ordinal: int | None = None) -> None:
        self.device = device
        self.runtime = runtime
        self.ordinal = ordinal
        self._cupy = arrays.cupy()

    def is_capturing(self) -> bool:
        return capture.is_active()

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        array: Any = self._cupy.ndarray(shape, arrays.numpy_dtype(dtype))
        return array

    def scratch(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Return an uninitialised temporary array.

        If the call is captured in a CUDA graph, the array's memory lives as long as the graph.
        """
        kind = arrays.numpy_dtype(dtype)
        memory = capture.allocate(prod(shape) * kind.itemsize, self._cupy.cuda)
        return self._cupy.ndarray(shape, kind, memory)

    def alignment(self, tensors: Iterable[Any]) -> int:
        bits, address = ALIGNMENT, self.runtime.address
        for array in tensors:
            bits |= address(array)
        return bits & -bits  # lowest set bit

    def conjugate(self, array: Any) -> Any:
        copied = self.scratch(array.shape, str(array.dtype))
        with capture.relaxed():  # CuPy loads a kernel
            return arrays.cupy().conjugate(array, out=copied)

    def extended(self, array: Any, shape: tuple[int, ...]) -> Any:
        copied = self.scratch(shape, array.dtype.name)
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
        copied = self._like(result)  # kernels read an addend with the result's strides
        self.copy(copied, add)
        return copied

    def _like(self, array: Any) -> Any:
        """Return a temporary array with the shape, strides and alignment of a non-empty array."""
        spans = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
        before = -sum(span for span in spans if span < 0)
        after = sum(span for span in spans if span > 0) + array.itemsize
        lead = (self.runtime.address(array) - before) % ALIGNMENT
        memory = capture.allocate(lead + before + after, self._cupy.cuda) + (lead + before)
        return self._cupy.ndarray(array.shape, array.dtype, memory, array.strides)

    def prepare(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        strides: Strides | None,
        epilogue: Epilogue = PLAIN,
        form: FilterForm | None = None,
        conjugates: bool = True,
    ) -> Run:
        assert strides is not None
        _require_memory(problem)
        workspace_bytes = pass_plan.workspace_bytes
        if form is not None:
            strides = replace(strides, w_arranged=True)
            workspace_bytes -= form.bytes
        prepared = launches.prepare(pass_plan, problem, strides, self.device, epilogue)
        return self._series(prepared, workspace_bytes)

    def filter_form(
        self, pass_plan: PassPlan, problem: ConvProblem, strides: Strides | None
    ) -> FilterForm | None:
        assert strides is not None
        return launches.filter_form(pass_plan, problem, strides, self.device)

    def arrange(self, form: FilterForm, w: Any) -> Any:
        arranged = self.empty((form.bytes // 4,), "float32")
        Series((form.launch,), self.runtime, lambda: arranged)(Tensors(None, w, None))
        return arranged

    def prepare_bias(
        self, problem: ConvProblem, strides: Strides | None, workspace_limit: int | None
    ) -> Run:
        assert strides is not None
        _require_memory(problem)
        return self._series(*bias.prepare_bias(problem, strides, self.device, workspace_limit))

    def load(self, runs: Iterable[Run]) -> None:
        new = [run for run in runs if isinstance(run, Series) and not run.is_loaded]
        if len(new) > 1:
            self.runtime.load([kernel for run in new for kernel in run.launches])

    def _series(self, prepared: Sequence[Launch], workspace_bytes: int) -> Run:
        workspace = partial(self.scratch, (workspace_bytes // 4,), "float32")
        return Series(prepared, self.runtime, workspace if workspace_bytes else None)


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
    cupy = arrays.cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    chip = Device.of_capability(
        properties["name"].decode(),
        (properties["major"], properties["minor"]),
        properties["multiProcessorCount"],
        bindings.available(),
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
