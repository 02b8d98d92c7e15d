"""Alignment checks inserted into a kernel's LLVM IR before optimisation.

The optimiser splits vectors and structs, and the sanitizer's hooks see only the parts.  On a GPU,
one instruction accesses all parts, and traps if the address is misaligned.  The front end's LLVM
IR still has each access of the source, with the alignment that the compiler may assume.
(``-fsanitize=alignment`` does not check copies of structs.)
"""

from __future__ import annotations

import re

CHECK = "emulator_check_alignment"  # defined in host/cuda_builtins.h

_NAME = r'%(?:"[^"]+"|[\w.$-]+)'
_LOCAL = re.compile(rf"\s+({_NAME}) = (?:alloca|getelementptr\b.*?, ptr ({_NAME})[,\s])")
_ACCESS = re.compile(rf"\s+(?:{_NAME} = load|store) (?:volatile )?(.*), ptr ({_NAME}), align (\d+)")
_COPY = re.compile(r"\s+(?:tail )?call void @llvm\.mem(?:cpy|move|set)\.")
_POINTER = re.compile(rf"ptr [\w ]*?align (\d+) ({_NAME})")
_DEBUG_LOCATION = re.compile(r", (!dbg !\d+)")
# Scalar types, whose natural alignment the hooks check.
_SCALAR_BYTES = {"i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4} | dict.fromkeys(
    ("i64", "double", "ptr"), 8
)


def with_alignment_checks(text: str) -> str:
    """Insert a call of CHECK before each access in a module of unoptimised LLVM IR.

    Accesses to a function's own variables are skipped, and functions without instrumentation.
    """
    instrumented = set(re.findall(r"^attributes (#\d+) = \{.*\bsanitize_address\b", text, re.M))
    lines: list[str] = []
    is_instrumented, local = False, set[str]()
    for line in text.split("\n"):
        if line.startswith("define "):
            is_instrumented, local = not instrumented.isdisjoint(re.findall(r"#\d+", line)), set()
        elif is_instrumented:
            if (local_variable := _LOCAL.match(line)) and (
                local_variable[2] is None or local_variable[2] in local
            ):
                local.add(local_variable[1])
            place = _DEBUG_LOCATION.search(line)
            lines += [
                f"  call void @{CHECK}(ptr {pointer}, i64 {alignment})"
                + (f", {place[1]}" if place else "")
                for pointer, alignment in _checked_pointers(line)
                if pointer not in local
            ]
        lines.append(line)
    return "\n".join(lines)


def _checked_pointers(line: str) -> list[tuple[str, int]]:
    """Return the pointers that an instruction accesses, with the alignments to check."""
    if access := _ACCESS.match(line):
        natural = _SCALAR_BYTES.get(access[1].split(" ")[0], 1)
        pointers = [(access[2], int(access[3]))]
    elif _COPY.match(line):
        natural = 1
        pointers = [(pointer, int(alignment)) for alignment, pointer in _POINTER.findall(line)]
    else:
        return []
    return [(pointer, alignment) for pointer, alignment in pointers if alignment > natural]
