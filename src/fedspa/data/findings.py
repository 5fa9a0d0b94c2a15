"""Everything that is wrong with a table, for the eyes of whoever holds it: it tells of records, and goes nowhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from fedspa.data.cells import Odd
from fedspa.data.columns import Schema
from fedspa.data.encode import LACKING, Encoder, compare_header
from fedspa.data.table import Source, feed, open_source
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
    """`missing`: values that a rule of the schema stands in for. `clipped`: values outside their column's range."""

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
    rows_of_agents: dict[str, int] | None = None
    persons: int | None = None
    most_rows_of_a_person: int | None = None

    @property
    def sound(self) -> bool:
        """Whether the simulator would take the table as it is."""
        return not (self.columns_missing or self.columns_unknown or self.columns_twice or self.problems)


def examine(path: Path, schema: Schema) -> Findings:
    """Reads the whole table and writes nothing."""
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
        _examine_rows(found, path, schema, source)
    return found


def _examine_rows(found: Findings, path: Path, schema: Schema, source: Source) -> None:
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
