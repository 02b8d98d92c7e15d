"""Compilation ahead of time.  tests/device/test_warm.py checks which kernels calls load."""

from __future__ import annotations

import os
import re
import sys
import time

import numpy as np
import pytest

import cupyconv
from cupyconv import (
    ConvError,
    ConvProblem,
    DeviceError,
    arrays,
    cache_folder,
    warming,
)
from cupyconv.errors import KernelCompileError
from cupyconv.gpu import compiler
from cupyconv.problem import PASSES
from tests.command import parsed, refused, run

pytest.importorskip("cupy", reason="compiling kernels needs CuPy: pip install 'cupyconv[test]'")

SMALL = ConvProblem((1, 2, 5, 5), (3, 2, 3, 3), dtype="float64")
"""Layer whose kernels compile quickly."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """Record the compilations instead of running them."""
    calls = []

    def compile_cubin(source, defines, architecture):
        calls.append((source.name, tuple(defines.items()), architecture))
        return b"\x7fELF%d" % len(calls), "a log"

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    return calls


# -- choice of kernels -----------------------------------------------------------------------------

LAYER = ConvProblem((4, 64, 14, 14), (128, 64, 3, 3), stride=2, padding=1)


def test_ahead_compiles_the_measured_candidates(monkeypatch):
    planned, measured, default = (
        warming.Ahead("sm_80", measure=measure) for measure in (False, True, None)
    )
    monkeypatch.setattr(cupyconv, "benchmark", True)
    benchmark, disabled = (warming.Ahead("sm_80", measure=measure) for measure in (None, False))
    for ahead in (planned, measured, default, benchmark, disabled):
        ahead.add(LAYER.replace(dtype="float16"), "forward")
    assert set(planned._uses) < set(measured._uses)
    assert set(planned._uses) == set(default._uses) == set(disabled._uses)
    assert set(measured._uses) == set(benchmark._uses)
    sources = {variant.source.name for variant in measured._uses}
    assert {"conv_gather.cu", "conv_forward.cu"} <= sources, "the last resort, too"


def test_ahead_respects_the_workspace_limit(monkeypatch):
    """The default is ``cupyconv.workspace_limit``."""
    split = ConvProblem((2, 256, 4, 4), (8, 256, 3, 3), dtype="float16")

    def compiled(limit):
        ahead = warming.Ahead("sm_80", workspace_limit=limit)
        ahead.add(split, "forward")
        return set(ahead._uses)

    free, without = compiled(None), compiled(0)
    assert free != without
    monkeypatch.setattr(cupyconv, "workspace_limit", 0)
    assert compiled(None) == without
    assert compiled(1 << 30) == free


def test_ahead_compiles_the_kernels_of_a_plan():
    plan = cupyconv.plan(LAYER, "sm_80", impl="cuda-generic")
    ahead = warming.Ahead("sm_80", impl=cupyconv.Plan.from_json(plan.to_json()))
    ahead.add(LAYER, "forward")
    assert [variant.source.name for variant in ahead._uses] == ["conv_forward.cu"]
    with pytest.raises(ConvError, match="a plan must fit the call"):
        ahead.add(LAYER.replace(stride=1))


# -- compilation and cache -------------------------------------------------------------------------


def test_warm_compiles_every_kernel_once(folder, compilations):
    reports = []
    first = cupyconv.warm([SMALL, SMALL.replace(input_shape=(2, 2, 5, 5)), SMALL], "sm_80")
    assert len(first.kernels) == len(first.compiled) == len(compilations) == len(set(compilations))
    assert {kernel.layers for kernel in first.kernels} == {2}
    assert {pass_ for kernel in first.kernels for pass_ in kernel.passes} == {
        *PASSES,
        warming.BIAS_GRADIENT,
    }
    assert str(first.folder) == str(folder)
    assert f"{len(compilations)} compiled in " in str(first)
    ahead = warming.Ahead("sm_80")
    ahead.add(SMALL)
    again = ahead.compile(done=lambda: reports.append(None))
    assert again.compiled == ()
    assert {row[-1] for row in again.table.rows} == {"cached"}
    assert all(float(row[-1]) >= 0 for row in first.table.rows)
    assert "all cached" in str(again)
    assert len(reports) == len(ahead) == len(again.kernels) == len(compilations)
    cupyconv.warm(SMALL, "sm_90a", passes=["forward"])
    assert len(compilations) == len(first.kernels) + 1


def test_warmed_kernel_is_loaded_from_the_cache(folder, monkeypatch):
    """The kernel is really compiled, and found in the cache."""
    start = time.perf_counter()
    warmed = cupyconv.warm(SMALL, "sm_80", passes="forward", impl="cuda-generic", threads=1)
    assert 0 < warmed.seconds <= time.perf_counter() - start
    (kernel,) = warmed.kernels
    assert kernel.source == "conv_forward.cu"
    assert kernel.tile
    assert kernel.seconds >= kernel.cpu_seconds * 0.5 > 0
    assert warmed.cpu_seconds == kernel.cpu_seconds
    assert warmed.threads == 1
    monkeypatch.setattr(compiler, "compile_cubin", None)
    ahead = warming.Ahead("sm_80", impl="cuda-generic")
    ahead.add(SMALL, "forward")
    (variant,) = ahead._uses
    assert compiler.cached_cubin(variant.source, dict(variant.defines), "sm_80")[:4] == b"\x7fELF"
    assert "float64" in warmed._repr_html_()


def test_compile_error_does_not_stop_other_kernels(folder, compilations, monkeypatch):
    compile_one = compiler.compile_cubin

    def compile_cubin(source, defines, architecture):
        if source.name == "conv_forward.cu":
            raise KernelCompileError("no registers", "log")
        return compile_one(source, defines, architecture)

    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    with pytest.raises(KernelCompileError, match="no registers"):
        cupyconv.warm(SMALL, "sm_75", impl="cuda-generic")
    assert len(compilations) == 3
    assert len(list(folder.glob("*.cubin"))) == 3


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "the device must be a GPU: got 'cpu'. Use one of sm_75, "),
        ({"device": "sm_81"}, "unknown device"),
        ({"passes": "backward"}, "unknown pass: 'backward'"),
        ({"activation": "tanh"}, "unknown activation: 'tanh'"),
        ({"precision": "fp8"}, "unknown precision: 'fp8'"),
        ({"layout": "NHWC"}, "unknown layout: 'NHWC'"),
        ({"impl": "cuda-hopper"}, "the implementation must support the problem"),
        ({"threads": 0}, "threads must be an integer of at least 1: got 0"),
        ({"threads": 1.5}, "threads must be an integer of at least 1: got 1.5"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_unknown_option_values_are_rejected(folder, compilations, options, message):
    with pytest.raises(ConvError) as error:
        cupyconv.warm(SMALL, **{"device": "sm_80", **options})
    assert message in str(error.value)
    assert compilations == []
    assert not folder.exists()


def test_warm_rejects_activations_of_complex_numbers(folder):
    with pytest.raises(ConvError, match="an activation must be applied to real numbers"):
        cupyconv.warm(SMALL.replace(dtype="complex64"), "sm_80", activation="relu")


def test_warm_reports_missing_cupy(monkeypatch):
    monkeypatch.setattr(arrays, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="CuPy could not be imported"):
        cupyconv.warm(SMALL)


def test_warm_without_a_home_folder_asks_for_a_cache(compilations, monkeypatch):
    monkeypatch.setattr(cache_folder, "cache_directory", lambda: None)
    message = (
        f"this user has no home folder for the cache. Set {cache_folder.CACHE_VARIABLE} to a folder"
    )
    with pytest.raises(ConvError, match=re.escape(message)):
        cupyconv.warm(SMALL, "sm_80")
    assert compilations == []


def test_warm_without_a_gpu_asks_for_a_device(monkeypatch):
    monkeypatch.setattr(arrays, "device_count", lambda: 0)
    with pytest.raises(
        DeviceError, match=r"there is no GPU\. Pass a device, for example device='sm_90a'"
    ):
        cupyconv.warm(SMALL)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners of this kind")
def test_warm_rejects_a_cache_writable_by_others(folder, compilations):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConvError, match=r"must be usable: .* To fix this: chmod go-w"):
        cupyconv.warm(SMALL, "sm_80")
    assert compilations == []


def test_warm_rejects_a_cache_that_is_a_file(folder, compilations):
    folder.write_text("in the way")
    with pytest.raises(
        ConvError, match=f"{folder} is not a folder. Set {cache_folder.CACHE_VARIABLE}"
    ):
        cupyconv.warm(SMALL, "sm_80")
    assert compilations == []


def test_warm_reports_kernels_that_could_not_be_written(folder, compilations, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_folder, "keep", full)
    with pytest.raises(ConvError, match=f"4 of 4 kernels could not be written to {folder}"):
        cupyconv.warm(SMALL, "sm_80")


# -- the command -----------------------------------------------------------------------------------

COMMAND = ("warm", "--input", "1x2x5x5", "--filter", "3x2x3x3", "--dtype", "float64")


def test_warm_command_compiles_once(folder, compilations):
    first = run(*COMMAND, "--device", "sm_80")
    assert first.exit_code == 0, first.output
    lines = first.stdout.splitlines()
    assert lines[0].split() == ["kernel", "dtype", "tile", "passes", "layers", "seconds"]
    assert sum("float64" in line for line in lines) == len(compilations) == 4
    assert "4 kernels for sm_80: 4 compiled in " in first.stdout
    again = run(*COMMAND, "--device", "sm_80")
    assert "4 kernels for sm_80: all cached, in" in again.stdout
    assert len(compilations) == 4


def test_warm_command_prints_json(folder, compilations):
    options = ("--device", "sm_80", "--device", "sm_90a", "--pass", "forward", "--threads", "1")
    output = parsed(*COMMAND, *options)
    assert output["left_out"] == []
    assert [device["architecture"] for device in output["devices"]] == ["sm_80", "sm_90a"]
    for device in output["devices"]:
        assert device["folder"] == str(folder)
        assert device["compiled"] == device["threads"] == 1
        (kernel,) = device["kernels"]
        assert kernel["uses"] == [{"layer": None, "pass": "forward"}]
        assert kernel["macros"]["STORAGE"] == "double"
        assert kernel["was_there"] is False
        assert kernel["seconds"] >= 0


def test_warm_command_compiles_the_layers_of_a_model(folder, compilations, tmp_path):
    """A Conv and its ConvTranspose share a problem, but not the forward pass."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], name="down", strides=[2, 2]),
        helper.make_node("ConvTranspose", ["h", "w"], ["y"], name="up", strides=[2, 2]),
        helper.make_node("Conv", ["z", "w"], ["u"], name="open"),
    ]
    values = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, shape in (("x", [2, 64, 16, 16]), ("z", [2, 64, "height", "width"]))
    ]
    results = [helper.make_tensor_value_info(name, kind, None) for name in ("y", "u")]
    w = onnx.numpy_helper.from_array(np.zeros((32, 64, 2, 2), np.float32), "w")
    graph = helper.make_graph(nodes, "net", values, results, [w])
    onnx.save(helper.make_model(graph), tmp_path / "net.onnx")
    command = ("warm", "--model", str(tmp_path / "net.onnx"), "--device", "sm_90a")
    options = ("--dtype", "float16", "--layout", "channels_last", "--pass", "forward")
    output = parsed(*command, *options, "--activation", "relu")
    (device,) = output["devices"]
    uses = [use for kernel in device["kernels"] for use in kernel["uses"]]
    assert {(use["layer"], use["pass"]) for use in uses} == {
        ("down", "forward"),
        ("up", "backprop_input"),
    }
    assert {kernel["macros"]["ACTIVATION"] for kernel in device["kernels"]} == {1}
    assert len(output["left_out"]) == 1
    assert output["left_out"][0].startswith("open: ")
    assert "open: " in run(*command, *options).stdout


def test_warm_rejects_tensors_larger_than_63_bits(folder, compilations):
    large = SMALL.replace(input_shape=(2**40, 2, 2**31, 2**31))
    with pytest.raises(MemoryError, match="an array of 1099511627776x2x2147483648x2147483648 "):
        cupyconv.warm(large, "sm_80")
    elements = SMALL.replace(input_shape=(2**30, 2, 2**16, 2**15), dtype="float16")  # 2**62
    with pytest.raises(MemoryError, match="an array of 1073741824x2x65536x32768 float16 takes"):
        cupyconv.warm(elements, "sm_80")
    sizes = ("--input", "1099511627776x2x2147483648x2147483648", "--filter", "3x2x3x3")
    line = refused("warm", *sizes, "--device", "sm_80")
    assert line.startswith("cupyconv: error: not enough memory: an array of 10995116")


def test_layers_with_an_empty_batch_load_no_kernels(folder, compilations):
    warmed = cupyconv.warm(SMALL.replace(input_shape=(0, 2, 5, 5)), "sm_80", passes="forward")
    assert warmed.kernels == ()
    assert str(warmed).endswith("no kernels for sm_80: these layers load no kernels")
