"""Interactive HTML page of a layer, for pointer, touch and keyboard, without network access.

The page draws a Scene; module scene defines its planes.  The knobs of a page are controls that
change the sizes, the settings and the values of the layer.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import webbrowser
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

from cupyconv.errors import ConvError
from cupyconv.explaining import javascript, scene, translate
from cupyconv.explaining.scene import DRAWN, RESULTS, Limits, Scene
from cupyconv.explaining.terms import Element, position_text
from cupyconv.explaining.values import MOST_ELEMENTS, MOST_FLOPS, OPERANDS, Values
from cupyconv.markup import Document, escape
from cupyconv.problem import ConvProblem

_MOST_COUNTED = 2**53
"""Largest integer up to which a browser represents every integer exactly."""

_SCRIPTS = ("rules.js", "tensors.js", "scenes.js", "page.js", "knobs.js", "stories.js")
"""Scripts of the page, in the order in which they run."""

MOST_NUMBERS, MOST_PRODUCTS = 200_000, 40_000_000
"""Largest number of elements of x, w and dy together, and of products in a pass, for which the
page's script computes all values; and of (output, tap) pairs on an axis with knobs (hand-set).

32 million products take 0.8 s in Chromium on one CPU core (measured).
"""

_MOST_RESULTS = 40_000
"""Largest number of characters of the library's results on a page whose script computes all values
(hand-set).  If there are more, the page contains only the results of the pair of channels that is
shown first."""

_LIMITS = (
    DRAWN,
    *(Limits(channels) for channels in (8, 6, 5)),
    *(Limits(5, *sizes) for sizes in ((12, 9, 24), (10, 7, 12), (8, 5, 8), (6, 3, 5))),
)
"""Limits of a page, tried in this order until the page is small enough (hand-set)."""

_MOST_BYTES = 199_000
"""Largest size of a page, in bytes (hand-set).  If the last limits give a larger page, the values
of some planes are left out."""

# The policy forbids the page to load anything, even if a title contains HTML.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html(
    problem: ConvProblem,
    data: Mapping[str, Any],
    document: Document,
    element: Element | None = None,
    is_transposed: bool = False,
) -> str:
    """Return the page of an explanation, as one file.

    Args:
        problem: the layer.
        data: values of the tensors by name, as far as they are known.
        document: text of the explanation.
        element: element to show first.
        is_transposed: whether the layer is the transposed layer that reverses the problem.

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
    programs = "".join(
        f"<details><summary>{escape(entry.framework)}</summary>"
        f"<pre>{escape(entry.program)}</pre></details>"
        for entry in translate.translations(problem, is_transposed)
    )
    content = {
        "title": escape(document.title or scene.heading(problem, is_transposed)),
        "equivalent": escape(scene.equivalent(problem)) if is_transposed else "",
        "policy": escape(_POLICY),
        "style": _asset("page.css"),
        "script": javascript.rules() + "".join(map(_script, _SCRIPTS)),
        "explanation": _text(document),
        "programs": programs,
    }
    filled = (*content.values(), _asset("page.html"))
    left = _MOST_BYTES - sum(len(text.encode()) for text in filled)
    content["scene"] = _scene(problem, data, element, left, is_transposed)
    # Fill all places in one pass, so that filled-in text is never filled again.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: content[place[1]], _asset("page.html"))


def framed(attributes: str) -> str:
    """Return HTML that shows a page in a frame as high as the page's content.

    Where scripts do not run, the frame keeps the height of its style.

    Args:
        attributes: attributes of the frame, which name the page.
    """
    # The page sends its height whenever it changes.
    script = (
        "(frame => addEventListener('message', ({ source, data }) => {"
        "if (source === frame.contentWindow && data.cupyconvHeight)"
        "frame.style.height = `${data.cupyconvHeight}px`}))"
        "(document.currentScript.previousElementSibling)"
    )
    return f"<iframe {attributes}></iframe><script>{script}</script>"


