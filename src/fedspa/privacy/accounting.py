"""Verified ε: what events cost an agent's records, by a sound accountant.

    | sampling | neighbours  | accountants |
    | poisson  | add-remove  | pld, rdp    |
    | poisson  | replace-one | pld         |
    | fixed    | replace-one | pld, rdp    |

`pld` composes privacy loss distributions (`pld`, `poisson`, `fixed_size`); `rdp` is dp_accounting's Rényi accountant
(Mironov, Talwar, Zhang 2019 for poisson; Wang, Balle, Kasiviswanathan 2019 for fixed), at integer orders for fixed.
An event's noise is in units of the bound C on one example, and replace-one moves a sum by up to 2C: the Gaussian and
fixed-size pairs are handed σ/(2C) there, whereas the Poisson replace pair holds both examples and takes σ/C.
Events of different plans, and of both samplings under replace-one, compose, where all were fixed beforehand: what a
server chose after it saw releases is for `cap`.

cpSGD's events are priced under replace-one: without rotation by their loss distributions too (`rounded`), which
compose with all others; with rotation by a bound on them (`binomial`). What one accountant cannot compose gets an equal
share of δ in each, and the ε are added: plain composition, which holds for any mechanisms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from fedspa.errors import PrivacyError
from fedspa.privacy import binomial
from fedspa.privacy.event import MOST, BinomialEvent, Event, GaussianEvent, Neighbours, Sampling, told

if TYPE_CHECKING:
    from fedspa.privacy.pld import DominatingPair

Accountant = Literal["pld", "rdp"]
PricedBy = Literal["pld", "rdp", "binomial"]

SOUND: Mapping[tuple[Sampling, Neighbours], tuple[Accountant, ...]] = {
    ("poisson", "add-remove"): ("pld", "rdp"),
    ("poisson", "replace-one"): ("pld",),
    ("fixed", "replace-one"): ("pld", "rdp"),
}

# Orders are walked upwards until the bound has risen for good, then refined around the best.
_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 1024, 2048, 4096)
# Gaussian steps are priced by their own noise between these; outside by a step that costs more.
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e8
# dp_accounting's sums over orders stop at e^-30 of their value: what ln A may lack.
_RDP_ERROR = 2e-13


def epsilon(
    events: Mapping[Event, int], delta: float, *, neighbours: Neighbours, accountant: Accountant = "pld"
) -> float:
    """The ε at `delta` of taking part in each event its number of times: an upper bound, infinite where none is known.

    It bounds one record's loss under `neighbours`, over everything that the agent released in these participations.
    """
    if not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta}; it must lie between 0 and 1")
    if neighbours not in get_args(Neighbours):
        raise PrivacyError(f"neighbours is {neighbours!r}; allowed: {', '.join(get_args(Neighbours))}")
    if accountant not in get_args(Accountant):
        raise PrivacyError(f"accountant is {accountant!r}; allowed: {', '.join(get_args(Accountant))}")
    for event, count in events.items():
        if not 0 <= count <= MOST:
            raise PrivacyError(f"participations is {told(count)}; it must lie between 0 and {MOST:g}")
        if isinstance(event, BinomialEvent):
            if neighbours != "replace-one":
                raise PrivacyError(f"cpsgd has no guarantee under {neighbours}; allowed: replace-one")
        elif accountant not in SOUND.get((event.sampling, neighbours), ()):
            allowed = "; ".join(
                f"{kind} under {relation} by {' or '.join(by)}" for (kind, relation), by in SOUND.items()
            )
            raise PrivacyError(
                f"{event.sampling} sampling under {neighbours} has no sound accountant {accountant!r}; "
                f"allowed: {allowed}"
            )
    if any(count and isinstance(event, GaussianEvent) and event.clip_from_data for event, count in events.items()):
        return math.inf
    parts: dict[PricedBy, set[tuple[Event, int]]] = {}
    for event, count in events.items():
        if count:
            parts.setdefault(priced_by(event, accountant), set()).add((event, count))
    costs = (_certified(frozenset(part), delta / len(parts), neighbours, by) for by, part in sorted(parts.items()))
    return sum(costs, 0.0)


def _certified(
    events: frozenset[tuple[Event, int]], delta: float, neighbours: Neighbours, accountant: PricedBy
) -> float:
    """Where numbers leave the range of float64 nothing is certified: ∞, and no exception."""
    import numpy as np

    try:
        with np.errstate(all="ignore"):
            cost = _epsilon(events, delta, neighbours, accountant)
    except (ArithmeticError, ValueError):  # `math` raises the latter at a logarithm of 0
        return math.inf
    return math.inf if math.isnan(cost) else cost


def priced_by(event: Event, accountant: Accountant = "pld") -> PricedBy:
    """The accountant of an event where `accountant` is asked for: cpSGD's have no choice."""
    if isinstance(event, BinomialEvent):
        return "binomial" if event.rotation else "pld"
    return accountant


class Step(NamedTuple):
    """One Gaussian release of a sampled batch, as it is priced: `noise` in the units of `GaussianEvent`."""

    sampling: Sampling
    rate: Fraction
    noise: float


def step_of(event: GaussianEvent) -> Step:
    """A step of `event`, or one that costs no less and is within what accountants can compute."""
    noise = min(event.noise_multiplier, _MOST_NOISE)
    # With hardly any noise, sampling hides nothing that is worth the many cells its losses would take.
    rate = Fraction(event.batch, event.records) if noise >= _LEAST_NOISE else Fraction(1)
    return Step(event.sampling, rate, noise)


