"""Views: passes that a family computes as the same pass of another problem on the same memory.

A kernel pads the matrix of a pass to whole tiles.  If a layer has few filters or few channels, most
of a tile is padding, and a view has more of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from cupyconv.kernels.family import Candidate, Choices, Family
from cupyconv.kernels.request import PLAIN, Epilogue, Request
from cupyconv.kernels.strides import Strides
from cupyconv.launch import FilterForm, Launch, Part
from cupyconv.problem import ITEMSIZE, ConvProblem, derived

EXCHANGED = "x and dy exchanged"
"""Name of the view that ``exchanged`` returns."""

_SEPARATOR = "; "
"""Text between the name of a view and the method with which the view is computed."""


@dataclass(frozen=True)
class View:
    """A pass as the same pass of another problem.

    Attributes:
        name: name that a plan prints; "" for the pass itself.
        problem, strides: the other problem, and the strides of its tensors.
        arrays: arrays that contain the tensors of the other problem, keyed by role; other roles
            have the arrays of the pass.
    """

    name: str
    problem: ConvProblem
    strides: Strides
    arrays: Mapping[str, str | Part]

    def request(self, request: Request) -> Request:
        """Return the request for the view; ``request`` is the request for the pass."""
        if not self.name:
            return request
        return replace(request, problem=self.problem, strides=self.strides)

    def own(self, choices: Choices) -> Choices:
        """Return the choices for the view's request; ``choices`` are those for the pass."""
        method = choices.method.removeprefix(self.name).removeprefix(_SEPARATOR)
        return replace(choices, method=self._renamed(method))

    def candidate(self, own: Candidate) -> Candidate:
        """Return a candidate for the pass; ``own`` is the candidate for the view's request."""
        method = _SEPARATOR.join(filter(None, (self.name, self._renamed(own.method))))
        return replace(own, method=method, summary=self._renamed(own.summary))

    def launch(self, own: Launch) -> Launch:
        """Return a launch for the pass; ``own`` is the launch for the view's request."""
        arguments = (self.arrays.get(a, a) if isinstance(a, str) else a for a in own.arguments)
        return replace(own, arguments=tuple(arguments))

    def _renamed(self, text: str) -> str:
        """Return a text about tensors of the view with the names of the arrays, or vice versa."""
        names = {"x": "dy", "dy": "x"} if self.name == EXCHANGED else {}
        return " ".join(names.get(word, word) for word in text.split(" "))


@lru_cache(maxsize=4096)
def exchanged(problem: ConvProblem, strides: Strides) -> View | None:
    """Return the filter gradient with x and dy exchanged; None if it is impossible or not faster.

    With stride 1, dw[f, c, r] is the sum over p of dy[f, p] * x[c, p - pad + r * dilation].  With
    q = p - pad + r * dilation, it is the sum over q of x[c, q] * dy[f, q + pad - r * dilation]: the
    filter gradient of a layer with input dy and output x, whose taps have the reverse order.
    """
    filter_, channel, *taps = problem.filter_axes
    is_possible = problem.groups == 1 and set(problem.stride) == {1}
    if not is_possible or 2 * problem.K > problem.C or set(problem.filter_sizes) == {1}:
        return None
    reach = [axis.effective_filter - 1 for axis in problem.axes]
    padding = tuple(
        (most - before, most - after)
        for most, (before, after) in zip(reach, problem.padding, strict=True)
    )
    if min(map(min, padding)) < 0:
        return None
    shape, w = list(problem.filter_shape), list(strides.w)
    shape[filter_], shape[channel] = shape[channel], shape[filter_]
    w[filter_], w[channel] = w[channel], w[filter_]
    last_tap = sum((shape[tap] - 1) * w[tap] for tap in taps)
    for tap in taps:
        w[tap] = -w[tap]
    other = derived(
        problem,
        input_shape=problem.output_shape,
        filter_shape=tuple(shape),
        padding=padding,
        padding_mode="explicit",
    )
    arrays: dict[str, str | Part] = {"x": "y", "y": "x"}
    arrays["w"] = Part("w", last_tap * ITEMSIZE[problem.dtype])
    return View(EXCHANGED, other, replace(strides, x=strides.y, w=tuple(w), y=strides.x), arrays)


def views(request: Request) -> list[View]:
    """Return the views of a request, the pass itself first."""
    found = [View("", request.problem, request.memory, {})]
    if request.pass_ == "backprop_filter":
        view = exchanged(request.problem, request.memory)
        found += [view] if view is not None else []
    return found


class Viewed(Family):
    """A family that also computes views.  The method of a view's candidate begins with its name."""

    def refuses(self, request: Request) -> str | None:
        refusals = [super(Viewed, self).refuses(view.request(request)) for view in views(request)]
        return None if None in refusals else refusals[0]

    def candidates(self, request: Request) -> list[Candidate]:
        requests = [(view, view.request(request)) for view in views(request)]
        return [
            view.candidate(own)
            for view, of_view in requests
            if len(requests) == 1 or super(Viewed, self).refuses(of_view) is None
            for own in super(Viewed, self).candidates(of_view)  # type: ignore[safe-super]
        ]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        view = _chosen(request, choices)
        of_view = view.request(request)
        if view.name and super().refuses(of_view) is not None:
            return None
        own = super().candidate(of_view, view.own(choices))  # type: ignore[safe-super]
        return own and view.candidate(own)

    def launches(
        self, request: Request, choices: Choices, epilogue: Epilogue = PLAIN
    ) -> tuple[Launch, ...]:
        view = _chosen(request, choices)
        launches = super().launches(view.request(request), view.own(choices), epilogue)
        return tuple(map(view.launch, launches))

    def filter_form(self, request: Request, choices: Choices) -> FilterForm | None:
        view = _chosen(request, choices)
        return super().filter_form(view.request(request), view.own(choices))

    def reason(self, candidate: Candidate, note: str = "") -> str:
        is_view = candidate.method.startswith(EXCHANGED)
        return super().reason(candidate, f"{note}, with {EXCHANGED}" if is_view else note)


def _chosen(request: Request, choices: Choices) -> View:
    """Return the view whose name a method begins with; the pass itself if there is none."""
    named = (view for view in reversed(views(request)) if choices.method.startswith(view.name))
    return next(named)
