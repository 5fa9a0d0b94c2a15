"""An algorithm: how agents answer a round, how answers travel, what protects the records.

This is the plug-in interface. `algorithm.name = "package.module:NAME"` in a config takes anybody's `Algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from fedspa.errors import PrivacyError
from fedspa.mechanisms import Mechanism
from fedspa.mechanisms.base import Adversary
from fedspa.mechanisms.discrete_gaussian.plan import DISCRETE_GAUSSIAN
from fedspa.mechanisms.gaussian.plan import GAUSSIAN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pydantic import BaseModel
    from torch import Tensor

    from fedspa.algorithms.base import Agent, Answer, ServerStep, Terms
    from fedspa.engine.local import Engine
    from fedspa.randomness.mask import MaskMode
    from fedspa.wire.payload import Coding, Update


@dataclass(frozen=True, slots=True)
class Imported:
    """The function `package.module:name`, imported when it is called: what names it needs no torch."""

    reference: str

    def __call__(self, *arguments: Any) -> Any:
        module, _, name = self.reference.partition(":")
        return getattr(import_module(module), name)(*arguments)


encode_values = Imported("fedspa.algorithms.base:encode_values")
decode_values = Imported("fedspa.algorithms.base:decode_values")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How agents answer a round, how answers travel, and how θ moves unless the config says otherwise.

    respond: makes the answers of a round's agents, one after the other.
    mechanism: what protects the records, whose plan `respond` must carry out; None where nothing does.
    sparse: whether a mask of `algorithm.compression` applies; all coordinates are active where it is False.
    server: the server's step where the config names none.
    encode, decode: an answer as bytes, and back; by default those of noisy real values.
    mask: the mask mode where there is no choice of it.
    local_steps: whether `respond` takes as many local steps as the config says, by the optimiser that it names.
    options: a strict pydantic model of the config's `[algorithm.options]`; None where there are none.
    audit: the reference `package.module:NAME` of the `fedspa.audit.audited.Audited` that attacks it.
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
    local_steps: bool = False
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


_LOCAL_STEPS = Imported("fedspa.algorithms.fedspa:respond")
_SHARES = Imported("fedspa.algorithms.fedspa:respond_in_sums")
_MEAN = Imported("fedspa.algorithms.fedspa:mean_update")


def _private(*, sparse: bool, server: ServerStep) -> Algorithm:
    """τ noisy local steps; under secure aggregation one, and an agent's share of the noise on it."""
    steps = Algorithm(_LOCAL_STEPS, GAUSSIAN, sparse, server, audit="fedspa.audit.gaussian:GAUSSIAN", local_steps=True)
    shares = "fedspa.audit.aggregation:SHARES"
    return for_sums(steps, _MEAN, respond=_SHARES, mechanism=DISCRETE_GAUSSIAN, audit=shares, local_steps=False)


FED_SPA = _private(sparse=True, server="adam")
# The paper's baseline, FedAvg whose local gradients carry Gaussian noise: Fed-SPA's round with all coordinates active.
DP_FED = _private(sparse=False, server="average")
# FedAvg (McMahan et al. 2017) is Fed-SPA's round with all coordinates active and no plan: nothing is clipped, noised or
# cut, batches are drawn as the config's `privacy.sampling` says, and equation (2) of the paper's Section 3.2 holds.
FEDAVG = Algorithm(_LOCAL_STEPS, None, local_steps=True)
