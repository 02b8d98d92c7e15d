"""Benchmark runs on the CPU, their interruption, and the command.

For runs on a GPU see tests/device/test_bench.py.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from functools import partial

import pytest

from cupyconv import ConvProblem, KernelCompileError, arrays
from cupyconv.bench import ceilings, data, places, pytorch, report, results, suites, timing
from cupyconv.bench import run as bench_run
from cupyconv.bench.results import Results
from cupyconv.bench.run import Options, run
from cupyconv.bench.suites import SuiteLayer
from cupyconv.problem import PASSES
from tests.bench.test_bench_results import row
from tests.command import parsed, refused, said
from tests.command import run as run_command

DENSE = SuiteLayer("tiny-dense", ConvProblem((2, 6, 8, 8), (4, 6, 3, 3), padding=1), "test")
DEPTHWISE = SuiteLayer("tiny-depthwise", ConvProblem((2, 6, 9), (6, 1, 3), groups=6), "test")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make ceilings and sweeps fast."""
    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 64, "gpu": 64})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 1 << 16, "gpu": 1 << 16})
    monkeypatch.setattr(places.Place, "sweep_bytes", 1 << 16)
    monkeypatch.setattr(places.GpuPlace, "sweep_bytes", 1 << 16)
    monkeypatch.setattr(places, "PAUSE", 0.0)


def measure(*layers, place=None, results=None, **options):
    options = {"seconds": 0.002, "torch": False, **options}
    results = Results() if results is None else results
    run(place or places.of("cpu"), Options(layers, **options), results)
    return results


# -- on the CPU ------------------------------------------------------------------------------------


def test_run_measures_every_pass_beside_pytorch():
    pytest.importorskip("torch")
    outcome = measure(DENSE, DEPTHWISE, dtypes=("float32", "bfloat16"), torch=True)
    assert outcome.finished
    assert not outcome.failed
    assert not outcome.skipped
    keys = {(r.dtype, r.layer, r.pass_, r.layout, r.implementation) for r in outcome.rows}
    assert len(keys) == len(outcome.rows) == 2 * 2 * 3 * 2 * 2
    for timed in outcome.rows:
        assert timed.error <= timed.bound
        assert timed.checked == 1
        assert 0 < timed.low <= timed.microseconds <= timed.high
        assert timed.samples >= timing.FEWEST_SAMPLES
        assert timed.host_microseconds is None
        assert timed.kernel == ("numpy" if timed.implementation == "auto" else "torch")
    assert set(outcome.ceilings) == {"float32", "bfloat16"}
    assert len(results.comparisons(outcome)) == 2 * 2 * 3
    order = [(row.dtype, row.layer) for row in outcome.rows]
    names = (DENSE.name, DEPTHWISE.name)
    assert list(dict.fromkeys(order)) == [(d, n) for d in ("float32", "bfloat16") for n in names]


def test_complex_gradients_are_measured_without_pytorch():
    pytest.importorskip("torch")
    outcome = measure(DENSE, dtypes=("complex64",), torch=True, layouts=("channels_last",))
    assert not outcome.failed
    assert [note.reason for note in outcome.skipped] == [
        "PyTorch has no operator for complex gradients"
    ]
    names = {(row.pass_, row.implementation) for row in outcome.rows}
    assert names == {(pass_, "auto") for pass_ in PASSES} | {("forward", "torch")}
    assert {row.useful_flops for row in outcome.rows} == {4 * DENSE.problem.useful_flops}


def test_run_without_peers_measures_cupyconv(monkeypatch):
    def missing(_name):
        raise ImportError

    monkeypatch.setattr(pytorch, "import_whole", missing)
    found, order = pytorch.find, []
    monkeypatch.setattr(pytorch, "find", lambda place: [order.append("PyTorch"), found(place)][1])
    describe = lambda *_: order.append("versions") or {"device": "cpu"}  # noqa: E731
    monkeypatch.setattr(bench_run.environment, "describe", describe)
    outcome = measure(DENSE, torch=True, dtypes=("float16",))
    assert order == ["PyTorch", "versions"]  # cuDNN's version is that of an imported PyTorch
    assert {row.implementation for row in outcome.rows} == {"auto"}
    assert outcome.ceilings["float16"].product_by == "numpy"
    assert [note.reason for note in outcome.skipped] == ["PyTorch is not installed"]
    assert report.sections(outcome)


