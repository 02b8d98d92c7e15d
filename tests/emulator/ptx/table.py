"""The opcodes that there are: each pattern of a whole opcode, its modifiers included, is entered
with the function that writes its C++.  What no pattern matches is an error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .syntax import PtxError

if TYPE_CHECKING:
    from .kernels import KernelWriter

Translator = Callable[..., str]


@dataclass(frozen=True)
class Instruction:
    """One row of the table.

    Attributes:
        kind: What a count of executed instructions lists it under.
        pattern: Of the opcode; its named groups are arguments of the function.
        write: Of (writer, operands, **groups): the C++ statements.
    """

    kind: str
    pattern: re.Pattern[str]
    write: Translator


INSTRUCTIONS: list[Instruction] = []

# Types, as groups of patterns.
INTEGER = r"(?P<t>[usb](?:16|32|64))"
BITS = r"(?P<t>b16|b32|b64|pred)"
ANY = r"(?P<t>[usb](?:8|16|32|64)|f16|f32|f64|pred)"
FTZ = r"(?P<ftz>\.ftz)?"

_TYPES = {*(f"{kind}{bits}" for kind in "bsu" for bits in (8, 16, 32, 64)),
          "pred", "f16", "f32", "f64"}  # fmt: skip


def width(type_name: str) -> int:
    """Bits of a type such as ``s32``."""
    return 1 if type_name == "pred" else int(re.sub(r"\D*(\d+).*", r"\1", type_name))


def cpp_type(type_name: str) -> str:
    """The name in machine.h: ``b32`` is an unsigned integer, the others have their own."""
    if type_name not in _TYPES:
        raise PtxError(f"the type .{type_name} is not supported")
    return re.sub(r"^b", "u", type_name)


def instruction(kind: str, pattern: str) -> Callable[[Translator], Translator]:
    """Enters the function that writes all opcodes of a pattern."""

    def enter(function: Translator) -> Translator:
        INSTRUCTIONS.append(Instruction(kind, re.compile(pattern), function))
        return function

    return enter


@functools.cache
def find(opcode: str) -> tuple[Instruction, dict[str, str | None]]:
    """The row of an opcode, and the groups of its pattern.

    Raises:
        PtxError: there is none.
    """
    for one in INSTRUCTIONS:
        if match := one.pattern.fullmatch(opcode):
            return one, match.groupdict()
    raise PtxError(f"unknown opcode {opcode}")


def expression(kind: str, pattern: str, text: str, *types: str) -> None:
    """Enters an instruction that is one expression of its operands a, b, c, d.

    Args:
        kind, pattern: as for ``instruction``.
        text: of the expression; ``{t}`` is the C++ type of the group t.
        types: of the operands, which may name a group (``{t}``); ``{t}`` each unless given.

    A group ``ftz`` of the pattern has float32 operands and the result flushed: what is subnormal
    is a zero of its sign.
    """

    names = sorted(set(re.findall(r"\b[abcd]\b", text)))
    types = types or ("{t}",) * len(names)

    @instruction(kind, pattern)
    def write(writer: KernelWriter, operands: list[str], **groups: str | None) -> str:
        flushes = groups.pop("ftz", None)
        kinds = [one.format(**groups) for one in types]
        require_operands(operands, 1 + len(kinds))
        bound = []
        for name, operand, one in zip(names, operands[1:], kinds, strict=True):
            value = writer.read(operand, str(one))
            bound.append(
                f"const auto {name} = {f'flush({value})' if flushes and one == 'f32' else value};"
            )
        cpp = {
            name: value and (cpp_type(value) if name in "ts" else value)
            for name, value in groups.items()
        }
        result = text.format(**cpp)
        result = f"flush({result})" if flushes else result
        return f"{' '.join(bound)} {writer.write(operands[0], result)}"


def require_operands(operands: list[str], count: int) -> None:
    """PtxError unless there are so many."""
    if len(operands) != count:
        raise PtxError(f"{len(operands)} operands, not {count}")
