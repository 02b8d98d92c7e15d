"""Measured corrections of modelled times.

``measured/<architecture>.json`` is the ``calibration.json`` that tests/gpu writes on a GPU.  It has
the geometric mean of measured time / modelled time for each kernel family, pass and class of dtypes
(``dtype_class``).
"""

from __future__ import annotations

import json
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any

from cupyconv.kernels.request import Request

MEASURED = Path(__file__).with_name("measured")


def dtype_class(dtype: str, precision: str) -> str:
    """Return the name of a dtype's class; dtypes of one class have the same measured factors.

    >>> dtype_class("bfloat16", "ieee"), dtype_class("float32", "tf32")
    ('16-bit', 'tf32')
    """
    if dtype in ("float16", "bfloat16"):
        return "16-bit"
    return dtype if precision == "ieee" else precision


def factor(request: Request, family: str) -> float:
    """Return measured time / modelled time of a kernel family, for a request's pass and dtype.

    A family that was not measured gets the geometric mean of the measured families, which neither
    favours nor penalises it.  The factor is 1 if no family was measured.
    """
    class_ = dtype_class(request.problem.dtype, request.precision)
    factors = _factors(request.device.architecture, request.pass_, class_)
    if not factors:
        return 1.0
    return factors.get(family) or exp(sum(map(log, factors.values())) / len(factors))


def measured_gpu(request: Request) -> str | None:
    """Return the name of the GPU whose measured times scale a request's estimates, or None."""
    is_measured = factor(request, "") != 1.0
    return str(_measured(request.device.architecture)["gpu"]) if is_measured else None


@cache
def _factors(architecture: str | None, pass_: str, class_: str) -> dict[str, float]:
    return {
        entry["family"]: entry["mean"]
        for entry in _measured(architecture)["measured_over_modelled"]
        if (entry["pass"], entry["dtypes"]) == (pass_, class_)
    }


@cache
def _measured(architecture: str | None) -> dict[str, Any]:
    path = MEASURED / f"{architecture}.json"
    if not path.exists():
        return {"measured_over_modelled": []}
    entries: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return entries
