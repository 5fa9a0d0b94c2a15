"""Reports on a ledger: a summary by agent, an export, a verification of the file, and the way to continue after a loss.
Only `accept_loss` writes."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from fedspa.agent.ledger import storage
from fedspa.agent.ledger.ledger import Ledger, Loss, now
from fedspa.agent.ledger.storage import GENESIS, Anchor, damaged, explained
from fedspa.errors import LedgerError, PrivacyError
from fedspa.mechanisms import event_of
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, participations_within, total, worst_case_total
from fedspa.privacy.event import Event, Neighbours, noise_modes

_LONGEST_NAME = 40
MOST_PROBLEMS = 20  # a broken chain breaks at every later entry; nobody reads a million lines
# What an entry holds, by name; the last two are of its release, which there may not be.
COLUMNS = ("sequence", "agent", "run", "message", "event", "announced", "reserved_at", "hash", "digest", "released_at")
_ENTRIES = (
    "SELECT sequence, agent, run, message, event.text, announced, reserved_at, hash, digest, released_at FROM entry "
    "LEFT JOIN event ON event.id = entry.event LEFT JOIN release USING (sequence) ORDER BY sequence"
)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What one agent, or all of them, wrote in one run; times are UTC. A run's own ε is in its summary, by an
    accountant that knew its plan."""

    run: str
    agents: int
    participations: int
    released: int
    first_at: str
    last_at: str


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """What one agent spent over all runs. The last two are None without a cap.

    `epsilon` is that of a cap which would have admitted all of it, `accountant` the method that shows it
    (`cap.total`): against the server with up to the colluders of each run. `epsilon_worst_case` is the same if all
    others collude; without secure aggregation the two are equal. `noise` counts participations by the source of their
    noise: ε is a guarantee only if all of it was `secure` or `exact`. `epsilon_left` is the cap less ε as the cap
    counts, which is the worst case if it trusts no aggregation. As ε grows more slowly than in proportion, plan with
    `participations_left` (of `last_event`) instead.
    """

    agent: str
    runs: tuple[RunSummary, ...]
    spent: Mapping[Event, int]
    last_event: Event
    epsilon: float
    epsilon_worst_case: float
    delta: float
    neighbours: Neighbours
    accountant: str
    noise: Mapping[str, int]
    cap: PrivacyBudget | None
    epsilon_left: float | None
    participations_left: int | None


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """A ledger's agents, and its head: written down elsewhere, `entries` and `head` show later whether this file is
    the same ledger or an older copy. `known_agents` is how many it has, `epsilon_least` and `epsilon_most` are over all
    of them, `agents` are those that were asked for, `noise` counts all participations, `runs` are in the order of their
    first entries (those of the one agent that was asked for)."""

    path: str
    entries: int
    releases: int
    head: str
    losses: tuple[Loss, ...]
    noise: Mapping[str, int]
    known_agents: int
    epsilon_least: float
    epsilon_most: float
    agents: tuple[AgentSummary, ...]
    runs: tuple[RunSummary, ...]


def summary(
    path: str | Path,
    *,
    delta: float,
    neighbours: Neighbours,
    cap: PrivacyBudget | None = None,
    agent: str | None = None,
    most: int | None = None,
) -> LedgerSummary:
    """Summarise who spent what, when, in which runs; ε so far, what is left of `cap`, how many more like the last fit.

    Agents are one `agent`, the `most` that spent most, or all, by name. Each distinct total is computed once, however
    many agents have it.
    """
    with Ledger.read(path) as ledger:
        accounts, spent = _Accounts(ledger, delta, neighbours, cap), _spent_by(ledger, agent)
        if agent is not None and not spent:
            known = [row[0] for row in ledger.query("SELECT DISTINCT agent FROM total ORDER BY agent LIMIT 20")]
            raise LedgerError(f"{path} has no entries of agent {agent!r}; it knows: {', '.join(known) or 'none'}")
        costs = {name: accounts.cost(each).epsilon for name, each in spent.items()}
        chosen = list(spent) if most is None else sorted(spent, key=lambda name: (-costs[name], name))[:most]
        newest = ledger.position()
        return LedgerSummary(
            path=str(path),
            entries=newest.entries,
            releases=newest.releases,
            head=newest.hash,
            losses=tuple(ledger.losses()),
            noise=ledger.noise(),
            known_agents=len(spent),
            epsilon_least=min(costs.values(), default=0.0),
            epsilon_most=max(costs.values(), default=0.0),
            agents=tuple(accounts.summarise(name, spent[name]) for name in chosen),
            runs=runs_of(ledger, agent),
        )


def short(run: str) -> str:
    """Return a run's name as tables show it: its beginning, and enough of what was drawn to tell it from others."""
    return run if len(run) <= _LONGEST_NAME else f"{run[: _LONGEST_NAME - 9]}…{run[-8:]}"


