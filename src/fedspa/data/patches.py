"""Features of photographs: how much of which small pattern lies where (after Coates, Lee and Ng 2011).

Two banks of 64 or 128 patterns: patches of 6 by 6 pixels, and of 4 by 4 places of maps of the gradient's direction.
Every patch of an image, less its mean and over its contrast, is compared with each pattern; likeness and unlikeness
beyond a threshold are pooled over a few cells, the square root taken, colour images and their mirror images averaged.
What comes out is then whitened: directions in which features of pictures vary most anyway are made smaller. That is
what a linear model needs under noise, since the noise is the same in every direction, and few steps have to do.

Patterns, means and whitening come from pictures of nothing (below): no record of anyone has a part in
them. Records are taken to be of mean about 0 and standard deviation about 1 a channel: colour photographs, as
CIFAR-10's are here, or grey things on a black ground, as Fashion-MNIST's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

SIDE, GREY_SIDE = 32, 28
# Channels → side of the images that there are banks for.
SIDES = {3: SIDE, 1: GREY_SIDE}
PATTERNS = 64
PICTURES = 1000
# Of each picture so many patches, for the patterns and the patches' own whitening.
SAMPLED = 16
THRESHOLD = 0.5
# A patch's contrast, and the strength of all edges around a place, below which both count as none.
FAINT, FAINT_EDGES = 0.2, 0.08
# Constants are rounded to this, far coarser than float64: the same on machines that round otherwise.
GRAIN = 2.0**-18


@dataclass(frozen=True)
class Bank:
    """`source` makes the maps, `size` is a patch's side. `cells` by `cells` cells, `step` places from middle to middle.

    `flatness` and `ridge` are added to the variances of patches and of features, as parts of their mean, before these
    are divided out: the larger, the less is whitened. `share` is the bank's part of a record's features. `channels` are
    those of the images.
    """

    source: Callable[[Tensor], Tensor]
    size: int
    cells: int
    step: float
    flatness: float
    ridge: float
    share: float
    channels: int = 3
    patterns: int = PATTERNS


@dataclass(frozen=True)
class Constants:
    patterns: Tensor
    offsets: Tensor
    means: Tensor
    whitening: Tensor


def edges(images: Tensor) -> Tensor:
    """Directions of the brightness' gradient against the edges around, at every second place."""
    maps = directions(brightness(images))
    around = blurred((maps**2).sum(dim=1, keepdim=True), 2.0).clamp_min(0).sqrt()
    maps = maps / (around + FAINT_EDGES)
    kernel = gaussian(0.9)
    return filtered(filtered(maps, kernel, 2, 1, 2), kernel, 3, 1, 2).clamp_min(0).sqrt()


