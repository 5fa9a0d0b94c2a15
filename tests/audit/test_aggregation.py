"""The audit of sums over a cohort: sound code passes, and each injected fault is caught by the checks for it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import SHARE_FAULTS, SUM_FAULTS
from scipy import stats
from targets import of_cpsgd, shares
from torch import Tensor, nn

from fedspa.agent.participate import Request
from fedspa.algorithms import Agent, Terms
from fedspa.algorithms.base import Answer
from fedspa.audit import aggregation
from fedspa.audit.aggregation import (
    SHARES,
    Cohort,
    Summed,
    answering,
    attack_questions,
    keys_question,
    neighbour_questions,
    noise_questions,
    score,
    sum_questions,
    worst_pair,
)
from fedspa.audit.audited import Setting, of_config
from fedspa.audit.statistics import Question
from fedspa.engine import EngineName, native
from fedspa.engine.local import Engine
from fedspa.secagg.masking import decode, encode
from fedspa.secagg.session import Session

# Seeded, so that these tests are decided once and for all.
SETTING = Setting("seeded", draws=100)
ALPHA = 1e-5
Ask = Callable[[Setting, Summed], list[Question]]


def summed(name: str) -> Summed:
    target = shares() if name == "shares" else of_cpsgd().sums
    assert isinstance(target, Summed)
    return target


def faulty(name: str, mechanism: str) -> Summed:
    faults = SHARE_FAULTS if mechanism == "shares" else {**SUM_FAULTS, "share": half_share}
    return faults[name](summed(mechanism))


def half_share(target: Summed) -> Summed:
    """Half of cpSGD's trials: a standard deviation smaller than accounted by √2."""

    def fewer(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        plan: Any = terms.plan
        half = replace(plan, trials=max(1, plan.trials // 2))
        for answer in target.respond(theta, replace(terms, steps=half), agents, engine):
            made: Any = answer
            yield replace(made, values=made.values + (plan.trials - half.trials) // 2)  # the mean as it should be

    return answering(target, fewer)


def failed(questions: list[Question], alpha: float = ALPHA) -> set[str]:
    return {question.name for question in questions if not question.answer(alpha).holds}


both = pytest.mark.parametrize("mechanism", ["shares", "cpsgd"])


@both
def test_production_holds(mechanism: str) -> None:
    questions = sum_questions(SETTING, summed(mechanism))
    assert failed(questions) == set()
    certain = {question.name for question in questions if question.share == 0}
    assert certain == {"sum: words"}
    unit = "μ" if mechanism == "shares" else "ε"
    assert {f"attack: {unit}, sum", f"attack: {unit}, worst case"} < {question.name for question in questions}


def keys(setting: Setting, target: Summed) -> list[Question]:
    return [keys_question(setting, target)]


# The questions that are there for each mistake, and which of them must see it.
CAUGHT_BY: dict[str, tuple[Ask, set[str]]] = {
    "retry": (keys, {"share: keys"}),
    "missing": (noise_questions, {"sum: words", "sum: shares"}),
    "colluders": (noise_questions, {"sum: honest shares"}),
    "share": (noise_questions, {"share: law", "sum: shares", "sum: honest shares"}),
}


@both
@pytest.mark.parametrize("name", CAUGHT_BY)
def test_a_fault_is_caught(name: str, mechanism: str) -> None:
    ask, wanted = CAUGHT_BY[name]
    assert failed(ask(SETTING, faulty(name, mechanism))) >= wanted


def test_every_fault_has_its_check() -> None:
    assert CAUGHT_BY.keys() == {"share", *SUM_FAULTS}
    assert CAUGHT_BY.keys() | {"engine-clip", "seed", "seed-reused"} == set(SHARE_FAULTS)


@pytest.mark.parametrize("name", ["seed", "seed-reused"])
def test_keys_that_are_public_or_shared_are_seen(name: str) -> None:
    assert failed(keys(SETTING, faulty(name, "shares")))


def test_one_member_that_keeps_its_noise_is_seen() -> None:
    target, kept = summed("shares"), dict[int, bytes]()

    def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        same = [replace(a, key=kept.setdefault(a.number, a.key)) if a.number == 2 else a for a in agents]
        return target.respond(theta, terms, same, engine)

    assert failed(keys(SETTING, answering(target, respond)))


def test_a_share_that_an_empty_batch_lacks_is_seen() -> None:
    """As where a member whose sample is empty has nothing to send, and sends zeros."""
    target = summed("shares")

    def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        for agent, answer in zip(agents, target.respond(theta, terms, agents, engine)):
            yield answer if len(agent.pool_x) else replace(answer, values=np.zeros_like(answer.values))

    assert {"share: law", "sum: shares"} <= failed(noise_questions(SETTING, answering(target, respond)))


def weaker(target: Summed, ratio: float) -> Summed:
    """Shares whose standard deviation is smaller than accounted by this ratio."""
    coins = np.random.default_rng(0)
    # Rounding at random to whole numbers brings a variance of 1/6 back.
    factor = 1 / math.sqrt(1 / ratio**2 - 1 / 6 / 16)

    def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        plan: Any = terms.plan
        louder = replace(terms, steps=replace(plan, bound=round(factor * plan.bound)))
        for answer in target.respond(theta, louder, agents, engine):
            values = np.floor(answer.values / factor + coins.random(len(answer.values)))
            yield replace(answer, values=values.astype(np.int64))

    return answering(target, respond)


def test_noise_that_is_hardly_there_is_seen_by_the_attacks() -> None:
    """Through all that is between a record and the server's sum."""
    found = failed(attack_questions(SETTING, weaker(summed("shares"), 5)))
    assert found == {"attack: μ, sum", "attack: μ, worst case"}


@both
def test_what_is_left_to_the_server(mechanism: str) -> None:
    target = summed(mechanism)
    attempted = Cohort(SETTING, target, "any").run_attempt(3, attempt=2)
    members = target.aggregation.members
    assert (attempted.session.round, attempted.session.attempt, len(attempted.payloads)) == (3, 2, members)
    np.testing.assert_array_equal(attempted.view(0), attempted.numbers.sum(axis=0))
    np.testing.assert_array_equal(attempted.view(1), attempted.numbers[:-1].sum(axis=0))
    np.testing.assert_array_equal(attempted.view(members - 1), attempted.numbers[0])


@both
def test_the_worst_record_scores_1(mechanism: str) -> None:
    """On average: it is what thresholds half-way rely on. In the worst case's view: the least noise."""
    target = summed(mechanism)
    members = target.aggregation.members
    for first, expected in zip(worst_pair(target.plan), (1, 0 if mechanism == "shares" else -1)):
        cohort = Cohort(SETTING, target, "any")
        views = [cohort.run_attempt(t, first=first).view(members - 1) for t in range(100)]
        scores = [score(target, view, 1) for view in views]
        assert np.mean(scores) == pytest.approx(expected, abs=5 * np.std(scores) / 10 + 0.02)
        assert np.std(scores) / 10 < 0.2


def under(change: Mapping[str, Any]) -> Callable[[Summed], Summed]:
    """Masks of a session that has this changed: it does not say which of two it is."""

    def broken(target: Summed) -> Summed:
        def send(request: Request, agents: Mapping[str, Agent], engine: Engine) -> dict[str, bytes]:
            session = request.session
            assert isinstance(session, Session)
            other = replace(session, **change)
            made = target.send(replace(request, session=other), agents, engine)
            return {name: encode(decode(payload, other), session) for name, payload in made.items()}

        return replace(target, send=send)

    return broken


def test_a_sum_that_is_none_is_a_failed_check() -> None:
    """Masks of two cohorts do not cancel."""
    target = summed("shares")

    def send(request: Request, agents: Mapping[str, Agent], engine: Engine) -> dict[str, bytes]:
        made, other = target.send(request, agents, engine), under({"run": "another"})(target)
        return made | {min(agents): other.send(request, agents, engine)[min(agents)]}

    (check,) = (question.answer(0.0) for question in sum_questions(SETTING, replace(target, send=send)))
    assert (check.name, check.holds, check.confidence) == ("sum: words", False, 1.0)
    assert "did not cancel" in check.detail


def test_the_law_of_a_sum_of_shares() -> None:
    for count in (1, 3):
        law = aggregation.law(count)
        assert law.mean() == pytest.approx(0)
        assert law.var() == pytest.approx(16 * count)
        # Nearly a Gaussian, rounded.
        assert law.cdf(2) == pytest.approx(stats.norm.cdf(2.5 / (4 * math.sqrt(count))), abs=1e-3)


def _engines() -> list[EngineName]:
    module = nn.Sequential(nn.Flatten(), nn.Linear(32, 2))
    return ["traced", *([] if native.supports(module, (32,)) else ["native"])]


@pytest.mark.parametrize("engine", _engines())
@pytest.mark.parametrize("masked", [False, True])
def test_neighbours_are_as_far_apart_as_claimed_and_no_further(engine: EngineName, masked: bool) -> None:
    target = summed("shares")
    if not masked:
        target = replace(target, plan=replace(target.plan, active=target.plan.dimension))
    checks = [q.answer(0.0) for q in neighbour_questions(replace(SETTING, engine=engine), target)]
    assert all(check.holds and check.confidence == 1 for check in checks)
    assert all(check.lower_bound > 0.995 * check.claimed for check in checks)


def test_an_engine_that_clips_too_long_is_caught() -> None:
    if "native" not in _engines():
        pytest.skip("no engine that clips by itself here")
    target = faulty("engine-clip", "shares")
    assert failed(neighbour_questions(SETTING, target)) == {"answer: Δ₂, replace-one", "answer: Δ₂, add-remove"}


FED_SPA = (
    "[federation]\nagents = 10\nper_round = 10\nrounds = 2\n[algorithm]\nlocal_steps = 1\nbatch = 144\n"
    'compression = 0.3\nmask = "shared"\n[privacy]\nnoise = "seeded"\nadversary = "secure-aggregation"\n'
    'members = 9\ncolluders = 3\nepsilon = 1.0\nclip = "l2"\nclip_value = 0.5\nsampling = "poisson"\n'
)


def test_the_sums_of_a_fedspa_config(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(FED_SPA)
    mechanism, target, setting = of_config(tmp_path / "run.toml", ["privacy.neighbours=replace-one"], 100, 0)
    assert mechanism is SHARES
    assert (target.plan.members, target.plan.colluders, target.plan.neighbours) == (6, 2, "replace-one")
    assert target.plan.active == 48
    assert failed(mechanism.questions(setting, target)) == set()


@pytest.mark.long
@both
def test_false_alarms_of_sums_come_no_oftener_than_stated(mechanism: str) -> None:
    """100 audits with α = 0.1 for each question."""
    alarms: Counter[str] = Counter()
    for seed in range(100):
        alarms.update(failed(sum_questions(replace(SETTING, seed=seed), summed(mechanism)), 0.1))
    assert all(count <= stats.binom.isf(1e-6, 100, 0.1) for count in alarms.values()), alarms
    for name in ("sum: shares", "sum: honest shares", "sum: coordinates", "share: keys"):
        assert alarms[name] > 0, f"{name} never alarmed at 10 %: it cannot fail"
