"""`cupyconv bench`: time each pass of a suite of layers, and compare with PyTorch."""

from __future__ import annotations

import secrets
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from cupyconv import files
from cupyconv.bench import suites as suite_layers
from cupyconv.bench.suites import SuiteLayer
from cupyconv.cli import INTERRUPTED, configuration, output, paths
from cupyconv.errors import ConvError, require_word
from cupyconv.formats import CHANNELS_FIRST, CHANNELS_LAST
from cupyconv.markup import Paragraph, Section, Table, in_line
from cupyconv.problem import ITEMSIZE, MOST_LISTED, PASSES, counted

QUICK_MINUTES = 2.0  # longest quick run, in minutes (hand-set)
QUICK_CPU_FLOPS = 11e9  # most FLOP per pass of a quick run on the CPU, under 1 s (hand-set)


def _positive(_context: click.Context, option: click.Parameter, value: float | None) -> Any:
    if value is not None and not 0 < value < float("inf"):
        example = 0.2 if option.type is click.FLOAT else 8
        raise ConvError(
            f"--{option.name} must be above 0", f"got {value}", f"Use, for example, {example}"
        )
    if option.name == "drawn" and value is not None and value > MOST_LISTED:
        raise ConvError(f"--drawn must be at most {MOST_LISTED:,}", f"got {value}", "Draw fewer")
    return value


@click.command()
@configuration.layer_options(named=False)
@configuration.list_option("--suite", "suites", "Benchmark only these suites.")
@configuration.list_option("--layer", "names", "Benchmark only these layers.")
@click.option(
    "--drawn", type=int, callback=_positive, metavar="N", help="Benchmark N random layers."
)
@configuration.seed_option(
    "Draw the random layers from this seed.  [default: a new one]", default=None
)
@click.option("--list", "only_list", is_flag=True, help="List layers and suites, and exit.")
@configuration.list_option(
    *("--dtype", "dtypes"),
    "Benchmark these dtypes.  [default: float16 on a GPU, float32 on the CPU]",
    lambda: ITEMSIZE,
)
@configuration.passes_option
@configuration.list_option(
    *("--impl", "impls", "Benchmark these implementations of cupyconv."),
    default="auto",
    show_default=True,
)
@configuration.list_option(
    *("--layout", "layouts"),
    "Measure in this memory order: channels_last or channels_first.  [default: both; the report "
    "shows the faster]",
    lambda: (CHANNELS_LAST, CHANNELS_FIRST),
)
@configuration.precision_option(metavar="ieee|tf32|bf16x6")
@configuration.text_option(
    *("--device", "cpu|gpu"), "Run on the CPU or on the GPU.  [default: the GPU if there is one]"
)
@click.option("--quick", is_flag=True, help="Benchmark a few layers, for at most 2 minutes.")
@click.option(
    "--seconds", type=float, callback=_positive, help="Measure each pass for this many seconds."
)
@click.option(
    "--minutes",
    type=float,
    callback=_positive,
    help="Stop after this many minutes, and report the results so far.",
)
@click.option(
    "--peers",
    type=click.Choice(["torch", "none"]),
    default="torch",
    show_default=True,
    help="Compare with PyTorch if it is installed, or with nothing.",
)
@click.option(
    "--json",
    "json_path",
    type=paths.FILE,
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Print all results as one JSON object, or write them to a file.",
)
@click.option(
    "--plot",
    "plot_path",
    type=paths.FILE,
    metavar="FILE",
    help="Draw the times beside PyTorch's and the roofline's, as SVG.",
)
@click.option(
    "--compare",
    type=paths.FILE,
    nargs=2,
    metavar="OLD NEW",
    help="Compare two files written by --json, and exit.",
)
def command(
    suites: tuple[str, ...],
    names: tuple[str, ...],
    drawn: int | None,
    seed: int | None,
    only_list: bool,
    compare: tuple[str, str] | None,
    **options: Any,
) -> int:
    """Time every pass of many layers, and compare with PyTorch.

    \b
    cupyconv bench --quick
    cupyconv bench 8x64x56x56 64x64x3x3 --padding same
    cupyconv bench --suite resnet50,depthwise --dtype float16 \\
      --json new.json --plot new.svg
    cupyconv bench --compare old.json new.json

    The report shows the time of each pass, on the GPU and on the host, the roofline (the shortest
    possible time) in percent of this time, and the mean ratio of PyTorch's time to cupyconv's.
    Every pass is checked before it is timed; of a large result, only a part is checked.  Ctrl-C
    ends the run with a report of the results so far.  The JSON file is written after each layer.
    """
    if compare:
        return _compare(*map(Path, compare), options["json_path"])
    keys = [key for key in configuration.LAYER_OPTIONS if key in options]
    given = {key: options.pop(key) for key in keys}
    ways = {
        "a layer": any(value is not None for value in given.values()),
        "--drawn": bool(drawn),
        "--suite or --layer": bool(suites or names),
    }
    used = [way for way, is_used in ways.items() if is_used]
    if len(used) > 1:
        raise ConvError(
            "a run must take its layers from one source",
            f"got {' and '.join(used)}",
            "Give one of them",
        )
    if drawn:
        layers = suite_layers.drawn(secrets.randbelow(10**6) if seed is None else seed, drawn)
    elif ways["a layer"]:
        notes: list[str] = []
        layers, readings = _configured(given, notes)
        texts = [*readings, *configuration.left_out(notes)]
        if texts and paths.STANDARD not in (options["json_path"], options["plot_path"]):
            output.draw(*texts)
    else:
        layers = suite_layers.select(suites, names)
    if only_list:
        _list(layers, options["json_path"])
        return 0
    return _measure(layers, chosen=bool(used), **options)


