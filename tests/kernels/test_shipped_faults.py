"""Faults injected into the shipped kernels: the checker reports them at the expected line.

The faults are typical mistakes of kernel authors.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cupyconv import ConvProblem
from cupyconv.gpu import sources
from tests import emulator
from tests.agreement import compute, plan_with
from tests.configurations import integer_data
from tests.emulator import convolutions
from tests.emulator.build import KERNEL_DIRECTORY

pytestmark = pytest.mark.costly


@dataclass(frozen=True)
class Run:
    """Planned pass that runs a faulty kernel."""

    impl: str
    problem: ConvProblem
    pass_: str = "forward"
    tile: int = 0
    arch: str = "sm_80"
    splits: int = 1

    def compute(self) -> np.ndarray:
        """Compute the pass on the emulator."""
        device, choices = emulator.device(self.arch), {"tile": self.tile, "splits": self.splits}
        plan = plan_with(self.problem, self.impl, device, **choices)
        data = integer_data(self.problem)
        return compute(emulator, self.pass_, self.problem, data, impl=plan, arch=self.arch)


def _layer(x: tuple, w: tuple, dtype: str = "float16", **more: object) -> ConvProblem:
    return ConvProblem(x, w, data_format="NHWC", filter_format="OHWI", dtype=dtype, **more)


GENERIC = Run("cuda-generic", _layer((1, 6, 7, 40), (70, 3, 3, 40), "float32"))
GATHER = Run("cuda-gather", _layer((2, 9, 4, 64), (72, 3, 3, 64), padding=1))
DIRECT = Run("cuda-direct", _layer((1, 9, 8, 16), (16, 3, 3, 1), groups=16, padding=1))
DIRECT_FILTER = Run(DIRECT.impl, DIRECT.problem, "backprop_filter")
PATCH = Run("cuda-patch", _layer((5, 33, 40, 4), (12, 3, 3, 4), stride=2, padding=1))
# The rows have so few words that several warps share the pixels.
PATCH_FILTER = Run(
    PATCH.impl, _layer((5, 33, 40, 2), (12, 3, 3, 2), stride=2, padding=1), "backprop_filter"
)
# Tiles of 128 x 256 in clusters of two blocks; two tiles for two of the emulator's four SMs.
HOPPER = Run("cuda-hopper", _layer((4, 16, 15, 128), (256, 1, 2, 128)), arch="sm_90")
# Tiles of 192 x 128, which three warpgroups multiply.
THREE = Run(HOPPER.impl, HOPPER.problem, tile=4, arch="sm_90")
# Clusters of three blocks add the splits of tiles of 128 x 64.
SPLITS = Run(HOPPER.impl, HOPPER.problem, tile=7, arch="sm_90", splits=3)
PHASES = Run("cuda-hopper", _layer((2, 9, 8, 64), (64, 3, 3, 64), stride=2), "backprop_input",
             tile=1, arch="sm_90")  # fmt: skip

# With one channel, only the first window of a tile exists.
ONE_CHANNEL = Run(
    "cuda-hopper", _layer((1, 6, 5, 1), (8, 3, 3, 1)), "backprop_filter", arch="sm_90"
)


@dataclass(frozen=True)
class Fault:
    """Change of a kernel file, and the expected report.

    Attributes:
        name: the fault in words.
        run: what to run.
        file: name of a file in cuda/ or cuda/include/.
        old, new: text that occurs once, and its replacement.
        kinds: kinds of report, one of which is expected.
        at: text of the line that the report must name; empty for any line.
    """

    name: str
    run: Run
    file: str
    old: str
    new: str
    kinds: tuple[str, ...]
    at: str = ""


FAULTS = (
    Fault("tiles read before they are complete", GENERIC, "conv_forward.cu",
          "    __syncthreads();  // a and b are complete\n", "\n",
          ("race", "uninitialised-read"), "element[k]"),
    Fault("tiles overwritten while they are read", GENERIC, "conv_forward.cu",
          "    __syncthreads();  // taps are written;", "    __syncwarp();  // taps are written;",
          ("race",)),
    Fault("a copy is not waited for", GATHER, "conv_gather.cu",
          "    wait_for_copies<STAGES - 2>();\n", "\n",
          ("async-before-wait",), "ldmatrix"),
    Fault("a copy is waited for a step too late", GATHER, "conv_gather.cu",
          "wait_for_copies<STAGES - 2>();", "wait_for_copies<STAGES - 1>();",
          ("async-before-wait",), "ldmatrix"),
    Fault("a stage is refilled while it is read", GATHER, "conv_gather.cu",
          "    __syncthreads();\n    if (step + STAGES - 1 < steps)",
          "    __syncwarp();\n    if (step + STAGES - 1 < steps)",
          ("race", "async-before-wait", "async-overwrite", "uninitialised-read")),
    Fault("one row too many is stored", GATHER, "conv_gather.cu",
          "rows = pass.gemm_m - tile.row,", "rows = pass.gemm_m - tile.row + 1,",
          ("out-of-bounds",), "c + offset"),
    Fault("the filter is read before it is staged", DIRECT, "conv_direct.cu",
          "  __syncthreads();  // the filter is staged\n", "\n",
          ("race", "uninitialised-read")),
    Fault("sums are read before they are written", DIRECT_FILTER, "conv_direct.cu",
          "      __syncthreads();  // the sums of the upper half are written\n", "\n",
          ("race", "uninitialised-read")),
    Fault("a patch is not waited for", PATCH, "conv_patch.cu",
          "    wait_for_copies<0>();\n    __syncthreads();  // patch and filter",
          "    __syncthreads();  // patch and filter",
          ("async-before-wait",), "reinterpret_cast<const unsigned*>(at)"),
    Fault("a patch is overwritten while it is read", PATCH, "conv_patch.cu",
          "copy_patch(shared.patch[parity ^ 1],", "copy_patch(shared.patch[parity],",
          ("async-before-wait", "async-overwrite", "race")),
    Fault("warps add their sums at the same time", PATCH_FILTER, "conv_patch.cu",
          "__syncthreads();  "
          "// the stages are no longer read; the sums of the previous turn are written", "",
          ("race", "block-race", "uninitialised-read"), "given[i * 8 + lane / 4]"),
    Fault("more bytes are expected than arrive", HOPPER, "conv_hopper.cu",
          "expect_tx(full, sizeof(Stage));", "expect_tx(full, sizeof(Stage) + 64);",
          ("transaction-count",)),
    Fault("fewer bytes are expected than arrive", HOPPER, "conv_hopper.cu",
          "expect_tx(full, sizeof(Stage));", "expect_tx(full, sizeof(Stage) / 2);",
          ("transaction-count", "async-before-wait", "race")),
    Fault("a stage is multiplied before it is full", HOPPER, "conv_hopper.cu",
          "      wait_for(&shared.full[cursor.stage], cursor.parity);\n", "\n",
          ("async-before-wait", "uninitialised-read", "mbarrier", "race")),
    Fault("a stage is loaded before it is empty", HOPPER, "conv_hopper.cu",
          "    wait_for(&shared.empty[cursor.stage], cursor.parity ^ 1);\n", "\n",
          ("async-overwrite", "race", "transaction-count", "mbarrier")),
    Fault("a stage is released while products read it", HOPPER, "conv_hopper.cu",
          "      ptx::wgmma_wait<1>(sums);\n", "\n", ("async-overwrite",)),
    Fault("barriers are not fenced", HOPPER, "conv_hopper.cu",
          "    ptx::fence_mbarrier_init();\n", "\n", ("missing-proxy-fence",)),
    Fault("a block loads into a block that is not ready", HOPPER, "conv_hopper.cu",
          "  synchronise_cluster();  // no block loads", "  __syncthreads();  // no block loads",
          ("race", "mbarrier", "cluster")),
    Fault("a block exits while another accesses it", HOPPER, "conv_hopper.cu",
          "  synchronise_cluster();  // no block ends", "  // no block ends",
          ("cluster",)),
    Fault("a block exits while another adds its sums", SPLITS, "conv_hopper.cu",
          "  synchronise_cluster();  // no block ends", "  // no block ends",
          ("cluster",), "load_cluster"),
    Fault("splits are added before all blocks have stored them", SPLITS, "conv_hopper.cu",
          "  synchronise_cluster();  // the sums of all splits", "  __syncwarp();  //",
          ("race", "uninitialised-read"), "load_cluster"),
    Fault("sums are stored while products read the stages", SPLITS, "conv_hopper.cu",
          "  ptx::named_barrier_sync(1 + CONSUMERS, CONSUMERS * WARPGROUP);", "",
          ("async-overwrite", "race")),
    Fault("C is stored without a proxy fence", HOPPER, "conv_hopper.cu",
          "        ptx::fence_proxy_async();\n", "\n", ("missing-proxy-fence",), "tma_store_2d"),
    Fault("C is stored before all threads have written it", HOPPER, "conv_hopper.cu",
          "        ptx::named_barrier_sync(1 + number, WARPGROUP);    // this buffer is complete\n",
          "\n", ("race", "uninitialised-read", "missing-proxy-fence")),
    Fault("a buffer is written while a store reads it", HOPPER, "conv_hopper.cu",
          "        if (thread() == 0) ptx::tma_store_wait_read<0>();", "",
          ("async-overwrite",)),
    Fault("the last stores are not waited for", HOPPER, "conv_hopper.cu",
          "    if (thread() == 0) ptx::tma_store_wait<0>();\n", "\n", ("unwaited-copy",)),
    Fault("rows outside the phase are stored", PHASES, "conv_hopper.cu",
          "if (row >= rows(phase)) return BEYOND;", "if (row > rows(phase)) return BEYOND;",
          ("out-of-bounds", "block-race", "race")),
    Fault("vectors are stored before all threads have written them", PHASES, "conv_hopper.cu",
          "        ptx::named_barrier_sync(1 + number, WARPGROUP);  // buffer complete",
          "        // buffer complete", ("race", "uninitialised-read")),
    Fault("the producer keeps its registers", HOPPER, "conv_hopper.cu",
          "    ptx::setmaxnreg_dec<40>();\n", "\n", ("wgmma",), "setmaxnreg"),
    Fault("three warpgroups take the registers of two", THREE, "conv_hopper.cu",
          "CONSUMERS == 2 ? 232 : 152", "232", ("wgmma",), "setmaxnreg"),
    Fault("a missing window begins within a vector", ONE_CHANNEL, "conv_hopper.cu",
          ": lines(p.groups * p.channels) * LINE;", ": static_cast<int>(p.groups * p.channels);",
          ("misaligned",)),
)  # fmt: skip


def reports_of(fault: Fault) -> list[emulator.Report]:
    """Return the checker's reports of a fault's run in all schedules."""
    found: list[emulator.Report] = []
    outcomes: list[emulator.Outcome] = []
    for schedule in emulator.SCHEDULES:
        with emulator.settings(schedule, raise_reports=False, on_outcome=outcomes.append):
            try:
                fault.run.compute()
            except emulator.CheckerError as error:  # elements were not written
                found += error.reports
    return [*found, *(report for one in outcomes for report in one.reports)]


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Return a function that makes the library load a copy of the kernels with a fault."""

    def change(fault: Fault) -> None:
        kernels = tmp_path / "cuda"
        shutil.copytree(KERNEL_DIRECTORY, kernels)
        (path,) = kernels.rglob(fault.file)
        text = path.read_text()
        assert text.count(fault.old) == 1, f"{fault.old!r} occurs {text.count(fault.old)} times"
        path.write_text(text.replace(fault.old, fault.new))
        monkeypatch.setattr(sources, "directory", lambda: kernels)
        convolutions._module.cache_clear()

    yield change
    convolutions._module.cache_clear()


def line_of(report: emulator.Report, folder: Path) -> str:
    """Return the line of the changed kernels that a report names."""
    (path,) = (folder / "cuda").rglob(Path(report.file).name)
    return path.read_text().split("\n")[report.line - 1]


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault_is_reported(fault, changed, tmp_path):
    changed(fault)
    found = reports_of(fault)
    expected = [report for report in found if report.kind in fault.kinds]
    assert expected, f"none of {fault.kinds} in {[str(report) for report in found]}"
    lines = {line_of(report, tmp_path) for report in expected}
    assert any(fault.at in line for line in lines), f"reported at {lines}"


@pytest.mark.parametrize(
    "run",
    [GENERIC, GATHER, DIRECT, DIRECT_FILTER, PATCH, PATCH_FILTER, HOPPER, THREE, SPLITS, PHASES],
    ids=lambda run: run.impl,
)
def test_unchanged_kernels_have_no_reports(run):
    result = run.compute()
    assert np.isfinite(result.astype(np.float64)).all()
