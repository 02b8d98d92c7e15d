"""The examples in the docstrings of all public functions, classes and methods."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import io
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv import cache_folder
from cupyconv.explaining import page

OPTIONAL = {"cupyconv.dask": ("dask", "cd"), "cupyconv.torch": ("torch", "ct")}
"""Package and usual short name of each module that needs another package."""

MODULES = ("cupyconv", "cupyconv.raw_ops", "cupyconv.cudnn", "cupyconv.onnx", *OPTIONAL)

WITHOUT_EXAMPLE = {
    "cupyconv": {"Plan.replay": "its argument is a Request, which only the library makes"},
}
"""Reasons why public names have no example, keyed by module and name."""

NEEDED = {"cupyconv.warm": "cupy", "cupyconv.dask.to_zarr": "zarr"}
"""Package that an example needs, keyed by full name; the example is left out without it."""

MOST_LINES = 12
"""Largest number of lines of an example, with its output (hand-set)."""


def load(name: str) -> Any:
    if name in OPTIONAL:
        pytest.importorskip(OPTIONAL[name][0])
    return importlib.import_module(name)


def members(kind: type) -> Iterator[tuple[str, Any, bool]]:
    """Yield name, documented object and kind (method or property) of a class's own members."""
    for name, member in list(vars(kind).items()):  # examples may add attributes
        if name.startswith("_"):
            continue
        if isinstance(member, property | cached_property):
            yield name, member, False
        elif inspect.isfunction(member) or isinstance(member, classmethod | staticmethod):
            yield name, getattr(member, "__func__", member), True


def documented(module: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield full name and object of all that a module offers, and whether it needs an example."""
    for name in module.__all__:
        value = getattr(module, name)
        full = f"{module.__name__}.{name}"
        if inspect.isclass(value):
            yield full, value, True
            yield from (
                (f"{full}.{n}", member, callable_) for n, member, callable_ in members(value)
            )
        elif callable(value):
            yield full, value, True


def names_of(module: str) -> dict[str, Any]:
    """Return the names that the examples of a module assume."""
    names = {"cupyconv": cupyconv, "np": np}
    if module in OPTIONAL:
        package, short = OPTIONAL[module]
        return names | {package: importlib.import_module(package), short: load(module)}
    return names | {module.rpartition(".")[2]: load(module)}


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """Let examples write files and settings, and open no browser."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cupyconv, "workspace_limit", None)
    monkeypatch.setattr(page, "open_in_browser", lambda content: None)


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(surroundings, module):
    output = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for name, value, _ in documented(load(module)):
        if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
            continue
        parsed = doctest.DocTestParser().get_doctest(
            inspect.getdoc(value) or "", names_of(module), name, inspect.getsourcefile(cupyconv), 0
        )
        cupyconv.workspace_limit = None
        runner.run(parsed, out=output.write)
    results = runner.summarize(verbose=False)
    assert results.failed == 0, output.getvalue()
    assert results.attempted > 0


@pytest.mark.quick
@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_docstrings_with_examples(module):
    without = set()
    for name, value, needs_example in documented(load(module)):
        text = value.__doc__ or ""
        assert text.strip(), f"{name} has no docstring"
        if not needs_example:
            continue
        lines = [line for line in text.splitlines() if line.lstrip().startswith((">>>", "..."))]
        if not lines:
            without.add(name.removeprefix(f"{module}."))
        assert len(lines) <= MOST_LINES, f"{name} has {len(lines)} lines of example"
    assert without == set(WITHOUT_EXAMPLE.get(module, ()))


COMPLETED = [name for name, owner in cupyconv._MODULES.items() if not owner]


@pytest.mark.quick
@pytest.mark.parametrize("name", [*COMPLETED, *cupyconv._OPTIONAL_MODULES])
def test_completion_offers_public_names_only(name):
    if name in cupyconv._OPTIONAL_MODULES:
        pytest.importorskip(name)
    module = importlib.import_module(f"cupyconv.{name}")
    assert dir(module) == sorted(module.__all__)
    assert not [entry for entry in dir(module) if entry.startswith("_")]
    assert all(hasattr(module, entry) for entry in dir(module))


@pytest.mark.quick
def test_completion_of_the_package_offers_public_names_only():
    settings = {"benchmark", "workspace_limit"}
    assert set(dir(cupyconv)) == {*cupyconv.__all__, *settings}
    assert [name for name in dir(cupyconv) if name.startswith("_")] == ["__version__"]