class Page:
    """A page that Jupyter shows below the cell."""

    def __init__(self, content: str) -> None:
        self.content = content

    def _repr_html_(self) -> str:
        # A frame isolates the styles and scripts of the page and of the notebook.
        return framed(
            f'srcdoc="{escape(self.content)}" sandbox="allow-scripts" '
            'style="width:100%;height:52rem;border:0" title="interactive explanation"'
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
    problem: ConvProblem,
    data: Mapping[str, Any],
    element: Element | None,
    most_bytes: int,
    is_transposed: bool,
) -> str:
    """Return the data of the page as JSON in ASCII, for a script of the page.

    The drawn part is chosen so that the text has at most ``most_bytes`` bytes, if possible.
    """
    tried: list[tuple[Limits, Kept]] = [(limits, "all") for limits in _LIMITS]
    for limits, kept in [*tried, (_LIMITS[-1], "sums"), (_LIMITS[-1], "pair")]:
        content = _content(scene.scene(problem, data, element, limits, is_transposed), limits, kept)
        # Escape "<": in a script, "</" and "<!--" change how a browser reads the rest.
        text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
        if len(text) <= most_bytes:
            break
    return text


Kept = Literal["all", "sums", "pair"]
"""Drawn planes whose values a page contains: all, those of the sums that the page shows first, or
those of the pair of channels that it shows first."""


def _is_kept(drawn: Scene, tensor: str, k: int, c: int, kept: Kept) -> bool:
    """Return whether the page contains the values of a plane.

    The sums that the page shows first read all planes of x and dy.  Of w and dw, they read the
    planes with the filter or with the channel that is shown first.
    """
    if kept == "pair":
        return drawn.index(tensor, k, c) == drawn.index(tensor, drawn.k, drawn.c)
    return kept == "all" or tensor not in ("w", "dw") or k == drawn.k or c == drawn.c


def _content(drawn: Scene, limits: Limits, kept: Kept) -> dict[str, Any]:
    """Return the data of the page: the first layer, its first elements, its values, and limits."""
    problem, data = drawn.problem, drawn.data
    reason, knobs = _no_knobs(problem), _knobs(problem, data)
    numbers = sum(map(prod, (problem.input_shape, problem.filter_shape, problem.output_shape)))
    computes = (
        not reason
        and not knobs["given"]
        and not {*OPERANDS} & {*drawn.missing}
        and problem.dtype == "float32"
        and numbers <= MOST_NUMBERS
        and problem.flops // problem.flops_of_product <= MOST_PRODUCTS
    )
    known = [tensor for tensor in RESULTS if tensor not in drawn.missing]
    library = {tensor: _packed(drawn, tensor, kept, 10) for tensor in known}
    if computes and len(json.dumps(library)) > _MOST_RESULTS:
        library = {tensor: _packed(drawn, tensor, "pair", 10) for tensor in known}
    values: dict[str, Any] = {}
    if not computes:
        for tensor in OPERANDS:
            if tensor not in drawn.missing:
                values[tensor] = _packed(drawn, tensor, kept, 17)
        for tensor in known:
            if isinstance(data, Values) and _leaves_out(drawn, tensor):
                exact = data.compute(tensor, "float64")
                values[tensor] = _packed(drawn, tensor, kept, 17, exact)
    origin = (0,) * (2 + problem.spatial_rank)
    where = f", where {', '.join(map(position_text, problem.axes))}"
    directions = {}
    for tensor, direction in drawn.directions.items():
        element = Element(problem, tensor, origin, is_transposed=drawn.is_transposed)
        directions[tensor] = {"at": direction.at, "rule": element.rule + where}
    return {
        **{name: getattr(drawn, name) for name in ("opened", "image", "k", "c")},
        "directions": directions,
        "passes": {name: each.pass_._asdict() for name, each in drawn.directions.items()},
        "isTransposed": drawn.is_transposed,
        "dtype": problem.dtype,
        "knobs": knobs,
        "noKnobs": reason,
        "computes": computes,
        "library": library,
        "values": values,
        "missing": drawn.missing,
        "source": drawn.source,
        "limits": limits._asdict(),
        "numbers": translate.NUMBERS,
        "turned": DRAWN._asdict(),  # limits of the scenes of turned knobs
        "most": {
            "numbers": MOST_NUMBERS,
            "products": MOST_PRODUCTS,
            "elements": MOST_ELEMENTS,
            "flops": MOST_FLOPS,
        },
    }


