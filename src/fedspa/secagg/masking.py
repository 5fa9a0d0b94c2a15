"""Pairwise masks, the message of a masked update, and the server's sum of such messages.

Each pair of members adds one keystream, the one with plus and the other with minus. A keystream serves one message of
each of the two. Nothing here remembers which were used: an agent makes one message per run, round and attempt, whatever
it is asked (fedspa/agent/participate.py).

A message is a header and the masked words, packed. docs/secagg.md gives the format to the bit.

    offset  bytes  field
         0      4  magic "FSPS"
         4      1  version, 1
         5      1  bits of a word, b
         6      2  flags: 0, or 1 where the session can be recovered
         8      4  round
        12      4  attempt
        16      4  count of values, k
        20     32  the session's binding
        52      4  CRC-32 of everything else: against accidents, not against malice
        56      …  k + ⌈64/b⌉ words of b bits, the lowest bit first, and up to 7 bits of 0
         …      …  where the session can be recovered: a sealed share of the self mask's seed for each member

Numbers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedspa.errors import ConfigError, FedspaError, PayloadError, quoted
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.session import Session, prefixed
from fedspa.wire.payload import (
    CHECKSUM,
    Words,
    check_equal,
    frame,
    packed,
    read_body,
    read_header,
    reduced,
    unpacked,
    word_type,
)

MAGIC = b"FSPS"
VERSION = 1
FIELDS = struct.Struct("<4s2BH3I32s")
HEADER_BYTES = FIELDS.size + CHECKSUM.size
LABEL = b"fedspa secure aggregation 1: pad"
SEALED_BYTES = 32 + 16  # a share and its authentication tag


def masked(values: NDArray[np.int64], session: Session, name: str, secret: SecretKey) -> Words:
    """Return the values and the check words modulo 2^bits, under the masks that `name` shares with the other members.

    Without the keys of one of the others it is uniform, whatever the values are.
    """
    total = residues(values, session)
    if session.members.get(name) != secret.public:
        raise ConfigError(f"{name!r} is not in the cohort with this key; give the key of its roster's line")
    for other, public in session.members.items():
        if other < name:
            total -= keystream(session, other, name, secret.shared(public))
        elif other > name:
            total += keystream(session, name, other, secret.shared(public))
    return reduced(total, session.bits)


def residues(values: NDArray[np.int64], session: Session) -> Words:
    """Return the values and the check words modulo 2^bits, under no mask."""
    if values.shape != (session.count,) or values.dtype != np.int64:
        raise ConfigError(
            f"values are {values.dtype} in the shape {values.shape}; {session.count} of int64 are to be masked"
        )
    words = np.zeros(session.words, word_type(session.bits))
    words[: session.count] = values.astype(words.dtype)  # modulo 2 to the power of the word's width
    return reduced(words, session.bits)


def keystream(session: Session, first: str, second: str, shared: bytes) -> Words:
    """Return the words that the pair has for this session, `first` before `second`, uniform modulo 2 to the power of a
    word's width and so modulo 2^bits."""
    return words_of(session, mask_key(session, first, second, shared))


def words_of(session: Session, key: bytes) -> Words:
    """Return the words of a ChaCha20 key that serves this one use: counter and nonce may start at 0."""
    kind = word_type(session.bits)
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(session.words * kind.itemsize)), kind)


def mask_key(session: Session, first: str, second: str, shared: bytes) -> bytes:
    """Return the pair's ChaCha20 key for this session."""
    info = prefixed([LABEL, session.binding, first.encode("ascii"), second.encode("ascii")])
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(shared)


def upload(values: NDArray[np.int64], session: Session, name: str, secret: SecretKey) -> bytes:
    """Return the message of the member `name` for these values, in a session that cannot be recovered. It is sent
    once."""
    return encode(masked(values, session, name, secret), session)


def size(session: Session) -> int:
    """Bytes of every message of the session."""
    return HEADER_BYTES + _word_bytes(session) + sealed_bytes(session)


def sealed_bytes(session: Session) -> int:
    """Bytes of the sealed shares behind the words."""
    return SEALED_BYTES * len(session.members) if session.threshold else 0


