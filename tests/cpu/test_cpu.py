"""Methods of the NumPy path: exactness, bounds of error and memory, and the choice."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import cupyconv
from cupyconv import ConvProblem, Plan, cache_folder, calls
from cupyconv.cache_folder import CACHE_VARIABLE
from cupyconv.cpu import (
    blocked,
    caching,
    choice,
    correlation,
    loops,
    scattered,
    threads,
    tile_plans,
)
from cupyconv.cpu.scratch import Scratch
from cupyconv.errors import ConvError
from cupyconv.problem import PASSES
from tests import agreement
from tests.configurations import (
    CASES,
    DTYPES,
    Data,
    in_formats,
    integer_data,
    random_data,
    random_problems,
)
from tests.views import KINDS, assignments, named, require_exact

METHODS = {"products", "windows", "scattered", "loops", "tiles", "patches"}
MEMORY = 64_000_000

# Layers that have many blocks: one for most methods, one for depthwise layers, one in 3-D.
DENSE = ConvProblem((3, 40, 25, 26), (33, 40, 3, 3), padding=1)
DEPTHWISE = ConvProblem((3, 40, 25, 26), (40, 1, 3, 3), padding=1, groups=40)
DEEP = ConvProblem((2, 12, 6, 9, 10), (7, 12, 3, 3, 3), padding=(2, 1, 0))


def by_method(problem: ConvProblem, pass_: str, method: str) -> Plan:
    """Return the plan of a problem, with the given method for one pass."""
    planned = cupyconv.plan(problem)
    return replace(
        planned,
        passes=tuple(
            replace(step, method=method) if step.pass_ == pass_ else step for step in planned.passes
        ),
    )


def methods(problem: ConvProblem) -> list[tuple[str, str]]:
    """Return all (pass, method) pairs that can compute a problem."""
    return [(pass_, method.name) for pass_ in PASSES for method in choice.methods(problem, pass_)]


def compute(
    problem: ConvProblem, pass_: str, method: str, data: Data, **options: object
) -> np.ndarray:
    impl = by_method(problem, pass_, method)
    return agreement.compute(cupyconv, pass_, problem, data, impl=impl, **options)


# -- exact on integers -----------------------------------------------------------------------------


@pytest.fixture
def divided(monkeypatch):
    """Divide small layers into parts and partial sums too."""
    monkeypatch.setattr(choice, "CALL", 0)
    monkeypatch.setattr(correlation, "PART_PRODUCTS", 1)
    for name in ("PART_PRODUCTS", "LEAST_PACKED", "TILE_ROWS"):
        monkeypatch.setattr(tile_plans, name, 1)
    tile_plans.plan_of.cache_clear()
    yield
    tile_plans.plan_of.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_method_is_exact(case, divided):
    layers = (case.problem, *channels_last(case.problem), case.problem.replace(dtype="complex64"))
    for problem in layers:
        data = integer_data(problem)
        for pass_, method in methods(problem):
            expected = agreement.compute(cupyconv, pass_, problem, data, impl="reference")
            got = compute(problem, pass_, method, data)
            np.testing.assert_array_equal(got, expected, err_msg=f"{pass_} by {method}")


def channels_last(problem: ConvProblem) -> list[ConvProblem]:
    formats = {1: ("NWC", "WIO"), 2: ("NHWC", "HWIO"), 3: ("NDHWC", "DHWIO")}
    names = formats[problem.spatial_rank]
    return [] if problem.data_format == names[0] else [in_formats(problem, *names)]


@pytest.mark.costly
@pytest.mark.parametrize("block_bytes", [3000, 30_000, 1])
@pytest.mark.parametrize("problem", [DENSE, DEPTHWISE, DEEP], ids=["dense", "depthwise", "deep"])
def test_every_method_is_exact_for_any_block_size(problem, block_bytes, divided, monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_BYTES", block_bytes)
    # With blocks of one byte every step is a block, which is slow.
    sizes = (5, 4) if block_bytes == 1 else (11, 10)
    small = problem.replace(input_shape=(2, *problem.input_shape[1:-2], *sizes))
    data = integer_data(small)
    for pass_, method in methods(small):
        expected = agreement.compute(cupyconv, pass_, small, data, impl="reference")
        got = compute(small, pass_, method, data)
        np.testing.assert_array_equal(got, expected, err_msg=f"{pass_} by {method}")


NO_TERMS = {
    "a stride beyond the filter": ConvProblem((2, 64, 32, 8), (64, 64, 1, 1), stride=(2, 1)),
    "taps that step over the input": ConvProblem((1, 4, 1), (1024, 4, 2), padding=6, dilation=10),
    "windows in the padding": ConvProblem((1, 2, 3, 12), (80, 2, 1, 1), padding=((9, 9), (0, 0))),
    "an empty batch": ConvProblem((0, 4, 9, 9), (64, 4, 12, 13), padding=2),
    "depthwise": ConvProblem((1, 300, 9, 9), (300, 1, 1, 1), stride=4, padding=8, groups=300),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", NO_TERMS)
def test_results_without_terms_equal_the_bias(name, dtype):
    for problem in (NO_TERMS[name], *channels_last(NO_TERMS[name])):
        problem = problem.replace(dtype=dtype)
        data = integer_data(problem)
        for pass_, method in methods(problem):
            options = {"activation": "relu"} if pass_ == "forward" else {}
            expected = agreement.compute(
                cupyconv, pass_, problem, data, impl="reference", **options
            )
            got = compute(problem, pass_, method, data, **options)
            np.testing.assert_array_equal(got, expected, err_msg=f"{pass_} by {method}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_method_is_exact_on_views(kind):
    for problem in (DENSE.replace(dtype="float16"), DEPTHWISE, DEEP):
        small = problem.replace(input_shape=(2, *problem.input_shape[1:-2], 7, 6))
        formats = (small, *channels_last(small))
        references = [(pass_, "reference") for pass_ in PASSES]
        for number, (pass_, method) in enumerate([*methods(small), *references]):
            formatted = formats[(number + KINDS.index(kind)) % 2]
            is_reference = method == "reference"
            impl = method if is_reference else by_method(formatted, pass_, method)
            require_exact(cupyconv, formatted, pass_, named(formatted, pass_, kind.name), impl=impl)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("problem", [DENSE, DEPTHWISE, DEEP], ids=["dense", "depthwise", "deep"])
def test_every_method_is_exact_on_all_combinations_of_views(problem, dtype):
    small = problem.replace(input_shape=(2, *problem.input_shape[1:-2], 11, 10), dtype=dtype)
    for formatted in (small, *channels_last(small)):
        for pass_, method in methods(formatted):
            impl = by_method(formatted, pass_, method)
            for kinds in assignments(formatted, pass_):
                require_exact(cupyconv, formatted, pass_, kinds, impl=impl)


def test_cases_cover_every_method():
    names = {method for case in CASES for _, method in methods(case.problem)}
    assert names == METHODS


SINGLE = {
    "signal": ConvProblem((2, 12, 40), (12, 1, 5), padding=2, dilation=2, groups=12),
    "strided": DEPTHWISE.replace(stride=(2, 3), dilation=(1, 2), padding=((0, 2), (3, 1))),
    "volume": ConvProblem((1, 9, 5, 6, 7), (9, 1, 3, 2, 3), padding=1, stride=2, groups=9),
    "float16": DEPTHWISE.replace(dtype="float16"),
    "single channels": ConvProblem((2, 3, 9, 9), (3, 1, 3, 3), groups=3, padding=1),
}
GROUPED = {
    "four": ConvProblem((3, 24, 11, 12), (24, 4, 3, 3), padding=1, groups=6),
    "odd": ConvProblem((2, 15, 17, 12), (10, 3, 2, 5), stride=2, padding=2, dilation=3, groups=5),
    "float16": ConvProblem((2, 16, 9, 9), (16, 8, 3, 3), stride=2, groups=2, dtype="float16"),
}


@pytest.fixture(params=[True, False], ids=["compiled", "uncompiled"])
def numba(request, monkeypatch) -> bool:
    """Run loops compiled or uncompiled, and return whether they are compiled."""
    if request.param:
        pytest.importorskip("numba")
    for module in (choice, loops):
        monkeypatch.setattr(module, "has_numba", lambda: request.param)
    return request.param


@pytest.mark.parametrize("name", SINGLE)
def test_depthwise_loops_are_exact_with_and_without_numba(name, numba):
    for problem in (SINGLE[name], *channels_last(SINGLE[name])):
        require_exact_loops(problem)


def require_exact_loops(problem: ConvProblem) -> None:
    data = integer_data(problem)
    for pass_ in PASSES:
        assert (pass_, "loops") in methods(problem)
        expected = agreement.compute(cupyconv, pass_, problem, data, impl="reference")
        got = compute(problem, pass_, "loops", data)
        np.testing.assert_array_equal(got, expected, err_msg=pass_)


@pytest.mark.parametrize("pass_", PASSES)
def test_einsum_merges_short_rows_of_channels(pass_, monkeypatch):
    """NumPy starts an inner loop per row, which is slow for short rows."""
    for module in (choice, loops):
        monkeypatch.setattr(module, "has_numba", lambda: False)
    original, rows = np.einsum, set()

    def einsum(subscripts, windows, *operands, **keywords):
        rows.add(windows.shape[-1])
        return original(subscripts, windows, *operands, **keywords)

    monkeypatch.setattr(np, "einsum", einsum)
    narrow = ConvProblem((2, 3, 9, 50), (3, 1, 3, 3), padding=1, groups=3)
    for problem in (narrow, *channels_last(narrow)):
        compute(problem, pass_, "loops", random_data(problem))
    assert rows == {3 * 50}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_loops_need_numba(name, numba):
    for problem in (GROUPED[name], *channels_last(GROUPED[name])):
        if numba:
            require_exact_loops(problem)
        else:
            assert "loops" not in {method for _, method in methods(problem)}


TILES = {
    "filters of several widths": ConvProblem((2, 5, 20, 21), (57, 5, 3, 3), padding=1, stride=2),
    "more pixels than padding": ConvProblem((3, 3, 40, 41), (8, 3, 3, 3), padding=1),
    "few channels, wide filter": ConvProblem((2, 2, 12, 13), (20, 2, 3, 5), padding=2),
    "groups": ConvProblem((1, 24, 5, 30), (66, 8, 3, 1), groups=3, dilation=(2, 1)),
    "far channels": ConvProblem((2, 70, 45, 44), (18, 35, 3, 3), groups=2, stride=(1, 2)),
    "far channels of a signal": ConvProblem((1, 300, 1000), (5, 300, 2), padding=1),
    "depthwise": ConvProblem((2, 57, 21, 20), (57, 1, 3, 3), groups=57, padding=1),
    "depthwise, strided": DEPTHWISE.replace(stride=(2, 3), padding=((0, 2), (3, 1))),
    "volume": ConvProblem((1, 6, 6, 7, 8), (18, 6, 2, 3, 2), padding=1, stride=2),
}


def require_exact_tiles(problem: ConvProblem) -> None:
    for formatted in (problem, *channels_last(problem)):
        data = integer_data(formatted)
        for pass_ in PASSES:
            expected = agreement.compute(cupyconv, pass_, formatted, data, impl="reference")
            got = compute(formatted, pass_, "tiles", data)
            np.testing.assert_array_equal(got, expected, err_msg=f"{pass_} of {formatted}")


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("name", TILES)
def test_tiles_are_exact(name, dtype):
    pytest.importorskip("numba")
    require_exact_tiles(TILES[name].replace(dtype=dtype))


def test_tiles_are_planned_for_the_layout_of_their_operands():
    """A layer computes with operands of several layouts in turn, twice."""
    pytest.importorskip("numba")
    problem = ConvProblem((2, 20, 9, 10), (24, 20, 3, 3), padding=1, stride=2)
    data = integer_data(problem)
    for _, layout, has_bias, has_addend in itertools.product(
        range(2),
        ("contiguous", "channels last", "reversed", "every second element"),
        *[[False, True]] * 2,
    ):
        changed = replace(
            data,
            **{name: in_layout(getattr(data, name), layout) for name in ("x", "w", "dy")},
            bias=data.bias if has_bias else None,
        )
        add = in_layout(data.dy, layout) if has_addend else None
        got = cupyconv.conv_forward(
            changed.x, changed.w, changed.bias, add=add, padding=1, stride=2,
            impl=by_method(problem, "forward", "tiles"),
        )  # fmt: skip
        expected = cupyconv.conv_forward(
            data.x, data.w, changed.bias, add=add, padding=1, stride=2, impl="reference"
        )
        np.testing.assert_array_equal(got, expected, err_msg=layout)
        for pass_ in PASSES[1:]:
            got = compute(problem, pass_, "tiles", changed)
            expected = agreement.compute(cupyconv, pass_, problem, data, impl="reference")
            np.testing.assert_array_equal(got, expected, err_msg=f"{pass_}, {layout}")


def in_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """Return a view with the elements of an array in another memory layout."""
    if layout == "channels last":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
    if layout == "reversed":
        return np.ascontiguousarray(array[::-1])[::-1]
    if layout == "every second element":
        return np.stack([array, np.zeros_like(array)], axis=-1)[..., 0]
    return array


@pytest.mark.thorough
@pytest.mark.parametrize("missing", ["avx512", "avx"])
def test_tiles_of_narrower_vectors_are_exact(missing, monkeypatch, tmp_path):
    binding = pytest.importorskip("llvmlite.binding")
    features = binding.get_host_cpu_features()
    fewer = {name: has and not name.startswith(missing) for name, has in features.items()}
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))  # code is cached by processor
    spec = find_spec("cupyconv.cpu.tiles_numba")
    import_module(spec.name)  # Numba itself reads the features once
    narrow = module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(binding, "get_host_cpu_features", lambda: fewer)
        spec.loader.exec_module(narrow)
    assert narrow.width(4) <= {"avx512": 16, "avx": 8}[missing]
    monkeypatch.setattr(tile_plans, "compiled_loops", lambda: narrow)
    for problem in TILES.values():
        for dtype in ("float32", "float64"):
            require_exact_tiles(problem.replace(dtype=dtype))


def guarded(array: np.ndarray, is_at_end: bool) -> np.ndarray:
    """Copy an array to memory that ends, or begins, next to pages that must not be accessed."""
    page = mmap.PAGESIZE
    size = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for guard in (address, address + page + size):
        assert libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    offset = page + (size - array.nbytes if is_at_end else 0)
    copied = np.frombuffer(memory, array.dtype, array.size, offset).reshape(array.shape)
    copied[...] = array
    return copied


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs mprotect")
def test_tiles_access_no_memory_outside_the_operands():
    """An access outside an operand would end a process with a signal, so that another one runs."""
    pytest.importorskip("numba")
    script = "from tests.cpu import test_cpu; test_cpu.compute_guarded()"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def compute_guarded() -> None:
    layouts = [(one, *channels_last(one)) for one in TILES.values()]
    for problem, is_at_end in itertools.product(itertools.chain(*layouts), (True, False)):
        data = integer_data(problem)
        operands = (guarded(array, is_at_end) for array in (data.x, data.w, data.dy))
        data = replace(data, **dict(zip(("x", "w", "dy"), operands, strict=True)))
        results = dict(zip(PASSES, (data.dy, data.x, data.w), strict=True))
        for pass_ in PASSES:
            out = guarded(np.empty_like(results[pass_]), is_at_end)
            compute(problem, pass_, "tiles", data, out=out)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("Numba needs NumPy 2.3 or less"),
        OSError("Could not find/load shared object file: libllvmlite.so"),
        SystemError("initialization of _internal failed without raising an exception"),
        None,
    ],
    ids=lambda error: type(error).__name__,
)
def test_has_numba_is_false_for_a_broken_numba(error, monkeypatch):
    def fail_import(_name):
        if error is not None:
            raise error
        return SimpleNamespace(config=SimpleNamespace(DISABLE_JIT=1))  # NUMBA_DISABLE_JIT

    monkeypatch.setattr(choice, "import_whole", fail_import)
    choice._numba_works.cache_clear()
    try:
        assert not choice.has_numba()
    finally:
        choice._numba_works.cache_clear()


@pytest.fixture
def first_call(monkeypatch, tmp_path) -> Callable[[], str]:
    """Return a function that calls a loop as a new process does, and returns its code's origin."""
    pytest.importorskip("numba")
    from cupyconv.cpu import loops_numba
    from cupyconv.cpu.compiled import compiled

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder, "_warn", cache(cache_folder._warn.__wrapped__))

    def call() -> str:
        function = compiled(loops_numba._copy.py_func)
        target = np.zeros(3)
        function(target, np.arange(3.0))
        assert target.tolist() == [0, 1, 2]
        return "disk" if function.stats.cache_hits else "compiler"

    return call


