"""What is spent and left, by agent: a ledger as its reader wants it. Nothing in the file is changed."""

from __future__ import annotations

import heapq
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from fedspa.agent.ledger import witness as ledger_witness
from fedspa.agent.ledger.content import announced_plan, noise, parsed, reading
from fedspa.agent.ledger.errors import damaged
from fedspa.agent.ledger.loss import Loss, losses
from fedspa.errors import LedgerError
from fedspa.privacy.cap import Cap, FirstPlan, Total, floor_total, participations_within, total
from fedspa.privacy.event import Event, Neighbours, noise_modes


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

    `epsilon` is that of a cap which would have admitted all of it, `accountant` what shows that (`cap.total`): against
    the server with up to the colluders of each run. `epsilon_floor` is the same against one who colludes with all other
    members; without secure aggregation the two are one. `noise` counts its participations by where the noise came from:
    ε is a guarantee only where all of it was `secure` or `exact`. `epsilon_left` is the cap less ε as the cap counts,
    which is the floor where it trusts no aggregation. As ε grows more slowly than in proportion, plan with
    `participations_left` (of `last_event`) instead.
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
    """Who spent what, when, in which runs; ε so far, what is left of `cap`, how many more like the last fit.

    It tells of one `agent`, of the `most` that spent most, or of all, by name. Each distinct total is priced once,
    however many agents have it.
    """
    with reading(path) as (path, connection):
        prices = _Prices(path, connection, delta, neighbours, cap)
        tally: Counter[_Spent] = Counter()
        for _, spent in _totals(connection, agent):
            tally[spent] += 1
        if agent is not None and not tally:
            known = [row[0] for row in connection.execute("SELECT DISTINCT agent FROM total ORDER BY agent LIMIT 20")]
            raise LedgerError(f"{path} has no entries of agent {agent!r}; it knows: {', '.join(known) or 'none'}")
        costs = [prices.of(spent).epsilon for spent in tally] or [0.0]
        chosen: Iterable[tuple[str, _Spent]] = _totals(connection, agent)
        if most is not None:
            chosen = heapq.nsmallest(most, chosen, key=lambda one: (-prices.of(one[1]).epsilon, one[0]))
        head = ledger_witness.head(connection)
        return LedgerSummary(
            path=str(path),
            entries=head.entries,
            releases=head.releases,
            head=head.hash,
            losses=tuple(losses(connection)),
            noise=noise(path, connection),
            known_agents=sum(tally.values()),
            epsilon_least=min(costs),
            epsilon_most=max(costs),
            agents=tuple(_agent(path, connection, name, spent, prices) for name, spent in chosen),
        )


def each_agent(
    path: str | Path, *, delta: float, neighbours: Neighbours, cap: Cap | None = None
) -> Iterator[AgentSummary]:
    """All of `summary`'s agents, by name, one at a time: a ledger may have more than anyone wants in memory."""
    with reading(path) as (path, connection):
        prices = _Prices(path, connection, delta, neighbours, cap)
        for name, spent in _totals(connection):
            yield _agent(path, connection, name, spent, prices)


class _Spent(NamedTuple):
    """(number of the event, how often), by number; and likewise what was announced first, if anything was."""

    counts: tuple[tuple[int, int], ...]
    first: tuple[int, int] | None


def _totals(connection: sqlite3.Connection, agent: str | None = None) -> Iterator[tuple[str, _Spent]]:
    """Agents by name, with what they spent as the ledger counts it."""
    only, values = ("", ()) if agent is None else (" WHERE total.agent = ?", (agent,))
    rows = connection.execute(
        "SELECT total.agent, total.event, total.count, entry.event, plan.participations FROM total "
        "LEFT JOIN plan ON plan.agent = total.agent LEFT JOIN entry ON entry.sequence = plan.sequence"
        f"{only} ORDER BY total.agent, total.event",
        values,
    )
    for name, of_one in groupby(rows, key=itemgetter(0)):
        held = list(of_one)
        event, participations = held[0][3:]
        first = None if event is None else (event, participations)
        yield name, _Spent(tuple((row[1], row[2]) for row in held), first)


