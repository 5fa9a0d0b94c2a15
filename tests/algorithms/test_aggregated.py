"""Fed-SPA and DP-Fed in sums: every engine adds up the same whole numbers, and their sum is read as the mean update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sample_plans import GAUSSIAN_PLAN, SHARED_PLAN
from torch import Tensor, nn

from fedspa.algorithms import Agent, Terms, chosen
from fedspa.algorithms import fedspa as module
from fedspa.engine.local import Engine
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.engine.traced import trace_engine
from fedspa.errors import PrivacyError
from fedspa.examples import Examples
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.base import CLIP_UNITS
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA, DiscreteGaussianPlan
from fedspa.randomness.mask import active_coordinates
from fedspa.randomness.streams import Stream, derive_key

FED_SPA = chosen("fedspa", "secure-aggregation")
RECORDS, SHAPE, CLASSES = 40, (2, 6, 6), 4
NATIVE = pytest.mark.skipif(library.library() is None, reason="the native engine was not built")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(80, CLASSES))


DIMENSION = sum(p.numel() for p in net().parameters())
SIZES = {"dimension": DIMENSION, "clip_value": 0.3, "records": RECORDS, "members": 3, "colluders": 1, "most": 3}
PLAN = replace(SHARED_PLAN, **SIZES, active=60, delta=1e-3)
TERMS = Terms(round=1, mask="shared", mask_seed=bytes(range(16)), local_lr=0.5, steps=PLAN)
DENSE = replace(TERMS, steps=replace(PLAN, active=DIMENSION))


def agent(number: int = 0) -> Agent:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(RECORDS, *SHAPE, generator=generator)
    y = torch.randint(0, CLASSES, (RECORDS,), generator=generator)
    return Agent(number, x, y, bytes(16), derive_key(bytes(32), "agent", number))


def sum_of(engine: Engine, terms: Terms, who: Agent, parts: int = 1) -> np.ndarray:
    theta = FlatModel(net()).flatten()
    total, zeroed = module._sum(theta, terms, who, bytes(range(16)), engine, parts)
    assert zeroed == 0
    return total


def traced() -> Engine:
    who = agent()
    assert isinstance(who.pool_x, Tensor)
    assert isinstance(who.pool_y, Tensor)
    made = trace_engine(net(), Examples(who.pool_x[:1], who.pool_y[:1]), None, 1, torch.device("cpu"))
    assert isinstance(made, Engine)
    assert made.takes_slots
    return made


ENGINES = {
    "generic": lambda: PerExampleEngine(net()),
    "traced": traced,
    **{f"native {level}": lambda level=level: NativeEngine(net(), 2, level) for level in library.LEVELS},
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NATIVE if "native" in name else ()) for name in ENGINES])
@pytest.mark.parametrize("terms", [TERMS, DENSE], ids=["sparse", "dense"])
def test_every_engine_adds_up_what_the_reference_does(name: str, terms: Terms) -> None:
    """Each record's gradient is cut and rounded in float32: a few of 2²⁴ units, forty times."""
    who = agent()
    truth = sum_of(float64_reference(net()), terms, who)
    found = sum_of(ENGINES[name](), terms, who)
    assert found.shape == truth.shape == (terms.active,)
    assert np.abs(truth).max() > CLIP_UNITS / 10
    assert np.abs(found - truth).max() <= 40 * 60
    # Each record is clipped on the mask, not before it is cut to it.
    one = replace(who, pool_x=who.pool_x[:1], pool_y=who.pool_y[:1])  # type: ignore[index]
    norm = float(np.linalg.norm(sum_of(ENGINES[name](), terms, one).astype(float)))
    assert 0.99 * CLIP_UNITS < norm <= CLIP_UNITS


@pytest.mark.parametrize("name", [pytest.param(name, marks=NATIVE if "native" in name else ()) for name in ENGINES])
def test_records_among_those_of_others_and_in_parts_make_the_same_sum(name: str) -> None:
    someone, other = agent(0), agent(1)
    rows = torch.randperm(2 * RECORDS, generator=torch.Generator().manual_seed(1))[:RECORDS]
    x, y = torch.cat([other.pool_x, other.pool_x]), torch.cat([other.pool_y, other.pool_y])  # type: ignore[list-item]
    x[rows], y[rows] = someone.pool_x, someone.pool_y  # type: ignore[assignment]
    engine, among = ENGINES[name](), replace(someone, pool_x=x, pool_y=y, rows=rows)
    for parts in (1, 3, 64):
        assert np.array_equal(sum_of(engine, TERMS, among, parts), sum_of(engine, TERMS, someone))