def _measure(
    layers: tuple[SuiteLayer, ...],
    *,
    chosen: bool,
    device: str | None,
    quick: bool,
    peers: str,
    json_path: str | None,
    plot_path: str | None,
    **how: Any,
) -> int:
    """Run the benchmark; ``how`` has the other options, which are fields of ``Options``."""
    from cupyconv.bench import places, plot, report
    from cupyconv.bench.data import LAYOUTS
    from cupyconv.bench.results import Results
    from cupyconv.bench.run import SECONDS, Options, run
    from cupyconv.planning import PRECISIONS

    require_word("precision", how["precision"], PRECISIONS)
    place = places.of(device)
    _require_impls(how["impls"], place.name)
    about = counted(len(layers), "layer")
    if quick:
        layers, about = _quick(layers, chosen, place.name)
        how["minutes"] = min(how["minutes"] or QUICK_MINUTES, QUICK_MINUTES)
        how["seconds"] = how["seconds"] or min(SECONDS.values())
    how["dtypes"] = how["dtypes"] or (("float16",) if place.name == "gpu" else ("float32",))
    how["passes"], how["layouts"] = how["passes"] or PASSES, how["layouts"] or LAYOUTS
    asked = Options(layers, **how, torch=peers == "torch", arguments=tuple(sys.argv[2:]))
    paths.require_one_output(json_path, plot_path, as_json=False)
    paths.require_writable("--json", json_path)
    paths.require_writable("--plot", plot_path, ".svg")
    json_file = None if json_path in (None, paths.STANDARD) else Path(json_path)
    # A file is rewritten after each layer; a device or a pipe gets the results once, at the end.
    is_replaced = json_file is not None and files.is_replaced(json_file)
    results = Results()
    try:
        text = f"{about}, {', '.join(asked.dtypes)}"
        with output.progress(text, len(layers) * len(asked.dtypes)) as advance:

            def keep() -> None:
                if json_file is not None and is_replaced:
                    with suppress(OSError):  # the save after the report raises it again
                        results.save(json_file)
                advance()

            run(place, asked, results, keep)
    except BaseException:
        if json_file is not None and results.rows:
            results.save(json_file)
        raise
    if json_path == paths.STANDARD:
        output.write_json(results.to_json())
    elif plot_path != paths.STANDARD:
        title = f"Measured: {about}" if results.rows else f"Nothing was measured: {about}"
        output.draw(output.heading(title), *report.sections(results))
    if results.rows or results.failed or results.finished:  # else keep the files of an earlier run
        if json_file is not None:
            results.save(json_file)
        if plot_path is not None:
            paths.write(Path(plot_path), plot.svg(results).encode())
    if not results.finished:
        return INTERRUPTED
    return 1 if results.failed or not results.rows else 0


