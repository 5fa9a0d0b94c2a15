"""What a run has promised so far: ε by agent, from the number of times each took part."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fedspa.errors import PrivacyError
from fedspa.mechanisms.binomial.plan import AnyPlan, BinomialPlan
from fedspa.privacy import binomial
from fedspa.privacy.accounting import SOUND, Accountant, epsilon, priced_by
from fedspa.privacy.event import Event, GaussianEvent, Neighbours
from fedspa.privacy.published import published_epsilon


class Guarantee:
    """Counts participations and prices them. ε belongs to an agent: its own participations in the plan's event."""

    def __init__(self, plan: AnyPlan, accountant: str) -> None:
        self._plan = plan
        # A clip value that was read off the data has no ε. What is stated, and flagged, is ε had it been given.
        event = plan.event
        self._event: Event = replace(event, clip_from_data=False) if isinstance(event, GaussianEvent) else event
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

        None where there is no guarantee: a plan of cpSGD with too little noise for any.
        """
        if isinstance(self._plan, BinomialPlan) and not self._plan.has_guarantee:
            return None
        spent: dict[Event, int] = {self._event: self.participations_max}
        return epsilon(spent, self._plan.delta, neighbours=neighbours, accountant=self.accountant_for(neighbours))

    def epsilon_published(self) -> float | None:
        """What the paper's Theorem 1 says of the same events, its range ignored as the paper does. Not a guarantee.

        For cpSGD, what its own theorem says with the sensitivities as printed; None outside it.
        """
        if self.participations_max == 0:
            return 0.0
        if isinstance(self._plan, BinomialPlan):
            spent = {self._plan.event: self.participations_max}
            cost = binomial.composed_epsilon(spent, self._plan.delta, published=True)
            return cost if math.isfinite(cost) else None
        assert isinstance(self._event, GaussianEvent)
        return published_epsilon(self._event, self.participations_max, self._plan.delta).epsilon

    def accountant_for(self, neighbours: Neighbours) -> Accountant:
        """RDP where it was asked for and is sound; PLD elsewhere. cpSGD's events are priced by neither."""
        return "rdp" if self._accountant == "rdp" and "rdp" in SOUND[self._plan.sampling, neighbours] else "pld"

    @property
    def accountant(self) -> str:
        """The name of what priced the plan's events, for the reader of ε."""
        return priced_by(self._event, self.accountant_for(self._plan.neighbours))


SEEDED = "seeded noise"
CLIP_OFF_DATA = "a clip value read off the data"


def refuse_unpriced(plan: AnyPlan, accountant: str) -> None:
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


def not_private_because(plan: AnyPlan | None, noise: str) -> str | None:
    """Why whatever ε is stated beside it is no guarantee, in a few words; None where it is one."""
    if plan is None:
        return "no noise at all"
    reasons = []
    if isinstance(plan, BinomialPlan):
        if not plan.has_guarantee:
            reasons.append("too little noise for any ε")
        elif not plan.is_private:
            reasons.append("no secure aggregation")
    elif not plan.is_private:
        reasons.append(CLIP_OFF_DATA)
    if noise == "seeded":
        reasons.append(SEEDED)
    return " and ".join(reasons) or None


def promised(plan: AnyPlan | None, guarantee: Guarantee | None, noise: str) -> dict[str, Any]:
    """What a summary says of privacy; `noise` is where it came from. None throughout where nothing is promised."""
    keys = ("epsilon", "epsilon_replace_one", "epsilon_published", "delta", "neighbours", "sampling", "accountant")
    if plan is None or guarantee is None:
        others = ("noise_multiplier", "participations_max", "noise", "adversary", "bits", "trials")
        why = not_private_because(None, noise)
        return {**dict.fromkeys((*keys, *others)), "private": False, "not_private_because": why}
    why = not_private_because(plan, noise)
    return {
        "epsilon": guarantee.epsilon_max(plan.neighbours),
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
        "adversary": plan.adversary if isinstance(plan, BinomialPlan) else "local",
        "bits": plan.bits if isinstance(plan, BinomialPlan) else None,
        "trials": plan.trials if isinstance(plan, BinomialPlan) else None,
    }
