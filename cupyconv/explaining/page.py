"""Interactive HTML page of a layer, for pointer, touch and keyboard, without network access."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import webbrowser
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupyconv.errors import ConvError
from cupyconv.explaining import translate
from cupyconv.explaining.scene import DRAWN, Limits, key_of, scene
from cupyconv.explaining.values import MOST_ELEMENTS, MOST_FLOPS, OPERANDS, Values
from cupyconv.markup import Document, escape
from cupyconv.problem import ConvProblem, shape_text

if TYPE_CHECKING:
    from cupyconv.explaining.terms import Element

_MOST_COUNTED = 2**53
"""Largest integer up to which a browser represents every integer exactly."""

_SCRIPTS = ("rules.js", "tensors.js", "scenes.js", "page.js", "knobs.js", "stories.js")
"""Scripts of the page, in the order in which they run."""

_MOST_PAIRS = 200_000
"""Largest number of (output, tap) pairs on an axis for which a page has knobs (chosen)."""

MOST_NUMBERS, MOST_PRODUCTS = 200_000, 40_000_000
"""Largest number of elements of x, w and dy together, and of products in a pass, for which the
page's script computes all values (chosen): 32 million products take 0.8 s in Chromium on a CPU core
(measured)."""

_MOST_RESULTS = 40_000
"""Largest number of characters of the library's results on a page whose script computes all values
(chosen).  If there are more, the page contains only the results of the chosen pair of channels."""

_LIMITS = (
    DRAWN,
    *(Limits(channels) for channels in (8, 6, 5)),
    *(Limits(5, *sizes) for sizes in ((12, 9, 24), (10, 7, 12), (8, 5, 8), (6, 3, 5))),
)
"""Limits of a page, tried in this order (chosen)."""

_MOST_BYTES = 199_000
"""Largest size of a page, in bytes (chosen).  If the last limits give a larger page, it has fewer
planes."""

# The policy forbids the page to load anything, even if a title contains HTML.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html(
    problem: ConvProblem,
    data: Mapping[str, Any],
    document: Document,
    element: Element | None = None,
) -> str:
    """Return the page of an explanation, as one file.

    Args:
        problem: the layer.
        data: values of the tensors by name, as far as they are known.
        document: text of the explanation.
        element: element to show first.

    Raises:
        ConvError: the layer is too large to draw, or too large for a browser's integers.
    """
    most = max(problem.N, problem.C, problem.K)
    if most > _MOST_COUNTED:
        raise ConvError(
            "a layer on a page must have at most 2^53 images, channels and filters",
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
        for entry in translate.translations(problem)
    )
    content = {
        "title": escape(document.title or head),
        "policy": escape(_POLICY),
        "style": _asset("page.css"),
        "script": "".join(map(_script, _SCRIPTS)),
        "explanation": _text(document),
        "programs": programs,
    }
    filled = (*content.values(), _asset("page.html"))
    left = _MOST_BYTES - sum(len(text.encode()) for text in filled)
    content["scene"] = _scene(problem, data, element, left)
    # Fill all places in one pass, so that filled-in text is never filled again.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: content[place[1]], _asset("page.html"))


class Page:
    """A page that Jupyter shows below the cell."""

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
    """Return whether the code runs in a notebook, which shows results as HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def open_in_browser(content: str, path: str | Path | None = None) -> None:
    """Show a page in the browser.

    Args:
        content: the page.
        path: file that contains the page; by default, the page is written to a temporary file,
            which is kept.

    Raises:
        ConvError: no browser was found.
    """
    if path is None:
        with tempfile.NamedTemporaryFile(
            "w", suffix=".html", prefix="cupyconv-", delete=False, encoding="utf-8"
        ) as file:
            file.write(content)
        path = file.name
    if not webbrowser.open(Path(path).resolve().as_uri()):
        raise ConvError(
            "showing a page requires a browser", "none was found", f"Open {path} yourself"
        )


def _scene(
    problem: ConvProblem, data: Mapping[str, Any], element: Element | None, most_bytes: int
) -> str:
    """Return the scene and the first settings of the knobs as JSON.

    The drawn part is chosen so that the text has at most ``most_bytes`` bytes, if possible.
    """
    for limits in _LIMITS:
        drawn = _scene_of(problem, data, element, limits)
        if len(text := _json(drawn)) <= most_bytes:
            return text
    for is_kept in (_in_first_sums, _of_first_pair):
        for name, packed in [*drawn["values"].items(), *drawn["exact"].items()]:
            first = key_of(name, drawn["k"], drawn["c"])
            planes = packed["planes"].items()
            packed["planes"] = {key: plane for key, plane in planes if is_kept(key, first)}
        if len(text := _json(drawn)) <= most_bytes:
            break
    return text


