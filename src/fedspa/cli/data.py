"""`fedspa data`: look at a table before it is trained on. Nothing here writes or sends."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedspa.cli.screen import print_json

app = typer.Typer(help="Check a table of records against its schema.", no_args_is_help=True)


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
    from fedspa.errors import printable
    from fedspa.runs.sections import Data

    columns, share = load_schema(schema, beside=frozenset(Data.model_fields)), _holdout(schema)
    share *= len(files) == 1  # of several, a run holds out a share of all together
    checked = [(file, examine(file, columns, share)) for file in files]
    if as_json:
        results = [{"file": str(file), "valid": found.is_valid, **asdict(found)} for file, found in checked]
        print_json(results if len(files) > 1 else results[0])
    else:
        for file, found in checked:
            verdict = f"{file}: {'valid' if found.is_valid else 'not valid'}; {found.rows:,} rows"
            bad = f"; bad rows: {found.bad_rows:,}, which count as zero at a site" if found.bad_rows else ""
            verdict += f", {found.features:,} features, {found.task}{bad}"
            for line in (*found.wrong, *found.notes, verdict):
                print(printable(line))
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
