"""The Hopper kernels in the emulator: exact on integers, in three schedules.

Most data is channels last, with filters in both formats that need no copy.  Tiles, clusters,
splits and schedules vary from case to case.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvProblem
from cupyconv.kernels import hopper
from cupyconv.kernels.family import Choices
from cupyconv.planning import Device, Request
from cupyconv.problem import PASSES
from tests import agreement, emulator, launches
from tests.agreement import compute, fits, plan_with
from tests.configurations import HOPPER_CASES, Data, in_formats, integer_data, random_data
from tests.hopper import (
    ARCH,
    BANDS,
    BY_PLANES,
    FAMILY,
    PLANES,
    SINGLE,
    WIDE,
    last_axes,
    random_lines,
    require_exact,
)

pytestmark = pytest.mark.costly

IN_TURN = tuple(zip(HOPPER_CASES, cycle(WIDE)))
"""Every edge case with a tile, and every tile, since there are more cases than tiles."""


@pytest.mark.parametrize("other", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("number", "case", "tile"),
    [pytest.param(number, *one, id=one[0].name) for number, one in enumerate(IN_TURN)],
)
def test_edge_cases_are_exact(number, case, tile, other):
    """Each case is run in one of two formats; the other takes the slow tests."""
    turn = (number + other) % 2
    problem = last_axes(case.problem)[turn]
    problem = problem.replace(dtype="bfloat16" if number % 4 == 3 else "float16")
    with emulator.settings(emulator.SCHEDULES[(number + turn) % 3]):
        assert require_exact(problem, tile=tile, splits=(1, 3, 1, 9)[number % 4]) == PASSES


def test_edge_cases_take_every_tile():
    assert {tile for _, tile in IN_TURN} == set(WIDE)


@pytest.mark.parametrize("splits", [7, 9])
def test_splits_may_have_one_step_or_none(splits):
    """Nine steps are divided into seven splits, of which two are empty, or into nine splits."""
    problem = ConvProblem((1, 64, 6, 7), (64, 64, 3, 3), padding=1, dtype="float16")
    problem = last_axes(problem)[0]
    request = Request(problem, "forward", Device.of(ARCH))
    for tile in FAMILY.fitting_tiles(request):
        assert FAMILY.candidate(request, Choices(tile=tile, splits=9)).splits == 9
        assert FAMILY.candidate(request, Choices(tile=tile, splits=10)) is None
    assert {one.splits for one in FAMILY.candidates(request)} == {1}
    chosen = plan_with(problem, "cuda-hopper", emulator.device(ARCH), splits=splits)
    assert chosen["forward"].splits == splits
    agreement.require_exact(emulator, problem, impl=chosen, arch=ARCH, passes=("forward",))


KINDS = {
    "float16": ("cuda-hopper", "float16", "ieee"),
    "bfloat16": ("cuda-hopper", "bfloat16", "ieee"),
    "tf32": ("cuda-hopper", "float32", "tf32"),
    "planes": (PLANES.name, "float32", "bf16x6"),
}
"""Family, dtype and precision, keyed by kind of operands."""


@pytest.mark.parametrize("pass_", ["forward", "backprop_filter"])
def test_clusters_add_splits_to_the_bits_of_the_second_launch(pass_, monkeypatch):
    """Both add the splits in order.  All runs have the same bits."""
    problem = last_axes(ConvProblem((2, 32, 12, 9), (72, 32, 3, 3), padding=1))[0]
    device, data = emulator.device(ARCH), random_data(problem)
    impl, _, precision = KINDS["tf32"]
    small = [tile for tile in BANDS if max(tile.block_m, tile.block_n) <= 128]
    for tile in SINGLE[1::4] if pass_ == "forward" else small:
        results = []
        for turn, most in enumerate((8, 8, 1)):
            monkeypatch.setattr(hopper, "CLUSTER_BLOCKS", most)
            how = {"passes": (pass_,), "precision": precision, "tile": tile, "splits": 3}
            plan = plan_with(problem, impl, device, **how)
            before = plan_with(problem, impl, device, **{**how, "splits": 1})
            grows = plan[pass_].workspace_bytes > before[pass_].workspace_bytes
            assert grows == (most == 1)
            with emulator.settings(emulator.SCHEDULES[turn]):
                how = {"impl": plan, "arch": ARCH, "precision": precision}
                results.append(compute(emulator, pass_, problem, data, **how))
        assert all((one == results[0]).all() for one in results)


def test_pairs_of_blocks_reuse_stages_in_clusters_of_splits():
    """Each split has more steps than a block has stages."""
    problem = ConvProblem((1, 320, 9, 8), (136, 320, 3, 3), padding=1, dtype="float16")
    for schedule in emulator.SCHEDULES:
        with emulator.settings(schedule):
            require_exact(last_axes(problem)[0], passes=("forward",), tile=WIDE[0], splits=4)


def long_integers(problem: ConvProblem, pass_: str, share: int) -> Data:
    """Return integers whose sums are exact in float32, and which need every plane of bfloat16.

    The bits of a product are given to the first operand (``share`` 0), to the second (1), or half
    to each (2), so that all six products of planes are needed.
    """
    taps = math.prod(problem.filter_sizes)
    terms = {
        "forward": taps * (problem.C // problem.groups),
        "backprop_input": taps * (problem.K // problem.groups),
        "backprop_filter": problem.N * math.prod(problem.output_sizes),
    }[pass_]
    bits = 22 - max(terms, 1).bit_length()  # leaves room for rounded-up planes and the bias
    first = (bits, 0, bits // 2)[share]
    generator = np.random.default_rng(share)

    def integers(shape: tuple[int, ...], bits: int) -> np.ndarray:
        return generator.integers(-(2**bits), 2**bits + 1, shape).astype(np.float32)

    dy_bits = first if pass_ == "backprop_input" else bits - first
    return Data(
        integers(problem.input_shape, first),
        integers(problem.filter_shape, bits - first),
        integers(problem.output_shape, dy_bits),
        integers(problem.bias_shape, 3),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_random_layers_are_exact(kind, count):
    """Few layers are tested, because each needs separately compiled kernels."""
    impl, dtype, precision = KINDS[kind]
    ran = 0
    for number, random in enumerate(random_lines(8 * count, seed=7)[:count]):
        problem = random.replace(dtype=dtype)
        choices = {"tile": number, "splits": 1 + 2 * (number % 2)}
        with emulator.settings(emulator.SCHEDULES[number % 3]):
            passes = require_exact(problem, impl, precision, **choices)
            for pass_ in passes if kind == "planes" else ():
                data = long_integers(problem, pass_, (number + PASSES.index(pass_)) % 3)
                chosen = plan_with(
                    *(problem, impl, emulator.device(ARCH)),
                    passes=(pass_,),
                    precision=precision,
                    **choices,
                )
                got = compute(emulator, pass_, problem, data, **{**BY_PLANES, "impl": chosen})
                expected = compute(cupyconv, pass_, problem, data, impl="reference")
                assert np.array_equal(got, expected), f"{pass_} of {problem}"
        ran += len(passes)
    assert ran >= 4 * count / 3


# (groups, channels per group, filters per group): the supported passes, which sum over whole lines
# or over pixels.
PARTS_OF_LINES = {
    (2, 40, 40): ("backprop_filter",),
    (3, 32, 72): ("backprop_filter",),
    (2, 64, 40): ("forward", "backprop_filter"),
    (2, 72, 64): ("backprop_input", "backprop_filter"),
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("groups", PARTS_OF_LINES, ids=lambda one: "-".join(map(str, one)))
def test_groups_smaller_than_a_line_are_exact(groups, every):
    """A line extends into the next group; products do not sum over that part, and drop it."""
    count, channels, filters = groups
    turn = list(PARTS_OF_LINES).index(groups)
    layer = ConvProblem(
        (2, count * channels, 5, 56), (count * filters, channels, 3, 3), padding=1, groups=count,
        dtype="float16",
    )  # fmt: skip
    orders = [*last_axes(layer), layer]
    selection = orders if every else orders[turn % 3 :][:1]
    for number, (problem, tile) in enumerate(zip(selection, WIDE[turn:], strict=False)):
        with emulator.settings(emulator.SCHEDULES[(number + turn) % 3]):
            passes = require_exact(problem, tile=tile, splits=1 + 2 * (number % 2))
        assert passes == PARTS_OF_LINES[groups]


def test_groups_smaller_than_a_line_are_independent():
    """A NaN in one group does not reach results of other groups."""
    layer = ConvProblem((1, 128, 4, 8), (80, 64, 1, 1), groups=2, dtype="float16")
    problem = in_formats(layer, "NHWC", "OHWI")
    data = integer_data(problem)
    x, dy = data.x.astype("float16"), data.dy.astype("float16")
    x[0, 1, 2, 70] = dy[0, 1, 2, 50] = np.nan
    how = {"impl": "cuda-hopper", "arch": ARCH, **problem.keywords}
    y = emulator.conv_forward(x, data.w, **how)
    assert np.argwhere(np.isnan(y)).tolist() == [[0, 1, 2, k] for k in range(40, 80)]
    dw = emulator.conv_backprop_filter(x, problem.filter_shape, dy, **how)
    reached = np.zeros((80, 64), bool)
    reached[40:, 70 - 64] = reached[50] = True
    assert (np.isnan(dw[:, 0, 0]) == reached).all()


@pytest.mark.parametrize("operands", ["float16", "bf16x6"])
def test_products_must_sum_over_whole_lines(operands):
    layer = last_axes(ConvProblem((2, 96, 5, 6), (128, 48, 3, 3), padding=1, groups=2))[0]
    family, problem, precision = (
        (FAMILY, layer.replace(dtype="float16"), "ieee")
        if operands == "float16"
        else (PLANES, layer, "bf16x6")
    )
    assert fits(problem, family.name, ARCH, precision) == PASSES[1:]
    refusal = family.refuses(Request(problem, "forward", Device.of(ARCH), precision))
    assert refusal == (
        "each group must have a multiple of 64 channels, since TMA loads lines of 64: groups have "
        "48"
    )
    narrow = ConvProblem((2, 62, 5, 6), (128, 31, 3, 3), padding=1, groups=2)
    narrow = in_formats(narrow, "NHWC", "OHWI").replace(dtype=problem.dtype)
    for pass_ in PASSES:
        refusal = family.refuses(Request(narrow, pass_, Device.of(ARCH), precision))
        assert refusal.endswith("half filled by one group: groups have 31 and 64")


@pytest.mark.parametrize("places", [6, 32])
def test_tiles_are_visited_in_bands(places):
    """A band has eight rows of tiles, visited column by column, so that operands stay in L2."""
    problem = ConvProblem(
        (1, 32, 40, 8), (128, 1, 1, 8), data_format="NHWC", filter_format="OHWI", dtype="float16"
    )  # fmt: skip
    bands = (range(8), range(8, 10))
    tiles = [(row, column) for band in bands for column in range(2) for row in band]
    for block in range(min(places, len(tiles))):
        y, expected = tiles_of_block(problem, "forward", places, block)
        mine = tiles[block::places]
        found, expected = (one.reshape(10, 128, 2, 64) for one in (y, expected))
        for row, column in tiles:
            here = found[row, :, column]
            whole = expected[row, :, column] if (row, column) in mine else np.nan
            np.testing.assert_array_equal(here, np.broadcast_to(whole, here.shape))


def test_first_block_of_a_round_has_the_last_tile_of_the_next():
    """Each stride phase has two tiles; the blocks have tiles 0 and 3, and tiles 1 and 2."""
    problem = ConvProblem((1, 512, 64), (64, 2, 64), stride=2, data_format="NWC",
                          filter_format="OWI", dtype="float16")  # fmt: skip
    for block, (even, odd) in enumerate(((0, 1), (1, 0))):
        dx, expected = tiles_of_block(problem, "backprop_input", 2, block)
        found, whole = (one.reshape(2, 128, 2, 64) for one in (dx, expected.copy()))
        whole[1 - even, :, 0] = whole[1 - odd, :, 1] = np.nan
        np.testing.assert_array_equal(found, whole)


def tiles_of_block(problem, pass_, places, block):
    """Return what one block of some multiprocessors writes, and the whole result."""
    data = integer_data(problem)
    data = replace(data, bias=np.zeros_like(data.bias))
    backend = emulator.convolutions.backend(ARCH)
    backend.device = replace(backend.device, multiprocessors=places)
    (tile,) = (t for t in WIDE if (t.block_m, t.block_n) == (128, 64))
    chosen = plan_with(problem, "cuda-hopper", backend.device, tile=tile, passes=(pass_,))
    arrays = {"x": data.x, "w": data.w, "y": data.dy}
    result = {"forward": "y", "backprop_input": "x"}[pass_]
    arrays[result] = emulator.memory.empty(arrays[result].shape, np.float16, "result")
    placed = [
        one if name == result else emulator.memory.array(one, name) for name, one in arrays.items()
    ]
    with emulator.settings(blocks=[block]):
        launches.run(backend, problem, chosen[pass_], *placed)
    return placed[list(arrays).index(result)], compute(
        cupyconv, pass_, problem, data, impl="reference"
    )
