"""JSON form of frozen dataclasses: conversion to plain values, checked parsing, and the JSON schema.

All three follow from the field types, so they cannot disagree. Supported are int (0 or more), finite float, str, bool,
Any, Literal, tuple[T, ...], dict[str, T], T | None, dataclasses, and unions of dataclasses that differ in a Literal
field.
A field with the default None is an optional key: it is left out of the JSON while its value is None.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def to_plain(value: object) -> Any:
    """The value in the types of `json.loads`: dataclasses become dicts, tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not (_is_optional(field) and getattr(value, field.name) is None)
        }
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], value: object, where: str = "") -> T:
    """The dataclass `kind` from what `to_plain` made of it. Unknown keys are ignored.

    where: path of the value in the document, for messages. Raises ValueError if a key is missing or has another type.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'the document'} is not an object")
    arguments = {}
    for field in dataclasses.fields(cast(Any, kind)):
        path = f"{where}.{field.name}" if where else field.name
        if field.name in value:
            arguments[field.name] = _parse(_types(cast(Any, kind))[field.name], value[field.name], path)
        elif not _is_optional(field):
            raise ValueError(f"{path} is missing")
    return kind(**arguments)


def json_schema(kind: type) -> dict[str, Any]:
    """JSON schema, draft 2020-12, of the documents that `to_plain` makes of `kind`."""
    definitions: dict[str, Any] = {}
    root = _object_schema(kind, definitions)
    return {"$schema": DIALECT, "title": kind.__name__, **root, "$defs": dict(sorted(definitions.items()))}


def _parse(kind: Any, value: object, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return from_plain(cast(type, kind), value, where)
    if origin in (UnionType, Union):
        return _parse_union(arguments, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is not an array")
        return tuple(_parse(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is not an object")
        return {key: _parse(arguments[1], item, f"{where}[{key!r:.100}]") for key, item in value.items()}
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} is {value!r:.60}, not {arguments[0]!r}")
        return value
    return _parse_scalar(kind, value, where)


def _parse_union(kinds: tuple[Any, ...], value: object, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    members = [kind for kind in kinds if kind is not type(None)]
    if len(members) == 1:
        return _parse(members[0], value, where)
    for kind in members:
        if isinstance(value, dict) and all(value.get(key) == tag for key, tag in _tags(kind).items()):
            return from_plain(kind, value, where)
    names = ", ".join(kind.__name__ for kind in members)
    raise ValueError(f"{where} is none of {names}")


def _parse_scalar(kind: Any, value: object, where: str) -> Any:
    if kind is float and type(value) in (int, float):
        try:
            number = float(cast(float, value))
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
        raise ValueError(f"{where} is not a finite number")
    if type(value) is not kind or (kind is int and cast(int, value) < 0):
        wanted = {int: "an integer of at least 0", float: "a number", str: "a string", bool: "true or false"}
        raise ValueError(f"{where} is not {wanted[kind]}")
    return value


def _object_schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    fields = dataclasses.fields(kind)
    description = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    return {
        "description": description,
        "type": "object",
        "properties": {field.name: _schema(_property_type(kind, field), definitions) for field in fields},
        "required": [field.name for field in fields if not _is_optional(field)],
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        name = cast(type, kind).__name__
        if name not in definitions:
            definitions[name] = {}  # reserves the name while the fields are visited
            definitions[name] = _object_schema(kind, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if origin in (UnionType, Union):
        return {"anyOf": [_schema(member, definitions) for member in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}
    if origin is Literal:
        return {"enum": list(arguments)}
    scalars: dict[Any, dict[str, Any]] = {
        Any: {}, int: {"type": "integer", "minimum": 0}, float: {"type": "number"}, str: {"type": "string"},
        bool: {"type": "boolean"}, type(None): {"type": "null"},
    }  # fmt: skip
    return scalars[kind]


def _property_type(kind: Any, field: dataclasses.Field[Any]) -> Any:
    """The field's type; without None if a None is left out of the JSON."""
    declared = _types(kind)[field.name]
    if not _is_optional(field):
        return declared
    (member,) = (member for member in get_args(declared) if member is not type(None))
    return member


def _is_optional(field: dataclasses.Field[Any]) -> bool:
    return field.default is None


def _tags(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass that have one possible value, and that value."""
    return {
        name: get_args(declared)[0]
        for name, declared in _types(kind).items()
        if get_origin(declared) is Literal
    }


@cache
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
