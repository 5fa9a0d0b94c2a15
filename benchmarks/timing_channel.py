"""How much of a record shows in the time of a local step: `python benchmarks/timing_channel.py`.

For each model, one step on 32 records by the engine that a deployed agent takes, in microseconds of processor time per
record (least of many repeats, one thread): when the records are ordinary, blank, bad (NaN), denormal, or have no
gradient because the server's θ is sure of their labels; and with one record more, over 32 as well. What a column
differs from the first by is what each sampled record could show the server if nothing else took time (SECURITY.md).
"""

from __future__ import annotations

import json
import sys
import time

import torch

from fedspa.engine import EngineName
from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import Engine, LocalTask
from fedspa.examples import blank
from fedspa.learning import models
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan

RECORDS, STEPS, REPEATS, SHAPE = 32, 5, 80, (1, 28, 28)


def step_time(engine: Engine, theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> float:
    """Microseconds of processor time per record and step."""
    batch = len(y)
    plan = GaussianPlan(len(theta), len(theta), "l2", 1.0, "fixed", batch, batch, STEPS, 1, 1.0, "replace-one", 1e-6)
    task = LocalTask(x, y, None, 1.0, 1e-12, plan, bytes(32))
    best = float("inf")
    for _ in range(REPEATS):
        start = time.process_time()
        engine.train(theta, [task])
        best = min(best, time.process_time() - start)
    return 1e6 * best / STEPS / RECORDS


def main() -> None:
    torch.set_num_threads(1)
    rows = {}
    tried: tuple[tuple[str, EngineName], ...] = (
        ("logistic", "auto"),
        ("mlp", "auto"),
        ("mnist-cnn", "auto"),
        ("mlp", "generic"),
    )
    for name, kind in tried:
        module = models.build(name, SHAPE, 10, seed=0)
        engine, theta = choose(EngineRequest(kind, module, blank(SHAPE), "cpu", 1, False)), FlatModel(module).flatten()
        draw = torch.Generator().manual_seed(0)
        x, y = torch.rand(RECORDS, *SHAPE, generator=draw), torch.zeros(RECORDS, dtype=torch.int64)
        sure = theta.clone()
        sure[-10] = 1e3  # the bias of class 0, the label of all records
        columns = {
            "ordinary": (theta, x, y),
            "a record more": (theta, torch.cat((x, x[:1])), torch.cat((y, y[:1]))),
            "blank": (theta, torch.zeros_like(x), y),
            "bad": (theta, torch.full_like(x, torch.nan), y),
            "denormal": (theta, torch.full_like(x, 1e-40), y),
            "no gradient": (sure, x, y),
        }
        times = {column: round(step_time(engine, *given), 1) for column, given in columns.items()}
        rows[f"{name}, {engine.name}"] = times
        if "--json" not in sys.argv:
            print(f"{name}, {engine.name}: " + ", ".join(f"{column} {value}" for column, value in times.items()))
    if "--json" in sys.argv:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
