"""Fed-SPA, FedAvg and DP-Fed, as configs and reports know them: without torch, which their functions import."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fedspa.algorithms.algorithm import Algorithm, for_sums
from fedspa.mechanisms.discrete_gaussian.plan import DISCRETE_GAUSSIAN
from fedspa.mechanisms.gaussian.plan import GAUSSIAN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedspa.algorithms.base import Agent, IntegerUpdate, ServerStep, Terms
    from fedspa.engine.task import Engine
    from fedspa.wire.payload import Update


def _local_steps(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    from fedspa.algorithms.fedspa import respond

    return respond(theta, terms, agents, engine)


def _shares(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[IntegerUpdate]:
    from fedspa.algorithms.aggregated import respond

    return respond(theta, terms, agents, engine)


def _mean(total: NDArray[np.int64], members: int, terms: Terms) -> Update:
    from fedspa.algorithms.aggregated import mean_update

    return mean_update(total, members, terms)


def _private(*, sparse: bool, server: ServerStep) -> Algorithm:
    """τ noisy local steps; under secure aggregation one, and an agent's share of the noise on it."""
    steps = Algorithm(_local_steps, GAUSSIAN, sparse, server, audit="fedspa.audit.gaussian:GAUSSIAN")
    shares = "fedspa.audit.aggregation:SHARES"
    return for_sums(steps, _mean, respond=_shares, mechanism=DISCRETE_GAUSSIAN, audit=shares)


FED_SPA = _private(sparse=True, server="adam")
# The paper's baseline, FedAvg whose local gradients carry Gaussian noise: Fed-SPA's round with all coordinates active.
DP_FED = _private(sparse=False, server="average")
# FedAvg (McMahan et al. 2017) is Fed-SPA's round with all coordinates active and no plan: nothing is clipped, noised or
# cut, batches are drawn as the config's `privacy.sampling` says, and equation (2) of the paper's Section 3.2 holds.
FEDAVG = Algorithm(_local_steps, None)
