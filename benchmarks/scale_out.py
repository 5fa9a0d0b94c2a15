"""What workers gain: the time of a round with several ÷ with one, each worker a process of Ray with one thread.

    python benchmarks/scale_out.py [--repeats 7] [--agents 8] [--only text] [--out FILE] [--json]

`text`: a text transformer on the generic engine, two workers against one; it wants two idle cores. `asleep`: engines
that sleep for as long as an agent has work, four workers against one, so that what is lost is what the pool itself
costs; it wants no cores. Beside the ratio of wall times stands that of the CPU times of the busiest worker, which is
the former where every worker has a core to itself. All pools are up before anything is timed, and take turns. A round
goes out and comes back whole: keys, masks, θ, training, payloads. Records travel in the first one, which warms up and
is not counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from fedspa.agent.participate import Request, agent_name
from fedspa.algorithms import Agent
from fedspa.data.adapters import from_arrays
from fedspa.engine.local import Engine, LocalResult, LocalTask
from fedspa.runs.config import load
from fedspa.runs.ray_workers import start_workers
from fedspa.runs.setup import Given, Simulated, prepare
from fedspa.server.coordinator import Coordinator
from provenance import in_parts, stamp

WORDS, LENGTH, CLASSES, RECORDS = 1000, 32, 4, 100
WORKERS = {"text": 2, "asleep": 4}
SECONDS_ASLEEP = 0.1  # of an agent


class Transformer(nn.Module):
    """Two blocks over 32 tokens, d = 146,308."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.words(x) + self.places
        for block in self.blocks:
            seen = block(seen)
        logits: Tensor = self.head(seen.mean(1))
        return logits


class Asleep(Engine):
    """An engine whose agents take a time that follows from their work, and learn nothing."""

    name, separates_records = "asleep", True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds  # of a record in a step

    def train(self, theta: Tensor, tasks: Sequence[LocalTask]) -> list[LocalResult]:
        time.sleep(self._seconds * sum(task.records * task.local_steps for task in tasks))
        return [LocalResult(theta.new_zeros(task.steps.active)) for task in tasks]


def prepared(case: str, agents: int, steps: int = 20) -> Simulated:
    """A job of so many agents with 100 records each."""
    torch.manual_seed(0)
    x, y = torch.randint(WORDS, (agents * RECORDS + 20, LENGTH)), torch.arange(agents * RECORDS + 20) % CLASSES
    data = from_arrays(x[20:], y[20:], x[:20], y[:20], name="tokens")
    config = load(
        {
            "federation": {"agents": agents, "per_round": agents, "rounds": 1},
            "algorithm": {"compression": 0.1, "local_steps": steps, "batch": 16, "local_lr": 0.1},
            "privacy": {"noise_multiplier": 1.0, "noise": "seeded"},
            "run": {"engine": "generic", "threads": 1},
        }
    )
    if case == "text":
        return prepare(config, data, Given(Transformer()))
    linear = nn.Sequential(nn.Embedding(WORDS, 4), nn.Flatten(), nn.Linear(4 * LENGTH, CLASSES))
    job = prepare(config, data, Given(linear))
    asleep = partial(Asleep, SECONDS_ASLEEP / (RECORDS * steps))
    return replace(job, engine=asleep(), make_engine=asleep)


def measured(case: str, agents: int, repeats: int) -> dict[str, Any]:
    job, most = prepared(case, agents), WORKERS[case]
    server, run = Coordinator(job.server), job.config.run
    terms = server.terms()
    algorithm, coding = job.server.algorithm, job.server.coding
    request = Request("benchmark", algorithm, terms, server.state.theta, coding, "seeded")
    everyone = {
        agent_name(number): Agent(
            number,
            *job.train,
            server.mask_seed(terms, number),
            number.to_bytes(32, "big"),
            rows=torch.from_numpy(held),
        )
        for number, held in enumerate(job.holdings)
    }
    seconds: dict[int, list[float]] = {1: [], most: []}
    busiest: dict[int, list[float]] = {1: [], most: []}
    payloads = []
    with ExitStack() as open_:
        pools = {}
        for workers in seconds:
            asked = job.config.model_copy(update={"run": run.model_copy(update={"workers": workers})})
            pools[workers] = open_.enter_context(start_workers(replace(job, config=asked)))
        for turn in range(repeats + 1):
            for workers, pool in pools.items():
                start, before = time.perf_counter(), cpu_seconds()
                payloads.append(pool.train(request, everyone))
                if turn:
                    seconds[workers].append(time.perf_counter() - start)
                    busiest[workers].append(max(after - before.get(pid, 0) for pid, after in cpu_seconds().items()))
    assert all(each == payloads[0] for each in payloads)  # the same bytes from every pool in every turn
    return {
        "workers": most,
        "agents": agents,
        "dimension": job.server.model.dimension,
        "seconds": {workers: statistics.median(each) for workers, each in seconds.items()},
        "ratio": ratio(seconds[1], seconds[most]),
        "cpu_ratio": ratio(busiest[1], busiest[most]),
    }


def ratio(one: Sequence[float], several: Sequence[float]) -> dict[str, float]:
    """Of turns in the same repeat."""
    found = [each / other for each, other in zip(one, several)]
    return {"median": statistics.median(found), "lowest": min(found), "highest": max(found)}


def cpu_seconds() -> dict[int, float]:
    """Of this process's workers, by their ids; of none where they are its threads (tests)."""
    mine = [each for each in psutil.Process().children(recursive=True) if each.name().startswith("ray::Worker")]
    return {each.pid: sum(each.cpu_times()[:2]) for each in mine} or {0: time.process_time()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--agents", type=int, default=8, help="of the transformer; five times as many sleep")
    parser.add_argument("--only", choices=WORKERS)
    parser.add_argument("--out", type=Path, help="keep the result in this file")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    cores = 1 + max(WORKERS.values())  # as Ray counts them: pools that wait for their turn take none
    ray.init(num_cpus=cores, num_gpus=0, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        agents = {"text": arguments.agents, "asleep": 5 * arguments.agents}
        document = in_parts(
            "cases",
            [arguments.only] if arguments.only else WORKERS,
            lambda case: measured(case, agents[case], arguments.repeats),
            {"repeats": arguments.repeats, "agents": arguments.agents},
            arguments.out,
            lambda: stamp("ray"),
        )
    finally:
        ray.shutdown()
    if arguments.json:
        print(json.dumps(document, indent=1))
        return
    for case, result in document["cases"].items():
        print(f"{case}: {result['workers']} workers / 1: ", end="")
        print("{median:.2f} ({lowest:.2f} … {highest:.2f}), ".format(**result["ratio"]), end="")
        print("by the busiest worker's CPU time {median:.2f}, ".format(**result["cpu_ratio"]), end="")
        print(" s, ".join(f"{each:.3f}" for each in result["seconds"].values()), "s a round")


if __name__ == "__main__":
    main()
