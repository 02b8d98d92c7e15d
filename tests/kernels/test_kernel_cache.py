"""The kernels' sources, their compilation, and the cache of compiled kernels."""

import json
import os
import stat
import struct
import tempfile
import threading
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from cupyconv import arrays, cache_folder, files
from cupyconv.errors import ConvError, DeviceError, KernelCompileError
from cupyconv.gpu import compiler, sources
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
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """Return a list to which each compilation adds its architecture."""
    made = []
    compile_cubin = compiler.compile_cubin

    def counting(source, defines, architecture):
        made.append(architecture)
        return compile_cubin(source, defines, architecture)

    monkeypatch.setattr(compiler, "compile_cubin", counting)
    return made


def kept():
    """Put a variant's cubin into the cache, and return its file."""
    compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    cubin, record = compiler.entry_paths(SOURCE, DEFINES, "sm_80")
    assert record == cubin.with_suffix(".json")
    assert cubin.is_file()
    return cubin


def test_a_variant_is_compiled_once(folder, compilations):
    first = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    second = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    assert first == second
    assert first[:4] == b"\x7fELF"
    assert kept().parent == folder
    assert kept().read_bytes() == first
    assert compilations == ["sm_80"]
    assert sorted(path.suffix for path in folder.iterdir()) == [".cubin", ".json"]


def test_the_key_covers_what_is_compiled_and_how(folder, monkeypatch):
    longer = replace(SOURCE, text=SOURCE.text + "\n")
    other_header = replace(SOURCE, headers=(("value.cuh", "#define VALUE 7\n"),))
    variants = [(SOURCE, DEFINES, "sm_80"), (SOURCE, DEFINES, "sm_90a")]
    variants += [(SOURCE, {"EXTRA": 3}, "sm_80"), (longer, DEFINES, "sm_80")]
    found = [compiler.entry_paths(*one) for one in (*variants, (other_header, DEFINES, "sm_80"))]
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--extra-device-vectorization"))
    found.append(compiler.entry_paths(*variants[0]))
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: (99, 0))
    found.append(compiler.entry_paths(*variants[0]))
    assert len(set(found)) == 7


@pytest.mark.parametrize("damage", ["truncate", "flip", "record", "no record", "{", "[" * 100_000])
def test_a_damaged_entry_is_compiled_again(folder, compilations, damage):
    cubin = kept()
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
        record.write_text(damage)
    assert compiler.cached_cubin(SOURCE, DEFINES, "sm_80") == good
    assert cubin.read_bytes() == good
    assert len(compilations) == 2


def test_a_folder_that_cannot_be_written_only_loses_the_cache(tmp_path, monkeypatch, compilations):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    first = compiler.cached_cubin(SOURCE, {"EXTRA": 40}, "sm_80")
    assert first[:4] == b"\x7fELF"
    assert compiler.cached_cubin(SOURCE, {"EXTRA": 40}, "sm_80") == first
    assert len(compilations) == 2


def _compile(folder):
    os.environ[cache_folder.CACHE_VARIABLE] = str(folder)
    return compiler.cached_cubin(SOURCE, DEFINES, "sm_80")


def test_processes_may_race_for_one_entry(folder):
    # Spawn, because a fork would copy locks that threads of PyTorch or JAX may hold.
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as pool:
        cubins = set(pool.map(_compile, [folder] * 8))
    assert len(cubins) == 1


def test_the_record_tells_what_was_compiled(folder):
    record = json.loads(kept().with_suffix(".json").read_text())
    assert record["source"] == "store.cu"
    assert record["defines"] == DEFINES
    assert record["architecture"] == "sm_80"
    assert "registers" in record["log"]


# -- in parallel ----------------------------------------------------------------------------------

PATIENCE = 60
"""Maximum seconds that a thread waits for others before the test fails (hand-set)."""


def variants(*extras, architecture="sm_80"):
    return [compiler.Variant(SOURCE, (("EXTRA", extra),), architecture) for extra in extras]


