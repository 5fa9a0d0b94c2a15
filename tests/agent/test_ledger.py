"""The ledger's promises: durable, counted once, only growing, and refused where it cannot be trusted."""

from __future__ import annotations

import math
import os
import sqlite3
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa import mechanisms
from fedspa.agent.ledger import ledger as ledger_module
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export, verify
from fedspa.agent.ledger.storage import GENESIS, Anchor, _anchor_file
from fedspa.errors import BudgetError, LedgerError
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy import accounting, filter
from fedspa.privacy.budget import FirstPlan, Limit, PrivacyBudget, Total, exceeded_limit
from fedspa.privacy.event import Event, Neighbours
from fedspa.privacy.filter import ORDERS, Moments

EVENT = GaussianEvent("poisson", 10, 600, 300, 1.83)
OTHER = GaussianEvent("poisson", 10, 600, 100, 2.5)
FIXED = GaussianEvent("fixed", 10, 600, 300, 4.12)
CAP = PrivacyBudget(1.0, 1e-3, "add-remove")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def quick_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the accountant: ε = 0.3 √(number of events). What is tested here is the bookkeeping."""

    def total(events: Mapping[Event, int], delta: float, neighbours: Neighbours, first: FirstPlan | None) -> Total:
        return Total(0.3 * math.sqrt(sum(events.values())), "stand-in")

    def admits(limit: Limit, events: Mapping[Event, int], first: FirstPlan | None) -> bool:
        return total(events, limit.delta, limit.neighbours, first).epsilon <= limit.epsilon

    monkeypatch.setattr(ledger_module, "total", total)
    monkeypatch.setattr(Limit, "admits", admits)
    monkeypatch.setattr(
        Limit, "total", lambda limit, events, first: total(events, limit.delta, limit.neighbours, first)
    )


def test_an_older_fedspa_is_to_be_upgraded_and_nothing_restored(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backup would know nothing of what was spent since."""
    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "run", "0")
        monkeypatch.setattr(mechanisms.base, "_kinds", dict)
        mechanisms.base._event_of.cache_clear()
        newer = r"written by a newer fedspa .*gaussian.*upgrade"
        with pytest.raises(LedgerError, match=newer) as caught:
            ledger.spent("a")
    assert "restore" not in str(caught.value)
    with pytest.raises(LedgerError, match=newer):  # and before it is written to, for whichever agent
        Ledger.open(path, create=False)


def test_a_reservation_pays_for_one_release(path: Path) -> None:
    with Ledger.open(path) as ledger:
        with pytest.raises(LedgerError, match="never reserved"):
            ledger.release("a", "run", "0", "sha")
        ledger.reserve("a", EVENT, "run", "0")
        ledger.release("a", "run", "0", "sha")
        ledger.release("a", "run", "0", "sha")
        found = ledger.find("a", "run", "0")
        assert found.digest == "sha"
        with pytest.raises(LedgerError, match="already released another update"):
            ledger.release("a", "run", "0", "other noise")
        assert ledger.find("a", "run", "1") is None


def test_a_round_is_reserved_whole_or_not_at_all(path: Path, quick_epsilon: None) -> None:
    with Ledger.open(path) as ledger:
        for number in range(11):  # 0.3 √11 = 0.995: one more event passes the cap of 1
            ledger.reserve("full", EVENT, "run", str(number), cap=CAP)
        with pytest.raises(BudgetError, match=r"'full' has ε = 0\.005"):
            ledger.reserve_many({"new": EVENT, "full": EVENT}, "run", "round", cap=CAP)
        assert ledger.spent("new") == {}
        many = ledger.reserve_many({"new": EVENT, "newer": OTHER}, "run", "round", cap=CAP)
        assert [entry.agent for entry in many] == ["new", "newer"]
        ledger.release_many({"new": "x", "newer": "y"}, "run", "round")
    assert verify(path) == []


