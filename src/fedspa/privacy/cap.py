"""The most that an agent's records may ever pay, and what its events cost against a server that chose each event after
it saw all earlier releases.

PLD composes events that were fixed beforehand. What a server chooses *after* a release may depend on it, and then ε can
pass a cap that every single choice keeps to. So only an agent's first plan is priced by PLD, and all else goes by a
filter that is proved for such choices (docs/accounting.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, get_args

from fedspa.errors import PrivacyError
from fedspa.privacy.event import Event, Neighbours, as_server_saw, require_one_unit

# What showed a total, for its reader.
BY_FILTER = "rdp filter (plans chosen after releases)"
BY_FILTER_SO_FAR = "rdp filter (part of one plan)"
_MOST_PARTICIPATIONS = 10**6
_PARTS = 16  # in which δ is divided between a first plan and the filter


@dataclass(frozen=True, slots=True)
class Cap:
    """The most that an agent's records may ever pay: (ε, δ) over all its entries, under one relation."""

    epsilon: float
    delta: float
    neighbours: Neighbours

    def __post_init__(self) -> None:
        if not 0 < self.epsilon < float("inf"):
            raise PrivacyError(f"the cap's epsilon is {self.epsilon}; it must be positive and finite")
        if not 0 < self.delta < 1:
            raise PrivacyError(f"the cap's delta is {self.delta}; it must lie between 0 and 1")
        if self.neighbours not in get_args(Neighbours):
            raise PrivacyError(
                f"the cap's neighbours is {self.neighbours!r}; allowed: {', '.join(get_args(Neighbours))}"
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


class Total(NamedTuple):
    """The ε of a cap that would have admitted all of an agent's participations, and what shows it."""

    epsilon: float
    by: str


def admits(events: Mapping[Event, int], cap: Cap, first: FirstPlan | None) -> bool:
    """Whether `cap` has room for all `events`; `first` is the agent's first plan, None where none was announced.

    What keeps to the first plan costs that plan, whole. All else goes by the filter with what the plan leaves of δ,
    which is all of it where the filter has room for the plan itself. Each answer depends on `events`, the plan and the
    cap alone, never on a release.
    """
    from fedspa.privacy import filter  # slow to import

    _check_composable(events, cap.neighbours, first)
    spare = cap.delta
    if first is not None and first.epsilon(cap.delta, cap.neighbours) <= cap.epsilon:
        if first.covers(events):
            return True
        if not filter.fits(first.seen, cap.epsilon, cap.delta, cap.neighbours):
            spare -= _delta_of(first, cap)
    return filter.fits(as_server_saw(events), cap.epsilon, spare, cap.neighbours)


def total(events: Mapping[Event, int], delta: float, neighbours: Neighbours, first: FirstPlan | None) -> Total:
    """What all `events` cost: an ε at which a cap `admits` them, not always the smallest; infinite if none."""
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
        return Total(whole, f"{first.event.priced_by('pld', neighbours)} (one plan)")
    if filtered >= whole:
        # A cap between both prices of the plan gives a part of δ to it; from the larger on it gives none.
        filtered = max(filtered, filter.least_epsilon(first.seen, delta, neighbours))
    return Total(filtered, BY_FILTER)


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
    while over - fits > 1:
        middle = (fits + over) // 2
        fits, over = (middle, over) if fit(middle) else (fits, middle)
    return fits


def _check_composable(events: Mapping[Event, int], neighbours: Neighbours, first: FirstPlan | None) -> None:
    require_one_unit([*events, *([] if first is None else [first.event])])
    if neighbours == "add-remove" and any(event.sampling == "fixed" for event in events):
        raise PrivacyError(
            "the ledger holds events of fixed-size sampling, which have no sound total under neighbours "
            "'add-remove'; ask for 'replace-one'"
        )


def _delta_of(plan: FirstPlan, cap: Cap) -> float:
    """δ of the plan at the cap's ε, rounded up to parts of the cap's δ; all of that is known to be enough."""
    short, enough = 0, _PARTS
    while enough - short > 1:
        middle = (short + enough) // 2
        fits = plan.epsilon(cap.delta * middle / _PARTS, cap.neighbours) <= cap.epsilon
        short, enough = (short, middle) if fits else (middle, enough)
    return cap.delta * enough / _PARTS
