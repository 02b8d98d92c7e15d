"""Passes on Dask arrays: equal results for any chunks, workers and failures."""

from __future__ import annotations

import io
import itertools
import math
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError, WorkerError, arrays

dask = pytest.importorskip("dask", reason="Dask is not installed")
da = pytest.importorskip("dask.array")
cd = pytest.importorskip("cupyconv.dask", exc_type=ImportError)

from cupyconv.dask import chunks as chunking  # noqa: E402
from cupyconv.dask import halos, tasks  # noqa: E402
from tests import ROOT  # noqa: E402
from tests.configurations import CASES, DTYPES, integer_data, problems  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    with dask.config.set(scheduler="synchronous"):
        yield


def cut(array: np.ndarray, pieces: int, seed: int):
    """Divide an array into random chunks, ``pieces`` per axis, some of them empty."""
    numbers = np.random.default_rng(seed)
    chunks = []
    for size in array.shape:
        bounds = sorted(numbers.integers(0, size + 1, pieces - 1).tolist())
        chunks.append(tuple(np.diff([0, *bounds, size]).tolist()))
    return da.from_array(array, chunks=tuple(chunks))


def assert_passes_agree(problem: ConvProblem, seed: int = 0) -> None:
    """Require that every pass gives the same results on random chunks as on whole arrays."""
    data, rules = integer_data(problem, seed), problem.keywords
    rules = {key: value for key, value in rules.items() if key != "dtype"}
    x, w, dy = (cut(a, 3, seed + i) for i, a in enumerate((data.x, data.w, data.dy)))
    pairs = (
        (
            cd.conv_forward(x, w, data.bias, **rules),
            cupyconv.conv_forward(data.x, data.w, data.bias, **rules),
        ),
        (
            cd.conv_backprop_input(problem.input_shape, w, dy, **rules),
            cupyconv.conv_backprop_input(problem.input_shape, data.w, data.dy, **rules),
        ),
        (
            cd.conv_backprop_filter(x, problem.filter_shape, dy, **rules),
            cupyconv.conv_backprop_filter(data.x, problem.filter_shape, data.dy, **rules),
        ),
        (
            cd.conv_backprop_bias(dy, data_format=problem.data_format),
            cupyconv.conv_backprop_bias(data.dy, data_format=problem.data_format),
        ),
    )
    for lazy, expected in pairs:
        assert lazy.shape == expected.shape
        got = lazy.compute()
        assert got.shape == expected.shape
        assert got.dtype == lazy.dtype == expected.dtype
        np.testing.assert_array_equal(got.astype("float64"), expected.astype("float64"))


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.problem.flops < 2e5], ids=lambda case: case.name
)
def test_passes_agree_for_any_chunks(case):
    assert_passes_agree(case.problem)


@pytest.mark.thorough
@settings(max_examples=25)
@given(problem=problems(dtypes=DTYPES), seed=st.integers(0, 99))
def test_passes_agree_for_random_layers_and_chunks(problem, seed):
    assert_passes_agree(problem, seed)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_sums_over_chunks_are_rounded_once(dtype):
    kind = arrays.numpy_dtype(dtype)
    numbers = np.random.default_rng(0)
    x, w = (numbers.standard_normal(s).astype(kind) for s in ((2, 12, 9), (5, 12, 3)))
    dy = numbers.standard_normal((2, 5, 7)).astype(kind)
    lazy = da.from_array(x, chunks=(1, 4, 3))
    y = cd.conv_forward(lazy, w).compute()
    dw = cd.conv_backprop_filter(lazy, w.shape, da.from_array(dy, chunks=(1, 2, 3))).compute()
    exact = [a.astype("float64") for a in (x, w, dy)]
    for got, expected in (
        (y, cupyconv.conv_forward(exact[0], exact[1])),
        (dw, cupyconv.conv_backprop_filter(exact[0], w.shape, exact[2])),
    ):
        rounded = expected.astype("float32").astype(kind)
        # The last bit may differ where float32 rounds a value near a tie.
        assert (got == rounded).mean() > 0.98


