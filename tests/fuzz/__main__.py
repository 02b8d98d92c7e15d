"""``python -m tests.fuzz``: attack the library for some minutes; exit code 1 if it finds anything.

The cases vary rank, size, stride, dilation, padding, groups, formats, dtypes and the views of every
operand and of ``out``; some have illegal arguments, NaN or infinity.  Not covered, because PyTorch
or the emulator does not support them: layers without channels (which the library refuses); and on
the kernels, swapped byte orders and misaligned elements.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from .attack import STREAMS, Attack, work
from .kernels import pool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attack; return 1 if there are findings."""
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description="Attack with random layers."
    )
    parser.add_argument("--minutes", type=float, default=10, help="run for N minutes (10)")
    parser.add_argument("--seed", help="set the seed of all draws (random)")
    parser.add_argument("--only", choices=tuple(STREAMS), help="run on NumPy or the kernels only")
    parser.add_argument("--jobs", type=int, default=2, help="use N processes (2)")
    parser.add_argument("--round", type=int, help="run only the round with this number")
    given = parser.parse_args(arguments)
    name = given.seed or str(random.SystemRandom().randrange(10**9))
    streams = [given.only] if given.only else list(STREAMS)
    print(f"seed {name}", flush=True)
    if given.round is not None:
        with pool.limited():
            rounds = [Attack().round(one, f"{name} {one} {given.round}") for one in streams]
        found = [text for texts in rounds for text in texts]
        print(*found, sep="\n", end="")
        return int(bool(found))
    return in_processes(streams, name, given.jobs, time.monotonic() + given.minutes * 60)


def in_processes(streams: list[str], name: str, jobs: int, end: float) -> int:
    """Attack in several processes, and replace one that dies; return 1 if there are findings."""
    context, found = multiprocessing.get_context("spawn"), 0
    with tempfile.TemporaryDirectory() as folder:

        def start(first: int) -> tuple[Any, Path, int]:
            latest = Path(folder, f"{first}.py")
            process = context.Process(target=work, args=(streams, name, first, jobs, end, latest))
            process.start()
            return process, latest, first

        workers = [start(job) for job in range(jobs)]
        while workers:
            ended = connection.wait([process.sentinel for process, *_ in workers])
            for worker in [worker for worker in workers if worker[0].sentinel in ended]:
                workers.remove(worker)
                process, latest, first = worker
                process.join()
                found |= process.exitcode != 0
                if process.exitcode not in (0, 1):
                    case = latest.read_text() if latest.exists() else ""
                    print(f"\nfinding: died with {process.exitcode} in\n\n{case}", flush=True)
                    if time.monotonic() < end:
                        workers.append(start(first + 1000 * jobs))
    return found


if __name__ == "__main__":
    sys.exit(main())
