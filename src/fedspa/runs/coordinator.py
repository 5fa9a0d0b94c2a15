"""The server's half of a run: announce the terms of a round, take in payloads, move θ, evaluate.

It sees terms, payloads and its own held-out records, and nothing of an agent. The simulator and a deployment drive the
same object.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedspa.algorithms import Algorithm, Terms
from fedspa.errors import FedspaError
from fedspa.mechanisms.base import NoPlan, Plan
from fedspa.randomness.sparsify import MaskMode
from fedspa.randomness.streams import derive_key, mask_seed, root_key
from fedspa.runs.evaluation import Evaluation
from fedspa.runs.initial_clip import median_clip
from fedspa.runs.setup import Job
from fedspa.server.aggregate import Aggregator
from fedspa.server.optimizers import ServerState, decayed
from fedspa.wire.payload import FLOAT32_MAX, Coding


class Diverged(FedspaError):
    """The model is beyond saving; what was saved before the round is not."""

    def __init__(self, t: int, sign: str, kept: Path | None = None) -> None:
        self.round, self.sign = t, sign
        super().__init__(
            f"the model diverged in round {t + 1}: {sign}; start again with a lower algorithm.local_lr or "
            "algorithm.server_lr, or a lower privacy.clip_value"
            + (f" (the last good parameters are in {kept})" if kept is not None else "")
        )


class Intake:
    """The payloads of one round, each validated and added as it comes; memory does not grow with their number."""

    def __init__(self, terms: Terms, algorithm: Algorithm, coding: Coding, most: int) -> None:
        self._terms = terms
        self._algorithm = algorithm
        self._coding = coding
        self.total = Aggregator(terms.dimension, terms.update_bound, max(1, most))
        self.log_clips = 0.0
        self.uplink_bytes = 0

    @property
    def count(self) -> int:
        return self.total.count

    def take(self, payload: bytes, *, seed: bytes | None = None, seen: Container[bytes] = frozenset()) -> None:
        """Add one payload, or raise a PayloadError and add nothing.

        `seed` is the mask seed that this agent was dealt; agents that draw their own are held against `seen`.
        """
        update = self._algorithm.decode(payload, self._terms, self._coding, seed, seen)
        self.total.add(update, self._terms.coordinates(update.mask_seed))
        self.log_clips += math.log(self._plausible(update.clip_value))
        self.uplink_bytes += len(payload)

    def _plausible(self, clip_value: float) -> float:
        """A private clip, held to where its steps can lead: one agent's word must not move all others'."""
        plan = self._terms.plan
        if plan is None:
            return 1.0
        reach = plan.clip_growth
        return min(max(clip_value, plan.clip_value / reach), plan.clip_value * reach)


class Coordinator:
    """θ, the server's moments and the clip value, from round to round."""

    def __init__(self, job: Job) -> None:
        self.job = job
        theta = job.model.flatten()
        self.state: ServerState = job.optimizer.start(theta)
        self._evaluation = Evaluation(job, theta.device)
        self.public_key = derive_key(root_key("seeded", job.config.run.seed), "public")
        self.clip_value = job.plan.clip_value if job.plan is not None else None
        if job.plan is not None and job.plan.clip_rule == "median":
            self.clip_value = median_clip(job, theta)

    def restore(self, state: ServerState, clip_value: float | None) -> None:
        """Go on from a checkpoint of this run."""
        then, now = state.tensors, self.state.tensors
        if state.theta.shape != self.state.theta.shape or then.keys() != now.keys():
            raise FedspaError(
                f"the checkpoint holds {len(state.theta)} parameters in {', '.join(sorted(then))}; this model and "
                f"server step have {len(self.state.theta)} in {', '.join(sorted(now))}: resume with the same"
            )
        if (clip_value is None) != (self.clip_value is None):
            raise FedspaError("the checkpoint and this run disagree on whether gradients are clipped")
        self.state = ServerState.of_tensors({name: each.to(now[name]) for name, each in then.items()}, state.round)
        self.clip_value = clip_value

    def terms(self) -> Terms:
        """What is announced for the round that `state` is in."""
        job, settings, t = self.job, self.job.config.algorithm, self.state.round
        mask: MaskMode = job.algorithm.mask or settings.mask
        common = {"per-agent": None, "shared": t, "fixed": 0}[mask]
        return Terms(
            round=t,
            mask=mask,
            mask_seed=None if common is None else mask_seed(self.public_key, common, -1),
            local_lr=decayed(settings.local_lr, settings.lr_decay, t),
            steps=self._steps(),
            layers=job.layers,
        )

    def _steps(self) -> Plan | NoPlan:
        job, settings = self.job, self.job.config.algorithm
        if job.plan is None or self.clip_value is None:
            sampling = job.config.privacy.sampling
            return NoPlan(job.model.dimension, job.active, sampling, settings.batch, settings.local_steps)
        return job.plan.with_clip_value(self.clip_value)

    def intake(self, terms: Terms, most: int) -> Intake:
        """A fresh round's intake, for at most that many payloads."""
        if not terms.update_bound * max(1, most) <= FLOAT32_MAX:
            raise Diverged(terms.round, "its updates have no bound within float32")
        return Intake(terms, self.job.algorithm, self.job.coding, most)

    def close_round(self, intake: Intake) -> None:
        """Move θ by what came in; a round in which nothing came leaves it where it is."""
        if intake.count == 0:
            self.state = replace(self.state, round=self.state.round + 1)
            return
        mean = torch.from_numpy(intake.total.mean()).to(self.state.theta)
        moved = self.job.optimizer.apply(self.state, mean)
        if not all(_finite(tensor) for tensor in moved.tensors.values()):
            raise Diverged(self.state.round, "its parameters are no longer finite")
        self.state = moved
        if self.job.plan is not None and self.job.plan.clip_rule == "quantile":
            # The next round starts from the geometric mean of where the agents' private quantiles ended.
            self.clip_value = math.exp(intake.log_clips / intake.count)

    def evaluate(self) -> tuple[float, float]:
        """Accuracy and mean loss on the held-out records, which belong to the server."""
        accuracy, loss = self._evaluation(self.state.model)
        if not np.isfinite(loss):
            raise Diverged(self.state.round - 1, "its loss is no longer finite")
        return accuracy, loss

    def accuracy_by_class(self) -> list[float | None]:
        """On the same records, by their labels."""
        return self._evaluation.by_class(self.state.model)


def _finite(tensor: torch.Tensor) -> bool:
    """Through the extremes, which carry NaN along: no second tensor of this size is made."""
    return all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))
