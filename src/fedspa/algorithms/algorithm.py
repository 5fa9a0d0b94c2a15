"""An algorithm: how agents answer a round, how answers travel, what protects the records.

This is the plug-in interface. `algorithm.name = "package.module:NAME"` in a config takes anybody's `Algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from fedspa.errors import PrivacyError
from fedspa.mechanisms import Mechanism
from fedspa.mechanisms.base import Adversary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pydantic import BaseModel
    from torch import Tensor

    from fedspa.algorithms.base import Agent, Answer, ServerStep, Terms
    from fedspa.engine.task import Engine
    from fedspa.randomness.sparsify import MaskMode
    from fedspa.wire.payload import Coding, Update


def encode_values(answer: Answer, terms: Terms, coding: Coding) -> bytes:
    """Encode noisy real values (`base.encode_values`)."""
    from fedspa.algorithms import base

    return base.encode_values(answer, terms, coding)


def decode_values(payload: bytes, terms: Terms, coding: Coding, seed: bytes | None, seen: Container[bytes]) -> Update:
    """Decode noisy real values (`base.decode_values`)."""
    from fedspa.algorithms import base

    return base.decode_values(payload, terms, coding, seed, seen)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How agents answer a round, how answers travel, and how θ moves unless the config says otherwise.

    respond: makes the answers of a round's agents, one after the other.
    mechanism: what protects the records, whose plan `respond` must carry out; None where nothing does.
    sparse: whether a mask of `algorithm.compression` applies; all coordinates are active where it is False.
    server: the server's step where the config names none.
    encode, decode: an answer as bytes, and back; by default those of noisy real values.
    mask: the mask mode where there is no choice of it.
    options: a strict pydantic model of the config's `[algorithm.options]`; None where there are none.
    audit: the reference `package.module:NAME` of the `fedspa.audit.run.Audited` that attacks it.
    aggregated, mean: the variant for a server that sees sums only (`for_sums`). Its answers are whole numbers that
        leave masked and never encoded; `mean` makes of their sum over so many members the mean of their updates.
    name: as configs and announcements say it. The registry sets it.
    """

    respond: Callable[[Tensor, Terms, Sequence[Agent], Engine], Iterator[Answer]]
    mechanism: Mechanism | None
    sparse: bool = False
    server: ServerStep = "average"
    encode: Callable[[Answer, Terms, Coding], bytes] = encode_values
    decode: Callable[[bytes, Terms, Coding, bytes | None, Container[bytes]], Update] = decode_values
    mask: MaskMode | None = None
    options: type[BaseModel] | None = None
    audit: str | None = None
    aggregated: Algorithm | None = None
    mean: Callable[[NDArray[np.int64], int, Terms], Update] | None = None
    name: str = ""

    @property
    def private(self) -> bool:
        return self.mechanism is not None

    @property
    def adversary(self) -> Adversary:
        """Against whom its ε holds."""
        return "local" if self.mean is None else "secure-aggregation"


def _masked_only(*arguments: object) -> NoReturn:
    raise PrivacyError("a share of a sum leaves its agent masked (fedspa.secagg), and is never encoded by itself")


def for_sums(algorithm: Algorithm, mean: Callable[..., Any], **changes: Any) -> Algorithm:
    """Return `algorithm` with a variant for a server that sees sums only, which differs by `changes`."""
    summed = replace(algorithm, mean=mean, encode=_masked_only, decode=_masked_only, **changes)
    return replace(algorithm, aggregated=summed)
