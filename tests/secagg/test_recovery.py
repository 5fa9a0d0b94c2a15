"""Sums that are recovered from silence (secagg/recovery.py): the right sum whoever falls silent when, and for a server
that names different survivors to different members never a sum over fewer honest members than ε counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pedestrian
import pytest
from cohorts import secrets_of, session_of, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import ConfigError, PayloadError
from fedspa.randomness.streams import Stream, derive_key
from fedspa.secagg import recovery
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import MaskedSum, Void, decode, sealed_bytes, size
from fedspa.secagg.recovery import Progress, RecoverableSum, Step, answer, survivors_in, upload
from fedspa.secagg.session import Session, threshold_of
from fedspa.wire.payload import reduced

COUNT = 12


def recoverable(members: int, colluders: int = 0, least: int | None = None) -> tuple[Session, dict[str, SecretKey]]:
    secrets, threshold = secrets_of(members), threshold_of(members, colluders)
    session = session_of(secrets, count=COUNT, threshold=threshold, least=threshold if least is None else least)
    return session, secrets


@dataclass
class Cohort:
    """All members of a session, each with its progress. `lost(name, step)` says who falls silent when."""

    session: Session
    secrets: dict[str, SecretKey]
    lost: Callable[[str, Step | None], bool] = lambda name, step: False
    progress: dict[str, Progress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = values_of(self.session)
        self.sent = {
            name: upload(self.values[name], self.session, name, self.secrets[name], bytes([place]) * 32)
            for place, name in enumerate(self.session.members)
        }
        everybody = tuple(self.session.members)
        self.progress = dict.fromkeys(everybody, Progress(everybody))

    def ask(self, step: Step, questions: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        for name, body in questions.items():
            if not self.lost(name, step):
                yield name, self.answer(name, step, body)

    def answer(self, name: str, step: Step, body: bytes) -> bytes:
        survivors = survivors_in(self.session, step, body)
        progress = self.progress[name].advanced(self.session, name, step, survivors)
        reply = answer(self.session, name, self.secrets[name], progress, step, body)
        self.progress[name] = progress
        return reply

    def sum(self) -> RecoverableSum:
        total = RecoverableSum(self.session)
        for name, message in self.sent.items():
            if not self.lost(name, None):
                total.add(name, message)
        total.recover(self.ask)
        return total


@given(st.data())
@settings(max_examples=40)
def test_the_sum_of_those_who_answered_whoever_falls_silent_when(data: st.DataObject) -> None:
    members = data.draw(st.integers(2, 9))
    colluders = data.draw(st.integers(0, members - 2))
    least = data.draw(st.integers(threshold_of(members, colluders), members))
    session, secrets = recoverable(members, colluders, least)
    moments: tuple[Step | None, ...] = (None, "exclude", "commit", "open")
    falls = {name: data.draw(st.sampled_from((*moments, "never"))) for name in session.members}

    def lost(name: str, step: Step | None) -> bool:
        return falls[name] in moments[: moments.index(step) + 1]

    cohort = Cohort(session, secrets, lost)
    asked = [name for name in session.members if falls[name] is not None]
    # Without anyone to exclude, nobody is asked for it, and who would be silent then is silent at the next step.
    counted = [name for name in asked if falls[name] != "exclude"] if len(asked) < members else asked
    answering = [name for name in counted if falls[name] == "never"]
    total = cohort.sum()
    if len(counted) < least or len(answering) < session.threshold:
        with pytest.raises(Void) as error:
            total.values()
        assert error.value.code == ("missing" if len(counted) < least else "agreement")
        return
    assert total.members == len(counted)
    assert np.array_equal(total.values(), sum(cohort.values[name] for name in counted))


def test_a_message_is_a_masked_one_with_sealed_shares_behind_it() -> None:
    session, secrets = recoverable(5)
    cohort = Cohort(session, secrets)
    message = cohort.sent["site-1"]
    assert len(message) == size(session) == size(session_of(secrets, count=COUNT)) + 5 * 48
    plain = session_of(secrets, count=COUNT)
    with pytest.raises(PayloadError) as error:
        decode(message, plain)
    assert error.value.code == "flags"
    with pytest.raises(PayloadError):
        decode(recovery.encode(decode(message, session), session), session)  # without the shares
    assert session.binding != plain.binding


def test_without_the_exchanges_there_is_no_sum_even_of_all() -> None:
    session, secrets = recoverable(4)
    cohort = Cohort(session, secrets)
    total = RecoverableSum(session)
    for name, message in cohort.sent.items():
        total.add(name, message)
    with pytest.raises(Void, match="masks did not cancel"):
        total.values()
    without = MaskedSum(session)
    for name, message in cohort.sent.items():
        without.add(name, message)
    with pytest.raises(Void):
        without.values()


def test_a_wrong_share_is_found_and_opens_nothing() -> None:
    session, secrets = recoverable(5, least=4)
    cohort = Cohort(session, secrets, lambda name, step: step is None and name == "site-4")
    honest = cohort.ask

    def lying(step: Step, questions: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        for name, reply in honest(step, questions):
            yield name, bytes([reply[0] ^ 1]) + reply[1:] if (name, step) == ("site-0", "open") else reply

    total = RecoverableSum(session)
    for name in ("site-0", "site-1", "site-2", "site-3"):
        total.add(name, cohort.sent[name])
    total.recover(lying)
    with pytest.raises(Void) as error:
        total.values()
    assert error.value.code == "check"


def test_shares_that_one_sender_sealed_badly_are_left_out() -> None:
    session, secrets = recoverable(5, least=3)
    cohort = Cohort(session, secrets)
    message = cohort.sent["site-2"]
    start = len(message) - sealed_bytes(session)
    body = decode(message, session)
    damaged = bytes([message[start] ^ 1]) + message[start + 1 :]  # the share for site-0
    cohort.sent["site-2"] = recovery.encode(body, session, damaged)
    assert np.array_equal(cohort.sum().values(), sum(cohort.values.values()))


class TestMember:
    """What one member answers, in which order, and never twice otherwise."""

    def setup_method(self) -> None:
        self.session, self.secrets = recoverable(6, colluders=1, least=4)
        self.cohort = Cohort(self.session, self.secrets)
        self.names = tuple(self.session.members)

    def question(self, survivors: tuple[str, ...]) -> bytes:
        return recovery._bitmap(self.session, survivors)

    def ask(self, step: Step, survivors: tuple[str, ...], rest: bytes = b"") -> bytes:
        return self.cohort.answer("site-0", step, self.question(survivors) + rest)

    def test_survivors_become_fewer_and_a_commit_settles_them(self) -> None:
        five, four = self.names[:5], self.names[:4]
        first = self.ask("exclude", five)
        assert len(first) == 32
        assert self.ask("exclude", five) == first
        with pytest.raises(ConfigError, match="other survivors"):
            self.ask("exclude", (*self.names[:4], self.names[5]))
        with pytest.raises(ConfigError, match="other survivors"):
            self.ask("commit", self.names)
        assert self.ask("exclude", four)[32:] == first
        tags = self.ask("commit", four)
        assert self.ask("commit", four) == tags
        assert self.ask("exclude", four)[32:] == first
        with pytest.raises(ConfigError, match="other survivors"):
            self.ask("exclude", four[:3] + five[4:])
        with pytest.raises(ConfigError, match="other survivors"):
            self.ask("commit", five)

    def test_it_counts_itself_and_enough_others(self) -> None:
        with pytest.raises(ConfigError, match="without site-0"):
            self.ask("exclude", self.names[1:])
        with pytest.raises(ConfigError, match="3 survivors"):
            self.ask("exclude", self.names[:3])

    def test_it_opens_for_enough_valid_tags_only(self) -> None:
        survivors = self.names[:5]
        tags = {name: self.cohort.answer(name, "exclude", self.question(survivors)) for name in survivors}
        tags = {name: self.cohort.answer(name, "commit", self.question(survivors)) for name in survivors}
        own = [tags[name][:16] for name in survivors]  # site-0 is the first
        sealed = b"".join(self.cohort.sent[name][-sealed_bytes(self.session) :][:48] for name in survivors)
        for valid in range(5):
            given = own[:valid] + [bytes(16)] * (5 - valid)
            if valid < self.session.threshold:
                with pytest.raises(ConfigError, match=rf"{valid} members agreed .*; 4 must"):
                    self.ask("open", survivors, b"".join(given) + sealed)
            else:
                assert len(self.ask("open", survivors, b"".join(given) + sealed)) == 5 * 32
        # A tag of one member five times, or one that was made for another.
        for wrong in ([own[1]] * 5, [tags[name][16:32] for name in survivors]):
            with pytest.raises(ConfigError, match="members agreed"):
                self.ask("open", survivors, b"".join(wrong) + sealed)

    def test_foreign_bytes_are_refused(self) -> None:
        for body in (b"", b"\x1f\x00", b"\xff", b"\x1f" * 400):
            with pytest.raises(ConfigError):
                survivors_in(self.session, "exclude", body)
        with pytest.raises(ConfigError):
            survivors_in(self.session, "open", b"\x1f")


@given(st.data())
@settings(max_examples=300)
def test_a_server_that_names_other_survivors_to_others_reads_one_sum_over_enough_of_them(data: st.DataObject) -> None:
    """Ask honest members anything, with every tag that the server can have. Then count what it can take off: a seed of
    which it holds `threshold` shares, a pair of members of whom one gave its key. What it can read is a sum over a part
    of the honest members whose seeds are open and which no unknown pairwise mask joins to another part.

    The server goes for one victim: it names survivors to each member by itself, with the victim to some and without it
    to others, and the same survivors to all, in either order.
    """
    members = data.draw(st.integers(3, 7))
    colluders = data.draw(st.integers(0, members - 2))
    least = data.draw(st.integers(threshold_of(members, colluders), members))
    session, secrets = recoverable(members, colluders, least)
    cohort, names = Cohort(session, secrets), tuple(session.members)
    dishonest, honest = names[:colluders], names[colluders:]
    server = Equivocating(cohort, dishonest)
    victim = data.draw(st.sampled_from(honest))
    shunned = data.draw(st.booleans())  # by everybody else
    own = {name: _some(data, names, name, victim, least, without=shunned) for name in honest}
    common = _some(data, names, victim, victim, least, without=False)
    for way, step in data.draw(st.sampled_from(SCHEDULES)):
        for name in honest:
            server.ask(name, step, own[name] if way == "own" else common)
    opened = {name for name in honest if len(server.shares[name] | set(dishonest)) >= session.threshold}
    readable = [part for part in parts(honest, server.cut) if part <= opened]
    assert len(readable) <= 1
    assert all(len(part) >= session.least - colluders for part in readable)


SCHEDULES: list[list[tuple[str, Step]]] = [
    [("own", step) for step in recovery.STEPS],
    [*(("common", step) for step in recovery.STEPS), ("own", "exclude")],
    [("common", "commit"), ("own", "exclude"), ("common", "open")],
    [("own", "exclude"), ("common", "commit"), ("common", "open")],
    [("own", "exclude"), ("own", "commit"), ("common", "exclude"), ("common", "commit"), ("common", "open")],
    [*(("common", step) for step in recovery.STEPS), *(("own", step) for step in recovery.STEPS)],
]


def _some(
    data: st.DataObject, names: tuple[str, ...], name: str, victim: str, least: int, *, without: bool
) -> tuple[str, ...]:
    """Survivors with `name` among them, about as many as must be, and with the victim or without it."""
    fixed = {name} if without or data.draw(st.booleans()) else {name, victim}
    others = data.draw(st.permutations([other for other in names if other not in {name, victim}]))
    size = data.draw(st.sampled_from([least, least, len(names), 1]))
    chosen = fixed | set(others[: max(0, size - len(fixed))])
    return tuple(other for other in names if other in chosen)


class Equivocating:
    """A server that asks whatever it likes, with the secrets of the dishonest members, and notes what it learns."""

    def __init__(self, cohort: Cohort, dishonest: tuple[str, ...]) -> None:
        self._cohort, self._session, self._dishonest = cohort, cohort.session, dishonest
        self._names = tuple(cohort.session.members)
        self._tags: dict[tuple[tuple[str, ...], str], bytes] = {}
        self.cut: set[frozenset[str]] = set()
        self.shares: dict[str, set[str]] = {name: set() for name in self._names}

    def ask(self, name: str, step: Step, survivors: tuple[str, ...]) -> None:
        body = recovery._bitmap(self._session, survivors)
        if step == "open":
            place = self._names.index(name)
            sent = self._cohort.sent
            body += b"".join(self._tag(survivors, other)[16 * place :][:16] for other in survivors)
            body += b"".join(sent[other][-sealed_bytes(self._session) :][48 * place :][:48] for other in survivors)
        try:
            reply = self._cohort.answer(name, step, body)
        except ConfigError:
            return
        if step == "exclude":
            self.cut |= {frozenset((name, other)) for other in self._names if other not in survivors}
        elif step == "commit":
            self._tags[survivors, name] = reply
        else:
            for other in survivors:
                self.shares[other].add(name)

    def _tag(self, survivors: tuple[str, ...], name: str) -> bytes:
        if name in self._dishonest:
            secret = self._cohort.secrets[name]
            return answer(self._session, name, secret, Progress(survivors), "commit", b"")
        return self._tags.get((survivors, name), bytes(16 * len(self._names)))


def parts(honest: tuple[str, ...], cut: set[frozenset[str]]) -> list[set[str]]:
    """The parts of the honest members that unknown pairwise masks hold together."""
    found: list[set[str]] = []
    for name in honest:
        joined = [part for part in found if any(frozenset((name, other)) not in cut for other in part)]
        found = [part for part in found if part not in joined] + [{name}.union(*joined)]
    return found


def test_equal_bits_with_and_without_silence_under_every_order_of_holders() -> None:
    session, secrets = recoverable(5, least=3)
    for silent in ("site-0", "site-2", "site-4"):
        cohort = Cohort(session, secrets, lambda name, step, silent=silent: step == "open" and name == silent)
        assert np.array_equal(cohort.sum().values(), sum(cohort.values.values()))


def test_two_uploads_never_share_a_self_mask() -> None:
    session, secrets = recoverable(3)
    values = values_of(session)["site-0"]
    sent = [upload(values, session, "site-0", secrets["site-0"], bytes([key]) * 32) for key in (1, 2)]
    first, second = (decode(message, session) for message in sent)
    assert not np.array_equal(first, second)
    assert len(np.unique(reduced(first - second, session.bits))) > 10  # and no constant between them


@pytest.mark.parametrize(("low", "high"), [(-100, 100), (-(2**30), 2**30)])
def test_every_message_is_that_of_the_plain_twin(low: int, high: int) -> None:
    keys = {f"m{i}": bytes([i + 1] * 32) for i in range(5)}
    secrets = {name: SecretKey(key) for name, key in keys.items()}
    members = {name: secret.public for name, secret in secrets.items()}
    fields: dict[str, Any] = {"run": "τ", "round": 5, "attempt": 2, "members": members, "terms": bytes([7] * 32)}
    fields |= {"low": low, "high": high, "count": 9, "threshold": 3, "least": 4}
    session, twin = Session(**fields), pedestrian.Member(**fields)
    assert twin.binding == session.binding
    cohort = Cohort(session, secrets)
    for place, (name, message) in enumerate(cohort.sent.items()):
        stream = Stream(derive_key(bytes([place]) * 32, "self mask"))
        seed, *coefficients = (recovery.random_element(stream) for _ in range(3))
        assert message == twin.message(cohort.values[name].tolist(), name, keys[name], seed, coefficients)
    survivors = ("m0", "m1", "m3", "m4")
    body = recovery._bitmap(session, survivors)
    assert body == twin.survivors(survivors)
    tags = {}
    for name in survivors:
        assert cohort.answer(name, "exclude", body) == twin.exclude(survivors, name, keys[name])
        tags[name] = cohort.answer(name, "commit", body)
        assert tags[name] == twin.commit(survivors, name, keys[name])
    for place, name in ((0, "m0"), (4, "m4")):
        sealed = {other: cohort.sent[other][-5 * 48 :][48 * place :][:48] for other in survivors}
        question = body + b"".join(tags[other][16 * place :][:16] for other in survivors) + b"".join(sealed.values())
        assert cohort.answer(name, "open", question) == twin.opened(sealed, name, keys[name])


class TestShamir:
    def test_any_threshold_of_the_shares_is_enough(self) -> None:
        rng = np.random.default_rng(3)
        secret = recovery.random_element(Stream(b"s" * 32))
        shares = recovery.split(secret, 4, 9, Stream(b"t" * 32))
        for _ in range(20):
            holders = [int(place) for place in rng.permutation(9)[: rng.integers(4, 10)]]
            weights = recovery.lagrange_weights([place + 1 for place in holders])
            assert recovery.reconstruct(weights, [shares[place] for place in holders]) == secret

    def test_fewer_fit_every_secret(self) -> None:
        """For three shares of a threshold of four and any secret there is a polynomial through all of them: so the
        three say nothing."""
        shares = recovery.split(5, 4, 9, Stream(b"t" * 32))[:3]
        for secret in (0, 1, 2**200):
            through = {0: secret, **dict(enumerate(shares, 1))}
            fourth = interpolated(through, 4)
            weights = recovery.lagrange_weights([1, 2, 3, 4])
            assert recovery.reconstruct(weights, [*shares, fourth]) == secret

    def test_what_it_refuses(self) -> None:
        with pytest.raises(ValueError, match="threshold"):
            recovery.split(1, 5, 4, Stream(bytes(32)))
        with pytest.raises(ValueError, match="twice"):
            recovery.lagrange_weights([1, 2, 1])


def interpolated(points: Mapping[int, int], place: int) -> int:
    value = 0
    for x, y in points.items():
        term = y
        for other in points:
            if other != x:
                term = term * (place - other) * pow(x - other, -1, recovery.PRIME) % recovery.PRIME
        value += term
    return value % recovery.PRIME
