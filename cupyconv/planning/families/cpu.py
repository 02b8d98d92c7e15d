"""The implementations on the CPU: the definition, and what NumPy is fast at."""

from __future__ import annotations

from cupyconv.planning import cpu
from cupyconv.planning.families.family import Candidate, Family, Tile
from cupyconv.planning.reach import Count
from cupyconv.planning.request import Request


class Reference(Family):
    name = "reference"
    summary = "the definition, tap by tap, summed in float64 with NumPy"
    on_gpu = False

    def counts(self, request: Request) -> tuple[Count, ...]:
        return ()

    def candidates(self, request: Request) -> list[Candidate]:
        return [Candidate(self, float("inf"))]  # the last resort

    def candidate(
        self, request: Request, tile: Tile | None, splits: int, method: str = ""
    ) -> Candidate | None:
        (found,) = self.candidates(request)
        return found if (tile, splits, method) == (None, 1, "") else None

    def reason(self, candidate: Candidate, note: str = "") -> str:
        return self.summary


class Numpy(Family):
    name = "numpy"
    summary = "block by block with NumPy's BLAS, by the method that suits the layer"
    on_gpu = False

    def counts(self, request: Request) -> tuple[Count, ...]:
        return ()

    def candidates(self, request: Request) -> list[Candidate]:
        return [
            Candidate(self, one.microseconds, method=one.name, summary=one.summary)
            for one in cpu.methods(request.problem, request.pass_)
        ]

    def candidate(
        self, request: Request, tile: Tile | None, splits: int, method: str = ""
    ) -> Candidate | None:
        if (tile, splits) != (None, 1):
            return None
        return next((one for one in self.candidates(request) if one.method == method), None)

    def reason(self, candidate: Candidate, note: str = "") -> str:
        estimate = f"estimated {candidate.microseconds / 1e3:.3g} ms"
        return f"{candidate.method}, {candidate.summary}: {estimate}"


REFERENCE = Reference()
NUMPY = Numpy()
