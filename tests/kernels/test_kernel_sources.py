"""Constants and macros on which kernels and host code must agree."""

import re
from functools import cache
from itertools import product

import pytest

from cupyconv import ConvProblem
from cupyconv.gpu import sources
from cupyconv.kernels import bias, copies, cost, hopper, patch, toeplitz
from cupyconv.kernels.hopper_bf16x6 import PLANES
from cupyconv.kernels.request import Epilogue
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES
from tests import launches
from tests.configurations import in_formats

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


def comment_and_code(text):
    """Return the comment at the start of a file as one line, and the code without comments."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if not line.startswith("//"))
    comment = " ".join(line.removeprefix("//").strip() for line in lines[:first])
    return comment, re.sub(r"//.*", "", text)


def listed(source):
    """Return the macros that the comments of a kernel file and its headers list."""
    found = []
    for _, text in ((source.name, source.text), *source.headers):
        comment, _ = comment_and_code(text)
        while comment != (comment := re.sub(r"\([^()]*\)", "", comment)):  # remove parentheses
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
    """Return the macros of every launch of the layers above, keyed by kernel file."""
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
                planned = plan_pass(Request(problem, pass_, device, precision), impl)
                epilogue = Epilogue("relu", adds=pass_ != "backprop_filter")
                made += launches.prepare(planned, problem, strides, device, epilogue)
    found = {}
    for launch in made:
        found.setdefault(launch.source, set()).update(name for name, _ in launch.defines)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(path.name for path in sources.directory().glob("*.cu")))
def test_macros_are_listed_in_the_kernel_file_and_used(name):
    source = sources.load(name)
    names = listed(source)
    assert sorted(names) == sorted(passed()[name])
    code = " ".join(comment_and_code(text)[1] for _, text in ((name, source.text), *source.headers))
    assert [name for name in names if not re.search(rf"\b{name}\b", code)] == []


@pytest.mark.quick
def test_kernels_contain_no_generic_lambdas():
    """CUDA releases before 13.2 reject some; test_compilers.py has an example."""
    texts = {path.name: path.read_text() for path in sources.directory().rglob("*.cu*")}
    assert len(texts) > 12
    generic = re.compile(r"\]\s*\([^()]*\bauto\b")
    assert [name for name, text in texts.items() if generic.search(text)] == []
