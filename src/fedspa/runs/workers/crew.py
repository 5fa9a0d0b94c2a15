"""A crew of workers: who trains whom, what travels to them, and what happens where one is lost.

A round's agents are dealt out by their expected work and by how fast each worker has been. A worker gets half of what
waits for it at a time, and one that has nothing left takes over what waits for another. An agent's records lie with one
worker and move only with the agent. The share of a lost worker goes back to the queue, and a new one takes its place.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch

from fedspa.agent.participate import Invitation
from fedspa.algorithms import Agent
from fedspa.errors import FedspaError, first_line
from fedspa.runs.checkpoint import Fact
from fedspa.runs.workers.deal import MOST, Queue, deal, next_share
from fedspa.runs.workers.messages import Share, Trained, Turn, answered, packed
from fedspa.runs.workers.pool import Hand, Pool

log = logging.getLogger(__name__)

MOST_LOSSES = 3  # of one agent in a round, or of one place in a crew before it has trained anything
START_SECONDS = 120.0


class WorkersLost(FedspaError):
    """Workers end as often as they are started, or none can be started."""


@dataclass(slots=True)
class Traffic:
    """Bytes that a crew has sent and got: θ with the round's terms, who trains with which key, records, and answers."""

    rounds: int = 0
    records: int = 0
    shares: int = 0
    answers: int = 0


@dataclass(slots=True, eq=False)
class Member:
    """A place in the crew: the process that fills it, what it holds, and what it is doing."""

    hand: Hand
    starting: Future[bytes] | None
    queue: Queue = field(default_factory=Queue)
    holds: set[str] = field(default_factory=set)
    forget: set[str] = field(default_factory=set)
    told: bool = False  # of this round
    share: list[str] = field(default_factory=list)
    doing: Future[bytes] | None = None
    since: float = 0.0
    losses: int = 0  # since it last trained

    @property
    def idle(self) -> bool:
        return self.queue.open and self.doing is None


