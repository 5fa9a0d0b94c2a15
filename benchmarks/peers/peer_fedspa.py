"""Ours: `fedspa.run` with the native engine, the records handed over as a Dataset. Checkpoints at the end only, as no
peer writes any; the private job keeps its ledger and prices every round."""

from __future__ import annotations

import tempfile
from typing import Any

import fedspa
from fedspa.data.dataset import Dataset
from peer_job import Rounds, folder_argument, read, read_records


def main() -> None:
    folder = folder_argument()
    job, records = read(folder), read_records(folder)
    data = Dataset(records["x"], records["y"], records["test_x"], records["test_y"], classes=10, name="mnist")
    clock = Rounds()
    with tempfile.TemporaryDirectory() as out:
        config: dict[str, Any] = {
            "federation": {"agents": job.agents, "per_round": job.per_round, "rounds": job.rounds},
            "model": {"name": "mnist-cnn"},
            "algorithm": {
                "name": "fedspa" if job.private else "fedavg",
                "compression": job.compression if job.private else 1.0,
                "local_steps": job.steps,
                "batch": job.batch,
                "local_lr": job.learning_rate,
                "server": "average",
            },
            "run": {
                "out": f"{out}/run",
                "engine": "native",
                "threads": job.processes,
                "checkpoint_every": job.rounds,
            },
        }
        if job.private:
            config["privacy"] = {
                "clip": job.clip,
                "clip_value": job.clip_value,
                "noise_multiplier": job.noise_multiplier,
                "noise": "secure",
            }
        result = fedspa.run(config, data=data, on_start=lambda *_: clock.restart(), on_round=lambda _: clock.tick())
    clock.report(result.summary["accuracy_last"])


if __name__ == "__main__":
    main()
