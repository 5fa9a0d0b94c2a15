"""What an agent's events cost over all its runs, and the most that they may: a verified ε, as the server saw them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from fedspa.errors import PrivacyError
from fedspa.privacy.event import Event, Neighbours, as_server_saw


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


def total_epsilon(events: Mapping[Event, int], delta: float, neighbours: Neighbours) -> float:
    """Verified ε of all `events` together, against a server that saw each of them; 0 for none.

    The accountant remembers what it was asked before.
    """
    if neighbours == "add-remove" and any(event.sampling == "fixed" for event in events):
        raise PrivacyError(
            "the ledger holds events of fixed-size sampling, which have no sound total under neighbours "
            "'add-remove'; ask for 'replace-one'"
        )
    if not events:
        return 0.0
    from fedspa.privacy import accounting  # slow to import

    return accounting.epsilon(as_server_saw(events), delta, neighbours=neighbours)


def accountants(events: Iterable[Event]) -> str:
    """What prices these events, for the reader: cpSGD's may have an accountant of their own."""
    from fedspa.privacy.accounting import priced_by

    return " and ".join(sorted({priced_by(event) for event in events}, reverse=True))
