"""`cupyconv model`: the convolutions of an ONNX model, with shapes, gradients, cost and kernels."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path
from typing import Any

import click

from cupyconv import ConvError
from cupyconv.cli import configuration, output, paths
from cupyconv.explaining.model import Model, ModelLayer, read
from cupyconv.explaining.shapes import counted
from cupyconv.markup import in_line
from cupyconv.planning import Plan, plan
from cupyconv.planning.device import DEVICES
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
@click.option(
    "--device",
    metavar="DEVICE",
    type=configuration.Words(lambda: DEVICES),
    default="sm_80",
    show_default=True,
    help="Say which kernels would run on this device: cpu, or a GPU by its architecture.",
)
@output.json_option
def command(file: str, inputs: tuple[str, ...], device: str, as_json: bool) -> None:
    """Every convolution of an ONNX model.

    \b
    cupyconv model net.onnx
    cupyconv model net.onnx --input data=1x3x224x224 --device sm_90a

    Needs the onnx package (pip install onnx), no GPU and no weights.  x, w and y
    stand for their gradients dx, dw and dy too, which have the same shapes.
    """
    model = read(file, dict(map(_input, inputs)), paths.read(Path(file)))
    planned = [(layer, plan(layer.problem, device)) for layer in model.layers]
    if as_json:
        output.write_json(_as_json(file, model, planned, device))
        return
    if not planned:
        output.write(f"{in_line(file)} has no Conv and no ConvTranspose\n")
        return
    table = output.table("layer", "x, w -> y", "FLOP", f"kernels on {device}", right=("FLOP",))
    for layer, layer_plan in planned:
        shapes = (
            f"{shape_text(layer.input_shape)} * {shape_text(layer.problem.filter_shape)}\n"
            f"-> {shape_text(layer.output_shape)}; {_settings(layer)}"
        )
        table.add_row(
            in_line(layer.name),
            shapes,
            output.scaled(layer.problem.flops, ""),
            _kernels(layer, layer_plan),
        )
    totals = _totals(model)
    lines = [
        f"{counted(totals['layers'], 'convolution')}, {totals['weights']:,} weights",
        f"forward {output.scaled(totals['flops'], 'FLOP')}, with both gradients "
        f"{output.scaled(totals['flops_of_three_passes'], 'FLOP')}",
        f"each pass moves at least {bytes_text(totals['bytes'])}",
    ]
    lines += [in_line(f"left out: {name}, because {why}") for name, why in model.left_out]
    named = ", ".join(f"{name} {_shape(shape)}" for name, shape in model.inputs.items())
    output.draw(
        output.heading(in_line(file), in_line(f"inputs {named}")),
        table,
        output.heading("in all", *lines),
    )


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
        "flops": flops,
        "flops_of_three_passes": 3 * flops,
        "bytes": sum(layer.problem.bytes for layer in model.layers),
    }


def _as_json(
    file: str, model: Model, planned: list[tuple[ModelLayer, Plan]], device: str
) -> dict[str, Any]:
    layers = []
    for layer, layer_plan in planned:
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
                "flops": problem.flops,
                "useful_flops": problem.useful_flops,
                "bytes": problem.bytes,
                "arithmetic_intensity": problem.arithmetic_intensity,
                "kernels": [
                    {
                        "gives": tensor,
                        "pass": pass_,
                        "implementation": layer_plan[pass_].implementation,
                        "tile": str(layer_plan[pass_].tile or "") or None,
                        "workspace_bytes": layer_plan[pass_].workspace_bytes,
                        "reason": layer_plan[pass_].reason,
                    }
                    for tensor, pass_ in layer.passes.items()
                ],
            }
        )
    return {
        "file": file,
        "inputs": {name: list(shape) for name, shape in model.inputs.items()},
        "device": device,
        "layers": layers,
        "totals": _totals(model),
        "left_out": [{"name": name, "reason": reason} for name, reason in model.left_out],
    }
