"""The audit of cpSGD: sound code passes, each injected fault is caught by the check that is there for it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Longer, Overlooks, engine_with, one_key, public_key
from torch import Tensor, nn
from typer.testing import CliRunner

from fedspa.algorithms import Agent, Terms
from fedspa.algorithms.base import Answer
from fedspa.algorithms.cpsgd import audit
from fedspa.algorithms.cpsgd import respond as cpsgd
from fedspa.algorithms.cpsgd.accounting import Sensitivity, sensitivity, spread
from fedspa.algorithms.cpsgd.audit import AUDIT, Target, most_apart, of_plan, synthetic
from fedspa.algorithms.cpsgd.plan import BinomialPlan
from fedspa.algorithms.cpsgd.release import Integers, noised
from fedspa.algorithms.cpsgd.release import release as true_release
from fedspa.audit.result import Check, Question
from fedspa.audit.run import FALSE_ALARM, Setting
from fedspa.cli import app
from fedspa.engine import EngineName, native
from fedspa.engine.local import ClippedSums
from fedspa.engine.native import NativeEngine
from fedspa.engine.task import Engine
from fedspa.errors import ConfigError
from fedspa.examples import taken
from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP, Clipping
from fedspa.privacy.accounting import epsilon
from fedspa.randomness.streams import Stream

# The check that is there for each mistake, and the questions of the audit that it is one of.
CAUGHT_BY: dict[str, tuple[str, Callable[..., Any]]] = {
    "sensitivity": ("pair: Δ₁, coordinate", audit.pair_questions),
    "noise": ("noise: law, coordinate", audit.noise_questions),
    "noise-missing": ("noise: law, coordinate", audit.noise_questions),
    "clip": ("pair: Δ∞, coordinate", audit.pair_questions),
    "rounding": ("rounding, coordinate", audit.rounding_question),
    "seed": ("keys", audit.keys_question),
    "seed-reused": ("keys", audit.keys_question),
    "sampling": ("sampler: rounds", audit.round_sampler_questions),
    "engine-clip": ("answer: Δ₂, coordinate", audit.neighbour_questions),
    "engine-norm": ("answer: Δ₂, coordinate", audit.neighbour_questions),
}


def _half(plan: BinomialPlan, delta: float) -> Sensitivity:
    """G/B claimed as the distance of neighbouring means, where it is 2G/B: what a batch twice as large would have."""
    return sensitivity(replace(plan.event, batch=2 * plan.batch, records=2 * plan.records), delta)


def _weak(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """A standard deviation smaller than accounted by 1.5."""
    fewer = replace(plan, trials=max(1, round(plan.trials / 2.25)))
    numbers = true_release(rows, fewer, seed, rounding, noise)
    return numbers + (plan.trials - fewer.trials) // 2  # the mean as it should be


def _missing(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """No noise on one coordinate in four."""
    position = rounding.position
    numbers = true_release(rows, plan, seed, rounding, noise)
    rounding.seek(position)
    bare = true_release(rows, replace(plan, trials=1), seed, rounding, noise) + plan.trials // 2
    numbers[::4] = bare[::4]
    return numbers


def _clipped_mean(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """The batch's mean is clipped, not each example."""
    mean = torch.cat(rows).nan_to_num(0.0, 0.0, 0.0).mean(dim=0, keepdim=True)
    return true_release([mean.repeat(plan.batch, 1)], plan, seed, rounding, noise)


def _nearest(rows: list[Tensor], plan: BinomialPlan, seed: bytes, rounding: Stream, noise: Stream) -> Integers:
    """To the nearest level, without a coin."""

    class Tails:
        """A coin that never falls: ½ is added before rounding down."""

        def integers_below(self, n: int, bound: int) -> Integers:
            return np.full(n, bound // 2)

    return true_release(rows, plan, seed, Tails(), noise)  # type: ignore[arg-type]


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
            theta, only, [replace(agent, x=taken(agent.x, chosen), y=taken(agent.y, chosen))], engine
        )


