"""Does a module give an example in a batch what it gives it alone?

Engines that keep examples apart take each alone, so that the guarantee holds for a module that does not. But it is
evaluated in batches, and so otherwise than it was trained.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from fedspa.examples import Examples, Tree, in_float64, joined
from fedspa.learning import forward
from fedspa.learning.flat import copied
from fedspa.learning.sound import Problem
from fedspa.learning.traces.state import close
from fedspa.learning.traces.watch import Call, first_difference, watched

_TOGETHER, _PLACE = 4, 1  # in the midst: some modules mix only with those before, or after


def mixing(module: nn.Module, examples: list[Examples]) -> list[Problem]:
    """A warning where it does not, in the modes that its layers are in or in eval mode. Dropout is left out, since it
    draws other numbers for a batch; a module that still draws is compared in eval mode only."""
    alone, batch = examples[_PLACE].x, joined([example.x for example in examples[:_TOGETHER]])
    try:
        # In double precision, where rounding cannot be mistaken for mixing.
        where = _mixing_layer(copied(module).double(), in_float64(alone), in_float64(batch), 1e-7)
    except Exception:  # some modules are made for one precision only
        try:
            where = _mixing_layer(copied(module), alone, batch, 1e-3)
        except Exception:  # only a task of the user's own knows how to call it
            return []
    if where is None:
        return []
    why = (
        "gives an example another output in a batch than alone; examples are trained one by one, so that the guarantee "
        "holds, but such a model trains otherwise than it evaluates"
    )
    mend = "make each output of its own example alone (batch_first=True, GroupNorm, no mean over the first dimension)"
    return [Problem(where, type(module.get_submodule(where)).__name__, why, mend, unsound=False)]


def _mixing_layer(module: nn.Module, alone: Tree, batch: Tree, tolerance: float) -> str | None:
    same = partial(_same_row, tolerance=tolerance)
    _silence(module)
    with watched(module) as calls, torch.no_grad():
        for evaluating in (False, True):
            if evaluating:
                module.eval()
            one, drew_one = _pass(module, alone, calls)
            together, drew = _pass(module, batch, calls)
            if not (drew_one or drew) and any(
                same(*pair) is False for pair in zip(one[-1].outputs, together[-1].outputs)
            ):
                return first_difference(one, together, same)
    return None


def _pass(module: nn.Module, x: Tree, calls: list[Call]) -> tuple[list[Call], bool]:
    """One forward pass: what each layer did, and whether any drew."""
    calls.clear()
    before = torch.get_rng_state()
    forward.returned(module, x)
    return list(calls), not torch.equal(before, torch.get_rng_state())


def _same_row(alone: Tensor, together: Tensor, tolerance: float) -> bool | None:
    """Whether the example's row is the same; None where examples are not the first dimension of both."""
    if alone.ndim == 0 or alone.shape[1:] != together.shape[1:] or len(alone) not in (1, len(together)):
        return None
    row = together if len(alone) == len(together) else together[_PLACE : _PLACE + 1]
    return close(alone, row, tolerance)


def _silence(module: nn.Module) -> None:
    """Without Dropout, in training mode."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
        elif isinstance(layer, nn.RReLU):
            layer.training = False
