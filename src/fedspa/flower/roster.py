"""Which node is which agent, who is there, who is not asked again, and who is left in peace for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any


class Roster:
    """Numbers 0 … agents − 1 for Flower's node ids, given once and kept over restarts.

    An authenticated node keeps its id when it comes back; one without a key comes back as a stranger, and gets a number
    only while some are free. Where agents are `named`, nobody gets a number before it was introduced.
    """

    def __init__(self, agents: int, *, named: bool = False) -> None:
        self._agents, self._named = agents, named
        self._numbers: dict[int, int] = {}
        self._online: dict[int, int] = {}
        self.refused: dict[int, str] = {}
        # Agent → how often in a row it was asked and did not answer, and how many of its turns it is still left out of.
        self._silent: dict[int, tuple[int, int]] = {}

    def meet(self, nodes: Iterable[int]) -> int:
        """Note who is online; newcomers get the free numbers in the order of their ids. Returns how many are there."""
        online = sorted(nodes)
        for node in online:
            if not self._named and node not in self._numbers and len(self._numbers) < self._agents:
                self._numbers[node] = len(self._numbers)
        before, self._online = self._online, {self._numbers[node]: node for node in online if node in self._numbers}
        for number in self._online.keys() - before.keys():
            self.heard(number)  # a node that comes back was started anew
        return len(self._online)

    def knows(self, node: int) -> bool:
        return node in self._numbers

    def introduce(self, node: int, number: int, online: Collection[int]) -> bool:
        """Note that `node` is agent `number`, unless another one is that is there. Whether it was noted."""
        others = [other for other, taken in self._numbers.items() if taken == number and other != node]
        if any(other in online for other in others):
            return False
        for other in others:
            del self._numbers[other]
        self._numbers[node] = number
        return True

    @property
    def known(self) -> int:
        """How many numbers were given."""
        return len(self._numbers)

    def willing(self, cohort: Iterable[int]) -> list[int]:
        """Those of `cohort` who did not refuse for good, there or not."""
        return [number for number in cohort if number not in self.refused]

    def heard(self, number: int) -> None:
        """It answered, whatever it said."""
        self._silent.pop(number, None)

    def unheard(self, number: int) -> int:
        """It was asked and did not answer, which cost everyone the round's time. It is left out of its next turn, after
        another silence of three, then of seven …; returns of how many."""
        times = self._silent.get(number, (0, 0))[0] + 1
        turns = (1 << min(times, 30)) - 1
        self._silent[number] = (times, turns)
        return turns

    def rests(self, number: int) -> bool:
        """Whether it is left out of this turn for its silence."""
        return self._silent.get(number, (0, 0))[1] > 0

    def leave_out(self, number: int) -> None:
        """A turn of its rest is over."""
        times, turns = self._silent[number]
        self._silent[number] = (times, turns - 1)

    def reachable(self, cohort: Iterable[int]) -> dict[int, int]:
        """Node id → number, of those of `cohort` who are willing and online."""
        return {self._online[number]: number for number in self.willing(cohort) if number in self._online}

    def to_json(self) -> dict[str, Any]:
        # As texts: node ids have 64 bits, and not every reader of JSON keeps them.
        return {
            "nodes": {str(node): number for node, number in self._numbers.items()},
            "refused": {str(number): code for number, code in self.refused.items()},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._numbers = {int(node): int(number) for node, number in saved["nodes"].items()}
        self.refused = {int(number): str(code) for number, code in saved["refused"].items()}
