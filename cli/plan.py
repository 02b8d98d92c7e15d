"""`cupyconv plan`: which kernel computes each pass, and whether its time is measured."""

from __future__ import annotations

import json
from typing import Any

import click

import cupyconv
from cupyconv.cli import configuration, output, shapes
from cupyconv.planning import Plan


@click.command()
@configuration.configuration_options
@configuration.dtype_option
@configuration.devices_option(
    "cpu, or a GPU by its architecture, such as sm_90a.  Repeatable.  "
    "[default: the GPU that is here, else cpu]"
)
@configuration.precision_option
@configuration.impl_option
@click.option(
    "--measure",
    is_flag=True,
    help="Time the most promising kernels on the GPU that is here, and take the fastest.",
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
    """Which kernel computes each pass, and why.

    \b
    cupyconv plan --preset multi-channel --device sm_90a
    cupyconv plan --input 8x64x56x56 --filter 64x64x3x3 --padding same --device sm_80 --device cpu
    cupyconv plan --model net.onnx --dtype float16 --device sm_89

    What a call of the layer would run on contiguous tensors, with its tile, and the time that is
    expected of it: which is modelled unless --measure is given.  Needs no data, and a GPU only for
    --measure.
    """
    found = []
    notes: list[str] = []
    for layer in configuration.read_layers(options, notes):
        problem = layer.problem()
        plans = [
            cupyconv.plan(problem, device, impl, precision, measure=measure)
            for device in devices or (None,)
        ]
        found.append((layer, problem, plans))
    if as_json:
        content = [
            {**configuration.as_json(layer, problem), "plans": list(map(_as_json, plans))}
            for layer, problem, plans in found
        ]
        output.write_json({"layers": content, "left_out": notes})
        return
    parts: list[Any] = []
    for layer, problem, plans in found:
        parts.append(shapes.title(layer, problem))
        for one in plans:
            parts += [output.heading(f"on {one.place}"), one.table, one.origin.text]
    output.draw(*parts, *configuration.left_out(notes))


def _as_json(plan: Plan) -> dict[str, Any]:
    """What ``Plan.from_json`` reads, and what the plan says of its times."""
    return {**json.loads(plan.to_json()), "times": plan.origin.text}
