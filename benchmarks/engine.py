"""What a private local step costs: our engines beside Opacus, vmap(grad) and plain SGD, in one run.

    python benchmarks/engine.py [--cases mnist-p05,cifar-p10] [--repeats 7] [--cores 2] [--json]

Every contender gets all cores in its best split: the native engine one thread an agent in one process, the others one
process a core with one torch thread each (two torch threads in one process are slower on all of these models). They
take turns within a repeat, so that a busy machine hits them alike; compare ratios, not milliseconds of different runs.
Times are milliseconds per agent-step: wall (medians over the repeats, with the lowest and highest), and the CPU time of
all processes and threads over the number of cores, which is what the wall would be on an idle machine. Memory is the
peak of one process's resident memory over what it was before the first step.

Opacus is not a dependency: `pip install --no-deps opacus==1.5.4 opt-einsum==3.4.0` adds it, else it is left out. The
rivals' noise comes from torch's ordinary generator, which is faster than a cryptographic one and not private.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine.flat import FlatModel
from fedspa.engine.generic import GenericEngine
from fedspa.engine.native import NativeEngine, supports
from fedspa.engine.task import Engine, LocalTask
from fedspa.federation.models import build
from fedspa.privacy.plan import Plan

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    model: str
    shape: tuple[int, ...]
    batch: int
    records: int
    compression: float
    slow_steps: int  # steps of a rival in one turn
    fast_steps: int  # local steps of each of our agents in one turn


CASES = {
    "mnist-p05": Case("mnist-cnn", (1, 28, 28), 10, 600, 0.05, 25, 100),
    "mnist-p100": Case("mnist-cnn", (1, 28, 28), 10, 600, 1.0, 25, 100),
    "cifar-p10": Case("cifar10-cnn", (3, 32, 32), 50, 500, 0.1, 2, 5),
    "mlp-p100": Case("mlp", (1, 28, 28), 10, 600, 1.0, 50, 200),
    "logistic-p100": Case("logistic", (1, 28, 28), 10, 600, 1.0, 50, 400),
}
PROCESS_SPLIT = ("generic", "opacus-hooks", "opacus-ew", "vmap", "sgd", "sgd-channels-last")
THREAD_SPLIT = ("native", "native-l2", "native-plain-sgd")
CLIP, CLIP_L2, NOISE = 1e-3, 1.0, 2.0
LEARNING_RATE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(CASES[name], arguments.repeats, arguments.cores) for name in arguments.cases.split(",")}
    if arguments.json:
        print(json.dumps({"cores": arguments.cores, "cases": results}))
        return
    keys = ("median_ms", "lowest_ms", "highest_ms", "cpu_ms", "peak_mib")
    for name, result in results.items():
        print(f"\n{name:22}{'wall ms':>10}{'lowest':>10}{'highest':>10}{'cpu ms':>10}{'peak MiB':>10}")
        for contender, row in result["contenders"].items():
            print(f"{contender:22}" + "".join(f"{row[key]:10.4g}" for key in keys))
        for what, ratio in result["ratios"]["cpu"].items():
            print(f"  {what:40} cpu {ratio:6.2f}   wall {result['ratios']['wall'][what]:6.2f}")


def measure(case: Case, repeats: int, cores: int) -> dict[str, Any]:
    contenders = [name for name in (*THREAD_SPLIT, *PROCESS_SPLIT) if available(name, case)]
    workers = [Worker(case, seed) for seed in range(cores)]
    ours = {name: native_turn(name, case, cores) for name in contenders if name in THREAD_SPLIT}
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):  # the first turn warms caches and is not counted
        for name in contenders:
            start, start_cpu = time.perf_counter(), time.process_time()
            if name in ours:
                ours[name]()
                used, steps = time.process_time() - start_cpu, case.fast_steps * 2 * cores  # two agents a thread
            else:
                for worker in workers:
                    worker.begin(name)
                used, steps = sum(worker.wait() for worker in workers), case.slow_steps * cores
            if repeat:
                wall[name].append(1e3 * (time.perf_counter() - start) / steps)
                cpu[name].append(1e3 * used / steps / cores)
    for worker in workers:
        worker.close()
    rows = {
        name: {
            "median_ms": statistics.median(wall[name]),
            "lowest_ms": min(wall[name]),
            "highest_ms": max(wall[name]),
            "cpu_ms": statistics.median(cpu[name]),
            "peak_mib": peak_memory(name, case),
        }
        for name in contenders
    }
    clocks = {"wall": "median_ms", "cpu": "cpu_ms"}
    return {"contenders": rows, "ratios": {name: ratios(rows, clock) for name, clock in clocks.items()}}


def ratios(rows: dict[str, dict[str, float]], clock: str) -> dict[str, float]:
    native, plain = rows["native"][clock], rows["native-plain-sgd"][clock]
    found = {}
    for label, prefix in {"opacus": "opacus", "vmap": "vmap", "plain SGD": "sgd", "generic": "generic"}.items():
        best = [row[clock] for name, row in rows.items() if name.startswith(prefix)]
        if best:
            found[f"best {label} / native"] = min(best) / native
    found["native / native-plain-sgd"] = native / plain
    found["native-l2 / native-plain-sgd"] = rows["native-l2"][clock] / plain
    return found


def available(name: str, case: Case) -> bool:
    if name.startswith("opacus"):
        return importlib.util.find_spec("opacus") is not None
    if name in THREAD_SPLIT:
        return supports(build(case.model, case.shape, 10, 0), case.shape) is None
    return name != "sgd-channels-last" or case.model.endswith("cnn")


# ------------------------------------------------------------------------------------------------------ our engines


def agent(case: Case, kind: str, seed: int, steps: int) -> LocalTask:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(case.records, *case.shape, generator=generator)
    y = torch.randint(0, 10, (case.records,), generator=generator)
    d = len(FlatModel(build(case.model, case.shape, 10, 0)).flatten())
    k = round(case.compression * d)
    private = kind != "native-plain-sgd"
    mask = torch.randperm(d, generator=generator)[:k].sort().values if private and k < d else None
    clip, value = ("l2", CLIP_L2) if kind == "native-l2" else ("coordinate", CLIP)
    plan = Plan(d, k, clip, value, "poisson", case.batch, case.records, steps, 1, NOISE, "add-remove", 1e-4)  # type: ignore[arg-type]
    key = seed.to_bytes(32, "big")
    return LocalTask(x, y, mask, 1.0, "poisson", case.batch, steps, LEARNING_RATE, plan if private else None, key)


def turn(engine: Engine, case: Case, kind: str, agents: int, steps: int) -> Step:
    theta = FlatModel(build(case.model, case.shape, 10, 0)).flatten()
    tasks = [agent(case, kind, seed, steps) for seed in range(agents)]

    def run() -> None:
        engine.train(theta, tasks)

    return run


def native_turn(kind: str, case: Case, cores: int) -> Step:
    return turn(NativeEngine(build(case.model, case.shape, 10, 0), cores), case, kind, 2 * cores, case.fast_steps)


# ------------------------------------------------------------------------------------------------------- the rivals


def rival_step(name: str, case: Case, seed: int) -> Step:
    """One local step of one agent, all in torch: clamp, mask, noise and update as lean as they can be written."""
    task = agent(case, "rival", seed, 1)
    assert task.plan is not None
    module = build(case.model, case.shape, 10, 0)
    deviation, mask = task.plan.sigma * case.batch, task.coordinates
    generator = torch.Generator().manual_seed(seed)

    def batch() -> tuple[Tensor, Tensor]:
        index = torch.randint(0, case.records, (case.batch,), generator=generator)
        return task.x[index], task.y[index]

    def update(sums: list[Tensor], parameters: list[Tensor]) -> None:
        flat = torch.cat([s.reshape(-1) for s in sums])
        active = flat if mask is None else flat[mask]
        active += deviation * torch.randn(active.numel(), generator=generator)
        if mask is not None:
            flat.zero_()
            flat[mask] = active
        with torch.no_grad():
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
                p -= LEARNING_RATE / case.batch * part.view_as(p)

    if name.startswith("sgd"):
        return plain_sgd(module, batch, channels_last=name.endswith("last"))
    if name == "vmap":
        return vmap_step(module, batch, update)
    return opacus_step(module, batch, update, mode=name.removeprefix("opacus-"))


def plain_sgd(module: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]], channels_last: bool) -> Step:
    layout = torch.channels_last if channels_last else torch.contiguous_format
    module = module.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE)

    def step() -> None:
        x, y = batch()
        optimizer.zero_grad()
        functional.cross_entropy(module(x.to(memory_format=layout)), y).backward()
        optimizer.step()

    return step


def vmap_step(module: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]], update: Callable[..., None]) -> Step:
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(module, values, x[None]), y[None])

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        rows = gradients(parameters, *batch())
        update([rows[name].clamp_(-CLIP, CLIP).sum(0) for name in parameters], list(parameters.values()))

    return step


def opacus_step(
    module: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]], update: Callable[..., None], mode: str
) -> Step:
    from opacus.grad_sample import wrap_model

    wrapped = wrap_model(module, grad_sample_mode=mode, loss_reduction="sum")
    parameters = list(module.parameters())
    warnings.filterwarnings("ignore", message="Full backward hook is firing")

    def step() -> None:
        x, y = batch()
        wrapped.zero_grad(set_to_none=True)
        functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        rows = [p.grad_sample for p in parameters]
        update([row.clamp_(-CLIP, CLIP).sum(0) for row in rows], parameters)
        for p in parameters:
            p.grad_sample = None

    return step


# ---------------------------------------------------------------------------------------------------- the processes


def prepare(name: str, case: Case, seed: int, steps: int) -> Step:
    """A turn of `steps` steps of one agent in this process."""
    if name in THREAD_SPLIT:
        return turn(NativeEngine(build(case.model, case.shape, 10, 0), 1), case, name, 1, steps)
    if name == "generic":
        return turn(GenericEngine(build(case.model, case.shape, 10, 0)), case, name, 1, steps)
    step = rival_step(name, case, seed)

    def run() -> None:
        for _ in range(steps):
            step()

    return run


class Worker:
    """A process with one torch thread that runs turns when told to."""

    def __init__(self, case: Case, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, case, seed), daemon=True)
        self._process.start()

    def begin(self, name: str) -> None:
        self._pipe.send(name)

    def wait(self) -> float:
        """The CPU seconds that the turn took."""
        return float(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()


def serve(pipe: Connection, case: Case, seed: int) -> None:
    torch.set_num_threads(1)
    turns: dict[str, Step] = {}
    while (name := pipe.recv()) is not None:
        if name not in turns:
            turns[name] = prepare(name, case, seed, case.slow_steps)
        start = time.process_time()
        turns[name]()
        pipe.send(time.process_time() - start)


def peak_memory(name: str, case: Case) -> float:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=watch_memory, args=(sender, name, case))
    process.start()
    peak: float = receiver.recv()
    process.join()
    return peak


def watch_memory(sender: Connection, name: str, case: Case) -> None:
    torch.set_num_threads(1)
    run = prepare(name, case, 0, 3)
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as reset:  # Linux: the peak starts again from here
        reset.write("5")
    run()
    sender.send((resident("VmHWM") - before) / 1024)


def resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))


if __name__ == "__main__":
    main()
