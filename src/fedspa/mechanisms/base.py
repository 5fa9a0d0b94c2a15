"""The interface of a mechanism: its plans, the kind of event that it writes into ledgers, and how configs make plans.

A plan is one frozen dataclass. Its form in terms (`Mechanism.announced`), the event of a participation (`event`), and
the plan of a config or of a ledger's event (`Mechanism.make`, `Mechanism.of_event`) are derived from its fields.
"""

from __future__ import annotations

import json
import math
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, cast

from fedspa import registry
from fedspa.errors import PrivacyError
from fedspa.privacy.event import (
    MOST,
    Event,
    Limits,
    Neighbours,
    Sampling,
    Unit,
    check_cohort,
    check_word,
    field_types,
)

Clipping = Literal["coordinate", "l2"]
# Against whom a run's ε holds: everyone outside the agent, or a server that sees no more than sums.
Adversary = Literal["local", "secure-aggregation"]

# Float32 gradients cannot be held to a bound near the ends of their range: squares of 1e-20 vanish, and an example of
# "norm 0" would pass any clip. A malicious server would ask for such a clip.
SMALLEST_CLIP, LARGEST_CLIP = 1e-10, 1e10
P = TypeVar("P")
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


class Plan(ABC):
    """Everything that decides an agent's guarantee, in one frozen object. A plan that exists is consistent.

    A mechanism's plan is a frozen dataclass that inherits this class. It sets `event_type`; the event of a
    participation has the plan's values of its fields (`local_steps` are its `steps`). By default, all active
    coordinates travel as numbers of their own, and the noise of each agent's upload is enough by itself.

    `noise_multiplier` is the noise on the sum of clipped gradients over `clip_norm`, the bound on one of them; `sigma`
    is the noise on each coordinate of their mean. `compression` is the size of an upload relative to the model's.
    `unit` is what an example is, and so what is protected: `records` and `batch` count those.
    """

    __slots__ = ()
    event_type: ClassVar[type[Event]]

    if TYPE_CHECKING:  # fields, or properties where a mechanism has no choice

        @property
        def unit(self) -> Unit: ...
        @property
        def dimension(self) -> int: ...
        @property
        def active(self) -> int: ...
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
        def noise_multiplier(self) -> float: ...
        @property
        def sigma(self) -> float: ...

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.dimension <= MOST:
            raise PrivacyError(f"k is {self.active}; it must lie between 1 and d = {self.dimension}, at most {MOST:g}")
        check_clip(self.clip, self.clip_value)
        check_word("neighbours", self.neighbours, Neighbours)
        if not 1 <= self.participations <= MOST:
            raise PrivacyError(f"participations is {self.participations}; it must lie between 1 and {MOST:g}")
        _ = self.event  # checks sampling, batch, records, steps, and the numbers of its own
        if not 0 < self.delta < 1 / self.records:
            raise PrivacyError(f"delta is {self.delta}; it must lie between 0 and 1/records = {1 / self.records:.3g}")

    @property
    def event(self) -> Event:
        """One participation, as the adversary of the plan sees it: the server with up to `colluders`."""
        names = [each.name for each in fields(cast(Any, self.event_type)) if each.name != "noise"]
        return self.event_type(**{name: getattr(self, _PLAN_NAMES.get(name, name)) for name in names})

    @property
    def worst_case_event(self) -> Event | None:
        """The same where all other members collude with the server; None where `event` is that already."""
        event = self.event
        return event.worst_case() if event.members else None

    @property
    def compression(self) -> float:
        return self.active / self.dimension

    @property
    def clip_norm(self) -> float:
        return math.sqrt(self.active) * self.clip_value if self.clip == "coordinate" else self.clip_value

    @property
    def aggregation(self) -> Aggregation | None:
        """What the server sees, where that is a sum over agents; None where it sees each agent's upload."""
        return None

    def with_clip_value(self, clip_value: float) -> Self:
        """Return the plan with the same guarantee at another clip value: noise scales along."""
        return cast(Self, replace(cast(Any, self), clip_value=clip_value))

    def update_noise(self, local_lr: float, scale: float) -> float:
        """Standard deviation of the noise in each value of Δ; `scale` is what gradients are multiplied by. By default,
        that of independent draws, one for each local step, which are scaled as the gradient is."""
        return local_lr * scale * self.sigma * math.sqrt(self.local_steps)

    def update_bound(self, local_lr: float, scale: float) -> float:
        """Return the largest plausible value of Δ: an honest agent's does not exceed it. By default, all clipped
        gradients in one direction, and 100 deviations of the noise in each step."""
        return local_lr * scale * self.local_steps * (self.clip_norm + 100 * self.sigma)

    def scoring(self, models: int) -> Plan | None:
        """Return the plan by which agents score so many models, each within ±1, in place of a training, at the same
        cost; None where its noise cannot be had on them."""
        return None

    def check_sendable(self, *, exact: bool) -> None:  # noqa: B027 (most plans can always be sent)
        """Raise a PrivacyError where the plan's numbers leave what its release can compute, whatever the records."""

    def summary(self) -> Mapping[str, Any]:
        """Return the mechanism's own keys of a run's summary."""
        return {}

    def report_rows(self) -> list[tuple[str, str, str]]:
        """Return its rows of a report's table of the plan: symbol or name, value, meaning."""
        return []


