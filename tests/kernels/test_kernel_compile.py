"""Every kernel compiles for every supported chip, without spills and to the intended instructions.

Compiling needs CuPy and NVRTC but no GPU.
"""

import re
from itertools import product

import numpy as np
import pytest

from cupyconv.errors import KernelCompileError
from cupyconv.gpu import compiler, sources
from cupyconv.kernels import copies, direct, gather, hopper, parameters, views
from cupyconv.kernels.gather import Access, Accesses, pipeline
from cupyconv.kernels.request import ACTIVATIONS
from cupyconv.kernels.strides import Strides
from cupyconv.launch import STORAGE
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import ITEMSIZE, PASSES
from tests import launches
from tests.cubins import disassemble, instructions, no_spills, resources
from tests.families import FAMILY_LAYERS

pytestmark = pytest.mark.costly

pytest.importorskip("cupy", reason="compiling kernels needs CuPy: pip install 'cupyconv[test]'")

HOPPER = ("conv_hopper.cu", "conv_planes.cu")
KERNELS = [f"conv_{pass_}.cu" for pass_ in PASSES]
MULTIPLY = {
    "float16": ("FFMA", 1),
    "bfloat16": ("FFMA", 1),
    "float32": ("FFMA", 1),
    "float64": ("DFMA", 1),
    "complex64": ("FFMA", 4),
    "complex128": ("DFMA", 4),
}
"""Instruction of a multiply-add, and its number per multiply-add, keyed by dtype."""


def tile_defines(dtype, index, tile):
    return {"STORAGE": STORAGE[dtype], "INDEX": index, "ACTIVATION": 0, **tile.defines}


def bias_defines(dtype, index, channels_last):
    return {
        "STORAGE": STORAGE[dtype],
        "INDEX": index,
        "VECTOR": 16 // ITEMSIZE[dtype],
        "CHANNELS_LAST": channels_last,
        "CHANNEL_LANES": 32 if channels_last else 1,
    }


FIRST = ("sm_80", "sm_90a")
"""Architectures for which every run compiles every variant."""

OTHERS = tuple(one for one in compiler.ARCHITECTURES if one not in FIRST)
"""Architectures that share the variants; the slow cases compile all variants for each of them."""

ARCHITECTURES = [
    pytest.param(architecture, marks=() if architecture in FIRST else pytest.mark.thorough)
    for architecture in compiler.ARCHITECTURES
]

BY_TURNS = [
    *(pytest.param(one, 1, id=one) for one in FIRST),
    *(pytest.param(one, len(OTHERS), id=one, marks=pytest.mark.thorough) for one in OTHERS),
    *(pytest.param(one, 1, id=f"{one}-all", marks=pytest.mark.slow) for one in OTHERS),
]
"""Architecture, and the number n such that every n-th variant is compiled for it."""


def in_turn(variants, architecture, every):
    """Return the variants to compile for an architecture."""
    first = OTHERS.index(architecture) if every > 1 else 0
    return list(variants)[first::every]


def compiled(source, defines, architecture):
    """Compile a kernel, without spills and local arrays, and count its instructions."""
    cubin, log = compiler.compile_cubin(sources.load(source), dict(defines), architecture)
    assert no_spills(log), f"{defines}: {log}"
    found = instructions(disassemble(cubin))
    assert found["LDL"] + found["STL"] == 0, f"{defines}: an array is in local memory"
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("source", KERNELS)
@pytest.mark.parametrize(("architecture", "every"), BY_TURNS)
def test_generic_kernels_compile_without_spills(architecture, every, source):
    variants = [
        (dtype, index, tile)
        for dtype, index, tile in product(
            STORAGE, ("int", "long long"), FAMILIES["cuda-generic"].tiles
        )
        if tile.is_for(ITEMSIZE[dtype])
    ]
    for dtype, index, tile in in_turn(variants, architecture, every):
        found = compiled(source, tile_defines(dtype, index, tile), architecture)
        multiply, each = MULTIPLY[dtype]
        products = tile.block_k * tile.block_m * tile.block_n // tile.threads
        assert found[multiply] >= each * products


@pytest.mark.thorough
@pytest.mark.parametrize(("architecture", "every"), BY_TURNS)
def test_bias_kernel_compiles_without_spills(architecture, every):
    variants = product(STORAGE, ("int", "long long"), (0, 1))
    for dtype, index, last in in_turn(variants, architecture, every):
        compiled("conv_backprop_bias.cu", bias_defines(dtype, index, last), architecture)


def launches_of(cases, architecture, impl):
    """Return launches of a family on a chip, one for each variant that the cases need."""
    device = Device.of(architecture)
    found = {}
    for number, (case, dtype) in enumerate(product(cases, STORAGE)):
        if number >= len(STORAGE) and dtype in ("bfloat16", "float64"):
            continue  # hardly differ from the other dtypes; the first case has all dtypes
        problem = case.problem.replace(dtype=dtype)
        strides = Strides.contiguous(problem)
        for pass_ in PASSES:
            if FAMILIES[impl].refuses(Request(problem, pass_, device, "tf32")) is None:
                pass_plan = plan_pass(Request(problem, pass_, device, "tf32"), impl)
                for prepared in launches.prepare(pass_plan, problem, strides, device):
                    found[prepared.defines] = prepared
    return list(found.values())


