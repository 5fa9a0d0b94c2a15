"""Transformer encoders, width 128: of image patches, of words, and of words with adapters on a frozen body."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, HIDDEN = 128, 4, 512
WORDS, TOKENS = 5_000, 64


class Adapted(nn.Module):
    """A frozen linear layer and a trainable product of two thin ones (LoRA), which starts at zero."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.key: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.value: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.out: nn.Module = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(-3, -2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(-3, -2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Norm first, as in a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.hidden_norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.hidden(self.hidden_norm(x))  # type: ignore[no-any-return]


class ViT(nn.Module):
    """Patches of 4 × 4 with fixed positions, four blocks, the mean of the patches."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.register_buffer("positions", waves(64))
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(patches)).mean(1))  # type: ignore[no-any-return]


class TextTransformer(nn.Module):
    """Words with fixed positions, two blocks, the mean of the words, four classes."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.register_buffer("positions", waves(TOKENS))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens) + self.positions).mean(1))  # type: ignore[no-any-return]


def adapted(rank: int = 4) -> TextTransformer:
    """Adapters on a frozen transformer's four projections per block, and a trainable head."""
    net = TextTransformer().requires_grad_(False)
    for attention in (layer for layer in net.modules() if isinstance(layer, Attention)):
        for name in ("query", "key", "value", "out"):
            setattr(attention, name, Adapted(getattr(attention, name), rank))
    net.head.requires_grad_()
    return net


def waves(length: int) -> Tensor:
    """Sines and cosines of the place, as in "Attention is all you need"."""
    angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
