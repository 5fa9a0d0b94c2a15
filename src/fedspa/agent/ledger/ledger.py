"""An agent's durable record of what it spent, over all runs, restarts and crashes.

Local DP does not trust the server, so the agent keeps its own books: `reserve` writes a participation down *before*
training, `release` marks it just before the update leaves. A crash in between wastes budget and hides nothing. What
the stored events cost together is for `cap` to say.
"""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from fedspa.agent.ledger import content
from fedspa.agent.ledger import file as ledger_file
from fedspa.agent.ledger import witness as ledger_witness
from fedspa.agent.ledger.allowed import check_name, check_unit
from fedspa.agent.ledger.content import Reservation, parsed, unit_in
from fedspa.agent.ledger.errors import explained
from fedspa.agent.ledger.loss import Loss, losses
from fedspa.agent.ledger.schema import entry_hash
from fedspa.agent.ledger.witness import Witness
from fedspa.errors import BudgetError, LedgerError
from fedspa.privacy.cap import Cap, FirstPlan, Limit, Total, floor_total, passed, shown, shown_left, total
from fedspa.privacy.event import MOST, Event, Neighbours, noise_modes, seeded_words, told


class Ledger:
    """An open ledger file. One per process and thread; any number of processes may share the file."""

    def __init__(self, path: Path, connection: sqlite3.Connection, *, name: str, simulated: bool) -> None:
        self.path = path
        self.name = name  # drawn when it was made: another file under the same path has another
        self._connection = connection
        self._simulated = simulated
        self._process = os.getpid()
        self._writing = False
        self._file = ledger_file.identity(path)

    @classmethod
    def open(cls, path: str | Path, *, create: bool = True, simulated: bool = False) -> Self:
        """Open the ledger at `path`; with `create`, make it where there is no file. A bad file is never replaced, and
        one with an event that cannot be priced here is refused: what comes of it would be known after training only.

        A deployment creates its ledger once and from then on opens it with `create=False`: a ledger that went missing
        is then an error and not a fresh budget. `simulated` books survive a killed process but not a power loss: they
        wait for no disk, since nothing leaves a simulation.

        Beside it lies its witness. A ledger that is behind it has lost what it acknowledged and is refused.
        """
        path = Path(path)
        if create and not path.exists():
            ledger_file.create(path)
        connection = ledger_file.connect(path, "rw")
        try:
            with explained(path):
                for (text,) in connection.execute("SELECT text FROM event"):
                    parsed(path, text)
                if simulated:
                    connection.execute("PRAGMA synchronous=NORMAL")
                name = ledger_witness.name(connection)
                assert name is not None  # whoever opens it to write has made sure of that
        except LedgerError:
            connection.close()
            raise
        return cls(path, connection, name=name, simulated=simulated)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(
        self,
        agent: str,
        event: Event,
        run: str,
        message: str,
        *,
        cap: Cap | None = None,
        announced: int | None = None,
    ) -> Reservation:
        """Record that `agent` takes part: durable on return, and counted once per (agent, run, message).

        With a `cap`, check and record are one step: of two processes that both want the last of a budget, one gets a
        BudgetError. A reservation that is not `fresh` pays for one release only: see `release`. `announced` is how
        often the run's plan has the agent take part, in all; kept with the agent's first entry, it makes that plan the
        one that is priced as a whole (`cap.admits`).
        """
        return self.reserve_many({agent: event}, run, message, cap=cap, announced=announced)[0]

    def reserve_many(
        self,
        events: Mapping[str, Event],
        run: str,
        message: str,
        *,
        cap: Cap | None = None,
        announced: int | None = None,
    ) -> list[Reservation]:
        """`reserve` for all agents of a round in one durable write: all of them, or (on any error) none."""
        for name, value in (("run", run), ("message", message), *(("agent", agent) for agent in events)):
            check_name(name, value)
        if announced is not None and not 1 <= announced <= MOST:
            raise LedgerError(f"announced is {told(announced)}; it must lie between 1 and {MOST:g}")
        if cap is not None and not self._writing:
            # ε takes a fraction of a second. Evaluated here first, it is remembered, so that the lock below is held for
            # that long only where another process changed the total in between.
            for agent, event in events.items():
                self.would_exceed(agent, event, cap, announced=announced)
        with self.transaction():
            return self._reserve(events, run, message, cap, announced)

    def reserve_each(
        self, agent: str, events: Mapping[str, Event], run: str, *, cap: Cap | None = None
    ) -> list[Reservation]:
        """`reserve` for several events of one agent, by message, in one durable write: all of them, or none."""
        for name, value in (("run", run), ("agent", agent), *(("message", message) for message in events)):
            check_name(name, value)
        with self.transaction():
            return [self._reserve({agent: event}, run, message, cap)[0] for message, event in events.items()]

    def _reserve(
        self, events: Mapping[str, Event], run: str, message: str, cap: Cap | None, announced: int | None = None
    ) -> list[Reservation]:
        """Within a transaction. A simulated round is ten agents: what they share is read and written once for all."""
        reserved: list[Reservation] = []
        rows: list[tuple[int | str, ...]] = []
        ids = {event: self._event_id(event.to_json()) for event in dict.fromkeys(events.values())}
        entries, link = self._connection.execute("SELECT entries, hash FROM head").fetchone()
        now = _now()
        beginners = set() if announced is None else set(events) - content.known(self._connection, events)
        plans: list[tuple[str, int, int | None]] = []
        self.require_unit(events)
        for agent, event in events.items():
            found = content.find(self.path, self._connection, agent, run, message)
            if found is None:
                if cap is not None:
                    self.require(agent, event, cap, announced=announced)
                event_id, text = ids[event]
                sequence = entries + 1 + len(rows)
                plan = announced if agent in beginners else None
                plans += [] if plan is None else [(agent, sequence, plan)]
                link = entry_hash(link, sequence, agent, run, message, text, now, plan)
                rows.append((sequence, agent, run, message, event_id, now, link))
                found = Reservation(sequence, agent, event, fresh=True, digest=None)
            elif found.event != event:
                raise LedgerError(
                    f"agent {agent!r}, run {run!r}, message {message!r} is recorded with another event "
                    f"({found.event.to_json()}, now {event.to_json()}); use a new message name"
                )
            reserved.append(found)
        self._connection.executemany("INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        self._connection.executemany("INSERT INTO plan VALUES (?, ?, ?)", plans)
        return reserved

    def require_unit(self, events: Mapping[str, Event]) -> None:
        """Raise where an agent's entries protect something else than its event here. They protect records, or they
        protect persons: a total of both would be neither's."""
        with explained(self.path):
            texts = self._connection.execute("SELECT text FROM event").fetchall()
        units = {unit_in(self.path, text) for (text,) in texts} | {event.unit for event in events.values()}
        if len(units) > 1:  # in some agent's entries: it may not be one of these
            for agent, event in events.items():
                check_unit(agent, self.spent(agent), event)

    def _event_id(self, text: str) -> tuple[int, str]:
        """The number under which this event is kept, from now on if it was not known; and its text."""
        known = self._connection.execute("SELECT id FROM event WHERE text = ?", (text,)).fetchone()
        if known is None:
            self._connection.execute("INSERT INTO event (text) VALUES (?)", (text,))
            known = self._connection.execute("SELECT id FROM event WHERE text = ?", (text,)).fetchone()
        return known[0], text

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
            rows, now = [], _now()
            for agent, digest in digests.items():
                found = self._connection.execute(
                    "SELECT sequence, digest FROM entry LEFT JOIN release USING (sequence) "
                    "WHERE agent = ? AND run = ? AND message = ?",
                    (agent, run, message),
                ).fetchone()
                if found is None:
                    raise LedgerError(
                        f"agent {agent!r}, run {run!r}, message {message!r} was never reserved; reserve before training"
                    )
                sequence, released = found
                if released is None:
                    rows.append((sequence, digest, now))
                elif released != digest:
                    raise LedgerError(
                        f"agent {agent!r}, run {run!r}, message {message!r} has already released another update; "
                        "send that one again or reserve under a new message name"
                    )
            self._connection.executemany("INSERT INTO release VALUES (?, ?, ?)", rows)

    def find(self, agent: str, run: str, message: str) -> Reservation | None:
        """The entry of this triple, if there is one."""
        with explained(self.path):
            return content.find(self.path, self._connection, agent, run, message)

    def agents(self) -> set[str]:
        """All that have entries."""
        with explained(self.path):
            return {agent for (agent,) in self._connection.execute("SELECT DISTINCT agent FROM total")}

    def require_known(self, agent: str) -> None:
        """Raise where there are entries and none of `agent`: one who holds records calls them by one name."""
        others = self.agents()
        if others and agent not in others:
            raise LedgerError(
                f"{self.path} has entries of {', '.join(map(repr, sorted(others)[:5]))} and none of {agent!r}: another "
                "name would be a fresh budget; use the name that the records have, or for other records a ledger of "
                "their own"
            )

    def participations(self, agent: str, run: str) -> int:
        """How many entries `agent` has in `run`."""
        with explained(self.path):
            query = "SELECT count(*) FROM entry WHERE agent = ? AND run = ?"
            count: int = self._connection.execute(query, (agent, run)).fetchone()[0]
        return count

    def events(self, run: str) -> set[Event]:
        """The distinct events of `run`, of all its agents."""
        with explained(self.path):
            query = "SELECT DISTINCT text FROM entry JOIN event ON event.id = entry.event WHERE run = ?"
            return {parsed(self.path, text) for (text,) in self._connection.execute(query, (run,))}

    def spent(self, agent: str) -> Mapping[Event, int]:
        """What `agent` spent in all its runs: distinct events and how often each (read from the kept totals)."""
        with explained(self.path):
            return content.spent(self.path, self._connection, agent)

    def largest(self, but: str | None = None) -> Mapping[Event, int]:
        """What no record can have spent more than, whichever agent held it in which run: simulations number their
        agents, and may deal the same records to others each time. Of every run, `but` one, the most of any agent."""
        with explained(self.path):
            return content.largest(self.path, self._connection, but)

    def first_agent(self) -> str | None:
        """Whose the first entry is."""
        with explained(self.path):
            found = self._connection.execute("SELECT agent FROM entry WHERE sequence = 1").fetchone()
        return None if found is None else str(found[0])

    def first_plan(self, agent: str) -> FirstPlan | None:
        """What was announced with the first entry of `agent`, if anything was."""
        with explained(self.path):
            return content.first_plan(self.path, self._connection, agent)

    def losses(self) -> list[Loss]:
        """What its owner accepted as lost, oldest first: no ε counts it."""
        with explained(self.path):
            return losses(self._connection)

    def total(self, agent: str, delta: float, neighbours: Neighbours) -> Total:
        """Verified total ε of `agent` over all its runs, at `delta` under `neighbours`, and what shows it: against the
        server with up to the colluders of each run."""
        return total(self.spent(agent), delta, neighbours, self.first_plan(agent))

    def floor_total(self, agent: str, delta: float, neighbours: Neighbours) -> Total:
        """`total` against one who colludes with all other members of every run."""
        own = self.total(agent, delta, neighbours)
        return floor_total(self.spent(agent), delta, neighbours, self.first_plan(agent), own)

    def epsilon(self, agent: str, delta: float, neighbours: Neighbours) -> float:
        """`total`, the number alone."""
        return self.total(agent, delta, neighbours).epsilon

    def would_exceed(
        self, agent: str, event: Event, cap: Cap, *, participations: int = 1, announced: int | None = None
    ) -> bool:
        """Whether that many more `event`s would bring `agent` above its cap. Advice: `reserve(cap=...)` decides.

        An agent without entries has `announced` of them as its first plan (if that is not given: `participations`).
        """
        return self._passed(agent, event, cap, participations, announced) is not None

    def _passed(
        self, agent: str, event: Event, cap: Cap, participations: int, announced: int | None
    ) -> tuple[Limit, Mapping[Event, int], FirstPlan | None] | None:
        """The limit that this would pass, with the events and the first plan by which it would."""
        after = self._after(agent, event, participations)
        plan = self._plan(agent, event, announced or participations)
        limit = passed(after, cap, plan)
        return None if limit is None else (limit, after, plan)

    def require(
        self, agent: str, event: Event, cap: Cap, *, participations: int = 1, announced: int | None = None
    ) -> None:
        """Raise a BudgetError, with the budget that remains, where `would_exceed` is true."""
        found = self._passed(agent, event, cap, participations, announced)
        if found is None:
            return
        limit, events, plan = found
        spent = limit.total(self.spent(agent), self.first_plan(agent)).epsilon
        after = limit.total(events, plan)
        words = seeded_words(noise_modes(events))
        by = "; ".join(filter(None, (after.by, limit.words, words)))
        raise BudgetError(
            f"agent {agent!r} has ε = {shown_left(limit.epsilon, spent)} left: {shown(spent)} of its cap "
            f"{limit.epsilon:.4g} is spent, and {participations} more participation{'s' * (participations > 1)} would "
            f"bring it to {shown(after.epsilon)} (δ = {cap.delta:g}, {cap.neighbours}, {by}); "
            "ask for fewer or noisier participations"
        )

    def _plan(self, agent: str, event: Event, announced: int) -> FirstPlan | None:
        """The agent's first plan: what it began with, or what it would begin with now."""
        return self.first_plan(agent) if self.spent(agent) else FirstPlan(event, announced)

    def _after(self, agent: str, event: Event, participations: int) -> Mapping[Event, int]:
        if participations < 1:
            raise LedgerError(f"participations is {participations}; it must be at least 1")
        spent = self.spent(agent)
        check_unit(agent, spent, event)
        return Counter(spent) + Counter({event: participations})

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Keep other processes from writing until the block ends: what is checked in it still holds when it writes.
        The writes in it become durable together at its end, with their witness; where an error leaves the outermost
        block, none does."""
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
                if ledger_file.identity(self.path) != self._file:
                    raise LedgerError(
                        f"{self.path} was removed or replaced while in use; put the ledger back and start again"
                    )
                ledger_witness.require(self.path, self._connection, self.name, ledger_witness.read(self.path))
                yield
                head = ledger_witness.head(self._connection)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                self._writing = False
        ledger_witness.advance(self.path, Witness(self.name, head), force=not self._simulated)


def _now() -> str:
    """For the reader only; entries are ordered by their number, so a clock that jumps does no harm."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
