"""Steps that time passes: cuDNN and candidates of the planner.

A case is a pass of a layer.  Its contenders are compared with float64, and then timed in turns.
Steps differ in their passes and contenders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from cupyconv import arrays, backends, calls, measuring
from cupyconv.bench import data, places, pytorch, suites
from cupyconv.bench.results import TORCH, Row
from cupyconv.bench.run import CHECKED_BY
from cupyconv.bench.timing import Call, measure
from cupyconv.checking import Excerpt, Operands, pass_function
from cupyconv.kernels.family import Candidate, Choices
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Plan, Request
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import choices_of_json, contenders
from cupyconv.problem import PASSES, ConvProblem
from tests.device import is_running
from tests.fuzz import cliffs

ORDERS = (
    ("float16", "ieee", "channels_last"),
    ("float32", "tf32", "channels_last"),
    ("float32", "ieee", "channels_last"),
    ("bfloat16", "ieee", "channels_last"),
    ("float16", "ieee", "channels_first"),
)
"""Dtypes, precisions and memory orders, most important first."""

FIRST = (("float16", "ieee", "channels_first"), ("float32", "ieee", "channels_first"))
"""Dtypes, precisions and memory orders in which cuDNN has other kernels for some layers."""

DOUBTS = (
    ("unet3d-1", "backprop_filter", *ORDERS[4]),
    ("sdxl-6", "backprop_filter", *ORDERS[4]),
    ("deepbench-4", "backprop_filter", *ORDERS[2]),
)
"""Passes with wrong results in ``results/``: layer, pass, dtype, precision, memory order."""

PROFILED = (
    ("sdxl-5", "backprop_filter", *ORDERS[1]),
    ("resnet50-03", "backprop_filter", *ORDERS[2]),
    ("resnet50-03", "forward", *ORDERS[2]),
    ("resnet50-03", "forward", *ORDERS[0]),
    ("resnet50-03", "backprop_filter", *ORDERS[0]),
    ("resnet50-17", "backprop_input", *ORDERS[0]),
    ("resnet50-01", "forward", *ORDERS[0]),
    ("mobilenetv2-dw3", "backprop_filter", *ORDERS[0]),
)
"""Passes whose planned kernels are profiled, those of cuda-gather first."""

RESULTS = Path(__file__).with_name("results")
SLOW_LAYERS = ("causal-dw4", "replk-dw31")  # PyTorch takes seconds for a pass; timed last
MOST_CANDIDATES = 4  # timed candidates per pass (hand-set)
DOUBTED_CANDIDATES = 8  # candidates per pass with a wrong result in ``results/`` (hand-set)
PLANES = 40  # passes by bf16x6 (hand-set)
SECONDS = 0.015  # s, device time of a contender's samples (hand-set)
SETS = 3  # sets of operands that calls alternate between (hand-set)
MOST_BYTES = 1 << 30  # a larger layer has one set: it evicts its operands from the cache (hand-set)
CHECKED_FLOPS = 1e8  # FLOPs to spend on the expected values of a pass (hand-set)
DOUBTED_FLOPS = 2e10  # FLOPs to spend on those of a pass with a wrong result (hand-set)

LABELS = {
    "doubts": ("cudnn", *map(str, range(DOUBTED_CANDIDATES))),
    "profile": ("0",),
    "contenders": ("cudnn", *map(str, range(MOST_CANDIDATES))),
    "bf16x6": ("cudnn", "0", "1"),
    "cudnn": ("cudnn", "deterministic", "0"),
    "table": ("cudnn", "0"),
}
"""Contenders of a pass, by step.

