"""The transport within a process: every agent of a simulated federation, here or on Ray's workers, through the code
that a deployment runs.

Each update is encoded to a payload and decoded again, so the bytes that are reported are the bytes that would travel,
and each participation is written into a ledger before it trains. Who takes part and (seeded) noise follow from the
seed; everything else that a round leaves behind is in a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedspa.agent.participate import Request, agent_name, encode_answer, pay, release, respond, simulated_key
from fedspa.algorithms import Agent
from fedspa.algorithms.base import Answer, finite
from fedspa.engine.local import Engine
from fedspa.engine.per_example import Scores
from fedspa.errors import PayloadError
from fedspa.randomness.streams import agent_key
from fedspa.runs.guarantee import Guarantee, LedgerTotal
from fedspa.runs.run_ledger import RunLedger
from fedspa.runs.rundir import RoundMetrics
from fedspa.runs.setup import Simulated, root_of
from fedspa.secagg.keys import SecretKey
from fedspa.secagg.masking import Void, encode, residues, sealed_bytes
from fedspa.secagg.recovery import exchange_bytes
from fedspa.server.coordinator import Diverged
from fedspa.server.intake import MaskedIntake

if TYPE_CHECKING:
    from fedspa.runs.ray_workers import WorkerPool

log = logging.getLogger(__name__)

CAP_USED_UP = "interrupted rounds had already used the agents' participation cap"


def simulate_uploads(request: Request, agents: Mapping[str, Agent], engine: Engine) -> dict[str, bytes]:
    """Return the agents' payloads by name: those of deployed agents, but for the pairwise masks of secure aggregation.

    The masks cancel in the sum, cost a keystream per pair of members, and hide nothing in a process that has all
    records. The message is as long, and is checked as strictly. A deployed agent answers through `participate_once`,
    which always masks.

    Raises:
        PayloadError: A value is not finite: the model diverged.
    """
    encoded = encode_answer if request.session is None else _encode_unmasked
    answers = respond(request, agents, engine)
    return {name: encoded(request, name, agents[name], finite(answer)) for name, answer in answers}


def _encode_unmasked(request: Request, name: str, agent: Agent, answer: Answer) -> bytes:
    assert request.session is not None
    return encode(residues(answer.values, request.session), request.session, bytes(sealed_bytes(request.session)))


class LocalTransport:
    """Every agent of a simulation. Rounds are trained in this process, or by the workers of `pool`.

    Without `accounts` nothing is paid for and nothing is counted: only for records that nobody was promised anything
    about, and for tests.
    """

    quorum = 1

    def __init__(self, job: Simulated, accounts: RunLedger | None = None, pool: WorkerPool | None = None) -> None:
        self.job, self._accounts, self._pool = job, accounts, pool
        self.run = "unpaid" if accounts is None else accounts.run
        self._private = root_of(job.config)
        self._secrets: dict[int, SecretKey] = {}

    @property
    def guarantee(self) -> Guarantee | None:
        return None if self._accounts is None else self._accounts.guarantee

    def begin(self, history: Sequence[RoundMetrics]) -> None:
        """Count what a resumed run spent before."""
        if self._accounts is not None and self._accounts.resumed:
            uploads = sum(metrics.agents for metrics in history)
            self._accounts.catch_up(islice(self.job.cohorts(), len(history)), uploads)

    def select(self, t: int, cohort: Sequence[int]) -> tuple[int, list[int]]:
        """Leave out agents that have used up their participations. A sum with too few members asks nobody."""
        if self._accounts is None:
            return 1, list(cohort)
        attempt, present = self._accounts.turns(t, cohort)
        if len(present) < len(cohort):
            missing = len(cohort) - len(present)
            log.warning("round %d: %d of %d agents sit out: %s", t + 1, missing, len(cohort), CAP_USED_UP)
        plan = self.job.plan
        if plan is not None and plan.aggregation is not None and len(present) < plan.aggregation.members:
            log.warning(
                "round %d: no sum: %d agents are left, and %d are needed", t + 1, len(present), plan.aggregation.members
            )
            self._accounts.skipped += len(present)
            return attempt, []
        return attempt, present

    def name(self, number: int) -> str:
        return agent_name(number)  # a member of a sum has a name of few letters

    def public_key(self, number: int) -> bytes:
        return self._secret(number).public

    def collect(self, request: Request, mask_seeds: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
        """Pay for the round, train it and release the payloads."""
        if not mask_seeds:
            return
        agents = self.agents(request, mask_seeds)
        accounts = self._accounts
        ledger = None if accounts is None or request.terms.plan is None else accounts.ledger
        if accounts is not None and ledger is not None:
            pay(request, agents, ledger, accounts.cap)
        try:
            uploads = self._uploads(request, agents)
        except PayloadError as error:
            raise _diverged(request, error) from error
        if ledger is not None:
            release(request, uploads, ledger)
        if accounts is not None:
            accounts.count_participation(list(mask_seeds))
        yield from ((agent.number, uploads[name]) for name, agent in agents.items())

    def _uploads(self, request: Request, agents: Mapping[str, Agent]) -> dict[str, bytes]:
        if request.models is not None:
            return simulate_uploads(request, agents, Scores(self.job.training.model, request.models))
        if self._pool is not None:
            return self._pool.train(request, agents)
        return simulate_uploads(request, agents, self.job.engine)

    def recover(self, request: Request, intake: MaskedIntake) -> None:
        """Nobody falls silent here, and no message is masked: what the exchange would weigh is counted."""
        assert request.session is not None
        intake.uplink_bytes += exchange_bytes(request.session)

    def reject(self, request: Request, number: int, error: PayloadError) -> None:
        raise _diverged(request, error) from error

    def close(self, request: Request, taken: Sequence[int], void: Void | None) -> None:
        if void is not None:  # as rare as the plan's bound on an honest sum says
            log.warning("round %d gave no sum: %s", request.terms.round + 1, void)

    def checkpoint(self) -> Mapping[str, Any]:
        if self._accounts is None:
            return {}
        self._accounts.settle()
        return self._accounts.kept

    def total(self) -> LedgerTotal | None:
        return None if self._accounts is None else self._accounts.total()

    def complete(self, summary: dict[str, Any]) -> None:
        if self._accounts is not None and self._accounts.skipped:
            summary["warnings"].append(f"{self._accounts.skipped} participations were skipped: {CAP_USED_UP}")

    def _secret(self, number: int) -> SecretKey:
        """Return an agent's key under secure aggregation: with seeded noise the same in every process of the run."""
        if number not in self._secrets:
            self._secrets[number] = simulated_key(self._private, number)
        return self._secrets[number]

    def agents(self, request: Request, mask_seeds: Mapping[int, bytes]) -> dict[str, Agent]:
        """Return the agents of a round by name: each reads its own rows of all records."""
        holdings = [self.job.holdings[number] for number in mask_seeds]
        x, y = self.job.examples(np.concatenate([np.empty(0, np.int64), *holdings]))
        return {
            self.job.agents[number]: Agent(
                number=number,
                pool_x=x,
                pool_y=y,
                mask_seed=seed,
                key=agent_key(self._private, request.terms.round, number),
                exact=self.job.config.privacy.noise == "exact",
                rows=torch.from_numpy(rows),
            )
            for (number, seed), rows in zip(mask_seeds.items(), holdings)
        }


def _diverged(request: Request, error: PayloadError) -> Diverged:
    """Nobody lies in a simulation: an update that no server would take comes from a model that diverged."""
    return Diverged(request.terms.round, f"an update would be refused ({error})")