# A plan counts `local_steps` in a round, which are all `steps` of an event.
_PLAN_NAMES = {"steps": "local_steps"}


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
class PlanRequest:
    """The parameters of a plan that a run's config states. `options` are all keys of the config, by `section.key`.

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
    epsilon: float | None
    options: Mapping[str, Any]
    unit: Unit = "record"
    cohort: Cohort | None = None

    @property
    def target(self) -> float:
        """The ε to calibrate the noise to."""
        if self.epsilon is None:
            raise PrivacyError("neither epsilon nor a noise multiplier is given; exactly one must be")
        return self.epsilon

    @property
    def adversary(self) -> Adversary:
        return "local" if self.cohort is None else "secure-aggregation"

    @property
    def members(self) -> int:
        return 0 if self.cohort is None else self.cohort.members

    @property
    def colluders(self) -> int:
        return 0 if self.cohort is None else self.cohort.colluders

    @property
    def most(self) -> int:
        return 0 if self.cohort is None else self.cohort.most


def upload(summary: Mapping[str, Any]) -> str:
    """Describe the content of an upload: by default, the values of the active coordinates."""
    return f"p = {summary['compression']:.3g} of {summary['dimension']:,} coordinates"


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism, as configs, terms, ledgers and reports know it.

    `plan`: the type of its plans, a dataclass that inherits `Plan`.
    `check`: raises a ValueError of one line where the keys of a config, as `section.key`, contradict each other.
    `calibrated`: makes the plan with the least noise that a request allows.
    `upload`: describes the content of an upload, from a run's summary.
    """

    name: str
    plan: Any
    check: Callable[[Mapping[str, Any]], None]
    calibrated: Callable[[PlanRequest], Plan]
    upload: Callable[[Mapping[str, Any]], str] = upload

    @property
    def event(self) -> type[Event]:
        """The kind of its events in ledgers."""
        kind: type[Event] = self.plan.event_type
        return kind

    @property
    def announced(self) -> dict[str, tuple[Any, Limits | None]]:
        """The fields of a plan that a server announces beside `STEPS`: their types, and their limits if any."""
        limits = {name: found for name, (_, found) in field_types(self.event).items()}
        return {
            name: (kind, found or limits.get(name))
            for name, (kind, found) in field_types(self.plan).items()
            if name not in STEPS
        }

    def of_terms(self, values: Mapping[str, Any]) -> Plan:
        """Return the announced plan. Raise a PrivacyError where these values are none, or where the steps announced
        beside it differ."""
        plan: Plan = self.plan(**{each.name: values[each.name] for each in fields(self.plan)})
        for key in STEPS:
            if values[key] != getattr(plan, key):
                raise PrivacyError(f"{key} is {values[key]!r}; the plan of the same terms has {getattr(plan, key)!r}")
        return plan

    def of_event(self, event: Event, request: PlanRequest) -> Plan:
        """Return the plan whose participations are `event`. A request states what an event does not."""
        if not isinstance(event, self.event):
            raise PrivacyError(f"the ledger holds events of another mechanism than {self.name}: {event}")
        if bool(event.members) is (request.adversary == "local"):
            raise PrivacyError(
                f"the ledger says that sums over {event.members} members were sent, the config privacy.adversary = "
                f"{request.adversary!r}: do not rely on any ε of this page"
            )
        stated = {_PLAN_NAMES.get(name, name): value for name, value in event.fields().items()}
        stated["neighbours"] = relation(request.neighbours, event.sampling)
        known = {each.name for each in fields(self.plan)}
        found: Plan = make_plan(self.plan, request, **{name: stated[name] for name in stated if name in known})
        return found


