"""Errors keep their text, arguments, attributes and notes when they are copied or pickled."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem
from cupyconv.errors import CupyconvError

SECONDS = 300
"""Maximum seconds for a result from another process (hand-set)."""


def modules() -> Iterator[object]:
    """Yield every module of the library and the command line that can be imported."""
    for entry in pkgutil.walk_packages(cupyconv.__path__, "cupyconv."):
        if entry.name.endswith("__main__"):
            continue
        try:
            yield importlib.import_module(entry.name)
        except ImportError:
            continue
        except cupyconv.ConvTypeError:  # a module that requires a missing package
            continue


def exception_classes() -> list[type[Exception]]:
    """Return every exception class of the library and the command line."""
    classes = {
        value
        for module in modules()
        for value in vars(module).values()
        if inspect.isclass(value)
        and issubclass(value, Exception)
        and value.__module__.startswith("cupyconv")
    }
    return sorted(classes, key=lambda kind: (kind.__module__, kind.__qualname__))


CLASSES = exception_classes()


def example(kind: type[Exception]) -> Exception:
    """Return an error of a class, with a text for each argument and a note."""
    positional, named = ["the message"], {}
    parameters = []
    if inspect.isfunction(kind.__init__):  # built-in classes have no signature
        positional, parameters = [], list(inspect.signature(kind).parameters.values())
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[parameter.name] = f"the {parameter.name}"
        elif parameter.kind is not parameter.VAR_KEYWORD:
            positional.append(f"the {parameter.name}")
    error = kind(*positional, **named)
    error.add_note("a note")
    return error


class OddError(ConvError):
    """Subclass with other arguments than its base."""

    def __init__(self, count: int, *, layer: str) -> None:
        super().__init__(f"{layer} must have a rule", f"got {count}", "Give one")
        self.count = count


def odd() -> OddError:
    error = OddError(3, layer="conv1")
    error.extra = {"sizes": [1, 2]}
    return error


def refused_call() -> None:
    cupyconv.conv_forward(np.ones((1, 3, 5, 5)), np.ones((4, 2, 3, 3)), stride=2)


def described(error: BaseException) -> tuple[object, ...]:
    return type(error), str(error), repr(error), error.args, vars(error)


def ways() -> Iterator[tuple[str, Callable[[Exception], Exception]]]:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield f"pickle {protocol}", lambda e, p=protocol: pickle.loads(pickle.dumps(e, p))
    yield "copy", copy.copy
    yield "deepcopy", copy.deepcopy


WAYS = dict(ways())


def raised(make: Callable[..., Exception], *arguments: object) -> None:
    raise make(*arguments)


def raised_from_another(make: Callable[..., Exception], *arguments: object) -> None:
    raise make(*arguments) from ValueError("the cause")


def test_exception_classes_are_found():
    names = {kind.__name__ for kind in CLASSES}
    assert {"ConvError", "ConvTypeError", "DeviceError", "KernelCompileError"} <= names
    assert {"WorkerError", "NoCeilingError"} <= names
    assert all(issubclass(kind, CupyconvError) for kind in CLASSES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_error_survives_a_copy(kind, way):
    error = example(kind)
    arrived = WAYS[way](error)
    assert arrived is not error
    assert described(arrived) == described(error)
    assert arrived.__notes__ == ["a note"]


@pytest.mark.parametrize("way", WAYS)
def test_error_of_a_subclass_survives_a_copy(way):
    arrived = WAYS[way](odd())
    assert described(arrived) == described(odd())
    assert (arrived.count, arrived.extra, arrived.axis) == (3, {"sizes": [1, 2]}, None)


@pytest.mark.parametrize("way", WAYS)
def test_error_of_a_problem_survives_a_copy(way):
    with pytest.raises(ConvError) as caught:
        ConvProblem((1, 1, 9, 3), (1, 1, 3, 4), padding=((0, 0), (0, 0)))
    error = caught.value
    assert described(WAYS[way](error)) == described(error)
    assert WAYS[way](error).axis == "W"


@pytest.mark.thorough
@pytest.mark.costly
def test_errors_return_from_other_processes():
    context = get_context("spawn")  # fork copies locks that other threads hold
    tasks = [(raised, (example, kind)) for kind in CLASSES]
    tasks += [(raised_from_another, (example, ConvError)), (raised, (odd,)), (refused_call, ())]
    arrived = []
    with ProcessPoolExecutor(1, context) as processes:
        for call, arguments in tasks:
            with pytest.raises(CupyconvError) as caught:
                processes.submit(call, *arguments).result(SECONDS)
            arrived.append(caught.value)
    for error, (call, arguments) in zip(arrived, tasks, strict=True):
        with pytest.raises(CupyconvError) as caught:
            call(*arguments)
        assert described(error) == described(caught.value)
