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
from fedspa.privacy.budget import FirstPlan, PrivacyBudget, Total, participations_within, total, worst_case_total
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
        accounts = _accounts(ledger, agent)
        if agent is not None and not accounts:
            known = [row[0] for row in ledger.query("SELECT DISTINCT agent FROM total ORDER BY agent LIMIT 20")]
            raise LedgerError(f"{path} has no entries of agent {agent!r}; it knows: {', '.join(known) or 'none'}")

        @cache
        def priced(spent: frozenset[tuple[Event, int]], first: FirstPlan | None) -> tuple[Total, Total]:
            events = dict(spent)
            own = total(events, delta, neighbours, first)
            return own, worst_case_total(events, delta, neighbours, first, own)

        @cache
        def left(account: _Account) -> tuple[float | None, int | None]:
            """Return the cap's ε less what it counts, and how many more like the last event fit."""
            if cap is None:
                return None, None
            events, (counted, _) = Counter(dict(account.spent)), priced(account.spent, account.first)
            if any(event.members for event in events):
                counted = cap.limits[0].total(events, account.first)
            more = participations_within(account.last_event, cap, events, account.first)
            return max(0.0, cap.epsilon - counted.epsilon), more

        def summarise(name: str) -> AgentSummary:
            account = accounts[name]
            own, worst = priced(account.spent, account.first)
            epsilon_left, participations_left = left(account)
            return AgentSummary(
                agent=name,
                runs=runs_of(ledger, name),
                spent=dict(account.spent),
                last_event=account.last_event,
                epsilon=own.epsilon,
                epsilon_worst_case=worst.epsilon,
                delta=delta,
                neighbours=neighbours,
                accountant=own.by,
                noise=noise_modes(dict(account.spent)),
                cap=cap,
                epsilon_left=epsilon_left,
                participations_left=participations_left,
            )

        costs = {name: priced(each.spent, each.first)[0].epsilon for name, each in accounts.items()}
        chosen = list(accounts) if most is None else sorted(accounts, key=lambda name: (-costs[name], name))[:most]
        newest = ledger.position()
        return LedgerSummary(
            path=str(path),
            entries=newest.entries,
            releases=newest.releases,
            head=newest.hash,
            losses=tuple(ledger.losses()),
            noise=ledger.noise(),
            known_agents=len(accounts),
            epsilon_least=min(costs.values(), default=0.0),
            epsilon_most=max(costs.values(), default=0.0),
            agents=tuple(map(summarise, chosen)),
            runs=runs_of(ledger, agent),
        )


class _Account(NamedTuple):
    """What an agent spent, its first plan, and the event of its newest entry."""

    spent: frozenset[tuple[Event, int]]
    first: FirstPlan | None
    last_event: Event


def _accounts(ledger: Ledger, agent: str | None) -> dict[str, _Account]:
    """Return the accounts of all agents, or of one, by name."""
    only, values = ("", ()) if agent is None else ("WHERE total.agent = ?", (agent,))
    rows = ledger.query(
        "SELECT total.agent, text, count, first, last, oldest.announced, newest.sequence FROM total "
        "LEFT JOIN event ON event.id = total.event LEFT JOIN entry AS oldest ON oldest.sequence = first "
        f"LEFT JOIN entry AS newest ON newest.sequence = last {only} ORDER BY total.agent",
        *values,
    )
    parsed, found = cache(ledger.parse), {}
    for name, group in groupby(rows, key=itemgetter(0)):
        held = list(group)
        if any(text is None or newest is None for _, text, *_, newest in held):
            raise LedgerError(damaged(ledger.path, "events or entries are missing that its totals count"))
        first, last = min(held, key=itemgetter(3)), max(held, key=itemgetter(4))
        spent = frozenset((parsed(text), count) for _, text, count, *_ in held)
        found[name] = _Account(spent, ledger.plan(parsed(first[1]), first[5]), parsed(last[1]))
    return found


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
