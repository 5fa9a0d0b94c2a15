"""Everything that is wrong with a table, for the eyes of whoever holds it: it tells of records, and goes nowhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedspa.data.columns import Odd, Schema
from fedspa.data.encode import LACKING, Encoder, compare_header
from fedspa.data.table import Source, feed, open_source
from fedspa.data.view import divided
from fedspa.errors import quoted

_MOST_EXAMPLES = 3
_MOST_PROBLEMS = 1000  # kept apart from each other; rows of a thousand different lengths say what one does


@dataclass
class Problem:
    """One thing that is wrong with some rows. `column` is "" where a row could not be cut into cells."""

    column: str
    reason: str
    advice: str
    rows: int
    first: int
    examples: list[str]


@dataclass
class Findings:
    """`missing`: values that a rule of the schema stands in for. `clipped`: values outside their column's range.
    `held_out`: training rows that a run takes for testing, by `data.holdout`; agents and persons are told without
    them."""

    rows: int = 0
    bad_rows: int = 0
    unit: str = "line"
    features: int = 0
    task: str = ""
    columns_missing: list[str] = field(default_factory=list)
    columns_unknown: list[str] = field(default_factory=list)
    columns_twice: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    clipped: dict[str, int] = field(default_factory=dict)
    test_rows: int | None = None
    held_out: int | None = None
    rows_of_agents: dict[str, int] | None = None
    persons: int | None = None
    most_rows_of_a_person: int | None = None

    @property
    def sound(self) -> bool:
        """Whether the simulator would take the table as it is."""
        wrong = self.columns_missing or self.columns_unknown or self.columns_twice or self.problems
        return not (wrong or self.agents_without_rows)

    @property
    def agents_without_rows(self) -> list[str]:
        """Agents all of whose training rows are held out."""
        return [name for name, rows in (self.rows_of_agents or {}).items() if not rows]


def examine(path: Path, schema: Schema, holdout: float = 0.0) -> Findings:
    """Reads the whole table and writes nothing. `holdout` is the share of the training rows that a run holds out, which
    can be told of a table that a run would take."""
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
    if not twice and wanted & {*source.names}:  # else there is nothing that a cell could be held against
        encoder = _examine_rows(found, path, schema, source)
        if holdout > 0 and found.sound:
            _hold_out(found, encoder, holdout)
    return found


def _examine_rows(found: Findings, path: Path, schema: Schema, source: Source) -> Encoder:
    problems: dict[tuple[str, str], Problem] = {}

    def note(line: int, column: str, cell: object, odd: Odd) -> None:
        key = (column, odd.reason)
        if key not in problems:
            if len(problems) == _MOST_PROBLEMS:
                return
            problems[key] = Problem(column, odd.reason, odd.advice, 0, line, [])
        problem = problems[key]
        problem.rows += 1
        if column and odd.reason != LACKING and len(problem.examples) < _MOST_EXAMPLES:
            example = quoted(cell, 60)
            if example not in problem.examples:
                problem.examples.append(example)

    encoder = Encoder(schema, source.names, note, agents=True)
    feed(encoder, source, path)
    found.rows, found.problems = len(encoder), list(problems.values())
    found.bad_rows, test_rows = encoder.bad_and_test()
    refused = Counter({problem.column: problem.rows for problem in found.problems if problem.reason == LACKING})
    found.missing = dict(encoder.missing - refused)
    found.clipped = {name: count for name, count in encoder.clipped().items() if count}
    if schema.split in source.names:
        found.test_rows = test_rows
    if schema.agent in source.names:
        found.rows_of_agents = encoder.rows_by_agent()
    if schema.person in source.names:
        rows = encoder.rows_by_person()
        found.persons, found.most_rows_of_a_person = len(rows), max(rows.values(), default=0)
    return encoder


def _hold_out(found: Findings, encoder: Encoder, share: float) -> None:
    """As a run does it: the same rows, persons whole."""
    table = encoder.table()
    train = np.arange(found.rows) if table.test is None else np.flatnonzero(~table.test)
    kept, out = divided(len(train), None if table.persons is None else table.persons[train], share)
    found.held_out = len(out)
    if table.owners is not None:
        names = encoder.rows_by_agent()
        left = np.bincount(table.owners[train[kept]], minlength=len(names))
        found.rows_of_agents = dict(zip(names, left.tolist()))
    if table.persons is not None:
        rows = np.unique(table.persons[train[kept]], return_counts=True)[1]
        found.persons, found.most_rows_of_a_person = len(rows), int(rows.max())
