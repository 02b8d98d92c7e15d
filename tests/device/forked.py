"""A plugin of pytest's: what it has collected is run again and again, each time in a fork.

Mutants are judged so without importing and collecting everything anew.  $CUPYCONV_FORKED has the
numbers of two files: from the first come requests, in JSON and a line each, to the second goes the
exit status of each run.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import resource
import signal
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

import pytest

VARIABLE = "CUPYCONV_FORKED"

_failed: Path | None = None
"""Where a fork writes the names of tests that fail."""


def changed(original: CodeType, mutant: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The functions of a module's code that a mutant changes, before and after.

    Raises:
        ValueError: it changes what is run when the module is imported.
    """

    def own(code: CodeType) -> tuple:
        rest = (one for one in code.co_consts if not isinstance(one, CodeType))
        return code.co_code, code.co_names, [(type(one), one) for one in rest]

    def inner(code: CodeType) -> list[CodeType]:
        return [one for one in code.co_consts if isinstance(one, CodeType)]

    if own(original) != own(mutant):
        raise ValueError("runs on import")
    for before, after in zip(inner(original), inner(mutant), strict=True):
        if not before.co_flags & inspect.CO_OPTIMIZED:  # a class
            yield from changed(before, after)
        elif before != after:
            if before.co_freevars != after.co_freevars:
                raise ValueError("other variables of the functions around it")
            yield before, after


def functions_changed(file: str, text: str) -> list[tuple[CodeType, CodeType]]:
    """As ``changed``, of a file and its changed text."""
    codes = (
        compile(one, file, "exec", dont_inherit=True) for one in (Path(file).read_text(), text)
    )
    return list(changed(*codes))


_Held = dict[tuple[str, str, int], list[FunctionType]]


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _functions() -> _Held:
    """Those that are loaded, wherever they are held, by what their code says of its place."""
    found: _Held = defaultdict(list)
    for one in gc.get_objects():
        if type(one) is FunctionType:
            found[_place(one.__code__)].append(one)
    return found


def _put_in(file: str, text: str, loaded: _Held) -> None:
    """Makes the module's functions what the text has, wherever they are held."""
    for before, after in functions_changed(file, text):
        assert loaded[_place(before)], f"{before.co_qualname} is not loaded"
        for one in loaded[_place(before)]:
            one.__code__ = after


PATIENCE = 5
"""Of the seconds of a core that a run may take, how many times as many pass before it is ended."""


def limit(seconds: int) -> None:
    """End this process after so many seconds of a core, or if it waits for what does not come."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.alarm(seconds * PATIENCE)


def pytest_collection_finish(session: pytest.Session) -> None:
    global _failed
    from tests.device.mutants import NEAREST  # which imports this module

    numbers = map(int, os.environ.pop(VARIABLE).split(","))
    requests, answers = (os.fdopen(one, how) for one, how in zip(numbers, "rw", strict=True))
    items = {one.nodeid: one for one in session.items}
    for name in NEAREST:  # some are imported by the first call that needs them
        import_module(name.removesuffix(".py").replace("/", "."))
    loaded = _functions()
    gc.collect()
    gc.freeze()  # forks share what they need not look at
    for line in requests:
        request = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # threads that there are have nothing to do
            child = os.fork()
        if child == 0:
            requests.close()
            answers.close()
            limit(request["seconds"])
            os.environ |= request["environment"]
            _put_in(request["file"], request["text"], loaded)
            _failed = Path(request["failed"])
            session.items[:] = [items[one] for one in request["tests"]]
            return
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    sys.stdout.flush()
    os._exit(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and _failed is not None:
        with _failed.open("a") as written:
            written.write(f"{report.nodeid}\n")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus: int) -> None:
    if _failed is not None:
        os._exit(exitstatus)