def test_compiled_loops_are_cached(first_call, tmp_path):
    assert (first_call(), first_call()) == ("compiler", "disk")
    [file] = (tmp_path / "cache" / "loops").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_cached_loops_of_other_constants_are_not_read(first_call, monkeypatch):
    assert first_call() == "compiler"
    monkeypatch.setattr("cupyconv.cpu.loops_numba.L1_BYTES", 1)  # a constant of another module
    assert (first_call(), first_call()) == ("compiler", "disk")


def test_damaged_cached_loops_are_recompiled(first_call, tmp_path):
    assert first_call() == "compiler"
    [file] = (tmp_path / "cache" / "loops").iterdir()
    whole = file.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    for content in (b"", b"foreign", whole[:-9], bytes(flipped)):
        file.write_bytes(content)
        assert (first_call(), first_call()) == ("compiler", "disk")
    text = b"no pickle"
    file.write_bytes(hashlib.sha256(text).digest() + text)
    assert first_call() == "compiler"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners")
def test_cached_loops_writable_by_others_are_not_read(first_call, tmp_path):
    assert first_call() == "compiler"
    folder = tmp_path / "cache" / "loops"
    [file] = folder.iterdir()
    evil = pickle.dumps(_Planted(str(tmp_path / "executed")))
    file.write_bytes(hashlib.sha256(evil).digest() + evil)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=f"chmod go-w {folder}"):
        assert first_call() == "compiler"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert first_call() == "compiler"
    folder.chmod(0o700)
    file.chmod(0o666)
    assert first_call() == "compiler"
    assert not (tmp_path / "executed").exists()


