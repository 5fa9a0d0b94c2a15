"""What a report says, as plain values: the template only places them. Hostile names and values are escaped there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from fedspa.agent.ledger.report import short
from fedspa.data.columns import checked
from fedspa.errors import FedspaError
from fedspa.privacy.budget import AGAINST_ALL, total
from fedspa.privacy.event import shown
from fedspa.report import charts
from fedspa.report.charts import Figure
from fedspa.report.record import Promise, RunRecord, promise
from fedspa.runs.config import Config
from fedspa.runs.defaults import chosen
from fedspa.runs.guarantee import (
    NO_PROMISE,
    describe_guarantee,
    is_seeded,
    noise_kind,
    observer,
    protected,
    shown_bytes,
    warnings,
)
from fedspa.runs.halving import settled
from fedspa.runs.rundir import AGENTS_SCORE, heading, label, shown_score
from fedspa.wire.payload import HEADER_BYTES

if TYPE_CHECKING:
    from fedspa.analytics.estimates import Estimate

Cell = tuple[str, str]
MOST_NAMES = 30  # of agents, in a line
MOST_RUNS = 50  # of a ledger that are listed, the latest
_SEEDED = "FOR SIMULATIONS ONLY: follows from run.seed"


@dataclass(frozen=True, slots=True)
class Card:
    label: str
    value: str
    detail: str
    bad: bool = False


@dataclass(frozen=True, slots=True)
class Numbers:
    """Released numbers: the headlines (name, value, interval), and a table for each site: its name, header and rows."""

    headlines: list[tuple[str, str, str]]
    tables: list[tuple[str, list[str], list[list[str]]]]


@dataclass(frozen=True, slots=True)
class Search:
    """The search for settings within a run, as tables with their headers; `spent`, `free` and `test` are sentences."""

    header: list[str]
    trials: list[list[str]]
    spent: str
    free: str
    test: str


@dataclass(frozen=True, slots=True)
class RunParts:
    """All that stands on a run's page, its model card and its annex."""

    name: str
    subtitle: str
    simulated: bool
    warnings: list[str]
    problems: list[str]
    cards: list[Card]
    statement: list[Cell]
    figures: list[Figure]
    agents: Figure | None
    ledger_note: str
    numbers: Numbers | None
    by_class: tuple[list[str], list[list[str]]] | None
    search: Search | None
    plan: list[tuple[str, str, str]]
    chosen: list[tuple[str, str, str]]
    trained: list[Cell]
    config: list[tuple[str, list[Cell]]]
    approval: list[Cell]
    history: list[list[str]]
    protected: str
    columns: list[list[str]]
    parties: list[Cell]


def describe(run: RunRecord) -> RunParts:
    """Return what there is to say of a run."""
    run = replace(run, config=chosen_config(run.config, run.summary))
    held = promise(run)
    found = None if run.released is None else numbers(run.released)
    evaluated = None if run.evaluation is None else numbers(run.evaluation[1])
    return RunParts(
        name=run.name,
        subtitle=_subtitle(run),
        simulated=held is not None and is_seeded(held.facts),
        warnings=warnings(run.config) if run.summary is None else [str(line) for line in run.summary["warnings"]],
        problems=_problems(run, held),
        cards=[*_cards(run, held, found), *_evaluation_cards(run, evaluated)],
        statement=_statement(run, held),
        figures=charts.rounds(run, held),
        agents=charts.agents(run, held),
        ledger_note=_ledger_note(run),
        numbers=found or evaluated,
        by_class=_by_class(run),
        search=search(run),
        plan=_plan(run, held),
        chosen=chosen(run.config),
        trained=_trained(run),
        config=[
            (section, [(key, _shown_value(value)) for key, value in values.items()])
            for section, values in run.config.model_dump(exclude_none=True).items()
        ],
        approval=_approval(run, held),
        history=_history(run),
        protected="person, with all records that an agent holds of them," if run.config.data.person else "record",
        columns=_columns(run),
        parties=_parties(run),
    )


