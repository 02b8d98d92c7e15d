"""`python -m cupyconv.cli`, the same program as the `cupyconv` command."""

from cupyconv.cli.main import main

main(prog_name="cupyconv")
