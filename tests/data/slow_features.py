"""`orientations` by its definition: one image at a time, in float64, with scipy's filters."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

Array = NDArray[np.float64]


def orientations(image: Array) -> Array:
    if len(image) == 1:
        return 3 * histograms(directions(image[0]), 4)
    both = (colour_blocks(image) + colour_blocks(image[:, :, ::-1])) / 2
    return 3 * both / np.linalg.norm(both)


def colour_blocks(image: Array) -> Array:
    red, green, blue = image
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    opponents = [red - green, blue - (red + green) / 2]
    edges = directions(local_contrast(grey))
    coloured = np.concatenate([directions(local_contrast(part)) for part in opponents])
    return np.concatenate(
        [
            0.48 * histograms(directions(grey), 8),
            0.4 * histograms(directions(grey), 4),
            0.5 * histograms(edges[:4] + edges[4:], 4),
            0.375 * histograms(coloured, 8),
            0.3 * unit(pooled(np.stack([grey, *opponents]), 8)),
        ]
    )


def directions(image: Array) -> Array:
    # Where nothing changes, rounding must not choose the direction: 0, and not −0.
    right, down = (ndimage.sobel(image, axis, mode="nearest").round(12) / 8 + 0.0 for axis in (1, 0))
    found = np.zeros((8, *image.shape))
    for y, x in np.ndindex(*image.shape):
        length = math.sqrt(right[y, x] ** 2 + down[y, x] ** 2 + 1e-12)
        turn = math.atan2(down[y, x], right[y, x]) / (2 * math.pi) * 8 % 8
        lower = math.floor(turn)
        found[lower % 8, y, x] += length * (1 - (turn - lower))
        found[(lower + 1) % 8, y, x] += length * (turn - lower)
    return found


def local_contrast(image: Array) -> Array:
    rest = image - smooth(image, 3.0)
    return rest / (np.sqrt(smooth(rest**2, 3.0)) + 0.12)


def histograms(maps: Array, cell: int) -> Array:
    return unit(np.sqrt(pooled(maps, cell)))


def pooled(maps: Array, cell: int) -> Array:
    return np.stack([smooth(each, 0.45 * cell)[cell // 2 :: cell, cell // 2 :: cell] for each in maps])


def smooth(image: Array, deviation: float) -> Array:
    reach = math.ceil(3 * deviation)
    return ndimage.gaussian_filter(image, deviation, mode="constant", radius=reach)


def unit(values: Array) -> Array:
    flat = values.flatten() - values.mean()
    return flat / np.linalg.norm(flat)
