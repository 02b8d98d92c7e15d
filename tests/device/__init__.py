"""The real CuPy on a machine without a GPU.  README.md beside this file is the guide."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from types import ModuleType

RUNNING = "CUPYCONV_DEVICE"
"""Set in processes that ``python -m tests.device`` has started, and in their children."""


def is_running() -> bool:
    """Whether this process's CuPy is to run on the emulated devices."""
    return bool(os.environ.get(RUNNING))


def activate() -> None:
    """Make the emulated devices those of this process.  To be called before CuPy is imported.

    Raises:
        RuntimeError: CuPy has been imported already.
        tests.device.release.DeviceBuildError: something that this is built from is missing.
    """
    from . import release

    release.require_release()
    from . import api, build, devices, graphs, memory, modules, streams  # noqa: F401

    if build.RUNTIME_MODULE in sys.modules:
        raise RuntimeError("CuPy has been imported already, on NVIDIA's runtime")
    made = build.folder()
    # Whoever asks the loader for these names from now on gets these.
    driver = ctypes.CDLL(str(made / build.DRIVER), mode=os.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(str(made / build.NVRTC), mode=os.RTLD_LOCAL)
    if not nvrtc.device_set_nvrtc(str(build.nvidia_nvrtc()).encode()):
        raise release.DeviceBuildError(f"{build.nvidia_nvrtc()} could not be loaded")
    devices.know(driver)
    api.connect(driver)
    # What other NVRTCs compiled is of unknown source: caches of our own.
    os.environ["CUPY_CACHE_DIR"] = str(made / "cupy-cache")
    os.environ.setdefault("CUPYCONV_CACHE_DIR", str(made / "cupyconv-cache"))
    os.environ["CUPY_ACCELERATORS"] = ""  # CUB is precompiled
    import cupy_backends.cuda.api as package

    spec = importlib.util.spec_from_file_location(build.RUNTIME_MODULE, made / build.RUNTIME)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[build.RUNTIME_MODULE] = module
    spec.loader.exec_module(module)
    package.runtime = module
    for name in _PRECOMPILED:
        sys.modules[name] = _Precompiled(name)


_PRECOMPILED = ("cupy.random._generator_api", "cupy.cuda.thrust")
"""Modules of CuPy's wheel with kernels that NVIDIA's runtime alone can load."""


class _Precompiled(ModuleType):
    """Says that what is asked of it cannot be had, where the module itself would answer garbage."""

    available = False

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_, **__):
            raise NotImplementedError(
                f"{self.__name__}.{name} is precompiled in CuPy's wheel and cannot run here"
            )

        return type(name, (), {"__new__": refuse})  # CuPy takes some of them for classes
