"""The least noise for a budget, verified by the accountant itself.

ε falls as noise grows, close to a power law, so that a bracketed secant in logarithms needs few evaluations. Noise is
searched on the grid of four significant digits: the result is the smallest such number whose ε does not pass the
target, whatever the search tried on its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedspa.errors import PrivacyError
from fedspa.mechanisms.gaussian.event import GaussianEvent
from fedspa.privacy import accounting
from fedspa.privacy.accounting import gaussian_epsilon
from fedspa.privacy.event import MOST, Neighbours, Sampling, told

_DIGITS = 1000  # four significant digits: mantissas 1000 … 9999
LEAST_NOISE, MOST_NOISE = 1e-3, 1e8


def noise_multiplier(
    epsilon: float,
    delta: float,
    *,
    sampling: Sampling,
    batch: int,
    records: int,
    steps: int,
    participations: int,
    neighbours: Neighbours,
) -> float:
    """The least noise multiplier, to four digits, at which `participations` cost at most `epsilon` at `delta`."""
    _check_budget(epsilon, delta)
    GaussianEvent(sampling, batch, records, steps, 1.0)  # which refuses sizes that the guess below cannot take
    if not 1 <= participations <= MOST:
        raise PrivacyError(f"participations is {told(participations)}; it must lie between 1 and {MOST:g}")

    def cost(index: int) -> float:
        event = GaussianEvent(sampling, batch, records, steps, _noise(index))
        return accounting.epsilon({event: participations}, delta, neighbours=neighbours)

    # A sampled Gaussian of many steps is nearly one Gaussian of shift q·√n·sensitivity/σ.
    width = 1 if neighbours == "add-remove" else 2
    spread = width * batch / records * math.sqrt(steps * participations)
    guess = min(max(spread / _gaussian_shift(epsilon, delta), 0.3), MOST_NOISE / 10)
    most = _index(MOST_NOISE)
    enough = short = _index(guess)
    stride = _DIGITS // 2
    while cost(enough) > epsilon:
        short, enough, stride = enough, min(enough + stride, most), 2 * stride
        if short == most:
            raise PrivacyError(
                f"no noise multiplier up to {MOST_NOISE:g} keeps epsilon at {epsilon} with delta {delta}; "
                "take a larger epsilon or delta, or fewer steps"
            )
    stride = _DIGITS // 2
    while short >= enough or cost(short) <= epsilon:
        enough = min(enough, short)
        if enough <= _index(LEAST_NOISE):
            return _noise(enough)
        short, stride = max(enough - stride, _index(LEAST_NOISE)), 2 * stride
    return _noise(_last_fitting(cost, epsilon, enough, short, lambda index: math.log(_noise(index))))


def _last_fitting(
    cost: Callable[[int], float], target: float, fits: int, over: int, coordinate: Callable[[int], float]
) -> int:
    """Narrow cost(fits) ≤ target < cost(over) until they are neighbours; returns the one that fits."""

    def height(index: int) -> float:
        return math.log(min(max(cost(index) / target, 1e-9), 1e9))

    turn = 0
    while abs(over - fits) > 1:
        least, most = min(fits, over) + 1, max(fits, over) - 1
        a, b = height(fits), height(over)
        if turn % 3 == 2:
            middle = (fits + over) // 2
        else:
            # The index whose coordinate lies nearest to where the line through both ends crosses the target.
            share = a / (a - b) if b > a else 0.5
            wanted = coordinate(fits) + share * (coordinate(over) - coordinate(fits))
            low, high = least, most
            while low < high:
                half = (low + high) // 2
                low, high = (half + 1, high) if coordinate(half) < wanted else (low, half)
            # Lean towards the far end, so that both ends close in.
            middle = min(max(low - (turn % 3), least), most)
        if cost(middle) <= target:
            fits = middle
        else:
            over = middle
        turn += 1
    return fits


def _gaussian_shift(target: float, delta: float) -> float:
    """The shift μ at which one Gaussian costs about `target`."""
    low, high = 1e-9, 1e9
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gaussian_epsilon(middle, delta) <= target else (low, middle)
    return low


def _noise(index: int) -> float:
    """The index-th number of four significant digits, in order; read from text, so that it prints as it is."""
    exponent, mantissa = divmod(index, 9 * _DIGITS)
    return float(f"{_DIGITS + mantissa}e{exponent}")


def _index(noise: float) -> int:
    """The index of the smallest four-digit number that is not below `noise`."""
    exponent = math.floor(math.log10(noise)) - 3
    index: int = exponent * 9 * _DIGITS + math.floor(noise / 10**exponent) - _DIGITS
    while _noise(index) < noise:
        index += 1
    return index


def _check_budget(epsilon: float, delta: float) -> None:
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(f"epsilon is {epsilon}; it must be positive and finite")
    if not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta}; it must lie between 0 and 1")


# A run's own terms first.
TERMS: tuple[tuple[Sampling, Neighbours], ...] = (
    ("poisson", "add-remove"),
    ("poisson", "replace-one"),
    ("fixed", "replace-one"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`noise` as in `GaussianEvent` (σ·B over √p·G or C), and its ε."""

    sampling: Sampling
    neighbours: Neighbours
    accountant: str
    noise: float
    epsilon: float


def compare(
    *,
    batch: int,
    records: int,
    local_steps: int,
    participations: int,
    delta: float,
    epsilon: float | None = None,
    noise: float | None = None,
) -> list[Comparison]:
    """Return the noise that `epsilon` needs (and the ε that it then has), or the ε of `noise`, for each of `TERMS`."""
    if (epsilon is None) == (noise is None):
        raise PrivacyError("give exactly one of epsilon and noise")
    sizes = {"batch": batch, "records": records, "steps": local_steps, "participations": participations}
    table = []
    for sampling, neighbours in TERMS:
        needed = noise
        if epsilon is not None:
            needed = noise_multiplier(epsilon, delta, sampling=sampling, neighbours=neighbours, **sizes)
        assert needed is not None
        event = GaussianEvent(sampling, batch, records, local_steps, needed)
        cost = accounting.epsilon({event: participations}, delta, neighbours=neighbours)
        table.append(Comparison(sampling, neighbours, event.accountant(neighbours), needed, cost))
    return table