LAYERS = {name: layers.compiled for name, layers in FAMILY_LAYERS.items() if layers.compiled}


@pytest.mark.thorough
@pytest.mark.parametrize(("architecture", "every"), BY_TURNS)
@pytest.mark.parametrize("impl", LAYERS)
def test_families_compile_without_spills(impl, architecture, every):
    variants = launches_of(LAYERS[impl], architecture, impl)
    for prepared in in_turn(variants, architecture, every):
        found = compiled(prepared.source, prepared.defines, architecture)
        if impl == "cuda-toeplitz":
            assert found["HMMA"] > 0
            assert found["LDSM"] > 0
        if prepared.source == "conv_gather.cu":
            require_gather_instructions(dict(prepared.defines), found, architecture)
        if prepared.source == "conv_patch.cu":
            require_patch_instructions(dict(prepared.defines), found, architecture)


ITEMSIZES = {"half_t": 2, "bfloat16_t": 2, "float": 4, "double": 8}


def require_gather_instructions(defines, found, architecture):
    storage = defines["STORAGE"]
    on_tensor_cores = "DMMA" if storage == "double" else "HMMA"
    plain = "DFMA" if storage == "double" else "FFMA"
    assert found[on_tensor_cores if defines["TENSOR_CORES"] else plain] > 0
    along_k = defines["A_ALONG_K"] or defines["B_ALONG_K"]
    by_matrix = ITEMSIZES[storage] == 2 or (storage == "float" and along_k)
    assert bool(found["LDSM"]) == (by_matrix and bool(defines["TENSOR_CORES"]))
    largest = max(defines["A_VECTOR"], defines["B_VECTOR"]) * ITEMSIZES[storage]
    assert bool(found["LDGSTS"]) == (architecture != "sm_75" and largest > 2)


def require_patch_instructions(defines, found, architecture):
    assert found["DMMA" if defines["STORAGE"] == "double" else "HMMA"] > 0
    vectors = {defines["X_VECTOR"], defines["Y_VECTOR"] if defines["PASS"] == 2 else 1}
    copied = max(vectors) * ITEMSIZES[defines["STORAGE"]]
    assert bool(found["LDGSTS"]) == (architecture != "sm_75" and copied > 2)


@pytest.mark.thorough
@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("storage", ["half_t", "float", "double"])
def test_gather_keeps_sums_in_registers_with_64_bit_indices(storage, every):
    """Variants with every tile, operands along and across k, vectors and single elements.

    Every second variant is compiled, and in the slow case all of them.  The sizes of their tables
    are those that the planner expects, also with more taps than a word has bits.
    """
    itemsize = ITEMSIZES[storage]
    tiles = [tile for tile in FAMILIES["cuda-gather"].tiles if tile.itemsize == itemsize]
    accesses = ((0, 1, 0, 1), (1, 1, 0, 1), (1, 0, 0, 0), (2, 0, 0, 1), (2, 1, 1, 0))
    for tile, split, (pass_, a, b, pieces) in list(product(tiles, (0, 1), accesses))[::every]:
        vector, words = 16 // itemsize if pieces else 1, 1 + split
        defines = {
            **tile_defines("float16", "long long", tile),
            "STORAGE": storage,
            "PASS": pass_,
            "SPLIT": split,
            "ASYNC_COPY": 1,
            "A_ALONG_K": a,
            "B_ALONG_K": b,
            "C_ALONG_N": pieces,
            "A_VECTOR": vector,
            "B_VECTOR": vector,
            "C_VECTOR": vector,
            "TAPS_FASTEST": 1 - pieces,
            "TAP_WORDS": words,
            "PHASES": 4 if pass_ == 1 and not split else 1,  # split sums have a single phase
        }
        found = Accesses(*(Access(bool(one), vector) for one in (a, b, pieces)), not pieces)
        made = pipeline(tile, found, Device.of("sm_80"), words, index="long long")
        defines |= {"STAGES": made.stages, "SHARED_BYTES": made.shared_bytes}
        cubin, log = compiler.compile_cubin(sources.load("conv_gather.cu"), defines, "sm_80")
        assert no_spills(log), f"{defines}: {log}"
        assert resources(cubin, log)["conv_gather"].static_shared == made.table_bytes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_copies_compile_without_spills(architecture):
    for storage, bands in (*((storage, 0) for storage in ITEMSIZES), ("float", 1)):
        found = compiled("conv_arrange.cu", {"STORAGE": storage, "BANDS": bands}, architecture)
        assert found["STG"] == ITEMSIZES[storage]  # 16 bytes each, for 16 elements per thread
        for to_w in (0, 1):
            compiled("conv_fold.cu", {"STORAGE": storage, "TO_W": to_w}, architecture)


