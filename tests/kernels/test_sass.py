"""Machine code (SASS) of the kernels: instructions that must or must not occur."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cupyconv import ConvProblem
from cupyconv.gpu import compiler, sources
from cupyconv.kernels.request import Epilogue
from cupyconv.kernels.strides import Strides
from cupyconv.launch import Launch
from cupyconv.planning import Device, Request
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import contenders
from cupyconv.problem import PASSES
from tests import launches, loops
from tests.activations import ACTIVATIONS
from tests.agreement import plan_without_copies
from tests.configurations import in_formats
from tests.cubins import (
    blocks,
    disassemble,
    instructions,
    kernels,
    loads_and_waits,
    main_loop,
    mnemonic,
)

pytestmark = pytest.mark.costly

LAYER = ConvProblem(
    (32, 28, 28, 256), (256, 3, 3, 256), data_format="NHWC", filter_format="OHWI", padding="same"
)
FEW = LAYER.replace(input_shape=(32, 28, 28, 3), filter_shape=(64, 3, 3, 3), stride=2)
DEPTHWISE = LAYER.replace(filter_shape=(256, 3, 3, 1), groups=256)

FORMS = {
    "cuda-generic": (LAYER, "float32", "ieee"),
    "cuda-gather": (LAYER, "float16", "ieee"),
    "cuda-gather float32": (LAYER, "float32", "ieee"),
    "cuda-gather tf32": (LAYER, "float32", "tf32"),
    "cuda-direct": (DEPTHWISE, "float32", "ieee"),
    "cuda-toeplitz": (DEPTHWISE, "float16", "ieee"),
    "cuda-patch": (FEW, "float16", "ieee"),
    "cuda-hopper": (LAYER, "bfloat16", "ieee"),
    "cuda-hopper tf32": (LAYER, "float32", "tf32"),
    "cuda-hopper-bf16x6": (LAYER, "float32", "bf16x6"),
}
"""Layer, dtype and precision, keyed by a family and its operands."""

COPIES = ("conv_arrange.cu", "conv_fold.cu", "conv_planes.cu")
"""Kernels without products."""

FORMS_OF = ("CLUSTER", "SPLIT")

LARGEST = 5000
"""Largest number of instructions of a Hopper kernel, so that compiling takes seconds (hand-set)."""


def variants(form: str, on: str | Device = "sm_90a") -> Iterator[Launch]:
    """Yield launches with all tiles, with and without splits, for every pass of a family."""
    problem, dtype, precision = FORMS[form]
    problem, impl = problem.replace(dtype=dtype), form.partition(" ")[0]
    device, strides, found = Device.of(on), Strides.contiguous(problem), {}
    for pass_ in PASSES:
        request = Request(problem, pass_, device, precision, strides=strides)
        if FAMILIES[impl].refuses(request) is None:
            plans = (contenders(request, impl, 1000), launches.with_every_tile(request, impl))
            for planned in itertools.chain(*plans):
                for one in launches.prepare(planned, problem, strides, device):
                    found[one.source, one.defines] = one
    yield from found.values()


def listing_of(one: Launch, architecture: str = "sm_90a") -> str:
    cubin, _ = compiler.compile_cubin(sources.load(one.source), dict(one.defines), architecture)
    return disassemble(cubin)


def in_loops(listing: str, pattern: str) -> list[str]:
    """Return the matching instructions that are in a loop, or in a function that a loop calls."""
    found = []
    for code in kernels(listing).values():
        every = blocks(code)
        follows = [block.follows for block in every]
        again = {number for number in range(len(every)) if number in loops.reached(follows, number)}
        anywhere = [block.follows | block.calls for block in every]
        for called in set().union(*(every[number].calls for number in again)):
            again |= {called} | loops.reached(anywhere, called)
        for number in sorted(again):
            found += [one for one in every[number].instructions if re.search(pattern, one)]
    return found


FENCE = r"MEMBAR\S*\.(GPU|SYS)|ERRBAR"
"""Fences for the whole GPU or the system, which no loop needs."""


@pytest.mark.thorough
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMS)
def test_loops_have_no_gpu_wide_fence(form, every):
    # One variant for each way to load and store, since other tiles differ little.
    names = () if every else FORMS_OF
    chosen = {
        (one.source, *(dict(one.defines).get(name) for name in names), every and one.defines): one
        for one in variants(form)
    }
    for one in chosen.values():
        listing = listing_of(one)
        assert in_loops(listing, "MMA|FMA") or one.source in COPIES
        assert in_loops(listing, FENCE) == [], f"{one.source} {dict(one.defines)}"
        if "hopper" in form:
            assert sum(instructions(listing).values()) <= LARGEST, dict(one.defines)


def activated(form: str, activation: str) -> list[Launch]:
    """Return variants with an activation, for passes that apply one, narrowest tiles first."""
    found = []
    for one in variants(form):
        defines = dict(one.defines)
        if one.source not in COPIES and defines["PASS"] < 2:
            defines |= Epilogue(activation).defines
            place = (defines["BLOCK_N"], -defines["SPLIT"])
            found.append((place, replace(one, defines=tuple(defines.items()))))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


@pytest.mark.thorough
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", [form for form in FORMS if "hopper" in form])
def test_activations_do_not_make_kernels_long(form, activation, every):
    found = activated(form, activation)
    for one in found if every else (found[0], found[-1]):
        executed = instructions(listing_of(one))
        assert sum(executed.values()) <= LARGEST, dict(one.defines)
        assert executed["FCHK"] == 0, "a division checks for its slow path"


@pytest.mark.parametrize(("storage", "bands"), [("half_t", 0), ("float", 0), ("float", 1)])
def test_copies_store_16_bytes_with_8_loads_in_flight(storage, bands):
    source = sources.load("conv_arrange.cu")
    cubin, _ = compiler.compile_cubin(source, {"STORAGE": storage, "BANDS": bands}, "sm_90a")
    listing = disassemble(cubin)
    assert set(re.findall(r"STG\.\S+", listing)) == {"STG.E.128"}
    loads = [found.start() for found in re.finditer(r"LDG\.", listing)]
    stores = [found.start() for found in re.finditer(r"STS\.?\S* ", listing)]
    after = [place for place in stores if place > loads[0]]
    assert sum(place < after[0] for place in loads) >= 8


@pytest.mark.thorough
def test_cuda_hopper_main_loop_increments_descriptors():
    """The loop has one addition per operand and two upper halves of descriptors per product."""
    for one in variants("cuda-hopper"):
        defines = dict(one.defines)
        if defines["PASS"] != 0 or defines["SPLIT"] or one.source in COPIES:
            continue
        loop = main_loop(kernels(listing_of(one))["conv_hopper"], "HGMMA")
        products = sum(mnemonic(line) == "HGMMA" for line in loop)
        assert len(loop) <= 45 + 4 * products, defines


BIAS = {"STORAGE": "half_t", "INDEX": "int", "VECTOR": 8, "CHANNELS_LAST": 1, "CHANNEL_LANES": 8}


def adding(form: str) -> tuple[Launch, str]:
    """Return a reduction launch of a family, and the architecture to compile it for."""
    architecture = "sm_90a" if "hopper" in form else "sm_80"
    found = (one for one in variants(form, architecture) if one.entry.endswith("_reduce"))
    return next(found), architecture


@pytest.mark.parametrize("form", [*(form for form in FORMS if form != "cuda-generic"), "bias"])
def test_reductions_have_16_loads_in_flight(form):
    if form == "bias":
        entry, source = "conv_backprop_bias_reduce", sources.load("conv_backprop_bias.cu")
        listing = disassemble(compiler.compile_cubin(source, BIAS, "sm_80")[0])
    else:
        one, architecture = adding(form)
        entry, listing = one.entry, listing_of(one, architecture)
    loads, waits = loads_and_waits(main_loop(kernels(listing)[entry], r"\bLDG"))
    assert waits == 1
    assert loads >= 16


# cp.async does not support single 16-bit elements, and sm_75 does not have it.
@pytest.mark.parametrize(
    ("architecture", "order", "at_once"), [("sm_80", "first", 8), ("sm_75", "last", 2)]
)
def test_cuda_gather_has_loads_in_flight_without_cp_async(architecture, order, at_once):
    problem = LAYER.replace(dtype="float16")
    if order == "first":
        problem = in_formats(problem, "NCHW", "OIHW")
    device, strides = Device.of(architecture), Strides.contiguous(problem)
    planned = plan_without_copies(problem, "cuda-gather", device)["forward"]
    (one,) = launches.prepare(planned, problem, strides, device)
    code = kernels(listing_of(one, architecture))["conv_gather"]
    loads, waits = loads_and_waits(line for block in blocks(code) for line in block.instructions)
    assert loads >= at_once * waits


def test_cuda_gather_main_loop_is_short_without_divisions():
    form = "cuda-gather"
    (chosen,) = [
        one
        for one in variants(form, "sm_80")
        if (tile := dict(one.defines))["PASS"] == 0 and not tile["SPLIT"]
        and (tile["BLOCK_M"], tile["BLOCK_N"]) == (128, 128)
    ]  # fmt: skip
    loop = main_loop(kernels(listing_of(chosen))["conv_gather"], r"\bHMMA")
    names = Counter(mnemonic(line) for line in loop)
    assert not names.keys() & {"MUFU", "I2F", "F2I", "I2FP"}
    assert len(loop) <= 4 * names["HMMA"]


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["cuda-gather", "cuda-gather float32", "cuda-gather tf32"])
def test_cuda_gather_loops_have_no_divisions(form):
    """The largest tile of every pass has no division in a loop."""
    largest = {}
    for one in variants(form, "sm_80"):
        tile = dict(one.defines)
        if one.source == "conv_gather.cu" and not tile["SPLIT"]:
            largest.setdefault(tile["PASS"], []).append((tile["BLOCK_M"] * tile["BLOCK_N"], one))
    assert len(largest) == len(PASSES)
    for found in largest.values():
        _, one = max(found, key=lambda pair: pair[0])
        listing = kernels(listing_of(one, "sm_80"))["conv_gather"]
        loop = main_loop(listing, r"\b(HMMA|FFMA)")
        assert not {mnemonic(line) for line in loop} & {"MUFU", "I2F", "F2I", "I2FP"}, one.defines


def test_cuda_gather_main_loop_has_no_loop_over_taps():
    found = variants("cuda-gather tf32", "sm_80")
    one = next(one for one in found if dict(one.defines)["PASS"] == 2)
    every = blocks(kernels(listing_of(one, "sm_80"))["conv_gather"])
    nested = [loop.nodes for loop in loops.nest([block.follows for block in every])]
    products = [
        any(mnemonic(line) == "HMMA" for n in nodes for line in every[n].instructions)
        for nodes in nested
    ]
    (main,) = itertools.compress(nested, products)
    assert [nodes for nodes in nested if nodes < main] == []


@pytest.mark.parametrize("last", [0, 1])
def test_bias_gradient_loops_have_no_divisions(last):
    macros = {**BIAS, "CHANNELS_LAST": last, "CHANNEL_LANES": 8 if last else 1}
    cubin, _ = compiler.compile_cubin(sources.load("conv_backprop_bias.cu"), macros, "sm_80")
    listing = disassemble(cubin)
    assert in_loops(listing, "FADD")
    assert in_loops(listing, "MUFU|I2F|F2I") == []


@pytest.mark.thorough
def test_cuda_toeplitz_has_four_loads_in_flight():
    """Loads of filter rows and source lines have at least four loads per wait on average."""
    for one in variants("cuda-toeplitz", "sm_80"):
        code = kernels(listing_of(one, "sm_80"))["conv_toeplitz"]
        loads, waits = loads_and_waits(line for each in blocks(code) for line in each.instructions)
        assert loads >= 4 * waits, one.defines


@pytest.mark.thorough
def test_cuda_direct_loops_have_no_divisions():
    for one in variants("cuda-direct", "sm_80"):
        listing = listing_of(one, "sm_80")
        assert in_loops(listing, "FFMA"), one.defines
        assert in_loops(listing, "MUFU|I2F|F2I") == [], one.defines


@pytest.mark.thorough
def test_cuda_patch_filter_gradient_reads_no_sums_back():
    """Warps that share pixels add their sums in shared memory, not in global memory."""
    found = [one for one in variants("cuda-patch", "sm_80") if "WARPS_K" in dict(one.defines)]
    assert any(dict(one.defines)["WARPS_K"] > 1 for one in found)
    for one in found:
        executed = instructions(kernels(listing_of(one, "sm_80"))["conv_patch"])
        assert executed["LDGSTS"]
        assert not executed["LDG"]
