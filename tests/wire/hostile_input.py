"""What must hold for any bytes handed to the decoders: shared by the fuzzer and by test_hostile.py.

The first byte of an input says which decoder reads the rest. Half of the inputs are taken as they come; the other half
get the fields that a hostile agent can always get right (magic, version, round, d, k, checksum), so that a search
spends its time on the codings.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np

from fedspa.algorithms.base import IntegerUpdate
from fedspa.algorithms.cpsgd.respond import decode_integers, encode_integers
from fedspa.errors import PayloadError
from fedspa.wire import coding as codings
from fedspa.wire.payload import CODING_NUMBERS, CODINGS, Expected, Update, decode, encode

ROUND, D, K = 3, 320, 32
TRIALS, LEVELS = 60_000, 16
EXPECTED = Expected(round=ROUND, dimension=D, active=K, bound=1e6)
EXPECTED_INTEGERS = Expected(round=ROUND, dimension=D, active=K, bound=1e6, codings=frozenset({"whole"}))
PREFIX = struct.pack("<4sB", b"FSPA", 1)
PLACE = struct.pack("<3I", ROUND, D, K)


def check(data: bytes) -> None:
    """Raise unless the input decodes to what was asked for or to a listed PayloadError."""
    integers, helped, payload = data[:1] >= b"\x80", bool(data[:1] and data[0] % 2), data[1:]
    if helped and len(payload) > 48:
        payload = _helped(payload, CODING_NUMBERS["whole"] if integers else payload[5] & CODING_NUMBERS["int"])
    try:
        if integers:
            _check_integers(payload)
        else:
            _check_values(payload)
    except PayloadError as error:
        if error.code not in PayloadError.CODES:
            raise RuntimeError(f"unlisted code {error.code}") from error


def corpus() -> Iterator[bytes]:
    """Honest payloads of every coding, as inputs that decode."""
    rng = np.random.default_rng(0)
    for number, coding in enumerate(CODINGS * 3):
        values = (rng.standard_t(2, K) * 10.0 ** (number % 3)).astype(np.float32)
        yield b"\x01" + encode(Update(ROUND, D, rng.bytes(16), values), coding, 1.0)
    for _ in range(3):
        numbers = rng.binomial(TRIALS, 0.5, K) + rng.integers(0, LEVELS, K)
        yield b"\x81" + encode_integers(IntegerUpdate(ROUND, D, rng.bytes(16), numbers), TRIALS, LEVELS)


def _helped(data: bytes, coding: int) -> bytes:
    """The input with every field right that can be had without luck: 6: scale, 20: seed, 40: step."""
    fields = PREFIX + bytes([coding]) + data[6:7] + b"\0" + PLACE + data[20:36] + bytes(4) + data[40:44]
    return fields + struct.pack("<I", zlib.crc32(fields + data[48:])) + data[48:]


def _check_values(data: bytes) -> None:
    update = decode(data, EXPECTED)
    if update.values.shape != (K,) or not np.all(np.abs(update.values) <= EXPECTED.bound):
        raise RuntimeError(f"decoded to {update}")
    if data[5] == CODING_NUMBERS["int"] and codings.pack(codings.unpack(data[48:], data[6], K), data[6]) != data[48:]:
        raise RuntimeError("one body was read that the encoder would not write")


def _check_integers(data: bytes) -> None:
    update = decode_integers(data, EXPECTED_INTEGERS, TRIALS, LEVELS)
    if update.values.shape != (K,) or update.values.min() < 0 or update.values.max() > TRIALS + LEVELS - 1:
        raise RuntimeError(f"decoded to {update}")
