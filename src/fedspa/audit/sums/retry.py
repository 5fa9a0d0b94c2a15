"""A round that is interrupted and made again, through the simulator: ledger, attempts, keys, server.
Pads have questions of their own (`masks`): the simulator sends none.

The second attempt is a new release of everybody's, and must have noise of its own: what one has seen of both would else
be less noisy than two releases, or show what changed in between.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedspa.algorithms import Terms
from fedspa.audit.probe import INPUTS, certain_model
from fedspa.audit.questions import Integers, cosines, law_question
from fedspa.audit.result import Question
from fedspa.audit.setting import Setting
from fedspa.audit.sums.cohort import Summed, overheard
from fedspa.data.dataset import Dataset
from fedspa.runs.books import Books
from fedspa.runs.config import load
from fedspa.runs.setup import Simulated, prepare
from fedspa.runs.simulate import Simulation
from fedspa.wire.payload import Update

# So small that θ stays where it is.
_LR = 1e-6


def retry_questions(setting: Setting, target: Summed) -> list[Question]:
    """Two attempts at one round of null records, all public inputs the same. With seeded noise the second would be the
    first again, which is one release: then there is one."""
    totals, numbers = _attempts(setting, target, 1 if setting.noise_mode == "seeded" else 2)
    members = target.aggregation.members
    own = np.concatenate(numbers) - target.law(1).mean()
    questions = [cosines("retry: keys", own, "pairs of updates over members and attempts")]
    if len(totals) == 2:
        # Both are symmetric around the same mean: their difference is spread like a sum of twice as many shares.
        twice = target.law(2 * members)
        detail = f"distance of the difference of two attempts' sums from the law of {2 * members} shares"
        questions.append(law_question("retry: sums", twice, [totals[0] - totals[1] + twice.mean()], detail))
    return questions


def _attempts(setting: Setting, target: Summed, attempts: int) -> tuple[list[Integers], list[Integers]]:
    """The sum that the server got and the members' own numbers, of each attempt."""
    totals: list[Integers] = []
    numbers: list[Integers] = []
    job = _job(setting, target, totals, numbers)
    own: list[Integers] = []
    with tempfile.TemporaryDirectory(prefix="fedspa-audit-") as folder, Books(job, Path(folder)) as books:
        for attempt in range(attempts):
            if attempt:
                books.catch_up([], 0)
            # As after a crash before the first checkpoint: a process of its own, with a private key of its own.
            Simulation(job).round(list(range(target.aggregation.members)), books)
            own.append(np.stack(numbers))
            numbers.clear()
    return totals, own


def _job(setting: Setting, target: Summed, totals: list[Integers], numbers: list[Integers]) -> Simulated:
    """A run of the target's plan, of which the sums and the members' numbers are kept."""
    members, held = target.aggregation.members, target.plan.batch
    x, y = torch.ones(members * held, INPUTS), torch.zeros(members * held, dtype=torch.int64)
    model = certain_model()
    config = load(
        {
            "federation": {"agents": members, "rounds": 4, "per_round": members},
            "algorithm": {"batch": held, "server": "average"},
            "privacy": {"noise_multiplier": 1.0, "noise": setting.noise_mode, "sampling": target.plan.sampling},
            "run": {"engine": setting.engine, "seed": setting.seed, "threads": 1},
        }
    )
    job = prepare(config, Dataset(x, y, x[:2], torch.tensor([0, 1]), 2, "null"), model.module)
    algorithm = target.algorithm

    def mean(total: Integers, count: int, terms: Terms) -> Update:
        assert algorithm.mean is not None
        totals.append(total.copy())
        return algorithm.mean(total, count, terms)

    server = replace(
        job.server,
        algorithm=replace(algorithm, mean=mean, respond=overheard(algorithm, numbers)),
        terms=replace(target.terms(0), local_lr=_LR),
        clip_value=target.plan.clip_value,
    )
    return replace(
        job,
        holdings=list(np.arange(members * held).reshape(members, held)),
        engine=target.engine(setting, model.module, model.shape),
        server=server,
    )
