"""A run's folder as data: config, metrics, summary and participations, and the guarantee that follows from its ledger.

Only files of the server or the simulator are read. Nothing of an agent is in them but when it took part and what that
cost; scores and loss are on the server's held-out records. An unfinished run gives what it has.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import RunSummary, lines, runs_of, verify
from fedspa.errors import FedspaError, real_path
from fedspa.mechanisms import Plan, event_of
from fedspa.privacy.budget import FirstPlan
from fedspa.privacy.event import Event, NoiseMode
from fedspa.runs import rundir
from fedspa.runs.config import Config, algorithm_of, cap_of, load, plan_of
from fedspa.runs.guarantee import Guarantee, LedgerTotal, finite, no_total, promised, total_of
from fedspa.runs.rundir import RoundMetrics, better

if TYPE_CHECKING:
    from fedspa.analytics.estimates import Estimate

EVALUATION = "evaluation.json"  # in a run's folder
_ROUND = re.compile(r"round-(\d{1,9})(?:-attempt-\d+)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """One participation, from a ledger. The server of a deployment has no ledger and knows only agent and round."""

    agent: str
    round: int
    sequence: int | None = None
    reserved_at: str = ""


@dataclass(frozen=True, slots=True)
class Participations:
    """Who took part when in this run. `verified` is True if a ledger's hash chain was verified; `noise` is the noise's
    origin by the ledger's entries, which `event` leaves out. `others` is what the other runs of these agents in
    the ledger can have cost a record, `run` is the name of this one, `history` has them all, and `first` is the first
    plan among them. `spent` has all that each agent with a name of its own spent, and its first plan."""

    entries: tuple[Entry, ...] = ()
    event: Event | None = None
    noise: frozenset[str] = frozenset()
    source: str = ""
    verified: bool = False
    head: str = ""
    others: Mapping[Event, int] = field(default_factory=dict)
    run: str = ""
    history: tuple[RunSummary, ...] = ()
    first: FirstPlan | None = None
    spent: Mapping[str, tuple[Mapping[Event, int], FirstPlan | None]] = field(default_factory=dict)

    @property
    def runs(self) -> int:
        """Return how many other runs the ledger has."""
        return sum(each.run != self.run for each in self.history)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`problems` are one-line sentences about what could not be read; `dimension` is d; `released` has the numbers of a
    run that released statistics or scores and trained nothing; `evaluation` has ε and numbers of its last evaluation at
    the agents."""

    folder: Path
    config: Config
    metrics: tuple[RoundMetrics, ...]
    summary: Mapping[str, Any] | None
    participations: Participations
    dimension: int | None
    problems: list[str] = field(default_factory=list)
    released: Sequence[Estimate] | None = None
    evaluation: tuple[float, Sequence[Estimate]] | None = None

    @property
    def name(self) -> str:
        return real_path(self.folder).name

    @property
    def headline(self) -> str:
        """Return the score that the run is judged by."""
        return self.metrics[-1].headline if self.metrics else "accuracy"

    @property
    def scores(self) -> list[float | None]:
        """Its values, round by round; None if the held-out records give none."""
        return [None if math.isnan(line.score) else line.score for line in self.metrics]

    @property
    def agents(self) -> list[str]:
        """Return the names of the agents, as far as the run's files have them."""
        named: list[str] | None = None if self.summary is None else self.summary["agent_names"]
        return named or [f"agent-{number}" for number in range(self.config.federation.agents)]

    @property
    def best(self) -> int | None:
        """Return the round with the best score, of those that made the model: dropped trials did not."""
        known = {t: value for t, value in enumerate(self.scores) if value is not None and t not in self._dropped}
        wanted = better(self.headline)(known.values()) if known else None
        return next((t for t, value in known.items() if value == wanted), None)

    @property
    def _dropped(self) -> set[int]:
        tuning = None if self.summary is None else self.summary.get("tuning")
        if tuning is None:
            return set()
        others = [trial for number, trial in enumerate(tuning["trials"]) if number != tuning["choice"]]
        return {t for part in (*others, tuning["scoring"]) for t in part["rounds"]}

    @property
    def sent(self) -> tuple[int, int, float]:
        """Bytes, uploads, and bytes per upload."""
        total, uploads = (sum(getattr(line, key) for line in self.metrics) for key in ("uplink_bytes", "agents"))
        return total, uploads, total / max(1, uploads)

    @property
    def finished(self) -> bool:
        return self.summary is not None


