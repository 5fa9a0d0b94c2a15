"""A run's folder as data: what there is of config, metrics, summary, ledger and checkpoint, and what is wrong with it.

The server's or the simulator's side only. Nothing of an agent is in these files but when it took part and what that
cost; scores and loss are on the server's held-out records. A folder that is damaged or unfinished gives what it has.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from fedspa.agent.ledger.report import lines, verify
from fedspa.errors import ConfigError, FedspaError, real_path
from fedspa.mechanisms import event_of
from fedspa.mechanisms.base import Adversary
from fedspa.privacy.event import Event, Neighbours, Unit
from fedspa.runs import project
from fedspa.runs.config import Config, load
from fedspa.runs.metrics import RoundMetrics, better

_LARGEST = 1e30  # beyond any loss, count or ε that a run can write
_ROUND = re.compile(r"round-(\d{1,9})(?:-attempt-\d+)?")


@dataclass(frozen=True, slots=True)
class Entry:
    """One participation. From a ledger; of a deployment's server, which has none, only agent and round are known."""

    agent: str
    round: int
    sequence: int | None = None
    reserved_at: str = ""
    released_at: str | None = None
    digest: str | None = None
    hash: str = ""


@dataclass(frozen=True, slots=True)
class Participations:
    """Who took part when. `sound` is True where a ledger's whole chain of hashes was found in order.

    `noise` is where the ledger says that the noise came from, as far as it says so; `event` does not.
    """

    entries: tuple[Entry, ...] = ()
    event: Event | None = None
    noise: frozenset[str] = frozenset()
    source: str = ""
    sound: bool = False
    head: str = ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`problems` are one-line sentences about what could not be read; `dimension` is d."""

    folder: Path
    config: Config | None
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
        """Its values, round by round; None where the held-out records do not say."""
        return [None if math.isnan(line.score) else line.score for line in self.metrics]

    @property
    def best(self) -> int | None:
        """The round with the best of them, of those that made the model: trials that were dropped did not."""
        known = {t: value for t, value in enumerate(self.scores) if value is not None and t not in self._dropped}
        wanted = better(self.headline)(known.values()) if known else None
        return next((t for t, value in known.items() if value == wanted), None)

    @property
    def _dropped(self) -> set[int]:
        tuning = None if self.summary is None else self.summary.get("tuning")
        if not isinstance(tuning, dict) or not isinstance(tuning.get("trials"), list):
            return set()
        others = [trial for number, trial in enumerate(tuning["trials"]) if number != tuning.get("choice")]
        told = [of.get("rounds") for of in (*others, tuning.get("scoring")) if isinstance(of, dict)]
        return {t for rounds in told if isinstance(rounds, list) for t in rounds if isinstance(t, int)}

    @property
    def sent(self) -> tuple[int, int, float]:
        """Bytes, uploads, and bytes per upload."""
        total, uploads = (sum(getattr(line, key) for line in self.metrics) for key in ("uplink_bytes", "agents"))
        return total, uploads, total / max(1, uploads)

    @property
    def finished(self) -> bool:
        return self.summary is not None


def read(folder: Path) -> RunRecord:
    """The run in `folder`; a ConfigError where there is none."""
    if not any((folder / name).is_file() for name in ("config.toml", "metrics.jsonl")):
        raise ConfigError(f"{folder} holds no run (neither config.toml nor metrics.jsonl); give the folder of one")
    project.refuse(folder)
    problems: list[str] = []
    config = _config(folder / "config.toml", problems)
    summary = _summary(folder / "summary.json", problems)
    return RunRecord(
        folder=folder,
        config=config,
        metrics=tuple(read_metrics(folder / "metrics.jsonl", problems)),
        summary=summary,
        participations=_participations(folder, config, problems),
        dimension=_dimension(folder, summary),
        problems=problems,
    )


def read_metrics(path: Path, problems: list[str]) -> list[RoundMetrics]:
    """The whole lines, in order. A last line without its end is being written, or was when the run was killed."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"metrics.jsonl cannot be read: {error.strerror or error}")
        return []
    found: list[RoundMetrics] = []
    check = TypeAdapter(RoundMetrics)
    for number, line in enumerate(lines):
        try:
            metrics = check.validate_json(line)
        except ValidationError:
            problems.append(f"metrics.jsonl is damaged: line {number + 1} is no round's; what follows is left out")
            break
        if metrics.round != number or not _plausible(metrics):
            problems.append(f"metrics.jsonl is damaged: line {number + 1} is not of that round; the rest is left out")
            break
        found.append(metrics)
    return found


