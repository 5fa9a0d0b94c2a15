"""How far the numbers of a run may go. Whatever reads a number that someone else chose holds it against these limits.

They are far beyond any use and well within what float64, float32 and 32-bit integers can carry: a number past them is
a slip, or an attempt at an overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fedspa.mechanisms.base import LARGEST_CLIP, SMALLEST_CLIP

_MANY: Final = 2**31 - 1

# Least and most, both allowed; a mechanism's own numbers have theirs in its room. What one number demands of another
# (k ≤ d, B ≤ m, δ < 1/m) is for the plan to say.
LIMITS: Final[Mapping[str, tuple[float, float]]] = {
    "number": (0, _MANY),
    "agents": (1, _MANY),
    "round": (0, _MANY),
    "participations": (1, 10**6),
    "classes": (0, 10**6),
    "dimension": (1, _MANY),
    "active": (1, _MANY),
    "records": (1, _MANY),
    "batch": (1, _MANY),
    "local_steps": (1, 10**6),
    "local_lr": (1e-12, 1e6),
    "clip_value": (SMALLEST_CLIP, LARGEST_CLIP),
    "noise_multiplier": (1e-6, 1e6),
    "delta": (1e-30, 1.0),
}
# As many parameter tensors as a model may have where a mask is drawn layer by layer.
MOST_LAYERS: Final = 10_000
