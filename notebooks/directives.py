"""Sphinx directives that run commands and draw kernels and layers.

Each build runs the commands and draws the pictures again, so the pages match the code.  A command
with an unexpected exit code fails the build, as every warning does.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import ClassVar

import diagrams
import links
import pictures
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import cupyconv
from cupyconv.cli.configuration import PRESETS, Layer, read_file
from cupyconv.explaining.page import framed
from cupyconv.gpu import compiler
from cupyconv.kernels.device import CARDS
from cupyconv.markup import escape
from tests import speed_table
from tests.device import machine

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
"""Folder in which the commands run; it contains net.onnx, the model of a tutorial."""

WIDTH, NARROW = 84, 52
"""Columns of printed output that fit a page's width, on a desktop and on a phone (hand-set)."""


def run(arguments: str, columns: int) -> tuple[int, str]:
    """Return the exit code of a cupyconv command, and its output including standard error.

    Args:
        arguments: the command line after ``cupyconv``.
        columns: width of the terminal in characters.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cupyconv.cli", *shlex.split(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=FOLDER,
        env={**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1"},
    )
    return done.returncode, "\n".join(line.rstrip() for line in done.stdout.splitlines())


class Run(SphinxDirective):
    """Show a command and its output: ``{run} shapes --preset by-hand``.

    A command whose output depends on the width is shown twice; site.css selects one by the width
    of the window.

    Options:
        exit: expected exit code; default: 0.
        paragraphs: number of paragraphs to show; default: all.
        scroll: show the output for a desktop on a phone too, where the reader scrolls it sideways.
    """

    required_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar = {
        "exit": directives.nonnegative_int,
        "paragraphs": directives.positive_int,
        "scroll": directives.flag,
    }

    def run(self) -> list[nodes.Node]:
        arguments = " ".join(self.arguments[0].split())
        kinds = {"wide": self.shown(arguments, WIDTH)}
        if "scroll" in self.options:
            kinds = {"scrolled": kinds["wide"]}
        elif (narrow := self.shown(arguments, NARROW)) == kinds["wide"]:
            kinds = {"always": narrow}
        else:
            kinds["narrow"] = narrow
        return [
            nodes.container("", nodes.literal_block(text, text, language="console"), classes=[name])
            for name, text in kinds.items()
        ]

    def shown(self, arguments: str, columns: int) -> str:
        """Return the command and its output in a terminal with this number of columns."""
        code, printed = run(arguments, columns)
        expected = self.options.get("exit", 0)
        if code != expected:
            raise self.error(f"{arguments} ended with {code}, not {expected}: {printed}")
        paragraphs = printed.split("\n\n")
        wanted = self.options.get("paragraphs", len(paragraphs))
        if wanted < len(paragraphs):
            printed = "\n\n".join([*paragraphs[:wanted], "..."])
        return f"$ cupyconv {arguments}\n{printed}"


class Kernel(SphinxDirective):
    """Draw a kernel family from its launches: ``{kernel} cuda-gather``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        children: list[nodes.Node] = []
        for example in pictures.EXAMPLES[self.arguments[0]]:
            drawn = pictures.launched(self.arguments[0], example)
            caption = f"<figcaption>{escape(drawn.caption)}</figcaption>"
            children.append(_figure("picture", f"{drawn.svg}{caption}"))
            text = "\n".join(
                textwrap.fill(f"{name:16}{fact}", WIDTH, subsequent_indent=" " * 16)
                for name, fact in drawn.facts.items()
            )
            children.append(nodes.literal_block(text, text, language="text"))
        return children


class LayerPicture(SphinxDirective):
    """Draw the layer of a preset: ``{layer} multi-channel``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [_figure("picture", explained(preset(self.arguments[0])).svg())]


class Pairs(SphinxDirective):
    """Draw which channels of x and dy give each slice of dw: ``{pairs} multi-channel``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        return [_figure("diagram", diagrams.pairs(preset(self.arguments[0]).problem()))]


