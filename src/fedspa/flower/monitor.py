"""Health, metrics and logs of a site or the server. Nothing here is computed from records.

Every metric of a site follows from the ledger and the policy, which hold plans and no records. docs/deployment.md
argues for each of them; a test compares the two lists.

An agent's own log says in words what was wrong, and such words may name records: how many there are, which are bad,
what a cell holds. They are for the site's people. So a JSON line of an agent is an event with a code, which the server
sees, too; the words go to a file that only the site's user can read. So does whatever else a node's processes print:
Flower's own log, a traceback, what a data function logs.

One process per node turns lines into JSON: Flower starts others, which all write where the node writes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import socket
import ssl
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fedspa import toml
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.policy import Policy
from fedspa.errors import FedspaError
from fedspa.flower.folders import ServerFolder, SiteFolder, address_parts
from fedspa.privacy.event import noise_modes

_SECONDS = 5.0


def site_health(site: SiteFolder) -> tuple[bool, str]:
    """A site is healthy when its node listens, its policy parses, and its ledger matches its anchor file."""
    try:
        Policy.load(site.policy)
        with Ledger.read(site.ledger) as ledger:
            entries = ledger.position().entries
        site.digests()
    except FedspaError as error:
        return False, f"{site.agent}: unhealthy: {error}"
    if (problem := listens("127.0.0.1", site.port)) is not None:
        return False, f"{site.agent}: unhealthy: its node is not running ({problem})"
    return True, f"{site.agent}: healthy; its ledger holds {entries} entries"


def server_health(server: ServerFolder) -> tuple[bool, str]:
    """Return whether the server answers under its own certificate, and a line that says so."""
    host, port = address_parts(server.address)
    if (problem := answers_tls(host, port, str(server.authority))) is not None:
        return False, f"server: unhealthy: {problem}"
    return True, f"server: healthy; it answers on port {port}"


def listens(host: str, port: int) -> str | None:
    """Return why the port cannot be reached, or None."""
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"
    return None


def answers_tls(host: str, port: int, authority: str) -> str | None:
    """Return why no server with a certificate from `authority` for `host` answers there, or None."""
    try:
        context = ssl.create_default_context(cafile=authority)
        with (
            socket.create_connection((host, port), timeout=_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        return f"{host}:{port} has a certificate that is not signed by {authority} ({error.verify_message})"
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"


# Metric without the prefix `fedspa_` → help text. A name that ends in _total is a counter, any other a gauge.
SITE = {
    "site_rounds_total": "Rounds that the ledger has paid for, by plan",
    "site_epsilon": "Privacy loss over all runs so far, by adversary",
    "site_epsilon_left": "What the policy's cap leaves of it, by adversary",
    "site_epsilon_of_plan": "Privacy loss of each plan by itself",
    "site_seeded_rounds_total": "Rounds whose noise was seeded: they are not private",
    "site_ledger_losses": "Losses of entries that were accepted: no epsilon here counts those",
    "site_payloads_total": "Updates that were sent, each counted once",
    "site_last_round_age_seconds": "Time since the ledger paid for a round",
}
SERVER = {
    "server_rounds_total": "Rounds that are over, by run",
    "server_rounds_planned": "Rounds that the run will have, by run",
    "server_updates_total": "Updates that were taken, by run",
    "server_dropped_total": "Answers that were not, by run and reason",
    "server_uplink_bytes_total": "Bytes of the updates that were taken, by run",
    "server_epsilon": "The server's own bound on the privacy loss of each agent, by run",
    "server_run_finished": "1 where the run has its summary, by run",
    "server_last_round_age_seconds": "Time since a round of the run ended, by run",
}


class Metrics:
    """Samples by name, in Prometheus' text format, which wants those of one name together."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        self._lines: dict[str, list[str]] = {name: [] for name in known}

    def add(self, name: str, value: float, **labels: str) -> None:
        number = f"{value:.10g}" if math.isfinite(value) else "+Inf"
        where = ",".join(f"{key}={json.dumps(label, ensure_ascii=False)}" for key, label in labels.items())
        self._lines[name].append(f"fedspa_{name}{f'{{{where}}}' if where else ''} {number}")

    def __str__(self) -> str:
        lines = []
        for name, found in self._lines.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            head = [f"# HELP fedspa_{name} {self._known[name]}.", f"# TYPE fedspa_{name} {kind}"]
            lines += [*head, *found] if found else []
        return "\n".join(lines) + "\n"


def site_metrics(site: SiteFolder) -> str:
    """Return all metrics of a site, from its ledger and policy. A plan is labelled by its event: sampling, steps and
    noise, all chosen by the server."""
    metrics = Metrics(SITE)
    cap, name = Policy.load(site.policy).cap, site.agent
    with Ledger.read(site.ledger) as ledger:
        spent, first, lost = ledger.spent(name), ledger.first_plan(name), ledger.losses()
        metrics.add("site_payloads_total", ledger.position().releases)
        newest = "(SELECT max(last) FROM total WHERE agent = ?)"
        times = ledger.query(f"SELECT reserved_at FROM entry WHERE sequence = {newest}", name)
    for limit in cap.limits:
        against, epsilon = limit.words or "the server", limit.total(spent, first).epsilon
        metrics.add("site_epsilon", epsilon, against=against)
        metrics.add("site_epsilon_left", max(0.0, limit.epsilon - epsilon), against=against)
    for event, rounds in spent.items():
        metrics.add("site_rounds_total", rounds, plan=str(event))
        # By the rule of the total, of which it is a part: the first plan as it was announced, others by the filter.
        announced = first if first is not None and first.covers({event: rounds}) else None
        metrics.add("site_epsilon_of_plan", cap.limits[0].total({event: rounds}, announced).epsilon, plan=str(event))
    metrics.add("site_seeded_rounds_total", noise_modes(spent).get("seeded", 0))
    metrics.add("site_ledger_losses", len(lost))
    for (reserved_at,) in times:
        metrics.add("site_last_round_age_seconds", _age(datetime.fromisoformat(reserved_at).timestamp()))
    return str(metrics)


