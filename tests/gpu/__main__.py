"""Everything that a GPU at hand is needed for, in one run of a few minutes.

    python -m tests.gpu --out DIR --minutes 9

In this order: golden outputs of the instruction wrappers, the tests of the kernels,
compute-sanitizer and the benchmark in float16, bfloat16 and float32.  Each step is a process of its
own with a limit, so that none takes the others with it; what is left of the time goes to the next.
DIR then holds a few files, named after the chip, that belong in tests/gpu/results/: golden-*.npz,
bench-*.json, bench-*.svg, and log-*.txt and summary-*.json of the run itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from cupyconv import arrays
from cupyconv.bench import environment, places
from tests.device import is_running

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = 3
DTYPES = "float16,bfloat16,float32"
LEAST_SECONDS = 5  # a step is not begun with less
GRACE_SECONDS = 10  # for a step that is interrupted to say what it has
BENCH_RESERVE = 25  # s the benchmark needs beyond its own budget: start, last layer, files

_CLI = "import sys; from cupyconv.cli.main import main; main(sys.argv[1:])"
_GOLDEN = (
    "import sys; from pathlib import Path; from tests.gpu import golden; "
    "golden.RESULTS = Path(sys.argv[1]); golden.main()"
)


@dataclass(frozen=True)
class Step:
    """A program that is run.

    Attributes:
        name: what it is called in the log and the summary.
        command: what is run.
        share: of the time that is left, at most this part.
        missing: why it cannot be run; empty if it can.
    """

    name: str
    command: tuple[str, ...]
    share: float
    missing: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a step: "passed", "failed", "out of time" or "not run"."""

    name: str
    state: str
    seconds: float
    summary: str


def steps(out: Path, chip: str, bench_minutes: float) -> list[Step]:
    """The steps in order; ``bench_minutes`` is what the benchmark may take.

    On emulated devices they are rehearsed: a sample of the tests, layers that take seconds there.
    """
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_cupy.py")
    program: tuple[str, ...] = ("-c", _CLI)
    layers: tuple[str, ...] = ()
    if is_running():
        pytest += ("--part", "sample", "-m", "not slow")
        program = ("-m", "tests.device.rehearsal")
        layers = ("--config", "tests/device/rehearsal.toml")
    found = [
        Step("golden", (python, "-c", _GOLDEN, str(out)), 0.15),
        Step("tests", pytest, 0.4),
    ]
    sanitizer = compute_sanitizer()
    for tool, share in (("memcheck", 0.25), ("racecheck", 0.3)):
        command = (
            *(sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
            *(python, "-m", "tests.gpu.sanitizer"),
        )
        missing = "" if sanitizer else "compute-sanitizer is not installed (it is part of CUDA)"
        found.append(Step(tool, command, share, missing))
    bench_gpu = (python, *program, "bench", "--device", "gpu", "--seconds", "0.05")
    bench = (
        *(*bench_gpu, *layers, "--dtype", DTYPES, "--minutes", f"{bench_minutes:.2f}"),
        *("--json", str(out / f"bench-{chip}.json"), "--plot", str(out / f"bench-{chip}.svg")),
    )
    found.append(Step("bench", bench, 1.0))
    return found


def compute_sanitizer() -> str | None:
    """The program's path, on the PATH or beside the CUDA toolkit."""
    on_path = shutil.which("compute-sanitizer")
    if on_path:
        return on_path
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        candidate = Path(os.environ.get(variable, "")) / "bin" / "compute-sanitizer"
        if os.environ.get(variable) and candidate.exists():
            return str(candidate)
    usual = Path("/usr/local/cuda/bin/compute-sanitizer")
    return str(usual) if usual.exists() else None


def run_step(step: Step, log: Path, seconds: float) -> Outcome:
    """Run a step for at most this long; what it prints is added to the log."""
    if step.missing:
        return Outcome(step.name, "not run", 0, step.missing)
    if seconds < LEAST_SECONDS:
        return Outcome(step.name, "not run", 0, "no time left")
    started = time.monotonic()
    environ = {**os.environ, "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile() as file:
        try:
            state = _run(step.command, environ, file, seconds)
        except OSError as error:
            file.write(str(error).encode())
            state = "failed"
        file.seek(0)
        text = without_folders(file.read().decode(errors="replace"))
    with log.open("a") as kept:
        kept.write(f"==== {step.name}: {state}\n{text}\n")
    return Outcome(step.name, state, time.monotonic() - started, last_line(text))


# Runs a command that takes SIGINT again, which children of a shell's background job ignore.
_LISTENING = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


def _run(command: Sequence[str], environ: dict[str, str], file: IO[bytes], seconds: float) -> str:
    """Run a command in a session of its own, so that its own processes end with it."""
    process = subprocess.Popen(
        (sys.executable, "-c", _LISTENING, *command), cwd=ROOT, env=environ,
        stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        return "passed" if process.wait(seconds) == 0 else "failed"
    except subprocess.TimeoutExpired:
        return "out of time"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # the benchmark then writes what it has
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def without_folders(text: str) -> str:
    """Output without the absolute folders of this machine, as it is to be published."""
    text = text.replace(f"{ROOT}{os.sep}", "")
    return re.sub(r"(?<![\w.:/])(?:/[\w.+-]+){2,}/(?=[\w.+-])", "", text)


def last_line(text: str) -> str:
    """What a program said last, which is its sum."""
    lines = [line.strip("= \t") for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")


def table(outcomes: Sequence[Outcome]) -> str:
    """What passed, a line for each step."""
    return "\n".join(
        f"{one.name:<10}  {one.state:<11}  {one.seconds:>5.0f} s  {one.summary}" for one in outcomes
    )


def run(out: Path, minutes: float) -> list[Outcome]:
    """All steps within the time; the last file, summary.json, has what became of them."""
    out.mkdir(parents=True, exist_ok=True)
    place = places.of("gpu")
    chip = str(place.device.architecture)
    log = out / f"log-{chip}.txt"
    log.write_text("")
    until = time.monotonic() + minutes * 60
    outcomes: list[Outcome] = []
    for number in range(len(steps(out, chip, 1))):
        left = until - time.monotonic()
        step = steps(out, chip, max(left - BENCH_RESERVE, 1) / 60)[number]
        outcome = run_step(step, log, left * step.share)
        outcomes.append(outcome)
        print(table([outcome]), flush=True)
    summary = {
        "environment": environment.describe(
            place, program=f"python -m tests.gpu --minutes {minutes:g}"
        ),
        "steps": [asdict(one) for one in outcomes],
    }
    (out / f"summary-{chip}.json").write_text(json.dumps(summary, indent=1) + "\n")
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=9, help="for everything (default 9)")
    given = parser.parse_args(arguments)
    if arrays.device_count() == 0:
        print("no usable GPU: nothing was run (`cupyconv env` shows what is missing)")
        return NO_GPU
    outcomes = run(given.out, given.minutes)
    print(f"\n{table(outcomes)}")
    return 0 if all(one.state == "passed" for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
