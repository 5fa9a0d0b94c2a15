"""The command line: parse, call, print. Heavy imports wait inside the commands, so that --help is quick."""

from __future__ import annotations

import io
import sys

import typer

from fedspa.cli import (
    audit,
    data,
    doctor,
    failure,
    ledger,
    model,
    new,
    privacy,
    report,
    run,
    server,
    site,
    suggest,
    tune,
    version,
    watch,
)

app = typer.Typer(
    name="fedspa",
    no_args_is_help=True,
    suggest_commands=False,  # click has its own suggestion
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(version.version)
app.command("run")(run.run)
app.command("tune")(tune.tune)
app.command("suggest")(suggest.suggest)
app.command("privacy")(privacy.privacy)
app.command("audit")(audit.audit)
app.command("report")(report.report)
app.command("watch")(watch.watch)
app.command("new")(new.new)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(ledger.app, name="ledger")
app.add_typer(model.app, name="model")
app.add_typer(site.app, name="site")
app.add_typer(server.app, name="server")


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
        code = failure.handled(error)
    failure.silence()
    sys.exit(code)
