"""Frozen dataclasses as JSON and back: each object is tagged with its type, so that a run starts again from its file.

    {"type": "ctx_jax.data.readers:Blocks", "length": 128, "join_documents": false, "stride": null}

Fields are scalars, strings, paths, None, tuples and dataclasses; there are no dictionaries.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCALARS = (bool, int, float, str, type(None))


def to_json(value: Any) -> Any:
    """The JSON form of a dataclass or of a field's value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": f"{kind.__module__}:{kind.__qualname__}", **fields}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, SCALARS):
        return value
    raise ValueError(f"{value!r} cannot stand in an experiment: use scalars, strings, paths, tuples and dataclasses")


def from_json(value: Any, where: str = "experiment") -> Any:
    """The dataclass that `to_json` wrote.

    Raises ValueError naming the place if a type cannot be found or a field is unknown, missing or of a wrong type.
    """
    if isinstance(value, list):
        return tuple(from_json(item, f"{where}[{index}]") for index, item in enumerate(value))
    if not isinstance(value, dict):
        return value
    kind = find_type(value.get("type"), where)
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    arguments = {}
    for name, item in value.items():
        if name == "type":
            continue
        if name not in names:
            raise ValueError(f"{where}: {kind.__name__} has no field {name!r}{nearest(name, names)}")
        arguments[name] = typed(from_json(item, f"{where}.{name}"), hints[name], f"{where}.{name}")
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in arguments
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: {kind.__name__} needs the field {missing[0]!r}")
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def find_type(tag: Any, where: str) -> type:
    """The dataclass named "module:Class"."""
    module, _, name = str(tag).partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        kind = None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{where}: type {tag!r} is not a dataclass that can be imported")
    return kind


def typed(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotation `hint` wants it: strings become paths and ints floats where only those fit."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if Any in options:
        return value
    for option in options:
        items = typing.get_args(option)
        if isinstance(value, tuple) and typing.get_origin(option) is tuple and items[1:] == (...,):
            return tuple(typed(item, items[0], f"{where}[{index}]") for index, item in enumerate(value))
        origin = typing.get_origin(option) or option
        if origin is typing.Literal:
            if value in typing.get_args(option):
                return value
        elif not isinstance(origin, type) or (isinstance(value, origin) and not _is_bool_as_int(value, origin)):
            return value
    if Path in options and isinstance(value, str):
        return Path(value)
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    literals = [typing.get_args(option) for option in options if typing.get_origin(option) is typing.Literal]
    names = [option.__name__ for option in options if isinstance(option, type)]
    wanted = " or ".join([repr(choice) for choices in literals for choice in choices] + names)
    raise ValueError(f"{where}: {value!r} is not of type {wanted}")


def _is_bool_as_int(value: Any, origin: type) -> bool:
    return isinstance(value, bool) and origin is not bool


def nearest(name: str, names: list[str]) -> str:
    """ "; did you mean 'x'?" for the most similar of `names`, or nothing."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted field, value) of every field; one that is a dataclass gives its type, then its own fields, a tuple of
    them each by its number; a path is a string, as in JSON."""
    for field in dataclasses.fields(value):
        yield from leaf(f"{prefix}{field.name}", getattr(value, field.name))


def leaf(name: str, item: Any) -> Iterator[tuple[str, Any]]:
    """What a field called `name` holds, like `leaves`."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield name, type(item).__name__
        yield from leaves(item, f"{name}.")
    elif isinstance(item, tuple) and any(dataclasses.is_dataclass(part) for part in item):
        for number, part in enumerate(item):
            yield from leaf(f"{name}.{number}", part)
    else:
        yield name, str(item) if isinstance(item, Path) else item
