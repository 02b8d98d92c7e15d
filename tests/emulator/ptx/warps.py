"""Instructions across threads of a block or warp: barriers, shuffles, matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .syntax import PtxError, elements
from .table import cpp_type, instruction, require_operands

if TYPE_CHECKING:
    from .kernels import KernelWriter

_BLOCK_THREADS = "s32(blockDim.x * blockDim.y * blockDim.z + 31) & ~31"
"""Threads of a barrier without a thread count."""


@instruction("barrier", r"(bar|barrier)(\.cta)?\.(?P<what>sync|arrive)(?P<aligned>\.aligned)?")
def _bar_sync(writer: KernelWriter, operands: list[str], what: str, aligned: str | None) -> str:
    if operands == ["0"] and what == "sync":
        return "__syncthreads();"
    number, *threads = (writer.read(one, "s32") for one in operands)
    count = threads[0] if threads else _BLOCK_THREADS
    wait = "true" if what == "sync" else "false"
    return f"emulator::named_barrier({number}, {count}, {wait});"


@instruction("barrier", r"(bar|barrier)(\.cta)?\.red(\.aligned)?\.(?P<how>or|and)\.pred")
def _bar_red(writer: KernelWriter, operands: list[str], how: str) -> str:
    if operands[1] != "0" or len(operands) != 3:
        raise PtxError("reductions are supported by barrier 0 only")
    value = writer.read(operands[2], "pred")
    return writer.write(operands[0], f"(__syncthreads_{how}({value}) != 0)")


@instruction("barrier", r"(bar|barrier)(\.cta)?\.red(\.aligned)?\.popc\.u32")
def _bar_popc(writer: KernelWriter, operands: list[str]) -> str:
    if operands[1] != "0" or len(operands) != 3:
        raise PtxError("reductions are supported by barrier 0 only")
    value = writer.read(operands[2], "pred")
    return writer.write(operands[0], f"u32(__syncthreads_count({value}))")


@instruction("barrier", r"bar\.warp\.sync")
def _bar_warp(writer: KernelWriter, operands: list[str]) -> str:
    return f"__syncwarp({writer.read(operands[0], 'u32')});"


# --------------------------------------------------------------------------------------------------
# Lanes of a warp
# --------------------------------------------------------------------------------------------------
@instruction("warp", r"shfl\.sync\.(?P<mode>up|down|bfly|idx)\.b32")
def _shfl(writer: KernelWriter, operands: list[str], mode: str) -> str:
    require_operands(operands, 5)
    target, _, inside = operands[0].partition("|")
    mode = {"up": "kUp", "down": "kDown", "bfly": "kXor", "idx": "kIndex"}[mode]
    a, b, c, mask = (writer.read(one, "u32") for one in operands[1:])
    code = (f"const auto b = {b}, c = {c}; const auto mode = emulator::ShuffleMode::{mode};"
            f" const auto got = emulator_shuffle({mask}, {a}, s32(b & 31), shuffle_width(c), mode);"
            f" {writer.write(target, 'got')}")  # fmt: skip
    return code + (writer.write(inside, "shuffle_is_inside(mode, b, c)") if inside else "")


@instruction("warp", r"vote\.sync\.(?P<how>ballot\.b32|any\.pred|all\.pred)")
def _vote(writer: KernelWriter, operands: list[str], how: str) -> str:
    name = f"__{how.partition('.')[0]}_sync"
    mask, value = writer.read(operands[2], "u32"), writer.read(operands[1], "pred")
    result = f"{name}({mask}, {value})"
    return writer.write(operands[0], result if "ballot" in how else f"({result} != 0)")


@instruction("warp", r"elect\.sync")
def _elect(writer: KernelWriter, operands: list[str]) -> str:
    """Write an election of the warp's lowest lane; the mask must be the whole warp."""
    lane, _, predicate = operands[0].partition("|")
    elected = writer.write(predicate, "emulator::elect_one()") + writer.write(lane, "0u")
    return f"if ({writer.read(operands[1], 'u32')} != ~0u) __trap(); {elected}"


# --------------------------------------------------------------------------------------------------
# Matrices
# --------------------------------------------------------------------------------------------------
def registers(writer: KernelWriter, name: str, operand: str, t: str) -> str:
    """Return a C++ array of the values of a vector operand."""
    values = ", ".join(writer.read(one, t) for one in elements(operand))
    return f"{cpp_type(t)} {name}[] = {{{values}}};"


def _spread(writer: KernelWriter, operand: str, name: str) -> str:
    parts = elements(operand)
    return "".join(writer.write(one, f"{name}[{i}]") for i, one in enumerate(parts))


@instruction(
    "matrix load",
    r"ldmatrix\.sync\.aligned(\.m8n8)?\.x(?P<n>[124])(?P<trans>\.trans)?(\.m8n8)?\.shared(::cta)?\.b16",
)
def _ldmatrix(writer: KernelWriter, operands: list[str], n: str, trans: str | None) -> str:
    row = writer.pointer(operands[1], "shared")
    call = f"emulator::load_matrix(r, {row}, {n}, {'true' if trans else 'false'});"
    return f"unsigned r[{n}]; {call}{_spread(writer, operands[0], 'r')}"


@instruction(
    "matrix store",
    r"stmatrix\.sync\.aligned(\.m8n8)?\.x(?P<n>[124])(\.m8n8)?(?P<trans>\.trans)?(\.m8n8)?\.shared(::cta)?\.b16",
)
def _stmatrix(writer: KernelWriter, operands: list[str], n: str, trans: str | None) -> str:
    values, row = registers(writer, "r", operands[1], "u32"), writer.pointer(operands[0], "shared")
    return f"{values} emulator::store_matrix(r, {row}, {n}, {'true' if trans else 'false'});"


@instruction(
    "tensor core",
    r"mma\.sync\.aligned\.m16n8k(?P<k>8|16)\.row\.col\.f32\.(?P<e>f16|bf16|tf32)\.(?P=e)\.f32",
)
def _mma(writer: KernelWriter, operands: list[str], k: str, e: str) -> str:
    if (k, e) not in {("8", "f16"), ("16", "f16"), ("16", "bf16"), ("8", "tf32")}:
        raise PtxError("unsupported shape of mma.sync")
    d, a, b, c = operands
    element = {"f16": "kF16", "bf16": "kBf16", "tf32": "kTf32"}[e]
    inputs = (("d", c, "f32"), ("a", a, "u32"), ("b", b, "u32"))
    arrays = (registers(writer, *one) for one in inputs)
    call = f"emulator::mma(emulator::Element::{element}, {k}, d, a, b);"
    return "".join(arrays) + call + _spread(writer, d, "d")


@instruction("tensor core", r"mma\.sync\.aligned\.m8n8k4\.row\.col\.f64\.f64\.f64\.f64")
def _mma_f64(writer: KernelWriter, operands: list[str]) -> str:
    d, a, b, c = operands
    a, b = (writer.read(elements(one)[0], "f64") for one in (a, b))
    sums = registers(writer, "d", c, "f64")
    return f"{sums} ptx::mma_m8n8k4_f64(d, {a}, {b}); {_spread(writer, d, 'd')}"
