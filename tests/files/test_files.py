"""Output files: a command writes a file completely or not at all, and replaces nothing else."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import click
import numpy as np
import onnx
import pytest

from cupyconv import arrays, files
from cupyconv.bench import run as bench_run
from cupyconv.cli import data, paths
from cupyconv.cli.main import COMMANDS, main
from tests import ROOT, command
from tests.bench.test_bench_results import ROW
from tests.explaining.test_model import small_net

pytestmark = pytest.mark.quick

posix = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no POSIX files")

SMALL = ("--input", "1x1x5x5", "--filter", "2x1x3x3")
BENCH = ("bench", "--quick", "--device", "cpu", "--peers", "none")
WRITERS = {
    "grads --save": ("grads", *SMALL, "--no-check"),
    "explain --svg": ("explain", *SMALL),
    "explain --html": ("explain", *SMALL),
    "model --csv": ("model", "small_net.onnx"),
    "model --html": ("model", "small_net.onnx"),
    "bench --json": BENCH,
    "bench --plot": BENCH,
}
"""Command line for each option that names an output file."""

READERS = {
    "shapes --config": ("shapes",),
    **{f"grads --{name}": ("grads", *SMALL) for name in ("x", "w", "dy")},
    **{f"explain --{name}": ("explain", *SMALL) for name in ("x", "w", "dy")},
    **{
        f"diagnose --{name}": ("diagnose", *SMALL)
        for name in ("x", "w", "dy", "y", "dx", "dw", "db", "bias")
    },
    "bench --compare": ("bench", "--compare", "a"),
    "model file": ("model",),
}
"""Command line for each option that names an input file; one of --config and --model."""


def test_tables_have_every_option_that_names_a_file():
    named = {
        f"{name} {option.opts[0]}"
        for name in COMMANDS
        for option in main.get_command(click.Context(main), name).params
        if option.type is paths.FILE and option.opts[0] not in ("--config", "--model")
    }
    assert named == {*WRITERS, *READERS} - {"shapes --config"}


@pytest.fixture(scope="module", autouse=True)
def _network(tmp_path_factory):
    """Write the model that the commands read."""
    path = tmp_path_factory.mktemp("model") / "small_net.onnx"
    onnx.save(small_net(), path)
    WRITERS.update(dict.fromkeys(("model --csv", "model --html"), ("model", str(path))))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Hide GPUs, and replace the benchmark by one stored row."""

    def run(_place, _asked, results, advance):
        results.rows.append(ROW)
        advance()
        results.finished = True

    monkeypatch.setattr(arrays, "device_count", lambda: 0)
    monkeypatch.setattr(bench_run, "run", run)


def write(option, path):
    _, name = option.split()
    return command.run(*WRITERS[option], name, path)


def not_written(option, path) -> str:
    """Return the error of a command that cannot write."""
    _, name = option.split()
    return command.refused(*WRITERS[option], name, path)


@pytest.mark.parametrize("option", WRITERS)
def test_new_file_has_the_usual_permissions(tmp_path, option):
    before = os.umask(0o027)
    try:
        result = write(option, tmp_path / "out")
    finally:
        os.umask(before)
    assert result.exit_code == 0, result.output
    assert os.listdir(tmp_path) == ["out"]
    if hasattr(os, "mkfifo"):
        assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o640


@posix
@pytest.mark.parametrize("option", WRITERS)
def test_replaced_file_keeps_its_permissions(tmp_path, option):
    (tmp_path / "out").write_text("precious")
    (tmp_path / "out").chmod(0o600)
    assert write(option, tmp_path / "out").exit_code == 0
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o600
    assert b"precious" not in (tmp_path / "out").read_bytes()


@posix
@pytest.mark.parametrize("mode", [0o000, 0o200, 0o600, 0o755])
def test_replaced_file_keeps_every_mode(tmp_path, mode):
    path = tmp_path / "out"
    path.write_text("precious")
    path.chmod(mode)
    files.put(path, b"content")
    assert stat.S_IMODE(path.stat().st_mode) == mode
    path.chmod(0o600)
    assert path.read_bytes() == b"content"


