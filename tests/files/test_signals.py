"""cupyconv.signals: work that interrupts do not stop."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cupyconv import signals
from cupyconv.cli.main import _noting


@pytest.fixture(autouse=True)
def interruptible():
    """Handle SIGINT in a test, since background jobs of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_soon() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def test_uninterrupted_returns_results_and_raises_errors():
    assert signals.uninterrupted(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        signals.uninterrupted(lambda: 1 // 0)


def test_interrupts_are_raised_after_the_work():
    done = []

    def work() -> None:
        for _ in range(3):
            interrupt_soon()
            time.sleep(0.05)
        done.append(True)

    with pytest.raises(KeyboardInterrupt):
        signals.uninterrupted(work)
    assert done


@pytest.fixture
def package(tmp_path, monkeypatch) -> str:
    """Create a package that cannot be imported again after an incomplete import."""
    folder = tmp_path / "halved"
    folder.mkdir()
    (folder / "__init__.py").write_text("from halved import first\nfrom halved import second\n")
    first = "import sys\nassert not hasattr(sys, 'halved')\nsys.halved = True\n"
    (folder / "first.py").write_text(first)
    second = "import tests.files.test_signals as t, time\nt.interrupt_soon()\ntime.sleep(0.1)\n"
    (folder / "second.py").write_text(second)
    monkeypatch.syspath_prepend(tmp_path)
    yield "halved"
    for name in [name for name in sys.modules if name.startswith("halved")]:
        del sys.modules[name]
    del sys.halved


def test_interrupted_imports_are_completed(package):
    with pytest.raises(KeyboardInterrupt):
        signals.import_whole(package)
    assert importlib.import_module(f"{package}.second").time is time


INTERRUPTED_CALL = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
import numpy as np
import cupyconv
x, w = np.ones((1, 64, 40, 40), np.float32), np.ones((64, 1, 3, 3), np.float32)
def call():
    return cupyconv.conv_forward(x, w, groups=64)
main = threading.main_thread().ident
threading.Timer(float(sys.argv[1]), signal.pthread_kill, (main, signal.SIGINT)).start()
try:
    call()
    time.sleep(60)
except KeyboardInterrupt:
    pass
from cupyconv.cpu.choice import has_numba
assert (call() == 9).all() and has_numba()
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.2, 0.4, 0.6, 0.9, 1.3, 2.0])
def test_calls_after_an_interrupted_first_call_are_correct(seconds, tmp_path):
    pytest.importorskip("numba")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_CALL, str(seconds)],
        env={**os.environ, "CUPYCONV_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


SWALLOWING = """
import os, signal, sys, time
os.kill(os.getpid(), signal.SIGINT)
try:
    time.sleep(0.1)
except KeyboardInterrupt:
    pass
sys.imported = True
"""


@pytest.mark.thorough
def test_interrupt_of_an_import_is_raised_after_it(tmp_path, monkeypatch):
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "swallowing", raising=False)
    interrupts = []

    def use():
        importlib.import_module("swallowing")
        assert sys.imported
        assert interrupts
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt), _noting(interrupts):
        use()


STARTED = "import sys, runpy; sys.argv[1:] = ['shapes', '1x1x4', '1x1x2']; "
HOOK = """
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            import os, signal
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Hook())
"""


@pytest.mark.parametrize("module", ["cupyconv", "cupyconv.cli"])
def test_interrupt_of_the_programs_imports_is_silent(module):
    program = STARTED + HOOK + f"runpy.run_module({module!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
