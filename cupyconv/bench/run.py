"""Benchmark loop over layers, memory orders and passes: check each result, then time it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from cupyconv.bench import (
    ceilings,
    data,
    environment,
    peers,
    timing,
)
from cupyconv.bench.ceilings import Ceiling
from cupyconv.bench.places import Place
from cupyconv.bench.results import Log, Note, Results, Row
from cupyconv.bench.suites import SuiteLayer, fair_order
from cupyconv.checking import Agreement, Excerpt, Operands, pass_function
from cupyconv.errors import ConvError, CupyconvError
from cupyconv.planning import Impl, Precision, plan_pass
from cupyconv.problem import PASSES, ConvProblem
from cupyconv.signals import interrupts

SECONDS = {"cpu": 0.3, "gpu": 0.1}
"""Default time of one measurement, by place (chosen)."""

CHECKED_FLOPS = {"cpu": 0.3e9, "gpu": 2e9}
"""Number of FLOPs whose results are checked, by place: a fraction of a second (chosen)."""

CHECKED_BY: dict[str, Impl] = {"cpu": "reference", "gpu": "numpy"}
"""Implementation of the expected values, by place; on the CPU, not the default implementation."""

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
    impls: tuple[Impl, ...] = ("auto",)
    layouts: tuple[str, ...] = data.LAYOUTS
    precision: Precision = "ieee"
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
    """Pass of a layer in one memory order, with expected values."""

    layer: SuiteLayer
    problem: ConvProblem
    layout: str
    pass_: str
    sets: list[Operands]
    excerpt: Excerpt


@dataclass(frozen=True)
class _Candidate:
    """Implementation that computed a pass, with the check of its result."""

    name: str
    kernel: str
    call: timing.Call
    agreement: Agreement
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
        """PyTorch, which also measures the roofline."""
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
        return (3 + self._copies) * problem.bytes

    @property
    def _copies(self) -> int:
        """Copies of each operand set: one for cupyconv, and one per library that copies."""
        return 1 + sum(peer.copies for peer in self.beside)

    def _measure_layer(self, layer: SuiteLayer, dtype: str) -> None:
        options, xp = self.options, self.place.xp
        problem = data.in_layout(layer.problem, options.layouts[0], dtype)
        room = (self.place.free_bytes() - self._needed_bytes(problem)) // (2 * self._copies)
        most_sets = min(max(_SETS_BYTES // problem.bytes, 2), self.place.most_sets)
        count = max(min(1 + room // problem.bytes, most_sets), 1)
        sets = data.random_sets(problem, count, xp)
        self.too_slow.clear()
        for layout in options.layouts:
            source, problem = problem, data.in_layout(layer.problem, layout, dtype)
            if source != problem:
                for number, tensors in enumerate(sets):  # only one extra set at a time
                    sets[number] = data.reordered(tensors, source, problem, xp)
            for pass_ in options.passes:
                name = self.place.name
                excerpt = Excerpt(
                    problem, pass_, sets[0], self.place, CHECKED_BY[name], CHECKED_FLOPS[name]
                )
                self._pass(_Task(layer, problem, layout, pass_, sets, excerpt))

    # -- one pass ---------------------------------------------------------------------------------

    def _pass(self, task: _Task) -> None:
        """Check every implementation, time the correct implementations, and log the results."""
        problem = task.problem
        good: dict[str, _Candidate] = {}
        for candidate in self._candidates(task):
            if candidate.agreement.passed:
                good[candidate.name] = candidate
                continue
            what = f"{candidate.name} {task.pass_} {task.layout}"
            note = self._note(task, what, _error_text(candidate.agreement))
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
                    error=good[name].agreement.difference or 0.0,
                    bound=good[name].agreement.bound,
                    checked=task.excerpt.share,
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

    def _ours(self, task: _Task, impl: Impl) -> _Candidate:
        problem, pass_ = task.problem, task.pass_
        chosen = plan_pass(problem, pass_, self.place.device, impl, self.options.precision)
        compute = pass_function(problem, pass_, impl, self.options.precision)

        def call(number: int) -> Any:
            return compute(task.sets[number])

        return _Candidate(
            impl,
            f"{chosen.implementation} {chosen.tile or ''}".rstrip(),
            call,
            task.excerpt.judge(call(0), self.options.precision),
            chosen.workspace_bytes if self.place.name == "gpu" else None,
        )

    def _theirs(self, task: _Task, peer: peers.Peer) -> _Candidate:
        call = peer.call(task.problem, task.pass_, task.sets)
        workspace = peer.workspace_bytes(call)
        result = peer.to_array(call(0), task.problem, task.pass_)
        agreement = task.excerpt.judge(result, self.options.precision)
        return _Candidate(peer.name, peer.name, call, agreement, workspace)

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


def _error_text(agreement: Agreement) -> str:
    return (
        f"the relative error is {agreement.difference:.1e}; "
        f"at most {agreement.bound:.1e} is allowed"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
