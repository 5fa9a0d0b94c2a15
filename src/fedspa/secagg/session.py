"""What all members of one sum must agree on, and the digest of it that every mask and every message is bound to."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from fedspa.errors import ConfigError
from fedspa.secagg.keys import checked_members

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

    `members` is the cohort: name → public key. `terms` is the digest of all else that the members were sent: θ, the
    terms, the algorithm and its coding. With a `threshold`, the sum of `least` members or more can be recovered when
    the others fall silent (secagg/recovery.py): so many must agree on whom it is of. Without one, it is 0.
    """

    run: str
    round: int
    attempt: int
    members: Mapping[str, bytes]
    terms: bytes
    low: int
    high: int
    count: int
    threshold: int = 0
    least: int = 0

    def __post_init__(self) -> None:
        if len(self.members) > MOST_MEMBERS:
            raise ConfigError(f"a cohort has {len(self.members)} members; at most {MOST_MEMBERS:,} add up")
        object.__setattr__(self, "members", checked_members(self.members))
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
        if self.threshold and not len(self.members) < 2 * self.threshold <= 2 * self.least <= 2 * len(self.members):
            raise ConfigError(
                f"a sum of at least {self.least} of {len(self.members)} members with a threshold of {self.threshold}; "
                "the threshold must be more than half of the members, and at most the fewest that are added up"
            )
        if not self.low < self.high or self.bits > MOST_BITS or max(abs(self.low), abs(self.high)) >= 2**MOST_BITS:
            raise ConfigError(
                f"a sum between {self.low} and {self.high} is too large to send; low must lie below high, and both and "
                f"their distance within 2^{MOST_BITS - 1}"
            )

    def to_json(self) -> dict[str, Any]:
        """Return its fields, with bytes as hexadecimal digits."""
        members = {name: public.hex() for name, public in self.members.items()}
        return {each.name: getattr(self, each.name) for each in fields(self)} | {
            "members": members,
            "terms": self.terms.hex(),
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Session:
        """Return the session that `to_json` gave these values of; a ConfigError, ValueError or TypeError where it gave
        none."""
        members = {name: bytes.fromhex(public) for name, public in values["members"].items()}
        return cls(**{**values, "members": members, "terms": bytes.fromhex(values["terms"])})

    @cached_property
    def bits(self) -> int:
        """The bits of a word: as few as hold low … high, and one more where that leaves less than an eighth for what
        cannot be, so that garbage shows."""
        distance = self.high - self.low
        bits = distance.bit_length()
        return bits + 1 if 8 * (distance + 1) > 7 * 2**bits else bits

    @property
    def checks(self) -> int:
        """The number of words of 0 that follow the values."""
        return -(-CHECK_BITS // self.bits)

    @property
    def words(self) -> int:
        """The number of words of a message: the values and the check words."""
        return self.count + self.checks

    @cached_property
    def binding(self) -> bytes:
        """SHA-256 of everything above, each part with its length before it: two sessions that differ in anything have
        different bindings."""
        numbers = struct.pack("<3I2q", self.round, self.attempt, self.count, self.low, self.high)
        parts = [LABEL, self.run.encode("utf-8"), numbers, self.terms, struct.pack("<I", len(self.members))]
        for name, public in self.members.items():
            parts += [name.encode("ascii"), public]
        if self.threshold:
            parts.append(struct.pack("<2I", self.threshold, self.least))
        return hashlib.sha256(prefixed(parts)).digest()


def threshold_of(members: int, colluders: int) -> int:
    """Return how many members must agree on whom a sum is of: so many that no two sets find as many, since an honest
    member agrees once and at most `colluders` of them agree to anything."""
    return (members + colluders) // 2 + 1


def prefixed(parts: list[bytes]) -> bytes:
    """Each part after its length in four bytes."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)
