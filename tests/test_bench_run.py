"""Runs of the benchmark: on the CPU, interrupted, and from the outside.

On a GPU, tests/device/test_bench.py has them.
"""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from cupyconv import ConvProblem, KernelCompileError, arrays
from cupyconv.bench import (
    ceilings,
    checks,
    data,
    first_call,
    implementations,
    peers,
    places,
    report,
    results,
    suites,
    timing,
)
from cupyconv.bench import run as bench_run
from cupyconv.bench.results import FirstCall, Log
from cupyconv.bench.run import Options, run
from cupyconv.bench.suites import SuiteLayer
from cupyconv.cli.main import main
from cupyconv.planning.device import CPU
from cupyconv.problem import PASSES

ROOT = Path(__file__).resolve().parent.parent

DENSE = SuiteLayer("tiny-dense", ConvProblem((2, 6, 8, 8), (4, 6, 3, 3), padding=1), "test")
DEPTHWISE = SuiteLayer("tiny-depthwise", ConvProblem((2, 6, 9), (6, 1, 3), groups=6), "test")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Ceilings and sweeps that take no time, and no new processes."""
    monkeypatch.setattr(ceilings, "PRODUCT_SIZE", {"cpu": 64, "gpu": 64})
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 1 << 16, "gpu": 1 << 16})
    monkeypatch.setattr(places, "_FEWEST_SWEEP_BYTES", 1 << 16)
    monkeypatch.setattr(places, "_MOST_SWEEP_BYTES", 1 << 16)
    monkeypatch.setattr(timing, "PAUSE", 0.0)
    monkeypatch.setattr(first_call, "measure", lambda *_, **__: iter(()))


def measure(*layers, place=None, log=None, **options):
    given = {"seconds": 0.002, "peers": (), **options}
    return run(place or places.CpuPlace(), Options(layers, **given), log or Log())


# -- on the CPU ------------------------------------------------------------------------------------


def test_every_pass_is_checked_and_timed_beside_pytorch():
    pytest.importorskip("torch")
    found = measure(DENSE, DEPTHWISE, dtypes=("float32", "bfloat16"), peers=("torch",))
    assert found.finished
    assert not found.failed
    assert not found.skipped
    keys = {(r.dtype, r.layer, r.pass_, r.layout, r.implementation) for r in found.rows}
    assert len(keys) == len(found.rows) == 2 * 2 * 3 * 2 * 2
    for row in found.rows:
        assert row.error <= row.bound
        assert row.checked == 1
        assert 0 < row.low <= row.microseconds <= row.high
        assert row.samples >= timing.FEWEST_SAMPLES
        assert row.host_microseconds is None
        assert row.kernel == ("numpy" if row.implementation == "auto" else "torch")
    assert set(found.ceilings) == {"float32", "bfloat16"}
    assert len(report.comparisons(found, "torch")) == 2 * 2 * 3


@pytest.mark.parametrize("name", ["jax", "tensorflow"])
def test_every_pass_is_checked_and_timed_beside_others(name):
    pytest.importorskip(name)
    found = measure(DENSE, DEPTHWISE, peers=(name,))
    assert not found.failed
    assert {(r.layer, r.pass_) for r in found.rows if r.implementation == name} == {
        (layer.name, pass_) for layer in (DENSE, DEPTHWISE) for pass_ in PASSES
    }
    assert found.ceilings["float32"].product_by == "numpy"


def test_a_peer_that_takes_long_is_named_and_not_timed(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(bench_run, "_SLOWEST_PEER_CALL", 0.0)
    found = measure(DENSE, DEPTHWISE, peers=("torch",), layouts=("channels_last",))
    assert {row.implementation for row in found.rows} == {"auto"}
    why = "a call takes more than 0 s; this layer is left out from there on"
    assert [(note.layer, note.what, note.reason) for note in found.skipped if note.layer] == [
        (layer.name, "torch forward channels_last", why) for layer in (DENSE, DEPTHWISE)
    ]


def test_a_peer_that_takes_long_to_compile_is_timed(monkeypatch):
    pytest.importorskip("torch")
    honest, seconds = peers.TorchPeer.call, [0.0]

    def compiling(self, problem, pass_, sets):
        seconds[0] += 2 * bench_run._SLOWEST_PEER_CALL
        return honest(self, problem, pass_, sets)

    monkeypatch.setattr(peers.TorchPeer, "call", compiling)
    monkeypatch.setattr(bench_run, "perf_counter", lambda: seconds[0])
    found = measure(DENSE, peers=("torch",), passes=("forward",))
    assert {row.implementation for row in found.rows} == {"auto", "torch"}


def test_complex_numbers_are_checked_and_timed_beside_pytorch():
    pytest.importorskip("torch")
    options = {"layouts": ("channels_last",), "peers": ("torch",)}
    found = measure(DENSE, dtypes=("complex64",), **options)
    assert not found.failed
    assert not found.skipped
    assert {(row.pass_, row.implementation) for row in found.rows} == {
        (pass_, name) for pass_ in PASSES for name in ("auto", "torch")
    }
    assert {row.useful_flops for row in found.rows} == {4 * DENSE.problem.useful_flops}


def test_without_any_peer_ours_is_measured_alone(monkeypatch):
    def missing(_name):
        raise ImportError

    monkeypatch.setattr(peers, "import_module", missing)
    found = measure(DENSE, peers=None, dtypes=("float16",))
    assert {row.implementation for row in found.rows} == {"auto"}
    assert found.ceilings["float16"].product_by == "numpy"
    assert [note.reason for note in found.skipped] == [
        f"{label} is not installed" for label in peers.PEERS.values()
    ]
    assert report.sections(found)


def test_without_a_library_that_multiplies_there_are_figures_but_no_roofline(monkeypatch):
    def missing(*_):
        raise ImportError("libcublas is missing\nmore of it")

    monkeypatch.setattr(ceilings, "_product", missing)
    found = measure(DENSE, passes=("forward",), minutes=1)
    assert {row.implementation for row in found.rows} == {"auto"}
    assert not found.ceilings
    (note,) = (note for note in found.skipped if note.what == "the roofline")
    assert note.layer == "all layers"
    assert note.reason == "numpy: libcublas is missing"
    assert report.sections(found)


def test_several_implementations_are_measured_side_by_side():
    found = measure(DENSE, impls=("numpy", "reference"), passes=("forward",))
    assert [row.implementation for row in found.rows] == ["numpy", "reference"] * 2


def test_an_implementation_that_does_not_take_a_layer_is_named():
    found = measure(DENSE, impls=("auto", "cuda-generic"), passes=("forward",))
    assert {row.implementation for row in found.rows} == {"auto"}
    (note,) = [note for note in found.skipped if note.what == "cuda-generic"]
    assert "does not run on cpu" in note.reason


def test_a_wrong_result_is_told_and_not_timed(monkeypatch):
    honest = implementations.pass_call

    def wrong(problem, pass_, sets, impl, precision):
        call = honest(problem, pass_, sets, impl, precision)
        return (lambda i: call(i) * 1.5) if impl == "numpy" and pass_ == "forward" else call

    monkeypatch.setattr(implementations, "pass_call", wrong)
    monkeypatch.setattr(timing, "FEWEST_SAMPLES", 3)
    found = measure(DENSE, impls=("auto", "numpy"), passes=("forward", "backprop_input"))
    assert {(r.implementation, r.pass_) for r in found.rows} == {
        ("auto", "forward"),
        ("auto", "backprop_input"),
        ("numpy", "backprop_input"),
    }
    assert {note.what for note in found.failed} == {
        "numpy forward channels_last",
        "numpy forward channels_first",
    }
    assert "off by 5.0e-01" in found.failed[0].reason


def test_a_wrong_pytorch_is_named_and_not_counted(monkeypatch):
    pytest.importorskip("torch")
    honest = peers.TorchPeer.call

    def wrong(self, problem, pass_, sets):
        call = honest(self, problem, pass_, sets)
        return lambda i: call(i) * 2

    monkeypatch.setattr(peers.TorchPeer, "call", wrong)
    found = measure(DENSE, peers=("torch",), passes=("forward",))
    assert {row.implementation for row in found.rows} == {"auto"}
    assert not found.failed
    assert {note.what for note in found.skipped} == {
        "torch forward channels_last",
        "torch forward channels_first",
    }


def test_a_pytorch_that_refuses_is_named(monkeypatch):
    pytest.importorskip("torch")

    def refuse(*_):
        raise RuntimeError("unsupported\nsecond line")

    monkeypatch.setattr(peers.TorchPeer, "call", refuse)
    found = measure(DENSE, peers=("torch",), passes=("forward",))
    assert [(note.what, note.reason) for note in found.skipped] == [
        ("torch forward", "unsupported")
    ]
    lopsided = ConvProblem((1, 2, 5, 5), (2, 2, 2, 2), padding="same")
    found = measure(SuiteLayer("lopsided", lopsided), peers=("torch",))
    assert {row.implementation for row in found.rows} == {"auto"}
    assert [note.reason for note in found.skipped] == ["PyTorch pads both sides alike"]


def test_a_kernel_that_does_not_compile_is_a_failure(monkeypatch):
    def broken(*_):
        raise KernelCompileError("conv_forward.cu does not compile", "the log")

    monkeypatch.setattr(implementations, "pass_call", broken)
    monkeypatch.setattr(checks, "numpy_exact", lambda *_: lambda *_: np.zeros((2, 4, 8, 8)))
    found = measure(DENSE, passes=("forward",))
    assert found.rows == []
    assert "does not compile" in found.failed[0].reason


def test_a_layer_that_does_not_fit_is_skipped_and_named(monkeypatch):
    huge = SuiteLayer("huge", ConvProblem((2**20, 1024, 1024), (8, 1024, 3)))
    empty = SuiteLayer("empty", ConvProblem((0, 6, 8, 8), (4, 6, 3, 3)))
    found = measure(huge, empty, DENSE, passes=("forward",))
    assert {row.layer for row in found.rows} == {"tiny-dense"}
    reasons = {note.layer: note.reason for note in found.skipped}
    assert "GiB of memory" in reasons["huge"]
    assert "empty batch" in reasons["empty"]

    def no_memory(*_):
        raise MemoryError

    monkeypatch.setattr(data, "random_sets", no_memory)
    found = measure(DENSE)
    assert [note.reason for note in found.skipped if note.layer] == ["does not fit into memory"]


def test_a_run_ends_in_time_and_names_what_is_left():
    slow = SuiteLayer("slow", ConvProblem((64, 512, 32, 32), (512, 512, 3, 3), padding=1))
    found = measure(slow, DENSE, minutes=0.05)
    assert {row.layer for row in found.rows} == {"tiny-dense"}
    assert "needs about" in {n.layer: n.reason for n in found.skipped}["slow"]
    found = measure(DENSE, DEPTHWISE, minutes=1e-9)
    assert found.rows == []
    named = {note.layer for note in found.skipped if note.what == "the layer"}
    assert named == {"tiny-dense", "tiny-depthwise"}
    assert found.finished


def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch):
    honest = timing.measure
    turns = iter(range(100))

    def interrupted(calls, *rest):
        if "auto" in calls and next(turns) == 4:
            raise KeyboardInterrupt
        return honest(calls, *rest)

    monkeypatch.setattr(timing, "measure", interrupted)
    path = tmp_path / "log.jsonl"
    found = measure(DENSE, DEPTHWISE, log=Log(path))
    assert len(found.rows) == 4
    assert not found.finished
    assert found.skipped[-1].reason == "interrupted"
    assert results.load(path) == found


def test_an_interrupt_that_a_library_swallows_ends_the_run(monkeypatch):
    """As the imports of some do."""

    def swallowing(_place, _name):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return None, "it is not there"

    monkeypatch.setattr(peers, "find", swallowing)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        found = measure(DENSE, peers=("torch",))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not found.finished
    assert not found.rows
    assert found.skipped[-1].reason == "interrupted"


def test_a_run_that_breaks_keeps_what_it_has(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("the card fell off the bus")

    path = tmp_path / "log.jsonl"
    monkeypatch.setattr(bench_run.timing, "measure", broken)
    with pytest.raises(RuntimeError, match="fell off"):
        measure(DENSE, log=Log(path))
    assert "fell off the bus" in results.load(path).skipped[-1].reason


# -- first calls -----------------------------------------------------------------------------------


def request_of(implementation):
    from cupyconv.planning import plan

    return {
        "implementation": implementation,
        "plan": plan(data.in_layout(DENSE.problem, data.LAYOUTS[0], "float32")).to_json(),
        "passes": list(PASSES),
        "device": "cpu",
        "precision": "ieee",
    }


def test_first_calls_are_timed_in_this_process():
    assert set(first_call.main(json.dumps(request_of("auto")))) == set(PASSES)
    for name in peers.PEERS:
        if peers.find(places.CpuPlace(), name)[0]:
            found = first_call.main(json.dumps(request_of(name)))
            assert all(milliseconds > 0 for milliseconds in found.values())


def test_first_calls_in_new_processes(monkeypatch):
    monkeypatch.undo()
    found = list(first_call.measure(DENSE, "float32", ["forward"], "cpu", peers=()))
    assert [(e.implementation, e.cache, e.pass_) for e in found] == [("auto", "", "forward")]
    with pytest.raises(first_call.FirstCallError, match=r"usable GPU|CuPy"):
        list(first_call.measure(DENSE, "float32", ["forward"], "gpu"))


def test_a_cold_and_a_warm_kernel_cache_are_told_apart(monkeypatch):
    monkeypatch.undo()
    folders = []

    def in_new_process(request, folder):
        folders.append(folder)
        return dict.fromkeys(request["passes"], 1.0)

    monkeypatch.setattr(first_call, "_in_new_process", in_new_process)
    found = list(first_call.measure(DENSE, "float32", ["forward"], "gpu"))
    assert [(e.implementation, e.cache) for e in found] == [
        ("auto", "cold"),
        ("auto", "warm"),
        ("torch", ""),
    ]
    assert folders[0] == folders[1] != folders[2]


def test_a_first_call_that_fails_is_named(monkeypatch):
    def fails(*_, **__):
        raise first_call.FirstCallError("no such thing")
        yield

    monkeypatch.setattr(first_call, "measure", fails)
    found = measure(DENSE, passes=("forward",))
    assert [(n.what, n.reason) for n in found.skipped if n.layer] == [
        ("first calls", "no such thing")
    ]
    assert found.rows


# -- the command -----------------------------------------------------------------------------------


def cupyconv(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "net.toml"
    path.write_text(
        '[[layer]]\nname = "first"\ninput = "2x3x9x9"\nfilter = "4x3x3x3"\nstride = 2\n'
        '[[layer]]\ninput = "2x16x4"\nfilter = "8x16x3"\npadding = "same"\n'
    )
    return path


def test_table_json_csv_and_picture_of_a_models_own_layers(tmp_path, config):
    files = [tmp_path / name for name in ("new.json", "new.csv", "new.svg")]
    outcome = cupyconv(
        *("--config", str(config), "--device", "cpu", "--seconds", "0.002"),
        *("--json", str(files[0]), "--csv", str(files[1]), "--plot", str(files[2])),
        *("--peers", "torch"),
    )
    assert outcome.exit_code == 0, outcome.output
    assert "Measured: 2 layers" in outcome.stdout
    assert "first" in outcome.stdout
    loaded = results.load(files[0])
    assert {row.layer for row in loaded.rows} == {"first", "net-2"}
    assert loaded.finished
    lines = [line for line in files[1].read_text().splitlines() if line[0] != "#"]
    assert len(list(csv.DictReader(lines))) == len(loaded.rows)
    ET.parse(files[2])
    assert not (tmp_path / "new.jsonl").exists()
    outcome = cupyconv("--compare", str(files[0]), str(files[0]))
    assert outcome.exit_code == 0
    assert "No change beyond the spread" in outcome.stdout
    outcome = cupyconv("--compare", str(files[0]), str(files[0]), "--json", "-")
    assert "Together" in json.loads(outcome.stdout)


def test_json_on_standard_output(config):
    outcome = cupyconv(
        *("--config", str(config), "--device", "cpu", "--seconds", "0.002", "--peers", "none"),
        *("--pass", "forward", "--layout", "channels_first", "--json", "-"),
    )
    assert outcome.exit_code == 0, outcome.output
    content = json.loads(outcome.stdout)
    assert [row["pass_"] for row in content["rows"]] == ["forward", "forward"]
    assert content["rows"][0]["ratio_to_torch"] is None


def test_a_quick_run_says_what_it_chose(monkeypatch):
    asked = []

    def take(_place, options, log, _advance):
        asked.append(options)
        log.finish()

    monkeypatch.setattr(bench_run, "run", take)
    outcome = cupyconv("--quick", "--device", "cpu")
    assert outcome.exit_code == 1, outcome.output  # nothing was measured
    (options,) = asked
    assert 10 < len(options.layers) <= len(suites.QUICK)
    assert {layer.kind for layer in options.layers} == set(suites.KINDS)
    assert {layer.problem.N for layer in options.layers} == {1}
    assert options.minutes == 2
    assert f"a quick look at {len(options.layers)} of 78 layers, batch 1" in outcome.stdout


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
        (["--peers", "pytorch"], "unknown peer: 'pytorch'"),
        (["--device", "gpus"], "Did you mean 'gpu'?"),
        (["--seconds", "0"], "--seconds must be above 0"),
        (["--minutes", "inf"], "--minutes must be above 0"),
        (["--quick", "--device", "cpu", "--layer", "sdxl-6"], "Leave --quick out"),
        (["--config", "missing.toml"], "missing.toml"),
        (["--config", "missing.toml", "--suite", "all"], "Give one of them"),
        (["--compare", "missing.json", "missing.json"], "missing.json"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message):
    outcome = cupyconv(*arguments)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1


def test_layers_of_one_name_are_told(tmp_path):
    path = tmp_path / "net.toml"
    path.write_text('[[layer]]\nname = "a"\ninput = "1x1x1"\nfilter = "1x1x1"\n' * 2)
    outcome = cupyconv("--config", str(path))
    assert outcome.exit_code == 2
    assert "'a' is there more than once" in outcome.stderr


def test_a_file_that_cannot_be_written_is_told_before_the_run(tmp_path, config):
    outcome = cupyconv("--config", str(config), "--csv", str(tmp_path / "no" / "such.csv"))
    assert outcome.exit_code == 2
    assert "such.csv" in outcome.stderr


def test_results_of_another_version_are_told(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"is": results.KIND, "schema": 0}))
    outcome = cupyconv("--compare", str(path), str(path))
    assert outcome.exit_code == 2
    assert "is of version 0" in outcome.stderr


@pytest.mark.skipif(arrays.device_count() > 0, reason="there is a GPU")
def test_without_a_gpu_the_exit_code_is_3():
    outcome = cupyconv("--device", "gpu")
    assert outcome.exit_code == 3
    assert len(outcome.stderr.splitlines()) == 1


def test_a_wrong_result_makes_the_exit_code_1(monkeypatch, config):
    honest = implementations.pass_call

    def wrong(problem, pass_, sets, impl, precision):
        call = honest(problem, pass_, sets, impl, precision)
        return (lambda i: call(i) + 1) if impl == "auto" else call

    monkeypatch.setattr(implementations, "pass_call", wrong)
    outcome = cupyconv(
        "--config", str(config), "--device", "cpu", "--peers", "none", "--pass", "forward"
    )
    assert outcome.exit_code == 1
    assert "Wrong, and so not timed" in outcome.stdout


def test_an_interrupted_command_reports_and_says_so(monkeypatch, config, tmp_path):
    honest = timing.measure
    turns = iter(range(100))

    def interrupted(calls, *rest):
        if "auto" in calls and next(turns) == 2:
            raise KeyboardInterrupt
        return honest(calls, *rest)

    monkeypatch.setattr(timing, "measure", interrupted)
    path = tmp_path / "new.json"
    outcome = cupyconv(
        *("--config", str(config), "--device", "cpu", "--peers", "none", "--seconds", "0.002"),
        *("--json", str(path)),
    )
    assert outcome.exit_code == 130
    assert "the rest: interrupted" in outcome.stdout
    assert "did not come to its end" in outcome.stdout
    assert len(results.load(path).rows) == 2


def test_an_error_in_the_middle_still_writes_the_files(monkeypatch, config, tmp_path):
    def broken(_place, _options, log, _advance):
        log.start({"device": "cpu"}, {})
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setattr(bench_run, "run", broken)
    path = tmp_path / "new.json"
    outcome = cupyconv("--config", str(config), "--device", "cpu", "--json", str(path))
    assert outcome.exit_code != 0
    assert not results.load(path).finished


def test_a_benchmark_that_measures_nothing_says_so(config):
    plain = ("--config", str(config), "--device", "cpu", "--peers", "none")
    outcome = cupyconv(*plain, "--impl", "cuda-gather")
    assert outcome.exit_code == 2
    assert "cuda-gather cannot on the cpu" in outcome.stderr
    outcome = cupyconv(*plain, "--minutes", "1e-9")
    assert outcome.exit_code == 1
    assert "Nothing was measured of 2 layers" in outcome.stdout
    assert "no time left" in outcome.stdout


def test_drawn_layers_are_other_ones_each_time_but_of_a_seed():
    def drawn(*options):
        outcome = cupyconv("--drawn", "8", *options, "--list", "--json", "-")
        return json.loads(outcome.stdout)["layers"]

    assert drawn("--seed", "3") == drawn("--seed", "3")
    assert drawn() != drawn()
    outcome = cupyconv("--drawn", "2", "--suite", "vgg16", "--list")
    assert outcome.exit_code == 2
    assert "both choose layers" in outcome.output
    assert cupyconv("--drawn", "0", "--list").exit_code == 2


def test_layers_are_listed():
    outcome = cupyconv("--list", "--suite", "vgg16")
    assert outcome.exit_code == 0
    assert "16x64x112x112 * 128x64x3x3" in outcome.stdout
    content = json.loads(cupyconv("--list", "--json", "-").stdout)
    assert len(content["layers"]) == 78
    assert "depthwise" in content["suites"]


# -- everything that a GPU is needed for -----------------------------------------------------------


@pytest.mark.skipif(arrays.device_count() > 0, reason="there is a GPU")
def test_the_gpu_run_says_that_there_is_none(tmp_path):
    out = tmp_path / "out"
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 3
    assert "no usable GPU" in ended.stdout
    assert not out.exists()


def test_the_benchmark_of_the_gpu_run_is_given_options_that_there_are(tmp_path):
    from tests.gpu import __main__ as everything

    steps = {step.name: step for step in everything.steps(tmp_path, "sm_90a", 5)}
    program, _, script, command, *options = steps["bench"].command
    assert (command, options[options.index("--minutes") + 1]) == ("bench", "5.00")
    listed = subprocess.run(
        [program, "-c", script, command, *options, "--list"], capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stderr
    assert "resnet50-03" in listed.stdout


def test_a_step_that_takes_too_long_is_interrupted_with_all_it_started(tmp_path, monkeypatch):
    from tests.gpu import __main__ as everything

    monkeypatch.setattr(everything, "LEAST_SECONDS", 0.1)
    ready = tmp_path / "ready"
    program = (
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "try:\n"
        f"    Path({str(ready)!r}).touch()\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    print('what there is', flush=True)\n"
    )
    wait = subprocess.Popen.wait

    def until_ready(process, timeout=None):
        """Time is up as soon as the program is where it waits, however busy the machine is."""
        if timeout == 1.5:
            while not ready.exists():
                time.sleep(0.01)
            raise subprocess.TimeoutExpired(process.args, timeout)
        return wait(process, timeout)

    monkeypatch.setattr(everything.subprocess.Popen, "wait", until_ready)
    monkeypatch.setattr(everything, "GRACE_SECONDS", 120)
    step = everything.Step("bench", (sys.executable, "-c", program), 1.0)
    log = tmp_path / "log.txt"
    outcome = everything.run_step(step, log, 1.5)
    assert outcome.state == "out of time"
    text = log.read_text()
    assert "what there is" in text
    assert ended(int(text.splitlines()[1]))


def ended(pid):
    """Whether a process is gone, at once or a moment later."""
    for _ in range(50):
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_compute_sanitizer_is_found_on_the_path_or_beside_cuda(tmp_path, monkeypatch):
    from tests.gpu import __main__ as everything

    monkeypatch.setattr(everything.shutil, "which", lambda _: None)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    program = tmp_path / "bin" / "compute-sanitizer"
    program.write_text("")
    assert everything.compute_sanitizer() == str(program)
    monkeypatch.setattr(everything.shutil, "which", lambda _: "found/compute-sanitizer")
    assert everything.compute_sanitizer() == "found/compute-sanitizer"


def test_the_sanitized_program_runs_every_case_and_sees_what_is_wrong():
    from tests.gpu import sanitizer

    count, wrong = sanitizer.run(CPU, np.asarray, np.asarray)
    names = [name for name, _ in sanitizer.problems()]
    assert set(sanitizer.CASES) < set(names)
    assert count == len(names) * len(sanitizer.DTYPES) * len(PASSES) * 2  # CPU implementations
    assert wrong == []
    count, wrong = sanitizer.run(CPU, np.asarray, lambda array: array + 1)
    assert len(wrong) == count


def test_first_call_records():
    entry = FirstCall("auto", "a", "float32", "", "forward", 3.0)
    section = report.sections(results.Results(first_calls=[entry]))[0]
    assert section.lines == ("auto: first forward of a in a new process 3 ms",)
