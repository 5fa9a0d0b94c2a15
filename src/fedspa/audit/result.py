"""What an audit answers: one `Check` per question, and a `Report` over all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

# What claimed and lower_bound count. `mu` and `epsilon` are privacy; the others are departures from the mechanism as
# accounted: `claimed` is then the largest value that chance allows at the check's confidence.
Unit = Literal["mu", "epsilon", "deviation", "correlation", "count"]
ATTACK_UNITS = ("mu", "epsilon")


@dataclass(frozen=True, slots=True)
class Check:
    """One question. It holds where `lower_bound`, what was seen, stays within `claimed`, and the attack had its reach.

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
        return float("inf") if self.lower_bound > self.claimed else 0.0


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
        """The worst failure; where all hold, the attack that came nearest to its claim by statistics."""
        failed = [check for check in self.checks if not check.holds]
        attacks = [check for check in self.checks if check.unit in ATTACK_UNITS and check.confidence < 1]
        return max(failed or attacks or self.checks, key=lambda check: check.ratio)

    def to_json(self) -> dict[str, Any]:
        """Plain values; infinities, which JSON has not, become None."""
        headline = self.headline
        return {
            "claimed": _finite(headline.claimed),
            "lower_bound": _finite(headline.lower_bound),
            "confidence": headline.confidence,
            "holds": self.holds,
            "check": headline.name,
            "unit": headline.unit,
            "false_alarm": self.false_alarm,
            "checks": [{key: _finite(value) for key, value in asdict(check).items()} for check in self.checks],
            "notes": list(self.notes),
        }


def _finite(value: Any) -> Any:
    finite = not isinstance(value, float) or value - value == 0
    return value if finite else None
