"""Loads, stores, atomics, addresses, and control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .syntax import elements
from .table import ANY, Translator, cpp_type, expression, instruction, require_operands

if TYPE_CHECKING:
    from .kernels import KernelWriter

# Cache hints, which are ignored.
_CACHE = r"(\.(ca|cg|cs|lu|cv|wb|wt|nc)|\.L1::\w+|\.L2::\w+)*"
_OWN_SPACES = ("param", "local", "const")


def _element(t: str, count: str | None) -> str:
    return f"vec<{cpp_type(t)}, {count}>" if count else cpp_type(t)


def _place(writer: KernelWriter, kind: str, address: str, space: str | None) -> str:
    how = "own" if space in _OWN_SPACES else "at"
    return f"{how}<{kind}>({writer.pointer(address, space or '')})"


# Kinds of accesses of each state space.
_KINDS = (("global", "global"), ("shared", "shared"), ("own", "(?:local|param|const)"))


def _in_each_space(what: str, opcode: str, rest: str) -> Callable[[Translator], Translator]:
    """Register a memory access under one kind per state space, and one for generic addresses."""

    def enter(write: Translator) -> Translator:
        for kind, spaces in _KINDS:
            pattern = rf"{opcode}\.(?P<space>{spaces})(::cta)?{rest}"
            instruction(f"{what} {kind}", pattern)(write)
        return instruction(f"{what} generic", rf"{opcode}(?P<space>){rest}")(write)

    return enter


@_in_each_space("load", r"ld(?:\.weak|\.volatile)?", rf"{_CACHE}(\.v(?P<n>[24]))?\.{ANY}")
def _ld(writer: KernelWriter, operands: list[str], space: str | None, n: str | None, t: str) -> str:
    load = f"const auto loaded = {_place(writer, _element(t, n), operands[1], space)};"
    return load + "".join(
        writer.write(name, f"loaded[{i}]" if n else "loaded")
        for i, name in enumerate(elements(operands[0]))
    )


@_in_each_space("store", r"st(?:\.weak|\.volatile)?", rf"{_CACHE}(\.v(?P<n>[24]))?\.{ANY}")
def _st(writer: KernelWriter, operands: list[str], space: str | None, n: str | None, t: str) -> str:
    kind = _element(t, n)
    values = ", ".join(writer.read(one, t) for one in elements(operands[1]))
    return f"{_place(writer, kind, operands[0], space)} = {kind}{{{values}}};"


def _cluster_address(writer: KernelWriter, text: str) -> str:
    """Return the address ``[register + offset]`` in the cluster's shared window."""
    base, _, offset = text.strip("[]").partition("+")
    return f"({writer.read(base.strip(), 'u32')} + {int(offset or 0)}u)"


@instruction("load shared", rf"ld\.shared::cluster(\.v(?P<n>[24]))?\.{ANY}")
def _cluster_load(writer: KernelWriter, operands: list[str], n: str | None, t: str) -> str:
    address = _cluster_address(writer, operands[1])
    load = f"{cpp_type(t)} loaded[{n or 1}];"
    load += f" emulator::cluster_load(loaded, {address}, sizeof loaded); "
    return load + "".join(
        writer.write(name, f"loaded[{i}]") for i, name in enumerate(elements(operands[0]))
    )


_ATOMICS = {"add": "Add", "min": "Min", "max": "Max", "and": "And", "or": "Or", "xor": "Xor",
            "exch": "Exch", "inc": "Inc", "dec": "Dec", "cas": "CAS"}  # fmt: skip


@instruction(
    "atomic",
    r"(?P<what>atom|red)(\.relaxed)?(\.cta|\.gpu|\.sys)?"
    rf"(\.(?P<space>global|shared)(::cta)?)?\.(?P<how>{'|'.join(_ATOMICS)})"
    r"\.(?P<t>[usb](?:32|64)|f32|f64)",
)
def _atomic(
    writer: KernelWriter, operands: list[str], what: str, space: str | None, how: str, t: str
) -> str:
    target, operands = (operands[0], operands[1:]) if what == "atom" else ("_", operands)
    require_operands(operands, 3 if how == "cas" else 2)
    place = f"reinterpret_cast<{cpp_type(t)}*>({writer.pointer(operands[0], space or '')})"
    values = ", ".join(writer.read(operand, t) for operand in operands[1:])
    call = f"atomic{_ATOMICS[how]}({place}, {values})"
    return f"const auto old = {call}; {writer.write(target, 'old')}"


expression("address", r"cvta(\.to)?\.(global|local|const)\.(?P<t>u64)", "a")
expression("address", r"cvta\.param\.u64", "parameter_base + a", "u64")
expression("address", r"cvta\.to\.param\.u64", "a - parameter_base", "u64")
expression("address", r"cvta\.shared\.u64", "shared_base + u32(a)", "u64")
expression("address", r"cvta\.to\.shared\.u64", "a - shared_base", "u64")
expression("address", r"mapa\.shared::cluster\.u32", "emulator::map_to_block(a, b)",
           "u32", "u32")  # fmt: skip


@instruction("branch", r"bra(\.uni)?")
def _bra(writer: KernelWriter, operands: list[str]) -> str:
    return f"goto {operands[0]};"


@instruction("branch", r"ret(\.uni)?|exit")
def _ret(writer: KernelWriter, operands: list[str]) -> str:
    return "return;"


@instruction("branch", r"trap")
def _trap(writer: KernelWriter, operands: list[str]) -> str:
    return "__trap();"


@instruction("fence", r"(membar|fence(\.acq_rel|\.sc))\.(gl|gpu|sys)")
def _fence(writer: KernelWriter, operands: list[str]) -> str:
    return "__threadfence();"


@instruction("fence", r"(membar|fence(\.acq_rel|\.sc)?)\.cta")
def _block_fence(writer: KernelWriter, operands: list[str]) -> str:
    return "__threadfence_block();"