def test_a_round_that_was_half_recorded_is_completed(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("old", EVENT, "run", "round")
        many = ledger.reserve_many({"new": OTHER, "old": EVENT, "newer": EVENT}, "run", "round")
        assert [(entry.sequence, entry.fresh) for entry in many] == [(2, True), (1, False), (3, True)]
        ledger.release("old", "run", "round", "x")
        ledger.release_many({"new": "y", "old": "x"}, "run", "round")
        assert [ledger.find(agent, "run", "round").digest for agent in ("new", "old")] == ["y", "x"]  # type: ignore[union-attr]
    assert verify(path) == []


def test_cap_is_checked_before_and_counted_entries_pass(path: Path, quick_epsilon: None) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "run", "0", cap=PrivacyBudget(0.3, 1e-3, "add-remove"))
        assert not ledger.would_exceed("a", EVENT, CAP, participations=10)
        assert ledger.would_exceed("a", EVENT, CAP, participations=11)
        tight = PrivacyBudget(0.35, 1e-3, "add-remove")
        with pytest.raises(BudgetError, match=r"ε = 0\.050 left: 0\.300 of its cap 0\.35 .* 1 more participation w"):
            ledger.reserve("a", OTHER, "run", "1", cap=tight)
        assert not ledger.reserve("a", EVENT, "run", "0", cap=tight).fresh
        with pytest.raises(LedgerError, match="participations is -1"):
            ledger.would_exceed("a", EVENT, CAP, participations=-1)


def test_nan_epsilon_is_over_budget(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "epsilon", lambda *_, **__: math.nan)
    nothing_known = Moments(np.full_like(ORDERS, math.nan), 0.0)
    monkeypatch.setattr(filter, "_sums", lambda *_: (nothing_known, nothing_known))
    with Ledger.open(path) as ledger, pytest.raises(BudgetError):
        ledger.reserve("a", EVENT, "run", "0", cap=CAP)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "two\nlines",
        "x" * 201,
        None,
    ],
)
def test_names_are_printable_text(path: Path, name: str) -> None:
    with Ledger.open(path) as ledger:
        for triple in ((name, "run", "0"), ("a", name, "0"), ("a", "run", name)):
            with pytest.raises(LedgerError, match="1 to 200 printable"):
                ledger.reserve(triple[0], EVENT, *triple[1:])
    assert export(path)["entries"] == []


@settings(max_examples=12, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([EVENT, OTHER, FIXED]), st.integers(0, 2), st.integers(0, 3))
    )
)
def test_any_sequence_of_calls_agrees_with_a_dict(calls: list[tuple[str, GaussianEvent, int, int]]) -> None:
    import tempfile

    model: dict[tuple[str, str, str], GaussianEvent] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        for agent, event, run, message in calls:
            triple = (agent, str(run), str(message))
            with Ledger.open(path) as ledger:
                if model.setdefault(triple, event) == event:
                    ledger.reserve(agent, event, *triple[1:])
                else:
                    with pytest.raises(LedgerError):
                        ledger.reserve(agent, event, *triple[1:])
        with Ledger.open(path) as ledger:
            for agent in "ab":
                expected = Counter(event for (who, _, _), event in model.items() if who == agent)
                assert ledger.spent(agent) == expected
        assert verify(path) == []


def test_work_does_not_grow_with_the_entries(path: Path, quick_epsilon: None) -> None:
    """Counted in instructions of SQLite's machine, not in seconds: a seek is one of them, a scan is one per row."""
    instructions = 0

    def count() -> int:
        nonlocal instructions
        instructions += 1
        return 0

    def work(message: str) -> int:
        nonlocal instructions
        instructions = 0
        ledger._connection.set_progress_handler(count, 1)
        ledger.reserve("a", EVENT, "new", message, cap=PrivacyBudget(1e6, 1e-3, "add-remove"))
        ledger.release("a", "new", message, "sha")
        ledger._connection.set_progress_handler(None, 1)
        return instructions

    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "old", "first")
        before = work("0")
        ledger.reserve_many({f"agent-{number}": EVENT for number in range(1000)}, "old", "many")
        with ledger.transaction():
            for number in range(1000):
                ledger.reserve("a", EVENT, "old", str(number))
        assert work("1") <= 1.1 * before


