"""A private local step of rank-8 adapters on a frozen body of 125 million and of a billion parameters.

    python benchmarks/large_bodies.py [--device cuda] [--rows 125m-bfloat16,1b-bfloat16] [--out FILE]

Bodies are transformer encoders with random weights; adapters are on the query and value projections of every block, in
float32, with A frozen; 128 tokens, two classes. Engines are made by themselves: a run tries the module on a CPU before,
which takes minutes for a large one. Ours step two agents in one call, with Poisson batches of 8 of 64 records,
`l2` and secure noise. Opacus takes a step of one agent with batches of exactly 8, and `sgd` is that step without
privacy. `ready_s` is the time to build model and engine, `first_s` that of the first step. Memory is the peak of the
GPU's tensors, the weights with it. The weights' type is that of the body; where the traced engine refuses it, a run
takes the generic one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspa.engine import Unsupported
from fedspa.engine.local import LocalTask
from fedspa.engine.per_example import PerExampleEngine
from fedspa.engine.traced import trace_engine
from fedspa.examples import Examples
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks import Classification
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from local_step.mechanism import Mechanism, opacus_rows, trained
from provenance import in_parts, stamp

RANK, TOKENS, WORDS, BATCH, RECORDS, AGENTS, STEPS = 8, 128, 32_000, 8, 64, 2, 5
OURS = ("generic", "traced")


@dataclass(frozen=True)
class Size:
    width: int
    blocks: int
    heads: int


SIZES = {"tiny": Size(64, 2, 4), "125m": Size(768, 14, 12), "1b": Size(2048, 19, 16)}


class Adapted(nn.Module):
    """A frozen linear layer in bfloat16 with B·A beside it, of which only B is trained."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Linear(frozen.in_features, RANK, bias=False).requires_grad_(False)
        self.b = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.frozen(x) + self.b(self.a(x.float())).to(x.dtype))


class Block(nn.Module):
    """Norm first; attention to all tokens, then an MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        given = self.norm1(x)
        parts = (
            layer(given).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(*parts)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        return x + cast(Tensor, self.down(functional.gelu(self.up(self.norm2(x)))))


class Classifier(nn.Module):
    """The mean over the tokens of what the body gives, and a linear head in float32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, size.width), nn.Embedding(TOKENS, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(self.norm(x).mean(1).float()))


def build(size: Size, kind: torch.dtype, device: str) -> Classifier:
    """The weights are drawn on the device, as they are in the end."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with torch.device(device):
            module = Classifier(size).requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    with torch.device(device):
        module.head = nn.Linear(size.width, 2)
        for block in module.blocks:
            for name in ("query", "value"):
                setattr(block, name, Adapted(getattr(block, name)))
    return module.eval()


def records(seed: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, WORDS, (RECORDS, TOKENS), generator=generator)
    return x.to(device), torch.randint(0, 2, (RECORDS,), generator=generator).to(device)


Step = Callable[[], object]


def ours(module: nn.Module, device: str, engine: str) -> Step:
    """A step of all agents by an engine of ours."""
    task, like = (
        Classification(2),
        Examples(torch.zeros(1, TOKENS, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
    )
    made = (
        PerExampleEngine(module, task, draws=False)
        if engine == "generic"
        else trace_engine(module, like, task, os.cpu_count() or 1, device, tf32=device == "cuda")
    )
    if isinstance(made, Unsupported):
        raise ValueError(str(made))
    theta = FlatModel(module, task).flatten()
    plan = GaussianPlan(len(theta), len(theta), "l2", 1.0, "poisson", BATCH, RECORDS, 1, 1, 2.0, "add-remove", 1e-4)
    tasks = [
        LocalTask(*records(seed, device), None, 1.0, 0.01, plan, seed.to_bytes(32, "big")) for seed in range(AGENTS)
    ]
    return lambda: made.train(theta, tasks)


def rival(module: nn.Module, device: str, name: str) -> Step:
    """A step of one agent by Opacus in the mode that the name ends in, or without privacy."""
    x, y = records(0, device)
    parameters: list[Tensor] = [*trained(module.train())]  # Opacus looks at no layer in eval mode; none draws here
    rows = None if name == "sgd" else opacus_rows(module, name.removeprefix("opacus-"))
    mechanism = Mechanism(module, None, "l2", 1.0, 2.0, 0.01 / BATCH, torch.Generator(device).manual_seed(0))

    def step() -> None:
        index = torch.randint(0, RECORDS, (BATCH,), device=device)
        if rows is not None:
            mechanism(rows(x[index], y[index]), parameters)
            return
        found = torch.autograd.grad(functional.cross_entropy(module(x[index]), y[index]), parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, list(found), alpha=-0.01)

    return step


def measured(part: str, device: str) -> dict[str, Any]:
    row, contender = part.split()
    size, kind = row.split("-")
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {}
    try:
        start = time.perf_counter()
        module = build(SIZES[size], getattr(torch, kind), device)
        found["parameters"] = sum(each.numel() for each in module.parameters())
        found["dimension"] = sum(each.numel() for each in trained(module))
        agents = AGENTS if contender in OURS else 1
        step = ours(module, device, contender) if contender in OURS else rival(module, device, contender)
        found["ready_s"] = time.perf_counter() - start
        found["first_s"] = seconds(step, device)
        step()
        turns = sorted(1e3 * seconds(step, device) / agents for _ in range(STEPS))
        found |= {"ms_per_agent_step": turns[STEPS // 2], "lowest_ms": turns[0], "highest_ms": turns[-1]}
        if device == "cuda":
            found["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
    except Exception as error:  # a library that cannot take a model may say so in any way
        found["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    print(part, json.dumps(found), flush=True)
    return found


def seconds(step: Step, device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="125m-bfloat16,125m-float32,1b-bfloat16,1b-float32")
    parser.add_argument("--contenders", default="sgd,generic,traced,opacus-hooks,opacus-functorch")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    parts = [f"{row} {contender}" for row in arguments.rows.split(",") for contender in arguments.contenders.split(",")]
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    settings = {"device": gpu, "rank": RANK, "tokens": TOKENS, "batch": BATCH, "agents": AGENTS}
    in_parts(
        "runs",
        parts,
        lambda part: measured(part, arguments.device),
        settings,
        arguments.out,
        lambda: stamp("opacus"),
    )


if __name__ == "__main__":
    main()
