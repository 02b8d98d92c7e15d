"""The instruction twin against NumPy code written from the PTX manual, for every wrapper."""

from __future__ import annotations

import itertools
import re

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import SCHEDULES, settings
from tests.emulator.golden_device import EmulatorDevice
from tests.gpu import golden

pytestmark = pytest.mark.costly

WGMMA = {case.name: problem for case, problem in golden.wgmma_cases()}


def expected(case: golden.Case) -> np.ndarray:
    """Return the expected output of a case."""
    name = case.kernel
    if case.name in WGMMA:
        return expected_wgmma(WGMMA[case.name])
    if name.startswith(("ldmatrix", "stmatrix")):
        return expected_matrix(case)
    if name.startswith("mma_"):
        return expected_mma(case)
    if name in ("cp_async_4", "cp_async_8", "cp_async_16"):
        return expected_thread_copies(case)
    if name.startswith("tma_store"):
        return expected_store(case)
    if name.startswith("tma_load"):
        return expected_load(case)
    return SINGLE[name](case)


# --------------------------------------------------------------------------------------------------
# Conversions
# --------------------------------------------------------------------------------------------------
def rounded(values: np.ndarray, dtype) -> np.ndarray:
    """Return the bits of the values in a 16-bit type; NaN becomes the instructions' NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = values.astype(dtype).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def nearest_tf32(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    nearest = np.where(np.isfinite(values), bits + np.uint32(0x1000), bits)
    return nearest & np.uint32(0xFFFFE000)


def packed(values: np.ndarray, dtype) -> np.ndarray:
    bits = rounded(values, dtype).astype(np.uint32)
    return bits[0::2] | bits[1::2] << 16


def flushed(values: np.ndarray) -> np.ndarray:
    """Convert to float32 with subnormal numbers flushed to zero."""
    single = values.astype(np.float32)
    return np.where(np.abs(single) < np.finfo(np.float32).tiny, np.copysign(0, single), single)


def expected_function(case: golden.Case) -> np.ndarray:
    function = {"rcp_approx": np.reciprocal, "ex2_approx": np.exp2}[case.kernel]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return flushed(function(flushed(case.inputs[0]).astype(np.float64)))


# --------------------------------------------------------------------------------------------------
# Other instructions
# --------------------------------------------------------------------------------------------------
def expected_phases(case: golden.Case) -> np.ndarray:
    words = case.inputs[0]
    neighbour = np.roll(words, -1)
    return neighbour * 1000 + neighbour * 2


SINGLE = {
    "f32_from_f16": lambda case: case.inputs[0].view(np.float16).astype(np.float32),
    "f16_from_f32": lambda case: rounded(case.inputs[0], np.float16),
    "tf32_from_f32": lambda case: nearest_tf32(case.inputs[0]),
    "f16x2_from_f32": lambda case: packed(case.inputs[0], np.float16),
    "bf16x2_from_f32": lambda case: packed(case.inputs[0], ml_dtypes.bfloat16),
    "rcp_approx": expected_function,
    "ex2_approx": expected_function,
    "store_16_bytes": lambda case: case.inputs[0].T,
    "named_barriers": lambda case: case.inputs[0][:32][::-1],
    "mbarrier_phases": expected_phases,
    "elect_one": lambda case: (np.arange(32) == 0).astype(np.uint32),
    "griddepcontrol": lambda case: case.inputs[0],
    "cluster_exchange": lambda case: case.inputs[0][::-1],
    "setmaxnreg": lambda case: case.inputs[0] + np.repeat(np.uint32([1, 2]), 128),
}


def expected_thread_copies(case: golden.Case) -> np.ndarray:
    values, counts = case.inputs
    units = values.reshape(32, -1)
    mask = np.arange(units.shape[1]) < counts[:, None]
    return np.where(mask, units, 0).astype(np.uint8).reshape(-1)


# --------------------------------------------------------------------------------------------------
# Matrices and warp products: element by element, from the manual's tables
# --------------------------------------------------------------------------------------------------
def expected_matrix(case: golden.Case) -> np.ndarray:
    if case.kernel.startswith("stmatrix"):
        halves = case.inputs[0].view(np.uint16).reshape(4, 32, 2)
        matrices = np.empty((4, 8, 8), np.uint16)
        for lane, half in itertools.product(range(32), range(2)):
            row, column = lane // 4, lane % 4 * 2 + half
            matrices[:, row, column] = halves[:, lane, half]
        if case.kernel.endswith("trans"):
            matrices = matrices.transpose(0, 2, 1)
        return matrices.reshape(-1)
    count = case.output.shape[0]
    matrices = case.inputs[0].reshape(4, 8, 8)[:count]
    if case.kernel.endswith("trans"):
        matrices = matrices.transpose(0, 2, 1)
    return np.ascontiguousarray(matrices).reshape(count, 64).view(np.uint32)


def values_of(bits: np.ndarray, element: str) -> np.ndarray:
    if element == "f16":
        return bits.view(np.float16).astype(np.float64)
    if element == "bf16":
        return bits.view(ml_dtypes.bfloat16).astype(np.float64)
    return bits.view(np.float32).astype(np.float64)


def expected_mma(case: golden.Case) -> np.ndarray:
    if case.kernel == "mma_m8n8k4_f64":
        a, b, d = case.inputs
        product = a.reshape(8, 4) @ b.reshape(8, 4).T
        lanes = np.arange(32)
        columns = [product[lanes // 4, lanes % 4 * 2 + half] for half in (0, 1)]
        return d + np.stack(columns)
    element = re.fullmatch(r"mma_m16n8k\d+_(\w+)", case.kernel)[1]
    a, b, d = case.inputs
    lanes = np.arange(32)
    group, pair = lanes // 4, lanes % 4
    wide = element == "tf32"
    per = 1 if wide else 2
    depth = len(b) * 4 * per
    a_matrix, b_matrix = np.zeros((16, depth)), np.zeros((depth, 8))
    a_values = values_of(a.reshape(-1).view(np.uint32 if wide else np.uint16), element)
    b_values = values_of(b.reshape(-1).view(np.uint32 if wide else np.uint16), element)
    for register, half in itertools.product(range(len(a)), range(per)):
        column = pair * per + half + register // 2 * 4 * per
        a_matrix[group + register % 2 * 8, column] = a_values.reshape(-1, 32, per)[
            register, :, half
        ]
    for register, half in itertools.product(range(len(b)), range(per)):
        row = pair * per + half + register * 4 * per
        b_matrix[row, group] = b_values.reshape(-1, 32, per)[register, :, half]
    product = a_matrix @ b_matrix
    result = d.astype(np.float64)
    for register in range(4):
        result[register] += product[group + register // 2 * 8, pair * 2 + register % 2]
    return result.astype(np.float32)


def expected_wgmma(problem: golden.WgmmaProblem) -> np.ndarray:
    product = problem.a @ problem.b.T + (problem.d if problem.scale_d else 0)
    return golden.accumulator_registers(product).astype(np.float32)


# --------------------------------------------------------------------------------------------------
# TMA
# --------------------------------------------------------------------------------------------------
def swizzled(image: np.ndarray, swizzle: int) -> np.ndarray:
    """Return the bytes of a dense copy in their shared-memory order."""
    byte = np.arange(image.size)
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    result = np.empty_like(image)
    result[byte ^ ((byte >> 7 & mask) << 4)] = image
    return result


def element(tensor: np.ndarray, coordinates) -> np.generic:
    """Return the element at coordinates given innermost first; zero outside."""
    index = tuple(coordinates)[::-1]
    inside = all(0 <= i < extent for i, extent in zip(index, tensor.shape, strict=True))
    return tensor[index] if inside else tensor.dtype.type(0)


def tile_coordinates(described: golden.Map, at) -> np.ndarray:
    """Return the coordinates of every element of a box, in shared-memory order."""
    axes = [
        np.arange(0, size, step if axis else 1) + corner
        for axis, (size, step, corner) in enumerate(
            zip(described.box, described.steps, at, strict=True)
        )
    ]
    grid = np.meshgrid(*axes[::-1], indexing="ij")
    return np.stack([axis.reshape(-1) for axis in grid[::-1]], axis=1)


def column_coordinates(described: golden.Map, at, tap) -> np.ndarray:
    """Return the coordinates of every element of an im2col copy.

    Base pixels are enumerated over the bounding box, image by image; the copy takes consecutive
    ones from the given pixel on.
    """
    lower, upper = described.corners
    tensor = described.tensor
    extents = tensor.shape[::-1]
    channels, pixels = described.box
    axes = [
        range(low, extent + up, step)
        for low, up, extent, step in zip(
            lower, upper, extents[1:-1], described.steps[1:-1], strict=True
        )
    ]
    walk = [
        (*place[::-1], image)
        for image in range(at[-1], extents[-1] + pixels)
        for place in itertools.product(*axes[::-1])
    ]
    first = walk.index(tuple(at[1:]))
    rows = []
    for base in walk[first : first + pixels]:
        moved = [coordinate + offset for coordinate, offset in zip(base[:-1], tap, strict=False)]
        rows += [(at[0] + channel, *moved, base[-1]) for channel in range(channels)]
    return np.array(rows)


def expected_load(case: golden.Case) -> np.ndarray:
    described = next(value for value in case.arguments if isinstance(value, golden.Map))
    place = case.arguments[-1]
    rank = described.tensor.ndim
    at = [int(value) for value in place["at"][0, :rank]]
    if described.corners:
        tap = [int(value) for value in place["tap"][0, : rank - 2]]
        coordinates = column_coordinates(described, at, tap)
    else:
        coordinates = tile_coordinates(described, at)
    values = np.array([element(described.tensor, position) for position in coordinates])
    image = swizzled(values.view(np.uint8), described.swizzle)
    return np.broadcast_to(image, case.output.shape)


def expected_store(case: golden.Case) -> np.ndarray:
    described, image, _, place = case.arguments
    rank = len(case.output.shape)
    at = [int(value) for value in place["at"][0, :rank]]
    byte = np.arange(image.size)
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[described.swizzle]
    values = image[byte ^ ((byte >> 7 & mask) << 4)].view(np.uint16)
    result = case.output.initial.copy()
    for value, coordinates in zip(values, tile_coordinates(described, at), strict=True):
        index = tuple(coordinates)[::-1]
        if all(0 <= i < extent for i, extent in zip(index, result.shape, strict=True)):
            result[index] = value
    return result


# --------------------------------------------------------------------------------------------------
# Tests
# --------------------------------------------------------------------------------------------------
def same(case: golden.Case, actual: np.ndarray, wanted: np.ndarray) -> bool:
    """Return whether an output is as expected, within the instruction's error."""
    wanted = wanted.reshape(actual.shape)
    if not case.ulps:
        return np.array_equal(actual, wanted, equal_nan=actual.dtype.kind == "f")
    with np.errstate(invalid="ignore"):
        near = np.abs(actual - wanted) <= case.ulps * np.spacing(np.abs(wanted))
    return bool((near | (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))).all())


