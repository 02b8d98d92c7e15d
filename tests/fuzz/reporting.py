"""Print findings as programs that reproduce them, and the counts of an attack."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import isnan, prod
from typing import Any

import numpy as np

from .cases import (
    ADDENDS,
    PART,
    PLAIN,
    SEEDS,
    Case,
    KernelRun,
    layout,
    operand_dtype,
    poked,
    values_text,
)
from .checking import FILLER, Finding, kernel_plan, out_view, pass_of, strides_of
from .oracle import Geometry, IllegalError, geometry, result_shape


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
    case = finding.case
    lines = ["import numpy as np"]
    if "bfloat16" in (case.dtype, case.stranger):
        lines.append("from ml_dtypes import bfloat16")
    on_kernels = isinstance(case.run, KernelRun)
    lines.append("from tests import emulator" if on_kernels else "import cupyconv")
    more: dict[str, str] = {}
    within = ""
    if isinstance(case.run, KernelRun):
        within = _kernel_lines(case, lines, more)
    else:
        _numpy_lines(case, lines, more)
    if finding.is_illegal:
        lines.append("from cupyconv import ConvError, ConvTypeError")
    if any(view.lazy for view in case.views.values()):
        lines.append("from tests.fuzz.cases import lazy_tensor")
    lines.append("")
    for name, shape in case.operands.items():
        lines += _array_lines(case, name, shape)
    shape = _result_shape(case)
    if ("out" in case.views or case.bad_out) and shape is not None:
        lines += _out_lines(case, shape)
        more["out"] = "out"
    if finding.kind[0] == "changed":
        names = finding.kind[5:]
        lines.append(f"before = {', '.join(_bytes_text(case, name) for name in names)}")
    call = _call_text(case, "emulator" if on_kernels else "cupyconv", more)
    return "\n".join([*lines, *_verdict_lines(finding, call, within)]) + "\n"


def _kernel_lines(case: Case, lines: list[str], more: dict[str, str]) -> str:
    """Add imports and arguments of a run on the emulator; return the context of the call."""
    run = case.run
    assert isinstance(run, KernelRun)
    more["arch"] = repr(run.arch)
    if case.operation != "conv_backprop_bias":
        more |= {"impl": repr(run.impl), "precision": repr(run.precision)}
        if not isinstance(kernel_plan(case, _geometry(case)), str):
            _plan_lines(case, lines)
            more["impl"] = "plan"
    settings = ", ".join(f"{name}={value!r}" for name, value in run.settings.items())
    return f"emulator.settings({settings})" if settings else ""


def _geometry(case: Case) -> Geometry | None:
    try:
        return geometry(case)
    except IllegalError:
        return None


def _plan_lines(case: Case, lines: list[str]) -> None:
    """Add the lines that make the plan with the tile of a legal case's run."""
    run = case.run
    assert isinstance(run, KernelRun)
    lines += [
        "from cupyconv import ConvProblem",
        "from cupyconv.kernels.strides import Strides",
        "from tests.agreement import plan_with",
        "",
        f"problem = {_problem_text(case)}",
        "plan = plan_with(",
        f"    *(problem, {run.impl!r}, emulator.device({run.arch!r})),",
        f"    tile={run.tile},",
        f"    passes=({pass_of(case)!r},),",
        f"    precision={run.precision!r},",
        f"    strides={strides_of(case, geometry(case))!r},",
        ")",
    ]


def _problem_text(case: Case) -> str:
    """Return the code of a legal layer's ConvProblem."""
    found = geometry(case)
    rules = "".join(f"{name}={value!r}, " for name, value in _spoken(case).items())
    return f"ConvProblem({found.shapes['x']}, {found.shapes['w']}, {rules}dtype={case.dtype!r})"


def _numpy_lines(case: Case, lines: list[str], more: dict[str, str]) -> None:
    """Add imports and arguments of a run on NumPy."""
    run = case.run
    if run.block_bytes is not None:
        lines += [
            "from cupyconv.cpu import blocked",
            "",
            f"blocked.BLOCK_BYTES = {run.block_bytes}",
        ]
    if case.operation == "conv_backprop_bias":
        return
    if run.method in ("auto", "reference"):
        more["impl"] = repr(run.method)
        return
    lines += [
        "from dataclasses import replace",
        "",
        f"problem = cupyconv.{_problem_text(case)}",
        "plan = cupyconv.plan(problem, 'cpu')",
        f"passes = tuple(replace(one, method={run.method!r}) for one in plan.passes)",
        "plan = replace(plan, passes=passes)",
    ]
    more["impl"] = "plan"


def _spoken(case: Case) -> dict[str, Any]:
    """Return the keywords of the layer that differ from the defaults."""
    usual = {"stride": 1, "dilation": 1, "padding": 0, "groups": 1}
    rules = case.rules.items()
    return {name: value for name, value in rules if value != usual.get(name)}


def _array_lines(case: Case, name: str, shape: tuple[int, ...]) -> list[str]:
    view, dtype = case.views.get(name, PLAIN), operand_dtype(case, name)
    where = layout(view, shape)
    seed = SEEDS[name]
    values = values_text(case, where.count)
    lines = [f"rng = np.random.default_rng(({case.seed}, {seed}))", f"flat = {values}"]
    if case.poke is not None and case.poke[0] == name:
        value = case.poke[2]
        text = repr(value) if np.isfinite(value) else f"float({str(value)!r})"
        wide = "complex" if case.dtype in PART else "float"
        lines += [f"flat = flat.astype({wide})", f"flat[{poked(case, where.count)}] = {text}"]
    if not view.lazy:
        return [*lines, *_memory_lines(name, view, shape, dtype, "flat")]
    lines.append(f"flat = np.{'conj' if view.lazy == 'conjugated' else 'negative'}(flat)")
    kept = f"{name}_memory"
    lines += _memory_lines(kept, replace(view, lazy=""), shape, dtype, "flat")
    return [*lines, f"{name} = lazy_tensor({kept}, {view.lazy!r})"]


