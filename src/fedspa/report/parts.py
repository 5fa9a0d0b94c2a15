"""What a report says, as plain values: the template only places them. Hostile names and values are escaped there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from fedspa.errors import FedspaError
from fedspa.privacy.budget import AGAINST_ALL, total
from fedspa.privacy.event import shown
from fedspa.report import charts, tables
from fedspa.report.charts import Figure
from fedspa.report.record import Promise, RunRecord, promise
from fedspa.runs.defaults import chosen
from fedspa.runs.guarantee import NO_PROMISE, describe_guarantee, is_seeded, observer, protected, shown_bytes, warnings
from fedspa.runs.rundir import heading, label, read_ending, shown_score

if TYPE_CHECKING:
    from fedspa.report.numbers import Numbers

Cell = tuple[str, str]
MOST_NAMES = 30  # of agents, in a line


@dataclass(frozen=True, slots=True)
class Card:
    label: str
    value: str
    detail: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class RunParts:
    """One run."""

    number: int
    name: str
    subtitle: str
    warnings: list[str]
    problems: list[str]
    cards: list[Card]
    statement: list[Cell]
    epsilons: list[list[str]]
    agents: Figure | None
    ledger_note: str
    numbers: Numbers | None
    by_class: tuple[list[str], list[list[str]]] | None
    search: tables.Search | None
    plan: list[tuple[str, str, str]]
    chosen: list[tuple[str, str, str]]
    trained: list[Cell]
    config: list[tuple[str, list[Cell]]]
    approval: list[Cell]
    history: list[list[str]]


@dataclass(frozen=True, slots=True)
class PageParts:
    title: str
    runs: list[RunParts]
    figures: list[Figure]
    simulated: bool
    score: str
    comparison: list[list[str]]
    differences: list[list[str]]


def page(runs: Sequence[RunRecord]) -> PageParts:
    """Return the report of one run, or of several beside each other."""
    runs = [replace(run, config=tables.chosen_config(run.config, run.summary)) for run in runs]
    promises = [promise(run) for run in runs]
    names = _distinct([run.name for run in runs])
    views = [_run(run, held, name, i) for i, (run, held, name) in enumerate(zip(runs, promises, names))]
    spent = charts.epsilon(runs[0], promises[0]) if len(runs) == 1 else charts.largest_epsilon(runs, names)
    of = [number for number, run in enumerate(runs) if run.released is None]  # a release has no rounds to follow
    figures: list[Figure | None] = []
    if of:
        shown_runs, shown_names = [runs[number] for number in of], [names[number] for number in of]
        figures = [*charts.scores(shown_runs, shown_names), charts.loss(shown_runs, shown_names), spent]
        figures.append(charts.uploads(shown_runs, shown_names))
    several, judged = len(runs) > 1, {run.headline for run in runs}
    score = judged.pop() if len(judged) == 1 else None
    return PageParts(
        title=f"{len(runs)} runs compared" if several else names[0],
        runs=views,
        figures=[figure for figure in figures if figure is not None],
        simulated=any(held is not None and is_seeded(held.facts) for held in promises),
        score="Score" if score is None else heading(score),
        comparison=[tables.comparison_row(run, held, name, score) for run, held, name in zip(runs, promises, names)]
        if several
        else [],
        differences=tables.differences(runs) if several else [],
    )


def _run(run: RunRecord, held: Promise | None, name: str, number: int) -> RunParts:
    found = evaluated = None
    if run.released is not None or run.evaluation is not None:
        from fedspa.report.numbers import numbers  # whose estimates come from tensors

        found = None if run.released is None else numbers(run.released)
        evaluated = None if run.evaluation is None else numbers(run.evaluation[1])
    return RunParts(
        number=number,
        name=name,
        subtitle=_subtitle(run),
        warnings=warnings(run.config) if run.summary is None else [str(line) for line in run.summary["warnings"]],
        problems=_problems(run, held),
        cards=[*_cards(run, held, found), *_evaluation_cards(run, evaluated)],
        statement=_statement(run, held),
        epsilons=tables.epsilons(held),
        agents=charts.agents(run, held, number),
        ledger_note=tables.ledger_note(run),
        numbers=found or evaluated,
        by_class=tables.by_class(run),
        search=tables.search(run),
        plan=tables.plan_table(run, held),
        chosen=chosen(run.config),
        trained=tables.trained(run),
        config=[
            (section, [(key, tables.shown_value(value)) for key, value in values.items()])
            for section, values in run.config.model_dump(exclude_none=True).items()
        ],
        approval=_approval(run, held),
        history=tables.history(run),
    )


def _approval(run: RunRecord, held: Promise | None) -> list[Cell]:
    """Return what is signed: what the run's files know, and lines to fill in."""
    config = run.config
    times = [entry.reserved_at for entry in run.participations.entries if entry.reserved_at]
    used = " to ".join(tables.time(moment(times)) for moment in (min, max)) + " UTC" if times else "–"
    agents = run.agents
    listed = ", ".join(agents[:MOST_NAMES]) + (f" and {len(agents) - MOST_NAMES:,} more" * (len(agents) > MOST_NAMES))
    schema = config.data.schema_of_table
    guarantee = _guarantee_card(run, held)
    return [
        ("Purpose", ""),
        ("Controller", ""),
        ("Learned", ", ".join(schema.targets) if schema else f"{config.task.name} on {config.data.name}"),
        ("Agents", listed),
        (guarantee.label, f"{guarantee.value} ({guarantee.detail})" if guarantee.detail else guarantee.value),
        ("ε was set by", ""),
        ("Records were used", used),
    ]


