"""A member of a cohort: whom it adds up with, what it refuses before it pays, and one message under each mask."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from small_runs import small
from small_sums import SUMS
from torch import Tensor

from fedspa.agent import participate
from fedspa.agent.ledger.ledger import Ledger
from fedspa.agent.participate import Member, Outbox, Refusal, Request, participate_once
from fedspa.agent.policy import Policy, PolicyRefusal
from fedspa.algorithms import Agent
from fedspa.algorithms.base import IntegerUpdate, session_of
from fedspa.errors import ConfigError
from fedspa.runs.config import load
from fedspa.runs.setup import prepare
from fedspa.secagg.keys import Roster, SecretKey
from fedspa.secagg.session import Session
from fedspa.server.coordinator import Coordinator

NAMES = ("east", "north", "south", "west")
KEYS = {name: SecretKey(bytes([number + 1]) * 32) for number, name in enumerate(NAMES)}
ROSTER = Roster({name: key.public for name, key in KEYS.items()})
WEST = Member("west", KEYS["west"], ROSTER)
POLICY = Policy(1000.0, 1e-3, "add-remove", 0.01, 1000, 1000, 1.0, ("l2",), min_honest=2, max_worst_case=1000.0)


class Clinic:
    """West, asked by a server for sums. Its training is a draw of numbers; `trained` counts them."""

    def __init__(self, folder: Path) -> None:
        self.job = prepare(load(small(folder / "run", **SUMS["fedspa"], federation={"rounds": 80})))
        self.server = Coordinator(self.job.server)
        self.agent = Agent(0, self.job.train.x[:240], self.job.train.y[:240], bytes(16), bytes(32), secret=WEST.secret)
        self.trained: Counter[tuple[str, str]] = Counter()
        self.chance = np.random.default_rng(0)
        self.ledger = folder / "ledger.sqlite"
        Ledger.open(self.ledger).close()

    def respond(self, theta: Tensor, terms: Any, agents: Sequence[Agent], engine: Any) -> Iterator[IntegerUpdate]:
        values = self.chance.integers(-3, 4, terms.plan.aggregation.count)
        yield IntegerUpdate(terms.round, terms.dimension, bytes(16), values)

    def asked(
        self, run: str = "run", t: int = 0, attempt: int = 1, cohort: Sequence[str] = NAMES, **other: Any
    ) -> Request:
        """As a server announces it that has the same roster, and adds up in the session that it announces."""
        terms, theta = replace(self.server.terms(), round=t), other.get("theta", self.server.state.theta)
        algorithm = replace(self.job.server.algorithm, respond=self.respond)
        told = algorithm, terms, theta, self.job.server.coding, "secure"
        session = session_of(run, attempt, ROSTER.cohort(cohort), *told)
        return WEST.with_session(Request(run, *told, attempt), cohort, session.binding)

    def once(self, request: Request) -> bytes:
        return participate_once(request, "west", self.agent, self.job.engine, self.ledger, POLICY)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Clinic:
    return Clinic(tmp_path_factory.mktemp("clinic"))


@pytest.fixture
def clinic(prepared: Clinic, tmp_path: Path) -> Clinic:
    prepared.ledger = tmp_path / "ledger.sqlite"
    Ledger.open(prepared.ledger).close()
    return prepared


def test_a_member_needs_the_key_of_its_own_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"another key for 'west'.*west = "):
        Member("west", KEYS["east"], ROSTER)
    with pytest.raises(ConfigError, match="no line for 'up'"):
        Member("up", KEYS["east"], ROSTER)
    KEYS["west"].save(tmp_path / "site.key")
    lines = "".join(f'{name} = "{public.hex()}"\n' for name, public in ROSTER.members.items())
    (tmp_path / "roster.toml").write_text("[members]\n" + lines)
    found = Member.load("west", tmp_path / "site.key", tmp_path / "roster.toml")
    assert (found.secret.public, found.roster) == (WEST.secret.public, ROSTER)


@pytest.mark.parametrize(
    ("cohort", "why"),
    [
        (("east", "north", "south"), "does not include west"),
        (("west", "north"), "holds from 3 on"),
        (("west", "west", "north"), "twice"),
        (("west", "north", "server"), "not in the roster"),
    ],
)
def test_a_cohort_that_is_refused_before_anything_is_paid(clinic: Clinic, cohort: tuple[str, ...], why: str) -> None:
    request = replace(clinic.asked(), session=None)
    with pytest.raises(Refusal, match=why) as caught:
        WEST.with_session(request, cohort, bytes(32))
    assert caught.value.code == "aggregation"


def test_a_server_with_another_roster_or_theta_is_refused(clinic: Clinic) -> None:
    request = clinic.asked()
    assert request.session is not None
    other = Roster({**ROSTER.members, "east": SecretKey(bytes([77]) * 32).public})
    for wrong in (
        replace(request.session, members=other.members),
        replace(request.session, terms=bytes(32)),
        replace(request.session, members=ROSTER.cohort(NAMES[1:])),
    ):
        with pytest.raises(Refusal, match="another than this site's") as caught:
            WEST.with_session(replace(request, session=None), NAMES, wrong.binding)
        assert caught.value.code == "aggregation"


def test_a_policy_without_words_on_sums_refuses_them(clinic: Clinic) -> None:
    plain = replace(POLICY, min_honest=None, max_worst_case=None)
    with pytest.raises(PolicyRefusal) as caught:
        participate.check_terms(clinic.asked(), plain, simulated=False)
    assert caught.value.code == "aggregation"
    participate.check_terms(clinic.asked(), POLICY, simulated=False)


def code(clinic: Clinic, request: Request) -> str:
    with pytest.raises(Refusal) as caught:
        clinic.once(request)
    return caught.value.code


def test_one_attempt_one_message(clinic: Clinic) -> None:
    first = clinic.once(clinic.asked())
    assert first[:4] == b"FSPS"
    assert clinic.once(clinic.asked()) == first
    # Another cohort, θ or terms under the same name: the keystreams are others, the entry is the same.
    assert code(clinic, clinic.asked(cohort=NAMES[1:])) == "spent"
    assert code(clinic, clinic.asked(theta=clinic.server.state.theta + 1)) == "spent"
    assert clinic.once(clinic.asked()) == first
    second = clinic.once(clinic.asked(attempt=2))
    assert second != first
    assert code(clinic, clinic.asked()) == "stale"
    third = clinic.once(clinic.asked(t=1))
    assert len({first, second, third}) == 3
    assert code(clinic, clinic.asked(attempt=3)) == "stale"
    with Ledger.open(clinic.ledger, create=False) as ledger:
        assert ledger.participations("west", "run") == 3


class Crash(KeyboardInterrupt):
    """What kill -9 is to the code: nothing after it runs that writes."""


POINTS = ("before reserve", "after reserve", "train", "before put", "after put", "before release", "after release")


@pytest.mark.parametrize("runs", [8, pytest.param(300, marks=pytest.mark.long)])
def test_crashes_anywhere_find_no_keystream_for_two_messages(
    clinic: Clinic, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int
) -> None:
    """A server that asks for any round, attempt, cohort and θ again and again, and a process that dies anywhere."""
    chance, fatal = Random(20), [""]

    def mortal(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def stepped(*arguments: Any, **options: Any) -> Any:
            if fatal[0] == f"before {what}":
                raise Crash
            found = original(*arguments, **options)
            if fatal[0] == f"after {what}":
                raise Crash
            return found

        monkeypatch.setattr(owner, name, stepped)

    for owner, name, what in (
        (Ledger, "reserve_many", "reserve"),
        (Outbox, "put", "put"),
        (Ledger, "release_many", "release"),
    ):
        mortal(owner, name, what)
    monkeypatch.setattr("fedspa.durable.force", lambda path: None)  # thousands of them: no disk is waited for
    made: dict[bytes, set[bytes]] = defaultdict(set)  # by binding
    trained: Counter[tuple[str, int, int]] = Counter()
    upload = participate.upload

    def masking(values: NDArray[np.int64], session: Session, name: str, secret: SecretKey) -> bytes:
        trained[session.run, session.round, session.attempt] += 1
        if fatal[0] == "train":
            raise Crash
        payload = upload(values, session, name, secret)
        made[session.binding].add(payload)
        return payload

    monkeypatch.setattr(participate, "upload", masking)
    thetas = [clinic.server.state.theta, clinic.server.state.theta + 1]
    cohorts = [NAMES, NAMES[1:], ("east", "north", "west")]
    crashes, left, codes = 0, defaultdict[bytes, set[bytes]](set), Counter[str]()
    for number in range(runs):
        run, at = f"run-{number}", (0, 1)
        clinic.ledger = tmp_path / f"{run}.sqlite"
        Ledger.open(clinic.ledger).close()
        for _ in range(20):
            t, attempt = at
            if chance.random() < 0.8:  # go on, or back
                at = chance.choice([(t + 1, 1), (t, attempt + 1), (t + 1, 1), (max(0, t - 1), attempt)])
            cohort, theta = chance.choice(cohorts), chance.choice(thetas)
            request = clinic.asked(run, *at, cohort=cohort, theta=theta)
            fatal[0] = chance.choice(POINTS) if chance.random() < 0.85 else ""
            try:
                payload = clinic.once(request)
            except Crash:
                crashes += 1
            except Refusal as refusal:
                codes[refusal.code] += 1
            else:
                left[request.session.binding].add(payload)
            fatal[0] = ""
    assert all(len(payloads) == 1 for payloads in made.values())
    assert set(trained.values()) == {1}  # one entry, one training, one session
    assert all(payloads == made[binding] for binding, payloads in left.items())
    assert len(made) > 3 * runs
    assert len(left) > runs
    assert crashes > 7 * runs
    assert codes.keys() == {"spent", "stale"}


def test_the_search_would_find_it(clinic: Clinic, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a ledger that forgets, as an old copy of ledger, anchor and outbox would: two messages, one keystream."""
    request = clinic.asked()
    first = clinic.once(request)
    clinic.ledger = clinic.ledger.with_name("other.sqlite")
    Ledger.open(clinic.ledger).close()
    second = clinic.once(request)
    assert first[: 56 - 4] == second[: 56 - 4]  # one session
    assert first != second