class Crew:
    def __init__(
        self,
        pool: Pool,
        workers: int,
        made: bytes,
        at_once: int | None,
        fits: Callable[[Mapping[str, Fact]], None] = lambda about: None,
    ) -> None:
        """`made` is a packed `messages.Made`. A worker's engine trains `at_once` agents together, or, with None, all
        that it is given. `fits` raises where what a worker says of its machine does not go with the run."""
        self._pool, self._made, self._at_once, self._fits = pool, pool.publish(made), at_once, fits
        self.traffic = Traffic()
        self.lost = 0  # workers, so far
        self._home: dict[str, Member] = {}
        self._members: list[Member] = []
        try:
            self._members += [self._hired(pool.hire()) for _ in range(workers)]
            self._await_all()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for member in self._members:
            member.hand.end()
        self._members = []

    def train(self, invitation: Invitation, agents: Mapping[str, Agent]) -> dict[str, bytes]:
        """Every agent's payload, in their order. A crew that did not end a round begins no other."""
        try:
            return self._train(invitation, agents)
        except BaseException:
            self.close()
            raise

    def _train(self, invitation: Invitation, agents: Mapping[str, Agent]) -> dict[str, bytes]:
        theta = invitation.theta.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        content = packed(replace(invitation, theta=theta))
        announced = self._pool.publish(content)
        work = {name: agent.records * invitation.terms.steps.local_steps for name, agent in agents.items()}
        deal(work, {name: member.queue for name, member in self._home.items()}, [m.queue for m in self._members])
        for member in self._members:
            member.told = False
        made: dict[str, bytes] = {}
        losses: Counter[str] = Counter()
        while len(made) < len(agents):
            for member in self._members:
                if member.idle and (names := next_share(member.queue, self._queues(), self._at_once)):
                    self._send(member, names, agents, announced, content)
            for member, answer in self._next_answers():
                if answer is None:
                    self._replace(member, losses)
                    continue
                trained: Trained = answered(answer)
                self.traffic.answers += len(answer)
                member.queue.measured(member.share, time.monotonic() - member.since)
                member.share, member.losses = [], 0
                for name, level, text in trained.said:
                    logging.getLogger(name).log(level, "%s", text)
                made |= trained.payloads
        return {name: made[name] for name in agents}

    def _queues(self) -> list[Queue]:
        return [member.queue for member in self._members]

    def _send(
        self, member: Member, names: list[str], agents: Mapping[str, Agent], announced: Any, content: bytes
    ) -> None:
        turns, records = {}, {}
        for name in names:
            agent = agents[name]
            turns[name] = Turn(agent.number, agent.mask_seed, agent.key, agent.exact)
            if name not in member.holds:
                records[name] = agent.take(torch.arange(agent.records))
                if (before := self._home.get(name)) is not None:
                    before.holds.discard(name)
                    before.forget.add(name)
            self._home[name] = member
        member.holds |= turns.keys()
        member.forget -= turns.keys()
        forget = tuple(islice(member.forget, MOST))
        member.forget.difference_update(forget)
        share, lacking = packed(Share(turns, forget)), packed(records)
        self.traffic.shares += len(share)
        self.traffic.records += len(lacking) if records else 0
        self.traffic.rounds += 0 if member.told else len(content)
        member.share, member.since = names, time.monotonic()
        member.doing = member.hand.work(None if member.told else announced, share, lacking)
        member.told = True

    def _next_answers(self) -> list[tuple[Member, bytes | None]]:
        """Of members that have trained a share, or None of those that were lost; those that are ready join in."""
        working = [member for member in self._members if member.doing is not None]
        starting = [member for member in self._members if member.starting is not None]
        if not working and not starting:
            raise WorkersLost(
                f"no worker is left: each of the {len(self._members)} places lost {MOST_LOSSES} in a row; look for "
                "memory that ran out (fewer run.workers or run.threads, a smaller algorithm.batch), then --resume"
            )
        waited = [
            future for member in self._members for future in (member.starting, member.doing) if future is not None
        ]
        done, _ = wait(waited, timeout=None if working else START_SECONDS, return_when=FIRST_COMPLETED)
        if not done:
            raise WorkersLost(
                f"no worker came up within {START_SECONDS:.0f} s: {self._pool.room}; lower run.workers or run.threads, "
                "or wait until others are done, then --resume"
            )
        answers: list[tuple[Member, bytes | None]] = []
        for member in starting:
            if member.starting in done:
                self._joined(member)
        for member in working:
            if member.doing in done:
                answers.append((member, self._result(member.doing)))
                member.doing = None
        return answers

    def _result(self, future: Future[bytes]) -> bytes | None:
        """None where whoever was to answer is lost."""
        try:
            return future.result()
        except self._pool.lost as error:
            log.debug("a worker was lost: %s", first_line(error))
            return None

    def _hired(self, hand: Hand) -> Member:
        return Member(hand, hand.start(self._made))

    def _await_all(self) -> None:
        """A run begins with the workers it asked for."""
        end = time.monotonic() + START_SECONDS
        while waited := [member.starting for member in self._members if member.starting is not None]:
            done, _ = wait(waited, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_COMPLETED)
            if not done:
                raise WorkersLost(
                    f"{len(self._members) - len(waited)} of {len(self._members)} workers came up within "
                    f"{START_SECONDS:.0f} s: {self._pool.room}; lower run.workers or run.threads, or wait until others "
                    "are done"
                )
            for member in self._members:
                if member.starting in done:
                    self._joined(member)
            if all(member.losses >= MOST_LOSSES for member in self._members):
                raise WorkersLost("every worker ended as it was started; look for memory that ran out")

    def _joined(self, member: Member) -> None:
        assert member.starting is not None
        answer = self._result(member.starting)
        member.starting = None
        if answer is None:
            self._replace(member, Counter())
        else:
            self._fits(answered(answer))
            member.queue.open = True

    def _replace(self, member: Member, losses: Counter[str]) -> None:
        """The share goes back to the queue; a new process, which holds nothing, takes the place."""
        self.lost += 1
        member.losses += 1
        losses.update(member.share)
        if member.share and max(losses[name] for name in member.share) >= MOST_LOSSES:
            raise WorkersLost(
                f"{MOST_LOSSES} workers were lost while they trained {', '.join(member.share[:3])}"
                f"{' and others' * (len(member.share) > 3)}; look for memory that ran out (fewer run.workers or "
                "run.threads, a smaller algorithm.batch), then --resume"
            )
        log.warning(
            "a worker was lost%s", f" with {len(member.share)} agents: they are trained again" * bool(member.share)
        )
        member.queue.back(member.share)
        member.queue.open = False
        for name in member.holds:
            self._home.pop(name, None)
        member.share, member.holds, member.forget, member.told = [], set(), set(), False
        member.hand.end()
        if member.losses < MOST_LOSSES:
            member.hand = self._pool.hire()
            member.starting = member.hand.start(self._made)
