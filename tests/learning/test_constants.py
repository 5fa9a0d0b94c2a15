"""A sketch tells another frozen body from the same one on another processor."""

from __future__ import annotations

import pytest
import torch
from frozen_nets import TwoInputs, chain, drawn, frozen, seeded
from torch import nn

from fedspa.learning.flat import NUMBERS, alike, sketch


def test_a_module_that_learns_all_has_none() -> None:
    assert sketch(nn.Sequential(nn.Linear(4, 3), nn.ReLU())) == ()
    assert alike((), ())
    assert not alike(sketch(chain()), ())
    assert not alike((), sketch(chain()))


@pytest.mark.parametrize("make", [chain, TwoInputs])
def test_the_same_values_give_the_same_numbers_whatever_is_learned(make: type[nn.Module]) -> None:
    module, again = make(), make()
    with torch.no_grad():
        for p in again.parameters():
            if p.requires_grad:
                p.add_(1.0)
    assert len(sketch(module)) == NUMBERS
    assert sketch(module) == sketch(again)


def test_another_draw_is_another_body() -> None:
    made = []
    for seed in range(4):
        seeded(seed)
        made.append(sketch(drawn()))
    assert not any(alike(a, b) for i, a in enumerate(made) for b in made[:i])


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v * 1.05,
        lambda v: v.flip(0),
    ],
)
def test_changed_values_are_noticed(change) -> None:
    module = frozen(nn.Linear(64, 64))
    before = sketch(module)
    with torch.no_grad():
        module.weight.copy_(change(module.weight))
    assert not alike(before, sketch(module))


def test_rounding_is_not() -> None:
    module = frozen(nn.Linear(64, 64)).double()
    assert alike(sketch(module), sketch(module.float()))


@pytest.mark.parametrize("value", [-torch.finfo(torch.float32).max, float("-inf"), float("nan")])
def test_a_mask_hides_no_weights(value: float) -> None:
    made = []
    for seed in (0, 1):
        seeded(seed)
        module = frozen(nn.Linear(64, 64))
        module.register_buffer("mask", torch.full((512, 512), value).triu(1))
        made.append(sketch(module))
    assert all(torch.tensor(each).isfinite().all() for each in made)
    assert not alike(*made)


def test_the_signs_are_those_of_every_machine() -> None:
    """More values than fit in one piece, and a last piece that does not fill its last word."""
    module = nn.Module()
    module.register_buffer("ones", torch.ones(2**18 + 7))
    module.trained = nn.Linear(1, 1)
    norm, *sums = sketch(module)
    unit = float(torch.tensor(1e4, dtype=torch.float64).asinh())
    assert norm == pytest.approx(unit * (2**18 + 7) ** 0.5)
    assert [round(each / unit) for each in sums] == [-329, 137, -447, -375]
