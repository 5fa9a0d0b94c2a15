"""Flower's grid with quicker ears: replies are fetched as they come, and waiting has an end.

Stock grids sleep 3 s between looks. Replies that come after their round was closed are fetched too, counted and thrown
away, so that they do not pile up in the SuperLink.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.run import Run


class PollingGrid(Grid):
    """Wraps the grid of a ServerApp. `poll` is the time between two looks, in seconds."""

    def __init__(self, grid: Grid, poll: float) -> None:
        self._grid = grid
        self._poll = poll
        self._overdue: set[str] = set()
        self.late = 0

    def set_run(self, run: Run) -> None:
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[NodeInfo]:
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push, then pull until every message has its reply or `timeout` seconds are over."""
        waiting = {sent for sent in self._grid.push_messages(list(messages)) if sent}
        end = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting:
            fetched = list(self._grid.pull_messages(sorted(waiting)))
            replies += fetched
            waiting -= {reply.metadata.reply_to_message_id for reply in fetched}
            if not waiting or (end is not None and time.monotonic() >= end):
                break
            time.sleep(self._poll)
        self._drop_late()
        self._overdue |= waiting
        return replies

    def _drop_late(self) -> None:
        if not self._overdue:
            return
        fetched = list(self._grid.pull_messages(sorted(self._overdue)))
        self._overdue -= {reply.metadata.reply_to_message_id for reply in fetched}
        # What Flower makes up for a node that is gone is no reply of anyone.
        self.late += sum(reply.has_content() for reply in fetched)
