"""CuPy itself on a machine without a GPU; see README.md in this folder."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from types import ModuleType

RUNNING = "CUPYCONV_DEVICE"
"""Environment variable of processes under ``python -m tests.device``; children inherit it."""


def is_running() -> bool:
    """Return whether CuPy runs on the emulated devices in this process."""
    return bool(os.environ.get(RUNNING))


def activate() -> None:
    """Install the emulated devices in this process; call it before CuPy is imported.

    Raises:
        RuntimeError: CuPy has already been imported.
        tests.device.release.DeviceBuildError: a required package or library is missing.
    """
    from . import release

    release.require_release()
    from . import api, build, devices, graphs, memory, modules, streams  # noqa: F401

    if build.RUNTIME_MODULE in sys.modules:
        raise RuntimeError("CuPy has already been imported, with NVIDIA's runtime")
    products = build.folder()
    # The loader returns these libraries for their names from now on.
    driver = ctypes.CDLL(str(products / build.DRIVER), mode=os.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(products / build.NVRTC), mode=os.RTLD_LOCAL)
    if not nvrtc.device_set_nvrtc(str(build.nvidia_nvrtc()).encode()):
        raise release.DeviceBuildError(f"{build.nvidia_nvrtc()} could not be loaded")
    devices.set_library(driver)
    api.connect(driver)
    # Cubins from another NVRTC carry no source and cannot run here, so use separate caches.
    os.environ["CUPY_CACHE_DIR"] = str(products / "cupy-cache")
    os.environ.setdefault("CUPYCONV_CACHE_DIR", str(products / "cupyconv-cache"))
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB is precompiled
    import cupy_backends.cuda.api as package

    spec = importlib.util.spec_from_file_location(build.RUNTIME_MODULE, products / build.RUNTIME)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[build.RUNTIME_MODULE] = module
    spec.loader.exec_module(module)
    package.runtime = module
    for name in _PRECOMPILED:
        sys.modules[name] = _Precompiled(name)


_PRECOMPILED = ("cupy.random._generator_api", "cupy.cuda.thrust")
"""Modules of CuPy's wheel whose kernels only NVIDIA's runtime can load."""


class _Precompiled(ModuleType):
    """Stand-in module whose functions raise NotImplementedError."""

    available = False

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_, **__):
            raise NotImplementedError(
                f"{self.__name__}.{name} is precompiled in CuPy's wheel and cannot run here"
            )

        return type(name, (), {"__new__": refuse})  # CuPy uses some of them as classes