def test_plain_arrays_become_one_chunk():
    x, w = np.ones((2, 3, 8), "float32"), np.ones((4, 3, 3), "float32")
    y = cd.conv_forward(x, w)
    assert isinstance(y, da.Array)
    np.testing.assert_array_equal(y, cupyconv.conv_forward(x, w))


# -- the graph -------------------------------------------------------------------------------------


def axis_of(size=40, taps=5, stride=3, dilation=2, before=4, after=1):
    problem = ConvProblem(
        (1, 1, size), (1, 1, taps), stride=stride, dilation=dilation, padding=[(before, after)]
    )
    return problem.axes[0]


AXES = [
    axis_of(),
    axis_of(stride=1, dilation=1),
    axis_of(taps=2, stride=5),
    axis_of(taps=1, stride=4, before=0, after=0),
    axis_of(size=17, taps=4, stride=2, dilation=5, before=9, after=12),
]


@pytest.mark.parametrize("axis", AXES, ids=str)
def test_halos_are_exact(axis):
    reads = {
        output: {axis.inputs_of_tap(t)[output - axis.outputs_of_tap(t).start]
                 for t in range(axis.filter) if output in axis.outputs_of_tap(t)}
        for output in range(axis.output)
    }  # fmt: skip
    for start in range(axis.output):
        for stop in range(start + 1, axis.output + 1):
            (low, high), _ = halos.window_of(axis, start, stop)
            pixels = set().union(*(reads[o] for o in range(start, stop)))
            if pixels:
                assert (low, high) == (min(pixels), max(pixels) + 1) or starts_or_ends_in_padding(
                    axis, low, high, pixels
                )
    for start in range(axis.input):
        for stop in range(start + 1, axis.input + 1):
            (low, high), _, _ = halos.receptive_field(axis, start, stop)
            readers = [o for o in range(axis.output) if reads[o] & set(range(start, stop))]
            expected = (readers[0], readers[-1] + 1) if readers else (0, 0)
            assert (low, high) == expected


def starts_or_ends_in_padding(axis, low, high, pixels) -> bool:
    """Return whether the range is larger only because a dilated window begins in the padding."""
    return (low == 0 or low == min(pixels)) and (high == axis.input or high == max(pixels) + 1)


def joined_elements(array) -> int:
    """Count the operand elements that the tasks of an array join from several chunks."""
    total = 0
    for _, *arguments in array.dask.layers[array.name].values():
        for function, *_ in (argument for argument in arguments if isinstance(argument, tuple)):
            if getattr(function, "func", None) is tasks.join:
                shape, _ = function.args
                total += math.prod(shape)
    return total


def cut_elements(array, operand) -> int:
    """Count the elements that the tasks of an array cut from an operand's chunks."""
    return sum(
        math.prod(inside.stop - inside.start for inside in function.keywords["where"])
        for key, (function, *_) in array.dask.layers[array.name].items()
        if key[0].startswith(f"conv-piece-{operand.name}-")
    )


def test_graph_only_moves_pixels_that_are_read():
    x = da.zeros((1, 1, 60), chunks=(1, 1, 10), dtype="float32")
    y = cd.conv_forward(x, np.ones((1, 1, 3), "float32"), stride=2, padding=1)
    axis = ConvProblem((1, 1, 60), (1, 1, 3), stride=2, padding=1).axes[0]
    bounds = np.cumsum([0, *y.chunks[2]]).tolist()
    needed = [halos.window_of(axis, a, b)[0] for a, b in itertools.pairwise(bounds)]
    chunks = list(itertools.pairwise(range(0, 61, 10)))
    joined = [span for span in needed if span not in chunks]
    assert joined_elements(y) == sum(b - a for a, b in joined)
    # A chunk that is needed completely is not cut.
    within = [a <= c and d <= b for a, b in joined for c, d in chunks]
    assert cut_elements(y, x) == joined_elements(y) - 10 * sum(within) > 0
    # A filter of one pixel needs no halo, so nothing is joined.
    alone = cd.conv_forward(x, np.ones((2, 1, 1), "float32"))
    assert joined_elements(alone) == cut_elements(alone, x) == 0


