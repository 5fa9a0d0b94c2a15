"""`fedspa ledger`: read an agent's durable record of what it spent. Nothing here writes but `accept-loss`."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedspa.cli.screen import AsJson, print_json, show_facts, show_table
from fedspa.errors import ConfigError
from fedspa.privacy.event import Neighbours

if TYPE_CHECKING:
    from fedspa.agent.ledger.report import AgentSummary, LedgerSummary
    from fedspa.runs.sections import Privacy

app = typer.Typer(help="Read a ledger: what was spent, what is left, whether it can be trusted.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="The ledger (an SQLite file), or the folder of a site or a run.")]
MOST_AGENTS = 50  # listed where nobody asks for all: those that spent most
MOST_RUNS = 10  # listed: the newest


@app.command()
def show(
    file: File,
    delta: Annotated[
        float | None, typer.Option(help="δ at which ε is stated (that of the run beside the ledger, else 1e-3).")
    ] = None,
    neighbours: Annotated[
        Neighbours | None, typer.Option(help="Neighbouring relation of ε (that of the same run, else add-remove).")
    ] = None,
    cap: Annotated[float | None, typer.Option(help="ε cap: also print what is left of it.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Take δ, relation and cap from this policy.")] = None,
    agent: Annotated[str | None, typer.Option(help="Only this agent.")] = None,
    everyone: Annotated[bool, typer.Option("--all", help="All agents by name, not those that spent most.")] = False,
    entries: Annotated[bool, typer.Option("--entries", help="Print every entry, as one JSON object.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show who spent what and when, ε so far, and with a cap or a policy how much is left.

    For a site's folder the policy is the site's own. Of many agents it lists those that spent most.

    Example: fedspa ledger show runs/my-run --cap 2
    """
    if entries:
        from fedspa.agent.ledger.report import export

        print_json(export(_locate(file)[0]))
        return
    from fedspa.agent.ledger.report import summary
    from fedspa.agent.policy import Policy
    from fedspa.mechanisms.base import relation
    from fedspa.privacy.budget import PrivacyBudget

    given = file
    file, own_policy = _locate(file)
    if cap is None and delta is None and neighbours is None:
        policy = policy or own_policy
    limits: Policy | None = None
    if policy is not None:
        if cap is not None:
            raise ConfigError("--policy and --cap: give one of them; a policy states its own cap")
        limits = Policy.load(policy)
        delta, neighbours = limits.delta, limits.neighbours
    run = _run_beside(given, file)
    if delta is None:
        delta = 1e-3 if run is None else run.delta
    if neighbours is None:
        neighbours = "add-remove" if run is None else relation(run.neighbours, run.sampling)
    most = None if everyone else MOST_AGENTS
    held = None if cap is None else PrivacyBudget(cap, delta, neighbours)
    held = held if limits is None else limits.cap
    whole = summary(file, delta=delta, neighbours=neighbours, cap=held, agent=agent, most=most)
    if as_json:
        _print_json(whole, _warnings(whole))
    else:
        _print(whole, _warnings(whole))


def _locate(path: Path) -> tuple[Path, Path | None]:
    """Return the ledger that `path` is or that its folder has, and the policy of a site's folder."""
    if (path / "site.toml").is_file():
        from fedspa.flower.folders import read_site_folder

        site = read_site_folder(path)
        return site.ledger, site.policy
    if (path / "config.toml").is_file():
        from fedspa.runs.config import load
        from fedspa.runs.rundir import ledger_of

        return ledger_of(path, load(path / "config.toml", own_code=False)), None
    return path, None


def _warnings(summary: LedgerSummary) -> list[str]:
    """List what a reader of this ledger's ε must know."""
    from fedspa.privacy.event import seeded_warning

    found = []
    if (words := seeded_warning(summary.noise)) is not None:
        found.append(words)
    if unrecorded := summary.noise.get("unrecorded", 0):
        found.append(
            f"where the noise of {unrecorded} participations came from was not recorded; if it was seeded, nothing in "
            "it is private"
        )
    return [*found, *map(str, summary.losses)]


def _run_beside(given: Path, file: Path) -> Privacy | None:
    """[privacy] of the run whose folder was given or has the ledger, else of the run with the least δ of those that
    share the ledger beside it: what they stated is then what is shown."""
    from fedspa.runs.config import load
    from fedspa.runs.rundir import ledger_of

    own = (given if given.is_dir() else file.parent) / "config.toml"
    found = []
    for path in [own] if own.is_file() else file.parent.glob("*/config.toml"):
        with suppress(ConfigError):  # it is no run's
            config = load(path, own_code=False)
            if ledger_of(path.parent, config).resolve() == file.resolve():
                found.append(config.privacy)
    return min(found, key=lambda privacy: privacy.delta, default=None)


@app.command()
def verify(file: File, as_json: AsJson = False) -> None:
    """Verify a ledger: its file, its totals, its hash chain, its anchor file. Exit code 1: it is damaged.

    Example: fedspa ledger verify ledger.sqlite
    """
    from fedspa.agent.ledger import report
    from fedspa.agent.ledger.ledger import Ledger, Loss
    from fedspa.privacy.event import seeded_warning

    file, _ = _locate(file)
    noise: dict[str, int] = {}
    losses: list[Loss] = []
    if not (problems := report.verify(file)):
        with Ledger.read(file) as ledger:
            noise, losses = ledger.noise(), ledger.losses()
    notes = [*filter(None, [seeded_warning(noise)]), *map(str, losses)]
    if as_json:
        found = {"file": str(file), "valid": not problems, "problems": problems}
        print_json({**found, "noise": noise, "losses": [asdict(loss) for loss in losses]})
    else:
        _print_verdict(file, problems, notes)
    if problems:
        raise typer.Exit(1)


