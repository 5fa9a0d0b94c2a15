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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedspa.agent.ledger.report import lines, verify
from fedspa.errors import ConfigError, FedspaError, real_path
from fedspa.mechanisms import Plan, event_of
from fedspa.privacy.event import Event
from fedspa.runs import project
from fedspa.runs.config import Config, load
from fedspa.runs.guarantee import Guarantee, finite, promised
from fedspa.runs.metrics import RoundMetrics, better
from fedspa.runs.plans import algorithm_of, cap_of, plan_of

_ROUND = re.compile(r"round-(\d{1,9})(?:-attempt-\d+)?")
EpsilonOf = Callable[[int], float | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One participation, from a ledger. The server of a deployment has no ledger and knows only agent and round."""

    agent: str
    round: int
    sequence: int | None = None
    reserved_at: str = ""
    released_at: str | None = None
    digest: str | None = None
    hash: str = ""


@dataclass(frozen=True, slots=True)
class Participations:
    """Who took part when. `verified` is True if a ledger's hash chain was verified; `noise` is the noise's origin by
    the ledger's entries, which `event` leaves out."""

    entries: tuple[Entry, ...] = ()
    event: Event | None = None
    noise: frozenset[str] = frozenset()
    source: str = ""
    verified: bool = False
    head: str = ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`problems` are one-line sentences about what could not be read; `dimension` is d."""

    folder: Path
    config: Config
    metrics: tuple[RoundMetrics, ...]
    summary: Mapping[str, Any] | None
    participations: Participations
    dimension: int | None
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return real_path(self.folder).name

    @property
    def headline(self) -> str:
        """The score that the run is judged by."""
        return self.metrics[-1].headline if self.metrics else "accuracy"

    @property
    def scores(self) -> list[float | None]:
        """Its values, round by round; None if the held-out records give none."""
        return [None if math.isnan(line.score) else line.score for line in self.metrics]

    @property
    def best(self) -> int | None:
        """The round with the best score, of those that made the model: dropped trials did not."""
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
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} holds no run: there is no config.toml; give the folder of one")
    project.refuse(folder)
    problems: list[str] = []
    config, summary = load(folder / "config.toml", own_code=False), _summary(folder / "summary.json")
    return RunRecord(
        folder=folder,
        config=config,
        metrics=read_metrics(folder / "metrics.jsonl"),
        summary=summary,
        participations=_participations(folder, config, problems),
        dimension=_dimension(folder, summary),
        problems=problems,
    )


def read_metrics(path: Path) -> tuple[RoundMetrics, ...]:
    """Read the complete lines, in order. A last line without its end is being written, or was when the run died."""
    try:
        complete = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return ()
    check = TypeAdapter(RoundMetrics)
    try:
        return tuple(check.validate_json(line) for line in complete)
    except ValidationError:
        raise ConfigError(f"{path} is damaged; restore it from a copy") from None


def _summary(path: Path) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if not isinstance(found, dict) or "epsilon" not in found:
        raise ConfigError(f"{path} is damaged; restore it from a copy, or delete it and resume the run")
    return found


def _dimension(folder: Path, summary: Mapping[str, Any] | None) -> int | None:
    """Return d; for an unfinished run, from its newest checkpoint that can be opened."""
    if summary is not None:
        return int(summary["dimension"])
    from safetensors import SafetensorError, safe_open

    for path in sorted((folder / "checkpoint").glob("round-*.safetensors"), reverse=True):
        try:
            with safe_open(path, framework="numpy") as file:
                return int(file.get_slice("theta").get_shape()[0])
        except (OSError, SafetensorError, IndexError, ValueError):
            continue
    return None


def _participations(folder: Path, config: Config, problems: list[str]) -> Participations:
    if (folder / "ledger.sqlite").exists():
        try:
            return _ledger(folder / "ledger.sqlite", problems)
        except FedspaError as error:
            problems.append(f"the ledger cannot be read: {error}")
    elif (folder / "asked.jsonl").exists():
        return _asked(folder / "asked.jsonl")
    elif config.run.ledger is not None and config.private:
        problems.append(
            f"this run wrote into the ledger {config.run.ledger}, outside of its folder: its agents are not listed "
            "here; see `fedspa ledger show`"
        )
    return Participations()


def _ledger(path: Path, problems: list[str]) -> Participations:
    faults = verify(path)
    problems.extend(f"the ledger is damaged: {fault}" for fault in faults[:3])
    head, stored = lines(path)
    entries: list[Entry] = []
    texts: set[str] = set()
    for line in stored:
        when = _ROUND.fullmatch(line["message"])
        if when is None:
            problems.append("the ledger contains entries that no round of this run made")
            return Participations()
        fields = (line[name] for name in ("sequence", "reserved_at", "released_at", "digest", "hash"))
        entries.append(Entry(line["agent"], int(when[1]), *fields))
        texts.add(line["event"])
    found = [event_of(text) for text in texts]
    events = {event.with_noise(None) for event in found}
    one = events.pop() if len(events) == 1 else None
    noise = frozenset(event.noise for event in found if event.noise is not None)
    return Participations(tuple(entries), one, noise, "ledger", not faults, head)


def _asked(path: Path) -> Participations:
    """Read whom the server of a deployment asked in which attempt at a round: each is at most one participation."""
    found: dict[tuple[int, int, int], None] = {}
    for line in path.read_bytes().split(b"\n")[:-1]:
        asked = json.loads(line)
        attempt = int(asked["round"]), int(asked.get("attempt", 1))
        found.update(dict.fromkeys((*attempt, int(agent)) for agent in asked["agents"]))
    return Participations(tuple(Entry(f"agent-{agent}", round_) for round_, _, agent in found), source="asked")


@dataclass(frozen=True, slots=True)
class Promise:
    """What a run guarantees. `facts` has the summary's keys; `epsilon_cap` is ε of an agent that takes part as often as
    the plan allows; `verified` and `floor` give ε of a number of participations, or None if it is unknown.

    `active` is k, or None if it is unknown: then k, sensitivity and σ of `plan` mean nothing, while ε needs none of
    them.
    """

    facts: Mapping[str, Any]
    plan: Plan | None
    active: int | None
    cap: int
    epsilon_cap: float | None
    counts: Mapping[str, int]
    verified: EpsilonOf
    floor: EpsilonOf


def promise(run: RunRecord) -> Promise | None:
    """Compute the guarantee from the plan by config and ledger and the ledger's own counts; without a ledger take the
    summary's. Return None if the run promises nothing, or too little of it is left."""
    config = run.config
    if algorithm_of(config).mechanism is None:
        return None
    cap = cap_of(config)
    counts = Counter(entry.agent for entry in run.participations.entries)
    active = _active(run)
    plan = _plan(run, active)
    if plan is None:
        if run.summary is None or run.summary["delta"] is None:
            return None
        known = _epsilon_by_count(run, lambda count: None)
        return Promise(run.summary, None, None, cap, None, counts, known, lambda count: None)
    guarantee = Guarantee(plan)
    for number, times in enumerate(counts.values()):
        guarantee.took_part([number], times)
    totals = dict.fromkeys(("epsilon_total", "epsilon_total_floor", "accountant_total"))
    facts = {**promised(plan, guarantee, _noise(run)), **totals}
    _compare_with_summary(run, facts)
    return Promise(
        facts=facts,
        plan=plan,
        active=active,
        cap=cap,
        epsilon_cap=finite(_after(plan, cap).epsilon_max(plan.neighbours)),
        counts=counts,
        verified=_epsilon_by_count(run, lambda count: finite(_after(plan, count).epsilon_max(plan.neighbours))),
        floor=lambda count: _after(plan, count).epsilon_floor(),
    )


def _noise(run: RunRecord) -> str:
    """Return the noise's origin: the config's, unless the ledger contains seeded entries."""
    asked, found = run.config.privacy.noise, run.participations.noise
    if found - {asked}:
        run.problems.append(
            f"the ledger says that the noise was {' and '.join(sorted(found))}, the config {asked}: rely on no ε of "
            "this page"
        )
    return "seeded" if "seeded" in found else asked


def _after(plan: Plan, count: int) -> Guarantee:
    """The guarantee after `count` participations."""
    guarantee = Guarantee(plan)
    guarantee.took_part([0], count)
    return guarantee


def _active(run: RunRecord) -> int | None:
    """Return k. With shares by layer it depends on the layers' sizes, so that only the summary's k/d gives it."""
    if run.dimension is None:
        return None
    if not algorithm_of(run.config).sparse:
        return run.dimension
    share: float | None = run.config.algorithm.compression
    if run.config.algorithm.layer_shares is not None:
        share = None if run.summary is None else run.summary["compression"]
    return None if share is None else round(share * run.dimension)


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


def _epsilon_by_count(run: RunRecord, beyond: EpsilonOf) -> EpsilonOf:
    """Return ε by participations, from the metrics: after each round they have the largest ε, the ledger the largest
    count. A count that was never the largest gets ε of the next larger one: too high at worst. Counts `beyond` all of
    them belong to a round that is not finished."""
    running: Counter[str] = Counter()
    by_round: dict[int, list[str]] = {}
    for entry in run.participations.entries:
        by_round.setdefault(entry.round, []).append(entry.agent)
    epsilons: dict[int, float] = {}
    for metrics in run.metrics:
        running.update(by_round.get(metrics.round, ()))
        if metrics.epsilon is not None and running:
            epsilons.setdefault(max(running.values()), metrics.epsilon)
    known = sorted(epsilons)

    def epsilon(count: int) -> float | None:
        if count == 0:
            return 0.0
        place = bisect_left(known, count)
        return epsilons[known[place]] if place < len(known) else beyond(count)

    return epsilon


def _compare_with_summary(run: RunRecord, facts: Mapping[str, Any]) -> None:
    """The signed page must not print an ε that the ledger does not confirm."""
    if run.summary is None:
        return
    for key in ("epsilon", "epsilon_floor", "epsilon_replace_one", "participations_max", "unit"):
        then, now = run.summary[key], facts[key]
        same = math.isclose(then, now, rel_tol=1e-6) if isinstance(then, float) and now is not None else then == now
        if not same:
            run.problems.append(f"summary.json says {key} = {then}, but the ledger gives {now}: do not rely on either")
