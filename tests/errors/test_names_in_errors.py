"""Errors use the names of the called function's arguments, in every interface.

For each function of each interface, the tests make one argument at a time wrong in every way.  The
error must name this argument, and must not use names that the function does not have.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, cudnn
from cupyconv.errors import ConvTypeError
from tests.layer_functions import BATCH, OUTPUTS, PIXELS, SHAPES, TAPS, WAYS, C, K, Way

BESIDE = {
    *("activation", "impl", "measure", "needs", "precision"),
    *("auto_tune", "d_layout", "deterministic", "tensor_core", "w_layout"),
    *("dtype", "name", "transposed", "use_cudnn_on_gpu"),
}
"""Parameters that do not describe the layer."""

IN_WORDS = {
    "x": "input",
    "w": "filter",
    "b": "bias",
    "x_shape": "x|input",
    "w_shape": "filter",
    "input_shape": "input",
    "input_sizes": "input",
    "input_size": "input",
    "filter_shape": "filter",
    "filter_sizes": "filter",
    "weight_size": "weight",
    "output_shape": "result|output",
    "dilations": r"dilation \d+",
    "passes": "pass",
    "pass_": "pass",
    "tensor": "map",
    "problem": "ConvProblem",
}
"""Regular expressions of other names of a parameter in messages."""

RELATIONS = {
    "another dtype",
    "another batch",
    "no channels",
    "no divisor",
    "other",
    "too large",
    "wrong channels",
}
"""Faults for which an error may name another argument instead, which does not match."""


ACCEPTED = (
    "*.conv_forward x: another batch",  # no other tensor has a batch
    "*.conv x: another batch",
    "*Conv* input: another batch",
    "*conv?d input: another batch",
    "*conv_transpose* [ix]*: another batch",
    "*conv_transpose* *: too large",
    "raw_ops.Conv3D* *: too large",  # SAME pads as much as the filter needs
    "raw_ops.Conv2DBackprop*V2 *: *dtype*",  # only the array's shape is used
    "raw_ops.DepthwiseConv2dNative filter: wrong channels",
    "onnx.conv_transpose* pads: *",  # ignored if there is an output_shape
    "onnx.conv_transpose_problem group: other",
    "problem.from_output groups: other",
    "explain title: a long word",
    "*conv_backprop_bias dy: another batch",
    "*conv_backprop_bias dy: too large",
    "dask.*conv_backprop_bias dy: *",
    "raw_ops.BiasAddGrad out_backprop: *",  # any number of axes is valid
    "cudnn.* b: too many axes",
)
"""Changes that are not faults: the interface, the argument and the change."""


# -- faults ----------------------------------------------------------------------------------------


def faults(way: Way, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield possible faults of an argument, each with a faulty value."""
    rank, several = way.rank, isinstance(value, list)
    if way.is_array(name):
        yield from faults_of_an_array(way, name)
    elif name in SHAPES:
        yield "a number", 5
        yield "fractions", [1.5] * len(value)
        yield "too few", value[:1]
        yield "negative", [-1] * len(value)
        yield "other", [size + 7 for size in value]
    elif name in ("stride", "strides", "dilation", "dilations"):
        yield "fractions", [1.5] * len(value) if several else 1.5
        yield "too many", [1] * 7
        yield "a word", "two"
        wrong = {"zero": 0, "negative": -2, "huge": 1 << 70}
        if name.startswith("dilation") and not way.transposes:
            wrong["too large"] = 19
        for label, number in wrong.items():
            yield label, [1, *[number] * rank, 1] if way.last else [number] * rank
            if not several:
                yield f"{label}, alone", number
    elif name in ("padding", "pad", "pads", "explicit_paddings"):
        if name != "explicit_paddings":
            yield "a word", "sane"
        if not isinstance(value, str):
            yield "fractions", [1.5] * len(value) if several else 1.5
            yield "too many", [1] * 17
            yield "negative", [-n for n in value] if several else -1
            yield "huge", [n << 70 for n in value] if several else 1 << 70
            if not way.transposes:
                yield "not to be counted", [n << 62 for n in value] if several else 1 << 62
    elif name in ("groups", "group"):
        yield "fractions", 1.5
        yield "zero", 0
        yield "a word", "two"
        yield "no divisor", 3
        yield "other", 4
    elif name in ("data_format", "filter_format", "auto_pad"):
        yield "a word", "NHCW"
    elif name == "kernel_shape":
        yield "a number", 3
        yield "other", [5] * rank
    elif name == "output_padding":
        yield "fractions", [0.5] * rank
        yield "too many", [0] * 5
        yield "negative", [-1] * rank
        yield "too much", [2] * rank
    else:
        raise AssertionError(f"what can be wrong with {name}?")