def _bytes_text(case: Case, name: str) -> str:
    """Return the code that reads the bytes of an operand."""
    lazy = case.views.get(name, PLAIN).lazy
    return f"{name}_memory.tobytes()" if lazy else f"{name}.tobytes()"


def _memory_lines(
    name: str, view: Any, shape: tuple[int, ...], dtype: np.dtype, flat: str
) -> list[str]:
    """Return the code of an array over memory with the values of ``flat``."""
    where, size = layout(view, shape), dtype.itemsize
    spelled = "bfloat16" if dtype.name == "bfloat16" else repr(dtype.str)
    lines = [f"flat = {flat}.astype({spelled})"]
    if view == PLAIN:
        return [*lines, f"{name} = flat[: {prod(shape)}].reshape({shape})"]
    strides = tuple(stride * size for stride in where.strides)
    start = view.shift + where.first * size
    lines += [
        f"memory = np.zeros({view.shift} + flat.nbytes, np.uint8)",
        f"memory[{view.shift}:] = flat.view(np.uint8)",
        f"{name} = np.ndarray({shape}, flat.dtype, memory, {start}, {strides})",
    ]
    if view.read_only:
        lines.append(f"{name}.flags.writeable = False")
    return lines


def _result_shape(case: Case) -> tuple[int, ...] | None:
    try:
        return result_shape(geometry(replace(case, bad_out="")), case.operation)
    except IllegalError:
        return None


def _out_lines(case: Case, shape: tuple[int, ...]) -> list[str]:
    if case.bad_out == "shared":
        return [f"out = {next(iter(case.operands))}"]
    view, shape = out_view(case, shape)
    count = layout(view, shape).count
    dtype = operand_dtype(case, "out")
    filler = f"np.full({count * dtype.itemsize}, {FILLER}, np.uint8)"
    spelled = "bfloat16" if dtype.name == "bfloat16" else repr(dtype.str)
    # Always over a block of memory, to show writes outside the array.
    lines = _memory_lines("out", view, shape, dtype, f"{filler}.view({spelled})")
    if view == PLAIN:
        lines[-1] = f"memory = flat.view(np.uint8)\nout = flat[: {prod(shape)}].reshape({shape})"
    return [*lines, f"memory[:] = {FILLER}"]


def _call_text(case: Case, module: str, more: dict[str, str]) -> str:
    shape_of = {"conv_backprop_input": case.x, "conv_backprop_filter": case.w}
    names = [name for name in case.operands if name not in ADDENDS.values()]
    if case.operation == "conv_transpose":
        names = ["dy", "w", *names[2:]]
    given = [*names]
    if case.operation == "conv_backprop_input":
        given = [repr(shape_of[case.operation]), "w", "dy"]
    if case.operation == "conv_backprop_filter":
        given = ["x", repr(shape_of[case.operation]), "dy"]
    keywords = {name: repr(value) for name, value in _spoken(case).items()}
    if case.operation in ADDENDS:
        if case.activation is not None:
            keywords["activation"] = repr(case.activation)
        if case.adds:
            keywords["add"] = ADDENDS[case.operation]
    if case.operation == "conv_transpose" and case.output_padding is not None:
        shape_given = case.output_padding == "shape"
        name = "output_shape" if shape_given else "output_padding"
        keywords[name] = repr(case.x if shape_given else case.output_padding)
    keywords |= more
    rest = [f"{name}={value}" for name, value in keywords.items()]
    return f"{module}.{case.operation}({', '.join([*given, *rest])})"


def _verdict_lines(finding: Finding, call: str, within: str) -> list[str]:
    """Return the lines of the call and of the check that fails."""
    if finding.is_illegal:
        lines = [
            "try:",
            f"    {call}",
            "except (ConvError, ConvTypeError):",
            "    pass",
            "else:",
            f"    raise AssertionError({finding.text!r})",
        ]
    else:
        lines = [f"got = {call}"]
    if within:
        lines = [f"with {within}:", *(f"    {line}" for line in lines)]
    kind = finding.kind[0]
    if kind == "wrong":
        assert finding.index is not None
        at = f"got[{finding.index}]"
        if finding.case.dtype in PART:
            *index, part = finding.index
            at = f"got[{tuple(index)}].{('real', 'imag')[part]}"
        lines += [f"print({at})  # {finding.text}"]
        if isnan(finding.low):
            lines.append(f"assert np.isnan({at})")
        else:
            low, high = (f"float({str(edge)!r})" for edge in (finding.low, finding.high))
            lines.append(f"assert {low} <= float({at}) <= {high}")
    elif kind == "changed":
        names = finding.kind[5:]
        text = ", ".join(_bytes_text(finding.case, name) for name in names)
        lines.append(f"assert before == {text}")
    elif kind == "outside":
        lines += [
            f"out[...] = np.full(out.itemsize, {FILLER}, np.uint8).view(out.dtype)[0]",
            f"assert (memory == {FILLER}).all()",
        ]
    elif kind == "shape":
        lines.append(f"print(got.shape, got.dtype)\nassert False, {finding.text!r}")
    elif kind == "not out":
        lines.append("assert got is out")
    return lines
