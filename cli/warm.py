"""`cupyconv warm`: compile the kernels of layers ahead of their first calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cupyconv import arrays
from cupyconv.cli import configuration, output
from cupyconv.cli.configuration import Layer
from cupyconv.errors import DeviceError
from cupyconv.kernels.device import CARDS, DEVICES
from cupyconv.markup import in_line
from cupyconv.planning import ACTIVATIONS
from cupyconv.problem import PASSES, ConvProblem

# --help must work without CuPy and NumPy: functions import the modules that need them.
if TYPE_CHECKING:
    from cupyconv.warming import Warmed, WarmKernel


@click.command()
@configuration.configuration_options
@configuration.dtype_option
@configuration.text_option(
    *("--layout", "WORD"),
    "Set the memory order of all tensors, channels_first or channels_last.  "
    "[default: the order of their formats]",
    lambda: ("channels_first", "channels_last"),
)
@configuration.devices_option(
    "Compile for a GPU: an architecture or a card, such as sm_90a or T4.  Repeatable.  "
    "[default: the current GPU]",
    [word for word in (*DEVICES, *CARDS) if word != "cpu"],
)
@configuration.passes_option
@configuration.precision_option()
@configuration.text_option(
    *("--activation", "WORD"),
    "Compile the forward pass with this activation: "
    f"{', '.join(filter(None, ACTIVATIONS))}.  [default: none]",
    lambda: filter(None, ACTIVATIONS),
)
@click.option(
    "--add", is_flag=True, help="Compile the forward pass for calls with the argument add."
)
@configuration.impl_option
@click.option(
    "--measure", is_flag=True, help="Compile all kernels that cupyconv.benchmark = True would time."
)
@click.option(
    "--threads", type=int, metavar="N", help="Compile with N threads.  [default: one per core]"
)
@output.json_option
def command(
    layout: str | None,
    devices: tuple[str, ...],
    passes: tuple[str, ...],
    precision: str,
    activation: str | None,
    add: bool,
    impl: str,
    measure: bool,
    threads: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile kernels ahead of use.

    \b
    cupyconv warm --model net.onnx --dtype float16 --device sm_90a
    cupyconv warm --model net.onnx --input data=8x3x224x224 \\
      --pass forward --layout channels_last
    cupyconv warm --input 8x64x56x56 --filter 128x64x3x3 \\
      --padding same --dtype bfloat16

    The command compiles, in parallel, the kernels that calls of these layers load, and keeps
    them in the cache ($CUPYCONV_CACHE_DIR).  It needs CuPy, and a GPU only without --device.
    """
    from cupyconv.warming import Ahead

    notes: list[str] = []
    layers = [(layer, layer.problem()) for layer in configuration.read_layers(options, notes)]
    if not devices and not arrays.device_count():
        arrays.cupy()  # raises an error if CuPy is missing
        raise DeviceError(
            "kernels are compiled for the current GPU unless --device is given, and there is no "
            "GPU. Give a device, for example --device sm_90a"
        )
    results = []
    for device in devices or (None,):
        ahead = Ahead(device, precision=precision, impl=impl, measure=measure or None)
        for layer, problem in layers:
            ahead.add(problem, passes or PASSES, layer.is_transposed, activation, add, layout)
        with output.progress("compiling", len(ahead)) as step:
            results.append(ahead.compile(threads, step))
    if as_json:
        content = [_as_json(result, layers) for result in results]
        output.write_json({"devices": content, "left_out": notes})
        return
    parts: list[Any] = [
        part for result in results for part in (result.table, in_line(result.summary))
    ]
    output.draw(*parts, *configuration.left_out(notes))


def _as_json(warmed: Warmed, layers: list[tuple[Layer, ConvProblem]]) -> dict[str, Any]:
    return {
        "architecture": warmed.device.architecture,
        "target": warmed.device.target,
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
