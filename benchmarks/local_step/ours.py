"""Our engines as a run calls them: τ steps of several agents in one call, with secure noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import Engine, LocalTask
from fedspa.examples import Examples, moved, taken
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from local_step.cases import CLIP, LEARNING_RATE, NOISE, Case, clipping, drawing, own_engine


def agent(case: Case, name: str, seed: int, d: int) -> LocalTask:
    """One step of one agent, with records, mask and key of its own."""
    generator = torch.Generator().manual_seed(seed)
    x, y = (moved(tree, case.device) for tree in case.row.examples(case.records, seed))
    k = round(case.compression * d)
    private = "sgd" not in name
    mask = torch.randperm(d, generator=generator)[:k].sort().values.to(case.device) if private and k < d else None
    clip: Any = clipping(name)
    sampling, neighbours = drawing(name)
    plan = GaussianPlan(d, k, clip, CLIP[clip], sampling, case.batch, case.records, 1, 1, NOISE, neighbours, 1e-4)
    key = seed.to_bytes(32, "big")
    free = NoPlan(d, d, sampling, case.batch, 1)
    return LocalTask(x, y, mask, 1.0, LEARNING_RATE, plan if private else free, key)


class Ours:
    """Trains that many agents when called with a number of steps; returns the number of agent-steps."""

    def __init__(self, name: str, case: Case, agents: int, threads: int) -> None:
        asked = own_engine(name)
        assert asked is not None
        module = case.row.build().to(case.device)
        model = FlatModel(module)
        self._theta = model.flatten()
        self._tasks = [agent(case, name, seed, model.dimension) for seed in range(agents)]
        like = Examples(*(taken(tree, slice(1)) for tree in (self._tasks[0].x, self._tasks[0].y)))
        # As a run does, what is frozen is computed once per record: in the first call.
        found = split(module, like, model.task)
        self._split, self._threads = found if isinstance(found, Split) else None, threads
        trained, like = (
            (module, like) if self._split is None else (self._split.head, Examples(self._split.example_spec, like.y))
        )
        # Products in TF32, where there are any: the rivals have them too.
        self.engine: Engine = choose(
            EngineRequest(asked, trained, like, case.device, threads, exact=False, tf32=case.device != "cpu")
        )

    def __call__(self, steps: int) -> int:
        if self._split is not None:
            features = (Features(self._split, task.x, strict=True, threads=self._threads).of() for task in self._tasks)
            self._tasks = [replace(task, x=x) for task, x in zip(self._tasks, features)]
            self._split = None
        tasks = [replace(task, steps=replace(task.steps, local_steps=steps)) for task in self._tasks]
        self.engine.train(self._theta, tasks)
        return len(tasks) * steps
