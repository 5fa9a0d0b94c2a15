"""Fed-SPA: sparsification, local noise and an adaptive server (Hu, Gong and Guo, IJCAI 2021, Algorithm 1).

    line 2     choose agents              data/partition.py
    line 3     broadcast θ_t              server/coordinator.py
    line 5     new sparsifier S           here, from a public seed (randomness/mask.py)
    lines 6–10 τ noisy local steps        engine/local.py, mechanisms/gaussian/release.py
    line 11    upload Δ                   here; only k values and the seed travel (wire/payload.py)
    line 13    mean of the updates        server/intake.py
    lines 13–15  u, v, θ                  server/optimizers.py (`adam`)

Where we depart from the print: the gradient of each example is clipped (the paper assumes bounded gradients), batches
are Poisson samples by default, and σ comes from a verified accountant instead of Theorem 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedspa.algorithms.base import Agent, Terms
from fedspa.engine.local import Engine, LocalTask
from fedspa.errors import PrivacyError
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.wire.payload import Update


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    """Yield the answers of all agents of a round, as one piece of work for the engine (lines 4–12)."""
    seeds = [terms.mask_seed or agent.mask_seed for agent in agents]
    tasks = [_task(theta, terms, agent, seed) for agent, seed in zip(agents, seeds)]
    for agent, seed, result in zip(agents, seeds, engine.train(theta, tasks)):  # lines 6–10
        agent.log_zeroed(terms, result.zeroed, "sampled examples")
        yield Update(  # line 11
            round=terms.round,
            dimension=terms.dimension,
            mask_seed=seed,
            values=result.delta.to("cpu", torch.float32).numpy(),
            clip_value=result.clip_value,
        )


def _task(theta: Tensor, terms: Terms, agent: Agent, seed: bytes) -> LocalTask:
    steps = terms.steps
    if not isinstance(steps, GaussianPlan | NoPlan):  # its own mechanism's, or none
        raise PrivacyError(f"the terms hold a plan whose noise this algorithm does not add: {steps}")
    if isinstance(steps, GaussianPlan) and steps.sampling == "fixed" and agent.records < steps.records:
        raise PrivacyError(
            f"an agent holds {agent.records} records; with fixed-size batches the plan's ε holds from "
            f"{steps.records} on"
        )
    coordinates = terms.coordinates(seed)  # line 5
    return LocalTask(
        x=agent.pool_x,
        y=agent.pool_y,
        coordinates=None if coordinates is None else torch.from_numpy(coordinates).to(theta.device),
        scale=terms.scale,
        local_lr=terms.local_lr,
        steps=steps,
        key=agent.key,
        exact=agent.exact,
        rows=agent.rows,
        max_records=agent.max_records,
        optimizer=terms.optimizer,
    )
