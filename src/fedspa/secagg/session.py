"""What all members of one sum must agree on, and the digest of it that every mask and every message is bound to."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fedspa.errors import ConfigError
from fedspa.secagg.roster import checked

LABEL = b"fedspa secure aggregation 1: session"
DIGEST_BYTES = 32
NUMBER_LIMIT = 2**31  # of rounds, attempts and values
MOST_MEMBERS = 10_000
MOST_BITS = 62
LONGEST_RUN = 1000
# Zeros at the end of every message, masked like the rest. Masks that do not cancel leave them all 0 with chance 2⁻⁶⁴.
CHECK_BITS = 64


@dataclass(frozen=True)
class Session:
    """One attempt at one sum: `count` integers, each of which lies between `low` and `high` where everybody is honest.

    `members` is the cohort: name → public key. `terms` is the digest of all else that the members were told: θ, the
    terms, the algorithm and its coding.
    """

    run: str
    round: int
    attempt: int
    members: Mapping[str, bytes]
    terms: bytes
    low: int
    high: int
    count: int

    def __post_init__(self) -> None:
        if len(self.members) > MOST_MEMBERS:
            raise ConfigError(f"a cohort has {len(self.members)} members; at most {MOST_MEMBERS:,} add up")
        object.__setattr__(self, "members", checked(self.members))
        try:
            length = len(self.run.encode("utf-8"))
        except UnicodeEncodeError:  # half a surrogate pair, out of JSON
            length = 0
        if not 1 <= length <= LONGEST_RUN:
            raise ConfigError(f"the run's name must be a text of 1 to {LONGEST_RUN:,} bytes of UTF-8")
        for what, number, least in (("round", self.round, 0), ("attempt", self.attempt, 1), ("count", self.count, 1)):
            if not least <= number < NUMBER_LIMIT:
                raise ConfigError(f"{what} is {number}; it must lie between {least} and 2^31 − 1")
        if len(self.terms) != DIGEST_BYTES:
            raise ConfigError(f"the digest of the terms has {len(self.terms)} bytes; it must have {DIGEST_BYTES}")
        if not self.low < self.high or self.bits > MOST_BITS or max(abs(self.low), abs(self.high)) >= 2**MOST_BITS:
            raise ConfigError(
                f"a sum between {self.low} and {self.high} cannot be carried; low must lie below high, and both and "
                f"their distance within 2^{MOST_BITS - 1}"
            )

    @cached_property
    def bits(self) -> int:
        """Of a word: as few as hold low … high, and one more where that leaves less than an eighth for what cannot be,
        so that garbage shows."""
        distance = self.high - self.low
        bits = distance.bit_length()
        return bits + 1 if 8 * (distance + 1) > 7 * 2**bits else bits

    @property
    def checks(self) -> int:
        """How many words of 0 follow the values."""
        return -(-CHECK_BITS // self.bits)

    @property
    def words(self) -> int:
        """Of a message: the values and the check words."""
        return self.count + self.checks

    @cached_property
    def binding(self) -> bytes:
        """SHA-256 of everything above, each part with its length before it: two sessions that differ in anything have
        different bindings."""
        numbers = struct.pack("<3I2q", self.round, self.attempt, self.count, self.low, self.high)
        parts = [LABEL, self.run.encode("utf-8"), numbers, self.terms, struct.pack("<I", len(self.members))]
        for name, public in self.members.items():
            parts += [name.encode("ascii"), public]
        return hashlib.sha256(prefixed(parts)).digest()


def prefixed(parts: list[bytes]) -> bytes:
    """Each part after its length in four bytes."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)
