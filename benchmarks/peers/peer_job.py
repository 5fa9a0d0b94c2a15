"""The job that every peer does: FedAvg of MNIST's CNN, or the same rounds with Fed-SPA's mechanism in each local step.

    100 agents of 600 records, 10 a round, 60 local steps of 10 records each, an evaluation after every round.

A peer is a script that takes the folder of a job, runs it and prints one JSON line: the seconds of each round and the
accuracy at the end. It may need its own environment, so this file needs nothing but torch (and Opacus for the private
job) beside `fedspa.learning.models`, which every peer builds the same net from.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspa.learning.models import build
from local_step.mechanism import Mechanism, opacus_rows

SHAPE = (1, 28, 28)


@dataclass(frozen=True)
class Job:
    """`private` puts per-example clipping, a mask of `compression` · d coordinates and noise into each local step."""

    private: bool
    agents: int = 100
    per_round: int = 10
    rounds: int = 8
    steps: int = 60
    batch: int = 10
    records: int = 600
    learning_rate: float = 0.05
    compression: float = 0.05
    clip: str = "coordinate"
    clip_value: float = 1e-3
    noise_multiplier: float = 1.0
    processes: int = 2
    opacus_mode: str = "ew"  # the fastest of Opacus's on this net (benchmarks/engine.py)


def write(folder: Path, job: Job) -> None:
    (folder / "job.json").write_text(json.dumps(asdict(job)), "utf-8")


def read(folder: Path) -> Job:
    return Job(**json.loads((folder / "job.json").read_text("utf-8")))


def write_records(folder: Path, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> None:
    torch.save({"x": x, "y": y, "test_x": test_x, "test_y": test_y}, folder / "records.pt")


def read_records(folder: Path) -> dict[str, Tensor]:
    """Mapped, not read: a process touches its own agents' records only."""
    records: dict[str, Tensor] = torch.load(folder / "records.pt", mmap=True, weights_only=True)
    return records


class Trainer:
    """Local training of one agent after another in one process, in the fastest way that PyTorch alone allows."""

    def __init__(self, job: Job, folder: Path, seed: int = 0) -> None:
        torch.set_num_threads(1)
        self.job = job
        self.records = read_records(folder)
        self.module = build("mnist-cnn", SHAPE, 10, 0)
        if not job.private:
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.parameters = list(self.module.parameters())
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = opacus_rows(self.module, job.opacus_mode) if job.private else None

    def agent(self, number: int) -> tuple[Tensor, Tensor]:
        """The records of an agent."""
        held = slice(number * self.job.records, (number + 1) * self.job.records)
        return self.records["x"][held], self.records["y"][held]

    def train(self, number: int) -> None:
        """τ steps from wherever the parameters are now."""
        x, y = self.agent(number)
        if not self.job.private:
            x = x.contiguous(memory_format=torch.channels_last)
        step = self.private_step() if self.job.private else self.plain_step
        for _ in range(self.job.steps):
            index = torch.randint(0, len(y), (self.job.batch,), generator=self._generator)
            step(x[index], y[index])

    def plain_step(self, x: Tensor, y: Tensor) -> None:
        gradients = torch.autograd.grad(functional.cross_entropy(self.module(x), y), self.parameters)
        with torch.no_grad():
            torch._foreach_add_(list(self.parameters), gradients, alpha=-self.job.learning_rate)

    def private_step(self) -> Callable[[Tensor, Tensor], None]:
        """With a mask of its own for each participation."""
        job, rows = self.job, self._rows
        assert rows is not None
        d = sum(p.numel() for p in self.parameters)
        k = round(job.compression * d)
        mask = torch.randperm(d, generator=self._generator)[:k].sort().values if k < d else None
        rate = job.learning_rate / job.batch
        mechanism = Mechanism(self.module, mask, job.clip, job.clip_value, job.noise_multiplier, rate, self._generator)
        return lambda x, y: mechanism(rows(x, y), self.parameters)

    @torch.no_grad()
    def right(self, part: slice) -> int:
        """How many of these test records the net gets right."""
        x, y = self.records["test_x"][part], self.records["test_y"][part]
        return sum(
            int((net_logits(self.module, x_part).argmax(1) == y_part).sum())
            for x_part, y_part in zip(x.split(256), y.split(256))
        )


def net_logits(module: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = module(x)
    return logits


def folder_argument() -> Path:
    return Path(sys.argv[1])


class Rounds:
    """The clock of a peer: `tick` after each round and its evaluation."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.restart()

    def restart(self) -> None:
        """The first round begins now; what came before is start-up."""
        self._last = time.perf_counter()

    def tick(self) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def report(self, accuracy: float) -> None:
        print(json.dumps({"round_s": self.seconds, "accuracy": accuracy}), flush=True)