def test_missing_variants_are_compiled_side_by_side(folder, monkeypatch):
    together = threading.Barrier(3)

    def compile_cubin(source, defines, architecture):
        together.wait(PATIENCE)  # fails unless all three are being compiled at once
        return compile_one(source, defines, architecture)

    compile_one = compiler.compile_cubin
    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    made = [one.result() for one in compiler.compile_missing(variants(1, 2, 3), threads=3)]
    assert all(one.cubin[:4] == b"\x7fELF" and one.seconds > 0 for one in made)
    assert len({one.cubin for one in made}) == 3
    again = [one.result() for one in compiler.compile_missing(variants(3, 1))]
    assert [one.cubin for one in again] == [made[2].cubin, made[0].cubin]
    assert [one.seconds for one in again] == [None, None], "the cache has them"


def test_no_thread_that_compiles_is_left(folder):
    """No compiling thread remains, even after an interrupt."""

    def interrupt():
        raise KeyboardInterrupt

    compiler.compile_missing(variants(1, 2), threads=2)
    with pytest.raises(KeyboardInterrupt):
        compiler.compile_missing(variants(3, 4), threads=2, done=interrupt)
    assert not [one for one in threading.enumerate() if one.name.startswith("cupyconv-compiler")]


def test_one_that_does_not_compile_keeps_no_other_from_it(folder, compilations):
    told = []
    good, bad, kept_already = compiler.compile_missing(
        [*variants(1, "nonsense"), *variants(2)], done=lambda: told.append(None)
    )
    assert good.result().cubin[:4] == kept_already.result().cubin[:4] == b"\x7fELF"
    with pytest.raises(KernelCompileError, match="EXTRA=nonsense"):
        bad.result()
    assert len(told) == len(compilations) == 3


def test_threads_that_want_the_same_variant_compile_it_once(folder, monkeypatch):
    (variant,) = variants(5)
    waits = threading.Event()

    class Watched:
        """A lock that sets an event when a thread has to wait for it."""

        def __init__(self):
            self._lock = threading.Lock()

        def __enter__(self):
            if not self._lock.acquire(blocking=False):
                waits.set()
                self._lock.acquire()

        def __exit__(self, *_):
            self._lock.release()

    made = []

    def compile_cubin(*given):
        made.append(given)
        other.start()
        assert waits.wait(PATIENCE), "the other thread must wait for this compilation"
        return compile_one(*given)

    def want():
        found.append(compiler.cached_cubin(SOURCE, {"EXTRA": 5}, "sm_80"))

    found, compile_one = [], compiler.compile_cubin
    monkeypatch.setattr(compiler, "compile_cubin", compile_cubin)
    monkeypatch.setitem(compiler._under_way, variant, Watched())
    other = threading.Thread(target=want)
    want()
    other.join()
    assert len(made) == 1
    assert found[0] == found[1]


# -- owners of the folder --------------------------------------------------------------------------

posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Windows has no owners of this kind")


@pytest.fixture
def new_process():
    """Forget which warnings this process has shown."""
    cache_folder._warn.cache_clear()
    yield
    cache_folder._warn.cache_clear()


def owned_by_another(monkeypatch, *places):
    """Make another user the owner of these paths, whichever user runs the tests."""
    lstat = os.lstat

    def look(path, *rest, **more):
        found = lstat(path, *rest, **more)
        if Path(path) not in places:
            return found
        return os.stat_result((*found[:4], 12345, *found[5:10]))

    monkeypatch.setattr(os, "lstat", look)
    monkeypatch.setattr(Path, "lstat", lambda path: look(path))


def planted(cubin):
    """Replace a cubin by other bytes, as a user with write access can, and return the bytes."""
    evil = b"\x7fELF planted"
    cubin.write_bytes(evil)
    cubin.with_suffix(".json").write_text(json.dumps({"digest": compiler._digest(evil)}))
    return evil


