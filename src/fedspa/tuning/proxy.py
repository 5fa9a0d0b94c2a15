"""Proxy runs: the real run repeated on the records that the server holds out for scoring, to compare settings at no
privacy cost: none of them is an agent's.

A proxy run has the rounds of the real run: as many agents, the same masks, sampling rate, steps and clip, and noise of
the same size on the mean gradient. Only the records are others, and fewer. So it shows what rates, clips and averages
do under this noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev, stdev

import numpy as np
import torch

from fedspa.data.dataset import Dataset
from fedspa.errors import ConfigError
from fedspa.examples import count, taken
from fedspa.learning.forward import torch_threads
from fedspa.mechanisms import Plan
from fedspa.runs.config import Config, load
from fedspa.runs.halving import Settings, settled
from fedspa.runs.local import LocalTransport
from fedspa.runs.loop import run_round
from fedspa.runs.rundir import LOWER, RoundMetrics
from fedspa.runs.setup import NOTHING, Given, prepare
from fedspa.server.coordinator import Coordinator, Diverged

# More records show little more under the run's noise; with fewer, the run is repeated on other ones.
_MOST, _TRAINED, _REPEATS = 2000, 2 / 3, 6


@dataclass(frozen=True)
class Curves:
    """The score called `name` after each round, for each repeat; none at all where a model diverged."""

    repeats: tuple[tuple[float, ...], ...]
    name: str

    @property
    def last(self) -> float | None:
        """Mean over the repeats, after the last round."""
        return fmean(curve[-1] for curve in self.repeats) if self.repeats else None

    @property
    def spread(self) -> float:
        """Return the standard deviation over the repeats, after the last round."""
        return stdev(curve[-1] for curve in self.repeats) if len(self.repeats) > 1 else 0.0

    @property
    def values(self) -> list[float]:
        """After the last round; larger is better."""
        return [(-1 if self.name in LOWER else 1) * curve[-1] for curve in self.repeats]

    @property
    def expected_gains(self) -> list[float]:
        """Return what the mean score gained after each round, to the end."""
        means = list(map(fmean, zip(*self.repeats)))
        return [means[-1] - score for score in means]


class ProxyRuns:
    """`config` is the real run's; `plan` has its noise. `check_stop` raises to stop before a round."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        records: Dataset,
        given: Given = NOTHING,
        check_stop: Callable[[], None] | None = None,
    ) -> None:
        self._check_stop = check_stop
        self._given = given
        self._parts = _split(records)
        self._config = _proxy_config(config, plan, count(self._parts[0].train_y))

    def curves(self, settings: Settings) -> Curves:
        config = settled(self._config, settings)
        runs = [self._run(config, part, seed) for seed, part in enumerate(self._parts)]
        # A few records may all be of one class and rank nothing: such a repeat says nothing of any settings.
        scored = [run for run in runs if not run or not all(math.isnan(line.score) for line in run)]
        if not scored:
            raise ConfigError(
                f"no part of the held-out records has a score {runs[0][-1].headline!r}: hold out more (data.holdout), "
                "or choose another task.metric"
            )
        repeats = tuple(tuple(metrics.score for metrics in run) for run in scored)
        whole = all(repeats) and all(math.isfinite(score) for curve in repeats for score in curve)
        return Curves(repeats if whole else (), runs[0][-1].headline if runs[0] else "")

    def _run(self, config: Config, part: Dataset, seed: int) -> list[RoundMetrics]:
        config = config.model_copy(update={"run": config.run.model_copy(update={"seed": config.run.seed + seed})})
        job = prepare(config, part, self._given)
        # Nobody pays: no agent's records may ever be used here.
        server, transport = Coordinator(job.server), LocalTransport(job)
        done = []
        try:
            with torch_threads(1):
                for cohort in job.cohorts():
                    if self._check_stop is not None:
                        self._check_stop()
                    done.append(run_round(server, transport, cohort))
                return done
        except Diverged:
            return []


