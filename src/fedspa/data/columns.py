"""The schema of a CSV or Parquet file: what each column means, `[data.table]` in a config.

Scaling and encoding use the constants of the schema and nothing else. A mean, a range or a list of categories computed
from the records would be a release of them, and would need a budget of its own.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedspa import toml
from fedspa.errors import ConfigError, quoted

_MOST_FEATURES = 100_000
_NARROWEST, _NARROWEST_SHARE = 1e-30, 1e-9  # of a range, and next to its bounds: float64 must tell its values apart
_RULES = ("refuse", "indicator")
_AROUND = frozenset({"table", "person"})  # the keys of a schema in [data]
_RULE = "it must be 'refuse', 'indicator'"

ColumnName = Annotated[str, Field(min_length=1, max_length=1000)]
Word = Annotated[str, Field(min_length=1, max_length=1000)]
Bound = Annotated[float, Field(ge=-1e30, le=1e30)]


class _Section(BaseModel):
    """Strict, as every section of a config is."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class Ignore(_Section):
    """A column that is not read."""

    kind: Literal["ignore"]


class _Used(_Section, ABC):
    """The common part of the kinds that are read. A cell is one float internally: NaN marks a missing one."""

    missing: str | float | bool = Field(
        "refuse",
        description="What a missing value becomes: a constant of the column (public), `indicator` (0, and a feature "
        "more that says it was missing), or `refuse`: such a record is an error.",
    )
    target: bool = Field(False, description="Whether the column is what is learned.")

    @field_validator("missing", mode="before")
    @classmethod
    def _simple(cls, given: object) -> object:
        if not isinstance(given, str | int | float) or (isinstance(given, float) and not math.isfinite(given)):
            raise ValueError(f"{_RULE} or a value of the column")
        return given

    @model_validator(mode="after")
    def _a_rule(self) -> _Used:
        if self.target and self.missing != "refuse":
            raise ValueError("a target has no rule for missing values: leave `missing` out")
        if self.missing not in _RULES:
            self.constant()
        return self

    @property
    def missing_value(self) -> float | None:
        """Return the value of a missing cell; None where it is an error."""
        if self.missing == "refuse":
            return None
        return math.nan if self.missing == "indicator" else self.constant()

    @abstractmethod
    def constant(self) -> float:
        """Return `missing` as a value of the column; raise a ValueError where it is none."""

    @abstractmethod
    def reader(self) -> Reader:
        """Return a function from a cell to a float, None for a missing cell; another kind raises InvalidCell."""

    def width(self) -> int:
        """Return the number of features."""
        return len(self.features("")) if not self.target else 0

    def features(self, column: str) -> list[str]:
        """Return the names of the features."""
        return [*self._own(column), *([f"{column} is missing"] if self.missing == "indicator" else [])]

    def encoded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the features of many records, (records, width)."""
        lacking = np.isnan(values)
        own = np.where(lacking[:, None], 0.0, self._coded(values))
        return np.column_stack([own, lacking]) if self.missing == "indicator" else own

    def _own(self, column: str) -> list[str]:
        return [column]

    def _coded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values[:, None]


class Number(_Used):
    """A number. It is clipped to its public range, which is then mapped onto [-1, 1], or standardised."""

    kind: Literal["number"]
    range: Annotated[list[Bound], Field(min_length=2, max_length=2)] = Field(
        description="Smallest and largest value, as public knowledge has them."
    )
    mean: Bound | None = Field(
        None,
        description="What 0 stands for, in place of the middle of the range: a mean that is public, or that `fedspa "
        "stats` released. With `deviation`.",
    )
    deviation: Annotated[float, Field(ge=1e-30, le=1e30)] | None = Field(
        None, description="The difference that 1 stands for, in place of half the range: a standard deviation."
    )

    @field_validator("range")
    @classmethod
    def _a_range(cls, bounds: list[float]) -> list[float]:
        if not bounds[1] - bounds[0] >= max(_NARROWEST, _NARROWEST_SHARE * max(map(abs, bounds))):
            raise ValueError(f"the first must be below the second, by {_NARROWEST_SHARE:g} of the larger at least")
        return bounds

    @model_validator(mode="after")
    def _standardised(self) -> Number:
        if (self.mean is None) != (self.deviation is None):
            raise ValueError("mean and deviation stand together: give both, or neither")
        if self.mean is not None and not self.range[0] <= self.mean <= self.range[1]:
            raise ValueError(f"mean is {self.mean:g}; it must lie in the range [{self.range[0]:g}, {self.range[1]:g}]")
        if self.deviation is not None and not self.deviation >= _NARROWEST_SHARE * self._half:
            raise ValueError(f"deviation is {self.deviation:g}; it must be {_NARROWEST_SHARE:g} of the range at least")
        return self

    @property
    def offset(self) -> float:
        """Return the value that 0 stands for, in the column's unit."""
        return self.range[0] + self._half if self.mean is None else self.mean

    @property
    def scale(self) -> float:
        """Return the difference that 1 stands for, in the column's unit."""
        return self._half if self.deviation is None else self.deviation

    @property
    def _half(self) -> float:
        return (self.range[1] - self.range[0]) / 2

    def constant(self) -> float:
        low, high = self.range
        if isinstance(self.missing, str | bool) or not low <= self.missing <= high:
            raise ValueError(f"missing is {quoted(self.missing)}; {_RULE} or a number in [{low:g}, {high:g}]")
        return float(self.missing)

    def reader(self) -> Reader:
        return number

    def _coded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        with np.errstate(over="ignore"):  # ±∞ is clipped as everything outside the range is
            scaled = (values - self.offset) / self.scale
        low, high = (-1.0, 1.0) if self.mean is None else ((end - self.offset) / self.scale for end in self.range)
        return np.clip(scaled, low, high)[:, None]