@lru_cache(maxsize=4096)
def _epsilon(events: frozenset[tuple[Event, int]], delta: float, neighbours: Neighbours, accountant: PricedBy) -> float:
    if accountant == "binomial":
        return binomial.composed_epsilon({e: n for e, n in events if isinstance(e, BinomialEvent)}, delta)
    # Events that differ in their number of steps only are one mechanism; in a fixed order, so that sums are repeatable.
    steps: dict[Step, int] = {}
    rounded: dict[BinomialEvent, int] = {}
    for event, count in sorted(events, key=lambda item: item[0].to_json()):
        if isinstance(event, BinomialEvent):
            rounded[event] = count * event.steps
            continue
        step = step_of(event)
        steps[step] = steps.get(step, 0) + count * event.steps
    if accountant == "rdp":
        return _rdp_epsilon(steps, delta, neighbours)
    return _pld_epsilon(steps, rounded, delta, neighbours)


def gaussian_epsilon(shift: float, delta: float) -> float:
    """The exact ε of N(μ, 1) against N(0, 1), from above (Balle, Wang 2018, Theorem 8); `shift` is μ."""
    from scipy import special

    def delta_at(eps: float) -> float:
        near, far = special.log_ndtr(shift / 2 - eps / shift), special.log_ndtr(-shift / 2 - eps / shift)
        return float(math.exp(near) * -math.expm1(min(eps + far - near, 0.0)))

    enough = delta * (1 - 1e-9)  # δ is computed to ten digits or more
    low, high = 0.0, shift * shift / 2 + shift * math.sqrt(-2 * math.log(delta)) + 1e-12
    if high == math.inf:
        return high
    if delta_at(low) <= enough:
        return 0.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if delta_at(middle) <= enough:
            high = middle
        else:
            low = middle
    return high


def _pld_epsilon(
    steps: Mapping[Step, int], rounded: Mapping[BinomialEvent, int], delta: float, neighbours: Neighbours
) -> float:
    from fedspa.privacy.fixed_size import FixedSize
    from fedspa.privacy.pld import composed_epsilon
    from fedspa.privacy.poisson import Added, Removed, Replaced
    from fedspa.privacy.rounded import rounded_step

    width = 1 if neighbours == "add-remove" else 2
    # Without sampling (q = 1) a step is a plain Gaussian, and any number of them is one Gaussian.
    shifts = ((width / step.noise, n) for step, n in steps.items() if step.rate == 1)
    plain = math.sqrt(sum(n * (shift * shift) for shift, n in shifts))
    sampled = {step: n for step, n in steps.items() if step.rate < 1}
    if sum(sampled.values()) + sum(rounded.values()) > MOST:
        return math.inf
    if not sampled and not rounded:
        return gaussian_epsilon(plain, delta)

    def direction(poisson: Callable[[float, float], DominatingPair]) -> list[tuple[DominatingPair, int]]:
        parts: list[tuple[DominatingPair, int]] = [
            (poisson(float(q), 1 / noise) if sampling == "poisson" else FixedSize(float(q), 2 / noise), n)
            for (sampling, q, noise), n in sampled.items()
        ]
        parts += [(rounded_step(event), n) for event, n in rounded.items()]
        return [*parts, (Removed(1.0, plain), 1)] if plain else parts

    if neighbours == "replace-one":
        return composed_epsilon(direction(Replaced), delta)
    removed = composed_epsilon(direction(Removed), delta)
    return max(removed, composed_epsilon(direction(Added), delta, floor=removed))


def _rdp_epsilon(steps: Mapping[Step, int], delta: float, neighbours: Neighbours) -> float:
    from dp_accounting.rdp import compute_epsilon

    width = 1 if neighbours == "add-remove" else 2

    @cache
    def at(order: float) -> float:
        total = sum(
            n * (max(_rdp(step._replace(noise=step.noise / width), order), 0.0) + _RDP_ERROR / (order - 1))
            for step, n in steps.items()
        )
        # Its warning-and-zero for a negative divergence cannot be met: the error term keeps it positive.
        return float(compute_epsilon([order], [total], delta)[0]) if math.isfinite(total) else math.inf

    fractions = neighbours == "add-remove"
    walked = [1.1, *_ORDERS] if fractions else list(_ORDERS)
    best = 0
    for i, order in enumerate(walked):
        if at(order) < at(walked[best]):
            best = i
        elif i >= best + 3 and math.isfinite(at(walked[best])):
            break
    low, high = walked[max(best - 1, 0)], walked[min(best + 1, len(walked) - 1)]
    stride = 0.1 if fractions and high <= 12 else max(1, (high - low) // (12 if high <= 64 else 4))
    refined = (round(low + i * stride, 1) for i in range(1, math.ceil((high - low) / stride)))
    return min(at(walked[best]), *(at(order) for order in refined), math.inf)


@lru_cache(maxsize=4096)
def _rdp(step: Step, order: float) -> float:
    """Rényi divergence of one step, whose noise is σ over the sensitivity under the accountant's own relation."""
    import dp_accounting
    from absl import logging
    from dp_accounting.rdp import RdpAccountant

    gaussian = dp_accounting.GaussianDpEvent(step.noise)
    relation = dp_accounting.NeighboringRelation
    if step.rate == 1:
        accountant, event = RdpAccountant([order]), gaussian
    elif step.sampling == "poisson":
        accountant = RdpAccountant([order], relation.ADD_OR_REMOVE_ONE)
        event = dp_accounting.PoissonSampledDpEvent(float(step.rate), gaussian)
    else:
        accountant = RdpAccountant([order], relation.REPLACE_ONE)
        sample, records = step.rate.as_integer_ratio()
        event = dp_accounting.SampledWithoutReplacementDpEvent(records, sample, gaussian)
    # At small noise it drops low orders, with a warning each: harmless, as other orders bound ε too.
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        accountant.compose(event)
    finally:
        logging.set_verbosity(verbosity)
    return float(accountant.rdp[0])