def runs_of(ledger: Ledger, agent: str | None = None) -> tuple[RunSummary, ...]:
    """Return what each run wrote, of all agents or of one, in the order of their first entries."""
    only, values = ("", ()) if agent is None else ("WHERE agent = ?", (agent,))
    rows = ledger.query(
        "SELECT run, count(DISTINCT agent), count(*), count(digest), min(reserved_at), max(reserved_at) FROM entry "
        f"LEFT JOIN release USING (sequence) {only} GROUP BY run ORDER BY min(sequence)",
        *values,
    )
    return tuple(RunSummary(*row) for row in rows)


class _Spent(NamedTuple):
    """(number of the event, how often), by number; and likewise what was announced first, if anything was."""

    counts: tuple[tuple[int, int], ...]
    first: tuple[int, int] | None


def _spent_by(ledger: Ledger, agent: str | None) -> dict[str, _Spent]:
    """Return what each agent spent as the ledger counts it, by name."""
    only, values = ("", ()) if agent is None else ("WHERE total.agent = ?", (agent,))
    rows = ledger.query(
        "SELECT total.agent, total.event, count, first, announced FROM total LEFT JOIN entry ON sequence = first "
        f"{only} ORDER BY total.agent, total.event",
        *values,
    )
    found = {}
    for name, group in groupby(rows, key=itemgetter(0)):
        held = list(group)
        _, event, _, _, announced = min(held, key=itemgetter(3))
        found[name] = _Spent(tuple(row[1:3] for row in held), None if announced is None else (event, announced))
    return found


class _Cost(NamedTuple):
    events: Counter[Event]
    first: FirstPlan | None
    epsilon: float
    worst_case: float
    accountant: str
    left: float | None


class _Accounts:
    """Computes ε of what agents spent: many spent the same, and each total takes milliseconds."""

    def __init__(self, ledger: Ledger, delta: float, neighbours: Neighbours, cap: PrivacyBudget | None) -> None:
        self._ledger, self._delta, self._neighbours, self._cap = ledger, delta, neighbours, cap
        self._events = {number: ledger.parse(text) for number, text in ledger.query("SELECT id, text FROM event")}
        self.cost, self._left = cache(self._priced), cache(self._participations_left)

    def _event(self, number: int) -> Event:
        if number not in self._events:
            raise LedgerError(damaged(self._ledger.path, f"a total counts event {number}, which is missing"))
        return self._events[number]

    def _priced(self, spent: _Spent) -> _Cost:
        events = Counter({self._event(number): count for number, count in spent.counts})
        first = None if spent.first is None else self._ledger.plan(self._event(spent.first[0]), spent.first[1])
        own = total(events, self._delta, self._neighbours, first)
        worst = worst_case_total(events, self._delta, self._neighbours, first, own)
        left = None
        if self._cap is not None:  # of the cap's ε, as the cap counts
            aggregated = any(event.members for event in events)
            counted = self._cap.limits[0].total(events, first) if aggregated else own
            left = max(0.0, self._cap.epsilon - counted.epsilon)
        return _Cost(events, first, own.epsilon, worst.epsilon, own.by, left)

    def _participations_left(self, spent: _Spent, event: Event) -> int | None:
        cost = self.cost(spent)
        return None if self._cap is None else participations_within(event, self._cap, cost.events, cost.first)

    def summarise(self, agent: str, spent: _Spent) -> AgentSummary:
        newest = "SELECT event FROM entry WHERE sequence = (SELECT max(last) FROM total WHERE agent = ?)"
        if not (rows := self._ledger.query(newest, agent)):
            raise LedgerError(damaged(self._ledger.path, "entries are missing that its totals count"))
        last_event, cost = self._event(rows[0][0]), self.cost(spent)
        return AgentSummary(
            agent=agent,
            runs=runs_of(self._ledger, agent),
            spent=cost.events,
            last_event=last_event,
            epsilon=cost.epsilon,
            epsilon_worst_case=cost.worst_case,
            delta=self._delta,
            neighbours=self._neighbours,
            accountant=cost.accountant,
            noise=noise_modes(cost.events),
            cap=self._cap,
            epsilon_left=cost.left,
            participations_left=self._left(spent, last_event),
        )


def export(path: str | Path) -> dict[str, Any]:
    """Return everything in the ledger, as JSON's own types: entries in the order of writing, totals and head."""
    with Ledger.read(path) as ledger:
        newest = asdict(ledger.position())
        content = {
            "kind": "fedspa-ledger",
            "version": storage.SCHEMA_VERSION,
            "head": {name: newest[name] for name in ("entries", "releases", "hash")},
            "noise": ledger.noise(),
            "losses": [asdict(loss) for loss in ledger.losses()],
            "totals": [
                {"agent": agent, "event": json.loads(ledger.parse(text).to_json()), "count": count}
                for agent, text, count in ledger.query(
                    "SELECT agent, text, count FROM total JOIN event ON event.id = total.event ORDER BY agent, event"
                )
            ],
            "entries": [
                {**dict(zip(COLUMNS, row, strict=True)), "event": json.loads(ledger.parse(row[4]).to_json())}
                for row in ledger.query(_ENTRIES)
            ],
        }
    try:
        json.dumps(content)
    except TypeError:  # a column was edited into bytes
        raise LedgerError(damaged(Path(path), "bytes that are no text where text belongs")) from None
    return content


