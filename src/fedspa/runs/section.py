"""What sections of a config are made of: a strict base, and kinds of values with bounds.

Every number has bounds, far beyond any use and well within what the code behind it can count, store or invert.
"""

from __future__ import annotations

import os
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_LONGEST_NAME = 255  # of a file, in bytes, on every usual file system


def _a_path(text: str) -> str:
    if "\0" in text or max(len(os.fsencode(part)) for part in text.split("/")) > _LONGEST_NAME:
        raise ValueError(f"it must have no NUL character in it and no name of more than {_LONGEST_NAME} bytes")
    return text


def _an_address(text: str) -> str:
    if re.fullmatch(r"auto|[^\s/]+:[0-9]{1,5}", text) is None:
        raise ValueError("it must be 'auto', or host:port of a Ray cluster that this machine belongs to")
    return text


Many = Annotated[int, Field(ge=1, le=10**7)]  # agents, records
Times = Annotated[int, Field(ge=1, le=10**6)]  # rounds, steps
Bounded = Annotated[float, Field(ge=-1e12, le=1e12)]  # a score; what a key may be, its own section says
Setting = bool | Annotated[int, Field(ge=-(10**12), le=10**12)] | Bounded | str
Share = Annotated[float, Field(ge=0, lt=1)]
StepSize = Annotated[float, Field(ge=1e-10, le=1e10)]
Name = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(_a_path)]  # of something that may be a file
Address = Annotated[str, Field(max_length=300), AfterValidator(_an_address)]  # of a Ray cluster


class Section(BaseModel):
    """Strict: unknown keys, NaN, ∞ and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())
