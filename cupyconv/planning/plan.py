"""The plan of a problem on a device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from typing import Any

from cupyconv import markup, records
from cupyconv.errors import ConvError, require_word, shown, unknown_word
from cupyconv.planning.device import Device
from cupyconv.planning.families import FAMILIES, Candidate, Family, Tile
from cupyconv.planning.request import Impl, Implementation, Request
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES, ConvProblem

AUTO: Impl = "auto"


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
        precision: what was permitted: "ieee", "tf32" or "bf16x6", as ``plan`` takes it.
        method: how "numpy" computes it (cupyconv/planning/cpu.py), which operands "cuda-gather"
            copies first, such as "x and w arranged", else empty.
    """

    pass_: str
    implementation: Implementation
    reason: str
    tile: Tile | None = None
    blocks: int = 0
    splits: int = 1
    workspace_bytes: int = 0
    precision: str = "ieee"
    method: str = ""

    @property
    def family(self) -> Family:
        return FAMILIES[self.implementation]


@dataclass(frozen=True)
class Plan:
    """The three passes of a problem on a device; prints as a table, and indexes by pass."""

    problem: ConvProblem
    device: Device
    passes: tuple[PassPlan, ...]

    def __hash__(self) -> int:
        return hash((self.problem, self.device))  # quick: a plan is looked up at every call

    def __getitem__(self, pass_: str) -> PassPlan:
        require_word("pass", pass_, PASSES)
        return next(one for one in self.passes if one.pass_ == pass_)

    def __iter__(self) -> Iterator[PassPlan]:
        return iter(self.passes)

    def __str__(self) -> str:
        lines = [*self.table.lines(markup.UNBOUND), "", *self.origin.lines(markup.UNBOUND)]
        return "\n".join([str(self.problem), f"on {self.place}", *lines])

    def _repr_html_(self) -> str:
        """The passes as a table, for Jupyter."""
        blocks = (markup.Paragraph(repr(self.problem)), self.table, self.origin)
        return markup.Document(f"Plan on {self.place}", (markup.Section("", blocks),)).html()

    @property
    def place(self) -> str:
        """The device's name, and what kernels are compiled for where the name does not say it."""
        architecture, name = self.device.architecture or "", markup.in_line(self.device.name)
        if architecture.removesuffix("a") == name.removesuffix("a"):
            return architecture
        return f"{name} {architecture}".rstrip()

    @property
    def table(self) -> markup.Table:
        """A line for each pass."""
        rows = tuple(
            (p.pass_, p.implementation, str(p.tile or ""), _blocks_text(p), p.reason)
            for p in self.passes
        )
        return markup.Table(("pass", "implementation", "tile", "blocks", "reason"), rows)

    @property
    def origin(self) -> markup.Paragraph:
        """Where the times come from: what is measured, what modelled."""
        measured = sum(one.reason.startswith("measured") for one in self.passes)
        other = ""
        if self.device.is_gpu and self.device.nominal != self.device.capability:
            other = ", for the chip of compute capability {}.{}".format(*self.device.nominal)
        told = {
            0: f"Estimates are modelled{other}; nothing was measured.",
            len(self.passes): "Times are measured, on a GPU like this one.",
        }
        return markup.Paragraph(
            told.get(measured, "Times are measured where that is said, else modelled.")
        )

    def to_json(self) -> str:
        """The plan as JSON, which ``from_json`` reads."""
        problem = {
            "input_shape": self.problem.input_shape,
            "filter_shape": self.problem.filter_shape,
            **self.problem.keywords,
            "dtype": self.problem.dtype,
        }
        passes = [asdict(pass_plan) for pass_plan in self.passes]
        return json.dumps({"problem": problem, "device": asdict(self.device), "passes": passes})

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that ``to_json`` wrote.

        Raises:
            ConvError: it is no such text, or this version has no such kernels.
        """
        try:
            fields: dict[str, Any] = records.parse_json(text)
            problem = ConvProblem(**fields["problem"])
            device = records.record(Device, fields["device"])
            passes = tuple(records.record(PassPlan, entry) for entry in fields["passes"])
            _require_sound(device, passes)
            if tuple(pass_plan.pass_ for pass_plan in passes) != PASSES:
                raise ValueError(f"its passes must be {', '.join(PASSES)}")
            for pass_plan in passes:
                _require_possible(problem, device, pass_plan)
        except ConvError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ConvError(
                "a plan must be JSON that Plan.to_json wrote",
                f"{type(error).__name__}: {error}",
                "Plan again, with cupyconv.plan(problem, device)",
            ) from None
        return Plan(problem, device, passes)

    def replay(self, request: Request) -> PassPlan:
        """The planned pass, if it answers a request.

        Raises:
            ConvError: it was planned for another problem or architecture, or does what the request
                does not permit.
        """
        planned, reduced = self[request.pass_], request.reduced
        where = f"{request.device.name} ({request.device.architecture or 'NumPy arrays'})"
        wrong, way_out = "", "Plan again, with cupyconv.plan(problem, device)"
        if not _same(self.problem, request.problem):
            wrong = f"planned was {self.problem}, computed is {request.problem}"
        elif self.device.architecture != request.device.architecture:
            wrong = f"planned was for {self.device.name}, the arrays are on {where}"
        elif planned.precision not in ("ieee", request.precision):
            wrong = (
                f"planned was with precision {planned.precision!r}, asked for is "
                f"{request.precision!r}"
            )
            way_out = f"Pass precision={planned.precision!r}"
        elif not request.affords(planned.workspace_bytes):
            wrong = (
                f"{planned.workspace_bytes} bytes of workspace are planned, the limit is "
                f"{request.workspace_limit}"
            )
        elif (refusal := planned.family.refuses(reduced)) is not None:
            wrong = refusal
        elif request.device.is_gpu and not self._still_costs(planned, reduced):
            wrong = "the tensors lie in memory otherwise than was planned for"
            way_out = "Pass tensors that are contiguous in the problem's formats"
        if wrong:
            raise ConvError("a plan must be for what is computed", wrong, way_out)
        return planned

    @staticmethod
    def _still_costs(planned: PassPlan, request: Request) -> bool:
        """Whether a planned pass needs as much workspace for the tensors of a request."""
        found = planned.family.candidate(request, planned.tile, planned.splits, planned.method)
        return found is not None and found.workspace_bytes == planned.workspace_bytes


def plan(
    problem: ConvProblem,
    device: str | Device = "cpu",
    impl: str = AUTO,
    precision: str = "ieee",
    workspace_limit: int | None = None,
) -> Plan:
    """Which implementation computes each pass of a problem on a device, and why.

    Args:
        problem: the configuration.
        device: "cpu", an architecture such as "sm_80", or a Device.
        impl: "auto", or the name of the one implementation to use.
        precision: "tf32" permits that float32 operands are rounded to TF32, "bf16x6" that they are
            multiplied as planes of bfloat16; "ieee" permits neither.
        workspace_limit: bytes of device memory that a pass may use beside its tensors; None is any
            number.

    Raises:
        ConvError: the implementation is unknown, not for this device, or cannot take the problem;
            or an argument is none of these.
    """
    chosen = Device.of(device)
    passes = tuple(
        plan_pass(problem, pass_, chosen, impl, precision, workspace_limit) for pass_ in PASSES
    )
    return Plan(problem, chosen, passes)


@lru_cache(maxsize=4096, typed=True)
def plan_pass(
    problem: ConvProblem,
    pass_: str,
    device: Device,
    impl: str = AUTO,
    precision: str = "ieee",
    workspace_limit: int | None = None,
    strides: Strides | None = None,
) -> PassPlan:
    """One pass of ``plan``, for an implementation that need not have the others.

    Strides are those of the tensors at hand; without, contiguous ones are planned for.
    """
    request = Request(problem, pass_, device, precision, workspace_limit, strides)
    best, note = _ranked(request, impl)[0], ""
    if workspace_limit is not None:
        free = _ranked(replace(request, workspace_limit=None), impl)[0]
        if free != best:
            note = (
                f" ({free.microseconds:.3g} us by {free.family.name} with {free.workspace_bytes} "
                f"bytes of workspace, but the limit is {workspace_limit})"
            )
    return _pass_plan(request, best, note)


def contenders(request: Request, impl: str, count: int) -> tuple[PassPlan, ...]:
    """The most promising ways to compute a pass on a GPU, for measuring; the planned one first.

    The best of each family, with operands copied first and without, is among them if ``count``
    permits, however low its estimate ranks.

    Raises:
        ConvError: as for ``plan``.
    """
    ranked = _ranked(request, impl)
    best = {(one.family.name, bool(one.method)): one for one in reversed(ranked)}.values()
    chosen = sorted(ranked, key=lambda candidate: candidate not in best)[:count]
    return tuple(_pass_plan(request, candidate) for candidate in sorted(chosen, key=ranked.index))


def _ranked(request: Request, impl: str) -> list[Candidate]:
    """All ways to compute a pass, by estimated time, and by that of computing where it is equal."""
    request = request.reduced
    candidates = [
        candidate for family in _families(request, impl) for candidate in family.candidates(request)
    ]
    return sorted(candidates, key=lambda one: (one.microseconds, one.computing))


def _pass_plan(request: Request, chosen: Candidate, note: str = "") -> PassPlan:
    return PassPlan(
        request.pass_,
        chosen.family.name,
        chosen.family.reason(chosen, note),
        chosen.tile,
        chosen.blocks,
        chosen.splits,
        chosen.workspace_bytes,
        request.precision,
        chosen.method,
    )


def _families(request: Request, impl: str) -> list[Family]:
    """Those that take what is asked for."""
    device = request.device
    if impl == AUTO:
        refusals = {family: family.refuses(request) for family in _on(device).values()}
        taking = [family for family, refusal in refusals.items() if refusal is None]
        if not taking:
            raise ConvError(
                "the problem must fit an implementation",
                str(refusals[FAMILIES["cuda-generic"]]),
                "Compute it in parts, or with less padding",
            )
        return taking
    family = _named(impl, device)
    refusal = family.refuses(request)
    if refusal is not None:
        _families(request, AUTO)  # which says what else there is to do, where none takes it
        raise ConvError("the implementation must fit the problem", refusal, "Use impl='auto'")
    return [family]


@cache
def _on(device: Device) -> dict[str, Family]:
    return {name: family for name, family in FAMILIES.items() if family.on_gpu == device.is_gpu}


def _named(impl: str, device: Device) -> Family:
    here = _on(device)
    if impl in here:
        return here[impl]
    if impl not in FAMILIES:
        raise unknown_word("impl", impl, (AUTO, *here))
    other = "the CPU, with NumPy arrays" if device.is_gpu else "a GPU, with CuPy arrays"
    raise ConvError(
        "the implementation must run on the device that is computed on",
        f"{impl!r} does not run on {device.name}",
        f"Use one of {', '.join(map(repr, (AUTO, *here)))}, or {other}",
    )


def _require_sound(device: Device, passes: tuple[PassPlan, ...]) -> None:
    """Check the ranges of what was read; its types are those that it should have.

    Raises:
        ValueError: one is not what it can be.
    """
    if device.architecture != Device.of(device.architecture or "cpu").architecture:
        raise ValueError(f"no such architecture: {shown(device.architecture)}")
    if device.multiprocessors is not None and not 0 < device.multiprocessors < 2**31:
        raise ValueError(f"no such number of multiprocessors: {device.multiprocessors}")
    for planned in passes:
        counts = (planned.blocks, planned.splits - 1, planned.workspace_bytes)
        if min(counts) < 0:
            raise ValueError(f"no such counts: {planned}")
    for text in (device.name, *(planned.reason for planned in passes)):
        if not text.isprintable() or not text.strip():
            raise ValueError(f"no name and no reason: {shown(text)}")


def _require_possible(problem: ConvProblem, device: Device, planned: PassPlan) -> None:
    """Check what was read: a kernel with other sizes than its tile's would compute nonsense."""
    request = Request(problem, planned.pass_, device, planned.precision).reduced
    family = _named(planned.implementation, device)
    wrong = family.refuses(request)
    if wrong is None:
        known = family.candidate(request, planned.tile, planned.splits, planned.method)
        counts = (planned.blocks, planned.workspace_bytes)
        if known is None or (known.blocks, known.workspace_bytes) != counts:
            wrong = f"{family.name} does not compute {planned.pass_} in this way"
    if wrong is not None:
        raise ConvError(
            "a plan must be one that can be carried out here",
            wrong,
            "Plan again, with cupyconv.plan(problem, device)",
        )


def _same(one: ConvProblem, other: ConvProblem) -> bool:
    """Whether two problems are equal, however their padding is spelled."""
    return one == other or one.replace(padding=one.padding) == other.replace(padding=other.padding)


def _blocks_text(planned: PassPlan) -> str:
    if not planned.tile:
        return f"{planned.splits} chunks" if planned.splits > 1 else ""
    return f"{planned.blocks}" + (f" x {planned.splits}" if planned.splits > 1 else "")
