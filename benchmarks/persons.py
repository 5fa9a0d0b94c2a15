"""What it costs to protect persons: a local step on persons over a step on the same number of records.

    python benchmarks/persons.py [--repeats 9] [--slots 8] [--out FILE]

Persons have 1 … c records, evenly; batches of 32 of 300 persons, and of as many records on average, by Poisson
sampling; l2, p = .1, one thread. A ratio is the median over the repeats, taken in turns in one process, of CPU time
over that of records by the engine that `auto` takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedspa.data.dataset import blank_person, grouped
from fedspa.engine.choose import EngineRequest, decide
from fedspa.engine.local import LocalTask
from fedspa.examples import Examples, blank, count
from fedspa.learning.flat import FlatModel
from fedspa.learning.models import build
from fedspa.learning.tasks import Classification, PerPerson
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from provenance import stamp

PERSONS, BATCH, STEPS = 300, 32, 20
CASES = {"logistic": (64,), "mlp": (64,), "mnist-cnn": (1, 28, 28)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name: measure(name, shape, arguments.slots, arguments.repeats) for name, shape in CASES.items()}
    document = {"provenance": stamp(), "slots": arguments.slots, "repeats": arguments.repeats, "cases": cases}
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for name, found in cases.items():
        print(f"{name:12}" + "  ".join(f"{k} {v['ms']:.3f} ms (x {v['ratio']:.2f})" for k, v in found.items()))


def measure(name: str, shape: tuple[int, ...], slots: int, repeats: int) -> dict[str, Any]:
    """CPU milliseconds per local step, and over that of records."""
    module, generator = build(name, shape, 10, seed=1), torch.Generator().manual_seed(0)
    theta = FlatModel(module).flatten()
    whose = np.repeat(np.arange(PERSONS), 1 + np.arange(PERSONS) % slots)
    x = torch.rand(len(whose), *shape, generator=generator)
    records = Examples(x, torch.randint(10, (len(whose),), generator=generator))
    persons = grouped(*records, whose, slots, np.arange(len(whose), dtype=np.uint64))
    one, learned = blank_person(blank(shape), slots), PerPerson(Classification(10))
    kinds = {
        "records": (
            decide(EngineRequest("auto", module, blank(shape), "cpu", 1, False)),
            records,
            BATCH * len(whose) // PERSONS,
        ),
        "records, traced": (
            decide(EngineRequest("traced", module, blank(shape), "cpu", 1, False)),
            records,
            BATCH * len(whose) // PERSONS,
        ),
        "persons": (decide(EngineRequest("auto", module, one, "cpu", 1, False, task=learned)), persons, BATCH),
        "persons, traced": (
            decide(EngineRequest("traced", module, one, "cpu", 1, False, task=learned)),
            persons,
            BATCH,
        ),
        "persons, generic": (
            decide(EngineRequest("generic", module, one, "cpu", 1, False, task=learned)),
            persons,
            BATCH,
        ),
    }
    work = {kind: (choice.make(), task(theta, examples, batch)) for kind, (choice, examples, batch) in kinds.items()}
    times: dict[str, list[float]] = {kind: [] for kind in work}
    for turn in range(repeats + 1):
        for kind, (engine, steps) in work.items():
            start = time.process_time()
            engine.train(theta, [steps])
            if turn:
                times[kind].append(1e3 * (time.process_time() - start) / STEPS)
    base = times["records"]
    return {
        kind: {
            "engine": work[kind][0].name,
            "ms": statistics.median(own),
            "ratio": round(statistics.median(a / b for a, b in zip(own, base)), 3),
        }
        for kind, own in times.items()
    }


def task(theta: torch.Tensor, examples: Examples, batch: int) -> LocalTask:
    d, k = len(theta), round(0.1 * len(theta))
    plan = GaussianPlan(d, k, "l2", 1.0, "poisson", batch, count(examples.y), 1, 1, 2.0, "add-remove", 1e-4)
    mask = torch.randperm(d, generator=torch.Generator().manual_seed(1))[:k].sort().values
    return LocalTask(*examples, mask, 1.0, 0.01, replace(plan, local_steps=STEPS), bytes(32))


if __name__ == "__main__":
    main()
