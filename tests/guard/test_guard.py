"""The guard's promises: paid on the disk before the body runs, refused if the cap would be exceeded, one ledger."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
from dp_accounting import ComposedDpEvent, GaussianDpEvent, PoissonSampledDpEvent

import fedspa
import fedspa.guard
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import accept_loss, export, verify
from fedspa.agent.policy import Policy, PolicyRefusal
from fedspa.errors import BudgetError, ConfigError, FedspaError, LedgerError, PrivacyError
from fedspa.guard import Guard
from fedspa.guard.guard import UNSEEN
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.accounting import epsilon

EVENT = GaussianEvent("poisson", 20, 200, 10, 2.0)

ONE = 1.05 * epsilon({EVENT: 1}, 1e-3, neighbours="add-remove")  # a cap that covers one of them

GAUSSIAN = dp_accounting.GaussianDpEvent(4.0)


def test_the_spend_is_on_the_disk_before_the_body_runs(path: Path, guarded: Callable[..., Guard]) -> None:
    guard = guarded(run="study")
    with guard.spend(EVENT, noise="secure"):
        (entry,) = export(path)["entries"]
    assert (entry["agent"], entry["run"], entry["digest"]) == ("north", "guard:study", UNSEEN)
    assert entry["event"]["noise"] == "secure"
    assert verify(path) == []


def test_a_body_that_fails_has_spent(guarded: Callable[..., Guard]) -> None:
    guard = guarded(ONE)
    with pytest.raises(ZeroDivisionError), guard.spend(EVENT):
        raise ZeroDivisionError
    with pytest.raises(BudgetError, match=r"1 more participation would bring it to .* add-remove"), guard.spend(EVENT):
        pytest.fail("the body ran")


def test_a_refusal_writes_nothing(path: Path, guarded: Callable[..., Guard]) -> None:
    with pytest.raises(BudgetError), guarded(0.1).spend(EVENT):
        pytest.fail("the body ran")
    with pytest.raises(BudgetError):
        guarded(ONE).require(EVENT, participations=2)
    guarded(ONE).require(EVENT)
    assert export(path)["entries"] == []


def test_a_killed_process_has_spent(path: Path, guarded: Callable[..., Guard], tmp_path: Path) -> None:
    """Between the reservation and the end of the body."""
    stated = tmp_path / "stated"
    child = os.fork()
    if child == 0:
        try:
            with guarded(ONE).spend(EVENT):
                stated.touch()
                time.sleep(60)
        finally:
            os._exit(1)
    while not stated.exists():
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert verify(path) == []
    assert len(export(path)["entries"]) == 1
    with pytest.raises(BudgetError), guarded(ONE).spend(EVENT):
        pytest.fail("the body ran")


def test_a_budget_that_another_tool_spent_is_spent_here(path: Path, guarded: Callable[..., Guard]) -> None:
    with Ledger.open(path, create=False) as ledger:  # as fedspa's own agent does
        ledger.reserve("north", EVENT, "a-federated-run", "round-1", cap=guarded(ONE).cap, announced=1)
    with pytest.raises(BudgetError), guarded(ONE).spend(EVENT):
        pytest.fail("the body ran")


def test_a_plan_that_was_announced_is_priced_as_a_whole(guarded: Callable[..., Guard]) -> None:
    guard = guarded()
    for _ in range(3):
        with guard.spend(EVENT, announced=3):
            pass
    total = guard.total()
    assert total.epsilon == epsilon({EVENT: 3}, 1e-3, neighbours="add-remove")
    assert total.by == "pld (one plan)"
    with guard.spend(GAUSSIAN):
        pass
    assert guard.total().by.startswith("rdp filter (plans chosen after releases)")


def test_what_is_composed_of_several_is_paid_together_or_not_at_all(path: Path, guarded: Callable[..., Guard]) -> None:
    both = dp_accounting.ComposedDpEvent([GAUSSIAN, dp_accounting.GaussianDpEvent(0.25)])
    with pytest.raises(BudgetError), guarded().spend(both):
        pytest.fail("the body ran")
    with pytest.raises(BudgetError, match="cannot afford 1 spends of 2 mechanisms"):
        guarded().require(both)
    assert export(path)["entries"] == []
    guard = guarded(1e4)
    with guard.spend(both, message="count"):
        pass
    assert [entry["message"] for entry in export(path)["entries"]] == ["count", "count/2"]
    with pytest.raises(LedgerError, match="paid for before"), guard.spend(both, message="count"):
        pytest.fail("the body ran")


@pytest.mark.parametrize("single", [GAUSSIAN, dp_accounting.GaussianDpEvent(8.0)])
def test_a_name_is_taken_whatever_it_paid_for(single: object, path: Path, guarded: Callable[..., Guard]) -> None:
    both = dp_accounting.ComposedDpEvent([GAUSSIAN, dp_accounting.GaussianDpEvent(5.0)])
    for first, second, paid in ((both, single, 2), (single, both, 1)):
        guard = guarded(1e4)  # each has a run of its own
        before = len(export(path)["entries"])
        with guard.spend(first, message="count"):
            pass
        with pytest.raises(LedgerError, match="was paid for before"), guard.spend(second, message="count"):
            pytest.fail("the body ran")
        assert len(export(path)["entries"]) == before + paid


def test_what_costs_nothing_writes_nothing(path: Path, guarded: Callable[..., Guard]) -> None:
    with guarded().spend(dp_accounting.NoOpDpEvent()):
        pass
    assert export(path)["entries"] == []


def test_another_name_is_no_fresh_budget(guarded: Callable[..., Guard]) -> None:
    south = guarded(agent="south")  # nothing was spent yet: any name will do
    with guarded().spend(EVENT):
        pass
    with pytest.raises(
        LedgerError, match="entries of 'north' and none of 'nroth': another name would be a fresh budget"
    ):
        guarded(agent="nroth")
    with pytest.raises(LedgerError, match="none of 'south'"), south.spend(EVENT):
        pytest.fail("the body ran")


def test_another_unit_is_refused(guarded: Callable[..., Guard]) -> None:
    with guarded().spend(EVENT):
        pass
    with pytest.raises(LedgerError, match="protect each record, and this one protects each person"):
        guarded(unit="person").pay(GAUSSIAN)
    with pytest.raises(PrivacyError, match="the event protects each record and the guard each person"):
        guarded(unit="person").pay(EVENT)


def test_a_ledger_that_is_missing_or_replaced_is_no_fresh_budget(
    path: Path, guarded: Callable[..., Guard], tmp_path: Path
) -> None:
    guard = guarded()
    with guard.spend(EVENT):
        pass
    with pytest.raises(LedgerError, match="is there already"):
        fedspa.guard.create(path)
    kept = [file.rename(file.with_name(f"kept-{file.name}")) for file in tmp_path.glob("ledger.sqlite*")]
    assert len(kept) >= 2
    with pytest.raises(LedgerError, match="is missing"), guard.spend(EVENT):
        pytest.fail("the body ran")
    with pytest.raises(LedgerError, match=r"make the ledger once by fedspa.guard.create"):
        guarded()
    fedspa.guard.create(path)
    with pytest.raises(LedgerError, match="is another ledger than the one"), guard.spend(EVENT):
        pytest.fail("the body ran")


def forged(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_a_cheaper_event_put_into_an_entry_is_found(path: Path, guarded: Callable[..., Guard]) -> None:
    with guarded().spend(EVENT):
        pass
    cheap = GaussianEvent("poisson", 20, 200, 1, 200.0).to_json()
    forged(path, f"UPDATE event SET text = '{cheap}'")
    assert any("its hash does not fit" in problem for problem in verify(path))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"epsilon": None}, "needs epsilon and delta"),
        ({"epsilon": 0.0}, "epsilon is 0.0"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"neighbours": "replace-special"}, "allowed: add-remove, replace-one"),
        ({"policy": "policy.toml"}, "not both"),
        ({"unit": "patient"}, "unit is 'patient'; allowed: record, person"),
    ],
)
def test_a_cap_that_is_none(given: dict[str, object], match: str, guarded: Callable[..., Guard]) -> None:
    with pytest.raises((ConfigError, PrivacyError), match=match):
        guarded(**given)


POLICY = Policy(
    epsilon=3.0,
    delta=1e-3,
    neighbours="add-remove",
    min_noise_multiplier=1.0,
    max_local_steps=10,
    max_rounds=2,
    max_compression=1.0,
    clippings=("l2",),
)


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"min_noise_multiplier": 2.5}, "noise-too-small"),
        ({"max_local_steps": 9}, "too-many-steps"),
        ({"max_compression": 0.5}, "compression-too-large"),
        ({"clippings": ("coordinate",)}, "clipping-not-allowed"),
        ({"unit": "person"}, "unit"),
    ],
)
def test_a_policy_holds_for_others_too(path: Path, limits: dict[str, object], code: str) -> None:
    policy = replace(POLICY, **limits)  # type: ignore[arg-type]
    guard = fedspa.guard.open(path, agent="north", policy=policy, unit="record")
    with pytest.raises(PolicyRefusal) as refused, guard.spend(EVENT):
        pytest.fail("the body ran")
    assert refused.value.code == code


def test_figures_never_understate_what_was_spent(guarded: Callable[..., Guard]) -> None:
    """Figures to the nearest would, each about every second time."""
    guard = guarded(1.0, 1e-5)
    with guard.spend(dp_accounting.GaussianDpEvent(10.0)):
        pass
    spent = guard.total().epsilon
    (stated,) = re.findall(r"ε = ([\d.]+) of 1 spent", str(guard))
    assert spent <= float(stated) < spent + 1e-3
    with pytest.raises(BudgetError) as refused:
        guard.require(EVENT)
    ((left, of, after),) = re.findall(r"ε = ([\d.]+) left: ([\d.]+) of its .* to ([\d.]+) \(", str(refused.value))
    assert spent <= float(of) < spent + 1e-3
    assert 1 - spent - 1e-3 < float(left) <= 1 - spent
    guarded(3.0, 1e-5).pay(EVENT)
    both = guard.total().epsilon
    assert both <= float(after) < both + 1e-3


def test_what_was_lost_is_told_with_every_total(path: Path, guarded: Callable[..., Guard], tmp_path: Path) -> None:
    guard = guarded()
    for _ in range(2):
        with guard.spend(EVENT):
            pass
        if not (tmp_path / "old").exists():
            shutil.copy(path, tmp_path / "old")
    shutil.copy(tmp_path / "old", path)
    with pytest.raises(LedgerError, match="accept-loss"):
        guard.total()
    loss = accept_loss(path, 1)
    assert "1 entries behind entry 1 may be lost" in str(loss)
    assert str(loss) in str(guard)
    assert guard.total().by.endswith(f"; {loss}")


# Processes that spend from one ledger at the same moment: what one has checked still holds when it writes.

TRIALS, PROCESSES = 5, 4

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
