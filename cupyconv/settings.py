"""Settings of the library, which are read and set as attributes of the package ``cupyconv``."""

from __future__ import annotations

benchmark: bool = False
"""Whether the first call of a pass with a new problem on a GPU measures the candidates."""

workspace_limit: int | None = None
"""Largest workspace of a pass on a GPU in bytes; None for no limit."""

DEFAULTS = {"benchmark": benchmark, "workspace_limit": workspace_limit}
