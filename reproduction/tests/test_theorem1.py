"""Theorem 1 as the paper uses it, corrected, and with its range enforced."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_plans import CIFAR, MNIST
from torch import nn

from fedspa.errors import ConfigError, PrivacyError
from fedspa.learning import models
from fedspa.learning.forward import torch_threads
from fedspa.mechanisms.gaussian.plan import GaussianEvent
from reproduction.oriented import oriented
from reproduction.theorem1 import (
    in_range,
    published_epsilon,
    published_noise,
    smallest_certified_epsilon,
)


@pytest.mark.parametrize(
    ("setting", "participations", "printed", "corrected"),
    [(MNIST, 5, 9.30, 13.15), (MNIST, 10, 13.15, 18.60), (CIFAR, 20, 45.5, 64.4)],
)
def test_noise_of_the_experiments(
    setting: dict[str, int], participations: int, printed: float, corrected: float
) -> None:
    setting = {**setting, "participations": participations}
    assert published_noise(1.0, 1e-3, **setting) == pytest.approx(printed, rel=0.01)
    assert published_noise(1.0, 1e-3, corrected=True, **setting) == pytest.approx(corrected, rel=0.01)


def test_formula_is_the_printed_one() -> None:
    """7·q²·I·τ·α·p·G²/(B²σ²) + ln(1/δ)/(α − 1) with σ = z·√p·G/B, minimised over a grid of α."""
    z, q, n, delta = 9.3, 10 / 600, 1500, 1e-3
    printed = min(
        7 * q**2 * n * a / z**2 + math.log(1 / delta) / (a - 1) for a in (1 + i / 100 for i in range(1, 10**4))
    )
    found = published_epsilon(GaussianEvent("fixed", 10, 600, 300, z), 5, delta)
    assert found.epsilon == pytest.approx(printed, rel=1e-6)
    assert found.epsilon <= printed


@given(
    st.floats(0.01, 50),
    st.floats(1e-10, 0.1),
    st.integers(1, 1000),
    st.integers(1, 100),
    st.booleans(),
)
def test_noise_and_epsilon_are_inverse(
    epsilon: float, delta: float, steps: int, participations: int, corrected: bool
) -> None:
    noise = published_noise(
        epsilon, delta, batch=10, records=600, steps=steps, participations=participations, corrected=corrected
    )
    event = GaussianEvent("fixed", 10, 600, steps, noise)
    assert published_epsilon(event, participations, delta, corrected=corrected).epsilon == pytest.approx(epsilon)


def test_correction_costs_a_factor_of_root_two() -> None:
    assert published_noise(1.0, 1e-3, corrected=True, **MNIST) == pytest.approx(
        math.sqrt(2) * published_noise(1.0, 1e-3, **MNIST)
    )


@pytest.mark.parametrize("setting", [MNIST, CIFAR])
@pytest.mark.parametrize("corrected", [False, True])
def test_the_experiments_are_out_of_range(setting: dict[str, int], corrected: bool) -> None:
    noise = published_noise(1.0, 1e-3, corrected=corrected, **setting)
    event = GaussianEvent("fixed", setting["batch"], setting["records"], setting["steps"], noise)
    assert not published_epsilon(event, setting["participations"], 1e-3, corrected=corrected).in_range


def test_some_settings_are_in_range() -> None:
    """One step at q = 1e-5 and σ'² = 1: α of about 16 000 would be best, but few steps of δ = 0.5 take a small one."""
    event = GaussianEvent("fixed", 1, 10**5, 10**9, 2.0)
    found = published_epsilon(event, 1, 0.5, corrected=True)
    assert found.in_range
    assert found.alpha < 5
    assert not published_epsilon(GaussianEvent("fixed", 1, 10**5, 10**9, 1.0), 1, 0.5, corrected=True).in_range


@pytest.mark.parametrize(
    ("alpha", "rate", "variance", "expected"),
    [
        (2.0, 1e-5, 0.69, False),  # too little noise
        (2.0, 1e-5, 0.7, True),
        (2.0, 0.5, 10.0, False),  # the logarithm is negative
        (16.3, 1e-4, 5.0, True),  # 1 + (10/3)·ln(1/(6e-4·α)) is 16.42 there
        (16.5, 1e-4, 5.0, False),  # and 16.38 here
    ],
)
def test_range(alpha: float, rate: float, variance: float, expected: bool) -> None:
    assert in_range(alpha, rate, variance) is expected


