"""The masks: each pair of members adds one keystream, the one with plus and the other with minus.

A keystream serves one message of each of the two. Nothing here remembers which were used: an agent makes one message
per run, round and attempt, whatever it is asked (fedspa/agent/participate.py).
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedspa.errors import ConfigError
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.session import Session, prefixed

LABEL = b"fedspa secure aggregation 1: pad"

Words = NDArray[np.unsignedinteger]


def masked(values: NDArray[np.int64], session: Session, name: str, secret: SecretKey) -> Words:
    """The values and the check words modulo 2^bits, under the masks that `name` shares with the other members.

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
    """The values and the check words modulo 2^bits, under no mask."""
    if values.shape != (session.count,) or values.dtype != np.int64:
        raise ConfigError(
            f"values are {values.dtype} in the shape {values.shape}; {session.count} of int64 are to be masked"
        )
    words = np.zeros(session.words, word_type(session.bits))
    words[: session.count] = values.astype(words.dtype)  # modulo 2 to the power of the word's width
    return reduced(words, session.bits)


def keystream(session: Session, first: str, second: str, shared: bytes) -> Words:
    """The words that the pair has for this session, `first` before `second`, uniform modulo 2 to the power of a word's
    width and so modulo 2^bits."""
    key = pad_key(session, first, second, shared)
    kind = word_type(session.bits)
    # The key is of this use alone: counter and nonce may start at 0.
    stream = (
        Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(session.words * kind.itemsize))
    )
    return np.frombuffer(stream, kind)


def pad_key(session: Session, first: str, second: str, shared: bytes) -> bytes:
    """The pair's ChaCha20 key for this session."""
    info = prefixed([LABEL, session.binding, first.encode("ascii"), second.encode("ascii")])
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(shared)


def word_type(bits: int) -> np.dtype[np.unsignedinteger]:
    """The narrowest unsigned integer that holds a word, little-endian."""
    return np.dtype(f"<u{next(width for width in (1, 2, 4, 8) if bits <= 8 * width)}")


def reduced(words: Words, bits: int) -> Words:
    """`words` modulo 2^bits."""
    return words & words.dtype.type(2**bits - 1)