def faults_of_an_array(way: Way, name: str) -> Iterator[tuple[str, Any]]:
    tensor = way.tensor(name)
    shape = way.shape(tensor)

    def with_sizes(old: int, new: int, dtype: str = "float32") -> Any:
        sizes = [new if size == old else size for size in shape]
        return way.make(np.ones(sizes, dtype))

    yield "no array", [[1.0]]
    yield "another dtype", with_sizes(0, 0, "float64")
    yield "no dtype of ours", with_sizes(0, 0, "int32")
    yield "no axes", way.make(np.ones((), "float32"))
    yield "too many axes", way.make(np.ones((1, 1, *shape, 1), "float32"))
    channels = {"x": C, "w": K // C if K not in shape else K, "y": K, "bias": max(shape)}[tensor]
    yield "wrong channels", with_sizes(channels, channels + 1)
    if tensor == "bias":
        return
    yield "no channels", with_sizes(channels, 0)
    if tensor != "w":
        yield "another batch", with_sizes(BATCH, BATCH + 1)
    if tensor == "y":
        yield "too large", with_sizes(OUTPUTS, 12)
    if tensor == "x":
        yield "no pixels", with_sizes(PIXELS, 0)
    if tensor == "w":
        yield "too large", with_sizes(TAPS, 12)
        yield "no taps", with_sizes(TAPS, 0)


class Unshown:
    """Object whose repr raises."""

    def __repr__(self):
        raise RuntimeError("none")


def nested(depth: int) -> list:
    return [nested(depth - 1)] if depth else []


NONSENSE = {
    "a fraction": 1.5,
    "a truth value": True,
    "a number that Python does not write": 10**5000,
    "bytes": b"\1\2",
    "a set": {1, 2},
    "a mapping": {1: 1, 2: 2},
    "lists in lists": nested(900),
    "many numbers": list(range(100_000)),
    "a long word": "x" * 100_000,
    "an array without axes": np.array(1.5),
    "an array with some": np.full((2, 2), 1.5),
    "what cannot be quoted": Unshown(),
}
"""Values that are invalid for every argument that is not a bool."""

FLAGS = {"auto_tune", "deterministic", "measure", "name", "use_cudnn_on_gpu", "transposed"}

LONGEST = 1000
"""Maximum number of characters of an error message."""


NAMES = (
    r"\b(?:x|w|dy|dx|dw|y|b|gy|gW|[a-z]+(?:_[a-z]+)+|weight|input\.\w+)\b|(?<!has )\bW\b(?! = )"
    r"|\b(?:the|a) filter\b|\bfilter \d|\b\w+(?==\w)"
)
"""Pattern of words in messages that are arguments of some function."""

PROSE = {"same_lower", "channels_first", "channels_last", "dtype"}
"""Words that are also ordinary words in messages."""


def strangers(way: Way, message: str) -> set[str]:
    """Return the names in a message that are not parameters of the called function."""
    text = re.sub(r"\(axis [DHW]\)|\b(?:numpy|cupy|torch|cupyconv|dask)\.[\w.]+", "", message)
    known = {*way.parameters, *PROSE}
    for name in way.parameters:
        known |= set(IN_WORDS.get(name, name).split("|"))
    found = re.findall(NAMES, text)
    return {name for name in found if not known & set(re.findall(r"\w+", name))}


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_errors_have_the_callers_names(way):
    valid = way.valid()
    way.finish(way.call(**valid))
    assert set(way.parameters) - set(valid) <= BESIDE | {way.without}
    found = []
    for name in set(valid) - BESIDE:
        for fault, wrong in faults(way, name, valid[name]):
            what = f"{way.name} {name}: {fault}"
            try:
                way.finish(way.call(**{**valid, name: wrong}))
            except (ConvError, ConvTypeError) as error:
                message = str(error)
            else:
                if not any(fnmatch(what, pattern) for pattern in ACCEPTED):
                    found.append(f"{what} is accepted")
                continue
            others = [one for one in valid if way.tensor(one)] if fault in RELATIONS else []
            called = "|".join(f"{one}|{IN_WORDS.get(one, one)}" for one in (name, *others))
            if not re.search(rf"\b(?:{called})\b", message):
                found.append(f"{what} is not named: {message}")
            if unknown := strangers(way, message):
                found.append(f"{what} names {unknown}: {message}")
    assert found == []


def refusals(called: str, call: Callable[..., Any], valid: dict[str, Any], *names: str) -> list:
    """Return the wrong reactions of a function to invalid arguments."""
    found = []
    for name in names:
        for label, value in NONSENSE.items():
            what = f"{called} {name}: {label}"
            try:
                call(**{**valid, name: value})
            except (ConvError, ConvTypeError) as error:
                message = str(error)
                named = re.search(rf"\b(?:{name}|{IN_WORDS.get(name, name)})\b", message)
                if not named or len(message) > LONGEST:
                    found.append(f"{what} is not named, or the error is long: {message[:LONGEST]}")
            except Exception as error:
                found.append(f"{what} is {type(error).__name__}: {error}")
            else:
                if not any(fnmatch(what, pattern) for pattern in ACCEPTED):
                    found.append(f"{what} is accepted")
    return found


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_nonsense_is_refused(way):
    valid = way.valid()
    names = [name for name in way.parameters if name not in FLAGS and name != way.without]
    assert refusals(way.name, lambda **given: way.finish(way.call(**given)), valid, *names) == []


LAYER = ConvProblem((1, 2, 5, 5), (3, 2, 3, 3))
X, W, DY = (np.ones(shape, "float32") for shape in ((1, 2, 5, 5), (3, 2, 3, 3), (1, 3, 3, 3)))
TOLD = cupyconv.explain(LAYER)
PLAN = cupyconv.plan(LAYER, "cpu")

OTHERS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "plan": (cupyconv.plan, {"problem": LAYER}, "problem device impl precision workspace_limit"),
    "Plan.__getitem__": (PLAN.__getitem__, {}, "pass_"),
    "prepare": (cupyconv.prepare, {"w": W, "problem": LAYER}, "w problem passes precision impl"),
    "conv_backward": (cupyconv.conv_backward, {"x": X, "w": W, "dy": DY}, "needs precision impl"),
    "explain": (
        cupyconv.explain,
        {"problem": LAYER},
        "problem x w dy y dx dw title values seed",
    ),
    "element": (TOLD.element, {"name": "dw[0,0,0,0]"}, "name x w dy"),
    "svg": (TOLD.svg, {}, "element"),
    "page": (TOLD.page, {}, "element"),
    "map": (TOLD.map, {}, "tensor"),
    "code": (TOLD.code, {}, "framework"),
    "gemm": (LAYER.gemm, {}, "pass_"),
    "require_output_gradient": (LAYER.require_output_gradient, {}, "shape"),
    "set_max_workspace_size": (cudnn.set_max_workspace_size, {}, "size"),
}
"""Functions that do not take a layer's rules: function, valid arguments, parameters to test."""

if find_spec("cupy"):
    words = "device passes activation layout precision impl"
    OTHERS["warm"] = cupyconv.warm, {"problems": LAYER, "device": "sm_80"}, words
if find_spec("dask"):
    suggest = import_module("cupyconv.dask").suggest_chunks
    OTHERS["suggest_chunks"] = suggest, {"problem": LAYER, "memory_limit": 1 << 20}, "problem"


@pytest.mark.parametrize("name", OTHERS)
def test_nonsense_is_refused_elsewhere_too(name):
    call, valid, wrong = OTHERS[name]
    assert refusals(name, call, valid, *wrong.split()) == []


@pytest.mark.parametrize("name", ["", ".raw_ops", ".onnx", ".cudnn", ".torch", ".dask"])
def test_every_function_that_takes_a_layer_is_among_these(name):
    module = pytest.importorskip(f"cupyconv{name}", exc_type=ImportError)
    tried = {way.call for way in WAYS}
    public = [getattr(module, name) for name in module.__all__]
    layers = {f for f in public if inspect.isfunction(f) and "conv" in f.__name__.lower()}
    assert layers <= tried
