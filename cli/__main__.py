"""`python -m cupyconv.cli`: run the `cupyconv` command."""

from cupyconv.cli import run

run("cupyconv")
