"""The public first θ."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedspa.errors import ConfigError
from fedspa.learning import models
from fedspa.learning.threads import torch_threads
from reproduction.oriented import oriented


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
