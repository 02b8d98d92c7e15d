"""`python -m cupyconv`: run the `cupyconv` command."""

from importlib import import_module

import_module("cupyconv.cli").run("cupyconv")
