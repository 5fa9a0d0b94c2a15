"""The last payload that an agent made in each run, kept until the next one takes its place.

A server that was restored from its checkpoint asks again for the round it had been in. Its agents have already paid for
that round, and may send the same bytes again at no cost, if they still have them. Drawing noise anew would be a new
spend. There is one file per run and agent, beside the ledger. It holds only what was about to leave anyway.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedspa import durable
from fedspa.errors import LedgerError, worded

_ENDING = ".payload"
_HEADER = struct.Struct("<4sII")
_MAGIC = b"FSPB"


@dataclass(frozen=True, slots=True)
class Sent:
    """What was made for an attempt at `round`."""

    round: int
    payload: bytes
    attempt: int = 1

    @property
    def place(self) -> tuple[int, int]:
        """Its place among all messages of the run: a later one is larger."""
        return self.round, self.attempt


class Outbox:
    """The folder `<ledger>.outbox`. Agents that share a ledger share it, apart by name."""

    def __init__(self, ledger: Path, agent: str) -> None:
        self._folder = ledger.with_name(ledger.name + ".outbox")
        self._agent = hashlib.blake2b(agent.encode(), digest_size=8).hexdigest()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other process is inside, and keep the others out. The lock is the kernel's, on the folder: it
        ends with the process, however that ends."""
        with self._one_line_errors("use"):
            if not self._folder.exists():
                self._folder.mkdir(exist_ok=True)
                durable.force_folder(self._folder.parent)
            folder = os.open(self._folder, os.O_RDONLY) if os.name == "posix" else -1
        try:
            if folder >= 0:
                import fcntl

                with self._one_line_errors("lock"):
                    fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            if folder >= 0:
                os.close(folder)

    def last(self, run: str) -> Sent | None:
        """The newest of `run`, or None where there is none that can be read."""
        with self._one_line_errors("read"):
            try:
                return _parsed(self._path(run).read_bytes())
            except FileNotFoundError:
                return None

    def places(self) -> dict[str, tuple[int, int]]:
        """Of the newest of each run, as far as it can be read."""
        found = {}
        with self._one_line_errors("read"):
            for path in sorted(self._folder.glob(f"{self._agent}-*{_ENDING}")):
                with path.open("rb") as file:
                    sent = _parsed(file.read(_HEADER.size))
                if sent is not None:
                    found[path.name.removeprefix(f"{self._agent}-").removesuffix(_ENDING)] = sent.place
        return found

    def put(self, run: str, sent: Sent) -> None:
        """Durable on return, and whole or absent whatever happens in between. Only inside `alone`."""
        with self._one_line_errors("write"):
            durable.replace_bytes(self._path(run), _HEADER.pack(_MAGIC, *sent.place) + sent.payload)

    def _one_line_errors(self, do: str) -> AbstractContextManager[None]:
        return worded(LedgerError, lambda why: f"cannot {do} {self._folder}: {why}; make room or mend rights")

    def _path(self, run: str) -> Path:
        return self._folder / f"{self._agent}-{run}{_ENDING}"


def _parsed(data: bytes) -> Sent | None:
    """What a file begins with; None where it is none of ours."""
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        return None
    _, round_, attempt = _HEADER.unpack_from(data)
    return Sent(round_, data[_HEADER.size :], attempt)
