"""Bounds of the NumPy path's speed: the shares of its time, and the rates it reaches.

    python -m tests.studies.limits --json tests/cpu/results/limits.json

The program times each pass of the layers of `cupyconv bench --quick` in turns with PyTorch, as this
command does.  It also measures the time of computation: matrix products (BLAS), and for layers with
few channels per group the loops compiled by Numba, or einsum without Numba.  The remaining time is
copying (gathering, padding, transposing, adding up) and, for small layers, Python calls.  The
column "at most" gives PyTorch's time over cupyconv's if the remaining work took no time.  For a
dense layer, no method that multiplies with BLAS can exceed this ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from math import prod
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from cupyconv import files
from cupyconv.bench import data, environment, places, pytorch, timing
from cupyconv.bench.suites import KINDS, QUICK, SuiteLayer, select, with_batch
from cupyconv.checking import pass_function
from cupyconv.cpu.choice import has_numba
from cupyconv.markup import UNBOUND, Section, Table
from cupyconv.planning import plan
from cupyconv.problem import PASSES, ConvProblem

MOST_FLOPS = 4e9
"""Largest number of FLOPs per pass; larger layers get a smaller batch (hand-set)."""

SECONDS = 0.3
"""Seconds of each measurement (hand-set)."""


@dataclass(frozen=True)
class Share:
    """One pass of a layer, in the faster of the memory orders.

    Attributes:
        batch: batch size.
        method: a method of cupyconv/cpu/choice.py.
        seconds: seconds per call.
        computing: seconds per call in products and loops, by their share on one thread.
        operations: FLOPs per call in products and loops.
        useful_flops: FLOPs of the pass, without products with padding.
        peer: seconds per call of PyTorch.
    """

    layer: str
    kind: str
    pass_: str
    batch: int
    layout: str
    method: str
    seconds: float
    computing: float
    operations: float
    useful_flops: float
    peer: float

    @property
    def ratio(self) -> float:
        """PyTorch's time divided by ours."""
        return self.peer / self.seconds

    @property
    def limit(self) -> float:
        """The ratio if everything except products and loops took no time."""
        return self.peer / self.computing


@dataclass
class _Meter:
    seconds: float = 0
    operations: float = 0


@contextmanager
def _metered(meter: _Meter) -> Iterator[None]:
    """Time matmul, einsum and compiled loops within the context."""
    counts: list[tuple[Any, str, Callable[..., float]]] = [
        (np, "matmul", lambda a, b, out: out.size * a.shape[-1]),
        (np, "einsum", lambda _, *arrays: max(array.size for array in arrays)),
    ]
    if has_numba():
        compiled = import_module("cupyconv.cpu.loops_numba")
        counts += [
            (compiled, "planar_sums", lambda x, at, w, y, length, _: w.size * length),
            (compiled, "plane_sums", _of_planes),
            (compiled, "planar_products", lambda x, at, dy, inside, dw, n, _: dw.size * n),
        ]
        tiles = import_module("cupyconv.cpu.tiles_numba")
        counts += [(tiles, name, _of_tiles) for name in ("correlate", "add_gradient")]
        counts += [
            (tiles, name, _of_channels) for name in ("correlate_channels", "add_channel_gradient")
        ]
    before = [getattr(module, name) for module, name, _ in counts]

    def timed(function: Callable, count: Callable[..., float]) -> Callable:
        def call(*operands: Any, **arguments: Any) -> Any:
            start = perf_counter()
            result = function(*operands, **arguments)
            meter.seconds += perf_counter() - start
            meter.operations += 2 * count(*operands, result)
            return result

        return call

    for (module, name, count), function in zip(counts, before, strict=True):
        setattr(module, name, timed(function, count))
    try:
        yield
    finally:
        for (module, name, _), function in zip(counts, before, strict=True):
            setattr(module, name, function)


def _of_tiles(*operands: Any) -> float:
    return sum(filters * products for filters, products in _blocks(*operands))


def _of_channels(*operands: Any) -> float:
    return sum(products for _, products in _blocks(*operands))


def _blocks(_source: Any, _result: Any, _shared: Any, *more: Any) -> Iterator[tuple[int, int]]:
    """Yield the number of filters, and of products per filter, of blocks of tiles."""
    rows, first, stop, *_ = more
    job = import_module("cupyconv.cpu.tiles_numba")._job.py_func
    for row in rows[first:stop]:
        *_, axes, (channels, filters, _), box, _columns = job(row)
        pixels = prod(end - begin for begin, end in box)
        yield int(filters), int(channels * pixels * prod(axis[3] for axis in axes))