def lines(ledger: Ledger, run: str) -> list[dict[str, Any]]:
    """Return the entries of a run as they are stored, unparsed (`COLUMNS`)."""
    found = ledger.query(_ENTRIES.replace("ORDER", "WHERE run = ? ORDER"), run)
    texts = [column for column in COLUMNS if column not in ("sequence", "announced", "digest", "released_at")]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in found]
    for row in rows:
        if not all(isinstance(row[name], str) for name in texts) or not isinstance(row["digest"], str | None):
            raise LedgerError(damaged(ledger.path, "no text where text belongs"))
    return rows


def verify(path: str | Path) -> list[str]:
    """Read the whole ledger and list what is wrong with it, at most `MOST_PROBLEMS`; empty means that it is valid.

    A file that cannot even be opened as a ledger is a LedgerError. The chain is not keyed: it shows damage and edits,
    not the work of someone who rebuilds the file from the first entry on.
    """
    path, problems = Path(path), list[str]()
    try:
        anchor = storage.read_anchor(path)  # before the view of the ledger that is compared with it
    except LedgerError as error:
        anchor = None
        problems.append(str(error))
    with explained(path), closing(storage.connect(path, "ro", anchored=False)) as connection:
        connection.execute("BEGIN")
        try:
            for problem in _problems(path, connection, anchor):
                problems.append(" ".join(problem.split()))  # what it quotes may have several lines
                if len(problems) == MOST_PROBLEMS:
                    problems.append("... and perhaps more")
                    break
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            problems.append(storage.explain(path, error))
    return problems


def _problems(path: Path, connection: sqlite3.Connection, anchor: Anchor | None) -> Iterator[str]:
    if (gone := storage.missing_spends(path, connection, anchor)) is not None:
        yield f"{gone}; {storage.REMEDY}"
    for (line,) in connection.execute(f"PRAGMA integrity_check({MOST_PROBLEMS})"):
        if line != "ok":
            yield f"SQLite: {line}"
    for table, row, other, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"{table} {row} refers to a missing {other}"
    for number, text in connection.execute("SELECT id, text FROM event"):
        try:
            event_of(text)
        except PrivacyError as error:
            yield f"event {number}: {error}"
    counted = "SELECT agent, event, count(*), min(sequence), max(sequence) FROM entry GROUP BY agent, event"
    kept = "SELECT agent, event, count, first, last FROM total"
    for one, other in ((counted, kept), (kept, counted)):
        for agent, event, *_ in connection.execute(f"{one} EXCEPT {other}"):
            yield f"the total of agent {agent!r}, event {event} differs from its entries"
    previous, last = GENESIS, 0
    for sequence, agent, run, message, text, announced, reserved_at, link, *_ in connection.execute(_ENTRIES):
        if sequence != last + 1:
            yield f"entries {last + 1} to {sequence - 1} are missing"
        try:
            expected = storage.entry_hash(previous, sequence, agent, run, message, text, reserved_at, announced)
        except TypeError:  # a column was edited into bytes
            expected = None
        if link != expected:
            yield f"entry {sequence}: its hash does not fit its content and the entry before it"
        previous, last = link, sequence
    releases, highest = connection.execute("SELECT count(*), coalesce(max(number), 0) FROM release").fetchone()
    if releases != highest:
        yield f"the last release has number {highest}, and there are {releases}"


def accept_loss(path: Path, entries: int) -> Loss:
    """Give the ledger a new anchor at its present end, and record in it what is gone.

    `entries` must be the number that the ledger holds now, which shows that the operator has looked. Any other problem
    is still refused.
    """
    with explained(path), closing(storage.connect(path, "rw", anchored=False)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        newest, anchor = storage.position(connection), None
        try:
            anchor = storage.read_anchor(path)
            problem = storage.missing_spends(path, connection, anchor)
        except LedgerError as error:
            problem = str(error)
        if problem is None:
            raise LedgerError(f"{path} has lost nothing that its anchor states: there is nothing to accept")
        if entries != newest.entries:
            raise LedgerError(
                f"{path} holds {newest.entries} entries, not {entries}; look at it before you accept that"
            )
        known = anchor.entries if anchor is not None and anchor.ledger == newest.ledger else None
        loss = Loss(now(), known, newest.entries)
        connection.execute("INSERT INTO loss VALUES (?, ?, ?)", (loss.accepted_at, loss.known_entries, loss.entries))
        # The record before the anchor: killed in between, the ledger is still refused.
        connection.execute("COMMIT")
        storage.replace_anchor(path, newest)
    return loss
