"""What events cost together, and the limits on it. Over a ledger's file: test_ledger.py."""

from __future__ import annotations

import math

import pytest

from fedspa.errors import PrivacyError
from fedspa.privacy import accounting
from fedspa.privacy.cap import Cap, accountants, total_epsilon
from fedspa.privacy.event import BinomialEvent, Event, GaussianEvent

POISSON, FIXED = (GaussianEvent(sampling, 10, 600, 3, 2.0) for sampling in ("poisson", "fixed"))
ROTATED = BinomialEvent(10, 600, 1, 100, 2, 10_000, rotation=True, aggregated=1)


@pytest.mark.parametrize(
    ("epsilon", "delta", "neighbours"),
    [
        *((epsilon, 1e-3, "add-remove") for epsilon in (0, -1, math.nan, math.inf)),
        *((1, delta, "add-remove") for delta in (0, 1, math.nan)),
        (1, 1e-3, "swap"),
    ],
)
def test_cap_is_checked(epsilon: float, delta: float, neighbours: str) -> None:
    with pytest.raises(PrivacyError, match="the cap's"):
        Cap(epsilon, delta, neighbours)  # type: ignore[arg-type]


def test_nothing_costs_nothing() -> None:
    assert total_epsilon({}, 1e-3, "add-remove") == 0.0


def test_fixed_size_batches_have_a_total_under_replace_one_only() -> None:
    both: dict[Event, int] = {POISSON: 2, FIXED: 1}
    with pytest.raises(PrivacyError, match="'replace-one'"):
        total_epsilon(both, 1e-3, "add-remove")
    assert total_epsilon(both, 1e-3, "replace-one") == accounting.epsilon(both, 1e-3, neighbours="replace-one")


def test_accountants_are_named_once() -> None:
    assert accountants([POISSON, FIXED]) == "pld"
    assert accountants([ROTATED, POISSON]) == "pld and binomial"
