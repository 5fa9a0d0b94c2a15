"""What a ledger's reader is told, and that an edited file does not pass `verify`."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import export, lines, summary, verify
from fedspa.agent.ledger.storage import GENESIS, entry_hash
from fedspa.algorithms.cpsgd.plan import BinomialEvent
from fedspa.errors import LedgerError
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy.budget import BY_FILTER, PrivacyBudget, total, worst_case_total

EVENT = GaussianEvent("poisson", 50, 500, 50, 8.20)
OTHER = GaussianEvent("poisson", 50, 500, 50, 12.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    with Ledger.open(path) as ledger:
        for number in range(4):
            ledger.reserve_many({"a": EVENT, "b": OTHER}, "run-1", str(number))
        ledger.release_many({"a": "sha a", "b": "sha b"}, "run-1", "0")
        ledger.reserve("a", OTHER, "run-2", "0")
    return path


def edit(path: Path, *statements: str) -> None:
    """Edit as someone would with SQLite's own shell."""
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_summary(path: Path) -> None:
    told = summary(path, delta=1e-3, neighbours="add-remove", cap=PrivacyBudget(1.0, 1e-3, "add-remove"))
    assert (told.entries, told.releases, len(told.head)) == (9, 2, 64)
    a, b = told.agents
    assert (a.agent, b.agent) == ("a", "b")
    assert [(run.run, run.participations, run.released) for run in a.runs] == [("run-1", 4, 1), ("run-2", 1, 0)]
    assert a.runs[0].first_at.endswith("+00:00")
    assert a.spent == {EVENT: 4, OTHER: 1}
    assert a.last_event == OTHER
    assert (a.delta, a.neighbours, a.accountant) == (1e-3, "add-remove", BY_FILTER)
    assert a.epsilon_left == a.cap.epsilon - a.epsilon
    assert a.participations_left is not None
    with Ledger.open(path) as ledger:
        assert a.epsilon == ledger.epsilon("a", 1e-3, "add-remove") > b.epsilon > 0
        assert not ledger.would_exceed("a", OTHER, a.cap, participations=a.participations_left)
        assert ledger.would_exceed("a", OTHER, a.cap, participations=a.participations_left + 1)


def test_export_is_json_and_can_be_checked_without_fedspa(path: Path) -> None:
    told = json.loads(json.dumps(export(path), allow_nan=False))
    assert (told["kind"], told["version"]) == ("fedspa-ledger", 1)
    assert {(total["agent"], total["count"]) for total in told["totals"]} == {("a", 4), ("a", 1), ("b", 4)}
    assert [entry["sequence"] for entry in told["entries"]] == list(range(1, 10))
    assert told["entries"][0]["digest"] == "sha a"
    assert told["entries"][-1]["released_at"] is None
    link = GENESIS
    for entry in told["entries"]:
        event = json.dumps(entry["event"], sort_keys=True, separators=(",", ":"))
        names = (entry[key] for key in ("agent", "run", "message"))
        link = entry_hash(link, entry["sequence"], *names, event, entry["reserved_at"], entry["announced"])
        assert entry["hash"] == link
    assert told["head"] == {"entries": 9, "releases": 2, "hash": link}


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE entry SET agent = x'ff' WHERE sequence = 2",
        "UPDATE release SET digest = x'00' WHERE sequence = 1",
    ],
)
def test_lines_that_are_no_text_are_refused(path: Path, statement: str) -> None:
    edit(path, statement)
    with Ledger.read(path) as ledger, pytest.raises(LedgerError, match="no text where text belongs"):
        lines(ledger, "run-1")


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        (["DELETE FROM entry WHERE sequence = 5"], "entries 5 to 5 are missing"),
        (["DELETE FROM entry WHERE sequence = 9"], "it acknowledged 9 entries and holds 8"),
        (["UPDATE entry SET agent = 'b' WHERE sequence = 9"], "entry 9: its hash does not fit"),
        (["UPDATE entry SET agent = x'00ff' WHERE sequence = 2"], "entry 2: its hash does not fit"),
        (["UPDATE entry SET hash = 'x' WHERE sequence = 2"], "entry 3: its hash does not fit"),
        (["UPDATE event SET text = replace(text, '8.2', '8.3')"], "entry 1: its hash does not fit"),
        (["UPDATE event SET text = '{}' WHERE id = 1"], "event 1: "),
        (["UPDATE event SET id = 7 WHERE id = 1"], "refers to a missing event"),
        (["UPDATE total SET count = 3 WHERE count = 4"], "the total of agent 'a', event 1 differs"),
        (["DELETE FROM release WHERE sequence = 1"], "the last release has number 2, and there are 1"),
        (["DELETE FROM release"], "it acknowledged 2 releases and holds 0"),
        (["DELETE FROM identity"], "is another ledger's"),
        (["DROP TABLE release"], "no such table"),
    ],
)
def test_verify_sees_an_edit(path: Path, statements: list[str], expected: str) -> None:
    edit(path, *statements)
    problems = verify(path)
    assert any(expected in problem for problem in problems), problems
    assert not any("\n" in problem for problem in problems)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE event SET text = '{' WHERE id = 1",
        "UPDATE event SET text = CAST(text AS BLOB)",
        "UPDATE entry SET event = 99 WHERE sequence = 2",
        "UPDATE entry SET run = x'00ff' WHERE sequence = 2",
    ],
)
def test_an_export_of_an_edited_ledger_is_refused(path: Path, statement: str) -> None:
    edit(path, statement)
    with pytest.raises(LedgerError):
        export(path)


