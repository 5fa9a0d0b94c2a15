"""Examples whose gradient is not finite: every back end counts the same ones, and counts none where all are sound."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from plain import plain
from torch import Tensor, nn

from fedspa.engine.local import Engine, LocalTask
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.engine.traced import TracedEngine
from fedspa.examples import blank
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import Stream, derive_key, draw_batch

KEY = bytes(range(32))
RECORDS, BATCH, STEPS = 30, 12, 5
BAD = {3: math.nan, 11: math.inf, 12: -math.inf, 29: math.nan}


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))


def engines() -> list[Engine]:
    found: list[Engine] = [float64_reference(net()), PerExampleEngine(net())]
    found.append(TracedEngine(net(), blank((1, 8, 8))))
    if library.library() is not None:
        found += [NativeEngine(net(), 1, level) for level in library.LEVELS]
    return found


def task(clip: Any, mask: Tensor | None, bad: dict[int, float], exact: bool = False) -> LocalTask:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 1, 8, 8, generator=generator)
    y = torch.randint(3, (RECORDS,), generator=generator)
    for record, value in bad.items():
        x[record, 0, 4, 4] = value
    d = FlatModel(net()).dimension
    k = d if mask is None else len(mask)
    plan = GaussianPlan(d, k, clip, 0.1, "poisson", BATCH, RECORDS, STEPS, 1, 0.5, "add-remove", 1e-3)
    return LocalTask(x, y, mask, 1.0, 0.1, plan, KEY, exact)


def sampled_bad() -> int:
    """How often a bad record is in a batch: what must be counted."""
    stream = Stream(derive_key(KEY, "sampling"))
    batches = [draw_batch("poisson", BATCH, BATCH / RECORDS, RECORDS, stream) for _ in range(STEPS)]
    return sum(int(record) in BAD for batch in batches for record in batch)


@pytest.mark.parametrize(
    ("clip", "masked"),
    list(itertools.product(["coordinate", "l2"], [False, True])),
)
def test_all_engines_count_the_same_examples(clip: str, masked: bool) -> None:
    theta = FlatModel(net()).flatten()
    mask = torch.arange(0, len(theta), 3) if masked else None
    assert sampled_bad() > len(BAD)  # some are sampled more than once
    for engine in engines():
        [bad, sound] = engine.train(theta, [task(clip, mask, BAD), task(clip, mask, {})])
        assert (engine.name, bad.zeroed, sound.zeroed) == (engine.name, sampled_bad(), 0)
        assert bad.delta.isfinite().all()


def test_without_a_plan_nothing_is_left_out_and_nothing_counted() -> None:
    theta = FlatModel(net()).flatten()
    private = task("l2", None, BAD)
    free = LocalTask(private.x, private.y, None, 1.0, 0.1, plain("poisson", BATCH, STEPS), KEY)
    for engine in engines():
        assert engine.train(theta, [free])[0].zeroed == 0
