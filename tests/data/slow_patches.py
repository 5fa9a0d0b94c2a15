"""`patches` by its definition: one image and one patch at a time, in float64, given the constants."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from slow_features import directions, smooth

from fedspa.data.patches import BANKS, GREY_BANKS, Bank, constants

Array = NDArray[np.float64]


def patches(image: Array) -> Array:
    parts = [bank.share * whitened(bank, image) for bank in (BANKS if len(image) == 3 else GREY_BANKS)]
    return 3 * np.concatenate(parts) / np.linalg.norm(np.concatenate(parts))


def whitened(bank: Bank, image: Array) -> Array:
    made = constants(bank)
    both = rooted(bank, image)
    if len(image) == 3:
        both = (both + rooted(bank, image[:, :, ::-1])) / 2
    found = made.whitening.double().numpy() @ (both - made.means.double().numpy()).ravel()
    return np.asarray(found / np.linalg.norm(found))


def rooted(bank: Bank, image: Array) -> Array:
    maps = image if bank.source.__name__ == "colours" else edges(image)
    made = constants(bank)
    patterns = made.patterns.double().numpy().reshape(len(made.patterns), -1)
    side = maps.shape[1] - bank.size + 1
    found = np.empty((2 * len(patterns), side, side))
    for row in range(side):
        for column in range(side):
            patch = maps[:, row : row + bank.size, column : column + bank.size].ravel()
            patch = patch / (patch.std() + 0.2)  # its mean meets patterns whose mean is 0, but for their rounding
            alike = patterns @ patch + made.offsets.double().numpy()
            found[:, row, column] = np.maximum(np.concatenate((alike, -alike)) - 0.5, 0)
    return np.sqrt(pooled(found, bank.cells, bank.step))


def pooled(maps: Array, cells: int, step: float) -> Array:
    side = maps.shape[1]
    out = np.empty((len(maps), cells, cells))
    for row in range(cells):
        for column in range(cells):
            weights = np.outer(near(side, cells, step, row), near(side, cells, step, column))
            out[:, row, column] = (maps * weights).sum(axis=(1, 2)) / weights.sum()
    return out


def near(side: int, cells: int, step: float, number: int) -> Array:
    middle = (side - 1) / 2 + (number - (cells - 1) / 2) * step
    return np.array([math.exp(-(((at - middle) / (0.45 * step)) ** 2) / 2) for at in range(side)])


def edges(image: Array) -> Array:
    maps = directions(image[0] if len(image) == 1 else np.tensordot([0.299, 0.587, 0.114], image, 1))
    around = np.sqrt(smooth((maps**2).sum(axis=0), 2.0))
    return np.stack([np.sqrt(smooth(each / (around + 0.08), 0.9)[1::2, 1::2]) for each in maps])
