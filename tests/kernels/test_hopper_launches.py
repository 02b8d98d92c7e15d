"""Launches of the Hopper kernels: tensor maps, traversals, macros, copies and prepared filters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cupyconv import ConvProblem, formats
from cupyconv.gpu import runtime, tensormaps
from cupyconv.kernels import hopper
from cupyconv.kernels.copies import ROLES_OF, copy_bytes, shape_of
from cupyconv.kernels.family import Choices
from cupyconv.kernels.hopper import (
    has_bands,
    has_taps,
    is_planar,
    is_pointwise,
    matrices,
    split_elements,
    traversals,
)
from cupyconv.kernels.strides import Strides, element_strides
from cupyconv.launch import Im2colMap, Part, TensorMap, TensorMaps, TiledMap
from cupyconv.planning import Device, PassPlan, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import plan_of
from cupyconv.problem import ITEMSIZE, PASSES
from tests import emulator
from tests.agreement import candidate_with
from tests.configurations import HOPPER_CASES, all_formats
from tests.hopper import ARCH, FAMILY, PLANES, random_lines, require_workspace
from tests.launches import prepare


def test_encoded_maps_are_cached_by_address_and_shape():
    made = []

    def encoder(one):
        return lambda address, destination: made.append((one, address))

    one = TiledMap("x", 2, (64, 100), (128,), (64, 64))
    other = replace(one, extents=(64, 50))
    first, second = (
        runtime._Maps(TensorMaps((each, each)), {"x": 0}, SimpleNamespace(encoder=encoder))
        for each in (one, other)
    )
    for maps, address in (
        (first, 4096), (first, 4096), (second, 4096), (first, 8192), (second, 4096),
    ):  # fmt: skip
        assert maps.at((address,)).address % tensormaps.MAP_ALIGNMENT == 0
    assert made == [(one, 4096)] * 2 + [(other, 4096)] * 2 + [(one, 8192)] * 2


COLUMN = ConvProblem((1, 64, 40, 1), (64, 64, 1, 1))
"""Layer whose pixels are contiguous along an axis that is not the innermost."""

GROUPS_WITHIN_A_PIECE = ConvProblem((1, 384, 4, 8), (216, 64, 1, 1), groups=6)

ROWS_WITHIN_A_PIECE = ConvProblem((1, 8, 6, 64), (8, 8, 3, 3))
"""Layer whose images, but not rows, are multiples of 16 bytes."""

MAPPED = (("cuda-hopper", "bfloat16", "ieee"), ("cuda-hopper", "float32", "tf32"))
MAPPED += ((PLANES.name, "float32", "bf16x6"),)
"""Family, dtype and precision for each kind of operands."""


@pytest.mark.parametrize("kind", MAPPED, ids=lambda kind: kind[-1])
def test_tensor_maps_address_every_element(kind):
    """Boxes of tensor maps fit the stages; results are stored in the widest possible vectors."""
    seen = set()
    for request, chosen in planned_on_views(*kind):
        problem, pass_, strides = request.problem, request.pass_, request.memory
        device, made = request.device, hopper.stage(request, chosen)
        launches = FAMILIES[kind[0]].launches(request, chosen)
        product = next(one for one in launches if one.entry == "conv_hopper")
        require_tiles(product, made.problem, chosen, device)
        require_sums_added_up(launches, made, chosen)
        require_workspace(made, chosen)
        require_copies(made, problem, strides)
        require_form(chosen, made, problem, strides)
        gathered, other, result = ROLES_OF[pass_]
        for one in product.arguments[4].maps:
            emulator.tensormap.encode(one, 4096)
        *of_gathered, of_other, of_result = product.arguments[4].maps
        require_macros(dict(product.defines), made.problem, chosen, len(of_gathered))
        traversed = traversals(made.problem, pass_, chosen.divides_frames)
        by_traversal = (
            traversed if isinstance(of_gathered[0], Im2colMap) else [()] * len(of_gathered)
        )
        for one, traversal in zip(of_gathered, by_traversal, strict=True):
            if has_taps(traversal):  # without taps nothing is loaded
                require_map(one, made.problem, gathered, made.gathered, traversal)
        require_map(of_other, made.problem, other, made.other)
        line, rows = chosen.tile.block_k, chosen.tile.block_m
        if other == "w":
            require_box(of_other, made.problem, pass_, chosen.tile)
            require_pixels(of_gathered, made.problem, traversed, line, rows)
        else:
            require_pixels(of_gathered, made.problem, traversed, line, line)
            box, macros = box_of_pixels(made.problem, line, line), dict(product.defines)
            if has_bands(made.problem):  # all filters of a block
                share = chosen.tile.block_n // macros["CLUSTER"]
                box = (line, share if macros["WINDOW_ROWS"] else rows, 1, 1)
            assert of_other.box == box
        how = stored(made.problem, made.strides, pass_, chosen.splits, traversed)
        assert tuple(dict(product.defines)[name] for name in ("STORE", "RUN")) == how, request
        if how[0] == hopper.STORE_BOXES:
            written = hopper.Operand(result, ITEMSIZE[problem.dtype], made.strides)
            require_map(of_result, made.problem, result, written)
            assert of_result.box == (64, 64)
        seen |= {how, chosen.divides_frames}
    assert True in seen
    assert len(seen) >= (4 if problem.dtype == "float32" else 10)


def stored(
    problem: ConvProblem,
    strides: Strides,
    pass_: str,
    splits: int,
    traversed: Sequence[hopper.Traversal],
) -> tuple[int, int]:
    """Return the store and the vector of a result, derived from its elements' addresses."""
    role = ROLES_OF[pass_][-1]
    steps, shape = getattr(strides, role), shape_of(problem, role)
    channel = len(shape) - 1 if role == "w" else problem.data_axes[1]
    is_grouped = role != "w" or problem.filter_axes[0] == channel
    of_group = shape[channel] // (problem.groups if is_grouped else 1)
    run = longest_run(problem, strides, role, (channel,), of_group)
    if problem.dtype == "float32":
        return hopper.STORE_FLOAT, min(run, 2)
    if role == "w" or splits > 1:
        return hopper.STORE_ROWS, run
    is_one = len(traversed) == 1
    if steps[channel] != 1:
        row = problem.data_axes[-1:] if is_planar(problem) else problem.data_axes[2:]
        row = row if is_one or is_planar(problem) else row[1:]  # pixels of a frame
        pixels = math.prod(shape[axis] for axis in row)
        adjacent = {axis.place_step for axis in traversed[0]} == {1}
        return hopper.STORE_COLUMNS, longest_run(problem, strides, role, row, pixels, adjacent)
    pixels = 2 * sum_of_products(shape[:-1], steps[:-1]).ravel() if not is_planar(problem) else []
    gaps = set(np.diff(pixels)) or {16 * shape[-1]}
    is_matrix = len(gaps) == 1 and not min(gaps) % 16 and min(gaps) >= 2 * shape[-1]
    # A box must not extend into the next group.
    is_matrix &= problem.groups == 1 or of_group % 64 == 0
    by_tma = is_one and not is_planar(problem) and is_matrix and strides.alignment == 16
    return hopper.STORE_BOXES if by_tma else hopper.STORE_ROWS, run