def test_run_without_matrix_products_has_no_roofline(monkeypatch):
    def missing(*_):
        raise ImportError("libcublas is missing\nsecond line")

    monkeypatch.setattr(ceilings, "_product", missing)
    outcome = measure(DENSE, passes=("forward",), minutes=1)
    assert {row.implementation for row in outcome.rows} == {"auto"}
    assert not outcome.ceilings
    (note,) = (note for note in outcome.skipped if note.what == "the roofline")
    assert note.layer == "all layers"
    assert note.reason == "numpy: libcublas is missing"
    assert report.sections(outcome)


def test_run_measures_several_implementations():
    outcome = measure(DENSE, impls=("numpy", "reference"), passes=("forward",))
    assert [row.implementation for row in outcome.rows] == ["numpy", "reference"] * 2


def test_unsupported_implementation_is_skipped_and_reported():
    outcome = measure(DENSE, impls=("auto", "cuda-generic"), passes=("forward",))
    assert {row.implementation for row in outcome.rows} == {"auto"}
    (note,) = [note for note in outcome.skipped if note.what == "cuda-generic"]
    assert "does not run on cpu" in note.reason


def test_wrong_result_is_reported_and_not_timed(monkeypatch):
    original = bench_run.pass_function

    def wrong(problem, pass_, impl, precision):
        compute = original(problem, pass_, impl, precision)
        return (lambda o: compute(o) * 1.5) if (impl, pass_) == ("numpy", "forward") else compute

    monkeypatch.setattr(bench_run, "pass_function", wrong)
    outcome = measure(DENSE, impls=("auto", "numpy"), passes=("forward", "backprop_input"))
    assert {(r.implementation, r.pass_) for r in outcome.rows} == {
        ("auto", "forward"),
        ("auto", "backprop_input"),
        ("numpy", "backprop_input"),
    }
    assert {note.what for note in outcome.failed} == {
        "numpy forward channels_last",
        "numpy forward channels_first",
    }
    assert "error is 5.0e-01" in outcome.failed[0].reason


def test_wrong_peer_result_is_skipped_and_reported(monkeypatch):
    pytest.importorskip("torch")
    original = pytorch.PyTorch.call

    def wrong(self, problem, pass_, sets):
        call = original(self, problem, pass_, sets)
        return lambda i: call(i) * 2

    monkeypatch.setattr(pytorch.PyTorch, "call", wrong)
    outcome = measure(DENSE, torch=True, passes=("forward",))
    assert {row.implementation for row in outcome.rows} == {"auto"}
    assert not outcome.failed
    assert {note.what for note in outcome.skipped} == {
        "torch forward channels_last",
        "torch forward channels_first",
    }


def test_pytorchs_errors_and_refusals_are_reported(monkeypatch):
    pytest.importorskip("torch")
    lopsided = ConvProblem((1, 2, 5, 5), (2, 2, 2, 2), padding="same")
    outcome = measure(SuiteLayer("lopsided", lopsided), torch=True)
    assert {row.implementation for row in outcome.rows} == {"auto"}
    assert [note.reason for note in outcome.skipped] == ["PyTorch pads both sides equally"]

    def refuse(*_):
        raise RuntimeError("unsupported\nsecond line")

    monkeypatch.setattr(pytorch.PyTorch, "call", refuse)
    outcome = measure(DENSE, torch=True, passes=("forward",))
    assert [(note.what, note.reason) for note in outcome.skipped] == [
        ("torch forward", "unsupported")
    ]


def test_slow_pytorch_is_skipped_for_the_whole_layer(monkeypatch):
    pytest.importorskip("torch")
    calls, original = [], pytorch.PyTorch.call

    def call(self, *arguments):
        calls.append(arguments)
        return original(self, *arguments)

    monkeypatch.setattr(pytorch.PyTorch, "call", call)
    monkeypatch.setattr(bench_run, "SLOWEST_CALL", 0.0)
    outcome = measure(DENSE, DEPTHWISE, torch=True)
    assert {row.implementation for row in outcome.rows} == {"auto"}
    assert [(n.layer, n.what, n.reason) for n in outcome.skipped] == [
        (layer.name, "torch", "a call takes more than 10 s") for layer in (DENSE, DEPTHWISE)
    ]
    assert len(calls) == 2


def test_kernel_compile_error_is_a_failure(monkeypatch):
    def broken(*_):
        raise KernelCompileError("conv_forward.cu does not compile", "the log")

    monkeypatch.setattr(bench_run, "pass_function", broken)
    outcome = measure(DENSE, passes=("forward",))
    assert outcome.rows == []
    assert "does not compile" in outcome.failed[0].reason


