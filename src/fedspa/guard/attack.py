"""An audit of somebody else's training: whether it hides a record as well as its event says.

The training is a black box that is run again and again, with a record and without it. Who sees an outcome guesses which
it was. Guesses that are right too often bound ε from below, at a stated confidence, and a bound above the event's ε is
a fault: noise that is missing, a clip that does not hold, a metric that nothing paid for. That none was found proves
nothing. Each run is a release, so the records are made up, and the ledger is left alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedspa.errors import ConfigError, PrivacyError, quoted
from fedspa.guard.guard import check_count, check_number, events_of
from fedspa.privacy.accounting import epsilon
from fedspa.privacy.event import Neighbours

if TYPE_CHECKING:
    from fedspa.audit.statistics import Report

_LEAST = 20  # draws a side, below which no attack has any reach


def audit(
    score: Callable[[bool], float],
    event: object,
    *,
    delta: float,
    neighbours: Neighbours = "add-remove",
    draws: int = 400,
    false_alarm: float = 0.01,
) -> Report:
    """Attack a training that says it is `event`: a bound on ε from below that passes the event's own ε is a fault.

    Args:
        score: `score(True)` trains anew on made-up records with one chosen record among them, `score(False)` without it
            (under `replace-one`: with another in its place). Each gives a number that is larger the more the outcome
            looks as if the record had been there, such as the record's own loss with its sign turned.
        event: What one training does to its records.
        delta: At which ε is compared.
        neighbours: The relation of ε.
        draws: Runs a side. The first half chooses a threshold, the second half is judged by it.
        false_alarm: The chance that a sound training fails.

    Returns:
        A report: whether it `holds`, and as `headline` the `lower_bound` beside what was `claimed`.

    Examples:
        >>> import random, fedspa
        >>> from dp_accounting import GaussianDpEvent
        >>> drawn = random.Random(1)
        >>> report = fedspa.guard.audit(lambda there: there + drawn.gauss(0, 0.1), GaussianDpEvent(1.0), delta=0.1)
        >>> report.holds
        False
    """
    from fedspa.audit.statistics import Report, epsilon_lower, threshold_attack  # slow to import

    if not callable(score):
        raise ConfigError(
            f"score is {quoted(score)}; give a function of True or False, which trains and gives a number"
        )
    check_count("draws", draws)
    if not 0 < check_number("false_alarm", false_alarm) < 1:
        raise ConfigError(f"false_alarm is {quoted(false_alarm)}; it must lie between 0 and 1")
    if draws < _LEAST:
        raise PrivacyError(f"draws is {draws}; it must be at least {_LEAST} a side, and a few hundred to see anything")
    claimed = epsilon(Counter(events_of(event, neighbours=neighbours)), delta, neighbours=neighbours)
    if math.isinf(claimed):
        raise PrivacyError(f"the event has no finite ε at δ = {delta:g}: there is nothing to refute")
    there, gone = (np.array([_scored(score, record) for _ in range(draws)]) for record in (True, False))
    if np.isnan(there).any() or np.isnan(gone).any():
        raise PrivacyError("the score was NaN in some runs; give a number for every outcome, however bad")
    half = draws // 2
    questions = [
        threshold_attack(
            name,
            "epsilon",
            claimed,
            (likely[half:], unlikely[half:]),
            _threshold(likely[:half], unlikely[:half], delta),
            lambda hits, false_hits, trials, alpha: epsilon_lower(delta, hits, false_hits, trials, alpha),
            f"ε at δ = {delta:g}, {neighbours}",
        )
        for name, likely, unlikely in (("the record is there", there, gone), ("the record is gone", -gone, -there))
    ]
    return Report(tuple(question.answer(false_alarm / len(questions)) for question in questions), false_alarm)


def _scored(score: Callable[[bool], float], record: bool) -> float:
    found = score(record)
    try:
        return float(found)
    except (TypeError, ValueError):
        raise ConfigError(f"score({record}) gave {quoted(found)}; it must give a number") from None


def _threshold(likely: NDArray[np.float64], unlikely: NDArray[np.float64], delta: float) -> float:
    """Return the threshold of the best guess, from draws that the bound does not use."""
    from fedspa.audit.statistics import epsilon_lower

    points = np.quantile(np.concatenate([likely, unlikely]), np.linspace(0.01, 0.99, 50))
    found = [
        epsilon_lower(delta, int((likely > at).sum()), int((unlikely > at).sum()), len(likely), 0.1) for at in points
    ]
    return float(points[int(np.argmax(found))])
