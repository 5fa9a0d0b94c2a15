"""What one participation does to an agent's records, and what accountants may make of it, whatever the mechanism.

An event is the unit that ledgers store and accountants compose. Each mechanism has its own kind (`mechanisms`), and
this file has all that is asked of one: a single release of a sampled batch as a `Step`, which accountants compose.

`noise` says where the noise came from: the operating system (`secure`, `exact`) or, in simulations, a seed. An
adversary with the seed can subtract the noise. `noise` is None where it is not known: a guard's caller may leave it
out. It changes no cost.

`unit` says what one of the `records` is: a record, or a person with all of theirs. It changes no cost either, but what
is protected: ε of different units do not add up (docs/privacy.md).
"""

from __future__ import annotations

import json
import math
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from decimal import ROUND_CEILING, Context
from functools import cache
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, cast, get_args, get_origin, get_type_hints

from fedspa.errors import PrivacyError

if TYPE_CHECKING:
    from fedspa.privacy.pld import DominatingPair

# The most records, steps and participations that accountants take: whole numbers that float64 still distinguishes.
MOST = 10**15

Sampling = Literal["poisson", "fixed"]
Neighbours = Literal["add-remove", "replace-one"]
NoiseMode = Literal["secure", "exact", "seeded"]
Unit = Literal["record", "person"]
# The accountant that composes privacy loss distributions (`accounting`).
PLD = "pld"


@dataclass(frozen=True, slots=True)
class Limits:
    """The least and the most of a number: `trials: Annotated[int, Limits(1, 100)]`. Events and terms check it."""

    least: float
    most: float


@cache
def field_types(kind: type) -> dict[str, tuple[Any, Limits | None]]:
    """Return the type of each field of a dataclass and the limits that its annotation states. Optional types lose their
    None."""
    hints = get_type_hints(kind, include_extras=True)
    found: dict[str, tuple[Any, Limits | None]] = {}
    for name in (each.name for each in fields(kind)):
        hint, extras = hints[name], list[Any]()
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
        if NoneType in get_args(hint):
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
        found[name] = hint, next((each for each in extras if isinstance(each, Limits)), None)
    return found


class Step(ABC):
    """One release of a sampled batch, as accountants compose it. Equal steps are one mechanism."""

    __slots__ = ()

    @abstractmethod
    def pairs(self, neighbours: Neighbours) -> tuple[DominatingPair, ...]:
        """Return the pairs that dominate it: under add-remove one for a record that is taken away and one for a record
        that is added, or a single pair that stands for every direction."""

    def gaussian_shift(self, neighbours: Neighbours) -> float | None:
        """μ, where the release is N(μ, 1) against N(0, 1); None where it is something else, and `pairs` says what."""
        return None

    def extra_delta(self, neighbours: Neighbours) -> float:
        """Return the δ that one release costs beside its loss distribution."""
        return 0.0


@dataclass(frozen=True, slots=True)
class PureStep(Step):
    """A release of which only its ε is known: it is (ε, 0)-differentially private."""

    epsilon: float

    def pairs(self, neighbours: Neighbours) -> tuple[DominatingPair, ...]:
        from fedspa.privacy.pld import RandomisedResponse

        return (RandomisedResponse(self.epsilon),)


