"""An agent's durable record of what it spent, over all runs, restarts and crashes.

Local DP does not trust the server, so the agent keeps its own ledger: `reserve` writes a participation *before*
training, `release` marks it just before the update leaves. A crash in between wastes budget and hides nothing. What the
stored events cost together is computed by `privacy.budget`.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from fedspa.agent.ledger import storage
from fedspa.agent.ledger.storage import damaged, explained
from fedspa.errors import BudgetError, LedgerError, PrivacyError
from fedspa.mechanisms import UnknownKind, event_of
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, Total, exceeded_limit, total
from fedspa.privacy.event import MOST, Event, Neighbours, noise_modes, seeded_warning, shown, shown_left

NUMBERED = "agent-"  # the names of agents that have none: with their numbers


@dataclass(frozen=True, slots=True)
class Reservation:
    """One entry. `fresh` is False if an earlier call made it; `digest` names what was released under it, if any."""

    sequence: int
    agent: str
    event: Event
    fresh: bool
    digest: str | None


@dataclass(frozen=True, slots=True)
class Loss:
    """An accepted loss: the entries that the anchor stated (None: the anchor was lost too) and the entries left."""

    accepted_at: str
    known_entries: int | None
    entries: int

    def __str__(self) -> str:
        gone = "an unknown number of" if self.known_entries is None else max(0, self.known_entries - self.entries)
        when = f"accepted {self.accepted_at[:19]} UTC"
        return f"{gone} entries behind entry {self.entries} may be lost ({when}); no ε counts them"


class Ledger:
    """An open ledger. One per process and thread; any number of processes may share the file."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, simulated: bool = False) -> None:
        self.path = path
        self._connection = connection
        self._simulated = simulated
        self._process = os.getpid()
        self._writing = False
        self._file = _file_id(path)
        self.name = self.position().ledger  # drawn when it was made: another file under the same path has another

    @classmethod
    def open(cls, path: str | Path, *, create: bool = True, simulated: bool = False) -> Self:
        """Open the ledger at `path`; with `create`, make it if there is no file. A bad file is never replaced. A ledger
        that is behind its anchor has lost spends and is refused, and so is one with an event that no accountant here
        composes.

        A deployment creates its ledger once and from then on opens it with `create=False`: a ledger that went missing
        is then an error and not a fresh budget. A `simulated` ledger survives a killed process but not a power loss: it
        does not wait for the disk, since nothing leaves a simulation.
        """
        path = Path(path)
        if create and not path.exists():
            storage.create(path)
        ledger = cls(path, storage.connect(path, "rw"), simulated=simulated)
        try:
            for (text,) in ledger.query("SELECT text FROM event"):
                ledger.parse(text)
            if simulated:
                ledger.query("PRAGMA synchronous=NORMAL")
        except LedgerError:
            ledger.close()
            raise
        return ledger

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Open the ledger at `path` for reading: a view of one moment, whatever other processes write meanwhile."""
        ledger = cls(Path(path), storage.connect(Path(path), "ro"))
        ledger.query("BEGIN")
        return ledger

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def query(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows that an SQL statement gives."""
        with explained(self.path):
            return self._connection.execute(statement, values).fetchall()

    def parse(self, text: str) -> Event:
        """Return the event that this ledger stores as `text`."""
        try:
            return event_of(text)
        except UnknownKind as error:  # a backup would lack what was spent since
            raise LedgerError(f"{self.path} was written by a newer fedspa ({error}); upgrade fedspa here") from error
        except PrivacyError as error:
            raise LedgerError(f"{self.path} holds what is no event: {error}; restore it from a backup") from error

    def reserve(
        self,
        agent: str,
        event: Event,
        run: str,
        message: str,
        *,
        cap: PrivacyBudget | None = None,
        announced: int | None = None,
    ) -> Reservation:
        """Record that `agent` takes part: durable on return, and counted once per (agent, run, message).

        With a `cap`, check and record are one step: of two processes that both want the last of a budget, one gets a
        BudgetError. A reservation that is not `fresh` pays for one release only: see `release`. `announced` is how
        often the run's plan has the agent take part, in all; kept with the agent's first entry, it makes that plan the
        one that is accounted as a whole (`PrivacyBudget.admits`).
        """
        return self.reserve_many({agent: event}, run, message, cap=cap, announced=announced)[0]

    def reserve_many(
        self,
        events: Mapping[str, Event],
        run: str,
        message: str,
        *,
        cap: PrivacyBudget | None = None,
        announced: int | None = None,
    ) -> list[Reservation]:
        """`reserve` for all agents of a round in one durable write: all of them, or (on any error) none."""
        for name, value in (("run", run), ("message", message), *(("agent", agent) for agent in events)):
            check_name(name, value)
        if announced is not None and not 1 <= announced <= MOST:
            raise LedgerError(f"announced is {announced}; it must lie between 1 and {MOST:g}")
        if cap is not None and not self._writing:
            # Computing ε takes a fraction of a second and its result is cached. Computed here first, it holds the lock
            # below for that long only if another process changed the total in between.
            self._over_cap({agent: (event, 1) for agent, event in events.items()}, cap, announced)
        with self.transaction():
            self.require_unit(events)
            found = self._find(events, run, message)
            for agent, entry in found.items():
                if entry.event != events[agent]:
                    raise LedgerError(
                        f"agent {agent!r}, run {run!r}, message {message!r} is recorded with another event "
                        f"({entry.event.to_json()}, now {events[agent].to_json()}); use a new message name"
                    )
            new = {agent: event for agent, event in events.items() if agent not in found}
            if cap is not None:
                for agent in self._over_cap({agent: (event, 1) for agent, event in new.items()}, cap, announced):
                    self.require(agent, new[agent], cap, announced=announced)
            found |= self._insert(new, run, message, announced)
            return [found[agent] for agent in events]

    def _insert(
        self, events: Mapping[str, Event], run: str, message: str, announced: int | None
    ) -> dict[str, Reservation]:
        ids = {event: self._event_id(event.to_json()) for event in dict.fromkeys(events.values())}
        spent = {agent for (agent,) in self._of_agents("SELECT DISTINCT agent FROM total", events)}
        newest, time = self.position(), now()
        link, rows, made = newest.hash, [], {}
        for sequence, (agent, event) in enumerate(events.items(), newest.entries + 1):
            first = None if agent in spent else announced
            number, text = ids[event]
            link = storage.entry_hash(link, sequence, agent, run, message, text, time, first)
            rows.append((sequence, agent, run, message, number, first, time, link))
            made[agent] = Reservation(sequence, agent, event, fresh=True, digest=None)
        self._connection.executemany("INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self._connection.executemany(
            "INSERT INTO total VALUES (?, ?, 1, ?, ?) "
            "ON CONFLICT DO UPDATE SET count = count + 1, last = excluded.last",
            [(agent, number, sequence, sequence) for sequence, agent, _, _, number, *_ in rows],
        )
        return made

    def _event_id(self, text: str) -> tuple[int, str]:
        """Return the number under which this event is stored, from now on if it was not, and its text."""
        if not (found := self.query("SELECT id FROM event WHERE text = ?", text)):
            found = self.query("INSERT INTO event (text) VALUES (?) RETURNING id", text)
        return found[0][0], text

    def require_unit(self, events: Mapping[str, Event]) -> None:
        """Raise if an agent's entries protect something else than its event here. They protect records, or they
        protect persons: a total of both would be neither's."""
        stored = {self.parse(text).unit for (text,) in self.query("SELECT text FROM event")}
        if len(stored | {event.unit for event in events.values()}) > 1:  # in some agent's entries, maybe not in these
            for agent, event in events.items():
                _check_unit(agent, self.spent(agent), event)

    def release(self, agent: str, run: str, message: str, digest: str) -> None:
        """Mark that the update named by `digest` is about to be sent: call it after training and *before* sending.

        An entry pays for one release. The same digest again (the same bytes, sent twice) costs nothing and is allowed;
        another one is a LedgerError, because noise drawn anew is a new spend and needs a reservation of its own.
        """
        self.release_many({agent: digest}, run, message)

    def release_many(self, digests: Mapping[str, str], run: str, message: str) -> None:
        """`release` for all agents of a round in one durable write."""
        for digest in digests.values():
            check_name("digest", digest)
        with self.transaction():
            found, rows, time = self._find(digests, run, message), [], now()
            for agent, digest in digests.items():
                if agent not in found:
                    raise LedgerError(
                        f"agent {agent!r}, run {run!r}, message {message!r} was never reserved; reserve before training"
                    )
                if found[agent].digest is None:
                    rows.append((found[agent].sequence, digest, time))
                elif found[agent].digest != digest:
                    raise LedgerError(
                        f"agent {agent!r}, run {run!r}, message {message!r} has already released another update; "
                        "send that one again or reserve under a new message name"
                    )
            self._connection.executemany("INSERT INTO release (sequence, digest, released_at) VALUES (?, ?, ?)", rows)

    def find(self, agent: str, run: str, message: str) -> Reservation | None:
        """Return the entry of this triple, if there is one."""
        return self._find([agent], run, message).get(agent)

    def _find(self, agents: Iterable[str], run: str, message: str) -> dict[str, Reservation]:
        rows = self._of_agents(
            "SELECT agent, sequence, text, digest FROM entry JOIN event ON event.id = entry.event "
            "LEFT JOIN release USING (sequence)",
            agents,
            "AND run = ? AND message = ?",
            run,
            message,
        )
        return {
            agent: Reservation(sequence, agent, self.parse(text), fresh=False, digest=digest)
            for agent, sequence, text, digest in rows
        }

    def _of_agents(self, select: str, agents: Iterable[str], more: str = "", *values: str) -> list[tuple[Any, ...]]:
        where = "WHERE agent IN (SELECT value FROM json_each(?))"
        return self.query(f"{select} {where} {more}", json.dumps(list(agents)), *values)

    def require_known(self, agent: str) -> None:
        """Raise if there are entries and none of `agent`: the holder of records calls them by one name."""
        if not self.spent(agent) and (others := self.query("SELECT DISTINCT agent FROM total ORDER BY agent LIMIT 5")):
            raise LedgerError(
                f"{self.path} has entries of {', '.join(repr(other) for (other,) in others)} and none of {agent!r}: "
                "another name would be a fresh budget; use the name that the records have, or for other records a "
                "ledger of their own"
            )

    def participations(self, agent: str, run: str) -> int:
        """Return the number of entries of `agent` in `run`."""
        count: int = self.query("SELECT count(*) FROM entry WHERE agent = ? AND run = ?", agent, run)[0][0]
        return count

    def participations_by_agent(self, run: str) -> Counter[str]:
        """Return the number of entries of each agent in `run`."""
        return Counter(dict(self.query("SELECT agent, count(*) FROM entry WHERE run = ? GROUP BY agent", run)))

    def events(self, run: str) -> set[Event]:
        """Return the distinct events of `run`, of all its agents."""
        rows = self.query("SELECT DISTINCT text FROM entry JOIN event ON event.id = entry.event WHERE run = ?", run)
        return {self.parse(text) for (text,) in rows}

    def spent(self, agent: str) -> Counter[Event]:
        """Return the distinct events of `agent` in all its runs, and how often each."""
        rows = self.query("SELECT text, count FROM total JOIN event ON event.id = total.event WHERE agent = ?", agent)
        return Counter({self.parse(text): count for text, count in rows})

    def runs_with(self, agents: Iterable[str]) -> list[str]:
        """List the runs in which a record of `agents` may have taken part, oldest first. A simulation that numbers its
        agents may have given it to any of them: such a run always counts, and every run does where some of `agents` are
        numbered. Left out are runs of named agents only, none of them one of `agents`."""
        names = list(agents)
        rows = self.query(
            "SELECT run FROM entry WHERE ? OR agent IN (SELECT value FROM json_each(?)) OR agent GLOB ? "
            "GROUP BY run ORDER BY min(sequence)",
            any(name.startswith(NUMBERED) and name[len(NUMBERED) :].isdigit() for name in names),
            json.dumps(names),
            f"{NUMBERED}[0-9]*",
        )
        return [run for (run,) in rows]

    def run_count(self) -> int:
        """Return the number of runs that have entries."""
        return int(self.query("SELECT count(DISTINCT run) FROM entry")[0][0])

    def largest(self, runs: Iterable[str]) -> Counter[Event]:
        """Return what no record can have spent more than in `runs`, whichever agent held it: of each, the most of any
        agent."""
        counts: Counter[Event] = Counter()
        for text, count in self.query(
            "SELECT text, max(count) FROM (SELECT run, event, count(*) AS count FROM entry WHERE run IN "
            "(SELECT value FROM json_each(?)) GROUP BY run, agent, event) JOIN event ON event.id = event "
            "GROUP BY run, event",
            json.dumps(list(runs)),
        ):
            counts[self.parse(text)] += count
        return counts

    def first_plan(self, agent: str) -> FirstPlan | None:
        """Return what was announced with the first entry of `agent`, if anything was."""
        return self._plan_of("(SELECT min(first) FROM total WHERE agent = ?)", agent)

    def first_plan_of(self, runs: Iterable[str]) -> FirstPlan | None:
        """Return what was announced with the first entry of all `runs`, if anything was."""
        return self._plan_of(
            "(SELECT min(sequence) FROM entry WHERE run IN (SELECT value FROM json_each(?)))", json.dumps(list(runs))
        )

    def _plan_of(self, sequence: str, value: str) -> FirstPlan | None:
        rows = self.query(
            f"SELECT text, announced FROM entry JOIN event ON event.id = entry.event WHERE sequence = {sequence}", value
        )
        return None if not rows else self.plan(self.parse(rows[0][0]), rows[0][1])

    def plan(self, event: Event, announced: object) -> FirstPlan | None:
        """Return the first plan that the columns of a first entry hold; damage may have changed them."""
        if announced is not None and not (isinstance(announced, int) and announced >= 1):
            raise LedgerError(damaged(self.path, "a first plan has no whole number of participations"))
        return None if announced is None else FirstPlan(event, announced)

    def noise(self) -> dict[str, int]:
        """Return how many participations had their noise from which source."""
        rows = self.query("SELECT text, sum(count) FROM total JOIN event ON event.id = total.event GROUP BY event")
        return noise_modes({self.parse(text): count for text, count in rows})

    def losses(self) -> list[Loss]:
        """Return the losses that an operator accepted, oldest first: no ε counts them."""
        return [Loss(*row) for row in self.query("SELECT accepted_at, known_entries, entries FROM loss ORDER BY rowid")]

    def position(self) -> storage.Anchor:
        """Return the name of the ledger, its numbers of entries and releases, and the hash of its newest entry."""
        with explained(self.path):
            return storage.position(self._connection)

    def total(self, agent: str, delta: float, neighbours: Neighbours) -> Total:
        """Return the verified total ε of `agent` over all its runs, at `delta` under `neighbours`, and the method that
        shows it: against the server with up to the colluders of each run."""
        return total(self.spent(agent), delta, neighbours, self.first_plan(agent))

    def epsilon(self, agent: str, delta: float, neighbours: Neighbours) -> float:
        """Return the ε of `total` alone."""
        return self.total(agent, delta, neighbours).epsilon

    def would_exceed(
        self, agent: str, event: Event, cap: PrivacyBudget, *, participations: int = 1, announced: int | None = None
    ) -> bool:
        """Return whether that many more `event`s would bring `agent` above its cap. Advice: `reserve(cap=...)` decides.

        An agent without entries has `announced` of them as its first plan (if that is not given: `participations`).
        """
        after, plan = self._after(agent, event, participations, announced)
        return exceeded_limit(after, cap, plan) is not None

    def require(
        self, agent: str, event: Event, cap: PrivacyBudget, *, participations: int = 1, announced: int | None = None
    ) -> None:
        """Raise a BudgetError, with the budget that remains, if `would_exceed` is true."""
        events, plan = self._after(agent, event, participations, announced)
        if (limit := exceeded_limit(events, cap, plan)) is None:
            return
        spent = limit.total(self.spent(agent), self.first_plan(agent)).epsilon
        after = limit.total(events, plan)
        by = "; ".join(filter(None, (after.by, limit.words, seeded_warning(noise_modes(events)))))
        raise BudgetError(
            f"agent {agent!r} has ε = {shown_left(limit.epsilon, spent)} left: {shown(spent)} of its cap "
            f"{limit.epsilon:.4g} is spent, and {participations} more participation{'s' * (participations > 1)} would "
            f"bring it to {shown(after.epsilon)} (δ = {cap.delta:g}, {cap.neighbours}, {by}); "
            "ask for fewer or noisier participations"
        )

    def require_all(self, participations: Mapping[str, int], event: Event, cap: PrivacyBudget) -> None:
        """`require` for many agents, each with its number of further participations."""
        wanted = {agent: (event, count) for agent, count in participations.items()}
        for agent in self._over_cap(wanted, cap, None):
            self.require(agent, event, cap, participations=participations[agent])

    def _over_cap(
        self, wanted: Mapping[str, tuple[Event, int]], cap: PrivacyBudget, announced: int | None
    ) -> list[str]:
        """List the agents that as many further events would bring above the budget. Agents of a simulation mostly spent
        the same, so that each distinct total is computed once."""
        spent: dict[str, Counter[Event]] = {agent: Counter() for agent in wanted}
        for agent, text, count in self._of_agents(
            "SELECT agent, text, count FROM total JOIN event ON event.id = total.event", wanted
        ):
            spent[agent][self.parse(text)] = count
        first_entries = self.query(
            "SELECT entry.agent, text, announced FROM entry JOIN event ON event.id = entry.event WHERE sequence IN "
            "(SELECT min(first) FROM total WHERE agent IN (SELECT value FROM json_each(?)) GROUP BY agent)",
            json.dumps(list(wanted)),
        )
        plans = {agent: self.plan(self.parse(text), number) for agent, text, number in first_entries}
        known: dict[object, bool] = {}
        over = []
        for agent, (event, count) in wanted.items():
            _check_unit(agent, spent[agent], event)
            plan = plans.get(agent) if spent[agent] else FirstPlan(event, announced or count)
            after = spent[agent] + Counter({event: count})
            key = frozenset(after.items()), plan
            if key not in known:
                known[key] = exceeded_limit(after, cap, plan) is not None
            over += [agent] if known[key] else []
        return over

    def _after(
        self, agent: str, event: Event, participations: int, announced: int | None
    ) -> tuple[Counter[Event], FirstPlan | None]:
        """Return what `agent` will have spent, and its first plan: what it began with, or would begin with now."""
        if participations < 1:
            raise LedgerError(f"participations is {participations}; it must be at least 1")
        spent = self.spent(agent)
        _check_unit(agent, spent, event)
        plan = self.first_plan(agent) if spent else FirstPlan(event, announced or participations)
        return spent + Counter({event: participations}), plan

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other processes from writing until the block ends: what is checked in it still holds when it writes.
        The writes in it become durable together at its end, with the anchor; if an error leaves the outermost block,
        none does."""
        if self._writing:
            yield
            return
        if os.getpid() != self._process:
            # SQLite's locks do not survive a fork: two processes on one connection can damage the file.
            raise LedgerError(f"the ledger {self.path} was opened before a fork; open it in the process that uses it")
        with explained(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            self._writing = True
            try:
                if _file_id(self.path) != self._file:
                    raise LedgerError(
                        f"{self.path} was removed or replaced while in use; put the ledger back and start again"
                    )
                storage.require_spends(self.path, self._connection, storage.read_anchor(self.path))
                yield
                newest = self.position()
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._writing = False
        storage.advance_anchor(self.path, newest, force=not self._simulated)


def has_entries(path: Path) -> bool:
    """Return whether the ledger at `path` holds entries, or held any: its anchor outlives it."""
    if not path.exists():
        seen = storage.read_anchor(path)
        return seen is not None and seen.entries > 0
    with Ledger.read(path) as ledger:
        return ledger.position().entries > 0


def check_name(name: str, value: str) -> None:
    if not (isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()):
        raise LedgerError(f"{name} is {str(value)[:50]!r}; it must be 1 to 200 printable characters")


def _check_unit(agent: str, spent: Iterable[Event], event: Event) -> None:
    for other in spent:
        if other.unit != event.unit:
            raise LedgerError(
                f"agent {agent!r} has entries that protect each {other.unit}, and this one protects each {event.unit}: "
                f"their ε do not add up; take a run whose unit is the {other.unit}, or for records that this agent "
                "never used another name or another ledger (run.ledger; docs/privacy.md)"
            )


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return which file lies at `path` now, whatever its content."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def now() -> str:
    """Return the time for readers only; entries are ordered by their number, so that a clock may jump."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
