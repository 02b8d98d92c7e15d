"""Writer of one PTX kernel as a C++ function.

Registers become locals, labels stay labels, and ``@p x`` becomes ``if (p) { x }``.  Generic,
global, local and constant addresses are host addresses.  Shared addresses are offsets in the
block's window, as the runtime returns them for descriptors; the window starts at ``shared_base``.
Parameter addresses must fit into 32 bits, so they are offsets from ``parameter_base``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from .syntax import Entry, PtxError, Scope, Statement, elements, split_at_commas
from .table import cpp_type, find, width

_REGISTER = re.compile(r"\.reg \.(\w+) (.+)")
_VARIABLE = re.compile(
    r"(?P<extern>\.extern )?(?:\.(?:visible|weak|common) )?\.(?P<space>shared|local|global|const) "
    r"(?:\.align (?P<align>\d+) )?\.(?P<type>\w+) (?P<name>[\w$]+)(?P<dims>(?:\[\d*\])*)"
    r"(?: = (?P<init>.+))?$"
)
_PARAMETER = re.compile(
    r"\.param (?:\.align (?P<align>\d+) )?\.(?P<type>\w+)(?: \.ptr[\w. ]*?)?"
    r" (?P<name>[\w$]+)(?:\[(?P<size>\d+)\])?$"
)
_SPECIAL = {
    **{f"%tid.{axis}": f"threadIdx.{axis}" for axis in "xyz"},
    **{f"%ntid.{axis}": f"blockDim.{axis}" for axis in "xyz"},
    **{f"%ctaid.{axis}": f"blockIdx.{axis}" for axis in "xyz"},
    **{f"%nctaid.{axis}": f"gridDim.{axis}" for axis in "xyz"},
    "%laneid": "emulator::lane_index()",
    "%cluster_ctarank": "emulator::cluster_block_rank()",
    "%cluster_nctarank": "emulator::cluster_block_count()",
}


def variable_declaration(statement: Statement) -> tuple[str, str, str]:
    """Return state space, name and C++ declaration of a variable; its name is kept."""
    match = _VARIABLE.fullmatch(statement.text)
    if match is None:
        raise PtxError(f"line {statement.line}: cannot read {statement.text!r}")
    kind, align = cpp_type(match["type"]), match["align"] or str(width(match["type"]) // 8)
    space, name, array = match["space"], match["name"], match["dims"]
    if space == "shared":
        # The emulator's build reads the alignment of dynamic shared memory from this text.
        text = f"__shared__ __align__({align}) {kind} {name}{array};"
        return space, name, f"extern {text}" if match["extern"] else text
    storage = "static const " if space in ("global", "const") else ""
    initial = f" = {match['init']}" if match["init"] else ("{}" if storage else "")
    return space, name, f"{storage}__align__({align}) {kind} {name}{array}{initial};"


class KernelWriter:
    """Writer of the C++ of one kernel.

    Attributes:
        registers: C++ expression of each declared register.
        shared: declarations of shared variables, which are emitted outside the function.
        used_globals: names of the module's variables that the kernel uses.
    """

    def __init__(
        self,
        entry: Entry,
        module_shared: dict[str, str],
        module_globals: dict[str, str],
        line_of: Callable[[Statement], tuple[str, int]],
        cluster: tuple[int, ...] | None,
    ) -> None:
        """
        Args:
            entry: the kernel.
            module_shared, module_globals: the module's variables, name to declaration.
            line_of: returns the file and line to report for a statement.
            cluster: blocks per cluster, if the text does not declare them.
        """
        self.registers: dict[str, str] = {}
        self.shared = dict(module_shared)
        self.used_globals: set[str] = set()
        self._entry, self._globals, self._line_of = entry, module_globals, line_of
        declared = re.search(r"\.reqnctapercluster ([\d, ]+)", entry.directives)
        self._cluster = tuple(map(int, declared[1].split(","))) if declared else cluster or ()
        self._special = dict(_SPECIAL)
        for axis, extent in zip("xyz", (*self._cluster, 1, 1, 1), strict=False):
            self._special[f"%cluster_ctaid.{axis}"] = f"blockIdx.{axis} % {extent}"
            self._special[f"%cluster_nctaid.{axis}"] = f"{extent}"
            self._special[f"%clusterid.{axis}"] = f"blockIdx.{axis} / {extent}"
            self._special[f"%nclusterid.{axis}"] = f"gridDim.{axis} / {extent}"
        self._host_names: set[str] = set()  # parameters and local variables
        self._parameter_names: list[str] = []
        self._accumulator_lengths: list[int] = []
        self._accumulator_places: dict[str, str] = {}

    # --- operands ---
    def read(self, text: str, type_name: str) -> str:
        """Return the value of an operand as a C++ expression of a type."""
        kind = cpp_type(type_name)
        negated, text = text.startswith("!"), text.lstrip("!").strip()
        return ("!" if negated else "") + f"as<{kind}>({self._bits(text, kind)})"

    def write(self, destination: str, value: str) -> str:
        """Return a statement that sets a register; empty for ``_``."""
        if destination == "_":
            return ""
        if destination not in self.registers:
            raise PtxError(f"{destination} is not a register")
        return f"set({self.registers[destination]}, {value});"

    def pointer(self, text: str, space: str = "") -> str:
        """Return the host pointer of ``[address]`` in a state space (generic: "")."""
        match = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]", text)
        if match is None:
            raise PtxError(f"cannot read the address {text!r}")
        base, offset = match[1], int(match[2] or 0)
        if base in self._host_names:  # keeps parameters in registers
            return f"(reinterpret_cast<char*>(&{base}) + {offset})"
        place = self.registers[base] if base in self.registers else self._symbol(base)
        address = f"{place} + {offset}"
        if space == "shared":
            return f"pointer(shared_base + u32({address}))"
        return f"pointer({'parameter_base + ' if space == 'param' else ''}{address})"

    def accumulators(self, names: list[str]) -> str:
        """Return the array of exactly these registers, which wgmma writes at its wait."""
        array = self._array_of(names)
        if array is None:
            raise PtxError("wgmma accumulators that are not one array")
        return array

    def _bits(self, text: str, kind: str) -> str:
        if text in self.registers:
            return self.registers[text]
        if text in self._special:
            return f"u32({self._special[text]})"
        if match := re.fullmatch(r"0([fFdD])([0-9A-Fa-f]+)", text):
            bits = int(match[2], 16)
            if match[1] in "dD" and kind == "f32":
                raise PtxError(f"a double constant {text} for .f32")
            return f"0x{bits:x}u" if match[1] in "fF" else f"u64(0x{bits:x}ull)"
        if match := re.fullmatch(r"(-?)(0[xX][0-9A-Fa-f]+|\d+)U?", text):
            number = int(match[1] + match[2], 0)
            if kind == "pred":
                return str(bool(number)).lower()
            return f"u64(0x{number & (1 << 64) - 1:x}ull)"
        match = re.fullmatch(r"([\w$]+)(?:\+(-?\d+))?", text)
        if match and not text[0].isdigit():
            return f"u64({self._symbol(match[1])} + {int(match[2] or 0)})"
        raise PtxError(f"cannot read the operand {text!r}")

    def _symbol(self, name: str) -> str:
        """Return the address of a variable in its state space (shared: in the window)."""
        if name in self.shared:
            return f"window_{name}"
        if name in self._globals:
            self.used_globals.add(name)
        elif name not in self._host_names:
            raise PtxError(f"unknown name {name}")
        base = " - parameter_base" if name in self._parameter_names else ""
        return f"(address_of(&{name}){base})"

    # --- the function ---
    def function(self) -> str:
        """Return the kernel, preceded by the types of its parameters."""
        self._place_accumulators()
        types, parameters = self._parameters()
        body = list(self._scope(self._entry.body))
        head = [
            f"alignas(16) u32 accumulators{i}[{n}];"
            for i, n in enumerate(self._accumulator_lengths)
        ]
        text = "\n".join(body)
        if "shared_base" in text or "window_" in text:
            if not self.shared:
                raise PtxError(f"{self._entry.name} uses shared memory but declares none")
            for name in self.shared:
                head.append(f"[[maybe_unused]] const u32 window_{name} ="
                            f" emulator::shared_address(&{name});")  # fmt: skip
            head.append("[[maybe_unused]] const u64 shared_base ="
                        f" window_base(&{next(iter(self.shared))});")  # fmt: skip
        if "parameter_base" in text:
            # Below all parameters, which are close together.
            head.append("const u64 parameter_base ="
                        f" address_of(&{self._parameter_names[0]}) - (1 << 20);")  # fmt: skip
        bounds = re.search(r"\.(?:maxntid|reqntid) ([\d, ]+)", self._entry.directives)
        threads = "*".join(bounds[1].split(",")) if bounds else "0"
        cluster = f"__cluster_dims__({', '.join(map(str, self._cluster))})" if self._cluster else ""
        return (
            f'{types}extern "C" __global__ void __launch_bounds__({threads.strip()}) {cluster}'
            f" {self._entry.name}({parameters}) {{\n" + "\n".join(head) + f"\n{text}\n}}\n"
        )

    def _parameters(self) -> tuple[str, str]:
        """Return the struct types and the C++ parameters."""
        declarations, types = [], []
        for number, text in enumerate(self._entry.parameters):
            match = _PARAMETER.fullmatch(text)
            if match is None:
                raise PtxError(f"cannot read the parameter {text!r}")
            kind = cpp_type(match["type"])
            if match["size"]:  # a struct: its type distinguishes it from scalars
                kind = f"Parameter{number}_{self._entry.name}"
                align = match["align"] or "1"
                types.append(f"struct alignas({align}) {kind} {{ u8 bytes[{match['size']}]; }};\n")
            elif kind == "u64":  # a pointer or an integer; the launch decides
                kind = "void*"
            declarations.append(f"{kind} {match['name']}")
            self._host_names.add(match["name"])
            self._parameter_names.append(match["name"])
        return "".join(types), ", ".join(declarations)

    def _place_accumulators(self) -> None:
        """Place wgmma's accumulators in arrays, since wgmma writes them at its wait."""
        for statement in self._entry.body.statements():
            if "wgmma.mma_async" not in statement.text:
                continue
            names = elements(statement.operands[0])
            number = len(self._accumulator_lengths)
            if not any(name in self._accumulator_places for name in names):
                self._accumulator_places |= {
                    name: f"accumulators{number}[{i}]" for i, name in enumerate(names)
                }
                self._accumulator_lengths.append(len(names))
            elif self._array_of(names) is None:
                raise PtxError(f"line {statement.line}: accumulators that partly overlap others")

    def _array_of(self, names: list[str]) -> str | None:
        array = self._accumulator_places.get(names[0], "").partition("[")[0]
        whole = [f"{array}[{i}]" for i in range(len(names))]
        return array if [self._accumulator_places.get(name) for name in names] == whole else None

    def _declare_registers(self, type_name: str, names: str) -> str:
        kind = "pred" if type_name == "pred" else f"u{width(type_name)}"
        declared = []
        for name in split_at_commas(names):
            match = re.fullmatch(r"(.+)<(\d+)>", name)
            for register in [f"{match[1]}{i}" for i in range(int(match[2]))] if match else [name]:
                # No other generated name begins with $.
                local = "$" + register.lstrip("%")
                self.registers[register] = self._accumulator_places.get(register, local)
                if register not in self._accumulator_places and (
                    not match or register in self._mentioned
                ):
                    declared.append(local)
        return f"{kind} {', '.join(declared)};" if declared else ""

    def _scope(self, scope: Scope) -> Iterator[str]:
        if is_outermost := scope is self._entry.body:
            self._mentioned = {
                name
                for statement in scope.statements()
                for name in re.findall(r"%[\w$]+", statement.text)
            }
        else:
            outer = dict(self.registers)
            labels = [item for item in scope.items if isinstance(item, str)]
            yield "{" + (f"__label__ {', '.join(labels)};" if labels else "")
        for item in scope.items:
            if isinstance(item, str):
                yield f"{item}:;"
            elif isinstance(item, Scope):
                yield from self._scope(item)
            else:
                try:
                    yield self._statement(item)
                except PtxError as error:
                    raise PtxError(f"line {item.line}: {item.text[:90]}: {error}") from None
        if not is_outermost:
            self.registers = outer
            yield "}"

    def _statement(self, statement: Statement) -> str:
        if statement.is_directive:
            if statement.text.startswith(".pragma"):
                return ""
            if match := _REGISTER.fullmatch(statement.text):
                return self._declare_registers(match[1], match[2])
            space, name, text = variable_declaration(statement)
            if space == "shared":
                self.shared[name] = text
                return ""
            self._host_names.add(name)
            return text
        row, groups = find(statement.opcode)
        code = row.write(self, statement.operands, **groups)
        file, line = self._line_of(statement)
        if guard := statement.guard:
            condition = guard.replace("!", "")
            sign = "!" if guard.startswith("!") else ""
            code = f"if ({sign}{self.registers[condition]}) {{ {code} }}"
        return f'\n#line {line} "{file}"\n{{ {code} }}'
