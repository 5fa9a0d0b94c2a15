"""Messages: packed to the bit; whatever else comes is refused by the right name."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from cohorts import publics, secrets_of, session_of, values_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedspa.errors import PayloadError
from fedspa.secagg.masking import HEADER_BYTES, decode, encode, size, upload
from fedspa.wire.payload import packed, unpacked, word_type

SECRETS = secrets_of(3)
SESSION = session_of(SECRETS, high=1000)  # 11 bits
VALID = upload(values_of(SESSION)["site-0"], SESSION, "site-0", SECRETS["site-0"])


def sealed(data: bytes) -> bytes:
    """With the checksum that fits."""
    return data[:52] + struct.pack("<I", zlib.crc32(data[:52] + data[56:])) + data[56:]


def code_of(data: bytes, session: object = SESSION) -> str:
    with pytest.raises(PayloadError) as error:
        decode(data, session)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return error.value.code


@given(st.integers(1, 62), st.integers(1, 70), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_packing_is_one_large_number_in_base_2_to_the_bits(bits: int, count: int, random: object) -> None:
    numbers = [random.getrandbits(bits) for _ in range(count)]  # type: ignore[attr-defined]
    words = np.array(numbers, word_type(bits))
    whole = sum(number << bits * place for place, number in enumerate(numbers))
    body = packed(words, bits)
    assert body == whole.to_bytes(-(-count * bits // 8), "little")
    assert unpacked(body, count, bits).tolist() == numbers
    assert unpacked(body, count, bits).dtype == words.dtype


def test_a_message_comes_back() -> None:
    words = decode(VALID, SESSION)
    assert len(words) == SESSION.words
    assert encode(words, SESSION) == VALID
    assert len(VALID) == size(SESSION) == HEADER_BYTES + -(-11 * (40 + 6) // 8)


@pytest.mark.parametrize(
    ("offset", "patch", "code"),
    [
        (0, b"FSPA", "magic"),
        (4, b"\x02", "version"),
        (5, b"\x0c", "bits"),
        (6, b"\x01", "flags"),
        (8, b"\x04", "round"),
        (12, b"\x02", "attempt"),
        (16, b"\x29", "count"),
        (20, b"\x00\x00", "binding"),
    ],
)
def test_a_tampered_header(offset: int, patch: bytes, code: str) -> None:
    data = VALID[:offset] + patch + VALID[offset + len(patch) :]
    assert data != VALID
    assert code_of(data) == code
    assert code_of(sealed(data)) == code


def test_a_tampered_body() -> None:
    assert code_of(VALID[:-3] + bytes([VALID[-3] ^ 1]) + VALID[-2:]) == "checksum"
    assert code_of(VALID[:52] + bytes(4) + VALID[56:]) == "checksum"
    # 46 words of 11 bits are 506 bits: six bits of the last byte are not used.
    assert code_of(sealed(VALID[:-1] + bytes([VALID[-1] | 0x80]))) == "body"
    assert code_of(sealed(VALID[:-1] + bytes([VALID[-1] | 0x04]))) == "body"


def test_lengths() -> None:
    assert code_of(b"") == "length"
    assert code_of(VALID[: HEADER_BYTES - 1]) == "length"
    assert code_of(VALID[:HEADER_BYTES]) == "length"
    assert code_of(VALID[:-1]) == "length"
    assert code_of(VALID + b"\0") == "length"


def test_messages_of_another_session() -> None:
    others = {
        "round": replace(SESSION, round=4),
        "attempt": replace(SESSION, attempt=2),
        "count": replace(SESSION, count=41),
        "bits": replace(SESSION, high=100),
        "binding": replace(SESSION, high=1001),
    }
    for code, other in others.items():
        assert code_of(VALID, other) == code
    for changed in ({"run": "b"}, {"terms": bytes(32)}, {"low": -101}, {"members": publics(secrets_of(4))}):
        assert code_of(VALID, replace(SESSION, **changed)) == "binding"  # type: ignore[arg-type]


def test_any_single_damaged_byte_is_noticed() -> None:
    for place in range(len(VALID)):
        with pytest.raises(PayloadError):
            decode(VALID[:place] + bytes([VALID[place] ^ 0x55]) + VALID[place + 1 :], SESSION)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
@example(b"")
@example(VALID)
def test_arbitrary_bytes(data: bytes) -> None:
    survives(data)


@given(st.binary(max_size=120))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bodies_under_a_valid_header(body: bytes) -> None:
    survives(sealed(VALID[:56] + body))


@given(st.lists(st.integers(0, 8 * len(VALID) - 1), min_size=1, max_size=8), st.booleans())
@settings(max_examples=100, deadline=None)
def test_bit_flips(flips: list[int], reseal: bool) -> None:
    data = bytearray(VALID)
    for flip in flips:
        data[flip // 8] ^= 1 << flip % 8
    survives(sealed(bytes(data)) if reseal else bytes(data))


def survives(data: bytes) -> None:
    try:
        words = decode(data, SESSION)
    except PayloadError as error:
        assert error.code in PayloadError.CODES  # noqa: PT017
        return
    assert len(words) == SESSION.words
    assert words.max() < 2**SESSION.bits
    assert encode(words, SESSION) == data  # no second spelling


def test_a_large_body_is_refused_on_sight() -> None:
    data = VALID + bytes(8_000_000)
    tracemalloc.start()
    try:
        assert code_of(data) == "length"
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
