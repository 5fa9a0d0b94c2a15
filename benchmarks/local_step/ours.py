"""Our engines as a run calls them: τ steps of several agents in one call, with secure noise and Poisson batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedspa.engine.generic import GenericEngine
from fedspa.engine.native import NativeEngine
from fedspa.engine.task import LocalTask
from fedspa.learning.flat import FlatModel
from fedspa.learning.models import build
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from local_step.cases import CLIP, LEARNING_RATE, NOISE, Case, clipping


def agent(case: Case, name: str, seed: int, steps: int) -> LocalTask:
    """One agent's task with records, mask and key of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(case.records, *case.shape, generator=generator)
    y = torch.randint(0, 10, (case.records,), generator=generator)
    d = FlatModel(build(case.model, case.shape, 10, 0)).dimension
    k = round(case.compression * d)
    private = "sgd" not in name
    mask = torch.randperm(d, generator=generator)[:k].sort().values if private and k < d else None
    clip: Any = clipping(name)
    plan = GaussianPlan(
        d, k, clip, CLIP[clip], "poisson", case.batch, case.records, steps, 1, NOISE, "add-remove", 1e-4
    )
    key = seed.to_bytes(32, "big")
    free = NoPlan(d, d, "poisson", case.batch, steps)
    return LocalTask(x, y, mask, 1.0, LEARNING_RATE, plan if private else free, key)


def turn(name: str, case: Case, agents: int, steps: int, threads: int) -> Callable[[], int]:
    """Trains that many agents when called; returns the number of agent-steps."""
    module = build(case.model, case.shape, 10, 0)
    engine = GenericEngine(module) if name.startswith("generic") else NativeEngine(module, threads)
    theta = FlatModel(module).flatten()
    tasks = [agent(case, name, seed, steps) for seed in range(agents)]

    def run() -> int:
        engine.train(theta, tasks)
        return agents * steps

    return run
