"""Processes that spend from one ledger at the same moment: what one has checked still holds when it writes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent

import fedspa.guard
from fedspa.agent.ledger.report import export, verify
from fedspa.agent.policy import Policy
from fedspa.errors import FedspaError
from fedspa.guard import Guard
from fedspa.mechanisms.gaussian.plan import GaussianEvent

TRIALS, PROCESSES = 5, 4
EVENT = GaussianEvent("poisson", 20, 200, 10, 2.0)
BOTH = ComposedDpEvent([PoissonSampledDpEvent(0.01, GaussianDpEvent(3.0)), GaussianDpEvent(20.0)])


def race(bodies: Sequence[Callable[[], None]]) -> list[str]:
    """Run each in a process of its own, all at once; return how each ended: "paid", or the name of its error."""
    context = multiprocessing.get_context("fork")
    start, ends = context.Barrier(len(bodies)), context.SimpleQueue()

    def run(body: Callable[[], None]) -> None:
        start.wait(60)
        try:
            body()
        except FedspaError as error:
            ends.put(type(error).__name__)
        else:
            ends.put("paid")

    children = [context.Process(target=run, args=(body,)) for body in bodies]
    for child in children:
        child.start()
    found = sorted(ends.get() for _ in children)
    for child in children:
        child.join()
    return found


def test_one_name_gets_an_empty_ledger(tmp_path: Path) -> None:
    """Each other name would be a fresh budget for the same records."""
    for trial in range(TRIALS):
        path = tmp_path / f"{trial}.sqlite"
        fedspa.guard.create(path)
        guards = [fedspa.guard.open(path, agent=f"name-{i}", epsilon=9.0, delta=1e-3) for i in range(PROCESSES)]
        ends = race([partial(guard.pay, EVENT) for guard in guards])
        assert ends == ["LedgerError"] * (PROCESSES - 1) + ["paid"]
        assert len(export(path)["entries"]) == 1


@pytest.mark.parametrize(("event", "entries"), [(EVENT, 1), (BOTH, 2)], ids=["one mechanism", "two"])
def test_a_policy_bounds_the_entries_of_a_run(event: object, entries: int, tmp_path: Path) -> None:
    policy = Policy(9.0, 1e-3, "add-remove", 1.0, 10, entries, 1.0, ("l2",))
    for trial in range(TRIALS):
        path = tmp_path / f"{trial}.sqlite"
        fedspa.guard.create(path)
        guard = fedspa.guard.open(path, agent="north", policy=policy)
        assert race([partial(guard.pay, event)] * PROCESSES) == ["PolicyRefusal"] * (PROCESSES - 1) + ["paid"]
        assert len(export(path)["entries"]) == entries


@pytest.mark.parametrize(("event", "entries"), [(EVENT, 1), (BOTH, 2)], ids=["one mechanism", "two"])
def test_a_message_is_paid_for_once(event: object, entries: int, path: Path, guarded: Callable[..., Guard]) -> None:
    guard = guarded(9.0)
    assert race([partial(guard.pay, event, message="epoch-1")] * PROCESSES) == ["LedgerError"] * (PROCESSES - 1) + [
        "paid"
    ]
    assert len(export(path)["entries"]) == entries
    assert verify(path) == []


def test_an_entry_and_its_release_are_one_write(
    path: Path, guarded: Callable[..., Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure between the two leaves neither: nothing ran, so nothing is owed."""
    from fedspa.agent.ledger.ledger import Ledger

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Ledger, "release_many", fail)
    with pytest.raises(MemoryError):
        guarded().pay(EVENT)
    assert export(path)["entries"] == []
