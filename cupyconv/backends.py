"""Where a planned pass is carried out: NumPy on the CPU, or kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from cupyconv import arrays
from cupyconv.cpu import blocked, reference
from cupyconv.cpu.threads import with_one_blas_thread
from cupyconv.cpu.views import data_view
from cupyconv.gpu import bias, bindings, launch, launches
from cupyconv.planning.device import CPU, Device
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.strides import Strides
from cupyconv.problem import ITEMSIZE, LARGEST, ConvProblem, bytes_text, shape_text


class Tensors(NamedTuple):
    """The arrays of a pass by the role they play: the pass writes one of x, w, y.

    In backprop_input ``x`` is dx and ``y`` is dy; in backprop_filter ``w`` is dw and ``y`` is dy.
    """

    x: Any
    w: Any
    y: Any
    bias: Any = None


Run = Callable[[Tensors], None]
"""Computes one pass into the tensor that it writes."""


class Backend(Protocol):
    """What the operations need of the place that arrays are in."""

    device: Device

    ordinal: int | None
    """CuPy's number of the device that arrays have to be on; None where there is but one place."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array with undefined content."""
        ...

    def alignment(self, given: Iterable[Any]) -> int:
        """Bytes, 16 at most, that the addresses of all arrays are multiples of."""
        ...

    def conjugate(self, array: Any) -> Any:
        """A contiguous copy of an array of complex numbers, conjugated."""
        ...

    def extended(self, array: Any, shape: tuple[int, ...]) -> Any:
        """A contiguous copy of an array with zeros after it on every axis, of this shape."""
        ...

    def prepare(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        strides: Strides | None,
        activation: str | None = None,
        form: launch.FilterForm | None = None,
    ) -> Run:
        """How a planned pass is computed on any tensors that lie in memory like this.

        With a ``filter_form`` of its own, what ``arrange`` made is given to it for w.
        """
        ...

    def filter_form(
        self, pass_plan: PassPlan, problem: ConvProblem, strides: Strides | None
    ) -> launch.FilterForm | None:
        """What a planned pass copies w to; None where it reads w as it lies."""
        ...

    def arrange(self, form: launch.FilterForm, w: Any) -> Any:
        """A filter in a form, in memory of its own."""
        ...

    def prepare_bias(
        self, problem: ConvProblem, strides: Strides | None, workspace_limit: int | None
    ) -> Run:
        """How dy, the tensors' y, is summed over the batch and the spatial axes into their bias.

        Strides, of y and the bias, and the limit are those of plans; NumPy takes any.
        """
        ...

    def load(self, runs: Iterable[Run]) -> None:
        """Have at hand what runs need at their first call, worked out for all of them at once.

        Raises:
            KernelCompileError: a kernel does not compile.
        """
        ...


_CPU_MODULES: dict[str, Any] = {"reference": reference, "numpy": blocked}

_AS_ON_A_GPU: Any = {"over": "ignore", "under": "ignore", "invalid": "ignore"}
"""NumPy's errors: what overflows is infinite or NaN, what underflows small or 0."""


