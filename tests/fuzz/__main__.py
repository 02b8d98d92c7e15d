"""``python -m tests.fuzz``: attack the library for some minutes; exit code 1 if it finds anything.

The cases vary rank, size, stride, dilation, padding, groups, formats, dtypes and the views of every
operand and of ``out``; some have illegal arguments, NaN or infinity.  Not covered, because PyTorch
or the emulator does not support them: layers without channels (which the library refuses); and on
the kernels, swapped byte orders and misaligned elements.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence

from .attacking import STREAMS, Message, Orders, attack, attack_in_processes, until_interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attack; return 1 if there are findings."""
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description="Attack with random layers."
    )
    parser.add_argument("--minutes", type=float, default=10, help="run for N minutes (10)")
    parser.add_argument("--layers", type=int, help="run at most N layers per job")
    parser.add_argument("--seed", help="set the seed of all draws (random)")
    parser.add_argument("--only", choices=tuple(STREAMS), help="run on NumPy or the kernels only")
    parser.add_argument("--jobs", type=int, default=2, help="use N processes (2)")
    parser.add_argument("--case", type=int, help="run only the layer with this number")
    given = parser.parse_args(arguments)
    seed = given.seed or str(random.SystemRandom().randrange(10**9))
    streams = (given.only,) if given.only else tuple(STREAMS)
    if given.case is not None:
        print(f"seed {seed}", flush=True)
        return report(attack(Orders(seed, streams, first=given.case, layers=len(streams))))
    stop = until_interrupted()
    print(f"seed {seed}", flush=True)
    orders = Orders(seed, streams, seconds=given.minutes * 60, layers=given.layers)
    return report(attack_in_processes(orders, given.jobs, stop))


def report(messages: Iterator[Message]) -> int:
    """Print findings as they come, and the last figures; return 1 if there are findings."""
    findings, figures = 0, None
    for kind, content in messages:
        if kind == "finding":
            findings += 1
            print(f"\n[{findings}] {content[1]}", flush=True)
        elif kind == "figures":
            figures = content
    if figures is not None:
        print(figures.text(findings), flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
