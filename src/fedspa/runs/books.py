"""The books of a simulated federation: one ledger for all agents, written before anything is released.

`run.ledger` names a ledger that outlives the run, so that several runs on the same records add up; `run.policy` gives
every simulated agent the same limits. A run that would not fit is refused before it starts.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from fedspa.privacy.ledger import Ledger
from fedspa.privacy.policy import Policy
from fedspa.runs.guarantee import Guarantee
from fedspa.runs.setup import Job


def refuse_over_budget(job: Job) -> None:
    """Raise where the plan breaks the policy, or where some agent's ledger has no room for the whole run."""
    run = job.config.run
    if job.plan is None or run.policy is None:
        return
    policy = Policy.load(run.policy)
    policy.check(job.plan)
    if run.ledger is None or not Path(run.ledger).exists():
        return
    with Ledger.open(run.ledger, create=False) as ledger:
        for number, held in enumerate(job.holdings):
            event = job.plan.for_records(len(held)).event
            ledger.require(agent_name(number), event, policy.cap, participations=job.plan.participations)


def agent_name(number: int) -> str:
    return f"agent-{number}"


class Books:
    """Ledger and guarantee of one run. Does nothing where the algorithm is not private."""

    def __init__(self, job: Job, folder: Path) -> None:
        self._job = job
        # Drawn, not named: two runs of one name would be one run to a ledger, and the second would cost nothing.
        self._run = f"{folder.name}-{secrets.token_hex(8)}"
        self._resources = ExitStack()
        self.guarantee: Guarantee | None = None
        if job.plan is None:
            return
        self.guarantee = Guarantee(job.plan, [len(held) for held in job.holdings], job.config.privacy.accountant)
        shared = job.config.run.ledger
        self._ledger = self._resources.enter_context(
            Ledger.open(folder / "ledger.sqlite", simulated=True) if shared is None else Ledger.open(shared)
        )
        self._cap = Policy.load(job.config.run.policy).cap if job.config.run.policy is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def reserve(self, t: int, cohort: Sequence[int]) -> None:
        """Durable before any of them trains."""
        if self._job.plan is None or self.guarantee is None:
            return
        events = {
            agent_name(number): self._job.plan.for_records(len(self._job.holdings[number])).event for number in cohort
        }
        self._ledger.reserve_many(events, self._run, f"round-{t}", cap=self._cap)
        self.guarantee.took_part(cohort)

    def release(self, t: int, payloads: Mapping[int, bytes]) -> None:
        """Marked as sent, each by the digest of its bytes."""
        if self.guarantee is None:
            return
        digests = {
            agent_name(number): hashlib.blake2b(payload, digest_size=16).hexdigest()
            for number, payload in payloads.items()
        }
        self._ledger.release_many(digests, self._run, f"round-{t}")

    def epsilon(self) -> float | None:
        """Largest verified ε over agents so far, under the plan's relation."""
        if self._job.plan is None or self.guarantee is None:
            return None
        return self.guarantee.epsilon_max(self._job.plan.neighbours)
