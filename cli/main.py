"""The program: its commands, which are loaded when used, and the handling of errors."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

import click

import cupyconv
from cupyconv.cli import INTERRUPTED, output
from cupyconv.errors import (
    ConvError,
    CupyconvError,
    DeviceError,
    KernelCompileError,
    similar_argument,
    unknown_word,
)

COMMANDS = (
    *("shapes", "grads", "explain", "diagnose", "plan", "model", "check", "bench", "warm", "env"),
)
"""Names of the commands; each command is the object ``command`` of the module with its name."""

GOOD, CHECK_FAILED, WRONG_USAGE, NO_GPU, DOES_NOT_COMPILE = range(5)
"""Exit codes."""

BUG = 70  # EX_SOFTWARE of sysexits.h

TRACEBACK_VARIABLE = "CUPYCONV_TRACEBACK"
"""Environment variable; if it is not empty, errors end with a traceback."""


class Program(click.Group):
    """Group that loads each command from its module, and prints an error as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return import_module(f"cupyconv.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            from cupyconv.cli.configuration import is_shape

            if not (args[0][:1].isdigit() or is_shape(args[0])):
                raise unknown_word("command", args[0], COMMANDS)
            args = ["explain", *args]  # the short form, without a command
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run a command line; exits with the code that the command returns, 0 if it is None."""
        interrupts: list[int] = []
        try:
            with _noting(interrupts), _ending_by_signal(), _without_numerical_warnings():
                code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except Exception as error:
            if os.environ.get(TRACEBACK_VARIABLE):
                raise
            # An interrupt during NumPy's import raises an exception other than KeyboardInterrupt.
            was_interrupted = interrupts and not isinstance(error, OSError)
            code = INTERRUPTED if was_interrupted else _report(error)
        sys.exit(code or GOOD)


@contextmanager
def _without_numerical_warnings() -> Iterator[None]:
    """Silence NumPy's and Dask's warnings of infinity and NaN; the report shows such values."""
    with warnings.catch_warnings():
        what = "overflow|underflow|invalid value|divide by zero"
        warnings.filterwarnings("ignore", f"({what}) encountered", RuntimeWarning)
        yield


@contextmanager
def _ending_by_signal() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the program cleans up as after an error.

    Signals that are already ignored, as under nohup, stay ignored.
    """
    numbers = []

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)  # a second signal would stop the cleanup
        raise SystemExit(128 + number)  # the exit code that shells report for this signal

    if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, end)
                numbers.append(number)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _noting(interrupts: list[int]) -> Iterator[None]:
    """Add each interrupt to a list, and raise it as usual, or after the import that it would stop.

    Compiled modules print a traceback if an interrupt stops their import, and some libraries
    suppress the interrupt.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        while frame is not None:
            if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
                again = threading.Timer(0.02, _thread.interrupt_main)
                again.daemon = True
                return again.start()
            frame = frame.f_back
        raise KeyboardInterrupt

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        yield


def _report(error: Exception) -> int:
    """Write an error in one line to standard error, and return its exit code."""
    if isinstance(error, click.Abort):
        return INTERRUPTED
    if isinstance(error, KernelCompileError):
        message, _, _ = str(error).partition("\n")
        output.error(message, below=error.log)
        return DOES_NOT_COMPILE
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)  # only usage errors have one
        where = f" (see {context.command_path} --help)" if context else ""
        output.error((_meant_option(error) or error.format_message()) + where)
        return WRONG_USAGE
    if isinstance(error, CupyconvError):
        output.error(error.told(output.option) if isinstance(error, ConvError) else str(error))
        return NO_GPU if isinstance(error, DeviceError) else WRONG_USAGE
    if isinstance(error, MemoryError):
        text = str(error) or "an allocation failed"
        output.error(f"not enough memory: {text}. Use a smaller input or batch")
        return WRONG_USAGE
    if isinstance(error, OSError):
        path = f"{error.filename}: " if error.filename else ""
        output.error(f"{path}{error.strerror or error}")
        return WRONG_USAGE
    kind = type(error)
    if kind.__module__.partition(".")[0] in ("cupy", "cupy_backends"):
        output.error(f"the GPU failed: {error}. `cupyconv env` shows what is installed")
        return NO_GPU
    output.error(
        f"a bug in cupyconv, {kind.__name__}: {error}. "
        f"{TRACEBACK_VARIABLE}=1 shows where; please report it"
    )
    return BUG


_SHAPES: dict[str | None, str] = {"input": "input_shape", "filter": "filter_shape"}
"""Arguments of the library that options have another name for, keyed by option."""


def _meant_option(error: click.ClickException) -> str | None:
    """Return the message for an unknown option that means a known one; None for other errors."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return None
    options = {
        name: option.opts[-1]
        for option in error.ctx.command.params
        if isinstance(option, click.Option)
        for name in (option.name, _SHAPES.get(option.name))
        if name is not None
    }
    word = error.option_name.lstrip("-").replace("-", "_")
    similar = similar_argument(word, options)
    return similar and f"No such option {error.option_name!r}. Use {options[similar]}"


@click.group(
    cls=Program,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(cupyconv.__version__, prog_name="cupyconv")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Shapes and gradients of convolutional layers, on NumPy and CuPy.

    \b
    cupyconv 1x5x100x100 10x5x5x5    (short for cupyconv explain ...)
    cupyconv grads --preset multi-channel
    cupyconv shapes --input 1x5x5x3 --filter 3x3x3x4 --stride 2 \\
      --padding same --data-format NHWC

    Exit codes: 0 success, 1 a check failed or nothing was measured, 2 wrong usage or invalid
    configuration, 3 no usable GPU, 4 a kernel did not compile, 70 a bug in cupyconv, 130
    interrupted (128 plus the number of the signal).

    In bash, Tab completes commands, options, presets and values after
    eval "$(_CUPYCONV_COMPLETE=bash_source cupyconv)"; in zsh and fish, use zsh_source and
    fish_source.
    """
    if ctx.invoked_subcommand is None:
        output.write(ctx.get_help() + "\n")
