"""Two fedspas that understand each other may talk, whatever the versions of their packages; others pay nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="needs the extra: pip install 'fedspa[flower]'")

import hashlib
from pathlib import Path

import fedspa
from fedspa.agent.ledger.ledger import Ledger
from fedspa.flower import terms
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from fedspa.privacy import accounting
from fedspa.privacy.filter import least_epsilon
from fedspa.randomness.mask import active_coordinates
from fedspa.runs import identity

from .test_terms import BINOMIAL_PLAN, PLAN


def test_the_page_prints_todays_editions() -> None:
    page = (Path(__file__).parents[2] / "docs/deployment.md").read_text("utf-8")
    assert f"\n    terms {terms.VERSION}, {identity.written_editions()}\n" in page


def answered_by_another(grid, patch) -> None:
    """Have nodes answer as if another fedspa were installed there."""

    def elsewhere(node, message, answer):
        with pytest.MonkeyPatch.context() as patched:
            patch(patched)
            return [answer()]

    grid.fault = elsewhere


def spent(grid) -> int:
    found = 0
    for node in grid.nodes.values():
        with Ledger.open(node["ledger"], create=False) as ledger:
            found += sum(ledger.spent(node["agent"]).values())
    return found


def test_another_version_of_the_package_takes_part(deployment, train):
    def patch(patched):
        patched.setattr(fedspa, "__version__", "9.9.9")
        patched.setattr(identity, "__version__", "9.9.9")

    answered_by_another(deployment, patch)
    summary = train(deployment, federation__rounds=1)
    assert summary["dropped"] == {}
    assert spent(deployment) == 4


@pytest.mark.parametrize(
    "patch",
    [
        lambda patched: patched.setattr(terms, "VERSION", terms.VERSION + 1),
        lambda patched: patched.setattr(identity, "EDITIONS", {**identity.EDITIONS, "payload": 2}),
        lambda patched: patched.setattr(identity, "EDITIONS", {**identity.EDITIONS, "pricing": identity.PRICING + 1}),
    ],
    ids=["terms", "payload", "pricing"],
)
def test_another_edition_is_refused_before_anything_is_paid(deployment, train, patch):
    answered_by_another(deployment, patch)
    with pytest.raises(fedspa.FedspaError, match=r"4 of 4 agents refuse this run \(terms\)"):
        train(deployment)
    assert spent(deployment) == 0


def test_the_same_editions_in_any_order():
    assert identity.edition_differences(identity.written_editions()) == []
    assert identity.edition_differences(", ".join(reversed(identity.written_editions().split(", ")))) == []


def test_other_prices_are_another_edition():
    """Whoever changes what an event costs raises PRICING, and then these numbers."""
    gaussian, binomial = {PLAN.event: 3}, {BINOMIAL_PLAN.event: 2}
    prices = [
        accounting.epsilon(gaussian, 1e-3, neighbours="add-remove"),
        accounting.epsilon(binomial, 1e-9, neighbours="replace-one"),
        least_epsilon(gaussian, 1e-3, "add-remove"),
        accounting.epsilon(
            {GaussianEvent("poisson", 1, 1, 1, 0.2): 1}, 1e-4, neighbours="add-remove"
        ),  # its noise ends
    ]
    assert (identity.PRICING, [f"{price:.5g}" for price in prices]) == (2, ["1.6753", "0.00708", "2.2341", "30.375"])


def test_other_coordinates_are_another_edition():
    """Whoever changes what a seed means raises MASK, and then this digest."""
    chosen = active_coordinates(bytes(range(16)), 10_000, 100)
    digest = hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest()[:16]
    assert (identity.MASK, digest) == (1, "26a3335ba39341f8")
