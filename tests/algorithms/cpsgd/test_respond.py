"""cpSGD's round: what an agent sends is an unbiased, noisy mean gradient in whole numbers, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sample_plans import BINOMIAL_PLAN
from torch import Tensor, nn

from fedspa.algorithms import ALGORITHMS, Agent, Terms, chosen
from fedspa.algorithms.base import IntegerUpdate
from fedspa.algorithms.cpsgd import respond as cpsgd
from fedspa.engine.native import NativeEngine, library
from fedspa.engine.per_example import PerExampleEngine, float64_reference
from fedspa.errors import PrivacyError
from fedspa.learning.flat import FlatModel
from fedspa.mechanisms.gaussian.plan import GaussianPlan
from fedspa.randomness.streams import Stream, derive_key
from fedspa.wire.payload import Update

CPSGD = ALGORITHMS["cpsgd"]
RECORDS, INPUTS, CLASSES = 12, 6, 3
DIMENSION = INPUTS * CLASSES + CLASSES
SIZES = {"dimension": DIMENSION, "clip_value": 0.2, "batch": RECORDS, "records": RECORDS}
PLAN = replace(BINOMIAL_PLAN, **SIZES, bits=8, trials=4, agents=3, participations=2)
TERMS = Terms(
    round=1,
    mask="shared",
    mask_seed=bytes(range(16)),
    local_lr=0.5,
    steps=PLAN,
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(INPUTS, CLASSES))


def agent(number: int = 0, key: int = 0) -> Agent:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(RECORDS, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (RECORDS,), generator=generator)
    return Agent(number, x, y, bytes(16), derive_key(bytes(32), "agent", number, key))


def sent(terms: Terms, who: Agent) -> Tensor:
    """Through the wire and back, as the server sees it."""
    module = net()
    (answer,) = CPSGD.respond(FlatModel(module).flatten(), terms, [who], PerExampleEngine(module))
    assert isinstance(answer, IntegerUpdate)
    update = CPSGD.decode(CPSGD.encode(answer, terms, "int"), terms, "int", None, frozenset())
    assert isinstance(update, Update)
    return torch.from_numpy(update.values).to(torch.float64)


@pytest.mark.skipif(library.library() is None, reason="the native engine was not built")
def test_the_native_engine_sends_what_generic_sends() -> None:
    """Same batch, same coins, same noise. A gradient that float32 rounds otherwise changes a level where a coin was
    within 1e-5 of its value: of 4 · 8 · 21 numbers hardly one."""
    terms = replace(TERMS, steps=replace(PLAN, batch=5, trials=50))
    module = net()
    theta, others = FlatModel(module).flatten(), 0
    for key in range(8):
        answers = [
            next(CPSGD.respond(theta, terms, [agent(key=key)], engine))
            for engine in (PerExampleEngine(module), NativeEngine(module, 1))
        ]
        numbers = [answer.values for answer in answers]
        assert np.abs(numbers[0] - numbers[1]).max() <= 1
        others += int((numbers[0] != numbers[1]).sum())
    assert others <= 1


def clipped_mean(who: Agent) -> Tensor:
    engine = float64_reference(net())
    theta = FlatModel(net()).flatten().to(torch.float64)
    rows = torch.cat(list(engine.rows(theta, who.pool_x, who.pool_y, None)))
    return rows.clamp(-PLAN.clip_value, PLAN.clip_value).mean(dim=0)


def test_the_mean_of_many_answers_is_a_step_down_the_clipped_gradient() -> None:
    """100 answers with keys of their own; every coordinate within 5.5σ of −η·g (21 coordinates: 10⁻⁶)."""
    answers = torch.stack([sent(TERMS, agent(key=i)) for i in range(100)])
    off = (answers.mean(0) + TERMS.local_lr * clipped_mean(agent())).abs().max()
    assert off < 5.5 * TERMS.update_noise / 10
    assert answers.std(0).mean() > 0.5 * TERMS.update_noise


def test_a_sum_has_the_mean_of_its_members() -> None:
    """What secure aggregation hands over, and what the server makes of each member's own upload without it."""
    plan = replace(PLAN, agents=5, adversary="secure-aggregation", members=4, colluders=1)
    terms = replace(TERMS, steps=plan)
    summed = chosen("cpsgd", "secure-aggregation")
    theta, agents = FlatModel(net()).flatten(), [agent(number) for number in range(5)]
    answers = list(summed.respond(theta, terms, agents, PerExampleEngine(net())))
    total = np.sum([answer.values for answer in answers], axis=0)
    bounds = plan.aggregation
    assert (total.dtype, len(total)) == (np.int64, bounds.count)
    assert bounds.low <= total.min() <= total.max() <= bounds.high
    assert summed.mean is not None
    mean = summed.mean(total, 5, terms)
    alone = [CPSGD.decode(CPSGD.encode(answer, terms, "int"), terms, "int", None, ()).values for answer in answers]
    assert (mean.round, mean.dimension, mean.mask_seed) == (terms.round, DIMENSION, terms.mask_seed)
    assert np.allclose(mean.values, np.mean(alone, axis=0, dtype=np.float64), rtol=1e-5, atol=1e-7)