class _Planted:
    """Object whose pickle creates a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (self.path, "w")


def test_loops_are_compiled_without_a_usable_cache(first_call, tmp_path):
    (tmp_path / "cache").write_text("a file")
    assert (first_call(), first_call()) == ("compiler", "compiler")


def test_loops_are_not_cached_without_a_home_folder(first_call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert (first_call(), first_call()) == ("compiler", "compiler")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("size", [1, 4])
def test_windows_omit_taps_that_only_meet_padding(pass_, size, monkeypatch):
    original, depths = np.matmul, set()

    def matmul(a, b, out=None):
        depths.add(b.shape[-1 if pass_ == "backprop_filter" else -2])
        return original(a, b, out=out)

    monkeypatch.setattr(np, "matmul", matmul)
    small = ConvProblem((2, 3, size, 1), (3, 3, 9, 9), padding=4)
    for problem in (small, *channels_last(small)):
        data = integer_data(problem)
        expected = agreement.compute(cupyconv, pass_, problem, data, impl="reference")
        depths.clear()
        np.testing.assert_array_equal(compute(problem, pass_, "windows", data), expected)
        assert depths == {3 * (2 * size - 1)}


# -- rounding --------------------------------------------------------------------------------------


LONG_SUMS = {
    "channels": ConvProblem((1, 256, 14, 14), (64, 256, 3, 3), padding=1),
    "few filters": ConvProblem((1, 256, 14, 14), (3, 256, 3, 3), padding=1),
    "few pixels": ConvProblem((1, 300, 6, 6), (8, 300, 3, 3)),
    "pixels": ConvProblem((2, 4, 100, 100), (8, 4, 3, 3), padding=1),
    "patches": ConvProblem((2, 64, 32, 32), (300, 64, 8, 8), stride=8),
    "taps": ConvProblem((1, 20, 60, 60), (20, 1, 48, 48), groups=20),
    "two parts": ConvProblem((1, 4, 40, 40), (4, 2, 24, 24), groups=2),
    "three parts": ConvProblem((9, 189, 8, 2, 8), (107, 189, 1, 1, 6)),
    "runs of taps": ConvProblem((1, 32, 6, 8, 8), (16, 32, 3, 3, 3), padding=1),
}
EPSILON = np.finfo(np.float32).eps


def terms(rng: np.random.Generator, shape: tuple[int, ...], decades: int) -> np.ndarray:
    """Draw positive numbers, or numbers of both signs over some decades."""
    if not decades:
        return rng.random(shape, np.float32)
    return (10 ** rng.uniform(-decades / 2, decades / 2, shape)).astype(np.float32) * rng.choice(
        [-1, 1], shape
    ).astype(np.float32)


def torch_errors(problem: ConvProblem, data: Data, error: Callable) -> dict[str, float]:
    """Return the errors of PyTorch's passes; empty if PyTorch is not installed."""
    if find_spec("torch") is None:
        return {}
    torch = import_module("torch")
    x, w, dy = (torch.from_numpy(array).requires_grad_() for array in (data.x, data.w, data.dy))
    padding = [before for before, _ in problem.padding]
    convolve = getattr(torch.nn.functional, f"conv{problem.spatial_rank}d")
    y = convolve(x, w, None, problem.stride, padding, problem.dilation, problem.groups)
    results = y.detach(), *torch.autograd.grad(y, (x, w), dy.detach())
    return {pass_: error(pass_, y.numpy()) for pass_, y in zip(PASSES, results, strict=True)}


