"""Results of single PTX instructions at the edges of their types.

Expected values come from Python's integers and fractions, by the rules of the PTX manual.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import EmulatedModule, memory
from tests.emulator.ptx.table import INSTRUCTIONS, width

# --------------------------------------------------------------------------------------------------
# Numbers: an integer is an int; a float is a float, or a Fraction before rounding
# --------------------------------------------------------------------------------------------------
FORMATS = {"f16": (10, 5), "f32": (23, 8), "f64": (52, 11), "bf16": (7, 8)}


def size_of(type_name: str) -> int:
    """Return the number of bits of a type."""
    return 1 + sum(FORMATS[type_name]) if type_name in FORMATS else width(type_name)


def decoded(bits: int, type_name: str) -> Any:
    """Return the number of a type that has these bits."""
    size = size_of(type_name)
    bits &= (1 << size) - 1
    if type_name in FORMATS:
        kind = ml_dtypes.bfloat16 if type_name == "bf16" else f"f{size // 8}"
        return float(np.array(bits, f"u{size // 8}").view(kind))
    return bits - (1 << size) if type_name[0] == "s" and bits >> (size - 1) else bits


def encoded(value: Any, type_name: str, mode: str = "rn") -> int:
    """Return the bits of a number in a type; a float is rounded."""
    if type_name not in FORMATS:
        return int(value) & (1 << width(type_name)) - 1
    mantissa, exponent = FORMATS[type_name]
    top = 1 << (mantissa + exponent)
    infinity = ((1 << exponent) - 1) << mantissa
    sign = top if is_negative(value) else 0
    if value != value:
        return top - 1
    if value == 0 or abs(value) == math.inf:
        return sign | (infinity if value else 0)
    size = abs(Fraction(value))
    bias = (1 << (exponent - 1)) - 1
    power = max(floor_log2(size), 1 - bias)
    units = size / Fraction(2) ** (power - mantissa)
    whole = math.floor(units)
    rest = units - whole
    if mode == "rn":
        whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2)
    elif rest and {"rz": False, "rp": not sign, "rm": bool(sign)}[mode]:
        whole += 1
    # Adjacent numbers have adjacent bits, from subnormals up to infinity.
    bits = whole if power == 1 - bias and whole < 1 << mantissa else 0
    if not bits and whole:
        bits = ((power + bias - 1) << mantissa) + whole
    if bits >= infinity:
        away = mode == "rn" or mode == ("rm" if sign else "rp")
        bits = infinity if away else infinity - 1
    return sign | bits


def is_negative(a: Any) -> bool:
    """Return whether the sign bit of a number is set."""
    return math.copysign(1, a) < 0 if isinstance(a, float) else a < 0


def floor_log2(size: Fraction) -> int:
    power = size.numerator.bit_length() - size.denominator.bit_length()
    return power if Fraction(2) ** power <= size else power - 1


# --------------------------------------------------------------------------------------------------
# Exact arithmetic of such floats, before rounding
# --------------------------------------------------------------------------------------------------
def fused(a: Any, b: Any, c: Any, mode: str = "rn") -> Any:
    """Return a * b + c."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c  # even if a * b is too large for a float
    total = Fraction(a) * Fraction(b) + Fraction(c)
    if is_negative(a) ^ is_negative(b) ^ is_negative(c):
        return total or (-0.0 if mode == "rm" else 0.0)
    return total or c


def plus(a: Any, b: Any) -> Any:
    return fused(a, 1.0, b)


def minus(a: Any, b: Any) -> Any:
    return fused(b, -1.0, a)


def times(a: Any, b: Any) -> Any:
    return fused(a, b, -0.0)


def over(a: Any, b: Any) -> Any:
    if b == 0:
        return a * math.copysign(math.inf, b)
    exact = a and math.isfinite(a) and math.isfinite(b)
    return Fraction(a) / Fraction(b) if exact else a / b


def ordered(a: Any) -> Any:
    """Return a key that sorts floats, -0 below +0."""
    return a, not is_negative(a)


def least(a: Any, b: Any) -> Any:
    return b if a != a else a if b != b else min(a, b, key=ordered)


def greatest(a: Any, b: Any) -> Any:
    return b if a != a else a if b != b else max(a, b, key=ordered)


