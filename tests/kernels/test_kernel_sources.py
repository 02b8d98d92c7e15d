"""Constants and macros on which kernels and host code must agree."""

import re

import pytest

from cupyconv.gpu import sources
from cupyconv.kernels import bias, copies, cost, hopper, patch, toeplitz
from cupyconv.kernels.hopper_bf16x6 import PLANES

CONSTANTS = [
    ("include/partial_sums.cuh", "ADDING_THREADS", cost.ADDING_THREADS),
    ("include/partial_sums.cuh", "LOADS_IN_FLIGHT", cost.LOADS_IN_FLIGHT),
    ("conv_hopper.cu", "WARPGROUP", hopper.WARPGROUP),
    ("conv_hopper.cu", "STORE_ROWS", hopper.STORE_ROWS),
    ("conv_hopper.cu", "STORE_BOXES", hopper.STORE_BOXES),
    ("conv_hopper.cu", "STORE_FLOAT", hopper.STORE_FLOAT),
    ("conv_hopper.cu", "STORE_COLUMNS", hopper.STORE_COLUMNS),
    ("conv_hopper.cu", "COLUMNS", hopper.SUMS_PIECE),
    ("conv_planes.cu", "THREADS", copies.THREADS),
    ("conv_planes.cu", "VECTOR", copies.VECTOR),
    ("conv_planes.cu", "PLANES", PLANES),
    ("conv_arrange.cu", "THREADS", copies.THREADS),
    ("conv_arrange.cu", "TILE", copies.TILE),
    ("conv_arrange.cu", "BAND_PIXELS", copies.BAND_PIXELS),
    ("conv_arrange.cu", "BAND_CHANNELS", copies.BAND_CHANNELS),
    ("conv_fold.cu", "THREADS", copies.THREADS),
    ("conv_backprop_bias.cu", "THREADS", bias.THREADS),
    ("conv_patch.cu", "WARPS", patch.WARPS),
    ("conv_toeplitz.cu", "CHANNELS", toeplitz.CHANNELS),
]
"""Kernel file, name of an integer constant in it, and the equal value of the host code."""


@pytest.mark.quick
@pytest.mark.parametrize(("file", "name", "expected"), CONSTANTS)
def test_constants_match_the_host_code(file, name, expected):
    text = (sources.directory() / file).read_text()
    pattern = rf"^(?: *constexpr int (?:\w+ = \w+, )*{name} = (\d+)[,;]|#define {name} (\d+)$)"
    (found,) = re.findall(pattern, text, re.M)
    assert int("".join(found)) == expected
