"""``python -m tests.fuzz``: attack the library for some minutes; exit code 1 if it finds anything.

Some of everything: rank, size, stride, dilation, padding, groups, formats, dtypes, views of every
operand and of ``out``, illegal calls, NaN and infinity.  Left out, because PyTorch or the emulator
does not take them: layers without channels (which the library refuses), byte orders and elements
that are not aligned on the kernels.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence

from .attacking import STREAMS, Message, Orders, attack, attack_in_processes, until_interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the attack; 1 if anything was found."""
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz", description="Attack with random layers."
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long (10)")
    parser.add_argument("--layers", type=int, help="how many layers at most, for each job")
    parser.add_argument("--seed", help="of all draws; by default another one each time")
    parser.add_argument("--only", choices=tuple(STREAMS), help="on NumPy only, or kernels only")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--case", type=int, help="run the layer of this number alone")
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
    """Print findings as they come, and the last figures; 1 if there are findings."""
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
