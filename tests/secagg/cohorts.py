"""Cohorts for tests: keys that follow from numbers, sessions, values."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import upload
from fedspa.secagg.session import Session

TERMS = bytes(range(32))


def secrets_of(n: int) -> dict[str, SecretKey]:
    return {f"site-{i}": SecretKey(sha256(b"%d" % i).digest()) for i in range(n)}


def publics(secrets: dict[str, SecretKey]) -> dict[str, bytes]:
    return {name: secret.public for name, secret in secrets.items()}


def session_of(secrets: dict[str, SecretKey], **changed: Any) -> Session:
    fields: dict[str, Any] = {"run": "a run", "round": 3, "attempt": 1, "members": publics(secrets), "terms": TERMS}
    return Session(**fields | {"low": -100, "high": 100, "count": 40} | changed)


def values_of(session: Session, seed: int = 0) -> dict[str, NDArray[np.int64]]:
    """Of each member, such that every sum lies within the session's range."""
    rng, n = np.random.default_rng(seed), len(session.members)
    return {
        name: rng.integers(-(-session.low // n), session.high // n, session.count, endpoint=True)
        for name in session.members
    }


def uploads(session: Session, secrets: dict[str, SecretKey], values: dict[str, NDArray[np.int64]]) -> dict[str, bytes]:
    return {name: upload(values[name], session, name, secrets[name]) for name in session.members}