def longest_run(problem, strides, role, axes, of_group, is_one=True) -> int:
    """Return the longest vector along axes that is contiguous and aligned everywhere in a group."""
    shape, itemsize = shape_of(problem, role), ITEMSIZE[problem.dtype]
    lies = strides.alignment % 16 + itemsize * sum_of_products(shape, getattr(strides, role))
    last = range(-len(axes), 0)
    lies = np.moveaxis(np.broadcast_to(lies, shape), axes, tuple(last)).reshape(-1, of_group)
    for run in (16 // itemsize, 8 // itemsize, 4 // itemsize, 1):
        if is_one and not of_group % run:
            pieces = lies.reshape(-1, run)
            are_one = (np.diff(pieces) == itemsize).all()
            if are_one and not (pieces[:, 0] % (run * itemsize)).any():
                return run
    return 1


def planned_on_views(impl: str, dtype: str, precision: str):
    """Yield requests and plans of all cases, on contiguous tensors and on views, with splits."""
    family = FAMILIES[impl]
    layers = (ROWS_WITHIN_A_PIECE, COLUMN, GROUPS_WITHIN_A_PIECE)
    for number, layer in enumerate((*layers, *(case.problem for case in HOPPER_CASES))):
        formatted = all_formats(layer.replace(dtype=dtype))
        of_both = formatted[0], formatted[1 + number % 2], formatted[3 + number % 3]
        for turn, problem in enumerate(of_both, number):
            device = replace(Device.of(ARCH), multiprocessors=(132, 1, 3)[turn % 3])
            for gap, pass_ in itertools.product((0, 1 + turn % 3), PASSES):
                alignment = (16, 16, 8, 16, 2)[(turn + gap) % 5]
                strides = replace(inside_larger_ones(problem, gap), alignment=alignment)
                request = Request(problem, pass_, device, precision, strides=strides).reduced
                if family.refuses(request) is None:
                    for tile in tiles_of_layouts(family, request, turn):
                        splits = (1, 2, 1, 3, 1, 9)[(turn + gap) % 6]
                        yield request, plan_of(request, candidate_with(request, impl, tile, splits))
                        choices = Choices(tile=tile, divides_frames=True)
                        if divided := family.candidate(request, choices):
                            yield request, plan_of(request, divided)


def tiles_of_layouts(family, request: Request, number: int):
    """Return one fitting tile for each layout: channels last, and planar if supported."""
    fitting: dict[int, list] = {}
    for one in family.candidates(request):
        fitting.setdefault(one.tile.defines["PLANAR"], []).append(one.tile)
    return [tiles[number % len(tiles)] for tiles in fitting.values()]


def inside_larger_ones(problem: ConvProblem, gap: int) -> Strides:
    """Return strides of views with a gap between pixels and taps; a gap of 0 is contiguous."""
    steps = []
    for shape in (problem.input_shape, problem.filter_shape, problem.output_shape):
        *outer, inner = (size + 8 * bool(gap) for size in shape)
        whole = np.empty((*(size * max(gap, 1) for size in outer), inner), np.int8)
        part = whole[tuple(slice(0, size * max(gap, 1), max(gap, 1)) for size in shape[:-1])]
        steps.append(element_strides(part[..., : shape[-1]]))
    return Strides(*steps)


def require_map(one: TensorMap, problem: ConvProblem, role: str, operand, traversal=()) -> None:
    """Require a tensor map to address every element of every plane, within a traversal's
    coordinates."""
    shape, steps = shape_of(problem, role), getattr(operand.strides, role)
    lies = operand.offset + operand.itemsize * sum_of_products(shape, steps)
    planes = np.arange(operand.planes) * copy_bytes(shape, operand.itemsize)
    expected = lies + planes.reshape(-1, *(1 for _ in shape))
    if is_planar(problem) and role != "w":  # a map may omit pixels that no tap reads
        expected = expected[..., : one.extents[0]]
    inside = [slice(axis.start, axis.start + axis.extent) for axis in traversal]
    expected = expected[:, :, *inside] if traversal else expected
    if has_bands(problem) and role != "w":
        expected = np.moveaxis(expected, 2, 4)  # channels are inside rows and columns
    outwards = one.extents[::-1]
    found = one.offset + sum_of_products(outwards, (*one.strides[::-1], one.itemsize))
    assert (one.role, one.itemsize) == (operand.role, operand.itemsize)
    assert (found == expected.reshape(outwards)).all()


def sum_of_products(shape, steps) -> np.ndarray:
    """Return the sum of products of indices and strides."""
    indices = np.indices(shape, sparse=True)
    return sum((at * step for at, step in zip(indices, steps, strict=True)), start=np.int64(0))


def require_copies(made: hopper.Staged, asked: ConvProblem, strides: Strides) -> None:
    """Require the preceding launch to read every element that it copies, in the copy's order."""
    assert len(made.before) == bool(made.copies)
    for launch in made.before if not has_bands(made.problem) else ():
        *operands, (records,) = launch.arguments
        given = [one for role, offset in made.copies for one in (role, Part("workspace", offset))]
        assert operands == [*given, *[0] * (4 - len(given))]
        assert launch.entry == ("conv_planes" if made.gathered.planes > 1 else "conv_arrange")
        (first, second), blocks = records["of"], 0
        for (role, _), record in zip(made.copies, (first, second), strict=False):
            axes_of = "filter_axes" if role == "w" else "data_axes"
            source = sum_of_products(shape_of(asked, role), getattr(strides, role))
            axes, shape = getattr(made.problem, axes_of), shape_of(made.problem, role)
            named_ = source.transpose(getattr(asked, axes_of))
            expected = named_.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))
            outer, rows = tuple(record["extent"]), math.prod(shape[:-1])
            if launch.entry == "conv_arrange":
                inner, step = record["channels"], record["channel_stride"]
                assert record["tiles"] == math.ceil(rows / 64) * math.ceil(shape[-1] / 64)
                blocks += record["tiles"]
            else:
                inner, step = record["inner"], 1
                assert record["blocks"] == math.ceil(rows * math.ceil(shape[-1] / 8) / 256)
                blocks += record["blocks"]
            found = sum_of_products((*outer, inner), (*record["stride"], step))
            assert (found.reshape(shape) == expected).all()
        assert (launch.grid, launch.block, launch.shared_bytes) == ((blocks,), (256,), 0)


