"""The library's passes with their kernels run on the CPU, under the checker.

Planning, launch parameters and grids are the library's own; only CuPy's module and memory are
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
from cupyconv.gpu.launch import Launch
from cupyconv.planning import Device

from . import driver, memory, tensormap
from .module import EmulatedKernel, EmulatedModule
from .ptx.nvrtc import ptx_of
from .runtime import current_settings

MULTIPROCESSORS = 4


class EmulatorRuntime:
    """Loads kernels for the CPU; stands in for ``cupyconv.gpu.launch.CupyRuntime``."""

    def __init__(self, architecture: str, checked: bool = True) -> None:
        self.architecture = architecture
        self.checked = checked

    def load(self, launches: Sequence[Launch]) -> None:
        pass  # each is, when it is asked for

    def kernel(self, launch: Launch) -> EmulatedKernel:
        """The kernel of a launch's variant."""
        chosen = current_settings()
        load = _ptx_module if chosen.source == "ptx" else _module
        more = {"counted": True} if chosen.work and chosen.source == "ptx" else {}
        module = load(
            launch.source,
            launch.defines,
            self.architecture,
            self.checked,
            chosen.compiled,
            **more,
        )
        kernel = module.get_function(launch.entry)
        kernel.may_overlap = launch.may_overlap
        return kernel

    def allow(self, kernel: EmulatedKernel, shared_bytes: int) -> None:
        kernel.allow(shared_bytes)

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

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return memory.empty(shape, arrays.numpy_dtype(dtype))

    def conjugate(self, array: np.ndarray) -> np.ndarray:
        return memory.like(np.conjugate(array, order="C"), "conjugate")

    def extended(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return memory.like(backends.CpuBackend().extended(array, shape), "extended")


def backend(arch: str = "sm_80", checked: bool = True) -> EmulatorBackend:
    """The emulator as a backend that stands for a chip such as ``sm_80``.

    A card with few multiprocessors, so that blocks that stay have several tiles each.
    """
    device = replace(Device.of(arch), multiprocessors=MULTIPROCESSORS)
    assert device.architecture is not None
    return EmulatorBackend(device, EmulatorRuntime(device.architecture, checked))


def conv_forward(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    arch: str = "sm_80",
    checked: bool = True,
    out: Any = None,
    **rules: Any,
) -> np.ndarray:
    """``cupyconv.conv_forward`` on the emulator.

    Args:
        x, w, bias, out, rules: As for the library's function; ``impl`` names the kernel family.
        arch: The chip to stand for.
        checked: Run under the checker; False is faster.

    Returns:
        y as an ordinary NumPy array (``out`` if given).

    Raises:
        CheckerError: The checker has something to report, an unwritten element included.
        ConvError: As the library's function.
    """

    def call(result: Any) -> Any:
        inputs = _inputs(x=x, w=w, bias=bias)
        return operations.conv_forward(**inputs, out=result, **rules)

    return _run(call, out, arch, checked)


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
    arch: str = "sm_80",
    checked: bool = True,
    out: Any = None,
    **rules: Any,
) -> np.ndarray:
    """``cupyconv.conv_transpose`` on the emulator; arguments as for ``conv_forward``."""

    def call(result: Any) -> Any:
        return operations.conv_transpose(**_inputs(x=x, w=w, bias=bias), out=result, **rules)

    return _run(call, out, arch, checked)


def _inputs(**given: Any) -> dict[str, np.ndarray | None]:
    """The arrays in emulator memory, strides kept, no kernel allowed to write them."""
    return {
        name: None if value is None else memory.like(np.asarray(value), name)
        for name, value in given.items()
    }


def _run(call: Callable[[Any], np.ndarray], out: Any, arch: str, checked: bool) -> np.ndarray:
    stand_in = None
    if out is not None:
        stand_in = memory.empty_like(out, "out")
        stand_in.flags.writeable = out.flags.writeable
    chosen = backend(arch, checked)
    with mock.patch.object(backends, "of", return_value=chosen):
        result = call(stand_in)
    if checked:
        memory.check_written(result)
    if out is None:
        return np.array(result)
    out[...] = result
    return out
