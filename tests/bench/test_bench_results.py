"""Results of benchmark runs: ratios, tables, files, pictures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from threadpoolctl import threadpool_limits

from cupyconv import ConvError
from cupyconv.bench import environment, places, plot, report, results, suites
from cupyconv.bench.results import Ceiling, Comparison, Note, Results, Row
from cupyconv.cpu import threads
from cupyconv.cpu.threads import cores
from cupyconv.markup import Document
from tests import ROOT, speed_table

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
                row(**layer, pass_=pass_, implementation=name, layout=layout, microseconds=time)
                for name, layout, time in (
                    ("auto", "channels_last", our_time),
                    ("auto", "channels_first", our_time * 3),
                    ("torch", "channels_last", torch_time * 2),
                    ("torch", "channels_first", torch_time),
                )
            ]
    notes = [Note("over-2^31", "float16", "the layer", "needs 9000.0 GiB of memory")]
    return measured(*rows, skipped=notes)


def text_of(sections):
    """Return sections as text, without line breaks inside a paragraph."""
    return Document("", tuple(sections)).text(10_000)


# -- arithmetic ------------------------------------------------------------------------------------


def test_row_computes_tflops():
    assert ROW.tflops == pytest.approx(100)  # 1e10 FLOP in 1e-4 s


def test_roofline_share_uses_the_slower_of_flops_and_bytes():
    assert measured().roofline_share(ROW) == pytest.approx(25e-6 / 100e-6)
    by_flops = replace(ROW, useful_flops=4 * 10**10)
    assert measured().roofline_share(by_flops) == pytest.approx(80e-6 / 100e-6)
    assert measured(ceilings={}).roofline_share(ROW) is None


def test_comparisons_use_the_faster_memory_order_of_each_side():
    pairs = results.comparisons(suite())
    assert [(pair.row.layer, pair.ratio) for pair in pairs] == [
        ("resnet50-03", 0.5),
        ("resnet50-03", 0.5),
        ("convnext-dw1", 8.0),
        ("convnext-dw1", 8.0),
    ]
    assert {pair.row.layout for pair in pairs} == {"channels_last"}
    assert {pair.other.layout for pair in pairs} == {"channels_first"}


def test_comparisons_of_one_memory_order():
    for layout, expected in (("channels_last", [1.0, 16.0]), ("channels_first", [1 / 6, 8 / 3])):
        pairs = results.comparisons(suite(), layout)
        assert {pair.row.layout for pair in pairs} == {layout}
        assert {pair.other.layout for pair in pairs} == {layout}
        assert [pair.ratio for pair in pairs[::2]] == pytest.approx(expected)


def test_json_ratios_use_pytorchs_fastest_row():
    ratios = [entry["ratio_to_torch"] for entry in suite().to_json()["rows"]]
    assert ratios[:4] == pytest.approx([0.5, 0.5 / 3, 0.5, 1.0])
    assert measured(ROW).to_json()["rows"][0]["ratio_to_torch"] is None


def test_overlapping_spreads_are_even():
    even = Comparison(row(), row(implementation="torch", microseconds=104.0, spread=0.1))
    faster = Comparison(row(), row(microseconds=104.0))
    slower = Comparison(row(), row(microseconds=50.0))
    assert (even.even, faster.even) == (True, False)
    assert report.tally([even, faster, faster, slower]) == (2, 1, 1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0123, "0.0123"),
        (4.561, "4.56"),
        (78.94, "78.9"),
        (1234.5, "1,234"),
        (1.77e-06, "1.77e-06"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert report.number(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.784, "78%"), (0.096, "10%"), (0.094, "9%"), (0.00026, "0.03%")]
)
def test_percent_has_a_significant_digit(share, text):
    assert report.percent(share) == text


# -- tables ----------------------------------------------------------------------------------------


def test_report_contains_all_sections():
    text = text_of(report.sections(suite()))
    for expected in (
        "Every pass in float16",
        "cuda-gather",
        "25%",  # of the roofline
        "0.50",
        "12.0 µs of host time",
        "In 2 of 8 passes, a call takes the host longer than the GPU",
        "1.0 MiB of workspace",
        "the layer: needs 9000.0 GiB of memory: over-2^31 float16",
        "Imaginary 9000, 2026-11-20",
        "PyTorch 2.11.0, cuDNN 91900, CuPy 14.2.0",
        "500 TFLOP/s (torch), 4,000 GB/s (cupy)",
    ):
        assert expected in text, expected
    assert "stopped early" not in text
    (means,) = (one for one in report.sections(suite()) if one.title.startswith("Against"))
    assert means.title == "Against PyTorch in float16, auto"
    assert means.blocks[-1].rows == (
        ("dense", "1", "0.50", "-", "0.50", "0.50", "0.50", "0/0/2"),
        ("depthwise", "1", "8.00", "-", "8.00", "8.00", "6.67", "2/0/0"),  # 80 / 12 in a loop
        ("all", "2", "2.00", "-", "2.00", "2.00", "1.83", "2/0/2"),
    )
    on_cpu = [replace(entry, host_microseconds=None) for entry in suite().rows]
    assert "host" not in text_of(report.sections(measured(*on_cpu)))


def test_report_without_pytorch_or_without_rows():
    text = text_of(report.sections(measured(ROW)))
    assert "Every pass" in text
    assert "PyTorch's time" not in text
    empty = report.sections(measured(finished=False))
    assert [section.title for section in empty] == ["Measured on"]
    assert "stopped early" in text_of(empty)


def test_report_warns_of_a_busy_machine():
    busy = {"device": "cpu", "cpu": "Chip", "threads": 2, "load": 3.5, "date": "2026-11-20"}
    text = text_of(report.sections(measured(ROW, environment=busy)))
    assert "load average was 3.5 on 2 threads" in text
    quiet = text_of(report.sections(measured(ROW, environment={**busy, "load": 0.3})))
    assert "load average" not in quiet


def test_compare_reports_changes_between_two_runs():
    old = suite()
    halved = {"resnet50-03": 2, "convnext-dw1": 1}
    new = measured(
        *(
            replace(entry, **dict.fromkeys(("microseconds", "low", "high"), entry.high / share))
            for entry in old.rows
            if entry.implementation != "torch" and (share := halved[entry.layer])
        ),
        environment={**old.environment, "torch": "2.12.0"},
    )
    changes, together = report.compare(old, new)
    (table,) = changes.blocks
    assert [cells[0] for cells in table.rows] == ["resnet50-03"] * 2
    assert {cells[-1] for cells in table.rows} == {"1.98"}
    text = text_of([together])
    assert "old time / new time 1.400 (geometric mean of 4); faster 2, even 2, slower 0" in text
    assert "the runs differ in PyTorch: 2.11.0, then 2.12.0" in text
    assert "only in one of the files: 4 measurements" in text


def test_compare_distinguishes_medians_from_minima():
    """Older files have medians instead of minima."""
    medians, minima = measured(row()), measured(replace(row(), low=ROW.microseconds))
    changes = "the runs differ in the statistic of the samples: median, then minimum"
    assert changes in text_of(report.compare(medians, minima))
    for outcome in (medians, minima):
        assert "statistic" not in text_of(report.compare(outcome, outcome))


def test_compare_accepts_runs_with_nothing_in_common():
    text = text_of(report.compare(measured(), measured()))
    assert "No change" in text
    assert "no measurement in common" in text


# -- files -----------------------------------------------------------------------------------------


def test_json_file_round_trips(tmp_path):
    path = tmp_path / "a.json"
    suite().save(path)
    assert results.load(path) == suite()
    content = json.loads(path.read_text())
    assert content["schema"] == results.SCHEMA
    assert content["rows"][0]["ratio_to_torch"] == pytest.approx(0.5)
    assert content["rows"][0]["roofline_share"] == pytest.approx(0.25)
    assert list(tmp_path.iterdir()) == [path]


FOREIGN = ("", "{}", "[]", "1", "no JSON", '{"a": 1}\n{"b": 2}', "\x00")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "has another format") for content in FOREIGN),
        (
            json.dumps(suite().to_json() | {"schema": 7}),
            rf"format version {results.SCHEMA}: .* has version 7",
        ),
        (
            json.dumps(suite().to_json()).replace('"microseconds"', '"minutes"', 1),
            r"missing or invalid entry .*microseconds",
        ),
    ],
    ids=[*map(repr, FOREIGN), "version", "damaged"],
)
def test_load_rejects_other_files(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(ConvError, match=message):
        results.load(path)


# -- pictures --------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def test_svg_has_two_points_and_a_roofline_per_pass():
    root = ET.fromstring(plot.svg(suite()))
    titles = [e.text for e in root.iter(f"{SVG}title")]
    assert "resnet50-03, cupyconv: 100.0 µs, 25% of the roofline" in titles
    assert "resnet50-03, PyTorch: 50.0 µs, 50% of the roofline" in titles
    assert len([title for title in titles if "of the roofline" in title]) == 4 * 2
    texts = [e.text for e in root.iter(f"{SVG}text")]
    assert {"resnet50-03", "convnext-dw1", "depthwise", "0.50×", "8.00×", "float16"} <= set(texts)
    limits = [e for e in root.iter(f"{SVG}line") if e.get("stroke") == plot.INK]
    assert len(limits) == 4 + 1  # one in the legend


def test_svg_distances_are_ratios():
    circles = list(ET.fromstring(plot.svg(suite())).iter(f"{SVG}circle"))
    x = {e.find(f"{SVG}title").text.split(":")[0]: float(e.get("cx")) for e in circles[2:]}
    slower = x["resnet50-03, cupyconv"] - x["resnet50-03, PyTorch"]  # twice as long
    faster = x["convnext-dw1, PyTorch"] - x["convnext-dw1, cupyconv"]  # 8 times as long
    assert faster == pytest.approx(3 * slower, rel=1e-3)


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
    outcome = speed_table.newest(ROOT / "tests", "cpu")
    layers = {layer.name: layer.problem for layer in suites.select((), ())}
    for entry in outcome.rows:
        assert entry.useful_flops == layers[entry.layer].useful_flops
    assert max(map(outcome.roofline_share, outcome.rows)) < 1.1


def test_svg_of_few_or_no_rows():
    assert "resnet50-03" in plot.svg(measured(row(useful_flops=0), row(implementation="torch")))
    assert "Nothing was measured" in plot.svg(measured())
    assert "resnet50-03" in plot.svg(measured(ROW))
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
    on_cpu.save(folders / "gpu" / "results" / "bench-cpu.json")
    assert speed_table.newest(folders, "gpu") is None
    assert speed_table.table(folders, "cpu") == speed_table.NOTHING["cpu"]


def test_readme_table_uses_the_newest_gpu_run(folders, capsys):
    folder = folders / "gpu" / "results"
    suite().save(folder / "bench-sm_90a.json")
    older = suite()
    older.environment |= {"gpu": "Older", "date": "2026-10-20 10:00 UTC"}
    older.save(folder / "bench-sm_80.json")
    (folder / "bench-other.json").write_text("{}")
    (folder / "summary-sm_90a.json").write_text("{}")
    text = speed_table.table(folders, "gpu")
    auto = [entry for entry in suite().rows if entry.implementation == "auto"]
    assert text.splitlines() == [
        "Imaginary 9000, 2026-11-20 (PyTorch 2.11.0, cuDNN 91900, CuPy 14.2.0, driver 580.1, "
        "SM clock up to 1980).",
        "",
        " ".join((speed_table.READ, speed_table.HOST, speed_table.FASTER_ORDER)),
        "",
        "| dtype | layers | forward | backprop-filter | all | sum "
        "| all, channels_last | all, channels_first | host: cupyconv / PyTorch | loop |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        "| float16 | dense (1) | 0.50× (0 / 0 / 1) | 0.50× (0 / 0 / 1) | 0.50× (0 / 0 / 2) | 0.50× "
        "| 1.00× (0 / 2 / 0) | 0.17× (0 / 0 / 2) | 12 / 12 | 0.50× |",
        "| float16 | depthwise (1) | 8.00× (1 / 0 / 0) | 8.00× (1 / 0 / 0) | 8.00× (2 / 0 / 0) "
        "| 8.00× | 16.00× (2 / 0 / 0) | 2.67× (2 / 0 / 0) | 12 / 12 | 6.67× |",
        "| float16 | all but 1-D (2) | 2.00× (1 / 0 / 1) | 2.00× (1 / 0 / 1) | 2.00× (2 / 0 / 2) "
        "| 1.18× | 4.00× (2 / 2 / 0) | 0.67× (2 / 0 / 2) | 12 / 12 | 1.83× |",
        "| float16 | all but 1-D, depthwise (1) | 0.50× (0 / 0 / 1) | 0.50× (0 / 0 / 1) "
        "| 0.50× (0 / 0 / 2) | 0.50× | 1.00× (0 / 2 / 0) | 0.17× (0 / 0 / 2) | 12 / 12 | 0.50× |",
        "",
        report.waiting(auto).replace("cupyconv.bind", "`cupyconv.bind`"),
    ]
    assert "skipped bench-other.json" in capsys.readouterr().err
    by_card = speed_table.by_card(folders)
    assert by_card.startswith(text)
    assert "\n\nOlder, 2026-10-20" in by_card


def test_readme_table_reports_missing_results():
    unfinished = suite()
    unfinished.finished = False
    assert "The run was interrupted" in speed_table.of_results(unfinished)
    assert "PyTorch was not measured" in speed_table.of_results(measured(ROW))


# -- environment -----------------------------------------------------------------------------------


def test_described_command_omits_folders():
    arguments = ["--json", "/some/where/new.json", "--quick"]
    about = environment.describe(places.of("cpu"), arguments)
    assert about["command"] == "cupyconv bench --json new.json --quick"
    assert {"torch", "numpy", "cpu", "threads", "load", "commit"} <= set(about)


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


def test_layers_of_one_name_with_other_work_are_not_compared():
    old, new = suite(), suite()
    new.rows = [replace(row, useful_flops=4 * row.useful_flops) for row in new.rows]
    (changes, together) = report.compare(old, new)
    assert changes.title == "No change beyond the spread"
    assert "no measurement in common" in str(together)
