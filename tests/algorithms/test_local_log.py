"""What an agent tells itself about its records, and that its update does not."""

from __future__ import annotations

import logging
import math
from dataclasses import fields

import pytest
import torch
from torch import nn

from fedspa.algorithms import ALGORITHMS, Agent, Terms
from fedspa.engine.per_example import PerExampleEngine
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import agent_key, mask_seed
from fedspa.wire.payload import HEADER_BYTES, Update, encode

ROOT = bytes(range(32))
D, K, B, M, TAU = 33, 11, 20, 20, 2  # a linear layer from 10 to 3; every record is in every batch
TERMS = Terms(
    *(7, "per-agent", None, 0.2),
    GaussianPlan(D, K, "l2", 0.4, "poisson", B, M, TAU, 1, 1.3, "add-remove", 1e-3),
)


def answers(bad: dict[int, int]) -> list[Update]:
    """Of agents 3 and 4, with `bad` records each."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 3))
    agents = []
    for number in (3, 4):
        x = torch.randn(M, 10, generator=torch.Generator().manual_seed(number))
        x[: bad.get(number, 0), 5] = math.nan
        agents.append(Agent(number, x, torch.arange(M) % 3, mask_seed(ROOT, 7, number), agent_key(ROOT, 7, number)))
    return list(ALGORITHMS["fedspa"].respond(FlatModel(net).flatten(), TERMS, agents, PerExampleEngine(net)))


def test_the_agent_that_has_bad_records_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    answers({3: 2})
    [record] = caplog.records
    assert (record.name, record.levelno) == ("fedspa.agent", logging.WARNING)
    assert record.getMessage() == (
        "agent 3, round 7: 4 of the sampled examples had a gradient that was not finite and counted as zero"
    )


@pytest.mark.parametrize("bad", [1, M])
def test_the_payload_does_not_tell(bad: int) -> None:
    """Same length and same header to the byte, but for the checksum that ends it; only the k noisy values differ."""
    for one, two in zip(answers({3: bad, 4: bad}), answers({})):
        first, second = encode(one, "f32"), encode(two, "f32")
        assert len(first) == len(second)
        assert first[: HEADER_BYTES - 4] == second[: HEADER_BYTES - 4]
        assert first != second
    assert {field.name for field in fields(Update)} == {"round", "dimension", "mask_seed", "values"}
