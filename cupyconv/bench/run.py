"""A run: every layer, memory order and pass, each implementation checked and then timed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from types import FrameType
from typing import Any

from cupyconv.bench import (
    ceilings,
    checks,
    data,
    environment,
    first_call,
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

SECONDS = {"cpu": 0.3, "gpu": 0.1}
"""Of one measurement, by place, where nothing else is asked for."""

# FLOPs that a reference may take, by who computes it; a fraction of a second each.
_TORCH_FLOPS = {"cpu": 4e9, "gpu": 200e9}
_NUMPY_FLOPS = {"cpu": 0.3e9, "gpu": 10e9}

# What computes the reference without PyTorch: on the CPU an implementation other than the usual
# one, which is under test.
_NUMPY_IMPL = {"cpu": "reference", "gpu": "numpy"}

_SETS_BYTES = 1 << 30  # of operands: calls on more take too long to be put in a row
_FEWEST_CALLS = 7  # of an implementation that is checked and timed, however slow
_FIRST_CALL_SECONDS = 60  # that must be left for measuring first calls
_SLOWEST_PEER_CALL = 10.0  # s; who takes longer is named, and not asked for the layer again


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        layers: in the order of the report; they are measured in ``suites.fair_order``.
        impls: our implementations, as ``impl`` takes them.
        layouts: memory orders; the fastest counts, for the peers as for us.
        seconds: of each measurement; None for SECONDS.
        minutes: of the run, shared by the dtypes; layers that do not fit in are named.
        peers: what to measure beside ours, of PEERS; None for all of the place's.
        first_calls: whether to measure first calls in new processes.
        arguments: of the command line, for the record.
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
    first_calls: bool = True
    arguments: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
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
    """Measure everything that is asked for.

    A run that is interrupted by Ctrl-C ends with what it has.

    Args:
        log: takes every figure as soon as there is one; closed at the end.
        advance: called after each layer of each dtype.
    """
    names = peers.NAMES[place.name] if options.peers is None else options.peers
    try:
        log.start(environment.describe(place, options.arguments), options.record())
        found: list[peers.Peer] = []
        with _interrupts() as require_none, ExitStack() as settings:
            for name in names:
                peer, why_not = peers.find(place, name)
                require_none()
                if peer is None:
                    log.skip(Note("", "", name, why_not))
                    continue
                settings.enter_context(peer.settings(options.precision, environment.threads()))
                found.append(peer)

            def after_a_layer() -> None:
                require_none()
                advance()

            _Run(place, options, log, found, after_a_layer).everything()
        log.finish()
    except KeyboardInterrupt:
        log.skip(Note("", "", "the rest", "interrupted"))
    except Exception as error:
        log.skip(Note("", "", "the rest", f"stopped by an error: {_line(error)}"))
        raise
    finally:
        log.close()
    return log.results


@contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """What raises again an interrupt that a library swallowed, as some do in their imports."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    def require_none() -> None:
        if came:
            raise KeyboardInterrupt

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    is_ours = is_usual and threading.current_thread() is threading.main_thread()
    if is_ours:
        signal.signal(signal.SIGINT, note)
    try:
        yield require_none
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class _Task:
    """One pass of one layer in one memory order, and the part of its result that is known."""

    layer: SuiteLayer
    problem: ConvProblem
    layout: str
    pass_: str
    sets: list[Operands]
    part: checks.Excerpt
    expected: Any


