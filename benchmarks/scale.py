"""How a private round grows: time and memory against agents, d, k, τ and B, each varied alone, with fitted slopes.

    python benchmarks/scale.py [--engine native] [--vary agents,d] [--repeats 5] [--json]

One round of local training as the simulator runs it, in one call of the engine with one thread a core. The net is an
MLP of 100 inputs whose hidden layer sets d; everything but the varied quantity stays at the middle (8 agents,
d = 22,210, p = .1, τ = 20, B = 16). Times are CPU seconds over the number of cores: what the wall would be on an idle
machine. Memory is the peak of a fresh process's resident memory over what it was before the round, the agents' records
not counted. A slope is that of the least-squares line of log(time) against log(quantity) over the upper half of the
range, where constant costs weigh least: 1 is proportional, 0 does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ending import ends_with_children
from fedspa.engine.local import Engine, LocalTask
from fedspa.engine.native import NativeEngine
from fedspa.engine.per_example import PerExampleEngine
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.mask import active_coordinates
from local_step.processes import in_fresh_process, resident_growth
from provenance import stamp

INPUTS, CLASSES, RECORDS = 100, 10, 600


@dataclass(frozen=True)
class Round:
    """`k` is None for a tenth of d."""

    agents: int = 8
    hidden: int = 200
    k: int | None = None
    steps: int = 20
    batch: int = 16

    @property
    def d(self) -> int:
        return (INPUTS + 1) * self.hidden + (self.hidden + 1) * CLASSES

    @property
    def active(self) -> int:
        return self.k if self.k is not None else round(0.1 * self.d)


MIDDLE = Round()
D = MIDDLE.d
# What is varied → its values, and the round at each of them.
VARIED: dict[str, dict[int, Round]] = {
    "agents": {n: replace(MIDDLE, agents=n) for n in (2, 4, 8, 16, 32, 64)},
    "d": {r.d: r for r in (replace(MIDDLE, hidden=h) for h in (50, 100, 200, 400, 800, 1600))},
    "k": {k: replace(MIDDLE, k=k) for k in (D // 100, D // 30, D // 10, D // 4, D // 2, D)},
    "tau": {n: replace(MIDDLE, steps=n) for n in (5, 10, 20, 40, 80, 160)},
    "B": {n: replace(MIDDLE, batch=n) for n in (4, 8, 16, 32, 64, 128)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("native", "generic"), default="native")
    parser.add_argument("--vary", default=",".join(VARIED))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        name: vary(VARIED[name], arguments.engine, arguments.repeats, arguments.cores)
        for name in arguments.vary.split(",")
    }
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("engine", "repeats", "cores")}
        print(json.dumps({"provenance": stamp(), "settings": settings, "varied": results}, indent=1))
        return
    for name, result in results.items():
        print(f"\n{name:>10}{'ms':>12}{'lowest':>12}{'highest':>12}{'peak MiB':>12}")
        for row in result["rows"]:
            value, *figures = row.values()
            print(f"{value:10,}" + "".join(f"{figure:12.3f}" for figure in figures))
        print(f"  slopes: time {result['time_slope']:.2f}, memory {result['memory_slope']:.2f}")


def vary(rounds: dict[int, Round], engine: str, repeats: int, cores: int) -> dict[str, Any]:
    """The rounds take turns, so that a busy machine hits them alike."""
    ready = {value: prepare(each, engine, cores) for value, each in rounds.items()}
    times: dict[int, list[float]] = {value: [] for value in rounds}
    for repeat in range(repeats + 1):  # the first turn warms caches and is not counted
        for value, (trainer, theta, tasks) in ready.items():
            start = time.process_time()
            trainer.train(theta, tasks)
            if repeat:
                times[value].append(1e3 * (time.process_time() - start) / cores)
    memory = {value: in_fresh_process(peak, each, engine, cores) for value, each in rounds.items()}
    rows = [
        {
            "value": value,
            "ms": statistics.median(each),
            "lowest_ms": min(each),
            "highest_ms": max(each),
            "mib": memory[value],
        }
        for value, each in times.items()
    ]
    return {
        "rows": rows,
        "time_slope": slope([(row["value"], row["ms"]) for row in rows]),
        "memory_slope": slope([(row["value"], row["mib"]) for row in rows]),
    }


def prepare(each: Round, engine: str, cores: int) -> tuple[Engine, torch.Tensor, list[LocalTask]]:
    module = nn.Sequential(nn.Linear(INPUTS, each.hidden), nn.ReLU(), nn.Linear(each.hidden, CLASSES))
    trainer: Engine = NativeEngine(module, cores) if engine == "native" else PerExampleEngine(module)
    plan = GaussianPlan(
        each.d, each.active, "l2", 1.0, "poisson", each.batch, RECORDS, each.steps, 1, 1.0, "add-remove", 1e-4
    )  # fmt: skip
    return trainer, FlatModel(module).flatten(), [agent(each, plan, number) for number in range(each.agents)]


def agent(each: Round, plan: GaussianPlan, number: int) -> LocalTask:
    generator = torch.Generator().manual_seed(number)
    x = torch.rand(RECORDS, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (RECORDS,), generator=generator)
    seed = number.to_bytes(16, "big")
    mask = None if each.active == each.d else torch.from_numpy(active_coordinates(seed, each.d, each.active))
    return LocalTask(x, y, mask, 1.0, 0.01, plan, 2 * seed)


def peak(each: Round, engine: str, cores: int) -> float:
    """MiB of growth over one round, in this process."""
    torch.set_num_threads(1)
    trainer, theta, tasks = prepare(each, engine, cores)
    return resident_growth(lambda: trainer.train(theta, tasks))


def slope(points: list[tuple[float, float]]) -> float:
    """Of log y against log x over the upper half of the range."""
    upper = points[len(points) // 2 - 1 :]
    x, y = (np.log([max(point[i], 1e-6) for point in upper]) for i in (0, 1))
    return float(np.polyfit(x, y, 1)[0])


if __name__ == "__main__":
    ends_with_children()
    main()
