"""The plan of a problem on a device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from cupyconv import markup
from cupyconv.errors import ConvError, unknown_word
from cupyconv.planning import cost
from cupyconv.planning.device import Device
from cupyconv.planning.families import FAMILIES, Family, Tile
from cupyconv.problem import PASSES, ConvProblem

AUTO = "auto"


@dataclass(frozen=True)
class PassPlan:
    """How one pass is computed.

    Attributes:
        pass_: "forward", "backprop_input" or "backprop_filter".
        implementation: the family's name, as ``impl`` takes it.
        reason: why this one.
        tile: block tile of a GEMM kernel, else None.
        blocks: thread blocks that cover the tiles, in each split; 0 without tiles.
        splits: into how many parts a sum over pixels or gemm_k is cut; their sums are added in a
            fixed order.
        workspace_bytes: device memory beside the tensors.
    """

    pass_: str
    implementation: str
    reason: str
    tile: Tile | None = None
    blocks: int = 0
    splits: int = 1
    workspace_bytes: int = 0

    @property
    def family(self) -> Family:
        return FAMILIES[self.implementation]


@dataclass(frozen=True)
class Plan:
    """The three passes of a problem on a device; prints as a table, and indexes by pass."""

    problem: ConvProblem
    device: Device
    passes: tuple[PassPlan, ...]

    def __getitem__(self, pass_: str) -> PassPlan:
        for pass_plan in self.passes:
            if pass_plan.pass_ == pass_:
                return pass_plan
        raise unknown_word("pass", pass_, PASSES)

    def __iter__(self) -> Iterator[PassPlan]:
        return iter(self.passes)

    def __str__(self) -> str:
        where = self.device.architecture or ""
        head = f"{self.problem}\non {self.device.name} {where}".rstrip()
        rows = [
            (p.pass_, p.implementation, str(p.tile or ""), _blocks_text(p), p.reason)
            for p in self.passes
        ]
        rows.insert(0, ("pass", "implementation", "tile", "blocks", "reason"))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[4]])
            for row in rows
        ]
        return "\n".join([head, *lines])

    def _repr_html_(self) -> str:
        """The passes as a table, for Jupyter."""
        where = " ".join(filter(None, (self.device.name, self.device.architecture)))
        rows = tuple(
            (p.pass_, p.implementation, str(p.tile or ""), _blocks_text(p), p.reason)
            for p in self.passes
        )
        words = ("pass", "implementation", "tile", "blocks", "reason")
        blocks = (markup.Paragraph(repr(self.problem)), markup.Table(words, rows))
        return markup.Document(f"Plan on {where}", (markup.Section("", blocks),)).html()

    def to_json(self) -> str:
        """The plan as JSON, which ``from_json`` reads."""
        problem = {
            "input_shape": self.problem.input_shape,
            "filter_shape": self.problem.filter_shape,
            "stride": self.problem.stride,
            "padding": self.problem.padding
            if self.problem.padding_mode == "explicit"
            else self.problem.padding_mode,
            "dilation": self.problem.dilation,
            "groups": self.problem.groups,
            "data_format": self.problem.data_format,
            "filter_format": self.problem.filter_format,
            "dtype": self.problem.dtype,
        }
        passes = [asdict(pass_plan) for pass_plan in self.passes]
        return json.dumps({"problem": problem, "device": asdict(self.device), "passes": passes})

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that ``to_json`` wrote."""
        fields: dict[str, Any] = json.loads(text)
        passes = tuple(
            PassPlan(**{**entry, "tile": _tile(entry["tile"])}) for entry in fields["passes"]
        )
        return Plan(ConvProblem(**fields["problem"]), Device(**fields["device"]), passes)


def plan(problem: ConvProblem, device: str | Device = "cpu", impl: str = AUTO) -> Plan:
    """Which implementation computes each pass of a problem on a device, and why.

    Args:
        problem: the configuration.
        device: "cpu", an architecture such as "sm_80", or a Device.
        impl: "auto", or the name of the one implementation to use.

    Raises:
        ConvError: the implementation is unknown, not for this device, or cannot take the problem.
    """
    chosen = Device.of(device)
    passes = tuple(plan_pass(problem, pass_, chosen, impl) for pass_ in PASSES)
    return Plan(problem, chosen, passes)


@lru_cache(maxsize=4096)
def plan_pass(problem: ConvProblem, pass_: str, device: Device, impl: str = AUTO) -> PassPlan:
    """One pass of ``plan``, for an implementation that need not have the others."""
    here = {name: family for name, family in FAMILIES.items() if family.on_gpu == device.is_gpu}
    if impl == AUTO:
        families = [f for f in here.values() if f.refuses(problem, pass_, device) is None]
    else:
        family = _named(impl, here, device)
        refusal = family.refuses(problem, pass_, device)
        if refusal is not None:
            raise ConvError("the implementation must fit the problem", refusal, "Use impl='auto'")
        families = [family]
    if not device.is_gpu:
        return PassPlan(pass_, families[-1].name, families[-1].summary)
    candidates = [
        candidate
        for family in families
        for candidate in cost.candidates(problem, pass_, device, family)
    ]
    best = min(candidates, key=lambda candidate: candidate.microseconds)
    return PassPlan(
        pass_,
        best.family.name,
        f"estimated {best.microseconds:.3g} us: {best.family.summary}",
        best.tile,
        best.blocks,
        best.splits,
        best.workspace_bytes,
    )


def _named(impl: str, here: dict[str, Family], device: Device) -> Family:
    if impl in here:
        return here[impl]
    if impl not in FAMILIES:
        raise unknown_word("impl", impl, (AUTO, *here))
    arrays = "NumPy arrays" if device.is_gpu else "CuPy arrays"
    raise ConvError(
        "the implementation must run where the arrays are",
        f"{impl!r} does not run on {device.name}",
        f"Use one of {', '.join(map(repr, (AUTO, *here)))}, or pass {arrays}",
    )


def _blocks_text(planned: PassPlan) -> str:
    if not planned.tile:
        return f"{planned.splits} chunks" if planned.splits > 1 else ""
    return f"{planned.blocks}" + (f" x {planned.splits}" if planned.splits > 1 else "")


def _tile(fields: dict[str, Any] | None) -> Tile | None:
    if fields is None:
        return None
    macros = tuple((name, value) for name, value in fields["macros"])
    return Tile(**{**fields, "macros": macros, "since": tuple(fields["since"])})
