"""Stock layers and architectures in small, random-weight forms, each with a few examples that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedspa.examples import Tree

COUNT, WORDS, LENGTH, CLASSES = 6, 20, 7, 3


@dataclass(frozen=True)
class Stock:
    """How it is made, what it takes and what it learns: by default a class of three."""

    make: Callable[[], nn.Module]
    x: Callable[[], Tree]
    y: Callable[[], Tensor] = lambda: torch.arange(COUNT) % CLASSES
    task: str = "classification"


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(COUNT, *shape)


def tokens() -> Tensor:
    return torch.randint(WORDS, (COUNT, LENGTH))


def masked() -> Tree:
    """Of another length in each example."""
    mask = (torch.arange(LENGTH) <= 1 + torch.arange(COUNT)[:, None]).long()
    return {"input_ids": tokens(), "attention_mask": mask}


class SelfAttention(nn.Module):
    """nn.MultiheadAttention of a sequence over itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


# Opacus's supported layers, and others that people put beside them.
LAYERS: dict[str, Stock] = {
    "Linear on a sequence": Stock(lambda: nn.Linear(5, 4), floats(3, 5)),
    "Bilinear": Stock(lambda: nn.Bilinear(3, 4, 2), lambda: (torch.randn(COUNT, 3), torch.randn(COUNT, 4))),
    "Conv1d": Stock(lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), floats(4, 9)),
    "Conv2d, strided and dilated": Stock(lambda: nn.Conv2d(2, 3, 3, stride=2, dilation=2, padding=2), floats(2, 9, 9)),
    "Conv2d, circular": Stock(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), floats(2, 6, 6)),
    "Conv3d": Stock(lambda: nn.Conv3d(2, 4, 3, stride=(1, 2, 1), groups=2, padding=1), floats(2, 4, 5, 4)),
    "ConvTranspose2d": Stock(lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1), floats(3, 4, 4)),
    "LayerNorm": Stock(lambda: nn.LayerNorm((3, 5)), floats(3, 5)),
    "Embedding with padding": Stock(lambda: nn.Embedding(WORDS, 4, padding_idx=0), tokens),
    "EmbeddingBag, max": Stock(lambda: nn.EmbeddingBag(WORDS, 4, mode="max"), tokens),
    "GRU of two layers": Stock(lambda: nn.GRU(4, 5, num_layers=2, bias=False, batch_first=True), floats(6, 4)),
    "LSTM, bidirectional, of two layers": Stock(
        lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True), floats(6, 4)
    ),
    "LSTM with a projection": Stock(lambda: nn.LSTM(4, 5, proj_size=3, batch_first=True), floats(6, 4)),
    "MultiheadAttention with bias_kv": Stock(lambda: SelfAttention(add_bias_kv=True, add_zero_attn=True), floats(5, 8)),
    "TransformerEncoderLayer": Stock(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True), floats(5, 8)
    ),
    "weight_norm": Stock(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), floats(4)),
}


class UNet(nn.Module):
    """One step down and up again, with a shortcut across, pooled to a class."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.down = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.inwards(x))
        return self.out(torch.cat([x, self.up(nn.functional.silu(self.down(x)))], dim=1)).mean(dim=(2, 3))


def transformer(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A class of transformers with a config of its own."""

    def make() -> nn.Module:
        library = pytest.importorskip("transformers", reason="transformers is not installed: pip install fedspa[dev]")
        made: nn.Module = getattr(library, kind)(getattr(library, config)(**options))
        return made

    return make


_HEADS: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_TEXT: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# As they come: with dropout where they have it, and with BatchNorm, which `fedspa.fix` replaces.
ARCHITECTURES: dict[str, Stock] = {
    "ResNet": Stock(
        transformer(
            "ResNetForImageClassification",
            "ResNetConfig",
            num_channels=1,
            embedding_size=4,
            hidden_sizes=[4, 8],
            depths=[1, 1],
            layer_type="basic",
            num_labels=CLASSES,
        ),
        floats(1, 16, 16),
    ),
    "BERT": Stock(
        transformer(
            "BertForSequenceClassification",
            "BertConfig",
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
            vocab_size=WORDS,
            **_HEADS,
        ),
        masked,
    ),
    "GPT-2": Stock(
        transformer("GPT2LMHeadModel", "GPT2Config", n_positions=LENGTH, n_embd=8, n_layer=1, n_head=2, **_TEXT),
        masked,
        tokens,
        "next-token",
    ),
    "Llama": Stock(
        transformer(
            "LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1, max_position_embeddings=LENGTH, **_HEADS, **_TEXT
        ),
        masked,
        tokens,
        "next-token",
    ),
    "U-Net": Stock(UNet, floats(1, 8, 8)),
}
