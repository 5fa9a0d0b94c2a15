"""What a run has promised so far: ε by agent, from the number of times each took part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from fedspa.errors import PrivacyError
from fedspa.mechanisms import Plan
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.event import Accountant, Neighbours


class Guarantee:
    """Counts participations and prices them. ε belongs to an agent: its own participations in the plan's event."""

    def __init__(self, plan: Plan, accountant: str) -> None:
        self._plan = plan
        self._accountant = accountant
        self._counts: dict[int, int] = {}
        self.participations_max = 0

    def participations(self, agent: int) -> int:
        return self._counts.get(agent, 0)

    def took_part(self, agents: Iterable[int], times: int = 1) -> None:
        for agent in agents:
            self._counts[agent] = self._counts.get(agent, 0) + times
            self.participations_max = max(self.participations_max, self._counts[agent])

    def epsilon_max(self, neighbours: Neighbours) -> float | None:
        """The largest ε over agents under this relation, at the plan's δ; 0 before anyone took part.

        None where there is no guarantee, as with too little noise for any.
        """
        event = self._plan.stated_event
        if event is None:
            return None
        asked, spent = self.accountant_for(neighbours), {event: self.participations_max}
        return epsilon(spent, self._plan.delta, neighbours=neighbours, accountant=asked)

    def epsilon_floor(self) -> float | None:
        """The largest ε over agents against one who colludes with all others, under the plan's relation: never less
        than against the server, and infinite where one agent's noise has none. None where nothing is aggregated."""
        plan, event = self._plan, self._plan.floor_event
        if event is None:
            return None
        asked, spent = self.accountant_for(plan.neighbours), {event: self.participations_max}
        alone = epsilon(spent, plan.delta, neighbours=plan.neighbours, accountant=asked)
        return max(alone, self.epsilon_max(plan.neighbours) or 0.0)

    def epsilon_published(self) -> float | None:
        """What was published for the mechanism says of the same events: a theorem that is not a guarantee here."""
        return self._plan.published_epsilon(self.participations_max) if self.participations_max else 0.0

    def accountant_for(self, neighbours: Neighbours) -> Accountant:
        """RDP where it was asked for and is sound; PLD elsewhere, or what stands for it in an event of its own kind."""
        if self._accountant == "rdp":
            with suppress(PrivacyError):
                self._plan.event.priced_by("rdp", neighbours)
                return "rdp"
        return "pld"

    @property
    def accountant(self) -> str:
        """The name of what priced the plan's events, for the reader of ε."""
        plan = self._plan
        return plan.event.priced_by(self.accountant_for(plan.neighbours), plan.neighbours)


SEEDED = "seeded noise"


def finite(cost: float | None) -> float | None:
    """For JSON, which has no infinity: there a floor that is null beside `members` is infinite."""
    return None if cost is None or math.isinf(cost) else cost


def refuse_unpriced(plan: Plan, accountant: str) -> None:
    """Raise where ε of the first round or of the whole plan is not finite: told before anything is paid.

    Both, since a single release at a tiny δ may have no finite ε by the same arithmetic that prices many.
    """
    prices: list[float | None] = []
    for times in (1, plan.participations):
        spent = Guarantee(plan, accountant)
        spent.took_part([0], times)
        prices += [spent.epsilon_max(plan.neighbours), spent.epsilon_max("replace-one"), spent.epsilon_published()]
    if not all(price is None or math.isfinite(price) for price in prices):
        raise PrivacyError(
            f"no accountant gives a finite ε for noise multiplier {plan.noise_multiplier:g} at δ = {plan.delta:g} over "
            f"{plan.participations} participations; take more noise, a larger delta, or fewer steps and rounds"
        )


def not_private_because(plan: Plan | None, noise: str) -> str | None:
    """Why whatever ε is stated beside it is no guarantee, in a few words; None where it is one."""
    if plan is None:
        return "no noise at all"
    reasons = [plan.flaw_in_short, SEEDED if noise == "seeded" else None]
    return " and ".join(reason for reason in reasons if reason is not None) or None


def promised(plan: Plan | None, guarantee: Guarantee | None, noise: str) -> dict[str, Any]:
    """What a summary says of privacy; `noise` is where it came from. None throughout where nothing is promised."""
    if plan is None or guarantee is None:
        keys = (
            *("unit", "epsilon", "epsilon_floor", "epsilon_replace_one", "epsilon_published", "delta", "neighbours"),
            *("sampling", "accountant", "noise_multiplier", "participations_max", "noise", "adversary", "members"),
            *("colluders", "bits", "trials"),
        )
        return {**dict.fromkeys(keys), "private": False, "not_private_because": not_private_because(None, noise)}
    why = not_private_because(plan, noise)
    summed = plan.aggregation
    return {
        "unit": plan.unit,
        "epsilon": guarantee.epsilon_max(plan.neighbours),
        "epsilon_floor": finite(guarantee.epsilon_floor()),
        "epsilon_replace_one": guarantee.epsilon_max("replace-one"),
        "epsilon_published": guarantee.epsilon_published(),
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
        "bits": None,
        "trials": None,
        **plan.summary(),
    }
