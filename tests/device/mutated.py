"""A plugin of pytest's: one module of the library is what $CUPYCONV_MUTANT names instead.

The variable has the module's name, a colon, and the file with its changed text.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

VARIABLE = "CUPYCONV_MUTANT"


class _Loader(SourceFileLoader):
    def get_code(self, fullname):
        _, _, text = os.environ[VARIABLE].partition(":")
        return compile(Path(text).read_text(), self.path, "exec", dont_inherit=True)


class _Finder:
    def __init__(self, module: str) -> None:
        self._module = module

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if name != self._module:
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(name, spec.origin)
        return spec


if VARIABLE in os.environ:
    module, _, _ = os.environ[VARIABLE].partition(":")
    assert module not in sys.modules, f"{module} is loaded already"
    sys.meta_path.insert(0, _Finder(module))
