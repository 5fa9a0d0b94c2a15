"""A member's answers when a sum is recovered, in a process that dies anywhere: one set of survivors a session."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.ledger.report import verify
from fedspa.agent.participate import Member, Outbox, Question, Refusal, Sent, answer_exchange, digest, message_name
from fedspa.errors import LedgerError
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.secagg import recovery
from fedspa.secagg.keys import Roster, SecretKey
from fedspa.secagg.masking import sealed_bytes
from fedspa.secagg.recovery import STEPS, Progress, Step
from fedspa.secagg.session import Session

NAMES = tuple(f"clinic-{number}" for number in range(6))
KEYS = {name: SecretKey(bytes([number + 1]) * 32) for number, name in enumerate(NAMES)}
ROSTER = Roster({name: key.public for name, key in KEYS.items()})
MEMBER = Member(NAMES[0], KEYS[NAMES[0]], ROSTER)
EVENT = GaussianEvent("poisson", 10, 600, 30, 2.47)


class Crash(BaseException):
    """What kill -9 is to the code: nothing after it runs that writes."""


class Clinic:
    """The first clinic, which sent an upload in each of its sessions."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.sqlite"
        Ledger.open(self.path).close()
        self.values = np.arange(4)

    def upload(self, t: int, attempt: int = 1) -> Session:
        session = Session("run", t, attempt, ROSTER.members, bytes(32), -100, 100, 4, threshold=4, least=4)
        payload = recovery.upload(self.values, session, MEMBER.name, MEMBER.secret, (1 + t).to_bytes(32, "big"))
        outbox, message = Outbox(self.path, MEMBER.name), message_name(t, attempt)
        with outbox.locked(), Ledger.open(self.path, create=False) as ledger:
            ledger.reserve(MEMBER.name, EVENT, "run", message)
            outbox.put_progress(session, Progress(NAMES))
            outbox.put("run", Sent(t, payload, attempt))
            ledger.release(MEMBER.name, "run", message, digest(payload))
        return session

    def last(self) -> bytes:
        sent = Outbox(self.path, MEMBER.name).last("run")
        return sent.payload

    def answer(self, session: Session, step: Step, survivors: tuple[str, ...]) -> bytes:
        body = recovery._bitmap(session, survivors)
        if step == "open":  # with the tags of everybody else, and shares that nobody sealed
            body += b"".join(
                recovery.answer(session, name, KEYS[name], Progress(survivors), "commit", body)[:16]
                for name in survivors
            ) + bytes(48 * len(survivors))
        return answer_exchange(Question("run", session.binding, step, body), MEMBER, MEMBER.name, self.path)


@pytest.mark.parametrize("runs", [20, pytest.param(1000, marks=pytest.mark.long)])
def test_crashes_anywhere_find_no_two_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int) -> None:
    chance, fatal = Random(7), [""]
    put = Outbox.put_progress

    def mortal(*arguments: Any) -> None:
        if fatal[0] == "before":
            raise Crash
        put(*arguments)
        if fatal[0] == "after":
            raise Crash

    monkeypatch.setattr(Outbox, "put_progress", mortal)
    monkeypatch.setattr("fedspa.durable.force", lambda path: None)
    clinic, codes, crashes = Clinic(tmp_path), Counter[str](), 0
    for t in range(runs):
        fatal[0] = ""
        session = clinic.upload(t)
        left: dict[Step, list[tuple[str, ...]]] = defaultdict(list)
        said: dict[tuple[Step, tuple[str, ...]], bytes] = {}
        for _ in range(25):
            size = chance.choice([4, 5, 6])
            survivors = tuple(sorted(chance.sample(NAMES, size)))
            step = chance.choice(STEPS)
            fatal[0] = chance.choice(["", "before", "after"])
            try:
                found = clinic.answer(session, step, survivors)
            except Crash:
                crashes += 1
            except Refusal as refusal:
                codes[refusal.code] += 1
            else:
                assert said.setdefault((step, survivors), found) == found
                left[step].append(survivors)
        assert len(set(left["commit"] + left["open"])) <= 1
        if left["commit"]:
            assert set(left["exclude"][-1:]) <= set(left["commit"]) | set(left["exclude"])
        excluded = list(dict.fromkeys(left["exclude"]))
        assert all(set(later) < set(earlier) for earlier, later in pairwise(excluded))
    assert crashes > runs
    assert codes.keys() == {"aggregation"}


def serve(folder: Path, seed: int) -> None:
    """Be the clinic until killed: upload in new sessions, and answer for any survivors. `left` has a line for each."""
    chance, clinic = Random(seed), Clinic(folder)
    with (folder / "left").open("ab", buffering=0) as left:
        while True:
            progress = Outbox(clinic.path, MEMBER.name).progress("run")
            t = 0 if progress is None else progress[0].round + (chance.random() < 0.1)
            with suppress(LedgerError, Refusal):
                if progress is None or t > progress[0].round:
                    clinic.upload(t)
                    left.write(b"%d upload %s\n" % (t, clinic.last().hex().encode()))
                session = Outbox(clinic.path, MEMBER.name).progress("run")[0]  # type: ignore[index]
                survivors = tuple(sorted(chance.sample(NAMES, chance.choice([4, 5, 6]))))
                step = chance.choice(STEPS)
                clinic.answer(session, step, survivors)
                left.write(f"{session.round} {step} {','.join(survivors)}\n".encode())


