"""Flower's grid with quicker ears: replies are fetched as they come, and waiting has an end.

Stock grids sleep 3 s between looks. Replies that come after their round was closed are fetched too, counted and thrown
away, so that they do not pile up in the SuperLink.

Each question's reply is fetched by itself. Flower makes a message of what a node stored, here in the server's process,
and raises where that is none: fetched together, one node's bytes would take all others' replies with them. And who sent
a reply stands in those bytes, too. The SuperLink vouches only for which question it belongs to, so a reply that names
another node than the one that was asked is nobody's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from logging import WARNING

import httpx
from flwr.app import Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore import log
from flwr.supercore.run import Run


class PollingGrid(Grid):
    """Wraps the grid of a ServerApp. `poll` is the time between two looks, in seconds."""

    def __init__(self, grid: Grid, poll: float) -> None:
        self._grid = grid
        self._poll = poll
        self._asked: dict[str, int] = {}  # message → node, of those without a reply
        self._overdue: set[str] = set()
        self.unused: Counter[str] = Counter()  # replies that nobody is shown, by why

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
        questions = list(messages)
        names = list(self._grid.push_messages(questions))
        # Pushing gave each its name. A grid may leave out those that did not go, so that places do not tell.
        nodes = {question.metadata.message_id: question.metadata.dst_node_id for question in questions}
        self._asked |= {name: nodes[name] for name in names if name}
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that came. Those that cannot be read are left out, and are not waited for again."""
        return [reply for name in message_ids if name in self._asked for reply in self._pulled(name)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push, then pull until every message has its reply or `timeout` seconds are over."""
        waiting = {sent for sent in self.push_messages(messages) if sent}
        end = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting:
            began = time.monotonic()
            replies += self.pull_messages(sorted(waiting))
            waiting &= self._asked.keys()
            if not waiting or (end is not None and time.monotonic() >= end):
                break
            time.sleep(max(self._poll, time.monotonic() - began))  # of many nodes, a look takes its time
        self._drop_late()
        self._overdue |= waiting
        return replies

    def _pulled(self, name: str) -> list[Message]:
        """The reply to one question, if it came and is what its node may say."""
        node = self._asked[name]
        try:
            found = list(self._grid.pull_messages([name]))
            own = [reply for reply in found if _is_of(reply, name, node)]
        except (httpx.HTTPError, OSError):  # the SuperLink's, and no node's
            raise
        except Exception as error:  # whatever Flower makes of foreign bytes; what it says of them may be theirs
            log(WARNING, "the reply of node %d cannot be read (%s)", node, type(error).__name__)
            self.unused["unreadable"] += 1
            del self._asked[name]
            return []
        if found:
            del self._asked[name]
        if len(own) < len(found):
            log(WARNING, "the reply of node %d says that it is another's", node)
            self.unused["stranger"] += len(found) - len(own)
        return own

    def _drop_late(self) -> None:
        # What Flower makes up for a node that is gone is no reply of anyone.
        if late := sum(reply.has_content() for reply in self.pull_messages(sorted(self._overdue))):
            self.unused["late"] += late
        self._overdue &= self._asked.keys()


def _is_of(reply: Message, name: str, node: int) -> bool:
    """Whether it says that it is what `node` answers to the message `name`, or that the SuperLink heard nobody."""
    if reply.has_content() and not isinstance(reply.content, RecordDict):
        raise TypeError
    told, notice = reply.metadata, reply.has_error() and reply.metadata.src_node_id == SUPERLINK_NODE_ID
    return told.reply_to_message_id == name and (told.src_node_id == node or notice)
