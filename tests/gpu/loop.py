"""Step "loop": wall time of ResNet-50's layers called in a row, eager and captured in a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

from cupyconv import arrays, backends, calls
from cupyconv.bench import data
from cupyconv.checking import Operands, pass_function
from cupyconv.problem import PASSES, ConvProblem
from tests.gpu import contenders

ARRAYS = {
    "forward": ("x", "w"),
    "backprop_input": ("w", "dy"),
    "backprop_filter": ("x", "dy"),
}
"""Arguments of a bound call, by pass."""

ROUNDS = 20  # turns in which each way is timed (hand-set)


def cases(words: str = "") -> list[dict[str, Any]]:
    """List the forward passes, and then all passes, in each dtype and precision."""
    return [
        {"name": f"{order[0]} {order[1]}, {text}", "order": order, "passes": passes}
        for order in contenders.ORDERS[:3]
        for text, passes in (("forward", PASSES[:1]), ("all passes", PASSES))
    ]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Time each way of calling the layers, in turns; return the microseconds per call."""
    place, found = contenders.place(), list(_layers(case))
    ways = {**_ours(found, case["order"][1]), **_theirs(found, case["order"][1])}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(ROUNDS):
        for way in list(ways)[:: -1 if turn % 2 else 1]:
            place.synchronize()
            start = perf_counter()
            ways[way]()
            place.synchronize()
            times[way].append(perf_counter() - start)
    each = {way: median(values) / len(found) * 1e6 for way, values in times.items()}
    text = ", ".join(f"{way} {time:.1f}" for way, time in each.items())
    return {"microseconds": each, "calls": len(found), "detail": f"us per call: {text}"}


def _layers(case: dict[str, Any]) -> Iterator[tuple[ConvProblem, str, Operands]]:
    dtype, _, layout = case["order"]
    for name in contenders.layers():
        if name.startswith("resnet50"):
            problem = contenders.problem_of(name, dtype, layout)
            (operands,) = data.random_sets(problem, 1, contenders.place().xp)
            yield from ((problem, pass_, operands) for pass_ in case["passes"])


def _ours(layers: list[Any], precision: Any) -> dict[str, Callable[[], Any]]:
    """Return cupyconv's functions, its bound calls, and a graph of these, to be timed.

    Raises:
        AssertionError: the graph gives other results than the functions.
    """
    xp, backend = contenders.place().xp, backends.of(arrays.Home.GPU)
    functions = [pass_function(*layer[:2], "auto", precision) for layer in layers]
    bound = [calls.of_problem(pass_, problem, backend, "auto", precision, None)
             for problem, pass_, _ in layers]  # fmt: skip
    calls._load(bound)
    results = [xp.empty(call.shape, o.x.dtype) for call, (*_, o) in zip(bound, layers, strict=True)]

    def functions_in_a_row() -> list[Any]:
        return [compute(o) for compute, (*_, o) in zip(functions, layers, strict=True)]

    def bound_in_a_row() -> None:
        for call, (_, pass_, operands), out in zip(bound, layers, results, strict=True):
            first, second = ARRAYS[pass_]
            call(getattr(operands, first), getattr(operands, second), out=out)

    bound_in_a_row()
    contenders.place().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        bound_in_a_row()
        graph = stream.end_capture()
    for out in results:
        out.fill(0)
    graph.launch()
    for out, expected in zip(results, functions_in_a_row(), strict=True):
        assert bool((out == expected).all())
    return {
        "cupyconv": functions_in_a_row,
        "cupyconv, bound": bound_in_a_row,
        "cupyconv, graph": graph.launch,
    }


def _theirs(layers: list[Any], precision: str) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's functions and a graph of these; nothing if it has no CUDA device."""
    peer = contenders.find_torch(precision)
    if peer is None:
        return {}
    import torch

    functions = [peer.call(problem, pass_, [operands]) for problem, pass_, operands in layers]

    def call_all() -> list[Any]:
        return [call(0) for call in functions]

    call_all()  # cuDNN chooses its algorithms
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call_all()
    return {"PyTorch": call_all, "PyTorch, graph": lambda: (graph.replay(), kept)}
