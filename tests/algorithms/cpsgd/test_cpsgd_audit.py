"""The audit of cpSGD: sound code passes, each injected fault is caught by the check that is there for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Longer, Overlooks, engine_with, one_key, public_key
from targets import of_cpsgd
from torch import Tensor, nn
from typer.testing import CliRunner

from fedspa.algorithms import Agent, Terms
from fedspa.algorithms.base import Answer
from fedspa.algorithms.cpsgd import audit
from fedspa.algorithms.cpsgd import respond as cpsgd
from fedspa.algorithms.cpsgd.audit import AUDIT, Target, largest_move, of_plan
from fedspa.algorithms.cpsgd.plan import BinomialPlan, reach
from fedspa.algorithms.cpsgd.respond import Integers, noised
from fedspa.audit.audited import FALSE_ALARM, Setting
from fedspa.audit.statistics import Check, Question
from fedspa.cli import app
from fedspa.engine import EngineName, native
from fedspa.engine.local import Engine
from fedspa.engine.native import NativeEngine
from fedspa.errors import ConfigError
from fedspa.examples import taken
from fedspa.mechanisms.base import CLIP_UNITS, LARGEST_CLIP, SMALLEST_CLIP, Clipping
from fedspa.randomness.streams import Stream

# The check that is there for each mistake, and the questions of the audit that it is one of.
CAUGHT_BY: dict[str, tuple[str, Callable[..., Any]]] = {
    "sensitivity": ("answer: Δ∞", audit.neighbour_questions),
    "noise": ("answer: noise", audit.noise_questions),
    "noise-missing": ("answer: noise", audit.noise_questions),
    "clip": ("answer: Δ∞", audit.neighbour_questions),
    "rounding": ("answer: rounding", audit.rounding_question),
    "seed": ("keys", audit.keys_question),
    "seed-reused": ("keys", audit.keys_question),
    "sampling": ("sampler: rounds", audit.sampler_of_rounds),
    "engine-clip": ("answer: Δ₂", audit.neighbour_questions),
    "engine-norm": ("answer: Δ₂", audit.neighbour_questions),
}


def _half(plan: BinomialPlan) -> int:
    """G/B claimed as the distance of neighbouring means, where it is 2G/B: what a batch twice as large would have."""
    return largest_move(replace(plan, batch=2 * plan.batch, records=2 * plan.records))


def _weak(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
    """A standard deviation smaller than accounted by 1.5."""
    plan: Any = terms.plan
    fewer = replace(plan, trials=max(1, round(plan.trials / 2.25)))
    for answer in cpsgd.respond(theta, replace(terms, steps=fewer), agents, engine):
        yield replace(answer, values=answer.values + (plan.trials - fewer.trials) // 2)  # the mean as it should be


def _missing(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
    """No noise on one coordinate in four."""
    plan: Any = terms.plan
    bare = cpsgd.respond(theta, replace(terms, steps=replace(plan, trials=1)), agents, engine)
    for answer, without in zip(cpsgd.respond(theta, terms, agents, engine), bare):
        answer.values[::4] = without.values[::4] + plan.trials // 2
        yield answer


class MeanClip(Longer):
    """An engine that clips the batch's mean, and not each example."""

    def clipped_sum(
        self, theta: Tensor, x: Any, y: Any, clip: Clipping, clip_value: float, *places: Any, **how: Any
    ) -> tuple[Tensor, int]:
        total, zeroed = self.engine.clipped_sum(theta, x, y, clip, 1000 * clip_value)
        mean = (total.double() * 1000 / len(y)).clamp(-CLIP_UNITS, CLIP_UNITS)
        return (mean * len(y)).long(), zeroed


