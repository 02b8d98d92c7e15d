"""What the kernels and the host code both say, of which neither can see the other's."""

import re
from functools import cache
from itertools import product

import pytest

from cupyconv import ConvProblem
from cupyconv.gpu import bias, copies, hopper, launches, sources
from cupyconv.planning import Device, Request, cost, plan_pass
from cupyconv.planning import copies as planned_copies
from cupyconv.planning.families import FAMILIES, patch, toeplitz
from cupyconv.planning.families import hopper as hopper_tiles
from cupyconv.planning.families.hopper_bf16x6 import PLANES
from cupyconv.planning.strides import Strides
from cupyconv.problem import PASSES
from tests.configurations import in_formats

CONSTANTS = [
    ("include/parts.cuh", "ADDING_THREADS", cost.ADDING_THREADS),
    ("include/parts.cuh", "PARTS_AT_ONCE", cost.PARTS_AT_ONCE),
    ("include/hopper.cuh", "CONSUMERS", hopper_tiles.TURN_BARRIERS),
    ("include/hopper.cuh", "STORE_ROWS", hopper.STORE_ROWS),
    ("include/hopper.cuh", "STORE_BOXES", hopper.STORE_BOXES),
    ("include/hopper.cuh", "STORE_FLOAT", hopper.STORE_FLOAT),
    ("include/hopper.cuh", "STORE_COLUMNS", hopper.STORE_COLUMNS),
    ("conv_hopper.cu", "COLUMNS", hopper_tiles.SUMS_PIECE),
    ("conv_planes.cu", "THREADS", copies.THREADS),
    ("conv_planes.cu", "VECTOR", copies.VECTOR),
    ("conv_planes.cu", "PLANES", PLANES),
    ("conv_arrange.cu", "THREADS", copies.THREADS),
    ("conv_arrange.cu", "TILE", planned_copies.TILE),
    ("conv_backprop_bias.cu", "THREADS", bias.THREADS),
    ("conv_patch.cu", "WARPS", patch.WARPS),
    ("conv_toeplitz.cu", "CHANNELS", toeplitz.CHANNELS),
]
"""Integers of a kernel file by name, and those of the host code that have to be the same."""


@pytest.mark.quick
@pytest.mark.parametrize(("file", "name", "expected"), CONSTANTS)
def test_constants_are_those_of_the_host_code(file, name, expected):
    text = (sources.directory() / file).read_text()
    pattern = rf"^(?: *constexpr int (?:\w+ = \w+, )*{name} = (\d+)[,;]|#define {name} (\d+)$)"
    (found,) = re.findall(pattern, text, re.M)
    assert int("".join(found)) == expected


def comment_and_code(text):
    """The comment that a file begins with, as one line, and its code without any."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if not line.startswith("//"))
    comment = " ".join(line.removeprefix("//").strip() for line in lines[:first])
    return comment, re.sub(r"//.*", "", text)


def listed(source):
    """The macros by which a kernel file, or a header of it, says that variants are chosen."""
    found = []
    for _, text in ((source.name, source.text), *source.headers):
        comment, _ = comment_and_code(text)
        while comment != (comment := re.sub(r"\([^()]*\)", "", comment)):  # what is in brackets
            pass
        for names in re.findall(r"with? -D: ([^.]*)\.|by -D: ([^.]*)\.", comment):
            found += re.findall(r"\b[A-Z][A-Z_]+\b", "".join(names))
        found += re.findall(r"-D([A-Z_]+)", comment)
    return found


LAYERS = [
    ConvProblem((8, 64, 28, 28), (64, 64, 3, 3), padding=1, stride=2),
    ConvProblem((8, 64, 28, 28), (64, 64, 3, 3), padding=1),
    ConvProblem((1, 32, 28, 28), (8, 32, 3, 3), padding=1),
    ConvProblem((8, 3, 64, 64), (64, 3, 7, 7), padding=3, stride=2),
    ConvProblem((8, 64, 28, 28), (64, 1, 7, 7), padding=3, groups=64),
]


@cache
def passed():
    """The macros of every launch of the layers above, by kernel file."""
    device = Device.of("sm_90a")
    made = []
    for layer, dtype, formats in product(
        LAYERS, ("float16", "float32"), (("NCHW", "OIHW"), ("NHWC", "HWIO"))
    ):
        problem = in_formats(layer.replace(dtype=dtype), *formats)
        strides = Strides.contiguous(problem)
        made += bias.prepare_bias(problem, strides, device)[0]
        for pass_, (impl, family), precision in product(
            PASSES, FAMILIES.items(), ("tf32", "bf16x6")
        ):
            request = Request(problem, pass_, device, precision)
            if family.on_gpu and family.refuses(request) is None:
                planned = plan_pass(problem, pass_, device, impl, precision)
                made += launches.prepare(planned, problem, strides, None, device)
    found = {}
    for launch in made:
        found.setdefault(launch.source, set()).update(name for name, _ in launch.defines)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(path.name for path in sources.directory().glob("*.cu")))
def test_macros_are_listed_where_a_kernel_begins_and_are_used(name):
    source = sources.load(name)
    names = listed(source)
    assert sorted(names) == sorted(passed()[name])
    code = " ".join(comment_and_code(text)[1] for _, text in ((name, source.text), *source.headers))
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []
