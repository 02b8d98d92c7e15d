"""Steps "contenders" and "profile": time the candidates of the suite's layers, and cuDNN.

A case is one candidate of one pass of one layer, so a failing candidate does not affect others.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import cache
from typing import Any

import numpy as np

from cupyconv import arrays, backends, calls
from cupyconv.bench import data, places, pytorch, suites
from cupyconv.bench.results import Row
from cupyconv.bench.timing import measure
from cupyconv.checking import Operands, pass_function
from cupyconv.kernels.family import Candidate, Choices
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Plan, Request
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import choices_of_json, contenders
from cupyconv.problem import PASSES, ConvProblem
from tests.device import is_running
from tests.fuzz import cliffs
from tests.gpu import pack

ORDERS = (
    ("float16", "ieee", "channels_last"),
    ("float32", "tf32", "channels_last"),
    ("float32", "ieee", "channels_last"),
    ("bfloat16", "ieee", "channels_last"),
    ("float16", "ieee", "channels_first"),
)
"""Dtypes, precisions and memory orders, most important first."""

PROFILED = (
    ("resnet50-03", "forward", *ORDERS[0]),
    ("resnet50-03", "backprop_input", *ORDERS[0]),
    ("resnet50-03", "backprop_filter", *ORDERS[0]),
    ("resnet50-03", "forward", *ORDERS[2]),
    ("resnet50-01", "forward", *ORDERS[0]),
    ("mobilenetv2-dw3", "forward", *ORDERS[0]),
    ("mobilenetv2-dw3", "backprop_filter", *ORDERS[0]),
    ("resnet50-17", "forward", *ORDERS[0]),
)
"""Passes whose planned kernels are profiled: layer, pass, dtype, precision, memory order."""

SLOW_LAYERS = ("causal-dw4", "replk-dw31")  # PyTorch takes seconds for a pass; timed last
MOST_CANDIDATES = 8  # timed candidates per pass (hand-set)
SECONDS = 0.015  # s, device time of a candidate's samples (hand-set)
SETS = 3  # sets of operands that calls alternate between (hand-set)
MOST_BYTES = 1 << 30  # a larger layer has one set: it evicts its operands from the cache (hand-set)
SAMPLE = 1 << 18  # elements compared at each end of a result (hand-set)
TOLERANCES = {"float16": 1e-2, "bfloat16": 8e-2, "float32": 1e-4, "tf32": 1e-2}
"""Largest difference from a pass's first result, relative to its largest value (hand-set)."""

_profiling = False


def cases(words: str = "") -> list[dict[str, Any]]:
    """List cuDNN and the planner's choice in each of ORDERS, then the other candidates."""
    global _profiling
    _profiling = words == "profile"
    if _profiling:
        chosen = PROFILED[:2] if _is_small() else PROFILED
        return [_case(*one, "planned") for one in chosen]
    first, others, slow = [], [], []
    for order in ORDERS:
        for name in layers():
            for pass_ in PASSES:
                labels = map(str, range(len(candidates(name, pass_, *order))))
                cudnn, *ours = (_case(name, pass_, *order, label) for label in ("cudnn", *labels))
                if name in SLOW_LAYERS:
                    slow += [*ours, cudnn]
                else:
                    first += [cudnn, *ours[:1]]
                    others += ours[1:]
    return first + others + slow


def _case(*words: str) -> dict[str, Any]:
    names = ("layer", "pass", "dtype", "precision", "layout", "candidate")
    return {"name": " ".join(words), **dict(zip(names, words, strict=True))}


@cache
def layers() -> dict[str, suites.SuiteLayer]:
    """Return the suite's layers and those of the search for cliffs; two small ones if emulated."""
    if not _is_small():
        others = (suites.SuiteLayer(*layer) for layer in cliffs.LAYERS.items())
        listed = [*suites.fair_order(suites.listed()), *others]
        return {layer.name: layer for layer in listed}
    small = ConvProblem((1, 64, 6, 6), (64, 64, 3, 3), padding=1)
    return {name: suites.SuiteLayer(name, small) for name in ("resnet50-03", "vgg16-3")}


def _is_small() -> bool:
    """Return whether the layers must be small, because an emulated device computes them."""
    return is_running() and not pack.is_recording()


def problem_of(layer: str, dtype: str, layout: str) -> ConvProblem:
    """Return a layer of the suite in a dtype and memory order."""
    return data.in_layout(layers()[layer].problem, layout, dtype)


def request_of(case: dict[str, Any], device: Device) -> Request:
    """Return the request of a case."""
    problem = problem_of(case["layer"], case["dtype"], case["layout"])
    strides = Strides.contiguous(problem)
    return Request(problem, case["pass"], device, case["precision"], None, strides)


@cache
def candidates(
    layer: str, pass_: str, dtype: str, precision: str, layout: str
) -> tuple[tuple[Plan, float], ...]:
    """Return plans of a pass with their modelled microseconds, the planner's choice first."""
    device = backends.current_device()
    request = request_of(_case(layer, pass_, dtype, precision, layout, ""), device)
    problem, found = request.problem, []
    for one in contenders(request, "auto", MOST_CANDIDATES):
        priced = one.family.candidate(request.reduced, one)
        assert priced is not None
        found.append((Plan(problem, device, (one,)), priced.microseconds))
    return tuple(found)


@cache
def _candidate(key: str) -> Candidate | None:
    """Return the candidate of a recorded case, which is given as JSON."""
    case = json.loads(key)
    request = request_of(case, Device.of(case["architecture"])).reduced
    choices = choices_of_json(Choices, case["choices"], case["implementation"])
    return FAMILIES[case["implementation"]].candidate(request, choices)