@pytest.mark.parametrize("case", golden.cases(), ids=lambda case: case.name)
def test_twin_matches_the_manual(case: golden.Case) -> None:
    schedules = SCHEDULES[:1] if case.wgmma else SCHEDULES
    for schedule in schedules:
        with settings(schedule):
            assert same(case, golden.run(case, EmulatorDevice()), expected(case)), schedule


def test_every_wrapper_has_a_golden_kernel() -> None:
    from tests.emulator import build

    text = golden.SOURCE.read_text()
    wrappers = build.declared_wrappers((build.INCLUDE_DIRECTORY / "ptx.cuh").read_text())
    # golden.cu's macros build these names.
    generated = {f"wgmma_m64_{kind}" for kind in ("f16", "bf16", "tf32")}
    missing = []
    for declaration in wrappers:
        name = re.search(r"(\w+)\(", declaration)[1]
        used = rf"ptx::{name}\b|KERNEL\w*\(\s*{name}\b|BODY\(.*\b{name}\b"
        if name not in generated and not re.search(used, text):
            missing.append(name)
    assert not missing


def recorded_results() -> list:
    return sorted(golden.RESULTS.glob("golden-*.npz"))


@pytest.mark.skipif(
    not recorded_results(),
    reason="no tests/gpu/results/golden-*.npz: run `python -m tests.gpu golden` on a GPU first",
)
@pytest.mark.parametrize("path", recorded_results(), ids=lambda path: path.stem)
def test_twin_agrees_with_the_gpu(path) -> None:
    with np.load(path) as file:
        recorded = dict(file)
    mismatches = []
    for case in golden.cases():
        if f"{case.name}/output" not in recorded:
            continue
        inputs = [recorded[f"{case.name}/input{index}"] for index in range(len(case.inputs))]
        inputs_match = all(
            np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
            for a, b in zip(inputs, case.inputs, strict=True)
        )
        assert inputs_match, f"{case.name} has other inputs than when {path.name} was made"
        if not same(case, golden.run(case, EmulatorDevice()), recorded[f"{case.name}/output"]):
            mismatches.append(case.name)
    assert not mismatches