FAULTS: dict[str, Callable[[Target], Target]] = {
    "sensitivity": lambda target: replace(target, claim=_half),
    "noise": lambda target: replace(target, release=_weak),
    "noise-missing": lambda target: replace(target, release=_missing),
    "clip": lambda target: replace(target, release=_clipped_mean),
    "rounding": lambda target: replace(target, release=_nearest),
    "seed": lambda target: replace(target, respond=public_key(target.respond)),
    "seed-reused": lambda target: replace(target, respond=one_key(target.respond)),
    "sampling": lambda target: replace(target, respond=_epochs),
    "engine-clip": lambda target: replace(target, engine=engine_with(Longer)),
    "engine-norm": lambda target: replace(target, engine=engine_with(Overlooks)),
}
SETTING = Setting("seeded", draws=200)
# Sums have tests of their own (test_sums_audit.py).
TARGET = replace(synthetic(), sums=None)
# Seeded, so that the tests below are decided once and for all; one variant, to be quick.
ONE = replace(TARGET, variants=TARGET.variants[:1])
# As the audit of one variant shares out its false-alarm rate: 8 questions of chance, and 3 of sampler and keys.
ALPHA = FALSE_ALARM / 11
Fault = Callable[[ClippedSums, Tensor, Tensor, Tensor, Clipping, float], Tensor]
NO_NATIVE = native.supports(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (4,))
native_only = pytest.mark.skipif(NO_NATIVE is not None, reason=f"the native engine is not possible here: {NO_NATIVE}")


def judged(questions: list[Question] | Question, alpha: float = ALPHA) -> list[Check]:
    return [question.answer(alpha) for question in (questions if isinstance(questions, list) else [questions])]


def neighbours(target: Target = TARGET, of: str = "coordinate", setting: Setting = SETTING) -> list[Check]:
    return judged(audit.neighbour_questions(setting, target, variant(of)))


def failed(target: Target, of: str) -> set[str]:
    return {check.name for check in neighbours(target, of) if not check.holds}


