"""A federation in one process: a Grid that calls the ClientApp of each node, with faults on request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedspa.flower.client_app import app

# node, question, honest answer → what arrives instead
Fault = Callable[[int, Message, Callable[[], Message]], list[Message]]


class LocalGrid(Grid):
    """Nodes 100, 101, …: each message is answered at once, in the order of the nodes' numbers."""

    def __init__(self, nodes: Mapping[int, Mapping[str, Any]], run_config: Mapping[str, Any]) -> None:
        self.nodes = dict(nodes)
        self.online = set(nodes)
        self.run_config = dict(run_config)
        self.fault: Fault = lambda node, message, answer: [answer()]
        self.notices = True  # like the SuperLink, say at once that a node is lost; without it, waiting takes its time
        self.sent: list[Message] = []
        self.replies: list[Message] = []
        self._run = Run.create_empty(1)
        self._waiting: dict[str, list[Message]] = {}
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

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
        return sorted(self.online)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            name = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            node = message.metadata.dst_node_id
            arrived = self.fault(node, message, lambda m=message: self.answer(m)) if node in self.online else []
            self._waiting[name] = arrived or ([self._notice(message)] if self.notices else [])
            names.append(name)
        return names

    def _notice(self, message: Message) -> Message:
        notice = Message(Error(5, "node unavailable"), reply_to=message)
        notice.metadata.__dict__["_src_node_id"] = 1
        return notice

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = [reply for name in message_ids for reply in self._waiting.pop(name, [])]
        self.replies += found
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def answer(self, message: Message) -> Message:
        """What the node's own ClientApp says."""
        node = message.metadata.dst_node_id
        context = Context(
            run_id=1, node_id=node, node_config=dict(self.nodes[node]), state=RecordDict(), run_config=self.run_config
        )
        reply = app(message, context)
        assert not list(context.state)  # nothing is left in Flower's memory
        return reply


SIMULATION: dict[str, Any] = {
    "federation.agents": 4,
    "federation.rounds": 3,
    "federation.per_round": 3,
    "algorithm.compression": 0.2,
    "algorithm.local_steps": 4,
    "algorithm.batch": 20,
    "algorithm.local_lr": 1.0,
    "algorithm.server": "average",
    "privacy.noise_multiplier": 1.5,
    "privacy.noise": "seeded",
    "privacy.delta": 1e-3,
    "privacy.clip_value": 0.3,
    "flower.round_timeout": 20.0,
    "flower.start_timeout": 0.1,
    "flower.poll": 0.01,
    "flower.quorum": 1,
}
# The same with real agents: noise from the operating system, at least 100 records each.
DEPLOYMENT: dict[str, Any] = SIMULATION | {
    "privacy.noise": "secure",
    "flower.records": 100,
    "federation.per_round": 4,
}

POLICY = """
epsilon = {epsilon}
delta = 1e-3
neighbours = "add-remove"
min_noise_multiplier = 0.8
max_local_steps = 50
max_rounds = 10
max_compression = 0.5
clippings = ["l2"]
"""
