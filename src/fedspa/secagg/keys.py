"""The static X25519 key of a member: in memory, as text, and in a file that its owner alone can read."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedspa import durable
from fedspa.errors import ConfigError, worded

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
        """For the processes of a simulation; what is remembered of others stays behind."""
        return type(self), (self._key.private_bytes_raw(),)

    @classmethod
    def generate(cls) -> SecretKey:
        """A new key, from the operating system's entropy."""
        return cls(X25519PrivateKey.generate().private_bytes_raw())

    def shared(self, public: bytes) -> bytes:
        """The 32 bytes that this key and the owner of `public` alone can compute; a ConfigError for a public key with
        which anybody can."""
        if public not in self._shared:
            require_canonical(public)
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

        def words(reason: str) -> str:
            return f"{path}: {reason}; give the path of a new file in a folder that you may write to"

        with worded(ConfigError, words):
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
        """The key in a file that `save` wrote."""

        def words(reason: str) -> str:
            return f"{path}: {reason}; give the path of a key that `fedspa site keygen` made"

        with worded(ConfigError, words), path.open("rb") as file:
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
            raise ConfigError(words("it holds no secret key"))
        return cls(bytes.fromhex(found[1]))


def require_canonical(public: bytes) -> None:
    """Refuse a public key that is not the one way to write its point."""
    if len(public) != KEY_BYTES:
        raise ConfigError(f"a public key has {len(public)} bytes; it must have {KEY_BYTES}")
    if int.from_bytes(public, "little") >= _PRIME:
        raise ConfigError(
            f"the public key {public.hex()} is a number of 2^255 − 19 or more; take it from its owner anew"
        )


def public_key(text: str) -> bytes:
    """The public key that 64 hexadecimal digits spell out: any that `SecretKey.shared` takes."""
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
    """What two operators compare by telephone: the first 80 bits of the key's SHA-256, in groups of four digits."""
    digits = hashlib.sha256(public).hexdigest()[:20]
    return "-".join(digits[i : i + 4] for i in range(0, 20, 4))


# Nobody's key: it finds the points of small order, for which every secret key finds the same.
_PROBE = SecretKey(bytes(KEY_BYTES))