def test_layer_larger_than_memory_is_skipped_and_reported(monkeypatch):
    huge = SuiteLayer("huge", ConvProblem((2**20, 1024, 1024), (8, 1024, 3)))
    empty = SuiteLayer("empty", ConvProblem((0, 6, 8, 8), (4, 6, 3, 3)))
    outcome = measure(huge, empty, DENSE, passes=("forward",))
    assert {row.layer for row in outcome.rows} == {"tiny-dense"}
    reasons = {note.layer: note.reason for note in outcome.skipped}
    assert "GiB of memory" in reasons["huge"]
    assert "empty batch" in reasons["empty"]

    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(data, "random_sets", no_memory)
    outcome = measure(DENSE)
    assert [note.reason for note in outcome.skipped if note.layer] == ["does not fit into memory"]


def test_run_respects_minutes_and_reports_skipped_layers():
    slow = SuiteLayer("slow", ConvProblem((64, 512, 32, 32), (512, 512, 3, 3), padding=1))
    outcome = measure(slow, DENSE, minutes=0.05)
    assert {row.layer for row in outcome.rows} == {"tiny-dense"}
    assert "needs about" in {n.layer: n.reason for n in outcome.skipped}["slow"]
    outcome = measure(DENSE, DEPTHWISE, minutes=1e-9)
    assert outcome.rows == []
    named = {note.layer for note in outcome.skipped if note.what == "the layer"}
    assert named == {"tiny-dense", "tiny-depthwise"}
    assert outcome.finished


def interrupt_after(count, monkeypatch):
    """Raise KeyboardInterrupt instead of measuring a pass after ``count`` passes."""
    original, turns = timing.measure, iter(range(100))

    def interrupted(calls, *rest):
        if "auto" in calls and next(turns) == count:
            raise KeyboardInterrupt
        return original(calls, *rest)

    monkeypatch.setattr(timing, "measure", interrupted)


def test_failed_run_keeps_its_results(monkeypatch):
    def broken(*_):
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setattr(timing, "measure", broken)
    outcome = Results()
    with pytest.raises(RuntimeError, match="fell off"):
        measure(DENSE, results=outcome)
    assert "fell off the bus" in outcome.skipped[-1].reason
    assert not outcome.finished


# -- the command -----------------------------------------------------------------------------------


bench = partial(run_command, "bench")


@pytest.fixture
def config(tmp_path):
    """Return options that measure two small layers quickly, without PyTorch."""
    path = tmp_path / "net.toml"
    path.write_text(
        '[[layer]]\nname = "first"\ninput = "2x3x9x9"\nfilter = "4x3x3x3"\nstride = 2\n'
        '[[layer]]\ninput = "2x16x4"\nfilter = "8x16x3"\npadding = "same"\n'
    )
    return ("--config", path, "--device", "cpu", "--seconds", "0.002", "--peers", "none")


def test_bench_config_writes_json_and_svg(tmp_path, config):
    files = [tmp_path / name for name in ("new.json", "new.svg")]
    outcome = bench(*config, "--peers", "torch", "--json", files[0], "--plot", files[1])
    assert outcome.exit_code == 0, outcome.output
    assert "Measured: 2 layers" in outcome.stdout
    assert "first" in outcome.stdout
    loaded = results.load(files[0])
    assert {row.layer for row in loaded.rows} == {"first", "net-2"}
    assert loaded.finished
    ET.parse(files[1])
    compare = ("bench", "--compare", files[0], files[0])
    assert "No change beyond the spread" in said(*compare)
    assert "Together" in parsed(*compare)


def test_bench_json_on_standard_output(config):
    options = ("--pass", "forward,forward", "--layout", "channels_first")
    content = parsed("bench", *config, *options)
    assert [row["pass_"] for row in content["rows"]] == ["forward", "forward"]
    assert content["rows"][0]["ratio_to_torch"] is None


