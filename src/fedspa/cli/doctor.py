"""`fedspa doctor`: what works on this machine, what a run would do with a model, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fedspa.errors import ConfigError

if TYPE_CHECKING:
    from fedspa.cli.environment import Answer
    from fedspa.cli.examine import Finding


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Ask about a model: a name as in model.name, package.module:function, or a config's file (.toml).",
        ),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="SIDES", help="Records to try --model with, as in 1,28,28; made up.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Classes of the records of --shape (10).")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of --model's config.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What works on this machine: Python, torch, devices, engines, extras, data; and one round of the quickstart.

    With --model: whether that model is sound, which engine would train it and why, what would make it faster, and the
    time and memory of a local step. Without --shape the records are those of the config, or the quickstart's.

    Exit code 0: the quickstart, or the model, can run; 1: it cannot.

    Example: fedspa doctor --model my_model:build --shape 3,32,32
    """
    if model is not None:
        good = _on_model(model, overrides or [], shape, classes, as_json)
    elif overrides or shape is not None or classes is not None:
        raise ConfigError("--set, --shape and --classes go with --model, and there is none; name a model")
    else:
        good = _on_machine(as_json)
    if not good:
        raise typer.Exit(1)


def _on_model(model: str, overrides: list[str], shape: str | None, classes: int | None, as_json: bool) -> bool:
    from fedspa.cli.examine import examine_model

    finding = examine_model(model, overrides, shape, classes)
    if as_json:
        print(json.dumps({"sound": finding.sound, **asdict(finding)}, allow_nan=False))
    else:
        _print_finding(finding)
    return finding.sound


def _on_machine(as_json: bool) -> bool:
    from fedspa.cli.environment import examine, ready

    answers = examine()
    good = ready(answers)
    if as_json:
        print(json.dumps({"ready": good, "answers": [asdict(answer) for answer in answers]}, allow_nan=False))
    else:
        _print_answers(answers, good)
    return good


def _print_answers(answers: list[Answer], good: bool) -> None:
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


def _print_finding(finding: Finding) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for topic, details in _told(finding).items():
        for place, detail in enumerate(details):
            table.add_row("" if place else topic, Text(detail))  # as it is: a layer's name may look like markup
    Console().print(table, highlight=False)


def _told(finding: Finding) -> dict[str, list[str]]:
    """What is printed, by topic."""
    frozen = f", {finding.frozen:,} frozen" if finding.frozen else ""
    told = {
        "model": [f"{finding.model}: d = {finding.trained:,} parameters{frozen}"],
        "records": [f"{finding.examples} (data {finding.data!r})"],
        "check": [str(problem) for problem in finding.problems] or ["nothing is wrong with it"],
    }
    if finding.engine is None or finding.step is None:
        return told | {"engine": ["none: a run refuses this model"]}
    told["engine"] = [f"{finding.engine} on {finding.device}: {finding.why}"]
    told["faster"] = list(finding.hints) or ["nothing is known that would make it faster"]
    step = finding.step
    memory = "" if step.memory_mib is None else f", {step.memory_mib:,.0f} MiB of memory"
    told["a step"] = [
        f"{step.ms_per_agent_step:.3g} ms per agent with B = {finding.batch}{memory} "
        f"(agents: {step.agents}, steps: {step.steps})"
    ]
    return told
