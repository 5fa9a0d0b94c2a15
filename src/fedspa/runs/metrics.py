"""A line of metrics.jsonl. No clock is in it, so that two runs can be compared bit for bit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoundMetrics:
    """What is known after a round. `epsilon` is the largest over agents so far, verified; None without privacy.

    `private` is False where there is no ε, and where it does not count: a clip value read off the data, seeded noise.
    """

    round: int
    accuracy: float
    loss: float
    agents: int
    uplink_bytes: int
    epsilon: float | None
    private: bool
    clip_value: float | None
