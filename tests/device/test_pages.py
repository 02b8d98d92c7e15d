"""Programs of the pages that need a GPU, on the emulated devices."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOW_TO = ROOT / "notebooks" / "how-to"

PROGRAM = '''
import sys
from types import ModuleType

import cupy
import numpy as np
from distributed import Client, LocalCluster

import cupyconv
from cupyconv.backends import current_device


def through_the_host():
    """Receive CuPy arrays as NumPy arrays, instead of with RMM or Numba."""
    import cupy
    import distributed.protocol.cupy  # registers its functions before they are replaced
    import numpy as np
    from distributed.protocol.serialize import dask_deserialize

    @dask_deserialize.register(cupy.ndarray)
    def receive(header, frames):
        shape, kind = header["shape"], header["typestr"]
        return cupy.asarray(np.ndarray(shape, kind, frames[0], strides=header["strides"]))


def cluster():
    """Two worker processes, each with emulated devices."""
    made = LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, memory_limit=0, silence_logs=50
    )
    with Client(made) as client:
        client.run(through_the_host)
    return made


stand_in = ModuleType("dask_cuda")
stand_in.LocalCUDACluster = cluster

if __name__ == "__main__":
    sys.modules["dask_cuda"] = stand_in
    import dask.array as da

    import cupyconv.dask as cd

    rng = np.random.default_rng(0)
    x = rng.integers(-3, 4, (2, 3, 12, 14)).astype("float32")
    w = rng.integers(-3, 4, (4, 3, 3, 3)).astype("float32")
    chunked = da.from_array(x, chunks=(1, 3, 6, 14))
    page = __PAGE__
    exec(page)
    devices = client.run(lambda: current_device().name)
    assert len(devices) == 2, devices
    assert all("emulated" in name for name in devices.values()), devices
    exact = cupyconv.conv_forward(x, w, padding="same")
    gradients = cupyconv.conv_backward(x, w, np.ones_like(exact), padding="same")
    for got, expected in ((y, exact), (dw, gradients.dw)):
        assert type(got) is np.ndarray
        assert (got == expected).all()
    print("computed", flush=True)
    client.close()
'''
"""A script that runs the program of the page on Dask, with a stand-in for dask_cuda."""


def code_of(name: str) -> str:
    """Return the one program of a page that needs a GPU."""
    text = (HOW_TO / name).read_text(encoding="utf-8")
    (code,) = re.findall(r"^```.code-block. text\n(.*?)^```$", text, re.M | re.S)
    return code


def run(path: Path, code: str) -> str:
    """Run a program in a process with emulated devices, and return what it prints."""
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_memory_page_code_runs(tmp_path):
    assert "Out of memory" in run(tmp_path / "program.py", code_of("memory.md"))


@pytest.mark.filterwarnings("ignore")  # from distributed, about processes and sockets
def test_dask_page_code_runs_on_two_workers(tmp_path):
    pytest.importorskip("distributed")
    program = PROGRAM.replace("__PAGE__", repr(code_of("with-dask.md")))
    assert "computed" in run(tmp_path / "program.py", program)
