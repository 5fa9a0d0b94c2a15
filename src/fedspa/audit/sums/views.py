"""What the server sees of a sum, with its colluders and with all others: how much noise is in it, and whether a record
shows."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from fedspa.audit.bounds import epsilon_lower, mu_lower, variance_limits
from fedspa.audit.questions import Floats, columns, law_question, threshold_attack
from fedspa.audit.result import UNBOUNDED, Finding, Question, certain
from fedspa.audit.setting import Setting
from fedspa.audit.sums.cohort import Cohort, Summed, score, worst_pair
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.event import Event

# Rounds of null records, and of either neighbour.
SILENT, LOUD = 200, 400
DELTA = 0.1


def noise_questions(setting: Setting, target: Summed) -> list[Question]:
    """Sums over members without a gradient: whether they are what was sent, and how many shares of noise they hold.
    Where batches may be empty, those of every other round are."""
    cohort, poisson = Cohort(setting, target, "silent"), target.plan.sampling == "poisson"
    rounds = [cohort.heard(t, empty=poisson and t % 2 == 1) for t in range(min(setting.draws, SILENT))]
    members, honest, told = target.aggregation.members, target.aggregation.honest, target.colluders
    totals, views = (np.stack([heard.view(known) for heard in rounds]) for known in (0, told))
    own = np.stack([heard.numbers for heard in rounds])
    wrong = int((totals != own.sum(axis=1)).any(axis=1).sum())
    noise, seen = totals - target.law(members).mean(), views - target.law(members - told).mean()
    one = target.law(1)
    detail = f"distance from the law of a share, in all and by member; {len(rounds)} rounds"
    by_member = list(own.swapaxes(0, 1))
    return [
        certain("sum: words", "count", 0.0, float(wrong), f"sums of {len(rounds)} that are not what the members sent"),
        law_question("share: law", one, [own, *by_member], detail),
        _shares("sum: shares", one.var(), noise, members, f"all {members} members"),
        columns("sum: coordinates", noise),
        _shares("sum: honest shares", one.var(), seen, honest, f"{members} members without {told} colluders"),
    ]


def _shares(name: str, variance: float, noise: Floats, shares: int, whose: str) -> Question:
    """How many shares of this variance are in the noise of sums: as many as the plan counts on, but for chance.

    The limits are those of Gaussian noise. A Binomial's fourth moment is smaller, and so are its chances to pass them.
    """
    found = float((noise**2).mean() / variance)
    detail = f"{found:.3f} shares of noise in sums over {whose}, where {shares} count; {noise.size} values"

    def judge(alpha: float) -> Finding:
        low, high = variance_limits(noise.size, alpha)
        return Finding(shares * max(1 - low, high - 1), abs(found - shares), detail, low <= found / shares <= high)

    return Question(name, "count", judge)


def attack_questions(setting: Setting, target: Summed) -> list[Question]:
    """The worst record of one member, or what is in its place: told apart by a threshold, from the sum without the
    colluders' numbers, and without those of all others."""
    sides: list[tuple[list[float], list[float]]] = []
    members, colluders = target.aggregation.members, target.colluders
    for side, first in zip(("in", "out"), worst_pair(target.plan)):
        cohort = Cohort(setting, target, side)
        rounds = [cohort.heard(t, first=first) for t in range(min(setting.draws, LOUD))]
        sides.append(
            (
                [score(target, heard.view(colluders), members - colluders) for heard in rounds],
                [score(target, heard.view(members - 1), 1) for heard in rounds],
            )
        )
    seen, alone = (tuple(np.array(scores) for scores in view) for view in zip(*sides))
    plan = target.plan
    assert plan.floor_event is not None
    told = f"{members} members with {colluders} colluding"
    return [
        _attack("sum", target, plan.event, seen, f"threshold attack on sums over {told}"),
        _attack("floor", target, plan.floor_event, alone, "threshold attack on one member, all others colluding"),
    ]


def _attack(whose: str, target: Summed, event: Event, sides: Iterable[Any], detail: str) -> Question:
    """On μ where the claim has one, else on ε at δ = 0.1."""
    neighbours = target.plan.neighbours
    middle = 0.5 if neighbours == "add-remove" else 0.0
    step = event.step
    shift = None if step is None else step.gaussian_shift(neighbours)
    if shift is not None:
        claimed = min(UNBOUNDED, shift)
        return threshold_attack(f"attack: μ, {whose}", "mu", claimed, list(sides), middle, mu_lower, detail)
    claimed = min(UNBOUNDED, epsilon({event: 1}, DELTA, neighbours=neighbours))
    bound = partial(epsilon_lower, DELTA)
    detail = f"{detail}, δ = {DELTA:g}"
    return threshold_attack(f"attack: ε, {whose}", "epsilon", claimed, list(sides), middle, bound, detail)