def brightness(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def colours(images: Tensor) -> Tensor:
    return images


BANKS = (Bank(colours, 6, 3, 8.0, 0.3, 1.0, 1.0), Bank(edges, 4, 2, 6.0, 0.1, 3.0, 0.7))
GREY_BANKS = (Bank(colours, 6, 3, 7.0, 0.3, 0.2, 1.0, 1), Bank(edges, 4, 3, 3.5, 0.1, 0.2, 1.0, 1))


def patches(images: Tensor, patterns: int = PATTERNS) -> Tensor:
    """(records, 26 · patterns) for colour images, (records, 36 · patterns) for grey ones; norm 1."""
    banks = BANKS if images.shape[1] == 3 else GREY_BANKS
    parts = [bank.share * _features(replace(bank, patterns=patterns), images) for bank in banks]
    return unit(torch.cat(parts, dim=1))


def _features(bank: Bank, images: Tensor) -> Tensor:
    made = constants(bank)
    flat = (_likeness(bank, made.patterns, made.offsets, images) - made.means).flatten(1)
    # A product of matrices would round a record by its place among the others.
    return unit(torch.stack([made.whitening.mv(each) for each in flat]))


def _likeness(bank: Bank, patterns: Tensor, offsets: Tensor, images: Tensor) -> Tensor:
    """(records, 2 · patterns, cells, cells)."""
    once = _pooled(bank, _compared(bank, patterns, offsets, images)).sqrt()
    if bank.channels == 1:
        return once
    return (once + _pooled(bank, _compared(bank, patterns, offsets, images.flip(3))).sqrt()) / 2


def _compared(bank: Bank, patterns: Tensor, offsets: Tensor, images: Tensor) -> Tensor:
    maps = bank.source(images)
    mean = functional.avg_pool2d(maps.mean(dim=1, keepdim=True), bank.size, 1)
    square = functional.avg_pool2d((maps**2).mean(dim=1, keepdim=True), bank.size, 1)
    contrast = (square - mean**2).clamp_min(0).sqrt() + FAINT
    # The patterns' own means are 0, so a patch's mean needs no subtraction.
    found = functional.conv2d(maps, patterns) / contrast + offsets.view(1, -1, 1, 1)
    return torch.cat(((found - THRESHOLD).clamp_min_(0), (-THRESHOLD - found).clamp_min_(0)), dim=1)


def _pooled(bank: Bank, maps: Tensor) -> Tensor:
    """Gaussian averages around the middles of the cells. One product a record, each of the same shape."""
    count, channels, side, _ = maps.shape
    middles = (side - 1) / 2 + (torch.arange(bank.cells) - (bank.cells - 1) / 2) * bank.step
    near = torch.exp(-(((torch.arange(side).view(-1, 1) - middles) / (0.45 * bank.step)) ** 2) / 2).to(maps)
    near = near / near.sum(dim=0)
    weights = torch.einsum("yp,xq->yxpq", near, near).reshape(side * side, -1)
    pooled = torch.bmm(maps.flatten(2), weights.expand(count, *weights.shape))
    return pooled.view(count, channels, bank.cells, bank.cells)


@functools.cache
def constants(bank: Bank) -> Constants:
    pictures = _pictures(bank.channels)
    patterns, offsets = _patterns(bank, pictures)
    parts = torch.cat([_likeness(bank, patterns, offsets, part) for part in torch.split(pictures, 100)])
    means = parts.mean(dim=0)
    parts = parts - means
    spread = (parts**2).mean(dim=(0, 2, 3), keepdim=True).sqrt() + 1e-3
    scaled = (parts / spread).flatten(1)
    covariance = scaled.T @ scaled / len(scaled)
    ridge = bank.ridge * covariance.diagonal().mean()
    # Any root of the inverse serves: they differ by a rotation, which neither clipping nor noise can see.
    lower = torch.linalg.cholesky(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64))
    inverse = torch.linalg.inv(lower) / spread.expand(1, *parts.shape[1:]).flatten()
    return Constants(*(_rounded(each) for each in (patterns, offsets, means, inverse)))