def test_graph_size_is_linear_in_the_chunks():
    w = np.ones((2, 2, 3, 3), "float32")
    counts = []
    for cuts in (4, 8, 16):
        size = 12 * cuts
        x = da.zeros((1, 2, size, size), chunks=(1, 2, 12, 12), dtype="float32")
        y = cd.conv_forward(x, w, padding=1)
        dx = cd.conv_backprop_input(x.shape, w, y, padding=1)
        dw = cd.conv_backprop_filter(x, w.shape, y, padding=1)
        assert y.numblocks == dx.numblocks == x.numblocks
        counts.append([len(a.dask.layers[a.name]) / cuts**2 for a in (y, dx, dw)])
    assert np.max(counts) < 3**2 + 1  # pieces of 8 neighbours, computing, adding
    assert np.ptp([row[0] for row in counts]) < 4


def test_channel_chunks_of_separate_groups_are_not_joined():
    x = da.zeros((1, 32, 6, 6), chunks=(1, 4, 6, 6), dtype="float32")
    w = np.ones((64, 1, 3, 3), "float32")
    y = cd.conv_forward(x, w, groups=32)
    assert y.chunks[1] == (8,) * 8
    assert joined_elements(y) == cut_elements(y, x) == 0  # each block reads one whole chunk of x


def test_equal_calls_have_equal_names():
    x = da.ones((1, 1, 9), chunks=3)
    w = da.ones((1, 1, 3))
    assert cd.conv_forward(x, w).name == cd.conv_forward(x, w).name
    assert cd.conv_forward(x, w).name != cd.conv_forward(x, w, padding=1).name


# -- chunk sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("data_format", ["NCDHW", "NDHWC"])
def test_suggested_chunks_respect_the_memory_limit(data_format):
    sizes = (3, 4, 200, 220, 240)
    shape = sizes if data_format == "NCDHW" else (3, 200, 220, 240, 4)
    filters = (8, 4, 3, 3, 3) if data_format == "NCDHW" else (3, 3, 3, 4, 8)
    problem = ConvProblem(shape, filters, stride=2, data_format=data_format)
    largest = []
    for limit in (1 << 26, 1 << 28, 1 << 32):
        chunks = cd.suggest_chunks(problem, limit)
        assert tuple(map(sum, chunks)) == shape
        lengths = [max(chunks[axis]) for axis in (0, *problem.data_axes[2:])]
        assert chunking.task_bytes(problem, lengths) <= limit // 4
        assert all(length % 2 == 0 for length in lengths[1:])
        largest.append(np.prod([max(axis) for axis in chunks]))
    assert largest == sorted(largest)


def test_suggested_chunks_are_slabs_unless_too_thin():
    problem = ConvProblem((2, 8, 512, 512), (8, 8, 3, 3), padding=1)

    def suggested(limit):
        return tuple(max(sizes) for sizes in cd.suggest_chunks(problem, limit))

    chunks = [suggested(limit) for limit in (1 << 28, 1 << 26, 1 << 24, 1 << 22)]
    assert chunks == [(1, 8, 512, 512), (1, 8, 128, 512), (1, 8, 32, 512), (1, 8, 32, 128)]


def test_suggest_chunks_error_gives_a_sufficient_limit():
    problem = ConvProblem((1, 512, 9, 9), (512, 512, 3, 3))
    with pytest.raises(ConvError, match=r"Use a limit of at least ([\d,]+) bytes") as caught:
        cd.suggest_chunks(problem, 1 << 20)
    limit = int(str(caught.value).split("at least ")[1].split(" bytes")[0].replace(",", ""))
    cd.suggest_chunks(problem, limit)


# -- bad input -------------------------------------------------------------------------------------


def test_unknown_chunk_sizes_error_gives_the_remedy():
    x = da.ones((4, 2, 9), chunks=2)
    unknown = x[x[:, 0, 0] > 0]
    w = np.ones((3, 2, 3))
    with pytest.raises(ConvError, match=r"axis 0 of x has chunks of unknown size.*compute_chunk"):
        cd.conv_forward(unknown, w)
    unknown.compute_chunk_sizes()
    assert cd.conv_forward(unknown, w).compute().shape == (4, 3, 7)


