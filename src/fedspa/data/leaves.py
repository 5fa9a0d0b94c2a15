"""Pictures of nothing: dead leaves (Lee, Mumford and Huang 2001), made by a fixed random process.

Shapes of all sizes, each of one colour with a little shade and grain, lie on top of one another. Their edges, and how
features of them vary together, are much like those of photographs. They are nobody's records, so whatever is measured
on them costs no privacy. Drawn in float64 and rounded to the 256 values of a pixel: the same pictures on every machine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]

SEED = 901
SIDE, GREY_SIDE = 32, 28
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
