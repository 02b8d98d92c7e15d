"""`cupyconv model`: the convolutions of an ONNX model, with shapes, gradients, cost and kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import click

from cupyconv import ConvError
from cupyconv.cli import configuration, output, paths
from cupyconv.errors import unknown_word
from cupyconv.explaining.onnx_model import Model, ModelLayer, read
from cupyconv.explaining.shapes import counted
from cupyconv.markup import in_line
from cupyconv.planning import Plan, plan
from cupyconv.problem import bytes_text, shape_text


class _Described(click.Argument):
    """An argument with a help text, which older versions of click do not take."""

    def __init__(self, *args: Any, help: str, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.help = help


@click.command()
@click.argument(
    "file", cls=_Described, type=paths.FILE, metavar="FILE.onnx", help="The model's file."
)
@click.option(
    "--input",
    "inputs",
    metavar="NAME=SHAPE",
    multiple=True,
    help="Sizes that the model leaves open, such as data=1x3x224x224.  Repeatable.",
)
@configuration.devices_option(
    "Say which kernels would run on this device: cpu, or a GPU by its architecture.  Repeatable.",
    default=("sm_80",),
)
@click.option(
    "--sort",
    metavar="WORD",
    type=configuration.Words(lambda: _ORDERS),
    help="By flops, parameters, bytes or name; else in the model's order.",
)
@click.option("--top", metavar="N", type=click.IntRange(1), help="Only the first N layers.")
@click.option("--csv", type=paths.FILE, metavar="FILE", help="Write a line for each layer.")
@output.json_option
def command(
    file: str,
    inputs: tuple[str, ...],
    devices: tuple[str, ...],
    sort: str | None,
    top: int | None,
    csv: str | None,
    as_json: bool,
) -> None:
    """Every convolution of an ONNX model.

    \b
    cupyconv model net.onnx
    cupyconv model net.onnx --input data=1x3x224x224 --device sm_90a --device cpu
    cupyconv model net.onnx --sort flops --top 10
    cupyconv explain --model net.onnx --layer /features/3

    Needs the onnx package (pip install onnx), no GPU and no weights.  x, w and y stand for their
    gradients dx, dw and dy too, which have the same shapes.
    """
    if sort is not None and sort not in _ORDERS:
        raise unknown_word("--sort", sort, _ORDERS)
    paths.require_one_output(csv, as_json=as_json)
    if csv:
        paths.require_writable("--csv", Path(csv))
    model = read(file, dict(map(_input, inputs)), paths.read(Path(file)))
    layers = sorted(model.layers, key=_ORDERS[sort]) if sort else list(model.layers)
    planned = [
        (layer, [plan(layer.problem, device) for device in devices]) for layer in layers[:top]
    ]
    if csv:
        paths.write(Path(csv), _csv(model, planned, devices).encode())
        if csv == paths.STANDARD:
            return
    if as_json:
        output.write_json(_as_json(file, model, planned, devices))
        return
    if not planned:
        output.write(f"{in_line(file)} has no Conv and no ConvTranspose\n")
        return
    total = max(sum(layer.problem.flops for layer in model.layers), 1)
    table = output.table(
        *("layer", "x, w -> y", "parameters", "FLOP", "share"),
        *(f"kernels on {device}" for device in devices),
        right=("parameters", "FLOP", "share"),
    )
    for layer, plans in planned:
        shapes = (
            f"{shape_text(layer.input_shape)} * {shape_text(layer.problem.filter_shape)}\n"
            f"-> {shape_text(layer.output_shape)}\n{_settings(layer)}"
        )
        table.add_row(
            in_line(layer.name),
            shapes,
            f"{layer.parameters:,}",
            output.scaled(layer.problem.flops, ""),
            f"{layer.problem.flops / total:.1%}",
            *(_kernels(layer, each) for each in plans),
        )
    totals = _totals(model)
    lines = [
        f"{counted(totals['layers'], 'convolution')}, {totals['weights']:,} weights, "
        f"{totals['parameters']:,} parameters with biases",
        f"forward {output.scaled(totals['flops'], 'FLOP')}, with both gradients "
        f"{output.scaled(totals['flops_of_three_passes'], 'FLOP')}",
        f"each pass moves {bytes_text(totals['bytes'])} with each tensor once",
    ]
    if len(planned) < len(layers):
        lines.append(f"{len(layers) - len(planned)} more are not shown")
    lines += [in_line(f"unknown: {name}: {why}") for name, why in model.unknown]
    lines += [in_line(f"left out: {name}, because {why}") for name, why in model.left_out]
    if csv:
        lines.append(f"saved to {in_line(csv)}")
    named = ", ".join(f"{name} {_shape(shape)}" for name, shape in model.inputs.items())
    output.draw(
        output.heading(in_line(file), in_line(f"inputs {named}")),
        table,
        output.heading("in all", *lines),
    )


_ORDERS: Mapping[str, Callable[[ModelLayer], Any]] = {
    "flops": lambda layer: -layer.problem.flops,
    "parameters": lambda layer: -layer.parameters,
    "bytes": lambda layer: -layer.problem.bytes,
    "name": lambda layer: layer.name,
}
"""What layers may be sorted by; the largest come first."""


def _csv(
    model: Model, planned: list[tuple[ModelLayer, list[Plan]]], devices: tuple[str, ...]
) -> str:
    """A line for each layer, with its kernels on every device."""
    import csv
    import io

    held = io.StringIO()
    writer = csv.writer(held, lineterminator="\n")
    numbers = ("parameters", "flops", "share", "bytes")
    kernels = [f"{tensor} on {device}" for device in devices for tensor in ("y", "dx", "dw")]
    writer.writerow(["layer", "operator", "x", "w", "y", "settings", *numbers, *kernels])
    total = max(sum(layer.problem.flops for layer in model.layers), 1)
    for layer, plans in planned:
        problem = layer.problem
        shapes = (layer.input_shape, problem.filter_shape, layer.output_shape)
        names = [each[pass_].implementation for each in plans for pass_ in layer.passes.values()]
        writer.writerow(
            [
                *(in_line(layer.name), layer.operator, *map(shape_text, shapes), _settings(layer)),
                *(layer.parameters, problem.flops, f"{problem.flops / total:.6f}", problem.bytes),
                *names,
            ]
        )
    return held.getvalue()


def _input(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, shape = text.rpartition("=")
    if not name or not re.fullmatch(r"\s*\d{1,18}(\s*[x,]\s*\d{1,18})*\s*", shape.lower()):
        raise ConvError(
            "--input must be a name and its shape",
            f"got {text!r}",
            "Write for example data=1x3x224x224",
        )
    return name.strip(), tuple(map(int, re.split("[x,]", shape.lower())))


def _shape(shape: Any) -> str:
    return "x".join(map(str, shape)) or "of no size"


def _settings(layer: ModelLayer) -> str:
    """What is not plain about a layer."""
    problem = layer.problem
    words = [layer.operator] if layer.is_transposed else []
    if max(problem.stride) > 1:
        words.append(f"stride {shape_text(problem.stride)}")
    if any(map(any, problem.padding)):
        sides = [str(b) if b == a else f"{b}:{a}" for b, a in problem.padding]
        words.append(f"padding {sides[0] if len(set(sides)) == 1 else ','.join(sides)}")
    if max(problem.dilation) > 1:
        words.append(f"dilation {shape_text(problem.dilation)}")
    if problem.groups > 1:
        words.append(f"groups {problem.groups}")
    return ", ".join([*words, problem.dtype])


def _kernels(layer: ModelLayer, layer_plan: Plan) -> str:
    """What computes y, dx and dw, told once where it is the same."""
    named: dict[str, list[str]] = {}
    for tensor, pass_ in layer.passes.items():
        chosen = layer_plan[pass_]
        text = f"{chosen.implementation} {chosen.tile}" if chosen.tile else chosen.implementation
        named.setdefault(text, []).append(tensor)
    return "\n".join(f"{', '.join(tensors)}: {text}" for text, tensors in named.items())


def _totals(model: Model) -> dict[str, int]:
    flops = sum(layer.problem.flops for layer in model.layers)
    return {
        "layers": len(model.layers),
        "weights": sum(prod(layer.problem.filter_shape) for layer in model.layers),
        "parameters": sum(layer.parameters for layer in model.layers),
        "flops": flops,
        "flops_of_three_passes": 3 * flops,
        "bytes": sum(layer.problem.bytes for layer in model.layers),
    }


def _as_json(
    file: str,
    model: Model,
    planned: list[tuple[ModelLayer, list[Plan]]],
    devices: tuple[str, ...],
) -> dict[str, Any]:
    layers = []
    total = max(sum(layer.problem.flops for layer in model.layers), 1)
    for layer, plans in planned:
        problem = layer.problem
        unnamed = configuration.Layer(layer.name, None, {})
        x, w, y = layer.input_shape, problem.filter_shape, layer.output_shape
        shapes = {"x": x, "w": w, "y": y, "dx": x, "dw": w, "dy": y}
        if layer.has_bias:
            bias = (y[1],)
            shapes |= {"bias": bias, "db": bias}
        layers.append(
            {
                "operator": layer.operator,
                **configuration.as_json(unnamed, problem),
                "shapes": {tensor: list(shape) for tensor, shape in shapes.items()},
                "parameters": layer.parameters,
                "flops": problem.flops,
                "share_of_flops": problem.flops / total,
                "useful_flops": problem.useful_flops,
                "bytes": problem.bytes,
                "arithmetic_intensity": problem.arithmetic_intensity,
                "kernels": [
                    {
                        "device": device,
                        "gives": tensor,
                        "pass": pass_,
                        "implementation": layer_plan[pass_].implementation,
                        "tile": str(layer_plan[pass_].tile or "") or None,
                        "workspace_bytes": layer_plan[pass_].workspace_bytes,
                        "reason": layer_plan[pass_].reason,
                    }
                    for device, layer_plan in zip(devices, plans, strict=True)
                    for tensor, pass_ in layer.passes.items()
                ],
            }
        )
    return {
        "file": file,
        "inputs": {name: list(shape) for name, shape in model.inputs.items()},
        "devices": list(devices),
        "layers": layers,
        "totals": _totals(model),
        "unknown": [{"name": name, "reason": reason} for name, reason in model.unknown],
        "left_out": [{"name": name, "reason": reason} for name, reason in model.left_out],
    }
