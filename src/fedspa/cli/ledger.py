"""`fedspa ledger`: read an agent's durable record of what it spent. Nothing here writes but `accept-loss`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedspa.errors import ConfigError

if TYPE_CHECKING:
    from fedspa.privacy.ledger_report import AgentSummary, LedgerSummary
    from fedspa.runs.config import Privacy

app = typer.Typer(help="Read a ledger: what was spent, what is left, whether it can be trusted.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="The ledger, an SQLite file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Relation = Literal["add-remove", "replace-one"]


@app.command()
def show(
    file: File,
    delta: Annotated[float | None, typer.Option(help="δ at which ε is stated (the run's beside it, or 1e-3).")] = None,
    neighbours: Annotated[
        Relation | None, typer.Option(help="Neighbouring relation of ε (the run's beside it, or add-remove).")
    ] = None,
    cap: Annotated[float | None, typer.Option(help="ε cap: also print what is left of it.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Take δ, relation and cap from this policy.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only this agent.")] = None,
    as_json: AsJson = False,
) -> None:
    """Who spent what, when; ε so far; with a cap, ε left and how many more rounds of the last kind fit.

    Example: fedspa ledger show runs/my-run/ledger.sqlite --cap 2
    """
    from fedspa.privacy import ledger_report
    from fedspa.privacy.policy import Policy
    from fedspa.runs.plans import relation
    from fedspa.runs.statement import CLIP_FROM_DATA

    if policy is not None:
        if cap is not None:
            raise ConfigError("--policy and --cap: give one of them; a policy states its own cap")
        limits = Policy.load(policy)
        delta, neighbours, cap = limits.delta, limits.neighbours, limits.epsilon
    run = _run_beside(file)
    if delta is None:
        delta = 1e-3 if run is None else run.delta
    if neighbours is None:
        neighbours = "add-remove" if run is None else relation(run, run.sampling)
    summary = ledger_report.summary(file, delta=delta, neighbours=neighbours, cap=cap, agent=agent)
    # Entries of before a ledger could say so itself; its newer ones have no finite ε.
    unsaid = run is not None and run.clip_rule == "median" and any(math.isfinite(a.epsilon) for a in summary.agents)
    warnings = [f"NOT PRIVATE: {CLIP_FROM_DATA}"] if unsaid else []
    if as_json:
        print(json.dumps({**_plain(summary), "warnings": warnings}, allow_nan=False))
    else:
        _print(summary, warnings)


def _run_beside(file: Path) -> Privacy | None:
    """[privacy] of the run in whose folder the ledger lies: what that run stated is then what is shown."""
    from fedspa.runs.config import load

    try:
        return load(file.parent / "config.toml").privacy
    except ConfigError:  # it lies in no run's folder
        return None


@app.command()
def verify(file: File, as_json: AsJson = False) -> None:
    """Check the file's integrity, its totals and its chain of hashes. Exit code 1 if anything is wrong.

    Example: fedspa ledger verify ledger.sqlite
    """
    from fedspa.privacy import ledger_report

    problems = ledger_report.verify(file)
    if as_json:
        print(json.dumps({"file": str(file), "sound": not problems, "problems": problems}))
    elif problems:
        print("\n".join(problems))
    else:
        print(f"{file}: sound")
    if problems:
        raise typer.Exit(1)


@app.command()
def export(file: File) -> None:
    """Everything in the ledger as one JSON object.

    Example: fedspa ledger export ledger.sqlite > ledger.json
    """
    from fedspa.privacy import ledger_report

    print(json.dumps(ledger_report.export(file), allow_nan=False))


@app.command(name="accept-loss")
def accept_loss(
    file: File,
    entries: Annotated[int, typer.Option(help="How many entries the ledger holds now, as `verify` says.")],
) -> None:
    """Go on with a ledger that is refused because entries, or its witness, are gone for good.

    First look for the newest copy of both files. What the missing entries spent is not counted from here on: lower the
    policy's epsilon by as much, or stop using these records. The loss is written into the ledger, and `show` and
    `verify` tell of it ever after.

    Example: fedspa ledger accept-loss ledger.sqlite --entries 60
    """
    from fedspa.privacy import ledger_loss

    print(f"{file}: {ledger_loss.accept(file, entries)}")


def _plain(summary: LedgerSummary) -> dict[str, Any]:
    fields = {name: getattr(summary, name) for name in summary.__slots__}
    return {**fields, "agents": [_plain_agent(agent) for agent in summary.agents]}


def _plain_agent(agent: AgentSummary) -> dict[str, Any]:
    """Events are keys in a summary; JSON's keys are texts, so they become a list."""
    spent = [{"event": asdict(event), "participations": count} for event, count in agent.spent.items()]
    fields = {name: getattr(agent, name) for name in agent.__slots__}
    return {
        **fields,
        "epsilon": agent.epsilon if math.isfinite(agent.epsilon) else None,  # JSON has no infinity
        "runs": [asdict(run) for run in agent.runs],
        "spent": spent,
        "last_event": asdict(agent.last_event),
        "cap": None if agent.cap is None else asdict(agent.cap),
    }


def _print(summary: LedgerSummary, warnings: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from fedspa.runs.statement import shown

    screen = Console()
    table = Table(box=None)
    for column in ("agent", "runs", "rounds", "sent", "last (UTC)", "ε", "ε left", "more rounds"):
        table.add_column(column)
    for agent in summary.agents:
        table.add_row(
            agent.agent,
            str(len(agent.runs)),
            str(sum(run.participations for run in agent.runs)),
            str(sum(run.released for run in agent.runs)),
            agent.runs[-1].last_at[:16],
            shown(agent.epsilon),
            "–" if agent.epsilon_left is None else f"{agent.epsilon_left:.4g}",
            "–" if agent.participations_left is None else str(agent.participations_left),
        )
    screen.print(table)
    for event in dict.fromkeys(agent.last_event for agent in summary.agents):
        screen.print(f"last event: {event}", highlight=False)
    screen.print(f"{summary.entries} entries, {summary.releases} released, head {summary.head[:16]}", highlight=False)
    if summary.agents:
        first = summary.agents[0]
        screen.print(
            f"ε at δ = {first.delta:g}, {first.neighbours}, accountant {first.accountant}; left and more rounds: "
            f"{'give --cap or --policy' if first.cap is None else f'of a cap of {first.cap.epsilon:g}'}",
            highlight=False,
        )
    for warning in warnings:
        screen.print(f"[red]Note[/red]  {warning}", highlight=False)
