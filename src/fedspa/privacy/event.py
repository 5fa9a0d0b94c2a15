"""What one participation does to an agent's records, apart from what it costs.

An event is the unit that ledgers store and accountants compose. Its noise multiplier is the standard deviation of the
noise on the *sum* of clipped gradients, in units of the bound on one example's clipped gradient (√k·c for `coordinate`
clipping, C for `l2`): the same number under both neighbouring relations. Accountants turn it into σ/sensitivity.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from fedspa.errors import PrivacyError

Sampling = Literal["poisson", "fixed"]
Neighbours = Literal["add-remove", "replace-one"]


@dataclass(frozen=True, slots=True)
class GaussianEvent:
    """`steps` Gaussian releases, each on a fresh sample of `batch` (expected or exact) of `records` records."""

    sampling: Sampling
    batch: int
    records: int
    steps: int
    noise_multiplier: float

    def __post_init__(self) -> None:
        try:
            for name in ("batch", "records", "steps"):
                object.__setattr__(self, name, operator.index(getattr(self, name)))
            object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))  # equal events, equal text
        except (TypeError, ValueError, OverflowError) as error:
            raise PrivacyError(f"an event takes whole numbers and a noise multiplier: {error}") from None
        if self.sampling not in get_args(Sampling):
            raise PrivacyError(f"sampling is {self.sampling!r}; allowed: {', '.join(get_args(Sampling))}")
        if not 1 <= self.batch <= self.records:
            raise PrivacyError(f"batch is {self.batch}; it must lie between 1 and the records, {self.records}")
        if self.steps < 1:
            raise PrivacyError(f"steps is {self.steps}; it must be at least 1")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise PrivacyError(f"noise multiplier is {self.noise_multiplier}; it must be positive and finite")

    @property
    def rate(self) -> float:
        """q = B/m, the chance that a record takes part in a step."""
        return self.batch / self.records

    def to_json(self) -> str:
        """Canonical text: equal events give equal text, so a ledger can count by it."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"kind": "gaussian", **fields}, sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> GaussianEvent:
        """Inverse of `to_json`; anything that is not exactly such an event is a PrivacyError."""
        if not isinstance(text, str):  # a damaged ledger's columns have any type; and not all of them can be cached
            raise PrivacyError(f"not an event: {repr(text)[:200]} (it must be text)")
        return _from_json(text)


@lru_cache(maxsize=1024)  # a ledger reads the same few events again and again
def _from_json(text: str) -> GaussianEvent:
    try:
        fields = json.loads(text)
        kind = fields.pop("kind")
        if kind != "gaussian":
            raise PrivacyError(f"event kind is {kind!r}; this version knows 'gaussian' only")
        event = GaussianEvent(**fields)
        if event.to_json() != text:
            raise PrivacyError(f"event text is not canonical: {text[:200]!r}")
        return event
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())  # it may quote a field's name, and with it a line's end
        raise PrivacyError(f"not an event: {text[:200]!r} ({why})") from None
