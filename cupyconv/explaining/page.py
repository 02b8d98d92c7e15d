"""One page that shows a layer and answers to the pointer and the keyboard; nothing is fetched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyconv.errors import ConvError
from cupyconv.explaining.maps import MOST_POSITIONS
from cupyconv.explaining.terms import LETTERS
from cupyconv.markup import Document, escape
from cupyconv.problem import ConvProblem, shape_text

if TYPE_CHECKING:
    from cupyconv.explaining.explanation import Explanation

# Whatever a title says, the page can load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html(explanation: Explanation) -> str:
    """The page of an explanation, as one file.

    Raises:
        ConvError: the layer is so large that a browser would stall.
    """
    problem = explanation.problem
    for axis in problem.axes:
        size = max(axis.input, axis.filter, axis.output)
        if size > MOST_POSITIONS:
            raise ConvError(
                f"a layer on a page must have at most {MOST_POSITIONS:,} positions on an axis",
                f"it has {size:,}",
                "Use a smaller layer of the same stride and taps",
                axis=axis.name,
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
    content = {
        "title": escape(explanation.title or head),
        "policy": escape(_POLICY),
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        # In a script, only "</" and "<!--" end or change what is read.
        "layer": json.dumps(layer(problem)).replace("<", "\\u003c"),
        "explanation": _explanation(explanation),
        "programs": programs,
    }
    # In one pass, so that what is filled in is never taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: content[place[1]], _asset("page.html"))


def _explanation(explanation: Explanation) -> str:
    """The text without its title, which the page has, and with headings of the next level."""
    text = Document("", explanation.document.sections).html()
    return text.replace("<h4>", "<h2>").replace("</h4>", "</h2>")


def layer(problem: ConvProblem) -> dict[str, Any]:
    """What the page's script knows of a layer: the numbers of each axis, and who shares them."""
    rank = problem.spatial_rank
    letters = zip(*(LETTERS[kind][rank] for kind in ("input", "filter", "output")), strict=True)
    return {
        "axes": [
            {
                "name": axis.name,
                "letters": three,
                "input": axis.input,
                "filter": axis.filter,
                "output": axis.output,
                "stride": axis.stride,
                "dilation": axis.dilation,
                "before": axis.pad_before,
                "after": axis.pad_after,
            }
            for axis, three in zip(problem.axes, letters, strict=True)
        ],
        "images": problem.N,
        "channels": problem.C // problem.groups,
        "filters": problem.K // problem.groups,
        "groups": problem.groups,
    }


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
