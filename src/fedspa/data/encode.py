"""Rows of cells become the tensors of a table, by its schema.

A row becomes what it is by itself: neither its features nor whether it is bad depends on another row. Only the numbers
that agents and persons get are given in the order in which they are first seen; they are names and nothing more.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.data.columns import MISSING, Number, Odd, Schema, identifier, word
from fedspa.errors import DataError, quoted

# Line or row, column, cell, and what is wrong with it.
Report = Callable[[int, str, object, Odd], None]

LACKING = "is missing"


@dataclass(frozen=True, eq=False)
class Table:
    """x: float32, (records, features), NaN in bad records. `bad`: their numbers.

    y: int64 (records,) for a classification, float32 of 0 and 1 (records, targets) for several flags, float32
    (records,) or (records, targets) for numbers, each scaled so that `y * target_scale + target_offset` is in the
    column's own unit; 0 in bad records. `owners` and `persons` count from 0, and are -1 where `test` says that a
    record is for testing, or where it does not say whose it is; they are None where the schema names no such column.
    """

    x: Tensor
    y: Tensor
    owners: NDArray[np.int64] | None
    persons: NDArray[np.int64] | None
    test: NDArray[np.bool_] | None
    bad: tuple[int, ...]
    target_scale: tuple[float, ...] | None
    target_offset: tuple[float, ...] | None


def check_header(schema: Schema, names: Sequence[str], where: str, *, agents: bool) -> None:
    """Every column that the schema names must be in the file, and every column of the file in the schema."""
    lacking, unknown, twice = compare_header(schema, names, agents=agents)
    if twice:
        raise DataError(f"{where} has more than one column {quoted(twice[0])}; a column's name must be its own")
    if lacking:
        raise DataError(f"{where} has no column {_listed(lacking)}, which the schema names; it has {_listed(names)}")
    if unknown:
        raise DataError(
            f"{where} has the column {_listed(unknown)}, which the schema does not name; describe it in "
            "data.table.columns, where kind = 'ignore' leaves it out"
        )


def compare_header(schema: Schema, names: Sequence[str], *, agents: bool) -> tuple[list[str], list[str], list[str]]:
    """Columns that are missing, that the schema does not name, that are there twice. A site needs no agent's column."""
    whose = [name for name in (schema.person, schema.split, schema.agent if agents else None) if name is not None]
    wanted = dict.fromkeys([*schema.inputs, *schema.targets, *whose])
    known = {*schema.columns, *whose, schema.agent}
    return (
        [name for name in wanted if name not in names],
        [name for name in dict.fromkeys(names) if name not in known],
        [name for name, times in Counter(names).items() if times > 1],
    )


