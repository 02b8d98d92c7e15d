"""``cupyconv.diagnose``: the convention by which another program computed given values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from cupyconv import arrays, formats
from cupyconv.errors import ConvError, ConvTypeError, python_argument, require_word
from cupyconv.explaining import conventions, translate
from cupyconv.explaining.conventions import PLAIN, Convention, Finish, Order, Rule, axes_text
from cupyconv.explaining.search import LEAST_EVIDENCE, ROUNDINGS, Comparison, Search
from cupyconv.explaining.shapes import listed
from cupyconv.explaining.terms import SHOWN_FIRST, SHOWN_LAST, counted_large, indexed, plain
from cupyconv.formats import SPATIAL_AXES
from cupyconv.markup import Block, Document, Paragraph, Section, Table, Verbatim
from cupyconv.problem import (
    ITEMSIZE,
    ConvOptions,
    ConvProblem,
    counted,
    require_output,
    shape_text,
)
from cupyconv.remedies import Names

OPERANDS = {"y": ("x", "w"), "dx": ("w", "dy"), "dw": ("x", "dy"), "db": ("dy",)}
"""Tensors from which each result is computed."""

ACTIVATIONS = (None, "relu", "silu", "gelu")
"""Activations that a layer may have."""

LARGEST = 1e70
"""Largest magnitude of an array: float64 has the sum of 1e28 squares of products of such values."""

SHOWN_TERMS = SHOWN_FIRST + SHOWN_LAST
"""Largest number of products of an element that are printed."""


def diagnose(
    x: Any = None,
    w: Any = None,
    dy: Any = None,
    *,
    y: Any = None,
    dx: Any = None,
    dw: Any = None,
    db: Any = None,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: Any = 1,
    data_format: Any = None,
    filter_format: Any = None,
    transposed: bool = False,
    output_padding: Any = None,
    activation: str | None = None,
    advance: Callable[[float], None] | None = None,
) -> Diagnosis:
    """Find the convention by which another program computed y, dx, dw or db.

    The arguments describe the layer as you understand it.  If the values differ, the search varies
    the padding and its side, stride, dilation, groups, the order of axes, a flipped filter, a
    transposed layer, bias, activation, scale, conjugation, and the values of the padding.

    Args:
        x, w, dy: operands.
        y, dx, dw, db: results of the other program, at least one: y of x and w, dx of w and dy, dw
            of x and dy, db of dy.
        bias: bias of the layer, one value per channel of y.
        stride, padding, dilation, groups, data_format, filter_format: the layer, as for
            ``ConvProblem``.
        transposed: whether the layer is transposed; w then has the format of the convolution that
            the layer reverses.
        output_padding: output padding of a transposed layer; by default, that of y.
        activation: "relu", "silu" or "gelu" for a layer whose y has this activation; only for y.
        advance: function that is called now and then with the share of the search that is done,
            from 0 to 1.

    Returns:
        a Diagnosis: text with str() or print(), HTML in Jupyter, plain data with ``to_dict()``.

    Raises:
        ConvError: a result or one of its operands is missing, an operand is not finite, or an
            argument is invalid.
        ConvTypeError: an argument is no array of numbers.

    >>> x, w = np.arange(25.0).reshape(1, 1, 5, 5) ** 2, np.arange(9.0).reshape(1, 1, 3, 3)
    >>> y = cupyconv.conv_forward(x, w, padding=1)  # values of another program
    >>> diagnosis = cupyconv.diagnose(x, w, y=y)
    >>> diagnosis.agrees
    False
    >>> diagnosis.findings[0].differences
    {'padding': ('0', '1')}
    """
    given = {"x": x, "w": w, "dy": dy, "y": y, "dx": dx, "dw": dw, "db": db, "bias": bias}
    taken = {name: _taken(name, value) for name, value in given.items() if value is not None}
    tensors = {name: array for name, (array, _) in taken.items()}
    results = [name for name in OPERANDS if name in tensors]
    if not results:
        raise ConvError(
            "a diagnosis must have a result of the other program",
            "y, dx, dw and db are missing",
            "Pass one of them",
        )
    require_word("activation", activation, ACTIVATIONS)
    gradients = [name for name in results if name != "y"]
    if activation is not None and gradients:
        raise ConvError(
            "only y may have an activation in a diagnosis, as dy is the gradient before it",
            f"got activation={activation!r} with {listed(gradients)}",
            "Multiply dy by the derivative of the activation, and pass it without activation",
        )
    options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
    layer = options._asdict()
    steps = dilation if isinstance(dilation, (tuple, list)) else (dilation,)
    dilations = tuple(step for step in steps if isinstance(step, int) and step > 0) or (1,)
    findings: list[Finding | BiasFinding] = []
    for number, result in enumerate(results):
        part = _part(result, tensors)
        if result == "db":
            findings.append(BiasFinding(part["dy"], part["db"], taken["db"][1], data_format))
            continue
        claim, mismatch = _claim(result, part, layer, bool(transposed), output_padding)
        add, finish = None, PLAIN
        if result == "y":
            add = tensors.get("bias")
            finish = Finish(1.0, "none" if add is None else "given", activation)
        if claim is not None:
            claim = replace(claim, finish=finish)
        if add is not None and (add.ndim != 1 or len(add) not in part["y"].shape):
            raise ConvError(
                "bias must have one value per channel of y",
                f"bias is {_shape_text(add)}, y is {_shape_text(part['y'])}",
            )
        dtypes = {name: taken[name][1] for name in part}
        search = Search(
            result, part, add, claim, bool(transposed), dtypes, dilations, finish.activation
        )

        def report(share: float, done: int = number) -> None:
            if advance is not None:
                advance((done + share) / len(results))

        search.run(report)
        findings.append(Finding(search, mismatch, {**layer, "output_padding": output_padding}))
    return Diagnosis(tuple(findings))


def _part(result: str, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a result and its operands, after checking that they are passed and not empty."""
    names = (*OPERANDS[result], result)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ConvError(
            f"{result} must come with {listed(OPERANDS[result])}",
            f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} missing",
            f"Pass {listed(missing)}",
        )
    part = {name: tensors[name] for name in names}
    if min(map(np.size, part.values())) == 0:
        raise ConvError(
            "the arrays of a diagnosis must have elements",
            ", ".join(f"{name} is {_shape_text(array)}" for name, array in part.items()),
            "Pass arrays with elements",
        )
    return part


