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


@pytest.mark.long
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
