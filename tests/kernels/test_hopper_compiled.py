"""Compiled code of the Hopper kernels."""

from __future__ import annotations

from itertools import product

import pytest

from cupyconv import ConvProblem
from cupyconv.gpu import compiler, sources
from cupyconv.kernels.hopper import consumers, takes_turns
from cupyconv.kernels.request import Epilogue
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, PassPlan
from tests.configurations import in_formats
from tests.cubins import disassemble, instructions, no_spills
from tests.hopper import ARCH, BANDS, PLANAR, PLANES, SINGLE, WIDE
from tests.launches import prepare


def with_three_consumers(tiles):
    (tile,) = (tile for tile in tiles if consumers(tile.block_m) == 3)
    return tile


DIVIDED = [
    *product([ConvProblem((4, 14, 14, 512), (254, 3, 3, 512), padding=1, data_format="NHWC",
                          filter_format="OHWI")], BANDS),
    *product([ConvProblem((1, 8, 14, 14, 256), (254, 3, 3, 3, 256), padding=1, dtype="float16",
                          data_format="NDHWC", filter_format="ODHWI")], WIDE),
    *product([ConvProblem((4, 256, 16, 128), (256, 256, 3, 2), padding=(1, 0), dilation=(1, 8),
                          dtype="float16")], PLANAR),
]  # fmt: skip
"""Layers whose filter gradients need many registers for addresses, with the tiles of each."""


def variants():
    """Yield (layer, pass, tile, splits) for every tile, with all passes, formats and phases."""
    layer = ConvProblem(
        (32, 56, 56, 256), (256, 3, 3, 256), padding=1, data_format="NHWC", filter_format="OHWI",
        dtype="float16",
    )  # fmt: skip
    filters_last = in_formats(layer, "NHWC", "HWIO").replace(dtype="bfloat16")
    volume = ConvProblem(
        (2, 8, 28, 28, 64), (64, 3, 3, 3, 64), stride=(1, 2, 2), padding=1, data_format="NDHWC",
        filter_format="ODHWI", dtype="float16",
    )  # fmt: skip
    single, single_last = (problem.replace(dtype="float32") for problem in (layer, filters_last))
    # TMA reads rows of pixels only from multiples of 16 bytes, so each filter row has one tap.
    column = ConvProblem((32, 256, 56, 56), (256, 256, 3, 1), padding=(1, 0), dtype="float16")
    rows, rows_last = (in_formats(column, "NCHW", filters) for filters in ("OIHW", "HWIO"))
    for problem, tiles in (
        (layer, WIDE), (rows, PLANAR), (single, SINGLE), (single, PLANES.tiles)
    ):  # fmt: skip
        yield from ((problem, "forward", tile, 1) for tile in tiles)
    widest = WIDE[0]
    yield from (
        (filters_last, "forward", widest, 1),
        (layer, "backprop_input", widest, 1),
        (filters_last.replace(stride=2), "backprop_input", WIDE[2], 1),
        (volume, "backprop_input", widest, 1),
        (layer, "backprop_filter", widest, 1),
        (layer, "backprop_filter", WIDE[2], 9),
        (filters_last, "backprop_filter", widest, 3),
        *((problem, "backprop_filter", WIDE[3], 8) for problem in (layer, filters_last)),
        *(
            (problem, pass_, with_three_consumers(tiles), splits)
            for problem, tiles, pass_, splits in (
                (layer, WIDE, "backprop_filter", 1),
                (filters_last, WIDE, "backprop_filter", 3),
                (volume, WIDE, "backprop_input", 1),
                (rows_last, PLANAR, "backprop_filter", 1),
            )
        ),
        (rows, "backprop_filter", PLANAR[0], 1),
        (rows, "backprop_filter", PLANAR[2], 3),
        (rows_last, "backprop_filter", PLANAR[2], 1),
        (single_last, "backprop_input", SINGLE[0], 1),
        (single_last, "backprop_filter", PLANES.tiles[1], 3),
        *((problem, "backprop_filter", tile, 3) for problem, tile in DIVIDED),
        *(
            (problem, "backprop_filter", tile, splits)
            for tile in BANDS
            for problem, splits in ((single, 1), (single_last, 1))
        ),
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("problem", "pass_", "tile", "splits"), list(variants()))
def test_kernels_compile_to_wgmma_without_spills(problem, pass_, tile, splits):
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    planned = PassPlan(
        pass_, "cuda-hopper", "", tile=tile, blocks=1, splits=splits, workspace_bytes=1
    )
    launches = prepare(planned, problem, Strides.contiguous(problem), Device.of(ARCH))
    (prepared,) = (launch for launch in launches if launch.entry == "conv_hopper")
    defines = dict(prepared.defines)
    source = sources.load(prepared.source)
    cubin, log = compiler.compile_cubin(source, defines, "sm_90a")
    assert no_spills(log), f"{defines}: {log}"
    listing = disassemble(cubin)
    found = instructions(listing)
    assert ("MULTICAST" in listing) == (defines["CLUSTER"] > 1)
    # The code has all products of a step and three waits; a wait per product would be more.
    in_turn = takes_turns(tile, defines["CLUSTER_SPLITS"])
    rows = tile.block_m // (1 if in_turn else consumers(tile.block_m))
    assert found["HGMMA"] == rows // 64 * 4
    assert found["WARPGROUP"] == 3
    assert found["USETMAXREG"] == 2
    assert found["UTMALDG"] >= 2
    assert bool(found["UTMASTG"]) == (defines["STORE"] == 1)
    assert bool(found["STSM"]) == (splits == 1 and defines["STORE"] != 2)
    assert ("LD.E.128" in listing) == (defines["CLUSTER_SPLITS"] > 1), "sums of other blocks"
    assert found["LDL"] + found["STL"] == 0, "an array is in local memory"


@pytest.mark.thorough
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("filters", [255, 254])
@pytest.mark.parametrize("tile", WIDE, ids=str)
def test_addends_of_odd_channels_do_not_spill(tile, filters, activation):
    """Vectors of one or two elements take more registers for addresses."""
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    layer = ConvProblem(
        (4, 56, 56, 64), (filters, 3, 3, 64), padding=1, data_format="NHWC", filter_format="OHWI",
        dtype="float16",
    )  # fmt: skip
    planned = PassPlan(
        "forward", "cuda-hopper", "", tile=tile, blocks=1, splits=1, workspace_bytes=1
    )
    epilogue = Epilogue(activation, adds=True)
    strides = Strides.contiguous(layer)
    launches = prepare(planned, layer, strides, Device.of(ARCH), epilogue)
    (prepared,) = (launch for launch in launches if launch.entry == "conv_hopper")
    source = sources.load(prepared.source)
    _, log = compiler.compile_cubin(source, dict(prepared.defines), "sm_90a")
    assert no_spills(log), log


def test_planes_compile_without_spills():
    pytest.importorskip("cupy", reason="compiling needs CuPy: pip install 'cupyconv[test]'")
    _, log = compiler.compile_cubin(sources.load("conv_planes.cu"), {}, "sm_90a")
    assert no_spills(log), log
