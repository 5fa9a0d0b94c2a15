"""docs/secagg.md followed line by line in plain Python: no `cryptography`, no numpy, nothing of fedspa.

X25519 after RFC 7748, ChaCha20 after RFC 8439, HKDF after RFC 5869. Slow, and not safe against who measures its time:
a twin that tests hold the real one to.
"""

from __future__ import annotations

import hashlib
import hmac
import zlib
from collections.abc import Mapping, Sequence

P = 2**255 - 19


def x25519(secret: bytes, public: bytes) -> bytes:
    """RFC 7748, section 5."""
    k = int.from_bytes(secret, "little")
    k = (k & ~7 & (2**255 - 1)) | 2**254
    u = int.from_bytes(public, "little") & (2**255 - 1)
    x2, z2, x3, z3, swap = 1, 0, u, 1, 0
    for t in reversed(range(255)):
        bit = k >> t & 1
        if swap ^ bit:
            x2, z2, x3, z3 = x3, z3, x2, z2
        swap = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a % P, b * b % P, d * a % P, c * b % P
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % P, u * (da - cb) ** 2 % P
        x2, z2 = aa * bb % P, e * (aa + 121665 * e) % P
    if swap:
        x2, z2 = x3, z3
    return (x2 * pow(z2, P - 2, P) % P).to_bytes(32, "little")


