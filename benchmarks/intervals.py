"""Mean, spread and confidence interval of results over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import special


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation over seeds (none for a single one), and the values themselves."""
    return {
        "mean": round(statistics.mean(values), 4),
        "std": round(statistics.stdev(values), 4) if len(values) > 1 else None,
        "values": [round(value, 4) for value in values],
    }


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of the mean (Student's t); None for a single value."""
    if len(values) < 2:
        return None
    return float(special.stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def shown_spread(values: Mapping[str, Any]) -> str:
    """Mean ± half of its 95 % confidence interval, in two digits."""
    half = half_interval(values["values"])
    return f"{values['mean']:.2f}{'' if half is None else f' ± {half:.2f}'}"


def largest(values: Sequence[float | None]) -> float | None:
    """None where a run has none: no ε is not an ε of 0, and of sums a worst case of None is infinite."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None