def test_a_blank_page_anywhere_is_noticed(path: Path) -> None:
    with Ledger.open(path) as ledger:
        for number in range(300):
            ledger.reserve("a", EVENT, "run-4", str(number))
    content = path.read_bytes()
    for page in range(len(content) // 4096):
        damaged = path.with_name(f"{page}.sqlite")
        damaged.write_bytes(content[: page * 4096] + bytes(4096) + content[(page + 1) * 4096 :])
        try:
            problems = verify(damaged)
        except LedgerError as error:
            problems = [str(error)]
        assert problems, page
        assert not any("\n" in problem for problem in problems)


def test_reading_leaves_nothing_behind_and_changes_nothing(path: Path) -> None:
    before = path.read_bytes(), path.stat().st_mtime_ns
    assert verify(path) == []
    summary(path, delta=1e-5, neighbours="add-remove")
    export(path)
    assert {found.name for found in path.parent.iterdir()} == {path.name, f"{path.name}.anchor"}
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_a_log_with_entries_is_read_and_left_to_a_writer(path: Path, tmp_path: Path) -> None:
    """As after a crash: the last entry is only in the write-ahead log."""
    (tmp_path / "crashed").mkdir()
    crashed = tmp_path / "crashed" / path.name
    with Ledger.open(path) as ledger:
        ledger.reserve("c", EVENT, "run-3", "0")
        for end in ("", "-wal", ".anchor"):
            shutil.copy(f"{path}{end}", f"{crashed}{end}")
        assert verify(path) == []
        ledger.reserve("c", EVENT, "run-3", "1")  # a reader that closes takes no log from a writer
    log = Path(f"{crashed}-wal")
    before = crashed.read_bytes(), log.read_bytes()
    assert log.stat().st_size > 0
    assert [entry["agent"] for entry in export(crashed)["entries"]][-1] == "c"
    assert (crashed.read_bytes(), log.read_bytes()) == before
    assert len(export(path)["entries"]) == len(export(crashed)["entries"]) + 1


def test_both_views_of_what_was_aggregated(tmp_path: Path) -> None:
    """Beside a local run: ε against the server, the worst case, and what is left of a cap, trusting or not."""
    local = BinomialEvent(10, 143, 1, 650, 1, 60)
    summed = replace(local, members=10, colluders=2)
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.reserve("a", summed, "run", "0")
        ledger.reserve("a", local, "another", "0")
        ledger.reserve("b", local, "another", "0")
        stated = ledger.total("a", 1e-3, "replace-one")
        own, worst = stated.epsilon, worst_case_total(ledger.spent("a"), 1e-3, "replace-one", None, stated).epsilon
        assert own < worst == total({local: 2}, 1e-3, "replace-one", None).epsilon
    blind = PrivacyBudget(2 * worst, 1e-3, "replace-one")
    trusting = replace(blind, worst_case=2 * worst, min_honest=8)
    more = []
    for cap, left in ((None, None), (blind, worst), (trusting, 2 * worst - own)):
        a, b = summary(tmp_path / "ledger.sqlite", delta=1e-3, neighbours="replace-one", cap=cap).agents
        assert (a.epsilon, a.epsilon_worst_case, b.epsilon_worst_case) == (own, worst, b.epsilon)
        assert a.epsilon_left == (None if left is None else pytest.approx(left))
        more.append(a.participations_left)
    assert more[0] is None
    assert more[1] == more[2] > 0  # the last event is local, and the worst case bounds it under either cap


def test_a_summary_without_the_entries_is_refused(path: Path) -> None:
    edit(path, "DELETE FROM entry WHERE sequence = 8")  # the last of b
    with pytest.raises(LedgerError, match="entries are missing"):
        summary(path, delta=1e-5, neighbours="add-remove", agent="b")
