"""`cupyconv warm`: compiles what layers will load, ahead of their first calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cupyconv import arrays
from cupyconv.cli import configuration, output
from cupyconv.cli.configuration import Layer
from cupyconv.errors import DeviceError
from cupyconv.markup import in_line
from cupyconv.planning import ACTIVATIONS
from cupyconv.planning.device import DEVICES
from cupyconv.problem import PASSES, ConvProblem

# CuPy and NumPy are imported when the command runs, so that --help does without them.
if TYPE_CHECKING:
    from cupyconv.warming import Warmed, WarmKernel


@click.command()
@configuration.configuration_options
@configuration.dtype_option
@click.option(
    "--layout",
    metavar="WORD",
    type=configuration.Words(lambda: ("channels_first", "channels_last")),
    help="channels_first or channels_last: how all tensors lie in memory, whatever their formats "
    "say.  [default: as these say]",
)
@configuration.devices_option(
    "A GPU by its architecture, such as sm_90a.  Repeatable.  [default: the one that is here]",
    [word for word in DEVICES if word != "cpu"],
)
@configuration.passes_option
@configuration.precision_option
@click.option(
    "--activation",
    metavar="WORD",
    type=configuration.Words(lambda: filter(None, ACTIVATIONS)),
    help="Of the forward pass: relu, silu or gelu.  [default: none]",
)
@configuration.impl_option
@click.option(
    "--measure", is_flag=True, help="All kernels that cupyconv.benchmark = True would time."
)
@click.option("--threads", type=int, metavar="N", help="That compile.  [default: one on each core]")
@output.json_option
def command(
    layout: str | None,
    devices: tuple[str, ...],
    passes: tuple[str, ...],
    precision: str,
    activation: str | None,
    impl: str,
    measure: bool,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile kernels ahead.

    \b
    cupyconv warm --model net.onnx --dtype float16 --device sm_90a
    cupyconv warm --model net.onnx --input data=8x3x224x224 --pass forward --layout channels_last
    cupyconv warm --input 8x64x56x56 --filter 128x64x3x3 --padding same --dtype bfloat16

    Every kernel that calls of these layers will load is put into the cache ($CUPYCONV_CACHE_DIR):
    what is there already stays, the others are compiled side by side.  Needs CuPy, and a GPU only
    where no --device is given.
    """
    from cupyconv.warming import Ahead

    notes: list[str] = []
    layers = [(layer, layer.problem()) for layer in configuration.read_layers(options, notes)]
    if not devices and not arrays.device_count():
        arrays.cupy()  # which may be what is missing
        raise DeviceError(
            "kernels are compiled for the current GPU unless --device is given, and there is none. "
            "Say which, for example --device sm_90a"
        )
    found = []
    for device in devices or (None,):
        ahead = Ahead(device, precision=precision, impl=impl, measure=measure or None)
        for layer, problem in layers:
            ahead.add(
                problem,
                passes or PASSES,
                transposed=layer.is_transposed,
                activation=activation,
                layout=layout,
            )
        with output.progress("compiling", len(ahead)) as step:
            found.append(ahead.compile(threads, step))
    if as_json:
        content = [_as_json(one, layers) for one in found]
        output.write_json({"devices": content, "left_out": notes})
        return
    parts: list[Any] = [part for one in found for part in (one.table, in_line(one.summary))]
    output.draw(*parts, *configuration.left_out(notes))


def _as_json(warmed: Warmed, layers: list[tuple[Layer, ConvProblem]]) -> dict[str, Any]:
    return {
        "architecture": warmed.device.architecture,
        "folder": str(warmed.folder),
        "seconds": warmed.seconds,
        "cpu_seconds": warmed.cpu_seconds,
        "threads": warmed.threads,
        "compiled": len(warmed.compiled),
        "kernels": [_kernel_json(kernel, layers) for kernel in warmed.kernels],
    }


def _kernel_json(kernel: WarmKernel, layers: list[tuple[Layer, ConvProblem]]) -> dict[str, Any]:
    uses = [
        {"layer": layer.name, "pass": use.pass_}
        for use in kernel.uses
        for layer, problem in layers
        if (problem, layer.is_transposed) == (use.problem, use.transposed)
    ]
    return {
        "source": kernel.source,
        "macros": kernel.macros,
        "tile": kernel.tile or None,
        "uses": uses,
        "was_there": kernel.seconds is None,
        "seconds": kernel.seconds,
        "cpu_seconds": kernel.cpu_seconds,
    }
