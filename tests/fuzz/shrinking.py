"""Shrink a finding, as long as its kind remains the same.

Each round tries changes that make the case simpler, the boldest first, and keeps the first change
that still shows the finding.  hypothesis's shrinker would have to draw every case, which takes
longer than running most cases.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from .cases import DATA_FORMATS, FILTER_FORMATS, Case, NumpyRun, View, defaults
from .checking import Finding, check
from .kernels import NotTakenError
from .oracle import IllegalError, can_overlap, geometry, result_shape

SPATIAL = ("sizes", "taps", "stride", "dilation", "padding")


def shrunk(finding: Finding, seconds: float) -> Finding:
    """Return the finding in the smallest case found within this time."""
    end = time.monotonic() + seconds
    named = _same(_by_name(finding), finding)
    finding, simpler = named or finding, True
    while simpler:
        simpler = False
        tried = candidates(finding.case)
        if finding.is_illegal and not (finding.case.bad_out or finding.case.stranger):
            # For all other findings, the gradient is fitted to the sizes.
            tried = chain(tried, _of_gradient(finding.case))
        for case in tried:
            if time.monotonic() > end:
                return finding
            found = _same(case, finding)
            if found is not None:
                finding, simpler = found, True
                break
    return finding


def _by_name(finding: Finding) -> Case:
    """Return the case, requesting by name the implementation that "auto" selected."""
    case = finding.case
    if finding.kind[0] != "wrong":
        return case
    name = finding.kind[2]
    if isinstance(case.run, NumpyRun):
        return replace(case, run=replace(case.run, method=name))
    return replace(case, run=replace(case.run, impl=name))


def _same(case: Case, finding: Finding) -> Finding | None:
    """Return the finding in another case; None if that case does not show it."""
    try:
        if not finding.is_illegal or case.bad_out or case.stranger:
            case = _refitted(case)
        if case.bad_out in ("overlapping", "shared"):
            legal = geometry(replace(case, bad_out=""))
            if not can_overlap(result_shape(legal, case.operation)):
                return None
        found = check(case)
    except (IllegalError, NotTakenError):
        return None
    except Exception:  # the case itself could not be made
        return None
    return found if found is not None and found.kind == finding.kind else None


def _refitted(case: Case) -> Case:
    """Return a case whose gradient, bias and filter's channels fit its sizes again."""
    slice_ = case.channels // max(case.groups, 1)
    bias = None if case.bias is None else case.filters
    shift = None if case.shift is None else case.channels
    fitted = replace(case, slice=slice_, bias=bias, shift=shift)
    found = geometry(replace(fitted, operation="conv_forward", stranger="", bad_out=""))
    return replace(fitted, dy=found.shapes["dy"])


def candidates(case: Case) -> Iterator[Case]:
    """Yield simpler cases, the boldest first."""
    if case.rank > 1:
        for axis in range(case.rank):
            yield _without_axis(case, axis)
    if case.groups > 1:
        for groups in {1, case.groups // 2, case.groups - 1}:
            of_group = max(case.channels // case.groups, 1), max(case.filters // case.groups, 1)
            yield replace(
                case, groups=groups, channels=of_group[0] * groups, filters=of_group[1] * groups
            )
    for name in ("batch", "channels", "filters"):
        step = 1 if name == "batch" else max(case.groups, 1)
        for less in _less(getattr(case, name) // step):
            yield replace(case, **{name: less * step})
    yield from _with_defaults(case)
    yield from _of_axes(case)
    for name, view in case.views.items():
        others = {other: kept for other, kept in case.views.items() if other != name}
        if name != "out" or not case.bad_out:
            yield replace(case, views=others)
        for simpler in _with_defaults(view):
            yield replace(case, views={**others, name: simpler})
    for run in _with_defaults(case.run):
        yield replace(case, run=run)
    if case.poke is not None and case.poke[1]:
        yield replace(case, poke=(case.poke[0], 0.0, case.poke[2]))
    if case.values == "decades":
        yield replace(case, values="normal")
    if case.size > 1:
        yield replace(case, size=1)


KEPT = ("dy", "size", "run", "impl", "arch", "method")
"""Fields whose default values are not simpler, or that other fields determine."""


def _with_defaults(made: Any) -> Iterator[Any]:
    """Yield a case, or a part of it, with one field at a time set to its default value."""
    for name, usual in defaults(made).items():
        if name not in KEPT and getattr(made, name) != usual:
            yield replace(made, **{name: usual})


def _less(value: int, least: int = 1) -> list[int]:
    """Return some smaller integers, the smallest first."""
    return sorted({least, 2, 8, value // 2, value - 1} & set(range(least, value)))


def _of_gradient(case: Case) -> Iterator[Case]:
    for axis, size in enumerate(case.dy):
        for less in _less(size):
            yield replace(case, dy=(*case.dy[:axis], less, *case.dy[axis + 1 :]))


def _of_axes(case: Case) -> Iterator[Case]:
    for name in SPATIAL:
        value = getattr(case, name)
        if isinstance(value, int):
            for new in _simpler_entries(name, value):
                yield replace(case, **{name: new})
        elif isinstance(value, tuple):
            for axis, old in enumerate(value):
                for new in _simpler_entries(name, old):
                    yield replace(case, **{name: (*value[:axis], new, *value[axis + 1 :])})


def _simpler_entries(name: str, old: Any) -> list[Any]:
    if isinstance(old, int):
        return _less(old, 0 if name == "padding" else 1)
    if len(old) != 2:
        return []
    before, after = old
    pairs = [(0, 0), (0, after), (before, 0), (before - 1, after), (before, after - 1)]
    return [pair for pair in pairs if pair != old and min(pair) >= 0]


def _without_axis(case: Case, axis: int) -> Case:
    """Return a case without one spatial axis; the remaining axes keep their views."""
    changes: dict[str, Any] = {}
    for name in (*SPATIAL, "output_padding"):
        value = getattr(case, name)
        if isinstance(value, tuple):
            changes[name] = (*value[:axis], *value[axis + 1 :])
    for name, formats in (("data_format", DATA_FORMATS), ("filter_format", FILTER_FORMATS)):
        word, known = (getattr(case, name) or "").upper(), formats[case.rank]
        if word in known:
            changes[name] = formats[case.rank - 1][known.index(word)]
    views = {name: _view_without_axis(view, case.rank + 1) for name, view in case.views.items()}
    return replace(case, views=views, **changes)


def _view_without_axis(view: View, axis: int) -> View:
    """Return the view without the array's last axis, ``axis``."""

    def kept(axes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(one for one in axes if one != axis)

    return replace(
        view,
        order=kept(view.order),
        reversed=kept(view.reversed),
        repeated=kept(view.repeated),
        overlap=None if view.overlap and view.overlap[0] == axis else view.overlap,
    )
