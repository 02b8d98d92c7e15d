"""HTML page of several layers, such as the convolutions of a model, with an explanation of each."""

from __future__ import annotations

from collections.abc import Sequence

from cupyconv.explaining.explanation import Explanation, explain
from cupyconv.explaining.onnx_model import Model, ModelLayer
from cupyconv.explaining.scene import heading
from cupyconv.markup import STYLE, Document, Table, escape
from cupyconv.planning import Plan
from cupyconv.planning.plan import workspace_notes
from cupyconv.problem import shape_text

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
:root{color-scheme:light dark}
body{margin:2rem auto;padding:0 1rem;max-width:60rem}
summary{cursor:pointer;padding:.35em 0}
summary span{opacity:.7}
details{border-bottom:1px solid rgba(128,128,128,.35)}
"""


def html(name: str, model: Model, planned: Sequence[tuple[ModelLayer, Sequence[Plan]]]) -> str:
    """Return the page of a model, as one HTML file without scripts.

    Args:
        name: name of the file.
        model: the model.
        planned: layers to show, each with its plans for the devices to show.
    """
    unread = tuple(
        (node.name, node.settings or node.operator, node.reason)
        for node in (*model.unknown, *model.left_out)
    )
    parts = [
        f"<h1>{escape(name)}</h1>",
        f"<p>{len(model.nodes)} convolutions, {model.parameters:,} parameters. Select a layer "
        "for its explanation.</p>",
        *(_layer(layer, plans, model.share(layer)) for layer, plans in planned),
    ]
    if unread:
        parts += [
            "<h2>Layers that were not read</h2>",
            Table(("layer", "settings", "why"), unread).html(),
        ]
    return _page(name, parts)


def layers_page(name: str, explanations: Sequence[Explanation]) -> str:
    """Return a page of several explained layers, as one HTML file without scripts.

    Args:
        name: heading of the page.
        explanations: the layers, in the order of the page.
    """
    parts = [
        f"<h1>{escape(name)}</h1>",
        f"<p>{len(explanations)} layers. Select a layer for its explanation.</p>",
    ]
    for number, explanation in enumerate(explanations, 1):
        shapes = escape(heading(explanation.problem, explanation.is_transposed))
        parts.append(
            f"<details><summary><b>{escape(explanation.title or f'layer {number}')}</b> {shapes}"
            f"</summary>{Document('', explanation.document.sections).html()}</details>"
        )
    return _page(name, parts)


def _page(name: str, parts: Sequence[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">'
        f"<title>{escape(name)}</title><style>{STYLE}{_STYLE}</style></head>"
        f'<body class="cupyconv">{"".join(parts)}</body></html>\n'
    )


def _layer(layer: ModelLayer, plans: Sequence[Plan], share: float) -> str:
    """Return the foldable entry of a layer, with its explanation and its plans."""
    shapes = (
        f"{shape_text(layer.input_shape)} * {shape_text(layer.problem.filter_shape)} -> "
        f"{shape_text(layer.output_shape)}"
    )
    reverses = layer.is_transposed
    explanation = explain(layer.problem, values=None, transposed=reverses).document
    kernels = "".join(
        f"<h4>Kernels on {escape(plan.place)}</h4>{plan.table.html()}{plan.origin.html()}"
        for plan in plans
    )
    remarks = (*layer.notes, *workspace_notes(("", plan) for plan in plans))
    notes = "".join(f"<p>{escape(note)}</p>" for note in remarks)
    return (
        f"<details><summary><b>{escape(layer.name)}</b> {escape(layer.operator)} {shapes} "
        f"<span>{layer.parameters:,} parameters, {share:.1%} of the FLOP</span></summary>"
        f"{notes}{Document('', explanation.sections).html()}{kernels}</details>"
    )