class Encoder:
    """Takes rows one by one. `report` hears of every cell that makes its row bad, and may raise.

    `agents`: whether to ask whose a record is. A site does not: all that it holds is its own.
    """

    def __init__(self, schema: Schema, names: Sequence[str], report: Report, *, agents: bool) -> None:
        self._schema, self._report = schema, report
        columns = {name: column for name, column in (schema.inputs | schema.targets).items() if name in names}
        self._values = {name: array("d") for name in columns}
        # In the order of `wanted`, which begins with these columns.
        self._readers = [(name, c.reader(), c.stand_in, self._values[name].append) for name, c in columns.items()]
        self._owner = schema.agent if agents and schema.agent in names else None
        self._person, self._split = (key if key in names else None for key in (schema.person, schema.split))
        self._owners, self._persons = _Numbers(), _Numbers()
        self._test, self._bad = bytearray(), array("q")
        # Where each wanted column is in a row that `add` is given.
        whose = [name for name in (self._owner, self._person, self._split) if name is not None]
        self.wanted = list(dict.fromkeys([*columns, *whose]))
        self.places = [list(names).index(name) for name in self.wanted]
        self.missing: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._test)

    def _mend(self, name: str) -> str:
        if name in self._schema.targets:
            return "what is learned must be there: mend it, or take the row out"
        return f"mend it, or say in data.table.columns.{name}.missing what it becomes"

    def add(self, line: int, cells: Sequence[object]) -> None:
        """A row: the cells of the columns in `wanted`, in that order."""
        good = True
        for cell, (name, read, stand_in, keep) in zip(cells, self._readers):
            value: float | None = None
            try:
                value = read(cell)
                if value is None:
                    self.missing[name] += 1
                    value = stand_in
                if value is None:
                    raise Odd(LACKING, self._mend(name))
            except Odd as odd:
                self._report(line, name, cell, odd)
                good, value = False, math.nan
            keep(value)
        whose = dict(zip(self.wanted[len(self._readers) :], cells[len(self._readers) :]))
        test = False
        if self._split is not None:
            known, part = self._known(line, self._split, whose[self._split], word)
            good &= known
            test = part == self._schema.test
        for column, numbers in ((self._owner, self._owners), (self._person, self._persons)):
            known, name = (
                (False, "") if column is None or test else self._known(line, column, whose[column], identifier)
            )
            good &= known or column is None or test
            if known:
                numbers.add(name)
            else:
                numbers.skip()
        self._close(test, good)

    def spoil(self, line: int, odd: Odd) -> None:
        """A row whose cells cannot be told apart."""
        self._report(line, "", None, odd)
        for values in self._values.values():
            values.append(math.nan)
        for numbers in (self._owners, self._persons):
            numbers.skip()
        self._close(False, False)

    def _known(self, line: int, column: str, cell: object, read: Callable[[object], str | None]) -> tuple[bool, str]:
        """Whether a cell names anything, and what."""
        try:
            text = read(cell)
            if text is None or text.lower() in MISSING:
                raise Odd(LACKING, "every record must have it: fill it in, or take the row out")
        except Odd as odd:
            self._report(line, column, cell, odd)
            return False, ""
        return True, text

    def _close(self, test: bool, good: bool) -> None:
        if not good:
            self._bad.append(len(self._test))
        self._test.append(test)

    def clipped(self) -> dict[str, int]:
        """How many values of each column of numbers lie outside its range."""
        found = {}
        for name, column in (self._schema.inputs | self._schema.targets).items():
            if isinstance(column, Number) and name in self._values:
                values = np.frombuffer(self._values[name])
                found[name] = int(((values < column.range[0]) | (values > column.range[1])).sum())
        return found

    def rows_by_agent(self) -> dict[str, int]:
        return self._owners.counts()

    def rows_by_person(self) -> dict[str, int]:
        return self._persons.counts()

    def bad_and_test(self) -> tuple[int, int]:
        """How many rows are bad, and how many are for testing."""
        return len(self._bad), sum(self._test)

    def features(self) -> NDArray[np.float32]:
        """Of all rows so far; NaN in bad ones."""
        schema = self._schema
        x = np.empty((len(self), len(schema.features)), dtype=np.float32)
        start = 0
        for name, column in schema.inputs.items():
            end = start + column.width()
            x[:, start:end] = column.encoded(np.frombuffer(self._values[name]))
            start = end
        x[np.array(self._bad, dtype=np.int64)] = np.nan
        return x

    def table(self) -> Table:
        """All rows so far."""
        schema, bad = self._schema, np.array(self._bad, dtype=np.int64)
        numbers = [column for column in schema.targets.values() if isinstance(column, Number)]
        return Table(
            x=torch.from_numpy(self.features()),
            y=torch.from_numpy(self._targets(bad)),
            owners=None if self._owner is None else self._owners.array(),
            persons=None if self._person is None else self._persons.array(),
            test=None if self._split is None else np.frombuffer(bytes(self._test), dtype=np.bool_).copy(),
            bad=tuple(bad.tolist()),
            target_scale=tuple(column.scale for column in numbers) or None,
            target_offset=tuple(column.offset for column in numbers) or None,
        )

    def _targets(self, bad: NDArray[np.int64]) -> NDArray[np.int64] | NDArray[np.float32]:
        columns = {name: np.frombuffer(self._values[name]) for name in self._schema.targets}
        if self._schema.task == "classification":
            (codes,) = columns.values()
            places = np.where(np.isnan(codes), 0, codes).astype(np.int64)
            places[bad] = 0
            return places
        parts = [self._schema.targets[name].encoded(codes) for name, codes in columns.items()]
        y = np.concatenate(parts, axis=1).astype(np.float32)
        y[bad] = 0
        return y if len(parts) > 1 else y[:, 0]


class _Numbers:
    """Names as small numbers, in the order of first sight."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._rows = array("q")

    def add(self, name: str) -> None:
        self._rows.append(self._known.setdefault(name, len(self._known)))

    def skip(self) -> None:
        """A row without a name."""
        self._rows.append(-1)

    def array(self) -> NDArray[np.int64]:
        return np.array(self._rows, dtype=np.int64)

    def counts(self) -> dict[str, int]:
        """How many rows each name has."""
        times = Counter(self._rows)
        return {name: times[number] for name, number in self._known.items()}


def _listed(names: Sequence[str]) -> str:
    return quoted(", ".join(map(repr, names)))[1:-1]