@pytest.mark.parametrize("decades", [0, 8])
@pytest.mark.parametrize(("name", "numba"), [*((one, True) for one in LONG_SUMS), ("taps", False)])
def test_errors_of_long_sums_are_near_those_of_pytorch(name, numba, decades, monkeypatch):
    """Errors are in epsilons of the sum of magnitudes; a sum of many terms needs parts."""
    problem, rng = LONG_SUMS[name], np.random.default_rng(1)
    for module in () if numba else (choice, loops):
        monkeypatch.setattr(module, "has_numba", lambda: False)
    shapes = problem.input_shape, problem.filter_shape, problem.output_shape
    data = Data(*(terms(rng, shape, decades) for shape in shapes), None)
    wide = problem.replace(dtype="float64")

    @cache
    def exact(pass_: str, function: Callable = np.asarray) -> np.ndarray:
        arrays = (function(array.astype(np.float64)) for array in (data.x, data.w, data.dy))
        return agreement.compute(cupyconv, pass_, wide, Data(*arrays, None), impl="reference")

    def error(pass_: str, result: np.ndarray) -> float:
        return np.max(np.abs(result - exact(pass_)) / exact(pass_, np.abs)) / EPSILON

    of_torch = torch_errors(problem, data, error)
    for pass_, method in methods(problem):
        got = error(pass_, compute(problem, pass_, method, data))
        # These methods add up tap by tap, as PyTorch does.
        is_by_taps = method == "scattered" and name in ("taps", "two parts")
        model = 24 if is_by_taps or not numba else 10
        least = 4 if decades else 8 if name == "three parts" else 5
        bound = min(model, max(2 * of_torch.get(pass_, model), least))
        assert got <= bound, f"{pass_} by {method}"


