"""`python -m cupyconv.cli`, the same program as the `cupyconv` command."""

from cupyconv.cli import run

run("cupyconv")
