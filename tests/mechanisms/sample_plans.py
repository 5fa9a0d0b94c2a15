"""A plan of each mechanism, and the sizes of the paper's experiments; tests `replace` what they are about."""

from __future__ import annotations

from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.mechanisms.discrete_gaussian.plan import DiscreteGaussianPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan

# B, m, τ and the mean number of participations, 0.1·T, of the paper's two experiments.
MNIST = {"batch": 10, "records": 600, "steps": 300, "participations": 5}
CIFAR = {"batch": 50, "records": 500, "steps": 50, "participations": 20}

GAUSSIAN_PLAN = GaussianPlan(
    dimension=1000,
    active=50,
    clip="coordinate",
    clip_value=0.01,
    sampling="poisson",
    batch=10,
    records=600,
    local_steps=300,
    participations=5,
    noise_multiplier=1.5,
    neighbours="add-remove",
    delta=1e-3,
)
BINOMIAL_PLAN = BinomialPlan(
    dimension=100,
    clip_value=0.5,
    bits=2,
    trials=10_000,
    adversary="local",
    agents=20,
    batch=10,
    records=600,
    participations=45,
    delta=1e-3,
)
SHARED_PLAN = DiscreteGaussianPlan(
    dimension=1000,
    active=50,
    clip_value=0.5,
    records=600,
    participations=5,
    bound=2000,
    neighbours="add-remove",
    delta=1e-3,
    members=10,
    colluders=2,
    most=12,
)
