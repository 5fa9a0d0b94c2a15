"""The ledger's promises: durable, counted once, only growing, and refused where it cannot be trusted."""

from __future__ import annotations

import math
import os
import sqlite3
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa import mechanisms
from fedspa.agent.ledger import ledger as ledger_module
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export, verify
from fedspa.agent.ledger.storage import GENESIS, Anchor, _anchor_file, create
from fedspa.algorithms.cpsgd.event import BinomialEvent
from fedspa.errors import BudgetError, LedgerError, PrivacyError
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.mechanisms.gaussian.plan import GAUSSIAN
from fedspa.privacy import accounting, filter
from fedspa.privacy.cap import Cap, FirstPlan, Limit, Total, total
from fedspa.privacy.event import Event, Neighbours
from fedspa.privacy.filter import ORDERS, Moments

EVENT = GaussianEvent("poisson", 10, 600, 300, 1.83)
OTHER = GaussianEvent("poisson", 10, 600, 100, 2.5)
FIXED = GaussianEvent("fixed", 10, 600, 300, 4.12)
CAP = Cap(1.0, 1e-3, "add-remove")


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
        monkeypatch.delitem(GAUSSIAN.events, "gaussian")
        mechanisms._event_of.cache_clear()
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
        assert found is not None
        assert found.digest == "sha"
        with pytest.raises(LedgerError, match="already released another update"):
            ledger.release("a", "run", "0", "other noise")
        assert ledger.find("a", "run", "1") is None


def test_equal_events_count_together_whatever_their_number_types(path: Path) -> None:
    with Ledger.open(path) as ledger:
        for number, z in enumerate((2, 2.0, np.float64(2.0), np.float32(2.0))):
            ledger.reserve("a", GaussianEvent("poisson", np.int64(10), 600, 300, z), "run", str(number))
        assert ledger.spent("a") == {GaussianEvent("poisson", 10, 600, 300, 2.0): 4}
    assert len(export(path)["totals"]) == 1


def test_who_comes_second_to_create_leaves_the_first_ledger_alone(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "run", "0")
    create(path)
    assert len(export(path)["entries"]) == 1
    assert [file.name for file in path.parent.iterdir() if file.name.endswith(".new")] == []


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


def test_what_a_round_shares_is_read_once(path: Path) -> None:
    """Events, entries, totals and anchor are read once for all agents of a simulated round."""
    said: list[str] = []
    with Ledger.open(path) as ledger:
        agents = [f"agent-{number}" for number in range(10)]
        ledger.reserve_many(dict.fromkeys(agents, EVENT), "run", "0")
        ledger._connection.set_trace_callback(said.append)
        ledger.reserve_many(dict.fromkeys(agents, EVENT), "run", "1")
        ledger.release_many(dict.fromkeys(agents, "x"), "run", "1")
    assert sum(statement.startswith("SELECT") for statement in said) < 25
    assert (said.count("BEGIN IMMEDIATE"), said.count("COMMIT")) == (2, 2)


def test_cap_is_checked_before_and_counted_entries_pass(path: Path, quick_epsilon: None) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "run", "0", cap=Cap(0.3, 1e-3, "add-remove"))
        assert not ledger.would_exceed("a", EVENT, CAP, participations=10)
        assert ledger.would_exceed("a", EVENT, CAP, participations=11)
        tight = Cap(0.35, 1e-3, "add-remove")
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


def test_fixed_sampling_has_no_total_under_add_remove(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("a", FIXED, "run", "0")
        with pytest.raises(PrivacyError, match="'replace-one'"):
            ledger.epsilon("a", 1e-3, "add-remove")
        with pytest.raises(PrivacyError, match="'replace-one'"):
            ledger.reserve("b", FIXED, "run", "0", cap=CAP)
        assert ledger.spent("b") == {}


@pytest.mark.parametrize("name", ["", "two\nlines", "\ud800", "x" * 201, None, 3])
def test_names_are_printable_text(path: Path, name: str) -> None:
    with Ledger.open(path) as ledger:
        for triple in ((name, "run", "0"), ("a", name, "0"), ("a", "run", name)):
            with pytest.raises(LedgerError, match="1 to 200 printable"):
                ledger.reserve(triple[0], EVENT, *triple[1:])
    assert export(path)["entries"] == []


def test_names_are_data_not_sql(path: Path) -> None:
    name = "a'; DROP TABLE entry; --"
    with Ledger.open(path) as ledger:
        ledger.reserve(name, EVENT, name, name)
        assert ledger.spent(name) == {EVENT: 1}


@settings(max_examples=25, deadline=None)
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
        ledger.reserve("a", EVENT, "new", message, cap=Cap(1e6, 1e-3, "add-remove"))
        ledger.release("a", "new", message, "sha")
        ledger._connection.set_progress_handler(None, 1)
        return instructions

    with Ledger.open(path) as ledger:
        ledger.reserve("a", EVENT, "old", "first")
        before = work("0")
        ledger.reserve_many({f"agent-{number}": EVENT for number in range(2000)}, "old", "many")
        with ledger.transaction():
            for number in range(5000):
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

    def altered(self, path: Path, *statements: str) -> None:
        with Ledger.open(path) as ledger:
            for number in range(3):
                ledger.reserve("a", EVENT, "run", str(number))
        connection = sqlite3.connect(path, isolation_level=None)
        for statement in statements:
            connection.execute(statement)
        connection.close()


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


def test_closed(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.reserve("a", EVENT, "run", "0")


SUMMED = BinomialEvent(10, 143, 1, 650, 1, 60, False, 10)
ALONE = replace(SUMMED, aggregated=1)


def test_secure_aggregation_is_paid_as_the_server_saw_it(path: Path) -> None:
    """Nothing hid the single updates, so a total over runs cannot count on the noise of the other agents."""
    labelled = accounting.epsilon({SUMMED: 2}, 1e-3, neighbours="replace-one")
    seen = accounting.epsilon({ALONE: 2}, 1e-3, neighbours="replace-one")
    assert 5 * labelled < seen < math.inf
    with Ledger.open(path) as ledger:
        for message in ("0", "1"):
            ledger.reserve("a", SUMMED, "summed", message, announced=2)
        assert ledger.epsilon("a", 1e-3, "replace-one") == seen
        assert ledger.spent("a") == {SUMMED: 2}  # written down as it was announced
        between = Cap((labelled + seen) / 2, 1e-3, "replace-one")
        quiet = replace(ALONE, trials=10**6)
        assert ledger.would_exceed("a", quiet, between)
        with pytest.raises(BudgetError, match="0 left"):
            ledger.reserve("a", quiet, "local", "0", cap=between)
        with pytest.raises(BudgetError):
            ledger.reserve("b", SUMMED, "summed", "0", cap=Cap(labelled, 1e-3, "replace-one"))
        ledger.reserve("a", ALONE, "local", "0")
        assert ledger.total("a", 1e-3, "replace-one") == total({ALONE: 3}, 1e-3, "replace-one", None)


def test_secure_aggregation_without_a_local_guarantee_is_infinite(path: Path) -> None:
    with Ledger.open(path) as ledger:
        ledger.reserve("a", replace(SUMMED, trials=6), "summed", "0")
        assert ledger.epsilon("a", 1e-3, "replace-one") == math.inf
