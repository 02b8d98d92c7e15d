"""`cupyconv explain`: explain the shapes and the values of a layer's gradients."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click

import cupyconv
from cupyconv import Explanation
from cupyconv.cli import configuration, output, paths
from cupyconv.cli.configuration import Layer
from cupyconv.explaining import translate
from cupyconv.explaining.counts import MAPPED
from cupyconv.explaining.maps import TermMap
from cupyconv.explaining.page import open_in_browser
from cupyconv.explaining.terms import Element
from cupyconv.explaining.values import OPERANDS
from cupyconv.markup import Document, Paragraph, Section, Verbatim, in_line


@click.command()
@configuration.configuration_options
@configuration.dtype_option
@click.option(
    "--element",
    "elements",
    metavar="NAME",
    multiple=True,
    help="List the terms that an element sums: 'dw[k,c,r,s]', 'dx[n,c,h,w]' or 'y[n,k,p,q]', "
    "with numbers as indices; dF, dX and O are accepted too.  Repeatable.",
)
@click.option(
    "--all", "everything", is_flag=True, help="List all terms instead of the first and last ones."
)
@configuration.data_options
@click.option("--large", is_flag=True, help="Compute the values even if the layer is large.")
@click.option(
    "--map",
    "mapped",
    metavar="dx|dw|y",
    shell_complete=configuration.completing(lambda: MAPPED),
    help="Draw a map of the number of terms that each position sums.",
)
@configuration.text_option(
    *("--code", "FRAMEWORK"),
    "Print a program that computes the layer with tensorflow, pytorch, jax or onnx.",
    lambda: translate.FRAMEWORKS,
)
@paths.file_option("--svg", "Write a picture as SVG; with --map, write the map.")
@paths.file_option(
    "--html", "Write an interactive page, or a page that lists several layers; needs no network."
)
@click.option("--open", "opened", is_flag=True, help="Open an interactive page in a browser.")
@output.json_option
def command(
    elements: tuple[str, ...],
    everything: bool,
    x: str | None,
    w: str | None,
    dy: str | None,
    seed: int,
    large: bool,
    mapped: str | None,
    code: str | None,
    svg: str | None,
    html: str | None,
    opened: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Explain why gradients have their shapes and values.

    \b
    cupyconv explain --preset multi-channel
    cupyconv explain --preset same-stride --element 'dX[0,0,3,3]' --map dx
    cupyconv explain --preset valid-stride --code pytorch > layer.py
    cupyconv explain --preset same-stride --html layer.html

    Indices of x and dx are in the order (n, c, h, w) in every data format.  Values are read
    from files or random; `cupyconv grads` with the same seed uses the same random values.  Output
    longer than the terminal is shown with $PAGER.
    """
    layers = configuration.read_layers(options)
    dy_shape, dy = configuration.shape_or_file("--dy", dy)
    read = {name: path for name, path in zip(OPERANDS, (x, w, dy), strict=True) if path}
    saved = [path for path in (svg, html) if path]
    paths.require_one_output(*saved, as_json=as_json)
    paths.require_writable("--svg", svg, ".svg")
    paths.require_writable("--html", html, ".html", ".htm")
    if read or svg or code or opened:
        rule = "--x, --w, --dy, --code, --svg and --open must be used with a single layer"
        configuration.require_single(layers, rule)
    whole = not (elements or mapped or code or saved or opened)
    explained = []
    for layer in layers:
        explanation, source = _explanation(layer, read, dy_shape, seed, large)
        chosen = [explanation.element(name) for name in elements]
        counted = explanation.map(mapped) if mapped is not None else None
        translated = explanation.code(code) if code is not None else None
        explained.append(_Explained(layer, explanation, source, chosen, counted, translated))
    first = explained[0]
    if svg:
        picture = first.counted.svg() if first.counted else first.explanation.svg(*elements[:1])
        paths.write(Path(svg), picture.encode())
    if html:
        if len(explained) == 1:
            page = first.explanation.page(*elements[:1])
        else:
            from cupyconv.explaining import model_page

            name = Path(options["config"] or options["model"]).name
            page = model_page.layers_page(name, [entry.explanation for entry in explained])
        paths.write(Path(html), page.encode())
    if opened:
        open_in_browser(first.explanation.page(*elements[:1]), html)
    if paths.STANDARD in saved:
        return
    if as_json:
        entries = [_as_json(entry, everything) for entry in explained]
        output.write_json({"layers": entries, "saved": saved})
        return
    width = output.width()
    parts = []
    for layer, explanation, source, chosen, counted, translated in explained:
        if whole:
            for note in configuration.notes_on_shapes(layer, explanation.problem):
                parts.append("\n".join(Paragraph(note).lines(width)))
            parts.append(explanation.document.text(width, output.strong))
        elif translated and not (chosen or counted or saved):
            parts.append(translated.program.rstrip("\n"))
            continue
        elif explanation.title and (chosen or counted):
            parts.append(output.strong(in_line(explanation.title)))
        sections = [element.section(everything) for element in chosen]
        if counted:
            lines = counted.lines(width - 4, _height(), colour=output.coloured())
            verdict = f"{counted.verdict[0].upper()}{counted.verdict[1:]}."
            blocks = (Verbatim("\n".join(lines), coloured=True), Paragraph(verdict))
            sections.append(Section(counted.legend, blocks))
        if sections:
            parts.append(Document("", tuple(sections)).text(width, output.strong))
        if translated:
            parts.append(translated.program.rstrip("\n"))
        if source and (whole or chosen):
            parts.append("\n".join(Paragraph(source).lines(width)))
    if saved:
        volume = first.explanation.problem.spatial_rank == 3 and (html or not mapped)
        how = ", with a separate drawing of each spatial axis" if volume else ""
        parts.append(f"saved to {in_line(' and '.join(saved))}{how}")
    output.write_paged("\n\n".join(parts) + "\n")


