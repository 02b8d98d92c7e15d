"""`cupyconv diagnose`: find the convention by which another program computed values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

import cupyconv
from cupyconv import ConvError
from cupyconv.cli import configuration, output, paths, shapes
from cupyconv.cli.configuration import Layer
from cupyconv.problem import shape_text

ARRAYS = {
    "x": "Read x from .npy or .npz (FILE.npz:NAME).",
    "w": "Read w from .npy or .npz.",
    "dy": "Read dy from .npy or .npz; with a shape, list the input sizes that fit, as "
    "`cupyconv shapes --dy` does.",
    "y": "Read y, computed by another program from x and w.",
    "dx": "Read dx, computed by another program from w and dy.",
    "dw": "Read dw, computed by another program from x and dy.",
    "db": "Read db, computed by another program from dy.",
    "bias": "Read the bias of the layer.",
}
"""Options that name an array, with their help."""

_COPIES = 9
"""Bytes per byte of the arrays as float64 that a diagnosis takes beside the arrays (estimated)."""


def _array_options(command: Any) -> Any:
    """Add an option for each of ARRAYS."""
    for name in reversed(ARRAYS):
        metavar = "FILE|SHAPE" if name == "dy" else "FILE"
        command = paths.file_option(f"--{name}", ARRAYS[name], metavar)(command)
    return command


@click.command()
@configuration.configuration_options
@_array_options
@click.option(
    "--activation",
    metavar="WORD",
    help="Assume that y has this activation: relu, silu or gelu.  [default: none]",
)
@output.json_option
def command(activation: str | None, as_json: bool, **options: Any) -> int | None:
    """Find the convention of another program's values.

    \b
    cupyconv diagnose --x x.npy --w w.npy --y y.npy --stride 2 --padding 1
    cupyconv diagnose --w w.npy --dy dy.npy --dx dx.npy --padding same
    cupyconv diagnose --x a.npz:x --dy a.npz:dy --dw a.npz:dw
    cupyconv diagnose --dy 1x3x3x4 --filter 3x3x3x4 --stride 2

    The options describe the layer as you understand it.  The exit code is 0 if they give the
    values, and 1 if another convention or none gives them.  A search takes seconds, up to about a
    minute for large arrays, and a multiple of the memory of the arrays in float64.
    """
    files = {name: options.pop(name) for name in ARRAYS}
    layers = configuration.read_layers(options)
    dy_shape, files["dy"] = configuration.shape_or_file("--dy", files["dy"])
    given = {name: path for name, path in files.items() if path is not None}
    if not given and dy_shape is not None:
        click.get_current_context().invoke(
            shapes.command, dy=shape_text(dy_shape), as_json=as_json, **options
        )
        return None
    if dy_shape is not None or not given:
        raise ConvError(
            "a diagnosis must have the arrays of a result and of its operands",
            "got --dy as a shape" if dy_shape else "got no array",
            "Give, for example, --x x.npy --w w.npy --y y.npy",
        )
    configuration.require_single(layers, "a diagnosis must be for a single layer")
    arrays = _read(layers[0], given, options)
    words = _words(layers[0])
    with output.progress("searching", 1000) as advance:
        done = 0

        def report(share: float) -> None:
            nonlocal done
            while done < int(share * 1000):
                done += 1
                advance()

        diagnosis = cupyconv.diagnose(**arrays, **words, activation=activation, advance=report)
    if as_json:
        output.write_json(diagnosis.to_dict())
    else:
        output.write_paged(diagnosis.document.text(output.width(), output.strong) + "\n")
    return 0 if diagnosis.agrees else 1


def _read(layer: Layer, given: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays, after checking their shapes and that they fit into memory."""
    from math import prod

    from cupyconv.cli import data

    opened = {name: data.ArrayFile(f"--{name}", path) for name, path in given.items()}
    data.require_given_shapes(layer, opened, options, lambda key, _: f"Leave out --{key}")
    needed = _COPIES * 8 * sum(prod(file.shape) for file in opened.values())
    rule, remedy = "a diagnosis must fit into main memory", "Give fewer images or channels"
    data.require_memory(needed, rule, "it needs about", remedy)
    return {name: file.read() for name, file in opened.items()}


def _words(layer: Layer) -> dict[str, Any]:
    """Return the layer's arguments as arguments of ``cupyconv.diagnose``."""
    left_out = ("input_shape", "filter_shape", "output_shape", "dtype")
    return {key: value for key, value in layer.arguments.items() if key not in left_out}