def _configured(
    options: dict[str, Any], notes: list[str]
) -> tuple[tuple[SuiteLayer, ...], list[str]]:
    """Return the layers that the options of a layer select, and notes on how shapes were read.

    ``notes`` as for ``read_layers``.
    """
    config = options["config"] or options["model"]
    stem = Path(config).stem if config else ""
    layers, readings = [], []
    for number, layer in enumerate(configuration.read_layers(options, notes), 1):
        problem = layer.problem()
        readings += configuration.notes_on_shapes(layer, problem)
        unnamed = f"{stem}-{number}" if config else configuration.operands_text(problem)
        name = layer.name or unnamed
        if layer.is_transposed:
            readings.append(f"{name}: {configuration.TRANSPOSED_PASSES}")
        layers.append(SuiteLayer(name, problem, layer.title or stem))
    names = [layer.name for layer in layers]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConvError(
            f"the layers of {config} must have different names",
            f"{min(twice)!r} occurs more than once",
            "Rename one of them",
        )
    return tuple(layers), readings


def _quick(
    layers: tuple[SuiteLayer, ...], chosen: bool, device: str
) -> tuple[tuple[SuiteLayer, ...], str]:
    """Return the layers of a quick run, and their description."""
    count = len(layers)
    if not chosen:
        layers = tuple(layer for layer in layers if layer.name in suite_layers.QUICK)
    about = f"a quick look at {len(layers)} of {count} layers"
    if device == "gpu":
        return layers, about
    layers = tuple(suite_layers.with_batch(layer, 1) for layer in layers)
    small = tuple(layer for layer in layers if layer.problem.flops <= QUICK_CPU_FLOPS)
    if not small:
        raise ConvError(
            f"a quick run on the CPU must have passes of at most {QUICK_CPU_FLOPS / 1e9:g} GFLOP",
            f"{layers[0].name} has {layers[0].problem.flops / 1e9:.0f} GFLOP at batch 1",
            "Leave --quick out",
        )
    return small, f"a quick look at {len(small)} of {count} layers, batch 1"


def _require_impls(impls: tuple[str, ...], place: str) -> None:
    """Check that all implementations exist, and that at least one runs on the device."""
    from cupyconv.planning.families import FAMILIES
    from cupyconv.planning.plan import AUTO

    for impl in impls:
        require_word("impl", impl, (AUTO, *FAMILIES))
    if not any(impl == AUTO or FAMILIES[impl].on_gpu == (place == "gpu") for impl in impls):
        raise ConvError(
            "--impl must name an implementation that runs on the device",
            f"{' and '.join(impls)} cannot run on the {place}",
            f"Choose another implementation, or --device {'cpu' if place == 'gpu' else 'gpu'}",
        )


def _compare(old: Path, new: Path, json_path: str | None) -> int:
    from cupyconv.bench import report, results

    sections = report.compare(results.load(old), results.load(new))
    if json_path is not None:
        paths.write_json(json_path, {section.title: _plain(section) for section in sections})
    else:
        output.draw(*sections)
    return 0


def _list(layers: tuple[SuiteLayer, ...], json_path: str | None) -> None:
    if json_path is not None:
        entries = [
            {
                "name": layer.name,
                "suite": layer.suite,
                "kind": layer.kind,
                "options": configuration.as_options(layer.problem),
                "source": layer.source,
            }
            for layer in layers
        ]
        paths.write_json(json_path, {"layers": entries, "suites": list(suite_layers.suites())})
        return
    rows = [
        (in_line(one.name), one.kind, configuration.operands_text(one.problem), in_line(one.source))
        for one in layers
    ]
    table = output.table(("layer", "kind", "x * w", "source"), rows)
    output.draw(table, output.heading("Suites", ", ".join(suite_layers.suites())))


def _plain(section: Section) -> dict[str, Any]:
    """Return the lines and the table of a section as a JSON object."""
    tables = [block for block in section.blocks if isinstance(block, Table)]
    return {
        "lines": [block.text for block in section.blocks if isinstance(block, Paragraph)],
        "rows": [dict(zip(t.columns, row, strict=True)) for t in tables for row in t.rows],
    }
