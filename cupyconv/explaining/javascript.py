"""JavaScript of the library's shape rules, translated from their Python source for the page.

The translation supports only the syntax that these rules need.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

from cupyconv import errors, formats, problem
from cupyconv.explaining import adjoints

_RULES = {
    errors: "Names",
    problem: "ConvAxis _same_padding _positive _require_batch _require_sizes _require_channels "
    "_require_sides _require_window _result_size interval_text",
    adjoints: "AdjointAxis input_gradient_axis filter_gradient_axis output_padding _bracket",
}
"""Names of the translated functions and classes, keyed by module."""

_METHODS = (
    "of bare any one effective_filter padded_input output formula input_sizes_for "
    "first_input_size_for valid_input_sizes of_input"
)
"""Names of the translated methods and properties."""

_NAMES = {
    "self": "this",
    "Names": "this",  # static methods become methods
    "min": "Math.min",
    "max": "Math.max",
    **{name: f"new {name}" for name in ("ConvError", "ConvAxis", "AdjointAxis")},
}
"""Names in JavaScript, keyed by name in Python."""

_SYNTAX: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Mod: "%", ast.USub: "-", ast.Not: "!",
    ast.And: "&&", ast.Or: "||", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Eq: "===", ast.NotEq: "!==", ast.Load: "", ast.Store: "",
    ast.Assign: "var {targets} = {value};",
    ast.AugAssign: "{target} {op}= {value};",
    ast.Attribute: "{value}.{attr}",
    ast.BinOp: "({left} {op} {right})",
    ast.Expr: "{value};",
    ast.For: "for (const {target} of {iter}) {{ {body} }}",
    ast.If: "if ({test}) {{ {body} }} else {{ {orelse} }}",
    ast.IfExp: "({test} ? {body} : {orelse})",
    ast.List: "[{elts}]",
    ast.Raise: "throw {exc};",
    ast.Return: "return {value};",
    ast.Starred: "...{value}",
    ast.Subscript: "{value}[{slice}]",
    ast.Tuple: "[{elts}]",
    ast.UnaryOp: "{op}{operand}",
    ast.keyword: "{arg}: {value}",
}  # fmt: skip
"""JavaScript of Python's syntax, with the parts of a syntax node in braces."""


@cache
def rules() -> str:
    """Return the script that defines the rules."""
    lines = [f"const formats = {json.dumps({'SPATIAL_AXES': formats.SPATIAL_AXES})};"]
    for module, names in _RULES.items():
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        defined = {getattr(node, "name", ""): node for node in tree.body}
        lines += (_definition(defined[name]) for name in names.split())
    return "\n".join(lines) + "\n"


def _definition(node: Any) -> str:
    """Return a function, or a class with its fields and the methods in _METHODS."""
    if isinstance(node, ast.FunctionDef):
        return f"function {_function(node)}"
    fields = {
        _text(each.target): f" = {_text(each.value)}"
        if isinstance(each.value, ast.Constant)
        else ""
        for each in node.body
        if isinstance(each, ast.AnnAssign)
    }
    parameters = ", ".join(f"{name}{default}" for name, default in fields.items())
    methods = [
        ("get " if "property" in map(ast.unparse, each.decorator_list) else "") + _function(each)
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name in _METHODS.split()
    ]
    made = f"constructor({parameters}) {{ Object.assign(this, {{ {', '.join(fields)} }}); }}"
    return f"class {node.name} {{ {made} {' '.join(methods)} }}"


def _function(node: ast.FunctionDef) -> str:
    names = ", ".join(each.arg for each in node.args.args if each.arg != "self")
    start = 1 if ast.get_docstring(node) else 0
    return f"{node.name}({names}) {{ {_text(node.body[start:])} }}"


def _text(node: Any) -> str:
    """Return a syntax node, or a part of one, in JavaScript."""
    match node:
        case None | str():
            return node or ""
        case list():
            return (" " if node and isinstance(node[0], ast.stmt) else ", ").join(map(_text, node))
        case ast.Constant(value=value):
            return json.dumps(value)
        case ast.Name(id=name):
            return _NAMES.get(name, name)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return f"Math.floor({_text(left)} / {_text(right)})"
        case ast.BoolOp(op=op, values=values):
            return f"({f' {_text(op)} '.join(map(_text, values))})"
        case ast.Compare(left=left, ops=[ast.In()], comparators=[right]):
            return f"{_text(right)}.includes({_text(left)})"
        case ast.Compare(left=left, ops=ops, comparators=others):
            pairs = zip([left, *others], ops, others, strict=False)
            return f"({' && '.join(' '.join(map(_text, pair)) for pair in pairs)})"
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return f"${{{_text(value)}}}"
        case ast.JoinedStr(values=values):
            texts = [_text(each) for each in values]  # those between the values are in quotes
            return f"`{''.join(text if text[0] == '$' else text[1:-1] for text in texts)}`"
        case ast.Subscript(value=value, slice=ast.Constant() | ast.UnaryOp() as place):
            return f"{_text(value)}.at({_text(place)})"
        case ast.GeneratorExp(elt=made, generators=[ast.comprehension(target, values, ifs=[])]):
            return f"{_text(values)}.map(({_text(target)}) => {_text(made)})"
        case ast.Call(func=ast.Attribute(value=value, attr="startswith"), args=[start]):
            return f"{_text(value)}.startsWith({_text(start)})"
        case ast.Call(func=ast.Attribute(value=value, attr="removeprefix"), args=[start]):
            return f'{_text(value)}.replace({_text(start)}, "")'
        case ast.Call(func=function, args=values, keywords=options):
            named = [f"{{ {_text(options)} }}"] if options else []
            return f"{_text(function)}({_text([*values, *named])})"
    parts = {name: _text(part) for name, part in ast.iter_fields(node)}
    return _SYNTAX[type(node)].format(**parts)