class Category(_Used):
    """One of a public list of words. Each of them is a feature: 1 for the word that stands there, 0 for the others."""

    kind: Literal["category"]
    categories: Annotated[list[Word], Field(min_length=1, max_length=10_000)] = Field(
        description="The words, as public knowledge has them; as a target, classes are numbered in this order."
    )
    other: bool = Field(
        False, description="Whether a word that is not listed has a place of its own, the last; else it is an error."
    )

    @field_validator("categories")
    @classmethod
    def _distinct(cls, words: list[str]) -> list[str]:
        if len(set(words)) < len(words) or any(word != word.strip() for word in words):
            raise ValueError("each must be named once, without blanks around it")
        return words

    @property
    def places(self) -> int:
        return len(self.categories) + self.other

    def constant(self) -> float:
        if self.missing not in self.categories:
            raise ValueError(f"missing is {quoted(self.missing)}; {_RULE} or one of categories")
        return float(self.categories.index(str(self.missing)))

    def reader(self) -> Reader:
        places = {word: float(place) for place, word in enumerate(self.categories)}

        def read(cell: object) -> float | None:
            text = word(cell)
            if text is None:
                return None
            place = places.get(text)
            if place is None:
                if text.lower() in MISSING:
                    return None
                if not self.other:
                    raise InvalidCell("is no category of it", f"the schema lists {quoted(self.categories, 100)}")
                place = float(len(places))
            return place

        return read

    def _own(self, column: str) -> list[str]:
        return [f"{column} = {word}" for word in self.categories] + [f"{column} is another"] * self.other

    def _coded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        coded: NDArray[np.float64] = (values[:, None] == np.arange(self.places)).astype(np.float64)
        return coded


class Flag(_Used):
    """True or false, as 1 or 0."""

    kind: Literal["flag"]

    def constant(self) -> float:
        if not isinstance(self.missing, bool):
            raise ValueError(f"missing is {quoted(self.missing)}; {_RULE}, true or false")
        return float(self.missing)

    def reader(self) -> Reader:
        return flag


DatePart = Literal["days", "month", "weekday"]


