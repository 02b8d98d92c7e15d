"""`cupyconv shapes`: print the shapes, cost and implementations of a layer, without data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import click

from cupyconv import ConvError, ConvProblem
from cupyconv.cli import backwards, configuration, output
from cupyconv.cli.configuration import Layer
from cupyconv.explaining import receptive, transposed
from cupyconv.explaining.receptive import Field
from cupyconv.explaining.shapes import Reason, axis_dict, axis_reasons, one, reasons
from cupyconv.explaining.terms import counted_large
from cupyconv.planning import PassPlan, Plan, plan
from cupyconv.planning.plan import largest_workspaces
from cupyconv.problem import PASSES, RESULT, GemmView, bytes_text, shape_text

_MOST_BESIDE = 2
"""Largest number of devices that get a column each; more devices get a line each (hand-set)."""

TRANSPOSED_GRADIENTS = {"forward": "dx", "backprop_input": "y", "backprop_filter": "dw"}
"""Tensor of a transposed layer that each pass of the convolution computes."""


@click.command()
@configuration.configuration_options
@configuration.dtype_option
@configuration.devices_option(
    "Show what would run on this device: cpu, an architecture or a card.  Repeatable.",
    default=("cpu", "sm_80"),
)
@click.option(
    "--dy",
    metavar="SHAPE",
    help="List the input sizes that give an output of this shape; if --input is given, check that "
    "it is among them.",
)
@click.option(
    "--sweep",
    metavar="NAME=FIRST:LAST",
    help="Sweep input, filter, stride, dilation or padding on all spatial axes; one line per "
    "value.  FIRST:LAST:STEP is accepted too.",
)
@output.json_option
def command(
    devices: tuple[str, ...], dy: str | None, sweep: str | None, as_json: bool, **options: Any
) -> None:
    """Show shapes and cost of a layer and its gradients.

    \b
    cupyconv shapes --preset same-stride
    cupyconv shapes --dy 1x3x3x4 --filter 3x3x3x4 --stride 2 \\
      --padding same --data-format NHWC
    cupyconv shapes --filter 1x1x3 --stride 2 --padding same --sweep input=3:10

    The command needs no data and no GPU.
    """
    notes: list[str] = []
    layers = configuration.read_layers(options, notes)
    if dy is not None and sweep is not None:
        raise ConvError("--dy and --sweep cannot be combined", "got both", "Give one of them")
    transposed_layers = [layer for layer in layers if layer.is_transposed]
    if transposed_layers and sweep:
        raise ConvError(
            "--sweep must be used only for ordinary convolutions",
            "the layer is transposed",
            "Leave it out",
        )
    if dy is not None:
        shape = configuration.read_shape("--dy", dy)
        if options.get("input"):
            for layer in layers:
                layer.require_output(shape)
        if not transposed_layers:
            _backwards(layers, shape, options, as_json)
            return
        if len(transposed_layers) < len(layers):
            raise ConvError(
                "--dy must be used with layers of one kind",
                f"{len(transposed_layers)} of {len(layers)} layers are transposed",
                "Choose one with --layer NAME",
            )
        layers = [layer.with_result(shape) for layer in layers]
    if sweep is not None:
        _sweep(layers, sweep, as_json)
        return
    described = []
    for layer in layers:
        problem = layer.problem()
        described.append((layer, problem, [plan(problem, device) for device in devices]))
    fields = None if notes or options["model"] else _receptive(layers)
    if as_json:
        content = {"layers": [_as_json(*entry) for entry in described], "left_out": notes}
        if fields:
            content["receptive_field"] = receptive.as_json(fields)
        output.write_json(content)
        return
    parts = [part for entry in described for part in _tables(*entry)]
    if fields:
        sizes, step = (" x ".join(str(entry[i]) for entry in fields) for i in range(len(fields[0])))
        text = (
            f"The receptive field of an output of the {len(layers)} layers is at most {sizes} "
            f"inputs; the fields of neighbouring outputs are {step} apart."
        )
        parts.append(output.heading("receptive field", text))
    output.draw(*parts, *configuration.left_out(notes))


def _receptive(layers: list[Layer]) -> tuple[Field, ...] | None:
    """Return the receptive field of layers of which each reads the result of the one before it.

    The result is None for other layers, for one layer, and for a field too large to list.
    """
    problems = [layer.problem() for layer in layers]
    shapes = [layer.shapes(problem) for layer, problem in zip(layers, problems, strict=True)]
    formats = {problem.data_format for problem in problems}
    chained = all(before["y"] == after["x"] for before, after in pairwise(shapes))
    if len(layers) < 2 or len(formats) > 1 or not chained:
        return None
    kinds = (layer.is_transposed for layer in layers)
    return receptive.stacked([*zip(problems, kinds, strict=True)])


def _backwards(
    layers: list[Layer], dy: tuple[int, ...], options: Mapping[str, Any], as_json: bool
) -> None:
    """Print the input sizes that give an output of shape ``dy``."""
    entries = [(layer, backwards.largest_input(layer, dy)) for layer in layers]
    if as_json:
        output.write_json({"layers": [backwards.backwards_json(*entry) for entry in entries]})
        return
    checked = bool(options.get("input"))
    output.draw(*(part for entry in entries for part in backwards.backwards_parts(*entry, checked)))


def _sweep(layers: list[Layer], text: str, as_json: bool) -> None:
    """Print a table per layer, with a line per value of the swept option."""
    sweep = backwards.read_sweep(text)
    sweeps = [(layer, backwards.swept(layer, sweep)) for layer in layers]
    if as_json:
        content = [
            {"name": layer.name, **backwards.sweep_json(sweep, steps)} for layer, steps in sweeps
        ]
        output.write_json({"layers": content})
        return
    parts: list[Any] = []
    for layer, steps in sweeps:
        problem = next(step for _, step in steps if isinstance(step, ConvProblem))
        line = configuration.summary(problem, {sweep.word: sweep.text})
        # The title describes the layer before the change, so only its name is printed.
        name = replace(layer, title=None).heading
        parts.append(output.heading(*filter(None, [name, line])))
        parts.append(backwards.sweep_table(sweep, steps))
    output.draw(*parts)


def title(layer: Layer, problem: ConvProblem) -> Any:
    """Return the lines above a layer's tables."""
    x, w, y, _ = map(shape_text, layer.shapes(problem).values())
    kind = "transposed layer: " if layer.is_transposed else ""
    settings = {}
    if layer.is_transposed:
        settings["output_padding"] = one(layer.output_padding(problem))
    lines = [f"{kind}{x} * {w} -> {y}", configuration.summary(problem, settings)]
    lines += configuration.notes_on_shapes(layer, problem)
    return output.heading(*filter(None, [layer.heading, *lines]))


