"""How long a local step takes and what memory it needs, tried with the agents that a run would have."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fedspa.algorithms import Agent
from fedspa.engine.task import ReadsRows
from fedspa.examples import taken
from fedspa.learning.threads import torch_threads
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import agent_key, mask_seed, root_key
from fedspa.runs.setup import Simulated

_SECONDS = 2.0  # a measurement may take about this long, where one step of one agent does not take longer
_MOST_STEPS = 10


@dataclass(frozen=True)
class StepTime:
    """`memory_mib` is what the process, or the GPU, held at its peak beyond what it held before the first step; None
    where that cannot be told."""

    ms_per_agent_step: float
    agents: int
    steps: int
    memory_mib: float | None


def step_time(job: Simulated) -> StepTime:
    """Nothing is released: what the agents answer is thrown away."""
    measured: list[StepTime] = []
    memory = _growth(lambda: measured.append(_timed(job)), torch.device(job.config.run.device))
    return replace(measured[0], memory_mib=memory)


def _timed(job: Simulated) -> StepTime:
    _train(job, 1, 1)  # kernels are compiled and buffers made
    once = _train(job, 1, 1)
    room = max(1, int(_SECONDS / 2 / max(once, 1e-6)))
    agents = min(room, job.config.federation.per_round)
    steps = min(max(1, room // agents), job.server.terms.steps.local_steps, _MOST_STEPS)
    if agents * steps > 1:
        _train(job, agents, steps)
        once = _train(job, agents, steps)
    return StepTime(1e3 * once / (agents * steps), agents, steps, None)


def _train(job: Simulated, agents: int, steps: int) -> float:
    """Seconds of a round's local training, with the first of the run's agents."""
    server, terms = job.server, job.server.terms
    if isinstance(terms.steps, GaussianPlan | NoPlan):  # others have one step
        terms = replace(terms, steps=replace(terms.steps, local_steps=steps))
    cohort = [_agent(job, number) for number in range(agents)]
    theta = server.model.flatten()
    with torch_threads(1):
        start = time.perf_counter()
        for _ in server.algorithm.respond(theta, terms, cohort, job.engine):
            pass
        return time.perf_counter() - start


def _agent(job: Simulated, number: int) -> Agent:
    x, y = job.examples(job.holdings[number])
    rows: torch.Tensor | None = torch.from_numpy(job.holdings[number])
    if not isinstance(job.engine, ReadsRows):
        assert rows is not None
        x, y, rows = taken(x, rows), taken(y, rows), None
    noise, seed = job.config.privacy.noise, job.config.run.seed
    key, own_mask = agent_key(root_key(noise, seed), 0, number), mask_seed(job.server.public_key, 0, number)
    return Agent(number, x, y, own_mask, key, exact=noise == "exact", rows=rows)


def _growth(run: Callable[[], object], device: torch.device) -> float | None:
    """MiB at the peak of `run` over what was held before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        run()
        return float(torch.cuda.max_memory_allocated(device) - held) / 2**20
    try:
        held = _resident("VmRSS")
        with open("/proc/self/clear_refs", "w", encoding="ascii") as peak:  # Linux: the peak starts again from here
            peak.write("5")
    except OSError:
        run()
        return None
    run()
    return (_resident("VmHWM") - held) / 2**10


def _resident(field: str) -> int:
    """KiB."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))
