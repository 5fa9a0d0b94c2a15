"""Everything that is wrong with a table. The result contains record contents and is meant for their holder only."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from fedspa.data.columns import InvalidCell, Schema, day, flag, number
from fedspa.data.dataset import held_out
from fedspa.data.table import LACKING, Encoder, Source, compare_header, feed, open_source, rows_by_name
from fedspa.errors import DataError, quoted

_MOST_EXAMPLES = 3
_MOST_PROBLEMS = 1000  # kept apart from each other; rows of a thousand different lengths say what one does


@dataclass
class RowProblem:
    """One fault of some rows. `column` is "" where a row could not be split into cells."""

    column: str
    reason: str
    advice: str
    rows: int
    first: int
    examples: list[str]


@dataclass
class Findings:
    """`missing`: values that a rule of the schema replaces. `clipped`: values outside their column's range.
    `held_out`: training rows that a run uses for testing, by `data.holdout`; the counts of agents and persons
    exclude them."""

    rows: int = 0
    bad_rows: int = 0
    unit: str = "line"
    features: int = 0
    task: str = ""
    columns_missing: list[str] = field(default_factory=list)
    columns_unknown: list[str] = field(default_factory=list)
    columns_twice: list[str] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    clipped: dict[str, int] = field(default_factory=dict)
    test_rows: int | None = None
    held_out: int | None = None
    rows_of_agents: dict[str, int] | None = None
    persons: int | None = None
    most_rows_of_a_person: int | None = None

    @property
    def is_valid(self) -> bool:
        """Return whether the simulator would accept the table as it is."""
        wrong = self.columns_missing or self.columns_unknown or self.columns_twice or self.problems
        return not (wrong or self.agents_without_rows)

    @property
    def agents_without_rows(self) -> list[str]:
        """Return the agents all of whose training rows are held out."""
        return [name for name, rows in (self.rows_of_agents or {}).items() if not rows]


def examine(path: Path, schema: Schema, holdout: float = 0.0) -> Findings:
    """Read the whole table and write nothing. `holdout` is the share of the training rows that a run holds out; it is
    counted for a table that a run would accept."""
    source = open_source(path)
    missing, unknown, twice = compare_header(schema, source.names, agents=True)
    found = Findings(
        unit=source.unit,
        features=len(schema.features),
        task=schema.task,
        columns_missing=missing,
        columns_unknown=unknown,
        columns_twice=twice,
    )
    wanted = {*schema.inputs, *schema.targets, schema.agent, schema.person, schema.split}
    if not twice and wanted & {*source.names}:  # else no cell has a column in the schema
        encoder = _examine_rows(found, schema, source)
        if holdout > 0 and found.is_valid:
            _hold_out(found, encoder, holdout)
    return found


def _examine_rows(found: Findings, schema: Schema, source: Source) -> Encoder:
    problems: dict[tuple[str, str], RowProblem] = {}

    def note(line: int, column: str, cell: object, odd: InvalidCell) -> None:
        key = (column, odd.reason)
        if key not in problems:
            if len(problems) == _MOST_PROBLEMS:
                return
            problems[key] = RowProblem(column, odd.reason, odd.advice, 0, line, [])
        problem = problems[key]
        problem.rows += 1
        if column and odd.reason != LACKING and len(problem.examples) < _MOST_EXAMPLES:
            example = quoted(cell, 60)
            if example not in problem.examples:
                problem.examples.append(example)

    encoder = Encoder(schema, source.names, note, agents=True)
    feed(encoder, source)
    found.rows, found.problems = len(encoder), list(problems.values())
    found.bad_rows = len(encoder.bad)
    refused = Counter({problem.column: problem.rows for problem in found.problems if problem.reason == LACKING})
    found.missing = dict(encoder.missing - refused)
    found.clipped = {name: count for name, count in encoder.clipped().items() if count}
    if schema.split in source.names:
        found.test_rows = sum(encoder.test)
    if schema.agent in source.names:
        found.rows_of_agents = rows_by_name(encoder.owners)
    if schema.person in source.names:
        rows = rows_by_name(encoder.persons)
        found.persons, found.most_rows_of_a_person = len(rows), max(rows.values(), default=0)
    return encoder


def _hold_out(found: Findings, encoder: Encoder, share: float) -> None:
    """Hold out the same rows as a run does, with all rows of a person together."""
    table = encoder.table()
    train = np.arange(found.rows) if table.test is None else np.flatnonzero(~table.test)
    kept, out = held_out(len(train), None if table.persons is None else table.persons[train], share)
    found.held_out = len(out)
    if table.owners is not None:
        names = rows_by_name(encoder.owners)
        left = np.bincount(table.owners[train[kept]], minlength=len(names))
        found.rows_of_agents = dict(zip(names, left.tolist()))
    if table.persons is not None:
        rows = np.unique(table.persons[train[kept]], return_counts=True)[1]
        found.persons, found.most_rows_of_a_person = len(rows), int(rows.max())


# Names of columns that identify someone, and among them those of persons.
_PERSON = re.compile(r"(^|[^a-z])(patient|person|subject|participant|client|customer|user)([^a-z]|id|$)", re.I)
_IS_PERSON = re.compile(r"patient|person|subject|participant|client|customer|user|mrn", re.I)
_ID = re.compile(r"(^|[^a-z])(id|uuid|guid|pseudonym|ssn|name|number|nr)([^a-z]|$)|[a-z]I[Dd]$", re.I)
_LEFT_OPEN = {"number": ", range = []", "category": ", categories = []", "date": ", range = []", "flag": ""}


def config_of_tables(tables: Sequence[Path]) -> str:
    """Return a config for tables with the same columns, one of each agent. Ranges and categories are left open: they
    are public knowledge, and nothing of a record but the kind of its values is in the text."""
    sources = [open_source(path) for path in tables]
    names = sources[0].names
    for path, source in zip(tables, sources):
        if differing := sorted({*source.names} ^ {*names}):
            raise DataError(
                f"{path} has other columns than {tables[0]}: {', '.join(differing)}; the agents' tables need the same"
            )
    kinds = dict(zip(names, map(_kind, zip(*(row for source in sources for row in _head(source, names))))))
    persons = [name for name in names if _IS_PERSON.fullmatch(name) or (_PERSON.search(name) and _ID.search(name))]
    person = persons[0] if len(persons) == 1 else None
    ids = {name for name in names if _ID.search(name) or name == person}
    *_, target = [name for name in names if name not in ids] or names
    columns = []
    for name in names:
        kind = kinds.get(name, "category")
        text = f'kind = "{kind}"{_LEFT_OPEN[kind]}{", target = true" * (name == target)}'
        if name in ids and name != target:
            text = 'kind = "ignore"'
        columns += [] if name == person else [f"{json.dumps(name, ensure_ascii=False)} = {{{text}}}"]
    paths = [str(path.absolute()) for path in tables]
    lines = [
        "# Fill in every [], by what is known of the columns and not by looking at the records (README.md).",
        f"[data]\nname = {json.dumps(paths if len(paths) > 1 else paths[0], ensure_ascii=False)}",
        f"person = {json.dumps(person, ensure_ascii=False)}   # the person ID: each person is protected with all rows"
        if person
        else '# person = "…"   # the column with the person ID, to protect persons and not records',
        "holdout = 0.2    # the server's own test set\n\n[data.table.columns]",
        *columns,
        "\n[privacy]\nepsilon = 3.0\ndelta = 1e-5\n",
    ]
    return "\n".join(lines)


def _head(source: Source, names: Sequence[str]) -> list[Sequence[object]]:
    """Return the first rows of a table."""
    return [row for _, row in islice(source.rows(names), 100) if not isinstance(row, InvalidCell)]


def _kind(cells: Sequence[object]) -> str:
    """Return the kind of column that has such cells."""
    for kind, read in (("flag", flag), ("number", number), ("date", day)):
        with suppress(InvalidCell):
            values = {read(cell) for cell in cells} - {None}
            if values and (kind != "flag" or values == {0.0, 1.0}):
                return kind
    return "category"
