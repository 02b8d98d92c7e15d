"""CPU implementations: ``reference`` follows the definition, ``numpy`` is fast."""

from __future__ import annotations

from cupyconv.kernels.cost import duration
from cupyconv.kernels.family import Candidate, Choices, Family
from cupyconv.kernels.limits import Count
from cupyconv.kernels.request import Request


class Reference(Family):
    name = "reference"
    summary = "the definition, tap by tap, summed in float64 with NumPy"
    on_gpu = False

    def counts(self, request: Request) -> tuple[Count, ...]:
        return ()

    def candidates(self, request: Request) -> list[Candidate]:
        return [Candidate(self, float("inf"))]  # never the cheapest candidate

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        (candidate,) = self.candidates(request)
        return candidate if choices.has_only() else None

    def reason(self, candidate: Candidate, note: str = "") -> str:
        return self.summary


class Numpy(Family):
    name = "numpy"
    summary = "block by block with NumPy's BLAS, by the method that suits the layer"
    on_gpu = False

    def counts(self, request: Request) -> tuple[Count, ...]:
        return ()

    def candidates(self, request: Request, planned: str = "") -> list[Candidate]:
        from cupyconv.cpu import choice  # not imported for other implementations

        return [
            Candidate(self, method.microseconds, method=method.name, summary=method.summary)
            for method in choice.methods(request.problem, request.pass_, planned)
        ]

    def candidate(self, request: Request, choices: Choices) -> Candidate | None:
        if not choices.has_only("method"):
            return None
        found = self.candidates(request, choices.method)
        return next((c for c in found if c.method == choices.method), None)

    def reason(self, candidate: Candidate, note: str = "") -> str:
        estimate = f"estimated {duration(candidate.microseconds)}"
        return f"{candidate.method}, {candidate.summary}: {estimate}"


REFERENCE = Reference()
NUMPY = Numpy()
