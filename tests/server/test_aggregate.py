"""The aggregator: equal to a plain average, equal to itself in any order, and never past its integers."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspa.errors import PayloadError
from fedspa.randomness.mask import active_coordinates
from fedspa.server.aggregate import Aggregator
from fedspa.wire.payload import Update


def make_updates(count: int, d: int, k: int, seed: int = 0) -> list[Update]:
    rng = np.random.default_rng(seed)
    return [Update(0, d, rng.bytes(16), rng.normal(0, 0.1, k).astype(np.float32)) for _ in range(count)]


def dense_mean(updates: list[Update]) -> np.ndarray:
    total = np.zeros(updates[0].dimension)
    for update in updates:
        total[active_coordinates(update.mask_seed, update.dimension, update.active)] += update.values
    return total / len(updates)


@given(st.integers(1, 20), st.integers(1, 60), st.data())
@settings(max_examples=60, deadline=None)
def test_mean_is_the_plain_average(count: int, d: int, data: st.DataObject) -> None:
    updates = make_updates(count, d, data.draw(st.integers(1, d)), seed=count)
    aggregator = Aggregator(d, bound=1.0, most_updates=count)
    for update in updates:
        aggregator.add(update)
    assert aggregator.count == count
    # 2^-62 · 32 a value at worst, and float64's own rounding.
    np.testing.assert_allclose(aggregator.mean(), dense_mean(updates), rtol=1e-14, atol=1e-16)


def test_any_order_gives_the_same_bits() -> None:
    updates = make_updates(40, 500, 200)
    # Floating point alone would not: the values span many magnitudes.
    updates = [Update(0, 500, u.mask_seed, u.values * np.float32(10.0 ** -(i % 7))) for i, u in enumerate(updates)]
    results = []
    for order_seed in range(5):
        aggregator = Aggregator(500, bound=2.0, most_updates=50)
        for i in np.random.default_rng(order_seed).permutation(40):
            aggregator.add(updates[i])
        results.append(aggregator.mean().tobytes())
    assert len(set(results)) == 1


def test_sum_of_the_largest_values_does_not_overflow() -> None:
    for bound in (1.0, 1.5, 3.4e38, 1e-38):
        for most in (1, 1000, 1023):
            aggregator = Aggregator(3, bound=bound, most_updates=most)
            value = (
                np.float32(bound)
                if float(np.float32(bound)) <= bound
                else np.nextafter(np.float32(bound), np.float32(0))
            )
            for _ in range(most):
                aggregator.add(Update(0, 3, bytes(16), np.full(3, value, dtype=np.float32)))
            np.testing.assert_allclose(aggregator.mean(), float(value), rtol=1e-12)


def test_coordinates_at_hand_are_used() -> None:
    (update,) = make_updates(1, 100, 10)
    mask = active_coordinates(update.mask_seed, 100, 10)
    given_, drawn = Aggregator(100, 1.0, 1), Aggregator(100, 1.0, 1)
    given_.add(update, mask)
    drawn.add(update)
    assert np.array_equal(given_.mean(), drawn.mean())
    assert np.array_equal(np.flatnonzero(drawn.mean()), mask)


@pytest.mark.parametrize(("values", "code"), [([np.nan, 0], "bound"), ([np.inf, 0], "bound"), ([-1.01, 0], "bound")])
def test_what_could_spoil_the_sum_is_refused(values: list[float], code: str) -> None:
    aggregator = Aggregator(9, bound=1.0, most_updates=2)
    with pytest.raises(PayloadError) as caught:
        aggregator.add(Update(0, 9, bytes(16), np.array(values, dtype=np.float32)))
    assert caught.value.code == code
    assert aggregator.count == 0


def test_wrong_dimension_and_one_update_too_many_are_refused() -> None:
    aggregator = Aggregator(9, bound=1.0, most_updates=1)
    with pytest.raises(PayloadError) as caught:
        aggregator.add(make_updates(1, 8, 2)[0])
    assert caught.value.code == "dimension"
    aggregator.add(make_updates(1, 9, 2)[0])
    with pytest.raises(PayloadError) as caught:
        aggregator.add(make_updates(1, 9, 2)[0])
    assert caught.value.code == "count"


def test_nothing_added_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no update"):
        Aggregator(3, 1.0, 1).mean()


@pytest.mark.parametrize(("bound", "most"), [(0.0, 1), (np.inf, 1), (np.nan, 1), (1.0, 0)])
def test_nonsense_terms_are_refused(bound: float, most: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        Aggregator(3, bound, most)


def test_memory_does_not_grow_with_agents() -> None:
    updates = make_updates(30, 100_000, 1000)
    tracemalloc.start()
    try:
        aggregator = Aggregator(100_000, 1.0, 1000)
        for update in updates * 5:
            aggregator.add(update)
        assert tracemalloc.get_traced_memory()[1] < 100_000 * 8 + 400_000
    finally:
        tracemalloc.stop()
