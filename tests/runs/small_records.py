"""A few records of the benchmarks' shapes, for runs of a fraction of a second."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedspa.data.adapters import from_arrays, from_examples
from fedspa.data.dataset import Dataset
from fedspa.data.datasets import load
from fedspa.examples import Tree, tensors
from reproduction import stand_in


def mnist() -> Dataset:
    return _few(stand_in.mnist())


def cifar10() -> Dataset:
    return _few(stand_in.cifar10())


def visits() -> Dataset:
    """120 patients with one to six visits each."""
    rng = np.random.default_rng(0)
    persons = rng.permutation(np.repeat(np.arange(120), rng.integers(1, 7, 120)))
    y = rng.integers(0, 3, len(persons))
    x = rng.normal(size=(len(persons), 6)) + 2 * y[:, None]
    return from_arrays(x, y, x[:60], y[:60], name="visits", persons=persons)


def _few(data: Dataset) -> Dataset:
    kept = torch.arange(240)
    train, test = (data.train_x[kept], data.train_y[kept]), (data.test_x[kept[:100]], data.test_y[kept[:100]])
    return Dataset(*train, *test, classes=data.classes, name=data.name)


def parity() -> Dataset:
    """Whether a digit is odd."""
    data = load("digits", None)
    return replace(data, train_y=data.train_y % 2, test_y=data.test_y % 2, classes=2, name="parity")


def bits() -> Dataset:
    """A digit's four bits."""
    data = load("digits", None)
    train_y, test_y = ((y.unsqueeze(1) >> torch.arange(4)) & 1 for y in (data.train_y, data.test_y))
    return replace(data, train_y=train_y, test_y=test_y, classes=None, name="bits")


def tokens(ignored: int = -100) -> Dataset:
    """The first pixels of a digit as tokens 0 … 16; every third one does not count."""
    data = load("digits", None)
    ids = [(x.flatten(1)[:, 2:14] * 16).long() for x in (data.train_x, data.test_x)]
    counted = torch.arange(12) % 3 > 0
    examples = [{"input_ids": each, "labels": each.masked_fill(~counted, ignored)} for each in ids]
    return from_examples(*examples, name="tokens")


def tokens_with_minus_one() -> Dataset:
    return tokens(-1)


class Tagger(nn.Module):
    """Gives logits, and its own loss where it is given labels, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(17, 4), nn.Linear(4, 17)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        loss = {} if labels is None else {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}
        return {"logits": logits, **loss}


def own_loss(module: nn.Module, example: Tree) -> Tensor:
    """The margin loss of one against the rest."""
    assert isinstance(example, tuple)
    x, y = tensors(*example)
    return functional.multi_margin_loss(module(x), y)
