"""A language model with a frozen body and adapters, taught Python by a federation of the standard library's packages.

python train.py
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedspa

LENGTH, WIDTH, HEADS = 32, 32, 4
AGENTS = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib")
HELD_OUT = ("collections", "concurrent", "html", "json")


class Adapted(nn.Module):
    """A frozen linear layer with a product of two thin matrices beside it, which begins at zero.

    Only `up` is trained. The noise of a private step falls on all that is trained; on both factors it would multiply.
    """

    def __init__(self, linear: nn.Linear, rank: int, *, both: bool) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        down = torch.randn(rank, linear.in_features) / linear.in_features**0.5
        self.down = nn.Parameter(down, requires_grad=both)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down.T @ self.up.T


class Layer(nn.Module):
    """Attention to what came before, then an MLP, each with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp_in, self.mlp_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.norm2(x))))


class LanguageModel(nn.Module):
    """Bytes in, scores of the byte after each out; the output matrix is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layer, self.norm = Layer(), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 128, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=WIDTH**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layer(x)))


def pretrained(steps: int) -> LanguageModel:
    """On public prose: Python's own help texts."""
    net = LanguageModel()
    prose, optimizer = windows("\n".join(topics.values()), 12000), torch.optim.AdamW(net.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = prose[torch.randint(len(prose), (64,))]
        loss = functional.cross_entropy(net(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net


def with_adapters(net: LanguageModel, rank: int, *, both: bool) -> LanguageModel:
    """Beside every linear layer."""
    net.requires_grad_(False)
    for name, linear in list(net.named_modules()):
        if isinstance(linear, nn.Linear):
            net.set_submodule(name, Adapted(linear, rank, both=both))
    return net


def windows(text: str, count: int) -> Tensor:
    """`count` pieces of the text, spread over it, none in two of them."""
    tokens = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()
    pieces = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return pieces[torch.linspace(0, len(pieces) - 1, count).long()]


def source(package: str) -> str:
    folder = Path(sysconfig.get_path("stdlib")) / package
    return "".join(path.read_text("utf-8", "replace") for path in sorted(folder.glob("*.py")))


def packages(records: int = 500) -> fedspa.Dataset:
    """An agent is a package, and an example is a piece of its source; other packages are held out."""
    train = torch.cat([windows(source(name), records) for name in AGENTS])
    test = torch.cat([windows(source(name), 100) for name in HELD_OUT])
    data = fedspa.from_arrays(train, train, test, test, name="standard library")
    return replace(data, owners=np.repeat(np.arange(len(AGENTS)), records))


def config(rounds: int, seed: int) -> dict[str, dict[str, object]]:
    return {
        "federation": {"agents": len(AGENTS), "per_round": len(AGENTS), "rounds": rounds},
        "algorithm": {"compression": 1.0, "local_steps": 4, "batch": 25, "local_lr": 1.0, "server": "average"},
        "privacy": {"epsilon": 4.0, "delta": 1e-4, "clip_value": 0.5},
        "run": {"seed": seed},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--both", action="store_true", help="train both factors of each adapter")
    parser.add_argument("--pretrain", type=int, default=400, help="steps on public prose")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    net, data = with_adapters(pretrained(asked.pretrain), asked.rank, both=asked.both), packages()
    tokens = data.test_x
    with torch.no_grad():
        loss = functional.cross_entropy(net(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    print(f"taught prose alone: perplexity {loss.exp():.2f} on Python")
    result = fedspa.run(
        config(asked.rounds, asked.seed),
        data=data,
        module=net,
        task="next-token",
        on_round=lambda metrics: print(f"round {metrics.round + 1}: loss {metrics.loss:.4f}"),
    )
    print(f"{result.summary['dimension']} of {sum(p.numel() for p in net.parameters())} parameters were trained")
    print(result)
    print("report:", result.folder / "report.html")


if __name__ == "__main__":
    main()
