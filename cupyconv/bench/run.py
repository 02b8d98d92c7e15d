"""Benchmark loop over layers, memory orders and passes: check each result, then time it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from cupyconv.bench import (
    ceilings,
    checks,
    data,
    environment,
    implementations,
    peers,
    timing,
)
from cupyconv.bench.ceilings import Ceiling
from cupyconv.bench.places import Place
from cupyconv.bench.results import Log, Note, Results, Row
from cupyconv.bench.suites import SuiteLayer, fair_order
from cupyconv.checking import Operands
from cupyconv.errors import ConvError, CupyconvError
from cupyconv.planning import plan_pass
from cupyconv.problem import ITEMSIZE, PASSES, ConvProblem
from cupyconv.signals import interrupts

SECONDS = {"cpu": 0.3, "gpu": 0.1}
"""Default time of one measurement, by place (chosen)."""

# Largest number of FLOPs of a reference, with PyTorch and with NumPy; each reference takes a
# fraction of a second.
_TORCH_FLOPS = {"cpu": 4e9, "gpu": 200e9}
_NUMPY_FLOPS = {"cpu": 0.3e9, "gpu": 10e9}

# Implementation that computes the reference without PyTorch.  On the CPU it is not the default
# implementation, which is under test.
_NUMPY_IMPL = {"cpu": "reference", "gpu": "numpy"}

_SETS_BYTES = 1 << 30  # limit of all operand sets together; larger sets need no grouped calls
_FEWEST_CALLS = 7  # calls to check and time an implementation, however slow it is
_SLOWEST_PEER_CALL = 10.0  # s; a slower peer is skipped for the rest of the layer


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        layers: layers in the order of the report; they are measured in ``suites.fair_order``.
        impls: values of ``impl`` to measure.
        layouts: memory orders; the report uses the fastest order of each library.
        seconds: time per measurement; None for SECONDS.
        minutes: time limit of the run, divided among the dtypes; layers that do not fit are
            reported as skipped.
        peers: names of PEERS to measure; None for all libraries that run on the place.
        arguments: command-line arguments, recorded in the results.
    """

    layers: tuple[SuiteLayer, ...]
    dtypes: tuple[str, ...] = ("float32",)
    passes: tuple[str, ...] = PASSES
    impls: tuple[str, ...] = ("auto",)
    layouts: tuple[str, ...] = data.LAYOUTS
    precision: str = "ieee"
    seconds: float | None = None
    minutes: float | None = None
    peers: tuple[str, ...] | None = None
    arguments: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return the options as a JSON object."""
        return {
            "layers": [layer.name for layer in self.layers],
            "dtypes": list(self.dtypes),
            "passes": list(self.passes),
            "impls": list(self.impls),
            "layouts": list(self.layouts),
            "precision": self.precision,
            "seconds": self.seconds,
            "minutes": self.minutes,
        }


def run(
    place: Place, options: Options, log: Log, advance: Callable[[], None] = lambda: None
) -> Results:
    """Run the benchmark.

    Ctrl-C ends the run; the results so far are returned.

    Args:
        log: receives each result immediately; closed at the end.
        advance: called after each layer of each dtype.
    """
    names = peers.NAMES[place.name] if options.peers is None else options.peers
    try:
        log.start(environment.describe(place, options.arguments), options.record())
        available: list[peers.Peer] = []
        with interrupts() as has_interrupt, ExitStack() as settings:

            def raise_if_interrupted() -> None:
                if has_interrupt():
                    raise KeyboardInterrupt

            for name in names:
                peer, why_not = peers.find(place, name)
                raise_if_interrupted()
                if peer is None:
                    log.skip(Note("", "", name, why_not))
                    continue
                settings.enter_context(peer.settings(options.precision, environment.threads()))
                available.append(peer)

            def finish_layer() -> None:
                raise_if_interrupted()
                advance()

            _Run(place, options, log, available, finish_layer).measure_all()
        log.finish()
    except KeyboardInterrupt:
        log.skip(Note("", "", "remaining layers", "interrupted"))
    except Exception as error:
        log.skip(Note("", "", "remaining layers", f"stopped by an error: {_first_line(error)}"))
        raise
    finally:
        log.close()
    return log.results


@dataclass(frozen=True)
class _Task:
    """Pass of a layer in one memory order, with the reference for an excerpt of the result."""

    layer: SuiteLayer
    problem: ConvProblem
    layout: str
    pass_: str
    sets: list[Operands]
    part: checks.Excerpt
    expected: Any


@dataclass(frozen=True)
class _Candidate:
    """Implementation that computed a pass, with the verdict on its result."""

    name: str
    kernel: str
    call: timing.Call
    verdict: checks.Verdict
    workspace_bytes: int | None


@dataclass
class _Run:
    place: Place
    options: Options
    log: Log
    beside: list[peers.Peer]
    advance: Callable[[], None]
    started: float = field(default_factory=perf_counter)
    too_slow: set[str] = field(default_factory=set)  # peers skipped for the current layer

    @property
    def torch(self) -> peers.TorchPeer | None:
        """PyTorch, which also computes references and the roofline."""
        return next((peer for peer in self.beside if isinstance(peer, peers.TorchPeer)), None)

    def measure_all(self) -> None:
        options = self.options
        layers = fair_order(options.layers)
        for number, dtype in enumerate(options.dtypes):
            # Divide the remaining time equally among the remaining dtypes.
            left = self._seconds_left()
            until = None
            if left is not None:
                until = perf_counter() + left / (len(options.dtypes) - number)
            ceiling = self._ceiling(dtype)
            for layer in layers:
                self._layer(layer, dtype, ceiling, until)
                self.advance()

    def _ceiling(self, dtype: str) -> Ceiling | None:
        """Measure the roofline of a dtype; if no library can, log why and return None."""
        try:
            ceiling = ceilings.measure(self.place, dtype, self.torch, self._seconds())
        except ceilings.NoCeilingError as error:
            self.log.skip(Note("all layers", dtype, "the roofline", str(error)))
            return None
        self.log.ceiling(dtype, ceiling)
        return ceiling

    def _seconds(self) -> float:
        return self.options.seconds or SECONDS[self.place.name]

    def _seconds_left(self) -> float | None:
        if self.options.minutes is None:
            return None
        return self.options.minutes * 60 - (perf_counter() - self.started)

    # -- one layer --------------------------------------------------------------------------------

    def _layer(
        self, layer: SuiteLayer, dtype: str, ceiling: Ceiling | None, until: float | None
    ) -> None:
        reason = self._reason_to_skip(layer.problem, dtype, ceiling, until)
        if reason is not None:
            self.log.skip(Note(layer.name, dtype, "the layer", reason))
            return
        try:
            self._measure_layer(layer, dtype)
        except Exception as error:
            if not _is_memory_error(error):
                raise
            self.log.skip(Note(layer.name, dtype, "the layer", "does not fit into memory"))
        finally:
            self._release()

    def _reason_to_skip(
        self, problem: ConvProblem, dtype: str, ceiling: Ceiling | None, until: float | None
    ) -> str | None:
        if problem.flops == 0:
            return "there is nothing to compute for an empty batch"
        problem = data.in_layout(problem, self.options.layouts[0], dtype)
        needed, free = self._needed_bytes(problem), self.place.free_bytes()
        if needed > free:
            return f"needs {needed / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free"
        if until is None:
            return None
        left = until - perf_counter()
        measured = len(self.options.impls) + len(self.beside)
        calls = measured * _FEWEST_CALLS * len(self.options.passes) * len(self.options.layouts)
        if left <= 0:
            return "no time left"
        if ceiling is None:
            return None
        needed_seconds = calls * ceiling.seconds(problem.useful_flops, problem.bytes)
        if needed_seconds > left:
            return f"needs about {needed_seconds:.0f} s; {left:.0f} s are left"
        return None

    def _needed_bytes(self, problem: ConvProblem) -> int:
        """Return the bytes for all copies of one operand set, two results, and the check."""
        _, most_flops = self._referee(problem)
        share = max(
            checks.excerpt_of(problem, pass_, most_flops).share for pass_ in self.options.passes
        )
        wide = "complex128" if problem.is_complex else "float64"
        wide_bytes = problem.bytes * ITEMSIZE[wide] / ITEMSIZE[problem.dtype]
        return (2 + self._copies) * problem.bytes + round(3 * share * wide_bytes)

    @property
    def _copies(self) -> int:
        """Copies of each operand set: one for cupyconv, and one per library that copies."""
        return 1 + sum(peer.copies for peer in self.beside)

    def _referee(self, problem: ConvProblem) -> tuple[checks.Exact, float]:
        """Return the reference function for a problem, and the largest number of FLOPs for it."""
        name = self.place.name
        if self.torch is not None and self.torch.refuses(problem) is None:
            return self.torch.exact, _TORCH_FLOPS[name]
        return checks.numpy_exact(self.place, _NUMPY_IMPL[name]), _NUMPY_FLOPS[name]

    def _measure_layer(self, layer: SuiteLayer, dtype: str) -> None:
        options, xp = self.options, self.place.xp
        problem = data.in_layout(layer.problem, options.layouts[0], dtype)
        exact, most_flops = self._referee(problem)
        room = (self.place.free_bytes() - self._needed_bytes(problem)) // (2 * self._copies)
        most_sets = min(max(_SETS_BYTES // problem.bytes, 2), self.place.most_sets)
        count = max(min(1 + room // problem.bytes, most_sets), 1)
        sets = data.random_sets(problem, count, xp)
        references: dict[str, tuple[checks.Excerpt, Any]] = {}
        self.too_slow.clear()
        for layout in options.layouts:
            source, problem = problem, data.in_layout(layer.problem, layout, dtype)
            if source != problem:
                for number, tensors in enumerate(sets):  # only one extra set at a time
                    sets[number] = data.reordered(tensors, source, problem, xp)
            for pass_ in options.passes:
                if pass_ not in references:
                    part = checks.excerpt_of(problem, pass_, most_flops)
                    expected = checks.reference(problem, pass_, sets[0], part, exact)
                    references[pass_] = part, expected
                self._pass(_Task(layer, problem, layout, pass_, sets, *references[pass_]))

    # -- one pass ---------------------------------------------------------------------------------

    def _pass(self, task: _Task) -> None:
        """Check every implementation, time the correct implementations, and log the results."""
        problem = task.problem
        good: dict[str, _Candidate] = {}
        for candidate in self._candidates(task):
            if candidate.verdict.good:
                good[candidate.name] = candidate
                continue
            what = f"{candidate.name} {task.pass_} {task.layout}"
            note = self._note(task, what, _error_text(candidate.verdict))
            (self.log.skip if candidate.name in peers.PEERS else self.log.fail)(note)
        if not good:
            return
        calls = {name: candidate.call for name, candidate in good.items()}
        measured = timing.measure(calls, len(task.sets), self.place.clock, self._seconds())
        for name, time in measured.items():
            self.log.row(
                Row(
                    layer=task.layer.name,
                    suite=task.layer.suite,
                    kind=task.layer.kind,
                    pass_=task.pass_,
                    dtype=problem.dtype,
                    precision=self.options.precision,
                    implementation=name,
                    kernel=good[name].kernel,
                    layout=task.layout,
                    microseconds=time.seconds * 1e6,
                    low=time.low * 1e6,
                    high=time.high * 1e6,
                    samples=time.samples,
                    host_microseconds=None if time.host is None else time.host * 1e6,
                    workspace_bytes=good[name].workspace_bytes,
                    useful_flops=problem.useful_flops,
                    bytes=problem.bytes,
                    error=good[name].verdict.error,
                    bound=good[name].verdict.bound,
                    checked=task.part.share,
                )
            )

    def _candidates(self, task: _Task) -> Iterator[_Candidate]:
        """Yield every implementation that computes a pass; log why the others do not."""
        for impl in self.options.impls:
            try:
                yield self._ours(task, impl)
            except ConvError as error:  # unsupported problem
                self.log.skip(self._note(task, impl, error.values))
            except CupyconvError as error:
                self.log.fail(self._note(task, f"{impl} {task.pass_}", _first_line(error)))
        for peer in (peer for peer in self.beside if peer.name not in self.too_slow):
            refusal = peer.refuses(task.problem)
            if refusal is not None:
                self.log.skip(self._note(task, peer.name, refusal))
                continue
            try:
                started = perf_counter()
                candidate = self._theirs(task, peer)
                took = perf_counter() - started
                if took > _SLOWEST_PEER_CALL:  # time again, as the first call may compile
                    started = perf_counter()
                    candidate.call(0)
                    took = perf_counter() - started
            except peer.errors as error:
                if _is_memory_error(error):
                    raise
                self.log.skip(self._note(task, f"{peer.name} {task.pass_}", _first_line(error)))
                continue
            if took > _SLOWEST_PEER_CALL:
                reason = (
                    f"a call takes more than {_SLOWEST_PEER_CALL:g} s; the rest of this layer is "
                    "skipped"
                )
                self.log.skip(self._note(task, f"{peer.name} {task.pass_} {task.layout}", reason))
                self.too_slow.add(peer.name)
                continue
            yield candidate

    def _ours(self, task: _Task, impl: str) -> _Candidate:
        problem, pass_ = task.problem, task.pass_
        chosen = plan_pass(problem, pass_, self.place.device, impl, self.options.precision)
        call = implementations.pass_call(problem, pass_, task.sets, impl, self.options.precision)
        return _Candidate(
            impl,
            f"{chosen.implementation} {chosen.tile or ''}".rstrip(),
            call,
            self._verdict(task, call(0)),
            chosen.workspace_bytes if self.place.name == "gpu" else None,
        )

    def _theirs(self, task: _Task, peer: peers.Peer) -> _Candidate:
        call = peer.call(task.problem, task.pass_, task.sets)
        workspace = peer.workspace_bytes(call)
        result = peer.to_array(call(0), task.problem, task.pass_)
        return _Candidate(peer.name, peer.name, call, self._verdict(task, result), workspace)

    def _verdict(self, task: _Task, result: Any) -> checks.Verdict:
        """Compare the excerpt of a result with the reference."""
        limit = checks.bound(task.problem, task.pass_, self.options.precision)
        part = checks.result_part(task.problem, task.pass_, result, task.part)
        return checks.judge(part, task.expected, limit)

    def _note(self, task: _Task, what: str, reason: str) -> Note:
        return Note(task.layer.name, task.problem.dtype, what, reason)

    def _release(self) -> None:
        for peer in self.beside:
            peer.release()
        self.place.release()


def _is_memory_error(error: BaseException) -> bool:
    """Return whether memory ran out; CuPy's and PyTorch's errors are recognised by name."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def _error_text(verdict: checks.Verdict) -> str:
    return (
        f"the relative error is {verdict.error:.1e} (largest {verdict.largest:.1e}); "
        f"at most {verdict.bound:.1e} is allowed"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
