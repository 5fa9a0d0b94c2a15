"""The simulated federation: every agent of every round in this process, or in workers that it has (`workers`), through
the code that a deployment runs.

Each update is encoded to a payload and decoded again, so the bytes that are reported are the bytes that would travel,
and each participation is written into a ledger before it trains. Who takes part and (seeded) noise follow from the
seed; all else that a round leaves behind is in a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedspa.agent.member import played_key
from fedspa.agent.participate import Invitation, agent_name, participate, payloads
from fedspa.algorithms import Agent, Terms
from fedspa.algorithms.base import Answer, finite
from fedspa.engine.scores import Scores
from fedspa.engine.task import Engine, ReadsRows
from fedspa.errors import PayloadError
from fedspa.examples import Tree, leaves, mapped, taken
from fedspa.randomness.streams import agent_key
from fedspa.runs.metrics import RoundMetrics
from fedspa.runs.records import root_of
from fedspa.runs.run_ledger import RunLedger
from fedspa.runs.setup import Simulated
from fedspa.runs.summary import measured
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.message import encode
from fedspa.secagg.pads import residues
from fedspa.secagg.session import Session
from fedspa.server.coordinator import Coordinator, Diverged
from fedspa.server.intake import Intake
from fedspa.server.masked_intake import MaskedIntake

if TYPE_CHECKING:
    from fedspa.runs.ray_workers import WorkerPool

log = logging.getLogger(__name__)

CAP_USED_UP = "interrupted rounds had already used the agents' participation cap"


def simulate_uploads(invitation: Invitation, agents: Mapping[str, Agent], engine: Engine) -> dict[str, bytes]:
    """Return the agents' payloads by name: those of deployed agents, but for the pairwise masks of secure aggregation.

    The masks cancel in the sum, cost a keystream per pair of members, and hide nothing in a process that has all
    records. The message is as long, and is checked as strictly; a deployed agent has no way here (`participate_once`).
    A PayloadError where a value is not finite, by which divergence is noticed.
    """
    return payloads(invitation, agents, engine, finite, _encode_unmasked)


def _encode_unmasked(session: Session, name: str, agent: Agent, answer: Answer) -> bytes:
    return encode(residues(answer.values, session), session)


class Simulation:
    """Every agent of a federation, and the server that coordinates them."""

    def __init__(self, job: Simulated, server: Coordinator | None = None) -> None:
        self.job = job
        self.server = server if server is not None else Coordinator(job.server)
        # Every round's records are copied to one place: fresh pages cost more than the copying.
        self._room: list[Tensor] | None = None
        self._private = root_of(job.config)
        self._secrets: dict[int, SecretKey] = {}
        self._pool: WorkerPool | None = None

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Within it, rounds are trained by the workers that the config asks for, if it does."""
        if self.job.config.run.workers == 1:
            yield
            return
        from fedspa.runs.ray_workers import start_workers

        with start_workers(self.job) as self._pool:
            yield

    def round(self, cohort: list[int], accounts: RunLedger) -> RoundMetrics:
        """One pass of Algorithm 1's outer loop over the given agents."""
        job, terms = self.job.server, self.server.terms()
        attempt, present = accounts.turns(terms.round, cohort)
        if len(present) < len(cohort):
            log.warning(
                "round %d: %d of %d agents sit out: %s",
                *(terms.round + 1, len(cohort) - len(present), len(cohort), CAP_USED_UP),
            )
        noise, theta = self.job.config.privacy.noise, self.server.state.theta
        session = None
        if terms.plan is not None and terms.plan.aggregation is not None:
            if len(present) < (fewest := terms.plan.aggregation.members):
                log.warning(
                    "round %d: no sum, %d agents are left and it takes %d", terms.round + 1, len(present), fewest
                )
                accounts.skipped += len(present)
                self.server.close_round(None)
                return measured(self.job, self.server, accounts.guarantee, 0, 0)
            members = {agent_name(number): self._secret(number).public for number in present}
            session = self.server.session(accounts.run, attempt, members, terms, noise)
        intake: Intake | MaskedIntake = (
            self.server.intake(terms, len(present)) if session is None else self.server.masked_intake(terms, session)
        )
        models, engine = self.server.models, self.job.engine
        invitation = Invitation(accounts.run, job.algorithm, terms, theta, job.coding, noise, attempt, session, models)
        agents = {agent_name(agent.number): agent for agent in self._agents(present, terms)}
        if models is not None:
            engine = Scores(self.job.held_model, models)
        make = (
            partial(simulate_uploads, engine=engine) if self._pool is None or models is not None else self._pool.train
        )
        try:
            uploads = participate(invitation, agents, make, accounts.ledger, accounts.cap)
            for name, agent in agents.items():
                if isinstance(intake, MaskedIntake):
                    intake.take(name, uploads[name])
                else:
                    intake.take(uploads[name], seed=agent.mask_seed)
        except PayloadError as error:
            # Nobody lies in a simulation: an update that no server would take is what a diverged model gives.
            raise Diverged(terms.round, f"an update would be refused ({error})") from error
        accounts.took_part(present)
        void = self.server.close_round(intake)
        if void is not None:  # as rare as the plan's bound on an honest sum says
            log.warning("round %d gave no sum: %s", terms.round + 1, void)
            return measured(self.job, self.server, accounts.guarantee, 0, 0)
        return measured(self.job, self.server, accounts.guarantee, intake.count, intake.uplink_bytes)

    def _secret(self, number: int) -> SecretKey:
        """An agent's key under secure aggregation: with seeded noise the same in every process of the run."""
        if number not in self._secrets:
            self._secrets[number] = played_key(self._private, number)
        return self._secrets[number]

    def _agents(self, cohort: list[int], terms: Terms) -> list[Agent]:
        """The agents of a round, with their records: valid until the next round's are asked for."""
        holdings = [self.job.holdings[number] for number in cohort]
        together = np.concatenate([np.empty(0, np.int64), *holdings])
        train = self.job.examples(together)
        if self._pool is not None or isinstance(self.job.engine, ReadsRows):
            return [
                self._agent(number, terms, *train, torch.from_numpy(rows)) for number, rows in zip(cohort, holdings)
            ]
        held = torch.from_numpy(together)
        if self._room is None or len(self._room[0]) < len(held):
            self._room = [leaf.new_empty(len(held), *leaf.shape[1:]) for tree in train for leaf in leaves(tree)]
        rooms = iter(self._room)
        x, y = (
            mapped(lambda leaf: torch.index_select(leaf, 0, held, out=next(rooms)[: len(held)]), tree) for tree in train
        )
        ends = np.cumsum([len(holding) for holding in holdings]).tolist()
        own = [slice(end - len(holding), end) for end, holding in zip(ends, holdings)]
        return [self._agent(number, terms, taken(x, place), taken(y, place)) for number, place in zip(cohort, own)]

    def _agent(self, number: int, terms: Terms, x: Tree, y: Tree, rows: Tensor | None = None) -> Agent:
        return Agent(
            number=number,
            x=x,
            y=y,
            mask_seed=self.server.mask_seed(terms, number),
            key=agent_key(self._private, terms.round, number),
            exact=self.job.config.privacy.noise == "exact",
            rows=rows,
        )