def without_subnormals(a: Any) -> Any:
    """Flush subnormal numbers to zero, as ``.ftz`` does."""
    return math.copysign(0.0, a) if abs(a) < 2**-126 else a


def compared(how: str, a: Any, b: Any) -> bool:
    unordered = a != a or b != b
    if how in ("num", "nan"):
        return unordered == (how == "nan")
    if unordered:
        return how.endswith("u")
    return {
        "eq": a == b,
        "ne": a != b,
        **dict.fromkeys(("lt", "lo"), a < b),
        **dict.fromkeys(("le", "ls"), a <= b),
        **dict.fromkeys(("gt", "hi"), a > b),
        **dict.fromkeys(("ge", "hs"), a >= b),
    }[how[:2]]


# --------------------------------------------------------------------------------------------------
# Integers
# --------------------------------------------------------------------------------------------------
def quotient(a: int, b: int) -> int:
    return (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def inserted(a: int, b: int, start: int, length: int, bits: int) -> int:
    start, length = start & 0xFF, length & 0xFF
    for i in range(length):
        if start + i < bits:
            b = b & ~(1 << (start + i)) | (a >> i & 1) << (start + i)
    return b


def permuted(a: int, b: int, selector: int) -> int:
    pool = [(b << 32 | a) >> (8 * i) & 0xFF for i in range(8)]
    result = 0
    for i in range(4):
        pick = selector >> (4 * i) & 0xF
        byte = pool[pick & 7]
        result |= ((0xFF if byte >> 7 else 0) if pick & 8 else byte) << (8 * i)
    return result


def reversed_bits(a: int, bits: int) -> int:
    return int(f"{a:0{bits}b}"[::-1], 2)


# --------------------------------------------------------------------------------------------------
# The instructions
# --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Op:
    """An opcode, the types of its result and operands, and its reference function.

    ``relative`` is the permitted relative error of an approximate function, for normal results; 0
    means exact bits.
    """

    opcode: str
    result: str
    operands: tuple[str, ...]
    compute: Callable[..., Any]
    mode: str = "rn"
    flushes: bool = False
    relative: float = 0.0


OPS: list[Op] = []


def op(opcode: str, result: str, operands: str, compute: Callable[..., Any], **more: Any) -> None:
    """Register an instruction and its reference function."""
    OPS.append(Op(opcode, result, tuple(operands.split()), compute, **more))


def with_ftz(opcode: str, result: str, operands: str, compute: Callable[..., Any], **more: Any):
    op(opcode, result, operands, compute, **more)
    flushing = re.sub(r"(\.[usbf]\d+)", r".ftz\1", opcode, count=1)
    op(flushing, result, operands, compute, flushes=True, **more)


for bits in (16, 32, 64):
    for kind in "us":
        t = f"{kind}{bits}"
        mask = (1 << bits) - 1
        op(f"add.{t}", t, f"{t} {t}", lambda a, b: a + b)
        op(f"sub.{t}", t, f"{t} {t}", lambda a, b: a - b)
        op(f"mul.lo.{t}", t, f"{t} {t}", lambda a, b: a * b)
        op(f"mul.hi.{t}", t, f"{t} {t}", lambda a, b, n=bits: a * b >> n)
        op(f"mad.lo.{t}", t, f"{t} {t} {t}", lambda a, b, c: a * b + c)
        # The result of a division by zero is unspecified.
        op(f"div.{t}", t, f"{t} {t}", lambda a, b: quotient(a, b) if b else None)
        op(f"rem.{t}", t, f"{t} {t}", lambda a, b: a - b * quotient(a, b) if b else None)
        op(f"min.{t}", t, f"{t} {t}", min)
        op(f"max.{t}", t, f"{t} {t}", max)
        op(f"shr.{t}", t, f"{t} u32", lambda a, n: a >> min(n, 99))
        if bits < 64:
            wide = f"{kind}{2 * bits}"
            op(f"mul.wide.{t}", wide, f"{t} {t}", lambda a, b: a * b)
            op(f"mad.wide.{t}", wide, f"{t} {t} {wide}", lambda a, b, c: a * b + c)
    t, s = f"b{bits}", f"s{bits}"
    op(f"neg.{s}", s, s, lambda a: -a)
    op(f"abs.{s}", s, s, abs)
    op(f"shl.{t}", t, f"{t} u32", lambda a, n: a << min(n, 99))
    op(f"and.{t}", t, f"{t} {t}", lambda a, b: a & b)
    op(f"or.{t}", t, f"{t} {t}", lambda a, b: a | b)
    op(f"xor.{t}", t, f"{t} {t}", lambda a, b: a ^ b)
    op(f"not.{t}", t, t, lambda a: ~a)
    op(f"selp.{t}", t, f"{t} {t} pred", lambda a, b, c: a if c else b)
    op(f"mov.{t}", t, t, lambda a: a)
    if bits > 16:
        op(f"bfi.{t}", t, f"{t} {t} u32 u32", partial(inserted, bits=bits))
        op(f"popc.{t}", "u32", t, int.bit_count)
op("clz.b32", "u32", "b32", lambda a: 32 - a.bit_length())
op("brev.b32", "b32", "b32", partial(reversed_bits, bits=32))
op("selp.f32", "f32", "f32 f32 pred", lambda a, b, c: a if c else b)
op("and.pred", "pred", "pred pred", lambda a, b: a and b)
op("or.pred", "pred", "pred pred", lambda a, b: a or b)
op("xor.pred", "pred", "pred pred", lambda a, b: a != b)
op("not.pred", "pred", "pred", lambda a: not a)
op("prmt.b32", "b32", "b32 b32 b32", permuted)
op("shf.l.wrap.b32", "b32", "b32 b32 u32", lambda a, b, n: ((b << 32 | a) << (n & 31)) >> 32)
op("shf.r.wrap.b32", "b32", "b32 b32 u32", lambda a, b, n: (b << 32 | a) >> (n & 31))
for t in ("f32", "f64"):
    entered = with_ftz if t == "f32" else op
    entered(f"add.{t}", t, f"{t} {t}", plus)
    entered(f"sub.{t}", t, f"{t} {t}", minus)
    entered(f"mul.{t}", t, f"{t} {t}", times)
    entered(f"fma.rn.{t}", t, f"{t} {t} {t}", fused)
    entered(f"min.{t}", t, f"{t} {t}", least)
    entered(f"max.{t}", t, f"{t} {t}", greatest)
    entered(f"neg.{t}", t, t, operator.neg)
    entered(f"abs.{t}", t, t, abs)
    for how in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu",
                "num", "nan"):  # fmt: skip
        entered(f"setp.{how}.{t}", "pred", f"{t} {t}", partial(compared, how))
