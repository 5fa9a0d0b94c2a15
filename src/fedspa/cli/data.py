"""`fedspa data`: look at a table before it is trained on. `fedspa stats`: private statistics of the agents' tables."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedspa.cli.screen import AsJson, print_json, show_facts, show_table
from fedspa.configs import complete
from fedspa.errors import ConfigError, FedspaWarning

if TYPE_CHECKING:
    from fedspa.analytics.estimates import Release

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


# `fedspa stats`: private statistics of the agents' tables, their expected errors, and a schema that uses them.


def stats(
    source: Annotated[
        str,
        typer.Argument(help="A TOML config of a table, or the folder of such a run.", autocompletion=complete),
    ],
    epsilon: Annotated[float | None, typer.Option(help="ε of the release, for each record or person.")] = None,
    columns: Annotated[str | None, typer.Option(metavar="NAME,…", help="Columns of the schema; all if unset.")] = None,
    bins: Annotated[int, typer.Option(min=2, help="Parts of a number's range, for histogram and quantiles.")] = 20,
    by_class: Annotated[bool, typer.Option("--by-class", help="Each statistic for each class of the target.")] = False,
    share: Annotated[
        list[str] | None, typer.Option(metavar="NAME=WEIGHT", help="Weight of a column; 4 halves its error.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the errors to expect, and spend nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the run's files (a new one under runs/).")] = None,
    write_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schema with released means and deviations.")
    ] = None,
    write_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the config with that schema, to train with.")
    ] = None,
    release_only: Annotated[
        Path | None,
        typer.Option("--release-config", metavar="FILE", help="Write the release's config, for Flower; spend nothing."),
    ] = None,
    sites: Annotated[bool, typer.Option("--sites", help="Show each site's numbers too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Counts, shares, means and quantiles of the agents' tables, as one private release per agent.

    Example: fedspa stats config.toml --epsilon 0.5 --write-schema schema.toml

    Each agent pays once, whatever the number of columns. --plan shows what to expect before anything is spent.
    """
    from fedspa import configs
    from fedspa.analytics.statistics import NO_EPSILON, Statistics, expected, loaded, release_config, release_options
    from fedspa.running import run
    from fedspa.runs.config import to_toml

    if plan and (write_schema or write_config):
        raise ConfigError("--plan and a file to write: both given; a plan releases no numbers")
    if Path(source).is_dir():
        if write_config is not None:
            raise ConfigError("--write-config needs the config to change; give it in place of the folder")
        found = Statistics.load(source)
    else:
        if epsilon is None:
            raise ConfigError(NO_EPSILON)
        source = str(configs.find(source))
        config = loaded(source, epsilon)
        names = None if columns is None else [name.strip() for name in columns.split(",")]
        shares = dict(map(_share, share or ()))
        asked = release_config(config, release_options(names, bins, by_class, shares), epsilon, out)
        if release_only is not None:
            release_only.write_text(to_toml(asked), "utf-8")
            print(f"{release_only} written; nothing was spent")
            return
        if plan:
            found = expected(asked)
        else:
            warnings.simplefilter("ignore", FedspaWarning)  # the notes below say the same
            found = Statistics.load(run(asked, progress=False).folder)
    # What was paid for is shown first: a file that cannot be written may end the command.
    if as_json:
        print(found.to_json())
    else:
        show(found, found.sites if sites or plan else (), ("count in", "count of"), plan=plan)
    if write_schema is not None:
        found.write_schema(write_schema)
    if write_config is not None:
        with suppress(ConfigError):  # ε of the training is its config's own, where it has one
            config = loaded(source, None)
        write_config.write_text(found.paid + to_toml(found.standardised(config), given_only=True), "utf-8")


def _share(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        if name:
            return name, float(weight)
    except ValueError:
        pass
    raise ConfigError(f"--share {text}: it must read NAME=WEIGHT, as in age=4")


def show(found: Release, sites: Sequence[str], hidden: tuple[str, ...], *, plan: bool = False) -> None:
    """Print the numbers of all sites together, and of each of `sites`; `hidden` is how the names begin of those that
    are for files and plots. `plan`: errors to expect, and nothing else, since nothing was released."""
    from fedspa.analytics.estimates import shown_number
    from fedspa.runs.guarantee import statement

    header = ["group", "column", "statistic", *(["± error"] if plan else ["value", "95 % interval"])]
    for site in ("", *sites):
        rows = [
            [each.group, each.column or "–", each.statistic]
            + ([f"± {shown_number(each.error)}"] if plan else [*each.shown])
            for each in found.estimates
            if each.site == site and not each.statistic.startswith(hidden)
        ]
        show_table(header, rows, title=site or "all sites")
    spread = "of records that are spread evenly over each column's range; nothing was spent"
    show_facts(
        [
            *([("Expected", spread)] if plan else []),
            ("Guarantee", statement(found.summary)),
            *(("Note", warning) for warning in found.summary.get("warnings", ())),
            *([] if found.folder is None else [("Files", str(found.folder))]),
        ]
    )
