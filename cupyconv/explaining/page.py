"""One page that shows a layer and answers to pointer, touch and keyboard; nothing is fetched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from cupyconv.explaining.scene import scene
from cupyconv.markup import Document, escape
from cupyconv.problem import shape_text

if TYPE_CHECKING:
    from cupyconv.explaining.explanation import Explanation
    from cupyconv.explaining.terms import Element

# Whatever a title says, the page can load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html(explanation: Explanation, element: Element | None = None) -> str:
    """The page of an explanation, as one file.

    Args:
        element: the one that is shown first.

    Raises:
        ConvError: the layer is too large for its ends to say anything.
    """
    problem = explanation.problem
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


def _explanation(explanation: Explanation) -> str:
    """The text without its title, which the page has, and with headings of the next level."""
    text = Document("", explanation.document.sections).html()
    return text.replace("<h4>", "<h2>").replace("</h4>", "</h2>")


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