def _split(data: Dataset) -> Sequence[Dataset]:
    """Split the held-out records into a training and a scoring part, anew for each repeat."""
    records = count(data.test_y)
    trained = min(_MOST, round(_TRAINED * records))
    if not 0 < trained < records:
        raise ConfigError(
            f"{records} records are held out; proxy runs train on some and score on others: raise data.holdout"
        )
    repeats = min(_REPEATS, max(1, 2 * _MOST // trained))
    parts = []
    for seed in range(repeats):
        order = torch.from_numpy(np.random.Generator(np.random.PCG64(seed)).permutation(records))
        train, test = order[:trained], order[trained:]
        parts.append(
            replace(
                data,
                train_x=taken(data.test_x, train),
                train_y=taken(data.test_y, train),
                test_x=taken(data.test_x, test),
                test_y=taken(data.test_y, test),
                owners=None,
                agents=None,
                persons=None,
            )
        )
    return parts


def _proxy_config(config: Config, plan: Plan, records: int) -> Config:
    """A round of the config for so many records, with the plan's own noise on the mean gradient of an agent."""
    agents = min(config.federation.per_round, records)
    held = records // agents
    batch = min(held, max(1, round(plan.batch * held / plan.records)))
    given = config.model_dump(exclude_none=True)
    not_here = {
        "privacy": ("epsilon",),
        "federation": ("cap",),
        "data": ("table", "person", "features"),
        "run": ("ledger", "policy", "out"),
    }
    for section, keys in not_here.items():
        for key in keys:
            given[section].pop(key, None)
    given["data"] |= {"name": "digits", "holdout": 0.0, "agent_holdout": 0.0}  # the records are given
    given["federation"] |= {"agents": agents, "per_round": agents, "participation": "balanced"}
    given["algorithm"]["batch"] = batch
    given["privacy"] |= {
        "noise_multiplier": plan.noise_multiplier * batch / plan.batch,
        "noise": "seeded",
        "delta": min(config.privacy.delta, 0.5 / held),
    }
    given["run"]["workers"] = 1
    given["tuning"] = {}
    try:
        return load(given)
    except ConfigError as error:
        raise ConfigError(f"this run has no proxy ({error}); try settings in its own rounds, by --no-proxy") from None


# A search of settings by their scores in proxy runs, along what is known of them: one at a time, in factors of 3.
#
# The rate is walked first. The clip then moves with the rate against it, because their product is what moves a clipped
# model; so does the agents' own step size. A candidate is only ever run once.

Value = bool | int | float | str
Space = Mapping[str, Sequence[Value]]
RATE, CLIP, LOCAL, AVERAGE = "algorithm.server_lr", "privacy.clip_value", "algorithm.local_lr", "algorithm.ema"
AVERAGES = (0.0, 0.5, 0.8, 0.9)
_COARSE, _STEP, _FINE = (1.0, 1 / 30, 30.0), 3.0, math.sqrt(3.0)
_FARTHEST = 8


class Search:
    """`score` has a number for each repeat of a proxy run, larger for better settings, and none where one diverged."""

    def __init__(self, score: Callable[[Settings], Sequence[float]]) -> None:
        self._score = score
        self.found: dict[tuple[tuple[str, Value], ...], Sequence[float]] = {}

    def of(self, settings: Settings) -> Sequence[float]:
        key = tuple(sorted(settings.items()))
        if key not in self.found:
            self.found[key] = self._score(settings)
        return self.found[key]

    def beats(self, one: Settings, other: Settings) -> bool:
        """Whether one beats the other by more than their difference spreads over the repeats. A search compares so
        often that chance would pass a standard error, and what may be chance moves nothing."""
        new, old = self.of(one), self.of(other)
        if not new or not old:
            return bool(new)
        gains = [a - b for a, b in zip(new, old)]
        return fmean(gains) > pstdev(gains)

    def best(self, at: Settings, *others: Settings) -> Settings:
        for other in others:
            at = other if self.beats(other, at) else at
        return at

    @property
    def ranking(self) -> list[Settings]:
        """All that were scored and did not diverge, the best mean first."""
        scored = [key for key in self.found if self.found[key]]
        return [dict(key) for key in sorted(scored, key=lambda key: -fmean(self.found[key]))]

    def walk(self, at: Settings, move: Callable[[Settings, float], Settings], factor: float) -> Settings:
        """Walk on in one direction while that is better; else in the other."""
        for step in (factor, 1 / factor):
            start = at
            for _ in range(_FARTHEST):
                ahead = move(at, step)
                if not self.beats(ahead, at):
                    break
                at = ahead
            if at != start:
                break
        return at

    def run(self, start: Settings, space: Space, *, local: bool) -> Settings:
        """The best of all that lies on its way from `start`. `space` has the values of keys that the caller declares,
        in place of those here; `local`: whether the agents' step size is worth moving (more than one local step)."""
        at = dict(start)
        if RATE not in space:
            at = dict(self.best(*(_rate(at, factor) for factor in _COARSE)))
            at = dict(self.walk(at, _rate, _STEP))
        if CLIP not in space:
            at = dict(self.walk(at, _against(CLIP, RATE), _STEP))
        if local and LOCAL not in space:
            at = dict(self.walk(at, _against(LOCAL, RATE), _STEP))
        for key, values in {AVERAGE: AVERAGES, **space}.items():
            at = dict(self.best(at, *({**at, key: value} for value in values)))
        if RATE not in space:
            at = dict(self.walk(at, _rate, _FINE))
        return at


def _rate(settings: Settings, factor: float) -> Settings:
    return {**settings, RATE: scaled(settings[RATE], factor)}


def _against(key: str, other: str) -> Callable[[Settings, float], Settings]:
    def move(settings: Settings, factor: float) -> Settings:
        return {
            **settings,
            key: scaled(settings[key], factor),
            other: scaled(settings[other], 1 / factor),
        }

    return move


def scaled(value: Value, factor: float = 1.0) -> float:
    """Three significant digits, within what a config takes."""
    return float(f"{min(max(float(value) * factor, 1e-9), 1e9):.3g}")


def distinct_settings(ranking: Sequence[Settings], most: int) -> list[Settings]:
    """The first of the ranking, and after it those that differ from all taken before by more than a fine step."""
    taken: list[Settings] = []
    for settings in ranking:
        if len(taken) == most:
            break
        if all(_distance(settings, other) > _FINE * 1.01 for other in taken):
            taken.append(settings)
    return taken


def _distance(one: Settings, other: Settings) -> float:
    """Return the largest factor between two numbers of both; infinite where something else differs."""
    found = 1.0
    for key in one.keys() | other.keys():
        a, b = one.get(key), other.get(key)
        if a == b:
            continue
        if key in (RATE, CLIP, LOCAL) and isinstance(a, int | float) and isinstance(b, int | float):
            found = max(found, a / b, b / a)
        elif key != AVERAGE:
            return math.inf
        else:
            found = max(found, 1 + 4 * abs(float(a or 0) - float(b or 0)))
    return found
