"""Measured prices of the cost model's units.

``measured/<architecture>.json`` is the ``calibration.json`` that tests/gpu fits to times measured
on a GPU.  It has the prices of each kernel family, by pass and class of dtypes
(``Request.dtype_class``), the prices of each family for all passes and dtypes, and the prices of
all families.

A chip without measurements has the prices of REFERENCE, so that its estimates compare kernel
families as they compare there.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from cupyconv.kernels.cost import Demand
from cupyconv.kernels.request import Request

MEASURED = Path(__file__).with_name("measured")

REFERENCE = "sm_90a"
"""Architecture whose prices stand for chips without measurements."""


def prices(request: Request, family: str) -> Demand:
    """Return the prices of a kernel family for a request.

    A pass or dtype that was not measured has the prices of the family, and a family that was not
    measured has the prices of all families together.
    """
    return _prices(request.device.architecture, family, request.pass_, request.dtype_class)


def measured_gpu(request: Request) -> tuple[str, bool]:
    """Return the name of the GPU whose prices apply, and whether it measured such requests.

    The second value is false if the request's chip or class of dtypes was not measured.
    """
    architecture = request.device.architecture
    gpu: str = _measured(architecture)["gpu"]
    known = any(dtypes == request.dtype_class for _, _, dtypes in _table(architecture))
    return gpu, known and architecture == _measured(architecture)["chip"]


@cache
def _prices(architecture: str | None, family: str, pass_: str, class_: str) -> Demand:
    table = _table(architecture)
    keys = (family, pass_, class_), (family, "", ""), ("", "", "")
    return next(table[key] for key in keys if key in table)


@cache
def _table(architecture: str | None) -> dict[tuple[str, str, str], Demand]:
    return {
        (entry["family"], entry["pass"], entry["dtypes"]): Demand(**entry["prices"])
        for entry in _measured(architecture)["prices"]
    }


@cache
def _measured(architecture: str | None) -> dict[str, Any]:
    paths = (MEASURED / f"{name}.json" for name in (architecture, REFERENCE))
    path = next(path for path in paths if path.exists())
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return entries