def chacha20(key: bytes, nonce: bytes, length: int, counter: int = 0) -> bytes:
    """RFC 8439, section 2.3: the keystream from block `counter` on."""
    out = b""
    while len(out) < length:
        start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
        rest = key + counter.to_bytes(4, "little") + nonce
        start += [int.from_bytes(rest[i : i + 4], "little") for i in range(0, 48, 4)]
        s = list(start)
        for _ in range(10):
            for i in range(4):
                _quarter(s, i, i + 4, i + 8, i + 12)
            for i in range(4):
                _quarter(s, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
        out += b"".join(((x + y) % 2**32).to_bytes(4, "little") for x, y in zip(s, start, strict=True))
        counter += 1
    return out[:length]


def _quarter(s: list[int], a: int, b: int, c: int, d: int) -> None:
    for x, y, z, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        s[x] = (s[x] + s[y]) % 2**32
        s[z] ^= s[x]
        s[z] = (s[z] << turn | s[z] >> (32 - turn)) % 2**32


def hkdf(secret: bytes, info: bytes, length: int = 32, salt: bytes = bytes(32)) -> bytes:
    """RFC 5869 with SHA-256."""
    extracted = hmac.digest(salt, secret, "sha256")
    out = block = b""
    number = 1
    while len(out) < length:
        block = hmac.digest(extracted, block + info + bytes([number]), "sha256")
        out += block
        number += 1
    return out[:length]


def u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def listed(*parts: bytes) -> bytes:
    return b"".join(u32(len(part)) + part for part in parts)


class Member:
    """A member of one session: all that it computes, step by step."""

    def __init__(
        self,
        run: str,
        round: int,
        attempt: int,
        members: Mapping[str, bytes],
        terms: bytes,
        low: int,
        high: int,
        count: int,
        threshold: int = 0,
        least: int = 0,
    ) -> None:
        self.threshold = threshold
        self.members = dict(sorted(members.items()))
        self.round, self.attempt, self.count = round, attempt, count
        b = 1
        while 2**b <= high - low:
            b += 1
        if (high - low + 1) / 2**b > 7 / 8:
            b += 1
        self.bits = b
        self.checks = 1
        while self.checks * b < 64:
            self.checks += 1
        numbers = u32(round) + u32(attempt) + u32(count)
        numbers += low.to_bytes(8, "little", signed=True) + high.to_bytes(8, "little", signed=True)
        parts = [b"fedspa secure aggregation 1: session", run.encode(), numbers, terms, u32(len(members))]
        for name, public in self.members.items():
            parts += [name.encode(), public]
        if threshold:
            parts.append(u32(threshold) + u32(least))
        self.preimage = listed(*parts)
        self.binding = hashlib.sha256(self.preimage).digest()

    def mask_key(self, first: str, second: str, shared: bytes) -> bytes:
        info = listed(b"fedspa secure aggregation 1: pad", self.binding, first.encode(), second.encode())
        return hkdf(shared, info)

    def pad(self, first: str, second: str, shared: bytes) -> list[int]:
        return self.stream(self.mask_key(first, second, shared))

    def stream(self, key: bytes) -> list[int]:
        width = 1
        while 8 * width < self.bits:
            width *= 2
        stream = chacha20(key, bytes(12), (self.count + self.checks) * width)
        return [int.from_bytes(stream[i : i + width], "little") for i in range(0, len(stream), width)]

    def masked(self, values: Sequence[int], name: str, secret: bytes) -> list[int]:
        words = [*values, *[0] * self.checks]
        for other, public in self.members.items():
            if other != name:
                first, second = sorted((name, other))
                sign = 1 if name == first else -1
                pad = self.pad(first, second, x25519(secret, public))
                words = [word + sign * p for word, p in zip(words, pad, strict=True)]
        return [word % 2**self.bits for word in words]

    def message(
        self, values: Sequence[int], name: str, secret: bytes, seed: int = 0, coefficients: Sequence[int] = ()
    ) -> bytes:
        head = (
            b"FSPS"
            + bytes([1, self.bits, 1 if self.threshold else 0, 0])
            + u32(self.round)
            + u32(self.attempt)
            + u32(self.count)
        )
        head += self.binding
        words, sealed = self.masked(values, name, secret), b""
        if self.threshold:
            info = listed(b"fedspa secure aggregation 1: self mask", self.binding, name.encode())
            own = self.stream(hkdf(seed.to_bytes(32, "little"), info))
            words = [(word + mask) % 2**self.bits for word, mask in zip(words, own, strict=True)]
            for place, (other, public) in enumerate(self.members.items(), 1):
                share = sum(a * place**power for power, a in enumerate([seed, *coefficients])) % P
                key = self.key("share", name, other, x25519(secret, public))
                sealed += chacha20_poly1305(key, share.to_bytes(32, "little"))
        bits = "".join(format(word, f"0{self.bits}b")[::-1] for word in words)
        bits += "0" * (-len(bits) % 8)
        body = bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8)) + sealed
        return head + u32(zlib.crc32(head + body)) + body

    def key(self, use: str, sender: str, receiver: str, shared: bytes) -> bytes:
        label = f"fedspa secure aggregation 1: {use}".encode()
        return hkdf(shared, listed(label, self.binding, sender.encode(), receiver.encode()))

    def survivors(self, names: Sequence[str]) -> bytes:
        number = sum(2**place for place, name in enumerate(self.members) if name in names)
        return number.to_bytes((len(self.members) + 7) // 8, "little")

    def exclude(self, names: Sequence[str], name: str, secret: bytes) -> bytes:
        answer = b""
        for other, public in self.members.items():
            if other not in names:
                first, second = sorted((name, other))
                answer += self.mask_key(first, second, x25519(secret, public))
        return answer

    def commit(self, names: Sequence[str], name: str, secret: bytes) -> bytes:
        answer = b""
        for other, public in self.members.items():
            key = self.key("commit", name, other, x25519(secret, public))
            answer += hmac.digest(key, self.survivors(names), "sha256")[:16]
        return answer

    def opened(self, sealed: Mapping[str, bytes], name: str, secret: bytes) -> bytes:
        """The shares that the survivors sealed for this member."""
        answer = b""
        for other, box in sealed.items():
            key = self.key("share", other, name, x25519(secret, self.members[other]))
            stream = chacha20(key, bytes(12), 32, counter=1)
            share = bytes(a ^ b for a, b in zip(box, stream))
            assert chacha20_poly1305(key, share) == box
            answer += share
        return answer


def chacha20_poly1305(key: bytes, plain: bytes) -> bytes:
    """RFC 8439, section 2.8, with a nonce of 0 and no additional data."""
    cipher = bytes(a ^ b for a, b in zip(plain, chacha20(key, bytes(12), len(plain), counter=1)))
    once = chacha20(key, bytes(12), 32)
    r = int.from_bytes(once[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    data = cipher + bytes(-len(cipher) % 16) + (0).to_bytes(8, "little") + len(cipher).to_bytes(8, "little")
    total = 0
    for i in range(0, len(data), 16):
        total = (total + int.from_bytes(data[i : i + 16] + b"\x01", "little")) * r % (2**130 - 5)
    return cipher + ((total + int.from_bytes(once[16:], "little")) % 2**128).to_bytes(16, "little")
