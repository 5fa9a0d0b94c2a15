"""What a run has promised so far: ε by agent, from the number of times each took part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fedspa.errors import PrivacyError
from fedspa.mechanisms import Plan
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.event import Neighbours


class Guarantee:
    """Counts participations and prices them. ε belongs to an agent: its own participations in the plan's event."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._counts: dict[int, int] = {}
        self.participations_max = 0

    def participations(self, agent: int) -> int:
        return self._counts.get(agent, 0)

    def took_part(self, agents: Iterable[int], times: int = 1) -> None:
        for agent in agents:
            self._counts[agent] = self._counts.get(agent, 0) + times
            self.participations_max = max(self.participations_max, self._counts[agent])

    def epsilon_max(self, neighbours: Neighbours) -> float:
        """The largest ε over agents under this relation, at the plan's δ; 0 before anyone took part."""
        return epsilon({self._plan.event: self.participations_max}, self._plan.delta, neighbours=neighbours)

    def epsilon_floor(self) -> float | None:
        """The largest ε over agents against one who colludes with all others, under the plan's relation: never less
        than against the server, and infinite where one agent's noise has none. None where nothing is aggregated."""
        plan, event = self._plan, self._plan.floor_event
        if event is None:
            return None
        alone = epsilon({event: self.participations_max}, plan.delta, neighbours=plan.neighbours)
        return max(alone, self.epsilon_max(plan.neighbours))

    @property
    def accountant(self) -> str:
        """The name of the accountant, for the reader of ε."""
        return self._plan.event.accountant(self._plan.neighbours)


SEEDED = "seeded noise"


def finite(cost: float | None) -> float | None:
    """For JSON, which has no infinity: there an ε that is null beside a δ is infinite, and so is a floor that is null
    beside `members`."""
    return None if cost is None or math.isinf(cost) else cost


def check_finite(plan: Plan) -> None:
    """Raise where ε of the first round or of the whole plan is not finite, before anything is paid.

    Both, since a single release at a tiny δ may have no finite ε by the same arithmetic that composes many.
    """
    for times in (1, plan.participations):
        spent = Guarantee(plan)
        spent.took_part([0], times)
        if not all(math.isfinite(spent.epsilon_max(relation)) for relation in (plan.neighbours, "replace-one")):
            raise PrivacyError(
                f"no accountant gives a finite ε for noise multiplier {plan.noise_multiplier:g} at δ = {plan.delta:g} "
                f"over {plan.participations} participations; take more noise (privacy.epsilon finds the least), a "
                "larger delta, or fewer steps and rounds"
            )


def not_private_because(plan: Plan | None, noise: str) -> str | None:
    """Why whatever ε is stated beside it is no guarantee, in a few words; None where it is one."""
    if plan is None:
        return "no noise at all"
    return SEEDED if noise == "seeded" else None


def promised(plan: Plan | None, guarantee: Guarantee | None, noise: str) -> dict[str, Any]:
    """What a summary says of privacy; `noise` is where it came from. None throughout where nothing is promised."""
    if plan is None or guarantee is None:
        keys = (
            *("unit", "epsilon", "epsilon_floor", "epsilon_replace_one", "delta", "neighbours"),
            *("sampling", "accountant", "noise_multiplier", "participations_max", "noise", "adversary", "members"),
            "colluders",
        )
        return {**dict.fromkeys(keys), "private": False, "not_private_because": not_private_because(None, noise)}
    why = not_private_because(plan, noise)
    summed = plan.aggregation
    return {
        "unit": plan.unit,
        "epsilon": finite(guarantee.epsilon_max(plan.neighbours)),
        "epsilon_floor": finite(guarantee.epsilon_floor()),
        "epsilon_replace_one": finite(guarantee.epsilon_max("replace-one")),
        "delta": plan.delta,
        "neighbours": plan.neighbours,
        "sampling": plan.sampling,
        "accountant": guarantee.accountant,
        "noise_multiplier": plan.noise_multiplier,
        "participations_max": guarantee.participations_max,
        "private": why is None,
        "not_private_because": why,
        "noise": noise,
        "adversary": "local" if summed is None else "secure-aggregation",
        "members": None if summed is None else summed.members,
        "colluders": None if summed is None else summed.colluders,
        **plan.summary(),
    }
