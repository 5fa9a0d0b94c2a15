"""What a search found, in a small file: settings to begin the next one with, and what they were found on.

To take settings over costs nothing here. What they were found on was paid for there, in the ledgers of that run: where
its agents are the same, both runs add up, as a ledger shows that both share (`run.ledger`). The file has nothing of a
record in it, not even a digest.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fedspa import durable
from fedspa.errors import ConfigError
from fedspa.mechanisms import Plan
from fedspa.runs.config import Config
from fedspa.runs.halving import Settings, settled
from fedspa.runs.plans import algorithm_of
from fedspa.tuning.search import RATE, scaled
from fedspa.tuning.suggest import walk_of

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
        """Of a search that is over; `config` is the run's with the winner's settings in it."""
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
        """From its file, or from the folder of the run that wrote it."""
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
    return walk_of(rounds, algorithm.local_steps, algorithm.local_lr, algorithm.server_lr, p, norm)
