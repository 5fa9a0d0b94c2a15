"""Privacy budgets, and the cost of an agent's events against a server that chose each event after all earlier releases.

PLD composes events that were fixed beforehand. What a server chooses *after* a release may depend on it, and then ε can
exceed a budget that every single choice respects. So only an agent's first plan is accounted by PLD, and all else by a
filter that is proved for such choices (docs/accounting.md).

Where secure aggregation was run, two adversaries look at the same participations. The server, with up to the colluders
of each, saw sums: that is what a budget's ε bounds. If everyone else colludes with it, it sees each agent's own share
of the noise: that is the worst case, and a budget has a second ε for it. A budget without one trusts no aggregation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedspa.errors import PrivacyError
from fedspa.privacy.accounting import last_that_fits
from fedspa.privacy.event import Event, Neighbours, as_server_saw, check_one_unit, check_word

# What showed a total, for its reader.
BY_FILTER = "rdp filter (plans chosen after releases)"
BY_FILTER_SO_FAR = "rdp filter (part of one plan)"
# The adversary of the worst case.
AGAINST_ALL = "against all others together"
_MOST_PARTICIPATIONS = 10**6
_PARTS = 16  # in which δ is divided between a first plan and the filter


@dataclass(frozen=True, slots=True)
class PrivacyBudget:
    """The most that an agent's records may ever pay: (ε, δ) over all its entries, under one relation.

    `worst_case` is the most that they may pay if all others collude. Without it every entry counts as in that case; so
    does one with fewer than `min_honest` honest members, or that reckons with fewer than `min_colluders`.
    """

    epsilon: float
    delta: float
    neighbours: Neighbours
    worst_case: float | None = None
    min_honest: int = 1
    min_colluders: int = 0

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("worst_case", self.worst_case)):
            if value is not None and not 0 < value < float("inf"):
                raise PrivacyError(f"the budget's {name} is {value}; it must be positive and finite")
        if not 0 < self.delta < 1:
            raise PrivacyError(f"the budget's delta is {self.delta}; it must lie between 0 and 1")
        check_word("the budget's neighbours", self.neighbours, Neighbours)

    def sees(self, event: Event) -> Event:
        """Return the event as the budget's ε counts it: as its own adversary saw it where the budget trusts that, else
        the worst case."""
        trusted = (
            self.worst_case is not None and event.honest >= self.min_honest and event.colluders >= self.min_colluders
        )
        return event if trusted else event.worst_case()

    @property
    def limits(self) -> tuple[Limit, ...]:
        """All limits that must hold."""
        own = Limit(self.epsilon, self.delta, self.neighbours, self.sees, "")
        if self.worst_case is None:
            return (own,)
        return own, Limit(self.worst_case, self.delta, self.neighbours, _worst_case, AGAINST_ALL)


class Limit(NamedTuple):
    """(ε, δ) for an agent's events as `sees` gives them to some adversary; `words` say which, where it is not the
    server."""

    epsilon: float
    delta: float
    neighbours: Neighbours
    sees: Callable[[Event], Event]
    words: str

    def admits(self, events: Mapping[Event, int], first: FirstPlan | None) -> bool:
        """Return whether the events fit the budget. Those within the first plan cost that plan in full; all others go
        through the filter with the δ that the plan leaves, which is all of it where the plan itself fits the filter."""
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
        """Return what all `events` cost against this adversary."""
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
        """Return the ε of the whole plan."""
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


def exceeded_limit(events: Mapping[Event, int], cap: PrivacyBudget, first: FirstPlan | None) -> Limit | None:
    """Return the limit of `cap` that all `events` exceed; None where they exceed none. `first` is the agent's first
    plan, None where none was announced.

    Each answer depends on `events`, the plan and the cap alone, never on a release.
    """
    _check_composable(events, cap.neighbours, first)
    return next((limit for limit in cap.limits if not limit.admits(events, first)), None)


def admits(events: Mapping[Event, int], cap: PrivacyBudget, first: FirstPlan | None) -> bool:
    """Return whether all `events` fit `cap`."""
    return exceeded_limit(events, cap, first) is None


def total(events: Mapping[Event, int], delta: float, neighbours: Neighbours, first: FirstPlan | None) -> Total:
    """Return what all `events` cost against the server with up to the colluders of each: an ε at which a cap that
    trusts all of their cohorts `admits` them, not always the smallest; infinite if none."""
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
        # A budget between both costs of the plan gives a part of δ to it; from the larger on it gives none.
        filtered = max(filtered, filter.least_epsilon(first.seen, delta, neighbours))
    return Total(filtered, BY_FILTER)


def worst_case_total(
    events: Mapping[Event, int], delta: float, neighbours: Neighbours, first: FirstPlan | None, own: Total
) -> Total:
    """Return what all `events` cost against one who colludes with all others; `own` is their total against the server.
    Never less than that, which is what it is where nothing was aggregated."""
    if not any(event.members for event in events):
        return own
    first = None if first is None else first.seen_by(_worst_case)
    return max(own, total(_seen(_worst_case, events), delta, neighbours, first))


def participations_within(event: Event, cap: PrivacyBudget, spent: Mapping[Event, int], first: FirstPlan | None) -> int:
    """Return how many more times `event` fits `cap` after what is `spent`; a million at most."""

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
    check_one_unit([*events, *([] if first is None else [first.event])])
    if neighbours == "add-remove" and any(event.sampling == "fixed" for event in events):
        raise PrivacyError(
            "the ledger holds events of fixed-size sampling, which have no total under neighbours "
            "'add-remove'; ask for 'replace-one'"
        )


def _worst_case(event: Event) -> Event:
    return event.worst_case()


def _seen(sees: Callable[[Event], Event], events: Mapping[Event, int]) -> Counter[Event]:
    """Return the events as an adversary sees them."""
    found: Counter[Event] = Counter()
    for event, count in events.items():
        found[sees(event).as_server_saw()] += count
    return found


def _delta_of(plan: FirstPlan, limit: Limit) -> float:
    """δ of the plan at the limit's ε, rounded up to parts of its δ; all of that is known to be enough."""

    def fits(parts: int) -> bool:
        return plan.epsilon(limit.delta * parts / _PARTS, limit.neighbours) <= limit.epsilon

    return limit.delta * last_that_fits(fits, _PARTS, 0) / _PARTS