for t in ("f32", "f64"):
    (with_ftz if t == "f32" else op)(f"div.rn.{t}", t, f"{t} {t}", over)
with_ftz("rcp.rn.f32", "f32", "f32", lambda a: over(1.0, a))
for how in ("eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"):
    for t in (
        ("u32", "u64") if how[0] in "lh" and how not in ("lt", "le") else ("s16", "u32", "s64")
    ):
        op(f"setp.{how}.{t}", "pred", f"{t} {t}", partial(compared, how))
for join, both in (("and", lambda x, y: x and y), ("or", lambda x, y: x or y),
                   ("xor", lambda x, y: x != y)):  # fmt: skip
    op(f"setp.lt.{join}.s32", "pred", "s32 s32 pred", lambda a, b, c, both=both: both(a < b, c))
for mode in ("rm", "rp", "rz"):
    with_ftz(f"fma.{mode}.f32", "f32", "f32 f32 f32", partial(fused, mode=mode), mode=mode)


def same(a: Any) -> Any:
    return a


for to, of in itertools.product([f"{k}{n}" for k in "us" for n in (8, 16, 32, 64)], repeat=2):
    op(f"cvt.{to}.{of}", to, of, same)
for to, of in itertools.product(
    ("f16", "f32", "f64"), [f"{k}{n}" for k in "us" for n in (16, 32, 64)]
):
    op(f"cvt.rn.{to}.{of}", to, of, same)
for to, of in (("f32", "f16"), ("f64", "f32")):
    op(f"cvt.{to}.{of}", to, of, same)
for to, of in (("f32", "f64"), ("f16", "f32"), ("bf16", "f32")):
    op(f"cvt.rn.{to}.{of}", to, of, same)


def between_0_and_1(a: Any) -> Any:
    return min(a, 1.0) if a > 0 else 0.0


