"""What to audit, and how hard: a plan, the noise mode, an engine, and how many draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from fedspa.engine.choose import EngineName
from fedspa.errors import ConfigError
from fedspa.mechanism.streams import NoiseMode, Stream, derive_key, root_key
from fedspa.privacy.event import Neighbours, Sampling
from fedspa.privacy.plan import Clipping, ClipRule, Plan

FALSE_ALARM = 1e-4
DRAWS = 5000


@dataclass(frozen=True)
class Setting:
    """`relations` are those under which the plan's claim is tested; `every_variant` widens the tests that cost nothing
    to both clippings, both private clip rules and both arithmetics."""

    plan: Plan
    relations: tuple[Neighbours, ...]
    noise_mode: NoiseMode
    engine: EngineName
    draws: int = DRAWS
    seed: int = 0
    false_alarm: float = FALSE_ALARM
    every_variant: bool = True

    def __post_init__(self) -> None:
        if self.draws < 100:
            raise ConfigError(f"--draws is {self.draws}; below 100 no attack can say anything")
        if not 0 < self.false_alarm < 0.5:
            raise ConfigError(f"the false-alarm rate is {self.false_alarm}; it must lie above 0 and below 0.5")
        if self.noise_mode not in get_args(NoiseMode):
            raise ConfigError(f"--noise-mode is {self.noise_mode!r}; allowed: {', '.join(get_args(NoiseMode))}")
        if not self.plan.is_private:
            raise ConfigError("privacy.clip_rule is 'median', which is not private: there is no claim to audit")
        object.__setattr__(self, "_root", root_key(self.noise_mode, self.seed))

    @property
    def exact(self) -> bool:
        return self.noise_mode == "exact"

    @property
    def root(self) -> bytes:
        """Where the mechanism's randomness comes from: the operating system, unless the mode is `seeded`."""
        root: bytes = self._root  # type: ignore[attr-defined]
        return root

    def stream(self, *labels: str | int) -> Stream:
        return Stream(derive_key(self.root, "audit", *labels))

    def plans(self) -> Iterator[Plan]:
        """The plan under each relation."""
        for relation in self.relations:
            yield replace(self.plan, neighbours=relation)

    def variants(self, plan: Plan) -> Iterator[tuple[Plan, bool]]:
        """(plan, on grid): the plan as it is, and its siblings."""
        if not self.every_variant:
            yield plan, self.exact
            return
        for clip in get_args(Clipping):
            for rule in ("given", "quantile"):
                for on_grid in (False, True):
                    yield replace(plan, clip=clip, clip_rule=rule), on_grid


def synthetic(
    *,
    noise: float = 1.0,
    clip: Clipping = "coordinate",
    neighbours: Neighbours | None = None,
    sampling: Sampling = "poisson",
    noise_mode: NoiseMode = "secure",
    engine: EngineName = "auto",
    draws: int = DRAWS,
    seed: int = 0,
    false_alarm: float = FALSE_ALARM,
    clip_rule: ClipRule = "given",
) -> Setting:
    """A small mechanism that the attacks see best: 16 of 64 coordinates, 8 of 16 records."""
    relations = relations_for(sampling, neighbours)
    plan = Plan(
        dimension=64,
        active=16,
        clip=clip,
        clip_value=0.1,
        sampling=sampling,
        batch=8,
        records=16,
        local_steps=1,
        participations=1,
        noise_multiplier=noise,
        neighbours=relations[0],
        delta=1e-3,
        clip_rule=clip_rule,
    )
    return Setting(plan, relations, noise_mode, engine, draws, seed, false_alarm)


def from_config(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    neighbours: Neighbours | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> Setting:
    """The mechanism of a run's config: its plan (calibrated as the run would), noise mode and engine."""
    from fedspa.runs.config import load
    from fedspa.runs.setup import prepare

    config = load(path, overrides)
    job = prepare(config)
    if job.plan is None:
        raise ConfigError(f"{path}: {config.algorithm.name} promises no privacy; audit a config of fedspa or dp-fed")
    if not isinstance(job.plan, Plan):
        raise ConfigError(f"{path}: {config.algorithm.name} has an audit of its own; give no --neighbours")
    relations = relations_for(job.plan.sampling, neighbours)
    mode, engine = config.privacy.noise, config.run.engine
    return Setting(job.plan, relations, mode, engine, draws, seed, every_variant=False)


def relations_for(sampling: Sampling, neighbours: Neighbours | None) -> tuple[Neighbours, ...]:
    """The relation asked for, or all that have a sound accountant with this sampling."""
    if neighbours is not None:
        return (neighbours,)
    return ("add-remove", "replace-one") if sampling == "poisson" else ("replace-one",)
