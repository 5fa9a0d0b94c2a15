"""Verified ε: golden values, other people's accountants, exact cases, laws, and the far corners."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedspa.algorithms.cpsgd.plan import BinomialEvent
from fedspa.errors import PrivacyError
from fedspa.mechanisms.discrete_gaussian.plan import FINE, SIGMA, DiscreteGaussianEvent
from fedspa.mechanisms.gaussian.plan import GaussianEvent, truncation_delta
from fedspa.privacy.accounting import epsilon, gaussian_epsilon
from fedspa.privacy.event import Event

RELATION = {
    "add-remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}
PAIRS: list[tuple[Any, Any]] = [("poisson", "add-remove"), ("poisson", "replace-one"), ("fixed", "replace-one")]


def one(
    sampling: Any,
    neighbours: Any,
    *,
    noise: float,
    steps: int,
    delta: float,
    batch: int = 10,
    records: int = 600,
    times: int = 1,
) -> float:
    event = GaussianEvent(sampling, batch, records, steps, noise)
    return epsilon({event: times}, delta, neighbours=neighbours)


@pytest.mark.parametrize(
    ("noise", "batch", "records", "steps", "delta", "neighbours"),
    [
        (1.1, 24, 600, 500, 1e-5, "add-remove"),
        (4.0, 50, 500, 1000, 1e-3, "add-remove"),
        (4.0, 50, 500, 1000, 1e-3, "replace-one"),
        (0.9, 250, 500, 10, 1e-8, "replace-one"),
    ],
)
def test_poisson_pld_agrees_with_dp_accounting(
    noise: float, batch: int, records: int, steps: int, delta: float, neighbours: Any
) -> None:
    theirs = PLDAccountant(RELATION[neighbours], 1e-4)
    theirs.compose(dp_accounting.PoissonSampledDpEvent(batch / records, dp_accounting.GaussianDpEvent(noise)), steps)
    ours = one("poisson", neighbours, noise=noise, steps=steps, delta=delta, batch=batch, records=records)
    assert ours == pytest.approx(theirs.get_epsilon(delta), rel=1e-3)


def rdp_epsilon(
    sampling: Any, neighbours: Any, *, noise: float, steps: int, delta: float, batch: int, records: int
) -> float:
    """ε by Rényi divergences, as dp_accounting has it; replace-one takes σ/(2C) there."""
    theirs = RdpAccountant(neighboring_relation=RELATION[neighbours])
    gaussian = dp_accounting.GaussianDpEvent(noise if neighbours == "add-remove" else noise / 2)
    theirs.compose(
        dp_accounting.PoissonSampledDpEvent(batch / records, gaussian)
        if sampling == "poisson"
        else dp_accounting.SampledWithoutReplacementDpEvent(records, batch, gaussian),
        steps,
    )
    return float(theirs.get_epsilon(delta))


def test_the_traps_of_dp_accounting_are_as_described() -> None:
    """Its two accountants mean different things by a replace-one noise multiplier; ours must not."""
    rdp = RdpAccountant(neighboring_relation=RELATION["replace-one"])
    rdp.compose(dp_accounting.GaussianDpEvent(2.0))
    pld = PLDAccountant(RELATION["replace-one"])
    pld.compose(dp_accounting.GaussianDpEvent(2.0))
    assert pld.get_epsilon(1e-5) == pytest.approx(4.38, abs=0.01)
    assert rdp.get_epsilon(1e-5) == pytest.approx(2.17, abs=0.01)
    setting: dict[str, Any] = {"noise": 2.0, "steps": 1, "delta": 1e-5, "batch": 600}
    for sampling in ("poisson", "fixed"):
        assert one(sampling, "replace-one", **setting) == pytest.approx(4.377, abs=0.001)


@pytest.mark.parametrize("shift", [1e-4, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-10])
def test_gaussian_is_exact(shift: float, delta: float) -> None:
    """δ at the returned ε, in fifty digits (Balle, Wang 2018): at most the target, and the target just below it."""
    mpmath.mp.dps = 50
    found = gaussian_epsilon(shift, delta)

    def delta_at(eps: float) -> Any:
        mu, e = mpmath.mpf(shift), mpmath.mpf(eps)
        return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)

    assert delta_at(found) <= delta
    assert found == 0 or delta_at(found * (1 - 1e-6)) > delta


@pytest.mark.parametrize(("sampling", "neighbours"), PAIRS)
def test_without_sampling_it_is_the_analytic_gaussian(sampling: Any, neighbours: Any) -> None:
    width = 1 if neighbours == "add-remove" else 2
    for noise, steps, delta in ((3.0, 7, 1e-5), (100.0, 1500, 1e-8), (1.0, 1, 1e-3)):
        found = one(sampling, neighbours, noise=noise, steps=steps, delta=delta, batch=600)
        exact = gaussian_epsilon(width * math.sqrt(steps) / noise, delta)
        assert exact * (1 - 1e-12) <= found <= exact * 1.0001
        # Nearly all records sampled is nearly that, from the discretised side.
        nearly = one(sampling, neighbours, noise=noise, steps=steps, delta=delta, batch=10**6 - 1, records=10**6)
        assert nearly == pytest.approx(exact, rel=1e-3)


def test_mixed_ledgers_compose() -> None:
    poisson = GaussianEvent("poisson", 10, 600, 100, 4.0)
    fixed = GaussianEvent("fixed", 20, 600, 50, 6.0)
    whole = GaussianEvent("fixed", 600, 600, 1, 30.0)
    parts = [{poisson: 3}, {fixed: 2}, {whole: 2}]
    alone = [epsilon(part, 1e-5, neighbours="replace-one") for part in parts]
    together = epsilon({poisson: 3, fixed: 2, whole: 2}, 1e-5, neighbours="replace-one")
    assert max(alone) < together < sum(alone)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, float("nan")])
def test_delta_must_make_sense(delta: float) -> None:
    with pytest.raises(PrivacyError, match="delta"):
        one("poisson", "add-remove", noise=1.0, steps=1, delta=delta)


SETTINGS = st.fixed_dictionaries(
    {
        "noise": st.floats(0.4, 50),
        "steps": st.integers(1, 3000),
        "delta": st.sampled_from([1e-3, 1e-5, 1e-8]),
        "batch": st.integers(1, 599),
    }
)


@settings(max_examples=8, deadline=None)
@given(st.sampled_from(PAIRS), SETTINGS, st.floats(1.01, 3))
def test_more_noise_more_steps_more_sampling(pair: tuple[Any, Any], setting: dict[str, Any], factor: float) -> None:
    base = one(*pair, **setting)
    slack = 1 + 5e-5
    assert base >= 0
    assert one(*pair, **{**setting, "noise": setting["noise"] * factor}) <= base * slack
    assert one(*pair, **{**setting, "steps": math.ceil(setting["steps"] * factor)}) * slack >= base
    assert one(*pair, **{**setting, "batch": min(600, math.ceil(setting["batch"] * factor))}) * slack >= base
    assert one(*pair, **{**setting, "delta": setting["delta"] * factor}) <= base * slack


@settings(max_examples=8, deadline=None)
@given(st.sampled_from([("poisson", "add-remove"), ("fixed", "replace-one")]), SETTINGS)
def test_pld_is_never_worse_than_rdp(pair: tuple[Any, Any], setting: dict[str, Any]) -> None:
    assert one(*pair, **setting) <= rdp_epsilon(*pair, records=600, **setting) * (1 + 2e-5) + 1e-9


@settings(max_examples=8, deadline=None)
@given(SETTINGS)
def test_relations_are_ordered(setting: dict[str, Any]) -> None:
    """Replacing a record is removing one and adding one; fixed-size sampling costs at least what Poisson does."""
    add_remove = one("poisson", "add-remove", **setting)
    replaced = one("poisson", "replace-one", **setting)
    fixed = one("fixed", "replace-one", **setting)
    assert add_remove <= replaced * (1 + 5e-5) + 1e-9
    assert replaced <= fixed * (1 + 5e-5) + 1e-9
    unsampled = one("fixed", "replace-one", **{**setting, "batch": 600})
    assert fixed <= unsampled * (1 + 1e-4) + 1e-6


@pytest.mark.parametrize(("sampling", "neighbours"), PAIRS)
@pytest.mark.parametrize("noise", [0.3, 1000.0])
@pytest.mark.parametrize(("batch", "records"), [(1, 10**5), (10**5 - 1, 10**5)])
@pytest.mark.parametrize(("steps", "delta"), [(1, 1e-3), (10**6, 1e-10)])
def test_corners_give_numbers(
    sampling: Any, neighbours: Any, noise: float, batch: int, records: int, steps: int, delta: float
) -> None:
    """Not negative, no worse than without sampling, for weak sampling no less than the Gaussian limit, and infinite
    only where what lies beyond the noise's end takes all of δ."""
    width = 1 if neighbours == "add-remove" else 2
    found = one(sampling, neighbours, noise=noise, steps=steps, delta=delta, batch=batch, records=records)
    left = delta - steps * truncation_delta(width / noise)
    unsampled = gaussian_epsilon(width * math.sqrt(steps) / noise, left) if left > 0 else math.inf
    assert 0 <= found <= unsampled * (1 + 2e-3)
    ended = (
        steps
        * batch
        / records
        * truncation_delta((1 if sampling == "poisson" and 2 * batch <= records else width) / noise)
    )
    assert math.isinf(found) == (ended >= delta)
    if noise == 1000.0 and steps == 10**6:
        limit = gaussian_epsilon(width * batch / records * math.sqrt(steps) / noise, delta)
        assert limit * 0.999 <= found <= limit * 1.3 + 1e-4


