"""The static X25519 key of a member: in memory, as text, and in a file that its owner alone can read."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedspa import durable, toml
from fedspa.errors import ConfigError, os_errors_as, quoted

KEY_BYTES = 32
_PRIME = 2**255 - 19
_HEAD = "fedspa-x25519-secret-1 "
_LARGEST_FILE = 1000  # a key file has fewer than 100 bytes


class SecretKey:
    """An X25519 secret key. Its bytes are in no representation of it; `save` writes them."""

    __slots__ = ("_key", "_shared", "public")

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise ConfigError(f"a secret key has {len(secret)} bytes; it must have {KEY_BYTES}")
        self._key = X25519PrivateKey.from_private_bytes(secret)
        self.public = self._key.public_key().public_bytes_raw()
        # What it shares with each other key never changes, and is asked for in every round.
        self._shared: dict[bytes, bytes] = {}

    def __repr__(self) -> str:
        return f"<SecretKey {fingerprint(self.public)}>"

    def __reduce__(self) -> tuple[type[SecretKey], tuple[bytes]]:
        """Pickle the key for the processes of a simulation, without the shared secrets."""
        return type(self), (self._key.private_bytes_raw(),)

    @classmethod
    def generate(cls) -> SecretKey:
        """Return a new key, from the operating system's entropy."""
        return cls(X25519PrivateKey.generate().private_bytes_raw())

    def shared(self, public: bytes) -> bytes:
        """Return the 32 bytes that this key and the owner of `public` alone can compute; a ConfigError for a public key
        with which anybody can."""
        if public not in self._shared:
            check_canonical(public)
            try:
                self._shared[public] = self._key.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:  # all zeros, whatever the secret key: the point has a small order
                raise ConfigError(
                    f"the public key {public.hex()} shares the same secret with everybody; its owner must make "
                    "another with `fedspa site keygen`"
                ) from None
        return self._shared[public]

    def save(self, path: Path) -> None:
        """Write it to a new file that only its owner can read. A file that is there stays: its key may be in use."""
        line = f"{_HEAD}{self._key.private_bytes_raw().hex()}\n".encode()

        with os_errors_as(ConfigError, str(path), "give the path of a new file in a folder that you may write to"):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if os.write(descriptor, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            except BaseException:  # half a key would be in the way of a whole one
                path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
            durable.force_folder(path.parent)

    @classmethod
    def load(cls, path: Path) -> SecretKey:
        """Return the key in a file that `save` wrote."""

        advice = "give the path of a key that `fedspa site keygen` made"
        with os_errors_as(ConfigError, str(path), advice), path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a plain file")
            text = file.read(_LARGEST_FILE)
        if os.name == "posix" and status.st_mode & 0o077:
            raise ConfigError(
                f"{path} can be read by others than its owner (mode {status.st_mode & 0o777:o}); "
                f"run chmod 600 on it, or make another key if somebody may have read it"
            )
        found = re.fullmatch(rf"{_HEAD}([0-9a-f]{{64}})\n?", text.decode("ascii", errors="replace"))
        if found is None:
            raise ConfigError(f"{path}: it holds no secret key; {advice}")
        return cls(bytes.fromhex(found[1]))


def check_canonical(public: bytes) -> None:
    """Refuse a public key that is not the one way to write its point."""
    if len(public) != KEY_BYTES:
        raise ConfigError(f"a public key has {len(public)} bytes; it must have {KEY_BYTES}")
    if int.from_bytes(public, "little") >= _PRIME:
        raise ConfigError(
            f"the public key {public.hex()} is a number of 2^255 − 19 or more; take it from its owner anew"
        )


def public_key(text: str) -> bytes:
    """Return the public key that 64 hexadecimal digits spell out: any that `SecretKey.shared` takes."""
    if re.fullmatch(r"[0-9a-f]{64}", text) is None:
        raise ConfigError(
            f"{text[:100]!r} is not a public key; it has 64 digits out of 0-9a-f, as `fedspa site keygen` prints them"
        )
    public = bytes.fromhex(text)
    check_public(public)
    return public


def check_public(public: bytes) -> None:
    """Raise a ConfigError where this is no public key, or a point of small order."""
    _PROBE.shared(public)


def fingerprint(public: bytes) -> str:
    """Return what two operators compare by telephone: the first 80 bits of the key's SHA-256, in groups of four
    digits."""
    digits = hashlib.sha256(public).hexdigest()[:20]
    return "-".join(digits[i : i + 4] for i in range(0, 20, 4))


# Nobody's key: it finds the points of small order, for which every secret key finds the same.
_PROBE = SecretKey(bytes(KEY_BYTES))


# Who may be in a cohort: names and public keys, exchanged by the operators and pinned at each site.
#
# [members] clinic-a = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f" clinic-b =
# "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
#
# The server distributes no keys, so that it can neither put itself between two members nor fill a cohort with members
# of its own making.

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Roster:
    """Name → public key of every member, in the order of the names."""

    members: Mapping[str, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", checked_members(self.members))
        folded: dict[str, str] = {}
        for name, public in self.members.items():
            check_public(public)
            other = folded.setdefault(name.lower(), name)
            if other != name:
                raise ConfigError(f"the members {other!r} and {name!r} differ in capital letters alone; rename one")

    @classmethod
    def load(cls, path: Path) -> Roster:
        """Return the roster in a TOML file."""
        table = toml.read(path, "a roster: a TOML file with [members]")
        members = table.pop("members", None)
        if table or not isinstance(members, dict) or not all(isinstance(text, str) for text in members.values()):
            found = f", and not {quoted(next(iter(table)), 60)}" if table else ""
            raise ConfigError(
                f'{path}: a roster has one table, [members], with lines like clinic-a = "64 digits"{found}'
            )
        keys = {}
        for name, text in members.items():
            try:
                keys[name] = public_key(text)
            except ConfigError as error:
                raise ConfigError(f"{path}: {quoted(name, 80)}: {error}") from None
        try:
            return cls(keys)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def cohort(self, names: Iterable[str]) -> dict[str, bytes]:
        """Name → public key of these members; a ConfigError where one is not in the roster or named twice."""
        listed = list(names)
        unknown = next((name for name in listed if name not in self.members), None)
        if unknown is not None:
            raise ConfigError(f"{quoted(unknown, 80)} is not in the roster; its operator must be known to this site's")
        if len(set(listed)) != len(listed):
            raise ConfigError("a member is in the cohort twice; each counts once")
        return {name: self.members[name] for name in listed}

    @property
    def digest(self) -> str:
        """SHA-256 of names and keys: what two operators compare who mean to have the same roster."""
        hashed = hashlib.sha256(b"fedspa roster 1")
        for name, public in self.members.items():
            hashed.update(bytes([len(name)]) + name.encode("ascii") + public)
        return hashed.hexdigest()


def checked_members(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return `members` in the order of their names, at least two, each with a key of its own. A roster checks once that
    no key is a point of small order."""
    if len(members) < 2:
        raise ConfigError(f"there are {len(members)} members; a sum that hides anything has at least 2")
    owners: dict[bytes, str] = {}
    for name, public in members.items():
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{quoted(name, 80)} is not a member's name: 1 to 64 letters (a-z), digits, dots, dashes and "
                "underscores, a letter or digit first"
            )
        check_canonical(public)
        other = owners.setdefault(public, name)
        if other != name:
            raise ConfigError(f"{other!r} and {name!r} have the same public key; each needs its own")
    return dict(sorted(members.items()))
