"""Models that mix examples by hand, keep state, or draw randomness, for tests to hold against the engines.

Each takes examples of shape (6, 4), or (6,) tokens, and gives three scores.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Make = Callable[[], nn.Module]


class Net(nn.Module):
    """Features, something done to them by `between`, a head."""

    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(24, 8), nn.Linear(8, 3)
        if between is not None:
            self.between = between

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.between(torch.tanh(self.body(x.flatten(1)))))  # type: ignore[no-any-return]


# Mixing by hand.


class TrainedByBatch(Net):
    """A batch norm by hand, with frozen statistics in eval mode: it mixes in training only."""

    def between(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1).expand(-1, -1, 2) * torch.tensor([1.0, -0.5]).to(x)
        zero, one = torch.zeros(8).to(x), torch.ones(8).to(x)
        return functional.batch_norm(x, zero, one, training=self.training).sum(-1)


class TimeFirst(nn.Module):
    """A recurrent layer that takes the batch for time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.GRU(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])  # type: ignore[no-any-return]


def mixing_hook() -> nn.Module:
    net = Net()
    net.body.register_forward_hook(lambda layer, given, found: found - found.mean(0))
    return net


def normalised(x: Tensor) -> Tensor:
    x = x.unsqueeze(-1).expand(-1, -1, 2) * torch.tensor([1.0, -0.5]).to(x)
    return functional.batch_norm(x, None, None, training=True).sum(-1)


MIXING: dict[str, Make] = {
    "mean": lambda: Net(lambda x: x - x.mean(0)),
    "functional batch_norm": lambda: Net(normalised),
    "batch_norm in training": TrainedByBatch,
    "neighbour": lambda: Net(lambda x: x + x.roll(1, 0)),
    "size of the batch": lambda: Net(lambda x: x / len(x)),
    "time first": TimeFirst,
    "hook": mixing_hook,
}

# Keeping state.


class Kept(Net):
    """Keeps something in `self.kept`, an attribute or a buffer."""

    def __init__(self, start: Any, step: Callable[[Any, Tensor], tuple[Any, Tensor]], buffer: bool = False) -> None:
        super().__init__()
        self.step = step
        if buffer:
            self.register_buffer("kept", start)
        else:
            self.kept = start

    def between(self, x: Tensor) -> Tensor:
        self.kept, out = self.step(self.kept, x)
        return out


