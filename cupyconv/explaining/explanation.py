"""``cupyconv.explain``: reasons for the shape and the values of every tensor of a layer."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cupyconv import arrays, files
from cupyconv.errors import ConvError, ConvTypeError, naming_arguments, shown
from cupyconv.explaining import adjoints, figure, maps, page, prose, shapes, terms, translate
from cupyconv.explaining import transposed as transposed_layer
from cupyconv.explaining import values as numbers
from cupyconv.explaining.adjoints import AdjointAxis
from cupyconv.explaining.page import Page
from cupyconv.explaining.terms import Element
from cupyconv.explaining.translate import Translation
from cupyconv.explaining.values import OPERANDS, Kind, Values
from cupyconv.markup import Document, Section, Table
from cupyconv.problem import PASSES, RESULT, ConvProblem, integer, require_problem, shape_text


@naming_arguments
def explain(
    problem: ConvProblem,
    *,
    x: Any = None,
    w: Any = None,
    dy: Any = None,
    y: Any = None,
    dx: Any = None,
    dw: Any = None,
    title: str = "",
    values: Kind | None = "normal",
    seed: int = 0,
    large: bool = False,
    transposed: bool = False,
) -> Explanation:
    """Explain the shape and the values of every tensor of a layer.

    Args:
        problem: the layer.
        x, w, dy: NumPy or CuPy arrays in the problem's formats, which are converted to its dtype;
            random arrays by default.  With ``transposed``, these are the tensors of the transposed
            layer.
        y, dx, dw: results to show next to the sums of products; computed by default.
        title: first line of the explanation.
        values: kind of random numbers, "normal" or "integers", for operands that are not passed;
            None for an explanation without values.
        seed: seed of the random numbers, an integer from 0 to 2^63 - 1.
        large: compute the values whatever the size of the layer; by default, the explanation
            omits values that take more than a few seconds, and says so.
        transposed: explain the transposed layer whose forward pass is the input gradient of the
            problem: the size of its result, and which tensor of the problem each of its tensors
            is.  ``element`` and ``map`` use the transposed layer's names.

    Returns:
        an Explanation: text with str() or print(), HTML in Jupyter, plain data with ``to_dict()``.
        ``element("dF[0,0,0,0]")`` lists the products that add up to one element of dw,
        ``map("dx")`` counts the products of every element of dx, ``code("pytorch")`` returns the
        layer in another framework, and ``svg()`` and ``page()`` draw the layer.

    Raises:
        ConvTypeError: ``problem`` is not a ConvProblem, an array has an unsupported type, the title
            is not a string, or the seed is not an integer.
        ConvError: the shape of an array differs from the problem's, ``values`` is unknown, or the
            seed is negative.

    >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 5, 100, 100), (10, 5, 5, 5)))
    >>> print(explanation.text().splitlines()[0])
    x 1x5x100x100 * w 10x5x5x5 -> y 1x10x96x96
    """
    require_problem("explain", problem)
    if not isinstance(title, str):
        raise ConvTypeError(f"title must be a string: got {shown(title)}. Omit it for no title")
    if values is not None:
        numbers.require_kind("values", values)
    seed = integer("seed", seed)
    if seed < 0:
        raise ConvError("seed must be at least 0", f"got {seed}", "Use 0")
    tensors = {"x": x, "w": w, "dy": dy, "y": y, "dx": dx, "dw": dw}
    data = _checked_arrays(problem, tensors, bool(transposed))
    known = Values(problem, data, values, seed, bool(large))
    return Explanation(problem, title, known, bool(transposed))


def _checked_arrays(
    problem: ConvProblem, tensors: Mapping[str, Any], is_transposed: bool
) -> dict[str, Any]:
    """Return the passed tensors by their names in the problem, after checking their shapes.

    Raises:
        ConvError, ConvTypeError: an array is invalid, as in ``explain``.
    """
    passed = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not passed:
        return {}
    import numpy as np

    shapes_of = {"x": problem.input_shape, "w": problem.filter_shape, "y": problem.output_shape}
    layer, data = "transposed layer" if is_transposed else "problem", {}
    taken = {name: arrays.take(name, tensor)[0] for name, tensor in passed.items()}
    for name, array in taken.items():
        own = terms.CONVOLUTION_NAMES[name] if is_transposed else name
        expected = shapes_of[own[-1]]  # a gradient has the shape of its tensor
        if tuple(array.shape) != expected:
            raise ConvError(
                f"{name} must have the shape of the {layer}'s {name}",
                f"got {shape_text(array.shape)}, the {layer} has {shape_text(expected)}",
                f"Pass an array of {shape_text(expected)}, or make a problem for this array",
            )
        if array.dtype.kind == "c" and not problem.is_complex:
            raise ConvTypeError(
                f"{name} is complex ({array.dtype}), but the problem is {problem.dtype}. "
                f"Make the problem with dtype={str(array.dtype)!r}"
            )
        kind = arrays.numpy_dtype(problem.dtype)
        if name in numbers.OPERANDS and array.dtype != kind:
            with np.errstate(over="ignore"):  # overflow to infinity, as a layer of this dtype does
                taken[name] = arrays.on_host(array).astype(kind)
        data[own] = taken[name]
    return data


@dataclass(frozen=True)
class Explanation:
    """Explanation of a layer, returned by ``explain``.

    Attributes:
        problem: the layer.
        title: line above the explanation.
        data: values of the problem's x, w, dy, y, dx and dw by name, as far as they are known;
            random operands and results are computed when they are first read.
        is_transposed: whether the transposed layer is explained.

    >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 2, 7), (4, 2, 3), stride=2))
    >>> explanation.question, explanation.middle
    ('dx', 'dw[2,1,1]')
    >>> [translation.framework for translation in explanation.translations]
    ['TensorFlow', 'PyTorch', 'JAX', 'ONNX']
    """

    problem: ConvProblem
    title: str = ""
    data: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    is_transposed: bool = False

    # -- parts -------------------------------------------------------------------------------------

    def element(self, name: str, *, x: Any = None, w: Any = None, dy: Any = None) -> Element:
        """Explain one element of y, dx or dw as a sum of products.

        Args:
            name: tensor and indices, such as "dF[3,1,0,2]" (or dw), "dX[0,0,5,5]" or
                "O[0,0,1,1]" (or y).
            x, w, dy: arrays to use instead of those passed to ``explain``.

        Raises:
            ConvError: the element does not exist; the message lists the valid indices.
            ConvError, ConvTypeError: an array is invalid, as in ``explain``.

        >>> x, w, dy = np.arange(4.0).reshape(1, 1, 4), np.ones((1, 1, 3)), np.ones((1, 1, 2))
        >>> explanation = cupyconv.explain(cupyconv.ConvProblem(x.shape, w.shape), x=x, w=w, dy=dy)
        >>> for line in str(explanation.element("dw[0,0,1]")).splitlines()[11:14]:
        ...     print(line.strip())
        dy[0,0,0] * x[0,0,1]  =  1 *  1 =   1
        dy[0,0,1] * x[0,0,2]  =  1 *  2 =   2
        sum of 2 products = 3
        """
        changed = _checked_arrays(self.problem, {"x": x, "w": w, "dy": dy}, self.is_transposed)
        element = terms.parse(self.problem, name, self.is_transposed)
        data = self.data
        if changed:
            # Drop the results, which belong to the previous operands.
            data = {**{key: data[key] for key in OPERANDS if key in data}, **changed}
        return replace(element, data=data)

    def map(self, tensor: str = "dx") -> maps.TermMap:
        """Return the number of products that add up to each element of dx, dw or y.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.map("dx").array().tolist()
        [1, 2, 3, 2, 1]
        """
        return maps.term_map(self.problem, tensor, self.is_transposed)

    def code(self, framework: str) -> Translation:
        """Return the layer as a complete program in "tensorflow", "pytorch", "jax" or "onnx".

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.code("pytorch").call
        'F.conv1d(X, W, padding=0, stride=1, dilation=1, groups=1)'
        """
        return translate.translation(self.problem, framework, self.is_transposed)

    def svg(self, element: str = "") -> str:
        """Return a picture of the layer and its gradients.

        Args:
            element: element to mark, such as "dF[3,1,0,2]"; by default, one element of each result.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.svg()[:4], "dw[0,0,1]" in explanation.svg("dF[0,0,1]")
        ('<svg', True)
        """
        marked = self._marked(element)
        return figure.svg(self.problem, self.data, self.title, marked, self.is_transposed)

    def page(self, element: str = "") -> str:
        """Return an interactive HTML page, which works offline.

        Args:
            element: element to show first, such as "dF[3,1,0,2]".

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.page("dw[0,0,1]")[:15]
        '<!doctype html>'
        """
        marked = self._marked(element)
        return page.html(self.problem, self.data, self.document, marked, self.is_transposed)

    def _marked(self, element: str) -> Element | None:
        return None if isinstance(element, str | None) and not element else self.element(element)

    def show(self, element: str = "") -> Page:
        """Show the page: below the cell in Jupyter, otherwise in a browser.

        Args:
            element: element to show first, such as "dF[3,1,0,2]".

        Raises:
            ConvError: no browser was found.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> page = explanation.show("dw[0,0,1]")  # opens a browser
        """
        content = self.page(element)
        if not page.in_notebook():
            page.open_in_browser(content)
        return Page(content)

    def save(self, path: str | Path, element: str = "") -> None:
        """Write ``svg()`` or ``page()`` to a .svg or .html file.

        Raises:
            ConvError: the suffix is not .svg, .html or .htm.
            OSError: the file cannot be written.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.save("layer.svg")
        >>> from pathlib import Path
        >>> Path("layer.svg").read_text()[:4]
        '<svg'
        """
        path = Path(path)
        if path.suffix.lower() not in (".svg", ".html", ".htm"):
            raise ConvError(
                "the file of an explanation must end in .svg or .html",
                f"got {path}",
                "Use one of these suffixes",
            )
        draw = self.svg if path.suffix.lower() == ".svg" else self.page
        files.put(path, draw(element).encode())

    # -- text --------------------------------------------------------------------------------------

    @cached_property
    def middle(self) -> str:
        """Name of the example element of dw, whose indices are in the middle of every axis."""
        return prose.middle(self.problem, self.data).name

    @property
    def question(self) -> str:
        """Name of the gradient that is explained first: "dw" or "dx".

        For a layer without stride, dilation and padding, the channels of dw are harder to
        understand than the size of dx. For other layers, the size of dx is harder.
        """
        return shapes.question(self.problem)

    @cached_property
    def document(self) -> Document:
        """All sections of the explanation, as a document."""
        sections = prose.sections(self.problem, self.data, self.is_transposed)
        return Document(self.title, sections)

    def text(self, width: int = 100) -> str:
        """Return the explanation in lines of at most ``width`` characters.

        Programs and formulas are not wrapped.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> print(explanation.text(width=60).splitlines()[0])
        x 1x1x5 * w 1x1x3 -> y 1x1x3
        """
        return self.document.text(width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        """Return a figure and the text for Jupyter; an untrusted notebook shows only the text."""
        try:
            figure = self.svg()
        except ConvError:  # the layer is too large to draw
            return self.document.html()
        # Use an image: in untrusted notebooks, the sanitizer removes the tags of an <svg>, but
        # shows the words inside it.
        encoded = base64.b64encode(figure.encode()).decode()
        # The image has its own size: in a smaller one, the numbers would be unreadable.
        image = (
            f'<div style="overflow-x:auto"><img src="data:image/svg+xml;base64,{encoded}" '
            'style="max-width:none" alt="Figure of the layer; the text below describes it."/></div>'
        )
        return f"<div>{image}{self.document.html()}</div>"

    @cached_property
    def translations(self) -> tuple[Translation, ...]:
        """The layer in every supported framework."""
        return translate.translations(self.problem, self.is_transposed)

    # -- data --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data, ready for JSON.

        >>> explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
        >>> explanation.to_dict()["shapes"]["dw"]
        [1, 1, 3]
        """
        problem = self.problem
        reasons = transposed_layer.reasons if self.is_transposed else shapes.reasons_with_addend
        explained = reasons(problem)
        return {
            "title": self.title,
            "shapes": {entry.tensor: list(entry.shape) for entry in explained},
            "reasons": {entry.tensor: entry.reason for entry in explained},
            "answers": {
                "channels": _plain(prose.channels_section(problem, self.data)),
                "sizes": _plain(prose.sizes_section(problem)),
            },
            "axes": [
                {
                    **shapes.axis_dict(axis),
                    "above_smallest": axis.input - axis.first_input_size_for(axis.output),
                    "unread_after": axis.unread_after,
                    "input_gradient": _adjoint_dict(
                        adjoints.input_gradient_axis(axis), axis.output, axis.stride
                    ),
                    "filter_gradient": _adjoint_dict(
                        adjoints.filter_gradient_axis(axis), axis.input, 1
                    ),
                }
                for axis in problem.axes
            ],
            "passes": [
                {"pass": pass_, "gives": RESULT[pass_], **problem.gemm(pass_)._asdict()}
                for pass_ in PASSES
            ],
            "frameworks": [entry.to_dict() for entry in self.translations],
            "transposed": transposed_layer.to_dict(problem) if self.is_transposed else None,
        }


def _adjoint_dict(adjoint: AdjointAxis, size: int, spread: int) -> dict[str, Any]:
    """Return an axis of a gradient's convolution for JSON.

    Args:
        adjoint: the axis.
        size: number of elements of the first operand before it is dilated with zeros.
        spread: dilation of the first operand.
    """
    rule = adjoint.rule
    return {
        "first_operand": size,
        "spread": spread,
        "spread_size": rule.input,
        "second_operand": rule.filter,
        "stride": rule.stride,
        "dilation": rule.dilation,
        "padding": list(adjoint.padding),
        "formulas": list(adjoint.formulas),
        "size": rule.output,
    }


def _plain(section: Section) -> list[str]:
    return [section.title, *(b.text for b in section.blocks if not isinstance(b, Table))]