op("cvt.sat.f32.f32", "f32", "f32", between_0_and_1)
op("cvt.ftz.sat.f32.f32", "f32", "f32", between_0_and_1, flushes=True)
op("cvt.rn.f16x2.f32", "b32", "f32 f32",
   lambda a, b: encoded(a, "f16") << 16 | encoded(b, "f16"))  # fmt: skip
op("cvt.rn.bf16x2.f32", "b32", "f32 f32",
   lambda a, b: encoded(a, "bf16") << 16 | encoded(b, "bf16"))  # fmt: skip


def approximate(function: Callable[[float], float]) -> Callable[[Any], Any]:
    """Return a C library function in double precision; it returns None where not compared."""

    def compute(a: Any) -> Any:
        return function(a) if 1e-6 <= abs(a) <= 60 else None

    return compute


for name, function in (
    ("rcp.approx", lambda a: 1 / a),
    ("ex2.approx", lambda a: 2**a),
):
    with_ftz(f"{name}.f32", "f32", "f32", approximate(function), relative=2**-18)
for how in ("full", "approx"):
    with_ftz(f"div.{how}.f32", "f32", "f32 f32", over, relative=2**-21)

# --------------------------------------------------------------------------------------------------
# Execution
# --------------------------------------------------------------------------------------------------
_FLOAT_EDGES = (
    "0", "-0", "1", "-1", "1.5", "2.5", "-2.5", "-0.5", "0.1", "-3.7", "1000.25", "65504", "65520",
    "2147483647.5", "-2147483649", "4294967295", "9.3e18", "-9.3e18", "1.9e19", "1e-7", "6e-8",
    "-6e-8", "5.96e-8", "1e-40", "-1e-42", "1.1754942e-38", "1.17549435e-38", "1e-300", "3e38",
    "-3.4028234e38", "1e308", "inf", "-inf", "nan", "16777217", "33554433", "2049", "-2051",
)  # fmt: skip


def edges(type_name: str) -> list[int]:
    """Return the bits of a type's edge cases."""
    if type_name == "pred":
        return [0, 1]
    if type_name in FORMATS:
        found = [encoded(float(word), type_name) for word in _FLOAT_EDGES]
        mantissa, exponent = FORMATS[type_name]
        found += [1, 1 << mantissa, (1 << mantissa) - 1, ((1 << exponent) - 1 << mantissa) - 1]
        return list(dict.fromkeys(found))
    bits = width(type_name)
    top = 1 << (bits - 1)
    found = [0, 1, 2, 3, 7, 31, 32, 33, 64, 100, 127, 128, 255, 256, top - 1, top, top + 1,
             2 * top - 1, 2 * top - 2, 0x5A5A5A5A5A5A5A5A, 0x8765432112345678]  # fmt: skip
    return list(dict.fromkeys(one & (2 * top - 1) for one in found))


_CASES = 500
"""Maximum number of edge combinations per instruction (hand-set)."""


def inputs_of(one: Op) -> list[tuple[int, ...]]:
    """Return tuples of operand bits: edge combinations (or a sample) and random bits."""
    generator = random.Random(one.opcode)
    lists = [edges(operand) for operand in one.operands]
    if math.prod(map(len, lists)) <= _CASES:
        inputs = list(itertools.product(*lists))
    else:
        inputs = [tuple(generator.choice(values) for values in lists) for _ in range(_CASES)]
    bits = [size_of(operand) for operand in one.operands]
    return inputs + [tuple(generator.getrandbits(n) for n in bits) for _ in range(100)]


def register(type_name: str) -> str:
    """Return the register kind of a type; 8-bit types use 32-bit registers."""
    return {1: "p", 16: "h", 64: "d"}.get(size_of(type_name), "r")


