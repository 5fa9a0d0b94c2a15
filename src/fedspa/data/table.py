"""CSV and Parquet files and frames, read by a schema (`fedspa.data.columns`).

In the simulator a bad row is an error that names its line. At a site no row may be: the content of one record must not
decide whether or how the site answers. There a bad row stays among the records and counts as zero (`strict=False`).

Each row is encoded by itself: neither its features nor whether it is bad depends on another row. A record of a CSV is
one line, so quotes in one line do not change how another is read. Only agents and persons are numbered in the order in
which they are first seen; their numbers are names and nothing more.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedspa.data import plugin
from fedspa.data.columns import MISSING, Date, InvalidCell, Number, Schema, identifier, word
from fedspa.errors import DataError, quoted

_LONGEST_LINE = 1 << 20
_LONGEST_FIELD = csv.field_size_limit()  # the csv module's own limit, held for fields without quotes too
_LONG_FIELD = InvalidCell("has a field that is too long", f"a field has at most {_LONGEST_FIELD} characters")
Row = Sequence[object] | InvalidCell


# Number of the line or row, column, cell, and what is wrong with it.
Report = Callable[[int, str, object, InvalidCell], None]

LACKING = "is missing"


@dataclass(frozen=True, eq=False)
class Table:
    """x: float32, (records, features), NaN in bad records. `bad`: their numbers.

    y: int64 (records,) for a classification, float32 of 0 and 1 (records, targets) for several flags, float32
    (records,) or (records, targets) for numbers, each scaled so that `y * target_scale + target_offset` is in the
    column's own unit; 0 in bad records. `owners` and `persons` count from 0, and are -1 where `test` says that a
    record is for testing, or where it does not say whose it is; they are None where the schema names no such column.
    `agents` are the names of the owners.
    """

    x: Tensor
    y: Tensor
    owners: NDArray[np.int64] | None
    persons: NDArray[np.int64] | None
    test: NDArray[np.bool_] | None
    bad: tuple[int, ...]
    target_scale: tuple[float, ...] | None
    target_offset: tuple[float, ...] | None
    agents: tuple[str, ...] | None


def check_header(schema: Schema, names: Sequence[str], where: str, *, agents: bool) -> None:
    """Raise a DataError unless file and schema have the same columns."""
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
    """Return the columns that are missing, that the schema does not name, and that occur twice. `agents`: whether the
    agent's column is needed; a site does not need it."""
    whose = [name for name in (schema.person, schema.split, schema.agent if agents else None) if name is not None]
    wanted = dict.fromkeys([*schema.inputs, *schema.targets, *whose])
    known = {*schema.columns, *whose, schema.agent}
    return (
        [name for name in wanted if name not in names],
        [name for name in dict.fromkeys(names) if name not in known],
        [name for name, times in Counter(names).items() if times > 1],
    )