def make_plan(kind: Callable[..., P], request: PlanRequest, **stated: Any) -> P:
    """Return a plan with the values of a request, except for those that are stated."""
    values = {"neighbours": relation(request.neighbours, request.sampling), **stated}
    names = [each.name for each in fields(cast(Any, kind))]
    return kind(**{name: values[name] if name in values else getattr(request, name) for name in names})


def check_one_given(config: Mapping[str, Any]) -> None:
    """Raise a ValueError unless a config states exactly one of ε and the noise."""
    epsilon, noise = config["privacy.epsilon"], config["privacy.noise_multiplier"]
    if (epsilon is None) == (noise is None):
        both = "neither" if epsilon is None else "both"
        raise ValueError(f"privacy.epsilon and privacy.noise_multiplier: {both} given; exactly one must be")


def relation(neighbours: Neighbours | None, sampling: Sampling) -> Neighbours:
    """Return the neighbouring relation that is asked for, or the one that fits the sampling."""
    return neighbours or ("add-remove" if sampling == "poisson" else "replace-one")


class UnknownKind(PrivacyError):
    """An event of a kind that this version does not know."""


def event_of(text: str) -> Event:
    """Return the event whose `to_json` is `text`; anything that is not exactly such an event is a PrivacyError."""
    if not isinstance(text, str):  # a damaged ledger's columns have any type; and not all of them can be cached
        raise PrivacyError(f"not an event: {repr(text)[:200]} (it must be text)")
    return _event_of(text)


def _kinds() -> dict[str, Callable[..., Event]]:
    """Return how to make an event of each kind. A plug-in must not redefine a kind: entries of it that are in ledgers
    would silently get another privacy cost."""
    kinds: dict[str, Callable[..., Event]] = {}
    for algorithm in registry.every():
        make = None if algorithm.mechanism is None else algorithm.mechanism.event
        if make is not None and kinds.setdefault(make.kind, make) is not make:
            raise PrivacyError(
                f"algorithm {algorithm.name!r} redefines the event kind {make.kind!r}, which ledgers hold already; its "
                "mechanism must name its events otherwise"
            )
    return kinds


@lru_cache(maxsize=1024)  # a ledger reads the same few events again and again
def _event_of(text: str) -> Event:
    kinds = _kinds()
    try:
        fields = json.loads(text)
        kind = fields.pop("kind")
        if kind not in kinds:
            raise UnknownKind(f"event kind is {kind!r}; this version knows: {', '.join(kinds)}")
        event = kinds[kind](**fields)
        if event.to_json() != text:
            raise PrivacyError(f"event text is not canonical: {text[:200]!r}")
        return event
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())  # it may quote a field's name, and with it a line's end
        raise PrivacyError(f"not an event: {text[:200]!r} ({why})") from None