"cudnn" is PyTorch, and "deterministic" is PyTorch with deterministic algorithms of cuDNN.  A number
is the position of a candidate; "0" is the planner's choice.
"""

Words = tuple[str, ...]  # layer, pass, dtype, precision and memory order

_step = ""  # the current step


def cases(words: str) -> list[dict[str, Any]]:
    """List the passes of a step, the most informative first."""
    global _step
    _step, found = words, {}
    for step in ("contenders", "bf16x6", "cudnn") if words == "compile" else (words,):
        for layer, *rest in _listed(step):
            one = _case(layer if layer in layers() else next(iter(layers())), *rest)
            prefix = f"{step} " if words == "compile" else ""
            found[prefix + one["name"]] = one | {"labels": LABELS[step]}
    return [one | {"name": name} for name, one in found.items()]


def _case(*words: str) -> dict[str, Any]:
    names = ("layer", "pass", "dtype", "precision", "layout")
    return {"name": " ".join(words), **dict(zip(names, words, strict=True))}


def _listed(step: str) -> Iterable[Words]:
    """Return the passes of a step."""
    if step in ("doubts", "profile"):
        return DOUBTS if step == "doubts" else PROFILED
    if step == "bf16x6":
        planned = (
            words
            for words in _passes([("float32", "bf16x6", "channels_last")])
            if "bf16x6" in candidates(*words)[0][0].passes[0].implementation
        )
        return islice(planned, PLANES)
    if step == "cudnn":
        copied = (words for words in _passes(FIRST) if _is_copied(layers()[words[0]]))
        return chain(copied, _passes(ORDERS[:3]))
    ratios, passes = _ratios(), list(_passes(ORDERS))
    if step == "table":
        return (words for words in passes if ratios.get(words, 1) >= 1)
    return sorted((words for words in passes if ratios.get(words, 1) < 1), key=ratios.__getitem__)


def _is_copied(layer: suites.SuiteLayer) -> bool:
    """Return whether cuDNN's kernels for channels last are slow, or PyTorch copies the layer."""
    return layer.kind == "depthwise" or layer.problem.spatial_rank == 1


def _passes(orders: Iterable[Words]) -> Iterator[Words]:
    """Yield all passes, in one order after another."""
    for order in orders:
        for name in sorted(layers(), key=lambda name: name in SLOW_LAYERS):
            yield from ((name, pass_, *order) for pass_ in PASSES)


@cache
def _ratios() -> dict[Words, float]:
    """Return cuDNN's time over cupyconv's for each pass of the results in this folder."""
    from tests.gpu import report

    return {
        (*key[3:], *key[:3]): found["cudnn"]["microseconds"] / found["0"]["microseconds"]
        for key, found in report.by_pass(report.load(RESULTS)).items()
        if {"0", "cudnn"} <= {*found}
    }


@cache
def layers() -> dict[str, suites.SuiteLayer]:
    """Return the suite's layers and those of the search for cliffs; two small ones if emulated."""
    if not is_running():
        others = (suites.SuiteLayer(*layer) for layer in cliffs.LAYERS.items())
        listed = [*suites.fair_order(suites.listed()), *others]
        return {layer.name: layer for layer in listed}
    small = ConvProblem((1, 64, 6, 6), (64, 64, 3, 3), padding=1)
    return {name: suites.SuiteLayer(name, small) for name in ("resnet50-03", "vgg16-3")}


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
    request = request_of(_case(layer, pass_, dtype, precision, layout), device)
    problem, found = request.problem, []
    for one in contenders(request, "auto", DOUBTED_CANDIDATES):
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

    A candidate with another workspace has other launches than those that were timed.

    Args:
        record: a record of ``tests.gpu.report.timed``.
        architecture: architecture of the GPU.
    """
    if record.get("choices") is None:
        return None
    names = ("layer", "pass", "dtype", "precision", "layout", "implementation", "choices")
    case = {name: record[name] for name in names}
    found = _candidate(json.dumps(case | {"architecture": architecture}))
    same = found and found.workspace_bytes == record["choices"]["workspace_bytes"]
    return found if same else None


def _plans(case: dict[str, Any]) -> dict[str, tuple[Plan, float]]:
    """Return plans and modelled microseconds of a case's candidates, by label."""
    words = (case[name] for name in ("layer", "pass", "dtype", "precision", "layout"))
    found = {str(number): one for number, one in enumerate(candidates(*words))}
    return {label: found[label] for label in case["labels"] if label in found}


class Contender(NamedTuple):
    """A contender of a pass: its call, its result, and the entries of its record."""

    call: Call
    result: Any
    name: str
    kernel: str
    workspace: int | None = None
    modelled: float | None = None
    choices: dict[str, Any] | None = None


def _load(case: dict[str, Any]) -> None:
    """Load the kernels of a case, compiling missing kernels in parallel."""
    backend = backends.of(arrays.Home.GPU)
    found = []
    for plan, _ in _plans(case).values():
        (planned,) = plan.passes
        words = plan.problem, backend, plan, planned.precision, None
        found.append(calls.of_problem(planned.pass_, *words))
    calls._load(found)


