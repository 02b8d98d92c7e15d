"""The command line of cupyconv, built on the public library."""

from typing import NoReturn

INTERRUPTED = 130  # exit code: 128 + SIGINT, as in shells


def run(prog_name: str | None = None) -> NoReturn:
    """Run the program; an interrupt ends it without a traceback, even during imports.

    Args:
        prog_name: name of the program in its messages; None uses the name of the script.
    """
    import sys

    try:
        import os
        import signal

        before = signal.getsignal(signal.SIGINT)
        is_usual = before is signal.default_int_handler
        if is_usual:  # os._exit is safe, because no file is open yet
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        from cupyconv.cli.main import main

        if is_usual:
            signal.signal(signal.SIGINT, before)
        main(prog_name=prog_name)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
