"""The rounds of a server that reads sums only: in which session a cohort adds up, and how often there was no sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from logging import WARNING

from flwr.supercore import log

from fedspa.algorithms import Terms
from fedspa.errors import FedspaError
from fedspa.flower.members import Members
from fedspa.randomness.streams import NoiseMode
from fedspa.secagg.session import Session
from fedspa.secagg.total import Void
from fedspa.server.coordinator import Coordinator

MOST_VOIDS = 3  # in a row: each costs everybody who was asked


class Sums:
    """`fewest` are the members that a cohort must have."""

    def __init__(self, members: Members, server: Coordinator, run: str, noise: NoiseMode, fewest: int) -> None:
        self.members, self.fewest = members, fewest
        self._server, self._run, self._noise = server, run, noise
        self._voids: list[str] = []  # why there was no sum, of the last rounds in a row

    def session(self, terms: Terms, attempt: int, numbers: Iterable[int]) -> Session | None:
        """What these agents add up in; None where nobody is asked."""
        cohort = self.members.cohort(numbers)
        return self._server.session(self._run, attempt, cohort, terms, self._noise) if cohort else None

    def tally(self, t: int, session: Session | None, void: Void | None) -> Counter[str]:
        """Note what came of a round; what is counted where it gave no sum, which is said."""
        if session is not None and void is None:
            self._voids = []
            return Counter()
        self._voids.append(f"fewer than {self.fewest} agents could be asked" if void is None else str(void))
        log(WARNING, "round %d gave no sum: %s", t, self._voids[-1])
        return Counter(["no-cohort" if void is None else f"void-{void.code}"])

    def refuse_another_void(self) -> None:
        """Raise where so many rounds gave no sum that the next one is not worth what it costs."""
        if len(self._voids) >= MOST_VOIDS:
            raise FedspaError(
                f"{MOST_VOIDS} rounds in a row gave no sum ({self._voids[-1]}), and everyone who was asked paid for "
                "them; mend that, then go on with flower.resume = true"
            )
