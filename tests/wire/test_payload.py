"""Payload v1: round trips, the pinned bytes, and each refusal by its name."""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import PayloadError
from fedspa.wire.payload import CODINGS, Coding, Expected, Update, decode, encode

SEED = bytes(range(16))
VALUES = np.array([0.0, 1.0, -2.5, 0.3, 100.0, -0.75], dtype=np.float32)
UPDATE = Update(7, 10, SEED, VALUES)
EXPECTED = Expected(round=7, dimension=10, active=6, bound=101.0, noise_std=1.0)


def sealed(data: bytes) -> bytes:
    """The same bytes with a checksum that fits: a hostile agent can do that too."""
    return data[:44] + struct.pack("<I", zlib.crc32(data[:44] + data[48:])) + data[48:]


def patched(data: bytes, offset: int, layout: str, *values: object) -> bytes:
    patch = struct.pack("<" + layout, *values)
    return sealed(data[:offset] + patch + data[offset + len(patch) :])


def code_of(data: bytes, expect: Expected = EXPECTED) -> str:
    with pytest.raises(PayloadError) as caught:
        decode(data, expect)
    return caught.value.code


# These stand in docs/wire.md: a change of them changes the format.
PINNED: dict[Coding, str] = {
    "f32": (
        "4653504101000000070000000a00000006000000000102030405060708090a0b0c0d0e0f000000000000000042f893a6"
        "000000000000803f000020c09a99993e0000c842000040bf"
    ),
    "int": (
        "4653504101023e00070000000a00000006000000000102030405060708090a0b0c0d0e0f000000000000403f692003ee"
        "4f168049609bbd6b"
    ),
}


@pytest.mark.parametrize("coding", CODINGS)
def test_bytes_are_pinned(coding: Coding) -> None:
    data = encode(UPDATE, coding, noise_std=1.0, step=0.75)
    assert data.hex() == PINNED[coding]
    assert decode(bytes.fromhex(PINNED[coding]), EXPECTED).active == 6


def test_values_of_the_pinned_int_payload() -> None:
    values = decode(bytes.fromhex(PINNED["int"]), EXPECTED).values
    assert values.view(np.uint32).tolist() == PINNED_INT_BITS
    assert np.max(np.abs(values - VALUES)) <= 0.375


PINNED_INT_BITS = [0xBE9F1CAA, 0x3F944696, 0xC01D9404, 0x3D87E6B5, 0x42C83E90, 0xBF5BC0D3]


@pytest.mark.parametrize("coding", CODINGS)
def test_everything_but_the_values_is_exact(coding: Coding) -> None:
    back = decode(encode(UPDATE, coding, 1.0), EXPECTED)
    assert (back.round, back.dimension, back.mask_seed) == (7, 10, SEED)
    assert back.values.dtype == np.float32


