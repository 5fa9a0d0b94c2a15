"""Recovery: the sum over those members of a session who answered, where the others fell silent at any moment.

Bonawitz et al. 2017, for pinned static keys. Beside the pairwise masks a member's message is under a *self mask* from a
fresh seed, and carries Shamir shares of that seed, each sealed for one member. Three short exchanges follow. Each names
the survivors, the members whose messages are to count:

    exclude   a survivor gives the session's mask keys that it shares with members who are no survivors. All survivors
              must answer; without those who do not, it is repeated. Left out where everybody is a survivor.
    commit    a survivor agrees to the survivors, once, by a tag for each member.
    open      a survivor that is shown `threshold` tags over the same survivors gives its shares of their seeds.

docs/secagg.md specifies the messages and proves that the server learns one sum, over `least` members or more.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedspa.errors import ConfigError
from fedspa.randomness.streams import Stream, derive_key
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import (
    SEALED_BYTES,
    MaskedSum,
    Void,
    decode,
    encode,
    mask_key,
    masked,
    sealed_bytes,
    unmasked,
    words_of,
)
from fedspa.secagg.session import Session, prefixed
from fedspa.wire.payload import Words, reduced, word_type

# Shamir's secret sharing over the prime field of 2^255 − 19 elements: any `threshold` shares give the secret, and
# fewer say nothing about it (Shamir, "How to share a secret", Communications of the ACM, 1979).

PRIME = 2**255 - 19
ELEMENT_BYTES = 32


def random_element(stream: Stream) -> int:
    """Return a uniform element of the field."""
    while True:
        found = int.from_bytes(stream.uint64(4).tobytes(), "little") & (2**255 - 1)
        if found < PRIME:  # misses with probability 2⁻²⁵⁰
            return found


def split(secret: int, threshold: int, count: int, stream: Stream) -> list[int]:
    """Return the shares of holders 1 … count: values at these places of a random polynomial of degree threshold − 1
    whose value at 0 is the secret."""
    if not 1 <= threshold <= count < PRIME or not 0 <= secret < PRIME:
        raise ValueError(f"{threshold} of {count} shares; the threshold must lie between 1 and the number of shares")
    coefficients = [secret, *(random_element(stream) for _ in range(threshold - 1))]
    return [_value(coefficients, place) for place in range(1, count + 1)]


def lagrange_weights(holders: Sequence[int]) -> list[int]:
    """Return the weight of each holder's share in the secret: Lagrange's polynomials at 0."""
    if len(set(holders)) != len(holders):
        raise ValueError("a holder is named twice; each has one share")
    found = []
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                above = above * other % PRIME
                below = below * (other - holder) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found


def reconstruct(weights: Sequence[int], shares: Sequence[int]) -> int:
    """Return the secret of these shares, by the weights of their holders. It is the right one where no share is wrong
    and there are `threshold` of them or more."""
    return sum(weight * share for weight, share in zip(weights, shares, strict=True)) % PRIME


def _value(coefficients: Sequence[int], place: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * place + coefficient) % PRIME
    return value


Step = Literal["exclude", "commit", "open"]
STEPS: Final[tuple[Step, ...]] = ("exclude", "commit", "open")
KEY_BYTES, TAG_BYTES = 32, 16
_NONE = b"\xff" * ELEMENT_BYTES  # in place of a share that could not be unsealed: no element of the field
_SELF, _SEAL, _TAG = (f"fedspa secure aggregation 1: {use}".encode() for use in ("self mask", "share", "commit"))


# A member's side.


def upload(values: NDArray[np.int64], session: Session, name: str, secret: SecretKey, key: bytes) -> bytes:
    """Return the message of the member `name`. It is sent once. Its seed and shares follow from the private `key` of
    this participation."""
    stream = Stream(derive_key(key, "self mask"))
    seed = random_element(stream)
    words = masked(values, session, name, secret) + _self_mask(session, name, seed)
    shares = split(seed, session.threshold, len(session.members), stream)
    sealed = []
    for (other, public), share in zip(session.members.items(), shares):
        cipher = ChaCha20Poly1305(_key(_SEAL, session, name, other, secret.shared(public)))
        sealed.append(cipher.encrypt(bytes(12), _bytes(share), None))  # the key serves this one use
    return encode(reduced(words, session.bits), session, b"".join(sealed))


@dataclass(frozen=True, slots=True)
class Progress:
    """What a member has answered in a session: the survivors that it was named last, and the furthest step. It is
    written down before an answer leaves."""

    survivors: tuple[str, ...]
    step: Step = "exclude"

    def advanced(self, session: Session, name: str, step: Step, survivors: tuple[str, ...]) -> Progress:
        """Return the progress once `step` is answered, or raise a ConfigError where it must not be. From one exclude to
        the next survivors only become fewer; a commit settles them for good."""
        if name not in survivors:
            raise ConfigError(f"the survivors are without {name}; only they are asked")
        if len(survivors) < session.least:
            raise ConfigError(f"{len(survivors)} survivors; the plan's ε holds from {session.least} on")
        fewer = step == self.step == "exclude" and set(survivors) <= set(self.survivors)
        if not fewer and survivors != self.survivors:
            raise ConfigError("these are other survivors than this member answered for before")
        furthest = max(self.step, step, key=STEPS.index)
        return replace(self, survivors=survivors, step=furthest)


def answer(session: Session, name: str, secret: SecretKey, progress: Progress, step: Step, body: bytes) -> bytes:
    """Return the answer to a step that `progress` allows. The same question has the same answer."""
    survivors = progress.survivors
    if step == "exclude":
        gone = ((other, public) for other, public in session.members.items() if other not in survivors)
        pairs = ((min(name, other), max(name, other), secret.shared(public)) for other, public in gone)
        return b"".join(mask_key(session, first, second, shared) for first, second, shared in pairs)
    if step == "commit":
        return b"".join(
            _tag(session, name, other, secret.shared(public), survivors) for other, public in session.members.items()
        )
    tags, sealed = body[_bitmap_bytes(session) :][: TAG_BYTES * len(survivors)], body[-SEALED_BYTES * len(survivors) :]
    valid = sum(
        hmac.compare_digest(tag, _tag(session, other, name, secret.shared(session.members[other]), survivors))
        for other, tag in zip(survivors, _cut(tags, TAG_BYTES))
    )
    if valid < session.threshold:
        raise ConfigError(f"{valid} members agreed to these survivors; {session.threshold} must")
    return b"".join(
        _unsealed(_key(_SEAL, session, other, name, secret.shared(session.members[other])), part)
        for other, part in zip(survivors, _cut(sealed, SEALED_BYTES))
    )


def survivors_in(session: Session, step: Step, body: bytes) -> tuple[str, ...]:
    """Return the survivors that a question names, or raise a ConfigError where it is no question of this step."""
    size, members = _bitmap_bytes(session), tuple(session.members)
    bits = int.from_bytes(body[:size], "little")
    found = tuple(name for place, name in enumerate(members) if bits >> place & 1)
    rest = (TAG_BYTES + SEALED_BYTES) * len(found) if step == "open" else 0
    if len(body) != size + rest or bits >> len(members):
        raise ConfigError(f"a question of {len(body)} bytes; {size + rest} were expected, with a bit for each member")
    return found


# The server's side.

Ask = Callable[[Step, Mapping[str, bytes]], Iterator[tuple[str, bytes]]]


class RecoverableSum(MaskedSum):
    """Keeps one session's messages until it is agreed whose count, and takes the masks off their sum."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._messages: dict[str, bytes] = {}
        self._survivors: tuple[str, ...] = tuple(session.members)
        self._masks: Words = np.zeros(session.words, word_type(session.bits))
        self._void: Void | None = None

    @property
    def members(self) -> int:
        return len(self._survivors)

    def add(self, name: str, payload: bytes) -> None:
        super().add(name, payload)
        self._messages[name] = payload

    def values(self) -> NDArray[np.int64]:
        """Return the sum of the survivors' values, or Void where it could not be recovered."""
        if self._void is not None:
            raise self._void
        total = np.zeros_like(self._masks)
        for name in self._survivors:
            if name not in self._messages:
                raise Void("missing", f"{name} sent nothing that counts, and no sum without it was recovered")
            total += decode(self._messages[name], self.session)
        return unmasked(total - self._masks, self.session)

    def recover(self, ask: Ask, among: Collection[str] | None = None) -> None:
        """Carry out the exchanges. `ask` sends each member its question, and yields those that answer, with the
        answers. With `among`, nobody else can be a survivor: members were asked about these before."""
        try:
            self._survivors, keys = self._exclude(ask, among)
            tags = self._commit(ask)
            seeds = self._open(ask, tags)
        except Void as void:
            self._void = void
            return
        for name, seed in seeds.items():
            self._masks += _self_mask(self.session, name, seed)
        for name, theirs in keys.items():
            for other, key in theirs.items():
                if name < other:
                    self._masks += words_of(self.session, key)
                else:
                    self._masks -= words_of(self.session, key)

    def _exclude(self, ask: Ask, among: Collection[str] | None) -> tuple[tuple[str, ...], dict[str, dict[str, bytes]]]:
        """Return survivors of whom each gave its keys with all who are none, and these keys."""
        session = self.session
        possible = self._messages.keys() if among is None else self._messages.keys() & set(among)
        survivors = tuple(name for name in session.members if name in possible)
        while True:
            if len(survivors) < session.least:
                raise Void("missing", f"{len(survivors)} members are left; the plan's ε holds from {session.least} on")
            gone = [name for name in session.members if name not in survivors]
            if not gone:
                return survivors, {}
            question = _bitmap(session, survivors)
            keys = {
                name: dict(zip(gone, _cut(reply, KEY_BYTES)))
                for name, reply in ask("exclude", dict.fromkeys(survivors, question))
                if len(reply) == KEY_BYTES * len(gone)
            }
            if len(keys) == len(survivors):
                return survivors, keys
            survivors = tuple(name for name in survivors if name in keys)

    def _commit(self, ask: Ask) -> dict[str, list[bytes]]:
        """Return for each survivor that agreed its tags, one for each member."""
        session, survivors = self.session, self._survivors
        question, size = _bitmap(session, survivors), TAG_BYTES * len(session.members)
        replies = ask("commit", dict.fromkeys(survivors, question))
        tags = {name: _cut(reply, TAG_BYTES) for name, reply in replies if len(reply) == size}
        self._require(len(tags), "agreed whose messages count")
        return tags

    def _open(self, ask: Ask, tags: Mapping[str, Sequence[bytes]]) -> dict[str, int]:
        """Return the seeds of the survivors' self masks, from the shares of `threshold` of them."""
        session, survivors = self.session, self._survivors
        places = {name: place for place, name in enumerate(session.members)}
        sealed = {name: _cut(self._messages[name][-sealed_bytes(session) :], SEALED_BYTES) for name in survivors}
        questions = {
            name: b"".join(
                [
                    _bitmap(session, survivors),
                    *(tags[other][places[name]] if other in tags else bytes(TAG_BYTES) for other in survivors),
                    *(sealed[other][places[name]] for other in survivors),
                ]
            )
            for name in survivors
        }
        size = ELEMENT_BYTES * len(survivors)
        shares = {name: _cut(reply, ELEMENT_BYTES) for name, reply in ask("open", questions) if len(reply) == size}
        self._require(len(shares), "opened the sum")
        weights: dict[tuple[str, ...], list[int]] = {}
        seeds = {}
        for number, owner in enumerate(survivors):
            given = {name: int.from_bytes(parts[number], "little") for name, parts in shares.items()}
            usable = {name: share for name, share in given.items() if share < PRIME}
            holders = tuple(list(usable)[: session.threshold])
            self._require(len(holders), f"had a share of {owner}'s seed")
            if holders not in weights:
                weights[holders] = lagrange_weights([places[name] + 1 for name in holders])
            seeds[owner] = reconstruct(weights[holders], [usable[name] for name in holders])
        return seeds

    def _require(self, found: int, what: str) -> None:
        if found < self.session.threshold:
            raise Void("agreement", f"{found} members {what}; {self.session.threshold} must")