@posix
@pytest.mark.parametrize("option", WRITERS)
@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to nothing"])
def test_symbolic_link_is_kept_and_its_target_written(tmp_path, option, there):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    target, link = tmp_path / "there" / "target", tmp_path / "here" / "link"
    if there:
        target.write_text("precious")
    link.symlink_to("../there/target")
    assert write(option, link).exit_code == 0
    assert link.is_symlink()
    assert target.is_file()
    assert b"precious" not in target.read_bytes()
    assert sorted(os.listdir(tmp_path / "there")) == ["target"]
    assert os.listdir(tmp_path / "here") == ["link"]


def device(folder: Path, name: str) -> Path:
    """Return /dev/null or /dev/full, or an equivalent device.

    The superuser gets a new device, so that a failing test cannot replace the system's device.
    """
    if not Path("/dev", name).is_char_device():
        pytest.skip(f"this system has no /dev/{name}")
    if os.geteuid() != 0:
        return Path("/dev", name)
    try:
        os.mknod(folder / name, stat.S_IFCHR | 0o666, os.stat(f"/dev/{name}").st_rdev)
        (folder / name).open("rb").close()
    except OSError as error:
        pytest.skip(f"no devices in temporary folders: {error}")
    return folder / name


@posix
@pytest.mark.parametrize("option", WRITERS)
def test_output_may_be_a_device(tmp_path, option):
    null, link = device(tmp_path, "null"), tmp_path / "link"
    link.symlink_to(null)
    names = set(os.listdir(tmp_path))
    for place in (null, link):
        assert write(option, place).exit_code == 0
        assert null.is_char_device()
        assert link.is_symlink()
        assert set(os.listdir(tmp_path)) == names


@posix
@pytest.mark.parametrize("option", WRITERS)
def test_full_device_is_reported(tmp_path, option):
    full = device(tmp_path, "full")
    result = write(option, full)
    line = result.stderr
    assert (result.exit_code, line.count("\n")) == (2, 1), result.output
    assert f"{full}: No space left on device" in line
    assert full.is_char_device()


@posix
@pytest.mark.parametrize("option", WRITERS)
def test_output_may_be_a_pipe(tmp_path, option):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert write(option, pipe).exit_code == 0
    reader.join(30)
    assert read[0]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.parametrize("option", WRITERS)
def test_folders_and_missing_folders_are_rejected_at_once(tmp_path, option, monkeypatch):
    monkeypatch.setattr(bench_run, "run", lambda *_: pytest.fail("the benchmark ran"))
    assert f"{option.split()[1]} must be a file that can be written" in not_written(
        option, tmp_path
    )
    assert "there is no folder" in not_written(option, tmp_path / "no" / "file")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", [*WRITERS, *READERS])
@pytest.mark.parametrize("path", ["", "a\0b"], ids=["empty", "NUL"])
def test_invalid_paths_are_rejected(option, path):
    words = {**WRITERS, **READERS}[option]
    _, name = option.split()
    given = [path] if option in ("bench --compare", "model file") else [name, path]
    line = command.refused(*words, *given)
    assert "must be the path of a file" in line


@posix
@pytest.mark.parametrize("option", [*READERS, "shapes --model"])
def test_an_endless_file_is_not_read_to_its_end(option):
    _, name = option.split()
    given = ["/dev/zero"] if option in ("bench --compare", "model file") else [name, "/dev/zero"]
    words = READERS.get(option, ("shapes",))
    words = (*words[:-1], "/dev/zero") if option == "bench --compare" else words
    line = command.refused(*words, *given)
    assert re.search("the most that is read|must have at most|must be a .npy or .npz file", line)


@posix
@pytest.mark.parametrize("words", [["shapes", "--config"], ["grads", *SMALL, "--x"]], ids=" ".join)
def test_endless_standard_input_is_not_read_to_its_end(monkeypatch, words):
    monkeypatch.setattr(data, "available_memory", lambda: 1 << 20)
    with open("/dev/zero", "rb") as zeros:
        line = command.refused(*words, "-", given=zeros)
    assert "standard input: it has more than" in line


