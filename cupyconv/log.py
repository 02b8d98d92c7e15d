"""Log of plans, kernels and launches, through Python's logging under the name "cupyconv".

``CUPYCONV_LOG=info`` prints each chosen plan and each compiled or loaded kernel on standard error;
``CUPYCONV_LOG=debug`` also prints each launch.  The variable is read once, at the first event.
Programs that configure logging themselves need no variable.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

VARIABLE = "CUPYCONV_LOG"
"""Environment variable with the level: "info", "debug" or another level of logging."""


@cache
def _configured() -> None:
    """Print events of the level that the variable names."""
    import logging

    level = os.environ[VARIABLE].upper()
    logger = logging.getLogger("cupyconv")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


def _logger() -> Any:
    """Return the logger; None if nobody listens, so that logging need not be imported."""
    if VARIABLE in os.environ:
        _configured()
    logging = sys.modules.get("logging")
    return logging and logging.getLogger("cupyconv")


def info(text: str, *values: object) -> None:
    """Log an event: a plan, or a kernel that is compiled or loaded."""
    logger = _logger()
    if logger is not None:
        logger.info(text, *values)


def logs_launches() -> bool:
    """Return whether launches are logged."""
    logger = _logger()
    return logger is not None and logger.isEnabledFor(10)  # logging.DEBUG


def launch(text: str, *values: object) -> None:
    """Log a launch."""
    _logger().debug(text, *values)
