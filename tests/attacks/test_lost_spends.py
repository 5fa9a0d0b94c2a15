"""Attack: damage or remove files of a ledger, and hope that what it acknowledged is forgotten.

Before there was an anchor, one flipped bit in `ledger.sqlite-wal` after a kill made SQLite drop the tail of its log: 70
entries became 60, `verify` said "sound", and the run went on as if nothing had been spent. An old copy of the database
passed for the ledger in the same way.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from fedspa.agent.ledger import storage
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import accept_loss, export, summary, verify
from fedspa.errors import LedgerError
from fedspa.mechanisms.gaussian.plan import GaussianEvent

EVENT = GaussianEvent("poisson", 10, 600, 30, 2.47)
ENDS = ("", "-wal", ".anchor")
AGENTS, ROUNDS = 5, 6
FRAME = 24 + 4096  # SQLite's log: a header of 32 bytes, then a header of 24 and a page each time

Files = Mapping[str, bytes]


def copied(path: Path) -> Files:
    return {end: Path(f"{path}{end}").read_bytes() for end in ENDS if Path(f"{path}{end}").exists()}


def put(path: Path, files: Files) -> None:
    for end in (*ENDS, "-shm"):
        Path(f"{path}{end}").unlink(missing_ok=True)
    for end, content in files.items():
        Path(f"{path}{end}").write_bytes(content)


def take_part(ledger: Ledger, number: int) -> None:
    agents = [f"agent-{i}" for i in range(AGENTS)]
    ledger.reserve_many(dict.fromkeys(agents, EVENT), "run", f"round-{number}")
    ledger.release_many(dict.fromkeys(agents, f"digest {number}"), "run", f"round-{number}")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> list[Files]:
    """The files as a kill after each round leaves them: nothing was closed, the log holds what the database lacks."""
    path = tmp_path_factory.mktemp("killed") / "ledger.sqlite"
    after = []
    with Ledger.open(path) as ledger:
        for number in range(ROUNDS):
            take_part(ledger, number)
            after.append(copied(path))
    return after


def acknowledged(rounds: int) -> set[tuple[str, str, bool]]:
    """Who was in which round, and that it was sent."""
    return {(f"agent-{i}", f"round-{number}", True) for number in range(rounds) for i in range(AGENTS)}


def is_noticed(path: Path) -> bool:
    """Whether the ledger is refused or `verify` tells; where neither, nothing acknowledged may be missing."""
    try:
        if verify(path):
            return True
        Ledger.open(path, create=False).close()
        held = {(entry["agent"], entry["message"], entry["digest"] is not None) for entry in export(path)["entries"]}
    except LedgerError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return True
    assert held >= acknowledged(ROUNDS)
    return False


def test_the_files_that_a_kill_leaves_are_whole(killed: list[Files], tmp_path: Path) -> None:
    for rounds, files in enumerate(killed, start=1):
        put(tmp_path / "ledger.sqlite", files)
        assert verify(tmp_path / "ledger.sqlite") == []
        with Ledger.open(tmp_path / "ledger.sqlite", create=False) as ledger:
            assert ledger.spent("agent-0") == {EVENT: rounds}


def test_one_flipped_bit_in_the_log(killed: list[Files], tmp_path: Path) -> None:
    """The finding itself: the first byte of the last round's first frame."""
    path, files = tmp_path / "ledger.sqlite", dict(killed[-1])
    log = bytearray(files["-wal"])
    log[len(killed[-2]["-wal"]) + 100] ^= 1
    put(path, {**files, "-wal": bytes(log)})
    [problem] = verify(path)
    assert problem.startswith(f"it acknowledged {ROUNDS * AGENTS} entries and holds {(ROUNDS - 1) * AGENTS}: 5 spends")
    for look in (lambda: Ledger.open(path), lambda: summary(path, delta=1e-3, neighbours="add-remove")):
        with pytest.raises(LedgerError, match="5 spends are missing; put the newest copy of both files back"):
            look()