def left_by(folder: Path) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return what left the clinic, by session: uploads, and sets of survivors that were committed to or opened."""
    sets, uploads = defaultdict(set), defaultdict(set)
    for line in (folder / "left").read_text().splitlines():
        t, step, what = line.split(" ")
        if step != "exclude":
            (uploads if step == "upload" else sets)[t].add(what)
    return uploads, sets


@pytest.mark.parametrize("kills", [24, pytest.param(2000, marks=pytest.mark.long)])
def test_killed_at_random_instants_a_session_has_one_upload_and_one_set(tmp_path: Path, kills: int) -> None:
    """SIGKILL anywhere in upload, exchange and ledger: never two uploads of a session, and never two sets. On a busy
    machine processes get less done before they are killed, and more of them are started."""
    chance, context = Random(11), multiprocessing.get_context("fork")
    uploads: dict[str, set[str]] = {}
    sets: dict[str, set[str]] = {}
    for seed in range(20 * kills):
        process = context.Process(target=serve, args=(tmp_path, seed))
        process.start()
        time.sleep(chance.uniform(0.05, 0.3))
        process.kill()
        process.join()
        if seed >= kills - 1:
            uploads, sets = left_by(tmp_path)
            if min(len(uploads), len(sets)) >= 3:
                break
    assert len(uploads) >= 3
    assert len(sets) >= 3
    assert all(len(found) == 1 for found in (*sets.values(), *uploads.values()))
    assert verify(tmp_path / "ledger.sqlite") == []


def test_it_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outbox that forgets lets a member agree to two sets of survivors."""
    clinic = Clinic(tmp_path)
    session = clinic.upload(0)
    monkeypatch.setattr(Outbox, "put_progress", lambda *arguments: None)
    clinic.answer(session, "exclude", NAMES[:5])
    with pytest.raises(Refusal):
        clinic.answer(session, "commit", NAMES[:5])  # only what was written down counts
    assert clinic.answer(session, "commit", NAMES)
    assert clinic.answer(session, "exclude", NAMES[:4])


def test_only_the_session_of_the_last_upload_is_answered(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path)
    first = clinic.upload(0)
    assert clinic.answer(first, "commit", NAMES)
    second = clinic.upload(0, attempt=2)
    with pytest.raises(Refusal) as caught:
        clinic.answer(first, "commit", NAMES)
    assert caught.value.code == "stale"
    assert clinic.answer(second, "commit", NAMES)


@pytest.mark.parametrize("change", ["removed", "another key"])
def test_a_roster_that_changed_ends_the_exchange(tmp_path: Path, change: str) -> None:
    clinic = Clinic(tmp_path)
    session = clinic.upload(0)
    members = {name: key for name, key in ROSTER.members.items() if name != NAMES[5]}
    if change == "another key":
        members[NAMES[5]] = SecretKey(bytes([99]) * 32).public
    member = Member(MEMBER.name, MEMBER.secret, Roster(members))
    body = recovery._bitmap(session, NAMES)
    with pytest.raises(Refusal) as caught:
        answer_exchange(Question("run", session.binding, "commit", body), member, member.name, clinic.path)
    assert caught.value.code == "aggregation"
    assert clinic.answer(session, "commit", NAMES)


def test_an_upload_that_was_paid_for_and_never_sent_answers_nothing(tmp_path: Path) -> None:
    clinic = Clinic(tmp_path)
    clinic.upload(0)
    session = Session("run", 1, 1, ROSTER.members, bytes(32), -100, 100, 4, threshold=4, least=4)
    outbox = Outbox(clinic.path, MEMBER.name)
    with outbox.locked(), Ledger.open(clinic.path, create=False) as ledger:  # and then it died
        ledger.reserve(MEMBER.name, EVENT, "run", message_name(1))
        outbox.put_progress(session, Progress(NAMES))
    with pytest.raises(Refusal) as caught:
        clinic.answer(session, "commit", NAMES)
    assert caught.value.code == "stale"


def test_shares_lie_in_the_outbox_sealed_only(tmp_path: Path) -> None:
    """A thief of the disk finds messages that left, and names, keys and survivors: no seed and no share."""
    clinic = Clinic(tmp_path)
    session = clinic.upload(0)
    files = {path.suffix: path.read_bytes() for path in (tmp_path / "ledger.sqlite.outbox").iterdir()}
    assert files.keys() == {".payload", ".session"}
    assert len(files[".payload"]) > sealed_bytes(session)
    assert b"seed" not in files[".session"]
