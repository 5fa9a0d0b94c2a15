"""The keys of a config and the values that their types list, read off the types themselves."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedspa.runs.config import Config


def fields(owner: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Each key with its field; of a table of keys (`algorithm.server_options`) each of its own."""
    for key, info in owner.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from fields(info.annotation, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", info


def keys() -> Iterator[tuple[str, Any, Any]]:
    """Each key, its type and its default."""
    for key, info in fields():
        yield key, info.annotation, info.default


def nested(key: str, value: Any) -> dict[str, Any]:
    """The config that says no more than `key`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def listed(kind: Any) -> list[Any] | None:
    """The values that a type itself lists; None where it does not."""
    if kind is bool:
        return [False, True]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) is Annotated:
        return listed(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        found = [listed(part) for part in get_args(kind) if part is not type(None)]
        return found[0] if len(found) == 1 else None
    return None
