"""cpSGD (Agarwal, Suresh, Yu, Kumar, McMahan, NeurIPS 2018): whole numbers with Binomial noise. A plug-in: everything
that knows of it is in this folder, behind the interface that anybody's algorithm has.

    plan.py, event.py   the mechanism: a plan, and what a participation does
    accounting.py       what that costs (docs/cpsgd.md)
    release.py          rounding, rotation and noise, in whole numbers
    respond.py          an agent's answer, and the server's estimate
    codec.py            the numbers on the wire
    audit.py            attacks on all of it
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedspa.algorithms.algorithm import Algorithm, for_sums
from fedspa.algorithms.cpsgd.event import MOST_TRIALS
from fedspa.algorithms.cpsgd.plan import BINOMIAL

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedspa.algorithms.base import Agent, Answer, IntegerUpdate, Terms
    from fedspa.engine.task import Engine
    from fedspa.wire.payload import Coding, Update


class Options(BaseModel):
    """The config's `[algorithm.options]`. Of `trials`, `compression` and `privacy.epsilon` exactly one is given."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    bits: Annotated[int, Field(ge=1, le=16)] = Field(4, description="b: gradients are rounded onto 2^b levels.")
    rotation: bool = Field(False, description="Rotate gradients by random signs and Hadamard's matrix before rounding.")
    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] | None = Field(
        None, description="m: Binomial(m, 1/2) noise in each value."
    )
    compression: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="p = log2(m + 2^b)/32, which decides the trials m."
    )


def _respond(theta: Tensor, terms: Terms, agents: Sequence[Agent], engine: Engine) -> Iterator[IntegerUpdate]:
    from fedspa.algorithms.cpsgd.respond import respond

    return respond(theta, terms, agents, engine)


def _encode(answer: Answer, terms: Terms, coding: Coding) -> bytes:
    from fedspa.algorithms.cpsgd.respond import encode

    return encode(answer, terms, coding)


def _decode(payload: bytes, terms: Terms, coding: Coding, seed: bytes | None, seen: Container[bytes]) -> Update:
    from fedspa.algorithms.cpsgd.respond import decode

    return decode(payload, terms, coding, seed, seen)


def _mean(total: NDArray[np.int64], members: int, terms: Terms) -> Update:
    from fedspa.algorithms.cpsgd.respond import mean

    return mean(total, members, terms)


CPSGD = for_sums(
    Algorithm(
        _respond,
        BINOMIAL,
        encode=_encode,
        decode=_decode,
        mask="shared",  # agents that rotate do so alike, so that their numbers add up
        options=Options,
        audit="fedspa.algorithms.cpsgd.audit:AUDIT",
    ),
    _mean,
)
