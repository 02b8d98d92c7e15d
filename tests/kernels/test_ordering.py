"""Accesses that the compiler must not reorder: accumulators, and results of earlier launches."""

from __future__ import annotations

import re

import pytest

from cupyconv.gpu import compiler, sources
from cupyconv.launch import Launch
from tests.cubins import blocks, disassemble, kernels, mnemonic
from tests.emulator.ptx import nvrtc
from tests.kernels.test_sass import FORMS, variants

pytestmark = pytest.mark.costly

pytest.importorskip("cupy", reason="compiling kernels needs CuPy: pip install 'cupyconv[test]'")

ARCHITECTURE = "sm_90a"
HOPPER = [form for form in FORMS if "hopper" in form]


def one_of_each(form: str) -> list[Launch]:
    """Return one launch for each kernel and pass, with and without splits."""
    found = {}
    for one in variants(form):
        defines = dict(one.defines)
        found.setdefault((one.entry, defines.get("PASS"), defines.get("SPLIT")), one)
    return list(found.values())


# -- accumulators of wgmma -------------------------------------------------------------------------

_REGISTER = re.compile(r"%f\d+")
_TIE = re.compile(r"// tied (%f\d+)")


def untied(ptx: str) -> list[str]:
    """Return fences and waits of a kernel that lack ties, and other uses of accumulators between.

    A product reads and writes its accumulators while other instructions run.  Therefore all
    accumulators must be tied directly before each fence and directly after each wait.  Between the
    first fence and the last wait, only products and ties may name accumulators.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    lines = [line for line in lines if line and not line.startswith((".loc", "// begin", "// end"))]
    products = [line for line in lines if "wgmma.mma_async" in line]
    accumulators = {name for line in products for name in _REGISTER.findall(line.partition("}")[0])}
    fences = [at for at, line in enumerate(lines) if line.startswith("wgmma.fence")]
    waits = [at for at, line in enumerate(lines) if line.startswith("wgmma.wait_group")]
    if not (products and fences and waits):
        return ["no products, no fence or no wait"]

    def ties(place: int, step: int) -> set[str]:
        found: set[str] = set()
        while tie := _TIE.fullmatch(lines[place := place + step]):
            found.add(tie[1])
        return found

    wrong = [f"fence of {at}" for at in fences if not ties(at, -1) >= accumulators]
    wrong += [f"wait of {at}" for at in waits if not ties(at, 1) >= accumulators]
    for line in lines[fences[0] : waits[-1]]:
        named = accumulators.intersection(_REGISTER.findall(line))
        if named and line not in products and not _TIE.fullmatch(line):
            wrong.append(line)
    return wrong


def kernel_of(ptx: str, name: str) -> str:
    """Return the PTX of one kernel."""
    return re.split(r"^\.visible \.entry ", ptx.partition(f"entry {name}(")[2], flags=re.M)[0]


@pytest.mark.parametrize("form", HOPPER)
def test_accumulators_are_tied_to_fence_and_wait(form):
    products = [one for one in one_of_each(form) if one.entry == "conv_hopper"]
    assert products
    for one in products:
        ptx = nvrtc.ptx_of(one.source, one.defines, ARCHITECTURE)
        assert untied(kernel_of(ptx, "conv_hopper")) == [], dict(one.defines)


# -- launches that may overlap ---------------------------------------------------------------------

_GLOBAL = (
    *("LDG", "STG", "LD", "ST", "LDGSTS", "ATOM", "ATOMG", "RED", "REDG"),
    *("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED"),
)
"""SASS instructions that access global memory."""

_WAIT = "ACQBULK"
"""The SASS of griddepcontrol.wait."""


def unordered(code: str) -> list[str]:
    """Return the accesses to global memory in a kernel's SASS that its wait does not order.

    A thread can execute these before the wait, or they load through the constant cache, which may
    hold earlier content.
    """
    every = blocks(code)
    found, pending, known = [], [0], {0}
    while pending:
        block = every[pending.pop()]
        for line in block.instructions:
            name = mnemonic(line)
            if name == _WAIT and not line.startswith("@"):
                break
            if name in _GLOBAL:
                found.append(line)
        else:
            reached = (block.follows | block.calls) - known
            known |= reached
            pending += reached
    constant = (line for block in every for line in block.instructions if ".CONSTANT" in line)
    return found + [line for line in constant if mnemonic(line) in _GLOBAL]


def sass_of(one: Launch) -> str:
    """Return the SASS of a launch's kernel."""
    source = sources.load(one.source)
    cubin, _ = compiler.compile_cubin(source, dict(one.defines), ARCHITECTURE)
    return kernels(disassemble(cubin))[one.entry]


@pytest.mark.thorough
@pytest.mark.parametrize("form", HOPPER)
def test_overlapping_kernels_wait_before_any_access(form):
    for one in one_of_each(form):
        code = sass_of(one)
        if one.may_overlap:
            assert _WAIT in code, f"{one.entry} may overlap and does not wait"
        if _WAIT in code:
            assert unordered(code) == [], f"{one.entry} {dict(one.defines)}"


def test_waiting_kernels_are_all_checked():
    folder = sources.directory()
    waiting = {
        path.name for path in folder.glob("*.cu") if "griddepcontrol_wait" in path.read_text()
    }
    launched = {one.source for form in HOPPER for one in variants(form) if one.may_overlap}
    assert launched == waiting == {"conv_hopper.cu"}
    headers = {
        path.name
        for path in (folder / "include").glob("*.cuh")
        if "griddepcontrol_wait" in path.read_text()
    }
    assert headers == {"ptx.cuh"}  # only declares the wait
