"""`python -m cupyconv`, the same program as the `cupyconv` command."""

from importlib import import_module

import_module("cupyconv.cli").run("cupyconv")
