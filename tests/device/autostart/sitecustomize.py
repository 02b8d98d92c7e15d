"""Run CuPy on the emulated devices in every Python process with this folder on PYTHONPATH."""

import sys


class _BeforeCuPy:
    """Import hook that activates the devices on the first import of CuPy or cuda.bindings."""

    def find_spec(self, name, path=None, target=None):
        if name in ("cupy", "cupy_backends", "cuda.bindings"):
            sys.meta_path.remove(self)
            from tests import device

            device.activate()


sys.meta_path.insert(0, _BeforeCuPy())