def all_passes(problem: ConvProblem) -> np.ndarray:
    """Return the results of every pass and method, concatenated."""
    data = random_data(problem)
    return np.concatenate([compute(problem, *key, data).ravel() for key in methods(problem)])


# -- memory ----------------------------------------------------------------------------------------

LARGE = {
    "many pixels": ConvProblem((1, 16, 500, 500), (16, 16, 3, 3), padding=1),
    "long rows": ConvProblem((1, 64, 4, 30_000), (16, 64, 3, 3), padding=1),
    "many channels": ConvProblem((1, 1500, 9, 9), (700, 1500, 3, 3), padding=1),
    "large filters": ConvProblem((1, 4, 130, 130), (3, 4, 61, 61)),
    "depthwise": ConvProblem((2, 100, 150, 150), (100, 1, 5, 5), padding=2, groups=100),
    "volume": ConvProblem((1, 16, 40, 40, 40), (16, 16, 3, 3, 3), padding=1),
    "float64": ConvProblem((1, 64, 120, 120), (64, 64, 3, 3), padding=1, dtype="float64"),
    "float16": ConvProblem((1, 32, 200, 200), (64, 32, 3, 3), padding=1, dtype="float16"),
    "tall filters": ConvProblem(
        (1, 480, 40, 1091), (1, 480, 31, 1), padding=(15, 0), dtype="float16"
    ),
    "long complex rows": ConvProblem((1, 16, 16, 65_000), (1, 16, 3, 3), dtype="complex128"),
    "one window": ConvProblem((1, 1, 128, 128), (1, 1, 128, 128), stride=128),
}


def zeros(problem: ConvProblem, step: int = 1) -> Data:
    """Return zeros whose last axis has this step; with a step of 2 BLAS needs copies."""
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape, problem.bias_shape)
    return Data(
        *(np.zeros((*shape[:-1], step * shape[-1]), problem.dtype)[..., ::step] for shape in shapes)
    )


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", LARGE)
def test_memory_is_bounded_for_every_layer(name, step, monkeypatch):
    problem = LARGE[name]
    data = zeros(problem, step)
    results = dict(zip(PASSES, (data.dy, data.x, data.w), strict=True))
    planned = cupyconv.plan(problem)
    monkeypatch.setattr(threads, "blas_threads", lambda: threads.MOST_THREADS)
    for pass_ in PASSES:
        given = problem, pass_, data, np.empty_like(results[pass_])
        in_a_new_thread(peaks_of_two, *given)  # loops are compiled, and modules are imported
        assert in_a_new_thread(peaks_of_two, *given)[0] <= MEMORY, planned[pass_].reason


def single_row(channels: int, filters: int, dtype: str) -> ConvProblem:
    shapes = (64, channels, 70), (filters, channels, 3)
    return ConvProblem(*shapes, stride=3, padding=1, dtype=dtype)


@pytest.mark.parametrize(("pass_", "problems"), [
    ("backprop_filter", [ConvProblem((16, 1, 66_304), (1026, 1, 1024), stride=256)]),
    ("forward", [single_row(682, 512, "complex128")]),
    ("forward", [ConvProblem((1, 1, 1_000_059), (1, 1, 1_000_000), dtype="complex128")]),
    ("forward", [single_row(170, 8192, "float32"), single_row(2730, 64, "float16")]),
], ids=["many taps", "long windows", "a million taps", "passes of two kinds"])  # fmt: skip
def test_memory_is_bounded_with_many_threads(pass_, problems, monkeypatch):
    operands = [(problem, zeros(problem, 2)) for problem in problems]

    def peak() -> int:
        """Return the peak memory of consecutive passes in one thread."""
        tracemalloc.start()
        for problem, data in operands:
            out = data.w if pass_ == "backprop_filter" else data.dy
            agreement.compute(cupyconv, pass_, problem, data, out=out)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    monkeypatch.setattr(threads, "blas_threads", lambda: threads.MOST_THREADS)
    assert in_a_new_thread(peak) <= MEMORY