def test_a_batch_is_of_exactly_b_records() -> None:
    """A record that is drawn moves a coordinate of its own by ±c: B of 12 are, whichever they are."""
    plan = replace(PLAN, dimension=DIMENSION, batch=5, bits=12, trials=1, clip_value=1e-3)
    generator = torch.Generator().manual_seed(1)
    sizes = set()
    for key in range(20):
        who = replace(agent(key=key), pool_x=torch.rand(RECORDS, INPUTS, generator=generator) + 1.0)
        mean = sent(replace(TERMS, steps=plan), who) / -TERMS.local_lr
        # Every gradient is far beyond the clip, so the biases' means are whole fifths of it.
        shares = (mean[-CLASSES:] / plan.clip_value * 5).round()
        sizes.update(int(share) % 2 for share in shares)
        assert (shares.abs() <= 5).all()
    assert sizes == {1}  # a sum of five signs is odd


def test_values_stay_within_the_bound_that_the_server_enforces() -> None:
    plan = replace(PLAN, trials=50)
    terms = replace(TERMS, steps=plan)
    for extreme in (0, plan.trials + plan.levels - 1):
        numbers = np.full(plan.dimension, extreme)
        payload = CPSGD.encode(IntegerUpdate(1, DIMENSION, bytes(range(16)), numbers), terms, "int")
        values = CPSGD.decode(payload, terms, "int", None, frozenset()).values
        assert np.abs(values).max() <= terms.update_bound


def test_too_few_records_and_other_plans_are_refused() -> None:
    with pytest.raises(PrivacyError, match="records"):
        sent(replace(TERMS, steps=replace(PLAN, records=13)), agent())
    gaussian = GaussianPlan(DIMENSION, DIMENSION, "l2", 1.0, "fixed", 5, RECORDS, 1, 1, 1.0, "replace-one", 1e-3)
    with pytest.raises(PrivacyError, match="no BinomialPlan"):
        sent(replace(TERMS, steps=gaussian), agent())
    with pytest.raises(PrivacyError, match="does not add"):
        list(ALGORITHMS["fedspa"].respond(FlatModel(net()).flatten(), TERMS, [agent()], PerExampleEngine(net())))


def test_a_gradient_that_is_not_finite_counts_as_zero_and_only_the_agent_knows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    who = agent()
    x = who.pool_x.clone()
    x[3] = float("nan")
    with caplog.at_level("WARNING", logger="fedspa.agent"):
        assert sent(TERMS, replace(who, pool_x=x)).isfinite().all()
    assert "1 of the sampled examples" in caplog.text


def test_batch_coins_and_noise_come_from_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams over one key repeat each other, and no statistic would see it in the numbers."""
    drawn: list[int] = []

    def batch(*arguments: object) -> np.ndarray:
        drawn.append(int(arguments[-1].uint64(1)[0]))  # type: ignore[attr-defined]
        return np.arange(RECORDS)

    def noised(total: object, plan: object, rounding: Stream, noise: Stream) -> np.ndarray:
        drawn.extend(int(stream.uint64(1)[0]) for stream in (rounding, noise))
        return np.zeros(DIMENSION, dtype=np.int64)

    monkeypatch.setattr(cpsgd, "draw_batch", batch)
    monkeypatch.setattr(cpsgd, "noised", noised)
    for key in (0, 1):
        list(CPSGD.respond(FlatModel(net()).flatten(), TERMS, [agent(key=key)], PerExampleEngine(net())))
    assert len(set(drawn)) == 6


def test_records_among_those_of_others_make_the_same_answer() -> None:
    terms = replace(TERMS, steps=replace(PLAN, batch=5, trials=50))
    someone, other = agent(0), agent(1)
    rows = torch.randperm(RECORDS, generator=torch.Generator().manual_seed(1)) + RECORDS
    x, y = torch.cat([other.pool_x, someone.pool_x]), torch.cat([other.pool_y, someone.pool_y])
    x[rows], y[rows] = someone.pool_x, someone.pool_y
    assert torch.equal(sent(terms, someone), sent(terms, replace(someone, pool_x=x, pool_y=y, rows=rows)))


@pytest.mark.skipif(library.library() is None, reason="the native engine was not built")
def test_threads_change_no_bit_and_no_order() -> None:
    module = net()
    theta, agents = FlatModel(module).flatten(), [agent(number) for number in range(7)]
    found = [list(CPSGD.respond(theta, TERMS, agents, NativeEngine(module, threads))) for threads in (1, 3)]
    for one, other in zip(*found, strict=True):
        assert isinstance(one, IntegerUpdate)
        assert isinstance(other, IntegerUpdate)
        assert np.array_equal(one.values, other.values)
