"""Asynchronous copies and products, and the instructions that wait for them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .syntax import PtxError, elements, split_at_commas
from .table import instruction
from .warps import registers

if TYPE_CHECKING:
    from .kernels import KernelWriter


def _call(kind: str, pattern: str, text: str) -> None:
    """Register an instruction without results.

    Placeholders in the text define how operands are read: ``{p0}`` a pointer to shared memory,
    ``{g0}`` a generic pointer, ``{u1}`` a u32 value, ``{n0}`` verbatim text.
    """

    @instruction(kind, pattern)
    def write(writer: KernelWriter, operands: list[str], **groups: str) -> str:
        def value(match: re.Match[str]) -> str:
            operand = operands[int(match[2])]
            if match[1] == "n":
                return operand
            if match[1] == "p":
                return writer.pointer(operand, "shared")
            if match[1] == "g":
                return writer.pointer(operand)
            return writer.read(operand.strip("[]"), "u32")

        return re.sub(r"\{([a-z])(\d)\}", value, text)


# --------------------------------------------------------------------------------------------------
# cp.async copies
# --------------------------------------------------------------------------------------------------
@instruction("async copy", r"cp\.async\.(?P<cache>c[ag])\.shared(::cta)?\.global(\.L2::\w+)?")
def _cp_async(writer: KernelWriter, operands: list[str], cache: str) -> str:
    to, source = writer.pointer(operands[0], "shared"), writer.pointer(operands[1])
    size = int(operands[2], 0)
    if size not in (4, 8, 16) or (cache == "cg" and size != 16):
        raise PtxError(f"a copy of {size} bytes")
    bytes_read = writer.read(operands[3], "s32") if len(operands) > 3 else size
    return f"emulator::cp_async({to}, {source}, {size}, {bytes_read});"


_call("async copy", r"cp\.async\.commit_group", "emulator::cp_async_commit();")
_call("async copy", r"cp\.async\.wait_group", "emulator::cp_async_wait({n0});")

# --------------------------------------------------------------------------------------------------
# mbarriers, fences, clusters
# --------------------------------------------------------------------------------------------------
_BARRIER = "reinterpret_cast<uint64_t*>({p0})"
_call("mbarrier", r"mbarrier\.init\.shared(::cta)?\.b64",
      f"emulator::mbarrier_init({_BARRIER}, {{u1}});")  # fmt: skip
_call("mbarrier", r"mbarrier\.arrive(\.release\.cluster)?\.shared::cluster\.b64",
      "emulator::mbarrier_arrive_cluster({u1});")  # fmt: skip
_call("fence", r"fence\.mbarrier_init\.release\.cluster", "emulator::fence_mbarrier_init();")
_call("fence", r"fence\.proxy\.async(\.shared::cta|\.global)?", "emulator::fence_proxy_async();")
_call("barrier", r"barrier\.cluster\.arrive(\.release|\.relaxed)?(\.aligned)?",
      "emulator::cluster_arrive();")  # fmt: skip
_call("barrier", r"barrier\.cluster\.wait(\.acquire)?(\.aligned)?", "emulator::cluster_wait();")
_call("barrier", r"griddepcontrol\.wait", "emulator::wait_for_launches_before();")
_call("other", r"griddepcontrol\.launch_dependents", ";")  # a hint
_call("other", r"setmaxnreg\.inc\.sync\.aligned\.u32", "emulator::set_max_registers({n0}, true);")
_call("other", r"setmaxnreg\.dec\.sync\.aligned\.u32", "emulator::set_max_registers({n0}, false);")


@instruction(
    "mbarrier", r"mbarrier\.arrive(?P<expect>\.expect_tx)?(\.release\.cta)?\.shared(::cta)?\.b64"
)
def _arrive(writer: KernelWriter, operands: list[str], expect: str | None) -> str:
    if operands[0] != "_" or len(operands) != (3 if expect else 2):
        raise PtxError("mbarrier arrivals with a state or a count are not supported")
    barrier = f"reinterpret_cast<uint64_t*>({writer.pointer(operands[1], 'shared')})"
    if expect:
        return f"emulator::mbarrier_expect_tx({barrier}, {writer.read(operands[2], 'u32')}, true);"
    return f"emulator::mbarrier_arrive({barrier});"


@instruction("mbarrier", r"mbarrier\.try_wait\.parity(\.acquire\.cta)?\.shared(::cta)?\.b64")
def _try_wait(writer: KernelWriter, operands: list[str]) -> str:
    barrier = f"reinterpret_cast<uint64_t*>({writer.pointer(operands[1], 'shared')})"
    parity = writer.read(operands[2], "u32")
    return writer.write(operands[0], f"emulator::mbarrier_try_wait({barrier}, {parity})")


# --------------------------------------------------------------------------------------------------
# TMA
# --------------------------------------------------------------------------------------------------
_call("TMA", r"cp\.async\.bulk\.commit_group", "emulator::tensor_store_commit();")
_call("TMA", r"cp\.async\.bulk\.wait_group", "emulator::tensor_store_wait({n0}, false);")
_call("TMA", r"cp\.async\.bulk\.wait_group\.read", "emulator::tensor_store_wait({n0}, true);")
_call("TMA", r"prefetch\.tensormap", "emulator::tensor_map_prefetch({g0});")


def _map_and_coordinates(writer: KernelWriter, operand: str) -> tuple[str, list[str]]:
    """Return the map pointer and coordinates of ``[map, {c0, c1}]``."""
    base, coordinates = split_at_commas(operand[1:-1])
    values = [writer.read(one, "s32") for one in elements(coordinates)]
    return writer.pointer(f"[{base}]"), values


@instruction(
    "TMA",
    r"cp\.async\.bulk\.tensor\.(?P<rank>[1-5])d\.shared::(?:cluster|cta)\.global"
    r"(\.tile|(?P<im2col>\.im2col))?\.mbarrier::complete_tx::bytes"
    r"(?P<multicast>\.multicast::cluster)?(?P<hint>\.L2::cache_hint)?",
)
def _tensor_load(
    writer: KernelWriter,
    operands: list[str],
    rank: str,
    im2col: str | None,
    multicast: str | None,
    hint: str | None,
) -> str:
    tensor, values = _map_and_coordinates(writer, operands[1])
    remaining = operands[3:]
    taps = [writer.read(one, "u16") for one in elements(remaining.pop(0))] if im2col else []
    mask = f"unsigned({writer.read(remaining.pop(0), 'u16')})" if multicast else "0u"
    if len(remaining) != (1 if hint else 0):
        raise PtxError("more operands than the modifiers declare")
    code = f"const unsigned short taps[] = {{{', '.join(taps)}}};" if im2col else ""
    barrier = f"reinterpret_cast<uint64_t*>({writer.pointer(operands[2], 'shared')})"
    to = writer.pointer(operands[0], "shared")
    return (
        f"{code} emulator::tensor_load({{{to}, {tensor}, {barrier},"
        f" {rank}, {{{', '.join(values)}}}, {'taps' if im2col else 'nullptr'}, {mask}}});"
    )


@instruction(
    "TMA",
    r"cp\.async\.bulk\.tensor\.(?P<rank>[1-5])d\.global\.shared::cta"
    r"(\.tile|(?P<im2col>\.im2col_no_offs))?\.bulk_group",
)
def _tensor_store(writer: KernelWriter, operands: list[str], rank: str, im2col: str | None) -> str:
    tensor, values = _map_and_coordinates(writer, operands[0])
    source = writer.pointer(operands[1], "shared")
    return (
        f"const int coordinates[] = {{{', '.join(values)}}};"
        f" emulator::tensor_store({tensor}, {source}, {rank}, coordinates,"
        f" {'true' if im2col else 'false'});"
    )


# --------------------------------------------------------------------------------------------------
# Warpgroup products (wgmma)
# --------------------------------------------------------------------------------------------------
_call("fence", r"wgmma\.fence\.sync\.aligned", "emulator::warpgroup_fence();")
_call("barrier", r"wgmma\.commit_group\.sync\.aligned", "emulator::warpgroup_commit();")
_call("barrier", r"wgmma\.wait_group\.sync\.aligned", "emulator::warpgroup_wait({n0});")


@instruction(
    "tensor core",
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>8|16)\.f32\.(?P<e>f16|bf16|tf32)\.(?P=e)",
)
def _wgmma(writer: KernelWriter, operands: list[str], n: str, k: str, e: str) -> str:
    """Write a wgmma, whose accumulators (``accumulators``) the runtime writes at the wait."""
    if (e == "tf32") != (k == "8"):
        raise PtxError("wgmma does not have this shape")
    d, a, b, scale, negate_a, negate_b, *transposed = operands
    if (negate_a, negate_b) != ("1", "1"):
        raise PtxError("negated operands of wgmma are not supported")
    in_registers = a.startswith("{")
    transpose_b = transposed[-1] if transposed else "0"
    transpose_a = transposed[0] if transposed and not in_registers else "0"
    element = {"f16": "kF16", "bf16": "kBf16", "tf32": "kTf32"}[e]
    scale = writer.read(scale, "pred") if scale in writer.registers else f"({scale} != 0)"
    return (
        (registers(writer, "a", a, "u32") if in_registers else "")
        + f"emulator::warpgroup_mma({{emulator::Element::{element}, {n},"
        f" reinterpret_cast<float*>({writer.accumulators(elements(d))}),"
        f" {'a' if in_registers else 'nullptr'}, {0 if in_registers else writer.read(a, 'u64')},"
        f" {writer.read(b, 'u64')}, {scale}, {transpose_a} != 0, {transpose_b} != 0}});"
    )
