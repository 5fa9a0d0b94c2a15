"""What others call an event, in the ledger's own words: dp_accounting's `DpEvent`s as events that the ledger stores and
prices. What it has no sound price for is refused by name.

A noise multiplier means the same in both: the standard deviation of the noise on a sum, over the bound on what one
record adds to it. So does a Poisson sample. A `DpEvent` knows no neighbouring relation and no unit: those are the
guard's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from numbers import Real
from typing import Any

from fedspa.errors import PrivacyError, quoted
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy.event import Event, Neighbours, NoiseMode, Sampling, Unit

_SIMPLE = 10**6  # rates with a denominator up to this are kept as they are
_FINE = 2**49  # others are rounded up to a multiple of one over this
_NO_PRICE = {
    "NonPrivateDpEvent": "it says of itself that it is not private",
    "UnsupportedDpEvent": "it says of itself that nothing is known of it",
    "LaplaceDpEvent": "the ledger composes Gaussian noise",
    "DiscreteLaplaceDpEvent": "the ledger composes Gaussian noise",
    "RandomizedResponseDpEvent": "the ledger composes Gaussian noise",
    "SampledWithReplacementDpEvent": "a record may be drawn twice, for which no sound accountant is here",
    "SingleEpochTreeAggregationDpEvent": "no sound accountant for trees is here",
    "RepeatAndSelectDpEvent": "the choice of the best of several runs has no sound accountant here; spend for each run",
    "MixtureOfGaussiansDpEvent": "no sound accountant for mixtures is here",
    "ZCDpEvent": "a bound on Rényi divergences is not enough for an accountant of privacy losses",
    "TruncatedSubsampledGaussianDpEvent": "no sound accountant for truncated batches is here",
}
_ACCEPTED = (
    "GaussianDpEvent, PoissonSampledDpEvent or SampledWithoutReplacementDpEvent of one, SelfComposedDpEvent and "
    "ComposedDpEvent of these"
)

Drawn = tuple[Sampling, int, int, float]  # sampling, batch, records, noise multiplier


def events_of(
    given: object, *, neighbours: Neighbours, unit: Unit = "record", noise: NoiseMode | None = None
) -> list[Event]:
    """The events of the ledger that `given` is, none where it releases nothing."""
    found = [_own(given, unit, noise)] if isinstance(given, Event) else _foreign(given, unit, noise)
    for event in found:
        if event.sampling == "fixed" and neighbours == "add-remove":
            raise PrivacyError(
                "batches of a fixed size have no sound price under 'add-remove'; open the guard with "
                "neighbours='replace-one', or sample by Poisson"
            )
    return found


def fraction_of(rate: float) -> Fraction:
    """A sampling rate as batch over records: the number itself where it is a simple fraction, else a little more."""
    if not (isinstance(rate, Real) and 0 < rate <= 1):
        raise PrivacyError(f"the sampling probability is {quoted(rate)}; it must be above 0 and at most 1")
    simple = Fraction(rate).limit_denominator(_SIMPLE)
    return simple if float(simple) == rate else Fraction(math.ceil(Fraction(rate) * _FINE), _FINE)


def _own(event: Event, unit: Unit, noise: NoiseMode | None) -> Event:
    if event.unit != unit:
        raise PrivacyError(
            f"the event protects each {event.unit} and the guard each {unit}; their ε do not add up (docs/persons.md)"
        )
    if noise is not None and event.noise not in (None, noise):
        raise PrivacyError(f"noise is {noise!r}, and the event says {event.noise!r}: give one of them")
    return event if noise is None else event.with_noise(noise)


def _foreign(given: object, unit: Unit, noise: NoiseMode | None) -> list[Event]:
    steps: dict[Drawn, int] = {}  # those that differ in their number only are one event
    for drawn, count in _parts(given, 1):
        steps[drawn] = steps.get(drawn, 0) + count
    return [
        GaussianEvent(sampling, batch, records, count, multiplier, noise=noise, unit=unit)
        for (sampling, batch, records, multiplier), count in steps.items()
    ]


def _parts(given: Any, times: int) -> Iterator[tuple[Drawn, int]]:
    from dp_accounting import dp_event

    kind = type(given)
    if times == 0 or kind is dp_event.NoOpDpEvent:
        return
    if kind is dp_event.ComposedDpEvent:
        for part in given.events:
            yield from _parts(part, times)
    elif kind is dp_event.SelfComposedDpEvent:
        if not (isinstance(given.count, int) and given.count >= 0):
            raise PrivacyError(f"SelfComposedDpEvent has count {quoted(given.count)}; it must be a whole number")
        yield from _parts(given.event, times * given.count)
    elif kind is dp_event.GaussianDpEvent:
        yield ("poisson", 1, 1, _multiplier(given)), times
    elif kind is dp_event.PoissonSampledDpEvent and type(given.event) is dp_event.GaussianDpEvent:
        if given.sampling_probability != 0:
            rate = fraction_of(given.sampling_probability)
            yield ("poisson", rate.numerator, rate.denominator, _multiplier(given.event)), times
    elif kind is dp_event.SampledWithoutReplacementDpEvent and type(given.event) is dp_event.GaussianDpEvent:
        yield ("fixed", given.sample_size, given.source_dataset_size, _multiplier(given.event)), times
    else:
        raise PrivacyError(_refusal(given, isinstance(given, dp_event.DpEvent)))


def _multiplier(gaussian: Any) -> float:
    try:
        return float(gaussian.noise_multiplier)
    except (TypeError, ValueError, OverflowError):
        raise PrivacyError(
            f"the noise multiplier is {quoted(gaussian.noise_multiplier)}; it must be a number"
        ) from None


def _refusal(given: Any, is_event: bool) -> str:
    name = type(given).__name__
    if not is_event:
        return f"{quoted(given)} is no event; give one of fedspa's or of dp_accounting's ({_ACCEPTED})"
    if hasattr(given, "event"):
        name = f"{name} of {type(given.event).__name__}"
    why = _NO_PRICE.get(type(given).__name__, "no sound accountant for it is here")
    return f"{name} cannot be spent: {why}; accepted: {_ACCEPTED}"
