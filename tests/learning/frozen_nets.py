"""Modules with a frozen part, in the ways that people freeze one. `model.name` can name what makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def seeded(seed: int = 0) -> None:
    torch.default_generator.manual_seed(seed)


def body() -> nn.Sequential:
    """8 × 8 images to 144 features, with statistics of its own."""
    norm = nn.BatchNorm2d(4)
    norm.running_mean.copy_(torch.linspace(-0.2, 0.2, 4))
    made = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(inplace=True), nn.Flatten())
    norm.eval()
    frozen(made)
    return made


def chain() -> nn.Sequential:
    """A frozen convolution and a linear layer."""
    seeded()
    return nn.Sequential(*body(), nn.Linear(144, 10))


def drawn() -> nn.Sequential:
    """The same, drawn from whatever torch's generator is at."""
    return nn.Sequential(*body(), nn.Linear(144, 10))


def wide(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Rows of numbers through a frozen layer."""
    seeded()
    inputs = torch.Size(shape).numel()
    return nn.Sequential(nn.Flatten(), frozen(nn.Linear(inputs, 32)), nn.Tanh(), nn.Linear(32, classes))


class Residual(nn.Module):
    """A frozen residual block, and a net of two layers behind it; what is trained is registered first."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        seeded()
        self.head = nn.Sequential(nn.Linear(144, 8), nn.ReLU(), nn.Linear(8, 10))
        self.first, self.second = frozen(nn.Conv2d(1, 4, 3)), frozen(nn.Conv2d(4, 4, 3, padding=1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).relu()
        k = self.second(h)
        k += h
        return self.head(self.dropout(k.view(x.size(0), -1)))


class Tied(nn.Module):
    """A frozen matrix that the body and the head use."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.shared = frozen(nn.Linear(16, 16))
        self.trained = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.trained(self.shared(x).tanh())).tanh())


class FrozenLast(nn.Module):
    """Something frozen before and behind what is trained."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.before, self.trained, self.behind = frozen(nn.Linear(16, 32)), nn.Linear(32, 8), frozen(nn.Linear(8, 3))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.trained(self.before(x).relu()).relu())


class Adapted(nn.Module):
    """Adds what is trained to a frozen layer's output in place."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.base, self.adapter, self.last = frozen(nn.Linear(16, 16)), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x)
        h += self.adapter(x)
        return self.last(h.relu())


class Detached(nn.Module):
    """The body under torch.no_grad, as many write it, and part of what is trained, too."""

    def __init__(self, part: bool = False) -> None:
        super().__init__()
        seeded()
        self.body, self.middle, self.last = frozen(nn.Linear(16, 32)), nn.Linear(32, 8), nn.Linear(8, 3)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.body(x).relu()
            if self.part:
                h = self.middle(h)
        return self.last((h if self.part else self.middle(h)).tanh())


class TwoInputs(nn.Module):
    """A record of two tensors, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        seeded()
        self.words, self.mix, self.last = frozen(nn.Embedding(20, 8)), frozen(nn.Linear(8, 16)), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, scale: float | None = None) -> dict[str, Tensor]:
        h = self.mix(self.words(input_ids)).tanh()
        mask = attention_mask.unsqueeze(-1).to(h.dtype)
        h = (h * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return {"logits": self.last(h if scale is None else h * scale)}


def bert(labels: int = 3, **options: Any) -> nn.Module:
    """A small BERT in eval mode, nothing of it frozen."""
    from transformers import BertConfig, BertForSequenceClassification

    seeded()
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(**sizes, intermediate_size=32, max_position_embeddings=16, num_labels=labels, **options)
    ).eval()
