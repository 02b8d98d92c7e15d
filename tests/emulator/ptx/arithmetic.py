"""Instructions that compute a value: integers, floating point, bits, conversions."""

from __future__ import annotations

import re

from .syntax import PtxError, elements
from .table import ANY, BITS, FTZ, INTEGER, cpp_type, expression, instruction, width

# --------------------------------------------------------------------------------------------------
# Integers
# --------------------------------------------------------------------------------------------------
for _name, _function in (
    ("add", "add"),
    ("sub", "sub"),
    ("mul.lo", "mul_lo"),
    ("mul.hi", "mul_hi"),
    ("div", "quotient"),
    ("rem", "remaining"),
):
    expression("integer", rf"{re.escape(_name)}\.{INTEGER}", f"{_function}(a, b)")
expression("integer", r"mul\.wide\.(?P<t>[us](?:16|32))", "mul_wide(a, b)")
expression("integer", rf"mad\.lo\.{INTEGER}", "add(mul_lo(a, b), c)")
for _from, _to in ((16, 32), (32, 64)):
    for _sign in "us":
        _operand = f"{_sign}{_from}"
        expression("integer", rf"mad\.wide\.{_operand}", "add(mul_wide(a, b), c)",
                   _operand, _operand, f"{_sign}{_to}")  # fmt: skip
for _name, _function in (("min", "minimum"), ("max", "maximum")):
    expression("integer", rf"{_name}\.(?P<t>[us](?:16|32|64))", f"{_function}(a, b)")
expression("integer", r"neg\.(?P<t>s16|s32|s64)", "sub({t}(0), a)")
expression("integer", r"abs\.(?P<t>s16|s32|s64)", "absolute(a)")
for _name, _sign in (("and", "&"), ("or", "|"), ("xor", "^")):
    expression("bits", rf"{_name}\.{BITS}", f"{{t}}(a {_sign} b)")
expression("bits", r"not\.pred", "!a", "pred")
expression("bits", r"not\.(?P<t>b16|b32|b64)", "{t}(~a)")
expression("bits", r"shl\.(?P<t>b16|b32|b64)", "shl(a, b)", "{t}", "u32")
expression("bits", rf"shr\.{INTEGER}", "shr(a, b)", "{t}", "u32")
for _way, _function in (("l", "funnel_left"), ("r", "funnel_right")):
    expression("bits", rf"shf\.{_way}\.wrap\.b32", f"{_function}(a, b, c & 31)",
               "b32", "b32", "u32")  # fmt: skip
expression("bits", r"bfi\.(?P<t>b32|b64)", "bfi(a, b, c, d)", "{t}", "{t}", "u32", "u32")
expression("bits", r"prmt\.b32", "prmt(a, b, c)", "b32", "b32", "b32")
expression("bits", r"popc\.b32", "u32(__builtin_popcount(a))", "b32")
expression("bits", r"popc\.b64", "u32(__builtin_popcountll(a))", "b64")
expression("bits", r"clz\.b32", "u32(a ? __builtin_clz(a) : 32)", "b32")
expression("bits", r"brev\.b32", "u32(__builtin_bitreverse32(a))", "b32")

# --------------------------------------------------------------------------------------------------
# Floating point
# --------------------------------------------------------------------------------------------------
for _name, _sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
    expression("float", rf"{_name}(\.rn)?{FTZ}\.(?P<t>f32)", f"a {_sign} b")
    expression("float", rf"{_name}(\.rn)?\.(?P<t>f64)", f"{{t}}(a {_sign} b)")
expression("float", rf"div\.(rn|full|approx){FTZ}\.(?P<t>f32)", "a / b")
expression("float", r"div\.rn\.(?P<t>f64)", "a / b")
expression("float", rf"fma\.rn{FTZ}\.(?P<t>f32)", "__builtin_fmaf(a, b, c)", "f32", "f32", "f32")
expression("float", r"fma\.rn\.f64", "__builtin_fma(a, b, c)", "f64", "f64", "f64")
_DIRECTED = r"(?P<r>rm|rp|rz)"
expression("float", rf"fma\.{_DIRECTED}{FTZ}\.f32",
           "directed_fma(a, b, c, Rounding::{r})", "f32", "f32", "f32")  # fmt: skip
for _name, _function in (("min", "minimum"), ("max", "maximum")):
    expression("float", rf"{_name}{FTZ}\.(?P<t>f32)", f"{_function}(a, b)")
    expression("float", rf"{_name}\.(?P<t>f64)", f"{_function}(a, b)")
for _name, _function in (("neg", "negated"), ("abs", "absolute")):
    expression("float", rf"{_name}{FTZ}\.(?P<t>f32)", f"{_function}(a)")
    expression("float", rf"{_name}\.(?P<t>f64)", f"{_function}(a)")
