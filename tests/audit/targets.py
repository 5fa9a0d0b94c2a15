"""Small mechanisms that attacks see well."""

from __future__ import annotations

import math
from dataclasses import replace

from fedspa.algorithms.cpsgd import audit as cpsgd
from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.audit import aggregation, gaussian
from fedspa.audit.probes import DIMENSION
from fedspa.mechanisms.base import Clipping
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA, DiscreteGaussianPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.privacy.event import Neighbours, Sampling


def synthetic(
    *,
    noise: float = 1.0,
    clip: Clipping = "coordinate",
    neighbours: Neighbours | None = None,
    sampling: Sampling = "poisson",
) -> gaussian.Target:
    """16 of 64 coordinates, 8 of 16 records; under one relation, or all that this sampling has an accountant for."""
    relation = neighbours or ("add-remove" if sampling == "poisson" else "replace-one")
    target = gaussian.of_plan(GaussianPlan(64, 16, clip, 0.1, sampling, 8, 16, 1, 1, noise, relation, 1e-3))
    return target if neighbours is None else replace(target, relations=(neighbours,))


def shares() -> aggregation.Summed:
    """Four members with one colluding, and noise multiplier 1 of the honest ones' sum."""
    bound = round(SIGMA * FINE * math.sqrt(3))
    plan = DiscreteGaussianPlan(2 * DIMENSION, DIMENSION, 0.1, 1, 1, bound, "add-remove", 1e-3, 4, 1, 4)
    return aggregation.of_plan(plan)


def of_cpsgd() -> cpsgd.Target:
    """2 of 8 records, little noise; and a sum of four members."""
    plan = BinomialPlan(DIMENSION, 0.1, 2, 100, "local", 8, 2, 8, 1, 1e-3)
    summed = replace(plan, adversary="secure-aggregation", trials=400, members=4, colluders=1)
    return cpsgd.Target(plan, sums=cpsgd._sums(summed))
