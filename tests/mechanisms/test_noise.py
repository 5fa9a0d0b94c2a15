"""Noise on a sum: float64 until the end, the plan's σ, fresh every time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedspa.mechanisms.gaussian.release import add_noise
from fedspa.randomness.streams import Stream, agent_key, derive_key, root_key

KEY = agent_key(root_key("seeded", 11), 0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_comes_last(dtype: torch.dtype) -> None:
    """Rounding the noise to float32 before adding it changes many of these last bits."""
    total = torch.linspace(-3, 3, 5000, dtype=dtype)
    noisy = add_noise(total, 0.7, Stream(KEY))
    exact = total.double().numpy() + 0.7 * Stream(KEY).gaussian(5000)
    assert noisy.dtype == dtype
    assert np.array_equal(noisy.numpy(), exact.astype(noisy.numpy().dtype))


@pytest.mark.parametrize("sigma", [250.0])
def test_variance_on_zero_input(sigma: float) -> None:
    n = 400_000  # false alarm 1e-6: 4.9 standard errors, √(2/n) each
    noise = add_noise(torch.zeros(n, dtype=torch.float64), sigma, Stream(derive_key(KEY, "variance")))
    assert float(noise.var()) / sigma**2 == pytest.approx(1, abs=4.9 * math.sqrt(2 / n))
    assert abs(float(noise.mean())) < 4.9 * sigma / math.sqrt(n)


def test_float32_noise_keeps_its_tail() -> None:
    """Box–Muller on 24 bits ends at 5.8σ; the farthest word of the stream lies beyond 9σ, rounded to float32 too."""

    class Far(Stream):
        def uint64(self, n: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
            return np.zeros(n, dtype=np.uint64)

    assert float(add_noise(torch.zeros(2), 1.0, Far(KEY))[0]) > 9


def test_float64_releases_leak_and_float32_releases_hide_it() -> None:
    """Mironov's attack, on neighbours with sums 0 and 1 at noise multiplier 1: why releases are float32, or `exact`.

    From a sum of 1 every release in (−½, ½) is a multiple of 2⁻⁵³, as noise between −1½ and −½ is. A release there with
    finer bits therefore proves the sum was 0. The chance is near ¼ a value in float64; in float32 it is near 2⁻³⁰.
    """

    def proofs(releases: torch.Tensor) -> float:
        steps = releases.double() * 2.0**53
        return float(((releases.abs() < 0.5) & (steps != steps.round())).double().mean())

    zeros, ones = torch.zeros(200_000, dtype=torch.float64), torch.ones(200_000, dtype=torch.float64)
    assert proofs(add_noise(ones, 1.0, Stream(KEY))) == 0
    assert 0.2 < proofs(add_noise(zeros, 1.0, Stream(KEY))) < 0.4
    assert proofs(add_noise(zeros.float(), 1.0, Stream(KEY))) == 0


def test_each_call_draws_fresh_noise() -> None:
    stream = Stream(KEY)
    first, second = (add_noise(torch.zeros(1000), 1.0, stream) for _ in range(2))
    assert not torch.isin(first, second).any()
