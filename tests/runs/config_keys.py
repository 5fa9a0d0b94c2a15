"""The keys of a config and the values that their types list, read off the types themselves."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fedspa.runs.config import Config


def keys() -> Iterator[tuple[str, Any, Any]]:
    """Each key, its type and its default."""
    for section, field in Config.model_fields.items():
        kind: Any = field.annotation
        for key, info in kind.model_fields.items():
            yield f"{section}.{key}", info.annotation, info.default


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