def _taken(name: str, value: Any) -> tuple[np.ndarray, str]:
    """Return an array as a contiguous NumPy array with a NumPy dtype, and the dtype's name."""
    array = arrays.on_host(arrays.take(name, value)[0])
    dtype = array.dtype.name
    if array.dtype.kind not in "biufc" and dtype != "bfloat16":
        raise ConvTypeError(
            f"{name} must be an array of numbers: got {dtype}. Convert it to float32"
        )
    if array.dtype.kind not in "fc":
        array = array.astype(np.float32 if dtype == "bfloat16" else np.float64)
    is_finite = np.isfinite(array)
    if name not in OPERANDS and not is_finite.all():
        raise ConvError(f"{name} must be finite", "it has NaN or infinity", "Pass finite values")
    largest = float(np.abs(array[is_finite]).max(initial=0.0))
    if largest and not 1 / LARGEST < largest < LARGEST:
        raise ConvError(
            f"the largest value of {name} must be between {1 / LARGEST:g} and {LARGEST:g}",
            f"got {largest:.3g}",
            "Scale the arrays",
        )
    return np.ascontiguousarray(array), dtype


def _shape_text(array: np.ndarray) -> str:
    return shape_text(array.shape) or "a scalar"


def _claim(
    result: str,
    tensors: Mapping[str, np.ndarray],
    layer: Mapping[str, Any],
    transposed: bool,
    output_padding: Any,
) -> tuple[Convention | None, str]:
    """Return the convention that the arguments describe, or the reason why they do not fit."""
    names = conventions.ROLES[result, transposed]
    shapes = {role: tensors[name].shape for role, name in names.items()}
    axes = len(shapes["w"])
    is_plain = axes < 3 and all(len(shape) == axes for shape in shapes.values())
    rank = axes if is_plain else axes - 2
    if rank not in SPATIAL_AXES:
        return None, f"w has {counted(axes, 'axis', 'axes')}; a layer has 3, 4 or 5"
    words: dict[str, Any] = {**layer, "dtype": "float64"}
    readings: dict[str, Any] = {}
    full: dict[str, Any] = {}
    try:
        data = formats.resolve_data_format(layer["data_format"], rank)
        filters = formats.resolve_filter_format(layer["filter_format"], rank, data)
        for role, word in {"x": data, "w": filters, "y": data}.items():
            axes = len(shapes[role])
            dropped = ("", "" if role == "w" else "N", "NCOI")[min(max(len(word) - axes, 0), 2)]
            readings[role] = "".join(letter for letter in word if letter not in dropped)
            if len(readings[role]) != axes:
                has = counted(axes, "axis", "axes")
                return None, f"{names[role]} has {has}, and {word} has {len(word)}"
            known = conventions.sizes(readings[role], shapes[role])
            full[role] = tuple(known.get(letter, 1) for letter in word)
        if transposed and (result == "y" or output_padding is not None):
            size: dict[str, Any] = {"input_shape": full["x"]} if output_padding is None else {}
            problem = ConvProblem.from_output(
                full["y"], full["w"], output_padding=output_padding, **size, **words
            )
        else:
            problem = ConvProblem(full["x"], full["w"], **words)
            require_output(Names(names["x"], names["w"], names["y"]), problem, full["y"])
        if problem.input_shape != full["x"]:
            raise ConvError(
                "the result must have the shape that follows from the layer",
                f"{names['x']} is {shape_text(full['x'])}, the layer gives "
                f"{shape_text(problem.input_shape)}",
            )
    except ConvError as error:
        return None, f"{error.rule}: {error.values}"
    flipped, conjugated = (False,) * rank, conventions.usual_conjugation(result, transposed)
    order = Order(**readings, groups=problem.groups, flipped=flipped, conjugated=conjugated)
    rules = tuple(Rule(axis.stride, axis.dilation, axis.pad_before) for axis in problem.axes)
    return Convention(result, transposed, order, rules), ""


