"""Flower's side of an agent, in a module of its own: Ray's actors import it by name."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from peer_job import Trainer, read


@cache
def trainer(folder: Path) -> Trainer:
    """One an actor: its process serves many clients and keeps net and records between messages."""
    return Trainer(read(folder), folder, seed=os.getpid())


def client(folder: Path) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        mine = trainer(folder)
        mine.module.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        mine.train(int(context.node_config["partition-id"]))
        content = RecordDict(
            {
                "arrays": ArrayRecord(mine.module.state_dict()),
                "metrics": MetricRecord({"num-examples": mine.job.records}),
            }
        )
        return Message(content=content, reply_to=message)

    return app
