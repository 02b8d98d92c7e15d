"""`cupyconv plan`: show which kernel computes each pass, how fast, and what limits its speed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

import cupyconv
from cupyconv import ConvProblem
from cupyconv.cli import configuration, output, shapes
from cupyconv.cli.configuration import Layer
from cupyconv.kernels.cost import duration
from cupyconv.markup import Table, in_line
from cupyconv.planning import PassPlan, Plan
from cupyconv.planning.estimates import Estimate, estimate, instead
from cupyconv.planning.plan import workspace_notes
from cupyconv.problem import PASSES, bytes_text

MOST_IN_FULL = 4
"""Largest number of layers that are shown in full; more layers get one line each (hand-set)."""

SLOWEST = 10
"""Number of slowest layers whose times are compared with other settings (hand-set)."""


@dataclass(frozen=True)
class LayerPlan:
    """A layer with its plan for a device, and the estimates that are shown with each pass."""

    layer: Layer
    plan: Plan

    @property
    def problem(self) -> ConvProblem:
        return self.plan.problem

    @property
    def microseconds(self) -> float:
        """Total time of the three passes, in microseconds."""
        return sum(planned.microseconds or 0.0 for planned in self.plan)

    @property
    def estimates(self) -> list[Estimate]:
        return [estimate(self.plan, pass_) for pass_ in PASSES]

    @property
    def instead(self) -> dict[str, Mapping[str, PassPlan]]:
        """Plans with other settings, such as another precision, by pass and name of the setting."""
        precision = self.plan["forward"].precision
        device = self.plan.device
        return {pass_: instead(self.problem, pass_, device, precision) for pass_ in PASSES}


@click.command()
@configuration.configuration_options
@configuration.dtype_option
@configuration.devices_option(
    "Plan for cpu, or for a GPU: an architecture or a card, such as sm_90a or 'RTX 4090'.  "
    "Repeatable.  "
    "[default: the current GPU, else cpu]"
)
@configuration.precision_option()
@configuration.impl_option
@click.option(
    "--measure",
    is_flag=True,
    help="Time the most promising kernels on the current GPU and choose the fastest.",
)
@output.json_option
def command(
    devices: tuple[str, ...],
    precision: str,
    impl: str,
    measure: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the kernel of each pass, its speed and what limits it.

    \b
    cupyconv plan --preset multi-channel --device "RTX 4090"
    cupyconv plan --input 8x64x56x56 --filter 64x64x3x3 --padding same \\
      --device sm_80 --device cpu
    cupyconv plan --model net.onnx --dtype float16 --device sm_89

    The plan is for contiguous tensors.  Times are modelled unless --measure is given.  The roofline
    is the shortest possible time of a pass by the data sheet: the time of all arithmetic or the
    time to move each tensor once, whichever is longer.  The column "roofline" has this time as a
    percentage of the pass's time.  The command needs no data, and it needs a GPU only with
    --measure.
    """
    notes: list[str] = []
    layers = [(layer, layer.problem()) for layer in configuration.read_layers(options, notes)]
    by_device = [
        [
            LayerPlan(layer, cupyconv.plan(problem, device, impl, precision, measure=measure))
            for layer, problem in layers
        ]
        for device in devices or (None,)
    ]
    if as_json:
        content = [_layer_json(plans) for plans in zip(*by_device, strict=True)]
        totals = [_totals_json(plans) for plans in by_device]
        output.write_json({"layers": content, "totals": totals, "left_out": notes})
        return
    parts: list[Any] = []
    if len(layers) <= MOST_IN_FULL:
        for plans in zip(*by_device, strict=True):
            parts.append(shapes.title(plans[0].layer, plans[0].problem))
            if plans[0].layer.is_transposed:
                parts.append(configuration.TRANSPOSED_PASSES)
            for one in plans:
                parts += [output.heading(f"on {one.plan.place}"), *_in_full(one)]
    for plans in by_device if len(layers) > 1 else ():
        parts += [output.heading(f"on {plans[0].plan.place}"), *_overview(plans)]
    output.draw(*parts, *configuration.left_out(notes))


