"""`fedspa doctor`: what works on this machine, and what to do about what does not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """What works on this machine: Python, torch, devices, engines, extras, data; and one round of the quickstart.

    Exit code 0: the quickstart can run; 1: it cannot.

    Example: fedspa doctor
    """
    from fedspa.cli.environment import examine, ready

    answers = examine()
    good = ready(answers)
    if as_json:
        print(json.dumps({"ready": good, "answers": [asdict(answer) for answer in answers]}, allow_nan=False))
    else:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        marks = {True: "[green]yes[/green]", False: "[red]no[/red]", None: "–"}
        table = Table(box=None, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        topic = ""
        for answer in answers:
            detail = Text(answer.detail)  # as it is: in markup, 'fedspa[flower]' would lose its brackets
            table.add_row("" if answer.topic == topic else answer.topic, answer.subject, marks[answer.works], detail)
            topic = answer.topic
        screen = Console()
        screen.print(table, highlight=False)
        verdict = "[green]Ready[/green]: try `fedspa run`" if good else "[red]Not ready[/red]: mend what says no above"
        screen.print(verdict, highlight=False)
    if not good:
        raise typer.Exit(1)