# What both sides compute.


def exchange_bytes(session: Session) -> int:
    """Return the bytes of all answers of an exchange in which nobody falls silent: nobody is excluded then."""
    members = len(session.members)
    return members * members * (TAG_BYTES + ELEMENT_BYTES)


def _self_mask(session: Session, name: str, seed: int) -> Words:
    info = prefixed([_SELF, session.binding, name.encode("ascii")])
    return words_of(session, HKDF(SHA256(), length=32, salt=None, info=info).derive(_bytes(seed)))


def _key(label: bytes, session: Session, sender: str, receiver: str, shared: bytes) -> bytes:
    """Return the key for what `sender` says to `receiver` alone in this session. It serves one use."""
    info = prefixed([label, session.binding, sender.encode("ascii"), receiver.encode("ascii")])
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(shared)


def _tag(session: Session, sender: str, receiver: str, shared: bytes, survivors: Collection[str]) -> bytes:
    """Return the proof to `receiver` that `sender` agrees to the survivors: nobody else can make it."""
    key = _key(_TAG, session, sender, receiver, shared)
    return hmac.digest(key, _bitmap(session, survivors), "sha256")[:TAG_BYTES]


def _unsealed(key: bytes, sealed: bytes) -> bytes:
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, None)
    except InvalidTag:
        return _NONE


def _bitmap_bytes(session: Session) -> int:
    return -(-len(session.members) // 8)


def _bitmap(session: Session, survivors: Collection[str]) -> bytes:
    bits = sum(1 << place for place, name in enumerate(session.members) if name in survivors)
    return bits.to_bytes(_bitmap_bytes(session), "little")


def _bytes(number: int) -> bytes:
    return number.to_bytes(ELEMENT_BYTES, "little")


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
