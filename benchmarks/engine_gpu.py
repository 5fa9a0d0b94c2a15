"""Local training on one GPU: the stacked engine against per-agent vmap(grad) with the same mechanism, and plain SGD.

    python benchmarks/engine_gpu.py [--json] [--repeats N] [--whole]
    python benchmarks/engine_gpu.py --table reproduction/results/engine-gpu.json

Milliseconds per agent-step of a whole round (10 agents, drawing the batches and loading the records included), median
with the smallest and largest of N rounds, the contenders taking turns. "steps only" is the replay of the graphs, by
CUDA events. --whole also trains the rounds of the paper's whole jobs. Beside it the floor: the step's multiplications
at the rate of a large TF32 product measured here, and the fewest bytes (θ and the batch read once, θ written once) at
the rate of a large copy.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ending import ends_with_children
from fedspa.engine.chain import Weighted, describe
from fedspa.engine.stacked import StackedEngine
from fedspa.engine.stacked.buffers import Draws
from fedspa.engine.task import LocalTask
from fedspa.learning.flat import FlatModel
from fedspa.learning.models import build
from fedspa.mechanisms.base import NoPlan
from fedspa.mechanisms.clipping import clip_rows
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.mask import active_coordinates
from fedspa.randomness.streams import derive_key
from local_step.gpu import peak_mib, timed

AGENTS = 10


@dataclass(frozen=True)
class Job:
    name: str
    model: str
    shape: tuple[int, int, int]
    compression: float
    batch: int
    records: int
    steps: int
    clip: Any
    rounds: int
    rule: Any = "given"


JOBS = [
    Job("MNIST p=.05 coordinate", "mnist-cnn", (1, 28, 28), 0.05, 10, 600, 300, "coordinate", 45),
    Job("MNIST p=1 coordinate", "mnist-cnn", (1, 28, 28), 1.0, 10, 600, 300, "coordinate", 45),
    Job("MNIST p=.05 l2", "mnist-cnn", (1, 28, 28), 0.05, 10, 600, 300, "l2", 45),
    Job("MNIST p=.05 l2 quantile", "mnist-cnn", (1, 28, 28), 0.05, 10, 600, 300, "l2", 45, "quantile"),
    Job("CIFAR p=.1 coordinate", "cifar10-cnn", (3, 32, 32), 0.1, 50, 500, 50, "coordinate", 200),
    Job("CIFAR p=.1 l2", "cifar10-cnn", (3, 32, 32), 0.1, 50, 500, 50, "l2", 200),
]


def make_tasks(job: Job, d: int, private: bool) -> list[LocalTask]:
    k = max(1, round(job.compression * d)) if private else d
    tasks = []
    for w in range(AGENTS):
        x = torch.randn(job.records, *job.shape, device="cuda")
        y = torch.randint(10, (job.records,), device="cuda")
        omega = None if k == d else torch.from_numpy(active_coordinates(bytes([w] * 16), d, k)).cuda()
        value = 1e-3 if job.clip == "coordinate" else 1.0
        plan = GaussianPlan(
            d, k, job.clip, value, "poisson", job.batch, job.records, job.steps, 1, 1.0, "add-remove", 1e-4, job.rule
        )  # fmt: skip
        key = derive_key(bytes(32), "benchmark", w)
        free = NoPlan(d, d, "poisson", job.batch, job.steps)
        tasks.append(LocalTask(x, y, omega, 1.0, 0.01, plan if private else free, key))
    return tasks


def one_by_one(model: FlatModel, theta: Tensor, tasks: list[LocalTask]) -> None:
    """What Opacus and its like do: agents in turn, all per-example gradients, then the same mechanism. The noise is
    torch's generator on the GPU, which is not cryptographic and costs less than ours."""
    gradients = model.per_example_gradients()
    for task in tasks:
        assert task.plan is not None
        local, batches = theta.clone(), Draws(task).whole()
        active = slice(None) if task.coordinates is None else task.coordinates
        for index in torch.from_numpy(batches.records).cuda().split(batches.sizes.tolist()):
            rows = gradients(local, task.x[index], task.y[index])[:, active]
            total = clip_rows(rows, task.plan.clip, task.plan.clip_value).sum(dim=0)
            noise = torch.randn_like(total) * (task.plan.sigma * task.batch)
            local[active] -= task.local_lr * (total + noise) / task.batch