def candidate_of(record: dict[str, Any], architecture: str) -> Candidate | None:
    """Return the candidate that a record timed; None for cuDNN, or if it no longer exists.

    Args:
        record: a record of ``tests.gpu.report.timed``.
        architecture: architecture of the GPU.
    """
    if record.get("choices") is None:
        return None
    names = ("layer", "pass", "dtype", "precision", "layout", "implementation", "choices")
    case = {name: record[name] for name in names}
    return _candidate(json.dumps(case | {"architecture": architecture}))


def _plan(case: dict[str, Any]) -> tuple[Plan, float]:
    found = candidates(*(case[name] for name in ("layer", "pass", "dtype", "precision", "layout")))
    return found[0 if case["candidate"] == "planned" else int(case["candidate"])]


def load(case: dict[str, Any]) -> dict[str, Any]:
    """Load the kernels of a case without running them."""
    if case["candidate"] != "cudnn":
        plan, _ = _plan(case)
        backend = backends.of(arrays.Home.GPU)
        (planned,) = plan.passes
        calls.of_problem(planned.pass_, plan.problem, backend, plan, planned.precision, None).load()
    return {}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Compute a case, compare it with the first result of its pass, and time it."""
    layer, pass_ = layers()[case["layer"]], case["pass"]
    key = case["layer"], case["dtype"], case["layout"]
    problem, sets = problem_of(*key), _operands(*key)
    call: Any
    if case["candidate"] == "cudnn":
        peer = _torch(case["precision"])
        refusal = "PyTorch has no CUDA device" if peer is None else peer.refuses(problem, pass_)
        if peer is None or refusal:
            return {"state": "skipped", "detail": refusal}
        name, kernel, workspace, modelled, choices = "torch", "torch", None, None, None
        call = peer.call(problem, pass_, sets)
        result = peer.to_array(call(0), problem, pass_)
    else:
        plan, modelled = _plan(case)
        one: Any = plan.passes[0]
        name, workspace = one.implementation, one.workspace_bytes
        choices = {field.name: asdict(one)[field.name] for field in fields(Choices)}
        kernel = " ".join(filter(None, (name, str(one.tile or ""), f"x {one.splits}", one.method)))
        compute = pass_function(problem, pass_, plan, case["precision"])  # type: ignore[arg-type]

        def call(number: int) -> Any:
            return compute(sets[number])

        result = call(0)
    if _profiling:
        return {"detail": kernel}
    error, checked = _difference(case, _sample(result)), min(2 * SAMPLE / result.size, 1)
    bound = TOLERANCES.get(case["precision"], TOLERANCES[case["dtype"]])
    if not error <= bound:
        return {"state": "failed", "detail": f"{kernel}: off by {error:.1e}, allowed {bound:.0e}"}
    del result
    found = measure({"": call}, len(sets), place(), SECONDS)[""]
    row = Row(
        layer.name, layer.suite, layer.kind, pass_, case["dtype"], case["precision"], name, kernel,
        case["layout"], found.seconds * 1e6, found.seconds * 1e6, found.high * 1e6, found.samples,
        (found.host or 0) * 1e6, workspace, problem.useful_flops, problem.bytes, error, bound,
        checked,
    )  # fmt: skip
    text = f"{kernel}: {row.microseconds:.1f} us"
    text += "" if modelled is None else f", modelled {modelled:.1f} us"
    return {"row": asdict(row), "choices": choices, "modelled": modelled, "detail": text}


@cache
def place() -> places.GpuPlace:
    """Return the current GPU; on an emulated device, without cache sweeps, which take seconds."""
    found = places.GpuPlace()
    if is_running():
        found.sweep_bytes = 1 << 16
    return found


_kept: dict[str, Any] = {}  # operands of the current layer, results of its passes


def _operands(*key: str) -> list[Operands]:
    """Return random operands of a layer, cached until another layer is requested."""
    if _kept.get("key") != key:
        _kept.clear()
        place().release()
        if (peer := _find_torch()) is not None:
            peer.release()
        problem = problem_of(*key)
        count = SETS if problem.bytes <= MOST_BYTES else 1
        _kept.update(key=key, sets=data.random_sets(problem, count, place().xp))
    sets: list[Operands] = _kept["sets"]
    return sets


def _sample(result: Any) -> np.ndarray:
    """Return the beginning and the end of a result, in float32 on the host."""
    flat = place().xp.ascontiguousarray(result).reshape(-1)
    ends = [arrays.cupy().asnumpy(part) for part in (flat[:SAMPLE], flat[-SAMPLE:])]
    return np.concatenate(ends).astype(np.float32)


def _difference(case: dict[str, Any], values: np.ndarray) -> float:
    """Return the largest difference from the pass's first result, relative to its largest value."""
    first = _kept.setdefault(case["pass"], values)
    return float(np.abs(values - first).max() / max(np.abs(first).max(), 1e-30))


_settings = ExitStack()


def _torch(precision: str) -> pytorch.PyTorch | None:
    """Return PyTorch with the settings of a precision; None where it has no CUDA device."""
    peer = _find_torch()
    if peer is not None and _kept.get("precision") != precision:
        _settings.close()
        _settings.enter_context(peer.settings(precision))
        _kept["precision"] = precision
    return peer


@cache
def _find_torch() -> pytorch.PyTorch | None:
    torch, _ = pytorch.find(place())
    return torch