def test_places_of_an_engine_that_takes_records_together_change_no_sum() -> None:
    engine = traced()
    alone, placed = (sum_of(engine, TERMS, replace(agent(), max_records=most)) for most in (None, 64))
    assert np.abs(alone - placed).max() <= 40 * 8


@NATIVE
def test_a_mask_that_leads_outside_is_refused() -> None:
    engine, who = NativeEngine(net(), 1), agent()
    theta = FlatModel(net()).flatten()
    for mask in ([0, DIMENSION], [-1, 3], [3, 3]):
        with pytest.raises(Exception, match="mask"):
            engine.clipped_sum(theta, who.pool_x, who.pool_y, "l2", 0.1, torch.tensor(mask))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="numbered beyond"):
        engine.clipped_sum(theta, who.pool_x, who.pool_y, "l2", 0.1, None, torch.tensor([RECORDS]))  # type: ignore[arg-type]


@pytest.mark.parametrize("terms", [TERMS, DENSE], ids=["sparse", "dense"])
def test_the_sum_of_shares_is_read_as_the_mean_of_updates(terms: Terms) -> None:
    """Against plain clipped gradients: what is left is the noise of three shares."""
    module = net()
    theta, agents, engine = FlatModel(module).flatten(), [agent(i) for i in range(3)], PerExampleEngine(module)
    answers = list(FED_SPA.respond(theta, terms, agents, engine))
    assert [answer.values.dtype for answer in answers] == [np.int64] * 3
    assert FED_SPA.mean is not None
    update = FED_SPA.mean(sum(answer.values for answer in answers), 3, terms)
    sums = sum(sum_of(float64_reference(module), terms, who) for who in agents)
    exact = -terms.local_lr * terms.scale * sums * PLAN.clip_value / CLIP_UNITS / (3 * RECORDS)
    noise = terms.update_noise / np.sqrt(3)
    away = (update.values - exact) / noise
    assert np.abs(away).max() < 5.5
    assert 0.5 < away.std() < 1.5
    assert update.values.dtype == np.float32
    if terms is TERMS:
        assert len(update.values) == 60
        assert np.array_equal(terms.coordinates(update.mask_seed), active_coordinates(bytes(range(16)), DIMENSION, 60))


def test_noise_is_of_a_share_and_of_the_agents_key() -> None:
    """A step so coarse that what is sent is noise: of the share's deviation, another for another key."""
    quiet = replace(DENSE, steps=replace(PLAN, active=DIMENSION, bound=1, records=RECORDS))
    theta, engine = FlatModel(net()).flatten(), PerExampleEngine(net())
    first, again, other = (
        next(FED_SPA.respond(theta, quiet, [replace(agent(), key=bytes([key] * 32))], engine)).values
        for key in (1, 1, 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert abs(first.std() / SIGMA - 1) < 6 / np.sqrt(2 * DIMENSION) + RECORDS / FINE / SIGMA


def test_a_record_without_a_gradient_counts_as_zero_and_tells_nobody(caplog: pytest.LogCaptureFixture) -> None:
    who = agent()
    assert isinstance(who.pool_x, Tensor)
    who.pool_x[3] = torch.nan
    theta, engine = FlatModel(net()).flatten(), PerExampleEngine(net())
    answer = next(FED_SPA.respond(theta, TERMS, [who], engine))
    without = replace(
        who, pool_x=torch.cat([who.pool_x[:3], who.pool_x[4:]]), pool_y=torch.cat([who.pool_y[:3], who.pool_y[4:]])
    )  # type: ignore[index]
    assert np.array_equal(answer.values, next(FED_SPA.respond(theta, TERMS, [without], engine)).values)
    assert "1 of the examples" in caplog.text


def test_rounding_and_noise_come_from_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams over one key repeat each other, and no statistic would see it in the numbers."""
    drawn: list[int] = []

    def share(total: object, plan: DiscreteGaussianPlan, rounding: Stream, noise: Stream) -> np.ndarray:
        drawn.extend(int(stream.uint64(1)[0]) for stream in (rounding, noise))
        return np.zeros(plan.active, dtype=np.int64)

    monkeypatch.setattr(module, "share", share)
    list(FED_SPA.respond(FlatModel(net()).flatten(), TERMS, [agent(0), agent(1)], PerExampleEngine(net())))
    assert len(set(drawn)) == 4


def test_a_plan_of_another_mechanism_is_refused() -> None:
    terms = replace(TERMS, steps=replace(GAUSSIAN_PLAN, dimension=DIMENSION))
    with pytest.raises(PrivacyError, match="no DiscreteGaussianPlan"):
        next(FED_SPA.respond(FlatModel(net()).flatten(), terms, [agent()], PerExampleEngine(net())))
