"""Tables of a report: ε by relation, the plan, ledger lines, the search for settings, and runs compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedspa.agent.ledger.report import short
from fedspa.data.columns import checked
from fedspa.privacy.budget import AGAINST_ALL
from fedspa.privacy.event import shown
from fedspa.report import charts
from fedspa.report.record import Promise, RunRecord
from fedspa.runs.config import Config, flat
from fedspa.runs.guarantee import ALL_RUNS, is_seeded, noise_kind, observer, protected, shown_bytes
from fedspa.runs.halving import settled
from fedspa.runs.rundir import AGENTS_SCORE, LOWER, heading, label, shown_score

MOST_RUNS = 50  # of a ledger that are listed, the latest
MAX_PROXIES = 12  # proxy runs that are listed, of the best
_SEEDED = "FOR SIMULATIONS ONLY: follows from run.seed"


def epsilons(held: Promise | None) -> list[list[str]]:
    """ε of the agent that spent most, by every relation that is stated: what, its ε, and the terms that ε means nothing
    without."""
    if held is None:
        return []
    facts = held.facts
    flaw = "" if facts["private"] else "not a guarantee: see above"
    if is_seeded(facts):
        flaw = "A SIMULATION, the noise was seeded: not a guarantee"
    terms = facts["neighbours"], facts["sampling"]
    whom = f", against the server with up to {facts['colluders']} colluding" if facts["members"] else ""
    rows = [["verified", charts.known(facts["epsilon"]), *terms, facts["accountant"], flaw or f"the guarantee{whom}"]]
    if facts["members"]:
        worst = shown(facts["epsilon_worst_case"])
        rows.append(["worst case", worst, *terms, facts["accountant"], "; ".join(filter(None, (AGAINST_ALL, flaw)))])
    if facts["neighbours"] != "replace-one":
        rows.append(["verified", shown(facts["epsilon_replace_one"]), "replace-one", facts["sampling"], "pld", flaw])
    if facts["epsilon_total"] is not None:
        total = shown(facts["epsilon_total"])
        note = "; ".join(filter(None, (f"{ALL_RUNS}, against the server", flaw)))
        rows.append(["verified", total, *terms, facts["accountant_total"] or "–", note])
        if facts["members"] or facts["epsilon_total_worst_case"] is not None:
            total, note = shown(facts["epsilon_total_worst_case"]), f"{ALL_RUNS}, {AGAINST_ALL}"
            rows.append(["worst case", total, *terms, facts["accountant_total"] or "–", note])
    return rows


def time(text: str | None) -> str:
    return "–" if not text else text[:19].replace("T", " ")


def ledger_note(run: RunRecord) -> str:
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


def history(run: RunRecord) -> list[list[str]]:
    """Return a row for each run in the ledger, where there are others than this one."""
    found = run.participations
    if not found.runs:
        return []
    return [
        [
            f"{short(each.run)}{' (this run)' * (each.run == found.run)}",
            f"{each.agents:,}",
            f"{each.participations:,}",
            time(each.first_at),
            time(each.last_at),
        ]
        for each in found.history[-MOST_RUNS:]
    ]


def plan_table(run: RunRecord, held: Promise | None) -> list[tuple[str, str, str]]:
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


def by_class(run: RunRecord) -> tuple[list[str], list[list[str]]] | None:
    """Return header and row: the last model's accuracy on the server's records of each class."""
    found = None if run.summary is None else run.summary["accuracy_by_class"]
    if run.summary is None or found is None:
        return None
    schema = run.summary["schema"]
    names = None if schema is None else checked(schema).class_names
    if names is None or len(names) != len(found):
        names = tuple(map(str, range(len(found))))
    return ["class", *names], [["accuracy", *("–" if value is None else f"{value:.1%}" for value in found)]]


def trained(run: RunRecord) -> list[tuple[str, str]]:
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


def comparison_row(run: RunRecord, held: Promise | None, name: str, score: str | None) -> list[str]:
    """`score` is the one of all the runs; where they have several, each is named."""
    facts = held.facts if held is not None else None
    guarantee = "–" if run.config.private else "none"
    terms = "–"
    if facts is not None:
        guarantee = "none" if facts["epsilon"] is None else shown(facts["epsilon"])
        guarantee += f", worst case {shown(facts['epsilon_worst_case'])}" if facts["members"] else ""
        guarantee += "" if facts["private"] else " NOT PRIVATE: SEEDED NOISE" if is_seeded(facts) else " NOT PRIVATE"
        terms = f"for each {protected(facts)}, δ = {facts['delta']:g}, {facts['neighbours']}, "
        terms += f"{facts['sampling']}, {facts['accountant']}"
        terms += f", against {observer(facts)}" if facts["members"] else ""
    (_, _, each), best = run.sent, run.best
    fewer = "–" if run.dimension is None or not each else f"{charts.fedavg_upload(run.dimension) / each:,.1f}"
    return [
        name,
        run.config.algorithm.name,
        _score(run, -1 if run.metrics else None, named=score is None),
        _score(run, best, named=score is None),
        guarantee,
        terms,
        charts.known(None if facts is None else facts["epsilon_replace_one"]),
        shown_bytes(each) if each else "–",
        fewer,
        str(len(run.metrics)),
    ]


def _score(run: RunRecord, line: int | None, *, named: bool) -> str:
    value = None if line is None else shown_score(run.headline, run.scores[line])
    return "–" if value is None else f"{label(run.headline)} {value}" if named else value


def differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Config keys in which the runs are not the same, with each run's value."""
    configs = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.out")
    rows = [[key, *(shown_value(config.get(key)) for config in configs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def shown_value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Search:
    """The search for settings within a run, as tables with their headers; `spent`, `free` and `test` are sentences."""

    header: list[str]
    trials: list[list[str]]
    spent: str
    proxies: list[list[str]]
    free: str
    test: str


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
        *_proxies(found.get("proxy"), run.headline),
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


def _proxies(found: Sequence[Mapping[str, Any]] | None, name: str) -> tuple[list[list[str]], str]:
    """Return the best proxy runs, and where settings came from that cost nothing in this run."""
    rows: list[list[str]] = []
    words = "No settings were tried in proxy runs."
    if found:
        scored = [(each["score"], format_settings(each["settings"])) for each in found]
        known = sorted((each for each in scored if each[0] is not None), reverse=name not in LOWER)
        rows = [[settings, shown_score(name, score)] for score, settings in known[:MAX_PROXIES]]
        words = (
            f"{len(scored)} settings were tried in proxy runs on the server's own held-out records, which belong to no "
            f"agent, under the noise of this run, at no privacy cost. {len(scored) - len(known)} diverged."
        )
    return rows, words


def format_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.partition('.')[2]} {value}" for key, value in settings.items()) or "the config's own"