def _distinct(names: list[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _subtitle(run: RunRecord) -> str:
    config = run.config
    size = "" if run.dimension is None else f", {run.dimension:,} parameters"
    times = [entry.reserved_at for entry in run.participations.entries if entry.reserved_at]
    span = dict.fromkeys(tables.time(moment(times))[:16] for moment in (min, max)) if times else {}
    when = f"; {' to '.join(span)} UTC" if span else ""
    task = "" if config.task.name == "classification" else f", task {config.task.name}"
    return (
        f"{config.algorithm.name} on {config.data.name}{task}, model {config.model.name}{size}; "
        f"{config.federation.agents} agents, {config.federation.per_round} a round{when}"
    )


def _problems(run: RunRecord, held: Promise | None) -> list[str]:
    if run.finished:
        return run.problems
    # The accountant was given the plan's length in advance; stopping because of a release is another plan.
    whole = ""
    if held is not None and held.epsilon_cap is not None:
        whole = f"; if it is ended here because of its results, ε of the whole plan holds: {shown(held.epsilon_cap)}"
    done = f"{len(run.metrics)} of {run.config.federation.rounds} rounds"
    how, why = read_ending(run.folder) or ("", "")
    ended = {"": "", "stopped": "; it was stopped", "failed": f"; it failed: {why}"}[how]
    return [f"this run is not finished: {done} are done{ended}{whole}", *run.problems]


def _cards(run: RunRecord, held: Promise | None, found: Numbers | None) -> list[Card]:
    cards = [_guarantee_card(run, held), *_audit_card(run)]
    if found is not None:
        cards += [Card(name, value, f"95 % interval {ends}, all agents") for name, value, ends in found.headlines]
        return [*cards, _upload_card(run)]
    if run.metrics:
        cards += [_score_card(run), _upload_card(run)]
    federation, took = run.config.federation, ""
    if run.summary is not None:
        took = f"; {run.summary['seconds']:,.0f} s, engine {run.summary['engine']}"
    cohort = f"{federation.agents} agents, {federation.per_round} a round{took}"
    return [*cards, Card("Rounds", f"{len(run.metrics)} of {federation.rounds}", cohort)]


def _evaluation_cards(run: RunRecord, found: Numbers | None) -> list[Card]:
    if found is None or run.evaluation is None:
        return []
    kept = f"on what the agents kept out of training, released at ε = {shown(run.evaluation[0])}"
    return [
        Card(f"{name} at the agents", value, _kept_together(f"95 % interval {ends}, all agents; {kept}"))
        for name, value, ends in found.headlines
    ]


def _score_card(run: RunRecord) -> Card:
    name, last, best = run.headline, run.metrics[-1], run.best
    detail = f"after round {len(run.metrics)}, on the server's held-out records"
    if best is not None:
        detail += f"; best {shown_score(name, run.scores[best])} in round {best + 1}"
    if run.summary is not None and run.summary["baseline_answer"] is not None:
        without = shown_score(name, run.summary["baseline"])
        detail += f"; without a model {without}, by {run.summary['baseline_answer']} of those records"
    others = [f"{label(other)} {shown_score(other, value)}" for other, value in last.scores.items() if other != name]
    return Card(
        heading(name),
        shown_score(name, run.scores[-1]),
        "; ".join([detail, *([", ".join(others)] if others else [])]),
    )


def _guarantee_card(run: RunRecord, held: Promise | None) -> Card:
    if held is None:
        if run.config.private:
            return Card("Guarantee", "unknown", "", True)
        return Card("Guarantee", "none", "no differential privacy", True)
    facts = held.facts
    if facts["epsilon"] is None:
        return Card("Guarantee", "none", "a simulation whose noise is too small for any ε", True)
    terms = (
        f"δ = {facts['delta']:g}, {facts['neighbours']}, {facts['sampling']} sampling, accountant {facts['accountant']}"
    )
    if facts["neighbours"] != "replace-one":
        terms += f"; ε = {shown(facts['epsilon_replace_one'])} under replace-one"
    if facts["members"]:
        terms += f"; against {observer(facts)}; worst-case ε = {shown(facts['epsilon_worst_case'])} {AGAINST_ALL}"
    if is_seeded(facts):
        detail = f"THE NOISE WAS SEEDED: nothing is private. With secure noise ε = {shown(facts['epsilon'])}, {terms}"
        return Card("Guarantee", "none: a simulation", detail, True)
    if not facts["private"]:
        return Card("Guarantee", "not private", f"not a guarantee: ε = {shown(facts['epsilon'])}, {terms}", True)
    if others := run.participations.runs:
        whole = "no ε can be stated" if facts["epsilon_total"] is None else f"ε = {shown(facts['epsilon_total'])}"
        by_agent = _totals_by_agent(run, facts)
        terms = f"with {others} other run{'s' * (others > 1)} in the ledger {whole} in total so far{by_agent}; {terms}"
    so_far = "" if run.finished else " so far"
    return Card(
        f"Guarantee{so_far} for each {protected(facts)}", f"ε = {shown(facts['epsilon'])}", _kept_together(terms)
    )


def _totals_by_agent(run: RunRecord, facts: Mapping[str, Any]) -> str:
    """Return what each agent with a name of its own spent in all its runs."""
    known: dict[object, float] = {}
    found, spent = [], run.participations.spent
    try:
        for agent, (events, first) in islice(spent.items(), MOST_NAMES):
            key = frozenset(events.items()), first
            if key not in known:
                known[key] = total(events, facts["delta"], facts["neighbours"], first).epsilon
            found.append(f"{agent} {shown(known[key])}")
    except FedspaError:  # the total of all says why there is none
        return ""
    more = f" and {len(spent) - MOST_NAMES:,} more" * (len(spent) > MOST_NAMES)
    return f" ({', '.join(found)}{more})" if found else ""


def _audit_card(run: RunRecord) -> list[Card]:
    if run.audit is None:
        return []
    value = "holds" if run.audit["holds"] else "VIOLATED"
    detail = (
        f"{run.audit['check']}: at least {run.audit['lower_bound']:.4g} seen, {run.audit['claimed']:.4g} claimed "
        f"({run.audit['unit']}); chance of a false alarm at most {run.audit['false_alarm']:g}"
    )
    return [Card("Audit of this run's mechanism", value, detail, not run.audit["holds"])]


def _kept_together(text: str) -> str:
    """A line never ends between a symbol and its value."""
    return text.replace(" = ", "\u00a0=\u00a0")


def _upload_card(run: RunRecord) -> Card:
    sent, uploads, each = run.sent
    against = ""
    if run.dimension is not None and each and run.config.private:
        whole = charts.fedavg_upload(run.dimension)
        against = f"; FedAvg sends {shown_bytes(whole)}, {whole / each:,.1f} times as much"
    return Card("An upload", shown_bytes(each), f"{shown_bytes(sent)} in {uploads:,} uploads{against}")


def _statement(run: RunRecord, held: Promise | None) -> list[Cell]:
    if held is None:
        why = NO_PROMISE if not run.config.private else "Too little of this run is left to state a guarantee."
        return [("Nothing is promised.", why)]
    words = describe_guarantee(held.facts, run.config.federation.agents)
    return [(head, _kept_together(text)) for head, text in words]