@dataclass(frozen=True)
class _Candidate:
    """An implementation that computed a pass, and how right it was."""

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
    too_slow: set[str] = field(default_factory=set)  # peers, for the layer at hand

    @property
    def torch(self) -> peers.TorchPeer | None:
        """PyTorch, which computes references and the roofline too."""
        return next((peer for peer in self.beside if isinstance(peer, peers.TorchPeer)), None)

    def everything(self) -> None:
        options = self.options
        layers = fair_order(options.layers)
        for number, dtype in enumerate(options.dtypes):
            # Every dtype gets an equal part of the time that is left.
            left = self._seconds_left()
            until = None
            if left is not None:
                until = perf_counter() + left / (len(options.dtypes) - number)
            ceiling = self._ceiling(dtype)
            if number == 0 and options.first_calls and layers:
                self._first_calls(layers, dtype)
            for layer in layers:
                self._layer(layer, dtype, ceiling, until)
                self.advance()

    def _ceiling(self, dtype: str) -> Ceiling | None:
        """That of a dtype; None, which the report says, where nothing at hand can measure it."""
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

    def _first_calls(self, layers: Iterable[SuiteLayer], dtype: str) -> None:
        options, left = self.options, self._seconds_left()
        layer = next(iter(layers))
        if left is not None and left < _FIRST_CALL_SECONDS:
            self.log.skip(Note(layer.name, dtype, "first calls", "no time left"))
            return
        try:
            for entry in first_call.measure(
                layer,
                dtype,
                options.passes,
                self.place.name,
                implementation=options.impls[0],
                precision=options.precision,
                peers=[peer.name for peer in self.beside if peer.refuses(layer.problem) is None],
            ):
                self.log.first_call(entry)
        except first_call.FirstCallError as error:
            self.log.skip(Note(layer.name, dtype, "first calls", str(error)))

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
            return f"needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
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
            return f"needs about {needed_seconds:.0f} s, {left:.0f} are left"
        return None

    def _needed_bytes(self, problem: ConvProblem) -> int:
        """Sets of operands, a result of ours and one of a peer's, and float64 for the check."""
        _, most_flops = self._referee(problem)
        share = max(
            checks.excerpt_of(problem, pass_, most_flops).share for pass_ in self.options.passes
        )
        wide = "complex128" if problem.is_complex else "float64"
        wide_bytes = problem.bytes * ITEMSIZE[wide] / ITEMSIZE[problem.dtype]
        return (2 + self._copies) * problem.bytes + round(3 * share * wide_bytes)

    @property
    def _copies(self) -> int:
        """Of each set of operands, ours and those of the peers that need their own."""
        return 1 + sum(peer.copies for peer in self.beside)

    def _referee(self, problem: ConvProblem) -> tuple[checks.Exact, float]:
        """What computes the reference of a problem, and the FLOPs that it may take for it."""
        name = self.place.name
        if self.torch is not None and self.torch.refuses(problem) is None:
            return self.torch.exact, _TORCH_FLOPS[name]
        return checks.numpy_exact(self.place, _NUMPY_IMPL[name]), _NUMPY_FLOPS[name]

    def _measure_layer(self, layer: SuiteLayer, dtype: str) -> None:
        options, xp = self.options, self.place.xp
        problem = data.in_layout(layer.problem, options.layouts[0], dtype)
        exact, most_flops = self._referee(problem)
        room = (self.place.free_bytes() - self._needed_bytes(problem)) // (2 * self._copies)
        wanted = min(max(_SETS_BYTES // problem.bytes, 2), self.place.most_sets)
        count = max(min(1 + room // problem.bytes, wanted), 1)
        sets = data.random_sets(problem, count, xp)
        references: dict[str, tuple[checks.Excerpt, Any]] = {}
        self.too_slow.clear()
        for layout in options.layouts:
            source, problem = problem, data.in_layout(layer.problem, layout, dtype)
            if source != problem:
                for number, tensors in enumerate(sets):  # one by one: there is room for one more
                    sets[number] = data.reordered(tensors, source, problem, xp)
            for pass_ in options.passes:
                if pass_ not in references:
                    part = checks.excerpt_of(problem, pass_, most_flops)
                    expected = checks.reference(problem, pass_, sets[0], part, exact)
                    references[pass_] = part, expected
                self._pass(_Task(layer, problem, layout, pass_, sets, *references[pass_]))

    # -- one pass ---------------------------------------------------------------------------------

    def _pass(self, task: _Task) -> None:
        """Check every implementation, time those that are right, and log both."""
        problem = task.problem
        good: dict[str, _Candidate] = {}
        for candidate in self._candidates(task):
            if candidate.verdict.good:
                good[candidate.name] = candidate
                continue
            what = f"{candidate.name} {task.pass_} {task.layout}"
            note = self._note(task, what, _off(candidate.verdict))
            (self.log.skip if candidate.name in peers.PEERS else self.log.fail)(note)
        if not good:
            return
        calls = {name: candidate.call for name, candidate in good.items()}
        measured = timing.measure(calls, len(task.sets), self.place.clock, self._seconds())
        for name, found in measured.items():
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
                    microseconds=found.seconds * 1e6,
                    low=found.low * 1e6,
                    high=found.high * 1e6,
                    samples=found.samples,
                    host_microseconds=None if found.host is None else found.host * 1e6,
                    workspace_bytes=good[name].workspace_bytes,
                    useful_flops=problem.useful_flops,
                    bytes=problem.bytes,
                    error=good[name].verdict.error,
                    bound=good[name].verdict.bound,
                    checked=task.part.share,
                )
            )

    def _candidates(self, task: _Task) -> Iterator[_Candidate]:
        """What can compute a pass, with a verdict on its result; what cannot is logged."""
        for impl in self.options.impls:
            try:
                yield self._ours(task, impl)
            except ConvError as error:  # it does not take this problem
                self.log.skip(self._note(task, impl, error.values))
            except CupyconvError as error:
                self.log.fail(self._note(task, f"{impl} {task.pass_}", _line(error)))
        for peer in (one for one in self.beside if one.name not in self.too_slow):
            refusal = peer.refuses(task.problem)
            if refusal is not None:
                self.log.skip(self._note(task, peer.name, refusal))
                continue
            try:
                started = perf_counter()
                candidate = self._theirs(task, peer)
                took = perf_counter() - started
                if took > _SLOWEST_PEER_CALL:  # or compiling did
                    started = perf_counter()
                    candidate.call(0)
                    took = perf_counter() - started
            except peer.errors as error:
                if _is_memory_error(error):
                    raise
                self.log.skip(self._note(task, f"{peer.name} {task.pass_}", _line(error)))
                continue
            if took > _SLOWEST_PEER_CALL:
                reason = (
                    f"a call takes more than {_SLOWEST_PEER_CALL:g} s; this layer is left out from "
                    "there on"
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
        """On a whole result."""
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
    """Whether memory ran out; CuPy's and PyTorch's own errors are known by their names."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def _off(verdict: checks.Verdict) -> str:
    return (
        f"the result is off by {verdict.error:.1e} (largest {verdict.largest:.1e}), "
        f"allowed are {verdict.bound:.1e}"
    )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
