"""`cupyconv model`: list the convolutions of an ONNX model with shapes, cost and kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from cupyconv import ConvError
from cupyconv.cli import configuration, output, paths
from cupyconv.cli.shapes import choice_json, choice_text
from cupyconv.errors import require_word
from cupyconv.explaining import model_page, receptive
from cupyconv.explaining.onnx_graph import open_shape_text
from cupyconv.explaining.onnx_model import Model, ModelLayer, UnreadLayer, read
from cupyconv.markup import in_line, spreadsheet_cell
from cupyconv.planning import Plan, plan
from cupyconv.planning.plan import largest_workspaces, workspace_notes
from cupyconv.problem import ITEMSIZE, bytes_text, counted, shape_text


class _Described(click.Argument):
    """A click argument with a help text, which older versions of click do not support."""

    def __init__(self, *args: Any, help: str, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.help = help


@click.command()
@click.argument("file", cls=_Described, type=paths.FILE, metavar="FILE.onnx", help="Model file.")
@click.option(
    "--input",
    "inputs",
    metavar="NAME=SHAPE",
    multiple=True,
    help="Set unknown sizes: the shape of an input, such as data=1x3x224x224, or a named size, "
    "such as batch=1.  Repeatable.",
)
@configuration.devices_option(
    "Show which kernels would run on this device: cpu, an architecture or a card.  Repeatable.",
    default=("sm_80",),
)
@configuration.text_option(
    *("--sort", "WORD"),
    "Sort by flops, parameters, bytes or name.  [default: the order of the model]",
    lambda: _ORDERS,
)
@click.option("--top", metavar="N", type=click.IntRange(1), help="List only the first N layers.")
@paths.file_option("--csv", "Write a CSV file, one line per layer.")
@paths.file_option("--html", "Write a page that explains every layer.")
@output.json_option
def command(
    file: str,
    inputs: tuple[str, ...],
    devices: tuple[str, ...],
    sort: str | None,
    top: int | None,
    csv: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """List the convolutions of an ONNX model.

    \b
    cupyconv model net.onnx
    cupyconv model net.onnx --input batch=1 --device sm_90a --device cpu
    cupyconv model net.onnx --sort flops --top 10
    cupyconv explain --model net.onnx --layer /features/3

    The command needs the onnx package (pip install onnx), but no GPU and no weights.  The gradients
    dx, dw and dy have the shapes of x, w and y.  Unknown sizes are shown by name, or as "?".
    """
    require_word("--sort", sort, (None, *_ORDERS))
    saved = [path for path in (csv, html) if path]
    paths.require_one_output(*saved, as_json=as_json)
    paths.require_writable("--csv", csv)
    paths.require_writable("--html", html, ".html", ".htm")
    with paths.opened(Path(file)) as content:
        model = read(file, dict(map(_input, inputs)), content, open_sizes=True)
    nodes: list[ModelLayer | UnreadLayer] = list(model.nodes)
    if sort:
        nodes = [*sorted(model.layers, key=_ORDERS[sort]), *model.unknown, *model.left_out]
    shown = nodes[:top]
    planned = [
        (node, [plan(node.problem, device) for device in devices])
        for node in shown
        if isinstance(node, ModelLayer)
    ]
    plans_of = {id(layer): plans for layer, plans in planned}
    if csv:
        paths.write(Path(csv), _csv(model, shown, plans_of, devices).encode())
    if html:
        paths.write(Path(html), model_page.html(Path(file).name, model, planned).encode())
    if paths.STANDARD in saved:
        return
    if as_json:
        output.write_json(_as_json(file, model, planned, devices))
        return
    if not model.layers and not model.unknown:
        lines = _left_out(model)
        output.draw(output.heading(in_line(f"{file} {model.without_layers}"), *lines))
        return
    rows = [
        (in_line(layer.name), *_unread_cells(layer), *[""] * len(devices))
        if isinstance(layer, UnreadLayer)
        else (in_line(layer.name), *_cells(layer, model.share(layer), plans_of[id(layer)]))
        for layer in shown
    ]
    numbers = ("parameters", "FLOP", "share")
    columns = ("layer", "x, w -> y", *numbers, *(f"kernels on {device}" for device in devices))
    lines = _total_lines(model, planned)
    if len(shown) < len(nodes):
        lines.append(f"{len(nodes) - len(shown)} more are not shown")
    if model.unknown:
        head = f"{counted(len(model.unknown), 'layer')} of unknown size"
        reason = model.unknown[0].reason.partition(". ")[0]
        first = "; the first" if len(model.unknown) > 1 else ""
        lines.append(in_line(f"{head}{first}: {reason}. {model.hint}"))
    lines += _left_out(model)
    if saved:
        lines.append(f"saved to {in_line(' and '.join(saved))}")
    named = ", ".join(
        f"{name} {open_shape_text(shape) or '(scalar or unknown shape)'}"
        for name, shape in model.inputs.items()
    )
    output.draw(
        output.heading(in_line(file), in_line(f"inputs: {named}")),
        output.table(columns, rows, numbers),
        output.heading("total", *lines),
    )


def _total_lines(model: Model, planned: list[tuple[ModelLayer, list[Plan]]]) -> list[str]:
    """Return the size, cost and memory of all layers, and how they are counted."""
    totals = _totals(model)
    lines = [
        f"{_counted(model)}, {totals['weights']:,} weights, "
        f"{totals['parameters']:,} parameters with biases",
        f"forward {output.scaled(totals['flops'], 'FLOP')}, with both gradients "
        f"{output.scaled(totals['flops_of_three_passes'], 'FLOP')}",
        f"each pass moves {bytes_text(totals['bytes'])} if each tensor moves once",
        f"all y together take {bytes_text(totals['activation_bytes'])}, and in training all dy the "
        f"same again; all dw and db take {bytes_text(totals['gradient_bytes'])}",
    ]
    if model.unknown:
        known = lines[1:] if model.layers else []
        lines[1:] = [f"{line}, without layers of unknown size" for line in known]
    lines += [text for text, applies in _NOTES.items() if any(map(applies, model.layers))]
    named = ((layer.name, each) for layer, plans in planned for each in plans)
    return [
        *lines,
        *largest_workspaces(plans for _, plans in planned),
        *map(in_line, workspace_notes(named)),
    ]


_NOTES: Mapping[str, Callable[[ModelLayer], Any]] = {
    "weights and biases that several layers share are counted once": lambda layer: (
        layer.same_filter_as or layer.same_values_as
    ),
    "a layer inside another operator counts once, although Loop and Scan run it in each iteration, "
    "and If runs only one branch": lambda layer: layer.inside,
    "a receptive field is the part of the model's input on which an output of the layer depends at "
    "most, over all branches; it is unknown behind a global pooling, a Reshape or a Resize": (
        lambda layer: layer.fields
    ),
}
"""Notes on the totals, each with the condition that a layer must fulfil."""


def _cells(layer: ModelLayer, share: float, plans: Sequence[Plan]) -> tuple[str, ...]:
    """Return the table cells of a layer: shapes, parameters, FLOP, share and kernels."""
    shapes = (
        f"{shape_text(layer.input_shape)} * {shape_text(layer.problem.filter_shape)}\n"
        f"-> {shape_text(layer.output_shape)}\n{layer.settings}"
    )
    shapes += "".join(f"\n{in_line(note)}" for note in layer.notes)
    kernels = (_kernels(layer, each) for each in plans)
    flops = output.scaled(layer.problem.flops, "")
    return shapes, f"{layer.parameters:,}", flops, f"{share:.1%}", *kernels


_ORDERS: Mapping[str, Callable[[ModelLayer], Any]] = {
    "flops": lambda layer: -layer.problem.flops,
    "parameters": lambda layer: -layer.parameters,
    "bytes": lambda layer: -layer.problem.bytes,
    "name": lambda layer: layer.name,
}
"""Sort keys of layers, by value of --sort; numbers sort in descending order."""


def _left_out(model: Model) -> list[str]:
    """Return a line for each layer that is left out; many layers with one reason share a line."""
    by_reason: dict[str, list[str]] = {}
    for node in model.left_out:
        by_reason.setdefault(node.reason, []).append(node.name)
    lines = []
    for reason, names in by_reason.items():
        if len(names) <= output.MOST_EXAMPLES:
            lines += [in_line(f"left out: {name}, because {reason}") for name in names]
            continue
        first, others = names[: output.MOST_EXAMPLES], names[output.MOST_EXAMPLES :]
        more = f"{', '.join(first)} and {len(others)} others"
        lines.append(in_line(f"left out: {more}, because {reason}"))
    return lines


def _unread_cells(layer: UnreadLayer) -> tuple[str, ...]:
    """Return the table cells of a layer that is not read: shapes, parameters, FLOP and share.

    FLOP and share are "?" if a size is unknown, and "-" for a layer that is left out.
    """
    x, w, y = (
        open_shape_text(shape) or "?"
        for shape in (layer.input_shape, layer.filter_shape, layer.output_shape)
    )
    words = [layer.settings] if layer.settings else []
    words += [] if layer.is_open else ["left out"]
    words += [f"inside {operator}" for operator in layer.inside]
    shapes = in_line(f"{x} * {w}") + "\n" + in_line(f"-> {y}")
    shapes += f"\n{in_line(', '.join(words))}" if words else ""
    return shapes, f"{layer.parameters:,}", *(("?", "?") if layer.is_open else ("-", "-"))


def _counted(model: Model) -> str:
    """Return the number of convolutions that were read, and the reasons for the others, as text."""
    count, total = len(model.layers), len(model.nodes)
    if count == total:
        return counted(total, "convolution")
    reasons = {"of unknown size": model.unknown, "left out": model.left_out}
    missing = ", ".join(f"{len(nodes)} {why}" for why, nodes in reasons.items() if nodes)
    return f"{count} of {counted(total, 'convolution')} ({missing})"


def _csv(
    model: Model,
    shown: Sequence[ModelLayer | UnreadLayer],
    plans_of: Mapping[int, Sequence[Plan]],
    devices: tuple[str, ...],
) -> str:
    """Return CSV text with a line per layer, which includes its kernels on every device.

    A layer that is not read has neither cost nor kernels; the reason is in the notes.
    """
    import csv
    import io

    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    numbers = ("parameters", "flops", "share", "bytes")
    kernels = [f"{tensor} on {device}" for device in devices for tensor in ("y", "dx", "dw")]
    texts = ("layer", "operator", "x", "w", "y", "settings")
    writer.writerow([*texts, *numbers, *kernels, "notes"])
    for layer in shown:
        shapes = map(open_shape_text, (layer.input_shape, layer.filter_shape, layer.output_shape))
        cost: list[Any] = [""] * (3 + len(kernels))
        if isinstance(layer, ModelLayer):
            plans, passes = plans_of[id(layer)], layer.passes.values()
            cost = [layer.problem.flops, f"{model.share(layer):.6f}", layer.problem.bytes]
            cost += [each[pass_].implementation for each in plans for pass_ in passes]
        row = [layer.name, layer.operator, *shapes, layer.settings, layer.parameters, *cost]
        writer.writerow(spreadsheet_cell(str(cell)) for cell in (*row, "; ".join(layer.notes)))
    return buffer.getvalue()


def _input(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, shape = text.rpartition("=")
    if not name or not re.fullmatch(r"\s*[0-9]+(\s*[x,]\s*[0-9]+)*\s*", shape.lower()):
        raise ConvError(
            "--input must be a name and a shape",
            f"got {text!r}",
            "Write, for example, data=1x3x224x224",
        )
    return name.strip(), configuration.read_shape("--input", shape)


def _kernels(layer: ModelLayer, layer_plan: Plan) -> str:
    """Return the implementations of y, dx and dw, each named once."""
    named: dict[str, list[str]] = {}
    for tensor, pass_ in layer.passes.items():
        named.setdefault(choice_text(layer_plan[pass_]), []).append(tensor)
    return "\n".join(f"{', '.join(tensors)}: {text}" for text, tensors in named.items())


def _totals(model: Model) -> dict[str, int]:
    return {
        "layers": len(model.layers),
        "convolutions": len(model.nodes),
        "weights": model.weights,
        "parameters": model.parameters,
        "flops": model.flops,
        "flops_of_three_passes": 3 * model.flops,
        "bytes": sum(layer.problem.bytes for layer in model.layers),
        "activation_bytes": sum(layer.activation_bytes for layer in model.layers),
        "gradient_bytes": model.parameters
        * max((ITEMSIZE[layer.problem.dtype] for layer in model.layers), default=0),
    }


def _as_json(
    file: str, model: Model, planned: list[tuple[ModelLayer, list[Plan]]], devices: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "file": file,
        "inputs": {name: list(shape) for name, shape in model.inputs.items()},
        "devices": list(devices),
        "layers": [
            _layer_json(layer, model.share(layer), dict(zip(devices, plans, strict=True)))
            for layer, plans in planned
        ],
        "totals": _totals(model),
        "unknown": [_unread_json(node) for node in model.unknown],
        "left_out": [_unread_json(node) for node in model.left_out],
        "hint": model.hint or None,
    }


def _layer_json(layer: ModelLayer, share: float, plans: Mapping[str, Plan]) -> dict[str, Any]:
    problem = layer.problem
    unnamed = configuration.Layer(layer.name, None, {})
    x, w, y = layer.input_shape, problem.filter_shape, layer.output_shape
    shapes = {"x": x, "w": w, "y": y, "dx": x, "dw": w, "dy": y}
    if layer.has_bias:
        shapes |= dict.fromkeys(("bias", "db"), (layer.output_channels,))
    return {
        "operator": layer.operator,
        **configuration.as_json(unnamed, problem),
        "shapes": {tensor: list(shape) for tensor, shape in shapes.items()},
        "parameters": layer.parameters,
        "adds": layer.added or None,
        "activation": layer.activation or None,
        "same_filter_as": layer.same_filter_as,
        "same_values_as": layer.same_values_as,
        "filter_is_stored": layer.filter is not None,
        "inside": list(layer.inside),
        "flops": problem.flops,
        "share_of_flops": share,
        "useful_flops": problem.useful_flops,
        "bytes": problem.bytes,
        "activation_bytes": layer.activation_bytes,
        "arithmetic_intensity": problem.arithmetic_intensity,
        "receptive_field": receptive.as_json(layer.fields) if layer.fields else None,
        "kernels": [
            {
                "device": device,
                "gives": tensor,
                "pass": pass_,
                **choice_json(plan[pass_], "workspace_bytes", "reason"),
            }
            for device, plan in plans.items()
            for tensor, pass_ in layer.passes.items()
        ],
    }


def _unread_json(layer: UnreadLayer) -> dict[str, Any]:
    shapes = {"x": layer.input_shape, "w": layer.filter_shape, "y": layer.output_shape}
    return {
        "name": layer.name,
        "operator": layer.operator,
        "reason": layer.reason,
        "attributes": dict(layer.attributes),
        "shapes": {tensor: list(shape) for tensor, shape in shapes.items()},
        "parameters": layer.parameters,
        "inside": list(layer.inside),
    }
