"""A kernel with all Hopper features: exact in every schedule, and each fault is reported."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests import ROOT
from tests.emulator import SCHEDULES, EmulatedModule, Outcome, memory, settings
from tests.emulator.tensormap import encode_tiled

SOURCE = ROOT / "tests" / "emulator" / "kernels" / "hopper.cu"
TILE, STAGES = 64, 3
SHARED_BYTES = (2 * STAGES + 1) * TILE * TILE * 2 + 1024
EXTENTS = (128, 64, 320)  # M, N, K: the ring of three stages wraps


def map_of(matrix: np.ndarray, rows: int) -> np.ndarray:
    return encode_tiled(
        matrix.ctypes.data, 2, matrix.shape[::-1], matrix.strides[:1], (TILE, rows), swizzle=128
    )


def run(source: Path) -> tuple[Outcome, np.ndarray, np.ndarray]:
    m, n, k = EXTENTS
    generator = np.random.default_rng(5)
    a, b = (generator.integers(-2, 3, (rows, k)).astype(ml_dtypes.bfloat16) for rows in (m, n))
    c = memory.empty((m, n), ml_dtypes.bfloat16, "c")
    a_memory, b_memory = memory.array(a, "a"), memory.array(b, "b")
    kernel = EmulatedModule(source).get_function("product")
    kernel.max_dynamic_shared_size_bytes = SHARED_BYTES
    maps = (map_of(a_memory, TILE), map_of(b_memory, TILE // 2), map_of(c, TILE))
    outcome = kernel(
        (m // TILE, n // TILE), (256,), (*maps, np.int32(k // TILE)), shared_mem=SHARED_BYTES
    )
    return outcome, np.array(c), a.astype(np.float64) @ b.astype(np.float64).T


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.policy)
def test_product_is_exact(schedule) -> None:
    with settings(schedule):
        _, c, expected = run(SOURCE)
    assert np.array_equal(c.astype(np.float64), expected.astype(c.dtype).astype(np.float64))


# Original text, replacement, and the kinds of report that may follow.
FAULTS = {
    "empty not waited for": (
        "    wait_for(&shared.empty[stage], parity ^ 1);\n",
        "",
        {"race", "async-overwrite", "async-before-wait", "mbarrier", "transaction-count"},
    ),
    "full not waited for": (
        "    wait_for(&shared.full[stage], parity);\n",
        "",
        {"async-before-wait", "async-overwrite", "race", "uninitialised-read", "mbarrier"},
    ),
    "too many bytes expected": ("2 * TILE_BYTES);", "2 * TILE_BYTES + 64);", {"transaction-count"}),
    "too few bytes expected": (
        "2 * TILE_BYTES);",
        "TILE_BYTES);",
        {"transaction-count", "race", "async-before-wait", "uninitialised-read"},
    ),
    "barriers not fenced": ("    ptx::fence_mbarrier_init();\n", "", {"missing-proxy-fence"}),
    "cluster not synchronised": (
        "  ptx::cluster_arrive();\n  ptx::cluster_wait();\n  if (threadIdx.x >= CONSUMERS)",
        "  __syncthreads();\n  if (threadIdx.x >= CONSUMERS)",
        {"race", "mbarrier", "cluster"},
    ),
    "wgmma not waited for": (
        "    ptx::wgmma_wait<0>(d);\n",
        "",
        {"async-overwrite", "race", "wgmma"},
    ),
    "stored without a proxy fence": (
        "  ptx::fence_proxy_async();\n",
        "",
        {"missing-proxy-fence"},
    ),
    "stored before all have written": (
        "  ptx::named_barrier_sync(1, CONSUMERS);\n",
        "",
        {"uninitialised-read", "race"},
    ),
    "store not waited for": ("    ptx::tma_store_wait<0>();\n", "", {"unwaited-copy"}),
    "block leaves too early": (
        "  ptx::cluster_arrive();\n  ptx::cluster_wait();\n}",
        "}",
        {"cluster"},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(name: str, tmp_path: Path) -> None:
    old, new, kinds = FAULTS[name]
    text = SOURCE.read_text()
    assert text.count(old) == 1
    path = tmp_path / "hopper.cu"
    path.write_text(text.replace(old, new))
    reported = set()
    for schedule in SCHEDULES:
        with settings(schedule, raise_reports=False):
            outcome, _, _ = run(path)
        reported |= {report.kind for report in outcome.reports}
        assert all(report.line and report.file.endswith("hopper.cu") for report in outcome.reports)
    assert reported & kinds, reported
    assert reported <= kinds | {"deadlock"}, reported
