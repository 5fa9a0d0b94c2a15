"""What a run promises, computed anew: from the plan that its config and ledger give, priced by the ledger's own counts.

Where the summary says something else the page must not go on as if nothing were wrong, so differences are problems.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedspa.errors import FedspaError
from fedspa.mechanisms import Plan
from fedspa.report.read import RunRecord
from fedspa.runs.config import Config
from fedspa.runs.guarantee import Guarantee, finite, promised
from fedspa.runs.plans import algorithm_of, cap_of, plan_of

Price = Callable[[int], float | None]


@dataclass(frozen=True, slots=True)
class Promise:
    """`facts` has the summary's keys. `epsilon_cap` is ε of an agent that takes part as often as the plan allows.

    `active` is k; None where it cannot be told: what `plan` says of k, sensitivity and σ then means nothing, while ε
    needs none of them. `verified` and `floor` give ε of a number of participations; None where it cannot
    be told, and `floor` where nothing was aggregated.
    """

    facts: Mapping[str, Any]
    plan: Plan | None
    active: int | None
    cap: int
    epsilon_cap: float | None
    counts: Mapping[str, int]
    verified: Price
    floor: Price


def promise(run: RunRecord) -> Promise | None:
    """None where the run promises nothing, or where too little of it is left to tell."""
    config = run.config
    mechanism = None if config is None else algorithm_of(config).mechanism
    if config is None or mechanism is None:
        return None
    cap = cap_of(config)
    counts = Counter(entry.agent for entry in run.participations.entries)
    active = _active(run)
    plan = _plan(run, active)
    if plan is None:
        if run.summary is None or run.summary["delta"] is None:
            return None
        told = _known(run, lambda count: None)
        unknown: Price = lambda count: None  # noqa: E731
        return Promise(run.summary, None, None, cap, None, counts, told, unknown)
    guarantee = Guarantee(plan)
    for number, times in enumerate(counts.values()):
        guarantee.took_part([number], times)
    totals = dict.fromkeys(("epsilon_total", "epsilon_total_floor", "accountant_total"))
    facts = {**promised(plan, guarantee, _noise(run, config)), **totals}
    _hold_against_summary(run, facts)
    return Promise(
        facts=facts,
        plan=plan,
        active=active,
        cap=cap,
        epsilon_cap=finite(_of(plan, cap).epsilon_max(plan.neighbours)),
        counts=counts,
        verified=_known(run, lambda count: finite(_of(plan, count).epsilon_max(plan.neighbours))),
        floor=lambda count: _of(plan, count).epsilon_floor(),
    )


def _noise(run: RunRecord, config: Config) -> str:
    """Where the noise came from: as the config says, unless the ledger knows of a seed."""
    asked, found = config.privacy.noise, run.participations.noise
    if found - {asked}:
        run.problems.append(
            f"the ledger says that the noise was {' and '.join(sorted(found))}, the config {asked}: rely on no ε of "
            "this page"
        )
    return "seeded" if "seeded" in found else asked


def _of(plan: Plan, count: int) -> Guarantee:
    """What `count` participations in the plan are priced by."""
    guarantee = Guarantee(plan)
    guarantee.took_part([0], count)
    return guarantee


def _active(run: RunRecord) -> int | None:
    """k as the run's setup took it. With shares by layer that needs the layers' sizes: only the summary's k/d tells."""
    config, dimension = run.config, run.dimension
    if config is None or dimension is None:
        return None
    if not algorithm_of(config).sparse:
        return dimension
    settings, said = config.algorithm, None if run.summary is None else run.summary["compression"]
    by_layer = settings.layer_shares is not None
    shares = settings.layer_shares or [settings.compression]
    least, most = min(shares), max(shares)
    slack = (len(shares) / 2 + 1e-6) / dimension  # k is rounded, once per layer
    if said is not None and not least - slack <= said <= most + slack:
        given = f"{least} to {most}" if by_layer else f"{most}"
        run.problems.append(
            f"summary.json says compression = {said}, but the config gives {given}: do not rely on k, sensitivity and σ"
        )
    share = said if by_layer else settings.compression
    return None if share is None else round(share * dimension)


def _plan(run: RunRecord, active: int | None) -> Plan | None:
    """The plan of this run; None without a ledger of its own, which alone knows the public number of records."""
    config, event = run.config, run.participations.event
    if config is None or event is None or run.dimension is None:
        return None
    try:
        return plan_of(config, event, run.dimension, active if active is not None else run.dimension)
    except FedspaError as error:
        run.problems.append(f"config and ledger do not make a plan: {error}")
        return None


def _known(run: RunRecord, beyond: Price) -> Price:
    """ε by participations, from the metrics: after each round they have the largest ε, the ledger the largest count.

    A count that was never the largest is priced as the next one that was: too high at worst. Those `beyond` all of
    them are of a round that is not done.
    """
    running: Counter[str] = Counter()
    by_round: dict[int, list[str]] = {}
    for entry in run.participations.entries:
        by_round.setdefault(entry.round, []).append(entry.agent)
    prices: dict[int, float] = {}
    for metrics in run.metrics:
        running.update(by_round.get(metrics.round, ()))
        if metrics.epsilon is not None and running:
            prices.setdefault(max(running.values()), metrics.epsilon)
    known = sorted(prices)

    def price(count: int) -> float | None:
        if count == 0:
            return 0.0
        place = bisect_left(known, count)
        return prices[known[place]] if place < len(known) else beyond(count)

    return price


def _hold_against_summary(run: RunRecord, facts: Mapping[str, Any]) -> None:
    if run.summary is None:
        return
    for key in ("epsilon", "epsilon_floor", "epsilon_replace_one", "participations_max", "members", "colluders"):
        then, now = run.summary[key], facts[key]
        if (then is None) != (now is None) or (then is not None and not math.isclose(then, now, rel_tol=1e-6)):
            run.problems.append(f"summary.json says {key} = {then}, but the ledger gives {now}: do not rely on either")
    if run.summary["unit"] != facts["unit"]:
        run.problems.append(
            f"summary.json says that each {run.summary['unit']} is protected, but the ledger says each "
            f"{facts['unit']}: rely on no ε of this page"
        )