def _of_planes(_source: Any, _steps: Any, shape: Any, weights: Any, *more: Any) -> float:
    _first_row, _first_column, rows, columns, _lines, pitch = more[3]
    return prod(shape[:2]) * weights.shape[-1] * ((rows - 1) * pitch + columns)


def measure(
    layers: Iterable[SuiteLayer], place: places.Place, peer: pytorch.PyTorch
) -> list[Share]:
    """Return the shares of every pass of some layers on the CPU."""
    found = []
    for layer in layers:
        fitting = _fitting(layer)
        for pass_ in PASSES:
            orders = [data.in_layout(fitting, layout, "float32") for layout in data.LAYOUTS]
            shares = [_share(layer, problem, pass_, place, peer) for problem in orders]
            best = min(shares, key=lambda share: share.seconds)
            found.append(replace(best, peer=min(share.peer for share in shares)))
    return found


def _fitting(layer: SuiteLayer) -> ConvProblem:
    batch = layer.problem.N
    while batch > 1 and with_batch(layer, batch).problem.flops > MOST_FLOPS:
        batch //= 2
    return with_batch(layer, batch).problem


def _share(
    layer: SuiteLayer,
    problem: ConvProblem,
    pass_: str,
    place: places.Place,
    peer: pytorch.PyTorch,
) -> Share:
    sets = data.random_sets(problem, 1, np)
    compute = pass_function(problem, pass_, "numpy")

    def call(number: int) -> Any:
        return compute(sets[number])

    calls = {"ours": call, "theirs": peer.call(problem, pass_, sets)}
    found = timing.measure(calls, len(sets), place, SECONDS)
    seconds = found["ours"].seconds
    meter = _Meter()
    # Shares are measured on one thread; with several, one copies while another computes.
    with threadpool_limits(1, "blas"), _metered(meter):
        call(0)
        shares = []
        for _ in range(max(3, int(SECONDS / seconds))):
            meter.seconds = meter.operations = 0
            start = perf_counter()
            call(0)
            shares.append(meter.seconds / (perf_counter() - start))
    return Share(
        layer.name,
        layer.kind,
        pass_,
        problem.N,
        problem.data_format,
        plan(problem, "cpu")[pass_].method,
        seconds,
        seconds * median(shares),
        meter.operations,
        problem.useful_flops,
        found["theirs"].seconds,
    )


# -- report ----------------------------------------------------------------------------------------


def section(shares: Sequence[Share], about: dict[str, Any]) -> Section:
    """Return a table with a row per pass and layer, and the means per kind of layer."""
    columns = ("layer", "pass", "method", "ms", "computing", "GFLOP/s", "PyTorch's", "ratio")
    rows: list[tuple[str, ...]] = [
        (
            share.layer,
            share.pass_,
            share.method,
            f"{share.seconds * 1e3:.2f}",
            f"{share.computing / share.seconds:.0%}",
            f"{share.operations / share.computing / 1e9:.0f}",
            f"{share.useful_flops / share.peer / 1e9:.0f}",
            f"{share.ratio:.2f}",
            f"{share.limit:.2f}",
        )
        for share in shares
    ]
    for kind in (*KINDS, ""):
        ones = [share for share in shares if kind in ("", share.kind)]
        if ones:
            ratio = geometric_mean([one.ratio for one in ones])
            limit = geometric_mean([one.limit for one in ones])
            rows.append((f"all {kind}".rstrip(), *[""] * 6, f"{ratio:.2f}", f"{limit:.2f}"))
    title = f"Shares of the NumPy path's time, {environment.title(about)}"
    return Section(title, (Table((*columns, "at most"), tuple(rows), (*columns[3:], "at most")),))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.studies.limits", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    path = parser.parse_args(arguments).json
    place = places.of("cpu")
    peer, why_not = pytorch.find(place)
    if peer is None:
        sys.exit(f"the shares are measured beside PyTorch: {why_not}")
    options = ["--json", str(path)] if path else []
    about = environment.describe(place, ["-m", "tests.studies.limits", *options], "python")
    with peer.settings("ieee", environment.threads()):
        shares = measure(select((), QUICK), place, peer)
    print("\n".join(section(shares, about).lines(UNBOUND)))
    if path is not None:
        content = {"environment": about, "shares": [asdict(share) for share in shares]}
        path.parent.mkdir(parents=True, exist_ok=True)
        files.put(path, f"{json.dumps(content, indent=1)}\n".encode())


if __name__ == "__main__":
    main()