def _print_verdict(file: Path, problems: list[str], notes: list[str]) -> None:
    from fedspa.agent.ledger.storage import anchor_path
    from fedspa.errors import printable

    whole = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    verdict = f"DAMAGED: {file}, {whole}. No ε of it can be relied on." if problems else f"VALID: {file}"
    if len(problems) == 1 and not anchor_path(file).exists():
        verdict = f"NOT VERIFIED: {file} is a lone copy, which cannot be verified without its anchor file"
    for line in (verdict, *(f"- {each}" for each in (*problems, *notes))):
        print(printable(line))


@app.command(name="accept-loss")
def accept_loss(
    file: File,
    entries: Annotated[int, typer.Option(help="How many entries the ledger holds now, as `verify` says.")],
) -> None:
    """Continue with a ledger that is refused because entries, or its anchor file, are lost for good.

    First look for the newest copy of both files. What the missing entries spent is not counted any more: lower the
    policy's epsilon by as much, or stop using these records. The loss is recorded in the ledger, and `show` and
    `verify` report it from then on.

    Example: fedspa ledger accept-loss ledger.sqlite --entries 60
    """
    from fedspa.agent.ledger import report

    file, _ = _locate(file)
    print(f"{file}: {report.accept_loss(file, entries)}")


def _print_json(summary: LedgerSummary, warnings: list[str]) -> None:
    fields = {name: getattr(summary, name) for name in summary.__slots__}
    fields |= {"losses": [asdict(loss) for loss in summary.losses], "warnings": warnings}
    fields["runs"] = [asdict(run) for run in summary.runs]
    for name in ("epsilon_least", "epsilon_most"):
        fields[name] = _finite(fields[name])
    print_json({**fields, "agents": list(map(_plain_agent, summary.agents))})


def _plain_agent(agent: AgentSummary) -> dict[str, Any]:
    """Events are keys in a summary; JSON's keys are texts, so they become a list."""
    spent = [{"event": event.fields(), "participations": count} for event, count in agent.spent.items()]
    fields = {name: getattr(agent, name) for name in agent.__slots__}
    return {
        **fields,
        "epsilon": _finite(agent.epsilon),
        "epsilon_worst_case": _finite(agent.epsilon_worst_case),
        "unit": agent.last_event.unit,
        "runs": [asdict(run) for run in agent.runs],
        "spent": spent,
        "last_event": agent.last_event.fields(),
        "cap": None if agent.cap is None else asdict(agent.cap),
    }


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None  # JSON has no infinity


_COLUMNS = ("agent", "unit", "runs", "rounds", "sent", "last (UTC)", "ε", "ε\nleft", "rounds\nleft")


def _cells(agent: AgentSummary) -> list[str]:
    from fedspa.privacy.event import shown, shown_left

    return [
        agent.agent,
        agent.last_event.unit,
        str(len(agent.runs)),
        str(sum(run.participations for run in agent.runs)),
        str(sum(run.released for run in agent.runs)),
        agent.runs[-1].last_at[:16].replace("T", " "),
        shown(agent.epsilon)
        + (f" (worst case {shown(agent.epsilon_worst_case)})" if any(event.members for event in agent.spent) else "")
        + (" SEEDED" if agent.noise.get("seeded") else ""),
        "–" if agent.epsilon_left is None else shown_left(agent.epsilon_left, 0.0),
        "–" if agent.participations_left is None else str(agent.participations_left),
    ]


def _print(summary: LedgerSummary, warnings: list[str]) -> None:
    from fedspa.agent.ledger.report import short
    from fedspa.privacy.budget import AGAINST_ALL
    from fedspa.privacy.event import shown

    agents = summary.agents
    show_table(_COLUMNS, map(_cells, agents))
    if summary.known_agents > len(agents):
        hidden = summary.known_agents - len(agents)
        least = shown(summary.epsilon_least)
        print(f"… and {hidden:,} more agents that spent less, ε from {least} (--all lists them, --agent shows one)")
    for event in dict.fromkeys(agent.last_event for agent in agents[:MOST_AGENTS]):
        print(f"last event: {event}")
    if len(summary.runs) > MOST_RUNS:
        print(f"… {len(summary.runs) - MOST_RUNS} earlier runs (--json has them)")
    for run in summary.runs[-MOST_RUNS:]:  # those of a guard begin with the tool that spent (docs/guard.md)
        by = f" by {run.agents} agents" * (run.agents > 1)
        print(f"run {short(run.run)}: {run.participations} rounds{by}, {run.first_at[:16]} to {run.last_at[:16]}")
    print(f"{summary.entries} entries, {summary.releases} released, head {summary.head[:16]}")
    if agents:
        first = agents[0]
        units = " or ".join(dict.fromkeys(agent.last_event.unit for agent in agents))
        by = " or ".join(dict.fromkeys(agent.accountant for agent in agents))
        print(f"ε for each {units} at δ = {first.delta:g}, {first.neighbours}, accountant {by}")
        cap, left = first.cap, "give --cap or --policy"
        if cap is not None:
            left = f"under a cap of ε = {cap.epsilon:g}, and how many more rounds like the agent's last one fit"
        print(f"left: {left}")
        if any(event.members for agent in agents for event in agent.spent):
            held = "; a cap that allows no aggregation is held against the worst case"
            print(
                "where a worst case stands beside it, ε is against the server with up to the colluding agents of each "
                f"run, and the worst case {AGAINST_ALL}{held * (cap is not None and cap.worst_case is None)}"
            )
    show_facts([("Note", warning) for warning in warnings])
