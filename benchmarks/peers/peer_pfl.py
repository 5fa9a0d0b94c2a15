"""Apple's pfl-research: a process a core over gloo, its own FedAvg, SGD loop and distributed evaluation."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ending import ends_with_children
from peer_job import Rounds, Trainer, folder_argument, net_logits, read


class Net(nn.Module):
    """The CNN with the two methods that pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(net_logits(self.net, x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        from pfl.metrics import Weighted

        right = int((net_logits(self.net, x).argmax(1) == y).sum())
        return {"accuracy": Weighted(right, len(y))}


def worker(folder: Path) -> None:
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    job = read(folder)
    trainer = Trainer(job, folder, seed=int(os.environ["PFL_WORKER_RANK"]))
    model = PyTorchModel(Net(trainer.module), torch.optim.SGD, torch.optim.SGD(trainer.module.parameters(), lr=1.0))

    class PrivateAveraging(FederatedAveraging):  # type: ignore[misc]
        """FedAvg whose local steps are the private ones; pfl itself has noise on whole updates only."""

        def train_one_user(self, initial: Any, model: Any, user: Any, central: Any) -> Any:
            step = trainer.private_step()
            model.do_multiple_epochs_of(user, central.model_train_params, lambda _net, _opt, batch, *_: step(*batch))
            from pfl.metrics import Metrics

            return model.get_model_difference(initial), Metrics()

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rounds, self.accuracy = Rounds(), 0.0

        def on_train_begin(self, *, model: Any) -> Any:
            from pfl.metrics import Metrics

            self.rounds.restart()
            return Metrics()

        def after_central_iteration(self, aggregate: Any, model: Any, *, central_iteration: int) -> Any:
            from pfl.metrics import Metrics

            self.accuracy = dict(aggregate.to_simple_dict()).get("Central val | accuracy", self.accuracy)
            self.rounds.tick()
            return False, Metrics()

    def user(number: int) -> Any:
        x, y = trainer.agent(number)
        if not job.private:
            x = x.contiguous(memory_format=torch.channels_last)
        return Dataset((x, y), user_id=str(number))

    tested = Dataset((trainer.records["test_x"], trainer.records["test_y"]))
    clock = Clock()
    federated = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(job.agents))))
    (PrivateAveraging if job.private else FederatedAveraging)().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds,
            train_cohort_size=job.per_round,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=federated, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=None,
            local_num_steps=job.steps,
            local_learning_rate=job.learning_rate,
            local_batch_size=job.batch,
        ),
        model_eval_params=None,
        callbacks=[CentralEvaluationCallback(tested, NNEvalHyperParams(local_batch_size=256)), clock],
    )
    if os.environ["PFL_WORKER_RANK"] == "0":
        clock.rounds.report(float(clock.accuracy))


def main() -> None:
    ends_with_children()
    folder = folder_argument()
    processes = read(folder).processes
    addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(processes))
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder)],
            env=os.environ | {"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    try:
        sys.exit(max(process.wait() for process in workers))
    finally:
        for process in workers:
            process.kill()


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


if __name__ == "__main__":
    worker(folder_argument()) if "PFL_WORKER_RANK" in os.environ else main()
