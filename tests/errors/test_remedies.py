"""Remedies in error messages: the tests read them from the text, apply them and repeat the call."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, backends, cudnn, formats, onnx, raw_ops
from cupyconv.arrays import numpy_dtype
from cupyconv.cli.main import main
from tests.configurations import random_problem
from tests.layer_functions import WAYS
from tests.ways_out import Layout, alternatives, applied

CONFIGURATIONS = 250
"""Invalid configurations to test per function (hand-set)."""


class ReachedError(Exception):
    """Raised when a call has passed its checks."""


def stop_after_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls raise ReachedError, instead of computing, once their arguments are checked."""

    def reached(*_: object, **__: object) -> None:
        raise ReachedError

    for name in ("empty", "run", "sum_bias", "conjugate"):
        monkeypatch.setattr(backends.CpuBackend, name, reached, raising=False)


@pytest.fixture(autouse=True)
def _nothing_is_computed(monkeypatch):
    stop_after_checks(monkeypatch)


class Style(NamedTuple):
    """Arguments that describe a layer in an interface.

    Attributes:
        rules: returns the arguments that describe the layer of a problem.
        orders: returns the data format and the filter format of arguments, for a number of spatial
            axes.
        words: names of x and w in messages; None if messages have the arguments' names.
        array: makes an array of a shape.
        padding, dilation, entries: as for Layout.
    """

    rules: Callable[[ConvProblem], dict[str, Any]]
    orders: Callable[[dict[str, Any], int], tuple[str, str]]
    words: tuple[str, str] | None = ("input", "filter")
    array: Callable[[Any], Any] = lambda shape: np.broadcast_to(np.float32(1), shape)
    padding: str = "padding"
    dilation: str = "dilation"
    entries: str = "any"


class Function(NamedTuple):
    """Function to test, with arguments in which shapes replace tensors.

    Attributes:
        make: returns the arguments of a valid call for a problem.
        call: calls the function with arrays of the given shapes.
        layout: returns how the arguments are interpreted.
        x, w, y: names of the arguments that are tensors or their sizes.
        rank: number of spatial axes; 0 for any number.
    """

    make: Callable[[ConvProblem], dict[str, Any]]
    call: Callable[..., Any]
    layout: Callable[[dict[str, Any]], Layout]
    x: str | None
    w: str
    y: str | None
    rank: int = 0


def function(
    call: Callable[..., Any],
    style: Style,
    x: str | None,
    w: str,
    y: str | None = None,
    bias: str | None = None,
    *,
    out: str | None = None,
    rank: int = 0,
    transposed: bool = False,
) -> Function:
    """Return a Function, from the names of a function's arguments.

    Args:
        call: the function.
        style: style of its interface.
        x, w, y, bias: arguments that are the tensors of a layer, or their sizes; None for tensors
            that the function does not take.
        out: argument for the result, if it is not one of these.
        rank: as for Function.
        transposed: whether the function is a transposed convolution, which maps y to x.
    """
    arguments = {"x": x, "y": y or out, "w": w, "bias": bias}
    arguments = {tensor: name for tensor, name in arguments.items() if name}
    x_word, w_word = style.words or (x, w)
    words = {"x": "result" if transposed else x_word, "w": w_word, "bias": "bias"}
    owners = {words.get(tensor, name): name for tensor, name in arguments.items()}

    def make(p: ConvProblem) -> dict[str, Any]:
        channels = p.C if transposed else p.K
        shapes = {"x": p.input_shape, "y": p.output_shape, "w": p.filter_shape, "bias": (channels,)}
        given = {name: shapes[tensor] for tensor, name in arguments.items()}
        given |= {name: list(shape) for name, shape in given.items() if name.endswith("sizes")}
        return given | style.rules(p)

    def with_arrays(**given: Any) -> Any:
        arrays = [name for name in arguments.values() if not re.search("_(shape|sizes?)$", name)]
        made = {name: style.array(given[name]) for name in arrays if given.get(name) is not None}
        return call(**{**given, **made})

    def layout(given: dict[str, Any]) -> Layout:
        orders = style.orders(given, len(given[w]) - 2)
        return Layout(owners, *orders, w, style.padding, style.dilation, style.entries)

    return Function(make, with_arrays, layout, x, w, y, rank)