def wrongly_declared(shape, chunks, number, wrong):
    """Return a Dask array one of whose blocks is not as declared."""

    def block(block_id=None):
        size = tuple(axis[n] for axis, n in zip(declared, block_id, strict=True))
        return wrong if block_id == number else np.ones(size, np.float32)

    declared = da.core.normalize_chunks(chunks, shape)
    return da.map_blocks(block, chunks=declared, dtype=np.float32, meta=np.ones((0,) * len(shape)))


@pytest.mark.parametrize("chunks", [(1, 2, 4), (2, 2, 8)], ids=["halos", "whole"])
@pytest.mark.parametrize("size", [(1, 2, 5), (2, 2, 9), (1, 2, 3), (2, 8)])
def test_block_with_an_undeclared_shape_is_named(chunks, size):
    number = (0, 0, 1) if chunks[2] == 4 else (0, 0, 0)
    wrong = np.ones(size, np.float32)
    x = wrongly_declared((2, 2, 8), chunks, number, wrong)
    dy = wrongly_declared((2, 3, 8), (chunks[0], 3, chunks[2]), number, wrong)
    w = np.ones((3, 2, 3), np.float32)
    fine = da.ones((2, 2, 8), chunks=chunks, dtype=np.float32)
    whole = da.ones((2, 3, 8), chunks=(2, 3, 8), dtype=np.float32)
    real = "x".join(map(str, size))
    for name, lazy in (
        ("x", cd.conv_forward(x, w, padding=1)),
        ("x", cd.conv_backprop_filter(x, w.shape, whole, padding=1)),
        ("dy", cd.conv_backprop_input(fine.shape, w, dy, padding=1)),
        ("dy", cd.conv_backprop_filter(fine, w.shape, dy, padding=1)),
        ("dy", cd.conv_backprop_bias(dy)),
        ("x", cd.conv_transpose(dy, w)),
    ):
        with pytest.raises(ConvError, match="declares") as caught:
            lazy.compute(scheduler="synchronous")
        assert f"block {number} is {real}, the declared shape is" in str(caught.value)
        assert f"a block of {name} " in str(caught.value)


@pytest.mark.parametrize("whole_array", [True, False], ids=["of the array", "of one block"])
def test_masked_blocks_are_rejected(whole_array):
    masked = np.ma.masked_array(np.ones((2, 2, 4), np.float32), mask=True)
    if whole_array:
        x = da.from_array(np.ma.masked_array(np.ones((2, 2, 8), np.float32), mask=True), chunks=2)
    else:
        x = wrongly_declared((2, 2, 8), (2, 2, 4), (0, 0, 1), masked)
    w = np.ones((3, 2, 3), np.float32)
    for call in (
        lambda: cd.conv_forward(x, w, padding=1),
        lambda: cd.conv_backprop_bias(x),
        lambda: cd.conv_backprop_filter(x, w.shape, da.ones((2, 3, 6), dtype=np.float32)),
    ):
        with pytest.raises(ConvTypeError, match=r"is a masked array.*dask\.array\.ma\.filled"):
            call().compute(scheduler="synchronous")
    cd.conv_forward(da.ma.filled(x, 0), w, padding=1).compute(scheduler="synchronous")


# -- Zarr ------------------------------------------------------------------------------------------