def read(folder: Path) -> RunRecord:
    """Read the run in `folder`; raise ConfigError if there is none, or if a file is damaged."""
    rundir.check_is_run(folder)
    problems: list[str] = []
    config, summary = load(folder / "config.toml", own_code=False), rundir.read_summary(folder)
    released = None
    if config.task.name == "statistics" and summary is not None:
        from fedspa.analytics.estimates import released as released_by  # which reads tensors

        released = released_by(folder).estimates
    name, dimension = rundir.read_identity(folder)
    names = set((summary or {}).get("agent_names") or ())
    return RunRecord(
        folder=folder,
        config=config,
        metrics=rundir.read_metrics(folder / "metrics.jsonl"),
        summary=summary,
        participations=_participations(folder, config, name, names, problems),
        dimension=dimension if summary is None else int(summary["dimension"]),
        problems=problems,
        released=released,
        evaluation=_evaluation(folder, problems),
    )


def _evaluation(folder: Path, problems: list[str]) -> tuple[float, Sequence[Estimate]] | None:
    """Return ε and the numbers of the last `fedspa evaluate`."""
    if not (folder / EVALUATION).exists():
        return None
    from fedspa.analytics.estimates import Estimate  # which reads tensors

    try:
        found = json.loads((folder / EVALUATION).read_bytes())
        return float(found["epsilon"]), [Estimate(**each) for each in found["estimates"]]
    except (OSError, ValueError, TypeError, KeyError):
        problems.append(f"{EVALUATION} cannot be read: `fedspa evaluate` of its release shows the numbers")
        return None


def _participations(
    folder: Path, config: Config, run: str | None, names: set[str], problems: list[str]
) -> Participations:
    if (path := rundir.ledger_of(folder, config)).exists():
        try:
            return _ledger(path, run, names, problems)
        except FedspaError as error:
            problems.append(f"the ledger cannot be read: {error}")
    elif (folder / rundir.ASKED).exists():
        return _asked(folder / rundir.ASKED)
    elif config.run.ledger is not None and config.private:
        problems.append(f"the ledger of this run, {path}, is missing: put it back, or rely on no ε of this page")
    return Participations()


def _ledger(path: Path, run: str | None, names: set[str], problems: list[str]) -> Participations:
    faults = verify(path)
    problems.extend(f"the ledger is damaged: {fault}" for fault in faults[:3])
    with Ledger.read(path) as ledger:
        history = runs_of(ledger)
        runs = [each.run for each in history]
        if run is None and len(runs) > 1:
            problems.append("the ledger has entries of several runs, and no checkpoint says which are of this one")
            return Participations()
        run = run or next(iter(runs), "")
        stored, head = lines(ledger, run), ledger.position().hash
        agents = names or {line["agent"] for line in stored}
        related = ledger.runs_with(agents)
        spent = {agent: (ledger.spent(agent), ledger.first_plan(agent)) for agent in sorted(names)}
        others, first = ledger.largest(each for each in related if each != run), ledger.first_plan_of(related)
        history = tuple(each for each in history if each.run in {*related, run})
    entries: list[Entry] = []
    texts: set[str] = set()
    for line in stored:
        when = _ROUND.fullmatch(line["message"])
        if when is None:
            problems.append("the ledger contains entries that no round of this run made")
            return Participations()
        entries.append(Entry(line["agent"], int(when[1]), line["sequence"], line["reserved_at"]))
        texts.add(line["event"])
    found = [event_of(text) for text in texts]
    events = {event.with_noise(None) for event in found}
    one = events.pop() if len(events) == 1 else None
    noise = frozenset(event.noise for event in found if event.noise is not None)
    return Participations(
        entries=tuple(entries),
        event=one,
        noise=noise,
        source="ledger",
        verified=not faults,
        head=head,
        others=others,
        run=run,
        history=history,
        first=first,
        spent=spent,
    )


def _asked(path: Path) -> Participations:
    """Read which agents the server of a deployment asked: each is at most one participation in an attempt."""
    found = dict.fromkeys((t, attempt, agent) for t, attempt, agents in rundir.read_asked(path) for agent in agents)
    return Participations(tuple(Entry(f"agent-{agent}", t) for t, _, agent in found), source="asked")


@dataclass(frozen=True, slots=True)
class Promise:
    """What a run guarantees. `facts` has the summary's keys; `epsilon_cap` is ε of an agent that takes part as often as
    the plan allows; `epsilons` has ε by participations, as the metrics have it.

    `active` is k, or None if it is unknown: then k, sensitivity and σ of `plan` mean nothing, while ε needs none of
    them.
    """

    facts: Mapping[str, Any]
    plan: Plan | None
    active: int | None
    cap: int
    epsilon_cap: float | None
    counts: Mapping[str, int]
    epsilons: Mapping[int, float]

    def verified(self, count: int) -> float:
        """Return ε after so many participations. A count that was never the largest gets ε of the next larger one, and
        one of a round that is not finished gets the largest: too high at worst."""
        known = sorted(self.epsilons)
        place = bisect_left(known, count)
        return 0.0 if count == 0 else self.epsilons[known[place]] if place < len(known) else self.facts["epsilon"]


