"""A cell of a table: text from a CSV, or what Parquet and pandas give; read as a word, a number or a flag.

Nothing here depends on another cell. Whatever a cell holds, the answer is a value, None for nothing, or Odd.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from decimal import Decimal

import numpy as np

# What stands for a missing value, in any case; a category of this name is a category where it is listed.
MISSING = frozenset({"", "na", "n/a", "nan", "null"})
# What programs write for a missing id: their words without signs, so that #N/A and <NA> are among them; the code of
# pandas.factorize; and what a NaN becomes when it is cast to a whole number.
_NO_IDS = frozenset({"", "na", "nan", "null", "none", "nat", "inf"})
_NO_NUMBERS = frozenset(map(str, (-1, -(2**31), -(2**63), 2**63)))
_FLAGS = dict.fromkeys(("true", "yes", "y", "t", "1"), 1.0) | dict.fromkeys(("false", "no", "n", "f", "0"), 0.0)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", flags=re.I | re.A)
_NUMPYS = (np.bool_, np.integer, np.floating)  # not numpy's dates, which would become numbers

Reader = Callable[[object], float | None]


class Odd(Exception):
    """A cell is not what its column needs. `reason` is a clause about the cell, `advice` says what is allowed."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


def word(cell: object) -> str | None:
    """A cell as text, a whole number as its digits; None where there is nothing. Missing words are texts."""
    if isinstance(cell, _NUMPYS):
        cell = cell.item()
    if isinstance(cell, str):
        return cell.strip()
    if _nothing(cell):
        return None
    if isinstance(cell, float):
        return str(int(cell)) if cell.is_integer() and abs(cell) < 2**53 else str(cell)
    if isinstance(cell, int) and abs(cell) < 10**100:  # a flag among them: True
        return str(cell)
    raise Odd("is no text", "texts and whole numbers are words")


def identifier(cell: object) -> str | None:
    """The id of a person or an agent as text; None where there is none. Records that share what stands for a missing
    id would pass for those of one person."""
    text = word(cell)
    if text is None or text in _NO_NUMBERS or "".join(filter(str.isalnum, text[:40])).lower() in _NO_IDS:
        return None
    return text


def number(cell: object) -> float | None:
    """A finite number."""
    if isinstance(cell, _NUMPYS):
        cell = cell.item()
    if isinstance(cell, str):
        cell = cell.strip()
        value = float(cell) if _NUMBER.fullmatch(cell) else None
        if value is None and cell.lower() in MISSING:
            return None
    elif _nothing(cell):
        return None
    elif isinstance(cell, int | float | Decimal) and not isinstance(cell, bool):
        value = math.inf if isinstance(cell, int) and abs(cell) > 10**300 else float(cell)
    else:
        value = None
    if value is None or not math.isfinite(value):
        raise Odd("is no finite number", "write it as in 12, -0.5 or 1e-3")
    return value


def flag(cell: object) -> float | None:
    """1 or 0, for true or false."""
    text = word(cell)
    if text is None or text.lower() in MISSING:
        return None
    if (value := _FLAGS.get(text.lower())) is None:
        raise Odd("is no word for true or false", "write true or false, yes or no, 1 or 0")
    return value


def _nothing(cell: object) -> bool:
    """None, NaN, and what pandas and numpy's masked arrays have for them."""
    return (
        cell is None
        or (isinstance(cell, float) and cell != cell)
        or (isinstance(cell, Decimal) and cell.is_nan())
        or type(cell).__name__ in ("NAType", "NaTType", "MaskedConstant")
    )
