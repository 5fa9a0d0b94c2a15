"""Features of images by a fixed formula, which maps each record by itself.

Such a map costs no privacy. A record's features depend on that record alone, so neighbouring data sets give
neighbouring features, and a model on them has the guarantee that it would have on the pixels. That takes a formula
fixed beforehand: the weights for colour images were chosen on held-out training records of CIFAR-10, a choice that no
guarantee covers (reproduction/log.md). What it buys is a model small enough for the noise (Tramèr and Boneh 2021): the
noise of a private gradient grows with the number of coordinates, and good features make a linear model enough.

    aligned               an image moved, sized and sheared to a standard by its own first and second moments
    orientations          histograms of the direction of the gradient over a grid (HOG, Dalal and Triggs 2005)
    aligned-orientations  both: for handwriting (Liu et al. 2003 compare such features for digits)
    patches               which of 64 small patterns lie where, whitened: for photographs (fedspa.data.patches)
    patches-128           the same with 128 patterns
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from fedspa.data import patches
from fedspa.data.patches import DIRECTIONS, blurred, directions, filtered, gaussian, unit
from fedspa.errors import DataError

Features = Literal["aligned", "orientations", "aligned-orientations", "patches", "patches-128"]
NAMES: tuple[Features, ...] = get_args(Features)

# Images are mapped this many at a time: few enough for a processor's cache, which is where the time goes. A multiple of
# 32, so that no part of a chunk is left over from vector instructions and rounded otherwise than the rest.
CHUNK = 64
# The standard: spread (standard deviation of the ink) over an image's side, and how far scale and slant may be moved.
SPREAD_X, SPREAD_Y = 0.20, 0.22
LEAST_SCALE, LARGEST_SCALE, LARGEST_SLANT = 0.5, 1.8, 1.0
SMALLEST_SIDE = 8
# A linear model's bias sees a constant 1. Beside features of norm 1 it would take half of a clipped gradient.
NORM = 3.0
# Colour images: which maps, pooled over cells of how many pixels, at which weight. Chosen on held-out training records.
BLOCKS = (
    ("brightness", 8, 0.48),
    ("brightness", 4, 0.4),
    ("contrast", 4, 0.5),
    ("colour contrast", 8, 0.375),
    ("colours", 8, 0.3),
)


def transform(name: Features, images: Tensor, *, per_example: bool = False) -> Tensor:
    """Return the features of every image; (records, channels, height, width) in, float32 out.

    Every chunk has the same shape, so that no bit of a record's features depends on which other records there are, or
    on its place among them. That rests on torch's kernels, which treat all places of a chunk alike wherever it was
    tried; else there is rounding, which square roots of small values bring up to some 1e-4. `per_example` maps one at
    a time and needs no trust, for those who promise it (privacy.noise = "exact", and agents of a deployment); it takes
    two to seven times as long.
    """
    if images.ndim != 4 or min(images.shape[2:]) < SMALLEST_SIDE:
        raise DataError(
            f"data.features = {name!r} needs images of at least {SMALLEST_SIDE} by {SMALLEST_SIDE}, "
            f"(channels, height, width); the records of data.name have shape {tuple(images.shape[1:])}"
        )
    if name.startswith("aligned") and images.shape[1] != 1:
        raise DataError(
            f"data.features = {name!r} needs one channel, ink on a background; the records of data.name have "
            f"{images.shape[1]}: use 'orientations'"
        )
    side = patches.SIDES.get(images.shape[1])
    if name.startswith("patches") and images.shape[2:] != (side, side):
        raise DataError(
            f"data.features = {name!r} needs colour images of 32 by 32, (3, 32, 32), or grey ones of 28 by 28, "
            f"(1, 28, 28); the records of data.name have shape {tuple(images.shape[1:])}: use 'orientations'"
        )
    each, size = _MAPS[name], 1 if per_example else CHUNK
    with torch.no_grad():
        return torch.cat([each(_filled(part, size))[: len(part)] for part in torch.split(images, size)])


def _filled(images: Tensor, size: int) -> Tensor:
    """`size` images: these, and blank ones."""
    return torch.cat((images, images.new_zeros(size - len(images), *images.shape[1:])))


def aligned(images: Tensor) -> Tensor:
    """Centre of mass to the middle, spreads to the standard, slant (the shear that makes x and y uncorrelated) to 0."""
    count, _, height, width = images.shape
    background = images.amin(dim=(1, 2, 3), keepdim=True)
    ink = images - background
    across, down = _axis(width, ink), _axis(height, ink)
    columns, rows = ink.sum(dim=(1, 2)), ink.sum(dim=(1, 3))
    mass = columns.sum(dim=1).clamp_min(1e-6)
    # Not by matrix products, which round a row by its place.
    middle_x, middle_y = (columns * across).sum(dim=1) / mass, (rows * down).sum(dim=1) / mass
    from_x, from_y = across - middle_x[:, None], down - middle_y[:, None]
    var_x, var_y = (columns * from_x**2).sum(dim=1) / mass, (rows * from_y**2).sum(dim=1) / mass
    cov = torch.einsum("nhw,nh,nw->n", ink[:, 0], from_y, from_x) / mass
    slant = (cov / var_y.clamp_min(1e-3)).clamp(-LARGEST_SLANT, LARGEST_SLANT)
    upright = (var_x - 2 * slant * cov + slant**2 * var_y).clamp_min(1e-3)
    scale_x = (upright.sqrt() / (SPREAD_X * width)).clamp(LEAST_SCALE, LARGEST_SCALE)
    scale_y = (var_y.sqrt() / (SPREAD_Y * height)).clamp(LEAST_SCALE, LARGEST_SCALE)
    # Where in the old image a pixel of the new one lies, in grid_sample's units of half a side.
    half_x, half_y = (width - 1) / 2, (height - 1) / 2
    map_ = torch.zeros(count, 2, 3, device=ink.device)
    map_[:, 0, 0], map_[:, 0, 1], map_[:, 0, 2] = scale_x, slant * scale_y * half_y / half_x, middle_x / half_x
    map_[:, 1, 1], map_[:, 1, 2] = scale_y, middle_y / half_y
    grid = functional.affine_grid(map_, list(ink.shape), align_corners=True)
    return functional.grid_sample(ink, grid, align_corners=True) + background


def orientations(images: Tensor) -> Tensor:
    """One vector of norm 3 an image. For one channel: 8 directions over cells of 4 by 4 pixels. For three: the parts
    that BLOCKS names, averaged over the image and its mirror image."""
    if images.shape[1] == 1:
        return NORM * _histograms(directions(images), 4)
    if images.shape[1] != 3:
        raise DataError(f"data.features = 'orientations' needs 1 or 3 channels; the records have {images.shape[1]}")
    maps = _colour_maps(images)
    return NORM * unit((_colour_blocks(maps) + _colour_blocks(_mirrored(maps))) / 2)


def _colour_blocks(maps: dict[str, Tensor]) -> Tensor:
    return torch.cat([weight * _block(name, maps[name], cell) for name, cell, weight in BLOCKS], dim=1)


def _block(name: str, maps: Tensor, cell: int) -> Tensor:
    if name == "colours":
        return unit(_centred(_pooled(maps, cell)))
    if name == "contrast":
        # A dark edge on a light ground or the other way round: which of the two hardly matters for a small cell.
        maps = maps[:, : DIRECTIONS // 2] + maps[:, DIRECTIONS // 2 :]
    return _histograms(maps, cell)


def _colour_maps(images: Tensor) -> dict[str, Tensor]:
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    brightness = 0.299 * red + 0.587 * green + 0.114 * blue
    opponents = torch.cat((red - green, blue - (red + green) / 2), dim=1)
    contrast = _local_contrast(torch.cat((brightness, opponents), dim=1))
    return {
        "brightness": directions(brightness),
        "contrast": directions(contrast[:, 0:1]),
        "colour contrast": torch.cat((directions(contrast[:, 1:2]), directions(contrast[:, 2:3])), dim=1),
        "colours": torch.cat((brightness, opponents), dim=1),
    }


def _mirrored(maps: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the maps of the mirror image: what pointed right points left, up and down stay."""
    turned = [(DIRECTIONS // 2 - number) % DIRECTIONS for number in range(DIRECTIONS)]
    mirrored = {}
    for name, each in maps.items():
        flipped = each.flip(3)
        if name != "colours":
            flipped = torch.cat([part[:, turned] for part in torch.split(flipped, DIRECTIONS, dim=1)], dim=1)
        mirrored[name] = flipped
    return mirrored


def _histograms(directions: Tensor, cell: int) -> Tensor:
    """Pooled, the square root (which evens out strong and weak edges), centred, norm 1."""
    return unit(_centred(_pooled(directions, cell).clamp_min(0).sqrt()))


def _pooled(maps: Tensor, cell: int) -> Tensor:
    """Gaussian averages at the centres of a grid of cells, their standard deviation just under half a cell."""
    kernel = gaussian(0.45 * cell)
    return filtered(filtered(maps, kernel, 2, cell // 2, cell), kernel, 3, cell // 2, cell).flatten(2)


def _local_contrast(image: Tensor) -> Tensor:
    """Return the image less its surroundings' mean, over their standard deviation."""
    rest = image - blurred(image, 3.0)
    return rest / (blurred(rest**2, 3.0).clamp_min(0).sqrt() + 0.12)


def _axis(side: int, like: Tensor) -> Tensor:
    return torch.arange(side, device=like.device, dtype=torch.float32) - (side - 1) / 2


def _centred(maps: Tensor) -> Tensor:
    flat = maps.flatten(1)
    return flat - flat.mean(dim=1, keepdim=True)


_MAPS: dict[Features, Callable[[Tensor], Tensor]] = {
    "aligned": aligned,
    "orientations": orientations,
    "aligned-orientations": lambda images: orientations(aligned(images)),
    "patches": lambda images: NORM * patches.patches(images),
    "patches-128": lambda images: NORM * patches.patches(images, 128),
}