def _plausible(metrics: RoundMetrics) -> bool:
    """Whether these can be a round's: what is drawn must be finite, and no edited figure may pass for a run's."""
    costs = (metrics.epsilon or 0.0, metrics.epsilon_floor or 0.0)
    counts = (metrics.agents, metrics.uplink_bytes, *costs, metrics.clip_value or 0.0)
    scores = (metrics.loss, *(value or 0.0 for value in metrics.scores.values()))
    return (
        0 <= (metrics.accuracy or 0.0) <= 1
        and all(0 <= value <= _LARGEST for value in counts)
        and all(-_LARGEST <= value <= _LARGEST for value in scores)
    )


def _config(path: Path, problems: list[str]) -> Config | None:
    try:
        return load(path)
    except ConfigError as error:
        problems.append(f"config.toml cannot be used: {error}")
        return None


def _summary(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        problems.append("summary.json is damaged and was left out")
        return None
    if not isinstance(found, dict) or not _is_summary(found):
        problems.append("summary.json is not a run's summary and was left out")
        return None
    return found


def _is_summary(found: Mapping[str, Any]) -> bool:
    """Whether the values that a page computes with are of their types; everything else is only shown."""
    number, text = (int, float, type(None)), (str, type(None))
    kinds: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(("epsilon", "epsilon_replace_one", "epsilon_total", "delta"), number),
        **dict.fromkeys(("participations_max", "dimension", "compression", "seconds", "noise_multiplier"), number),
        **dict.fromkeys(("baseline", "epsilon_floor", "epsilon_total_floor", "members", "colluders"), number),
        **dict.fromkeys(("neighbours", "sampling", "accountant", "accountant_total"), text),
        **dict.fromkeys(("noise", "not_private_because", "coding", "engine", "baseline_answer"), text),
        "warnings": (list,),
        "private": (bool,),
    }
    terms = (found.get("unit"), found.get("neighbours"), found.get("adversary"))
    if terms not in [(None, None, None), *product(get_args(Unit), get_args(Neighbours), get_args(Adversary))]:
        return False
    summed = found.get("adversary") == "secure-aggregation" and isinstance(found.get("colluders"), int)
    if found.get("members") and not summed:
        return False
    return all(
        key in found
        and isinstance(found[key], kind)
        and (kind is not number or found[key] is None or 0 <= found[key] <= _LARGEST)
        for key, kind in kinds.items()
    )


def _dimension(folder: Path, summary: Mapping[str, Any] | None) -> int | None:
    """d; for a run that is not done, from its newest checkpoint that can be opened."""
    if summary is not None and summary["dimension"]:
        return int(summary["dimension"])
    from safetensors import SafetensorError, safe_open

    for path in sorted((folder / "checkpoint").glob("round-*.safetensors"), reverse=True):
        try:
            with safe_open(path, framework="numpy") as file:
                return int(file.get_slice("theta").get_shape()[0])
        except (OSError, SafetensorError, IndexError, ValueError):
            continue
    return None


def _participations(folder: Path, config: Config | None, problems: list[str]) -> Participations:
    if (folder / "ledger.sqlite").exists():
        try:
            return _ledger(folder / "ledger.sqlite", problems)
        except FedspaError as error:
            problems.append(f"the ledger cannot be read: {error}")
    elif (folder / "asked.jsonl").exists():
        return _asked(folder / "asked.jsonl", problems)
    elif config is not None and config.run.ledger is not None and config.private:
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
            problems.append("the ledger holds entries that no round of this run made")
            return Participations()
        fields = (line[name] for name in ("sequence", "reserved_at", "released_at", "digest", "hash"))
        entries.append(Entry(line["agent"], int(when[1]), *fields))
        texts.add(line["event"])
    found = [event_of(text) for text in texts]
    events = {event.with_noise(None) for event in found}
    one = events.pop() if len(events) == 1 else None
    noise = frozenset(event.noise for event in found if event.noise is not None)
    return Participations(tuple(entries), one, noise, "ledger", not faults, head)


def _asked(path: Path, problems: list[str]) -> Participations:
    """A deployment's server: whom it asked in which attempt at a round, each at most one participation."""
    found: dict[tuple[int, int, int], None] = {}
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            asked = json.loads(line)
            attempt = int(asked["round"]), int(asked.get("attempt", 1))
            found.update(dict.fromkeys((*attempt, int(agent)) for agent in asked["agents"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        problems.append("asked.jsonl is damaged: agents are not listed")
        return Participations()
    return Participations(tuple(Entry(f"agent-{agent}", round_) for round_, _, agent in found), source="asked")
