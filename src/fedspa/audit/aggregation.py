"""The audit of secure aggregation, whatever the mechanism whose shares of noise are added up, and of discrete Gaussian
shares (fedspa, dp-fed).

A cohort on the probe has members whose updates leave masked and a server that adds them up. Everything is made as in a
run: `respond` and its engine, the session, `participate.payloads`, the server's sum. Those who collude tell the server
the numbers that they sent. A round that is interrupted and made again is a new release of everybody's, and must have
noise of its own.

Two agents with the same keys have the same coins and the same random bits of noise. A draw of a share grows with the
point that it is around, and by whole units as that moves by whole units: so two draws are apart by what their points
are, rounded up. The grid is so fine here that these roundings, of less than a unit and a step per coordinate, hardly
show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
from scipy import stats
from torch import Tensor

from fedspa.agent.participate import Request, payloads, simulated_keys
from fedspa.algorithms import Agent, Algorithm, Terms, chosen
from fedspa.algorithms.base import Answer, session_of
from fedspa.audit.audited import Audited, Setting
from fedspa.audit.probes import (
    DIMENSION,
    INPUTS,
    SEED,
    MakeEngine,
    Probe,
    Respond,
    TwoClass,
    answers,
    certain_model,
    neighbours,
    null_records,
    two_class_models,
)
from fedspa.audit.statistics import (
    UNBOUNDED,
    Finding,
    Floats,
    Integers,
    Question,
    certain,
    columns,
    cosines,
    epsilon_lower,
    law_question,
    mu_lower,
    threshold_attack,
    variance_limits,
)
from fedspa.engine.local import Engine
from fedspa.errors import ConfigError
from fedspa.mechanisms import Plan
from fedspa.mechanisms.base import Aggregation
from fedspa.mechanisms.discrete_gaussian.plan import FINE, MOST_BOUND, SIGMA, DiscreteGaussianPlan
from fedspa.mechanisms.discrete_gaussian.release import REACH
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.event import Event
from fedspa.randomness.streams import agent_key
from fedspa.secagg.masking import MaskedSum, Void
from fedspa.secagg.session import Session

# Of a run's cohort so many are simulated, with as large a part of colluders; what is claimed is priced for these.
MOST_MEMBERS = 6
# A mask of so many of the probe's coordinates, where the run has one.
ACTIVE = 48
# What a record weighs, in bounds: far beyond being clipped.
CLIPPED = 1e4

Send = Callable[[Request, Mapping[str, Agent], Engine], dict[str, bytes]]
# Rounds of null records, and of either neighbour.
SILENT, LOUD = 200, 400
DELTA = 0.1
RUNS = ("one run", "another run")
ROUNDS = 4
RECORDS = 17
# What the worst pair reaches of the claim, which includes rounding.
REACHED = 0.99


@dataclass(frozen=True, slots=True)
class Summed:
    """What is attacked: a plan on the probe's coordinates, the algorithm that answers by it, and what leaves (`send`).

    `law` is of scipy's kind: of a coordinate of the sum over so many members, none of whom has a gradient.
    `extra_colluders` is how many more collude than the plan says: 0 unless there is a fault.
    """

    plan: Plan
    algorithm: Algorithm
    law: Callable[[int], Any]
    send: Send = payloads
    engine: MakeEngine = Setting.make_engine
    extra_colluders: int = 0

    @property
    def aggregation(self) -> Aggregation:
        aggregation = self.plan.aggregation
        if aggregation is None:
            raise ConfigError("the plan is not of sums: privacy.adversary = 'secure-aggregation' makes it one")
        return aggregation

    @property
    def colluders(self) -> int:
        return self.aggregation.colluders + self.extra_colluders

    @property
    def respond(self) -> Respond[Answer]:
        return self.algorithm.respond

    def terms(self, t: int) -> Terms:
        return Terms(t, "shared", SEED, 1.0, self.plan)


def answering(target: Summed, respond: Callable[..., Iterator[Answer]]) -> Summed:
    """Return the target with other answers."""
    return replace(target, algorithm=replace(target.algorithm, respond=respond))


def few_members(members: int, colluders: int) -> tuple[int, int]:
    """A run's cohort, brought down to what is simulated."""
    few = min(members, MOST_MEMBERS)
    return few, colluders * few // members


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt: what the server was sent, and what each member knows to have sent, [members, coordinates]."""

    session: Session
    payloads: Mapping[str, bytes]
    numbers: Integers

    def total(self) -> Integers:
        """Return the sum as the server unmasks it."""
        taken = MaskedSum(self.session)
        for name, payload in self.payloads.items():
            taken.add(name, payload)
        return taken.values()

    def view(self, colluders: int) -> Integers:
        """Return what the server knows of the sum if the last members have sent it their numbers. The first one is
        attacked."""
        members = len(self.numbers)
        view: Integers = self.total() - self.numbers[members - colluders :].sum(axis=0)
        return view


class Cohort:
    """Members of one run on the probe. All have null records, but the first may have one that is not."""

    def __init__(self, setting: Setting, target: Summed, run: str) -> None:
        self._setting, self._target, self._run = setting, target, run
        self._model: Probe = certain_model()
        self._engine = target.engine(setting, self._model.module, self._model.shape)
        # The server knows names and public keys, and these alone.
        self._secrets = simulated_keys(setting.key("members"), range(target.aggregation.members))

    def run_attempt(self, t: int, attempt: int = 1, first: float | None = None, *, empty: bool = False) -> Attempt:
        """The attempt at round t. The first member's first record is x = first·(1, …, 1) of label 1, or null; `empty`:
        no member has any, and every batch is as a Poisson sample in which nobody was drawn."""
        setting, target = self._setting, self._target
        numbers: list[Integers] = []
        algorithm = replace(target.algorithm, respond=recording(target.algorithm, numbers))
        terms, theta = target.terms(t), self._model.theta
        public = {name: secret.public for name, secret in self._secrets.items()}
        session = session_of(self._run, attempt, public, algorithm, terms, theta, "int", setting.noise_mode)
        request = Request(self._run, algorithm, terms, theta, "int", setting.noise_mode, attempt, session)
        agents = {}
        for number, (name, secret) in enumerate(self._secrets.items()):
            x, y = null_records(0 if empty else target.plan.batch, first if number == 0 else None)
            key = agent_key(setting.key("cohort", self._run, attempt), t, number)
            agents[name] = Agent(number, x, y, SEED, key, setting.exact, secret=secret)
        return Attempt(session, target.send(request, agents, self._engine), np.stack(numbers))


def recording(algorithm: Algorithm, numbers: list[Integers]) -> Callable[..., Iterator[Answer]]:
    """`respond`, of which each member remembers what it sent."""

    def respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[Answer]:
        for answer in algorithm.respond(theta, terms, agents, engine):
            numbers.append(answer.values.copy())
            yield answer

    return respond


def worst_pair(plan: Plan) -> tuple[float, float | None]:
    """Return the first member's worst record, and what is in its place under the plan's relation."""
    large = CLIPPED * plan.clip_norm
    return large, None if plan.neighbours == "add-remove" else -large


def score(target: Summed, view: Integers, shares: int) -> float:
    """How much the worst record shows in what is left of a sum over so many members: 1 on average where it is there, 0
    without it, −1 with its opposite."""
    assert target.algorithm.mean is not None
    plan, terms = target.plan, target.terms(0)
    update = target.algorithm.mean(view, shares, terms)
    values: Floats = update.values.astype(np.float64) * (shares * plan.batch / (-terms.local_lr * terms.scale))
    active = terms.coordinates(update.mask_seed)
    direction = _direction()[slice(None) if active is None else active]
    return float(values @ direction / (np.linalg.norm(direction) * plan.clip_norm))


def _direction() -> Floats:
    """Return the worst record's gradient: +x on the first row of weights, −x on the second; its biases hardly count."""
    direction = np.zeros(DIMENSION)
    direction[:INPUTS], direction[INPUTS : 2 * INPUTS] = 1.0, -1.0
    return direction


