"""The server's half of a run: announce the terms of a round, take in payloads, move θ, evaluate.

It sees terms, payloads and its own held-out records, and nothing of an agent. The simulator and a deployment drive the
same object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from fedspa.algorithms import Algorithm, Terms
from fedspa.algorithms.base import session_of
from fedspa.engine.local import Engine
from fedspa.errors import DataError, FedspaError, PrivacyError, one_line
from fedspa.examples import Examples
from fedspa.learning.backbone import Split
from fedspa.learning.flat import FlatModel
from fedspa.learning.tasks.base import Metric
from fedspa.mechanisms import Plan
from fedspa.randomness.streams import NoiseMode, mask_seed
from fedspa.secagg.masking import Void
from fedspa.secagg.session import Session
from fedspa.server.evaluation import Closing, Evaluated, Evaluation
from fedspa.server.intake import Intake, MaskedIntake
from fedspa.server.optimizers import ServerOptimizer, ServerState
from fedspa.wire.payload import FLOAT32_MAX, Coding, Update


@dataclass(frozen=True)
class ServerJob:
    """`terms` are those of the first round.

    `engine` scores the held-out examples `test` where it can and `engine_scores`, on so many `threads`; `metrics` are
    the user's own, of outputs and targets. Masks follow from `public_key`. Where there is a split of the model to be
    `scored`, in eval mode, features of the held-out examples are made once.
    """

    model: FlatModel
    algorithm: Algorithm
    optimizer: ServerOptimizer
    terms: Terms
    coding: Coding
    public_key: bytes
    test: Examples
    engine: Engine
    threads: int
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    scored: Split | None = None
    engine_scores: bool = True

    @property
    def plan(self) -> Plan | None:
        return self.terms.plan


class Diverged(FedspaError):
    """The model is beyond saving; what was saved before the round is not."""

    def __init__(self, t: int, sign: str, kept: Path | None = None) -> None:
        self.round, self.sign = t, sign
        super().__init__(
            f"the model diverged in round {t + 1}: {sign}; start again with a lower algorithm.local_lr or "
            "algorithm.server_lr, or a lower privacy.clip_value"
            + (f" (the last good parameters are in {kept})" if kept is not None else "")
        )


class Coordinator:
    """θ and the server's moments, from round to round."""

    def __init__(self, job: ServerJob) -> None:
        self.job = job
        theta = job.model.flatten()
        self.state: ServerState = job.optimizer.start(theta)
        self._evaluation = Evaluation(job, theta.device)
        # Models that agents are to score in the round that was announced last, a θ per row; None where they train.
        self.models: torch.Tensor | None = None
        # What they said of them, by the candidate's number, in the round that was closed last.
        self.scores_by_agents: dict[int, float | None] | None = None

    def restore(self, state: ServerState) -> None:
        """Go on from a checkpoint of this run."""
        then, now = state.tensors, self.state.tensors
        if state.theta.shape != self.state.theta.shape or then.keys() != now.keys():
            raise FedspaError(
                f"the checkpoint holds {len(state.theta)} parameters in {', '.join(sorted(then))}; this model and "
                f"server step have {len(self.state.theta)} in {', '.join(sorted(now))}: resume with the same"
            )
        self.state = ServerState.of_tensors({name: each.to(now[name]) for name, each in then.items()}, state.round)

    def terms(self) -> Terms:
        """Return the terms of the round that `state` is in."""
        job, first, t = self.job, self.job.terms, self.state.round
        return replace(
            first,
            round=t,
            mask_seed=mask_seed(job.public_key, t, -1) if first.mask == "shared" else first.mask_seed,
            local_lr=job.optimizer.schedule.rate(first.local_lr, t),
        )

    def mask_seed(self, terms: Terms, number: int) -> bytes:
        """Return the mask seed assigned to agent `number`: everybody's, or its own."""
        return terms.mask_seed or mask_seed(self.job.public_key, terms.round, number)

    def session(
        self,
        run: str,
        attempt: int,
        members: Mapping[str, bytes],
        terms: Terms,
        noise: NoiseMode,
        *,
        recovery: bool = False,
    ) -> Session:
        """Return the session in which members, by name and public key, add up their updates to this round's terms."""
        job, theta = self.job, self.state.theta
        return session_of(run, attempt, members, job.algorithm, terms, theta, job.coding, noise, recovery=recovery)

    def intake(self, terms: Terms, most: int) -> Intake:
        """Return a fresh round's intake, for at most that many payloads, of which each is read."""
        self._refuse_unbounded(terms, most)
        if terms.plan is not None and terms.plan.aggregation is not None:
            raise PrivacyError("the plan's ε is of sums; no update of a single agent may be taken in")
        return Intake(terms, self.job.algorithm, self.job.coding, most)

    def masked_intake(self, terms: Terms, session: Session) -> MaskedIntake:
        """Return a fresh round's intake where only the sum over a cohort is read."""
        self._refuse_unbounded(terms, len(session.members))
        return MaskedIntake(terms, self.job.algorithm, session)

    def received(self, number: int, update: Update) -> None:
        """Take note of the update of agent `number`, which was taken in. By default, nobody asks for it again."""

    def close_round(self, intake: Intake | MaskedIntake | None) -> Void | None:
        """Move θ by what came in. A round in which nothing came leaves it where it is, and so does a sum that is none:
        then this says why."""
        if intake is None or (isinstance(intake, Intake) and intake.count == 0):
            return self._stay()
        try:
            mean = torch.from_numpy(intake.mean()).to(self.state.theta)
        except Void as void:
            return self._stay(void)
        moved = self.job.optimizer.apply(self.state, mean)
        # Extremes carry NaN along, and no second tensor is made.
        if not all(bool(end.isfinite()) for tensor in moved.tensors.values() for end in torch.aminmax(tensor)):
            raise Diverged(self.state.round, "its parameters are no longer finite")
        self.state = moved
        return None

    def _stay(self, void: Void | None = None) -> Void | None:
        self.state = replace(self.state, round=self.state.round + 1)
        return void

    def _refuse_unbounded(self, terms: Terms, most: int) -> None:
        if not terms.update_bound * max(1, most) <= FLOAT32_MAX:
            raise Diverged(terms.round, "its updates have no bound within float32")

    def evaluate(self) -> Evaluated:
        """Scores and mean loss on the held-out examples, which belong to the server."""
        found = self._evaluation(self.state.model)
        if not np.isfinite(found.loss):
            raise Diverged(self.state.round - 1, "its loss is no longer finite")
        return found

    def try_scores(self) -> None:
        """Evaluate once before anything is spent or written, so that a task or metric that fails does so here."""
        try:
            _, loss = self._evaluation(self.state.model)
        except FedspaError:
            raise
        except Exception as error:  # the user's module or task may raise anything
            raise DataError(f"the model fails on the held-out records ({one_line(error)})") from error
        if not np.isfinite(loss):
            raise DataError(
                f"the loss of the first model on the held-out records is {loss}; it must be finite: look at the task's "
                "loss, and at how large the records and targets are"
            )

    def closing(self) -> Closing:
        """Return what is computed for the last model beside its scores."""
        return self._evaluation.closing(self.state.model)


class TotalsServer(Coordinator):
    """Keeps what each agent released beside the sum of it, in every checkpoint: statistics are of each site, too.

    Under secure aggregation there is the sum alone."""

    def __init__(self, job: ServerJob) -> None:
        self._released: dict[str, torch.Tensor] = {}
        super().__init__(job)

    @property
    def state(self) -> ServerState:
        return replace(self._state, moments={**self._state.moments, **self._released})

    @state.setter
    def state(self, state: ServerState) -> None:
        moments = {name: tensor for name, tensor in state.moments.items() if name not in self._released}
        self._state = replace(state, moments=moments)

    def restore(self, state: ServerState) -> None:
        self._released = {name: each for name, each in state.moments.items() if name.startswith(RELEASED)}
        super().restore(state)

    def received(self, number: int, update: Update) -> None:
        self._released[f"{RELEASED}{number}"] = torch.from_numpy(update.values.copy())


RELEASED = "released by agent "
