"""cpSGD's payload: back as it was, near the entropy, and any other bytes are refused by name."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.algorithms.base import IntegerUpdate
from fedspa.algorithms.cpsgd.respond import binomial, decode_integers, encode_integers, low_bits
from fedspa.errors import PayloadError
from fedspa.randomness.streams import Stream
from fedspa.wire.coding import best_scale
from fedspa.wire.payload import HEADER_BYTES, Expected, Header, Update, decode, encode, opened, sealed

SEED = bytes(range(16))
PINNED = "52b37e6ba40d5a03"


def expected(count: int, **changes: object) -> Expected:
    base = Expected(round=3, dimension=700, active=count, bound=1e9, codings=frozenset({"whole"}), seed=SEED)
    return replace(base, **changes)  # type: ignore[arg-type]


def drawn(count: int, trials: int, levels: int) -> IntegerUpdate:
    numbers = binomial(count, trials, Stream(bytes(32))) + np.arange(count) % levels
    return IntegerUpdate(3, 700, SEED, numbers)


@pytest.mark.parametrize("trials", [1, 100, 65520, 2**31 - 2**8])
@pytest.mark.parametrize("levels", [2, 256])
def test_there_and_back_near_the_entropy(trials: int, levels: int) -> None:
    update = drawn(4096, trials, levels)
    payload = encode_integers(update, trials, levels)
    back = decode_integers(payload, expected(4096), trials, levels)
    assert np.array_equal(back.values, update.values)
    assert (back.round, back.dimension, back.seed) == (3, 700, SEED)
    bits = 8 * (len(payload) - HEADER_BYTES) / 4096
    # A Gaussian of this variance has the largest entropy; the table and few values cost some.
    entropy = 0.5 * math.log2(2 * math.pi * math.e * (trials / 4 + levels**2 / 12 + 1 / 12))
    assert bits < entropy + 0.25
    assert bits < math.log2(trials + levels) + 0.5


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_numbers_in_range_come_back(data: st.DataObject) -> None:
    trials, levels = data.draw(st.integers(1, 2**31 - 2**16)), 2 ** data.draw(st.integers(1, 16))
    numbers = data.draw(st.lists(st.integers(0, trials + levels - 1), min_size=1, max_size=50))
    update = IntegerUpdate(3, 700, SEED, np.array(numbers, dtype=np.int64))
    payload = encode_integers(update, trials, levels)
    assert decode_integers(payload, expected(len(numbers)), trials, levels).values.tolist() == numbers


@given(st.integers(1, 70), st.sampled_from([1, 10**4, 10**5, 10**6, 10**7, 10**8, 2**31 - 2]), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_low_bits_travel_lowest_first(count: int, trials: int, seed: int) -> None:
    """Bit by bit, slowly; and a bit set behind the last one is refused."""
    numbers = np.random.default_rng(seed).integers(0, trials + 2, count)
    shift, middle = low_bits(trials), (trials + 1) // 2
    bits = [(int(number) - middle) >> place & 1 for number in numbers for place in range(shift)]
    plain = np.packbits(np.array(bits, dtype=np.uint8), bitorder="little").tobytes()
    body = encode_integers(IntegerUpdate(3, 700, SEED, numbers), trials, 2)[HEADER_BYTES:]
    assert body.startswith(plain)
    if len(bits) % 8:
        filled = plain[:-1] + bytes([plain[-1] | 0x80]) + body[len(plain) :]
        header = Header("whole", best_scale((numbers - middle) >> shift), 3, 700, count, SEED, 0.0)
        with pytest.raises(PayloadError, match="padding of the low bits"):
            decode_integers(sealed(header, filled), expected(count), trials, 2)


@pytest.mark.parametrize("wrong", [-1, 1000 + 4])
def test_numbers_outside_the_plan_do_not_travel(wrong: int) -> None:
    update = IntegerUpdate(3, 700, SEED, np.array([5, wrong]))
    with pytest.raises(PayloadError) as refused:
        encode_integers(update, 1000, 4)
    assert refused.value.code == "bound"
    wider = encode_integers(IntegerUpdate(3, 700, SEED, np.array([5, 1023])), 1020, 4)
    with pytest.raises(PayloadError) as refused:
        decode_integers(wider, expected(2), 1000, 4)
    assert refused.value.code == "bound"


@given(st.integers(0, 10**9), st.integers(0, 255), st.sampled_from([100, 10**6]))
@settings(max_examples=80, deadline=None)
def test_a_changed_byte_is_refused(place: int, value: int, trials: int) -> None:
    payload = bytearray(encode_integers(drawn(64, trials, 4), trials, 4))
    place %= len(payload)
    if payload[place] == value:
        return
    payload[place] = value
    with pytest.raises(PayloadError):
        decode_integers(bytes(payload), expected(64), trials, 4)


@given(st.binary(max_size=400), st.booleans(), st.sampled_from([100, 10**6]))
@settings(max_examples=80, deadline=None)
def test_any_bytes_are_an_update_or_an_error(data: bytes, headed: bool, trials: int) -> None:
    """With a right header and checksum, too: then whatever is read is in range and is spelled in one way."""
    import zlib

    from fedspa.wire.payload import CHECKSUM, FIELDS, MAGIC

    if headed:
        fields = FIELDS.pack(MAGIC, 1, 3, data[0] if data else 0, 0, 3, 700, 20, SEED, 0, 0.0)
        data = fields + CHECKSUM.pack(zlib.crc32(data, zlib.crc32(fields))) + data
    try:
        update = decode_integers(data, expected(20), trials, 4)
    except PayloadError:
        return
    assert 0 <= update.values.min() <= update.values.max() <= trials + 3
    assert len(update.values) == 20


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"active": 65}, "active"),
        ({"seed": bytes(16)}, "seed"),
        ({"seed": None, "seen": frozenset({SEED})}, "replay"),
        ({"codings": frozenset({"int"})}, "coding"),
    ],
)
def test_what_was_not_expected_is_refused_by_name(change: dict[str, object], code: str) -> None:
    payload = encode_integers(drawn(64, 100, 4), 100, 4)
    with pytest.raises(PayloadError) as refused:
        decode_integers(payload, expected(64, **change), 100, 4)
    assert refused.value.code == code


def test_pinned_bytes() -> None:
    """What docs/wire.md says, in bytes: 3 low bits of each number plainly, then the coded rest."""
    numbers = np.array([500_000, 500_003, 499_001, 501_234, 499_999])
    payload = encode_integers(IntegerUpdate(3, 700, SEED, numbers), 10**6, 4)
    # c = 500,001: −1, 2, −1000, 1233, −2 → low bits 7, 2, 0, 1, 6 → 111 010 000 100 011 (0), lowest first
    low = [7, 2, 0, 1, 6]
    plain = sum(value << 3 * i for i, value in enumerate(low)).to_bytes(2, "little")
    assert payload[HEADER_BYTES : HEADER_BYTES + 2] == plain
    assert payload[5] == 3
    assert payload[HEADER_BYTES + 2 :].hex() == PINNED


def test_the_two_kinds_of_payload_do_not_mix() -> None:
    values = encode(Update(3, 700, SEED, np.ones(64, dtype=np.float32)), "f32")
    with pytest.raises(PayloadError, match="coding"):
        decode_integers(values, expected(64), 100, 4)
    with pytest.raises(PayloadError, match="coding"):
        decode(encode_integers(drawn(64, 100, 4), 100, 4), Expected(3, 700, 64, 10.0))


def test_padding_has_one_spelling() -> None:
    """10⁶ trials leave 3 low bits: of 3 numbers, 9 bits in 2 bytes, and the last 7 must be 0."""
    assert low_bits(10**6) == 3
    payload = encode_integers(drawn(3, 10**6, 4), 10**6, 4)
    header, body = opened(payload, expected(3), lambda _, count: (0, 1000))
    body = bytes([body[0], body[1] | 0x80]) + body[2:]
    with pytest.raises(PayloadError, match="is not zero"):
        decode_integers(sealed(header, body), expected(3), 10**6, 4)