def plain_sgd(module: nn.Module, tasks: list[LocalTask]) -> None:
    """No clipping, no noise: autograd and torch's SGD, agents in turn."""
    for task in tasks:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        batches = Draws(task).whole()
        for index in torch.from_numpy(batches.records).cuda().split(batches.sizes.tolist()):
            optimizer.zero_grad()
            x, y = task.tensors
            nn.functional.cross_entropy(module(x[index]), y[index]).backward()
            optimizer.step()


def steps_only(engine: StackedEngine, steps: int, repeats: int) -> list[float]:
    """Milliseconds of the graphs of the last round's stack, replayed."""
    assert engine._rounds is not None
    (_, stack) = next(reversed(engine._rounds._stacks.values()))
    times = []
    for _ in range(repeats):
        stack.round.step.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        stack.run(steps)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def ceilings() -> dict[str, float]:
    """Bytes and float operations a second, of a large copy and a large TF32 product on random data."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    a, b = torch.randn(8192, 8192, device="cuda"), torch.randn(8192, 8192, device="cuda")
    for _ in range(3):
        target.copy_(source)
        _ = a @ b
    copy = statistics.median(timed(lambda: target.copy_(source)) for _ in range(10))
    product = statistics.median(timed(lambda: a @ b) for _ in range(10))
    return {"bytes_per_s": 8 * source.numel() / copy, "tf32_flops": 2 * 8192**3 / product}


def floor(job: Job, module: nn.Module, d: int, rates: dict[str, float]) -> dict[str, float]:
    """Per agent-step. Positions that a pooling discards count too: that is what the layers are."""
    macs, first = 0, True
    for layer in describe(module, job.shape):
        if isinstance(layer, Weighted):
            macs += layer.outputs * layer.columns * layer.positions * (2 if first else 3)
            first = False
    flops = 2 * macs * job.batch
    size = 4 * (2 * d + job.batch * job.shape[0] * job.shape[1] * job.shape[2])
    return {
        "flops": flops,
        "bytes": size,
        "floor_flops_ms": 1e3 * flops / rates["tf32_flops"],
        "floor_bytes_ms": 1e3 * size / rates["bytes_per_s"],
    }


def spread(times: list[float], agent_steps: int) -> dict[str, float]:
    per = [1e3 * t / agent_steps for t in times]
    return {"median": statistics.median(per), "least": min(per), "most": max(per)}


def whole_job(engine: StackedEngine, theta: Tensor, tasks: list[LocalTask], rounds: int) -> float:
    """Seconds of local training, every round with batches and noise of its own; θ stays, which costs the same."""

    def run() -> None:
        for t in range(rounds):
            engine.train(theta, [replace(task, key=derive_key(task.key, t)) for task in tasks])

    return timed(run)


def measure(job: Job, repeats: int, rates: dict[str, float], rivals: bool, whole: bool) -> dict[str, Any]:
    module = build(job.model, job.shape, 10, 0).cuda()
    model = FlatModel(module)
    theta = model.flatten()
    tasks, open_tasks = make_tasks(job, model.dimension, True), make_tasks(job, model.dimension, False)
    engines = {tf32: StackedEngine(module, "cuda", tf32=tf32) for tf32 in (True, False)}
    free = StackedEngine(module, "cuda", tf32=True)
    few = max(3, job.steps // 30)  # the rivals' time a step does not depend on how many there are
    short = [replace(task, steps=replace(task.steps, local_steps=few)) for task in tasks]
    work: dict[str, tuple[Callable[[], object], int]] = {
        "stacked": (lambda: engines[True].train(theta, tasks), AGENTS * job.steps),
        "stacked, full float32": (lambda: engines[False].train(theta, tasks), AGENTS * job.steps),
        "stacked, FedAvg": (lambda: free.train(theta, open_tasks), AGENTS * job.steps),
    }
    if rivals:
        work["vmap(grad), agents in turn"] = (lambda: one_by_one(model, theta, short), AGENTS * few)
        work["plain SGD, agents in turn"] = (lambda: plain_sgd(module, short), AGENTS * few)
    memory = {name: peak_mib(run)[0] for name, (run, _) in work.items()}
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, (run, _) in work.items():
            times[name].append(timed(run))
    result: dict[str, Any] = {
        "job": job.name,
        "dimension": model.dimension,
        "ms": {name: spread(times[name], work[name][1]) for name in work},
        "peak_mib": memory,
        **floor(job, module, model.dimension, rates),
    }
    graph = steps_only(engines[True], job.steps, repeats)
    result["ms"]["stacked, steps only"] = spread([t / 1e3 for t in graph], AGENTS * job.steps)
    if whole:
        result["rounds"], result["whole_job_s"] = job.rounds, whole_job(engines[True], theta, tasks, job.rounds)
    result["draw_ms"] = 1e3 * statistics.median(timed(lambda: [Draws(t).whole() for t in tasks]) for _ in range(3))
    return result


def table(found: dict[str, Any]) -> str:
    """The kept results as the docs show them."""
    names = {
        "stacked": "**stacked, TF32**",
        "stacked, steps only": "its steps alone",
        "stacked, full float32": "stacked, full float32",
        "stacked, FedAvg": "stacked, FedAvg, TF32",
        "vmap(grad), agents in turn": "`vmap(grad)`, agents in turn",
        "plain SGD, agents in turn": "PyTorch SGD, not private, agents in turn",
    }
    lines = ["| | " + " | ".join(job["job"] for job in found["jobs"]) + " |", "|---|" + "---|" * len(found["jobs"])]
    for key, label in names.items():
        cells = []
        for job in found["jobs"]:
            ms, memory = job["ms"].get(key), job["peak_mib"].get(key)
            room = "" if memory is None else f", {memory:.0f} MiB"
            cells.append("" if ms is None else f"{ms['median']:.3g} ({ms['least']:.3g}–{ms['most']:.3g}){room}")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    for key, label in (("floor_flops_ms", "floor by operations"), ("floor_bytes_ms", "floor by bytes")):
        lines.append(f"| {label} | " + " | ".join(f"{job[key]:.2g}" for job in found["jobs"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--whole", action="store_true", help="train whole jobs too")
    parser.add_argument("--table", type=Path, help="print kept results as the docs' table, and measure nothing")
    options = parser.parse_args()
    if options.table is not None:
        print(table(json.loads(options.table.read_text("utf-8"))))
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # for the rivals too
    rates = ceilings()
    torch.cuda.empty_cache()
    results = []
    for job in JOBS:
        if options.only in job.name:
            print(job.name, file=sys.stderr, flush=True)
            # What follows the gradients is the same for the rivals: once a model and p is enough.
            plain = job.clip == "coordinate"
            rivals, whole = plain and not options.no_rivals, plain and options.whole
            results.append(measure(job, options.repeats, rates, rivals, whole))
    if options.json:
        versions = {"torch": torch.__version__, "triton": version("triton"), "python": platform.python_version()}
        named = {"command": " ".join(["python", *sys.argv]), "device": torch.cuda.get_device_name(), **versions}
        print(json.dumps({**named, "agents": AGENTS, "repeats": options.repeats, **rates, "jobs": results}))
        return
    print(f"{torch.cuda.get_device_name()}: {rates['tf32_flops'] / 1e12:.0f} TFLOP/s TF32, "
          f"{rates['bytes_per_s'] / 1e12:.2f} TB/s copied")  # fmt: skip
    for result in results:
        print(f"{result['job']} (d = {result['dimension']}): floor {result['floor_flops_ms']:.4f} ms by operations, "
              f"{result['floor_bytes_ms']:.4f} by bytes; drawing a round takes {result['draw_ms']:.1f} ms")  # fmt: skip
        if "whole_job_s" in result:
            print(f"  {result['rounds']} rounds of {AGENTS} agents: {result['whole_job_s']:.2f} s")
        for name, ms in result["ms"].items():
            memory = result["peak_mib"].get(name)
            room = "" if memory is None else f"  peak {memory:.0f} MiB"
            print(f"  {ms['median']:8.4f} ms ({ms['least']:.4f} to {ms['most']:.4f})  {name}{room}")


if __name__ == "__main__":
    ends_with_children()
    main()
