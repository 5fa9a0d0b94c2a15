"""What a trial may set, and whose turn it is: the worse half of the candidates is dropped until one is left.

No torch: reports read this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from fedspa.errors import ConfigError
from fedspa.runs import config as configs
from fedspa.runs.config import Config
from fedspa.runs.rundir import better

Settings = Mapping[str, bool | int | float | str]
# Of a round: the server's score of the model at work, or what agents said of several candidates, by number.
Score = float | Mapping[int, float | None]
# What a trial may set. None of it is in an event: a participation costs the same with all of them.
SEARCHED = (
    "algorithm.server",
    "algorithm.server_lr",
    "algorithm.local_lr",
    "algorithm.server_options.beta1",
    "algorithm.server_options.beta2",
    "algorithm.server_options.kappa",
    "algorithm.ema",
    "algorithm.compression",
    "algorithm.mask",
    "privacy.clip_value",
)


def check_searched(keys: Iterable[str]) -> None:
    """Raise a ConfigError for a key that a trial may not set."""
    for key in keys:
        if key not in SEARCHED:
            raise ConfigError(
                f"{key} cannot be tried: batch, local steps, sampling and noise decide what a participation costs and "
                f"are fixed before (`fedspa suggest`); allowed: {', '.join(SEARCHED)}"
            )


def settled(config: Config, settings: Settings) -> Config:
    """Return the config with one candidate's settings in it, and no trials left."""
    check_searched(settings)
    given = config.model_dump(exclude_none=True)
    given["tuning"] = {}
    return configs.load(given, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


class Turn(NamedTuple):
    """What a round is for: `trial` trains, or (`scoring`) all that are `left` are scored by agents, after its last
    round. Once the search is over, nobody but the winner is left."""

    trial: int
    scoring: bool
    left: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Halving:
    """`candidates` in the order of what is expected of them; each rung gives all that are left `each` rounds, and then
    `scoring` rounds in which agents score them: none where the server scores by itself. `expected_gains`
    is what each candidate's score is expected to gain from its first, second, … round to the end, so that a slow start
    is not held against it; empty where nobody knows."""

    candidates: int
    each: int
    expected_gains: tuple[tuple[float, ...], ...] = ()
    scoring: int = 0

    @classmethod
    def within(
        cls,
        candidates: int,
        rounds: int | None,
        expected_gains: Sequence[Sequence[float]] | None = None,
        scoring: int = 0,
    ) -> Halving:
        """Give each candidate as many rounds as fit; raise a ConfigError if not even one does."""
        rungs = _rungs(candidates)
        least = cls(candidates, 1, scoring=scoring).rounds
        if rounds is not None and rounds < least:
            raise ConfigError(
                f"tuning.rounds is {rounds}; halving {candidates} candidates takes at least {least} rounds: allow "
                "more, or name fewer candidates"
            )
        each = 1 if rounds is None or not rungs else (rounds - scoring * len(rungs)) // sum(rungs)
        found = cls(candidates, each, tuple(map(tuple, expected_gains or ())), scoring)
        if (
            expected_gains is not None
            and [len(each) >= found.longest for each in expected_gains] != [True] * candidates
        ):
            raise ConfigError(
                f"tuning.expected_gains must have a list for each of the {candidates} candidates: what its score gains "
                f"after each of its first {found.longest} rounds"
            )
        return found

    @property
    def longest(self) -> int:
        """Return the rounds of the trial that gets most."""
        return self.each * len(_rungs(self.candidates))

    @property
    def rounds(self) -> int:
        """Return the rounds of the whole search."""
        rungs = _rungs(self.candidates)
        return self.each * sum(rungs) + self.scoring * len(rungs)

    def turn(self, scores: Sequence[Score], name: str) -> Turn:
        """Return what the round is for that comes after rounds with these scores: once the search is over, the
        winner's. Those of the server are called `name`; those of agents are the larger the better."""
        left, done = list(range(self.candidates)), 0
        for rung in range(len(_rungs(self.candidates))):
            ends = {trial: done + (place + 1) * self.each for place, trial in enumerate(left)}
            if (working := next((trial for trial, end in ends.items() if len(scores) < end), None)) is not None:
                return Turn(working, False, tuple(left))
            done += self.each * len(left)
            scored, done = scores[done : done + self.scoring], done + self.scoring
            if len(scores) < done:
                return Turn(left[-1], True, tuple(left))
            last = {trial: _mean(scored, trial) if self.scoring else _plain(scores[ends[trial] - 1]) for trial in left}
            if self.expected_gains:
                at = (rung + 1) * self.each - 1
                last = {trial: score + self.expected_gains[trial][at] for trial, score in last.items()}
            # A tie is the earlier candidate's; what has no score is the last.
            sign = 1 if not self.scoring and better(name) is min else -1
            left.sort(key=lambda trial: math.inf if math.isnan(last[trial]) else sign * last[trial])
            left = left[: -(-len(left) // 2)]
        return Turn(left[0], False, (left[0],))


def _plain(score: Score) -> float:
    return math.nan if isinstance(score, Mapping) else score


def _mean(scored: Sequence[Score], trial: int) -> float:
    """Return the mean of what agents said of a trial; NaN if they said nothing."""
    found = [score.get(trial) for score in scored if isinstance(score, Mapping)]
    known = [value for value in found if value is not None]
    return fmean(known) if known else math.nan


def _rungs(candidates: int) -> list[int]:
    """Return how many are left at each."""
    found = []
    while candidates > 1:
        found.append(candidates)
        candidates = -(-candidates // 2)
    return found