@pytest.mark.parametrize("coding", CODINGS)
@given(
    st.integers(1, 2000),
    st.integers(0, 2**31 - 1),
    st.binary(min_size=16, max_size=16),
    st.floats(1e-6, 1e6),
    st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_round_trip(coding: Coding, k: int, round_: int, seed: bytes, noise: float, data_seed: int) -> None:
    values = np.random.default_rng(data_seed).normal(0, noise, k).astype(np.float32)
    data = encode(Update(round_, 2 * k, seed, values), coding, noise)
    back = decode(data, Expected(round_, 2 * k, k, bound=10 * noise, noise_std=noise))
    tolerance = {"f32": 0.0, "int": 0.375 * noise * 1.00001}[coding]
    assert np.max(np.abs(back.values - values)) <= tolerance


@pytest.mark.parametrize("coding", CODINGS)
def test_each_wrong_field_is_refused_by_name(coding: Coding) -> None:
    data = encode(UPDATE, coding, 1.0)
    assert code_of(b"") == "length"
    assert code_of(data[:47]) == "length"
    assert code_of(patched(data, 0, "4s", b"FSPB")) == "magic"
    for version in (0, 2, 255):
        assert code_of(patched(data, 4, "B", version)) == "version"
    for number in (1, 3, 4, 255):
        assert code_of(patched(data, 5, "B", number)) == "coding"
    assert code_of(patched(data, 6, "B", 80)) == "scale"
    assert code_of(patched(data, 7, "B", 1)) == "flags"
    assert code_of(patched(data, 8, "I", 8)) == "round"
    assert code_of(patched(data, 12, "I", 11)) == "dimension"
    assert code_of(patched(data, 16, "I", 7)) == "active"
    assert code_of(patched(data, 16, "I", 2**32 - 1)) == "active"
    assert code_of(data[:44] + bytes(4) + data[48:]) == "checksum"
    for more in (1, 1 << 31):
        assert code_of(patched(data, 36, "I", more)) == "flags"
    for step in (math.nan, math.inf, -1.0):
        assert code_of(patched(data, 40, "f", step)) == "step"
    if coding != "f32":
        assert code_of(patched(data, 40, "f", 0.0)) == "step"


def test_wrong_lengths_are_refused() -> None:
    data = encode(UPDATE, "f32")
    assert code_of(sealed(data[:-1])) == "length"
    assert code_of(sealed(data + b"x")) == "length"
    data = encode(UPDATE, "int", 1.0)
    assert code_of(sealed(data + b"x" * 60)) == "length"
    assert code_of(sealed(data + b"x")) == "body"


def test_replays_and_foreign_seeds_are_refused() -> None:
    data = encode(UPDATE, "f32")
    assert code_of(data, dataclasses.replace(EXPECTED, seen={SEED})) == "replay"
    assert code_of(data, dataclasses.replace(EXPECTED, seed=bytes(16))) == "seed"
    assert decode(data, dataclasses.replace(EXPECTED, seed=SEED, seen={bytes(16)})).mask_seed == SEED


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001])
def test_values_that_are_not_finite_are_refused(bits: int) -> None:
    assert code_of(patched(encode(UPDATE, "f32"), 52, "I", bits)) == "not-finite"


def test_overflow_in_decoding_is_refused() -> None:
    expect = dataclasses.replace(EXPECTED, noise_std=0.0)
    assert code_of(patched(encode(UPDATE, "int", 1.0), 40, "f", 3e38), expect) == "not-finite"


@pytest.mark.parametrize("coding", CODINGS)
def test_values_beyond_the_bound_are_refused(coding: Coding) -> None:
    assert code_of(encode(UPDATE, coding, 1.0), dataclasses.replace(EXPECTED, bound=99.0)) == "bound"


def test_a_step_above_the_noise_is_refused_where_the_noise_is_known() -> None:
    data = encode(UPDATE, "int", 1.0, step=1.0)
    assert decode(data, EXPECTED).active == 6
    assert code_of(data, dataclasses.replace(EXPECTED, noise_std=0.99)) == "step"
    assert decode(data, dataclasses.replace(EXPECTED, noise_std=0.0)).active == 6


@given(st.floats(1e-30, 1e30))
def test_the_largest_step_passes_whatever_its_rounding(noise: float) -> None:
    update = Update(0, 2, SEED, np.zeros(1, dtype=np.float32))
    decode(encode(update, "int", noise, step=1.0), Expected(0, 2, 1, bound=math.inf, noise_std=noise))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"round": -1}, "round"),
        ({"dimension": 5}, "active"),
        ({"dimension": 2**31}, "dimension"),
        ({"mask_seed": bytes(15)}, "seed"),
        ({"values": VALUES.astype(np.float64)}, "active"),
        ({"values": VALUES.reshape(2, 3)}, "active"),
    ],
)
def test_an_update_that_exists_is_well_formed(change: dict[str, object], code: str) -> None:
    with pytest.raises(PayloadError) as caught:
        dataclasses.replace(UPDATE, **change)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("f64",), "coding"), (("int",), "coding"), (("int", 1.0, 0.0), "step"), (("int", 1e-45, 0.5), "step")],
)
def test_encoding_refuses_what_it_cannot_do(arguments: tuple[object, ...], code: str) -> None:
    with pytest.raises(PayloadError) as caught:
        encode(UPDATE, *arguments)  # type: ignore[arg-type]
    assert caught.value.code == code