@pytest.mark.thorough
@pytest.mark.parametrize(("architecture", "every"), BY_TURNS)
def test_columns_kernel_compiles_without_spills(architecture, every):
    dtypes = [dtype for dtype in STORAGE if not dtype.startswith("complex")]
    variants = product(
        dtypes, ("int", "long long"), (0, 1), (0, 1), (1, 4), range(len(ACTIVATIONS))
    )
    for dtype, index, pass_, last, at_once, activation in in_turn(variants, architecture, every):
        defines = {
            "PASS": pass_,
            "STORAGE": STORAGE[dtype],
            "INDEX": index,
            "TAPS_FASTEST": 1 - last,
            "CHANNELS_LAST": last,
            "AT_ONCE": at_once,
            "ACTIVATION": activation,
        }
        compiled("conv_columns.cu", defines, architecture)


def test_every_kernel_file_is_compiled_above():
    """All files are listed except the Hopper kernels, which
    tests/kernels/test_hopper_compiled.py compiles."""
    files = {path.name for path in sources.directory().glob("*.cu")}
    families = {f"conv_{impl.removeprefix('cuda-')}.cu" for impl in LAYERS}
    others = ("conv_backprop_bias.cu", "conv_arrange.cu", "conv_columns.cu", "conv_fold.cu")
    assert files == {*KERNELS, *others, *HOPPER, *families}


def offset_of(struct, name):
    """Return a member's offset without __builtin_offsetof, which NVRTC 13.0 lacks."""
    return f"__INTADDR__(&(({struct}*)0)->{name})"


TRAVERSAL, STRIDE_PHASES = hopper.traversal_type(3), gather.phases_type(3)
STRUCTS = {
    "ConvParameters": ("include/parameters.cuh", parameters.parameters_type()),
    "TileSchedule": ("conv_direct.cu", np.dtype(list(direct.TILE_SCHEDULE))),
    "TapAxis": ("include/gather.cuh", STRIDE_PHASES["axis"].base),
    "StridePhase": ("include/gather.cuh", STRIDE_PHASES["phase"].base),
    "StridePhases<3>": ("include/gather.cuh", STRIDE_PHASES),
    "TraversalPhase": ("include/traversal.cuh", TRAVERSAL["phase"].base),
    "Traversal<3>": ("include/traversal.cuh", TRAVERSAL),
    "PlaneShape": ("conv_planes.cu", np.dtype(list(copies.PLANE_SHAPE))),
    "ArrangeShape": ("conv_arrange.cu", np.dtype(list(copies.ARRANGE_SHAPE))),
    "FoldShape": ("conv_fold.cu", np.dtype(list(views.FOLD_SHAPE))),
}
"""File and NumPy layout of each parameter struct."""


def layout_checks(struct):
    """Return a source that compiles only if a struct's offsets are NumPy's."""
    file, dtype = STRUCTS[struct]
    text = (sources.directory() / file).read_text()
    checks = [f'static_assert(sizeof({struct}) == {dtype.itemsize}, "size");']
    for name in dtype.names:
        offset = dtype.fields[name][1]
        checks.append(f'static_assert({offset_of(struct, name)} == {offset}, "{name}");')
    names = "|".join(one.partition("<")[0] for one in STRUCTS)
    whole = rf"^(?:template <int COUNT>\n)?struct (?:{names}) \{{.*?^\}};"
    declared = re.findall(whole, text, re.S | re.M)
    return sources.KernelSource("layout.cu", "\n".join([*declared, *checks]), ())


@pytest.mark.parametrize("struct", STRUCTS)
def test_parameter_structs_have_the_compilers_layout(struct):
    compiler.compile_cubin(layout_checks(struct), {}, "sm_80")


def test_parameter_struct_has_the_compilers_fields():
    header = dict(sources.load("conv_forward.cu").headers)["parameters.cuh"]
    declared = re.findall(r"^\s+long long (\w+)(?:\[\d\])?;", header, re.M)
    assert declared == list(parameters.parameters_type().names)


def test_activation_numbers_are_the_headers():
    header = dict(sources.load("conv_forward.cu").headers)["epilogue.cuh"]
    declared = {name.lower(): int(n) for name, n in re.findall(r"ACTIVATION_(\w+) = (\d)", header)}
    assert declared == {word or "none": n for n, word in enumerate(ACTIVATIONS)}


def test_a_compile_failure_carries_the_log():
    source = sources.KernelSource("broken.cu", "__global__ void kernel() { undeclared = 1; }", ())
    with pytest.raises(KernelCompileError, match="undeclared") as failure:
        compiler.compile_cubin(source, {"TILE": 3}, "sm_80")
    assert "broken.cu does not compile for sm_80 with -DTILE=3" in str(failure.value)
    assert "undeclared" in failure.value.log


def test_float32_keeps_subnormals():
    source = sources.KernelSource(
        "scale.cu", 'extern "C" __global__ void scale(float* x) { *x *= 0.5f; }', ()
    )
    cubin, _ = compiler.compile_cubin(source, {}, "sm_80")
    listing = disassemble(cubin)
    assert instructions(listing)["FMUL"] == 1
    assert "FMUL.FTZ" not in listing
