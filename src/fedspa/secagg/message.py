"""One upload: a header and the masked words, packed. docs/secagg.md gives the format to the bit.

    offset  bytes  field
         0      4  magic "FSPS"
         4      1  version, 1
         5      1  bits of a word, b
         6      2  flags, 0
         8      4  round
        12      4  attempt
        16      4  count of values, k
        20     32  the session's binding
        52      4  CRC-32 of everything else: against accidents, not against malice
        56      …  k + ⌈64/b⌉ words of b bits, the lowest bit first, and up to 7 bits of 0

Numbers are little-endian.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import PayloadError
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.pads import Words, masked, reduced, word_type
from fedspa.secagg.session import Session

MAGIC = b"FSPS"
VERSION = 1
FIELDS = struct.Struct("<4s2BH3I32s")
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = FIELDS.size + CHECKSUM.size


def upload(values: NDArray[np.int64], session: Session, name: str, secret: SecretKey) -> bytes:
    """What the member `name` sends for these values, once."""
    return encode(masked(values, session, name, secret), session)


def size(session: Session) -> int:
    """Bytes of every message of the session."""
    return HEADER_BYTES + -(-session.words * session.bits // 8)


def encode(words: Words, session: Session) -> bytes:
    """Masked words as bytes."""
    fields = FIELDS.pack(
        MAGIC, VERSION, session.bits, 0, session.round, session.attempt, session.count, session.binding
    )
    body = packed(words, session.bits)
    return b"".join((fields, CHECKSUM.pack(zlib.crc32(body, zlib.crc32(fields))), body))


def decode(data: bytes, session: Session) -> Words:
    """The masked words in `data`, or a PayloadError that names what is wrong. Any bytes may be handed in."""
    if len(data) < HEADER_BYTES:
        raise PayloadError("length", f"{len(data)} bytes; a masked message has at least {HEADER_BYTES}")
    magic, version, bits, flags, *rest, binding = FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise PayloadError("magic", "these bytes do not begin like a masked message")
    if version != VERSION:
        raise PayloadError("version", f"the message's version is {version}; this server reads {VERSION}")
    if flags != 0:
        raise PayloadError("flags", f"flags are {flags}; version {VERSION} has none")
    for code, got, wanted in zip(
        ("round", "attempt", "count", "bits"),
        (*rest, bits),
        (session.round, session.attempt, session.count, session.bits),
    ):
        if got != wanted:
            raise PayloadError(code, f"{code} is {got}; {wanted} was expected")
    if binding != session.binding:
        raise PayloadError("binding", "the message was made for another run, cohort, range or other terms")
    if len(data) != size(session):
        raise PayloadError("length", f"{len(data)} bytes; a message of this round has {size(session)}")
    body = data[HEADER_BYTES:]
    if CHECKSUM.unpack_from(data, FIELDS.size)[0] != zlib.crc32(body, zlib.crc32(data[: FIELDS.size])):
        raise PayloadError("checksum", "the checksum does not fit; the bytes were damaged on the way")
    spare = 8 * len(body) - session.words * session.bits
    if body[-1] >> (8 - spare):
        raise PayloadError("body", "the bits after the last word are not 0")
    return unpacked(body, session.words, session.bits)


def packed(words: Words, bits: int) -> bytes:
    """Words of `bits` bits one after the other, the lowest bit first. Eight of them fill `bits` bytes."""
    eights = np.zeros((-(-len(words) // 8), 8), words.dtype)
    eights.reshape(-1)[: len(words)] = words
    out = np.zeros((len(eights), bits), np.uint8)
    for column, byte, shift in _overlaps(bits):
        part = eights[:, column] >> shift if shift >= 0 else eights[:, column] << -shift
        out[:, byte] |= part.astype(np.uint8)
    return out.tobytes()[: -(-len(words) * bits // 8)]


def unpacked(body: bytes, count: int, bits: int) -> Words:
    """The `count` words that `packed` made `body` of."""
    padded = np.zeros((-(-count // 8), bits), np.uint8)
    padded.reshape(-1)[: len(body)] = np.frombuffer(body, np.uint8)
    eights = np.zeros((len(padded), 8), word_type(bits))
    for column, byte, shift in _overlaps(bits):
        part = padded[:, byte].astype(eights.dtype)
        eights[:, column] |= part << shift if shift >= 0 else part >> -shift
    return reduced(eights.reshape(-1)[:count], bits)


def _overlaps(bits: int) -> list[tuple[int, int, int]]:
    """Which of eight words has bits in which of `bits` bytes, and by how many bits the byte begins after the word."""
    return [
        (word, byte, 8 * byte - word * bits)
        for word in range(8)
        for byte in range(word * bits // 8, ((word + 1) * bits - 1) // 8 + 1)
    ]