@pytest.mark.parametrize(
    ("setting", "participations", "expected"),
    [(MNIST, 4, 2.96), (MNIST, 5, 3.10), (MNIST, 10, 3.66), (CIFAR, 10, 18.5), (CIFAR, 20, 25.0)],
)
def test_smallest_certified_epsilon(setting: dict[str, int], participations: int, expected: float) -> None:
    found = smallest_certified_epsilon(delta=1e-3, **{**setting, "participations": participations})
    assert found == pytest.approx(expected, rel=0.005)


@settings(max_examples=20, deadline=None)
@given(st.integers(10, 10**5), st.integers(1, 10**4), st.floats(1e-8, 1e-2))
def test_smallest_certified_epsilon_is_a_minimum(records: int, steps: int, delta: float) -> None:
    """No (noise, α) that is in range does better, on a grid of both."""
    setting = {"batch": 1, "records": records, "steps": steps, "participations": 1}
    least = smallest_certified_epsilon(delta=delta, **setting)
    q = 1 / records
    for variance in (0.7 * 1.2**i for i in range(80)):
        for alpha in (1 + 1.3**i / 100 for i in range(50)):
            if in_range(alpha, q, variance):
                value = 3.5 * q**2 * steps * alpha / variance - math.log(delta) / (alpha - 1)
                assert value >= least * (1 - 1e-3)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_epsilon_must_make_sense(epsilon: float) -> None:
    with pytest.raises(PrivacyError, match="epsilon"):
        published_noise(epsilon, 1e-3, **MNIST)


def test_delta_and_participations_must_make_sense() -> None:
    event = GaussianEvent("fixed", 10, 600, 300, 1.0)
    with pytest.raises(PrivacyError, match="delta"):
        published_epsilon(event, 5, 0.0)
    with pytest.raises(PrivacyError, match="participations"):
        published_epsilon(event, 0, 1e-3)


# The public first θ.


def first(seed: int) -> nn.Sequential:
    model = models.build("mnist-cnn", (1, 28, 28), 10, seed=99)
    oriented(model, seed)
    assert isinstance(model, nn.Sequential)
    return model


def test_filters_are_edges_of_a_full_turn():
    weight = first(0)[0].weight.detach()[:, 0]
    assert torch.allclose(weight.sum(dim=(1, 2)), torch.zeros(10), atol=1e-6)  # flat grey gives nothing
    across = torch.arange(5.0) - 2
    turn = [math.atan2(float((w.sum(1) * across).sum()), float((w.sum(0) * across).sum())) for w in weight]
    for i, angle in enumerate(turn):
        assert math.cos(angle - 2 * math.pi * i / 10) > 0.99


def test_later_filters_average_one_direction_and_inhibit_its_neighbours():
    weight = first(0)[3].weight.detach().sum(dim=(2, 3))
    assert torch.allclose(weight[:10], torch.eye(10), atol=1e-6)
    assert torch.allclose(weight[10:].sum(dim=1), torch.zeros(10), atol=1e-5)
    assert weight[10, [0, 2, 8]].tolist() == pytest.approx([2, -1, -1])


def test_projections_are_orthogonal_and_the_seed_decides_them():
    rows = first(0)[7].weight.detach()
    assert torch.allclose(rows @ rows.T, 320 / 50 * torch.eye(50), atol=1e-4)
    assert torch.equal(rows, first(0)[7].weight)
    assert not torch.equal(rows, first(1)[7].weight)


def test_it_is_the_same_on_any_number_of_threads():
    made = []
    for threads in (1, 2):
        with torch_threads(threads):
            made.append(first(0))
    assert all(map(torch.equal, *(model.parameters() for model in made)))


def test_the_last_layer_and_every_bias_are_zero():
    for name, values in first(0).named_parameters():
        assert (float(values.detach().abs().max()) == 0) == (name.endswith("bias") or name == "9.weight"), name


def test_a_model_without_convolutions_is_refused():
    with pytest.raises(ConfigError, match="oriented"):
        oriented(models.build("mlp", (1, 8, 8), 10, seed=0), 0)
