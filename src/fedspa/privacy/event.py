"""What one participation does to an agent's records, and what accountants may make of it, whatever the mechanism.

An event is the unit that ledgers store and accountants compose. Each mechanism has its own kind (`mechanisms`), and
this file has all that is asked of one: a single release of a sampled batch as a `Step`, which accountants compose, or
at least the (ε, δ) of one.

`noise` says where the noise came from: the operating system (`secure`, `exact`) or, in simulations, a seed. Whoever
knows the seed can subtract the noise. `noise` is None where it is not known: a guard's caller may leave it out. It
changes no price.

`unit` says what one of the `records` is: a record, or a person with all of theirs. It changes no price either, but what
the price is of: ε of different units do not add up (docs/persons.md).
"""

from __future__ import annotations

import json
import math
import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

from fedspa.errors import PrivacyError

if TYPE_CHECKING:
    from fedspa.privacy.pld import DominatingPair

# The most records, steps and participations that anything is priced for: whole numbers that float64 still tells apart.
MOST = 10**15

Sampling = Literal["poisson", "fixed"]
Neighbours = Literal["add-remove", "replace-one"]
NoiseMode = Literal["secure", "exact", "seeded"]
Unit = Literal["record", "person"]
# The accountant that composes privacy loss distributions (`accounting`).
PLD = "pld"


class Step(ABC):
    """One release of a sampled batch, as accountants compose it. Equal steps are one mechanism."""

    __slots__ = ()

    @abstractmethod
    def pairs(self, neighbours: Neighbours) -> tuple[DominatingPair, ...]:
        """The pairs that dominate it: under add-remove one for a record that is taken away and one for a record that is
        added, or a single pair that stands for every direction."""

    def gaussian_shift(self, neighbours: Neighbours) -> float | None:
        """μ, where the release is N(μ, 1) against N(0, 1); None where it is something else, and `pairs` says what."""
        return None

    def beyond(self, neighbours: Neighbours) -> float:
        """What one release costs of δ beside all that is said of it here."""
        return 0.0


class Event(ABC):
    """`steps` releases, each on a fresh sample of `batch` (expected or exact) of `records` records.

    Events are frozen dataclasses with the fields `noise` and `unit`, and are equal where their texts are.
    """

    __slots__ = ()

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

    @abstractmethod
    def to_json(self) -> str:
        """Canonical text: equal events give equal text, so a ledger can count by it."""

    def fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}

    @property
    def members(self) -> int:
        """How many agents' sum the server saw at least, where secure aggregation was run; 0 where it was not."""
        return 0

    @property
    def colluders(self) -> int:
        """How many of the `members` may have told the server all they know."""
        return 0

    @property
    def honest(self) -> int:
        """How many members' noise counts, the agent's own among it."""
        return self.members - self.colluders if self.members else 1

    def floor(self) -> Self:
        """The event as one sees it who colludes with all other members, or has broken the protocol: the agent's own
        noise alone counts. Itself where nothing was aggregated."""
        if self.members:
            raise PrivacyError(f"{type(self).__name__} does not say what is left where all other members collude")
        return self

    def with_noise(self, noise: NoiseMode | None) -> Self:
        return cast(Self, replace(cast(Any, self), noise=noise))

    def as_server_saw(self) -> Self:
        """The event without its noise mode: what is paid against the server does not depend on that. Where secure
        aggregation was run, the server saw a sum, and up to `colluders` members with it."""
        return self.with_noise(None)

    @abstractmethod
    def accountant(self, neighbours: Neighbours) -> str:
        """Return the name of the accountant that composes it under this relation; raise a PrivacyError if none does."""

    @property
    @abstractmethod
    def step(self) -> Step | None:
        """One of its releases; None where all that is known of one is `step_epsilon`."""

    def step_epsilon(self, delta: float) -> float:
        """ε at `delta` of one release of a sampled batch, for any δ, under each relation that it is priced for."""
        return math.inf

    # What kinds of events are made with.

    def _make_whole(self, *names: str) -> None:
        """Whole numbers in these fields, or a TypeError."""
        for name in names:
            object.__setattr__(self, name, operator.index(getattr(self, name)))

    def _check_sampled(self) -> None:
        """What every event must say: batches within the records, steps that can be counted, and a noise mode if any."""
        if self.records > MOST:
            raise PrivacyError(f"records is {told(self.records)}; it must be at most {MOST:g}")
        if not 1 <= self.batch <= self.records:
            raise PrivacyError(
                f"batch is {told(self.batch)}; it must lie between 1 and the records, {told(self.records)}"
            )
        if not 1 <= self.steps <= MOST:
            raise PrivacyError(f"steps is {told(self.steps)}; it must lie between 1 and {MOST:g}")
        if self.noise is not None:
            check_word("noise", self.noise, NoiseMode)
        check_word("unit", self.unit, Unit)

    @property
    def _shown_unit(self) -> str:
        return "" if self.unit == "record" else f" {self.unit}s"

    @property
    def _shown_mode(self) -> str:
        return {None: "", "seeded": " (SEEDED: not private)"}.get(self.noise, f" ({self.noise})")

    def _canonical(self, kind: str, *left_out: str) -> str:
        """The text of an event: its kind, and its fields but those that the kind says."""
        # A mode that is not known is not in the text, nor is the default unit, nor a cohort where there is none.
        hidden = {*left_out, *(["noise"] if self.noise is None else []), *(["unit"] if self.unit == "record" else [])}
        hidden |= set() if self.members else {"members", "colluders"}
        shown = {name: value for name, value in self.fields().items() if name not in hidden}
        return json.dumps({"kind": kind, **shown}, sort_keys=True, separators=(",", ":"))


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
        raise PrivacyError(f"members is {told(members)}; a sum over agents that hides each is of 2 at least")
    if not 0 <= colluders < members:
        raise PrivacyError(
            f"colluders is {told(colluders)}; it must be 0 or more and below the members, {told(members)}: the agent "
            "itself is honest"
        )


def require_one_unit(events: Iterable[Event]) -> None:
    """Raise where some protect records and some persons. Neither promise follows from the other: a person more or less
    is many records, and a record more or less makes of a person another one."""
    if len({event.unit for event in events}) > 1:
        raise PrivacyError(
            "some of these participations protect each record and some each person: their ε do not add up to one of "
            "either (docs/persons.md)"
        )


def noise_modes(events: Mapping[Event, int]) -> dict[str, int]:
    """How many participations had noise of each mode; `unrecorded` counts those that do not say."""
    modes: Counter[str] = Counter()
    for event, count in events.items():
        modes[event.noise or "unrecorded"] += count
    return dict(sorted(modes.items()))


def seeded_words(modes: Mapping[str, int]) -> str | None:
    """What must stand beside every ε of such participations; None where no noise was seeded."""
    seeded, among = modes.get("seeded", 0), sum(modes.values())
    if not seeded:
        return None
    whose = "THE NOISE" if seeded == among else f"THE NOISE OF {seeded} OF {among} PARTICIPATIONS"
    return f"{whose} WAS SEEDED: a simulation, nothing in it is private; ε would hold with secure noise"


def told(number: int) -> str:
    """A number as an error quotes it. Python refuses to print a whole number of thousands of digits."""
    return str(number) if abs(number) < 10**20 else "a number of over 20 digits"
