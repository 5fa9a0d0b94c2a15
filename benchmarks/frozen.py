"""A linear head on a frozen ResNet-18: what a step costs once the features are there, beside those who make them anew.

    python benchmarks/frozen.py [--json] [--repeats N]

Milliseconds per agent-step with all cores (wall, the best of N turns; all take turns): B = 32, images of 3 × 32 × 32,
for ours p = .1 and l2, for Opacus every coordinate, in its hooks mode. `first pass` is what a record's features cost
once. Opacus is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine.choose import EngineRequest, choose
from fedspa.engine.local import LocalTask
from fedspa.examples import Examples
from fedspa.learning.backbone import Split, split
from fedspa.learning.features import Features
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import derive_key

RECORDS, BATCH, STEPS, AGENTS, SHARE = 128, 32, 20, 10, 0.1
CORES = len(os.sched_getaffinity(0))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Conv2d(given, outputs, 3, step, 1, bias=False), nn.BatchNorm2d(outputs))
            for given, step in ((inputs, stride), (outputs, 1))
        )
        self.short = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.first(x))) + self.short(x))


def resnet18() -> nn.Sequential:
    """Frozen, with statistics as they are, but for the last layer: d = 5,130."""
    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(inputs, outputs, 1 + (inputs != outputs)) for inputs, outputs in pairwise(widths)]
    stem = (nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    body = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten()).requires_grad_(False).eval()
    return nn.Sequential(*body, nn.Linear(512, 10))


def private_step(module: nn.Module, like: Examples, x: Tensor, y: Tensor, agents: int, steps: int) -> Callable[[], int]:
    """A round on the engine that `auto` takes; gives the number of agent-steps."""
    engine = choose(EngineRequest("auto", module, like, "cpu", CORES, exact=False))
    theta = FlatModel(module).flatten()
    active = round(SHARE * len(theta))
    plan = GaussianPlan(
        *(len(theta), active, "l2", 0.5, "poisson", BATCH, RECORDS, steps, 1), *(1.0, "add-remove", 1e-3)
    )
    mask = torch.randperm(len(theta), generator=torch.Generator().manual_seed(0))[:active].sort().values
    keys = [derive_key(bytes(32), f"agent {number}") for number in range(agents)]
    tasks = [LocalTask(x, y, mask, 1.0, 0.1, plan, key) for key in keys]

    def train() -> int:
        engine.train(theta, tasks)
        return agents * steps

    return train


def opacus_step(module: nn.Module, x: Tensor, y: Tensor) -> Callable[[], int]:
    from opacus.grad_sample import GradSampleModule

    model = GradSampleModule(module)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> int:
        model.zero_grad()
        functional.cross_entropy(model(x[:BATCH]), y[:BATCH], reduction="sum").backward()  # type: ignore[no-untyped-call]
        rows = [parameter.grad_sample.flatten(1) for parameter in trained]
        norms = torch.stack([row.norm(dim=1) for row in rows]).norm(dim=0)
        for parameter, row in zip(trained, rows):
            clipped = torch.einsum("b,bd->d", (0.5 / norms).clamp(max=1), row)
            noised = (clipped + 0.5 * torch.randn_like(clipped)).view(parameter.shape)
            parameter.data.sub_(0.1 / BATCH * noised)
            parameter.grad_sample = None
        return 1

    return step


def plain_step(module: nn.Module, x: Tensor, y: Tensor) -> Callable[[], int]:
    optimizer = torch.optim.SGD((parameter for parameter in module.parameters() if parameter.requires_grad), lr=0.1)

    def step() -> int:
        optimizer.zero_grad()
        functional.cross_entropy(module(x[:BATCH]), y[:BATCH]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return 1

    return step


def measure(repeats: int) -> dict[str, float]:
    torch.manual_seed(0)
    module, x, y = resnet18(), torch.randn(RECORDS, 3, 32, 32), torch.arange(RECORDS) % 10
    like = Examples(x[:1], y[:1])
    began = time.perf_counter()
    found = split(module, like, Classification(10))
    assert isinstance(found, Split), found
    times = {"finding the split": 1e3 * (time.perf_counter() - began)}
    began = time.perf_counter()
    features = Features(found, x, strict=False, threads=CORES).of()
    assert isinstance(features, Tensor)
    times["first pass, per record"] = 1e3 * (time.perf_counter() - began) / RECORDS
    ways = {
        "features kept, native": private_step(
            found.head, Examples(found.example_spec, like.y), features, y, AGENTS, STEPS
        ),
        "body in every step, generic": private_step(module, like, x, y, 1, 1),
        "plain SGD, not private": plain_step(module, x, y),
    }
    if find_spec("opacus") is not None:
        ways["Opacus, hooks"] = opacus_step(resnet18(), x, y)
    times |= dict.fromkeys(ways, float("inf"))
    for turn in range(repeats + 1):
        for way, step in ways.items():
            began = time.perf_counter()
            steps = step()
            if turn:  # the first is warming up
                times[way] = min(times[way], 1e3 * (time.perf_counter() - began) / steps)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(CORES)
    times = measure(arguments.repeats)
    if arguments.json:
        print(json.dumps(times, indent=1))
        return
    ours = times["features kept, native"]
    for way, milliseconds in times.items():
        print(f"{way}: {milliseconds:.4g} ms" + (f" ({milliseconds / ours:,.0f} times)" if milliseconds > ours else ""))


if __name__ == "__main__":
    main()