class Date(_Used):
    """A day. It is clipped to its public range, whose days are mapped onto [-1, 1]; months and weekdays are words."""

    kind: Literal["date"]
    range: Annotated[list[str], Field(min_length=2, max_length=2)] = Field(
        description='First and last day, as public knowledge has them: `["2015-01-01", "2024-12-31"]`.'
    )
    parts: Annotated[list[DatePart], Field(min_length=1, max_length=3)] = Field(
        ["days"],
        description="What becomes features: the days since the first of the range, the month (12 words), the weekday "
        "(7 words).",
    )

    @field_validator("range", mode="before")
    @classmethod
    def _a_range(cls, given: object) -> object:
        days = [str(each) if isinstance(each, date) else each for each in given] if isinstance(given, list) else given
        if isinstance(days, list) and len(days) == 2:
            try:
                first, last = map(date.fromisoformat, filter(_DAY.fullmatch, days))
            except (TypeError, ValueError):
                raise ValueError('write two days, as in ["2015-01-01", "2024-12-31"]') from None
            if not first < last:
                raise ValueError("the first day must be before the second")
        return days

    @model_validator(mode="after")
    def _an_input(self) -> Date:
        if self.target:
            raise ValueError("a date is no target: leave `target` out")
        return self

    @field_validator("parts")
    @classmethod
    def _in_order(cls, parts: list[DatePart]) -> list[DatePart]:
        """Return the parts as features are ordered: statistics find the days first."""
        if len(set(parts)) < len(parts):
            raise ValueError("each must be named once")
        return [part for part in get_args(DatePart) if part in parts]

    @property
    def in_days(self) -> Number:
        """Return the column as the number of days since the first of the range."""
        return Number(kind="number", range=[0.0, self._last - self._first])

    @property
    def _first(self) -> float:
        return float(date.fromisoformat(self.range[0]).toordinal())

    @property
    def _last(self) -> float:
        return float(date.fromisoformat(self.range[1]).toordinal())

    def clipped(self, values: NDArray[np.float64]) -> int:
        return int(((values < self._first) | (values > self._last)).sum())

    def constant(self) -> float:
        try:
            value = day(self.missing) if isinstance(self.missing, str) else None
        except InvalidCell:
            value = None
        if value is None or not self._first <= value <= self._last:
            raise ValueError(f"missing is {quoted(self.missing)}; {_RULE} or a day from {' to '.join(self.range)}")
        return value

    def reader(self) -> Reader:
        return day

    def _own(self, column: str) -> list[str]:
        return [f"{column} {name}" for part in self.parts for name in _PART_NAMES[part]]

    def _coded(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        days = np.nan_to_num(values, nan=self._first)
        whole = days.astype(np.int64)
        months = (whole - _EPOCH).astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12
        coded = {
            "days": self.in_days._coded(days - self._first),
            "month": (months[:, None] == np.arange(12)).astype(np.float64),
            "weekday": ((whole - 1)[:, None] % 7 == np.arange(7)).astype(np.float64),
        }
        return np.concatenate([coded[part] for part in self.parts], axis=1)


_EPOCH = date(1970, 1, 1).toordinal()
_PART_NAMES = {
    "days": ["in days"],
    "month": [f"in month {month}" for month in range(1, 13)],
    "weekday": [
        f"on {name}" for name in ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
    ],
}

Used = Number | Category | Flag | Date
Column = Annotated[Used | Ignore, Field(discriminator="kind")]
Columns = Annotated[dict[ColumnName, Column], Field(min_length=1, max_length=10_000)]
KINDS: dict[str, type[BaseModel]] = {
    "number": Number,
    "category": Category,
    "flag": Flag,
    "date": Date,
    "ignore": Ignore,
}


class TableSection(_Section):
    """[data.table] of a config or a schema file: the columns of a table, and which of them sort its records."""

    columns: Columns = Field(
        description='What each column of the file is, as in `age = {kind = "number", range = [0, 110]}`; features '
        "are in this order, whatever the file's is."
    )
    agent: ColumnName | None = Field(None, description="The column that names the agent who holds a record.")
    split: ColumnName | None = Field(
        None,
        description="The column that has the word `test` for records for testing, and others for training; without, "
        "`data.holdout` takes some of them.",
    )


class Schema(TableSection):
    """A table with its column of persons, which `data.person` names."""

    person: ColumnName | None = Field(None, description="The column that names the person a record belongs to.")

    @model_validator(mode="after")
    def _fits_together(self) -> Schema:
        for key in ("agent", "person", "split"):
            if (named := getattr(self, key)) in self.columns:
                raise ValueError(
                    f"{_full(key)} is {quoted(named)}, which is in data.table.columns too; take it out there"
                )
        if self.split is not None and self.split in (self.agent, self.person):
            raise ValueError(f"data.table.split is {quoted(self.split)}; it must be a column of its own")
        kinds = [column.kind for column in self.targets.values()]
        if not kinds:
            raise ValueError("no column of data.table.columns has target = true; mark what is to be learned")
        if len(kinds) > 1 and set(kinds) not in ({"number"}, {"flag"}):
            named = ", ".join(f"{name!r} ({column.kind})" for name, column in self.targets.items())
            raise ValueError(f"the targets are {quoted(named)}; several must be all numbers or all flags")
        if self.classes == 1:
            raise ValueError("the target has one category; a classifier needs at least 2")
        width = sum(column.width() for column in self.inputs.values())
        if not 1 <= width <= _MOST_FEATURES:
            raise ValueError(f"data.table.columns makes {width} features; 1 to {_MOST_FEATURES} are possible")
        return self

    @property
    def inputs(self) -> dict[str, Used]:
        """Return the columns that become features."""
        return {name: c for name, c in self.columns.items() if not isinstance(c, Ignore) and not c.target}

    @property
    def targets(self) -> dict[str, Number | Category | Flag]:
        """Return the columns that are learned."""
        return {name: c for name, c in self.columns.items() if not isinstance(c, Ignore | Date) and c.target}

    @property
    def counted(self) -> dict[str, Number | Category | Flag]:
        """Return the columns that statistics are of: a date as its number of days, where that is a feature."""
        days = {name: c.in_days if isinstance(c, Date) else c for name, c in self.inputs.items() if _has_days(c)}
        return {**days, **self.targets}

    @property
    def task(self) -> Literal["classification", "multi-label", "regression"]:
        """Return the kind of task that the targets need."""
        several, first = len(self.targets) > 1, next(iter(self.targets.values()))
        return "regression" if isinstance(first, Number) else "multi-label" if several else "classification"

    @property
    def classes(self) -> int | None:
        """Return the number of classes of a classification."""
        first = next(iter(self.targets.values()))
        return None if self.task != "classification" else first.places if isinstance(first, Category) else 2

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes of a classification, in the order of their numbers."""
        first = next(iter(self.targets.values()))
        if self.task != "classification":
            return None
        return (*first.categories, *["another"] * first.other) if isinstance(first, Category) else ("false", "true")

    @property
    def features(self) -> tuple[str, ...]:
        """Return the names of the features, in order."""
        return tuple(feature for name, column in self.inputs.items() for feature in column.features(name))

    def decoded(self, answers: NDArray[Any]) -> NDArray[Any]:
        """Decode a model's predictions into the targets' own words and units: words (None for one that is not listed),
        truth values, or numbers."""
        columns = list(self.targets.values())
        numbers = [column for column in columns if isinstance(column, Number)]
        found: NDArray[Any] = answers == 1
        if numbers:
            scale, offset = (np.array([getattr(c, key) for c in numbers]) for key in ("scale", "offset"))
            found = answers * scale + offset if len(numbers) > 1 else answers * scale[0] + offset[0]
        elif isinstance(columns[0], Category):
            found = np.array([*columns[0].categories, None], dtype=object)[answers]
        return found


def _has_days(column: Used) -> bool:
    return not isinstance(column, Date) or "days" in column.parts


def load_schema(path: Path, beside: frozenset[str] = frozenset()) -> Schema:
    """Read the schema in a TOML file: [data.table], and `person` of [data]. `beside`: other keys of [data]."""
    data = toml.read(path, "a TOML file with [data.table]").get("data")
    table = data.get("table") if isinstance(data, Mapping) else None
    if not isinstance(data, Mapping) or not isinstance(table, Mapping):
        raise ConfigError(f"{path} has no section [data.table]; a schema is made of [data.table.columns]")
    if unknown := data.keys() - _AROUND - beside:
        raise ConfigError(
            f"unknown key {quoted(f'data.{min(unknown)}')}; allowed: {', '.join(sorted(_AROUND | beside))}"
        )
    if "person" in table:
        raise ConfigError(f"{path} has data.table.person; the column with the person ID is data.person")
    return checked({**table, **{key: data[key] for key in ("person",) if key in data}})


def checked(values: Mapping[str, Any]) -> Schema:
    """Return the Schema of these keys; every fault is a ConfigError of one line."""
    try:
        return Schema.model_validate(dict(values))
    except ValidationError as error:
        said = (describe_error(item["type"], item["loc"], item["msg"], item.get("input")) for item in error.errors())
        raise ConfigError("; ".join(said)) from None


def _full(key: str) -> str:
    """Return a key of a schema as configs have it."""
    return "data.person" if key == "person" else f"data.table.{key}" if key else "data.table"


_TO_FILL_IN = {
    ("Number", "range"): ": give the smallest and largest value that can occur, as in range = [0, 120]",
    ("Date", "range"): ': give the first and last day that can occur, as in range = ["2015-01-01", "2024-12-31"]',
    ("Category", "categories"): ': list the words that can occur, as in categories = ["f", "m"]',
}


def describe_error(kind: str, location: tuple[int | str, ...], message: str, given: Any) -> str:
    """Describe one of pydantic's errors in a schema, in one line."""
    owner: type[BaseModel] = Schema
    if location[:1] == ("columns",) and len(location) > 2 and location[2] in KINDS:
        owner = KINDS[str(location[2])]  # pydantic says which kind a column was taken for
        location = (*location[:2], *location[3:])
    key = _full(".".join(map(str, location)))
    if kind == "extra_forbidden":
        return f"unknown key {quoted(key)}; allowed: {', '.join(sorted(owner.model_fields))}"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        found = given.get("kind") if isinstance(given, Mapping) else given
        return f"{key}.kind is {quoted(found)}; it must be one of {', '.join(map(repr, KINDS))}"
    if (kind == "too_short" and not given) or kind == "missing":
        column, _, name = key.rpartition(".")
        state = f"[{column}] {name} = [] is not filled in" if kind == "too_short" else f"{key} is missing"
        return f"{state}{_TO_FILL_IN.get((owner.__name__, name), '')}"
    if kind == "value_error":
        message = message.removeprefix("Value error, ")
        return f"{key}: {message}" if location else message
    return f"{key} is {quoted(given)}; {message.replace('Input should be', 'it must be', 1)}"


# What stands for a missing value, in any case; a category of this name is a category where it is listed.
MISSING = frozenset({"", "na", "n/a", "nan", "null"})
# What programs write for a missing id: their words without signs, so that #N/A and <NA> are among them; the code of
# pandas.factorize; and what a NaN becomes when it is cast to a whole number.
_NO_IDS = frozenset({"", "na", "nan", "null", "none", "nat", "inf"})
_NO_NUMBERS = frozenset(map(str, (-1, -(2**31), -(2**63), 2**63)))
_FLAGS = dict.fromkeys(("true", "yes", "y", "t", "1"), 1.0) | dict.fromkeys(("false", "no", "n", "f", "0"), 0.0)
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", flags=re.I | re.A)
_DAY = re.compile(r"\d{4}-\d\d-\d\d", flags=re.A)
_NUMPYS = (np.bool_, np.integer, np.floating)  # not numpy's dates, which would become numbers

Reader = Callable[[object], float | None]


class InvalidCell(Exception):
    """A cell is not what its column needs. `reason` is a clause about the cell, `advice` says what is allowed."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.reason, self.advice = reason, advice


def word(cell: object) -> str | None:
    """Return a cell as text, a whole number as its digits; None for an empty cell. Words for missing values stay."""
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
    raise InvalidCell("is no text", "texts and whole numbers are words")


def identifier(cell: object) -> str | None:
    """Return the id of a person or an agent as text; None where it is missing. Records that share a word for a missing
    id would otherwise be taken for those of one person."""
    text = word(cell)
    if text is None or text in _NO_NUMBERS or "".join(filter(str.isalnum, text[:40])).lower() in _NO_IDS:
        return None
    return text


def number(cell: object) -> float | None:
    """Return a finite number."""
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
        raise InvalidCell("is no finite number", "write it as in 12, -0.5 or 1e-3")
    return value


def flag(cell: object) -> float | None:
    """Return 1 for true or 0 for false."""
    text = word(cell)
    if text is None or text.lower() in MISSING:
        return None
    if (value := _FLAGS.get(text.lower())) is None:
        raise InvalidCell("is no word for true or false", "write true or false, yes or no, 1 or 0")
    return value


def day(cell: object) -> float | None:
    """Return a date's number of days; the time of day is left out."""
    if isinstance(cell, str):
        text = cell.strip()
        if text.lower() in MISSING:
            return None
        if _DAY.match(text):
            with suppress(ValueError):
                return float((date if len(text) == 10 else datetime).fromisoformat(text).toordinal())
    elif _nothing(cell):
        return None
    elif isinstance(cell, date):
        return float(cell.toordinal())
    raise InvalidCell("is no date", "write it as in 2024-03-31")


def _nothing(cell: object) -> bool:
    """Return whether a cell is None, NaN, or the missing value of pandas or of a masked array."""
    return (
        cell is None
        or (isinstance(cell, float) and cell != cell)
        or (isinstance(cell, Decimal) and cell.is_nan())
        or type(cell).__name__ in ("NAType", "NaTType", "MaskedConstant")
    )
