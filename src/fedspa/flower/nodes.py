"""What the server knows of its nodes: which agent each is, who refused or falls silent, what each was asked, and the
grid by which it asks.

Under secure aggregation a node says its name when it is asked, and nobody checks that it is true: a node that
takes another's name does not have the matching keys, so that sums with it are void, and it learns nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from logging import WARNING
from pathlib import Path
from typing import Any

import httpx
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp import Grid
from flwr.supercore import log

from fedspa import durable
from fedspa.agent.participate import CODES, simulated_keys
from fedspa.errors import ConfigError, FedspaError, os_errors_as
from fedspa.flower.settings import FlowerSettings
from fedspa.randomness.streams import root_key
from fedspa.runs.rundir import read_asked
from fedspa.runs.setup import Job
from fedspa.secagg.keys import Roster


class NodeRegistry:
    """Node registry: numbers 0 … agents − 1 for Flower's node ids, given once and kept over restarts, refusals, and
    exponential back-off for unresponsive agents.

    An authenticated node keeps its id when it comes back; one without a key comes back as a stranger, and gets a number
    only while some are free. Where agents are `named`, nobody gets a number before it was introduced.
    """

    def __init__(self, agents: int, *, named: bool = False) -> None:
        self._agents, self._named = agents, named
        self._numbers: dict[int, int] = {}
        self._online: dict[int, int] = {}
        self.refused: dict[int, str] = {}
        # Agent → how often in a row it was asked and did not answer, and how many of its turns it is still left out of.
        self._silent: dict[int, tuple[int, int]] = {}

    def meet(self, nodes: Iterable[int]) -> int:
        """Note who is online; newcomers get the free numbers in the order of their ids. Returns how many are there."""
        online = sorted(nodes)
        for node in online:
            if not self._named and node not in self._numbers and len(self._numbers) < self._agents:
                self._numbers[node] = len(self._numbers)
        before, self._online = self._online, {self._numbers[node]: node for node in online if node in self._numbers}
        for number in self._online.keys() - before.keys():
            self.mark_responsive(number)  # a node that comes back was started anew
        return len(self._online)

    def knows(self, node: int) -> bool:
        return node in self._numbers

    def introduce(self, node: int, number: int, online: Collection[int]) -> bool:
        """Note that `node` is agent `number`, unless another one is that is there. Whether it was noted."""
        others = [other for other, taken in self._numbers.items() if taken == number and other != node]
        if any(other in online for other in others):
            return False
        for other in others:
            del self._numbers[other]
        self._numbers[node] = number
        return True

    @property
    def known(self) -> int:
        """Return how many numbers were given."""
        return len(self._numbers)

    def not_refused(self, cohort: Iterable[int]) -> list[int]:
        """Return the agents of `cohort` that did not refuse for good, online or not."""
        return [number for number in cohort if number not in self.refused]

    def mark_responsive(self, number: int) -> None:
        """Note that the agent answered."""
        self._silent.pop(number, None)

    def mark_silent(self, number: int) -> int:
        """It was asked and did not answer, which cost everyone the round's time. It is left out of its next turn, after
        another silence of three, then of seven …; returns of how many."""
        times = self._silent.get(number, (0, 0))[0] + 1
        turns = (1 << min(times, 30)) - 1
        self._silent[number] = (times, turns)
        return turns

    def is_backing_off(self, number: int) -> bool:
        """Return whether it is left out of this turn for its silence."""
        return self._silent.get(number, (0, 0))[1] > 0

    def skip_turn(self, number: int) -> None:
        """Count one skipped turn of the agent's back-off."""
        times, turns = self._silent[number]
        self._silent[number] = (times, turns - 1)

    def reachable(self, cohort: Iterable[int]) -> dict[int, int]:
        """Node id → number, of those of `cohort` who are willing and online."""
        return {self._online[number]: number for number in self.not_refused(cohort) if number in self._online}

    def to_json(self) -> dict[str, Any]:
        # As texts: node ids have 64 bits, and not every reader of JSON keeps them.
        return {
            "nodes": {str(node): number for node, number in self._numbers.items()},
            "refused": {str(number): code for number, code in self.refused.items()},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._numbers = {int(node): int(number) for node, number in saved["nodes"].items()}
        self.refused = {int(number): str(code) for number, code in saved["refused"].items()}


class RequestLog:
    """The file asked.jsonl of a run's folder: one line a question, {"round": t, "agents": [numbers]}, with "attempt"
    where it is not the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: set[tuple[int, int, int]] = set()  # round, attempt, agent
        self._last: dict[int, tuple[int, list[int]]] = {}
        self._counts: Counter[int] = Counter()
        with self._one_line_errors("read"):
            self._read()

    def add(self, round_: int, agents: list[int], attempt: int = 1) -> list[int]:
        """Durable on return. Gives those for whom this attempt is a new participation."""
        line = {"round": round_, "agents": agents} | ({} if attempt == 1 else {"attempt": attempt})
        with self._one_line_errors("written"):
            new = not self._path.exists()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            if new:
                durable.force_folder(self._path.parent)
        return self._note(round_, attempt, agents)

    def last(self, round_: int) -> tuple[int, list[int]] | None:
        """The last attempt at this round and whom it asked. Later rounds may have been asked since: a server that lost
        its newest checkpoint comes back to rounds that were done."""
        return self._last.get(round_)

    def count(self, agent: int) -> int:
        """Return in how many attempts `agent` was asked."""
        return self._counts[agent]

    @property
    def counts(self) -> dict[str, int]:
        """`count` of everyone who was ever asked, for a checkpoint."""
        return {str(number): times for number, times in sorted(self._counts.items())}

    def require(self, counts: Mapping[str, int]) -> None:
        """Raise where a checkpoint knows of more than this file does."""
        for number, times in counts.items():
            found = self.count(int(number))
            if found < times:
                raise FedspaError(
                    f"{self._path} names agent {number} in {found} rounds, the checkpoint in {times}: "
                    "it is an old copy, or lines are lost; put the newest one back"
                )

    def was(self, round_: int, agent: int, attempt: int = 1) -> bool:
        return (round_, attempt, agent) in self._seen

    def _note(self, round_: int, attempt: int, agents: list[int]) -> list[int]:
        fresh = [number for number in agents if (round_, attempt, number) not in self._seen]
        self._seen |= {(round_, attempt, number) for number in fresh}
        self._counts.update(fresh)
        self._last[round_] = attempt, agents
        return fresh

    def _read(self) -> None:
        for round_, attempt, agents in read_asked(self._path):
            self._note(round_, attempt, agents)
        whole, end, torn = self._path.read_bytes().rpartition(b"\n") if self._path.exists() else (b"", b"", b"")
        if torn:  # cut short by a crash: what it would have announced was never sent
            durable.replace_text(self._path, (whole + end).decode())

    def _one_line_errors(self, done: str) -> AbstractContextManager[None]:
        return os_errors_as(FedspaError, f"{self._path} cannot be {done}", "fix that, then resume")


class Members(dict[str, bytes]):
    """Names and public keys of all agents, in the order of their numbers. The server holds no secret of them."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        super().__init__(keys)
        self.names = tuple(keys)

    @property
    def digest(self) -> str:
        """Return a digest of the names in their order, which gives the numbers. Keys may change during a run."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:32]


def members_of(job: Job, settings: FlowerSettings) -> Members | None:
    """Return the members of a run whose server sees sums only; None if it sees each update. Those of a deployment are
    in the server's roster, and a simulation's have keys that follow from its seed."""
    agents = job.config.federation.agents
    if job.plan is None or job.plan.aggregation is None:
        if settings.roster is not None:
            raise ConfigError("flower.roster is for privacy.adversary = 'secure-aggregation': leave it out")
        return None
    if settings.quorum is not None:
        raise ConfigError(
            f"flower.quorum is {settings.quorum}; a sum needs its whole cohort, and privacy.members says how small "
            "that may be: leave it out"
        )
    if settings.records is None:
        if settings.roster is not None:
            raise ConfigError("flower.roster is for a deployment; a simulation's keys follow from its seed")
        keys = simulated_keys(root_key("seeded", job.config.run.seed), range(agents))
        return Members({name: key.public for name, key in keys.items()})
    if settings.roster is None:
        raise ConfigError("flower.roster is missing; under secure aggregation it names the file of all sites' keys")
    roster = Roster.load(Path(settings.roster))
    if len(roster.members) != agents:
        raise ConfigError(
            f"federation.agents is {agents}, and {settings.roster} has {len(roster.members)} members; make them equal"
        )
    return Members(roster.members)


class Introductions:
    """Asks each node that comes once for its name, and waits for nobody. `record` gives the terms of the run, so that
    who would not take part says so before a round counts on it."""

    def __init__(self, members: Members, record: Callable[[], ConfigRecord], ttl: float) -> None:
        self._members, self._record, self._ttl = members, record, ttl
        self._asked: dict[str, int] = {}  # message → node
        self.refused: dict[int, str] = {}

    def meet(self, grid: PollingGrid, nodes: Iterable[int], known: NodeRegistry) -> None:
        """Take in the names that were said, and ask those who are new."""
        online = set(nodes)
        for node in self.refused.keys() - online:  # it may come back fixed
            del self.refused[node]
        self._listen(grid, known, online)
        new = sorted(node for node in online if not known.knows(node) and node not in self.refused)
        new = [node for node in new if node not in self._asked.values()]
        if not new:
            return
        content = RecordDict({"terms": self._record()})
        questions = [Message(content, dst_node_id=node, message_type="query", ttl=self._ttl) for node in new]
        self._asked |= {sent: node for sent, node in zip(grid.push_messages(questions), new) if sent}
        self._listen(grid, known, online)

    def _listen(self, grid: PollingGrid, known: NodeRegistry, online: set[int]) -> None:
        if not self._asked:
            return
        for reply in grid.pull_messages(sorted(self._asked)):
            node = self._asked.pop(reply.metadata.reply_to_message_id, None)
            if node is None or reply.has_error():
                continue
            number, fault = self._read(reply.content)
            if number is not None and not known.introduce(node, number, online):
                fault = "taken"
            if fault is not None:
                self.refused[node] = fault
                log(WARNING, "node %d is no member of this run (%s)", node, fault)

    def _read(self, content: RecordDict) -> tuple[int | None, str | None]:
        """Return the number of the member that a reply names, or what is wrong with it. Its text is never looked at."""
        record = content.get("member")
        if set(content) != {"member"} or not isinstance(record, ConfigRecord) or len(record) != 1:
            return None, "malformed"
        name, code = record.get("name"), record.get("refusal")
        if isinstance(name, str):
            return (self._members.names.index(name), None) if name in self._members else (None, "stranger")
        return None, code if isinstance(code, str) and code in CODES else "malformed"


_FIRST_PAUSE = 0.01  # seconds; each pause is twice the last, up to `poll`: a simulation's nodes answer at once


class PollingGrid:
    """Wraps the grid of a ServerApp, whose replies it checks one by one. `poll` is the time between two looks, in
    seconds."""

    def __init__(self, grid: Grid, poll: float) -> None:
        self._grid = grid
        self._poll = poll
        self._asked: dict[str, int] = {}  # message → node, of those without a reply
        self._overdue: set[str] = set()
        self.unused: Counter[str] = Counter()  # replies that nobody is shown, by why

    def get_node_ids(self) -> Iterable[int]:
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        questions = list(messages)
        names = list(self._grid.push_messages(questions))
        # Pushing gave each its name. A grid may leave out those that did not go, so that places do not tell.
        nodes = {question.metadata.message_id: question.metadata.dst_node_id for question in questions}
        self._asked |= {name: nodes[name] for name in names if name}
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that came. Those that cannot be read are left out, and are not waited for again."""
        return [reply for name in message_ids if name in self._asked for reply in self._pulled(name)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push, then pull until every message has its reply or `timeout` seconds are over: at first often, then every
        `poll` seconds."""
        waiting = {sent for sent in self.push_messages(messages) if sent}
        end = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        pause = min(_FIRST_PAUSE, self._poll)
        while waiting:
            began = time.monotonic()
            replies += self.pull_messages(sorted(waiting))
            waiting &= self._asked.keys()
            if not waiting or (end is not None and time.monotonic() >= end):
                break
            time.sleep(max(pause, time.monotonic() - began))  # of many nodes, a look takes its time
            pause = min(2 * pause, self._poll)
        self._drop_late()
        self._overdue |= waiting
        return replies

    def _pulled(self, name: str) -> list[Message]:
        """Return the reply to one question, if it came and is what its node may say."""
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
    sender, notice = reply.metadata, reply.has_error() and reply.metadata.src_node_id == SUPERLINK_NODE_ID
    return sender.reply_to_message_id == name and (sender.src_node_id == node or notice)
