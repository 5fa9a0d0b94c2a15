"""LoRA with both factors trained beside FFA-LoRA, which trains B alone, on the language model of examples/adapters.

    python benchmarks/lora.py --out benchmarks/results/lora.json

`noise`: the loss that independent noise of deviation ν adds, on every entry of B, or of both factors, before anything
is learned; mean of 8 draws. `training`: 8 agents with 500 records, 8 rounds of 4 steps, batch 25, clip 0.5, rank 4,
δ = 10⁻⁴. For each ε and kind the best of three rates on one seed is trained on five others, each with a body of its
own. Losses are nats per byte of held-out packages.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
import math
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import fedspa
from intervals import half_interval
from provenance import in_parts, stamp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "adapters"))
example: Any = importlib.import_module("train")

KINDS = {"B": False, "A and B": True}
RANKS, DEVIATIONS, DRAWS = (2, 4, 16), (0.05, 0.1, 0.2), 8
EPSILONS, RATES, TRIAL_SEED, SEEDS = (0.5, 2.0, 8.0), (0.3, 1.0, 3.0), 3, range(10, 15)


@functools.cache
def body(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net: nn.Module = example.pretrained(400)
    return net


@functools.cache
def records() -> fedspa.Dataset:
    data: fedspa.Dataset = example.packages()
    return data


def adapted(seed: int, rank: int, kind: str) -> nn.Module:
    net = copy.deepcopy(body(seed))
    torch.manual_seed(seed + 1000)
    example.with_adapters(net, rank, both=KINDS[kind])
    return net


def loss(net: nn.Module) -> float:
    tokens = torch.as_tensor(records().test_x)
    with torch.no_grad():
        return float(functional.cross_entropy(net(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))


def added_by_noise(rank: int, deviation: float, kind: str) -> float:
    found = []
    for draw in range(DRAWS):
        net = adapted(0, rank, kind)
        before = loss(net)
        torch.manual_seed(draw)
        for values in net.parameters():
            if values.requires_grad:
                values.data += deviation * torch.randn_like(values)
        found.append(loss(net) - before)
    return statistics.mean(found)


def fall(seed: int, epsilon: float, kind: str, rate: float) -> tuple[float, int]:
    """By how much training lowers the loss, and the number of trained parameters."""
    net, settings = adapted(seed, 4, kind), example.config(8, seed)
    before = loss(net)
    settings["privacy"] |= {"epsilon": epsilon, "noise": "seeded"}
    settings["algorithm"]["local_lr"] = rate
    with tempfile.TemporaryDirectory() as out:
        settings["run"] |= {"out": f"{out}/run", "threads": 1, "checkpoint_every": 1000}
        summary = fedspa.run(settings, data=records(), module=net, task="next-token", progress=False).summary
    return before - math.log(summary["score_last"]), summary["dimension"]


def trained(epsilon: float, kind: str) -> dict[str, Any]:
    trials = {rate: fall(TRIAL_SEED, epsilon, kind, rate)[0] for rate in RATES}
    rate = max(trials, key=lambda each: trials[each])
    runs = [fall(seed, epsilon, kind, rate) for seed in SEEDS]
    falls = [each for each, _ in runs]
    return {
        "dimension": runs[0][1],
        "rate": rate,
        "trials": [*trials.items()],
        "falls": falls,
        "mean": statistics.mean(falls),
        "half_interval": half_interval(falls),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def measured(part: str) -> Any:
        what, *numbers, kind = part.split(", ")
        if what == "noise":
            return added_by_noise(int(numbers[0]), float(numbers[1]), kind)
        return trained(float(numbers[0]), kind)

    parts = [f"noise, {rank}, {deviation}, {kind}" for rank in RANKS for deviation in DEVIATIONS for kind in KINDS]
    parts += [f"training, {epsilon:g}, {kind}" for epsilon in EPSILONS for kind in KINDS]
    in_parts("runs", parts, measured, {"seeds": len(SEEDS), "draws": DRAWS}, arguments.out, stamp)


if __name__ == "__main__":
    main()
