"""Mutates the kernels and says which changes no case notices.

``python -m tests.emulator.mutants [--kernel conv_forward] [--since REVISION] [--limit N]``

A mutant is a kernel source with one literal, comparison, stride or synchronisation changed.  The
cases of ``tests/emulator/cases.py`` run on it under the checker; it is killed by a report, by wrong
numbers, by a crash or by running too long.  A survivor is answered by a new case, or argued to be
equivalent in ``equivalent_mutants.toml``.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from .build import KERNEL_DIRECTORY
from .mutations import Mutant, all_mutants
from .trials import CasesOf, judge

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")
KILLERS = ("report", "numbers", "crash", "timeout", "error")


def equivalent_mutants(path: Path | None = None) -> dict[tuple[str, str, str], str]:
    """Reasons of the survivors argued equivalent, by file, line text and change."""
    entries = tomllib.loads((path or EQUIVALENT).read_text()).get("mutant", [])
    return {
        (one["file"], one["source"], change): one["reason"]
        for one in entries
        for change in one["changes"]
    }


def is_argued(mutant: Mutant) -> bool:
    """Whether the list says of a mutant that it is equivalent, should it survive."""
    return (mutant.file, mutant.source, mutant.change) in equivalent_mutants()


def survivors(
    mutants: Iterable[Mutant], cases_of: CasesOf, jobs: int = 2, verbose: bool = False
) -> list[Mutant]:
    """The mutants that no case kills and that are not argued equivalent; prints as it goes."""
    counts: Counter[str] = Counter()
    alive: list[Mutant] = []
    started = time.monotonic()
    for verdict in judge(mutants, cases_of, jobs):
        mutant, outcome = verdict.mutant, verdict.outcome
        if outcome == "survived" and is_argued(mutant):
            outcome = "equivalent"
        counts[outcome] += 1
        if outcome == "survived":
            alive.append(mutant)
        if outcome == "survived" or verbose:
            print(f"{outcome:10s} {mutant}", flush=True)
        if verdict.case and verbose:
            print(f"{'':10s} by {verdict.case}: {verdict.detail}".splitlines()[0], flush=True)
    compiled = sum(counts.values()) - counts["uncompiled"]
    killed = compiled - counts["survived"] - counts["equivalent"]
    print(
        f"{compiled} mutants that compile: {killed} killed"
        f" ({', '.join(f'{n} by {how}' for how, n in sorted(counts.items()) if how in KILLERS)}),"
        f" {counts['equivalent']} argued equivalent, {counts['survived']} survive;"
        f" {counts['uncompiled']} do not compile; {time.monotonic() - started:.0f} s"
    )
    return alive


def changed_lines(revision: str) -> set[tuple[str, int]]:
    """Names of kernel files, and the lines in them that a revision has otherwise or not at all."""
    command = ["git", "diff", "--unified=0", "--no-color", revision, "--", "."]
    text = subprocess.run(
        command, cwd=KERNEL_DIRECTORY, capture_output=True, text=True, check=True
    ).stdout
    found: set[tuple[str, int]] = set()
    name = ""
    for line in text.splitlines():
        if line.startswith("+++ "):
            name = line.rpartition("/")[2]
        elif hunk := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            found |= {(name, number) for number in range(first, first + count)}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if there are unexplained survivors."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.mutants", description=__doc__)
    parser.add_argument("--kernel", help="one file: conv_forward, tile.cuh, ...; default all")
    parser.add_argument("--since", metavar="REVISION", help="only lines changed since then")
    parser.add_argument("--limit", type=int, help="judge a random sample of so many")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--verbose", action="store_true", help="print every verdict")
    parser.add_argument(
        "--unargued", action="store_true", help="leave out what is argued to be equivalent"
    )
    chosen = parser.parse_args(arguments)
    mutants = all_mutants(chosen.kernel)
    if chosen.since is not None:
        changed = changed_lines(chosen.since)
        mutants = [mutant for mutant in mutants if (mutant.file, mutant.line) in changed]
    if chosen.limit is not None and chosen.limit < len(mutants):
        mutants = random.Random(chosen.seed).sample(mutants, chosen.limit)
    if chosen.unargued:
        mutants = [mutant for mutant in mutants if not is_argued(mutant)]
    if chosen.list:
        print(*mutants, sep="\n")
        return 0

    from .cases import mutation_cases  # cases_of(file) -> [(name, run), ...]

    return 1 if survivors(mutants, mutation_cases, chosen.jobs, chosen.verbose) else 0


if __name__ == "__main__":
    sys.exit(main())
