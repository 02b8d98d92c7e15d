"""Table of supported opcodes.

Each pattern matches whole opcodes with their modifiers and belongs to a function that writes their
C++.  An opcode that no pattern matches is an error.
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
        kind: Kind of the instruction; tests compute every opcode of some kinds.
        pattern: Pattern of the opcode; its named groups are arguments of the function.
        write: Function of (writer, operands, **groups) that returns C++ statements.
    """

    kind: str
    pattern: re.Pattern[str]
    write: Translator


INSTRUCTIONS: list[Instruction] = []

# Pattern groups for types.
INTEGER = r"(?P<t>[usb](?:16|32|64))"
BITS = r"(?P<t>b16|b32|b64|pred)"
ANY = r"(?P<t>[usb](?:8|16|32|64)|f16|f32|f64|pred)"
FTZ = r"(?P<ftz>\.ftz)?"

_TYPES = {*(f"{kind}{bits}" for kind in "bsu" for bits in (8, 16, 32, 64)),
          "pred", "f16", "f32", "f64"}  # fmt: skip


def width(type_name: str) -> int:
    """Return the bits of a type such as ``s32``."""
    return 1 if type_name == "pred" else int(re.sub(r"\D*(\d+).*", r"\1", type_name))


def cpp_type(type_name: str) -> str:
    """Return the type's name in machine.h; ``b32`` becomes ``u32``."""
    if type_name not in _TYPES:
        raise PtxError(f"the type .{type_name} is not supported")
    return re.sub(r"^b", "u", type_name)


def instruction(kind: str, pattern: str) -> Callable[[Translator], Translator]:
    """Register the function that writes all opcodes of a pattern."""

    def enter(function: Translator) -> Translator:
        INSTRUCTIONS.append(Instruction(kind, re.compile(pattern), function))
        return function

    return enter


@functools.cache
def find(opcode: str) -> tuple[Instruction, dict[str, str | None]]:
    """Return the row of an opcode, and the groups of its pattern.

    Raises:
        PtxError: unknown opcode.
    """
    for row in INSTRUCTIONS:
        if match := row.pattern.fullmatch(opcode):
            return row, match.groupdict()
    raise PtxError(f"unknown opcode {opcode}")


def expression(kind: str, pattern: str, text: str, *types: str) -> None:
    """Register an instruction that is one expression of its operands a, b, c, d.

    Args:
        kind, pattern: as for ``instruction``.
        text: the expression; ``{t}`` is the C++ type of the group t.
        types: types of the operands, which may name a group (``{t}``); default: all ``{t}``.

    With a group ``ftz`` in the pattern, subnormal float32 operands and results are flushed to zero
    with their sign.
    """

    names = sorted(set(re.findall(r"\b[abcd]\b", text)))
    types = types or ("{t}",) * len(names)

    @instruction(kind, pattern)
    def write(writer: KernelWriter, operands: list[str], **groups: str | None) -> str:
        flushes = groups.pop("ftz", None)
        kinds = [type_.format(**groups) for type_ in types]
        require_operands(operands, 1 + len(kinds))
        bound = []
        for name, operand, type_ in zip(names, operands[1:], kinds, strict=True):
            value = writer.read(operand, str(type_))
            bound.append(
                f"const auto {name} = {f'flush({value})' if flushes and type_ == 'f32' else value};"
            )
        cpp = {
            name: value and (cpp_type(value) if name in "ts" else value)
            for name, value in groups.items()
        }
        result = text.format(**cpp)
        result = f"flush({result})" if flushes else result
        return f"{' '.join(bound)} {writer.write(operands[0], result)}"


def require_operands(operands: list[str], count: int) -> None:
    """Raise PtxError unless there are ``count`` operands."""
    if len(operands) != count:
        raise PtxError(f"{len(operands)} operands, not {count}")