class CpuBackend:
    """NumPy arrays."""

    device = CPU
    ordinal: int | None = None

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        try:
            return np.empty(shape, arrays.numpy_dtype(dtype))
        except (MemoryError, ValueError):  # ValueError: the size does not even fit an integer
            raise MemoryError(memory_text(shape, dtype)) from None

    def alignment(self, given: Iterable[Any]) -> int:
        return 16  # NumPy takes any

    def conjugate(self, array: np.ndarray) -> np.ndarray:
        return np.conjugate(array, order="C")

    def extended(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        copied = self.empty(shape, array.dtype.name)
        copied.fill(0)
        copied[tuple(map(slice, array.shape))] = array
        return copied

    def prepare(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        strides: Strides | None,
        activation: str | None = None,
        form: launch.FilterForm | None = None,
    ) -> Run:
        return lambda tensors: self.run(pass_plan, problem, tensors, activation)

    def filter_form(
        self, pass_plan: PassPlan, problem: ConvProblem, strides: Strides | None
    ) -> launch.FilterForm | None:
        return None  # what NumPy copies, it copies while it computes

    def arrange(self, form: launch.FilterForm, w: Any) -> Any:
        raise NotImplementedError("NumPy has no forms of filters")

    def run(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        tensors: Tensors,
        activation: str | None = None,
    ) -> None:
        """Compute one pass into the tensor that it writes."""
        module, t = _CPU_MODULES[pass_plan.implementation], tensors
        how = (problem, pass_plan.method) if pass_plan.method else (problem,)
        compute, operands = {
            "forward": (module.forward, (t.x, t.w, t.bias, activation, t.y)),
            "backprop_input": (module.backprop_input, (t.w, t.y, t.bias, activation, t.x)),
            "backprop_filter": (module.backprop_filter, (t.x, t.y, t.w)),
        }[pass_plan.pass_]
        with np.errstate(**_AS_ON_A_GPU):
            with_one_blas_thread(partial(compute, *how, *operands))

    def prepare_bias(
        self, problem: ConvProblem, strides: Strides | None, workspace_limit: int | None
    ) -> Run:
        return lambda tensors: self.sum_bias(problem, tensors.y, tensors.bias)

    def load(self, runs: Iterable[Run]) -> None:
        pass  # NumPy is

    def sum_bias(self, problem: ConvProblem, dy: np.ndarray, db: np.ndarray) -> None:
        """db[k] = sum of dy over the batch and the spatial axes."""
        view = data_view(problem, dy)
        others = (0, *range(3, view.ndim))
        with np.errstate(**_AS_ON_A_GPU):
            wide = np.complex128 if problem.is_complex else np.float64
            db[...] = view.sum(axis=others, dtype=wide).reshape(problem.bias_shape)


class GpuBackend:
    """Kernels on the current CuPy device and stream, or on whatever ``runtime`` stands for."""

    def __init__(self, device: Device, runtime: launch.Runtime, ordinal: int | None = None) -> None:
        self.device = device
        self.runtime = runtime
        self.ordinal = ordinal

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return arrays.cupy().ndarray(shape, arrays.numpy_dtype(dtype))

    def alignment(self, given: Iterable[Any]) -> int:
        bits, address = 16, self.runtime.address
        for array in given:
            bits |= address(array)
        return bits & -bits  # the lowest that is set

    def conjugate(self, array: Any) -> Any:
        return arrays.cupy().conjugate(array, out=self.empty(array.shape, str(array.dtype)))

    def extended(self, array: Any, shape: tuple[int, ...]) -> Any:
        copied = self.empty(shape, array.dtype.name)
        copied.data.memset_async(0, copied.nbytes)
        # CuPy has bfloat16 with NumPy 2.1.2 and later only.
        bits = f"u{array.itemsize}" if array.itemsize < 8 else array.dtype
        copied.view(bits)[tuple(map(slice, array.shape))] = array.view(bits)
        return copied

    def prepare(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        strides: Strides | None,
        activation: str | None = None,
        form: launch.FilterForm | None = None,
    ) -> Run:
        assert strides is not None
        _require_memory(problem)
        workspace_bytes = pass_plan.workspace_bytes
        if form is not None:
            strides = replace(strides, w_arranged=True)
            workspace_bytes -= form.bytes
        prepared = launches.prepare(pass_plan, problem, strides, activation, self.device)
        return self._series(prepared, workspace_bytes)

    def filter_form(
        self, pass_plan: PassPlan, problem: ConvProblem, strides: Strides | None
    ) -> launch.FilterForm | None:
        assert strides is not None
        return launches.filter_form(pass_plan, problem, strides)

    def arrange(self, form: launch.FilterForm, w: Any) -> Any:
        arranged = self.empty((form.bytes // 4,), "float32")
        launch.Series((form.launch,), self.runtime, lambda: arranged)(Tensors(None, w, None))
        return arranged

    def prepare_bias(
        self, problem: ConvProblem, strides: Strides | None, workspace_limit: int | None
    ) -> Run:
        assert strides is not None
        _require_memory(problem)
        return self._series(*bias.prepare_bias(problem, strides, self.device, workspace_limit))

    def load(self, runs: Iterable[Run]) -> None:
        new = [run for run in runs if isinstance(run, launch.Series) and not run.is_loaded]
        if len(new) > 1:
            self.runtime.load([one for run in new for one in run.launches])

    def _series(self, prepared: Sequence[launch.Launch], workspace_bytes: int) -> Run:
        workspace = partial(self.empty, (workspace_bytes // 4,), "float32")
        return launch.Series(prepared, self.runtime, workspace if workspace_bytes else None)


_CPU = CpuBackend()


def of(home: arrays.Home) -> Backend:
    """The backend of arrays in this home; for the GPU, that of the current device."""
    if home is arrays.Home.CPU:
        return _CPU
    cupy = arrays.require_gpu()
    return _gpu(cupy.cuda.runtime.getDevice())


def current_device() -> Device:
    """The current GPU, or the CPU where there is none."""
    return of(arrays.Home.GPU).device if arrays.device_count() else CPU


@cache
def _gpu(ordinal: int) -> GpuBackend:
    cupy = arrays.cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
    device = Device.of_capability(
        properties["name"].decode(),
        (properties["major"], properties["minor"]),
        properties["multiProcessorCount"],
        bindings.available(),
    )
    assert device.architecture is not None
    return GpuBackend(device, launch.CupyRuntime(device.architecture), ordinal)


def _require_memory(problem: ConvProblem) -> None:
    """Check that tensors have no more bytes than can be counted."""
    for shape in (problem.input_shape, problem.filter_shape, problem.output_shape):
        if prod(shape) * ITEMSIZE[problem.dtype] > LARGEST:
            raise MemoryError(memory_text(shape, problem.dtype))


def memory_text(shape: tuple[int, ...], dtype: str) -> str:
    """How much memory an array would take, as a sentence."""
    size = bytes_text(prod(shape) * ITEMSIZE[dtype])
    return f"an array of {shape_text(shape)} {dtype} takes {size}, more than can be had"
