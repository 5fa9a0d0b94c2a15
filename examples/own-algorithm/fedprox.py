"""Fed-SPA with FedProx's pull towards the server's model: an algorithm from outside the package.

FedProx (Li et al., 2020) adds mu/2 times the squared distance from the server's model to an agent's loss. Its gradient
is mu times what the agent has moved so far, a function of noisy gradients and public numbers. So it is post-processing:
the ledger holds Fed-SPA's event of all steps, and ε is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedspa.algorithms import Agent, Algorithm, Engine, Terms, Update, chosen, derive_key

FED_SPA = chosen("fedspa", "local")


class Options(BaseModel):
    """The config's `[algorithm.options]`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    mu: Annotated[float, Field(ge=0, le=1e6)] = 0.1


def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Update]:
    """Return each agent's update after as many steps as the plan has, each with noise of its own."""
    assert terms.plan is not None
    one = replace(terms, steps=replace(terms.plan, local_steps=1))
    kept = 1 - terms.local_lr * terms.options["mu"]
    for agent in agents:
        moved = np.zeros(terms.dimension, dtype=np.float32)
        for step in range(terms.plan.local_steps):
            here = theta + torch.from_numpy(moved).to(theta)
            # A key of each step's own: the same key would draw the same batch and the same noise again.
            fresh = replace(agent, key=derive_key(agent.key, "step", step))
            [update] = FED_SPA.respond(here, one, [fresh], engine)
            moved = np.asarray(kept * moved + update.values, dtype=np.float32)
        yield replace(update, values=moved)


FED_PROX = Algorithm(respond, FED_SPA.mechanism, options=Options)