@pytest.fixture
def one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the smaller batch only: a third of the records, and no weaker a test where it sees the fault."""
    monkeypatch.setattr(audit, "BATCHES", audit.BATCHES[:1])


def test_the_real_thing_holds_in_every_variant() -> None:
    report = AUDIT.audit(SETTING, TARGET)
    assert report.holds
    assert len(report.checks) == 3 * 12 + 5
    # A fixed size leaves nothing to chance, nor a record twice in a batch, Δ∞ or a distance of answers.
    chance = [1 - check.confidence for check in report.checks if check.confidence < 1]
    assert len(chance) == 3 * 8 + 3
    assert sum(chance) == pytest.approx(FALSE_ALARM)
    assert {check.name for check in report.checks} >= {name for name, _ in CAUGHT_BY.values()}


def test_draws_could_refute_what_is_claimed() -> None:
    """An attack on n draws of either side shows an ε of ln n at most."""
    claims = [epsilon({plan.event: 1}, plan.delta, neighbours="replace-one") for plan in TARGET.variants]
    assert 0 < max(claims) < math.log(Setting().draws)


@pytest.mark.parametrize("name", CAUGHT_BY)
@pytest.mark.usefixtures("one_batch")
def test_a_fault_is_caught(name: str) -> None:
    """By the questions that are there for it, as the whole audit of 800 draws asks them; sound code passes them. Over
    seeds 1 to 20 each mistake was caught 20 times, and sound code raised no alarm."""
    if name.startswith("engine") and NO_NATIVE is not None:
        pytest.skip(f"the native engine is not possible here: {NO_NATIVE}")
    wanted, ask = CAUGHT_BY[name]

    def holds(target: Target) -> bool:
        about = () if ask in (audit.keys_question, audit.round_sampler_questions) else (variant("coordinate"),)
        (check,) = (c for c in judged(ask(replace(SETTING, draws=800), target, *about)) if c.name == wanted)
        return check.holds

    assert not holds(FAULTS[name](ONE))
    assert holds(ONE)


def variant(name: str) -> BinomialPlan:
    return dict(zip(("coordinate", "coordinate, rotated", "l2, rotated"), TARGET.variants))[name]


@native_only
@pytest.mark.parametrize("name", ["engine-clip", "engine-norm"])
@pytest.mark.parametrize("of", ["coordinate, rotated", "l2, rotated"])
@pytest.mark.usefixtures("one_batch")
def test_an_engine_that_clips_wrongly_is_caught_with_rotation_too(name: str, of: str) -> None:
    assert failed(FAULTS[name](TARGET), of) >= {f"answer: Δ₂, {of}"}


@pytest.mark.parametrize(
    ("engine", "of"),
    [
        ("auto", "coordinate"),
        ("auto", "coordinate, rotated"),
        ("traced", "coordinate"),
        ("traced", "l2, rotated"),
        ("generic", "l2, rotated"),
    ],
)
def test_every_engine_holds_and_the_worst_pair_reaches_the_claim(
    engine: EngineName, of: str, request: pytest.FixtureRequest
) -> None:
    if engine == "generic":  # one example at a time, whatever the batch
        request.getfixturevalue("one_batch")
    checks = neighbours(of=of, setting=replace(SETTING, engine=engine))
    assert all(check.holds and check.confidence == 1 for check in checks)
    assert checks[2].lower_bound >= 0.995 * checks[2].claimed


@pytest.mark.parametrize("clip_value", [SMALLEST_CLIP, LARGEST_CLIP])
@pytest.mark.parametrize("of", ["coordinate", "l2, rotated"])
def test_the_size_of_the_bound_makes_no_alarm(clip_value: float, of: str) -> None:
    plan = variant(of).with_clip_value(clip_value)
    assert all(check.holds for check in judged(audit.neighbour_questions(SETTING, TARGET, plan)))


def test_exact_gradients_are_taken_by_the_engine_of_such_a_run() -> None:
    """Records go together there: it is asked with every batch."""
    seen: set[tuple[str, bool, int]] = set()

    def watched(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        seen.update((engine.name, agent.exact, len(agent.y)) for agent in agents)
        return TARGET.respond(theta, terms, agents, engine)

    checks = neighbours(replace(TARGET, respond=watched), setting=replace(SETTING, noise_mode="exact"))
    assert all(check.holds for check in checks)
    assert seen == {("traced", True, batch) for batch in audit.BATCHES}


@pytest.mark.parametrize("of", ["coordinate", "coordinate, rotated", "l2, rotated"])
@pytest.mark.parametrize(("batch", "dimension"), [(17, 64), (17, 198), (51, 66), (51, 198)])
def test_no_chance_in_the_distances_of_answers(of: str, batch: int, dimension: int) -> None:
    """With rotation the claim leaves more room than rounding can fill; without, no coins can pass d·Δ∞."""
    plan = replace(variant(of), bits=16, batch=batch, records=batch, dimension=dimension)
    l1, l2, largest = sensitivity(plan.event, 1.0)
    r, d = math.sqrt(plan.coordinates) * (2**16 - 1) / (batch * spread(plan.event)), plan.coordinates
    most = most_apart(TARGET, plan)
    if plan.rotation:
        assert most == pytest.approx((largest, math.sqrt(d) * r + d, r + math.sqrt(d)), rel=1e-6)
        assert l1 > most[1]
        assert l2 > most[2]
    else:
        assert most == pytest.approx((largest, d * largest, math.sqrt(d) * largest), rel=2e-9)
        assert most[2] > np.linalg.norm(np.full(d, float(largest)))  # which is what the worst pair gives
        assert largest * batch == 2**16 - 1


def _one_by_one(engine: ClippedSums, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, value: float) -> Tensor:
    return torch.stack([engine.clipped_sum(theta, *one, clip, value)[0] for one in zip(x[:, None], y[:, None])])


def broken_block(engine: ClippedSums, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, value: float) -> Tensor:
    """A broken example takes the other four of its block with it."""
    rows = _one_by_one(engine, theta, x, y, clip, value)
    for i in (~x.flatten(1).isfinite().all(1)).nonzero().flatten().tolist():
        rows[i // 5 * 5 : i // 5 * 5 + 5] = 0
    return rows.sum(dim=0)


def last_twice(engine: ClippedSums, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, value: float) -> Tensor:
    """The remainder of an odd batch is added twice."""
    last = engine.clipped_sum(theta, x[-1:], y[-1:], clip, value)[0] * (len(y) % 2)
    return engine.clipped_sum(theta, x, y, clip, value)[0] + last


def renormalised(engine: ClippedSums, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, value: float) -> Tensor:
    """Divided by the examples that are not broken."""
    total, zeroed = engine.clipped_sum(theta, x, y, clip, value)
    return total * len(y) // max(1, len(y) - zeroed)


def hidden_layer(engine: ClippedSums, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, value: float) -> Tensor:
    """The convolution's bias is not clipped."""
    total = engine.clipped_sum(theta, x, y, clip, value)[0]
    if x.dim() == 4:
        total[36:40] = 10 * engine.clipped_sum(theta, x, y, clip, 10 * value)[0][36:40]
    return total