@posix
def test_dev_stdout_continues_the_redirected_file(tmp_path):
    # If it were opened again, writing would start at the beginning and overwrite the content.
    program = (
        "import sys; from pathlib import Path; from cupyconv import files\n"
        "print('one', flush=True); files.put(Path('/dev/stdout'), b'two\\n'); print('three')"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True, timeout=300)
    assert (tmp_path / "out").read_text() == "one\ntwo\nthree\n"
    assert os.listdir(tmp_path) == ["out"]


def test_longest_possible_file_name_is_accepted(tmp_path):
    path = tmp_path / ("n" * 255)
    files.put(path, b"content")
    assert path.read_bytes() == b"content"


def test_circular_links_are_reported(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(OSError, match="a") as caught:
        files.put(tmp_path / "a", b"content")
    assert caught.value.filename == str(tmp_path / "a")


# -- signals ---------------------------------------------------------------------------------------

WAITING = """
import sys, time
import numpy as np
from cupyconv.cli.main import main

def savez(file, **_):
    file.write(b"half of it")
    print("writing", flush=True)
    time.sleep(60)

np.savez = savez
main(sys.argv[1:])
"""


HEARING = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
"""Code that restores default signal handlers, since children inherit ignored signals."""


def waiting(folder, command=(sys.executable, "-c"), before=HEARING):
    process = subprocess.Popen(
        [*command, before + WAITING, *WRITERS["grads --save"], "--save", str(folder / "out.npz")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    return process


@posix
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_terminated_program_leaves_no_partial_file(tmp_path, name):
    (tmp_path / "out.npz").write_text("precious")
    process, number = waiting(tmp_path), getattr(signal, name)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert (process.returncode, output, errors.strip()) == (128 + number, b"", b"")
    assert os.listdir(tmp_path) == ["out.npz"]
    assert (tmp_path / "out.npz").read_text() == "precious"


@posix
def test_ignored_hang_up_does_not_end_the_program(tmp_path):
    process = waiting(tmp_path, ("nohup", sys.executable, "-c"), before="")
    try:
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert process.poll() is None
    finally:
        process.terminate()
        process.communicate(timeout=300)


def test_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    command.run("shapes", *SMALL)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_program_runs_in_any_thread():
    results = []
    thread = threading.Thread(
        target=lambda: results.append(command.run("shapes", *SMALL).exit_code)
    )
    thread.start()
    thread.join(30)
    assert results == [0]


# -- with Dask -------------------------------------------------------------------------------------


@posix
def test_dask_results_are_written_completely_or_not_at_all(tmp_path, monkeypatch):
    pytest.importorskip("dask")
    pytest.importorskip("zarr")
    from cupyconv.cli import chunked

    written = []

    def fail(problem, norms, products):
        raise AssertionError

    import cupyconv.dask as cd

    to_zarr = cd.to_zarr

    def second_fails(array, path):
        if written:
            raise SystemExit(143)
        written.append(path)
        return to_zarr(array, path)

    monkeypatch.setattr(cd, "to_zarr", second_fails)
    monkeypatch.setattr(chunked, "adjoint", fail)
    result = command.run("grads", *SMALL, "--dask", "--save", tmp_path / "out")
    assert result.exit_code == 143
    assert written
    assert os.listdir(tmp_path) == []


def test_saved_arrays_can_be_written_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to("out.npz")
    assert write("grads --save", tmp_path / "link").exit_code == 0
    with np.load(tmp_path / "out.npz") as saved:
        assert {"x", "w", "y", "dy", "dx", "dw", "db"} <= set(saved.files)


def test_only_two_modules_write_files():
    # Zarr writes its own folders.
    others = {"cupyconv/files.py", "cupyconv/dask/results.py"}
    writing = re.compile(
        r"os\.(replace|rename)\(|mkstemp|\.write_(text|bytes)\(|open\([^)]*[\"'][wax]"
    )
    found = [
        str(path.relative_to(ROOT))
        for folder in ("cupyconv", "cli")
        for path in (ROOT / folder).rglob("*.py")
        if writing.search(path.read_text(encoding="utf-8"))
    ]
    assert set(found) <= others
    assert "cupyconv/dask/results.py" in found, "the pattern must match"