# -- text ------------------------------------------------------------------------------------------


def _in_full(entry: LayerPlan) -> list[Any]:
    """Return the tables of a layer on a device, and the reasons for the chosen kernels."""
    on_gpu = entry.plan.device.is_gpu
    headings = ("roofline", "bound by", "kernel", "blocks") if on_gpu else ("kernel",)
    rows = []
    for figures, row in zip(entry.estimates, entry.plan.table.rows, strict=True):
        _, _, tile, blocks, _ = row
        planned, rate = figures.planned, figures.teraflops
        kernel = f"{planned.kernel} {tile}".rstrip()
        share = "" if figures.share is None else f"{figures.share:.0%}"
        cells = (share, figures.bound, kernel, blocks) if on_gpu else (kernel,)
        speed = "" if rate is None else f"{rate:#.3g}"
        rows.append((planned.pass_, _time(planned), speed, *cells))
    reasons = [f"{planned.pass_}: {planned.reason}{_workspace(planned)}" for planned in entry.plan]
    return [
        output.table(("pass", "time", "TFLOP/s", *headings), rows, ("time", "TFLOP/s", "roofline")),
        _instead_table(entry),
        output.heading("", *reasons, *workspace_notes([("", entry.plan)])),
        entry.plan.origin.text,
    ]


def _instead_table(entry: LayerPlan) -> Table:
    """Return a table of each pass's time with the second-best kernel and with other settings."""
    others = entry.instead
    settings = list(dict.fromkeys(name for plans in others.values() for name in plans))
    rows = []
    for figures in entry.estimates:
        planned, runner_up = figures.planned, figures.runner_up
        runner = f"{_time(runner_up)} {runner_up.kernel}" if runner_up else "-"
        times = [_time(others[planned.pass_].get(name)) for name in settings]
        rows.append((planned.pass_, runner, *times))
    return Table(("other estimates", "runner-up", *settings), tuple(rows), tuple(settings))


def _overview(plans: Sequence[LayerPlan]) -> list[Any]:
    """Return the times of several layers on a device: each layer, the slowest, and totals."""
    total = sum(one.microseconds for one in plans)
    parts: list[Any] = []
    if len(plans) > MOST_IN_FULL:
        rows = []
        for one in plans:
            passes = _by_gradient(one)
            kernels = ", ".join(dict.fromkeys(planned.implementation for planned in passes))
            share = _share(one.microseconds, total)
            rows.append((_name(one), *map(_time, passes), share, kernels))
        numbers = ("y", "dx", "dw", "share")
        parts.append(output.table(("layer", *numbers, "kernels of y, dx, dw"), rows, numbers))
    notes = workspace_notes((_name(one), one.plan) for one in plans)
    parts += [_slowest_table(plans, total), _totals_table(plans), plans[0].plan.origin.text, *notes]
    return parts


def _slowest(plans: Sequence[LayerPlan]) -> list[LayerPlan]:
    return sorted(plans, key=lambda one: one.microseconds, reverse=True)[:SLOWEST]


def _slowest_table(plans: Sequence[LayerPlan], total: float) -> Any:
    """Return the slowest layers with what limits them, and the best other setting of each."""
    rows = []
    for one in _slowest(plans):
        estimates = one.estimates
        least = sum(figures.roofline.microseconds for figures in estimates if figures.roofline)
        bounds = dict.fromkeys(figures.bound for figures in estimates if figures.bound)
        row = (
            duration(one.microseconds),
            _share(one.microseconds, total),
            _share(least, one.microseconds) if least else "",
        )
        rows.append((_name(one), *row, ", ".join(bounds), _best_setting(one)))
    numbers = ("time", "share", "roofline")
    columns = ("slowest layers", *numbers, "bound by", "best other setting")
    return output.table(columns, rows, numbers)


def _best_setting(entry: LayerPlan) -> str:
    """Return the setting that shortens the three passes most, with the time; "" if none does."""
    totals = _setting_totals(entry)
    name = min(totals, key=totals.__getitem__, default=None)
    if name is None or totals[name] >= entry.microseconds:
        return ""
    return f"{name}: {duration(totals[name])}"


