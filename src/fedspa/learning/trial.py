"""A model tried on made-up records before it sees any: does it have gradients, and does it keep examples apart?

What one example leaves behind in a model would be in the next one's gradient, beyond any clip. And what fails for every
record must fail here, by name: once records are private, an example whose gradient fails counts as zero.
"""

from __future__ import annotations

import math
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from fedspa.errors import ConfigError, first_line
from fedspa.examples import Examples, layout, leaves, mapped
from fedspa.learning.flat import FlatModel, copied
from fedspa.learning.tasks import Task
from fedspa.learning.threads import torch_threads

_RULE = "the forward of the model must draw no randomness and change no state"


def try_gradients(module: nn.Module, like: Examples, task: Task | None = None) -> bool:
    """Refuse a model without gradients, and a forward that keeps state. Whether it draws randomness from torch.

    On a copy and on a CPU, where the same example has the same gradient to the bit. On a GPU it need not: sums are made
    in another order each time, which must not be mistaken for a state.
    """
    FlatModel(module, task)  # refuses what is known by name, before anything is copied
    with torch_threads(1), torch.random.fork_rng(devices=[]):
        try:
            # The second copy sees the others before the one that is asked for: what the first record of all leaves
            # behind shows only there.
            model, late = (FlatModel(copied(module).to("cpu"), task) for _ in range(2))
            asked, *between = _examples(like)
            theta = model.flatten()
            first, draws = _gradient(model, theta, asked)
            held = [buffer.clone() for buffer in model.module.buffers()]
        except Exception as error:  # the user's forward may raise anything
            raise ConfigError(
                f"model.name: one example's gradient cannot be taken ({type(error).__name__}: {first_line(error)}); "
                f"the model must take records of shape {layout(like.x)}, and {_RULE}"
            ) from error
        for tried, other in [*((model, other) for other in between), *((late, other) for other in reversed(between))]:
            with suppress(Exception):  # what it raises for a strange record costs that record its gradient
                _gradient(tried, theta, other)
            same = False
            with suppress(Exception):
                same = torch.equal(_bits(first), _bits(_gradient(tried, theta, asked)[0]))
            now = list(tried.module.buffers())
            kept = len(now) == len(held) and all(torch.equal(_bits(a), _bits(b)) for a, b in zip(held, now))
            if not (same and kept):
                raise ConfigError(f"model.name: an example has another gradient once another was seen; {_RULE}")
    return draws


def _examples(like: Examples) -> list[Examples]:
    """One example that is asked for again after each of the others."""
    leaf = next(leaves(like.x))
    return [
        Examples(mapped(partial(_filled, values), like.x), mapped(partial(_filled, 0 * values), like.y))
        for values in _records((max(2, leaf[0].numel()),))
    ]


def _filled(values: Tensor, leaf: Tensor) -> Tensor:
    many = values.repeat(-(-leaf.numel() // values.numel()))[: leaf.numel()].view(leaf.shape)
    return (
        many.to(leaf.device, leaf.dtype) if leaf.is_floating_point() else (many.abs() > 0.5).to(leaf.device, leaf.dtype)
    )


def _records(shape: tuple[int, ...]) -> list[Tensor]:
    """One record that is asked for again after each of the others: those have the same values in another order, larger
    and smaller, negative and very large ones. None is constant, for models that divide by a record's own spread; the
    first ones are tokens 0 and 1."""
    ramp = torch.linspace(0, 1, math.prod(shape)).view(shape)
    return [ramp, 1 - ramp, ramp.square() / 3, 3 * ramp + 1, -2 * ramp, 1e6 * (ramp - 0.5)]


def _gradient(model: FlatModel, theta: Tensor, example: Examples) -> tuple[Tensor, bool]:
    """And whether it drew from torch's generator, which begins at the same place each time."""
    torch.default_generator.manual_seed(0)
    before = torch.get_rng_state()
    x, y = (mapped(Tensor.clone, tree) for tree in example)
    gradient = model.gradient(theta, x, y)
    return gradient, not torch.equal(before, torch.get_rng_state())


def _bits(values: Tensor) -> Tensor:
    """To be compared where NaN equals NaN."""
    return values.reshape(-1).view(torch.uint8)
