"""CSV and Parquet files, read by a schema (`fedspa.data.columns`).

In the simulator a bad row is an error that names its line. At a site no row may be: what one record holds must not show
in whether or how the site answers. There a bad row stays among the records and counts as zero (`strict=False`).

A record of a CSV is one line. So no line, whatever quotes stand in it, changes how another is read.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedspa.data import plugin
from fedspa.data.columns import Odd, Schema
from fedspa.data.encode import LACKING, Encoder, Table, check_header
from fedspa.errors import DataError, quoted

_LONGEST_LINE = 1 << 20
_LONGEST_FIELD = csv.field_size_limit()  # the csv module's own limit, held for fields without quotes too
_LONG_FIELD = Odd("has a field that is too long", f"a field has at most {_LONGEST_FIELD} characters")
Row = Sequence[object] | Odd


@dataclass(frozen=True)
class Source:
    """A file's columns, and its rows: each with its number and the cells at the places that are asked for."""

    names: list[str]
    unit: str
    rows: Callable[[Sequence[int]], Iterator[tuple[int, Row]]]


def read_table(path: Path, schema: Schema, *, strict: bool) -> Table:
    """The records of a .csv or .parquet file.

    Strict, a bad row is a DataError of one line. Not strict, for a site, only what all records share is refused, bad
    rows are marked, and the column `schema.agent` is not read: what lies at a site is its own.
    """
    source = open_source(path)
    check_header(schema, source.names, str(path), agents=strict)

    def refuse(line: int, column: str, cell: object, odd: Odd) -> None:
        raise DataError(f"{path}, {source.unit} {line}{told(column, cell, odd)}")

    encoder = Encoder(schema, source.names, refuse if strict else _silent, agents=strict)
    feed(encoder, source, path)
    return encoder.table()


def told(column: str, cell: object, odd: Odd) -> str:
    """What is wrong with a cell, to be put behind the name of its row."""
    if not column:
        return f": the row {odd.reason}; {odd.advice}"
    shown = "a value" if odd.reason == LACKING else quoted(cell, 60)
    return f", column {quoted(column)}: {shown} {odd.reason}; {odd.advice}"


def feed(encoder: Encoder, source: Source, path: Path) -> None:
    """All rows of a source into an encoder; a file without any is a DataError."""
    for line, row in source.rows(encoder.places):
        if isinstance(row, Odd):
            encoder.spoil(line, row)
        else:
            encoder.add(line, row)
    if not len(encoder):
        raise DataError(f"{path} has no records below the names of its columns")


def open_source(path: Path) -> Source:
    """The columns and rows of the file at `path`, whose name ends in .csv, .parquet or .pq."""
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


def from_frame(frame: Any, schema: Schema) -> Table:
    """The records of a pandas frame (or of whatever has `columns` and gives a column by its name), read strictly."""
    names = _columns(frame)
    check_header(schema, names, "the frame", agents=True)
    return _fed(Encoder(schema, names, _refuse_of_frame, agents=True), frame).table()


def features_of(frame: Any, schema: Schema) -> Tensor:
    """The features of a frame's rows, for a model to predict from: of its columns only those are read that become
    features, and what is learned need not be known."""
    names, wanted = _columns(frame), list(schema.inputs)
    if lacking := [name for name in wanted if name not in names]:
        raise DataError(f"the frame has no column {quoted(lacking[0])}, which the model was trained with")
    return torch.from_numpy(_fed(Encoder(schema, wanted, _refuse_of_frame, agents=False), frame).features())


def _columns(frame: Any) -> list[str]:
    try:
        return [str(name) for name in frame.columns]
    except Exception as cause:  # a foreign object's own code may raise anything
        raise _no_frame(cause) from cause


def _fed(encoder: Encoder, frame: Any) -> Encoder:
    """With all rows of the frame."""
    try:
        by_name = {str(name): name for name in frame.columns}
        columns = [list(frame[by_name[name]].tolist()) for name in encoder.wanted]
    except Exception as cause:
        raise _no_frame(cause) from cause
    for row, cells in enumerate(zip(*columns)):
        encoder.add(row, cells)
    if not len(encoder):
        raise DataError("the frame has no records")
    return encoder


