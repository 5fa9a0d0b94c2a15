"""What several commands print: tables on a narrow screen, checklists, and options that they share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedspa.checks import Check, failures
from fedspa.errors import printable

WIDTH = 80  # every table fits it

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def show(table: Table, screen: Console) -> None:
    """Print a table at 80 columns where the screen has fewer, and let the terminal fold its lines. Squeezed to the
    screen it would lose whole columns, and the last ones are ε and whether it holds."""
    own = screen.width
    screen.width = max(own, WIDTH)
    try:
        screen.print(table, crop=False)
    finally:
        screen.width = own


def show_checks(name: str, checks: Sequence[Check], as_json: bool) -> None:
    """Print a verdict and every check; exit with code 1 if a required check failed."""
    failed = failures(checks)
    if as_json:
        found = {"name": name, "ready": not failed, "checks": [asdict(check) for check in checks]}
        print(json.dumps(found, allow_nan=False))
    else:
        screen, table = Console(highlight=False, markup=False), Table(box=None, show_header=False)
        for overflow in ("ignore", "ignore", "fold"):
            table.add_column(overflow=overflow, no_wrap=overflow == "ignore")
        for check in checks:
            mark = {True: "ok", False: "FAILED", None: "–"}[check.passed]
            table.add_row(mark, check.subject, Text(printable(check.detail)))
        count = f"{len(failed)} check{'s' * (len(failed) != 1)} failed"
        screen.print(f"{name}: not ready: {count}" if failed else f"{name}: ready")
        screen.print(table)
    if failed:
        raise typer.Exit(1)
