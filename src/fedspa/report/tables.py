"""The tables of a report: ε by relation, the plan, ledger lines, and runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedspa.data.columns import checked
from fedspa.errors import ConfigError
from fedspa.privacy.cap import AGAINST_ALL
from fedspa.report import plots
from fedspa.report.promise import Promise
from fedspa.report.read import Entry, RunRecord
from fedspa.runs.metrics import label, shown_score
from fedspa.runs.plans import flat
from fedspa.runs.statement import is_seeded, noise_kind, observer, protected, shown, shown_bytes

MOST_ENTRIES = 20_000  # of all agents, on one page; `fedspa ledger show --entries` has them all

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
    rows = [["verified", plots.known(facts["epsilon"]), *terms, facts["accountant"], flaw or f"the guarantee{whom}"]]
    if facts["members"]:
        floor = shown(facts["epsilon_floor"])
        rows.append(["floor", floor, *terms, facts["accountant"], "; ".join(filter(None, (AGAINST_ALL, flaw)))])
    if facts["neighbours"] != "replace-one":
        rows.append(["verified", shown(facts["epsilon_replace_one"]), "replace-one", facts["sampling"], "pld", flaw])
    if facts["epsilon_total"] is not None:
        total = shown(facts["epsilon_total"])
        note = "; ".join(filter(None, ("all runs in the ledger, against the server", flaw)))
        rows.append(["verified", total, *terms, facts["accountant_total"] or "–", note])
        if facts["members"] or facts["epsilon_total_floor"] is not None:
            total, note = shown(facts["epsilon_total_floor"]), f"all runs in the ledger, {AGAINST_ALL}"
            rows.append(["floor", total, *terms, facts["accountant_total"] or "–", note])
    return rows


def ledger(run: RunRecord, held: Promise | None, agents: Sequence[str]) -> list[dict[str, Any]]:
    """What is known of each of the named agents, as texts."""
    if held is None:
        return []
    entries: dict[str, list[Entry]] = {}
    for entry in run.participations.entries:
        entries.setdefault(entry.agent, []).append(entry)
    whole = len(run.participations.entries) <= MOST_ENTRIES
    found = []
    for agent in agents:
        lines = entries.get(agent, [])
        sent = sum(line.digest is not None for line in lines)
        found.append(
            {
                "agent": agent,
                "facts": [
                    ("participations", str(len(lines))),
                    (
                        f"ε verified{' (SEEDED NOISE: a simulation)' * is_seeded(held.facts)}",
                        plots.known(held.verified(len(lines))),
                    ),
                    *_floor(held, len(lines)),
                    ("sent", str(sent) if run.participations.source == "ledger" else "–"),
                ],
                "entries": [_line(line) for line in (lines if whole else lines[-1:])],
            }
        )
    return found


def _floor(held: Promise, count: int) -> list[tuple[str, str]]:
    return [(f"ε floor, {AGAINST_ALL}", plots.known(held.floor(count)))] if held.facts["members"] else []


def _line(entry: Entry) -> list[str]:
    return [
        "–" if entry.sequence is None else str(entry.sequence),
        str(entry.round + 1),
        time(entry.reserved_at),
        time(entry.released_at),
        (entry.digest or "–")[:16],
        (entry.hash or "–")[:16],
    ]


def time(text: str | None) -> str:
    return "–" if not text else text[:19].replace("T", " ")


def ledger_note(run: RunRecord) -> str:
    count = len(run.participations.entries)
    if run.participations.source == "ledger":
        state = "its chain of hashes is whole" if run.participations.sound else "ITS CHAIN OF HASHES IS BROKEN"
        shortened = "" if count <= MOST_ENTRIES else "; of each agent only the last is listed here"
        return f"{count:,} entries, {state}, head {run.participations.head[:16]}{shortened}. Times are UTC."
    if run.participations.source == "asked":
        return (
            f"{count:,} questions to agents. The ledgers are the agents' own; the server only knows whom it asked in "
            "which round, which bounds what each spent from above."
        )
    return ""


def plan_table(run: RunRecord, held: Promise | None) -> list[tuple[str, str, str]]:
    """Symbol or name, value, meaning."""
    plan = held.plan if held is not None else None
    if plan is None or held is None:
        return []
    own = "" if plan.aggregation is None else ", the agent's own share"
    if held.active is None:
        kind, sigma = [("k", "–", "active coordinates, by algorithm.layer_shares: known when the run is done")], []
    else:
        kind = plan.report_rows()
        sigma = [("σ", f"{plan.sigma:.4g}", f"noise on each coordinate of the mean gradient{own}")]
    clip = "each coordinate to ±c" if plan.clip == "coordinate" else "norm to C"
    rule = {"given": "given", "quantile": "start of a private quantile"}
    return [
        ("d", f"{plan.dimension:,}", "parameters of the model"),
        *kind,
        ("B", f"{plan.batch}", f"batch of a local step ({plan.sampling} sampling; B is its public divisor)"),
        ("m", f"{plan.records}", f"fewest {plan.unit}s that an agent holds, a public number"),
        ("q", f"{plan.event.rate:.4g}", f"chance that a {plan.unit} takes part in a step, B/m"),
        ("τ", f"{plan.local_steps}", "local steps in a round"),
        ("I", f"{plan.participations}", "most rounds that an agent takes part in"),
        ("clip", f"{plan.clip_value:g}", f"{plan.clip}, {clip}; {rule[plan.clip_rule]}"),
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
    """Header and row: the last model's accuracy on the server's records of each class. None where it is not known."""
    found = None if run.summary is None else run.summary.get("accuracy_by_class")
    if not isinstance(found, list) or not all(_is_share(value) for value in found):
        return None
    cells = ["–" if value is None else f"{value:.1%}" for value in found]
    names = _class_names(run)
    if names is None or len(names) != len(cells):
        names = tuple(map(str, range(len(cells))))
    return ["class", *names], [["accuracy", *cells]]


def _class_names(run: RunRecord) -> tuple[str, ...] | None:
    """What a table's schema calls the classes; None where there was no table, or its schema was edited."""
    schema = None if run.summary is None else run.summary.get("schema")
    if not isinstance(schema, dict):
        return None
    try:
        return checked(schema).class_names
    except ConfigError:
        return None