def _no_frame(cause: Exception) -> DataError:
    return DataError(f"the frame cannot be read ({plugin.one_line(cause)}); give a pandas DataFrame")


def _silent(line: int, column: str, cell: object, odd: Odd) -> None:
    """Says nothing, to anybody: not even a log, which may be read elsewhere."""


def _refuse_of_frame(line: int, column: str, cell: object, odd: Odd) -> None:
    raise DataError(f"the frame, row {line}{told(column, cell, odd)}")


def _csv(path: Path) -> Source:
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise DataError(f"{path} is empty; its first line must name the columns")
    header = _fields(first[1].removeprefix(b"\xef\xbb\xbf"))
    if isinstance(header, Odd):
        raise DataError(f"{path}, line 1, which names the columns, {header.reason}; {header.advice}")
    names = [name.strip() for name in header]
    if len(names) == 1 and (other := next((mark for mark in ";\t|" if mark in names[0]), None)):
        raise DataError(f"{path}: its first line has no comma, but {other!r}; fields must be separated by commas")

    def rows(places: Sequence[int]) -> Iterator[tuple[int, Row]]:
        for number, line in lines:
            fields = _fields(line)
            if isinstance(fields, Odd):
                yield number, fields
            elif len(fields) != len(names):
                yield number, Odd(f"has {len(fields)} fields", f"the first line names {len(names)} columns")
            else:
                yield number, [fields[place] for place in places]

    return Source(names, "line", rows)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, cut off where they are too long. An empty one is no record, wherever it stands."""
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


def _fields(line: bytes) -> list[str] | Odd:
    """The fields of one line."""
    if len(line) > _LONGEST_LINE:
        return Odd("is too long", f"a line has at most {_LONGEST_LINE} bytes")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return Odd("is not UTF-8", "write the file as UTF-8")
    if '"' not in text:
        fields = text.split(",")
        if "\r" in text:
            return Odd("has a carriage return in it", "a record is one line, and lines end with a line feed")
    else:
        try:
            fields = next(csv.reader([text], strict=True))
        except csv.Error as error:
            if "field limit" in str(error):
                return _LONG_FIELD
            return Odd("has quotes that do not match", 'a record is one line, and "" is a quote within quotes')
    if max(map(len, fields)) > _LONGEST_FIELD:
        return _LONG_FIELD
    return fields


def _parquet(path: Path) -> Source:
    if find_spec("pyarrow") is None:
        raise DataError(f"{path} is Parquet, which needs pyarrow; pip install 'fedspa[parquet]', or write it as CSV")
    from pyarrow import parquet  # heavy, and wanted by this kind of file only

    try:
        file = parquet.ParquetFile(path)
        names, types = [str(name) for name in file.schema_arrow.names], list(file.schema_arrow.types)
    except Exception as cause:  # pyarrow raises a dozen kinds on foreign bytes
        raise DataError(f"{path} cannot be read as Parquet ({plugin.one_line(cause)[:200]})") from cause

    def rows(places: Sequence[int]) -> Iterator[tuple[int, Row]]:
        for place in places:
            if not _is_cell(types[place]):
                held = f"{path}: column {quoted(names[place])} holds {types[place]}"
                raise DataError(f"{held}; numbers, texts and booleans can be read")
        number = 0
        try:
            for batch in file.iter_batches(columns=[names[place] for place in places]):
                columns = [_cells(batch.column(names[place])) for place in places]
                for cells in zip(*columns):
                    number += 1
                    yield number, cells
        except Exception as cause:
            raise DataError(f"{path} cannot be read as Parquet ({plugin.one_line(cause)[:200]})") from cause

    return Source(names, "row", rows)


def _is_cell(kind: Any) -> bool:
    """Whether an Arrow type is one number, text or truth value a row."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    tests = ("boolean", "integer", "floating", "decimal", "string", "large_string", "null")
    return any(getattr(types, f"is_{test}")(kind) for test in tests)


def _cells(column: Any) -> list[object]:
    """Its cells as Python has them; one that cannot be had (text that is not UTF-8) is an object that fits no kind."""
    try:
        return list(column.to_pylist())
    except Exception:  # of one record, which must not cost the others
        return [_cell(cell) for cell in column]


def _cell(scalar: Any) -> object:
    try:
        return scalar.as_py()
    except Exception:
        return object()