def require_form(planned_: PassPlan, made: hopper.Staged, asked: ConvProblem, strides) -> None:
    """Require that a copied filter can be prepared, and that the prepared filter is not copied."""
    request = Request(asked, planned_.pass_, Device.of(ARCH), strides=strides)
    form = planned_.family.filter_form(request, planned_)
    assert (form is not None) == ("w" in dict(made.copies))
    if form is None:
        return
    orders, planes = formats.filter_formats(asked.spatial_rank), made.other.planes
    order = orders[1 + (made.problem.filter_axes[0] == 0)]
    assert form.name == order + f" in {planes} planes of bfloat16" * (planes > 1)
    assert form.bytes == planes * copy_bytes(made.problem.filter_shape, made.other.itemsize)
    require_copies(made._replace(before=(form.launch,), copies=(("w", 0),)), asked, strides)
    held = hopper.stage(request, planned_, copied_w=True)
    assert held.other == made.other._replace(role="w", offset=0)
    assert held.copies == tuple(one for one in made.copies if one[0] != "w")
    require_copies(held, asked, strides)


def require_tiles(product, problem: ConvProblem, planned_: PassPlan, device: Device) -> None:
    """Require the traversal to cover the tiles of all splits, with one cluster per resident
    place."""
    (traversal,), macros = product.arguments[5], dict(product.defines)
    cluster, added = macros["CLUSTER"], macros["CLUSTER_SPLITS"]
    tiles = planned_.blocks * planned_.splits
    pass_, divided = planned_.pass_, planned_.divides_frames
    steps = max(found[2] for found in matrices(problem, pass_, planned_.tile, 1, divided))
    assert traversal["tiles"] * cluster * added == tiles
    of_group = traversal["tile_columns"] * traversal["phase"]["tile_rows"].sum()
    assert of_group * problem.groups * planned_.splits == traversal["tiles"] * added
    assert traversal["steps_of_split"] == math.ceil(steps / planned_.splits)
    for phase, axes in zip(traversal["phase"], traversals(problem, pass_, divided), strict=True):
        for name in ("pixels", "taps"):
            assert phase[name].prod() == math.prod(getattr(axis, name) for axis in axes)
    resident = max(device.multiprocessors // cluster, 1) * cluster
    assert product.grid == (tiles if added > 1 else min(tiles, resident),)


def require_macros(macros, problem: ConvProblem, planned_: PassPlan, maps: int) -> None:
    """Require the macros of a variant; rows of a filter gradient are windows or filters."""
    pass_ = planned_.pass_
    added = macros["CLUSTER_SPLITS"]
    assert added in (1, planned_.splits)
    assert added * macros["CLUSTER"] <= 8
    told = {
        "SPLIT": planned_.splits > added,
        "SPATIAL": problem.spatial_rank,
        "PHASES": len(traversals(problem, pass_, planned_.divides_frames)),
        "MAPS": maps,
        "POINTWISE": is_pointwise(problem) and not is_planar(problem),
    }
    assert told.items() <= macros.items()
    if pass_ == "backprop_filter":
        ((rows, columns, _),) = matrices(problem, pass_, planned_.tile, planned_.splits)
        assert (rows, columns)[macros["WINDOW_ROWS"]] == problem.K // problem.groups
    else:
        assert not macros["WINDOW_ROWS"]


def require_sums_added_up(launches, made: hopper.Staged, planned_: PassPlan) -> None:
    """Require a thread per vector to add up several splits."""
    *_, last = launches
    is_split = dict(last.defines)["SPLIT"]
    assert (last.entry == "conv_hopper_reduce") == is_split
    if is_split:
        sums = split_elements(made.problem, planned_.pass_, planned_.tile)
        assert (last.grid, last.shared_bytes) == ((math.ceil(sums / 8 / 64),), 0)


def require_pixels(maps, problem: ConvProblem, traversed, line: int, pixels: int) -> None:
    """Require a map of the gathered tensor's pixels for each traversal."""
    if is_planar(problem) or is_pointwise(problem):
        assert {one.box for one in maps} == {box_of_pixels(problem, line, pixels)}
        return
    for one, traversal in zip(maps, traversed, strict=True):
        assert (one.channels, one.pixels) == (line, pixels)
        corners = one.lower, one.extents[1:-1], one.upper, one.element_strides
        for axis, first, size, last, step in zip(reversed(traversal), *corners, strict=True):
            end = axis.base + axis.pixels * axis.stride
            if has_taps(traversal):  # without taps nothing is loaded
                assert range(first, size + last, step) == range(axis.base, end, axis.stride)


def box_of_pixels(problem: ConvProblem, line: int, pixels: int) -> tuple[int, ...]:
    """Return the box of one line of channels and ``pixels`` pixels, or of the planar layout."""
    if has_bands(problem):
        return (line, line, 1, 1)
    if is_planar(problem):
        return (line, *(1 for _ in problem.data_axes[3:]), line, 1)
    return (line, pixels, 1)


def require_box(one: TiledMap, problem: ConvProblem, pass_: str, tile) -> None:
    """Require the box of w: a contiguous line, one tap, and a line of k or the block's columns."""
    line = tile.block_k
    filters_inner = problem.filter_axes[0] == len(problem.filter_shape) - 1
    inner = "filters" if filters_inner else "channels"
    summed = "filters" if pass_ == "backprop_input" else "channels"
    columns = tile.block_n // tile.defines["CLUSTER"]
    others = columns if inner == summed else line
    assert one.box == ((line, others, 1, 1) if filters_inner else (line, 1, others, 1))


@pytest.mark.thorough
def test_planned_tensor_maps_are_valid():
    """The emulator's encoders check every map against the driver's documented rules."""
    device = Device.of(ARCH)
    taken = refused = 0
    # A stride phase without taps has a corner outside the limits of a map.
    corner = ConvProblem(
        (1, 4, 1, 8), (200, 1, 8, 8), stride=(2, 1), dilation=(2, 1), padding=((267, 250), (0, 0)),
        data_format="NHWC", filter_format="HWIO", dtype="float16",
    )  # fmt: skip
    stretched = (
        problem.replace(padding=tuple((before * 9, after) for before, after in problem.padding))
        for problem in random_lines(2500, seed=5)
    )
    for problem in (corner, *stretched):
        for pass_ in PASSES:
            request = Request(problem, pass_, device)
            if FAMILY.refuses(request) is not None:
                refused += 1
                continue
            pass_plan = plan_pass(Request(problem, pass_, device), "cuda-hopper")
            strides = Strides.contiguous(problem)
            launches = prepare(pass_plan, problem, strides, device)
            product = next(one for one in launches if one.entry == "conv_hopper")
            for argument in product.arguments:
                if isinstance(argument, TensorMaps):
                    for one in argument.maps:
                        emulator.tensormap.encode(one, 4096)
                    taken += 1
    assert taken > 1500
    assert refused > 100


def test_backprop_input_walks_visit_every_contribution_once():
    """The traversals visit each (input, tap, output) of the definition exactly once."""
    for problem in random_lines(300, seed=6):
        for axis, extent in enumerate(problem.input_sizes):
            rule = problem.axes[axis]
            expected = sorted(
                (output * rule.stride - rule.pad_before + tap * rule.dilation, tap, output)
                for output in range(rule.output)
                for tap in range(rule.filter)
            )
            phases = {
                traversal[axis]
                for traversal in traversals(problem, "backprop_input")
                if traversal[axis].taps
            }
            met = sorted(
                (
                    traversal.place_first + pixel * traversal.place_step,
                    traversal.filter_first + tap * traversal.filter_step,
                    traversal.base + pixel * traversal.stride + tap * traversal.spacing,
                )
                for traversal in phases
                for pixel in range(traversal.pixels)
                for tap in range(traversal.taps)
            )
            inside = [one for one in expected if 0 <= one[0] < extent]
            assert [one for one in met if 0 <= one[2] < rule.output] == inside