def damages(files: Files, chance: random.Random, count: int) -> Iterator[Files]:
    """Flipped bits, wiped runs of bytes and cuts, everywhere; in a log also in each frame's header."""
    for end, content in files.items():
        places = [chance.randrange(len(content)) for _ in range(count)]
        if end == "-wal":
            places += [32 + frame * FRAME + chance.randrange(24) for frame in range((len(content) - 32) // FRAME)]
        if end == ".anchor":
            places += [slot + chance.randrange(300) for slot in (0, 4096) for _ in range(count // 2)]
        for place in places:
            flipped = bytearray(content)
            flipped[place] ^= 1 << chance.randrange(8)
            yield {**files, end: bytes(flipped)}
        for place in places[:: 1 + len(places) // count]:
            yield {**files, end: content[:place]}
            yield {**files, end: content[:place] + bytes(min(512, len(content) - place)) + content[place + 512 :]}


def attack(killed: list[Files], path: Path, seed: int, count: int) -> dict[bool, int]:
    found = {True: 0, False: 0}
    for files in damages(killed[-1], random.Random(seed), count):
        put(path, files)
        found[is_noticed(path)] += 1
    return found


def test_no_damage_hides_what_was_acknowledged(killed: list[Files], tmp_path: Path) -> None:
    found = attack(killed, tmp_path / "ledger.sqlite", seed=1, count=30)
    assert min(found.values()) > 10  # both happened: damage that matters is told, damage that does not is lived with


@pytest.mark.long
def test_no_damage_hides_what_was_acknowledged_long(killed: list[Files], tmp_path: Path) -> None:
    found = attack(killed, tmp_path / "ledger.sqlite", seed=2, count=300)
    assert min(found.values()) > 100


def test_damage_after_a_clean_end(killed: list[Files], tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    put(path, killed[-1])
    Ledger.open(path, create=False).close()  # folds the log into the database
    closed = copied(path)
    assert set(closed) == {"", ".anchor"}
    for files in damages(closed, random.Random(3), 60):
        put(path, files)
        is_noticed(path)


@pytest.mark.parametrize("end", ENDS)
def test_a_file_of_an_earlier_moment(killed: list[Files], tmp_path: Path, end: str) -> None:
    """A restored backup of one file. An old anchor alone is no loss: the ledger is ahead of it and whole."""
    path = tmp_path / "ledger.sqlite"
    for earlier in killed[:-1]:
        put(path, {**killed[-1], end: earlier[end]})
        # The database itself has not changed since: everything is in the log.
        assert is_noticed(path) == (end == "-wal")


@pytest.mark.parametrize("end", ENDS)
def test_a_file_that_is_gone(killed: list[Files], tmp_path: Path, end: str) -> None:
    path = tmp_path / "ledger.sqlite"
    left = {other: content for other, content in killed[-1].items() if other != end}
    put(path, left)
    with pytest.raises(LedgerError, match=r"a ledger was removed|spends are missing|anchor ledger.sqlite.anchor is"):
        Ledger.open(path)  # even for one who may create it
    assert not Path(f"{path}{end}").exists() or end == "-wal"


def test_the_database_alone(killed: list[Files], tmp_path: Path) -> None:
    """A ledger in use, copied without its log and its anchor. If only the log had the ledger's name, the copy would be
    a new ledger: `verify` would find nothing wrong, and 30 spends would be missing."""
    path = tmp_path / "ledger.sqlite"
    for files in killed:
        put(path, {"": files[""]})
        [problem] = verify(path)
        assert "its anchor ledger.sqlite.anchor is missing" in problem
        with pytest.raises(LedgerError, match=r"its anchor ledger\.sqlite\.anchor is missing"):
            Ledger.open(path)


def test_a_database_that_is_gone_with_its_log(killed: list[Files], tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    put(path, {".anchor": killed[-1][".anchor"]})
    with pytest.raises(LedgerError, match=r"its anchor ledger\.sqlite\.anchor is there: a ledger was removed"):
        Ledger.open(path)
    assert not path.exists()


def test_another_ledger_in_its_place(killed: list[Files], tmp_path: Path) -> None:
    """A fresh one, whose chain begins like all others; and one with as many entries."""
    path, other = tmp_path / "ledger.sqlite", tmp_path / "other.sqlite"
    with Ledger.open(other) as ledger:
        for rounds in range(ROUNDS + 1):
            if rounds:
                take_part(ledger, rounds)
            put(path, {**copied(other), ".anchor": killed[-1][".anchor"]})
            with pytest.raises(LedgerError, match="is another ledger's, or the ledger was replaced"):
                Ledger.open(path)


@pytest.mark.parametrize("becomes", ["gone", "old", "empty"])
def test_the_anchor_of_a_ledger_in_use(tmp_path: Path, becomes: str) -> None:
    """Looked at before each write, and told of each."""
    path, anchor = tmp_path / "ledger.sqlite", tmp_path / "ledger.sqlite.anchor"
    with Ledger.open(path) as ledger:
        old = anchor.read_bytes()
        take_part(ledger, 0)
        if becomes == "old":  # an old one is no loss, and is brought up to the ledger again
            anchor.write_bytes(old)
            take_part(ledger, 1)
            assert b"entries 10 releases 10 " in anchor.read_bytes()
            return
        anchor.unlink() if becomes == "gone" else anchor.write_bytes(b"")
        with pytest.raises(LedgerError, match=r"anchor is (missing|damaged)"):
            take_part(ledger, 1)
        assert not anchor.exists() or anchor.read_bytes() == b""


def test_a_loss_is_accepted_by_name_and_told_ever_after(killed: list[Files], tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    put(path, {**killed[-1], "-wal": killed[2]["-wal"]})
    with pytest.raises(LedgerError, match="holds 15 entries, not 30"):
        accept_loss(path, 30)
    assert is_noticed(path)  # a refused acceptance changes nothing
    assert "15 entries behind entry 15 may be lost" in str(accept_loss(path, 15))
    assert verify(path) == []
    with Ledger.open(path, create=False) as ledger:
        take_part(ledger, 9)
    assert [loss.known_entries for loss in summary(path, delta=1e-3, neighbours="add-remove").losses] == [30]
    assert [loss["known_entries"] for loss in export(path)["losses"]] == [30]
    with pytest.raises(LedgerError, match="nothing to accept"):
        accept_loss(path, 20)


def test_a_lost_anchor_is_accepted_by_name(killed: list[Files], tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    put(path, {end: killed[-1][end] for end in ("", "-wal")})
    assert "an unknown number of entries" in str(accept_loss(path, 30))
    with Ledger.open(path, create=False) as ledger:
        take_part(ledger, 9)


def test_what_is_damaged_otherwise_cannot_be_accepted(killed: list[Files], tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    put(path, {"": killed[-1][""][:-4096]})
    with pytest.raises(LedgerError):
        accept_loss(path, 0)


@pytest.mark.parametrize("torn", [0, 1, 100, 300])
def test_killed_between_commit_and_anchor(tmp_path: Path, torn: int) -> None:
    """Before the anchor was written, or in the middle of it: a ledger ahead of its anchor lacks nothing."""
    path, write = tmp_path / "ledger.sqlite", os.pwrite

    def dying(descriptor: int, content: bytes, place: int) -> int:
        write(descriptor, content[:torn], place)
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    with Ledger.open(path) as ledger:
        take_part(ledger, 0)
    for number in (1, 2, 3):  # either slot is hit
        child = os.fork()
        if child == 0:
            with Ledger.open(path) as ledger:
                os.pwrite = dying
                take_part(ledger, number)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert verify(path) == []
        with Ledger.open(path, create=False) as ledger:
            assert ledger.spent("agent-0") == {EVENT: number + 1}


def test_a_anchor_that_another_process_wrote_is_forced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have waited for no disk, or died before it had: who is told that its spend is safe must not rely on it."""
    path, forced, force = tmp_path / "ledger.sqlite", [], os.fsync
    with Ledger.open(path) as ledger:
        take_part(ledger, 0)
        seen = storage.read_anchor(path)
        assert seen is not None
        monkeypatch.setattr(os, "fsync", lambda descriptor: (forced.append(descriptor), force(descriptor))[1])
        storage.advance_anchor(path, seen, force=True)
        assert len(forced) == 1
        storage.advance_anchor(path, seen, force=False)
        assert len(forced) == 1


def test_killed_between_the_anchor_and_the_ledger_that_it_is_made_for(tmp_path: Path) -> None:
    """An anchor of no entries without a ledger: nothing was acknowledged, and the next process takes its name."""
    path = tmp_path / "ledger.sqlite"
    Ledger.open(path).close()
    seen = storage.read_anchor(path)
    path.unlink()
    with Ledger.open(path) as ledger:
        assert ledger.name == seen.ledger
        ledger.reserve("a", EVENT, "run", "1")
    assert verify(path) == []


@pytest.mark.parametrize("look", [Ledger.open, verify])
def test_an_empty_ledger_in_place_of_one_in_use(tmp_path: Path, look: Callable[[Path], object]) -> None:
    """Of the same name, as it was made: its missing entries give it away, and so does a missing anchor."""
    path, new = tmp_path / "ledger.sqlite", tmp_path / "new.sqlite"
    Ledger.open(path).close()
    shutil.copy(path, new)
    with Ledger.open(path) as ledger:
        take_part(ledger, 0)
    shutil.copy(new, path)
    for problem in ("acknowledged 5 entries and holds 0", "its anchor ledger.sqlite.anchor is missing"):
        try:
            found = str(look(path))
        except LedgerError as error:
            found = str(error)
        assert problem in found
        Path(f"{path}.anchor").unlink(missing_ok=True)
    accept_loss(path, 0)
    assert len(summary(path, delta=1e-3, neighbours="add-remove").losses) == 1


def test_an_owner_accepts_a_loss_on_the_command_line(
    killed: list[Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedspa.cli import main

    monkeypatch.chdir(tmp_path)
    put(Path("ledger.sqlite"), {**killed[-1], "-wal": killed[0]["-wal"]})

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["fedspa", "ledger", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, said.err

    code, out, _ = call("verify", "ledger.sqlite")
    assert (code, out.partition(":")[0]) == (1, "DAMAGED")
    assert "acknowledged 30 entries and holds 5" in out
    code, _, err = call("show", "ledger.sqlite")
    assert (code, err.count("\n")) == (2, 1)
    assert call("accept-loss", "ledger.sqlite", "--entries", "30")[0] == 2
    assert call("accept-loss", "ledger.sqlite", "--entries", "5")[0] == 0
    words = "25 entries behind entry 5 may be lost"
    code, out, _ = call("verify", "ledger.sqlite")
    assert (code, words in out) == (0, True)
    assert words in " ".join(call("show", "ledger.sqlite")[1].split())