def test_durable_settings(path: Path) -> None:
    with Ledger.open(path), sqlite3.connect(path) as other:
        pass
    other.execute("PRAGMA journal_mode = DELETE")  # as VACUUM INTO leaves a copy
    other.close()
    with Ledger.open(path) as ledger:
        (journal,) = ledger._connection.execute("PRAGMA journal_mode").fetchone()
        (synchronous,) = ledger._connection.execute("PRAGMA synchronous").fetchone()
        assert (journal, synchronous) == ("wal", 2)


def test_an_error_inside_a_write_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(path) as ledger:
        monkeypatch.setattr(ledger_module, "now", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ledger.reserve("a", EVENT, "run", "0")
        monkeypatch.undo()
        assert ledger.spent("a") == {}
        assert ledger.reserve("a", EVENT, "run", "0").sequence == 1


class TestRefused:
    """A bad file is refused with one line, and is left exactly as it was."""

    def refused(self, path: Path, match: str, *, create: bool = True) -> None:
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(LedgerError, match=match) as caught:
            Ledger.open(path, create=create)
        assert "\n" not in str(caught.value)
        assert (path.read_bytes() if path.is_file() else None) == before

    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda path: path.mkdir(), "not a file"),
            (lambda path: path.touch(), "is empty"),
            (lambda path: path.write_text("a ledger, honestly\n" * 1000), "is not a ledger"),
            (lambda path: sqlite3.connect(path).execute("CREATE TABLE entry (a)"), "not a fedspa ledger"),
        ],
        ids=["folder", "empty", "other content", "other database"],
    )
    def test_what_is_no_ledger(self, path: Path, make: Callable[[Path], object], match: str) -> None:
        make(path)
        Path(f"{path}.anchor").write_bytes(_anchor_file(Anchor("", 0, 0, GENESIS)))
        self.refused(path, match)

    def test_missing(self, path: Path) -> None:
        self.refused(path, "is missing", create=False)
        assert not path.exists()
        self.refused(path.parent / "nowhere" / "ledger.sqlite", "create it first")

    def test_newer_version(self, path: Path) -> None:
        self.altered(path, "PRAGMA user_version = 2")
        self.refused(path, "version 2, this fedspa knows 1; install")

    @pytest.mark.parametrize("statement", ["DELETE FROM entry WHERE sequence = 3", "UPDATE total SET count = 1"])
    def test_totals_that_do_not_fit_the_entries(self, path: Path, statement: str) -> None:
        self.altered(path, statement)
        self.refused(path, "disagree|spends are missing")

    def altered(self, path: Path, *statements: str) -> None:
        with Ledger.open(path) as ledger:
            for number in range(3):
                ledger.reserve("a", EVENT, "run", str(number))
        connection = sqlite3.connect(path, isolation_level=None)
        for statement in statements:
            connection.execute(statement)
        connection.close()

    def test_truncated(self, path: Path) -> None:
        self.altered(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(LedgerError, match=r"damaged|cannot be relied on"):
            Ledger.open(path)

    def test_log_without_its_file(self, path: Path) -> None:
        ledger = Ledger.open(path)
        ledger.reserve("a", EVENT, "run", "0")
        path.unlink()
        self.refused(path, "a ledger was removed")
        ledger.close()


def fill(ledger: Ledger) -> None:
    for number in range(1000):
        ledger.reserve("a", EVENT, "run", f"{'x' * 150}{number}")


def test_file_that_cannot_grow(path: Path) -> None:
    """The real thing: the operating system refuses the write in the middle of a transaction."""

    def child() -> None:
        import resource

        with Ledger.open(path) as ledger:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            with pytest.raises(LedgerError, match=r"cannot be read or written|no room"):
                fill(ledger)
            assert 0 < ledger.spent("a")[EVENT] < 1000

    in_fork(child)
    assert verify(path) == []


@pytest.mark.parametrize("what", ["file", "folder"])
def test_not_writable(path: Path, what: str) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "run", "0")
    target = path if what == "file" else path.parent
    os.chmod(path.parent, 0o777)
    os.chmod(path, 0o666)
    os.chmod(target, 0o444 if what == "file" else 0o555)

    def child() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)  # permissions do not bind root
        with pytest.raises(LedgerError, match="make both writable"):
            Ledger.open(path)
        if what == "folder":
            assert verify(path) == []  # a copy on read-only media can still be read
            with pytest.raises(LedgerError, match=r"writable folder|make both writable"):
                Ledger.open(path.parent / "new.sqlite")

    # A child of another user must reach the folder.
    for folder in path.parents[1:4]:
        if folder.owner() == path.owner() and folder != Path("/tmp"):
            os.chmod(folder, 0o755)
    try:
        in_fork(child)
    finally:
        os.chmod(path.parent, 0o755)