def server_metrics(server: ServerFolder) -> str:
    """Return all metrics of the server, from the folders of its runs. Neither scores nor losses: they are computed from
    the server's own records."""
    metrics = Metrics(SERVER)
    for config in sorted(server.runs.glob("*/config.toml")):
        folder, run = config.parent, config.parent.name
        rounds = list(_lines(folder / "metrics.jsonl"))
        planned = toml.read(config, "a run's config").get("federation", {}).get("rounds", 0)
        metrics.add("server_rounds_total", len(rounds), run=run)
        metrics.add("server_rounds_planned", planned if isinstance(planned, int) else 0, run=run)
        metrics.add("server_updates_total", sum(line.get("agents", 0) for line in rounds), run=run)
        metrics.add("server_uplink_bytes_total", sum(line.get("uplink_bytes", 0) for line in rounds), run=run)
        dropped: Counter[str] = Counter()
        for line in _lines(folder / "replies.jsonl"):
            dropped.update(line.get("dropped", {}))
        for reason, times in sorted(dropped.items()):
            metrics.add("server_dropped_total", times, run=run, reason=reason)
        if rounds:
            if isinstance(rounds[-1].get("epsilon"), float):
                metrics.add("server_epsilon", rounds[-1]["epsilon"], run=run)
            age = _age((folder / "metrics.jsonl").stat().st_mtime)
            metrics.add("server_last_round_age_seconds", age, run=run)
        metrics.add("server_run_finished", float((folder / "summary.json").exists()), run=run)
    return str(metrics)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the complete lines; the last one may still be being written."""
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


def _age(then: float) -> float:
    return max(0.0, time.time() - then)


_FORMAT, _PRIVATE = "FEDSPA_LOG_FORMAT", "FEDSPA_LOG_PRIVATE"  # for child processes
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# A line of fedspa's own, as `_line` writes it. Other code may log as JSON, too.
_OURS = re.compile(
    r'\{"time": "[^"]*", "level": "[A-Z]+", "logger": "fedspa[\w.]*", "event": "[^"]*"(, "code": "[^"]*")?\}'
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class JsonFormatter(logging.Formatter):
    """The event of a record and its code. Its message is for the private file."""

    def format(self, record: logging.LogRecord) -> str:
        return _line(record.levelname, record.name, getattr(record, "event", ""), code=getattr(record, "code", None))


def event(name: str, code: str | None = None) -> dict[str, str | None]:
    """Return the `extra` of a call to an agent's logger: its JSON line says this. A call without it gives no line."""
    return {"event": name, "code": code}


def set_up() -> None:
    """Set up fedspa's loggers in an agent's process, by the format that its node was started with: text with the time,
    or JSON lines beside a private file. Elsewhere, as in a simulation, loggers stay as they are."""
    form, private, logger = os.environ.get(_FORMAT), os.environ.get(_PRIVATE), logging.getLogger("fedspa")
    if form is None or logger.handlers or (form == "json" and private is None):
        return
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    logger.handlers = [lines]
    if form == "json":
        lines.addFilter(lambda record: hasattr(record, "event"))
        whole = logging.StreamHandler(os.fdopen(_private(Path(str(private))), "a", encoding="utf-8"))
        whole.setFormatter(logging.Formatter(_TEXT))
        logger.handlers.append(whole)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def as_json(private: Path | None) -> None:
    """Turn all that this process and its children print from now on into JSON lines on standard output. What is no
    line of a log is written to `private`; without such a file, it is an event of its own."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:  # it ends when the last of them has closed its end
        os.close(writing)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        code = 0
        try:
            with (
                os.fdopen(reading, "rb") as lines,
                nullcontext() if private is None else os.fdopen(_private(private), "ab") as rest,
            ):
                convert(lines, sys.stdout.buffer, rest)
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)
    os.close(reading)
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)
    if private is not None:
        os.environ |= {_FORMAT: "json", _PRIVATE: str(private)}


def convert(lines: BinaryIO, out: BinaryIO, private: BinaryIO | None) -> None:
    """Convert lines until they end. Flower's own lines and what a site's code prints are both private."""
    for line in lines:
        text = _COLOUR.sub("", line.decode("utf-8", "replace")).strip()
        if private is not None and not _OURS.fullmatch(text):
            private.write(line)
            private.flush()
        elif text:
            out.write((text if _OURS.fullmatch(text) else _line("INFO", "output", text)).encode() + b"\n")
            out.flush()


def _private(path: Path) -> int:
    """Open a file to append to, which only its owner can read."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def _line(level: str, logger: str, event: str, code: str | None = None) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    entry = {"time": now, "level": level, "logger": logger, "event": event.strip()}
    return json.dumps(entry if code is None else {**entry, "code": code})
