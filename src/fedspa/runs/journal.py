"""The metrics of a run, a line a round, in two files that only grow: metrics.jsonl for readers, and a copy beside the
checkpoints.

A checkpoint counts on its lines by number, length and digest alone, so it costs the same after ten thousand rounds as
after one. The copy is on the disk before a checkpoint counts on it. Either file may be damaged or gone: the other one
brings it back.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from fedspa import durable
from fedspa.errors import FedspaError
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.section import Section

log = logging.getLogger(__name__)

_Count = Annotated[int, Field(ge=0)]


def _hash(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=16)


class Mark(Section):
    """So many lines, of so many bytes, with this digest."""

    lines: _Count = 0
    bytes: _Count = 0
    digest: str = _hash().hexdigest()


class Journal:
    """Both files of a run. A new run's are empty; `rewind` is for one that goes on."""

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        self._copy, self._file = checkpoints / "metrics.jsonl", folder / "metrics.jsonl"
        self._lines, self._bytes, self._hash = 0, 0, _hash()

    @property
    def mark(self) -> Mark:
        """Where it stands now."""
        return Mark(lines=self._lines, bytes=self._bytes, digest=self._hash.hexdigest())

    def add(self, metrics: Mapping[str, Any]) -> None:
        line = (json.dumps(metrics, allow_nan=False) + "\n").encode()
        for path in (self._copy, self._file):
            with path.open("ab") as file:
                file.write(line)
        self._lines, self._bytes = self._lines + 1, self._bytes + len(line)
        self._hash.update(line)

    def settle(self) -> None:
        """Before a checkpoint counts on its lines."""
        if self._lines:
            durable.force(self._copy)

    def rewind(self, mark: Mark) -> list[RoundMetrics]:
        """Bring both files to `mark`, and return its lines. Later ones, and one that was torn, belong to no
        checkpoint."""
        found = {path: path.read_bytes() if path.exists() else b"" for path in (self._copy, self._file)}
        whole = [each[: mark.bytes] for each in found.values() if _hash(each[: mark.bytes]).hexdigest() == mark.digest]
        if not whole:
            raise FedspaError(
                f"the lines of {mark.lines} rounds are damaged in {self._file} and in {self._copy}; restore one of "
                "them from a backup"
            )
        lines = _parsed(whole[0])
        if len(lines) != mark.lines:
            raise FedspaError(f"{self._file} holds {len(lines)} rounds, and the checkpoint counts {mark.lines}")
        for path, content in found.items():
            if not content.startswith(whole[0]):
                log.warning("%s was damaged and is written anew from its copy", path)
            if content != whole[0]:
                durable.replace_text(path, whole[0].decode())
        self._lines, self._bytes, self._hash = len(lines), len(whole[0]), _hash(whole[0])
        return lines


def _parsed(content: bytes) -> list[RoundMetrics]:
    """The rounds, in order; none where these are not a run's lines."""
    check = TypeAdapter(RoundMetrics)
    try:
        lines = [check.validate_json(line) for line in content.splitlines()]
    except ValidationError:
        return []
    return lines if [line.round for line in lines] == list(range(len(lines))) else []