@pytest.mark.parametrize(("sampling", "neighbours"), PAIRS)
@pytest.mark.parametrize("noise", [1e-6, 1e7])
def test_absurd_noise_is_never_nan(sampling: Any, neighbours: Any, noise: float) -> None:
    for delta in (1e-3, 1e-12, 1e-100):
        assert one(sampling, neighbours, noise=noise, steps=100, delta=delta) >= 0


# Releases of different mechanisms on one record, priced together: ε against the exact law of both, enumerated here.


Law = np.ndarray  # masses
POINTS = np.linspace(-14.0, 20.0, 6001)


def normal(mean: float) -> Law:
    return np.asarray(stats.norm.pdf(POINTS, mean) * (POINTS[1] - POINTS[0]))


def rounded(event: BinomialEvent) -> tuple[Law, Law]:
    """One coordinate of cpSGD: all other records at one end, the record there or at the other end."""
    law = stats.binom.pmf(np.arange(event.trials + 2), event.trials, 0.5)
    moved = (2**event.bits - 1) / event.batch
    assert moved <= 1
    other = (1 - moved) * law + moved * np.concatenate(([0.0], law[:-1]))
    return event.rate * other + (1 - event.rate) * law, law


def sampled(event: GaussianEvent) -> tuple[Law, Law]:
    rate, shift = event.rate, 1 / event.noise_multiplier
    if event.sampling == "fixed":
        return (1 - rate) * normal(0) + rate * normal(2 * shift), normal(0)
    return tuple((1 - rate) * normal(0) + rate * normal(side) for side in (shift, -shift))  # type: ignore[return-value]


