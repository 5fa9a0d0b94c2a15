"""What an audit asks and what it answers: a `Question` becomes a `Check`, and a `Report` holds all checks.

A question is made after its experiment, and judged later: how sure its bound must be depends on how many questions
rest on chance, and the runner counts those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

# What claimed and lower_bound count. `mu` and `epsilon` are privacy, `levels` a sensitivity after rounding; the others
# are departures from the mechanism as accounted: `claimed` is then the largest value that chance allows at the check's
# confidence.
Unit = Literal["mu", "epsilon", "levels", "deviation", "correlation", "count"]
ATTACK_UNITS = ("mu", "epsilon")
# Stands for "nothing is hidden": JSON has no infinity.
UNBOUNDED = 1e9


@dataclass(frozen=True, slots=True)
class Check:
    """An answer. It holds where `lower_bound`, what was seen, stays within `claimed`, and the attack had its reach.

    `confidence` is the chance that a sound mechanism passes; 1 for a check without chance.
    """

    name: str
    unit: Unit
    claimed: float
    lower_bound: float
    confidence: float
    holds: bool
    detail: str

    @property
    def ratio(self) -> float:
        """How near to the claim it came; above 1 is a breach."""
        if self.claimed > 0:
            return self.lower_bound / self.claimed
        return UNBOUNDED if self.lower_bound > self.claimed else 0.0


class Finding(NamedTuple):
    """What a question found. `holds` is given where more is asked than that `seen` is at most `claimed`."""

    claimed: float
    seen: float
    detail: str
    holds: bool | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """`judge` takes the chance at which it may fail sound code.

    `share` is the question's part of the audit's false-alarm rate, relative to the other questions. It is 0 where sound
    code cannot fail. It must not depend on what was drawn.
    """

    name: str
    unit: Unit
    judge: Callable[[float], Finding]
    share: float = 1.0

    def answer(self, alpha: float) -> Check:
        """The check, wrong about sound code with a chance of at most `alpha`."""
        claimed, seen, detail, holds = self.judge(alpha)
        confidence = 1 - alpha if self.share > 0 else 1.0
        return Check(
            self.name, self.unit, claimed, seen, confidence, seen <= claimed if holds is None else holds, detail
        )


def certain(name: str, unit: Unit, claimed: float, seen: float, detail: str, holds: bool | None = None) -> Question:
    """A question without chance."""
    return Question(name, unit, lambda _: Finding(claimed, seen, detail, holds), share=0.0)


@dataclass(frozen=True, slots=True)
class Report:
    """All checks. `false_alarm` bounds the chance that any of them fails on a sound mechanism (union bound)."""

    checks: tuple[Check, ...]
    false_alarm: float
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    @property
    def headline(self) -> Check:
        """The worst failure, a breach before a mere departure; else the statistical attack that came nearest."""
        failed = [check for check in self.checks if not check.holds]
        candidates = failed or [check for check in self.checks if check.confidence < 1] or self.checks
        attacks = [check for check in candidates if check.unit in ATTACK_UNITS]
        return max(attacks or candidates, key=lambda check: check.ratio)

    def to_json(self) -> dict[str, Any]:
        """The headline's figures, the verdict over all checks, and the checks."""
        headline = self.headline
        return {
            "claimed": headline.claimed,
            "lower_bound": headline.lower_bound,
            "confidence": headline.confidence,
            "holds": self.holds,
            "check": headline.name,
            "unit": headline.unit,
            "false_alarm": self.false_alarm,
            "checks": [asdict(check) for check in self.checks],
            "notes": list(self.notes),
        }
