"""A search of settings by their scores in proxy runs, along what is known of them: one at a time, in factors of 3.

The rate is walked first. The clip then moves with the rate against it, because their product is what moves a clipped
model; so does the agents' own step size. A candidate is only ever run once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev

from pydantic import TypeAdapter, ValidationError

from fedspa import durable
from fedspa.errors import ConfigError
from fedspa.mechanisms import Plan
from fedspa.runs.config import Config, algorithm_of
from fedspa.runs.defaults import rounds_with, walk_of
from fedspa.runs.halving import Settings, settled

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


# What a search found, in a small file: settings to begin the next one with, and what they were found on.
#
# To take settings over costs nothing here. What they were found on was paid for there, in the ledgers of that run:
# where its agents are the same, both runs add up, as a ledger shows that both share (`run.ledger`). The file has
# nothing of a record in it, not even a digest.

NAME = "study.json"


@dataclass(frozen=True, slots=True)
class Study:
    """`settings` won. `reach` is how far they let θ get in the whole run, which stays the same where a run is longer.
    `about` says what they were found on, and `guarantee` what search and training promised there, in full: an ε alone
    does not tell whether its noise was seeded."""

    settings: dict[str, bool | int | float | str]
    reach: float
    about: dict[str, str | int | float]
    guarantee: str

    @staticmethod
    def of(config: Config, settings: Settings, plan: Plan, guarantee: str) -> Study:
        """Make the study of a search that is over; `config` is the run's with the winner's settings in it."""
        federation = config.federation
        about: dict[str, str | int | float] = {
            "data": config.data.name,
            "features": config.data.features or "",
            "model": config.model.name,
            "parameters": plan.dimension,
            "agents": federation.agents,
            "records": plan.records,
            "rounds": federation.rounds,
        }
        return Study(dict(settings), _reach(config, plan), about, guarantee)

    @staticmethod
    def read(path: Path) -> Study:
        """Read a study from its file, or from the folder of the run that wrote it."""
        path = path / NAME if path.is_dir() else path
        try:
            if not path.is_file():  # a device or a pipe may have no end
                raise FileNotFoundError
            return TypeAdapter(Study).validate_json(path.read_bytes())
        except (OSError, ValidationError):
            raise ConfigError(
                f"there is no study in {path}; name the folder of a run that `fedspa tune` finished, or its {NAME}"
            ) from None

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        durable.replace_text(folder / NAME, text)

    def settings_for(self, config: Config, plan: Plan) -> Settings:
        """Its settings at the rate that reaches as far in the config's own rounds; none where the config's own won."""
        if not self.settings:
            return {}
        return {**self.settings, RATE: scaled(self.reach / _reach(settled(config, {**self.settings, RATE: 1.0}), plan))}


def _reach(config: Config, plan: Plan) -> float:
    algorithm, rounds = config.algorithm, config.federation.rounds
    if (algorithm.server or algorithm_of(config).server) == "adam":  # whose steps are as long as its rate says
        return rounds * algorithm.server_lr
    clip, p = config.privacy.clip_value, algorithm.compression if isinstance(algorithm.compression, float) else 1.0
    norm = clip if config.privacy.clip == "l2" else clip * math.sqrt(plan.active)
    momentum = algorithm.server_options.beta1 if algorithm.server == "momentum" else 0.0
    counted = rounds_with(momentum, rounds)
    return walk_of(counted, algorithm.local_steps, algorithm.local_lr, algorithm.server_lr, p, norm)