def promise(run: RunRecord) -> Promise | None:
    """Compute the guarantee from the plan by config and ledger and the ledger's own counts; without a ledger take the
    summary's. Return None if the run promises nothing, or too little of it is left."""
    config = run.config
    if algorithm_of(config).mechanism is None:
        return None
    cap = cap_of(config)
    counts = Counter(entry.agent for entry in run.participations.entries)
    active, epsilons = _active(run), _epsilon_by_count(run)
    plan = _plan(run, active)
    if plan is None:
        if run.summary is None or run.summary["delta"] is None:
            return None
        return Promise(run.summary, None, None, cap, None, counts, epsilons)
    guarantee = Guarantee(plan)
    for number, times in enumerate(counts.values()):
        guarantee.count_participation([number], times)
    total = _total(run, plan, max(counts.values(), default=0))
    facts = {
        **promised(plan, guarantee, _noise(run)),
        "epsilon_total": None if total is None else total.epsilon,
        "epsilon_total_worst_case": None if total is None else total.worst_case,
        "accountant_total": None if total is None else total.accountant,
    }
    if total is not None and total.note is not None:
        run.problems.append(total.note)
    _compare_with_summary(run, facts)
    whole = Guarantee(plan)
    whole.count_participation([0], cap)
    return Promise(facts, plan, active, cap, finite(whole.epsilon_max(plan.neighbours)), counts, epsilons)


def _total(run: RunRecord, plan: Plan, count: int) -> LedgerTotal | None:
    """Return what `count` participations in this run and all other runs in its ledger can have cost a record; None
    without others."""
    found = run.participations
    if not found.others:
        return None
    held = Counter(found.others) + Counter({plan.event.with_noise(_noise(run)): count})
    try:
        return total_of(plan, held, found.first)
    except FedspaError as error:
        return no_total(error)


def _noise(run: RunRecord) -> NoiseMode:
    """Return the noise's origin: the config's, unless the ledger contains seeded entries."""
    asked, found = run.config.privacy.noise, run.participations.noise
    if found - {asked}:
        run.problems.append(
            f"the ledger says that the noise was {' and '.join(sorted(found))}, the config {asked}: rely on no ε of "
            "this page"
        )
    return "seeded" if "seeded" in found else asked


def _active(run: RunRecord) -> int | None:
    """Return k. With shares by layer it depends on the layers' sizes, so that only the summary's k/d gives it."""
    if run.dimension is None:
        return None
    if not algorithm_of(run.config).sparse:
        return run.dimension
    share = run.config.algorithm.compression
    if isinstance(share, list):
        if run.summary is None:
            return None
        share = float(run.summary["compression"])
    return round(share * run.dimension)


def _plan(run: RunRecord, active: int | None) -> Plan | None:
    """Return the run's plan; None without a ledger of its own, which alone has the public number of records."""
    event = run.participations.event
    if event is None or run.dimension is None:
        return None
    try:
        return plan_of(run.config, event, run.dimension, active if active is not None else run.dimension)
    except FedspaError as error:
        run.problems.append(f"config and ledger do not make a plan: {error}")
        return None


def _epsilon_by_count(run: RunRecord) -> dict[int, float]:
    """Return ε by participations, from the metrics: after each round they have the largest ε, the ledger the largest
    count."""
    running: Counter[str] = Counter()
    by_round: dict[int, list[str]] = {}
    for entry in run.participations.entries:
        by_round.setdefault(entry.round, []).append(entry.agent)
    epsilons: dict[int, float] = {}
    for metrics in run.metrics:
        running.update(by_round.get(metrics.round, ()))
        if metrics.epsilon is not None and running:
            epsilons.setdefault(max(running.values()), metrics.epsilon)
    return epsilons


def _compare_with_summary(run: RunRecord, facts: Mapping[str, Any]) -> None:
    """The signed page must not print an ε that the ledger does not confirm."""
    if run.summary is None:
        return
    for key in ("epsilon", "epsilon_worst_case", "epsilon_replace_one", "participations_max", "unit"):
        then, now = run.summary[key], facts[key]
        same = math.isclose(then, now, rel_tol=1e-6) if isinstance(then, float) and now is not None else then == now
        if not same:
            run.problems.append(f"summary.json says {key} = {then}, but the ledger gives {now}: do not rely on either")