def _setting_totals(entry: LayerPlan) -> dict[str, float]:
    """Return the total µs of the three passes with each setting that all three support, by name."""
    plans = list(entry.instead.values())
    names = [name for name in plans[0] if all(name in one for one in plans)]
    return {name: sum(one[name].microseconds or 0.0 for one in plans) for name in names}


def _totals_table(plans: Sequence[LayerPlan]) -> Any:
    rows = []
    for entry in _totals(plans):
        time, flops = entry["microseconds"], entry["flops"]
        rate = f"{flops / time / 1e6:#.3g}" if time else ""
        rows.append((entry["gives"], duration(time), output.scaled(flops, ""), rate))
    numbers = ("time", "FLOP", "TFLOP/s")
    return output.table((f"{len(plans)} layers", *numbers), rows, numbers)


def _totals(plans: Sequence[LayerPlan]) -> list[dict[str, Any]]:
    """Return the total time and FLOP of all y, of all dx, of all dw, and of all three."""
    flops = sum(one.problem.flops for one in plans)
    times = {
        gives: sum(planned.microseconds or 0.0 for planned in passes)
        for gives, *passes in zip(("y", "dx", "dw"), *map(_by_gradient, plans), strict=True)
    }
    entries = [
        {"gives": gives, "microseconds": time, "flops": flops} for gives, time in times.items()
    ]
    every = {"gives": "y, dx and dw", "microseconds": sum(times.values()), "flops": 3 * flops}
    return [*entries, every]


def _by_gradient(entry: LayerPlan) -> tuple[PassPlan, PassPlan, PassPlan]:
    """Return the plans that compute y, dx and dw; transposed layers swap the first two."""
    forward, backprop_input, backprop_filter = entry.plan
    if entry.layer.is_transposed:
        forward, backprop_input = backprop_input, forward
    return forward, backprop_input, backprop_filter


def _workspace(planned: PassPlan) -> str:
    size = planned.workspace_bytes
    return f"; workspace {bytes_text(size)}" if size else ""


def _name(entry: LayerPlan) -> str:
    return in_line(entry.layer.name or str(entry.problem))


def _time(planned: PassPlan | None) -> str:
    if planned is None:
        return "-"
    return "" if planned.microseconds is None else duration(planned.microseconds)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


# -- JSON ------------------------------------------------------------------------------------------


def _layer_json(plans: Sequence[LayerPlan]) -> dict[str, Any]:
    return {
        **configuration.as_json(plans[0].layer, plans[0].problem),
        "plans": [_plan_json(one) for one in plans],
    }


def _plan_json(entry: LayerPlan) -> dict[str, Any]:
    """Return JSON for ``Plan.from_json``, extended by the estimates and the origin of the times."""
    others = entry.instead
    figures = [
        {
            "pass": one.planned.pass_,
            "microseconds": one.planned.microseconds,
            "teraflops": one.teraflops,
            "roofline_microseconds": one.roofline and one.roofline.microseconds,
            "roofline_share": one.share,
            "bound_by": one.bound or None,
            "workspace_bytes": one.planned.workspace_bytes,
            "runner_up": one.runner_up and shapes.choice_json(one.runner_up, "microseconds"),
            "instead": {
                name: shapes.choice_json(planned, "microseconds")
                for name, planned in others[one.planned.pass_].items()
            },
        }
        for one in entry.estimates
    ]
    origin = entry.plan.origin.text
    return {**json.loads(entry.plan.to_json()), "times": origin, "estimates": figures}


def _totals_json(plans: Sequence[LayerPlan]) -> dict[str, Any]:
    return {
        "device": plans[0].plan.device.name,
        "tensors": _totals(plans),
        "slowest": [
            {
                "name": one.layer.name,
                "microseconds": one.microseconds,
                "instead": _setting_totals(one),
            }
            for one in _slowest(plans)
        ],
    }