@posix
@pytest.mark.parametrize("where", ["folder", "parent"])
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o772])
@pytest.mark.usefixtures("new_process")
def test_a_folder_that_others_may_write_is_passed_over(folder, compilations, where, mode):
    cubin = kept()
    good = cubin.read_bytes()
    evil = planted(cubin)
    assert cubin.parent == folder
    open_to_all = folder if where == "folder" else folder.parent
    open_to_all.chmod(mode)
    with pytest.warns(RuntimeWarning) as said:
        assert compiler.cached_cubin(SOURCE, DEFINES, "sm_80") == good
    assert cubin.read_bytes() == evil, "nothing may be written to this folder"
    assert f"chmod go-w {open_to_all}" in str(said[0].message)
    assert cache_folder.CACHE_VARIABLE in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiler.cached_cubin(SOURCE, DEFINES, "sm_80") == good, "only the first call warns"
    assert len(compilations) == 3
    open_to_all.chmod(0o755)
    assert compiler.entry_paths(SOURCE, DEFINES, "sm_80")[0] == cubin


@posix
@pytest.mark.usefixtures("new_process")
def test_a_sticky_folder_keeps_others_from_the_cache_but_is_none(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "tmp" / "mine"))
    assert kept().parent == tmp_path / "tmp" / "mine"
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "tmp"))
    with pytest.warns(RuntimeWarning, match="can be written by other users") as said:
        assert cache_folder.trusted_directory() is None
    assert "chmod" not in str(said[0].message), "other programs need the folder as it is"


@posix
@pytest.mark.parametrize("place", ["/dev/null", "/dev/full", "file"])
@pytest.mark.parametrize("below", ["", ".cache/cupyconv"])
@pytest.mark.usefixtures("new_process")
def test_no_command_changes_a_file_or_device(tmp_path, place, below):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "file").chmod(0o666)
    folder = tmp_path / place / below
    assert cache_folder.distrust(folder) is None
    assert cache_folder.unwritable(folder) == f"{tmp_path / place} is not a folder"


@posix
@pytest.mark.parametrize("which", ["folder", "parent", "link", "where the link leads"])
@pytest.mark.usefixtures("new_process")
def test_a_folder_of_somebody_else_is_passed_over(tmp_path, monkeypatch, which):
    real, link = tmp_path / "one" / "two", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to("one")
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(link / "two"))
    assert cache_folder.trusted_directory() == link / "two"
    places = {"folder": real, "parent": real.parent, "link": link}
    foreign = places.get(which, real.parent)
    owned_by_another(monkeypatch, foreign)
    with pytest.warns(RuntimeWarning, match=f"{foreign}, which leads to .* belongs to") as said:
        assert cache_folder.trusted_directory() is None
    text = str(said[0].message)
    assert f"set {cache_folder.CACHE_VARIABLE} to a folder of your own" in text
    assert "chown" not in text
    assert "chmod" not in text


@posix
@pytest.mark.parametrize("which", [".cubin", ".json"])
@pytest.mark.parametrize("how", ["written by others", "somebody else's", "link"])
@pytest.mark.usefixtures("new_process")
def test_a_file_that_others_may_write_is_not_read(folder, monkeypatch, compilations, which, how):
    file = kept().with_suffix(which)
    if how == "written by others":
        file.chmod(0o666)
    elif how == "link":
        file.rename(folder / "elsewhere")
        file.symlink_to(folder / "elsewhere")
    else:
        owned_by_another(monkeypatch, file)
    compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    assert len(compilations) == 2
    if how != "somebody else's":
        assert stat.S_IMODE(file.lstat().st_mode) == 0o600
        compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
        assert len(compilations) == 2


@posix
def test_what_is_made_is_for_the_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        cubin = kept()
    finally:
        os.umask(before)
    for made in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert stat.S_IMODE(cubin.stat().st_mode) == 0o600


@posix
def test_nothing_is_put_where_somebody_else_was_quicker(tmp_path, monkeypatch):
    def theirs(folder):
        folder.mkdir()
        folder.chmod(0o777)

    monkeypatch.setattr(files, "make_private", theirs)
    with pytest.raises(PermissionError, match="can be written by other users"):
        cache_folder.keep(tmp_path / "cache" / "entry", b"ours")
    assert list((tmp_path / "cache").iterdir()) == []


