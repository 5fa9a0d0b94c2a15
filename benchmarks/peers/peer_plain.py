"""Plain PyTorch: a process a core with one thread each, which train their share of a round's agents one by one."""

from __future__ import annotations

import multiprocessing
import random
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from peer_job import Rounds, Trainer, folder_argument, read


def main() -> None:
    folder = folder_argument()
    job = read(folder)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(job.processes):
        pipe, other = context.Pipe()
        processes.append(context.Process(target=work, args=(other, folder, rank), daemon=True))
        processes[-1].start()
        pipes.append(pipe)
    theta, *_ = [pipe.recv() for pipe in pipes]  # everyone has loaded the records
    cohorts, clock, accuracy = random.Random(0), Rounds(), 0.0
    for _ in range(job.rounds):
        cohort = cohorts.sample(range(job.agents), job.per_round)
        for rank, pipe in enumerate(pipes):
            pipe.send((theta, cohort[rank :: job.processes]))
        theta = theta + sum(pipe.recv() for pipe in pipes) / job.per_round
        for pipe in pipes:
            pipe.send(theta)
        right, tested = (sum(column) for column in zip(*(pipe.recv() for pipe in pipes)))
        accuracy = right / tested
        clock.tick()
    for pipe, process in zip(pipes, processes):
        pipe.send(None)
        process.join()
    clock.report(accuracy)


def work(pipe: Connection, folder: Path, rank: int) -> None:
    """Answers (θ, agents) with the sum of their updates, then θ with its share of the evaluation."""
    job = read(folder)
    trainer = Trainer(job, folder, seed=rank)
    tested = slice(rank, None, job.processes)
    pipe.send(flat(trainer))
    while (message := pipe.recv()) is not None:
        theta, agents = message
        total = torch.zeros_like(theta)
        for number in agents:
            load(trainer, theta)
            trainer.train(number)
            total += flat(trainer) - theta
        pipe.send(total)
        load(trainer, pipe.recv())
        pipe.send((trainer.right(tested), len(trainer.records["test_y"][tested])))


def flat(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in trainer.parameters])


@torch.no_grad()
def load(trainer: Trainer, theta: Tensor) -> None:
    for p, part in zip(trainer.parameters, theta.split([p.numel() for p in trainer.parameters])):
        p.copy_(part.view_as(p))  # keeps the parameter's own layout


if __name__ == "__main__":
    main()
