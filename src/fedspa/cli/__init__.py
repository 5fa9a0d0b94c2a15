"""The command line: parse, call, print. Heavy imports wait inside the commands, so that --help is quick."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from fedspa.cli import (
    audit,
    data,
    deployment,
    doctor,
    ledger,
    privacy,
    report,
    run,
    screen,
    tune,
)

app = typer.Typer(
    name="fedspa",
    no_args_is_help=True,
    suggest_commands=False,  # click has its own suggestion
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    run.run,
    tune.tune,
    privacy.suggest,
    data.stats,
    report.evaluate,
    privacy.privacy,
    audit.audit,
    report.report,
    deployment.new,
    doctor.doctor,
):
    app.command()(command)
app.add_typer(data.app, name="data")
app.add_typer(ledger.app, name="ledger")
app.add_typer(deployment.site, name="site")
app.add_typer(deployment.server, name="server")


def _print_version(asked: bool) -> None:
    if not asked:
        return
    from importlib import metadata

    from fedspa import __version__
    from fedspa.engine.native import library

    level = library.best_level() if library.missing() is None else "engine not built, see fedspa doctor"
    print(f"fedspa {__version__} (torch {metadata.version('torch')}, native {level})")
    raise typer.Exit


@app.callback()
def _fedspa(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning under record-level local differential privacy, with sparse uploads."""


def main(commands: typer.Typer = app) -> None:
    """Exit code 0: done; 1: the answer is no (a check that failed); 2: bad input, in one line; 130: interrupted;
    70: a bug in fedspa, whose traceback is in a file."""
    for stream in (sys.stdout, sys.stderr):
        # ε and δ, where the encoding has no letters for them, as \u03b5 and \u03b4: better than an end without result.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = commands(standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        code = screen.handled(error)
    screen.silence()
    sys.exit(code)
