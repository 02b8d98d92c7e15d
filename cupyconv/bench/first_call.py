"""Time of the first result of a new process.

    python -m cupyconv.bench.first_call '{"implementation": "auto", ...}'

prints the milliseconds of each pass, not counting imports and the creation of the GPU context.
cupyconv spends this time on loading or compiling kernels, PyTorch on loading cuDNN and trying its
algorithms, and JAX and TensorFlow on compiling a function.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from cupyconv.bench import data, places
from cupyconv.bench.implementations import pass_call
from cupyconv.bench.peers import PEERS, find
from cupyconv.bench.results import FirstCall
from cupyconv.bench.suites import SuiteLayer
from cupyconv.cache_folder import CACHE_VARIABLE
from cupyconv.errors import CupyconvError
from cupyconv.planning import Plan, plan

LIMIT = 90  # s; timeout of each process (chosen)


class FirstCallError(CupyconvError):
    """A process failed; the message is the last line of its standard error, or how it ended."""


def measure(
    layer: SuiteLayer,
    dtype: str,
    passes: Sequence[str],
    device: str,
    *,
    implementation: str = "auto",
    precision: str = "ieee",
    peers: Iterable[str] = ("torch",),
) -> Iterator[FirstCall]:
    """Yield first-call times of each pass: cupyconv with cold and warm kernel cache, then peers.

    Raises:
        FirstCallError: a process failed.
    """
    problem = data.in_layout(layer.problem, data.LAYOUTS[0], dtype)
    request = {
        "implementation": implementation,
        "plan": plan(problem).to_json(),  # contains the problem; ConvProblem has no JSON form
        "passes": list(passes),
        "device": device,
        "precision": precision,
    }
    with tempfile.TemporaryDirectory(prefix="cupyconv-bench-") as empty:
        # The CPU has no kernels to cache.
        for cache in ("cold", "warm") if device == "gpu" else ("",):
            for pass_, milliseconds in _in_new_process(request, empty).items():
                yield FirstCall(implementation, layer.name, dtype, cache, pass_, milliseconds)
        for peer in peers:
            for pass_, ms in _in_new_process({**request, "implementation": peer}, "").items():
                yield FirstCall(peer, layer.name, dtype, "", pass_, ms)


def _in_new_process(request: dict[str, Any], cache_directory: str) -> dict[str, float]:
    environment = dict(os.environ)
    if cache_directory:
        environment[CACHE_VARIABLE] = cache_directory
    command = [sys.executable, "-m", "cupyconv.bench.first_call", json.dumps(request)]
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True
        )
        return json.loads(run.stdout)
    except subprocess.CalledProcessError as error:
        raise FirstCallError((error.stderr.strip().splitlines() or ["no message"])[-1]) from error
    except (subprocess.TimeoutExpired, ValueError, OSError) as error:
        raise FirstCallError(str(error)) from error


def main(text: str) -> dict[str, float]:
    """Return the milliseconds of the first call of each requested pass, in this process."""
    request = json.loads(text)
    problem = Plan.from_json(request["plan"]).problem
    place = places.of(request["device"])
    precision, implementation = request["precision"], request["implementation"]
    sets = data.random_sets(problem, 1, place.xp)
    peer = find(place, implementation)[0] if implementation in PEERS else None
    milliseconds = {}
    with peer.settings(precision) if peer else nullcontext():
        place.synchronize()
        for pass_ in request["passes"]:
            if peer:
                call = peer.call(problem, pass_, sets)
            else:
                call = pass_call(problem, pass_, sets, implementation, precision)
            start = time.perf_counter()
            call(0)
            place.synchronize()
            milliseconds[pass_] = (time.perf_counter() - start) * 1e3
    return milliseconds


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