class Event(ABC):
    """`steps` releases, each on a fresh sample of `batch` (expected or exact) of `records` records.

    A kind of event is a frozen dataclass that states its fields, `noise` and `unit` among them, and its `kind`. Its
    text in ledgers and its checks are derived from the fields: whole numbers, floats, words and `Limits`.
    """

    __slots__ = ()
    kind: ClassVar[str]
    relations: ClassVar[tuple[Neighbours, ...]] = ("add-remove", "replace-one")

    if TYPE_CHECKING:  # fields, or properties where a kind has no choice

        @property
        def sampling(self) -> Sampling: ...
        @property
        def batch(self) -> int: ...
        @property
        def records(self) -> int: ...
        @property
        def steps(self) -> int: ...
        @property
        def noise(self) -> NoiseMode | None: ...
        @property
        def unit(self) -> Unit: ...

    @property
    def rate(self) -> float:
        """q = B/m, the chance that a record takes part in a step."""
        return self.batch / self.records

    def to_json(self) -> str:
        """Return the canonical text. Equal events have equal texts, so that a ledger can count by it.

        It leaves out an unknown noise mode, the default unit, and a cohort where there is none.
        """
        hidden = {"noise"} if self.noise is None else set()
        hidden |= {"unit"} if self.unit == "record" else set()
        hidden |= set() if self.members else {"members", "colluders"}
        shown = {name: value for name, value in self.fields().items() if name not in hidden}
        return json.dumps({"kind": self.kind, **shown}, sort_keys=True, separators=(",", ":"))

    def fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}

    @property
    def members(self) -> int:
        """The fewest agents whose sum the server saw, where secure aggregation was run; 0 where it was not."""
        return 0

    @property
    def colluders(self) -> int:
        """The most `members` that may collude with the server."""
        return 0

    @property
    def honest(self) -> int:
        """The number of members whose noise counts, with the agent itself."""
        return self.members - self.colluders if self.members else 1

    def worst_case(self) -> Self:
        """Return the event where all other members collude, or the protocol is broken: only the agent's own noise
        counts. Without aggregation that is the event itself."""
        if self.members:
            raise PrivacyError(f"{type(self).__name__} does not say what is left where all other members collude")
        return self

    def with_noise(self, noise: NoiseMode | None) -> Self:
        return cast(Self, replace(cast(Any, self), noise=noise))

    def as_server_saw(self) -> Self:
        """Return the event without its noise mode: what is paid against the server does not depend on that. Where
        secure aggregation was run, the server saw a sum, and up to `colluders` members with it."""
        return self.with_noise(None)

    def accountant(self, neighbours: Neighbours) -> str:
        """Return the name of the accountant that composes it under this relation; raise a PrivacyError if none does."""
        if neighbours not in self.relations:
            raise PrivacyError(f"{self.kind} noise has no accountant under {neighbours}; allowed: {self.relations[0]}")
        return PLD

    @property
    @abstractmethod
    def step(self) -> Step:
        """Return one of its releases."""

    def __post_init__(self) -> None:
        types = field_types(type(self))
        for name, (kind, _) in types.items():
            value = getattr(self, name)
            if kind is bool and type(value) is not bool:
                raise PrivacyError(f"{name} is {value!r}; it must be true or false")
            try:
                if kind is int:
                    object.__setattr__(self, name, operator.index(value))
                elif kind is float:
                    object.__setattr__(self, name, float(value))  # equal events have equal texts
            except (TypeError, ValueError, OverflowError) as error:
                wanted = "whole number" if kind is int else "number"
                raise PrivacyError(f"{name} of a {self.kind} event must be a {wanted}: {error}") from None
        for name, (kind, limits) in types.items():
            value = getattr(self, name)
            if get_origin(kind) is Literal and not (name == "noise" and value is None):
                check_word(name, value, kind)
            if limits is not None and not limits.least <= value <= limits.most:
                raise PrivacyError(f"{name} is {value}; it must lie between {limits.least} and {limits.most}")
        if self.records > MOST:
            raise PrivacyError(f"records is {self.records}; it must be at most {MOST:g}")
        if not 1 <= self.batch <= self.records:
            raise PrivacyError(f"batch is {self.batch}; it must lie between 1 and the records, {self.records}")
        if not 1 <= self.steps <= MOST:
            raise PrivacyError(f"steps is {self.steps}; it must lie between 1 and {MOST:g}")
        if self.members or self.colluders:
            check_cohort(self.members, self.colluders)

    @property
    def _shown_unit(self) -> str:
        return "" if self.unit == "record" else f" {self.unit}s"

    @property
    def _shown_mode(self) -> str:
        return {None: "", "seeded": " (SEEDED: not private)"}.get(self.noise, f" ({self.noise})")


def as_server_saw(events: Mapping[Event, int]) -> Counter[Event]:
    """Count these participations as the server saw them, with up to the colluders of each. Only an agent's own noise
    counts where secure aggregation was not run."""
    seen: Counter[Event] = Counter()
    for event, count in events.items():
        seen[event.as_server_saw()] += count
    return seen


def check_word(name: str, value: object, allowed: Any) -> None:
    """Raise where it is none of the words of a Literal."""
    if value not in get_args(allowed):
        raise PrivacyError(f"{name} is {value!r}; allowed: {', '.join(get_args(allowed))}")


def check_cohort(members: int, colluders: int) -> None:
    if not 2 <= members <= MOST:
        raise PrivacyError(f"members is {members}; a sum over agents that hides each is of 2 at least")
    if not 0 <= colluders < members:
        raise PrivacyError(
            f"colluders is {colluders}; it must be 0 or more and below the members, "
            f"{members}: the agent itself is honest"
        )


def check_one_unit(events: Iterable[Event]) -> None:
    """Raise where some protect records and some persons. Neither promise follows from the other: a person more or less
    is many records, and a record more or less makes of a person another one."""
    if len({event.unit for event in events}) > 1:
        raise PrivacyError(
            "some of these participations protect each record and some each person: their ε do not add up to one of "
            "either (docs/privacy.md)"
        )


def noise_modes(events: Mapping[Event, int]) -> dict[str, int]:
    """Count the participations with noise of each mode; `unrecorded` are those that do not state it."""
    modes: Counter[str] = Counter()
    for event, count in events.items():
        modes[event.noise or "unrecorded"] += count
    return dict(sorted(modes.items()))


def seeded_warning(modes: Mapping[str, int]) -> str | None:
    """Return the warning beside every ε of such participations; None where no noise was seeded."""
    seeded, among = modes.get("seeded", 0), sum(modes.values())
    if not seeded:
        return None
    whose = "THE NOISE" if seeded == among else f"THE NOISE OF {seeded} OF {among} PARTICIPATIONS"
    return f"{whose} WAS SEEDED: a simulation, nothing in it is private; ε would hold with secure noise"


def shown(epsilon: float | None) -> str:
    """ε to three digits, rounded up: a figure on a page may overstate a cost, never understate it. What is no number
    bounds nothing; in JSON, which has no infinity, that is null."""
    if epsilon is None or not math.isfinite(epsilon):
        return "∞"
    return f"{math.ceil(epsilon * 1000) / 1000:.3f}"


def shown_digits(epsilon: float) -> str:
    """ε to four significant digits, rounded up likewise: for tables of large and small ones."""
    if not math.isfinite(epsilon):
        return shown(epsilon)
    return f"{float(Context(prec=4, rounding=ROUND_CEILING).create_decimal_from_float(epsilon)):.4g}"


def shown_left(epsilon: float, spent: float) -> str:
    """Format what is left of a budget's `epsilon`, rounded down but for the last bits of the two."""
    return f"{math.floor(max(0.0, epsilon - spent) * 1000 + 1e-9) / 1000:.3f}"
