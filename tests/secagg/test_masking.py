"""Masks: they cancel in the sum of all and hide in every other; the fast ones are those of the slow twins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pedestrian
import pytest
from cohorts import publics, secrets_of, session_of, uploads, values_of
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
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


# The primitives as the protocol calls them, and as its plain Python twin spells them out, against the RFCs.

h = bytes.fromhex

NINE = (9).to_bytes(32, "little")


def x25519(secret: bytes, public: bytes) -> bytes:
    return SecretKey(secret).shared(public)


def chacha20(key: bytes, nonce: bytes, length: int, counter: int = 0) -> bytes:
    start = counter.to_bytes(4, "little") + nonce
    return Cipher(algorithms.ChaCha20(key, start), mode=None).encryptor().update(bytes(length))


def hkdf(secret: bytes, info: bytes, length: int = 32, salt: bytes | None = None) -> bytes:
    return HKDF(SHA256(), length=length, salt=salt, info=info).derive(secret)


@pytest.mark.parametrize("agree", [x25519, pedestrian.x25519])
def test_x25519_of_rfc_7748(agree: Callable[[bytes, bytes], bytes]) -> None:
    scalar, u = (
        "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
        ("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c"),
    )
    assert agree(h(scalar), h(u)) == h("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")
    alice = h("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = h("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    of_alice = h("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    of_bob = h("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    assert (agree(alice, NINE), agree(bob, NINE)) == (of_alice, of_bob)
    assert (SecretKey(alice).public, SecretKey(bob).public) == (of_alice, of_bob)
    shared = h("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert agree(alice, of_bob) == agree(bob, of_alice) == shared


@pytest.mark.long
@pytest.mark.parametrize("agree", [x25519, pedestrian.x25519])
def test_x25519_a_thousand_times(agree: Callable[[bytes, bytes], bytes]) -> None:
    """RFC 7748, section 5.2: the result becomes the scalar, and the scalar the point."""
    k, u = agree(NINE, NINE), NINE
    assert k == h("422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079")
    for _ in range(999):
        k, u = agree(k, u), k
    assert k == h("684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51")


@pytest.mark.parametrize("stream", [chacha20, pedestrian.chacha20])
def test_chacha20_of_rfc_8439(stream: Callable[[bytes, bytes, int, int], bytes]) -> None:
    block = stream(bytes(range(32)), h("000000090000004a00000000"), 64, 1)  # 2.3.2
    assert block == h(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    # A.1, vectors 1 and 2: key, counter and nonce of 0, as pads have counter and nonce; the second block follows.
    assert stream(bytes(32), bytes(12), 128, 0) == h(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )


@pytest.mark.parametrize("derive", [hkdf, pedestrian.hkdf])
def test_hkdf_of_rfc_5869(derive: Callable[..., bytes]) -> None:
    secret = bytes([0x0B] * 22)
    assert derive(secret, h("f0f1f2f3f4f5f6f7f8f9"), 42, h("000102030405060708090a0b0c")) == h(
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    )
    # A.3, without salt, as pads are derived.
    assert derive(secret, b"", 42) == h(
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    )


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
@settings(max_examples=30, deadline=None)
def test_both_agree_on_keys(one: bytes, other: bytes) -> None:
    assert SecretKey(one).public == pedestrian.x25519(one, NINE)
    assert x25519(one, SecretKey(other).public) == pedestrian.x25519(other, SecretKey(one).public)