def test_quick_run_reports_its_options(monkeypatch):
    runs = []

    def take(_place, options, results, _advance):
        runs.append(options)
        results.finished = True

    monkeypatch.setattr(bench_run, "run", take)
    outcome = bench("--quick", "--device", "cpu")
    assert outcome.exit_code == 1, outcome.output  # nothing was measured
    (options,) = runs
    assert 10 < len(options.layers) <= len(suites.QUICK)
    assert {layer.kind for layer in options.layers} == set(suites.KINDS)
    assert {layer.problem.N for layer in options.layers} == {1}
    assert options.minutes == 2
    assert f"a quick look at {len(options.layers)} of 92 layers, batch 1" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "depthwis"], "Did you mean 'depthwise'?"),
        (["--layer", "resnet50-00"], "unknown layer"),
        (["--impl", "cuda-generik"], "Did you mean 'cuda-generic'?"),
        (["--dtype", "float"], "Did you mean 'float"),
        (["--pass", "forwards"], "Did you mean 'forward'?"),
        (["--layout", "channels"], "Did you mean 'channels_"),
        (["--precision", "tf23"], "Did you mean 'tf32'?"),
        (["--peers", "pytorch"], "'pytorch' is not one of 'torch', 'none'"),
        (["--device", "gpus"], "Did you mean 'gpu'?"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--minutes", "inf"], "--minutes must be above 0"),
        (["--quick", "--device", "cpu", "--layer", "sdxl-6"], "Leave --quick out"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--config", "missing.toml", "--suite", "all"], "Give one of them"),
        (["--compare", "missing.json", "missing.json"], "missing.json"),
    ],
)
def test_bench_usage_error_is_one_line(arguments, message):
    assert message in refused("bench", *arguments)


def test_bench_rejects_duplicate_layer_names(tmp_path):
    path = tmp_path / "net.toml"
    path.write_text('[[layer]]\nname = "a"\ninput = "1x1x1"\nfilter = "1x1x1"\n' * 2)
    assert "'a' occurs more than once" in refused("bench", "--config", path)


@pytest.mark.skipif(arrays.device_count() > 0, reason="there is a GPU")
def test_bench_exits_with_3_without_a_gpu():
    refused("bench", "--device", "gpu", code=3)


def test_bench_exits_with_1_after_a_wrong_result(monkeypatch, config):
    original = bench_run.pass_function

    def wrong(problem, pass_, impl, precision):
        compute = original(problem, pass_, impl, precision)
        return lambda operands: compute(operands) + 1

    monkeypatch.setattr(bench_run, "pass_function", wrong)
    outcome = bench(*config, "--pass", "forward")
    assert outcome.exit_code == 1
    assert "Wrong results and failures, not timed" in outcome.stdout


def test_interrupted_bench_reports_its_results(monkeypatch, config, tmp_path):
    interrupt_after(2, monkeypatch)
    path = tmp_path / "new.json"
    outcome = bench(*config, "--json", path)
    assert outcome.exit_code == 130
    assert "remaining layers: interrupted" in outcome.stdout
    assert "stopped early" in outcome.stdout
    assert len(results.load(path).rows) == 2


def test_bench_writes_the_json_file_after_each_layer(monkeypatch, config, tmp_path):
    """Even a run that is killed keeps the results of the layers before."""
    path, kept = tmp_path / "new.json", []
    original = timing.measure

    def measure(calls, *rest):
        kept.append(len(results.load(path).rows) if path.exists() else 0)
        return original(calls, *rest)

    monkeypatch.setattr(timing, "measure", measure)
    said("bench", *config, "--pass", "forward", "--layout", "channels_last", "--json", path)
    assert kept[-2:] == [0, 1]  # the first measurement is of the roofline


def test_bench_writes_files_after_an_error(monkeypatch, config, tmp_path):
    measured = []

    def broken(_place, _options, found, _advance):
        found.rows += measured
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setattr(bench_run, "run", broken)
    path = tmp_path / "new.json"
    path.write_text("an earlier run")
    assert bench(*config, "--json", path).exit_code != 0
    assert path.read_text() == "an earlier run"  # nothing was measured
    measured.append(row())
    assert bench(*config, "--json", path).exit_code != 0
    assert not results.load(path).finished
    assert results.load(path).rows == measured


def test_bench_reports_that_nothing_was_measured(config):
    line = refused("bench", *config, "--impl", "cuda-gather")
    assert "cuda-gather cannot run on the cpu" in line
    outcome = bench(*config, "--minutes", "1e-9")
    assert outcome.exit_code == 1
    assert "Nothing was measured: 2 layers" in outcome.stdout
    assert "no time left" in outcome.stdout


def test_bench_drawn_layers_depend_on_the_seed():
    def drawn(*options):
        return parsed("bench", "--drawn", "8", *options, "--list")["layers"]

    assert drawn("--seed", "3") == drawn("--seed", "3")
    assert drawn() != drawn()
    line = refused("bench", "--drawn", "2", "--suite", "vgg16", "--list")
    assert "a run must take its layers from one source" in line


def test_bench_list_prints_layers():
    assert "16x64x112x112 * 128x64x3x3" in said("bench", "--list", "--suite", "vgg16")
    content = parsed("bench", "--list")
    assert len(content["layers"]) == 92
    assert "depthwise" in content["suites"]
