"""The layers that the fast back ends know, as plain descriptions.

Offsets are positions in θ, laid out as in `FlatModel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedspa.engine.obstacle import Obstacle

Shape = tuple[int, ...]
Pair = tuple[int, int]


class Unsupported(Exception):
    """What a back end cannot do: its text is the obstacle's."""

    def __init__(self, why: str, mend: str = "") -> None:
        super().__init__(why)
        self.obstacle = Obstacle(why, mend)


@dataclass(frozen=True, slots=True)
class Weighted:
    """A Conv2d, or a Linear as a convolution of one pixel. The weight is [outputs, K]."""

    kind: Literal["conv", "linear"]
    channels: int
    height: int
    width: int
    outputs: int
    kernel: Pair
    stride: Pair
    padding: Pair
    weight: int
    bias: int | None

    @property
    def columns(self) -> int:
        """K: the inputs of one output value."""
        return self.channels * self.kernel[0] * self.kernel[1]

    @property
    def out(self) -> Pair:
        return after((self.height, self.width), self.kernel, self.stride, self.padding)

    @property
    def positions(self) -> int:
        return self.out[0] * self.out[1]

    @property
    def one_pixel(self) -> bool:
        """Whether a product with the weight is all there is."""
        return self.height * self.width * self.kernel[0] * self.kernel[1] == 1 and self.padding == (0, 0)

    @property
    def size(self) -> int:
        """Parameters."""
        return self.outputs * (self.columns + (self.bias is not None))


@dataclass(frozen=True, slots=True)
class Pool:
    """Max or mean over windows of an image."""

    kind: Literal["max", "mean"]
    image: tuple[int, int, int]
    kernel: Pair
    stride: Pair
    padding: Pair
    count_padding: bool

    @property
    def halves(self) -> bool:
        """The common case: windows of 2 × 2 that neither overlap nor leave the image."""
        return self.kind == "max" and self.kernel == self.stride == (2, 2) and self.padding == (0, 0)

    @property
    def out(self) -> Pair:
        return after(self.image[1:], self.kernel, self.stride, self.padding)


@dataclass(frozen=True, slots=True)
class Norm:
    """A GroupNorm or LayerNorm: each of `groups` equal runs of an example's values to mean 0 and variance 1, then
    times a weight and plus a bias. Seen as [outer, parameters, inner], a value's place in the middle is its weight's.
    """

    groups: int
    outer: int
    parameters: int
    inner: int
    epsilon: float
    weight: int | None
    bias: int | None

    @property
    def inputs(self) -> int:
        return self.outer * self.parameters * self.inner

    @property
    def size(self) -> int:
        return self.parameters * ((self.weight is not None) + (self.bias is not None))


@dataclass(frozen=True, slots=True)
class Embedding:
    """Whole numbers below `words` → their rows of a [words, width] weight."""

    words: int
    width: int
    tokens: int
    weight: int

    @property
    def size(self) -> int:
        return self.words * self.width


@dataclass(frozen=True, slots=True)
class Activation:
    kind: Literal["relu", "tanh"]


@dataclass(frozen=True, slots=True)
class Flatten:
    """Changes the shape, not the data."""


Layer = Weighted | Pool | Norm | Embedding | Activation | Flatten


def after(sides: Shape, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Lines and columns of what windows over an image give."""
    down, across = ((sides[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    if down < 1 or across < 1:
        raise Unsupported(f"a window of {kernel} does not fit an image of {sides}")
    return down, across
