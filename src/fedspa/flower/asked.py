"""Who was asked in which round, on disk before the question leaves: the server's own bound on what each agent spent.

An agent spends at most once an attempt at a round, however often it is asked, so its participations are at most the
number of attempts here that name it. That is the only count the server has: agents tell it nothing. So a file that lost
lines must not pass for a smaller spend: each checkpoint carries the counts, and `require` holds the file against them.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from fedspa import durable
from fedspa.errors import FedspaError, worded


class AskedRounds:
    """The file asked.jsonl of a run's folder: one line a question, {"round": t, "agents": [numbers]}, with "attempt"
    where it is not the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[tuple[int, int, int]] = set()  # round, attempt, agent
        self._last: dict[int, tuple[int, list[int]]] = {}
        self._counts: Counter[int] = Counter()
        with self._one_line_errors("read"):
            self._read()

    def add(self, round_: int, agents: list[int], attempt: int = 1) -> list[int]:
        """Durable on return. Gives those for whom this attempt is a new participation."""
        line = {"round": round_, "agents": agents} | ({} if attempt == 1 else {"attempt": attempt})
        with self._one_line_errors("written"):
            new = not self._path.exists()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if new:
                durable.force_folder(self._path.parent)
        return self._note(round_, attempt, agents)

    def last(self, round_: int) -> tuple[int, list[int]] | None:
        """The last attempt at this round and whom it asked. Later rounds may have been asked since: a server that lost
        its newest checkpoint comes back to rounds that were done."""
        return self._last.get(round_)

    def count(self, agent: int) -> int:
        """In how many attempts `agent` was asked."""
        return self._counts[agent]

    @property
    def counts(self) -> dict[str, int]:
        """`count` of everyone who was ever asked, for a checkpoint."""
        return {str(number): times for number, times in sorted(self._counts.items())}

    def require(self, counts: Mapping[str, int]) -> None:
        """Raise where a checkpoint knows of more than this file does."""
        for number, times in counts.items():
            found = self.count(int(number))
            if found < times:
                raise FedspaError(
                    f"{self._path} names agent {number} in {found} rounds, the checkpoint in {times}: "
                    "it is an old copy, or lines are lost; put the newest one back"
                )

    def was(self, round_: int, agent: int, attempt: int = 1) -> bool:
        return (round_, attempt, agent) in self._seen

    def _note(self, round_: int, attempt: int, agents: list[int]) -> list[int]:
        fresh = [number for number in agents if (round_, attempt, number) not in self._seen]
        self._seen |= {(round_, attempt, number) for number in fresh}
        self._counts.update(fresh)
        self._last[round_] = attempt, agents
        return fresh

    def _read(self) -> None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        whole, end, torn = data.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if end else (), 1):
            try:
                entry = json.loads(line)
                agents = [_whole(agent) for agent in entry["agents"]]
                self._note(_whole(entry["round"]), _whole(entry.get("attempt", 1)), agents)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise FedspaError(
                    f"{self._path}, line {number}: not a line that this server wrote; put the file back from a backup"
                ) from None
        if torn:  # cut short by a crash: what it would have announced was never sent
            durable.replace_text(self._path, (whole + end).decode())

    def _one_line_errors(self, done: str) -> AbstractContextManager[None]:
        return worded(FedspaError, lambda why: f"{self._path} cannot be {done}: {why}; mend that, then resume")


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value
