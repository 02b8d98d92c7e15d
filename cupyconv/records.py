"""Functions that parse JSON and convert JSON objects to dataclasses, with checks of all types."""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from cupyconv.errors import shown

Kind = TypeVar("Kind")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not valid JSON, or its lists and objects are nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def record(kind: type[Kind], entry: Any) -> Kind:
    """Return an instance of a dataclass from a JSON object; lists become tuples in tuple fields.

    Args:
        kind: the dataclass.
        entry: parsed JSON object, with the names of the dataclass's fields as keys, or an instance,
            whose values are checked.

    Raises:
        ValueError: ``entry`` is not an object, lacks a field without a default, has an unknown
            field, or has a value of the wrong type.
    """
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    if type(entry) is kind:
        entry = {name: getattr(entry, name) for name in known}
    if not isinstance(entry, dict):
        raise ValueError(f"a {kind.__name__} must be an object, got {shown(entry)}")
    for name in entry:
        if name not in known:
            raise ValueError(f"a {kind.__name__} has no field {shown(name)}")
    for name, field in known.items():
        if name not in entry and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"a {kind.__name__} must have the field {name!r}")
    where = kind.__name__
    return kind(**{name: _value(hints[name], v, f"{where}.{name}") for name, v in entry.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to the type ``hint``; ``where`` names the field in error messages."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (hint,) = (option for option in inner if option is not type(None))
        return _value(hint, value, where)
    if origin is Literal:  # checks the type only; the code that uses the value checks the value
        return _value(type(inner[0]), value, where)
    if is_dataclass(hint):
        return record(hint, value)  # type: ignore[arg-type]  # a class, not an instance
    if origin is tuple and isinstance(value, (list, tuple)):
        hints = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
        if len(hints) == len(value):
            return tuple(_value(item, v, where) for item, v in zip(hints, value, strict=True))
    elif hint is Any or type(value) is (origin or hint) or (hint, type(value)) == (float, int):
        return value
    name = hint.__name__ if isinstance(hint, type) else hint
    raise ValueError(f"{where} must be {name}, got {shown(value)}")
