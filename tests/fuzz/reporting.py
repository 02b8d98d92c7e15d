"""Print findings as programs that reproduce them, and the counts of an attack."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from .cases import defaults
from .checking import Finding


@dataclass
class Figures:
    """Counts of an attack.

    Attributes:
        layers: layers drawn, by "numpy" and "kernels".
        passes: passes checked on NumPy, by method.
        kernels: passes checked on the kernels, by family and chip.
        left_out: calls that were not made or not checked, by reason.
        seconds: duration of the attack.
        builds: kernels built.
    """

    layers: Counter[str] = field(default_factory=Counter)
    passes: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    builds: int = 0

    def add(self, other: Figures) -> None:
        """Add the counts of another worker."""
        for name in ("layers", "passes", "kernels", "left_out"):
            getattr(self, name).update(getattr(other, name))
        self.builds += other.builds

    def text(self, findings: int) -> str:
        """Return the counts in one line, after the details."""
        kernels = ", ".join(f"{name} {count:,}" for name, count in sorted(self.kernels.items()))
        methods = ", ".join(f"{name} {count:,}" for name, count in sorted(self.passes.items()))
        left_out = ", ".join(f"{count:,} {name}" for name, count in sorted(self.left_out.items()))
        return (
            f"passes on NumPy by method: {methods or 'none'}\n"
            f"passes through kernels by family and chip: {kernels or 'none'}\n"
            f"left out: {left_out or 'nothing'}; kernels built: {self.builds:,}\n"
            f"layers {self.layers.total():,}, passes on NumPy {self.passes.total():,}, "
            f"passes through kernels {self.kernels.total():,}, "
            f"seconds {self.seconds:.0f}, findings {findings}"
        )


def report(finding: Finding, found_at: str) -> str:
    """Return a finding with the program that reproduces it."""
    head = f"finding: {' / '.join(finding.kind)}\n  {finding.text}\n  first in {found_at}"
    return f"{head}\n\n{program(finding)}"


def program(finding: Finding) -> str:
    """Return a Python program that fails as long as the fault exists."""
    arguments = ",\n    ".join(_arguments(finding.case))
    return f"""\
from math import inf, nan
from tests.fuzz.cases import Case, KernelRun, NumpyRun, View
from tests.fuzz.checking import check

case = Case(
    {arguments},
)
finding = check(case)
assert finding is None, finding.text
"""


def _arguments(made: Any) -> Iterator[str]:
    """Yield the arguments of a dataclass's object that differ from their defaults."""
    usual = defaults(made)
    for name, value in vars(made).items():
        if name not in usual or value != usual[name]:
            yield f"{name}={_code(value)}"


def _code(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_code(one)}' for key, one in value.items())}}}"
    if is_dataclass(value):
        return f"{type(value).__name__}({', '.join(_arguments(value))})"
    return repr(value)