def orders(given: dict[str, Any], rank: int) -> tuple[str, str]:
    data = formats.resolve_data_format(given.get("data_format"), rank)
    return data, formats.resolve_filter_format(given.get("filter_format"), rank, data)


OWN = Style(lambda problem: dict(problem.keywords), orders)


def tf_rules(problem: ConvProblem) -> dict[str, Any]:
    def spread(values: tuple[int, ...]) -> list[int]:
        sizes = dict(zip("DHW"[3 - len(values) :], values, strict=True))
        return [sizes.get(letter, 1) for letter in problem.data_format]

    given = {
        "strides": spread(problem.stride),
        "dilations": spread(problem.dilation),
        "padding": problem.padding_mode.upper(),
        "data_format": problem.data_format,
    }
    if problem.padding_mode == "explicit":
        axes = dict(zip("DHW"[3 - problem.spatial_rank :], problem.padding, strict=True))
        given["explicit_paddings"] = [
            side for letter in problem.data_format for side in axes.get(letter, (0, 0))
        ]
    return given


TF = Style(
    tf_rules,
    lambda given, rank: (given["data_format"], formats.filter_formats(rank)[1]),
    padding="",
    dilation="dilations",
    entries="all",
)


def onnx_rules(problem: ConvProblem) -> dict[str, Any]:
    return {
        "strides": list(problem.stride),
        "dilations": list(problem.dilation),
        "pads": [pad for side in (0, 1) for pad in (pair[side] for pair in problem.padding)],
        "group": problem.groups,
    }


ONNX = Style(
    onnx_rules,
    lambda _, rank: orders({}, rank),
    padding="pads",
    dilation="dilations",
    entries="spatial",
)


def cudnn_rules(problem: ConvProblem) -> dict[str, Any]:
    return {
        "pad": problem.padding,
        "stride": problem.stride,
        "dilation": problem.dilation,
        "groups": problem.groups,
        "auto_tune": False,
        "tensor_core": "auto",
        "d_layout": int(problem.data_format.endswith("C")),
        "w_layout": int(problem.filter_format.endswith("I")),
    }


def cudnn_orders(given: dict[str, Any], rank: int) -> tuple[str, str]:
    data = formats.data_formats(rank)[given["d_layout"]]
    return data, formats.filter_formats(rank)[2 * given["w_layout"]]


CUDNN = Style(
    cudnn_rules, cudnn_orders, None, lambda shape: np.ones(shape, np.float32), padding="pad"
)


def torch_rules(problem: ConvProblem) -> dict[str, Any]:
    return {
        "stride": problem.stride,
        "padding": tuple(before for before, _ in problem.padding),
        "dilation": problem.dilation,
        "groups": problem.groups,
    }


TORCH = Style(
    torch_rules,
    lambda _, rank: orders({}, rank),
    ("input", "weight"),
    lambda shape: import_module("torch").ones(shape),
)

