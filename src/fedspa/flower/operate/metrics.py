"""Numbers for Prometheus, in its text format: how a site or the server is doing, and nothing about records.

Every number of a site is one that the server has seen as well (answers, their codes, their length, their time), or
follows from the ledger and the policy, which hold plans and no records. docs/deployment.md argues for each of them; a
test holds the two lists together.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedspa import toml
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.policy import Policy
from fedspa.flower import tally
from fedspa.flower.operate.folders import ServerFolder, SiteFolder
from fedspa.privacy.event import noise_modes


class Metric(NamedTuple):
    """A name without its beginning `fedspa_`, what Prometheus calls its kind, and what it is."""

    name: str
    kind: str
    help: str


def _by_name(*metrics: Metric) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


SITE = _by_name(
    Metric("site_rounds_total", "counter", "Rounds that the ledger has paid for, by plan"),
    Metric("site_epsilon", "gauge", "Privacy loss over all runs so far, by adversary"),
    Metric("site_epsilon_left", "gauge", "What the policy's cap leaves of it, by adversary"),
    Metric("site_epsilon_of_plan", "gauge", "Privacy loss of each plan by itself"),
    Metric("site_seeded_rounds_total", "counter", "Rounds whose noise was seeded: they are not private"),
    Metric("site_ledger_losses", "gauge", "Losses of entries that were accepted: no epsilon here counts those"),
    Metric("site_payloads_total", "counter", "Updates that were sent, repeated ones too"),
    Metric("site_payload_bytes_total", "counter", "Bytes of the updates that were sent"),
    Metric("site_refusals_total", "counter", "Messages that were refused, by the code that the server got"),
    Metric("site_last_round_age_seconds", "gauge", "Time since the ledger paid for a round"),
)
SERVER = _by_name(
    Metric("server_rounds_total", "counter", "Rounds that are over, by run"),
    Metric("server_rounds_planned", "gauge", "Rounds that the run will have, by run"),
    Metric("server_updates_total", "counter", "Updates that were taken, by run"),
    Metric("server_dropped_total", "counter", "Answers that were not, by run and reason"),
    Metric("server_uplink_bytes_total", "counter", "Bytes of the updates that were taken, by run"),
    Metric("server_epsilon", "gauge", "The server's own bound on the privacy loss of each agent, by run"),
    Metric("server_run_finished", "gauge", "1 where the run has its summary, by run"),
    Metric("server_last_round_age_seconds", "gauge", "Time since a round of the run ended, by run"),
)


class Sample(NamedTuple):
    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def of_site(site: SiteFolder) -> str:
    """All metrics of a site, read from its ledger, policy and tally."""
    return _text(SITE, _site_samples(site))


def of_server(server: ServerFolder) -> str:
    """All metrics of the server, read from the folders of its runs."""
    return _text(SERVER, _server_samples(server))


def _site_samples(site: SiteFolder) -> Iterator[Sample]:
    """A plan is named by its event: sampling, steps and noise, all of them the server's words."""
    cap, name = Policy.load(site.policy).cap, site.agent
    with Ledger.read(site.ledger) as ledger:
        spent, first, lost = ledger.spent(name), ledger.first_plan(name), ledger.losses()
        newest = "(SELECT max(last) FROM total WHERE agent = ?)"
        times = ledger.query(f"SELECT reserved_at FROM entry WHERE sequence = {newest}", name)
    for limit in cap.limits:
        against = (("against", limit.words or "the server"),)
        epsilon = limit.total(spent, first).epsilon
        yield Sample("site_epsilon", epsilon, against)
        yield Sample("site_epsilon_left", max(0.0, limit.epsilon - epsilon), against)
    for event, rounds in spent.items():
        plan = (("plan", str(event)),)
        yield Sample("site_rounds_total", rounds, plan)
        # By the rule of the total, of which it is a part: the first plan as it was announced, others by the filter.
        announced = first if first is not None and first.covers({event: rounds}) else None
        yield Sample("site_epsilon_of_plan", cap.limits[0].total({event: rounds}, announced).epsilon, plan)
    yield Sample("site_seeded_rounds_total", noise_modes(spent).get("seeded", 0))
    yield Sample("site_ledger_losses", len(lost))
    for (reserved_at,) in times:
        yield Sample("site_last_round_age_seconds", _age(datetime.fromisoformat(reserved_at).timestamp()))
    answers = tally.read(site.ledger)
    yield Sample("site_payloads_total", answers.payloads)
    yield Sample("site_payload_bytes_total", answers.payload_bytes)
    for code, refused in sorted(answers.refusals.items()):
        yield Sample("site_refusals_total", refused, (("code", code),))


def _server_samples(server: ServerFolder) -> Iterator[Sample]:
    """Of what is in a run's folder, no score and no loss: those are of the server's own records."""
    for config in sorted(server.runs.glob("*/config.toml")):
        folder = config.parent
        run = (("run", folder.name),)
        rounds = list(_lines(folder / "metrics.jsonl"))
        yield Sample("server_rounds_total", len(rounds), run)
        yield Sample("server_rounds_planned", _planned(config), run)
        yield Sample("server_updates_total", sum(line.get("agents", 0) for line in rounds), run)
        yield Sample("server_uplink_bytes_total", sum(line.get("uplink_bytes", 0) for line in rounds), run)
        dropped: Counter[str] = Counter()
        for line in _lines(folder / "replies.jsonl"):
            dropped.update(line.get("dropped", {}))
        for reason, times in sorted(dropped.items()):
            yield Sample("server_dropped_total", times, (*run, ("reason", reason)))
        if rounds:
            if isinstance(rounds[-1].get("epsilon"), float):
                yield Sample("server_epsilon", rounds[-1]["epsilon"], run)
            yield Sample("server_last_round_age_seconds", _age((folder / "metrics.jsonl").stat().st_mtime), run)
        yield Sample("server_run_finished", float((folder / "summary.json").exists()), run)


def _planned(config: Path) -> int:
    rounds = toml.read(config, "a run's config").get("federation", {}).get("rounds", 0)
    return rounds if isinstance(rounds, int) else 0


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """What a run has written so far; the last line may be under way."""
    try:
        text = path.read_text("utf-8")
    except OSError:
        return
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found


def _age(then: float) -> float:
    return max(0.0, time.time() - then)


def _text(known: Mapping[str, Metric], samples: Iterable[Sample]) -> str:
    """Samples of one name stand together, as the format asks for."""
    by_name: dict[str, list[Sample]] = {name: [] for name in known}
    for sample in samples:
        by_name[sample.name].append(sample)
    lines = []
    for name, found in by_name.items():
        if found:
            lines += [f"# HELP fedspa_{name} {known[name].help}.", f"# TYPE fedspa_{name} {known[name].kind}"]
            lines += [f"fedspa_{name}{_labels(sample)} {_number(sample.value)}" for sample in found]
    return "\n".join(lines) + "\n"


def _labels(sample: Sample) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{key}="{escaped(value)}"' for key, value in sample.labels) + "}" if sample.labels else ""


def _number(value: float) -> str:
    return f"{value:.10g}" if math.isfinite(value) else "+Inf"