def in_fork(body: Callable[[], None]) -> None:
    """Run `body` in a forked child and fail with it."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_removed_or_replaced_while_open(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "run", "0")
        path.rename(path.with_suffix(".away"))
        with pytest.raises(LedgerError, match="removed or replaced"):
            ledger.reserve("a", EVENT, "run", "1")
        path.write_bytes(path.with_suffix(".away").read_bytes())
        with pytest.raises(LedgerError, match="removed or replaced"):
            ledger.reserve("a", EVENT, "run", "1")


def test_not_across_a_fork(path: Path) -> None:
    with Ledger.open(path) as ledger:

        def child() -> None:
            with pytest.raises(LedgerError, match="before a fork"):
                ledger.reserve("a", EVENT, "run", "0")

        in_fork(child)
        ledger.reserve("a", EVENT, "run", "0")


def test_many_agents_are_judged_as_each_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batched question is the one that `would_exceed` asks of one agent, whatever each began with and spent."""
    asked: list[object] = []

    def exceeded(events: Mapping[Event, int], cap: PrivacyBudget, first: FirstPlan | None) -> Limit | None:
        asked.append((frozenset(events.items()), first))
        return exceeded_limit(events, cap, first)

    monkeypatch.setattr(ledger_module, "exceeded_limit", exceeded)
    wanted = dict(zip("abcdefg", (5, 4, 3, 2, 1, 1, 5)))  # nobody knows a and g
    with Ledger.open(path) as ledger:
        for number, agent in enumerate("abcdef"):
            for round_ in range(number):
                event = EVENT if (number + round_) % 3 else OTHER
                ledger.reserve(agent, event, "run", str(round_), announced=None if number == 4 else 3)
        for epsilon in (1.0, 1.7):
            cap = PrivacyBudget(epsilon, 1e-3, "add-remove")
            asked.clear()
            alone = [each for each, n in wanted.items() if ledger.would_exceed(each, EVENT, cap, participations=n)]
            single_examples = set(asked)
            asked.clear()
            assert ledger._over_cap({each: (EVENT, n) for each, n in wanted.items()}, cap, None) == alone
            assert set(asked) == single_examples
            assert bool(alone) is (epsilon == 1.0)
            with pytest.raises(BudgetError, match=f"agent '{alone[0]}'") if alone else nullcontext():
                ledger.require_all(wanted, EVENT, cap)


def test_a_first_entry_that_is_not_there_is_no_first_plan(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "run", "0", announced=5)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE total SET first = 99")
    connection.close()
    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "run", "1", cap=PrivacyBudget(50.0, 1e-3, "add-remove"))
        assert ledger.spent("a") == {EVENT: 2}
