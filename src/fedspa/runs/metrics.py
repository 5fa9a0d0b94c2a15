"""A line of metrics.jsonl. No clock is in it, so that two runs can be compared bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

# What agents say of trials: the share of their records whose class was found; of other tasks, the mean of e^(−loss).
AGENTS_SCORE = "agents' score"
# Scores of which less is better, scores that are shares of a whole, and what people call them.
LOWER = frozenset({"loss", "rmse", "mae", "perplexity", "log_loss"})
SHARES = frozenset({"accuracy", "balanced_accuracy", "token_accuracy", "exact_match", AGENTS_SCORE})
_CALLED = {"rmse": "RMSE", "mae": "MAE", "r2": "R²", "f1": "F1", "auc": "AUC"}
_WORDS = SHARES | {"log_loss", "average_precision"}


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """What is known after a round. `epsilon` is the largest over agents so far, verified; None without privacy.
    `epsilon_worst_case` is the same against one who colludes with all others, where agents' uploads are aggregated;
    None where they are not, or where it is infinite.

    `scores` are the task's and the user's own, by name; `accuracy` is a classifier's among them, else None. `trials` is
    what agents said of the settings that were tried, from 0 to 1 by the candidate's number, in a round in which they
    scored and did not train; None in all others.
    `private` is False where there is no ε, and where it does not count: a clip value read off the data, seeded noise.
    """

    round: int
    accuracy: float | None
    loss: float
    agents: int
    uplink_bytes: int
    epsilon: float | None
    private: bool
    clip_value: float | None
    scores: dict[str, float | None] = field(default_factory=dict)
    epsilon_worst_case: float | None = None
    trials: dict[int, float | None] | None = None

    @property
    def headline(self) -> str:
        """Return the name of the score that the run is judged by."""
        return next(iter(self.scores), "loss" if self.accuracy is None else "accuracy")

    @property
    def score(self) -> float:
        """Its value; NaN where the examples do not say."""
        found = self.scores.get(self.headline, self.accuracy)
        return self.loss if self.headline == "loss" else math.nan if found is None else found


def better(name: str) -> Callable[[Iterable[float]], float]:
    """`max` or `min`: which of several values of that score is the best."""
    return min if name in LOWER else max


def label(name: str) -> str:
    """A score's name for people, within a sentence; a metric of the user's own has the name that it was given, or its
    function's."""
    return _CALLED.get(name, name.replace("_", " ") if name in _WORDS else name.rpartition(":")[2])


def heading(name: str) -> str:
    """Return the label for the beginning of a line."""
    return label(name)[:1].upper() + label(name)[1:]


def shown_score(name: str, value: float | None) -> str:
    """Format a score: shares as percentages."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.2%}" if name in SHARES else f"{value:.4g}"