def test_to_zarr_writes_the_whole_array(tmp_path):
    pytest.importorskip("zarr")
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((1, 2, 23, 17)).astype("float32")
    w = numbers.standard_normal((3, 2, 3, 3)).astype("float32")
    source = cd.to_zarr(da.from_array(x, chunks=(1, 2, 8, 8)), tmp_path / "x.zarr")
    y = cd.conv_forward(da.from_zarr(source), w, stride=2, padding="same")
    written = cd.to_zarr(y, tmp_path / "y.zarr")
    expected = cupyconv.conv_forward(x, w, stride=2, padding="same")
    np.testing.assert_allclose(da.from_zarr(written), expected, rtol=1e-5, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.zarr", "y.zarr"]
    with pytest.raises(ConvError, match=r"y\.zarr exists"):
        cd.to_zarr(y, written)
    with pytest.raises(ConvError, match="there is no"):
        cd.to_zarr(y, tmp_path / "none" / "y.zarr")
    with pytest.raises(ConvTypeError, match="no bfloat16"):
        cd.to_zarr(y.astype(arrays.numpy_dtype("bfloat16")), tmp_path / "b.zarr")


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are Unix's")
def test_to_zarr_leaves_no_partial_result_on_a_full_disk(tmp_path):
    pytest.importorskip("zarr")
    script = (
        "import resource, sys, dask, numpy, dask.array as da, cupyconv.dask as cd\n"
        "dask.config.set(scheduler='synchronous')\n"
        "x = da.from_array(numpy.random.default_rng(0).random((4, 1, 100)), chunks=(1, 1, 100))\n"
        "big = da.from_array(numpy.random.default_rng(0).random((1, 1, 9999)), chunks=-1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"  # simulates a full disk
        "cd.to_zarr(x, sys.argv[1] + '/small.zarr')\n"
        "try: cd.to_zarr(big, sys.argv[1] + '/big.zarr')\n"
        "except OSError as error: print('refused:', error)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert "refused:" in process.stdout, process.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["small.zarr"]


# -- the command line ------------------------------------------------------------------------------


def run(*args: str):
    from click.testing import CliRunner

    from cupyconv.cli.main import main

    return CliRunner().invoke(main, ["grads", "--dask", *args], env={"COLUMNS": None})


def test_grads_dask_accepts_results_that_underflow(tmp_path):
    numbers = np.random.default_rng(0)
    files = []
    for name, shape, scale in (("x", (2, 2, 8, 8), 1), ("w", (2, 2, 3, 3), 1e-25),
                               ("dy", (2, 2, 6, 6), 1e-20)):  # fmt: skip
        np.save(tmp_path / name, (scale * numbers.standard_normal(shape)).astype(np.float32))
        files.append(f"--{name}={tmp_path / name}.npy")
    assert "1 check, 0 failed" in run(*files).stdout


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_grads_dask_computes_files_in_chunks(tmp_path, monkeypatch, dtype):
    pytest.importorskip("zarr")
    import json

    from cupyconv.cli import data

    monkeypatch.setattr(data, "available_memory", lambda: 400_000)  # forces many chunks
    numbers = np.random.default_rng(0)
    x, w, dy = (
        (numbers.standard_normal(shape) + 1j * numbers.standard_normal(shape)).astype(dtype)
        if dtype == "complex64"
        else numbers.standard_normal(shape).astype(dtype)
        for shape in ((2, 3, 60, 50), (4, 3, 3, 3), (2, 4, 30, 25))
    )
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "w.npy", w)
    cd.to_zarr(da.from_array(dy, chunks=(1, 4, 7, 25)), tmp_path / "dy.zarr")
    files = [f"--{name}={tmp_path / file}" for name, file in
             (("x", "x.npy"), ("w", "w.npy"), ("dy", "dy.zarr"))]  # fmt: skip
    window = ["--stride", "2", "--padding", "same"]
    result = run(*files, *window, "--save", str(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    (report,) = json.loads(result.stdout)["layers"]
    assert report["agreements"][0]["compared_with"] == "adjoint identity"
    assert report["passed"] is True
    gradients = cupyconv.conv_backward(x, w, dy, stride=2, padding="same")
    product = np.vdot(gradients.dw, w).real
    assert all(v == pytest.approx(product, rel=1e-4) for v in report["inner_products"].values())
    for name, expected in gradients._asdict().items():
        got = da.from_zarr(str(tmp_path / "out" / f"{name[0:2]}.zarr")).compute()
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
        assert report["norms"][name] == pytest.approx(np.linalg.norm(expected.ravel()), rel=1e-5)
    text = run(*files, *window)
    assert "1 check, 0 failed" in text.stdout
    assert "adjoint identity" in text.stdout
    again = run(*files, *window, "--save", str(tmp_path / "out"))
    assert again.exit_code == 2
    assert "out exists" in again.stderr


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_only_shown_on_a_terminal(monkeypatch, is_terminal):
    from cupyconv.cli import chunked

    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", shown)
    with chunked._progress():
        da.ones((4,), chunks=1).sum().compute()
    assert ("100% Completed" in shown.getvalue()) == is_terminal
    assert bool(shown.getvalue()) == is_terminal


@pytest.mark.parametrize(
    ("dtype", "factor"), [("float32", 1.001), ("complex64", 1.001), ("complex64", 1j)]
)
def test_grads_dask_fails_for_a_wrong_result(monkeypatch, dtype, factor):
    layer = ("--input", "1x2x9x9", "--filter", "3x2x3x3", "--dtype", dtype)
    for values in ("normal", "integers"):
        assert run(*layer, "--values", values).exit_code == 0
    original = cd.conv_backprop_input
    monkeypatch.setattr(cd, "conv_backprop_input", lambda *a, **k: original(*a, **k) * factor)
    result = run(*layer)
    assert result.exit_code == 1
    assert "FAIL" in result.stdout


def test_grads_dask_rejects_dropping_the_imaginary_part(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((1, 2, 9, 9), "complex64"))
    options = ("--x", str(tmp_path / "x.npy"), "--filter", "3x2x3x3", "--dtype", "float32")
    result = run(*options)
    assert result.exit_code == 2
    assert "x is complex64, and float32 has no imaginary part" in result.stderr


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00"])
def test_grads_dask_reports_damaged_files_in_one_line(tmp_path, content):
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    for place in (path, tmp_path):
        result = run("--x", str(place), "--filter", "3x2x3x3")
        assert result.exit_code == 2
        assert "must be a .npy file or a Zarr folder" in result.stderr
        assert result.stderr.count("\n") == 1


# -- workers ---------------------------------------------------------------------------------------


@cache
def layer():
    """Return lazy passes of a layer with many chunks, and their synchronous results."""
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((2, 6, 40, 44)).astype("float32")
    w = numbers.standard_normal((8, 6, 3, 3)).astype("float32")
    dy = numbers.standard_normal((2, 8, 20, 22)).astype("float32")
    lazy = [da.from_array(x, chunks=(1, 3, 12, 12)), w, da.from_array(dy, chunks=(1, 4, 6, 6))]
    window = {"stride": 2, "padding": 1}
    passes = [
        cd.conv_forward(*lazy[:2], **window),
        cd.conv_backprop_input(x.shape, w, lazy[2], **window),
        cd.conv_backprop_filter(lazy[0], w.shape, lazy[2], **window),
    ]
    with dask.config.set(scheduler="synchronous"):
        return passes, [p.compute() for p in passes]


def test_threaded_results_are_bitwise_equal():
    passes, expected = layer()
    for workers in (1, 3):
        with dask.config.set(scheduler="threads", num_workers=workers):
            for lazy, want in zip(passes, expected, strict=True):
                assert lazy.compute().tobytes() == want.tobytes()


def die_once(block, marker):
    """Kill the first worker that computes this, as the system does when memory is short."""
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return block
    os._exit(1)


def die(block, marker):
    """Kill every worker that computes this, and count them."""
    with open(marker, "a") as file:
        file.write(".")
    os._exit(1)


def peak_bytes():
    """Return this process's peak resident bytes; getrusage would include its parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@cache
def worker_limit():
    """Return a worker's memory limit at which Dask pauses it 60 MB above its idle memory.

    Numba and LLVM are part of the idle memory.
    """
    program = "import distributed, zarr; from tests.interfaces import test_dask as t;"
    program += "t.layer(); print(t.peak_bytes())"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return int((int(ended.stdout) + 60_000_000) / 0.8)


@pytest.fixture
def cluster():
    """Start two worker processes with a memory limit."""
    distributed = pytest.importorskip("distributed")
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 1}),
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            memory_limit=worker_limit(),
            dashboard_address=None,
            silence_logs=50,
        ) as workers,
        distributed.Client(workers) as client,
        dask.config.set(scheduler="distributed"),
    ):
        yield client


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # from distributed, about processes and sockets
def test_results_are_bitwise_equal_after_a_worker_dies(cluster, tmp_path):
    passes, expected = layer()
    for lazy, want in zip(passes, expected, strict=True):
        assert lazy.compute().tobytes() == want.tobytes()
    x = da.from_array(np.ones((1, 1, 64), "float32"), chunks=(1, 1, 8))
    mortal = x.map_blocks(die_once, str(tmp_path / "died"), dtype=x.dtype, meta=x._meta)
    w = np.ones((1, 1, 3), "float32")
    got = cd.conv_forward(mortal, w).compute()
    assert (tmp_path / "died").exists()
    np.testing.assert_array_equal(got, np.full((1, 1, 62), 3, "float32"))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_task_that_kills_its_workers_raises_worker_error(cluster, tmp_path):
    marker = tmp_path / "deaths"
    x = da.from_array(np.ones((1, 1, 8), "float32"), chunks=-1)
    deadly = x.map_blocks(die, str(marker), dtype=x.dtype, meta=x._meta)
    y = cd.conv_forward(deadly, np.ones((1, 1, 3), "float32"))
    with pytest.raises(WorkerError, match=r"died \(2 in total\): the task is .* smaller chunks"):
        cd.compute(y)
    assert marker.read_text() == ".."  # one more than the allowed failures
    with pytest.raises(WorkerError, match="raise memory_limit"):
        cd.to_zarr(y, tmp_path / "y.zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["deaths"]
    # Use other values: the scheduler may still remember failed tasks with the same name.
    cluster.wait_for_workers(2)
    other = da.from_array(np.full((1, 1, 8), 2, "float32"), chunks=-1)
    (alive,) = cd.compute(cd.conv_forward(other, np.ones((1, 1, 3), "float32")))
    np.testing.assert_array_equal(alive, np.full((1, 1, 6), 6, "float32"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_volume_larger_than_the_workers_memory(cluster, tmp_path):
    zarr = pytest.importorskip("zarr")
    size, thick = (768, 768), 210
    depth = thick * math.ceil(3.05 * 2 * worker_limit() / (4 * thick * math.prod(size)))
    numbers = np.random.default_rng(0)
    source = zarr.create_array(
        str(tmp_path / "x.zarr"), shape=(1, 1, depth, *size), chunks=(1, 1, 35, 192, 192),
        dtype="float32",
    )  # fmt: skip
    for start in range(0, depth, 70):
        block = numbers.integers(-3, 4, (1, 1, 70, *size), dtype=np.int8)
        source[:, :, start : start + 70] = block.astype("float32")
    x = da.from_zarr(str(tmp_path / "x.zarr"))
    assert x.nbytes > 3 * 2 * worker_limit()
    w = numbers.integers(-3, 4, (1, 1, 3, 2, 2)).astype("float32")
    problem = ConvProblem(x.shape, w.shape, padding="same")
    y = cd.conv_forward(x, w, padding="same")
    start_time = time.perf_counter()
    written = cd.to_zarr(y, tmp_path / "y.zarr")
    print(f"\n{x.nbytes / 1e9:.2f} GB computed in {time.perf_counter() - start_time:.0f} s")
    result = zarr.open_array(str(written), mode="r")
    assert result.shape == problem.output_shape
    (before, _), *sides = problem.padding
    for start in range(0, depth, 105):  # slabs that differ from the chunks
        low, high = max(start - before, 0), min(start + 105 + 2 - before, depth)
        ends = before - (start - low), start + 105 + 2 - before - high
        slab = np.asarray(source[:, :, low:high])
        expected = cupyconv.conv_forward(slab, w, padding=[ends, *sides])
        np.testing.assert_array_equal(result[:, :, start : start + 105], expected)
    part = slice(None), slice(None), slice(0, 140)
    dy = da.from_zarr(str(written))[part]
    dw = cd.conv_backprop_filter(x[part], w.shape, dy, padding="same").compute()
    exact = [np.asarray(zarr_array[part], "float64") for zarr_array in (source, result)]
    expected = cupyconv.conv_backprop_filter(exact[0], w.shape, exact[1], padding="same")
    np.testing.assert_allclose(dw, expected, rtol=1e-4)

    assert max(cluster.run(peak_bytes).values()) < worker_limit() * 1.05
