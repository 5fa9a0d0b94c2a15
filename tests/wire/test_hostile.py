"""Any bytes decode to an update or to a PayloadError: never another exception, a warning or a large allocation."""

from __future__ import annotations

import struct
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
from hostile_input import check, corpus
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedspa.errors import PayloadError
from fedspa.wire.payload import CODINGS, Expected, Update, decode, encode

SEED = bytes(range(16))
K, D, ROUND = 64, 640, 3
EXPECTED = Expected(round=ROUND, dimension=D, active=K, bound=100.0)
VALUES = np.random.default_rng(0).standard_t(3, K).astype(np.float32)
VALID = [encode(Update(ROUND, D, SEED, VALUES), coding, 1.0) for coding in CODINGS]


def sealed(data: bytes) -> bytes:
    return data[:44] + struct.pack("<I", zlib.crc32(data[:44] + data[48:])) + data[48:] if len(data) >= 48 else data


def survives(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            update = decode(data, EXPECTED)
        except PayloadError as error:
            assert error.code in PayloadError.CODES  # noqa: PT017
            return
    assert update.values.shape == (K,)
    assert np.isfinite(update.values).all()
    assert np.abs(update.values).max() <= 100.0
    assert (update.round, update.dimension) == (ROUND, D)


@given(st.binary(max_size=400))
@settings(max_examples=100, deadline=None)
@example(b"")
def test_arbitrary_bytes(data: bytes) -> None:
    survives(data)


@given(st.sampled_from(VALID), st.binary(max_size=600))
@settings(max_examples=100, deadline=None)
def test_arbitrary_bodies_under_a_valid_header(valid: bytes, body: bytes) -> None:
    survives(sealed(valid[:48] + body))


@given(st.sampled_from(VALID), st.integers(0, 400), st.booleans())
@settings(max_examples=200, deadline=None)
def test_truncations(valid: bytes, length: int, reseal: bool) -> None:
    cut = valid[:length]
    survives(sealed(cut) if reseal else cut)
    if length < len(valid) and not reseal:
        with pytest.raises(PayloadError):
            decode(cut, EXPECTED)


@given(st.sampled_from(VALID), st.lists(st.integers(0, 8 * 300), min_size=1, max_size=8), st.booleans())
@settings(max_examples=150, deadline=None)
def test_bit_flips(valid: bytes, flips: list[int], reseal: bool) -> None:
    data = bytearray(valid)
    for flip in flips:
        data[flip // 8 % len(data)] ^= 1 << flip % 8
    survives(sealed(bytes(data)) if reseal else bytes(data))


@given(
    st.sampled_from(VALID),
    st.integers(0, 44),
    st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\1\0\0\0", b"\0\0\0\x80"]),
)
@settings(max_examples=100, deadline=None)
def test_header_mutations(valid: bytes, offset: int, patch: bytes) -> None:
    survives(sealed(valid[:offset] + patch + valid[offset + 4 :]))


@pytest.mark.parametrize("valid", VALID)
def test_any_single_damaged_byte_is_noticed(valid: bytes) -> None:
    for i in range(len(valid)):
        with pytest.raises(PayloadError):
            decode(valid[:i] + bytes([valid[i] ^ 0x55]) + valid[i + 1 :], EXPECTED)


def test_a_declared_length_allocates_nothing() -> None:
    """k and d of 4 billion, and a body of 8 MB: refused on sight."""
    huge = sealed(VALID[1][:12] + b"\xff" * 8 + VALID[1][20:])
    long = VALID[1] + bytes(8_000_000)
    tracemalloc.start()
    try:
        for data in (huge, long):
            with pytest.raises(PayloadError):
                decode(data, EXPECTED)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fill", [b"\x01", b"\xff"])
def test_work_on_a_hostile_body_is_bounded_by_k(fill: bytes) -> None:
    k = 10_000
    header = encode(Update(0, 2 * k, SEED, np.zeros(k, dtype=np.float32)), "int", 1.0)[:48]
    expect = Expected(0, 2 * k, k, bound=1e30)
    tracemalloc.start()
    try:
        for scale in (0, 20, 79):
            data = sealed(header[:6] + bytes([scale]) + header[7:] + fill * (7 * k + 8))
            with pytest.raises(PayloadError):
                decode(data, expect)
        # 7 bytes a value came in; 80 bytes a value are enough for every array the decoder makes.
        assert tracemalloc.get_traced_memory()[1] < 80 * k + 500_000
    finally:
        tracemalloc.stop()


@given(st.sampled_from(list(corpus())), st.lists(st.integers(0, 8 * 300), max_size=8))
@settings(max_examples=100, deadline=None)
def test_what_the_fuzzer_checks_holds_around_its_corpus(honest: bytes, flips: list[int]) -> None:
    """The fuzzer runs only where atheris installs: its target runs here too."""
    data = bytearray(honest)
    for flip in flips:
        data[flip // 8 % len(data)] ^= 1 << flip % 8
    check(bytes(data))


def test_the_fuzzers_corpus_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("reached")

    monkeypatch.setattr("fedspa.wire.coding.unpack", refuse)
    reached = 0
    for honest in corpus():
        try:
            check(honest)
        except RuntimeError:
            reached += 1
    assert reached == 6  # three `int`, three `whole`