def _approval(run: RunRecord, held: Promise | None) -> list[Cell]:
    """Return what is signed: what the run's files know, and lines to fill in."""
    config = run.config
    times = [entry.reserved_at for entry in run.participations.entries if entry.reserved_at]
    used = " to ".join(_time(moment(times)) for moment in (min, max)) + " UTC" if times else "–"
    schema = config.data.schema_of_table
    guarantee = _guarantee_card(run, held)
    return [
        ("Purpose", ""),
        ("Controller", ""),
        ("Learned", ", ".join(schema.targets) if schema else f"{config.task.name} on {config.data.name}"),
        ("Agents", _listed_agents(run)),
        (guarantee.label, f"{guarantee.value} ({guarantee.detail})" if guarantee.detail else guarantee.value),
        ("ε was set by", ""),
        ("Records were used", used),
    ]


def _listed_agents(run: RunRecord) -> str:
    more = f" and {len(run.agents) - MOST_NAMES:,} more" * (len(run.agents) > MOST_NAMES)
    return ", ".join(run.agents[:MOST_NAMES]) + more


def _parties(run: RunRecord) -> list[Cell]:
    """Return who receives what."""
    sums = run.config.privacy.adversary == "secure-aggregation"
    seen = "sums of masked updates over all agents of a round" if sums else "each agent's noisy update"
    _, uploads, each = run.sent
    return [
        (_listed_agents(run), "the model of each round; its own records stay with it"),
        ("server", f"{seen}: {uploads:,} in all, {shown_bytes(each)} each; and its own held-out records"),
        ("anyone who gets the model", "its parameters, which the same guarantee covers"),
    ]


def _columns(run: RunRecord) -> list[list[str]]:
    """Return what the columns of the run's table are."""
    found, table = [], run.config.data.table
    for name, column in {} if table is None else table.columns.items():
        values = "yes or no" if column.kind == "flag" else ", ".join(getattr(column, "categories", ()))
        if ends := getattr(column, "range", None):
            values = " to ".join(_shown_value(end) for end in ends)
        use = "learned" if getattr(column, "target", False) else "left out" if column.kind == "ignore" else "input"
        found.append([name, column.kind, values or "–", use])
    return found


def _subtitle(run: RunRecord) -> str:
    config = run.config
    size = "" if run.dimension is None else f", {run.dimension:,} parameters"
    times = [entry.reserved_at for entry in run.participations.entries if entry.reserved_at]
    span = dict.fromkeys(_time(moment(times))[:16] for moment in (min, max)) if times else {}
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
    return [f"this run is not finished: {done} are done{whole}", *run.problems]


def _cards(run: RunRecord, held: Promise | None, found: Numbers | None) -> list[Card]:
    cards = [_guarantee_card(run, held)]
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


_HEADLINES = ("auc", "accuracy", "mean absolute error")  # the first one that there is goes on a card
_NOT_LISTED = ("count in ", "count of ", "predicted", "frequency")  # details, which the release's JSON has


def numbers(estimates: Sequence[Estimate]) -> Numbers:
    """Arrange released numbers for a page."""

    def named(statistic: str) -> str:
        return "AUC" if statistic == "auc" else statistic[:1].upper() + statistic[1:]

    whole = [each for each in estimates if not each.site]
    by_class = len({each.group for each in whole}) > 1
    score = next((name for name in _HEADLINES if name in {each.statistic for each in whole}), None)
    headlines = [
        (named(each.statistic), *each.shown)
        for each in whole
        if (each.column == "" and each.statistic in ("records", "persons") and not by_class) or each.statistic == score
    ]
    header = [*["Class"] * by_class, "", "Statistic", "Value", "95 % interval"]
    tables = []
    for site, found in groupby(estimates, lambda each: each.site):
        rows = [
            [*[each.group] * by_class, each.column, named(each.statistic), *each.shown]
            for each in found
            if not each.statistic.startswith(_NOT_LISTED)
        ]
        tables.append((site or "All agents", header, rows))
    return Numbers(headlines, tables)


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


def _kept_together(text: str) -> str:
    """A line never ends between a symbol and its value."""
    return text.replace(" = ", "\u00a0=\u00a0")


def _upload_card(run: RunRecord) -> Card:
    sent, uploads, each = run.sent
    against = ""
    if run.dimension is not None and each and run.config.private:
        whole = _fedavg_upload(run.dimension)
        against = f"; FedAvg sends {shown_bytes(whole)}, {whole / each:,.1f} times as much"
    return Card("An upload", shown_bytes(each), f"{shown_bytes(sent)} in {uploads:,} uploads{against}")


