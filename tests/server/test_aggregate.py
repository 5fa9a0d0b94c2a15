"""The aggregator: equal to a plain average, equal to itself in any order, and never past its integers."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedspa import compiled
from fedspa.errors import PayloadError
from fedspa.randomness.mask import active_coordinates
from fedspa.server.intake import Aggregator
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


@pytest.mark.parametrize("k", [7, 1000])
def test_without_the_compiled_library_sums_are_the_same(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def sums() -> NDArray[np.float64]:
        total = Aggregator(1000, 2.0, 3)
        for number in range(3):
            values = np.random.default_rng(number).uniform(-2, 2, k).astype(np.float32)
            total.add(Update(0, 1000, bytes([number]) * 16, values))
        return total.mean()

    compiled_sums = sums()
    monkeypatch.setattr(compiled, "library", lambda: None)
    assert np.array_equal(compiled_sums, sums())


def test_coordinates_of_another_mask_are_refused() -> None:
    update = Update(0, 1000, bytes(16), np.ones(10, dtype=np.float32))
    with pytest.raises(ValueError, match="10 values for 9 coordinates"):
        Aggregator(1000, 2.0, 3).add(update, np.arange(9))


@pytest.mark.parametrize("coordinates", [np.arange(991, 1001), np.arange(-1, 9), np.arange(10, dtype=np.int32)])
def test_no_coordinate_is_added_outside_the_sums(coordinates: NDArray[np.int64]) -> None:
    update = Update(0, 1000, bytes(16), np.ones(10, dtype=np.float32))
    with pytest.raises(ValueError, match="int64 and lie between 0 and 999"):
        Aggregator(1000, 2.0, 3).add(update, coordinates)


def test_values_that_do_not_lie_one_after_the_other_are_not_read() -> None:
    if compiled.library() is not None:
        with pytest.raises(ValueError, match="not contiguous"):
            Aggregator(10, 2.0, 3).add(Update(0, 10, bytes(16), np.ones(20, dtype=np.float32)[::-2]))


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
