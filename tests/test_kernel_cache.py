"""The cache of compiled kernels."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from cupyconv.gpu import compiler
from cupyconv.gpu.sources import KernelSource

pytest.importorskip("cupy", reason="compiling kernels needs CuPy: pip install 'cupyconv[test]'")

HEADER = ("value.cuh", "#define VALUE 1\n")
SOURCE = KernelSource(
    "store.cu",
    '#include "value.cuh"\nextern "C" __global__ void store(int* x) { *x = VALUE + EXTRA; }',
    (HEADER,),
)
DEFINES = {"EXTRA": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """The architectures compiled for, one entry per compilation."""
    made = []
    compile_cubin = compiler.compile_cubin

    def counting(source, defines, architecture):
        made.append(architecture)
        return compile_cubin(source, defines, architecture)

    monkeypatch.setattr(compiler, "compile_cubin", counting)
    return made


def test_a_variant_is_compiled_once(folder, compilations):
    first = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    second = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    assert first == second
    assert first.parent == folder
    assert first.read_bytes()[:4] == b"\x7fELF"
    assert compilations == ["sm_80"]


@pytest.mark.parametrize(
    ("source", "defines", "architecture"),
    [
        (SOURCE, DEFINES, "sm_90a"),
        (SOURCE, {"EXTRA": 3}, "sm_80"),
        (KernelSource(SOURCE.name, SOURCE.text + "\n", SOURCE.headers), DEFINES, "sm_80"),
        (
            KernelSource(SOURCE.name, SOURCE.text, (("value.cuh", "#define VALUE 7\n"),)),
            DEFINES,
            "sm_80",
        ),
    ],
    ids=["architecture", "macro", "source", "header"],
)
def test_the_key_covers(folder, source, defines, architecture):
    first = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    assert compiler.cached_cubin(source, defines, architecture) != first


def test_the_key_covers_options_and_compiler(folder, monkeypatch):
    first = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--extra-device-vectorization"))
    second = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0))
    third = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("damage", ["truncate", "flip", "record", "no record", "not json"])
def test_a_damaged_entry_is_compiled_again(folder, compilations, damage):
    cubin = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    good = cubin.read_bytes()
    record = cubin.with_suffix(".json")
    if damage == "truncate":
        cubin.write_bytes(good[:100])
    elif damage == "flip":
        cubin.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    elif damage == "record":
        record.write_text(json.dumps({"digest": "0"}))
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text("{")
    assert compiler.cached_cubin(SOURCE, DEFINES, "sm_80") == cubin
    assert cubin.read_bytes() == good
    assert len(compilations) == 2


def test_a_folder_that_cannot_be_written_only_loses_the_cache(tmp_path, monkeypatch, compilations):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(compiler.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    first = compiler.cached_cubin(SOURCE, {"EXTRA": 40}, "sm_80")
    assert first.read_bytes()[:4] == b"\x7fELF"
    assert compiler.cached_cubin(SOURCE, {"EXTRA": 40}, "sm_80") == first
    assert len(compilations) == 1, "within the process, the temporary folder still serves"


def test_nothing_temporary_is_left(folder):
    compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    assert sorted(path.suffix for path in folder.iterdir()) == [".cubin", ".json"]


def _compile(folder):
    os.environ[compiler.CACHE_VARIABLE] = str(folder)
    return compiler.cached_cubin(SOURCE, DEFINES, "sm_80").read_bytes()


def test_processes_may_race_for_one_entry(folder):
    # Not by fork: this process may hold the threads of an oracle's library.
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        cubins = set(pool.map(_compile, [folder] * 8))
    assert len(cubins) == 1


def test_the_record_tells_what_was_compiled(folder):
    record = json.loads(
        compiler.cached_cubin(SOURCE, DEFINES, "sm_80").with_suffix(".json").read_text()
    )
    assert record["source"] == "store.cu"
    assert record["defines"] == DEFINES
    assert record["architecture"] == "sm_80"
    assert "registers" in record["log"]
