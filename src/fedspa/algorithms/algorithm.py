"""An algorithm: how agents answer a round, how answers travel, what protects the records."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedspa.mechanisms import Mechanism

if TYPE_CHECKING:
    from torch import Tensor

    from fedspa.algorithms.base import Agent, Answer, ServerStep, Terms
    from fedspa.engine.task import Engine
    from fedspa.randomness.sparsify import MaskMode
    from fedspa.wire.payload import Coding, Update


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How agents answer a round (`respond`), how answers travel, and how θ moves unless the config says otherwise.

    `mechanism` is what protects records; None where nothing does. Without `sparse`, all coordinates are active. `mask`
    is given where there is no choice of it.
    """

    name: str
    mechanism: Mechanism | None
    sparse: bool
    server: ServerStep
    respond: Callable[[Tensor, Terms, Sequence[Agent], Engine], Iterator[Answer]]
    encode: Callable[[Answer, Terms, Coding], bytes]
    decode: Callable[[bytes, Terms, Coding, bytes | None, Container[bytes]], Update]
    mask: MaskMode | None = None

    @property
    def private(self) -> bool:
        return self.mechanism is not None

    def __reduce__(self) -> tuple[Callable[[str], Algorithm], tuple[str]]:
        """Between processes it travels by its name."""
        return _named, (self.name,)


def _named(name: str) -> Algorithm:
    from fedspa.algorithms import ALGORITHMS

    return ALGORITHMS[name]
