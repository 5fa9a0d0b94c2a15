"""The ε that published theorems give for a run: Fed-SPA's Theorem 1, or cpSGD's. Neither is a guarantee."""

from __future__ import annotations

import json
import math
from pathlib import Path

from fedspa.agent.ledger.report import export
from fedspa.algorithms.cpsgd.plan import BinomialEvent
from fedspa.mechanisms import event_of
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from reproduction import cpsgd_theorem, theorem1


def published_epsilon(ledger: Path, participations: int, delta: float) -> float | None:
    """ε of so many participations in the event that a run's ledger holds; None where no theorem is published for it."""
    entries = export(ledger)["entries"] if ledger.exists() else []
    if not entries:
        return None
    event = event_of(json.dumps(entries[0]["event"], sort_keys=True, separators=(",", ":")))
    if isinstance(event, GaussianEvent):
        return theorem1.published_epsilon(event, participations, delta).epsilon
    if isinstance(event, BinomialEvent):
        found = cpsgd_theorem.published_epsilon(event, participations, delta)
        return found if math.isfinite(found) else None
    return None
