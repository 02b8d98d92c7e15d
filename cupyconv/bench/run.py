"""Benchmark loop over layers, memory orders and passes: check each result, then time it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

from cupyconv.bench import ceilings, data, environment, pytorch, timing
from cupyconv.bench.places import Place
from cupyconv.bench.results import TORCH, Note, Results, Row
from cupyconv.bench.suites import SuiteLayer, fair_order
from cupyconv.checking import Excerpt, Operands, pass_function
from cupyconv.errors import ConvError, CupyconvError
from cupyconv.planning import Impl, Precision, Request, plan_pass
from cupyconv.problem import PASSES, ConvProblem

SECONDS = {"cpu": 0.3, "gpu": 0.1}  # default seconds per measurement, by place (hand-set)

CHECKED_FLOPS = {"cpu": 50e6, "gpu": 0.5e9}
"""FLOPs to spend on the expected values of a pass, by place; a result that needs more is checked in
part.  A depthwise layer takes about 1 s (hand-set)."""

CHECKED_BY: dict[str, Impl] = {"cpu": "reference", "gpu": "numpy"}
"""Implementation that computes the expected values, keyed by a place on which "auto" never
chooses it."""

SLOWEST_CALL = 10  # seconds; if PyTorch takes longer, only cupyconv is measured (hand-set)
_TOO_SLOW = f"a call takes more than {SLOWEST_CALL} s"

_SETS_BYTES = 1 << 30  # limit of all operand sets; consecutive calls use different sets (hand-set)
_COPIES = 4  # memory that a measurement needs, in multiples of a layer's tensors
_FEWEST_CALLS = 7  # least number of calls to check and time an implementation


@dataclass(frozen=True)
class Options:
    """Options of a run.

    Attributes:
        layers: layers in the order of the report; they are measured in ``suites.fair_order``.
        layouts: memory orders; the report uses the fastest order of each library.
        seconds: time per measurement; None for SECONDS.
        minutes: time limit of the run, divided among the dtypes; layers that do not fit are
            reported as skipped.
        torch: whether to measure PyTorch as well.
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
    torch: bool = True
    arguments: tuple[str, ...] = ()


def run(
    place: Place, options: Options, results: Results, advance: Callable[[], None] = lambda: None
) -> None:
    """Run the benchmark.

    Ctrl-C ends the run; the results so far are kept.

    Args:
        results: receives each result immediately.
        advance: called after each layer of each dtype.
    """
    try:
        # cuDNN's version is known only after PyTorch is imported.
        torch, why_not = pytorch.find(place) if options.torch else (None, "")
        results.environment = environment.describe(place, options.arguments)
        results.options = {**vars(options), "layers": [layer.name for layer in options.layers]}
        del results.options["arguments"]  # the environment has the command line
        with ExitStack() as settings:
            if torch is not None:
                threads = environment.threads()
                settings.enter_context(torch.settings(options.precision, threads))
            elif options.torch:
                results.skip(Note("", "", TORCH, why_not))
            _Run(place, options, results, torch).measure_all(advance)
        results.finished = True
    except KeyboardInterrupt:
        results.skip(Note("", "", "remaining layers", "interrupted"))
    except Exception as error:
        why = f"stopped by an error: {environment.first_line(error)}"
        results.skip(Note("", "", "remaining layers", why))
        raise
    finally:
        dtypes, layers = options.dtypes, [layer.name for layer in options.layers]
        results.rows.sort(key=lambda row: (dtypes.index(row.dtype), layers.index(row.layer)))


