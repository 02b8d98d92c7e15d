"""Where a planned pass is carried out: NumPy on the CPU, or kernels on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import gcd, prod
from typing import Any, Protocol

import numpy as np

from cupyconv import arrays
from cupyconv.cpu import blocked, reference
from cupyconv.cpu.views import data_view
from cupyconv.errors import ConvTypeError
from cupyconv.gpu import direct, gather, generic, launch
from cupyconv.gpu.parameters import Strides, element_strides
from cupyconv.planning.device import CPU, Device
from cupyconv.planning.plan import PassPlan
from cupyconv.problem import ITEMSIZE, ConvProblem, shape_text


@dataclass(frozen=True)
class Tensors:
    """The arrays of a pass by the role they play: the pass writes one of x, w, y.

    In backprop_input ``x`` is dx and ``y`` is dy; in backprop_filter ``w`` is dw and ``y`` is dy.
    """

    x: Any
    w: Any
    y: Any
    bias: Any = None


class Backend(Protocol):
    """What the operations need of the place that arrays are in."""

    device: Device

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array with undefined content."""
        ...

    def run(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        tensors: Tensors,
        activation: str | None = None,
    ) -> None:
        """Compute one pass into the tensor that it writes."""
        ...

    def sum_bias(self, problem: ConvProblem, dy: Any, db: Any) -> None:
        """db[k] = sum of dy over the batch and the spatial axes."""
        ...


_CPU_MODULES = {"reference": reference, "numpy": blocked}


class CpuBackend:
    """NumPy arrays."""

    device = CPU

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        try:
            return np.empty(shape, arrays.numpy_dtype(dtype))
        except (MemoryError, ValueError):  # ValueError: the size does not even fit an integer
            raise MemoryError(memory_text(shape, dtype)) from None

    def run(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        tensors: Tensors,
        activation: str | None = None,
    ) -> None:
        module = _CPU_MODULES[pass_plan.implementation]
        t = tensors
        with np.errstate(over="ignore", invalid="ignore"):  # to infinity and NaN, as on the GPU
            if pass_plan.pass_ == "forward":
                module.forward(problem, t.x, t.w, t.bias, activation, t.y)
            elif pass_plan.pass_ == "backprop_input":
                module.backprop_input(problem, t.w, t.y, t.x)
            else:
                module.backprop_filter(problem, t.x, t.y, t.w)

    def sum_bias(self, problem: ConvProblem, dy: np.ndarray, db: np.ndarray) -> None:
        view = data_view(problem, dy)
        others = (0, *range(3, view.ndim))
        with np.errstate(over="ignore", invalid="ignore"):
            db[...] = view.sum(axis=others, dtype=np.float64).reshape(problem.bias_shape)


PREPARE = {
    "cuda-generic": generic.prepare,
    "cuda-gather": gather.prepare,
    "cuda-direct": direct.prepare,
}
"""What works out a planned pass's launches, by implementation."""


@lru_cache(maxsize=4096)
def _prepared(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[launch.Launch, ...]:
    prepare = PREPARE[pass_plan.implementation]
    return prepare(pass_plan, problem, strides, activation, device)


class GpuBackend:
    """Kernels on the current CuPy device and stream, or on whatever ``runtime`` stands for."""

    def __init__(self, device: Device, runtime: launch.Runtime) -> None:
        self.device = device
        self.runtime = runtime

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return arrays.cupy().empty(shape, arrays.numpy_dtype(dtype))

    def address(self, array: Any) -> int:
        """The address of an array's first element."""
        return int(array.data.ptr)

    def run(
        self,
        pass_plan: PassPlan,
        problem: ConvProblem,
        tensors: Tensors,
        activation: str | None = None,
    ) -> None:
        strides = Strides(
            _strides("x", tensors.x),
            _strides("w", tensors.w),
            _strides("y", tensors.y),
            1 if tensors.bias is None else _strides("bias", tensors.bias)[0],
            gcd(16, *(self.address(array) for array in (tensors.x, tensors.w, tensors.y))),
        )
        operands = {"x": tensors.x, "w": tensors.w, "y": tensors.y, "bias": tensors.bias}
        if pass_plan.workspace_bytes:
            operands["workspace"] = self.empty((pass_plan.workspace_bytes // 4,), "float32")
        launches = _prepared(pass_plan, problem, strides, activation, self.device)
        launch.run(launches, operands, self.runtime)

    def sum_bias(self, problem: ConvProblem, dy: Any, db: Any) -> None:
        strides = Strides(
            _strides("dy", dy),
            (1,) * len(problem.filter_shape),
            _strides("dy", dy),
            _strides("out", db)[0],
        )
        launches = generic.prepare_bias(problem, strides)
        launch.run(launches, {"y": dy, "bias": db}, self.runtime)


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
        properties["name"].decode(), (properties["major"], properties["minor"])
    )
    assert device.architecture is not None
    return GpuBackend(device, launch.CupyRuntime(device.architecture, ordinal))


def memory_text(shape: tuple[int, ...], dtype: str) -> str:
    """How much memory an array would take, as a sentence."""
    gib = prod(shape) * ITEMSIZE[dtype] / 2**30
    return f"an array of {shape_text(shape)} {dtype} takes {gib:,.1f} GiB, more than can be had"


def _strides(name: str, array: Any) -> tuple[int, ...]:
    try:
        return element_strides(array)
    except ValueError as error:
        raise ConvTypeError(f"{name}: {error}. Pass a contiguous copy of it") from None
