"""The server's sum: each member once, and a Void by the right name wherever it would not be the sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cohorts import publics, secrets_of, session_of, uploads, values_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import PayloadError
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import MaskedSum, Void, encode, masked, upload
from fedspa.secagg.session import Session

SECRETS = secrets_of(4)
SESSION = session_of(SECRETS)
VALUES = values_of(SESSION)
SENT = uploads(SESSION, SECRETS, VALUES)


def summed(sent: dict[str, bytes], session: Session = SESSION) -> MaskedSum:
    total = MaskedSum(session)
    for name, payload in sent.items():
        total.add(name, payload)
    return total


def void_of(sent: dict[str, bytes], session: Session = SESSION) -> str:
    with pytest.raises(Void) as error:
        summed(sent, session).values()
    assert "\n" not in str(error.value)
    return error.value.code


def test_in_any_order() -> None:
    plain = sum(VALUES.values())
    assert np.array_equal(summed(SENT).values(), plain)
    total = summed(dict(reversed(SENT.items())))
    assert np.array_equal(total.values(), plain)
    assert np.array_equal(total.values(), plain)  # asked twice


def test_a_missing_member() -> None:
    total = MaskedSum(SESSION)
    assert total.missing == tuple(SECRETS)
    for name in ("site-2", "site-0", "site-3"):
        total.add(name, SENT[name])
    assert total.missing == ("site-1",)
    with pytest.raises(Void, match=r"1 of 4 members .*: site-1") as error:
        total.values()
    assert error.value.code == "missing"
    total.add("site-1", SENT["site-1"])
    assert total.missing == ()
    assert np.array_equal(total.values(), sum(VALUES.values()))


def test_each_member_once_and_nobody_else() -> None:
    total = summed({"site-0": SENT["site-0"]})
    for name, payload, code in (
        ("site-0", SENT["site-0"], "replay"),
        ("site-0", SENT["site-1"], "replay"),
        ("site-9", SENT["site-1"], "member"),
        ("site-1", SENT["site-1"][:-1], "length"),
    ):
        with pytest.raises(PayloadError) as error:
            total.add(name, payload)
        assert error.value.code == code
    assert total.missing == ("site-1", "site-2", "site-3")
    for name in total.missing:  # what was refused left no trace
        total.add(name, SENT[name])
    assert np.array_equal(total.values(), sum(VALUES.values()))


@pytest.mark.parametrize("changed", [{"round": 2}, {"attempt": 2}, {"run": "b"}])
def test_a_replay_of_another_session_is_no_message_of_this(changed: dict[str, object]) -> None:
    other = replace(SESSION, **changed)  # type: ignore[arg-type]
    payload = upload(VALUES["site-0"], other, "site-0", SECRETS["site-0"])
    with pytest.raises(PayloadError) as error:
        MaskedSum(SESSION).add("site-0", payload)
    assert error.value.code == next(iter(changed.keys() & {"round", "attempt"}), "binding")


def relabelled(words: np.ndarray) -> bytes:  # type: ignore[type-arg]
    """Under this session's header, whatever the words were masked for."""
    return encode(words, SESSION)


THIEF = SecretKey(bytes(range(32)))


@pytest.mark.parametrize(
    "changed",
    [
        {"members": publics(secrets_of(5))},
        {"members": publics(SECRETS) | {"site-0": THIEF.public}},
        {"round": 2},
        {"terms": bytes(32)},
    ],
    ids=["cohort", "key", "round", "terms"],
)
def test_masks_of_another_session_do_not_cancel(changed: dict[str, Any]) -> None:
    other = replace(SESSION, **changed)
    secret = THIEF if other.members["site-0"] == THIEF.public else SECRETS["site-0"]
    words = masked(VALUES["site-0"], other, "site-0", secret)
    assert void_of(SENT | {"site-0": relabelled(words)}) == "check"


def test_garbage_in_all_words() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        words = rng.integers(0, 256, SESSION.words).astype(np.uint8)
        assert void_of(SENT | {"site-3": relabelled(words)}) == "check"


def test_garbage_in_the_values_alone_shows_by_the_bound() -> None:
    """A member that masks well and has garbage to mask. 201 of 256 residues are honest sums: of 40 sums, all of them
    with chance (201/256)⁴⁰ < 10⁻⁴."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        payload = upload(rng.integers(-(2**40), 2**40, 40), SESSION, "site-3", SECRETS["site-3"])
        assert void_of(SENT | {"site-3": payload}) == "bound"


@pytest.mark.parametrize("off", [101, -155])
def test_one_sum_outside_the_range(off: int) -> None:
    values = {name: np.zeros(40, np.int64) for name in SECRETS}
    values["site-1"][17] = off
    assert void_of(uploads(SESSION, SECRETS, values)) == "bound"


def test_sums_at_both_ends_are_inside() -> None:
    values = {name: np.zeros(40, np.int64) for name in SECRETS}
    values["site-1"][:2] = (-100, 100)
    found = summed(uploads(SESSION, SECRETS, values)).values()
    assert found[:3].tolist() == [-100, 100, 0]


def test_a_sum_that_wraps_round_is_not_seen() -> None:
    """A known limit: a member that lies by 2^bits is taken at its residue. What it says is its own affair; the bound
    finds accidents."""
    values = {name: np.zeros(40, np.int64) for name in SECRETS}
    values["site-1"][0] = 256 + 5
    assert summed(uploads(SESSION, SECRETS, values)).values()[0] == 5


@given(st.integers(0, 3), st.integers(0, 8 * 48 - 1))
@settings(max_examples=100, deadline=None)
def test_any_wrong_bit_of_a_check_word_voids(member: int, place: int) -> None:
    name = f"site-{member}"
    words = masked(VALUES[name], SESSION, name, SECRETS[name]).copy()
    words[place // 8] ^= 1 << place % 8
    sent = SENT | {name: relabelled(words)}
    if place // 8 >= 40:
        assert void_of(sent) == "check"
        return
    try:
        off = summed(sent).values() - sum(VALUES.values())
    except Void as error:
        assert error.code == "bound"  # noqa: PT017
    else:
        assert np.count_nonzero(off) == 1


def test_one_members_message_under_two_names() -> None:
    assert void_of(SENT | {"site-1": SENT["site-0"]}) == "check"
