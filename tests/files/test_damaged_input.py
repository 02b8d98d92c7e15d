"""Damaged, unsupported and hostile files: a result, or one line of error and exit code 2."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cupyconv import ConvError, arrays
from cupyconv.cli import data
from tests.command import run, said

SHAPES = 'input = "1x1x5x5"\nfilter = "2x1x3x3"\n'
X = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)

LAYER = """# a layer
[[layer]]
name = "first"
title = "a \\u00e9 title"
input = [1, 4, 6, 6]
filter = "4x2x3x3"
stride = [2, 1]
padding = [[1, 0], [0, 2]]
dilation = 1
groups = 2
data_format = "NCHW"
filter_format = "OIHW"
dtype = "float32"
[[layer]]
input = "2x7x3"
filter = "3x3x4"
padding = "same"
data_format = "NWC"
"""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    monkeypatch.setattr(arrays, "device_count", lambda: 0)


def judged(*args: str) -> tuple[int, str]:
    """Run a command, require a result or a one-line error, and return its code and stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parsers warn about damaged files
        result = run(*args)
    assert isinstance(result.exception, (SystemExit, type(None))), result.exception
    assert result.exit_code in (0, 1, 2), (result.exit_code, result.stderr)
    assert "Traceback" not in result.stderr
    assert "a bug in" not in result.stderr
    if result.exit_code == 2:
        assert result.stdout == ""
        assert result.stderr.startswith("cupyconv: error: ")
        assert result.stderr.count("\n") == 1
        assert len(result.stderr) < 3000
    return result.exit_code, result.stderr


def refused(*args: str) -> str:
    code, line = judged(*args)
    assert code == 2, line
    return line


# -- TOML ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("dtype = [1]", "unknown dtype"),
        ("dtype = {a = 1}", "unknown dtype"),
        (f"stride = {'9' * 5000}", "an integer of more than 4,300 digits"),
        (f"stride = 0x{'f' * 5000}", "64-bit index"),
        (f"stride = [0x{'f' * 5000}]", "64-bit index"),
        (f"groups = {'9' * 4000}", "64-bit index"),
        (f"data_format = 0x{'f' * 5000}", "must be a string"),
        (f"stride = {'[' * 5000}{']' * 5000}", "nested too deeply"),
        (f"{'a.' * 5000}a = 1", "unknown key"),
        (f"padding = '{'1:' * 5000}'", "padding"),
        ("padding = [[[1]]]", "padding"),
        ("title = 1979-05-27", "must be a string"),
        ("stride = nan", "stride"),
    ],
)
def test_invalid_toml_layers_are_rejected(tmp_path, table, said):
    path = tmp_path / "layer.toml"
    path.write_text(SHAPES + table)
    for command in ("shapes", "explain"):
        assert said in refused(command, "--config", path)


@pytest.mark.parametrize("layers", ["3", "[1]", "[0xffff, {}]", f"[0x{'f' * 5000}]", "[]", "{}"])
def test_invalid_toml_layer_lists_are_rejected(tmp_path, layers):
    path = tmp_path / "layer.toml"
    path.write_text(f"layer = {layers}")
    assert "layer" in refused("shapes", "--config", path)


def test_device_of_many_digits_is_rejected():
    line = refused(
        "shapes", "--input", "1x1x5", "--filter", "1x1x3", "--device", f"sm_{'9' * 5000}"
    )
    assert "a device must be 'cpu', an architecture or a card" in line


# -- ONNX ------------------------------------------------------------------------------------------


def onnx_model(*, attributes=(), inputs=("x", "w"), outputs=("y",), dtype=1, operator="Conv"):
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    node = helper.make_node(operator, list(inputs), list(outputs), name="node")
    node.attribute.extend(
        one if isinstance(one, onnx.AttributeProto) else helper.make_attribute(*one)
        for one in attributes
    )
    values = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (("x", dtype, [1, 2, 5, 5]), ("w", 1, [2, 2, 3, 3]))
    ]
    result = helper.make_tensor_value_info("y", 1, None)
    return helper.make_model(helper.make_graph([node], "graph", values, [result]))


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        (("strides", 2), "strides must be a list of integers"),
        (("strides", 2.5), "strides must be a list of integers"),
        (("strides", [1.5, 2.5]), "strides must be a list of integers"),
        (("pads", b"abcd"), "pads must be a list of integers"),
        (("pads", ["a", "b", "c", "d"]), "pads must be a list of integers"),
        (("dilations", 1), "dilations must be a list of integers"),
        (("kernel_shape", 3), "kernel_shape must be a list of integers"),
        (("auto_pad", 3), "unknown auto_pad"),
        (("auto_pad", [b"SAME_UPPER"]), "unknown auto_pad"),
        (("auto_pad", b"\xff\xfe"), "unknown auto_pad"),
        (("group", 1.5), "group must be made of integers"),
        (("group", [1]), "group must be made of integers"),
    ],
)
@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_onnx_attributes_of_wrong_type_are_rejected(tmp_path, operator, attribute, said):
    model = onnx_model(attributes=[attribute], operator=operator)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    line = refused("model", tmp_path / "model.onnx")
    assert "node: " in line
    assert said in line