class _Explained(NamedTuple):
    """A layer, its explanation, and the parts that the options request.

    Attributes:
        source: sentence on the origin of the values.
        chosen: elements that --element names.
        counted: map of the numbers of terms, for --map; None without this option.
        translated: program, for --code; None without this option.
    """

    layer: Layer
    explanation: Explanation
    source: str
    chosen: list[Element]
    counted: TermMap | None
    translated: translate.Translation | None


def _explanation(
    layer: Layer, read: Mapping[str, str], dy_shape: tuple[int, ...] | None, seed: int, large: bool
) -> tuple[Explanation, str]:
    """Return a layer's explanation and a sentence on the origin of its values.

    Raises:
        ConvError: the files do not match the layer, or the values do not fit into memory.
    """
    opened: dict[str, Any] = {}
    loaded: dict[str, Any] = {}
    if read:
        from cupyconv.cli import data

        opened = {name: data.ArrayFile(f"--{name}", path) for name, path in read.items()}
    more = {
        argument: opened[name].shape
        for name, argument in (("x", "input_shape"), ("w", "filter_shape"))
        if name in opened and argument not in layer.arguments
    }
    layer = replace(layer, arguments={**layer.arguments, **more})
    problem = layer.problem()
    if dy_shape is not None:
        layer.require_output(dy_shape)
    if opened:
        data.require_shapes(layer, problem, opened)
        data.require_parts(problem, opened)
        loaded = {name: file.read() for name, file in opened.items()}
    if large:
        from cupyconv.cli import data

        data.require_room_for_all(problem)
    explanation = cupyconv.explain(
        problem,
        title=layer.heading,
        values=layer.values,
        seed=seed,
        large=large,
        transposed=layer.is_transposed,
        **loaded,
    )
    known = explanation.data
    if known.too_many and len(loaded) < len(OPERANDS):
        return explanation, f"Values are left out: {known.missing('dw')}"
    where = [f"{name} from {path}" for name, path in read.items()]
    if len(read) < len(OPERANDS):
        what = "integers" if layer.values == "integers" else "data"
        where.append(f"random {what} from seed {seed}, the same as in `cupyconv grads`")
    return explanation, f"Values: {', '.join(where)}."


def _as_json(explained: _Explained, everything: bool) -> dict[str, Any]:
    layer, explanation, source, chosen, counted, translated = explained
    problem = explanation.problem
    # An element with too many terms raises an error here, before values are computed.
    elements = [element.to_dict(everything) for element in chosen]
    example = explanation.element(explanation.middle).to_dict() if problem.N else None
    entry = {**configuration.as_json(layer, problem), **explanation.to_dict()}
    entry["title"] = layer.title
    if example is not None:
        entry["example"] = example
    entry["elements"] = elements
    entry["map"] = counted.to_dict() if counted else None
    entry["code"] = translated.program if translated else None
    entry["values"] = source or None
    return entry


def _height() -> int:
    """Return how many lines of a map fit on the terminal, below its title and above its text."""
    return max(shutil.get_terminal_size().lines - 8, 8)