FUNCTIONS: dict[str, Function] = {
    "ConvProblem": function(ConvProblem, OWN, "input_shape", "filter_shape"),
    "conv_forward": function(cupyconv.conv_forward, OWN, "x", "w", bias="bias"),
    "conv_backprop_input": function(cupyconv.conv_backprop_input, OWN, "input_shape", "w", "dy"),
    "conv_backprop_filter": function(cupyconv.conv_backprop_filter, OWN, "x", "filter_shape", "dy"),
    "conv_backward": function(cupyconv.conv_backward, OWN, "x", "w", "dy"),
    "conv_transpose": function(
        cupyconv.conv_transpose, OWN, "output_shape", "w", "x", "bias", transposed=True
    ),
    "Conv2D": function(raw_ops.Conv2D, TF, "input", "filter", rank=2),
    "Conv2DBackpropInput": function(
        raw_ops.Conv2DBackpropInput, TF, "input_sizes", "filter", "out_backprop", rank=2
    ),
    "Conv2DBackpropFilter": function(
        raw_ops.Conv2DBackpropFilter, TF, "input", "filter_sizes", "out_backprop", rank=2
    ),
    "Conv3D": function(raw_ops.Conv3D, TF, "input", "filter", rank=3),
    "DepthwiseConv2dNative": function(
        raw_ops.DepthwiseConv2dNative, TF, "input", "filter", rank=2
    )._replace(
        make=lambda p: {
            "input": p.input_shape,
            "filter": (*p.filter_shape[:2], p.C, p.K // p.C or 1),
            **tf_rules(p),
        }
    ),
    "onnx.conv": function(onnx.conv, ONNX, "x", "w", bias="b"),
    "onnx.conv_transpose": function(
        onnx.conv_transpose, ONNX, None, "w", "x", "b", transposed=True
    ),
    "convolution_forward": function(cudnn.convolution_forward, CUDNN, "x", "W", bias="b", out="y"),
    "convolution_backward_filter": function(
        partial(cudnn.convolution_backward_filter, deterministic=True), CUDNN, "x", "gW", "gy"
    ),
}
if find_spec("torch"):
    in_torch = import_module("cupyconv.torch")
    FUNCTIONS["torch.conv2d"] = function(
        in_torch.conv2d, TORCH, "input", "weight", bias="bias", rank=2
    )
    FUNCTIONS["torch.conv2d_input"] = function(
        in_torch.conv2d_input, TORCH, "input_size", "weight", "grad_output", rank=2
    )
if find_spec("dask"):
    on_chunks = import_module("cupyconv.dask")
    FUNCTIONS["dask.conv_forward"] = function(on_chunks.conv_forward, OWN, "x", "w", bias="bias")
    FUNCTIONS["dask.conv_backprop_filter"] = function(
        on_chunks.conv_backprop_filter, OWN, "x", "filter_shape", "dy"
    )
    FUNCTIONS["dask.conv_transpose"] = function(
        on_chunks.conv_transpose, OWN, "output_shape", "w", "x", "bias", transposed=True
    )


# -- invalid configurations ------------------------------------------------------------------------


def drawn(rng: random.Random, name: str) -> dict[str, Any]:
    """Return random arguments of a valid call."""
    function = FUNCTIONS[name]
    while True:
        problem = random_problem(rng.randint, max_macs=20_000)
        layouts: dict[str, Any] = {}
        if function.rank and problem.spatial_rank != function.rank:
            continue
        if name == "DepthwiseConv2dNative" and problem.groups != problem.C:
            continue
        rank = problem.spatial_rank
        if name[0].isupper() and name != "ConvProblem":  # operations of TensorFlow
            layouts = {"filter_format": formats.filter_formats(rank)[1]}
            if problem.padding_mode == "same_lower" or (
                rank == 3 and problem.padding_mode == "explicit"
            ):
                continue
        elif name.startswith(("onnx", "torch")):
            if name.startswith("torch") and any(
                before != after for before, after in problem.padding
            ):
                continue
            layouts = dict.fromkeys(("data_format", "filter_format"))
        elif (
            name.startswith("convolution")
            and problem.filter_format == formats.filter_formats(rank)[1]
        ):
            continue
        if min(problem.input_shape, default=1) < 1:
            continue
        if layouts:
            problem = in_layouts(problem, layouts)
        given = function.make(problem)
        try:
            function.call(**given)
        except ReachedError:
            return given
        except (ConvError, ConvTypeError):
            continue
        return given


def in_layouts(problem: ConvProblem, layouts: dict[str, Any]) -> ConvProblem:
    """Return the same layer in other memory orders."""
    rank = problem.spatial_rank
    data, filters = orders({"data_format": problem.data_format, **layouts}, rank)
    sizes = dict(zip(problem.data_format, problem.input_shape, strict=True))
    taps = dict(zip(problem.filter_format, problem.filter_shape, strict=True))
    return problem.replace(
        input_shape=tuple(sizes[letter] for letter in data),
        filter_shape=tuple(taps[letter] for letter in filters),
        data_format=data,
        filter_format=filters,
        padding=problem.padding if problem.padding_mode == "explicit" else problem.padding_mode,
    )


def spoiled(rng: random.Random, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with one random fault."""
    function, wrong = FUNCTIONS[name], dict(given)
    layout = function.layout(given)
    tensors = [one for one in (function.x, function.w, function.y) if one]
    strides = next(key for key in ("stride", "strides") if key in given)
    groups = next((key for key in ("groups", "group") if key in given), None)
    fault = rng.randrange(11)
    if fault == 0:  # one axis has another size
        tensor = rng.choice(tensors)
        shape = list(wrong[tensor])
        axis = rng.randrange(len(shape))
        shape[axis] = max(shape[axis] + rng.choice((-2, -1, 1, 2, 5)), 1)
        wrong[tensor] = type(wrong[tensor])(shape)
    elif fault == 1 and groups:
        wrong[groups] = rng.choice((0, 2, 3, wrong[groups] + 1))
    elif fault == 2:  # x or y or both have the other memory order
        rank = len(layout.data) - 2
        other = next(one for one in formats.data_formats(rank) if one != layout.data)
        for tensor in rng.choice(([function.x], [function.x, function.y], [function.y])):
            if tensor:
                permute(wrong, tensor, layout.data, other)
    elif fault == 3:  # the filter has another memory order
        rank = len(layout.filter) - 2
        others = [one for one in formats.filter_formats(rank) if one != layout.filter]
        others.append(layout.filter.translate(str.maketrans("OI", "IO")))
        permute(wrong, function.w, layout.filter, rng.choice(others))
    elif fault == 4:  # the strides have another length or order
        value = wrong[strides]
        values = [value] if isinstance(value, int) else list(value)
        spatial = values if len(values) == len(layout.data) - 2 else [*values[:1], 2]
        wrong[strides] = rng.choice(
            ([2], [1, *spatial, 1], [1, 1, *spatial], spatial, [2] * (len(spatial) + 1))
        )
    elif fault == 5:
        for key in ("data_format", "filter_format"):
            if rng.random() < 0.7 and not name[0].isupper():
                wrong.pop(key, None)
    elif fault == 6 and "data_format" in given:
        words = formats.data_formats(rng.randint(1, 3))
        wrong["data_format"] = rng.choice(words)
    elif fault == 7 and "bias" in layout.owners and layout.owners["bias"] in wrong:
        bias = layout.owners["bias"]
        wrong[bias] = rng.choice(((wrong[bias][0] + 1,), (), (wrong[bias][0], 1)))
    elif fault == 8 and function.x and not name.startswith("torch"):
        wrong[function.x] = wrong[function.x][1:]
    elif fault == 9:  # the filter is too large
        shape = list(wrong[function.w])
        axis = rng.choice([n for n, letter in enumerate(layout.filter) if letter in "DHW"])
        shape[axis] += rng.choice((3, 9))
        wrong[function.w] = type(wrong[function.w])(shape)
    elif fault == 10 and "explicit_paddings" in given:
        sides = wrong["explicit_paddings"]
        wrong["explicit_paddings"] = rng.choice(
            (sides[2:6], [*sides[2:], *sides[:2]], [1, 1, *sides[2:]])
        )
    return wrong


def permute(wrong: dict[str, Any], tensor: str, source: str, target: str) -> None:
    shape = wrong[tensor]
    wrong[tensor] = type(shape)(shape[source.index(letter)] for letter in target)


def outcome(function: Function, given: dict[str, Any]) -> ConvError | ConvTypeError | None:
    try:
        function.call(**given)
    except ReachedError:
        return None
    except (ConvError, ConvTypeError) as error:
        return error
    return None


@pytest.mark.costly
@pytest.mark.parametrize("name", FUNCTIONS)
def test_remedies_work(name):
    rng, function = random.Random(f"ways out of {name}"), FUNCTIONS[name]
    counts: Counter[str] = Counter()
    while counts["refused"] < CONFIGURATIONS:
        valid = drawn(rng, name)
        wrong = spoiled(rng, name, valid)
        twice = rng.random() < 0.2
        if twice:
            try:
                wrong = spoiled(rng, name, wrong)
            except (ConvError, ValueError, IndexError, TypeError, StopIteration):
                continue
        error = outcome(function, wrong)
        if error is None:
            continue
        counts["refused"] += 1
        if not isinstance(error, ConvError) or not error.fixes:
            counts["without"] += 1
            counts["without, one fault"] += not twice
            continue
        for way_out in alternatives(error.remedy):
            after = applied(wrong, way_out, error.axis, readable(function))
            then = outcome(function, after)
            assert then is None, f"{name}({wrong}): {error}\n\nafter '{way_out}', {after}:\n{then}"
    # Meaningless numbers have no remedy.
    assert counts["without, one fault"] < 0.4 * counts["refused"], counts


OPTIONS = {"input_shape": "--input", "filter_shape": "--filter"}


def as_options(given: dict[str, Any]) -> list[str]:
    """Convert arguments of ConvProblem to command-line options."""
    options = []
    for name, value in given.items():
        text = str(value)
        if name == "padding" and isinstance(value, tuple):
            text = ",".join(f"{before}:{after}" for before, after in value)
        elif isinstance(value, (tuple, list)):
            text = "x".join(map(str, value))
        if value is not None:
            options += [OPTIONS.get(name, f"--{name.replace('_', '-')}"), text]
    return options


def from_option(name: str, text: str) -> tuple[str, Any]:
    """Convert a command-line option to an argument of ConvProblem."""
    argument = {word: name for name, word in OPTIONS.items()}.get(name, name[2:].replace("-", "_"))
    if argument == "padding" and ":" in text:
        return argument, tuple(tuple(map(int, side.split(":"))) for side in text.split(","))
    if re.fullmatch(r"\d+(x\d+)*", text):
        sizes = tuple(map(int, text.split("x")))
        return argument, sizes if argument.endswith("shape") or len(sizes) > 1 else sizes[0]
    return argument, text


def test_remedies_work_on_the_command_line():
    rng, offered = random.Random("the command line"), 0
    runner = CliRunner()
    while offered < CONFIGURATIONS:
        wrong = spoiled(rng, "ConvProblem", drawn(rng, "ConvProblem"))
        if outcome(FUNCTIONS["ConvProblem"], wrong) is None:
            continue
        result = runner.invoke(main, ["shapes", "--device", "cpu", *as_options(wrong)])
        if result.exit_code == 0:  # the command line reads a list of one number as a number
            continue
        assert result.exit_code == 2, result.output
        assert '="' not in result.stderr, "the message has a Python argument"
        axis = re.search(r"\(axis ([DHW])\)", result.stderr)
        remedy = result.stderr.strip().rpartition(". ")[2]
        if not re.match(r"(Use|Pad|Add|Pass|Exchange) ", remedy) or "integer" in remedy:
            continue
        offered += 1
        for way_out in alternatives(remedy):
            options = re.findall(r"(--[a-z-]+) (\S+)", way_out)
            after = wrong | dict(from_option(*option) for option in options)
            rest = re.sub(r"^use (--[a-z-]+ \S+(?: and )?)+", "", way_out)
            if rest:
                layout = readable(FUNCTIONS["ConvProblem"])
                after = applied(after, rest, axis[1] if axis else None, layout)
            then = runner.invoke(main, ["shapes", "--device", "cpu", *as_options(after)])
            assert then.exit_code == 0, f"{result.stderr}after '{way_out}': {then.stderr}"


def test_unknown_remedy_is_omitted():
    given = {"x": (1, 7, 2, 2), "w": (4, 5, 9, 11), "bias": (9,), "groups": 3}
    error = outcome(FUNCTIONS["conv_forward"], given)
    assert error.remedy == ""
    assert str(error) == f"{error.rule}: {error.values}"


@pytest.mark.parametrize(
    ("word", "mode"), [("circular", "wrap"), ("reflect", "reflect"), ("replicate", "edge")]
)
def test_padding_modes_suggest_numpy_pad(word, mode):
    x, w = np.ones((1, 2, 6), np.float32), np.ones((3, 2, 3), np.float32)
    with pytest.raises(ConvError, match=rf"numpy.pad\(x, ..., mode='{mode}'\)"):
        cupyconv.conv_forward(x, w, padding=word)
    with pytest.raises(ReachedError):
        cupyconv.conv_forward(np.pad(x, ((0, 0), (0, 0), (1, 1)), mode=mode), w, padding=0)


# -- dtypes ----------------------------------------------------------------------------------------

DTYPES = ("float16", "float32", "float64", "complex64", "bfloat16", "uint8", "int32", "bool")

TYPED = [way for way in WAYS if not way.name.startswith(("cudnn", "torch"))]
"""Functions whose arrays have dtypes of NumPy, and need no array for the result."""


@pytest.mark.parametrize(
    "way",
    [way for way in TYPED if any(map(way.is_array, way.parameters))],
    ids=str,
)
def test_remedies_of_wrong_dtypes_work(way):
    rng = random.Random(f"dtypes of {way.name}")
    refused = 0
    for _ in range(80):
        given = {name: value for name, value in way.valid().items() if name not in way.outputs}
        for name in filter(way.is_array, given):
            dtype = numpy_dtype(rng.choice(DTYPES))
            given[name] = np.ones(way.shape(way.tensor(name)), dtype)
        try:
            way.call(**given)
        except ReachedError:
            continue
        except ConvTypeError as error:
            message = str(error)
            assert "dtype must be one of float16, " in message or "one dtype" in message
            steps = re.findall(r"(\w+)\.astype\('(\w+)'\)", message)
            assert steps, message
            for key, dtype in steps:
                given[key] = given[key].astype(numpy_dtype(dtype))
            refused += 1
            with suppress(ReachedError):
                way.call(**given)
    assert refused > 20


def test_remedies_of_wrong_torch_dtypes_work():
    torch = pytest.importorskip("torch")
    rng = random.Random("dtypes of PyTorch")
    dtypes = [getattr(torch, name) for name in DTYPES]
    for _ in range(80):
        given = {
            "input": torch.ones((1, 2, 5), dtype=rng.choice(dtypes)),
            "weight": torch.ones((3, 2, 3), dtype=rng.choice(dtypes)),
            "bias": torch.ones((3,), dtype=rng.choice(dtypes)),
        }
        try:
            in_torch.conv1d(**given)
        except ReachedError:
            continue
        except ConvTypeError as error:
            steps = re.findall(r"(\w+)\.to\(torch\.(\w+)\)", str(error))
            for key, dtype in steps:
                given[key] = given[key].to(getattr(torch, dtype))
            with pytest.raises(ReachedError):
                in_torch.conv1d(**given)


def readable(function: Function) -> Callable[[dict[str, Any]], Layout]:
    """Return a function that gives the layout of arguments, without axes if they are invalid."""

    def layout(given: dict[str, Any]) -> Layout:
        try:
            return function.layout(given)
        except (ConvError, ConvTypeError, KeyError):
            owners = {"input": function.x, "dy": function.y}
            return Layout({key: one for key, one in owners.items() if one}, "", "", function.w)

    return layout
