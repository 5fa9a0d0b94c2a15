"""Small patterns, whitened: maps of one record at a time, with constants that no record has a part in."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator

import pytest
import slow_patches
import torch

from fedspa.data import features, patches
from fedspa.data.features import transform
from fedspa.data.patches import BANKS, GREY_BANKS

FEW = 150


@pytest.fixture(scope="module", autouse=True)
def few_pictures() -> Iterator[None]:
    """Fewer for the constants, which then take a second or two."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patches, "PICTURES", FEW)
        forget()
        yield
    forget()


def forget() -> None:
    patches.constants.cache_clear()
    patches._pictures.cache_clear()


@functools.cache
def photographs() -> torch.Tensor:
    """Five, and not among those that the constants are from, which come first."""
    drawn = patches.pictures(FEW + 5)[FEW:]
    return (torch.from_numpy(drawn).to(torch.float32) / 255 - 0.5) * 4


@functools.cache
def things() -> torch.Tensor:
    """Five grey ones, not among those of the constants either."""
    return (torch.from_numpy(patches.objects(FEW + 5)[FEW:]).to(torch.float32) / 255 - 0.286) / 0.353


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28)])
@pytest.mark.parametrize("alone", [False, True])
def test_a_records_features_are_its_own(alone, shape):
    """What costs no privacy: no record changes a bit of another's features, whatever the chunks and the places."""
    count = 5 if alone else features.CHUNK + 9
    images = torch.rand(count, *shape, generator=torch.Generator().manual_seed(1))
    whole = transform("patches", images, per_example=alone)
    assert len(whole) == count
    for gone in (2, count - 1):
        others = torch.arange(count) != gone
        assert torch.equal(transform("patches", images[others], per_example=alone), whole[others])
    images[2] = float("nan")
    others = torch.arange(count) != 2
    assert torch.equal(transform("patches", images, per_example=alone)[others], whole[others])


def test_chunks_change_features_by_rounding_only():
    images = photographs()
    assert torch.allclose(transform("patches", images), transform("patches", images, per_example=True), atol=1e-5)


def test_they_have_norm_three_and_the_stated_width():
    colour, grey = (photographs(), 9 + 4), (things(), 9 + 9)
    for name, patterns, (images, cells) in (
        ("patches", 64, colour),
        ("patches", 64, grey),
        ("patches-128", 128, colour),
    ):
        found = transform(name, images)
        assert found.shape == (5, 2 * patterns * cells)
        assert torch.allclose(found.norm(dim=1), torch.full((5,), features.NORM), atol=1e-4)


@pytest.mark.parametrize("some", [photographs, things])
def test_they_are_what_their_definition_says(some):
    images = some()[:2]
    slowly = [torch.from_numpy(slow_patches.patches(image.double().numpy())) for image in images]
    assert torch.allclose(transform("patches", images).double(), torch.stack(slowly), atol=2e-4)


def test_a_mirror_image_is_the_same():
    images = photographs()[:2]
    assert torch.allclose(transform("patches", images), transform("patches", images.flip(3)), atol=1e-4)


@pytest.mark.parametrize("bank", [*BANKS, *GREY_BANKS], ids=lambda bank: f"{bank.source.__name__}-{bank.channels}")
def test_whitening_leaves_no_direction_more_than_its_share(bank):
    """Of the pictures that it comes from: λ / (λ + ridge) < 1 in each direction, and near 1 in the largest."""
    made = patches.constants(bank)
    pictures = patches._pictures(bank.channels).float()
    found = (patches._likeness(bank, made.patterns, made.offsets, pictures) - made.means).flatten(1)
    before, after = (torch.linalg.eigvalsh(each.T @ each / len(each)) for each in (found, found @ made.whitening.T))
    assert before[-1] / before[-20] > 10
    assert 0.9 < after[-1] < 1.01
    assert after[-1] / after[-20] < 3


def test_the_pictures_are_always_the_same():
    """What agents upload means something only if all of them map by the same constants."""
    drawn = patches.pictures(3)
    assert drawn.shape == (3, 3, 32, 32)
    digest = hashlib.sha256(drawn.tobytes()).hexdigest()
    assert digest == "3ce73f5f0f7bf3215083490affc793f61cfb390e3e71ad3c0e6a418cce60466f"
    drawn = patches.objects(3)
    assert drawn.shape == (3, 1, 28, 28)
    assert (
        hashlib.sha256(drawn.tobytes()).hexdigest()
        == "395cd5b3921b7742d0d79680b70aee6d4ea8fae5c7b225225fda2c5695b25a90"
    )
