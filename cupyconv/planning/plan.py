"""Plans of a problem on a device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, TypeVar

from cupyconv import records
from cupyconv.errors import ConvError, require_word, shown, unknown_word
from cupyconv.kernels import calibration
from cupyconv.kernels.cost import duration
from cupyconv.kernels.device import CPU, Device, card_named
from cupyconv.kernels.family import Candidate, Choices, Family
from cupyconv.kernels.request import Impl, Implementation, Request
from cupyconv.planning.families import FAMILIES, is_kernel
from cupyconv.problem import PASSES, ConvProblem, bytes_text, counted

if TYPE_CHECKING:
    from cupyconv import markup

AUTO: Impl = "auto"

FAR = 10
"""Largest ratio of an estimate to the shortest estimate, for plans to autotune first (hand-set)."""

SLOWER = 1.3
"""Largest ratio of estimates at which a plan with less workspace is preferred to a plan whose
workspace is larger than the tensors (chosen)."""

FORMAT = 3
"""Version of a plan's JSON; version 1 had no field "format", version 2 no views and no copies."""


@dataclass(frozen=True)
class PassPlan(Choices):
    """Plan of one pass: an implementation, its choices, and the reason for them.

    Attributes:
        pass_: "forward", "backprop_input" or "backprop_filter".
        implementation: name of the implementation, a value of ``impl``.
        reason: reason for the choice.
        precision: permitted precision: "ieee", "tf32" or "bf16x6".
        microseconds: time of the pass: measured if ``reason`` says so, else estimated; None for
            "reference", which has no estimate.
    """

    pass_: str
    implementation: Implementation
    reason: str
    precision: str = "ieee"
    microseconds: float | None = None

    @property
    def family(self) -> Family:
        return FAMILIES[self.implementation]

    @property
    def kernel(self) -> str:
        """Name of the implementation, and on the CPU its method."""
        return f"{self.implementation} {self.method}".rstrip()


