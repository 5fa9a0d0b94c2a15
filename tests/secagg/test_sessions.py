"""Sessions: bits, check words, and a binding that nothing escapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pedestrian
import pytest
from cohorts import publics, secrets_of, session_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import ConfigError
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.session import Session

SECRETS = secrets_of(3)
SESSION = session_of(SECRETS)
C = SecretKey(bytes(range(32))).public


@pytest.mark.parametrize(
    ("low", "high", "bits"),
    [
        (0, 1, 2),  # the two values of one bit fill it
        (0, 2, 2),
        (-3, 3, 3),  # 7 of 8 values: not more than 7/8
        (-3, 4, 4),
        (0, 224, 9),
        (-(2**60), 2**60, 62),
        (2**61, 2**61 + 9, 4),
    ],
)
def test_bits(low: int, high: int, bits: int) -> None:
    assert replace(SESSION, low=low, high=high).bits == bits


@given(st.integers(-(2**60), 2**60), st.integers(1, 2**60))
def test_bits_leave_an_eighth_and_waste_little(low: int, distance: int) -> None:
    session = replace(SESSION, low=low, high=low + distance)
    assert 8 * (distance + 1) <= 7 * 2**session.bits
    assert distance + 1 > 2**session.bits * 7 / 16 or session.bits == 2
    assert session.checks * session.bits >= 64 > (session.checks - 1) * session.bits
    assert session.words == session.count + session.checks


OTHERS: list[dict[str, Any]] = [
    {"run": "another"},
    {"run": "a run "},
    {"round": 4},
    {"attempt": 2},
    {"round": 1, "attempt": 3},
    {"terms": bytes(32)},
    {"low": -101},
    {"high": 101},
    {"count": 41},
    {"members": publics(secrets_of(2))},
    {"members": publics(secrets_of(4))},
    {"members": publics(SECRETS) | {"site-2": C}},
    {"members": {name.replace("2", "3"): public for name, public in publics(SECRETS).items()}},
    {"members": dict(zip(SECRETS, reversed(publics(SECRETS).values())))},
]


def test_whatever_differs_has_another_binding() -> None:
    bindings = {replace(SESSION, **other).binding for other in OTHERS}
    assert len(bindings | {SESSION.binding}) == len(OTHERS) + 1


def test_the_order_of_the_members_is_none() -> None:
    turned = dict(reversed(publics(SECRETS).items()))
    assert replace(SESSION, members=turned).binding == SESSION.binding


KEYS = [SecretKey(bytes([number] * 32)).public for number in range(6)]
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
sessions = st.builds(
    dict,
    run=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    round=st.integers(0, 2**31 - 1),
    attempt=st.integers(1, 2**31 - 1),
    members=st.lists(names, min_size=2, max_size=6, unique=True).map(lambda found: dict(zip(found, KEYS))),
    terms=st.binary(min_size=32, max_size=32),
    low=st.integers(-(2**59), 2**59),
    high=st.integers(2**59 + 1, 2**60),
    count=st.integers(1, 2**31 - 1),
)


@given(sessions)
@settings(max_examples=100, deadline=None)
def test_binding_bits_and_checks_as_the_twin_has_them(fields: dict[str, Any]) -> None:
    session, twin = Session(**fields), pedestrian.Member(**fields)
    assert (session.bits, session.checks, session.binding) == (twin.bits, twin.checks, twin.binding)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"run": ""}, "1 to 1,000 bytes"),
        ({"run": "\ud800"}, "1 to 1,000 bytes"),
        ({"round": -1}, "round is -1"),
        ({"attempt": 0}, "attempt is 0"),
        ({"count": 0}, "count is 0"),
        ({"terms": bytes(31)}, "31 bytes"),
        ({"low": 100}, "between 100 and 100"),
        ({"low": -(2**61), "high": 2**61}, "is too large to send"),
        ({"members": publics(secrets_of(1))}, "1 members"),
        ({"members": {"a": C, "b": C}}, "the same public key"),
        ({"members": {"a": C, "b": b"\xff" * 32}}, "2\\^255"),
        ({"members": {"a": C, "b\n": publics(SECRETS)["site-0"]}}, "not a member's name"),
    ],
)
def test_what_is_no_session(other: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        replace(SESSION, **other)
    assert "\n" not in str(error.value)


def test_members_cannot_change_under_it() -> None:
    members = publics(SECRETS)
    session = session_of(SECRETS, members=members)
    members["site-9"] = C
    assert "site-9" not in session.members
