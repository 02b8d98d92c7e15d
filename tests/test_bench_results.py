"""Reports of benchmark results: ratios, tables, files, pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from threadpoolctl import threadpool_limits

from cupyconv import ConvError
from cupyconv.bench import environment, export, plot, report, results, suites
from cupyconv.bench.ceilings import Ceiling
from cupyconv.bench.peers import PEERS
from cupyconv.bench.results import Log, Note, Results, Row
from cupyconv.cpu import threads
from cupyconv.cpu.threads import cores
from tests import speed_table

ROW = Row(
    layer="resnet50-03",
    suite="resnet50",
    kind="dense",
    pass_="forward",
    dtype="float16",
    precision="ieee",
    implementation="auto",
    kernel="cuda-gather 128x128x32",
    layout="channels_last",
    microseconds=100.0,
    low=99.0,
    high=101.0,
    samples=30,
    host_microseconds=12.0,
    workspace_bytes=1 << 20,
    useful_flops=10**10,
    bytes=10**8,
    error=1e-4,
    bound=1e-3,
    checked=1.0,
)
CEILING = Ceiling(500e12, 4e12, "torch", "cupy")


def row(**changes):
    time = changes.pop("microseconds", ROW.microseconds)
    spread = changes.pop("spread", 0.01)
    return replace(
        ROW, microseconds=time, low=time * (1 - spread), high=time * (1 + spread), **changes
    )


def measured(*rows, **fields):
    """Return results with these rows, on an imaginary GPU."""
    defaults = {
        "environment": {
            "device": "gpu",
            "gpu": "Imaginary 9000",
            "date": "2026-11-20 10:00 UTC",
            "torch": "2.11.0",
            "cudnn": 91900,
            "cupy": "14.2.0",
            "smi": {"driver_version": "580.1", "clocks.sm": "1980 MHz", "clocks.max.sm": "1980"},
        },
        "options": {"dtypes": ["float16", "float32"], "layers": ["resnet50-03", "convnext-dw1"]},
        "ceilings": {"float16": CEILING},
        "rows": list(rows),
        "finished": True,
    }
    return Results(**{**defaults, **fields})


def suite():
    """Return results of two layers and two passes, by cupyconv and PyTorch in both orders."""
    depthwise = {"layer": "convnext-dw1", "suite": "convnext", "kind": "depthwise"}
    rows = []
    for layer, our_time, torch_time in (({}, 100.0, 50.0), (depthwise, 10.0, 80.0)):
        for pass_ in ("forward", "backprop_filter"):
            rows += [
                row(**layer, pass_=pass_, microseconds=our_time),
                row(**layer, pass_=pass_, layout="channels_first", microseconds=our_time * 3),
                row(**layer, pass_=pass_, implementation="torch", microseconds=torch_time * 2),
                row(
                    **layer,
                    pass_=pass_,
                    implementation="torch",
                    layout="channels_first",
                    microseconds=torch_time,
                ),
            ]
    return measured(
        *rows,
        skipped=[Note("over-2^31", "float16", "the layer", "needs 9000.0 GiB of memory")],
    )


# -- arithmetic ------------------------------------------------------------------------------------


def test_row_computes_tflops_and_gbps():
    assert ROW.tflops == pytest.approx(100)  # 1e10 FLOP in 1e-4 s
    assert ROW.gbps == pytest.approx(1000)  # 1e8 bytes in 1e-4 s


def test_roofline_share_uses_the_slower_of_flops_and_bytes():
    by_bytes = report.roofline_share(measured(ROW), ROW)
    assert by_bytes == pytest.approx(25e-6 / 100e-6)
    by_flops = replace(ROW, useful_flops=4 * 10**10)
    assert report.roofline_share(measured(ROW), by_flops) == pytest.approx(80e-6 / 100e-6)
    assert report.roofline_share(measured(ROW, ceilings={}), ROW) is None


def test_geometric_mean_of_ratios():
    assert report.geometric_mean([2.0, 0.5]) == pytest.approx(1)
    assert report.geometric_mean([1.0, 4.0]) == pytest.approx(2)


def test_comparisons_use_the_faster_memory_order_of_each_side():
    pairs = report.comparisons(suite(), "torch")
    assert [(pair.row.layer, pair.ratio) for pair in pairs] == [
        ("resnet50-03", 0.5),
        ("resnet50-03", 0.5),
        ("convnext-dw1", 8.0),
        ("convnext-dw1", 8.0),
    ]
    assert {pair.row.layout for pair in pairs} == {"channels_last"}
    assert {pair.peer.layout for pair in pairs} == {"channels_first"}


def test_comparisons_of_one_memory_order():
    for layout, expected in (("channels_last", [1.0, 16.0]), ("channels_first", [1 / 6, 8 / 3])):
        pairs = report.comparisons(suite(), "torch", layout)
        assert {pair.row.layout for pair in pairs} == {layout}
        assert {pair.peer.layout for pair in pairs} == {layout}
        assert [pair.ratio for pair in pairs[::2]] == pytest.approx(expected)


def beside_others():
    """Return ``suite`` with JAX, twice as fast as PyTorch, and one row of TensorFlow."""
    outcome = suite()
    torch_rows = [entry for entry in outcome.rows if entry.implementation == "torch"]
    outcome.rows += [
        replace(row(microseconds=entry.microseconds / 2), **identity(entry), implementation="jax")
        for entry in torch_rows
    ]
    outcome.rows.append(replace(torch_rows[0], implementation="tensorflow"))
    return outcome


def identity(entry):
    """Return the fields of a row that identify its layer, pass and memory order."""
    names = ("layer", "suite", "kind", "pass_", "layout")
    return {name: getattr(entry, name) for name in names}


def test_ratios_and_tables_match_their_peer():
    outcome = beside_others()
    assert report.measured_peers(outcome) == ["torch", "jax", "tensorflow"]
    for peer, expected in (
        ("torch", [0.5, 0.5, 8.0, 8.0]),
        ("jax", [0.25, 0.25, 4.0, 4.0]),
        ("tensorflow", [1.0]),
    ):
        pairs = report.comparisons(outcome, peer)
        assert [pair.ratio for pair in pairs] == pytest.approx(expected)
        assert {pair.peer.implementation for pair in pairs} == {peer}
        assert {pair.row.implementation for pair in pairs} == {"auto"}
    chapters = {chapter.title: chapter for chapter in report.sections(outcome)}
    table = chapters["Every pass in float16"]
    assert table.columns[-3:] == ("PyTorch/ours", "JAX/ours", "TensorFlow/ours")
    assert [cells[-3:] for cells in table.rows[:2]] == [
        ("0.50", "0.25", "1.00"),
        ("0.50", "0.25", "-"),
    ]
    assert len(table.rows) == 4
    for label, mean in (("PyTorch", "2.00"), ("JAX", "1.00"), ("TensorFlow", "1.00")):
        assert chapters[f"Against {label} in float16, auto"].rows[-1][-2] == mean
    by_order = chapters["Against JAX in float16, auto, both in channels_first"]
    assert by_order.rows[-1][-2] == "0.33"


def test_json_and_svg_name_the_peer():
    outcome = beside_others()
    first = export.to_json(outcome)["rows"][0]
    assert [first[f"ratio_to_{peer}"] for peer in PEERS] == pytest.approx([0.5, 0.25, 1.0])
    assert "PyTorch 50.0 µs" in plot.svg(outcome)
    assert "JAX" not in plot.svg(outcome)
    outcome.rows = [entry for entry in outcome.rows if entry.implementation in ("auto", "jax")]
    assert "Time of JAX over time of cupyconv" in plot.svg(outcome)
    assert "JAX 25.0 µs" in plot.svg(outcome)


def test_readme_table_has_columns_per_peer_and_memory_order():
    lines = speed_table.of_results(beside_others()).splitlines()
    assert lines[0].startswith("Imaginary 9000, 2026-11-20 (PyTorch 2.11.0, ")
    assert lines[4] == (
        "| dtype | layers | PyTorch: forward | PyTorch: backprop-input "
        "| PyTorch: backprop-filter | PyTorch: all | JAX: all | TensorFlow: all "
        "| PyTorch: all, channels_last | PyTorch: all, channels_first |"
    )
    assert lines[-1] == (
        "| float16 | all (2) | 2.00× (1 / 0 / 1) | – | 2.00× (1 / 0 / 1) | 2.00× (2 / 0 / 2) "
        "| 1.00× (2 / 0 / 2) | 1.00× (0 / 1 / 0) | 4.00× (2 / 2 / 0) | 0.67× (2 / 0 / 2) |"
    )


def test_ratios_use_the_peers_fastest_row():
    assert report.ratios(suite(), "torch")[:4] == pytest.approx([0.5, 0.5 / 3, 0.5, 1.0])
    assert report.ratios(suite(), "jax") == [None] * len(suite().rows)


def test_scores_are_by_kind_and_pass():
    score_of = report.scores(report.comparisons(suite(), "torch"))
    everything = score_of["float16", "auto", "all", "all"]
    assert report.geometric_mean(everything.ratios) == pytest.approx(2)
    assert (everything.wins, everything.even, everything.losses) == (2, 0, 2)
    assert score_of["float16", "auto", "depthwise", "forward"].ratios == [8.0]
    assert ("float16", "auto", "conv1d", "all") not in score_of


def test_overlapping_spreads_are_even():
    pair = report.Comparison(row(), row(implementation="torch", microseconds=104.0, spread=0.1))
    assert pair.even
    assert not report.Comparison(row(), row(microseconds=104.0)).even
    score = report.Score()
    score.add(pair)
    assert (score.wins, score.even, score.losses) == (0, 1, 0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0123, "0.0123"), (4.561, "4.56"), (78.94, "78.9"), (1234.5, "1,234"), (0.00012, "0.0001")],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert report.number(value) == text


# -- tables ----------------------------------------------------------------------------------------


def test_report_contains_all_sections():
    text = "\n\n".join(section.text() for section in report.sections(suite()))
    for expected in (
        "Every pass in float16",
        "cuda-gather",
        "25%",  # of the roofline
        "0.50",
        "Slowest against PyTorch",
        "Against PyTorch in float16, auto",
        "depthwise",
        "8.00",
        "2/0/2",
        "12.0 µs of host time",
        "1.0 MiB of workspace",
        "the layer: needs 9000.0 GiB of memory: over-2^31 float16",
        "Imaginary 9000, 2026-11-20",
        "500 TFLOP/s (torch), 4,000 GB/s (cupy)",
    ):
        assert expected in text, expected
    assert "stopped early" not in text


def test_slowest_table_has_the_ten_worst_ratios():
    rows = []
    for number in range(1, 15):
        rows += [row(layer=f"l{number}", microseconds=100.0 + number)]
        rows += [row(layer=f"l{number}", implementation="torch", microseconds=50.0)]
    (slowest,) = [s for s in report.sections(measured(*rows)) if s.title.startswith("Slowest")]
    assert [cells[0] for cells in slowest.rows] == [f"l{n}" for n in range(14, 4, -1)]


def test_report_without_peers_or_without_rows():
    text = "\n".join(section.text() for section in report.sections(measured(ROW)))
    assert "Every pass" in text
    assert "Against PyTorch" not in text
    empty = report.sections(measured(finished=False))
    assert [section.title for section in empty] == ["Measured on"]
    assert "stopped early" in empty[0].text()


def test_report_warns_of_a_busy_machine():
    busy = {"device": "cpu", "cpu": "Chip", "threads": 2, "load": 3.5, "date": "2026-11-20"}
    text = report.summary(measured(ROW, environment=busy))[-1].text()
    assert "load average was 3.5 on 2 threads" in text
    quiet = report.summary(measured(ROW, environment={**busy, "load": 0.3}))[-1].text()
    assert "load average" not in quiet


def test_compare_reports_changes_between_two_runs():
    old = suite()
    new = measured(
        *(
            row(
                layer=entry.layer,
                suite=entry.suite,
                kind=entry.kind,
                pass_=entry.pass_,
                layout=entry.layout,
                implementation=entry.implementation,
                microseconds=entry.microseconds / (2 if entry.layer == "resnet50-03" else 1),
            )
            for entry in old.rows
            if entry.implementation != "torch"
        ),
        environment={**old.environment, "torch": "2.12.0"},
    )
    changes, together = report.compare(old, new)
    assert [cells[0] for cells in changes.rows] == ["resnet50-03"] * 2
    assert {cells[-1] for cells in changes.rows} == {"2.00"}
    text = together.text()
    assert "old time / new time 1.414 (geometric mean of 4); faster 2, even 2, slower 0" in text
    assert "the runs differ in torch: 2.11.0, then 2.12.0" in text
    assert "only in one of the files: 4 measurements" in text


def test_compare_distinguishes_medians_from_minima():
    """Older files from a CPU have medians instead of the minimum of many turns."""
    medians, minima = measured(row()), measured(replace(row(), low=ROW.microseconds))
    changes = "the runs differ in the statistic of the samples: median, then minimum"
    assert changes in report.compare(medians, minima)[-1].text()
    for outcome in (medians, minima):
        assert "statistic" not in report.compare(outcome, outcome)[-1].text()


def test_compare_accepts_runs_with_nothing_in_common():
    text = "\n".join(s.text() for s in report.compare(measured(), measured()))
    assert "No change" in text
    assert "no measurement in common" in text


# -- files -----------------------------------------------------------------------------------------


def test_json_file_round_trips(tmp_path):
    path = tmp_path / "a.json"
    export.write_json(suite(), path)
    assert results.load(path) == suite()
    content = json.loads(path.read_text())
    assert content["schema"] == results.SCHEMA
    assert content["rows"][0]["ratio_to_torch"] == pytest.approx(0.5)
    assert content["rows"][0]["ratio_to_jax"] is None
    assert content["rows"][0]["roofline_share"] == pytest.approx(0.25)
    assert list(tmp_path.iterdir()) == [path]


def write_log(path):
    """Write ``suite`` to a log, without the last line."""
    log, content = Log(path), suite()
    log.start(content.environment, content.options)
    for dtype, ceiling in content.ceilings.items():
        log.ceiling(dtype, ceiling)
    for entry in content.rows:
        log.row(entry)
    log.skip(content.skipped[0])
    log.skip(content.skipped[0])  # duplicates are dropped
    log.fail(Note("resnet50-03", "float16", "auto forward", "off by 1"))
    return log


def test_log_round_trips(tmp_path):
    path = tmp_path / "a.jsonl"
    log = write_log(path)
    log.finish()
    log.close()
    loaded = results.load(path)
    assert loaded == log.results
    assert loaded.finished
    assert len(loaded.skipped) == 1


def test_truncated_log_keeps_the_complete_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    log = write_log(path)  # not closed: each line is flushed
    whole = results.load(path)
    assert not whole.finished
    assert whole.rows == log.results.rows
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:8], lines[8][:30]]))
    broken = results.load(path)
    assert broken.rows == whole.rows[:5]
    path.write_text(lines[0])
    assert results.load(path) == Results()
    log.close()


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_load_rejects_another_version(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "json":
        export.write_json(suite(), path)
    else:
        write_log(path).close()
    text = path.read_text()
    path.write_text(text.replace(f'"schema": {results.SCHEMA}', '"schema": 7', 1))
    with pytest.raises(
        ConvError, match=rf"results must have format version {results.SCHEMA}: .* has version 7"
    ):
        results.load(path)


@pytest.mark.parametrize("content", ["", "{}", "[]", "1", "no JSON", '{"a": 1}\n{"b": 2}', "\x00"])
def test_load_rejects_a_foreign_file(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConvError, match="has another format"):
        results.load(path)


def test_load_rejects_a_damaged_file(tmp_path):
    path = tmp_path / "a.json"
    content = export.to_json(suite())
    del content["rows"][0]["microseconds"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConvError, match=r"missing or invalid entry .*microseconds"):
        results.load(path)
    log = tmp_path / "a.jsonl"
    header = json.dumps({"entry": "header", "schema": results.SCHEMA, "is": results.KIND})
    log.write_text(f"{header}\n{json.dumps({'entry': 'row'})}\n")
    with pytest.raises(ConvError, match="missing or invalid entry"):
        results.load(log)


# -- pictures --------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def test_svg_has_a_point_and_a_bar_per_pass():
    root = ET.fromstring(plot.svg(suite()))
    titles = [e.text for e in root.iter(f"{SVG}title")]
    bars = [e for e in root.iter(f"{SVG}rect") if e.find(f"{SVG}title") is not None]
    points = [e for e in root.iter(f"{SVG}circle") if e.find(f"{SVG}title") is not None]
    assert (len(bars), len(points)) == (4, 8)
    assert "resnet50-03: 100.0 µs, PyTorch 50.0 µs" in titles
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert {"resnet50-03", "convnext-dw1", "depthwise", "0.50", "8.00", "float16"} <= set(texts)


def test_svg_elements_are_inside_the_frame():
    names = ["a<b&c" + "x" * 60, "seed"]
    rows = [
        row(layer=name, dtype=dtype, implementation=impl, microseconds=time)
        for name, time in zip(names, (1e-3, 1e9), strict=True)
        for dtype in ("float16", "float32")
        for impl in ("auto", "torch")
    ]
    rows.append(row(layer="seed", pass_="backprop_input"))
    root = ET.fromstring(plot.svg(measured(*rows)))
    width, height = float(root.get("width")), float(root.get("height"))
    for element in root.iter():
        for key in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.get(key, 0)) <= width
        for key in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.get(key, 0)) <= height


def test_rates_exclude_products_with_padding():
    """Eight of nine products of deeplab-d36 are with padding."""
    outcome = results.newest(Path(__file__).parent, "cpu")
    layers = {layer.name: layer.problem for layer in suites.select((), ())}
    for entry in outcome.rows:
        assert entry.useful_flops == layers[entry.layer].useful_flops
    assert max(report.roofline_share(outcome, entry) for entry in outcome.rows) < 1.1


def test_svg_of_few_or_no_rows():
    assert "resnet50-03" in plot.svg(measured(row(useful_flops=0), row(implementation="torch")))
    assert "Nothing was measured" in plot.svg(measured())
    assert "no other library was measured" in plot.svg(measured(ROW))
    assert "resnet50-03" in plot.svg(measured(row(), row(implementation="torch"), ceilings={}))


# -- README ----------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path):
    for device in ("gpu", "cpu"):
        (tmp_path / device / "results").mkdir(parents=True)
    return tmp_path


def test_readme_table_reports_that_nothing_was_measured(folders):
    assert speed_table.table(folders / "missing", "gpu") == speed_table.NOTHING["gpu"]
    on_cpu = measured(ROW, environment={"device": "cpu", "date": "2026-12-01"})
    export.write_json(on_cpu, folders / "gpu" / "results" / "bench-cpu.json")
    assert results.newest(folders, "gpu") is None
    assert speed_table.table(folders, "cpu") == speed_table.NOTHING["cpu"]


def test_readme_table_uses_the_newest_gpu_run(folders, capsys):
    folder = folders / "gpu" / "results"
    export.write_json(suite(), folder / "bench-sm_90a.json")
    older = suite()
    older.environment = {**older.environment, "gpu": "Older", "date": "2026-10-20 10:00 UTC"}
    export.write_json(older, folder / "bench-sm_80.json")
    (folder / "bench-other.json").write_text("{}")
    (folder / "summary-sm_90a.json").write_text("{}")
    text = speed_table.table(folders, "gpu")
    assert text.splitlines() == [
        "Imaginary 9000, 2026-11-20 (PyTorch 2.11.0, cuDNN 91900, CuPy 14.2.0, driver 580.1, "
        "SM clock up to 1980).",
        "",
        speed_table.READ,
        "",
        "| dtype | layers | PyTorch: forward | PyTorch: backprop-input "
        "| PyTorch: backprop-filter | PyTorch: all "
        "| PyTorch: all, channels_last | PyTorch: all, channels_first |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        "| float16 | dense (1) | 0.50× (0 / 0 / 1) | – | 0.50× (0 / 0 / 1) | 0.50× (0 / 0 / 2) "
        "| 1.00× (0 / 2 / 0) | 0.17× (0 / 0 / 2) |",
        "| float16 | depthwise (1) | 8.00× (1 / 0 / 0) | – | 8.00× (1 / 0 / 0) "
        "| 8.00× (2 / 0 / 0) | 16.00× (2 / 0 / 0) | 2.67× (2 / 0 / 0) |",
        "| float16 | all (2) | 2.00× (1 / 0 / 1) | – | 2.00× (1 / 0 / 1) | 2.00× (2 / 0 / 2) "
        "| 4.00× (2 / 2 / 0) | 0.67× (2 / 0 / 2) |",
    ]
    assert "skipped bench-other.json" in capsys.readouterr().err


def test_readme_table_uses_the_cpu_run(folders):
    about = {
        "device": "cpu",
        "cpu": "Abacus",
        "threads": 2,
        "date": "2026-12-01 10:00 UTC",
        "torch": "2.13.0",
        "numpy": "2.5.0",
        "cupy": "14.2.0",
        "command": "cupyconv bench --minutes 40",
        "commit": "0123abcd",
        "load": 1.23,
    }
    options = {"layers": ["resnet50-03", "convnext-dw1", "over-2^31"]}
    outcome = measured(*suite().rows, environment=about, options=options)
    export.write_json(outcome, folders / "cpu" / "results" / "bench-cpu.json")
    text = speed_table.table(folders, "cpu")
    assert text.splitlines()[0] == (
        "Abacus, 2 threads, 2026-12-01 (PyTorch 2.13.0, NumPy 2.5.0). Measured by `cupyconv bench "
        "--minutes 40`, at commit 0123abcd, 2 of 3 layers."
    )
    assert "The load average was 1.23 on 2 threads" in text
    assert report.busy({**about, "load": 0.9}) is None


def test_readme_table_reports_missing_results():
    unfinished = suite()
    unfinished.finished = False
    assert "The run was interrupted" in speed_table.of_results(unfinished)
    assert "No other library was measured" in speed_table.of_results(measured(ROW))


# -- environment -----------------------------------------------------------------------------------


def test_command_text_omits_folders():
    text = environment.command_text("cupyconv bench", ["--json", "/some/where/new.json", "--quick"])
    assert text == "cupyconv bench --json new.json --quick"


def test_threads_equal_the_blas_threads(monkeypatch):
    before = environment.threads()
    monkeypatch.setenv("MKL_NUM_THREADS", str(before + 5))  # the BLAS read it at start-up
    assert environment.threads() == before
    with threadpool_limits(1, "blas"):
        assert environment.threads() == 1
    monkeypatch.setattr(threads, "_blas", list)
    assert environment.threads() == cores()


def test_smi_is_empty_without_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment.smi() == {}