@dataclass(frozen=True)
class Plan:
    """Plans of the three passes of a problem on a device.

    A plan prints as a table and is indexed by pass.

    >>> problem = cupyconv.ConvProblem((8, 32, 56, 56), (64, 32, 3, 3))
    >>> plan = cupyconv.plan(problem, "sm_80", impl="cuda-generic")
    >>> plan.place, plan["forward"].kernel
    ('sm_80', 'cuda-generic')
    >>> [planned.pass_ for planned in plan]
    ['forward', 'backprop_input', 'backprop_filter']
    """

    problem: ConvProblem
    device: Device
    passes: tuple[PassPlan, ...]

    def __hash__(self) -> int:
        # Every call hashes its plan, so the passes are left out to save time.
        return hash((self.problem, self.device))

    def __getitem__(self, pass_: str) -> PassPlan:
        require_word("pass", pass_, PASSES)
        return next(plan for plan in self.passes if plan.pass_ == pass_)

    def __iter__(self) -> Iterator[PassPlan]:
        return iter(self.passes)

    def __str__(self) -> str:
        from cupyconv import markup  # imported when a plan is shown

        lines = [*self.table.lines(markup.UNBOUND), "", *self.origin.lines(markup.UNBOUND)]
        return "\n".join([str(self.problem), f"on {self.place}", *lines])

    def _repr_html_(self) -> str:
        """Return the passes as a table, for Jupyter."""
        from cupyconv import markup

        blocks = (markup.Paragraph(repr(self.problem)), self.table, self.origin)
        return markup.Document(f"Plan on {self.place}", (markup.Section("", blocks),)).html()

    @property
    def place(self) -> str:
        """Name and architecture of the device, and the compiler's target if that is different."""
        from cupyconv import markup

        architecture, name = self.device.architecture or "", markup.in_line(self.device.name)
        if architecture.removesuffix("a") == name.removesuffix("a"):
            name = ""
        target = f"(kernels for {self.device.fallback})" if self.device.fallback else ""
        return " ".join(filter(None, (name, architecture, target)))

    @property
    def table(self) -> markup.Table:
        """Table with a row per pass."""
        from cupyconv import markup

        rows = tuple(
            (p.pass_, p.implementation, _tile_text(p), _blocks_text(p), p.reason)
            for p in self.passes
        )
        return markup.Table(("pass", "implementation", "tile", "blocks", "reason"), rows)

    @property
    def origin(self) -> markup.Paragraph:
        """Origin of the times, and the compiler's target if it differs from the architecture."""
        from cupyconv import markup

        measured = sum(p.reason.startswith("measured") for p in self.passes)
        other = ""
        if self.device.card is not None:
            name = card_named(self.device.name)
            other = f" from the {name}'s data sheet" if name else " from the card's figures"
        elif self.device.is_gpu and self.device.nominal != self.device.capability:
            other = ", for the chip of compute capability {}.{}".format(*self.device.nominal)
        scaled = "; nothing was measured"
        if self.device.is_gpu:
            first = self.passes[0]
            request = Request(self.problem, first.pass_, self.device, first.precision)
            gpu, is_like = calibration.measured_gpu(request)
            scaled = f" and scaled by the times of other layers on an {gpu}"
            if not is_like:
                scaled = f"; kernel families compare as on an {gpu}, and nothing else was measured"
        sentences = {
            0: f"Estimates are modelled{other}{scaled}.",
            len(self.passes): "Times are measured, on a GPU like this one.",
        }
        times = sentences.get(measured, "Times are measured if the reason says so, else modelled.")
        if self.device.fallback:
            times += (
                f" Kernels are compiled for {self.device.fallback}, as the installed NVRTC has no "
                f"target {self.device.architecture}."
            )
        return markup.Paragraph(times)

    def to_json(self) -> str:
        """Return the plan as JSON, which ``from_json`` reads.

        >>> plan = cupyconv.plan(cupyconv.ConvProblem((8, 32, 56), (64, 32, 3)), "sm_80")
        >>> plan.to_json()[:13]
        '{"format": 3,'
        """
        problem = {
            "input_shape": self.problem.input_shape,
            "filter_shape": self.problem.filter_shape,
            **self.problem.keywords,
            "dtype": self.problem.dtype,
        }
        passes = [asdict(pass_plan) for pass_plan in self.passes]
        device = asdict(self.device)
        return json.dumps(
            {"format": FORMAT, "problem": problem, "device": device, "passes": passes}
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan that ``to_json`` wrote.

        Raises:
            ConvError: the text is not the JSON of a plan, or this version cannot run the plan.

        >>> plan = cupyconv.plan(cupyconv.ConvProblem((8, 32, 56), (64, 32, 3)), "sm_80")
        >>> cupyconv.Plan.from_json(plan.to_json()) == plan
        True
        """
        try:
            entries: dict[str, Any] = records.parse_json(text)
            if entries.get("format") != FORMAT:
                raise ValueError(f"its format is {shown(entries.get('format'))}, not {FORMAT}")
            problem = ConvProblem(**entries["problem"])
            device = records.record(Device, entries["device"])
            passes = tuple(map(_pass_plan_of_json, entries["passes"]))
            _require_sound(device, passes)
            if tuple(pass_plan.pass_ for pass_plan in passes) != PASSES:
                raise ValueError(f"its passes must be {', '.join(PASSES)}")
            for pass_plan in passes:
                _require_possible(problem, device, pass_plan)
        except ConvError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ConvError(
                "a plan must be JSON from Plan.to_json",
                f"{type(error).__name__}: {error}",
                "Plan again, with cupyconv.plan(problem, device)",
            ) from None
        return Plan(problem, device, passes)

    def with_choices(self, pass_: str, **choices: Any) -> Plan:
        """Return the plan with other choices for one pass, such as its tile, tiling or splits.

        Args:
            pass_: "forward", "backprop_input" or "backprop_filter".
            choices: attributes of ``Choices`` by name.  The workspace is computed from the other
                choices, and so are the blocks, except those of a ``tiling``.

        Raises:
            ConvError: a choice is unknown or has a wrong type, or the kernel family does not
                support these choices for the problem.

        >>> plan = cupyconv.plan(cupyconv.ConvProblem((8, 32, 56, 56), (64, 32, 3, 3)), "sm_80")
        >>> plan.with_choices("backprop_filter", splits=3)["backprop_filter"].splits
        3
        """
        planned = self[pass_]
        request = Request(self.problem, pass_, self.device, planned.precision).reduced
        try:
            given = vars(choices_of_json(Choices, choices, planned.implementation))
        except ValueError as error:
            raise ConvError("a plan must have valid choices", str(error), "") from None
        chosen = {name: given[name] for name in choices}
        candidate = planned.family.candidate(request, replace(planned, **{"blocks": 0, **chosen}))
        if candidate is None or not chosen.items() <= vars(candidate).items():
            text = ", ".join(f"{name} = {value}" for name, value in choices.items())
            raise ConvError(
                "the kernel family must support the choices of a plan",
                f"{planned.implementation} does not compute {pass_} of {self.problem} with {text}",
                "",
            )
        passes = (
            plan_of(request, candidate) if pass_plan is planned else pass_plan
            for pass_plan in self.passes
        )
        return replace(self, passes=tuple(passes))

    def replay(self, request: Request) -> PassPlan:
        """Return the plan of a pass, after checking that it fits a request.

        Raises:
            ConvError: the request has another problem, architecture or memory layout, or does not
                permit the plan's precision or workspace.
        """
        planned, reduced = self[request.pass_], request.reduced
        where = f"{request.device.name} ({request.device.architecture or 'NumPy arrays'})"
        conflict, way_out = "", "Plan again, with cupyconv.plan(problem, device)"
        if not _same(self.problem, request.problem):
            conflict = f"the plan is for {self.problem}, the call is {request.problem}"
        elif self.device.architecture != request.device.architecture:
            conflict = f"the plan is for {self.device.name}, the arrays are on {where}"
        elif planned.precision not in ("ieee", request.precision):
            conflict = (
                f"the plan has precision {planned.precision!r}, the call has {request.precision!r}"
            )
            way_out = f"Pass precision={planned.precision!r}"
        elif not request.affords(planned.workspace_bytes):
            conflict = (
                f"the plan needs {planned.workspace_bytes} bytes of workspace, the limit is "
                f"{request.workspace_limit}"
            )
        elif (refusal := planned.family.refuses(reduced)) is not None:
            conflict = refusal
        elif (
            candidate := planned.family.candidate(reduced, planned)
        ) is None and not reduced.device.is_gpu:
            conflict = f"{planned.implementation} cannot use method {planned.method!r} here"
            if planned.method == "loops":
                conflict += ": Numba, which compiles the loops, cannot be used"
        elif candidate is None or candidate.workspace_bytes != planned.workspace_bytes:
            conflict = "the tensors have other strides or another alignment than the plan needs"
            way_out = "Pass tensors that are contiguous in the problem's formats"
        if conflict:
            raise ConvError("a plan must fit the call", conflict, way_out)
        return planned


def plan(
    problem: ConvProblem,
    device: str | Device = "cpu",
    impl: str = AUTO,
    precision: str = "ieee",
    workspace_limit: int | None = None,
) -> Plan:
    """Choose an implementation for each pass of a problem on a device.

    Args:
        problem: the configuration.
        device: "cpu", an architecture such as "sm_80", or a Device.
        impl: "auto", or the name of the implementation to use.
        precision: "tf32" permits rounding float32 operands to TF32, "bf16x6" permits multiplying
            them as sums of bfloat16 values; "ieee" permits neither.
        workspace_limit: largest number of bytes of device memory that a pass may use besides its
            tensors; None for no limit.

    Raises:
        ConvError: an argument is invalid, or the implementation is unknown, is not for this device,
            or does not support the problem.
    """
    chosen = Device.of(device)
    requests = (Request(problem, name, chosen, precision, workspace_limit) for name in PASSES)
    return Plan(problem, chosen, tuple(plan_pass(request, impl) for request in requests))


def largest_workspaces(plans: Iterable[Sequence[Plan]]) -> list[str]:
    """Return a line with the largest workspace of a pass on each GPU; no line if none needs one.

    Args:
        plans: plans of each layer, one per device.
    """
    texts = []
    for of_device in zip(*plans, strict=True):
        most = max(planned.workspace_bytes for each in of_device for planned in each)
        if most:
            texts.append(f"{bytes_text(most)} on {of_device[0].device.name}")
    return [f"largest workspace of a pass: {', '.join(texts)}"] if texts else []


def workspace_notes(plans: Iterable[tuple[str, Plan]]) -> list[str]:
    """Return a note on the passes whose workspace is larger than x, w and y together, if any.

    Args:
        plans: plans with the names of their layers; "" for a layer without a name.
    """
    large = [
        (planned.workspace_bytes, f"{name} {planned.pass_}".strip(), plan)
        for name, plan in plans
        for planned in plan
        if planned.workspace_bytes > plan.problem.bytes
    ]
    if not large:
        return []
    size, name, plan = max(large, key=lambda entry: entry[0])
    others = counted(len(large) - 1, "other pass", "other passes")
    also = f"; {others} also {'need' if len(large) > 2 else 'needs'} more" if large[1:] else ""
    return [
        f"{name} needs {bytes_text(size)} of workspace on {plan.place}, more than x, w and y "
        f"together ({bytes_text(plan.problem.bytes)}){also}. Set cupyconv.workspace_limit to the "
        "number of bytes that a pass may use"
    ]


@lru_cache(maxsize=4096)
def plan_pass(request: Request, impl: str = AUTO) -> PassPlan:
    """Choose an implementation for one pass, as ``plan`` does."""
    candidates, limit = ranked_candidates(request, impl), request.workspace_limit
    best, note = candidates[0], ""
    fastest = min(candidates[:2], key=lambda c: c.microseconds)
    if fastest is not best:
        note = (
            f" ({duration(fastest.microseconds)} by {fastest.family.name} with "
            f"{fastest.workspace_bytes} bytes of workspace, more than the tensors)"
        )
    if limit is not None:
        free = ranked_candidates(replace(request, workspace_limit=None), impl)[0]
        if free != best:
            note = (
                f" ({duration(free.microseconds)} by {free.family.name} with "
                f"{free.workspace_bytes} bytes of workspace, but the limit is {limit})"
            )
    return plan_of(request, best, note)


def contenders(request: Request, impl: str, count: int) -> tuple[PassPlan, ...]:
    """Return at most ``count`` plans of a pass to measure on a GPU, the planner's choice first.

    Each family contributes its best plan with a view, copies or divided frames, and its best other
    plan, if their estimates are at most FAR times the shortest estimate.  Further plans, in the
    order of their estimates, are added until there are ``count`` plans.

    Raises:
        ConvError: as for ``plan``.
    """
    candidates = ranked_candidates(request, impl)
    alternatives = [
        candidate
        for family in dict.fromkeys(c.family for c in candidates)
        for candidate in family.alternatives(request.reduced, count - 1)
    ]
    candidates[1:] = sorted([*candidates[1:], *alternatives], key=lambda c: c.microseconds)
    least = min(candidate.microseconds for candidate in candidates[:2])
    near = [c for c in candidates if c.microseconds <= FAR * least]
    plain = ("tile", "tiling", "splits")
    best = {(c.family.name, c.has_only(*plain)): c for c in reversed(near)}.values()
    chosen = sorted(candidates, key=lambda c: c not in best)[:count]
    return tuple(plan_of(request, c) for c in sorted(chosen, key=candidates.index))


def ranked_candidates(request: Request, impl: str) -> list[Candidate]:
    """Return all candidates of a pass, the planner's choice first, then by estimated time.

    The choice is the fastest candidate, unless its workspace is larger than the tensors.  Then it
    is the fastest candidate whose workspace is not larger than the tensors, if this candidate takes
    at most SLOWER times as long.
    """
    request = request.reduced
    candidates = [
        candidate for family in _families(request, impl) for candidate in family.candidates(request)
    ]
    candidates.sort(key=lambda c: c.microseconds)
    size, most = request.problem.bytes, SLOWER * candidates[0].microseconds
    small = next((c for c in candidates if c.workspace_bytes <= size), candidates[0])
    if small.microseconds <= most:
        candidates.sort(key=lambda c: c is not small)
    return candidates


def _estimated(request: Request, chosen: Candidate) -> Candidate:
    """Return the candidate with its time estimated for the device's card, if the card is known."""
    if request.device.card is None or request.figures is not None:
        return chosen
    own = replace(request, figures=request.device.figures).reduced
    priced = chosen.family.candidate(own, chosen)
    if priced is None:
        return chosen
    return replace(chosen, microseconds=priced.microseconds)


def plan_of(request: Request, chosen: Candidate, note: str = "") -> PassPlan:
    chosen = _estimated(request, chosen)
    choices = {field.name: getattr(chosen, field.name) for field in fields(Choices)}
    reason = chosen.family.reason(chosen, note)
    time = chosen.microseconds if isfinite(chosen.microseconds) else None
    return PassPlan(
        request.pass_, chosen.family.name, reason, request.precision, microseconds=time, **choices
    )


AnyChoices = TypeVar("AnyChoices", bound=Choices)


def choices_of_json(kind: type[AnyChoices], entry: Any, implementation: str) -> AnyChoices:
    """Return choices of an implementation from JSON; a tiling gets the class of its family.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    choices = records.record(kind, entry)
    if choices.tiling is None:
        return choices
    family = FAMILIES.get(implementation)
    if family is None or family.tiling is None:
        raise ValueError(f"{shown(implementation)} has no tilings")
    return replace(choices, tiling=records.record(family.tiling, choices.tiling))


def _pass_plan_of_json(entry: Any) -> PassPlan:
    return choices_of_json(PassPlan, entry, records.record(PassPlan, entry).implementation)


def _families(request: Request, impl: str) -> list[Family]:
    """Return the implementations that support a request.

    Raises:
        ConvError: no implementation supports the request.
    """
    device = request.device
    if impl == AUTO:
        refusals = {family: family.refuses(request) for family in _on(device).values()}
        taking = [family for family, refusal in refusals.items() if refusal is None]
        if not taking:
            raise ConvError(
                "at least one implementation must support the problem",
                str(refusals[FAMILIES["cuda-generic"]]),
                "Compute the layer in parts, or with less padding",
            )
        return taking
    family = _named(impl, device)
    refusal = family.refuses(request)
    if refusal is not None:
        _families(request, AUTO)  # raises a better error if no implementation supports the problem
        raise ConvError("the implementation must support the problem", refusal, "Use impl='auto'")
    return [family]


@cache
def _on(device: Device) -> dict[str, Family]:
    return {name: FAMILIES[name] for name in implementations(device.is_gpu)[1:]}


def implementations(on_gpu: bool) -> tuple[str, ...]:
    """Return the values of ``impl`` for a GPU, or for the CPU."""
    return (AUTO, *(name for name in FAMILIES if is_kernel(name) == on_gpu))


def _named(impl: str, device: Device) -> Family:
    here = _on(device)
    if impl in here:
        return here[impl]
    if impl not in FAMILIES:
        raise unknown_word("impl", impl, (AUTO, *here))
    other = "the CPU, with NumPy arrays" if device.is_gpu else "a GPU, with CuPy arrays"
    raise ConvError(
        "the implementation must run on the device",
        f"{impl!r} does not run on {device.name}",
        f"Use one of {', '.join(map(repr, (AUTO, *here)))}, or {other}",
    )


def _require_sound(device: Device, passes: tuple[PassPlan, ...]) -> None:
    """Check the ranges of a plan's fields, whose types have been checked.

    Raises:
        ValueError: a field is out of range.
    """
    chip = Device.of_capability(device.name, device.capability) if device.is_gpu else CPU
    if device.architecture != chip.architecture:
        raise ValueError(f"unknown architecture: {shown(device.architecture)}")
    if device.fallback is not None:
        possible = chip.compiled_by([device.instructions])
        if possible is None or device.fallback != possible.fallback:
            raise ValueError(f"{device.architecture} cannot run code for {shown(device.fallback)}")
    if device.multiprocessors is not None and not 0 < device.multiprocessors < 2**31:
        raise ValueError(f"invalid number of multiprocessors: {device.multiprocessors}")
    for planned in passes:
        counts = (planned.blocks, planned.splits - 1, planned.workspace_bytes)
        if min(counts) < 0:
            raise ValueError(f"invalid blocks, splits or workspace: {planned}")
        if planned.microseconds is not None and not 0 <= planned.microseconds < inf:
            raise ValueError(f"invalid time: {planned.microseconds} us")
    for text in (device.name, *(planned.reason for planned in passes)):
        if not text.isprintable() or not text.strip():
            raise ValueError(f"invalid name or reason: {shown(text)}")


def _require_possible(problem: ConvProblem, device: Device, planned: PassPlan) -> None:
    """Check that a plan from JSON is supported, and that its blocks and workspace fit its choices.

    Raises:
        ConvError: this version cannot run the plan.
    """
    request = Request(problem, planned.pass_, device, planned.precision).reduced
    family = _named(planned.implementation, device)
    conflict = family.refuses(request)
    if conflict is None:
        known = family.candidate(request, planned)
        counts = (planned.blocks, planned.workspace_bytes)
        if known is None or (known.blocks, known.workspace_bytes) != counts:
            conflict = f"{family.name} does not compute {planned.pass_} with these choices"
    if conflict is not None:
        raise ConvError(
            "the plan must be one that this version of cupyconv supports",
            conflict,
            "Plan again, with cupyconv.plan(problem, device)",
        )


def _same(one: ConvProblem, other: ConvProblem) -> bool:
    """Return whether two problems are equal; padding "same" equals the same padding in numbers."""
    return one == other or one.replace(padding=one.padding) == other.replace(padding=other.padding)


def _tile_text(planned: PassPlan) -> str:
    """Return a plan's block tile, or the names and values of its tiling, as text."""
    if planned.tiling is None:
        return str(planned.tile or "")
    return ", ".join(f"{name} {value}" for name, value in asdict(planned.tiling).items())


def _blocks_text(planned: PassPlan) -> str:
    if planned.splits > 1 and not planned.blocks:
        return f"{planned.splits} chunks"
    splits = f" x {planned.splits}" if planned.splits > 1 else ""
    return f"{planned.blocks}{splits}" if planned.blocks else ""
