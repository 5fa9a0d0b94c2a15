"""Who was asked in which round, on disk before the question leaves: the server's own bound on what each agent spent.

An agent spends at most once a (run, round), however often it is asked, so its participations are at most the number of
rounds here that name it. That is the only count the server has: agents tell it nothing.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path


class Asked:
    """The file asked.jsonl of a run's folder: one line a question, {"round": t, "agents": [numbers]}."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pairs: set[tuple[int, int]] = set()
        self._counts: Counter[int] = Counter()
        if path.exists():
            self._read()

    def add(self, round_: int, agents: list[int]) -> list[int]:
        """Durable on return. Gives those for whom this round is a new participation."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"round": round_, "agents": agents}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return self._note(round_, agents)

    def count(self, agent: int) -> int:
        """In how many rounds `agent` was asked."""
        return self._counts[agent]

    def was(self, round_: int, agent: int) -> bool:
        return (round_, agent) in self._pairs

    def _note(self, round_: int, agents: list[int]) -> list[int]:
        fresh = [number for number in agents if (round_, number) not in self._pairs]
        self._pairs |= {(round_, number) for number in fresh}
        self._counts.update(fresh)
        return fresh

    def _read(self) -> None:
        text = self._path.read_text("utf-8")
        whole, _, torn = text.rpartition("\n")
        for line in whole.splitlines():
            entry = json.loads(line)
            self._note(int(entry["round"]), [int(number) for number in entry["agents"]])
        if torn:  # cut short by a crash: what it would have announced was never sent
            self._path.write_text(whole + "\n" if whole else "", "utf-8")