def sum_questions(setting: Setting, target: Summed) -> list[Question]:
    """A cohort whose masks do not cancel, or whose sum no honest one could have, has failed them all."""
    try:
        own = keys_question(setting, target)
        return [*noise_questions(setting, target), *attack_questions(setting, target), own]
    except Void as void:
        return [certain("sum: words", "count", 0.0, 1.0, str(void))]


def noise_questions(setting: Setting, target: Summed) -> list[Question]:
    """Sums over members without a gradient: whether they are what was sent, and how many shares of noise they hold.
    Where batches may be empty, those of every other round are."""
    cohort, poisson = Cohort(setting, target, "silent"), target.plan.sampling == "poisson"
    rounds = [cohort.run_attempt(t, empty=poisson and t % 2 == 1) for t in range(min(setting.draws, SILENT))]
    members, honest, colluders = target.aggregation.members, target.aggregation.honest, target.colluders
    totals, views = (np.stack([attempted.view(known) for attempted in rounds]) for known in (0, colluders))
    own = np.stack([attempted.numbers for attempted in rounds])
    wrong = int((totals != own.sum(axis=1)).any(axis=1).sum())
    noise, seen = totals - target.law(members).mean(), views - target.law(members - colluders).mean()
    one = target.law(1)
    detail = f"distance from the law of a share, in all and by member; {len(rounds)} rounds"
    by_member = list(own.swapaxes(0, 1))
    return [
        certain("sum: words", "count", 0.0, float(wrong), f"sums of {len(rounds)} that are not what the members sent"),
        law_question("share: law", one, [own, *by_member], detail),
        _shares("sum: shares", one.var(), noise, members, f"all {members} members"),
        columns("sum: coordinates", noise),
        _shares("sum: honest shares", one.var(), seen, honest, f"{members} members without {colluders} colluders"),
    ]