@pytest.mark.parametrize("extents", [(1, 15, 500), (5, 9, 99), (9, 40, 40), (64, 7, 7), (1, 9000)])
def test_divided_parts_have_similar_sizes(extents):
    images, *sizes = extents
    taps = [1] * len(sizes)
    problem = ConvProblem((images, 999, *sizes), (99, 999, *taps))
    data = zeros(problem)
    (forward,) = correlation.selections(problem, "forward")
    of = correlation.correlation(problem, "forward")
    whole = of(data.x, data.w, data.dy, selection=forward)
    pixels = [part.images * np.prod([a.outputs for a in part.axes]) for part in whole.divided(8)]
    assert sum(pixels) == np.prod(extents)
    assert len(pixels) <= 8
    assert min(pixels) >= choice.LEAST_PIXELS


# Unusual layers for blocks of 1/64 size, small enough for every method.
ODD = {
    "large filters, dilated": ConvProblem((1, 1, 99, 190), (1, 1, 40, 40), dilation=2),
    "large filters of many channels": ConvProblem((1, 9, 60, 300), (9, 1, 30, 30), groups=9),
    "large filters, channels last": ConvProblem(
        (1, 33, 95, 9), (30, 30, 1, 9), groups=9, data_format="NHWC", filter_format="HWIO"
    ),
    "a long row": ConvProblem((1, 2, 20_000), (3, 2, 31), padding=15),
    "long rows": ConvProblem((1, 1, 9, 6000), (2, 1, 3, 3), padding=1, dilation=(5, 2)),
    "long rows of pixels": ConvProblem(
        (1, 9, 2000, 8), (3, 3, 8, 8), padding=1, data_format="NHWC", filter_format="HWIO"
    ),
    "taps far apart": ConvProblem((2, 9, 12, 8), (2, 9, 3, 5), padding="same", dilation=(11, 9999)),
    "taps far apart, depthwise": ConvProblem(
        (2, 3, 40, 50), (3, 1, 2, 5), padding="same", dilation=(30, 3333), stride=2, groups=3
    ),
    "windows far apart": ConvProblem((1, 30, 40, 20), (5, 30, 1, 5), padding=3000, stride=(9, 999)),
    "much padding": ConvProblem(
        (1, 60, 90, 12), (1, 60, 1, 1), padding=((999, 0), (0, 1)), stride=3
    ),
    "more results than pixels": ConvProblem((7, 1, 8, 1), (3, 1, 3, 1), padding=(300, 40)),
    "many groups": ConvProblem((1, 1500, 9, 9), (1500, 1, 3, 3), padding=1, groups=1500),
    "few large groups": ConvProblem((1, 60, 30, 30), (60, 20, 7, 7), groups=3, dtype="float64"),
    "windows side by side": ConvProblem((1, 1, 30000), (1, 1, 10000), stride=10000),
    "a last part of one result": ConvProblem(
        (4, 1, 30, 900), (4, 1, 2, 3), padding=(0, 1), stride=(10, 1), dilation=(9, 1)
    ),
    "a last part of one row of five": ConvProblem((2, 1, 50, 260), (24, 1, 10, 20), stride=(10, 1)),
    "rows of channels, far apart": ConvProblem(
        (1, 8, 10), (8, 1, 5), dilation=80_000, padding=160_000, stride=800_000, groups=8
    ),
    "a volume": ConvProblem((1, 4, 150, 12, 12), (4, 1, 9, 3, 3), padding=1, groups=4),
    "pixels of few channels": ConvProblem(
        (1, 9891, 1), (123, 1, 1), data_format="NWC", filter_format="OIW"
    ),
    "a tall filter": ConvProblem((1, 60, 40, 120), (1, 60, 31, 1), padding=(15, 0)),
    "a tall filter, float16": ConvProblem(
        (1, 60, 40, 120), (1, 60, 31, 1), padding=(15, 0), dtype="float16"
    ),
    "a tall filter, dilated": ConvProblem((3, 20, 50, 90), (2, 20, 9, 2), dilation=(6, 1)),
    "long complex rows": ConvProblem((1, 16, 16, 1000), (1, 16, 3, 3), dtype="complex128"),
    "a tall complex filter": ConvProblem((1, 60, 16, 70), (1, 60, 7, 1), dtype="complex128"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", ODD)
def test_memory_of_every_method_scales_with_the_block_size(name, step, monkeypatch):
    scale, blocks = 64, choice.BLOCK_BYTES
    for module in (blocked, choice):
        monkeypatch.setattr(module, "BLOCK_BYTES", blocks // scale)
    monkeypatch.setattr(threads, "CALLS_BYTES", threads.CALLS_BYTES // scale)
    problem = ODD[name]
    data = zeros(problem, step)
    results = dict(zip(PASSES, (data.dy, data.x, data.w), strict=True))
    all_passes(DEEP)  # import all modules
    for pass_, method in methods(problem):
        out = np.empty_like(results[pass_])
        if method not in (
            "products",
            "windows",
            "scattered",
            "patches",
        ):  # compile their loops first
            in_a_new_thread(compute, problem, pass_, method, data, out=out)
        with threadpool_limits(threads.MOST_THREADS):
            peak = in_a_new_thread(peak_of_method, problem, pass_, method, data, out)
        # Allow 256 KiB for Python objects.
        assert peak <= MEMORY // scale + (1 << 18), f"{pass_} by {method}"


def drawn_layer(rng: np.random.Generator) -> ConvProblem:
    """Draw a layer of few pixels, with strides and dilations that may exceed the filter."""

    def axis() -> tuple[int, int, int, int, int]:
        taps, outputs = rng.choice([1, 2, 3, 9, 30]), rng.choice([1, 2, 3, 5, 9, 40])
        dilation, stride = rng.choice([1, 2, 7, 60]), rng.choice([1, 2, 3, taps, 100])
        padding = rng.choice([0, 0, 1, 20])
        size = (outputs - 1) * stride + (taps - 1) * dilation + 1 - 2 * padding
        return max(size, taps), taps, stride, dilation, padding

    axes = [axis() for _ in range(rng.integers(1, 3))]
    if np.prod([size for size, *_ in axes]) > 40_000:
        return drawn_layer(rng)
    sizes, taps, stride, dilation, padding = (
        tuple(map(int, values)) for values in zip(*axes, strict=True)
    )
    groups, channels, filters = (
        int(rng.choice(values)) for values in ((1, 3, 9), (1, 1, 2), (1, 1, 4, 24))
    )
    return ConvProblem(
        (int(rng.choice([1, 5])), groups * channels, *sizes),
        (groups * filters, channels, *taps),
        stride=stride, dilation=dilation, padding=padding, groups=groups,
    )  # fmt: skip


@pytest.fixture
def limited_scratch(monkeypatch):
    """Use blocks of 1/64 size, and fail if a call needs more scratch than it announced."""
    scale, original = 64, Scratch.array
    for module in (blocked, choice):
        monkeypatch.setattr(module, "BLOCK_BYTES", choice.BLOCK_BYTES // scale)
    monkeypatch.setattr(threads, "CALLS_BYTES", threads.CALLS_BYTES // scale)

    def checked_array(self, name, shape):
        capacity, size = name in self._arrays and self._arrays[name].size, int(np.prod(shape))
        assert capacity >= size or self._left.size >= size, (name, shape)
        return original(self, name, shape)

    monkeypatch.setattr(Scratch, "array", checked_array)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
def test_calls_stay_within_their_announced_memory(seed, limited_scratch):
    rng, computed = np.random.default_rng(seed), set()
    for _ in range(15):
        problem = drawn_layer(rng)
        data = zeros(problem)
        for pass_, method in methods(problem):
            computed.add(method)
            # A new thread has no scratch memory of earlier passes.
            in_a_new_thread(compute, problem, pass_, method, data)
    assert computed == METHODS


def test_converted_gradients_stay_within_their_announced_memory(limited_scratch):
    pytest.importorskip("numba")
    problem = ConvProblem((4, 40, 12, 12), (40, 40, 3, 3), padding=1, dtype="float16")
    compute(problem, "backprop_filter", "tiles", zeros(problem))


def peak_of_method(problem, pass_, method, data, out) -> int:
    """Return the peak memory of a pass by a method."""
    tracemalloc.start()
    compute(problem, pass_, method, data, out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    ("method", "cache"), [("tiles", tile_plans.plan_of), ("loops", loops._layout)]
)
def test_geometries_in_turn_are_planned_once_within_a_limit(method, cache, monkeypatch):
    pytest.importorskip("numba")
    planned, plan = [], cache._function
    monkeypatch.setattr(cache, "_function", lambda key: planned.append(key) or plan(key))
    cache.cache_clear()
    for size in (*range(7, 107), *range(7, 107)):
        problem = ConvProblem((1, 4, 5, size), (4, 4, 3, 3))
        compute(problem, "forward", method, zeros(problem))
    assert len(planned) == 100
    monkeypatch.setattr(caching, "MOST_BYTES", 100_000)
    compute(problem := problem.replace(stride=2), "forward", method, zeros(problem))
    assert 0 < sum(one.nbytes for one in cache._results.values()) <= 50_000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:os.fork", "ignore:This process")
@pytest.mark.parametrize(
    ("method", "cache"), [("tiles", tile_plans.plan_of), ("loops", loops._layout)]
)
def test_cache_is_free_in_a_forked_child_and_in_a_signal_handler(method, cache):
    pytest.importorskip("numba")
    problem = ConvProblem((1, 4, 5, 9), (4, 4, 3, 3))
    arguments = problem, "forward", method, zeros(problem)
    compute(*arguments)
    with ThreadPoolExecutor(1) as other:
        other.submit(cache._lock.acquire).result()
        child = os.fork()
        if not child:
            signal.alarm(20)
            with cache._lock:  # as if a signal handler computed a pass here
                compute(*arguments)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        other.submit(cache._lock.release).result()
    assert status == 0


def test_repeated_passes_allocate_no_memory(monkeypatch):
    # Use no helpers: one may start late and only take part in the second pass.
    monkeypatch.setattr(threads, "blas_threads", lambda: 1)
    data = random_data(DENSE)
    out = np.empty(DENSE.output_shape, np.float32)
    first, second = in_a_new_thread(peaks_of_two, DENSE, "forward", data, out)
    assert second < 1 << 18 < first


def in_a_new_thread(function: Callable[..., Any], *arguments: object, **keywords: object) -> Any:
    """Call the function in a thread without scratch memory of earlier passes."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *arguments, **keywords).result()


def peaks_of_two(problem: ConvProblem, pass_: str, data: Data, out: np.ndarray) -> list[int]:
    """Return the peak memory of a pass and of its repetition."""
    peaks = []
    for _ in range(2):
        tracemalloc.start()
        agreement.compute(cupyconv, pass_, problem, data, out=out)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return peaks


# -- the choice ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("input_shape", "filter_shape", "rules", "method"),
    [
        ((8, 256, 14, 14), (1024, 256, 1, 1), {}, "products"),
        ((8, 256, 14, 14), (256, 256, 3, 3), {"padding": 1}, "tiles"),
        ((8, 128, 56, 56), (128, 128, 3, 3), {"padding": 1, "stride": 2}, "tiles"),
        ((8, 128, 56, 56), (3, 128, 5, 5), {"padding": 2}, "scattered"),
        ((8, 3, 224, 224), (64, 3, 7, 7), {"padding": 3, "stride": 2}, "tiles"),
        ((8, 96, 112, 112), (96, 1, 3, 3), {"padding": 1, "groups": 96}, "loops"),
        ((64, 768, 7, 7), (768, 1, 7, 7), {"padding": 3, "groups": 768}, "loops"),
        ((4, 3, 256, 256), (3, 1, 64, 64), {"stride": 64, "groups": 3}, "products"),
    ],
)
def test_plan_reports_the_chosen_method(input_shape, filter_shape, rules, method):
    problem = ConvProblem(input_shape, filter_shape, **rules)
    planned = cupyconv.plan(problem)["forward"]
    assert planned.method == method
    assert planned.reason.startswith(f"{method}, ")
    assert planned.reason in str(cupyconv.plan(problem))


@pytest.mark.parametrize("multiplier", [2, 4, 8])
@pytest.mark.parametrize("pass_", PASSES)
def test_tiles_are_not_chosen_for_groups_with_few_channels(pass_, multiplier):
    pytest.importorskip("numba")
    for shape in ((4, 28, 28, 64), (8, 40, 11, 4096)):
        channels, stride = shape[-1], 2 if shape[-1] > 64 else 1
        problem = ConvProblem(
            shape, (3, 3, 1, multiplier * channels), padding=1, stride=stride, groups=channels,
            data_format="NHWC",
        )  # fmt: skip
        assert cupyconv.plan(problem)[pass_].method != "tiles"


def test_tiles_are_not_chosen_for_short_padded_rows():
    pytest.importorskip("numba")
    problem = ConvProblem((32, 96, 4, 4, 4), (7, 96, 3, 3, 3), padding=1)
    for layer in (problem, problem.replace(stride=2, padding=(1, 16, 1), dilation=(1, 8, 1))):
        assert cupyconv.plan(layer)["forward"].method == "scattered"


def test_saved_plan_runs_its_method(monkeypatch):
    data = integer_data(DENSE)
    saved = Plan.from_json(by_method(DENSE, "forward", "scattered").to_json())
    monkeypatch.setattr(scattered, "correlate", _fail)
    monkeypatch.setattr(calls, "_calls", {})
    with pytest.raises(AssertionError, match="as planned"):
        agreement.compute(cupyconv, "forward", DENSE, data, impl=saved)


def test_saved_plan_with_loops_is_rejected_without_numba(monkeypatch):
    pytest.importorskip("numba")
    problem = GROUPED["four"].replace(input_shape=(7, 24, 11, 12))  # used by no other test
    saved = by_method(problem, "forward", "loops")
    monkeypatch.setattr(choice, "has_numba", lambda: False)
    with pytest.raises(ConvError, match=r"cannot use method 'loops' here: Numba.* cannot be used"):
        agreement.compute(cupyconv, "forward", problem, integer_data(problem), impl=saved)


def test_saved_plan_with_depthwise_loops_runs_without_numba(monkeypatch):
    saved = by_method(DEPTHWISE, "forward", "loops")
    for module in (choice, loops):
        monkeypatch.setattr(module, "has_numba", lambda: False)
    data = integer_data(DEPTHWISE)
    got = agreement.compute(cupyconv, "forward", DEPTHWISE, data, impl=saved)
    expected = agreement.compute(cupyconv, "forward", DEPTHWISE, data, impl="reference")
    np.testing.assert_array_equal(got, expected)


def _fail(*_args):
    raise AssertionError("as planned")


@pytest.mark.parametrize("method", ["windows", "", "winograd 2x2"])
def test_plan_with_an_unsupported_method_is_rejected(method):
    fields = json.loads(cupyconv.plan(LARGE["many pixels"]).to_json())
    fields["passes"][0]["method"] = method
    with pytest.raises(ConvError, match="numpy does not compute forward with these choices"):
        Plan.from_json(json.dumps(fields))


def test_patches_are_exact():
    slices = set()
    for problem in random_problems(900, seed=11, dtypes=DTYPES):
        if "patches" not in [one.name for one in choice.methods(problem, "backprop_input")]:
            continue
        slices.add(choice.tap_slices(problem.axes))
        plan, data = by_method(problem, "backprop_input", "patches"), integer_data(problem)
        bias = (np.arange(problem.C) - 2).astype(data.w.dtype)
        rules = {"output_shape": problem.input_shape, **problem.keywords}
        for more in ((), (bias, "relu")):
            dx, exact = (
                cupyconv.conv_transpose(
                    *(data.dy, data.w, *more[:1]),
                    activation=more[1] if more else None,
                    impl=impl,
                    **rules,
                )
                for impl in (plan, "reference")
            )
            assert np.array_equal(dx, exact), problem
    assert min(slices) == 1 < 4 < max(slices)


@pytest.mark.parametrize("more", [{"stride": 1}, {"stride": 2, "dilation": 2}])
def test_patches_need_slices_of_several_taps(more):
    layer = ConvProblem((1, 2, 9, 9), (3, 2, 3, 3), stride=(3, 2))
    assert choice.tap_slices(layer.axes) == 2
    assert "patches" in [one.name for one in choice.methods(layer, "backprop_input")]
    layer = layer.replace(**more)
    assert "patches" not in [one.name for one in choice.methods(layer, "backprop_input")]
    with pytest.raises(ConvError, match="patches"):
        cupyconv.plan(layer, "cpu").with_choices("backprop_input", method="patches")


def test_patches_are_left_out_for_many_padded_windows():
    layer = ConvProblem((1, 1, 6400), (64, 1, 64), stride=64, padding=64000)
    assert "patches" not in [one.name for one in choice.methods(layer, "backprop_input")]
