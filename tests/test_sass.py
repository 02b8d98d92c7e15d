"""What the compiler makes of the kernels: what no loop may have, and what copies must."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import pytest

from cupyconv import ConvProblem
from cupyconv.gpu import compiler, launches, sources
from cupyconv.gpu.launch import Launch
from cupyconv.planning import Device, Request
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import contenders
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES
from tests.cubins import disassemble, instructions

LAYER = ConvProblem(
    (32, 28, 28, 256), (256, 3, 3, 256), data_format="NHWC", filter_format="OHWI", padding="same"
)
FEW = LAYER.replace(input_shape=(32, 28, 28, 3), filter_shape=(64, 3, 3, 3), stride=2)
DEPTHWISE = LAYER.replace(filter_shape=(256, 3, 3, 1), groups=256)

FORMS = {
    "cuda-generic": (LAYER, "float32", "ieee"),
    "cuda-gather": (LAYER, "float16", "ieee"),
    "cuda-direct": (DEPTHWISE, "float32", "ieee"),
    "cuda-toeplitz": (DEPTHWISE, "float16", "ieee"),
    "cuda-patch": (FEW, "float16", "ieee"),
    "cuda-hopper": (LAYER, "bfloat16", "ieee"),
    "cuda-hopper tf32": (LAYER, "float32", "tf32"),
    "cuda-hopper-bf16x6": (LAYER, "float32", "bf16x6"),
    "cuda-hopper-halo": (LAYER, "float32", "tf32"),
}
"""By name: a layer that the family is for, in which dtype and precision."""

LARGEST = 5000
"""Instructions of a Hopper kernel: none has reason for more, and the compiler takes seconds."""


def variants(form: str, architecture: str = "sm_90a") -> Iterator[Launch]:
    """The launches of all tiles, with and without splits, of every pass that the family takes."""
    problem, dtype, precision = FORMS[form]
    problem, impl = problem.replace(dtype=dtype), form.partition(" ")[0]
    device, strides, found = Device.of(architecture), Strides.contiguous(problem), {}
    for pass_ in PASSES:
        request = Request(problem, pass_, device, precision, strides=strides)
        if FAMILIES[impl].refuses(request) is None:
            for planned in contenders(request, impl, 1000):
                for one in launches.prepare(planned, problem, strides, None, device):
                    found[one.source, one.defines] = one
    yield from found.values()


def listing_of(one: Launch, architecture: str = "sm_90a") -> str:
    cubin, _ = compiler.compile_cubin(sources.load(one.source), dict(one.defines), architecture)
    return disassemble(cubin)


def in_loops(listing: str, pattern: str) -> list[str]:
    """The instructions that match, and that can be come to again after they have been executed."""
    found = []
    for body in re.split(r"^\s*\.section\s+\.text\.", listing, flags=re.M)[1:]:
        # By label: a block's text; it ends with the next label, and goes on there unless it jumps.
        parts = re.split(r"^(\.L_x_\d+):", body, flags=re.M)
        blocks = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
        order = [*blocks, None]
        follows = {
            name: {*re.findall(r"`\((\.L_x_\d+)\)", text)} & blocks.keys()
            for name, text in blocks.items()
        }
        for name, after in pairwise(order):
            last = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?) ;", blocks[name], re.M)[-1:]
            ends = last and re.match(r"(BRA|EXIT|RET|JMP)\b", last[0])
            if after is not None and not ends:
                follows[name].add(after)
        for name, text in blocks.items():
            hits = re.findall(rf"^\s*/\*[0-9a-f]+\*/\s+(.*(?:{pattern}).*?) ;", text, re.M)
            if hits and name in reached(follows, name):
                found += hits
    return found


def reached(follows: dict[str, set[str]], start: str) -> set[str]:
    """What comes after a block, sooner or later."""
    seen: set[str] = set()
    pending = [*follows[start]]
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            pending += follows[name]
    return seen


def test_loops_are_seen():
    listing = """\t.section\t.text.kernel,"ax"
        /*0000*/                   MEMBAR.ALL.GPU ;
.L_x_1:
        /*0010*/                   FADD R1, R1, R2 ;
.L_x_2:
        /*0020*/                   MEMBAR.SC.GPU ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
        /*0040*/              @P1  BRA `(.L_x_4) ;
        /*0050*/                   BRA `(.L_x_1) ;
.L_x_3:
        /*0060*/                   ERRBAR ;
        /*0070*/                   EXIT ;
.L_x_4:
        /*0080*/                   BRA `(.L_x_3) ;
"""
    assert in_loops(listing, "MEMBAR|ERRBAR") == ["MEMBAR.SC.GPU"]
    assert in_loops(listing, "FADD") == ["FADD R1, R1, R2"]


FENCE = r"MEMBAR\S*\.GPU|ERRBAR"
"""Waits for the memory of the whole GPU, which no step of a loop needs."""


@pytest.mark.parametrize("form", FORMS)
def test_no_loop_waits_for_the_whole_gpu(form):
    chosen = list(variants(form))
    count = 3 if "hopper" in form else 1  # of the others, tiles differ in little
    for one in chosen[:: max(len(chosen) // count, 1)]:
        listing = listing_of(one)
        assert in_loops(listing, "MMA|FMA") or one.source == "conv_planes.cu"
        assert in_loops(listing, FENCE) == [], f"{one.source} {dict(one.defines)}"
        if "hopper" in form:
            assert sum(instructions(listing).values()) <= LARGEST, dict(one.defines)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_variant_has_such_a_loop_or_too_many_instructions(form):
    for one in variants(form):
        listing = listing_of(one)
        assert in_loops(listing, FENCE) == [], f"{one.source} {dict(one.defines)}"
        if "hopper" in form:
            assert sum(instructions(listing).values()) <= LARGEST, dict(one.defines)


@pytest.mark.parametrize("storage", ["half_t", "float"])
def test_copies_move_16_bytes_and_have_many_loads_under_way(storage):
    source = sources.load("conv_arrange.cu")
    cubin, _ = compiler.compile_cubin(source, {"STORAGE": storage}, "sm_90a")
    bodies = dict(
        re.findall(r"\.section\s+\.text\.(\w+),(.*?)(?=\.section|\Z)", disassemble(cubin), re.S)
    )
    into, out = bodies["conv_arrange_in"], bodies["conv_arrange_out"]
    assert set(re.findall(r"STG\.\S+", into)) == {"STG.E.128"}
    loads = [found.start() for found in re.finditer(r"LDG\.", into)]
    stores = [found.start() for found in re.finditer(r"STS\.?\S* ", into)]
    after = [place for place in stores if place > loads[0]]
    assert sum(place < after[0] for place in loads) >= 8
    assert set(re.findall(r"LDG\.\S+", out)) == {"LDG.E.128.CONSTANT"}