class _Price(NamedTuple):
    events: Mapping[Event, int]
    first: FirstPlan | None
    epsilon: float
    floor: float
    accountant: str
    left: float | None


class _Prices:
    """ε of what agents spent: many spent the same, and pricing takes milliseconds."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, delta: float, neighbours: Neighbours, cap: Cap | None
    ) -> None:
        self.delta, self.neighbours, self.cap = delta, neighbours, cap
        self._events = {number: parsed(path, text) for number, text in connection.execute("SELECT id, text FROM event")}
        self._path = path
        self._known: dict[_Spent, _Price] = {}
        self._left: dict[tuple[_Spent, Event], int] = {}

    def of(self, spent: _Spent) -> _Price:
        if spent not in self._known:
            try:
                events = Counter({self._events[number]: count for number, count in spent.counts})
                first = None
                if spent.first is not None:
                    first = announced_plan(self._path, self._events[spent.first[0]], spent.first[1])
            except KeyError as error:
                raise LedgerError(damaged(self._path, f"a total counts event {error}, which is missing")) from None
            own = total(events, self.delta, self.neighbours, first)
            floor = floor_total(events, self.delta, self.neighbours, first, own)
            left = None if self.cap is None else self._left_of(self.cap, events, first, own)
            self._known[spent] = _Price(events, first, own.epsilon, floor.epsilon, own.by, left)
        return self._known[spent]

    def _left_of(self, cap: Cap, events: Counter[Event], first: FirstPlan | None, own: Total) -> float:
        """Of the cap's ε, as the cap counts."""
        if any(event.members for event in events):
            own = cap.limits[0].total(events, first)
        return max(0.0, cap.epsilon - own.epsilon)

    def left(self, spent: _Spent, event: Event) -> int | None:
        """How many more of `event` fit under the cap."""
        if self.cap is None:
            return None
        if (spent, event) not in self._left:
            price = self.of(spent)
            self._left[spent, event] = participations_within(event, self.cap, price.events, price.first)
        return self._left[spent, event]


def _agent(path: Path, connection: sqlite3.Connection, agent: str, spent: _Spent, prices: _Prices) -> AgentSummary:
    runs = tuple(
        RunSummary(run, participations, released, _time(path, connection, first), _time(path, connection, last))
        for run, participations, released, first, last in connection.execute(
            "SELECT run, count(*), count(digest), min(sequence), max(sequence) FROM entry "
            "LEFT JOIN release USING (sequence) WHERE agent = ? GROUP BY run ORDER BY min(sequence)",
            (agent,),
        )
    )
    last_text = _value(
        path,
        connection,
        "SELECT text FROM entry JOIN event ON event.id = entry.event WHERE sequence = "
        "(SELECT max(sequence) FROM entry WHERE agent = ?)",
        agent,
    )
    last_event, price, cap = parsed(path, last_text), prices.of(spent), prices.cap
    return AgentSummary(
        agent=agent,
        runs=runs,
        spent=price.events,
        last_event=last_event,
        epsilon=price.epsilon,
        epsilon_floor=price.floor,
        delta=prices.delta,
        neighbours=prices.neighbours,
        accountant=price.accountant,
        noise=noise_modes(price.events),
        cap=cap,
        epsilon_left=price.left,
        participations_left=prices.left(spent, last_event),
    )


def _time(path: Path, connection: sqlite3.Connection, sequence: int) -> str:
    return _value(path, connection, "SELECT reserved_at FROM entry WHERE sequence = ?", sequence)


def _value(path: Path, connection: sqlite3.Connection, query: str, key: str | int) -> str:
    """The text that `query` finds. Opening checks the totals, not the entries behind them, so it may be missing."""
    row = connection.execute(query, (key,)).fetchone()
    if row is None:
        raise LedgerError(damaged(path, "entries are missing that its totals count"))
    return str(row[0])
