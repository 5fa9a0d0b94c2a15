"""`fedspa data`: look at a table before it is trained on. Nothing here writes or sends."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fedspa.data.findings import Findings, RowProblem

app = typer.Typer(help="Check a table of records against its schema.", no_args_is_help=True)

_MOST_AGENTS = 10  # listed by name


@app.callback()
def _group() -> None:
    """A group although it has one command: `fedspa data check`."""


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="The table, or one per agent: .csv or .parquet files.")],
    schema: Annotated[Path, typer.Option(help="A TOML file with [data.table]: a schema, or a run's config.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; of several files, a list.")] = False,
) -> None:
    """List everything that is wrong with a table, and what its schema makes of it. Exit code 1 if anything is wrong.

    Nothing is written and nothing is sent. The output contains facts about records; treat it as confidential.

    Example: fedspa data check sites/*.csv --schema config.toml
    """
    from fedspa.data.columns import load_schema
    from fedspa.data.findings import examine
    from fedspa.runs.sections import Data

    columns, share = load_schema(schema, beside=frozenset(Data.model_fields)), _holdout(schema)
    share *= len(files) == 1  # of several, a run holds out a share of all together
    checked = [(file, examine(file, columns, share)) for file in files]
    if as_json:
        results = [{"file": str(file), "valid": found.is_valid, **asdict(found)} for file, found in checked]
        print(json.dumps(results if len(files) > 1 else results[0], allow_nan=False))
    else:
        from rich.console import Console

        from fedspa.errors import printable

        screen = Console(highlight=False, markup=False)
        for file, found in checked:
            for line in (*_wrong(found), *_said(found, share), *_verdict(found, file)):
                screen.print(printable(line))
    if not all(found.is_valid for _, found in checked):
        raise typer.Exit(1)


def _holdout(schema: Path) -> float:
    """The share of the training records that a run of this config holds out; 0 where the file is no more than a
    schema."""
    from pydantic import ValidationError

    from fedspa import toml
    from fedspa.errors import ConfigError, describe_invalid
    from fedspa.runs.sections import Data

    section = toml.read(schema, "a TOML file with [data.table]")["data"]
    try:
        return Data.model_validate({"holdout": section.get("holdout", 0.0)}).holdout
    except ValidationError as error:
        raise ConfigError(describe_invalid(error, Data, "data.")) from None


def _wrong(found: Findings) -> list[str]:
    from fedspa.errors import quoted

    lines = [f"column {quoted(name)}: it is not there, and the schema names it" for name in found.columns_missing]
    lines += [
        f"column {quoted(name)}: the schema does not name it; kind = 'ignore' leaves it out"
        for name in found.columns_unknown
    ]
    lines += [f"column {quoted(name)}: it is there more than once; no row was read" for name in found.columns_twice]
    lines += [_problem(problem, found.unit) for problem in found.problems]
    return lines + [
        f"agent {quoted(name, 60)}: all of its training rows are held out; give it more, or hold out fewer"
        for name in found.agents_without_rows
    ]


def _problem(problem: RowProblem, unit: str) -> str:
    from fedspa.errors import quoted

    what = f"column {quoted(problem.column)}: a value" if problem.column else "a row"
    examples = f" ({', '.join(problem.examples)})" if problem.examples else ""
    rows = f"{problem.rows:,} {'row' if problem.rows == 1 else 'rows'}, the first in {unit} {problem.first}"
    return f"{what} {problem.reason}{examples}, in {rows}; {problem.advice}"


def _said(found: Findings, share: float) -> list[str]:
    """Return what is not wrong, but good to know."""
    from fedspa.errors import quoted

    lines = [
        f"column {quoted(name)}: values missing: {count:,}; the schema says what they become"
        for name, count in found.missing.items()
    ]
    lines += [
        f"column {quoted(name)}: values outside its range: {count:,}; they are clipped to it"
        for name, count in found.clipped.items()
    ]
    if found.test_rows is not None:
        instead = "; a run takes the rows that it holds out in their place" * (found.held_out is not None)
        lines.append(f"rows for testing: {found.test_rows:,}{instead}")
    if found.held_out is not None:
        left = found.rows - (found.test_rows or 0) - found.held_out
        lines.append(f"rows held out for testing, by data.holdout = {share:g}: {found.held_out:,}; left: {left:,}")
    if found.rows_of_agents is not None:
        counts = sorted(found.rows_of_agents.items(), key=lambda item: item[1])
        few = ", ".join(f"{quoted(name, 60)} {count:,}" for name, count in counts[:_MOST_AGENTS])
        more = f" and {len(counts) - _MOST_AGENTS:,} more that have no fewer" if len(counts) > _MOST_AGENTS else ""
        lines.append(f"agents: {len(counts):,}; training rows: {few or 'none'}{more}")
    if found.persons is not None:
        lines.append(
            f"persons: {found.persons:,}; training rows of one of them: at most {found.most_rows_of_a_person:,}"
        )
    return lines


def _verdict(found: Findings, file: Path) -> list[str]:
    made = f"{found.rows:,} rows, {found.features:,} features, {found.task}"
    if found.is_valid:
        return [f"{file}: valid; {made}"]
    bad = f"; bad rows: {found.bad_rows:,}, which count as zero at a site" if found.bad_rows else ""
    return [f"{file}: not valid; {made}{bad}"]
