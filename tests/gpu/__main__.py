"""Run the tests and measurements that need a GPU.  README.md in this folder is the guide.

    python -m tests.gpu all --minutes 9 --out DIR # the steps, in order, while there is time
    python -m tests.gpu smoke --minutes 2         # one step
    python -m tests.gpu report DIR                # tables and files of the results
    python -m tests.gpu replay DIR                # errors of today's estimates against the results

Results are appended to DIR/results.jsonl as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from cupyconv import arrays
from tests.device import is_running
from tests.gpu.running import GOOD, ROOT, Options, Results, Run, Step

NO_GPU = 3
RESULTS = Path(__file__).with_name("results")
LEAST_SECONDS = 5  # a step with less time is not started (hand-set)

# Exports the profile for its viewer and prints its metrics, with the stalls of warps by reason.
_PROFILE = (
    'ncu --export "$PROFILES/$$" --force-overwrite --set detailed --import-source yes '
    "--section WarpStateStats --section SchedulerStats "
    "--kernel-name regex:^conv_ --launch-count 3 --clock-control none "
    '"$@" && ncu --import "$PROFILES/$$.ncu-rep" --csv --page details --print-details all'
)


def steps() -> tuple[Step, ...]:
    """Return the steps in the order of `all`: measurements that have never been made come first."""
    sanitizer, ncu = program("compute-sanitizer"), program("ncu")
    # cuda-bindings probes the driver for functions that it lacks, which is no error.
    checked = (sanitizer or "compute-sanitizer", "--destroy-on-device-error", "kernel",
               "--report-api-errors", "no", "--tool")  # fmt: skip
    lacks = "{} is not installed (it is part of CUDA)"
    edges = {
        "words": ("edges",),
        "lines": True,
        "missing": "" if sanitizer else lacks.format(checked[0]),
    }
    return (
        Step("doubts", "tests.gpu.contenders", 0.7, 1, 60, ("doubts",)),
        Step("loop", "tests.gpu.loop", 0.8, 1, 60),
        Step("profile", "tests.gpu.contenders", 1.5, 1, 40, ("profile",),
             ("sh", "-c", _PROFILE, "sh"), fresh=True, lines=True,
             missing="" if ncu else lacks.format("ncu")),
        Step("compile", "tests.gpu.contenders", 0.8, 12, 60, ("compile",)),
        Step("contenders", "tests.gpu.contenders", 2.5, 1, 30, ("contenders",)),
        Step("bf16x6", "tests.gpu.contenders", 0.7, 1, 30, ("bf16x6",)),
        Step("cudnn", "tests.gpu.contenders", 1.2, 1, 60, ("cudnn",)),
        Step("smoke", "tests.gpu.smoke", 1, 12, 20),
        Step("golden", "tests.gpu.instructions", 0.7, 8, 20),
        Step("tests", "tests.gpu.pytests", 5, 14, 30, ("tests",)),
        Step("programs", "tests.gpu.pytests", 0.5, 1, 30, ("programs",)),
        Step("table", "tests.gpu.contenders", 2.5, 1, 30, ("table",)),
        Step("memcheck", "tests.gpu.smoke", 0.5, 12, 60, tool=(*checked, "memcheck"), **edges),
        Step("racecheck", "tests.gpu.smoke", 0.7, 12, 60, tool=(*checked, "racecheck"), **edges),
    )  # fmt: skip


def rehearsed(step: Step) -> Step:
    """Return the step for an emulated device, which is slow and has no CUDA tools."""
    return replace(step, workers=1, seconds=120, tool=(), fresh=False, lines=False, missing="")


def program(name: str) -> str | None:
    """Return the path of one of CUDA's tools, on the PATH or beside the CUDA toolkit."""
    folders = [os.environ.get(variable) for variable in ("CUDA_HOME", "CUDA_PATH")]
    places = [os.environ.get("PATH", ""), *(f"{one}/bin" for one in folders if one)]
    return shutil.which(name, path=os.pathsep.join([*places, "/usr/local/cuda/bin"]))


