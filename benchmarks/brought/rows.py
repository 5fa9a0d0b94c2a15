"""What the benchmarks of local steps train: a model, what its examples are, and how many parameters are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from brought.resnets import resnet18, resnet18_head, resnet20
from brought.transformers import TOKENS, WORDS, TextTransformer, ViT, adapted
from fedspa.examples import Examples
from fedspa.learning import models


@dataclass(frozen=True)
class Row:
    """`words` is None where an example is an image of that shape, else its tokens are below it. A body that is `frozen`
    may be run once per record: the first pass over the records is then measured apart."""

    title: str
    make: Callable[[], nn.Module]
    dimension: int
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    words: int | None = None
    frozen: bool = False

    def build(self) -> nn.Module:
        """The same weights every time."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return self.make()

    def examples(self, count: int, seed: int) -> Examples:
        """Random inputs and classes."""
        generator = torch.Generator().manual_seed(seed)
        y = torch.randint(0, self.classes, (count,), generator=generator)
        return Examples(self._inputs(count, generator), y)

    def _inputs(self, count: int, generator: torch.Generator) -> Tensor:
        if self.words is None:
            return torch.randn(count, *self.shape, generator=generator)
        return torch.randint(0, self.words, (count, *self.shape), generator=generator)


def built_in(name: str, dimension: int, shape: tuple[int, ...], title: str) -> Row:
    """One of fedspa's own models."""
    return Row(title, partial(models.build, name, shape, 10, 0), dimension, shape)


ROWS = {
    "resnet20": Row("ResNet-20, GroupNorm", resnet20, 272_282),
    "resnet18": Row("ResNet-18, GroupNorm", resnet18, 11_173_962),
    "vit": Row("ViT, 4 × 128", ViT, 800_906),
    "text": Row("text transformer, 2 × 128", TextTransformer, 1_037_060, (TOKENS,), 4, WORDS),
    "head": Row("frozen ResNet-18, linear head", resnet18_head, 5_130, frozen=True),
    "adapters": Row("frozen transformer, adapters, head", adapted, 8_708, (TOKENS,), 4, WORDS, frozen=True),
    "mnist-cnn": built_in("mnist-cnn", 21_840, (1, 28, 28), "MNIST CNN"),
    "cifar10-cnn": built_in("cifar10-cnn", 537_610, (3, 32, 32), "CIFAR CNN"),
}