def encode(words: Words, session: Session, sealed: bytes = b"") -> bytes:
    """Masked words as bytes, with the sealed shares behind them."""
    flags = int(session.threshold > 0)
    fields = FIELDS.pack(
        MAGIC, VERSION, session.bits, flags, session.round, session.attempt, session.count, session.binding
    )
    return frame(fields, packed(words, session.bits) + sealed)


def decode(data: bytes, session: Session) -> Words:
    """Return the masked words in `data`, or a PayloadError that names what is wrong. Any bytes may be handed in."""
    bits, flags, *rest, binding = read_header(data, FIELDS, MAGIC, VERSION, "masked message")
    expected = int(session.threshold > 0), session.round, session.attempt, session.count, session.bits
    for code, got, wanted in zip(("flags", "round", "attempt", "count", "bits"), (flags, *rest, bits), expected):
        check_equal(code, got, wanted)
    if binding != session.binding:
        raise PayloadError("binding", "the message was made for another run, cohort, range or other terms")
    if len(data) != size(session):
        raise PayloadError("length", f"{len(data)} bytes; a message of this round has {size(session)}")
    body = read_body(data, FIELDS)[: _word_bytes(session)]
    spare = 8 * len(body) - session.words * session.bits
    if body[-1] >> (8 - spare):
        raise PayloadError("body", "the bits after the last word are not 0")
    return unpacked(body, session.words, session.bits)


def _word_bytes(session: Session) -> int:
    return -(-session.words * session.bits // 8)


Reason = Literal["missing", "check", "bound", "agreement"]


class Void(FedspaError):
    """An attempt that gave no sum. The next one is a new release of everybody's."""

    def __init__(self, code: Reason, sentence: str) -> None:
        super().__init__(sentence)
        self.code: Reason = code

    def __reduce__(self) -> tuple[type[Void], tuple[Reason, str]]:
        """Two arguments in, two arguments on the way between processes."""
        return type(self), (self.code, str(self))


class MaskedSum:
    """Adds up one session's messages. Before the last one it holds noise, and nothing that could be looked at."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._total = np.zeros(session.words, word_type(session.bits))
        self._missing = dict.fromkeys(session.members)

    @property
    def missing(self) -> tuple[str, ...]:
        """The members who have not been added."""
        return tuple(self._missing)

    def add(self, name: str, payload: bytes) -> None:
        """Take in the one message of the member `name`. After a PayloadError the sum is as before."""
        if name not in self.session.members:
            raise PayloadError("member", f"{quoted(name, 80)} is not in this cohort")
        if name not in self._missing:
            raise PayloadError("replay", f"a message of {name} was accepted before")
        self._total += decode(payload, self.session)
        del self._missing[name]

    @property
    def members(self) -> int:
        """The number of members whose values `values` adds up."""
        return len(self.session.members)

    def values(self) -> NDArray[np.int64]:
        """Return the sum of everybody's values. Void where a member is missing, masks did not cancel, or a value lies
        where no honest sum does."""
        if self._missing:
            silent = ", ".join(self.missing[:10]) + (", …" if len(self._missing) > 10 else "")
            raise Void("missing", f"{len(self._missing)} of {self.members} members sent nothing that counts: {silent}")
        return unmasked(self._total, self.session)


def unmasked(total: Words, session: Session) -> NDArray[np.int64]:
    """Return the sum whose masks were all taken off or cancelled, or Void where it is none."""
    residues = reduced(total, session.bits)
    if residues[session.count :].any():
        raise Void("check", "the masks did not cancel: a member had another key or cohort, or sent garbage")
    # To the representative in low … low + 2^bits − 1. Nothing overflows: all are below 2^62.
    above: NDArray[np.int64] = (residues[: session.count].astype(np.int64) - session.low) & (2**session.bits - 1)
    highest = int(above.max()) + session.low
    if highest > session.high:
        raise Void("bound", f"a sum is {highest}; honest ones lie between {session.low} and {session.high}")
    above += session.low
    return above
