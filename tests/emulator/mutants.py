"""Mutates the kernels and lists the mutants that no case kills.

``python -m tests.emulator.mutants [--kernel conv_forward] [--since REVISION] [--limit N]``

A mutant is a kernel source with one literal, comparison, stride or synchronisation changed.  The
cases of ``tests/emulator/cases.py`` run on it under the checker.  A report, wrong numbers, a crash
or a timeout kills it.  For each survivor, write a case or argue in ``equivalent_mutants.toml`` that
it is equivalent.
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


def equivalent_mutants() -> dict[tuple[str, str, str], str]:
    """Return the reasons of argued mutants, by file, line text and change."""
    return {
        (file, source, change): reason
        for file, lines in tomllib.loads(EQUIVALENT.read_text()).items()
        for source, reasons in lines.items()
        for changes, reason in reasons.items()
        for change in changes.split("; ")
    }


def is_argued(mutant: Mutant) -> bool:
    """Return whether a mutant is listed as equivalent."""
    return (mutant.file, mutant.source, mutant.change) in equivalent_mutants()


def survivors(mutants: Iterable[Mutant], cases_of: CasesOf, jobs: int = 2) -> list[Mutant]:
    """Return and print the mutants that no case kills and that are not argued."""
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
            print(f"{outcome:10s} {mutant}", flush=True)
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
    """Return (file name, line) of kernel lines that differ from a revision."""
    command = ["git", "diff", "--unified=0", "--no-color", revision, "--", "."]
    text = subprocess.run(
        command, cwd=KERNEL_DIRECTORY, capture_output=True, text=True, check=True
    ).stdout
    lines: set[tuple[str, int]] = set()
    name = ""
    for line in text.splitlines():
        if line.startswith("+++ "):
            name = line.rpartition("/")[2]
        elif hunk := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            lines |= {(name, number) for number in range(first, first + count)}
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if there are unexplained survivors."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulator.mutants", description=__doc__)
    parser.add_argument("--kernel", help="Mutate only this file, such as conv_forward or tile.cuh.")
    parser.add_argument(
        "--since", metavar="REVISION", help="Mutate only lines changed since this revision."
    )
    parser.add_argument("--limit", type=int, help="Judge a random sample of this size.")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the sample.")
    parser.add_argument("--jobs", type=int, default=2, help="Number of parallel processes.")
    parser.add_argument(
        "--unargued", action="store_true", help="Leave out mutants argued to be equivalent."
    )
    options = parser.parse_args(arguments)
    mutants = all_mutants(options.kernel)
    if options.since is not None:
        lines = changed_lines(options.since)
        mutants = [mutant for mutant in mutants if (mutant.file, mutant.line) in lines]
    if options.limit is not None and options.limit < len(mutants):
        mutants = random.Random(options.seed).sample(mutants, options.limit)
    if options.unargued:
        mutants = [mutant for mutant in mutants if not is_argued(mutant)]

    from .cases import mutation_cases  # cases_of(file) -> [(name, run), ...]

    return 1 if survivors(mutants, mutation_cases, options.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
