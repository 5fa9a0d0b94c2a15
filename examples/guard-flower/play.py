"""Three sites and a server in one process: each message is handed to the ClientApp that a SuperNode would load."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from stock.client_app import app
from stock.server_app import trained

import fedspa

POLICY = """
epsilon = {epsilon}                 # over all that is ever done with these records
delta = 1e-4
neighbours = "add-remove"
min_noise_multiplier = 5.0
max_local_steps = 5
max_rounds = 5
max_compression = 1.0
clippings = ["l2"]
"""
SITES = {"north": 4.0, "south": 4.0, "west": 1.1}  # and the most that their records may ever pay


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    logging.basicConfig(format="  %(message)s")  # what the sites' own logs have
    nodes = {}
    for number, (name, epsilon) in enumerate(SITES.items()):
        ledger, policy = Path(f"{name}.sqlite"), Path(f"{name}.toml")
        if not ledger.exists():
            fedspa.guard.create(ledger)
        policy.write_text(POLICY.format(epsilon=epsilon))
        nodes[number] = {"partition-id": number, "agent": name, "ledger": str(ledger), "policy": str(policy)}
    grid = InProcess(nodes)
    result = trained(grid, rounds=5)
    (weights,) = result.arrays.to_numpy_ndarrays()
    print("weights", np.round(weights / np.linalg.norm(weights), 2))
    for node in nodes.values():
        print(fedspa.guard.open(node["ledger"], agent=str(node["agent"]), policy=str(node["policy"])))


class InProcess(Grid):
    """Flower's link between a server and its nodes, without the link."""

    def __init__(self, nodes: dict[int, dict[str, str | int]]) -> None:
        self.nodes, self.replies = nodes, dict[str, Message]()
        self._run = Run.create_empty(secrets.randbits(32))
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, self._run.run_id, 1

    def set_run(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            node = message.metadata.dst_node_id
            names.append(f"message-{len(self.replies)}")
            message.metadata.__dict__["_message_id"] = names[-1]
            context = Context(
                run_id=self._run.run_id,
                node_id=node,
                node_config=dict(self.nodes[node]),
                state=RecordDict(),
                run_config={},
            )
            self.replies[names[-1]] = reply = app(message, context)
            kind, site = message.metadata.message_type, self.nodes[node]["agent"]
            print(f"{site} {kind}: {reply.error.reason if reply.has_error() else 'answered'}")
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies[name] for name in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


if __name__ == "__main__":
    main()
