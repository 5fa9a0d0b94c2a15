"""Who may be in a cohort: names and public keys, exchanged by the operators and pinned at each site.

    [members]
    clinic-a = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    clinic-b = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"

The server hands no keys around, so that it can neither put itself between two members nor fill a cohort with members of
its own making.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedspa import toml
from fedspa.errors import ConfigError, quoted
from fedspa.secagg.keys import check_public, public_key, require_canonical

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Roster:
    """Name → public key of every member, in the order of the names."""

    members: Mapping[str, bytes]

    def __post_init__(self) -> None:
        object.__setattr__(self, "members", checked(self.members))
        folded: dict[str, str] = {}
        for name, public in self.members.items():
            check_public(public)
            other = folded.setdefault(name.lower(), name)
            if other != name:
                raise ConfigError(f"the members {other!r} and {name!r} differ in capital letters alone; rename one")

    @classmethod
    def load(cls, path: Path) -> Roster:
        """The roster in a TOML file."""
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


def checked(members: Mapping[str, bytes]) -> dict[str, bytes]:
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
        require_canonical(public)
        other = owners.setdefault(public, name)
        if other != name:
            raise ConfigError(f"{other!r} and {name!r} have the same public key; each needs its own")
    return dict(sorted(members.items()))