def half_a_percent(engine: ClippedSums, theta: Tensor, x: Tensor, y: Tensor, clip: Clipping, value: float) -> Tensor:
    return (engine.clipped_sum(theta, x, y, clip, 1.005 * value)[0] * 1.005).long()


@native_only
@pytest.mark.parametrize(
    ("fault", "of"),
    [
        (broken_block, "coordinate"),
        (last_twice, "coordinate, rotated"),
        (renormalised, "l2, rotated"),
        (hidden_layer, "coordinate"),
        (half_a_percent, "l2, rotated"),
    ],
)
@pytest.mark.usefixtures("one_batch")
def test_other_faults_of_an_engine_are_caught(monkeypatch: pytest.MonkeyPatch, fault: Fault, of: str) -> None:
    true = NativeEngine.clipped_sum

    @dataclass
    class Sound:
        engine: NativeEngine
        threads: int = 1

        def clipped_sum(self, *order: Any) -> tuple[Tensor, int]:
            return true(self.engine, *order)

    monkeypatch.setattr(NativeEngine, "clipped_sum", lambda self, *order: (fault(Sound(self), *order), 0))
    assert failed(TARGET, of)


def test_answers_with_less_noise_or_known_coins_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(32)

    def of_null_records() -> list[Check]:
        return judged(audit.answer_noise_questions(SETTING, TARGET, TARGET.variants[0]), 1e-6)

    with monkeypatch.context() as patch:
        patch.setattr(
            cpsgd,
            "noised",
            lambda total, plan, *rest: noised(total, replace(plan, trials=plan.trials // 2 or 1), *rest),
        )
        assert not of_null_records()[0].holds
    with monkeypatch.context() as patch:
        patch.setattr(
            cpsgd, "noised", lambda total, plan, seed, _, noise: noised(total, plan, seed, Stream(key), noise)
        )
        assert not of_null_records()[1].holds
    assert all(check.holds for check in of_null_records())


def test_an_answer_that_does_not_move_is_no_evidence() -> None:
    """The check fails where its pairs do not reach the claim: here every record is overlooked."""

    def deaf(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        nothing = [replace(agent, x=torch.zeros_like(agent.x), y=torch.zeros_like(agent.y)) for agent in agents]
        return cpsgd.respond(theta, terms, nothing, engine)

    checks = neighbours(replace(TARGET, respond=deaf))
    assert not checks[2].holds
    assert "lost its reach" in checks[2].detail


def test_broken_records_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    neighbours()
    assert not caplog.records
    assert not logging.getLogger("fedspa.agent").disabled


def test_what_has_no_claim_is_not_audited() -> None:
    plan = TARGET.variants[0]
    with pytest.raises(ConfigError, match="no claim"):
        Target((replace(plan, trials=2),))


def test_of_a_sum_the_agents_own_share_is_attacked() -> None:
    plan = TARGET.variants[0]
    summed = replace(plan, adversary="secure-aggregation", members=8, colluders=2)
    assert of_plan(summed).variants[0].event == summed.floor_event == plan.event


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
    for flags in (["--clip", "l2"], ["--neighbours", "replace-one"], ["--self-test"]):
        refused = runner.invoke(app, ["audit", "--algorithm", "cpsgd", *flags])
        assert isinstance(refused.exception, ConfigError)
        assert flags[0] in str(refused.exception)
