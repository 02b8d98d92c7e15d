"""The library's passes with their kernels on the CPU, under the checker.

Planning, launch parameters and grids are the library's; only CuPy's modules and memory are
replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from cupyconv import arrays, backends, operations
from cupyconv.gpu import sources
from cupyconv.launch import Launch
from cupyconv.planning import Device

from . import driver, memory, tensormap
from .module import EmulatedKernel, EmulatedModule
from .ptx.nvrtc import ptx_of
from .runtime import current_settings

MULTIPROCESSORS = 4  # few, so persistent blocks process several tiles each (chosen)


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
        counting = {"counted": True} if options.work and options.source == "ptx" else {}
        module = load(
            launch.source,
            launch.defines,
            self.architecture,
            self.checked,
            options.compiled,
            **counting,
        )
        kernel = module.get_function(launch.entry)
        kernel.may_overlap = launch.may_overlap
        kernel.allow(launch.shared_bytes)
        return kernel

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    encode = staticmethod(tensormap.encode)


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
    counted: bool = False,
) -> EmulatedModule:
    directory = sources.directory()
    return EmulatedModule.from_ptx(
        ptx_of(source, defines, architecture),
        Path(source).stem,
        [directory, directory / "include"],
        counted=counted,
        checked=checked,
        chip=driver.chip_of(architecture),
        resources=driver.compiled(source, defines, architecture) if compiled else None,
        cubin=driver.cubin(source, defines, architecture)[0] if compiled else None,
    )


class EmulatorBackend(backends.GpuBackend):
    """The library's GPU backend on emulator memory."""

    def is_capturing(self) -> bool:
        return False

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return memory.empty(shape, arrays.numpy_dtype(dtype))

    scratch = empty

    def conjugate(self, array: np.ndarray) -> np.ndarray:
        return memory.like(np.conjugate(array, order="C"), "conjugate")

    def extended(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return memory.like(backends.CpuBackend().extended(array, shape), "extended")

    def _like(self, array: np.ndarray) -> np.ndarray:
        return memory.like(array, "add", read_only=False)

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


def conv_forward(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    add: Any = None,
    arch: str = "sm_80",
    checked: bool = True,
    out: Any = None,
    **rules: Any,
) -> np.ndarray:
    """``cupyconv.conv_forward`` on the emulator.

    Args:
        x, w, bias, add, out, rules: As for the library's function; ``impl`` names the kernel family
            or is a plan for ``device(arch)``.
        arch: The chip to emulate.
        checked: Run under the checker; False is faster.

    Returns:
        y as an ordinary NumPy array (``out`` if given).

    Raises:
        CheckerError: The checker reports something, including unwritten elements.
        ConvError: As the library's function.
    """

    def call(result: Any) -> Any:
        inputs = {**_inputs(x=x, w=w, bias=bias), "add": _addend(add, out, result)}
        return operations.conv_forward(**inputs, out=result, **rules)

    return _run(call, out, arch, checked, is_read=add is out)


def conv_backprop_input(
    input_shape: Iterable[int],
    w: Any,
    dy: Any,
    *,
    arch: str = "sm_80",
    checked: bool = True,
    out: Any = None,
    **rules: Any,
) -> np.ndarray:
    """``cupyconv.conv_backprop_input`` on the emulator; arguments as for ``conv_forward``."""

    def call(result: Any) -> Any:
        inputs = _inputs(w=w, dy=dy)
        return operations.conv_backprop_input(input_shape, **inputs, out=result, **rules)

    return _run(call, out, arch, checked)


def conv_backprop_filter(
    x: Any,
    filter_shape: Iterable[int],
    dy: Any,
    *,
    arch: str = "sm_80",
    checked: bool = True,
    out: Any = None,
    **rules: Any,
) -> np.ndarray:
    """``cupyconv.conv_backprop_filter`` on the emulator; arguments as for ``conv_forward``."""

    def call(result: Any) -> Any:
        inputs = _inputs(x=x, dy=dy)
        return operations.conv_backprop_filter(
            inputs["x"], filter_shape, inputs["dy"], out=result, **rules
        )

    return _run(call, out, arch, checked)


def conv_backprop_bias(
    dy: Any, *, arch: str = "sm_80", checked: bool = True, out: Any = None, **rules: Any
) -> np.ndarray:
    """``cupyconv.conv_backprop_bias`` on the emulator; arguments as for ``conv_forward``."""

    def call(result: Any) -> Any:
        return operations.conv_backprop_bias(_inputs(dy=dy)["dy"], out=result, **rules)

    return _run(call, out, arch, checked)


def conv_transpose(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    add: Any = None,
    arch: str = "sm_80",
    checked: bool = True,
    out: Any = None,
    **rules: Any,
) -> np.ndarray:
    """``cupyconv.conv_transpose`` on the emulator; arguments as for ``conv_forward``."""

    def call(result: Any) -> Any:
        inputs = {**_inputs(x=x, w=w, bias=bias), "add": _addend(add, out, result)}
        return operations.conv_transpose(**inputs, out=result, **rules)

    return _run(call, out, arch, checked, is_read=add is out)


def _inputs(**operands: Any) -> dict[str, np.ndarray | None]:
    """Return copies in emulator memory, with the same strides, that kernels may not write."""
    return {
        name: None if value is None else memory.like(np.asarray(value), name)
        for name, value in operands.items()
    }


def _addend(add: Any, out: Any, emulated_out: Any) -> Any:
    """Return ``add`` in emulator memory: the emulated ``out`` if it is ``out`` itself."""
    return emulated_out if add is out else _inputs(add=add)["add"]


def _run(
    call: Callable[[Any], np.ndarray], out: Any, arch: str, checked: bool, is_read: bool = False
) -> np.ndarray:
    """Return the result of a call, which gets ``out`` in emulator memory.

    Args:
        is_read: whether the call reads ``out`` before it writes it.
    """
    emulated_out = None
    if out is not None:
        emulated_out = memory.empty_like(out, "out")
        if is_read:
            memory.write(emulated_out, out)
        emulated_out.flags.writeable = out.flags.writeable
    target = backend(arch, checked)
    with mock.patch.object(backends, "of", return_value=target):
        result = call(emulated_out)
    if checked:
        memory.check_written(result)
    if out is None:
        return np.array(result)
    out[...] = result
    return out
