"""A line of metrics.jsonl. No clock is in it, so that two runs can be compared bit for bit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """What is known after a round. `epsilon` is the largest over agents so far, verified; None without privacy."""

    round: int
    accuracy: float
    loss: float
    agents: int
    uplink_bytes: int
    epsilon: float | None
    clip_value: float | None
