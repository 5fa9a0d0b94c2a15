"""What it costs to take each example's gradient by itself, as the generic engine does, beside a whole batch at its
places, as the traced engine does.

    python benchmarks/alone.py [--json] [--repeats N]

Milliseconds of CPU time for a batch, the best of N turns (both ways take turns), with one torch thread.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedspa.engine.traced import TracedEngine
from fedspa.examples import Examples
from fedspa.learning import models
from fedspa.learning.flat import FlatModel

BATCHES = (10, 64)


class Block(nn.Module):
    """One transformer block over 16 tokens of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 4)
        self.mix = nn.MultiheadAttention(32, 4, batch_first=True)
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.wide = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        seen = self.first(x)
        x = x + self.mix(seen, seen, seen, need_weights=False)[0]
        logits: Tensor = self.head((x + self.wide(self.second(x))).mean(1))
        return logits


def contenders() -> dict[str, tuple[nn.Module, Callable[[int], Tensor]]]:
    mlp = nn.Sequential(nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, 4))
    return {
        "MNIST CNN": (models.build("mnist-cnn", (1, 28, 28), 10, seed=0), lambda n: torch.randn(n, 1, 28, 28)),
        "MLP": (mlp, lambda n: torch.randn(n, 64)),
        "transformer block": (Block(), lambda n: torch.randint(64, (n, 16))),
    }


def _together(engine: TracedEngine, theta: Tensor, x: Tensor, y: Tensor) -> None:
    for _ in engine.parts(theta, x, y, None, None):
        pass


def measure(repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, (module, make) in contenders().items():
        model = FlatModel(module)
        theta = model.flatten()
        traced = TracedEngine(module, Examples(make(1), torch.zeros(1, dtype=torch.int64)))
        ways: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
            "together": partial(_together, traced),
            "alone": model.per_example_gradients,
        }
        for batch in BATCHES:
            x, y = make(batch), torch.arange(batch) % 4
            best = dict.fromkeys(ways, float("inf"))
            for turn in range(repeats + 1):
                for way, gradients in ways.items():
                    start = time.process_time()
                    gradients(theta, x, y)
                    if turn:  # the first is warming up
                        best[way] = min(best[way], 1e3 * (time.process_time() - start))
            rows.append(
                {"model": name, "d": model.dimension, "B": batch, **best, "ratio": best["alone"] / best["together"]}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = measure(arguments.repeats)
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        line = "{model}, d = {d}, B = {B}: together {together:.2f} ms, alone {alone:.2f} ms, ratio {ratio:.2f}"
        print(line.format(**row))


if __name__ == "__main__":
    main()
