"""Step "golden": the output of each golden case, which the report collects into one file."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu import golden


def cases(words: str = "") -> list[dict[str, Any]]:
    """Return the cases that the current GPU can run."""
    return [{"name": case.name} for case in golden.cases() if _device().takes(case)]


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Run a case; return its output, or the driver's refusal of its tensor map."""
    try:
        output = golden.run(_case(case["name"]), _device())
    except golden.MapRefusedError as error:
        return {"state": "refused", "detail": str(error)}
    packed = base64.b64encode(zlib.compress(output.tobytes())).decode()
    return {"chip": _device().capability, "dtype": output.dtype.str, "shape": output.shape,
            "values": packed}  # fmt: skip


def write(records: Iterable[Mapping[str, Any]], out: Path) -> Path | None:
    """Write inputs and outputs of the recorded cases to one file; return None without cases."""
    arrays: dict[str, Any] = {}
    chip = None
    for record in records:
        if "values" in record:
            chip, case = record["chip"], _case(record["case"])
            flat = np.frombuffer(zlib.decompress(base64.b64decode(record["values"])),
                                 record["dtype"])  # fmt: skip
            arrays[f"{case.name}/output"] = flat.reshape(record["shape"])
            arrays |= {f"{case.name}/input{i}": one for i, one in enumerate(case.inputs)}
    if not arrays:
        return None
    path = out / f"golden-sm_{chip}.npz"
    np.savez_compressed(path, **arrays)
    return path


@cache
def _device() -> golden.CupyDevice:
    return golden.CupyDevice()


@cache
def _by_name() -> dict[str, golden.Case]:
    return {case.name: case for case in golden.cases()}


def _case(name: str) -> golden.Case:
    return _by_name()[name]