def _shares(name: str, variance: float, noise: Floats, shares: int, whose: str) -> Question:
    """Return how many shares of this variance are in the noise of sums: as many as the plan counts on, but for chance.

    The limits are those of Gaussian noise. A mechanism's noise may have a smaller fourth moment, and a smaller
    chance to pass them.
    """
    found = float((noise**2).mean() / variance)
    detail = f"{found:.3f} shares of noise in sums over {whose}, where {shares} count; {noise.size} values"

    def judge(alpha: float) -> Finding:
        low, high = variance_limits(noise.size, alpha)
        return Finding(shares * max(1 - low, high - 1), abs(found - shares), detail, low <= found / shares <= high)

    return Question(name, "count", judge)


def attack_questions(setting: Setting, target: Summed) -> list[Question]:
    """The worst record of one member, or what is in its place: distinguished by a threshold, from the sum without the
    colluders' numbers, and without those of all others."""
    sides: list[tuple[list[float], list[float]]] = []
    members, colluders = target.aggregation.members, target.colluders
    for side, first in zip(("in", "out"), worst_pair(target.plan)):
        cohort = Cohort(setting, target, side)
        rounds = [cohort.run_attempt(t, first=first) for t in range(min(setting.draws, LOUD))]
        sides.append(
            (
                [score(target, attempted.view(colluders), members - colluders) for attempted in rounds],
                [score(target, attempted.view(members - 1), 1) for attempted in rounds],
            )
        )
    seen, alone = (tuple(np.array(scores) for scores in view) for view in zip(*sides))
    plan = target.plan
    assert plan.worst_case_event is not None
    who = f"{members} members with {colluders} colluding"
    return [
        _attack("sum", target, plan.event, seen, f"threshold attack on sums over {who}"),
        _attack(
            "worst case", target, plan.worst_case_event, alone, "threshold attack on one member, all others colluding"
        ),
    ]


def _attack(whose: str, target: Summed, event: Event, sides: Iterable[Any], detail: str) -> Question:
    """Attack μ where the claim has one, else ε at δ = 0.1."""
    neighbours = target.plan.neighbours
    middle = 0.5 if neighbours == "add-remove" else 0.0
    shift = event.step.gaussian_shift(neighbours)
    if shift is not None:
        claimed = min(UNBOUNDED, shift)
        return threshold_attack(f"attack: μ, {whose}", "mu", claimed, list(sides), middle, mu_lower, detail)
    claimed = min(UNBOUNDED, epsilon({event: 1}, DELTA, neighbours=neighbours))
    bound = partial(epsilon_lower, DELTA)
    detail = f"{detail}, δ = {DELTA:g}"
    return threshold_attack(f"attack: ε, {whose}", "epsilon", claimed, list(sides), middle, bound, detail)