@pytest.mark.parametrize("attribute", [("output_shape", 3), ("output_padding", 1.0)])
def test_onnx_transpose_attributes_of_wrong_type_are_rejected(tmp_path, attribute):
    model = onnx_model(attributes=[attribute], operator="ConvTranspose")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    assert f"{attribute[0]} must be a list" in refused("model", tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"inputs": ("x",)}, "a Conv must have the inputs x and w"),
        ({"inputs": ()}, "complete ONNX file"),
        ({"inputs": ("", "")}, "a Conv must have the inputs x and w: it has 0"),
        ({"outputs": ()}, "complete ONNX file"),
    ],
)
def test_invalid_onnx_nodes_are_rejected(tmp_path, changes, said):
    (tmp_path / "model.onnx").write_bytes(onnx_model(**changes).SerializeToString())
    assert said in refused("model", tmp_path / "model.onnx")


def test_onnx_nodes_with_unknown_inputs_are_listed(tmp_path):
    (tmp_path / "model.onnx").write_bytes(onnx_model(inputs=("a", "b")).SerializeToString())
    assert "1 layer of unknown size: node reads b" in said("model", tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("number", "name"), [(77, "type 77"), (-5, "type -5"), (0, "undefined"), (8, "string")]
)
def test_onnx_nodes_of_other_dtypes_are_left_out(tmp_path, number, name):
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_model(dtype=number).SerializeToString())
    assert f"elements of type {name} are unsupported" in said("model", path, "--json")
    assert "must have a convolution" in refused("shapes", "--model", path)


# -- arrays ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"hello", b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff{"])
@pytest.mark.parametrize("name", ["x.npy", "x"])
def test_npz_without_arrays_is_rejected(tmp_path, content, name):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as packed:
        packed.writestr(name, content)
    line = refused("grads", "--x", tmp_path / "x.npz", "--filter", "2x1x3x3")
    assert "damaged" in line


def bomb(folder: Path, name: str, shape=(1, 1, 4000, 4000)) -> Path:
    """Write 64 MB of zeros, which an npz file compresses to a few kilobytes."""
    save = np.savez_compressed if name.endswith("npz") else np.save
    save(folder / name, np.zeros(shape, np.float32))
    return folder / name


@pytest.mark.parametrize("name", ["x.npz", "x.npy"])
@pytest.mark.parametrize("command", ["grads", "explain"])
def test_shape_is_checked_before_reading_the_array(tmp_path, monkeypatch, command, name):
    path = bomb(tmp_path, name)
    monkeypatch.setattr(data.ArrayFile, "read", lambda _: pytest.fail("it was read"))
    given = ("--input", "1x1x5x5", "--filter", "2x1x3x3", "--x", path)
    assert "1x1x4000x4000" in refused(command, *given)


@pytest.mark.parametrize("command", ["grads", "explain"])
def test_array_larger_than_memory_is_not_read(tmp_path, monkeypatch, command):
    path = bomb(tmp_path, "x.npz")
    monkeypatch.setattr(np.lib.format, "read_array", lambda *_, **__: pytest.fail("it was read"))
    monkeypatch.setattr(data, "available_memory", lambda: 1 << 20)
    assert "must fit into main memory" in refused(command, "--filter", "2x1x3x3", "--x", path)


