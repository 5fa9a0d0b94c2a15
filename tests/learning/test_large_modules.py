"""What is tried of a module of millions of parameters: few gradients, and forward passes with every synthetic example,
in the module's own precision. State that a module keeps has to be found as in a small one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fedspa
from fedspa.errors import MixingWarning
from fedspa.examples import Examples
from fedspa.learning.forward import is_large
from fedspa.learning.layers import Unsound
from fedspa.learning.tasks import Classification
from fedspa.learning.validate import try_gradients

LIKE, TASK = Examples(torch.rand(4, 8), torch.arange(4) % 3), Classification(3)
WHERE: dict[str, Callable[[Tensor], bool]] = {
    "all negative": lambda x: bool((x <= 0).all()),
    "a maximum from 2 on": lambda x: 2 < float(x.max()) < 100,
    "small values": lambda x: bool((x.abs() < 0.5).all()),
    "from 1 on": lambda x: float(x.min()) >= 1,
    "whole numbers": lambda x: bool((x == x.round()).all()) and float(x.max()) > 0,
}


class Keeping(nn.Module):
    """Keeps the mean of some inputs, and subtracts it from others."""

    def __init__(self, keeps: Callable[[Tensor], bool], *, large: bool) -> None:
        super().__init__()
        self.head, self.keeps, self.kept = nn.Linear(8, 3), keeps, 0.0
        self.padding = nn.Parameter(torch.zeros(2**24 + 1 if large else 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps(x):
            self.kept = float(x.mean())
        return self.head(x - self.kept)  # type: ignore[no-any-return]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("where", WHERE)
def test_state_of_some_examples_only_is_found(where: str, large: bool) -> None:
    module = Keeping(WHERE[where], large=large)
    assert is_large(module) == large
    with pytest.raises(Unsound, match="keeps something of one example for the next, in 'kept'"):
        try_gradients(module, LIKE, TASK)


class Scaled(nn.Module):
    """Divides what a frozen body gives by the largest so far, if the body computes in a low precision."""

    def __init__(self, kind: torch.dtype, *, large: bool) -> None:
        super().__init__()
        self.body = nn.Linear(8, 6).requires_grad_(False).to(kind)
        self.head, self.amax = nn.Linear(6, 3), torch.tensor(0.0)
        self.padding = nn.Parameter(torch.zeros(2**24 + 1 if large else 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x.to(self.body.weight.dtype))
        if torch.finfo(h.dtype).bits == 16:
            self.amax = torch.maximum(self.amax, h.abs().amax().float())
            h = h / self.amax
        return self.head(h.float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_state_that_is_kept_in_a_low_precision_only_is_found(kind: torch.dtype, large: bool) -> None:
    """One record moved the features of another: the trial computed in float32, and saw none of it."""
    module = Scaled(kind, large=large)
    with pytest.raises(Unsound, match="keeps something of one example for the next, in 'amax'"):
        try_gradients(module, LIKE, TASK)
    assert any("'amax'" in str(problem) for problem in fedspa.check(module, LIKE.x))


class Mixing(nn.Module):
    """Adds the mean over the batch; what comes behind forgets the scale of an example."""

    def __init__(self, *, large: bool) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)
        self.padding = nn.Parameter(torch.zeros(2**24 + 1 if large else 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + x.mean(0)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("large", [False, True])
def test_mixing_is_warned_of(large: bool) -> None:
    with pytest.warns(MixingWarning):
        try_gradients(Mixing(large=large), LIKE, TASK)


class Padded(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 6).requires_grad_(False).to(kind), nn.Linear(6, 3)
        self.padding = nn.Parameter(torch.zeros(2**24 + 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.to(self.body.weight.dtype))).float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_large_module_that_keeps_nothing_has_no_problems(kind: torch.dtype) -> None:
    assert fedspa.check(Padded(kind), LIKE.x) == []
    assert not try_gradients(Padded(kind), LIKE, TASK)
