"""Nets for the tests of the traced engine: what people bring that is no chain of layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fedspa.engine.traced import TracedEngine
from fedspa.examples import Examples, Tree, taken
from fedspa.learning.tasks import Task

WORDS, LENGTH, CLASSES = 11, 6, 3


class Net(nn.Module):
    """Layers by name, and what to do with them."""

    def __init__(self, forward: Callable[..., Tensor], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *x: Any, **named: Any) -> Tensor:
        return self._forward(self, *x, **named)


def residual() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = torch.tanh(net.one(net.first(x)))
        x = x + net.two(net.second(torch.tanh(net.thin(x))))
        return net.head(x.mean((2, 3)))  # type: ignore[no-any-return]

    return Net(
        forward,
        first=nn.Conv2d(2, 6, 3, padding=1, bias=False),
        one=nn.GroupNorm(3, 6),
        thin=nn.Conv2d(6, 6, 3, padding=1, groups=6),
        second=nn.Conv2d(6, 6, 1),
        two=nn.GroupNorm(1, 6),
        head=nn.Linear(6, CLASSES),
    )


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, dilation=2, padding=2),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.ConvTranspose2d(4, 3, 2, stride=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


def transformer(dropout: float = 0.0) -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.words(x) + net.places(torch.arange(LENGTH))
        return net.head(net.block(x).mean(1))  # type: ignore[no-any-return]

    return Net(
        forward,
        words=nn.Embedding(WORDS, 8),
        places=nn.Embedding(LENGTH, 8),
        block=nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=True),
        head=nn.Linear(8, CLASSES),
    )


def bag(**options: Any) -> Callable[[], nn.Module]:
    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(torch.tanh(net.words(x)).mean(1))  # type: ignore[no-any-return]

    return lambda: Net(forward, words=nn.Embedding(WORDS, 5, **options), head=nn.Linear(5, CLASSES))


def only_words() -> nn.Module:
    return Net(lambda net, x: net.words(x).sin().sum(1), words=nn.Embedding(WORDS, CLASSES))


def one_word() -> nn.Module:
    """The same word for all examples, as of a class token."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return net.head(torch.tanh(net.one(torch.zeros(1, dtype=torch.int64)) + net.words(x).mean(1)))  # type: ignore[no-any-return]

    return Net(forward, one=nn.Embedding(1, 5), words=nn.Embedding(WORDS, 5), head=nn.Linear(5, CLASSES))


def tied() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        words = net.words(x)
        mixed = torch.tanh(net.mix(torch.tanh(net.mix(words)))).mean(1)
        return nn.functional.linear(mixed, net.words.weight)[:, :CLASSES]

    return Net(forward, words=nn.Embedding(WORDS, 5), mix=nn.Linear(5, 5))


def frozen() -> nn.Module:
    net = nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)
    )
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2)
    net[0].requires_grad_(False)
    return net.eval()


def named() -> nn.Module:
    def forward(net: Any, *, ids: Tensor, mask: Tensor) -> Tensor:
        mask = mask.unsqueeze(-1)
        return net.head((net.words(ids) * mask).sum(1) / mask.sum(1).clamp(min=1))  # type: ignore[no-any-return]

    return Net(forward, words=nn.Embedding(WORDS, 5, padding_idx=0), head=nn.Linear(5, CLASSES))


def images(count: int, generator: torch.Generator) -> Tree:
    return torch.randn(count, 2, 8, 8, generator=generator)


def texts(count: int, generator: torch.Generator) -> Tree:
    """With words that come several times."""
    return torch.randint(WORDS, (count, LENGTH), generator=generator) // 2 * 2 % WORDS


def rows(count: int, generator: torch.Generator) -> Tree:
    return torch.randn(count, 8, generator=generator)


def masked(count: int, generator: torch.Generator) -> Tree:
    mask = torch.rand(count, LENGTH, generator=generator) < 0.7
    return {"mask": mask, "ids": texts(count, generator)}


Make = Callable[[], nn.Module]
NETS: dict[str, tuple[Make, Callable[[int, torch.Generator], Tree]]] = {
    "residual": (residual, images),
    "pooled": (pooled, images),
    "transformer": (transformer, texts),
    "Embedding": (bag(), texts),
    "Embedding, padded": (bag(padding_idx=4), texts),
    "Embedding, padded from the end": (bag(padding_idx=-1), texts),
    "Embedding by frequency": (bag(scale_grad_by_freq=True), texts),
    "nothing but an Embedding": (only_words, texts),
    "one word": (one_word, texts),
    "tied": (tied, texts),
    "frozen": (frozen, rows),
    "dict": (named, masked),
    "MLP": (lambda: nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, CLASSES)), rows),
}


@lru_cache
def net(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETS[name][0]()


def data(name: str, count: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    return Examples(NETS[name][1](count, generator), torch.randint(CLASSES, (count,), generator=generator))


@lru_cache
def engine(name: str, threads: int = 1) -> TracedEngine:
    return traced(net(name), data(name, 1), threads=threads)


def traced(module: nn.Module, like: Examples, task: Task | None = None, threads: int = 1) -> TracedEngine:
    return TracedEngine(module, Examples(*(taken(tree, slice(0, 1)) for tree in like)), task, threads=threads)
