"""What a mechanism is, to everything outside its room: a plan, the kinds of events that it writes into ledgers, and how
its plans are made. Nothing outside asks which one it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, Self, get_type_hints

from fedspa.errors import PrivacyError
from fedspa.privacy.event import PLD, Event, Neighbours, Sampling, Unit, check_cohort, check_word

Clipping = Literal["coordinate", "l2"]
ClipRule = Literal["given", "quantile"]
# Against whom a run's ε holds: everyone outside the agent, or a server that sees no more than sums.
Adversary = Literal["local", "secure-aggregation"]

# Float32 gradients cannot be held to a bound near the ends of their range: squares of 1e-20 vanish, and an example of
# "norm 0" would pass any clip. A malicious server would ask for such a clip.
SMALLEST_CLIP, LARGEST_CLIP = 1e-10, 1e10
# What a server announces of every round, with or without a plan.
STEPS = ("dimension", "active", "sampling", "batch", "local_steps")
# Sums in whole numbers have so many to the clip value: as fine as float32 is there.
CLIP_UNITS = 1 << 24


def check_clip(clip: Clipping, clip_value: float) -> None:
    check_word("clip", clip, Clipping)
    if not SMALLEST_CLIP <= clip_value <= LARGEST_CLIP:
        raise PrivacyError(f"clip value is {clip_value}; it must lie between {SMALLEST_CLIP:g} and {LARGEST_CLIP:g}")


@dataclass(frozen=True, slots=True)
class Aggregation:
    """What the server sees of a round under secure aggregation: one sum of `count` whole numbers over a cohort.

    A cohort has `members` agents at least, and the ε of a plan counts the noise of `honest` of them: up to `colluders`
    others tell the server all they know. `low` and `high` bound the sum over any cohort that the plan allows, however
    large, where all were honest.
    """

    members: int
    colluders: int
    low: int
    high: int
    count: int

    def __post_init__(self) -> None:
        check_cohort(self.members, self.colluders)

    @property
    def honest(self) -> int:
        return self.members - self.colluders


class Plan(Protocol):
    """Everything that decides an agent's guarantee, in one frozen object. A plan that exists is consistent.

    `noise_multiplier` is the noise on the sum of clipped gradients over `clip_norm`, the bound on one of them; `sigma`
    is the noise on each coordinate of their mean. `compression` is the size of an upload relative to the model's.
    `unit` is what an example is, and so what is protected: `records` and `batch` count those.
    """

    @property
    def unit(self) -> Unit: ...

    @property
    def dimension(self) -> int: ...
    @property
    def active(self) -> int: ...
    @property
    def compression(self) -> float: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def batch(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def local_steps(self) -> int: ...
    @property
    def participations(self) -> int: ...
    @property
    def neighbours(self) -> Neighbours: ...
    @property
    def delta(self) -> float: ...
    @property
    def clip(self) -> Clipping: ...
    @property
    def clip_value(self) -> float: ...
    @property
    def clip_rule(self) -> ClipRule: ...
    @property
    def clip_norm(self) -> float: ...
    @property
    def noise_multiplier(self) -> float: ...
    @property
    def sigma(self) -> float: ...

    @property
    def aggregation(self) -> Aggregation | None:
        """What the server sees, where that is a sum over agents; None where it sees each agent's upload."""
        ...

    @property
    def event(self) -> Event:
        """What one participation does, as the adversary of the plan sees it: the server with up to `colluders`."""
        ...

    @property
    def floor_event(self) -> Event | None:
        """The same as one sees it who colludes with all other members; None where `event` is that already."""
        ...

    def with_clip_value(self, clip_value: float) -> Self:
        """The same guarantee at another clip: noise scales along."""
        ...

    @property
    def clip_growth(self) -> float:
        """How far the clip value can plausibly move within a participation, as a factor; 1 where it stays."""
        ...

    def update_noise(self, local_lr: float, scale: float) -> float:
        """Standard deviation of the noise in each value of Δ; `scale` is what gradients are multiplied by."""
        ...

    def update_bound(self, local_lr: float, scale: float) -> float:
        """A value of Δ beyond this is no honest agent's."""
        ...

    def require_sendable(self, *, exact: bool) -> None:
        """Raise a PrivacyError where the plan's numbers leave what its release can compute, whatever the records."""
        ...

    def summary(self) -> Mapping[str, Any]:
        """Its own keys of a run's summary."""
        ...

    def report_rows(self) -> list[tuple[str, str, str]]:
        """Its own rows of a report's table of the plan: symbol or name, value, meaning."""
        ...