def test_dtype_is_checked_before_reading_the_array(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", X.astype(np.complex64))
    monkeypatch.setattr(data.ArrayFile, "read", lambda _: pytest.fail("it was read"))
    given = ("--x", tmp_path / "x.npy", "--filter", "2x1x3x3", "--dtype", "float32")
    assert "imaginary part" in refused("grads", *given)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 1, 1 << 20, 1 << 20), "its header promises 4398046511104 bytes, 100 follow"),
        ((1, 1, -8, -8), "its header has the shape (1, 1, -8, -8)"),
    ],
)
def test_wrong_shape_in_a_header_is_rejected(tmp_path, packed, shape, said):
    content = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, header)
    path = tmp_path / "x"
    if packed:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("x.npy", content.getvalue() + bytes(100))
    else:
        path.write_bytes(content.getvalue() + bytes(100))
    line = refused("grads", "--x", path, "--filter", "2x1x3x3")
    assert "is damaged or truncated" in line
    assert said in line


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_versions_and_orders_match_numpy(tmp_path, version, order):
    array = np.asarray(np.arange(40, dtype=">f4").reshape(1, 2, 4, 5), order=order)
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, array, version)
    opened = data.ArrayFile("--x", str(tmp_path / "x.npy"))
    assert opened.shape == array.shape
    assert opened.dtype == np.dtype("float32")
    np.testing.assert_array_equal(opened.read(), np.load(tmp_path / "x.npy"))


def zarr_folder(folder: Path, **more) -> Path:
    zarr = pytest.importorskip("zarr")
    pytest.importorskip("dask")
    array = zarr.create_array(
        store=str(folder / "x.zarr"), shape=X.shape, chunks=(1, 1, 3, 3), dtype="float32", **more
    )
    array[...] = X
    return folder / "x.zarr"


def with_dask(path: Path) -> tuple:
    return ("grads", "--dask", "--x", path, "--filter", "2x1x3x3")


@pytest.mark.parametrize(
    "content", [b"", b"x", b"\0" * 100, bytes(range(256)), None], ids=lambda c: str(c)[:6]
)
@pytest.mark.parametrize("compressed", [True, False])
def test_damaged_zarr_chunks_are_rejected(tmp_path, content, compressed):
    path = zarr_folder(tmp_path, **({} if compressed else {"compressors": None}))
    assert judged(*with_dask(path))[0] == 0
    chunk = sorted(one for one in (path / "c").rglob("*") if one.is_file())[0]
    chunk.write_bytes(chunk.read_bytes()[:-3] if content is None else content)
    line = refused(*with_dask(path))
    assert "the chunks of a Zarr array must be readable" in line
    assert str(path) in line


def zarr_metadata(path: Path, **changes) -> None:
    content = json.loads((path / "zarr.json").read_text())
    (path / "zarr.json").write_text(json.dumps({**content, **changes}))


def test_invalid_zarr_grids_are_rejected(tmp_path):
    path = zarr_folder(tmp_path)

    def grid(*chunk):
        return {"name": "regular", "configuration": {"chunk_shape": chunk}}

    zarr_metadata(path, chunk_grid=grid(10**9, 10**9, 10**9, 10**9))
    refused(*with_dask(path))
    zarr_metadata(path, chunk_grid=grid(1, 1, 100, 100))
    refused(*with_dask(path))
    zarr_metadata(path, chunk_grid=grid(1, 1))
    refused(*with_dask(path))
    zarr_metadata(path, chunk_grid=grid(1, 1, 1, 1), shape=[10**6, 10**6, 5, 5])
    assert "at most 1,000,000 chunks" in refused(*with_dask(path))


class Program:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return self.path.write_text, ("",)


@pytest.mark.parametrize("codec", ["filters", "compressor"])
def test_programs_in_zarr_chunks_do_not_run(tmp_path, codec):
    """Releases of Zarr before 3.1 unpickle the chunks of such arrays of numbers."""
    pytest.importorskip("zarr")
    from cupyconv.dask.results import from_zarr

    path = tmp_path / "x.zarr"
    pickled = {"id": "pickle"}
    metadata = {"zarr_format": 2, "shape": X.shape, "chunks": X.shape, "dtype": "<f4", "order": "C"}
    metadata |= {"fill_value": 0, "filters": None, "compressor": None}
    path.mkdir()
    chosen = {codec: [pickled] if codec == "filters" else pickled}
    (path / ".zarray").write_text(json.dumps(metadata | chosen))
    (path / "0.0.0.0").write_bytes(pickle.dumps(Program(tmp_path / "written")))
    with pytest.raises((ConvError, ValueError)):
        from_zarr(path).compute()
    assert not (tmp_path / "written").exists()


