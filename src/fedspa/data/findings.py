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
from fedspa.data.table import LACKING, Encoder, Source, compare_header, feed, number_names, open_source, rows_by_name
from fedspa.errors import DataError, quoted

_MOST_EXAMPLES = 3
_MOST_AGENTS = 10  # listed by name
_MOST_PROBLEMS = 1000  # kept apart from each other; rows of a thousand different lengths say what one does


@dataclass
class Findings:
    """What is `wrong` with a table, and what is good to know (`notes`), a line each."""

    features: int
    task: str
    rows: int = 0
    bad_rows: int = 0
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        """Return whether the simulator would accept the table as it is."""
        return not self.wrong


@dataclass
class _Problem:
    """One fault of some rows. `column` is "" where a row could not be split into cells."""

    column: str
    odd: InvalidCell
    first: int
    rows: int = 0
    examples: list[str] = field(default_factory=list)

    def line(self, unit: str) -> str:
        what = f"column {quoted(self.column)}: a value" if self.column else "a row"
        examples = f" ({', '.join(self.examples)})" if self.examples else ""
        rows = f"{self.rows:,} {'row' if self.rows == 1 else 'rows'}, the first in {unit} {self.first}"
        return f"{what} {self.odd.reason}{examples}, in {rows}; {self.odd.advice}"


def examine(path: Path, schema: Schema, holdout: float = 0.0) -> Findings:
    """Read the whole table and write nothing. `holdout` is the share of the training rows that a run holds out; it is
    counted for a table that a run would accept."""
    source, found = open_source(path), Findings(len(schema.features), schema.task)
    missing, unknown, twice = compare_header(schema, source.names, agents=True)
    for names, why in (
        (missing, "it is not there, and the schema names it"),
        (unknown, "the schema does not name it; kind = 'ignore' leaves it out"),
        (twice, "it is there more than once; no row was read"),
    ):
        found.wrong += [f"column {quoted(name)}: {why}" for name in names]
    wanted = {*schema.inputs, *schema.targets, schema.agent, schema.person, schema.split}
    if not twice and wanted & {*source.names}:  # else no cell has a column in the schema
        _examine_rows(found, schema, source, holdout)
    return found


def _examine_rows(found: Findings, schema: Schema, source: Source, holdout: float) -> None:
    problems: dict[tuple[str, str], _Problem] = {}

    def note(line: int, column: str, cell: object, odd: InvalidCell) -> None:
        if len(problems) == _MOST_PROBLEMS and (column, odd.reason) not in problems:
            return
        problem = problems.setdefault((column, odd.reason), _Problem(column, odd, line))
        problem.rows += 1
        if column and odd.reason != LACKING and len(problem.examples) < _MOST_EXAMPLES:
            problem.examples += [example] if (example := quoted(cell, 60)) not in problem.examples else []

    encoder = Encoder(schema, source.names, note, agents=True)
    feed(encoder, source)
    found.rows, found.bad_rows = len(encoder), len(encoder.bad)
    found.wrong += [problem.line(source.unit) for problem in problems.values()]
    refused = Counter({problem.column: problem.rows for problem in problems.values() if problem.odd.reason == LACKING})
    for counts, why in (
        (encoder.missing - refused, "values missing: {:,}; the schema says what they become"),
        (Counter(encoder.clipped()), "values outside its range: {:,}; they are clipped to it"),
    ):
        found.notes += [f"column {quoted(name)}: {why.format(count)}" for name, count in counts.items() if count]
    owners, persons = number_names(encoder.owners), number_names(encoder.persons)
    train = np.flatnonzero(~np.frombuffer(bytes(encoder.test), dtype=np.bool_))
    whole = len(train)
    instead = holdout > 0 and found.is_valid
    if instead:  # the same rows as a run does, with all rows of a person together
        kept, _ = held_out(whole, persons[train] if schema.person else None, holdout)
        train = train[kept]
    if schema.split in source.names:
        also = "; a run takes the rows that it holds out in their place" * instead
        found.notes.append(f"rows for testing: {found.rows - whole:,}{also}")
    if instead:
        out = f"{whole - len(train):,}; left: {len(train):,}"
        found.notes.append(f"rows held out for testing, by data.holdout = {holdout:g}: {out}")
    if schema.agent in source.names:
        names = list(rows_by_name(encoder.owners))
        sizes = np.bincount(owners[train][owners[train] >= 0], minlength=len(names)).tolist()
        found.wrong += [
            f"agent {quoted(name, 60)}: all of its training rows are held out; give it more, or hold out fewer"
            for name, size in zip(names, sizes)
            if not size
        ]
        smallest = sorted(zip(sizes, names), key=lambda pair: pair[0])
        few = ", ".join(f"{quoted(name, 60)} {size:,}" for size, name in smallest[:_MOST_AGENTS])
        more = f" and {len(names) - _MOST_AGENTS:,} more that have no fewer" if len(names) > _MOST_AGENTS else ""
        found.notes.append(f"agents: {len(names):,}; training rows: {few or 'none'}{more}")
    if schema.person in source.names:
        rows = np.unique(persons[train][persons[train] >= 0], return_counts=True)[1]
        most = int(rows.max(initial=0))
        found.notes.append(f"persons: {len(rows):,}; training rows of one of them: at most {most:,}")


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