class PlanDefaults:
    """What most plans say alike, for a frozen dataclass to inherit: all coordinates travel as numbers of their own, the
    clip value is given and stays, and each agent's upload is noisy enough by itself."""

    __slots__ = ()

    @property
    def compression(self: Plan) -> float:
        return self.active / self.dimension

    @property
    def clip_rule(self) -> ClipRule:
        return "given"

    @property
    def clip_growth(self) -> float:
        return 1.0

    @property
    def clip_norm(self: Plan) -> float:
        return math.sqrt(self.active) * self.clip_value if self.clip == "coordinate" else self.clip_value

    @property
    def aggregation(self) -> Aggregation | None:
        return None

    @property
    def floor_event(self) -> Event | None:
        return None

    def with_clip_value(self, clip_value: float) -> Self:
        changed: Self = replace(self, clip_value=clip_value)  # type: ignore[type-var]
        return changed

    def require_sendable(self, *, exact: bool) -> None:
        """Allow every plan."""

    def summary(self) -> Mapping[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Local steps that nothing protects: FedAvg's. All of a plan that a round needs to know is here, and no more."""

    dimension: int
    active: int
    sampling: Sampling
    batch: int
    local_steps: int


@dataclass(frozen=True, slots=True)
class Cohort:
    """Whose sum the server is to see: that of `members` agents at least and `most` at most, `colluders` of whom may
    be with it."""

    members: int
    most: int
    colluders: int


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run's config asks of a mechanism. `options` are all its keys, by `section.key`: some mechanisms read more.

    `records` is a public number m, the fewest that an agent holds of what `unit` says; `neighbours` is None where the
    sampling decides. `cohort` is of a run under secure aggregation.
    """

    dimension: int
    active: int
    agents: int
    participations: int
    sampling: Sampling
    batch: int
    records: int
    local_steps: int
    neighbours: Neighbours | None
    delta: float
    clip: Clipping
    clip_value: float
    clip_rule: ClipRule
    epsilon: float | None
    options: Mapping[str, Any]
    unit: Unit = "record"
    cohort: Cohort | None = None

    @property
    def target(self) -> float:
        """The ε that noise is to be found for, where none was given."""
        if self.epsilon is None:
            raise PrivacyError("neither epsilon nor a noise multiplier is given; exactly one must be")
        return self.epsilon


def pld(config: Mapping[str, Any]) -> str:
    """Return the accountant of all mechanisms that have a loss distribution."""
    return PLD


def upload(summary: Mapping[str, Any]) -> str:
    """What an upload holds: the values of the active coordinates, unless a mechanism has it otherwise."""
    return f"p = {summary['compression']:.3g} of {summary['dimension']:,} coordinates"


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A room.

    `events`: the kinds that its ledgers hold, each with what makes it from its fields.
    `check`: raises a ValueError of one line where the keys of a config, as `section.key`, do not go together.
    `calibrated`: the plan with the least noise that what is asked allows.
    `of_event`: the plan whose participations are an event, from which it takes all that an event says.
    `plan`: the type of its plans, a dataclass, whose fields a server announces.
    `limits`: least and most of the numbers among them that no other mechanism has.
    `accountant`: the name of the accountant for such a config.
    `upload`: what an upload holds, from a run's summary.
    """

    name: str
    events: Mapping[str, Callable[..., Event]]
    check: Callable[[Mapping[str, Any]], None]
    calibrated: Callable[[Asked], Plan]
    of_event: Callable[[Event, Asked], Plan]
    plan: Callable[..., Plan]
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    accountant: Callable[[Mapping[str, Any]], str] = pld
    upload: Callable[[Mapping[str, Any]], str] = upload

    @property
    def record(self) -> dict[str, type]:
        """The fields of a plan that a server announces beside `STEPS`, with their types; words are texts."""
        kinds: Any = self.plan
        hints = get_type_hints(kinds)
        names = [each.name for each in fields(kinds) if each.name not in STEPS]
        return {name: hints[name] if hints[name] in (int, float, bool) else str for name in names}

    def of_record(self, values: Mapping[str, Any]) -> Plan:
        """Return the plan that was announced; raise a PrivacyError where there is none such, or where the steps that
        were announced beside it are others."""
        kinds: Any = self.plan
        plan = self.plan(**{each.name: values[each.name] for each in fields(kinds)})
        for key in STEPS:
            if values[key] != getattr(plan, key):
                raise PrivacyError(f"{key} is {values[key]!r}; the plan of the same terms has {getattr(plan, key)!r}")
        return plan


def check_one_given(config: Mapping[str, Any]) -> None:
    """Of ε and the noise, by which a config asks for a plan."""
    epsilon, noise = config["privacy.epsilon"], config["privacy.noise_multiplier"]
    if (epsilon is None) == (noise is None):
        both = "neither" if epsilon is None else "both"
        raise ValueError(f"privacy.epsilon and privacy.noise_multiplier: {both} given; exactly one must be")


def relation(neighbours: Neighbours | None, sampling: Sampling) -> Neighbours:
    """The neighbouring relation that is asked for, or the one that fits the sampling."""
    return neighbours or ("add-remove" if sampling == "poisson" else "replace-one")