@posix
def test_a_circle_of_links_is_passed_over(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert files.distrusted(tmp_path / "a" / "cache") is not None


# -- location of the folder ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "base", "found"),
    [
        ("/opt/cache", None, "/opt/cache"),
        ("~/kernels", None, "/users/me/kernels"),
        (None, "/var/cache", "/var/cache/cupyconv"),
        (None, "~/c", "/users/me/c/cupyconv"),
        (None, "relative/c", "/users/me/.cache/cupyconv"),
        ("", "", "/users/me/.cache/cupyconv"),
        (None, None, "/users/me/.cache/cupyconv"),
    ],
)
def test_where_the_cache_is(monkeypatch, chosen, base, found):
    monkeypatch.setenv("HOME", "/users/me")
    monkeypatch.setenv("USERPROFILE", "/users/me")
    for name, value in ((cache_folder.CACHE_VARIABLE, chosen), ("XDG_CACHE_HOME", base)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert cache_folder.cache_directory() == Path(found)


def test_a_relative_choice_is_in_the_current_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache_folder.CACHE_VARIABLE, "here")
    assert cache_folder.cache_directory() == tmp_path / "here"


@posix
@pytest.mark.parametrize("chosen", [None, "~/kernels", "~nobody-of-this-name/kernels"])
@pytest.mark.usefixtures("new_process")
def test_without_a_home_nothing_is_called_tilde(monkeypatch, tmp_path, chosen):
    import pwd

    def unknown(number):
        raise KeyError(number)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", cache_folder.CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv(cache_folder.CACHE_VARIABLE, chosen)
    assert compiler.cached_cubin(SOURCE, DEFINES, "sm_80")[:4] == b"\x7fELF"
    assert list(tmp_path.iterdir()) == []


def test_a_cache_serves_where_nothing_can_be_written(folder, compilations, monkeypatch):
    """The cache works in a container with a read-only file system."""
    good = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    monkeypatch.setattr(files, "put", lambda *_, **__: 1 / 0)
    assert compiler.cached_cubin(SOURCE, DEFINES, "sm_80") == good
    assert compilations == ["sm_80"]


# -- output of the compiler ------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["program headers", "section headers"])
def test_last_byte_of_a_cubin_is_restored(last):
    """Only one missing byte is restored; an ELF file ends where the later of its tables ends."""
    tables = {"program headers": (0x38, 3), "section headers": (0x40, 5)}
    offsets, end = {}, 0x40
    for name in sorted(tables, key=lambda name: name == last):
        size, count = tables[name]
        offsets[name], end = end, end + size * count
    whole = bytearray(b"\x01" * (end - 1) + b"\0")
    struct.pack_into("<QQ", whole, 0x20, *(offsets[name] for name in tables))  # e_phoff, e_shoff
    sizes = [number for pair in tables.values() for number in pair]
    struct.pack_into("<4H", whole, 0x36, *sizes)  # e_phentsize, e_phnum, e_shentsize, e_shnum
    assert compiler._whole_elf(bytes(whole[:-1])) == whole
    for other in (whole, whole[:-2]):
        assert compiler._whole_elf(bytes(other)) == other


def test_the_times_of_variants_are_their_own(folder):
    """A thread that compiles several variants measures the time of each variant separately."""
    begun, cpu_begun = time.perf_counter(), time.process_time()
    made = [one.result() for one in compiler.compile_missing(variants(1, 2, 3), threads=1)]
    taken, cpu_taken = time.perf_counter() - begun, time.process_time() - cpu_begun
    assert 0 < sum(one.seconds for one in made) <= taken
    assert 0 < sum(one.cpu_seconds for one in made) <= cpu_taken


@posix
def test_a_child_waits_for_no_thread_of_its_parents(folder):
    (variant,) = variants(1)
    compiler.cached_cubin(SOURCE, {"EXTRA": 1}, "sm_80")
    assert variant in compiler._under_way
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about other threads, which are idle
        child = os.fork()
    if child == 0:
        os._exit(len(compiler._under_way))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("lacking", [os.W_OK, os.X_OK])
def test_a_folder_is_written_by_who_may_enter_it_and_write(tmp_path, monkeypatch, lacking):
    folder = tmp_path / "a" / "b"
    assert cache_folder.unwritable(folder) is None
    monkeypatch.setattr(os, "access", lambda path, wanted: not wanted & lacking)
    assert cache_folder.unwritable(folder) == f"{tmp_path} cannot be written"
    tmp_path.joinpath("a").write_text("")
    assert cache_folder.unwritable(folder) == f"{tmp_path / 'a'} is not a folder"


