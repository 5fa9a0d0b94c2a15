"""Who can be in a sum: the server's own roster, and which node is which of its names.

A node says its name when it is asked, and nobody checks that it is true: whoever takes another's name has no keys that
fit, so that sums with it are void, and learns nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from logging import WARNING
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore import log

from fedspa.agent.member import played_keys
from fedspa.agent.participate import CODES
from fedspa.errors import ConfigError
from fedspa.flower.roster import Roster
from fedspa.flower.settings import FlowerSettings
from fedspa.randomness.streams import root_key
from fedspa.runs.setup import Job
from fedspa.secagg import roster as pinned


class Members:
    """Names and public keys of all agents, by their numbers. The server holds no secret of them."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        self._keys = dict(keys)
        self.names = tuple(self._keys)

    @property
    def digest(self) -> str:
        """Of the names in their order: of who has which number. Keys may change in a run's time."""
        return hashlib.sha256("\n".join(self.names).encode()).hexdigest()[:32]

    def number(self, name: str) -> int | None:
        return self.names.index(name) if name in self._keys else None

    def cohort(self, numbers: Iterable[int]) -> dict[str, bytes]:
        """Name → public key."""
        return {self.names[number]: self._keys[self.names[number]] for number in numbers}


def members_of(job: Job, settings: FlowerSettings) -> Members | None:
    """Of a run whose server sees sums only; None where it sees each update. Those of a deployment are in the server's
    roster, and a simulation's have keys that follow from its seed."""
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
        keys = played_keys(root_key("seeded", job.config.run.seed), range(agents))
        return Members({name: key.public for name, key in keys.items()})
    if settings.roster is None:
        raise ConfigError("flower.roster is missing; under secure aggregation it names the file of all sites' keys")
    roster = pinned.Roster.load(Path(settings.roster))
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

    def meet(self, grid: Grid, nodes: Iterable[int], roster: Roster) -> None:
        """Take in the names that were said, and ask those who are new."""
        online = set(nodes)
        for node in self.refused.keys() - online:  # it may come back mended
            del self.refused[node]
        self._listen(grid, roster, online)
        new = sorted(node for node in online if not roster.knows(node) and node not in self.refused)
        new = [node for node in new if node not in self._asked.values()]
        if not new:
            return
        content = RecordDict({"terms": self._record()})
        questions = [Message(content, dst_node_id=node, message_type="query", ttl=self._ttl) for node in new]
        self._asked |= {sent: node for sent, node in zip(grid.push_messages(questions), new) if sent}
        self._listen(grid, roster, online)

    def _listen(self, grid: Grid, roster: Roster, online: set[int]) -> None:
        if not self._asked:
            return
        for reply in grid.pull_messages(sorted(self._asked)):
            node = self._asked.pop(reply.metadata.reply_to_message_id, None)
            if node is None or reply.has_error():
                continue
            number, fault = self._read(reply.content)
            if number is not None and not roster.introduce(node, number, online):
                fault = "taken"
            if fault is not None:
                self.refused[node] = fault
                log(WARNING, "node %d is no member of this run (%s)", node, fault)

    def _read(self, content: RecordDict) -> tuple[int | None, str | None]:
        """The number of the member that a reply names, or what is wrong with it. Its text is never looked at."""
        record = content.get("member")
        if set(content) != {"member"} or not isinstance(record, ConfigRecord) or len(record) != 1:
            return None, "malformed"
        name, code = record.get("name"), record.get("refusal")
        if isinstance(name, str):
            number = self._members.number(name)
            return number, None if number is not None else "stranger"
        return None, code if isinstance(code, str) and code in CODES else "malformed"