# -- attacks ---------------------------------------------------------------------------------------

PIECES = [
    *(b"", b"\0", b"\xff", b"-", b"0", b"1e400", b"nan", b"null", b"true", b"9" * 30, b"[[", b"{"),
    *(b'"', b"'", b"\n", b"\r", b"=", b"\x1b[31m", "é".encode(), b"\xe2\x80\xae", b"/", b".."),
]


def damaged(rng: random.Random, content: bytes) -> bytes:
    """Return bytes with random flips, truncations, deletions, insertions or replacements."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at, length = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 16))
        how = rng.randrange(6)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 1 and rng.random() < 0.3:
            del changed[at:]
        elif how == 2:
            del changed[at : at + length]
        elif how == 3:
            changed[at:at] = rng.choice(PIECES)
        elif how == 4:
            changed[at : at + length] = rng.randbytes(length)
        else:
            source = rng.randrange(len(changed) + 1)
            changed[at : at + length] = changed[source : source + length]
    return bytes(changed)


def attack_toml(folder, rng):
    (folder / "a.toml").write_bytes(damaged(rng, LAYER.encode()))
    return rng.choice(("shapes", "shapes", "explain")), "--config", folder / "a.toml"


def attack_onnx(folder, rng):
    names = ("dilations", "strides", "pads", "auto_pad", "group", "kernel_shape", "output_padding")
    values = (1, -1, 2**62, 2.5, [1, 1], [1, 1, 1, 1], [2**62] * 2, [-1, 0], b"SAME_UPPER", [b"x"])
    chosen = [(name, rng.choice(values)) for name in rng.sample(names, rng.choice((0, 1, 2)))]
    operator = rng.choice(("Conv", "Conv", "ConvTranspose"))
    content = onnx_model(attributes=chosen, operator=operator).SerializeToString()
    (folder / "a.onnx").write_bytes(damaged(rng, content) if rng.random() < 0.7 else content)
    return "model", folder / "a.onnx"


def attack_npy(folder, rng):
    np.save(folder / "a.npy", X)
    (folder / "a.npy").write_bytes(damaged(rng, (folder / "a.npy").read_bytes()))
    return "grads", "--x", folder / "a.npy", "--filter", "2x1x3x3", "--no-check"


def attack_npz(folder, rng):
    np.savez(folder / "a.npz", x=X, w=np.ones((2, 1, 3, 3), np.float32))
    (folder / "a.npz").write_bytes(damaged(rng, (folder / "a.npz").read_bytes()))
    return "explain", "--x", folder / "a.npz", "--w", folder / "a.npz", "--map", "dx"


def attack_zarr(folder, rng):
    path = folder / "x.zarr"
    if path.exists():
        shutil.rmtree(path)
    zarr_folder(folder)
    file = rng.choice(sorted(one for one in path.rglob("*") if one.is_file()))
    file.write_bytes(damaged(rng, file.read_bytes()))
    return (*with_dask(path), "--no-check")


def attack_results(folder, rng):
    from tests.bench.test_bench_results import suite
    from tests.files.test_records import STRANGE, changed, places

    if not (folder / "good.json").exists():
        suite().save(folder / "good.json")
    content = (folder / "good.json").read_bytes()
    if rng.random() < 0.5:
        (folder / "a.json").write_bytes(damaged(rng, content))
    else:
        table = json.loads(content)
        new = changed(table, rng.choice(list(places(table))), rng.choice((..., *STRANGE)))
        (folder / "a.json").write_text(json.dumps(new))
    return "bench", "--compare", folder / "good.json", folder / "a.json"


ATTACKS = {
    "toml": (attack_toml, 120),
    "onnx": (attack_onnx, 250),
    "npy": (attack_npy, 80),
    "npz": (attack_npz, 80),
    "zarr": (attack_zarr, 12),
    "results": (attack_results, 100),
}
"""Attack and number of its trials, keyed by file type."""


@pytest.mark.parametrize("kind", ATTACKS)
def test_damaged_files_cause_no_traceback(tmp_path, kind):
    attack, count = ATTACKS[kind]
    rng = random.Random(kind)
    answers = {0: 0, 1: 0, 2: 0}
    for _ in range(count):
        code, _ = judged(*attack(tmp_path, rng))
        answers[code] += 1
    assert answers[2] > count // 10, "too few files were damaged"
    assert answers[0] > 0, "every file was damaged too much"
