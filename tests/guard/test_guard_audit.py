"""Black-box training under attack: a sound one passes, and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest

import fedspa.guard
from fedspa.errors import PrivacyError

NOISE = 2.0
EVENT = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(NOISE), 4)  # ε = 3.15 at δ = 1e-3


def training(noise: float, clip: float = 1.0) -> Callable[[bool], float]:
    """Four noisy sums of nine records and perhaps a tenth, which points where the others do not; the score is how far
    the outcome lies that way."""
    drawn = np.random.default_rng(20261116)

    def score(there: bool) -> float:
        total = 0.0
        for _ in range(4):
            total += (clip if there else 0.0) + noise * float(drawn.standard_normal())
        return total

    return score


def test_a_sound_training_passes() -> None:
    report = fedspa.guard.audit(training(NOISE), EVENT, delta=1e-3)
    assert report.holds
    assert report.headline.claimed == pytest.approx(3.15, abs=0.05)
    assert 0.2 < report.headline.lower_bound < report.headline.claimed  # the attack has some reach
    assert {check.name for check in report.checks} == {"the record is there", "the record is gone"}
    assert report.false_alarm == 0.01


@pytest.mark.parametrize(("noise", "clip"), [(0.2, 1.0), (NOISE, 8.0)])
def test_planted_faults_are_found(noise: float, clip: float) -> None:
    """Noise that is too small, and a record that was not clipped."""
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(4.0), 4)
    report = fedspa.guard.audit(training(noise, clip), event, delta=1e-3)
    assert not report.holds
    assert report.headline.lower_bound > report.headline.claimed


def test_a_score_that_tells_of_the_absence_is_heard_too() -> None:
    """A score that says `gone` is always right, and often it says nothing: only one direction refutes."""
    drawn = np.random.default_rng(7)
    event = dp_accounting.GaussianDpEvent(3.0)

    def score(there: bool) -> float:
        return 0.0 if there or drawn.random() < 0.5 else -1.0

    report = fedspa.guard.audit(score, event, delta=1e-3)
    by_name = {check.name: check.holds for check in report.checks}
    assert by_name == {"the record is there": True, "the record is gone": False}


@pytest.mark.parametrize(
    ("score", "event", "more", "match"),
    [
        (training(1.0), EVENT, {"draws": 4}, "draws is 4; it must be at least 20"),
        (lambda there: float("nan"), EVENT, {"draws": 20}, "the score was NaN"),
        (training(1.0), dp_accounting.NonPrivateDpEvent(), {}, "cannot be spent"),
    ],
)
def test_what_cannot_be_judged(score: Callable[[bool], float], event: object, more: dict[str, int], match: str) -> None:
    with pytest.raises(PrivacyError, match=match):
        fedspa.guard.audit(score, event, delta=1e-3, **more)  # type: ignore[arg-type]
