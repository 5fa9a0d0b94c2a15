"""The most that an agent's records may ever pay, and what its events cost against a server that chose each event after
it saw all earlier releases.

PLD composes events that were fixed beforehand. What a server chooses *after* a release may depend on it, and then ε can
pass a cap that every single choice keeps to. So only an agent's first plan is priced by PLD, and all else goes by a
filter that is proved for such choices (docs/accounting.md).

Where secure aggregation was run, two adversaries look at the same participations. The server, with up to the colluders
of each, saw sums: that is what a cap's ε bounds. Whoever colludes with everyone else sees each agent's own share of the
noise: that is the floor, and a cap has a second ε for it. A cap without one trusts no aggregation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from typing import NamedTuple

from fedspa.errors import PrivacyError
from fedspa.privacy.accounting import last_that_fits
from fedspa.privacy.event import Event, Neighbours, as_server_saw, check_word, require_one_unit

# What showed a total, for its reader.
BY_FILTER = "rdp filter (plans chosen after releases)"
BY_FILTER_SO_FAR = "rdp filter (part of one plan)"
# Whom a floor is against.
AGAINST_ALL = "against all others together"
_MOST_PARTICIPATIONS = 10**6
_PARTS = 16  # in which δ is divided between a first plan and the filter


@dataclass(frozen=True, slots=True)
class Cap:
    """The most that an agent's records may ever pay: (ε, δ) over all its entries, under one relation.

    `floor` is the most that they may pay to one who colludes with all others. Without it every entry is priced as that
    one sees it; so is one with fewer than `min_honest` honest members, or that reckons with fewer than `min_colluders`.
    """

    epsilon: float
    delta: float
    neighbours: Neighbours
    floor: float | None = None
    min_honest: int = 1
    min_colluders: int = 0

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("floor", self.floor)):
            if value is not None and not 0 < value < float("inf"):
                raise PrivacyError(f"the cap's {name} is {value}; it must be positive and finite")
        if not 0 < self.delta < 1:
            raise PrivacyError(f"the cap's delta is {self.delta}; it must lie between 0 and 1")
        check_word("the cap's neighbours", self.neighbours, Neighbours)

    def sees(self, event: Event) -> Event:
        """The event as the cap's ε counts it: as its own adversary saw it where the cap trusts that, else its floor."""
        trusted = self.floor is not None and event.honest >= self.min_honest and event.colluders >= self.min_colluders
        return event if trusted else event.floor()

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All that must hold."""
        own = Limit(self.epsilon, self.delta, self.neighbours, self.sees, "")
        if self.floor is None:
            return (own,)
        return own, Limit(self.floor, self.delta, self.neighbours, _floor, AGAINST_ALL)


class Limit(NamedTuple):
    """(ε, δ) for an agent's events as `sees` gives them to some adversary; `words` say which, where it is not the
    server."""

    epsilon: float
    delta: float
    neighbours: Neighbours
    sees: Callable[[Event], Event]
    words: str

    def admits(self, events: Mapping[Event, int], first: FirstPlan | None) -> bool:
        """What keeps to the first plan costs that plan, whole. All else goes by the filter with what the plan leaves of
        δ, which is all of it where the filter has room for the plan itself."""
        from fedspa.privacy import filter  # slow to import

        events, first = _seen(self.sees, events), None if first is None else first.seen_by(self.sees)
        spare = self.delta
        if first is not None and first.epsilon(self.delta, self.neighbours) <= self.epsilon:
            if first.covers(events):
                return True
            if not filter.fits(first.seen, self.epsilon, self.delta, self.neighbours):
                spare -= _delta_of(first, self)
        return filter.fits(events, self.epsilon, spare, self.neighbours)

    def total(self, events: Mapping[Event, int], first: FirstPlan | None) -> Total:
        """What all `events` cost in the eyes of this adversary."""
        return total(
            _seen(self.sees, events), self.delta, self.neighbours, None if first is None else first.seen_by(self.sees)
        )


class FirstPlan(NamedTuple):
    """What was announced before an agent released anything: at most so many participations in one event."""

    event: Event
    participations: int

    def covers(self, events: Mapping[Event, int]) -> bool:
        return all(count <= self.seen[event] for event, count in as_server_saw(events).items())

    def epsilon(self, delta: float, neighbours: Neighbours) -> float:
        """Of the whole plan, by PLD, or by the event's own accountant where it has one."""
        from fedspa.privacy import accounting  # slow to import

        return accounting.epsilon(self.seen, delta, neighbours=neighbours)

    @property
    def seen(self) -> Counter[Event]:
        return as_server_saw({self.event: self.participations})

    def seen_by(self, sees: Callable[[Event], Event]) -> FirstPlan:
        return FirstPlan(sees(self.event), self.participations)


