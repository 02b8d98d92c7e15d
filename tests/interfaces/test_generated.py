"""Functions of raw_ops and torch that are generated from one template."""

from __future__ import annotations

import inspect
import pickle
import typing
from importlib import import_module

import pytest

from cupyconv import raw_ops

GENERATED = [name for name in raw_ops.__all__ if "Backprop" in name]


@pytest.fixture(params=["raw_ops", "torch"])
def functions(request):
    if request.param == "raw_ops":
        return [getattr(raw_ops, name) for name in GENERATED]
    pytest.importorskip("torch")
    ct = import_module("cupyconv.torch")
    return [getattr(ct, name) for name in ct.__all__ if name.startswith("conv")]


def test_generated_functions_look_written(functions):
    for function in functions:
        assert pickle.loads(pickle.dumps(function)) is function
        parameters = inspect.signature(function).parameters
        assert typing.get_type_hints(function).keys() == {*parameters, "return"}
        documented = inspect.getdoc(function)
        assert all(name in documented for name in (*parameters, function.__name__))
        assert max(map(len, documented.splitlines())) <= 100
        assert "{" not in documented


def test_missing_argument_is_named_with_the_function(functions):
    for function in functions:
        first = next(iter(inspect.signature(function).parameters))
        with pytest.raises(TypeError, match=rf"^{function.__name__}\(\) missing .*'{first}'$"):
            function()
