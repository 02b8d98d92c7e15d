"""The benchmark's clock, peers and environment report, on emulated devices."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import cupy
import pytest

from cupyconv import measuring
from cupyconv.bench import ceilings, environment, places, pytorch, report
from cupyconv.gpu import capture
from cupyconv.markup import Document
from cupyconv.problem import PASSES
from tests.bench.test_bench_run import DENSE, DEPTHWISE, measure, small  # noqa: F401
from tests.device import machine
from tests.gpu import test_ways_in as ways


@pytest.fixture
def gpu(monkeypatch):
    place = places.of(None)
    assert place.name == "gpu"
    place.sweep_bytes = 1 << 16  # larger sweeps take an emulated device seconds
    monkeypatch.setattr(places, "of", lambda word: place)
    return place


def test_bench_times_kernels_and_host_separately(gpu):
    result = measure(DENSE, DEPTHWISE, place=gpu, layouts=("channels_last",))
    assert result.finished
    assert not result.failed
    assert len(result.rows) == 2 * 3
    assert {row.pass_ for row in result.rows} == set(PASSES)
    assert all(row.host_microseconds > 0 for row in result.rows)
    assert all(row.workspace_bytes >= 0 for row in result.rows)
    assert all(row.kernel.startswith("cuda-") for row in result.rows)
    details, runtime = result.environment, cupy.cuda.runtime
    assert details["gpu"] == runtime.getDeviceProperties(0)["name"].decode()
    assert environment.title(details).startswith(f"{details['gpu']}, ")
    version = runtime.runtimeGetVersion()
    assert details["cuda_runtime"] == f"{version // 1000}.{version % 1000 // 10}"
    text = Document("", tuple(report.sections(result))).text()
    assert "µs of host time per call" in text
    assert "MiB of workspace" in text


def test_a_sample_sweeps_once_and_waits_while_the_host_queues(gpu):
    done = []
    gpu.sweep = lambda: done.append("sweep")
    assert gpu.sample(lambda: done.append("call"), 2, lead=1e-3) >= 0
    assert done == ["sweep", "call", "call"]


def test_time_is_the_mean_of_consecutive_calls():
    calls = []

    def call():
        calls.append(1)
        time.sleep(0.01)

    started = time.perf_counter()
    mean = measuring.timed(call, 3, lead=1e-3)
    assert 0.01 <= mean.device <= (time.perf_counter() - started) / 3
    assert 0.01 <= mean.host <= mean.device
    assert len(calls) == 3
    assert measuring.driver_version() == cupy.cuda.runtime.driverGetVersion()


def test_lost_context_is_detected():
    assert not measuring.lost()
    machine.DEVICES[0].fail(machine.DeviceFault("emulated fault"))
    assert measuring.lost()
    machine.revive()
    assert not measuring.lost()


def test_active_capture_is_detected():
    assert not capture.is_active()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        assert capture.is_active()
        stream.end_capture()
        assert not capture.is_active()


# PyTorch does not see the emulated devices, so its CUDA functions are stubs here.


def test_torch_peer_runs_on_timed_stream(gpu):
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
            options = SimpleNamespace(benchmark=False, allow_tf32=True)
            torch = SimpleNamespace(
                backends=SimpleNamespace(cudnn=options, cuda=SimpleNamespace(matmul=options)),
                cuda=Cuda(pointer),
                get_num_threads=lambda: 1,
                set_num_threads=lambda count: None,
                inference_mode=nullcontext,
            )
            with pytorch.PyTorch(gpu, torch).settings("ieee"):
                assert options.benchmark
            assert (options.benchmark, options.allow_tf32) == (False, True)
        assert entered == [f"stream {stream.ptr}"]


# A PyTorch with CUDA warns that it cannot use the emulated devices.
@pytest.mark.filterwarnings("ignore:CUDA initialization")
def test_torch_without_cuda_is_no_gpu_peer(gpu):
    torch = pytest.importorskip("torch")
    assert pytorch.find(gpu) == (None, f"this PyTorch ({torch.__version__}) has no CUDA device")


def test_ceiling_falls_back_to_another_library(gpu, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no cuBLAS")

    torch = SimpleNamespace(tensor=refuse)
    # CuPy's product needs cuBLAS, which is not emulated.
    with pytest.raises(ceilings.NoCeilingError, match=r"cupy: .*; torch: no cuBLAS"):
        ceilings.measure(gpu, "bfloat16", torch, 0.001)
    monkeypatch.setattr(ceilings, "_product", lambda a, b: lambda _: a + b)
    ceiling = ceilings.measure(gpu, "bfloat16", torch, 0.001)
    assert (ceiling.product_by, ceiling.copy_by) == ("cupy", "cupy")


def test_bench_command_reports_unmeasured_parts(gpu, tmp_path, monkeypatch):
    ways.test_bench_on_the_gpu_says_what_it_cannot_measure(tmp_path, monkeypatch)