def largest(top: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    top = torch.maximum(top, x.detach().abs().max())
    return top, x / top


def averaged(mean: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    mean = 0.9 * mean + 0.1 * x.detach().mean(0)
    return mean, x - mean


def previous(last: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach().clone(), x if last is None else x + last


def first(centre: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    centre = x.detach().clone() if centre is None else centre
    return centre, x - centre


def replayed(seen: deque[Tensor], x: Tensor) -> tuple[deque[Tensor], Tensor]:
    seen.append(x.detach())
    return seen, x - torch.stack(list(seen)).mean(0)


def cached(seen: dict[int, Tensor], x: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    return seen, x + seen.setdefault(len(x), x.detach())


def late(calls: int, x: Tensor) -> tuple[int, Tensor]:
    """Shows nothing until long after any trial."""
    return calls + 1, x * (1 if calls < 1000 else calls)


GLOBAL: list[Tensor] = []
NUMBER = 0.0


def by_global(x: Tensor) -> Tensor:
    if not GLOBAL:
        GLOBAL.append(x.detach().mean())
    return x - GLOBAL[0]


def by_number(x: Tensor) -> Tensor:
    global NUMBER
    NUMBER += float(x.detach().mean())
    return x + NUMBER


def by_default(x: Tensor, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
    seen.append(x.detach())
    return x + seen[0]


class ByClass(Net):
    seen = 0

    def between(self, x: Tensor) -> Tensor:
        ByClass.seen += 1
        return x / ByClass.seen


class Tracker:
    def __init__(self) -> None:
        self.first: float | None = None


def by_closure(x_of: str) -> nn.Module:
    """A hook whose closure keeps the first example: in a list, a variable or an object."""
    net, seen, value, tracker = Net(), [], None, Tracker()

    def hook(layer: nn.Module, given: tuple[Tensor, ...], found: Tensor) -> Tensor:
        nonlocal value
        mean = float(found.detach().mean())
        if x_of in ("list", "previous"):
            seen.append(mean)
            return found - seen[0 if x_of == "list" else len(seen) // 2]
        if x_of == "variable":
            value = mean if value is None else value
            return found - value
        tracker.first = mean if tracker.first is None else tracker.first
        return found - tracker.first

    net.body.register_forward_hook(hook)
    return net


def by_backward_hook() -> nn.Module:
    """Gradients are divided by the largest so far."""
    net, top = Net(), [1e-6]

    def hook(layer: nn.Module, given: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        top[0] = max(top[0], float(found[0].abs().max()))
        return tuple(part / top[0] if part is not None else part for part in given)

    net.head.register_full_backward_hook(hook)
    return net


class Hidden(Net):
    """A batch norm in a plain list, which torch does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.BatchNorm1d(8)]

    def between(self, x: Tensor) -> Tensor:
        return self.layers[0].to(x.dtype)(x.unsqueeze(-1).expand(-1, -1, 2) * torch.tensor([1.0, 2.0]).to(x)).sum(-1)


class Decaying(Net):
    """Its own weights are changed in the forward pass."""

    def between(self, x: Tensor) -> Tensor:
        self.head.weight.data.mul_(0.9)
        return x


class Gated(Net):
    """Behind weights of zero, and where no trial looks: at the first θ nothing of what it keeps shows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(8))

    def between(self, x: Tensor) -> Tensor:
        last, os.environ["FEDSPA_TEST_ZOO"] = float(os.environ.get("FEDSPA_TEST_ZOO", 0)), str(float(x.detach().mean()))
        return x + self.gate * last if self.gate.detach().any() else x


class Tied(nn.Module):
    """Embedding rows that an example looks up are rescaled; the head reads all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1) + self.words.weight.mean(0))  # type: ignore[no-any-return]


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Flatten(1), nn.Linear(24, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


# Of all that they ever see, these keep only the first, outside of the module, where no copy can forget it. A trial that
# runs first makes that a synthetic example: nothing of a record is kept.
FIRST_OUTSIDE: dict[str, Make] = {
    "global list": lambda: Net(by_global),
    "default": lambda: Net(by_default),
    "closure, object": lambda: by_closure("object"),
}

KEEPING: dict[str, Make] = {
    "running max, buffer": lambda: Kept(torch.tensor(1e-3), largest, True),
    "moving mean": lambda: Kept(torch.zeros(8), averaged),
    "previous example": lambda: Kept(None, previous),
    "first example, buffer": lambda: Kept(None, first, True),
    "replay": lambda: Kept(deque(maxlen=3), replayed),
    "cache": lambda: Kept({}, cached),
    "counter": lambda: Kept(0, late),
    "closure, previous": lambda: by_closure("previous"),
    "global number": lambda: Net(by_number),
    "class attribute": ByClass,
    "backward hook": by_backward_hook,
    "hidden BatchNorm": Hidden,
    "weights": Decaying,
    "behind a zero": Gated,
    "max_norm": Tied,
    "InstanceNorm": lambda: nn.Sequential(
        nn.InstanceNorm1d(6, track_running_stats=True), nn.Flatten(), nn.Linear(24, 3)
    ),
}

# Drawing from elsewhere than torch's default generator, or where no seed reaches.


class BackwardNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *found: Tensor) -> Tensor:
        return found[0] * torch.rand_like(found[0])


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(5)
    return Net(lambda x: x * torch.rand(8, generator=generator).to(x))


class OwnGenerator(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(5)

    def between(self, x: Tensor) -> Tensor:
        return x * self.generator.random()


def reseeded(x: Tensor) -> Tensor:
    torch.seed()
    return x * torch.rand(8).to(x)


SHARING: dict[str, Make] = {
    "numpy": lambda: Net(lambda x: x * np.random.rand()),  # noqa: NPY002
    "torch.Generator": own_generator,
    "random.Random": OwnGenerator,
    "urandom": lambda: Net(lambda x: x * os.urandom(1)[0]),
    "torch.seed": lambda: Net(reseeded),
    "backward": lambda: Net(lambda x: BackwardNoise.apply(x)),
}

# Drawing from torch's default generator.


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x, x, x)[0].flatten(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 5, num_layers=2, dropout=0.4, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])  # type: ignore[no-any-return]


DRAWING: dict[str, Make] = {
    "Dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "dropout always": lambda: Net(lambda x: functional.dropout(x, 0.5, training=True)),
    "noise": lambda: Net(lambda x: x + torch.randn_like(x)),
    "RReLU": lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, 8), nn.RReLU(), nn.Linear(8, 3)),
    "FractionalMaxPool": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.FractionalMaxPool2d(2, output_size=(4, 3)), nn.Flatten(), nn.Linear(12, 3)
    ),
    "attention": Attending,
    "LSTM": Recurrent,
}