# -- one result ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Diagnosis of one result: y, dx or dw.

    Attributes:
        search: the finished search.
        mismatch: reason why the caller's arguments do not fit the shapes; empty if they fit.
        layer: the caller's arguments.
    """

    search: Search = field(repr=False)
    mismatch: str
    layer: Mapping[str, Any] = field(repr=False)

    @property
    def result(self) -> str:
        """Name of the result."""
        return self.search.result

    @property
    def fits(self) -> list[Comparison]:
        """Comparisons of the conventions that give these values, the nearest to yours first."""
        return self.search.fits

    @cached_property
    def degenerate(self) -> str:
        """Reason why the values cannot tell conventions apart; empty if they can."""
        tensors, level = self.search.tensors, self.fits[0].level if self.fits else None
        for name, array in tensors.items():
            if not array.any():
                return f"{name} is zero everywhere"
        for name, array in tensors.items():
            if array.size > 1 and (array == array.flat[0]).all():
                return f"all elements of {name} are equal"
        if level is not None and self.search.evidence(level) < LEAST_EVIDENCE:
            return f"{self.result} has too few different values"
        return "too many conventions fit" if self.search.too_many else ""

    @property
    def verdict(self) -> str:
        """The outcome: "agrees", "other", "undecided" or "none".

        "agrees": your arguments give these values.  "other": another convention gives them.
        "undecided": the values cannot tell.  "none": no convention that was tried gives them.
        """
        if not self.fits:
            return "none"
        if self.degenerate:
            return "undecided"
        claimed = self.search.claimed
        if claimed is not None and any(fit.convention == claimed.convention for fit in self.fits):
            return "other" if self.is_rough else "agrees"
        return "undecided" if len(self.fits) > 1 else "other"

    @property
    def is_rough(self) -> bool:
        """Whether the values agree only at a lower precision than that of the arrays."""
        return self.fits[0].place > self.search.usual

    @property
    def best(self) -> Comparison | None:
        """Comparison of the best convention; None if no convention fits the shapes."""
        return self.fits[0] if self.fits else self.search.nearest

    @cached_property
    def settings(self) -> dict[str, str]:
        """Properties of the best convention, keyed by their names."""
        return {} if self.best is None else self._settings(self.best)

    @cached_property
    def differences(self) -> dict[str, tuple[str, str]]:
        """Your value and the value found, keyed by property, where the two differ."""
        if self.best is None:
            return {}
        yours = self.claimed_settings
        pairs = {
            key: tuple(
                texts.get(key, _DEFAULTS.get(key.partition(" of ")[0], "none"))
                for texts in (yours, self.settings)
            )
            for key in dict.fromkeys((*self.settings, *yours))
        }
        if yours["padding"] in self.best.convention.paddings(self.search.tensors):
            del pairs["padding"]  # another name of the same padding
        return {key: (old, new) for key, (old, new) in pairs.items() if old != new}

    @cached_property
    def claimed_settings(self) -> dict[str, str]:
        """Properties that your arguments name, keyed by their names."""
        search, layer, best = self.search, self.layer, self.best
        if best is None:
            return {}
        order, names = best.convention.order, best.convention.names
        data = _quiet_format(formats.resolve_data_format, layer["data_format"], order.rank)
        filters = _quiet_format(
            formats.resolve_filter_format, layer["filter_format"], order.rank, data
        )
        settings = {
            "layer": "transposed" if search.is_transposed else "convolution",
            "filter": "not flipped",
            **{k: axes_text(layer[k]) for k in ("stride", "padding", "dilation", "groups")},
        }
        if self.result == "y":
            settings["bias"] = "none" if search.bias is None else "added"
            settings["activation"] = search.activation or "none"
        if search.is_transposed and layer["output_padding"] is not None:
            settings["output_padding"] = axes_text(layer["output_padding"])
        elif "output_padding" in self.settings:
            settings["output_padding"] = self.settings["output_padding"]
        if "conjugated" in self.settings:
            usual = conventions.usual_conjugation(self.result, search.is_transposed)
            settings["conjugated"] = self._conjugated(usual, best.convention)
        for role, word in {"x": data, "w": filters, "y": data}.items():
            found = getattr(order, role)
            # An array without a batch or channel axis has the rest of the format.
            rest = "".join(letter for letter in word if letter in found)
            settings[f"order of {names[role]}"] = rest if len(rest) == len(found) else word
        return settings

    def _conjugated(self, which: tuple[bool, bool], convention: Convention) -> str:
        """Return the names of the conjugated factors."""
        pairs = zip(convention.factors, which, strict=True)
        names = [convention.names[role] for role, is_conjugated in pairs if is_conjugated]
        return listed(names) if names else "none"

    def _settings(self, comparison: Comparison) -> dict[str, str]:
        convention, tensors = comparison.convention, self.search.tensors
        order, finish, names = convention.order, convention.finish, convention.names
        letters = zip(SPATIAL_AXES[order.rank], order.flipped, strict=True)
        flipped = [letter for letter, is_flipped in letters if is_flipped]
        padding, pairs = next(iter(convention.paddings(tensors).items()))
        settings = {
            "layer": "transposed" if convention.is_transposed else "convolution",
            "filter": f"flipped on {listed(flipped)}" if flipped else "not flipped",
            **{f"order of {names[role]}": getattr(order, role) for role in "xwy"},
            "stride": axes_text(self._strides(convention)),
            "padding": padding,
            "dilation": axes_text([rule.dilation for rule in convention.rules]),
            "groups": str(order.groups),
        }
        if convention.is_transposed:
            axes = zip(pairs, convention.rules, convention.spatial(tensors), strict=True)
            extra = [
                after - conventions.missing_after(rule, *size) for (_, after), rule, size in axes
            ]
            settings["output_padding"] = axes_text(extra)
        settings["padding values"] = convention.mode
        if convention.mode == "edge" and max(map(max, pairs)) == 1:
            settings["padding values"] = "edge, the same as symmetric for a padding of 1"
        for role in order.interleaved:
            settings[f"channels of {names[role]}"] = "interleaved between the groups"
        if any(array.dtype.kind == "c" for array in tensors.values()):
            settings["conjugated"] = self._conjugated(order.conjugated, convention)
        if self.result == "y":
            settings["bias"] = _BIASES[finish.bias]
            settings["activation"] = finish.activation or "none"
        settings["scale"] = "sum" if finish.scale == 1 else f"{finish.scale:.6g}"
        if finish.scale != 1 and (word := self.search.scales(convention).get(finish.scale)):
            settings["scale"] += f" ({word})"
        return settings

    def _strides(self, convention: Convention) -> list[int]:
        """Return strides with which each axis has its number of outputs."""
        tensors, claim = self.search.tensors, self.search.claim
        pairs = next(iter(convention.paddings(tensors).values()))
        known = [1] * len(pairs) if claim is None else [rule.stride for rule in claim.rules]
        strides = []
        for rule, (h, r, p), pair, stride in zip(
            convention.rules, convention.spatial(tensors), pairs, known, strict=False
        ):
            room = h + sum(pair) - conventions.span(rule, r) + 1
            strides.append(max(stride, rule.stride, room) if p == 1 else rule.stride)
        return strides

    # -- text --------------------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        """The outcome in one sentence."""
        changes = [f"{key} {new}" for key, (_, new) in self.differences.items()]
        if self.verdict not in ("agrees", "none") and self.is_rough:
            level = self.fits[0].level
            changes.append(f"precision {self.rounding or self.format or (level and level.name)}")
        if self.verdict == "undecided" and changes and not self.degenerate:
            return (
                f"{len(self.fits)} conventions give these values of {self.result}; the nearest to "
                f"your options: {', '.join(changes)}"
            )
        return _headline(self.result, self.verdict, changes)

    @cached_property
    def rounding(self) -> str:
        """Format to which the operands were rounded, if that explains the differences; else ""."""
        return self.search.rounding(self.fits[0]) if self.fits and self.is_rough else ""

    @cached_property
    def format(self) -> str:
        """Format of the result's numbers, if that explains the differences; else ""."""
        level = self.fits[0].level if self.is_rough else None
        values = self.search.tensors[self.result]
        if level is None or values.dtype.kind == "c":
            return ""
        names = [n for n in ("bfloat16", "float16") if level.name.startswith(("float16", n))]
        with np.errstate(all="ignore"):
            return next((n for n in names if (ROUNDINGS[n](values) == values).all()), "")

    @cached_property
    def precision(self) -> str:
        """Sentence on the precision of the agreement, and on its cause."""
        best, rough = self.fits[0], self.is_rough
        level, total = best.level, self.search.tensors[self.result].size
        assert level is not None
        compared = counted_large(best.compared, "element")
        part = f" ({best.compared / total:.0%} of {self.result})" if best.compared < total else ""
        if level.roundoff == 0:
            return f"All {compared}{part} are exactly equal."
        cause = "TF32 or float16" if level.name.startswith("float16") else level.name
        why = f" Arithmetic in {cause} gives differences of this size."
        if self.rounding:
            why = f" The operands were rounded to {self.rounding}."
        elif self.format:
            why = f" The values of {self.result} are {self.format} numbers."
        return (
            f"All {compared}{part} agree up to {self.format or level.name} rounding; the largest "
            f"difference is {best.largest:.2g}, at {indexed(self.result, best.worst)}."
            f"{why if rough else ''}"
        )

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """Sections of the text."""
        search, best = self.search, self.best
        shapes = {name: _shape_text(array) for name, array in search.tensors.items()}
        operands = " and ".join(f"{name} {shapes[name]}" for name in OPERANDS[self.result])
        texts = [f"{self.result} {shapes[self.result]} from {operands}."]
        if self.degenerate and self.fits:
            texts.append(
                f"These values do not tell conventions apart: {self.degenerate}. Pass random "
                "values, and arrays with different sizes."
            )
        elif self.fits:
            texts.append(self.precision)
        if search.skipped and not self.fits:
            texts.append(
                f"{search.skipped:,} combinations of order, stride and dilation were left out, "
                "because they take too long. Smaller arrays permit a more complete search."
            )
        if best is not None and not self.fits:
            texts.append(self._nearest_text(best))
        blocks: list[Block] = [*map(Paragraph, texts)]
        is_other = self.verdict != "agrees" and not self.degenerate
        is_near = best is not None and best.is_similar
        if is_other and is_near and self.differences:
            head = ("", "your options", "these values" if self.fits else "nearest convention")
            rows = ((key, *pair) for key, pair in self.differences.items())
            blocks.append(Table(head, tuple(rows)))
        if self.mismatch:
            blocks.append(Paragraph(f"Your options do not fit the shapes: {self.mismatch}."))
        sections = [Section(self.headline, tuple(blocks)), *self._difference_sections()]
        if (len(self.fits) > 1 or self._aliases()) and not search.too_many:
            sections.append(self._alternatives())
        if best is not None and is_near and is_other:
            sections += self._line_sections(best)
        return tuple(sections)

    def _nearest_text(self, best: Comparison) -> str:
        if not best.is_similar:
            return f"{self.search.tried:,} conventions were tried, and none comes near."
        return (
            f"The nearest convention agrees in {best.agreeing:,} of "
            f"{counted_large(best.compared, 'element')}; its largest difference is "
            f"{best.largest:.3g}, at {indexed(self.result, best.worst)}."
        )

    def _difference_sections(self) -> list[Section]:
        """Return a section on the first element that differs from the claim or the nearest."""
        claimed = self.search.claimed
        yours = claimed is not None and not claimed.fits
        other = claimed if yours else (None if self.fits else self.search.nearest)
        if other is None or other.first is None or not (yours or other.is_similar):
            return []
        who = "your options give" if yours else "the nearest convention gives"
        wrong = other.compared - other.agreeing
        text = (
            f"The array has {_number(other.value)}, {who} {_number(other.expected)}. "
            f"{wrong:,} of {counted_large(other.compared, 'element')} "
            f"{'differs' if wrong == 1 else 'differ'}; the largest "
            f"difference is {other.largest:.3g}, at {indexed(self.result, other.worst)}."
        )
        blocks: list[Block] = [Paragraph(text)]
        if self.fits:
            blocks += self._terms(self.fits[0].convention, other.first, "In the convention found")
        what = "With your options" if yours else "In the nearest"
        blocks += self._terms(other.convention, other.first, what)
        title = f"The first element that differs: {indexed(self.result, other.first)}"
        return [Section(title, tuple(blocks))]

    def _terms(self, convention: Convention, index: tuple[int, ...], what: str) -> list[Block]:
        """Return the products of an element, with the indices of the caller's arrays."""
        search, factors = self.search, convention.factors
        views = convention.operands(convention.views(search.tensors))
        count, products = convention.products(views, search.viewed(convention, index))
        lines = []
        for places in islice(products, SHOWN_TERMS):
            pairs = list(zip(factors, places, strict=True))
            left, right = (views[role][place].item() for role, place in pairs)
            texts = (
                indexed(convention.names[role], search.stored(role, convention, place))
                for role, place in pairs
            )
            values = f"{_number(left)} * {_number(right)} = {_number(left * right)}"
            lines.append(f"{' * '.join(texts)} = {values}")
        if count > SHOWN_TERMS:
            lines.append(f"... {counted_large(count - SHOWN_TERMS, 'more product')}")
        finish, steps = convention.finish, [""]
        if finish.scale != 1:
            steps.append(f"multiplied by {finish.scale:.6g}")
        if finish.bias != "none":
            steps.append("plus the bias")
        if finish.activation:
            steps.append(f"then {finish.activation}")
        total = f"the sum of {counted_large(count, 'product')}{', '.join(steps)}"
        text = f"{what}, {indexed(self.result, index)} is {total}."
        return [Paragraph(text), *([Verbatim("\n".join(lines))] if lines else [])]

    def _aliases(self) -> list[str]:
        """Return the other names of the padding found."""
        if not self.fits:
            return []
        shown = {self.settings.get("padding"), self.claimed_settings.get("padding")}
        names = self.fits[0].convention.paddings(self.search.tensors)
        return [name for name in names if name not in shown]

    def _alternatives(self) -> Section:
        blocks: list[Block] = []
        if aliases := self._aliases():
            padding = self.settings["padding"]
            same = f"Padding {listed([padding, *aliases])} are the same for these sizes"
            blocks.append(Paragraph(f"{same}{self._apart(padding, aliases[0])}."))
        rows = []
        for fit in self.fits[1:]:
            settings = self._settings(fit)
            changed = {key for key in settings if settings[key] != self.settings.get(key)}
            changed |= self.settings.keys() - settings.keys()
            text = ", ".join(f"{key} {settings.get(key, 'none')}" for key in sorted(changed))
            rows.append((text or "another rule", _told_apart(changed)))
        if rows:
            heads = ("also gives these values", "to tell it apart, use")
            blocks.append(Table(heads, tuple(rows)))
        return Section("Other conventions with the same values", tuple(blocks))

    def _apart(self, *words: str) -> str:
        """Return a clause with an input size for which two paddings differ."""
        convention = self.fits[0].convention
        letters = SPATIAL_AXES[convention.order.rank]
        for letter, rule, (h, r, _) in zip(
            letters, convention.rules, convention.spatial(self.search.tensors), strict=True
        ):
            for size in (*range(h, h + 4), *range(h, 0, -1)):
                pairs: Any = [conventions.named_pair(word, rule, size, r) for word in words]
                if None in pairs:
                    return ""
                room = [size + b + a - conventions.span(rule, r) for b, a in pairs]
                ends = [(b, n // rule.stride) for (b, _), n in zip(pairs, room, strict=True)]
                if min(room) >= 0 and ends[0] != ends[1]:
                    return f"; they differ for an input of {letter} = {size}"
        return ""

    def _line_sections(self, best: Comparison) -> list[Section]:
        """Return the lines of frameworks that compute these values."""
        layer = _layer(self, best)
        if layer is None:
            return []
        claimed, finish = self.search.claimed, best.convention.finish
        before = {} if claimed is None else _lines(_layer(self, claimed))
        rows = []
        for framework, line in _lines(layer).items():
            old = before.get(framework, line)
            changed = [f"    {line}"] if old == line else [f"  - {old}", f"  + {line}"]
            rows += [f"{framework}:", *changed]
        blocks: list[Block] = []
        for head, lines in (
            ("Before, in NumPy:", layer.before),
            ("X and W are x and w in the framework's order of axes:", rows),
            ("After, in NumPy:", layer.after),
        ):
            blocks += [Paragraph(head), Verbatim("\n".join(lines))] if lines else []
        steps = ["the bias"] if finish.bias != "none" else []
        steps += [finish.activation] if finish.activation else []
        if steps:
            blocks.append(Paragraph(f"The other frameworks' lines lack {listed(steps)}."))
        if best.bias is not None:
            numbers = ", ".join(_number(value.item()) for value in best.bias[:8])
            more = ", ..." if best.bias.size > 8 else ""
            blocks.append(Paragraph(f"The bias that fits: {numbers}{more}."))
        title = "The line to change" if self.fits else "The line of the nearest convention"
        return [Section(title, tuple(blocks))]

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain data, ready for JSON."""
        search = self.search
        layer = _layer(self, self.fits[0]) if self.fits else None
        return {
            "result": self.result,
            "verdict": self.verdict,
            "headline": self.headline,
            "shapes": {name: list(array.shape) for name, array in search.tensors.items()},
            "mismatch": self.mismatch or None,
            "degenerate": self.degenerate or None,
            "differences": _plain_differences(self),
            "precision": self.precision if self.fits else None,
            "conventions": [self._fit_dict(fit) for fit in self.fits],
            "same_padding": self._aliases(),
            "yours": self._fit_dict(search.claimed),
            "nearest": self._fit_dict(search.nearest),
            "tried": search.tried,
            "left_out": search.skipped,
            "before": list(layer.before) if layer else [],
            "lines": _lines(layer),
            "after": list(layer.after) if layer else [],
        }

    def _fit_dict(self, fit: Comparison | None) -> dict[str, Any] | None:
        if fit is None:
            return None
        return {
            "settings": self._settings(fit),
            "compared": fit.compared,
            "agreeing": fit.agreeing,
            "precision": fit.level and fit.level.name,
            "largest_difference": fit.largest,
            "largest_difference_at": list(fit.worst),
            "first_difference_at": None if fit.first is None else list(fit.first),
            "value": plain(fit.value),
            "expected": plain(fit.expected),
            "bias": None if fit.bias is None else [plain(value.item()) for value in fit.bias],
        }


_BIASES = {"none": "none", "given": "added", "fitted": "an unknown bias added"}
"""Texts on the bias of a convention, keyed by ``Finish.bias``."""

_DEFAULTS = {
    "padding values": "zeros",
    "scale": "sum",
    "channels": "one group after the other",
}
"""Values of properties that a convention does not name, keyed by the property."""


def _told_apart(changed: set[str]) -> str:
    """Return data for which two conventions differ, by the names of their different properties."""
    texts = {
        "filter": "a larger, random filter",
        "stride": "a larger input",
        "padding": "random values up to the borders",
        "dilation": "a larger input and filter",
        "groups": "other numbers of channels",
        "bias": "a bias without zeros",
        "activation": "data with negative results",
        "scale": "a larger batch",
        "conjugated": "random imaginary parts",
        "padding values": "random values up to the borders",
        "layer": "a stride above 1",
    }
    found = [texts[key] for key in texts if key in changed]
    if not found and any(key.startswith("order") for key in changed):
        found = ["different sizes on all axes"]
    return found[0] if found else "random values"


def _headline(result: str, verdict: str, changes: Sequence[str]) -> str:
    """Return the outcome of a diagnosis in one sentence.

    Args:
        changes: properties that differ from those of your options.
    """
    return {
        "agrees": f"Your options give these values of {result}",
        "other": f"Another convention gives these values of {result}: {', '.join(changes)}",
        "undecided": f"The data cannot tell which convention gave {result}",
        "none": f"No convention that was tried gives these values of {result}",
    }[verdict]


def _plain_differences(finding: Finding | BiasFinding) -> dict[str, dict[str, str]]:
    pairs = finding.differences.items()
    return {key: {"yours": old, "found": new} for key, (old, new) in pairs}


def _number(value: complex) -> str:
    return f"({value:.7g})" if isinstance(value, complex) else f"{value:.9g}"


def _quiet_format(resolve: Callable[..., str], *arguments: Any) -> str:
    try:
        return resolve(*arguments)
    except ConvError:
        return str(arguments[0])


# -- lines of frameworks ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """A convention as a problem, with the NumPy statements before and after the framework's line.

    Attributes:
        problem: convolution that the convention contains.
        convention: the convention.
        before, after: NumPy statements that change operands, and that change the result.
    """

    problem: ConvProblem
    convention: Convention
    before: tuple[str, ...]
    after: tuple[str, ...]


def _layer(finding: Finding, comparison: Comparison) -> _Layer | None:
    """Return a convention as a problem; None if no problem expresses it."""
    convention, search = comparison.convention, finding.search
    order, letters = convention.order, SPATIAL_AXES[convention.order.rank]
    name, role = convention.names["x"], convention.role
    views = convention.views(search.tensors)
    groups, images, channels, *inputs = views["x"].shape
    _, filters, _, *taps = views["w"].shape
    data, target = order.x, f"{letters}IO" if order.w == f"{letters}GM" else order.w
    if order.x != order.y or data not in formats.data_formats(order.rank):
        data = formats.data_formats(order.rank)[0]
    if target not in formats.filter_formats(order.rank):
        target = formats.filter_formats(order.rank)[0]
    lines = {
        each: _rearranged(finding, convention, each, word)
        for each, word in {"x": data, "w": target, "y": data}.items()
    }
    after = lines.pop(role)
    before = [line for each in lines.values() for line in each]
    named = convention.paddings(search.tensors)
    claimed = str(finding.layer["padding"]).lower()
    chosen = claimed if claimed in named else next(iter(named))
    pairs = named[chosen]
    padding: Any = [(max(b, 0), max(a, 0)) for b, a in pairs]

    def along(entries: Any) -> list[Any]:
        """Return an entry for each axis of x, (0, 0) for batch and channels."""
        return [dict(zip(letters, entries, strict=True)).get(letter, (0, 0)) for letter in data]

    if convention.mode != "zeros":
        if role == "x":
            return None
        before.append(f'{name} = np.pad({name}, {along(padding)}, mode="{convention.mode}")')
        inputs = [size + sum(pair) for size, pair in zip(inputs, padding, strict=True)]
        padding = 0
    elif chosen in ("same", "same_lower"):
        padding = chosen
    crops = [(max(-b, 0), max(-a, 0)) for b, a in pairs]
    if any(map(any, crops)):
        inputs = [size - sum(pair) for size, pair in zip(inputs, crops, strict=True)]
        slices = ", ".join(f"{b or ''}:{-a or ''}" for b, a in along(crops))
        if role == "x":
            after.insert(0, f"{name} = np.pad({name}, {along(crops)})")
        else:
            before.append(f"{name} = {name}[{slices}]")
    if convention.finish.scale != 1:
        after.append(f"{convention.result} = {convention.result} * {convention.finish.scale!r}")
    extents = {"N": images, "C": groups * channels, **dict(zip(letters, inputs, strict=True))}
    kernel = {"O": groups * filters, "I": channels, **dict(zip(letters, taps, strict=True))}
    dtype: Any = search.dtypes[search.result]
    if any(array.dtype.kind == "c" for array in search.tensors.values()):
        dtype = "complex128" if "complex128" in search.dtypes.values() else "complex64"
    strides, dilations = finding._strides(convention), [rule.dilation for rule in convention.rules]
    options = ConvOptions(strides, padding, dilations, groups, data, target)
    try:
        problem = ConvProblem(
            [extents[letter] for letter in data],
            [kernel[letter] for letter in target],
            dtype=dtype if dtype in ITEMSIZE else "float32",
            **options._asdict(),
        )
    except ConvError:
        return None
    fits = problem.output_sizes == views["y"].shape[3:]
    return _Layer(problem, convention, tuple(before), tuple(after)) if fits else None


def _rearranged(finding: Finding, convention: Convention, role: str, target: str) -> list[str]:
    """Return NumPy statements that bring an operand to a format, or a result from a format."""
    order, name = convention.order, convention.names[role]
    reading, array = getattr(order, role), finding.search.tensors[name]
    wanted = target if "G" not in reading else target.replace("O", "GM").replace("I", "")
    kept = [letter for letter in wanted if letter in reading]
    there = tuple(reading.index(letter) for letter in kept)
    back = tuple(kept.index(letter) for letter in reading)
    sizes = {letter: array.shape[place] for letter, place in zip(kept, there, strict=True)}
    shape = tuple(sizes.values())
    sizes["O"] = sizes.get("O", sizes.get("G", 1) * sizes.get("M", 1))
    full = tuple(sizes.get(letter, 1) for letter in target)
    # Pairs: a call for an operand, and its inverse for a result.
    steps = []
    if there != tuple(sorted(there)):
        steps.append((f".transpose{there}", f".transpose{back}"))
    if role in order.interleaved:
        axis = target.index("O" if role == "w" else "C")
        begin, inner, end = full[:axis], full[axis] // order.groups, full[axis + 1 :]
        swap = f".swapaxes({axis}, {axis + 1})"
        split = f".reshape{(*begin, inner, order.groups, *end)}{swap}"
        merge = f".reshape{(*begin, order.groups, inner, *end)}{swap}"
        steps.append((f"{split}.reshape{full}", f"{merge}.reshape{shape}"))
    elif shape != full:
        steps.append((f".reshape{full}", f".reshape{shape}"))
    flipped = dict(zip(SPATIAL_AXES[order.rank], order.flipped, strict=True))
    if role == "w" and any(order.flipped):
        index = ", ".join("::-1" if flipped.get(letter) else ":" for letter in target)
        steps.append((f"[{index}]",) * 2)
    # conv_forward and conv_transpose conjugate nothing; the gradients conjugate the second factor.
    usual = (False, convention.role == "w" or convention.names["x"] == "dx")
    conjugated = zip(convention.factors, order.conjugated, usual, strict=True)
    if array.dtype.kind == "c" and any(role == one and a != b for one, a, b in conjugated):
        steps.append((".conj()",) * 2)
    is_result = role == convention.role
    calls = [backward for _, backward in reversed(steps)] if is_result else [a for a, _ in steps]
    return [f"{name} = {name}{''.join(calls)}"] if calls else []


def _lines(layer: _Layer | None) -> dict[str, str]:
    """Return the line of each framework that computes the convention's sums."""
    if layer is None:
        return {}
    convention, problem = layer.convention, layer.problem
    lines = {"cupyconv": _library_line(layer)}
    for entry in translate.translations(problem, convention.is_transposed):
        lines[entry.framework] = entry.call
    if convention.result != "y":
        if problem.is_complex:
            lines.pop("JAX", None)  # its gradients are the conjugates
        gradient = convention.result.removeprefix("d")
        for framework in lines.keys() - {"cupyconv"}:
            lines[framework] = f"the gradient of {lines[framework]} with respect to {gradient}"
    if scipy := _scipy_line(layer):
        lines["SciPy"] = scipy
    return lines


def _library_line(layer: _Layer) -> str:
    convention, problem = layer.convention, layer.problem
    x, w, y = (convention.names[role] for role in "xwy")
    data = formats.resolve_data_format(None, problem.spatial_rank)
    filters = formats.resolve_filter_format(None, problem.spatial_rank, problem.data_format)
    words: dict[str, Any] = {}
    for (key, value), default in zip(
        problem.keywords.items(), (1, 0, 1, 1, data, filters), strict=True
    ):
        if key == "padding" and isinstance(value, tuple) and all(a == b for a, b in value):
            value = tuple(before for before, _ in value)
        if isinstance(value, tuple) and len(set(value)) == 1 and isinstance(value[0], int):
            value = value[0]
        if value not in (default, "valid"):
            words[key] = value
    bias = ", bias" if convention.finish.bias != "none" else ""
    if convention.finish.activation:
        words["activation"] = convention.finish.activation
    if convention.role == "y":
        call = f"{y} = cupyconv.conv_forward({x}, {w}{bias}"
    elif convention.role == "w":
        call = f"{w} = cupyconv.conv_backprop_filter({x}, {problem.filter_shape}, {y}"
    elif convention.is_transposed:
        words["output_shape"] = problem.input_shape
        call = f"{x} = cupyconv.conv_transpose({y}, {w}{bias}"
    else:
        call = f"{x} = cupyconv.conv_backprop_input({problem.input_shape}, {w}, {y}"
    return f"{', '.join([call, *(python_argument(*word) for word in words.items())])})"


def _scipy_line(layer: _Layer) -> str:
    """Return SciPy's line; empty if the layer has channels, stride or dilation."""
    problem, flipped = layer.problem, layer.convention.order.flipped
    is_plain = max(*problem.stride, *problem.dilation) == 1 and len(set(flipped)) == 1
    has_channels = layer.convention.role != "y" or problem.N * problem.C * problem.K > 1
    if has_channels or not is_plain or problem.is_complex:  # correlate conjugates w
        return ""
    taps = problem.filter_sizes
    modes = {
        "valid": tuple((0, 0) for _ in taps),
        "same": tuple((r // 2, (r - 1) // 2) for r in taps),
        "full": tuple((r - 1, r - 1) for r in taps),
    }
    mode = next((mode for mode, pairs in modes.items() if pairs == problem.padding), None)
    function = "convolve" if flipped[0] else "correlate"
    return f'scipy.signal.{function}(x, w, mode="{mode}") on {len(taps)}-D arrays' if mode else ""


# -- the bias gradient -----------------------------------------------------------------------------


@dataclass(frozen=True)
class BiasFinding:
    """Diagnosis of db, the sum of dy over everything but its channels.

    Attributes:
        dy, db: the arrays.
        dtype: name of db's dtype.
        data_format: the caller's data format.
    """

    dy: np.ndarray = field(repr=False)
    db: np.ndarray = field(repr=False)
    dtype: str
    data_format: Any

    result = "db"

    @cached_property
    def _asked(self) -> int:
        """Axis of the channels in the caller's data format."""
        last = str(self.data_format).upper().endswith(("C", "CHANNELS_LAST"))
        return self.dy.ndim - 1 if last else min(1, self.dy.ndim - 1)

    @cached_property
    def fit(self) -> tuple[int, float, str, float] | None:
        """Axis of the channels, scale, its name, and the largest difference; None if none fits."""
        dy, db = self.dy, self.db.ravel()
        count = dy.size // db.size
        scales = {
            dy.shape[0] / count: "mean over the positions",
            1 / dy.shape[0]: "mean over the batch",
            1 / count: "mean",
            1.0: "sum",
        }
        tolerance = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-45}
        for axis in dict.fromkeys((self._asked, *range(dy.ndim))):
            if dy.shape[axis] != db.size:
                continue
            others = tuple(a for a in range(dy.ndim) if a != axis)
            sums = dy.astype(np.result_type(dy, "f8")).sum(others)
            size = np.sqrt((np.abs(dy) ** 2).sum(others)) * 8 + np.abs(sums)
            for scale, word in sorted(scales.items(), reverse=True):
                error = np.abs(db - sums * scale)
                if (error <= tolerance.get(self.dtype, 2.0**-20) * size * scale).all():
                    return axis, scale, word, float(error.max())
        return None

    @property
    def verdict(self) -> str:
        """The outcome, as in ``Finding.verdict``."""
        if not self.dy.any():
            return "undecided"
        if self.fit is None:
            return "none"
        return "other" if self.differences else "agrees"

    @property
    def differences(self) -> dict[str, tuple[str, str]]:
        """Your value and the value found, keyed by property, where the two differ."""
        if self.fit is None or not self.dy.any():
            return {}
        axis, scale, word, _ = self.fit
        pairs = {
            "scale": ("sum", "sum" if scale == 1 else f"{scale:.6g} ({word})"),
            "channel axis of dy": (str(self._asked), str(axis)),
        }
        return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def headline(self) -> str:
        """The outcome in one sentence."""
        changes = [f"{key} {new}" for key, (_, new) in self.differences.items()]
        return _headline("db", self.verdict, changes)

    @property
    def sections(self) -> tuple[Section, ...]:
        """Sections of the text."""
        text = f"db {_shape_text(self.db)} from dy {_shape_text(self.dy)}."
        if self.fit is not None:
            axis, scale, _, error = self.fit
            times = "" if scale == 1 else f", times {scale:.6g}"
            text += f" db is the sum of dy over all axes but axis {axis}{times}."
            text += f" The largest difference is {error:.2g}."
        return (Section(self.headline, (Paragraph(text),)),)

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain data, ready for JSON."""
        axis, scale, _, error = self.fit or (None, 1.0, "", 0.0)
        return {
            "result": "db",
            "verdict": self.verdict,
            "headline": self.headline,
            "shapes": {"dy": list(self.dy.shape), "db": list(self.db.shape)},
            "differences": _plain_differences(self),
            "channel_axis": axis,
            "scale": scale,
            "largest_difference": error,
        }


# -- all results -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of the results of another program, returned by ``diagnose``.

    Attributes:
        findings: a finding per result, in the order y, dx, dw, db.

    >>> x, w = np.arange(7.0).reshape(1, 1, 7) ** 2 - 9, np.array([[[1.0, 2, 4]]])
    >>> y = np.convolve(x[0, 0], w[0, 0], mode="same")[None, None]
    >>> cupyconv.diagnose(x, w, y=y).findings[0].differences
    {'filter': ('not flipped', 'flipped on W'), 'padding': ('0', '1')}
    """

    findings: tuple[Finding | BiasFinding, ...]

    @property
    def agrees(self) -> bool:
        """Whether your arguments give the values of every result."""
        return all(finding.verdict == "agrees" for finding in self.findings)

    @cached_property
    def document(self) -> Document:
        """The diagnosis as a document."""
        return Document("", tuple(part for one in self.findings for part in one.sections))

    def text(self, width: int = 100) -> str:
        """Return the diagnosis in lines of at most ``width`` characters; programs are not wrapped.

        >>> dy = np.arange(6.0).reshape(1, 2, 3)
        >>> print(cupyconv.diagnose(dy=dy, db=dy.mean((0, 2))).text().splitlines()[0])
        Another convention gives these values of db: scale 0.333333 (mean)
        """
        return self.document.text(width)

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.document.html()

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as plain data, ready for JSON.

        >>> dy = np.arange(6.0).reshape(1, 2, 3)
        >>> cupyconv.diagnose(dy=dy, db=dy.sum((0, 2))).to_dict()["agrees"]
        True
        """
        return {"agrees": self.agrees, "results": [one.to_dict() for one in self.findings]}
