"""Checks that what a kernel accesses is aligned as the type is, put before the optimiser.

The optimiser takes vectors and structs apart, and the sanitizer's hooks see what it has left, while
a GPU's compiler makes one access of them, which traps where it is misaligned.  The front end's LLVM
IR still has each access of the source, with the alignment that the compiler may rely on.
(``-fsanitize=alignment`` is not asked where a struct is copied.)
"""

from __future__ import annotations

import re

CHECK = "emulator_check_alignment"  # defined in host/cuda_builtins.h

_NAME = r'%(?:"[^"]+"|[\w.$-]+)'
_LOCAL = re.compile(rf"\s+({_NAME}) = (?:alloca|getelementptr\b.*?, ptr ({_NAME})[,\s])")
_ACCESS = re.compile(rf"\s+(?:{_NAME} = load|store) (?:volatile )?(.*), ptr ({_NAME}), align (\d+)")
_COPY = re.compile(r"\s+(?:tail )?call void @llvm\.mem(?:cpy|move|set)\.")
_COPIED = re.compile(rf"ptr [\w ]*?align (\d+) ({_NAME})")
_PLACE = re.compile(r", (!dbg !\d+)")
# Of these the hooks check the address themselves, if no more is known of it.
_SCALAR_BYTES = {"i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4} | dict.fromkeys(
    ("i64", "double", "ptr"), 8
)


def with_alignment_checks(text: str) -> str:
    """A module of unoptimised LLVM IR, with a call of CHECK before each access that needs it.

    Those of a function's own variables do not, nor those of functions that are not instrumented.
    """
    instrumented = set(re.findall(r"^attributes (#\d+) = \{.*\bsanitize_address\b", text, re.M))
    lines: list[str] = []
    is_instrumented, local = False, set[str]()
    for line in text.split("\n"):
        if line.startswith("define "):
            is_instrumented, local = not instrumented.isdisjoint(re.findall(r"#\d+", line)), set()
        elif is_instrumented:
            if (own := _LOCAL.match(line)) and (own[2] is None or own[2] in local):
                local.add(own[1])
            place = _PLACE.search(line)
            lines += [
                f"  call void @{CHECK}(ptr {pointer}, i64 {alignment})"
                + (f", {place[1]}" if place else "")
                for pointer, alignment in _accessed(line)
                if pointer not in local
            ]
        lines.append(line)
    return "\n".join(lines)


def _accessed(line: str) -> list[tuple[str, int]]:
    """The pointers that an instruction goes through, each with an alignment to be checked."""
    if access := _ACCESS.match(line):
        known = _SCALAR_BYTES.get(access[1].split(" ")[0], 1)
        found = [(access[2], int(access[3]))]
    elif _COPY.match(line):
        known = 1
        found = [(pointer, int(alignment)) for alignment, pointer in _COPIED.findall(line)]
    else:
        return []
    return [(pointer, alignment) for pointer, alignment in found if alignment > known]
