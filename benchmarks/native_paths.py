"""What a special path of the native engine is worth: a step without it over a step with it, on the shipped nets.

    python benchmarks/native_paths.py NAME=FOLDER [NAME=FOLDER …] [--base FOLDER] [--repeats 25] [--out FILE]

Each FOLDER is a copy of src/fedspa/engine/native/csrc without the path NAME; `--base` (by default csrc itself) has it.
All are compiled as setup.py does and run in this process, in turns, on the same tasks with one thread. A ratio is the
median over the repeats of CPU time without the path over CPU time with it: 1.33 means that the path takes 25 % off.
`base` beside itself shows what the machine's noise is.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedspa.engine.local import LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.learning.flat import FlatModel
from fedspa.learning.models import build
from fedspa.mechanisms.base import Clipping, NoPlan
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from provenance import stamp

CSRC = Path(__file__).parents[1] / "src/fedspa/engine/native/csrc"


@dataclass(frozen=True)
class Case:
    """Local training as a shipped config has it; `agents` makes a turn long enough to be timed."""

    model: str
    shape: tuple[int, ...]
    batch: int
    records: int
    p: float
    clip: Clipping | None
    steps: int
    agents: int


CASES = {
    "mnist-best": Case("logistic", (392,), 600, 600, 0.05, "l2", 1, 20),
    "cifar10-best": Case("logistic", (1200,), 500, 500, 0.1, "l2", 1, 10),
    "cifar10-patches": Case("logistic", (1664,), 500, 500, 1.0, "l2", 1, 10),
    "mnist": Case("mnist-cnn", (1, 28, 28), 10, 600, 0.05, "l2", 300, 1),
    "mnist-published": Case("mnist-cnn", (1, 28, 28), 10, 600, 0.05, "coordinate", 300, 1),
    "mnist-dp-fed-published": Case("mnist-cnn", (1, 28, 28), 10, 600, 1.0, "coordinate", 300, 1),
    "mnist-fedavg": Case("mnist-cnn", (1, 28, 28), 10, 600, 1.0, None, 300, 1),
    "mnist-cnn-best": Case("mnist-cnn", (1, 28, 28), 600, 600, 0.05, "l2", 1, 5),
    "cifar10": Case("cifar10-cnn", (3, 32, 32), 500, 500, 0.05, "l2", 1, 1),
    "cifar10-published": Case("cifar10-cnn", (3, 32, 32), 50, 500, 0.1, "coordinate", 5, 1),
    "cifar10-dp-fed-published": Case("cifar10-cnn", (3, 32, 32), 50, 500, 1.0, "coordinate", 5, 1),
    "cifar10-fedavg": Case("cifar10-cnn", (3, 32, 32), 50, 500, 1.0, None, 5, 1),
    "logistic-p1": Case("logistic", (784,), 10, 600, 1.0, "coordinate", 400, 1),
    "mlp-p1": Case("mlp", (784,), 10, 600, 1.0, "coordinate", 200, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("without", nargs="*", metavar="NAME=FOLDER")
    parser.add_argument("--base", type=Path, default=CSRC)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folders = {"with": arguments.base, "base": arguments.base}
    folders |= {name: Path(folder) for name, _, folder in (each.partition("=") for each in arguments.without)}
    with tempfile.TemporaryDirectory() as place:
        libraries = {name: compiled(folder, Path(place) / f"{name}.so") for name, folder in folders.items()}
        cases = {name: measure(CASES[name], libraries, arguments.repeats) for name in arguments.cases.split(",")}
    document = {"provenance": stamp(), "repeats": arguments.repeats, "level": library.best_level(), "cases": cases}
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    for name, found in cases.items():
        print(f"{name:26}{found['ms']:9.4f} ms  " + "  ".join(f"{k} {v:.2f}" for k, v in found["ratios"].items()))


def compiled(folder: Path, library_file: Path) -> ctypes.CDLL:
    """The library of these sources, with the options of setup.py."""
    options = ["-std=gnu11", "-O3", "-Wno-psabi", "-pthread", "-fPIC", "-shared"]
    sources = sorted(str(path) for path in folder.glob("*.c"))
    subprocess.run(["gcc", *options, *sources, "-lm", "-o", str(library_file)], check=True)
    found = library.declare(ctypes.CDLL(str(library_file)))
    assert found is not None, f"{folder} has another interface"
    return found


def measure(case: Case, libraries: dict[str, ctypes.CDLL], repeats: int) -> dict[str, Any]:
    """Milliseconds per agent-step of the base, and the ratios to it."""
    module = build(case.model, case.shape, 10, seed=1)
    theta = FlatModel(module).flatten()
    tasks = [task(case, seed, theta.numel()) for seed in range(case.agents)]
    engines = {}
    for name, loaded in libraries.items():
        engines[name] = NativeEngine(module, threads=1)
        engines[name]._library = loaded
        engines[name].train(theta, tasks)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, engine in engines.items():
            start = time.process_time()
            engine.train(theta, tasks)
            times[name].append(1e3 * (time.process_time() - start) / (case.steps * case.agents))
    ratios = {
        name: statistics.median(a / b for a, b in zip(own, times["with"]))
        for name, own in times.items()
        if name != "with"
    }
    return {"ms": statistics.median(times["with"]), "ratios": {k: round(v, 3) for k, v in ratios.items()}}


def task(case: Case, seed: int, d: int) -> LocalTask:
    """An agent with records, mask and key of its own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(case.records, *case.shape, generator=generator)
    y = torch.randint(10, (case.records,), generator=generator)
    key, k = seed.to_bytes(32, "big"), round(case.p * d)
    if case.clip is None:
        return LocalTask(x, y, None, 1.0, 0.01, NoPlan(d, d, "poisson", case.batch, case.steps), key)
    clip_value = 1.0 if case.clip == "l2" else 1e-3
    plan = GaussianPlan(
        *(d, k, case.clip, clip_value, "poisson", case.batch, case.records, 1, 1, 2.0, "add-remove", 1e-4)
    )
    mask = torch.randperm(d, generator=generator)[:k].sort().values if k < d else None
    return LocalTask(x, y, mask, 1.0, 0.01, replace(plan, local_steps=case.steps), key)


if __name__ == "__main__":
    main()
