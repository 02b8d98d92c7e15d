"""Layers of huge sizes, which cannot be computed or looped over: the library answers at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv import ConvProblem, backends
from cupyconv.cli import data
from cupyconv.cli.main import main
from cupyconv.cpu.choice import methods
from cupyconv.dask import halos
from cupyconv.errors import ConvError
from cupyconv.explaining import maps, values
from cupyconv.planning.plan import Plan, plan_pass
from cupyconv.problem import MOST_LISTED, PASSES, shape_text
from tests import agreement
from tests.configurations import integer_data

MOST_LINES = 250_000
"""Maximum executed lines of Python per answer; a loop over any of these sizes executes more."""

HALF = "float16"
LAST = {"data_format": "NHWC", "filter_format": "OHWI", "dtype": HALF}

# input_shape, filter_shape, and the other arguments.
HOSTILE: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "stride 10**7": ((1, 1, 10), (1, 1, 3), {"stride": 10**7}),
    "stride 10**7, padded": ((2, 3, 10, 9), (4, 3, 3, 2), {"stride": (10**7, 2), "padding": 1}),
    "stride 2**40": ((2, 64, 9, 9), (64, 64, 3, 3), {"stride": 2**40}),
    "stride 2**40, channels last": ((2, 9, 9, 64), (64, 3, 3, 64), {"stride": 2**40, **LAST}),
    "stride 2**40 over 2**50": ((1, 2, 2**50), (2, 2, 3), {"stride": 2**40, "dtype": HALF}),
    "stride 2**62": ((1, 1, 8, 8), (1, 1, 3, 3), {"stride": 2**62}),
    "stride 2**62, same": ((1, 1, 8, 8, 8), (1, 1, 3, 3, 3), {"stride": 2**62, "padding": "same"}),
    "strides and taps": ((1, 1, 10**9), (1, 1, 10**8), {"stride": 10**7, "dilation": 3}),
    "a stride of many phases": ((1, 8, 999, 999), (8, 8, 99, 99), {"stride": 97, "dilation": 5}),
    "dilation 2**40": ((1, 1, 5), (1, 1, 2), {"dilation": 2**40, "padding": 2**39}),
    "dilation 2**40, same": (
        (1, 9, 9, 64), (64, 3, 3, 64), {"dilation": 2**40, "padding": "same", **LAST},
    ),
    "dilation of one tap 2**62": ((1, 1, 5, 5), (1, 1, 1, 1), {"dilation": 2**62, "stride": 2**61}),
    "padding 2**40": ((1, 4, 9, 9), (4, 4, 3, 3), {"padding": 2**40, "dtype": HALF}),
    "padding 2**40, strided": ((1, 1, 9), (1, 1, 3), {"padding": 2**40, "stride": 2**39}),
    "filter 10**9": ((1, 1, 10**9), (1, 1, 10**9), {}),
    "filter 10**9, same": ((1, 3, 10**9), (8, 3, 10**9), {"padding": "same", "dtype": HALF}),
    "filter 10**9, depthwise": ((1, 8, 10**9, 9), (8, 1, 10**9, 3), {"groups": 8, "dtype": HALF}),
    "filter 10**9 in the padding": ((1, 1, 9), (1, 1, 10**9), {"padding": 10**9, "dilation": 2}),
    "filter 10**9 by 10**9": ((1, 1, 10**9, 10**9), (1, 1, 10**9, 10**9), {"padding": 7}),
    "input 10**9": ((1, 3, 10**9, 10**9), (8, 3, 3, 3), {"padding": 1, "dtype": HALF}),
    "input 2**62": ((1, 1, 2**62), (1, 1, 3), {"stride": 2}),
    "batch 2**40": ((2**40, 64, 64, 64), (64, 3, 3, 64), {"padding": 1, **LAST}),
    "channels 2**40": ((1, 2**40, 9, 9), (2**40, 2**40, 3, 3), {"dtype": HALF}),
    "groups 2**40": ((1, 2**40, 9, 9), (2**40, 1, 3, 3), {"groups": 2**40, "dtype": HALF}),
    "10**6 inputs and taps": ((1, 1, 10**6), (1, 1, 10**6), {}),
    "10**6 inputs and taps, padded": ((1, 1, 10**6), (1, 1, 10**6), {"padding": 10**6 - 1}),
    "10**6 inputs and taps, strided": (
        (1, 1, 10**6), (1, 1, 10**6), {"padding": "same", "stride": 7},
    ),
}  # fmt: skip


OURS = str(Path(backends.__file__).parent)


@contextmanager
def few_steps() -> Iterator[None]:
    """Fail, instead of waiting, if more than MOST_LINES lines of the library are executed."""
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Callable | None:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(OURS):
            return None  # other libraries: Numba alone executes more lines, for any layer
        lines += event == "line"
        if lines > MOST_LINES:
            sys.settrace(None)
            raise AssertionError(f"more than {MOST_LINES:,} lines")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


def answered(*calls: Callable[[], object]) -> list[object]:
    """Return the results of the calls, each in few steps; None for calls that raise."""
    given = []
    for call in calls:
        plan_pass.cache_clear()
        with few_steps():
            try:
                given.append(call())
            except ConvError:
                given.append(None)
    return given


def of_name(name: str) -> ConvProblem:
    input_shape, filter_shape, rest = HOSTILE[name]
    return ConvProblem(input_shape, filter_shape, **rest)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_problems_tell_all_about_themselves(name):
    with few_steps():
        problem = of_name(name)
        texts = repr(problem), problem._repr_html_()
    assert "ConvProblem" in texts[0]
    axes = (problem, *problem.axes)
    told = [(one, word) for one in axes for word in dir(type(one)) if not word.startswith("_")]
    found = answered(*(lambda one=one, word=word: getattr(one, word) for one, word in told))
    left_out = {word for (_, word), value in zip(told, found, strict=True) if value is None}
    assert left_out <= {"phase_gemms", "stride_phases"}
    assert 0 <= problem.useful_flops <= problem.flops
    assert all(0 <= axis.unread_inputs <= axis.input for axis in problem.axes)


@pytest.mark.parametrize("device", ["cpu", "sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_problems_are_planned(name, device):
    problem = of_name(name)
    (made,) = answered(lambda: cupyconv.plan(problem, device))
    assert isinstance(made, Plan)
    (again,) = answered(lambda: Plan.from_json(made.to_json()))
    assert again == made
    answered(lambda: str(made), made._repr_html_)
    families = cupyconv.planning.families.FAMILIES
    precisions = ("ieee", "tf32")
    answered(*(lambda f=f, p=p: cupyconv.plan(problem, device, f, p)
               for f in families for p in precisions))  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_problems_are_explained(name, monkeypatch):
    monkeypatch.setattr(maps, "MOST_ELEMENTS", 1000)  # count few positions one by one
    monkeypatch.setattr(values, "MOST_ELEMENTS", 1000)  # draw no values for large layers
    told = cupyconv.explain(of_name(name))
    texts = answered(lambda: str(told), told._repr_html_, lambda: json.dumps(told.to_dict()))
    assert all(texts)
    rank = told.problem.spatial_rank
    elements = [f"{tensor}[{','.join(['0'] * (2 + rank))}]" for tensor in ("dx", "dw", "y")] + [
        told.middle
    ]
    for element in elements:
        (found,) = answered(lambda element=element: str(told.element(element)))
        assert found
        if not 1000 < told.element(element).count <= MOST_LISTED:  # listing takes long otherwise
            answered(lambda element=element: list(told.element(element).lines(everything=True)))
    answered(told.svg, told.page)
    answered(*(lambda t=t: told.map(t).verdict for t in maps.MAPPED))
    assert all(answered(*(lambda f=f: told.code(f).program for f in ("pytorch", "onnx"))))


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("command", ["shapes", "explain", "grads"])
def test_hostile_problems_on_the_command_line(name, command, monkeypatch):
    problem = of_name(name)
    options = ["--input", shape_text(problem.input_shape), "--filter"]
    options += [shape_text(problem.filter_shape), "--groups", str(problem.groups)]
    options += ["--data-format", problem.data_format, "--filter-format", problem.filter_format]
    options += ["--stride", ",".join(map(str, problem.stride))]
    options += ["--dilation", ",".join(map(str, problem.dilation))]
    mode, pairs = problem.padding_mode, problem.padding
    padding = ",".join(f"{before}:{after}" for before, after in pairs)
    options += ["--padding", padding if mode == "explicit" else mode, "--dtype", problem.dtype]
    if command == "grads":
        monkeypatch.setattr(data, "available_memory", lambda: 1000)
    elif command == "explain":
        monkeypatch.setattr(maps, "MOST_ELEMENTS", 1000)
        monkeypatch.setattr(values, "MOST_ELEMENTS", 1000)  # draw no values for large layers
    (result,) = answered(lambda: CliRunner().invoke(main, [command, *options]))
    refused = command == "grads"
    assert result.exit_code == (2 if refused else 0), result.output
    assert len(result.stderr.splitlines()) == refused


# -- arrays ----------------------------------------------------------------------------------------

# Layers with small arrays, whose computation must take few steps too.
COMPUTED = (
    *("stride 10**7", "stride 10**7, padded", "stride 2**40", "stride 2**40, channels last"),
    *("stride 2**62", "stride 2**62, same", "dilation 2**40", "dilation 2**40, same"),
    "dilation of one tap 2**62",
)


@pytest.mark.parametrize("name", COMPUTED)
def test_hostile_layers_of_small_arrays_are_computed(name):
    problem = of_name(name)
    integers = integer_data(problem)
    for pass_ in PASSES:
        expected = agreement.compute(cupyconv, pass_, problem, integers, impl="reference")
        for method in methods(problem, pass_):
            impl = replace(
                cupyconv.plan(problem),
                passes=tuple(
                    replace(one, method=method.name) if one.pass_ == pass_ else one
                    for one in cupyconv.plan(problem)
                ),
            )
            (got,) = answered(
                lambda p=pass_, i=impl: agreement.compute(cupyconv, p, problem, integers, impl=i)
            )
            np.testing.assert_array_equal(got, expected, err_msg=f"{pass_} by {method.name}")


def test_the_input_gradient_of_many_taps_under_few_windows():
    """Each tap reads a separate input under one window, and is a separate phase under two."""
    taps = np.arange(1.0, 20_001, dtype=np.float64)
    dy = np.array([[[2.0, -3.0]]])
    (one,) = answered(
        lambda: cupyconv.conv_backprop_input((1, 1, taps.size), taps[None, None], dy[..., :1])
    )
    np.testing.assert_array_equal(one[0, 0], 2 * taps)
    (two,) = answered(
        lambda: cupyconv.conv_backprop_input(
            (1, 1, 2 * taps.size + 5), taps[None, None], dy, stride=taps.size + 3
        )
    )
    np.testing.assert_array_equal(two[0, 0, : taps.size], 2 * taps)
    np.testing.assert_array_equal(two[0, 0, taps.size : taps.size + 3], 0)
    np.testing.assert_array_equal(two[0, 0, taps.size + 3 : -2], -3 * taps)


def test_chunks_of_dask_are_cut_at_once():
    axis = ConvProblem((1, 1, 9), (1, 1, 2), dilation=2**40, padding=2**40).axes[0]
    with few_steps():
        cut = halos.receptive_field(axis, 3, 7)
    # Outputs 3 to 6 read inputs 3 to 6 with their second tap.  Outputs that are 2**40 higher read
    # the same inputs with their first tap.
    assert cut == ((3, 7 + 2**40), (3, 7), (2**40, 2**40))


@pytest.mark.parametrize(
    ("shape", "size"),
    [((3, 2), "24 bytes"), ((16, 512, 512), "16.0 MiB"), ((1 << 30,), "4.0 GiB")],
)
def test_memory_that_is_not_to_be_had_is_told_in_its_unit(shape, size, monkeypatch):
    monkeypatch.setattr(np, "empty", lambda *_args: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError, match=f"an array of .* float32 takes {size}, more than is"):
        backends.CpuBackend().empty(shape, "float32")
