"""One page that shows a layer and answers to pointer, touch and keyboard; nothing is fetched."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from cupyconv.errors import ConvError
from cupyconv.explaining.scene import scene
from cupyconv.markup import Document, escape
from cupyconv.problem import shape_text

if TYPE_CHECKING:
    from cupyconv.explaining.explanation import Explanation
    from cupyconv.explaining.terms import Element

_MOST_COUNTED = 2**53
"""The largest integer up to which a browser's numbers have no gaps."""

# Whatever a title says, the page can load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html(explanation: Explanation, element: Element | None = None) -> str:
    """Return the page of an explanation, as one file.

    Args:
        element: the one that is shown first.

    Raises:
        ConvError: the layer is too large for its ends to say anything, or for a browser to count.
    """
    problem = explanation.problem
    most = max(problem.N, problem.C, problem.K)
    if most > _MOST_COUNTED:
        raise ConvError(
            "a page counts images, channels and filters up to 2^53",
            f"the layer has {most}",
            "Draw the figure instead: svg(), or --svg on the command line",
        )
    head = (
        f"{shape_text(problem.input_shape)} * {shape_text(problem.filter_shape)} -> "
        f"{shape_text(problem.output_shape)}"
    )
    programs = "".join(
        f"<details><summary>{escape(entry.framework)}</summary>"
        f"<pre>{escape(entry.program)}</pre></details>"
        for entry in explanation.translations
    )
    drawn = json.dumps(scene(explanation, element).to_dict(), separators=(",", ":"))
    content = {
        "title": escape(explanation.title or head),
        "policy": escape(_POLICY),
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        # In a script, only "</" and "<!--" end or change what is read.
        "scene": drawn.replace("<", "\\u003c"),
        "explanation": _explanation(explanation),
        "programs": programs,
    }
    # In one pass, so that what is filled in is never taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: content[place[1]], _asset("page.html"))


class Page:
    """A page that shows itself: in Jupyter below the cell, elsewhere in the browser."""

    def __init__(self, content: str) -> None:
        self.content = content

    def _repr_html_(self) -> str:
        # A frame isolates the styles and scripts of the page and of the notebook.
        return (
            f'<iframe srcdoc="{escape(self.content)}" sandbox="allow-scripts" '
            'style="width:100%;height:52rem;border:0" title="interactive explanation"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<page of {len(self.content):,} characters>"


def in_notebook() -> bool:
    """Return whether what an expression gives is shown as HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def open_in_browser(content: str, path: str | Path | None = None) -> None:
    """Show a page in the browser.

    Args:
        path: the file that it was written to; else one is left for the browser.

    Raises:
        ConvError: there is no browser.
    """
    if path is None:
        with tempfile.NamedTemporaryFile(
            "w", suffix=".html", prefix="cupyconv-", delete=False, encoding="utf-8"
        ) as file:
            file.write(content)
        path = file.name
    if not webbrowser.open(Path(path).resolve().as_uri()):
        raise ConvError("a page is shown by a browser", "none was found", f"Open {path} with one")


def _explanation(explanation: Explanation) -> str:
    """Return the text without its title, with headings one level lower."""
    text = Document("", explanation.document.sections).html()
    return text.replace("<h4>", "<h2>").replace("</h4>", "</h2>")


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