def _nearest(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
    """To the nearest level, without a coin."""

    def quantized(total: Integers, plan: BinomialPlan, _: Stream) -> Integers:
        half, top = reach(plan), plan.levels - 1
        found: Integers = ((total + half) * top + half) // (2 * half)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpsgd, "quantized", quantized)
        yield from list(cpsgd.respond(theta, terms, agents, engine))


def _epochs(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
    """Shuffled epochs, accounted as fresh samples: in round t the agent is handed the t-th batch of a shuffled order
    and no other records."""
    plan: Any = terms.plan
    only = replace(terms, steps=replace(plan, records=plan.batch))
    for agent in agents:
        order = torch.randperm(agent.records, generator=torch.Generator().manual_seed(agent.number))
        start = terms.round * plan.batch % (len(order) - plan.batch + 1)
        chosen = order[start : start + plan.batch]
        yield from cpsgd.respond(
            theta,
            only,
            [replace(agent, pool_x=taken(agent.pool_x, chosen), pool_y=taken(agent.pool_y, chosen))],
            engine,
        )


FAULTS: dict[str, Callable[[Target], Target]] = {
    "sensitivity": lambda target: replace(target, claim=_half),
    "noise": lambda target: replace(target, respond=_weak),
    "noise-missing": lambda target: replace(target, respond=_missing),
    "clip": lambda target: replace(target, engine=engine_with(MeanClip)),
    "rounding": lambda target: replace(target, respond=_nearest),
    "seed": lambda target: replace(target, respond=public_key(target.respond)),
    "seed-reused": lambda target: replace(target, respond=one_key(target.respond)),
    "sampling": lambda target: replace(target, respond=_epochs),
    "engine-clip": lambda target: replace(target, engine=engine_with(Longer)),
    "engine-norm": lambda target: replace(target, engine=engine_with(Overlooks)),
}
SETTING = Setting("seeded", draws=200)
# Sums have tests of their own. Seeded, so that the tests below are decided once and for all.
TARGET = replace(of_cpsgd(), sums=None)
# As an audit shares out its false-alarm rate: 6 questions of noise and attack, and 3 of sampler and keys.
ALPHA = FALSE_ALARM / 9
Fault = Callable[[Engine, Tensor, Tensor, Tensor, Clipping, float], Tensor]
NO_NATIVE = native.supports(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (4,))
native_only = pytest.mark.skipif(NO_NATIVE is not None, reason=f"the native engine is not possible here: {NO_NATIVE}")


def judged(questions: list[Question] | Question, alpha: float = ALPHA) -> list[Check]:
    return [question.answer(alpha) for question in (questions if isinstance(questions, list) else [questions])]


def neighbours(target: Target = TARGET, setting: Setting = SETTING) -> list[Check]:
    return judged(audit.neighbour_questions(setting, target))


@pytest.fixture
def one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the smaller batch only: a third of the records, and no weaker a test where it sees the fault."""
    monkeypatch.setattr(audit, "BATCHES", audit.BATCHES[:1])


def test_the_real_thing_holds() -> None:
    report = AUDIT.audit(SETTING, TARGET)
    assert report.holds
    # A fixed size leaves nothing to chance, nor a record twice in a batch or a distance of answers.
    chance = [1 - check.confidence for check in report.checks if check.confidence < 1]
    assert (len(report.checks), len(chance)) == (14, 9)
    assert sum(chance) == pytest.approx(FALSE_ALARM)
    assert {check.name for check in report.checks} >= {name for name, _ in CAUGHT_BY.values()}


@pytest.mark.parametrize("name", CAUGHT_BY)
@pytest.mark.usefixtures("one_batch")
def test_a_fault_is_caught(name: str) -> None:
    """By the questions that are there for it, as the whole audit of 800 draws asks them; sound code passes them."""
    if name in ("clip", "engine-clip", "engine-norm") and NO_NATIVE is not None:
        pytest.skip(f"the native engine is not possible here: {NO_NATIVE}")
    wanted, ask = CAUGHT_BY[name]

    def holds(target: Target) -> bool:
        (check,) = (c for c in judged(ask(replace(SETTING, draws=800), target)) if c.name == wanted)
        return check.holds

    assert not holds(FAULTS[name](TARGET))
    assert holds(TARGET)


@pytest.mark.parametrize("engine", ["auto", "traced"])
def test_every_engine_holds_and_the_worst_pair_reaches_the_claim(engine: EngineName) -> None:
    checks = neighbours(setting=replace(SETTING, engine=engine))
    assert all(check.holds and check.confidence == 1 for check in checks)
    assert checks[2].lower_bound >= 0.995 * checks[2].claimed


@pytest.mark.parametrize("clip_value", [SMALLEST_CLIP, LARGEST_CLIP])
def test_the_size_of_the_bound_makes_no_alarm(clip_value: float) -> None:
    target = replace(TARGET, plan=TARGET.plan.with_clip_value(clip_value))
    assert all(check.holds for check in neighbours(target))


def renormalised(engine: Engine, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, value: float) -> Tensor:
    """Divided by the examples that are not broken."""
    total, zeroed = engine.clipped_sum(theta, x, y, clip, value)
    return total * len(y) // max(1, len(y) - zeroed)


def hidden_layer(engine: Engine, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, value: float) -> Tensor:
    """The convolution's bias is not clipped."""
    total = engine.clipped_sum(theta, x, y, clip, value)[0]
    if x.dim() == 4:
        total[36:40] = 10 * engine.clipped_sum(theta, x, y, clip, 10 * value)[0][36:40]
    return total


def half_a_percent(engine: Engine, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, value: float) -> Tensor:
    return (engine.clipped_sum(theta, x, y, clip, 1.005 * value)[0] * 1.005).long()


@native_only
@pytest.mark.parametrize("fault", [renormalised, hidden_layer, half_a_percent])
@pytest.mark.usefixtures("one_batch")
def test_other_faults_of_an_engine_are_caught(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    true = NativeEngine.clipped_sum

    @dataclass
    class Sound:
        engine: NativeEngine

        def clipped_sum(self, *order: Any) -> tuple[Tensor, int]:
            return true(self.engine, *order)

    monkeypatch.setattr(NativeEngine, "clipped_sum", lambda self, *order, **_: (fault(Sound(self), *order), 0))  # type: ignore[arg-type]
    assert not all(check.holds for check in neighbours())


def test_answers_with_less_noise_or_known_coins_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(32)

    def of_null_records() -> list[Check]:
        return [check for check in judged(audit.noise_questions(SETTING, TARGET), 1e-6) if "," not in check.name]

    with monkeypatch.context() as patch:
        patch.setattr(
            cpsgd,
            "noised",
            lambda total, plan, *rest: noised(total, replace(plan, trials=plan.trials // 2 or 1), *rest),
        )
        assert not of_null_records()[0].holds
    with monkeypatch.context() as patch:
        patch.setattr(cpsgd, "noised", lambda total, plan, _, noise: noised(total, plan, Stream(key), noise))
        assert not of_null_records()[1].holds
    assert all(check.holds for check in of_null_records())


def test_an_answer_that_does_not_move_is_no_evidence() -> None:
    """The check fails where its pairs do not reach the claim: here every record is overlooked."""

    def deaf(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        nothing = [
            replace(agent, pool_x=torch.zeros_like(agent.pool_x), pool_y=torch.zeros_like(agent.pool_y))
            for agent in agents
        ]
        return cpsgd.respond(theta, terms, nothing, engine)

    checks = neighbours(replace(TARGET, respond=deaf))
    assert not checks[2].holds
    assert "lost its reach" in checks[2].detail


def test_of_a_sum_the_agents_own_share_is_attacked() -> None:
    summed = replace(TARGET.plan, adversary="secure-aggregation", members=8, colluders=2)
    assert of_plan(summed).plan.event == summed.worst_case_event == TARGET.plan.event


def test_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[federation]\nagents = 4\nper_round = 4\nrounds = 2\n[algorithm]\nname = "cpsgd"\nlocal_steps = 1\n'
        "[algorithm.options]\ntrials = 9000\n"
        '[privacy]\nnoise = "seeded"\nsampling = "fixed"\nclip = "coordinate"\nclip_value = 0.1\n'
    )
    runner = CliRunner()
    result = runner.invoke(
        app, ["audit", "--config", str(tmp_path / "run.toml"), "--draws", "100", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["holds"]
    refused = runner.invoke(app, ["audit", "--config", str(tmp_path / "run.toml"), "--self-test"])
    assert isinstance(refused.exception, ConfigError)
    assert "--self-test" in str(refused.exception)
