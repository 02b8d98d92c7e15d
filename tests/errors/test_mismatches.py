"""Shapes that do not belong together, as people report them, and the repair that an expert names.

Each case of mismatches.toml is a call whose x, w and dy do not fit.  The error must state the
conflict, and offer the expert's repair first, or second if the case has ``place = 2``.
"""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import cupyconv
from cupyconv import raw_ops
from tests.command import refused, run
from tests.errors.test_remedies import (
    FUNCTIONS,
    OWN,
    TF,
    TORCH,
    Function,
    function,
    outcome,
    readable,
    stop_after_checks,
)
from tests.ways_out import Layout, alternatives, applied

pytestmark = pytest.mark.quick

TABLE = tomllib.loads(Path(__file__).with_name("mismatches.toml").read_text())


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a call's function, and its keywords with shapes instead of tensors."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    return ast.unparse(call.func), {
        str(one.arg): ast.literal_eval(one.value) for one in call.keywords
    }


FUNCTIONS = {
    **FUNCTIONS,
    "DepthwiseConv2dNativeBackpropInput": function(
        raw_ops.DepthwiseConv2dNativeBackpropInput, TF, "input_sizes", "filter", "out_backprop"
    ),
    "smallest_transpose": function(cupyconv.conv_transpose, OWN, None, "w", "x", transposed=True),
}


def unbatched(call: Any, axes: str) -> Function:
    """Return a function of PyTorch, whose input may lack the batch axis."""
    made = function(call, TORCH, "input", "weight")

    def layout(given: dict[str, Any]) -> Layout:
        return made.layout(given)._replace(data=axes[len(axes) - len(given["input"]) :])

    return made._replace(layout=layout)


if find_spec("torch"):
    in_torch = import_module("cupyconv.torch")
    FUNCTIONS["torch.conv1d"] = unbatched(in_torch.conv1d, "NCW")
    FUNCTIONS["torch.conv_transpose2d"] = unbatched(in_torch.conv_transpose2d, "NCHW")
    FUNCTIONS["torch.conv2d_weight"] = function(
        in_torch.conv2d_weight, TORCH, "input", "weight_size", "grad_output"
    )


def plain(value: Any) -> Any:
    """Return a value with lists as tuples, and equal entries of all axes as one integer."""
    if isinstance(value, (list, tuple)):
        entries = tuple(map(plain, value))
        return entries[0] if len(entries) == 2 and len(set(entries)) == 1 else entries
    return value


@pytest.mark.parametrize("case", TABLE["call"], ids=lambda case: case["label"])
def test_mismatch_offers_the_experts_repair(case, monkeypatch):
    stop_after_checks(monkeypatch)
    name, given = read_call(case["call"])
    _, repair = read_call(f"repair({case['repair']})")
    if name.startswith("torch"):
        pytest.importorskip("torch")
    function = FUNCTIONS[name]
    if name in vars(raw_ops):
        given = {"data_format": "NHWC", **given}
    error = outcome(function, given)
    assert case["conflict"] in f"{error.rule}: {error.values}", error
    wanted = {key: plain(value) for key, value in {**given, **repair}.items()}
    offered = []
    for way_out in alternatives(error.remedy):
        after = applied(given, way_out, error.axis, readable(function))
        offered.append({key: plain(value) for key, value in after.items()})
        assert outcome(function, after) is None, f"{error}\n\nafter '{way_out}': {after}"
    assert wanted in offered[: case.get("place", 1)], error


# -- the command line ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TABLE["command"], ids=lambda case: case["label"])
def test_command_offers_the_experts_repair(case):
    words, changes = shlex.split(case["line"]), case["options"].split()
    error = refused(*words)
    assert case["conflict"] in error
    remedy = re.split(r"\. (?=[A-Z])", error.strip())[-1]
    assert case["way_out"] in alternatives(remedy)[: case.get("place", 1)], error
    for option, value in zip(changes[::2], changes[1::2], strict=True):
        if option in words:
            words[words.index(option) + 1] = value
        else:
            words += [option, value]
    assert run(*words).exit_code == 0