def _statement(run: RunRecord, held: Promise | None) -> list[Cell]:
    if held is None:
        why = NO_PROMISE if not run.config.private else "Too little of this run is left to state a guarantee."
        return [("Nothing is promised.", why)]
    words = describe_guarantee(held.facts, run.config.federation.agents)
    return [(head, _kept_together(text)) for head, text in words]


def _time(text: str | None) -> str:
    return "–" if not text else text[:19].replace("T", " ")


def _ledger_note(run: RunRecord) -> str:
    count = len(run.participations.entries)
    if run.participations.source == "ledger":
        state = "hash chain verified" if run.participations.verified else "HASH CHAIN BROKEN"
        whose = f", of {run.participations.runs + 1} runs of these agents" if run.participations.runs else ""
        return (
            f"{count:,} entries of this run; the ledger{whose}: {state}, head {run.participations.head[:16]}. "
            "`fedspa ledger show --entries` prints them all."
        )
    if run.participations.source == "asked":
        return (
            f"{count:,} requests to agents. Each agent keeps its own ledger; the server knows only whom it asked in "
            "which round, an upper bound on what each spent."
        )
    return ""


def _history(run: RunRecord) -> list[list[str]]:
    """Return a row for each run in the ledger, where there are others than this one."""
    found = run.participations
    if not found.runs:
        return []
    return [
        [
            f"{short(each.run)}{' (this run)' * (each.run == found.run)}",
            f"{each.agents:,}",
            f"{each.participations:,}",
            _time(each.first_at),
            _time(each.last_at),
        ]
        for each in found.history[-MOST_RUNS:]
    ]


def _plan(run: RunRecord, held: Promise | None) -> list[tuple[str, str, str]]:
    """Symbol or name, value, meaning."""
    plan = held.plan if held is not None else None
    if plan is None or held is None:
        return []
    own = "" if plan.aggregation is None else ", the agent's own share"
    if held.active is None:
        kind, sigma = [("k", "–", "active coordinates, by algorithm.compression: known when the run is done")], []
    else:
        kind = plan.report_rows()
        sigma = [("σ", f"{plan.sigma:.4g}", f"noise on each coordinate of the mean gradient{own}")]
    clip = "each coordinate to ±c" if plan.clip == "coordinate" else "norm to C"
    return [
        ("d", f"{plan.dimension:,}", "parameters of the model"),
        *kind,
        ("B", f"{plan.batch}", f"batch of a local step ({plan.sampling} sampling; B is its public divisor)"),
        ("m", f"{plan.records}", f"fewest {plan.unit}s that an agent holds, a public number"),
        ("q", f"{plan.event.rate:.4g}", f"chance that a {plan.unit} takes part in a step, B/m"),
        ("τ", f"{plan.local_steps}", "local steps in a round"),
        ("I", f"{plan.participations}", "most rounds that an agent takes part in"),
        ("clip", f"{plan.clip_value:g}", f"{plan.clip}, {clip}"),
        (
            "z",
            f"{plan.noise_multiplier:.4g}",
            f"noise multiplier: noise on that sum over the bound of one example{own}",
        ),
        *sigma,
        ("noise", held.facts["noise"], noise_kind(held.facts) or _SEEDED),
        ("gradients", _arithmetic(run), "how they are computed; clipping and noise come after, in full precision"),
        ("δ", f"{plan.delta:g}", "of the guarantee"),
        ("neighbours", plan.neighbours, "neighbouring relation"),
        ("unit", plan.unit, "what is protected, and what an example is"),
    ]


def _by_class(run: RunRecord) -> tuple[list[str], list[list[str]]] | None:
    """Return header and row: the last model's accuracy on the server's records of each class."""
    found = None if run.summary is None else run.summary["accuracy_by_class"]
    if run.summary is None or found is None:
        return None
    schema = run.summary["schema"]
    names = None if schema is None else checked(schema).class_names
    if names is None or len(names) != len(found):
        names = tuple(map(str, range(len(found))))
    return ["class", *names], [["accuracy", *("–" if value is None else f"{value:.1%}" for value in found)]]


