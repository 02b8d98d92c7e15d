"""`cupyconv check`: compare every implementation with the float64 reference."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cupyconv import ConvError, ConvProblem, CupyconvError, DeviceError
from cupyconv.cli import configuration, output
from cupyconv.cli.configuration import Layer
from cupyconv.errors import require_word
from cupyconv.formats import data_formats, filter_formats
from cupyconv.markup import MOST_LINES, in_line
from cupyconv.planning import Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import ITEMSIZE, PADDING_WORDS, PASSES, REAL_ITEMSIZE, RESULT, counted

# --help must work without NumPy: functions import NumPy and the modules that need it.
if TYPE_CHECKING:
    from cupyconv.bench.places import Place
    from cupyconv.checking import Truth

BUILT_IN = Path(__file__).with_name("checks.toml")


@dataclass
class Count:
    """Numbers of comparisons and failures, and the largest ratio of a difference to its bound.

    The bound is the largest difference that rounding explains.
    """

    comparisons: int = 0
    failures: int = 0
    worst_share_of_bound: float = 0.0


@dataclass
class Tally:
    """Results of the comparisons so far.

    Attributes:
        configurations: number of layers to check.
        counts: Count of each (implementation, dtype).
        refused: number of problems for which the implementation supports no pass, by
            implementation.
        failures: failed comparisons, as --json prints them.  "data" is "integer", compared exactly,
            or "random".  "tensor" is the wrong result; "adjoint identity" if the inner products
            differ; "all" if the computation raised an exception.
    """

    configurations: int = 0
    counts: defaultdict[tuple[str, str], Count] = field(default_factory=lambda: defaultdict(Count))
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    @property
    def comparisons(self) -> int:
        """Number of all comparisons."""
        return sum(count.comparisons for count in self.counts.values())


@click.command()
@configuration.configuration_options
@click.option(
    "--dtype",
    "dtypes",
    metavar="DTYPE",
    multiple=True,
    help="Check this dtype.  Repeatable.  [default: all real dtypes]",
)
@click.option(
    "--impl",
    "impls",
    metavar="NAME",
    shell_complete=configuration.completing(lambda: FAMILIES),
    multiple=True,
    help="Check this implementation.  Repeatable.  [default: all]",
)
@configuration.place_option(
    "Check on this device; auto checks the CPU, and the GPU if there is one."
)
@click.option(
    "--random",
    "count",
    metavar="N",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Check N random configurations in addition.",
)
@configuration.seed_option("Draw data from this seed.")
@output.json_option
def command(
    dtypes: tuple[str, ...],
    impls: tuple[str, ...],
    device: str,
    count: int,
    seed: int,
    as_json: bool,
    **options: Any,
) -> int:
    """Compare every implementation with the float64 reference.

    The exit code is 1 if a comparison fails, for use in CI.

    Without a configuration, the command checks a built-in list of edge cases.  With integer data,
    the results and the adjoint identity must be exact.  With random data, the error must be at most
    twice that of plain summation in the same precision.
    """
    from cupyconv.cli.data import place_of

    for dtype in dtypes:
        require_word("--dtype", dtype, ITEMSIZE)
    places: dict[str, Place] = {}
    not_checked: dict[str, str] = {}
    for name in _implementations(impls, device):
        try:
            places[name] = place_of("auto", name)
        except DeviceError as error:
            if impls or device == "gpu":
                raise
            not_checked[name] = str(error)
    layers = _layers(options, count, seed)
    problems = [
        (layer, layer.problem(dtype=dtype)) for layer in layers for dtype in _dtypes(layer, dtypes)
    ]
    tally = Tally(configurations=len(layers))
    with output.progress("checking", len(problems)) as advance:
        for layer, problem in problems:
            _check(layer, problem, places, seed, tally)
            advance()
    if as_json:
        output.write_json(_as_json(tally, places, not_checked, seed))
    else:
        output.draw(*_tables(tally, not_checked))
    return 1 if tally.failures else 0


# -- what is checked -------------------------------------------------------------------------------


def _implementations(impls: Sequence[str], device: str) -> list[str]:
    for name in impls:
        require_word("--impl", name, FAMILIES)
    places = {"auto": (False, True), "cpu": (False,), "gpu": (True,)}[device]
    names = [n for n in impls or FAMILIES if FAMILIES[n].on_gpu in places]
    if not names:
        raise ConvError(
            "--impl must name an implementation for --device",
            f"{', '.join(impls)} {'does' if len(impls) == 1 else 'do'} not run on the {device}",
            "Leave out --impl or --device",
        )
    return names


def _layers(options: dict[str, Any], count: int, seed: int) -> list[Layer]:
    if any(value is not None for value in options.values()):
        layers = configuration.read_layers(options)
    else:
        layers = configuration.read_file(BUILT_IN)
    return [*layers, *_random_layers(count, seed)]


def _dtypes(layer: Layer, dtypes: Sequence[str]) -> Sequence[str]:
    own = layer.arguments.get("dtype")
    return dtypes or ((own,) if own else tuple(REAL_ITEMSIZE))


def _random_layers(count: int, seed: int) -> Iterator[Layer]:
    """Yield random valid layers of every rank, format, kind of padding and grouping."""
    draw = random.Random(seed)
    for number in range(count):
        rank = draw.choice((1, 2, 2, 3))
        groups = draw.choice((1, 1, 2, 3))
        per_group, filters = draw.randint(1, 5), draw.randint(1, 5) * groups
        taps = [draw.randint(1, 4) for _ in range(rank)]
        dilation = [draw.randint(1, 3) for _ in range(rank)]
        padding: Any = draw.choice((*PADDING_WORDS, "explicit", "explicit"))
        if padding == "explicit":
            padding = [(draw.randint(0, 3), draw.randint(0, 3)) for _ in range(rank)]
        spans = [(k - 1) * d + 1 for k, d in zip(taps, dilation, strict=True)]
        pads = [0] * rank if padding == "valid" else spans
        if isinstance(padding, list):
            pads = [before + after for before, after in padding]
        least = (max(span - pad, 1) for span, pad in zip(spans, pads, strict=True))
        sizes = [size + draw.randint(0, 7) for size in least]
        batch, channels = draw.choice((0, 1, 2, 3)), per_group * groups
        letters = {"N": batch, "C": channels, "O": filters, "I": per_group}
        axes = "DHW"[-rank:]
        data_format = draw.choice(data_formats(rank))
        filter_format = draw.choice(filter_formats(rank))
        inputs = letters | dict(zip(axes, sizes, strict=True))
        weights = letters | dict(zip(axes, taps, strict=True))
        arguments = {
            "input_shape": tuple(inputs[letter] for letter in data_format),
            "filter_shape": tuple(weights[letter] for letter in filter_format),
            "stride": tuple(draw.randint(1, 4) for _ in range(rank)),
            "padding": padding,
            "dilation": tuple(dilation),
            "groups": groups,
            "data_format": data_format,
            "filter_format": filter_format,
        }
        yield Layer(f"random-{number}", None, arguments)


# -- comparing -------------------------------------------------------------------------------------


def _check(
    layer: Layer, problem: ConvProblem, places: dict[str, Place], seed: int, tally: Tally
) -> None:
    """Check all implementations on one problem, with integer and with random data."""
    import numpy as np

    from cupyconv.checking import Operands, Truth, integer_operands
    from cupyconv.explaining.values import draw

    generator = np.random.default_rng(seed)
    truths = {
        "integer": Truth(problem, integer_operands(problem, generator)),
        "random": Truth(problem, Operands(**draw(problem, seed))),
    }
    for name, place in places.items():
        passes = _supported(problem, place, name)
        if not passes:
            tally.refused[name] += 1
            continue
        for kind, truth in truths.items():
            comparisons = _compare(truth, name, place, passes, exactly=kind == "integer")
            count = tally.counts[name, problem.dtype]
            for tensor, wrong, share in comparisons:
                count.comparisons += 1
                count.worst_share_of_bound = max(count.worst_share_of_bound, share)
                if wrong is not None:
                    count.failures += 1
                    failure = {
                        **configuration.as_json(layer, problem),
                        "implementation": name,
                        "data": kind,
                        "tensor": tensor,
                        "reason": wrong,
                        "command": f"cupyconv check {configuration.as_options(problem)} "
                        f"--dtype {problem.dtype} --impl {name} --seed {seed}",
                    }
                    tally.failures.append(failure)


def _supported(problem: ConvProblem, place: Place, name: str) -> tuple[str, ...]:
    """Return the passes of a problem that an implementation supports."""
    passes = []
    for pass_ in PASSES:
        with suppress(ConvError):
            plan_pass(Request(problem, pass_, place.device), name)
            passes.append(pass_)
    return tuple(passes)


def _compare(
    truth: Truth, name: str, place: Place, passes: tuple[str, ...], *, exactly: bool
) -> Iterator[tuple[str, str | None, float]]:
    """Yield (tensor, fault or None, difference / bound) for each comparison.

    For passes that the implementation does not support, the planner chooses another
    implementation.  Only the adjoint identity uses the results of these passes.
    """
    import numpy as np

    from cupyconv.checking import compute

    others = {RESULT[pass_] for pass_ in RESULT if pass_ not in passes}
    try:
        results = compute(truth.problem, truth.operands, name, passes, xp=place.xp)
    except (CupyconvError, MemoryError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("cupy"):
            raise  # the GPU itself failed, so all later comparisons would fail
        yield "all", f"{type(error).__name__}: {error}", 0.0
        return
    if not exactly:
        for agreement in truth.against_reference(results):
            if agreement.tensor in others:
                continue
            used = (agreement.difference or 0.0) / agreement.bound
            wrong = f"off by {agreement.difference:.1e}, bound {agreement.bound:.1e}"
            yield agreement.tensor, None if agreement.passed else wrong, used
        return
    for tensor, actual in results._asdict().items():
        if tensor in others:
            continue
        expected = getattr(truth.results, tensor)
        different = int(np.count_nonzero(actual.astype(expected.dtype) != expected))
        wrong = f"{different} of {actual.size} elements differ"
        yield tensor, wrong if different else None, 0.0
    products = truth.inner_products(results)
    wrong = ", ".join(f"{pair} = {value:.17g}" for pair, value in products.items())
    yield "adjoint identity", wrong if len(set(products.values())) > 1 else None, 0.0


# -- printing --------------------------------------------------------------------------------------


def _tables(tally: Tally, not_checked: dict[str, str]) -> list[Any]:
    numbers = ("comparisons", "failures", "worst / bound")
    rows = []
    for key, count in tally.counts.items():
        worst = count.worst_share_of_bound
        share = f"{worst:.0%}" if worst <= 1 else "over 100%"
        rows.append((*key, str(count.comparisons), str(count.failures), share))
    parts = [output.table(("implementation", "dtype", *numbers), rows, numbers)]
    if tally.failures:
        parts += [_failure_table(tally.failures), _again(tally.failures)]
    notes = [
        f"{name} does not support {counted(count, 'combination')} of configuration and dtype"
        for name, count in tally.refused.items()
    ]
    if not_checked:
        reason = next(iter(not_checked.values()))  # a missing GPU, which is the same for all
        notes.append(f"GPU implementations were not checked ({', '.join(not_checked)}): {reason}")
    counted_up = (
        (tally.configurations, "configuration"),
        (tally.comparisons, "comparison"),
        (len(tally.failures), "failure"),
    )
    notes.append(", ".join(counted(number, noun) for number, noun in counted_up))
    return [*parts, "\n".join(notes)]


def _failure_table(failures: list[dict[str, Any]]) -> Any:
    rows = [
        (
            in_line(one["name"] or "layer"),
            one["implementation"],
            f"{one['data']} {one['configuration']['dtype']}",
            one["tensor"],
            one["reason"],
        )
        for one in failures[:MOST_LINES]
    ]
    return output.table(("failed", "implementation", "data", "result", "what is wrong"), rows)


def _again(failures: list[dict[str, Any]]) -> Any:
    commands = dict.fromkeys(failure["command"] for failure in failures)
    lines = list(commands)[: output.MOST_EXAMPLES]
    hidden = len(failures) - MOST_LINES
    if hidden > 0:
        lines.append(f"{hidden} more failures are not shown; --json lists all")
    return output.heading("to reproduce a failure", *lines, wrap=False)


def _as_json(
    tally: Tally, places: Iterable[str], not_checked: dict[str, str], seed: int
) -> dict[str, Any]:
    return {
        "configurations": tally.configurations,
        "comparisons": tally.comparisons,
        "implementations": [
            {"implementation": name, "dtype": dtype, **asdict(count)}
            for (name, dtype), count in tally.counts.items()
        ],
        "refused": {name: tally.refused[name] for name in places},
        "not_checked": not_checked,
        "failures": tally.failures,
        "seed": seed,
        "passed": not tally.failures,
    }
