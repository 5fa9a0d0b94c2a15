"""Killed at any instant, or written by many processes at once, a ledger hides no spend."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from fedspa.agent.ledger import storage
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export, verify
from fedspa.errors import BudgetError
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.budget import FirstPlan, Limit, PrivacyBudget, Total
from fedspa.privacy.event import Event

EVENT = GaussianEvent("poisson", 10, 600, 30, 2.47)


def start(body: Callable[[], None]) -> int:
    """Run `body` in a forked child; it exits with 0 only if the body returned."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def work(path: Path, told: Path, life: int, rounds: Iterator[int], pause: float) -> None:
    """An agent's loop. `told` collects what the ledger acknowledged; a page written outlives the process."""
    acknowledged = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Ledger.open(path) as ledger:
        for number in rounds:
            message = f"{life}-{number}"
            ledger.reserve("a", EVENT, "run", message)
            os.write(acknowledged, f"reserved {message}\n".encode())
            time.sleep(pause)
            ledger.release("a", "run", message, f"sha {message}")
            os.write(acknowledged, f"released {message}\n".encode())


def check(path: Path, told: Path, at_least: int) -> int:
    """After a kill: sound, nothing acknowledged is missing, nothing shrank. Gives the number of entries."""
    assert verify(path) == []
    with Ledger.open(path) as ledger:
        count = ledger.spent("a").get(EVENT, 0)
    entries = {entry["message"]: entry["digest"] for entry in export(path)["entries"]}
    assert len(entries) == count >= at_least
    for line in told.read_text().splitlines() if told.exists() else []:
        verb, message = line.split()
        assert message in entries
        if verb == "released":
            assert entries[message] == f"sha {message}"
    return count


def wait_for_growth(told: Path, count: int) -> None:
    """Until this life has been told of a reservation: then there are more than the `count` entries known so far."""
    deadline = time.monotonic() + 30
    while not told.exists() or told.read_text().count("reserved") <= count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.slow
def test_killed_at_random_instants(tmp_path: Path) -> None:
    """50 kills; every tenth life starts with a new file, so that creation is hit too."""
    chance = random.Random(20260301)
    busy = 0
    for life in range(50):
        if life % 10 == 0:
            path, told = tmp_path / f"{life}.sqlite", tmp_path / f"{life}.told"
            count, epsilon = 0, 0.0
        pause = chance.choice((0.0, 0.001))
        child = start(lambda: work(path, told, life, iter(range(10**9)), pause))  # noqa: B023
        if chance.random() < 0.8:  # else it may still be opening the file
            wait_for_growth(told, count)
        time.sleep(chance.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        if path.exists():
            before, count = count, check(path, told, count)
            busy += count > before
        if life > 46:  # the count decides ε; the real accountant agrees, now and then
            with Ledger.open(path) as ledger:
                before_epsilon, epsilon = epsilon, ledger.epsilon("a", 1e-5, "add-remove")
            assert epsilon > before_epsilon or (epsilon, count) == (before_epsilon, before)
    assert busy >= 30  # the kills hit lives that were writing


def test_killed_at_every_statement(tmp_path: Path) -> None:
    """From opening to the second release, die before each SQL statement in turn."""
    path, told = tmp_path / "ledger.sqlite", tmp_path / "told"
    count = 0
    for fatal in range(1, 200):

        def body(fatal: int = fatal) -> None:
            seen = 0

            def die_in_time(statement: str) -> None:
                nonlocal seen
                seen += 1
                if seen == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)

            opened = storage.connect

            def traced(*arguments: object) -> object:
                connection = opened(*arguments)  # type: ignore[arg-type]
                connection.set_trace_callback(die_in_time)
                return connection

            storage.connect = traced  # type: ignore[assignment]
            work(path, told, fatal, iter(range(2)), 0.0)

        outcome = ended(start(body))
        count = check(path, told, count)
        if outcome == 0:
            break
        assert outcome == -signal.SIGKILL
    assert outcome == 0
    assert fatal > 20  # a reserve and a release take at least ten statements


def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"  # nobody creates it beforehand: the four race for that too

    def body(who: int) -> None:
        with Ledger.open(path) as ledger:
            for number in range(50):
                ledger.reserve("a", EVENT, "shared", str(number))
                ledger.reserve("a", EVENT, f"own-{who}", str(number))
                ledger.release("a", f"own-{who}", str(number), "sha")

    children = [start(lambda who=who: body(who)) for who in range(4)]  # type: ignore[misc]
    assert [ended(child) for child in children] == [0] * 4
    assert verify(path) == []
    with Ledger.open(path) as ledger:
        assert ledger.spent("a") == {EVENT: 50 + 4 * 50}
    assert [file.name for file in tmp_path.iterdir() if file.suffix == ".new"] == []


def test_two_processes_do_not_both_slip_under_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ε = 0.3 √n stands in for the accountant and takes its time; a cap of 3 allows exactly 100 events."""

    def admits(limit: Limit, events: Mapping[Event, int], first: FirstPlan | None) -> bool:
        time.sleep(0.001)
        return 0.3 * math.sqrt(sum(events.values())) <= limit.epsilon

    monkeypatch.setattr(Limit, "admits", admits)
    monkeypatch.setattr(Limit, "total", lambda *_: Total(3.0, "stand-in"))
    path = tmp_path / "ledger.sqlite"
    cap = PrivacyBudget(3.0, 1e-5, "add-remove")

    def body(who: int) -> None:
        refused = 0
        with Ledger.open(path) as ledger:
            for number in range(101):  # more than the cap allows: nobody gets through without a refusal
                try:
                    ledger.reserve("a", EVENT, f"run-{who}", str(number), cap=cap)
                except BudgetError:
                    refused += 1
        assert refused > 0

    children = [start(lambda who=who: body(who)) for who in range(4)]  # type: ignore[misc]
    assert [ended(child) for child in children] == [0] * 4
    with Ledger.open(path) as ledger:
        assert ledger.spent("a") == {EVENT: 100}
    assert verify(path) == []