def layer_reasons(layer: Layer, problem: ConvProblem) -> tuple[Reason, ...]:
    """Return the shapes of a layer's tensors, and the reason for each."""
    return transposed.reasons(problem) if layer.is_transposed else reasons(problem)


def axes_table(layer: Layer, problem: ConvProblem) -> Any:
    """Return a table of the rules of each spatial axis, such as its padding and output size."""
    entries = transposed.axis_reasons(problem) if layer.is_transposed else axis_reasons(problem)
    rows = [row for entry in entries for row in entry.rows]
    return output.table(("axis", "", ""), rows)


def gradients(layer: Layer) -> Mapping[str, str]:
    """Return the name of the layer's tensor that each pass computes, keyed by pass."""
    return TRANSPOSED_GRADIENTS if layer.is_transposed else RESULT


def _tables(layer: Layer, problem: ConvProblem, plans: list[Plan]) -> list[Any]:
    tensors = [
        (tensor, shape_text(shape), why) for tensor, shape, why in layer_reasons(layer, problem)
    ]
    # A few devices get a column each. Columns for many devices would make the table too wide.
    beside = plans if len(plans) <= _MOST_BESIDE else []
    headings = [device_plan.device.name for device_plan in beside]
    passes = [
        (
            *(pass_, gradients(layer)[pass_], _gemm_text(problem.gemm(pass_))),
            *(choice_text(device_plan[pass_]) for device_plan in beside),
        )
        for pass_ in PASSES
    ]
    below = [(device_plan.device.name, *map(choice_text, device_plan)) for device_plan in plans]
    return [
        title(layer, problem),
        output.table(("tensor", "shape", "why"), tensors),
        axes_table(layer, problem),
        output.table(("pass", "gives", "GEMM m x n x k", *headings), passes),
        *([] if beside else [output.table(("device", *PASSES), below)]),
        output.heading("each pass", *_cost(problem)),
        output.heading("in training", *_training(layer, problem, plans)),
    ]


