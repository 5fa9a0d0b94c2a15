"""The server's side: messages in, their sum out, or nothing."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import FedspaError, PayloadError, quoted
from fedspa.secagg.message import decode
from fedspa.secagg.pads import reduced, word_type
from fedspa.secagg.session import Session

Reason = Literal["missing", "check", "bound"]


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
        """Who has not been added."""
        return tuple(self._missing)

    def add(self, name: str, payload: bytes) -> None:
        """Take in the one message of the member `name`. After a PayloadError the sum is as before."""
        if name not in self.session.members:
            raise PayloadError("member", f"{quoted(name, 80)} is not in this cohort")
        if name not in self._missing:
            raise PayloadError("replay", f"a message of {name} was accepted before")
        self._total += decode(payload, self.session)
        del self._missing[name]

    def values(self) -> NDArray[np.int64]:
        """The sum of everybody's values. Void where a member is missing, masks did not cancel, or a value lies where no
        honest sum does."""
        session, members = self.session, len(self.session.members)
        if self._missing:
            silent = ", ".join(self.missing[:10]) + (", …" if len(self._missing) > 10 else "")
            raise Void("missing", f"{len(self._missing)} of {members} members sent nothing that counts: {silent}")
        residues = reduced(self._total, session.bits)
        if residues[session.count :].any():
            raise Void("check", "the masks did not cancel: a member had another key or cohort, or sent garbage")
        # To the representative in low … low + 2^bits − 1. Nothing overflows: all are below 2^62.
        above: NDArray[np.int64] = (residues[: session.count].astype(np.int64) - session.low) & (2**session.bits - 1)
        highest = int(above.max()) + session.low
        if highest > session.high:
            raise Void("bound", f"a sum is {highest}; honest ones lie between {session.low} and {session.high}")
        above += session.low
        return above