@contextmanager
def checkout() -> Iterator[dict[str, str]]:
    """Yield environment variables with which a plain checkout imports like an installed package.

    cupyconv.cli and cupyconv.cuda are the folders cli/ and cuda/.  A folder of links puts them
    where the workers and their child processes import them from.
    """
    before = os.environ.get("PYTHONPATH", "")
    if find_spec("cupyconv.cli") is not None:
        yield {"PYTHONPATH": os.pathsep.join(filter(None, (before, str(ROOT))))}
        return
    with tempfile.TemporaryDirectory(prefix="cupyconv-checkout-") as folder:
        package = Path(folder, "cupyconv")
        package.mkdir()
        for path in (*(ROOT / "cupyconv").iterdir(), ROOT / "cli", ROOT / "cuda"):
            (package / path.name).symlink_to(path)
        # PYTHONSAFEPATH keeps the current folder from coming first in the search path.
        paths = os.pathsep.join(filter(None, (folder, before, str(ROOT))))
        yield {"PYTHONPATH": paths, "PYTHONSAFEPATH": "1"}


def run(names: Sequence[str], options: Options, minutes: float) -> int:
    """Run steps within the time limit; return 1 if a case did not pass."""
    results, until = Results(options.out), time.monotonic() + minutes * 60
    chosen = [step for step in steps() if step.name in names]
    if is_running():
        chosen = list(map(rehearsed, chosen))
    failures, scale = 0, max(minutes / sum(step.minutes for step in chosen), 1)
    for number, step in enumerate(chosen):
        left = until - time.monotonic()
        if left < LEAST_SECONDS and number:
            text = f"{step.name}: not run: no time left"
            results.add({"step": step.name, "event": "end", "text": text})
            continue
        seconds = min(60 * step.minutes * scale, left)
        states = Run(step, options, results, seconds).everything()
        failures += sum(count for state, count in states.items() if state not in GOOD)
    return int(failures > 0)


def passed(path: Path | None) -> dict[str, set[str]]:
    """Return names of the passed cases in a results file, by step."""
    found: dict[str, set[str]] = {}
    for line in path.read_text().splitlines() if path else ():
        record = json.loads(line)
        if record.get("state") == "passed":
            found.setdefault(record["step"], set()).add(record["case"])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [step.name for step in steps()]
    parser.add_argument(
        "step", nargs="?", default="all", choices=("all", "report", "replay", *names)
    )
    parser.add_argument("results", nargs="?", type=Path, help="folder of the results to report on")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=9, help="time of all steps (default 9)")
    parser.add_argument("--only", default="", help="run only cases with this text in their name")
    parser.add_argument("--sample", type=int, default=0, help="at most this many cases of a step")
    parser.add_argument("--done", type=Path, help="skip the passed cases of this results.jsonl")
    chosen = parser.parse_args(arguments)
    if chosen.step in ("report", "replay"):
        from tests.gpu import report

        run_on = report.main if chosen.step == "report" else report.replay
        return run_on(chosen.results or chosen.out)
    if arrays.device_count() == 0:
        print("no usable GPU: nothing was run (`cupyconv env` shows what is missing)")
        return NO_GPU
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the workers too
    with checkout() as environ, tempfile.TemporaryDirectory() as profiles:
        environ = {**environ, "PROFILES": profiles}
        options = Options(chosen.out, chosen.only, chosen.sample, passed(chosen.done), environ)
        try:
            return run(names if chosen.step == "all" else [chosen.step], options, chosen.minutes)
        finally:
            if found := sorted(Path(profiles).glob("*.ncu-rep")):
                with tarfile.open(chosen.out / "profiles.tar.gz", "w:gz") as archive:
                    for path in found:
                        archive.add(path, path.name)


if __name__ == "__main__":
    sys.exit(main())
