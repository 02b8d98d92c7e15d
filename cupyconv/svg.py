"""Writer of SVG documents: shapes and texts on a canvas that grows with the drawing.

The module does not depend on convolutions.  Lengths are in pixels.  For any text, the document is
well formed and contains no control characters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cupyconv.markup import escape, visible


def themed(name: str, light: str, dark: str) -> str:
    """Return a CSS colour that follows the colour scheme of the page around the picture.

    Programs that do not know light-dark() draw the light colour.
    """
    return f"{name}:{light};{name}:light-dark({light},{dark})"


Attributes = dict[str, str | float]
"""Attributes of an SVG element, keyed by name.

Names have underscores instead of dashes, and ``kind`` is the attribute ``class``.  Attributes whose
value is an empty string are not written.
"""

_TITLE_SIZE, _HEAD_SIZE, _SIZE = 9.6, 7.8, 6.3
"""Largest width of a character in pixels: in texts of the class "title", of "head", and others."""


@dataclass
class Canvas:
    """Drawn elements and their extent."""

    parts: list[str] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

    def reach(self, x: float, y: float) -> None:
        """Grow the canvas to include this point."""
        self.width, self.height = max(self.width, x), max(self.height, y)

    def shape(self, name: str, title: str = "", /, **attributes: str | float) -> None:
        """Draw the SVG element ``name`` with these attributes; ``title`` is its tooltip."""
        self.parts.append(
            _element(name, f"<title>{escape(title)}</title>" if title else "", attributes)
        )

    def text(
        self, x: float, y: float, text: str, kind: str = "", **attributes: str | float
    ) -> None:
        """Draw a line of text.

        The canvas grows to include a text that begins at ``x``.  It does not grow for a text with
        the class "in" (centred at ``x``) or "end" (ends at ``x``), or with ``text_anchor``.

        Args:
            x, y: position of the text on its baseline.
            text: the text.
            kind: classes of the element, separated by spaces.
            attributes: further attributes of the element.
        """
        text = visible(text)  # escapes change the drawn length
        place: Attributes = {"x": x, "y": y, "kind": kind}
        self.parts.append(_element("text", escape(text), place | attributes))
        words = kind.split()
        if not {"in", "end"} & set(words) and "text_anchor" not in attributes:
            size = _TITLE_SIZE if "title" in words else _HEAD_SIZE if "head" in words else _SIZE
            self.reach(x + size * len(text), y + 4)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str = "",
        title: str = "",
        **attributes: str | float,
    ) -> None:
        """Draw a rectangle."""
        size: Attributes = {"x": x, "y": y, "width": width, "height": height, "kind": kind}
        self.shape("rect", title, **size, **attributes)
        self.reach(x + width, y + height)

    def line(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        kind: str = "",
        **attributes: str | float,
    ) -> None:
        """Draw a straight line."""
        self.shape("line", x1=x, y1=y, x2=to_x, y2=to_y, kind=kind, **attributes)

    def document(
        self,
        label: str,
        *,
        margin: float = 0.0,
        size: tuple[float, float] | None = None,
        style: str = "",
        defs: str = "",
        **attributes: str | float,
    ) -> str:
        """Return the SVG document, with a background.

        Args:
            label: description of the picture, for readers who cannot see it.
            margin: space to the right of the drawn elements and below them.
            size: width and height; by default, the extent of the elements plus the margin.
            style: CSS of the document.
            defs: SVG elements as text, to insert before the background.
            attributes: further attributes of the root element.
        """
        wide, high = size or (self.width + margin, self.height + margin)
        root: Attributes = {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {wide:g} {high:g}",
            "width": wide,
            "height": high,
            "role": "img",
            "aria_label": label,
        }
        paper = _element(
            "rect", "", {"width": wide, "height": high, "kind": "paper", "fill": "#fff"}
        )
        head = f"<title>{escape(label)}</title>{f'<style>{style}</style>' if style else ''}"
        content = "\n".join(["", *filter(None, (head, defs, paper, *self.parts)), ""])
        return _element("svg", content, root | attributes) + "\n"


def _element(name: str, content: str, attributes: Attributes) -> str:
    text = "".join(
        f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value != ""
    )
    return f"<{name}{text}>{content}</{name}>" if content else f"<{name}{text}/>"


def _name(key: str) -> str:
    return "class" if key == "kind" else key.replace("_", "-")


def _value(value: str | float) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.6g}"