def trained(run: RunRecord) -> list[tuple[str, str]]:
    """What the run itself found of its records, module and versions. Empty where it is not done."""
    found = None if run.summary is None else run.summary.get("provenance")
    if run.summary is None or not isinstance(found, dict):
        return []
    rows = [(str(key), str(value)) for key, value in found.items()]
    why, hints, workers = (run.summary.get(f"{key}") for key in ("engine_reason", "engine_hints", "workers"))
    rows += [("why this engine", why)] if isinstance(why, str) else []
    rows += [("faster", str(hint)) for hint in (hints if isinstance(hints, list) else [])]
    return [*rows, ("workers", str(workers))] if rows and isinstance(workers, int) else rows


def _is_share(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and 0 <= value <= 1)


def _arithmetic(run: RunRecord) -> str:
    if run.summary is None or not isinstance(run.summary.get("tf32"), bool):  # an unfinished run
        return "–"
    return "float32, matrix products in TF32" if run.summary["tf32"] else "float32"


def comparison_row(run: RunRecord, held: Promise | None, name: str, score: str | None) -> list[str]:
    """`score` is the one of all the runs; where they have several, each is named."""
    facts = held.facts if held is not None else None
    guarantee = "none" if run.config is not None and not run.config.private else "–"
    terms = "–"
    if facts is not None:
        guarantee = "none" if facts["epsilon"] is None else shown(facts["epsilon"])
        guarantee += f", floor {shown(facts['epsilon_floor'])}" if facts["members"] else ""
        guarantee += "" if facts["private"] else " NOT PRIVATE: SEEDED NOISE" if is_seeded(facts) else " NOT PRIVATE"
        terms = f"for each {protected(facts)}, δ = {facts['delta']:g}, {facts['neighbours']}, "
        terms += f"{facts['sampling']}, {facts['accountant']}"
        terms += f", against {observer(facts)}" if facts["members"] else ""
    (_, _, each), best = run.sent, run.best
    fewer = "–" if run.dimension is None or not each else f"{plots.fedavg_upload(run.dimension) / each:,.1f}"
    return [
        name,
        "–" if run.config is None else run.config.algorithm.name,
        _score(run, -1 if run.metrics else None, named=score is None),
        _score(run, best, named=score is None),
        guarantee,
        terms,
        plots.known(None if facts is None else facts["epsilon_replace_one"]),
        shown_bytes(each) if each else "–",
        fewer,
        str(len(run.metrics)),
    ]


def _score(run: RunRecord, line: int | None, *, named: bool) -> str:
    value = None if line is None else shown_score(run.headline, run.scores[line])
    return "–" if value is None else f"{label(run.headline)} {value}" if named else value


def differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Config keys in which the runs are not the same, with each run's value."""
    configs = [flat(run.config) if run.config is not None else {} for run in runs]
    keys = dict.fromkeys(key for config in configs for key in config if key != "run.out")
    rows = [[key, *(shown_value(config.get(key)) for config in configs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def shown_value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