def _planned(case: dict[str, Any], label: str, sets: list[Operands]) -> Contender:
    plan, modelled = _plans(case)[label]
    one: Any = plan.passes[0]
    choices = {field.name: asdict(one)[field.name] for field in fields(Choices)}
    name, kernel = one.implementation, measuring._name(one)
    impl: Any = "auto" if label == "0" else plan  # the call that a user makes
    compute = pass_function(plan.problem, case["pass"], impl, case["precision"])
    return Contender(
        lambda number: compute(sets[number]), compute(sets[0]), name, kernel, one.workspace_bytes,
        modelled, choices,
    )  # fmt: skip


def _cudnn(case: dict[str, Any], label: str, sets: list[Operands]) -> Contender | str:
    """Return PyTorch's call, or why there is none."""
    problem, pass_ = problem_of(case["layer"], case["dtype"], case["layout"]), case["pass"]
    peer = find_torch(case["precision"])
    if peer is None:
        return "PyTorch has no CUDA device"
    if refusal := peer.refuses(problem, pass_):
        return refusal
    import torch

    cudnn, compute = torch.backends.cudnn, peer.call(problem, pass_, sets)
    cudnn.benchmark_limit = 0 if _step == "cudnn" else 10  # 10 is PyTorch's default

    def call(number: int) -> Any:
        cudnn.deterministic = label == "deterministic"
        return compute(number)

    try:
        return Contender(call, peer.to_array(call(0), problem, pass_), TORCH, label)
    except pytorch.ERRORS as error:
        return str(error).partition("\n")[0]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Compare the contenders of a case with float64, and time them in turns."""
    _load(case)
    if _step == "compile":
        return {}
    plans = _plans(case)
    layer, pass_, precision = layers()[case["layer"]], case["pass"], case["precision"]
    key = case["layer"], case["dtype"], case["layout"]
    problem, sets = problem_of(*key), _operands(*key)
    if _step == "profile":
        return {"detail": _planned(case, "0", sets).kernel}
    flops = DOUBTED_FLOPS if _step == "doubts" else CHECKED_FLOPS
    excerpt = Excerpt(problem, pass_, sets[0], CHECKED_BY["gpu"], flops)
    good, notes, is_wrong = {}, [], False
    for label in (label for label in case["labels"] if not label.isdecimal() or label in plans):
        one = (_planned if label in plans else _cudnn)(case, label, sets)
        if isinstance(one, str):
            notes.append(f"{label}: {one}")
            continue
        found = excerpt.judge(one.result, precision)
        text = f"{label} {one.kernel}: off by {found.difference:.1e}, allowed {found.bound:.1e}"
        finite = _is_finite(one.result)
        if not (finite and found.passed):
            notes.append(text if finite else f"{text}; not all values are finite")
            is_wrong |= label.isdecimal()
        if finite and (found.passed or one.name == TORCH):  # cuDNN may round operands
            good[label] = one._replace(result=None), found
    place_, timings = place(), []
    for label, time in measure(
        {label: one.call for label, (one, _) in good.items()}, len(sets), place_, SECONDS
    ).items():
        one, found = good[label]
        row = Row(
            layer.name, layer.suite, layer.kind, pass_, case["dtype"], precision, one.name,
            one.kernel, case["layout"], time.seconds * 1e6, time.seconds * 1e6, time.high * 1e6,
            time.samples, (time.host or 0) * 1e6, one.workspace, problem.useful_flops,
            problem.bytes, found.difference or 0.0, found.bound, excerpt.share,
        )  # fmt: skip
        timings.append({"candidate": label, "row": asdict(row), "choices": one.choices,
                        "modelled": one.modelled})  # fmt: skip
        notes.append(f"{label} {row.microseconds:.1f} us")
    state = "failed" if is_wrong else "passed" if timings else "skipped"
    return {"state": state, "timings": timings, "detail": "; ".join(notes)}


def _is_finite(result: Any) -> bool:
    """Return whether all values are finite; CuPy has no functions of bfloat16."""
    xp = place().xp
    if result.dtype.name != "bfloat16":
        return bool(xp.isfinite(result).all())
    return bool(((result.view("uint16") & 0x7F80) != 0x7F80).all())


@cache
def place() -> places.GpuPlace:
    """Return the current GPU; on an emulated device, without cache sweeps, which take seconds."""
    found = places.GpuPlace()
    if is_running():
        found.sweep_bytes = 1 << 16
    return found


_kept: dict[str, Any] = {}  # operands of the current layer, precision of PyTorch's settings


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


_settings = ExitStack()


def find_torch(precision: str = "ieee") -> pytorch.PyTorch | None:
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