def _json(drawn: dict[str, Any]) -> str:
    """Return data as JSON in ASCII, for a script of the page."""
    # Escape "<": in a script, "</" and "<!--" change how a browser reads the rest.
    return json.dumps(drawn, separators=(",", ":")).replace("<", "\\u003c")


def _in_first_sums(key: str, first: str) -> bool:
    """Return whether the sums that the page shows first read a plane.

    They read all planes of x and dy.  Of w and dw, they read the planes that have the filter or the
    channel of the plane that is shown first.

    Args:
        key: key of the plane.
        first: key of the tensor's plane that is shown first.
    """
    return "," not in key or any(map(str.__eq__, key.split(","), first.split(",")))


def _of_first_pair(key: str, first: str) -> bool:
    """Return whether a plane is the one that is shown first."""
    return key == first


def _scene_of(
    problem: ConvProblem, data: Mapping[str, Any], element: Element | None, limits: Limits
) -> dict[str, Any]:
    drawn = scene(problem, data, element, limits).to_dict()
    drawn["turned"] = DRAWN._asdict()  # drawn when a knob is turned
    reason = _no_knobs(problem)
    drawn |= {"knobs": None if reason else _knobs(problem, data), "noKnobs": reason}
    drawn["mostNumbers"] = MOST_NUMBERS
    drawn |= {"mostProducts": MOST_PRODUCTS, "computes": False}
    drawn |= {"mostElements": MOST_ELEMENTS, "mostFlops": MOST_FLOPS}
    numbers = sum(map(prod, (problem.input_shape, problem.filter_shape, problem.output_shape)))
    products = problem.flops // problem.flops_of_product
    if (
        drawn["knobs"]
        and drawn["values"].keys() >= {"x", "w", "dy"}
        and not drawn["knobs"]["given"]
        and problem.dtype == "float32"
        and numbers <= MOST_NUMBERS
        and products <= MOST_PRODUCTS
    ):
        drawn |= {"computes": True, "exact": {}}
        for operand in OPERANDS:
            del drawn["values"][operand]
        if len(json.dumps(drawn["values"])) > _MOST_RESULTS:
            for name, packed in drawn["values"].items():
                key = key_of(name, drawn["k"], drawn["c"])
                packed["planes"] = {key: packed["planes"][key]}
    return drawn


def _no_knobs(problem: ConvProblem) -> str:
    """Return why the page of a layer has no knobs; empty if it has knobs."""
    for axis in problem.axes:
        if axis.filter * axis.output > _MOST_PAIRS:
            return (
                f"This page has no knobs: axis {axis.name} has {axis.filter:,} taps and "
                f"{axis.output:,} outputs. The knobs support at most {_MOST_PAIRS:,} pairs of a "
                "tap and an output."
            )
        if max(axis.stride, axis.dilation) > _MOST_COUNTED:
            return (
                f"This page has no knobs: axis {axis.name} has stride {axis.stride} and dilation "
                f"{axis.dilation}. A browser counts exactly up to 2^53 only."
            )
    return ""


def _knobs(problem: ConvProblem, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer and its values for the knobs."""
    shapes = {"input_shape": problem.input_shape, "filter_shape": problem.filter_shape}
    layer = {**shapes, **problem.keywords}
    state: dict[str, Any] = {"layer": layer, "values": "normal", "seed": "0", "given": []}
    state["dtype"] = problem.dtype
    if isinstance(data, Values):
        state |= {"values": data.kind or "normal", "seed": str(data.seed)}
        state |= {"given": list(data.given), "large": data.large}
    return state


def _text(document: Document) -> str:
    """Return the text of the explanation without its title, with headings of level 2."""
    text = Document("", document.sections).html()
    return text.replace("<h4>", "<h2>").replace("</h4>", "</h2>")


def _script(name: str) -> str:
    """Return a script without its comments, empty lines and indentation."""
    return re.sub(r"^\s*//.*\n|^\s+|(?<=[;,{)>]) +// .*$", "", _asset(name), flags=re.MULTILINE)


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