def kernel_text(number: int, one: Op) -> str:
    """Return a kernel that applies the instruction to operands of 64 bits each."""
    parameters = [f".param .u64 p{i}" for i in range(len(one.operands) + 1)]
    lines = [
        "mov.u32 %r90, %ctaid.x;", "mov.u32 %r91, %ntid.x;", "mov.u32 %r92, %tid.x;",
        "mad.lo.s32 %r93, %r90, %r91, %r92;", "ld.param.u32 %r94, [n];",
        "setp.ge.u32 %p90, %r93, %r94;", "@%p90 bra $DONE;", "mul.wide.u32 %d90, %r93, 8;",
    ]  # fmt: skip
    names = []
    for i, type_name in enumerate(one.operands):
        kind = register(type_name)
        names.append(f"%{kind}{i + 1}")
        lines += [f"ld.param.u64 %d91, [p{i}];", "add.s64 %d92, %d91, %d90;",
                  f"ld.global.b64 %d{50 + i}, [%d92];"]  # fmt: skip
        lines.append(
            {
                "p": f"setp.ne.u64 %p{i + 1}, %d{50 + i}, 0;",
                "h": f"cvt.u16.u64 %h{i + 1}, %d{50 + i};",
                "r": f"cvt.u32.u64 %r{i + 1}, %d{50 + i};",
                "d": f"mov.b64 %d{i + 1}, %d{50 + i};",
            }[kind]
        )
    kind = register(one.result)
    operands = ", ".join([f"%{kind}40", *names])
    lines.append(f"{one.opcode} {operands};")
    lines.append(
        {
            "p": "selp.b64 %d41, 1, 0, %p40;",
            "h": "cvt.u64.u16 %d41, %h40;",
            "r": "cvt.u64.u32 %d41, %r40;",
            "d": "mov.b64 %d41, %d40;",
        }[kind]
    )
    lines += [f"ld.param.u64 %d91, [p{len(one.operands)}];", "add.s64 %d92, %d91, %d90;",
              "st.global.b64 [%d92], %d41;"]  # fmt: skip
    return (
        f".visible .entry op{number}({', '.join(parameters)}, .param .u32 n)\n{{\n"
        ".reg .pred %p<99>; .reg .b16 %h<99>; .reg .b32 %r<99>; .reg .b64 %d<99>;\n"
        + "\n".join(lines)
        + "\n$DONE:\nret;\n}\n"
    )


@pytest.fixture(scope="session")
def module() -> EmulatedModule:
    """Build one module with a kernel for each instruction."""
    text = ".version 8.8\n.target sm_90a\n.address_size 64\n"
    text += "".join(kernel_text(number, one) for number, one in enumerate(OPS))
    return EmulatedModule.from_ptx(text, "opcodes", checked=False)


def matches(one: Op, got: int, wanted: Any) -> bool:
    if wanted is None:
        return True
    number, bits = decoded(got, one.result), encoded(wanted, one.result, one.mode)
    wanted = decoded(bits, one.result)
    if one.relative and wanted and math.isfinite(wanted) and math.isfinite(number):
        return abs(number - wanted) <= abs(wanted) * one.relative + 2**-126
    is_nan = one.result in FORMATS and math.isnan(wanted)
    return math.isnan(number) if is_nan else got & (1 << size_of(one.result)) - 1 == bits


@pytest.mark.costly
@pytest.mark.parametrize("one", OPS, ids=lambda one: one.opcode)
def test_opcode(one: Op, module: EmulatedModule) -> None:
    inputs = inputs_of(one)
    columns = [memory.array(np.array(column, np.uint64)) for column in zip(*inputs, strict=True)]
    out = memory.empty((len(inputs),), np.uint64)
    kernel = module.get_function(f"op{OPS.index(one)}")
    kernel(((len(inputs) + 127) // 128,), (128,), (*columns, out, np.uint32(len(inputs))))
    mismatches = []
    for bits, result in zip(inputs, out.tolist(), strict=True):
        values = [decoded(value, t) for value, t in zip(bits, one.operands, strict=True)]
        if one.flushes:
            values = [without_subnormals(v) if t == "f32" else v
                      for v, t in zip(values, one.operands, strict=True)]  # fmt: skip
        wanted = one.compute(*values)
        if one.flushes and one.result == "f32" and wanted is not None:
            wanted = without_subnormals(decoded(encoded(wanted, "f32", one.mode), "f32"))
        if not matches(one, result, wanted):
            mismatches.append((values, hex(result), wanted))
    assert not mismatches, f"{len(mismatches)} of {len(inputs)}: {mismatches[:4]}"


COMPUTING = {"integer", "bits", "float", "compare", "convert"}


def test_every_computing_opcode_is_tested() -> None:
    tested = {entry.opcode for entry in OPS} | {"cvt.rna.tf32.f32"}  # tested by a golden kernel
    missing = [
        row.pattern.pattern
        for row in INSTRUCTIONS
        if row.kind in COMPUTING and not any(row.pattern.fullmatch(opcode) for opcode in tested)
    ]
    assert not missing
