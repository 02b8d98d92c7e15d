"""With this folder on PYTHONPATH, CuPy runs on the emulated devices in every Python process."""

import sys


class _BeforeCuPy:
    """Activates them when CuPy or the driver's bindings are first imported."""

    def find_spec(self, name, path=None, target=None):
        if name in ("cupy", "cupy_backends", "cuda.bindings"):
            sys.meta_path.remove(self)
            from tests import device

            device.activate()


sys.meta_path.insert(0, _BeforeCuPy())