class Encoder:
    """Encodes rows one by one. `report` is called for every cell that makes its row bad, and may raise.

    `agents`: whether to read the agent of a record. A site does not: all its records are its own.
    """

    def __init__(self, schema: Schema, names: Sequence[str], report: Report, *, agents: bool) -> None:
        self._schema, self._report = schema, report
        columns = {name: column for name, column in (schema.inputs | schema.targets).items() if name in names}
        self._values = {name: array("d") for name in columns}
        # In the order of `wanted`, which begins with these columns.
        self._readers = [(name, c.reader(), c.missing_value, self._values[name].append) for name, c in columns.items()]
        self._owner = schema.agent if agents and schema.agent in names else None
        self._person, self._split = (key if key in names else None for key in (schema.person, schema.split))
        # Names, or None where a record has none or is for testing.
        self.owners: list[str | None] = []
        self.persons: list[str | None] = []
        self.test, self.bad = bytearray(), array("q")
        whose = [name for name in (self._owner, self._person, self._split) if name is not None]
        self.wanted = list(dict.fromkeys([*columns, *whose]))
        self.missing: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.test)

    def _hint(self, name: str) -> str:
        if name in self._schema.targets:
            return "a target must not be missing: fill it in, or take the row out"
        return f"fill it in, or set data.table.columns.{name}.missing"

    def add(self, row: int, cells: Sequence[object]) -> None:
        """Add a row: the cells of the columns in `wanted`, in that order."""
        good = True
        for cell, (name, read, missing_value, keep) in zip(cells, self._readers):
            value: float | None = None
            try:
                value = read(cell)
                if value is None:
                    self.missing[name] += 1
                    value = missing_value
                if value is None:
                    raise InvalidCell(LACKING, self._hint(name))
            except InvalidCell as odd:
                self._report(row, name, cell, odd)
                good, value = False, math.nan
            keep(value)
        whose = dict(zip(self.wanted[len(self._readers) :], cells[len(self._readers) :]))
        test = False
        if self._split is not None:
            part = self._known(row, self._split, whose[self._split], word)
            good, test = good and part is not None, part == "test"
        for column, names in ((self._owner, self.owners), (self._person, self.persons)):
            known: str | None = None
            if column is not None and not test:
                known = self._known(row, column, whose[column], identifier)
                good &= known is not None
            names.append(known)
        self._close(test, good)

    def add_bad(self, row: int, odd: InvalidCell) -> None:
        """Add a row that could not be split into cells."""
        self._report(row, "", None, odd)
        for values in self._values.values():
            values.append(math.nan)
        for names in (self.owners, self.persons):
            names.append(None)
        self._close(False, False)

    def _known(self, row: int, column: str, cell: object, read: Callable[[object], str | None]) -> str | None:
        """Return the name in a cell; None where there is none, which is reported."""
        try:
            text = read(cell)
            if text is None or text.lower() in MISSING:
                raise InvalidCell(LACKING, "every record must have it: fill it in, or take the row out")
        except InvalidCell as odd:
            self._report(row, column, cell, odd)
            return None
        return text

    def _close(self, test: bool, good: bool) -> None:
        if not good:
            self.bad.append(len(self.test))
        self.test.append(test)

    def clipped(self) -> dict[str, int]:
        """Count the values outside the range of each column of numbers."""
        found = {}
        for name, column in (self._schema.inputs | self._schema.targets).items():
            if isinstance(column, Number) and name in self._values:
                values = np.frombuffer(self._values[name])
                found[name] = int(((values < column.range[0]) | (values > column.range[1])).sum())
            elif isinstance(column, Date) and name in self._values:
                found[name] = column.clipped(np.frombuffer(self._values[name]))
        return found

    def features(self) -> NDArray[np.float32]:
        """Return the features of all rows so far; NaN in bad ones."""
        schema = self._schema
        x = np.empty((len(self), len(schema.features)), dtype=np.float32)
        start = 0
        for name, column in schema.inputs.items():
            end = start + column.width()
            x[:, start:end] = column.encoded(np.frombuffer(self._values[name]))
            start = end
        x[np.array(self.bad, dtype=np.int64)] = np.nan
        return x

    def table(self) -> Table:
        """Return all rows so far."""
        schema, bad = self._schema, np.array(self.bad, dtype=np.int64)
        numbers = [column for column in schema.targets.values() if isinstance(column, Number)]
        return Table(
            x=torch.from_numpy(self.features()),
            y=torch.from_numpy(self._targets(bad)),
            owners=None if self._owner is None else number_names(self.owners),
            persons=None if self._person is None else number_names(self.persons),
            test=None if self._split is None else np.frombuffer(bytes(self.test), dtype=np.bool_).copy(),
            bad=tuple(bad.tolist()),
            target_scale=tuple(column.scale for column in numbers) or None,
            target_offset=tuple(column.offset for column in numbers) or None,
            agents=None if self._owner is None else tuple(rows_by_name(self.owners)),
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


def number_names(names: Sequence[str | None]) -> NDArray[np.int64]:
    """Number names in the order of their first row; -1 for None."""
    known: dict[str, int] = {}
    return np.array([-1 if name is None else known.setdefault(name, len(known)) for name in names], dtype=np.int64)


def rows_by_name(names: Sequence[str | None]) -> dict[str, int]:
    """Return the number of rows of each name, in the order of their first row."""
    return dict(Counter(name for name in names if name is not None))


def _listed(names: Sequence[str]) -> str:
    return quoted(", ".join(map(repr, names)))[1:-1]


@dataclass(frozen=True)
class Source:
    """A file or frame: how errors call it and one of its rows, the names of its columns, and a function that yields
    its rows: each with its number and the cells of the wanted columns."""

    where: str
    unit: str
    names: list[str]
    rows: Callable[[Sequence[str]], Iterator[tuple[int, Row]]]

    def fail(self, row: int, column: str, cell: object, odd: InvalidCell) -> None:
        """Raise a DataError of one line for a cell."""
        raise DataError(f"{self.where}, {self.unit} {row}{_describe_cell(column, cell, odd)}")


def read_table(path: Path, schema: Schema, *, strict: bool) -> Table:
    """Read the records of a .csv or .parquet file.

    Strict, a bad row is a DataError of one line. Not strict, for a site, only faults that all records share are errors;
    bad rows are marked, and the column `schema.agent` is not read: all records at a site are its own.
    """
    return _read(open_source(path), schema, strict=strict)


def from_frame(frame: Any, schema: Schema) -> Table:
    """Read the records of a pandas frame, or of a similar object with `columns`, strictly."""
    return _read(_frame(frame), schema, strict=True)


def _read(source: Source, schema: Schema, *, strict: bool) -> Table:
    check_header(schema, source.names, source.where, agents=strict)
    encoder = Encoder(schema, source.names, source.fail if strict else _silent, agents=strict)
    feed(encoder, source)
    return encoder.table()


def features_of(frame: Any, schema: Schema) -> Tensor:
    """Return the features of a frame's rows, for a model to predict from. Only the columns that become features are
    read; the targets need not be there."""
    source, wanted = _frame(frame), list(schema.inputs)
    if lacking := [name for name in wanted if name not in source.names]:
        raise DataError(f"the frame has no column {quoted(lacking[0])}, which the model was trained with")
    encoder = Encoder(schema, wanted, source.fail, agents=False)
    feed(encoder, source)
    return torch.from_numpy(encoder.features())


def _describe_cell(column: str, cell: object, odd: InvalidCell) -> str:
    """Describe what is wrong with a cell; the text follows the name of its row."""
    if not column:
        return f": the row {odd.reason}; {odd.advice}"
    shown = "a value" if odd.reason == LACKING else quoted(cell, 60)
    return f", column {quoted(column)}: {shown} {odd.reason}; {odd.advice}"


def _silent(row: int, column: str, cell: object, odd: InvalidCell) -> None:
    """Report nothing, not even to a log, which others may read."""


def feed(encoder: Encoder, source: Source) -> None:
    """Add all rows of a source to an encoder; a source without rows is a DataError."""
    for number, row in source.rows(encoder.wanted):
        if isinstance(row, InvalidCell):
            encoder.add_bad(number, row)
        else:
            encoder.add(number, row)
    if not len(encoder):
        raise DataError(f"{source.where} has no records")


def open_source(path: Path) -> Source:
    """Open the file at `path`, whose name ends in .csv, .parquet or .pq."""
    try:
        there = path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        there = False
    if not there:
        raise DataError(f"{quoted(str(path))} is no file; give the path of a .csv or .parquet file")
    match path.suffix.lower():
        case ".csv":
            return _csv(path)
        case ".parquet" | ".pq":
            return _parquet(path)
    raise DataError(f"{path} is neither .csv nor .parquet; write the table as one of them, and name it so")


def _frame(frame: Any) -> Source:
    def fault(cause: Exception) -> DataError:
        return DataError(f"the frame cannot be read ({plugin.one_line(cause)}); give a pandas DataFrame")

    def rows(wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
        try:
            columns = [list(frame[by_name[name]].tolist()) for name in wanted]
        except Exception as cause:  # a foreign object's own code may raise anything
            raise fault(cause) from cause
        yield from enumerate(zip(*columns))

    try:
        names = [str(name) for name in frame.columns]
        by_name = dict(zip(names, frame.columns))
    except Exception as cause:
        raise fault(cause) from cause
    return Source("the frame", "row", names, rows)


def _csv(path: Path) -> Source:
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path} is empty; its first line must name the columns")
    header = _fields(first[1].removeprefix(b"\xef\xbb\xbf"))
    if isinstance(header, InvalidCell):
        raise DataError(f"{path}, line 1, which names the columns, {header.reason}; {header.advice}")
    names = [name.strip() for name in header]
    if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
        raise DataError(f"{path}: its first line has no comma, but {other!r}; fields must be separated by commas")

    def rows(wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
        places = [names.index(name) for name in wanted]
        for number, line in lines:
            fields = _fields(line)
            if isinstance(fields, InvalidCell):
                yield number, fields
            elif len(fields) != len(names):
                yield number, InvalidCell(f"has {len(fields)} fields", f"the first line names {len(names)} columns")
            else:
                yield number, [fields[place] for place in places]

    return Source(str(path), "line", names, rows)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers, truncated where they are too long. An empty line is no record."""
    number = 0
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE + 1):
                number += 1
                rest = line
                while len(rest) > _LONGEST_LINE and not rest.endswith(b"\n"):
                    rest = file.readline(_LONGEST_LINE + 1)
                line = line.rstrip(b"\r\n") if rest is line else line
                if line:
                    yield number, line
    except OSError as cause:
        raise DataError(f"{path} cannot be read ({cause.strerror or cause})") from cause


def _fields(line: bytes) -> list[str] | InvalidCell:
    """Split one line into fields."""
    if len(line) > _LONGEST_LINE:
        return InvalidCell("is too long", f"a line has at most {_LONGEST_LINE} bytes")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return InvalidCell("is not UTF-8", "write the file as UTF-8")
    if '"' not in text:
        fields = text.split(",")
        if "\r" in text:
            return InvalidCell("has a carriage return in it", "a record is one line, and lines end with a line feed")
    else:
        try:
            fields = next(csv.reader([text], strict=True))
        except csv.Error as error:
            if "field limit" in str(error):
                return _LONG_FIELD
            return InvalidCell("has quotes that do not match", 'a record is one line, and "" is a quote within quotes')
    if max(map(len, fields)) > _LONGEST_FIELD:
        return _LONG_FIELD
    return fields


def _parquet(path: Path) -> Source:
    if find_spec("pyarrow") is None:
        raise DataError(f"{path} is Parquet, which needs pyarrow; pip install 'fedspa[parquet]', or write it as CSV")
    from pyarrow import parquet  # heavy, and wanted by this kind of file only

    try:
        file = parquet.ParquetFile(path)
        names = [str(name) for name in file.schema_arrow.names]
        types = dict(zip(names, file.schema_arrow.types))
    except Exception as cause:  # pyarrow raises a dozen kinds on foreign bytes
        raise DataError(f"{path} cannot be read as Parquet ({plugin.one_line(cause)[:200]})") from cause

    def rows(wanted: Sequence[str]) -> Iterator[tuple[int, Row]]:
        for name in wanted:
            if not _is_cell(types[name]):
                held = f"{path}: column {quoted(name)} holds {types[name]}"
                raise DataError(f"{held}; numbers, texts, dates and booleans can be read")
        number = 0
        try:
            for batch in file.iter_batches(columns=list(wanted)):
                columns = [_cells(batch.column(name)) for name in wanted]
                for cells in zip(*columns):
                    number += 1
                    yield number, cells
        except Exception as cause:
            raise DataError(f"{path} cannot be read as Parquet ({plugin.one_line(cause)[:200]})") from cause

    return Source(str(path), "row", names, rows)


def _is_cell(kind: Any) -> bool:
    """Return whether an Arrow type holds one number, text, date or truth value per row."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = ("boolean", "integer", "floating", "decimal", "string", "large_string", "null", "date", "timestamp")
    return any(getattr(types, f"is_{test}")(kind) for test in tests)


def _cells(column: Any) -> list[object]:
    """Return the cells as Python objects; one that cannot be converted (text that is not UTF-8) fits no column kind."""
    try:
        return list(column.to_pylist())
    except Exception:  # of one record, which must not cost the others
        return [_cell(cell) for cell in column]


def _cell(scalar: Any) -> object:
    try:
        return scalar.as_py()
    except Exception:
        return object()
