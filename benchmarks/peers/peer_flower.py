"""Flower's simulation: a Ray actor a core and FedAvg's own strategy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from peer_flower_client import client, trainer
from peer_job import Rounds, folder_argument, read


class CheckedFedAvg(FedAvg):
    """FedAvg goes on without the agents that failed, and quickly; a benchmark must not."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"an agent failed: {reply.error.reason}")
        return super().aggregate_train(server_round, replies)


def server(folder: Path, clock: Rounds, accuracies: list[float]) -> ServerApp:
    app, job = ServerApp(), read(folder)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        own = trainer(folder)

        def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord:
            own.module.load_state_dict(arrays.to_torch_state_dict())
            accuracies.append(own.right(slice(None)) / len(own.records["test_y"]))
            clock.tick() if t > 0 else clock.restart()  # t = 0 comes before the first round
            return MetricRecord({"accuracy": accuracies[-1]})

        strategy = CheckedFedAvg(
            fraction_train=job.per_round / job.agents, fraction_evaluate=0.0, min_available_nodes=job.agents
        )
        start = ArrayRecord(own.module.state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=job.rounds, evaluate_fn=evaluate)

    return app


def main() -> None:
    folder = folder_argument()
    job, clock, accuracies = read(folder), Rounds(), [0.0]
    torch.set_num_threads(1)
    run_simulation(
        server(folder, clock, accuracies),
        client(folder),
        num_supernodes=job.agents,
        backend_config={
            "init_args": {"num_cpus": job.processes},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    clock.report(accuracies[-1])


if __name__ == "__main__":
    main()