def shared(event: DiscreteGaussianEvent) -> tuple[Law, Law]:
    """An agent's own share, whose record moves it by two bounds."""
    numbers = np.arange(-80, 120)
    laws = [np.exp(-((numbers - centre) ** 2) / (2 * SIGMA**2)) for centre in (2 * event.bound / FINE, 0)]
    return laws[0] / laws[0].sum(), laws[1] / laws[1].sum()


def exact_delta(pairs: list[tuple[Law, Law]], epsilon: float) -> float:
    """The worst over all ways in which the record may have been moved in each release."""
    (a, b), (c, d) = pairs
    ways = [((a, b), (c, d)), ((a, b), (d, c)), ((b, a), (c, d)), ((b, a), (d, c))]
    return max(
        float(np.maximum(np.multiply.outer(p, r) - math.exp(epsilon) * np.multiply.outer(q, s), 0).sum())
        for (p, q), (r, s) in ways
    )


ROUNDED = BinomialEvent(5, 10, 1, 1, 2, 60)
FIXED, POISSON = GaussianEvent("fixed", 1, 20, 1, 1.5), GaussianEvent("poisson", 1, 2, 1, 2.0)
SHARE = DiscreteGaussianEvent(50, 1, 3000)
OTHERS: list[tuple[Event, tuple[Law, Law]]] = [
    (FIXED, sampled(FIXED)),
    (POISSON, sampled(POISSON)),
    (SHARE, shared(SHARE)),
]


@pytest.mark.parametrize(("event", "laws"), OTHERS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("delta", [1e-6, 1e-4, 1e-2])
def test_two_kinds_together_cost_no_less_than_their_exact_law(
    event: Event, laws: tuple[Law, Law], delta: float
) -> None:
    stated = epsilon({ROUNDED: 1, event: 1}, delta, neighbours="replace-one")
    spent = exact_delta([rounded(ROUNDED), laws], stated)
    assert 0.9 * delta < spent <= delta * (1 + 1e-6)  # sound, and tight enough for a slip to show


def test_other_arguments_must_make_sense() -> None:
    event = GaussianEvent("poisson", 10, 600, 300, 1.0)
    for count in (-1, 10**15 + 1):
        with pytest.raises(PrivacyError, match=f"participations is {count}; it must lie between 0 and 1e\\+15"):
            epsilon({event: count}, 1e-5, neighbours="add-remove")
    with pytest.raises(PrivacyError, match="add-remove, replace-one"):
        epsilon({event: 1}, 1e-5, neighbours="zero-out")  # type: ignore[arg-type]