def _trained(run: RunRecord) -> list[tuple[str, str]]:
    """Return what the finished run recorded of its data, module and versions."""
    if run.summary is None:
        return []
    rows = [(str(key), str(value)) for key, value in run.summary["provenance"].items()]
    rows.append(("why this engine", run.summary["engine_reason"]))
    rows += [("faster", hint) for hint in run.summary["engine_hints"]]
    return [*rows, ("workers", str(run.summary["workers"]))] if run.summary["workers"] else rows


def _arithmetic(run: RunRecord) -> str:
    if run.summary is None:
        return "–"
    return "float32, matrix products in TF32" if run.summary["tf32"] else "float32"


def _shown_value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def chosen_config(config: Config, summary: Mapping[str, Any] | None) -> Config:
    """Return the config with the settings that the search chose: the model was trained with them."""
    tuning = None if summary is None else summary.get("tuning")
    if config.tuning.candidates is None or tuning is None:
        return config
    return settled(config, config.tuning.candidates[tuning["choice"]]).model_copy(update={"tuning": config.tuning})


def search(run: RunRecord) -> Search | None:
    """Return what was tried, what it cost and what was chosen; None without trials, or if the run is not finished."""
    found = None if run.summary is None else run.summary.get("tuning")
    if found is None:
        return None
    by_agents = found["scored_by"] == "agents"
    name = AGENTS_SCORE if by_agents else run.headline
    rows = []
    for number, trial in enumerate(found["trials"]):
        values = trial["scores"] if by_agents else [run.scores[t] for t in trial["rounds"]]
        scores = " → ".join(shown_score(name, score) for score in values) or "–"
        mark = "chosen" if number == found["choice"] else f"trial {number + 1}"
        rows.append([mark, format_settings(trial["settings"]), *_rounds(trial["rounds"]), scores, _uploads(run, trial)])
    scoring = found["scoring"]
    if scoring["rounds"]:
        noise = " → ".join("–" if each is None else f"± {each:.2%}" for each in scoring["deviation"])
        words = "agents score the remaining candidates; each score has noise of this deviation"
        rows.append(["scores", words, *_rounds(scoring["rounds"]), noise or "–", _uploads(run, scoring)])
    taken = sum(len(part["rounds"]) for part in (*found["trials"], scoring))
    tested = (found.get("test") or {}).get(run.headline)  # `fedspa tune` adds the test set and its proxy runs
    test = f"{heading(run.headline)} on the test set (not used for selection): {shown_score(run.headline, tested)}."
    return Search(
        ["", "Settings", "Rounds", f"{heading(name)} after each", "Uploads"],
        rows,
        _spent(run, taken),
        _proxies(found.get("proxy")),
        "" if tested is None else test,
    )


def _rounds(rounds: Sequence[int]) -> list[str]:
    return [", ".join(str(t + 1) for t in rounds)]


def _uploads(run: RunRecord, part: Mapping[str, Any]) -> str:
    return str(sum(run.metrics[t].agents for t in part["rounds"]))


def _spent(run: RunRecord, taken: int) -> str:
    words = f"The search took {taken} of {len(run.metrics)} rounds."
    after, end = (run.metrics[t].epsilon if taken else None for t in (taken - 1, -1))
    if after is not None and end is not None:
        caveat = "" if run.metrics[-1].private else " (no guarantee: see the top)"
        words += (
            f" After it the agent that spent most stood at ε = {shown(after)}, and at the end at {shown(end)}{caveat}, "
            "trials included: each was in the ledger before it ran."
        )
    return words + " The chosen model continued from the state that its trial had reached."


def _proxies(found: Sequence[Mapping[str, Any]] | None) -> str:
    """Say where settings came from that cost nothing in this run."""
    if not found:
        return "No settings were tried in proxy runs."
    diverged = sum(each["score"] is None for each in found)
    return (
        f"{len(found)} settings were tried in proxy runs on the server's held-out records, which belong to no agent, "
        f"under the noise of this run, at no privacy cost (proxy.json has them). {diverged} diverged."
    )


def format_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.partition('.')[2]} {value}" for key, value in settings.items()) or "the config's own"


def _fedavg_upload(dimension: int) -> int:
    """Return the bytes of one FedAvg upload of the same model: every coordinate in float32, and the same header."""
    return HEADER_BYTES + 4 * dimension