def _leaves_out(drawn: Scene, tensor: str) -> bool:
    """Return whether some terms of a drawn result are not drawn."""
    if tensor == "dw":
        whole = drawn.problem.N == 1
    else:
        whole = None not in (drawn.channels if tensor == "y" else drawn.filters)
    return not whole or any(
        len(meeting.pairs) < meeting.count
        for along in drawn.directions[tensor].meetings
        for meeting in along.values()
    )


def _packed(
    drawn: Scene, tensor: str, kept: Kept, digits: int, array: Any = None
) -> dict[str, Any]:
    """Return the drawn positions of a tensor along each axis, and the values of each plane there.

    Args:
        drawn: the scene.
        tensor: name of the tensor.
        kept: planes to return.
        digits: number of significant digits.
        array: values of the whole tensor, to use instead of the scene's.
    """
    import numpy as np

    at: list[set[int]] = [set() for _ in drawn.problem.axes]
    for direction in drawn.directions.values():
        for name, plane in zip(direction.tensors, direction.planes, strict=True):
            if name == tensor:
                for positions, places in zip(at, plane, strict=True):
                    positions |= {place for place in places if place is not None and place >= 0}
    where = [sorted(positions) for positions in at]
    filters = [k for k in drawn.filters if k is not None]
    channels = [c for c in drawn.channels if c is not None]
    if tensor in ("w", "dw"):
        pairs = [(k, c) for k in filters for c in channels if drawn.meet(k, c)]
    elif tensor in ("x", "dx"):
        pairs = [(drawn.k, c) for c in channels]
    else:
        pairs = [(k, drawn.c) for k in filters]
    planes = {}
    for k, c in pairs:
        if _is_kept(drawn, tensor, k, c, kept):
            numbers = drawn.plane(tensor, k, c, array)[np.ix_(*where)].ravel()
            planes[drawn.key(tensor, k, c)] = [
                _number(scene.plain(value), digits) for value in numbers
            ]
    return {"at": where, "planes": planes}


def _number(value: float, digits: int) -> float | int | str:
    """Return a number for JSON with some significant digits; NaN and infinities become strings."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    whole = value == int(value) and abs(value) < 2**53
    return int(value) if whole else float(f"{value:.{digits}g}")


def _no_knobs(problem: ConvProblem) -> str:
    """Return why the page of a layer has no knobs; empty if it has knobs."""
    for axis in problem.axes:
        if axis.filter * axis.output > MOST_NUMBERS:
            return (
                f"This page has no knobs: axis {axis.name} has {axis.filter:,} taps and "
                f"{axis.output:,} outputs. The knobs support at most {MOST_NUMBERS:,} pairs of a "
                "tap and an output."
            )
        if max(axis.stride, axis.dilation) > _MOST_COUNTED:
            return (
                f"This page has no knobs: axis {axis.name} has stride {axis.stride} and dilation "
                f"{axis.dilation}. A browser counts exactly up to 2^53 only."
            )
    return ""


def _knobs(problem: ConvProblem, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first state of the knobs: the layer, and the origin of its values."""
    shapes = {"input_shape": problem.input_shape, "filter_shape": problem.filter_shape}
    state: dict[str, Any] = {"layer": shapes | problem.keywords, "dtype": problem.dtype}
    state |= {"values": "normal", "seed": "0", "given": []}
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
