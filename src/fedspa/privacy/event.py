"""What one participation does to an agent's records, apart from what it costs.

An event is the unit that ledgers store and accountants compose. A Gaussian one's noise multiplier is the standard
deviation of the noise on the *sum* of clipped gradients, in units of the bound on one example's clipped gradient (√k·c
for `coordinate` clipping, C for `l2`): the same number under both neighbouring relations. Accountants turn it into
σ/sensitivity. A Binomial one (cpSGD) states its mechanism in whole numbers.

`noise` says where the noise came from: the operating system (`secure`, `exact`), or a seed, in simulations: whoever
knows that can subtract it. None where it was not recorded, as in ledgers of the first edition. It changes no price.
"""

from __future__ import annotations

import json
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, get_args

from fedspa.errors import PrivacyError

Sampling = Literal["poisson", "fixed"]
Neighbours = Literal["add-remove", "replace-one"]
NoiseMode = Literal["secure", "exact", "seeded"]


class UnknownKind(PrivacyError):
    """An event of a kind that this version does not know."""


@dataclass(frozen=True, slots=True)
class GaussianEvent:
    """`steps` Gaussian releases, each on a fresh sample of `batch` (expected or exact) of `records` records.

    `clip_from_data`: the clip value was read off the records and not paid for (the paper's median). No ε bounds that.
    """

    sampling: Sampling
    batch: int
    records: int
    steps: int
    noise_multiplier: float
    clip_from_data: bool = False
    noise: NoiseMode | None = None

    def __post_init__(self) -> None:
        try:
            _make_whole(self, "batch", "records", "steps")
            object.__setattr__(self, "noise_multiplier", float(self.noise_multiplier))  # equal events, equal text
        except (TypeError, ValueError, OverflowError) as error:
            raise PrivacyError(f"an event takes whole numbers and a noise multiplier: {error}") from None
        if self.sampling not in get_args(Sampling):
            raise PrivacyError(f"sampling is {self.sampling!r}; allowed: {', '.join(get_args(Sampling))}")
        _check_steps(self)
        _check_mode(self.noise)
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier > 0):
            raise PrivacyError(f"noise multiplier is {self.noise_multiplier}; it must be positive and finite")

    @property
    def rate(self) -> float:
        """q = B/m, the chance that a record takes part in a step."""
        return self.batch / self.records

    def to_json(self) -> str:
        """Canonical text: equal events give equal text, so a ledger can count by it."""
        return _to_json(_CLIP_FROM_DATA if self.clip_from_data else "gaussian", self)

    def __str__(self) -> str:
        drawn = f"{self.sampling} {self.batch}/{self.records}"
        flaw = ", NOT PRIVATE: clip value read off the data" if self.clip_from_data else ""
        return f"{self.steps} steps, {drawn}, noise {self.noise_multiplier:.4g}{_shown_mode(self.noise)}{flaw}"


@dataclass(frozen=True, slots=True)
class BinomialEvent:
    """`steps` releases of cpSGD, each of a fresh batch of exactly `batch` of `records` records (docs/cpsgd.md).

    The mean of `batch` clipped gradients of `dimension` coordinates, rounded at random onto 2^`bits` levels that span
    ±the clip bound (with `rotation`: of the rotated, padded vector, ± what a rotated coordinate hardly ever passes),
    plus Binomial(`trials`, ½) in each coordinate. `aggregated` is 1 where the adversary sees this agent's numbers;
    where it sees only their sum over so many agents (secure aggregation), the noise of all of them counts.
    """

    batch: int
    records: int
    steps: int
    dimension: int
    bits: int
    trials: int
    rotation: bool
    aggregated: int
    noise: NoiseMode | None = None

    def __post_init__(self) -> None:
        try:
            _make_whole(self, "batch", "records", "steps", "dimension", "bits", "trials", "aggregated")
        except TypeError as error:
            raise PrivacyError(f"a Binomial event takes whole numbers: {error}") from None
        _check_steps(self)
        _check_mode(self.noise)
        if type(self.rotation) is not bool:
            raise PrivacyError(f"rotation is {self.rotation!r}; it must be true or false")
        for name, most in (("dimension", 2**31 - 1), ("bits", 16), ("trials", 2**31 - 1), ("aggregated", 2**31 - 1)):
            if not 1 <= getattr(self, name) <= most:
                raise PrivacyError(f"{name} is {getattr(self, name)}; it must lie between 1 and {most}")

    @property
    def sampling(self) -> Sampling:
        return "fixed"

    @property
    def rate(self) -> float:
        """q = B/m, the chance that a record takes part in a step."""
        return self.batch / self.records

    @property
    def coordinates(self) -> int:
        """How many numbers are released: d, or the power of two that a rotation pads it to."""
        return 1 << (self.dimension - 1).bit_length() if self.rotation else self.dimension

    def to_json(self) -> str:
        """Canonical text: equal events give equal text, so a ledger can count by it."""
        return _to_json("binomial", self)

    def __str__(self) -> str:
        seen = "" if self.aggregated == 1 else f", ONLY under secure aggregation of {self.aggregated} agents"
        return (
            f"{self.steps} steps of cpsgd, fixed {self.batch}/{self.records}, {2**self.bits} levels, "
            f"Binomial({self.trials}, 1/2) noise{_shown_mode(self.noise)}{seen}"
        )


