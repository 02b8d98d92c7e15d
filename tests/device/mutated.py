"""A plugin of pytest's: one module of the library is what $CUPYCONV_MUTANT names instead.

The variable has the module's name, a colon, and the file with its changed text.  The tests that
$CUPYCONV_MUTANT_TESTS lists, in a file of JSON, run in that order, and no others.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

import pytest

VARIABLE = "CUPYCONV_MUTANT"
TESTS_VARIABLE = "CUPYCONV_MUTANT_TESTS"


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if TESTS_VARIABLE in os.environ:
        wanted = json.loads(Path(os.environ[TESTS_VARIABLE]).read_text())
        order = {test: place for place, test in enumerate(wanted)}
        items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])


if VARIABLE in os.environ:
    module, _, _ = os.environ[VARIABLE].partition(":")
    assert module not in sys.modules, f"{module} is loaded already"
    sys.meta_path.insert(0, _Finder(module))
