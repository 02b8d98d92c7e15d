"""The command line, on top of the public library."""

from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def run(prog_name: str | None = None) -> NoReturn:
    """Run the program; an interrupt ends it without a traceback, during its imports too.

    Args:
        prog_name: name of the program in its messages; None takes that of the script.
    """
    import sys

    try:
        import os
        import signal

        before = signal.getsignal(signal.SIGINT)
        is_usual = before is signal.default_int_handler
        if is_usual:  # nothing is open yet that would have to be closed
            signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        from cupyconv.cli.main import main

        if is_usual:
            signal.signal(signal.SIGINT, before)
        main(prog_name=prog_name)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
