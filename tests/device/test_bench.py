"""The benchmark, its clock and its accounts of a GPU, on emulated devices."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import cupy
import pytest

from cupyconv import measuring
from cupyconv.bench import ceilings, environment, peers, places, report, timing
from cupyconv.problem import PASSES
from tests.device import machine
from tests.gpu import __main__ as everything
from tests.gpu import sanitizer
from tests.gpu import test_ways_in as ways
from tests.test_bench_run import DENSE, DEPTHWISE, ROOT, measure, small  # noqa: F401


@pytest.fixture
def gpu(monkeypatch):
    place = places.of(None)
    assert place.name == "gpu"
    # Sweeps of a cache of 50 MB, before every sample, would take a device without hardware seconds.
    place.clock = timing.CudaClock(cupy, 1 << 16)
    monkeypatch.setattr(places, "of", lambda word: place)
    return place


def test_kernels_are_timed_with_events_and_their_host_apart(gpu):
    found = measure(DENSE, DEPTHWISE, place=gpu, layouts=("channels_last",))
    assert found.finished
    assert not found.failed
    assert len(found.rows) == 2 * 3
    assert {row.pass_ for row in found.rows} == set(PASSES)
    assert all(row.host_microseconds > 0 for row in found.rows)
    assert all(row.workspace_bytes >= 0 for row in found.rows)
    assert all(row.kernel.startswith("cuda-") for row in found.rows)
    about, runtime = found.environment, cupy.cuda.runtime
    assert about["gpu"] == runtime.getDeviceProperties(0)["name"].decode()
    assert environment.title(about).startswith(f"{about['gpu']}, ")
    for key, version in (
        ("cuda_runtime", runtime.runtimeGetVersion()),
        ("cuda_driver", runtime.driverGetVersion()),
    ):
        assert about[key] == f"{version // 1000}.{version % 1000 // 10}"
    text = "\n".join(section.text() for section in report.sections(found))
    assert "µs of the host" in text
    assert f"{about['launch_microseconds']:.1f} µs of every GPU call are CuPy's own" in text
    assert "MiB of workspace" in text


def test_the_sanitized_program_runs_every_kernel_family(gpu, monkeypatch):
    monkeypatch.setattr(sanitizer, "CASES", ("depthwise_multiplier",))
    monkeypatch.setattr(sanitizer, "DTYPES", ("float16",))
    count, wrong = sanitizer.run(gpu.device, cupy.asarray, cupy.asnumpy)
    assert count >= 3 * len(PASSES)
    assert wrong == []


def test_the_sweep_before_a_sample_lasts_until_the_host_is_ahead(gpu):
    clock = gpu.clock
    assert clock.asynchronous
    swept = []
    clock._sweep = lambda: swept.append(1)
    clock.sweep_seconds = 1e-3
    assert clock.sample([lambda: None], lead=0.0) >= 0
    assert len(swept) == 1
    clock.sample([lambda: None], lead=4.5e-3)
    assert len(swept) == 1 + 5
    clock.sample([lambda: None], lead=60.0)
    assert len(swept) == 6 + timing.MOST_SWEEPS


def test_time_is_taken_with_events_over_calls_in_a_row():
    calls = []

    def call():
        calls.append(1)
        time.sleep(0.01)

    started = time.perf_counter()
    found = measuring.seconds(call, 3)
    assert 0.01 <= found <= (time.perf_counter() - started) / 3
    assert len(calls) == 3
    assert measuring.driver_version() == cupy.cuda.runtime.driverGetVersion()


def test_a_lost_context_is_known():
    assert not measuring.lost()
    machine.DEVICES[0].fail(machine.DeviceFault("something was astray"))
    assert measuring.lost()
    machine.revive()
    assert not measuring.lost()


def test_a_stream_that_is_captured_is_known():
    assert not measuring.capturing()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        assert measuring.capturing()
        stream.end_capture()
        assert not measuring.capturing()


# PyTorch does not see these devices: what it has of CUDA is made up.


def test_pytorch_runs_on_the_stream_that_is_timed(gpu):
    entered = []

    class Cuda:
        ExternalStream = staticmethod(lambda pointer: f"stream {pointer}")

        def __init__(self, pointer):
            self.pointer = pointer

        def current_stream(self):
            return SimpleNamespace(cuda_stream=self.pointer)

        def stream(self, stream):
            entered.append(stream)
            return nullcontext()

    with cupy.cuda.Stream() as stream:
        for pointer in (stream.ptr, 7):
            peer = peers.TorchPeer(gpu, SimpleNamespace(cuda=Cuda(pointer)))
            with peer._current_stream():
                pass
        assert entered == [f"stream {stream.ptr}"]


def test_pytorchs_workspace_is_what_its_peak_is_beyond_the_result(gpu):
    cuda = SimpleNamespace(
        memory_allocated=lambda: 1000,
        reset_peak_memory_stats=lambda: None,
        max_memory_allocated=lambda: 1000 + 640 + 4 * 6,
    )
    peer = peers.TorchPeer(gpu, SimpleNamespace(cuda=cuda))
    result = SimpleNamespace(numel=lambda: 6, element_size=lambda: 4)
    assert peer.workspace_bytes(lambda _: result) == 640


# A PyTorch with CUDA does not take emulated devices, and says so.
@pytest.mark.filterwarnings("ignore:CUDA initialization")
def test_a_pytorch_without_cuda_is_no_peer_on_a_gpu(gpu):
    torch = pytest.importorskip("torch")
    assert peers.find(gpu) == (None, f"this PyTorch ({torch.__version__}) has no CUDA device")


def test_a_ceiling_takes_whatever_library_can(gpu, monkeypatch):
    def refuses(*_):
        raise RuntimeError("no cuBLAS")

    def added(place, size, dtype):
        a = place.xp.ones((size, size), dtype)
        return lambda _: a + a

    peer = SimpleNamespace(product=refuses, copy=refuses)
    # CuPy's own product needs cuBLAS, which the devices do not have.
    with pytest.raises(ceilings.NoCeilingError, match="torch: no cuBLAS; cupy: "):
        ceilings.measure(gpu, "bfloat16", peer, 0.001)
    monkeypatch.setattr(ceilings, "_product", added)
    found = ceilings.measure(gpu, "bfloat16", peer, 0.001)
    assert (found.product_by, found.copy_by) == ("cupy", "cupy")


def test_the_command_says_what_it_cannot_measure(gpu, tmp_path, monkeypatch):
    ways.test_bench_on_the_gpu_says_what_it_cannot_measure(tmp_path, monkeypatch)


def test_emulated_devices_alone_are_given_what_they_are_up_to(tmp_path, monkeypatch):
    def commands():
        return {one.name: one.command for one in everything.steps(tmp_path, "sm_90a", 1)}

    rehearsed = commands()
    assert "--part" in rehearsed["tests"]
    assert "tests.device.rehearsal" in rehearsed["bench"]
    assert "tests/device/rehearsal.toml" in rehearsed["bench"]
    monkeypatch.setattr(everything, "is_running", lambda: False)
    for command in commands().values():
        assert not [word for word in command if "rehears" in word or word == "--part"]
    assert commands()["bench"][-1] == rehearsed["bench"][-1]


def test_the_gpu_run_goes_through_its_steps_in_order(tmp_path, gpu, monkeypatch, capsys):
    chip = gpu.device.architecture
    order = [step.name for step in everything.steps(tmp_path, "sm_90a", 1)]
    assert order == ["golden", "tests", "memcheck", "racecheck", "bench"]
    python = sys.executable
    quick = everything.Step("golden", (python, "-c", f"print('in {ROOT}/a.py')"), 1.0)
    wrong = everything.Step("tests", (python, "-c", "print('== 1 failed =='); exit(1)"), 1.0)
    missing = everything.Step("memcheck", ("no",), 1.0, "not installed")
    absent = everything.Step("racecheck", ("./there-is-no-such-program",), 1.0)
    late = everything.Step("bench", (python, "-c", "print('late')"), 0.0)
    planned = [quick, wrong, missing, absent, late]
    monkeypatch.setattr(everything, "steps", lambda *_: planned)
    outcomes = everything.run(tmp_path / "out", 60)  # minutes: the machine may be busy
    assert [one.state for one in outcomes] == ["passed", "failed", "not run", "failed", "not run"]
    assert [one.summary for one in outcomes[:2]] == ["in a.py", "1 failed"]
    assert "not installed" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"log-{chip}.txt", f"summary-{chip}.json"}
    assert str(ROOT) not in (tmp_path / "out" / f"log-{chip}.txt").read_text()
    summary = json.loads((tmp_path / "out" / f"summary-{chip}.json").read_text())
    assert summary["environment"]["gpu"] == gpu.device.name
    assert everything.main(["--out", str(tmp_path / "out")]) == 1
    monkeypatch.setattr(everything, "steps", lambda *_: [quick])
    assert everything.main(["--out", str(tmp_path / "out")]) == 0