# -- the sources -----------------------------------------------------------------------------------


def test_the_sources_are_in_the_package_or_beside_it(tmp_path, monkeypatch):
    package, find = tmp_path / "cupyconv", sources.directory.__wrapped__
    monkeypatch.setattr(sources, "__file__", str(package / "gpu" / "sources.py"))
    for folder in (tmp_path / "cuda", package / "cuda"):
        folder.mkdir(parents=True)
        if not package.exists():
            with pytest.raises(FileNotFoundError, match="reinstall cupyconv"):
                find()
        (folder / "conv_forward.cu").write_text("")
        assert find() == folder


def test_a_source_has_each_header_that_it_reaches(tmp_path, monkeypatch):
    texts = {
        "include/a.cuh": '#include "b.cuh"\n#include <cmath>\n// #include "none.cuh"\n',
        "include/b.cuh": '  # include "a.cuh"\n',
        "include/unread.cuh": "",
        "kernel.cu": 'int x;\n#include "b.cuh"\n',
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sources, "directory", lambda: tmp_path)
    headers = tuple((name, texts[f"include/{name}"]) for name in ("a.cuh", "b.cuh"))
    found = sources.load.__wrapped__("kernel.cu")
    assert found == KernelSource("kernel.cu", texts["kernel.cu"], headers)
    assert sources.kernel_sources() == tmp_path


def test_a_compiler_that_cannot_be_loaded_is_named(monkeypatch):
    """CuPy's binding loads NVRTC at its first use, so the error is raised there."""

    def missing():
        raise OSError("libnvrtc.so: cannot open shared object file")

    binding = SimpleNamespace(getVersion=missing)
    monkeypatch.setattr(
        arrays, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(nvrtc=binding))
    )
    said = r"NVRTC, CUDA's run-time compiler, could not be loaded \(libnvrtc.so: cannot open"
    for ask in (compiler.nvrtc_version, lambda: compiler.compile_cubin(SOURCE, {}, "sm_80")):
        with pytest.raises(DeviceError, match=said):
            ask()


@pytest.mark.parametrize("target", ["lto_80", "80", ""])
def test_unknown_targets_are_refused(target):
    """Targets that are neither a chip nor PTX are rejected, although NVRTC accepts them."""
    with pytest.raises(ConvError, match=f"unknown architecture: '{target}'"):
        compiler.compile_cubin(SOURCE, DEFINES, target)


def test_ptx_is_kept_like_a_cubin(folder, monkeypatch):
    cubin = compiler.cached_cubin(SOURCE, DEFINES, "sm_80")
    ptx = compiler.cached_cubin(SOURCE, DEFINES, "compute_80")
    assert cubin[:4] == b"\x7fELF"
    assert b".target sm_80" in ptx
    assert ptx.find(b"\0") == len(ptx) - 1, "PTX must end with a null byte for the driver"
    path, record = compiler.entry_paths(SOURCE, DEFINES, "compute_80")
    assert (path.suffix, path.read_bytes()) == (".ptx", ptx)
    assert json.loads(record.read_text())["architecture"] == "compute_80"
    monkeypatch.setattr(compiler, "compile_cubin", None)
    assert compiler.cached_cubin(SOURCE, DEFINES, "compute_80") == ptx


def test_programs_are_given_back(monkeypatch):
    """Programs are destroyed even if they do not compile."""
    binding = arrays.cupy().cuda.nvrtc
    made, destroyed = [], []
    create, destroy = binding.createProgram, binding.destroyProgram
    monkeypatch.setattr(binding, "createProgram", lambda *a: (made.append(create(*a)), made[-1])[1])
    monkeypatch.setattr(
        binding, "destroyProgram", lambda one: (destroyed.append(one), destroy(one))
    )
    compiler.compile_cubin(SOURCE, DEFINES, "sm_80")
    with pytest.raises(KernelCompileError):
        compiler.compile_cubin(SOURCE, {"EXTRA": "nonsense"}, "sm_80")
    assert len(made) == 2
    assert destroyed == made