def keys_question(setting: Setting, target: Summed) -> Question:
    """Updates of null records over members, rounds, attempts and runs: no two share their noise, though all public
    numbers are the same in both runs."""
    turns = [(cohort, t) for cohort in (Cohort(setting, target, run) for run in RUNS) for t in range(ROUNDS)]
    numbers = [cohort.run_attempt(t, attempt).numbers for cohort, t in turns for attempt in (1, 2)]
    values = np.concatenate(numbers) - target.law(1).mean()
    return cosines("share: keys", values, "pairs of updates over members, rounds, attempts and runs")


def neighbour_questions(setting: Setting, target: Summed) -> list[Question]:
    """The distances of shares that come nearest to what is claimed: of an agent with another record in the place of
    one, and with neither."""
    assert isinstance(target.plan, DiscreteGaussianPlan)
    worst = {"replace-one": (0.0, 1.0), "add-remove": (0.0, 1.0)}
    pairs, slackest = 0, math.inf
    for model, plan in two_class_models(setting.seed, partial(_fitted, target.plan)):
        away = _differences(setting, target, model, plan)
        for relation, distances, weight in zip(worst, away, (2, 1)):
            most = weight * plan.bound / FINE + math.sqrt(plan.active) * (1 + 1 / FINE)
            worst[relation] = max(worst[relation], (float(distances.max()), most), key=lambda of: of[0] / of[1])
            slackest = min(slackest, float(distances.max()) / most)
        pairs += away.size
    detail = f"{pairs} pairs of agents, the same keys for both"
    if slackest < REACHED:
        detail += f"; the worst pair of one model reaches {slackest:.4g} of it only: this test has lost its reach"
    return [
        certain(f"answer: Δ₂, {relation}", "levels", most, seen, detail, seen <= most and slackest >= REACHED)
        for relation, (seen, most) in worst.items()
    ]


def _fitted(plan: DiscreteGaussianPlan, dimension: int, clip_value: float | None) -> DiscreteGaussianPlan:
    """Return the plan on a fine grid, with a mask of three quarters of the coordinates if it has one."""
    active = dimension if plan.active == plan.dimension else dimension * 3 // 4
    own = replace(plan, dimension=dimension, active=active, records=RECORDS, bound=MOST_BOUND // 2, delta=1e-3)
    return own if clip_value is None else replace(own, clip_value=clip_value)


def _differences(setting: Setting, target: Summed, model: TwoClass, plan: DiscreteGaussianPlan) -> Floats:
    """Return L2 distances in units, [replaced or removed, pairs]."""
    key = setting.key("neighbours", plan.dimension)
    agents = [(x, y, key) for each in neighbours(model, RECORDS, setting.generator()) for x, y in each]
    values = np.stack([answer.values for answer in answers(setting, target, model, plan, agents)]).astype(np.float64)
    one, another, neither = values[::3], values[1::3], values[2::3]
    return np.stack([np.linalg.norm(one - another, axis=1), np.linalg.norm(one - neither, axis=1)])


def of_plan(plan: DiscreteGaussianPlan) -> Summed:
    """Return the mechanism of a run, with one record a member: noise does not depend on how many there are."""
    members, colluders = few_members(plan.members, plan.colluders)
    few = replace(
        plan,
        dimension=DIMENSION,
        active=DIMENSION if plan.active == plan.dimension else ACTIVE,
        records=1,
        members=members,
        colluders=colluders,
    )
    return Summed(few, chosen("fedspa", "secure-aggregation"), law)


@cache
def law(shares: int) -> Any:
    """Return the law of the sum of so many discrete Gaussians around 0: their convolution."""
    values = np.arange(-REACH, REACH + 1)
    one = np.exp(-(values**2) / (2 * SIGMA**2))
    one /= one.sum()
    chances = one
    for _ in range(shares - 1):
        chances = np.convolve(chances, one)
    return stats.rv_discrete(values=(np.arange(-shares * REACH, shares * REACH + 1), chances / chances.sum()))


def questions(setting: Setting, target: Summed) -> Iterator[Question]:
    """All questions about shares, in the order of the report."""
    yield from neighbour_questions(setting, target)
    yield from sum_questions(setting, target)


SHARES = Audited(
    name="shares",
    of_plan=of_plan,
    questions=questions,
)
