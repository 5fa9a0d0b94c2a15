"""A round costs its own agents: a federation forty times as large makes it no slower."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from small_runs import small

import fedspa
from fedspa.privacy.plan import Plan
from fedspa.runs.guarantee import Guarantee


@pytest.mark.slow
def test_time_a_round_does_not_grow_with_the_federation(tmp_path: Path) -> None:
    """Processor time. Anything in proportion to the federation would show as a factor; 1.5 leaves room for noise."""
    small_one, large_one = (seconds_a_round(tmp_path / str(agents), agents) for agents in (500, 20_000))
    assert large_one < 1.5 * small_one


def seconds_a_round(out: Path, agents: int) -> float:
    x = np.random.default_rng(0).standard_normal(size=(agents * 10, 5), dtype=np.float32)
    data = fedspa.from_arrays(x, (x[:, 0] > 0).astype(np.int64), x[:50], np.arange(50) % 2, name="load")
    ends: list[float] = []
    config = small(out, federation={"agents": agents, "per_round": 50, "rounds": 12}, algorithm={"batch": 5})
    fedspa.run(
        config, data=data, module=torch.nn.Linear(5, 2), on_round=lambda metrics: ends.append(time.process_time())
    )
    return median(later - earlier for earlier, later in pairwise(ends[2:]))


def test_the_guarantee_looks_at_the_agents_of_the_round_only() -> None:
    """Once a hundred thousand agents have taken part, a further round still touches its own ten."""

    class Records(list[int]):
        looks = 0

        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            Records.looks += 1
            return super().__getitem__(index)

    plan = Plan(
        dimension=10,
        active=10,
        clip="l2",
        clip_value=1.0,
        sampling="poisson",
        batch=5,
        records=10,
        local_steps=1,
        participations=3,
        noise_multiplier=2.0,
        neighbours="add-remove",
        delta=1e-3,
        clip_rule="given",
    )
    guarantee = Guarantee(plan, Records([10] * 99_000 + [12] * 1_000), "pld")
    guarantee.took_part(range(100_000))
    once = guarantee.epsilon_max("add-remove")
    Records.looks = 0
    guarantee.took_part(range(10))
    assert Records.looks == 10
    assert guarantee.epsilon_max("add-remove") > once
    assert guarantee.participations_max == 2