@dataclass
class _Run:
    place: Place
    options: Options
    results: Results
    torch: pytorch.PyTorch | None

    def measure_all(self, advance: Callable[[], None]) -> None:
        options = self.options
        ends = perf_counter() + 60 * options.minutes if options.minutes else inf
        for number, dtype in enumerate(options.dtypes):
            # Divide the remaining time equally among the remaining dtypes.
            now = perf_counter()
            until = now + (ends - now) / (len(options.dtypes) - number)
            try:
                measured = ceilings.measure(self.place, dtype, self.torch, self._seconds)
                self.results.ceilings[dtype] = measured
            except ceilings.NoCeilingError as error:
                self.results.skip(Note("all layers", dtype, "the roofline", str(error)))
            for layer in fair_order(options.layers):
                reason = self._reason_to_skip(layer.problem, dtype, until)
                reason = reason or self._layer(layer, dtype)
                if reason:
                    self.results.skip(Note(layer.name, dtype, "the layer", reason))
                advance()

    @property
    def _seconds(self) -> float:
        return self.options.seconds or SECONDS[self.place.name]

    def _reason_to_skip(self, problem: ConvProblem, dtype: str, until: float) -> str | None:
        options, ceiling = self.options, self.results.ceilings.get(dtype)
        if problem.flops == 0:
            return "there is nothing to compute for an empty batch"
        problem = data.in_layout(problem, options.layouts[0], dtype)
        needed, free = _COPIES * problem.bytes, self.place.free_bytes()
        if needed > free:
            return f"needs {needed / 2**30:.1f} GiB of memory; {free / 2**30:.1f} GiB are free"
        left = until - perf_counter()
        if left <= 0:
            return "no time left"
        calls = _FEWEST_CALLS * len(options.passes) * len(options.layouts)
        calls *= len(options.impls) + (self.torch is not None)
        seconds = calls * ceiling.seconds(problem.useful_flops, problem.bytes) if ceiling else 0
        if seconds > left:
            return f"needs about {seconds:.0f} s; {left:.0f} s are left"
        return None

    # -- one layer --------------------------------------------------------------------------------

    def _layer(self, layer: SuiteLayer, dtype: str) -> str | None:
        """Measure a layer in every memory order; return why it does not fit in memory, or None."""
        try:
            for layout in self.options.layouts:
                problem = data.in_layout(layer.problem, layout, dtype)
                room = (self.place.free_bytes() // problem.bytes - _COPIES) // 2 + 1
                most = min(max(_SETS_BYTES // problem.bytes, 2), self.place.most_sets)
                sets = data.random_sets(problem, max(min(room, most), 1), self.place.xp)
                for pass_ in self.options.passes:
                    self._pass(layer, problem, layout, pass_, sets)
                del sets  # free the memory for the operands in the next memory order
        except Exception as error:
            if not _is_memory_error(error):
                raise
            return "does not fit into memory"
        finally:
            if self.torch is not None:
                self.torch.release()
            self.place.release()
        return None

    def _pass(
        self, layer: SuiteLayer, problem: ConvProblem, layout: str, pass_: str, sets: list[Operands]
    ) -> None:
        """Check every implementation of a pass, and time the correct implementations."""
        place, options, results = self.place, self.options, self.results
        checked_by, flops = CHECKED_BY[place.name], CHECKED_FLOPS[place.name]
        excerpt = Excerpt(problem, pass_, sets[0], checked_by, flops)
        note = partial(Note, layer.name, problem.dtype)
        good = {}
        for name in (*options.impls, *([TORCH] if self.torch else [])):
            if name == TORCH and note(TORCH, _TOO_SLOW) in results.skipped:
                continue
            try:
                call, result, kernel, workspace = self._first_call(name, problem, pass_, sets)
            except ConvError as error:  # unsupported problem
                results.skip(note(name, error.values))
                continue
            except CupyconvError as error:
                results.failed.append(note(f"{name} {pass_}", environment.first_line(error)))
                continue
            except pytorch.ERRORS as error:
                if name != TORCH or _is_memory_error(error):
                    raise
                results.skip(note(f"{name} {pass_}", environment.first_line(error)))
                continue
            found = excerpt.judge(result, options.precision)
            del result
            if found.passed:
                good[name] = call, kernel, workspace, found
                continue
            why = f"the relative error is {found.difference:.1e}, above the limit {found.bound:.1e}"
            wrong = note(f"{name} {pass_} {layout}", why)
            results.skip(wrong) if name == TORCH else results.failed.append(wrong)
        calls = {name: call for name, (call, *_) in good.items()}
        for name, time in timing.measure(calls, len(sets), place, self._seconds).items():
            _, kernel, workspace, found = good[name]
            row = Row(
                layer=layer.name, suite=layer.suite, kind=layer.kind, pass_=pass_,
                dtype=problem.dtype, precision=options.precision, layout=layout,
                implementation=name, kernel=kernel, workspace_bytes=workspace,
                microseconds=time.seconds * 1e6, low=time.seconds * 1e6, high=time.high * 1e6,
                samples=time.samples, host_microseconds=time.host and time.host * 1e6,
                useful_flops=problem.useful_flops, bytes=problem.bytes,
                error=found.difference or 0.0, bound=found.bound, checked=excerpt.share,
            )  # fmt: skip
            results.rows.append(row)

    def _first_call(
        self, name: str, problem: ConvProblem, pass_: str, sets: list[Operands]
    ) -> tuple[timing.Call, Any, str, int | None]:
        """Return the call to time, its result, its kernel and its workspace in bytes."""
        if name == TORCH and self.torch is not None:
            call = self.torch.call(problem, pass_, sets)
            tries = 1 if self.place.name == "cpu" else 2  # cuDNN's first call tries algorithms
            times = (self.place.seconds(partial(call, 0), 1) for _ in range(tries))
            if all(time > SLOWEST_CALL for time in times):
                raise ConvError("PyTorch must be fast enough", _TOO_SLOW)
            return call, self.torch.to_array(call(0), problem, pass_), name, None
        impl: Any = name
        precision, on_gpu = self.options.precision, self.place.name == "gpu"
        chosen = plan_pass(Request(problem, pass_, self.place.device, precision), impl)
        compute = pass_function(problem, pass_, impl, precision)
        kernel = f"{chosen.implementation} {chosen.tile or ''}".rstrip()
        workspace = chosen.workspace_bytes if on_gpu else None
        return lambda i: compute(sets[i]), compute(sets[0]), kernel, workspace


def _is_memory_error(error: BaseException) -> bool:
    """Return whether memory ran out; CuPy's and PyTorch's errors are recognised by name."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )
