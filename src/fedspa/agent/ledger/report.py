"""What a ledger's reader asks for: a summary by agent, an export, whether the file can be trusted, and how to continue
after a loss. Only `accept_loss` writes."""

from __future__ import annotations

import heapq
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from fedspa.agent.ledger import storage
from fedspa.agent.ledger.ledger import Ledger, Loss, now
from fedspa.agent.ledger.storage import GENESIS, Anchor, damaged, explained
from fedspa.errors import LedgerError, PrivacyError
from fedspa.mechanisms import event_of
from fedspa.privacy.cap import Cap, FirstPlan, floor_total, participations_within, total
from fedspa.privacy.event import Event, Neighbours, noise_modes

MOST_PROBLEMS = 20  # a broken chain breaks at every later entry; nobody reads a million lines
# What an entry holds, by name; the last two are of its release, which there may not be.
COLUMNS = ("sequence", "agent", "run", "message", "event", "announced", "reserved_at", "hash", "digest", "released_at")
_ENTRIES = (
    "SELECT sequence, agent, run, message, event.text, announced, reserved_at, hash, digest, released_at FROM entry "
    "LEFT JOIN event ON event.id = entry.event LEFT JOIN release USING (sequence) ORDER BY sequence"
)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One agent's entries in one run; times are UTC, of its first and last entry in the order of writing."""

    run: str
    participations: int
    released: int
    first_at: str
    last_at: str


@dataclass(frozen=True, slots=True)
class AgentSummary:
    """What one agent spent over all runs. The last two are None without a cap.

    `epsilon` is that of a cap which would have admitted all of it, `accountant` the method that shows it (`cap.total`):
    against the server with up to the colluders of each run. `epsilon_floor` is the same if all other members collude;
    without secure aggregation the two are equal. `noise` counts participations by the source of their noise: ε is a
    guarantee only if all of it was `secure` or `exact`. `epsilon_left` is the cap less ε as the cap counts, which is
    the floor if it trusts no aggregation. As ε grows more slowly than in proportion, plan with `participations_left`
    (of `last_event`) instead.
    """

    agent: str
    runs: tuple[RunSummary, ...]
    spent: Mapping[Event, int]
    last_event: Event
    epsilon: float
    epsilon_floor: float
    delta: float
    neighbours: Neighbours
    accountant: str
    noise: Mapping[str, int]
    cap: Cap | None
    epsilon_left: float | None
    participations_left: int | None


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """A ledger's agents, and its head: written down elsewhere, `entries` and `head` show later whether this file is
    the same ledger or an older copy. `known_agents` is how many it has, `epsilon_least` and `epsilon_most` are over all
    of them, `agents` are those that were asked for, `noise` counts all participations."""

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


def summary(
    path: str | Path,
    *,
    delta: float,
    neighbours: Neighbours,
    cap: Cap | None = None,
    agent: str | None = None,
    most: int | None = None,
) -> LedgerSummary:
    """Summarise who spent what, when, in which runs; ε so far, what is left of `cap`, how many more like the last fit.

    Agents are one `agent`, the `most` that spent most, or all, by name. Each distinct total is priced once, however
    many agents have it.
    """
    with Ledger.read(path) as ledger:
        prices = _Prices(ledger, delta, neighbours, cap)
        tally = Counter(spent for _, spent, _ in _totals(ledger, agent))
        if agent is not None and not tally:
            known = [row[0] for row in ledger.query("SELECT DISTINCT agent FROM total ORDER BY agent LIMIT 20")]
            raise LedgerError(f"{path} has no entries of agent {agent!r}; it knows: {', '.join(known) or 'none'}")
        costs = [prices.of(spent).epsilon for spent in tally] or [0.0]
        chosen: Iterable[_Totals] = _totals(ledger, agent)
        if most is not None:
            chosen = heapq.nsmallest(most, chosen, key=lambda one: (-prices.of(one.spent).epsilon, one.agent))
        newest = ledger.position()
        return LedgerSummary(
            path=str(path),
            entries=newest.entries,
            releases=newest.releases,
            head=newest.hash,
            losses=tuple(ledger.losses()),
            noise=ledger.noise(),
            known_agents=tally.total(),
            epsilon_least=min(costs),
            epsilon_most=max(costs),
            agents=tuple(prices.summarise(one) for one in chosen),
        )


def each_agent(
    path: str | Path, *, delta: float, neighbours: Neighbours, cap: Cap | None = None
) -> Iterator[AgentSummary]:
    """Yield all of `summary`'s agents, by name, one at a time: a ledger may have more than fit in memory."""
    with Ledger.read(path) as ledger:
        prices = _Prices(ledger, delta, neighbours, cap)
        yield from map(prices.summarise, _totals(ledger))


class _Spent(NamedTuple):
    """(number of the event, how often), by number; and likewise what was announced first, if anything was."""

    counts: tuple[tuple[int, int], ...]
    first: tuple[int, int] | None


class _Totals(NamedTuple):
    agent: str
    spent: _Spent
    last: int  # the agent's newest entry


def _totals(ledger: Ledger, agent: str | None = None) -> Iterator[_Totals]:
    """Yield agents by name, with what they spent as the ledger counts it."""
    only, values = ("", ()) if agent is None else ("WHERE total.agent = ?", (agent,))
    rows = ledger.iterate(
        "SELECT total.agent, total.event, count, first, last, announced FROM total LEFT JOIN entry ON sequence = first "
        f"{only} ORDER BY total.agent, total.event",
        *values,
    )
    for name, group in groupby(rows, key=itemgetter(0)):
        held = list(group)
        _, event, _, _, _, announced = min(held, key=itemgetter(3))
        counts = tuple((row[1], row[2]) for row in held)
        first = None if announced is None else (event, announced)
        yield _Totals(name, _Spent(counts, first), max(row[4] for row in held))


class _Price(NamedTuple):
    events: Counter[Event]
    first: FirstPlan | None
    epsilon: float
    floor: float
    accountant: str
    left: float | None


class _Prices:
    """Computes ε of what agents spent: many spent the same, and each total takes milliseconds."""

    def __init__(self, ledger: Ledger, delta: float, neighbours: Neighbours, cap: Cap | None) -> None:
        self._ledger, self._delta, self._neighbours, self._cap = ledger, delta, neighbours, cap
        self._events = {number: ledger.parse(text) for number, text in ledger.query("SELECT id, text FROM event")}
        self._known: dict[_Spent, _Price] = {}
        self._left: dict[tuple[_Spent, Event], int] = {}

    def of(self, spent: _Spent) -> _Price:
        if spent not in self._known:
            events = Counter({self._event(number): count for number, count in spent.counts})
            first = None if spent.first is None else self._ledger.plan(self._event(spent.first[0]), spent.first[1])
            own = total(events, self._delta, self._neighbours, first)
            floor = floor_total(events, self._delta, self._neighbours, first, own)
            left = None
            if self._cap is not None:  # of the cap's ε, as the cap counts
                aggregated = any(event.members for event in events)
                counted = self._cap.limits[0].total(events, first) if aggregated else own
                left = max(0.0, self._cap.epsilon - counted.epsilon)
            self._known[spent] = _Price(events, first, own.epsilon, floor.epsilon, own.by, left)
        return self._known[spent]

    def _event(self, number: int) -> Event:
        if number not in self._events:
            raise LedgerError(damaged(self._ledger.path, f"a total counts event {number}, which is missing"))
        return self._events[number]

    def _participations_left(self, spent: _Spent, event: Event) -> int | None:
        if self._cap is None:
            return None
        if (spent, event) not in self._left:
            price = self.of(spent)
            self._left[spent, event] = participations_within(event, self._cap, price.events, price.first)
        return self._left[spent, event]

    def summarise(self, one: _Totals) -> AgentSummary:
        newest = self._ledger.query("SELECT event FROM entry WHERE sequence = ?", one.last)
        if not newest:
            raise LedgerError(damaged(self._ledger.path, "entries are missing that its totals count"))
        last_event, price = self._event(newest[0][0]), self.of(one.spent)
        runs = self._ledger.query(
            "SELECT old.run, entries, released, old.reserved_at, new.reserved_at FROM (SELECT count(*) AS entries, "
            "count(digest) AS released, min(sequence) AS first, max(sequence) AS last FROM entry LEFT JOIN release "
            "USING (sequence) WHERE agent = ? GROUP BY run) JOIN entry AS old ON old.sequence = first "
            "JOIN entry AS new ON new.sequence = last ORDER BY first",
            one.agent,
        )
        return AgentSummary(
            agent=one.agent,
            runs=tuple(RunSummary(*run) for run in runs),
            spent=price.events,
            last_event=last_event,
            epsilon=price.epsilon,
            epsilon_floor=price.floor,
            delta=self._delta,
            neighbours=self._neighbours,
            accountant=price.accountant,
            noise=noise_modes(price.events),
            cap=self._cap,
            epsilon_left=price.left,
            participations_left=self._participations_left(one.spent, last_event),
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


def lines(path: str | Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the head's hash, and the entries as they are stored, unparsed (`COLUMNS`)."""
    with Ledger.read(path) as ledger:
        head, found = ledger.position().hash, ledger.query(_ENTRIES)
    texts = [column for column in COLUMNS if column not in ("sequence", "announced", "digest", "released_at")]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in found]
    for row in rows:
        if not all(isinstance(row[name], str) for name in texts) or not isinstance(row["digest"], str | None):
            raise LedgerError(damaged(Path(path), "no text where text belongs"))
    return head, rows


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

    `entries` must be what the ledger holds now: whoever accepts a loss has looked. Anything else that is wrong is still
    refused.
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
