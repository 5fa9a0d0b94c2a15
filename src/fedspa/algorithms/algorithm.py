"""An algorithm: how agents answer a round, how answers travel, what protects the records."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.mechanisms import Mechanism
from fedspa.mechanisms.base import Adversary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedspa.algorithms.base import Agent, Answer, ServerStep, Terms
    from fedspa.engine.task import Engine
    from fedspa.randomness.sparsify import MaskMode
    from fedspa.wire.payload import Coding, Update


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How agents answer a round (`respond`), how answers travel, and how θ moves unless the config says otherwise.

    `mechanism` is what protects records; None where nothing does. Without `sparse`, all coordinates are active. `mask`
    is given where there is no choice of it. `aggregated` is the same algorithm for a server that sees sums only; None
    where there is no such thing. Its answers are whole numbers that leave masked and never encoded, and `mean` makes
    of their sum over so many members the mean of their updates.
    """

    name: str
    mechanism: Mechanism | None
    sparse: bool
    server: ServerStep
    respond: Callable[[Tensor, Terms, Sequence[Agent], Engine], Iterator[Answer]]
    encode: Callable[[Answer, Terms, Coding], bytes]
    decode: Callable[[bytes, Terms, Coding, bytes | None, Container[bytes]], Update]
    mask: MaskMode | None = None
    aggregated: Algorithm | None = None
    mean: Callable[[NDArray[np.int64], int, Terms], Update] | None = None

    @property
    def private(self) -> bool:
        return self.mechanism is not None

    @property
    def adversary(self) -> Adversary:
        """Against whom its ε holds."""
        return "local" if self.mean is None else "secure-aggregation"

    def __reduce__(self) -> tuple[Callable[[str, Adversary], Algorithm], tuple[str, Adversary]]:
        """Between processes it travels by its name."""
        return _named, (self.name, self.adversary)


def _named(name: str, adversary: Adversary) -> Algorithm:
    from fedspa.algorithms import chosen

    return chosen(name, adversary)
