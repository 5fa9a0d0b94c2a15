"""What a run has promised so far: ε by agent, from the number of times each took part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedspa.privacy.accounting import SOUND, Accountant, epsilon
from fedspa.privacy.event import Neighbours
from fedspa.privacy.plan import Plan
from fedspa.privacy.published import published_epsilon


class Guarantee:
    """Counts participations and prices them. ε belongs to an agent: its own records, its own participations."""

    def __init__(self, plan: Plan, records: Sequence[int], accountant: str) -> None:
        self._plan = plan
        self._records = records
        self._accountant = accountant
        self._counts: dict[int, int] = {}
        # Records → most participations of an agent that holds so many: kept, so that a round costs its own agents only.
        self._most: dict[int, int] = {}
        self._known: dict[tuple[int, int, Neighbours], float] = {}

    @property
    def participations_max(self) -> int:
        return max(self._most.values(), default=0)

    def participations(self, agent: int) -> int:
        return self._counts.get(agent, 0)

    def took_part(self, agents: Iterable[int], times: int = 1) -> None:
        for agent in agents:
            count, m = self._counts.get(agent, 0) + times, self._records[agent]
            self._counts[agent] = count
            self._most[m] = max(count, self._most.get(m, 0))

    def epsilon_max(self, neighbours: Neighbours) -> float:
        """The largest ε over agents under this relation, at the plan's δ; 0 before anyone took part."""
        return max((self._epsilon(m, count, neighbours) for m, count in self._worst_cases()), default=0.0)

    def epsilon_published(self) -> float:
        """What the paper's Theorem 1 says of the same events, its range ignored as the paper does. Not a guarantee."""
        plan = self._plan
        return max(
            (
                published_epsilon(plan.for_records(m).event, count, plan.delta).epsilon
                for m, count in self._worst_cases()
            ),
            default=0.0,
        )

    def accountant_for(self, neighbours: Neighbours) -> Accountant:
        """RDP where it was asked for and is sound; PLD elsewhere."""
        return "rdp" if self._accountant == "rdp" and "rdp" in SOUND[self._plan.sampling, neighbours] else "pld"

    def _worst_cases(self) -> list[tuple[int, int]]:
        """(records, participations) pairs that no other pair makes worse: ε grows with q = B/m and with I."""
        worst: list[tuple[int, int]] = []
        for m in sorted(self._most):
            if self._most[m] and (not worst or self._most[m] > worst[-1][1]):
                worst.append((m, self._most[m]))
        return worst

    def _epsilon(self, records: int, count: int, neighbours: Neighbours) -> float:
        key = (records, count, neighbours)
        if key not in self._known:
            event = self._plan.for_records(records).event
            accountant = self.accountant_for(neighbours)
            self._known[key] = epsilon({event: count}, self._plan.delta, neighbours=neighbours, accountant=accountant)
        return self._known[key]