class Windows(SphinxDirective):
    """Draw the windows of presets along one axis: ``{windows} same-stride valid-stride``."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        problems = [preset(name).problem() for name in self.arguments[0].split()]
        return [_figure("diagram", diagrams.windows(problems))]


def _figure(kind: str, content: str) -> nodes.raw:
    return nodes.raw("", f'<figure class="{kind}">{content}</figure>', format="html")


class Explained(SphinxDirective):
    """Embed the interactive page of a preset's layer: ``{explained} by-hand``.

    A second argument is the part of the page's address that chooses what it shows: ``story=size``.
    """

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        name, *place = self.arguments
        address = "#".join((f"gallery/{name}.html", *place))
        shown = escape(preset(name).heading)
        command = f"cupyconv explain --preset {name} --open"
        words = " ".join(f'<span class="pre">{word}</span>' for word in command.split())
        frame = (
            f'<p><a href="{address}">Open as a separate page</a>, or run '
            f'<code class="docutils literal">{words}</code>.</p>'
            + framed(f'class="page" loading="lazy" src="{address}" title="{shown}"')
        )
        return [nodes.raw("", frame, format="html")]


class Summary(SphinxDirective):
    """Show a table of all names that the page describes, with one line about each: ``{summary}``.

    The table is left out if the package of the page's module is not installed.
    """

    def run(self) -> list[nodes.Node]:
        page = Path(self.env.doc2path(self.env.docname)).read_text(encoding="utf-8")
        names = links.described(page)
        if not names:
            return []
        lines = ["```{eval-rst}", ".. list-table::", "   :widths: auto", "   :header-rows: 1", ""]
        for name, text in [("name", "purpose"), *links.rows(names)]:
            lines += [f"   * - {name}", f"     - {text}"]
        made = nodes.container()
        self.state.nested_parse(StringList([*lines, "```"], "summary"), self.content_offset, made)
        return made.children


def link_names(
    app: Sphinx, what: str, name: str, documented: object, options: object, lines: list[str]
) -> None:
    """Turn the public names in a docstring into links."""
    lines[:] = links.linked(lines, name)


class Tried(SphinxDirective):
    """Insert a table of what has been tried: ``{tried} chips``, ``{tried} speed``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        made = nodes.container()
        self.state.nested_parse(StringList(TABLES[self.arguments[0]](), "tried"), 0, made)
        return made.children


class Bridge(SphinxDirective):
    """Document the module of cupyconv for an optional package: ``{bridge} torch``.

    If the package is not installed, the page says so instead.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if importlib.util.find_spec(name) is None:
            logger.info("%s is not installed: its reference is left out", name)
            lines = [f"*{name} was not installed where these pages were built.*"]
        else:
            lines = ["```{eval-rst}", f".. automodule:: cupyconv.{name}", "   :members:", "```"]
        made = nodes.container()
        self.state.nested_parse(StringList(lines, name), self.content_offset, made)
        return made.children


def chips() -> list[str]:
    """Return a table of the supported chips, and of how the kernels were tried on each."""
    measured = {run.environment["architecture"]: run for run in speed_table.runs(MEASURED, "gpu")}
    emulated = {device.chip for device in machine.DEVICES}
    lines = ["| architecture | common cards | tried |", "|---|---|---|"]
    for target in compiler.ARCHITECTURES:
        device = cupyconv.Device.of(target)
        cards = [name for name, card in CARDS.items() if card.capability == device.capability]
        tried = ["compiled"]
        if machine.CHIPS[device.capability] in emulated:
            tried.append("run by CuPy on an emulated GPU")
        if target in measured:
            tried.append(f"measured on {measured[target].environment['gpu']}")
        lines.append(f"| {target} | {', '.join(cards)} | {', '.join(tried)} |")
    return lines


MEASURED = FOLDER.parent / "tests" / "gpu" / "results"
TABLES = {"chips": chips, "speed": lambda: speed_table.by_card(MEASURED.parents[1]).splitlines()}


def preset(name: str) -> Layer:
    """Return the built-in layer of this name."""
    (layer,) = (layer for layer in read_file(PRESETS) if layer.name == name)
    return layer


def explained(layer: Layer) -> cupyconv.Explanation:
    """Return the explanation of a layer, with the layer's heading and values."""
    return cupyconv.explain(layer.problem(), title=layer.heading, values=layer.values)


def write_gallery(app: Sphinx) -> None:
    """Write the interactive page of each preset, and of any layer, into the gallery folder."""
    folder = Path(app.outdir) / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    for layer in read_file(PRESETS):
        (folder / f"{layer.name}.html").write_text(explained(layer).page(), encoding="utf-8")
    shutil.copy(folder / "by-hand.html", folder / "layer.html")  # the address chooses the layer


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives with Sphinx."""
    app.add_directive("run", Run)
    app.add_directive("kernel", Kernel)
    app.add_directive("layer", LayerPicture)
    app.add_directive("pairs", Pairs)
    app.add_directive("windows", Windows)
    app.add_directive("explained", Explained)
    app.add_directive("bridge", Bridge)
    app.add_directive("tried", Tried)
    app.add_directive("summary", Summary)
    app.connect("autodoc-process-docstring", link_names, priority=600)  # after napoleon
    app.connect("builder-inited", write_gallery)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
