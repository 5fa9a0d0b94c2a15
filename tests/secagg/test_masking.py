"""Masks: they cancel in the sum of all and hide in every other; the fast ones are those of the slow twins."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pedestrian
import pytest
from cohorts import publics, secrets_of, session_of, uploads, values_of
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import ConfigError
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import MaskedSum, decode, encode, keystream, mask_key, masked
from fedspa.secagg.session import Session
from fedspa.wire.payload import word_type

# One for every width of a word, and beside its edges.
RANGES = [(0, 2), (-3, 3), (-100, 100), (0, 255), (-300, 300), (0, 50_000), (0, 65_535), (-(2**30), 2**30)]
RANGES += [(-(2**31), 2**31), (-(2**60), 2**60), (5, 9), (-9, -5), (2**40, 2**40 + 1000)]


@pytest.mark.parametrize("n", [2, 10])
@pytest.mark.parametrize(("low", "high"), [(-1000, 1000), (-120, 100), (-(2**40), 2**45)])
def test_the_masked_sum_is_the_plain_sum(n: int, low: int, high: int) -> None:
    secrets = secrets_of(n)
    session = session_of(secrets, low=low, high=high, count=257)
    values = values_of(session)
    total = MaskedSum(session)
    for name, payload in uploads(session, secrets, values).items():
        total.add(name, payload)
    assert total.values().dtype == np.int64
    assert np.array_equal(total.values(), sum(values.values()))


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_every_range_from_end_to_end(low: int, high: int) -> None:
    """Sums at both ends of the range, from values of which some lie far outside it: only the sum has to fit."""
    secrets = secrets_of(3)
    session = session_of(secrets, low=low, high=high, count=4)
    far = 2**61
    plain = np.array([low, high, (low + high) // 2, low + 1])
    values = {"site-0": plain - far, "site-1": np.full(4, far + 5), "site-2": np.full(4, -5)}
    total = MaskedSum(session)
    for name, payload in uploads(session, secrets, values).items():
        total.add(name, payload)
    assert np.array_equal(total.values(), plain)


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_messages_are_those_of_the_plain_twin(low: int, high: int) -> None:
    secrets = {f"m{i}": bytes([i + 1] * 32) for i in range(3)}
    members = {name: SecretKey(secret).public for name, secret in secrets.items()}
    fields = {"run": "τ", "round": 2**31 - 1, "attempt": 9, "members": members, "terms": bytes([7] * 32)}
    session = Session(**fields, low=low, high=high, count=19)  # type: ignore[arg-type]
    twin = pedestrian.Member(**fields, low=low, high=high, count=19)  # type: ignore[arg-type]
    for name, values in values_of(session).items():
        words = masked(values, session, name, SecretKey(secrets[name]))
        assert words.tolist() == twin.masked(values.tolist(), name, secrets[name])
        assert encode(words, session) == twin.message(values.tolist(), name, secrets[name])


@given(st.integers(1, 62), st.integers(0, 150), st.data())
@settings(max_examples=60, deadline=None)
def test_any_word_of_a_keystream_found_alone(bits: int, place: int, data: st.DataObject) -> None:
    """A second slow way: the one block of ChaCha20 in which the word lies, sought by its counter."""
    secrets = secrets_of(2)
    session = session_of(secrets, low=0, high=2**bits - 2**bits // 8 - 1 or 1, count=151)
    shared = secrets["site-0"].shared(secrets["site-1"].public)
    width = word_type(session.bits).itemsize
    block, offset = divmod(place * width, 64)
    start = block.to_bytes(4, "little") + bytes(12)
    key = mask_key(session, "site-0", "site-1", shared)
    alone = Cipher(algorithms.ChaCha20(key, start), mode=None).encryptor().update(bytes(64))[offset : offset + width]
    assert keystream(session, "site-0", "site-1", shared)[place] == int.from_bytes(alone, "little")


def test_one_shared_secret_is_two_keystreams_under_two_names() -> None:
    """No roster has keys that share one secret with everybody; the names are there in case that it is missed."""
    session = session_of(secrets_of(3))
    found = {
        keystream(session, *pair, bytes(range(32))).tobytes() for pair in itertools.permutations(session.members, 2)
    }
    assert len(found) == 6


def sessions_in_plenty() -> Iterable[Session]:
    """Thousands that differ in one thing or another."""
    secrets = secrets_of(9)
    always = publics(secrets)
    pair = {name: always[name] for name in ("site-0", "site-1")}
    cohorts = [
        pair | {name: always[name] for name in others}
        for size in range(4)
        for others in itertools.combinations(list(always)[2:], size)
    ]
    base = session_of(secrets, count=8)
    runs = ("run", "run1", "ru", "Run")
    for run, members in itertools.product(runs, cohorts[:20]):
        for round, attempt in itertools.product((0, 1, 2, 11, 12, 111), (1, 2, 11)):
            yield replace(base, run=run, round=round, attempt=attempt, members=members)
    for members in cohorts[20:]:
        yield replace(base, members=members)
    for number in range(2000):
        yield replace(base, terms=number.to_bytes(32, "big"))
    for low, high, count in itertools.product(range(-110, -100), range(100, 110), (8, 9, 10)):
        yield replace(base, low=low, high=high, count=count)


def test_never_two_equal_keystreams() -> None:
    """Of one pair, over thousands of (run, round, attempt, cohort, terms, range): no two agree even in 8 words."""
    secrets = secrets_of(2)
    shared = secrets["site-0"].shared(secrets["site-1"].public)
    seen: set[bytes] = set()
    drawn = 0
    for session in sessions_in_plenty():
        seen.add(keystream(session, "site-0", "site-1", shared)[:8].tobytes())
        drawn += 1
    assert drawn > 3500
    assert len(seen) == drawn


def test_a_message_is_uniform_whatever_it_carries() -> None:
    """The same values each time; each of 8 bits of a word is set half of the time, and pairs of words do not agree."""
    secrets = secrets_of(2)
    values = np.full(40, 77)
    rows = np.array(
        [masked(values, session_of(secrets, round=t), "site-0", secrets["site-0"]) for t in range(500)], np.uint8
    )
    ones = np.unpackbits(rows, axis=1).mean(axis=0)
    assert abs(ones - 0.5).max() < 5.5 * 0.5 / np.sqrt(len(rows))  # of 384 means
    counts = np.bincount(rows.reshape(-1), minlength=256)
    expected = rows.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)


def test_a_sum_without_one_member_is_as_good_as_noise() -> None:
    """All but one together: what is left is under the masks of the missing one."""
    secrets = secrets_of(5)
    session = session_of(secrets, count=5000)
    values = {name: np.zeros(5000, np.int64) for name in secrets}
    sent = uploads(session, secrets, values)
    rest = sum(decode(sent[name], session).astype(np.int64) for name in list(secrets)[1:]) % 2**session.bits
    counts = np.bincount(rest, minlength=256)
    expected = len(rest) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)


def test_all_the_others_together_can_strip_a_message() -> None:
    """What is not protected: the keys of everybody else show one's words. The worst case is stated for that."""
    secrets = secrets_of(4)
    session = session_of(secrets)
    values = values_of(session)["site-1"]
    words = masked(values, session, "site-1", secrets["site-1"]).astype(np.int64)
    for name in ("site-0", "site-2", "site-3"):
        first, second = sorted((name, "site-1"))
        pad = keystream(session, first, second, secrets[name].shared(secrets["site-1"].public)).astype(np.int64)
        words = words + pad if first == name else words - pad
    assert np.array_equal(words[:40] % 2**session.bits, values % 2**session.bits)


def test_what_cannot_be_masked() -> None:
    secrets = secrets_of(3)
    session = session_of(secrets)
    key = secrets["site-0"]
    values = np.zeros(40, np.int64)
    for wrong in (values[:39], values.reshape(4, 10), values.astype(np.int32), values.astype(np.float64)):
        with pytest.raises(ConfigError, match="40 of int64"):
            masked(wrong, session, "site-0", key)
    with pytest.raises(ConfigError, match="'site-1' is not in the cohort with this key"):
        masked(values, session, "site-1", key)
    with pytest.raises(ConfigError, match="'site-7' is not in the cohort"):
        masked(values, session, "site-7", key)


def test_a_low_order_key_is_refused_before_anything_is_masked() -> None:
    """No roster has one; where a cohort has it all the same, nothing is sent."""
    secrets = secrets_of(2)
    session = session_of(secrets, members=publics(secrets) | {"mallory": (1).to_bytes(32, "little")})
    with pytest.raises(ConfigError, match="same secret with everybody"):
        masked(np.zeros(40, np.int64), session, "site-0", secrets["site-0"])
