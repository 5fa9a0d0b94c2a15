"""What a trial may set, and whose turn it is: the worse half of the candidates is dropped until one is left.

No torch: reports read this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedspa.errors import ConfigError
from fedspa.runs import config as configs
from fedspa.runs.config import Config
from fedspa.runs.metrics import better

Settings = Mapping[str, bool | int | float | str]
# What a trial may set. None of it is in an event: a participation costs the same with all of them.
SEARCHED = (
    "algorithm.server",
    "algorithm.server_lr",
    "algorithm.local_lr",
    "algorithm.beta1",
    "algorithm.beta2",
    "algorithm.kappa",
    "algorithm.ema",
    "algorithm.compression",
    "algorithm.mask",
    "privacy.clip_value",
)


def settled(config: Config, settings: Settings) -> Config:
    """The config with one candidate's settings in it, and no trials left."""
    for key in settings:
        if key not in SEARCHED:
            raise ConfigError(
                f"{key} cannot be tried: batch, local steps, sampling and noise decide what a participation costs and "
                f"are fixed before (`fedspa suggest`); allowed: {', '.join(SEARCHED)}"
            )
    given = config.model_dump(exclude_none=True)
    given["tuning"] = {}
    return configs.load(given, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


@dataclass(frozen=True, slots=True)
class Halving:
    """`candidates` in the order of what is expected of them; each rung gives all that are left `each` rounds. `ahead`
    is what each candidate's score is expected to gain after its first, second, … round; empty where nobody knows."""

    candidates: int
    each: int
    ahead: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def within(cls, candidates: int, rounds: int | None, ahead: Sequence[Sequence[float]] | None = None) -> Halving:
        """As many rounds each as fit; a ConfigError where not even one does."""
        cost = sum(_rungs(candidates))
        if rounds is not None and rounds < cost:
            raise ConfigError(
                f"tuning.rounds is {rounds}; halving {candidates} candidates takes at least {cost} rounds: allow more, "
                "or name fewer candidates"
            )
        found = cls(candidates, 1 if rounds is None or cost == 0 else rounds // cost, tuple(map(tuple, ahead or ())))
        if ahead is not None and [len(each) >= found.longest for each in ahead] != [True] * candidates:
            raise ConfigError(
                f"tuning.ahead must have a list for each of the {candidates} candidates, of what its score gains after "
                f"each of its first {found.longest} rounds; leave it out where that is not known"
            )
        return found

    @property
    def longest(self) -> int:
        """The rounds of the trial that gets most."""
        return self.each * len(_rungs(self.candidates))

    @property
    def rounds(self) -> int:
        """That the search takes, in all."""
        return self.each * sum(_rungs(self.candidates))

    def trial(self, scores: Sequence[float], name: str) -> int:
        """Whose turn it is after rounds with these scores, called `name`; the winner's, once the search is over."""
        left, done = list(range(self.candidates)), 0
        for rung in range(len(_rungs(self.candidates))):
            last: dict[int, float] = {}
            for trial in left:
                if len(scores) < done + self.each:
                    return trial
                done += self.each
                gain = self.ahead[trial][(rung + 1) * self.each - 1] if self.ahead else 0.0
                last[trial] = scores[done - 1] + gain
            # A tie is the earlier candidate's; what has no score is the last.
            sign = 1 if better(name) is min else -1
            left.sort(key=lambda trial: math.inf if math.isnan(last[trial]) else sign * last[trial])
            left = left[: -(-len(left) // 2)]
        return left[0]


def _rungs(candidates: int) -> list[int]:
    """How many are left at each."""
    found = []
    while candidates > 1:
        found.append(candidates)
        candidates = -(-candidates // 2)
    return found
