"""The library's passes with their kernels on the CPU, under the checker.

Planning, launch parameters and grids are the library's; only CuPy's modules and memory are
replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from cupyconv import arrays, backends, operations
from cupyconv.gpu import sources
from cupyconv.launch import Launch
from cupyconv.planning import Device, PassPlan, Request
from tests.parameters import decoded

from . import driver, memory, tensormap
from .module import EmulatedKernel, EmulatedModule
from .ptx.nvrtc import ptx_of
from .runtime import current_settings

MULTIPROCESSORS = 4  # few, so persistent blocks process several tiles each (hand-set)


class EmulatorRuntime:
    """Loader of kernels for the CPU; replaces ``cupyconv.gpu.runtime.CupyRuntime``."""

    def __init__(self, architecture: str, checked: bool = True) -> None:
        self.architecture = architecture
        self.checked = checked

    def load(self, launches: Sequence[Launch]) -> None:
        pass  # kernels are loaded on first use

    def kernel(self, launch: Launch) -> EmulatedKernel:
        """Return the kernel of a launch's variant."""
        options = current_settings()
        load = _ptx_module if options.source == "ptx" else _module
        module = load(
            launch.source,
            launch.defines,
            self.architecture,
            self.checked,
            options.compiled,
        )
        kernel = module.get_function(launch.entry)
        kernel.may_overlap = launch.may_overlap
        kernel.allow(launch.shared_bytes)
        return kernel

    def launcher(self, launch: Launch) -> tuple[Callable[..., Any], None]:
        """Return the function that runs a launch, whose arguments it reads from the parameters."""
        kernel = self.kernel(launch)

        def run(stream: int, parameters: int, extra: int) -> None:
            arguments = decoded(launch, parameters)
            kernel(launch.grid, launch.block, arguments, shared_mem=launch.shared_bytes)

        return run, None

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=0)

    def scratch(self, size: int) -> SimpleNamespace:
        array = memory.empty((size // 4,), np.float32)
        return SimpleNamespace(ptr=array.ctypes.data, array=array)

    encoder = staticmethod(tensormap.encoder)


@cache
def _module(
    source: str,
    defines: tuple[tuple[str, Any], ...],
    architecture: str,
    checked: bool,
    compiled: bool,
) -> EmulatedModule:
    directory = sources.directory()
    macros = {name: str(value) for name, value in defines}
    return EmulatedModule(
        directory / source,
        macros,
        [directory / "include"],
        checked=checked,
        chip=driver.chip_of(architecture),
        resources=driver.compiled(source, defines, architecture) if compiled else None,
    )


@cache
def _ptx_module(
    source: str,
    defines: tuple[tuple[str, Any], ...],
    architecture: str,
    checked: bool,
    compiled: bool,
) -> EmulatedModule:
    directory = sources.directory()
    return EmulatedModule.from_ptx(
        ptx_of(source, defines, architecture),
        Path(source).stem,
        [directory, directory / "include"],
        checked=checked,
        chip=driver.chip_of(architecture),
        resources=driver.compiled(source, defines, architecture) if compiled else None,
    )


class EmulatorBackend(backends.GpuBackend):
    """The library's GPU backend on emulator memory."""

    home = arrays.Home.CPU

    def __init__(self, device: Device, runtime: EmulatorRuntime) -> None:
        super().__init__(device, runtime)
        self.address = lambda array: array.ctypes.data

    def is_capturing(self) -> bool:
        return False

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return memory.empty(shape, dtype)

    scratch = empty

    def conjugate(self, array: np.ndarray) -> np.ndarray:
        return memory.like(np.conjugate(array, order="C"), "conjugate")

    def extended(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return memory.like(backends.CpuBackend().extended(array, shape), "extended")

    def like(self, layout: np.ndarray, address: int = 0) -> np.ndarray:
        return memory.like(layout, "add", read_only=False)

    def describe(self, *given: np.ndarray | None) -> tuple[Any, ...]:
        """Describe the arrays of a call, as ``backends.DESCRIBE`` does for CuPy arrays."""
        layouts = tuple(
            None if one is None else (one.shape, one.strides, one.dtype) for one in given
        )
        first, second, bias, add, out = (0 if one is None else self.address(one) for one in given)
        bits = first | second | add | out | backends.ALIGNMENT
        addresses = (first, second, out, bias, add)
        return (*layouts[:4], self, bits & -bits, None), layouts[4], addresses

    def copy(self, target: np.ndarray, source: np.ndarray) -> None:
        target[...] = source


def device(arch: str = "sm_80") -> Device:
    """Return the device that emulates a chip such as ``sm_80``, with MULTIPROCESSORS SMs."""
    return replace(Device.of(arch), multiprocessors=MULTIPROCESSORS)


def backend(arch: str = "sm_80", checked: bool = True) -> EmulatorBackend:
    """Return a backend that emulates a chip such as ``sm_80``."""
    emulated = device(arch)
    assert emulated.architecture is not None
    return EmulatorBackend(emulated, EmulatorRuntime(emulated.architecture, checked))


def require_same_bits_if_prepared(
    emulated: EmulatorBackend, request: Request, planned: PassPlan, data: Any
) -> None:
    """Require a pass to give the same bits with a prepared filter and without one."""
    problem = request.problem
    roles, operand, shape = {
        "forward": (("x", "w", "y"), data.x, problem.output_shape),
        "backprop_input": (("y", "w", "x"), data.dy, problem.input_shape),
    }[request.pass_]
    results = []
    for form in (None, emulated.filter_form(request, planned)):
        first, w = memory.array(operand), memory.array(data.w)
        result, copied = memory.empty(shape, operand.dtype), None
        if form is not None:
            prepared = emulated.arrange(form, w)
            copied = form, SimpleNamespace(ptr=emulated.address(prepared), array=prepared)
        run = emulated.prepare(request, planned, roles, copied_filter=copied)
        run((*map(emulated.address, (first, w, result)), 0, 0))
        memory.check_written(result)
        results.append(result.tobytes())
    assert results[0] == results[1]


@contextmanager
def installed(emulated: EmulatorBackend) -> Iterator[None]:
    """Let the library compute NumPy arrays in emulator memory with a backend."""
    with (
        mock.patch.object(backends, "of", return_value=emulated),
        mock.patch.dict(backends.DESCRIBE, {np.ndarray: emulated.describe}),
        mock.patch.dict(arrays.HOMES, {np.ndarray: arrays.Home.CPU}),
    ):
        yield


def _emulated(function: Callable[..., Any]) -> Callable[..., np.ndarray]:
    """Return a function of the library on the emulator.

    It takes ordinary NumPy arrays and returns an ordinary NumPy array (``out`` if given).  The
    additional argument ``arch`` names the chip to emulate; ``impl`` names a kernel family, or is a
    plan for ``device(arch)``.  In addition to the library's errors it raises CheckerError if the
    checker reports something, including unwritten elements.
    """
    signature = inspect.signature(function)

    def call(*given: Any, arch: str = "sm_80", **keywords: Any) -> np.ndarray:
        arguments = signature.bind(*given, **keywords).arguments
        out, add = arguments.pop("out", None), arguments.get("add")
        for name in OPERANDS:
            if arguments.get(name) is not None:
                arguments[name] = memory.like(np.asarray(arguments[name]), name)
        if out is not None:
            arguments["out"] = memory.empty_like(out, "out")
            if add is out:
                memory.write(arguments["out"], out)
                arguments["add"] = arguments["out"]
            arguments["out"].flags.writeable = out.flags.writeable
        with installed(backend(arch)):
            result = function(**arguments)
        memory.check_written(result)
        if out is None:
            return np.array(result)
        out[...] = result
        return out

    return call


OPERANDS = ("x", "w", "dy", "bias", "add")
"""Arrays that are copied to emulator memory with their strides, and that kernels may not write."""

conv_forward = _emulated(operations.conv_forward)
conv_backprop_input = _emulated(operations.conv_backprop_input)
conv_backprop_filter = _emulated(operations.conv_backprop_filter)
conv_backprop_bias = _emulated(operations.conv_backprop_bias)
conv_transpose = _emulated(operations.conv_transpose)
