"""The metrics of a run, one line per round, in metrics.jsonl.

The file only grows while the run trains. Its lines are on the disk before a checkpoint counts on them, so a checkpoint
costs the same after ten thousand rounds as after one. A checkpoint of t rounds counts on the first t lines; a kill may
leave more, and the last one torn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedspa import durable
from fedspa.errors import FedspaError
from fedspa.runs.metrics import RoundMetrics


class Journal:
    """The file of one run. It is empty for a new run; a run that resumes calls `rewind`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "metrics.jsonl"

    def add(self, metrics: Mapping[str, Any]) -> None:
        with self._file.open("ab") as file:
            file.write((json.dumps(metrics, allow_nan=False) + "\n").encode())

    def settle(self) -> None:
        """Force the lines to the disk, before a checkpoint counts on them."""
        if self._file.exists():
            durable.force(self._file)
            durable.force_folder(self._file.parent)

    def rewind(self, rounds: int) -> list[RoundMetrics]:
        """Return the lines of the first `rounds` rounds, and remove what follows them."""
        content = self._file.read_bytes() if self._file.exists() else b""
        lines, check = content.split(b"\n")[:-1][:rounds], TypeAdapter(RoundMetrics)
        try:
            found = [check.validate_json(line) for line in lines]
        except ValidationError:
            found = []
        if [line.round for line in found] != list(range(rounds)):
            raise FedspaError(
                f"{self._file} is damaged: it does not hold the {rounds} rounds that the checkpoint counts; restore it "
                "from a backup"
            )
        whole = b"".join(line + b"\n" for line in lines)
        if content != whole:
            durable.replace_bytes(self._file, whole)
        return found