class Total(NamedTuple):
    """The ε of a cap that would have admitted all of an agent's participations, and what shows it."""

    epsilon: float
    by: str


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
    """What is left of a cap's `epsilon`, rounded down but for the last bits of the two."""
    return f"{math.floor(max(0.0, epsilon - spent) * 1000 + 1e-9) / 1000:.3f}"


def passed(events: Mapping[Event, int], cap: Cap, first: FirstPlan | None) -> Limit | None:
    """Which limit of `cap` has no room for all `events`; None where all have. `first` is the agent's first plan, None
    where none was announced.

    Each answer depends on `events`, the plan and the cap alone, never on a release.
    """
    _check_composable(events, cap.neighbours, first)
    return next((limit for limit in cap.limits if not limit.admits(events, first)), None)


def admits(events: Mapping[Event, int], cap: Cap, first: FirstPlan | None) -> bool:
    """Whether `cap` has room for all `events`."""
    return passed(events, cap, first) is None


def total(events: Mapping[Event, int], delta: float, neighbours: Neighbours, first: FirstPlan | None) -> Total:
    """What all `events` cost against the server with up to the colluders of each: an ε at which a cap that trusts all
    of their cohorts `admits` them, not always the smallest; infinite if none."""
    from fedspa.privacy import filter  # slow to import

    _check_composable(events, neighbours, first)
    if not events:
        return Total(0.0, "nothing spent")
    filtered = filter.least_epsilon(as_server_saw(events), delta, neighbours)
    if first is None:
        return Total(filtered, BY_FILTER)
    whole = first.epsilon(delta, neighbours)
    if first.covers(events):
        if filtered < whole:
            return Total(filtered, BY_FILTER_SO_FAR)
        return Total(whole, f"{first.event.accountant(neighbours)} (one plan)")
    if filtered >= whole:
        # A cap between both prices of the plan gives a part of δ to it; from the larger on it gives none.
        filtered = max(filtered, filter.least_epsilon(first.seen, delta, neighbours))
    return Total(filtered, BY_FILTER)


def floor_total(
    events: Mapping[Event, int], delta: float, neighbours: Neighbours, first: FirstPlan | None, own: Total
) -> Total:
    """What all `events` cost against one who colludes with all others; `own` is their total against the server. Never
    less than that, which is what it is where nothing was aggregated."""
    if not any(event.members for event in events):
        return own
    first = None if first is None else first.seen_by(_floor)
    return max(own, total(_seen(_floor, events), delta, neighbours, first))


def participations_within(event: Event, cap: Cap, spent: Mapping[Event, int], first: FirstPlan | None) -> int:
    """How many more times `cap` has room for `event` after what is `spent`; a million at most."""

    def fit(more: int) -> bool:
        return admits({**spent, event: spent.get(event, 0) + more}, cap, first)

    fits, over = 0, 1
    while fit(over):
        if over == _MOST_PARTICIPATIONS:
            return over
        fits, over = over, min(4 * over, _MOST_PARTICIPATIONS)
    # What is left of a first plan fits even where a little more than that does not.
    return last_that_fits(fit, fits, over)


def _check_composable(events: Mapping[Event, int], neighbours: Neighbours, first: FirstPlan | None) -> None:
    require_one_unit([*events, *([] if first is None else [first.event])])
    if neighbours == "add-remove" and any(event.sampling == "fixed" for event in events):
        raise PrivacyError(
            "the ledger holds events of fixed-size sampling, which have no sound total under neighbours "
            "'add-remove'; ask for 'replace-one'"
        )


def _floor(event: Event) -> Event:
    return event.floor()


def _seen(sees: Callable[[Event], Event], events: Mapping[Event, int]) -> Counter[Event]:
    """The events as an adversary sees them."""
    found: Counter[Event] = Counter()
    for event, count in events.items():
        found[sees(event).as_server_saw()] += count
    return found


def _delta_of(plan: FirstPlan, limit: Limit) -> float:
    """δ of the plan at the limit's ε, rounded up to parts of its δ; all of that is known to be enough."""

    def fits(parts: int) -> bool:
        return plan.epsilon(limit.delta * parts / _PARTS, limit.neighbours) <= limit.epsilon

    return limit.delta * last_that_fits(fits, _PARTS, 0) / _PARTS