def choice_text(chosen: PassPlan) -> str:
    """Return the implementation of a pass and its tile as text."""
    return f"{chosen.implementation} {chosen.tile}" if chosen.tile else chosen.implementation


def choice_json(chosen: PassPlan, *more: str) -> dict[str, Any]:
    """Return the implementation of a pass, its tile and ``more`` of its attributes, for --json."""
    tile = str(chosen.tile) if chosen.tile else None
    attributes = {key: getattr(chosen, key) for key in more}
    return {"implementation": chosen.implementation, "tile": tile, **attributes}


def _gemm_text(view: GemmView) -> str:
    product = f"{view.gemm_m} x {view.gemm_n} x {view.gemm_k}"
    return product if view.groups == 1 else f"{view.groups} times {product}"


def _cost(problem: ConvProblem) -> tuple[str, str]:
    indexing = "32-bit indexing is enough"
    if problem.needs_64bit_indexing:
        indexing = "64-bit indexing: a tensor has more than 2^31 - 1 elements"
    return (
        f"{output.scaled(problem.flops, 'FLOP')}, {bytes_text(problem.bytes)} if each tensor "
        f"moves once, {problem.arithmetic_intensity:.3g} FLOP/byte",
        indexing,
    )


def _training(layer: Layer, problem: ConvProblem, plans: list[Plan]) -> list[str]:
    """Return the numbers of parameters, and the memory of tensors, gradients and workspaces."""
    weights, biases = prod(problem.filter_shape), problem.C if layer.is_transposed else problem.K
    return [
        f"{weights + biases:,} parameters: {counted_large(weights, 'weight')} and "
        f"{biases:,} in the bias",
        f"x, w and y take {bytes_text(problem.bytes)}, and dx, dw and dy the same again",
        *largest_workspaces([plans]),
    ]


def _as_json(layer: Layer, problem: ConvProblem, plans: list[Plan]) -> dict[str, Any]:
    return {
        **configuration.as_json(layer, problem),
        **tensors_json(layer, problem),
        "passes": [
            {
                "pass": pass_,
                "gives": gradients(layer)[pass_],
                **problem.gemm(pass_)._asdict(),
                "flops": problem.flops,
                "bytes": problem.bytes,
                "arithmetic_intensity": problem.arithmetic_intensity,
            }
            for pass_ in PASSES
        ],
        "needs_64bit_indexing": problem.needs_64bit_indexing,
        "plans": [
            {
                "device": device_plan.device.name,
                "architecture": device_plan.device.architecture,
                "passes": [
                    {
                        "pass": chosen.pass_,
                        "implementation": chosen.implementation,
                        "reason": chosen.reason,
                        **choice_json(chosen, "blocks", "workspace_bytes"),
                    }
                    for chosen in device_plan
                ],
            }
            for device_plan in plans
        ],
    }


def tensors_json(layer: Layer, problem: ConvProblem) -> dict[str, Any]:
    """Return the shapes, the reasons for the shapes and the spatial axes, for ``--json``.

    The axes describe the problem, so for a transposed layer, "output" is the size of its input.
    """
    explained = layer_reasons(layer, problem)
    return {
        "shapes": {entry.tensor: list(entry.shape) for entry in explained},
        "reasons": {entry.tensor: entry.reason for entry in explained},
        "axes": [axis_dict(axis) for axis in problem.axes],
    }