def _patterns(bank: Bank, pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Patches of the pictures, whitened, and what to add for the patches' mean."""
    random = np.random.Generator(np.random.PCG64(SEED))
    maps = torch.cat([bank.source(part) for part in torch.split(pictures, 100)])
    count, reach = SAMPLED * len(maps), maps.shape[2] - bank.size + 1
    which = torch.arange(len(maps)).repeat_interleave(SAMPLED).view(-1, 1, 1)
    top, left = (torch.from_numpy(random.integers(reach, size=count)).view(-1, 1) for _ in range(2))
    at = torch.arange(bank.size)
    seen = maps.movedim(1, 3)[which, (top + at)[:, :, None], (left + at)[:, None, :]].movedim(3, 1).flatten(1)
    seen = seen - seen.mean(dim=1, keepdim=True)
    seen = seen / ((seen**2).mean(dim=1, keepdim=True).sqrt() + FAINT)
    middle = seen.mean(dim=0)
    seen = seen - middle
    values, vectors = torch.linalg.eigh(seen.T @ seen / count)
    white = (vectors * (values.clamp_min(0) + bank.flatness * values.mean()).rsqrt()) @ vectors.T
    whitened = seen @ white
    chosen = unit(whitened[torch.from_numpy(random.permutation(count)[: bank.patterns])])
    patterns = chosen @ white / (whitened**2).mean().sqrt()
    offsets = -(patterns @ middle)
    patterns = patterns - patterns.mean(dim=1, keepdim=True)
    return patterns.view(bank.patterns, maps.shape[1], bank.size, bank.size), offsets


@functools.cache
def _pictures(channels: int) -> Tensor:
    """Return the pictures in the scale of records: mean about 0, standard deviation about 1."""
    drawn = pictures(PICTURES) if channels == 3 else objects(PICTURES)
    middle, spread = (0.5, 0.25) if channels == 3 else (0.286, 0.353)
    return (torch.from_numpy(drawn).to(torch.float64) / 255 - middle) / spread


def _rounded(values: Tensor) -> Tensor:
    return (torch.round(values / GRAIN) * GRAIN).to(torch.float32)


DIRECTIONS = 8


def directions(image: Tensor) -> Tensor:
    """Return the gradient's length, shared out between the two nearest of 8 directions, in 8 channels (Sobel's
    filter)."""
    padded = functional.pad(image, (1, 1, 1, 1), mode="replicate")
    across, along = padded[..., 2:] - padded[..., :-2], padded[..., 2:, :] - padded[..., :-2, :]
    right = (across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]) / 8
    down = (along[..., :-2] + 2 * along[..., 1:-1] + along[..., 2:]) / 8
    length = torch.sqrt(right**2 + down**2 + 1e-12)
    turn = torch.atan2(down, right) * (DIRECTIONS / (2 * math.pi))
    numbers = torch.arange(DIRECTIONS, device=image.device, dtype=image.dtype).view(1, -1, 1, 1)
    apart = (turn - torch.where(numbers > DIRECTIONS // 2, numbers - DIRECTIONS, numbers)).abs()
    return length * (1 - torch.minimum(apart, DIRECTIONS - apart)).clamp_min(0)


def blurred(image: Tensor, deviation: float) -> Tensor:
    kernel = gaussian(deviation)
    return filtered(filtered(image, kernel, 2), kernel, 3)


def filtered(maps: Tensor, kernel: Sequence[float], axis: Literal[2, 3], first: int = 0, step: int = 1) -> Tensor:
    """Return the kernel's weighted sums along an axis, zeros beyond its ends, at every `step`-th place from `first` on.

    Product by product: torch's convolutions of one channel take six times as long, and may round a place otherwise than
    its neighbour, which a product and a sum do not.
    """
    reach, side = len(kernel) // 2, maps.shape[axis]
    padded = functional.pad(maps, (0, 0, reach, reach) if axis == 2 else (reach, reach))
    parts = (padded.narrow(axis, first + tap, side - first) for tap in range(len(kernel)))
    total: Tensor | None = None
    for part, weight in zip(parts, kernel):
        weighted = (part[:, :, ::step] if axis == 2 else part[..., ::step]) * weight
        total = weighted if total is None else total.add_(weighted)
    assert total is not None
    return total


def gaussian(deviation: float) -> list[float]:
    reach = math.ceil(3 * deviation)
    weights = [math.exp(-(at**2) / (2 * deviation**2)) for at in range(-reach, reach + 1)]
    return [weight / sum(weights) for weight in weights]


def unit(flat: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    return flat / length.clamp_min(1e-6)


# Pictures of nothing: dead leaves (Lee, Mumford and Huang 2001), made by a fixed random process.
#
# Shapes of all sizes, each of one colour with a little shade and grain, lie on top of one another. Their edges, and how
# features of them vary together, are much like those of photographs. They are nobody's records, so whatever is measured
# on them costs no privacy. Drawn in float64 and rounded to the 256 values of a pixel: the same pictures on every
# machine.

Array = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]

SEED = 901
LEAVES = 60
# Drawn at twice the side, so that an edge falls between pixels too. Radii at that scale: density ∝ r^-2.5.
_DRAWN = 2 * SIDE
_SMALLEST, _LARGEST, _DECAY = 3.0, 40.0, 1.5


def pictures(count: int) -> NDArray[np.uint8]:
    """(count, 3, 32, 32)."""
    random = np.random.Generator(np.random.PCG64(SEED))
    return np.stack([_picture(random) for _ in range(count)])


def objects(count: int) -> NDArray[np.uint8]:
    """Grey things on a black ground, as large as the image allows: (count, 1, 28, 28)."""
    random = np.random.Generator(np.random.PCG64(SEED))
    grey = np.array([0.299, 0.587, 0.114]).reshape(3, 1, 1)
    return np.stack([[_object(random, (grey * each).sum(axis=0))] for each in pictures(count) / 255])


def _object(random: np.random.Generator, texture: Array) -> NDArray[np.uint8]:
    """Return the texture seen through the union of one to four ellipses or rounded rectangles, often symmetric."""
    sides = (1, -1) if random.uniform() < 0.6 else (1,)
    shapes = []
    for _ in range(random.integers(1, 5)):
        (x, y), (wide, high), turn = 8 * random.normal(size=2), random.uniform(3, 20, 2), random.uniform(0, math.pi)
        shapes.append((x, y, turn, wide, high, random.choice([2, 6])))

    def cover(across: Floats, down: Floats) -> Array:
        parts = [
            ((1 - _distance(side * across - x, down[:, None] - y, turn, wide, high, power)) * min(wide, high) + 0.5)
            for x, y, turn, wide, high, power in shapes
            for side in sides
        ]
        return np.asarray(np.maximum.reduce(parts).clip(0, 1))

    at = np.arange(_DRAWN) + 0.5 - SIDE
    seen = cover(at, at) > 0.5
    ends = [at[seen.any(axis=axis)][[0, -1]] for axis in (0, 1)]
    scale = max(last - first + 1 for first, last in ends)
    places = scale * ((np.arange(GREY_SIDE) + 0.5) / GREY_SIDE - 0.5)
    inside = cover(*(places + (first + last) / 2 for first, last in ends))
    margin = (SIDE - GREY_SIDE) // 2
    texture = texture[margin:-margin, margin:-margin]
    shade = (random.uniform(0.2, 0.95) + texture - texture.mean()).clip(0.03, 1)
    return np.asarray((255 * inside * shade).round().astype(np.uint8))


def _distance(across: Floats, down: Floats, turn: float, wide: float, high: float, power: int) -> Array:
    """Return how far out of a shape's middle a place lies, 1 at its edge."""
    along = (np.cos(turn) * across + np.sin(turn) * down) / wide
    aside = (np.cos(turn) * down - np.sin(turn) * across) / high
    return np.asarray((np.abs(along) ** power + np.abs(aside) ** power) ** (1 / power))


def _picture(random: np.random.Generator) -> NDArray[np.uint8]:
    at = np.arange(_DRAWN) + 0.5
    turn = random.uniform(0, 2 * math.pi)
    ramp = (np.cos(turn) * (at - SIDE) + np.sin(turn) * (at[:, None] - SIDE)) / _DRAWN
    canvas = _colour(random) + 0.3 * random.normal() * ramp
    for _ in range(LEAVES):
        _leaf(random, canvas)
    small: Array = canvas.clip(0, 1).reshape(3, SIDE, 2, SIDE, 2).mean(axis=(2, 4))
    return (255 * small).round().astype(np.uint8)


def _leaf(random: np.random.Generator, canvas: Array) -> None:
    """One more on top: an ellipse or a rounded rectangle, its edge sharp or blurred."""
    tail = (_SMALLEST / _LARGEST) ** _DECAY
    radius = _SMALLEST / random.uniform(tail, 1) ** (1 / _DECAY)
    x, y, turn = random.uniform(0, _DRAWN), random.uniform(0, _DRAWN), random.uniform(0, 2 * math.pi)
    longer = math.exp(0.5 * random.normal())
    power = 2 if random.uniform() < 0.6 else 6
    sharp = max(radius / (6 if random.uniform() < 0.3 else 1), 1.0)
    colour, shade, grain = _colour(random), 0.15 * random.normal(), 0.05 * abs(random.normal())
    # Only pixels that it can reach.
    reach = math.sqrt(2) * radius * max(longer, 1 / longer) * (1 + 0.5 / sharp)
    left, right = max(int(x - reach), 0), min(int(x + reach) + 2, _DRAWN)
    top, bottom = max(int(y - reach), 0), min(int(y + reach) + 2, _DRAWN)
    noise = random.normal(size=(bottom - top, right - left))
    across, down = np.arange(left, right) + 0.5 - x, np.arange(top, bottom)[:, None] + 0.5 - y
    along = (np.cos(turn) * across + np.sin(turn) * down) / (radius * longer)
    distance = _distance(across, down, turn, radius * longer, radius / longer, power)
    cover = ((1 - distance) * sharp + 0.5).clip(0, 1)
    part = canvas[:, top:bottom, left:right]
    part += cover * (colour * (1 + shade * along) + grain * noise - part)


def _colour(random: np.random.Generator) -> Array:
    """Light varies most, then blue against yellow and red, green least: roughly the colours of photographs."""
    brightness, red, green, blue = random.normal(size=4)
    tint = np.array([0.09 * red, 0.03 * green, 0.10 * blue]).reshape(3, 1, 1)
    colour: Array = 0.5 + 0.22 * brightness + tint
    return colour
