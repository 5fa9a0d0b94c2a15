"""Why a back end does not run here, and what would change that: said once, where it is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Obstacle:
    """`why` is one clause about the back end. `mend` says what a user could change to be rid of it; it is empty where
    only another model, task or unit of privacy would help."""

    why: str
    mend: str = ""

    def __str__(self) -> str:
        return self.why


def together(obstacles: Sequence[Obstacle]) -> Obstacle:
    """Several as one. It can be mended if each of them can: to mend some of them gains nothing."""
    mends = [obstacle.mend for obstacle in obstacles]
    return Obstacle("; ".join(obstacle.why for obstacle in obstacles), "; ".join(mends) if all(mends) else "")