Event = GaussianEvent | BinomialEvent


def as_server_saw(events: Mapping[Event, int]) -> Counter[Event]:
    """These participations without secure aggregation, which was never run: each agent's own noise is all there was.

    What is paid over several runs is counted so, whatever a run was compared with under its own label; and whatever the
    noise came from, so that it is one mechanism to who prices it.
    """
    seen: Counter[Event] = Counter()
    for event, count in events.items():
        if isinstance(event, BinomialEvent):
            event = replace(event, aggregated=1)
        seen[replace(event, noise=None)] += count
    return seen


def same_event(recorded: Event, now: Event) -> bool:
    """Whether `now` is what was recorded, where that may be of before the noise mode was."""
    return recorded in (now, replace(now, noise=None))


def noise_modes(events: Mapping[Event, int]) -> dict[str, int]:
    """How many participations had noise of which mode; `unrecorded` of those that do not say."""
    modes: Counter[str] = Counter()
    for event, count in events.items():
        modes[event.noise or "unrecorded"] += count
    return dict(sorted(modes.items()))


def seeded_words(modes: Mapping[str, int]) -> str | None:
    """What must stand beside every ε of such participations; None where no noise was seeded."""
    seeded, among = modes.get("seeded", 0), sum(modes.values())
    if not seeded:
        return None
    whose = "THE NOISE" if seeded == among else f"THE NOISE OF {seeded} OF {among} PARTICIPATIONS"
    return f"{whose} WAS SEEDED: a simulation, nothing in it is private; ε would hold with secure noise"


# A kind of its own, not one more field: ledgers of before stay as they are, and a fedspa of before refuses this one.
_CLIP_FROM_DATA = "gaussian-clip-from-data"
_KINDS: dict[str, Callable[..., Event]] = {
    "gaussian": GaussianEvent,
    _CLIP_FROM_DATA: partial(GaussianEvent, clip_from_data=True),
    "binomial": BinomialEvent,
}


def from_json(text: str) -> Event:
    """Inverse of `to_json`; anything that is not exactly such an event is a PrivacyError."""
    if not isinstance(text, str):  # a damaged ledger's columns have any type; and not all of them can be cached
        raise PrivacyError(f"not an event: {repr(text)[:200]} (it must be text)")
    return _from_json(text)


@lru_cache(maxsize=1024)  # a ledger reads the same few events again and again
def _from_json(text: str) -> Event:
    try:
        fields = json.loads(text)
        kind = fields.pop("kind")
        if kind not in _KINDS:
            raise UnknownKind(f"event kind is {kind!r}; this version knows: {', '.join(_KINDS)}")
        event = _KINDS[kind](**fields)
        if event.to_json() != text:
            raise PrivacyError(f"event text is not canonical: {text[:200]!r}")
        return event
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())  # it may quote a field's name, and with it a line's end
        raise PrivacyError(f"not an event: {text[:200]!r} ({why})") from None


def _make_whole(event: Any, *names: str) -> None:
    for name in names:
        object.__setattr__(event, name, operator.index(getattr(event, name)))


def _check_steps(event: Any) -> None:
    if not 1 <= event.batch <= event.records:
        raise PrivacyError(f"batch is {event.batch}; it must lie between 1 and the records, {event.records}")
    if event.steps < 1:
        raise PrivacyError(f"steps is {event.steps}; it must be at least 1")


def _check_mode(noise: object) -> None:
    if noise is not None and noise not in get_args(NoiseMode):
        raise PrivacyError(f"noise is {noise!r}; allowed: {', '.join(get_args(NoiseMode))}")


def _shown_mode(noise: NoiseMode | None) -> str:
    return {None: "", "seeded": " (SEEDED: not private)"}.get(noise, f" ({noise})")


def _to_json(kind: str, event: Any) -> str:
    # The kind says whether the clip was read off the data. A mode that was not recorded is not in the text, so that
    # events of before it was recorded have the text that they had.
    fields = {name: getattr(event, name) for name in event.__slots__ if name != "clip_from_data"}
    if event.noise is None:
        del fields["noise"]
    return json.dumps({"kind": kind, **fields}, sort_keys=True, separators=(",", ":"))