# Approximate functions use the host's rounding, as in the source build.
for _name, _text in (
    ("rcp", "1 / a"),
    ("ex2", "std::exp2(a)"),
):
    expression("float", rf"{_name}\.(rn|approx){FTZ}\.(?P<t>f32)", _text)

# --------------------------------------------------------------------------------------------------
# Comparison and selection
# --------------------------------------------------------------------------------------------------
expression("compare", rf"selp\.{ANY}", "c ? a : b", "{t}", "{t}", "pred")

_COMPARISONS = {
    "eq": "a == b", "ne": "a < b || a > b", "lt": "a < b", "le": "a <= b", "gt": "a > b",
    "ge": "a >= b", "equ": "!(a < b || a > b)", "neu": "!(a == b)", "ltu": "!(a >= b)",
    "leu": "!(a > b)", "gtu": "!(a <= b)", "geu": "!(a < b)", "num": "a == a && b == b",
    "nan": "a != a || b != b", "lo": "a < b", "ls": "a <= b", "hi": "a > b", "hs": "a >= b",
}  # fmt: skip


@instruction(
    "compare",
    rf"setp\.(?P<c>{'|'.join(_COMPARISONS)})(\.(?P<join>and|or|xor))?{FTZ}"
    r"\.(?P<t>[usb](?:16|32|64)|f16|f32|f64)",
)
def _setp(writer, operands: list[str], c: str, join: str | None, ftz: str | None, t: str) -> str:
    if ftz and t != "f32":
        raise PtxError("only f32 is flushed")
    first, _, second = operands[0].partition("|")
    a, b = (writer.read(one, t) for one in operands[1:3])
    if ftz:
        a, b = f"flush({a})", f"flush({b})"
    code = f"const auto a = {a}; const auto b = {b}; const bool holds = {_COMPARISONS[c]};"
    also = ""
    if join:
        code += f"const bool c = {writer.read(operands[3], 'pred')};"
        also = {"and": " && c", "or": " || c", "xor": " != c"}[join]
    code += writer.write(first, f"(holds{also})")
    return code + (writer.write(second, f"(!holds{also})") if second else "")


# --------------------------------------------------------------------------------------------------
# Moves and conversions
# --------------------------------------------------------------------------------------------------
@instruction("move", rf"mov\.{ANY}")
def _mov(writer, operands: list[str], t: str) -> str:
    """Write a move, which may pack or unpack a vector."""
    target, source = (elements(one) for one in operands)
    if len(target) == len(source) == 1:
        return writer.write(target[0], writer.read(source[0], t))
    part = f"b{width(t) // max(len(target), len(source))}"
    if len(source) > 1:
        terms = [
            f"{cpp_type(t)}({writer.read(one, part)}) << {i * width(part)}"
            for i, one in enumerate(source)
        ]
        return writer.write(target[0], f"{cpp_type(t)}({' | '.join(terms)})")
    whole = f"const auto whole = {writer.read(source[0], t)};"
    return whole + "".join(
        writer.write(one, f"{cpp_type(part)}(whole >> {i * width(part)})")
        for i, one in enumerate(target)
    )


_INTEGER = r"[us](?:8|16|32|64)"
expression("convert", rf"cvt\.(?P<t>{_INTEGER})\.(?P<s>{_INTEGER})", "{t}(a)", "{s}")
expression("convert", rf"cvt\.rn\.(?P<t>f16|f32|f64)\.(?P<s>{_INTEGER})", "{t}(a)", "{s}")
expression("convert", rf"cvt{FTZ}\.(?P<t>f32)\.(?P<s>f16|f32)", "{t}(a)", "{s}")
expression("convert", rf"cvt{FTZ}\.(?P<t>f64)\.(?P<s>f32)", "{t}(a)", "{s}")
expression("convert", rf"cvt\.rn{FTZ}\.(?P<t>f32)\.(?P<s>f64)", "{t}(a)", "{s}")
expression("convert", r"cvt\.rn\.f16\.f32", "ptx::f16_from_f32(a)", "f32")
expression("convert", r"cvt\.rn\.bf16\.f32", "ptx_twin::nearest_bf16(a)", "f32")
expression("convert", r"cvt\.rn\.f16x2\.f32", "ptx::f16x2_from_f32(b, a)", "f32", "f32")
expression("convert", r"cvt\.rn\.bf16x2\.f32", "ptx::bf16x2_from_f32(b, a)", "f32", "f32")
expression("convert", r"cvt\.rna\.tf32\.f32", "ptx::tf32_from_f32(a)", "f32")
expression("convert", rf"cvt{FTZ}\.sat\.(?P<t>f32)\.(?P<s>f32)", "saturate(a)", "{s}")
