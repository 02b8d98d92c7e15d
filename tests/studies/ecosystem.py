"""Time and memory of layers on a Dask cluster.

    python -m tests.studies.ecosystem --json tests/cpu/results/ecosystem.json

It measures how much longer a layer that fits into memory takes on a Dask cluster than in one
process on the same cores, and the peak memory of a worker for a layer that does not fit into
memory.  Needs Linux, Dask with distributed, and Zarr.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

import numpy as np

import cupyconv
from cupyconv import ConvProblem, files
from cupyconv.bench import environment, places

ROUNDS = 7  # turns per call; the median counts

# Two layers that fit into memory: the tasks of the first are so short that Dask's overhead of a few
# milliseconds per task shows; the tasks of the second are so long that it should not show.
FITS = (
    (ConvProblem((8, 64, 112, 112), (64, 64, 3, 3), padding=1), (1, 64, 56, 112)),
    (ConvProblem((1, 64, 1024, 1024), (64, 64, 3, 3), padding=1), (1, 64, 128, 1024)),
)
TOO_LARGE = ConvProblem((1, 4, 160, 512, 512), (4, 4, 3, 3, 3), padding=1)
ROOM = 120_000_000  # bytes that a worker may use in addition to an idle worker's
PAUSED_AT = 0.8  # fraction of the memory limit at which Dask pauses a worker (its default)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything, print it, and write it to a file."""
    parser = argparse.ArgumentParser(prog="python -m tests.studies.ecosystem", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    path = parser.parse_args(arguments).json
    options = ["--json", str(path)] if path else []
    place = places.of("cpu")
    # Read before Dask sets its workers' number of threads in this process's environment.
    workers = environment.threads()
    about = environment.describe(place, ["-m", "tests.studies.ecosystem", *options], "python")
    versions = {name: metadata.version(name) for name in ("dask", "distributed", "zarr")}
    found = {
        "environment": about | versions,
        "dask": [asdict(dask_time(*layer, workers)) for layer in FITS],
        "dask_memory": asdict(dask_memory(TOO_LARGE, worker_limit())),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.put(path, f"{text}\n".encode())


def _medians(calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median seconds of each call; the calls take turns.

    There is a pause before each turn, because BLAS threads keep running for a while after a call.
    """
    turns: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            sleep(places.PAUSE)
            start = perf_counter()
            call()
            turns[name].append(perf_counter() - start)
    return {name: median(times) for name, times in turns.items()}


@dataclass(frozen=True)
class DaskTime:
    """Seconds of each pass in one process and on a cluster of the same cores.

    Attributes:
        layer, chunks: the layer, and the chunk sizes of x.
        workers: number of processes, of one thread each.
        one_process: seconds by pass, with as many BLAS threads as there are workers.
        cluster: seconds by pass; the chunks of operands and results are in the workers' memory,
            equally many in each.
        overhead: additional time of the cluster by pass, as a fraction of ``one_process``.
    """

    layer: str
    chunks: tuple[int, ...]
    workers: int
    one_process: dict[str, float]
    cluster: dict[str, float]
    overhead: dict[str, float]


def dask_time(problem: ConvProblem, chunks: tuple[int, ...], workers: int) -> DaskTime:
    """Time each pass of a layer in this process and on a cluster."""
    import dask
    from distributed import wait

    import cupyconv.dask as cd

    numbers = np.random.default_rng(0)
    x, w, dy = (
        numbers.standard_normal(shape).astype(problem.dtype)
        for shape in (problem.input_shape, problem.filter_shape, problem.output_shape)
    )
    rules: dict[str, Any] = {"stride": problem.stride, "padding": problem.padding}
    alone: dict[str, Callable[[], Any]] = {
        "forward": lambda: cupyconv.conv_forward(x, w, **rules),
        "backprop_input": lambda: cupyconv.conv_backprop_input(x.shape, w, dy, **rules),
        "backprop_filter": lambda: cupyconv.conv_backprop_filter(x, w.shape, dy, **rules),
    }
    with _cluster(workers, memory_limit=0) as client:
        lazy_x = _spread(client, "x", x, chunks)
        lazy_dy = _spread(client, "dy", dy, cd.conv_forward(lazy_x, w, **rules).chunks)
        lazy = {
            "forward": lambda: cd.conv_forward(lazy_x, w, **rules),
            "backprop_input": lambda: cd.conv_backprop_input(x.shape, w, lazy_dy, **rules),
            "backprop_filter": lambda: cd.conv_backprop_filter(lazy_x, w.shape, lazy_dy, **rules),
        }

        def on_workers(make: Callable[[], Any]) -> Callable[[], None]:
            def call() -> None:
                with dask.config.set(scheduler=client):
                    wait(client.persist(make()))

            return call

        times = _medians(
            alone | {f"{name} on workers": on_workers(make) for name, make in lazy.items()}
        )
    one = {name: times[name] for name in alone}
    cluster = {name: times[f"{name} on workers"] for name in alone}
    overhead = {name: cluster[name] / one[name] - 1 for name in alone}
    return DaskTime(str(problem), chunks, workers, one, cluster, overhead)


def _spread(client: Any, name: str, array: np.ndarray, chunks: Any) -> Any:
    """Return a Dask array in the workers' memory: equally many, neighbouring chunks in each.

    If Dask persists an array, it may place most of its chunks on one worker.
    """
    import dask.array as da

    sizes = da.core.normalize_chunks(chunks, array.shape)
    places = list(np.ndindex(*map(len, sizes)))
    workers = sorted(client.ncores())
    held = {}
    for number, where in enumerate(da.core.slices_from_chunks(sizes)):
        worker = workers[number * len(workers) // len(places)]
        held[name, *places[number]] = client.scatter(array[where], workers=[worker], hash=False)
    return da.Array(held, name, sizes, dtype=array.dtype)


@dataclass(frozen=True)
class DaskMemory:
    """Memory of workers for a layer whose tensors are larger than the workers' memory.

    Attributes:
        layer: the layer, whose forward pass is computed from one Zarr folder to another.
        chunks: chunk sizes of x, from ``suggest_chunks`` for the limit.
        workers: number of processes, of one thread each.
        bytes: bytes of x and y.
        limit: bytes that each worker may use.
        before, peaks: resident bytes of each worker, when new and at its peak.
        seconds: duration of the pass.
    """

    layer: str
    chunks: tuple[int, ...]
    workers: int
    bytes: int
    limit: int
    before: tuple[int, ...]
    peaks: tuple[int, ...]
    seconds: float


def dask_memory(problem: ConvProblem, limit: int, workers: int = 2) -> DaskMemory:
    """Return peak memory of the workers that convolve a volume on disk."""
    import dask.array as da
    import zarr

    import cupyconv.dask as cd

    numbers = np.random.default_rng(0)
    w = numbers.standard_normal(problem.filter_shape).astype(problem.dtype)
    with _cluster(workers, limit) as client, tempfile.TemporaryDirectory() as folder:
        client.run(_import)
        before = client.run(_peak_bytes)
        free = limit - max(before.values())
        suggested = cd.suggest_chunks(problem, free)
        chunks = tuple(max(sizes) for sizes in suggested)
        x = zarr.create_array(
            f"{folder}/x.zarr", shape=problem.input_shape, chunks=chunks, dtype=problem.dtype
        )
        for start in range(0, problem.input_shape[2], chunks[2]):
            slab = slice(None), slice(None), slice(start, start + chunks[2])
            x[slab] = numbers.standard_normal(x[slab].shape, dtype="float32")
        began = perf_counter()
        y = cd.conv_forward(
            da.from_zarr(f"{folder}/x.zarr"), w, stride=problem.stride, padding=problem.padding
        )
        cd.to_zarr(y, f"{folder}/y.zarr")
        seconds = perf_counter() - began
        peaks = client.run(_peak_bytes)
    return DaskMemory(
        str(problem),
        chunks,
        workers,
        x.nbytes + y.nbytes,
        limit,
        tuple(before.values()),
        tuple(peaks.values()),
        seconds,
    )


@cache
def worker_limit() -> int:
    """Return a worker's memory limit at which Dask pauses it ROOM bytes above its idle memory.

    The idle memory is 110 to 270 MB: Dask's arrays load CuPy if it is installed, with the installed
    CUDA libraries.
    """
    program = "import distributed; from tests.studies import ecosystem as e; e._import(); "
    command = [sys.executable, "-c", program + "print(e._peak_bytes())"]
    root = Path(__file__).resolve().parent.parent.parent
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return int((int(ended.stdout) + ROOM) / PAUSED_AT)


@contextmanager
def _cluster(workers: int, memory_limit: int) -> Iterator[Any]:
    """Yield a client of workers of one thread each; ``memory_limit`` is per worker, 0 for none."""
    import dask
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            memory_limit=memory_limit,
            dashboard_address=None,
            silence_logs=40,
        ) as cluster,
        Client(cluster) as client,
        dask.config.set(scheduler=client),
    ):
        yield client


def _import() -> None:
    """Import the modules that a worker's first task would import."""
    import zarr  # noqa: F401

    import cupyconv.dask

    x = np.ones((1, 1, 3), np.float32)
    cupyconv.conv_forward(x, x)


def _peak_bytes() -> int:
    """Return this process's peak resident bytes; Linux only.

    getrusage is not used, because its peak includes memory of the parent process.
    """
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
